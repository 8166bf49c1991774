"""HiSparse for DeepSeek-V4 against section 6 of the contract, by the torch path, and as a wrapper.

Not here: checked mode (test_hisparse_checked.py), the kernels (test_hisparse_kernels.py), and what it shares
with the other variant (test_hisparse.py).
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from kvproof.impl.errors import AllocatorError, UnsupportedCallError
from kvproof.impl.hisparse_v4 import DeepSeekV4HiSparseTokenToKVPoolAllocator
from kvproof.impl.swa import SWATokenToKVPoolAllocator
from tests.impl.hisparse_pools import all_mapped, buffer, decode, extend, lists, staged_device, state, v4_pool
from tests.impl.pools import free_list, ids
from tests.impl.swa_pools import peers, swa_pool

# --- the wrapper ----------------------------------------------------------------------------------------


def _public(of: object) -> list[str]:
    return [name for name in dir(of) if not name.startswith("_")]


def test_it_has_every_public_name_of_what_it_wraps():
    """P16, the handed case "wrapper-gap"."""
    pool = v4_pool(4, 4, 4, 8)
    wrapped = _public(pool.logical_attn_allocator)
    assert "free_swa_segment" in wrapped  # the list is that of the class as it is
    assert [name for name in wrapped if not hasattr(pool, name)] == []


def _methods() -> list[str]:
    found = inspect.getmembers(SWATokenToKVPoolAllocator, inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_")]


def test_the_probe_of_the_wrapper_sees_a_gap():
    assert {"free_swa", "free_group_end", "translate_loc_from_full_to_swa"} <= set(_methods())

    class Gap(DeepSeekV4HiSparseTokenToKVPoolAllocator):
        free_swa = property()  # raises AttributeError when it is read

    whole = v4_pool(4, 4, 4, 8)
    gap = Gap(whole.logical_attn_allocator)
    assert [name for name in _public(whole.logical_attn_allocator) if not hasattr(gap, name)] == ["free_swa"]


@pytest.mark.parametrize("name", _methods())
def test_every_method_takes_what_the_wrapped_one_takes(name):
    """Names, order, kinds and defaults; a caller need not know which of the two it has."""
    wrapped = inspect.signature(getattr(SWATokenToKVPoolAllocator, name)).parameters.values()
    mine = inspect.signature(getattr(DeepSeekV4HiSparseTokenToKVPoolAllocator, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in wrapped]


FORWARDED = {
    "alloc_decode": (ids(1), ids(1), ids(-1)),
    "alloc_extend_swa_tail": (ids(0), ids(0), ids(4), ids(4), ids(-1), 4, 2),
    "clear_full_to_swa_mapping": (ids(8),),
    "free_full": (ids(8),),
    "free_full_segments": ([(ids(8), 0)],),
    "free_swa": (ids(8),),
    "get_all_free_pages": (),
    "get_cpu_copy": (ids(8), "more"),
    "load_cpu_copy": ("copy", ids(8), "more"),
    "set_full_to_swa_mapping": (ids(8), ids(9)),
    "swa_available_size": (),
    "translate_loc_from_full_to_swa": (ids(8),),
}
# These do more than pass the call on; each has a test of its own.
OWN = {
    "alloc",
    "alloc_extend",
    "available_size",
    "clear",
    "debug_print",
    "free",
    "free_full_segment",
    "free_group_begin",
    "free_group_end",
    "free_segment",
    "free_segments",
    "free_swa_segment",
    "full_available_size",
    "get_kvcache",
    "merge_and_sort_free",
    "new_pages_available",
    "resize",
}


def test_every_method_is_accounted_for():
    assert sorted([*FORWARDED, *OWN]) == _methods()


@pytest.mark.parametrize("name", FORWARDED)
def test_a_forwarded_call_arrives_with_its_arguments_and_comes_back(name):
    pool = v4_pool(4, 4, 4, 8)
    calls = []

    def take(*args):
        calls.append(args)
        return "answer"

    pool.logical_attn_allocator = SimpleNamespace(**{name: take})
    answer = getattr(pool, name)(*FORWARDED[name])
    assert len(calls) == 1
    assert all(got is sent or got == sent for got, sent in zip(calls[0], FORWARDED[name], strict=True))
    returns = inspect.signature(getattr(SWATokenToKVPoolAllocator, name)).return_annotation
    assert answer == (None if returns in (None, "None") else "answer")


@pytest.mark.parametrize("name", ["free_swa_segment", "free_full_segment"])
def test_a_forwarded_segment_arrives_with_its_start(name):
    pool = v4_pool(4, 4, 4, 8)
    calls = []
    take = {name: lambda slots, *, start_pos: calls.append((slots.tolist(), start_pos))}
    pool.logical_attn_allocator = SimpleNamespace(**take)
    getattr(pool, name)(ids(8), start_pos=16)
    assert calls == [([8], 16)]


# --- what it is -----------------------------------------------------------------------------------------


def test_sizes_and_the_mapping():
    pool = v4_pool(5, 4, 3, 8)
    assert (pool.size, pool.size_full, pool.size_swa) == (32, 40, 32)
    assert lists(pool) == ([1, 2, 3, 4, 5], [1, 2, 3])
    assert pool.full_to_hisparse_device_index_mapping.tolist() == [0] * (40 // 4 + 2) + [-1]
    assert (pool.compress_ratio, pool.page_size, pool.hisparse_page_size) == (4, 8, 2)
    # 3 device pages hold 24 tokens
    assert (pool.available_size(), pool.full_available_size(), pool.swa_available_size()) == (24, 24, 32)
    assert pool.new_pages_available(3, 4)
    assert not pool.new_pages_available(4, 4)
    assert not pool.new_pages_available(3, 5)
    assert pool.get_kvcache() is pool.logical_attn_allocator.get_kvcache()
    assert not pool.swa_req_ring
    assert pool.swa_ring_cost_tokens == 0


def test_the_kvcache_says_how_many_entries_there_are_and_is_told_of_them():
    told = []
    c4 = SimpleNamespace(size=6, page_size=2, register_mapping=told.append)
    kvcache = SimpleNamespace(c4_kv_pool=c4, c4_logical_size=12)
    pool = DeepSeekV4HiSparseTokenToKVPoolAllocator(swa_pool(5, 4, 8, kvcache=kvcache))
    assert pool.full_to_hisparse_device_index_mapping.numel() == 12 + 2 + 1
    assert told[0] is pool.full_to_hisparse_device_index_mapping
    del kvcache.c4_logical_size
    config = SimpleNamespace(full_max_total_num_tokens=64, swa_max_total_num_tokens=16)
    extend(pool, (0, 8, -1))
    pool.resize(config)
    assert told[1] is pool.full_to_hisparse_device_index_mapping
    assert told[1].tolist() == [0] * (16 + 2) + [-1]
    assert lists(pool) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3])
    assert pool.size_swa == 16


@pytest.mark.parametrize(("page_size", "device_page_size"), [(6, 1), (8, 1), (8, 8), (1, 1)])
def test_page_sizes_that_do_not_fit_are_refused(page_size, device_page_size):
    c4 = SimpleNamespace(size=8, page_size=device_page_size)
    logical = swa_pool(4, 4, page_size, kvcache=SimpleNamespace(c4_kv_pool=c4))
    with pytest.raises(AllocatorError, match="and device pages of k"):
        DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)


# --- allocation -----------------------------------------------------------------------------------------


def test_extend_maps_the_blocks_that_are_complete():
    pool = v4_pool(4, 4, 4, 8)
    pool.hisparse_attn_allocator.free_pages = ids(3, 1, 4, 2)
    slots = extend(pool, (0, 13, -1), (0, 3, -1), (0, 4, -1))
    assert slots == [*range(8, 21), *range(24, 27), *range(32, 36)]
    # 3 blocks of the first row in device pages 3 and 1, none of the second, one of the third in page 4
    assert all_mapped(pool) == {11 // 4: 6, 15 // 4: 7, 19 // 4: 2, 35 // 4: 8}
    assert peers(pool, 8, 20, 24) == [8, 20, 24]
    assert lists(pool) == ([], [2])


def test_a_row_goes_on_behind_its_last_complete_block():
    pool = v4_pool(6, 6, 6, 16)
    pool.hisparse_attn_allocator.free_pages = ids(5, 2, 3, 1)
    first = extend(pool, (0, 6, -1))  # block 0, in device page 5
    # tokens 6 to 17 complete blocks 1, 2, 3 (page 5); the second row is new
    slots = extend(pool, (6, 18, first[-1]), (0, 5, -1))
    assert slots == [*range(22, 34), *range(48, 53)]
    assert all_mapped(pool) == {4: 20, 5: 21, 6: 22, 7: 23, 12: 8}
    assert pool.get_last_loc_compressed(ids(33, 31, 18, 2, -1)).tolist() == [7, 7, 3, -1, -1]
    assert pool.get_last_loc_hisparse_device(ids(33, 18, -1)).tolist() == [23, 0, -1]
    # blocks 4 to 7 start a device page
    assert extend(pool, (18, 32, 33)) == list(range(34, 48))
    assert [pool.full_to_hisparse_device_index_mapping[at].item() for at in range(8, 12)] == [12, 13, 14, 15]


@pytest.mark.parametrize("short", ["full", "swa", "device"])
@pytest.mark.parametrize("need_sort", [False, True])
def test_a_side_that_is_short_leaves_all_of_them_as_they_were(short, need_sort):
    pages = {"full": 4, "swa": 4, "device": 4} | {short: 2}
    pool = v4_pool(pages["full"], pages["swa"], pages["device"], 4, need_sort=need_sort)
    slots = extend(pool, (0, 4, -1), (0, 4, -1))
    pool.free(ids(*slots[:4]))
    before = state(pool)
    assert extend(pool, (0, 8, -1)) is None
    assert state(pool) == before
    assert extend(pool, (0, 4, -1)) is not None


def test_the_device_side_is_not_needed_for_what_completes_no_block():
    pool = v4_pool(4, 4, 1, 4)
    extend(pool, (0, 4, -1))
    assert extend(pool, (0, 3, -1)) == [8, 9, 10]
    assert extend(pool, (3, 4, 10)) is None
    assert decode(pool, (4, 10)) == [11]


def test_decode_logical_only_and_tails_take_no_device_slots():
    pool = v4_pool(6, 6, 6, 4)
    assert extend(pool, (0, 3, -1)) == [4, 5, 6]
    assert decode(pool, (4, 6)) == [7]
    assert extend(pool, (0, 8, -1), call="alloc_logical_only") == list(range(8, 16))
    tail = pool.alloc_extend_swa_tail(ids(0), ids(0), ids(8), ids(8), ids(-1), 8, 4)
    assert tail.tolist() == list(range(16, 24))
    assert peers(pool, 7, 8, 16, 20) == [7, 8, 0, 16]
    assert all_mapped(pool) == {}
    assert lists(pool)[1] == [1, 2, 3, 4, 5, 6]


def test_the_device_side_merges_by_its_own_estimate():
    pool = v4_pool(4, 4, 4, 4, need_sort=True)
    slots = extend(pool, (0, 16, -1))
    pool.free(ids(*slots[8:]))
    pool.free(ids(*slots[:4]))
    device = pool.hisparse_attn_allocator
    assert (free_list(device), staged_device(pool)) == ([], [3, 4, 1])
    device.free_pages, device.staged_pages = ids(3, 4), [ids(1)]
    # 1 block // 1 + 1 row + 1 = 3 > 2
    extend(pool, (0, 4, -1))
    assert (free_list(device), staged_device(pool), all_mapped(pool)[1]) == ([3, 4], [], 1)


def test_plain_alloc_is_unsupported():
    with pytest.raises(UnsupportedCallError):
        v4_pool(2, 2, 2, 8).alloc(8)


# --- release --------------------------------------------------------------------------------------------


def test_free_releases_whole_pages_of_all_sides():
    pool = v4_pool(4, 4, 4, 8)
    pool.hisparse_attn_allocator.free_pages = ids(3, 1, 4, 2)
    slots = extend(pool, (0, 16, -1), (0, 5, -1))
    pool.free(ids(*slots[8:16]))
    assert all_mapped(pool) == {2: 6, 3: 7, 6: 8}
    assert lists(pool) == ([2, 4], [1, 2])
    assert free_list(pool.swa_attn_allocator) == [2, 4]
    pool.free_segments([(ids(*slots[:8]), 0), (ids(*slots[16:]), 8)])
    assert (lists(pool), all_mapped(pool)) == (([3, 1, 2, 4], [4, 3, 1, 2]), {})


def test_the_device_half_alone_and_the_others_without_it():
    pool = v4_pool(4, 4, 4, 8)
    slots = extend(pool, (0, 16, -1))
    pool.free_hisparse(ids(slots[1], slots[9]))  # neither is the last of a block
    assert (lists(pool), all_mapped(pool)) == (([3, 4], [1, 2, 3, 4]), {})
    pool.free_swa(ids(slots[0]))
    pool.free_full(ids(*slots[:8]))
    pool.free_segment(ids(*slots[8:]), start_pos=8)
    assert lists(pool) == ([2, 1, 3, 4], [1, 2, 3, 4])
    assert free_list(pool.swa_attn_allocator) == [2, 1, 3, 4]


def test_a_buffer_is_made_of_compressed_slots():
    pool = v4_pool(4, 4, 4, 8)
    slots = extend(pool, (0, 13, -1))
    entries = [slot // 4 for slot in slots if slot % 4 == 3]
    assert entries == [2, 3, 4]
    before = state(pool)
    assert buffer(pool, entries, 10) is None
    assert state(pool) == before
    with pytest.raises(AllocatorError, match=r"k \* 2 >= 0, got 3"):
        pool.alloc_device_buffer(ids(*entries), 3)
    assert buffer(pool, entries, 6) == [2, 3, 4, 5, 6, 7]
    assert (lists(pool), all_mapped(pool)) == (([3, 4], [4]), {})
    pool.free(ids(*slots))
    pool.free_hisparse_indices(ids(2, 3, 4, 5, 6, 7, 1))
    assert lists(pool) == ([1, 2, 3, 4], [1, 2, 3, 4])


def test_groups_resolve_at_the_call_and_release_at_the_end():
    pool = v4_pool(4, 4, 4, 4)
    slots = extend(pool, (0, 16, -1))
    pool.free_group_begin()
    pool.free(ids(*slots[12:]))
    pool.free_segment(ids(*slots[:4]), start_pos=0)
    pool.free_hisparse(ids(slots[5]))
    assert all_mapped(pool) == {3: 3}
    assert (lists(pool), pool.available_size()) == (([], []), 0)
    with pytest.raises(AllocatorError, match="free_group_begin"):
        pool.free_group_begin()
    pool.free_group_end()
    assert lists(pool) == ([1, 4], [1, 2, 4])
    with pytest.raises(AllocatorError, match="free_group_end"):
        pool.free_group_end()


def test_clear_in_a_group():
    pool = v4_pool(2, 2, 2, 4)
    pool.free_group_begin()
    pool.free(ids(*extend(pool, (0, 8, -1))))
    pool.clear()
    assert (lists(pool), all_mapped(pool)) == (([1, 2], [1, 2]), {})
    pool.free_group_begin()
    pool.free_group_end()


def test_merging_joins_the_staged_pages_of_every_pool():
    pool = v4_pool(2, 2, 2, 4, need_sort=True)
    pool.free(ids(*extend(pool, (0, 8, -1))))
    pool.merge_and_sort_free()
    assert (lists(pool), free_list(pool.swa_attn_allocator)) == (([1, 2], [1, 2]), [1, 2])
    assert "logical: full: 2 free" in pool.debug_print()
