"""Misuse: the calls that the contract forbids, made concrete for one model.

Each is the smallest call of its kind that is possible in the state at hand; None where the state has
nothing to misuse. The right answer is always a refusal that changes nothing.
"""

from collections.abc import Callable
from typing import Final

from kvproof.model import calls
from kvproof.model.base import AllocatorModel, Row

_Maker = Callable[[AllocatorModel, int], calls.Call | None]


def misuse_call(model: AllocatorModel, kind: str, row: int) -> calls.Call | None:
    """The forbidden call, or None when this state offers no way to make it. Does not change the model."""
    return _MAKERS[kind](model, row)


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
    beyond = model.config.page_offset + model.config.num_pages + 1
    return calls.FreeCall([beyond * model.page_size])


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
    return None if model.in_group else calls.GroupEndCall()


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
    if owner is None or not owner.length or model.page_size == 1 or model.config.allocator == "token":
        return None
    new_pages = int(owner.length % model.page_size == 0)
    return calls.ExtendCall([owner.length], [owner.length + 1], [model.last_loc(owner) - 1], 1, new_pages)


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
}
