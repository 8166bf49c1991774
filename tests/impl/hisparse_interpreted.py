"""Run as `python -m tests.impl.hisparse_interpreted` with TRITON_INTERPRET=1: the kernels of the HiSparse and
the page-interleave allocators, audited.

Prints one JSON object: for every check, how much it compared and what differed or was found (`Watch`). What
the uncompressed HiSparse allocator launches is the sliding-window kernels, which have their own. Not covered:
the compiled kernels (GPU tests of `test_hisparse_kernels.py` and `test_interleave_kernels.py`).
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from itertools import chain

import torch

from kvproof.impl.hisparse_kernels import compressed_extend_triton
from kvproof.impl.hisparse_reference import compressed_extend_reference
from kvproof.impl.interleave_kernels import interleave_extend_triton
from kvproof.impl.interleave_reference import interleave_extend_reference
from tests.impl import hisparse_pools, interleave_pools
from tests.impl.pools import ids
from tests.impl.swa_interpreted import AUDITOR, GUARD, Found, Watch

RATIO = 4


def _rows(rng: random.Random, ps: int, count: int) -> list[tuple[int, int]]:
    """Prefix and sequence lengths at and around boundaries of pages and of blocks."""
    edges = (0, 1, 3, 4, 5, ps * RATIO - 1, ps * RATIO, ps * RATIO + 1, 2 * ps * RATIO, 3 * ps * RATIO + 2)
    rows = []
    for _ in range(count):
        prefix = rng.choice(edges)
        rows.append((prefix, prefix + rng.choice((*edges, rng.randrange(4 * ps * RATIO)))))
    return rows


def compare_compressed_extend() -> Found:
    """Token by token: who completes a block gets the next slot of the row on the device side."""
    watch, rng = Watch(), random.Random(11)
    for ps in (1, 2, 3, 16):
        for count in (1, 2, 7, 30):
            rows = _rows(rng, ps, count)
            new = sum(-(-(seq // RATIO) // ps) - -(-(prefix // RATIO) // ps) for prefix, seq in rows)
            pages = [rng.randrange(1, 1 << 35) for _ in range(new)]
            logical = list(range(1, 1 + sum(-(-seq // (ps * RATIO)) for _, seq in rows)))
            rng.shuffle(logical)
            mapping = [0] * ((len(logical) + 2) * ps) + [-1]
            expected, rest = dict[int, int](), list(pages)
            last, slots = [], []
            for prefix, seq in rows:
                mine = [logical.pop() for _ in range(-(-seq // (ps * RATIO)))]
                row = [mine[at // (ps * RATIO)] * ps * RATIO + at % (ps * RATIO) for at in range(seq)]
                last.append(row[prefix - 1] if prefix else -1)
                slots += row[prefix:]
                blocks, at = prefix // RATIO, -1
                if blocks % ps:
                    at = rng.randrange(1, 1 << 35) * ps + (blocks - 1) % ps
                    mapping[row[blocks * RATIO - 1] // RATIO] = at
                for block in range(blocks, seq // RATIO):
                    at = rest.pop(0) * ps if block % ps == 0 else at + 1
                    expected[row[block * RATIO + RATIO - 1] // RATIO] = at
            wanted = [expected.get(entry, was) for entry, was in enumerate(mapping)]
            dtype = rng.choice((torch.int32, torch.int64))
            lens = [ids(*values, dtype=dtype) for values in zip(*rows, strict=True)]
            blocks = sum(seq // RATIO - prefix // RATIO for prefix, seq in rows)
            for compute in (compressed_extend_triton, compressed_extend_reference):
                got = ids(*mapping)
                args = (*lens, ids(*last), ids(*slots), ids(*pages), got, blocks, RATIO, ps)
                label = f"{compute.__name__}, ps {ps}, rows {rows}"
                watch.call(label, lambda compute=compute, args=args: compute(*args))
                watch.compare(label, got.tolist(), wanted)
    return watch.count, watch.wrong


def map_nothing_behind_an_unmapped_block() -> Found:
    """Against the contract; no entry leads into the padding page."""
    watch = Watch()
    for compute in (compressed_extend_triton, compressed_extend_reference):
        mapping = ids(*[0] * 16, -1)
        compute(ids(8), ids(20), ids(39), ids(*range(40, 52)), ids(7), mapping, 3, RATIO, 4)
        # the rest of the page is unmapped, the new page is not
        watch.compare(compute.__name__, mapping.tolist(), [*[0] * 12, 28, 0, 0, 0, -1])
    return watch.count, watch.wrong


def compare_interleave_extend() -> Found:
    """Position-page by position-page, over every class count and page size."""
    watch, rng = Watch(), random.Random(12)
    for ps in (1, 2, 5, 16):
        for shards in (2, 3, 8):
            for count in (1, 2, 9):
                rows, bases = [], []
                for _ in range(count):
                    prefix = rng.randrange(4) * ps
                    rows.append((prefix, prefix + rng.choice((0, 1, ps, 7 * ps + 1, rng.randrange(9 * ps)))))
                    bases.append(rng.randrange(shards))
                lists = [
                    [rng.randrange(1, 1 << 30) * shards + rank for _ in range(9 * count)]
                    for rank in range(shards)
                ]
                expected, left = interleave_pools.deal(rows, bases, lists, ps)
                taken = [pages[: len(pages) - len(rest)] for pages, rest in zip(lists, left, strict=True)]
                plan = _plan(rows, bases, [len(pages) for pages in taken], ps)
                lens = [ids(*values, dtype=torch.int32) for values in zip(*rows, strict=True)]
                pages = ids(*chain.from_iterable(taken))
                for compute in (interleave_extend_triton, interleave_extend_reference):
                    label = f"{compute.__name__}, ps {ps}, {shards} classes, rows {rows}"
                    args = (*lens, plan, pages, len(expected), ps)
                    got = watch.call(label, lambda compute=compute, args=args: compute(*args))
                    watch.compare(label, got.tolist(), expected)
    return watch.count, watch.wrong


def _plan(rows: list[tuple[int, int]], bases: list[int], counts: list[int], ps: int) -> torch.Tensor:
    """What the kernel is told, by counting pages one by one."""
    shards = len(counts)
    at = [sum(counts[:rank]) for rank in range(shards)]
    plan = []
    for (prefix, seq), base in zip(rows, bases, strict=True):
        plan.append([(base + prefix // ps) % shards, *at])
        for position in range(prefix // ps, -(-seq // ps)):
            at[(base + position) % shards] += 1
    return torch.tensor(plan)


def stay_inside_for_what_breaks_the_contract() -> Found:
    """Random lengths, slots and plans; only accesses outside tensors count."""
    watch, rng = Watch(), random.Random(13)

    def some(count: int, low: int, high: int) -> torch.Tensor:
        return ids(*[rng.randrange(low, high) for _ in range(count)])

    for number in range(60):
        ps, rows, tokens, pages = (rng.choice((1, 2, 4, 7)), *(rng.randrange(1, n) for n in (6, 40, 6)))
        lens = some(rows, -3, 60), some(rows, -3, 60)
        last, slots, taken = some(rows, -50, 400), some(tokens, -50, 400), some(pages, 0, 60)
        mapping = torch.zeros(rng.randrange(2, 90), dtype=torch.int64)
        args = (*lens, last, slots, taken, mapping, 1, RATIO, ps)
        watch.inside(f"compressed {number}", lambda args=args: compressed_extend_triton(*args))
        if mapping[-1] != 0:
            watch.wrong.append(f"compressed {number} wrote the last entry")
        shards = rng.choice((2, 3, 8))
        plan = torch.cat((some(rows, 0, shards)[:, None], some(rows * shards, -9, 9).view(rows, -1)), 1)
        told = (*lens, plan, taken, tokens, ps)
        watch.inside(f"interleave {number}", lambda told=told: interleave_extend_triton(*told))
    return watch.count, watch.wrong


def launch_what_they_say() -> Found:
    """How many kernels each call of the allocators launches."""
    watch = Watch()
    pool = hisparse_pools.hisparse_pool(9, 4)
    if not pool.use_triton_kernels:
        watch.wrong.append("the kernels are not the default under the interpreter")
    watch.call("extend", lambda: hisparse_pools.extend(pool, (0, 8, -1), (0, 8, -1)))
    watch.call("decode", lambda: hisparse_pools.decode(pool, (9, 11)))
    watch.call("free", lambda: pool.free(ids(24)))
    segments = [(ids(*range(4 * page, 4 * page + 4)), 4 * at) for at, page in enumerate((1, 2, 3))]
    watch.call("segments", lambda: pool.free_segments(segments))
    watch.call("buffer", lambda: hisparse_pools.buffer(pool, [16, 17, 18, 19], 8))
    v4 = hisparse_pools.v4_pool(9, 9, 9, 8)
    watch.call("v4 extend", lambda: hisparse_pools.extend(v4, (0, 8, -1), (0, 9, -1)))
    watch.call("v4 no block", lambda: hisparse_pools.extend(v4, (0, 3, -1)))
    watch.call("v4 refusal", lambda: hisparse_pools.extend(v4, (0, 80, -1)))
    watch.call("v4 free", lambda: v4.free(ids(*range(8, 16))))
    sharded = interleave_pools.interleave_pool(4, 4, 2)
    watch.call("interleave", lambda: interleave_pools.chain(sharded, (0, 9, -1), bases=[None]))
    watch.compare("launches", watch.launches, [1, 1, 1, 1, 0, 2, 1, 0, 2, 1])
    return watch.count, watch.wrong


CHECKS: tuple[Callable[[], Found], ...] = (
    compare_compressed_extend,
    map_nothing_behind_an_unmapped_block,
    compare_interleave_extend,
    stay_inside_for_what_breaks_the_contract,
    launch_what_they_say,
)

if __name__ == "__main__":
    warnings.simplefilter("error")
    GUARD.install()
    AUDITOR.install()
    print(json.dumps({check.__name__: check() for check in CHECKS}))
