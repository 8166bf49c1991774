"""Leases and verdicts: the unit of work, and what it comes to.

A lease says everything: the same lease gives the same verdict on any machine, in any number of workers. So
its budget is ops, not seconds, and a verdict holds no times.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvproof.impl.targets.protocol import Target
from kvproof.model.marks import Mark
from kvproof.model.ops import Op
from kvproof.model.trace import Origin, Trace
from kvproof.properties.draw import Draw, SeededDraw
from kvproof.properties.failure import Failure, Found
from kvproof.properties.generate import Generator
from kvproof.properties.lockstep import Tally
from kvproof.properties.relations import RELATIONS, check_paths, check_relation
from kvproof.properties.run import Result, lockstep_for, run_trace
from kvproof.properties.space import WIDE_OPS, Space, draw_config

# Most traces are short, most ops are in long ones.
_LENGTHS = (1,) * 2 + (3,) * 3 + (10,) * 6 + (30,) * 8 + (100,) * 7 + (300,) * 4 + (1000, 3000)
_WIDE_TRACE = 3
_WIDE_EVERY = 64
"""Which traces of a lease are wide: few are, since each of its ops costs as much as a hundred others."""
_LOOK_EVERY = 8
_RELATE_EVERY = 8


@dataclass(frozen=True, slots=True)
class Lease:
    """number: its place in the campaign. seed: of the campaign. lane, target: as in a trace's origin.
    ops: budget, in calls of the generator. longest: ops in one trace at most."""

    number: int
    seed: int
    target: str
    lane: str
    space: Space
    ops: int
    longest: int = 3000


@dataclass(slots=True)
class Verdict:
    """What one lease came to.

    found: the first of each fingerprint, in order, cut behind the failing op. seen: how often each came.
    lost: the last failure took the device with it; the lease ends there, and the process must.
    """

    lease: int
    lane: str
    traces: int = 0
    relations: int = 0
    tally: Tally = field(default_factory=Tally)
    marks: Counter[Mark] = field(default_factory=Counter)
    found: dict[str, Found] = field(default_factory=dict)
    lost: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, failure: Failure, trace: Trace) -> None:
        """Count the failure; keep its trace when it is the first of its kind. A lost device ends the lease,
        whether the trace itself, its second look or a relation lost it."""
        self.lost = self.lost or failure.lost
        self.seen[failure.fingerprint] += 1
        if failure.fingerprint not in self.found:
            cut = replace(trace, ops=trace.ops[: failure.step + 1])
            self.found[failure.fingerprint] = Found(failure, cut)

    def merge(self, part: "Verdict") -> None:
        """Add what more traces of the same lease came to."""
        self.traces += part.traces
        self.relations += part.relations
        self.absorb(part.tally, part.marks)
        self.seen.update(part.seen)
        for fingerprint, found in part.found.items():
            self.found.setdefault(fingerprint, found)
        self.lost = self.lost or part.lost

    def absorb(self, tally: Tally, marks: Counter[Mark]) -> None:
        """Add what one run did."""
        mine = self.tally
        mine.checked += tally.checked
        mine.idle += tally.idle
        mine.skipped.update(tally.skipped)
        mine.accepted.update(tally.accepted)
        self.marks.update(marks)


Tell = Callable[[Verdict, int], None]
"""Is told what one trace came to, and how many ops of the lease are left behind it."""


def run_lease(
    target: Target, lease: Lease, *, first: int = 0, left: int | None = None, tell: Tell | None = None
) -> Verdict:
    """Draw and run traces until the lease's ops are spent. Raises what a target raises outside calls.

    first, left: go on with this trace, with so many ops left; a lease that goes on behind a trace comes to
    what it would have come to without the break. tell: hears of each trace as it ends.
    """
    verdict = Verdict(lease.number, lease.lane)
    left = lease.ops if left is None else left
    number = first
    while left > 0 and not verdict.lost:
        draw = SeededDraw(f"{lease.seed}/{lease.lane}/{lease.number}/{number}")
        length = min(draw.choice(_LENGTHS), left, lease.longest)
        part = Verdict(lease.number, lease.lane, traces=1)
        left -= max(1, _run_one(target, lease, number, draw, length, part))
        verdict.merge(part)
        if tell is not None:
            tell(part, left)
        number += 1
    return verdict


def _run_one(target: Target, lease: Lease, number: int, draw: Draw, length: int, verdict: Verdict) -> int:
    """One trace, drawn as it runs. The number of ops it took."""
    wide = number % _WIDE_EVERY == _WIDE_TRACE
    config = draw_config(draw, lease.space, wide=wide)
    if wide:
        length = WIDE_OPS
    pair = lockstep_for(target, config, look_every=_LOOK_EVERY)
    generator = Generator(draw, pair.model, lease.space)
    relate = number % _RELATE_EVERY == 0
    if relate:
        pair.answers = []
    origin = Origin(target.name, lease.lane, lease.seed, lease.number, number)
    drawn: list[Op] = []
    failures: list[Failure] = []
    while len(drawn) < length and not pair.spoilt:
        op = generator.next_op()
        drawn.append(op)
        failure = pair.step(op)
        if failure is not None:
            failures.append(failure)
    if (failure := pair.finish()) is not None:
        failures.append(failure)
    trace = Trace(config, tuple(drawn), origin)
    verdict.absorb(pair.tally, Counter(pair.model.marks))
    serious = [failure for failure in failures if not failure.tolerable]
    # What only a look at the mappings shows may be older than the op that it was seen at.
    late = any(failure.tolerable and failure.property_id == "P10" for failure in failures)
    if (serious or late) and not (serious and serious[-1].lost):
        _explain(target, trace, failures, verdict)
        return len(drawn)
    for failure in failures:
        verdict.add(failure, trace)
    if relate and not serious and not lease.space.misuse:
        _relate(
            target,
            trace,
            Result([], pair.tally, answers=pair.answers, peers=dict(pair.peers)),
            number,
            verdict,
        )
    return len(drawn)


def _explain(target: Target, trace: Trace, failures: list[Failure], verdict: Verdict) -> None:
    """Find the first step that shows each fault: the lists were only looked at now and then."""
    close = run_trace(target, trace)
    for failure in close.failures or failures:
        verdict.add(failure, trace)


def _relate(target: Target, trace: Trace, result: Result, number: int, verdict: Verdict) -> None:
    relation = RELATIONS[number // _RELATE_EVERY % len(RELATIONS)]
    found = check_relation(target, trace, result, relation) or check_paths(target, trace, result)
    verdict.relations += 1
    if found is not None:
        verdict.add(found.failure, found.trace)
