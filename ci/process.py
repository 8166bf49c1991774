"""The command line's end of a worker process: start it, ask it, end it.

Not here: surviving a worker's death or hang. Such a worker ends the run with exit code 3 and a message that
names the request it died on; the request holds everything needed to try again.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import TypeVar

import msgspec

from kvproof.ci import wire
from kvproof.model.errors import InfrastructureError, KvproofError, UserError
from kvproof.properties.lanes import Lane

R = TypeVar("R", wire.Ready, wire.LeaseDone, wire.Confirmed, wire.Replayed, wire.ControlsDone)

_LAST_WORDS = 4000


class Worker:
    """One worker process with one target loaded. A context manager."""

    def __init__(self, target: str, lane: Lane) -> None:
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        if lane.device == "cpu":
            # Must stand before Triton's first import; harmless where no kernel runs.
            environment["TRITON_INTERPRET"] = "1"
        else:
            environment.pop("TRITON_INTERPRET", None)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvproof.ci.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        setup = wire.Setup(target, lane.path, lane.device, lane.audited)
        try:
            self.ready = self.ask(setup, wire.Ready)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, request: wire.Request, reply_type: type[R]) -> R:
        """Send a request and wait for its reply. Raises what the worker refused with, or
        InfrastructureError when it died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(wire.to_line(request))
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            reply = wire.reply_of(line) if line else None
        except (OSError, msgspec.MsgspecError):
            reply = None
        if isinstance(reply, wire.Refused):
            kind: type[KvproofError] = (
                UserError if reply.exit_code == UserError.exit_code else InfrastructureError
            )
            raise kind(reply.message)
        if not isinstance(reply, reply_type):
            raise InfrastructureError(self._obituary(request))
        return reply

    def close(self) -> None:
        """End the process; it gets a moment to go by itself."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _obituary(self, request: wire.Request) -> str:
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _LAST_WORDS))
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f"; its last words: {words[-1]}" if words else ""
        return f"a worker died (status {status}) on {_describe(request)}{last}"


def _describe(request: wire.Request) -> str:
    match request:
        case wire.Setup(target=target):
            return f"loading {target}"
        case wire.RunLease(lease):
            return f"lease {lease.number} of lane {lease.lane}, seed {lease.seed}"
        case _:
            return f"a {type(request).__name__.lower()} request"
