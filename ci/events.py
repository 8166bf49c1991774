"""What a campaign tells while it runs. One reporter a file consumes them; see `terminal.py`, `folder.py`."""

from dataclasses import dataclass, field
from typing import Protocol

from kvproof.ci.wire import Confirmed, LeaseDone, Ready
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure


@dataclass(frozen=True, slots=True)
class Started:
    """The target is loaded in every lane. allocators: the kinds that are fuzzed; absent: those that were
    asked for and that it does not have. controls: planted faults that were caught, by name."""

    target: str
    ready: dict[str, Ready]
    allocators: tuple[str, ...]
    seed: int
    workers: int
    controls: tuple[str, ...]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resumed:
    """An earlier run of this campaign is gone on with. leases, checked, failures, confirmed: how far it came;
    elapsed: in how many seconds; damage: what of it could not be used, and runs again."""

    leases: int
    checked: int
    failures: int
    confirmed: int
    elapsed: float
    damage: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseAhead:
    """A verdict that came before its turn: it is told by LeaseFinished once it is due."""

    verdict: LeaseDone
    allocator: str


@dataclass(frozen=True, slots=True)
class LeaseFinished:
    """A verdict, in order of lease numbers. checked: ops so far; elapsed: seconds so far."""

    verdict: LeaseDone
    allocator: str
    checked: int
    elapsed: float


@dataclass(frozen=True, slots=True)
class FailureFound:
    """The first failure with its fingerprint."""

    failure: Failure
    trace: Trace
    lease: int


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """A worker's process ended for no fault of the target that could be shown. why: one line."""

    why: str


@dataclass(frozen=True, slots=True)
class Confirming:
    """A failure is about to be replayed and shrunk. number: of so many, from 1."""

    failure: Failure
    number: int
    of: int


@dataclass(frozen=True, slots=True)
class FailureConfirmed:
    """Replayed in a fresh process and shrunk. known: the reviewed reason, when it is a known fault."""

    failure: Failure
    confirmed: Confirmed
    known: str | None
    seen: int


@dataclass(slots=True)
class Finished:
    """The end. checked: ops by allocator and lane; problems: why this campaign proves less than it should.
    replaced: processes that ended on a trace that passes when replayed."""

    exit_code: int
    elapsed: float
    leases: int
    checked: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    replaced: int = 0


Event = (
    Started
    | Resumed
    | LeaseAhead
    | LeaseFinished
    | FailureFound
    | WorkerReplaced
    | Confirming
    | FailureConfirmed
    | Finished
)


class Reporter(Protocol):
    """Consumes events in order, in the command line's own thread."""

    def report(self, event: Event) -> None:
        """Take one event."""
        ...
