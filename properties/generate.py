"""The generator: what a hostile but lawful caller does next.

It looks at the model only (how many rows, how long, how much is free), so that a trace never depends on the
target. It leans towards edges: the last free page, lengths around a page's end, batches around powers of two,
rows that grow by nothing, tensors overwritten while a group still needs them. Every trace has its own taste:
weights are drawn per trace and some ops are switched off (swarm testing), since faults hide behind ops that
undo one another. A cache whose pages are a part of the allocator's is a taste too: it cuts rows at its own
pages.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Final

from kvproof.model import ops
from kvproof.model.base import AllocatorModel, Row
from kvproof.model.hisparse import DeviceModel
from kvproof.model.marks import WIDE_ROWS
from kvproof.model.ops import HARMLESS, MISUSES, NEW_ROW, Op
from kvproof.properties.draw import Draw
from kvproof.properties.space import Space, is_wide

# Relative to one another; a taste of 0 switches an op off, but never Extend and Free. GroupBegin stands for
# GroupEnd as well: whichever can be done.
_WEIGHTS: Final[dict[type[Op], int]] = {
    ops.Extend: 26,
    ops.Free: 14,
    ops.Decode: 36,
    ops.Alloc: 4,
    ops.FreeSegment: 6,
    ops.FreeSegments: 3,
    ops.FreePages: 4,
    ops.GroupBegin: 8,
    ops.Clobber: 4,
    ops.Clear: 1,
    ops.Resize: 1,
    ops.Misuse: 24,
    ops.ExtendTail: 8,
    ops.FreeSwa: 12,
    ops.FreeSwaSegment: 6,
    ops.FreeFull: 6,
    ops.FreeFullSegment: 3,
    ops.Remap: 8,
    ops.ExtendLogical: 5,
    ops.FreeDevice: 5,
    ops.DeviceBuffer: 7,
    ops.FreeBuffer: 6,
    ops.AllocGroupBegin: 10,
    ops.Chain: 8,
}
_HARMLESS_WEIGHT: Final = 2
"""Of Misuse where only those are drawn that the contract wants harmless from everybody."""
_TASTES: Final = (4, 4, 4, 1, 12, 0)
_ALWAYS: Final = (ops.Extend, ops.Free, ops.Misuse)
_RARE: Final = (ops.Clear, ops.Resize)
_FREES: Final = (
    ops.Free,
    ops.FreeSegment,
    ops.FreeSegments,
    ops.FreePages,
    ops.FreeSwa,
    ops.FreeSwaSegment,
    ops.FreeDevice,
    ops.FreeBuffer,
)
_BATCHES: Final = (1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)
_USUAL_BATCHES: Final = 12
_MOST_ROWS: Final = (4, 8, 8, 16, 16, 64)
# Around the block sizes that kernels are written with.
_WIDE_BATCHES: Final = (127, 128, 129, 255, 256, 257, 258, 300, 513, 1025)
_LONG_TOKENS: Final = (255, 257, 1023, 1024, 1025, 1026, 2047, 2049, 4097, 32767, 32769, 65537)


class Generator:
    """Draws ops for one trace. `next_op` may be called for ever; apply each op to the model in between."""

    def __init__(self, draw: Draw, model: AllocatorModel, space: Space) -> None:
        self._draw = draw
        self._model = model
        self._most_tokens = space.max_row_tokens
        self._wide = is_wide(model.config)
        if self._wide:
            self._batches = [size for size in _WIDE_BATCHES if size <= space.max_wide_batch]
            self._most_rows = 2 * self._batches[-1]
        else:
            batches = [size for size in _BATCHES if size <= space.max_batch]
            self._batches = batches if draw.integer(0, 7) == 7 else batches[:_USUAL_BATCHES]
            self._most_rows = draw.choice(_MOST_ROWS)
        self._exhausts = draw.choice((1, 2, 8))
        self._long_groups = draw.integer(0, 7) == 7
        self._grain = self._cache_page(model.page_size)
        # Faults that a row without growth shows would otherwise end every trace early.
        self._least = draw.integer(0, 1)
        self._misuses = MISUSES if space.misuse else tuple(sorted(HARMLESS))
        self._makers: list[Callable[[], Op]] = []
        self._frees: list[Callable[[], Op]] = []
        self._cumulative = self._taste(space)

    def next_op(self) -> Op:
        """One op that suits the model's present state."""
        draw, model = self._draw, self._model
        # A full pool refuses for ever; make room more often than the weights would.
        if not model.available and (model.rows or isinstance(model, DeviceModel)) and draw.integer(0, 3) > 1:
            return draw.choice(self._frees)()
        if self._wide and draw.integer(0, 3):
            return self._wide_op()
        # With no rows nearly every op comes to nothing.
        if not model.rows and draw.integer(0, 31):
            return self._extend() if ops.Extend in model.knows else self._alloc()
        return self._makers[draw.weighted(self._cumulative)]()

    def _taste(self, space: Space) -> list[int]:
        """Draw which ops this trace likes; the running totals of their weights."""
        makers: dict[type[Op], Callable[[], Op]] = {
            ops.Extend: self._extend,
            ops.Free: self._free,
            ops.Decode: self._decode,
            ops.Alloc: self._alloc,
            ops.FreeSegment: self._free_segment,
            ops.FreeSegments: self._free_segments,
            ops.FreePages: self._free_pages,
            ops.GroupBegin: self._group,
            ops.Clobber: ops.Clobber,
            ops.Clear: ops.Clear,
            ops.Resize: self._resize,
            ops.Misuse: self._misuse,
            ops.ExtendTail: self._extend_tail,
            ops.FreeSwa: lambda: ops.FreeSwa(*self._stretch()),
            ops.FreeSwaSegment: lambda: ops.FreeSwaSegment(*self._stretch()),
            ops.FreeFull: lambda: ops.FreeFull(row := self._row(), self._keep(row)),
            ops.FreeFullSegment: lambda: ops.FreeFullSegment(row := self._row(), self._keep(row)),
            ops.Remap: self._remap,
            ops.ExtendLogical: self._extend_logical,
            ops.FreeDevice: lambda: ops.FreeDevice(*self._stretch()),
            ops.DeviceBuffer: self._device_buffer,
            ops.FreeBuffer: lambda: ops.FreeBuffer(self._draw.integer(0, 3)),
            ops.AllocGroupBegin: self._alloc_group,
            ops.Chain: self._chain,
        }
        weights: list[int] = []
        for op_type, maker in makers.items():
            if op_type.__name__ in space.lacks or op_type not in self._model.knows:
                continue
            always = op_type in _ALWAYS or (op_type is ops.Alloc and ops.Extend not in self._model.knows)
            taste = 4 if always else self._draw.choice(_TASTES)
            if op_type in _RARE:
                taste = min(taste, 1)
            if taste:
                self._makers.append(maker)
                harmless = op_type is ops.Misuse and not space.misuse
                weights.append((_HARMLESS_WEIGHT if harmless else _WEIGHTS[op_type]) * taste)
                if op_type in _FREES:
                    self._frees.append(maker)
        return list(accumulate(weights))

    # --- allocation -------------------------------------------------------------------------------

    def _extend(self) -> Op:
        integer, rows = self._draw.integer, self._model.rows
        live = len(rows)
        batch = self._draw.choice(self._batches)
        if not integer(0, 63) and not self._least:
            return ops.Extend(())
        crowded = live >= self._most_rows
        first = integer(0, live - 1) if live else 0
        old = min(batch, live) if crowded else integer(0, min(batch, live))
        ordinals = [(first + i) % live for i in range(old)]
        if not crowded:
            ordinals += [NEW_ROW] * (batch - old)
        if integer(0, 3) == 3:
            ordinals.reverse()
        entries = self._entries(ordinals)
        if integer(0, 15) < self._exhausts:
            self._exhaust(entries)
        return ops.Extend(tuple(entries))

    def _wide_op(self) -> Op:
        """Hundreds of rows in one batch, one of them long: what kernels serve in several blocks."""
        draw, model, live = self._draw, self._model, len(self._model.rows)
        ps, shift = model.page_size, draw.integer(0, 9)
        # Mostly what fits: what is refused reaches no second block.
        room = model.available if draw.integer(0, 3) else 1 << 60
        batch = draw.choice([size for size in self._batches if size * ps <= room] or self._batches)
        if live >= min(batch, WIDE_ROWS + 1) and draw.integer(0, 2) and ops.Decode in model.knows:
            return ops.Decode(tuple(range(live)))
        entries = [(NEW_ROW, (shift + i) % (ps + 1) or self._least) for i in range(batch)]
        long = [tokens for tokens in _LONG_TOKENS if tokens + batch * ps <= room]
        if long and draw.boolean():
            place = draw.integer(0, batch - 1)
            entries[place] = (NEW_ROW, draw.choice(long) + draw.integer(-1, 1))
        return ops.Extend(tuple(entries))

    def _entries(self, ordinals: list[int]) -> list[tuple[int, int]]:
        """Amounts for these rows. Most callers ask for what there is: the batch ends where the pool does."""
        model = self._model
        rows, ps = model.rows, model.page_size
        left = model.available // ps if self._draw.integer(0, 7) else 1 << 60
        entries: list[tuple[int, int]] = []
        for ordinal in ordinals:
            length = rows[ordinal].length if ordinal >= 0 else 0
            tokens = min(max(self._tokens(length, ps), self._least), self._most_tokens)
            left -= (length + tokens + ps - 1) // ps - (length + ps - 1) // ps
            if left < 0:
                if not entries:
                    entries.append((ordinal, -length % ps or self._least))
                break
            entries.append((ordinal, tokens))
        return entries

    def _tokens(self, length: int, ps: int) -> int:
        """How much a row of this length grows: around the end of its page, and around whole pages."""
        integer = self._draw.integer
        kind = integer(0, 15)
        if kind >= 11:
            return integer(1, 2 * ps + 1) if kind < 15 else ps * integer(2, 6) + integer(-1, 1)
        if kind < 3:
            return 1 if kind else 0
        if kind < 6:
            return max(0, -length % ps + kind - 4)
        if kind < 9:
            return ps + kind - 7
        return -length % ps + ps * integer(1, 3) + integer(-1, 1)

    def _exhaust(self, entries: list[tuple[int, int]]) -> None:
        """Make the last row take the pool to one page less than, exactly, or one more than all."""
        draw, model = self._draw, self._model
        ps = model.page_size
        left = model.available // ps + draw.integer(-1, 1)
        rows = model.rows
        for ordinal, tokens in entries[:-1]:
            length = 0 if ordinal == NEW_ROW else rows[ordinal].length
            left -= -(-(length + tokens) // ps) - -(-length // ps)
        if left > 0 and entries:
            ordinal = entries[-1][0]
            length = 0 if ordinal == NEW_ROW else rows[ordinal].length
            tokens = -length % ps + left * ps - draw.integer(0, ps - 1)
            if tokens <= self._most_tokens:
                entries[-1] = (ordinal, tokens)

    def _decode(self) -> Op:
        draw = self._draw
        live = len(self._model.rows)
        if not live or draw.integer(0, 1):
            return ops.Decode(tuple(range(live)))
        first = draw.integer(0, live - 1)
        count = min(draw.choice(self._batches), live)
        return ops.Decode(tuple(range(first, first + count)))

    def _alloc(self) -> Op:
        draw = self._draw
        free = self._model.available // self._model.page_size
        return ops.Alloc(
            max(0, free + draw.integer(-1, 1)) if draw.integer(0, 3) == 3 else draw.integer(0, 3)
        )

    # --- release ----------------------------------------------------------------------------------

    def _row(self) -> int:
        """Hot rows are the youngest; every other draw takes any."""
        live = len(self._model.rows)
        return 0 if not live else live - 1 if self._draw.integer(0, 1) else self._draw.integer(0, live - 1)

    def _keep(self, row: int) -> int:
        """Tokens to keep: mostly none, else anything."""
        rows = self._model.rows
        if not rows or self._draw.integer(0, 3) < 3:
            return 0
        return self._draw.integer(0, rows[row].length)

    def _free(self) -> Op:
        draw = self._draw
        row = self._row()
        count = 1 if draw.integer(0, 3) < 3 else draw.choice(self._batches)
        keep = self._keep(row)
        order = draw.integer(0, ops.ORDERS - 1) if draw.integer(0, 3) == 3 else ops.IN_ORDER
        return ops.Free(tuple(range(row, row + count)), keep, order)

    def _free_segment(self) -> Op:
        row = self._row()
        return ops.FreeSegment(row, self._keep(row))

    def _free_segments(self) -> Op:
        row = self._row()
        cuts = tuple(self._draw.integer(0, 4) for _ in range(self._draw.integer(0, 3)))
        return ops.FreeSegments(row, self._keep(row), cuts)

    def _free_pages(self) -> Op:
        row = self._row()
        return ops.FreePages(row, self._keep_pages(row))

    def _keep_pages(self, row: int) -> int:
        rows: list[Row] = self._model.rows
        if not rows or self._draw.integer(0, 3) < 3:
            return 0
        return self._draw.integer(0, len(rows[row].pages))

    # --- the rest ---------------------------------------------------------------------------------

    def _resize(self) -> Op:
        draw, config = self._draw, self._model.config
        pages = max(1, config.num_pages + draw.choice((-2, -1, 0, 1, 5)))
        return ops.Resize(pages, draw.integer(0, config.page_size - 1))

    def _group(self) -> Op:
        if not self._model.defers:
            return ops.GroupEnd() if self._draw.boolean() else ops.GroupBegin()
        if not self._model.in_group:
            return ops.GroupBegin()
        if self._long_groups and self._draw.integer(0, 15):
            return self._free()
        return ops.GroupEnd() if self._draw.integer(0, 15) else ops.Clear()

    def _misuse(self) -> Op:
        return ops.Misuse(self._draw.choice(self._misuses), self._row())

    # --- pools of two sides, state slots, shards --------------------------------------------------

    def _cache_page(self, page_size: int) -> int:
        """The caller's own page: mostly the allocator's, else a part of it."""
        parts = [part for part in (1, 2, 4, 16) if page_size % part == 0]
        return page_size // (self._draw.choice(parts) if self._draw.integer(0, 1) else 1)

    def _grains(self, most: int) -> int:
        """A number of tokens up to `most`, mostly of whole cache pages."""
        tokens = self._draw.integer(0, most)
        return tokens if not self._draw.integer(0, 7) else tokens // self._grain * self._grain

    def _stretch(self) -> tuple[int, int, int]:
        """A row, and a stretch of it as (start, tokens): what a window leaves behind, or any."""
        rows = self._model.rows
        row = self._row()
        length = rows[row].length if rows else 0
        match self._draw.integer(0, 3):
            case 0:
                return row, 0, 0
            case 1:
                return row, 0, self._grains(length)
            case 2:
                return row, self._grains(length), self._draw.integer(0, 2 * self._grain)
            case _:
                start = self._grains(length)
                return row, start, self._grains(length - start)

    def _extend_tail(self) -> Op:
        draw, rows = self._draw, self._model.rows
        live = len(rows)
        fresh = live < self._most_rows and (not live or draw.boolean())
        # A row that ends inside a page is where a tail could go on wrongly.
        inside = [at for at, each in enumerate(rows) if each.length % self._model.page_size]
        if fresh:
            row = NEW_ROW
        elif inside and draw.integer(0, 3):
            row = draw.choice(inside)
        else:
            row = draw.integer(0, max(live - 1, 0))
        ((row, tokens),) = self._entries([row])
        entries = [(row, tokens)]
        if draw.integer(0, 15) < self._exhausts:
            self._exhaust(entries)
        row, tokens = entries[0]
        return ops.ExtendTail(row, tokens, self._grains(tokens) if draw.integer(0, 3) else 0)

    def _remap(self) -> Op:
        """Mostly a row that has lost peers, from one that has some: few pairs of rows would do."""
        draw, rows = self._draw, self._model.rows
        live = max(len(rows), 1)
        row, donor = draw.integer(0, live - 1), draw.integer(0, live - 1)
        if draw.integer(0, 3):
            peers = [self._model.peer_pages(one, "swa") for one in rows]
            bare = [ordinal for ordinal, pages in enumerate(peers) if 0 in pages]
            paired = [ordinal for ordinal, pages in enumerate(peers) if any(pages)]
            row = draw.choice(bare) if bare else row
            donor = draw.choice(paired) if paired else donor
        start, pages = (draw.integer(0, 3), draw.integer(0, 2)) if not draw.integer(0, 3) else (0, 0)
        return ops.Remap(row, donor, start, pages)

    def _extend_logical(self) -> Op:
        op = self._extend()
        assert isinstance(op, ops.Extend)
        return ops.ExtendLogical(op.entries)

    def _device_buffer(self) -> Op:
        draw, model, row = self._draw, self._model, self._row()
        own = len([page for page in model.peer_pages(model.rows[row], "device") if page]) if model.rows else 0
        free = model.sides["device"].count
        if draw.integer(0, 3):
            return ops.DeviceBuffer(row, max(0, own + draw.integer(-1, 2)))
        return ops.DeviceBuffer(row, max(0, own + free + draw.integer(-1, 1)))

    def _alloc_group(self) -> Op:
        draw, model = self._draw, self._model
        if draw.integer(0, 2) == 0:
            return ops.AllocGroupEnd()
        free = model.available
        return ops.AllocGroupBegin(
            max(0, free + draw.integer(-1, 1)) if draw.integer(0, 3) == 3 else draw.integer(0, 4)
        )

    def _chain(self) -> Op:
        draw = self._draw
        ((_, tokens),) = self._entries([NEW_ROW])
        return ops.Chain(draw.integer(0, 7), tokens)
