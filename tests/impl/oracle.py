"""Section 4 of the contract, position by position, in plain Python: no torch, none of our code.

Not covered: merging and refusal; the batches made here are such that the pages are exactly enough.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PAGE_SIZES = (1, 2, 3, 4, 7, 16, 48, 64)


@dataclass
class Batch:
    """Rows that grow, and exactly the pages they take."""

    page_size: int
    prefix_lens: list[int]
    seq_lens: list[int]
    last_loc: list[int]
    pages: list[int]


def extend(batch: Batch) -> list[int]:
    """The slots of `alloc_extend`."""
    ps = batch.page_size
    slots: list[int] = []
    rest = list(batch.pages)
    for prefix, seq, last in zip(batch.prefix_lens, batch.seq_lens, batch.last_loc, strict=True):
        boundary = -(-prefix // ps) * ps
        count = -(-seq // ps) - -(-prefix // ps)
        mine, rest = rest[:count], rest[count:]
        for q in range(prefix, seq):
            slots.append(last + 1 + q - prefix if q < boundary else mine[(q - boundary) // ps] * ps + q % ps)
    assert not rest
    return slots


def decode(batch: Batch) -> list[int]:
    """The slots of `alloc_decode`; `prefix_lens` are `seq_lens` less one."""
    ps = batch.page_size
    slots: list[int] = []
    rest = list(batch.pages)
    for seq, last in zip(batch.seq_lens, batch.last_loc, strict=True):
        slots.append(rest.pop(0) * ps if (seq - 1) % ps == 0 else last + 1)
    assert not rest
    return slots


def random_batch(rng: random.Random, page_size: int, rows: int, *, step: int | None = None) -> Batch:
    """Rows at and around page boundaries, empty ones included; pages anywhere below slot 2**40, in any order.

    step: how much each row grows; None draws it.
    """
    ps = page_size
    lengths = (0, 1, ps - 1, ps, ps + 1, 2 * ps, 3 * ps - 1)
    prefix_lens: list[int] = []
    seq_lens: list[int] = []
    last_loc: list[int] = []
    count = 0
    for _ in range(rows):
        prefix = rng.choice(lengths)
        seq = prefix + (rng.choice((*lengths, rng.randrange(5 * ps))) if step is None else step)
        last = rng.randrange(1, (1 << 40) // ps) * ps + (prefix - 1) % ps if prefix else -1
        prefix_lens.append(prefix)
        seq_lens.append(seq)
        last_loc.append(last)
        count += -(-seq // ps) - -(-prefix // ps)
    pages = [rng.randrange(1, (1 << 40) // ps) for _ in range(count)]
    return Batch(ps, prefix_lens, seq_lens, last_loc, pages)
