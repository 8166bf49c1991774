"""Offenders with state slots and with sharded pages. Each breaks one rule, and is called by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproof.model import calls, ops
from kvproof.model.config import Config
from tests.model.strategies import new
from tests.properties.dealt_pools import ShardPools, StatePool
from tests.properties.offence import STANDING, Offence, assert_found_from_zero, assert_named

MAMBA = Config("mamba", 4, 1)
SHARDS = Config("page-interleave", 8, 4, shards=2)  # class 0: pages 2, 4; class 1: pages 3, 5
ONE_EACH = Config("page-interleave", 4, 4, shards=2)


# --- state slots ----------------------------------------------------------------------------------


class HandsOutDummy(StatePool):
    """Slots are numbered from 0."""

    def clear(self):
        super().clear()
        self.free = list(range(self.config.size))


class BeginLosesRest(StatePool):
    """A begin inside a group forgets what was set aside."""

    def set_aside(self, slots):
        self.aside = []
        super().set_aside(slots)


class BeginTakesWhatThereIs(StatePool):
    """Fewer slots are set aside where there are too few."""

    def set_aside(self, slots):
        self.put_back()
        super().set_aside(min(slots, len(self.free)))


class EndReturnsAll(StatePool):
    """The end of a group returns what was set aside, served or not."""

    def set_aside(self, slots):
        super().set_aside(slots)
        self.all = list(self.aside)

    def call(self, call):
        served = [slot for slot in self.all if slot not in self.aside] if self.aside else []
        slots = super().call(call)
        if isinstance(call, calls.AllocGroupEndCall):
            self.release(served)
        return slots

    def clear(self):
        super().clear()
        self.all = []


class ClearKeepsAside(StatePool):
    """What is set aside when all is cleared is free, and set aside still."""

    def call(self, call):
        aside = self.aside
        slots = super().call(call)
        if isinstance(call, calls.ClearCall):
            self.aside = aside
        return slots


class ServesTwice(StatePool):
    """A slot that is served from those set aside stays there."""

    def call(self, call):
        first = self.aside[:1]
        slots = super().call(call)
        if isinstance(call, calls.AllocCall) and slots == first and first:
            self.aside.insert(0, first[0])
        return slots


MAMBA_OFFENCES = [
    Offence(
        HandsOutDummy,
        MAMBA,
        (ops.Alloc(1),),
        ("P3", "padding-page-handed-out"),
        also=(*STANDING, "P1", "P2", "P9"),
    ),
    Offence(
        BeginLosesRest,
        MAMBA,
        (ops.AllocGroupBegin(2), ops.AllocGroupBegin(1)),
        ("P2", "available-deficit"),
        also=("P1",),
    ),
    Offence(BeginTakesWhatThereIs, MAMBA, (ops.AllocGroupBegin(5),), ("P2", "available-deficit")),
    Offence(
        EndReturnsAll,
        MAMBA,
        (ops.AllocGroupBegin(2), ops.Alloc(1), ops.AllocGroupEnd()),
        ("P1", "owned-page-in-free-list"),
    ),
    Offence(
        ClearKeepsAside,
        MAMBA,
        (ops.AllocGroupBegin(1), ops.Clear(), ops.Alloc(1)),
        ("P1", "owned-page-in-free-list"),
        also=("P2",),
        budget=20_000,
    ),
    Offence(
        ServesTwice,
        MAMBA,
        (ops.AllocGroupBegin(2), ops.Alloc(1), ops.Alloc(1)),
        ("P1", "owned-page-handed-out"),
    ),
]


# --- shards ---------------------------------------------------------------------------------------


class OneClassForAll(ShardPools):
    """A chain takes all of its pages from the class of its base, while there are any."""

    def deal(self, prefix_lens, seq_lens, given):
        bases, due = super().deal(prefix_lens, seq_lens, given)
        one = [row[:1] * len(row) for row in due]
        wanted = [sum(row.count(rank) for row in one) for rank in range(self.config.shards)]
        enough = all(want <= pool.count() for want, pool in zip(wanted, self.classes, strict=True))
        return bases, one if enough else due


class DrawsLast(ShardPools):
    """The highest of several classes with most pages is drawn."""

    def draw(self, left):
        return max(range(len(left)), key=lambda rank: (left[rank], rank))


class DrawsBeforeTheBatch(ShardPools):
    """What rows before it take is not counted when a row's base is drawn."""

    def draw(self, left):
        return super().draw([pool.count() for pool in self.classes])


class KeepsBases(ShardPools):
    """The bases drawn are not written back."""

    def apply(self, call):
        answer = super().apply(call)
        if isinstance(call, calls.ExtendCall) and call.bases is not None:
            answer.bases = list(call.bases)
        return answer


class RefusalDraws(ShardPools):
    """A refusal leaves the bases it has drawn."""

    def extend(self, prefix_lens, seq_lens, last_locs):
        given = list(self.bases or [])
        slots = super().extend(prefix_lens, seq_lens, last_locs)
        if slots is None:
            self.bases, _ = self.deal(prefix_lens, seq_lens, given)
        return slots


class RefusalTakes(ShardPools):
    """A refusal keeps a page of the class that had one."""

    def extend(self, prefix_lens, seq_lens, last_locs):
        slots = super().extend(prefix_lens, seq_lens, last_locs)
        if slots is None:
            next((pool.free for pool in self.classes if pool.free), [0]).pop()
        return slots


class CountsAll(ShardPools):
    """available_size is the sum over the classes."""

    def available(self):
        return self.config.page_size * sum(pool.count() for pool in self.classes)


class AggregateOfLeast(ShardPools):
    """aggregate_free_size is available_size."""

    def observe(self):
        return replace(super().observe(), sizes={"aggregate": self.available()})


class PaddingOfOne(ShardPools):
    """Page 0 alone is padding: classes begin below page N."""

    def clear(self):
        super().clear()
        for rank, pool in enumerate(self.classes):
            pool.free = [rank or self.config.shards, *pool.free[1:]]


class FreesToFirst(ShardPools):
    """Every page returns to class 0."""

    def release(self, pages):
        self.classes[0].release(pages)


class LosesOtherClasses(ShardPools):
    """Only the first page's class gets anything back."""

    def release(self, pages):
        super().release(
            [page for page in pages if page % self.config.shards == pages[0] % self.config.shards]
        )


SHARD_OFFENCES = [
    Offence(OneClassForAll, SHARDS, (new(8),), ("P4", "page-of-other-class")),
    Offence(DrawsLast, SHARDS, (new(4),), ("P14", "rotation-bases"), also=("P2",)),
    # 2 pages in each class: the first row takes one of class 0, so that class 1 has most.
    Offence(DrawsBeforeTheBatch, SHARDS, (new(4, 4),), ("P14", "rotation-bases"), also=("P2",)),
    Offence(KeepsBases, SHARDS, (new(4),), ("P14", "rotation-bases")),
    Offence(RefusalDraws, SHARDS, (new(24),), ("P6", "refusal-changed-state: rotation-bases")),
    Offence(RefusalTakes, ONE_EACH, (new(12),), ("P6", "refusal-changed-state: available-deficit")),
    Offence(CountsAll, SHARDS, (new(4),), ("P2", "available-excess"), also=STANDING),
    Offence(AggregateOfLeast, SHARDS, (new(4),), ("P2", "aggregate-size")),
    # Page 1 is padding as well, and is there from the beginning; the chain begins in its class.
    Offence(PaddingOfOne, SHARDS, (ops.Chain(1, 4),), ("P3", "padding-page-handed-out"), also=STANDING),
    Offence(
        FreesToFirst,
        SHARDS,
        (ops.Chain(1, 4), ops.Free((0,))),
        ("P9", "unknown-page-in-free-list"),
    ),
    Offence(LosesOtherClasses, ONE_EACH, (new(8), ops.Free((0,))), ("P2", "available-deficit")),
]

OFFENCES = MAMBA_OFFENCES + SHARD_OFFENCES
EACH = pytest.mark.parametrize("offence", OFFENCES, ids=str)


@EACH
def test_the_guilty_call_is_named_by_what_it_broke(offence):
    assert_named(offence)


@EACH
def test_it_is_found_from_zero_and_never_called_anything_else(offence):
    assert_found_from_zero(offence)
