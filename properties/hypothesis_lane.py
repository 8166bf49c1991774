"""The Hypothesis lane of a campaign: a lease run by the state machine of `machine.py`.

A lease must give the same verdict everywhere, so the machine is seeded, keeps no database and knows no
clock. It stops at its first failure. Hypothesis does not shrink it: its shrinker stops by the clock, after
minutes, and the campaign has one of its own.
"""

import random
from collections import Counter

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvproof.impl.targets.protocol import Target
from kvproof.model.trace import Origin, Trace
from kvproof.properties.lease import Lease, Verdict
from kvproof.properties.machine import machine_for

_STEPS = 30


def run_hypothesis_lease(target: Target, lease: Lease) -> Verdict:
    """Run about `lease.ops` ops as Hypothesis examples of up to 30 steps."""
    verdict = Verdict(lease.number, lease.lane)
    machine = machine_for(target, lease.space)
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
        origin = Origin(target.name, lease.lane, lease.seed, lease.number, 0)
        verdict.add(broken.failure, Trace(broken.trace.config, broken.trace.ops, origin))
    for pair in machine.runs:
        verdict.traces += 1
        verdict.absorb(pair.tally, Counter(pair.model.marks))
    return verdict
