"""Run as `python -m tests.impl.interpreted` with TRITON_INTERPRET=1: our kernels under Triton's interpreter.

Triton reads that variable when a kernel is defined, so this cannot share a process with tests that run
without it. Prints one JSON object: for every check, how many batches it compared and what differed.
Not covered: the compiled kernels (GPU tests of `test_kernels.py`).
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable

import torch

from kvproof.impl.kernels import (
    alloc_decode_kernel,
    alloc_decode_triton,
    alloc_extend_kernel,
    alloc_extend_triton,
)
from tests.impl import oracle
from tests.impl.pools import decode, extend, free_list, ids, paged_pool

GUARD = -(1 << 50)
Found = tuple[int, list[str]]


def _differ(label: str, got: list[int], expected: list[int]) -> list[str]:
    return [] if got == expected else [f"{label}: got {got[:40]}, expected {expected[:40]}"]


def _lens(values: list[int], rng: random.Random) -> torch.Tensor:
    return torch.tensor(values, dtype=rng.choice((torch.int32, torch.int64)))


def compare_extend() -> Found:
    """Every page size, boundary batch sizes; the third batch is longer than one block of rows."""
    rng, count, wrong = random.Random(1), 0, []
    for ps in oracle.PAGE_SIZES:
        for rows in (1, 2, 9):
            batch = oracle.random_batch(rng, ps, rows)
            expected = oracle.extend(batch)
            lens = _lens(batch.prefix_lens, rng), _lens(batch.seq_lens, rng), ids(*batch.last_loc)
            got = alloc_extend_triton(*lens, ids(*batch.pages), len(expected), ps)
            wrong += _differ(f"{batch}", got.tolist(), expected)
            count += 1
    return count, wrong


def compare_extend_of_many_rows() -> Found:
    """Sums over more than one block of 256 rows; most rows are empty, which costs the interpreter least."""
    ps, rows = 3, 259
    prefix, seq, last = [4] * rows, [4] * rows, [10] * rows
    for row in (0, 128, 255, 256, 257, 258):
        seq[row] = 8
    batch = oracle.Batch(ps, prefix, seq, last, list(range(50, 56)))
    expected = oracle.extend(batch)
    got = alloc_extend_triton(ids(*prefix), ids(*seq), ids(*last), ids(*batch.pages), len(expected), ps)
    return 1, _differ("259 rows", got.tolist(), expected)


def compare_extend_of_long_rows() -> Found:
    """Rows of more than one block of 1024 tokens, ending on, before and after a block's end."""
    wrong = []
    lengths = (1023, 1024, 1025, 2048, 3000)
    for ps in (1, 5, 64):
        for prefix in (0, ps + ps // 2):
            pages = sum(-(-(prefix + n) // ps) - -(-prefix // ps) for n in lengths)
            last = 900 * ps + (prefix - 1) % ps if prefix else -1
            batch = oracle.Batch(
                ps, [prefix] * 5, [prefix + n for n in lengths], [last] * 5, list(range(pages, 0, -1))
            )
            expected = oracle.extend(batch)
            lens = ids(*batch.prefix_lens), ids(*batch.seq_lens), ids(*batch.last_loc)
            got = alloc_extend_triton(*lens, ids(*batch.pages), len(expected), ps)
            wrong += _differ(f"long rows, ps {ps}, prefix {prefix}", got.tolist(), expected)
    return 6, wrong


def compare_decode() -> Found:
    """Every page size; batches around one and two blocks of rows."""
    rng, count, wrong = random.Random(2), 0, []
    for ps in oracle.PAGE_SIZES:
        for rows in (1, 2, 255, 256, 257, 513):
            batch = oracle.random_batch(rng, ps, rows, step=1)
            got = alloc_decode_triton(_lens(batch.seq_lens, rng), ids(*batch.last_loc), ids(*batch.pages), ps)
            wrong += _differ(f"{rows} rows, ps {ps}", got.tolist(), oracle.decode(batch))
            count += 1
    return count, wrong


def leave_what_is_around_the_output_alone() -> Found:
    """Outputs inside guarded buffers; lengths are views at odd offsets; the list holds just enough pages."""
    rng, wrong = random.Random(3), []
    for ps in (1, 4, 7):
        batch = oracle.random_batch(rng, ps, 6)
        expected = oracle.extend(batch)
        n = len(expected)
        buffer = torch.full((n + 16,), GUARD)
        lens = [
            ids(9, *values)[1:] for values in (batch.prefix_lens, batch.seq_lens, batch.last_loc, batch.pages)
        ]
        alloc_extend_kernel[(6,)](*lens, buffer[8 : 8 + n], len(batch.pages), n, ps, 256, 1024)
        wrong += _differ(f"extend, ps {ps}", buffer.tolist(), [GUARD] * 8 + expected + [GUARD] * 8)

        batch = oracle.random_batch(rng, ps, 6, step=1)
        buffer = torch.full((22,), GUARD)
        lens = [ids(9, *values)[1:] for values in (batch.seq_lens, batch.last_loc, batch.pages)]
        alloc_decode_kernel[(1,)](*lens, buffer[8:14], len(batch.pages), 6, ps, 256)
        wrong += _differ(
            f"decode, ps {ps}", buffer.tolist(), [GUARD] * 8 + oracle.decode(batch) + [GUARD] * 8
        )
    return 6, wrong


def agree_with_the_reference_in_a_pool() -> Found:
    """One call stream through the allocator on both paths."""
    wrong, count = [], 0
    for ps, need_sort in ((1, False), (3, True), (4, False), (16, True)):
        pools = [paged_pool(24, ps, need_sort=need_sort) for _ in range(2)]
        if not pools[0].use_triton_kernels:
            wrong.append("the kernels are not the default under the interpreter")
        pools[1].use_triton_kernels = False
        answers = []
        for pool in pools:
            first = extend(pool, (0, 2 * ps + 1, -1), (0, 0, -1), (0, ps, -1))
            cut = 2 * ps + 1
            pool.free(ids(*first[cut:]))
            grown = decode(pool, (cut + 1, first[cut - 1]), (ps + 1, first[ps - 1]))
            refused = extend(pool, (0, 25 * ps, -1))
            more = extend(pool, (cut + 1, 4 * ps + 1, grown[0]))
            answers.append((first, grown, refused, more, extend(pool), free_list(pool)))
        if answers[0] != answers[1]:
            wrong.append(f"ps {ps}: kernels {answers[0]}, reference {answers[1]}")
        count += 1
    return count, wrong


CHECKS: tuple[Callable[[], Found], ...] = (
    compare_extend,
    compare_extend_of_many_rows,
    compare_extend_of_long_rows,
    compare_decode,
    leave_what_is_around_the_output_alone,
    agree_with_the_reference_in_a_pool,
)

if __name__ == "__main__":
    warnings.simplefilter("error")
    print(json.dumps({check.__name__: check() for check in CHECKS}))
