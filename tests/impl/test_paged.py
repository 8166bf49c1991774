"""The paged allocator against section 4 of the contract.

Not here: checked mode (test_checked.py), and the kernels (test_kernels.py).
"""

from __future__ import annotations

import random

import pytest
import torch

from kvproof.impl.errors import AllocatorError
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from tests.impl import oracle
from tests.impl.pools import alloc, decode, extend, free_list, ids, paged_pool, staged, state

# --- allocation ---------------------------------------------------------------------------------------


def test_alloc_gives_whole_pages_from_the_front():
    pool = paged_pool(3, 4)
    assert alloc(pool, 8) == [4, 5, 6, 7, 8, 9, 10, 11]  # pages 1 and 2; page 0 is padding
    assert alloc(pool, 8) is None
    assert alloc(pool, 0) == []
    assert free_list(pool) == [3]


@pytest.mark.parametrize("size", [1, 5, -4, -1])
def test_alloc_of_no_whole_pages_is_refused(size):
    pool = paged_pool(3, 4)
    with pytest.raises(
        AllocatorError, match=rf"alloc: expected a size of whole pages, k \* 4 >= 0, got {size}"
    ):
        pool.alloc(size)
    assert free_list(pool) == [1, 2, 3]


def test_extend_fills_the_old_page_then_new_pages_in_batch_order():
    pool = paged_pool(8, 4)
    assert extend(pool, (0, 6, -1)) == [4, 5, 6, 7, 8, 9]  # pages 1, 2
    # Row A has 2 slots left in page 2 and takes pages 3, 4; row B is new and takes page 5.
    assert extend(pool, (6, 13, 9), (0, 2, -1)) == [10, 11, 12, 13, 14, 15, 16, 20, 21]
    assert free_list(pool) == [6, 7, 8]


def test_extend_inside_one_page_takes_none():
    pool = paged_pool(1, 4)
    assert extend(pool, (0, 1, -1)) == [4]
    assert extend(pool, (1, 3, 4)) == [5, 6]  # the handed case "inside-page"
    assert extend(pool, (3, 4, 6)) == [7]
    assert extend(pool, (4, 5, 7)) is None


def test_rows_that_do_not_grow_cost_nothing():
    pool = paged_pool(2, 4)
    assert extend(pool, (0, 0, -1), (0, 5, -1), (0, 0, -1)) == [4, 5, 6, 7, 8]
    assert extend(pool, (5, 5, 8), (0, 0, -1)) == []
    assert free_list(pool) == []


def test_an_empty_batch_is_an_empty_answer():
    pool = paged_pool(1, 4)
    alloc(pool, 4)
    empty = torch.tensor([])
    slots = pool.alloc_extend(empty, empty, empty, empty, empty, 0)
    assert (slots.tolist(), slots.dtype) == ([], torch.int64)
    slots = pool.alloc_decode(empty, empty, empty)
    assert (slots.tolist(), slots.dtype) == ([], torch.int64)


def test_tight_oom_is_refused_with_the_state_untouched():
    pool = paged_pool(2, 16)
    before = state(pool)
    assert extend(pool, (0, 33, -1)) is None  # 3 pages of 2
    assert state(pool) == before
    assert extend(pool, (0, 32, -1)) == list(range(16, 48))


def test_num_new_pages_is_believed():
    pool = paged_pool(2, 4)
    prefix, seq, last = ids(0), ids(8), ids(-1)
    assert pool.alloc_extend(prefix, prefix, seq, seq, last, 8, num_new_pages=3) is None
    assert pool.alloc_extend(prefix, prefix, seq, seq, last, 8, num_new_pages=2).tolist() == list(
        range(4, 12)
    )


def test_decode_starts_a_page_only_at_a_boundary():
    pool = paged_pool(3, 4)
    assert extend(pool, (0, 4, -1), (0, 6, -1)) == [*range(4, 8), *range(8, 12), 12, 13]
    pool.free_pages = ids(7)
    # The handed case "decode-gather": rows 4→5 and 6→7 with exactly one page in the list.
    assert decode(pool, (5, 7), (7, 13)) == [28, 14]
    assert decode(pool, (8, 14), (6, 28)) == [15, 29]
    assert decode(pool, (9, 15)) is None


def test_with_pages_of_one_every_row_starts_a_page():
    pool = paged_pool(5, 1)
    assert extend(pool, (0, 2, -1), (0, 1, -1)) == [1, 2, 3]
    assert decode(pool, (3, 2), (2, 3)) == [4, 5]
    assert decode(pool, (4, 4)) is None


def test_pages_need_not_be_powers_of_two():
    pool = paged_pool(4, 3)
    assert extend(pool, (0, 4, -1)) == [3, 4, 5, 6]
    assert extend(pool, (4, 8, 6)) == [7, 8, 9, 10]
    assert decode(pool, (9, 10)) == [11]
    assert decode(pool, (10, 11)) == [12]


def test_lengths_may_be_int32_and_slots_large():
    pool = paged_pool(2, 4)
    far = (1 << 40) // 4 - 3
    pool.free_pages = ids(far, far + 1)
    assert extend(pool, (0, 5, -1), dtype=torch.int32) == [*range(far * 4, far * 4 + 5)]
    assert decode(pool, (6, far * 4 + 4)) == [far * 4 + 5]


# --- merging ------------------------------------------------------------------------------------------


def _one_free_two_staged() -> PagedTokenToKVPoolAllocator:
    """Pages of 4: free [5], staged [4, 2], pages 1 and 3 live."""
    pool = paged_pool(5, 4, need_sort=True)
    alloc(pool, 16)
    pool.free_page_ids(ids(4, 2))
    assert (free_list(pool), staged(pool), pool.available_size()) == ([5], [4, 2], 12)
    return pool


def test_alloc_merges_when_its_pages_exceed_the_free_list():
    pool = _one_free_two_staged()
    assert alloc(pool, 4) == [20, 21, 22, 23]
    assert staged(pool) == [4, 2]
    assert alloc(pool, 4) == [8, 9, 10, 11]
    assert (free_list(pool), staged(pool)) == ([4], [])


def test_extend_merges_on_its_upper_bound():
    pool = _one_free_two_staged()
    # 1 token // 4 + 1 row + 1 = 2 > 1 free: merges, although one page would do.
    assert extend(pool, (0, 1, -1)) == [8]
    assert (free_list(pool), staged(pool)) == ([4, 5], [])


def test_extend_does_not_merge_at_the_bound():
    pool = paged_pool(5, 4, need_sort=True)
    alloc(pool, 12)
    pool.free_page_ids(ids(3))
    assert extend(pool, (0, 3, -1)) == [16, 17, 18]  # 3 // 4 + 1 + 1 = 2, and 2 are free
    assert (free_list(pool), staged(pool)) == ([5], [3])


def test_an_empty_extend_merges_an_empty_list():
    pool = paged_pool(2, 4, need_sort=True)
    alloc(pool, 8)
    pool.free_page_ids(ids(2, 1))
    assert extend(pool) == []  # 0 + 0 + 1 > 0
    assert (free_list(pool), staged(pool)) == ([1, 2], [])


def test_decode_merges_when_the_batch_exceeds_the_free_list():
    pool = _one_free_two_staged()
    assert decode(pool, (2, 4)) == [5]  # 1 row, 1 free
    assert staged(pool) == [4, 2]
    assert decode(pool, (3, 5), (2, 12)) == [6, 13]  # 2 rows, 1 free: merges, and takes none
    assert (free_list(pool), staged(pool)) == ([2, 4, 5], [])


def test_a_refusal_may_merge_and_nothing_else():
    pool = _one_free_two_staged()
    assert extend(pool, (0, 16, -1)) is None
    assert (free_list(pool), staged(pool), pool.available_size()) == ([2, 4, 5], [], 12)


# --- release ------------------------------------------------------------------------------------------


def test_free_releases_touched_pages_once_ascending_to_the_front():
    pool = paged_pool(6, 4)
    alloc(pool, 20)
    pool.free(ids(13, 4, 5, 12, 12, 6, 7))  # pages 3 and 1, in any order, with a repeat
    assert free_list(pool) == [1, 3, 6]
    pool.free(ids(16))
    assert free_list(pool) == [4, 1, 3, 6]


def test_free_stages_when_sorting():
    pool = paged_pool(4, 4, need_sort=True)
    alloc(pool, 16)
    pool.free(ids(13, 4))
    pool.free_page_ids(ids(4, 2))
    assert (free_list(pool), staged(pool), pool.available_size()) == ([], [1, 3, 4, 2], 16)


def test_free_page_ids_keeps_the_order_given():
    pool = paged_pool(5, 4)
    alloc(pool, 16)
    pool.free_page_ids(ids(3, 1))
    pool.free_page_ids(ids(4, 2))
    assert free_list(pool) == [4, 2, 3, 1, 5]


def test_free_segment_releases_in_row_order_and_may_end_inside_a_page():
    pool = paged_pool(5, 4)
    alloc(pool, 12)
    pool.free_page_ids(ids(3, 1))  # so that the next row is not in order
    row = extend(pool, (0, 10, -1))
    assert row == [12, 13, 14, 15, 4, 5, 6, 7, 16, 17]  # pages 3, 1, 4
    pool.free_segment(ids(*row[4:], dtype=torch.int32), start_pos=4)
    assert free_list(pool) == [1, 4, 5]


def test_free_segments_are_the_single_calls_in_turn():
    one, other = paged_pool(6, 4), paged_pool(6, 4)
    for pool in (one, other):
        alloc(pool, 20)
    segments = [(ids(*range(4, 12)), 0), (ids(*range(12, 18)), 12)]  # pages 1, 2 and 3, 4
    one.free_segments(iter(segments))
    for slots, start in segments:
        other.free_segment(slots, start_pos=start)
    assert free_list(one) == free_list(other) == [3, 4, 1, 2, 6]


def test_a_group_releases_slots_as_one_and_then_page_ids_in_call_order():
    pool = paged_pool(8, 4)
    alloc(pool, 28)
    pool.free_group_begin()
    pool.free_page_ids(ids(7, 2))
    pool.free(ids(20, 21, 22, 23))
    pool.free_segment(ids(*range(24, 28)), start_pos=8)
    pool.free(ids(4, 5, 6, 7))
    pool.free(ids(4))  # unchecked: the set of pages swallows it
    assert (free_list(pool), pool.available_size()) == ([8], 4)
    pool.free_group_end()
    # first the set {1, 5} to the front, then 7, 2, 6 before it
    assert free_list(pool) == [7, 2, 6, 1, 5, 8]


def test_a_group_stages_slots_before_page_ids():
    pool = paged_pool(4, 4, need_sort=True)
    alloc(pool, 16)
    pool.free_group_begin()
    pool.free_page_ids(ids(4, 2))
    pool.free(ids(12, 4))
    assert staged(pool) == []
    pool.free_group_end()
    assert staged(pool) == [1, 3, 4, 2]


def test_held_pages_are_not_handed_out():
    pool = paged_pool(2, 4)
    alloc(pool, 4)
    pool.free_group_begin()
    pool.free(ids(4, 5, 6, 7))
    assert alloc(pool, 4) == [8, 9, 10, 11]
    assert alloc(pool, 4) is None
    pool.free_group_end()
    assert alloc(pool, 4) == [4, 5, 6, 7]


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_arguments_of_frees_are_taken_by_value(need_sort, grouped, page_size):
    """The handed case "deferred-view", for every kind of free."""
    pool = paged_pool(4, page_size, need_sort=need_sort)
    row = pool.alloc(3 * page_size)
    kept = alloc(pool, page_size)
    if grouped:
        pool.free_group_begin()
    first, second, third = row.split(page_size)
    pool.free(first)
    page = torch.tensor([2])
    pool.free_page_ids(page)
    pool.free_segment(third, start_pos=2 * page_size)
    for argument in (row, second, page):
        argument.fill_(kept[0])
    if grouped:
        pool.free_group_end()
    assert sorted(pool.get_all_free_pages().tolist()) == [1, 2, 3]


@pytest.mark.parametrize("page_size", [1, 4])
def test_results_share_no_memory_with_the_pool(page_size):
    pool = paged_pool(6, page_size)
    prefix, seq, last = ids(0), ids(page_size), ids(-1)
    for slots in (
        pool.alloc(page_size),
        pool.alloc_extend(prefix, prefix, seq, seq, last, page_size),
        pool.alloc_decode(seq + 1, seq + 1, ids(3 * page_size - 1)),
        pool.get_all_free_pages(),
    ):
        slots.fill_(0)
    assert free_list(pool) == [4, 5, 6]
    assert (prefix.tolist(), seq.tolist(), last.tolist()) == ([0], [page_size], [-1])


# --- refusals -----------------------------------------------------------------------------------------


def test_batches_of_unequal_lengths_are_refused():
    pool = paged_pool(4, 4)
    before = state(pool)
    one, two = ids(0), ids(4, 4)
    with pytest.raises(
        AllocatorError, match=r"alloc_extend: expected one entry per batch row .* seq_lens of 2"
    ):
        pool.alloc_extend(one, one, two, two, one, 8)
    with pytest.raises(AllocatorError, match=r"alloc_extend: .* got the batch of 1, .* seq_lens_cpu of 2"):
        pool.alloc_extend(one, one, one, two, one, 8)
    with pytest.raises(AllocatorError, match=r"alloc_decode: .* got seq_lens of 2, last_loc of 1"):
        pool.alloc_decode(two, two, one)
    with pytest.raises(AllocatorError, match=r"alloc_decode: .* seq_lens_cpu of 1"):
        pool.alloc_decode(two, one, two)
    assert state(pool) == before


def test_tensors_of_the_wrong_kind_are_refused():
    pool = paged_pool(4, 4)
    before = state(pool)
    good, floats, elsewhere = ids(1), torch.tensor([1.0]), torch.ones(1, dtype=torch.int64, device="meta")
    with pytest.raises(
        AllocatorError, match=r"expected last_loc to be one-dimensional .* torch.float32 on cpu"
    ):
        pool.alloc_decode(good, good, floats)
    with pytest.raises(AllocatorError, match=r"expected seq_lens_cpu to be .* on cpu, got .* on meta"):
        pool.alloc_decode(good, elsewhere, good)
    with pytest.raises(AllocatorError, match=r"expected prefix_lens to be .* on cpu, got .* on meta"):
        pool.alloc_extend(elsewhere, good, good, good, good, 0)
    assert state(pool) == before


def test_shrinking_batches_and_negative_counts_are_refused():
    pool = paged_pool(4, 4)
    before = state(pool)
    with pytest.raises(
        AllocatorError, match=r"alloc_extend: expected rows that grow or stay, got -5 tokens and -2"
    ):
        extend(pool, (9, 4, 5))
    zero = ids(0)
    with pytest.raises(AllocatorError, match=r"0 tokens and -1 new pages"):
        pool.alloc_extend(zero, zero, zero, zero, zero - 1, 0, num_new_pages=-1)
    assert state(pool) == before


# --- random batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", oracle.PAGE_SIZES)
def test_random_batches_take_exactly_the_oracles_slots(page_size):
    rng = random.Random(page_size)
    pool = paged_pool(1, page_size)
    for rows in (1, 2, 3, 7, 33):
        batch = oracle.random_batch(rng, page_size, rows)
        spare = ids(5, 9)
        pool.free_pages = torch.cat((ids(*batch.pages), spare))
        rows_of = zip(batch.prefix_lens, batch.seq_lens, batch.last_loc, strict=True)
        assert extend(pool, *rows_of) == oracle.extend(batch)
        assert free_list(pool) == [5, 9]

        batch = oracle.random_batch(rng, page_size, rows, step=1)
        pool.free_pages = torch.cat((ids(*batch.pages), spare))
        assert decode(pool, *zip(batch.seq_lens, batch.last_loc, strict=True)) == oracle.decode(batch)
        assert free_list(pool) == [5, 9]
