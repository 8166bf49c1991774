"""What the sliding-window allocator keeps: two pools, the mapping between them, and how much is free.

    full pool   free list of `size` slots
    mapping     size + page_size entries, 0 = no peer, and -1 for a last_loc of -1
    swa pool    free list of `size_swa` slots

With pages of one slot both are token pools. In ring mode the swa side is a ring of slots that comes with a
request's row, so that only the full pool is paged, and the mapping stays 0.

The modules of this allocator work with the inner parts of the pools, which are this package's own. Not
covered: taking and releasing (`swa.py`), and who broke the contract (`swa_checked.py`).
"""

from typing import Any, SupportsIndex

import torch
from torch import Tensor

from kvproof.impl.base import positive, require_vector
from kvproof.impl.errors import AllocatorError
from kvproof.impl.kernels import kernels_run_on
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.strays import Strays
from kvproof.impl.swa_checked import PairLedger
from kvproof.impl.token import TokenToKVPoolAllocator

Pool = PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator


class SwaSides:
    """A full and an swa pool of `size` and `size_swa` slots, and `full_to_swa_index_mapping` between them.

    page_size, dtype, device, need_sort, checked: as `PoolAllocator`, for both pools. kvcache: kept for
    callers; when it has `register_mapping` it is given the mapping, again after every `resize`, and when its
    `swa_req_ring_size` is a number the allocator is in ring mode, with rings of so many tokens.
    req_to_token_pool: in ring mode, whose `available_size()` counts the free request rows; else unused.
    Raises AllocatorError for sizes below 1 and for ring mode without request rows.

    full_attn_allocator, swa_attn_allocator: the pools. full_to_swa_index_mapping: [size + page_size + 1]
    int64.
    """

    full_attn_allocator: Pool
    swa_attn_allocator: Pool
    full_to_swa_index_mapping: Tensor
    _pair: PairLedger | None

    def __init__(
        self,
        size: SupportsIndex,
        size_swa: SupportsIndex,
        page_size: SupportsIndex,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        req_to_token_pool: Any = None,
        *,
        checked: bool | None = None,
    ) -> None:
        self.page_size = positive(type(self).__name__, "page_size", page_size)
        self.dtype = dtype
        self.device = device
        self.need_sort = need_sort
        self._kvcache = kvcache
        self._make_pools(size, size_swa, checked)
        self.checked = self.full_attn_allocator.checked
        self._request_rows = req_to_token_pool
        self._ring_cost = self._cost_of_ring(getattr(kvcache, "swa_req_ring_size", None))
        self._ring_capacity = self._free_rings()
        self._use_triton_kernels = kernels_run_on(self.full_attn_allocator.free_pages.device)
        self._make_mapping()
        self.clear()

    def _make_pools(self, size: SupportsIndex, size_swa: SupportsIndex, checked: bool | None) -> None:
        def pool(size: SupportsIndex, buffers: str) -> Pool:
            rest = self.dtype, self.device, getattr(self._kvcache, buffers, None), self.need_sort
            if self.page_size == 1:
                return TokenToKVPoolAllocator(size, *rest, checked=checked)
            return PagedTokenToKVPoolAllocator(size, self.page_size, *rest, checked=checked)

        self.full_attn_allocator = pool(size, "full_kv_pool")
        self.swa_attn_allocator = pool(size_swa, "swa_kv_pool")

    def _cost_of_ring(self, ring_size: int | None) -> int:
        if ring_size is None:
            return 0
        if self._request_rows is None:
            raise AllocatorError(
                type(self).__name__,
                "a req_to_token_pool beside a ring",
                "none",
                "Rings are counted by free request rows; pass the pool of the rows.",
            )
        pages = -(-positive(type(self).__name__, "swa_req_ring_size", ring_size) // self.page_size)
        return pages * self.page_size

    def _make_mapping(self) -> None:
        """A mapping for the pool's size, all unmapped, told to the kvcache."""
        entries = self.full_attn_allocator.size + self.page_size
        self.full_to_swa_index_mapping = torch.zeros(entries + 1, dtype=torch.int64, device=self.device)
        self.full_to_swa_index_mapping[-1:].fill_(-1)
        self._register_mapping()

    def _register_mapping(self) -> None:
        register = getattr(self._kvcache, "register_mapping", None)
        if register is not None:
            register(self.full_to_swa_index_mapping)

    # --- what it is and has -----------------------------------------------------------------------

    @property
    def use_triton_kernels(self) -> bool:
        """Whether kernels or the torch reference do the work, here and in the pools; as at the paged
        allocator.
        """
        return self._use_triton_kernels

    @use_triton_kernels.setter
    def use_triton_kernels(self, value: bool) -> None:
        self._use_triton_kernels = value
        for pool in (self.full_attn_allocator, self.swa_attn_allocator):
            if isinstance(pool, PagedTokenToKVPoolAllocator):
                pool.use_triton_kernels = value

    @property
    def size(self) -> int:
        """Capacity in slots of the smaller side."""
        return min(self.size_full, self.size_swa)

    @property
    def size_full(self) -> int:
        """Capacity of the full pool in slots."""
        return self.full_attn_allocator.size

    @property
    def size_swa(self) -> int:
        """Capacity of the swa pool in slots; in ring mode, of the rings of all rows free at construction."""
        return self._ring_capacity if self.swa_req_ring else self.swa_attn_allocator.size

    @property
    def swa_req_ring(self) -> bool:
        """Whether the allocator is in ring mode."""
        return self._ring_cost > 0

    @property
    def swa_ring_cost_tokens(self) -> int:
        """Slots of one request's ring, whole pages; 0 without rings."""
        return self._ring_cost

    def available_size(self) -> int:
        """Free and staged slots of the side that has fewer; in ring mode of the full side."""
        if self.swa_req_ring:
            return self.full_available_size()
        return min(self.full_available_size(), self.swa_available_size())

    def full_available_size(self) -> int:
        """Free and staged slots of the full pool."""
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        """Free and staged slots of the swa pool; in ring mode, the slots of the free request rows' rings."""
        if self.swa_req_ring:
            return self._free_rings()
        self._settle(wait=True)
        return self.swa_attn_allocator.available_size()

    def new_pages_available(self, num_full_pages: int, num_swa_pages: int) -> bool:
        """Whether so many pages are free or staged on each side; in ring mode, on the full side."""
        self._settle(wait=True)
        return self._fit(num_full_pages, num_swa_pages)

    def get_all_free_pages(self) -> Tensor:
        """The full pool's free, then staged page numbers; a copy."""
        return self.full_attn_allocator.get_all_free_pages()

    def get_kvcache(self) -> Any:
        """The kvcache given at construction."""
        return self._kvcache

    def get_cpu_copy(self, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Passed on to the kvcache."""
        return self._kvcache.get_cpu_copy(indices, *args, **kwargs)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Passed on to the kvcache."""
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices, *args, **kwargs)

    def debug_print(self) -> str:
        """One line on the state of both sides, for logs. Does not synchronise."""
        swa = (
            f"{self._free_rings()} slots in rings"
            if self.swa_req_ring
            else self.swa_attn_allocator.debug_print()
        )
        return f"full: {self.full_attn_allocator.debug_print()}; swa: {swa}"

    def _free_rings(self) -> int:
        return self._request_rows.available_size() * self._ring_cost if self._ring_cost else 0

    def _fit(self, num_full_pages: int, num_swa_pages: int) -> bool:
        pools = ((self.full_attn_allocator, num_full_pages), (self.swa_attn_allocator, num_swa_pages))
        return all(
            pages <= pool.available_size() // self.page_size
            for pool, pages in (pools[:1] if self.swa_req_ring else pools)
        )

    def _settle(self, *, wait: bool) -> None:
        """Take padding pages out of the swa pool's lists if a segment release is known to have put any
        there.
        """
        if self._strays.found(wait=wait):
            self.swa_attn_allocator._drop_padding()

    # --- groups -----------------------------------------------------------------------------------

    def free_group_begin(self) -> None:
        """Hold every free from here on until `free_group_end`; peers are still resolved at each call.

        Raises AllocatorError when a group is open already.
        """
        self.full_attn_allocator.free_group_begin()
        self.swa_attn_allocator.free_group_begin()

    def free_group_end(self) -> None:
        """Release what the group held, each side as a single pool does.

        Raises AllocatorError when no group is open.
        """
        self.full_attn_allocator.free_group_end()
        self.swa_attn_allocator.free_group_end()

    # --- the mapping ------------------------------------------------------------------------------

    def set_full_to_swa_mapping(self, full_indices: Tensor, swa_indices: Tensor) -> None:
        """Map full slots to swa slots, one to one. Both: [n] int32 or int64. Raises AllocatorError unless
        so.
        """
        call = "set_full_to_swa_mapping"
        mapping = self.full_to_swa_index_mapping
        require_vector(call, "full_indices", full_indices, mapping.device)
        require_vector(call, "swa_indices", swa_indices, mapping.device)
        if full_indices.numel() != swa_indices.numel():
            actual = f"{full_indices.numel()} full and {swa_indices.numel()} swa slots"
            raise AllocatorError(call, "as many full as swa slots", actual, "Pair them one to one.")
        if full_indices.numel():
            touched = None if self._pair is None else self._pair.check_set(full_indices, swa_indices)
            mapping[full_indices.to(torch.int64)] = swa_indices.to(torch.int64)
            if self._pair is not None and touched is not None:
                self._pair.note_edit(touched)

    def clear_full_to_swa_mapping(self, full_indices: Tensor) -> None:
        """Unmap full slots; their peers stay taken. full_indices: [n] int32 or int64."""
        call = "clear_full_to_swa_mapping"
        mapping = self.full_to_swa_index_mapping
        require_vector(call, "full_indices", full_indices, mapping.device)
        if full_indices.numel():
            touched = None if self._pair is None else self._pair.check_clear(full_indices)
            mapping.index_fill_(0, full_indices.to(torch.int64), 0)
            if self._pair is not None and touched is not None:
                self._pair.note_edit(touched)

    def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
        """The peers of full slots, int64, in the shape given: 0 for none, -1 for -1."""
        return self.full_to_swa_index_mapping[kv_indices.to(torch.int64)]

    # --- beginnings -------------------------------------------------------------------------------

    def merge_and_sort_free(self) -> None:
        """Join the staged pages of either pool to its free list and sort it."""
        self.full_attn_allocator.merge_and_sort_free()
        self.swa_attn_allocator.merge_and_sort_free()

    def clear(self) -> None:
        """Back to the initial state: everything free, nothing mapped, no group."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        full.clear()
        swa.clear()
        mapping = self.full_to_swa_index_mapping
        mapping[:-1].zero_()
        self._strays = Strays(mapping.device)
        self._pair = None
        if full._ledger is not None and swa._ledger is not None and not self.swa_req_ring:
            self._pair = PairLedger(full._ledger, swa._ledger, mapping, self.page_size)

    def resize(self, config: Any) -> None:
        """New capacities in slots; the mapping is made anew and registered; then `clear()`.

        config: has full_max_total_num_tokens and swa_max_total_num_tokens, or else max_total_num_tokens for
        both sides. In ring mode the full pool alone is resized. Raises AllocatorError for sizes below 1.
        """
        full, swa = _sizes(config)
        self.full_attn_allocator.resize(full)
        if not self.swa_req_ring:
            self.swa_attn_allocator.resize(swa)
        self._make_mapping()
        self.clear()


def _sizes(config: Any) -> tuple[int, int]:
    """The capacities of both sides in a configuration object; AllocatorError when one is below 1."""
    names = ("full_max_total_num_tokens", "swa_max_total_num_tokens")
    if all(getattr(config, name, None) is None for name in names):
        names = ("max_total_num_tokens",) * 2
    full, swa = (positive("resize", name, getattr(config, name)) for name in names)
    return full, swa
