"""The place where Triton's interpreter meets memory: whoever is being served performs its operations.

Not here: what is done with them (`memory`, `tape`).
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

MEMORY_OPERATIONS: Final = ("load", "store", "atomic_rmw", "atomic_cas")

Array = npt.NDArray[Any]


class Server(Protocol):
    """Performs memory operations, with the signatures of Triton's own but for `bare`: a load for which the
    kernel gave no `other`; and hears of numbers that are handed to Python, which decides by them."""

    silent: bool
    """Whether what the kernel prints is to be dropped."""

    def load(self, ptrs: Array, mask: Array, other: Array, dtype: np.dtype[Any], bare: bool) -> Any: ...
    def store(self, ptrs: Array, value: Array, mask: Array) -> Any: ...
    def atomic_rmw(self, operation: Any, ptrs: Array, value: Array, mask: Array, order: Any) -> Any: ...
    def atomic_cas(self, ptrs: Array, expected: Array, value: Array, order: Any) -> Any: ...
    def decide(self, value: Any) -> Any: ...


class MemoryPort:
    """Stands in for Triton's native memory module, and is it while nobody is served.

    `server`: who is. `loading`: a load of the language is under way, so that numbers handed to Python are the
    interpreter's own business; `bare`: the one under way has no `other`. Both are set by `language`.
    """

    def __init__(self, real: Any) -> None:
        self.real = real
        self.server: Server | None = None
        self.loading = False
        self.bare = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def serve(self, server: Server) -> None:
        self.server = server

    def release(self) -> None:
        self.server = None

    def load(self, ptrs: Array, mask: Array, other: Array, dtype: np.dtype[Any]) -> Any:
        if self.server is None:
            return self.real.load(ptrs, mask, other, dtype)
        # Triton 3.6 hands over the masks of block pointers as memoryviews.
        return self.server.load(ptrs, np.asarray(mask), other, dtype, self.bare)

    def store(self, ptrs: Array, value: Array, mask: Array) -> Any:
        return (self.server or self.real).store(ptrs, value, np.asarray(mask))

    def atomic_rmw(self, operation: Any, ptrs: Array, value: Array, mask: Array, order: Any) -> Any:
        return (self.server or self.real).atomic_rmw(operation, ptrs, value, mask, order)

    def atomic_cas(self, ptrs: Array, expected: Array, value: Array, order: Any) -> Any:
        return (self.server or self.real).atomic_cas(ptrs, expected, value, order)
