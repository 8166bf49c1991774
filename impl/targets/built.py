"""Our allocators of every kind: built from a config, and seen from inside.

The classes come from a package, ours or a copy of it with a fault (`planted`). What SGLang's constructors
want of a KV pool stands here in a few lines: its ring, its row table, its compressed pool.

Not covered: which calls are made (`tensors.py`), and the paths (`ours.py`).
"""

import importlib
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch

from kvproof.impl.targets.protocol import Lists, State
from kvproof.model.config import COMPRESSION, Config

_PLACES: Final = {
    "token": ("token", "TokenToKVPoolAllocator"),
    "paged": ("paged", "PagedTokenToKVPoolAllocator"),
    "swa": ("swa", "SWATokenToKVPoolAllocator"),
    "swa-ring": ("swa", "SWATokenToKVPoolAllocator"),
    "pure-swa": ("pure_swa", "PureSWATokenToKVPoolAllocator"),
    "hisparse": ("hisparse", "HiSparseTokenToKVPoolAllocator"),
    "hisparse-v4": ("hisparse_v4", "DeepSeekV4HiSparseTokenToKVPoolAllocator"),
    "mamba": ("mamba", "MambaSlotAllocator"),
    "page-interleave": ("interleave", "PageInterleavePoolAllocator"),
}

# As the modules of `impl/` say of themselves: what waits for the device is a plain free of pages of several
# slots, which a group puts off to its end, and a device buffer, whose size depends on what is mapped.
_EVERYWHERE: Final = frozenset(
    {
        "alloc",
        "alloc_extend",
        "alloc_decode",
        "alloc_extend_swa_tail",
        "alloc_logical_only",
        "free_segment",
        "free_segments",
        "free_swa_segment",
        "free_full_segment",
        "free_page_ids",
        "free_group_begin",
        "set_full_to_swa_mapping",
        "clear_full_to_swa_mapping",
        "clear",
        "resize",
    }
)
_SINGLE: Final = frozenset({"free", "free_swa", "free_full", "free_group_end"})
# Segments too are split by owner, or release a set on the device's side.
_SEGMENTS: Final = frozenset({"free_segment", "free_segments", "free_full_segment"})

Classes = Mapping[str, type[Any]]
"""Allocator classes by kind."""


def classes_of(package: str) -> Classes:
    """The classes of every kind in a package of ours, imported."""
    return {
        kind: getattr(importlib.import_module(f"{package}.{module}"), name)
        for kind, (module, name) in _PLACES.items()
    }


def sync_free(config: Config) -> frozenset[str]:
    """The methods of this allocator that do not wait for the device."""
    match config.allocator:
        case "hisparse" | "hisparse-v4" | "page-interleave":
            return _EVERYWHERE - _SEGMENTS
        case "mamba":
            return frozenset({"alloc", "free", "clear", "alloc_group_begin", "alloc_group_end"})
    return _EVERYWHERE | _SINGLE if config.page_size == 1 and config.allocator != "paged" else _EVERYWHERE


def construct(classes: Classes, config: Config, device: str, *, kernels: bool) -> Any:
    """A fresh allocator."""
    allocator = _construct(classes, config, device)
    if hasattr(allocator, "use_triton_kernels"):
        allocator.use_triton_kernels = kernels
    return allocator


def _construct(classes: Classes, config: Config, device: str) -> Any:
    cls = classes[config.allocator]
    rest: tuple[Any, ...] = (torch.float16, device)
    how: dict[str, Any] = {"checked": config.checked}
    size, ps, sort = config.size, config.page_size, config.need_sort
    match config.allocator:
        case "token":
            return cls(size, *rest, None, sort, **how)
        case "swa":
            return cls(size, config.swa_size, ps, *rest, None, sort, **how)
        case "swa-ring":
            pool = SimpleNamespace(swa_req_ring_size=config.ring)
            rows = SimpleNamespace(available_size=lambda: config.request_rows)
            return cls(size, size, ps, *rest, pool, sort, rows, **how)
        case "hisparse":
            return cls(size, ps, *rest, None, sort, config.ratio, **how)
        case "hisparse-v4":
            pool = SimpleNamespace(
                c4_kv_pool=SimpleNamespace(size=config.device_size, page_size=config.device_page_size),
                c4_logical_size=size // COMPRESSION,
            )
            return cls(classes["swa"](size, config.swa_size, ps, *rest, pool, sort, **how), **how)
        case "mamba":
            return cls(size, device, **how)
        case "page-interleave":
            return cls(size, ps, config.shards, *rest, None, sort, **how)
    return cls(size, ps, *rest, None, sort, **how)


def counts_pages(cls: type[Any]) -> bool:
    """Whether its `alloc_extend` may be told the number of new pages."""
    extend = getattr(cls, "alloc_extend", None)
    return extend is not None and "num_new_pages" in inspect.signature(extend).parameters


def state(allocator: Any, kind: str) -> State:
    """The allocator from inside, as `protocol.State` lays it out for each kind."""
    match kind:
        case "swa" | "hisparse-v4":
            return _swa_state(allocator, kind)
        case "swa-ring":
            main = _lists(allocator.full_attn_allocator)
            return State(main.free, main.staged, mappings=_mapping(allocator), sizes=_sizes(allocator))
        case "pure-swa":
            main = _lists(allocator.swa_attn_allocator)
            return State(main.free, main.staged, sizes=_sizes(allocator))
        case "hisparse":
            main = _lists(allocator.logical_attn_allocator)
            device = {"device": _lists(allocator.hisparse_attn_allocator)}
            return State(main.free, main.staged, sides=device, mappings=_device_mapping(allocator))
        case "page-interleave":
            classes = [
                Lists(free.tolist(), [page for ids in staged for page in ids.tolist()])
                for free, staged in zip(allocator.class_free_pages, allocator.class_staged_pages, strict=True)
            ]
            sides = {f"class {rank}": classes[rank] for rank in range(1, len(classes))}
            sizes = {"aggregate": allocator.aggregate_free_size()}
            return State(classes[0].free, classes[0].staged, sides=sides, sizes=sizes)
        case "mamba":
            return State(allocator.free_slots.tolist(), [])
    main = _lists(allocator)
    return State(main.free, main.staged)


def _swa_state(allocator: Any, kind: str) -> State:
    swa = allocator.logical_attn_allocator if kind == "hisparse-v4" else allocator
    main = _lists(swa.full_attn_allocator)
    sides, mappings = {"swa": _lists(swa.swa_attn_allocator)}, _mapping(swa)
    if kind == "hisparse-v4":
        sides["device"] = _lists(allocator.hisparse_attn_allocator)
        mappings |= _device_mapping(allocator)
    return State(main.free, main.staged, sides=sides, mappings=mappings, sizes=_sizes(allocator))


def _sizes(allocator: Any) -> dict[str, int]:
    return {"full": allocator.full_available_size(), "swa": allocator.swa_available_size()}


def _mapping(allocator: Any) -> dict[str, list[int]]:
    return {"swa": allocator.full_to_swa_index_mapping.tolist()}


def _device_mapping(allocator: Any) -> dict[str, list[int]]:
    return {"device": allocator.full_to_hisparse_device_index_mapping.tolist()}


def _lists(pool: Any) -> Lists:
    return Lists(pool.free_pages.tolist(), [page for ids in pool.staged_pages for page in ids.tolist()])


def sides(allocator: Any, kind: str) -> dict[str, tuple[torch.Tensor, int]]:
    """The side mappings, each with the slots one entry stands for."""
    found: dict[str, tuple[torch.Tensor, int]] = {}
    if kind in ("swa", "hisparse-v4"):
        found["swa"] = allocator.full_to_swa_index_mapping, 1
    if kind in ("hisparse", "hisparse-v4"):
        each = COMPRESSION if kind == "hisparse-v4" else 1
        found["device"] = allocator.full_to_hisparse_device_index_mapping, each
    return found


def wrapped(allocator: Any, kind: str) -> Any:
    """The allocator that this one wraps, None for none."""
    return allocator.logical_attn_allocator if kind == "hisparse-v4" else None
