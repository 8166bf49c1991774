"""What both allocators share: construction, groups, segments, clear, resize, and cheap refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvproof.impl.errors import AllocatorError
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.token import TokenToKVPoolAllocator
from tests.impl.pools import alloc, extend, free_list, ids, paged_pool, staged, state, token_pool

POOLS = [lambda: token_pool(8), lambda: paged_pool(4, 2), lambda: paged_pool(4, 2, need_sort=True)]
any_pool = pytest.mark.parametrize("make", POOLS, ids=["token", "paged", "paged-sort"])


@pytest.mark.parametrize(("size", "page_size"), [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_sizes_below_one_are_refused(size, page_size):
    with pytest.raises(AllocatorError, match=r"expected (size|page_size) >= 1"):
        PagedTokenToKVPoolAllocator(size, page_size, torch.float16, "cpu", None, False)


def test_token_size_below_one_is_refused():
    with pytest.raises(AllocatorError, match="expected size >= 1, got 0"):
        TokenToKVPoolAllocator(0, torch.float16, "cpu", None, False)


@pytest.mark.parametrize(
    ("value", "checked"), [("1", True), ("true", True), ("YES", True), ("0", False), ("", False)]
)
def test_checked_mode_follows_the_environment_unless_told(monkeypatch, value, checked):
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", value)
    assert PagedTokenToKVPoolAllocator(8, 2, torch.float16, "cpu", None, False).checked is checked
    assert TokenToKVPoolAllocator(8, torch.float16, "cpu", None, False).checked is checked
    assert TokenToKVPoolAllocator(8, torch.float16, "cpu", None, False, checked=False).checked is False


def test_a_remainder_of_size_fills_no_page():
    pool = PagedTokenToKVPoolAllocator(11, 4, torch.float16, "cpu", None, False)
    assert (pool.size, pool.num_pages, pool.available_size(), free_list(pool)) == (11, 2, 8, [1, 2])


def test_kvcache_is_handed_back_and_called_for_copies():
    calls = []

    class Buffers:
        def get_cpu_copy(self, indices, **kwargs):
            calls.append(("get", indices, kwargs))
            return "copy"

        def load_cpu_copy(self, copy, indices, **kwargs):
            calls.append(("load", copy, indices, kwargs))

    buffers = Buffers()
    pool = PagedTokenToKVPoolAllocator(8, 2, torch.float16, "cpu", buffers, False)
    assert pool.get_kvcache() is buffers
    slots = ids(2, 3)
    pool.load_cpu_copy(pool.get_cpu_copy(slots, mamba_indices=5), slots)
    assert calls == [("get", slots, {"mamba_indices": 5}), ("load", "copy", slots, {})]


@any_pool
def test_nested_groups_and_unopened_ends_are_refused(make):
    pool = make()
    with pytest.raises(AllocatorError, match="free_group_end: expected an open group, got none"):
        pool.free_group_end()
    pool.free_group_begin()
    with pytest.raises(AllocatorError, match="free_group_begin: expected no open group"):
        pool.free_group_begin()
    pool.free_group_end()
    with pytest.raises(AllocatorError, match="free_group_end"):
        pool.free_group_end()


@any_pool
def test_a_refused_begin_leaves_the_group_open_with_what_it_held(make):
    pool = make()
    slots = pool.alloc(2)
    pool.free_group_begin()
    pool.free(slots)
    with pytest.raises(AllocatorError):
        pool.free_group_begin()
    assert pool.available_size() == 6
    pool.free_group_end()
    assert pool.available_size() == 8


@any_pool
def test_an_empty_free_does_nothing_whatever_its_dtype_and_start(make):
    pool = make()
    pool.alloc(2)
    before = state(pool)
    empty = torch.tensor([])
    pool.free(empty)
    pool.free_page_ids(empty)
    pool.free_segment(empty, start_pos=0)
    pool.free_segments([])
    pool.free_segments([(empty, 0), (empty, 0)])
    assert state(pool) == before


@any_pool
def test_clear_ends_a_group_and_drops_what_it_held(make):
    pool = make()
    first = alloc(pool, 2)
    pool.free_group_begin()
    pool.free(ids(*first))
    pool.clear()
    assert pool.available_size() == 8
    with pytest.raises(AllocatorError):
        pool.free_group_end()
    assert alloc(pool, 2) == first


@pytest.mark.parametrize("config", [9, SimpleNamespace(max_total_num_tokens=9)], ids=["number", "object"])
def test_resize_follows_everywhere_and_clears(config):
    pool = paged_pool(4, 2)
    pool.alloc(2)
    pool.free_group_begin()
    pool.resize(config)
    assert (pool.size, pool.size_full, pool.num_pages, pool.available_size()) == (9, 9, 4, 8)
    assert free_list(pool) == [1, 2, 3, 4]
    pool.free_group_begin()

    token = token_pool(3)
    token.resize(config)
    assert free_list(token) == list(range(1, 10))


def test_a_refused_resize_changes_nothing():
    pool = paged_pool(4, 2)
    pool.alloc(2)
    before = state(pool)
    with pytest.raises(AllocatorError, match="resize: expected size >= 1, got 0"):
        pool.resize(0)
    assert (state(pool), pool.size) == (before, 8)


def test_merge_without_staged_pages_does_not_even_sort():
    pool = paged_pool(4, 2)
    alloc(pool, 4)
    pool.free_page_ids(ids(2, 1))
    pool.merge_and_sort_free()
    assert free_list(pool) == [2, 1, 3, 4]


def test_merge_by_hand_sorts_free_and_staged_together():
    pool = paged_pool(4, 2, need_sort=True)
    alloc(pool, 6)
    pool.free_page_ids(ids(3, 1))
    pool.merge_and_sort_free()
    assert (free_list(pool), staged(pool)) == ([1, 3, 4], [])


def test_debug_print_counts_free_staged_and_held():
    pool = paged_pool(5, 2, need_sort=True)
    pool.alloc(6)
    pool.free_page_ids(ids(1))
    pool.free_group_begin()
    pool.free_page_ids(ids(2, 3))
    assert pool.debug_print() == "2 free + 1 staged of 5 pages, 2 ids held by a group"


BAD_TENSORS = {
    "two-dimensional": torch.tensor([[2, 3]]),
    "floats": torch.tensor([2.0, 3.0]),
    "booleans": torch.tensor([True, True]),
    "elsewhere": torch.empty(2, dtype=torch.int64, device="meta"),
}


@any_pool
@pytest.mark.parametrize("bad", BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_tensors_of_the_wrong_kind_are_refused(make, bad):
    pool = make()
    pool.alloc(4)
    before = state(pool)
    calls = {
        "free": lambda: pool.free(bad),
        "free_page_ids": lambda: pool.free_page_ids(bad),
        "free_segment": lambda: pool.free_segment(bad, start_pos=0),
        "free_segments": lambda: pool.free_segments([(ids(2, 3), 0), (bad, 2)]),
    }
    for name, call in calls.items():
        with pytest.raises(
            AllocatorError, match=rf"{name}: expected .* one-dimensional int64 or int32 on cpu"
        ):
            call()
        assert state(pool) == before


def test_an_unaligned_segment_is_refused():
    pool = paged_pool(4, 4)
    slots = extend(pool, (0, 8, -1))
    before = state(pool)
    with pytest.raises(AllocatorError, match="free_segment: expected start_pos to be a multiple of 4, got 2"):
        pool.free_segment(ids(*slots[2:]), start_pos=2)
    with pytest.raises(AllocatorError, match="free_full_segment: expected start_pos"):
        pool.free_full_segment(ids(*slots[2:]), start_pos=2)
    assert state(pool) == before


@pytest.mark.parametrize(
    "starts",
    [(0, 0), (4, 0), (0, 4, 4), (-4, 0)],
    ids=["same-page", "descending", "later-pair", "negative"],
)
def test_segments_that_share_a_page_or_descend_are_refused_before_any_is_freed(starts):
    pool = paged_pool(4, 4)
    row = extend(pool, (0, 12, -1))
    before = state(pool)
    segments = [(ids(*row[max(start, 0) : max(start, 0) + 4]), start) for start in starts]
    for release in (pool.free_segments, pool.free_full_segments):
        with pytest.raises(AllocatorError, match="ascend and share no page"):
            release(segments)
        assert state(pool) == before


def test_a_segment_may_not_start_in_the_page_where_the_one_before_ends():
    pool = paged_pool(4, 4)
    row = extend(pool, (0, 8, -1))
    with pytest.raises(
        AllocatorError, match="start_pos 4, in page 1 of the row where 2 is the first possible"
    ):
        pool.free_segments([(ids(*row[:5]), 0), (ids(*row[4:]), 4)])
    assert free_list(pool) == [3, 4]
