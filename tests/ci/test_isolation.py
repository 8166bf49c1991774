"""A lease comes to its end whatever its traces, or somebody else, do to its processes.

Every way to die: named rightly, with the trace that did it, and the lease going on behind it to the same
verdict as if death were only an answer (`tests/ci/oracle.py`).
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof.ci import journal, process, wire
from kvproof.ci.isolation import MOST_DEATHS, MOST_HANGS, LeaseRun, failure_of
from kvproof.ci.journal import Entry
from kvproof.ci.process import Death, Limits, Seat, Worker
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError
from kvproof.properties.failure import Failure
from kvproof.properties.lanes import lane_for
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.run import run_trace
from kvproof.properties.space import space_for
from tests.ci import theirs
from tests.ci.oracle import oracle, without_found
from tests.ci.theirs import kill, large_free
from tests.model.strategies import new

SEEDED = lane_for("seeded", device="cpu")
HYPOTHESIS = lane_for("hypothesis", device="cpu")
SPACE = space_for(Null.capabilities, "paged")
LIMITS = Limits(hang_seconds=1.0, memory_mib=200)
DEATHS = {
    "segv": ("P7", "Free", "crash SIGSEGV"),
    "string": ("P7", "Free", "crash SIGSEGV"),
    "abort": ("P6", "Free", "crash SIGABRT"),
    "exit7": ("P6", "Free", "crash exit 7"),
    "exit0": ("P6", "Free", "crash exit 0"),
    "exit86": ("P6", "Free", "crash exit 86"),
    "kill": ("P6", "Free", "crash SIGKILL"),
    "hang": ("P6", "Free", "hang"),
    "sleep": ("P6", "Free", "hang"),
    "memory": ("P6", "Trace", "out-of-memory"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[Worker, Path]]:
    """One worker for all, and the file that says what its target does."""
    folder = tmp_path_factory.mktemp("theirs")
    with pytest.MonkeyPatch.context() as patch:
        name, environment = theirs.install(folder / "plug", "nothing")
        for variable, value in environment.items():
            patch.setenv(variable, value)
        (folder / "journal").mkdir()
        with Worker(name, SEEDED, Seat(folder / "journal", "seat", "", LIMITS)) as worker:
            yield worker, folder / "plug" / "told"


@pytest.fixture
def told(served):
    """The worker, in a fresh process, once it has been told what to do."""

    def tell(how: str) -> Worker:
        worker, file = served
        file.with_name("told.once").unlink(missing_ok=True)
        file.write_text(how)
        worker.revive()
        return worker

    return tell


def lease(worker: Worker, number: int = 0, count: int = 700, lane: str = "seeded") -> Lease:
    return Lease(number, 3, worker.ready.name, lane, SPACE, count, longest=60)


def run(worker: Worker, of: Lease, believed: set[str] | None = None) -> tuple[wire.LeaseDone, list[str]]:
    notes: list[str] = []
    return LeaseRun(worker, of, set() if believed is None else believed, notes.append).run(), notes


# --- what a death is -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DEATHS)
def test_every_death_is_a_failure_with_its_trace_and_the_lease_goes_on(told, how):
    worker = told(how)
    of = lease(worker)
    done, notes = run(worker, of)
    (line,) = done.found
    failure, trace = line.failure, wire.trace_of(line.trace)
    assert (failure.property_id, failure.op, failure.divergence) == DEATHS[how]
    assert (failure.allocator, failure.step, failure.deadly) == ("paged", len(trace.ops) - 1, True)
    assert "\n" not in failure.message
    expected, deadly = oracle(of, failure.fingerprint)
    assert trace == deadly[0]
    model = model_for(trace.config)
    done_by = [large_free(model.apply(op).call) for op in trace.ops]
    assert done_by == [False] * (len(trace.ops) - 1) + [True]
    if failure.divergence == "hang":
        assert done.seen == {failure.fingerprint: MOST_HANGS}
        assert done.traces >= len(deadly[:MOST_HANGS])
    else:
        assert len(deadly) > 2
        assert without_found(done) == expected
    # Whoever comes again when asked is at fault; nobody else is spoken of. Signals of others excepted.
    assert notes == []
    if how == "exit7":
        assert "its last words: I am off" in failure.message


def test_a_death_costs_as_many_ops_as_its_trace_had(told):
    """Leases that end for want of ops, not of processes."""
    worker = told("segv")
    fingerprint = Failure(*DEATHS["segv"][:2], "paged", DEATHS["segv"][2], 0, "").fingerprint
    deaths = []
    for number in range(12):
        of = lease(worker, number, 150)
        done, _ = run(worker, of, {fingerprint})
        assert without_found(done) == oracle(of, fingerprint)[0]
        deaths.append(done.seen.get(fingerprint, 0))
    assert len({count for count in deaths if 0 < count < MOST_DEATHS}) > 1


def test_an_error_outside_a_call_is_a_death_with_its_last_words(told):
    """The subject's own code raises, where the allocator's errors are answers."""
    worker = told("raise")
    done, _ = run(worker, lease(worker))
    assert [line.failure.divergence for line in done.found] == ["crash exit 1"]
    assert "its last words: KeyError" in done.found[0].failure.message


def test_a_death_while_an_allocator_is_built_has_a_trace_without_ops(told):
    worker = told("build")
    done, _ = run(worker, lease(worker))
    (line,) = done.found
    assert (line.failure.property_id, line.failure.op, line.failure.step) == ("P7", "Build", 0)
    trace = wire.trace_of(line.trace)
    assert trace.ops == ()
    assert trace.config.need_sort
    assert done.traces > done.seen[line.failure.fingerprint] == MOST_DEATHS


def test_a_death_on_the_other_path_breaks_what_relates_the_two(told):
    worker = told("other-segv")
    done, _ = run(worker, lease(worker, count=3000))
    assert {(line.failure.property_id, line.failure.op) for line in done.found} == {("P16", "path-other")}
    # The trace is the one that went well by the first path.
    assert run_trace(Null(Ticket()), wire.trace_of(done.found[0].trace)).failures == []
    assert done.checked > 1000


def test_a_trace_that_keeps_memory_is_found_by_running_it_again(told):
    """It takes several runs in one process: 40 MiB each of the 200 allowed."""
    worker = told("keep")
    done, notes = run(worker, lease(worker, count=2000))
    assert {line.failure.divergence for line in done.found} <= {"out-of-memory"}
    assert done.found or notes


@pytest.mark.parametrize("path", ["model", "torch"])
def test_what_was_not_begun_is_no_failure(path):
    assert failure_of(Death("crash", "SIGSEGV"), path) is None
    entry = Entry(Config("paged", 16, 4), path, (new(1), ops.Free((0,))))
    failure = failure_of(Death("crash", "SIGBUS", entry, "bye"), path)
    assert failure is not None
    assert (failure.property_id, failure.op, failure.divergence) == ("P7", "Free", "crash SIGBUS")
    assert failure.message == "the process is gone: it died of SIGBUS; its last words: bye"


def test_deaths_of_one_kind_are_believed_once_one_has_come_again(told, monkeypatch):
    worker = told("segv")
    of = lease(worker)
    believed: set[str] = set()
    first, _ = run(worker, of, believed)
    assert believed == set(first.seen)
    asked = []
    insist = worker.insist
    monkeypatch.setattr(worker, "insist", lambda *rest, **more: asked.append(rest) or insist(*rest, **more))
    assert run(worker, of, believed)[0] == first
    assert asked == []


# --- interruptions ---------------------------------------------------------------------------------


def test_slowness_is_no_hang(told):
    """An op that took three times the limit once, and not again: nobody is accused, and nothing is lost."""
    worker = told("slow-once")
    of = lease(worker)
    done, notes = run(worker, of)
    assert (done, done.found) == (wire.lease_done(run_lease(Null(Ticket()), of)), [])
    assert len(notes) == 1
    assert "it did no op for 1 s; its trace passes when replayed, so it runs again" in notes[0]


@pytest.mark.parametrize("how", ["nothing", "segv"])
@pytest.mark.parametrize("signals", [(signal.SIGKILL, signal.SIGTERM), (signal.SIGKILL,)], ids=len)
def test_the_verdict_does_not_depend_on_interruptions(told, how, signals):
    """Somebody kills the serving process again and again, and the one that it comes from as well."""
    worker = told(how)
    leases = [lease(worker, number, 2500) for number in range(8)]
    undisturbed = [run(worker, of)[0] for of in leases]
    dice = random.Random(len(how))
    over = threading.Event()
    killed = []

    def somebody():
        while not over.wait(dice.uniform(0.005, 0.08)):
            # One parent in all: it takes a second to load the next. While that goes on nobody serves.
            whom = worker.parent if len(signals) == 1 and len(killed) == 2 else worker.pid
            if (len(killed) == 2 or whom != worker.parent) and kill(whom, dice.choice(signals)):
                killed.append(whom)

    other = threading.Thread(target=somebody)
    other.start()
    notes: list[str] = []
    try:
        rounds = 0
        while rounds < 1 or (len(killed) < 5 and rounds < 50):
            rounds += 1
            for of, expected in zip(leases, undisturbed, strict=True):
                done, more = run(worker, of)
                assert done == expected
                notes += more
    finally:
        over.set()
        other.join()
    assert len(killed) >= 5
    assert notes
    assert all("somebody killed it (SIG" in note for note in notes)


@pytest.mark.parametrize("lane", ["seeded", "hypothesis"])
@pytest.mark.parametrize("whom", ["pid", "parent"])
@pytest.mark.parametrize("when", ["idle", "between traces", "in an op"])
def test_a_kill_at_any_moment_changes_nothing(told, served, monkeypatch, when, whom, lane):
    worker = told("mark" if when == "in an op" else "nothing")
    of = lease(worker, count=300 if lane == "hypothesis" else 700, lane=lane)
    undisturbed, _ = run(worker, of) if when != "in an op" else (None, None)
    kills = []
    take = LeaseRun._take

    def taken(self, done):
        take(self, done)
        if when == "between traces" and not kills:
            kills.append(kill(getattr(worker, whom), signal.SIGKILL))

    monkeypatch.setattr(LeaseRun, "_take", taken)
    if when == "idle":
        kills.append(kill(getattr(worker, whom), signal.SIGTERM))

    def somebody():
        marker = Path(f"{served[1]}.once")
        while not marker.exists():
            time.sleep(0.01)
        kills.append(kill(getattr(worker, whom), signal.SIGKILL))

    other = threading.Thread(target=somebody)
    if when == "in an op":
        other.start()
    done, notes = run(worker, of)
    if when == "in an op":
        other.join()
        undisturbed, _ = run(worker, of)
    assert done == undisturbed
    assert all(kills)
    assert len(notes) == len(kills) == 1
    assert all("somebody killed it" in note for note in notes)


def test_whoever_kills_without_end_is_named(told, monkeypatch):
    """Always the same trace's process: no trace of ours is blamed for it, and it does not go on for ever."""
    worker = told("nothing")
    ask = worker.ask

    def killed(request, *rest, **more):
        if isinstance(request, wire.RunLease):
            kill(worker.pid, signal.SIGKILL)
        return ask(request, *rest, **more)

    monkeypatch.setattr(worker, "ask", killed)
    with pytest.raises(
        InfrastructureError, match=r"lease 0, trace 0: 21 workers ended there .*somebody killed"
    ) as caught:
        run(worker, lease(worker))
    assert "\n" not in str(caught.value)
    assert "find out who ends kvproof's processes" in str(caught.value)


# --- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_journal_that_is_damaged_as_its_worker_dies_loses_nothing(told, monkeypatch, damage):
    """The trace runs again, and dies again; its journal is whole then."""
    worker = told("segv")
    of = lease(worker)
    undisturbed, _ = run(worker, of)
    dice = random.Random(damage)
    reads = []
    read_journal = process.journal.read_journal

    def damaged(path):
        reads.append(path)
        if len(reads) % 2 == 0:
            return read_journal(path)
        data = bytearray(path.read_bytes())
        # Behind the end of the newest records stand those of longer traces before.
        end = journal._HEAD.size + sum(
            journal._RECORD_BYTES + len(r) for r in journal._records(bytes(data))[0]
        )
        match damage:
            case "cut":
                data[dice.randrange(8, end) :] = b""
            case "flip":
                data[dice.randrange(end)] ^= 1 << dice.randrange(8)
            case "empty":
                data = bytearray()
            case "gone":
                return read_journal(path.with_name("nothing"))
        other = path.with_name("damaged")
        other.write_bytes(data)
        return read_journal(other)

    monkeypatch.setattr(process.journal, "read_journal", damaged)
    done, notes = run(worker, of)
    assert done == undisturbed
    assert notes
    assert all("so it runs again" in note for note in notes)


def test_a_journal_that_is_always_lost_is_told(told, monkeypatch):
    worker = told("segv")
    monkeypatch.setattr(process.journal, "read_journal", lambda path: None)
    with pytest.raises(
        InfrastructureError, match=r"4 workers ended there \(it died of SIGSEGV\), but no call"
    ):
        run(worker, lease(worker))


def test_a_file_cut_off_under_a_worker_at_work_is_told(served, tmp_path):
    """Whoever writes to what is no longer there is killed by it; the command line is not."""
    worker, file = served
    file.write_text("nothing")
    with Worker(worker.ready.name, SEEDED, Seat(tmp_path, "mine", "", LIMITS)) as mine:
        (tmp_path / "mine.journal").write_bytes(b"")
        with pytest.raises(InfrastructureError, match=r"it died of SIGBUS.*no call was on its way") as caught:
            run(mine, lease(mine))
    assert "\n" not in str(caught.value)


def test_garbage_among_its_replies_loses_no_verdict(told):
    """Somebody writes to the pipe of the replies, once: a verdict may be lost in it, so the lease goes on
    from before."""
    worker = told("garbage-once")
    of = lease(worker)
    done, notes = run(worker, of)
    assert done == wire.lease_done(run_lease(Null(Ticket()), of))
    assert len(notes) == 1
    assert "a reply that is none" in notes[0]


def test_garbage_without_end_is_told(told):
    worker = told("garbage")
    with pytest.raises(InfrastructureError, match=r"lease 0, trace [0-9]+: 4 workers ended .*that is none"):
        run(worker, lease(worker))


def test_half_a_reply_hides_no_death(told):
    """What its parent says of it stands on a line of its own."""
    worker = told("garbage-segv")
    of = lease(worker)
    done, notes = run(worker, of)
    assert notes == []
    assert [line.failure.divergence for line in done.found] == ["crash SIGSEGV"]
    assert without_found(done) == oracle(of, done.found[0].failure.fingerprint)[0]


# --- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [7200.0, -7200.0], ids=["ahead", "back"])
def test_a_clock_that_jumps_hangs_nobody(told, monkeypatch, jump):
    """By hours, while the worker is in an op for a moment: what counts is whether it gets on."""
    worker = told("mark")
    clock = time.monotonic
    start = clock()
    monkeypatch.setattr(process.time, "monotonic", lambda: clock() + (jump if clock() > start + 0.3 else 0.0))
    of = lease(worker)
    worker.seat = patient(worker.seat, 5.0)
    try:
        done, notes = run(worker, of)
    finally:
        worker.seat = patient(worker.seat, LIMITS.hang_seconds)
    assert (done, notes) == (wire.lease_done(run_lease(Null(Ticket()), of)), [])


@pytest.mark.parametrize("jump", [7200.0, -7200.0], ids=["ahead", "back"])
def test_a_hang_is_seen_whatever_the_clock_does(told, monkeypatch, jump):
    worker = told("hang")
    clock = time.monotonic
    start = clock()
    monkeypatch.setattr(process.time, "monotonic", lambda: clock() + (jump if clock() > start + 0.5 else 0.0))
    done, _ = run(worker, lease(worker))
    assert clock() - start < 30
    assert [line.failure.divergence for line in done.found] == ["hang"]


def patient(seat: Seat, hang_seconds: float) -> Seat:
    return replace(seat, limits=replace(seat.limits, hang_seconds=hang_seconds))
