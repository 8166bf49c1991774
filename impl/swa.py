"""The sliding-window allocator: taking slots from two pools, and giving them back.

Full attention keeps every token, sliding-window attention those of the window, so a request gives up its swa
slots while it keeps the full ones. Both pools take part in an allocation or neither: it is decided from page
counts before anything is merged, launched or changed.

    alloc_...   the first free pages of both pools, then the mapping, in one launch
    free        the peers and the mapping's entries, then the full pages
    free_swa    the first two; free_full does the last

Peers are resolved, and the mapping is cleared, when a free is called, also inside a group. Nothing waits for
the device except `free` and `free_swa` with pages of several slots, a group's end after them, checked mode,
and the `...available...` calls, which wait until the device has got to a segment release just before them
(`strays.py`).

Not covered: what the allocator keeps (`swa_sides.py`), who broke the contract (`swa_checked.py`), and models
with no full side (`pure_swa.py`).
"""

import operator
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from kvproof.impl.errors import AllocatorError, StateError, UnsupportedCallError
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.swa_checked import PairLedger
from kvproof.impl.swa_kernels import swa_decode_triton, swa_extend_triton, take_peers_triton
from kvproof.impl.swa_reference import swa_decode_reference, swa_extend_reference, take_peers_reference
from kvproof.impl.swa_sides import SwaSides


class SWATokenToKVPoolAllocator(SwaSides):
    """Slots for full attention, with peers for sliding-window attention. Parameters as `SwaSides`."""

    # --- allocation -------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> Tensor | None:
        """The first `need_size` slots of both pools, mapped one to one; with pages of one slot only.

        Returns the full slots, int64, or None when either pool has too few. Raises AllocatorError when
        need_size is negative, UnsupportedCallError with larger pages.
        """
        call = "alloc"
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if self.page_size > 1:
            self._unsupported(call, "pages of one slot", "Use alloc_extend.")
        if self.swa_req_ring:
            return full.alloc(need_size)
        need = operator.index(need_size)
        if need < 0:
            raise AllocatorError(call, "a size >= 0", f"{need}", "Ask for as many slots as there are tokens.")
        self._settle(wait=False)
        ledger = self._audited(call)
        if not self._fit(need, need):
            return None
        full._merge_if_short(need)
        swa._merge_if_short(need)
        slots = full.free_pages[:need].clone()
        before = None if ledger is None else self.full_to_swa_index_mapping.clone()
        self.full_to_swa_index_mapping[slots] = swa.free_pages[:need]
        self._hand_out(slots, None, 0, before)
        full.free_pages, swa.free_pages = full.free_pages[need:], swa.free_pages[need:]
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
        """Grow each row of a batch on both sides, all or none, with pages of several slots.

        Parameters, result and errors as `PagedTokenToKVPoolAllocator.alloc_extend`; last_loc are full slots.
        The new slots are mapped. Tokens of a row that goes on inside a page whose last slot has no peer, a
        caller's error, get none. Does not synchronise.
        """
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        return self._extend("alloc_extend", *lens, last_loc, extend_num_tokens, num_new_pages, None)

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
        """Grow one row on the full side, and on the swa side by its last `swa_tail_len` tokens alone.

        The tail's slots come from swa pages of its own, as a row's that begins there; the entries of the
        other new slots become 0. Otherwise as `alloc_extend`, with a batch of one. Raises AllocatorError
        unless 0 <= swa_tail_len <= extend_num_tokens.
        """
        call = "alloc_extend_swa_tail"
        tail = operator.index(swa_tail_len)
        if prefix_lens.numel() != 1:
            actual = f"{prefix_lens.numel()} rows"
            raise AllocatorError(call, "a batch of one row", actual, "Extend rows with a tail one by one.")
        if not 0 <= tail <= extend_num_tokens:
            expected = f"0 <= swa_tail_len <= extend_num_tokens = {extend_num_tokens}"
            raise AllocatorError(call, expected, f"{tail}", "The tail is a part of the new tokens.")
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        return self._extend(call, *lens, last_loc, extend_num_tokens, None, tail)

    def _extend(
        self,
        call: str,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        tokens: int,
        num_new_pages: int | None,
        tail: int | None,
    ) -> Tensor | None:
        full, swa = self._paged_pools(call)
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        if self.swa_req_ring:
            return full.alloc_extend(*lens, last_loc, tokens, num_new_pages)
        full._require_extend(call, *lens, last_loc)
        self._settle(wait=False)
        ledger = self._audited(call)
        if ledger is not None:
            ledger.check_extend(
                prefix_lens.tolist(),
                prefix_lens_cpu.tolist(),
                seq_lens.tolist(),
                seq_lens_cpu.tolist(),
                last_loc.tolist(),
                tokens,
                num_new_pages,
                paired=tail is None,
            )
        num_full = full._new_pages(call, prefix_lens_cpu, seq_lens_cpu, tokens, num_new_pages)
        num_swa = num_full if tail is None else -(-tail // self.page_size)
        if not self._fit(num_full, num_swa):
            return None
        # Each side merges as the paged allocator does, the swa side as for what it takes part in.
        rows = prefix_lens.numel()
        full._merge_if_short(max(tokens // self.page_size + rows + 1, num_full))
        if tail != 0:
            part = tokens if tail is None else tail
            swa._merge_if_short(max(part // self.page_size + rows + 1, num_swa))
        compute = swa_extend_triton if self._use_triton_kernels else swa_extend_reference
        pages = full.free_pages[:num_full], swa.free_pages[:num_swa]
        before = None if ledger is None else self.full_to_swa_index_mapping.clone()
        mapping = self.full_to_swa_index_mapping
        slots = compute(prefix_lens, seq_lens, last_loc, *pages, mapping, tokens, tail, self.page_size)
        self._hand_out(slots, seq_lens_cpu - prefix_lens_cpu, 0 if tail is None else tokens - tail, before)
        full.free_pages, swa.free_pages = full.free_pages[num_full:], swa.free_pages[num_swa:]
        return slots

    def alloc_decode(self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
        """Grow each row of a batch by one token on both sides, all or none, with pages of several slots.

        Parameters, result and errors as `PagedTokenToKVPoolAllocator.alloc_decode`, otherwise as
        `alloc_extend`.
        """
        call = "alloc_decode"
        full, swa = self._paged_pools(call)
        if self.swa_req_ring:
            return full.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        full._require_decode(call, seq_lens, seq_lens_cpu, last_loc)
        self._settle(wait=False)
        ledger = self._audited(call)
        if ledger is not None:
            ledger.check_decode(seq_lens.tolist(), seq_lens_cpu.tolist(), last_loc.tolist())
        need = full._new_pages_of_decode(seq_lens_cpu)
        if not self._fit(need, need):
            return None
        full._merge_if_short(seq_lens.numel())
        swa._merge_if_short(seq_lens.numel())
        compute = swa_decode_triton if self._use_triton_kernels else swa_decode_reference
        pages = full.free_pages[:need], swa.free_pages[:need]
        before = None if ledger is None else self.full_to_swa_index_mapping.clone()
        slots = compute(seq_lens, last_loc, *pages, self.full_to_swa_index_mapping, self.page_size)
        self._hand_out(slots, torch.ones_like(seq_lens_cpu), 0, before)
        full.free_pages, swa.free_pages = full.free_pages[need:], swa.free_pages[need:]
        return slots

    def _paged_pools(self, call: str) -> tuple[PagedTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator]:
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if isinstance(full, PagedTokenToKVPoolAllocator) and isinstance(swa, PagedTokenToKVPoolAllocator):
            return full, swa
        self._unsupported(call, "pages of several slots", "Use alloc(number of tokens).")

    def _unsupported(self, call: str, expected: str, remedy: str) -> NoReturn:
        actual = f"{type(self).__name__} with pages of {self.page_size}"
        raise UnsupportedCallError(call, expected, actual, remedy)

    def _audited(self, call: str) -> PairLedger | None:
        """The ledgers with this allocation begun and both lists checked; None when unchecked."""
        if self._pair is not None:
            self.full_attn_allocator._audited(call)
            self.swa_attn_allocator._audited(call)
        return self._pair

    def _hand_out(self, slots: Tensor, counts: Tensor | None, heads: int, before: Tensor | None) -> None:
        """Checked mode: write down what is about to be returned, or put the mapping back as it was before."""
        if self._pair is None or before is None:
            return
        try:
            self._pair.hand_out(slots.tolist(), None if counts is None else counts.tolist(), heads)
        except StateError:
            self.full_to_swa_index_mapping.copy_(before)
            raise

    # --- release ----------------------------------------------------------------------------------

    def free(self, free_index: Tensor) -> None:
        """Release full slots and their peers.

        free_index: [n] int32 or int64. With pages of several slots every full page touched goes, whole and
        once, with the page it is mapped to, if any; either side ascending; it synchronises. With pages of one
        slot both go in the given order, and every slot must have a peer.
        """
        if not free_index.numel():
            return
        self.full_attn_allocator._require_indices("free", "free_index", free_index)
        if self.swa_req_ring:
            self.full_attn_allocator.free(free_index)
            return
        if self._pair is not None:
            self._pair.free("free", free_index.tolist(), repeats=self.page_size > 1)
        self._release_peers(free_index)
        self._release_full(free_index)

    def free_swa(self, free_index: Tensor) -> None:
        """`free` on the swa side alone: the full slots stay, without peers. Nothing in ring mode."""
        if self.swa_req_ring or not free_index.numel():
            return
        self.full_attn_allocator._require_indices("free_swa", "free_index", free_index)
        if self._pair is not None:
            self._pair.free_swa("free_swa", free_index.tolist())
        self._release_peers(free_index)

    def free_full(self, free_index: Tensor) -> None:
        """`free` on the full side alone, of slots that have no peers (any more)."""
        if not free_index.numel():
            return
        self.full_attn_allocator._require_indices("free_full", "free_index", free_index)
        if self.swa_req_ring:
            self.full_attn_allocator.free(free_index)
            return
        if self._pair is not None:
            self._pair.free_full("free_full", free_index.tolist(), repeats=self.page_size > 1)
        self._release_full(free_index)

    def free_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """Release the pages of one row's positions `[start_pos, start_pos + n)`, and their peers, in row
        order.

        As `PoolAllocator.free_segment`; every page must have a peer. Does not synchronise.
        """
        self._free_segments("free_segment", [(free_index, start_pos)])

    def free_segments(self, segments: Iterable[tuple[Tensor, int]]) -> None:
        """As `free_segment` for each `(slots, start_pos)` in turn, but all or none."""
        self._free_segments("free_segments", segments)

    def free_swa_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """`free_segment` on the swa side alone. Nothing in ring mode."""
        if self.swa_req_ring:
            return
        call = "free_swa_segment"
        parts = self.full_attn_allocator._require_segments(call, [(free_index, start_pos)])
        if parts:
            if self._pair is not None:
                self._pair.free_swa_segment(call, free_index.tolist())
            self._release_peers_in_order([free_index[:: self.page_size]])

    def free_full_segment(self, free_index: Tensor, *, start_pos: int) -> None:
        """`free_segment` on the full side alone, of slots that have no peers (any more)."""
        self._free_full_segments("free_full_segment", [(free_index, start_pos)])

    def free_full_segments(self, segments: Iterable[tuple[Tensor, int]]) -> None:
        """As `free_full_segment` for each `(slots, start_pos)` in turn, but all or none."""
        self._free_full_segments("free_full_segments", segments)

    def _free_segments(self, call: str, segments: Iterable[tuple[Tensor, int]]) -> None:
        full = self.full_attn_allocator
        if self.swa_req_ring:
            full._free_segments(call, segments)
            return
        parts = full._require_segments(call, segments)
        if parts:
            if self._pair is not None:
                self._pair.free_segments(call, [slots.tolist() for slots, _ in parts])
            self._release_peers_in_order([slots[:: self.page_size] for slots, _ in parts])
            full._release_segments(parts)

    def _free_full_segments(self, call: str, segments: Iterable[tuple[Tensor, int]]) -> None:
        full = self.full_attn_allocator
        if self.swa_req_ring:
            full._free_segments(call, segments)
            return
        parts = full._require_segments(call, segments)
        if parts:
            if self._pair is not None:
                self._pair.free_full_segments(call, [slots.tolist() for slots, _ in parts])
            full._release_segments(parts)

    def _release_full(self, slots: Tensor) -> None:
        pages = (slots // self.page_size).to(torch.int64)
        self.full_attn_allocator._take_back(pages, repeats=self.page_size > 1)

    def _release_peers(self, slots: Tensor) -> None:
        """Release the swa side of full slots as `free` does."""
        if self.page_size == 1:
            self._release_peers_in_order([slots])
            return
        pages = self._take_peers(torch.unique(slots // self.page_size) * self.page_size)
        pages = pages[pages > 0]
        if pages.numel():
            self.swa_attn_allocator._take_back(pages, repeats=True)

    def _release_peers_in_order(self, parts: list[Tensor]) -> None:
        """Release the swa pages of full pages, named by a slot each, part after part."""
        pages = self._take_peers(torch.cat(parts))
        self._strays.note(pages)
        for part in torch.split(pages, [part.numel() for part in parts]):
            self.swa_attn_allocator._take_back(part, repeats=False)
        if not pages.is_cuda:  # there, to take strays out would wait; whoever asks or allocates next does
            self._settle(wait=False)

    def _take_peers(self, slots: Tensor) -> Tensor:
        take_peers = take_peers_triton if self._use_triton_kernels else take_peers_reference
        return take_peers(slots, self.full_to_swa_index_mapping, self.page_size)
