"""Replaying: a trace shows again what it showed, by the same name, and nothing else is asked of it."""

from __future__ import annotations

import pytest

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.planted.target import Canary, Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.replay import Shrunk, find, is_misuse, is_relation, replay, shrink
from tests.model.strategies import new
from tests.properties.page_pool import PagePool, front
from tests.properties.subjects import PoolTarget

POOL = Config("paged", 16, 4)
CLEAN = Trace(POOL, (new(5, 3), ops.Free((0,)), new(1)))
# Page 1 is freed and nobody has taken it since.
DOUBLE_FREE = Trace(POOL, (new(4), new(4), ops.Free((0,)), ops.Misuse("double-free")))
FORGETS = Planted(Ticket(":pages-not-taken"))


class _Forgetful(PagePool):
    """Hands a batch of several rows out as it should, but says nothing of their pages to the list."""

    def extend(self, prefix_lens, seq_lens, last_locs):
        kept = list(self.free)
        slots = super().extend(prefix_lens, seq_lens, last_locs)
        if len(seq_lens) > 1:
            self.free = kept
        return slots


def test_a_trace_that_passes_shows_nothing():
    result = replay(Null(Ticket()), CLEAN)
    assert (result.failures, result.tally.checked) == ([], 3)


def test_a_trace_that_fails_shows_it_every_time():
    (one,), (two,) = replay(FORGETS, CLEAN).failures, replay(FORGETS, CLEAN).failures
    assert one == two
    assert (one.property_id, one.op, one.step) == ("P1", "Extend", 0)
    assert find(FORGETS, CLEAN, one) == one


def test_another_failure_is_not_the_one_looked_for():
    (failure,) = replay(FORGETS, CLEAN).failures
    assert find(Canary(Ticket()), CLEAN, failure) is None
    assert find(Null(Ticket()), CLEAN, failure) is None


def test_relations_are_asked_of_a_trace_that_passes():
    """The trace has no batch; only another way of running it, row by row or joined, can show the fault."""
    joined = Trace(POOL, (new(1, 1),))
    target = PoolTarget(lambda config: _Forgetful(config, front))
    assert replay(target, joined).failures[0].op == "Extend"

    apart = Planted(Ticket(":order-of-birth"))
    assert replay(apart, Trace(POOL, (new(4),)), relations=False).failures == []
    found = replay(apart, Trace(POOL, (new(4),))).failures
    assert found
    assert all(is_relation(failure.op) for failure in found)
    assert "P14" in {failure.property_id for failure in found}
    for failure in found:
        again = find(apart, Trace(POOL, (new(4),)), failure)
        assert again is not None
        assert again.fingerprint == failure.fingerprint


@pytest.mark.parametrize(("op", "relation"), [("Extend", False), ("rows-one-by-one", True), ("", False)])
def test_relations_are_told_from_ops_by_their_spelling(op, relation):
    assert is_relation(op) is relation


def test_a_misuse_that_was_taken_is_a_failure_when_replayed():
    target = PoolTarget(lambda config: PagePool(config, front))
    (failure,) = replay(target, DOUBLE_FREE).failures
    assert is_misuse(failure)
    assert failure.divergence == "misuse-corrupts double-free"
    assert failure.step == 3
    assert find(target, DOUBLE_FREE, failure) == failure
    # In a campaign the same is a line in the report, unless the target promised to refuse.
    result = replay(target, DOUBLE_FREE, misuse_fails=False)
    assert result.failures == []
    assert list(result.tally.accepted) == ["double-free"]


def test_a_shrunk_trace_shows_the_same_failure():
    longer = Trace(
        Config("paged", 64, 4, need_sort=True), (new(7), ops.Free((0,)), new(5, 9), ops.Decode((0,)))
    )
    (failure,) = replay(FORGETS, longer).failures
    small, runs, lost = shrink(FORGETS, longer, failure)
    assert (small.config, small.ops) == (Config("paged", 1, 1), (new(1),))
    assert runs > 1
    assert not lost
    again = find(FORGETS, small, failure)
    assert again is not None
    assert again.fingerprint == failure.fingerprint


def test_a_failure_that_never_comes_again_is_not_shrunk():
    other = Failure("P3", "Extend", "paged", "padding-page", 0, "m")
    assert shrink(FORGETS, CLEAN, other) == Shrunk(CLEAN, 1, lost=False)
