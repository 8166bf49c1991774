"""How the paged model takes pages back: the second half of section 4, in examples worked out from its text.

Frees in each form, staging (`need_sort`), groups, and tensors overwritten while a group holds them.
Allocation, clear and resize: test_paged.py.
"""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from kvproof.model.paged import PagedModel
from tests.model.strategies import fresh, lists, new, outcome, outcomes, rows

# --- free -----------------------------------------------------------------------------------------


def scrambled() -> PagedModel:
    """Six pages of 4; free list [3, 4, 5, 6], one row A on pages 2, 1 (in this order) with 7 tokens."""
    model = fresh(6, 4)
    # Two rows on pages 1 and 2; free the first, then the second: [2, 1, 3, …]; then 7 tokens take 2 and 1.
    outcomes(model, new(4, 4), ops.Free((0,)), ops.Free((0,)), new(7))
    assert (model.free_pages, rows(model)) == ([3, 4, 5, 6], [([2, 1], 7)])
    return model


def test_freed_pages_return_ascending_to_the_front():
    model = scrambled()
    call = model.apply(ops.Free((0,))).call
    assert isinstance(call, calls.FreeCall)
    # Page 2 holds positions 0 … 3, page 1 positions 4 … 6.
    assert call.slots == [8, 9, 10, 11, 4, 5, 6]
    assert (model.free_pages, model.rows, model.available) == ([1, 2, 3, 4, 5, 6], [], 24)


def test_backwards_reverses_the_slots_and_nothing_else():
    model = scrambled()
    call = model.apply(ops.Free((0,), order=ops.BACKWARDS)).call
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [6, 5, 4, 11, 10, 9, 8]
    assert model.free_pages == [1, 2, 3, 4, 5, 6]


def test_free_of_several_rows_is_one_set_of_pages():
    model = scrambled()
    model.apply(new(1))  # B on page 3
    call = model.apply(ops.Free((1, 0, 3))).call  # rows modulo 2: B, A
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [12, 8, 9, 10, 11, 4, 5, 6]
    assert (model.free_pages, model.rows) == ([1, 2, 3, 4, 5, 6], [])


@pytest.mark.parametrize(
    ("keep", "slots", "left"),
    [
        # keep is rounded up to a page: 1 … 4 tokens keep the first page, 5 … 7 both.
        (1, [4, 5, 6], [([2], 4)]),
        (4, [4, 5, 6], [([2], 4)]),
        (5, [], [([2, 1], 7)]),
        (7, [], [([2, 1], 7)]),
        # modulo length + 1: 8 % 8 = 0 keeps nothing.
        (8, [8, 9, 10, 11, 4, 5, 6], []),
    ],
)
def test_the_tail_of_a_row_can_be_freed(keep, slots, left):
    model = scrambled()
    call = model.apply(ops.Free((0,), keep)).call
    assert isinstance(call, calls.FreeCall)
    assert (call.slots, rows(model)) == (slots, left)


@pytest.mark.parametrize(
    ("op", "free"),
    [
        (ops.FreeSegment(0), [2, 1, 3, 4, 5, 6]),
        (ops.FreePages(0), [2, 1, 3, 4, 5, 6]),
        # Two segments are two releases to the front: [2] and then [1].
        (ops.FreeSegments(0, 0, (1,)), [1, 2, 3, 4, 5, 6]),
        (ops.FreeSegments(0, 0, (2,)), [2, 1, 3, 4, 5, 6]),
    ],
)
def test_segments_and_page_ids_return_in_row_order(op, free):
    model = scrambled()
    assert outcome(model, op) == "done"
    assert (model.free_pages, model.rows) == (free, [])


def test_a_segment_starts_on_a_page_and_ends_with_the_row():
    model = fresh(4, 4)
    model.apply(new(10))
    # 6 rounds down to 4: positions 4 … 9 are pages 2 and 3.
    call = model.apply(ops.FreeSegment(0, 6)).call
    assert isinstance(call, calls.FreeSegmentCall)
    assert (call.slots, call.start) == ([8, 9, 10, 11, 12, 13], 4)
    assert (model.free_pages, rows(model)) == ([2, 3, 4], [([1], 4)])


def test_segments_are_cut_at_a_page():
    model = fresh(4, 4)
    model.apply(new(14))  # pages 1 … 4
    call = model.apply(ops.FreeSegments(0, 4, (1,))).call
    assert isinstance(call, calls.FreeSegmentsCall)
    # From position 4 on: one page to the first segment, the rest to the second.
    assert call.segments == [([8, 9, 10, 11], 4), ([12, 13, 14, 15, 16, 17], 8)]
    assert (model.free_pages, rows(model)) == ([3, 4, 2], [([1], 4)])


@pytest.mark.parametrize(("cut", "lengths"), [(0, (0, 6)), (2, (6, 0)), (3, (0, 6))])
def test_a_segment_may_be_empty(cut, lengths):
    model = fresh(2, 4)
    model.apply(new(6))
    call = model.apply(ops.FreeSegments(0, 0, (cut,))).call  # cut modulo 2 pages + 1
    assert isinstance(call, calls.FreeSegmentsCall)
    assert tuple(len(slots) for slots, _ in call.segments) == lengths
    assert model.available == 8


def test_page_ids_beyond_those_kept():
    model = fresh(4, 4)
    model.apply(new(10))
    call = model.apply(ops.FreePages(0, 1)).call
    assert isinstance(call, calls.FreePageIdsCall)
    assert call.pages == [2, 3]
    assert (model.free_pages, rows(model)) == ([2, 3, 4], [([1], 4)])


def test_a_kept_tail_page_is_whole_so_the_row_goes_on_at_the_next():
    model = fresh(4, 4)
    # After the cut A has 4 tokens in page 1, and [2, 3, 4] is free.
    assert outcomes(model, new(10), ops.Free((0,), 4), ops.Decode((0,)))[-1] == [8]


@pytest.mark.parametrize(
    "op", [ops.Free((0,)), ops.FreeSegment(0), ops.FreeSegments(0), ops.FreePages(0), ops.Free(())]
)
def test_a_release_without_rows_is_no_call(op):
    assert outcome(fresh(2, 4), op) == "no call"


# --- need_sort ------------------------------------------------------------------------------------


def test_released_pages_wait_staged_in_order_of_release():
    model = fresh(6, 4, need_sort=True)
    outcomes(model, new(8, 4), ops.Free((1,)), ops.FreeSegment(0))
    assert (lists(model), model.available) == (([4, 5, 6], [3, 1, 2]), 24)


def test_extend_merges_when_its_estimate_exceeds_the_free_list():
    model = fresh(4, 4, need_sort=True)
    outcomes(model, new(8), ops.Free((0,)))
    assert lists(model) == ([3, 4], [1, 2])
    # 1 token, 1 row: 1 // 4 + 1 + 1 = 2 > 2 does not hold: page 3, no merge.
    assert outcome(model, new(1)) == [12]
    assert lists(model) == ([4], [1, 2])
    # Now 2 > 1 does: sorted([4] + [1, 2]) = [1, 2, 4], from which page 1 is taken.
    assert outcome(model, new(1)) == [4]
    assert lists(model) == ([2, 4], [])


def test_decode_merges_when_the_batch_exceeds_the_free_list():
    model = fresh(5, 4, need_sort=True)
    outcomes(model, new(4, 1, 4, 4))  # pages 1, 2, 3, 4; page 5 free
    outcomes(model, ops.Free((2,)))
    assert lists(model) == ([5], [3])
    # A batch of 1 is not more than 1: A starts page 5.
    assert outcome(model, ops.Decode((0,))) == [20]
    assert lists(model) == ([], [3])
    # A batch of 1 that needs no page is more than 0: it merges all the same.
    assert outcome(model, ops.Decode((1,))) == [9]
    assert lists(model) == ([3], [])


def test_alloc_merges_when_its_pages_exceed_the_free_list():
    model = fresh(4, 4, need_sort=True)
    outcomes(model, new(8), ops.Free((0,)))
    assert outcome(model, ops.Alloc(2)) == list(range(12, 20))
    assert lists(model) == ([], [1, 2])
    assert outcome(model, ops.Alloc(1)) == [4, 5, 6, 7]
    assert lists(model) == ([2], [])


def test_a_refusal_leaves_the_merge_behind_and_nothing_else():
    model = fresh(4, 4, need_sort=True)
    outcomes(model, new(4, 4), ops.Free((1,)), ops.Free((0,)))
    assert lists(model) == ([3, 4], [2, 1])
    assert outcome(model, new(17)) == "None"
    assert (lists(model), model.available, model.rows) == (([1, 2, 3, 4], []), 16, [])


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_group_releases_the_frees_as_one_set_and_then_the_page_ids_in_call_order(need_sort):
    model = fresh(6, 4, need_sort=need_sort)
    model.apply(new(4, 4, 4, 4, 4))  # rows A … E on pages 1 … 5
    # Rows shift down as they go: E (page 5), then D's pages, then A, then C's segment (the second of B, C).
    held = [ops.GroupBegin(), ops.Free((4,)), ops.FreePages(3), ops.Free((0,)), ops.FreeSegment(1)]
    assert outcomes(model, *held) == ["done"] * 5
    assert (model.in_group, model.available, sorted(model.deferred())) == (True, 4, [1, 3, 4, 5])
    assert outcome(model, ops.GroupEnd()) == "done"
    if need_sort:
        # To the end of the staged pages: {5, 1} ascending, then 4, 3.
        assert lists(model) == ([6], [1, 5, 4, 3])
    else:
        # {5, 1} ascending to the front, then [4, 3] to the front.
        assert lists(model) == ([4, 3, 1, 5, 6], [])
    assert (model.in_group, model.deferred(), model.available) == (False, [], 20)


def test_deferred_pages_cannot_be_had_before_the_end():
    model = fresh(2, 4)
    taken = outcomes(model, new(4), ops.GroupBegin(), ops.Free((0,)), new(5), new(4), ops.GroupEnd(), new(4))
    # Inside the group only page 2 is free: 5 tokens are refused, 4 get it. At the end page 1 returns.
    assert taken == [[4, 5, 6, 7], "done", "done", "None", [8, 9, 10, 11], "done", [4, 5, 6, 7]]


def test_groups_do_not_nest_and_an_end_needs_a_beginning():
    model = fresh(2, 4)
    ends = [ops.GroupEnd(), ops.GroupBegin(), ops.GroupBegin(), ops.GroupEnd(), ops.GroupEnd()]
    assert outcomes(model, *ends) == ["no call", "done", "no call", "done", "no call"]


def test_clear_drops_what_a_group_held():
    model = fresh(2, 4)
    outcomes(model, new(4), ops.GroupBegin(), ops.Free((0,)))
    assert outcomes(model, ops.Clear(), ops.GroupEnd()) == ["done", "no call"]
    assert (lists(model), model.deferred()) == (([1, 2], []), [])


def test_clobber_changes_nothing_and_names_a_live_slot():
    model = fresh(4, 4)
    outcomes(model, new(4, 5), ops.GroupBegin(), ops.Free((0,)))
    call = model.apply(ops.Clobber()).call
    assert isinstance(call, calls.ClobberCall)
    # The youngest row starts on page 2: its first slot is 8.
    assert call.slot == 8
    assert (lists(model), model.deferred(), rows(model)) == (([4], []), [1], [([2, 3], 5)])


def test_last_loc_and_slots_of_a_row():
    model = scrambled()
    row = model.rows[0]
    assert model.last_loc(row) == 6
    assert model.slots_of(row, 2, 6) == [10, 11, 4, 5]
    assert model.slots_of(row, 3, 3) == []
    assert model.slots_of(row, 0, 7) == [8, 9, 10, 11, 4, 5, 6]
