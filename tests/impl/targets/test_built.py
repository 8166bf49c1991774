"""Our allocators of every kind: built from a config as it says, and seen from inside.

Expected lists, mappings and sizes are worked out by hand from the specification (§2 to §8). Not covered: what
sequences of calls come to (`test_ours.py`).
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvproof.impl.targets import built
from kvproof.impl.targets.ours import Kvproof
from kvproof.impl.targets.planted.catalogue import PLANTS
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Lists, State, Ticket
from kvproof.impl.targets.tensors import not_forwarded
from kvproof.model import calls
from kvproof.model.config import ALLOCATORS, Config
from tests.model.strategies import SMALL

OURS = built.classes_of("kvproof.impl")


def made(config: Config, *, kernels: bool = False) -> Any:
    return built.construct(OURS, config, "cpu", kernels=kernels)


def test_the_classes_are_those_of_the_package_by_their_contract_names():
    assert set(OURS) == set(ALLOCATORS)
    assert {kind: cls.__name__ for kind, cls in OURS.items()} == {
        "token": "TokenToKVPoolAllocator",
        "paged": "PagedTokenToKVPoolAllocator",
        "swa": "SWATokenToKVPoolAllocator",
        "swa-ring": "SWATokenToKVPoolAllocator",
        "pure-swa": "PureSWATokenToKVPoolAllocator",
        "hisparse": "HiSparseTokenToKVPoolAllocator",
        "hisparse-v4": "DeepSeekV4HiSparseTokenToKVPoolAllocator",
        "mamba": "MambaSlotAllocator",
        "page-interleave": "PageInterleavePoolAllocator",
    }
    for cls in OURS.values():
        assert getattr(importlib.import_module(cls.__module__), cls.__name__) is cls
        assert cls.__module__.startswith("kvproof.impl.")


def test_a_copy_has_classes_of_its_own_of_every_kind():
    """Were one of them ours, its faults could not be found."""
    copied = Planted(Ticket(f":{PLANTS[0].id}", PLANTS[0].path)).classes
    assert set(copied) == set(ALLOCATORS)
    assert not {cls.__module__ for cls in copied.values()} & {cls.__module__ for cls in OURS.values()}


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_a_config_is_built_as_it_says(allocator, need_sort, checked):
    config = replace(SMALL[allocator], need_sort=need_sort and allocator != "mamba", checked=checked)
    pool = made(config)
    assert type(pool) is OURS[allocator]
    assert pool.checked is checked
    if allocator != "mamba":
        assert (pool.page_size, pool.need_sort) == (config.page_size, need_sort)
    inner = ("full_attn_allocator", "swa_attn_allocator", "logical_attn_allocator", "hisparse_attn_allocator")
    for name in inner:
        if (part := getattr(pool, name, None)) is not None:
            assert (part.checked, part.need_sort) == (checked, need_sort)


SIZES = {
    "token": {"size": 8},
    "paged": {"size": 32},
    "swa": {"size_full": 32, "size_swa": 24, "size": 24},
    "swa-ring": {"size_full": 32, "swa_req_ring": True, "swa_ring_cost_tokens": 8},
    "pure-swa": {"size_swa": 8},
    "hisparse": {"size_full": 32},
    "hisparse-v4": {"size_full": 64, "size_swa": 48, "hisparse_page_size": 2},
    "mamba": {"size": 8},
    "page-interleave": {"shard_size": 2},
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_its_sizes_are_those_of_the_config(allocator):
    """A ring of 5 tokens takes 2 pages of 4; the logical side is twice the device's 16 slots."""
    pool = made(SMALL[allocator])
    assert {name: getattr(pool, name) for name in SIZES[allocator]} == SIZES[allocator]


@pytest.mark.parametrize("allocator", ["paged", "swa", "swa-ring", "hisparse", "hisparse-v4"])
@pytest.mark.parametrize("kernels", [False, True])
def test_the_path_is_taken_on_every_side(allocator, kernels):
    pool = made(SMALL[allocator], kernels=kernels)
    parts = [pool, *(getattr(pool, name, None) for name in ("logical_attn_allocator", "full_attn_allocator"))]
    parts += [getattr(pool, name, None) for name in ("swa_attn_allocator", "hisparse_attn_allocator")]
    assert {part.use_triton_kernels for part in parts if part is not None} == {kernels}


def test_where_the_number_of_new_pages_may_be_told():
    counts = {kind for kind, cls in OURS.items() if built.counts_pages(cls)}
    assert counts >= {"paged", "swa", "hisparse", "hisparse-v4", "page-interleave"}
    assert not counts & {"token", "mamba"}


# --- from inside ----------------------------------------------------------------------------------


def pages(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


# Of the pools of `SMALL`, one row of a page at each and nothing released. A page of the swa side, or of the
# device's, is its own page 1. Mappings have an entry for each slot, padding page included, and a -1.
_ONE = [0] * 4 + [4, 5, 6, 7]
STATES = {
    "token": State(pages(2, 8), []),
    "paged": State(pages(2, 8), []),
    "swa": State(
        pages(2, 8),
        [],
        sides={"swa": Lists(pages(2, 6), [])},
        mappings={"swa": [*_ONE, *[0] * 28, -1]},
        sizes={"full": 28, "swa": 20},
    ),
    "swa-ring": State(pages(2, 8), [], mappings={"swa": [0] * 36 + [-1]}, sizes={"full": 28, "swa": 3 * 8}),
    "pure-swa": State(pages(2, 8), [], sizes={"full": 7, "swa": 7}),
    "hisparse": State(
        pages(2, 8),
        [],
        sides={"device": Lists(pages(2, 4), [])},
        mappings={"device": [*_ONE, *[0] * 28, -1]},
    ),
    # Eight tokens are two blocks of four: one device page of two compressed slots, which leaves five.
    "hisparse-v4": State(
        pages(2, 8),
        [],
        sides={"swa": Lists(pages(2, 6), []), "device": Lists(pages(2, 6), [])},
        mappings={
            "swa": [*[0] * 8, *pages(8, 15), *[0] * 56, -1],
            "device": [0, 0, 2, 3, *[0] * 14, -1],
        },
        sizes={"full": 5 * 2 * 4, "swa": 40},
    ),
    "mamba": State(pages(2, 8), []),
    # Pages 2, 4, 6, 8 are of class 0, the others of class 1; the first is drawn from class 0.
    "page-interleave": State(
        [4, 6, 8], [], sides={"class 1": Lists([3, 5, 7, 9], [])}, sizes={"aggregate": 28}
    ),
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_state_of_each_kind_has_its_sides_mappings_and_sizes(allocator):
    config = SMALL[allocator]
    subject = Kvproof(Ticket()).build(config)
    ps = config.page_size
    call: calls.Call = calls.AllocCall(1)
    if ps > 1:
        bases = [None] if allocator == "page-interleave" else None
        call = calls.ExtendCall([0], [ps], [-1], ps, 1, bases=bases)
    answer = subject.apply(call)
    first = 2 * ps if allocator == "page-interleave" else ps
    assert (answer.slots, answer.error) == (pages(first, first + ps - 1), None)
    assert subject.observe() == STATES[allocator]
    # The peers are told of with the answer, as the mappings say them.
    assert answer.peers == {
        "swa": {"swa": pages(4, 7)},
        "hisparse": {"device": pages(4, 7)},
        "hisparse-v4": {"swa": pages(8, 15), "device": [2, 3]},
    }.get(allocator, {})
    assert answer.bases == ([0] if allocator == "page-interleave" else None)


@pytest.mark.parametrize(
    ("allocator", "main", "sides"),
    [
        ("paged", [1], {}),
        ("swa", [1], {"swa": [1]}),
        ("swa-ring", [1], {}),
        ("hisparse", [1], {"device": [1]}),
        ("hisparse-v4", [1], {"swa": [1], "device": [1]}),
        ("page-interleave", [2], {"class 1": []}),
    ],
)
def test_what_is_staged_is_seen_on_every_side(allocator, main, sides):
    config = replace(SMALL[allocator], need_sort=True)
    subject = Kvproof(Ticket()).build(config)
    ps = config.page_size
    bases = [None] if allocator == "page-interleave" else None
    slots = subject.apply(calls.ExtendCall([0], [ps], [-1], ps, 1, bases=bases)).slots
    assert slots is not None
    assert subject.apply(calls.FreeCall(slots)).error is None
    state = subject.observe()
    assert (state.staged, {name: lists.staged for name, lists in state.sides.items()}) == (main, sides)
    assert all(entry <= 0 for mapping in state.mappings.values() for entry in mapping)


def test_a_mamba_slot_that_is_set_aside_is_on_no_list():
    subject = Kvproof(Ticket()).build(SMALL["mamba"])
    assert subject.apply(calls.AllocGroupBeginCall(3)).error is None
    assert subject.observe() == State(pages(4, 8), [])
    assert subject.apply(calls.AllocGroupEndCall()).error is None
    assert subject.observe() == State([*pages(4, 8), 1, 2, 3], [])


def test_side_mappings_are_named_with_the_slots_of_an_entry():
    found = {kind: built.sides(made(SMALL[kind]), kind) for kind in ALLOCATORS}
    names = {kind: {name: each for name, (_, each) in sides.items()} for kind, sides in found.items()}
    assert {kind: each for kind, each in names.items() if each} == {
        "swa": {"swa": 1},
        "hisparse": {"device": 1},
        "hisparse-v4": {"swa": 1, "device": 4},
    }
    for sides in found.values():
        for mapping, _ in sides.values():
            assert (mapping.dtype, int(mapping[-1])) == (torch.int64, -1)


def test_only_the_compressed_variant_wraps_an_allocator_and_it_forwards_everything():
    wraps = {kind: built.wrapped(made(SMALL[kind]), kind) for kind in ALLOCATORS}
    assert [kind for kind, inner in wraps.items() if inner is not None] == ["hisparse-v4"]
    inner = wraps["hisparse-v4"]
    assert type(inner) is OURS["swa"]
    assert not_forwarded(made(SMALL["hisparse-v4"]), inner) == []
    assert Kvproof(Ticket()).build(SMALL["hisparse-v4"]).observe().damage == ()
