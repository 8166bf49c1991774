"""Checks on what an allocator is left with: `available_size` and its free and staged lists.

P1, P2, P3, P9 on the lists; P6 when the call before was refused; P14 on their order for exact targets.
"""

from collections import Counter
from typing import Final

from kvproof.model.base import Outcome
from kvproof.properties.step import Finding, Step, some

REFUSED_BUT: Final = "the call was refused, but "
"""How a message of `check_refusal` begins."""


def check_available(step: Step) -> Finding | None:
    """P2: available_size is free plus staged pages, in slots."""
    actual, due = step.answer.available, step.model.available
    if actual == due:
        return None
    sign, meaning = ("excess", "something was freed twice") if actual > due else ("deficit", "pages leaked")
    return Finding(
        f"available-{sign}",
        f"available_size() is {actual}, {sign} {abs(actual - due)} ({meaning}); expected {due}",
    )


def check_refusal(step: Step) -> Finding | None:
    """P6: after a refusal everything is what it was, a legal merge of staged pages apart."""
    if step.expectation.outcome not in (Outcome.OOM, Outcome.REFUSED):
        return None
    found = check_available(step) or _lists(step)
    if found is None:
        return None
    return Finding(f"refusal-changed-state: {found.divergence}", REFUSED_BUT + found.message)


def check_lists_single(step: Step) -> Finding | None:
    """P1: no page stands twice in free + staged, and none that somebody has."""
    return _of(step, ("duplicate-in-free-list", "owned-page-in-free-list"))


def check_lists_padding(step: Step) -> Finding | None:
    """P3: the padding page never enters a free list."""
    return _of(step, ("padding-page-in-free-list",))


def check_lists_range(step: Step) -> Finding | None:
    """P9: the free list names pages of this pool."""
    return _of(step, ("unknown-page-in-free-list",))


def check_lists_complete(step: Step) -> Finding | None:
    """P2: every page that nobody has is free or staged."""
    return _of(step, ("leaked-page",))


def check_lists_order(step: Step) -> Finding | None:
    """P14: an exact target keeps its lists in the contract's order."""
    state = step.state
    if not step.exact:
        return None
    if state.free != step.model.free_pages:
        return Finding(
            "free-list-order", f"free list {some(state.free)}; expected exactly {some(step.model.free_pages)}"
        )
    if state.staged != step.model.staged:
        return Finding(
            "staged-order", f"staged pages {some(state.staged)}; expected exactly {some(step.model.staged)}"
        )
    return None


def _of(step: Step, divergences: tuple[str, ...]) -> Finding | None:
    found = _lists(step)
    return found if found is not None and found.divergence in divergences else None


def _lists(step: Step) -> Finding | None:
    """The first thing wrong with the lists as sets, worst first."""
    pages = step.state.free + step.state.staged
    due = step.pages_expected()
    if pages == due or (len(pages) == len(due) and set(pages) == set(due)):
        return None
    counts = Counter(pages)
    pool = step.page_range()
    if 0 in counts:
        return Finding("padding-page-in-free-list", f"page 0 stands in the free list: {some(pages)}")
    if unknown := {page for page in counts if page not in pool}:
        return Finding("unknown-page-in-free-list", f"pages {some(unknown)} are not of this pool ({pool})")
    if twice := {page for page, count in counts.items() if count > 1}:
        return Finding("duplicate-in-free-list", f"pages {some(twice)} stand in the free list more than once")
    if owned := set(counts) - set(due):
        owners = step.model.owners()
        names = ", ".join(f"page {page}: {owners.get(page, 'nobody')}" for page in sorted(owned)[:4])
        return Finding("owned-page-in-free-list", f"the free list holds what somebody has ({names})")
    return Finding(
        "leaked-page", f"pages {some(set(due) - set(counts))} are nobody's and not in the free list"
    )
