"""Ops: one call each, in caller's terms.

Ops never name slots. Rows are named by ordinal *modulo the number of live rows* and amounts are clipped by
rule, so that every list of ops is valid for every config, and deleting or lowering anything in a trace
leaves a trace. How an op becomes a concrete call is the model's business (`base.py`).
"""

from dataclasses import dataclass
from typing import Final

NEW_ROW: Final = -1
"""The row of an `Extend` entry that opens a new row."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Prefill: grow each row of a batch.

    entries: (row, tokens) pairs in batch order. `NEW_ROW` opens a row; any other number is an ordinal
    modulo the live rows (a new row when there is none). A row named twice counts once, at its first place.
    Tokens are clipped to what a pool of this size could ever make a caller ask for.
    """

    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Grow each named row by one token. A row named twice counts once; empty rows are left out."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alloc:
    """`alloc` of whole pages; they become a new row."""

    pages: int


IN_ORDER: Final = 0
BACKWARDS: Final = 1
INTERLEAVED: Final = 2
TWICE: Final = 3
ONE_A_PAGE: Final = 4
ORDERS: Final = 5


@dataclass(frozen=True, slots=True)
class Free:
    """`free` in one call: of every named row, what lies beyond `keep` tokens, modulo its length and rounded
    up to a page. A row of which nothing is kept is gone. `order` is how the slots are passed:
    one of `IN_ORDER`, `BACKWARDS`, `INTERLEAVED` (every other slot first), `TWICE` (each slot twice over; in
    order where that would be a double free, at the token allocator) and `ONE_A_PAGE` (the first slot of each
    page, for a free releases whole pages; in order at a checked pool, which wants to see every slot, and
    where the contract does not say so: hisparse). Others are taken modulo these.
    """

    rows: tuple[int, ...]
    keep: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class FreeSegment:
    """`free_segment` of a row from `start` (modulo its length, rounded down to a page) to its end."""

    row: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class FreeSegments:
    """`free_segments` of the same stretch as `FreeSegment`.

    cuts: where it is cut, in pages from its start, modulo its pages; between like cuts is an empty segment.
    """

    row: int
    start: int = 0
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FreePages:
    """`free_page_ids` of the row's pages beyond `keep` pages (modulo its pages)."""

    row: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class GroupBegin:
    """`free_group_begin`; nothing when a group is open (nesting is misuse)."""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """`free_group_end`; nothing when no group is open."""


@dataclass(frozen=True, slots=True)
class Clobber:
    """The caller overwrites every tensor it passed to a free since the group began, or to the last free,
    and the last output it was given: all are the caller's own by contract."""


@dataclass(frozen=True, slots=True)
class Clear:
    """`clear`: back to the initial state; all rows are gone."""


@dataclass(frozen=True, slots=True)
class Resize:
    """`resize` to this many pages (1 to `Config.most_pages`) plus `spare` slots that fill no page; clears.

    side: pages of the second side of a pool, unchanged when 0.
    """

    pages: int
    spare: int = 0
    side: int = 0


# --- pools of two sides: sliding window (swa …), and a device under logical pages (hisparse …) ---------


@dataclass(frozen=True, slots=True)
class ExtendTail:
    """`alloc_extend_swa_tail`: one row grows by `tokens`, and only its last `tail` have a sliding-window
    peer.

    row, tokens: as an entry of `Extend`. tail: modulo tokens + 1, cut so that it begins at a page of the row.
    """

    row: int
    tokens: int
    tail: int = 0


@dataclass(frozen=True, slots=True)
class FreeSwa:
    """`free_swa` of a row's positions from `start` (modulo its length) on, `tokens` of them, all when 0.

    The pages they touch lose their peers whole; slots that have none are passed too, where that is allowed.
    """

    row: int
    start: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FreeSwaSegment:
    """`free_swa_segment` of the first run of pages that have peers in the same stretch as `FreeSwa`."""

    row: int
    start: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FreeFull:
    """`free_full` of what lies beyond `keep` tokens, as in `Free`, as far as it has no peer any more."""

    row: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class FreeFullSegment:
    """`free_full_segment` of the same stretch as `FreeFull`."""

    row: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Remap:
    """A cache recovers a row that has lost peers: each page of `row` without a peer takes over that of the
    same page of `donor` (`set_full_to_swa_mapping`), which then has none (`clear_full_to_swa_mapping`).

    start, pages: from this page (modulo the row's pages) on, so many, all when 0.
    """

    row: int
    donor: int
    start: int = 0
    pages: int = 0


@dataclass(frozen=True, slots=True)
class ExtendLogical:
    """`alloc_logical_only`: an `Extend` without device pages."""

    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FreeDevice:
    """`free_hisparse` of the pages that `start` and `tokens` touch, as in `FreeSwa`: their device side."""

    row: int
    start: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """`alloc_device_buffer` of this many pages, at least one, for a row; made of its device pages first."""

    row: int
    pages: int


@dataclass(frozen=True, slots=True)
class FreeBuffer:
    """`free_hisparse_indices` of a buffer that `DeviceBuffer` gave: an ordinal modulo those there are."""

    buffer: int = 0


# --- state slots and sharded pages ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllocGroupBegin:
    """`alloc_group_begin`: this many slots are set aside (mamba)."""

    slots: int


@dataclass(frozen=True, slots=True)
class AllocGroupEnd:
    """`alloc_group_end`: what is left of them goes back."""


@dataclass(frozen=True, slots=True)
class Chain:
    """`alloc_extend` of one new row whose rotation base the caller gives, modulo the shards
    (page-interleave).

    Rows of `Extend` go on with their own base, and new ones have theirs drawn.
    """

    base: int
    tokens: int


MISUSES: Final = (
    "double-free",
    "free-part-of-live-page",
    "free-padding-page",
    "free-out-of-range",
    "free-pages-twice",
    "unaligned-alloc",
    "negative-alloc",
    "nested-begin",
    "end-without-begin",
    "unaligned-segment",
    "segments-share-page",
    "incongruent-last-loc",
    "free-swa-of-unmapped",
    "free-full-of-mapped",
    "tail-too-long",
    "unaligned-buffer",
    "unaligned-prefix",
    "paged-call",
    "mapping-edit",
)
"""What a caller must not do, by name. `misuse.py` says what each means where."""

HARMLESS: Final = frozenset({"end-without-begin", "free-swa-of-unmapped"})
"""Misuses that must at least do no harm, whoever is asked: refused, or without effect. The contract says so,
so that they are drawn everywhere, and one that changes anything is a failure."""


@dataclass(frozen=True, slots=True)
class Misuse:
    """A call the contract forbids. The right answer is a refusal that changes nothing.

    kind: one of `MISUSES`; row: ordinal modulo live rows. Where the misuse needs something that is not there
    (a row, a released page), the op is nothing.
    """

    kind: str
    row: int = 0


Op = (
    Extend
    | Decode
    | Alloc
    | Free
    | FreeSegment
    | FreeSegments
    | FreePages
    | GroupBegin
    | GroupEnd
    | Clobber
    | Clear
    | Resize
    | Misuse
    | ExtendTail
    | FreeSwa
    | FreeSwaSegment
    | FreeFull
    | FreeFullSegment
    | Remap
    | ExtendLogical
    | FreeDevice
    | DeviceBuffer
    | FreeBuffer
    | AllocGroupBegin
    | AllocGroupEnd
    | Chain
)

OP_TYPES: Final[tuple[type[Op], ...]] = (
    Extend,
    Decode,
    Alloc,
    Free,
    FreeSegment,
    FreeSegments,
    FreePages,
    GroupBegin,
    GroupEnd,
    Clobber,
    Clear,
    Resize,
    Misuse,
    ExtendTail,
    FreeSwa,
    FreeSwaSegment,
    FreeFull,
    FreeFullSegment,
    Remap,
    ExtendLogical,
    FreeDevice,
    DeviceBuffer,
    FreeBuffer,
    AllocGroupBegin,
    AllocGroupEnd,
    Chain,
)
