"""Spaces: which configs a lease draws from, and the boundaries they sit at.

A space follows from what a target can be asked and never from what it answers, so two targets with the same
space see the same traces.
"""

from dataclasses import dataclass
from typing import Final

from kvproof.impl.targets.protocol import Capabilities
from kvproof.model.config import COMPRESSION, MAX_PAGE_SIZE, SINGLE_SLOT, Config
from kvproof.properties.draw import Draw

_PAGE_SIZES: Final = (1, 2, 2, 4, 4, 4, 4, 4, 8, 16, 16, 32, 64, 128)
_ODD_PAGE_SIZES: Final = (3, 5, 7, 12, 24, 100)
_POOL_PAGES: Final = (
    1,
    2,
    3,
    3,
    4,
    4,
    5,
    6,
    7,
    8,
    8,
    9,
    12,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    64,
    127,
    256,
    512,
)
_WIDE_POOLS: Final = (1100, 2100)
_WIDE_PAGE_SIZES: Final = (1, 2, 4, 16, 64)
_WIDE_PAGES: Final = _WIDE_POOLS[0]
WIDE_OPS: Final = 8
"""Ops in a wide trace at most: each costs as much as a hundred others."""
_RING_PAGE_SIZES: Final = (2, 2, 4, 4, 4, 16, 64)
_COMPRESSED_PAGE_SIZES: Final = (4, 4, 8, 8, 8, 16, 16, 64, 256)
_RATIOS: Final = (1, 2, 2, 2, 3)
_SHARDS: Final = (2, 2, 3, 4, 4, 8)
_RINGS: Final = (1, 3, 4, 7, 128)
_MOST_MAPPED: Final = 8192
"""Slots in a pool with a side mapping: all of it is read at every look."""
_TOKEN_POOLS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 256)


@dataclass(frozen=True, slots=True)
class Space:
    """What may be drawn.

    allocator: the kind. page_sizes: the least and the greatest. any_page_size, page_offset, checked, lacks:
    as in Capabilities. misuse: draw calls that the contract forbids, on checked allocators. max_batch: rows
    in one batch at most, max_wide_batch: in a wide trace. max_row_tokens: what a row grows by at most, wide
    traces apart, for lanes that pay for each token.
    """

    allocator: str
    any_page_size: bool = True
    page_offset: bool = True
    checked: bool = False
    lacks: frozenset[str] = frozenset()
    misuse: bool = False
    max_batch: int = 33
    max_row_tokens: int = 1 << 30
    max_wide_batch: int = 1025
    page_sizes: tuple[int, int] = (1, MAX_PAGE_SIZE)


def space_for(
    capabilities: Capabilities, allocator: str, *, misuse: bool = False, slow: bool = False
) -> Space:
    """The widest space a target can be asked for. slow: each row of a batch costs milliseconds."""
    return Space(
        allocator,
        any_page_size=capabilities.any_page_size,
        page_offset=capabilities.page_offset,
        checked=capabilities.checked,
        lacks=capabilities.lacking(allocator),
        misuse=misuse,
        max_batch=9 if slow else 33,
        max_row_tokens=600 if slow else 1 << 30,
        max_wide_batch=300 if slow else 1025,
        page_sizes=capabilities.page_sizes.get(allocator, (1, MAX_PAGE_SIZE)),
    )


def draw_config(draw: Draw, space: Space, *, wide: bool = False) -> Config:
    """One config, biased to boundaries: tiny pools, sides that just do not match, a size that no page
    divides, slots around 2**31.

    wide: for a wide trace, with room for batches of a thousand rows (see `is_wide`).
    """
    kind = space.allocator
    page_size = _page_size(draw, space, wide=wide)
    if wide:
        pages = draw.choice(_WIDE_POOLS)
    else:
        pages = draw.choice(_TOKEN_POOLS if kind in SINGLE_SLOT else _POOL_PAGES)
        if kind not in ("token", "paged"):
            pages = min(pages, max(_MOST_MAPPED // page_size, 1))
    spare = draw.integer(0, page_size - 1) if draw.integer(0, 3) == 3 else 0
    need_sort = draw.boolean() and kind != "mamba"
    checked = space.misuse or (space.checked and draw.integer(0, 7) == 7)
    window = space.page_offset and kind in ("token", "paged") and not checked
    offset = _page_offset(draw, page_size, pages) if window else 0
    narrow = not offset and draw.integer(0, 3) == 3
    return Config(
        kind,
        pages * page_size + spare,
        page_size,
        need_sort,
        checked and space.checked,
        "int32" if narrow else "int64",
        offset,
        **_sides(draw, kind, pages, page_size, wide=wide),
    )


def _page_size(draw: Draw, space: Space, *, wide: bool) -> int:
    kind = space.allocator
    if kind in SINGLE_SLOT:
        return 1
    if kind == "hisparse-v4":
        sizes: tuple[int, ...] = _COMPRESSED_PAGE_SIZES[:7] if wide else _COMPRESSED_PAGE_SIZES
    elif kind == "swa-ring":
        sizes = _RING_PAGE_SIZES
    elif wide:
        # Single slots are taken by plain alloc, which knows no rows.
        sizes = _WIDE_PAGE_SIZES[1:] if kind == "swa" else _WIDE_PAGE_SIZES
    else:
        odd = space.any_page_size and draw.integer(0, 3) == 3
        sizes = _ODD_PAGE_SIZES if odd else _PAGE_SIZES
    low, high = space.page_sizes
    return draw.choice([size for size in sizes if low <= size <= high] or [low])


def _sides(draw: Draw, kind: str, pages: int, page_size: int, *, wide: bool) -> dict[str, int]:
    """What the kind needs beside its main pool."""
    match kind:
        case "swa":
            return {"swa_size": _side_pages(draw, pages, wide=wide) * page_size}
        case "hisparse-v4":
            device = _side_pages(draw, pages, wide=wide) * (page_size // COMPRESSION)
            return {"swa_size": _side_pages(draw, pages, wide=wide) * page_size, "device_size": device}
        case "hisparse":
            return {"ratio": draw.choice(_RATIOS)}
        case "page-interleave":
            return {"shards": draw.choice(_SHARDS)}
        case "swa-ring":
            return {"ring": draw.choice(_RINGS), "request_rows": draw.integer(0, 5)}
    return {}


def _side_pages(draw: Draw, pages: int, *, wide: bool) -> int:
    """Pages of a second side: about as many as the first has, so that either is the tight one; or far off,
    but not for a wide trace, which needs room on all sides."""
    kind = draw.integer(0, 7)
    if kind < 5 or wide:
        return max(1, pages + draw.integer(-2, 2))
    return max(1, (pages // 2, pages // 4, 2 * pages)[kind - 5])


def is_wide(config: Config) -> bool:
    """Whether this pool is for batches of hundreds of rows, which kernels serve in more than one block."""
    return config.num_pages >= _WIDE_PAGES


def _page_offset(draw: Draw, page_size: int, pages: int) -> int:
    """Mostly none; else a window whose slots pass 2**31 or 2**32, or end just below 2**40."""
    where = draw.integer(0, 15)
    if where == 13:
        return (1 << 31) // page_size - pages // 2
    if where == 14:
        return (1 << 32) // page_size - pages // 2
    if where == 15:
        return (1 << 40) // page_size - pages - 2
    return 0
