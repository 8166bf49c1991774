"""Floors: no work is never green, and a long campaign must have been everywhere.

That a hostile caller does get everywhere within `MARK_FLOOR_OPS` is measured here for the lane that reaches
it soonest; the bound is the harness's own, not the contract's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvproof.ci.floors import MARK_FLOOR_OPS, shortfalls
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Capabilities, Ticket
from kvproof.model.config import ALLOCATORS
from kvproof.model.marks import Mark, reachable
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.space import space_for

ABLE = Capabilities(ALLOCATORS)
"""Of a target that lacks nothing."""


def reached(allocator: str, ops: int, *but: Mark) -> dict[str, Counter[str]]:
    """So many ops that reached every mark of the allocator but these."""
    marks = Counter({mark.name: 1 for mark in reachable(allocator) if mark not in but})
    marks["checked"] = ops
    return {allocator: marks}


@pytest.mark.parametrize("by_allocator", [{}, reached("paged", 0)])
def test_no_work_is_never_believed(by_allocator):
    assert shortfalls(0, by_allocator, ABLE) == ["no op was checked"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_everything_reached_is_enough(allocator):
    assert shortfalls(MARK_FLOOR_OPS, reached(allocator, MARK_FLOOR_OPS), ABLE) == []


def test_a_mark_that_is_due_is_missed_from_the_floor_on():
    here = reached("paged", MARK_FLOOR_OPS, Mark.STAGED_MERGE, Mark.REFUSAL)
    assert shortfalls(MARK_FLOOR_OPS, here, ABLE) == [
        f"paged: {MARK_FLOOR_OPS} ops never reached REFUSAL, STAGED_MERGE"
    ]
    below = reached("paged", MARK_FLOOR_OPS - 1, Mark.REFUSAL)
    assert shortfalls(MARK_FLOOR_OPS - 1, below, ABLE) == []


def test_each_allocator_is_held_to_its_own_ops():
    both = reached("paged", 1, Mark.REFUSAL) | reached("token", MARK_FLOOR_OPS, Mark.REFUSAL)
    assert shortfalls(MARK_FLOOR_OPS + 1, both, ABLE) == [
        f"token: {MARK_FLOOR_OPS} ops never reached REFUSAL"
    ]


SWA_FREES = frozenset({"FreeSwa", "FreeSwaSegment"})


@pytest.mark.parametrize(
    ("allocator", "capabilities", "marks"),
    [
        ("paged", replace(ABLE, lacks=frozenset({"Resize"})), (Mark.GROWN, Mark.SHRUNK)),
        ("paged", replace(ABLE, page_offset=False), (Mark.BEYOND_31_BITS,)),
        ("swa", replace(ABLE, lacks_of={"swa": frozenset({"Remap"})}), (Mark.REMAPPED, Mark.REMAP_IN_GROUP)),
        # The device side of the one has a free of its own, the swa side of the other has none left.
        ("swa", replace(ABLE, lacks=SWA_FREES | {"FreeDevice"}), (Mark.FREED_ON_SIDE, Mark.PART_OF_PAGE)),
        ("hisparse-v4", replace(ABLE, lacks=SWA_FREES), (Mark.PART_OF_PAGE,)),
        ("mamba", replace(ABLE, lacks=frozenset({"AllocGroupBegin"})), tuple(
            mark for mark in Mark if mark.name.startswith("ASIDE") or mark is Mark.SERVED_FROM_ASIDE
        )),
    ],
)  # fmt: skip
def test_what_a_target_cannot_be_asked_is_not_due(allocator, capabilities, marks):
    here = reached(allocator, MARK_FLOOR_OPS, *marks)
    assert shortfalls(MARK_FLOOR_OPS, here, capabilities) == []
    assert shortfalls(MARK_FLOOR_OPS, here, ABLE) == [
        f"{allocator}: {MARK_FLOOR_OPS} ops never reached {', '.join(sorted(mark.name for mark in marks))}"
    ]


def test_what_one_kind_lacks_excuses_no_other():
    here = reached("paged", MARK_FLOOR_OPS, Mark.GROWN)
    lacking = replace(ABLE, lacks_of={"swa": frozenset({"Resize"})})
    assert shortfalls(MARK_FLOOR_OPS, here, lacking) == [f"paged: {MARK_FLOOR_OPS} ops never reached GROWN"]


def test_one_way_to_a_mark_is_enough_to_owe_it():
    """Any free of whole pages in a group of both will do."""
    here = reached("paged", MARK_FLOOR_OPS, Mark.GROUP_OF_BOTH)
    ways = ("FreePages", "FreeSegment", "FreeSegments")
    for left_out in range(len(ways) + 1):
        lacking = replace(ABLE, lacks=frozenset(ways[:left_out]))
        assert bool(shortfalls(MARK_FLOOR_OPS, here, lacking)) is (left_out < len(ways))


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("slow", [False, True])
def test_a_hostile_caller_reaches_every_mark_below_the_floor(allocator, slow):
    target = Null(Ticket())
    space = space_for(target.capabilities, allocator, slow=slow)
    marks: Counter[str] = Counter()
    due = {mark.name for mark in reachable(allocator)}
    number = 0
    while marks["checked"] < MARK_FLOOR_OPS // 2 and not due <= set(marks):
        verdict = run_lease(target, Lease(number, 11, "null", "seeded", space, 4000))
        marks.update({mark.name: count for mark, count in verdict.marks.items()})
        marks["checked"] += verdict.tally.checked
        number += 1
    assert due <= set(marks)
