"""Checked mode of the page-interleave allocator: breaches are refused by name and change nothing."""

from __future__ import annotations

import pytest
import torch

from kvproof.impl.errors import AllocatorError, StateError
from tests.impl.interleave_pools import chain, classes, interleave_pool, state
from tests.impl.pools import ids


@pytest.fixture
def pool():
    """Pages of 4, 2 classes. Row A, base 1: 6 tokens in pages 3, 2; row B, base 1: 4 tokens in page 5."""
    pool = interleave_pool(3, 4, 2, checked=True)
    assert chain(pool, (0, 6, -1), (0, 4, -1), bases=[1, 1]) == [12, 13, 14, 15, 8, 9, 20, 21, 22, 23]
    return pool


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda pool: pool.free(ids(12)),
            "free call 2: expected all live slots of every page, got a free of slot 12 that would release "
            "page 3, whose slots 13, 14, 15 are live: alloc_extend call 1, batch row 0",
        ),
        (lambda pool: pool.free(ids(4)), "free call 2: expected live slots, got slot 4, of the padding page"),
        (lambda pool: pool.free(ids(7)), "free call 2: expected live slots, got slot 7, of the padding page"),
        (
            lambda pool: pool.free(ids(32)),
            "free call 2: expected live slots, got slot 32, outside pages 2 to 7",
        ),
        (
            lambda pool: pool.free_segment(ids(8, 9, 12, 13), start_pos=4),
            "free_segment call 2: expected the slots of one row in position order",
        ),
        (
            lambda pool: chain(pool, (4, 8, 23), bases=[0]),
            "alloc_extend call 2: expected the row's last page to be of class 0, by rotation base 0, got "
            "last_loc 23, of class 1, in batch row 0 of prefix 4",
        ),
        (
            lambda pool: chain(pool, (4, 8, 22), bases=[1]),
            "alloc_extend call 2: expected (last_loc + 1) % 4 = prefix % 4 = 0, got last_loc 22",
        ),
        (
            lambda pool: pool.alloc_extend(
                ids(0), ids(0), ids(4), ids(4), ids(-1), 4, num_new_pages=2, rotation_bases=[0]
            ),
            "alloc_extend call 2: expected num_new_pages = 1, got 2",
        ),
    ],
)
def test_breaches_are_refused_and_change_nothing(pool, call, message):
    before = state(pool)
    with pytest.raises(AllocatorError) as caught:
        call(pool)
    assert str(caught.value).startswith(message), str(caught.value)
    assert state(pool) == before


def test_a_double_free_is_refused_in_a_group_too(pool):
    pool.free_group_begin()
    pool.free(ids(20, 21, 22, 23))
    with pytest.raises(AllocatorError, match="of page 5, released by free call 2"):
        pool.free(ids(20, 21, 22, 23))
    pool.free_group_end()
    assert classes(pool) == [[4, 6], [5, 7]]


def test_lists_written_from_outside_are_refused(pool):
    pool.class_free_pages = [ids(7, 6), ids(4)]
    with pytest.raises(StateError, match="pages of class 0 in its list, got page 7 of class 1"):
        chain(pool, (0, 4, -1), bases=[0])
    pool.class_free_pages = [ids(4, 6), ids(7, 3)]
    with pytest.raises(StateError, match="page 3 in it, live: alloc_extend call 1, batch row 0"):
        chain(pool, (0, 4, -1), bases=[0])


def test_lawful_use_is_not_refused(pool):
    assert chain(pool, (4, 8, 23), bases=[1]) == [16, 17, 18, 19]  # page 4, of class 0
    pool.free_segment(ids(8, 9), start_pos=4)
    assert chain(pool, (4, 4, 15), (4, 5, 15), bases=[1, 1]) == [8]
    pool.free(torch.tensor([12, 13, 14, 15, 8], dtype=torch.int32))
    pool.free_segments([(ids(20, 21, 22, 23), 0), (ids(16, 17, 18, 19), 4)])
    assert pool.aggregate_free_size() == 24
    pool.clear()
    assert pool.alloc_cyclic(0, 24).tolist() == list(range(8, 32))
