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
from kvproof.model.marks import reachable
from kvproof.model.ops import MISUSES, OP_TYPES, Op
from kvproof.properties.draw import SeededDraw
from kvproof.properties.generate import Generator
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.run import lockstep_for
from kvproof.properties.space import Space
from tests.properties.subjects import LAWFUL, PoolTarget

OPS_TO_REACH_EVERY_MARK = 30_000


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_mark_is_reached(allocator, seed):
    """Within 30,000 ops, for whichever seed; well under a second of a campaign."""
    lease = Lease(0, seed, "null", "seeded", Space(allocator), OPS_TO_REACH_EVERY_MARK)
    verdict = run_lease(Null(Ticket()), lease)
    assert {mark for mark, count in verdict.marks.items() if count} == reachable(allocator)


def ops_of(space: Space, config: Config, seeds: int, length: int) -> Iterator[Op]:
    """Ops of several traces on one config, applied to the model."""
    for seed in range(seeds):
        model = model_for(config)
        generator = Generator(SeededDraw(f"generate {seed}"), model, space)
        for _ in range(length):
            op = generator.next_op()
            yield op
            model.apply(op)


POOL = Config("paged", 64, 4)


def test_all_kinds_of_ops_are_drawn():
    kinds = Counter(type(op) for op in ops_of(Space("paged", misuse=True), POOL, 20, 200))
    assert set(kinds) == set(OP_TYPES)
    misuses = {
        op.kind for op in ops_of(Space("paged", misuse=True), POOL, 20, 200) if isinstance(op, ops.Misuse)
    }
    assert misuses == set(MISUSES)


def test_misuse_is_drawn_only_where_asked_for_and_what_is_lacking_never():
    lacks = frozenset({"FreeSegment", "FreeSegments", "FreePages", "Resize", "GroupBegin"})
    kinds = {type(op).__name__ for op in ops_of(Space("paged", lacks=lacks), POOL, 20, 200)}
    assert not kinds & (lacks | {"Misuse"})
    assert {"Extend", "Free", "Decode", "Clear"} <= kinds


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
    for kind in set(OP_TYPES) - {ops.Extend, ops.Free, ops.Misuse}:
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
    model = model_for(Config("paged", pages * 4, 4))
    generator = Generator(SeededDraw("edge"), model, Space("paged"))
    for _ in range(2000):
        model.apply(generator.next_op())
    marks = {mark.name: count for mark, count in model.marks.items()}
    assert marks["REFUSAL"] > marks["ONE_SHORT"] > 20
    assert marks["EXACT_EXHAUSTION"] > 20
