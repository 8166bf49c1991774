"""What a campaign tells while it runs. One reporter a file consumes them; see `terminal.py`, `folder.py`."""

from dataclasses import dataclass, field
from typing import Protocol

from kvproof.ci.wire import Confirmed, LeaseDone, Ready
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure


@dataclass(frozen=True, slots=True)
class Started:
    """The target is loaded in every lane. controls: planted faults that were caught, by name."""

    target: str
    ready: dict[str, Ready]
    allocators: tuple[str, ...]
    seed: int
    workers: int
    controls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseFinished:
    """A verdict, in order of lease numbers. checked: ops so far; elapsed: seconds so far."""

    verdict: LeaseDone
    allocator: str
    checked: int
    elapsed: float


@dataclass(frozen=True, slots=True)
class FailureFound:
    """The first failure with its fingerprint."""

    failure: Failure
    trace: Trace
    lease: int


@dataclass(frozen=True, slots=True)
class FailureConfirmed:
    """Replayed in a fresh process and shrunk. known: the reviewed reason, when it is a known fault."""

    failure: Failure
    confirmed: Confirmed
    known: str | None
    seen: int


@dataclass(slots=True)
class Finished:
    """The end. checked: ops by allocator and lane; problems: why this campaign proves less than it should."""

    exit_code: int
    elapsed: float
    leases: int
    checked: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


Event = Started | LeaseFinished | FailureFound | FailureConfirmed | Finished


class Reporter(Protocol):
    """Consumes events in order, in the command line's own thread."""

    def report(self, event: Event) -> None:
        """Take one event."""
        ...
