"""Whether lanes that have no value had a say in what a program did.

A lane of `tl.load(p, mask=m)` without `other` where m is false is undefined, and so are the lanes of an
atomic's result that its mask leaves out; a device may give anything. Using them is a fault wherever it shows:
in what an active lane stores, in an active lane's address, in a mask, or in a decision (`if`, `while`,
`range`). Dropping them, under `tl.where` or in lanes that are masked off again, is lawful.

A `Tape` notes what a program does while it runs over memory, where undefined lanes hold 0. If it had any, the
program is run again by a `Replay` with other numbers in them. That run touches no memory: every load gives
what is on the tape. As long as it does the same as the tape, it would have found the same in memory; the
first thing it does otherwise depends on undefined lanes, and ends it. What a masked-off lane addresses or
carries is not compared: it is never performed.

Not covered: a use that comes to the same for 0 and for the numbers in `filling` (which lie far above and far
below what kernels compute with), programs that touch more than TAPE_LANES lanes (not judged), and kernels
that wait by a clock. What a kernel says by `tl.static_print` is said again. `and`, `or` and `not` of an
undefined scalar count as decisions, since the interpreter decides by them; Python's `min` and `max` do not.
Block pointers count as masked loads unless a padding is given; tensor descriptors always pad.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .findings import InstrumentError
from .memory import LaunchMemory

TAPE_LANES: Final = 1 << 22
"""A tape keeps some 25 bytes a lane: about 100 MB."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Hole:
    """The first undefined lane of the loads from one argument: where it leads, as in `MemoryFinding`."""

    argument: str
    offset: int
    extent: int


class Diverged(BaseException):
    """A replayed program did something else than the tape says; `use`: what, for people.

    Internal, and no Exception: nothing between a memory operation and the replay may catch it.
    """

    def __init__(self, use: str) -> None:
        super().__init__(use)
        self.use = use


@dataclass(frozen=True, slots=True)
class _Access:
    """One memory operation: `value` is what was stored or combined, `expected` what a swap compares with,
    `hole` the argument whose undefined lanes are in `result`, if there are any."""

    name: str
    ptrs: Array
    mask: Array | None = None
    value: Array | None = None
    expected: Array | None = None
    result: Array | None = None
    hole: str | None = None


class Tape:
    """Performs a program's operations in `memory` and notes them. `holes`: argument -> its first hole, in
    the order of the program."""

    silent = False

    def __init__(self, memory: LaunchMemory) -> None:
        self._memory = memory
        self.events: list[_Access | bool | int] = []
        self.holes: dict[str, Hole] = {}
        self._undefined = 0
        self._lonely = False
        self._room = TAPE_LANES

    def rewind(self) -> None:
        """Forget; the next program begins."""
        self.events.clear()
        self.holes.clear()
        self._undefined = 0
        self._lonely = False
        self._room = TAPE_LANES

    @property
    def signs(self) -> tuple[int, ...]:
        """The replays it takes, by the sign that each load's first undefined lane gets; the next lane gets
        the other. Two replays where a load has only one such lane, none where the tape is full."""
        if self._room < 0 or not self.holes:
            return ()
        # Which one goes first matters to programs that look at one lane only: both have their turn.
        sign = 1 - 2 * (self._undefined & 1)
        return (sign, -sign) if self._lonely else (sign,)

    def load(self, ptrs: Array, mask: Array, other: Array, dtype: np.dtype[Any], bare: bool) -> Any:
        """`bare`: the kernel gave no `other`."""
        result = self._memory.load(ptrs, mask, other, dtype)
        self._note(_Access("load", ptrs, mask, result=result, hole=self._hole(ptrs, mask) if bare else None))
        return result

    def store(self, ptrs: Array, value: Array, mask: Array) -> Any:
        self._note(_Access("store", ptrs, mask, value))
        return self._memory.store(ptrs, value, mask)

    def atomic_rmw(self, operation: Any, ptrs: Array, value: Array, mask: Array, order: Any) -> Any:
        result = self._memory.atomic_rmw(operation, ptrs, value, mask, order)
        self._note(_Access("atomic", ptrs, mask, value, None, result, self._hole(ptrs, mask)))
        return result

    def atomic_cas(self, ptrs: Array, expected: Array, value: Array, order: Any) -> Any:
        result = self._memory.atomic_cas(ptrs, expected, value, order)
        self._note(_Access("atomic", ptrs, None, value, expected, result))
        return result

    def decide(self, value: bool | int) -> bool | int:
        """A number of the kernel was handed to Python."""
        self._note(value)
        return value

    def _note(self, event: _Access | bool | int) -> None:
        self._room -= event.ptrs.size if isinstance(event, _Access) else 1
        if self._room < 0:
            self.events.clear()
        else:
            self.events.append(event)

    def _hole(self, ptrs: Array, mask: Array) -> str | None:
        """The argument that the first undefined lane leads to; None if all lanes are active."""
        if mask.all():
            return None
        lanes = np.flatnonzero(mask == 0)
        self._undefined += lanes.size
        self._lonely |= lanes.size == 1
        address = int(ptrs.reshape(-1)[lanes[0]])
        name, offset, extent = self._memory.whereabouts(address)
        self.holes.setdefault(name, Hole(name, offset, extent))
        return name

    def place(self, access: _Access) -> str:
        """The argument that `access` leads to, by its first active lane."""
        lanes = np.arange(1) if access.mask is None else np.flatnonzero(access.mask)
        return self._memory.whereabouts(int(access.ptrs.reshape(-1)[lanes[0] if lanes.size else 0]))[0]


class Replay:
    """Serves a program from `tape`, with fillings in the undefined lanes of `arguments`. `sign`: of the first
    such lane of each load.

    Raises Diverged where the program leaves the tape."""

    silent = True

    def __init__(self, tape: Tape, arguments: Collection[str], sign: int) -> None:
        self._tape = tape
        self._arguments = arguments
        self._sign = sign
        self._at = 0

    def load(self, ptrs: Array, mask: Array, other: Array, dtype: np.dtype[Any], bare: bool) -> Any:
        then = self._next("load", ptrs, mask)
        return self._result(then, mask, other)

    def store(self, ptrs: Array, value: Array, mask: Array) -> Any:
        then = self._next("store", ptrs, mask)
        self._compare("a value stored to", then, then.value, value)

    def atomic_rmw(self, operation: Any, ptrs: Array, value: Array, mask: Array, order: Any) -> Any:
        then = self._next("atomic", ptrs, mask)
        self._compare("a value of an atomic on", then, then.value, value)
        return self._result(then, mask, then.result)

    def atomic_cas(self, ptrs: Array, expected: Array, value: Array, order: Any) -> Any:
        then = self._next("atomic", ptrs, None)
        self._compare("a value of an atomic on", then, then.value, value)
        self._compare("a value of an atomic on", then, then.expected, expected)
        return then.result

    def decide(self, value: bool | int) -> bool | int:
        then = self._step()
        if then is not value and then != value and not _asked_by_a_function(sys._getframe(2)):
            raise Diverged("a decision")
        return value

    def finish(self) -> None:
        if self._at < len(self._tape.events):
            raise Diverged("a decision")

    def _step(self) -> Any:
        if self._at >= len(self._tape.events):
            raise Diverged("a decision")
        self._at += 1
        return self._tape.events[self._at - 1]

    def _next(self, name: str, ptrs: Array, mask: Array | None) -> _Access:
        then = self._step()
        if not isinstance(then, _Access) or then.name != name or then.ptrs.shape != ptrs.shape:
            raise Diverged("a decision")
        if mask is not None and not ((mask != 0) == (then.mask != 0)).all():
            raise Diverged(f"the mask of a {name} at {self._tape.place(then)}")
        self._compare("an address in", then, then.ptrs, ptrs)
        return then

    def _compare(self, use: str, then: _Access, was: Array | None, now: Array) -> None:
        """Active lanes must be the same, bit by bit (a NaN equals itself)."""
        assert was is not None
        same = _bits(was) == _bits(now)
        if not same.all() and (
            then.mask is None or not same[np.broadcast_to(then.mask != 0, same.shape)].all()
        ):
            raise Diverged(f"{use} {self._tape.place(then)}")

    def _result(self, then: _Access, mask: Array, other: Any) -> Any:
        assert then.result is not None
        if then.hole is not None and then.hole in self._arguments:
            undefined = mask == 0
            result = then.result.copy()
            result[undefined] = filling(result.dtype, np.count_nonzero(undefined), self._at, self._sign)
            return result
        if then.hole is None and mask.all():
            return then.result
        return np.where(mask != 0, then.result, other)


@lru_cache(maxsize=256)
def filling(dtype: np.dtype[Any], count: int, site: int, sign: int) -> Array:
    """`count` numbers of `dtype` that differ in every lane and `site`; signs alternate, the first is `sign`.

    Odd, and about a quarter of what an integer type holds, or 2**100 (2**14 in half precision): a sum moves,
    a maximum or a minimum moves, a remainder is not 0. Not to be mutated.
    """
    lanes = np.arange(count, dtype=np.uint64) + np.uint64(site << 24 | 1)
    mixed = lanes * np.uint64(0x9E3779B97F4A7C15)  # the golden ratio: neighbours end up far apart
    values = (mixed >> np.uint64(3) | np.uint64(1 << 61)).view(np.int64)  # in [2**61, 2**62)
    signs = np.where(lanes & np.uint64(1) == lanes[:1] & np.uint64(1), sign, -sign)
    if dtype.kind == "f":
        scale = 2.0**14 if dtype.itemsize == 2 else 2.0**100
        filled: Array = (signs * scale * (values / 2.0**62)).astype(dtype)
        return filled
    filled = (signs * (values >> (64 - 8 * dtype.itemsize) | 1)).astype(dtype)
    return filled


def _bits(values: Array) -> Array:
    return values.view(f"u{values.dtype.itemsize}")


def _asked_by_a_function(frame: Any) -> bool:
    """Whether the code in `frame` is just calling something (`min`, `max`), so that a number handed to Python
    there decides between values and not between paths."""
    code: bytes = frame.f_code.co_code
    operation: str = dis.opname[code[frame.f_lasti]]
    return operation.startswith("CALL")


def failed_assertion(error: BaseException | None) -> bool:
    """Whether `error` is, or was made from, an assertion of the kernel: its condition is a decision."""
    while error is not None:
        if isinstance(error, InstrumentError):
            return False
        if isinstance(error, AssertionError):
            return True
        error = error.__cause__
    return False
