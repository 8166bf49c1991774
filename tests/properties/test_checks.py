"""Every check fires on a wrong answer made by hand, with its property and divergence, and on no right one.

The answers: `wrong_answers.py`, `wrong_sides.py`. Allocators that go wrong: `test_offenders_*.py`.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvproof.impl.targets.null import NullSubject
from kvproof.impl.targets.protocol import Answer, State
from kvproof.model import ops
from kvproof.model.base import Outcome
from kvproof.model.catalogue import model_for
from kvproof.properties.catalogue import ANSWER_CHECKS, STATE_CHECKS, Check
from kvproof.properties.checks.slots import chosen_pages, chosen_peers
from kvproof.properties.lockstep import Lockstep
from kvproof.properties.step import Step
from tests.model.strategies import configs, new, op_lists
from tests.properties.subjects import Twist
from tests.properties.wrong_answers import BUILT, HELD, POOL, WRONG_ANSWERS, WRONG_STATES, Case
from tests.properties.wrong_sides import (
    ALL,
    FOUR,
    FREED,
    MAPPED,
    PAIR,
    WRONG_BUFFERS,
    WRONG_DEALS,
    WRONG_PAIRS,
    pair,
    twos,
)

CHECKS = ANSWER_CHECKS + STATE_CHECKS
CASES = [*WRONG_ANSWERS, *WRONG_STATES, *WRONG_PAIRS, *WRONG_BUFFERS, *WRONG_DEALS, BUILT]


def last_step(case: Case, *, exact: bool) -> Step:
    """The step of the case's last op."""
    model = model_for(case.config)
    for op in case.trace[:-1]:
        model.apply(op)
    expectation = model.apply(case.trace[-1])
    subject = NullSubject()
    subject.expect(expectation, model)
    state = case.state or subject.observe()
    index = len(case.trace) - 1
    return Step(index, case.trace[-1], case.config, model, expectation, case.answer, state, exact)


def fired(case: Case, *, exact: bool) -> tuple[str, Check] | None:
    """Property and check that lockstep would come to first."""
    step = last_step(case, exact=exact)
    return next(((property_id, check) for property_id, check in CHECKS if check(step) is not None), None)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.property_id} {case.divergence}" for case in CASES])
@pytest.mark.parametrize("exact", [False, True])
def test_a_wrong_answer_is_found_and_named(case: Case, exact):
    index = len(case.trace) - 1
    pair = Lockstep(model_for(case.config), Twist(index, case.answer, case.state), exact=exact)
    failures = [pair.step(op) for op in case.trace]
    assert failures[:-1] == [None] * index
    failure = failures[-1]
    if case.exact and not exact:
        assert failure is None
        assert not pair.spoilt
        return
    assert failure is not None
    assert (failure.property_id, failure.divergence) == (case.property_id, case.divergence)
    op = "Build" if case is BUILT else type(case.trace[-1]).__name__
    assert (failure.op, failure.allocator, failure.step) == (op, case.config.allocator, index)
    assert failure.message
    # A stray access, or a high price, with a right answer is no reason to stop.
    harmless = case.divergence.startswith(("undefined-lane-used", "stale-entry-of-free-page"))
    assert failure.tolerable is (harmless or case.property_id in ("P7", "P15", "P16"))
    assert pair.spoilt is not failure.tolerable


@pytest.mark.parametrize("case", CASES, ids=[f"{case.property_id} {case.divergence}" for case in CASES])
def test_the_first_check_to_fire_is_of_that_property(case: Case):
    found = fired(case, exact=True)
    assert found is not None
    # A misuse that must do no harm is judged as a refusal, and named by what it broke.
    assert case.property_id in (found[0], "P11") or isinstance(case.trace[-1], ops.Misuse)


def test_every_check_has_a_wrong_answer_of_its_own():
    found = {fired(case, exact=True) for case in CASES if case.property_id != "P11"}
    assert found >= set(CHECKS)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (WRONG_ANSWERS[3], ["None", "16 slots available", "5 slots"]),
        (Case("P2", "", (new(4), ops.Free((0,))), Answer(available=20)), ["20", "excess 4", "expected 16"]),
        (
            Case("P1", "", (new(4), new(2)), Answer([4, 5], available=8)),
            ["batch row 0", "page 1", "[4, 5]", "row 0"],
        ),
        (Case("P1", "", HELD, Answer(available=12), [1, 2, 3, 4]), ["page 1: deferred"]),
        (
            Case("P5", "", (new(1), ops.Extend(((0, 2),))), Answer([6, 7], available=12)),
            ["1 → 3 tokens", "[6, 7]", "[5, 6]"],
        ),
    ],
)
def test_a_message_names_slots_owners_expected_and_actual(case: Case, words):
    found = next(found for _, check in CHECKS if (found := check(last_step(case, exact=False))) is not None)
    assert [word for word in words if word not in found.message] == []


@settings(max_examples=150)
@given(configs(), op_lists())
def test_no_check_fires_on_the_models_own_predictions(config, trace):
    """So the quick way of lockstep (the answer is the prediction) proves as much as the long one."""
    model = model_for(config)
    subject = NullSubject()
    for index, op in enumerate(trace):
        expectation = model.apply(op)
        subject.expect(expectation, model)
        step = Step(
            index,
            op,
            config,
            model,
            expectation,
            subject.apply(expectation.call),
            subject.observe(),
            exact=True,
        )
        assert [property_id for property_id, check in CHECKS if check(step) is not None] == []
        if expectation.outcome is Outcome.SLOTS and expectation.detached is None:
            assert chosen_pages(step) == expectation.taken
            taken = {name: portion.taken for name, portion in expectation.portions.items() if portion.growths}
            assert chosen_peers(step) == taken


@pytest.mark.parametrize(
    ("trace", "slots", "pages"),
    [
        ((new(5),), [12, 13, 14, 15, 4], [3, 1]),
        ((new(1, 6, 0),), [8, 16, 17, 18, 19, 4, 5], [2, 4, 1]),
        # A fills its old page with 5, 6, 7; only then does it choose.
        ((new(1), ops.Extend(((0, 5),))), [5, 6, 7, 16, 17], [4]),
        ((new(4, 2), ops.Decode((0, 1))), [16, 10], [4]),
        ((new(4, 2), ops.Decode((1,))), [10], []),
    ],
)
def test_the_pages_a_target_chose_are_read_off_its_slots(trace, slots, pages):
    step = last_step(Case("", "", trace, Answer(slots)), exact=False)
    assert [check for _, check in ANSWER_CHECKS if check(step)] == []
    assert chosen_pages(step) == pages


@pytest.mark.parametrize(
    ("trace", "slots", "peers", "pages", "chosen"),
    [
        ((new(3),), [4, 5, 2], [2, 3, 4], [2, 1], [1, 2]),
        # Only the tail has peers: the second page's.
        ((ops.ExtendTail(-1, 4, 2),), [2, 3, 4, 5], [0, 0, 4, 5], [1, 2], [2]),
        ((new(1), ops.Decode((0,))), [3], [3], [], []),
    ],
)
def test_the_peers_a_target_chose_are_read_off_its_mapping(trace, slots, peers, pages, chosen):
    step = last_step(Case("", "", trace, Answer(slots, peers={"swa": peers}), config=PAIR), exact=False)
    assert [check for _, check in ANSWER_CHECKS if check(step)] == []
    assert (chosen_pages(step), chosen_peers(step)) == (pages, {"swa": chosen})


def test_another_choice_on_both_sides_is_gone_on_from():
    """The target took full page 2 and swa page 1, then 1 and 2: slots 4, 5, 2, 3 lead to 2, 3, 4, 5."""
    subject = Twist(0, twos([4, 5], [2, 3]), pair([0, 0, 0, 0, 2, 3, -1], (1,)))
    lockstep = Lockstep(model_for(PAIR), subject, exact=False)
    assert lockstep.step(new(2)) is None
    full, empty = [0, 0, 4, 5, 2, 3, -1], {"full": 0, "swa": 0}
    subject.at, subject.twisted = 1, (Answer([2, 3], peers={"swa": [4, 5]}), pair(full, (), (), empty))
    assert lockstep.step(new(2)) is None
    assert lockstep.model.mappings["swa"] == full


def test_a_stale_entry_is_told_of_once_and_matters_again_when_the_slot_is_somebodys():
    subject = Twist(1, FOUR, pair(MAPPED, (1, 2), (1, 2), ALL))
    lockstep = Lockstep(model_for(PAIR), subject, exact=True)
    found = [lockstep.step(op) for op in FREED]
    assert [failure and failure.divergence for failure in found] == [None, "stale-entry-of-free-page (swa)"]
    subject.at = 2
    assert lockstep.step(ops.GroupBegin()) is None  # as stale as before
    subject.at, subject.twisted = 3, (twos([2, 3], [2, 0]), None)
    failure = lockstep.step(ops.ExtendTail(-1, 2))
    assert failure is not None
    assert (failure.property_id, failure.divergence) == ("P10", "stale-entry (swa)")


@pytest.mark.parametrize("exact", [False, True])
def test_a_target_may_let_a_groups_frees_act_at_once(exact):
    subject = Twist(2, Answer(available=16), State([2, 3, 4, 1], []))
    lockstep = Lockstep(model_for(POOL), subject, exact=exact)
    *_, failure = [lockstep.step(op) for op in HELD]
    assert (failure is None) is not exact
    # What it has released already it does not release again.
    assert exact or (lockstep.model.deferred(), sorted(lockstep.model.free_pages)) == ([], [1, 2, 3, 4])
