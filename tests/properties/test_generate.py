"""The generator: it reaches every mark, keeps to its space, and looks at the model alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.marks import Mark, reachable
from kvproof.model.ops import HARMLESS, MISUSES, Op
from kvproof.properties.draw import SeededDraw
from kvproof.properties.generate import Generator
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.run import lockstep_for
from kvproof.properties.space import Space
from tests.model.strategies import SMALL
from tests.properties.subjects import LAWFUL, PoolTarget

OPS_TO_REACH_EVERY_MARK = 30_000


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_mark_is_reached(allocator, seed):
    """Within 30,000 ops, for whichever seed; well under a second of a campaign."""
    lease = Lease(0, seed, "null", "seeded", Space(allocator), OPS_TO_REACH_EVERY_MARK)
    verdict = run_lease(Null(Ticket()), lease)
    assert {mark for mark, count in verdict.marks.items() if count} == reachable(allocator)


def ops_of(space: Space, config: Config, seeds: int, length: int, *, name: str = "generate") -> Iterator[Op]:
    """Ops of several traces on one config, applied to the model."""
    for seed in range(seeds):
        model = model_for(config)
        generator = Generator(SeededDraw(f"{name} {seed}"), model, space)
        for _ in range(length):
            op = generator.next_op()
            yield op
            model.apply(op)


POOL = Config("paged", 64, 4)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_all_kinds_of_ops_that_mean_something_are_drawn(allocator):
    config = SMALL[allocator]
    drawn = list(ops_of(Space(allocator, misuse=True), config, 20, 200))
    assert {type(op) for op in drawn} == model_for(config).knows
    assert {op.kind for op in drawn if isinstance(op, ops.Misuse)} == set(MISUSES)


def test_misuse_is_drawn_only_where_asked_for_and_what_is_lacking_never():
    lacks = frozenset({"FreeSegment", "FreeSegments", "FreePages", "Resize", "GroupBegin"})
    drawn = list(ops_of(Space("paged", lacks=lacks), POOL, 20, 200))
    kinds = {type(op).__name__ for op in drawn}
    assert not kinds & lacks
    assert {"Extend", "Free", "Decode", "Clear"} <= kinds
    # What must do no harm, whoever is asked, is drawn everywhere; seldom.
    misuses = [op.kind for op in drawn if isinstance(op, ops.Misuse)]
    assert set(misuses) == HARMLESS
    assert len(misuses) < len(drawn) // 20


def test_traces_differ_in_taste():
    """Swarm testing: some ops are switched off in some traces, extend and free in none."""
    tastes: list[Counter[type[Op]]] = []
    for seed in range(40):
        model = model_for(POOL)
        generator = Generator(SeededDraw(f"taste {seed}"), model, Space("paged"))
        kinds: Counter[type[Op]] = Counter()
        for _ in range(150):
            op = generator.next_op()
            kinds[type(op)] += 1
            model.apply(op)
        assert kinds[ops.Extend]
        assert kinds[ops.Free]
        tastes.append(kinds)
    for kind in model_for(POOL).knows - {ops.Extend, ops.Free, ops.Misuse}:
        assert 0 < sum(not taste[kind] for taste in tastes) < 40, kind


def test_batches_and_rows_keep_to_the_bounds_of_the_lane():
    space = Space("paged", max_batch=3, max_row_tokens=10)
    for op in ops_of(space, Config("paged", 256, 16), 30, 100):
        if isinstance(op, ops.Extend):
            assert len(op.entries) <= 3
            assert all(0 <= tokens <= 10 for _, tokens in op.entries)


def test_a_trace_does_not_depend_on_the_targets_answers():
    """Two targets that choose different pages are asked for the same ops, so they can be compared."""
    drawn = []
    for make in (LAWFUL["back"], LAWFUL["middle, last row first"]):
        pair = lockstep_for(PoolTarget(make), POOL)
        generator = Generator(SeededDraw("same"), pair.model, Space("paged"))
        trace = []
        for _ in range(500):
            trace.append(generator.next_op())
            assert pair.step(trace[-1]) is None
        drawn.append(trace)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("pages", [1, 7])
def test_refusals_come_exactly_at_the_edge_as_well(pages):
    """Of the refusals, many are one page short; of the grants, many take the last page."""
    marks: Counter[Mark] = Counter()
    for seed in range(4):
        model = model_for(Config("paged", pages * 4, 4))
        generator = Generator(SeededDraw(f"edge {seed}"), model, Space("paged"))
        for _ in range(1000):
            model.apply(generator.next_op())
        marks.update(model.marks)
    assert marks[Mark.REFUSAL] > marks[Mark.ONE_SHORT] > 40
    assert marks[Mark.EXACT_EXHAUSTION] > 40


def test_either_side_is_exhausted_and_refuses():
    """On pools whose sides differ by a page or so, both are the tight one now and then."""
    marks: Counter[Mark] = Counter()
    for full, swa in ((6, 7), (7, 6), (7, 7)):
        model = model_for(Config("swa", full * 4, 4, swa_size=swa * 4))
        generator = Generator(SeededDraw(f"sides {full} {swa}"), model, Space("swa"))
        for _ in range(2000):
            model.apply(generator.next_op())
        marks.update(model.marks)
    for mark in (Mark.SHORT_ON_MAIN, Mark.SHORT_ON_SIDE, Mark.EXACT_EXHAUSTION, Mark.SIDE_EXHAUSTED):
        assert marks[mark] > 20, mark


def test_rows_that_have_lost_peers_take_over_others():
    marks: Counter[Mark] = Counter()
    for seed in range(10):
        model = model_for(SMALL["swa"])
        generator = Generator(SeededDraw(f"remap {seed}"), model, Space("swa"))
        for _ in range(1000):
            model.apply(generator.next_op())
        marks.update(model.marks)
    assert marks[Mark.REMAPPED] > 40
    assert marks[Mark.REMAP_IN_GROUP]


def test_a_cache_of_smaller_pages_is_among_the_callers():
    """Windows move by the cache's pages: by the allocator's own in most traces, by parts of them in some."""
    starts: Counter[bool] = Counter()
    for seed in range(40):
        for op in ops_of(Space("swa"), Config("swa", 512, 16, swa_size=512), 1, 100, name=f"grain {seed}"):
            if isinstance(op, ops.FreeSwa) and op.start:
                starts[op.start % 16 == 0] += 1
    assert starts[True] > 20
    assert starts[False] > 20
