"""The sliding-window allocator, as its contract has it: every full slot has a peer in a second pool, for as
long as a request's window reaches it.

With pages of one slot both pools are token pools, and a caller frees and re-points single slots; with larger
pages a row loses its peers page by page. Rows may be extended with peers for their tail alone, and a cache
may give a row that has lost its peers those of another.

Not covered: one ring a request, and models with no full side (`swa_variants.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Growth, Outcome, Row
from kvproof.model.config import Config
from kvproof.model.marks import Mark
from kvproof.model.ops import Op
from kvproof.model.paired import Demand, PairedModel
from kvproof.model.sides import Side


class SwaModel(PairedModel):
    """A full and a sliding-window pool, and the rows in them."""

    decides_first = True

    def __init__(self, config: Config) -> None:
        self.fifo = config.page_size == 1
        super().__init__(config)

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        handlers = super()._handle()
        del handlers[ops.FreePages]
        if not self.fifo:
            del handlers[ops.Alloc]
            handlers[ops.ExtendTail] = self._extend_tail
        return handlers | {
            ops.FreeSwa: self._free_swa,
            ops.FreeSwaSegment: self._free_swa_segment,
            ops.FreeFull: self._free_full,
            ops.FreeFullSegment: self._free_full_segment,
            ops.Remap: self._remap,
        }

    def _make_sides(self) -> Iterator[Side]:
        config, ps = self.config, self.page_size
        pool = self._fresh_pool(range(1, config.swa_size // ps + 1))
        yield Side("swa", pool, ps, config.size + ps)

    @property
    def sizes(self) -> dict[str, int]:
        """See AllocatorModel."""
        return {"full": self.pool.count * self.page_size, "swa": self.paired["swa"].available}

    # --- allocation -------------------------------------------------------------------------------

    def _can_grow(self, row: Row) -> bool:
        # Pages of one slot are taken by plain `alloc`, which looks up no last_loc.
        return self.fifo or self.paired["swa"].goes_on(row)

    def _can_step(self, row: Row) -> bool:
        return self._can_grow(row)

    def _demands(self, call: calls.Call, growths: list[Growth]) -> list[Demand]:
        swa, ps = self.paired["swa"], self.page_size
        if isinstance(call, calls.ExtendCall) and call.tail is not None:
            if not call.tail:
                return []
            growth = growths[0]
            start = growth.seq - call.tail
            head = start - growth.prefix
            return [Demand(swa, [swa.growth(growth.row, start, growth.seq)], [head], call.tail // ps + 2)]
        mine = [swa.growth(growth.row, growth.prefix, growth.seq) for growth in growths]
        return [Demand(swa, mine, [0] * len(mine), _estimate(call, ps))]

    def _extend_tail(self, op: ops.ExtendTail) -> Expectation:
        growths, fresh = self._batch([(op.row, op.tokens)], freely=True)
        growth = growths[0]
        start = self.tail_start(growth, op.tail)
        call = self._extend_call(growths)
        call.tail = growth.seq - start
        expectation = self._allocate(call, growths, call.pages, call.tokens // self.page_size + 2)
        if expectation.outcome is Outcome.SLOTS:
            self.rows.extend(fresh)
            self._note_tail(growth, call.tail)
        return expectation

    def tail_start(self, growth: Growth, tail: int) -> int:
        """The position from which on the row's new slots have peers: at a page of the row, or at its end."""
        wanted = growth.seq - tail % (growth.seq - growth.prefix + 1)
        return min(self.pages(wanted) * self.page_size, growth.seq)

    # --- release ----------------------------------------------------------------------------------

    def _least_kept(self, row: Row, keep: int, *, segment: bool) -> int:
        """Segments and single slots must have peers: the tail that has, behind the last page that has not."""
        if not (segment or self.fifo):
            return keep
        bare = [index for index, page in enumerate(self.paired["swa"].half(row).pages) if not page]
        return max(keep, bare[-1] + 1) if bare else keep

    def _free_swa(self, op: ops.FreeSwa) -> Expectation:
        stretch = self._stretch(op)
        if stretch is None:
            return self._nothing()
        row, start, stop = stretch
        swa, ps = self.paired["swa"], self.page_size
        if self.fifo:
            has = swa.half(row).pages
            slots = [row.pages[at] for at in range(start, stop) if has[at]]
            swa.pool.release_list(self._lose_pages(swa, row, start, stop))
        else:
            slots = self.slots_of(row, start, stop)
            if slots and (start % ps or (stop % ps and stop < row.length)):
                self.marks[Mark.PART_OF_PAGE] += 1
            swa.pool.release_set(self._lose_pages(swa, row, start // ps, self.pages(stop)))
        self._note_side_free(len(slots))
        return self._done(calls.FreeCall(slots, "free_swa"))

    def _free_swa_segment(self, op: ops.FreeSwaSegment) -> Expectation:
        stretch = self._stretch(op)
        if stretch is None:
            return self._nothing()
        row, start, stop = stretch
        swa, ps = self.paired["swa"], self.page_size
        has = swa.half(row).pages
        first, end = start // ps, self.pages(stop)
        while first < end and not has[first]:
            first += 1
        last = first
        while last < end and has[last]:
            last += 1
        if first == last:
            return self._nothing()
        slots = self.slots_of(row, first * ps, min(last * ps, row.length))
        swa.pool.release_list(self._lose_pages(swa, row, first, last))
        self._note_side_free(len(slots))
        return self._done(calls.FreeSegmentCall(slots, first * ps, "free_swa_segment"))

    def _bare_tail(self, op: ops.FreeFull | ops.FreeFullSegment) -> tuple[int, int] | None:
        """Which row, and behind which page it has no peers and is to be freed; None when there is no such
        tail."""
        if not self.rows:
            return None
        index = op.row % len(self.rows)
        row = self.rows[index]
        keep = self.pages(op.keep % (row.length + 1))
        for side in self.paired.values():
            has = side.half(row).pages
            while keep < len(has) and any(has[keep:]):
                keep += 1
        return (index, keep) if keep < len(row.pages) else None

    def _free_full(self, op: ops.FreeFull) -> Expectation:
        tail = self._bare_tail(op)
        if tail is None:
            return self._nothing()
        index, keep = tail
        row = self.rows[index]
        slots = self.slots_of(row, keep * self.page_size, row.length)
        self._begin_release()
        pages = self._cut(row, keep)
        self._drop_empty([index])
        self._note_deferred(pages)
        self.pool.release_set(pages)
        self.marks[Mark.FULL_ALONE] += 1
        return self._done(calls.FreeCall(slots, "free_full"))

    def _free_full_segment(self, op: ops.FreeFullSegment) -> Expectation:
        tail = self._bare_tail(op)
        if tail is None:
            return self._nothing()
        index, keep = tail
        row = self.rows[index]
        start = keep * self.page_size
        slots = self.slots_of(row, start, row.length)
        self._begin_release()
        self._release_in_order(self._cut(row, keep))
        self._drop_empty([index])
        self.marks[Mark.FULL_ALONE] += 1
        return self._done(calls.FreeSegmentCall(slots, start, "free_full_segment"))

    # --- the mapping ------------------------------------------------------------------------------

    def _remap(self, op: ops.Remap) -> Expectation:
        if len(self.rows) < 2:
            return self._nothing()
        row, donor = (self.rows[ordinal % len(self.rows)] for ordinal in (op.row, op.donor))
        if row is donor:
            return self._nothing()
        swa, ps = self.paired["swa"], self.page_size
        mine, theirs = swa.half(row), swa.half(donor)
        first = op.start % max(len(row.pages), 1)
        last = min(len(row.pages), len(donor.pages))
        last = min(last, first + op.pages) if op.pages > 0 else last
        call = calls.RemapCall([], [], [])
        for index in range(first, last):
            used = min(row.length - index * ps, ps)
            if mine.pages[index] or theirs.mapped[index] < used:
                continue
            there = theirs.pages[index] * ps
            call.full += self.slots_of(row, index * ps, index * ps + used)
            call.swa += range(there, there + used)
            call.cleared += self.slots_of(donor, index * ps, index * ps + theirs.mapped[index])
            swa.move(donor, row, index, used)
        if not call.full:
            return self._nothing()
        self.marks[Mark.REMAP_IN_GROUP if any(swa.pool.held or ()) else Mark.REMAPPED] += 1
        return self._done(call)

    def _resize(self, op: ops.Resize) -> Expectation:
        expectation = super()._resize(op)
        call = expectation.call
        assert isinstance(call, calls.ResizeCall)
        side = min(max(op.side, 0), self.config.most_pages) * self.page_size or self.config.swa_size
        self.config = replace(self.config, swa_size=side)
        self._reset()
        return self._done(calls.ResizeCall(call.size, side))

    # --- marks ------------------------------------------------------------------------------------

    def _note_side_free(self, slots: int) -> None:
        if slots:
            self.marks[Mark.FREED_ON_SIDE] += 1

    def _note_tail(self, growth: Growth, tail: int) -> None:
        if tail < growth.seq - growth.prefix:
            self.marks[Mark.NO_TAIL if not tail else Mark.TAIL_ONLY] += 1


def _estimate(call: calls.Call, page_size: int) -> int:
    """How many pages a call may need, by the rule of section 4 at which a pool merges."""
    match call:
        case calls.ExtendCall():
            return call.tokens // page_size + len(call.seq_lens) + 1
        case calls.DecodeCall():
            return len(call.seq_lens)
        case calls.AllocCall():
            return call.need // page_size
    raise AssertionError(f"{call} allocates nothing")
