"""The HiSparse allocator against section 6 of the contract, by the torch path.

Not here: checked mode (test_hisparse_checked.py), the kernels (test_hisparse_kernels.py), DeepSeek-V4
(test_hisparse_v4.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvproof.impl.errors import AllocatorError, UnsupportedCallError
from tests.impl.hisparse_pools import (
    all_mapped,
    buffer,
    decode,
    extend,
    hisparse_pool,
    lists,
    mapped,
    staged_device,
    state,
)
from tests.impl.pools import alloc, ids

# --- what it is -----------------------------------------------------------------------------------------


def test_sizes_and_the_mapping():
    told = []
    pool = hisparse_pool(3, 4, 2, kvcache=SimpleNamespace(register_mapping=told.append))
    assert (pool.size, pool.size_full, pool.available_size()) == (24, 24, 12)
    assert lists(pool) == ([1, 2, 3, 4, 5, 6], [1, 2, 3])
    mapping = pool.full_to_hisparse_device_index_mapping
    assert mapping.tolist() == [0] * (24 + 4) + [-1]
    assert told == [mapping]
    assert told[0] is mapping
    assert (pool.compress_ratio, pool.page_size, pool.hisparse_page_size) == (1, 4, 4)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_sizes_out_of_range_are_refused(sizes):
    with pytest.raises(AllocatorError):
        hisparse_pool(*sizes)


def test_available_is_that_of_the_side_with_less():
    pool = hisparse_pool(2, 4, 2)
    slots = extend(pool, (0, 5, -1), call="alloc_logical_only")
    assert pool.available_size() == 8
    extend(pool, (0, 1, -1), call="alloc_logical_only")
    assert pool.available_size() == 4
    pool.free(ids(*slots))
    assert pool.available_size() == 8


# --- allocation -----------------------------------------------------------------------------------------


def test_extend_takes_from_both_sides_and_maps():
    pool = hisparse_pool(4, 4, 2)
    pool.hisparse_attn_allocator.free_pages = ids(3, 1, 4, 2)
    assert extend(pool, (0, 6, -1), (0, 2, -1)) == [4, 5, 6, 7, 8, 9, 12, 13]
    assert all_mapped(pool) == {4: 12, 5: 13, 6: 14, 7: 15, 8: 4, 9: 5, 12: 16, 13: 17}
    # The rest of device page 1, then a new one; last_loc of a new row is -1.
    assert extend(pool, (6, 9, 9), (0, 0, -1), dtype=torch.int32) == [10, 11, 16]
    assert mapped(pool, 10, 11, 16) == [6, 7, 8]
    assert lists(pool) == ([5, 6, 7, 8], [])
    assert pool.get_last_loc_hisparse_device(ids(9, 16, -1, 17)).tolist() == [5, 8, -1, 0]
    assert pool.get_last_loc_compressed(ids(9, -1)).tolist() == [9, -1]


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_side_that_is_short_leaves_everything_as_it_was(need_sort):
    pool = hisparse_pool(2, 4, 2, need_sort=need_sort)
    slots = extend(pool, (0, 4, -1), (0, 1, -1))
    pool.free(ids(*slots[:4]))
    before = state(pool)
    assert extend(pool, (0, 5, -1)) is None  # 1 device page of 2
    assert state(pool) == before
    extend(pool, (0, 12, -1), call="alloc_logical_only")
    pool.free(ids(8))
    before = state(pool)
    assert extend(pool, (0, 4, -1), (0, 4, -1)) is None  # 1 logical page of 2
    assert state(pool) == before


def test_decode_and_logical_only_take_no_device_slots():
    pool = hisparse_pool(2, 4, 2)
    assert extend(pool, (0, 3, -1)) == [4, 5, 6]
    assert decode(pool, (4, 6)) == [7]
    assert extend(pool, (0, 5, -1), call="alloc_logical_only") == [8, 9, 10, 11, 12]
    assert all_mapped(pool) == {4: 4, 5: 5, 6: 6}
    assert lists(pool)[1] == [2]


def test_both_sides_merge_by_the_estimate():
    pool = hisparse_pool(3, 1, 1, need_sort=True)
    alloc(pool, 3)
    pool.free(ids(3))
    pool.free(ids(1))
    assert lists(pool) == ([], [])
    # 1 // 1 + 1 + 1 = 3 > 0: either side sorts what is staged
    assert extend(pool, (0, 1, -1)) == [1]
    assert (lists(pool), staged_device(pool)) == (([3], [3]), [])


def test_alloc_is_for_pages_of_one():
    pool = hisparse_pool(3, 1, 2)
    pool.hisparse_attn_allocator.free_pages = ids(2, 3, 1)
    assert alloc(pool, 2) == [1, 2]
    assert all_mapped(pool) == {1: 2, 2: 3}
    assert alloc(pool, 2) is None
    assert alloc(pool, 0) == []
    assert lists(pool) == ([3, 4, 5, 6], [1])
    with pytest.raises(AllocatorError, match="got -1"):
        pool.alloc(-1)
    with pytest.raises(UnsupportedCallError, match="Use alloc_extend"):
        hisparse_pool(2, 4).alloc(4)


def test_results_share_no_memory_with_the_lists():
    pool = hisparse_pool(3, 1, 1)
    pool.alloc(2).fill_(9)
    buffer_slots = pool.alloc_device_buffer(ids(1, 2), 1)
    buffer_slots.fill_(9)
    assert lists(pool) == ([3], [2, 3])


# --- release --------------------------------------------------------------------------------------------


def test_free_releases_whole_pages_of_both_sides():
    pool = hisparse_pool(4, 4, 2)
    pool.hisparse_attn_allocator.free_pages = ids(4, 2, 3, 1)
    slots = extend(pool, (0, 6, -1), (0, 3, -1))  # pages 1, 2, 3 on device pages 4, 2, 3
    assert decode(pool, (7, 9)) == [10]
    pool.free(ids(13, 10, 12, 14, 8, 9, 8, dtype=torch.int32))
    assert lists(pool) == ([2, 3, 4, 5, 6, 7, 8], [2, 3, 1])
    assert all_mapped(pool) == dict(zip(slots[:4], range(16, 20), strict=True))
    pool.free(torch.tensor([]))
    pool.free_full(ids(*slots[:4]))
    assert (lists(pool)[1], all_mapped(pool)) == ([4, 2, 3, 1], {})


def test_the_whole_page_is_cleared_whichever_of_its_slots_is_named():
    pool = hisparse_pool(2, 4)
    extend(pool, (0, 4, -1))
    pool.free_hisparse(ids(6))
    assert (lists(pool), all_mapped(pool)) == (([2, 3, 4], [1, 2]), {})
    pool.free_hisparse(ids(4, 5))  # nothing is mapped any more
    pool.free(ids(4, 5, 6, 7))
    assert lists(pool) == ([1, 2, 3, 4], [1, 2])


@pytest.mark.parametrize("method", ["free_segment", "free_full_segment"])
def test_a_segment_is_row_order_there_and_a_set_here(method):
    pool = hisparse_pool(4, 2, 1)
    pool.logical_attn_allocator.free_pages = ids(4, 2, 3, 1)
    pool.hisparse_attn_allocator.free_pages = ids(3, 4, 1, 2)
    slots = extend(pool, (0, 7, -1))
    getattr(pool, method)(ids(*slots[2:]), start_pos=2)
    assert lists(pool) == ([2, 3, 1], [1, 2, 4])
    assert all_mapped(pool) == {8: 6, 9: 7}
    with pytest.raises(AllocatorError, match=f"{method}: expected start_pos to be a multiple of 2"):
        getattr(pool, method)(ids(*slots[:2]), start_pos=1)


@pytest.mark.parametrize("method", ["free_segments", "free_full_segments"])
def test_segments_are_a_set_each(method):
    pool = hisparse_pool(4, 2, 1)
    pool.hisparse_attn_allocator.free_pages = ids(3, 4, 1, 2)
    slots = extend(pool, (0, 8, -1))
    getattr(pool, method)([(ids(*slots[:4]), 0), (ids(), 4), (ids(*slots[4:]), 4)])
    assert lists(pool) == ([3, 4, 1, 2], [1, 2, 3, 4])
    with pytest.raises(AllocatorError, match="ascend and share no page"):
        getattr(pool, method)([(ids(2, 3), 0), (ids(2, 3), 0)])


def test_groups_are_no_ops():
    pool = hisparse_pool(2, 2)
    slots = extend(pool, (0, 2, -1))
    for _ in range(2):
        pool.free_group_begin()
    pool.free(ids(*slots))
    assert (lists(pool), all_mapped(pool)) == (([1, 2, 3, 4], [1, 2]), {})
    for _ in range(3):
        pool.free_group_end()


def test_clear():
    pool = hisparse_pool(2, 2)
    extend(pool, (0, 4, -1))
    pool.clear()
    assert (lists(pool), all_mapped(pool)) == (([1, 2, 3, 4], [1, 2]), {})


# --- buffers --------------------------------------------------------------------------------------------


def test_a_buffer_of_as_many_pages_as_the_row_has():
    pool = hisparse_pool(3, 4)
    slots = extend(pool, (0, 8, -1))
    assert buffer(pool, slots, 8) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert (lists(pool)[1], all_mapped(pool)) == ([3], {})
    pool.free(ids(*slots))  # the row goes, the buffer stays
    assert lists(pool) == ([1, 2, 3, 4, 5, 6], [3])
    pool.free_hisparse_indices(ids(11, 4, 5, 6, 7, 8, 9, 10, 4, 0, 3, dtype=torch.int32))
    assert lists(pool)[1] == [1, 2, 3]
    pool.free_hisparse_indices(ids(0, 1))
    pool.free_hisparse_indices(torch.tensor([]))
    assert lists(pool)[1] == [1, 2, 3]


def test_surplus_pages_are_released_as_a_set():
    pool = hisparse_pool(4, 2, 1)
    pool.hisparse_attn_allocator.free_pages = ids(2, 4, 3, 1)
    slots = extend(pool, (0, 7, -1))
    assert buffer(pool, slots, 2) == [4, 5]
    assert (lists(pool)[1], all_mapped(pool)) == ([1, 3, 4], {})
    assert buffer(pool, [], 0) == []


def test_a_partial_page_is_completed_and_pages_are_added():
    pool = hisparse_pool(4, 4)
    pool.hisparse_attn_allocator.free_pages = ids(4, 2, 3, 1)
    slots = extend(pool, (0, 6, -1))
    slots += decode(pool, (7, 9))  # without a device slot
    assert buffer(pool, slots, 12) == [*range(16, 20), *range(8, 12), *range(12, 16)]
    assert (lists(pool)[1], all_mapped(pool)) == ([1], {})


def test_a_partial_page_may_be_all_there_is():
    pool = hisparse_pool(2, 4)
    slots = extend(pool, (0, 3, -1))
    assert buffer(pool, slots, 4) == [4, 5, 6, 7]
    assert lists(pool)[1] == [2]


def test_a_row_without_device_slots_gets_new_ones():
    pool = hisparse_pool(2, 4)
    slots = extend(pool, (0, 3, -1), call="alloc_logical_only")
    assert buffer(pool, slots, 8) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_refused_buffer_detaches_nothing():
    pool = hisparse_pool(2, 4)
    slots = extend(pool, (0, 3, -1))
    before = state(pool)
    assert buffer(pool, slots, 12) is None
    assert state(pool) == before
    assert buffer(pool, slots, 8) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_buffer_merges_when_the_free_list_is_short():
    pool = hisparse_pool(4, 1, 1, need_sort=True)
    alloc(pool, 4)
    pool.free(ids(3))
    pool.free(ids(2))
    assert buffer(pool, [1], 2) == [1, 2]
    assert (lists(pool)[1], staged_device(pool)) == ([3], [])


@pytest.mark.parametrize("need", [1, 6, -4])
def test_a_buffer_is_whole_pages(need):
    pool = hisparse_pool(2, 4)
    slots = extend(pool, (0, 3, -1))
    before = state(pool)
    with pytest.raises(AllocatorError, match=rf"alloc_device_buffer: expected a size of whole.*got {need}"):
        pool.alloc_device_buffer(ids(*slots), need)
    assert state(pool) == before


def test_the_reserve_of_a_request():
    pool = hisparse_pool(2, 4)
    assert pool.request_slot_reserve(has_req_pool_slot=False, prefill_tokens=9) == 0
    pool.configure_spec_scratch(8, device_buffer_size=16)
    assert pool.request_slot_reserve(has_req_pool_slot=False) == 24
    assert pool.request_slot_reserve(has_req_pool_slot=True, prefill_tokens=5) == 8  # 2 pages are there
    assert pool.request_slot_reserve(has_req_pool_slot=False, prefill_tokens=40) == 8
    pool.configure_spec_scratch(0, device_buffer_size=16)
    assert pool.request_slot_reserve(has_req_pool_slot=False) == 0
    for capacity, size in ((-4, 0), (3, 0), (4, 5), (4, -4)):
        with pytest.raises(AllocatorError, match="configure_spec_scratch"):
            pool.configure_spec_scratch(capacity, device_buffer_size=size)
