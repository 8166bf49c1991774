"""What a fresh allocator is built from.

Not here: which configs are worth drawing (`kvproof.properties.space`) and how a target turns one into an
object (`kvproof.impl.targets`).
"""

from dataclasses import dataclass, replace
from typing import Final

from kvproof.model.errors import UserError

ALLOCATORS = (
    "token",
    "paged",
    "swa",
    "swa-ring",
    "pure-swa",
    "hisparse",
    "hisparse-v4",
    "mamba",
    "page-interleave",
)
SINGLE_SLOT = ("token", "pure-swa", "mamba")
"""Kinds whose pages are always single slots."""

COMPRESSION = 4
"""Tokens for which the DeepSeek-V4 variant of HiSparse keeps one device slot."""

ROW_DTYPES = ("int64", "int32")

MAX_PAGES = 1 << 20
MAX_PAGE_SIZE = 1 << 16
MAX_SLOT = 1 << 40
_INT32_SLOTS = 1 << 31


@dataclass(frozen=True, slots=True)
class Config:
    """The parameters of one allocator.

    allocator: one of `ALLOCATORS`.
    size: capacity in slots; `size // page_size` pages, a remainder is unusable. Of the full side where there
        are two (swa, swa-ring, hisparse-v4), of the device side (hisparse), of one shard (page-interleave).
    page_size: slots in a page, 1 for the kinds of `SINGLE_SLOT`.
    need_sort: releases are staged and merged, sorted, when a call may run short.
    checked: build the target in its checked (debug) mode.
    row_dtype: dtype of the slot tensors handed to frees; SGLang's row table is int32.
    page_offset: the pool is a window onto a larger one: its pages are numbered from
        `page_offset + 1`. This is how slots near 2**31 and 2**40 are reached with a short free list. Of the
        token and the paged allocator only.
    swa_size: capacity of the sliding-window side, in slots (swa, hisparse-v4).
    device_size: capacity of the device side, in compressed slots (hisparse-v4).
    ratio: logical slots for each device slot (hisparse).
    shards: ranks over which pages are dealt (page-interleave).
    ring, request_rows: tokens in a request's ring, and free request rows (swa-ring).
    """

    allocator: str
    size: int
    page_size: int
    need_sort: bool = False
    checked: bool = False
    row_dtype: str = "int64"
    page_offset: int = 0
    swa_size: int = 0
    device_size: int = 0
    ratio: int = 0
    shards: int = 0
    ring: int = 0
    request_rows: int = 0

    @property
    def num_pages(self) -> int:
        """Usable pages of the main pool: the only one, the full or logical side, or one shard's."""
        return self.size * max(self.ratio, 1) // self.page_size

    @property
    def slots(self) -> int:
        """Capacity of the main pool in slots, of all shards where there are several."""
        return self.size * max(self.ratio, 1) * max(self.shards, 1)

    @property
    def device_page_size(self) -> int:
        """Device slots in a page of the device side."""
        return self.page_size // COMPRESSION if self.allocator == "hisparse-v4" else self.page_size

    @property
    def most_pages(self) -> int:
        """How many pages the pool may grow to: its slots must fit the row dtype, and stay in 0..2**40."""
        slots = _INT32_SLOTS if self.row_dtype == "int32" else MAX_SLOT
        return min(MAX_PAGES, slots // self.page_size - self.page_offset - 1)

    def resized(self, size: int) -> "Config":
        """This config with another size, in slots."""
        return replace(self, size=size)


def validate(config: Config) -> Config:
    """The config itself, or UserError naming the first field that is out of bounds."""
    if config.allocator not in ALLOCATORS:
        raise UserError(
            f"config.allocator is {config.allocator!r}; known allocators: {', '.join(ALLOCATORS)}"
        )
    if not 1 <= config.page_size <= MAX_PAGE_SIZE:
        raise UserError(f"config.page_size is {config.page_size}; it must lie in 1..{MAX_PAGE_SIZE}")
    if config.allocator in SINGLE_SLOT and config.page_size != 1:
        raise UserError(
            f"config.page_size is {config.page_size}; the {config.allocator} allocator has pages of 1 slot"
        )
    _check_sides(config)
    if not 1 <= config.num_pages <= MAX_PAGES:
        raise UserError(
            f"config.size is {config.size}, {config.num_pages} pages; it must give 1..{MAX_PAGES} pages"
        )
    if config.row_dtype not in ROW_DTYPES:
        raise UserError(f"config.row_dtype is {config.row_dtype!r}; known: {', '.join(ROW_DTYPES)}")
    top_slot = (config.page_offset + config.num_pages + 1) * config.page_size
    if config.page_offset and config.allocator not in ("token", "paged"):
        raise UserError(
            f"config.page_offset is {config.page_offset}; only token and paged pools can be windows"
        )
    if config.page_offset < 0 or top_slot > MAX_SLOT:
        raise UserError(f"config.page_offset is {config.page_offset}; slots must stay in 0..2**40")
    if config.row_dtype == "int32" and top_slot > _INT32_SLOTS:
        raise UserError("config.row_dtype is 'int32', but the pool's slots reach beyond 2**31; use 'int64'")
    if config.checked and config.page_offset:
        raise UserError(
            "config.checked and config.page_offset exclude each other: a checked pool knows its range"
        )
    return config


_EXTRA: Final = {
    "swa": ("swa_size",),
    "swa-ring": ("ring", "request_rows"),
    "hisparse": ("ratio",),
    "hisparse-v4": ("swa_size", "device_size"),
    "page-interleave": ("shards",),
}
_BOUNDS: Final = {
    "swa_size": (0, 1 << 36),
    "device_size": (0, 1 << 36),
    "ratio": (1, 64),
    "shards": (2, 64),
    "ring": (1, 1 << 20),
    "request_rows": (0, 1 << 20),
}


def _check_sides(config: Config) -> None:
    """Each field that a kind needs within bounds, and none that it has no use for."""
    needs = _EXTRA.get(config.allocator, ())
    for name, (low, high) in _BOUNDS.items():
        value = getattr(config, name)
        if name not in needs and value:
            raise UserError(f"config.{name} is {value}; the {config.allocator} allocator has no such thing")
        if name in needs and not low <= value <= high:
            raise UserError(f"config.{name} is {value}; it must lie in {low}..{high}")
    sides = (("swa_size", config.page_size), ("device_size", config.device_page_size))
    if config.allocator == "mamba" and config.need_sort:
        raise UserError("config.need_sort is set; state slots are never staged")
    if config.allocator == "swa-ring" and config.page_size == 1:
        raise UserError("config.page_size is 1; a ring's full side has pages of 2 slots or more")
    if config.allocator == "hisparse-v4" and config.page_size % COMPRESSION:
        raise UserError(
            f"config.page_size is {config.page_size}; hisparse-v4 takes multiples of {COMPRESSION}"
        )
    for name, page_size in sides:
        if name in needs and not 1 <= getattr(config, name) // page_size <= MAX_PAGES:
            raise UserError(
                f"config.{name} is {getattr(config, name)}; it must give 1..{MAX_PAGES} pages of {page_size}"
            )
