"""Running one trace on one target, from its config to a result."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvproof.impl.targets.protocol import Subject, Target
from kvproof.model.catalogue import model_for
from kvproof.model.config import Config
from kvproof.model.marks import Mark
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.lockstep import Lockstep, Tally
from kvproof.properties.witness import installed


@dataclass(slots=True)
class Result:
    """What came of a trace: failures in order (all but the last tolerable), what was done, marks reached,
    and, when asked for, the answers of every call, and what the side mappings said of them, by side."""

    failures: list[Failure]
    tally: Tally
    marks: Counter[Mark] = field(default_factory=Counter)
    answers: list[list[int] | None] | None = None
    peers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def serious(self) -> list[Failure]:
        """The failures behind which the trace could not go on; at most one."""
        return [failure for failure in self.failures if not failure.tolerable]

    @property
    def lost(self) -> bool:
        """Whether the run took the device with it."""
        return bool(self.failures) and self.failures[-1].lost

    def get(self, fingerprint: str) -> Failure | None:
        """The failure with this fingerprint, if it is among them."""
        return next((failure for failure in self.failures if failure.fingerprint == fingerprint), None)


def lockstep_for(
    target: Target,
    config: Config,
    *,
    look_every: int = 1,
    misuse_fails: bool = False,
    through: Callable[[Subject], Subject] | None = None,
) -> Lockstep:
    """A fresh allocator of the target in lockstep with a fresh model, witnessed from before it is built.

    through: makes of the allocator the subject that is asked in its place.
    """
    capabilities = target.capabilities
    witness = installed()
    if witness is not None:
        witness.begin(config, target.path)
    subject: Subject = target.build(config)
    return Lockstep(
        model_for(config),
        subject if through is None else through(subject),
        exact=capabilities.exact,
        lacks=capabilities.lacking(config.allocator),
        refuses=capabilities.refuses if config.checked else frozenset(),
        misuse_fails=misuse_fails,
        look_every=look_every,
        witness=witness,
    )


def run_trace(
    target: Target, trace: Trace, *, look_every: int = 1, misuse_fails: bool = False, record: bool = False
) -> Result:
    """Run the trace to its end, or to the first failure that cannot be gone on behind.

    record: keep every answer, for comparing runs.
    """
    pair = lockstep_for(target, trace.config, look_every=look_every, misuse_fails=misuse_fails)
    if record:
        pair.answers = []
    failures: list[Failure] = []
    for op in trace.ops:
        failure = pair.step(op)
        if failure is not None:
            failures.append(failure)
        if pair.spoilt:
            break
    if (failure := pair.finish()) is not None:
        failures.append(failure)
    return Result(failures, pair.tally, Counter(pair.model.marks), pair.answers, dict(pair.peers))
