"""`kvproof doctor`: the machine's facts, and the verdict on the harness.

Not covered: the controls themselves (`tests/properties/test_controls.py`).
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvproof.ci import deadly
from kvproof.ci.doctor import doctor
from kvproof.model.errors import InfrastructureError
from kvproof.properties import controls
from kvproof.properties.controls import Catch, Control

CAUGHT = Control(
    "planted:x",
    "A fault.",
    "caught",
    Catch("P1", "owned", 64, 0.25, True, SimpleNamespace()),  # type: ignore[arg-type]
)
CLEAN = Control("planted:none", "No fault.", "clean")
MISSED = Control("planted:y", "A fault.", "missed")
ABSENT = Control("planted:z", "A fault.", "cannot run here")


@pytest.fixture
def say(monkeypatch, tmp_path):
    """The doctor's exit code when the controls come out like this."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # set by the doctor; put back behind the test
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path / "cache"))

    def run(*outcomes, as_json=False, deadly_outcomes=()):
        monkeypatch.setattr(controls, "all_controls", lambda: iter(outcomes))
        monkeypatch.setattr(deadly, "deadly_controls", lambda: iter(deadly_outcomes))
        return doctor(as_json=as_json)

    return run


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ((CAUGHT, CLEAN), 0),
        ((CAUGHT, ABSENT), 0),
        ((CAUGHT, MISSED), 3),
        ((Control("planted:none", "No fault.", "not clean"), CAUGHT), 3),
        ((ABSENT,), 3),
        ((), 3),
    ],
)
def test_all_is_well_only_when_every_control_that_can_run_passed(say, capsys, outcomes, status):
    assert say(*outcomes) == status


@pytest.mark.parametrize(("outcome", "status"), [(CAUGHT, 0), (MISSED, 3)])
def test_the_controls_that_end_their_process_count_as_well(say, outcome, status):
    assert say(CAUGHT, deadly_outcomes=(outcome,)) == status


def test_what_it_prints(say, capsys, tmp_path):
    assert say(CAUGHT, CLEAN, MISSED, ABSENT) == 3
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[:6])
    assert {"python", "kvproof", "torch", "triton", "hypothesis", "gpu"} <= facts.keys()
    assert f"cache        {tmp_path / 'cache'}" in lines
    assert lines[-5].split() == ["caught", "planted:x", *["P1", "owned,", "64", "ops,", "0.2", "s"]]
    assert lines[-1] == "2 of 4 controls as they should be, 1 cannot run here"


def test_json(say, capsys):
    assert say(CAUGHT, MISSED, as_json=True) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 3
    assert report["machine"]["sglang"] == "fetched: none yet"
    assert [(row["name"], row["outcome"]) for row in report["controls"]] == [
        ("planted:x", "caught"),
        ("planted:y", "missed"),
    ]


def test_a_cache_that_cannot_be_made_is_told_in_one_line(say, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InfrastructureError, match=r"cannot be made: Not a directory; set KVPROOF_CACHE"):
        say(CAUGHT)
