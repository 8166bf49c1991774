"""The kernels of the HiSparse and the page-interleave allocators in Triton's auditing interpreter (in its own
process), compiled for a GPU without one, and those of HiSparse on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvproof.impl.hisparse_kernels import compressed_extend_kernel, compressed_extend_triton
from tests.impl.hisparse_pools import decode, extend, hisparse_pool, lists, v4_pool
from tests.impl.pools import ids

REPOSITORY = Path(__file__).parents[2]


def test_under_the_auditing_interpreter():
    process = subprocess.run(
        [sys.executable, "-m", "tests.impl.hisparse_interpreted"],
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
        "compare_compressed_extend": 32,
        "map_nothing_behind_an_unmapped_block": 2,
        "compare_interleave_extend": 72,
        "stay_inside_for_what_breaks_the_contract": 120,
        "launch_what_they_say": 1,
    }


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvproof.impl.hisparse_kernels import compressed_extend_kernel
from kvproof.impl.interleave_kernels import interleave_extend_kernel

sizes = {"ratio": 4, "page_size": 3, "shards": 5, "BLOCK_ROWS": 256, "BLOCK_TOKENS": 1024}
for kernel in (compressed_extend_kernel, interleave_extend_kernel):
    for ints in ("*i64", "*i32"):
        signature = {
            name: "constexpr" if name in sizes
            else ints if name in ("prefix_lens_ptr", "seq_lens_ptr", "last_loc_ptr")
            else "*i64" if name.endswith("_ptr") else "i32"
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
    assert [int(size) > 0 for size in process.stdout.split()] == [True] * 4


def test_nothing_is_launched_for_nothing():
    none, mapping = ids(), ids(0, 0, -1)  # on a CPU without interpreter a launch would raise
    compressed_extend_triton(ids(0), ids(3), ids(-1), ids(4, 5, 6), none, mapping, 0, 4, 1)
    assert mapping.tolist() == [0, 0, -1]


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_both_paths_agree_on_a_gpu(page_size):
    answers = []
    for kernels in (True, False):
        pool = hisparse_pool(4000, page_size, 2, device="cuda", kernels=kernels)
        slots = extend(pool, *[(0, 1 + row % 9, -1) for row in range(300)])
        ends, at = [], -1
        for row in range(300):
            at += 1 + row % 9
            ends.append((1 + row % 9, 2 + row % 13, slots[at]) if row % 9 <= row % 13 else (0, 0, -1))
        more = extend(pool, *ends)
        pool.free_hisparse(torch.tensor(slots[::5], device="cuda"))
        given = pool.alloc_device_buffer(torch.tensor(slots[5:6], device="cuda"), 2 * page_size)
        mapping = pool.full_to_hisparse_device_index_mapping.tolist()
        answers.append((slots, more, lists(pool), mapping, given.tolist()))
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [4, 12, 64])
def test_both_paths_of_v4_agree_on_a_gpu(page_size):
    answers = []
    for kernels in (True, False):
        pool = v4_pool(5000, 5000, 5000, page_size, device="cuda", kernels=kernels)
        slots = extend(pool, *[(0, row % 40, -1) for row in range(300)], (0, 4097, -1))
        more = extend(pool, (4097, 9000, slots[-1]))
        pool.free(torch.tensor(more[-page_size:], device="cuda"))
        mapping = pool.full_to_hisparse_device_index_mapping.tolist()
        answers.append((slots, more, lists(pool), mapping))
    assert answers[0] == answers[1]
    assert any(answers[0][3][:-1])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("compressed", [False, True])
def test_allocation_does_not_synchronise(need_sort, kernels, compressed):
    options = {"need_sort": need_sort, "device": "cuda", "kernels": kernels}
    pool = v4_pool(9, 9, 9, 4, **options) if compressed else hisparse_pool(9, 4, **options)
    extend(pool, (0, 5, -1))  # the first launch may load modules
    decode(pool, (6, 8))
    pool.clear()
    prefix, seq, last = (torch.tensor(values) for values in ([0, 0], [6, 9], [-1, -1]))
    on_gpu = [tensor.cuda() for tensor in (prefix, seq, last)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = pool.alloc_extend(on_gpu[0], prefix, on_gpu[1], seq, on_gpu[2], 15)
        more = pool.alloc_decode(on_gpu[1] + 1, seq + 1, torch.stack((slots[5], slots[14])))
        one = [tensor[:1] for tensor in (on_gpu[0], prefix, on_gpu[1], seq, on_gpu[2])]
        alone = pool.alloc_logical_only(*one, 6)
        pool.clear()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert slots.tolist() == [*range(4, 10), *range(12, 21)]
    assert more.tolist() == [10, 21]
    assert alone.tolist() == list(range(24, 30))


@pytest.mark.gpu
def test_no_length_alignment_or_batch_size_compiles_anew():
    pool = v4_pool(4096, 4096, 4096, 16, device="cuda")

    def compiled() -> int:
        # device_caches maps a device to a tuple that starts with its table of compiled variants
        return sum(len(entry[0]) for entry in compressed_extend_kernel.device_caches.values())

    extend(pool, (0, 16, -1))
    before = compiled()
    for rows, length in ((1, 4), (2, 16), (3, 17), (16, 5), (17, 33), (1, 1025)):
        extend(pool, *[(0, length, -1)] * rows)
    assert before == compiled() > 0
