"""The terminal reporter: plain lines where nobody looks, a status line and colours where somebody does."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvproof.ci import terminal, wire
from kvproof.ci.events import (
    Confirming,
    FailureConfirmed,
    FailureFound,
    Finished,
    LeaseAhead,
    LeaseFinished,
    Resumed,
    Started,
    WorkerReplaced,
)
from kvproof.ci.terminal import TerminalReporter
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.properties.pagemap import PageMaps
from tests.ci.test_folder import DONE, FAILURE, READY, SMALL, SMALL_TRACE, STARTED, TRACE

ESCAPE = "\x1b"
CONFIRMED = wire.Confirmed(3, 3, wire.text_of(SMALL_TRACE), SMALL, PageMaps("1 free", "1 row 0", "1 x"), 9, 2)
STORY = (
    STARTED,
    LeaseFinished(DONE, "paged", 2000, 4.0),
    FailureFound(FAILURE, TRACE, 7),
    FailureConfirmed(FAILURE, CONFIRMED, None, 4),
    Finished(
        1, 5.0, 1, {"paged/seeded": 2000}, {"REFUSAL": 1}, {"Resize": 0}, {"double-free": "left"}, ["too few"]
    ),
)


def told(*events, flags="", folder="out", environ=None, **console) -> str:
    """What is written when these events come."""
    file = io.StringIO()
    environ = {} if environ is None else environ
    with TerminalReporter(
        Console(file=file, width=80, _environ=environ, **console), Path(folder), flags
    ) as reporter:
        for event in events:
            reporter.report(event)
    return file.getvalue()


def test_the_seed_stands_at_the_top():
    lines = told(STARTED).splitlines()
    assert lines[:6] == [
        "target      null",
        "allocators  paged",
        "lanes       seeded (model)",
        "seed        1",
        "workers     1",
        "controls    caught canary",
    ]


def test_what_the_target_has_not_is_said():
    started = replace(STARTED, allocators=("token", "paged"), absent=("swa", "mamba"))
    lines = told(started).splitlines()
    assert lines[1:3] == ["allocators  token, paged", "absent      swa, mamba (this target has none)"]


def test_what_was_stood_in_is_said():
    ready = wire.Ready("sglang==1", "sglang 1", "torch", READY.capabilities, ("sgl_kernel", "flashinfer"))
    started = Started("sglang==1", {"seeded": ready, "audited": ready}, ("paged",), 1, 1, ())
    assert "stood in    flashinfer, sgl_kernel\n" in told(started)


def test_without_a_terminal_there_are_plain_progress_lines(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    reporter = TerminalReporter(Console(file=file, width=80, _environ={}), Path("out"))
    lines = []
    for seconds in (1.0, terminal.LINE_EVERY_SECONDS - 2, 1.0, 1.0, terminal.LINE_EVERY_SECONDS):
        now[0] += seconds
        reporter.report(LeaseFinished(DONE, "paged", 2000, 4.0))
        lines.append(len(file.getvalue().splitlines()))
    # One after five seconds, one after five more.
    assert lines == [0, 0, 1, 1, 2]
    assert (
        file.getvalue().splitlines()[0]
        == "     4 s  lease 0  2,000 ops checked  500 ops/s  0 distinct failures"
    )


def test_a_failure_is_told_in_full():
    text = told(*STORY)
    for line in (
        f"found {FAILURE.fingerprint}  P1 single ownership  Extend: x (lease 7); confirmed at the end",
        f"NEW  {FAILURE.fingerprint}  P1 single ownership  Extend: x",
        "seen       4 times; fails 3 of 3 in a fresh process, 2 of 3 as shrunk in 9 runs",
        "allocator  paged, 1 pages of 1, size 1",
        "-> op 0     extend new +1",
        "found      as shrunk",
        "before     1 free",
        "expected   1 row 0",
        "actual     1 x",
        f"reproduce  kvproof replay out/failures/{FAILURE.fingerprint}.json",
        "checked           2,000  paged/seeded",
        "skipped               0  Resize (the target has no such call)",
        "accepted   double-free: left",
        "problem    too few",
        "new failures (exit 1), 1 leases, 5 s",
    ):
        assert f"{line}\n" in text
    assert ESCAPE not in text


def test_the_line_to_reproduce_can_be_pasted():
    text = told(STORY[3], flags=" --path kernels", folder="my results")
    assert f"kvproof replay 'my results/failures/{FAILURE.fingerprint}.json' --path kernels\n" in text


def test_a_known_failure_is_told_with_its_judgement():
    text = told(FailureConfirmed(FAILURE, CONFIRMED, "fault: [reads] too far", 4))
    assert f"KNOWN  {FAILURE.fingerprint}" in text
    assert "judged     fault: [reads] too far\n" in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "clean: no failure (exit 0)"),
        (3, "not enough was done to be believed (exit 3)"),
        (4, "known failures only (exit 4)"),
    ],
)
def test_the_end_says_what_the_exit_code_means(code, words):
    assert words in told(Finished(code, 5.0, 1))


def test_on_a_terminal_there_are_colours_and_a_status_line():
    text = told(*STORY, force_terminal=True, environ={"TERM": "xterm-256color"})
    assert f"{ESCAPE}[1;31m" in text
    assert "2,000 ops checked" in text
    # The cursor is shown again at the end.
    assert text.rindex(f"{ESCAPE}[?25h") > text.rindex(f"{ESCAPE}[?25l")


def test_no_color_is_honoured():
    text = told(*STORY, force_terminal=True, environ={"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "NEW" in text
    colours = [f"{ESCAPE}[{style}{colour}m" for colour in range(30, 38) for style in ("", "1;")]
    assert not [code for code in colours if code in text]


# --- stopped and gone on with ----------------------------------------------------------------------


def test_what_is_there_from_before_is_told_and_what_of_it_was_damaged():
    text = told(STARTED, Resumed(7, 12345, 3, 2, 61.4, ("out/verdicts.jsonl: line 8 is damaged",)))
    assert "damaged     out/verdicts.jsonl: line 8 is damaged; what it held runs again\n" in text
    assert (
        "resumed     7 leases, 12,345 ops and 3 distinct failures are there from before (2 reported), 61 s"
        " spent\n"
    ) in text


def test_a_replaced_worker_is_told_as_it_happens_and_counted_at_the_end():
    text = told(WorkerReplaced("a worker was replaced at lease 1: why"), Finished(0, 5.0, 1, replaced=2))
    assert "a worker was replaced at lease 1: why\n" in text
    assert "replaced              2  workers that ended on a trace that passes\n" in text
    assert "replaced" not in told(Finished(0, 5.0, 1))


def test_a_verdict_before_its_turn_is_not_told():
    assert told(LeaseAhead(DONE, "paged")) == ""


def test_what_is_being_confirmed_stands_in_the_status_line():
    text = told(STARTED, Confirming(FAILURE, 2, 3), force_terminal=True, environ={"TERM": "xterm-256color"})
    assert f"replaying and shrinking {FAILURE.fingerprint}, failure 2 of 3" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InfrastructureError("no room"), UserError("x"), None])
def test_whoever_is_stopped_is_told_how_to_go_on(error):
    file = io.StringIO()

    def stopped() -> None:
        with TerminalReporter(Console(file=file, width=80, _environ={}), Path("my results")) as reporter:
            for event in (STARTED, LeaseFinished(DONE, "paged", 2000, 4.0), FailureFound(FAILURE, TRACE, 0)):
                reporter.report(event)
            if error is not None:
                raise error

    if error is None:
        stopped()
    else:
        with pytest.raises(type(error)):
            stopped()
    line = (
        "kept        1 leases and 1 distinct failures in my results; the same command with --seed 1 --out"
        " 'my results' goes on there\n"
    )
    assert (line in file.getvalue()) is isinstance(error, (KeyboardInterrupt, InfrastructureError))


def test_who_is_stopped_before_anything_began_is_told_nothing():
    file = io.StringIO()
    with (
        pytest.raises(KeyboardInterrupt),
        TerminalReporter(Console(file=file, width=80, _environ={}), Path("out")),
    ):
        raise KeyboardInterrupt
    assert file.getvalue() == ""
