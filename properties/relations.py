"""Relations: properties of two runs, not of one step (P14, P16, P17).

Each takes a trace the target has just passed and makes another that must come to the same, in the sense it
states. Both runs are in lockstep with the model all along, so a relation adds what the model cannot see: that
a target agrees with itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvproof.impl.targets.protocol import Target
from kvproof.model import ops
from kvproof.model.base import AllocatorModel, Outcome
from kvproof.model.catalogue import model_for
from kvproof.model.ops import Op
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure, Found
from kvproof.properties.run import Result, run_trace
from kvproof.properties.step import some

_MOST_DECODES: Final = 32


@dataclass(frozen=True, slots=True)
class Relation:
    """property_id, name: as in a fingerprint. vary: the other trace, or None where it would be the same.
    same_slots: of whom the answers, flattened, must be equal slot for slot. A target held to the contract may
    choose other pages for other calls, so most relations ask that of exact targets only."""

    property_id: str
    name: str
    vary: Callable[[Trace], Trace | None]
    same_slots: Literal["all", "exact", "none"]


def _again(trace: Trace) -> Trace:
    return trace


def _split_batches(trace: Trace) -> Trace | None:
    """Every granted batch extend row by row: the same pages in the same order, since §4 takes them so.

    Left alone with need_sort (a merge may come at another row), and where the whole batch is refused.
    """
    if trace.config.need_sort:
        return None
    model = model_for(trace.config)
    varied: list[Op] = []
    for op in trace.ops:
        live = len(model.rows)
        outcome = model.apply(op).outcome
        if isinstance(op, ops.Extend) and outcome is Outcome.SLOTS and len(op.entries) > 1:
            varied.extend(_one_by_one(op, live))
        else:
            varied.append(op)
    return replace(trace, ops=tuple(varied)) if len(varied) > len(trace.ops) else None


def _one_by_one(op: ops.Extend, live: int) -> list[Op]:
    single: list[Op] = []
    named: set[int] = set()
    for row, tokens in op.entries:
        ordinal = ops.NEW_ROW if row <= ops.NEW_ROW or not live else row % live
        if ordinal in named:
            continue
        if ordinal != ops.NEW_ROW:
            named.add(ordinal)
        single.append(ops.Extend(((ordinal, tokens),)))
    return single


def _other_frees(trace: Trace) -> Trace | None:
    """Every release of one row by another call: free, free_segment and free_page_ids are equivalent."""
    model = model_for(trace.config)
    if model.fifo or ops.FreeSegment not in model.knows:
        return None
    by_page = ops.FreePages in model.knows
    ps = trace.config.page_size
    varied: list[Op] = []
    for op in trace.ops:
        live = len(model.rows)
        match op:
            case ops.Free((row,), _) | ops.FreeSegment(row) if live and not _paired(model, row):
                varied.append(op)
            case ops.Free((row,), keep) if live and _frees_any(model.rows[row % live].length, keep, ps):
                length = model.rows[row % live].length
                varied.append(ops.FreeSegment(row, -(-(keep % (length + 1)) // ps) * ps))
            case ops.FreeSegment(row, start) if live:
                length = model.rows[row % live].length
                keep = start % (length + 1) // ps
                varied.append(ops.FreePages(row, keep) if by_page else ops.Free((row,), keep * ps))
            case ops.FreePages(row, keep) if live and by_page:
                target = model.rows[row % live]
                varied.append(ops.Free((row,), min(keep % (len(target.pages) + 1) * ps, target.length)))
            case _:
                varied.append(op)
        model.apply(op)
    return replace(trace, ops=tuple(varied)) if tuple(varied) != trace.ops else None


def _by_side(trace: Trace) -> Trace | None:
    """Every free of one row by free_swa and then free_full: together they are free, where there is no third
    side."""
    if trace.config.allocator != "swa":
        return None
    model = model_for(trace.config)
    ps = trace.config.page_size
    varied: list[Op] = []
    for op in trace.ops:
        live = len(model.rows)
        match op:
            case ops.Free((row,), _) if live and model.fifo and not _paired(model, row):
                varied.append(op)
            case ops.Free((row,), keep) if live and _frees_any(model.rows[row % live].length, keep, ps):
                first = -(-(keep % (model.rows[row % live].length + 1)) // ps) * ps
                varied += [ops.FreeSwa(row, first), ops.FreeFull(row, first)]
            case _:
                varied.append(op)
        model.apply(op)
    return replace(trace, ops=tuple(varied)) if len(varied) > len(trace.ops) else None


def _paired(model: AllocatorModel, row: int) -> bool:
    """Whether every page of a row has its sliding-window peer: segments, and single slots, want one."""
    return "swa" not in model.sides or all(model.peer_pages(model.rows[row % len(model.rows)], "swa"))


def _frees_any(length: int, keep: int, page_size: int) -> bool:
    """Whether a Free with this `keep` reaches any page; FreeSegment has no way to say that it does not."""
    return -(-(keep % (length + 1)) // page_size) * page_size < length


def _as_decodes(trace: Trace) -> Trace | None:
    """Every granted extend of one row with tokens, by decodes of it. Merges differ, so not with need_sort."""
    model = model_for(trace.config)
    # Elsewhere a decode takes from other pools than an extend does.
    if trace.config.need_sort or model.fifo or trace.config.allocator not in ("paged", "swa", "swa-ring"):
        return None
    varied: list[Op] = []
    for op in trace.ops:
        live = len(model.rows)
        steps: list[Op] = [op]
        match op:
            case ops.Extend(((row, tokens),)) if live and row > ops.NEW_ROW and 0 < tokens <= _MOST_DECODES:
                if model.rows[row % live].length:
                    steps = [ops.Decode((row % live,))] * tokens
        granted = model.apply(op).outcome is Outcome.SLOTS
        varied.extend(steps if granted else [op])
    return replace(trace, ops=tuple(varied)) if tuple(varied) != trace.ops else None


RELATIONS: Final = (
    Relation("P14", "repeat", _again, same_slots="all"),
    Relation("P17", "rows-one-by-one", _split_batches, same_slots="exact"),
    Relation("P17", "extend-as-decodes", _as_decodes, same_slots="exact"),
    Relation("P16", "other-frees", _other_frees, same_slots="none"),
    Relation("P16", "frees-by-side", _by_side, same_slots="none"),
)


def check_relation(target: Target, trace: Trace, result: Result, relation: Relation) -> Found | None:
    """Run the varied trace and compare. `result` is a recorded run of `trace` on the same target, without
    a failure that ended it.

    The varied trace is a lawful trace of its own: what fails in it is an ordinary failure, found with it.
    """
    varied = relation.vary(trace)
    lacks = target.capabilities.lacking(trace.config.allocator)
    if varied is None or any(type(op).__name__ in lacks for op in varied.ops):
        return None
    other = run_trace(target, varied, record=True)
    if serious := other.serious:
        return Found(serious[0], varied)
    if relation.same_slots == "none" or (relation.same_slots == "exact" and not target.capabilities.exact):
        return None
    differ = _differ(trace, result, other, relation.property_id, relation.name)
    return None if differ is None else Found(differ, trace)


def check_paths(target: Target, trace: Trace, result: Result) -> Found | None:
    """P16: the other path of the same target (torch or kernels) does the same, slot for slot."""
    sibling = target.other_path()
    if sibling is None:
        return None
    other = run_trace(sibling, trace, look_every=8, record=True)
    name = f"path-{sibling.path}"
    if serious := other.serious:
        failure = serious[0]
        message = f"only the {sibling.path} path fails: {failure.property_id} {failure.message}"
        # One that took the device is known by its divergence: whoever goes on must know.
        divergence = failure.divergence if failure.lost else "only-one-fails"
        allocator, at = trace.config.allocator, failure.step
        return Found(Failure("P16", name, allocator, divergence, at, message), trace)
    differ = _differ(trace, result, other, "P16", name)
    return None if differ is None else Found(differ, trace)


def _differ(trace: Trace, result: Result, other: Result, property_id: str, name: str) -> Failure | None:
    one, two = _flat(result), _flat(other)
    if one == two:
        return None
    message = f"slots differ ({name}): {some(one)} and then {some(two)}"
    return Failure(property_id, name, trace.config.allocator, "slots-differ", len(trace.ops) - 1, message)


def _flat(result: Result) -> list[int]:
    """All slots, and all peers of each second side."""
    slots = [slot for answer in result.answers or () for slot in answer or ()]
    return slots + [peer for name in sorted(result.peers) for peer in result.peers[name]]
