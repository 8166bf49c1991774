"""The result folder: never overwritten, and every file in it readable by machines."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvproof.ci import wire
from kvproof.ci.events import FailureConfirmed, FailureFound, Finished, LeaseAhead, LeaseFinished, Started
from kvproof.ci.folder import FolderReporter, evidence, open_folder
from kvproof.ci.resume import PlanRecord, WaitingLine, read_progress
from kvproof.corpus.format import Evidence, read
from kvproof.impl.targets.null import Null
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.model.ops import MISUSES
from kvproof.model.trace import Origin, Trace
from kvproof.properties.failure import Failure
from tests.model.strategies import new

ROOT = Path(__file__).parents[2]
FAILURE = Failure("P1", "Extend", "paged", "x", 1, "as found")
SMALL = Failure("P1", "Extend", "paged", "x", 0, "as shrunk")
TRACE = Trace(Config("paged", 16, 4), (new(1), new(2)), Origin("null", "seeded", 1, 0, 0))
SMALL_TRACE = Trace(Config("paged", 1, 1), (new(1),), Origin("null", "seeded", 1, 0, 0))
DONE = wire.LeaseDone(
    0, "seeded", 1, 0, 2, 0, {}, {}, {"REFUSAL": 1}, {FAILURE.fingerprint: 4},
    [wire.FoundLine(FAILURE, wire.text_of(TRACE))],
)  # fmt: skip
PROMISES = dataclasses.replace(Null.capabilities, refuses=frozenset(MISUSES), lacks=frozenset("edcba"))
READY = wire.Ready("null", "null", "model", PROMISES, ())
PLAN = PlanRecord("null", ("paged",), ("seeded",), "auto", "cpu", 1, misuse=False, longest=100)
STARTED = Started("null", {"seeded": READY}, ("paged",), 1, 1, ("canary",))


# --- where it goes ---------------------------------------------------------------------------------


def opened(wanted: Path, plan: PlanRecord = PLAN) -> tuple[Path, bool]:
    """Where a campaign of this plan goes, and whether it goes on behind another."""
    with open_folder(wanted, plan) as folder:
        assert folder.journals.is_dir()
        return folder.path, folder.progress is not None


def begun(folder: Path, plan: PlanRecord = PLAN) -> None:
    """A campaign that was stopped in this folder."""
    folder.mkdir(exist_ok=True)
    FolderReporter(folder, plan).report(STARTED)


def test_a_new_folder_is_made_with_those_above_it(tmp_path):
    assert opened(tmp_path / "a" / "b") == (tmp_path / "a" / "b", False)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_empty_folder_is_used(tmp_path):
    assert opened(tmp_path) == (tmp_path, False)


def test_what_was_killed_before_it_did_anything_leaves_an_empty_folder(tmp_path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "seat0-seeded.journal").touch()
    (tmp_path / "lock").touch()
    (tmp_path / ".plan.json.new").write_text("{")
    assert opened(tmp_path) == (tmp_path, False)
    assert not (tmp_path / "journal").exists()


def test_nothing_is_overwritten(tmp_path):
    wanted = tmp_path / "out"
    for name in ("out", "out-2", "out-3"):
        folder, goes_on = opened(wanted)
        assert (folder, goes_on) == (tmp_path / name, False)
        (folder / "mine").write_text(name)
    assert [(tmp_path / name / "mine").read_text() for name in ("out", "out-2")] == ["out", "out-2"]


def test_a_campaign_that_was_stopped_is_gone_on_with(tmp_path):
    begun(tmp_path / "out")
    for _ in range(2):
        assert opened(tmp_path / "out") == (tmp_path / "out", True)
    # Nor does it matter which releases the names stood for: that is seen once they are loaded.
    assert opened(tmp_path / "out", msgspec.structs.replace(PLAN, releases={"seeded": "other"}))[1]


@pytest.mark.parametrize(
    "change",
    [
        {"target": "reference"},
        {"allocators": ("paged", "token")},
        {"lanes": ("hypothesis",)},
        {"path": "kernels"},
        {"device": "cuda"},
        {"seed": 2},
        {"misuse": True},
        {"longest": 101},
        {"format": 2},
    ],
    ids=str,
)
def test_another_plan_goes_elsewhere(tmp_path, change):
    """Verdicts of the two could not be told apart."""
    begun(tmp_path / "out")
    other = msgspec.structs.replace(PLAN, **change)
    assert opened(tmp_path / "out", other) == (tmp_path / "out-2", False)


def test_a_finished_campaign_is_left_alone(tmp_path):
    begun(tmp_path / "out")
    reporter = FolderReporter(tmp_path / "out", PLAN)
    reporter.report(STARTED)
    reporter.report(Finished(0, 1.5, 2))
    assert opened(tmp_path / "out") == (tmp_path / "out-2", False)


def test_two_at_a_time_go_to_two_folders(tmp_path):
    wanted = tmp_path / "out"
    with open_folder(wanted, PLAN) as one, open_folder(wanted, PLAN) as two:
        begun(one.path)
        with open_folder(wanted, PLAN) as three:
            assert [folder.path.name for folder in (one, two, three)] == ["out", "out-2", "out-3"]
    assert opened(wanted) == (wanted, True)


@pytest.mark.parametrize("left", ["stopped", "finished"])
def test_who_waited_for_the_lock_sees_what_was_done_meanwhile(tmp_path, monkeypatch, left):
    """The other one is done between our look at the folder and our lock, and has taken its own away."""
    before = open_folder(tmp_path, PLAN)
    flock = fcntl.flock

    def late(file, how):
        monkeypatch.setattr("kvproof.ci.folder.fcntl.flock", flock)
        begun(tmp_path)
        if left == "finished":
            (tmp_path / "campaign.json").touch()
        before.__exit__()
        flock(file, how)

    monkeypatch.setattr("kvproof.ci.folder.fcntl.flock", late)
    # Ours was the old file, which another could have no more: so we go elsewhere.
    assert opened(tmp_path) == (tmp_path.with_name(f"{tmp_path.name}-2"), False)


def test_what_cannot_be_made_is_the_machines_fault(tmp_path):
    with pytest.raises(InfrastructureError, match=r"--out .*: cannot be written: ") as caught:
        open_folder(tmp_path / ("x" * 300), PLAN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way_is_bad_input(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=rf"--out .*{name}: a file is in the way; name a folder"):
        open_folder(tmp_path / name, PLAN)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_full_folder_without_a_name_of_its_own_is_bad_input(tmp_path, monkeypatch, name):
    """There is nothing to put a number behind."""
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    (tmp_path / "below" / "mine").touch()
    with pytest.raises(UserError, match="holds something already; name a folder to be made"):
        open_folder(Path(name), PLAN)


# --- what is in it ---------------------------------------------------------------------------------


def test_a_verdict_is_one_line_without_times(tmp_path):
    reporter = FolderReporter(tmp_path, PLAN)
    reporter.report(STARTED)
    reporter.report(LeaseFinished(DONE, "paged", 2, 3.25))
    reporter.report(LeaseFinished(msgspec.structs.replace(DONE, lease=1, found=[]), "token", 4, 9.5))
    first, second = (tmp_path / "verdicts.jsonl").read_bytes().splitlines()
    verdict = json.loads(first)
    assert verdict == {
        "lease": 0,
        "lane": "seeded",
        "allocator": "paged",
        "traces": 1,
        "relations": 0,
        "checked": 2,
        "idle": 0,
        "skipped": {},
        "accepted": {},
        "marks": {"REFUSAL": 1},
        "seen": {FAILURE.fingerprint: 4},
        "found": [
            {
                "fingerprint": FAILURE.fingerprint,
                "failure": {
                    "property_id": "P1",
                    "op": "Extend",
                    "allocator": "paged",
                    "divergence": "x",
                    "step": 1,
                    "message": "as found",
                    "tolerable": False,
                },
            }
        ],
    }
    assert json.loads(second)["lease"] == 1


def test_a_failure_is_stored_as_found_and_as_shrunk(tmp_path):
    reporter = FolderReporter(tmp_path, PLAN)
    reporter.report(FailureFound(FAILURE, TRACE, 0))
    found = read(tmp_path / "failures" / f"{FAILURE.fingerprint}.found.json")
    assert (found.trace, found.evidence) == (TRACE, evidence(FAILURE))
    confirmed = wire.Confirmed(3, 3, wire.text_of(SMALL_TRACE), SMALL, None, 9, 3)
    reporter.report(FailureConfirmed(FAILURE, confirmed, None, 4))
    small = read(tmp_path / "failures" / f"{FAILURE.fingerprint}.json")
    assert (small.trace, small.evidence) == (SMALL_TRACE, evidence(SMALL, "3 of 3"))
    assert len(list((tmp_path / "failures").iterdir())) == 2


def test_a_failure_that_never_came_again_is_stored_as_it_was(tmp_path):
    confirmed = wire.Confirmed(0, 3, wire.text_of(TRACE))
    FolderReporter(tmp_path, PLAN).report(FailureConfirmed(FAILURE, confirmed, None, 1))
    stored = read(tmp_path / "failures" / f"{FAILURE.fingerprint}.json")
    assert (stored.trace, stored.evidence) == (TRACE, evidence(FAILURE, "0 of 3"))


def test_evidence_says_what_the_failure_says():
    told = evidence(FAILURE, "2 of 3")
    assert told == Evidence(FAILURE.fingerprint, "P1", "Extend", "x", 1, "as found", "2 of 3")


def test_a_verdict_before_its_turn_is_kept_whole_until_the_end(tmp_path):
    reporter = FolderReporter(tmp_path, PLAN)
    reporter.report(STARTED)
    early = msgspec.structs.replace(DONE, lease=3)
    reporter.report(LeaseAhead(early, "paged"))
    assert read_progress(tmp_path).waiting == {3: WaitingLine("paged", early)}
    reporter.report(Finished(0, 1.5, 2))
    assert not (tmp_path / "waiting.jsonl").exists()


def test_the_summary_holds_plan_machine_and_result(tmp_path):
    reporter = FolderReporter(tmp_path, PLAN)
    reporter.report(STARTED)
    reporter.report(Finished(4, 1.5, 2, {"paged/seeded": 3}, problems=[]))
    summary = json.loads((tmp_path / "campaign.json").read_text())
    assert set(summary) == {"plan", "machine", "result"}
    assert (summary["plan"]["seed"], summary["plan"]["workers"]) == (1, 1)
    assert set(summary["machine"]) == {"python", "torch", "triton", "hypothesis", "kvproof"}
    assert summary["result"]["exit_code"] == 4
    assert summary["result"]["checked"] == {"paged/seeded": 3}


SUMMARY = """
import sys
from pathlib import Path
from tests.ci.test_folder import PLAN, STARTED, Finished, FolderReporter
reporter = FolderReporter(Path(sys.argv[1]), PLAN)
reporter.report(STARTED)
reporter.report(Finished(0, 1.5, 2))
"""


def test_the_summary_has_the_same_bytes_in_every_process(tmp_path):
    """Sets of words are ordered by a hash that each process salts anew."""
    written = set()
    for salt in ("1", "2", "3"):
        folder = tmp_path / salt
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        subprocess.run([sys.executable, "-c", SUMMARY, str(folder)], env=environment, cwd=ROOT, check=True)
        written.add((folder / "campaign.json").read_bytes())
    (summary,) = written
    capabilities = json.loads(summary)["plan"]["ready"]["seeded"]["capabilities"]
    assert capabilities["refuses"] == sorted(PROMISES.refuses)
    assert capabilities["lacks"] == sorted(PROMISES.lacks)


def test_a_disk_that_refuses_is_told_in_one_line(tmp_path):
    reporter = FolderReporter(tmp_path / "gone", PLAN)
    with pytest.raises(InfrastructureError, match="gone: cannot be written: No such file") as caught:
        reporter.report(LeaseFinished(DONE, "paged", 2, 3.0))
    assert "\n" not in str(caught.value)
