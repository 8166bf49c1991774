"""HiSparse for DeepSeek-V4, as its contract has it: the logical side is a sliding-window allocator, and the
device side keeps one slot for every block of four tokens.

Block b of a row is its tokens 4b … 4b+3; it has a device slot once it is complete, and its entry in the
mapping is that of its last token's slot, divided by four. Groups hold frees, as those of the logical side do.

Not covered: the order in which a release hands out a buffer's slots.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Growth, Row
from kvproof.model.config import COMPRESSION
from kvproof.model.hisparse import DeviceModel
from kvproof.model.ops import Op
from kvproof.model.paired import Demand
from kvproof.model.pool import Pool
from kvproof.model.sides import Side
from kvproof.model.swa import SwaModel


class HisparseV4Model(SwaModel, DeviceModel):
    """A full, a sliding-window and a device pool, and the rows and buffers in them."""

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        handlers = super()._handle()
        del handlers[ops.Resize]
        return handlers | self._device_handlers()

    def mapped_slots(self, row: Row) -> list[int]:
        """See AllocatorModel: complete blocks, by their compressed slots."""
        ps = self.paired["device"].page_size
        blocks = range(row.length // COMPRESSION)
        return [row.pages[block // ps] * ps + block % ps for block in blocks]

    def _make_sides(self) -> Iterator[Side]:
        yield from super()._make_sides()
        config = self.config
        ps = config.device_page_size
        pool = Pool(range(1, config.device_size // ps + 1), config.need_sort)
        yield Side("device", pool, ps, config.size // COMPRESSION + ps, COMPRESSION)

    @property
    def sizes(self) -> dict[str, int]:
        """See AllocatorModel. What is available of the full side is min'ed with the device by some only."""
        return {"swa": self.paired["swa"].available}

    def _can_grow(self, row: Row) -> bool:
        return super()._can_grow(row) and self.paired["device"].goes_on(row)

    def _can_step(self, row: Row) -> bool:
        return self.paired["swa"].goes_on(row)

    def _demands(self, call: calls.Call, growths: list[Growth]) -> list[Demand]:
        demands = super()._demands(call, growths)
        if isinstance(call, calls.ExtendCall) and not call.logical and call.tail is None:
            demands.append(self._device_demand(growths))
        return demands
