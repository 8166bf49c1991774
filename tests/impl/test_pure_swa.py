"""One token pool for both sides, against section 5 of the contract."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvproof.impl.errors import AllocatorError, UnsupportedCallError
from kvproof.impl.pure_swa import PureSWATokenToKVPoolAllocator
from kvproof.impl.swa import SWATokenToKVPoolAllocator
from tests.impl.pools import ids
from tests.impl.swa_pools import lists, state


def pure(size: int, *, need_sort: bool = False, checked: bool = False, kvcache=None):
    return PureSWATokenToKVPoolAllocator(size, 1, torch.float16, "cpu", kvcache, need_sort, checked=checked)


@pytest.fixture(params=[False, True], ids=["unchecked", "checked"])
def pool(request):
    """6 slots, of which 1 to 4 are out."""
    pool = pure(6, checked=request.param)
    assert pool.alloc(4).tolist() == [1, 2, 3, 4]
    return pool


def test_both_sides_are_one_pool(pool):
    assert isinstance(pool, SWATokenToKVPoolAllocator)
    assert pool.full_attn_allocator is pool.swa_attn_allocator
    assert (pool.size, pool.size_full, pool.size_swa) == (6, 6, 6)
    assert (pool.available_size(), pool.full_available_size(), pool.swa_available_size()) == (2, 2, 2)
    assert pool.full_to_swa_index_mapping.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    assert pool.translate_loc_from_full_to_swa(ids(3, 5, -1)).tolist() == [3, 5, -1]
    assert (pool.new_pages_available(2, 2), pool.new_pages_available(2, 3)) == (True, False)
    assert (pool.swa_req_ring, pool.swa_ring_cost_tokens) == (False, 0)
    assert pool.debug_print() == "2 free + 0 staged of 6 pages"
    assert pool.alloc(3) is None


def test_every_release_is_one_release_in_order(pool):
    pool.free(ids(3))
    pool.free_swa(ids(1))
    pool.free_segment(ids(4), start_pos=3)
    pool.free_swa_segment(ids(2), start_pos=1)
    assert lists(pool)[0] == [5, 6, 3, 1, 4, 2]
    assert pool.available_size() == 6


def test_the_handed_case_pure_swa_segment(pool):
    pool.free_segments([(ids(1, 2), 0), (ids(4, 3), 2)])
    assert lists(pool)[0] == [5, 6, 1, 2, 4, 3]


def test_frees_of_the_full_side_do_nothing(pool):
    before = state(pool)
    pool.free_full(ids(1, 2))
    pool.free_full_segment(ids(1, 2), start_pos=0)
    pool.free_full_segments([(ids(1, 2), 0)])
    assert state(pool) == before


def test_groups_hold_everything(pool):
    pool.free_group_begin()
    slots = ids(4)
    pool.free_swa(slots)
    slots.fill_(1)
    pool.free_segment(ids(2), start_pos=1)
    assert pool.available_size() == 2
    with pytest.raises(AllocatorError, match="expected no open group"):
        pool.free_group_begin()
    pool.free_group_end()
    assert lists(pool)[0] == [5, 6, 4, 2]
    with pytest.raises(AllocatorError, match="expected an open group"):
        pool.free_group_end()


def test_staged_slots_merge():
    pool = pure(3, need_sort=True)
    pool.alloc(3)
    pool.free(ids(3, 1))
    assert lists(pool)[:2] == ([], [3, 1])
    pool.merge_and_sort_free()
    assert lists(pool)[:2] == ([1, 3], [])
    assert pool.alloc(2).tolist() == [1, 3]


def test_paged_calls_and_mapping_edits_are_refused(pool):
    before = state(pool)
    one, zero, last = ids(1), ids(0), ids(-1)
    for call in (
        lambda: pool.alloc_extend(zero, zero, one, one, last, 1),
        lambda: pool.alloc_extend_swa_tail(zero, zero, one, one, last, 1, 1),
        lambda: pool.alloc_decode(one, one, last),
        lambda: pool.set_full_to_swa_mapping(one, one),
        lambda: pool.clear_full_to_swa_mapping(one),
    ):
        with pytest.raises(UnsupportedCallError, match="got PureSWATokenToKVPoolAllocator with pages of 1"):
            call()
    assert state(pool) == before
    with pytest.raises(AllocatorError, match="expected a page size of 1, got 4"):
        PureSWATokenToKVPoolAllocator(8, 4, torch.float16, "cpu", None, False)


def test_clear_and_resize():
    told = []
    pool = pure(
        3, kvcache=SimpleNamespace(register_mapping=told.append, swa_req_ring_size=8, swa_kv_pool="swa")
    )
    assert pool.swa_attn_allocator.get_kvcache() == "swa"
    pool.alloc(2)
    pool.clear()
    assert pool.alloc(3).tolist() == [1, 2, 3]
    pool.resize(SimpleNamespace(full_max_total_num_tokens=9, swa_max_total_num_tokens=2))
    assert (pool.size, lists(pool)[0]) == (2, [1, 2])
    assert [mapping.tolist() for mapping in told] == [[0, 1, 2, 3, -1], [0, 1, 2, -1]]


def test_checked_mode_is_the_pool_s():
    pool = pure(4, checked=True)
    pool.alloc(2)
    pool.free_swa(ids(1))
    before = state(pool)
    with pytest.raises(
        AllocatorError, match="expected live slots, got slot 1, of page 1, released by free call 2"
    ):
        pool.free(ids(1))
    with pytest.raises(AllocatorError, match="expected live slots, got slot 0, of the padding page"):
        pool.free_segment(ids(2, 0), start_pos=0)
    assert state(pool) == before
