"""Hypothesis strategies for configs and ops, and short ways to drive a model; for the tests of all folders.

The ops drawn here are any ops at all, not those of a caller with taste (`kvproof.properties.generate`): every
list of them must be valid for every config.
"""

from __future__ import annotations

from hypothesis import strategies as st

from kvproof.corpus.format import OUTCOME_WORDS
from kvproof.model import ops
from kvproof.model.base import AllocatorModel, Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.model.ops import MISUSES, Op

_ROW = st.integers(-2, 9)
_AMOUNT = st.one_of(st.integers(0, 12), st.integers(-5, 300), st.just(1 << 40))
_KEEP = st.integers(0, 20)

LAWFUL = st.one_of(
    st.lists(st.tuples(_ROW, _AMOUNT), max_size=4).map(lambda entries: ops.Extend(tuple(entries))),
    st.lists(st.tuples(st.just(ops.NEW_ROW), st.integers(1, 9)), min_size=1, max_size=3).map(
        lambda entries: ops.Extend(tuple(entries))
    ),
    st.lists(_ROW, max_size=5).map(lambda rows: ops.Decode(tuple(rows))),
    st.just(ops.Decode(tuple(range(10)))),
    st.integers(-1, 40).map(ops.Alloc),
    st.builds(
        lambda rows, *rest: ops.Free(tuple(rows), *rest), st.lists(_ROW, max_size=3), _KEEP, st.integers(0, 5)
    ),
    st.builds(ops.FreeSegment, _ROW, _KEEP),
    st.builds(ops.FreeSegments, _ROW, _KEEP, st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    st.builds(ops.FreePages, _ROW, _KEEP),
    st.sampled_from([ops.GroupBegin(), ops.GroupEnd(), ops.Clobber(), ops.Clear()]),
    st.builds(ops.Resize, st.integers(-1, 12), st.integers(0, 20)),
)
OPS = st.one_of(LAWFUL, LAWFUL, LAWFUL, st.builds(ops.Misuse, st.sampled_from(MISUSES), _ROW))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any allocator with a small pool; sometimes a window, or a size that no page divides."""
    allocator = draw(st.sampled_from(["token", "paged", "paged"]))
    page_size = 1 if allocator == "token" else draw(st.sampled_from([1, 2, 3, 4, 16]))
    pages = draw(st.integers(1, 12))
    return Config(
        allocator,
        pages * page_size + draw(st.integers(0, page_size - 1)),
        page_size,
        need_sort=draw(st.booleans()),
        row_dtype=draw(st.sampled_from(["int64", "int32"])),
        page_offset=draw(st.sampled_from([0, 0, 1000])),
    )


def op_lists(*, misuse: bool = True, most: int = 40) -> st.SearchStrategy[list[Op]]:
    """Lists of ops; misuse: with calls that the contract forbids among them."""
    one = OPS if misuse else LAWFUL
    # Left alone, Hypothesis draws about five of them.
    return st.one_of(st.lists(one, max_size=most), st.lists(one, min_size=most // 2, max_size=most))


def fresh(pages: int, page_size: int, allocator: str = "paged", **options: object) -> AllocatorModel:
    """A model with this many pages."""
    return model_for(Config(allocator, pages * page_size, page_size, **options))  # type: ignore[arg-type]


def outcome(model: AllocatorModel, op: Op) -> str | list[int]:
    """Apply one op; the right answer in the words of a trace file."""
    expectation = model.apply(op)
    if expectation.outcome is Outcome.SLOTS:
        assert expectation.slots is not None
        return expectation.slots
    assert expectation.slots is None
    return OUTCOME_WORDS[expectation.outcome]


def outcomes(model: AllocatorModel, *trace: Op) -> list[str | list[int]]:
    """Apply ops in turn; the right answer to each."""
    return [outcome(model, op) for op in trace]


def new(*tokens: int) -> ops.Extend:
    """An extend that opens one row for each length."""
    return ops.Extend(tuple((ops.NEW_ROW, count) for count in tokens))


def lists(model: AllocatorModel) -> tuple[list[int], list[int]]:
    """Free and staged pages in order; copies."""
    return list(model.free_pages), list(model.staged)


def rows(model: AllocatorModel) -> list[tuple[list[int], int]]:
    """Pages and length of each live row; copies."""
    return [(list(row.pages), row.length) for row in model.rows]
