"""Misuse: the calls that the contract forbids, made concrete for one model.

Each is the smallest call of its kind that is possible in the state at hand; None where the state has
nothing to misuse. The right answer is always a refusal that changes nothing.
"""

from collections.abc import Callable
from typing import Final

from kvproof.model import calls, ops
from kvproof.model.base import AllocatorModel, Row

_Maker = Callable[[AllocatorModel, int], calls.Call | None]


def misuse_call(model: AllocatorModel, kind: str, row: int) -> calls.Call | None:
    """The forbidden call, or None when this state offers no way to make it. Does not change the model."""
    needed = _NEEDS.get(kind)
    return None if needed is not None and needed not in model.knows else _MAKERS[kind](model, row)


def _row(model: AllocatorModel, ordinal: int) -> Row | None:
    return model.rows[ordinal % len(model.rows)] if model.rows else None


def _double_free(model: AllocatorModel, row: int) -> calls.Call | None:
    pages = model.free_pages or model.staged
    if not pages:
        return None
    first = pages[row % len(pages)] * model.page_size
    return calls.FreeCall(list(range(first, first + model.page_size)))


def _part_of_live_page(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    if owner is None or owner.length < 2 or model.page_size == 1:
        return None
    return calls.FreeCall(model.slots_of(owner, 0, 1))


def _padding_page(_model: AllocatorModel, _row: int) -> calls.Call | None:
    return calls.FreeCall([0])


def _out_of_range(model: AllocatorModel, _row: int) -> calls.Call | None:
    beyond = max(pages[-1] for pages in (model.pool.pages, *_classes(model))) + 1
    return calls.FreeCall([beyond * model.page_size])


def _classes(model: AllocatorModel) -> list[range]:
    return [pool.pages for pool in model.sides.values()] if ops.Chain in model.knows else []


def _pages_twice(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    return calls.FreePageIdsCall(owner.pages[-1:] * 2) if owner is not None and owner.pages else None


def _unaligned_alloc(model: AllocatorModel, _row: int) -> calls.Call | None:
    if model.page_size == 1 or not model.free_pages:
        return None
    return calls.AllocCall(model.page_size + 1)


def _negative_alloc(model: AllocatorModel, _row: int) -> calls.Call | None:
    return calls.AllocCall(-model.page_size)


def _nested_begin(model: AllocatorModel, _row: int) -> calls.Call | None:
    return calls.GroupBeginCall() if model.in_group else None


def _end_without_begin(model: AllocatorModel, _row: int) -> calls.Call | None:
    return calls.GroupEndCall() if model.defers and not model.in_group else None


def _unaligned_segment(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    if owner is None or owner.length < 2 or model.page_size == 1:
        return None
    return calls.FreeSegmentCall(model.slots_of(owner, 1, owner.length), 1)


def _segments_share_page(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    if owner is None or not owner.length:
        return None
    first_page = model.slots_of(owner, 0, min(owner.length, model.page_size))
    return calls.FreeSegmentsCall([(first_page, 0), (first_page, 0)])


def _incongruent_last_loc(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    if owner is None or not owner.length or model.page_size == 1:
        return None
    new_pages = int(owner.length % model.page_size == 0)
    return calls.ExtendCall([owner.length], [owner.length + 1], [model.last_loc(owner) - 1], 1, new_pages)


def _swa_of_unmapped(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    if owner is None or "swa" not in model.sides or any(model.peer_pages(owner, "swa")):
        return None
    slots = model.slots_of(owner, 0, owner.length)
    return calls.FreeSegmentCall(slots, 0, "free_swa_segment") if slots else None


def _full_of_mapped(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    if owner is None or "swa" not in model.sides or not any(model.peer_pages(owner, "swa")[-1:]):
        return None
    last = len(owner.pages) - 1
    return calls.FreeCall(model.slots_of(owner, last * model.page_size, owner.length), "free_full")


def _tail_too_long(model: AllocatorModel, row: int) -> calls.Call | None:
    return calls.ExtendCall([0], [1], [-1], 1, 1, tail=2)


def _unaligned_buffer(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    ps = model.config.device_page_size
    if owner is None or not owner.length or ps == 1:
        return None
    return calls.BufferCall(model.mapped_slots(owner), ps + 1)


def _unaligned_prefix(model: AllocatorModel, row: int) -> calls.Call | None:
    owner = _row(model, row)
    if owner is None or owner.length % model.page_size == 0:
        return None
    length = owner.length
    last = model.last_loc(owner)
    return calls.ExtendCall([length], [length + 1], [last], 1, 0, bases=[getattr(owner, "base", None)])


def _paged_call(model: AllocatorModel, row: int) -> calls.Call | None:
    return calls.ExtendCall([0], [1], [-1], 1, 1) if model.config.allocator in _NO_EXTEND else None


def _mapping_edit(model: AllocatorModel, row: int) -> calls.Call | None:
    return calls.RemapCall([1], [1], [1]) if model.config.allocator == "pure-swa" else None


_NO_EXTEND: Final = ("token", "pure-swa")

_NEEDS: Final[dict[str, type[ops.Op]]] = {
    "free-pages-twice": ops.FreePages,
    "unaligned-alloc": ops.Alloc,
    "negative-alloc": ops.Alloc,
    "unaligned-segment": ops.FreeSegment,
    "segments-share-page": ops.FreeSegments,
    "nested-begin": ops.GroupBegin,
    "end-without-begin": ops.GroupBegin,
    "incongruent-last-loc": ops.Decode,
    "tail-too-long": ops.ExtendTail,
    "unaligned-buffer": ops.DeviceBuffer,
    "unaligned-prefix": ops.Chain,
}
"""The op that a kind of allocator must know for this misuse to mean anything there."""

_MAKERS: Final[dict[str, _Maker]] = {
    "double-free": _double_free,
    "free-part-of-live-page": _part_of_live_page,
    "free-padding-page": _padding_page,
    "free-out-of-range": _out_of_range,
    "free-pages-twice": _pages_twice,
    "unaligned-alloc": _unaligned_alloc,
    "negative-alloc": _negative_alloc,
    "nested-begin": _nested_begin,
    "end-without-begin": _end_without_begin,
    "unaligned-segment": _unaligned_segment,
    "segments-share-page": _segments_share_page,
    "incongruent-last-loc": _incongruent_last_loc,
    "free-swa-of-unmapped": _swa_of_unmapped,
    "free-full-of-mapped": _full_of_mapped,
    "tail-too-long": _tail_too_long,
    "unaligned-buffer": _unaligned_buffer,
    "unaligned-prefix": _unaligned_prefix,
    "paged-call": _paged_call,
    "mapping-edit": _mapping_edit,
}
