"""The second side of a pool: its pages, the mapping that leads to them, and what each row has there.

A paired slot has a peer on the other side, and the side mapping names it: entry `page * ps + offset` of the
row's own page leads to the same offset of the row's page over there. So the map is page-injective by itself,
and a row's part on a side is a list of pages beside its own:

    row      pages   4   7   2        half   pages   9   0   5        0: no peer (any more)
             tokens  4   4   3               mapped  4   0   2        slots mapped, from the page's start

A side may be compressed: one of its slots stands for so many tokens (DeepSeek-V4's device side: 4), and its
lengths and offsets are counted in those.

Not covered: when a side takes part in a call, and who may release what (`paired.py`).
"""

from collections.abc import Sequence

from kvproof.model.base import Growth, Portion, Row
from kvproof.model.pool import Pool


class Half(Row):
    """A row's part on a second side. pages: as many as the row's own, 0 where it has none there. mapped: how
    many slots of each are mapped, from its start. row: the whole."""

    __slots__ = ("mapped", "row")

    def __init__(self, row: "PairedRow") -> None:
        super().__init__([], 0)
        self.mapped: list[int] = []
        self.row = row


class PairedRow(Row):
    """A row in a pool with second sides. halves: its part on each, by the side's name."""

    __slots__ = ("halves",)

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([], 0)
        self.halves = {name: Half(self) for name in names}

    def pad(self) -> None:
        """Give every half as many entries as the row has pages."""
        for half in self.halves.values():
            more = len(self.pages) - len(half.pages)
            half.pages += [0] * more
            half.mapped += [0] * more


class Side:
    """One second side.

    name: "swa" or "device". pool: its pages. page_size: in its own slots. compression: tokens a slot.
    entries: of the mapping, before the trailing -1. mapping: peer of each of the main side's slots, 0 for
    none. stale: entries that a target has left behind on pages that are nobody's, until a row gets the slot.
    """

    def __init__(self, name: str, pool: Pool, page_size: int, entries: int, compression: int = 1) -> None:
        self.name = name
        self.pool = pool
        self.page_size = page_size
        self.compression = compression
        self.mapping = [0] * entries + [-1]
        self.stale: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Free and staged, in tokens."""
        return self.pool.count * self.page_size * self.compression

    def half(self, row: Row) -> Half:
        """The row's part here."""
        assert isinstance(row, PairedRow)
        return row.halves[self.name]

    def growth(self, row: Row, prefix: int, seq: int) -> Growth:
        """What it means here that the row grows from `prefix` to `seq` tokens."""
        first, last = prefix // self.compression, seq // self.compression
        return Growth(self.half(row), first, last, -(-first // self.page_size))

    def need(self, growths: list[Growth]) -> int:
        """How many pages they take."""
        return sum(-(-growth.seq // self.page_size) - growth.first_new for growth in growths)

    def goes_on(self, row: Row) -> bool:
        """Whether the row can grow here: its last slot has a peer, or it has no slot yet. A call looks up the
        peer of the last_loc and wants it congruent, though a row that starts a page takes nothing from it."""
        length = row.length // self.compression
        if not length:
            return True
        page, offset = divmod(length - 1, self.page_size)
        return self.half(row).mapped[page] == offset + 1

    def grow(self, growth: Growth, pages: list[int]) -> list[int]:
        """Give the row these new pages and map its new slots. Returns their peers."""
        ps, half = self.page_size, growth.row
        assert isinstance(half, Half)
        peers: list[int] = []
        for index in _touched(growth, ps):
            if index >= growth.first_new:
                half.pages[index] = pages[index - growth.first_new]
            start = max(growth.prefix - index * ps, 0)
            stop = min(growth.seq - index * ps, ps)
            self._map(half, index, start, stop)
            first = half.pages[index] * ps
            peers.extend(range(first + start, first + stop))
        return peers

    def _map(self, half: Half, index: int, start: int, stop: int) -> None:
        """Map offsets [start, stop) of one page of the row."""
        ps = self.page_size
        here, there = half.row.pages[index] * ps, half.pages[index] * ps
        self.mapping[here + start : here + stop] = range(there + start, there + stop)
        half.mapped[index] = stop

    def unmap(self, row: Row, index: int) -> int:
        """Take the row's page here away and clear its entries. The page, or 0 where there was none."""
        half = self.half(row)
        page, mapped = half.pages[index], half.mapped[index]
        if page:
            here = row.pages[index] * self.page_size
            self.mapping[here : here + mapped] = [0] * mapped
            half.pages[index] = half.mapped[index] = 0
        return page

    def move(self, donor: Row, row: Row, index: int, used: int) -> None:
        """The row takes over the donor's page here, for its own first `used` slots."""
        page = self.unmap(donor, index)
        half = self.half(row)
        half.pages[index] = page
        self._map(half, index, 0, used)

    def withdraw(self, portion: Portion) -> None:
        """Take back what `grow` did for a portion, before other pages are put in its place."""
        ps = self.page_size
        for growth in portion.growths:
            half = growth.row
            assert isinstance(half, Half)
            for index in _touched(growth, ps):
                here = half.row.pages[index] * ps
                start = max(growth.prefix - index * ps, 0)
                stop = min(growth.seq - index * ps, ps)
                self.mapping[here + start : here + stop] = [0] * (stop - start)

    def adopt(self, portion: Portion, chosen: list[int]) -> None:
        """Put the chosen pages in the place of the predicted ones; `withdraw` came before."""
        self.pool.adopt(portion.taken, chosen)
        portion.taken = chosen
        self.put(portion)

    def put(self, portion: Portion) -> None:
        """Grow everything in the portion with its taken pages, and fill in the peers."""
        at = 0
        portion.peers = []
        for growth, head in zip(portion.growths, portion.heads, strict=True):
            new = -(-growth.seq // self.page_size) - growth.first_new
            portion.peers += [0] * head + self.grow(growth, portion.taken[at : at + new])
            at += new


def _touched(growth: Growth, page_size: int) -> range:
    """Indices of the row's pages that hold its new slots."""
    if growth.seq <= growth.prefix:
        return range(0)
    return range(growth.prefix // page_size, -(-growth.seq // page_size))
