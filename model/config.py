"""What a fresh allocator is built from.

Not here: which configs are worth drawing (`kvproof.properties.space`) and how a target turns one into an
object (`kvproof.impl.targets`).
"""

from dataclasses import dataclass

from kvproof.model.errors import UserError

ALLOCATORS = ("token", "paged")
ROW_DTYPES = ("int64", "int32")

MAX_PAGES = 1 << 20
MAX_PAGE_SIZE = 1 << 16
MAX_SLOT = 1 << 40
_INT32_SLOTS = 1 << 31


@dataclass(frozen=True, slots=True)
class Config:
    """The parameters of one allocator.

    allocator: "token" (one slot a page) or "paged".
    size: capacity in slots; `size // page_size` pages, a remainder is unusable.
    page_size: slots in a page, 1 for the token allocator.
    need_sort: releases are staged and merged, sorted, when a call may run short.
    checked: build the target in its checked (debug) mode.
    row_dtype: dtype of the slot tensors handed to frees; SGLang's row table is int32.
    page_offset: the pool is a window onto a larger one: its pages are numbered from
        `page_offset + 1`. This is how slots near 2**31 and 2**40 are reached with a short free list.
    """

    allocator: str
    size: int
    page_size: int
    need_sort: bool = False
    checked: bool = False
    row_dtype: str = "int64"
    page_offset: int = 0

    @property
    def num_pages(self) -> int:
        """Usable pages."""
        return self.size // self.page_size

    @property
    def most_pages(self) -> int:
        """How many pages the pool may grow to: its slots must fit the row dtype, and stay in 0..2**40."""
        slots = _INT32_SLOTS if self.row_dtype == "int32" else MAX_SLOT
        return min(MAX_PAGES, slots // self.page_size - self.page_offset - 1)

    def resized(self, size: int) -> "Config":
        """This config with another size, in slots."""
        return Config(
            self.allocator,
            size,
            self.page_size,
            self.need_sort,
            self.checked,
            self.row_dtype,
            self.page_offset,
        )


def validate(config: Config) -> Config:
    """The config itself, or UserError naming the first field that is out of bounds."""
    if config.allocator not in ALLOCATORS:
        raise UserError(
            f"config.allocator is {config.allocator!r}; known allocators: {', '.join(ALLOCATORS)}"
        )
    if not 1 <= config.page_size <= MAX_PAGE_SIZE:
        raise UserError(f"config.page_size is {config.page_size}; it must lie in 1..{MAX_PAGE_SIZE}")
    if config.allocator == "token" and config.page_size != 1:
        raise UserError(f"config.page_size is {config.page_size}; the token allocator has pages of 1 slot")
    if not 1 <= config.num_pages <= MAX_PAGES:
        raise UserError(
            f"config.size is {config.size}, {config.num_pages} pages; it must give 1..{MAX_PAGES} pages"
        )
    if config.row_dtype not in ROW_DTYPES:
        raise UserError(f"config.row_dtype is {config.row_dtype!r}; known: {', '.join(ROW_DTYPES)}")
    top_slot = (config.page_offset + config.num_pages + 1) * config.page_size
    if config.page_offset < 0 or top_slot > MAX_SLOT:
        raise UserError(f"config.page_offset is {config.page_offset}; slots must stay in 0..2**40")
    if config.row_dtype == "int32" and top_slot > _INT32_SLOTS:
        raise UserError("config.row_dtype is 'int32', but the pool's slots reach beyond 2**31; use 'int64'")
    if config.checked and config.page_offset:
        raise UserError(
            "config.checked and config.page_offset exclude each other: a checked pool knows its range"
        )
    return config
