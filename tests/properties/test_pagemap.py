"""Page maps: who has each page on either side of the failing op, by contract and by the target's lists."""

from __future__ import annotations

import re

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Answer, State, Ticket
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.pagemap import PageMaps, page_maps
from kvproof.properties.replay import replay
from tests.model.strategies import new
from tests.properties.subjects import PoolTarget, Twist

POOL = Config("paged", 16, 4)


def at(step: int) -> Failure:
    return Failure("P1", "Extend", "paged", "x", step, "m")


def twisted(state: State, call: int, answer: Answer | None = None) -> PoolTarget:
    """The model's answers, and after this call these lists."""
    return PoolTarget(lambda _config: Twist(call, answer, state), exact=True)


def test_a_page_free_and_owned_is_seen_in_the_targets_lists_only():
    target = Planted(Ticket(":pages-not-taken"))
    trace = Trace(POOL, (new(5),))
    (failure,) = replay(target, trace).failures
    assert page_maps(target, trace, failure) == PageMaps(
        before="1-4 free", expected="1-2 row 0 · 3-4 free", actual="1-2 free and row 0 · 3-4 free"
    )


def test_rows_staged_and_deferred_pages_are_told_apart():
    """Rows 0 and 1 take pages 1 and 2, 3; 4 is staged; in the open group row 1's pages wait."""
    config = Config("paged", 16, 4, need_sort=True)
    trace = Trace(
        config, (new(4), new(8), new(1), ops.Free((2,)), ops.GroupBegin(), ops.Free((1,)), ops.Decode((0,)))
    )
    maps = page_maps(Null(Ticket()), trace, at(6))
    assert maps.before == "1 row 0 · 2-3 deferred · 4 staged"
    # The decode needs a page, merges page 4, and takes it.
    assert maps.expected == maps.actual == "1 row 0 · 2-3 deferred · 4 row 0"


def test_lost_and_repeated_pages():
    maps = page_maps(twisted(State([2, 4, 4], []), 0), Trace(POOL, (new(1),)), at(0))
    assert maps.expected == "1 row 0 · 2-4 free"
    assert maps.actual == "1 row 0 · 2 free · 3 nobody · 4 free x2"


def test_pages_outside_the_pool():
    maps = page_maps(twisted(State([0, 2, 3, 4, 9], []), 0), Trace(POOL, (new(1),)), at(0))
    assert maps.actual == "0 free · 1 row 0 · 2-4 free · 9 free"


def test_free_and_staged_at_once():
    maps = page_maps(twisted(State([2, 3, 4], [4]), 0), Trace(POOL, (new(1),)), at(0))
    assert maps.actual == "1 row 0 · 2-3 free · 4 staged and free"


def test_a_window_starts_at_its_own_first_page():
    config = Config("paged", 16, 4, page_offset=1000)
    assert page_maps(Null(Ticket()), Trace(config, (new(1),)), at(0)).before == "1001-1004 free"


def test_a_relation_may_fail_behind_the_last_op():
    maps = page_maps(Null(Ticket()), Trace(POOL, (new(5),)), at(1))
    assert maps.before == maps.expected == maps.actual == "1-2 row 0 · 3-4 free"


def test_a_large_pool_is_cut():
    """Every other page of 200 is a row of its own."""
    trace = Trace(Config("token", 200, 1), (ops.Alloc(1),) * 200 + (ops.Free(tuple(range(0, 200, 2))),))
    before = page_maps(Null(Ticket()), trace, at(200)).before
    assert before.startswith("1 row 0 · 2 row 1 · ")
    assert before.count(" · ") == 40
    assert re.search(r"… 160 more runs\Z", before)
