"""Recording: one trace, run in lockstep, and all that is needed to make its calls again elsewhere.

What is kept of each call: the call itself, what the contract says and what the target did, and of an
allocating call how its slots divide among rows, so that a choice of other free pages can be told from a
fault. Ops that come to nothing, or that the target has no call for, leave no record.

Not covered: failures of two runs (relations), and calls that take their process with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvproof.impl.targets.protocol import Answer, State, Subject, Target
from kvproof.model.base import AllocatorModel, Expectation, Growth, Outcome
from kvproof.model.calls import Call
from kvproof.model.interleave import InterleaveModel
from kvproof.model.ops import Op
from kvproof.model.trace import Trace
from kvproof.properties.run import lockstep_for


@dataclass(frozen=True, slots=True)
class View:
    """An allocator from outside its order. pages: free and staged ones of each pool, sorted, "" for the main
    pool. mappings: entries other than 0, by side. sizes: as in `State`. available: `available_size()`."""

    pages: dict[str, list[int]]
    mappings: dict[str, dict[int, int]]
    sizes: dict[str, int]
    available: int


@dataclass(frozen=True, slots=True)
class Grown:
    """One row of an allocating call in one pool, in that pool's slots.

    head: how many slots before its own have no peer here. prefix, seq: lengths before and after. last: slot
    before the first new one, -1 where there is none that matters. classes: of each new page, where pages have
    classes.
    """

    head: int
    prefix: int
    seq: int
    last: int
    classes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """What an allocating call had to do in one pool. page_size: in its own slots. free: pages that could be
    taken. slots: those that the contract (and a legal choice taken over from the target) comes to."""

    page_size: int
    free: list[int]
    rows: list[Grown]
    slots: list[int]


@dataclass(slots=True, eq=False)
class Record:
    """One call. index: of its op in the trace. due: what must come back, where that is slots; parts: how, by
    pool. model, target: the allocator afterwards, as the contract has it and as it was seen."""

    index: int
    op: Op
    call: Call
    outcome: Outcome
    answer: Answer
    model: View
    target: View
    due: list[int] | None = None
    bases: list[int | None] | None = None
    parts: dict[str, Part] = field(default_factory=dict)


class _Recorder:
    """A subject that remembers the latest expectation, answer and state. A `Mirror` as well, for that is told
    what is expected."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.expectation: Expectation | None = None
        self.answer = Answer()
        self.state: State | None = None

    def expect(self, expectation: Expectation, model: AllocatorModel) -> None:
        self.expectation = expectation

    def apply(self, call: Call) -> Answer:
        self.state = None
        self.answer = self._subject.apply(call)
        return self.answer

    def observe(self) -> State:
        self.state = self._subject.observe()
        return self.state


def record(target: Target, trace: Trace) -> list[Record]:
    """Run the trace and look after each call; ends with the call that spoils the run, or with the trace."""
    recorder: _Recorder | None = None

    def through(subject: Subject) -> Subject:
        nonlocal recorder
        recorder = _Recorder(subject)
        return recorder

    pair = lockstep_for(target, trace.config, misuse_fails=True, through=through)
    assert recorder is not None
    records: list[Record] = []
    for index, op in enumerate(trace.ops):
        recorder.expectation = None
        free = {side: _takeable(pair.model, side) for side in ("", *pair.model.sides)}
        pair.step(op)
        if (expectation := recorder.expectation) is not None:
            state = recorder.state or recorder.observe()
            records.append(_record(index, op, expectation, recorder.answer, pair.model, state, free))
        if pair.spoilt:
            break
    return records


def _record(
    index: int,
    op: Op,
    expectation: Expectation,
    answer: Answer,
    model: AllocatorModel,
    state: State,
    free: Mapping[str, list[int]],
) -> Record:
    made = Record(
        index,
        op,
        expectation.call,
        expectation.outcome,
        answer,
        _view_of_model(model),
        _view_of_state(state, answer),
        expectation.slots,
        expectation.bases,
    )
    if expectation.slots is not None and expectation.detached is None:
        made.parts = _parts(expectation, model, free)
        made.due = made.parts[""].slots
    elif expectation.slots is not None and answer.slots and _is_of_the_latest(answer.slots, model):
        made.due = answer.slots
    return made


def _takeable(model: AllocatorModel, side: str) -> list[int]:
    legal = ("free", "staged", "set aside")
    return sorted(page for page, owner in model.owners(side).items() if owner in legal)


def _is_of_the_latest(slots: list[int], model: AllocatorModel) -> bool:
    """Whether the model has given a buffer just these pages: then it has taken over the target's choice."""
    buffers: list[list[int]] = getattr(model, "buffers", [])
    page_size = model.config.device_page_size
    return (
        bool(buffers)
        and len(set(slots)) == len(slots)
        and list(dict.fromkeys(slot // page_size for slot in slots)) == buffers[-1]
    )


def _parts(expectation: Expectation, model: AllocatorModel, free: Mapping[str, list[int]]) -> dict[str, Part]:
    """Of each pool that took part."""
    growths = expectation.growths
    slots = [slot for growth in growths for slot in model.slots_of(growth.row, growth.prefix, growth.seq)]
    rows = [_grown(growth, 0, model.page_size, model) for growth in growths]
    parts = {"": Part(model.page_size, free[""], rows, slots)}
    for side, portion in expectation.portions.items():
        page_size = model.config.device_page_size if side == "device" else model.page_size
        rows = [
            _grown(growth, head, page_size, model)
            for growth, head in zip(portion.growths, portion.heads, strict=True)
        ]
        parts[side] = Part(page_size, free[side], rows, portion.peers)
    return parts


def _grown(growth: Growth, head: int, page_size: int, model: AllocatorModel) -> Grown:
    page, used = divmod(growth.prefix, page_size)
    last = growth.row.pages[page] * page_size + used - 1 if used and page < len(growth.row.pages) else -1
    classes: tuple[int, ...] = ()
    if isinstance(model, InterleaveModel):
        new = range(growth.first_new, -(-growth.seq // page_size))
        classes = tuple(model.due_class(growth, place) for place in new)
    return Grown(head, growth.prefix, growth.seq, last, classes)


def _view_of_model(model: AllocatorModel) -> View:
    pools = {"": model.pool, **model.sides}
    return View(
        {name: sorted(pool.free + pool.staged) for name, pool in pools.items()},
        {name: entries_of(mapping) for name, mapping in model.mappings.items()},
        dict(model.sizes),
        model.available,
    )


def _view_of_state(state: State, answer: Answer) -> View:
    return View(
        {"": sorted(state.free + state.staged)}
        | {name: sorted(lists.free + lists.staged) for name, lists in state.sides.items()},
        {name: entries_of(mapping) for name, mapping in state.mappings.items()},
        dict(state.sizes),
        answer.available,
    )


def entries_of(mapping: list[int]) -> dict[int, int]:
    """The entries that are not 0, by index."""
    return {index: value for index, value in enumerate(mapping) if value}
