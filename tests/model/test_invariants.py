"""What holds of the model after any ops, on any config: the invariants of section 2 that it can break itself.

The model is what targets are judged by, so it is judged here by a few lines that know nothing of its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.model import ops
from kvproof.model.base import AllocatorModel, Expectation, Growth, Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config, validate
from kvproof.model.hisparse import DeviceModel
from kvproof.model.interleave import InterleaveModel
from kvproof.model.mamba import MambaModel
from kvproof.model.ops import Op
from tests.model.strategies import configs, lists, mapped, op_lists, outcomes, rows, sides

EACH_KIND = pytest.mark.parametrize("allocator", ALLOCATORS)


def assert_sound(model: AllocatorModel) -> None:
    """P1, P2, P3, P4, P9 and P10 of a state."""
    config, ps = validate(model.config), model.config.page_size
    for name, due in pages_of(config).items():
        pool = model.sides[name] if name else model.pool
        # Once each: conservation, single ownership, and no padding page, in one line.
        assert sorted([*pool.free, *pool.staged, *pool.deferred(), *taken_from(model, name)]) == due, name
        assert not pool.staged or config.need_sort
    assert set(model.sides) == pages_of(config).keys() - {""}
    assert model.available == available(model)
    for row in model.rows:
        assert len(row.pages) == -(-row.length // ps)
        slots = model.slots_of(row, 0, row.length)
        assert [slot % ps for slot in slots] == [position % ps for position in range(row.length)]
        assert [slot // ps for slot in slots] == [row.pages[position // ps] for position in range(row.length)]
        assert model.last_loc(row) == (slots[-1] if slots else -1)
    for name, mapping in model.mappings.items():
        assert_mapped(model, name, mapping)


def pages_of(config: Config) -> dict[str, list[int]]:
    """All pages of each pool, as sections 1 and 5 to 8 number them."""

    def numbered(size: int, page_size: int) -> list[int]:
        return list(range(1, size // page_size + 1))

    ps, first = config.page_size, config.page_offset + 1
    match config.allocator:
        case "swa":
            return {"": numbered(config.size, ps), "swa": numbered(config.swa_size, ps)}
        case "hisparse":
            return {"": numbered(config.size * config.ratio, ps), "device": numbered(config.size, ps)}
        case "hisparse-v4":
            device = numbered(config.device_size, ps // 4)
            return {"": numbered(config.size, ps), "swa": numbered(config.swa_size, ps), "device": device}
        case "page-interleave":
            n, count = config.shards, config.size // ps
            classes = [list(range(n + rank, n * (count + 1), n)) for rank in range(n)]
            return {f"class {rank}" if rank else "": pages for rank, pages in enumerate(classes)}
    return {"": list(range(first, first + config.size // ps))}


def taken_from(model: AllocatorModel, side: str) -> list[int]:
    """Pages of that pool in the hands of rows, buffers and alloc groups."""
    rows_pages = [page for row in model.rows for page in row.pages]
    if isinstance(model, InterleaveModel):
        rank = int(side.removeprefix("class ") or 0)
        return [page for page in rows_pages if page % model.config.shards == rank]
    if not side:
        return rows_pages + (model.aside if isinstance(model, MambaModel) else [])
    halves = [page for row in model.rows for page in model.peer_pages(row, side) if page]
    buffers = model.buffers if isinstance(model, DeviceModel) and side == "device" else []
    return halves + [page for buffer in buffers for page in buffer]


def available(model: AllocatorModel) -> int:
    """What sections 3 to 8 call available: of the side that has least."""
    config, ps = model.config, model.config.page_size
    counts = [len(pool.free) + len(pool.staged) for pool in (model.pool, *model.sides.values())]
    shares = config.shards if config.allocator == "page-interleave" else 1
    # A device page of compressed slots stands for as many tokens as the logical page does.
    return min(counts) * ps * shares


def assert_mapped(model: AllocatorModel, name: str, mapping: list[int]) -> None:
    """P10: entries lead from the slots of rows to the same place of the row's page there, and from nowhere
    else; no page has entries from two pages."""
    config = model.config
    each = 4 if (config.allocator, name) == ("hisparse-v4", "device") else 1
    ps = config.page_size // each
    due = [0] * (config.size * max(config.ratio, 1) // each + ps) + [-1]
    for row in model.rows if config.allocator != "swa-ring" else []:
        peers = model.peer_pages(row, name)
        assert len(peers) == len(row.pages)
        for index, (page, peer) in enumerate(zip(row.pages, peers, strict=True)):
            # As far as they go: tokens that came without a peer have none.
            most = min(row.length // each - index * ps, ps)
            entries = mapping[page * ps : page * ps + most]
            count = sum(map(bool, entries))
            assert entries == [peer * ps + at for at in range(count)] + [0] * (most - count)
            assert (peer == 0) == (count == 0)
            due[page * ps : page * ps + count] = entries[:count]
    assert mapping == due
    assert len({peer for peer in mapping if peer > 0}) == sum(peer > 0 for peer in mapping)


def state(model: AllocatorModel) -> dict[str, object]:
    pools = {"": model.pool, **model.sides}
    return {
        "lists": {name: (list(pool.free), list(pool.staged)) for name, pool in pools.items()},
        "rows": rows(model),
        "taken": {name: sorted(taken_from(model, name)) for name in pools},
        "deferred": {name: list(pool.deferred()) for name, pool in pools.items()},
        "mappings": {name: list(mapping) for name, mapping in model.mappings.items()},
        "rest": (model.in_group, model.config),
    }


def pages_free(model: AllocatorModel) -> dict[str, set[int]]:
    """Free and staged pages of each pool, and slots that were set aside."""
    pools = {"": model.pool, **model.sides}
    free = {name: {*pool.free, *pool.staged} for name, pool in pools.items()}
    if isinstance(model, MambaModel):
        free[""] |= set(model.aside)
    return free


def assert_fits(
    model: AllocatorModel, before: dict[str, object], free: dict[str, set[int]], expectation: Expectation
) -> None:
    """An expectation against the states around it."""
    outcome, after = expectation.outcome, state(model)
    assert expectation.available == model.available
    assert (expectation.slots is not None) is (outcome is Outcome.SLOTS)
    if outcome in (Outcome.NOTHING, Outcome.REFUSED):
        assert after == before
    if outcome is Outcome.OOM:
        # A merge apart, everything is as it was.
        assert pages_free(model) == free
        assert {**after, "lists": None} == {**before, "lists": None}
    if outcome is Outcome.SLOTS and expectation.detached is None:
        assert expectation.slots == [
            slot
            for growth in expectation.growths
            for slot in model.slots_of(growth.row, growth.prefix, growth.seq)
        ]
        ps, main = model.page_size, free[""]
        if isinstance(model, InterleaveModel):
            main = set().union(*free.values())
        assert_taken(expectation.growths, ps, expectation.taken, main)
        for name, portion in expectation.portions.items():
            each = 4 if (model.config.allocator, name) == ("hisparse-v4", "device") else 1
            assert_taken(portion.growths, ps // each, portion.taken, free[name])
            entries = [slot // each for slot in expectation.slots if (slot + 1) % each == 0]
            assert portion.peers == [model.mappings[name][entry] for entry in entries]


def assert_taken(growths: list[Growth], ps: int, taken: list[int], free: set[int]) -> None:
    assert len(taken) == len(set(taken))
    assert set(taken) <= free
    assert taken == [page for one in growths for page in one.row.pages[one.first_new : -(-one.seq // ps)]]


def run(config: Config, trace: Sequence[Op]) -> AllocatorModel:
    """Apply everything, checking at each op."""
    model = model_for(config)
    assert_sound(model)
    for op in trace:
        before, free = state(model), pages_free(model)
        expectation = model.apply(op)
        assert_sound(model)
        assert_fits(model, before, free, expectation)
    return model


@settings(max_examples=300)
@given(configs(), op_lists())
def test_any_ops_are_valid_for_any_config(config, trace):
    run(config, trace)


@EACH_KIND
@settings(max_examples=100)
@given(data=st.data())
def test_any_ops_that_a_kind_knows_keep_it_sound(allocator, data):
    run(data.draw(configs([allocator])), data.draw(op_lists(allocator=allocator)))


@settings(max_examples=300)
@given(configs(), op_lists(most=12))
def test_deleting_any_op_leaves_a_trace(config, trace):
    for index in range(len(trace)):
        run(config, trace[:index] + trace[index + 1 :])


@settings(max_examples=300)
@given(configs(), op_lists())
def test_the_same_ops_come_to_the_same(config, trace):
    one, two = model_for(config), model_for(config)
    assert outcomes(one, *trace) == outcomes(two, *trace)
    assert (state(one), one.marks) == (state(two), two.marks)


@settings(max_examples=300)
@given(configs(), op_lists(misuse=False))
def test_without_misuse_nothing_is_refused_but_for_want_of_pages(config, trace):
    assert "refused" not in outcomes(model_for(config), *trace)


@EACH_KIND
@settings(max_examples=100)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_any_other_choice_of_pages_can_be_adopted(allocator, data, random):
    """A target held to the contract only takes whichever pages are free; the model must go on from there."""
    model = model_for(data.draw(configs([allocator])))
    for op in data.draw(op_lists(misuse=False, allocator=allocator)):
        free = pages_free(model)
        expectation = model.apply(op)
        if expectation.detached is not None and expectation.slots is not None:
            adopt_some_buffer(model, expectation, free["device"], random)
        elif expectation.outcome is Outcome.SLOTS:
            adopt_some(model, expectation, free, random)
        assert_sound(model)


def adopt_some(
    model: AllocatorModel, expectation: Expectation, free: dict[str, set[int]], random: Random
) -> None:
    """Adopt pages drawn from those that were free, on every side; of the class that is due."""
    before, lengths = model.available, [row.length for row in model.rows]
    if isinstance(model, InterleaveModel):
        n = model.config.shards
        drawn = {
            rank: random.sample(
                sorted(page for pages in free.values() for page in pages if page % n == rank),
                sum(page % n == rank for page in expectation.taken),
            )
            for rank in range(n)
        }
        chosen = [drawn[page % n].pop() for page in expectation.taken]
    else:
        chosen = random.sample(sorted(free[""]), len(expectation.taken))
    peers = {
        name: random.sample(sorted(free[name]), len(portion.taken))
        for name, portion in expectation.portions.items()
    }
    model.adopt(expectation, list(chosen), {name: list(pages) for name, pages in peers.items()})
    assert expectation.taken == chosen
    assert {name: portion.taken for name, portion in expectation.portions.items()} == peers
    assert (model.available, [row.length for row in model.rows]) == (before, lengths)
    ps = model.page_size
    assert chosen == [
        page for one in expectation.growths for page in one.row.pages[one.first_new : -(-one.seq // ps)]
    ]


def adopt_some_buffer(
    model: AllocatorModel, expectation: Expectation, free: set[int], random: Random
) -> None:
    """Adopt a buffer of as many pages, of the row's own and of those that were free."""
    assert isinstance(model, DeviceModel)
    assert expectation.detached is not None
    count = len(model.buffers[-1])
    chosen = random.sample(sorted(free.union(expectation.detached)), count)
    model.adopt_buffer(expectation, list(chosen))
    assert model.buffers[-1] == chosen
    assert expectation.available == model.available


def test_adoption_by_hand():
    """Pages 1 and 2 were predicted for rows of 5 and 1 tokens; the target took 4 and 1 for A and 3 for B."""
    model = model_for(Config("paged", 16, 4))
    expectation = model.apply(ops.Extend(((ops.NEW_ROW, 5), (ops.NEW_ROW, 1))))
    model.adopt(expectation, [4, 1, 3], {})
    assert (rows(model), lists(model)) == ([([4, 1], 5), ([3], 1)], ([2], []))
    expectation = model.apply(ops.Decode((0, 1)))  # inside both pages: 1*4+1, 3*4+1
    assert expectation.slots == [5, 13]


def test_adoption_on_two_sides_by_hand():
    """The target took full pages 3 and 1 and swa pages 2 and 4 for five tokens; a decode goes on there."""
    model = model_for(Config("swa", 16, 4, swa_size=16))
    expectation = model.apply(ops.Extend(((ops.NEW_ROW, 5),)))
    model.adopt(expectation, [3, 1], {"swa": [2, 4]})
    # Slots 12 … 15 and 4 lead to 8 … 11 and 16.
    assert mapped(model) == {12: 8, 13: 9, 14: 10, 15: 11, 4: 16}
    assert (lists(model), sides(model)) == (([2, 4], []), {"swa": ([1, 3], [])})
    expectation = model.apply(ops.Decode((0,)))
    assert (expectation.slots, expectation.peers) == ([5], {"swa": [17]})


def test_adoption_of_a_buffer_by_hand():
    """A row of two device pages wants one; the target keeps the second and gives the first back."""
    model = model_for(Config("hisparse", 16, 4, ratio=1))
    model.apply(ops.Extend(((ops.NEW_ROW, 8),)))
    expectation = model.apply(ops.DeviceBuffer(0, 1))
    assert (expectation.slots, expectation.detached) == ([4, 5, 6, 7], [1, 2])
    assert isinstance(model, DeviceModel)
    model.adopt_buffer(expectation, [2])
    assert (model.buffers, sorted(model.sides["device"].free)) == ([[2]], [1, 3, 4])


_FREES = (
    ops.Free,
    ops.FreeSegment,
    ops.FreeSegments,
    ops.FreePages,
    ops.FreeSwa,
    ops.FreeSwaSegment,
    ops.FreeFull,
    ops.FreeFullSegment,
    ops.FreeDevice,
    ops.FreeBuffer,
)


@EACH_KIND
@settings(max_examples=60)
@given(data=st.data())
def test_a_group_ends_where_the_frees_alone_would(allocator, data):
    """P11: as sets of pages, on every side; the order is shown by example in test_paged_release.py."""
    config = data.draw(configs([allocator]))
    trace = data.draw(op_lists(misuse=False, most=15, allocator=allocator))
    inside = data.draw(op_lists(misuse=False, most=12, allocator=allocator))
    frees = [op for op in inside if isinstance(op, _FREES)]
    grouped, plain = model_for(config), model_for(config)
    for model in (grouped, plain):
        outcomes(model, *trace, ops.GroupEnd())
    outcomes(grouped, ops.GroupBegin(), *frees, ops.GroupEnd())
    outcomes(plain, *frees)
    assert pages_free(grouped) == pages_free(plain)
    assert {**state(grouped), "lists": None} == {**state(plain), "lists": None}


@settings(max_examples=300)
@given(configs(), op_lists(misuse=False), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_batch_is_its_rows_one_by_one(config, trace, lengths):
    """P17, where no merge can come between: the same slots in the same order, or a refusal somewhere."""
    config = replace(config, need_sort=False)
    batch, single = model_for(config), model_for(config)
    for model in (batch, single):
        outcomes(model, *trace, ops.GroupEnd())
    entries = [(ops.NEW_ROW, length) for length in lengths]
    (together,) = outcomes(batch, ops.Extend(tuple(entries)))
    apart = outcomes(single, *(ops.Extend((entry,)) for entry in entries))
    if ops.Extend not in batch.knows:
        assert {together, *map(str, apart)} == {"no call"}
    elif together == "None":
        assert "None" in apart
    else:
        assert together == [slot for slots in apart for slot in slots]
        assert state(batch) == state(single)


@pytest.mark.parametrize("allocator", ["paged", "token", "swa", "hisparse", "page-interleave"])
def test_ordinals_are_modulo_the_live_rows(allocator):
    extra = {"swa": {"swa_size": 8}, "hisparse": {"ratio": 1}, "page-interleave": {"shards": 2}}
    config = Config(allocator, 8, 1, **extra.get(allocator, {}))
    one, two = model_for(config), model_for(config)
    for model in (one, two):
        model.apply(ops.Extend(((ops.NEW_ROW, 2), (ops.NEW_ROW, 2))))
    assert outcomes(one, ops.Free((0,)), ops.Decode((0,))) == outcomes(two, ops.Free((6,)), ops.Decode((9,)))
    assert state(one) == state(two)
