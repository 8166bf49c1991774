"""Floors: what a campaign must have done to be believed.

Too few checked ops, or a mark that such a budget should have reached, makes the campaign exit 3: a green
result from a harness that never exhausted the pool would prove nothing.
"""

from collections import Counter
from typing import Final

from kvproof.impl.targets.protocol import Capabilities
from kvproof.model.marks import Mark, reachable

MARK_FLOOR_OPS: Final = 60_000
"""Checked ops of one allocator from which every mark it can reach is due (tests/ci measures this bound)."""

_NEEDS_OP: Final = {
    Mark.GROWN: {"Resize"},
    Mark.SHRUNK: {"Resize"},
    Mark.GROUP_OF_BOTH: {"FreePages", "FreeSegment", "FreeSegments"},
    Mark.FREED_ON_SIDE: {"FreeSwa", "FreeDevice"},
    Mark.PART_OF_PAGE: {"FreeSwa"},
    Mark.FULL_ALONE: {"FreeFull", "FreeFullSegment"},
    Mark.TAIL_ONLY: {"ExtendTail"},
    Mark.NO_TAIL: {"ExtendTail"},
    Mark.REMAPPED: {"Remap"},
    Mark.REMAP_IN_GROUP: {"Remap"},
    Mark.LOGICAL_ONLY: {"ExtendLogical"},
    Mark.BUFFER_SURPLUS: {"DeviceBuffer"},
    Mark.BUFFER_COMPLETED: {"DeviceBuffer"},
    Mark.BUFFER_GROWN: {"DeviceBuffer"},
    Mark.BUFFER_REFUSED: {"DeviceBuffer"},
    Mark.SERVED_FROM_ASIDE: {"AllocGroupBegin"},
    Mark.ASIDE_RETURNED: {"AllocGroupBegin"},
    Mark.ASIDE_REFUSED: {"AllocGroupBegin"},
    Mark.ASIDE_TWICE: {"AllocGroupBegin"},
}
"""Ops of which one must be there for a mark to be reached."""


def shortfalls(checked: int, by_allocator: dict[str, Counter[str]], capabilities: Capabilities) -> list[str]:
    """Why this campaign proves less than it should; empty when it is to be believed.

    checked: ops in all. by_allocator: marks reached, by name, and under "checked" the ops, per allocator.
    capabilities: of the target, which excuse marks that need what it lacks.
    """
    if not checked:
        return ["no op was checked"]
    found: list[str] = []
    for allocator, reached in by_allocator.items():
        if reached["checked"] < MARK_FLOOR_OPS:
            continue
        lacks = capabilities.lacking(allocator)
        due = {mark for mark in reachable(allocator) if not _NEEDS_OP.get(mark, {""}) <= lacks}
        if not capabilities.page_offset:
            due.discard(Mark.BEYOND_31_BITS)
        missing = sorted(mark.name for mark in due if not reached[mark.name])
        if missing:
            found.append(f"{allocator}: {reached['checked']} ops never reached {', '.join(missing)}")
    return found
