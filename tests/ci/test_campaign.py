"""Campaigns: leases in a fixed round, verdicts in order, one exit code.

Workers are local here (`tests/ci/local.py`); real processes are in test_process.py and test_cli.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import ClassVar

import msgspec
import pytest

from kvproof.ci import campaign, confirm, events, wire
from kvproof.ci.campaign import Campaign, Plan
from kvproof.ci.folder import FolderReporter, open_folder
from kvproof.ci.process import Worker
from kvproof.corpus.known import Known
from kvproof.model.config import ALLOCATORS
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.properties.lanes import EVERYWHERE, lane_for
from tests.ci.local import LocalWorker

SEEDED = replace(lane_for("seeded", device="cpu"), lease_ops=300)
HYPOTHESIS = replace(lane_for("hypothesis", device="cpu"), lease_ops=30)


TWO = ("token", "paged")


def plan(
    target="null",
    *,
    lanes=(SEEDED,),
    allocators=TWO,
    leases=6,
    seconds=None,
    seed=5,
    workers=1,
    **rest,
):
    options = {"misuse": False, "longest": 100} | rest
    return Plan(target, allocators, lanes, seed, seconds, leases, workers, **options)


class Log:
    """Keeps every event."""

    def __init__(self):
        self.events = []

    def report(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.setattr(campaign, "Worker", LocalWorker)
    monkeypatch.setattr(confirm, "Worker", LocalWorker)
    LocalWorker.made.clear()


def run(of, *, known=(), folder=None):
    log = Log()
    if folder is None:
        return Campaign(of, tuple(known), [log]).run(), log
    record = of.record()
    with open_folder(folder, record) as taken:
        reporters = [log, FolderReporter(taken.path, record)]
        return Campaign(of, tuple(known), reporters, taken).run(), log


# --- turns -----------------------------------------------------------------------------------------


def test_a_round_gives_each_lane_and_allocator_its_share():
    lanes = tuple(lane_for(name, device="cpu") for name in EVERYWHERE)
    turns = plan(lanes=lanes).turns()
    counts = Counter((lane.name, allocator) for lane, allocator in turns)
    assert counts == {
        ("seeded", "paged"): 6,
        ("seeded", "token"): 2,
        ("audited", "paged"): 6,
        ("hypothesis", "paged"): 3,
        ("hypothesis", "token"): 1,
    }
    # Everything is had early: the first turns are all different.
    assert len(set(turns[: len(counts)])) == len(counts)


def test_every_kind_has_its_share():
    """Kinds with more sides have more to go wrong."""
    turns = plan(lanes=(SEEDED,), allocators=ALLOCATORS).turns()
    counts = Counter(allocator for _, allocator in turns)
    each = 2  # of the seeded lane itself
    assert counts == {
        "paged": 3 * each,
        "token": each,
        "swa": 4 * each,
        "swa-ring": each,
        "pure-swa": each,
        "hisparse": 2 * each,
        "hisparse-v4": 2 * each,
        "mamba": each,
        "page-interleave": 2 * each,
    }
    assert [allocator for _, allocator in turns[: len(ALLOCATORS)]] == list(ALLOCATORS)


def test_what_launches_nothing_is_audited_only_when_nothing_else_is_asked_for():
    audited = lane_for("audited", device="cpu")

    def audits(lanes, allocators):
        turns = plan(lanes=lanes, allocators=allocators).turns()
        return {allocator for lane, allocator in turns if lane is audited}

    nothing = {"token", "pure-swa", "mamba"}
    assert audits((audited,), ALLOCATORS) == set(ALLOCATORS)
    assert audits((audited,), ("token",)) == {"token"}
    assert audits((SEEDED, audited), ALLOCATORS) == {*ALLOCATORS} - nothing
    assert audits((SEEDED, audited), ("mamba",)) == set()


# --- what it tells, and how it ends ----------------------------------------------------------------


def test_a_clean_campaign_ends_with_0():
    status, log = run(plan())
    assert status == 0
    (started,), (finished,) = log.of(events.Started), log.of(events.Finished)
    assert log.events[0] is started
    assert log.events[-1] is finished
    assert (started.target, started.seed, started.workers) == ("null", 5, 1)
    assert (started.allocators, started.absent) == (TWO, ())
    assert started.controls[0] == "canary"
    assert len(started.controls) == 4
    assert (finished.exit_code, finished.leases, finished.problems) == (0, 6, [])
    done = log.of(events.LeaseFinished)
    assert [event.verdict.lease for event in done] == list(range(6))
    assert [event.allocator for event in done] == ["token", "paged", "token", "paged", "paged", "paged"]
    assert sum(finished.checked.values()) == sum(event.verdict.checked for event in done) == done[-1].checked
    assert all(worker.closed for worker in LocalWorker.made)


class Fewer(LocalWorker):
    """A target that has two kinds. lacks_of: of its capabilities."""

    lacks_of: ClassVar[dict[str, frozenset[str]]] = {}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        fewer = replace(self.ready.capabilities, allocators=TWO, lacks_of=self.lacks_of)
        self.ready = msgspec.structs.replace(self.ready, capabilities=fewer)


def test_kinds_that_the_target_lacks_are_left_out_and_told(monkeypatch):
    monkeypatch.setattr(campaign, "Worker", Fewer)
    status, log = run(plan(allocators=("swa", "token", "mamba", "paged"), leases=5))
    assert status == 0
    (started,) = log.of(events.Started)
    assert (started.allocators, started.absent) == (("token", "paged"), ("swa", "mamba"))
    # Lease numbers have no holes: the round is that of the kinds that are there.
    done = log.of(events.LeaseFinished)
    assert [event.allocator for event in done] == ["token", "paged", "token", "paged", "paged"]


def test_a_campaign_of_kinds_that_the_target_lacks_is_bad_input(monkeypatch):
    monkeypatch.setattr(campaign, "Worker", Fewer)
    words = "null has no allocator of kind swa, mamba; it has paged, token"
    with pytest.raises(UserError, match=f"^{words}$") as caught:
        run(plan(allocators=("swa", "mamba")))
    assert caught.value.exit_code == 2
    assert all(worker.closed for worker in LocalWorker.made)


def test_a_call_that_one_kind_lacks_is_told_only_when_it_was_skipped(monkeypatch):
    """What every kind lacks is told in any case."""
    monkeypatch.setattr(campaign, "Worker", Fewer)
    lacks_of = {"token": frozenset({"Resize", "FreePages"}), "paged": frozenset({"Resize", "Remap"})}
    monkeypatch.setattr(Fewer, "lacks_of", lacks_of)
    _, log = run(plan())
    assert log.of(events.Finished)[0].skipped == {"Resize": 0}


def test_workers_are_told_which_kinds_they_will_be_asked_for():
    """SGLang loads no others. To confirm a failure takes one."""
    run(plan("planted:padding-page-free", leases=1))
    confirming = [
        worker for worker in LocalWorker.made if any(isinstance(ask, wire.Confirm) for ask in worker.asked)
    ]
    assert confirming
    for worker in LocalWorker.made:
        if worker in confirming:
            ((ask),) = worker.asked
            assert worker.seat.allocators == (wire.trace_of(ask.trace).config.allocator,)
        else:
            assert worker.seat.allocators == TWO


def test_a_new_failure_ends_with_1_and_is_confirmed_in_a_process_of_its_own():
    status, log = run(plan("planted:padding-page-free"))
    assert status == 1
    found, confirmed = log.of(events.FailureFound), log.of(events.FailureConfirmed)
    assert found
    prints = [event.failure.fingerprint for event in found]
    assert prints == [event.failure.fingerprint for event in confirmed]
    assert len(set(prints)) == len(prints)
    for event in confirmed:
        assert event.known is None
        assert (event.confirmed.failed, event.confirmed.times, event.confirmed.failed_small) == (3, 3, 3)
        assert event.seen >= 1
        assert event.confirmed.maps is not None
    fresh = [
        worker for worker in LocalWorker.made if any(isinstance(ask, wire.Confirm) for ask in worker.asked)
    ]
    assert [len(worker.asked) for worker in fresh] == [1] * len(found)
    assert all(worker.closed for worker in LocalWorker.made)


def known(fingerprint, release="planted:padding-page-free"):
    package, _, version = release.partition(" ")
    return Known(fingerprint, package, (version,), "paged/x.json", "fault", "begins with page 0")


@cache
def prints():
    """What there is to be found in the fault of this file's choice."""
    _, log = run(plan("planted:padding-page-free", leases=2))
    return [event.failure.fingerprint for event in log.of(events.FailureFound)]


def test_known_failures_alone_end_with_4():
    known_all = [known(name) for name in prints()]
    status, log = run(plan("planted:padding-page-free", leases=2), known=known_all)
    assert status == 4
    assert {event.known for event in log.of(events.FailureConfirmed)} == {"fault: begins with page 0"}


@pytest.mark.parametrize("which", ["one missing", "other release"])
def test_a_failure_that_is_not_known_in_this_release_ends_with_1(which):
    if which == "one missing":
        entries = [known(name) for name in prints()[1:]]
    else:
        entries = [known(name, "planted:padding-page-free 0.1") for name in prints()]
    assert run(plan("planted:padding-page-free", leases=2), known=entries)[0] == 1


@pytest.mark.parametrize("misuse", [False, True])
def test_no_work_ends_with_3(misuse):
    """Time for no lease at all: nothing was checked, whatever was to be checked."""
    status, log = run(plan(leases=None, seconds=0.0, misuse=misuse))
    assert status == 3
    (finished,) = log.of(events.Finished)
    assert (finished.leases, finished.problems) == (0, ["no op was checked"])


def test_a_mark_that_is_due_and_missing_ends_with_3(monkeypatch):
    monkeypatch.setattr("kvproof.ci.floors.MARK_FLOOR_OPS", 10)
    status, log = run(plan(leases=2, longest=1))
    assert status == 3
    assert "never reached" in log.of(events.Finished)[0].problems[0]
    # What misuse leaves behind ends traces early: there, marks are not due.
    assert run(plan(leases=2, longest=1, misuse=True))[0] == 0


def test_a_failure_outweighs_missing_work(monkeypatch):
    monkeypatch.setattr("kvproof.ci.floors.MARK_FLOOR_OPS", 10)
    assert run(plan("planted:padding-page-free", leases=2, longest=1))[0] == 1


def test_a_blind_harness_does_not_start(monkeypatch):
    def blind(self, request, *rest, **more):
        if isinstance(request, wire.RunControls):
            return wire.ControlsDone(("canary",), ("planted:free-repeats", "planted:x"))
        return ask(self, request, *rest, **more)

    ask = LocalWorker.ask
    monkeypatch.setattr(LocalWorker, "ask", blind)
    with pytest.raises(
        InfrastructureError, match="blind: it missed planted:free-repeats, planted:x; run `kvproof doctor`"
    ):
        run(plan())
    assert all(worker.closed for worker in LocalWorker.made)


def test_misuse_is_drawn_when_asked_for():
    status, _ = run(plan("null", misuse=True, allocators=("paged",)))
    assert status == 0
    leases = [
        ask.lease for worker in LocalWorker.made for ask in worker.asked if isinstance(ask, wire.RunLease)
    ]
    assert all(lease.space.misuse for lease in leases)


# --- the same again --------------------------------------------------------------------------------


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("campaign.json", "times.jsonl", "waiting.jsonl")
    }


def test_a_longer_campaign_begins_with_the_shorter_ones_bytes(tmp_path):
    results = []
    for leases in (4, 4, 9):
        folder = tmp_path / str(len(results))
        folder.mkdir()
        run(plan("planted:last-page-refused", lanes=(SEEDED, HYPOTHESIS), leases=leases), folder=folder)
        results.append(files(folder))
    short, again, long = results
    assert short == again
    assert any(name.startswith("failures/") for name in short)
    assert len(long["verdicts.jsonl"].splitlines()) == 9
    assert long["verdicts.jsonl"].startswith(short["verdicts.jsonl"])
    # What the shorter one found, the longer one found in the same trace.
    varying = ("verdicts.jsonl", "confirmed.jsonl")
    assert {name: data for name, data in short.items() if name not in varying}.items() <= long.items()
    assert long["confirmed.jsonl"].startswith(short["confirmed.jsonl"])


def test_another_seed_is_another_campaign(tmp_path):
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        run(plan(seed=seed), folder=tmp_path / str(seed))
    assert files(tmp_path / "1") != files(tmp_path / "2")


def test_verdicts_come_in_order_whoever_is_first(monkeypatch, tmp_path):
    """Two workers; the one that has lease 0 is held up until five others are done."""
    enough = threading.Event()
    done = []
    ask = LocalWorker.ask

    def slow(self, request, *rest, **more):
        if isinstance(request, wire.RunLease) and request.lease.number == 0:
            assert enough.wait(30)
        reply = ask(self, request, *rest, **more)
        if isinstance(request, wire.RunLease):
            done.append(request.lease.number)
            if len(done) == 5:
                enough.set()
        return reply

    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        if workers == 2:
            monkeypatch.setattr(LocalWorker, "ask", slow)
        _, log = run(plan(workers=workers, leases=8), folder=tmp_path / str(workers))
        assert [event.verdict.lease for event in log.of(events.LeaseFinished)] == list(range(8))
    assert done.index(0) >= 5
    # What came early was told at once, to be kept.
    assert [event.verdict.lease for event in log.of(events.LeaseAhead)][:5] == [1, 2, 3, 4, 5]
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_what_ends_a_seat_ends_the_campaign(monkeypatch):
    ask = LocalWorker.ask

    def dies(self, request, *rest, **more):
        if isinstance(request, wire.RunLease) and request.lease.number == 2:
            raise InfrastructureError("a worker died")
        return ask(self, request, *rest, **more)

    monkeypatch.setattr(LocalWorker, "ask", dies)
    with pytest.raises(InfrastructureError, match="a worker died"):
        run(plan(workers=2, leases=None, seconds=60.0))
    assert all(worker.closed for worker in LocalWorker.made)


def test_the_real_worker_is_what_is_replaced_here():
    local = {*dir(LocalWorker), *vars(LocalWorker("null", SEEDED))}
    assert {name for name in vars(Worker) if not name.startswith("_")} <= local
