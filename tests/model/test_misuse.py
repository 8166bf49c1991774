"""Each misuse, made concrete in a state worked out by hand, and where a state has nothing to misuse."""

from __future__ import annotations

import pytest

from kvproof.model import calls, ops
from kvproof.model.base import AllocatorModel, Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.ops import MISUSES
from tests.model.strategies import fresh, lists, new, outcomes, rows, sides


def used_paged() -> AllocatorModel:
    """Four pages of 4. Row A: 6 tokens on pages 1, 2, last slot 9. Page 3 is B's, page 4 is free."""
    model = fresh(4, 4)
    model.apply(new(6, 3))
    return model


PAGED = {
    # One page of the free list, all of its slots.
    "double-free": calls.FreeCall([16, 17, 18, 19]),
    # A's first slot, whose page holds three more.
    "free-part-of-live-page": calls.FreeCall([4]),
    "free-padding-page": calls.FreeCall([0]),
    # Pages are 1 … 4, so page 5 is not of the pool: slot 20.
    "free-out-of-range": calls.FreeCall([20]),
    "free-pages-twice": calls.FreePageIdsCall([2, 2]),
    "unaligned-alloc": calls.AllocCall(5),
    "negative-alloc": calls.AllocCall(-4),
    "end-without-begin": calls.GroupEndCall(),
    "unaligned-segment": calls.FreeSegmentCall([5, 6, 7, 8, 9], 1),
    "segments-share-page": calls.FreeSegmentsCall([([4, 5, 6, 7], 0), ([4, 5, 6, 7], 0)]),
    # (9 + 1) % 4 = 6 % 4 is right; 8 is one off.
    "incongruent-last-loc": calls.ExtendCall([6], [7], [8], 1, 0),
}

SHARED = {
    kind: PAGED[kind]
    for kind in (
        "double-free",
        "free-part-of-live-page",
        "free-padding-page",
        "free-out-of-range",
        "end-without-begin",
        "unaligned-segment",
        "segments-share-page",
        "incongruent-last-loc",
    )
}
"""Of every kind of which the paged state above looks the same from outside."""
TAIL = {"tail-too-long": calls.ExtendCall([0], [1], [-1], 1, 1, tail=2)}
# A's last page is the second: its slots 8 and 9.
SWA = SHARED | TAIL | {"free-full-of-mapped": calls.FreeCall([8, 9], "free_full")}
HISPARSE = SHARED | {"unaligned-buffer": calls.BufferCall([4, 5, 6, 7, 8, 9], 5)}
del HISPARSE["end-without-begin"]  # groups are no-ops there
# Pages of one slot a block: A's 6 tokens are one complete block, of its page 1. A device page is one slot.
V4 = SWA

TOKEN = {
    "double-free": calls.FreeCall([4]),
    "free-padding-page": calls.FreeCall([0]),
    "free-out-of-range": calls.FreeCall([5]),
    "free-pages-twice": calls.FreePageIdsCall([2, 2]),
    "negative-alloc": calls.AllocCall(-1),
    "end-without-begin": calls.GroupEndCall(),
    "segments-share-page": calls.FreeSegmentsCall([([1], 0), ([1], 0)]),
    "paged-call": calls.ExtendCall([0], [1], [-1], 1, 1),
}
PURE = {kind: call for kind, call in TOKEN.items() if kind != "free-pages-twice"} | {
    "mapping-edit": calls.RemapCall([1], [1], [1])
}
MAMBA = {
    kind: TOKEN[kind] for kind in ("double-free", "free-padding-page", "free-out-of-range", "negative-alloc")
}

# Pages 2, 4, 6 are of class 0, pages 3, 5, 7 of class 1. A is on pages 2 and 3, B on 4.
SHARDS = {
    "double-free": calls.FreeCall([24, 25, 26, 27]),
    "free-part-of-live-page": calls.FreeCall([8]),
    "free-padding-page": calls.FreeCall([0]),
    "free-out-of-range": calls.FreeCall([32]),
    "end-without-begin": calls.GroupEndCall(),
    "unaligned-segment": calls.FreeSegmentCall([9, 10, 11, 12, 13], 1),
    "segments-share-page": calls.FreeSegmentsCall([([8, 9, 10, 11], 0), ([8, 9, 10, 11], 0)]),
    "unaligned-prefix": calls.ExtendCall([6], [7], [13], 1, 0, bases=[0]),
}

STATES = {
    "paged": (Config("paged", 16, 4), new(6, 3), PAGED),
    "token": (Config("token", 4, 1), new(2, 1), TOKEN),
    "swa": (Config("swa", 16, 4, swa_size=16), new(6, 3), SWA),
    "swa-ring": (Config("swa-ring", 16, 4, ring=5, request_rows=1), new(6, 3), SHARED | TAIL),
    "pure-swa": (Config("pure-swa", 4, 1), new(2, 1), PURE),
    "hisparse": (Config("hisparse", 16, 4, ratio=1), new(6, 3), HISPARSE),
    "hisparse-v4": (Config("hisparse-v4", 16, 4, swa_size=16, device_size=4), new(6, 3), V4),
    "mamba": (Config("mamba", 4, 1), ops.Alloc(3), MAMBA),
    "page-interleave": (Config("page-interleave", 12, 4, shards=2), new(6, 3), SHARDS),
}
"""A pool of each kind, what brings it to a state where A and B live, and every misuse that it then offers."""


def fields(call: calls.Call) -> tuple[object, ...]:
    return type(call), *(getattr(call, name) for name in type(call).__slots__)


@pytest.mark.parametrize("kind", MISUSES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_call_is_the_forbidden_one_and_must_be_refused(allocator, kind):
    config, op, known = STATES[allocator]
    model = model_for(config)
    model.apply(op)
    before = lists(model), sides(model), rows(model), model.available
    expectation = model.apply(ops.Misuse(kind))
    if kind in known:
        assert expectation.outcome is Outcome.REFUSED
        assert fields(expectation.call) == fields(known[kind])
    else:
        assert expectation.outcome is Outcome.NOTHING
    assert (lists(model), sides(model), rows(model), model.available) == before
    assert expectation.available == model.available


def test_every_misuse_is_possible_somewhere():
    possible = {kind for _, _, known in STATES.values() for kind in known}
    # These need a group, or a row without peers: below.
    assert possible == {*MISUSES} - {"nested-begin", "free-swa-of-unmapped"}


def test_a_row_that_has_lost_its_peers_has_none_to_free():
    model = model_for(Config("swa", 32, 4, swa_size=32))
    outcomes(model, new(6, 3), ops.FreeSwa(0))
    unmapped, mapped = ops.Misuse("free-swa-of-unmapped"), ops.Misuse("free-full-of-mapped")
    call = model.apply(unmapped).call
    assert fields(call) == fields(calls.FreeSegmentCall([4, 5, 6, 7, 8, 9], 0, "free_swa_segment"))
    assert outcomes(model, mapped, ops.Misuse("free-full-of-mapped", 1)) == ["no call", "refused"]
    # Half a row is enough for the one, and not for the other.
    outcomes(model, new(8), ops.FreeSwa(2, 0, 4))
    assert outcomes(model, ops.Misuse("free-swa-of-unmapped", 2)) == ["no call"]


def test_a_buffer_of_compressed_slots_is_asked_for_by_them():
    """11 tokens on pages 1 and 2 of eight are two blocks: compressed slots 2 and 3 of page 1."""
    model = model_for(Config("hisparse-v4", 64, 8, swa_size=64, device_size=16))
    model.apply(new(11))
    call = model.apply(ops.Misuse("unaligned-buffer")).call
    assert fields(call) == fields(calls.BufferCall([2, 3], 3))


def test_only_a_second_begin_needs_an_open_group():
    model = fresh(2, 4)
    nested, end = ops.Misuse("nested-begin"), ops.Misuse("end-without-begin")
    assert outcomes(model, nested, end, ops.GroupBegin(), nested, end, ops.GroupEnd(), nested, end) == [
        "no call",
        "refused",
        "done",
        "refused",
        "no call",
        "done",
        "no call",
        "refused",
    ]


@pytest.mark.parametrize(
    "kind",
    sorted({*MISUSES} - {"free-padding-page", "free-out-of-range", "negative-alloc", "end-without-begin"}),
)
def test_without_rows_and_free_pages_there_is_nothing_to_misuse(kind):
    model = fresh(1, 4)
    # One deferred page: nothing free, nobody live, a group open (so that a begin would be possible).
    outcomes(model, new(2), ops.GroupBegin(), ops.Free((0,)))
    assert outcomes(model, ops.Misuse(kind)) == ["refused" if kind == "nested-begin" else "no call"]


def test_the_row_is_an_ordinal_and_a_page_of_the_list_for_a_double_free():
    model = used_paged()
    call = model.apply(ops.Misuse("unaligned-segment", 3)).call  # 3 modulo 2 rows: B on page 3
    assert isinstance(call, calls.FreeSegmentCall)
    assert call.slots == [13, 14]
    model.apply(ops.Free((0,)))  # the list is [1, 2, 4]
    call = model.apply(ops.Misuse("double-free", 4)).call  # 4 modulo 3: the second
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [8, 9, 10, 11]


def test_a_staged_page_is_freed_again_where_the_list_is_empty():
    model = fresh(1, 4, need_sort=True)
    outcomes(model, new(2), ops.Free((0,)))
    call = model.apply(ops.Misuse("double-free")).call
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [4, 5, 6, 7]


def test_a_full_row_with_a_wrong_last_loc_is_right_in_all_else():
    model = fresh(3, 4)
    model.apply(new(4))
    # The row's page 1 ends with slot 7; the fifth token takes one page.
    call = model.apply(ops.Misuse("incongruent-last-loc")).call
    assert fields(call) == fields(calls.ExtendCall([4], [5], [6], 1, 1))


def test_a_window_has_its_own_range():
    # Window pages are 101 and 102: 103 is not of it, slot 412.
    call = fresh(2, 4, page_offset=100).apply(ops.Misuse("free-out-of-range")).call
    assert isinstance(call, calls.FreeCall)
    assert call.slots == [412]
