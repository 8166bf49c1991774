"""Floors: no work is never green, and a long campaign must have been everywhere.

That a hostile caller does get everywhere within `MARK_FLOOR_OPS` is measured here for the lane that reaches
it soonest; the bound is the harness's own, not the contract's.
"""

from __future__ import annotations

from collections import Counter

import pytest

from kvproof.ci.floors import MARK_FLOOR_OPS, shortfalls
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Ticket
from kvproof.model.config import ALLOCATORS
from kvproof.model.marks import Mark, reachable
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.space import space_for

NOTHING: frozenset[str] = frozenset()


def reached(allocator: str, ops: int, *but: Mark) -> dict[str, Counter[str]]:
    """So many ops that reached every mark of the allocator but these."""
    marks = Counter({mark.name: 1 for mark in reachable(allocator) if mark not in but})
    marks["checked"] = ops
    return {allocator: marks}


@pytest.mark.parametrize("by_allocator", [{}, reached("paged", 0)])
def test_no_work_is_never_believed(by_allocator):
    assert shortfalls(0, by_allocator, NOTHING, True) == ["no op was checked"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_everything_reached_is_enough(allocator):
    assert shortfalls(MARK_FLOOR_OPS, reached(allocator, MARK_FLOOR_OPS), NOTHING, True) == []


def test_a_mark_that_is_due_is_missed_from_the_floor_on():
    here = reached("paged", MARK_FLOOR_OPS, Mark.STAGED_MERGE, Mark.REFUSAL)
    assert shortfalls(MARK_FLOOR_OPS, here, NOTHING, True) == [
        f"paged: {MARK_FLOOR_OPS} ops never reached REFUSAL, STAGED_MERGE"
    ]
    below = reached("paged", MARK_FLOOR_OPS - 1, Mark.REFUSAL)
    assert shortfalls(MARK_FLOOR_OPS - 1, below, NOTHING, True) == []


def test_each_allocator_is_held_to_its_own_ops():
    both = reached("paged", 1, Mark.REFUSAL) | reached("token", MARK_FLOOR_OPS, Mark.REFUSAL)
    assert shortfalls(MARK_FLOOR_OPS + 1, both, NOTHING, True) == [
        f"token: {MARK_FLOOR_OPS} ops never reached REFUSAL"
    ]


@pytest.mark.parametrize(
    ("lacks", "page_offset", "marks"),
    [
        ({"Resize"}, True, (Mark.GROWN, Mark.SHRUNK)),
        ({"FreePages"}, True, (Mark.GROUP_OF_BOTH,)),
        (set(), False, (Mark.BEYOND_31_BITS,)),
    ],
)
def test_what_a_target_cannot_be_asked_is_not_due(lacks, page_offset, marks):
    here = reached("paged", MARK_FLOOR_OPS, *marks)
    assert shortfalls(MARK_FLOOR_OPS, here, frozenset(lacks), page_offset) == []
    assert len(shortfalls(MARK_FLOOR_OPS, here, NOTHING, True)) == 1


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("slow", [False, True])
def test_a_hostile_caller_reaches_every_mark_below_the_floor(allocator, slow):
    target = Null(Ticket())
    space = space_for(target.capabilities, allocator, slow=slow)
    marks: Counter[str] = Counter()
    number = 0
    while marks["checked"] < MARK_FLOOR_OPS // 2:
        verdict = run_lease(target, Lease(number, 11, "null", "seeded", space, 4000))
        marks.update({mark.name: count for mark, count in verdict.marks.items()})
        marks["checked"] += verdict.tally.checked
        number += 1
    assert {mark.name for mark in reachable(allocator)} <= set(marks)
