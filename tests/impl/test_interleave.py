"""The page-interleave allocator against section 8 of the contract.

Not here: checked mode (test_interleave_checked.py), and the kernel (test_interleave_kernels.py).
"""

from __future__ import annotations

import random

import pytest
import torch

from kvproof.impl.errors import AllocatorError, UnsupportedCallError
from kvproof.impl.interleave import PageInterleavePoolAllocator
from tests.impl.interleave_pools import chain, classes, deal, interleave_pool, staged_classes, state
from tests.impl.pools import ids


def test_classes_hold_every_nth_page_behind_the_padding():
    pool = interleave_pool(3, 4, 3)
    assert classes(pool) == [[3, 6, 9], [4, 7, 10], [5, 8, 11]]
    assert (pool.size, pool.size_full, pool.num_pages, pool.page_size) == (36, 36, 9, 4)
    assert (pool.physical_page_size, pool.shard_size) == (4, 3)
    assert pool.get_all_free_pages().tolist() == [3, 6, 9, 4, 7, 10, 5, 8, 11]


def test_a_remainder_of_a_shard_is_unusable():
    pool = PageInterleavePoolAllocator(7, 4, 2, torch.float16, "cpu", None, False)
    assert classes(pool) == [[2], [3]]  # 7 // 4 = 1 page a class, although 14 // 4 = 3
    assert pool.num_pages == 2


def test_position_pages_go_round_from_the_base():
    pool = interleave_pool(3, 4, 3)
    # base 1: classes 1, 2, 0, 1; the last page holds one token
    assert chain(pool, (0, 13, -1), bases=[1]) == [*range(16, 20), *range(20, 24), *range(12, 16), 28]
    assert classes(pool) == [[6, 9], [10], [8, 11]]


def test_a_row_goes_on_where_its_prefix_ends():
    pool = interleave_pool(3, 2, 2)
    assert chain(pool, (0, 6, -1), bases=[1]) == [6, 7, 4, 5, 10, 11]  # classes 1, 0, 1
    # position-page 3 of base 1: class 0; base 3 is the same
    assert chain(pool, (6, 9, 11), bases=[3]) == [8, 9, 14]
    assert chain(pool, (0, 2, -1), bases=[-2]) == [12, 13]  # class 0


def test_a_missing_base_draws_the_class_with_most_pages_at_that_rows_turn():
    pool = interleave_pool(3, 2, 3)
    bases: list[int | None] = [None, 2, None, None]
    slots = chain(pool, (0, 2, -1), (0, 2, -1), (0, 4, -1), (0, 2, -1), bases=bases)
    # 3 3 3: class 0; then class 2; 2 3 2: class 1 and, next in turn, 2; 2 2 1: class 0
    assert bases == [0, 2, 1, 0]
    assert slots == [6, 7, 10, 11, 8, 9, 16, 17, 12, 13]
    assert (pool.class_free_page_counts(), pool.least_full_class()) == ([1, 2, 1], 1)


def test_available_is_that_of_the_shortest_class():
    pool = interleave_pool(3, 4, 2)
    chain(pool, (0, 4, -1), bases=[1])
    assert (pool.available_size(), pool.aggregate_free_size()) == (2 * 4 * 2, 5 * 4)
    chain(pool, (0, 8, -1), (0, 4, -1), bases=[1, 1])
    assert (pool.available_size(), pool.aggregate_free_size()) == (0, 8)


def test_a_refusal_leaves_lists_and_bases_as_they_were():
    pool = interleave_pool(2, 4, 2, need_sort=True)
    slots = chain(pool, (0, 8, -1), bases=[0])
    pool.free(ids(*slots[:4]))
    before = state(pool)
    assert before[:2] == ([[4], [5]], [[2], []])
    bases: list[int | None] = [None, None, None]
    assert chain(pool, (0, 4, -1), (0, 8, -1), (0, 4, -1), bases=bases) is None
    assert bases == [None, None, None]
    assert state(pool) == before
    assert chain(pool, (0, 8, -1), bases=[1]) == [20, 21, 22, 23, 16, 17, 18, 19]


def test_rows_that_do_not_grow_cost_nothing_but_draw():
    pool = interleave_pool(1, 4, 2)
    bases: list[int | None] = [None, None, 1]
    assert chain(pool, (0, 0, -1), (0, 4, -1), (4, 4, 15), bases=bases) == [8, 9, 10, 11]
    assert bases == [0, 0, 1]
    empty = torch.tensor([])
    slots = pool.alloc_extend(empty, empty, empty, empty, empty, 0)
    assert (slots.tolist(), slots.dtype) == ([], torch.int64)
    assert pool.alloc_extend(empty, empty, empty, empty, empty, 0, rotation_bases=[]).tolist() == []


def test_a_short_class_merges_every_class():
    pool = interleave_pool(4, 1, 2, need_sort=True)
    chain(pool, (0, 8, -1), bases=[0])
    pool.free(ids(6, 5))
    pool.free(ids(3, 2))
    assert (classes(pool), staged_classes(pool)) == ([[], []], [[6, 2], [5, 3]])
    assert chain(pool, (0, 1, -1), bases=[1]) == [3]
    assert (classes(pool), staged_classes(pool)) == ([[2, 6], [5]], [[], []])
    pool.free(ids(9))
    assert chain(pool, (0, 2, -1), bases=[0]) == [2, 5]  # either list alone is long enough
    assert (classes(pool), staged_classes(pool)) == ([[6], []], [[], [9]])


def test_frees_split_by_owner_ascending_to_the_front():
    pool = interleave_pool(3, 2, 2)
    chain(pool, (0, 10, -1), bases=[0])  # pages 2, 3, 4, 5, 6
    pool.free(ids(13, 6, 4, 9, 13, dtype=torch.int32))  # pages 6, 3, 2, 4
    assert classes(pool) == [[2, 4, 6], [3, 7]]
    pool.free(torch.tensor([]))
    pool.free(ids(10))
    assert classes(pool) == [[2, 4, 6], [5, 3, 7]]


@pytest.mark.parametrize("method", ["free_segment", "free_full_segment"])
def test_segments_release_as_free_does(method):
    pool = interleave_pool(3, 2, 2)
    slots = chain(pool, (0, 9, -1), bases=[1])  # pages 3, 2, 5, 4, 7
    getattr(pool, method)(ids(*slots[2:]), start_pos=2)
    assert classes(pool) == [[2, 4, 6], [5, 7]]
    with pytest.raises(AllocatorError, match="start_pos to be a multiple of 2"):
        getattr(pool, method)(ids(*slots[:2]), start_pos=1)


@pytest.mark.parametrize("method", ["free_segments", "free_full_segments"])
def test_segments_are_released_one_after_the_other(method):
    pool = interleave_pool(4, 1, 2)
    slots = chain(pool, (0, 8, -1), bases=[0])  # 2, 3, … 9
    getattr(pool, method)([(ids(*slots[:2]), 0), (ids(*slots[4:7]), 4)])
    assert classes(pool) == [[6, 8, 2], [7, 3]]
    pool.free_full(ids(4))
    assert classes(pool) == [[4, 6, 8, 2], [7, 3]]


@pytest.mark.parametrize("need_sort", [False, True])
def test_a_group_releases_one_set_at_its_end(need_sort):
    pool = interleave_pool(3, 2, 2, need_sort=need_sort)
    slots = chain(pool, (0, 12, -1), bases=[0])  # pages 2 … 7
    pool.free_group_begin()
    mine = ids(*slots[8:])
    pool.free(mine)
    mine.fill_(4)
    pool.free_segment(ids(*slots[:4]), start_pos=0)
    assert pool.aggregate_free_size() == 0
    pool.free_group_end()
    released = [[2, 6], [3, 7]]
    assert (classes(pool), staged_classes(pool)) == (
        ([[], []], released) if need_sort else (released, [[], []])
    )
    with pytest.raises(AllocatorError, match="free_group_end"):
        pool.free_group_end()


def test_clear_ends_a_group_and_drops_what_it_held():
    pool = interleave_pool(2, 2, 2)
    pool.free_group_begin()
    pool.free(ids(*chain(pool, (0, 4, -1), bases=[0])))
    pool.clear()
    assert classes(pool) == [[2, 4], [3, 5]]
    pool.free_group_begin()


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.alloc(4),
        lambda pool: pool.alloc_decode(ids(1), ids(1), ids(-1)),
        lambda pool: pool.resize(16),
        lambda pool: pool.free_page_ids(ids(2)),
    ],
)
def test_calls_without_a_rotation_are_unsupported(call):
    pool = interleave_pool(2, 2, 2)
    before = state(pool)
    with pytest.raises(UnsupportedCallError, match="the page-interleave allocator"):
        call(pool)
    assert state(pool) == before


def test_alloc_cyclic_is_a_new_row_of_its_own():
    pool = interleave_pool(2, 2, 3)
    assert pool.alloc_cyclic(4, 8).tolist() == [8, 9, 10, 11, 6, 7, 14, 15]  # classes 1, 2, 0, 1
    assert pool.alloc_cyclic(1, 2) is None
    assert pool.alloc_cyclic(0, 0).tolist() == []
    assert classes(pool) == [[6], [], [8]]


@pytest.mark.parametrize(
    ("rows", "tokens", "bases", "message"),
    [
        ([(1, 5, 4)], 4, [0], "prefix_lens of k . 4 >= 0.*got prefix 1 and sequence 5 in batch row 0"),
        ([(0, 4, -1), (8, 4, 15)], 0, [0, 0], "got prefix 8 and sequence 4 in batch row 1"),
        ([(0, 4, -1)], 5, [0], "expected extend_num_tokens = 4, got 5"),
        ([(0, 4, -1)], 4, [0, 0], "one entry for each of 1 rows, got .0, 0."),
        ([(0, 4, -1)], 4, None, "one entry for each of 1 rows, got None"),
    ],
)
def test_batches_that_break_the_contract_are_refused(rows, tokens, bases, message):
    pool = interleave_pool(3, 4, 2)
    before = state(pool)
    prefix, seq, last = (ids(*(row[at] for row in rows)) for at in range(3))
    with pytest.raises(AllocatorError, match=message):
        pool.alloc_extend(prefix, prefix, seq, seq, last, tokens, rotation_bases=bases)
    assert state(pool) == before


@pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 1)])
def test_sizes_out_of_range_are_refused(sizes):
    with pytest.raises(AllocatorError, match="PageInterleavePoolAllocator"):
        PageInterleavePoolAllocator(*sizes, torch.float16, "cpu", None, False)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("page_size", "shards"), [(1, 2), (4, 3), (3, 5)])
def test_random_lawful_use_is_as_the_oracle_has_it(page_size, shards, checked):
    rng = random.Random(f"{page_size} {shards}")
    pool = interleave_pool(6, page_size, shards, checked=checked)
    chains: list[tuple[list[int], int]] = []
    granted = refused = 0
    for _ in range(150):
        if rng.random() < 0.3 and chains:
            slots, _ = chains.pop(rng.randrange(len(chains)))
            lists = classes(pool)
            pages = sorted({slot // page_size for slot in slots})
            pool.free(ids(*slots))
            mine = [[page for page in pages if page % shards == rank] for rank in range(shards)]
            assert classes(pool) == [new + old for new, old in zip(mine, lists, strict=True)]
            continue
        old = [row for row in chains if len(row[0]) % page_size == 0 and rng.random() < 0.3]
        rows = [(len(slots), len(slots) + rng.randrange(3 * page_size + 1), slots[-1]) for slots, _ in old]
        rows.append((0, rng.randrange(4 * page_size + 1), -1))
        given: list[int | None] = [base for _, base in old]
        given.append(rng.choice((None, rng.randrange(shards))))
        lists, counts = classes(pool), pool.class_free_page_counts()
        slots = chain(pool, *rows, bases=given)
        if slots is None:
            refused += 1
            assert any(count < 6 for count in counts)
            assert classes(pool) == lists
            continue
        granted += 1
        expected, left = deal([row[:2] for row in rows], given, lists, page_size)
        assert (slots, classes(pool)) == (expected, left)
        for (row, _), (prefix, seq, _) in zip(old, rows, strict=False):
            row += [slots.pop(0) for _ in range(seq - prefix)]
        if slots:
            chains.append((slots, given[-1]))
    assert granted > 20
    assert refused > 5
