"""Short ways to build the page-interleave allocator, call it and look at it; section 8 in plain Python."""

from __future__ import annotations

from typing import Any

import torch

from kvproof.impl.interleave import PageInterleavePoolAllocator


def interleave_pool(pages: int, page_size: int, shards: int, **options: Any) -> PageInterleavePoolAllocator:
    """pages: of one class. options: need_sort, checked, device, kernels (None: as it comes)."""
    kernels, device = options.pop("kernels", None), options.pop("device", "cpu")
    need_sort, checked = options.pop("need_sort", False), options.pop("checked", False)
    assert not options
    sizes = pages * page_size, page_size, shards
    pool = PageInterleavePoolAllocator(*sizes, torch.float16, device, None, need_sort, checked=checked)
    if kernels is not None:
        pool.use_triton_kernels = kernels
    return pool


def chain(
    pool: PageInterleavePoolAllocator,
    *rows: tuple[int, int, int],
    bases: list[int | None],
    dtype: torch.dtype = torch.int64,
) -> list[int] | None:
    """`alloc_extend` of rows (prefix, seq, last_loc)."""
    prefix, seq, last = (torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(3))
    device = pool.class_free_pages[0].device
    tokens = sum(row[1] - row[0] for row in rows)
    lens = prefix.to(device), prefix, seq.to(device), seq, last.to(device)
    slots = pool.alloc_extend(*lens, tokens, rotation_bases=bases)
    return None if slots is None else slots.tolist()


def classes(pool: PageInterleavePoolAllocator) -> list[list[int]]:
    return [pages.tolist() for pages in pool.class_free_pages]


def staged_classes(pool: PageInterleavePoolAllocator) -> list[list[int]]:
    return [[page for ids in parts for page in ids.tolist()] for parts in pool.class_staged_pages]


def state(pool: PageInterleavePoolAllocator) -> tuple[Any, ...]:
    """What an observer can see."""
    return classes(pool), staged_classes(pool), pool.available_size(), pool.debug_print()


def deal(
    rows: list[tuple[int, int]], bases: list[int], lists: list[list[int]], page_size: int
) -> tuple[list[int], list[list[int]]]:
    """Section 8, position-page by position-page: the slots of rows (prefix, seq) and the lists afterwards."""
    left = [list(pages) for pages in lists]
    slots: list[int] = []
    for (prefix, seq), base in zip(rows, bases, strict=True):
        for start in range(prefix, seq, page_size):
            page = left[(base + start // page_size) % len(left)].pop(0)
            slots += range(page * page_size, page * page_size + min(page_size, seq - start))
    return slots, left
