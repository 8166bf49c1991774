"""A lawful allocator of pages in a few lines of plain Python, and the free choices it may make.

Made from the contract alone and sharing no code with the model: legal in everything, but free in what only
the exact level fixes (which page, which order). Misuse it takes without complaint. Offenders override one
method each. Also the token allocator, and the two sliding-window kinds that have one list of pages.

Not covered: pools of two sides (`paired_pools.py`), state slots and shards (`dealt_pools.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvproof.impl.targets.protocol import Answer, State
from kvproof.model import calls
from kvproof.model.config import Config

Pick = Callable[[list[int]], int]
"""Takes one page out of a list of free ones."""


def front(free: list[int]) -> int:
    return free.pop(0)


def back(free: list[int]) -> int:
    return free.pop()


def middle(free: list[int]) -> int:
    return free.pop(len(free) // 2)


def highest(free: list[int]) -> int:
    return free.pop(free.index(max(free)))


@dataclass(frozen=True)
class Style:
    """The free choices of a lawful allocator.

    pick: which free page is taken next, side_pick: on a second side. last_row_first: rows of a batch choose
    their pages last to first. eager: staged pages join the free list at once, not only when a call runs
    short. early: a group lets frees act at once. late: it clears the entries of pages it holds when it ends.
    backwards: a buffer gives up
    its first pages where it has too many, and its slots come in no order.
    """

    pick: Pick
    side_pick: Pick = front
    last_row_first: bool = False
    eager: bool = False
    early: bool = False
    late: bool = False
    backwards: bool = False


class PagePool:
    """A lawful allocator of pages (of one slot, for the token allocator). See `protocol.Subject`.

    pages: their numbers; None: those the config gives it.
    """

    def __init__(self, config: Config, style: Style | Pick, *, pages: range | None = None) -> None:
        self.config = config
        self.style = style if isinstance(style, Style) else Style(style)
        self.pages = pages
        self.clear()

    def clear(self) -> None:
        first = self.config.page_offset + 1
        known = range(first, first + self.config.size // self.config.page_size)
        self.free = list(known if self.pages is None else self.pages)
        self.staged: list[int] = []
        self.held: list[int] | None = None

    def apply(self, call: calls.Call) -> Answer:
        answer = Answer()
        try:
            answer.slots = self.call(call)
        except Exception as error:
            answer.error = error
        answer.available = self.available()
        return answer

    def observe(self) -> State:
        return State(list(self.free), list(self.staged))

    def count(self) -> int:
        """Free and staged pages."""
        return len(self.free) + len(self.staged)

    def available(self) -> int:
        return self.count() * self.config.page_size

    def call(self, call: calls.Call) -> list[int] | None:
        match call:
            case calls.AllocCall(need):
                return self.alloc(need)
            case calls.ExtendCall(prefix_lens, seq_lens, last_locs):
                return self.extend(prefix_lens, seq_lens, last_locs)
            case calls.DecodeCall(seq_lens, last_locs):
                return self.decode(seq_lens, last_locs)
            case calls.FreeCall(slots):
                self.release(self.touched(slots))
            case calls.FreeSegmentCall(slots):
                self.free_segment(slots)
            case calls.FreeSegmentsCall(segments):
                for slots, _ in segments:
                    self.free_segment(slots)
            case calls.FreePageIdsCall(pages):
                self.release(pages)
            case calls.GroupBeginCall():
                self.begin()
            case calls.GroupEndCall():
                self.end()
            case calls.ClearCall():
                self.clear()
            case calls.ResizeCall(size):
                self.config = replace(self.config, size=size)
                self.clear()
        return None

    def alloc(self, need: int) -> list[int] | None:
        return self.extend([0], [need], [-1])

    def decode(self, seq_lens: list[int], last_locs: list[int]) -> list[int] | None:
        return self.extend([seq - 1 for seq in seq_lens], seq_lens, last_locs)

    def needs(self, prefix_lens: list[int], seq_lens: list[int]) -> list[int]:
        """How many new pages each row takes."""
        ps = self.config.page_size
        return [-(-seq // ps) - -(-prefix // ps) for prefix, seq in zip(prefix_lens, seq_lens, strict=True)]

    def extend(self, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int]) -> list[int] | None:
        needs = self.needs(prefix_lens, seq_lens)
        if self.style.eager or sum(needs) > len(self.free):
            self.merge()
        if sum(needs) > len(self.free):
            return None
        pages = {row: [self.pick(self.free) for _ in range(needs[row])] for row in self.order(len(needs))}
        batch = zip(prefix_lens, seq_lens, last_locs, strict=True)
        return [slot for row, growth in enumerate(batch) for slot in self.row(*growth, iter(pages[row]))]

    def pick(self, free: list[int]) -> int:
        return self.style.pick(free)

    def order(self, rows: int) -> range:
        """Which row of a batch chooses its pages when."""
        return range(rows - 1, -1, -1) if self.style.last_row_first else range(rows)

    def merge(self) -> None:
        self.free, self.staged = self.free + self.staged, []

    def row(self, prefix: int, seq: int, last: int, pages: Iterator[int]) -> list[int]:
        ps = self.config.page_size
        slots: list[int] = []
        for position in range(prefix, seq):
            last = last + 1 if position % ps else next(pages) * ps
            slots.append(last)
        return slots

    def touched(self, slots: Iterable[int]) -> list[int]:
        """The pages of these slots, each once."""
        return list(dict.fromkeys(slot // self.config.page_size for slot in slots))

    def free_segment(self, slots: list[int]) -> None:
        self.release([slot // self.config.page_size for slot in slots[:: self.config.page_size]])

    def release(self, pages: list[int]) -> None:
        if self.held is not None:
            self.held.extend(pages)
        elif self.config.need_sort:
            self.staged.extend(pages)
        else:
            self.free.extend(pages)

    def begin(self) -> None:
        self.held = None if self.style.early else []

    def end(self) -> None:
        held, self.held = self.held or [], None
        self.release(held)


class RingPool(PagePool):
    """swa-ring: the window is a ring, so only full slots are pages; the mapping says nothing."""

    def call(self, call: calls.Call) -> list[int] | None:
        match call:
            case calls.FreeCall(_, "free_swa") | calls.FreeSegmentCall(_, _, "free_swa_segment"):
                return None
        return super().call(call)

    def observe(self) -> State:
        config, ps = self.config, self.config.page_size
        ring = config.request_rows * -(-config.ring // ps) * ps
        mapping = [0] * (config.size + ps) + [-1]
        return replace(
            super().observe(), mappings={"swa": mapping}, sizes={"full": self.available(), "swa": ring}
        )


class PurePool(PagePool):
    """pure-swa: one list of slots plays both sides. There is no full side to release."""

    def call(self, call: calls.Call) -> list[int] | None:
        match call:
            case calls.FreeCall(_, "free_full") | calls.FreeSegmentCall(_, _, "free_full_segment"):
                return None
        return super().call(call)

    def observe(self) -> State:
        return replace(super().observe(), sizes={"full": self.available(), "swa": self.available()})
