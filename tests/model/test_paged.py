"""The paged model against sections 1, 2 and 4 of the contract, in examples worked out from its text.

`pages(n) = ceil(n / ps)`; page k holds slots `k*ps … k*ps+ps-1`; a fresh pool's free list is `1 … num_pages`.
Release, staging and groups: test_paged_release.py. Misuse: test_misuse.py. Marks: test_marks.py. Invariants
over random ops: test_invariants.py.
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


def test_owners_name_every_page():
    model = fresh(5, 4, need_sort=True)
    outcomes(model, new(4, 4, 4), ops.Free((0,)), ops.GroupBegin(), ops.Free((0,)))
    assert model.owners() == {1: "staged", 2: "deferred", 3: "row 0", 4: "free", 5: "free"}
