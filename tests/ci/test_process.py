"""Real worker processes: what they answer, what they refuse, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvproof.ci import wire
from kvproof.ci.process import Limits, Seat, Worker, WorkerDied
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
from tests.ci import theirs
from tests.ci.local import alive, children, third_party
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
        told: list[wire.TraceDone] = []
        assert worker.ask(wire.RunLease(lease), wire.LeaseEnd, told.append) == wire.LeaseEnd()
        whole = wire.lease_done(run_lease(target, lease))
        assert wire.joined(2, "seeded", (done.part for done in told)) == whole
        assert (len(told), told[-1].left) == (whole.traces, 0)
        # Behind any trace it goes on to the same end.
        rest: list[wire.TraceDone] = []
        worker.ask(wire.RunLease(lease, 3, told[2].left), wire.LeaseEnd, rest.append)
        assert rest == told[3:]

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
            worker.ask(wire.Setup("null", "auto", "cpu", False, ""), wire.ControlsDone)
        assert worker.ask(wire.RunControls(), wire.ControlsDone) == done
        pids = {worker.pid, worker.parent}
        assert len(pids) == 2
        assert (worker.forks, worker.restarts) == (True, 0)
    assert not [pid for pid in pids if alive(pid)]


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
            InfrastructureError,
            match=r"died on a replay request: it died of exit 1; its last words: KeyError: 'seven'",
        ):
            worker.ask(replayed(7), wire.Replayed)
        worker.revive()
        assert worker.ask(replayed(4), wire.Replayed).runs == [[]]


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("nonsense", UserError, "there is no target 'nonsense'"),
        ("theirs==bad", InfrastructureError, "target theirs==bad: RuntimeError: no such version"),
        (
            "theirs==exit",
            InfrastructureError,
            "died on loading theirs==exit: it died of exit 1; its last words: I would rather not",
        ),
    ],
)
def test_a_target_that_cannot_be_loaded(tmp_path, monkeypatch, target, kind, message):
    for name, value in third_party(tmp_path, THEIRS).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind, match=message) as caught:
        Worker(target, SEEDED)
    assert "\n" not in str(caught.value)


# --- births and deaths -----------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The name of a target that was told what to do (`tests/ci/theirs.py`), and the file that says it."""

    def tell(how: str) -> tuple[str, Path]:
        name, environment = theirs.install(tmp_path / "plug", how)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        return name, tmp_path / "plug" / "told"

    return tell


def test_a_worker_is_revived_as_often_as_one_likes(told):
    """Alive or dead, idle or at work: what a dying process still takes from the pipe is not missed."""
    name, file = told("nothing")
    with Worker(name, SEEDED, Seat(limits=Limits(hang_seconds=2.0))) as worker:
        parent, pids = worker.parent, {worker.pid}
        for number in range(60):
            if number % 3 == 1:
                os.kill(worker.pid, signal.SIGKILL)
            elif number % 3 == 2:
                file.write_text("segv")
                with pytest.raises(WorkerDied):
                    worker.ask(large_free_trace(), wire.Replayed)
                file.write_text("nothing")
            worker.revive()
            pids.add(worker.pid)
            assert worker.ask(replayed(4), wire.Replayed).checked == 1
        assert worker.parent == parent
        assert (worker.restarts, len(pids)) == (60, 61)


def test_a_parent_that_is_gone_is_replaced(told):
    name, _ = told("nothing")
    with Worker(name, SEEDED) as worker:
        before = {worker.parent, worker.pid}
        os.kill(worker.parent, signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=r"a worker died on a replay request: somebody killed it \(SIGKILL\)"
        ):
            worker.ask(replayed(4), wire.Replayed)
        worker.revive()
        assert worker.ask(replayed(4), wire.Replayed).checked == 1
        assert not before & {worker.parent, worker.pid}
        assert not [pid for pid in before if alive(pid)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_kill_while_it_loads_is_survived(told, how):
    name, file = told("load-slowly")
    loading = file.with_name("told.loading")

    def somebody() -> None:
        while not loading.exists():
            time.sleep(0.01)
        (pid,) = children(os.getpid())
        file.write_text("nothing")
        os.kill(pid, how)

    other = threading.Thread(target=somebody)
    other.start()
    with Worker(name, SEEDED) as worker:
        other.join()
        assert worker.ask(replayed(4), wire.Replayed).checked == 1


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("segv", "it died of SIGSEGV"),
        ("exit0", "it died of exit 0"),
        ("exit7", "it died of exit 7; its last words: I am off"),
        ("kill", r"somebody killed it \(SIGKILL\)"),
    ],
)
def test_a_target_that_dies_as_it_is_loaded_is_told_in_one_line(told, how, cause):
    name, _ = told(f"load-{how}")
    with pytest.raises(InfrastructureError, match=f"^a worker died on loading theirs:.*: {cause}$") as caught:
        Worker(name, SEEDED)
    assert "\n" not in str(caught.value)
    assert children(os.getpid()) == []


def test_whoever_may_be_asked_twice_is_asked_again_when_killed(told, monkeypatch):
    name, _ = told("nothing")
    with Worker(name, SEEDED) as worker:
        asked = []
        ask = worker.ask

        def killed(request, *rest, **more):
            asked.append(request)
            if len(asked) <= 3:
                os.kill(worker.pid, signal.SIGKILL)
            return ask(request, *rest, **more)

        monkeypatch.setattr(worker, "ask", killed)
        assert worker.insist(replayed(4), wire.Replayed).checked == 1
        assert (len(asked), worker.restarts) == (4, 3)


def test_whoever_dies_of_itself_is_not_asked_again(told):
    name, _ = told("abort")
    with Worker(name, SEEDED) as worker:
        with pytest.raises(WorkerDied) as caught:
            worker.insist(large_free_trace(), wire.Replayed)
        assert worker.restarts == 0
        death = caught.value.death
        assert (death.kind, death.how) == ("crash", "SIGABRT")
        assert death.entry is not None
        assert death.entry.ops == (new(12), ops.Free((0,)))


def large_free_trace() -> wire.Replay:
    return wire.Replay(wire.text_of(Trace(POOL, (new(12), ops.Free((0,)), new(1)))), 1)


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


CHATTY = """
import os, sys
from kvproof.impl.targets.null import Null

class Theirs(Null):
    name = release = "theirs"

    def build(self, config):
        if config.size == 9:
            os.fork() or os.execvp("sleep", ["sleep", "60"])
        os.write(2, b"x" * (6 << 20) + b"\\nlast\\n")
        return super().build(config)
"""


def test_a_target_that_talks_without_end_fills_no_disk_and_starts_nothing_that_stays(tmp_path, monkeypatch):
    """What it wrote is cut, what it started ends with it, and a signal to its whole group stays with it."""
    for variable, value in third_party(tmp_path, CHATTY).items():
        monkeypatch.setenv(variable, value)
    with Worker("theirs", SEEDED) as worker:
        started = worker.parent
        assert os.getpgid(worker.pid) == started != os.getpgid(0)
        for size in (9, 8, 8, 8, 8, 8):
            text = wire.text_of(Trace(Config("paged", size, 1), (new(1),)))
            worker.ask(wire.Replay(text, 1), wire.Replayed)
        assert os.fstat(worker._living._errors.fileno()).st_size <= 24 << 20
    deadline = time.monotonic() + 5  # until the kernel has cleared it away
    while group_is_there(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_is_there(started)


def group_is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
