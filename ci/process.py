"""The command line's end of a worker: start it, ask it, watch it, revive it, end it.

A worker that is asked something is watched: by its journal (does it get on?), by its resident memory, and by
its pipe (is it there?). Whatever becomes of it is a `Death`, with the trace it was running. Not here: whose
fault that was, and what to do about it (`isolation.py`).
"""

import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, TypeVar

import msgspec

from kvproof.ci import journal, wire
from kvproof.ci.child import END_SECONDS, WorkerProcess, cause_of, no_room
from kvproof.model.errors import InfrastructureError, KvproofError, UserError
from kvproof.properties.lanes import Lane

TellTrace = Callable[[wire.TraceDone], None]
R = TypeVar("R", wire.LeaseEnd, wire.Confirmed, wire.Replayed, wire.Scripted, wire.ControlsDone)

LOAD_SECONDS: Final = 900.0
"""For loading a target, which may fetch it first."""

_CONTROL_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.1
_MOST_KILLS: Final = 5
"""Processes that somebody may kill over one request that is asked again, or while one is being loaded."""

_LONGEST_STEP: Final = 1.0
"""What one look at the clock can add to the time a worker has been quiet: a clock that jumps, or a machine
that slept, hangs nobody."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a worker may go. hang_seconds: for one op; memory_mib: resident memory beyond what it had when
    the target was loaded."""

    hang_seconds: float = 20.0
    memory_mib: int = 4096


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker works. folder: of its journal, None for one of its own; name: of it in there. gpu: UUID
    of the one GPU it is to see, "" for all. spares: processes to keep loaded where forking cannot be, once
    one has died. allocators: as in a ticket."""

    folder: Path | None = None
    name: str = "worker"
    gpu: str = ""
    limits: Limits = Limits()
    spares: int = 1
    allocators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended that should not have.

    kind: "crash" (a signal of its own, or an exit), "hang", "out-of-memory" (both ended from here), "killed"
    (by somebody else). how: "SIGSEGV", "exit 7". entry: what it was running; None when it had announced
    nothing since it was asked. words: the last line it wrote.
    """

    kind: Literal["crash", "hang", "out-of-memory", "killed"]
    how: str
    entry: journal.Entry | None = None
    words: str = ""

    def __str__(self) -> str:
        said = f"; its last words: {self.words}" if self.words else ""
        match self.kind:
            case "hang":
                return f"it did no op for {self.how}{said}"
            case "out-of-memory":
                return f"its memory grew by {self.how}{said}"
            case "killed":
                return f"somebody killed it ({self.how}){said}"
            case _:
                return f"it died of {self.how}{said}"


class WorkerDied(InfrastructureError):
    """A worker's process is gone. `revive` makes it whole again; who does not ends the command with this."""

    def __init__(self, death: Death, request: wire.Request) -> None:
        super().__init__(f"a worker died on {_describe(request)}: {death}")
        self.death = death


class Worker:
    """One worker with one target loaded. A context manager."""

    def __init__(self, target: str, lane: Lane, seat: Seat | None = None) -> None:
        self.seat = seat or Seat()
        try:
            self._own = tempfile.TemporaryDirectory(prefix="kvproof-") if self.seat.folder is None else None
        except OSError as error:
            raise no_room(error) from None
        folder = Path(self._own.name) if self._own is not None else self.seat.folder
        assert folder is not None
        self._folder = folder
        self._target = target
        self._lane = lane
        self.restarts = 0
        self._spares: list[WorkerProcess] = []
        self._process: WorkerProcess | None = None
        try:
            journal.set_aside(self._journal)
            self._pulse = journal.Pulse(self._journal)
            self._process = self._spawn()
            self.ready = self._settle()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def forks(self) -> bool:
        """Whether `revive` takes milliseconds, and not as long as loading the target does."""
        return self._living.forks

    @property
    def parent(self) -> int:
        """Of the process that was started, which forks the one that serves, or serves itself."""
        return self._living.started

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        return self._living.pid

    def ask(
        self,
        request: wire.Request,
        reply_type: type[R],
        tell: TellTrace | None = None,
        *,
        hang_seconds: float | None = None,
    ) -> R:
        """Send a request and wait for its reply. tell: hears of each trace of a lease meanwhile.
        hang_seconds: in place of the seat's own. Raises what the worker refused with, or WorkerDied."""
        process = self._living
        process.announced = self._pulse.count()
        process.send(request)
        limit = self.seat.limits.hang_seconds if hang_seconds is None else hang_seconds
        controls = isinstance(request, wire.RunControls)
        if controls:  # they are ours, and may import torch first: what the target is held to is not for them
            limit = max(limit, _CONTROL_SECONDS)
        while True:
            reply = self._reply(process, request, limit)
            if controls:
                process.rebase()
            if isinstance(reply, wire.TraceDone) and tell is not None:
                tell(reply)
            elif isinstance(reply, reply_type):
                return reply
            elif isinstance(reply, wire.Refused):
                raise _refusal(reply)
            else:
                process.kill()
                raise WorkerDied(Death("crash", f"an answer to another question: {reply}"), request)

    def insist(self, request: wire.Request, reply_type: type[R], *, hang_seconds: float | None = None) -> R:
        """The same for what may be asked twice: when somebody kills the process, a fresh one is asked."""
        for _ in range(_MOST_KILLS):
            try:
                return self.ask(request, reply_type, hang_seconds=hang_seconds)
            except WorkerDied as died:
                if died.death.kind != "killed":
                    raise
                self.revive()
        return self.ask(request, reply_type, hang_seconds=hang_seconds)

    def revive(self) -> None:
        """A fresh process with the target loaded in place of the one there was, dead or alive. Raises what
        loading raises."""
        self.restarts += 1
        process = self._living
        if process.forks:
            with contextlib.suppress(WorkerDied):
                self._await_death(process)
                process.send(wire.Revive())
                self._await_birth(process)
                return
        process.close()
        # A target that cannot be forked takes long to load: once one has died, the next is loaded ahead of
        # time.
        self._process = self._spares.pop(0) if self._spares else self._spawn()
        if not process.forks:
            while len(self._spares) < self.seat.spares:
                self._spares.append(self._spawn())
        self.ready = self._settle()

    def close(self, *, at_once: bool = False) -> None:
        """End the processes; the one that serves gets a moment to go by itself, unless it is to end at
        once."""
        for spare in self._spares:
            spare.kill()
        if at_once and self._process is not None:
            self._process.kill()
        for process in (*self._spares, *([self._process] if self._process else [])):
            process.close()
        self._spares.clear()
        if hasattr(self, "_pulse"):
            self._pulse.close()
        if self._own is not None:
            self._own.cleanup()
        else:
            with contextlib.suppress(OSError):
                self._journal.unlink(missing_ok=True)

    @property
    def _journal(self) -> Path:
        return self._folder / f"{self.seat.name}.journal"

    @property
    def _living(self) -> WorkerProcess:
        assert self._process is not None
        return self._process

    def _spawn(self) -> WorkerProcess:
        log = (
            self._folder / f"{self.seat.name}.sanitizer.{time.monotonic_ns()}"
            if self._lane.sanitizer
            else None
        )
        process = WorkerProcess(self._lane, self.seat.gpu, log)
        lane = self._lane
        process.send(
            wire.Setup(
                self._target,
                lane.path,
                lane.device,
                lane.audited,
                str(self._journal),
                lane.fence,
                lane.sanitizer,
                "" if log is None else str(log),
                self.seat.allocators,
            )
        )
        return process

    def _settle(self) -> wire.Ready:
        """Wait until the process is loaded and serves; another is started when somebody kills it."""
        for _ in range(_MOST_KILLS):
            try:
                return self._load()
            except WorkerDied as died:
                if died.death.kind != "killed":
                    raise
                self._living.close()
                self._process = self._spawn()
        return self._load()

    def _load(self) -> wire.Ready:
        process = self._living
        request = wire.Setup(self._target, "", "", False, "")
        reply = self._reply(process, request, LOAD_SECONDS)
        if isinstance(reply, wire.Refused):
            raise _refusal(reply)
        if not isinstance(reply, wire.Ready):
            raise WorkerDied(Death("crash", f"an answer to another question: {reply}"), request)
        self._await_birth(process)
        return reply

    def _await_death(self, process: WorkerProcess) -> None:
        """End the serving process. What is sent before it is gone, it may take from the pipe with it."""
        if not process.dead:
            process.end_serving()
            request = wire.Revive()
            while not isinstance(self._reply(process, request, END_SECONDS, buries=False), wire.Gone):
                pass
            process.dead = True

    def _await_birth(self, process: WorkerProcess) -> None:
        request = wire.Revive()
        for _ in range(_MOST_KILLS):
            reply = self._reply(process, request, LOAD_SECONDS, buries=False)
            if isinstance(reply, wire.Born):
                process.born(reply)
                return
            if not isinstance(reply, wire.Gone):
                break
            process.send(request)  # somebody has killed it before it could say a word
        raise WorkerDied(Death("crash", "nothing is born"), request)

    def _reply(
        self, process: WorkerProcess, request: wire.Request, hang_seconds: float, *, buries: bool = True
    ) -> wire.Reply:
        """The next thing the worker says. Raises WorkerDied when its process is gone, by itself or because it
        did no op for so long or took too much memory."""
        quiet, count, before = 0.0, self._pulse.count(), time.monotonic()
        garbled = b""
        while True:
            line = process.line(_TICK_SECONDS)
            process.trim()
            if line is None:
                raise WorkerDied(self._bury(process, process.end()), request)
            if line:
                try:
                    reply = wire.reply_of(line)
                except msgspec.MsgspecError:
                    # The end of a reply that its process did not live to finish; or else, one is lost.
                    garbled = line.strip() or garbled
                    continue
                if isinstance(reply, wire.Gone) and buries:
                    process.dead = True
                    raise WorkerDied(self._bury(process, reply.status), request)
                if garbled and not isinstance(reply, wire.Gone):
                    process.kill()
                    raise WorkerDied(Death("crash", f"a reply that is none: {garbled[:40]!r}"), request)
                # What a reply leaves behind counts, however quickly it came; it goes down with its process.
                if isinstance(reply, wire.Gone):
                    process.verdict = None
                elif process.verdict is not None or self._too_big(process, request):
                    continue
                return reply
            now = time.monotonic()
            step, before = min(max(now - before, 0.0), _LONGEST_STEP), now
            if (beats := self._pulse.count()) != count:
                count, quiet = beats, 0.0
            else:
                quiet += step
            if process.verdict is not None:
                if quiet > END_SECONDS:
                    process.kill()
                    raise WorkerDied(self._bury(process, -signal.SIGKILL), request)
            elif quiet > hang_seconds:
                process.condemn("hang", f"{hang_seconds:g} s")
                quiet = 0.0
            elif self._too_big(process, request):
                quiet = 0.0

    def _too_big(self, process: WorkerProcess, request: wire.Request) -> bool:
        """Whether the process has grown beyond its target's limit; then it is ended."""
        if isinstance(request, wire.RunControls):
            return False
        grown = process.grown_mib()
        if grown <= self.seat.limits.memory_mib:
            return False
        process.condemn("out-of-memory", f"{grown} MiB")
        return True

    def _bury(self, process: WorkerProcess, status: int) -> Death:
        kind, how = process.verdict or cause_of(status)
        process.verdict = None
        entry = journal.read_journal(self._journal) if self._pulse.count() != process.announced else None
        return Death(kind, how, entry, process.last_words())


def _refusal(reply: wire.Refused) -> KvproofError:
    kind: type[KvproofError] = UserError if reply.exit_code == UserError.exit_code else InfrastructureError
    return kind(reply.message)


def _describe(request: wire.Request) -> str:
    match request:
        case wire.Setup(target=target):
            return f"loading {target}"
        case wire.RunLease(lease):
            return f"lease {lease.number} of lane {lease.lane}, seed {lease.seed}"
        case _:
            return f"a {type(request).__name__.lower()} request"
