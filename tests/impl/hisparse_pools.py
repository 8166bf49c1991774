"""Short ways to build the HiSparse allocators, call them and read their state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvproof.impl.hisparse import HiSparseTokenToKVPoolAllocator
from kvproof.impl.hisparse_v4 import DeepSeekV4HiSparseTokenToKVPoolAllocator
from tests.impl.pools import free_list, ids, staged
from tests.impl.swa_pools import swa_pool


def hisparse_pool(device_pages: int, page_size: int, ratio: int = 2, **options: Any) -> Any:
    """options: kvcache, need_sort, checked, device, kernels (None: as it comes)."""
    kernels, device = options.pop("kernels", None), options.pop("device", "cpu")
    need_sort, checked = options.pop("need_sort", False), options.pop("checked", False)
    rest = torch.float16, device, options.pop("kvcache", None), need_sort, ratio
    assert not options
    pool = HiSparseTokenToKVPoolAllocator(device_pages * page_size, page_size, *rest, checked=checked)
    if kernels is not None:
        pool.use_triton_kernels = kernels
    return pool


def v4_pool(pages: int, swa_pages: int, device_pages: int, page_size: int, **options: Any) -> Any:
    """options: those of `swa_pool`; checked is said of both."""
    c4 = SimpleNamespace(size=device_pages * page_size // 4, page_size=page_size // 4)
    logical = swa_pool(pages, swa_pages, page_size, kvcache=SimpleNamespace(c4_kv_pool=c4), **options)
    pool = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
    pool.use_triton_kernels = logical.use_triton_kernels
    return pool


def extend(
    pool: Any, *rows: tuple[int, int, int], call: str = "alloc_extend", dtype: torch.dtype = torch.int64
) -> list[int] | None:
    """`alloc_extend`, or `alloc_logical_only`, of rows (prefix, seq, last_loc)."""
    prefix, seq, last = (torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(3))
    device = pool.full_to_hisparse_device_index_mapping.device
    tokens = sum(row[1] - row[0] for row in rows)
    slots = getattr(pool, call)(prefix.to(device), prefix, seq.to(device), seq, last.to(device), tokens)
    return None if slots is None else slots.tolist()


def decode(pool: Any, *rows: tuple[int, int]) -> list[int] | None:
    """`alloc_decode` of rows (seq after the step, last_loc)."""
    seq, last = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in range(2))
    device = pool.full_to_hisparse_device_index_mapping.device
    slots = pool.alloc_decode(seq.to(device), seq, last.to(device))
    return None if slots is None else slots.tolist()


def buffer(pool: Any, entries: list[int], need: int) -> list[int] | None:
    """`alloc_device_buffer`."""
    slots = pool.alloc_device_buffer(ids(*entries), need)
    return None if slots is None else slots.tolist()


def mapped(pool: Any, *entries: int) -> list[int]:
    """What the device mapping says there."""
    return pool.full_to_hisparse_device_index_mapping[ids(*entries)].tolist()


def all_mapped(pool: Any) -> dict[int, int]:
    """The device mapping without its zeroes and its last entry, which is -1."""
    *entries, last = pool.full_to_hisparse_device_index_mapping.tolist()
    assert last == -1
    return {at: slot for at, slot in enumerate(entries) if slot}


def lists(pool: Any) -> tuple[list[int], list[int]]:
    """Free pages of the logical (full) side, then of the device side."""
    logical = pool.logical_attn_allocator
    return free_list(getattr(logical, "full_attn_allocator", logical)), free_list(
        pool.hisparse_attn_allocator
    )


def staged_device(pool: Any) -> list[int]:
    return staged(pool.hisparse_attn_allocator)


def state(pool: Any) -> tuple[Any, ...]:
    """What an observer can see of all sides."""
    swa = getattr(pool, "full_to_swa_index_mapping", ids()).tolist()
    logical = pool.logical_attn_allocator.get_all_free_pages().tolist()
    return lists(pool), staged_device(pool), all_mapped(pool), swa, logical, pool.debug_print()
