"""Checked mode: lawful use is never refused."""

from __future__ import annotations

import random

import pytest
import torch

from tests.impl.pools import alloc, decode, extend, free_list, ids, paged_pool, staged, state


@pytest.fixture
def pool():
    """Pages of 4. Row A: 6 tokens in pages 1, 2 (slots 4 to 9); row B: 4 tokens in page 3; 4 to 6 free."""
    pool = paged_pool(6, 4, checked=True)
    assert extend(pool, (0, 6, -1), (0, 4, -1)) == [4, 5, 6, 7, 8, 9, 12, 13, 14, 15]
    return pool


def test_tails_and_partly_used_pages_may_be_freed(pool):
    assert decode(pool, (7, 9), (5, 15)) == [10, 16]
    pool.free(ids(10, 8, 9))  # the tail of row A from a page boundary, in any order
    pool.free_segment(ids(12, 13, 14, 15, 16), start_pos=0)
    assert free_list(pool) == [3, 4, 2, 5, 6]
    pool.free_page_ids(ids(1))
    assert pool.available_size() == 24


def test_several_rows_in_one_free_in_any_order_with_repeats(pool):
    slots = [*range(4, 10), *range(12, 16)] * 2
    random.Random(0).shuffle(slots)
    pool.free(ids(*slots, dtype=torch.int32))
    assert free_list(pool) == [1, 2, 3, 4, 5, 6]


def test_rows_that_do_not_grow_may_share_a_page(pool):
    assert extend(pool, (6, 6, 9), (6, 6, 9), (1, 1, 4), (6, 7, 9)) == [10]


def test_a_page_boundary_prefix_needs_no_live_last_loc(pool):
    """Out of a sliding window, the page before may be gone."""
    pool.free_page_ids(ids(3))
    assert decode(pool, (5, 15)) == [12]


def test_refusals_for_lack_of_pages_are_none_and_forget_nothing(pool):
    before = state(pool)
    assert extend(pool, (0, 16, -1)) is None
    assert alloc(pool, 16) is None
    assert decode(pool, *[(1, -1)] * 4) is None
    assert state(pool) == before
    assert extend(pool, (6, 8, 9), (0, 12, -1)) == [10, 11, *range(16, 28)]


def test_groups_and_clear_and_resize_start_afresh(pool):
    pool.free_group_begin()
    pool.free(ids(*range(4, 10)))
    assert extend(pool, (0, 12, -1)) == [
        *range(16, 28)
    ]  # the held pages are out of reach, the others are not
    pool.free_group_end()
    assert alloc(pool, 8) == [4, 5, 6, 7, 8, 9, 10, 11]
    pool.free_group_begin()
    pool.free_page_ids(ids(1, 2))
    pool.clear()
    assert alloc(pool, 24) == list(range(4, 28))
    pool.resize(8)
    assert alloc(pool, 8) == list(range(4, 12))


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_long_random_contract_use_is_never_refused(page_size, need_sort):
    """A checked pool and an unchecked one take the same stream and stay the same."""
    rng = random.Random(page_size)
    pools = [paged_pool(12, page_size, need_sort=need_sort, checked=checked) for checked in (True, False)]
    rows: list[list[int]] = []
    served = 0
    in_group = False

    def both(call):
        answers = [call(pool) for pool in pools]
        assert answers[0] == answers[1]
        assert state(pools[0]) == state(pools[1])
        return answers[0]

    for _ in range(300):
        kind = rng.choice(("extend", "extend", "decode", "free", "segment", "pages", "group"))
        grown = rng.sample(rows, rng.randrange(len(rows) + 1))
        if kind == "extend":
            grown.append([])
            more = [rng.randrange(2 * page_size + 1) for _ in grown]
            batch = [(len(r), len(r) + n, r[-1] if r else -1) for r, n in zip(grown, more, strict=True)]
            slots = both(lambda pool, batch=batch: extend(pool, *batch))
            if slots is not None:
                for row, n in zip(grown, more, strict=True):
                    row += [slots.pop(0) for _ in range(n)]
                rows += grown[-1:] if grown[-1] else []
                served += 1
        elif kind == "decode":
            batch = [(len(row) + 1, row[-1]) for row in grown]
            slots = both(lambda pool, batch=batch: decode(pool, *batch))
            for row, slot in zip(grown if slots else [], slots or [], strict=True):
                row.append(slot)
        elif kind == "free" and grown:
            slots = rng.sample([slot for row in grown for slot in row], sum(map(len, grown)))
            both(lambda pool, slots=slots: pool.free(ids(*slots)))
            rows = [row for row in rows if not any(row is gone for gone in grown)]
        elif kind == "segment" and rows:
            row = rng.choice(rows)
            start = rng.randrange(len(row)) // page_size * page_size
            tail = row[start:]
            del row[start:]
            both(lambda pool, tail=tail, start=start: pool.free_segment(ids(*tail), start_pos=start))
            rows = [row for row in rows if row]
        elif kind == "pages" and rows:
            row = rows.pop(rng.randrange(len(rows)))
            pages = list(dict.fromkeys(slot // page_size for slot in row))
            both(lambda pool, pages=pages: pool.free_page_ids(ids(*pages)))
        elif kind == "group":
            both(lambda pool, end=in_group: pool.free_group_end() if end else pool.free_group_begin())
            in_group = not in_group
    assert served > 30
    assert (staged(pools[0]) != []) <= need_sort
