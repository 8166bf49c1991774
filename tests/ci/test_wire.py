"""Messages between the command line and its workers: one line each, the same after a round trip, strict."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvproof.ci import wire
from kvproof.impl.targets.null import Null
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Capabilities, Ticket
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.errors import UserError
from kvproof.model.marks import Mark
from kvproof.model.trace import Origin, Trace
from kvproof.properties.failure import Failure
from kvproof.properties.lease import Lease, Verdict, run_lease
from kvproof.properties.pagemap import PageMaps
from kvproof.properties.space import space_for
from tests.model.strategies import new

FAILURE = Failure(
    "P1", "Extend", "paged", "owned-page-in-free-list", 1, "the free list\nholds ñ", tolerable=True
)
TRACE = Trace(Config("paged", 16, 4), (new(3, 4), ops.Free((0,), 1, 1)), Origin("null", "seeded", 1, 2, 3))
TEXT = wire.text_of(TRACE)
SPACE = space_for(Null(Ticket()).capabilities, "paged", misuse=True, slow=True)

SWA_SPACE = space_for(
    replace(
        Null.capabilities,
        lacks_of={"swa": frozenset({"Remap"}), "mamba": frozenset({"AllocGroupBegin"})},
        page_sizes={"swa": (1, 1)},
    ),
    "swa",
)

PART = wire.LeaseDone(
    0, "seeded", 1, 2, 3, 4, {"Alloc": 1}, {"double-free": "x"}, {"GROWN": 1}, {"a": 1},
    [wire.FoundLine(FAILURE, TEXT)],
)  # fmt: skip

REQUESTS = [
    wire.Setup("sglang@a b", "kernels", "cpu", True, "my folder/ñ.journal", "end", "a.log"),
    wire.Setup("sglang", "auto", "cpu", False, "a.journal", allocators=("paged", "swa")),
    wire.Revive(),
    wire.RunLease(Lease(3, 1 << 40, "null", "seeded", SPACE, 100, 7)),
    wire.RunLease(Lease(3, 1 << 40, "null", "seeded", SPACE, 100, 7), 12, 88),
    wire.Confirm(TEXT, FAILURE, 3, 100),
    wire.Replay(TEXT, 2),
    wire.Replay(TEXT, 2, FAILURE),
    wire.RunLease(Lease(3, 1, "null", "seeded", SWA_SPACE, 100, 7)),
    wire.Script(TEXT, ("0123abcd", "P1"), "cpu"),
    wire.RunControls(),
]
REPLIES = [
    wire.Ready("null", "null", "model", Null.capabilities, ("sgl_kernel",)),
    wire.Ready(
        "sglang==1",
        "sglang 1",
        "torch",
        Capabilities(("token", "swa"), lacks_of={"swa": frozenset({"Remap"})}, page_sizes={"swa": (1, 1)}),
        (),
    ),
    wire.Scripted("import torch\n", FAILURE),
    wire.Born(7, forks=True),
    wire.Gone(-11),
    wire.Refused("no", 2),
    wire.TraceDone(PART, 3, lost=True),
    wire.LeaseEnd(),
    wire.Confirmed(3, 3, TEXT, FAILURE, PageMaps("1 free", "1 row 0", "1 free and row 0"), 9, 2),
    wire.Confirmed(0, 3, TEXT),
    wire.Replayed([[FAILURE], []], None, {}, {}, 3),
    wire.ControlsDone(("canary",), ()),
]


def kind(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", REQUESTS, ids=kind)
def test_a_request_comes_back_from_one_line(message):
    line = wire.to_line(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert wire.request_of(line) == message


@pytest.mark.parametrize("message", REPLIES, ids=kind)
def test_a_reply_comes_back_from_one_line(message):
    line = wire.to_line(message)
    assert (line.count(b"\n"), line[-1:]) == (1, b"\n")
    assert wire.reply_of(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null",
        b"{}",
        b'{"type":"Setup"}',
        b'{"type":"Nonsense"}',
        wire.to_line(REPLIES[0]),
        b"\xff",
    ],
)
def test_what_is_no_request_is_refused(line):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        wire.request_of(line)


def test_a_request_is_no_reply():
    for message in REQUESTS:
        with pytest.raises(msgspec.MsgspecError):
            wire.reply_of(wire.to_line(message))


def test_a_trace_travels_as_a_file():
    assert wire.trace_of(TEXT) == TRACE
    with pytest.raises(UserError, match="not a valid trace"):
        wire.trace_of("{}")


def test_equal_verdicts_are_equal_bytes():
    """In whatever order their counts came about."""
    lines = set()
    for order in (1, -1):
        verdict = Verdict(4, "seeded", traces=2, relations=1)
        for name in ["Resize", "Alloc"][::order]:
            verdict.tally.skipped[name] += 1
            verdict.tally.accepted[name] = "left"
            verdict.seen[name] += 2
        for mark in [Mark.GROWN, Mark.REFUSAL][::order]:
            verdict.marks[mark] += 3
        verdict.marks[Mark.SHRUNK] += 0
        verdict.tally.checked, verdict.tally.idle = 5, 6
        lines.add(wire.to_line(wire.TraceDone(wire.lease_done(verdict), 0)))
    (line,) = lines
    told = wire.reply_of(line)
    assert isinstance(told, wire.TraceDone)
    assert told.part == wire.LeaseDone(
        4, "seeded", 2, 1, 5, 6, {"Alloc": 1, "Resize": 1}, {"Alloc": "left", "Resize": "left"},
        {"REFUSAL": 3, "GROWN": 3}, {"Alloc": 2, "Resize": 2}, [],
    )  # fmt: skip


def test_a_verdict_carries_the_first_trace_of_each_failure():
    verdict = Verdict(0, "seeded")
    verdict.add(FAILURE, TRACE)
    verdict.add(FAILURE, TRACE)
    done = wire.lease_done(verdict)
    assert done.seen == {FAILURE.fingerprint: 2}
    assert [(line.failure, wire.trace_of(line.trace)) for line in done.found] == [(FAILURE, TRACE)]


def test_parts_join_to_the_verdict_that_they_are_of():
    """First failures stay first, and what was counted is counted once."""
    target = Planted(Ticket(":pages-not-taken"))
    lease = Lease(2, 9, target.name, "seeded", space_for(target.capabilities, "paged"), 900, 30)
    parts = []
    whole = wire.lease_done(
        run_lease(target, lease, tell=lambda part, _: parts.append(wire.lease_done(part)))
    )
    assert len(parts) == whole.traces > 20
    assert sum(bool(part.found) for part in parts) > 1
    assert wire.joined(2, "seeded", parts) == whole
    halves = [wire.joined(2, "seeded", some) for some in (parts[:7], parts[7:])]
    assert wire.to_line(wire.TraceDone(wire.joined(2, "seeded", halves), 0)) == wire.to_line(
        wire.TraceDone(whole, 0)
    )
    assert wire.joined(4, "hypothesis", ()) == wire.lease_done(Verdict(4, "hypothesis"))
