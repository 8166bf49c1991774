"""What the audited lane reports: findings about memory, the launches seen, and one call's account.

Plain data. Not here: how an access is checked (`memory`), or which findings break the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "read-out-of-bounds",
    "write-out-of-bounds",
    "read-of-other-programs-write",
    "write-over-other-programs-write",
    "double-write",
    "unwritten",
    "uninitialised-read",
    "undefined-lane-used",
]

Program = tuple[int, int, int]
"""`tl.program_id` along axes 0, 1 and 2."""

UNKNOWN_ARGUMENT = "<unknown>"
"""Stands for the argument when an address belongs to no tensor argument of the launch."""


class InstrumentError(RuntimeError):
    """An instrument cannot do its work here; nothing is said about the target."""


@dataclass(frozen=True, slots=True)
class MemoryFinding:
    """One element that a launch touched, or left untouched, against the rules.

    `kind`:
      read-out-of-bounds, write-out-of-bounds: outside the tensor as it was passed; not performed.
      read-of-other-programs-write: `program` read what `other` wrote in the same launch, whichever
        came first here: on a device the order is open.
      write-over-other-programs-write: `program` wrote what `other` had written in the same launch.
      double-write: `program` wrote the element twice, or by two lanes of one store.
      unwritten: an element of a guarded output that is still poison when the call ends.
      uninitialised-read: a load of such an element while it was poison; also of a guarded tensor that an
        earlier call left behind.
      undefined-lane-used: what an active lane stored, addressed or was masked by, or a decision, depends on
        a lane of a load from `argument` that is undefined (masked off, without `other`). `offset` is the
        first such lane's, `use` says what depends on it. One finding a launch: the first.
    `argument`: the kernel's parameter, or UNKNOWN_ARGUMENT (then `offset` is address // itemsize).
    `program`: None for unwritten. `other`: the other program of the two race kinds, else None.
    `offset`: elements of storage from the argument's first element. `extent`: elements of storage
    from its first to one past its last. `launch`: ordinal of the (first such) launch in the call. `use`: of
    undefined-lane-used, for people.
    """

    kind: Kind
    kernel: str
    argument: str
    program: Program | None
    offset: int
    extent: int
    launch: int
    other: Program | None = None
    use: str = ""

    def __str__(self) -> str:
        who = "" if self.program is None else f" by program {self.program}"
        whose = "" if self.other is None else f", other program {self.other}"
        what = f" in {self.use}" if self.use else ""
        return (
            f"{self.kind}: {self.kernel}, {self.argument}[{self.offset}] of {self.extent}{what}{who}{whose}"
            f" (launch {self.launch})"
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `written`: the tensor arguments it stored to in bounds, in parameter order."""

    kernel: str
    grid: tuple[int, int, int]
    programs: int
    written: tuple[str, ...]


class CallAudit:
    """Collects what is found during one call; at most `limit` findings, no two alike.

    Findings are alike if they differ at most in `launch` and `use`. `left_out` counts the findings past the
    limit; those are not compared with one another.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._findings: dict[tuple[object, ...], MemoryFinding] = {}
        self._launches: list[Launch] = []
        self.left_out = 0

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def findings(self) -> tuple[MemoryFinding, ...]:
        return tuple(self._findings.values())

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(self._launches)

    def add(self, finding: MemoryFinding) -> None:
        key = (
            finding.kind,
            finding.kernel,
            finding.argument,
            finding.program,
            finding.offset,
            finding.extent,
            finding.other,
        )
        if key in self._findings:
            return
        if len(self._findings) >= self._limit:
            self.left_out += 1
        else:
            self._findings[key] = finding

    def add_launch(self, launch: Launch) -> None:
        self._launches.append(launch)
