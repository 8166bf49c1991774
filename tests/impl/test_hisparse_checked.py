"""Checked mode of the HiSparse allocators: breaches are refused and change nothing; lawful use is not."""

from __future__ import annotations

import random

import pytest

from kvproof.impl.errors import AllocatorError, StateError
from tests.impl.hisparse_pools import all_mapped, buffer, decode, extend, hisparse_pool, lists, state, v4_pool
from tests.impl.pools import alloc, ids


@pytest.fixture
def pool():
    """Pages of 4. Row A: slots 4 … 9 on device slots 12 … 17; row B: 12 … 15 on 4 … 7, then decoded
    to slot 16."""
    pool = hisparse_pool(4, 4, 2, checked=True)
    pool.hisparse_attn_allocator.free_pages = ids(3, 4, 1, 2)
    assert extend(pool, (0, 6, -1), (0, 4, -1)) == [*range(4, 10), *range(12, 16)]
    assert decode(pool, (5, 15)) == [16]
    return pool


def refused(pool, message, call, kind=AllocatorError):
    """The call is refused with exactly this error class, a message that begins so, and no change."""
    before = state(pool)
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message), str(caught.value)
    assert state(pool) == before


@pytest.mark.parametrize("method", ["free", "free_full"])
def test_a_free_of_what_is_not_whole_or_not_live(pool, method):
    act = getattr(pool, method)
    refused(
        pool,
        "free call 3, logical side: expected all live slots of every page, got a free of slot 4 that would "
        "release page 1, whose slots 5, 6, 7 are live: alloc_extend call 1, batch row 0.",
        lambda: act(ids(4)),
    )
    refused(pool, "free call 4, logical side: expected live slots, got slot 40", lambda: act(ids(40)))
    act(ids(12, 13, 14, 15))
    refused(
        pool,
        "free call 6, logical side: expected live slots, got slots 12, 13, 14, 15, of page 3, released by "
        "free call 5 (until then: alloc_extend call 1, batch row 1)",
        lambda: act(ids(12, 13, 14, 15)),
    )
    refused(
        pool, "free_segment call 7, logical side", lambda: pool.free_segment(ids(4, 5, 6, 7, 8), start_pos=0)
    )


def test_free_hisparse_of_what_is_not_live(pool):
    refused(
        pool,
        "free_hisparse call 3, logical side: expected live slots, got slot 20, of page 5, never handed out",
        lambda: pool.free_hisparse(ids(4, 20)),
    )
    pool.free_hisparse(ids(4, 16))
    pool.free_hisparse(ids(4))  # has lost them: nothing to do, as with what never had any
    assert lists(pool)[1] == [3, 2]


def test_extending_inside_a_page_without_device_slots(pool):
    refused(
        pool,
        "alloc_extend call 2, device side: expected last_loc to have a device slot, for the row goes on "
        "inside its page, got slot 16 in batch row 1 of prefix 5, unmapped",
        lambda: extend(pool, (6, 7, 9), (5, 6, 16)),
    )
    assert extend(pool, (5, 8, 16), call="alloc_logical_only") == [17, 18, 19]
    assert extend(pool, (8, 9, 19)) == [20]


def test_arguments_that_break_the_contract(pool):
    refused(
        pool,
        "alloc_extend call 3, logical side: expected (last_loc + 1) % 4 = prefix % 4 = 2, got last_loc 8",
        lambda: extend(pool, (6, 7, 8)),
    )
    refused(
        pool,
        "alloc_extend call 4, logical side: expected num_new_pages = 1, got 2",
        lambda: pool.alloc_extend(ids(0), ids(0), ids(4), ids(4), ids(-1), 4, num_new_pages=2),
    )


def test_a_buffer_of_slots_that_are_not_one_row_in_order(pool):
    refused(
        pool,
        "alloc_device_buffer call 3, logical side: expected live slots, got slot 24",
        lambda: buffer(pool, [4, 5, 24], 4),
    )
    refused(
        pool,
        "alloc_device_buffer call 4, logical side: expected every slot once, got slot 5 twice in one call",
        lambda: buffer(pool, [4, 5, 5], 4),
    )
    refused(
        pool,
        "alloc_device_buffer call 4, device side: expected all live slots of every page, got a free of slots "
        "12, 13 that would release page 3, whose slots 14, 15 are live: alloc_extend call 1, batch row 0",
        lambda: buffer(pool, [4, 5], 4),
    )
    refused(
        pool,
        "alloc_device_buffer call 5, device side: expected the slots of one row in position order from a "
        "page",
        lambda: buffer(pool, [8, 9, 4, 5, 6, 7], 8),
    )
    refused(
        pool, "alloc_device_buffer: expected a size of whole pages", lambda: buffer(pool, [12, 13, 14, 15], 5)
    )


def test_buffers_are_freed_whole_once_and_by_nobody_else(pool):
    assert buffer(pool, [*range(4, 10)], 12) == [*range(12, 20), *range(8, 12)]
    refused(
        pool,
        "free_hisparse_indices call 3, device side: expected all live slots of every page, got a free of "
        "slot 12 that would release page 3, whose slots 13, 14, 15 are live: alloc_device_buffer call 2",
        lambda: pool.free_hisparse_indices(ids(12)),
    )
    refused(
        pool,
        "free_hisparse_indices call 4, device side: expected slots of buffers, got page 1, a row's: "
        "alloc_extend call 1, batch row 1",
        lambda: pool.free_hisparse_indices(ids(4, 5, 6, 7)),
    )
    pool.free(ids(*range(4, 10)))
    pool.free_hisparse_indices(ids(*range(12, 20), 0, 1))
    refused(
        pool,
        "free_hisparse_indices call 7, device side: expected live slots, got slots 16, 17, 18, 19, of page "
        "4, released by free_hisparse_indices call 6 (until then: alloc_device_buffer call 2)",
        lambda: pool.free_hisparse_indices(ids(16, 17, 18, 19)),
    )
    pool.free_hisparse_indices(ids(8, 9, 10, 11))
    assert lists(pool)[1] == [2, 3, 4]
    extend(pool, (0, 4, -1))  # what was a buffer's is a row's
    refused(
        pool,
        "free_hisparse_indices call 10, device side: expected slots of buffers, got page 2, a row's",
        lambda: pool.free_hisparse_indices(ids(8, 9, 10, 11)),
    )


def test_lists_and_entries_written_from_outside(pool):
    mapping = pool.full_to_hisparse_device_index_mapping
    was = mapping.clone()
    mapping[5] = 4  # of row B
    refused(
        pool,
        "free call 2, device side: expected every slot once",
        lambda: pool.free(ids(4, 5, 6, 7, 12, 13, 14, 15)),
    )
    mapping[5] = 0
    refused(
        pool,
        "free call 3, device side: expected all live slots of every page",
        lambda: pool.free(ids(4, 5, 6, 7)),
    )
    mapping.copy_(was)
    pool.hisparse_attn_allocator.free_pages = ids(1, 2)
    refused(
        pool,
        "alloc_extend call 4, device side: expected every page once, free, staged, deferred or live, got a "
        "list with page 1 in it, live: alloc_extend call 1, batch row 1",
        lambda: extend(pool, (0, 1, -1)),
        StateError,
    )


def test_alloc_of_single_slots_is_checked_too():
    pool = hisparse_pool(2, 1, 2, checked=True)
    assert alloc(pool, 2) == [1, 2]
    refused(pool, "free call 2, logical side: expected live slots, got slot 3", lambda: pool.free(ids(3)))
    pool.free(ids(1))
    assert alloc(pool, 1) == [1]
    assert buffer(pool, [2], 1) == [2]
    refused(pool, "free_hisparse_indices", lambda: pool.free_hisparse_indices(ids(1)))


# --- DeepSeek-V4 ----------------------------------------------------------------------------------------


@pytest.fixture
def v4():
    """Pages of 8, device pages of 2. Row A: 13 slots 8 … 20, blocks 2, 3, 4; row B: 4 slots 24 … 27, "
    "block 6."""
    pool = v4_pool(6, 6, 6, 8, checked=True)
    assert extend(pool, (0, 13, -1), (0, 4, -1)) == [*range(8, 21), *range(24, 28)]
    assert all_mapped(pool) == {2: 2, 3: 3, 4: 4, 6: 6}
    return pool


def test_v4_refuses_what_the_sliding_window_side_refuses(v4):
    refused(v4, "free call 2, full side: expected all live slots", lambda: v4.free(ids(8)))
    refused(v4, "free_full call", lambda: v4.free_full(ids(*range(24, 28))))
    refused(v4, "alloc_extend call", lambda: extend(v4, (13, 14, 19)))


def test_v4_refuses_a_full_free_of_what_has_device_slots(v4):
    v4.free_swa(ids(24))
    refused(
        v4,
        "free_full call 2, device side: expected slots without device slots, got slots mapped to page 3, of "
        "alloc_extend call 1, batch row 1",
        lambda: v4.free_full(ids(*range(24, 28))),
    )
    refused(v4, "free_full_segment", lambda: v4.free_full_segment(ids(*range(24, 28)), start_pos=0))
    refused(v4, "free_full_segments", lambda: v4.free_full_segments([(ids(*range(24, 28)), 0)]))
    v4.free_hisparse(ids(24))
    v4.free_full(ids(*range(24, 28)))


def test_v4_refuses_to_go_on_behind_an_unmapped_block(v4):
    v4.free_hisparse(ids(24))
    refused(
        v4,
        "alloc_extend call 3, device side: expected last_loc to have a device slot, for the row goes on "
        "inside its page, got slot 27 in batch row 0 of prefix 4, unmapped",
        lambda: extend(v4, (4, 8, 27)),
    )
    assert extend(v4, (4, 7, 27)) == [28, 29, 30]  # completes no block
    assert decode(v4, (8, 30)) == [31]


def test_v4_buffers_and_groups(v4):
    refused(v4, "alloc_device_buffer call 2, full side: expected live slots", lambda: buffer(v4, [8], 2))
    v4.free_group_begin()
    assert buffer(v4, [2, 3, 4], 2) == [2, 3]
    v4.free(ids(*range(8, 21)))
    refused(v4, "free call", lambda: v4.free(ids(*range(8, 21))))
    v4.free_hisparse_indices(ids(2, 3))
    refused(v4, "free_hisparse_indices", lambda: v4.free_hisparse_indices(ids(2, 3)))
    assert lists(v4)[1] == [4, 5, 6]
    v4.free_group_end()
    assert lists(v4)[1] == [1, 2, 4, 5, 6]
    v4.clear()
    assert extend(v4, (0, 48, -1)) == list(range(8, 56))


# --- lawful use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("need_sort", [False, True])
def test_random_lawful_use_is_never_refused_and_the_same_unchecked(page_size, need_sort):
    rng = random.Random(f"hisparse {page_size} {need_sort}")
    pools = [
        hisparse_pool(10, page_size, 2, need_sort=need_sort, checked=checked) for checked in (True, False)
    ]
    _play(rng, pools, page_size)


@pytest.mark.parametrize("page_size", [4, 8, 16])
@pytest.mark.parametrize("need_sort", [False, True])
def test_random_lawful_use_of_v4_is_never_refused_and_the_same_unchecked(page_size, need_sort):
    rng = random.Random(f"v4 {page_size} {need_sort}")
    pools = [
        v4_pool(14, 12, 10, page_size, need_sort=need_sort, checked=checked) for checked in (True, False)
    ]
    _play(rng, pools, page_size)


def _play(rng, pools, page_size):
    """Rows come, grow, lose their device pages to buffers, and go; the same on both pools. What a row has
    there is kept by hand, and compared with the mapping."""
    each = pools[0].compress_ratio
    rows, buffers = list[list[int]](), list[list[int]]()
    attached = list[bool]()  # whether every complete block of the row has its device slot
    granted = made = 0

    def both(call):
        answers = [call(pool) for pool in pools]
        assert answers[0] == answers[1]
        assert state(pools[0]) == state(pools[1])
        return answers[0]

    for _ in range(250):
        kind = rng.choice(("new", "new", "grow", "decode", "buffer", "free", "segment", "device", "return"))
        at = rng.randrange(len(rows)) if rows else -1
        if kind == "new":
            lens = [rng.randrange(1, 3 * page_size + 1) for _ in range(rng.randrange(1, 3))]
            slots = both(lambda pool, lens=lens: extend(pool, *[(0, seq, -1) for seq in lens]))
            for seq in lens if slots is not None else []:
                rows.append([slots.pop(0) for _ in range(seq)])
                attached.append(True)
                granted += 1
        elif kind == "return" and buffers:
            slots = buffers.pop(rng.randrange(len(buffers)))
            both(lambda pool, slots=slots: pool.free_hisparse_indices(ids(*slots)))
        elif at < 0:
            continue
        elif kind == "grow" and attached[at]:
            row = rows[at]
            grown = len(row), len(row) + rng.randrange(2 * page_size), row[-1]
            rows[at] += both(lambda pool, grown=grown: extend(pool, grown)) or []
        elif kind == "decode":
            row = rows[at]
            slots = both(lambda pool, row=row: decode(pool, (len(row) + 1, row[-1])))
            row += slots or []
            attached[at] &= not slots or len(row) % each != 0
        elif kind == "buffer":
            entries = [slot // each for slot in rows[at] if slot % each == each - 1]
            need = rng.randrange(4) * pools[0].hisparse_page_size
            slots = both(lambda pool, entries=entries, need=need: buffer(pool, entries, need))
            if slots is not None:
                made += 1
                attached[at] = False
                buffers += [slots] if slots else []
        elif kind == "device":
            both(lambda pool, row=rows[at]: pool.free_hisparse(ids(*row)))
            attached[at] = False
        elif kind in ("free", "segment"):
            row = rows.pop(at)
            attached.pop(at)
            if kind == "free":
                rng.shuffle(row)
                both(lambda pool, row=row: pool.free(ids(*row)))
            else:
                both(lambda pool, row=row: pool.free_segment(ids(*row), start_pos=0))
        taken = [slot // pools[0].hisparse_page_size for slots in buffers for slot in slots]
        peers = {slot // pools[0].hisparse_page_size for slot in all_mapped(pools[0]).values()}
        assert peers.isdisjoint(taken)
        assert set(all_mapped(pools[0])) <= {slot // each for row in rows for slot in row}
    assert granted > 20
    assert made > 5
