"""Each mark, reached by the op that must reach it and by none before; marks per allocator."""

from __future__ import annotations

import pytest

from kvproof.model import ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.model.marks import PAGED_ONLY, Mark, reachable
from tests.model.strategies import new

POOL = Config("paged", 16, 4)  # 4 pages
SORTED = Config("paged", 16, 4, need_sort=True)
# A window of 4 pages around 2**31: pages 2**29 - 1 … 2**29 + 2; slots of page 2**29 on need 32 bits.
WINDOW = Config("paged", 16, 4, page_offset=(1 << 29) - 2)
HELD = (new(4), ops.GroupBegin(), ops.Free((0,)))
WIDE = Config("paged", 2400, 4)

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
    assert reachable("paged") == frozenset(Mark)
    assert reachable("token") == frozenset(Mark) - PAGED_ONLY
