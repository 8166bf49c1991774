"""The sliding-window kernels: audited in Triton's interpreter (in its own process), compiled for a GPU
without one, and on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvproof.impl.swa_kernels import (
    swa_decode_kernel,
    swa_decode_triton,
    swa_extend_kernel,
    swa_extend_triton,
    take_peers_kernel,
    take_peers_triton,
)
from tests.impl.pools import ids
from tests.impl.swa_pools import Run, decode, extend, lists, swa_pool

REPOSITORY = Path(__file__).parents[2]


def test_under_the_auditing_interpreter():
    process = subprocess.run(
        [sys.executable, "-m", "tests.impl.swa_interpreted"],
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
        "compare_extend": 48,
        "compare_tails": 136,
        "compare_decode": 64,
        "compare_take_peers": 64,
        "stay_inside_for_what_breaks_the_contract": 360,
        "give_no_peer_behind_a_slot_without_one": 2,
        "launch_once_a_call": 1,
        "agree_with_the_oracle_in_use": 5,
    }


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvproof.impl.swa_kernels import swa_decode_kernel, swa_extend_kernel, take_peers_kernel

sizes = {"page_size": 3, "BLOCK_ROWS": 256, "BLOCK_TOKENS": 1024, "BLOCK_PAGES": 64, "BLOCK_OFFSETS": 16}
for kernel in (swa_decode_kernel, swa_extend_kernel, take_peers_kernel):
    for ints in ("*i64", "*i32"):
        signature = {
            name: "constexpr" if name in sizes
            else ints if name in ("prefix_lens_ptr", "seq_lens_ptr", "last_loc_ptr", "slots_ptr")
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
    assert [int(size) > 0 for size in process.stdout.split()] == [True] * 6


def test_nothing_is_launched_for_nothing():
    none, mapping = ids(), ids(0, 0, -1)  # on a CPU without interpreter a launch would raise
    assert swa_extend_triton(ids(3), ids(3), ids(6), none, none, mapping, 0, None, 4).tolist() == []
    assert swa_decode_triton(none, none, none, none, mapping, 4).tolist() == []
    assert take_peers_triton(none, mapping, 4).tolist() == []


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 64])
def test_random_lawful_use_on_a_gpu_is_as_the_oracle_has_it(page_size, kernels):
    for seed in range(3):
        run = Run(
            f"{seed} {page_size}",
            page_size,
            need_sort=seed == 1,
            checked=False,
            device="cuda",
            kernels=kernels,
        )
        assert run.steps(150) == ""


@pytest.mark.gpu
def test_a_large_batch_on_a_gpu():
    """More rows, tokens and pages than one block of each; either path."""
    answers = []
    for kernels in (True, False):
        pool = swa_pool(6000, 5000, 4, device="cuda", kernels=kernels)
        slots = extend(pool, *[(0, 1 + row % 9, -1) for row in range(1025)], (0, 4097, -1))
        ends, at = [], -1
        for row in range(1025):
            at += 1 + row % 9
            ends.append((2 + row % 9, slots[at]))
        more = decode(pool, *ends)
        pool.free_swa_segment(torch.tensor(slots[-4097:], device="cuda"), start_pos=0)
        answers.append((slots, more, lists(pool), pool.full_to_swa_index_mapping.tolist()))
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_allocation_and_segment_frees_do_not_synchronise(need_sort, kernels):
    pool = swa_pool(32, 24, 4, need_sort=need_sort, device="cuda", kernels=kernels)
    for tail in (None, 4):  # the first launch of each kernel may load modules
        extend(pool, (0, 8, -1), tail=tail)
    decode(pool, (5, 7))
    pool.free_segment(ids(4, 5, 6, 7).cuda(), start_pos=0)
    pool.clear()
    prefix, seq, last = (torch.tensor(values) for values in ([0, 0], [6, 9], [-1, -1]))
    on_gpu = [tensor.cuda() for tensor in (prefix, seq, last)]
    edits = ids(16, 17).cuda(), ids(4, 5).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = pool.alloc_extend(on_gpu[0], prefix, on_gpu[1], seq, on_gpu[2], 15)
        pool.alloc_decode(on_gpu[1] + 1, seq + 1, torch.stack((slots[5], slots[14])))
        one = [tensor[1:] for tensor in (on_gpu[0], prefix, on_gpu[1], seq, on_gpu[2])]
        tail = pool.alloc_extend_swa_tail(*one, 9, 5)
        pool.set_full_to_swa_mapping(*edits)
        pool.clear_full_to_swa_mapping(edits[0])
        pool.free_group_begin()
        pool.free_segment(slots[:6], start_pos=0)
        pool.free_swa_segment(tail[4:], start_pos=4)
        pool.free_group_end()
        pool.free_segments([(slots[6:10], 0), (slots[10:], 4)])
        pool.free_full_segment(tail, start_pos=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # pages 1, 2 to the first row, 3, 4, 5 to the second, 6, 7, 8 to the third
    assert (slots.tolist(), tail.tolist()) == ([*range(4, 10), *range(12, 21)], list(range(24, 33)))
    assert (pool.full_available_size(), pool.swa_available_size()) == (128, 96)
    full, full_staged, swa, swa_staged = lists(pool)
    assert sorted(full + full_staged) == list(range(1, 33))
    assert sorted(swa + swa_staged) == list(range(1, 25))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_pages_of_one_do_not_synchronise_on_a_gpu():
    pool = swa_pool(8, 8, 1, device="cuda")
    pool.free(pool.alloc(2))  # loads modules
    pool.clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = pool.alloc(6)
        pool.free(slots[:2])
        pool.free_swa(slots[2:4])
        pool.free_full(slots[2:4])
        pool.free_segment(slots[4:5], start_pos=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert lists(pool) == ([7, 8, 1, 2, 3, 4, 5], [], [7, 8, 1, 2, 3, 4, 5], [])


@pytest.mark.gpu
def test_no_length_alignment_or_batch_size_compiles_anew():
    pool = swa_pool(4096, 4096, 4, device="cuda")

    def compiled() -> int:
        # device_caches maps a device to a tuple that starts with its table of compiled variants
        return sum(
            len(entry[0])
            for kernel in (swa_extend_kernel, swa_decode_kernel, take_peers_kernel)
            for entry in kernel.device_caches.values()
        )

    slots = extend(pool, (0, 16, -1))
    decode(pool, (17, slots[-1]))
    pool.free_swa_segment(torch.tensor(slots, device="cuda"), start_pos=0)
    before = compiled()
    for rows, length in ((1, 1), (2, 16), (3, 17), (16, 1), (17, 33), (1, 1025)):
        slots = extend(pool, *[(0, length, -1)] * rows)
        decode(pool, *[(1, -1)] * rows)
        extend(pool, (0, length, -1), tail=length // 2)
        pool.free_swa_segment(torch.tensor(slots[:length], device="cuda"), start_pos=0)
    assert compiled() == before
