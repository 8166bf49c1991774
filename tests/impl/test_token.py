"""The token allocator against section 3 of the contract. Checked mode: test_checked.py."""

from __future__ import annotations

import pytest
import torch

from kvproof.impl.errors import AllocatorError, UnsupportedCallError
from tests.impl.pools import alloc, free_list, ids, staged, state, token_pool


def test_initially_all_slots_ascending_without_the_padding_slot():
    pool = token_pool(4)
    assert free_list(pool) == [1, 2, 3, 4]
    assert (pool.available_size(), pool.size, pool.size_full, pool.num_pages, pool.page_size) == (
        4,
        4,
        4,
        4,
        1,
    )


def test_alloc_takes_from_the_front_and_free_appends_in_the_order_given():
    pool = token_pool(5)
    assert alloc(pool, 3) == [1, 2, 3]
    pool.free(ids(3, 1))
    assert free_list(pool) == [4, 5, 3, 1]
    assert alloc(pool, 3) == [4, 5, 3]


def test_need_sort_stages_and_merges_only_when_short():
    pool = token_pool(5, need_sort=True)
    assert alloc(pool, 4) == [1, 2, 3, 4]
    pool.free(ids(4, 2))
    pool.free(ids(3))
    assert (free_list(pool), staged(pool), pool.available_size()) == ([5], [4, 2, 3], 4)
    assert pool.get_all_free_pages().tolist() == [5, 4, 2, 3]
    assert alloc(pool, 1) == [5]  # one is there: no merge
    assert staged(pool) == [4, 2, 3]
    assert alloc(pool, 2) == [2, 3]  # none is: sorted([] + [4, 2, 3])
    assert (free_list(pool), staged(pool)) == ([4], [])


@pytest.mark.parametrize("need_sort", [False, True])
def test_too_much_is_none_and_nothing_is_taken(need_sort):
    pool = token_pool(3, need_sort=need_sort)
    assert alloc(pool, 4) is None
    assert alloc(pool, 3) == [1, 2, 3]
    assert alloc(pool, 1) is None
    assert alloc(pool, 0) == []


def test_segments_and_page_ids_are_plain_frees():
    pool = token_pool(6)
    alloc(pool, 6)
    pool.free_segment(ids(5, 2), start_pos=7)
    pool.free_page_ids(ids(6))
    pool.free_segments([(ids(1), 0), (ids(4, 3), 1)])
    assert free_list(pool) == [5, 2, 6, 1, 4, 3]


def test_full_side_calls_are_the_plain_ones():
    pool = token_pool(4)
    alloc(pool, 4)
    pool.free_full(ids(4))
    pool.free_full_segment(ids(2), start_pos=3)
    pool.free_full_segments([(ids(1), 0), (ids(3), 1)])
    assert free_list(pool) == [4, 2, 1, 3]


def test_a_group_releases_everything_at_its_end_in_call_order():
    pool = token_pool(5)
    alloc(pool, 5)
    pool.free_group_begin()
    pool.free(ids(4))
    pool.free_page_ids(ids(2))
    pool.free_segment(ids(5), start_pos=0)
    assert (free_list(pool), pool.available_size()) == ([], 0)
    pool.free_group_end()
    assert free_list(pool) == [4, 2, 5]


@pytest.mark.parametrize("call", ["alloc_extend", "alloc_decode"])
def test_paged_calls_are_refused(call):
    pool = token_pool(3)
    before = state(pool)
    with pytest.raises(UnsupportedCallError, match=rf"{call}: expected a paged allocator"):
        getattr(pool, call)(None)
    assert state(pool) == before


def test_negative_alloc_is_refused():
    pool = token_pool(3)
    with pytest.raises(AllocatorError, match=r"alloc: expected .* got -1"):
        pool.alloc(-1)
    assert free_list(pool) == [1, 2, 3]


def test_int32_slots_become_int64_ids():
    pool = token_pool(3)
    alloc(pool, 3)
    pool.free(ids(2, dtype=torch.int32))
    pool.free_page_ids(ids(1, dtype=torch.int32))
    pool.free_segment(ids(3, dtype=torch.int32), start_pos=0)
    assert free_list(pool) == [2, 1, 3]
    assert pool.free_pages.dtype is torch.int64


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_results_and_arguments_share_no_memory_with_the_pool(need_sort, grouped):
    pool = token_pool(4, need_sort=need_sort)
    slots = pool.alloc(3)
    assert slots is not None
    slots.fill_(99)
    if grouped:
        pool.free_group_begin()
    for number, release in ((1, pool.free), (2, pool.free_page_ids)):
        argument = ids(number)
        release(argument)
        argument.fill_(99)
    argument = ids(3)
    pool.free_segment(argument, start_pos=0)
    argument.fill_(99)
    if grouped:
        pool.free_group_end()
    pool.get_all_free_pages().fill_(99)
    assert pool.get_all_free_pages().tolist() == [4, 1, 2, 3]
