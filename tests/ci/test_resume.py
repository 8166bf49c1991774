"""A campaign that was stopped is gone on with, from whatever is left of its folder, to the same end.

Workers are local (`tests/ci/local.py`), and what stops a campaign is a reporter that raises: at every event
in turn, before and after the folder has taken it. Real signals and disks are in test_faults.py.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvproof.ci import campaign, confirm, events
from kvproof.ci.campaign import Campaign, Plan
from kvproof.ci.folder import Folder, FolderReporter, open_folder
from kvproof.ci.resume import ConfirmedLine, VerdictLine, WaitingLine, read_progress
from kvproof.impl.targets.null import Null, NullSubject
from kvproof.model import calls
from kvproof.model.errors import InfrastructureError
from kvproof.properties.lanes import lane_for
from tests.ci.local import LocalWorker

SEEDED = replace(lane_for("seeded", device="cpu"), lease_ops=60)
LEASES = 6


class _Subject(NullSubject):
    """Counts a slot too many behind a decode of two rows, and one too few behind a clear."""

    def apply(self, call):
        answer = super().apply(call)
        if isinstance(call, calls.DecodeCall) and len(call.seq_lens) == 2:
            answer.available += 1
        elif isinstance(call, calls.ClearCall):
            answer.available -= 1
        return answer


class Faulty(Null):
    """Without torch, and with nothing that concerns a whole process: a campaign that was stopped may still be
    ending in threads of its own."""

    name = release = "faulty"

    def build(self, config):
        return _Subject()


def use_local_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(campaign, "Worker", LocalWorker)
    patch.setattr(confirm, "Worker", LocalWorker)
    patch.setattr("tests.ci.local.load_target", lambda name, ticket: Faulty(ticket))
    patch.setattr(Campaign, "_controls", lambda self, worker: ("canary",))


@pytest.fixture(autouse=True)
def local(monkeypatch):
    use_local_workers(monkeypatch)
    yield
    LocalWorker.made.clear()


def plan(leases: int | None = LEASES, seconds: float | None = None, workers: int = 1, **rest) -> Plan:
    return Plan("faulty", ("paged",), (SEEDED,), 5, seconds, leases, workers, False, 60, **rest)


class Log:
    def __init__(self, stop: int | None = None) -> None:
        self.events: list[events.Event] = []
        self._stop = stop

    def report(self, event: events.Event) -> None:
        self.events.append(event)
        if len(self.events) - 1 == self._stop:
            raise KeyboardInterrupt

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def go(wanted: Path, of: Plan | None = None, *, before: Log | None = None, after: Log | None = None) -> int:
    of = of or plan()
    record = of.record()
    with open_folder(wanted, record) as folder:
        reporters = [before or Log(), FolderReporter(folder.path, record), after or Log()]
        return Campaign(of, (), reporters, folder).run()


def results(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("campaign.json", "times.jsonl") and path.suffix != ".damaged"
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict[str, bytes], int]:
    """What an undisturbed campaign leaves, and how many events it has."""
    with pytest.MonkeyPatch.context() as patch:
        use_local_workers(patch)
        folder, log = tmp_path_factory.mktemp("whole"), Log()
        assert go(folder, after=log) == 1
        assert log.of(events.FailureFound)
        return results(folder), len(log.events)


def goes_on(folder: Path, whole: dict[str, bytes]) -> Log:
    """Run it to its end, and see that nothing is missing or twice."""
    log = Log()
    assert go(folder, after=log) == 1
    assert results(folder) == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return log


# --- stopped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after"])
def test_stopped_at_any_event_it_comes_to_the_same(tmp_path, whole, where):
    expected, count = whole
    for stop in range(count):
        folder = tmp_path / str(stop) / "out"
        try:
            status = go(folder, **{where: Log(stop)})
        except KeyboardInterrupt:
            status = None
        last = (where, stop) == ("after", count - 1)
        assert status is None
        if last:
            assert results(folder) == expected
            continue
        log = goes_on(folder, expected)
        # What was reported is not reported again, and no lease that is on record has run again.
        resumed = log.of(events.Resumed)
        told = len(log.of(events.LeaseFinished)) + (resumed[0].leases if resumed else 0)
        assert told == LEASES
        reported = len(log.of(events.FailureConfirmed)) + (resumed[0].confirmed if resumed else 0)
        assert reported == expected["confirmed.jsonl"].count(b"\n")


def test_stopped_again_and_again_it_comes_to_the_same(tmp_path, whole):
    expected, _ = whole
    folder = tmp_path / "out"
    for stop in (2, 2, 2, 2):
        with pytest.raises(KeyboardInterrupt):
            go(folder, after=Log(stop))
    goes_on(folder, expected)


def test_verdicts_that_came_before_their_turn_are_kept(tmp_path, whole):
    """Of two seats one is stopped at its lease; the other has gone on, and its work is not done twice."""
    expected, _ = whole
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        go(folder, after=Log(3))
    ahead = whole_verdicts(folder, (3, 5))
    (folder / "waiting.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in ahead))
    LocalWorker.made.clear()
    goes_on(folder, expected)
    ran = [ask.lease.number for w in LocalWorker.made for ask in w.asked if type(ask).__name__ == "RunLease"]
    assert set(ran).isdisjoint({3, 5})
    assert not (folder / "waiting.jsonl").exists()


def whole_verdicts(folder: Path, numbers: tuple[int, ...]) -> list[WaitingLine]:
    """The verdicts of these leases, as they are when they come early."""
    log = Log()
    go(folder.with_name("other"), after=log)
    for path in sorted(folder.with_name("other").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.with_name("other").rmdir()
    done = {event.verdict.lease: event for event in log.of(events.LeaseFinished)}
    return [WaitingLine(done[number].allocator, done[number].verdict) for number in numbers]


def test_leases_before_a_verdict_that_is_there_run_though_time_is_up(tmp_path, whole):
    """Or it would never be told."""
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        go(folder, after=Log(3))
    ahead = whole_verdicts(folder, (5,))
    (folder / "waiting.jsonl").write_bytes(msgspec.json.encode(ahead[0]) + b"\n")
    go(folder, plan(None, 0.0))
    assert (folder / "verdicts.jsonl").read_bytes() == whole[0]["verdicts.jsonl"]


def test_seconds_are_those_of_all_runs_together(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        go(folder, plan(None, 60.0), after=Log(5))
    kept = (folder / "verdicts.jsonl").read_bytes()
    times = (folder / "times.jsonl").read_text().splitlines()
    (folder / "times.jsonl").write_text("\n".join([*times, '{"lease":99,"elapsed":61.5}']) + "\n")
    log = Log()
    go(folder, plan(None, 60.0), after=log)
    (resumed,), (finished,) = log.of(events.Resumed), log.of(events.Finished)
    assert resumed.elapsed == 61.5
    assert 61.5 < finished.elapsed < 75
    assert (folder / "verdicts.jsonl").read_bytes() == kept
    assert log.of(events.LeaseFinished) == []


def test_another_release_under_the_same_name_does_not_go_on(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        go(folder, after=Log(4))
    text = (folder / "plan.json").read_text().replace('"seeded": "faulty', '"seeded": "older faulty')
    (folder / "plan.json").write_text(text)
    with pytest.raises(InfrastructureError, match=r"begun with older faulty, and now it is faulty;"):
        go(folder)


# --- damaged ---------------------------------------------------------------------------------------


def stopped(folder: Path) -> None:
    """A campaign with all its verdicts, and its first failure reported."""
    stop = Log()
    seen: Counter[str] = Counter()

    def report(event):
        seen[type(event).__name__] += 1
        if seen["FailureConfirmed"] == 1:
            raise KeyboardInterrupt

    stop.report = report  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        go(folder, after=stop)


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(data[: len(data) - 7])
        case "flipped":
            path.write_bytes(b"\x00" + data[1:])
        case "garbage behind":
            path.write_bytes(data + b"garbage\n")
        case "line lost":
            path.write_bytes(b"".join(data.splitlines(keepends=True)[1:]))


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped", "garbage behind", "line lost"])
@pytest.mark.parametrize("name", ["verdicts.jsonl", "times.jsonl", "confirmed.jsonl"])
def test_lines_that_are_damaged_run_again(tmp_path, whole, name, how):
    folder = tmp_path / "out"
    stopped(folder)
    spoil(folder / name, how)
    log = goes_on(folder, whole[0])
    (resumed,) = log.of(events.Resumed)
    if how in ("cut", "flipped", "garbage behind") or (name, how) == ("verdicts.jsonl", "line lost"):
        assert any(name in line for line in resumed.damage)
        assert (folder / name).with_suffix(".damaged").exists()
    assert all("\n" not in line for line in resumed.damage)


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped"])
@pytest.mark.parametrize("which", [".found.json", ".json"])
def test_a_failure_whose_trace_is_damaged_is_found_or_confirmed_again(tmp_path, whole, which, how):
    folder = tmp_path / "out"
    stopped(folder)
    for path in list((folder / "failures").iterdir()):
        if path.name.endswith(which) and path.name.endswith(".found.json") == (which == ".found.json"):
            spoil(path, how)
    log = goes_on(folder, whole[0])
    (resumed,) = log.of(events.Resumed)
    assert resumed.damage
    if which == ".json":
        assert (resumed.leases, resumed.confirmed) == (LEASES, 0)
    else:
        assert resumed.leases < LEASES


def test_a_trace_lost_from_the_middle_of_what_was_reported_costs_no_other_report(tmp_path):
    """A line that stays is kept, whichever line before it goes."""
    folder = tmp_path / "out"
    stopped(folder)
    (line,) = (folder / "confirmed.jsonl").read_bytes().splitlines(keepends=True)
    kept = msgspec.json.decode(line, type=ConfirmedLine)
    gone = msgspec.json.encode(msgspec.structs.replace(kept, fingerprint="00000000")) + b"\n"
    (folder / "confirmed.jsonl").write_bytes(gone + line)
    progress = read_progress(folder)
    assert set(progress.confirmed) == {kept.fingerprint}
    assert (folder / "confirmed.jsonl").read_bytes() == line
    assert (folder / "confirmed.damaged").read_bytes() == gone + line


@pytest.mark.parametrize("how", ["cut", "flipped", "garbage behind"])
def test_early_verdicts_that_are_damaged_run_again(tmp_path, whole, how):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        go(folder, after=Log(3))
    ahead = whole_verdicts(folder, (3, 5))
    (folder / "waiting.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in ahead))
    spoil(folder / "waiting.jsonl", how)
    # Stopped once more, so that something is written behind the damage.
    with pytest.raises(KeyboardInterrupt):
        go(folder, after=Log(3))
    log = goes_on(folder, whole[0])
    assert log.of(events.Resumed)[0].damage == ()


@pytest.mark.parametrize("how", ["missing", "empty", "cut"])
def test_a_plan_that_is_lost_leaves_the_folder_alone(tmp_path, whole, how):
    """Nobody knows what is in it; the campaign goes to another."""
    folder = tmp_path / "out"
    stopped(folder)
    spoil(folder / "plan.json", how)
    before = results(folder)
    assert go(folder) == 1
    assert results(folder) == before
    assert results(tmp_path / "out-2") == whole[0]


def test_a_line_is_the_same_when_it_is_read_and_written_again(whole):
    for line in whole[0]["verdicts.jsonl"].splitlines():
        assert msgspec.json.encode(msgspec.json.decode(line, type=VerdictLine)) == line


# --- no room ---------------------------------------------------------------------------------------


class Disk:
    """Fails the write of this number, half done."""

    def __init__(self, patch: pytest.MonkeyPatch, full_at: int) -> None:
        self.writes = 0
        self.full_at = full_at
        write_bytes, replace_file = Path.write_bytes, os.replace

        def due() -> bool:
            self.writes += 1
            return self.writes - 1 == self.full_at

        def full_write(path, data):
            if due():
                write_bytes(path, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return write_bytes(path, data)

        def full_replace(one, two):
            if due():
                raise OSError(errno.ENOSPC, "No space left on device")
            replace_file(one, two)

        class Short:
            """A file with room for half a line; raises where Linux does, with no room at all."""

            def __init__(self, file):
                self._file = file

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self._file.close()

            def __getattr__(self, name):
                return getattr(self._file, name)

            def write(self, data):
                if due():
                    return self._file.write(data[: len(data) // 2])
                if due():
                    raise OSError(errno.ENOSPC, "No space left on device")
                return self._file.write(data)

        open_file = Path.open

        def opened(path, mode="r", *rest, **more):
            file = open_file(path, mode, *rest, **more)
            return Short(file) if mode == "ab" and path.suffix == ".jsonl" else file

        patch.setattr(Path, "write_bytes", full_write)
        patch.setattr(os, "replace", full_replace)
        patch.setattr(Path, "open", opened)


def test_a_disk_that_is_full_at_any_write_loses_nothing(tmp_path, whole):
    """Told in one line; with room again, the same command comes to the same end."""
    expected, _ = whole
    number = 0
    while True:
        folder = tmp_path / str(number) / "out"
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number)
            try:
                go(folder)
                break
            except InfrastructureError as error:
                said = str(error)
        assert "\n" not in said
        assert "cannot be written: No space left on device" in said or "no room for another line" in said
        # Nothing is half there.
        for path in folder.rglob("*.json"):
            msgspec.json.decode(path.read_bytes())
        for path in folder.rglob("*.jsonl"):
            assert path.read_bytes()[-1:] in (b"", b"\n")
        log = goes_on(folder, expected)
        assert [event.damage for event in log.of(events.Resumed)] in ([], [()])
        number += 1
    assert number > 30
    assert results(folder) == expected


@pytest.mark.parametrize("name", ["verdicts.jsonl", "confirmed.jsonl", "failures"])
def test_a_folder_in_the_way_of_a_file_is_told_in_one_line(tmp_path, name):
    """As good as a folder without permission, which root does not know."""
    folder = tmp_path / "out"
    stopped(folder)
    path = folder / name
    if path.is_dir():
        path.rename(folder / "elsewhere")
        path.touch()
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(InfrastructureError, match=r"out: cannot be (written|gone on with): ") as caught:
        go(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_is_let_go_of_however_the_campaign_ends(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "out", after=Log(4))
    assert not {"journal", "lock"} & {path.name for path in (tmp_path / "out").iterdir()}
    with open_folder(tmp_path / "out", plan().record()) as folder:
        assert isinstance(folder, Folder)
        assert folder.progress is not None
