"""The terminal reporter: progress while it runs, failures as they are confirmed, totals at the end.

On a terminal a status line lives at the bottom; elsewhere a plain line comes every few seconds, uncoloured.
"""

import time
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kvproof.ci import wire
from kvproof.ci.events import (
    Confirming,
    Event,
    FailureConfirmed,
    FailureFound,
    Finished,
    LeaseFinished,
    Resumed,
    Started,
    WorkerReplaced,
)
from kvproof.ci.render import failure_lines, heading, replay_line
from kvproof.model.errors import InfrastructureError

LINE_EVERY_SECONDS: Final = 5.0
_MEANING: Final = {
    0: "clean: no failure",
    1: "new failures",
    3: "not enough was done to be believed",
    4: "known failures only",
}


class TerminalReporter:
    """Prints to a rich console. A context manager, so that the status line is always taken down.

    flags: what `kvproof replay` must be told besides the file, with a space before each.
    """

    def __init__(self, console: Console, folder: Path, flags: str = "") -> None:
        self._console = console
        self._folder = folder
        self._flags = flags
        self._status: Status | None = None
        self._said = time.monotonic()
        self._target = ""
        self._seed = 0
        self._leases = 0
        self._found = 0

    def __enter__(self) -> "TerminalReporter":
        if self._console.is_terminal:
            self._status = self._console.status("loading")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if self._target and isinstance(error, (KeyboardInterrupt, InfrastructureError)):
            self._print(
                f"kept        {self._leases} leases and {self._found} distinct failures in {self._folder};"
                f" the same command with --seed {self._seed} --out {quote(str(self._folder))} goes on there"
            )

    def report(self, event: Event) -> None:
        """See Reporter."""
        match event:
            case Started():
                self._start(event)
            case LeaseFinished():
                self._progress(event)
            case Resumed():
                self._resume(event)
            case WorkerReplaced(why):
                self._print(why)
            case Confirming(failure, number, of):
                self._show(f"replaying and shrinking {failure.fingerprint}, failure {number} of {of}")
            case FailureFound(failure, _, lease):
                self._found += 1
                self._print(f"found {heading(failure)} (lease {lease}); confirmed at the end")
            case FailureConfirmed():
                self._failure(event)
            case Finished():
                self._finish(event)

    def _print(self, text: str = "", style: str | None = None) -> None:
        self._console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def _start(self, event: Started) -> None:
        self._target, self._seed = event.target, event.seed
        lanes = ", ".join(f"{name} ({ready.path})" for name, ready in event.ready.items())
        self._print(f"target      {next(iter(event.ready.values())).name}", style="bold")
        self._print(f"allocators  {', '.join(event.allocators)}")
        reasons = {
            kind: reason
            for ready in event.ready.values()
            for kind, reason in ready.capabilities.unloadable.items()
            if kind in event.absent
        }
        if none := [kind for kind in event.absent if kind not in reasons]:
            self._print(f"absent      {', '.join(none)} (this target has none)")
        for kind, reason in reasons.items():
            self._print(f"left out    {kind}: {reason}")
        self._print(f"lanes       {lanes}")
        self._print(f"seed        {event.seed}")
        self._print(f"workers     {event.workers}")
        self._print(f"controls    caught {', '.join(event.controls)}")
        stood_in = sorted({name for ready in event.ready.values() for name in ready.stood_in})
        if stood_in:
            self._print(f"stood in    {', '.join(stood_in)}")

    def _resume(self, event: Resumed) -> None:
        self._leases, self._found = event.leases, event.failures
        for damage in event.damage:
            self._print(f"damaged     {damage}; what it held runs again")
        self._print(
            f"resumed     {event.leases} leases, {event.checked:,} ops and {event.failures} distinct failures"
            f" are there from before ({event.confirmed} reported), {event.elapsed:.0f} s spent"
        )

    def _progress(self, event: LeaseFinished) -> None:
        rate = event.checked / event.elapsed if event.elapsed else 0.0
        text = (
            f"{event.elapsed:6.0f} s  lease {event.verdict.lease}  {event.checked:,} ops checked"
            f"  {rate:,.0f} ops/s  {self._found} distinct failures"
        )
        self._leases = event.verdict.lease + 1
        self._show(text)

    def _show(self, text: str) -> None:
        """Progress: where it stands, or now and then a line."""
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() - self._said >= LINE_EVERY_SECONDS:
            self._said = time.monotonic()
            self._print(text)

    def _failure(self, event: FailureConfirmed) -> None:
        confirmed = event.confirmed
        trace = wire.trace_of(confirmed.trace)
        failure = confirmed.failure or event.failure
        path = self._folder / "failures" / f"{event.failure.fingerprint}.json"
        state = "NEW" if event.known is None else "KNOWN"
        self._print()
        self._print(f"{state}  {heading(failure)}", style="bold yellow" if event.known else "bold red")
        if event.known is not None:
            self._print(f"judged     {event.known}")
        shrunk = f"{confirmed.failed_small} of {confirmed.times} as shrunk in {confirmed.runs} runs"
        self._print(
            f"seen       {event.seen} times; fails {confirmed.failed} of {confirmed.times} in a fresh"
            f" process, {shrunk if confirmed.runs else 'not shrunk'}"
        )
        for line in failure_lines(
            trace, failure, confirmed.maps, replay_line(str(path), self._flags, failure)
        ):
            self._print(line)

    def _finish(self, event: Finished) -> None:
        self._print()
        for name, checked in event.checked.items():
            self._print(f"checked    {checked:>12,}  {name}")
        for name, count in event.skipped.items():
            self._print(f"skipped    {count:>12,}  {name} (the target has no such call)")
        for kind, left in event.accepted.items():
            self._print(f"accepted   {kind}: {left}")
        if event.replaced:
            self._print(f"replaced   {event.replaced:>12,}  workers that ended on a trace that passes")
        for problem in event.problems:
            self._print(f"problem    {problem}", style="bold red")
        self._print(f"marks      {len(event.marks)} reached")
        self._print(f"results    {self._folder}")
        style = {0: "bold green", 4: "bold yellow"}.get(event.exit_code, "bold red")
        meaning = f"{_MEANING[event.exit_code]} (exit {event.exit_code})"
        self._print(f"{meaning}, {event.leases} leases, {event.elapsed:.0f} s", style=style)
