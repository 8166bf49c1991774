"""The paged allocator, as its contract has it: pages from the front of a FIFO list, rows of whole pages.

Read beside the contract: `pages(n)` is the number of pages that hold n tokens; the free list is numbered
from page 1 (page 0 is padding); released pages return ascending to the front, or wait staged when
`need_sort`. Every method says what the call is, what the answer must be, and what is true afterwards.

Not covered: who may evict, admission estimates, row tables (entry points), and pools of two sides (SWA).
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from kvproof.model import calls, ops
from kvproof.model.base import AllocatorModel, Expectation, Growth, Outcome, Row
from kvproof.model.marks import LONG_TOKENS, WIDE_ROWS, Mark
from kvproof.model.misuse import misuse_call
from kvproof.model.ops import Op
from kvproof.model.pool import Pool, Queue


class PagedModel(AllocatorModel):
    """One paged pool and the rows in it.

    fifo: the pool is a token pool. Then a batch is served by plain `alloc` of as many slots (`alloc_extend`
    and `alloc_decode` do not exist), frees are neither sorted nor deduplicated, and every release, whatever
    its form, goes to the end in the order it was given.
    """

    def _fresh_pool(self, pages: range) -> Pool:
        return Queue(pages, self.config.need_sort) if self.fifo else super()._fresh_pool(pages)

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        return {
            ops.Extend: self._extend,
            ops.Decode: self._decode,
            ops.Alloc: self._alloc,
            ops.Free: self._free,
            ops.FreeSegment: self._free_segment,
            ops.FreeSegments: self._free_segments,
            ops.FreePages: self._free_page_ids,
            ops.GroupBegin: self._group_begin,
            ops.GroupEnd: self._group_end,
            ops.Clobber: self._clobber,
            ops.Clear: self._clear,
            ops.Resize: self._resize,
            ops.Misuse: self._misuse,
        }

    # --- allocation -------------------------------------------------------------------------------

    def pages(self, tokens: int) -> int:
        """How many pages hold this many tokens."""
        return -(-tokens // self.page_size)

    def _extend(self, op: ops.Extend) -> Expectation:
        growths, fresh = self._batch(op.entries)
        expectation = self._allocate_tokens(growths) if self.fifo else self._grow_pages(growths)
        if expectation.outcome is Outcome.SLOTS:
            self.rows.extend(fresh)
        return expectation

    def _grow_pages(self, growths: list[Growth]) -> Expectation:
        """`alloc_extend` of these rows."""
        call = self._extend_call(growths)
        may_need = call.tokens // self.page_size + len(growths) + 1
        expectation = self._allocate(call, growths, call.pages, may_need)
        if expectation.outcome is Outcome.SLOTS:
            self._note_extend(growths)
        return expectation

    def _extend_call(self, growths: list[Growth]) -> calls.ExtendCall:
        ps = self.page_size
        call = calls.ExtendCall([], [], [], 0, 0)
        for growth in growths:
            prefix, seq = growth.prefix, growth.seq
            call.prefix_lens.append(prefix)
            call.seq_lens.append(seq)
            call.last_locs.append(self.last_loc(growth.row) if prefix else -1)
            call.tokens += seq - prefix
            call.pages += -(-seq // ps) - growth.first_new
        return call

    def _allocate_tokens(self, growths: list[Growth]) -> Expectation:
        """`alloc` for the whole batch; the caller divides the slots among its rows in batch order."""
        need = sum(growth.seq - growth.prefix for growth in growths)
        return self._allocate(calls.AllocCall(need), growths, need, need)

    def _decode(self, op: ops.Decode) -> Expectation:
        growths = self._steps(op.rows)
        if self.fifo:
            return self._allocate_tokens(growths)
        call = calls.DecodeCall(
            [growth.seq for growth in growths], [self.last_loc(growth.row) for growth in growths]
        )
        need = sum(growth.prefix % self.page_size == 0 for growth in growths)
        expectation = self._allocate(call, growths, need, len(growths))
        if expectation.outcome is Outcome.SLOTS:
            self._note_decode(need, len(growths))
        return expectation

    def _steps(self, ordinals: tuple[int, ...]) -> list[Growth]:
        """One token more for each named row that has any."""
        rows = [self.rows[index] for index in self._named_rows(ordinals)]
        return [
            Growth(row, row.length, row.length + 1, len(row.pages))
            for row in rows
            if row.length and self._can_step(row)
        ]

    def _can_step(self, row: Row) -> bool:
        """Whether a lawful caller may decode this row."""
        return True

    def _alloc(self, op: ops.Alloc) -> Expectation:
        need = min(max(op.pages, 0), self.config.num_pages + 1)
        row = self._new_row()
        call = calls.AllocCall(need * self.page_size)
        expectation = self._allocate(call, [Growth(row, 0, call.need, 0)], need, need)
        if expectation.outcome is Outcome.SLOTS and need:
            self.rows.append(row)
        return expectation

    def _allocate(self, call: calls.Call, growths: list[Growth], need: int, may_need: int) -> Expectation:
        """All rows or none: `need` pages from the front, in batch order.

        may_need: the estimate at which a `need_sort` pool merges first, so that it never refuses for pages
        that are merely staged.
        """
        pool = self.pool
        had_staged = bool(pool.staged)
        if pool.merge_for(may_need):
            self.marks[Mark.STAGED_MERGE] += 1
        if need > len(pool.free):
            self._note_refusal(need, had_staged)
            return Expectation(call, Outcome.OOM, self.available)
        taken = pool.take(need)
        slots: list[int] = []
        ps = self.page_size
        at = 0
        for growth in growths:
            row, prefix, seq = growth.row, growth.prefix, growth.seq
            boundary = len(row.pages) * ps
            if prefix < boundary and seq > prefix:
                after_last = row.pages[-1] * ps + prefix - boundary + ps
                slots.extend(range(after_last, after_last + min(seq, boundary) - prefix))
            while boundary < seq:
                page = taken[at]
                at += 1
                row.pages.append(page)
                slots.extend(range(page * ps, page * ps + min(ps, seq - boundary)))
                boundary += ps
            row.length = seq
        self._note_taken(taken)
        return Expectation(call, Outcome.SLOTS, self.available, slots, growths, taken)

    # --- release ----------------------------------------------------------------------------------

    def _free(self, op: ops.Free) -> Expectation:
        slots: list[int] = []
        pages: list[int] = []
        named = self._named_rows(op.rows)
        if not named:
            return self._nothing()
        self._begin_release()
        for index in named:
            row = self.rows[index]
            keep = self._least_kept(row, self.pages(op.keep % (row.length + 1)), segment=False)
            slots.extend(self.slots_of(row, keep * self.page_size, row.length))
            pages.extend(self._cut(row, keep))
        self._drop_empty(named)
        order = op.order % ops.ORDERS
        slots = self._ordered(slots, order)
        if len(named) > 1:
            self.marks[Mark.MANY_ROW_FREE] += 1
        self._release_slots(pages, slots, order)
        return self._done(calls.FreeCall(slots))

    def _begin_release(self) -> None:
        """A call that releases begins. For pools of two sides."""

    def _least_kept(self, row: Row, keep: int, *, segment: bool) -> int:
        """How many pages of the row a lawful free leaves alone at least, when `keep` are to be kept. For
        pools of two sides, where not every page may go by every call."""
        return keep

    def _release_slots(self, pages: list[int], slots: list[int], order: int) -> None:
        """`free`: each page touched, once; slots in the order they are passed in, `order` of Free."""
        self._note_deferred(pages)
        self.pool.release_set(slots if self.fifo else pages)

    def _ordered(self, slots: list[int], order: int) -> list[int]:
        """The slots as `Free.order` passes them. Which pages they touch does not depend on it."""
        if order == ops.BACKWARDS:
            return slots[::-1]
        if order == ops.INTERLEAVED:
            return slots[1::2] + slots[::2]
        if order == ops.ONE_A_PAGE and self.by_page and not self.config.checked:
            return [slot for slot in slots if slot % self.page_size == 0]
        return slots * 2 if order == ops.TWICE and not self.fifo else slots

    def _free_segment(self, op: ops.FreeSegment) -> Expectation:
        if not self.rows:
            return self._nothing()
        index = op.row % len(self.rows)
        row = self.rows[index]
        self._begin_release()
        keep = self._least_kept(row, op.start % (row.length + 1) // self.page_size, segment=True)
        start = keep * self.page_size
        slots = self.slots_of(row, start, row.length)
        self._release_in_order(self._cut(row, keep))
        self._drop_empty([index])
        return self._done(calls.FreeSegmentCall(slots, start))

    def _free_segments(self, op: ops.FreeSegments) -> Expectation:
        if not self.rows:
            return self._nothing()
        index = op.row % len(self.rows)
        row = self.rows[index]
        ps = self.page_size
        self._begin_release()
        keep = self._least_kept(row, op.start % (row.length + 1) // ps, segment=True)
        last = len(row.pages)
        bounds = [keep, *sorted(keep + cut % (last - keep + 1) for cut in op.cuts), last]
        stretches = list(pairwise(bounds))
        segments = [
            (self.slots_of(row, first * ps, min(end * ps, row.length)), first * ps)
            for first, end in stretches
        ]
        pages = self._cut(row, keep)
        self._drop_empty([index])
        # Several calls in one: a later segment's pages end up before an earlier one's.
        for first, end in stretches:
            self._release_in_order(pages[first - keep : end - keep], first - keep)
        return self._done(calls.FreeSegmentsCall(segments))

    def _free_page_ids(self, op: ops.FreePages) -> Expectation:
        if not self.rows:
            return self._nothing()
        index = op.row % len(self.rows)
        row = self.rows[index]
        self._begin_release()
        pages = self._cut(row, op.keep % (len(row.pages) + 1))
        self._drop_empty([index])
        self._release_in_order(pages)
        return self._done(calls.FreePageIdsCall(pages))

    def _cut(self, row: Row, keep: int) -> list[int]:
        """Take the pages beyond the first `keep` from the row."""
        pages = row.pages[keep:]
        if pages and row.length % self.page_size:
            self.marks[Mark.PARTLY_USED_PAGE_FREE] += 1
        if pages and keep:
            self.marks[Mark.TAIL_FREE] += 1
        del row.pages[keep:]
        row.length = min(row.length, keep * self.page_size)
        return pages

    def _drop_empty(self, indices: list[int]) -> None:
        for index in sorted(indices, reverse=True):
            if not self.rows[index].length:
                del self.rows[index]

    def _release_in_order(self, pages: list[int], first: int = 0) -> None:
        """These pages in this order. first: where they begin among the pages cut by this call."""
        self._note_deferred(pages)
        self.pool.release_list(pages)

    # --- groups and the rest ----------------------------------------------------------------------

    def _group_begin(self, _op: ops.GroupBegin) -> Expectation:
        if self.in_group:
            return self._nothing()
        self._each_pool(Pool.begin)
        return self._done(calls.GroupBeginCall())

    def _group_end(self, _op: ops.GroupEnd) -> Expectation:
        if not self.in_group:
            return self._nothing()
        if self.pool.held is not None and all(self.pool.held):
            self.marks[Mark.GROUP_OF_BOTH] += 1
        self._each_pool(Pool.end)
        return self._done(calls.GroupEndCall())

    def _each_pool(self, act: Callable[[Pool], object]) -> None:
        for pool in (self.pool, *self.sides.values()):
            act(pool)

    def _clobber(self, _op: ops.Clobber) -> Expectation:
        if self.deferred():
            self.marks[Mark.CLOBBER_DEFERRED] += 1
        # The worst thing a caller's tensor can turn into is somebody's live slot.
        victim = self.rows[-1].pages[0] * self.page_size if self.rows and self.rows[-1].pages else 0
        return self._done(calls.ClobberCall(victim))

    def _clear(self, _op: ops.Clear) -> Expectation:
        if self.deferred():
            self.marks[Mark.CLEAR_IN_GROUP] += 1
        self._reset()
        return self._done(calls.ClearCall())

    def _resize(self, op: ops.Resize) -> Expectation:
        pages = min(max(op.pages, 1), self.config.most_pages)
        size = pages * self.page_size + op.spare % self.page_size
        if pages != self.config.num_pages:
            self.marks[Mark.GROWN if pages > self.config.num_pages else Mark.SHRUNK] += 1
        self.config = self.config.resized(size)
        self._reset()
        return self._done(calls.ResizeCall(size))

    def _misuse(self, op: ops.Misuse) -> Expectation:
        call = misuse_call(self, op.kind, op.row)
        return self._nothing() if call is None else self._refused(call)

    # --- marks ------------------------------------------------------------------------------------

    def _note_deferred(self, pages: list[int]) -> None:
        if pages and self.in_group:
            self.marks[Mark.FREE_IN_GROUP] += 1

    def _note_extend(self, growths: list[Growth]) -> None:
        marks, ps = self.marks, self.page_size
        if not growths:
            marks[Mark.EMPTY_BATCH] += 1
        elif len(growths) > WIDE_ROWS:
            marks[Mark.WIDE_EXTEND] += 1
        for growth in growths:
            prefix, seq = growth.prefix, growth.seq
            if seq - prefix > LONG_TOKENS:
                marks[Mark.LONG_ROW] += 1
            boundary = growth.first_new * ps
            if seq == prefix:
                marks[Mark.ZERO_ROW] += 1
            elif seq < boundary:
                marks[Mark.INSIDE_PAGE] += 1
            elif seq == boundary:
                marks[Mark.OLD_PAGE_FILLED] += 1
            elif seq % ps and prefix % ps and seq - boundary > ps:
                marks[Mark.THREE_PARTS] += 1
            elif not seq % ps and not prefix % ps:
                marks[Mark.WHOLE_PAGES] += 1

    def _note_decode(self, new_pages: int, batch: int) -> None:
        marks = self.marks
        if batch > WIDE_ROWS:
            marks[Mark.WIDE_DECODE] += 1
        if not batch:
            marks[Mark.EMPTY_BATCH] += 1
        elif not new_pages:
            marks[Mark.DECODE_INSIDE_PAGE] += 1
        elif new_pages == batch:
            marks[Mark.DECODE_NEW_PAGE] += 1
        else:
            marks[Mark.DECODE_MIXED] += 1
