"""Hypothesis strategies for configs and ops, and short ways to drive a model; for the tests of all folders.

The ops drawn here are any ops at all, not those of a caller with taste (`kvproof.properties.generate`): every
list of them must be valid for every config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies as st

from kvproof.corpus.format import OUTCOME_WORDS
from kvproof.model import ops
from kvproof.model.base import AllocatorModel, Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, COMPRESSION, SINGLE_SLOT, Config
from kvproof.model.ops import MISUSES, Op

_ROW = st.integers(-2, 9)
_AMOUNT = st.one_of(st.integers(0, 12), st.integers(-5, 300), st.just(1 << 40))
_KEEP = st.integers(0, 20)

_ENTRIES = st.lists(st.tuples(_ROW, _AMOUNT), max_size=4).map(tuple)
_NEW_ROWS = st.lists(st.tuples(st.just(ops.NEW_ROW), st.integers(1, 9)), min_size=1, max_size=3).map(tuple)

_LAWFUL: Final[dict[type[Op], st.SearchStrategy[Op]]] = {
    ops.Extend: st.one_of(_ENTRIES, _NEW_ROWS).map(ops.Extend),
    ops.Decode: st.one_of(st.lists(_ROW, max_size=5).map(tuple), st.just(tuple(range(10)))).map(ops.Decode),
    ops.Alloc: st.integers(-1, 40).map(ops.Alloc),
    ops.Free: st.builds(ops.Free, st.lists(_ROW, max_size=3).map(tuple), _KEEP, st.integers(0, 5)),
    ops.FreeSegment: st.builds(ops.FreeSegment, _ROW, _KEEP),
    ops.FreeSegments: st.builds(
        ops.FreeSegments, _ROW, _KEEP, st.lists(st.integers(0, 5), max_size=3).map(tuple)
    ),
    ops.FreePages: st.builds(ops.FreePages, _ROW, _KEEP),
    ops.GroupBegin: st.just(ops.GroupBegin()),
    ops.GroupEnd: st.just(ops.GroupEnd()),
    ops.Clobber: st.just(ops.Clobber()),
    ops.Clear: st.just(ops.Clear()),
    ops.Resize: st.builds(ops.Resize, st.integers(-1, 12), st.integers(0, 20), st.integers(-1, 12)),
    ops.ExtendTail: st.builds(ops.ExtendTail, _ROW, _AMOUNT, _KEEP),
    ops.FreeSwa: st.builds(ops.FreeSwa, _ROW, _KEEP, _KEEP),
    ops.FreeSwaSegment: st.builds(ops.FreeSwaSegment, _ROW, _KEEP, _KEEP),
    ops.FreeFull: st.builds(ops.FreeFull, _ROW, _KEEP),
    ops.FreeFullSegment: st.builds(ops.FreeFullSegment, _ROW, _KEEP),
    ops.Remap: st.builds(ops.Remap, _ROW, _ROW, _KEEP, st.integers(-1, 3)),
    ops.ExtendLogical: _ENTRIES.map(ops.ExtendLogical),
    ops.FreeDevice: st.builds(ops.FreeDevice, _ROW, _KEEP, _KEEP),
    ops.DeviceBuffer: st.builds(ops.DeviceBuffer, _ROW, st.integers(-1, 14)),
    ops.FreeBuffer: st.builds(ops.FreeBuffer, st.integers(-1, 5)),
    ops.AllocGroupBegin: st.integers(-1, 14).map(ops.AllocGroupBegin),
    ops.AllocGroupEnd: st.just(ops.AllocGroupEnd()),
    ops.Chain: st.builds(ops.Chain, _ROW, _AMOUNT),
}
_MISUSE = st.builds(ops.Misuse, st.sampled_from(MISUSES), _ROW)
_ALWAYS: Final = (ops.Extend, ops.Extend, ops.Decode, ops.Decode, ops.Free)
"""Drawn more often than others: with no rows nearly every op comes to nothing."""

_PAGE_SIZES: Final = {"hisparse-v4": (4, 8, 16), "swa-ring": (2, 3, 4)}


@st.composite
def configs(draw: st.DrawFn, allocators: Sequence[str] = ALLOCATORS) -> Config:
    """Any of these allocators with a small pool; sometimes a window, or a size that no page divides."""
    kind = draw(st.sampled_from(allocators))
    single = kind in SINGLE_SLOT
    page_size = 1 if single else draw(st.sampled_from(_PAGE_SIZES.get(kind, (1, 2, 3, 4, 16))))
    pages = st.integers(1, 12)
    spare = draw(st.integers(0, page_size - 1))
    more: dict[str, Any] = {}
    match kind:
        case "token" | "paged":
            more = {"page_offset": draw(st.sampled_from([0, 0, 1000]))}
        case "swa":
            more = {"swa_size": draw(pages) * page_size}
        case "swa-ring":
            more = {"ring": draw(st.integers(1, 9)), "request_rows": draw(st.integers(0, 3))}
        case "hisparse":
            more = {"ratio": draw(st.integers(1, 3))}
        case "hisparse-v4":
            more = {
                "swa_size": draw(pages) * page_size,
                "device_size": draw(pages) * page_size // COMPRESSION,
            }
        case "page-interleave":
            more = {"shards": draw(st.integers(2, 4))}
    return Config(
        kind,
        draw(pages) * page_size + spare,
        page_size,
        need_sort=draw(st.booleans()) and kind != "mamba",
        row_dtype=draw(st.sampled_from(["int64", "int32"])),
        **more,
    )


def op_lists(*, misuse: bool = True, most: int = 40, allocator: str = "") -> st.SearchStrategy[list[Op]]:
    """Lists of ops; misuse: with calls that the contract forbids among them. allocator: of those that mean
    something to this kind alone."""
    known = frozenset(_LAWFUL) if not allocator else _knows(allocator)
    strategies = [_LAWFUL[op_type] for op_type in (*_LAWFUL, *_ALWAYS) if op_type in known]
    one = st.one_of(*strategies, *([_MISUSE] * (len(strategies) // 4) if misuse else []))
    # Left alone, Hypothesis draws about five of them.
    return st.one_of(st.lists(one, max_size=most), st.lists(one, min_size=most // 2, max_size=most))


SMALL: Final = {
    config.allocator: config
    for config in (
        Config("token", 8, 1),
        Config("paged", 32, 4),
        Config("swa", 32, 4, swa_size=24),
        Config("swa-ring", 32, 4, ring=5, request_rows=3),
        Config("pure-swa", 8, 1),
        Config("hisparse", 16, 4, ratio=2),
        Config("hisparse-v4", 64, 8, swa_size=48, device_size=12),
        Config("mamba", 8, 1),
        Config("page-interleave", 16, 4, shards=2),
    )
}
"""A small pool of each kind: eight full or logical pages of four slots (v4: eight), six on the swa side, four
or six on the device side, eight in all over two shards."""


def _knows(allocator: str) -> frozenset[type[Op]]:
    """What a kind knows, at whatever page size."""
    return model_for(SMALL[allocator]).knows | {ops.Alloc}


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


def sides(model: AllocatorModel) -> dict[str, tuple[list[int], list[int]]]:
    """The same of each second pool, by name; copies."""
    return {name: (list(pool.free), list(pool.staged)) for name, pool in model.sides.items()}


def mapped(model: AllocatorModel, side: str = "swa") -> dict[int, int]:
    """What a side mapping says, without what it says nothing of."""
    return {slot: peer for slot, peer in enumerate(model.mappings[side][:-1]) if peer}


def rows(model: AllocatorModel) -> list[tuple[list[int], int]]:
    """Pages and length of each live row; copies."""
    return [(list(row.pages), row.length) for row in model.rows]
