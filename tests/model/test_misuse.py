"""Each misuse, made concrete in a state worked out by hand, and where a state has nothing to misuse."""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from kvproof.model.base import AllocatorModel, Outcome
from kvproof.model.ops import MISUSES
from tests.model.strategies import fresh, lists, new, outcomes, rows


def used_paged() -> AllocatorModel:
    """Four pages of 4. Row A: 6 tokens on pages 1, 2, last slot 9. Page 3 is B's, page 4 is free."""
    model = fresh(4, 4)
    model.apply(new(6, 3))
    return model


PAGED = {
    # One page of the free list, all of its slots.
    "double-free": calls.FreeCall([16, 17, 18, 19]),
    # A's first slot, whose page holds three more.
    "free-part-of-live-page": calls.FreeCall([4]),
    "free-padding-page": calls.FreeCall([0]),
    # Pages are 1 … 4, so page 5 is not of the pool: slot 20.
    "free-out-of-range": calls.FreeCall([20]),
    "free-pages-twice": calls.FreePageIdsCall([2, 2]),
    "unaligned-alloc": calls.AllocCall(5),
    "negative-alloc": calls.AllocCall(-4),
    "end-without-begin": calls.GroupEndCall(),
    "unaligned-segment": calls.FreeSegmentCall([5, 6, 7, 8, 9], 1),
    "segments-share-page": calls.FreeSegmentsCall([([4, 5, 6, 7], 0), ([4, 5, 6, 7], 0)]),
    # (9 + 1) % 4 = 6 % 4 is right; 8 is one off.
    "incongruent-last-loc": calls.ExtendCall([6], [7], [8], 1, 0),
}

TOKEN = {
    "double-free": calls.FreeCall([4]),
    "free-padding-page": calls.FreeCall([0]),
    "free-out-of-range": calls.FreeCall([5]),
    "free-pages-twice": calls.FreePageIdsCall([2, 2]),
    "negative-alloc": calls.AllocCall(-1),
    "end-without-begin": calls.GroupEndCall(),
    "segments-share-page": calls.FreeSegmentsCall([([1], 0), ([1], 0)]),
}


def fields(call: calls.Call) -> tuple[object, ...]:
    return type(call), *(getattr(call, name) for name in type(call).__slots__)


@pytest.mark.parametrize("kind", MISUSES)
@pytest.mark.parametrize("allocator", ["paged", "token"])
def test_the_call_is_the_forbidden_one_and_must_be_refused(allocator, kind):
    if allocator == "paged":
        model, known = used_paged(), PAGED
    else:
        model, known = fresh(4, 1, "token"), TOKEN
        model.apply(new(2, 1))
    before = lists(model), rows(model)
    expectation = model.apply(ops.Misuse(kind))
    if kind in known:
        assert expectation.outcome is Outcome.REFUSED
        assert fields(expectation.call) == fields(known[kind])
    else:
        assert expectation.outcome is Outcome.NOTHING
    assert (lists(model), rows(model)) == before
    assert expectation.available == model.available == (4 if allocator == "paged" else 1)


def test_only_a_second_begin_needs_an_open_group():
    model = fresh(2, 4)
    nested, end = ops.Misuse("nested-begin"), ops.Misuse("end-without-begin")
    assert outcomes(model, nested, end, ops.GroupBegin(), nested, end, ops.GroupEnd(), nested, end) == [
        "no call",
        "refused",
        "done",
        "refused",
        "no call",
        "done",
        "no call",
        "refused",
    ]


@pytest.mark.parametrize(
    "kind",
    sorted({*MISUSES} - {"free-padding-page", "free-out-of-range", "negative-alloc", "end-without-begin"}),
)
def test_without_rows_and_free_pages_there_is_nothing_to_misuse(kind):
    model = fresh(1, 4)
    # One deferred page: nothing free, nobody live, a group open (so that a begin would be possible).
    outcomes(model, new(2), ops.GroupBegin(), ops.Free((0,)))
    assert outcomes(model, ops.Misuse(kind)) == ["refused" if kind == "nested-begin" else "no call"]


def test_the_row_is_an_ordinal_and_a_page_of_the_list_for_a_double_free():
    model = used_paged()
    call = model.apply(ops.Misuse("unaligned-segment", 3)).call  # 3 modulo 2 rows: B on page 3
    assert isinstance(call, calls.FreeSegmentCall)
    assert call.slots == [13, 14]
    model.apply(ops.Free((0,)))  # the list is [1, 2, 4]
    call = model.apply(ops.Misuse("double-free", 4)).call  # 4 modulo 3: the second
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [8, 9, 10, 11]


def test_a_staged_page_is_freed_again_where_the_list_is_empty():
    model = fresh(1, 4, need_sort=True)
    outcomes(model, new(2), ops.Free((0,)))
    call = model.apply(ops.Misuse("double-free")).call
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [4, 5, 6, 7]


def test_a_full_row_with_a_wrong_last_loc_is_right_in_all_else():
    model = fresh(3, 4)
    model.apply(new(4))
    # The row's page 1 ends with slot 7; the fifth token takes one page.
    call = model.apply(ops.Misuse("incongruent-last-loc")).call
    assert fields(call) == fields(calls.ExtendCall([4], [5], [6], 1, 1))


def test_a_window_has_its_own_range():
    # Window pages are 101 and 102: 103 is not of it, slot 412.
    call = fresh(2, 4, page_offset=100).apply(ops.Misuse("free-out-of-range")).call
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [412]
