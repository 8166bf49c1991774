"""The token allocator: pages of one slot, first in, first out.

Released slots go to the *end* of the free list, in the order given. Not covered: rows; this allocator knows
slots only, and `alloc_extend` and `alloc_decode` belong to the paged one.
"""

from typing import Any, NoReturn, SupportsIndex

import torch

from kvproof.impl.base import PoolAllocator
from kvproof.impl.errors import UnsupportedCallError


class TokenToKVPoolAllocator(PoolAllocator):
    """A pool of single slots `1 … size`. Parameters as `PoolAllocator`, with a page size of 1."""

    _releases_to_front = False

    def __init__(
        self,
        size: SupportsIndex,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        *,
        checked: bool | None = None,
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort, checked=checked)

    def free(self, free_index: torch.Tensor) -> None:
        """Release these slots in this order; the caller vouches that none is named twice.

        free_index: [n] int32 or int64. They go to the end of the free list, or of the staged slots
        (need_sort). Does not synchronise.
        """
        if free_index.numel() == 0:
            return
        self._require_indices("free", "free_index", free_index)
        if self._ledger is not None:
            self._ledger.release_slots("free", free_index.tolist(), repeats=False)
        self._take_back(free_index.to(torch.int64, copy=True), repeats=False)

    def alloc_extend(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("alloc_extend")

    def alloc_decode(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("alloc_decode")

    def _unsupported(self, call: str) -> NoReturn:
        raise UnsupportedCallError(
            call, "a paged allocator", "the token allocator", "Use alloc(number of tokens)."
        )
