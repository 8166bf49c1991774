"""Running a lease to its end, whatever its traces do to their process.

A trace whose call ends the process (a crash, a hang, memory without end, a lost device) is a finding like any
other: it is taken from the journal, run again in a fresh process, and the lease goes on behind it. A process
that died of something else (somebody killed it) is replaced, and its trace runs again. So a lease comes to
the same verdict however often it was interrupted.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from kvproof.ci import wire
from kvproof.ci.process import Death, Worker, WorkerDied
from kvproof.model.errors import InfrastructureError
from kvproof.model.trace import Origin, Trace
from kvproof.properties.failure import CRASH, HANG, OUT_OF_MEMORY, Failure
from kvproof.properties.lease import Lease

MOST_DEATHS: Final = 6
MOST_HANGS: Final = 1
"""Processes that one lease may cost by its own traces; a lease that has cost so many ends. A hang costs its
limit in seconds as well."""

_MOST_STRIKES: Final = 3
_MOST_KILLS: Final = 20
"""Deaths on one and the same trace that do not come again when it is replayed: of the process itself, and by
somebody else's hand. The next one is taken at its word."""

RUNS_TO_GROW: Final = 4
"""How often a trace is run in one process to see whether it is the one that takes memory and keeps it: when
it is drawn it runs several times as well, varied."""

_STRAY_SIGNALS: Final = ("SIGSEGV", "SIGBUS")

Note = Callable[[str], None]
"""Hears of each process that was replaced, and why, in one line."""


def failure_of(death: Death, path: str) -> Failure | None:
    """The failure that a death is, if it was the trace's; None when no op had been announced.

    path: the one the target is on. A death on its other path breaks the relation between the two (P16). A
    stray access is P7; whatever else keeps a lawful call from answering is P6.
    """
    entry = death.entry
    if entry is None:
        return None
    divergence = {"hang": HANG, "out-of-memory": OUT_OF_MEMORY}.get(death.kind, f"{CRASH} {death.how}")
    property_id = "P7" if death.how in _STRAY_SIGNALS else "P6"
    op = type(entry.ops[-1]).__name__ if entry.ops else "Build"
    if divergence == OUT_OF_MEMORY:
        op = "Trace"  # memory adds up: the call under which it is noticed need not be to blame
    if entry.path != path:
        property_id, op = "P16", f"path-{entry.path}"
    step = max(0, len(entry.ops) - 1)
    return Failure(property_id, op, entry.config.allocator, divergence, step, f"the process is gone: {death}")


class LeaseRun:
    """One lease on one worker. believed: fingerprints of deaths that came again when replayed; shared, added
    to."""

    def __init__(self, worker: Worker, lease: Lease, believed: set[str], note: Note) -> None:
        self._worker = worker
        self._lease = lease
        self._believed = believed
        self._note = note
        self._parts: list[wire.LeaseDone] = []
        self._first = 0
        self._left = lease.ops
        self._lost = False
        self._deaths = 0
        self._hangs = 0
        self._strikes: Counter[str] = Counter()
        self._once: tuple[Failure, Trace] | None = None

    def run(self) -> wire.LeaseDone:
        """The verdict. Raises InfrastructureError when the worker cannot be kept alive, or not be loaded
        anew."""
        while self._left > 0 and self._deaths < MOST_DEATHS and self._hangs < MOST_HANGS:
            self._lost = False
            try:
                self._worker.ask(
                    wire.RunLease(self._lease, self._first, self._left), wire.LeaseEnd, self._take
                )
            except WorkerDied as died:
                if not self._lost:
                    self._judge(died.death)
                    continue
            if not self._lost:
                if self._left > 0 and self._lease.lane != "hypothesis":
                    raise InfrastructureError(
                        f"lease {self._lease.number}: its worker says that it is at an end with"
                        f" {self._left} ops left; does the target write to the worker's pipes?"
                    )
                break
            self._deaths += 1
            self._worker.revive()
        return wire.joined(self._lease.number, self._lease.lane, self._parts)

    def _take(self, done: wire.TraceDone) -> None:
        if self._once is not None:
            # It has crashed here, and now it has not: nobody dies of a signal of its own for want of time, so
            # that is told, with how seldom it comes again.
            self._add(*self._once, traces=0)
            self._once = None
        self._parts.append(done.part)
        self._first += done.part.traces
        self._left = done.left
        self._lost = done.lost
        # A lease of Hypothesis begins anew when it is interrupted, so it is always at the same trace.
        if self._lease.lane != "hypothesis":
            self._strikes.clear()

    def _judge(self, death: Death) -> None:
        """Whose fault it was, and where to go on."""
        worker = self._worker
        worker.revive()
        failure = failure_of(death, worker.ready.path)
        if failure is None or death.entry is None:
            self._strike(death, "no call was on its way")
            return
        origin = Origin(
            worker.ready.name, self._lease.lane, self._lease.seed, self._lease.number, self._first
        )
        trace = Trace(death.entry.config, death.entry.ops, origin)
        if failure.fingerprint not in self._believed:
            if self._comes_again(failure, trace):
                self._believed.add(failure.fingerprint)
            else:
                if death.kind == "crash":
                    self._once = self._once or (failure, trace)
                if self._strike(death, "its trace passes when replayed"):
                    return
        self._once = None
        self._deaths += 1
        self._hangs += death.kind == "hang"
        self._add(failure, trace, traces=1)
        self._first += 1
        # A lease of Hypothesis ends with its first failure.
        self._left = 0 if self._lease.lane == "hypothesis" else self._left - max(1, len(trace.ops))
        self._strikes.clear()

    def _add(self, failure: Failure, trace: Trace, *, traces: int) -> None:
        part = wire.joined(self._lease.number, self._lease.lane, ())
        line = wire.FoundLine(failure, wire.text_of(trace))
        self._parts.append(
            msgspec.structs.replace(part, traces=traces, seen={failure.fingerprint: 1}, found=[line])
        )

    def _comes_again(self, failure: Failure, trace: Trace) -> bool:
        try:
            times = RUNS_TO_GROW if failure.divergence == OUT_OF_MEMORY else 1
            self._worker.insist(wire.Replay(wire.text_of(trace), times, failure), wire.Replayed)
        except WorkerDied as died:
            self._worker.revive()
            again = failure_of(died.death, self._worker.ready.path)
            return again is not None and again.fingerprint == failure.fingerprint
        return False

    def _strike(self, death: Death, why: str) -> bool:
        """Run the trace again in a fresh process. False when it has had its chances: then it is taken for
        what it looks like. Raises InfrastructureError where that would accuse the wrong one."""
        self._strikes[death.kind] += 1
        times = self._strikes[death.kind]
        where = f"lease {self._lease.number}, trace {self._first}"
        if self._lease.lane == "hypothesis":
            self._parts, self._first, self._left = [], 0, self._lease.ops
        if times <= (_MOST_KILLS if death.kind == "killed" else _MOST_STRIKES):
            self._note(f"a worker was replaced at {where}: {death}; {why}, so it runs again")
            return True
        # That the process ended so with this trace as its first is no small thing. Whoever kills processes,
        # however, is not to be found in them.
        if death.kind != "killed" and death.entry is not None:
            return False
        raise InfrastructureError(
            f"{where}: {times} workers ended there ({death}), but {why}; find out who ends kvproof's"
            " processes"
        )
