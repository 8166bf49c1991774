"""Real worker processes: what they answer, what they refuse, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvproof.ci import wire
from kvproof.ci.process import Worker
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.model.trace import Trace
from kvproof.properties.lanes import lane_for
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.replay import replay
from kvproof.properties.space import space_for
from tests.ci.local import alive, third_party
from tests.model.strategies import new

SEEDED = lane_for("seeded", device="cpu")
POOL = Config("paged", 64, 4)
SPACE = space_for(Null.capabilities, "paged")

# Prints as it loads, refuses to be built a certain way, and dies another way.
THEIRS = """
import os, signal, sys
from kvproof.impl.targets.null import Null
from kvproof.model.errors import UserError

print("loading theirs")

class Theirs(Null):
    name = release = "theirs"

    def __init__(self, ticket):
        if ticket.spec == "==bad":
            raise RuntimeError("no such\\nversion")
        if ticket.spec == "==exit":
            sys.exit("I would rather not")

    def build(self, config):
        print("building", flush=True)
        if config.size == 3:
            raise UserError("three is too few")
        if config.size == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.size == 7:
            raise KeyError("seven")
        return super().build(config)
"""


def replayed(size: int) -> wire.Replay:
    return wire.Replay(wire.text_of(Trace(Config("token", size, 1), (ops.Alloc(1),))), 1)


def test_a_worker_answers_everything_it_is_asked():
    """As its own process does, the same lease and the same trace come to the same here."""
    target = Planted(Ticket(":pages-not-taken"))
    trace = Trace(POOL, (new(9), new(5), ops.Free((0,))))
    with Worker("planted:pages-not-taken", SEEDED) as worker:
        assert worker.ready.capabilities == target.capabilities
        assert (worker.ready.name, worker.ready.release, worker.ready.path) == (
            target.name,
            target.release,
            "torch",
        )

        done = worker.ask(wire.RunControls(), wire.ControlsDone)
        assert (len(done.caught), done.missed) == (4, ())

        lease = Lease(2, 9, target.name, "seeded", SPACE, 200, 30)
        assert worker.ask(wire.RunLease(lease), wire.LeaseDone) == wire.lease_done(run_lease(target, lease))

        (failure,) = replay(target, trace).failures
        again = worker.ask(wire.Replay(wire.text_of(trace), 2), wire.Replayed)
        assert again.runs == [[failure], [failure]]
        assert again.maps is not None

        confirmed = worker.ask(wire.Confirm(wire.text_of(trace), failure, 2, 500), wire.Confirmed)
        assert (confirmed.failed, confirmed.failed_small, confirmed.times) == (2, 2, 2)
        small = wire.trace_of(confirmed.trace)
        assert (small.config, small.ops) == (Config("paged", 1, 1), (new(1),))
        assert confirmed.failure is not None
        assert confirmed.failure.fingerprint == failure.fingerprint
        as_it_was = worker.ask(wire.Confirm(wire.text_of(trace), failure, 1, 0), wire.Confirmed)
        assert (wire.trace_of(as_it_was.trace), as_it_was.runs) == (trace, 0)
        clean = wire.text_of(Trace(POOL, (ops.Alloc(0),)))
        assert worker.ask(wire.Confirm(clean, failure, 2, 500), wire.Confirmed) == wire.Confirmed(0, 2, clean)

        # Refusals are answers; the worker lives on.
        with pytest.raises(UserError, match="not a valid trace"):
            worker.ask(wire.Replay("{}", 1), wire.Replayed)
        with pytest.raises(InfrastructureError, match="one target"):
            worker.ask(wire.Setup("null", "auto", "cpu", False), wire.Ready)
        assert worker.ask(wire.RunControls(), wire.ControlsDone) == done
        pid = worker._process.pid
    assert not alive(pid)
    assert worker._process.returncode == 0


def test_what_a_target_prints_garbles_no_reply(tmp_path, monkeypatch):
    """Nor do errors raised outside its calls pass for verdicts: the request is named, and the last words."""
    for name, value in third_party(tmp_path, THEIRS).items():
        monkeypatch.setenv(name, value)
    with Worker("theirs", SEEDED) as worker:
        assert worker.ready.name == "theirs"
        assert worker.ask(replayed(4), wire.Replayed).checked == 1
        with pytest.raises(UserError, match="three is too few"):
            worker.ask(replayed(3), wire.Replayed)
        assert worker.ask(replayed(4), wire.Replayed).runs == [[]]
        with pytest.raises(
            InfrastructureError, match=r"died .* on a replay request; its last words: KeyError: 'seven'"
        ):
            worker.ask(replayed(7), wire.Replayed)
        # Asking a dead worker neither hangs nor raises anything else.
        with pytest.raises(InfrastructureError, match="died"):
            worker.ask(replayed(4), wire.Replayed)


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("nonsense", UserError, "there is no target 'nonsense'"),
        ("theirs==bad", InfrastructureError, "target theirs==bad: RuntimeError: no such version"),
        (
            "theirs==exit",
            InfrastructureError,
            "died .* on loading theirs==exit; its last words: I would rather not",
        ),
    ],
)
def test_a_target_that_cannot_be_loaded(tmp_path, monkeypatch, target, kind, message):
    for name, value in third_party(tmp_path, THEIRS).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind, match=message) as caught:
        Worker(target, SEEDED)
    assert "\n" not in str(caught.value)


def test_a_request_that_is_none_is_refused():
    """Lines that no kvproof sends: refused one by one, until the input ends."""
    lines = b"\n".join([b"{}", b"nonsense", wire.to_line(wire.RunControls()).strip()]) + b"\n"
    done = subprocess.run(
        [sys.executable, "-m", "kvproof.ci.worker"],
        input=lines,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    replies = [wire.reply_of(line) for line in done.stdout.splitlines()]
    assert [(type(reply), reply.exit_code) for reply in replies] == [(wire.Refused, 3)] * 3
    assert "not a request" in replies[0].message
    assert replies[2].message == "the first request must be Setup"
