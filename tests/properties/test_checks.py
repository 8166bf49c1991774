"""Every check fires on a wrong answer made by hand, with its property and divergence, and on no right one.

Most of it on a pool of 4 pages of 4 slots: pages 1 … 4, slots 4 … 19, free list [1, 2, 3, 4]. Offenders of
the other kinds, by call: `test_offenders_paired.py`, `test_offenders_dealt.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from kvproof.impl.targets.null import NullSubject
from kvproof.impl.targets.protocol import Answer, Damage, Lists, State
from kvproof.model import ops
from kvproof.model.base import Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.model.ops import Op
from kvproof.properties.catalogue import ANSWER_CHECKS, STATE_CHECKS, Check
from kvproof.properties.checks.slots import chosen_pages, chosen_peers
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
    are held to it. seen: the whole state, where lists do not tell it."""

    property_id: str
    divergence: str
    trace: tuple[Op, ...]
    answer: Answer
    free: list[int] | None = None
    staged: tuple[int, ...] = ()
    later: tuple[Damage, ...] = ()
    config: Config = POOL
    exact: bool = False
    seen: State | None = None

    @property
    def state(self) -> State | None:
        if self.seen is not None:
            return self.seen
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
    Case("P1", "owned-page-in-free-list", HELD, Answer(available=16), [1, 2, 3, 4], exact=True),
    # A target may let a group's frees act at once, and has then one page more.
    Case("P2", "available-deficit", HELD, Answer(available=8)),
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


# Two pages of two slots on either side: full slots 2 … 5, swa slots 2 … 5; 4 + 2 entries and the last.
PAIR = Config("swa", 4, 2, swa_size=4)
BOTH = {"full": 2, "swa": 2}


def pair(
    mapping: list[int],
    free: tuple[int, ...] = (2,),
    swa: tuple[int, ...] = (2,),
    sizes: dict[str, int] = BOTH,
) -> State:
    """After new(2) both sides have page 2 left."""
    return State([*free], [], sides={"swa": Lists([*swa], [])}, mappings={"swa": mapping}, sizes=sizes)


def twos(slots: list[int] | None, peers: list[int]) -> Answer:
    return Answer(slots, available=2, peers={"swa": peers})


MAPPED = [0, 0, 2, 3, 0, 0, -1]
UNMAPPED = [0] * 6 + [-1]
LOST = (new(2), ops.FreeSwa(0))
FREED = (new(2), ops.Free((0,)))
FOUR = Answer(available=4)
ALL = {"full": 4, "swa": 4}
WRONG_PAIRS = [
    Case("P10", "mapping-not-there (swa)", (new(2),), Answer([2, 3], available=2), config=PAIR),
    Case("P10", "mapping-not-there (swa)", (new(2),), twos([2, 3], [2]), config=PAIR),
    Case("P10", "live-slot-unmapped (swa)", (new(2),), twos([2, 3], [2, 0]), config=PAIR),
    Case("P10", "stale-entry (swa)", (ops.ExtendTail(-1, 2),), twos([2, 3], [0, 3]), config=PAIR),
    Case("P3", "padding-page-handed-out (swa)", (new(2),), twos([2, 3], [1, 2]), config=PAIR),
    Case("P9", "slot-out-of-range (swa)", (new(2),), twos([2, 3], [6, 7]), config=PAIR),
    Case("P4", "not-one-page (swa)", (new(2),), twos([2, 3], [2, 4]), config=PAIR),
    Case(
        "P1", "page-handed-out-twice (swa)", (new(1, 1),), Answer([2, 4], peers={"swa": [2, 2]}), config=PAIR
    ),
    Case(
        "P1",
        "owned-page-handed-out (swa)",
        (new(2), new(2)),
        Answer([4, 5], peers={"swa": [2, 3]}),
        config=PAIR,
    ),
    Case(
        "P5",
        "not-last-loc-plus-one (swa)",
        (new(1), ops.Decode((0,))),
        twos([3], [5]),
        config=PAIR,
    ),
    Case(
        "P14",
        "other-slots (swa)",
        (new(2),),
        twos([2, 3], [4, 5]),
        config=PAIR,
        exact=True,
        seen=pair([0, 0, 4, 5, 0, 0, -1], swa=(1,)),
    ),
    Case(
        "P10", "mapping-end (swa)", (new(2),), twos([2, 3], [2, 3]), config=PAIR, seen=pair([*MAPPED[:-1], 0])
    ),
    Case(
        "P9", "mapping-size (swa)", (new(2),), twos([2, 3], [2, 3]), config=PAIR, seen=pair([0, 0, 2, 3, -1])
    ),
    Case(
        "P10", "live-slot-unmapped (swa)", (new(2),), twos([2, 3], [2, 3]), config=PAIR, seen=pair(UNMAPPED)
    ),
    Case(
        "P10",
        "wrong-peer (swa)",
        (new(2),),
        twos([2, 3], [2, 3]),
        config=PAIR,
        seen=pair([0, 0, 3, 2, 0, 0, -1]),
    ),
    Case(
        "P10",
        "stale-entry (swa)",
        LOST,
        Answer(available=2),
        config=PAIR,
        seen=pair(MAPPED, swa=(1, 2), sizes={"full": 2, "swa": 4}),
    ),
    Case(
        "P10",
        "stale-entry-of-free-page (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(MAPPED, (1, 2), (1, 2), ALL),
    ),
    Case("P2", "leaked-page (swa)", FREED, FOUR, config=PAIR, seen=pair(UNMAPPED, (1, 2), (2,), ALL)),
    Case(
        "P1",
        "duplicate-in-free-list (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (1, 1), ALL),
    ),
    Case(
        "P3",
        "padding-page-in-free-list (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (0, 2), ALL),
    ),
    Case(
        "P9",
        "unknown-page-in-free-list (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (3, 2), ALL),
    ),
    Case(
        "P14",
        "free-list-order (swa)",
        FREED,
        FOUR,
        config=PAIR,
        exact=True,
        seen=pair(UNMAPPED, (1, 2), (2, 1), ALL),
    ),
    Case(
        "P2",
        "swa-size",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (1, 2), {"full": 4, "swa": 2}),
    ),
    Case("P2", "full-size", FREED, FOUR, config=PAIR, seen=pair(UNMAPPED, (1, 2), (1, 2), {"swa": 4})),
    Case(
        "P6",
        REFUSED + "leaked-page (swa)",
        (new(5),),
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (2,), ALL),
    ),
    Case(
        "P6",
        REFUSED + "live-slot-unmapped (swa)",
        (new(2), new(4)),
        twos(None, []),
        config=PAIR,
        seen=pair(UNMAPPED),
    ),
    Case(
        "P3",
        "misuse-corrupts free-swa-of-unmapped",
        (*LOST, ops.Misuse("free-swa-of-unmapped")),
        Answer(available=2),
        config=PAIR,
        seen=pair(UNMAPPED, swa=(0, 1, 2), sizes={"full": 2, "swa": 6}),
    ),
    Case(
        "P2",
        "side-not-shown (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=State([1, 2], [], mappings={"swa": UNMAPPED}, sizes=ALL),
    ),
]

# Two device pages of two slots under two logical ones.
DEVICE = Config("hisparse", 4, 2, ratio=1)
ONE = (new(2), ops.DeviceBuffer(0, 1))
TWO = (new(2), ops.DeviceBuffer(0, 2))
WRONG_BUFFERS = [
    Case("P1", "buffer-slot-twice", TWO, Answer([2, 3, 2, 3], available=0), config=DEVICE),
    Case("P3", "padding-page-in-buffer", ONE, Answer([0, 1], available=2), config=DEVICE),
    Case("P9", "slot-out-of-range (device)", ONE, Answer([6, 7], available=2), config=DEVICE),
    Case("P1", "owned-page-in-buffer", (new(2, 2), ONE[1]), Answer([4, 5], available=0), config=DEVICE),
    Case("P4", "part-of-page-in-buffer", ONE, Answer([2, 4], available=2), config=DEVICE),
    Case("P8", "wrong-length", TWO, Answer([2, 3], available=2), config=DEVICE),
]

# One page in each of two classes: pages 2 and 3.
SHARDS = Config("page-interleave", 1, 1, shards=2)
WRONG_DEALS = [
    Case("P14", "rotation-bases", (new(1),), Answer([2], available=0, bases=[1]), config=SHARDS),
    Case("P14", "rotation-bases", (new(1),), Answer([2], available=0), config=SHARDS),
    Case("P4", "page-of-other-class", (new(1),), Answer([3], available=0, bases=[0]), config=SHARDS),
    Case("P3", "padding-page-handed-out", (new(1),), Answer([1], available=0, bases=[0]), config=SHARDS),
    Case(
        "P6",
        REFUSED + "rotation-bases",
        (new(3),),
        Answer(available=2, bases=[0]),
        config=SHARDS,
        seen=State([2], [], sides={"class 1": Lists([3], [])}, sizes={"aggregate": 2}),
    ),
    Case(
        "P2",
        "aggregate-size",
        (new(1),),
        Answer([2], available=0, bases=[0]),
        config=SHARDS,
        seen=State([], [], sides={"class 1": Lists([3], [])}, sizes={"aggregate": 2}),
    ),
]
BUILT = Case(
    "P16",
    "not-forwarded debug_print",
    (new(5),),
    Answer(FIVE, None, 8, damage=damaged("not-forwarded", "debug_print")),
)
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
