"""Our allocators as targets: they hold the exact contract in lockstep, on every config, misuse included.

The kernels' path runs in processes of its own (tests/corpus, the audited lane) and on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.targets.ours import Kvproof, Reference
from kvproof.impl.targets.protocol import State, Ticket
from kvproof.impl.token import TokenToKVPoolAllocator
from kvproof.model import calls, ops
from kvproof.model.base import Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES, Op
from kvproof.model.trace import Trace
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.run import run_trace
from kvproof.properties.space import space_for
from tests.model.strategies import SMALL, configs, new, op_lists

TARGETS = pytest.mark.parametrize(
    "target", [Kvproof(Ticket()), Reference(Ticket())], ids=["kvproof", "reference"]
)


@TARGETS
def test_what_they_are(target):
    # On a CPU, "auto" is the torch path, and there is no other beside it.
    assert (target.path, target.stood_in, target.other_path()) == ("torch", (), None)
    capabilities = target.capabilities
    assert (capabilities.allocators, capabilities.exact, capabilities.lacks) == (
        ALLOCATORS,
        True,
        frozenset(),
    )
    assert capabilities.any_page_size
    assert capabilities.page_offset
    assert capabilities.checked
    assert capabilities.refuses == set(MISUSES)


SINGLE = ("free", "free_swa", "free_full", "free_group_end")
SEGMENTS = ("free_segment", "free_segments", "free_full_segment")
WAITING = {
    "token": (),
    "pure-swa": (),
    "paged": SINGLE,
    "swa": SINGLE,
    "swa-ring": SINGLE,
    # A set of pages is made unique, whichever call names them; a buffer is as large as what is mapped.
    "hisparse": (*SINGLE, *SEGMENTS, "alloc_device_buffer", "free_hisparse", "free_hisparse_indices"),
    "hisparse-v4": (*SINGLE, *SEGMENTS, "alloc_device_buffer", "free_hisparse", "free_hisparse_indices"),
    "mamba": (),
    "page-interleave": (*SINGLE, *SEGMENTS),
}
"""Calls that may wait for the device, in the words of impl's own modules."""


@TARGETS
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_what_does_not_wait_for_the_device(target, allocator):
    """All but frees of a set of pages, which a group puts off to its end; checked mode promises nothing."""
    config = SMALL[allocator]
    sync_free = target.build(config)._sync_free
    assert sync_free.isdisjoint(WAITING[allocator])
    if allocator == "mamba":
        assert sync_free == {"alloc", "free", "clear", "alloc_group_begin", "alloc_group_end"}
    else:
        assert {"alloc", "alloc_extend", "alloc_decode", "free_page_ids", "free_group_begin"} < sync_free
        assert {*SINGLE, *SEGMENTS} - {*WAITING[allocator]} <= sync_free
    assert target.build(replace(config, checked=True))._sync_free == frozenset()


def test_single_slots_need_no_set():
    """Unlike pages of several slots, but for the paged allocator, which cannot know that none comes twice."""
    swa = Kvproof(Ticket()).build(Config("swa", 8, 1, swa_size=8))._sync_free
    assert {*SINGLE, *SEGMENTS} <= swa
    paged = Kvproof(Ticket()).build(Config("paged", 8, 1))._sync_free
    assert paged.isdisjoint(SINGLE)


def test_names():
    assert (Kvproof(Ticket()).name, Reference(Ticket()).name) == ("kvproof", "reference")


@pytest.mark.parametrize(
    ("factory", "ticket", "message"),
    [
        (Kvproof, Ticket("==1.0"), "kvproof==1.0"),
        (Reference, Ticket("@/x"), "reference@/x"),
        (Reference, Ticket(path="kernels"), "reference has no kernels"),
        (Kvproof, Ticket(path="kernels"), "TRITON_INTERPRET=1"),
    ],
)
def test_what_cannot_be_had_is_a_user_error(factory, ticket, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=message):
        factory(ticket)


@TARGETS
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_a_config_is_built_as_it_says(target, need_sort, checked):
    paged = target.build(Config("paged", 18, 4, need_sort, checked))._allocator
    assert type(paged) is PagedTokenToKVPoolAllocator
    assert (paged.size, paged.page_size, paged.need_sort, paged.checked) == (18, 4, need_sort, checked)
    assert not paged.use_triton_kernels
    token = target.build(Config("token", 5, 1, need_sort, checked))._allocator
    assert type(token) is TokenToKVPoolAllocator
    assert (token.size, token.need_sort, token.checked) == (5, need_sort, checked)


def test_the_lists_are_seen_in_order():
    subject = Kvproof(Ticket()).build(Config("paged", 16, 4, need_sort=True))
    assert subject.apply(calls.AllocCall(12)).slots == list(range(4, 16))
    for pages in ([3, 1], [2]):
        assert subject.apply(calls.FreePageIdsCall(pages)).error is None
    assert subject.observe() == State([4], [3, 1, 2])


@settings(max_examples=60)
@given(config=configs(), trace=op_lists(misuse=False))
@TARGETS
def test_any_lawful_ops_come_to_the_very_slots_of_the_contract(target, config, trace):
    result = run_trace(target, Trace(config, tuple(trace)))
    assert [failure.message for failure in result.failures] == []
    assert not result.tally.skipped


@settings(max_examples=60)
@given(config=configs(), trace=op_lists())
@TARGETS
def test_checked_mode_refuses_every_misuse_and_nothing_else(target, config, trace):
    config = replace(config, checked=True, page_offset=0)
    result = run_trace(target, Trace(config, tuple(trace)), misuse_fails=True)
    assert [failure.message for failure in result.failures] == []
    assert result.tally.accepted == {}
    # Nothing was cut short: every op was judged, or came to no call.
    assert result.tally.checked + result.tally.idle == len(trace)


BEFORE: dict[str, tuple[Op, ...]] = {
    "nested-begin": (ops.GroupBegin(),),
    "free-swa-of-unmapped": (ops.FreeSwa(0),),
}
"""What must come before a misuse, beside two rows."""
TWO_ROWS: dict[str, tuple[Op, ...]] = {"mamba": (ops.Alloc(2), ops.Alloc(1))}


def misuse_trace(allocator: str, kind: str) -> tuple[Op, ...]:
    rows = TWO_ROWS.get(allocator, (new(6, 3) if SMALL[allocator].page_size > 1 else new(2, 1),))
    return (*rows, *BEFORE.get(kind, ()), ops.Misuse(kind))


def possible(allocator: str, kind: str) -> bool:
    """Whether this kind of allocator offers a way to make that misuse."""
    model = model_for(replace(SMALL[allocator], checked=True))
    return [model.apply(op).outcome for op in misuse_trace(allocator, kind)][-1] is Outcome.REFUSED


MISUSED = [(allocator, kind) for allocator in ALLOCATORS for kind in MISUSES if possible(allocator, kind)]


def test_every_misuse_is_tried_somewhere():
    assert {kind for _, kind in MISUSED} == set(MISUSES)
    assert {allocator for allocator, _ in MISUSED} == set(ALLOCATORS)


@TARGETS
@pytest.mark.parametrize(("allocator", "kind"), MISUSED)
def test_each_misuse_is_refused_with_an_error_and_life_goes_on(target, allocator, kind):
    """Lockstep with the model finds everything unchanged, and the pool as good as new afterwards."""
    config = replace(SMALL[allocator], checked=True)
    before = misuse_trace(allocator, kind)
    everything: tuple[Op, ...] = (new(config.page_size),) * 2
    if allocator == "mamba":
        everything = (ops.Alloc(1),) * 2
    trace = (*before, ops.GroupEnd(), ops.Free((0, 1)), *everything)
    result = run_trace(target, Trace(config, trace), record=True)
    assert (result.failures, result.tally.accepted) == ([], {})
    assert result.answers is not None
    assert result.answers[len(before) - 1] is None
    assert [len(slots or ()) for slots in result.answers[-2:]] == [config.page_size] * 2


@pytest.mark.parametrize(("factory", "misuse"), [(Reference, False), (Kvproof, True)])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_hostile_caller_finds_nothing(factory, allocator, misuse):
    """On a CPU both targets take the torch path: one of them each way."""
    target = factory(Ticket())
    space = space_for(target.capabilities, allocator, misuse=misuse)
    verdict = run_lease(target, Lease(0, 5, target.name, "seeded", space, 3000, longest=300))
    assert [found.failure for found in verdict.found.values()] == []
    assert verdict.tally.accepted == {}
    assert verdict.tally.checked > 2000
