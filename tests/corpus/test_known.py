"""The reviewed list of known faults: strict, and no wider than it says."""

from __future__ import annotations

import json

import pytest

from kvproof.corpus.format import read
from kvproof.corpus.known import JUDGEMENTS, KNOWN_FILE, Known, read_known
from kvproof.corpus.store import TRACES
from kvproof.model.errors import UserError

ENTRY = {
    "fingerprint": "0123abcd",
    "package": "sglang",
    "releases": ["0.5.20", "0.5.18"],
    "trace": "paged/tight-oom.json",
    "judgement": "fault",
    "reason": "reads past the free list",
}


def written(tmp_path, content):
    path = tmp_path / "known.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_the_list_that_ships_is_valid_and_shown():
    """Each entry is judged once, explained, and has a stored trace."""
    known = read_known()
    for entry in known:
        assert len(entry.fingerprint) == 8
        assert int(entry.fingerprint, 16) >= 0
        assert entry.releases
        assert entry.reason
        assert "\n" not in entry.reason
        read(TRACES / entry.trace)
    seen = [(entry.fingerprint, entry.package, release) for entry in known for release in entry.releases]
    assert len(seen) == len(set(seen))
    assert KNOWN_FILE.name == "known.json"


def test_a_list_is_read(tmp_path):
    assert read_known(written(tmp_path, [])) == ()
    (entry,) = read_known(written(tmp_path, [ENTRY]))
    assert entry == Known(**{**ENTRY, "releases": tuple(ENTRY["releases"])})


@pytest.mark.parametrize(
    ("fingerprint", "release", "covered"),
    [
        ("0123abcd", "sglang 0.5.20", True),
        ("0123abcd", "sglang 0.5.18", True),
        ("0123abcd", "sglang 0.5.21", False),
        ("0123abcd", "sglang 0.5.2", False),
        ("0123abcd", "sglang", False),
        ("0123abcd", "kvproof 0.5.20", False),
        ("0123abce", "sglang 0.5.20", False),
    ],
)
def test_it_covers_its_fingerprint_in_its_releases_and_nothing_else(tmp_path, fingerprint, release, covered):
    (entry,) = read_known(written(tmp_path, [ENTRY]))
    assert entry.covers(fingerprint, release) is covered


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"", "not a valid list"),
        (b"\xff\xfe", "not a valid list"),
        (b"{}", "array"),
        ([{**ENTRY, "extra": 1}], "extra"),
        ([ENTRY, {name: ENTRY[name] for name in ENTRY if name != "reason"}], "reason"),
        ([{**ENTRY, "releases": "0.5.20"}], r"\$\[0\]\.releases|\$\[\.\.\.\]\.releases"),
        (
            [{**ENTRY, "judgement": "harmless"}],
            r"\$\[0\]\.judgement is 'harmless'; known: " + ", ".join(JUDGEMENTS),
        ),
    ],
)
def test_a_damaged_list_is_refused_by_file_and_field(tmp_path, content, field):
    path = written(tmp_path, content)
    with pytest.raises(UserError, match=field) as caught:
        read_known(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json: cannot be read: No such file"):
        read_known(tmp_path / "nowhere.json")
