"""Each mark, reached by the op that must reach it and by none before; marks per allocator."""

from __future__ import annotations

import pytest

from kvproof.model import ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.marks import Mark, reachable
from tests.model.strategies import new

POOL = Config("paged", 16, 4)  # 4 pages
SORTED = Config("paged", 16, 4, need_sort=True)
# A window of 4 pages around 2**31: pages 2**29 - 1 … 2**29 + 2; slots of page 2**29 on need 32 bits.
WINDOW = Config("paged", 16, 4, page_offset=(1 << 29) - 2)
HELD = (new(4), ops.GroupBegin(), ops.Free((0,)))
WIDE = Config("paged", 2400, 4)
SWA = Config("swa", 32, 4, swa_size=32)  # 8 pages on either side
HISPARSE = Config("hisparse", 16, 4, ratio=2)  # 8 logical pages, 4 device pages
MAMBA = Config("mamba", 8, 1)
SHARDS = Config("page-interleave", 4, 4, shards=2)  # one page in each class

CASES = [
    (Mark.EXACT_EXHAUSTION, POOL, (new(12), new(1))),
    (Mark.ONE_SHORT, POOL, (new(12), new(5))),
    (Mark.REFUSAL, POOL, (new(16), new(9))),
    (Mark.EMPTY_BATCH, POOL, (new(1), ops.Extend(()))),
    (Mark.EMPTY_BATCH, POOL, (new(0), ops.Decode((0,)))),
    (Mark.ZERO_ROW, POOL, (new(3), ops.Extend(((0, 0),)))),
    (Mark.INSIDE_PAGE, POOL, (new(1), ops.Extend(((0, 2),)))),
    (Mark.OLD_PAGE_FILLED, POOL, (new(1), ops.Extend(((0, 3),)))),
    (Mark.THREE_PARTS, POOL, (new(3), ops.Extend(((0, 6),)))),  # 3 → 4 → 8 → 9
    (Mark.WHOLE_PAGES, POOL, (new(3), new(4))),
    (Mark.DECODE_INSIDE_PAGE, POOL, (new(3), ops.Decode((0,)))),
    (Mark.DECODE_NEW_PAGE, POOL, (new(4), ops.Decode((0,)))),
    (Mark.DECODE_MIXED, POOL, (new(4, 3), ops.Decode((0, 1)))),
    (Mark.WIDE_EXTEND, WIDE, (new(*[1] * 256), new(*[1] * 257))),
    (Mark.WIDE_DECODE, WIDE, (new(*[1] * 257), ops.Decode(tuple(range(256))), ops.Decode(tuple(range(257))))),
    (Mark.LONG_ROW, WIDE, (new(1024), new(1025))),
    (Mark.RECYCLED, POOL, (new(4), ops.Free((0,)), new(4))),
    (Mark.TAIL_FREE, POOL, (new(8), ops.Free((0,), 4))),
    (Mark.PARTLY_USED_PAGE_FREE, POOL, (new(3), ops.FreePages(0))),
    (Mark.MANY_ROW_FREE, POOL, (new(4, 4), ops.Free((0, 1)))),
    (Mark.STAGED_MERGE, SORTED, (new(4), ops.Free((0,)), ops.Alloc(4))),
    (Mark.REFUSAL_AFTER_MERGE, SORTED, (new(4), ops.Free((0,)), ops.Alloc(5))),
    (Mark.FREE_IN_GROUP, POOL, HELD),
    (Mark.GROUP_OF_BOTH, POOL, (new(4, 4), *HELD[1:], ops.FreePages(0), ops.GroupEnd())),
    (Mark.ALLOC_IN_GROUP, POOL, (*HELD, new(1))),
    (Mark.CLOBBER_DEFERRED, POOL, (*HELD, ops.Clobber())),
    (Mark.CLEAR_IN_GROUP, POOL, (*HELD, ops.Clear())),
    (Mark.GROWN, POOL, (ops.Resize(5),)),
    (Mark.SHRUNK, POOL, (ops.Resize(3),)),
    (Mark.BEYOND_31_BITS, WINDOW, (new(4), new(4))),
    # Two pages are needed: one full page and two of the other side, or the reverse.
    (Mark.SHORT_ON_MAIN, Config("swa", 4, 4, swa_size=8), (new(0), new(5))),
    (Mark.SHORT_ON_SIDE, Config("swa", 8, 4, swa_size=4), (new(0), new(5))),
    (Mark.SIDE_EXHAUSTED, Config("swa", 12, 4, swa_size=8), (new(4), new(4))),
    # Page 1 of the other side comes back to its front; page 1 of the full side is still in use.
    (Mark.RECYCLED_ON_SIDE, SWA, (new(4), ops.FreeSwa(0), new(4))),
    (Mark.FREED_ON_SIDE, SWA, (new(4), ops.FreeSwa(0))),
    (Mark.FREED_ON_SIDE, HISPARSE, (new(4), ops.FreeDevice(0))),
    (Mark.PART_OF_PAGE, SWA, (new(8), ops.FreeSwa(0, 0, 1))),
    (Mark.FULL_ALONE, SWA, (new(4), ops.FreeSwa(0), ops.FreeFull(0))),
    (Mark.FULL_ALONE, SWA, (new(4), ops.FreeSwa(0), ops.FreeFullSegment(0))),
    (Mark.TAIL_ONLY, SWA, (ops.ExtendTail(-1, 4, 0), ops.ExtendTail(-1, 8, 4))),
    (Mark.NO_TAIL, SWA, (ops.ExtendTail(-1, 8, 4), ops.ExtendTail(-1, 8, 0))),
    (Mark.REMAPPED, SWA, (new(4, 4), ops.FreeSwa(0), ops.Remap(0, 1))),
    (Mark.REMAP_IN_GROUP, SWA, (new(4, 4), ops.GroupBegin(), ops.FreeSwa(0), ops.Remap(0, 1))),
    (Mark.LOGICAL_ONLY, HISPARSE, (new(4), ops.ExtendLogical(((-1, 4),)))),
    (Mark.BUFFER_SURPLUS, HISPARSE, (new(8), ops.DeviceBuffer(0, 1))),
    # 5 tokens are on two device pages, the second of which holds one.
    (Mark.BUFFER_COMPLETED, HISPARSE, (new(5), ops.DeviceBuffer(0, 2))),
    (Mark.BUFFER_GROWN, HISPARSE, (new(4), ops.DeviceBuffer(0, 2))),
    (Mark.BUFFER_REFUSED, HISPARSE, (new(4), ops.DeviceBuffer(0, 5))),
    (Mark.SERVED_FROM_ASIDE, MAMBA, (ops.AllocGroupBegin(2), ops.Alloc(1))),
    (Mark.ASIDE_RETURNED, MAMBA, (ops.AllocGroupBegin(2), ops.AllocGroupEnd())),
    (Mark.ASIDE_REFUSED, MAMBA, (ops.AllocGroupBegin(8), ops.AllocGroupBegin(9))),
    (Mark.ASIDE_TWICE, MAMBA, (ops.AllocGroupBegin(2), ops.AllocGroupBegin(1))),
    (Mark.BASE_DRAWN, SHARDS, (ops.Chain(0, 4), new(4))),
    (Mark.BASE_TIED, SHARDS, (ops.Chain(0, 0), new(4))),
    # Class 0 has no page left, class 1 has one.
    (Mark.CLASS_SHORT, SHARDS, (ops.Chain(0, 4), ops.Chain(0, 4))),
]


@pytest.mark.parametrize(("mark", "config", "trace"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_the_last_op_reaches_the_mark_and_none_before(mark, config, trace):
    model = model_for(config)
    for op in trace[:-1]:
        model.apply(op)
    assert model.marks[mark] == 0
    model.apply(trace[-1])
    assert model.marks[mark] == 1


def test_every_mark_has_a_case():
    assert {mark for mark, *_ in CASES} == set(Mark)


@pytest.mark.parametrize(
    ("mark", "config", "trace"),
    [
        (Mark.EXACT_EXHAUSTION, POOL, (new(11), ops.Alloc(0))),
        (Mark.ONE_SHORT, POOL, (new(12), new(9))),  # needs 3 pages of 1: two short
        (Mark.THREE_PARTS, POOL, (new(3), ops.Extend(((0, 5),)))),  # 3 → 4 → 8: no page is started
        (Mark.THREE_PARTS, POOL, (new(3), ops.Extend(((0, 2),)))),  # 3 → 4 → 5: no whole page
        (Mark.WIDE_EXTEND, WIDE, (new(*[1] * 256),)),
        (Mark.WIDE_DECODE, WIDE, (new(*[1] * 257), ops.Decode(tuple(range(256))))),
        (Mark.LONG_ROW, WIDE, (new(1024),)),
        (Mark.RECYCLED, POOL, (new(4), ops.Free((0,)), ops.Clear(), new(4))),
        (Mark.TAIL_FREE, POOL, (new(8), ops.Free((0,)))),
        (Mark.MANY_ROW_FREE, POOL, (new(4, 4), ops.Free((0, 2)))),  # the same row twice
        (Mark.REFUSAL_AFTER_MERGE, SORTED, (ops.Alloc(5),)),
        (Mark.ALLOC_IN_GROUP, POOL, (ops.GroupBegin(), new(1))),  # nothing is deferred
        (Mark.CLEAR_IN_GROUP, POOL, (ops.GroupBegin(), ops.Clear())),
        (Mark.GROWN, POOL, (ops.Resize(4, 3),)),
        (Mark.SHORT_ON_MAIN, Config("swa", 4, 4, swa_size=4), (new(5),)),  # both are short
        (Mark.SHORT_ON_SIDE, Config("swa", 4, 4, swa_size=4), (new(5),)),
        (Mark.SIDE_EXHAUSTED, Config("swa", 8, 4, swa_size=4), (ops.ExtendTail(-1, 8, 0),)),
        (Mark.RECYCLED_ON_SIDE, SWA, (new(4), ops.FreeSwa(0), ops.ExtendTail(-1, 4, 0))),
        (Mark.FREED_ON_SIDE, SWA, (ops.ExtendTail(-1, 0, 0), ops.FreeSwa(0))),  # nothing is released
        (Mark.PART_OF_PAGE, SWA, (new(8), ops.FreeSwa(0, 4))),  # one whole page
        (Mark.PART_OF_PAGE, SWA, (new(6), ops.FreeSwa(0, 4))),  # to the row's end
        (Mark.FULL_ALONE, SWA, (new(4), ops.FreeFull(0))),  # still has peers
        (Mark.TAIL_ONLY, SWA, (ops.ExtendTail(-1, 4, 4),)),  # the tail is all there is
        (Mark.NO_TAIL, SWA, (ops.ExtendTail(-1, 0, 0),)),
        (Mark.REMAPPED, SWA, (new(4, 4), ops.Remap(0, 1))),  # has its own
        (Mark.REMAP_IN_GROUP, SWA, (new(4, 4), ops.FreeSwa(0), ops.GroupBegin(), ops.Remap(0, 1))),
        (Mark.LOGICAL_ONLY, HISPARSE, (ops.ExtendLogical(()),)),
        (Mark.BUFFER_COMPLETED, HISPARSE, (new(4), ops.DeviceBuffer(0, 1))),
        (Mark.BUFFER_GROWN, HISPARSE, (ops.ExtendLogical(((-1, 4),)), ops.DeviceBuffer(0, 1))),  # all new
        (Mark.SERVED_FROM_ASIDE, MAMBA, (ops.AllocGroupBegin(2), ops.Alloc(2))),
        (Mark.ASIDE_RETURNED, MAMBA, (ops.AllocGroupBegin(1), ops.Alloc(1), ops.AllocGroupEnd())),
        (Mark.ASIDE_TWICE, MAMBA, (ops.AllocGroupBegin(9), ops.AllocGroupBegin(1))),
        (Mark.BASE_DRAWN, SHARDS, (ops.Chain(1, 4), ops.Extend(((0, 0),)))),
        (Mark.BASE_TIED, SHARDS, (ops.Chain(1, 4), new(4))),  # class 0 has one more
        (Mark.CLASS_SHORT, SHARDS, (ops.Chain(0, 12),)),  # both are short
        (Mark.BEYOND_31_BITS, WINDOW, (new(4),)),  # page 2**29 - 1 ends with slot 2**31 - 1
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_comes_close_does_not_count(mark, config, trace):
    model = model_for(config)
    for op in trace:
        model.apply(op)
    assert model.marks[mark] == 0


def test_what_each_allocator_can_reach():
    """A mark is within reach of the kind that its case is made for; the paged kind's are of one pool."""
    cases = {kind: {mark for mark, config, _ in CASES if config.allocator == kind} for kind in ALLOCATORS}
    for kind in ALLOCATORS:
        assert cases[kind] <= reachable(kind) <= set(Mark)
    assert reachable("paged") == cases["paged"]
    one_pool = cases["paged"] - {Mark.BEYOND_31_BITS}
    # Whether pages suffice is decided before anything is merged; other marks say on which side they did not.
    assert reachable("swa") == one_pool - {Mark.ONE_SHORT, Mark.REFUSAL_AFTER_MERGE} | cases["swa"]
    assert reachable("swa-ring") == one_pool - {Mark.GROWN, Mark.SHRUNK}
    assert reachable("token") == reachable("pure-swa") | {Mark.GROWN, Mark.SHRUNK, Mark.BEYOND_31_BITS}
    assert not reachable("pure-swa") & {Mark.INSIDE_PAGE, Mark.GROUP_OF_BOTH, Mark.DECODE_MIXED}
    assert cases["mamba"] < reachable("mamba")
