"""How the allocators of one release are imported, built, called and looked at, as Python text.

The same facts as `kinds` and `pools` act on, told to somebody who has the release and torch and nothing of
ours. Names that the text takes for granted: `torch`, `SimpleNamespace`, `DEVICE`, `pages(pool)` (the free and
the released pages of one pool) and `class_pages(allocator, number)` (of one class, where pages are dealt over
ranks). This file does NOT make calls and does NOT say what is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvproof.impl.targets.sglang import kinds, pools
from kvproof.impl.targets.sglang.load import LoadedSglang, load_kind
from kvproof.model.config import COMPRESSION, Config

_POOL_DOC: Final = '    """A KV pool without memory: what the allocator reads of one, and no more."""'
_SKIP: Final = ["", "    def __init__(self):", "        pass"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """One kind of one release, for one config.

    version: of the release. first: modules to import before the others. imports: module and name of each
    class that the text needs. classes: definitions
    of stand-ins, as lines, two blank ones between definitions. build: statements that leave `allocator`;
    reset: those that must follow a `clear` or a `resize`. pages: expressions of the free and released pages,
    by side, "" for the main one. paged: of the pools whose kernels read a free list called `free_pages`.
    mappings: of the side mappings as lists, by side; each: slots that one of their entries stands for. sizes,
    available: of what it says is available. cpu_lens, page_count: as in `tensors.Surface`.
    """

    version: str
    first: tuple[str, ...]
    imports: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]
    build: tuple[str, ...]
    reset: tuple[str, ...]
    pages: dict[str, str]
    paged: tuple[str, ...]
    mappings: dict[str, str]
    each: dict[str, int]
    sizes: dict[str, str]
    available: str
    cpu_lens: bool
    page_count: bool


def spell(loaded: LoadedSglang, config: Config, kernels: bool) -> Spelling:
    """The text for this config; kernels as in `kinds.construct`. Imports the kind if need be.

    Raises `SglangUnavailable` when the release has no such kind.
    """
    kind = config.allocator
    cls = kinds.allocator_class(loaded, kind)
    imports, classes, build = _BUILDERS[kind](loaded, config)
    pools, mappings, each = _sides(cls, config)
    paged = tuple(pools.values()) if kind in _PAGED and (config.page_size > 1 or kind != "swa") else ()
    if kind == "swa-ring":
        paged += ("allocator.swa_attn_allocator",)
    if loaded.has_naive_path:
        build += [f"{name}.use_triton_kernels = {kernels}" for name in paged]
    if kind == "page-interleave":
        listed = {side: f"class_pages(allocator, {number})" for number, side in enumerate(pools)}
    else:
        listed = {side: f"pages({name})" for side, name in pools.items()}
    reset = (_window(loaded, config),) if config.page_offset else ()
    extend = getattr(cls, "alloc_extend", None)
    return Spelling(
        version=loaded.version,
        first=loaded.layout.first,
        imports=tuple(imports),
        classes=tuple(classes),
        build=(*build, *reset),
        reset=reset,
        pages=listed,
        paged=paged,
        mappings=mappings,
        each=each,
        sizes=_sizes(kind),
        available=_available(cls, kind),
        cpu_lens="seq_lens_cpu" in _parameters(loaded.paged_class.alloc_extend),
        page_count=extend is not None and "num_new_pages" in _parameters(extend),
    )


_PAGED: Final = ("paged", "swa", "swa-ring", "hisparse", "hisparse-v4")
"""Kinds made of paged pools, which launch the kernels (swa: of pages larger than one slot)."""

_Parts = tuple[list[tuple[str, str]], list[str], list[str]]


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _window(loaded: LoadedSglang, config: Config) -> str:
    old = config.allocator == "token" and "free_slots" in loaded.token_class.clear.__code__.co_names
    name = "allocator.free_slots" if old else "allocator.free_pages"
    return f"{name} = {name} + {config.page_offset}"


# --- building -----------------------------------------------------------------------------------------


def _named(cls: type[Any]) -> tuple[str, str]:
    return cls.__module__, cls.__name__


def _made(cls: type[Any], config: Config, **arguments: str) -> str:
    """The constructor's call, with those of the arguments that it takes."""
    everything = {
        "size": str(config.size),
        "page_size": str(config.page_size),
        "dtype": str(pools.DTYPE),
        "device": "DEVICE",
        "kvcache": "None",
        "need_sort": str(config.need_sort),
        **arguments,
    }
    known = _parameters(cls.__init__)
    given = ", ".join(f"{name}={value}" for name, value in everything.items() if name in known)
    return f"{cls.__name__}({given})"


def _single(loaded: LoadedSglang, config: Config) -> _Parts:
    cls = kinds.allocator_class(loaded, config.allocator)
    return [_named(cls)], [], [f"allocator = {_made(cls, config)}"]


def _pool_class(name: str, base: type[Any], **attributes: str) -> list[str]:
    """A class derived from the release's own pool, which the allocator's constructor may insist on."""
    body = [f"    {key} = {value}" for key, value in attributes.items()]
    lines = [f"class {name}({base.__name__}):", _POOL_DOC, "", *body, *_SKIP, "", ""]
    return [*lines, f"{name}.__abstractmethods__ = frozenset()"]


def _swa_pool(base: type[Any], ring: int | None = None) -> list[str]:
    return _pool_class(
        "Pool",
        base,
        full_kv_pool="None",
        swa_kv_pool="None",
        full_to_swa_index_mapping="None",
        swa_req_ring_size=str(ring),
    )


def _swa(loaded: LoadedSglang, config: Config) -> _Parts:
    classes = load_kind(loaded, "swa")
    cls, pool = classes["allocator"], classes["pool"]
    made = _made(cls, config, size_swa=str(config.swa_size), kvcache="Pool()")
    return [_named(cls), _named(pool)], _swa_pool(pool), [f"allocator = {made}"]


def _swa_ring(loaded: LoadedSglang, config: Config) -> _Parts:
    classes = load_kind(loaded, "swa-ring")
    cls, pool = classes["allocator"], classes["pool"]
    rows = f"SimpleNamespace(available_size=lambda: {config.request_rows})"
    made = _made(cls, config, size_swa=str(config.size), kvcache="Pool()", req_to_token_pool="rows")
    build = [f"rows = {rows}  # free request rows", f"allocator = {made}"]
    return [_named(cls), _named(pool)], _swa_pool(pool, config.ring), build


def _pure_swa(loaded: LoadedSglang, config: Config) -> _Parts:
    classes = load_kind(loaded, "pure-swa")
    cls, pool = classes["allocator"], classes["pool"]
    made = _made(cls, config, size_swa=str(config.size), kvcache="Pool()")
    return [_named(cls), _named(pool)], _swa_pool(pool), [f"allocator = {made}"]


def _hisparse(loaded: LoadedSglang, config: Config) -> _Parts:
    classes = load_kind(loaded, "hisparse")
    cls, pool = classes["allocator"], classes["pool"]
    lines = _pool_class("Pool", pool, full_to_hisparse_device_index_mapping="None")
    made = _made(cls, config, kvcache="Pool()", host_to_device_ratio=str(config.ratio))
    return [_named(cls), _named(pool)], lines, [f"allocator = {made}"]


def _hisparse_v4(loaded: LoadedSglang, config: Config) -> _Parts:
    classes = load_kind(loaded, "hisparse-v4")
    cls, logical = classes["allocator"], classes["logical"]
    lines = _pool_class(
        "DevicePool",
        classes["device_pool"],
        size=str(config.device_size),
        page_size=str(config.device_page_size),
        dtype=str(pools.DTYPE),
        device="DEVICE",
        compress_ratio=str(COMPRESSION),
        full_to_hisparse_device_index_mapping="None",
    )
    lines += ["", ""]
    lines += _pool_class(
        "Pool",
        classes["pool"],
        c4_kv_pool="DevicePool()",
        c4_logical_size=str(config.size // COMPRESSION),
        full_to_swa_index_mapping="None",
        swa_req_ring_size="None",
    )
    made = _made(logical, config, size_swa=str(config.swa_size), kvcache="Pool()")
    build = [f"logical = {made}", f"allocator = {cls.__name__}(logical)"]
    return [_named(classes[role]) for role in classes], lines, build


def _mamba(loaded: LoadedSglang, config: Config) -> _Parts:
    cls = load_kind(loaded, "mamba")["allocator"]
    if not hasattr(cls, "State"):
        return _single(loaded, config)
    conv = pools.mamba_arguments(cls)["cache_params"].shape.conv
    build = [
        f"shapes = SimpleNamespace(conv={conv}, temporal=(1, 1, 1))",
        f"dtypes = SimpleNamespace(conv={pools.DTYPE}, temporal={pools.DTYPE})",
        "states = SimpleNamespace(shape=shapes, dtype=dtypes, layers=[0])",
    ]
    made = _made(cls, config, spec_state_size="0", cache_params="states", mamba_layer_ids="[0]")
    return [_named(cls)], [], [*build, f"allocator = {made}"]


def _page_interleave(loaded: LoadedSglang, config: Config) -> _Parts:
    cls = load_kind(loaded, "page-interleave")["allocator"]
    made = _made(cls, config, physical_page_size=str(config.page_size), shard_size=str(config.shards))
    return [_named(cls)], [], [f"allocator = {made}"]


_BUILDERS: Final[dict[str, Callable[[LoadedSglang, Config], _Parts]]] = {
    "token": _single,
    "paged": _single,
    "swa": _swa,
    "swa-ring": _swa_ring,
    "pure-swa": _pure_swa,
    "hisparse": _hisparse,
    "hisparse-v4": _hisparse_v4,
    "mamba": _mamba,
    "page-interleave": _page_interleave,
}


# --- looking ------------------------------------------------------------------------------------------


def _available(cls: type[Any], kind: str) -> str:
    if kind == "swa" and set(cls.available_size.__code__.co_names) == {"NotImplementedError"}:
        return "min(allocator.full_available_size(), allocator.swa_available_size())"
    return "allocator.available_size()"


def _sizes(kind: str) -> dict[str, str]:
    if kind == "page-interleave":
        return {"aggregate": "allocator.aggregate_free_size()"}
    two = kind in ("swa", "swa-ring", "pure-swa", "hisparse-v4")
    return {name: f"allocator.{name}_available_size()" for name in ("full", "swa")} if two else {}


def _sides(cls: type[Any], config: Config) -> tuple[dict[str, str], dict[str, str], dict[str, int]]:
    """Pools and mappings by side, and how many slots an entry of each mapping stands for."""
    kind = config.allocator
    if kind in ("swa", "swa-ring", "pure-swa"):
        pools = {"": "allocator.full_attn_allocator"}
        if kind == "swa":
            pools["swa"] = "allocator.swa_attn_allocator"
        mappings = {} if kind == "pure-swa" else {"swa": "allocator.full_to_swa_index_mapping.tolist()"}
        if mappings and "page_size" not in _parameters(cls.__init__):
            # Up to 0.5.3: longer than the slots there are, and without the -1 at its end.
            mappings["swa"] = f"[*allocator.full_to_swa_index_mapping[: {config.size + 1}].tolist(), -1]"
        return pools, mappings, dict.fromkeys(mappings, 1)
    device = {"device": "allocator.full_to_hisparse_device_index_mapping.tolist()"}
    if kind == "hisparse":
        pools = {"": "allocator.logical_attn_allocator", "device": "allocator.hisparse_attn_allocator"}
        return pools, device, {"device": 1}
    if kind == "hisparse-v4":
        logical = "allocator.logical_attn_allocator"
        pools = {"": f"{logical}.full_attn_allocator", "swa": f"{logical}.swa_attn_allocator"}
        pools["device"] = "allocator.hisparse_attn_allocator"
        mappings = {"swa": f"{logical}.full_to_swa_index_mapping.tolist()", **device}
        return pools, mappings, {"swa": 1, "device": COMPRESSION}
    classes = [f"class {rank}" for rank in range(1, config.shards)] if kind == "page-interleave" else []
    return dict.fromkeys(("", *classes), "allocator"), {}, {}
