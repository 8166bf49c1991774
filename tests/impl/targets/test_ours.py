"""Our allocators as targets: they hold the exact contract in lockstep, on every config, misuse included.

The kernels' path runs in processes of its own (tests/corpus, the audited lane) and on a GPU.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.targets.ours import Kvproof, Reference
from kvproof.impl.targets.protocol import State, Ticket
from kvproof.impl.token import TokenToKVPoolAllocator
from kvproof.model import calls, ops
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES, Op
from kvproof.model.trace import Trace
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.run import run_trace
from kvproof.properties.space import space_for
from tests.model.strategies import configs, new, op_lists

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


@TARGETS
def test_what_does_not_wait_for_the_device(target):
    """All but a plain free of pages, which a group puts off to its end; checked mode promises nothing."""
    token = target.build(Config("token", 5, 1))._sync_free
    paged = target.build(Config("paged", 16, 4))._sync_free
    assert token - paged == {"free", "free_group_end"}
    assert {"alloc", "alloc_extend", "alloc_decode", "free_segment", "free_page_ids", "clear"} < paged
    assert target.build(Config("paged", 16, 4, checked=True))._sync_free == frozenset()


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
    config = Config(config.allocator, config.size, config.page_size, config.need_sort, True, config.row_dtype)
    result = run_trace(target, Trace(config, tuple(trace)), misuse_fails=True)
    assert [failure.message for failure in result.failures] == []
    assert result.tally.accepted == {}
    # Nothing was cut short: every op was judged, or came to no call.
    assert result.tally.checked + result.tally.idle == len(trace)


SETTINGS: dict[str, tuple[Op, ...]] = {kind: (new(6, 3),) for kind in MISUSES} | {
    "nested-begin": (new(6, 3), ops.GroupBegin())
}


@TARGETS
@pytest.mark.parametrize("kind", MISUSES)
def test_each_misuse_is_refused_with_an_error_and_life_goes_on(target, kind):
    trace = (*SETTINGS[kind], ops.Misuse(kind), ops.GroupEnd(), ops.Free((0, 1)), new(16))
    result = run_trace(target, Trace(Config("paged", 16, 4, checked=True), trace), record=True)
    assert (result.failures, result.tally.accepted) == ([], {})
    assert result.answers is not None
    assert result.answers[-1] == list(range(4, 20))
    assert result.answers[len(SETTINGS[kind])] is None


@TARGETS
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("misuse", [False, True])
def test_a_hostile_caller_finds_nothing(target, allocator, misuse):
    space = space_for(target.capabilities, allocator, misuse=misuse)
    verdict = run_lease(target, Lease(0, 5, target.name, "seeded", space, 3000, longest=300))
    assert [found.failure for found in verdict.found.values()] == []
    assert verdict.tally.accepted == {}
    assert verdict.tally.checked > 2000
