"""What the HiSparse allocators share: a logical side, a device pool, the mapping between them, and buffers.

Every token has a logical slot; a device slot holds its KV, or that of a block of tokens, for as long as it
is needed there. Prefill takes both, decode the logical ones alone, and a request that goes on to decode
turns the device pages of its row into a buffer, which belongs to whoever asked for it and outlives the row.

    logical side   what callers hold                alloc_extend          both sides, then the mapping
    mapping        entries of all logical pages,    free                  logical pages, device pages mapped
                   0 = no device slot, and -1                             to them, and their entries
                   for a last_loc of -1             free_hisparse         the last two
    device pool    pages of rows and of buffers     alloc_device_buffer   a row's device pages, and more

A page of the mapping is that of one logical page; all its entries lead to one device page. The device side
of a free is resolved, and the mapping cleared, when it is called, and waits for the device: how many pages
go is known there alone. An allocation does not wait, except for a buffer.

These modules work with the inner parts of the pools, which are this package's own. Not covered: extending
(`hisparse.py`, `hisparse_v4.py`), and who broke the contract (`hisparse_checked.py`).
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvproof.impl.base import require_vector
from kvproof.impl.checked import Ledger
from kvproof.impl.errors import AllocatorError
from kvproof.impl.hisparse_checked import DeviceLedger
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.swa import SWATokenToKVPoolAllocator
from kvproof.impl.swa_kernels import take_peers_triton
from kvproof.impl.swa_reference import take_peers_reference


class HisparseSides(ABC):
    """A logical allocator, a device pool, and `full_to_hisparse_device_index_mapping` between them.

    compress_ratio: logical slots for which a device slot stands. page_size, hisparse_page_size: slots in a
    page of either side, the one being compress_ratio times the other.
    """

    compress_ratio: ClassVar[int]

    logical_attn_allocator: PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator
    hisparse_attn_allocator: PagedTokenToKVPoolAllocator
    full_to_hisparse_device_index_mapping: Tensor
    page_size: int
    hisparse_page_size: int
    _kvcache: Any
    _ledger: DeviceLedger | None

    def _make_mapping(self, entries: int, owner: Any) -> None:
        """A mapping of so many entries, all unmapped, told to its owner among the KV buffers."""
        mapping = torch.zeros(entries + 1, dtype=torch.int64, device=self.hisparse_attn_allocator.device)
        mapping[-1:].fill_(-1)
        self.full_to_hisparse_device_index_mapping = mapping
        register = getattr(owner, "register_mapping", None)
        if register is not None:
            register(mapping)

    # --- what it is and has -----------------------------------------------------------------------

    @property
    def use_triton_kernels(self) -> bool:
        """Whether kernels or the torch reference do the work, on both sides; as at the paged allocator."""
        return self.hisparse_attn_allocator.use_triton_kernels

    @use_triton_kernels.setter
    def use_triton_kernels(self, value: bool) -> None:
        self.hisparse_attn_allocator.use_triton_kernels = value
        self.logical_attn_allocator.use_triton_kernels = value

    def available_size(self) -> int:
        """Free and staged slots, in logical ones, of the side that has fewer."""
        device = self.hisparse_attn_allocator.available_size() * self.compress_ratio
        return min(self.logical_attn_allocator.available_size(), device)

    def get_kvcache(self) -> Any:
        """The kvcache given at construction."""
        return self._kvcache

    def debug_print(self) -> str:
        """One line on the state of both sides, for logs. Does not synchronise."""
        logical, device = self.logical_attn_allocator, self.hisparse_attn_allocator
        return f"logical: {logical.debug_print()}; device: {device.debug_print()}"

    def get_last_loc_compressed(self, last_locs: Tensor) -> Tensor:
        """The mapping's entries of the last complete blocks of rows that end with these logical slots; -1 for
        none."""
        return (last_locs + 1) // self.compress_ratio - 1

    def get_last_loc_hisparse_device(self, last_locs: Tensor) -> Tensor:
        """The device slots of these blocks, int64: 0 for unmapped ones, -1 for none."""
        entries = self.get_last_loc_compressed(last_locs.to(torch.int64))
        return self.full_to_hisparse_device_index_mapping[entries]

    # --- allocation -------------------------------------------------------------------------------

    def alloc_decode(self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
        """The logical side's `alloc_decode`. The new slots have no device slots."""
        return self.logical_attn_allocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def alloc_logical_only(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
    ) -> Tensor | None:
        """The logical side's `alloc_extend`. The new slots have no device slots."""
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        return self.logical_attn_allocator.alloc_extend(*lens, last_loc, extend_num_tokens)

    def alloc_device_buffer(self, allocated_indices: Tensor, need_size: int) -> Tensor | None:
        """Turn the device slots of a row into a buffer of `need_size` device slots, whole pages.

        allocated_indices: [n] int32 or int64, entries of the mapping in row order (logical slots; compressed
        ones where there are such). They are unmapped. The buffer begins with the device slots that they had;
        those beyond need_size are released as a set of pages; a partial last page is completed, and pages are
        added from the front of the free list, staged pages merged in when it is too short.

        Returns [need_size] int64 device slots, or None when too few are free; then everything, the mapping
        included, is as it was but for the merge. Synchronises. Raises AllocatorError unless need_size is a
        number of whole pages.
        """
        call = "alloc_device_buffer"
        device, ps = self.hisparse_attn_allocator, self.hisparse_page_size
        pages, remainder = divmod(operator.index(need_size), ps)
        if pages < 0 or remainder:
            raise AllocatorError(
                call, f"a size of whole pages, k * {ps} >= 0", f"{need_size}", "Round up to the page size."
            )
        mapping = self.full_to_hisparse_device_index_mapping
        require_vector(call, "allocated_indices", allocated_indices, mapping.device)
        entries = allocated_indices.to(torch.int64)
        own_pages: list[int] = []
        if self._ledger is not None:
            device._audited(call)
            own_pages = self._ledger.check_buffer(entries.tolist())
        own = mapping[entries]
        own = own[own > 0]
        count = own.numel()
        extra = max(pages - -(-count // ps), 0)
        device._merge_if_short(extra)
        if extra > device.free_pages.numel():
            return None

        mapping.index_fill_(0, entries, 0)
        if count < need_size:
            room = torch.arange(1, -count % ps + 1, device=own.device)
            fresh = device.free_pages[:extra].unsqueeze(1) * ps + torch.arange(ps, device=own.device)
            buffer = torch.cat((own, own[-1:] + room, fresh.reshape(-1)))
        else:
            buffer = own[:need_size]
        new_pages = device.free_pages[:extra]
        device.free_pages = device.free_pages[extra:]
        if count > need_size:
            device._take_back(own[need_size:] // ps, repeats=True)
        if self._ledger is not None:
            self._ledger.note_buffer([*own_pages[:pages], *new_pages.tolist()], own_pages[pages:])
        return buffer

    # --- release ----------------------------------------------------------------------------------

    def free(self, free_index: Tensor) -> None:
        """Release whole logical pages as the logical side does, and the device pages they are mapped to.

        free_index: [n] int32 or int64, logical slots. The device pages go once, ascending; their entries
        become 0. Synchronises.
        """
        if free_index.numel() == 0:
            return
        require_vector("free", "free_index", free_index, self.full_to_hisparse_device_index_mapping.device)
        ledger = self._ledger
        pages = [] if ledger is None else ledger.check_free("free", free_index.tolist())
        self.logical_attn_allocator.free(free_index)
        self._release_device([torch.unique(free_index // self.page_size)])
        if ledger is not None:
            ledger.retire(pages)

    def free_hisparse(self, free_indices: Tensor) -> None:
        """The device half of `free`: the logical slots stay, without device slots."""
        call = "free_hisparse"
        if free_indices.numel() == 0:
            return
        device = self.full_to_hisparse_device_index_mapping.device
        require_vector(call, "free_indices", free_indices, device)
        ledger = self._ledger
        pages = [] if ledger is None else ledger.check_free_hisparse(free_indices.tolist())
        self._release_device([torch.unique(free_indices // self.page_size)])
        if ledger is not None:
            ledger.retire(pages)

    def free_hisparse_indices(self, buffer_indices: Tensor) -> None:
        """Release the pages of a buffer, whole, once, ascending.

        buffer_indices: [n] int32 or int64, device slots in any order, repeats allowed. The padding page is
        never released. Synchronises.
        """
        call = "free_hisparse_indices"
        if buffer_indices.numel() == 0:
            return
        device, ps = self.hisparse_attn_allocator, self.hisparse_page_size
        require_vector(call, "buffer_indices", buffer_indices, device.free_pages.device)
        if self._ledger is not None:
            self._ledger.free_buffer(buffer_indices.tolist())
        slots = buffer_indices[buffer_indices >= ps].to(torch.int64)
        if slots.numel():
            device._take_back(slots // ps, repeats=True)

    def free_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """Release the pages of one row's positions `[start_pos, start_pos + n)`, and their device pages.

        As the logical side does, in row order; the device pages go ascending, each segment's as a set, and
        this synchronises. Raises AllocatorError unless start_pos is a multiple of the page size.
        """
        self._free_segments("free_segment", [(free_index, start_pos)])

    def free_segments(self, segments: Iterable[tuple[Tensor, int]]) -> None:
        """As `free_segment` for each `(slots, start_pos)` in turn, but all or none."""
        self._free_segments("free_segments", segments)

    def _free_segments(self, call: str, segments: Iterable[tuple[Tensor, int]]) -> None:
        parts = [(slots, start) for slots, start in segments if slots.numel()]
        if not parts:
            return
        ledger, pages = self._ledger, list[int]()
        if ledger is not None:
            pages = ledger.check_free(call, [slot for slots, _ in parts for slot in slots.tolist()])
        self.logical_attn_allocator._free_segments(call, parts)
        # From a page boundary on, every page_size-th slot stands for one page.
        self._release_device([slots[:: self.page_size] // self.page_size for slots, _ in parts])
        if ledger is not None:
            ledger.retire(pages)

    def _release_device(self, parts: list[Tensor]) -> None:
        """Unmap logical pages, each named once, and release the device pages they had, part after part."""
        compute = take_peers_triton if self.use_triton_kernels else take_peers_reference
        ps = self.hisparse_page_size
        pages = compute(torch.cat(parts) * ps, self.full_to_hisparse_device_index_mapping, ps)
        for part in torch.split(pages, [part.numel() for part in parts]):
            mapped = part[part > 0]
            if mapped.numel():
                self.hisparse_attn_allocator._take_back(mapped, repeats=True)

    # --- beginnings -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Back to the initial state: everything free, nothing mapped, no buffer, no group."""
        self.logical_attn_allocator.clear()
        self.hisparse_attn_allocator.clear()
        mapping = self.full_to_hisparse_device_index_mapping
        mapping[:-1].zero_()
        logical, device = self._logical_ledger(), self.hisparse_attn_allocator._ledger
        self._ledger = None
        if logical is not None and device is not None:
            rest = mapping, self.compress_ratio, self.hisparse_page_size
            self._ledger = DeviceLedger(logical, device, *rest)

    @abstractmethod
    def _logical_ledger(self) -> Ledger | None:
        """The ledger of the logical slots, fresh; None when unchecked."""
