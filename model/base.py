"""What all allocator models share: rows, how ops name them, and the form of a prediction.

A model is the caller and the allocator at once: it keeps the rows a caller would hold and the pools an
allocator would keep. `apply(op)` turns the op into a concrete call, says what the answer must be (the
*exact* level: these very slots), and moves on as if it had been given. A target that is only held to the
*contract* level may have chosen other free pages: `adopt` puts its choice in place of the predicted one.

Legality of a choice is not judged here; see `kvproof.properties.checks`.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvproof.model.calls import Call, NoCall
from kvproof.model.config import Config
from kvproof.model.marks import Mark
from kvproof.model.ops import NEW_ROW, Op
from kvproof.model.pool import Pool


class Outcome(Enum):
    """What the right answer to a call is."""

    SLOTS = "slots"
    OOM = "None"
    DONE = "done, with no answer"
    REFUSED = "a refusal that changes nothing"
    NOTHING = "no call"


class Row:
    """One request: its pages in order and its length in tokens. `len(pages) == pages(length)` always."""

    __slots__ = ("length", "pages")

    def __init__(self, pages: list[int], length: int) -> None:
        self.pages = pages
        self.length = length


@dataclass(slots=True, eq=False)
class Growth:
    """One row of an allocating call: it grows from `prefix` to `seq` tokens; its pages from index
    `first_new` on are new. On the second side of a pool, row is the row's part there (`sides.py`), and
    lengths are that side's."""

    row: Row
    prefix: int
    seq: int
    first_new: int


@dataclass(slots=True, eq=False)
class Portion:
    """What an allocating call comes to on the second side of a pool.

    peers: what the side mapping must say of each slot handed out, in order; 0 where it must say nothing.
    growths: how the peers divide among rows. heads: of each growth, how many slots before it have no peer.
    taken: the predicted new pages there, in order.
    """

    peers: list[int]
    growths: list[Growth] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Expectation:
    """The model's word on one op.

    call: what to ask the target. outcome: what must come back. slots: the predicted slots, when outcome is
    SLOTS. growths: how those slots divide among rows. taken: the predicted new pages in order.
    available: `available_size()` after the call, in slots. portions: the same for each second side, by name.
    bases: rotation bases as the call must leave them (page-interleave). detached: the row's device pages,
    which a buffer is made of or gives back, when the call asks for one (hisparse); taken and slots are then
    of the device side.
    """

    call: Call
    outcome: Outcome
    available: int
    slots: list[int] | None = None
    growths: list[Growth] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    portions: dict[str, Portion] = field(default_factory=dict)
    bases: list[int | None] | None = None
    detached: list[int] | None = None

    @property
    def peers(self) -> dict[str, list[int]]:
        """What the side mappings must say of the slots handed out, by side."""
        return {name: portion.peers for name, portion in self.portions.items()}


class AllocatorModel(ABC):
    """One allocator and its callers, as the contract has them.

    config: what it was built from; `resize` changes it. rows: live rows, oldest first. pool: the only pool,
    or the main one (full, logical, class 0). sides: the other pools by name. marks: how often each event was
    reached. knows: the ops that come to a call for this kind of allocator; all others come to nothing.
    defers: whether a group holds frees at all.
    padding: how many pages are padding, from page 0 on. fifo: the pool is a token pool, see
    `paged.py`. by_page: `free` acts on the whole pages it touches, whichever of their slots it is given.
    """

    defers = True
    fifo = False
    by_page = True
    padding = 1

    def __init__(self, config: Config) -> None:
        self.config = config
        self.page_size = config.page_size
        self.rows: list[Row] = []
        self.marks: defaultdict[Mark, int] = defaultdict(int)
        self._handlers = self._handle()
        self.knows = frozenset(self._handlers)
        self._reset()

    def apply(self, op: Op) -> Expectation:
        """Carry the op out as the contract says, and tell what a target must answer. Mutates the model."""
        handler = self._handlers.get(type(op))
        return self._nothing() if handler is None else handler(op)

    @property
    def free_pages(self) -> list[int]:
        """The main pool's free list."""
        return self.pool.free

    @property
    def staged(self) -> list[int]:
        """The main pool's staged pages."""
        return self.pool.staged

    @property
    def available(self) -> int:
        """`available_size()`: free and staged slots; deferred ones do not count."""
        return self.pool.count * self.page_size

    @property
    def in_group(self) -> bool:
        """Whether frees are being deferred."""
        return self.pool.held is not None

    @property
    def mappings(self) -> dict[str, list[int]]:
        """Side mappings as they must be, by the side they lead to."""
        return {}

    @property
    def sizes(self) -> dict[str, int]:
        """What further methods must say is available, by their prefix: `full_available_size()` …"""
        return {}

    def deferred(self) -> list[int]:
        """Pages of the main pool that an open group holds."""
        return self.pool.deferred()

    def slots_of(self, row: Row, start: int, stop: int) -> list[int]:
        """The row's slots at positions [start, stop)."""
        ps = self.page_size
        slots: list[int] = []
        for index in range(start // ps, -(-stop // ps)):
            first = row.pages[index] * ps - index * ps
            slots.extend(range(first + max(start, index * ps), first + min(stop, (index + 1) * ps)))
        return slots

    def mapped_slots(self, row: Row) -> list[int]:
        """What `alloc_device_buffer` is told of a row: where it may have entries in the device's mapping."""
        return self.slots_of(row, 0, row.length)

    def last_loc(self, row: Row) -> int:
        """Slot of the row's last token, -1 for an empty row."""
        if not row.length:
            return -1
        return row.pages[-1] * self.page_size + (row.length - 1) % self.page_size

    def owners(self, side: str = "") -> dict[int, str]:
        """Who has each page of a pool: "row 3", "free", "staged" or "deferred". For people and checks.

        side: name of a second side; "" is the main pool.
        """
        pool = self.sides[side] if side else self.pool
        owners = dict.fromkeys(pool.free, "free")
        owners.update(dict.fromkeys(pool.staged, "staged"))
        owners.update(dict.fromkeys(pool.deferred(), "deferred"))
        for pages, name in self._holders(side):
            owners.update(dict.fromkeys(pages, name))
        return owners

    def peer_pages(self, row: Row, side: str) -> list[int]:
        """The row's pages on a second side, as many as its own, 0 where it has none there."""
        raise KeyError(side)

    def _holders(self, side: str) -> Iterator[tuple[list[int], str]]:
        """Pages of that pool in somebody's hands, and whose."""
        for ordinal, row in enumerate(self.rows):
            yield row.pages, f"row {ordinal}"

    def adopt(self, expectation: Expectation, pages: list[int], peers: dict[str, list[int]]) -> None:
        """Take the target's choice of new pages in place of the predicted ones.

        pages: as many as `expectation.taken`, each free or staged before the call, in the same order. peers:
        the same for each second side that took part, by name.
        """
        self.pool.adopt(expectation.taken, pages)
        hand_over(expectation.growths, pages)
        expectation.taken = pages

    def adopt_releases(self, lists: dict[str, set[int]]) -> None:
        """A group may hold what it is given or let it act at once: take over what a target has done.

        lists: free and staged pages of its pools by name, "" the main one.
        """
        for name, pool in (("", self.pool), *self.sides.items()):
            if early := [page for page in pool.deferred() if page in lists.get(name, ())]:
                pool.let_go(early)

    def known_stale(self, side: str) -> dict[int, int]:
        """What `adopt_stale` was told of that side."""
        return {}

    def adopt_stale(self, entries: dict[str, dict[int, int]]) -> None:
        """Remember entries that outlive their peers, by side, so that each is told of once."""
        assert not any(entries.values()), "a pool of one side has no entries"

    def _reset(self) -> None:
        first = self.config.page_offset + 1
        self.pool = self._fresh_pool(range(first, first + self.config.num_pages))
        self.sides: dict[str, Pool] = {}
        self.rows = []

    def _fresh_pool(self, pages: range) -> Pool:
        return Pool(pages, self.config.need_sort)

    def _new_row(self) -> Row:
        return Row([], 0)

    def _can_grow(self, row: Row) -> bool:
        """Whether a lawful caller may extend this row."""
        return True

    def _batch(
        self, entries: Iterable[tuple[int, int]], *, freely: bool = False
    ) -> tuple[list[Growth], list[Row]]:
        """An Extend's entries as growths, amounts clipped, and the rows among them that are new.

        freely: rows too that `_can_grow` would leave out.
        """
        live = self.rows
        count = len(live)
        most = self.config.slots + self.page_size
        growths: list[Growth] = []
        fresh: list[Row] = []
        named: set[int] = set()
        for ordinal, tokens in entries:
            if ordinal <= NEW_ROW or not count:
                row = self._new_row()
                fresh.append(row)
            else:
                index = ordinal % count
                if index in named:
                    continue
                named.add(index)
                row = live[index]
                if not freely and not self._can_grow(row):
                    continue
            length = row.length
            more = tokens if 0 <= tokens <= most else 0 if tokens < 0 else most
            growths.append(Growth(row, length, length + more, len(row.pages)))
        return growths, fresh

    def _named_rows(self, ordinals: Iterable[int]) -> list[int]:
        """Indices of the live rows these ordinals name, each once, in the order of naming."""
        count = len(self.rows)
        return list(dict.fromkeys(ordinal % count for ordinal in ordinals)) if count else []

    def _done(self, call: Call) -> Expectation:
        return Expectation(call, Outcome.DONE, self.available)

    def _nothing(self) -> Expectation:
        return Expectation(NoCall(), Outcome.NOTHING, self.available)

    def _refused(self, call: Call) -> Expectation:
        return Expectation(call, Outcome.REFUSED, self.available)

    def _note_taken(self, taken: list[int]) -> None:
        if not taken:
            return
        marks, pool = self.marks, self.pool
        if not pool.free and not pool.staged:
            marks[Mark.EXACT_EXHAUSTION] += 1
        if pool.held is not None and (pool.held[0] or pool.held[1]):
            marks[Mark.ALLOC_IN_GROUP] += 1
        if self.config.page_offset and (taken[-1] + 1) * self.page_size > 1 << 31:
            marks[Mark.BEYOND_31_BITS] += 1
        if pool.released and not pool.released.isdisjoint(taken):
            marks[Mark.RECYCLED] += 1

    def _note_refusal(self, need: int, had_staged: bool) -> None:
        self.marks[Mark.REFUSAL] += 1
        if need == len(self.free_pages) + 1:
            self.marks[Mark.ONE_SHORT] += 1
        if had_staged:
            self.marks[Mark.REFUSAL_AFTER_MERGE] += 1

    @abstractmethod
    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        """Which method carries out which kind of op."""


def hand_over(growths: list[Growth], pages: list[int]) -> None:
    """Put these pages, in order, in the places of the growths' new ones. Mutates the growths' rows."""
    at = 0
    for growth in growths:
        held = growth.row.pages
        new = len(held) - growth.first_new
        held[growth.first_new :] = pages[at : at + new]
        at += new
