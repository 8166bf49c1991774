"""Offences: an allocator with one fault, the shortest trace that shows it, and what it must be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvproof.impl.targets.protocol import Subject
from kvproof.model.config import Config
from kvproof.model.ops import Op
from kvproof.model.trace import Trace
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.run import run_trace
from kvproof.properties.space import Space
from tests.properties.page_pool import front
from tests.properties.subjects import KINDS, PoolTarget

STANDING = ("P6", "P11")
"""What is wrong from the beginning may be seen by a refusal first, or by a clobber."""


@dataclass(frozen=True)
class Offence:
    """fault: (property, divergence). config: its allocator is the kind; elsewhere the same class is used.
    make: the offender. trace: its last op is the guilty one. also: what it may be called as well by another
    trace, or by what comes of it where the trace goes on. budget: ops of the generator within which it is
    found."""

    make: Callable[..., Subject]
    config: Config
    trace: tuple[Op, ...]
    fault: tuple[str, str]
    also: tuple[str, ...] = ()
    budget: int = 2000

    @property
    def target(self) -> PoolTarget:
        return PoolTarget(lambda config: self.make(config, front))

    def __str__(self) -> str:
        return f"{self.config.allocator} {getattr(self.make, '__name__', '')}"


_GROUPS = (("P11", "GroupBegin"), ("P11", "GroupEnd"))


def assert_named(offence: Offence) -> None:
    """The last op fails, with this name; and a lawful allocator of the kind passes the trace."""
    result = run_trace(offence.target, Trace(offence.config, offence.trace))
    (failure,) = result.failures
    assert (failure.property_id, failure.divergence) == offence.fault, failure.message
    assert (failure.op, failure.step) == (type(offence.trace[-1]).__name__, len(offence.trace) - 1)
    assert failure.allocator == offence.config.allocator
    honest = PoolTarget(lambda config: KINDS[config.allocator](config, front))
    assert run_trace(honest, Trace(offence.config, offence.trace)).failures == []


def assert_found_from_zero(offence: Offence) -> None:
    """The generator comes upon it, and it is never called anything else."""
    lease = Lease(0, 0, "pool", "seeded", Space(offence.config.allocator), offence.budget, longest=100)
    found = [entry.failure for entry in run_lease(offence.target, lease).found.values()]
    own = [failure for failure in found if failure.property_id == offence.fault[0]]
    # What comes to light where a group begins or ends is the group's.
    others = [
        failure
        for failure in found
        if failure not in own and (failure.property_id, failure.op) not in _GROUPS
    ]
    told = [failure for failure in others if failure.property_id not in offence.also]
    assert own, f"not found in {offence.budget} ops: {found}"
    assert told == [], told
