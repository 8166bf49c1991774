"""Running one trace: where it stops, what it goes on behind, and what it brings back."""

from __future__ import annotations

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Answer, Damage, Ticket
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.marks import Mark
from kvproof.model.trace import Trace
from kvproof.properties.run import run_trace
from tests.model.strategies import new
from tests.properties.subjects import PoolTarget, Twist

POOL = Config("paged", 16, 4)
READ = (Damage("read-out-of-bounds", "k.free_pages", "by hand"),)


def test_a_clean_run():
    result = run_trace(Null(Ticket()), Trace(POOL, (new(16), ops.Free((0,)), ops.GroupEnd())), record=True)
    assert (result.failures, result.answers) == ([], [list(range(4, 20)), None])
    assert (result.tally.checked, result.tally.idle) == (2, 1)
    assert result.marks[Mark.EXACT_EXHAUSTION] == 1
    assert run_trace(Null(Ticket()), Trace(POOL, (new(1),))).answers is None


def test_it_stops_at_a_failure_and_goes_on_behind_a_tolerable_one():
    stray = PoolTarget(lambda _config: Twist(0, Answer(None, None, 16, damage=READ)))
    trace = Trace(POOL, (new(17), new(2), new(17)))
    result = run_trace(stray, trace)
    assert [(failure.step, failure.tolerable) for failure in result.failures] == [(0, True)]
    assert result.tally.checked == 3

    wrong = PoolTarget(lambda _config: Twist(1, Answer([0, 1], available=12)))
    result = run_trace(wrong, trace)
    assert [(failure.step, failure.tolerable) for failure in result.failures] == [(1, False)]
    assert result.tally.checked == 2
    assert result.get(result.failures[0].fingerprint) is not None
    assert result.get("00000000") is None


def test_the_allocator_is_fresh_each_time():
    trace = Trace(POOL, (new(16),))
    target = Null(Ticket())
    assert run_trace(target, trace).failures == run_trace(target, trace).failures == []
