"""The token allocator, as its contract has it: pages of one slot, released to the *end* of the list.

It differs from the paged allocator in three things: a batch is served by plain `alloc` of as many slots
(`alloc_extend` and `alloc_decode` do not exist), frees are neither sorted nor deduplicated, and every
release, whatever its form, goes to the end in the order it was given.
"""

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Growth, Outcome
from kvproof.model.paged import PagedModel


class TokenModel(PagedModel):
    """One token pool and the rows in it. A page is a slot."""

    def _extend(self, op: ops.Extend) -> Expectation:
        growths, fresh = self._batch(op.entries)
        expectation = self._allocate_tokens(growths)
        if expectation.outcome is Outcome.SLOTS:
            self.rows.extend(fresh)
        return expectation

    def _decode(self, op: ops.Decode) -> Expectation:
        return self._allocate_tokens(self._steps(op.rows))

    def _allocate_tokens(self, growths: list[Growth]) -> Expectation:
        """`alloc` for the whole batch; the caller divides the slots among its rows in batch order."""
        need = sum(growth.seq - growth.prefix for growth in growths)
        return self._allocate(calls.AllocCall(need), growths, need, need)

    def _ordered(self, slots: list[int], order: int) -> list[int]:
        return super()._ordered(slots, ops.IN_ORDER if order == ops.TWICE else order)

    def _release_slots(self, pages: list[int], slots: list[int]) -> None:
        self._release_pages(slots)

    def _release_pages(self, pages: list[int]) -> None:
        if self.group_slots is not None:
            self._note_deferred(pages)
            self.group_slots.extend(pages)
        else:
            self._return(pages)

    def _return(self, pages: list[int]) -> None:
        self._released.update(pages)
        (self.staged if self.config.need_sort else self.free_pages).extend(pages)

    def _return_group(self, slots: list[int], pages: list[int]) -> None:
        self._return(slots)
