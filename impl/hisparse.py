"""The HiSparse allocator: logical slots for every token, device slots for those whose KV is on the device.

The logical pool has `size * host_to_device_ratio` slots, the device pool `size`; both are paged, at every
page size. Prefill takes from both or from neither, which is decided from page counts before anything is
merged, launched or changed. Groups of frees are no-ops: a free acts at once.

Not covered: what both variants share (`hisparse_sides.py`), compressed device slots (`hisparse_v4.py`), and
what is copied where.
"""

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from kvproof.impl.base import positive
from kvproof.impl.checked import Ledger
from kvproof.impl.errors import AllocatorError, StateError, UnsupportedCallError
from kvproof.impl.hisparse_checked import DeviceLedger
from kvproof.impl.hisparse_sides import HisparseSides
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.swa_kernels import swa_extend_triton
from kvproof.impl.swa_reference import swa_extend_reference


class HiSparseTokenToKVPoolAllocator(HisparseSides):
    """A device pool of `size` slots under a logical pool of `size * host_to_device_ratio`.

    page_size, dtype, device, need_sort, checked: as `PoolAllocator`, for both pools. kvcache: kept for
    callers; when it has `register_mapping` it is given the mapping. Raises AllocatorError for sizes and a
    ratio below 1.

    logical_attn_allocator, hisparse_attn_allocator: the pools. full_to_hisparse_device_index_mapping:
    [size * ratio + page_size + 1] int64.
    """

    compress_ratio = 1

    logical_attn_allocator: PagedTokenToKVPoolAllocator

    def __init__(
        self,
        size: SupportsIndex,
        page_size: SupportsIndex,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        host_to_device_ratio: SupportsIndex = 2,
        *,
        checked: bool | None = None,
    ) -> None:
        name = type(self).__name__
        rest = page_size, dtype, device, kvcache, need_sort
        logical = positive(name, "size", size) * positive(name, "host_to_device_ratio", host_to_device_ratio)
        self.logical_attn_allocator = PagedTokenToKVPoolAllocator(logical, *rest, checked=checked)
        self.hisparse_attn_allocator = PagedTokenToKVPoolAllocator(size, *rest, checked=checked)
        self.page_size = self.hisparse_page_size = self.logical_attn_allocator.page_size
        self.dtype = dtype
        self.device = device
        self.need_sort = need_sort
        self.checked = self.logical_attn_allocator.checked
        self._kvcache = kvcache
        self._spec_scratch_capacity = 0
        self._spec_device_buffer_size = 0
        self._make_mapping(logical + self.page_size, kvcache)
        self.clear()

    # --- what it is and has -----------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Capacity of the logical pool in slots."""
        return self.logical_attn_allocator.size

    @property
    def size_full(self) -> int:
        """`size`."""
        return self.size

    def configure_spec_scratch(self, capacity: int, *, device_buffer_size: int = 0) -> None:
        """What `request_slot_reserve` is to count on, in device slots.

        capacity: a request's scratch for speculation. device_buffer_size: of its buffer, counted with a
        capacity only. Raises AllocatorError unless both are whole pages.
        """
        for name, size in (("capacity", capacity), ("device_buffer_size", device_buffer_size)):
            if size < 0 or size % self.page_size:
                expected = f"{name} of whole pages, k * {self.page_size} >= 0"
                remedy = "Round up to the page size."
                raise AllocatorError("configure_spec_scratch", expected, f"{size}", remedy)
        self._spec_scratch_capacity = capacity
        self._spec_device_buffer_size = device_buffer_size if capacity else 0

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        """Device slots that a request will take beyond those of its prefill.

        That is what its buffer lacks when it takes over the `prefill_tokens` slots, and its scratch unless it
        has a row already, and the scratch with it.
        """
        pages = -(-prefill_tokens // self.page_size)
        missing = max(self._spec_device_buffer_size - pages * self.page_size, 0)
        return missing + (0 if has_req_pool_slot else self._spec_scratch_capacity)

    # --- allocation -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> Tensor | None:
        """The first `need_size` slots of both pools, mapped one to one; with pages of one slot only.

        Returns the logical slots, int64, or None when either pool has too few. Raises AllocatorError when
        need_size is negative, UnsupportedCallError with larger pages.
        """
        call = "alloc"
        logical, device = self.logical_attn_allocator, self.hisparse_attn_allocator
        if self.page_size > 1:
            actual = f"pages of {self.page_size}"
            raise UnsupportedCallError(call, "pages of one slot", actual, "Use alloc_extend.")
        need = operator.index(need_size)
        if need < 0:
            raise AllocatorError(call, "a size >= 0", f"{need}", "Ask for as many slots as there are tokens.")
        self._audited(call)
        if need > min(logical.available_size(), device.available_size()):
            return None
        logical._merge_if_short(need)
        device._merge_if_short(need)
        mapping = self.full_to_hisparse_device_index_mapping
        before = None if self._ledger is None else mapping.clone()
        slots = logical.free_pages[:need].clone()
        mapping[slots] = device.free_pages[:need]
        self._hand_out(slots, None, before)
        logical.free_pages, device.free_pages = logical.free_pages[need:], device.free_pages[need:]
        return slots

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Tensor | None:
        """Grow each row of a batch on both sides, all or none.

        Parameters, result and errors as `PagedTokenToKVPoolAllocator.alloc_extend`; last_loc are logical
        slots. The new slots are mapped. Tokens of a row that goes on inside a page whose last slot has no
        device slot, a caller's error, get none. Does not synchronise.
        """
        call, ps = "alloc_extend", self.page_size
        logical, device = self.logical_attn_allocator, self.hisparse_attn_allocator
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        logical._require_extend(call, *lens, last_loc)
        ledger = self._audited(call)
        if ledger is not None and logical._ledger is not None:
            prefixes, prefixes_cpu, seqs, seqs_cpu = (tensor.tolist() for tensor in lens)
            last = last_loc.tolist()
            logical._ledger.check_extend(
                prefixes, prefixes_cpu, seqs, seqs_cpu, last, extend_num_tokens, num_new_pages
            )
            ledger.check_growth(prefixes, seqs, last)
        need = logical._new_pages(call, prefix_lens_cpu, seq_lens_cpu, extend_num_tokens, num_new_pages)
        if need > min(logical.available_size(), device.available_size()) // ps:
            return None
        # Both sides merge as the paged allocator does.
        may_need = max(extend_num_tokens // ps + prefix_lens.numel() + 1, need)
        logical._merge_if_short(may_need)
        device._merge_if_short(may_need)
        compute = swa_extend_triton if self.use_triton_kernels else swa_extend_reference
        mapping = self.full_to_hisparse_device_index_mapping
        before = None if ledger is None else mapping.clone()
        pages = logical.free_pages[:need], device.free_pages[:need]
        slots = compute(prefix_lens, seq_lens, last_loc, *pages, mapping, extend_num_tokens, None, ps)
        self._hand_out(slots, (seq_lens_cpu - prefix_lens_cpu).tolist(), before)
        logical.free_pages, device.free_pages = logical.free_pages[need:], device.free_pages[need:]
        return slots

    def _audited(self, call: str) -> DeviceLedger | None:
        """The ledger with this allocation begun and both lists checked; None when unchecked."""
        if self._ledger is not None:
            self.logical_attn_allocator._audited(call)
            self.hisparse_attn_allocator._audited(call)
        return self._ledger

    def _hand_out(self, slots: Tensor, counts: list[int] | None, before: Tensor | None) -> None:
        """Checked mode: write down what is about to be returned, or put the mapping back as it was before."""
        logical = self.logical_attn_allocator._ledger
        if before is None or logical is None or self._ledger is None:
            return
        try:
            new = logical.reckon(slots.tolist(), counts)
            self._ledger.hand_out(slots.tolist(), counts)
        except StateError:
            self.full_to_hisparse_device_index_mapping.copy_(before)
            raise
        logical.write_down(new)

    # --- release ----------------------------------------------------------------------------------

    def free_full(self, free_index: Tensor) -> None:
        """`free`: there is no side that outlives the logical one."""
        self.free(free_index)

    def free_full_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """`free_segment`."""
        self._free_segments("free_full_segment", [(free_index, start_pos)])

    def free_full_segments(self, segments: Iterable[tuple[Tensor, int]]) -> None:
        """`free_segments`."""
        self._free_segments("free_full_segments", segments)

    def free_group_begin(self) -> None:
        """Nothing: frees act at once, in a group or not."""

    def free_group_end(self) -> None:
        """Nothing."""

    def _logical_ledger(self) -> Ledger | None:
        ledger = self.logical_attn_allocator._ledger
        if ledger is not None:
            ledger.side = "logical"
        return ledger
