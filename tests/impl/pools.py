"""Short ways to build our allocators, call them and read their state, for the tests of this folder."""

from __future__ import annotations

import torch

from kvproof.impl.base import PoolAllocator
from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.token import TokenToKVPoolAllocator


def token_pool(size: int, *, need_sort: bool = False, checked: bool = False) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, torch.float16, "cpu", None, need_sort, checked=checked)


def paged_pool(
    pages: int, page_size: int, *, need_sort: bool = False, checked: bool = False, device: str = "cpu"
) -> PagedTokenToKVPoolAllocator:
    size = pages * page_size
    return PagedTokenToKVPoolAllocator(
        size, page_size, torch.float16, device, None, need_sort, checked=checked
    )


def ids(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def extend(
    pool: PagedTokenToKVPoolAllocator, *rows: tuple[int, int, int], dtype: torch.dtype = torch.int64
) -> list[int] | None:
    """`alloc_extend` of rows (prefix, seq, last_loc)."""
    prefix, seq, last = (torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(3))
    device = pool.free_pages.device
    tokens = sum(row[1] - row[0] for row in rows)
    slots = pool.alloc_extend(prefix.to(device), prefix, seq.to(device), seq, last.to(device), tokens)
    return None if slots is None else slots.tolist()


def decode(pool: PagedTokenToKVPoolAllocator, *rows: tuple[int, int]) -> list[int] | None:
    """`alloc_decode` of rows (seq after the step, last_loc)."""
    seq, last = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in range(2))
    device = pool.free_pages.device
    slots = pool.alloc_decode(seq.to(device), seq, last.to(device))
    return None if slots is None else slots.tolist()


def alloc(pool: PoolAllocator, size: int) -> list[int] | None:
    slots = pool.alloc(size)
    return None if slots is None else slots.tolist()


def free_list(pool: PoolAllocator) -> list[int]:
    return pool.free_pages.tolist()


def staged(pool: PoolAllocator) -> list[int]:
    return [page for part in pool.staged_pages for page in part.tolist()]


def state(pool: PoolAllocator) -> tuple[list[int], list[int], int, str]:
    """What an observer can see of a pool: free, staged, available, and the line that counts what is held."""
    return free_list(pool), staged(pool), pool.available_size(), pool.debug_print()
