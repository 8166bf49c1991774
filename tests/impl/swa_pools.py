"""Short ways to build the sliding-window allocator, call it and read its state; random lawful use."""

from __future__ import annotations

import random
from typing import Any

import torch

from kvproof.impl.swa import SWATokenToKVPoolAllocator
from tests.impl.pools import free_list, ids, staged
from tests.impl.swa_oracle import SwaOracle


def swa_pool(
    pages: int, swa_pages: int, page_size: int, *, kvcache: Any = None, rows: Any = None, **options: Any
) -> SWATokenToKVPoolAllocator:
    """options: need_sort, checked, device, kernels (None: as it comes)."""
    kernels = options.pop("kernels", None)
    device, need_sort = options.pop("device", "cpu"), options.pop("need_sort", False)
    sizes = pages * page_size, swa_pages * page_size, page_size
    pool = SWATokenToKVPoolAllocator(
        *sizes, torch.float16, device, kvcache, need_sort, rows, checked=options.pop("checked", False)
    )
    assert not options
    if kernels is not None:
        pool.use_triton_kernels = kernels
    return pool


def extend(
    pool: Any, *rows: tuple[int, int, int], tail: int | None = None, dtype: torch.dtype = torch.int64
) -> list[int] | None:
    """`alloc_extend` of rows (prefix, seq, last_loc), or `alloc_extend_swa_tail` of one."""
    prefix, seq, last = (torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(3))
    device = pool.full_to_swa_index_mapping.device
    tokens = sum(row[1] - row[0] for row in rows)
    lens = prefix.to(device), prefix, seq.to(device), seq, last.to(device), tokens
    slots = pool.alloc_extend(*lens) if tail is None else pool.alloc_extend_swa_tail(*lens, tail)
    return None if slots is None else slots.tolist()


def decode(pool: Any, *rows: tuple[int, int]) -> list[int] | None:
    """`alloc_decode` of rows (seq after the step, last_loc)."""
    seq, last = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in range(2))
    device = pool.full_to_swa_index_mapping.device
    slots = pool.alloc_decode(seq.to(device), seq, last.to(device))
    return None if slots is None else slots.tolist()


def peers(pool: Any, *slots: int) -> list[int]:
    """What the mapping says of these slots."""
    return pool.translate_loc_from_full_to_swa(ids(*slots)).tolist()


def lists(pool: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """Free and staged pages of the full side, then of the swa side."""
    full, swa = pool.full_attn_allocator, pool.swa_attn_allocator
    return free_list(full), staged(full), free_list(swa), staged(swa)


def state(pool: Any) -> tuple[Any, ...]:
    """What an observer can see of both sides."""
    sizes = pool.available_size(), pool.full_available_size(), pool.swa_available_size()
    return lists(pool), sizes, pool.full_to_swa_index_mapping.tolist(), pool.debug_print()


class Run:
    """Random lawful calls to the allocator and to the oracle, compared after each. wrong: the first one
    after which they differed."""

    def __init__(self, seed: str, page_size: int, *, need_sort: bool, checked: bool, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.ps = page_size
        pages, swa_pages = self.rng.randrange(4, 16), self.rng.randrange(4, 16)
        self.pool = swa_pool(pages, swa_pages, page_size, need_sort=need_sort, checked=checked, **options)
        self.oracle = SwaOracle(pages * page_size, swa_pages * page_size, page_size, need_sort)
        self.rows: list[list[int]] = []
        self.in_group = False
        self.granted = self.remapped = 0
        self.wrong = ""
        self.device = self.pool.full_to_swa_index_mapping.device

    def steps(self, count: int) -> str:
        """Returns the first difference, "" when there is none."""
        kinds = (
            ["grow"] * 4
            + ["decode"] * 2
            + ["free", "free_swa", "segment", "swa_segment", "full", "group", "remap"]
        )
        kinds += [] if self.ps == 1 else ["tail", "tail"]
        for step in range(count):
            kind = self.rng.choice(kinds)
            getattr(self, f"_{kind}")()
            self._compare(f"step {step}, {kind}")
            if self.wrong:
                break
        return self.wrong

    def _compare(self, what: str) -> None:
        oracle = self.oracle
        expected = oracle.full.free, oracle.full.staged, oracle.swa.free, oracle.swa.staged
        if lists(self.pool) != expected:
            self.wrong = self.wrong or f"{what}: lists {lists(self.pool)}, expected {expected}"
        mapping = self.pool.full_to_swa_index_mapping.tolist()
        if mapping != oracle.mapping():
            self.wrong = self.wrong or f"{what}: mapping {mapping}, expected {oracle.mapping()}"

    def _answer(self, got: list[int] | None, expected: list[int] | None) -> list[int] | None:
        if got != expected:
            self.wrong = self.wrong or f"got {got}, expected {expected}"
        self.granted += got is not None
        return got

    def _slots(self, slots: list[int]) -> torch.Tensor:
        dtype = self.rng.choice((torch.int32, torch.int64))
        return torch.tensor(slots, dtype=dtype, device=self.device)

    def _growable(self) -> list[list[int]]:
        """Rows whose last page is full or paired."""
        return [row for row in self.rows if not len(row) % self.ps or row[-1] in self.oracle.peer]

    def _grow(self) -> None:
        if self.ps == 1:
            n = self.rng.randrange(5)
            got = self.pool.alloc(n)
            got = self._answer(None if got is None else got.tolist(), self.oracle.alloc(n))
            self.rows += [got] if got else []
            return
        rows = self._growable()
        grown = [*self.rng.sample(rows, self.rng.randrange(len(rows) + 1)), []]
        more = [self.rng.choice((0, 1, self.ps - 1, self.ps, self.ps + 1)) for _ in grown]
        batch = [(len(r), len(r) + n, r[-1] if r else -1) for r, n in zip(grown, more, strict=True)]
        dtype = self.rng.choice((torch.int32, torch.int64))
        got = self._answer(extend(self.pool, *batch, dtype=dtype), self.oracle.extend(batch))
        if got is not None:
            for row, n in zip(grown, more, strict=True):
                row += got[:n]
                del got[:n]
            self.rows += [grown[-1]] if grown[-1] else []

    def _tail(self) -> None:
        """The tail begins at a page of the row."""
        row = self.rng.choice([*self.rows, []])
        n = self.rng.randrange(3 * self.ps)
        seq = len(row) + n
        starts = [q for q in range(len(row), seq) if q % self.ps == 0] + [seq]
        batch = len(row), seq, row[-1] if row else -1
        tail = seq - self.rng.choice(starts)
        got = self._answer(extend(self.pool, batch, tail=tail), self.oracle.extend([batch], tail))
        if got:
            self.rows += [] if row else [row]
            row += got

    def _decode(self) -> None:
        rows = self._growable()
        grown = self.rng.sample(rows, self.rng.randrange(len(rows) + 1))
        if self.ps == 1 or not grown:
            return
        batch = [(len(row) + 1, row[-1]) for row in grown]
        got = self._answer(decode(self.pool, *batch), self.oracle.decode(batch))
        for row, slot in zip(grown, got or [], strict=got is not None):
            row.append(slot)

    def _stretch(self) -> tuple[list[int], int, list[int]]:
        """A row, a page boundary in it, and what lies behind."""
        row = self.rng.choice(self.rows)
        start = self.rng.randrange(len(row)) // self.ps * self.ps
        return row, start, row[start:]

    def _paired(self, slots: list[int]) -> list[int]:
        """As many of these, whole pages from the start, as have peers on every page."""
        count = 0
        while count < len(slots) and slots[count] in self.oracle.peer:
            count += self.ps
        return slots[:count]

    def _drop(self, row: list[int], start: int) -> None:
        del row[start:]
        self.rows = [row for row in self.rows if row]

    def _free(self) -> None:
        if not self.rows:
            return
        row, start, slots = self._stretch()
        if self.ps == 1 and len(self._paired(slots)) < len(slots):
            return
        order = self.rng.sample(slots, len(slots))
        self.pool.free(self._slots(order))
        self.oracle.free(order)
        self._drop(row, start)

    def _free_swa(self) -> None:
        if self.rows:
            _, _, slots = self._stretch()
            some = self.rng.sample(slots, self.rng.randrange(1, len(slots) + 1))
            some = [slot for slot in some if slot in self.oracle.peer] if self.ps == 1 else some
            self.pool.free_swa(self._slots(some))
            self.oracle.free_swa(some)

    def _swa_segment(self) -> None:
        if self.rows:
            _, start, slots = self._stretch()
            slots = self._paired(slots)
            self.pool.free_swa_segment(self._slots(slots), start_pos=start)
            self.oracle.free_swa_segment(slots)

    def _segment(self) -> None:
        if self.rows:
            row, start, slots = self._stretch()
            if len(self._paired(slots)) == len(slots):
                middle = self.rng.randrange(len(slots) // self.ps + 1) * self.ps
                parts = [(slots[:middle], start), (slots[middle:], start + middle)]
                self.pool.free_segments([(self._slots(part), at) for part, at in parts])
                for part, _ in parts:
                    if part:
                        self.oracle.free_segment(part)
                self._drop(row, start)

    def _full(self) -> None:
        if self.rows:
            row, start, slots = self._stretch()
            if not any(slot in self.oracle.peer for slot in slots):
                if self.rng.random() < 0.5:
                    self.pool.free_full(self._slots(slots))
                    self.oracle.free_full(slots)
                else:
                    self.pool.free_full_segment(self._slots(slots), start_pos=start)
                    self.oracle.free_full_segment(slots)
                self._drop(row, start)

    def _remap(self) -> None:
        """A page that has lost its peers takes over those of the same page of another row."""
        if len(self.rows) < 2:
            return
        row, donor = self.rng.sample(self.rows, 2)
        start = self.rng.randrange(min(len(row), len(donor))) // self.ps * self.ps
        mine, theirs = row[start : start + self.ps], donor[start : start + self.ps]
        peer = self.oracle.peer
        given = [peer[slot] for slot in theirs[: len(mine)] if slot in peer]
        if len(given) < len(mine) or any(slot in peer for slot in mine):
            return
        edits = [
            lambda: self.pool.set_full_to_swa_mapping(self._slots(mine), self._slots(given)),
            lambda: self.pool.clear_full_to_swa_mapping(self._slots(theirs)),
        ]
        for edit in self.rng.sample(edits, 2):
            edit()
        for slot in theirs:
            peer.pop(slot, None)
        peer.update(zip(mine, given, strict=True))
        self.remapped += 1

    def _group(self) -> None:
        if self.in_group:
            self.pool.free_group_end()
            self.oracle.end()
        else:
            self.pool.free_group_begin()
            self.oracle.begin()
        self.in_group = not self.in_group
