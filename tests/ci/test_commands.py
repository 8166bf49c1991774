"""What the commands do with traces: replay and shrink, with local workers (`tests/ci/local.py`)."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from kvproof.ci import commands, confirm
from kvproof.ci.commands import RunOptions, replay, shrink
from kvproof.corpus.format import TraceFile, encode, read
from kvproof.corpus.known import Known
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.model.trace import Origin, Trace
from kvproof.properties.replay import replay as replay_trace
from tests.ci.local import LocalWorker
from tests.model.strategies import new

PLANT = "planted:pages-not-taken"
POOL = Config("paged", 64, 4)
TRACE = Trace(POOL, (ops.Alloc(1), new(9), new(5), ops.Free((0,))), Origin(PLANT, "hypothesis", 3, 1, 2))
(FAILURE,) = replay_trace(Planted(Ticket(":pages-not-taken")), TRACE).failures
OWN = RunOptions(None, "auto", "cpu")
NULL = RunOptions("null", "auto", "cpu")


@pytest.fixture(autouse=True)
def local(monkeypatch, tmp_path):
    """Local workers, and an empty folder to work in."""
    monkeypatch.setattr(commands, "Worker", LocalWorker)
    monkeypatch.setattr(confirm, "Worker", LocalWorker)
    monkeypatch.setattr(commands, "read_known", lambda: ())
    monkeypatch.chdir(tmp_path)
    LocalWorker.made.clear()
    yield
    # A campaign of another test may still be ending in threads of its own.
    mine = [worker for worker in LocalWorker.made if worker.thread is threading.current_thread()]
    assert all(worker.closed for worker in mine)


def stored(trace=TRACE, name="t.json"):
    Path(name).write_bytes(encode(TraceFile(trace)))
    return name


# --- replay ----------------------------------------------------------------------------------------


def test_a_failing_trace_ends_with_1_and_is_told_in_full(capsys):
    assert replay(stored(), OWN, None, 3, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"NEW  {FAILURE.fingerprint}  P1 single ownership  Extend: {FAILURE.divergence}"
    assert "-> op 1     extend new +9" in lines
    assert f"found      {FAILURE.message}" in lines
    assert any(line.startswith("actual     1 row 0 · 2-4 free and row 1") for line in lines)
    # The state machine's traces replay in the seeded lane.
    assert f"reproduce  kvproof replay t.json --target {PLANT} --lane seeded --device cpu" in lines
    assert lines[-1] == f"FAILED 3 of 3 on {PLANT} (seeded), 2 ops checked"


def test_the_line_to_reproduce_repeats_what_was_chosen(capsys):
    replay(stored(name="my trace.json"), RunOptions(None, "torch", "cpu"), "seeded", 1, as_json=False)
    line = (
        f"reproduce  kvproof replay 'my trace.json' --target {PLANT} --lane seeded --path torch --device cpu"
    )
    assert line in capsys.readouterr().out.splitlines()


def test_a_passing_trace_ends_with_0(capsys):
    assert replay(stored(), NULL, None, 2, as_json=False) == 0
    assert capsys.readouterr().out == "PASSED 2 of 2 on null (seeded), 4 ops checked\n"


@pytest.mark.parametrize(("release", "status"), [(PLANT, 4), ("sglang 0.5.23", 1)])
def test_a_known_failure_ends_with_4(monkeypatch, capsys, release, status):
    package, _, version = release.partition(" ")
    known = Known(FAILURE.fingerprint, package, (version,), "paged/x.json", "fault", "why")
    monkeypatch.setattr(commands, "read_known", lambda: (known,))
    assert replay(stored(), OWN, None, 1, as_json=False) == status
    assert capsys.readouterr().out.startswith("KNOWN  " if status == 4 else "NEW  ")


def test_json_of_a_failing_and_of_a_passing_trace(capsys):
    assert replay(stored(), OWN, None, 2, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["target"], report["failed"], report["times"], report["exit_code"]) == (PLANT, 2, 2, 1)
    (failure,) = report["failures"]
    assert (failure["fingerprint"], failure["property_id"], failure["step"]) == (FAILURE.fingerprint, "P1", 1)
    assert replay(stored(), NULL, None, 1, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["failures"], report["skipped"], report["exit_code"]) == ([], {}, 0)


def test_accepted_misuse_is_a_failure_with_its_own_line(capsys):
    """The reference promises refusals in checked mode only."""
    trace = Trace(POOL, (new(4), ops.Free((0,)), ops.Misuse("double-free")), Origin("reference", "seeded"))
    assert replay(stored(trace), OWN, None, 1, as_json=False) == 1
    out = capsys.readouterr().out
    assert "Misuse: misuse-corrupts double-free" in out
    assert "\naccepted   double-free: " in out


@pytest.mark.parametrize(
    ("trace", "what"),
    [((), "has no ops"), ((ops.GroupEnd(), ops.Free((0,))), "every op .* comes to nothing")],
)
def test_a_trace_that_makes_no_call_is_bad_input(trace, what):
    with pytest.raises(UserError, match=rf"^t\.json: {what}.*; give a trace that makes a call$"):
        replay(stored(Trace(POOL, trace)), NULL, None, 1, as_json=False)


def test_a_trace_of_calls_that_the_target_lacks_is_no_pass(monkeypatch):
    """Nor is the trace at fault: other targets have them."""
    lacking = dataclasses.replace(Null.capabilities, lacks=frozenset({"Alloc"}))
    monkeypatch.setattr(Null, "capabilities", lacking)
    trace = Trace(POOL, (ops.Alloc(1), ops.Alloc(2), ops.GroupEnd()))
    with pytest.raises(InfrastructureError, match=r"null has no such call \(Alloc x2\); choose another"):
        replay(stored(trace), NULL, None, 1, as_json=False)


@pytest.mark.parametrize("out", ["", "t.json", "."])
def test_shrinking_needs_a_file_to_be_made(out):
    with pytest.raises(UserError, match="--out"):
        shrink(stored(), OWN, None, None, out)
    assert LocalWorker.made == []


def test_a_trace_of_nobody_needs_a_target():
    with pytest.raises(UserError, match="name one with --target"):
        replay(stored(Trace(POOL, (new(1),))), OWN, None, 1, as_json=False)


# --- shrink ----------------------------------------------------------------------------------------


def test_a_trace_is_shrunk_and_stored(capsys):
    assert shrink(stored(), OWN, None, None, None) == 0
    small = read(Path("t.min.json"))
    assert (small.trace.config, small.trace.ops) == (Config("paged", 1, 1), (new(1),))
    assert small.evidence is not None
    assert small.evidence.fingerprint == FAILURE.fingerprint
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(FAILURE.fingerprint)
    assert f"reproduce  kvproof replay t.min.json --target {PLANT} --lane seeded --device cpu" in lines
    assert lines[-1].startswith("4 -> 1 ops in ")
    assert lines[-1].endswith(": t.min.json")
    assert replay("t.min.json", OWN, None, 1, as_json=False) == 1


def test_nothing_is_overwritten_by_shrinking():
    stored()
    Path("t.min.json").write_text("mine")
    with pytest.raises(UserError, match=r"t\.min\.json is there already"):
        shrink("t.json", OWN, None, None, None)
    assert Path("t.min.json").read_text() == "mine"
    assert LocalWorker.made == []


@pytest.mark.parametrize(
    ("options", "fingerprint", "what"),
    [(NULL, None, "no failure on null"), (OWN, "00000000", "no failure 00000000 on")],
)
def test_there_must_be_something_to_shrink(options, fingerprint, what):
    with pytest.raises(UserError, match=f"{what}.*nothing to shrink"):
        shrink(stored(), options, None, fingerprint, None)
    assert not Path("t.min.json").exists()


def test_the_failure_can_be_chosen_and_the_file_named():
    assert shrink(stored(), OWN, "seeded", FAILURE.fingerprint, "small.json") == 0
    assert read(Path("small.json")).trace.ops == (new(1),)


def test_a_file_that_cannot_be_written_is_the_machines_fault():
    with pytest.raises(InfrastructureError, match=r"nowhere/small\.json: cannot be written: No such file"):
        shrink(stored(), OWN, None, None, "nowhere/small.json")


def test_cuda_that_is_not_there_is_the_machines_fault(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InfrastructureError, match="torch sees no GPU here"):
        replay(stored(), RunOptions(None, "auto", "cuda"), None, 1, as_json=False)
    assert commands.device_for("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [commands.device_for(name) for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
