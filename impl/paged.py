"""The paged allocator: rows grow page by page, by prefill (`alloc_extend`) and by decode (`alloc_decode`).

New pages come from the front of the free list in batch order, and released ones go back to its front, so that
the pages used last are used again first. Which slots a batch gets is computed on the device by
`kernels.py` or `reference.py`; how many pages it takes, and with it the refusal, by the host from the `*_cpu`
copies of the lengths, before anything is launched or changed.

Not covered: what the slots are used for, and the state that other allocators keep beside a pool (mappings).
"""

from typing import Any, SupportsIndex

import torch
from torch import Tensor

from kvproof.impl.base import PoolAllocator, require_vector
from kvproof.impl.errors import AllocatorError
from kvproof.impl.kernels import alloc_decode_triton, alloc_extend_triton, kernels_run_on
from kvproof.impl.reference import alloc_decode_reference, alloc_extend_reference

_HOST = torch.device("cpu")


class PagedTokenToKVPoolAllocator(PoolAllocator):
    """A pool of pages, any page size >= 1. Parameters as `PoolAllocator`.

    use_triton_kernels: whether the kernels or the torch reference compute the slots; at first, whether Triton
    runs on the device (CUDA, or anywhere under its interpreter). May be set at any time.
    """

    _releases_to_front = True

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
        super().__init__(size, page_size, dtype, device, kvcache, need_sort, checked=checked)
        self.use_triton_kernels = kernels_run_on(self.free_pages.device)

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
        """Grow each row of a batch from its prefix length to its sequence length, all or none.

        prefix_lens, seq_lens: [batch] int32 or int64, tokens before and after; `*_cpu`: the same on the host.
        last_loc: [batch], slot of each row's last token, -1 for an empty row. extend_num_tokens: sum of
        seq - prefix. num_new_pages: pages the batch takes, counted from the lengths when None.

        Returns [extend_num_tokens] int64 slots, rows in batch order, or None when the free list, staged pages
        merged in, is too short. Does not synchronise. Raises AllocatorError for tensors of the wrong shape,
        dtype or device and for negative counts; for other breaches of the contract in checked mode only.
        """
        call = "alloc_extend"
        self._require_extend(call, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc)
        ledger = self._audited(call)
        if ledger is not None:
            ledger.check_extend(
                prefix_lens.tolist(),
                prefix_lens_cpu.tolist(),
                seq_lens.tolist(),
                seq_lens_cpu.tolist(),
                last_loc.tolist(),
                extend_num_tokens,
                num_new_pages,
            )
        num_new_pages = self._new_pages(call, prefix_lens_cpu, seq_lens_cpu, extend_num_tokens, num_new_pages)
        # An upper bound on what the batch can take, by which SGLang decides to merge; exact means the same.
        self._merge_if_short(extend_num_tokens // self.page_size + prefix_lens.numel() + 1)
        if num_new_pages > self.free_pages.numel():
            return None
        compute = alloc_extend_triton if self.use_triton_kernels else alloc_extend_reference
        taken = self.free_pages[:num_new_pages]
        slots = compute(prefix_lens, seq_lens, last_loc, taken, extend_num_tokens, self.page_size)
        if ledger is not None:
            ledger.hand_out(slots.tolist(), (seq_lens_cpu - prefix_lens_cpu).tolist())
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
        """Grow each row of a batch by one token, all or none.

        seq_lens: [batch] int32 or int64, lengths *after* the step; seq_lens_cpu: the same on the host.
        last_loc: [batch], slot of each row's last token before it, -1 for an empty row.

        Returns [batch] int64 slots, or None when the free list, staged pages merged in, is too short. Does
        not synchronise. Raises AllocatorError as `alloc_extend` does.
        """
        call = "alloc_decode"
        self._require_decode(call, seq_lens, seq_lens_cpu, last_loc)
        ledger = self._audited(call)
        if ledger is not None:
            ledger.check_decode(seq_lens.tolist(), seq_lens_cpu.tolist(), last_loc.tolist())
        num_new_pages = self._new_pages_of_decode(seq_lens_cpu)
        batch = seq_lens.numel()
        self._merge_if_short(batch)
        if num_new_pages > self.free_pages.numel():
            return None
        compute = alloc_decode_triton if self.use_triton_kernels else alloc_decode_reference
        slots = compute(seq_lens, last_loc, self.free_pages[:num_new_pages], self.page_size)
        if ledger is not None:
            ledger.hand_out(slots.tolist(), [1] * batch)
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def free(self, free_index: Tensor) -> None:
        """Release every page that any of these slots lies in, whole, once, ascending.

        free_index: [n] int32 or int64, in any order, repeats allowed. So a caller frees whole pages, or the
        tail of a row from a page boundary on. Synchronises outside a group (`torch.unique`).
        """
        if free_index.numel() == 0:
            return
        self._require_indices("free", "free_index", free_index)
        if self._ledger is not None:
            self._ledger.release_slots("free", free_index.tolist(), repeats=True)
        self._take_back((free_index // self.page_size).to(torch.int64), repeats=True)

    def _require_extend(
        self,
        call: str,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
    ) -> None:
        """AllocatorError unless these tensors describe one batch."""
        self._require_batch(call, prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc)
        _require_host(call, prefix_lens.numel(), prefix_lens_cpu=prefix_lens_cpu, seq_lens_cpu=seq_lens_cpu)

    def _require_decode(self, call: str, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> None:
        """AllocatorError unless these tensors describe one batch."""
        self._require_batch(call, seq_lens=seq_lens, last_loc=last_loc)
        _require_host(call, seq_lens.numel(), seq_lens_cpu=seq_lens_cpu)

    def _new_pages(
        self,
        call: str,
        prefix_lens_cpu: Tensor,
        seq_lens_cpu: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None,
    ) -> int:
        """Pages an extend takes, counted when None; AllocatorError when it takes less than none."""
        if num_new_pages is None:
            num_new_pages = self._count_pages(seq_lens_cpu) - self._count_pages(prefix_lens_cpu)
        if extend_num_tokens < 0 or num_new_pages < 0:
            actual = f"{extend_num_tokens} tokens and {num_new_pages} new pages"
            raise AllocatorError(
                call, "rows that grow or stay", actual, "Pass lengths with seq_lens >= prefix_lens."
            )
        return num_new_pages

    def _new_pages_of_decode(self, seq_lens_cpu: Tensor) -> int:
        """Pages a decode takes: one for each row that starts one."""
        return int(((seq_lens_cpu - 1) % self.page_size == 0).sum())

    def _count_pages(self, lens: Tensor) -> int:
        """Pages that hold rows of these lengths; lens on the host."""
        return int(((lens.to(torch.int64) + (self.page_size - 1)) // self.page_size).sum())

    def _require_batch(self, call: str, **tensors: Tensor) -> None:
        """Tensors of one length on our device."""
        for name, tensor in tensors.items():
            self._require_indices(call, name, tensor)
        if len({tensor.numel() for tensor in tensors.values()}) > 1:
            _refuse_lengths(call, tensors)


def _require_host(call: str, batch: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        require_vector(call, name, tensor, _HOST)
        if tensor.numel() != batch:
            _refuse_lengths(call, {"the batch": torch.empty(batch, device="meta"), **tensors})


def _refuse_lengths(call: str, tensors: dict[str, Tensor]) -> None:
    actual = ", ".join(f"{name} of {tensor.numel()}" for name, tensor in tensors.items())
    raise AllocatorError(
        call, "one entry per batch row in every tensor", actual, "Build them from the same rows."
    )
