"""What all allocator models share: rows, how ops name them, and the form of a prediction.

A model is the caller and the allocator at once: it keeps the rows a caller would hold and the lists an
allocator would keep. `apply(op)` turns the op into a concrete call, says what the answer must be (the
*exact* level: these very slots), and moves on as if it had been given. A target that is only held to the
*contract* level may have chosen other free pages: `adopt` puts its choice in place of the predicted one.

Legality of a choice is not judged here; see `kvproof.properties.checks`.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvproof.model.calls import Call, NoCall
from kvproof.model.config import Config
from kvproof.model.marks import Mark
from kvproof.model.ops import NEW_ROW, Op


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
    `first_new` on are new."""

    row: Row
    prefix: int
    seq: int
    first_new: int


@dataclass(slots=True, eq=False)
class Expectation:
    """The model's word on one op.

    call: what to ask the target. outcome: what must come back. slots: the predicted slots, when outcome is
    SLOTS. growths: how those slots divide among rows. taken: the predicted new pages in order.
    available: `available_size()` after the call, in slots.
    """

    call: Call
    outcome: Outcome
    available: int
    slots: list[int] | None = None
    growths: list[Growth] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


class AllocatorModel(ABC):
    """One allocator and its callers, as the contract has them.

    config: what it was built from; `resize` changes it. rows: live rows, oldest first. free_pages, staged:
    page numbers in list order. group_slots, group_pages: pages held by an open group, by kind of free
    (None when no group is open). marks: how often each event was reached.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.page_size = config.page_size
        self.rows: list[Row] = []
        self.free_pages: list[int] = []
        self.staged: list[int] = []
        self.group_slots: list[int] | None = None
        self.group_pages: list[int] | None = None
        self.marks: defaultdict[Mark, int] = defaultdict(int)
        self._handlers = self._handle()
        self._reset()

    def apply(self, op: Op) -> Expectation:
        """Carry the op out as the contract says, and tell what a target must answer. Mutates the model."""
        return self._handlers[type(op)](op)

    @property
    def available(self) -> int:
        """`available_size()`: free and staged slots; deferred ones do not count."""
        return (len(self.free_pages) + len(self.staged)) * self.page_size

    @property
    def in_group(self) -> bool:
        """Whether frees are being deferred."""
        return self.group_slots is not None

    def deferred(self) -> list[int]:
        """Pages an open group holds."""
        return [*(self.group_slots or ()), *(self.group_pages or ())]

    def slots_of(self, row: Row, start: int, stop: int) -> list[int]:
        """The row's slots at positions [start, stop)."""
        ps = self.page_size
        slots: list[int] = []
        for index in range(start // ps, -(-stop // ps)):
            first = row.pages[index] * ps - index * ps
            slots.extend(range(first + max(start, index * ps), first + min(stop, (index + 1) * ps)))
        return slots

    def last_loc(self, row: Row) -> int:
        """Slot of the row's last token, -1 for an empty row."""
        if not row.length:
            return -1
        return row.pages[-1] * self.page_size + (row.length - 1) % self.page_size

    def owners(self) -> dict[int, str]:
        """Who has each page of the pool: "row 3", "free", "staged" or "deferred". For people and checks."""
        owners = dict.fromkeys(self.free_pages, "free")
        owners.update(dict.fromkeys(self.staged, "staged"))
        owners.update(dict.fromkeys(self.deferred(), "deferred"))
        for ordinal, row in enumerate(self.rows):
            owners.update(dict.fromkeys(row.pages, f"row {ordinal}"))
        return owners

    def adopt(self, expectation: Expectation, pages: list[int]) -> None:
        """Take the target's choice of new pages in place of the predicted ones.

        pages: as many as `expectation.taken`, each free or staged before the call, in the same order.
        """
        self.free_pages[:0] = expectation.taken
        for page in pages:
            if page in self.free_pages:
                self.free_pages.remove(page)
            else:
                self.staged.remove(page)
        at = 0
        for growth in expectation.growths:
            new = len(growth.row.pages) - growth.first_new
            growth.row.pages[growth.first_new :] = pages[at : at + new]
            at += new
        expectation.taken = pages

    def _reset(self) -> None:
        first = self.config.page_offset + 1
        self.free_pages = list(range(first, first + self.config.num_pages))
        self.staged = []
        self.group_slots = self.group_pages = None
        self.rows = []
        self._released: set[int] = set()

    def _batch(self, entries: Iterable[tuple[int, int]]) -> tuple[list[Growth], list[Row]]:
        """An Extend's entries as growths, amounts clipped, and the rows among them that are new."""
        live = self.rows
        count = len(live)
        most = self.config.size + self.page_size
        growths: list[Growth] = []
        fresh: list[Row] = []
        named: set[int] = set()
        for ordinal, tokens in entries:
            if ordinal <= NEW_ROW or not count:
                row = Row([], 0)
                fresh.append(row)
            else:
                index = ordinal % count
                if index in named:
                    continue
                named.add(index)
                row = live[index]
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
        marks = self.marks
        if not self.free_pages and not self.staged:
            marks[Mark.EXACT_EXHAUSTION] += 1
        if self.group_slots or self.group_pages:
            marks[Mark.ALLOC_IN_GROUP] += 1
        if self.config.page_offset and (taken[-1] + 1) * self.page_size > 1 << 31:
            marks[Mark.BEYOND_31_BITS] += 1
        if self._released and not self._released.isdisjoint(taken):
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
