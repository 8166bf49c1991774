"""What the sliding-window allocator takes back, at once and in groups, and edits of its mapping; torch path.

Not here: taking (test_swa.py), and who may not (test_swa_checked.py).
"""

from __future__ import annotations

import pytest
import torch

from kvproof.impl.errors import AllocatorError
from tests.impl.pools import ids
from tests.impl.swa_pools import extend, lists, peers, state, swa_pool

# --- release ------------------------------------------------------------------------------------------


@pytest.fixture
def pool():
    """Pages of 4, 8 and 6 of them. Row A: 8 tokens, full pages 1, 2; row B: 6 tokens, full pages 3, 4. Peers:
    swa pages 6, 5 and 4, 3; 1 and 2 are free there."""
    pool = swa_pool(8, 6, 4)
    pool.swa_attn_allocator.free_pages = ids(6, 5, 4, 3, 1, 2)
    extend(pool, (0, 8, -1), (0, 6, -1))
    return pool


def test_free_releases_both_sides_ascending(pool):
    pool.free(ids(16, 9, 4, 11, 5, 8))
    assert lists(pool) == ([1, 2, 4, 5, 6, 7, 8], [], [3, 5, 6, 1, 2], [])
    assert peers(pool, *range(4, 20)) == [0] * 8 + [16, 17, 18, 19] + [0] * 4


def test_free_swa_acts_on_whole_pages_and_once(pool):
    pool.free_swa(ids(6, 17, dtype=torch.int32))
    assert lists(pool) == ([5, 6, 7, 8], [], [3, 6, 1, 2], [])
    assert peers(pool, 4, 5, 6, 7, 8, 15, 16, 17) == [0, 0, 0, 0, 20, 19, 0, 0]
    before = state(pool)
    pool.free_swa(ids(6, 7, 17))  # unmapped by now: ignored
    assert state(pool) == before
    pool.free_swa(ids(*range(4, 12)))
    assert lists(pool)[2] == [5, 3, 6, 1, 2]


@pytest.mark.parametrize("need_sort", [False, True])
def test_unmapped_frees_leave_no_trace_in_the_lists(need_sort):
    """Not even an empty one: lists that hold nothing staged must not be sorted."""
    pool = swa_pool(4, 4, 4, need_sort=need_sort)
    extend(pool, (0, 4, -1))
    pool.free_swa(ids(4))
    pool.swa_attn_allocator.free_pages = ids(4, 2)
    pool.swa_attn_allocator.staged_pages = []
    for frees in (
        (lambda: pool.free_swa(ids(4)),),
        (lambda: pool.free_swa_segment(ids(4, 5, 6, 7), start_pos=0),),
        (pool.free_group_begin, lambda: pool.free_swa(ids(4)), pool.free_group_end),
        (
            pool.free_group_begin,
            lambda: pool.free_swa_segment(ids(4, 5, 6, 7), start_pos=0),
            pool.free_group_end,
        ),
    ):
        for free in frees:
            free()
        pool.merge_and_sort_free()
        assert lists(pool)[2:] == ([4, 2], [])


def test_free_full_leaves_the_swa_side_alone(pool):
    pool.free_swa(ids(*range(4, 12)))
    pool.free_full(ids(8, 4))
    assert lists(pool) == ([1, 2, 5, 6, 7, 8], [], [5, 6, 1, 2], [])


def test_segments_release_in_row_order(pool):
    pool.free_segment(ids(*range(4, 12)), start_pos=0)
    assert lists(pool) == ([1, 2, 5, 6, 7, 8], [], [6, 5, 1, 2], [])
    pool.free_swa_segment(ids(16, 17), start_pos=4)
    assert lists(pool)[2] == [3, 6, 5, 1, 2]
    pool.free_full_segment(ids(16, 17), start_pos=4)
    assert lists(pool)[0] == [4, 1, 2, 5, 6, 7, 8]
    assert peers(pool, *range(4, 20)) == [0] * 8 + [16, 17, 18, 19] + [0] * 4


def test_several_segments_go_one_after_the_other(pool):
    pool.free_segments([(ids(4, 5, 6, 7, dtype=torch.int32), 0), (ids(), 4), (ids(8, 9, 10, 11), 4)])
    assert lists(pool) == ([2, 1, 5, 6, 7, 8], [], [5, 6, 1, 2], [])
    pool.free_swa(ids(12, 16))
    pool.free_full_segments([(ids(12, 13, 14, 15), 0), (ids(16, 17), 4)])
    assert lists(pool)[0] == [4, 3, 2, 1, 5, 6, 7, 8]


@pytest.mark.parametrize("name", ["free_segment", "free_swa_segment", "free_full_segment"])
def test_unaligned_segments_are_refused(pool, name):
    before = state(pool)
    with pytest.raises(AllocatorError, match=f"{name}: expected start_pos to be a multiple of 4, got 2"):
        getattr(pool, name)(ids(6, 7), start_pos=2)
    for several in (pool.free_segments, pool.free_full_segments):
        with pytest.raises(AllocatorError, match="segments from position 0 on that ascend and share no page"):
            several([(ids(4, 5, 6), 0), (ids(7), 0)])
    assert state(pool) == before


def test_pages_of_one_are_released_in_the_order_given():
    pool = swa_pool(6, 5, 1)
    pool.swa_attn_allocator.free_pages = ids(5, 4, 3, 2)
    assert pool.alloc(4).tolist() == [1, 2, 3, 4]
    pool.free(ids(3, 1))
    assert lists(pool) == ([5, 6, 3, 1], [], [3, 5], [])
    pool.free_swa(ids(4))
    pool.free_swa_segment(ids(2), start_pos=7)
    assert lists(pool) == ([5, 6, 3, 1], [], [3, 5, 2, 4], [])
    pool.free_full(ids(4))
    pool.free_full_segment(ids(2), start_pos=7)
    assert lists(pool)[0] == [5, 6, 3, 1, 4, 2]
    assert pool.full_to_swa_index_mapping.tolist() == [0] * 7 + [-1]


def test_empty_frees_are_none(pool):
    before = state(pool)
    empty = torch.tensor([])
    for free in (pool.free, pool.free_swa, pool.free_full):
        free(empty)
    for segment in (pool.free_segment, pool.free_swa_segment, pool.free_full_segment):
        segment(empty, start_pos=3)
    pool.free_segments([])
    pool.free_full_segments([(empty, 0)])
    pool.set_full_to_swa_mapping(empty, empty)
    pool.clear_full_to_swa_mapping(empty)
    assert state(pool) == before


# --- the handed cases ---------------------------------------------------------------------------------


def test_token_granular_swa():
    pool = swa_pool(8, 4, 4)
    a = extend(pool, (0, 8, -1))
    pool.free_swa(ids(a[0]))
    c = extend(pool, (0, 4, -1))
    pool.free(ids(*a))
    d = extend(pool, (0, 4, -1))
    assert (c, d) == ([12, 13, 14, 15], [4, 5, 6, 7])
    assert (peers(pool, *c), peers(pool, *d)) == ([4, 5, 6, 7], [8, 9, 10, 11])
    assert lists(pool) == ([2, 4, 5, 6, 7, 8], [], [3, 4], [])


def test_stale_head():
    pool = swa_pool(4, 4, 4)
    a = extend(pool, (0, 8, -1))
    pool.free(ids(*a[4:]))
    pool.free(ids(*a[:4]))
    c = extend(pool, (0, 12, -1), tail=4)
    d = extend(pool, (0, 4, -1))
    pool.free(ids(*c))
    assert (d, peers(pool, *d)) == ([16, 17, 18, 19], [8, 9, 10, 11])
    assert lists(pool) == ([1, 2, 3], [], [1, 3, 4], [])


@pytest.mark.parametrize("page_size", [1, 4])
def test_page_zero(page_size):
    """Unmapped representatives are ignored: the mapped one between them is released all the same."""
    pool = swa_pool(8, 5, page_size)
    slots = ids(*range(page_size, 4 * page_size))
    if page_size == 1:
        pool.alloc(3)
    else:
        extend(pool, (0, 3 * page_size, -1))
    pool.free_swa(slots[:page_size])
    pool.free_swa(slots[2 * page_size :])
    pool.free_swa_segment(slots, start_pos=0)
    pool.free_swa_segment(slots, start_pos=0)
    assert sorted(lists(pool)[2]) == [1, 2, 3, 4, 5]
    assert pool.swa_available_size() == 5 * page_size
    pool.free_group_begin()
    pool.free_segment(slots, start_pos=0)
    pool.free_group_end()
    assert pool.swa_available_size() == 5 * page_size
    assert sorted(lists(pool)[0]) == list(range(1, 9))
    assert sorted(lists(pool)[2]) == [1, 2, 3, 4, 5]


# --- groups -------------------------------------------------------------------------------------------


def test_a_group_releases_sets_first_then_pages_in_call_order(pool):
    pool.free_group_begin()
    pool.free_swa_segment(ids(8, 9, 10, 11), start_pos=4)
    pool.free_full_segment(ids(8, 9, 10, 11), start_pos=4)
    pool.free(ids(16, 12))
    pool.free_segment(ids(4, 5, 6, 7), start_pos=0)
    assert lists(pool) == ([5, 6, 7, 8], [], [1, 2], [])
    assert (pool.available_size(), peers(pool, *range(4, 20))) == (8, [0] * 16)
    pool.free_group_end()
    # full: the set 3, 4, then pages 2, 1 in front of it; swa: the set 3, 4 (B's), then 5, 6
    assert lists(pool) == ([2, 1, 3, 4, 5, 6, 7, 8], [], [5, 6, 3, 4, 1, 2], [])


def test_a_remap_inside_a_group_does_not_touch_what_is_held(pool):
    pool.free_group_begin()
    pool.free_swa(ids(*range(4, 8)))
    pool.set_full_to_swa_mapping(ids(4, 5), ids(16, 17))
    pool.clear_full_to_swa_mapping(ids(*range(12, 16)))
    pool.free_group_end()
    assert lists(pool)[2] == [6, 1, 2]
    assert peers(pool, 4, 5, 6, 12) == [16, 17, 0, 0]
    pool.free(ids(4))
    assert lists(pool)[2] == [4, 6, 1, 2]


def test_a_group_owns_what_it_was_given(pool):
    slots, segment = ids(*range(4, 8)), ids(*range(12, 16))
    pool.free_group_begin()
    pool.free(slots)
    pool.free_segment(segment, start_pos=0)
    slots.fill_(8)
    segment.fill_(8)
    pool.free_group_end()
    assert lists(pool) == ([3, 1, 5, 6, 7, 8], [], [4, 6, 1, 2], [])


def test_nested_groups_and_unopened_ends_are_refused(pool):
    with pytest.raises(AllocatorError, match="free_group_end: expected an open group, got none"):
        pool.free_group_end()
    pool.free_group_begin()
    with pytest.raises(AllocatorError, match="free_group_begin: expected no open group"):
        pool.free_group_begin()
    pool.free(ids(*range(4, 12)))
    pool.free_group_end()
    assert lists(pool) == ([1, 2, 5, 6, 7, 8], [], [5, 6, 1, 2], [])


def test_clear_starts_afresh(pool):
    pool.free_group_begin()
    pool.free(ids(4))
    pool.clear()
    assert lists(pool) == ([1, 2, 3, 4, 5, 6, 7, 8], [], [1, 2, 3, 4, 5, 6], [])
    assert pool.full_to_swa_index_mapping.tolist() == [0] * 36 + [-1]
    pool.free_group_begin()


# --- the mapping --------------------------------------------------------------------------------------


def test_the_mapping_can_be_edited_and_asked(pool):
    pool.set_full_to_swa_mapping(ids(21, 20, dtype=torch.int32), ids(5, 4, dtype=torch.int32))
    asked = pool.translate_loc_from_full_to_swa(ids(20, 21, 22, 4, -1, dtype=torch.int32).reshape(1, 5))
    assert (asked.tolist(), asked.dtype) == ([[4, 5, 0, 24, -1]], torch.int64)
    pool.clear_full_to_swa_mapping(ids(21, 4, dtype=torch.int32))
    assert peers(pool, 20, 21, 4, 5) == [4, 0, 0, 25]
    with pytest.raises(
        AllocatorError, match="expected as many full as swa slots, got 1 full and 2 swa slots"
    ):
        pool.set_full_to_swa_mapping(ids(4), ids(5, 6))
    with pytest.raises(AllocatorError, match="expected full_indices to be one-dimensional"):
        pool.clear_full_to_swa_mapping(ids(4, 5).reshape(1, 2))


def test_new_pages_available_asks_both_sides(pool):
    assert pool.new_pages_available(4, 2)
    assert not pool.new_pages_available(5, 2)
    assert not pool.new_pages_available(4, 3)


def test_merge_and_all_free_pages():
    pool = swa_pool(4, 3, 2, need_sort=True)
    extend(pool, (0, 4, -1))
    pool.free_segment(ids(4, 5), start_pos=2)
    pool.free_segment(ids(2, 3), start_pos=0)
    assert pool.get_all_free_pages().tolist() == [3, 4, 2, 1]
    pool.merge_and_sort_free()
    assert lists(pool) == ([1, 2, 3, 4], [], [1, 2, 3], [])
