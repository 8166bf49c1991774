"""Every check fires on a wrong answer made by hand, with its property and divergence, and on no right one.

All of it on a pool of 4 pages of 4 slots: pages 1 … 4, slots 4 … 19, free list [1, 2, 3, 4].
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from kvproof.impl.targets.null import NullSubject
from kvproof.impl.targets.protocol import Answer, Damage, State
from kvproof.model import ops
from kvproof.model.base import Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.model.ops import Op
from kvproof.properties.catalogue import ANSWER_CHECKS, STATE_CHECKS, Check
from kvproof.properties.checks.slots import chosen_pages
from kvproof.properties.lockstep import Lockstep
from kvproof.properties.step import Step
from tests.model.strategies import configs, new, op_lists
from tests.properties.subjects import Twist

POOL = Config("paged", 16, 4)
SORTED = Config("paged", 16, 4, need_sort=True)
TOKEN = Config("token", 4, 1)
HELD = (new(4), ops.GroupBegin(), ops.Free((0,)))
CHECKS = ANSWER_CHECKS + STATE_CHECKS


@dataclass
class Case:
    """An answer (and lists) to the last op of a trace, and what it must be called. exact: only such targets
    are held to it."""

    property_id: str
    divergence: str
    trace: tuple[Op, ...]
    answer: Answer
    free: list[int] | None = None
    staged: tuple[int, ...] = ()
    later: tuple[Damage, ...] = ()
    config: Config = POOL
    exact: bool = False

    @property
    def state(self) -> State | None:
        return None if self.free is None else State(self.free, list(self.staged), self.later)


def damaged(kind: str, where: str) -> tuple[Damage, ...]:
    return (Damage(kind, where, "by hand"),)


FIVE = [4, 5, 6, 7, 8]  # the right answer to new(5): pages 1 and 2; 8 slots are left
WRONG_ANSWERS = [
    Case("P6", "raised ValueError", (new(5),), Answer(error=ValueError("no"), available=16)),
    Case("P6", "raised RuntimeError", (new(17),), Answer(error=RuntimeError(), available=16)),
    Case("P9", "dtype", (new(5),), Answer(FIVE, None, 8, "int32")),
    Case("P2", "refused-with-room", (new(5),), Answer(None, available=16)),
    Case("P2", "refused-with-room", (ops.Extend(()),), Answer(None, available=16)),
    Case("P2", "answered-when-short", (new(17),), Answer(list(range(4, 21)), available=0)),
    Case("P2", "answer-not-due", (new(4), ops.Free((0,))), Answer([4], available=16)),
    Case("P8", "wrong-length", (new(5),), Answer(FIVE[:4], available=8)),
    Case("P8", "wrong-length", (new(5),), Answer([*FIVE, 9], available=8)),
    Case(
        "P8",
        "unwritten the output",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("unwritten", "the output")),
    ),
    Case(
        "P8",
        "written-twice k.out",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("written-twice", "k.out")),
    ),
    Case("P3", "padding-page-handed-out", (new(5),), Answer([4, 5, 6, 7, 0], available=8)),
    Case("P3", "padding-page-handed-out", (new(1),), Answer([1], available=12)),
    Case("P9", "slot-out-of-range", (new(5),), Answer([4, 5, 6, 7, 20], available=8)),
    Case("P9", "slot-out-of-range", (new(1),), Answer([-4], available=12)),
    Case("P9", "slot-out-of-range", (new(1),), Answer([5], available=3), config=TOKEN),
    Case("P5", "not-last-loc-plus-one", (new(1), ops.Extend(((0, 2),))), Answer([6, 7], available=12)),
    Case("P5", "not-last-loc-plus-one", (new(2), ops.Decode((0,))), Answer([8], available=12)),
    Case("P4", "old-page-not-filled-in-order", (new(1), ops.Extend(((0, 2),))), Answer([5, 7], available=12)),
    Case("P4", "not-one-page", (new(5),), Answer([4, 5, 6, 8, 9], available=8)),
    Case("P4", "not-one-page", (new(5),), Answer([4, 5, 6, 7, 9], available=8)),
    Case("P4", "not-one-page", (new(4), ops.Decode((0,))), Answer([9], available=8)),
    Case("P1", "page-handed-out-twice", (new(4, 4),), Answer([4, 5, 6, 7] * 2, available=8)),
    Case("P1", "page-handed-out-twice", (new(8),), Answer([4, 5, 6, 7] * 2, available=8)),
    Case("P1", "owned-page-handed-out", (new(4), new(2)), Answer([4, 5], available=8)),
    Case("P1", "owned-page-handed-out", (new(4), ops.Decode((0,))), Answer([4], available=8)),
    Case("P1", "owned-page-handed-out", (*HELD, new(4)), Answer([4, 5, 6, 7], available=8)),
    Case("P1", "owned-page-handed-out", (new(1), new(1)), Answer([1], available=2), config=TOKEN),
    Case("P14", "other-slots", (new(2),), Answer([8, 9], available=12), [1, 3, 4], exact=True),
]
REFUSED = "refusal-changed-state: "
WRONG_STATES = [
    Case("P6", REFUSED + "available-deficit", (new(17),), Answer(None, available=12)),
    Case("P6", REFUSED + "leaked-page", (new(17),), Answer(None, available=16), [1, 2, 3]),
    Case("P6", REFUSED + "duplicate-in-free-list", (new(17),), Answer(None, available=16), [1, 1, 2, 3]),
    Case("P3", "padding-page-in-free-list", (new(4), ops.Free((0,))), Answer(available=16), [0, 2, 3, 4]),
    Case("P9", "unknown-page-in-free-list", (new(4), ops.Free((0,))), Answer(available=16), [5, 2, 3, 4]),
    Case("P9", "unknown-page-in-free-list", (new(4), ops.Free((0,))), Answer(available=16), [-1, 2, 3, 4]),
    Case("P1", "duplicate-in-free-list", (new(4), ops.Free((0,))), Answer(available=20), [1, 1, 2, 3, 4]),
    Case(
        "P1",
        "duplicate-in-free-list",
        (new(4), ops.Free((0,))),
        Answer(available=16),
        [2, 3, 4],
        (2,),
        config=SORTED,
    ),
    Case("P1", "owned-page-in-free-list", (new(4),), Answer([4, 5, 6, 7], available=12), [1, 2, 3, 4]),
    Case("P1", "owned-page-in-free-list", HELD, Answer(available=12), [1, 2, 3, 4]),
    Case("P2", "available-excess", (new(4), ops.Free((0,))), Answer(available=20)),
    Case("P2", "available-deficit", (new(4), ops.Free((0,))), Answer(available=12)),
    Case("P2", "leaked-page", (new(4), ops.Free((0,))), Answer(available=16), [2, 3, 4]),
    Case("P14", "free-list-order", (new(4), ops.Free((0,))), Answer(available=16), [2, 3, 4, 1], exact=True),
    Case(
        "P14",
        "staged-order",
        (new(8), ops.FreeSegment(0)),
        Answer(available=16),
        [3, 4],
        (2, 1),
        config=SORTED,
        exact=True,
    ),
    Case(
        "P7",
        "read-out-of-bounds k.free_pages",
        (new(17),),
        Answer(None, None, 16, damage=damaged("read-out-of-bounds", "k.free_pages")),
    ),
    Case(
        "P7",
        "guard-words an output",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("guard-words", "an output")),
    ),
    Case(
        "P7",
        "input-changed last_loc",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("input-changed", "last_loc")),
    ),
    Case(
        "P7",
        "write-out-of-bounds k.o",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("write-out-of-bounds", "k.o")),
    ),
    Case(
        "P7",
        "output-changed an earlier output",
        (new(5),),
        Answer(FIVE, available=8),
        [3, 4],
        later=damaged("output-changed", "an earlier output"),
    ),
    Case(
        "P7",
        "illegal-access k",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("illegal-access", "k")),
    ),
    *(
        Case("P15", f"{kind} here", (new(5),), Answer(FIVE, None, 8, damage=damaged(kind, "here")))
        for kind in ("synchronised", "recompiled", "launches")
    ),
    Case(
        "P8",
        "undefined-lane-used k.lens",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("undefined-lane-used", "k.lens")),
    ),
    # What kernels do in every call hides nothing that they do now and then.
    Case(
        "P7",
        "read-out-of-bounds k.free_pages",
        (new(5),),
        Answer(
            FIVE,
            None,
            8,
            damage=damaged("undefined-lane-used", "k.lens") + damaged("read-out-of-bounds", "k.free_pages"),
        ),
    ),
    # What is dear hides nothing else.
    Case(
        "P7",
        "guard-words an output",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("launches", "here") + damaged("guard-words", "an output")),
    ),
    Case("P2", "available-deficit", (new(5),), Answer(FIVE, None, 4, damage=damaged("synchronised", "here"))),
    # Whatever the fault looks like, in a group's calls and after a clobber it has one name.
    Case("P11", "duplicate-in-free-list", (*HELD, ops.GroupEnd()), Answer(available=20), [1, 1, 2, 3, 4]),
    Case("P11", "available-deficit", (*HELD, ops.GroupEnd()), Answer(available=12)),
    Case("P11", "padding-page-in-free-list", (*HELD, ops.GroupEnd()), Answer(available=16), [0, 2, 3, 4]),
    Case("P11", "available-excess", (new(4), ops.GroupBegin()), Answer(available=16)),
    Case("P11", "keeps-callers-tensor", (new(4, 4), *HELD[1:], ops.Clobber()), Answer(available=8), [2, 4]),
    Case("P11", "keeps-callers-tensor", (new(4), ops.Clobber()), Answer(available=8)),
]
CASES = WRONG_ANSWERS + WRONG_STATES


def last_step(case: Case, *, exact: bool) -> Step:
    """The step of the case's last op."""
    model = model_for(case.config)
    for op in case.trace[:-1]:
        model.apply(op)
    expectation = model.apply(case.trace[-1])
    state = case.state or State(list(model.free_pages), list(model.staged))
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
    assert (failure.op, failure.allocator, failure.step) == (
        type(case.trace[-1]).__name__,
        case.config.allocator,
        index,
    )
    assert failure.message
    # A stray access, or a high price, with a right answer is no reason to stop.
    by_luck = case.divergence.startswith("undefined-lane-used")
    assert failure.tolerable is (by_luck or case.property_id in ("P7", "P15"))
    assert pair.spoilt is not failure.tolerable


@pytest.mark.parametrize("case", CASES, ids=[f"{case.property_id} {case.divergence}" for case in CASES])
def test_the_first_check_to_fire_is_of_that_property(case: Case):
    found = fired(case, exact=True)
    assert found is not None
    assert case.property_id in (found[0], "P11")


def test_every_check_has_a_wrong_answer_of_its_own():
    found = {fired(case, exact=True) for case in CASES if case.property_id != "P11"}
    assert found == set(CHECKS)


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


@settings(max_examples=200)
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
        if expectation.outcome is Outcome.SLOTS:
            assert chosen_pages(step) == expectation.taken


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
