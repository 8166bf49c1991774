"""Confirming what takes a device or a process with it.

A target that loses its device: nothing of it is lost, and the campaign goes on in another process.

A third-party target plays the GPU: a call for three tokens or more fails as torch does after an illegal
access, and from then on nothing can be built in that process. It has an ordinary fault too: after a call for
two tokens it says that a slot more is free.
"""

from __future__ import annotations

import json
import signal

import pytest

from kvproof.ci import wire
from kvproof.ci.confirm import confirm
from kvproof.ci.process import Limits, Worker
from kvproof.corpus.format import read
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.trace import Origin, Trace
from kvproof.properties.failure import Failure
from kvproof.properties.lanes import lane_for
from tests.ci import theirs
from tests.ci.local import run, third_party
from tests.ci.theirs import kill
from tests.model.strategies import new

SEEDED = lane_for("seeded", device="cpu")

LOSER = """
from kvproof.impl.targets.null import Null, NullSubject
from kvproof.impl.targets.protocol import Answer
from kvproof.model.calls import ExtendCall

LOST = []


class Subject(NullSubject):
    def apply(self, call):
        if isinstance(call, ExtendCall) and call.tokens >= 3:
            LOST.append(call)
            return Answer(error=RuntimeError("CUDA error: an illegal memory access"), lost=True)
        answer = super().apply(call)
        if isinstance(call, ExtendCall) and call.tokens == 2:
            answer.available += 1
        return answer


class Theirs(Null):
    name = release = "theirs"

    def build(self, config):
        if LOST:
            raise RuntimeError("CUDA error: this process has lost its device")
        return Subject()
"""


def tokens_of(trace):
    """The tokens of the one extend, of new rows, that a trace comes to; rows are as good as tokens here."""
    (op,) = trace
    assert isinstance(op, ops.Extend)
    assert {row for row, _ in op.entries} == {ops.NEW_ROW}
    assert all(tokens > 0 for _, tokens in op.entries)
    return sum(tokens for _, tokens in op.entries)


def test_a_lost_device_is_a_failure_replayed_and_shrunk_in_other_processes(tmp_path):
    environment = third_party(tmp_path, LOSER)
    arguments = (
        "--target",
        "theirs",
        "--allocator",
        "paged",
        "--lane",
        "seeded,hypothesis",
        "--device",
        "cpu",
    )
    done = run(
        "fuzz", *arguments, "--seed", "0", "--leases", "3", "--out", "out", cwd=tmp_path, **environment
    )
    assert done.returncode == 1, done.stderr
    verdicts = [json.loads(line) for line in (tmp_path / "out/verdicts.jsonl").read_text().splitlines()]
    assert [verdict["lease"] for verdict in verdicts] == [0, 1, 2]
    # A lease goes on behind each loss of its device, in another process, until it has cost enough of them.
    lost = Failure("P7", "Extend", "paged", "device-lost", 0, "").fingerprint
    assert [verdict["seen"].get(lost, 0) for verdict in verdicts if verdict["lane"] == "seeded"] == [6, 6]
    paths = [p for p in (tmp_path / "out/failures").iterdir() if not p.name.endswith(".found.json")]
    shown = {}
    for path in paths:
        file = read(path)
        assert file.evidence is not None
        assert file.evidence.times == "3 of 3"
        shown[file.evidence.property, file.evidence.divergence] = path, file.trace.ops
    # 3 and 2 tokens: the shrinker of either meets the other, or the device's loss, on its way.
    small, ops_lost = shown["P7", "device-lost"]
    assert tokens_of(ops_lost) == 3
    if ("P2", "available-excess") in shown:
        assert tokens_of(shown["P2", "available-excess"][1]) == 2

    again = run("replay", str(small), "--times", "2", "--device", "cpu", cwd=tmp_path, **environment)
    assert again.returncode == 1
    assert "FAILED 2 of 2 on theirs" in again.stdout


# --- deaths ----------------------------------------------------------------------------------------

SMALL = (ops.Extend(((ops.NEW_ROW, 10),)), ops.Free((0,)))
"""Ten slots make a large free (`tests/ci/theirs.py`); no trace does with less."""

LIMITS = Limits(hang_seconds=0.6, memory_mib=100)
LONG = Trace(
    Config("paged", 64, 4, need_sort=True),
    (new(3), new(2, 14), ops.Decode((0, 2)), ops.Clobber(), ops.Free((2,)), ops.Clear(), new(2)),
    Origin("theirs", "seeded", 1, 0, 0),
)


@pytest.mark.parametrize(
    ("how", "property_id", "divergence"),
    [
        ("segv", "P7", "crash SIGSEGV"),
        ("exit0", "P6", "crash exit 0"),
        ("sleep", "P6", "hang"),
        ("memory", "P6", "out-of-memory"),
    ],
)
def test_a_death_is_replayed_and_shrunk_process_by_process(
    tmp_path, monkeypatch, how, property_id, divergence
):
    monkeypatch.setattr("kvproof.ci.confirm._SHORTEST_HANG_SECONDS", 0.3)
    target, environment = theirs.install(tmp_path / "plug", how)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    op = "Trace" if divergence == "out-of-memory" else "Free"
    failure = Failure(property_id, op, "paged", divergence, 4, "as found")
    done = confirm(target, SEEDED, LONG, failure, limits=LIMITS)
    assert (done.failed, done.times, done.failed_small, done.lost) == (3, 3, 3, False)
    small = wire.trace_of(done.trace)
    assert small.ops == SMALL
    assert (small.config.need_sort, small.origin) == (False, LONG.origin)
    assert done.failure is not None
    assert (done.failure.fingerprint, done.failure.step) == (failure.fingerprint, 1)


def test_a_death_that_does_not_come_again_is_said_to(tmp_path, monkeypatch):
    target, environment = theirs.install(tmp_path / "plug", "nothing")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    failure = Failure("P7", "Free", "paged", "crash SIGSEGV", 4, "as found")
    done = confirm(target, SEEDED, LONG, failure, limits=LIMITS)
    assert (done.failed, done.times, done.runs, done.failure) == (0, 3, 0, None)
    assert wire.trace_of(done.trace) == LONG


@pytest.mark.parametrize("divergence", ["available-deficit", "crash SIGSEGV"])
def test_whoever_kills_the_confirming_process_changes_nothing(tmp_path, monkeypatch, divergence):
    """Neither the count of replays nor the smallest trace."""
    ordinary = divergence == "available-deficit"
    target, environment = theirs.install(tmp_path / "plug", "few" if ordinary else "segv")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    op = "Clear" if ordinary else "Free"
    failure = Failure("P2" if ordinary else "P7", op, "paged", divergence, 5, "as found")
    expected = confirm(target, SEEDED, LONG, failure, limits=LIMITS)
    assert (expected.failed, expected.failed_small) == (3, 3)
    kills = []
    ask = Worker.ask

    def killed(self, request, *rest, **more):
        # As the request arrives, twice of three times.
        if len(kills) % 3 != 2:
            kills.append(kill(self.pid, signal.SIGKILL))
        else:
            kills.append(False)
        return ask(self, request, *rest, **more)

    monkeypatch.setattr(Worker, "ask", killed)
    done = confirm(target, SEEDED, LONG, failure, limits=LIMITS)
    assert sum(kills) > 5
    assert (done.trace, done.failed, done.failed_small) == (expected.trace, 3, 3)
    assert done.failure == expected.failure
