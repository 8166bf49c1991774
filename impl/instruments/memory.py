"""Virtual memory for one launch: where an address leads, and who has touched the element before.

Every tensor argument gets a region of its own, 2**44 bytes wide, with the tensor's first element in
the middle:

    region k:  k * 2**44 ........ base ................ (k + 1) * 2**44
                                  | reachable elements |
                                  0                    extent

The regions lie above every address a process can have, so a pointer that is not made from an
argument is told apart. Address arithmetic in a kernel stays inside its region however wrong its
offsets are, and `load`, `store`, `atomic_rmw` and `atomic_cas`, which have the signatures of Triton's
own, translate it back, check it, and let Triton's own perform the lanes that are in bounds.

Races are checked per element between programs of one launch; arguments that overlap in real memory
share their shadow. An atomic races with plain accesses of other programs, not with other atomics.

Not covered: pointers that were reinterpreted to elements of another width and overlapping arguments
of different widths (both raise InstrumentError), ordering by atomics (a plain read of what another
program wrote before it raised a flag is reported), races between launches (which a stream orders), and
between the lanes of one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .findings import UNKNOWN_ARGUMENT, CallAudit, InstrumentError, Kind, MemoryFinding, Program
from .fresh import Fresh

MISREAD_BYTE: Final = 0xB6
"""Unlike the poison of `guards`, so that storing a misread value does not look like storing nothing."""

Array = npt.NDArray[Any]

_REGION_BITS = 44
_FIRST_REGION = 1 << 12  # 2**56 and up: no user address of a 48- or 57-bit machine


def misread(dtype: np.dtype[Any]) -> Any:
    """What a load out of bounds gives: the scalar of `dtype` whose every byte is MISREAD_BYTE."""
    return np.full(dtype.itemsize, MISREAD_BYTE, np.uint8).view(dtype)[0]


class Shadow:
    """Who touched each element of one stretch of real memory in this launch.

    Entries are 1 + a program's ordinal in the grid, 0 for nobody. `reader` and `atomic` hold the
    first program, which is enough: programs run in the order of their ordinals, so if the first is
    the running one, no other was there.
    """

    __slots__ = ("atomic", "numel", "reader", "writer")

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.writer: Array | None = None
        self.reader: Array | None = None
        self.atomic: Array | None = None

    def fresh(self) -> Array:
        return np.zeros(self.numel, np.int32)


class Region:
    """One tensor argument. `address`: of its first element in host memory, in bytes; `itemsize` likewise.

    `extent`: storage elements from the first to one past the last; `reachable`: bool (extent,), which
    of them the strides reach, or None for all. `fresh`: how to tell elements that nobody has written, if
    the tensor is guarded, else None.
    """

    def __init__(
        self,
        name: str,
        address: int,
        itemsize: int,
        extent: int,
        reachable: Array | None,
        fresh: Fresh | None,
    ) -> None:
        self.name = name
        self.address = address
        self.itemsize = itemsize
        self.extent = extent
        self.reachable = reachable
        self.fresh = fresh
        self.base = 0
        self.shadow = Shadow(extent)
        self.shadow_start = 0
        self.written = False

    def place(self, ordinal: int) -> None:
        self.base = ((_FIRST_REGION + ordinal) << _REGION_BITS) + (1 << (_REGION_BITS - 1))


def share_shadows(regions: Sequence[Region]) -> None:
    """Give regions that overlap in real memory one shadow. Mutates `shadow` and `shadow_start`."""
    group: list[Region] = []
    end = 0
    for region in sorted((r for r in regions if r.extent), key=lambda r: r.address):
        if group and region.address < end:
            first = group[0]
            apart = region.address - first.address
            if region.itemsize != first.itemsize or apart % first.itemsize:
                raise InstrumentError(
                    f"arguments {first.name} and {region.name} overlap with elements of different widths"
                    f" ({first.itemsize} and {region.itemsize} bytes) or shifted by a part of one"
                )
            region.shadow = first.shadow
            region.shadow_start = apart // first.itemsize
            first.shadow.numel = max(first.shadow.numel, region.shadow_start + region.extent)
        else:
            group = []
        group.append(region)
        end = max(end, region.address + region.extent * region.itemsize)


class LaunchMemory:
    """The memory of one launch. `real`: Triton's `load`, `store`, `atomic_rmw` and `atomic_cas`."""

    def __init__(
        self, real: Any, kernel: str, launch: int, regions: Sequence[Region], audit: CallAudit
    ) -> None:
        self._real = real
        self._kernel = kernel
        self._launch = launch
        self._audit = audit
        self._regions = {r.base >> _REGION_BITS: r for r in regions}
        self.grid: Program = (1, 1, 1)
        self.program = 0
        """1 + the ordinal of the running program in the grid, in Triton's order of execution."""
        self.programs = 0

    # -- the four operations -------------------------------------------------------------------------

    def load(self, ptrs: Array, mask: Array, other: Array, dtype: np.dtype[Any]) -> Any:
        # `block & (scalar > 0)` reaches the interpreter as int32, which it would refuse; compilers do not.
        mask = mask.astype(bool, copy=False)
        lanes = np.flatnonzero(mask)
        if not lanes.size:
            return self._real.load(ptrs, mask, other, dtype)
        parts = self._split(ptrs, mask, lanes)
        if parts is not None:
            for part in parts:  # the lanes of one region become the `other` of the next
                other = self.load(ptrs, part, other, dtype)
            return other
        region, offsets = self._locate(ptrs, lanes, dtype.itemsize)
        inside = self._inside(region, offsets)
        if inside is not None:
            self._report("read-out-of-bounds", region, offsets[~inside])
            mask = _only(mask, lanes[inside])
            other = np.array(np.broadcast_to(other, ptrs.shape), dtype)
            other.reshape(-1)[lanes[~inside]] = misread(dtype)
            lanes, offsets = lanes[inside], offsets[inside]
        result = self._real.load(self._translate(ptrs, region), mask, other, dtype)
        self._check_fresh(region, offsets, result, lanes)
        self._mark_read(region, offsets)
        return result

    def store(self, ptrs: Array, value: Array, mask: Array) -> Any:
        mask = mask.astype(bool, copy=False)
        lanes = np.flatnonzero(mask)
        if not lanes.size:
            return None
        parts = self._split(ptrs, mask, lanes)
        if parts is not None:
            for part in parts:
                self.store(ptrs, value, part)
            return None
        region, offsets = self._locate(ptrs, lanes, value.dtype.itemsize)
        inside = self._inside(region, offsets)
        if inside is not None:
            self._report("write-out-of-bounds", region, offsets[~inside])
            mask = _only(mask, lanes[inside])
            offsets = offsets[inside]
        self._mark_written(region, offsets)
        return self._real.store(self._translate(ptrs, region), value, mask)

    def atomic_rmw(self, operation: Any, ptrs: Array, value: Array, mask: Array, order: Any) -> Any:
        mask = mask.astype(bool, copy=False)
        lanes = np.flatnonzero(mask)
        if not lanes.size:
            return self._real.atomic_rmw(operation, ptrs, value, mask, order)
        parts = self._split(ptrs, mask, lanes)
        if parts is not None:
            result = np.zeros(ptrs.shape, value.dtype)
            for part in parts:
                result = np.where(part, self.atomic_rmw(operation, ptrs, value, part, order), result)
            return result
        region, offsets = self._locate(ptrs, lanes, value.dtype.itemsize)
        inside = self._inside(region, offsets)
        outside = lanes[:0]
        if inside is not None:
            self._report("write-out-of-bounds", region, offsets[~inside])
            outside = lanes[~inside]
            mask = _only(mask, lanes[inside])
            lanes, offsets = lanes[inside], offsets[inside]
        result = self._real.atomic_rmw(operation, self._translate(ptrs, region), value, mask, order)
        self._check_fresh(region, offsets, result, lanes)
        self._mark_atomic(region, offsets)
        if outside.size:
            result = np.array(result)
            result.reshape(-1)[outside] = misread(result.dtype)
        return result

    def atomic_cas(self, ptrs: Array, expected: Array, value: Array, order: Any) -> Any:
        # Triton's compare-and-swap has no mask, so each lane in bounds is performed by itself.
        flat, wanted, new = (np.broadcast_to(a, ptrs.shape).reshape(-1) for a in (ptrs, expected, value))
        result = np.full(flat.shape, misread(value.dtype), value.dtype)
        for lane in range(flat.size):
            at = flat[lane : lane + 1]
            region, offsets = self._locate(at, _FIRST, value.dtype.itemsize)
            if self._inside(region, offsets) is not None:
                self._report("write-out-of-bounds", region, offsets)
                continue
            where = self._translate(at, region)
            old = self._real.atomic_cas(where, wanted[lane : lane + 1], new[lane : lane + 1], order)
            result[lane] = old[0]
            self._check_fresh(region, offsets, old, _FIRST)
            self._mark_atomic(region, offsets)
        return result.reshape(ptrs.shape)

    def whereabouts(self, address: int) -> tuple[str, int, int]:
        """Argument, element offset and extent of an address that need not be in bounds."""
        region = self._regions.get(address >> _REGION_BITS)
        if region is None:
            return UNKNOWN_ARGUMENT, address, 0
        return region.name, (address - region.base) // region.itemsize, region.extent

    @property
    def reports(self) -> bool:
        """Whether anybody hears what is found."""
        return self._audit.limit > 0

    def report_undefined(self, argument: str, offset: int, extent: int, use: str) -> None:
        """An active lane of the running program used an undefined one."""
        self._audit.add(
            MemoryFinding(
                "undefined-lane-used",
                self._kernel,
                argument,
                self._coordinates(self.program),
                offset,
                extent,
                self._launch,
                use=use,
            )
        )

    # -- addresses -----------------------------------------------------------------------------------

    def _split(self, ptrs: Array, mask: Array, lanes: Array) -> list[Array] | None:
        """One mask for each region the active lanes lead to; None if that is a single one."""
        if lanes.size == 1:
            return None
        active = ptrs.reshape(-1)[lanes] >> _SHIFT
        if (active == active[0]).all():
            return None
        regions = ptrs >> _SHIFT
        return [mask & (regions == number) for number in np.unique(active)]

    def _locate(self, ptrs: Array, lanes: Array, itemsize: int) -> tuple[Region, Array]:
        """The region the active lanes lead to, and their element offsets in it, int64."""
        active = ptrs.reshape(-1)[lanes]
        region = self._regions.get(int(active[0]) >> _REGION_BITS)
        if region is None:
            region = Region(UNKNOWN_ARGUMENT, 0, itemsize, 0, None, None)
            return region, (active // np.uint64(itemsize)).view(np.int64)
        distance = active.view(np.int64) - region.base
        offsets = distance // itemsize
        if itemsize != region.itemsize or (offsets * itemsize != distance).any():
            raise InstrumentError(
                f"{self._kernel} reaches {region.name} ({region.itemsize}-byte elements) through a pointer to"
                f" {itemsize}-byte elements or to a part of one; reinterpreted pointers are not followed"
            )
        return region, offsets

    @staticmethod
    def _inside(region: Region, offsets: Array) -> Array | None:
        """bool per offset, whether the tensor has that element; None if it has them all."""
        inside: Array = (offsets >= 0) & (offsets < region.extent)
        if region.reachable is not None:
            inside[inside] = region.reachable[offsets[inside]]
        return None if inside.all() else inside

    @staticmethod
    def _translate(ptrs: Array, region: Region) -> Array:
        # Inactive lanes come out as nonsense, and are not performed.
        return ptrs - np.uint64(region.base - region.address)

    # -- shadow --------------------------------------------------------------------------------------

    def _mark_read(self, region: Region, offsets: Array) -> None:
        if self.programs == 1:
            return
        shadow, at = region.shadow, offsets + region.shadow_start
        for writers in (shadow.writer, shadow.atomic):
            if writers is not None:
                self._report_others("read-of-other-programs-write", region, offsets, writers[at])
        if shadow.reader is None:
            shadow.reader = shadow.fresh()
        first = shadow.reader[at]
        shadow.reader[at] = np.where(first == 0, self.program, first)

    def _mark_written(self, region: Region, offsets: Array) -> None:
        self._count_as_written(region, offsets)
        shadow, at = region.shadow, offsets + region.shadow_start
        self._check_readers(region, offsets, at)
        if shadow.atomic is not None:
            self._report_others("write-over-other-programs-write", region, offsets, shadow.atomic[at])
        if shadow.writer is None:
            shadow.writer = shadow.fresh()
        writers = shadow.writer[at]
        if writers.any():
            self._report_others("write-over-other-programs-write", region, offsets, writers)
            self._report("double-write", region, offsets[writers == self.program])
        shadow.writer[at] = self.program
        if offsets.size > 1 and not (offsets[1:] > offsets[:-1]).all():
            once, counts = np.unique(offsets, return_counts=True)
            self._report("double-write", region, once[counts > 1])

    def _mark_atomic(self, region: Region, offsets: Array) -> None:
        self._count_as_written(region, offsets)
        shadow, at = region.shadow, offsets + region.shadow_start
        self._check_readers(region, offsets, at)
        if shadow.writer is not None:
            self._report_others("write-over-other-programs-write", region, offsets, shadow.writer[at])
        if shadow.atomic is None:
            shadow.atomic = shadow.fresh()
        first = shadow.atomic[at]
        shadow.atomic[at] = np.where(first == 0, self.program, first)

    def _check_readers(self, region: Region, offsets: Array, at: Array) -> None:
        """The running program writes: whoever has read the element before may as well come after."""
        if region.shadow.reader is None:
            return
        readers = region.shadow.reader[at]
        for lane in np.flatnonzero((readers != 0) & (readers != self.program)):
            reader, writer = int(readers[lane]), self.program
            self._add("read-of-other-programs-write", region, int(offsets[lane]), reader, writer)

    def _check_fresh(self, region: Region, offsets: Array, result: Array, lanes: Array) -> None:
        if region.fresh is not None:
            stale = region.fresh.unwritten(offsets, result.reshape(-1)[lanes])
            self._report("uninitialised-read", region, offsets[stale])

    def _count_as_written(self, region: Region, offsets: Array) -> None:
        region.written |= offsets.size > 0
        if region.fresh is not None:
            region.fresh.mark(offsets)

    # -- reports -------------------------------------------------------------------------------------

    def _report(self, kind: Kind, region: Region, offsets: Array) -> None:
        for offset in offsets.tolist():
            self._add(kind, region, offset, self.program, None)

    def _report_others(self, kind: Kind, region: Region, offsets: Array, others: Array) -> None:
        for lane in np.flatnonzero((others != 0) & (others != self.program)):
            self._add(kind, region, int(offsets[lane]), self.program, int(others[lane]))

    def _add(self, kind: Kind, region: Region, offset: int, program: int, other: int | None) -> None:
        self._audit.add(
            MemoryFinding(
                kind=kind,
                kernel=self._kernel,
                argument=region.name,
                program=self._coordinates(program),
                offset=offset,
                extent=region.extent,
                launch=self._launch,
                other=None if other is None else self._coordinates(other),
            )
        )

    def _coordinates(self, program: int) -> Program:
        x, rest = divmod(program - 1, self.grid[1] * self.grid[2])
        y, z = divmod(rest, self.grid[2])
        return x, y, z


_SHIFT = np.uint64(_REGION_BITS)
_FIRST = np.zeros(1, np.intp)


def _only(mask: Array, lanes: Array) -> Array:
    """A mask of the shape of `mask` in which exactly `lanes` (flat indices) are active."""
    narrowed = np.zeros(mask.size, bool)
    narrowed[lanes] = True
    return narrowed.reshape(mask.shape)
