"""Floors: what a campaign must have done to be believed.

Too few checked ops, or a mark that such a budget should have reached, makes the campaign exit 3: a green
result from a harness that never exhausted the pool would prove nothing.
"""

from collections import Counter
from typing import Final

from kvproof.model.marks import Mark, reachable

MARK_FLOOR_OPS: Final = 60_000
"""Checked ops of one allocator from which every mark it can reach is due (tests/ci measures this bound)."""

_NEEDS_OP: Final = {
    Mark.GROWN: "Resize",
    Mark.SHRUNK: "Resize",
    Mark.GROUP_OF_BOTH: "FreePages",
}


def shortfalls(
    checked: int, by_allocator: dict[str, Counter[str]], lacks: frozenset[str], page_offset: bool
) -> list[str]:
    """Why this campaign proves less than it should; empty when it is to be believed.

    checked: ops in all. by_allocator: marks reached, by name, and under "checked" the ops, per allocator.
    """
    if not checked:
        return ["no op was checked"]
    found: list[str] = []
    for allocator, reached in by_allocator.items():
        if reached["checked"] < MARK_FLOOR_OPS:
            continue
        due = {mark for mark in reachable(allocator) if _NEEDS_OP.get(mark) not in lacks}
        if not page_offset:
            due.discard(Mark.BEYOND_31_BITS)
        missing = sorted(mark.name for mark in due if not reached[mark.name])
        if missing:
            found.append(f"{allocator}: {reached['checked']} ops never reached {', '.join(missing)}")
    return found
