"""The kernel of the page-interleave allocator on a GPU, and the launches it spares.

Under the interpreter, and compiled without a GPU, it is tested beside those of HiSparse
(test_hisparse_kernels.py).
"""

from __future__ import annotations

import pytest
import torch

from kvproof.impl.interleave_kernels import interleave_extend_kernel, interleave_extend_triton
from tests.impl.interleave_pools import chain, classes, deal, interleave_pool
from tests.impl.pools import ids


def test_nothing_is_launched_for_nothing():
    # on a CPU without interpreter a launch would raise
    plan = torch.zeros((1, 3), dtype=torch.int64)
    assert interleave_extend_triton(ids(4), ids(4), plan, ids(), 0, 4).tolist() == []


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize(("page_size", "shards"), [(1, 2), (3, 3), (16, 8)])
def test_on_a_gpu_it_is_as_the_oracle_has_it(page_size, shards, kernels):
    pool = interleave_pool(4000, page_size, shards, device="cuda", kernels=kernels)
    rows = [(0, row % (3 * page_size + 2)) for row in range(600)] + [(5 * page_size, 5 * page_size + 4097)]
    bases = [row % shards for row in range(601)]
    expected, left = deal(rows, bases, classes(pool), page_size)
    assert chain(pool, *[(*row, row[0] - 1) for row in rows], bases=bases) == expected
    assert classes(pool) == left


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_extending_does_not_synchronise(kernels):
    pool = interleave_pool(8, 4, 3, need_sort=True, device="cuda", kernels=kernels)
    pool.free(ids(*chain(pool, (0, 9, -1), bases=[None])).cuda())  # loads modules
    host = ids(0, 0), ids(9, 4)
    on_gpu = [tensor.cuda() for tensor in (*host, ids(-1, -1))]
    bases: list[int | None] = [None, 2]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = pool.alloc_extend(on_gpu[0], host[0], on_gpu[1], host[1], on_gpu[2], 13, rotation_bases=bases)
        more = pool.alloc_cyclic(1, 68)  # 17 pages, 6 of class 2, which has 5 without its staged one
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bases == [0, 2]
    # pages 3, 4, 5 are staged: 6, 7, 8 to the first row, 11 to the second
    assert slots.tolist() == [*range(24, 33), *range(44, 48)]
    pages = [4, 5, 3, 10, 14, 9, 13, 17, 12, 16, 20, 15, 19, 23, 18, 22, 26]
    assert [slot // 4 for slot in more.tolist()[::4]] == pages


@pytest.mark.gpu
def test_no_length_alignment_or_batch_size_compiles_anew():
    pool = interleave_pool(4096, 4, 2, device="cuda")

    def compiled() -> int:
        # device_caches maps a device to a tuple that starts with its table of compiled variants
        return sum(len(entry[0]) for entry in interleave_extend_kernel.device_caches.values())

    chain(pool, (0, 16, -1), bases=[0])
    before = compiled()
    for rows, length in ((1, 1), (2, 16), (3, 17), (16, 1), (17, 33), (1, 1025)):
        chain(pool, *[(0, length, -1)] * rows, bases=[None] * rows)
    assert before == compiled() > 0
