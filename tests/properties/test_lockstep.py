"""Lockstep: who is judged how often, whose choices are adopted, and what becomes of misuse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Answer, State, Ticket
from kvproof.model import ops
from kvproof.model.base import Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.trace import Trace
from kvproof.properties.draw import SeededDraw
from kvproof.properties.generate import Generator
from kvproof.properties.lockstep import Lockstep
from kvproof.properties.run import lockstep_for, run_trace
from kvproof.properties.space import Space, draw_config
from tests.model.strategies import configs, new, op_lists
from tests.properties.page_pool import PagePool, back, front
from tests.properties.subjects import LAWFUL, PoolTarget, Twist

POOL = Config("paged", 16, 4)


# --- how closely ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("look_every", "looks"), [(1, [1, 2, 3, 4, 5, 6]), (3, [0, 0, 1, 1, 1, 2]), (9, [0] * 6)]
)
def test_lists_are_looked_at_every_so_many_calls(look_every, looks):
    subject = Twist()
    pair = Lockstep(model_for(POOL), subject, exact=True, look_every=look_every)
    seen = []
    for _ in range(3):
        for op in (new(4), ops.Free((0,))):
            assert pair.step(op) is None
            seen.append(subject.observed)
    assert seen == looks
    assert pair.tally.checked == 6


def test_lists_are_looked_at_after_every_refusal_and_counted_from_there():
    subject = Twist()
    pair = Lockstep(model_for(POOL), subject, exact=True, look_every=3)
    seen = []
    for op in (new(4), new(17), new(4), new(4), new(1)):
        assert pair.step(op) is None
        seen.append(subject.observed)
    assert seen == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "answer",
    [
        Answer([8, 9], available=12),
        Answer([4, 5], available=16),
        Answer([4, 5], ValueError(), 12),
        Answer([4, 5], None, 12, "int32"),
        Answer(None, available=12),
    ],
)
def test_an_answer_that_is_not_the_prediction_takes_the_long_way(answer):
    subject = Twist(0, answer)
    pair = Lockstep(model_for(POOL), subject, exact=True, look_every=100)
    assert pair.step(new(2)) is not None
    assert subject.observed == 1


def test_what_comes_to_no_call_and_what_a_target_lacks_is_counted():
    pair = Lockstep(model_for(POOL), Twist(), exact=True, lacks=frozenset({"FreeSegment", "Resize"}))
    trace = [
        ops.Free((0,)),
        new(4),
        ops.FreeSegment(0),
        ops.Resize(2),
        ops.FreeSegment(0),
        ops.GroupEnd(),
        new(4),
    ]
    assert [pair.step(op) for op in trace] == [None] * 7
    assert (pair.tally.checked, pair.tally.idle) == (2, 2)
    assert pair.tally.skipped == {"FreeSegment": 2, "Resize": 1}
    # What was skipped never happened: both rows live, in a pool of 4 pages.
    assert [row.length for row in pair.model.rows] == [4, 4]
    assert pair.config == POOL


def test_answers_are_kept_when_asked_for():
    pair = Lockstep(model_for(POOL), Twist(), exact=True)
    pair.answers = []
    for op in (new(2), ops.GroupEnd(), new(17), ops.Free((0,))):
        pair.step(op)
    assert pair.answers == [[4, 5], None, None]


# --- other choices --------------------------------------------------------------------------------

TARGETS = pytest.mark.parametrize("kind", LAWFUL)


@TARGETS
@settings(max_examples=150)
@given(config=configs(), trace=op_lists(misuse=False), look_every=st.sampled_from([1, 5]))
def test_a_lawful_choice_is_never_accused(kind, config, trace, look_every):
    result = run_trace(PoolTarget(LAWFUL[kind]), Trace(config, tuple(trace)), look_every=look_every)
    assert [failure.message for failure in result.failures] == []


@TARGETS
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_lawful_choice_is_never_accused_by_a_hostile_caller(kind, allocator):
    """30 traces of 100 ops of the generator's, which reach the edges that any ops seldom do."""
    target, space = PoolTarget(LAWFUL[kind]), Space(allocator)
    other_choices = 0
    for number in range(30):
        draw = SeededDraw(f"adoption {number}")
        pair = lockstep_for(target, draw_config(draw, space), look_every=4)
        generator = Generator(draw, pair.model, space)
        shadow, predicted = model_for(pair.config), []
        pair.answers = []
        for _ in range(100):
            op = generator.next_op()
            failure = pair.step(op)
            assert failure is None, failure
            expectation = shadow.apply(op)
            if expectation.outcome is not Outcome.NOTHING:
                predicted.append(expectation.slots)
        other_choices += pair.answers != predicted
    # State slots are first in, first out: there is nothing to choose.
    assert other_choices > 8 or allocator == "mamba"


def test_by_hand_pages_from_the_back_with_staging_and_a_group():
    config = Config("paged", 16, 4, need_sort=True)
    pool = PagePool(config, back)
    pair = Lockstep(model_for(config), pool, exact=False)
    # A takes 4 and 3 from the back. Freed in a group they are staged at its end, in row order; 10 tokens need
    # a merge.
    steps = [new(5), ops.GroupBegin(), ops.Free((0,)), new(2), ops.GroupEnd(), new(10), ops.Decode((0, 1))]
    assert [pair.step(op) for op in steps] == [None] * 7
    assert [row.pages for row in pair.model.rows] == [[2], [3, 4, 1]]
    assert (pool.observe(), pair.model.free_pages, pair.model.staged) == (State([], []), [], [])


@TARGETS
def test_an_exact_target_may_not_choose(kind):
    """P14, at the latest when it has all three freed pages to choose from."""
    trace = Trace(POOL, (new(4, 4, 4), ops.Free((1,)), ops.Free((1,)), new(1), new(1)))
    result = run_trace(PoolTarget(LAWFUL[kind], exact=True), trace)
    assert [failure.property_id for failure in result.failures] == ["P14"]
    assert run_trace(PoolTarget(LAWFUL[kind]), trace).failures == []


def test_a_choice_once_made_is_held_against_later_answers():
    """The target took page 4 for A (predicted: 1); when it hands page 4 out again, A has it."""
    subject = Twist(0, Answer([16, 17], available=12), State([1, 2, 3], []))
    pair = Lockstep(model_for(POOL), subject, exact=False)
    assert pair.step(new(2)) is None
    subject.at, subject.twisted = 1, (Answer([16], available=8), None)
    failure = pair.step(new(1))
    assert failure is not None
    assert (failure.property_id, failure.divergence) == ("P1", "owned-page-handed-out")
    assert "row 0" in failure.message


# --- misuse ---------------------------------------------------------------------------------------

DOUBLE, END = ops.Misuse("double-free"), ops.Misuse("end-without-begin")
REFUSAL = Answer(error=ValueError("refused"), available=12)
BROKEN_REFUSAL = Answer(error=ValueError("refused"), available=16)
SILENT = Answer(available=12)
CORRUPT = Answer(available=16)
PROMISED = frozenset({"double-free", "end-without-begin"})


@pytest.mark.parametrize(
    ("answer", "op", "promised", "found", "spoilt", "accepted"),
    [
        (REFUSAL, DOUBLE, True, None, False, None),
        (BROKEN_REFUSAL, DOUBLE, True, ("P6", "refusal-changed-state: available-excess"), True, None),
        (SILENT, DOUBLE, True, ("P6", "misuse-accepted double-free"), True, "nothing has changed so far"),
        (CORRUPT, END, True, ("P6", "misuse-accepted end-without-begin"), True, "available_size() is 16"),
        (REFUSAL, DOUBLE, False, None, True, None),
        (BROKEN_REFUSAL, DOUBLE, False, None, True, "refused, but available_size() is 16"),
        (SILENT, DOUBLE, False, None, True, "nothing has changed so far"),
        (CORRUPT, DOUBLE, False, None, True, "available_size() is 16"),
    ],
)
def test_misuse_is_refused_or_reported(answer, op, promised, found, spoilt, accepted):
    refuses = PROMISED if promised else frozenset()
    pair = Lockstep(model_for(POOL), Twist(1, answer), exact=True, refuses=refuses)
    pair.step(new(4))
    failure = pair.step(op)
    assert (None if failure is None else (failure.property_id, failure.divergence)) == found
    assert pair.spoilt is spoilt
    assert list(pair.tally.accepted) == ([op.kind] if accepted else [])
    assert pair.tally.accepted.get(op.kind, "").startswith(accepted or "")


@pytest.mark.parametrize(
    ("answer", "op", "found"),
    [
        (CORRUPT, DOUBLE, ("P1", "misuse-corrupts double-free")),
        (CORRUPT, END, ("P11", "misuse-corrupts end-without-begin")),
        (BROKEN_REFUSAL, DOUBLE, ("P1", "misuse-corrupts double-free")),
        (SILENT, DOUBLE, None),
        (REFUSAL, DOUBLE, None),
    ],
)
def test_misuse_that_corrupts_can_be_a_failure_without_a_promise(answer, op, found):
    pair = Lockstep(model_for(POOL), Twist(1, answer), exact=True, misuse_fails=True)
    pair.step(new(4))
    failure = pair.step(op)
    assert (None if failure is None else (failure.property_id, failure.divergence)) == found


@pytest.mark.parametrize("checked", [False, True])
def test_a_promise_is_one_of_checked_mode(checked):
    target = PoolTarget(lambda config: PagePool(config, front), refuses=PROMISED)
    trace = Trace(Config("paged", 16, 4, checked=checked), (new(4), DOUBLE, new(4)))
    result = run_trace(target, trace)
    assert [failure.divergence for failure in result.failures] == ["misuse-accepted double-free"] * checked
    # Page 2 is in the free list twice now, so nothing behind that is run.
    assert result.tally.checked == 2
    assert "excess 4" in result.tally.accepted["double-free"]


def test_misuse_with_nothing_to_misuse_is_no_call():
    result = run_trace(
        Null(Ticket()), Trace(POOL, (ops.Misuse("unaligned-segment"), ops.Misuse("nested-begin")))
    )
    assert (result.failures, result.tally.idle, result.tally.checked) == ([], 2, 0)
