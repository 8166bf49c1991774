"""How many workers this machine carries, and which GPU each is to see."""

import os
from typing import Final

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
