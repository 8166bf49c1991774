"""The folder reporter: what a campaign leaves behind.

verdicts.jsonl        one line a lease, in order; no times, so equal leases give equal bytes
failures/FP.json      the minimal trace of each fingerprint, with what it showed
failures/FP.found.json  the trace as it was found
campaign.json         the plan, the machine, totals, times, exit code
"""

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvproof.ci import wire
from kvproof.ci.events import Event, FailureConfirmed, FailureFound, Finished, LeaseFinished, Started
from kvproof.corpus.format import Evidence, TraceFile, encode
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure


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


def fresh_folder(wanted: Path) -> Path:
    """The folder, made; under a number behind its name when it holds something already. Nothing is
    overwritten. Raises UserError when no folder can have that name, InfrastructureError when it cannot be
    made."""
    try:
        for number in range(1, 10_000):
            if number > 1 and wanted.name in ("", ".."):
                raise UserError(f"--out {wanted}: it holds something already; name a folder to be made")
            folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.iterdir()):
                return folder
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {wanted}: a file is in the way; name a folder, new or empty") from None
    except OSError as error:
        raise InfrastructureError(f"--out {wanted}: cannot be written: {error.strerror or error}") from None
    raise InfrastructureError(f"--out {wanted}: ten thousand results lie there; choose another folder")


class FolderReporter:
    """Writes to one folder, made by `fresh_folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: Started | None = None

    def report(self, event: Event) -> None:
        """See Reporter. Raises InfrastructureError when the disk refuses."""
        try:
            self._report(event)
        except OSError as error:
            raise InfrastructureError(
                f"{self.folder}: cannot be written: {error.strerror or error}"
            ) from None

    def _report(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case LeaseFinished():
                self._append_verdict(event)
            case FailureFound(failure, trace):
                self._write(f"failures/{failure.fingerprint}.found.json", trace, failure)
            case FailureConfirmed():
                self._write_confirmed(event)
            case Finished():
                self._write_summary(event)

    def _append_verdict(self, event: LeaseFinished) -> None:
        verdict = msgspec.to_builtins(event.verdict)
        del verdict["type"]
        verdict["allocator"] = event.allocator
        verdict["found"] = [found["failure"] for found in verdict["found"]]
        for found, line in zip(verdict["found"], event.verdict.found, strict=True):
            found["fingerprint"] = line.failure.fingerprint
        with (self.folder / "verdicts.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(verdict) + b"\n")

    def _write_confirmed(self, event: FailureConfirmed) -> None:
        confirmed = event.confirmed
        failure = confirmed.failure or event.failure
        times = f"{confirmed.failed} of {confirmed.times}"
        self._write(
            f"failures/{event.failure.fingerprint}.json", wire.trace_of(confirmed.trace), failure, times
        )

    def _write(self, name: str, trace: Trace, failure: Failure, times: str = "") -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode(TraceFile(trace, evidence=evidence(failure, times))))

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
        summary = {"plan": started, "machine": machine, "result": asdict(event)}
        (self.folder / "campaign.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
