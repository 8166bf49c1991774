"""Offenders of the kinds with a device side. Each breaks one rule, and is called by it.

Page k holds slots 4k … 4k+3 at HiSparse, 8k … 8k+7 at its DeepSeek-V4 variant, whose device page is two
slots. All sides hand out their first free page.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproof.model import calls, ops
from kvproof.model.config import Config
from tests.model.strategies import new
from tests.properties.offence import STANDING, Offence, assert_found_from_zero, assert_named
from tests.properties.page_pool import PagePool, Style, front
from tests.properties.paired_pools import CompressedPools, HisparsePools, Link

HISPARSE = Config("hisparse", 16, 4, ratio=2)  # 8 logical pages, 4 device pages
V4 = Config("hisparse-v4", 64, 8, swa_size=64, device_size=16)  # 8 pages everywhere; 2 device slots a page
V4_SHORT = Config("hisparse-v4", 64, 8, swa_size=64, device_size=2)
A, B = new(4), new(4, 4)


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
        (new(8), ops.GroupBegin(), ops.FreeDevice(0), ops.GroupEnd()),
        ("P11", "leaked-page (device)"),
        also=("P1",),  # a buffer may be made of what the group holds
    ),
    Offence(DeviceSizeInSlots, V4, (ops.Clear(),), ("P2", "swa-size"), also=STANDING),
]


OFFENCES = DEVICE_OFFENCES + V4_OFFENCES
EACH = pytest.mark.parametrize("offence", OFFENCES, ids=str)


@EACH
def test_the_guilty_call_is_named_by_what_it_broke(offence):
    assert_named(offence)


@EACH
def test_it_is_found_from_zero_and_never_called_anything_else(offence):
    assert_found_from_zero(offence)
