"""The Hypothesis engine: anybody's allocator in five lines of a suite, and a failure told in full."""

from __future__ import annotations

import subprocess
import sys
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvproof.impl.targets.null import Null
from kvproof.impl.targets.ours import Reference
from kvproof.impl.targets.planted.target import Canary, Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.model.errors import UserError
from kvproof.properties.machine import (
    AllocatorMachine,
    HypothesisDraw,
    PropertyBroken,
    machine_for,
    state_machine,
)
from kvproof.properties.run import run_trace
from kvproof.properties.space import WIDE_OPS, Space, is_wide

FEW = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

SUITE = """
from kvproof.properties.machine import state_machine

TestClean = state_machine("reference", allocator="paged").TestCase
TestToken = state_machine("reference", allocator="token").TestCase
TestFaulty = state_machine("planted:pages-not-taken", allocator="paged").TestCase
"""


# As a suite's own profile would have it; the machines follow it.
PROFILE = """
from hypothesis import settings

settings.register_profile("quick", max_examples=15, stateful_step_count=20)
settings.load_profile("quick")
"""


def test_five_lines_of_anybodys_suite(tmp_path):
    """pytest collects the classes; the faulty one fails, and says what, where, and on which config."""
    (tmp_path / "test_mine.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(PROFILE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "TestFaulty" in done.stdout
    assert "PropertyBroken: P1 [" in done.stdout
    assert "the free list holds what somebody has" in done.stdout
    assert "config: Config(allocator='paged'" in done.stdout
    assert "op 0: Extend(entries=" in done.stdout


def test_a_machine_is_a_unittest_class_of_its_own():
    one, two = state_machine("null"), state_machine("null", allocator="token")
    assert issubclass(one, AllocatorMachine)
    assert one is not two
    assert (one.space.allocator, two.space.allocator) == ("paged", "token")
    assert issubclass(one.TestCase, TestCase)
    assert one.runs is not two.runs
    # A slow machine is no failure.
    assert one.TestCase.settings.deadline is None


def test_a_target_can_be_given_as_it_is():
    target = Null(Ticket())
    assert state_machine(target).target is target


def test_an_unknown_target_is_refused():
    with pytest.raises(UserError, match="there is no target 'mine'"):
        state_machine("mine")


@pytest.mark.parametrize("target", [Null(Ticket()), Reference(Ticket())], ids=["null", "reference"])
@pytest.mark.parametrize("allocator", ["paged", "token"])
def test_a_clean_target_passes(target, allocator):
    machine = state_machine(target, allocator=allocator)
    run_state_machine_as_test(machine, settings=FEW)
    assert len(machine.runs) >= FEW.max_examples
    assert sum(pair.tally.checked for pair in machine.runs) > 100


def test_the_first_call_on_the_canary_fails():
    """And nothing is drawn behind it; the trace in the error shows the failure again."""
    target = Canary(Ticket())
    with pytest.raises(PropertyBroken) as caught:
        run_state_machine_as_test(state_machine(target), settings=FEW)
    broken = caught.value
    assert len(broken.trace.ops) == 1
    assert broken.failure.step == 0
    assert broken.failure.fingerprint in str(broken)
    assert (broken.trace.origin.target, broken.trace.origin.lane) == ("canary", "hypothesis")
    assert run_trace(target, broken.trace).failures == [broken.failure]


def test_a_planted_fault_is_found_and_its_trace_replays():
    target = Planted(Ticket(":free-repeats"))
    with pytest.raises(PropertyBroken) as caught:
        run_state_machine_as_test(state_machine(target), settings=FEW)
    again = run_trace(target, caught.value.trace).failures
    assert [failure.fingerprint for failure in again] == [caught.value.failure.fingerprint]


def test_a_machine_keeps_to_its_space():
    space = Space("paged", any_page_size=False, page_offset=False, lacks=frozenset({"Decode", "Alloc"}))
    machine = machine_for(Null(Ticket()), space)
    run_state_machine_as_test(machine, settings=FEW)
    configs = [pair.config for pair in machine.runs]
    assert {config.page_size & (config.page_size - 1) for config in configs} == {0}
    assert {(config.page_offset, config.checked) for config in configs} == {(0, False)}
    assert not any(pair.tally.skipped for pair in machine.runs)


def test_wide_pools_get_few_ops():
    """Each op there costs as much as a hundred others."""
    machine = state_machine("null")
    run_state_machine_as_test(machine, settings=settings(FEW, max_examples=200))
    wide = [pair.tally for pair in machine.runs if is_wide(pair.config)]
    assert wide
    assert max(tally.checked + tally.idle for tally in wide) <= WIDE_OPS


def test_a_draw_by_hypothesis_keeps_its_bounds():
    class _Data:
        asked = ()

        def draw(self, strategy):
            self.asked = repr(strategy)
            return 4

    data = _Data()
    assert HypothesisDraw(data).integer(3, 9) == 4
    assert data.asked == repr(st.integers(3, 9))


def test_a_failure_is_shrunk_by_hypothesis_and_not_explained():
    """Explaining takes ten times as long as all the rest and says nothing about a state machine."""
    with pytest.raises(PropertyBroken) as caught:
        run_state_machine_as_test(
            state_machine("planted:pages-not-taken"),
            settings=settings(FEW, phases=[Phase.generate, Phase.shrink]),
        )
    assert len(caught.value.trace.ops) == 1
    phases = state_machine("null").TestCase.settings.phases
    assert set(settings().phases) - set(phases) == {Phase.explain}
