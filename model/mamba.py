"""The Mamba slot allocator, as its contract has it: one slot is one request's whole state.

Slots 1 … size, first in, first out; slot 0 is a dummy. Several can be set aside for a batch of requests
(`alloc_group_begin`), single ones are then served from there, and the rest goes back.

Not covered: what a slot holds.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Growth, Outcome
from kvproof.model.marks import Mark
from kvproof.model.ops import Op
from kvproof.model.token import TokenModel


class MambaModel(TokenModel):
    """State slots. A row is the slots of one `alloc`. aside: slots set aside by an open group, in order."""

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        known = super()._handle()
        kept = (ops.Alloc, ops.Free, ops.Clobber, ops.Clear, ops.Misuse)
        return {op_type: known[op_type] for op_type in kept} | {
            ops.AllocGroupBegin: self._set_aside,
            ops.AllocGroupEnd: self._put_back,
        }

    def _reset(self) -> None:
        super()._reset()
        self.aside: list[int] = []

    def _holders(self, side: str) -> Iterator[tuple[list[int], str]]:
        yield from super()._holders(side)
        yield self.aside, "set aside"

    def _allocate(self, call: calls.Call, growths: list[Growth], need: int, may_need: int) -> Expectation:
        if need != 1 or not self.aside:
            return super()._allocate(call, growths, need, may_need)
        slot = self.aside.pop(0)
        row = growths[0].row
        row.pages, row.length = [slot], 1
        self.marks[Mark.SERVED_FROM_ASIDE] += 1
        return Expectation(call, Outcome.SLOTS, self.available, [slot], growths, [slot])

    def adopt(self, expectation: Expectation, pages: list[int], peers: dict[str, list[int]]) -> None:
        """See AllocatorModel. Slots set aside are as good as free ones."""
        predicted = expectation.taken
        both = predicted + self.aside + self.pool.free
        for page in pages:
            both.remove(page)
        self.aside, self.pool.free = both[: len(self.aside)], both[len(self.aside) :]
        expectation.growths[0].row.pages[:] = pages
        expectation.taken = pages

    def _set_aside(self, op: ops.AllocGroupBegin) -> Expectation:
        want = min(max(op.slots, 0), self.config.num_pages + 1)
        if self.aside:
            self.marks[Mark.ASIDE_TWICE] += 1
        self._return_aside()
        if want <= len(self.pool.free):
            self.aside = self.pool.take(want)
        else:
            self.marks[Mark.ASIDE_REFUSED] += 1
        return self._done(calls.AllocGroupBeginCall(want))

    def _put_back(self, _op: ops.AllocGroupEnd) -> Expectation:
        if self.aside:
            self.marks[Mark.ASIDE_RETURNED] += 1
        self._return_aside()
        return self._done(calls.AllocGroupEndCall())

    def _return_aside(self) -> None:
        self.pool.release_list(self.aside)
        self.aside = []
