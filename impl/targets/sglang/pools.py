"""Stand-ins for what the allocators are told to allocate for: KV pools, request rows, Mamba states.

A KV pool owns gigabytes and needs a model; its allocator asks it for a few numbers and for the side mapping
only. So a stand-in is an instance of the release's own pool class whose constructor was skipped: the methods
that registering and translating a mapping take are the release's, the attributes the allocator reads are
given here, and there is no memory. This file does NOT construct allocators; see `kinds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kvproof.model.config import COMPRESSION, Config

DTYPE = torch.float16
"""Of the values that nobody here stores; every allocator constructor wants one."""


def swa_pool(base: type[Any], ring: int | None) -> Any:
    """A pool of full and sliding-window layers. ring: tokens in a request's ring, None without one."""
    return _without_memory(
        base, full_kv_pool=None, swa_kv_pool=None, full_to_swa_index_mapping=None, swa_req_ring_size=ring
    )


def hisparse_pool(base: type[Any]) -> Any:
    """A pool whose device side is addressed through a mapping."""
    return _without_memory(base, full_to_hisparse_device_index_mapping=None)


def v4_pool(base: type[Any], device_base: type[Any], config: Config, device: str) -> Any:
    """DeepSeek-V4's pool, with the device pool of compressed slots inside it."""
    compressed = _without_memory(
        device_base,
        size=config.device_size,
        page_size=config.device_page_size,
        dtype=DTYPE,
        device=device,
        compress_ratio=COMPRESSION,
        full_to_hisparse_device_index_mapping=None,
    )
    return _without_memory(
        base,
        c4_kv_pool=compressed,
        c4_logical_size=config.size // COMPRESSION,
        full_to_swa_index_mapping=None,
        swa_req_ring_size=None,
    )


def _without_memory(base: type[Any], **attributes: Any) -> Any:
    """An instance of `base` that was never constructed. The attributes belong to a class of its own, so that
    they also stand where `base` has a property; nothing is abstract in it."""
    cls = type(f"StandIn{base.__name__}", (base,), attributes)
    cls.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return object.__new__(cls)


@dataclass(frozen=True, slots=True)
class RequestRows:
    """As much of the pool of request rows as the ring variant asks for: how many are free."""

    free: int

    def available_size(self) -> int:
        """Free rows; no call of an allocator changes them."""
        return self.free


def mamba_arguments(pool: type[Any]) -> dict[str, Any]:
    """What the constructor of a Mamba pool wants beside `size` and `device`: states of one layer and a few
    numbers, so that a slot costs bytes. Releases before 0.5.4 have one convolution state, later ones a
    list."""
    annotation = str(pool.State.__annotations__["conv"]).lower()
    conv: Any = [(2, 1)] if "list" in annotation else (2, 1)
    parameters = SimpleNamespace(
        shape=SimpleNamespace(conv=conv, temporal=(1, 1, 1)),
        dtype=SimpleNamespace(conv=DTYPE, temporal=DTYPE),
        layers=[0],
    )
    return {"spec_state_size": 0, "cache_params": parameters, "mamba_layer_ids": [0]}
