"""Poisoned memory: what an element holds that nobody has written, and how to tell.

Pure bookkeeping for `guards` (which poisons) and `audit` (which sees what kernels write). Not here: where a
tensor's guard words are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

POISON_BYTE: Final = 0xA5


def _poison(width: int) -> int:
    return int.from_bytes(bytes([POISON_BYTE]) * width, "little", signed=True)


POISON: Final[dict[torch.dtype, tuple[torch.dtype, int]]] = {
    dtype: (bits, _poison(bits.itemsize))
    for bits, dtypes in {
        torch.int64: (torch.int64, torch.uint64, torch.float64),
        torch.int32: (torch.int32, torch.uint32, torch.float32),
        torch.int16: (torch.int16, torch.uint16, torch.float16, torch.bfloat16),
        torch.int8: (torch.int8, torch.uint8, torch.bool),
    }.items()
    for dtype in dtypes
}
"""dtype -> the signed integer type of its width, and the value of that type whose every byte is POISON_BYTE.
Negative, so never a slot, page or length."""

NARROW: Final = frozenset({torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int8, torch.uint8})
"""The dtypes of which poison is a number like any other."""


class Poisoned:
    """One poisoned allocation. Holds no tensor, so keeps no memory.

    dtype: of the tensor. poison: what its bits are in an unwritten element, as a signed integer. start:
    address of the allocation's first byte, where its elements (guard words included) are counted from.
    written: for NARROW dtypes under the audited lane, 1 for each element that a kernel wrote; else None.
    """

    __slots__ = ("_version", "dtype", "poison", "start", "written")

    def __init__(self, view: torch.Tensor, poison: int, written: bytearray | None, start: int) -> None:
        self.dtype = view.dtype
        self.poison = poison
        self.start = start
        self.written = written
        # Tensors made in inference mode have no version: what torch does to them is not known.
        self._version = None if view.is_inference() else view._version

    def telling(self, tensor: torch.Tensor) -> bool:
        """Whether poison in `tensor`, a view of this memory, means that nobody has written there, but for
        what `written` says."""
        if self.dtype not in NARROW:
            return True
        known = self.written is not None and self._version is not None and not tensor.is_inference()
        return known and tensor._version == self._version

    def unwritten(self, tensor: torch.Tensor, words: Sequence[int], start: int) -> list[int]:
        """Indices of the elements of `words` (the bits of `tensor`, whose first is element `start` here)
        that nobody has written."""
        poison, written = self.poison, self.written
        if poison not in words or not self.telling(tensor):
            return []
        return [i for i, word in enumerate(words) if word == poison and not (written and written[start + i])]
