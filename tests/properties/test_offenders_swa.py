"""Offenders of the sliding-window kinds. Each breaks one rule, and is called by it.

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
from tests.properties.paired_pools import SwaPools

SWA = Config("swa", 32, 4, swa_size=32)  # 8 pages on either side
SHORT = Config("swa", 32, 4, swa_size=4)  # 8 full pages, 1 swa page
TIGHT = Config("swa", 12, 4, swa_size=12)


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
    # By then A's slots lead to what was B's page.
    Offence(
        ResolvesAtEnd,
        SWA,
        (B, ops.GroupBegin(), ops.FreeSwa(0), ops.Remap(0, 1), ops.GroupEnd()),
        ("P11", "owned-page-in-free-list (swa)"),
        also=("P10",),
        budget=12_000,
    ),
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


OFFENCES = SWA_OFFENCES + VARIANT_OFFENCES
EACH = pytest.mark.parametrize("offence", OFFENCES, ids=str)


@EACH
def test_the_guilty_call_is_named_by_what_it_broke(offence):
    assert_named(offence)


@EACH
def test_it_is_found_from_zero_and_never_called_anything_else(offence):
    assert_found_from_zero(offence)
