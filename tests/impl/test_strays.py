"""Strays are counted, each told of once."""

from __future__ import annotations

import pytest
import torch

from kvproof.impl.strays import Strays
from tests.impl.pools import ids
from tests.impl.swa_pools import extend, lists, swa_pool


def test_none_are_found_where_none_are():
    strays = Strays(torch.device("cpu"))
    assert not strays.found(wait=True)
    strays.note(ids(1, 2))
    strays.note(ids())
    assert not strays.found(wait=True)


def test_each_is_told_of_once():
    strays = Strays(torch.device("cpu"))
    strays.note(ids(1, 0))
    strays.note(ids(3))
    assert strays.found(wait=False)
    assert not strays.found(wait=True)
    strays.note(ids(0))
    assert strays.found(wait=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_the_allocator_hears_of_them_in_time(kernels):
    """The release does not wait, even with the device busy; the count that is asked for next is right."""
    pool = swa_pool(8, 6, 4, device="cuda", kernels=kernels)
    for busy in (False, True):
        extend(pool, (0, 8, -1), (0, 8, -1))
        slots = torch.arange(4, 12, device="cuda")
        pool.free_swa(slots)
        expected = lists(pool)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            if busy:
                torch.cuda._sleep(200_000_000)
            pool.free_swa_segment(slots, start_pos=0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pool.available_size() == 16
        assert lists(pool) == expected
        pool.clear()
