"""Checks on what an allocator is left with: `available_size`, its free and staged lists, its side mappings.

P1, P2, P3, P9 on the lists of every pool; P9 and P10 on the mappings; P6 when the call before was refused;
P14 on the order of the lists for exact targets. What is wrong in a second pool is named with it: "leaked-page
(swa)".
"""

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from kvproof.impl.targets.protocol import Lists
from kvproof.model.base import Outcome
from kvproof.model.pool import Pool
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
    found = (
        check_available(step)
        or _lists(step)
        or _bases(step)
        or check_mapping_size(step)
        or check_mappings(step)
    )
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
    """P2: every page that nobody has is free or staged, and all pools are shown."""
    return _of(step, ("leaked-page", "side-not-shown"))


def check_lists_order(step: Step) -> Finding | None:
    """P14: an exact target keeps its lists in the contract's order."""
    if not step.exact:
        return None
    for name, pool, lists in _pools(step):
        if lists.free != pool.free:
            message = f"free list {some(lists.free)}; expected exactly {some(pool.free)}"
            return _named(name, "free-list-order", message)
        if lists.staged != pool.staged:
            message = f"staged pages {some(lists.staged)}; expected exactly {some(pool.staged)}"
            return _named(name, "staged-order", message)
    return None


def _pools(step: Step) -> Iterator[tuple[str, Pool, Lists]]:
    """Every pool with what the target's lists show of it, the main one first."""
    yield "", step.model.pool, Lists(step.state.free, step.state.staged)
    for name, pool in step.model.sides.items():
        if name in step.state.sides:
            yield name, pool, step.state.sides[name]


def _named(side: str, divergence: str, message: str) -> Finding:
    """Named with its side, unless it is the main one."""
    return Finding(f"{divergence} ({side})", f"{side}: {message}") if side else Finding(divergence, message)


def _of(step: Step, divergences: tuple[str, ...]) -> Finding | None:
    found = _lists(step)
    return found if found is not None and found.divergence.partition(" (")[0] in divergences else None


def _lists(step: Step) -> Finding | None:
    """The first thing wrong with the lists as sets, worst first in the first pool that has any."""
    for name in step.model.sides:
        if name not in step.state.sides:
            return Finding(f"side-not-shown ({name})", f"the target does not show its {name} side")
    for name, pool, lists in _pools(step):
        pages, due = lists.free + lists.staged, pool.free + pool.staged
        if pages == due or (len(pages) == len(due) and set(pages) == set(due)):
            continue
        counts = Counter(pages)
        if padding := {page for page in counts if 0 <= page < step.model.padding}:
            return _named(
                name,
                "padding-page-in-free-list",
                f"page {min(padding)} stands in the free list: {some(pages)}",
            )
        if unknown := {page for page in counts if page not in pool.pages}:
            message = f"pages {some(unknown)} are not of this pool ({pool.pages})"
            return _named(name, "unknown-page-in-free-list", message)
        if twice := {page for page, count in counts.items() if count > 1}:
            message = f"pages {some(twice)} stand in the free list more than once"
            return _named(name, "duplicate-in-free-list", message)
        if owned := set(counts) - set(due):
            owners = step.model.owners(name)
            names = ", ".join(f"page {page}: {owners.get(page, 'nobody')}" for page in sorted(owned)[:4])
            message = f"the free list holds what somebody has ({names})"
            return _named(name, "owned-page-in-free-list", message)
        lost = set(due) - set(counts)
        return _named(name, "leaked-page", f"pages {some(lost)} are nobody's and not in the free list")
    return None


def check_mapping_size(step: Step) -> Finding | None:
    """P9: a side mapping has an entry for every slot, and one more."""
    for name, due in step.model.mappings.items():
        seen = step.state.mappings.get(name)
        if seen is None or len(seen) < len(due) or (step.exact and len(seen) > len(due)):
            size = "not shown" if seen is None else f"{len(seen)} entries long"
            return Finding(f"mapping-size ({name})", f"the mapping is {size}; expected {len(due)} entries")
    return None


def check_mappings(step: Step) -> Finding | None:
    """P10: the side mappings lead from every live paired slot to its peer, and from no other live slot.

    What an open group holds may be cleared already, or only when it ends: entries of pages it holds, and
    entries that lead to them.
    """
    for name, due in step.model.mappings.items():
        seen = step.state.mappings[name]
        if seen == due:
            continue
        if seen[-1] != -1:
            return Finding(f"mapping-end ({name})", f"the mapping's last entry is {seen[-1]}; expected -1")
        found = _wrong_entry(step, name)
        if found is not None:
            return found
    return None


def _wrong_entry(step: Step, name: str) -> Finding | None:
    for index, is_now, must_be, owner in _odd_entries(step, name):
        if owner in _NOBODY:
            continue
        what = f"entry {index} ({owner}) is {is_now}; expected {must_be}"
        if not is_now:
            return Finding(f"live-slot-unmapped ({name})", f"a live slot has no peer: {what}")
        if not must_be:
            return Finding(f"stale-entry ({name})", f"an entry outlives its peer: {what}")
        return Finding(f"wrong-peer ({name})", f"a slot leads to another's peer: {what}")
    return None


def check_stale(step: Step) -> Finding | None:
    """P10: releasing a page clears its entries. Nobody is harmed before the page is somebody's again."""
    for name, entries in stale_entries(step).items():
        if entries:
            index = min(entries)
            message = f"an entry outlives its page: entry {index} is {entries[index]}; expected 0"
            return Finding(f"stale-entry-of-free-page ({name})", message)
    return None


def stale_entries(step: Step) -> dict[str, dict[int, int]]:
    """Entries of pages that are nobody's, by side, as far as they were not told of before."""
    stale: dict[str, dict[int, int]] = {}
    for name, due in step.model.mappings.items():
        if step.state.mappings[name] != due:
            stale[name] = {
                index: is_now
                for index, is_now, must_be, owner in _odd_entries(step, name)
                if owner in _NOBODY and not must_be
            }
    return stale


def _odd_entries(step: Step, name: str) -> Iterator[tuple[int, int, int, str]]:
    """(index, value, what is due, whose page) of entries that are not as the model has them, nor known to be
    stale. A mapping longer than it need be serves as well."""
    seen, due = step.state.mappings[name][:-1], step.model.mappings[name][:-1]
    page_size = step.config.device_page_size if name == "device" else step.model.page_size
    held, known = set(step.model.deferred()), step.model.known_stale(name)
    held_there = set(step.model.sides[name].deferred()) if name in step.model.sides else set()
    owners = step.model.owners()
    for index, (is_now, must_be) in enumerate(zip_longest(seen, due, fillvalue=0)):
        page = index // page_size
        if is_now == must_be or page in held or known.get(index) == is_now:
            continue
        if must_be or is_now // page_size not in held_there:
            yield index, is_now, must_be, owners.get(page, "nobody")


_NOBODY: Final = ("free", "staged", "nobody")


def check_sizes(step: Step) -> Finding | None:
    """P2: what further methods say is available."""
    for name, due in step.model.sizes.items():
        seen = step.state.sizes.get(name)
        if seen != due:
            return Finding(f"{name}-size", f"{name} size is {seen}; expected {due}")
    return None


def check_bases(step: Step) -> Finding | None:
    """P14: rotation bases are drawn as the contract has it. That a refusal leaves them alone is P6's."""
    return None if step.expectation.outcome is Outcome.OOM else _bases(step)


def _bases(step: Step) -> Finding | None:
    due, seen = step.expectation.bases, step.answer.bases
    if due is None or due == seen:
        return None
    return Finding("rotation-bases", f"the rotation bases are {seen} after the call; expected {due}")
