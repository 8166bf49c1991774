"""The Mamba slot allocator: a slot holds one request's whole state; slot 0 is a dummy, never handed out.

    free_slots     what the next allocation takes from the front; released slots go to its end
    set aside      slots that an open group has taken for a batch of requests; single allocations are served
                   from there, and the group's end returns the rest

Nothing waits for the device except checked mode. Not covered: what a slot holds, and pools whose states share
memory with KV pages.
"""

import operator
from typing import SupportsIndex

import torch
from torch import Tensor

from kvproof.impl.base import positive, require_vector, wants_checks
from kvproof.impl.checked import Ledger
from kvproof.impl.errors import AllocatorError


class MambaSlotAllocator:
    """State slots `1 … size`, first in, first out.

    size: how many. device: where the list lives. checked: verify the contract on every call, at the price of
    reading arguments back; None asks the environment variable SGLANG_DEBUG_MEMORY_POOL. Raises
    AllocatorError when size is below 1.
    """

    free_slots: Tensor
    _aside: Tensor
    _ledger: Ledger | None

    def __init__(
        self, size: SupportsIndex, device: str | torch.device, *, checked: bool | None = None
    ) -> None:
        self.size = positive(type(self).__name__, "size", size)
        self.device = device
        self.checked = wants_checks(checked)
        self.clear()

    def available_size(self) -> int:
        """Free slots. What an open group has set aside does not count."""
        return self.free_slots.numel()

    def schedulable_available_size(self) -> int:
        """What a scheduler may plan with: `available_size`."""
        return self.available_size()

    def alloc(self, need_size: SupportsIndex) -> Tensor | None:
        """The first `need_size` slots, int64; None when too few are free.

        A single slot comes from those set aside by an open group while there are any. Raises AllocatorError
        when need_size is negative.
        """
        need = _count("alloc", "need_size", need_size)
        self._audit("alloc")
        from_aside = need == 1 and self._aside.numel() > 0
        source = self._aside if from_aside else self.free_slots
        if need > source.numel():
            return None
        slots = source[:need].clone()
        if self._ledger is not None:
            self._ledger.hand_out(slots.tolist(), None)
        if from_aside:
            self._aside = self._aside[need:]
        else:
            self.free_slots = self.free_slots[need:]
        return slots

    def alloc_group_begin(self, num_reqs: SupportsIndex) -> None:
        """Set slots aside for `num_reqs` requests, all or none.

        What an earlier group still has goes back to the end of the free list first. Raises AllocatorError
        when num_reqs is negative.
        """
        count = _count("alloc_group_begin", "num_reqs", num_reqs)
        self._audit("alloc_group_begin")
        self._return_aside()
        if count <= self.free_slots.numel():
            self._aside, self.free_slots = self.free_slots[:count], self.free_slots[count:]

    def alloc_group_end(self) -> None:
        """Return what is still set aside to the end of the free list; without a group there is nothing."""
        self._return_aside()

    def free(self, free_index: Tensor) -> None:
        """Release these slots, to the end of the free list in this order.

        free_index: [n] int32 or int64; the caller vouches that none is named twice. Does not synchronise.
        """
        if free_index.numel() == 0:
            return
        require_vector("free", "free_index", free_index, self.free_slots.device)
        if self._ledger is not None:
            self._ledger.release_slots("free", free_index.tolist(), repeats=False)
        self.free_slots = torch.cat((self.free_slots, free_index.to(torch.int64)))

    def clear(self) -> None:
        """Back to the initial state: all slots free and ascending, none set aside or live."""
        self.free_slots = torch.arange(1, self.size + 1, dtype=torch.int64, device=self.device)
        self._aside = self.free_slots[:0]
        self._ledger = Ledger(1, self.size) if self.checked else None

    def _return_aside(self) -> None:
        self.free_slots = torch.cat((self.free_slots, self._aside))
        self._aside = self._aside[:0]

    def _audit(self, call: str) -> None:
        """Checked mode: number the call and check the lists. To the ledger, slots set aside are staged."""
        if self._ledger is not None:
            self._ledger.begin_allocation(call, self.free_slots.tolist(), self._aside.tolist())


def _count(call: str, name: str, value: SupportsIndex) -> int:
    number = operator.index(value)
    if number < 0:
        raise AllocatorError(
            call, f"{name} >= 0", f"{number}", "Ask for as many slots as there are requests."
        )
    return number
