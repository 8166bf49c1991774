"""The page-interleave allocator: one KV cache sharded over N ranks, page by page.

Logical page p belongs to rank p % N, its class, and is its own page p // N there; pages below N are padding.
Each class has a free list of its own. A row takes its pages from one class after the other, so that its KV is
spread evenly: with rotation base b its page number P (of the row, from 0) comes from class (b + P) % N.

    class 0   2 4 6       a row of base 1 that takes 3 pages:  3, 2, 5
    class 1   3 5 7

Bases and page counts are known to the host, so an extend does not wait for the device; a free does, as only
the slots say which class gets how many pages back. Rows grow from page boundaries, by `alloc_extend` alone.

Not covered: who remembers a row's base (its caller), and what is where on a rank.
"""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from kvproof.impl.base import positive
from kvproof.impl.checked import Ledger
from kvproof.impl.errors import AllocatorError, StateError, UnsupportedCallError
from kvproof.impl.interleave_kernels import interleave_extend_triton
from kvproof.impl.interleave_reference import interleave_extend_reference
from kvproof.impl.paged import PagedTokenToKVPoolAllocator


class PageInterleavePoolAllocator(PagedTokenToKVPoolAllocator):
    """A paged pool dealt over `shard_size` classes of `size // physical_page_size` pages each.

    size: capacity of *one* shard in slots. shard_size: how many there are, at least 2. shard_spec: kept for
    callers. Otherwise parameters and attributes as `PagedTokenToKVPoolAllocator`, for the whole: `size` is
    that of all shards. The free list of the base class stays empty; `class_free_pages` has one a class, and
    `class_staged_pages` what waits unsorted for each, released part after part.
    """

    class_free_pages: list[Tensor]
    class_staged_pages: list[list[Tensor]]

    def __init__(
        self,
        size: SupportsIndex,
        physical_page_size: SupportsIndex,
        shard_size: SupportsIndex,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
        shard_spec: Any = None,
        *,
        checked: bool | None = None,
    ) -> None:
        self.shard_size = operator.index(shard_size)
        if self.shard_size < 2:
            raise AllocatorError(
                type(self).__name__,
                "shard_size >= 2",
                f"{shard_size}",
                "A pool that is not sharded takes PagedTokenToKVPoolAllocator.",
            )
        self.shard_spec = shard_spec
        whole = positive(type(self).__name__, "size", size) * self.shard_size
        super().__init__(whole, physical_page_size, dtype, device, kvcache, need_sort, checked=checked)
        self.physical_page_size = self.page_size

    # --- what it is and has -----------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Usable pages of all classes."""
        return self.size // self.shard_size // self.page_size * self.shard_size

    def available_size(self) -> int:
        """Free and staged slots, as if every class had as few as the one that has fewest."""
        return self.shard_size * self.page_size * min(self.class_free_page_counts())

    def aggregate_free_size(self) -> int:
        """Free and staged slots of all classes. An extend may be refused although it needs no more."""
        return self.page_size * sum(self.class_free_page_counts())

    def class_free_page_counts(self) -> list[int]:
        """Free and staged pages of each class."""
        return [
            free.numel() + sum(ids.numel() for ids in staged)
            for free, staged in zip(self.class_free_pages, self.class_staged_pages, strict=True)
        ]

    def least_full_class(self) -> int:
        """The class with most free and staged pages, the lowest on ties: a new row's base."""
        return _least_full(self.class_free_page_counts())

    def get_all_free_pages(self) -> Tensor:
        """Free page numbers, class after class, then staged ones; a copy."""
        staged = [ids for parts in self.class_staged_pages for ids in parts]
        return torch.cat([*self.class_free_pages, *staged])

    def debug_print(self) -> str:
        """One line on the state, for logs. Does not synchronise."""
        free = sum(ids.numel() for ids in self.class_free_pages)
        counts = self.class_free_page_counts()
        classes = ", ".join(f"class {rank}: {count}" for rank, count in enumerate(counts))
        held = (
            "" if self._held is None else f", {sum(ids.numel() for ids, _ in self._held)} ids held by a group"
        )
        return f"{free} free + {sum(counts) - free} staged of {self.num_pages} pages ({classes}){held}"

    # --- allocation -------------------------------------------------------------------------------

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
        rotation_bases: list[int | None] | None = None,
    ) -> Tensor | None:
        """Grow each row of a batch from its prefix length, a multiple of the page size, all or none.

        rotation_bases: one a row, needed unless the batch is empty; for None the class is drawn that has most
        pages at that row's turn, and written into the list when the call is granted. num_new_pages: counted
        from the lengths; checked mode compares. Otherwise arguments as `PagedTokenToKVPoolAllocator`.

        Returns [extend_num_tokens] int64 slots, rows in batch order, or None when some class, staged pages
        merged in, is too short. Does not synchronise. Raises AllocatorError for tensors of the wrong shape,
        dtype or device, for host lengths that break the contract, and without a base for each row; for
        other breaches in checked mode only.
        """
        call = "alloc_extend"
        self._require_extend(call, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc)
        given = [] if rotation_bases is None else rotation_bases
        if len(given) != prefix_lens.numel():
            raise AllocatorError(
                call,
                f"rotation_bases with one entry for each of {prefix_lens.numel()} rows",
                f"{rotation_bases}",
                "Pass a list; None in it lets the allocator choose.",
            )
        prefixes, seqs = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        ledger = self._audited(call)
        if ledger is not None:
            lens = prefix_lens.tolist(), prefixes, seq_lens.tolist(), seqs
            ledger.check_extend(*lens, last_loc.tolist(), extend_num_tokens, num_new_pages)
        self._require_lens(call, prefixes, seqs, extend_num_tokens)
        bases, plan, needs = self._deal(prefixes, seqs, given)
        if ledger is not None:
            self._check_rotation(ledger, prefixes, last_loc.tolist(), bases)
        if any(need > count for need, count in zip(needs, self.class_free_page_counts(), strict=True)):
            return None
        if any(need > free.numel() for need, free in zip(needs, self.class_free_pages, strict=True)):
            self.merge_and_sort_free()
        taken = torch.cat([free[:need] for free, need in zip(self.class_free_pages, needs, strict=True)])
        compute = interleave_extend_triton if self.use_triton_kernels else interleave_extend_reference
        on_device = plan.to(taken.device, non_blocking=True)
        slots = compute(prefix_lens, seq_lens, on_device, taken, extend_num_tokens, self.page_size)
        if ledger is not None:
            ledger.hand_out(slots.tolist(), (seq_lens_cpu - prefix_lens_cpu).tolist())
        given[:] = bases
        for rank, need in enumerate(needs):
            self.class_free_pages[rank] = self.class_free_pages[rank][need:]
        return slots

    def alloc_cyclic(self, start_class: int, need_size: int) -> Tensor | None:
        """A new row of `need_size` slots whose pages go round from `start_class`, taken modulo the shards.

        Returns and raises as `alloc_extend`.
        """
        need = operator.index(need_size)
        host = torch.tensor([0, need])
        # Filled on the device: a copy from the host would wait for it.
        none, seq = (torch.full((1,), fill, device=self.free_pages.device) for fill in (0, need))
        return self.alloc_extend(
            none, host[:1], seq, host[1:], none - 1, need, rotation_bases=[operator.index(start_class)]
        )

    def _require_lens(self, call: str, prefixes: list[int], seqs: list[int], num_tokens: int) -> None:
        """Rows that grow or stay, from page boundaries, by so many tokens together; or AllocatorError."""
        for row, (prefix, seq) in enumerate(zip(prefixes, seqs, strict=True)):
            if not 0 <= prefix <= seq or prefix % self.page_size:
                raise AllocatorError(
                    call,
                    f"prefix_lens of k * {self.page_size} >= 0, and seq_lens >= prefix_lens",
                    f"prefix {prefix} and sequence {seq} in batch row {row}",
                    "Extend a row from a page boundary on; drop the tail that is not full.",
                )
        total = sum(seqs) - sum(prefixes)
        if num_tokens != total:
            raise AllocatorError(
                call,
                f"extend_num_tokens = {total}",
                f"{num_tokens}",
                "Pass the number of slots the batch needs.",
            )

    def _deal(
        self, prefixes: list[int], seqs: list[int], given: Sequence[int | None]
    ) -> tuple[list[int], Tensor, list[int]]:
        """Each row's base; the plan, [batch, 1 + shards] on the host, that the kernel goes by; and how many
        pages each class gives."""
        shards, ps = self.shard_size, self.page_size
        counts = self.class_free_page_counts()
        needs = [0] * shards
        bases: list[int] = []
        plan: list[list[int]] = []
        for prefix, seq, base in zip(prefixes, seqs, given, strict=True):
            base = _least_full(counts) if base is None else operator.index(base)
            start = (base + prefix // ps) % shards
            bases.append(base)
            plan.append([start, *needs])
            rounds, rest = divmod(-(-seq // ps) - prefix // ps, shards)
            for rank in range(shards):
                share = rounds + ((rank - start) % shards < rest)
                needs[rank] += share
                counts[rank] -= share
        rows = torch.tensor(plan, dtype=torch.int64).reshape(-1, 1 + shards)
        wanted = torch.tensor(needs)
        rows[:, 1:] += torch.cumsum(wanted, 0) - wanted
        return bases, rows, needs

    def _check_rotation(self, ledger: Ledger, prefixes: list[int], last: list[int], bases: list[int]) -> None:
        """AllocatorError unless each row's base is the one that its last page was taken by."""
        shards, ps = self.shard_size, self.page_size
        for row, (prefix, slot, base) in enumerate(zip(prefixes, last, bases, strict=True)):
            owner, due = slot // ps % shards, (base + prefix // ps - 1) % shards
            if prefix and owner != due:
                ledger.refuse(
                    f"the row's last page to be of class {due}, by rotation base {base}",
                    f"last_loc {slot}, of class {owner}, in batch row {row} of prefix {prefix}",
                    "Pass the base that the row's first extend was given or has drawn.",
                )

    def alloc(self, need_size: int) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("alloc", "Use alloc_extend, or alloc_cyclic for one row.")

    def alloc_decode(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("alloc_decode", "Sharded pools serve prefill only.")

    def merge_and_sort_free(self) -> None:
        """Join each class's staged pages to its free list and sort it, where there are any."""
        for rank, staged in enumerate(self.class_staged_pages):
            if staged:
                joined = torch.cat([self.class_free_pages[rank], *staged])
                self.class_free_pages[rank] = torch.sort(joined).values
                self.class_staged_pages[rank] = []

    def _audited(self, call: str) -> Ledger | None:
        if self._ledger is not None:
            free = [pages.tolist() for pages in self.class_free_pages]
            staged = [[page for ids in parts for page in ids.tolist()] for parts in self.class_staged_pages]
            self._ledger.begin_allocation(call, [*chain(*free)], [*chain(*staged)])
            for rank, pages in enumerate(map(operator.add, free, staged)):
                for page in pages:
                    if page % self.shard_size != rank:
                        raise StateError(
                            call,
                            f"pages of class {rank} in its list",
                            f"page {page} of class {page % self.shard_size}",
                            "The class lists were written from outside; clear() rebuilds them.",
                        )
        return self._ledger

    # --- release ----------------------------------------------------------------------------------

    def free_page_ids(self, page_ids: Tensor) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("free_page_ids", "Use free.")

    def _release_segments(self, parts: list[tuple[Tensor, int]]) -> None:
        for slots, _ in parts:
            self._take_back((slots[:: self.page_size] // self.page_size).to(torch.int64), repeats=True)

    def _release(self, ids: Tensor) -> None:
        """Give each class its own back. ids: ascending."""
        owners = ids % self.shard_size
        by_class = ids[torch.argsort(owners, stable=True)]
        sizes = (owners.unsqueeze(1) == torch.arange(self.shard_size, device=ids.device)).sum(0).tolist()
        for rank, mine in enumerate(torch.split(by_class, sizes)):
            if mine.numel() and self.need_sort:
                self.class_staged_pages[rank].append(mine)
            elif mine.numel():
                self.class_free_pages[rank] = torch.cat((mine, self.class_free_pages[rank]))

    # --- beginnings -------------------------------------------------------------------------------

    def clear(self) -> None:
        """Back to the initial state: all pages free and ascending, no group, nothing staged or live."""
        shards = self.shard_size
        rounds = torch.arange(1, self.num_pages // shards + 1, dtype=torch.int64, device=self.device)
        self.class_free_pages = [rounds * shards + rank for rank in range(shards)]
        self.class_staged_pages = [[] for _ in range(shards)]
        self.free_pages = rounds[:0]
        self.staged_pages = []
        self._held = None
        self._ledger = Ledger(self.page_size, self.num_pages, padding=shards) if self.checked else None

    def resize(self, config: Any) -> NoReturn:
        """Not of this allocator: raises UnsupportedCallError."""
        self._unsupported("resize", "Build a new one.")

    def _unsupported(self, call: str, remedy: str) -> NoReturn:
        raise UnsupportedCallError(call, "a pool of one list", "the page-interleave allocator", remedy)


def _least_full(counts: list[int]) -> int:
    return counts.index(max(counts))
