"""Checks on the slots of an answer, row by row: P1, P3, P4, P5, P9, and P14 for exact targets.

One walk finds the first slot that cannot be; which property it breaks follows from what it should have been.
A walk that finds nothing has also found which pages the target chose (`chosen_pages`), legal but perhaps not
the predicted ones.
"""

from collections.abc import Iterator

from kvproof.model.base import Growth
from kvproof.properties.step import Finding, Step, some


def _walk(step: Step) -> Iterator[tuple[str, Finding]]:
    """(property id, finding) for everything wrong with the slots, in batch order."""
    slots = step.answer.slots
    if slots is None or step.expectation.slots is None or len(slots) != len(step.expectation.slots):
        return
    owners = step.owners_before()
    handed: dict[int, int] = {}
    at = 0
    for number, growth in enumerate(step.expectation.growths):
        mine = slots[at : at + growth.seq - growth.prefix]
        at += len(mine)
        yield from _walk_row(step, number, growth, mine, owners, handed)


def _walk_row(
    step: Step, number: int, growth: Growth, slots: list[int], owners: dict[int, str], handed: dict[int, int]
) -> Iterator[tuple[str, Finding]]:
    ps = step.model.page_size
    room = min(growth.first_new * ps, growth.seq) - growth.prefix
    where = f"batch row {number} ({growth.prefix} → {growth.seq} tokens)"
    if room > 0:
        first = growth.row.pages[growth.first_new - 1] * ps + growth.prefix % ps
        due = list(range(first, first + room))
        if slots[:room] != due:
            odd = next(i for i, pair in enumerate(zip(slots, due, strict=False)) if pair[0] != pair[1])
            place = "not-last-loc-plus-one" if odd == 0 else "old-page-not-filled-in-order"
            yield (
                "P5" if odd == 0 else "P4",
                Finding(place, f"{where}: slots {some(slots[:room])} in its old page; expected {some(due)}"),
            )
            return
    for start in range(max(room, 0), len(slots), ps):
        piece = slots[start : start + ps]
        page = piece[0] // ps
        if page == 0:
            yield (
                "P3",
                Finding("padding-page-handed-out", f"{where}: slots {some(piece)} lie in the padding page"),
            )
        elif page not in step.page_range():
            yield (
                "P9",
                Finding("slot-out-of-range", f"{where}: slots {some(piece)}; pages {step.page_range()}"),
            )
        elif piece != list(range(page * ps, page * ps + len(piece))):
            message = f"{where}: slots {some(piece)} do not run through one page of {ps} from its start"
            yield "P4", Finding("not-one-page", message)
        elif page in handed:
            message = f"{where}: page {page} was also handed to batch row {handed[page]} of this call"
            yield "P1", Finding("page-handed-out-twice", message)
        elif owners.get(page, "nobody") not in ("free", "staged"):
            message = f"{where}: page {page} (slots {some(piece)}) belongs to {owners.get(page, 'nobody')}"
            yield "P1", Finding("owned-page-handed-out", message)
        handed[page] = number


def _first(step: Step, property_id: str) -> Finding | None:
    found = next(_walk(step), None)
    return found[1] if found is not None and found[0] == property_id else None


def check_single_owner(step: Step) -> Finding | None:
    """P1: no page handed out that somebody has."""
    return _first(step, "P1")


def check_padding(step: Step) -> Finding | None:
    """P3: the padding page is never handed out."""
    return _first(step, "P3")


def check_shape(step: Step) -> Finding | None:
    """P4: a page-aligned stretch of a row lies in one page, in order."""
    return _first(step, "P4")


def check_continuity(step: Step) -> Finding | None:
    """P5: a row goes on right after its last slot while its page has room."""
    return _first(step, "P5")


def check_range(step: Step) -> Finding | None:
    """P9: slots lie inside the pool."""
    return _first(step, "P9")


def check_exact_slots(step: Step) -> Finding | None:
    """P14: an exact target hands out the very slots of the contract."""
    slots, due = step.answer.slots, step.expectation.slots
    if not step.exact or slots is None or due is None or slots == due:
        return None
    return Finding("other-slots", f"slots {some(slots)}; expected exactly {some(due)}")


def chosen_pages(step: Step) -> list[int]:
    """The new pages the target chose, in batch order. Only after every check of this file has passed."""
    slots = step.answer.slots or []
    ps = step.model.page_size
    pages: list[int] = []
    at = 0
    for growth in step.expectation.growths:
        start = at + max(min(growth.first_new * ps, growth.seq) - growth.prefix, 0)
        at += growth.seq - growth.prefix
        pages.extend(slot // ps for slot in slots[start:at:ps])
    return pages
