"""Lawful allocators of state slots and of sharded pages, in plain Python. See `page_pool.py`.

Little is free here: state slots are first in, first out, and a page's class is given; which page of its class
is not.
"""

from __future__ import annotations

from kvproof.impl.targets.protocol import Answer, Lists, State
from kvproof.model import calls
from kvproof.model.config import Config
from tests.properties.page_pool import PagePool, Pick, Style, front


class StatePool(PagePool):
    """mamba: slots in a queue, and some set aside by a group."""

    def clear(self) -> None:
        super().clear()
        self.aside: list[int] = []

    def pick(self, free: list[int]) -> int:
        return front(free)

    def call(self, call: calls.Call) -> list[int] | None:
        match call:
            case calls.AllocCall(1) if self.aside:
                return [self.aside.pop(0)]
            case calls.AllocGroupBeginCall(slots):
                self.set_aside(slots)
            case calls.AllocGroupEndCall():
                self.put_back()
            case _:
                return super().call(call)
        return None

    def set_aside(self, slots: int) -> None:
        self.put_back()
        if slots <= len(self.free):
            self.aside, self.free = self.free[:slots], self.free[slots:]

    def put_back(self) -> None:
        aside, self.aside = self.aside, []
        self.release(aside)


class ShardPools(PagePool):
    """page-interleave: one list of pages a class."""

    def __init__(self, config: Config, style: Style | Pick) -> None:
        self.bases: list[int | None] | None = None
        super().__init__(config, style)

    def clear(self) -> None:
        n, count = self.config.shards, self.config.size // self.config.page_size
        self.classes = [
            PagePool(self.config, self.style, pages=range(n + r, n + r + n * count, n)) for r in range(n)
        ]

    def apply(self, call: calls.Call) -> Answer:
        self.bases = None
        if isinstance(call, calls.ExtendCall) and call.bases is not None:
            self.bases = list(call.bases)
        answer = super().apply(call)
        answer.bases = self.bases
        return answer

    def observe(self) -> State:
        first, *others = (Lists(list(pool.free), list(pool.staged)) for pool in self.classes)
        total = sum(pool.count() for pool in self.classes) * self.config.page_size
        sides = {f"class {rank}": lists for rank, lists in enumerate(others, 1)}
        return State(first.free, first.staged, sides=sides, sizes={"aggregate": total})

    def available(self) -> int:
        return self.config.page_size * self.config.shards * min(pool.count() for pool in self.classes)

    def extend(self, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int]) -> list[int] | None:
        given = self.bases or [None] * len(seq_lens)
        bases, due = self.deal(prefix_lens, seq_lens, given)
        wanted = [[rank for row in due for rank in row].count(rank) for rank in range(self.config.shards)]
        if any(want > pool.count() for want, pool in zip(wanted, self.classes, strict=True)):
            return None
        for pool, want in zip(self.classes, wanted, strict=True):
            if self.style.eager or want > len(pool.free):
                pool.merge()
        self.bases = bases
        pages = {
            row: [self.pick(self.classes[rank].free) for rank in due[row]] for row in self.order(len(due))
        }
        batch = zip(prefix_lens, seq_lens, last_locs, strict=True)
        return [slot for row, growth in enumerate(batch) for slot in self.row(*growth, iter(pages[row]))]

    def deal(
        self, prefix_lens: list[int], seq_lens: list[int], given: list[int | None]
    ) -> tuple[list[int | None], list[list[int]]]:
        """The rows' bases, and the class of each of a row's new pages."""
        left = [pool.count() for pool in self.classes]
        needs = self.needs(prefix_lens, seq_lens)
        bases: list[int | None] = []
        due: list[list[int]] = []
        for prefix, need, base in zip(prefix_lens, needs, given, strict=True):
            base = self.draw(left) if base is None else base
            first = base + prefix // self.config.page_size
            bases.append(base)
            due.append([(first + place) % self.config.shards for place in range(need)])
            for rank in due[-1]:
                left[rank] -= 1
        return bases, due

    def draw(self, left: list[int]) -> int:
        """The class with most pages, the lowest on ties."""
        return max(range(len(left)), key=lambda rank: (left[rank], -rank))

    def release(self, pages: list[int]) -> None:
        for rank, pool in enumerate(self.classes):
            pool.release([page for page in pages if page % self.config.shards == rank])

    def begin(self) -> None:
        for pool in self.classes:
            pool.begin()

    def end(self) -> None:
        for pool in self.classes:
            pool.end()
