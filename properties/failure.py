"""A failure: one property broken in one step, and the name two failures of one fault share."""

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from kvproof.model.trace import Trace

DEVICE_LOST: Final = "device-lost"
"""The divergence class of a fault that poisons the CUDA context."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What was found.

    property_id, op, allocator, divergence: together the fingerprint. step: index of the op in its trace.
    message: what happened there. tolerable: the answer was right all the same (a read whose result was
    thrown away), so the trace can go on behind it.
    """

    property_id: str
    op: str
    allocator: str
    divergence: str
    step: int
    message: str
    tolerable: bool = False

    @property
    def lost(self) -> bool:
        """Whether the device went with it: nothing more can be asked in the process that saw it."""
        return self.divergence == DEVICE_LOST

    @property
    def fingerprint(self) -> str:
        """8 hex digits. Free of targets, configs and numbers: one fault, one fingerprint."""
        text = "\n".join((self.property_id, self.op, self.allocator, self.divergence))
        return sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Found:
    """A failure and a trace that shows it."""

    failure: Failure
    trace: Trace
