"""Checked mode: every breach of the contract is refused by name and changes nothing."""

from __future__ import annotations

import pytest

from kvproof.impl.checked import Ledger
from kvproof.impl.errors import AllocatorError, StateError
from tests.impl.pools import alloc, decode, extend, free_list, ids, paged_pool, state, token_pool


@pytest.fixture
def pool():
    """Pages of 4. Row A: 6 tokens in pages 1, 2 (slots 4 to 9); row B: 4 tokens in page 3; 4 to 6 free."""
    pool = paged_pool(6, 4, checked=True)
    assert extend(pool, (0, 6, -1), (0, 4, -1)) == [4, 5, 6, 7, 8, 9, 12, 13, 14, 15]
    return pool


class Unchanged:
    """The pool is after the block what it was before."""

    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        self.before = state(self.pool)

    def __exit__(self, kind, *_):
        if kind is None:
            assert state(self.pool) == self.before


def refused(pool, message, call, kind=AllocatorError):
    """The call is refused with exactly this error class and message, and the pool is as before."""
    with Unchanged(pool), pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message), str(caught.value)


# --- frees --------------------------------------------------------------------------------------------


def test_a_double_free_names_who_had_the_page_and_who_released_it(pool):
    pool.free(ids(12, 13, 14, 15))
    refused(
        pool,
        "free call 3: expected live slots, got slots 12, 13, 14, 15, of page 3, released by free call 2 "
        "(until then: alloc_extend call 1, batch row 1). Free every page once",
        lambda: pool.free(ids(12, 13, 14, 15)),
    )
    refused(
        pool,
        "free_page_ids call 4: expected live slots, got page 3, of page 3, released by free call 2",
        lambda: pool.free_page_ids(ids(3)),
    )
    refused(
        pool,
        "free_segment call 5: expected live slots, got slots 12, 13, 14, 15, of page 3, "
        "released by free call 2",
        lambda: pool.free_segment(ids(12, 13, 14, 15), start_pos=0),
    )


def test_a_double_free_inside_a_group_is_refused_at_the_call(pool):
    pool.free_group_begin()
    pool.free(ids(12, 13, 14, 15))
    refused(
        pool,
        "free_page_ids call 3: expected live slots, got page 3, of page 3, released by free call 2",
        lambda: pool.free_page_ids(ids(3)),
    )
    pool.free_group_end()
    assert free_list(pool) == [3, 4, 5, 6]


def test_a_page_twice_in_one_call_is_refused(pool):
    refused(
        pool,
        "free_page_ids call 2: expected every page once, got page 3 twice in one call",
        lambda: pool.free_page_ids(ids(3, 1, 3)),
    )


def test_a_free_of_part_of_the_live_slots_names_the_others_and_their_owners(pool):
    refused(
        pool,
        "free call 2: expected all live slots of every page, got a free of slot 5 that "
        "would release page 1, whose "
        "slots 4, 6, 7 are live: alloc_extend call 1, batch row 0. Free whole pages",
        lambda: pool.free(ids(5)),
    )
    assert decode(pool, (7, 9), (5, 15)) == [10, 16]
    refused(
        pool,
        "free call 4: expected all live slots of every page, got a free of slots 8, 9 "
        "that would release page 2, "
        "whose slot 10 is live: alloc_decode call 3, batch row 0.",
        lambda: pool.free(ids(8, 9)),
    )
    refused(
        pool,
        "free_segment call 5: expected all live slots of every page, got a free of slot "
        "8 that would release page 2",
        lambda: pool.free_segment(ids(4, 5, 6, 7, 8), start_pos=0),
    )


def test_the_handed_case_shared_wide_page_is_refused():
    pool = paged_pool(4, 8, checked=True)
    extend(pool, (0, 8, -1))
    refused(
        pool,
        "free call 2: expected all live slots of every page, got a free of slots 8, 9, 10, 11, 12 that would "
        "release page 1, whose slots 13, 14, 15 are live",
        lambda: pool.free(ids(8, 9, 10, 11, 12)),
    )


def test_no_page_is_released_when_one_of_several_may_not_be(pool):
    refused(pool, "free call 2: expected all live slots", lambda: pool.free(ids(12, 13, 14, 15, 4)))
    refused(
        pool, "free_page_ids call 3: expected live slots, got page 5", lambda: pool.free_page_ids(ids(3, 5))
    )
    pool.free(ids(*range(4, 10), *range(12, 16)))
    assert free_list(pool) == [1, 2, 3, 4, 5, 6]


def test_padding_and_slots_outside_the_pool_are_refused(pool):
    refused(
        pool, "free call 2: expected live slots, got slot 0, of the padding page", lambda: pool.free(ids(0))
    )
    refused(
        pool,
        "free call 3: expected live slots, got slot 28, outside pages 1 to 6",
        lambda: pool.free(ids(28)),
    )
    refused(
        pool,
        "free call 4: expected live slots, got slot -1, outside pages 1 to 6",
        lambda: pool.free(ids(-1)),
    )
    refused(
        pool,
        "free_page_ids call 5: expected live slots, got page 0, of the padding page",
        lambda: pool.free_page_ids(ids(0)),
    )


def test_slots_that_were_never_handed_out_are_refused(pool):
    refused(
        pool,
        "free call 2: expected live slots, got slot 20, of page 5, never handed out",
        lambda: pool.free(ids(20)),
    )
    refused(
        pool,
        "free call 3: expected live slots, got slots 10, 11, never handed out",
        lambda: pool.free(ids(8, 9, 10, 11)),
    )


def test_segments_must_be_a_stretch_of_one_row(pool):
    message = "expected the slots of one row in position order from a page boundary, got "
    refused(
        pool,
        f"free_segment call 2: {message}slot 5 at index 0 of a segment that starts with slot 5",
        lambda: pool.free_segment(ids(5, 6, 7), start_pos=0),
    )
    refused(
        pool,
        f"free_segments call 3: {message}slot 6 at index 1",
        lambda: pool.free_segments([(ids(12, 13, 14, 15), 0), (ids(4, 6, 5, 7), 4)]),
    )
    refused(
        pool,
        "free_segments call 4: expected every slot once, got slot 12 twice",
        lambda: pool.free_segments([(ids(12, 13, 14, 15), 0), (ids(12, 13, 14, 15), 4)]),
    )


def test_token_slots_are_checked_as_pages_of_one():
    pool = token_pool(4, checked=True)
    assert alloc(pool, 3) == [1, 2, 3]
    refused(pool, "free call 2: expected every slot once, got slot 2 twice", lambda: pool.free(ids(2, 2)))
    refused(pool, "free call 3: expected live slots, got slot 0, of the padding", lambda: pool.free(ids(0)))
    refused(
        pool, "free call 4: expected live slots, got slot 4, of page 4, never", lambda: pool.free(ids(1, 4))
    )
    pool.free(ids(3, 1))
    refused(
        pool,
        "free call 6: expected live slots, got slot 3, of page 3, released by free call "
        "5 (until then: alloc call 1)",
        lambda: pool.free(ids(3)),
    )
    assert free_list(pool) == [4, 3, 1]
    assert alloc(pool, 3) == [4, 3, 1]


# --- allocation ---------------------------------------------------------------------------------------


def test_last_loc_must_be_congruent(pool):
    refused(
        pool,
        "alloc_extend call 2: expected (last_loc + 1) % 4 = prefix % 4 = 2, got last_loc "
        "8 in batch row 1 of prefix 6",
        lambda: extend(pool, (0, 1, -1), (6, 7, 8)),
    )
    refused(
        pool,
        "alloc_decode call 3: expected (last_loc + 1) % 4 = prefix % 4 = 0, got last_loc 14 in batch row 0",
        lambda: decode(pool, (5, 14)),
    )


def test_last_loc_must_be_live(pool):
    for call, loc, why in (
        (2, 17, "of page 4, never handed out"),
        (3, 29, "outside pages 1 to 6"),
        (4, 1, "of the padding page"),
    ):
        refused(
            pool,
            f"alloc_extend call {call}: expected last_loc to be a live slot, got slot {loc} "
            f"in batch row 0 of prefix 2, {why}",
            lambda loc=loc: extend(pool, (2, 2, loc)),
        )
    pool.free(ids(*range(4, 10)))
    refused(
        pool,
        "alloc_decode call 6: expected last_loc to be a live slot, got slot 9 in batch row 0 of prefix 6, "
        "of page 2, released by free call 5",
        lambda: decode(pool, (7, 9)),
    )


def test_last_loc_must_be_the_last_slot_out_of_its_page(pool):
    assert decode(pool, (7, 9)) == [10]
    refused(
        pool,
        "alloc_extend call 3: expected last_loc to be the last slot handed out of its "
        "page, got slot 9 in batch "
        "row 0, but slot 10 is out too: alloc_decode call 2, batch row 0",
        lambda: extend(pool, (6, 8, 9)),
    )
    refused(
        pool,
        "alloc_decode call 4: expected last_loc to be the last slot handed out of its "
        "page, got slot 10 in batch "
        "row 1, but slot 11 is out too in this batch",
        lambda: decode(pool, (8, 10), (8, 10)),
    )


def test_host_and_device_lengths_must_agree(pool):
    one, two, last = ids(1), ids(2), ids(16)
    refused(
        pool,
        "alloc_extend call 2: expected prefix_lens and prefix_lens_cpu to be equal, got "
        "1 and 2 in batch row 0",
        lambda: pool.alloc_extend(one, two, two, two, last, 1),
    )
    refused(
        pool,
        "alloc_extend call 3: expected seq_lens and seq_lens_cpu to be equal, got 1 and 2",
        lambda: pool.alloc_extend(one, one, one, two, last, 1),
    )
    refused(
        pool,
        "alloc_decode call 4: expected seq_lens and seq_lens_cpu to be equal, got 2 and 1",
        lambda: pool.alloc_decode(two, one, last),
    )


def test_lengths_and_counts_must_fit(pool):
    refused(
        pool,
        "alloc_extend call 2: expected 0 <= prefix_lens <= seq_lens, got prefix 6 and "
        "sequence 5 in batch row 1",
        lambda: extend(pool, (0, 8, -1), (6, 5, 9)),
    )
    refused(
        pool,
        "alloc_decode call 3: expected seq_lens >= 1, got 0 in batch row 0",
        lambda: decode(pool, (0, -1)),
    )
    zero, five, last = ids(0), ids(5), ids(-1)
    refused(
        pool,
        "alloc_extend call 4: expected extend_num_tokens = sum(seq_lens - prefix_lens) = 5, got 6",
        lambda: pool.alloc_extend(zero, zero, five, five, last, 6),
    )
    refused(
        pool,
        "alloc_extend call 5: expected num_new_pages = 2, got 1",
        lambda: pool.alloc_extend(zero, zero, five, five, last, 5, num_new_pages=1),
    )
    assert pool.alloc_extend(zero, zero, five, five, last, 5, num_new_pages=2).tolist() == [*range(16, 21)]


@pytest.mark.parametrize(
    ("free", "problem"),
    [
        ((4, 5, 4), "page 4 twice in it"),
        ((4, 5, 0), "page 0 in it, outside pages 1 to 6"),
        ((4, 5, 7), "page 7 in it, outside pages 1 to 6"),
        ((4, 5, 1), "page 1 in it, live: alloc_extend call 1, batch row 0"),
        ((4, 5), "2 free + 0 staged + 0 deferred + 3 live of 6 pages"),
    ],
)
def test_a_damaged_free_list_is_not_used(pool, free, problem):
    pool.free_pages = ids(*free)
    message = f"expected every page once, free, staged, deferred or live, got a list with {problem}"
    for number, (name, call) in enumerate(
        {
            "alloc": lambda: pool.alloc(4),
            "alloc_extend": lambda: extend(pool, (0, 1, -1)),
            "alloc_decode": lambda: decode(pool, (1, -1)),
        }.items(),
        start=2,
    ):
        refused(pool, f"{name} call {number}: {message}", call, StateError)


def test_a_deferred_page_in_the_free_list_is_damage(pool):
    pool.free_group_begin()
    pool.free_page_ids(ids(3))
    pool.free_pages = ids(3, 4, 5, 6)
    refused(
        pool,
        "alloc call 3: expected every page once, free, staged, deferred or live, got a "
        "list with page 3 in it, "
        "deferred by free_page_ids call 2",
        lambda: pool.alloc(4),
        StateError,
    )


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((16, 16), "expected new slots only, got slot 16 a second time: alloc_extend call 2, batch row 0"),
        ((9, 10), "expected new slots only, got slot 9 a second time: alloc_extend call 1, batch row 0"),
        ((16, 18), "expected slots of pages 1 to 6, from each page's start without gaps, got slot 18"),
        ((0, 1), "expected slots of pages 1 to 6, from each page's start without gaps, got slot 0"),
        ((28, 29), "expected slots of pages 1 to 6, from each page's start without gaps, got slot 28"),
    ],
)
def test_a_wrong_slot_is_caught_before_it_is_handed_out(pool, monkeypatch, slots, message):
    pool.use_triton_kernels = False
    monkeypatch.setattr("kvproof.impl.paged.alloc_extend_reference", lambda *_: ids(*slots))
    refused(pool, f"alloc_extend call 2: {message}", lambda: extend(pool, (0, 2, -1)), StateError)
    monkeypatch.undo()
    assert extend(pool, (0, 2, -1)) == [16, 17]


def test_long_lists_in_messages_are_cut():
    ledger = Ledger(16, 2)
    ledger.begin_allocation("alloc", [1, 2], [])
    ledger.hand_out(list(range(16, 32)), None)
    with pytest.raises(
        AllocatorError, match=r"whose slots 17, 18, 19, 20, 21, 22, 23, 24 and 7 more are live: alloc"
    ):
        ledger.release_slots("free", [16], repeats=True)
