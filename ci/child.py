"""One started worker process: its pipes, its environment, its memory, its end.

It is what was started; where a target forks, the process that serves is a child of it, whose number it has
been told. Not here: what is said over the pipes, and what it means (`process.py`).
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, Literal

from kvproof.ci import wire
from kvproof.impl.instruments import sanitizer
from kvproof.impl.instruments.findings import InstrumentError
from kvproof.model.errors import InfrastructureError
from kvproof.properties.lanes import Lane

END_SECONDS: Final = 10.0
"""For a killed process to be gone; one that the kernel keeps longer (in a driver, say) is left to it."""

_GRACE_SECONDS: Final = 5.0
_LAST_WORDS: Final = 4000
_MOST_WORDS: Final = 16 << 20
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_FROM_OUTSIDE: Final = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class WorkerProcess:
    """A started worker process and its pipes; the process that serves is a child of it where it forks."""

    def __init__(self, lane: Lane, gpu: str, sanitizer_log: Path | None) -> None:
        try:
            # Appended to, so that it can be cut while somebody writes to it.
            self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise no_room(error) from None
        self._errors_from = 0
        prefix, extra = _sanitized(lane, sanitizer_log)
        try:
            self._popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvproof.ci.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(lane, gpu) | extra,
                bufsize=0,
                # A group of its own: a target that signals its whole group means itself.
                process_group=0,
            )
        except OSError as error:
            self._errors.close()
            raise InfrastructureError(f"a worker cannot be started: {error.strerror or error}") from None
        assert self._popen.stdout is not None
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(self._popen.stdout.fileno(), select.POLLIN)
        self.started = self.pid = self._popen.pid
        self.forks = False
        self.dead = False
        self.announced = 0
        self.verdict: tuple[Literal["hang", "out-of-memory"], str] | None = None
        self._loaded_mib = 0

    def born(self, birth: wire.Born) -> None:
        """A serving process is there."""
        self.pid, self.forks, self.dead = birth.pid, birth.forks, False
        self.verdict = None
        self.rebase()
        self._errors_from = self._errors.seek(0, os.SEEK_END)

    def send(self, request: wire.Request) -> None:
        """Send it; whoever does not take it is found dead when the reply is due."""
        assert self._popen.stdin is not None
        left = memoryview(wire.to_line(request))
        with contextlib.suppress(OSError):
            while left:
                left = left[self._popen.stdin.write(left) :]

    def line(self, seconds: float) -> bytes | None:
        """The next line; b"" when none came in time, None when there will be no more."""
        assert self._popen.stdout is not None
        found = self._pending.find(b"\n")
        if found < 0 and self._poll.poll(seconds * 1000):
            data = os.read(self._popen.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._pending += data
            found = self._pending.find(b"\n", len(self._pending) - len(data))
        if found < 0:
            return b""
        line = bytes(self._pending[: found + 1])
        del self._pending[: found + 1]
        return line

    def end_serving(self) -> None:
        """End the serving process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def condemn(self, kind: Literal["hang", "out-of-memory"], how: str) -> None:
        """End the serving process, and remember why."""
        self.verdict = (kind, how)
        self.end_serving()

    def trim(self) -> None:
        """Cut what it wrote to its standard error once that is much: only the last words are wanted."""
        if os.fstat(self._errors.fileno()).st_size > _MOST_WORDS:
            self._errors.truncate(0)
            self._errors_from = 0

    def rebase(self) -> None:
        """What the process holds now is none of its target's doing."""
        self._loaded_mib = _resident_mib(self.pid)

    def grown_mib(self) -> int:
        """Resident memory beyond what it was when the process was born, in MiB; 0 before."""
        return _resident_mib(self.pid) - self._loaded_mib if self._loaded_mib else 0

    def kill(self) -> None:
        """End all of it at once."""
        self._popen.kill()

    def end(self) -> int:
        """The status of the started process, whose pipe has ended: negative for a signal."""
        try:
            return self._popen.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return -signal.SIGKILL

    def close(self) -> None:
        """End the process; it gets a moment to go by itself, and is then left to the kernel."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        try:
            self._popen.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.started, signal.SIGKILL)  # whatever a target has started and left behind
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._errors.close()

    def last_words(self) -> str:
        """The last line that the serving process wrote to its standard error."""
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(self._errors_from, end - _LAST_WORDS))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def no_room(error: OSError) -> InfrastructureError:
    """What to say when not even a temporary file can be had."""
    return InfrastructureError(
        f"no temporary file can be made: {error.strerror or error}; free some space, or name another folder"
        " in TMPDIR"
    )


def _environment(lane: Lane, gpu: str) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    if lane.device == "cpu":
        # Must stand before Triton's first import; harmless where no kernel runs.
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.pop("TRITON_INTERPRET", None)
        # Asking NVML whether there is a GPU leaves CUDA alone, so that a fork can still use it.
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
    return environment


def _sanitized(lane: Lane, log: Path | None) -> tuple[list[str], dict[str, str]]:
    """What goes before the command, and into its environment, for the sanitizer to watch it."""
    if log is None:
        return [], {}
    try:
        return sanitizer.command(lane.sanitizer, log), sanitizer.environment()
    except InstrumentError as error:
        raise InfrastructureError(f"the lane {lane.name} cannot run here: {error}") from None


def cause_of(status: int) -> tuple[Literal["crash", "killed"], str]:
    """What an exit status says; negative is a signal."""
    if status >= 0:
        return "crash", f"exit {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return ("killed" if name in _FROM_OUTSIDE else "crash"), name


def _resident_mib(pid: int) -> int:
    """Resident memory of a process; 0 when there is no such process, or no such table."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * _PAGE_BYTES >> 20
