"""Lockstep: one op at a time through model and target, and a verdict on each.

The quick way out is one comparison: the target answered what the model predicted. Everything else (another
legal choice of pages, a refusal, a look at the lists) takes the long way through the catalogue of checks.
The quick way proves as much: a prediction has every property, which `tests/properties` shows by asking the
checks about predictions themselves.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kvproof.impl.targets.protocol import Answer, Mirror, State, Subject
from kvproof.model.base import AllocatorModel, Expectation, Outcome
from kvproof.model.config import Config
from kvproof.model.ops import HARMLESS, Clobber, GroupBegin, GroupEnd, Misuse, Op
from kvproof.properties.catalogue import ANSWER_CHECKS, BUILT_SO, STATE_CHECKS, TOLERABLE, Check
from kvproof.properties.checks.buffer import adopt_buffer
from kvproof.properties.checks.slots import chosen_pages, chosen_peers
from kvproof.properties.checks.state import REFUSED_BUT, check_refusal, stale_entries
from kvproof.properties.failure import DEVICE_LOST, ILLEGAL_ACCESS, Failure
from kvproof.properties.step import Finding, Step
from kvproof.properties.witness import Witness

_OPS_OF_KERNELS = {"alloc_extend_kernel": "Extend", "alloc_decode_kernel": "Decode"}
_PROPERTY_OF_MISUSE = {"nested-begin": "P11", "end-without-begin": "P11", "free-swa-of-unmapped": "P3"}
"""What is broken by a misuse that is taken; P1 by all others."""


@dataclass(slots=True)
class Tally:
    """What one lockstep did.

    checked: calls made and judged. idle: ops that came to no call. skipped: ops the target has no call for,
    by name. accepted: misuses taken without complaint, by kind, and what they left.
    """

    checked: int = 0
    idle: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    accepted: dict[str, str] = field(default_factory=dict)


class Lockstep:
    """Model and target side by side, from a fresh allocator on.

    look_every: the target's lists are compared after every so many calls, after every refusal, and by
    `finish`. lacks, refuses, exact: see Capabilities. misuse_fails: an accepted misuse that corrupts the
    allocator is a failure even where the target never promised to refuse it. witness: is told each op first.
    After a failure that is not tolerable, or an accepted misuse (`spoilt`), the pair is out of step and must
    be thrown away.
    """

    def __init__(
        self,
        model: AllocatorModel,
        subject: Subject,
        *,
        exact: bool,
        lacks: frozenset[str] = frozenset(),
        refuses: frozenset[str] = frozenset(),
        misuse_fails: bool = False,
        look_every: int = 1,
        witness: Witness | None = None,
    ) -> None:
        self.model = model
        self.subject = subject
        self.tally = Tally()
        self.answers: list[list[int] | None] | None = None
        self.peers: defaultdict[str, list[int]] = defaultdict(list)
        self.spoilt = False
        self._mirror = subject if isinstance(subject, Mirror) else None
        self._exact = exact
        self._lacks = lacks
        self._refuses = refuses
        self._misuse_fails = misuse_fails
        self._look_every = look_every
        self._look_in = look_every
        self._witness = witness
        self._unseen: tuple[Op, Expectation, Answer] | None = None
        self._index = -1

    @property
    def _may_run_ahead(self) -> bool:
        """Whether the target may have released what the model still holds, on a side that has the most: then
        it is looked at after every call."""
        return not self._exact and bool(self.model.sides) and self.model.in_group

    @property
    def config(self) -> Config:
        """The allocator's config as it now is."""
        return self.model.config

    def step(self, op: Op) -> Failure | None:
        """Do one op. None when all is well (or the op was skipped, or came to nothing)."""
        self._index += 1
        if self._witness is not None:
            self._witness.about_to(op)
        if self._lacks and type(op).__name__ in self._lacks:
            self.tally.skipped[type(op).__name__] += 1
            return None
        expectation = self.model.apply(op)
        outcome = expectation.outcome
        if outcome is Outcome.NOTHING:
            self.tally.idle += 1
            return None
        if self._mirror is not None:
            self._mirror.expect(expectation, self.model)
        answer = self.subject.apply(expectation.call)
        self.tally.checked += 1
        if answer.lost:
            return self._device_lost(op, answer.error, answer.lost_in)
        if self.answers is not None:
            self.answers.append(answer.slots)
            for name, peers in answer.peers.items():
                self.peers[name].extend(peers)
        if (
            answer.slots == expectation.slots
            and answer.available == expectation.available
            and answer.error is None
            and not answer.damage
            and answer.dtype == "int64"
            and answer.bases == expectation.bases
            and (not expectation.portions or answer.peers == expectation.peers)
            and outcome is not Outcome.REFUSED
        ):
            self._look_in -= 1
            if self._look_in > 0 and outcome is not Outcome.OOM and not self._may_run_ahead:
                self._unseen = (op, expectation, answer)
                return None
            state = self.subject.observe()
            self._looked()
            if state.lost is not None:
                return self._device_lost(op, state.lost)
            if self._agrees(state):
                return None
        else:
            state = self.subject.observe()
            self._looked()
            if state.lost is not None:
                return self._device_lost(op, state.lost)
        return self._judge(self._step(op, expectation, answer, state))

    def finish(self) -> Failure | None:
        """Look at the lists once more when calls were made since the last look.

        The failure, if any, names the last op; an earlier one may be to blame.
        """
        if self.spoilt or self._unseen is None:
            return None
        op, expectation, answer = self._unseen
        state = self.subject.observe()
        self._looked()
        if state.lost is not None:
            return self._device_lost(op, state.lost)
        return self._judge(self._step(op, expectation, answer, state))

    def _device_lost(self, op: Op, error: Exception | None, where: str = "") -> Failure:
        """An access nobody survives. where: whose it was, where the fence told."""
        self.spoilt = True
        lines = str(error).strip().splitlines() or ["no message"]
        divergence = f"{ILLEGAL_ACCESS} {where}" if where else DEVICE_LOST
        return self._failure("P7", op, Finding(divergence, f"the device is lost: {lines[0]}"))

    def _agrees(self, state: State) -> bool:
        """Whether the target shows what the model predicts, to the letter."""
        model = self.model
        return (
            state.free == model.free_pages
            and state.staged == model.staged
            and not state.damage
            and (not model.mappings or state.mappings == model.mappings)
            and (not model.sizes or model.sizes.items() <= state.sizes.items())
            and all(
                name in state.sides
                and state.sides[name].free == pool.free
                and state.sides[name].staged == pool.staged
                for name, pool in model.sides.items()
            )
        )

    def _looked(self) -> None:
        self._look_in = self._look_every
        self._unseen = None

    def _step(self, op: Op, expectation: Expectation, answer: Answer, state: State) -> Step:
        return Step(self._index, op, self.config, self.model, expectation, answer, state, self._exact)

    def _judge(self, step: Step) -> Failure | None:
        self._adopt_releases(step)
        if isinstance(step.op, Misuse):
            return self._judge_misuse(step.op, step)
        failure = self._ask(ANSWER_CHECKS, step)
        if failure is not None:
            return failure
        self._adopt(step)
        self._adopt_releases(step)  # those of the choice just adopted
        failure = self._ask(STATE_CHECKS, step)
        if not self.spoilt and self.model.mappings:
            self.model.adopt_stale(stale_entries(step))
        return failure

    def _adopt_releases(self, step: Step) -> None:
        """A target may let a group's frees act at once."""
        if self._exact or not self.model.in_group:
            return
        lists = {"": set(step.state.free) | set(step.state.staged)}
        for name, side in step.state.sides.items():
            lists[name] = set(side.free) | set(side.staged)
        self.model.adopt_releases(lists)
        step.expectation.available = self.model.available

    def _adopt(self, step: Step) -> None:
        """Go on from the target's choice, which the checks have found legal."""
        slots, expectation = step.answer.slots, step.expectation
        if slots is None:
            return
        if expectation.detached is not None:
            if slots != expectation.slots:
                adopt_buffer(step)
        elif slots != expectation.slots or (expectation.portions and step.answer.peers != expectation.peers):
            self.model.adopt(expectation, chosen_pages(step), chosen_peers(step))

    def _ask(self, checks: tuple[tuple[str, Check], ...], step: Step) -> Failure | None:
        for property_id, check in checks:
            found = check(step)
            if found is not None:
                tolerable = check in TOLERABLE and step.answer.error is None
                self.spoilt = not tolerable
                if isinstance(step.op, Clobber) and not tolerable:
                    # Whatever changes when the caller writes to its own tensors has one cause.
                    property_id, found = "P11", Finding("keeps-callers-tensor", found.message)
                elif isinstance(step.op, (GroupBegin, GroupEnd)) and property_id in ("P1", "P2", "P3"):
                    property_id = "P11"
                return self._failure(
                    property_id, step.op, found, tolerable=tolerable, built=check in BUILT_SO
                )
        return None

    def _failure(
        self, property_id: str, op: Op, found: Finding, *, tolerable: bool = False, built: bool = False
    ) -> Failure:
        name, allocator = "Build" if built else type(op).__name__, self.config.allocator
        # These kernels are the paged allocator's, whoever launches them.
        kernel = found.divergence.partition(" ")[2].partition(".")[0]
        if kernel in _OPS_OF_KERNELS:
            name, allocator = _OPS_OF_KERNELS[kernel], "paged"
        return Failure(property_id, name, allocator, found.divergence, self._index, found.message, tolerable)

    def _judge_misuse(self, op: Misuse, step: Step) -> Failure | None:
        changed = check_refusal(step)
        refused = step.answer.error is not None
        promised = op.kind in self._refuses
        if changed is None and op.kind in HARMLESS and not promised:
            return None
        if refused and promised:
            self.spoilt = changed is not None
            return None if changed is None else self._failure("P6", op, changed)
        # What a target that promised nothing did with it may be hidden (in a group, say): go no further.
        self.spoilt = True
        left = "nothing has changed so far" if changed is None else changed.message.removeprefix(REFUSED_BUT)
        if not refused or changed is not None:
            self.tally.accepted[op.kind] = f"refused, but {left}" if refused else left
        if promised:
            found = Finding(
                f"misuse-accepted {op.kind}", f"{op.kind} was accepted; expected a refusal; {left}"
            )
            return self._failure("P6", op, found)
        if changed is not None and (self._misuse_fails or op.kind in HARMLESS):
            found = Finding(f"misuse-corrupts {op.kind}", f"{op.kind}: {self.tally.accepted[op.kind]}")
            return self._failure(_PROPERTY_OF_MISUSE.get(op.kind, "P1"), op, found)
        return None
