"""The stored traces: each says by hand what is right, and the model, ours and the reference all agree.

That a trace catches the fault it was stored for is shown where faults are planted, not here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof.corpus.format import encode
from kvproof.corpus.store import TRACES, StoredTrace, stored_traces
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.ours import Kvproof, Reference
from kvproof.impl.targets.protocol import Ticket
from kvproof.model.catalogue import model_for
from kvproof.model.errors import UserError
from kvproof.model.marks import Mark, reachable
from tests.corpus.passing import wrong_with
from tests.model.strategies import outcomes

STORED = stored_traces()
EACH = pytest.mark.parametrize("stored", STORED, ids=[stored.name for stored in STORED])


def test_the_cases_of_the_field_that_an_allocator_alone_can_express_are_here():
    assert {stored.name for stored in STORED} >= {
        "paged/tight-oom",
        "paged/decode-gather",
        "paged/inside-page",
        "paged/deferred-view",
        "paged/double-end",
        "paged/shared-wide-page",
        "token/deferred-view",
        "token/double-end",
        "swa/token-granular-swa",
        "swa/stale-head",
        "swa/page-zero",
        "pure-swa/pure-swa-segment",
        "mamba/mamba-dummy",
        "hisparse-v4/wrapper-gap",
    }


@pytest.mark.parametrize("mark", Mark)
def test_every_mark_is_reached_by_a_trace_of_its_own(mark):
    """Shrunk to where its last op reaches the mark."""
    name = "mark-" + mark.name.lower().replace("_", "-")
    (stored,) = [stored for stored in STORED if stored.file.trace.origin.case == name]
    trace = stored.file.trace
    assert mark in reachable(stored.allocator)
    model = model_for(trace.config)
    reached = []
    for op in trace.ops:
        model.apply(op)
        reached.append(model.marks[mark] > 0)
    assert reached == [False] * (len(trace.ops) - 1) + [True]


@EACH
def test_a_stored_trace_says_what_it_is(stored: StoredTrace):
    origin = stored.file.trace.origin
    assert stored.name == f"{stored.allocator}/{origin.case}"
    assert origin.note
    assert stored.file.outcomes is not None


@EACH
def test_its_bytes_are_those_that_would_be_written(stored: StoredTrace):
    assert (TRACES / f"{stored.name}.json").read_bytes() == encode(stored.file)


@EACH
def test_the_model_answers_as_stored(stored: StoredTrace):
    trace = stored.file.trace
    assert tuple(outcomes(model_for(trace.config), *trace.ops)) == stored.file.outcomes


@EACH
@pytest.mark.parametrize("target", [Kvproof, Reference, Null])
def test_targets_pass_and_answer_as_stored(stored: StoredTrace, target):
    assert wrong_with(target(Ticket()), stored) == []


def test_our_kernels_pass_under_the_interpreter():
    """In a process of its own: Triton reads the variable when a kernel is defined."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.corpus.passing"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {stored.name: [] for stored in STORED}


def write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_another_folder_is_read_by_allocator_and_name(tmp_path):
    for stored in reversed(STORED):
        write(tmp_path, f"{stored.name}.json", encode(stored.file))
    write(tmp_path, "paged/README.md", b"no trace")
    assert stored_traces(tmp_path) == STORED
    assert [stored.name for stored in STORED] == sorted(stored.name for stored in STORED)


def test_a_trace_in_the_wrong_folder_is_refused(tmp_path):
    paged = next(stored for stored in STORED if stored.allocator == "paged")
    write(tmp_path, "token/a.json", encode(paged.file))
    with pytest.raises(UserError, match=r"token/a\.json: \$\.config\.allocator is 'paged'"):
        stored_traces(tmp_path)


def test_a_damaged_trace_is_refused(tmp_path):
    write(tmp_path, "paged/a.json", b"{}")
    with pytest.raises(UserError, match=r"paged/a\.json: not a valid trace"):
        stored_traces(tmp_path)
