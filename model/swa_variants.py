"""The two sliding-window allocators without a second list of pages: one ring a request, and one pool for
both.

*Ring*: the sliding-window side is a ring of tokens that belongs to a request's row in the row table, so only
the full side is paged; the mapping stays 0 and releases of the other side do nothing. *Pure*: a model without
full attention; one token pool plays both sides, every slot is its own peer, and what releases one side
releases the slot, once.

Not covered: two pools (`swa.py`), and which request rows are free (entry points).
"""

from collections.abc import Callable
from typing import Any

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Outcome
from kvproof.model.ops import Op
from kvproof.model.paged import PagedModel
from kvproof.model.token import TokenModel


class SwaRingModel(PagedModel):
    """A full pool of pages, and rings."""

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        handlers = super()._handle()
        for op_type in (ops.FreePages, ops.Alloc, ops.Resize):
            del handlers[op_type]
        return handlers | {
            ops.ExtendTail: self._extend_tail,
            ops.FreeSwa: self._free_swa,
            ops.FreeSwaSegment: self._free_swa_segment,
            ops.FreeFull: self._free_full,
            ops.FreeFullSegment: self._free_full_segment,
        }

    @property
    def mappings(self) -> dict[str, list[int]]:
        """See AllocatorModel."""
        return {"swa": [0] * (self.config.size + self.page_size) + [-1]}

    @property
    def sizes(self) -> dict[str, int]:
        """See AllocatorModel."""
        ring = self.pages(self.config.ring) * self.page_size
        return {"full": self.available, "swa": self.config.request_rows * ring}

    def _extend_tail(self, op: ops.ExtendTail) -> Expectation:
        growths, fresh = self._batch([(op.row, op.tokens)])
        call = self._extend_call(growths)
        call.tail = op.tail % (call.tokens + 1)
        expectation = self._allocate(call, growths, call.pages, call.tokens // self.page_size + 2)
        if expectation.outcome is Outcome.SLOTS:
            self.rows.extend(fresh)
        return expectation

    def _free_swa(self, op: ops.FreeSwa) -> Expectation:
        if not self.rows:
            return self._nothing()
        row = self.rows[op.row % len(self.rows)]
        return self._done(calls.FreeCall(self.slots_of(row, 0, row.length), "free_swa"))

    def _free_swa_segment(self, op: ops.FreeSwaSegment) -> Expectation:
        if not self.rows:
            return self._nothing()
        row = self.rows[op.row % len(self.rows)]
        return self._done(calls.FreeSegmentCall(self.slots_of(row, 0, row.length), 0, "free_swa_segment"))

    def _free_full(self, op: ops.FreeFull) -> Expectation:
        return _by_method(self._free(ops.Free((op.row,), op.keep)), "free_full")

    def _free_full_segment(self, op: ops.FreeFullSegment) -> Expectation:
        return _by_method(self._free_segment(ops.FreeSegment(op.row, op.keep)), "free_full_segment")


class PureSwaModel(TokenModel):
    """One token pool that is both sides."""

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        handlers = super()._handle()
        for op_type in (ops.FreePages, ops.Resize):
            del handlers[op_type]
        return handlers | {
            ops.FreeSwa: self._free_swa,
            ops.FreeSwaSegment: self._free_swa_segment,
            ops.FreeFull: self._free_full,
            ops.FreeFullSegment: self._free_full_segment,
        }

    @property
    def sizes(self) -> dict[str, int]:
        """See AllocatorModel."""
        return {"full": self.available, "swa": self.available}

    def _free_swa(self, op: ops.FreeSwa) -> Expectation:
        return _by_method(self._free(ops.Free((op.row,), op.start)), "free_swa")

    def _free_swa_segment(self, op: ops.FreeSwaSegment) -> Expectation:
        return _by_method(self._free_segment(ops.FreeSegment(op.row, op.start)), "free_swa_segment")

    def _free_full(self, op: ops.FreeFull) -> Expectation:
        """There is no full side: nothing happens, and the row lives on."""
        if not self.rows:
            return self._nothing()
        row = self.rows[op.row % len(self.rows)]
        return self._done(calls.FreeCall(self.slots_of(row, 0, row.length), "free_full"))

    def _free_full_segment(self, op: ops.FreeFullSegment) -> Expectation:
        if not self.rows:
            return self._nothing()
        row = self.rows[op.row % len(self.rows)]
        return self._done(calls.FreeSegmentCall(self.slots_of(row, 0, row.length), 0, "free_full_segment"))


def _by_method(expectation: Expectation, method: str) -> Expectation:
    """The same release by another method."""
    call = expectation.call
    if isinstance(call, (calls.FreeCall, calls.FreeSegmentCall)):
        call.method = method
    return expectation
