"""What the token and the paged allocator share: the free list, staging, groups, segments, refusals.

    free_pages     device int64, what the next allocation takes from the front
    staged_pages   need_sort only: released, unsorted, joined to the free list when a call may run short
    held           frees of an open group: out of circulation until it ends

Page counts and refusals come from numbers the host knows, so that nothing here waits for the device, except
a plain `free` at the paged allocator (`torch.unique`) and checked mode. All tensors kept are the allocator's
own: arguments are copied, and results share no memory with the lists.

Not covered: which slots a row gets (`paged.py`), who broke the contract (`checked.py`), and SGLang's
scheduler-facing hooks that do not concern allocation (budgets, eviction, transfer).
"""

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, SupportsIndex

import torch

from kvproof.impl.checked import Ledger
from kvproof.impl.errors import AllocatorError

CHECKED_VARIABLE = "SGLANG_DEBUG_MEMORY_POOL"
_INDEX_DTYPES = (torch.int64, torch.int32)


class SizedConfig(Protocol):
    """What `resize` reads of SGLang's configuration object."""

    @property
    def max_total_num_tokens(self) -> int:
        """Capacity in slots."""


class PoolAllocator(ABC):
    """One pool of `size // page_size` pages, numbered from 1; page 0 is padding and never handed out.

    size: capacity in slots. page_size: slots in a page. dtype: of the KV buffers; kept, not used.
    device: where the lists live. kvcache: the pool's buffers; kept for callers. need_sort: stage releases.
    checked: verify the contract on every call, at the price of reading arguments back; None asks the
    environment variable SGLANG_DEBUG_MEMORY_POOL (1, true or yes).
    Raises AllocatorError when size or page_size is below 1.
    """

    _releases_to_front: ClassVar[bool]

    free_pages: torch.Tensor
    staged_pages: list[torch.Tensor]
    _held: list[tuple[torch.Tensor, bool]] | None
    _ledger: Ledger | None

    def __init__(
        self,
        size: SupportsIndex,
        page_size: SupportsIndex,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        *,
        checked: bool | None = None,
    ) -> None:
        self.size = positive(type(self).__name__, "size", size)
        self.page_size = positive(type(self).__name__, "page_size", page_size)
        self.dtype = dtype
        self.device = device
        self.need_sort = need_sort
        self.checked = wants_checks(checked)
        self._kvcache = kvcache
        self.clear()

    # --- what it is and has -----------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Usable pages."""
        return self.size // self.page_size

    @property
    def size_full(self) -> int:
        """Capacity in slots: a single pool is all full-attention."""
        return self.size

    def available_size(self) -> int:
        """Free and staged slots. Frees held by a group do not count before it ends."""
        return (self.free_pages.numel() + sum(ids.numel() for ids in self.staged_pages)) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        """Free, then staged page numbers; a copy."""
        return torch.cat([self.free_pages, *self.staged_pages])

    def get_kvcache(self) -> Any:
        """The kvcache given at construction."""
        return self._kvcache

    def get_cpu_copy(self, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Passed on to the kvcache."""
        return self._kvcache.get_cpu_copy(indices, *args, **kwargs)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Passed on to the kvcache."""
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices, *args, **kwargs)

    def debug_print(self) -> str:
        """One line on the state, for logs. Does not synchronise."""
        held = (
            "" if self._held is None else f", {sum(ids.numel() for ids, _ in self._held)} ids held by a group"
        )
        free = self.free_pages.numel()
        staged = self.available_size() // self.page_size - free
        return f"{free} free + {staged} staged of {self.num_pages} pages{held}"

    # --- allocation -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Whole pages from the front: `need_size` int64 slots, page after page; None when too few are free.

        Merges staged pages first when the free list alone is too short. Raises AllocatorError when need_size
        is negative or no multiple of the page size.
        """
        pages, remainder = divmod(operator.index(need_size), self.page_size)
        if pages < 0 or remainder:
            raise AllocatorError(
                "alloc",
                f"a size of whole pages, k * {self.page_size} >= 0",
                f"{need_size}",
                "Round up to the page size, or use alloc_extend.",
            )
        ledger = self._audited("alloc")
        self._merge_if_short(pages)
        if pages > self.free_pages.numel():
            return None
        offsets = torch.arange(self.page_size, device=self.free_pages.device)
        slots = (self.free_pages[:pages].unsqueeze(1) * self.page_size + offsets).reshape(-1)
        if ledger is not None:
            ledger.hand_out(slots.tolist(), None)
        self.free_pages = self.free_pages[pages:]
        return slots

    def merge_and_sort_free(self) -> None:
        """Join the staged pages to the free list and sort it. Nothing happens when none are staged."""
        if self.staged_pages:
            self.free_pages = torch.sort(self.get_all_free_pages()).values
            self.staged_pages = []

    def _merge_if_short(self, pages: int) -> None:
        if pages > self.free_pages.numel():
            self.merge_and_sort_free()

    def _audited(self, call: str) -> Ledger | None:
        """The ledger with this allocation begun and the lists checked; None when unchecked."""
        if self._ledger is not None:
            staged = [page for ids in self.staged_pages for page in ids.tolist()]
            self._ledger.begin_allocation(call, self.free_pages.tolist(), staged)
        return self._ledger

    # --- release ----------------------------------------------------------------------------------

    @abstractmethod
    def free(self, free_index: torch.Tensor) -> None:
        """Release slots."""

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Release exactly these pages in this order; the caller vouches that none is named twice.

        page_ids: [n] int32 or int64. The pages of a single call stay in order, at the front of the free list
        (paged), at its end (token), or at the end of the staged pages (need_sort).
        """
        if page_ids.numel() == 0:
            return
        self._require_indices("free_page_ids", "page_ids", page_ids)
        if self._ledger is not None:
            self._ledger.release_pages("free_page_ids", page_ids.tolist())
        self._take_back(page_ids.to(torch.int64, copy=True), repeats=False)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Release the pages of one row's positions `[start_pos, start_pos + n)`, in row order.

        free_index: [n] int32 or int64, the row's slots there. start_pos: a multiple of the page size, else
        AllocatorError; the end may fall inside a page, which goes as a whole.
        """
        self._free_segments("free_segment", [(free_index, start_pos)])

    def free_segments(self, segments: Iterable[tuple[torch.Tensor, int]]) -> None:
        """As `free_segment` for each `(slots, start_pos)` in turn, but all or none.

        Raises AllocatorError unless the segments ascend and share no page.
        """
        self._free_segments("free_segments", segments)

    def free_full(self, free_index: torch.Tensor) -> None:
        """`free`: a single pool is all full-attention."""
        self.free(free_index)

    def free_full_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """`free_segment`: a single pool is all full-attention."""
        self._free_segments("free_full_segment", [(free_index, start_pos)])

    def free_full_segments(self, segments: Iterable[tuple[torch.Tensor, int]]) -> None:
        """`free_segments`: a single pool is all full-attention."""
        self._free_segments("free_full_segments", segments)

    def _free_segments(self, call: str, segments: Iterable[tuple[torch.Tensor, int]]) -> None:
        parts = self._require_segments(call, segments)
        if parts and self._ledger is not None:
            self._ledger.release_segments(call, [slots.tolist() for slots, _ in parts])
        self._release_segments(parts)

    def _require_segments(
        self, call: str, segments: Iterable[tuple[torch.Tensor, int]]
    ) -> list[tuple[torch.Tensor, int]]:
        """The segments that hold anything, when all may be released together; AllocatorError if not."""
        parts = [(slots, operator.index(start)) for slots, start in segments if slots.numel()]
        page_after = 0
        for slots, start in parts:
            self._require_indices(call, "free_index", slots)
            if start % self.page_size:
                remedy = "Round the start down to a page boundary of the row."
                raise AllocatorError(
                    call, f"start_pos to be a multiple of {self.page_size}", f"{start}", remedy
                )
            page = start // self.page_size
            if page < page_after:
                raise AllocatorError(
                    call,
                    "segments from position 0 on that ascend and share no page",
                    f"start_pos {start}, in page {page} of the row where {page_after} is the first possible",
                    "Join the segments that meet inside a page.",
                )
            page_after = -(-(start + slots.numel()) // self.page_size)
        return parts

    def _release_segments(self, parts: list[tuple[torch.Tensor, int]]) -> None:
        for slots, _ in parts:
            # From a page boundary on, every page_size-th slot stands for one page: repeats cannot occur.
            self._take_back((slots[:: self.page_size] // self.page_size).to(torch.int64), repeats=False)

    def _take_back(self, ids: torch.Tensor, *, repeats: bool) -> None:
        """Release pages, or hold them while a group is open.

        ids: page numbers, int64, memory of our own. repeats: they may name a page more than once and count
        as a set, which is released ascending.
        """
        if self._held is not None:
            self._held.append((ids, repeats))
        else:
            self._release(torch.unique(ids) if repeats else ids)

    def _release(self, ids: torch.Tensor) -> None:
        if self.need_sort:
            self.staged_pages.append(ids)
        elif self._releases_to_front:
            self.free_pages = torch.cat((ids, self.free_pages))
        else:
            self.free_pages = torch.cat((self.free_pages, ids))

    def _drop_padding(self) -> None:
        """Take page 0 out of all lists. Synchronises."""
        self.free_pages = self.free_pages[self.free_pages > 0]
        staged = [ids[ids > 0] for ids in self.staged_pages]
        self.staged_pages = [ids for ids in staged if ids.numel()]
        if self._held is not None:
            held = [(ids[ids > 0], repeats) for ids, repeats in self._held]
            self._held = [(ids, repeats) for ids, repeats in held if ids.numel()]

    # --- groups -----------------------------------------------------------------------------------

    def free_group_begin(self) -> None:
        """Hold every free from here on, by value, until `free_group_end`.

        Raises AllocatorError when a group is open already.
        """
        if self._held is not None:
            raise AllocatorError(
                "free_group_begin",
                "no open group",
                "an open one",
                "Call free_group_end first; groups do not nest.",
            )
        self._held = []
        if self._ledger is not None:
            self._ledger.open_group()

    def free_group_end(self) -> None:
        """Release what the group held: first all `free`s as one, then all page ids in call order.

        Raises AllocatorError when no group is open.
        """
        if self._held is None:
            raise AllocatorError(
                "free_group_end", "an open group", "none", "Call free_group_begin first, and end it once."
            )
        sets = [ids for ids, repeats in self._held if repeats]
        lists = [ids for ids, repeats in self._held if not repeats]
        if sets:
            self._release(torch.unique(torch.cat(sets)))
        if lists:
            self._release(torch.cat(lists))
        self._held = None
        if self._ledger is not None:
            self._ledger.close_group()

    # --- beginnings -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Back to the initial state: all pages free and ascending, no group, nothing staged or live."""
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)
        self.staged_pages = []
        self._held = None
        self._ledger = Ledger(self.page_size, self.num_pages) if self.checked else None

    def resize(self, config: SupportsIndex | SizedConfig) -> None:
        """A new capacity in slots, given as such or as `config.max_total_num_tokens`; then `clear()`.

        Raises AllocatorError when it is below 1.
        """
        size = config if isinstance(config, SupportsIndex) else config.max_total_num_tokens
        self.size = positive("resize", "size", size)
        self.clear()

    # --- refusals that cost nothing ---------------------------------------------------------------

    def _require_indices(self, call: str, name: str, tensor: torch.Tensor) -> None:
        """A one-dimensional index tensor on our device."""
        require_vector(call, name, tensor, self.free_pages.device)


def require_vector(call: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise AllocatorError unless the tensor is [n] on this device, and of int32 or int64 when n > 0.

    An empty tensor may be of any dtype: `torch.tensor([])` is float32.
    """
    wanted = f"{name} to be one-dimensional int64 or int32 on {device}"
    if tensor.dim() != 1 or tensor.device != device or (tensor.numel() and tensor.dtype not in _INDEX_DTYPES):
        actual = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise AllocatorError(call, wanted, actual, "Convert it before the call.")


def wants_checks(checked: bool | None) -> bool:
    """Whether an allocator built so is a checked one: None asks SGLANG_DEBUG_MEMORY_POOL."""
    if checked is None:
        return os.environ.get(CHECKED_VARIABLE, "").strip().lower() in ("1", "true", "yes")
    return checked


def positive(call: str, name: str, value: SupportsIndex) -> int:
    """The number. Raises AllocatorError when it is below 1."""
    number = operator.index(value)
    if number < 1:
        raise AllocatorError(call, f"{name} >= 1", f"{number}", "A pool holds at least one slot.")
    return number
