"""Every kind of allocator of a loaded release: built from a config, seen from inside, and what it lacks.

Releases differ in names and arguments; all of that is read off the classes, so that a checkout between two
releases works as well. The classes are the release's own; stood in for is only the KV pool (`pools`). This
file does NOT make calls and does NOT judge: what an allocator does wrong is found by the properties.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, Final

import torch

from kvproof.impl.targets.protocol import Lists, State
from kvproof.impl.targets.sglang import pools
from kvproof.impl.targets.sglang.load import LoadedSglang, load_kind
from kvproof.impl.targets.tensors import free_list_name
from kvproof.model.config import COMPRESSION, SINGLE_SLOT, Config

CALLS: Final = (
    *("alloc", "alloc_extend", "alloc_decode", "alloc_extend_swa_tail", "alloc_logical_only"),
    *("alloc_device_buffer", "alloc_group_begin"),
    *("free_hisparse", "free_hisparse_indices", "free_swa", "free_full", "free_page_ids"),
    *("free_segment", "free_segments", "free_full_segment", "free_swa_segment", "free_group_begin"),
    *("set_full_to_swa_mapping", "clear_full_to_swa_mapping", "resize"),
)
"""The calls that some kind of some release does not have."""

_INNER: Final = (
    "full_attn_allocator",
    "swa_attn_allocator",
    "logical_attn_allocator",
    "hisparse_attn_allocator",
)


# --- what there is ------------------------------------------------------------------------------------


def allocator_class(loaded: LoadedSglang, kind: str) -> type[Any]:
    """The class of a kind, imported if need be. Raises `SglangUnavailable` when the release has none."""
    if kind == "token":
        return loaded.token_class
    if kind == "paged":
        return loaded.paged_class
    return load_kind(loaded, kind)["allocator"]


def calls_missing(loaded: LoadedSglang, kind: str) -> frozenset[str]:
    """Those of `CALLS` that the class of the kind does not have, or has only to say that it does not.

    Raises `SglangUnavailable` when the release has no such kind.
    """
    cls = allocator_class(loaded, kind)
    return frozenset(name for name in CALLS if _only_raises(getattr(cls, name, None)))


def takes_page_size(loaded: LoadedSglang, kind: str, page_size: int) -> bool:
    """Whether the kind can be built with this page size and used at all.

    Up to 0.5.3 the sliding-window allocator has single slots only; 0.5.12's HiSparse has no call that
    allocates with pages of one slot, and its DeepSeek-V4 variant none with device pages of one; the ring
    variant belongs to DeepSeek-V4, whose pages are never single slots, and its `alloc` knows no ring.
    """
    cls = allocator_class(loaded, kind)
    if kind in SINGLE_SLOT:
        return page_size == 1
    if kind == "swa":
        return page_size == 1 or "page_size" in _parameters(cls)
    if kind == "swa-ring":
        return page_size > 1
    if kind == "hisparse":
        return page_size > 1 or not _only_raises(cls.alloc)
    if kind == "hisparse-v4":
        own_page = "hisparse_page_size" in cls.__init__.__code__.co_names
        return page_size % COMPRESSION == 0 and (page_size > COMPRESSION or own_page)
    return True


def _only_raises(function: Any) -> bool:
    """Whether there is no such function, or one that does nothing but raise NotImplementedError."""
    return function is None or set(function.__code__.co_names) == {"NotImplementedError"}


def _parameters(cls: type[Any]) -> frozenset[str]:
    """Names of the constructor's parameters."""
    return frozenset(inspect.signature(cls.__init__).parameters)


# --- building -----------------------------------------------------------------------------------------


def construct(loaded: LoadedSglang, config: Config, device: str, kernels: bool) -> Any:
    """A fresh allocator of the config's kind, held up by stand-ins for its KV pool.

    kernels: whether the paged allocators in it launch their kernels or take the naive path, where a release
    has both. Debug mode is the environment's. Raises `SglangUnavailable` when the release has no such kind;
    which page sizes make sense is `takes_page_size`'s to say.
    """
    allocator = _BUILDERS[config.allocator](loaded, config, device)
    _choose_path(allocator, kernels)
    return allocator


def _choose_path(allocator: Any, kernels: bool) -> None:
    if hasattr(allocator, "use_triton_kernels"):
        allocator.use_triton_kernels = kernels
    for name in _INNER:
        if (inner := getattr(allocator, name, None)) is not None:
            _choose_path(inner, kernels)


def _made(cls: type[Any], config: Config, device: str, **arguments: Any) -> Any:
    """An instance, given those of the arguments that its constructor takes."""
    everything = {
        "size": config.size,
        "page_size": config.page_size,
        "dtype": pools.DTYPE,
        "device": device,
        "kvcache": None,
        "need_sort": config.need_sort,
        **arguments,
    }
    known = _parameters(cls)
    return cls(**{name: value for name, value in everything.items() if name in known})


def _single_pool(loaded: LoadedSglang, config: Config, device: str) -> Any:
    return _made(allocator_class(loaded, config.allocator), config, device)


def _swa(loaded: LoadedSglang, config: Config, device: str) -> Any:
    classes = load_kind(loaded, "swa")
    pool = pools.swa_pool(classes["pool"], ring=None)
    return _made(classes["allocator"], config, device, size_swa=config.swa_size, kvcache=pool)


def _swa_ring(loaded: LoadedSglang, config: Config, device: str) -> Any:
    classes = load_kind(loaded, "swa-ring")
    pool = pools.swa_pool(classes["pool"], ring=config.ring)
    rows = pools.RequestRows(config.request_rows)
    # The paged sliding-window side is built and never used; its size is as good as any.
    side = {"size_swa": config.size, "kvcache": pool, "req_to_token_pool": rows}
    return _made(classes["allocator"], config, device, **side)


def _pure_swa(loaded: LoadedSglang, config: Config, device: str) -> Any:
    classes = load_kind(loaded, "pure-swa")
    pool = pools.swa_pool(classes["pool"], ring=None)
    return _made(classes["allocator"], config, device, size_swa=config.size, kvcache=pool)


def _hisparse(loaded: LoadedSglang, config: Config, device: str) -> Any:
    classes = load_kind(loaded, "hisparse")
    pool = pools.hisparse_pool(classes["pool"])
    return _made(classes["allocator"], config, device, kvcache=pool, host_to_device_ratio=config.ratio)


def _hisparse_v4(loaded: LoadedSglang, config: Config, device: str) -> Any:
    classes = load_kind(loaded, "hisparse-v4")
    pool = pools.v4_pool(classes["pool"], classes["device_pool"], config, device)
    logical = _made(classes["logical"], config, device, size_swa=config.swa_size, kvcache=pool)
    return classes["allocator"](logical)


def _mamba(loaded: LoadedSglang, config: Config, device: str) -> Any:
    cls = load_kind(loaded, "mamba")["allocator"]
    states = pools.mamba_arguments(cls) if hasattr(cls, "State") else {}
    return _made(cls, config, device, **states)


def _page_interleave(loaded: LoadedSglang, config: Config, device: str) -> Any:
    cls = load_kind(loaded, "page-interleave")["allocator"]
    return _made(cls, config, device, physical_page_size=config.page_size, shard_size=config.shards)


_BUILDERS: Final[dict[str, Callable[[LoadedSglang, Config, str], Any]]] = {
    "token": _single_pool,
    "paged": _single_pool,
    "swa": _swa,
    "swa-ring": _swa_ring,
    "pure-swa": _pure_swa,
    "hisparse": _hisparse,
    "hisparse-v4": _hisparse_v4,
    "mamba": _mamba,
    "page-interleave": _page_interleave,
}


# --- looking ------------------------------------------------------------------------------------------


def available(allocator: Any, kind: str) -> int:
    """`available_size()`; the smaller side where a release has no such answer (sliding window, up to
    0.5.8)."""
    if kind == "swa" and _only_raises(type(allocator).available_size):
        return min(
            operator.index(allocator.full_available_size()), operator.index(allocator.swa_available_size())
        )
    return operator.index(allocator.available_size())


def state(allocator: Any, kind: str) -> State:
    """The allocator from inside, as `protocol.State` lays it out for each kind. Changes nothing; may wait
    for the device."""
    if kind in ("swa", "swa-ring", "pure-swa"):
        return _swa_state(allocator, kind)
    if kind == "hisparse":
        main = _lists(allocator.logical_attn_allocator)
        device = {"device": _lists(allocator.hisparse_attn_allocator)}
        return State(main.free, main.staged, sides=device, mappings=_device_mapping(allocator))
    if kind == "hisparse-v4":
        inner = _swa_state(allocator.logical_attn_allocator, "swa")
        return State(
            inner.free,
            inner.staged,
            sides={**inner.sides, "device": _lists(allocator.hisparse_attn_allocator)},
            mappings={**inner.mappings, **_device_mapping(allocator)},
            sizes=_sizes(allocator),
        )
    if kind == "page-interleave":
        return _interleave_state(allocator)
    main = _lists(allocator)
    return State(main.free, main.staged)


def _swa_state(allocator: Any, kind: str) -> State:
    main = _lists(allocator.full_attn_allocator)
    sides = {"swa": _lists(allocator.swa_attn_allocator)} if kind == "swa" else {}
    mappings = {} if kind == "pure-swa" else {"swa": _swa_mapping(allocator)}
    return State(main.free, main.staged, sides=sides, mappings=mappings, sizes=_sizes(allocator))


def _swa_mapping(allocator: Any) -> list[int]:
    mapping: list[int] = allocator.full_to_swa_index_mapping.tolist()
    if "page_size" not in _parameters(type(allocator)):
        # Up to 0.5.3 the list is longer than the slots there are and has no -1 at its end: with single slots
        # nobody translates a last_loc.
        return [*mapping[: allocator.size_full + 1], -1]
    return mapping


def _device_mapping(allocator: Any) -> dict[str, list[int]]:
    return {"device": allocator.full_to_hisparse_device_index_mapping.tolist()}


def _sizes(allocator: Any) -> dict[str, int]:
    return {
        "full": operator.index(allocator.full_available_size()),
        "swa": operator.index(allocator.swa_available_size()),
    }


def _interleave_state(allocator: Any) -> State:
    classes = [
        Lists(free.tolist(), staged.tolist())
        for free, staged in zip(allocator.class_free_pages, allocator.class_release_pages, strict=True)
    ]
    sides = {f"class {number}": lists for number, lists in enumerate(classes) if number}
    sizes = {"aggregate": operator.index(allocator.aggregate_free_size())}
    return State(classes[0].free, classes[0].staged, sides=sides, sizes=sizes)


def _lists(allocator: Any) -> Lists:
    """Of one pool, wherever the release keeps what was released."""
    free: torch.Tensor = getattr(allocator, free_list_name(allocator))
    staged: list[int] = []
    if getattr(allocator, "release_pages", None) is not None:
        staged.extend(allocator.release_pages.tolist())
    for pages in getattr(allocator, "staged_pages", ()):
        staged.extend(pages.tolist())
    return Lists(free.tolist(), staged)
