"""The allocator of a model whose every layer is sliding-window attention: one token pool plays both sides.

Every slot is its own peer. What releases the swa side releases the slot, once, and what releases the full
side alone has nothing to do. Not covered: models with full attention (`swa.py`).
"""

from collections.abc import Iterable
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from kvproof.impl.base import positive
from kvproof.impl.errors import AllocatorError
from kvproof.impl.swa import SWATokenToKVPoolAllocator
from kvproof.impl.token import TokenToKVPoolAllocator


class PureSWATokenToKVPoolAllocator(SWATokenToKVPoolAllocator):
    """A pool of `size_swa` single slots. Parameters as `SWATokenToKVPoolAllocator`, with a page size of 1.

    full_attn_allocator and swa_attn_allocator are the same pool; full_to_swa_index_mapping is the identity,
    with -1 as its last entry. Raises AllocatorError for another page size.
    """

    def __init__(
        self,
        size_swa: SupportsIndex,
        page_size: SupportsIndex,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        *,
        checked: bool | None = None,
    ) -> None:
        if positive(type(self).__name__, "page_size", page_size) != 1:
            raise AllocatorError(
                type(self).__name__,
                "a page size of 1",
                f"{page_size}",
                "A single pool has pages of one slot.",
            )
        super().__init__(size_swa, size_swa, 1, dtype, device, kvcache, need_sort, checked=checked)

    def _make_pools(self, size: SupportsIndex, size_swa: SupportsIndex, checked: bool | None) -> None:
        rest = self.dtype, self.device, getattr(self._kvcache, "swa_kv_pool", None), self.need_sort
        self._pool = TokenToKVPoolAllocator(size_swa, *rest, checked=checked)
        self.full_attn_allocator = self.swa_attn_allocator = self._pool

    def _cost_of_ring(self, ring_size: int | None) -> int:
        return 0

    def _make_mapping(self) -> None:
        self.full_to_swa_index_mapping = torch.arange(self._pool.size + 2, device=self.device)
        self.full_to_swa_index_mapping[-1:].fill_(-1)
        self._register_mapping()

    def _settle(self, *, wait: bool) -> None:
        """Nothing is resolved on the device here."""

    def debug_print(self) -> str:
        """One line on the pool's state, for logs. Does not synchronise."""
        return self._pool.debug_print()

    def alloc(self, need_size: int) -> Tensor | None:
        """The first `need_size` slots, or None when there are too few; as `TokenToKVPoolAllocator.alloc`."""
        return self._pool.alloc(need_size)

    def alloc_extend(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("alloc_extend", "pages of several slots", "Use alloc(number of tokens).")

    def alloc_decode(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("alloc_decode", "pages of several slots", "Use alloc(number of tokens).")

    def alloc_extend_swa_tail(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("alloc_extend_swa_tail", "pages of several slots", "Use alloc(number of tokens).")

    def free(self, free_index: Tensor) -> None:
        """Release these slots in this order; as `TokenToKVPoolAllocator.free`."""
        self._pool.free(free_index)

    def free_swa(self, free_index: Tensor) -> None:
        """`free`."""
        self._pool.free(free_index)

    def free_full(self, free_index: Tensor) -> None:
        """Nothing: there is no full side."""

    def free_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """`free`."""
        self._pool.free_segment(free_index, start_pos=start_pos)

    def free_segments(self, segments: Iterable[tuple[Tensor, int]]) -> None:
        """As `free_segment` for each `(slots, start_pos)` in turn, but all or none."""
        self._pool.free_segments(segments)

    def free_swa_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """`free`."""
        self._pool.free_segment(free_index, start_pos=start_pos)

    def free_full_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """Nothing: there is no full side."""

    def free_full_segments(self, segments: Iterable[tuple[Tensor, int]]) -> None:
        """Nothing: there is no full side."""

    def free_group_begin(self) -> None:
        """As `TokenToKVPoolAllocator.free_group_begin`."""
        self._pool.free_group_begin()

    def free_group_end(self) -> None:
        """As `TokenToKVPoolAllocator.free_group_end`."""
        self._pool.free_group_end()

    def set_full_to_swa_mapping(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("set_full_to_swa_mapping", "a mapping between two pools", "A slot is its own peer.")

    def clear_full_to_swa_mapping(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported(
            "clear_full_to_swa_mapping", "a mapping between two pools", "A slot is its own peer."
        )

    def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
        """The slots themselves."""
        return kv_indices

    def merge_and_sort_free(self) -> None:
        """Join the staged slots to the free list and sort it."""
        self._pool.merge_and_sort_free()

    def clear(self) -> None:
        """Back to the initial state: everything free, no group."""
        self._pool.clear()
