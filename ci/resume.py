"""What an earlier run of the same campaign left in its folder, read so that this run goes on behind it.

Only what is sound is taken: verdicts up to the first line that is cut short or damaged, or whose failure has
lost its trace. The leases behind it run again, and come to the same. What is damaged is cut off here, since
the folder reporter appends.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvproof.ci import wire
from kvproof.corpus.format import read
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure

PLAN: Final = "plan.json"
VERDICTS: Final = "verdicts.jsonl"
WAITING: Final = "waiting.jsonl"
TIMES: Final = "times.jsonl"
CONFIRMED: Final = "confirmed.jsonl"
SUMMARY: Final = "campaign.json"


class PlanRecord(msgspec.Struct, frozen=True):
    """What makes two runs the same campaign: equal plans give equal verdicts. releases: by lane, once
    loaded."""

    target: str
    allocators: tuple[str, ...]
    lanes: tuple[str, ...]
    path: str
    device: str
    seed: int
    misuse: bool
    longest: int
    format: int = 1
    releases: dict[str, str] = {}

    def same(self, other: "PlanRecord") -> bool:
        """Whether one goes on where the other stopped."""
        return msgspec.structs.replace(self, releases={}) == msgspec.structs.replace(other, releases={})


class VerdictLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of verdicts.jsonl: a verdict without the traces, which lie beside it as files of their own."""

    lease: int
    lane: str
    allocator: str
    traces: int
    relations: int
    checked: int
    idle: int
    skipped: dict[str, int]
    accepted: dict[str, str]
    marks: dict[str, int]
    seen: dict[str, int]
    found: list["FoundRecord"]


class FoundRecord(msgspec.Struct, frozen=True):
    """A failure in a line, with its fingerprint for people who search for it."""

    fingerprint: str
    failure: Failure


class WaitingLine(msgspec.Struct, frozen=True):
    """A verdict that came before its turn, whole."""

    allocator: str
    verdict: wire.LeaseDone


class TimeLine(msgspec.Struct, frozen=True):
    """When a verdict was told: seconds since the campaign began, interruptions left out."""

    lease: int
    elapsed: float


class ConfirmedLine(msgspec.Struct, frozen=True):
    """A failure that has been replayed, shrunk and reported. known: why it does not count as new, if it does
    not."""

    fingerprint: str
    failed: int
    times: int
    known: str | None


@dataclass(slots=True)
class Progress:
    """How far a campaign came. verdicts: from lease 0 on, without a gap. waiting: later ones, by lease.
    first: the first failure of each fingerprint, its trace and its lane. damage: what was found damaged, for
    people."""

    releases: dict[str, str] = field(default_factory=dict)
    verdicts: list[VerdictLine] = field(default_factory=list)
    waiting: dict[int, WaitingLine] = field(default_factory=dict)
    first: dict[str, tuple[Failure, Trace, str]] = field(default_factory=dict)
    confirmed: dict[str, ConfirmedLine] = field(default_factory=dict)
    elapsed: float = 0.0
    damage: list[str] = field(default_factory=list)


def read_plan(folder: Path) -> PlanRecord | None:
    """The plan of the campaign in this folder; None when there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=PlanRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def is_finished(folder: Path) -> bool:
    """Whether the campaign in this folder came to its end."""
    return (folder / SUMMARY).exists()


def read_progress(folder: Path) -> Progress:
    """What is there, made ready to be gone on with. Mutates the folder: damaged ends are cut off. Raises
    InfrastructureError when the folder cannot be read or mended."""
    plan = read_plan(folder)
    progress = Progress(releases=plan.releases if plan else {})
    try:
        kept = []
        for raw, line in _sound_lines(folder / VERDICTS, VerdictLine, progress):
            if line.lease != len(progress.verdicts) or not _take(folder, line, progress):
                break
            progress.verdicts.append(line)
            kept.append(raw)
        _keep_lines(folder / VERDICTS, kept, progress)
        waiting = _sound_lines(folder / WAITING, WaitingLine, progress)
        for _, line in waiting:
            if line.verdict.lease >= len(progress.verdicts):
                progress.waiting[line.verdict.lease] = line
        _keep_lines(folder / WAITING, [raw for raw, _ in waiting], progress)
        times = _sound_lines(folder / TIMES, TimeLine, progress)
        progress.elapsed = max((line.elapsed for _, line in times), default=0.0)
        _keep_lines(folder / TIMES, [raw for raw, _ in times], progress)
        kept = []
        for raw, line in _sound_lines(folder / CONFIRMED, ConfirmedLine, progress):
            if _is_stored(folder, line.fingerprint, progress):
                progress.confirmed[line.fingerprint] = line
                kept.append(raw)
        _keep_lines(folder / CONFIRMED, kept, progress)
    except OSError as error:
        raise InfrastructureError(
            f"{folder}: cannot be gone on with: {error.strerror or error}; choose another folder with --out"
        ) from None
    return progress


def _take(folder: Path, line: VerdictLine, progress: Progress) -> bool:
    """Note the failures that the line was the first to show. False when the trace of one is not there."""
    for found in line.found:
        if found.fingerprint in progress.first:
            continue
        path = folder / "failures" / f"{found.fingerprint}.found.json"
        try:
            progress.first[found.fingerprint] = (found.failure, read(path).trace, line.lane)
        except UserError as error:
            progress.damage.append(str(error))
            return False
    return True


def _is_stored(folder: Path, fingerprint: str, progress: Progress) -> bool:
    """Whether the trace of a failure that was reported is there."""
    try:
        read(folder / "failures" / f"{fingerprint}.json")
    except UserError as error:
        progress.damage.append(str(error))
        return False
    return True


def _sound_lines(path: Path, shape: type[Any], progress: Progress) -> list[tuple[bytes, Any]]:
    """The lines up to the first that is damaged or cut short: as they are, and what they say."""
    lines: list[tuple[bytes, Any]] = []
    if not path.exists():
        return lines
    data = path.read_bytes()
    for number, text in enumerate(data.split(b"\n")[:-1]):
        try:
            lines.append((text + b"\n", msgspec.json.decode(text, type=shape)))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            progress.damage.append(f"{path}: line {number + 1} is damaged")
            break
    else:
        if data and not data.endswith(b"\n"):
            progress.damage.append(f"{path}: its last line is cut short")
    return lines


def _keep_lines(path: Path, lines: list[bytes], progress: Progress) -> None:
    """Leave these lines of the file; as it was it is kept beside it."""
    if not path.exists():
        return
    data, kept = path.read_bytes(), b"".join(lines)
    if kept == data:
        return
    path.with_suffix(".damaged").write_bytes(data)
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(kept)
    beside.replace(path)
    progress.damage.append(
        f"{path}: kept {len(lines)} lines; as it was it is {path.with_suffix('.damaged').name}"
    )
