"""The sliding-window allocator against section 5 of the contract, by the torch path.

Not here: releases and the mapping (test_swa_release.py), checked mode (test_swa_checked.py), the kernels
(test_swa_kernels.py), and one pool for both sides (test_pure_swa.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvproof.impl.errors import AllocatorError, UnsupportedCallError
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.swa import SWATokenToKVPoolAllocator
from kvproof.impl.token import TokenToKVPoolAllocator
from tests.impl.pools import ids
from tests.impl.swa_pools import Run, decode, extend, lists, peers, state, swa_pool

# --- what it is ---------------------------------------------------------------------------------------


def test_a_fresh_allocator():
    pool = SWATokenToKVPoolAllocator(18, 9, 4, torch.float16, "cpu", None, False)
    assert lists(pool) == ([1, 2, 3, 4], [], [1, 2], [])
    assert pool.full_to_swa_index_mapping.tolist() == [0] * 22 + [-1]
    assert pool.full_to_swa_index_mapping.dtype == torch.int64
    assert (pool.size, pool.size_full, pool.size_swa) == (9, 18, 9)
    assert (pool.available_size(), pool.full_available_size(), pool.swa_available_size()) == (8, 16, 8)
    assert (pool.swa_req_ring, pool.swa_ring_cost_tokens, pool.page_size) == (False, 0, 4)
    assert isinstance(pool.full_attn_allocator, PagedTokenToKVPoolAllocator)
    assert pool.debug_print() == "full: 4 free + 0 staged of 4 pages; swa: 2 free + 0 staged of 2 pages"


def test_pages_of_one_slot_are_token_pools():
    pool = swa_pool(3, 2, 1)
    assert isinstance(pool.full_attn_allocator, TokenToKVPoolAllocator)
    assert isinstance(pool.swa_attn_allocator, TokenToKVPoolAllocator)
    assert pool.full_to_swa_index_mapping.tolist() == [0, 0, 0, 0, -1]


@pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(AllocatorError, match=r"expected (size|page_size) >= 1, got 0"):
        SWATokenToKVPoolAllocator(*sizes, torch.float16, "cpu", None, False)


def test_the_kvcache_is_told_of_the_mapping_and_lends_its_pools():
    told = []
    buffers = SimpleNamespace(
        register_mapping=told.append,
        full_kv_pool="full",
        swa_kv_pool="swa",
        swa_req_ring_size=None,
        get_cpu_copy=lambda indices, **kwargs: (indices, kwargs),
        load_cpu_copy=lambda copy, indices, **kwargs: (copy, indices, kwargs),
    )
    pool = swa_pool(3, 2, 4, kvcache=buffers)
    assert len(told) == 1
    assert told[0] is pool.full_to_swa_index_mapping
    assert pool.get_kvcache() is buffers
    assert pool.full_attn_allocator.get_kvcache() == "full"
    assert pool.swa_attn_allocator.get_kvcache() == "swa"
    assert pool.get_cpu_copy(3, mamba_indices=4) == (3, {"mamba_indices": 4})
    assert pool.load_cpu_copy("copy", 3, req_pool_index=4) == ("copy", 3, {"req_pool_index": 4})
    pool.resize(SimpleNamespace(full_max_total_num_tokens=8, swa_max_total_num_tokens=4))
    assert len(told) == 2
    assert told[1] is pool.full_to_swa_index_mapping


def test_resize_follows_on_both_sides():
    pool = swa_pool(3, 2, 4)
    extend(pool, (0, 8, -1))
    pool.free_group_begin()
    pool.resize(SimpleNamespace(full_max_total_num_tokens=21, swa_max_total_num_tokens=16))
    assert lists(pool) == ([1, 2, 3, 4, 5], [], [1, 2, 3, 4], [])
    assert pool.full_to_swa_index_mapping.tolist() == [0] * 25 + [-1]
    pool.free_group_begin()  # none is open
    pool.resize(SimpleNamespace(max_total_num_tokens=8))
    assert (pool.size_full, pool.size_swa, lists(pool)) == (8, 8, ([1, 2], [], [1, 2], []))
    with pytest.raises(AllocatorError, match="resize: expected swa_max_total_num_tokens >= 1, got 0"):
        pool.resize(SimpleNamespace(full_max_total_num_tokens=21, swa_max_total_num_tokens=0))
    assert (pool.size_full, pool.size_swa) == (8, 8)


def test_the_path_is_chosen_for_the_pools_too():
    pool = swa_pool(3, 2, 4)
    for value in (True, False):
        pool.use_triton_kernels = value
        assert pool.full_attn_allocator.use_triton_kernels is value
        assert pool.swa_attn_allocator.use_triton_kernels is value
        assert pool.use_triton_kernels is value


# --- allocation ---------------------------------------------------------------------------------------


def test_an_extend_maps_every_slot_to_its_peer():
    pool = swa_pool(8, 6, 4)
    pool.swa_attn_allocator.free_pages = ids(5, 2, 6, 1)
    assert extend(pool, (0, 6, -1), (0, 1, -1)) == [4, 5, 6, 7, 8, 9, 12]
    assert peers(pool, 4, 5, 6, 7, 8, 9, 12) == [20, 21, 22, 23, 8, 9, 24]
    assert peers(pool, 10, 13, -1) == [0, 0, -1]
    # Row A has 2 slots left on either side and takes full page 4 and swa page 1; row B goes on in its page.
    assert extend(pool, (6, 9, 9), (1, 2, 12)) == [10, 11, 16, 13]
    assert peers(pool, 10, 11, 16, 13) == [10, 11, 4, 25]
    assert lists(pool) == ([5, 6, 7, 8], [], [], [])


def test_a_decode_maps_every_slot_to_its_peer():
    pool = swa_pool(4, 4, 4)
    extend(pool, (0, 4, -1), (0, 6, -1))
    pool.swa_attn_allocator.free_pages = ids(4)
    assert decode(pool, (5, 7), (7, 13)) == [16, 14]
    assert peers(pool, 16, 14) == [16, 14]
    assert decode(pool, (6, 16), (8, 14)) == [17, 15]
    assert peers(pool, 17, 15) == [17, 15]


def test_pages_need_not_be_powers_of_two():
    pool = swa_pool(4, 4, 3)
    pool.swa_attn_allocator.free_pages = ids(4, 3, 2)
    assert extend(pool, (0, 4, -1)) == [3, 4, 5, 6]
    assert decode(pool, (5, 6)) == [7]
    assert peers(pool, 3, 4, 5, 6, 7) == [12, 13, 14, 9, 10]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("pages", "swa_pages"), [(2, 3), (3, 2)])
def test_when_one_side_is_short_neither_takes_part(pages, swa_pages, checked):
    pool = swa_pool(pages, swa_pages, 4, need_sort=True, checked=checked)
    extend(pool, (0, 4, -1))
    pool.free(ids(4, 5, 6, 7))
    before = state(pool)
    assert before[0][1::2] == ([1], [1])
    assert extend(pool, (0, 5, -1), (0, 1, -1)) is None  # 3 pages
    assert decode(pool, (1, -1), (1, -1), (1, -1)) is None
    assert state(pool) == before  # not even the staged pages are merged
    if pages == 2:
        assert extend(pool, (0, 12, -1), tail=4) is None
    else:
        assert extend(pool, (0, 12, -1), tail=12) is None
    assert state(pool) == before
    assert extend(pool, (0, 5, -1)) == [4, 5, 6, 7, 8]


def test_a_refusal_at_pages_of_one():
    pool = swa_pool(4, 2, 1, need_sort=True)
    slots = pool.alloc(2)
    assert slots.tolist() == [1, 2]
    pool.free(slots)
    before = state(pool)
    assert pool.alloc(3) is None
    assert state(pool) == before
    # The full side has enough free slots, the swa side has to merge.
    assert pool.alloc(2).tolist() == [3, 4]
    assert (peers(pool, 3, 4), lists(pool)) == ([1, 2], ([], [1, 2], [], []))


def test_each_side_merges_by_its_own_rule():
    pool = swa_pool(6, 4, 4, need_sort=True)
    extend(pool, (0, 12, -1))
    pool.free(ids(*range(4, 8)))
    pool.free_swa(ids(8))
    assert lists(pool) == ([4, 5, 6], [1], [4], [1, 2])
    # decode of one row: 1 > 3 and 1 > 1 are false, nothing merges
    assert decode(pool, (13, 15)) == [16]
    assert lists(pool) == ([5, 6], [1], [], [1, 2])
    # extend of 1 token: 0 + 1 + 1 = 2 > len is false on the full side and true on the swa side
    assert extend(pool, (0, 1, -1)) == [20]
    assert peers(pool, 20) == [4]
    assert lists(pool) == ([6], [1], [2], [])


def test_rows_that_do_not_grow_and_empty_batches_cost_nothing():
    pool = swa_pool(2, 2, 4)
    assert extend(pool, (0, 0, -1), (0, 4, -1), (0, 0, -1)) == [4, 5, 6, 7]
    assert extend(pool, (4, 4, 7)) == []
    empty = torch.tensor([])
    assert pool.alloc_extend(empty, empty, empty, empty, empty, 0).tolist() == []
    assert pool.alloc_decode(empty, empty, empty).tolist() == []
    assert lists(pool) == ([2], [], [2], [])


def test_num_new_pages_is_believed():
    pool = swa_pool(2, 2, 4)
    prefix, seq, last = ids(0), ids(8), ids(-1)
    assert pool.alloc_extend(prefix, prefix, seq, seq, last, 8, num_new_pages=3) is None
    slots = pool.alloc_extend(prefix, prefix, seq, seq, last, 8, num_new_pages=2)
    assert slots.tolist() == list(range(4, 12))


def test_the_answer_shares_no_memory_with_the_lists():
    pool = swa_pool(3, 3, 1)
    pool.alloc(2).fill_(7)
    assert lists(pool) == ([3], [], [3], [])
    assert pool.alloc(1).tolist() == [3]


# --- tails --------------------------------------------------------------------------------------------


def test_a_tail_is_a_fresh_row_on_the_swa_side():
    pool = swa_pool(6, 3, 4)
    extend(pool, (0, 2, -1))
    # 12 more tokens in slots 6, 7 and pages 2 to 4; positions 8 to 13 have peers, from swa page 2 on
    assert extend(pool, (2, 14, 5), tail=6) == [6, 7, *range(8, 18)]
    assert peers(pool, 4, 5, 6, 7, 8, 11, 12, 13, 15, 16, 17) == [4, 5, 0, 0, 0, 0, 8, 9, 11, 12, 13]
    assert lists(pool) == ([5, 6], [], [], [])
    assert decode(pool, (15, 17)) == [18]
    assert peers(pool, 18) == [14]


def test_a_tail_may_be_all_or_nothing():
    pool = swa_pool(6, 6, 4)
    assert extend(pool, (0, 5, -1), tail=5) == [4, 5, 6, 7, 8]
    assert peers(pool, 4, 8) == [4, 8]
    assert extend(pool, (0, 3, -1), tail=0) == [12, 13, 14]
    assert peers(pool, 12, 13, 14) == [0, 0, 0]
    assert extend(pool, (0, 0, -1), tail=0) == []
    assert lists(pool) == ([4, 5, 6], [], [3, 4, 5, 6], [])


@pytest.mark.parametrize("tail", [0, 4])
def test_the_head_is_unmapped_whatever_was_there(tail):
    """The handed case "stale-head", with the entries of an earlier life put there by hand."""
    pool = swa_pool(4, 4, 4)
    pool.full_to_swa_index_mapping[4:16] = 9
    extend(pool, (0, 12, -1), tail=tail)
    assert peers(pool, *range(4, 12)) == [0] * 8
    assert peers(pool, *range(12, 16)) == ([4, 5, 6, 7] if tail else [0] * 4)


def test_a_tail_merges_the_swa_side_as_one_fresh_row():
    pool = swa_pool(8, 4, 4, need_sort=True)
    extend(pool, (0, 16, -1))
    pool.free_swa_segment(ids(*range(4, 12)), start_pos=0)
    pool.swa_attn_allocator.free_pages = ids(7, 6)
    assert extend(pool, (0, 8, -1), tail=0) == list(range(20, 28))
    assert extend(pool, (0, 4, -1), tail=3) == [28, 29, 30, 31]  # 3 // 4 + 2 = 2 > 2 is false
    assert peers(pool, 28, 29, 30, 31) == [0, 28, 29, 30]
    assert lists(pool)[2:] == ([6], [1, 2])
    assert extend(pool, (0, 4, -1), tail=1) == [32, 33, 34, 35]  # 1 // 4 + 2 = 2 > 1
    assert lists(pool)[2:] == ([2, 6], [])


@pytest.mark.parametrize("checked", [False, True])
def test_tails_that_are_none_are_refused(checked):
    pool = swa_pool(6, 6, 4, checked=checked)
    before = state(pool)
    for tail in (-1, 5):
        message = f"expected 0 <= swa_tail_len <= extend_num_tokens = 4, got {tail}"
        with pytest.raises(AllocatorError, match=message):
            extend(pool, (0, 4, -1), tail=tail)
    with pytest.raises(
        AllocatorError, match="alloc_extend_swa_tail: expected a batch of one row, got 2 rows"
    ):
        extend(pool, (0, 4, -1), (0, 4, -1), tail=2)
    assert state(pool) == before


# --- calls of the other page size ---------------------------------------------------------------------


def test_calls_of_the_other_page_size_are_refused():
    token, paged = swa_pool(4, 4, 1), swa_pool(4, 4, 4)
    one, zero, last = ids(1), ids(0), ids(-1)
    for call in (
        lambda: paged.alloc(4),
        lambda: token.alloc_extend(zero, zero, one, one, last, 1),
        lambda: token.alloc_extend_swa_tail(zero, zero, one, one, last, 1, 1),
        lambda: token.alloc_decode(one, one, last),
    ):
        with pytest.raises(UnsupportedCallError, match=r"expected pages of .* slots?, got SWA"):
            call()
    with pytest.raises(AllocatorError, match="alloc: expected a size >= 0, got -1"):
        token.alloc(-1)


# --- rings --------------------------------------------------------------------------------------------


class _Rows:
    def __init__(self, free: int) -> None:
        self.free = free

    def available_size(self) -> int:
        return self.free


@pytest.mark.parametrize("checked", [False, True])
def test_with_rings_only_the_full_side_is_paged(checked):
    rows = _Rows(3)
    cache = SimpleNamespace(swa_req_ring_size=6)
    pool = swa_pool(6, 2, 4, kvcache=cache, rows=rows, checked=checked)
    assert (pool.swa_req_ring, pool.swa_ring_cost_tokens, pool.size_swa, pool.size) == (True, 8, 24, 24)
    rows.free = 2
    assert (pool.swa_available_size(), pool.available_size(), pool.size_swa) == (16, 24, 24)
    a = extend(pool, (0, 12, -1))  # 3 pages; the swa side would have 2
    b = extend(pool, (0, 5, -1), tail=2)
    assert (a, b) == ([*range(4, 16)], [16, 17, 18, 19, 20])
    assert decode(pool, (6, 20)) == [21]
    assert pool.full_to_swa_index_mapping.tolist() == [0] * 28 + [-1]
    assert (pool.new_pages_available(1, 9), pool.new_pages_available(2, 0)) == (True, False)
    before = state(pool)
    pool.free_swa(ids(*a))
    pool.free_swa_segment(ids(*a), start_pos=0)
    assert state(pool) == before
    pool.free_group_begin()
    pool.free_segment(ids(*a[:4]), start_pos=0)
    pool.free_full(ids(*a[4:8]))
    pool.free_group_end()
    assert lists(pool)[0] == [1, 2, 6]
    pool.free_full_segment(ids(*a[8:]), start_pos=8)
    pool.free(ids(*b, 21))
    assert lists(pool) == ([4, 5, 3, 1, 2, 6], [], [1, 2], [])
    assert (pool.swa_available_size(), pool.available_size()) == (16, 24)
    assert pool.debug_print() == "full: 6 free + 0 staged of 6 pages; swa: 16 slots in rings"
    pool.resize(SimpleNamespace(full_max_total_num_tokens=8, swa_max_total_num_tokens=4))
    assert (pool.size_full, pool.size_swa, lists(pool)[0]) == (8, 24, [1, 2])


def test_rings_need_request_rows():
    with pytest.raises(AllocatorError, match="expected a req_to_token_pool beside a ring, got none"):
        swa_pool(6, 2, 4, kvcache=SimpleNamespace(swa_req_ring_size=6))


# --- the same as the oracle ---------------------------------------------------------------------------


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7, 16])
def test_random_lawful_use_is_as_the_oracle_has_it(page_size, need_sort):
    granted = remapped = 0
    for seed in range(4):
        run = Run(f"{seed} {page_size}", page_size, need_sort=need_sort, checked=False)
        assert run.steps(250) == ""
        granted += run.granted
        remapped += run.remapped
    assert granted > 100
    assert remapped > 0
