"""Relations: the other trace, worked out by hand; each fires on an offender made for it, and on no other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.model import calls, ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.model.ops import Op
from kvproof.model.trace import Trace
from kvproof.properties.failure import Found
from kvproof.properties.relations import RELATIONS, Relation, check_paths, check_relation
from kvproof.properties.run import run_trace
from tests.model.strategies import SMALL, configs, new, op_lists, outcomes, rows
from tests.properties.page_pool import PagePool, back, front
from tests.properties.paired_pools import SwaPools
from tests.properties.subjects import LAWFUL, PoolTarget

POOL = Config("paged", 24, 4)  # 6 pages
SORTED = Config("paged", 24, 4, need_sort=True)
NAMED = {relation.name: relation for relation in RELATIONS}
EACH = pytest.mark.parametrize("relation", RELATIONS, ids=list(NAMED))


def other(name: str, *trace: Op, config: Config = POOL) -> list[Op] | None:
    """The other trace of a relation."""
    varied = NAMED[name].vary(Trace(config, trace))
    assert varied is None or varied.config == config
    return None if varied is None else list(varied.ops)


def ask(target: Target, relation: Relation, *trace: Op, config: Config = POOL) -> Found | None:
    """What a relation says to a trace that the target passes."""
    whole = Trace(config, trace)
    result = run_trace(target, whole, record=True)
    assert result.failures == []
    return check_relation(target, whole, result, relation)


# --- the other trace ------------------------------------------------------------------------------


def test_every_relation_is_named():
    assert {name: relation.property_id for name, relation in NAMED.items()} == {
        "repeat": "P14",
        "rows-one-by-one": "P17",
        "extend-as-decodes": "P17",
        "other-frees": "P16",
        "frees-by-side": "P16",
    }


def test_repeat_is_the_same_trace():
    assert other("repeat", new(4), ops.Clear()) == [new(4), ops.Clear()]


def test_a_granted_batch_is_split_by_rows():
    batch = ops.Extend(((1, 1), (ops.NEW_ROW, 2), (4, 1), (3, 5)))
    # Two rows live: 4 is row 0; 3 is row 1 again, which counts once. Refused batches stay whole.
    assert other("rows-one-by-one", new(4, 4), batch, new(16, 16), new(1), ops.Decode((0, 1))) == [
        new(4),
        new(4),
        ops.Extend(((1, 1),)),
        new(2),
        ops.Extend(((0, 1),)),
        new(16, 16),
        new(1),
        ops.Decode((0, 1)),
    ]


def test_without_a_granted_batch_there_is_nothing_to_split():
    assert other("rows-one-by-one", new(4), new(16, 16), ops.Extend(())) is None
    assert other("rows-one-by-one", new(4, 4), config=SORTED) is None


def test_a_row_that_grows_can_do_so_by_decodes():
    # Not: a row with no tokens, a batch, nothing, too much for the pool.
    trace = [new(0, 3), ops.Extend(((3, 2),)), ops.Extend(((0, 2),)), ops.Extend(((0, 1), (1, 1)))]
    rest = [ops.Extend(((0, 0),)), ops.Extend(((1, 30),))]
    assert other("extend-as-decodes", *trace, *rest) == [
        trace[0],
        ops.Decode((1,)),
        ops.Decode((1,)),
        *trace[2:],
        *rest,
    ]


def test_where_nothing_grows_alone_there_are_no_decodes():
    assert other("extend-as-decodes", new(4), ops.Decode((0,))) is None
    assert other("extend-as-decodes", new(4), ops.Extend(((0, 1),)), config=SORTED) is None
    token = Config("token", 6, 1)
    assert other("extend-as-decodes", new(4), ops.Extend(((0, 1),)), config=token) is None


@pytest.mark.parametrize(
    ("op", "varied"),
    [
        # Of 10 tokens on three pages: keep 5 rounds up to 8.
        (ops.Free((0,), 5), ops.FreeSegment(0, 8)),
        (ops.Free((0,)), ops.FreeSegment(0, 0)),
        (
            ops.Free((0,), 0, ops.BACKWARDS),
            ops.FreeSegment(0, 0),
        ),  # the same pages, whatever the order of the slots
        (ops.Free((0,), 9), ops.Free((0,), 9)),  # keeps all: a segment cannot say so
        (ops.FreeSegment(0, 7), ops.FreePages(0, 1)),  # rounds down to 4
        (ops.FreeSegment(0, 10), ops.FreePages(0, 2)),
        (ops.FreePages(0, 1), ops.Free((0,), 4)),
        (ops.FreePages(0, 3), ops.Free((0,), 10)),
        (ops.FreePages(0, 4), ops.Free((0,), 0)),  # 4 modulo 3 pages + 1
        (ops.FreeSegments(0, 4, (1,)), ops.FreeSegments(0, 4, (1,))),
    ],
)
def test_a_release_has_another_form(op, varied):
    expected = None if op == varied else [new(10), varied]
    assert other("other-frees", new(10), op) == expected


def test_a_release_of_many_rows_or_of_tokens_has_no_other_form():
    assert other("other-frees", new(4, 4), ops.Free((0, 1))) is None
    assert other("other-frees", new(4), ops.Free((0,)), config=Config("token", 6, 1)) is None


SWA = Config("swa", 24, 4, swa_size=24)


def test_a_free_of_one_row_can_be_done_side_by_side():
    # Of 10 tokens on three pages: keep 5 rounds up to 8; keep 9 keeps all; several rows are left alone.
    trace = [new(10, 4), ops.Free((0,), 5), ops.Free((0,), 8), ops.Free((0, 1))]
    assert other("frees-by-side", *trace, config=SWA) == [
        trace[0],
        ops.FreeSwa(0, 8),
        ops.FreeFull(0, 8),
        trace[2],  # 8 of 8 tokens
        trace[3],
    ]
    assert other("frees-by-side", new(4), ops.FreeSegment(0), config=SWA) is None
    # Where no peers can be released alone there is no other way.
    assert other("frees-by-side", new(4), ops.Free((0,))) is None
    ring = Config("swa-ring", 24, 4, ring=5, request_rows=1)
    assert other("frees-by-side", new(4), ops.Free((0,)), config=ring) is None


def test_other_frees_keep_to_what_the_kind_knows():
    """There are no page ids at the sliding-window allocator: segments become frees, and page ids nothing."""
    assert other("other-frees", new(10), ops.FreeSegment(0, 7), config=SWA) == [new(10), ops.Free((0,), 4)]
    assert other("other-frees", new(10), ops.FreePages(0), config=SWA) is None


def test_what_has_lost_its_peers_is_freed_in_one_way():
    """A segment wants a peer for every page, and so does a single slot that is freed on both sides."""
    trace = (new(10), ops.FreeSwa(0, 0, 4), ops.Free((0,)))
    assert other("other-frees", *trace, config=SWA) is None
    assert other("frees-by-side", *trace, config=SWA) == [*trace[:2], ops.FreeSwa(0, 0), ops.FreeFull(0, 0)]
    single = Config("swa", 24, 1, swa_size=24)
    assert other("frees-by-side", new(4), ops.Free((0,)), config=single) is not None
    assert other("frees-by-side", new(4), ops.FreeSwa(0, 1, 1), ops.Free((0,)), config=single) is None


def test_decodes_are_extends_where_they_take_from_the_same_pools():
    trace = (new(4), ops.Extend(((0, 1),)))
    assert other("extend-as-decodes", *trace, config=SWA) == [new(4), ops.Decode((0,))]
    for kind in ("hisparse", "hisparse-v4", "page-interleave", "mamba", "pure-swa"):
        assert other("extend-as-decodes", *trace, config=SMALL[kind]) is None


@EACH
@settings(max_examples=150)
@given(config=configs(), trace=op_lists(misuse=False))
def test_the_other_trace_comes_to_the_same_rows(relation, config, trace):
    """On the model itself: the same rows and pages, and the same slots where they must be."""
    varied = relation.vary(Trace(config, tuple(trace)))
    if varied is None:
        return
    one, two = model_for(config), model_for(config)
    answers = [outcomes(model, *some) for model, some in ((one, trace), (two, varied.ops))]
    assert [length for _, length in rows(one)] == [length for _, length in rows(two)]
    assert len(one.free_pages) + len(one.staged) == len(two.free_pages) + len(two.staged)
    if relation.property_id == "P17":
        flat = [[slot for answer in run if isinstance(answer, list) for slot in answer] for run in answers]
        assert flat[0] == flat[1]
        assert rows(one) == rows(two)


# --- offenders ------------------------------------------------------------------------------------


def moody() -> PoolTarget:
    """Picks from the front of its pool in one life and from the back in the next."""
    target = PoolTarget(lambda config: PagePool(config, front if target.built % 2 else back))
    return target


class _LosesFirstOfBatch(PagePool):
    """Loses a page whenever a batch is one new row; larger batches are served well."""

    def extend(self, prefix_lens, seq_lens, last_locs):
        slots = super().extend(prefix_lens, seq_lens, last_locs)
        if len(seq_lens) == 1 and slots and prefix_lens == [0] and self.free:
            self.free.pop()
        return slots


class _DecodesIntoNewPages(PagePool):
    """A decode step starts a page for every row, full page or not."""

    def decode(self, seq_lens, last_locs):
        return [slot for _ in seq_lens for slot in [self.pick(self.free) * self.config.page_size]]


class _LosesSegments(PagePool):
    """`free_segment` releases all pages but one."""

    def free_segment(self, slots):
        super().free_segment(slots[self.config.page_size :])


class _LosesFullSide(SwaPools):
    """`free_full` releases nothing."""

    def call(self, call):
        lost = isinstance(call, calls.FreeCall) and call.method == "free_full"
        return None if lost else super().call(call)


@pytest.mark.parametrize(
    ("name", "target", "trace", "fault"),
    [
        ("repeat", moody(), (new(4),), ("P14", "repeat", "slots-differ")),
        (
            "rows-one-by-one",
            PoolTarget(lambda config: _LosesFirstOfBatch(config, front)),
            (new(4, 4),),
            ("P2", "Extend", "available-deficit"),
        ),
        (
            "extend-as-decodes",
            PoolTarget(lambda config: _DecodesIntoNewPages(config, front)),
            (new(1, 1), ops.Extend(((0, 1),))),
            ("P5", "Decode", "not-last-loc-plus-one"),
        ),
        (
            "other-frees",
            PoolTarget(lambda config: _LosesSegments(config, front)),
            (new(8), ops.Free((0,))),
            ("P2", "FreeSegment", "available-deficit"),
        ),
        (
            "frees-by-side",
            PoolTarget(lambda config: _LosesFullSide(config, front)),
            (new(8), ops.Free((0,))),
            ("P2", "FreeFull", "available-deficit"),
        ),
    ],
)
def test_each_relation_finds_its_offender_and_no_other_does(name, target, trace, fault):
    config = SWA if name == "frees-by-side" else POOL
    found = {relation.name: ask(target, relation, *trace, config=config) for relation in RELATIONS}
    own = found.pop(name)
    assert own is not None
    assert name_of(own) == fault
    if name == "repeat":  # whoever does not agree with itself fails whatever is compared
        assert own.trace == Trace(POOL, trace)
        return
    assert found == dict.fromkeys(found)
    # What fails in the other trace is an ordinary failure, and that trace alone shows it.
    assert list(own.trace.ops) == other(name, *trace, config=config)
    assert run_trace(target, own.trace).get(own.failure.fingerprint) is not None


@EACH
@pytest.mark.parametrize("kind", LAWFUL)
def test_a_lawful_choice_is_no_offence(kind, relation):
    """Also where a batch, split, gets other pages: the contract fixes no choice."""
    trace = (
        new(4, 9, 1),
        ops.Extend(((0, 5),)),
        ops.Free((1,), 4),
        ops.Free((0,)),
        new(3, 3),
        ops.FreePages(0),
    )
    for config in (POOL, SORTED):
        assert ask(PoolTarget(LAWFUL[kind]), relation, *trace, config=config) is None


@EACH
def test_what_a_target_lacks_is_not_asked_of_it(relation):
    target = PoolTarget(lambda config: _LosesSegments(config, front), lacks=frozenset({"FreeSegment"}))
    assert ask(target, relation, new(8), ops.Free((0,))) is None


@EACH
def test_null_agrees_with_itself(relation):
    assert (
        ask(Null(Ticket()), relation, new(4, 9), ops.Extend(((0, 3),)), ops.Free((1,)), ops.Decode((0,)))
        is None
    )


def name_of(found: Found | None) -> tuple[str, str, str] | None:
    """The parts of a fingerprint that differ between relations."""
    return None if found is None else (found.failure.property_id, found.failure.op, found.failure.divergence)


def test_paths_must_agree_slot_for_slot():
    trace = Trace(POOL, (new(4, 4), ops.Free((0,)), new(5)))

    def asked(target: PoolTarget) -> Found | None:
        return check_paths(target, trace, run_trace(target, trace, record=True))

    def path(make, name: str) -> PoolTarget:
        return PoolTarget(make, path=name)

    one = path(LAWFUL["back"], "kernels")
    assert asked(one) is None
    one.sibling = path(LAWFUL["back"], "torch")
    assert asked(one) is None
    one.sibling = path(LAWFUL["highest"], "torch")
    assert name_of(asked(one)) == ("P16", "path-torch", "slots-differ")
    one.sibling = path(lambda config: _LosesFirstOfBatch(config, back), "torch")
    assert name_of(asked(one)) == ("P16", "path-torch", "only-one-fails")
