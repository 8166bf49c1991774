"""NVIDIA's compute-sanitizer: a process started under it, and what it reports about its kernels.

    subprocess.Popen([*command("memcheck", log), sys.executable, ...], env=os.environ | environment())
    ...
    torch.cuda.synchronize()
    SanitizerLog(log).read()

The tool writes a report when the launch that earned it has been waited for. Its kernels go on behind an
error, so one process can earn many. Not covered: errors of API calls, which libraries provoke on purpose to
see what a device can do, leaks, and uninitialised reads of library kernels, whose wide loads touch padding.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .findings import InstrumentError

TOOLS: Final = ("memcheck", "initcheck", "racecheck")

_NAME: Final = "compute-sanitizer"
_MARK: Final = "========="
_SUMMARIES: Final = ("ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "COMPUTE-SANITIZER")
_REFUSALS: Final = (
    "Device not supported",
    "Internal Sanitizer Error",
    "Internal Error",
    "Unable to find injection library",
    "Target application terminated before first instrumented API call",
    "driver is not compatible",
    "Insufficient permissions",
)
_KINDS: Final = (
    (re.compile(r"Invalid __\w+__ (?:read|atomic read)"), "read-out-of-bounds"),
    (re.compile(r"Invalid __\w+__ (?:write|atomic)"), "write-out-of-bounds"),
    (re.compile(r"Uninitialized __\w+__ memory read"), "uninitialised-read"),
    (re.compile(r"[Hh]azard|[Rr]ace reported"), "race"),
)
_MISALIGNED: Final = re.compile(r"is misaligned")
_PROBED: Final = re.compile(r"Program hit .* (?:on|due to) .*call", re.DOTALL)
_PLACES: Final = (
    re.compile(r"\bat (?P<kernel>\S.*?)(?:\([^)]*\))?\+0x[0-9a-f]+(?: in (?P<where>\S+:\d+))?\b"),
    re.compile(r"\bat 0x[0-9a-f]+ in (?P<where>\S+:\d+):(?P<kernel>[\w:]+)"),
)
"""Where an access stands: as the tool of 2025 says it, and as that of some years before did."""

_THREAD: Final = re.compile(r"by thread \([\d,]+\) in block \([\d,]+\)")


@dataclass(frozen=True, slots=True)
class Report:
    """One error of a kernel, its repetitions by other threads of the same read counted in.

    kind: "read-out-of-bounds", "write-out-of-bounds", "misaligned-access", "uninitialised-read", "race", or
    "sanitizer" for what is not known here. kernel: its function's name, "" when the tool did not say. where:
    file and line, if known. detail: one line for people. in_python: whether the kernel stands in a Python
    file, as Triton's do.
    """

    kind: str
    kernel: str
    where: str
    detail: str
    in_python: bool


def find() -> Path:
    """The tool's executable. InstrumentError when it is not here."""
    folders = [os.environ.get("PATH", "")]
    folders += [f"{home}/bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    found = shutil.which(_NAME, path=os.pathsep.join(folders))
    if found is None:
        raise InstrumentError(
            f"{_NAME} is not here: it comes with the CUDA toolkit; install that, or put it on PATH"
        )
    return Path(found)


def command(tool: str, log: Path) -> list[str]:
    """What goes before a command line for it to run under this tool. InstrumentError when that is not
    here."""
    if tool not in TOOLS:
        raise InstrumentError(f"{_NAME} has no tool {tool!r}; choose one of {', '.join(TOOLS)}")
    flags = ["--tool", tool, "--log-file", str(log), "--target-processes", "application-only"]
    flags += ["--print-limit", "0", "--show-backtrace", "no"]
    if tool == "memcheck":
        flags += ["--destroy-on-device-error", "kernel", "--report-api-errors", "no"]
    return [str(find()), *flags]


def environment() -> dict[str, str]:
    """Variables for such a process: each tensor an allocation of its own, which the tool knows the end of."""
    return {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


class SanitizerLog:
    """Reads a log while the tool writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._block: list[str] = []

    def read(self) -> list[Report]:
        """The reports that came to their end since the last read. InstrumentError when the tool says that it
        cannot work here."""
        grouped: dict[tuple[str, str, str], list[Report]] = {}
        for block in self._blocks():
            report = _report(block)
            if report is not None:
                grouped.setdefault((report.kind, report.kernel, report.where), []).append(report)
        return [_counted(reports) for reports in grouped.values()]

    def _blocks(self) -> list[list[str]]:
        """Complete blocks of lines: each ends with an empty one, or where another begins."""
        blocks: list[list[str]] = []
        for line in self._lines():
            text = line.removeprefix(_MARK).rstrip()
            begins = bool(text) and not text.startswith("  ")
            if self._block and (begins or not text.strip()):
                blocks.append(self._block)
                self._block = []
            if text.strip():
                self._block.append(text.strip())
        return blocks

    def _lines(self) -> list[str]:
        """Whole lines of the tool's that were not read yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [line for line in lines if line.startswith(_MARK)]


def _report(block: list[str]) -> Report | None:
    """What a block reports; None when it is no error of a kernel."""
    head = block[0]
    for refusal in _REFUSALS:
        if any(refusal in line for line in block):
            raise InstrumentError(f"{_NAME} cannot work on this machine: {head}")
    if head.startswith(_SUMMARIES) or _PROBED.search(head):
        return None
    kind = next((kind for pattern, kind in _KINDS if pattern.search(head)), "sanitizer")
    if any(_MISALIGNED.search(line) for line in block):
        kind = "misaligned-access"
    place = next((found for line in block for way in _PLACES if (found := way.search(line))), None)
    kernel = place["kernel"] if place else ""
    where = (place["where"] or "") if place else ""
    about = [
        line
        for line in block[1:]
        if line.startswith(("Access to", "Address", "and is")) or _THREAD.match(line)
    ]
    in_python = ".py:" in where
    if kind == "uninitialised-read" and not in_python:
        return None
    return Report(kind, kernel, where, "; ".join([head, *about]), in_python)


def _counted(reports: list[Report]) -> Report:
    first = reports[0]
    if len(reports) == 1:
        return first
    return Report(
        first.kind,
        first.kernel,
        first.where,
        f"{first.detail} (and {len(reports) - 1} alike)",
        first.in_python,
    )
