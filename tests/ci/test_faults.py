"""Fault injection: the whole command, and whatever can be done to its processes, its disk, its folder and its
clock. No failure is lost, none is reported twice, no lease is skipped or run twice, and the end is the same
bytes as without.

The target (`tests/ci/theirs.py`) answers wrongly in four ways and crashes in one, always at the same calls.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.ci import theirs
from tests.ci.local import children, run, start
from tests.ci.theirs import kill

SEEDED = ("--lane", "seeded", "--device", "cpu", "--allocator", "paged", "--max-trace-ops", "100")


def plan(target: str, leases: int, *rest: str) -> tuple[str, ...]:
    return ("fuzz", "-t", target, "--seed", "1", "--leases", str(leases), "--workers", "2", *SEEDED, *rest)


def results(folder: Path) -> dict[str, bytes]:
    """What must be the same however the run went: verdicts and failures, and what was reported."""
    kept = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("campaign.json", "times.jsonl") and path.suffix != ".damaged"
    }
    # Each is reported once; in which order, is no matter where the first of two was on record before.
    kept["confirmed.jsonl"] = b"".join(sorted(kept["confirmed.jsonl"].splitlines(keepends=True)))
    return kept


def is_whole(folder: Path, leases: int) -> None:
    """Every lease once and in order, every failure reported once."""
    lines = [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]
    assert [line["lease"] for line in lines] == list(range(leases))
    reported = Counter(
        json.loads(line)["fingerprint"] for line in (folder / "confirmed.jsonl").read_text().splitlines()
    )
    assert set(reported.values()) == {1}
    assert set(reported) == {name for line in lines for name in line["seen"]}
    assert set(reported) == {found["fingerprint"] for line in lines for found in line["found"]}
    stored = {path.name for path in (folder / "failures").iterdir()}
    assert stored == {f"{name}{end}" for name in reported for end in (".json", ".found.json")}
    left = {path.name for path in folder.iterdir()}
    assert left - {"verdicts.damaged", "confirmed.damaged", "waiting.damaged", "times.damaged"} == {
        "plan.json", "verdicts.jsonl", "times.jsonl", "failures", "confirmed.jsonl", "campaign.json",
    }  # fmt: skip


def one_line(error: str) -> bool:
    return error.startswith("kvproof: ") and error.count("\n") == 1


# --- kills -----------------------------------------------------------------------------------------

KILLS = 200
LEASES = 60


def told(folder: Path) -> int:
    """How many verdicts are there."""
    path = folder / "verdicts.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def family(process: subprocess.Popen[str]) -> tuple[list[int], list[int]]:
    """Of a running command: the processes that it has started, and those that serve."""
    try:
        parents = children(process.pid)
        return parents, [child for parent in parents for child in children(parent)]
    except FileNotFoundError:
        return [], []


def test_two_hundred_random_kills_change_nothing(tmp_path, tmp_path_factory):
    target, environment = theirs.install(tmp_path_factory.mktemp("faulty") / "plug", "faults")
    in_peace = tmp_path_factory.mktemp("in-peace")
    alone = run(*plan(target, LEASES, "--out", "out"), cwd=in_peace, **environment)
    assert (alone.returncode, alone.stderr) == (1, "")
    is_whole(in_peace / "out", LEASES)
    assert len(os.listdir(in_peace / "out" / "failures")) >= 10
    dice = random.Random(20)
    # Whom, in which order: a serving process is back in milliseconds, a parent in a second.
    whom = ["supervisor"] * 8 + ["parent"] * 15 + ["serving"] * (KILLS - 23)
    dice.shuffle(whom)
    command = plan(target, LEASES, "--out", "out")
    done: Counter[str] = Counter()
    process = start(*command, cwd=tmp_path, **environment)
    ends: list[tuple[int, str, str]] = []
    first = 0  # of the ends of the campaign that is running
    out = tmp_path / "out"
    born = time.monotonic()
    try:
        deadline = born + 400
        while time.monotonic() < deadline:
            # All kills come before the end: they follow more quickly where the campaign is ahead of them.
            behind = KILLS * (told(out) + 1) / (0.6 * LEASES) > done.total()
            time.sleep(dice.uniform(0.0, 0.025 if behind else 0.1))
            if process.poll() is not None and process.returncode != 3:
                if not whom or process.returncode != 1:
                    break
                # It came to its end before all were killed: once more, from the beginning.
                ends.append((process.returncode, *process.communicate(timeout=30)))
                assert results(out) == results(in_peace / "out")
                shutil.rmtree(out)
                first = len(ends)
                process, born = start(*command, cwd=tmp_path, **environment), time.monotonic()
                continue
            if process.poll() == 3 or (whom and whom[-1] == "supervisor" and time.monotonic() > born + 1):
                process.kill()
                if process.wait() != 3:
                    done[whom.pop()] += 1
                ends.append((process.returncode, *process.communicate(timeout=30)))
                process, born = start(*command, cwd=tmp_path, **environment), time.monotonic()
                continue
            parents, serving = family(process)
            # Its controls take a second of a serving process, which must be left in peace for so long.
            at_work = (out / "journal" / "seat1-seeded.journal").exists() or time.monotonic() > born + 2
            if not whom or whom[-1] == "supervisor" or (whom[-1] == "serving" and not at_work):
                continue
            pids = serving if whom[-1] == "serving" else parents
            if pids and kill(dice.choice(pids), signal.SIGKILL):
                done[whom.pop()] += 1
        said, err = process.communicate(timeout=60)
        ends.append((process.returncode, said, err))
    finally:
        process.kill()
    # Killed, they say nothing; where a process was killed too often to be believed in, that is said, perhaps
    # just before the end.
    for status, _, err in ends:
        assert (status, err) in ((-9, ""), (1, "")) or (
            status in (3, -9) and one_line(err) and "somebody killed" in err
        )
    assert done == {"supervisor": 8, "parent": 15, "serving": KILLS - 23}
    assert ends[-1][0] == 1
    is_whole(tmp_path / "out", LEASES)
    assert results(tmp_path / "out") == results(in_peace / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    everything = "".join(out for _, out, _ in ends)
    assert "\nresumed     " in everything
    assert "somebody killed it (SIGKILL)" in everything
    said = "".join(out for _, out, _ in ends[first:])
    # Each failure is told in full once, in whichever run confirmed it; one of a run that was killed between
    # telling and writing may be told again.
    names = [
        name.removesuffix(".json")
        for name in os.listdir(tmp_path / "out" / "failures")
        if "found" not in name
    ]
    assert all(f"\nNEW  {name}" in said for name in names)


# --- Ctrl-C ----------------------------------------------------------------------------------------


def test_ctrl_c_at_any_moment_is_gone_on_from(tmp_path):
    """While leases run, and while failures are being replayed and shrunk."""
    target, environment = theirs.install(tmp_path / "plug", "few")
    leases = 40
    out, dice = tmp_path / "out", random.Random(5)
    command = plan(target, leases, "--out", "out")
    for marker in ("plan.json", "verdicts.jsonl", "verdicts.jsonl", "confirmed.jsonl"):
        lines = len((out / marker).read_bytes().splitlines()) if (out / marker).exists() else 0
        process = start(*command, cwd=tmp_path, **environment)
        try:
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if (out / marker).exists() and len((out / marker).read_bytes().splitlines()) > lines:
                    break
                time.sleep(0.01)
            time.sleep(dice.uniform(0.0, 0.2))
            process.send_signal(signal.SIGINT)
            said, err = process.communicate(timeout=30)
        finally:
            process.kill()
        assert (process.returncode, err) == (130, "kvproof: stopped\n")
        if marker != "plan.json":
            assert "\nkept        " in said
            assert "the same command with --seed 1 --out out goes on there" in said
        assert not {"lock", "journal"} & {path.name for path in out.iterdir()}
    done = run(*command, cwd=tmp_path, **environment)
    assert (done.returncode, done.stderr) == (1, "")
    assert "\nresumed     40 leases" in done.stdout
    is_whole(out, leases)
    again = run(*plan(target, leases, "--out", "again"), cwd=tmp_path, **environment)
    assert (again.returncode, again.stderr) == (1, "")
    assert results(out) == results(tmp_path / "again")


# --- two at a time ---------------------------------------------------------------------------------


def test_two_campaigns_with_one_name_do_not_disturb_one_another(tmp_path):
    target, environment = theirs.install(tmp_path / "plug", "few")
    command = plan(target, 12, "--out", "out")
    both = [start(*command, cwd=tmp_path, **environment) for _ in range(2)]
    ends = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [1, 1]
    assert [err for _, err in ends] == ["", ""]
    for name in ("out", "out-2"):
        is_whole(tmp_path / name, 12)
    assert results(tmp_path / "out") == results(tmp_path / "out-2")
    said = sorted(out.splitlines()[0] for out, _ in ends)
    assert "results     go to out-2, since out holds something else" in said


# --- disk, folder, files ---------------------------------------------------------------------------


def limited(room: int, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command where no file may be larger than this, in bytes."""
    return subprocess.run(
        [sys.executable, "-c", "from kvproof.ci.cli import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("room", "what"), [(1 << 20, "no room for a journal of 4 MiB: "), (0, "cannot be written")]
)
def test_a_disk_without_room_is_told_before_anything_runs(tmp_path, room, what):
    target, environment = theirs.install(tmp_path / "plug", "few")
    command = plan(target, 2, "--out", "out")
    done = limited(room, *command, cwd=tmp_path, **environment)
    assert done.returncode == 3
    assert one_line(done.stderr)
    assert what in done.stderr or "no room for a journal" in done.stderr
    again = run(*command, cwd=tmp_path, **environment)
    assert (again.returncode, again.stderr) == (1, "")
    is_whole(tmp_path / "out", 2)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[1, 2]", b'[{"fingerprint": "x"}]'], ids=repr)
def test_a_corrupt_list_of_known_faults_is_one_line(tmp_path, data):
    """A copy of the package's own file, damaged."""
    (tmp_path / "known.json").write_bytes(data)
    patched = (
        "from pathlib import Path; from kvproof.corpus import known; from kvproof.ci import cli, commands;"
        "commands.read_known = lambda: known.read_known(Path('known.json')); cli.main()"
    )
    target, environment = theirs.install(tmp_path / "plug", "few")
    done = subprocess.run(
        [sys.executable, "-c", patched, *plan(target, 2, "--out", "out")],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert one_line(done.stderr)
    assert "known.json: not a valid list of known faults: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_no_room_for_temporary_files_is_one_line(monkeypatch):
    from kvproof.ci import child, process
    from kvproof.model.errors import InfrastructureError
    from kvproof.properties.lanes import lane_for

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    lane = lane_for("seeded", device="cpu")
    for place, name in ((process.tempfile, "TemporaryDirectory"), (child.tempfile, "TemporaryFile")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(
                InfrastructureError, match=r"^no temporary file can be made: No space left on device;"
            ):
                process.Worker("null", lane)


# --- replay and shrink of what kills ---------------------------------------------------------------


@pytest.fixture
def deadly_trace(tmp_path) -> Path:
    from kvproof.corpus.format import TraceFile, encode
    from kvproof.model import ops
    from kvproof.model.config import Config
    from kvproof.model.trace import Trace
    from tests.model.strategies import new

    trace = Trace(Config("paged", 64, 4), (new(3), new(12, 5), ops.Decode((0,)), ops.Free((1,)), new(2)))
    (tmp_path / "t.json").write_bytes(encode(TraceFile(trace)))
    return tmp_path / "t.json"


@pytest.mark.parametrize("flags", [(), ("--isolate",)], ids=" ".join)
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("segv", 1, "FAILED 3 of 3"),
        ("sleep", 1, "FAILED 3 of 3"),
        ("few", 0, "PASSED 3 of 3"),
    ],
)
def test_a_deadly_trace_replays(tmp_path, deadly_trace, how, status, said, flags):
    target, environment = theirs.install(tmp_path / "plug", how)
    command = ("replay", "t.json", "-t", target, "--device", "cpu", "--times", "3", "--hang-seconds", "0.5")
    done = run(*command, *flags, cwd=tmp_path, **environment)
    assert (done.returncode, done.stderr) == (status, "")
    assert said in done.stdout
    if status:
        assert "-> op 3     free rows 1 keep 0 order 0" in done.stdout
        assert "NEW  " in done.stdout


@pytest.mark.parametrize(("how", "divergence"), [("abort", "crash SIGABRT"), ("kill", "crash SIGKILL")])
def test_a_deadly_trace_shrinks(tmp_path, deadly_trace, how, divergence):
    from kvproof.corpus.format import read
    from kvproof.model import ops

    target, environment = theirs.install(tmp_path / "plug", how)
    done = run("shrink", "t.json", "-t", target, "--device", "cpu", cwd=tmp_path, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    small = read(tmp_path / "t.min.json")
    assert small.evidence is not None
    assert (small.evidence.property, small.evidence.divergence) == ("P6", divergence)
    # Ten slots, the fewest that make a large free, in one row.
    assert small.trace.ops == (ops.Extend(((ops.NEW_ROW, 10),)), ops.Free((0,)))
