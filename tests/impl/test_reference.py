"""The torch reference against the oracle, with a free list exactly as long as needed, or empty."""

from __future__ import annotations

import random

import pytest
import torch

from kvproof.impl.reference import alloc_decode_reference, alloc_extend_reference
from tests.impl import oracle
from tests.impl.pools import ids


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("page_size", oracle.PAGE_SIZES)
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33])
def test_random_batches(rows, page_size, dtype):
    rng = random.Random(f"{rows} {page_size}")
    batch = oracle.random_batch(rng, page_size, rows)
    expected = oracle.extend(batch)
    prefix, seq = (torch.tensor(lens, dtype=dtype) for lens in (batch.prefix_lens, batch.seq_lens))
    pages = ids(*batch.pages)
    slots = alloc_extend_reference(prefix, seq, ids(*batch.last_loc), pages, len(expected), page_size)
    assert (slots.tolist(), slots.dtype) == (expected, torch.int64)

    batch = oracle.random_batch(rng, page_size, rows, step=1)
    seq = torch.tensor(batch.seq_lens, dtype=dtype)
    slots = alloc_decode_reference(seq, ids(*batch.last_loc), ids(*batch.pages), page_size)
    assert (slots.tolist(), slots.dtype) == (oracle.decode(batch), torch.int64)


def test_rows_that_need_no_page_read_none():
    """An empty free list: any gather from it would raise."""
    none = ids()
    assert alloc_extend_reference(ids(1, 4), ids(3, 4), ids(4, 11), none, 2, 4).tolist() == [5, 6]
    assert alloc_decode_reference(ids(3, 4), ids(5, 10), none, 4).tolist() == [6, 11]


def test_empty_batches():
    none = ids()
    assert alloc_extend_reference(none, none, none, none, 0, 4).tolist() == []
    assert alloc_decode_reference(none, none, none, 4).tolist() == []


def test_last_loc_of_int32_is_widened_before_arithmetic():
    last = torch.tensor([2**31 - 2], dtype=torch.int32)  # + 1 + 1 passes the end of int32
    seq = torch.tensor([5], dtype=torch.int32)
    assert alloc_extend_reference(ids(3), seq + 1, last, ids(7), 3, 5).tolist() == [2**31 - 1, 2**31, 35]
