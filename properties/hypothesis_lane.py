"""The Hypothesis lane of a campaign: a lease run by the state machine of `machine.py`.

A lease must give the same verdict everywhere, so the machine is seeded, keeps no database and knows no
clock. It stops at its first failure. Hypothesis does not shrink it: its shrinker stops by the clock, after
minutes, and the campaign has one of its own.
"""

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvproof.impl.targets.protocol import Target
from kvproof.model.trace import Origin, Trace
from kvproof.properties.lease import Lease, Tell, Verdict
from kvproof.properties.machine import AllocatorMachine, PropertyBroken, machine_for

_STEPS = 30


def run_hypothesis_lease(target: Target, lease: Lease, *, tell: Tell | None = None) -> Verdict:
    """Run about `lease.ops` ops as Hypothesis examples of up to 30 steps.

    tell: hears of each example as it ends, and of the failure behind them. A lease of this lane ends with its
    first failure, so nothing goes on behind one.
    """
    verdict = Verdict(lease.number, lease.lane)

    def take(part: Verdict) -> None:
        verdict.merge(part)
        if tell is not None:
            tell(part, 0)

    machine = _telling(machine_for(target, lease.space), lease, take)
    number = random.Random(f"{lease.seed}/{lease.lane}/{lease.number}").getrandbits(64)
    runner = settings(
        max_examples=max(1, lease.ops // _STEPS),
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(machine), settings=runner)
    except Exception:
        # Hypothesis runs a failing example again; where the first run took the device with it, the second
        # fails otherwise, and Hypothesis complains of that.
        if not machine.broken:
            raise
    for broken in machine.broken[:1]:
        take(_told(target, lease, broken))
    return verdict


def _told(target: Target, lease: Lease, broken: PropertyBroken) -> Verdict:
    """A failure as a part of a verdict."""
    origin = Origin(target.name, lease.lane, lease.seed, lease.number, 0)
    part = Verdict(lease.number, lease.lane)
    part.add(broken.failure, Trace(broken.trace.config, broken.trace.ops, origin))
    return part


def _telling(
    machine: type[AllocatorMachine], lease: Lease, take: Callable[[Verdict], None]
) -> type[AllocatorMachine]:
    """The machine, telling what each example came to as it ends, and going on behind what is tolerable."""

    class Telling(machine):  # type: ignore[misc, valid-type]
        def breaks(self, broken: PropertyBroken) -> None:
            if not broken.failure.tolerable:
                super().breaks(broken)
            take(_told(self.target, lease, broken))

        def teardown(self) -> None:
            for pair in self.runs:
                part = Verdict(lease.number, lease.lane, traces=1)
                part.absorb(pair.tally, Counter(pair.model.marks))
                take(part)
            self.runs.clear()

    return Telling
