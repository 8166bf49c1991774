"""The token model against section 3 of the contract, in examples worked out from its text."""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from tests.model.strategies import fresh, lists, new, outcome, outcomes, rows


def test_the_free_list_is_first_in_first_out():
    model = fresh(5, 1, "token")
    # 1, 2, 3 go out; 2 returns behind 5; the next three are 4, 5, 2.
    assert outcomes(model, new(1, 1, 1), ops.Free((1,)), new(3)) == [[1, 2, 3], "done", [4, 5, 2]]


def test_a_batch_is_one_alloc_divided_in_batch_order():
    model = fresh(6, 1, "token")
    expectation = model.apply(new(2, 3))
    assert isinstance(expectation.call, calls.AllocCall)
    assert (expectation.call.need, expectation.slots) == (5, [1, 2, 3, 4, 5])
    assert rows(model) == [([1, 2], 2), ([3, 4, 5], 3)]


def test_a_decode_step_is_one_alloc():
    model = fresh(6, 1, "token")
    model.apply(new(2, 1))
    expectation = model.apply(ops.Decode((1, 0)))
    assert isinstance(expectation.call, calls.AllocCall)
    assert (expectation.call.need, expectation.slots) == (2, [4, 5])
    assert rows(model) == [([1, 2, 5], 3), ([3, 4], 2)]


def test_too_much_is_none_and_nothing_is_empty():
    model = fresh(2, 1, "token")
    assert outcomes(
        model, new(1, 2), ops.Alloc(3), ops.Alloc(0), ops.Extend(()), new(2), ops.Decode((0,))
    ) == [
        "None",
        "None",
        [],
        [],
        [1, 2],
        "None",
    ]
    assert rows(model) == [([1, 2], 2)]


@pytest.mark.parametrize(
    ("op", "order"),
    [
        (ops.Free((0,)), [3, 1, 2]),
        (ops.Free((0,), order=ops.BACKWARDS), [2, 1, 3]),
        (ops.FreeSegment(0), [3, 1, 2]),
        (ops.FreeSegments(0, 0, (1,)), [3, 1, 2]),
        (ops.FreePages(0), [3, 1, 2]),
    ],
)
def test_every_release_goes_to_the_end_in_the_order_given(op, order):
    model = fresh(4, 1, "token")
    # Rows on slots 1 … 4; the third, first and second go, and a row of three gets 3, 1, 2. Then slot 4 goes.
    outcomes(model, new(1, 1, 1, 1), ops.Free((2, 0, 1)), new(3), ops.Free((0,)))
    assert (lists(model), rows(model)) == (([4], []), [([3, 1, 2], 3)])
    assert outcome(model, op) == "done"
    assert lists(model) == ([4, *order], [])


@pytest.mark.parametrize(
    ("op", "staged"),
    [(ops.Free((2, 0, 1)), [3, 1, 2]), (ops.Free((2, 0, 1), order=ops.BACKWARDS), [2, 1, 3])],
)
def test_with_need_sort_to_the_end_of_the_staged_in_the_order_given(op, staged):
    model = fresh(4, 1, "token", need_sort=True)
    outcomes(model, new(1, 1, 1, 1), ops.FreePages(3), op)
    assert lists(model) == ([], [4, *staged])


def test_free_passes_the_slots_in_row_order_or_backwards():
    model = fresh(6, 1, "token")
    model.apply(new(3, 2))
    call = model.apply(ops.Free((1, 0), order=ops.BACKWARDS)).call
    assert isinstance(call, calls.FreeCall)
    # Rows 1 and 0 are slots 4, 5 and 1, 2, 3; reversed as a whole, and so they return.
    assert call.slots == [3, 2, 1, 5, 4]
    assert lists(model) == ([6, 3, 2, 1, 5, 4], [])


def test_need_sort_merges_sorted_and_only_when_short():
    model = fresh(5, 1, "token", need_sort=True)
    outcomes(model, new(1, 1, 1, 1), ops.Free((3,)), ops.Free((1,)))
    assert lists(model) == ([5], [4, 2])
    assert outcome(model, new(1)) == [5]  # 1 > 1 does not hold: no merge
    assert lists(model) == ([], [4, 2])
    assert outcome(model, new(1)) == [2]  # 1 > 0 does: sorted([] + [4, 2])
    assert lists(model) == ([4], [])


def test_a_tail_is_freed_to_the_token():
    model = fresh(5, 1, "token")
    model.apply(new(4))
    call = model.apply(ops.FreeSegment(0, 3)).call
    assert isinstance(call, calls.FreeSegmentCall)
    assert (call.slots, call.start) == ([4], 3)
    assert (lists(model), rows(model)) == (([5, 4], []), [([1, 2, 3], 3)])


def test_a_group_releases_everything_in_call_order_whatever_the_call():
    model = fresh(5, 1, "token")
    model.apply(new(1, 1, 1, 1))
    outcomes(model, ops.GroupBegin(), ops.FreePages(3), ops.Free((1,)), ops.FreeSegment(0))
    assert (lists(model), model.available, model.deferred()) == (([5], []), 1, [4, 2, 1])
    assert outcome(model, ops.GroupEnd()) == "done"
    assert (lists(model), model.available) == (([5, 4, 2, 1], []), 4)


def test_clear_and_resize_begin_anew():
    model = fresh(3, 1, "token")
    outcomes(model, new(2), ops.GroupBegin(), ops.Free((0,)))
    assert outcome(model, ops.Clear()) == "done"
    assert lists(model) == ([1, 2, 3], [])
    assert outcome(model, ops.Resize(5, 7)) == "done"
    assert (lists(model), model.config.size) == (([1, 2, 3, 4, 5], []), 5)
