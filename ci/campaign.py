"""A campaign: leases dealt to workers until the budget is spent, failures confirmed, one exit code.

Leases are numbered and dealt in order; verdicts are reported in that same order whoever finished first. So a
longer campaign of the same seed begins with the verdicts of a shorter one, byte for byte, in any number of
workers, and so does one that was stopped and is gone on with. `seconds` only says when to stop dealing;
`leases` says how many to deal.
"""

import queue
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvproof.ci import wire
from kvproof.ci.confirm import Confirmations
from kvproof.ci.events import (
    Confirming,
    Event,
    FailureConfirmed,
    FailureFound,
    Finished,
    LeaseAhead,
    LeaseFinished,
    Reporter,
    Resumed,
    Started,
    WorkerReplaced,
)
from kvproof.ci.floors import shortfalls
from kvproof.ci.folder import Folder
from kvproof.ci.isolation import LeaseRun
from kvproof.ci.process import Limits, Seat, Worker
from kvproof.ci.resume import PlanRecord, VerdictLine
from kvproof.corpus.known import Known
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.model.trace import Trace
from kvproof.properties.failure import HANG, Failure
from kvproof.properties.lanes import Lane
from kvproof.properties.lease import Lease
from kvproof.properties.space import space_for

ALLOCATOR_SHARES = {
    "paged": 3,
    "token": 1,
    "swa": 4,
    "swa-ring": 1,
    "pure-swa": 1,
    "hisparse": 2,
    "hisparse-v4": 2,
    "mamba": 1,
    "page-interleave": 2,
}
LAUNCH_NOTHING = ("token", "pure-swa", "mamba")
"""Kinds without kernels: audited only when nothing else was asked for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fuzz. seconds: stop dealing leases after so long; leases: deal at most so many; one is set.
    gpus: UUIDs, dealt to the seats in turn; none on a CPU."""

    target: str
    allocators: tuple[str, ...]
    lanes: tuple[Lane, ...]
    seed: int
    seconds: float | None
    leases: int | None
    workers: int
    misuse: bool
    longest: int
    limits: Limits = field(default_factory=Limits)
    gpus: tuple[str, ...] = ()

    def record(self) -> PlanRecord:
        """What of it makes two runs one campaign."""
        return PlanRecord(
            target=self.target,
            allocators=self.allocators,
            lanes=tuple(lane.name for lane in self.lanes),
            path="/".join(dict.fromkeys(lane.path for lane in self.lanes)),
            device="/".join(dict.fromkeys(lane.device for lane in self.lanes)),
            seed=self.seed,
            misuse=self.misuse,
            longest=self.longest,
        )

    def turns(self) -> list[tuple[Lane, str]]:
        """The fixed round in which leases go to lanes and allocators, spread evenly."""
        shares = [
            (lane.shares * ALLOCATOR_SHARES[allocator], lane, allocator)
            for lane in self.lanes
            for allocator in self.allocators
            if lane.name != "audited" or allocator not in LAUNCH_NOTHING or len(self.lanes) == 1
        ]
        most = max((share for share, _, _ in shares), default=0)
        return [
            (lane, allocator) for turn in range(most) for share, lane, allocator in shares if share > turn
        ]


@dataclass(slots=True)
class _Totals:
    checked: Counter[str] = field(default_factory=Counter)
    by_allocator: dict[str, Counter[str]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    accepted: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[Failure, Trace, Lane]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    leases: int = 0
    replaced: int = 0

    def add(self, allocator: str, done: wire.LeaseDone | VerdictLine) -> None:
        """Count a verdict."""
        self.leases += 1
        self.checked[f"{allocator}/{done.lane}"] += done.checked
        marks = self.by_allocator.setdefault(allocator, Counter())
        marks.update(done.marks)
        marks["checked"] += done.checked
        self.skipped.update(done.skipped)
        self.accepted.update(done.accepted)
        self.seen.update(done.seen)


class Campaign:
    """Runs a plan, tells its reporters, and comes to an exit code."""

    def __init__(
        self, plan: Plan, known: tuple[Known, ...], reporters: list[Reporter], folder: Folder | None = None
    ) -> None:
        self.plan = plan
        self.results: queue.Queue[_Result] = queue.Queue()
        self.believed: set[str] = set()
        self.journals = None if folder is None else folder.journals
        self._known = known
        self._reporters = reporters
        self._progress = None if folder is None else folder.progress
        self._turns = plan.turns()
        self._lock = threading.Lock()
        self._done_before: frozenset[int] = frozenset()
        self._next = 0
        self._deadline = float("inf")
        self._stopped = False
        self._ready: dict[str, wire.Ready] = {}
        self._totals = _Totals()

    def run(self) -> int:
        """The whole campaign; the exit code. KeyboardInterrupt stops dealing and goes on to the caller."""
        slots = [_Slot(self, number) for number in range(self.plan.workers)]
        with ExitStack() as cleanup:
            for slot in slots:
                cleanup.callback(slot.close)
            self._start(slots[0])
            waiting = self._restore()
            started = time.monotonic() - (0.0 if self._progress is None else self._progress.elapsed)
            if self.plan.seconds is not None:
                self._deadline = started + self.plan.seconds
            for slot in slots:
                slot.start()
            try:
                self._collect(len(slots), started, waiting)
            finally:
                with self._lock:
                    self._stopped = True
        new = self._confirm_all()
        return self._finish(new, time.monotonic() - started)

    def _restore(self) -> "dict[int, tuple[_Dealt, wire.LeaseDone]]":
        """Go on where an earlier run stopped; verdicts of it that are not due yet."""
        progress = self._progress
        if progress is None:
            return {}
        for lane, release in progress.releases.items():
            if lane in self._ready and self._ready[lane].release != release:
                raise InfrastructureError(
                    f"this campaign was begun with {release}, and now it is {self._ready[lane].release}; name"
                    " another folder with --out"
                )
        lanes = {lane.name: lane for lane in self.plan.lanes}
        for line in progress.verdicts:
            self._totals.add(line.allocator, line)
        for fingerprint, (failure, trace, lane_name) in progress.first.items():
            self._totals.first[fingerprint] = (failure, trace, lanes[lane_name])
        self._next = len(progress.verdicts)
        self._done_before = frozenset(progress.waiting)
        self._tell(
            Resumed(
                len(progress.verdicts),
                sum(self._totals.checked.values()),
                len(progress.first),
                len(progress.confirmed),
                progress.elapsed,
                tuple(progress.damage),
            )
        )
        return {number: (self._dealt(number), line.verdict) for number, line in progress.waiting.items()}

    def deal(self) -> "_Dealt | None":
        """The next lease, or None when the budget is spent. Called from every slot's thread."""
        with self._lock:
            plan = self.plan
            while self._next in self._done_before:
                self._next += 1
            # What lies before a verdict that is there already is due, or that verdict would never be.
            late = time.monotonic() >= self._deadline and self._next > max(self._done_before, default=-1)
            if self._stopped or late or (plan.leases is not None and self._next >= plan.leases):
                return None
            number = self._next
            self._next += 1
        return self._dealt(number)

    def _dealt(self, number: int) -> "_Dealt":
        """The lease of this number: it follows from the plan and from what the target can do."""
        plan = self.plan
        lane, allocator = self._turns[number % len(self._turns)]
        ready = self._ready[lane.name]
        space = space_for(ready.capabilities, allocator, misuse=plan.misuse, slow=ready.path == "kernels")
        lease = Lease(number, plan.seed, plan.target, lane.name, space, lane.lease_ops, plan.longest)
        return _Dealt(lane, allocator, lease)

    def _start(self, slot: "_Slot") -> None:
        controls = self._controls(slot.worker(self.plan.lanes[0]))
        for lane in dict.fromkeys(lane for lane, _ in self._turns):
            self._ready[lane.name] = slot.worker(lane).ready
        absent = self._leave_out_absent()
        self._tell(
            Started(
                self.plan.target,
                self._ready,
                tuple(allocator for allocator in self.plan.allocators if allocator not in absent),
                self.plan.seed,
                self.plan.workers,
                controls,
                absent,
            )
        )

    def _leave_out_absent(self) -> tuple[str, ...]:
        """Take out of the round what the target does not have. Which kinds it has in no lane."""
        has = {name: ready.capabilities.allocators for name, ready in self._ready.items()}
        self._turns = [(lane, allocator) for lane, allocator in self._turns if allocator in has[lane.name]]
        there = {allocator for allocators in has.values() for allocator in allocators}
        if not self._turns:
            wanted = ", ".join(self.plan.allocators)
            raise UserError(
                f"{self.plan.target} has no allocator of kind {wanted}; it has {', '.join(sorted(there))}"
            )
        return tuple(allocator for allocator in self.plan.allocators if allocator not in there)

    def _controls(self, worker: Worker) -> tuple[str, ...]:
        """The canary must fail and the quick plants be caught, or nothing this harness says counts."""
        done = worker.insist(wire.RunControls(), wire.ControlsDone)
        if done.missed:
            missed = ", ".join(done.missed)
            raise InfrastructureError(f"the harness is blind: it missed {missed}; run `kvproof doctor`")
        return done.caught

    def _collect(
        self, seats: int, started: float, waiting: "dict[int, tuple[_Dealt, wire.LeaseDone]]"
    ) -> None:
        """Take results as they come, and tell them in order of lease numbers."""
        due = self._totals.leases
        while seats:
            while due in waiting:
                dealt, done = waiting.pop(due)
                self._take(dealt, done, time.monotonic() - started)
                due += 1
            result = self.results.get()
            if result is None:
                seats -= 1
            elif isinstance(result, BaseException):
                raise result
            elif isinstance(result, WorkerReplaced):
                self._totals.replaced += 1
                self._tell(result)
            else:
                dealt, done = result
                waiting[done.lease] = result
                if done.lease != due:
                    self._tell(LeaseAhead(done, dealt.allocator))

    def _take(self, dealt: "_Dealt", done: wire.LeaseDone, elapsed: float) -> None:
        totals = self._totals
        totals.add(dealt.allocator, done)
        # Failures first: a verdict that is on record has its traces.
        for found in done.found:
            fingerprint = found.failure.fingerprint
            if fingerprint not in totals.first:
                trace = wire.trace_of(found.trace)
                totals.first[fingerprint] = (found.failure, trace, dealt.lane)
                self._tell(FailureFound(found.failure, trace, done.lease))
        self._tell(LeaseFinished(done, dealt.allocator, sum(totals.checked.values()), elapsed))

    def _confirm_all(self) -> bool:
        """Every distinct failure in a fresh process of its own; whether any is new."""
        new = False
        before = {} if self._progress is None else self._progress.confirmed
        due = {name: found for name, found in self._totals.first.items() if name not in before}
        for fingerprint, line in before.items():
            new |= line.known is None and not self._only_slow(self._totals.first[fingerprint][0], line.failed)
        at_once = 1 if self.plan.gpus else self.plan.workers
        waiting = Confirmations(self.plan.target, list(due.values()), self.plan.limits, at_once)
        for number, (fingerprint, (failure, _, lane)) in enumerate(due.items(), 1):
            self._tell(Confirming(failure, number, len(due)))
            known = next(
                (entry for entry in self._known if entry.covers(fingerprint, self._release(lane))), None
            )
            confirmed = waiting.result(number - 1)
            new |= known is None and not self._only_slow(failure, confirmed.failed)
            reason = None if known is None else f"{known.judgement}: {known.reason}"
            self._tell(FailureConfirmed(failure, confirmed, reason, self._totals.seen[fingerprint]))
        return new

    def _only_slow(self, failure: Failure, failed: int) -> bool:
        """Whether this is a hang that never came again: the machine may have been too slow for it, so
        that the target stands accused of nothing, and the campaign proves less than it should."""
        if failed or failure.divergence != HANG:
            return False
        self._totals.problems.append(
            f"{failure.fingerprint} hung, and never when replayed: give it more time with --hang-seconds, or"
            " the machine less to do"
        )
        return True

    def _release(self, lane: Lane) -> str:
        return self._ready[lane.name].release

    def _finish(self, new: bool, elapsed: float) -> int:
        totals = self._totals
        capabilities = next(iter(self._ready.values())).capabilities
        # What misuse leaves behind ends most traces early, so marks are not due; some work is.
        due = {} if self.plan.misuse else totals.by_allocator
        checked = sum(totals.checked.values())
        problems = totals.problems + shortfalls(checked, due, capabilities)
        # Calls that one kind lacks are nothing strange: only what is missing everywhere is told.
        asked = [capabilities.lacking(allocator) for allocator in totals.by_allocator]
        lacks = dict.fromkeys(sorted(frozenset.intersection(*asked) if asked else ()), 0)
        exit_code = 1 if new else 3 if problems else 4 if totals.first else 0
        marks: Counter[str] = Counter()
        for reached in totals.by_allocator.values():
            marks.update(reached)
        del marks["checked"]
        self._tell(
            Finished(
                exit_code,
                elapsed,
                totals.leases,
                dict(totals.checked),
                dict(marks),
                {**lacks, **totals.skipped},
                totals.accepted,
                problems,
                totals.replaced,
            )
        )
        return exit_code

    def _tell(self, event: Event) -> None:
        for reporter in self._reporters:
            reporter.report(event)


@dataclass(frozen=True, slots=True)
class _Dealt:
    lane: Lane
    allocator: str
    lease: Lease


_Result = tuple[_Dealt, wire.LeaseDone] | WorkerReplaced | BaseException | None
"""A verdict, a worker that had to be replaced, what ended a slot's thread early, or None: a slot's last
word."""


class _Slot(threading.Thread):
    """One seat of work: takes the next lease, has the lane's worker run it, hands the verdict on."""

    def __init__(self, campaign: "Campaign", number: int) -> None:
        super().__init__(daemon=True)
        self._campaign = campaign
        self._number = number
        self._workers: dict[str, Worker] = {}

    def run(self) -> None:
        """Until nothing is dealt any more."""
        campaign = self._campaign

        def note(why: str) -> None:
            campaign.results.put(WorkerReplaced(why))

        try:
            while (dealt := campaign.deal()) is not None:
                lease = LeaseRun(self.worker(dealt.lane), dealt.lease, campaign.believed, note)
                campaign.results.put((dealt, lease.run()))
            campaign.results.put(None)
        except BaseException as error:  # whatever it is, the campaign's own thread must hear of it
            campaign.results.put(error)

    def worker(self, lane: Lane) -> Worker:
        """This seat's worker for the lane, started on first use."""
        if lane.name not in self._workers:
            plan = self._campaign.plan
            gpu = plan.gpus[self._number % len(plan.gpus)] if plan.gpus else ""
            name = f"seat{self._number}-{lane.name}"
            seat = Seat(self._campaign.journals, name, gpu, plan.limits, allocators=plan.allocators)
            self._workers[lane.name] = Worker(plan.target, lane, seat)
        return self._workers[lane.name]

    def close(self) -> None:
        """End the processes. When the campaign ends early they are at work, and nobody waits for that."""
        # A copy: when the campaign ends early, this seat's thread may be starting another process.
        for worker in list(self._workers.values()):
            worker.close(at_once=self.is_alive())
