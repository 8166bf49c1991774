"""The harness finds every planted fault, and says so when it does not.

Kernel plants run in a process of their own, since Triton reads TRITON_INTERPRET when it is imported.
Not covered here: the plants as data (`tests/impl/targets/test_planted.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kvproof.impl.targets.planted.catalogue import PLANTS
from kvproof.impl.targets.planted.plant import Plant
from kvproof.impl.targets.planted.target import Planted, plant_named
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS
from kvproof.properties import controls
from kvproof.properties.catalogue import PROPERTIES
from kvproof.properties.controls import Control, all_controls, hunt, quick_controls
from kvproof.properties.lease import Lease, Verdict
from kvproof.properties.run import run_trace

TORCH = [plant for plant in PLANTS if plant.path == "torch"]
KERNELS = [plant for plant in PLANTS if plant.path == "kernels"]

DRAWN_EVERYWHERE = ("swa-unmapped-segment-accepted",)
"""Plants for a misuse that must be harmless from everybody, so that lawful hunts meet it as well."""

ALL = """
import json
from kvproof.properties.controls import all_controls
print(json.dumps([[c.name, c.outcome, c.catch and c.catch.property_id] for c in all_controls()]))
"""


def test_every_control_passes() -> None:
    """Canaries fail, copies without a fault do not, every plant is caught by a property that it names.

    So nothing is "caught otherwise": where a plant comes to be named by another property, this test shows
    which, and the plant's `caught_by` has to say why that is right.
    """
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALL],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    outcomes = [tuple(line) for line in json.loads(run.stdout)]
    due = {"canary": "caught", "planted:none": "clean"}
    assert [line for line in outcomes if line[1] != due.get(line[0], "caught")] == []
    names = [line[0] for line in outcomes]
    # Each with and without misuse, and copies by either path.
    kinds = len(ALLOCATORS)
    assert (names.count("canary"), names.count("planted:none")) == (2 * kinds, 4 * kinds)
    assert set(names) == {"canary", "planted:none", *(f"planted:{plant.id}" for plant in PLANTS)}
    assert len(names) == 6 * kinds + len(PLANTS)
    by_property = {property_id for name, _, property_id in outcomes if name.startswith("planted:")}
    assert by_property >= {entry.id for entry in PROPERTIES if entry.asked in ("step", "both")}


def test_what_cannot_run_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the interpreter each kernel control is there, and is no success."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(controls, "HUNT_OPS", {"torch": 1, "kernels": 1})
    monkeypatch.setattr(controls, "CLEAN_OPS", {"torch": 1, "kernels": 1})
    monkeypatch.setattr(controls, "ALLOCATORS", ("token", "paged"))
    monkeypatch.setattr(controls, "PLANTS", (*TORCH[:2], *KERNELS))
    left_out = [control for control in all_controls() if control.outcome == "cannot run here"]
    names = sorted(control.name for control in left_out)
    assert names == sorted(["planted:none"] * 4 + [f"planted:{plant.id}" for plant in KERNELS])
    assert not any(control.passed for control in left_out)


def test_quick_controls_pass_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary and three plants, without the interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = quick_controls()
    assert [control.name for control in done] == ["canary", *(f"planted:{name}" for name in controls.QUICK)]
    assert len(done) == 4
    assert [(control.outcome, control.passed) for control in done] == [("caught", True)] * 4


def test_a_blind_harness_fails_its_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that judges nothing misses the canary and every plant."""

    def judge_nothing(_target: Target, lease: Lease) -> Verdict:
        verdict = Verdict(lease.number, lease.lane)
        verdict.tally.checked = lease.ops
        return verdict

    monkeypatch.setattr(controls, "run_lease", judge_nothing)
    outcomes = [(control.outcome, control.passed, control.catch) for control in quick_controls()]
    assert outcomes == [("missed", False, None)] * 4


def test_an_idle_harness_fails_the_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call made, no failure missed: that is not enough."""
    monkeypatch.setattr(controls, "run_lease", lambda _target, lease: Verdict(lease.number, lease.lane))
    assert quick_controls()[0].outcome == "missed"


def test_a_canary_that_passes_once_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must fail on every call, not on some."""
    run_lease = controls.run_lease

    def with_one_more_call(target: Target, lease: Lease) -> Verdict:
        verdict = run_lease(target, lease)
        verdict.tally.checked += 1
        return verdict

    monkeypatch.setattr(controls, "run_lease", with_one_more_call)
    assert quick_controls()[0].outcome == "missed"


def test_a_copy_with_a_fault_is_not_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean control fails when the machinery of copies breaks something."""

    def broken(ticket: Ticket) -> Planted:
        return Planted(replace(ticket, spec=":last-page-lost"))

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(controls, "Planted", broken)
    monkeypatch.setattr(controls, "PLANTS", ())
    monkeypatch.setattr(controls, "ALLOCATORS", ("token", "paged"))
    clean = [control for control in all_controls() if control.name == "planted:none"]
    assert [control.outcome for control in clean] == ["not clean"] * 4 + ["cannot run here"] * 4
    assert not any(control.passed for control in clean)


def test_a_hunt_is_deterministic_and_its_trace_shows_the_fault() -> None:
    """Two hunts differ in their seconds only; the trace fails in the same way on a fresh copy, at its end."""
    plant = plant_named("group-released-twice")
    one, two = hunt(plant), hunt(plant)
    assert one is not None
    assert two is not None
    assert replace(one, seconds=0) == replace(two, seconds=0)
    assert one.expected
    assert (one.property_id, one.divergence) == (one.found.failure.property_id, one.found.failure.divergence)
    trace = one.found.trace
    assert one.found.failure.step == len(trace.ops) - 1
    again = run_trace(Planted(Ticket(f":{plant.id}")), trace)
    assert again.get(one.found.failure.fingerprint) is not None


def test_another_property_is_reported_as_such() -> None:
    """Caught is caught, but the control says that the property differs."""
    plant = replace(plant_named("last-page-lost"), caught_by=("P9",))
    catch = hunt(plant, ops=64)
    assert catch is not None
    assert (catch.property_id, catch.expected) == ("P2", False)
    assert Control(plant.id, plant.fault, "caught otherwise", catch).passed


def test_a_hunt_ends_with_its_budget() -> None:
    """Clearing an open group needs more than one op."""
    assert hunt(plant_named("group-survives-clear"), ops=1) is None


MISUSED = [plant for plant in TORCH if plant.misuse and plant.id not in DRAWN_EVERYWHERE]


@pytest.mark.parametrize("plant", MISUSED, ids=lambda plant: plant.id)
def test_misuse_plants_are_invisible_to_lawful_callers(plant: Plant) -> None:
    """They disarm refusals, which only a caller who breaks the contract meets."""
    lawful = replace(plant, misuse=False)
    assert hunt(lawful, ops=2000) is None


def test_the_twelfth_extend_needs_twelve() -> None:
    """The plant for long minimal traces: no trace with fewer extends that take pages shows it."""
    catch = hunt(plant_named("twelfth-extend-forgets"))
    assert catch is not None
    model = model_for(catch.found.trace.config)
    calls = [model.apply(op) for op in catch.found.trace.ops]
    assert sum(type(call.call).__name__ == "ExtendCall" and bool(call.taken) for call in calls) >= 12
