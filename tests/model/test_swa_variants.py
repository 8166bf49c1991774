"""The ring and the pure variant of section 5, in examples worked out from its text."""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from tests.model.strategies import fresh, lists, new, outcome, outcomes, rows


def ring(pages: int = 4):
    """Pages of 4; each of 3 free request rows has a ring of 5 tokens."""
    return fresh(pages, 4, "swa-ring", ring=5, request_rows=3)


def pure(slots: int = 6, **options):
    return fresh(slots, 1, "pure-swa", **options)


# --- ring -----------------------------------------------------------------------------------------


def test_the_capacity_of_rings_is_rows_times_whole_pages():
    model = ring()
    # ceil(5) = 8 tokens for each of 3 rows.
    assert (model.available, model.sizes) == (16, {"full": 16, "swa": 24})
    model.apply(new(5))
    assert (model.available, model.sizes) == (8, {"full": 8, "swa": 24})


def test_the_mapping_stays_empty():
    model = ring()
    assert outcomes(model, new(5), ops.Decode((0,)), ops.ExtendTail(0, 2, 1)) == [
        [4, 5, 6, 7, 8],
        [9],
        [10, 11],
    ]
    assert model.mappings["swa"] == [0] * 20 + [-1]  # 16 + 4 entries and the last
    assert model.sides == {}


def test_a_tail_is_a_plain_extend():
    model = ring()
    call = model.apply(ops.ExtendTail(-1, 6, 3)).call
    assert isinstance(call, calls.ExtendCall)
    assert (call.tail, call.tokens, call.pages, lists(model)) == (3, 6, 2, ([3, 4], []))
    assert outcomes(model, ops.ExtendTail(-1, 9, 0)) == ["None"]


@pytest.mark.parametrize(
    ("op", "method"), [(ops.FreeSwa(0), "free_swa"), (ops.FreeSwaSegment(0), "free_swa_segment")]
)
def test_releases_of_the_ring_do_nothing(op, method):
    model = ring()
    model.apply(new(5))
    call = model.apply(op).call
    assert isinstance(call, calls.FreeCall | calls.FreeSegmentCall)
    assert (call.method, call.slots) == (method, [4, 5, 6, 7, 8])
    assert (lists(model), rows(model)) == (([3, 4], []), [([1, 2], 5)])


@pytest.mark.parametrize(
    ("op", "method"),
    [
        (ops.Free((0,)), "free"),
        (ops.FreeFull(0), "free_full"),
        (ops.FreeSegment(0), "free_segment"),
        (ops.FreeFullSegment(0), "free_full_segment"),
    ],
)
def test_all_others_release_the_full_side(op, method):
    model = ring()
    model.apply(new(5))
    call = model.apply(op).call
    assert isinstance(call, calls.FreeCall | calls.FreeSegmentCall)
    assert (call.method, call.slots) == (method, [4, 5, 6, 7, 8])
    assert (lists(model), rows(model)) == (([1, 2, 3, 4], []), [])


@pytest.mark.parametrize("op", [ops.Resize(5), ops.FreePages(0), ops.Alloc(1), ops.Remap(0, 1)])
def test_what_a_ring_does_not_have(op):
    model = ring()
    model.apply(new(4, 4))
    assert outcome(model, op) == "no call"


# --- one pool for both ----------------------------------------------------------------------------


def test_one_pool_is_both_sides():
    model = pure()
    assert outcomes(model, new(2), ops.Decode((0,))) == [[1, 2], [3]]
    assert (model.available, model.sizes, model.mappings) == (3, {"full": 3, "swa": 3}, {})


@pytest.mark.parametrize(
    ("op", "method"),
    [
        (ops.Free((0,)), "free"),
        (ops.FreeSwa(0), "free_swa"),
        (ops.FreeSegment(0), "free_segment"),
        (ops.FreeSwaSegment(0), "free_swa_segment"),
    ],
)
def test_pure_swa_segment(op, method):
    """From the field: whatever releases does so once, to the end of the list."""
    model = pure()
    model.apply(new(4))
    call = model.apply(op).call
    assert isinstance(call, calls.FreeCall | calls.FreeSegmentCall)
    assert (call.method, call.slots) == (method, [1, 2, 3, 4])
    assert (lists(model), rows(model), model.available) == (([5, 6, 1, 2, 3, 4], []), [], 6)


@pytest.mark.parametrize(
    ("op", "method"), [(ops.FreeFull(0), "free_full"), (ops.FreeFullSegment(0), "free_full_segment")]
)
def test_there_is_no_full_side_to_release(op, method):
    model = pure()
    model.apply(new(4))
    call = model.apply(op).call
    assert isinstance(call, calls.FreeCall | calls.FreeSegmentCall)
    assert (call.method, call.slots) == (method, [1, 2, 3, 4])
    assert (lists(model), rows(model)) == (([5, 6], []), [([1, 2, 3, 4], 4)])


def test_a_group_holds_and_staged_slots_wait():
    model = pure(need_sort=True)
    outcomes(model, new(2, 2), ops.GroupBegin(), ops.FreeSwa(1), ops.Free((0,)))
    assert (lists(model), model.available, model.deferred()) == (([5, 6], []), 2, [3, 4, 1, 2])
    model.apply(ops.GroupEnd())
    assert (lists(model), model.sizes) == (([5, 6], [3, 4, 1, 2]), {"full": 6, "swa": 6})


@pytest.mark.parametrize("op", [ops.Resize(5), ops.FreePages(0), ops.ExtendTail(-1, 2), ops.Remap(0, 1)])
def test_what_pure_swa_does_not_have(op):
    model = pure()
    model.apply(new(1, 1))
    assert outcome(model, op) == "no call"
