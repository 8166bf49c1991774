"""A failure: one property broken in one step, and the name two failures of one fault share."""

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from kvproof.model.trace import Trace

DEVICE_LOST: Final = "device-lost"
"""The divergence class of a fault that poisons the CUDA context."""

ILLEGAL_ACCESS: Final = "illegal-access"
"""The same in the fenced lane, which knows whose access it was: "illegal-access alloc_extend_kernel"."""

CRASH: Final = "crash"
HANG: Final = "hang"
OUT_OF_MEMORY: Final = "out-of-memory"
"""The divergence classes of calls that end their process, or make somebody end it: "crash SIGSEGV"."""


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
        return self._kind in (DEVICE_LOST, ILLEGAL_ACCESS)

    @property
    def deadly(self) -> bool:
        """Whether the process went with it: it was seen from outside, and so it must be every time."""
        return self._kind in (CRASH, HANG, OUT_OF_MEMORY)

    @property
    def _kind(self) -> str:
        return self.divergence.partition(" ")[0]

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
