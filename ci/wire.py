"""What the command line and its worker processes say to one another: JSON, one message a line.

Traces travel in their file form (`corpus.format`), so a message can be read, stored and replayed by hand.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from kvproof.corpus.format import TraceFile, decode, encode
from kvproof.impl.targets.protocol import Capabilities
from kvproof.model.marks import Mark
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.lease import Lease, Verdict
from kvproof.properties.pagemap import PageMaps


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The first message to a worker: load this target. journal: the file made for it by `journal.set_aside`.
    The rest as in `protocol.Ticket`."""

    target: str
    path: str
    device: str
    audited: bool
    journal: str
    fence: str = ""
    sanitizer: str = ""
    sanitizer_log: str = ""
    allocators: tuple[str, ...] = ()


class Revive(msgspec.Struct, tag=True, frozen=True):
    """To a worker that has said Gone: go on in a fresh process; answered by Born."""


class RunLease(msgspec.Struct, tag=True, frozen=True):
    """Run this lease, or go on with it (see `run_lease`); answered by any number of TraceDone and a
    LeaseEnd."""

    lease: Lease
    first: int = 0
    left: int | None = None


class Confirm(msgspec.Struct, tag=True, frozen=True):
    """Replay a failing trace `times` times, shrink it (most_runs 0: do not), replay the result."""

    trace: str
    failure: Failure
    times: int
    most_runs: int


class Replay(msgspec.Struct, tag=True, frozen=True):
    """Run a trace `times` times; answered by Replayed. seek: look for this failure only, in the way in which
    it was found, and draw no maps; None: whatever comes."""

    trace: str
    times: int
    seek: Failure | None = None


class Script(msgspec.Struct, tag=True, frozen=True):
    """Write a script that reproduces the trace without us; answered by Scripted. prefer: fingerprint and
    property of the failure to show where the trace has it, or one of that property; else it is the one that
    ends the trace, or the first. device: that the target runs on."""

    trace: str
    prefer: tuple[str, str]
    device: str


class RunControls(msgspec.Struct, tag=True, frozen=True):
    """Run the canary and the quick planted faults; answered by ControlsDone."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The target is loaded. release: for the list of known faults, as in "sglang 0.5.23"."""

    name: str
    release: str
    path: str
    capabilities: Capabilities
    stood_in: tuple[str, ...]


class Born(msgspec.Struct, tag=True, frozen=True):
    """A process serves from now on. forks: whether another can be had of this worker in no time (Revive)."""

    pid: int
    forks: bool


class Gone(msgspec.Struct, tag=True, frozen=True):
    """The serving process has ended; the worker can be revived. status: its exit status, negative for a
    signal."""

    status: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """What was asked cannot be done: one line for people, and the exit code it deserves."""

    message: str
    exit_code: int


class FoundLine(msgspec.Struct, frozen=True):
    """One failure of a lease. trace: the file form, cut behind the failing op."""

    failure: Failure
    trace: str


class LeaseDone(msgspec.Struct, tag=True, frozen=True):
    """A verdict, of a lease or of some traces of it. Times stay out of it (see `properties.lease`)."""

    lease: int
    lane: str
    traces: int
    relations: int
    checked: int
    idle: int
    skipped: dict[str, int]
    accepted: dict[str, str]
    marks: dict[str, int]
    seen: dict[str, int]
    found: list[FoundLine]


class TraceDone(msgspec.Struct, tag=True, frozen=True):
    """What one trace of a lease came to. left: ops of the lease behind it. lost: the process ends with it."""

    part: LeaseDone
    left: int
    lost: bool = False


class LeaseEnd(msgspec.Struct, tag=True, frozen=True):
    """Nothing is left of the lease."""


class Confirmed(msgspec.Struct, tag=True, frozen=True):
    """failed of times: replays of the trace as found. trace: the smallest; runs: candidates tried.
    failed_small: replays of it that failed. failure, maps: of the smallest; None when it never came again.
    lost: some candidate took the device, and the process ends with it; nothing else here is to be
    believed."""

    failed: int
    times: int
    trace: str
    failure: Failure | None = None
    maps: PageMaps | None = None
    runs: int = 0
    failed_small: int = 0
    lost: bool = False


class Replayed(msgspec.Struct, tag=True, frozen=True):
    """failures of each replay; maps: of the first failure. accepted, skipped, checked: see Tally."""

    runs: list[list[Failure]]
    maps: PageMaps | None
    accepted: dict[str, str]
    skipped: dict[str, int]
    checked: int
    lost: bool = False


class Scripted(msgspec.Struct, tag=True, frozen=True):
    """A script, and the failure that it shows."""

    text: str
    failure: Failure


class ControlsDone(msgspec.Struct, tag=True, frozen=True):
    """Planted faults by name: caught, and missed."""

    caught: tuple[str, ...]
    missed: tuple[str, ...]


Request = Setup | Revive | RunLease | Confirm | Replay | Script | RunControls
Reply = Ready | Born | Gone | Refused | TraceDone | LeaseEnd | Confirmed | Replayed | Scripted | ControlsDone

_requests: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Request)
_replies: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Reply)


def to_line(message: Request | Reply) -> bytes:
    """The message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def request_of(line: bytes) -> Request:
    """Raises msgspec.MsgspecError when the line is no request."""
    request: Request = _requests.decode(line)
    return request


def reply_of(line: bytes) -> Reply:
    """Raises msgspec.MsgspecError when the line is no reply."""
    reply: Reply = _replies.decode(line)
    return reply


def text_of(trace: Trace) -> str:
    """The trace's file form."""
    return encode(TraceFile(trace)).decode()


def trace_of(text: str) -> Trace:
    """The trace of a file form."""
    return decode(text.encode(), "message").trace


def lease_done(verdict: Verdict) -> LeaseDone:
    """A verdict as a message: maps sorted, so that equal verdicts are equal bytes."""
    tally = verdict.tally
    return LeaseDone(
        lease=verdict.lease,
        lane=verdict.lane,
        traces=verdict.traces,
        relations=verdict.relations,
        checked=tally.checked,
        idle=tally.idle,
        skipped=dict(sorted(tally.skipped.items())),
        accepted=dict(sorted(tally.accepted.items())),
        marks={mark.name: verdict.marks[mark] for mark in Mark if verdict.marks[mark]},
        seen=dict(sorted(verdict.seen.items())),
        found=[FoundLine(found.failure, text_of(found.trace)) for found in verdict.found.values()],
    )


def joined(lease: int, lane: str, parts: Iterable[LeaseDone]) -> LeaseDone:
    """One verdict of its parts, in the order of the traces: the same as if nothing had come between them."""
    skipped, marks, seen = Counter[str](), Counter[str](), Counter[str]()
    accepted: dict[str, str] = {}
    found: dict[str, FoundLine] = {}
    traces = relations = checked = idle = 0
    for part in parts:
        traces += part.traces
        relations += part.relations
        checked += part.checked
        idle += part.idle
        skipped.update(part.skipped)
        marks.update(part.marks)
        seen.update(part.seen)
        accepted.update(part.accepted)
        for line in part.found:
            found.setdefault(line.failure.fingerprint, line)
    return LeaseDone(
        lease=lease,
        lane=lane,
        traces=traces,
        relations=relations,
        checked=checked,
        idle=idle,
        skipped=dict(sorted(skipped.items())),
        accepted=dict(sorted(accepted.items())),
        marks={mark.name: marks[mark.name] for mark in Mark if marks[mark.name]},
        seen=dict(sorted(seen.items())),
        found=list(found.values()),
    )
