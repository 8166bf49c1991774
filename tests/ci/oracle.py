"""What a lease of a deadly target must come to, worked out without a process: a target that raises in place
of dying, and the lease gone on with behind it. The target is `tests/ci/theirs.py`, told to die at large
frees.
"""

from __future__ import annotations

import msgspec

from kvproof.ci import wire
from kvproof.ci.isolation import MOST_DEATHS
from kvproof.impl.targets.null import Null, NullSubject
from kvproof.impl.targets.protocol import Ticket
from kvproof.model.trace import Origin, Trace
from kvproof.properties import witness
from kvproof.properties.lease import Lease, run_lease
from tests.ci.theirs import large_free


class _Dead(BaseException):
    """In place of the end of the process."""


class _Mortal(NullSubject):
    def apply(self, call):
        if large_free(call):
            raise _Dead
        return super().apply(call)


class _Mortals(Null):
    def build(self, config):
        return _Mortal()


class _Ops:
    """Remembers what a journal would."""

    def begin(self, config, path):
        self.config, self.ops = config, []

    def about_to(self, op):
        self.ops.append(op)


def oracle(of: Lease, fingerprint: str) -> tuple[wire.LeaseDone, list[Trace]]:
    """What the lease must come to, and the traces that end its process."""
    target = _Mortals(Ticket())
    memory = _Ops()
    parts: list[wire.LeaseDone] = []
    deadly: list[Trace] = []
    first, left = 0, of.ops

    def tell(part, behind):
        nonlocal first, left
        parts.append(wire.lease_done(part))
        first, left = first + 1, behind

    witness.install(memory)
    try:
        while left > 0 and len(deadly) < MOST_DEATHS:
            try:
                run_lease(target, of, first=first, left=left, tell=tell)
            except _Dead:
                origin = Origin(of.target, of.lane, of.seed, of.number, first)
                deadly.append(Trace(memory.config, tuple(memory.ops), origin))
                parts.append(
                    msgspec.structs.replace(
                        wire.joined(of.number, of.lane, ()), traces=1, seen={fingerprint: 1}
                    )
                )
                first, left = first + 1, left - max(1, len(memory.ops))
    finally:
        witness.install(None)
    return wire.joined(of.number, of.lane, parts), deadly


def without_found(done: wire.LeaseDone) -> wire.LeaseDone:
    return msgspec.structs.replace(done, found=[])
