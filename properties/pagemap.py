"""The page map: who has each page before and after the op that failed, in a few lines of text.

`before` is the contract's view, which the target shared until then; `after` stands twice, as the contract has
it and as the target's own lists have it.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from kvproof.impl.targets.protocol import Lists, State, Target
from kvproof.model.base import AllocatorModel
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.run import lockstep_for

_MOST_RUNS = 40


@dataclass(frozen=True, slots=True)
class PageMaps:
    """Three maps of one step; each a line such as "1-3 row 0 · 4 free"."""

    before: str
    expected: str
    actual: str


def page_maps(target: Target, trace: Trace, failure: Failure) -> PageMaps:
    """Run the trace up to the failing op and look on either side of it."""
    pair = lockstep_for(target, trace.config, misuse_fails=True)
    for op in trace.ops[: failure.step]:
        pair.step(op)
    before = _map(pair.model, None)
    if failure.step < len(trace.ops):
        pair.step(trace.ops[failure.step])
    return PageMaps(before, _map(pair.model, None), _map(pair.model, pair.subject.observe()))


def _map(model: AllocatorModel, state: State | None) -> str:
    """Every pool in one line, the main one first and the others by name; state: with the target's own lists
    in the place of the model's."""
    maps: list[str] = []
    pools = {"": model.pool, **model.sides}
    for name, pool in pools.items():
        owners = model.owners(name)
        if state is not None:
            own = Lists(state.free, state.staged)
            owners = _seen(owners, own if not name else state.sides.get(name, own))
        # Where pages of several pools share one numbering (shards), each shows its own.
        others = {page for other, each in pools.items() if other != name for page in each.pages}
        mine = {page: owner for page, owner in owners.items() if page in pool.pages or page not in others}
        line = _lines(mine if model.padding > 1 else owners, set(pool.pages))
        maps.append(f"{name}: {line}" if name else line)
    return " | ".join(maps)


def _seen(owners: dict[int, str], lists: Lists) -> dict[int, str]:
    """Owners with "free" and "staged" taken from the target's lists instead of the model's."""
    seen = {page: owner for page, owner in owners.items() if owner not in ("free", "staged")}
    for name, pages in (("free", lists.free), ("staged", lists.staged)):
        for page, count in Counter(pages).items():
            word = name if count == 1 else f"{name} x{count}"
            seen[page] = f"{word} and {seen[page]}" if page in seen else word
    return seen


def _lines(owners: dict[int, str], pool: set[int]) -> str:
    """Runs of pages with one owner, in page order."""
    named = [(page, owners.get(page, "nobody")) for page in sorted(pool | set(owners))]
    runs: list[str] = []
    # Neighbours have the same distance from their place in the list; a page outside the pool starts a run.
    for (owner, _), group in groupby(
        enumerate(named), key=lambda entry: (entry[1][1], entry[1][0] - entry[0])
    ):
        pages = [page for _, (page, _) in group]
        runs.append(f"{pages[0]}-{pages[-1]} {owner}" if len(pages) > 1 else f"{pages[0]} {owner}")
    if len(runs) > _MOST_RUNS:
        return " · ".join(runs[:_MOST_RUNS]) + f" · … {len(runs) - _MOST_RUNS} more runs"
    return " · ".join(runs)
