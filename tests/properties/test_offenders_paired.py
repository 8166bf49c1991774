"""Offenders with two sides and more: sliding window, and devices. Each breaks one rule, and is called by it.

Page k holds slots 4k … 4k+3 in these traces; both sides hand out their first free page.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproof.model import calls, ops
from kvproof.model.config import Config
from tests.model.strategies import new
from tests.properties.offence import STANDING, Offence, assert_found_from_zero, assert_named
from tests.properties.page_pool import PagePool, PurePool, RingPool, Style, back, front
from tests.properties.paired_pools import CompressedPools, HisparsePools, Link, SwaPools

SWA = Config("swa", 32, 4, swa_size=32)  # 8 pages on either side
SHORT = Config("swa", 32, 4, swa_size=4)  # 8 full pages, 1 swa page
TIGHT = Config("swa", 12, 4, swa_size=12)
HISPARSE = Config("hisparse", 16, 4, ratio=2)  # 8 logical pages, 4 device pages
V4 = Config("hisparse-v4", 64, 8, swa_size=64, device_size=16)  # 8 pages everywhere; 2 device slots a page
V4_SHORT = Config("hisparse-v4", 64, 8, swa_size=64, device_size=2)


# --- sliding window -------------------------------------------------------------------------------


class ClearsOneSlot(SwaPools):
    """free_swa releases the pages touched, and clears the entries of the slots given."""

    def drop_side(self, name, slots):
        link = self.links[name]
        pages = self.touched(slots)
        ps = self.config.page_size
        peers = link.pool.touched(
            link.mapping[slot]
            for page in pages
            for slot in range(page * ps, page * ps + ps)
            if link.mapping[slot]
        )
        for slot in slots:
            link.mapping[slot] = 0
        link.pool.release(peers)


class ClearsNothing(SwaPools):
    """free leaves the entries for whoever gets the slots next."""

    def drop(self, slots):
        before = list(self.links["swa"].mapping)
        super().drop(slots)
        self.links["swa"].mapping = before


class StaleHead(SwaPools):
    """The head of a tail-only extend gets its entries of an earlier life back."""

    def clear(self):
        super().clear()
        self.past = {}

    def drop(self, slots):
        mapping = self.links["swa"].mapping
        self.past.update((slot, mapping[slot]) for slot in slots if mapping[slot])
        super().drop(slots)

    def extend_tail(self, prefix_lens, seq_lens, last_locs, tail):
        slots = super().extend_tail(prefix_lens, seq_lens, last_locs, tail)
        for slot in (slots or [])[: len(slots or []) - tail]:
            self.links["swa"].mapping[slot] = self.past.get(slot, 0)
        return slots


class TailTakesAll(SwaPools):
    """Every slot of a tail-only extend gets a peer."""

    def extend_tail(self, prefix_lens, seq_lens, last_locs, tail):
        swa = self.links["swa"]
        if sum(swa.pool.needs(prefix_lens, seq_lens)) > swa.pool.count():
            return super().extend_tail(prefix_lens, seq_lens, last_locs, tail)
        return self.grow(prefix_lens, seq_lens, last_locs, "swa")


class ResolvesAtEnd(SwaPools):
    """In a group, whose peers they are is looked up when it ends."""

    def begin(self):
        super().begin()
        self.waiting = []

    def drop_side(self, name, slots):
        if self.held is None:
            super().drop_side(name, slots)
        else:
            self.waiting.append(slots)

    def end(self):
        for slots in self.waiting if self.held is not None else []:
            super().drop_side("swa", slots)
        super().end()


class ClearsFirstAndReadsAtEnd(ResolvesAtEnd):
    """The entries are cleared at once, and looked up when the group ends."""

    def drop_side(self, name, slots):
        super().drop_side(name, slots)
        for slot in slots if self.held is not None else []:
            for entry in range(slot // self.config.page_size * self.config.page_size, slot + 1):
                self.links["swa"].mapping[entry] = 0
            self.links["swa"].detach(self.touched([slot]), late=False)


class ClearsAgainAtEnd(SwaPools):
    """When a group ends, the entries of all that was freed in it are cleared: those of a remap as well."""

    def begin(self):
        super().begin()
        self.freed = []

    def drop_side(self, name, slots):
        super().drop_side(name, slots)
        if self.held is not None:
            self.freed += slots

    def end(self):
        for slot in self.freed if self.held is not None else []:
            self.links["swa"].mapping[slot] = 0
        super().end()


class KeepsFullSide(SwaPools):
    """An extend takes its full pages, and then sees that the other side is short."""

    def call(self, call):
        if isinstance(call, calls.ExtendCall) and call.tail is None:
            links = [self.links[name] for name in self.takers]
            if not self.fits(call.prefix_lens, call.seq_lens, links):
                PagePool.extend(self, call.prefix_lens, call.seq_lens, call.last_locs)
        return super().call(call)


class KeepsSwaSide(SwaPools):
    """The other way round."""

    def call(self, call):
        slots = super().call(call)
        if isinstance(call, calls.ExtendCall) and slots is None:
            self.links["swa"].pool.extend(call.prefix_lens, call.seq_lens, [0] * len(call.seq_lens))
        return slots


class DecodeLeaksFull(SwaPools):
    """A decode step that the other side is too short for keeps its full pages."""

    def decode(self, seq_lens, last_locs):
        slots = super().decode(seq_lens, last_locs)
        if slots is None:
            PagePool.extend(self, [seq - 1 for seq in seq_lens], seq_lens, last_locs)
        return slots


class ReleasesPageZero(SwaPools):
    """Slots without a peer release page 0."""

    def drop_side(self, name, slots):
        link = self.links[name]
        unmapped = [slot for slot in slots if not link.mapping[slot]]
        super().drop_side(name, slots)
        link.pool.release([0] if unmapped and self.config.page_size > 1 else [])


class SwaPageForEachSlot(SwaPools):
    """free_swa releases the page of each slot."""

    def drop_side(self, name, slots):
        link = self.links[name]
        pages = [link.mapping[slot] // self.config.page_size for slot in slots if link.mapping[slot]]
        super().drop_side(name, slots)
        link.pool.release([page for at, page in enumerate(pages) if page in pages[:at]])


class SharesPeers(SwaPools):
    """New rows of a batch are all mapped to the first one's page, where each needs one."""

    def apply(self, call):
        answer = super().apply(call)
        if not isinstance(call, calls.ExtendCall) or not answer.peers.get("swa") or len(call.seq_lens) < 2:
            return answer
        if not any(call.prefix_lens) and max(call.seq_lens) <= self.config.page_size:
            first = min(answer.peers["swa"])
            answer.peers = {"swa": [first + at for seq in call.seq_lens for at in range(seq)]}
        return answer


class MapsNothing(SwaPools):
    """An extend forgets the mapping."""

    def apply(self, call):
        answer = super().apply(call)
        if isinstance(call, calls.ExtendCall) and answer.slots:
            for slot in answer.slots:
                self.links["swa"].mapping[slot] = 0
            answer.peers = {"swa": [0] * len(answer.slots)}
        return answer


class DecodesBehindFull(SwaPools):
    """A decode step takes the full last_loc for that of the other side."""

    def __init__(self, config, _style):
        super().__init__(config, Style(front, back))

    def decode(self, seq_lens, last_locs):
        prefixes = [seq - 1 for seq in seq_lens]
        swa = self.links["swa"]
        if not self.fits(prefixes, seq_lens, [swa]):
            return None
        slots = PagePool.extend(self, prefixes, seq_lens, last_locs)
        peers = swa.pool.extend(prefixes, seq_lens, last_locs)
        swa.map(slots, peers)
        return slots


class RemapsNothing(SwaPools):
    def remap(self, full, swa, cleared):
        super().remap([], [], cleared)


class RemapClearsNothing(SwaPools):
    def remap(self, full, swa, cleared):
        super().remap(full, swa, [])


class NoEnd(SwaPools):
    """The mapping's last entry is like any other."""

    def clear(self):
        super().clear()
        self.links["swa"].mapping[-1] = 0


class OldMapping(SwaPools):
    """resize keeps the mapping as long as it was."""

    def call(self, call):
        before = len(self.links["swa"].mapping)
        slots = super().call(call)
        if isinstance(call, calls.ResizeCall):
            mapping = [0] * (before - 1) + [-1]
            self.links["swa"].mapping = mapping
        return slots


class SizesSwapped(SwaPools):
    """full_available_size and swa_available_size say the other's."""

    def observe(self):
        state = super().observe()
        sizes = state.sizes
        return replace(state, sizes={"full": sizes["swa"], "swa": sizes["full"]})


class AvailableOfFull(SwaPools):
    """available_size is that of the full side."""

    def available(self):
        return PagePool.available(self)


class FullTakesPeers(SwaPools):
    """free_full releases the peers, which are gone, once more: those of the slots' own numbers."""

    def call(self, call):
        if isinstance(call, calls.FreeCall) and call.method == "free_full":
            swa = self.links["swa"].pool
            swa.release([page for page in self.touched(call.slots) if page in swa.free + swa.staged])
        return super().call(call)


class LosesSegmentPeers(SwaPools):
    """free_segment clears the entries and forgets the pages."""

    def free_segment(self, slots):
        self.links["swa"].detach(self.touched(slots), late=False)
        super().free_segment(slots)


A, B = new(4), new(4, 4)
SWA_OFFENCES = [
    Offence(ClearsOneSlot, SWA, (new(8), ops.FreeSwa(0, 0, 1)), ("P10", "stale-entry (swa)")),
    Offence(
        ClearsNothing,
        SWA,
        (A, ops.Free((0,))),
        ("P10", "stale-entry-of-free-page (swa)"),
        also=("P1",),
    ),
    # 3 pages; the third extend takes page 3 and then 1, 2 again.
    Offence(
        StaleHead, TIGHT, (new(8), ops.Free((0,)), ops.ExtendTail(-1, 12, 4)), ("P10", "stale-entry (swa)")
    ),
    Offence(TailTakesAll, SWA, (ops.ExtendTail(-1, 8, 4),), ("P10", "stale-entry (swa)")),
    Offence(ResolvesAtEnd, SWA, (A, ops.GroupBegin(), ops.FreeSwa(0)), ("P10", "stale-entry (swa)")),
    Offence(
        ClearsFirstAndReadsAtEnd,
        SWA,
        (A, ops.GroupBegin(), ops.FreeSwa(0), ops.GroupEnd()),
        ("P11", "leaked-page (swa)"),
    ),
    Offence(
        ClearsAgainAtEnd,
        SWA,
        (B, ops.GroupBegin(), ops.FreeSwa(0), ops.Remap(0, 1), ops.GroupEnd()),
        ("P10", "live-slot-unmapped (swa)"),
        budget=30_000,  # a row takes over others' peers a few times in these
    ),
    Offence(KeepsFullSide, SHORT, (new(8),), ("P6", "refusal-changed-state: leaked-page")),
    Offence(
        KeepsSwaSide,
        Config("swa", 8, 4, swa_size=32),
        (new(12),),
        ("P6", "refusal-changed-state: leaked-page (swa)"),
    ),
    Offence(DecodeLeaksFull, SHORT, (A, ops.Decode((0,))), ("P6", "refusal-changed-state: leaked-page")),
    Offence(
        ReleasesPageZero,
        SWA,
        (new(8), ops.FreeSwa(0, 0, 4), ops.FreeSwa(0)),
        ("P3", "padding-page-in-free-list (swa)"),
    ),
    Offence(
        ReleasesPageZero,
        SWA,
        (A, ops.FreeSwa(0), ops.Misuse("free-swa-of-unmapped")),
        ("P3", "misuse-corrupts free-swa-of-unmapped"),
    ),
    Offence(SwaPageForEachSlot, SWA, (A, ops.FreeSwa(0)), ("P1", "duplicate-in-free-list (swa)")),
    Offence(SharesPeers, SWA, (B,), ("P1", "page-handed-out-twice (swa)")),
    Offence(MapsNothing, SWA, (A,), ("P10", "live-slot-unmapped (swa)")),
    Offence(DecodesBehindFull, SWA, (new(1), ops.Decode((0,))), ("P5", "not-last-loc-plus-one (swa)")),
    Offence(RemapsNothing, SWA, (B, ops.FreeSwa(0), ops.Remap(0, 1)), ("P10", "live-slot-unmapped (swa)")),
    Offence(RemapClearsNothing, SWA, (B, ops.FreeSwa(0), ops.Remap(0, 1)), ("P10", "stale-entry (swa)")),
    Offence(NoEnd, SWA, (A,), ("P10", "mapping-end (swa)"), also=STANDING),
    Offence(OldMapping, SWA, (ops.Resize(9),), ("P9", "mapping-size (swa)"), budget=12_000),
    Offence(SizesSwapped, SHORT, (ops.Clear(),), ("P2", "full-size"), also=STANDING),
    Offence(AvailableOfFull, SHORT, (ops.Clear(),), ("P2", "available-excess"), also=STANDING),
    Offence(
        FullTakesPeers,
        SWA,
        (B, ops.FreeSwa(0), ops.FreeFull(0)),
        ("P1", "duplicate-in-free-list (swa)"),
    ),
    Offence(LosesSegmentPeers, SWA, (A, ops.FreeSegment(0)), ("P2", "available-deficit")),
]


# --- one ring, one pool ---------------------------------------------------------------------------

RING = Config("swa-ring", 32, 4, ring=5, request_rows=3)
PURE = Config("pure-swa", 8, 1)


class RingMaps(RingPool):
    """What is handed out is mapped, to itself."""

    def apply(self, call):
        answer = super().apply(call)
        answer.peers = {"swa": list(answer.slots or [])}
        return answer


class RingFreesSwa(RingPool):
    """free_swa releases the full side."""

    def call(self, call):
        return super().call(replace(call, method="free") if isinstance(call, calls.FreeCall) else call)


class RingOfTokens(RingPool):
    """The window's size is not rounded up to pages."""

    def observe(self):
        state = super().observe()
        return replace(state, sizes=state.sizes | {"swa": self.config.ring * self.config.request_rows})


class PureFreesTwice(PurePool):
    """free_segment releases on both sides of the one pool."""

    def free_segment(self, slots):
        super().free_segment(slots)
        super().free_segment(slots)


class PureFreesFull(PurePool):
    """free_full releases what lives on."""

    def call(self, call):
        return super().call(replace(call, method="free") if isinstance(call, calls.FreeCall) else call)


class PureHalves(PurePool):
    """The one pool is counted half for each side."""

    def observe(self):
        state = super().observe()
        return replace(state, sizes=state.sizes | {"swa": self.available() // 2})


VARIANT_OFFENCES = [
    Offence(RingFreesSwa, RING, (A, ops.FreeSwa(0)), ("P1", "owned-page-in-free-list")),
    Offence(RingOfTokens, RING, (ops.Clear(),), ("P2", "swa-size"), also=STANDING),
    Offence(PureFreesTwice, PURE, (A, ops.FreeSegment(0)), ("P1", "duplicate-in-free-list")),
    Offence(PureFreesFull, PURE, (A, ops.FreeFull(0)), ("P1", "owned-page-in-free-list")),
    Offence(PureHalves, PURE, (ops.Clear(),), ("P2", "swa-size"), also=STANDING),
]


# --- devices --------------------------------------------------------------------------------------


class LeavesDeviceMapped(HisparsePools):
    """free releases the device pages and leaves the entries."""

    def drop(self, slots):
        before = list(self.links["device"].mapping)
        super().drop(slots)
        self.links["device"].mapping = before


class LosesDevicePages(HisparsePools):
    """free clears the entries and forgets the device pages."""

    def drop(self, slots):
        self.links["device"].detach(self.touched(slots), late=False)
        super().drop(slots)


class DevicePageForEachSlot(HisparsePools):
    """free_hisparse releases the device page of each slot."""

    def drop_side(self, name, slots):
        link = self.links[name]
        pages = [link.mapping[slot] // self.config.page_size for slot in slots if link.mapping[slot]]
        super().drop_side(name, slots)
        link.pool.release([page for at, page in enumerate(pages) if page in pages[:at]])


class ReleasesDevicePageZero(HisparsePools):
    """Decoded tokens, which have no device slot, release page 0."""

    def drop(self, slots):
        unmapped = [slot for slot in slots if not self.links["device"].mapping[slot]]
        super().drop(slots)
        self.links["device"].pool.release([0] if unmapped else [])


class DropsLogical(HisparsePools):
    """free_hisparse is free."""

    def drop_side(self, name, slots):
        self.drop(slots)


class DecodeMaps(HisparsePools):
    """A decode step takes a device page as well."""

    def decode(self, seq_lens, last_locs):
        slots = super().decode(seq_lens, last_locs)
        device = self.links["device"]
        for slot in slots or []:
            if slot % self.config.page_size == 0 and device.pool.free:
                device.mapping[slot] = device.pool.pick(device.pool.free) * self.config.page_size
        return slots


class HoldsFrees(HisparsePools):
    """A group holds frees."""

    def begin(self):
        PagePool.begin(self)

    def end(self):
        PagePool.end(self)


class KeepsLogicalSide(HisparsePools):
    """An extend that the device is too short for keeps its logical pages."""

    def grow(self, prefix_lens, seq_lens, last_locs, *names):
        slots = super().grow(prefix_lens, seq_lens, last_locs, *names)
        if slots is None and names:
            PagePool.extend(self, prefix_lens, seq_lens, last_locs)
        return slots


class BufferRepeats(HisparsePools):
    """The second page of a buffer is its first again."""

    def buffer(self, slots, need):
        buffer = super().buffer(slots, need)
        ps = self.config.page_size
        return buffer if buffer is None else buffer[:ps] * min(len(buffer) // ps, 2) + buffer[2 * ps :]


class BufferTakesOthers(HisparsePools):
    """A buffer's first page is the first page of all."""

    def buffer(self, slots, need):
        buffer = super().buffer(slots, need)
        first = self.config.page_size
        return buffer if not buffer or first in buffer else [*range(first, 2 * first), *buffer[first:]]


class BufferOfPadding(HisparsePools):
    """Slots without a device page give page 0 to the buffer."""

    def buffer(self, slots, need):
        unmapped = not any(self.links["device"].mapping[slot] for slot in slots)
        buffer = super().buffer(slots, need)
        ps = self.config.page_size
        return [*range(ps), *buffer[ps:]] if buffer and unmapped else buffer


class BufferOfParts(HisparsePools):
    """Each slot of a buffer is one page's first, as far as there are pages."""

    def buffer(self, slots, need):
        device, ps = self.links["device"].pool, self.config.page_size
        buffer = super().buffer(slots, need)
        if not buffer or ps == 1 or not device.free:
            return buffer
        return [*buffer[:-1], device.free[0] * ps]


class BufferKeepsEntries(HisparsePools):
    """The buffer's slots stay the row's."""

    def buffer(self, slots, need):
        before = list(self.links["device"].mapping)
        buffer = super().buffer(slots, need)
        self.links["device"].mapping = before
        return buffer


class RefusedBufferDetaches(HisparsePools):
    """A buffer that is refused has cleared the entries before."""

    def buffer(self, slots, need):
        buffer = super().buffer(slots, need)
        for slot in slots if buffer is None else []:
            self.links["device"].mapping[slot] = 0
        return buffer


class SurplusLost(HisparsePools):
    """What a buffer leaves over is nobody's."""

    def buffer(self, slots, need):
        device = self.links["device"].pool
        before = list(device.free), list(device.staged)
        buffer = super().buffer(slots, need)
        if buffer is not None:
            device.free = [page for page in device.free if page in before[0]]
            device.staged = [page for page in device.staged if page in before[1]]
        return buffer


class BufferFreedTwice(HisparsePools):
    """free_hisparse_indices releases the page of each slot."""

    def call(self, call):
        slots = super().call(call)
        if isinstance(call, calls.FreeCall) and call.method == "free_hisparse_indices":
            self.links["device"].pool.release([slot // self.config.page_size for slot in call.slots[1:2]])
        return slots


DEVICE_OFFENCES = [
    Offence(
        LeavesDeviceMapped,
        HISPARSE,
        (A, ops.Free((0,))),
        ("P10", "stale-entry-of-free-page (device)"),
        also=("P1",),
    ),
    # 3 of 4 device pages: the device is what is scarce.
    Offence(LosesDevicePages, HISPARSE, (A, ops.Free((0,))), ("P2", "available-deficit")),
    Offence(
        DevicePageForEachSlot, HISPARSE, (A, ops.FreeDevice(0)), ("P1", "duplicate-in-free-list (device)")
    ),
    Offence(
        ReleasesDevicePageZero,
        HISPARSE,
        (A, ops.Decode((0,)), ops.Free((0,))),
        ("P3", "padding-page-in-free-list (device)"),
    ),
    Offence(DropsLogical, HISPARSE, (A, ops.FreeDevice(0)), ("P1", "owned-page-in-free-list")),
    Offence(DecodeMaps, HISPARSE, (A, ops.Decode((0,))), ("P10", "stale-entry (device)")),
    Offence(HoldsFrees, HISPARSE, (A, ops.GroupBegin(), ops.Free((0,))), ("P2", "leaked-page")),
    Offence(KeepsLogicalSide, HISPARSE, (new(20),), ("P6", "refusal-changed-state: available-deficit")),
    Offence(BufferRepeats, HISPARSE, (new(8), ops.DeviceBuffer(0, 2)), ("P1", "buffer-slot-twice")),
    Offence(BufferTakesOthers, HISPARSE, (B, ops.DeviceBuffer(1, 1)), ("P1", "owned-page-in-buffer")),
    Offence(
        BufferOfPadding,
        HISPARSE,
        (ops.ExtendLogical(((-1, 4),)), ops.DeviceBuffer(0, 1)),
        ("P3", "padding-page-in-buffer"),
    ),
    Offence(BufferOfParts, HISPARSE, (A, ops.DeviceBuffer(0, 1)), ("P4", "part-of-page-in-buffer")),
    Offence(BufferKeepsEntries, HISPARSE, (A, ops.DeviceBuffer(0, 1)), ("P10", "stale-entry (device)")),
    Offence(
        RefusedBufferDetaches,
        HISPARSE,
        (A, ops.DeviceBuffer(0, 5)),
        ("P6", "refusal-changed-state: live-slot-unmapped (device)"),
    ),
    Offence(SurplusLost, HISPARSE, (new(8), ops.DeviceBuffer(0, 1)), ("P2", "available-deficit")),
    Offence(
        BufferFreedTwice,
        HISPARSE,
        (A, ops.DeviceBuffer(0, 1), ops.FreeBuffer()),
        ("P1", "duplicate-in-free-list (device)"),
    ),
]


# --- compressed devices ---------------------------------------------------------------------------


class LastBlockOpen(CompressedPools):
    """The last_loc's own block counts, complete or not."""

    def link(self):
        links = super().link()
        device = links["device"]
        links["device"] = _OpenBlock(device.pool, len(device.mapping) - 1, 4)
        return links


class _OpenBlock(Link):
    def extend(self, prefix_lens, seq_lens, last_locs):
        return super().extend(prefix_lens, seq_lens, [last + 3 if last >= 0 else -1 for last in last_locs])


class MapsTokens(CompressedPools):
    """Entries are looked up by token where they are cleared."""

    def drop_side(self, name, slots):
        link = self.links[name]
        if name == "device":
            link.pool.release(
                link.pool.touched(link.mapping[e] for e in link.entries(slots) if link.mapping[e])
            )
            for slot in slots:
                if slot < len(link.mapping) - 1 and (slot + 1) % 4 == 0:
                    link.mapping[slot] = 0
        else:
            super().drop_side(name, slots)


class DeviceNotCounted(CompressedPools):
    """available_size knows the sliding-window allocator alone."""

    def available(self):
        return min(PagePool.available(self), self.links["swa"].pool.available())


class KeepsTwoSides(CompressedPools):
    """An extend that the device is too short for keeps what the sliding-window allocator gave."""

    def call(self, call):
        slots = super().call(call)
        match call:
            case calls.ExtendCall(prefix_lens, seq_lens, last_locs, tail=None, logical=False) if (
                slots is None
            ):
                if self.fits(prefix_lens, seq_lens, [self.links["swa"]]):
                    self.grow(prefix_lens, seq_lens, last_locs, "swa")
        return slots


class DeviceGroupLost(CompressedPools):
    """A group's device pages are dropped when it ends."""

    def __init__(self, config, _style):
        super().__init__(config, Style(front, late=True))

    def end(self):
        if self.held is not None:
            self.links["device"].pool.held = []
        super().end()


class ForgetsInGroup(CompressedPools):
    """In a group, free_hisparse does nothing."""

    def drop_side(self, name, slots):
        if name != "device" or self.held is None:
            super().drop_side(name, slots)


class DeviceSizeInSlots(CompressedPools):
    """swa_available_size says what the device has."""

    def observe(self):
        state = super().observe()
        return replace(state, sizes=state.sizes | {"swa": self.links["device"].pool.available()})


V4_OFFENCES = [
    # 5 tokens are a block and one token; 9 are two blocks, in the row's one device page.
    Offence(LastBlockOpen, V4, (new(5), ops.Extend(((0, 4),))), ("P5", "not-last-loc-plus-one (device)")),
    Offence(MapsTokens, V4, (new(8), ops.FreeDevice(0)), ("P10", "stale-entry (device)")),
    Offence(DeviceNotCounted, V4_SHORT, (ops.Clear(),), ("P2", "available-excess"), also=STANDING),
    Offence(KeepsTwoSides, V4_SHORT, (new(16),), ("P6", "refusal-changed-state: leaked-page")),
    Offence(
        DeviceGroupLost,
        V4,
        (new(8), ops.GroupBegin(), ops.Free((0,)), ops.GroupEnd()),
        ("P11", "available-deficit"),
    ),
    Offence(
        ForgetsInGroup,
        V4,
        (new(8), ops.GroupBegin(), ops.FreeDevice(0)),
        ("P10", "stale-entry (device)"),
    ),
    Offence(DeviceSizeInSlots, V4, (ops.Clear(),), ("P2", "swa-size"), also=STANDING),
]

OFFENCES = SWA_OFFENCES + VARIANT_OFFENCES + DEVICE_OFFENCES + V4_OFFENCES
EACH = pytest.mark.parametrize("offence", OFFENCES, ids=str)


@EACH
def test_the_guilty_call_is_named_by_what_it_broke(offence):
    assert_named(offence)


@EACH
def test_it_is_found_from_zero_and_never_called_anything_else(offence):
    assert_found_from_zero(offence)
