"""What holds of the model after any ops, on any config: the invariants of section 2 that it can break itself.

The model is what targets are judged by, so it is judged here by a few lines that know nothing of its code.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.model import ops
from kvproof.model.base import AllocatorModel, Expectation, Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config, validate
from kvproof.model.ops import Op
from tests.model.strategies import configs, lists, op_lists, outcomes, rows


def assert_sound(model: AllocatorModel) -> None:
    """P1, P2, P3, P4 and P9 of a state."""
    config, ps = validate(model.config), model.config.page_size
    live = [page for row in model.rows for page in row.pages]
    everything = [*model.free_pages, *model.staged, *model.deferred(), *live]
    first = config.page_offset + 1
    # Once each: conservation, single ownership, and no padding page, in one line.
    assert sorted(everything) == list(range(first, first + config.size // ps))
    assert model.available == (len(model.free_pages) + len(model.staged)) * ps
    assert not model.staged or config.need_sort
    for row in model.rows:
        assert len(row.pages) == -(-row.length // ps)
        slots = model.slots_of(row, 0, row.length)
        assert [slot % ps for slot in slots] == [position % ps for position in range(row.length)]
        assert [slot // ps for slot in slots] == [row.pages[position // ps] for position in range(row.length)]
        assert model.last_loc(row) == (slots[-1] if slots else -1)


def state(model: AllocatorModel) -> tuple[object, ...]:
    return lists(model), rows(model), list(model.deferred()), model.in_group, model.config


def assert_fits(
    model: AllocatorModel, before: tuple[object, ...], free: set[int], expectation: Expectation
) -> None:
    """An expectation against the states around it."""
    outcome = expectation.outcome
    assert expectation.available == model.available
    assert (expectation.slots is not None) is (outcome is Outcome.SLOTS)
    if outcome in (Outcome.NOTHING, Outcome.REFUSED):
        assert state(model) == before
    if outcome is Outcome.OOM:
        # A merge apart: the same rows, and the same pages available.
        assert set(model.free_pages) | set(model.staged) == free
        assert state(model)[1:] == before[1:]
    if outcome is Outcome.SLOTS:
        assert expectation.slots == [
            slot
            for growth in expectation.growths
            for slot in model.slots_of(growth.row, growth.prefix, growth.seq)
        ]
        assert len(expectation.taken) == len(set(expectation.taken))
        assert set(expectation.taken) <= free
        new = [page for growth in expectation.growths for page in growth.row.pages[growth.first_new :]]
        assert new == expectation.taken


def run(config: Config, trace: Sequence[Op]) -> AllocatorModel:
    """Apply everything, checking at each op."""
    model = model_for(config)
    assert_sound(model)
    for op in trace:
        before, free = state(model), {*model.free_pages, *model.staged}
        expectation = model.apply(op)
        assert_sound(model)
        assert_fits(model, before, free, expectation)
    return model


@settings(max_examples=300)
@given(configs(), op_lists())
def test_any_ops_are_valid_for_any_config(config, trace):
    run(config, trace)


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


@settings(max_examples=300)
@given(configs(), op_lists(), st.randoms(use_true_random=False))
def test_any_other_choice_of_pages_can_be_adopted(config, trace, random):
    """A target held to the contract only takes whichever pages are free; the model must go on from there."""
    model = model_for(config)
    for op in trace:
        free = [*model.free_pages, *model.staged]
        expectation = model.apply(op)
        if expectation.taken:
            available = model.available
            chosen = random.sample(free, len(expectation.taken))
            model.adopt(expectation, chosen)
            assert expectation.taken == chosen
            assert model.available == available
            new = [page for growth in expectation.growths for page in growth.row.pages[growth.first_new :]]
            assert new == chosen
        assert_sound(model)


def test_adoption_by_hand():
    """Pages 1 and 2 were predicted for rows of 5 and 1 tokens; the target took 4 and 1 for A and 3 for B."""
    model = model_for(Config("paged", 16, 4))
    expectation = model.apply(ops.Extend(((ops.NEW_ROW, 5), (ops.NEW_ROW, 1))))
    model.adopt(expectation, [4, 1, 3])
    assert (rows(model), lists(model)) == ([([4, 1], 5), ([3], 1)], ([2], []))
    expectation = model.apply(ops.Decode((0, 1)))  # inside both pages: 1*4+1, 3*4+1
    assert expectation.slots == [5, 13]


@settings(max_examples=300)
@given(configs(), op_lists(misuse=False, most=15), op_lists(misuse=False, most=8))
def test_a_group_ends_where_the_frees_alone_would(config, trace, inside):
    """P11: as sets of pages; the order is shown by example in test_paged.py."""
    frees = [
        op for op in inside if isinstance(op, (ops.Free, ops.FreeSegment, ops.FreeSegments, ops.FreePages))
    ]
    grouped, plain = model_for(config), model_for(config)
    for model in (grouped, plain):
        outcomes(model, *trace, ops.GroupEnd())
    outcomes(grouped, ops.GroupBegin(), *frees, ops.GroupEnd())
    outcomes(plain, *frees)
    assert rows(grouped) == rows(plain)
    assert {*grouped.free_pages, *grouped.staged} == {*plain.free_pages, *plain.staged}


@settings(max_examples=300)
@given(configs(), op_lists(misuse=False), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_batch_is_its_rows_one_by_one(config, trace, lengths):
    """P17, where no merge can come between: the same slots in the same order, or a refusal somewhere."""
    config = Config(config.allocator, config.size, config.page_size, page_offset=config.page_offset)
    batch, single = model_for(config), model_for(config)
    for model in (batch, single):
        outcomes(model, *trace)
    entries = [(ops.NEW_ROW, length) for length in lengths]
    (together,) = outcomes(batch, ops.Extend(tuple(entries)))
    apart = outcomes(single, *(ops.Extend((entry,)) for entry in entries))
    if together == "None":
        assert "None" in apart
    else:
        assert together == [slot for slots in apart for slot in slots]
        assert state(batch) == state(single)


@pytest.mark.parametrize("allocator", ["paged", "token"])
def test_ordinals_are_modulo_the_live_rows(allocator):
    config = Config(allocator, 8, 1)
    one, two = model_for(config), model_for(config)
    for model in (one, two):
        model.apply(ops.Extend(((ops.NEW_ROW, 2), (ops.NEW_ROW, 2))))
    assert outcomes(one, ops.Free((0,)), ops.Decode((0,))) == outcomes(two, ops.Free((6,)), ops.Decode((9,)))
    assert state(one) == state(two)
