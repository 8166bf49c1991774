"""Poisoned memory as `memory` sees it: which elements of a kernel's argument nobody has written.

Not here: what gets poisoned (`guards`), and for which dtypes poison tells (`poison`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .poison import Poisoned

Array = npt.NDArray[Any]


class Fresh:
    """Tells, and marks, the written elements of `tensor`, a view of `poisoned` memory of the same dtype.

    For dtypes of which poison is a number like any other, `poisoned.written` is looked at and mutated; for
    the others the bits alone tell. Offsets are elements of storage from the tensor's first.
    """

    __slots__ = ("_poison", "_start", "_written")

    def __init__(self, poisoned: Poisoned, tensor: torch.Tensor) -> None:
        itemsize = tensor.element_size()
        self._poison = np.array(poisoned.poison, f"i{itemsize}").view(f"u{itemsize}")[()]
        self._written = None if poisoned.written is None else np.frombuffer(poisoned.written, np.uint8)
        self._start = (tensor.data_ptr() - poisoned.start) // itemsize

    def unwritten(self, offsets: Array, values: Array) -> Array:
        """bool per offset; `values`: what was just loaded from `offsets`, any dtype of the tensor's width."""
        stale: Array = values.view(self._poison.dtype) == self._poison
        if self._written is not None:
            stale &= self._written[offsets + self._start] == 0
        return stale

    def mark(self, offsets: Array) -> None:
        """A kernel writes to `offsets`."""
        if self._written is not None:
            self._written[offsets + self._start] = 1
