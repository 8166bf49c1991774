"""Confirming a failure: replayed in fresh processes, and shrunk where nobody else can be hurt.

An ordinary failure is replayed and shrunk inside one fresh process. One that ends its process every time (a
crash, a hang, a lost device), or whose candidates do, is run candidate by candidate from here, each that
fails at the cost of a process.
"""

import queue
import threading
from dataclasses import replace
from typing import Final

from kvproof.ci import wire
from kvproof.ci.isolation import RUNS_TO_GROW, failure_of
from kvproof.ci.process import Limits, Seat, Worker, WorkerDied
from kvproof.model.trace import Trace
from kvproof.properties.failure import HANG, OUT_OF_MEMORY, Failure
from kvproof.properties.lanes import Lane
from kvproof.properties.shrink import Shrinker

REPLAYS: Final = 3
SHRINK_RUNS: Final = 4000
_MOST_DEATHS_FORKED: Final = 2000
_MOST_DEATHS_LOADED: Final = 40
"""Candidates that may cost a process each while one failure is shrunk: milliseconds where it can be forked,
else as long as it takes to load the target."""

_MOST_HANGS: Final = 40
_IMPATIENCE: Final = 15
"""While a hang is being shrunk, it counts after this part of its limit; what is left is replayed with all."""

_SHORTEST_HANG_SECONDS: Final = 1.0
_SPARES: Final = 3


def confirm(
    target: str, lane: Lane, trace: Trace, failure: Failure, *, limits: Limits | None = None
) -> wire.Confirmed:
    """Replay `REPLAYS` times in a fresh process (one process each when the process goes with it), and
    shrink."""
    seat = Seat(limits=limits or Limits(), spares=_SPARES, allocators=(trace.config.allocator,))
    text = wire.text_of(trace)
    if not failure.lost and not failure.deadly:
        request = wire.Confirm(text, failure, REPLAYS, SHRINK_RUNS)
        with Worker(target, lane, seat) as worker:
            try:
                done = worker.ask(request, wire.Confirmed)
                if not done.lost:
                    return done
            except WorkerDied:
                pass  # by another failure, which its own trace will show; one at a time, then
    with Worker(target, lane, seat) as worker:
        return _confirm_apart(Attempts(worker, failure), trace)


class Confirmations:
    """Failures being confirmed, several at once, each in processes of its own.

    at_once: one on a GPU, where a failure that takes the device must not take another's.
    """

    def __init__(
        self, target: str, found: list[tuple[Failure, Trace, Lane]], limits: Limits, at_once: int
    ) -> None:
        self._target = target
        self._found = found
        self._limits = limits
        self._done: list[queue.Queue[wire.Confirmed | BaseException]] = [queue.Queue() for _ in found]
        self._next = iter(range(len(found)))
        self._lock = threading.Lock()
        for _ in range(min(at_once, len(found))):
            # Daemons: nobody waits for them when the campaign is stopped, and their processes end with it.
            threading.Thread(target=self._work, daemon=True).start()

    def result(self, number: int) -> wire.Confirmed:
        """What came of this one; waits for it. Raises what its confirming raised."""
        done = self._done[number].get()
        if isinstance(done, BaseException):
            raise done
        return done

    def _work(self) -> None:
        while True:
            with self._lock:
                number = next(self._next, None)
            if number is None:
                return
            failure, trace, lane = self._found[number]
            try:
                confirmed = confirm(self._target, lane, trace, failure, limits=self._limits)
            except BaseException as error:  # whatever it is, the campaign's own thread must hear of it
                self._done[number].put(error)
            else:
                self._done[number].put(confirmed)


def _confirm_apart(attempts: "Attempts", trace: Trace) -> wire.Confirmed:
    failed = sum(attempts.step(trace) is not None for _ in range(REPLAYS))
    small, runs, failed_small = trace, 0, failed
    if failed:
        shrinker = Shrinker(attempts.hasty_step, trace, most_runs=SHRINK_RUNS)
        small, runs = shrinker.shrink(), shrinker.runs
        failed_small = sum(attempts.step(small) is not None for _ in range(REPLAYS))
        if not failed_small:
            small, failed_small = trace, failed
    last = None
    if failed:
        last = replace(attempts.last, step=max(0, len(small.ops) - 1))
    return wire.Confirmed(failed, REPLAYS, wire.text_of(small), last, None, runs, failed_small)


class Attempts:
    """Runs traces in a worker that is revived whenever one took its process. last: the failure as it last
    came."""

    def __init__(self, worker: Worker, failure: Failure) -> None:
        self._worker = worker
        self._sought = failure
        self.last = failure
        self._hangs = failure.divergence == HANG
        self._grows = failure.divergence == OUT_OF_MEMORY
        self._deaths_left = _MOST_DEATHS_FORKED if worker.forks else _MOST_DEATHS_LOADED
        if self._hangs:
            self._deaths_left = _MOST_HANGS

    def step(self, trace: Trace) -> int | None:
        """Index of the op that fails with the fingerprint, or None."""
        return self._step(trace, self._worker.seat.limits.hang_seconds)

    def hasty_step(self, trace: Trace) -> int | None:
        """The same for a shrinker: with less patience, and None once enough processes have gone."""
        if self._deaths_left <= 0:
            return None
        patience = self._worker.seat.limits.hang_seconds
        if self._hangs:
            patience = max(_SHORTEST_HANG_SECONDS, patience / _IMPATIENCE)
        return self._step(trace, patience)

    def _step(self, trace: Trace, hang_seconds: float) -> int | None:
        worker = self._worker
        if self._grows:
            worker.revive()  # what the traces before have kept is not this one's
        times = RUNS_TO_GROW if self._grows else 1
        request = wire.Replay(wire.text_of(trace), times, self._sought)
        found: Failure | None
        try:
            done = worker.insist(request, wire.Replayed, hang_seconds=hang_seconds)
        except WorkerDied as died:
            self._replace()
            found = failure_of(died.death, worker.ready.path)
        else:
            if done.lost:
                self._replace()
            found = next((failure for run in done.runs for failure in run if self._is_sought(failure)), None)
        if found is None or not self._is_sought(found):
            return None
        self.last = found
        return found.step

    def _replace(self) -> None:
        self._deaths_left -= 1
        self._worker.revive()

    def _is_sought(self, failure: Failure) -> bool:
        return failure.fingerprint == self._sought.fingerprint
