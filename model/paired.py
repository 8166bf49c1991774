"""What pools of two sides share: one call, both sides or neither, and rows whose peers come and go.

The main side is a paged (or token) pool like any other; a `Side` stands beside it. A call that takes from
several sides is decided first, from page counts, and when any is short nothing has happened on the others.
Releasing a row's pages releases its peers and clears their entries.

Not covered: which calls each kind has (`swa.py`, `hisparse.py`, `hisparse_v4.py`).
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Growth, Outcome, Portion, Row
from kvproof.model.marks import Mark
from kvproof.model.paged import PagedModel
from kvproof.model.sides import PairedRow, Side


@dataclass(slots=True, eq=False)
class Demand:
    """What a call asks of one second side. may_need: the estimate at which it merges."""

    side: Side
    growths: list[Growth]
    heads: list[int]
    may_need: int


class PairedModel(PagedModel):
    """A main pool with second sides. paired: the sides by name. decides_first: every call is decided before
    anything is merged, and not only those that take from a second side."""

    decides_first = False

    def _reset(self) -> None:
        super()._reset()
        self.paired = {side.name: side for side in self._make_sides()}
        self.sides = {name: side.pool for name, side in self.paired.items()}
        self._measures = [(side.pool, side.page_size * side.compression) for side in self.paired.values()]
        self._loose: dict[str, list[int]] = {}

    @abstractmethod
    def _make_sides(self) -> Iterator[Side]:
        """Fresh second sides."""

    @abstractmethod
    def _demands(self, call: calls.Call, growths: list[Growth]) -> list[Demand]:
        """What this call asks of the second sides; a side that takes no part is left out."""

    @property
    def available(self) -> int:
        """`available_size()`: of the side that has least, in tokens."""
        least = super().available
        for pool, tokens in self._measures:
            count = (len(pool.free) + len(pool.staged)) * tokens
            if count < least:
                least = count
        return least

    @property
    def mappings(self) -> dict[str, list[int]]:
        """See AllocatorModel."""
        return {name: side.mapping for name, side in self.paired.items()}

    def _new_row(self) -> Row:
        return PairedRow(tuple(self.paired))

    def peer_pages(self, row: Row, side: str) -> list[int]:
        """See AllocatorModel."""
        return self.paired[side].half(row).pages

    def _holders(self, side: str) -> Iterator[tuple[list[int], str]]:
        if not side:
            yield from super()._holders(side)
            return
        for ordinal, row in enumerate(self.rows):
            yield [page for page in self.paired[side].half(row).pages if page], f"row {ordinal}"

    # --- allocation -------------------------------------------------------------------------------

    def _allocate(self, call: calls.Call, growths: list[Growth], need: int, may_need: int) -> Expectation:
        demands = self._demands(call, growths)
        short = [demand for demand in demands if demand.side.need(demand.growths) > demand.side.pool.count]
        if (demands or self.decides_first) and (short or need > self.pool.count):
            self._note_short(need > self.pool.count, bool(short))
            return Expectation(call, Outcome.OOM, self.available)
        expectation = super()._allocate(call, growths, need, may_need)
        if expectation.outcome is Outcome.SLOTS:
            for growth in growths:
                assert isinstance(growth.row, PairedRow)
                growth.row.pad()
            self._take_part(expectation, demands)
            self._forget_stale(expectation.slots or [])
            expectation.available = self.available
        return expectation

    def _take_part(self, expectation: Expectation, demands: list[Demand]) -> None:
        """The second sides' share of a call that is granted."""
        for demand in demands:
            side = demand.side
            if side.pool.merge_for(demand.may_need):
                self.marks[Mark.STAGED_MERGE] += 1
            taken = side.pool.take(side.need(demand.growths))
            portion = Portion([], demand.growths, demand.heads, taken)
            side.put(portion)
            expectation.portions[side.name] = portion
            self._note_peers(side, taken)
        for name, side in self.paired.items():
            if name not in expectation.portions:
                count = sum(
                    growth.seq // side.compression - growth.prefix // side.compression
                    for growth in expectation.growths
                )
                expectation.portions[name] = Portion([0] * count)

    def _forget_stale(self, slots: list[int]) -> None:
        """Whoever gets a slot may rely on its entry."""
        for side in self.paired.values():
            if side.stale:
                for slot in slots:
                    side.stale.pop(slot // side.compression, None)

    def adopt(self, expectation: Expectation, pages: list[int], peers: dict[str, list[int]]) -> None:
        """See AllocatorModel. peers: the chosen pages of the second sides, by name."""
        portions = expectation.portions
        for name, portion in portions.items():
            self.paired[name].withdraw(portion)
        super().adopt(expectation, pages, peers)
        for growth in expectation.growths:
            self._forget_stale(self.slots_of(growth.row, growth.prefix, growth.seq))
        for name, portion in portions.items():
            if portion.growths:
                self.paired[name].adopt(portion, peers[name])

    def known_stale(self, side: str) -> dict[int, int]:
        """See AllocatorModel."""
        return self.paired[side].stale

    def adopt_stale(self, entries: dict[str, dict[int, int]]) -> None:
        """See AllocatorModel."""
        for name, stale in entries.items():
            self.paired[name].stale.update(stale)

    # --- release ----------------------------------------------------------------------------------

    def _begin_release(self) -> None:
        self._loose = {name: [] for name in self.paired}

    def _cut(self, row: Row, keep: int) -> list[int]:
        for name, side in self.paired.items():
            self._loose[name] += [side.unmap(row, index) for index in range(keep, len(row.pages))]
            half = side.half(row)
            del half.pages[keep:]
            del half.mapped[keep:]
        return super()._cut(row, keep)

    def _release_slots(self, pages: list[int], slots: list[int], order: int) -> None:
        super()._release_slots(pages, slots, order)
        for name, side in self.paired.items():
            loose = self._loose[name]
            side.pool.release_set(
                self._ordered(loose, order) if self.fifo else [page for page in loose if page]
            )

    def _release_in_order(self, pages: list[int], first: int = 0) -> None:
        super()._release_in_order(pages, first)
        for name, side in self.paired.items():
            peers = [page for page in self._loose[name][first : first + len(pages)] if page]
            if name == "swa":
                side.pool.release_list(peers)
            else:
                side.pool.release_set(peers)

    def _stretch(self, op: ops.FreeSwa | ops.FreeSwaSegment | ops.FreeDevice) -> tuple[Row, int, int] | None:
        """The row and the positions [start, stop) the op names; None when there is nothing."""
        if not self.rows:
            return None
        row = self.rows[op.row % len(self.rows)]
        start = op.start % max(row.length, 1)
        stop = min(start + op.tokens, row.length) if op.tokens > 0 else row.length
        return row, start, stop

    def _lose_pages(self, side: Side, row: Row, first: int, last: int) -> list[int]:
        """The row's pages on that side at indices [first, last) are its no more."""
        return [page for index in range(first, last) if (page := side.unmap(row, index))]

    # --- marks ------------------------------------------------------------------------------------

    def _note_short(self, main: bool, side: bool) -> None:
        marks = self.marks
        marks[Mark.REFUSAL] += 1
        if not side:
            marks[Mark.SHORT_ON_MAIN] += 1
        elif not main:
            marks[Mark.SHORT_ON_SIDE] += 1

    def _note_peers(self, side: Side, taken: list[int]) -> None:
        if not taken:
            return
        if not side.pool.count:
            self.marks[Mark.SIDE_EXHAUSTED] += 1
        if not side.pool.released.isdisjoint(taken):
            self.marks[Mark.RECYCLED_ON_SIDE] += 1
