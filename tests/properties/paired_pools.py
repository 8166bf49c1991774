"""Lawful allocators of two sides and more, in plain Python: sliding window, and devices under logical pages.

Each side is a `PagePool`; a `Link` leads from the main one's slots to a side's. Free in which page is taken
on each side, when staged pages are merged, when a group clears the entries of pages it holds, and which of a
row's device pages a buffer keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvproof.impl.targets.protocol import Answer, Lists, State
from kvproof.model import calls
from kvproof.model.config import Config
from tests.properties.page_pool import PagePool, Pick, Style


class Link:
    """A side and the mapping that leads to it. each: the main side's slots for one of its own."""

    def __init__(self, pool: PagePool, entries: int, each: int = 1) -> None:
        self.pool = pool
        self.each = each
        self.mapping = [0] * entries + [-1]
        self.late: list[int] = []

    def lens(self, lengths: list[int]) -> list[int]:
        return [length // self.each for length in lengths]

    def extend(self, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int]) -> list[int]:
        # The last complete block's, which starts three slots earlier than it ends.
        lasts = [self.mapping[(last - self.each + 1) // self.each] if last >= 0 else -1 for last in last_locs]
        peers = self.pool.extend(self.lens(prefix_lens), self.lens(seq_lens), lasts)
        assert peers is not None, "it was asked before whether there is room"
        return peers

    def entries(self, slots: Iterable[int]) -> list[int]:
        """Which entries speak of these slots: a block's last slot does."""
        return [slot // self.each for slot in slots if (slot + 1) % self.each == 0]

    def map(self, slots: list[int], peers: list[int]) -> None:
        for entry, peer in zip(self.entries(slots), peers, strict=True):
            self.mapping[entry] = peer

    def detach(self, pages: list[int], *, late: bool) -> list[int]:
        """Clear all entries of these main pages; the side's pages they led to, each once. late: later."""
        ps = self.pool.config.page_size
        entries = [entry for page in pages for entry in range(page * ps, page * ps + ps)]
        peers = self.pool.touched(self.mapping[entry] for entry in entries if self.mapping[entry])
        self.late += entries
        if not late:
            self.clear_late()
        return peers

    def clear_late(self) -> None:
        for entry in self.late:
            self.mapping[entry] = 0
        self.late = []


class LinkedPools(PagePool):
    """The main side, itself a pool, and links to others by name. Calls take from all of them or from none."""

    def clear(self) -> None:
        super().clear()
        self.links = self.link()

    def link(self) -> dict[str, Link]:
        raise NotImplementedError

    def side(self, size: int, page_size: int) -> PagePool:
        config = Config("paged", size, page_size, need_sort=self.config.need_sort)
        return PagePool(config, replace(self.style, pick=self.style.side_pick))

    def available(self) -> int:
        sides = (link.pool.available() * link.each for link in self.links.values())
        return min(super().available(), *sides)

    def apply(self, call: calls.Call) -> Answer:
        answer = super().apply(call)
        if answer.slots is not None and not isinstance(call, calls.BufferCall):
            slots = answer.slots
            answer.peers = {
                name: [link.mapping[entry] for entry in link.entries(slots)]
                for name, link in self.links.items()
            }
        return answer

    def observe(self) -> State:
        links = self.links
        return replace(
            super().observe(),
            sides={name: Lists(list(link.pool.free), list(link.pool.staged)) for name, link in links.items()},
            mappings={name: list(link.mapping) for name, link in links.items()},
        )

    def grow(
        self, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int], *names: str
    ) -> list[int] | None:
        """Extend the main side, and these links with it."""
        links = [self.links[name] for name in names]
        if not self.fits(prefix_lens, seq_lens, links):
            return None
        slots = super().extend(prefix_lens, seq_lens, last_locs)
        if slots is not None:
            for link in links:
                link.map(slots, link.extend(prefix_lens, seq_lens, last_locs))
        return slots

    def fits(self, prefix_lens: list[int], seq_lens: list[int], links: list[Link]) -> bool:
        sides = (sum(link.pool.needs(link.lens(prefix_lens), link.lens(seq_lens))) for link in links)
        rooms = (link.pool.count() for link in links)
        return sum(self.needs(prefix_lens, seq_lens)) <= self.count() and all(map(int.__le__, sides, rooms))

    def drop(self, slots: list[int]) -> None:
        """`free`, of the pages touched, on every side."""
        pages = self.touched(slots)
        for link in self.links.values():
            link.pool.release(link.detach(pages, late=self.style.late and self.held is not None))
        self.release(pages)

    def drop_side(self, name: str, slots: list[int]) -> None:
        """The same on one side alone, where the row lives on."""
        link = self.links[name]
        link.pool.release(link.detach(self.touched(slots), late=False))

    def free_segment(self, slots: list[int]) -> None:
        self.drop(slots)

    def begin(self) -> None:
        super().begin()
        for link in self.links.values():
            link.pool.begin()

    def end(self) -> None:
        super().end()
        for link in self.links.values():
            link.clear_late()
            link.pool.end()


class SwaPools(LinkedPools):
    """swa: a full and a sliding-window side."""

    takers: tuple[str, ...] = ("swa",)
    """Whom an extend takes from."""

    def link(self) -> dict[str, Link]:
        config, ps = self.config, self.config.page_size
        return {"swa": Link(self.side(config.swa_size, ps), config.size + ps)}

    def observe(self) -> State:
        return replace(
            super().observe(),
            sizes={"full": PagePool.available(self), "swa": self.links["swa"].pool.available()},
        )

    def call(self, call: calls.Call) -> list[int] | None:
        match call:
            case calls.ExtendCall(prefix_lens, seq_lens, last_locs, tail=tail):
                if tail is not None:
                    return self.extend_tail(prefix_lens, seq_lens, last_locs, tail)
                names = ("swa",) if call.logical else self.takers
                return self.grow(prefix_lens, seq_lens, last_locs, *names)
            case calls.FreeCall(slots, "free"):
                self.drop(slots)
            case calls.FreeCall(slots, "free_swa") | calls.FreeSegmentCall(slots, _, "free_swa_segment"):
                self.drop_side("swa", slots)
            case calls.FreeCall(slots, "free_full") | calls.FreeSegmentCall(slots, _, "free_full_segment"):
                self.release(self.touched(slots))
            case calls.RemapCall(full, swa, cleared):
                self.remap(full, swa, cleared)
            case calls.ResizeCall(size, side_size):
                self.config = replace(self.config, size=size, swa_size=side_size)
                self.clear()
            case _:
                return super().call(call)
        return None

    def extend(self, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int]) -> list[int] | None:
        """alloc (pages of one slot) and decode."""
        return self.grow(prefix_lens, seq_lens, last_locs, "swa")

    def extend_tail(
        self, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int], tail: int
    ) -> list[int] | None:
        swa = self.links["swa"]
        if sum(swa.pool.needs([0], [tail])) > swa.pool.count():
            return None
        slots = self.grow(prefix_lens, seq_lens, last_locs)
        if slots is not None and tail:
            swa.map(slots[-tail:], swa.extend([0], [tail], [-1]))
        return slots

    def remap(self, full: list[int], swa: list[int], cleared: list[int]) -> None:
        mapping = self.links["swa"].mapping
        for slot, peer in zip(full, swa, strict=True):
            mapping[slot] = peer
        for slot in cleared:
            mapping[slot] = 0


class DevicePools(LinkedPools):
    """What kinds with a device side share."""

    def call(self, call: calls.Call) -> list[int] | None:
        match call:
            case calls.BufferCall(slots, need):
                return self.buffer(slots, need)
            case calls.FreeCall(slots, "free_hisparse"):
                self.drop_side("device", slots)
            case calls.FreeCall(slots, "free_hisparse_indices"):
                device = self.links["device"].pool
                device.release(device.touched(slots))
            case _:
                return super().call(call)
        return None

    def buffer(self, slots: list[int], need: int) -> list[int] | None:
        """slots: of the mapping's own kind, compressed where it is."""
        link = self.links["device"]
        ps = link.pool.config.page_size
        own = link.pool.touched(link.mapping[entry] for entry in slots if link.mapping[entry])
        pages = need // ps
        extra = link.pool.alloc(max(pages - len(own), 0) * ps)
        if extra is None:
            return None
        for entry in slots:
            link.mapping[entry] = 0
        surplus = max(len(own) - pages, 0)
        kept, spare = own[: len(own) - surplus], own[len(own) - surplus :]
        if self.style.backwards:
            kept, spare = own[surplus:], own[:surplus]
        link.pool.release(spare)
        buffer = [page * ps + offset for page in kept for offset in range(ps)] + extra
        return buffer[::-1] if self.style.backwards else buffer


class HisparsePools(DevicePools):
    """hisparse: logical pages for every token, device pages for those of prefill. Groups hold nothing."""

    def __init__(self, config: Config, style: Style | Pick) -> None:
        super().__init__(config, style, pages=range(1, config.size * config.ratio // config.page_size + 1))

    def link(self) -> dict[str, Link]:
        config, ps = self.config, self.config.page_size
        return {"device": Link(self.side(config.size, ps), config.size * config.ratio + ps)}

    def call(self, call: calls.Call) -> list[int] | None:
        match call:
            case calls.AllocCall(need):
                return self.grow([0], [need], [-1], "device")
            case calls.ExtendCall(prefix_lens, seq_lens, last_locs, logical=logical):
                names = () if logical else ("device",)
                return self.grow(prefix_lens, seq_lens, last_locs, *names)
            case calls.FreeCall(slots, "free" | "free_full"):
                self.drop(slots)
            case _:
                return super().call(call)
        return None

    def begin(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class CompressedPools(DevicePools, SwaPools):
    """hisparse-v4: a sliding-window allocator, and a device slot for each block of four tokens."""

    takers = ("swa", "device")

    def link(self) -> dict[str, Link]:
        config, ps = self.config, self.config.page_size // 4
        device = Link(self.side(config.device_size, ps), config.size // 4 + ps, 4)
        return super().link() | {"device": device}

    def begin(self) -> None:
        """A group holds all frees, or those of pages and not of the device's."""
        super().begin()
        if not self.style.late:
            self.links["device"].pool.held = None
