"""The token allocator, as its contract has it: pages of one slot, first in, first out.

What that changes in the paged allocator stands there, under `fifo`, since pools of two sides are of either
kind.
"""

from kvproof.model.paged import PagedModel


class TokenModel(PagedModel):
    """One token pool and the rows in it. A page is a slot."""

    fifo = True
