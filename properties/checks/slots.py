"""Checks on the slots of an answer, row by row: P1, P3, P4, P5, P9, P10, and P14 for exact targets.

One walk finds the first slot that cannot be; which property it breaks follows from what it should have been.
A second side of a pool is walked in the same way, over the peers that its mapping gives the new slots. A walk
that finds nothing has also found which pages the target chose (`chosen_pages`), legal but perhaps not the
predicted ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvproof.model.base import Growth
from kvproof.model.interleave import InterleaveModel
from kvproof.properties.step import Finding, Step, some


@dataclass(slots=True)
class _View:
    """The slots of an answer on one side. heads: how many slots before each growth have no peer."""

    side: str
    slots: list[int]
    growths: list[Growth]
    heads: list[int]
    page_size: int
    owners: dict[int, str]

    def finding(self, divergence: str, message: str) -> Finding:
        """Named with its side, unless it is the main one."""
        if not self.side:
            return Finding(divergence, message)
        return Finding(f"{divergence} ({self.side})", f"{self.side} side, {message}")


def _views(step: Step) -> Iterator[_View]:
    slots, expectation = step.answer.slots, step.expectation
    if slots is None or expectation.slots is None or len(slots) != len(expectation.slots):
        return
    if expectation.detached is not None:
        return
    heads = [0] * len(expectation.growths)
    yield _View("", slots, expectation.growths, heads, step.model.page_size, step.owners_before())
    for name, portion in expectation.portions.items():
        peers = step.answer.peers.get(name)
        if peers is not None and len(peers) == len(portion.peers):
            page_size = step.config.device_page_size if name == "device" else step.model.page_size
            owners = step.owners_before(name)
            yield _View(name, peers, portion.growths, portion.heads, page_size, owners)


def _walk(step: Step) -> Iterator[tuple[str, Finding]]:
    """(property id, finding) for everything wrong with the slots, in batch order."""
    for view in _views(step):
        handed: dict[int, int] = {}
        at = 0
        for number, (growth, head) in enumerate(zip(view.growths, view.heads, strict=True)):
            mapped = [slot for slot in view.slots[at : at + head] if slot]
            if mapped:
                message = f"slots without a peer are mapped to {some(mapped)}"
                yield "P10", view.finding("stale-entry", message)
            at += head
            mine = view.slots[at : at + growth.seq - growth.prefix]
            at += len(mine)
            yield from _walk_row(step, view, number, growth, mine, handed)
        if view.side and any(view.slots[at:]):
            message = f"slots without a peer are mapped to {some(view.slots[at:])}"
            yield "P10", view.finding("stale-entry", message)


def _walk_row(
    step: Step, view: _View, number: int, growth: Growth, slots: list[int], handed: dict[int, int]
) -> Iterator[tuple[str, Finding]]:
    ps = view.page_size
    room = min(growth.first_new * ps, growth.seq) - growth.prefix
    where = f"batch row {number} ({growth.prefix} → {growth.seq} tokens)"
    if view.side and not all(slots):
        message = f"{where}: live slots have no peer: {some(slots)}"
        yield "P10", view.finding("live-slot-unmapped", message)
        return
    if room > 0:
        first = growth.row.pages[growth.first_new - 1] * ps + growth.prefix % ps
        due = list(range(first, first + room))
        if slots[:room] != due:
            odd = next(i for i, pair in enumerate(zip(slots, due, strict=False)) if pair[0] != pair[1])
            place = "not-last-loc-plus-one" if odd == 0 else "old-page-not-filled-in-order"
            message = f"{where}: slots {some(slots[:room])} in its old page; expected {some(due)}"
            yield ("P5" if odd == 0 else "P4", view.finding(place, message))
            return
    for start in range(max(room, 0), len(slots), ps):
        found = _wrong_piece(step, view, where, slots[start : start + ps], handed)
        page = slots[start] // ps
        if found is None and isinstance(step.model, InterleaveModel):
            due_class = step.model.due_class(growth, growth.first_new + (start - max(room, 0)) // ps)
            if page % step.model.shards != due_class:
                message = f"{where}: page {page} is of class {page % step.model.shards}; expected {due_class}"
                found = "P4", view.finding("page-of-other-class", message)
        if found is not None:
            yield found
        handed[page] = number


def _wrong_piece(
    step: Step, view: _View, where: str, piece: list[int], handed: dict[int, int]
) -> tuple[str, Finding] | None:
    """What is wrong with the slots of one new page."""
    ps = view.page_size
    page = piece[0] // ps
    owner = view.owners.get(page)
    if 0 <= page < step.model.padding:
        message = f"{where}: slots {some(piece)} lie in the padding page"
        return "P3", view.finding("padding-page-handed-out", message)
    if owner is None:
        pages = step.model.sides[view.side].pages if view.side else step.model.pool.pages
        message = f"{where}: slots {some(piece)}; pages {pages}"
        return "P9", view.finding("slot-out-of-range", message)
    if piece != list(range(page * ps, page * ps + len(piece))):
        message = f"{where}: slots {some(piece)} do not run through one page of {ps} from its start"
        return "P4", view.finding("not-one-page", message)
    if page in handed:
        message = f"{where}: page {page} was also handed to batch row {handed[page]} of this call"
        return "P1", view.finding("page-handed-out-twice", message)
    if owner not in ("free", "staged", "set aside"):
        message = f"{where}: page {page} (slots {some(piece)}) belongs to {owner}"
        return "P1", view.finding("owned-page-handed-out", message)
    return None


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


def check_peers(step: Step) -> Finding | None:
    """P10: a live paired slot is mapped, and no other."""
    for name, portion in step.expectation.portions.items():
        peers = step.answer.peers.get(name)
        if step.answer.slots is not None and (peers is None or len(peers) != len(portion.peers)):
            seen = "nothing" if peers is None else f"{len(peers)} entries"
            return Finding(
                f"mapping-not-there ({name})",
                f"the mapping says {seen} of the new slots; expected {len(portion.peers)} entries",
            )
    return _first(step, "P10")


def check_exact_slots(step: Step) -> Finding | None:
    """P14: an exact target hands out the very slots of the contract."""
    slots, due = step.answer.slots, step.expectation.slots
    if not step.exact or slots is None or due is None:
        return None
    if slots != due:
        return Finding("other-slots", f"slots {some(slots)}; expected exactly {some(due)}")
    for name, portion in step.expectation.portions.items():
        peers = step.answer.peers[name]
        if peers != portion.peers:
            message = f"peers {some(peers)}; expected exactly {some(portion.peers)}"
            return Finding(f"other-slots ({name})", message)
    return None


def chosen_pages(step: Step) -> list[int]:
    """The new pages the target chose, in batch order. Only after every check of this file has passed."""
    return _chosen(step.answer.slots or [], step.expectation.growths, None, step.model.page_size)


def chosen_peers(step: Step) -> dict[str, list[int]]:
    """The same for each second side that took part."""
    chosen: dict[str, list[int]] = {}
    for name, portion in step.expectation.portions.items():
        if portion.growths:
            page_size = step.config.device_page_size if name == "device" else step.model.page_size
            chosen[name] = _chosen(step.answer.peers[name], portion.growths, portion.heads, page_size)
    return chosen


def _chosen(slots: list[int], growths: list[Growth], heads: list[int] | None, page_size: int) -> list[int]:
    pages: list[int] = []
    at = 0
    for number, growth in enumerate(growths):
        at += heads[number] if heads else 0
        start = at + max(min(growth.first_new * page_size, growth.seq) - growth.prefix, 0)
        at += growth.seq - growth.prefix
        pages.extend(slot // page_size for slot in slots[start:at:page_size])
    return pages
