"""HiSparse for DeepSeek-V4: the logical side is a sliding-window allocator, the device side is compressed.

A device slot stands for a block of four tokens, and comes with the token that completes the block: the one
at slot s with (s + 1) % 4 == 0, whose entry in the mapping is s // 4. So a logical page of `page_size` slots
is a page of `page_size // 4` entries, and of device slots:

    full page 2   16 17 18 19 | 20 21 22 23     of 8 slots, with swa peers as well
    entries                 4 |           5     page 2 of the mapping, of 2 entries
    device                 14 |          15     device page 7

This is a wrapper: whatever the sliding-window allocator can do and this module does not say otherwise about
is passed on to it. Groups are those of the pools: peers and device slots are resolved at the call, released
at the end.

Not covered: what both variants share (`hisparse_sides.py`), and the sliding-window side (`swa.py`).
"""

from collections.abc import Iterable
from typing import Any, Final, NoReturn

from torch import Tensor

from kvproof.impl.checked import Ledger
from kvproof.impl.errors import AllocatorError, UnsupportedCallError
from kvproof.impl.hisparse_kernels import compressed_extend_triton
from kvproof.impl.hisparse_reference import compressed_extend_reference
from kvproof.impl.hisparse_sides import HisparseSides
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.swa import SWATokenToKVPoolAllocator
from kvproof.impl.swa_sides import Pool

_RATIO: Final = 4


class DeepSeekV4HiSparseTokenToKVPoolAllocator(HisparseSides):
    """A device pool of compressed slots beside a sliding-window allocator.

    logical_attn_allocator: with pages of a multiple of four slots. Of its kvcache, `c4_kv_pool` says the
    size of the device pool and of its pages (`size`, `page_size`, in device slots) and is given the mapping
    when it has `register_mapping`; `c4_logical_size` is the number of entries before the last page, a
    quarter of the full side's size when it is absent. checked: as the logical allocator when None. Raises
    AllocatorError for other page sizes.

    hisparse_attn_allocator: the device pool. full_to_hisparse_device_index_mapping:
    [entries + hisparse_page_size + 1] int64.
    """

    compress_ratio = _RATIO

    logical_attn_allocator: SWATokenToKVPoolAllocator

    def __init__(
        self, logical_attn_allocator: SWATokenToKVPoolAllocator, *, checked: bool | None = None
    ) -> None:
        logical = logical_attn_allocator
        self._kvcache = logical.get_kvcache()
        self.hisparse_kvcache = self._kvcache.c4_kv_pool
        self.page_size = logical.page_size
        self.hisparse_page_size = self.page_size // _RATIO
        if self.page_size % _RATIO or self.hisparse_kvcache.page_size != self.hisparse_page_size:
            raise AllocatorError(
                type(self).__name__,
                f"logical pages of k * {_RATIO} slots, and device pages of k",
                f"pages of {self.page_size} and of {self.hisparse_kvcache.page_size}",
                "Build both for one page size.",
            )
        self.logical_attn_allocator = logical
        self.dtype = logical.dtype
        self.device = logical.device
        self.need_sort = logical.need_sort
        self.checked = logical.checked if checked is None else checked
        self.hisparse_attn_allocator = PagedTokenToKVPoolAllocator(
            self.hisparse_kvcache.size,
            self.hisparse_page_size,
            self.dtype,
            self.device,
            self.hisparse_kvcache,
            self.need_sort,
            checked=self.checked,
        )
        self._map()
        self.clear()

    def _map(self) -> None:
        entries = getattr(self._kvcache, "c4_logical_size", self.size_full // _RATIO)
        self._make_mapping(entries + self.hisparse_page_size, self.hisparse_kvcache)

    # --- what it is and has -----------------------------------------------------------------------

    @property
    def full_attn_allocator(self) -> Pool:
        """The logical side's full pool."""
        return self.logical_attn_allocator.full_attn_allocator

    @property
    def swa_attn_allocator(self) -> Pool:
        """The logical side's swa pool."""
        return self.logical_attn_allocator.swa_attn_allocator

    @property
    def full_to_swa_index_mapping(self) -> Tensor:
        """The logical side's own mapping."""
        return self.logical_attn_allocator.full_to_swa_index_mapping

    @property
    def size(self) -> int:
        """Capacity of the logical side in slots."""
        return self.logical_attn_allocator.size

    @property
    def size_full(self) -> int:
        """Capacity of the full pool in slots."""
        return self.logical_attn_allocator.size_full

    @property
    def size_swa(self) -> int:
        """Capacity of the swa pool in slots."""
        return self.logical_attn_allocator.size_swa

    @property
    def swa_req_ring(self) -> bool:
        """Whether the logical side is in ring mode."""
        return self.logical_attn_allocator.swa_req_ring

    @property
    def swa_ring_cost_tokens(self) -> int:
        """Slots of one request's ring."""
        return self.logical_attn_allocator.swa_ring_cost_tokens

    def full_available_size(self) -> int:
        """Free and staged slots of the full pool, or tokens that the device pool has room for, if fewer."""
        device = self.hisparse_attn_allocator.available_size() * _RATIO
        return min(self.logical_attn_allocator.full_available_size(), device)

    def swa_available_size(self) -> int:
        """Free and staged slots of the swa pool."""
        return self.logical_attn_allocator.swa_available_size()

    def new_pages_available(self, num_full_pages: int, num_swa_pages: int) -> bool:
        """Whether so many pages are free or staged on each side, a device page for each full one."""
        device = self.hisparse_attn_allocator.available_size() // self.hisparse_page_size
        logical = self.logical_attn_allocator
        return num_full_pages <= device and logical.new_pages_available(num_full_pages, num_swa_pages)

    def get_all_free_pages(self) -> Tensor:
        """The full pool's free, then staged page numbers; a copy."""
        return self.logical_attn_allocator.get_all_free_pages()

    def get_cpu_copy(self, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Passed on."""
        return self.logical_attn_allocator.get_cpu_copy(indices, *args, **kwargs)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Passed on."""
        return self.logical_attn_allocator.load_cpu_copy(kv_cache_cpu, indices, *args, **kwargs)

    # --- allocation -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        raise UnsupportedCallError("alloc", "pages of one slot", "pages of blocks", "Use alloc_extend.")

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
        """Grow each row of a batch on all sides, all or none.

        Parameters, result and errors as `PagedTokenToKVPoolAllocator.alloc_extend`; last_loc are full slots,
        num_new_pages full pages. The blocks that the rows complete are mapped. Those of a row that goes on
        inside a device page whose last block is unmapped, a caller's error, are not. Does not synchronise
        unless the logical side does.
        """
        call = "alloc_extend"
        logical, device = self.logical_attn_allocator, self.hisparse_attn_allocator
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        device._require_extend(call, *lens, last_loc)
        first, end = prefix_lens_cpu // _RATIO, seq_lens_cpu // _RATIO
        blocks = int((end - first).sum())
        ledger = self._ledger
        if ledger is not None:
            device._audited(call)
            ledger.check_growth(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist())
        need = device._new_pages(call, first, end, blocks, None)
        if need > device.available_size() // device.page_size:
            return None
        slots = logical.alloc_extend(*lens, last_loc, extend_num_tokens, num_new_pages)
        if slots is None:
            return None
        device._merge_if_short(blocks // device.page_size + prefix_lens.numel() + 1)
        compute = compressed_extend_triton if self.use_triton_kernels else compressed_extend_reference
        mapping, pages = self.full_to_hisparse_device_index_mapping, device.free_pages[:need]
        compute(prefix_lens, seq_lens, last_loc, slots, pages, mapping, blocks, _RATIO, device.page_size)
        device.free_pages = device.free_pages[need:]
        if ledger is not None:
            ledger.hand_out(slots.tolist(), (end - first).tolist())
        return slots

    def alloc_extend_swa_tail(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        swa_tail_len: int,
    ) -> Tensor | None:
        """The logical side's. The new slots have no device slots."""
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        return self.logical_attn_allocator.alloc_extend_swa_tail(
            *lens, last_loc, extend_num_tokens, swa_tail_len
        )

    # --- release ----------------------------------------------------------------------------------

    def free_full(self, free_index: Tensor) -> None:
        """The logical side's, of slots that have device slots no more than swa peers."""
        self._require_bare("free_full", [free_index])
        self.logical_attn_allocator.free_full(free_index)

    def free_full_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """The logical side's, as `free_full`."""
        self._require_bare("free_full_segment", [free_index])
        self.logical_attn_allocator.free_full_segment(free_index, start_pos=start_pos)

    def free_full_segments(self, segments: Iterable[tuple[Tensor, int]]) -> None:
        """The logical side's, as `free_full`."""
        parts = list(segments)
        self._require_bare("free_full_segments", [slots for slots, _ in parts])
        self.logical_attn_allocator.free_full_segments(parts)

    def free_swa(self, free_index: Tensor) -> None:
        """The logical side's."""
        self.logical_attn_allocator.free_swa(free_index)

    def free_swa_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """The logical side's."""
        self.logical_attn_allocator.free_swa_segment(free_index, start_pos=start_pos)

    def free_group_begin(self) -> None:
        """Hold every free from here on until `free_group_end`, on all sides.

        Raises AllocatorError when a group is open already.
        """
        self.logical_attn_allocator.free_group_begin()
        self.hisparse_attn_allocator.free_group_begin()

    def free_group_end(self) -> None:
        """Release what the group held, each side as a single pool does.

        Raises AllocatorError when no group is open.
        """
        self.logical_attn_allocator.free_group_end()
        self.hisparse_attn_allocator.free_group_end()

    def _require_bare(self, call: str, parts: list[Tensor]) -> None:
        """Checked mode: AllocatorError when a page of these slots has device slots."""
        if self._ledger is not None:
            self._ledger.check_bare(call, [slot for slots in parts for slot in slots.tolist()])

    # --- the swa mapping --------------------------------------------------------------------------

    def set_full_to_swa_mapping(self, full_indices: Tensor, swa_indices: Tensor) -> None:
        """The logical side's."""
        self.logical_attn_allocator.set_full_to_swa_mapping(full_indices, swa_indices)

    def clear_full_to_swa_mapping(self, full_indices: Tensor) -> None:
        """The logical side's."""
        self.logical_attn_allocator.clear_full_to_swa_mapping(full_indices)

    def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
        """The logical side's."""
        return self.logical_attn_allocator.translate_loc_from_full_to_swa(kv_indices)

    # --- beginnings -------------------------------------------------------------------------------

    def merge_and_sort_free(self) -> None:
        """Join the staged pages of every pool to its free list and sort it."""
        self.logical_attn_allocator.merge_and_sort_free()
        self.hisparse_attn_allocator.merge_and_sort_free()

    def resize(self, config: Any) -> None:
        """The logical side's. The device pool keeps its size; its mapping is made anew and registered."""
        self.logical_attn_allocator.resize(config)
        self._map()
        self.clear()

    def _logical_ledger(self) -> Ledger | None:
        return self.logical_attn_allocator.full_attn_allocator._ledger
