"""The paged model against sections 1, 2 and 4 of the contract, in examples worked out from its text.

`pages(n) = ceil(n / ps)`; page k holds slots `k*ps … k*ps+ps-1`; a fresh pool's free list is `1 … num_pages`.
Misuse: test_misuse.py. Marks: test_marks.py. Invariants over random ops: test_invariants.py.
"""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from kvproof.model.base import Outcome
from kvproof.model.config import Config
from kvproof.model.paged import PagedModel
from tests.model.strategies import fresh, lists, new, outcome, outcomes, rows

# --- beginnings -----------------------------------------------------------------------------------


def test_a_fresh_pool_has_all_pages_ascending_and_no_padding_page():
    model = fresh(3, 4)
    assert lists(model) == ([1, 2, 3], [])
    assert (model.available, model.rows, model.in_group) == (12, [], False)


def test_a_remainder_of_the_size_is_unusable():
    # 11 // 4 = 2 pages.
    model = PagedModel(Config("paged", 11, 4))
    assert (lists(model), model.available) == (([1, 2], []), 8)


def test_a_window_is_numbered_from_its_offset_on():
    # Page 101 is the first of the window; its slots are 404 … 407.
    model = fresh(2, 4, page_offset=100)
    assert model.free_pages == [101, 102]
    assert outcome(model, new(5)) == [404, 405, 406, 407, 408]


# --- alloc ----------------------------------------------------------------------------------------


def test_alloc_takes_whole_pages_from_the_front():
    model = fresh(3, 4)
    expectation = model.apply(ops.Alloc(2))
    # 2 pages of 4: need 8; pages 1 and 2 are slots 4 … 7 and 8 … 11; page 3 is left.
    assert isinstance(expectation.call, calls.AllocCall)
    assert expectation.call.need == 8
    assert expectation.slots == [4, 5, 6, 7, 8, 9, 10, 11]
    assert (expectation.taken, expectation.available) == ([1, 2], 4)
    assert rows(model) == [([1, 2], 8)]


def test_alloc_of_too_much_is_none_and_of_nothing_is_empty():
    model = fresh(2, 4)
    assert outcomes(model, ops.Alloc(3), ops.Alloc(0)) == ["None", []]
    assert (lists(model), model.rows) == (([1, 2], []), [])


def test_alloc_is_clipped_to_one_page_more_than_the_pool_has():
    call = fresh(2, 4).apply(ops.Alloc(1000)).call
    assert isinstance(call, calls.AllocCall)
    assert call.need == 12


# --- extend ---------------------------------------------------------------------------------------


def test_extend_opens_a_row_at_the_start_of_a_page():
    model = fresh(4, 4)
    expectation = model.apply(new(6))
    call = expectation.call
    assert isinstance(call, calls.ExtendCall)
    # An empty row has last_loc -1; 6 tokens take pages(6) = 2 pages, 1 and 2.
    assert (call.prefix_lens, call.seq_lens, call.last_locs, call.tokens, call.pages) == (
        [0],
        [6],
        [-1],
        6,
        2,
    )
    assert expectation.slots == [4, 5, 6, 7, 8, 9]
    assert model.free_pages == [3, 4]


def test_extend_fills_the_old_page_first():
    model = fresh(4, 4)
    model.apply(new(6))
    expectation = model.apply(ops.Extend(((0, 3),)))
    call = expectation.call
    assert isinstance(call, calls.ExtendCall)
    # Token 5 sits in page 2 at offset 1: slot 9. Positions 6, 7 < ceil(6) = 8 follow it, 8 starts page 3.
    assert (call.prefix_lens, call.seq_lens, call.last_locs, call.tokens, call.pages) == ([6], [9], [9], 3, 1)
    assert expectation.slots == [10, 11, 12]
    assert rows(model) == [([1, 2, 3], 9)]


def test_extend_of_whole_pages_starts_on_a_page():
    model = fresh(4, 4)
    # After 4 tokens the page is full: the next 8 are pages 2 and 3, slots 8 … 15.
    assert outcomes(model, new(4), ops.Extend(((0, 8),))) == [[4, 5, 6, 7], list(range(8, 16))]


def test_extend_takes_pages_in_batch_order():
    # pages(5) = 2: pages 1, 2; pages(3) = 1: page 3.
    assert outcome(fresh(4, 4), new(5, 3)) == [4, 5, 6, 7, 8, 12, 13, 14]


def test_extend_takes_a_batch_in_the_order_given_not_in_that_of_the_rows():
    model = fresh(6, 4)
    model.apply(new(4, 3))  # A: page 1, full. B: page 2, slots 8, 9, 10.
    # B first: 11 ends its page, position 4 starts page 3 (slot 12). Then a new row on page 4, A on page 5.
    assert outcome(model, ops.Extend(((1, 2), (ops.NEW_ROW, 1), (0, 1)))) == [11, 12, 16, 20]
    assert rows(model) == [([1, 5], 5), ([2, 3], 5), ([4], 1)]


def test_extend_by_nothing_and_of_nobody_costs_nothing():
    model = fresh(1, 4)
    assert outcomes(model, new(4), ops.Extend(((0, 0),)), ops.Extend(())) == [[4, 5, 6, 7], [], []]
    assert model.free_pages == []


def test_a_row_may_be_empty_and_grow_later():
    model = fresh(2, 4)
    assert outcome(model, new(0)) == []
    call = model.apply(ops.Extend(((0, 2),))).call
    assert isinstance(call, calls.ExtendCall)
    assert (call.prefix_lens, call.last_locs) == ([0], [-1])
    assert rows(model) == [([1], 2)]


def test_extend_is_all_rows_or_none():
    model = fresh(3, 4)
    model.apply(new(3))
    # 2 pages are left. The batch needs pages(5) - pages(3) = 1 and pages(5) = 2: 3.
    expectation = model.apply(ops.Extend(((0, 2), (ops.NEW_ROW, 5))))
    assert (expectation.outcome, expectation.slots, expectation.available) == (Outcome.OOM, None, 8)
    assert (lists(model), rows(model)) == (([2, 3], []), [([1], 3)])


def test_the_need_is_counted_in_pages_not_in_tokens():
    # Case tight-oom: 33 tokens of ps 16 need 3 pages; 32 fit in 2.
    assert outcomes(fresh(2, 16), new(33), new(32)) == ["None", list(range(16, 48))]
    # Three rows of one token need three pages, however few the tokens.
    assert outcome(fresh(2, 16), new(1, 1, 1)) == "None"


def test_a_row_named_twice_counts_once_at_its_first_place():
    model = fresh(4, 4)
    model.apply(new(1, 1))
    # Rows modulo 2: 1, 0 and again 1.
    assert outcome(model, ops.Extend(((3, 1), (0, 2), (1, 3)))) == [9, 5, 6]


def test_an_ordinal_without_rows_opens_a_row_and_tokens_are_clipped():
    model = fresh(2, 4)
    call = model.apply(ops.Extend(((5, 1 << 40), (6, -3)))).call
    assert isinstance(call, calls.ExtendCall)
    # Never more than size + ps = 12 tokens, never fewer than 0.
    assert (call.prefix_lens, call.seq_lens) == ([0, 0], [12, 0])


# --- decode ---------------------------------------------------------------------------------------


def test_decode_starts_a_page_where_the_old_one_is_full():
    # Case decode-gather: A has 4 tokens (page 1), B 6 (pages 2, 3, last slot 3*4+1 = 13); page 4 is left.
    model = fresh(4, 4)
    model.apply(new(4, 6))
    expectation = model.apply(ops.Decode((0, 1)))
    call = expectation.call
    assert isinstance(call, calls.DecodeCall)
    assert (call.seq_lens, call.last_locs) == ([5, 7], [7, 13])
    # (5 - 1) % 4 == 0: A starts page 4, slot 16. B goes on at 14.
    assert expectation.slots == [16, 14]
    assert model.free_pages == []


def test_decode_takes_pages_in_batch_order():
    model = fresh(4, 4)
    model.apply(new(4, 4))
    assert outcome(model, ops.Decode((1, 0))) == [12, 16]


def test_decode_is_all_rows_or_none():
    model = fresh(3, 4)
    model.apply(new(4, 4))
    assert outcomes(model, ops.Decode((0, 1)), ops.Decode((1,))) == ["None", [12]]
    assert rows(model) == [([1], 4), ([2, 3], 5)]


def test_every_decode_step_starts_a_page_of_one_slot():
    # ps 1: (seq - 1) % 1 == 0 always.
    model = fresh(4, 1)
    assert outcomes(model, new(1, 1), ops.Decode((0, 1)), ops.Decode((0,))) == [[1, 2], [3, 4], "None"]


def test_decode_leaves_out_empty_rows_and_repeats():
    model = fresh(4, 4)
    model.apply(new(0, 2))
    assert outcomes(model, ops.Decode((1, 0, 3)), ops.Decode(()), ops.Decode((0,))) == [[6], [], []]


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
    call = model.apply(ops.Free((0,), backwards=True)).call
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
        (ops.FreeSegments(0, 0, 1), [1, 2, 3, 4, 5, 6]),
        (ops.FreeSegments(0, 0, 2), [2, 1, 3, 4, 5, 6]),
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
    call = model.apply(ops.FreeSegments(0, 4, 1)).call
    assert isinstance(call, calls.FreeSegmentsCall)
    # From position 4 on: one page to the first segment, the rest to the second.
    assert call.segments == [([8, 9, 10, 11], 4), ([12, 13, 14, 15, 16, 17], 8)]
    assert (model.free_pages, rows(model)) == ([3, 4, 2], [([1], 4)])


@pytest.mark.parametrize(("cut", "lengths"), [(0, (0, 6)), (2, (6, 0)), (3, (0, 6))])
def test_a_segment_may_be_empty(cut, lengths):
    model = fresh(2, 4)
    model.apply(new(6))
    call = model.apply(ops.FreeSegments(0, 0, cut)).call  # cut modulo 2 pages + 1
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


# --- the rest -------------------------------------------------------------------------------------


def test_clear_is_the_initial_state():
    model = fresh(3, 4, need_sort=True)
    outcomes(model, new(8), ops.Free((0,)), new(1))
    assert outcome(model, ops.Clear()) == "done"
    assert (lists(model), model.rows) == (([1, 2, 3], []), [])


@pytest.mark.parametrize(
    ("op", "size", "pages"),
    [
        (ops.Resize(3), 12, 3),
        (ops.Resize(3, 2), 14, 3),
        (ops.Resize(3, 6), 14, 3),  # the spare slots are modulo the page size
        (ops.Resize(0), 4, 1),
        (ops.Resize(-5), 4, 1),
    ],
)
def test_resize_is_a_new_size_and_a_clear(op, size, pages):
    model = fresh(5, 4)
    outcomes(model, new(8), ops.GroupBegin())
    call = model.apply(op).call
    assert isinstance(call, calls.ResizeCall)
    assert (call.size, model.config.size) == (size, size)
    assert (lists(model), model.rows, model.in_group) == ((list(range(1, pages + 1)), []), [], False)


def test_resize_keeps_slots_inside_the_row_dtype():
    # 2**31 // 2**16 = 32768 pages would have slots up to 2**31 - 1; the first is padding.
    model = fresh(1, 1 << 16, row_dtype="int32")
    model.apply(ops.Resize(1 << 30))
    assert model.config.num_pages == 32767


def test_last_loc_and_slots_of_a_row():
    model = scrambled()
    row = model.rows[0]
    assert model.last_loc(row) == 6
    assert model.slots_of(row, 2, 6) == [10, 11, 4, 5]
    assert model.slots_of(row, 3, 3) == []
    assert model.slots_of(row, 0, 7) == [8, 9, 10, 11, 4, 5, 6]


def test_owners_name_every_page():
    model = fresh(5, 4, need_sort=True)
    outcomes(model, new(4, 4, 4), ops.Free((0,)), ops.GroupBegin(), ops.Free((0,)))
    assert model.owners() == {1: "staged", 2: "deferred", 3: "row 0", 4: "free", 5: "free"}
