"""Checked mode of the sliding-window allocator: what breaks the contract is refused by name on either side
and changes nothing; what keeps it is not.

Not here: what one pool's ledger says of any pool (test_checked.py).
"""

from __future__ import annotations

import pytest
import torch

from kvproof.impl.errors import AllocatorError, StateError
from tests.impl.pools import ids
from tests.impl.swa_pools import Run, decode, extend, lists, peers, state, swa_pool


@pytest.fixture
def pool():
    """Pages of 4, 8 and 6 of them. Row A: 8 tokens, full pages 1, 2, peers in swa pages 1, 2. Row B: 6
    tokens, full pages 3, 4, peers of the last 2 alone, in swa page 3: full 16, 17 are mapped to 12, 13."""
    pool = swa_pool(8, 6, 4, checked=True)
    extend(pool, (0, 8, -1))
    extend(pool, (0, 6, -1), tail=2)
    assert peers(pool, 4, 8, 12, 16, 17) == [4, 8, 0, 12, 13]
    return pool


@pytest.fixture
def slots():
    """Pages of one slot, 5 on either side; full 1 to 3 are out, with peers 5, 4, 3."""
    pool = swa_pool(5, 5, 1, checked=True)
    pool.swa_attn_allocator.free_pages = ids(5, 4, 3, 2, 1)
    pool.alloc(3)
    return pool


def refused(pool, message, call, kind=AllocatorError):
    """The call is refused with exactly this error class and message, and the allocator is as before."""
    before = state(pool)
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message), str(caught.value)
    assert state(pool) == before


# --- frees --------------------------------------------------------------------------------------------


def test_a_double_free_names_who_had_the_page_and_who_released_it(pool):
    pool.free(ids(*range(4, 12)))
    for number, (name, call) in enumerate(
        {
            "free": lambda: pool.free(ids(4, 5, 6, 7)),
            "free_segment": lambda: pool.free_segment(ids(4, 5, 6, 7), start_pos=0),
            "free_segments": lambda: pool.free_segments([(ids(4, 5, 6, 7), 0)]),
            "free_full": lambda: pool.free_full(ids(4, 5, 6, 7)),
            "free_full_segment": lambda: pool.free_full_segment(ids(4, 5, 6, 7), start_pos=0),
        }.items(),
        start=4,
    ):
        refused(
            pool,
            f"{name} call {number}, full side: expected live slots, got slots 4, 5, 6, 7, of page 1, "
            "released by free call 3 (until then: alloc_extend call 1, batch row 0). Free every page once",
            call,
        )


def test_frees_of_the_swa_side_need_live_full_slots(pool):
    pool.free(ids(16, 17))
    for number, (name, call) in enumerate(
        {
            "free_swa": lambda: pool.free_swa(ids(4, 16)),
            "free_swa_segment": lambda: pool.free_swa_segment(ids(16, 17), start_pos=0),
        }.items(),
        start=4,
    ):
        refused(
            pool,
            f"{name} call {number}, full side: expected live slots, got slot 16, of page 4, "
            "released by free call 3",
            call,
        )
    refused(
        pool,
        "free_swa call 6, full side: expected live slots, got slot 1, of the padding page",
        lambda: pool.free_swa(ids(1)),
    )
    extend(pool, (0, 1, -1))
    refused(
        pool,
        "free_swa call 8, full side: expected live slots, got slot 17, never handed out",
        lambda: pool.free_swa(ids(17)),
    )
    refused(
        pool,
        "free_swa call 9, full side: expected live slots, got slot 36, outside pages 1 to 8",
        lambda: pool.free_swa(ids(36)),
    )


def test_a_free_of_part_of_a_live_page_is_refused_before_any_peer_goes(pool):
    message = (
        "full side: expected all live slots of every page, got a free of slot 8 that would release page 2, "
    )
    message += "whose slots 9, 10, 11 are live: alloc_extend call 1, batch row 0"
    refused(pool, f"free call 3, {message}", lambda: pool.free(ids(4, 5, 6, 7, 8)))
    refused(
        pool, f"free_segment call 4, {message}", lambda: pool.free_segment(ids(*range(4, 9)), start_pos=0)
    )


def test_a_mapped_slot_in_a_free_of_the_full_side_is_named_with_its_peer(pool):
    message = "full side: expected slots without peers, got slot 16, mapped to swa slot 12 of "
    message += "alloc_extend_swa_tail call 2, batch row 0. Release the peers by free_swa first"
    refused(pool, f"free_full call 3, {message}", lambda: pool.free_full(ids(*range(12, 18))))
    row = ids(*range(12, 18))
    refused(pool, f"free_full_segment call 4, {message}", lambda: pool.free_full_segment(row, start_pos=0))
    refused(pool, f"free_full_segments call 5, {message}", lambda: pool.free_full_segments([(row, 0)]))
    pool.free_swa(ids(16))
    pool.free_full(row)
    assert lists(pool)[0] == [3, 4, 5, 6, 7, 8]


def test_unmapped_pages_in_a_segment_are_refused(pool):
    """The handed case "page-zero"."""
    message = "swa side: expected a peer for every page, got page 3 of the full side, unmapped: "
    message += "alloc_extend_swa_tail call 2, batch row 0. Release what has no peers by free_full"
    row = ids(*range(12, 18))
    refused(pool, f"free_swa_segment call 3, {message}", lambda: pool.free_swa_segment(row, start_pos=0))
    refused(pool, f"free_segment call 4, {message}", lambda: pool.free_segment(row, start_pos=0))
    refused(
        pool, f"free_segments call 5, {message}", lambda: pool.free_segments([(ids(16, 17), 0), (row[:4], 4)])
    )
    pool.free_swa_segment(row[4:], start_pos=4)
    refused(
        pool,
        "free_swa_segment call 7, swa side: expected a peer for every page, got page 4",
        lambda: pool.free_swa_segment(row[4:], start_pos=4),
    )


def test_segments_are_stretches_of_a_row_with_every_page_once(pool):
    refused(
        pool,
        "free_swa_segment call 3, full side: expected the slots of one row in position order from a page "
        "boundary, got slot 6 at index 1",
        lambda: pool.free_swa_segment(ids(4, 6, 5, 7), start_pos=0),
    )
    refused(
        pool,
        "free_swa_segment call 4, full side: expected every page once, got page 1 twice in one call",
        lambda: pool.free_swa_segment(ids(4, 5, 6, 7, 4, 5, 6, 7), start_pos=0),
    )


def test_single_slots_are_checked_as_pages_of_one(slots):
    pool = slots
    pool.free_swa(ids(2))
    refused(
        pool,
        "free call 3, swa side: expected a peer for every page, got page 2 of the full "
        "side, unmapped: alloc call 1",
        lambda: pool.free(ids(1, 2)),
    )
    refused(
        pool,
        "free_swa call 4, swa side: expected a peer for every page, got page 2",
        lambda: pool.free_swa(ids(2)),
    )
    refused(
        pool,
        "free_swa call 5, full side: expected every slot once, got slot 1 twice in one call",
        lambda: pool.free_swa(ids(1, 3, 1)),
    )
    refused(
        pool,
        "free call 6, full side: expected live slots, got slot 4, of page 4, never",
        lambda: pool.free(ids(4)),
    )
    refused(
        pool,
        "free_full call 7, full side: expected slots without peers, got slot 3, mapped "
        "to swa slot 3 of alloc call 1",
        lambda: pool.free_full(ids(2, 3)),
    )
    pool.free_full(ids(2))
    pool.free(ids(3, 1))
    assert lists(pool) == ([4, 5, 2, 3, 1], [], [2, 1, 4, 3, 5], [])


def test_frees_inside_a_group_are_checked_at_the_call(pool):
    pool.free_group_begin()
    pool.free_swa(ids(4))
    refused(
        pool,
        "free_swa_segment call 4, swa side: expected a peer for every page, got page 1",
        lambda: pool.free_swa_segment(ids(4, 5, 6, 7), start_pos=0),
    )
    pool.free(ids(*range(4, 12)))
    refused(pool, "free call 6, full side: expected live slots, got slot 4,", lambda: pool.free(ids(4)))
    refused(pool, "free_group_begin: expected no open group", pool.free_group_begin)
    pool.free_group_end()
    refused(pool, "free_group_end: expected an open group", pool.free_group_end)
    assert lists(pool) == ([1, 2, 5, 6, 7, 8], [], [1, 2, 4, 5, 6], [])


# --- allocation ---------------------------------------------------------------------------------------


def test_a_row_without_a_peer_cannot_go_on_inside_its_page(pool):
    pool.free_swa(ids(16))
    message = (
        "swa side: expected last_loc to have a peer, for the row goes on inside its page, got slot 17 in "
    )
    message += "batch row 1 of prefix 6, unmapped"
    refused(pool, f"alloc_extend call 4, {message}", lambda: extend(pool, (8, 9, 11), (6, 7, 17)))
    refused(pool, f"alloc_decode call 5, {message}", lambda: decode(pool, (9, 11), (7, 17)))
    assert extend(pool, (6, 6, 17)) == []
    assert extend(pool, (6, 12, 17), tail=4) == [
        18,
        19,
        20,
        21,
        22,
        23,
    ]  # the tail begins at page 2 of the row
    assert peers(pool, 18, 19, 20, 23) == [0, 0, 12, 15]


def test_a_row_whose_last_page_is_full_may_have_lost_it(pool):
    pool.free_swa(ids(*range(4, 12)))
    assert decode(pool, (9, 11)) == [20]
    assert extend(pool, (9, 13, 20)) == [21, 22, 23, 24]


def test_last_loc_is_checked_on_the_full_side_first(pool):
    refused(
        pool,
        "alloc_extend call 3, full side: expected (last_loc + 1) % 4 = prefix % 4 = 2, "
        "got last_loc 18 in batch row",
        lambda: extend(pool, (6, 7, 18)),
    )
    refused(
        pool,
        "alloc_decode call 4, full side: expected last_loc to be a live slot, got slot 65 in batch row 0 of "
        "prefix 6, outside pages 1 to 8",
        lambda: decode(pool, (7, 65)),
    )


def test_lengths_are_checked_before_a_tail_is_cut(pool):
    zero, five, six, last = ids(0), ids(5), ids(6), ids(-1)
    refused(
        pool,
        "alloc_extend_swa_tail call 3, full side: expected seq_lens and seq_lens_cpu to "
        "be equal, got 5 and 6",
        lambda: pool.alloc_extend_swa_tail(zero, zero, five, six, last, 5, 4),
    )
    refused(
        pool,
        "alloc_extend_swa_tail call 4, full side: expected extend_num_tokens = "
        "sum(seq_lens - prefix_lens) = 5, got 6",
        lambda: pool.alloc_extend_swa_tail(zero, zero, five, five, last, 6, 4),
    )


@pytest.mark.parametrize("side", ["full", "swa"])
def test_a_damaged_list_of_either_side_is_not_used(pool, side):
    damaged = getattr(pool, f"{side}_attn_allocator")
    damaged.free_pages = ids(*damaged.free_pages.tolist()[1:])
    for number, (name, call) in enumerate(
        {
            "alloc_extend": lambda: extend(pool, (0, 1, -1)),
            "alloc_decode": lambda: decode(pool, (1, -1)),
            "alloc_extend_swa_tail": lambda: extend(pool, (0, 1, -1), tail=0),
        }.items(),
        start=3,
    ):
        message = (
            f"{name} call {number}, {side} side: expected every page once, free, staged, deferred or live"
        )
        refused(pool, message, call, StateError)


@pytest.mark.parametrize(
    ("slots", "peers", "message"),
    [
        (
            (20, 21),
            (16, 16),
            "swa side: expected new slots only, got slot 16 a second time: alloc_extend call 3",
        ),
        (
            (20, 21),
            (4, 5),
            "swa side: expected new slots only, got slot 4 a second time: alloc_extend call 1",
        ),
        ((20, 21), (0, 1), "swa side: expected slots of pages 1 to 6, from each page's start"),
        ((16, 17), (16, 17), "full side: expected new slots only, got slot 16 a second time"),
    ],
)
def test_a_wrong_slot_on_either_side_is_caught_before_it_is_handed_out(
    pool, monkeypatch, slots, peers, message
):
    def compute(*arguments):
        mapping = arguments[5]
        mapping[ids(*slots)] = ids(*peers)
        return ids(*slots)

    pool.use_triton_kernels = False
    monkeypatch.setattr("kvproof.impl.swa.swa_extend_reference", compute)
    refused(pool, f"alloc_extend call 3, {message}", lambda: extend(pool, (0, 2, -1)), StateError)
    monkeypatch.undo()
    assert extend(pool, (0, 2, -1)) == [20, 21]


# --- the mapping --------------------------------------------------------------------------------------


def test_edits_of_slots_that_are_not_live_are_refused(pool):
    message = "expected live slots, got slot 20, of page 5, never handed out"
    refused(
        pool,
        f"set_full_to_swa_mapping call 3, full side: {message}",
        lambda: pool.set_full_to_swa_mapping(ids(12, 20), ids(4, 5)),
    )
    refused(
        pool,
        f"set_full_to_swa_mapping call 4, swa side: {message}",
        lambda: pool.set_full_to_swa_mapping(ids(12, 13), ids(4, 20)),
    )
    refused(
        pool,
        "set_full_to_swa_mapping call 5, swa side: expected live slots, got slot 0, of the padding page",
        lambda: pool.set_full_to_swa_mapping(ids(12), ids(0)),
    )
    refused(
        pool,
        f"clear_full_to_swa_mapping call 6, full side: {message}",
        lambda: pool.clear_full_to_swa_mapping(ids(4, 20)),
    )


def test_two_full_slots_of_one_peer_are_refused_in_one_call_and_at_the_release(pool):
    refused(
        pool,
        "set_full_to_swa_mapping call 3, swa side: expected every slot once, got slot 4 twice in one call",
        lambda: pool.set_full_to_swa_mapping(ids(12, 13), ids(4, 4)),
    )
    refused(
        pool,
        "set_full_to_swa_mapping call 4, full side: expected every slot once, got slot 12 twice in one call",
        lambda: pool.set_full_to_swa_mapping(ids(12, 12), ids(4, 5)),
    )
    pool.set_full_to_swa_mapping(ids(12, 13, 14, 15), ids(4, 5, 6, 7))  # as before a clear of row A's page
    message = (
        "swa side: expected peers of the released slots only, got swa slot 4, to which slot 12 of the full "
    )
    message += "side is mapped too: alloc_extend_swa_tail call 2, batch row 0"
    refused(pool, f"free call 6, {message}", lambda: pool.free(ids(*range(4, 12))))
    refused(pool, f"free_swa call 7, {message}", lambda: pool.free_swa(ids(4)))
    pool.clear_full_to_swa_mapping(ids(4, 5, 6, 7))
    pool.free(ids(*range(4, 12)))
    pool.free(ids(*range(12, 18)))
    assert lists(pool) == ([3, 4, 1, 2, 5, 6, 7, 8], [], [1, 3, 2, 4, 5, 6], [])


@pytest.mark.parametrize("clear_first", [False, True])
def test_a_row_takes_over_a_longer_page_and_grows_in_it(clear_first):
    """Row B, 2 tokens, has lost its peers and takes over page 1 of row A, which has 4: slots 6 and 7 of the
    swa side are nobody's then, and B grows into them."""
    pool = swa_pool(4, 4, 4, checked=True)
    extend(pool, (0, 4, -1), (0, 2, -1))
    pool.free_swa(ids(8, 9))
    edits = [
        lambda: pool.set_full_to_swa_mapping(ids(8, 9), ids(4, 5)),
        lambda: pool.clear_full_to_swa_mapping(ids(4, 5, 6, 7)),
    ]
    for edit in reversed(edits) if clear_first else edits:
        edit()
    assert decode(pool, (3, 9)) == [10]
    assert peers(pool, 8, 9, 10) == [4, 5, 6]
    pool.free(ids(8, 9, 10))
    assert lists(pool) == ([2, 3, 4], [], [1, 2, 3, 4], [])


# --- lawful use ---------------------------------------------------------------------------------------


def test_unmapped_slots_may_stand_in_free_and_free_swa(pool):
    pool.free_swa(ids(*range(12, 18)))
    pool.free_swa(ids(12))
    pool.free(ids(*range(12, 18)))
    assert lists(pool) == ([3, 4, 5, 6, 7, 8], [], [3, 4, 5, 6], [])


def test_calls_on_a_pool_itself_count_too(pool):
    """A cache may take swa slots by themselves, and map them afterwards."""
    swa = pool.swa_attn_allocator.alloc(4)
    pool.set_full_to_swa_mapping(ids(12, 13, 14, 15), swa)
    assert peers(pool, 12, 15) == [16, 19]
    pool.free_segment(ids(*range(12, 18)), start_pos=0)
    assert lists(pool)[2] == [4, 3, 5, 6]


def test_clear_and_resize_start_afresh(pool):
    pool.free_group_begin()
    pool.free(ids(*range(4, 12)))
    pool.clear()
    assert extend(pool, (0, 8, -1)) == list(range(4, 12))
    refused(pool, "free call 2, full side: expected live slots, got slot 12", lambda: pool.free(ids(12)))
    pool.resize(type("Config", (), {"max_total_num_tokens": 8}))
    assert extend(pool, (0, 8, -1), dtype=torch.int32) == list(range(4, 12))


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_random_lawful_use_is_never_refused(page_size, need_sort):
    granted = 0
    for seed in range(3):
        run = Run(f"checked {seed} {page_size}", page_size, need_sort=need_sort, checked=True)
        assert run.steps(250) == ""
        granted += run.granted
    assert granted > 75
