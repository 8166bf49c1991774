"""Subjects and targets for the tests of this folder: lawful ones that choose other pages, and offenders.

`PagePool` is an allocator in a few lines of plain Python, made from the contract alone and sharing no code
with the model: legal in everything, but free in what only the exact level fixes (which page, which order).
Misuse it takes without complaint. Offenders override one method each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvproof.impl.targets.null import NullSubject
from kvproof.impl.targets.protocol import Answer, Capabilities, State, Subject
from kvproof.model import calls
from kvproof.model.base import AllocatorModel, Expectation
from kvproof.model.config import ALLOCATORS, Config

Pick = Callable[[list[int]], int]
"""Takes one page out of a list of free ones."""


def front(free: list[int]) -> int:
    return free.pop(0)


def back(free: list[int]) -> int:
    return free.pop()


def middle(free: list[int]) -> int:
    return free.pop(len(free) // 2)


class PagePool:
    """A lawful allocator of pages (of one slot, for the token allocator). See `protocol.Subject`.

    pick: which free page is taken next. last_row_first: rows of a batch choose their pages last to first.
    eager: staged pages join the free list at once, not only when a call runs short.
    """

    def __init__(
        self, config: Config, pick: Pick, *, last_row_first: bool = False, eager: bool = False
    ) -> None:
        self.config = config
        self.pick = pick
        self.last_row_first = last_row_first
        self.eager = eager
        self.clear()

    def clear(self) -> None:
        first = self.config.page_offset + 1
        self.free = list(range(first, first + self.config.size // self.config.page_size))
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

    def available(self) -> int:
        return (len(self.free) + len(self.staged)) * self.config.page_size

    def call(self, call: calls.Call) -> list[int] | None:
        ps = self.config.page_size
        match call:
            case calls.AllocCall(need):
                return self.alloc(need)
            case calls.ExtendCall(prefix_lens, seq_lens, last_locs):
                return self.extend(prefix_lens, seq_lens, last_locs)
            case calls.DecodeCall(seq_lens, last_locs):
                return self.decode(seq_lens, last_locs)
            case calls.FreeCall(slots):
                self.release({slot // ps for slot in slots})
            case calls.FreeSegmentCall(slots):
                self.free_segment(slots)
            case calls.FreeSegmentsCall(segments):
                for slots, _ in segments:
                    self.free_segment(slots)
            case calls.FreePageIdsCall(pages):
                self.release(pages)
            case calls.GroupBeginCall():
                self.held = []
            case calls.GroupEndCall():
                held, self.held = self.held or [], None
                self.release(held)
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

    def extend(self, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int]) -> list[int] | None:
        ps = self.config.page_size
        batch = list(zip(prefix_lens, seq_lens, last_locs, strict=True))
        needs = [-(-seq // ps) - -(-prefix // ps) for prefix, seq, _ in batch]
        if self.eager or sum(needs) > len(self.free):
            self.free, self.staged = self.free + self.staged, []
        if sum(needs) > len(self.free):
            return None
        order = range(len(batch) - 1, -1, -1) if self.last_row_first else range(len(batch))
        pages = {row: [self.pick(self.free) for _ in range(needs[row])] for row in order}
        return [slot for row, growth in enumerate(batch) for slot in self.row(*growth, iter(pages[row]))]

    def row(self, prefix: int, seq: int, last: int, pages: Iterator[int]) -> list[int]:
        ps = self.config.page_size
        slots: list[int] = []
        for position in range(prefix, seq):
            last = last + 1 if position % ps else next(pages) * ps
            slots.append(last)
        return slots

    def free_segment(self, slots: list[int]) -> None:
        self.release([slot // self.config.page_size for slot in slots[:: self.config.page_size]])

    def release(self, pages: list[int] | set[int]) -> None:
        if self.held is not None:
            self.held.extend(pages)
        elif self.config.need_sort:
            self.staged.extend(pages)
        else:
            self.free.extend(pages)


@dataclass
class PoolTarget:
    """A target that builds whatever `make` makes. See `protocol.Target`."""

    make: Callable[[Config], Subject]
    exact: bool = False
    refuses: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    sibling: PoolTarget | None = None
    name: str = "pool"
    release: str = "pool"
    path: str = "torch"
    stood_in: tuple[str, ...] = ()
    built: int = field(default=0, compare=False)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(ALLOCATORS, self.lacks, self.exact, checked=True, refuses=self.refuses)

    def build(self, config: Config) -> Subject:
        self.built += 1
        return self.make(config)

    def other_path(self) -> PoolTarget | None:
        return self.sibling


LAWFUL: dict[str, Callable[[Config], PagePool]] = {
    "back": lambda config: PagePool(config, back),
    "middle, last row first": lambda config: PagePool(config, middle, last_row_first=True),
    "front, eager": lambda config: PagePool(config, front, eager=True),
    "highest": lambda config: PagePool(
        config, lambda free: free.pop(free.index(max(free))), last_row_first=True
    ),
}
"""Lawful allocators that all choose pages other than the contract's exact level would."""


class Twist(NullSubject):
    """The model's own answers, but for one call. See `protocol.Mirror`.

    at: which call, from 0. answer: given in its place. state: seen after it (None: the model's, still).
    observed: how often anybody looked at the lists.
    """

    def __init__(self, at: int = -1, answer: Answer | None = None, state: State | None = None) -> None:
        super().__init__()
        self.at = at
        self.twisted = answer, state
        self.calls = -1
        self.observed = 0

    def expect(self, expectation: Expectation, model: AllocatorModel) -> None:
        super().expect(expectation, model)
        self.calls += 1

    def apply(self, call: calls.Call) -> Answer:
        right = super().apply(call)
        answer, _ = self.twisted
        return answer if self.calls == self.at and answer is not None else right

    def observe(self) -> State:
        self.observed += 1
        _, state = self.twisted
        return state if self.calls == self.at and state is not None else super().observe()
