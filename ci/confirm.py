"""Confirming a failure: replayed in fresh processes, and shrunk where nobody else can be hurt.

A failure that loses the device (an illegal access on a GPU) ends its process every time, so each replay and
each candidate of the shrinker that fails costs a process; the shrinker is given few.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import msgspec

from kvproof.ci import wire
from kvproof.ci.process import Worker
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.lanes import Lane
from kvproof.properties.shrink import Shrinker

REPLAYS: Final = 3
SHRINK_RUNS: Final = 4000
_SHRINK_RUNS_LOST: Final = 60
_MOST_LOST: Final = 8
"""Candidates that may lose the device before an ordinary failure is reported as small as it then is."""


def confirm(target: str, lane: Lane, trace: Trace, failure: Failure, *, shrink: bool) -> wire.Confirmed:
    """Replay `REPLAYS` times in a fresh process (one process each when the device is lost), and shrink."""
    if not failure.lost:
        return _confirm_ordinary(target, lane, wire.text_of(trace), failure, shrink=shrink)
    runner = _Runner(target, lane, failure)
    with runner.closing():
        failed = sum(runner.step(trace) is not None for _ in range(REPLAYS))
        small, runs = trace, 0
        if failed and shrink:
            shrinker = Shrinker(runner.step, trace, most_runs=_SHRINK_RUNS_LOST)
            small, runs = shrinker.shrink(), shrinker.runs
        failed_small = sum(runner.step(small) is not None for _ in range(REPLAYS)) if runs else failed
    last = replace(failure, step=len(small.ops) - 1) if failed else None
    return wire.Confirmed(failed, REPLAYS, wire.text_of(small), last, None, runs, failed_small)


def _confirm_ordinary(
    target: str, lane: Lane, text: str, failure: Failure, *, shrink: bool
) -> wire.Confirmed:
    """In one process, or in several when a candidate of the shrinker loses the device by another failure."""
    avoid: list[str] = []
    failed: int | None = None
    runs = 0
    while True:
        most_runs = SHRINK_RUNS if shrink and len(avoid) <= _MOST_LOST else 0
        request = wire.Confirm(text, failure, REPLAYS, most_runs, tuple(avoid))
        with Worker(target, lane) as worker:
            done = worker.ask(request, wire.Confirmed)
        runs += done.runs
        failed = done.failed if failed is None else failed
        if not done.lost:
            return msgspec.structs.replace(done, failed=failed, runs=runs)
        avoid.append(done.lost_by)
        text = done.trace


class _Runner:
    """Runs candidates in a worker that is replaced whenever one took its device."""

    def __init__(self, target: str, lane: Lane, failure: Failure) -> None:
        self._target = target
        self._lane = lane
        self._failure = failure
        self._worker: Worker | None = None

    def step(self, trace: Trace) -> int | None:
        """Index of the op that fails with the fingerprint, or None."""
        if self._worker is None:
            self._worker = Worker(self._target, self._lane)
        request = wire.Confirm(wire.text_of(trace), self._failure, 1, 0)
        done = self._worker.ask(request, wire.Confirmed)
        if done.lost:
            self._end()
        return None if done.failure is None else done.failure.step

    @contextmanager
    def closing(self) -> Iterator[None]:
        """End the last worker, whatever happens."""
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
