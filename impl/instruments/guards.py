"""Poison and guard words for the outputs a target allocates itself with `torch.empty`.

A kernel that leaves an element of its output unwritten returns whatever the allocator's memory held,
often a plausible slot. While a call is active, `OutputGuard` hands out the inside of a larger buffer:

    | guard words |   the tensor the target sees   | guard words |
    | GUARD_WORDS |        numel elements          | GUARD_WORDS |

all of it POISON. What is still POISON afterwards was not written; a guard word that is not POISON
was written by somebody who left the tensor.

Not covered: `torch.empty` bound to another name before `install()` (`from torch import empty`),
`empty_like`, `new_empty`, `zeros` and friends, tensors of two or more dimensions, dtypes other than
int32 and int64 (in the narrower ones every value may be meant), writes further away than the guard
words, and *reads* out of bounds: for those see `audit`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

GUARD_WORDS: Final = 8
"""Elements on each side of a guarded tensor; eight keep the view's address a multiple of 16 bytes."""

POISON_BYTE: Final = 0xA5

POISON: Final[dict[torch.dtype, int]] = {
    torch.int64: int.from_bytes(bytes([POISON_BYTE]) * 8, "little", signed=True),
    torch.int32: int.from_bytes(bytes([POISON_BYTE]) * 4, "little", signed=True),
}
"""dtype -> the value of its every byte being POISON_BYTE. Negative, so never a slot, page or length."""

_FORWARDED: Final = frozenset({"dtype", "device", "pin_memory"})


@dataclass(frozen=True, slots=True)
class GuardDamage:
    """One guard word that no longer holds POISON.

    `buffer`: ordinal of the allocation in its call, from 0. `offset`: element offset from the logical
    start of the tensor the target got, so negative before it and at least its `numel` behind it.
    `value`: what the word holds now.
    """

    buffer: int
    offset: int
    value: int


@dataclass(frozen=True, slots=True)
class OutputReport:
    """What one returned tensor holds.

    `values`: its elements in order. `unwritten`: indices into `values` that still hold POISON.
    `damage`: damaged guard words of its buffer. `recorded`: whether the tensor is (a leading or inner
    part of) an allocation of this call; if not, it has no guard words, and `unwritten` finds poison
    that was copied into it (by `cat`, `clone` or a conversion to int64).
    """

    values: list[int]
    unwritten: tuple[int, ...]
    damage: tuple[GuardDamage, ...]
    recorded: bool


class GuardedBuffer:
    """One allocation: `base`, 1-D, numel + 2 * GUARD_WORDS elements; `view`, what the target got."""

    __slots__ = ("base", "numel", "ordinal", "poison", "view")

    def __init__(self, base: torch.Tensor, view: torch.Tensor, ordinal: int) -> None:
        self.base = base
        self.view = view
        self.numel = view.numel()
        self.ordinal = ordinal
        self.poison = POISON[base.dtype]

    def damage(self, words: list[int]) -> tuple[GuardDamage, ...]:
        """`words`: the whole of `base` as a list."""
        end = GUARD_WORDS + self.numel
        return tuple(
            GuardDamage(self.ordinal, i - GUARD_WORDS, words[i])
            for i in (*range(GUARD_WORDS), *range(end, end + GUARD_WORDS))
            if words[i] != self.poison
        )


class OutputGuard:
    """Replaces `torch.empty` in this process; poisons and records what a target allocates in a call.

    Outside `call()`, and for whatever is not a 0-D or 1-D int32 or int64 tensor, the replacement is
    plain `torch.empty`. One call at a time: neither `install()` nor `call()` nests.
    """

    def __init__(self) -> None:
        self._original: Callable[..., torch.Tensor] | None = None
        self._active = False
        self._buffers: list[GuardedBuffer] = []
        self._by_storage: dict[int, GuardedBuffer] = {}
        self._guard_words = {dtype: [value] * GUARD_WORDS for dtype, value in POISON.items()}

    def install(self) -> None:
        """Mutates the attribute `torch.empty`. RuntimeError if this guard is already installed."""
        if self._original is not None:
            raise RuntimeError("OutputGuard is already installed")
        self._original = torch.empty
        setattr(torch, "empty", self._empty)  # noqa: B010 - a plain assignment fails type checking

    def uninstall(self) -> None:
        """Puts the `torch.empty` back that `install()` found. Does nothing if not installed."""
        if self._original is not None:
            setattr(torch, "empty", self._original)  # noqa: B010
            self._original = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Poison and record allocations while the block runs; records last until the next call."""
        if self._original is None or self._active:
            raise RuntimeError("OutputGuard.call() needs install() first and does not nest")
        self._buffers = []
        self._by_storage = {}
        self._active = True
        try:
            yield
        finally:
            self._active = False

    @property
    def buffers(self) -> tuple[GuardedBuffer, ...]:
        """The allocations of the latest call, in order."""
        return tuple(self._buffers)

    def find(self, tensor: torch.Tensor) -> GuardedBuffer | None:
        """The allocation of the latest call that `tensor` is, or is a view of; else None."""
        # By storage and not by address: a tensor of no elements has no address of its own.
        return self._by_storage.get(tensor.untyped_storage().data_ptr())

    def inspect(self, tensor: torch.Tensor) -> OutputReport:
        """Read a 0-D or 1-D integer tensor that a call returned. Mutates nothing.

        The hot path, a tensor that is exactly a recorded view, costs one `tolist` of its buffer.
        """
        buffer = self.find(tensor)
        if buffer is None or tensor.dtype != buffer.base.dtype or tensor.dim() > 1:
            return self._inspect_unrecorded(tensor)
        words = buffer.base.tolist()
        numel = buffer.numel
        end = GUARD_WORDS + numel
        whole = tensor.numel() == numel and tensor.storage_offset() == GUARD_WORDS and tensor.is_contiguous()
        values = words[GUARD_WORDS:end] if whole else tensor.reshape(-1).tolist()
        poison = buffer.poison
        unwritten: tuple[int, ...] = ()
        if poison in values:
            unwritten = tuple(i for i, value in enumerate(values) if value == poison)
        damage: tuple[GuardDamage, ...] = ()
        intact = self._guard_words[buffer.base.dtype]
        if words[:GUARD_WORDS] != intact or words[end:] != intact:
            damage = buffer.damage(words)
        return OutputReport(values, unwritten, damage, True)

    def damaged(self) -> tuple[GuardDamage, ...]:
        """Damaged guard words of *all* allocations of the latest call, returned or not."""
        return tuple(damage for b in self._buffers for damage in b.damage(b.base.tolist()))

    def _inspect_unrecorded(self, tensor: torch.Tensor) -> OutputReport:
        values = tensor.reshape(-1).tolist()
        poisons = POISON.values()
        unwritten = tuple(i for i, value in enumerate(values) if value in poisons)
        return OutputReport(values, unwritten, (), False)

    def _empty(self, *size: Any, **options: Any) -> torch.Tensor:
        assert self._original is not None
        if not self._active or options.get("dtype") not in POISON:
            return self._original(*size, **options)
        shape = _shape(size, options)
        if shape is None or len(shape) > 1 or min(shape, default=0) < 0:
            return self._original(*size, **options)
        options.pop("size", None)
        numel = math.prod(shape)
        poison = POISON[options["dtype"]]
        base = torch.full((numel + 2 * GUARD_WORDS,), poison, **options)
        # 0-D: selecting the one element gives the 0-D view in a single op, as slicing does for 1-D.
        view = base[GUARD_WORDS : GUARD_WORDS + numel] if shape else base[GUARD_WORDS]
        buffer = GuardedBuffer(base, view, len(self._buffers))
        self._buffers.append(buffer)
        self._by_storage[base.untyped_storage().data_ptr()] = buffer
        return view


def _shape(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape that `torch.empty(*size, **options)` asks for; None where it is not ours to serve."""
    if not options.keys() <= _FORWARDED | {"size"}:
        return None
    if "size" in options:
        size = (*size, options["size"])
    if not size:
        return None
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = tuple(size[0])
    return tuple(operator.index(n) for n in size)
