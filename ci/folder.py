"""The folder reporter: what a campaign leaves behind, in an order that an end at any moment leaves usable.

plan.json             what makes this campaign this campaign
verdicts.jsonl        one line a lease, in order; no times, so equal leases give equal bytes
waiting.jsonl         verdicts that came before their turn; gone at the end
times.jsonl           when each verdict was told
failures/FP.json      the minimal trace of each fingerprint, with what it showed
failures/FP.found.json  the trace as it was found; there before the verdict that names it
confirmed.jsonl       one line for each failure that has been reported
campaign.json         the plan, the machine, totals, times, exit code; there when the campaign is finished
journal/, lock        the workers' journals and the mark of a campaign at work; gone at the end

Files appear whole (written beside and renamed), lines are cut off again when they do not fit.
"""

import contextlib
import fcntl
import os
import platform
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import IO, Final

import msgspec

from kvproof.ci import resume, wire
from kvproof.ci.events import (
    Event,
    FailureConfirmed,
    FailureFound,
    Finished,
    LeaseAhead,
    LeaseFinished,
    Started,
)
from kvproof.ci.resume import PlanRecord, Progress, is_finished, read_plan, read_progress
from kvproof.corpus.format import Evidence, TraceFile, encode
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure

_OURS: Final = frozenset({"journal", "lock", ".plan.json.new"})
"""What a campaign may leave that was ended before it had done anything."""


def evidence(failure: Failure, times: str = "") -> Evidence:
    """A failure as its trace file tells it."""
    return Evidence(
        failure.fingerprint,
        failure.property_id,
        failure.op,
        failure.divergence,
        failure.step,
        failure.message,
        times,
    )


class Folder:
    """A result folder that this process has to itself. progress: of the campaign that is gone on with, else
    None."""

    def __init__(self, path: Path, lock: IO[bytes], progress: Progress | None) -> None:
        self.path = path
        self.progress = progress
        self._lock = lock

    @property
    def journals(self) -> Path:
        """Where workers keep their journals."""
        return self.path / "journal"

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self.journals, ignore_errors=True)
            (self.path / "lock").unlink(missing_ok=True)
        self._lock.close()


def open_folder(wanted: Path, plan: PlanRecord) -> Folder:
    """The folder, made, or with a campaign of this plan in it that was not finished; under a number behind
    its name when it holds anything else. Nothing is overwritten. Raises UserError when no folder can have
    that name, InfrastructureError when it cannot be made."""
    try:
        for number in range(1, 10_000):
            if number > 1 and wanted.name in ("", ".."):
                raise UserError(f"--out {wanted}: it holds something already; name a folder to be made")
            folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            folder.mkdir(parents=True, exist_ok=True)
            if found := _taken(folder, plan):
                return found
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {wanted}: a file is in the way; name a folder, new or empty") from None
    except OSError as error:
        raise InfrastructureError(f"--out {wanted}: cannot be written: {error.strerror or error}") from None
    raise InfrastructureError(f"--out {wanted}: ten thousand results lie there; choose another folder")


def _taken(folder: Path, plan: PlanRecord) -> Folder | None:
    """The folder, if it is free for this plan and nobody is at work in it."""
    if not _is_free(folder, plan):
        return None
    lock = (folder / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had it until now may have got on meanwhile, and takes the file away as it goes.
        mine = os.fstat(lock.fileno()).st_ino == (folder / "lock").stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        mine = False
    if not mine or not _is_free(folder, plan):
        lock.close()
        return None
    try:
        progress = None if _is_fresh(folder) else read_progress(folder)
        shutil.rmtree(folder / "journal", ignore_errors=True)
        (folder / "journal").mkdir()
    except BaseException:
        lock.close()
        raise
    return Folder(folder, lock, progress)


def _is_fresh(folder: Path) -> bool:
    return all(entry.name in _OURS for entry in folder.iterdir())


def _is_free(folder: Path, plan: PlanRecord) -> bool:
    """Whether it holds nothing, or a campaign of this plan that was not finished."""
    before = read_plan(folder)
    return _is_fresh(folder) or (before is not None and not is_finished(folder) and before.same(plan))


class FolderReporter:
    """Writes to one folder, made by `open_folder`, the plan of which it is given."""

    def __init__(self, folder: Path, plan: PlanRecord) -> None:
        self.folder = folder
        self._plan = plan
        self._started: Started | None = None

    def report(self, event: Event) -> None:
        """See Reporter. Raises InfrastructureError when the disk refuses."""
        try:
            self._report(event)
        except OSError as error:
            raise InfrastructureError(
                f"{self.folder}: cannot be written: {error.strerror or error}; what was told before is kept:"
                " mend it, and the same command goes on from there"
            ) from None

    def _report(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case LeaseAhead(verdict, allocator):
                self._append(resume.WAITING, resume.WaitingLine(allocator, verdict))
            case LeaseFinished():
                self._append_verdict(event)
            case FailureFound(failure, trace):
                self._write_trace(f"failures/{failure.fingerprint}.found.json", trace, failure)
            case FailureConfirmed():
                self._write_confirmed(event)
            case Finished():
                self._write_summary(event)
            case _:
                pass

    def _start(self, event: Started) -> None:
        self._started = event
        releases = {name: ready.release for name, ready in event.ready.items()}
        self._write(resume.PLAN, msgspec.structs.replace(self._plan, releases=releases))

    def _append_verdict(self, event: LeaseFinished) -> None:
        verdict = event.verdict
        same = {name: getattr(verdict, name) for name in verdict.__struct_fields__ if name != "found"}
        found = [resume.FoundRecord(line.failure.fingerprint, line.failure) for line in verdict.found]
        line = resume.VerdictLine(**same, allocator=event.allocator, found=found)
        self._append(resume.VERDICTS, line)
        self._append(resume.TIMES, resume.TimeLine(verdict.lease, round(event.elapsed, 3)))

    def _write_confirmed(self, event: FailureConfirmed) -> None:
        confirmed = event.confirmed
        failure = confirmed.failure or event.failure
        times = f"{confirmed.failed} of {confirmed.times}"
        fingerprint = event.failure.fingerprint
        self._write_trace(f"failures/{fingerprint}.json", wire.trace_of(confirmed.trace), failure, times)
        line = resume.ConfirmedLine(fingerprint, confirmed.failed, confirmed.times, event.known)
        self._append(resume.CONFIRMED, line)

    def _write_trace(self, name: str, trace: Trace, failure: Failure, times: str = "") -> None:
        self._write_bytes(name, encode(TraceFile(trace, evidence=evidence(failure, times))))

    def _write_summary(self, event: Finished) -> None:
        machine = {
            "python": platform.python_version(),
            "torch": version("torch"),
            "triton": version("triton"),
            "hypothesis": version("hypothesis"),
            "kvproof": version("kvproof"),
        }
        # Capabilities hold sets, which Python orders anew in every process.
        started = msgspec.to_builtins(self._started, order="deterministic")
        self._write(resume.SUMMARY, {"plan": started, "machine": machine, "result": asdict(event)})
        (self.folder / resume.WAITING).unlink(missing_ok=True)

    def _write(self, name: str, thing: object) -> None:
        self._write_bytes(name, msgspec.json.format(msgspec.json.encode(thing)) + b"\n")

    def _write_bytes(self, name: str, data: bytes) -> None:
        """The whole file or nothing."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        try:
            beside.write_bytes(data)
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def _append(self, name: str, thing: object) -> None:
        """A whole line or nothing."""
        with (self.folder / name).open("ab", buffering=0) as file:
            before = file.tell()
            try:
                line = msgspec.json.encode(thing) + b"\n"
                if file.write(line) != len(line):
                    raise OSError("no room for another line")
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise
