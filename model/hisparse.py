"""The HiSparse allocator, as its contract has it: logical pages for every token, device pages for some.

Prefill takes both and maps one to the other; decode takes logical pages alone. A row's device pages can be
turned into a buffer, which belongs to whoever asked for it and outlives the row. Both pools are paged at
every page size. Groups of frees are no-ops: a free acts at once.

Not covered: the variant with compressed device slots (`hisparse_v4.py`), and what is copied where.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Growth, Outcome, Row
from kvproof.model.marks import Mark
from kvproof.model.ops import Op
from kvproof.model.paired import Demand, PairedModel
from kvproof.model.pool import Pool
from kvproof.model.sides import Side


class DeviceModel(PairedModel):
    """What every kind with a device side has: logical extends, device frees and buffers.

    buffers: device pages of each buffer that is out, oldest first.
    """

    by_page = False

    def _reset(self) -> None:
        super()._reset()
        self.buffers: list[list[int]] = []

    def _device_handlers(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        return {
            ops.ExtendLogical: self._extend_logical,
            ops.FreeDevice: self._free_device,
            ops.DeviceBuffer: self._device_buffer,
            ops.FreeBuffer: self._free_buffer,
        }

    def _holders(self, side: str) -> Iterator[tuple[list[int], str]]:
        yield from super()._holders(side)
        if side == "device":
            for ordinal, pages in enumerate(self.buffers):
                yield pages, f"buffer {ordinal}"

    def _device_demand(self, growths: list[Growth]) -> Demand:
        device = self.paired["device"]
        mine = [device.growth(growth.row, growth.prefix, growth.seq) for growth in growths]
        tokens = sum(growth.seq - growth.prefix for growth in mine)
        return Demand(device, mine, [0] * len(mine), tokens // device.page_size + len(mine) + 1)

    def _extend_logical(self, op: ops.ExtendLogical) -> Expectation:
        growths, fresh = self._batch(op.entries, freely=True)
        growths = [growth for growth in growths if self._can_step(growth.row)]
        call = self._extend_call(growths)
        call.logical = True
        may_need = call.tokens // self.page_size + len(growths) + 1
        expectation = self._allocate(call, growths, call.pages, may_need)
        if expectation.outcome is Outcome.SLOTS:
            self.rows.extend(fresh)
            if call.tokens:
                self.marks[Mark.LOGICAL_ONLY] += 1
        return expectation

    def _free_device(self, op: ops.FreeDevice) -> Expectation:
        """Whole pages: those that the stretch touches."""
        stretch = self._stretch(op)
        if stretch is None:
            return self._nothing()
        row, start, stop = stretch
        device, ps = self.paired["device"], self.page_size
        first, last = start // ps, self.pages(stop)
        slots = self.slots_of(row, first * ps, min(last * ps, row.length))
        device.pool.release_set(self._lose_pages(device, row, first, last))
        if slots:
            self.marks[Mark.FREED_ON_SIDE] += 1
        return self._done(calls.FreeCall(slots, "free_hisparse"))

    def _device_buffer(self, op: ops.DeviceBuffer) -> Expectation:
        if not self.rows:
            return self._nothing()
        row = self.rows[op.row % len(self.rows)]
        device = self.paired["device"]
        half, ps, pool = device.half(row), device.page_size, device.pool
        has = [index for index, page in enumerate(half.pages) if page]
        # A partial page before the last would be completed in its middle: no caller has one.
        if any(half.mapped[index] < ps for index in has[:-1]):
            return self._nothing()
        own = [half.pages[index] for index in has]
        pages = min(max(op.pages, 1), len(pool.pages) + 1)
        call = calls.BufferCall(self.mapped_slots(row), pages * ps)
        extra = max(pages - len(own), 0)
        if extra and pool.merge_for(extra):
            self.marks[Mark.STAGED_MERGE] += 1
        if extra > len(pool.free):
            self.marks[Mark.BUFFER_REFUSED] += 1
            return Expectation(call, Outcome.OOM, self.available)
        self._note_buffer(own, pages, bool(has) and half.mapped[has[-1]] < ps)
        taken = pool.take(extra)
        self._lose_pages(device, row, 0, len(half.pages))
        pool.release_set(own[pages:])
        buffer = own[:pages] + taken
        self.buffers.append(buffer)
        slots = [page * ps + offset for page in buffer for offset in range(ps)]
        return Expectation(call, Outcome.SLOTS, self.available, slots, taken=taken, detached=own)

    def adopt_buffer(self, expectation: Expectation, pages: list[int]) -> None:
        """Take the target's choice for the buffer just given: these device pages, of the row's own ones and
        of those that were free before. What of the row's own is not among them is free."""
        pool = self.paired["device"].pool
        predicted = self.buffers[-1]
        for page in predicted:
            if page in pages:
                continue
            if page in expectation.taken:
                pool.free.insert(0, page)  # never left the list: a group does not hold it
            else:
                pool.release_set([page])
        for page in pages:
            if page not in predicted:
                for waiting in (pool.free, pool.staged, *(pool.held or ())):
                    if page in waiting:
                        waiting.remove(page)
        self.buffers[-1] = pages
        expectation.available = self.available

    def _free_buffer(self, op: ops.FreeBuffer) -> Expectation:
        if not self.buffers:
            return self._nothing()
        pages = self.buffers.pop(op.buffer % len(self.buffers))
        device = self.paired["device"]
        ps = device.page_size
        device.pool.release_set(pages)
        slots = [page * ps + offset for page in pages for offset in range(ps)]
        return self._done(calls.FreeCall(slots, "free_hisparse_indices"))

    def _note_buffer(self, own: list[int], pages: int, partial: bool) -> None:
        marks = self.marks
        if len(own) > pages:
            marks[Mark.BUFFER_SURPLUS] += 1
        elif partial and pages:
            marks[Mark.BUFFER_COMPLETED] += 1
        if own and pages > len(own):
            marks[Mark.BUFFER_GROWN] += 1


class HisparseModel(DeviceModel):
    """A logical and a device pool, and the rows and buffers in them. `config.size` is the device's."""

    defers = False

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        handlers = super()._handle()
        for op_type in (ops.FreePages, ops.Resize):
            del handlers[op_type]
        if self.page_size > 1:
            del handlers[ops.Alloc]
        return handlers | self._device_handlers()

    def _make_sides(self) -> Iterator[Side]:
        config, ps = self.config, self.page_size
        pool = Pool(range(1, config.size // ps + 1), config.need_sort)
        yield Side("device", pool, ps, config.size * config.ratio + ps)

    def _can_grow(self, row: Row) -> bool:
        return self.paired["device"].goes_on(row)

    def _demands(self, call: calls.Call, growths: list[Growth]) -> list[Demand]:
        if isinstance(call, calls.DecodeCall) or (isinstance(call, calls.ExtendCall) and call.logical):
            return []
        if isinstance(call, calls.AllocCall):
            device = self.paired["device"]
            mine = [device.growth(growth.row, growth.prefix, growth.seq) for growth in growths]
            return [Demand(device, mine, [0] * len(mine), call.need // self.page_size)]
        return [self._device_demand(growths)]

    def _group_begin(self, _op: ops.GroupBegin) -> Expectation:
        return self._done(calls.GroupBeginCall())

    def _group_end(self, _op: ops.GroupEnd) -> Expectation:
        return self._done(calls.GroupEndCall())
