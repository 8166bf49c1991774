"""Leases: the same one gives the same verdict; a verdict holds a trace of each fault, cut to show it."""

from __future__ import annotations

import pytest

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.ours import Reference
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.base import Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.trace import Origin, Trace
from kvproof.properties.failure import DEVICE_LOST, Failure
from kvproof.properties.lease import Lease, Verdict, run_lease
from kvproof.properties.run import run_trace
from kvproof.properties.space import Space
from tests.model.strategies import new
from tests.properties.page_pool import PagePool, front
from tests.properties.subjects import KINDS, LAWFUL, PoolTarget


def lease(allocator: str = "paged", *, number: int = 0, seed: int = 0, count: int = 4000, **space) -> Lease:
    return Lease(number, seed, "pool", "seeded", Space(allocator, **space), count, longest=100)


class _Leaks:
    """Over a lawful allocator: loses a page of every release of three or more."""

    def release(self, pages):
        super().release(list(pages)[1:] if len(pages) > 2 else pages)


class _LeaksAndStartsAnywhere(_Leaks):
    """And starts rows of more than two pages in the middle of a page."""

    def row(self, prefix, seq, last, pages):
        slots = super().row(prefix, seq, last, pages)
        if prefix == 0 and seq > 2 * self.config.page_size and self.config.page_size > 1:
            slots[0] += 1
        return slots


def faulty(config):
    """The lawful allocator of the config's kind, with both faults."""
    return type("Faulty", (_LeaksAndStartsAnywhere, KINDS[config.allocator]), {})(config, front)


TWO_FAULTS = PoolTarget(faulty)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize(
    "target", [Null(Ticket()), Reference(Ticket()), TWO_FAULTS], ids=["null", "ours", "faulty"]
)
def test_the_same_lease_gives_the_same_verdict(allocator, target):
    one, two = (run_lease(target, lease(allocator, count=1500)) for _ in range(2))
    assert one == two
    assert one.traces > 5


def test_number_seed_and_lane_each_change_what_is_drawn():
    verdicts = [
        run_lease(TWO_FAULTS, lease(number=number, seed=seed)) for number, seed in ((0, 0), (1, 0), (0, 1))
    ]
    counts = [(verdict.traces, verdict.tally.checked, verdict.marks) for verdict in verdicts]
    assert counts[0] != counts[1] != counts[2] != counts[0]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("count", [1, 777, 3000])
def test_the_budget_is_spent_to_the_op(allocator, count):
    verdict = run_lease(Null(Ticket()), lease(allocator, count=count))
    assert verdict.tally.checked + verdict.tally.idle == count
    assert (verdict.found, verdict.seen, verdict.tally.skipped) == ({}, {}, {})
    assert verdict.relations == -(-verdict.traces // 8)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("kind", LAWFUL)
def test_a_lawful_target_is_never_accused(allocator, kind):
    """With every relation: an eighth of the traces is run a second time, differently."""
    verdict = run_lease(PoolTarget(LAWFUL[kind]), lease(allocator, count=5000))
    assert [found.failure for found in verdict.found.values()] == []
    assert verdict.relations >= 4


def test_each_fault_is_kept_once_with_the_trace_that_shows_it():
    verdict = run_lease(TWO_FAULTS, lease(page_offset=False))
    faults = {(found.failure.property_id, found.failure.divergence) for found in verdict.found.values()}
    assert {("P4", "not-one-page"), ("P2", "available-deficit")} <= faults
    assert verdict.seen.total() > len(verdict.found)
    assert set(verdict.seen) == set(verdict.found)
    for fingerprint, found in verdict.found.items():
        assert found.failure.fingerprint == fingerprint
        assert len(found.trace.ops) == found.failure.step + 1
        again = run_trace(TWO_FAULTS, found.trace)
        assert again.failures[-1].fingerprint == fingerprint
        assert again.failures[-1].step == found.failure.step
        origin = found.trace.origin
        assert (origin.target, origin.lane, origin.seed, origin.lease) == ("pool", "seeded", 0, 0)
        assert origin.index is not None
        assert origin.index < verdict.traces


def test_a_fault_in_the_lists_is_traced_to_the_step_that_made_it():
    """The campaign looks at the lists now and then only; a fault's trace ends with its cause all the same."""

    class _Repeats(PagePool):
        """One page of a large release twice in the list, another lost: available_size is right."""

        def release(self, pages):
            pages = list(pages)
            super().release([*pages[1:], pages[1]] if len(pages) > 2 else pages)

    target = PoolTarget(lambda config: _Repeats(config, front))
    verdict = run_lease(target, lease(page_offset=False))
    found = [
        entry for entry in verdict.found.values() if entry.failure.divergence == "duplicate-in-free-list"
    ]
    assert found
    for entry in found:
        model = model_for(entry.trace.config)
        for op in entry.trace.ops[:-1]:
            model.apply(op)
        last = entry.trace.ops[-1]
        assert isinstance(last, (ops.Free, ops.FreeSegment, ops.FreeSegments, ops.FreePages, ops.GroupEnd))
        before = model.available
        assert model.apply(last).outcome is Outcome.DONE
        # Three pages at least came back in that call.
        assert model.available - before > 2 * model.page_size


def test_what_was_accepted_and_skipped_is_kept():
    target = PoolTarget(lambda config: PagePool(config, front), lacks=frozenset({"Resize"}))
    verdict = run_lease(target, lease(misuse=True, checked=True))
    assert "double-free" in verdict.tally.accepted
    assert verdict.found == {}
    assert verdict.relations == 0


def test_the_first_of_a_kind_is_kept():
    verdict = Verdict(0, "seeded")
    trace = Trace(Config("paged", 16, 4), (new(1), new(2), new(3)), Origin())
    for step in (1, 0):
        verdict.add(Failure("P1", "Extend", "paged", "x", step, f"step {step}"), trace)
    (found,) = verdict.found.values()
    assert (found.failure.step, found.trace.ops) == (1, trace.ops[:2])
    assert list(verdict.seen.values()) == [2]


def test_a_lost_device_ends_the_lease_wherever_it_was_lost():
    verdict = Verdict(0, "seeded")
    trace = Trace(Config("paged", 16, 4), (ops.Clear(),))
    verdict.add(Failure("P1", "Clear", "paged", "other", 0, ""), trace)
    assert not verdict.lost
    verdict.add(Failure("P7", "Clear", "paged", DEVICE_LOST, 0, ""), trace)
    verdict.add(Failure("P1", "Clear", "paged", "other", 0, ""), trace)
    assert verdict.lost
