"""Poison and guard words for the tensors a target allocates itself without initialising them.

A kernel that leaves an element of its output unwritten returns whatever the allocator's memory held,
often a plausible slot. While a call is active, `OutputGuard` serves `torch.empty`, `torch.empty_like`,
`torch.empty_strided`, `Tensor.new_empty` and `Tensor.new_empty_strided` with the inside of a larger buffer:

    | guard words |   the tensor the target sees   | guard words |
    |    guard    |         numel elements         |    guard    |

every byte of it POISON_BYTE. What is still poison afterwards was not written; a guard word that is not
poison was written by somebody who left the tensor. With `words=0` there are no guard words: the tensor is
exactly an allocation of its own, poisoned.

Numbers of 4 and 8 bytes are never poison by chance, nor is a bool. In the other narrow types (`NARROW`)
poison may be meant, so an element of theirs counts as unwritten only if it holds poison, no kernel is known
to have written it (which takes the audited lane) and torch has not written to the tensor at all (by its
version).

Not covered: the functions bound to another name before `install()` (`from torch import empty`), legacy
constructors (`torch.Tensor(n)`), tensors that are not contiguous or larger than LARGEST, complex numbers
and floats of 8 bits, subclasses of Tensor, options such as `requires_grad` or a memory format, writes further
away than the guard words, what torch operations *read*, and kernels' reads: for those see `audit`.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from .poison import NARROW, POISON, Poisoned

GUARD_WORDS: Final = 8
"""Elements on each side of a guarded tensor (twice as many of 1 byte): they keep the tensor's address a
multiple of 16 bytes."""

LARGEST: Final = 1 << 26
"""Bytes. Filling more would cost what a real `empty` does not; memory nobody touches would be touched."""

_FEW: Final = 128
_EARLIER_KEPT: Final = 256

_FORWARDED: Final = frozenset({"dtype", "device", "pin_memory"})


@dataclass(frozen=True, slots=True)
class GuardDamage:
    """One guard word that no longer holds poison.

    `buffer`: ordinal of the allocation in its call, from 0. `offset`: element offset from the logical
    start of the tensor the target got, so negative before it and at least its `numel` behind it.
    `value`: what the word holds now, as a signed integer of its width.
    """

    buffer: int
    offset: int
    value: int


@dataclass(frozen=True, slots=True)
class OutputReport:
    """What one returned tensor holds.

    `values`: its elements in order. `unwritten`: indices into `values` that nobody has written.
    `damage`: damaged guard words of its buffer. `recorded`: whether the tensor is (a leading or inner
    part of) an allocation of this call; if not, it has no guard words, and `unwritten` finds poison
    that was copied into it (by `cat`, `clone` or a conversion to int64).
    """

    values: list[int]
    unwritten: tuple[int, ...]
    damage: tuple[GuardDamage, ...]
    recorded: bool


class GuardedBuffer:
    """One allocation of a call. `bits`: all of it, 1-D, as signed integers of its width; `guard`: how many
    of them stand on each side of the tensor, `view`, that the target got."""

    __slots__ = ("bits", "guard", "numel", "ordinal", "poisoned", "view")

    def __init__(
        self, bits: torch.Tensor, view: torch.Tensor, guard: int, ordinal: int, poisoned: Poisoned
    ) -> None:
        self.bits = bits
        self.view = view
        self.guard = guard
        self.numel = view.numel()
        self.ordinal = ordinal
        self.poisoned = poisoned

    @property
    def resized(self) -> bool:
        """Whether torch has made the tensor another size (as `out=` does): these bounds are left lawfully."""
        return self.view.numel() != self.numel

    def damage(self) -> tuple[GuardDamage, ...]:
        guard, poison = self.guard, self.poisoned.poison
        if not guard:
            return ()
        end = guard + self.numel
        if end <= _FEW:  # reading all of it takes less than slicing
            words = self.bits.tolist()
            words = words[:guard] + words[end:]
        else:
            words = self.bits[:guard].tolist() + self.bits[end:].tolist()
        if words.count(poison) == len(words) or self.resized:
            return ()
        places = (*range(-guard, 0), *range(self.numel, self.numel + guard))
        return tuple(
            GuardDamage(self.ordinal, offset, word)
            for offset, word in zip(places, words, strict=True)
            if word != poison
        )

    def unwritten(self) -> list[int]:
        """Offsets of the elements that nobody has written."""
        words = self.bits[self.guard : self.guard + self.numel].tolist()
        return self.poisoned.unwritten(self.view, words, self.guard)


class OutputGuard:
    """Replaces torch's allocating functions in this process; poisons and records what a target allocates.

    Outside `call()`, and for whatever the head comment does not cover, the replacements are torch's own
    functions. One call at a time: neither `install()` nor `call()` nests. `words`: GUARD_WORDS or 0.
    """

    def __init__(self, words: int = GUARD_WORDS) -> None:
        self._words = words
        self._originals: list[tuple[Any, str, Callable[..., Any], bool]] = []
        self._active = False
        self._buffers: list[GuardedBuffer] = []
        self._by_storage: dict[int, GuardedBuffer] = {}
        self._earlier: dict[int, tuple[weakref.ref[torch.Tensor], Poisoned]] = {}
        self._intact = {poison: [poison] * self._guard(bits.itemsize) for bits, poison in POISON.values()}
        self.kernels_are_watched = False
        """Set by an Auditor, which then marks in `Poisoned.written` what kernels write."""

    def install(self) -> None:
        """Replaces what is named in the head comment. RuntimeError if this guard is already installed."""
        if self._originals:
            raise RuntimeError("OutputGuard is already installed")
        for owner, name, serve in (
            (torch, "empty", self._empty),
            (torch, "empty_like", self._empty_like),
            (torch, "empty_strided", self._empty_strided),
            (torch.Tensor, "new_empty", self._new_empty),
            (torch.Tensor, "new_empty_strided", self._new_empty_strided),
        ):
            original = getattr(owner, name)
            self._originals.append((owner, name, original, name in vars(owner)))
            setattr(owner, name, self._stand_in(serve, original))

    def uninstall(self) -> None:
        """Puts back what `install()` found. Does nothing if not installed."""
        for owner, name, original, own in self._originals:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._originals = []

    @contextmanager
    def call(self) -> Iterator[None]:
        """Poison and record allocations while the block runs; records last until the next call.

        Only what concerns reads (`poisoned`) lasts as long as the target keeps the tensor it got.
        """
        if not self._originals or self._active:
            raise RuntimeError("OutputGuard.call() needs install() first and does not nest")
        self._retire()
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _retire(self) -> None:
        if self.kernels_are_watched:
            kept = list(self._earlier.items())
            kept += [
                (where, (weakref.ref(buffer.view), buffer.poisoned))
                for where, buffer in self._by_storage.items()
                if not buffer.resized
            ]
            self._buffers.clear()
            self._by_storage.clear()
            self._earlier = dict([entry for entry in kept if entry[1][0]() is not None][-_EARLIER_KEPT:])
        else:
            self._buffers.clear()
            self._by_storage.clear()

    @property
    def buffers(self) -> tuple[GuardedBuffer, ...]:
        """The allocations of the latest call, in order."""
        return tuple(self._buffers)

    def find(self, tensor: torch.Tensor) -> GuardedBuffer | None:
        """The allocation of the latest call that `tensor` is, or is a view of; else None."""
        # By storage and not by address: a tensor of no elements has no address of its own.
        buffer = self._by_storage.get(tensor.untyped_storage().data_ptr())
        return None if buffer is None or buffer.resized else buffer

    def poisoned(self, tensor: torch.Tensor) -> Poisoned | None:
        """What is known of the memory of `tensor`, if it was poisoned in the latest call or in an earlier
        one that left the target a tensor it still keeps (not merely a view of it); else None."""
        buffer = self.find(tensor)
        if buffer is not None:
            return buffer.poisoned
        ref, poisoned = self._earlier.get(tensor.untyped_storage().data_ptr(), (None, None))
        return poisoned if ref is not None and ref() is not None else None

    def inspect(self, tensor: torch.Tensor) -> OutputReport:
        """Read a 0-D or 1-D tensor of integers that a call returned. Mutates nothing.

        The hot path, an integer tensor that is exactly a recorded view, costs one `tolist` of its buffer.
        """
        buffer = self.find(tensor)
        if buffer is None or tensor.dtype != buffer.bits.dtype or tensor.dim() > 1:
            return self._inspect_unrecorded(tensor)
        words = buffer.bits.tolist()
        guard, numel = buffer.guard, buffer.numel
        end = guard + numel
        whole = tensor.numel() == numel and tensor.storage_offset() == guard and tensor.is_contiguous()
        values = words[guard:end] if whole else tensor.reshape(-1).tolist()
        poison = buffer.poisoned.poison
        unwritten: tuple[int, ...] = ()
        if poison in values and tensor.dtype not in NARROW:
            unwritten = tuple(i for i, value in enumerate(values) if value == poison)
        damage: tuple[GuardDamage, ...] = ()
        if words[:guard] != (intact := self._intact[poison]) or words[end:] != intact:
            damage = buffer.damage()
        return OutputReport(values, unwritten, damage, True)

    def damaged(self) -> tuple[GuardDamage, ...]:
        """Damaged guard words of *all* allocations of the latest call, returned or not."""
        return tuple(damage for buffer in self._buffers for damage in buffer.damage())

    def _inspect_unrecorded(self, tensor: torch.Tensor) -> OutputReport:
        values = tensor.reshape(-1).tolist()
        poisons = (POISON[torch.int64][1], POISON[torch.int32][1])
        unwritten = tuple(i for i, value in enumerate(values) if value in poisons)
        return OutputReport(values, unwritten, (), False)

    # -- what stands in for torch's functions: each returns None where the tensor is not ours to make ----

    def _stand_in(
        self, serve: Callable[..., torch.Tensor | None], original: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **options: Any) -> torch.Tensor:
            if self._active:
                said = _said(options)
                self._active = False  # torch's own Python code allocates too, on the meta device for one
                try:
                    made = serve(*args, **said)
                finally:
                    self._active = True
                if made is not None:
                    return made
            return original(*args, **options)

        return allocate

    def _empty(self, *size: Any, **options: Any) -> torch.Tensor | None:
        shape = _shape(size, options)
        return None if shape is None else self._allocate(shape, options)

    def _empty_like(self, input: torch.Tensor, **options: Any) -> torch.Tensor | None:
        if type(input) is not torch.Tensor or input.layout is not torch.strided or not input.is_contiguous():
            return None
        return self._allocate(tuple(input.shape), {"dtype": input.dtype, "device": input.device, **options})

    def _empty_strided(self, size: Any, stride: Any, **options: Any) -> torch.Tensor | None:
        shape = tuple(operator.index(n) for n in size)
        if tuple(operator.index(n) for n in stride) != _contiguous(shape):
            return None
        return self._allocate(shape, options)

    def _new_empty(self, like: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor | None:
        if type(like) is not torch.Tensor:
            return None
        return self._empty(*size, **{"dtype": like.dtype, "device": like.device, **options})

    def _new_empty_strided(
        self, like: torch.Tensor, size: Any, stride: Any, **options: Any
    ) -> torch.Tensor | None:
        if type(like) is not torch.Tensor:
            return None
        return self._empty_strided(size, stride, **{"dtype": like.dtype, "device": like.device, **options})

    def _guard(self, itemsize: int) -> int:
        return self._words * (2 if itemsize == 1 else 1)

    def _allocate(self, shape: tuple[int, ...], options: dict[str, Any]) -> torch.Tensor | None:
        dtype = options.get("dtype") or torch.get_default_dtype()
        numel = math.prod(shape)
        if dtype not in POISON or not options.keys() <= _FORWARDED or min(shape, default=0) < 0:
            return None
        if numel * dtype.itemsize > LARGEST or not numel + self._words:
            return None
        bits_dtype, poison = POISON[dtype]
        guard = self._guard(dtype.itemsize)
        bits = torch.full((numel + 2 * guard,), poison, **{**options, "dtype": bits_dtype})
        if bits.is_meta:
            return None
        base = bits if dtype is bits_dtype else bits.view(dtype)
        if shape:
            inside = base[guard : guard + numel] if guard else base
            view = inside if len(shape) == 1 else inside.view(shape)
        else:
            view = base[guard]  # selecting the one element gives the 0-D view in a single op
        watched = dtype in NARROW and self.kernels_are_watched
        poisoned = Poisoned(view, poison, bytearray(bits.numel()) if watched else None, bits.data_ptr())
        buffer = GuardedBuffer(bits, view, guard, len(self._buffers), poisoned)
        self._buffers.append(buffer)
        self._by_storage[bits.untyped_storage().data_ptr()] = buffer
        return view


def _said(options: dict[str, Any]) -> dict[str, Any]:
    """`options` without those that say what torch does anyway."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value is not torch.strided
    }


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def _shape(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape that `torch.empty(*size, **options)` asks for; None where it is not ours to serve. Takes
    `size` out of `options`."""
    if "size" in options:
        size = (*size, options.pop("size"))
    if not size:
        return None
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = tuple(size[0])
    return tuple(operator.index(n) for n in size)
