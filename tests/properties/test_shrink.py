"""The shrinker: small, deterministic, and true to the failure that it was given.

Made-up predicates stand for failures where only the search matters; the planted double free is a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import pytest

from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config, validate
from kvproof.model.ops import Op
from kvproof.model.trace import Origin, Trace
from kvproof.properties.draw import SeededDraw
from kvproof.properties.generate import Generator
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.replay import find, shrink
from kvproof.properties.run import run_trace
from kvproof.properties.shrink import Shrinker
from kvproof.properties.space import Space, draw_config, space_for
from tests.model.strategies import new

POOL = Config("paged", 64, 4)
Fails = Callable[[Trace], int | None]


def drawn(seed: int, length: int = 60) -> Trace:
    """A trace as a campaign draws it."""
    draw = SeededDraw(str(seed))
    space = Space("paged", misuse=True, checked=True)
    config = draw_config(draw, space)
    model = model_for(config)
    generator = Generator(draw, model, space)
    drawn_ops = []
    for _ in range(length):
        drawn_ops.append(generator.next_op())
        model.apply(drawn_ops[-1])
    return Trace(config, tuple(drawn_ops), Origin("x", "seeded", seed))


def shrunk(fails: Fails, trace: Trace, most_runs: int = 4000) -> Trace:
    return Shrinker(fails, trace, most_runs=most_runs).shrink()


def first(trace: Trace, wanted: Callable[[Op], bool]) -> int | None:
    return next((index for index, op in enumerate(trace.ops) if wanted(op)), None)


# --- made-up failures ------------------------------------------------------------------------------


def needs_both(trace: Trace) -> int | None:
    """A Clear somewhere behind a Free."""
    free = first(trace, lambda op: isinstance(op, ops.Free))
    if free is None:
        return None
    return next((i for i in range(free, len(trace.ops)) if isinstance(trace.ops[i], ops.Clear)), None)


def needs_many_tokens(trace: Trace) -> int | None:
    """An extend of 17 tokens or more in one entry, on pages of more than one slot."""
    if trace.config.page_size == 1:
        return None
    return first(trace, lambda op: isinstance(op, ops.Extend) and any(n >= 17 for _, n in op.entries))


def needs_a_full_pool(trace: Trace) -> int | None:
    """The model refuses for want of pages."""
    model = model_for(trace.config)
    for index, op in enumerate(trace.ops):
        if model.apply(op).outcome.name == "OOM":
            return index
    return None


def needs_three_rows(trace: Trace) -> int | None:
    """Three rows are alive at once."""
    model = model_for(trace.config)
    for index, op in enumerate(trace.ops):
        model.apply(op)
        if len(model.rows) >= 3:
            return index
    return None


PREDICATES = [needs_both, needs_many_tokens, needs_a_full_pool, needs_three_rows]
by_predicate = pytest.mark.parametrize("fails", PREDICATES, ids=lambda fails: fails.__name__)
NOISE = tuple(drawn(3).ops[:30])
HAYSTACK = Trace(
    Config("paged", 67, 4, need_sort=True),
    (*NOISE, new(20, 3, 1), ops.Free((1,), 2, 1), ops.Extend(((0, 300),)), new(9, 9), ops.Clear(), *NOISE),
    Origin("x", "seeded", 7, 8, 9),
)


def test_the_smallest_of_each_made_up_failure():
    """Worked out by hand: what the predicate asks for and nothing else."""
    both = shrunk(needs_both, HAYSTACK)
    assert (both.config, both.ops) == (Config("paged", 1, 1), (ops.Free(()), ops.Clear()))
    tokens = shrunk(needs_many_tokens, HAYSTACK)
    assert (tokens.config, tokens.ops) == (Config("paged", 2, 2), (new(17),))
    pool = shrunk(needs_a_full_pool, HAYSTACK)
    assert (pool.config, pool.ops) == (Config("paged", 1, 1), (new(2),))
    rows = shrunk(needs_three_rows, HAYSTACK)
    assert rows.config == Config("paged", 1, 1)
    entries = [entry for op in rows.ops if isinstance(op, ops.Extend) for entry in op.entries]
    assert entries == [(ops.NEW_ROW, 0)] * 3


@by_predicate
@pytest.mark.parametrize("seed", range(4))
def test_a_result_fails_and_is_a_local_minimum(fails, seed):
    """It fails on its last op, and no single op, entry or token can be left out of it."""
    trace = Trace(POOL, (*drawn(seed).ops, *HAYSTACK.ops), HAYSTACK.origin)
    assert fails(trace) is not None
    small = shrunk(fails, trace)
    assert fails(small) == len(small.ops) - 1
    assert small.origin == trace.origin
    validate(small.config)
    for index, op in enumerate(small.ops):
        assert (
            fails(Trace(small.config, small.ops[:index] + small.ops[index + 1 :])) is None
            or len(small.ops) == 1
        )
        if isinstance(op, ops.Extend):
            for place, (row, tokens) in enumerate(op.entries):
                for entries in (
                    (*op.entries[:place], *op.entries[place + 1 :]),
                    (*op.entries[:place], (row, tokens - 1), *op.entries[place + 1 :]),
                ):
                    if all(count >= 0 for _, count in entries):
                        changed = (*small.ops[:index], ops.Extend(entries), *small.ops[index + 1 :])
                        assert fails(Trace(small.config, changed)) is None
    # Shrinking it again finds nothing.
    assert shrunk(fails, small) == small


@by_predicate
def test_the_same_failure_shrinks_the_same_way(fails):
    tried: list[list[Trace]] = []
    for _ in range(2):
        mine: list[Trace] = []
        tried.append(mine)

        def recorded(trace: Trace, mine: list[Trace] = mine) -> int | None:
            mine.append(trace)
            return fails(trace)

        shrunk(recorded, HAYSTACK)
    assert tried[0] == tried[1]


@by_predicate
@pytest.mark.parametrize("most_slot", [0, 1 << 31, 1 << 40])
def test_every_candidate_is_a_valid_trace(fails, most_slot):
    """Also where the pool is a window that ends at the last slot there may be."""
    offset = max(0, most_slot // 4 - 16 - 1)
    config = Config(
        "paged", 67, 4, row_dtype="int32" if most_slot == 1 << 31 else "int64", page_offset=offset
    )

    def checked(trace: Trace) -> int | None:
        validate(trace.config)
        model = model_for(trace.config)
        for op in trace.ops:
            model.apply(op)
        # The window is what makes it fail: it must stay where it is.
        here = (trace.config.page_offset, trace.config.page_size) == (offset, 4)
        return fails(trace) if here else None

    small = shrunk(checked, Trace(config, HAYSTACK.ops))
    assert checked(small) is not None


def test_runs_are_bounded_and_counted():
    for most in (0, 1, 5, 20):
        tried = []

        def fails(trace: Trace, tried: list[Trace] = tried) -> int | None:
            tried.append(trace)
            return needs_both(trace)

        shrinker = Shrinker(fails, HAYSTACK, most_runs=most)
        small = shrinker.shrink()
        assert shrinker.runs == len(tried) == most
        assert needs_both(small) is not None


def test_a_trace_that_does_not_fail_is_given_back():
    shrinker = Shrinker(lambda _trace: None, HAYSTACK)
    assert shrinker.shrink() is HAYSTACK
    assert shrinker.runs == 1


def test_a_trace_is_cut_behind_its_failing_op_at_once():
    assert len(shrunk(needs_three_rows, HAYSTACK, most_runs=1).ops) <= HAYSTACK.ops.index(new(9, 9)) + 1


def test_a_plainer_page_size_keeps_whole_pages():
    """What fails on any page size, by taking three whole pages and a bit, ends with pages of one slot."""

    def fails(trace: Trace) -> int | None:
        ps = trace.config.page_size
        return first(
            trace, lambda op: isinstance(op, ops.Extend) and any(3 * ps < n <= 4 * ps for _, n in op.entries)
        )

    small = shrunk(fails, Trace(Config("paged", 64 * 16, 64), (new(200),)))
    assert small.config.page_size in (1, 2)
    assert fails(small) == 0


# --- real failures ---------------------------------------------------------------------------------


def found(plant: str, seed: int, ops_in_all: int = 1500):
    """The target and every failure that a lease finds on it."""
    target = Planted(Ticket(f":{plant}"))
    space = space_for(target.capabilities, "paged")
    return target, run_lease(target, Lease(0, seed, target.name, "seeded", space, ops_in_all)).found


@pytest.mark.parametrize("seed", [1, 2])
def test_a_double_free_that_takes_twelve_extends_comes_out_small_and_soon(seed):
    """Twelve extends that take pages, and at most one op more; below 4 s of one core."""
    target, failures = found("twelfth-extend-forgets", seed)
    entry = next(entry for entry in failures.values() if entry.failure.property_id == "P1")
    started = process_time()
    small, runs, _ = shrink(target, entry.trace, entry.failure)
    seconds = process_time() - started
    assert len(small.ops) <= 13
    assert seconds < 4
    assert 0 < runs <= 4000
    again = find(target, small, entry.failure)
    assert again is not None
    assert (again.fingerprint, again.step) == (entry.failure.fingerprint, len(small.ops) - 1)


def test_it_never_slides_to_another_fault():
    """Small traces of this plant fail in several ways; each trace shrinks to one that fails in its own."""
    target, failures = found("sum-inclusive", 1)
    assert len(failures) > 2
    for fingerprint, entry in failures.items():
        small, *_ = shrink(target, entry.trace, entry.failure, most_runs=600)
        again = find(target, small, entry.failure)
        assert again is not None
        assert again.fingerprint == fingerprint
        if entry.failure.op[:1].isupper():
            assert fingerprint in {failure.fingerprint for failure in run_trace(target, small).failures}
            assert len(small.ops) <= 4


def test_extends_are_merged():
    """What three extends open and grow, one does: rows keep their order and their lengths."""

    def lengths(trace: Trace) -> int | None:
        model = model_for(trace.config)
        for index, op in enumerate(trace.ops):
            model.apply(op)
            if [row.length for row in model.rows] == [5, 2, 3]:
                return index
        return None

    trace = Trace(
        Config("paged", 64, 4),
        (
            ops.Extend(((-1, 1), (-1, 2))),
            ops.Extend(((0, 3),)),
            ops.Extend(((-1, 3), (0, 1))),
        ),
    )
    small = Shrinker(lengths, trace).shrink()
    assert [op.entries for op in small.ops if isinstance(op, ops.Extend)] == [((-1, 5), (-1, 2), (-1, 3))]
    assert len(small.ops) == 1
