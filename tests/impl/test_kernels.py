"""Our kernels: under Triton's interpreter (in its own process), compiled for a GPU without one, and on one.

Not covered: that every load and store stays in its tensor, element by element; the audited lane checks that.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvproof.impl.kernels import (
    alloc_decode_kernel,
    alloc_decode_triton,
    alloc_extend_kernel,
    alloc_extend_triton,
    kernels_run_on,
)
from tests.impl import oracle
from tests.impl.pools import decode, extend, free_list, ids, paged_pool

REPOSITORY = Path(__file__).parents[2]


def test_under_the_interpreter():
    process = subprocess.run(
        [sys.executable, "-m", "tests.impl.interpreted"],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    assert {name: count for name, (count, _) in found.items()} == {
        "compare_extend": 24,
        "compare_extend_of_many_rows": 1,
        "compare_extend_of_long_rows": 6,
        "compare_decode": 48,
        "leave_what_is_around_the_output_alone": 6,
        "agree_with_the_reference_in_a_pool": 4,
    }


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvproof.impl.kernels import alloc_decode_kernel, alloc_extend_kernel

sizes = {"page_size": 3, "BLOCK_ROWS": 256, "BLOCK_TOKENS": 1024}
for kernel in (alloc_decode_kernel, alloc_extend_kernel):
    signature = {
        name: "constexpr" if name in sizes else "*i64" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    }
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print(len(compiled.asm["ptx"]))
"""


def test_they_compile_for_a_gpu_without_one(tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    process = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    assert all(int(size) > 0 for size in process.stdout.split())
    assert len(process.stdout.split()) == 2


def test_without_interpreter_they_run_on_cuda_only():
    assert kernels_run_on(torch.device("cuda:0"))
    if os.environ.get("TRITON_INTERPRET") != "1":
        assert not kernels_run_on(torch.device("cpu"))


def test_nothing_is_launched_for_nothing():
    none = ids()  # on a CPU without interpreter a launch would raise
    assert alloc_extend_triton(ids(3), ids(3), ids(6), none, 0, 4).tolist() == []
    assert alloc_decode_triton(none, none, none, 4).tolist() == []


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", oracle.PAGE_SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 63, 64, 65, 255, 257, 1025])
def test_compiled_kernels_match_the_oracle(rows, page_size):
    rng = random.Random(f"{rows} {page_size}")
    for dtype in (torch.int32, torch.int64):
        batch = oracle.random_batch(rng, page_size, rows)
        expected = oracle.extend(batch)
        lens = [torch.tensor(lens, dtype=dtype).cuda() for lens in (batch.prefix_lens, batch.seq_lens)]
        last, pages = ids(*batch.last_loc).cuda(), ids(*batch.pages).cuda()
        assert alloc_extend_triton(*lens, last, pages, len(expected), page_size).tolist() == expected

        batch = oracle.random_batch(rng, page_size, rows, step=1)
        seq, last, pages = (ids(*values).cuda() for values in (batch.seq_lens, batch.last_loc, batch.pages))
        assert alloc_decode_triton(seq.to(dtype), last, pages, page_size).tolist() == oracle.decode(batch)


@pytest.mark.gpu
def test_4097_rows_on_a_gpu():
    batch = oracle.random_batch(random.Random(0), 16, 4097)
    expected = oracle.extend(batch)
    lens = [ids(*lens).cuda() for lens in (batch.prefix_lens, batch.seq_lens, batch.last_loc, batch.pages)]
    assert alloc_extend_triton(*lens, len(expected), 16).tolist() == expected


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_allocation_and_segment_frees_do_not_synchronise(need_sort, kernels):
    pool = paged_pool(32, 4, need_sort=need_sort, device="cuda")
    pool.use_triton_kernels = kernels
    decode(pool, (2, 9))  # the first launch may load modules
    extend(pool, (0, 1, -1))
    pool.clear()
    prefix, seq, last = (torch.tensor(values) for values in ([0, 0], [6, 9], [-1, -1]))
    on_gpu = [tensor.cuda() for tensor in (prefix, seq, last)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = pool.alloc_extend(on_gpu[0], prefix, on_gpu[1], seq, on_gpu[2], 15)
        ends = torch.stack((slots[5], slots[14]))
        more = pool.alloc_decode(on_gpu[1] + 1, seq + 1, ends)
        whole = pool.alloc(8)
        pool.free_group_begin()
        pool.free_segment(whole, start_pos=0)
        pool.free_group_end()
        pool.free_segments([(slots[6:10], 0), (slots[10:], 4)])
        pool.free_page_ids(slots[:6:4] // 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # pages 1, 2 to the first row and 3, 4, 5 to the second: 6 + 1 and 9 + 1 tokens
    assert slots.tolist() == [*range(4, 10), *range(12, 21)]
    assert more.tolist() == [10, 21]
    assert pool.available_size() == 32 * 4
    assert sorted(pool.get_all_free_pages().tolist()) == list(range(1, 33))


@pytest.mark.gpu
def test_no_length_alignment_or_batch_size_compiles_anew():
    pool = paged_pool(4096, 4, device="cuda")

    def compiled() -> int:
        # device_caches maps a device to a tuple that starts with its table of compiled variants
        return sum(
            len(entry[0])
            for kernel in (alloc_extend_kernel, alloc_decode_kernel)
            for entry in kernel.device_caches.values()
        )

    extend(pool, (0, 16, -1))
    decode(pool, (2, 4))
    before = compiled()
    for rows, length in ((1, 1), (2, 16), (3, 17), (16, 1), (17, 33), (1, 1025)):
        extend(pool, *[(0, length, -1)] * rows)
        decode(pool, *[(length * 4 + 1, 7)] * rows)
        whole = torch.arange(64, device="cuda")
        pool.alloc_decode(whole[1:4] * 4, (whole[1:4] * 4).cpu(), whole[3:6])
    assert compiled() == before
    assert len(free_list(pool)) > 0
