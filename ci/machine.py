"""What this machine carries: how many workers, which GPU each is to see, and whether memory can be fenced."""

import os
from typing import Final

from kvproof.impl.instruments import fence
from kvproof.impl.instruments.findings import InstrumentError
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.fetch import cache_dir

MOST_SEATS: Final = 8
"""Seats taken unasked: each may hold a process a lane, of a quarter of a gigabyte or more."""


def gpu_uuids() -> tuple[str, ...]:
    """The GPUs that torch sees, as CUDA_VISIBLE_DEVICES takes them. An index would mean another GPU to a
    process that sees only some of them; a UUID never does."""
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(f"GPU-{device.uuid}" for device in devices)


def seats(gpus: tuple[str, ...]) -> int:
    """Seats to work at when nobody says how many: one a GPU, or one a core where there is none."""
    if gpus:
        return len(gpus)
    return min(MOST_SEATS, len(os.sched_getaffinity(0)))


def fence_trouble() -> str:
    """Why CUDA memory cannot be fenced here, "" when it can: the fence is compiled on first use."""
    try:
        fence.build(cache_dir())
    except (InstrumentError, SglangUnavailable) as error:
        return str(error)
    return ""
