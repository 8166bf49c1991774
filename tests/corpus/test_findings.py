"""Faults found in releases: each has its trace and story, and the newest release still shows its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvproof.ci import wire
from kvproof.ci.process import Worker
from kvproof.corpus.format import TraceFile, read
from kvproof.corpus.known import KNOWN_FILE, Known, read_known
from kvproof.corpus.store import TRACES
from kvproof.properties.failure import DEVICE_LOST, ILLEGAL_ACCESS, Failure
from kvproof.properties.lanes import lane_for

KNOWN = read_known()
EACH = pytest.mark.parametrize(
    "entry", KNOWN, ids=[f"{entry.fingerprint}-{Path(entry.trace).stem}" for entry in KNOWN]
)
FINDINGS = KNOWN_FILE.with_name("FINDINGS.md").read_text()
NEWEST = "0.5.23"


def test_something_is_known_of_the_newest_release():
    assert [entry for entry in KNOWN if NEWEST in entry.releases]


@EACH
def test_the_trace_shows_the_fingerprint(entry: Known):
    """Its evidence names the fault, at its last op, and agrees with the fingerprint it is listed under."""
    file = read(TRACES / entry.trace)
    shown = file.evidence
    assert shown is not None
    assert shown.fingerprint == entry.fingerprint
    assert shown.step == len(file.trace.ops) - 1
    allocator = file.trace.config.allocator
    failure = Failure(shown.property, shown.op, allocator, shown.divergence, shown.step, shown.message)
    assert failure.fingerprint == entry.fingerprint


@EACH
def test_the_trace_comes_from_a_release_it_is_listed_for(entry: Known):
    origin = read(TRACES / entry.trace).trace.origin
    package, _, release = origin.target.partition("==")
    assert package == entry.package
    assert release in entry.releases


@EACH
def test_the_story_names_fingerprint_trace_and_judgement(entry: Known):
    """All three in one section of FINDINGS.md."""
    sections = re.split(r"^## ", FINDINGS, flags=re.MULTILINE)
    assert [
        section
        for section in sections
        if all(f"`{name}`" in section for name in (entry.fingerprint, entry.trace))
        and f"**Judgement:** {entry.judgement}." in section
    ]


def test_every_found_trace_is_listed():
    stored = {path.relative_to(TRACES).as_posix() for path in TRACES.glob("*/found-*.json")}
    assert stored == {entry.trace for entry in KNOWN}


def listed(lane: str) -> dict[str, TraceFile]:
    """What the newest release is listed with, by how it is replayed.

    What a kernel did by auditing it, what loses the device on a GPU, all else on the path that a CPU takes.
    """
    files = {entry.fingerprint: read(TRACES / entry.trace) for entry in KNOWN if NEWEST in entry.releases}
    return {name: file for name, file in files.items() if _lane(file) == lane}


def _lane(file: TraceFile) -> str:
    if file.evidence is not None and file.evidence.divergence.split()[0] in (DEVICE_LOST, ILLEGAL_ACCESS):
        return "gpu"
    return "audited" if file.trace.origin.lane == "audited" else "seeded"


@pytest.mark.network
@pytest.mark.parametrize("lane", ["seeded", "audited"])
def test_the_newest_release_still_shows_what_is_listed_for_it(lane):
    mine = listed(lane)
    assert mine
    shown: dict[str, list[str]] = {}
    with Worker(f"sglang=={NEWEST}", lane_for(lane, device="cpu")) as worker:
        for name, file in mine.items():
            done = worker.ask(wire.Replay(wire.text_of(file.trace), 1), wire.Replayed)
            shown[name] = [failure.fingerprint for failure in done.runs[0]]
    # What a kernel does in every batch, and what a wrapper lacks, shows beside whatever else there is.
    everywhere = {"86973e46", "aff5df1c"}
    odd = {name: [one for one in seen if one not in {name, *everywhere}] for name, seen in shown.items()}
    assert not any(odd.values()), odd
    assert all(name in seen for name, seen in shown.items())


@pytest.mark.gpu
@pytest.mark.network
def test_on_a_gpu_the_newest_release_still_loses_the_device_where_it_is_listed():
    mine = listed("gpu")
    assert mine
    for name, file in mine.items():
        with Worker(f"sglang=={NEWEST}", lane_for(file.trace.origin.lane, device="cuda")) as worker:
            done = worker.ask(wire.Replay(wire.text_of(file.trace), 1), wire.Replayed)
        assert [failure.fingerprint for failure in done.runs[0]] == [name]
