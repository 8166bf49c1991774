"""The sliding-window model against section 5 of the contract, in examples worked out from its text.

Page k holds slots 4k … 4k+3 on either side. Full pages are handed out from the front of the full list, swa
pages from the front of theirs; the mapping leads from full slots to swa slots, 0 is unmapped.
"""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from tests.model.strategies import fresh, lists, mapped, new, outcome, outcomes, rows, sides


def pool(full: int = 8, swa: int = 6, **options):
    return fresh(full, 4, "swa", swa_size=4 * swa, **options)


def swa_list(model) -> list[int]:
    """The swa free list; nothing is staged."""
    (free, staged) = sides(model)["swa"]
    assert staged == []
    return free


# --- beginnings -----------------------------------------------------------------------------------


def test_a_fresh_pool_has_both_lists_and_a_mapping_of_nothing():
    model = pool()
    assert (lists(model)[0], swa_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6])
    # size + page_size + 1 = 32 + 4 + 1 entries, the last one -1.
    assert model.mappings["swa"] == [0] * 36 + [-1]
    assert (model.available, model.sizes) == (24, {"full": 32, "swa": 24})


def test_a_remainder_of_either_size_is_unusable_and_has_entries_all_the_same():
    model = model_for(Config("swa", 11, 4, swa_size=7))
    assert (lists(model)[0], swa_list(model)) == ([1, 2], [1])
    assert len(model.mappings["swa"]) == 11 + 4 + 1


# --- allocation -----------------------------------------------------------------------------------


def test_an_extend_takes_from_both_sides_and_maps_one_to_one():
    model = pool()
    expectation = model.apply(new(6, 1))
    assert expectation.slots == [4, 5, 6, 7, 8, 9, 12]
    assert expectation.peers == {"swa": [4, 5, 6, 7, 8, 9, 12]}
    assert mapped(model) == {4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9, 12: 12}
    assert (lists(model)[0], swa_list(model)) == ([4, 5, 6, 7, 8], [4, 5, 6])
    assert (model.available, model.sizes) == (12, {"full": 20, "swa": 12})


def apart():
    """A: full page 1, no peers. B: full pages 2 and 3, swa pages 1 and 2, five tokens."""
    model = pool()
    outcomes(model, new(4), ops.FreeSwa(0), new(5))
    assert mapped(model) == {8: 4, 9: 5, 10: 6, 11: 7, 12: 8}
    return model


def test_a_row_goes_on_behind_its_last_peer():
    model = apart()
    expectation = model.apply(ops.Extend(((1, 2),)))
    assert (expectation.slots, expectation.peers) == ([13, 14], {"swa": [9, 10]})
    expectation = model.apply(ops.Decode((1,)))
    assert (expectation.slots, expectation.peers) == ([15], {"swa": [11]})
    # Both pages are full: full page 4, swa page 3.
    expectation = model.apply(ops.Decode((1,)))
    assert (expectation.slots, expectation.peers) == ([16], {"swa": [12]})


def test_a_row_that_has_lost_its_last_peer_does_not_go_on():
    model = apart()
    expectation = model.apply(ops.Extend(((0, 1), (1, 1))))
    assert isinstance(expectation.call, calls.ExtendCall)
    assert (expectation.call.prefix_lens, expectation.slots) == ([5], [13])
    assert outcomes(model, ops.Decode((0,)), ops.Extend(((0, 4),))) == [[], []]


@pytest.mark.parametrize(("full", "swa"), [(8, 1), (1, 6), (1, 1)])
def test_both_sides_or_neither(full, swa):
    model = pool(full, swa)
    assert outcomes(model, new(5)) == ["None"]
    assert (lists(model)[0], swa_list(model)) == ([*range(1, full + 1)], [*range(1, swa + 1)])
    assert (mapped(model), model.rows, model.available) == ({}, [], 4 * min(full, swa))


def test_a_decode_that_the_swa_side_is_too_short_for_takes_no_full_page():
    model = pool(2, 1)
    assert outcomes(model, new(4), ops.Decode((0,))) == [[4, 5, 6, 7], "None"]
    assert (lists(model)[0], swa_list(model)) == ([2], [])


def test_a_refusal_merges_nothing():
    model = pool(2, 2, need_sort=True)
    outcomes(model, new(4, 4), ops.Free((1,)))
    assert (lists(model), sides(model)) == (([], [2]), {"swa": ([], [2])})
    assert outcome(model, new(8)) == "None"
    assert (lists(model), sides(model)) == (([], [2]), {"swa": ([], [2])})
    assert outcome(model, new(1)) == [8]


def test_each_side_merges_when_its_own_list_may_be_too_short():
    model = pool(8, 4, need_sort=True)
    outcomes(model, new(4, 4), ops.FreeSwa(0))
    assert (lists(model), sides(model)) == (([3, 4, 5, 6, 7, 8], []), {"swa": ([3, 4], [1])})
    # 1 token, 1 row: 1 // 4 + 1 + 1 = 2 > 2 does not hold.
    assert model.apply(new(1)).peers == {"swa": [12]}
    assert sides(model) == {"swa": ([4], [1])}
    # 2 > 1 does: sorted([4] + [1]).
    assert model.apply(new(1)).peers == {"swa": [4]}
    assert (lists(model), sides(model)) == (([5, 6, 7, 8], []), {"swa": ([4], [])})


# --- a tail alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "told", "peers", "left"),
    [
        # 10 tokens on full pages 1 … 3. The last 6 begin at position 4, a page of the row: two swa pages.
        (6, 6, [0, 0, 0, 0, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6]),
        # The last 5 would begin at position 5: cut to those from position 8 on.
        (5, 2, [0] * 8 + [4, 5], [2, 3, 4, 5, 6]),
        (1, 0, [0] * 10, [1, 2, 3, 4, 5, 6]),  # from 9: none begins a page there
        (0, 0, [0] * 10, [1, 2, 3, 4, 5, 6]),
        (10, 10, [*range(4, 14)], [4, 5, 6]),
        (11, 0, [0] * 10, [1, 2, 3, 4, 5, 6]),  # modulo 11
    ],
)
def test_only_the_tail_has_peers(tail, told, peers, left):
    model = pool()
    expectation = model.apply(ops.ExtendTail(-1, 10, tail))
    assert isinstance(expectation.call, calls.ExtendCall)
    assert (expectation.call.tail, expectation.call.tokens, expectation.call.pages) == (told, 10, 3)
    assert (expectation.slots, expectation.peers) == ([*range(4, 14)], {"swa": peers})
    assert (lists(model)[0], swa_list(model)) == ([4, 5, 6, 7, 8], left)
    assert mapped(model) == {slot: peer for slot, peer in zip(range(4, 14), peers, strict=True) if peer}


def test_a_tail_needs_swa_pages_for_itself_alone():
    model = pool(8, 1)
    assert outcomes(model, ops.ExtendTail(-1, 12, 8), ops.ExtendTail(-1, 12, 4)) == ["None", [*range(4, 16)]]
    assert swa_list(model) == []


def test_a_row_that_lost_its_peers_goes_on_with_a_tail():
    model = pool()
    outcomes(model, new(4), ops.FreeSwa(0))
    expectation = model.apply(ops.ExtendTail(0, 8, 4))
    assert (expectation.slots, expectation.peers) == ([*range(8, 16)], {"swa": [0, 0, 0, 0, 4, 5, 6, 7]})
    assert model.apply(ops.Decode((0,))).peers == {"swa": [8]}


def test_stale_head():
    """From the field: a head on recycled pages keeps nothing of their earlier life."""
    model = pool(4, 4)
    # A is freed page by page: page 2 and then page 1, on both sides.
    outcomes(model, new(8), ops.Free((0,), 4), ops.Free((0,)))
    assert (lists(model)[0], swa_list(model), mapped(model)) == ([1, 2, 3, 4], [1, 2, 3, 4], {})
    model.apply(ops.ExtendTail(-1, 12, 4))  # C: full pages 1 … 3, swa page 1 for the last of them
    assert mapped(model) == {12: 4, 13: 5, 14: 6, 15: 7}
    model.apply(new(4))  # D: full page 4, swa page 2
    model.apply(ops.Free((0,)))
    assert (lists(model)[0], swa_list(model)) == ([1, 2, 3], [1, 3, 4])
    assert mapped(model) == {16: 8, 17: 9, 18: 10, 19: 11}


# --- release --------------------------------------------------------------------------------------


def test_free_releases_both_sides_each_page_once_ascending():
    model = apart()
    call = model.apply(ops.Free((1, 0), order=ops.TWICE)).call
    assert isinstance(call, calls.FreeCall)
    assert (call.method, call.slots) == ("free", [8, 9, 10, 11, 12, 4, 5, 6, 7] * 2)
    # Full pages 1, 2, 3; swa pages 1 and 2, those of B.
    assert (lists(model)[0], swa_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6])
    assert mapped(model) == {}


def test_the_tail_of_a_row_takes_its_peers_along():
    model = pool()
    outcomes(model, new(6), ops.Free((0,), 3))  # keeps page 1
    assert (rows(model), mapped(model)) == ([([1], 4)], {4: 4, 5: 5, 6: 6, 7: 7})
    assert (lists(model)[0], swa_list(model)) == ([2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6])


def test_free_swa_acts_on_whole_pages():
    model = pool()
    model.apply(new(8))
    call = model.apply(ops.FreeSwa(0, 0, 1)).call
    assert isinstance(call, calls.FreeCall)
    assert (call.method, call.slots) == ("free_swa", [4])
    assert (mapped(model), swa_list(model)) == ({8: 8, 9: 9, 10: 10, 11: 11}, [1, 3, 4, 5, 6])
    # The full side and the row are as they were.
    assert (lists(model)[0], rows(model)) == ([3, 4, 5, 6, 7, 8], [([1, 2], 8)])


def test_free_swa_ignores_what_has_no_peer():
    model = pool()
    outcomes(model, new(8), ops.FreeSwa(0, 0, 4))
    call = model.apply(ops.FreeSwa(0)).call
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [*range(4, 12)]
    assert (mapped(model), swa_list(model)) == ({}, [2, 1, 3, 4, 5, 6])


def test_token_granular_swa():
    """From the field: C's swa page is not released by free A, and D gets another."""
    model = pool()
    outcomes(model, new(8), ops.FreeSwa(0, 0, 1), new(4))  # C: full page 3, swa page 1
    assert mapped(model) == {8: 8, 9: 9, 10: 10, 11: 11, 12: 4, 13: 5, 14: 6, 15: 7}
    model.apply(ops.Free((0,)))
    assert (lists(model)[0], swa_list(model)) == ([1, 2, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6])
    assert model.apply(new(4)).peers == {"swa": [8, 9, 10, 11]}
    assert mapped(model) == {12: 4, 13: 5, 14: 6, 15: 7, 4: 8, 5: 9, 6: 10, 7: 11}


def crossed():
    """C's full pages are 3 and 4, its swa pages 2 and 1 in this order; the swa list is [3, 4, 5, 6]."""
    model = pool()
    # Freed one after the other, each goes to the front: [2, 1, 3, …].
    outcomes(model, new(4, 4), ops.FreeSwa(0), ops.FreeSwa(1), new(8))
    assert (rows(model)[2], mapped(model)[12], mapped(model)[16]) == (([3, 4], 8), 8, 4)
    return model


@pytest.mark.parametrize(
    ("op", "swa"),
    [
        (ops.FreeSwa(2), [1, 2, 3, 4, 5, 6]),
        (ops.FreeSwaSegment(2), [2, 1, 3, 4, 5, 6]),
        (ops.Free((2,)), [1, 2, 3, 4, 5, 6]),
        (ops.FreeSegment(2), [2, 1, 3, 4, 5, 6]),
        # Two releases: page 2 and then page 1 to the front.
        (ops.FreeSegments(2, 0, (1,)), [1, 2, 3, 4, 5, 6]),
        (ops.FreeSegments(2, 0, (2,)), [2, 1, 3, 4, 5, 6]),
    ],
)
def test_sets_return_ascending_and_segments_in_row_order(op, swa):
    model = crossed()
    assert outcome(model, op) == "done"
    assert (swa_list(model), mapped(model)) == (swa, {})


def test_a_segment_is_of_pages_that_have_peers():
    model = pool()
    outcomes(model, new(16), ops.FreeSwa(0, 0, 4), ops.FreeSwa(0, 8, 4))  # peers at pages 2 and 4
    call = model.apply(ops.FreeSwaSegment(0)).call
    assert isinstance(call, calls.FreeSegmentCall)
    assert (call.method, call.slots, call.start) == ("free_swa_segment", [8, 9, 10, 11], 4)
    # free_segment may release the last page alone: behind it nothing is bare.
    call = model.apply(ops.FreeSegment(0)).call
    assert isinstance(call, calls.FreeSegmentCall)
    assert (call.method, call.slots, call.start) == ("free_segment", [16, 17, 18, 19], 12)


def test_page_zero():
    """From the field: unmapped representatives are a caller error, so no lawful caller passes them."""
    model = pool()
    outcomes(model, new(8), ops.FreeSwa(0))
    assert outcomes(model, ops.FreeSwaSegment(0), ops.Misuse("free-swa-of-unmapped")) == [
        "no call",
        "refused",
    ]
    assert swa_list(model) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("op", "method"), [(ops.FreeFull(0), "free_full"), (ops.FreeFullSegment(0), "free_full_segment")]
)
def test_only_what_has_no_peer_is_freed_on_the_full_side_alone(op, method):
    model = pool()
    assert outcomes(model, new(8), op) == [[*range(4, 12)], "no call"]
    model.apply(ops.FreeSwa(0, 4))
    call = model.apply(op).call
    assert isinstance(call, calls.FreeCall | calls.FreeSegmentCall)
    assert (call.method, call.slots) == (method, [8, 9, 10, 11])
    assert (rows(model), lists(model)[0]) == ([([1], 4)], [2, 3, 4, 5, 6, 7, 8])
    assert swa_list(model) == [2, 3, 4, 5, 6]


# --- groups ---------------------------------------------------------------------------------------


def test_whose_peers_they_are_is_decided_at_the_call():
    model = pool()
    outcomes(model, new(4, 4), ops.GroupBegin(), ops.FreeSwa(0))
    assert (mapped(model), model.sides["swa"].deferred()) == ({8: 8, 9: 9, 10: 10, 11: 11}, [1])
    call = model.apply(ops.Remap(0, 1)).call  # A takes over B's page
    assert isinstance(call, calls.RemapCall)
    assert (call.full, call.swa, call.cleared) == ([4, 5, 6, 7], [8, 9, 10, 11], [8, 9, 10, 11])
    assert outcome(model, ops.GroupEnd()) == "done"
    assert (mapped(model), swa_list(model)) == ({4: 8, 5: 9, 6: 10, 7: 11}, [1, 3, 4, 5, 6])


def test_a_group_releases_on_either_side_sets_first_and_then_segments():
    model = pool()
    outcomes(model, new(4, 4, 4), ops.GroupBegin(), ops.FreeSwaSegment(2), ops.FreeSwa(0), ops.Free((1,)))
    assert (model.available, swa_list(model), lists(model)[0]) == (12, [4, 5, 6], [4, 5, 6, 7, 8])
    model.apply(ops.GroupEnd())
    # swa: {1, 2} as a set, then the segment's 3 before them. full: B's page 2.
    assert (swa_list(model), lists(model)[0]) == ([3, 1, 2, 4, 5, 6], [2, 4, 5, 6, 7, 8])


def test_clear_ends_a_group_and_forgets_the_mapping():
    model = pool()
    outcomes(model, new(4), ops.GroupBegin(), ops.Free((0,)), new(4), ops.Clear())
    assert (model.in_group, mapped(model), model.rows) == (False, {}, [])
    assert (lists(model)[0], swa_list(model)) == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6])


# --- the mapping ----------------------------------------------------------------------------------


def test_a_row_takes_over_as_many_peers_as_it_has_tokens():
    model = pool()
    outcomes(model, new(2, 4), ops.FreeSwa(0))
    call = model.apply(ops.Remap(0, 1)).call
    assert isinstance(call, calls.RemapCall)
    assert (call.full, call.swa, call.cleared) == ([4, 5], [8, 9], [8, 9, 10, 11])
    assert mapped(model) == {4: 8, 5: 9}
    # A's page is the swa page 2 now.
    model.apply(ops.Free((0,)))
    assert swa_list(model) == [2, 1, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("trace", "op"),
    [
        ((new(4, 4),), ops.Remap(0, 1)),  # has peers of its own
        ((new(4, 2), ops.FreeSwa(0)), ops.Remap(0, 1)),  # the donor has too few
        ((new(4, 4), ops.FreeSwa(0)), ops.Remap(0, 2)),  # itself, modulo 2
        ((new(4), ops.FreeSwa(0)), ops.Remap(0, 1)),  # nobody else
        ((new(4, 4), ops.FreeSwa(0), ops.FreeSwa(1)), ops.Remap(0, 1)),  # neither has any
    ],
)
def test_where_nothing_can_be_taken_over_there_is_no_call(trace, op):
    model = pool()
    outcomes(model, *trace)
    assert outcome(model, op) == "no call"


def test_pages_to_take_over_can_be_named():
    model = pool()
    outcomes(model, new(12, 12), ops.FreeSwa(0))
    call = model.apply(ops.Remap(0, 1, 1, 1)).call
    assert isinstance(call, calls.RemapCall)
    # The second page of each row: full page 2 and, of B on pages 4 … 6, page 5.
    assert (call.full, call.swa) == ([8, 9, 10, 11], [20, 21, 22, 23])


def test_resize_rebuilds_lists_and_mapping():
    model = pool()
    model.apply(new(4))
    call = model.apply(ops.Resize(9, 0, 5)).call
    assert isinstance(call, calls.ResizeCall)
    assert (call.size, call.side_size) == (36, 20)
    assert (lists(model)[0], swa_list(model)) == ([*range(1, 10)], [1, 2, 3, 4, 5])
    assert model.mappings["swa"] == [0] * 40 + [-1]
    call = model.apply(ops.Resize(2)).call  # the other side as it was
    assert isinstance(call, calls.ResizeCall)
    assert (call.size, call.side_size, len(model.mappings["swa"])) == (8, 20, 13)


def test_owners_are_told_of_each_side():
    model = apart()
    assert model.owners("swa") == {1: "row 1", 2: "row 1", 3: "free", 4: "free", 5: "free", 6: "free"}
    assert model.owners()[1] == "row 0"
    assert [model.peer_pages(row, "swa") for row in model.rows] == [[0], [1, 2]]


# --- pages of one slot ----------------------------------------------------------------------------


def test_pages_of_one_slot_are_two_token_pools():
    model = fresh(6, 1, "swa", swa_size=5)
    expectation = model.apply(new(2, 1))
    assert isinstance(expectation.call, calls.AllocCall)
    assert (expectation.call.need, expectation.slots, expectation.peers) == (3, [1, 2, 3], {"swa": [1, 2, 3]})
    assert (model.available, len(model.mappings["swa"])) == (2, 6 + 1 + 1)
    # Releases go to the end, as they are passed.
    model.apply(ops.Free((1, 0), order=ops.BACKWARDS))
    assert (lists(model)[0], swa_list(model)) == ([4, 5, 6, 2, 1, 3], [4, 5, 2, 1, 3])


def test_single_slots_lose_their_peers():
    model = fresh(6, 1, "swa", swa_size=5)
    model.apply(new(3))
    call = model.apply(ops.FreeSwa(0, 1, 1)).call
    assert isinstance(call, calls.FreeCall)
    assert (call.method, call.slots, mapped(model), swa_list(model)) == (
        "free_swa",
        [2],
        {1: 1, 3: 3},
        [4, 5, 2],
    )
    # To free an unmapped slot would be wrong: of the rest, only those that have a peer are passed, …
    call = model.apply(ops.FreeSwa(0)).call
    assert isinstance(call, calls.FreeCall)
    assert (call.slots, swa_list(model)) == ([1, 3], [4, 5, 2, 1, 3])
    # … and by a plain free none of them any more.
    call = model.apply(ops.Free((0,))).call
    assert isinstance(call, calls.FreeCall)
    assert (call.slots, rows(model)) == ([], [([1, 2, 3], 3)])
    assert outcomes(model, ops.FreeFull(0)) == ["done"]
    assert lists(model)[0] == [4, 5, 6, 1, 2, 3]


def test_pages_of_one_slot_know_no_tail():
    assert outcome(fresh(6, 1, "swa", swa_size=5), ops.ExtendTail(-1, 2, 1)) == "no call"
    assert outcome(pool(), ops.Alloc(1)) == "no call"


def test_both_token_pools_or_neither():
    model = fresh(6, 1, "swa", swa_size=2)
    assert outcomes(model, ops.Alloc(3), ops.Alloc(2)) == ["None", [1, 2]]
    assert (lists(model)[0], swa_list(model)) == ([3, 4, 5, 6], [])
