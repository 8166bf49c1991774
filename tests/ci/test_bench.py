"""`kvproof bench harness`: its sums and its table. How fast anything is, is no test's business."""

from __future__ import annotations

import json

import pytest

from kvproof.ci import bench
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.protocol import Ticket
from kvproof.model.calls import AllocCall, NoCall
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import InfrastructureError

NULL = {
    "ops_per_s": 50_000.4,
    "seconds": 2.0,
    "call_seconds": 0.0,
    "rss_first_mib": 200.0,
    "rss_last_mib": 205.0,
}
REAL = {"ops_per_s": 1000.0, "seconds": 30.0, "call_seconds": 27.0, "rss_first_mib": 1.0, "rss_last_mib": 1.0}


@pytest.fixture
def measured(monkeypatch):
    """What was measured, in place of minutes of it."""
    asked = []

    def in_process(target, allocator, ops):
        asked.append((target, allocator, ops))
        return NULL if target == "null" else REAL

    monkeypatch.setattr(bench, "_in_process", in_process)
    return asked


def test_the_share_is_what_the_calls_leave_of_the_wall_time(measured, capsys):
    assert bench.run("reference", 20_000, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["allocator"] for row in rows] == list(ALLOCATORS)
    for row in rows:
        assert row["share"] == pytest.approx(0.1)
        assert (row["null_ops_per_s"], row["target_ops_per_s"]) == (50_000.4, 1000.0)
        assert (row["rss_first_mib"], row["rss_last_mib"]) == (200.0, 205.0)
    assert [entry[:2] for entry in measured] == [(t, a) for a in ALLOCATORS for t in ("null", "reference")]
    assert {ops for target, _, ops in measured if target == "null"} == {20_000}


def test_the_table_is_markdown(measured, capsys):
    bench.run("reference", 1_000_000, as_json=False)
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == rule.count("|") == rows[0].count("|") == 7
    assert "after 1,000,000 ops" in head
    assert [row.split()[1] for row in rows] == list(ALLOCATORS)
    assert rows[1] == "| paged | 50,000 | 1,000 | 10.0 % | 200 MiB | 205 MiB (+2.5 %) |"


def test_only_calls_are_timed_and_answers_pass_through():
    timed = bench._Timed(Null(Ticket()))
    subject = timed.build(Config("paged", 16, 4))
    before = timed.seconds
    assert subject.apply(AllocCall(4)).slots is None
    assert subject.observe().free == []
    assert timed.seconds > before > 0
    assert timed.other_path() is None
    assert subject.apply(NoCall()).error is None


def test_a_process_of_its_own_measures_and_reports():
    figures = bench._in_process("null", "token", 1000)
    assert set(figures) == {"ops_per_s", "seconds", "call_seconds", "rss_first_mib", "rss_last_mib"}
    assert figures["ops_per_s"] > 0
    assert figures["rss_last_mib"] > 0


def test_a_process_that_fails_is_told_in_one_line():
    with pytest.raises(
        InfrastructureError, match=r"the benchmark of nonsense failed: .*no target 'nonsense'"
    ) as caught:
        bench._in_process("nonsense", "token", 1000)
    assert "\n" not in str(caught.value)
