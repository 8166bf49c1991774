"""Run as `python -m tests.impl.swa_interpreted` with TRITON_INTERPRET=1: sliding-window kernels, audited.

Triton reads that variable when a kernel is defined, so this cannot share a process with tests without it.
Prints one JSON object: for every check, how much it compared and what differed or was found. Every launch
runs in the auditing interpreter, so that no access outside a tensor, no conflict between programs and no
unwritten output goes unseen. Not covered: the compiled kernels (GPU tests of `test_swa_kernels.py`).
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from kvproof.impl.instruments.audit import Auditor
from kvproof.impl.instruments.guards import OutputGuard
from kvproof.impl.swa_kernels import swa_decode_triton, swa_extend_triton, take_peers_triton
from kvproof.impl.swa_reference import swa_decode_reference, swa_extend_reference, take_peers_reference
from tests.impl import oracle
from tests.impl.pools import ids
from tests.impl.swa_pools import Run, decode, extend, swa_pool

Found = tuple[int, list[str]]

GUARD = OutputGuard()
AUDITOR = Auditor(GUARD)


class Watch:
    """Makes calls under the auditor. wrong: what was found or differed."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.count = 0
        self.launches: list[int] = []

    def call(self, label: str, make: Callable[[], Any]) -> Any:
        with GUARD.call(), AUDITOR.call() as audit:
            answer = make()
        self.wrong += [f"{label}: {finding}" for finding in audit.findings]
        self.launches.append(len(audit.launches))
        return answer

    def inside(self, label: str, make: Callable[[], Any]) -> None:
        """A call of which only accesses outside tensors count."""
        self.count += 1
        with GUARD.call(), AUDITOR.call() as audit:
            make()
        outside = [finding for finding in audit.findings if finding.kind.endswith("out-of-bounds")]
        self.wrong += [f"{label}: {finding}" for finding in outside]

    def compare(self, label: str, got: Any, expected: Any) -> None:
        self.count += 1
        if got != expected:
            self.wrong.append(f"{label}: got {str(got)[:300]}, expected {str(expected)[:300]}")


def _batch(
    rng: random.Random, ps: int, rows: int, **options: Any
) -> tuple[oracle.Batch, torch.Tensor, list[int]]:
    """A batch with a small page of its own for every row, the mapping of its last_locs, swa pages to take."""
    batch = oracle.random_batch(rng, ps, rows, **options)
    pages = list(range(1, rows + len(batch.pages) + 1))
    rng.shuffle(pages)
    mapping = torch.zeros((len(pages) + 2) * ps + 1, dtype=torch.int64)
    mapping[-1] = -1
    for row, prefix in enumerate(batch.prefix_lens):
        page, offset = pages.pop(), (prefix - 1) % ps
        if prefix:
            batch.last_loc[row] = page * ps + offset
            mapping[page * ps + offset] = rng.randrange(1, 1 << 35) * ps + offset
    batch.pages = pages[: len(batch.pages)]
    return batch, mapping, [rng.randrange(1, 1 << 35) for _ in batch.pages]


def _mapped(
    batch: oracle.Batch, mapping: torch.Tensor, swa_pages: list[int], slots: list[int], of: Any
) -> list[int]:
    """The mapping after the call, by the oracle of a single pool, run once for either side."""
    peers = oracle.Batch(
        batch.page_size,
        batch.prefix_lens,
        batch.seq_lens,
        [-1 if last < 0 else int(mapping[last]) for last in batch.last_loc],
        swa_pages,
    )
    expected = mapping.tolist()
    for slot, peer in zip(slots, of(peers), strict=True):
        expected[slot] = peer
    return expected


def _lens(values: list[int], rng: random.Random) -> torch.Tensor:
    return torch.tensor(values, dtype=rng.choice((torch.int32, torch.int64)))


def compare_extend() -> Found:
    """Every page size, boundary batch sizes, peers up to slot 2**35 * page size; also by the reference."""
    rng, watch = random.Random(1), Watch()
    for ps in oracle.PAGE_SIZES:
        for rows in (1, 2, 9):
            batch, mapping, swa_pages = _batch(rng, ps, rows)
            slots = oracle.extend(batch)
            expected = slots, _mapped(batch, mapping, swa_pages, slots, oracle.extend)
            tensors = _lens(batch.prefix_lens, rng), _lens(batch.seq_lens, rng), ids(*batch.last_loc)
            tensors += ids(*batch.pages), ids(*swa_pages)
            for compute in (swa_extend_triton, swa_extend_reference):
                fresh = mapping.clone()
                call = lambda compute=compute, fresh=fresh: compute(*tensors, fresh, len(slots), None, ps)  # noqa: B023, E731
                got = watch.call(f"extend, ps {ps}", call)
                watch.compare(f"{compute.__name__} {batch}", (got.tolist(), fresh.tolist()), expected)
    return watch.count, watch.wrong


def compare_tails() -> Found:
    """Tails that begin anywhere, over an earlier life's entries; rows of more than one block of tokens."""
    rng, watch = random.Random(2), Watch()
    for ps in (2, 3, 4, 64):
        for prefix, tokens in ((0, 1), (0, 3 * ps), (ps + 1, ps - 1), (2 * ps - 1, 2 * ps), (1, 1030)):
            need = -(-(prefix + tokens) // ps) - -(-prefix // ps)
            pages = list(range(2, need + 2))
            last = ps + (prefix - 1) % ps if prefix else -1
            slots = oracle.extend(oracle.Batch(ps, [prefix], [prefix + tokens], [last], pages))
            for tail in {0, 1, tokens // 2, tokens}:
                swa_pages = rng.sample(range(1, 1 << 30), -(-tail // ps))
                mapping = torch.full(((need + 3) * ps + 1,), 7)
                expected = mapping.tolist()
                head = tokens - tail
                for j, slot in enumerate(slots):
                    k = j - head
                    expected[slot] = 0 if k < 0 else swa_pages[k // ps] * ps + k % ps
                tensors = ids(prefix), ids(prefix + tokens), ids(last), ids(*pages), ids(*swa_pages)
                for compute in (swa_extend_triton, swa_extend_reference):
                    fresh = mapping.clone()
                    call = lambda c=compute, f=fresh: c(*tensors, f, tokens, tail, ps)  # noqa: B023, E731
                    got = watch.call(f"tail {tail} of {tokens}, ps {ps}", call)
                    watch.compare(
                        f"tail {tail} of {tokens}, ps {ps}", (got.tolist(), fresh.tolist()), (slots, expected)
                    )
    return watch.count, watch.wrong


def compare_decode() -> Found:
    """Every page size; batches around one block of rows."""
    rng, watch = random.Random(3), Watch()
    for ps in oracle.PAGE_SIZES:
        for rows in (1, 2, 255, 257):
            batch, mapping, swa_pages = _batch(rng, ps, rows, step=1)
            slots = oracle.decode(batch)
            expected = slots, _mapped(batch, mapping, swa_pages, slots, oracle.decode)
            tensors = _lens(batch.seq_lens, rng), ids(*batch.last_loc), ids(*batch.pages), ids(*swa_pages)
            for compute in (swa_decode_triton, swa_decode_reference):
                fresh = mapping.clone()
                call = lambda c=compute, f=fresh: c(*tensors, f, ps)  # noqa: B023, E731
                got = watch.call(f"decode, ps {ps}", call)
                watch.compare(f"decode, {rows} rows, ps {ps}", (got.tolist(), fresh.tolist()), expected)
    return watch.count, watch.wrong


def compare_take_peers() -> Found:
    """Around one block of pages; pages unmapped, mapped from the start, and mapped at their end alone."""
    rng, watch = random.Random(4), Watch()
    for ps in oracle.PAGE_SIZES:
        for count in (1, 63, 64, 65):
            mapping = [0] * ((count + 3) * ps) + [-1]
            pages = rng.sample(range(1, count + 3), count)
            slots, expected = [], []
            for page in pages:
                peer = rng.choice((0, rng.randrange(1, 1 << 40)))
                used = range(rng.randrange(1, ps + 1)) if rng.random() < 0.5 else range(rng.randrange(ps), ps)
                for offset in used if peer else ():
                    mapping[page * ps + offset] = peer * ps + offset
                slots.append(page * ps + rng.randrange(ps))
                expected.append(peer)
            after = [0 if slot // ps in pages and slot >= ps else entry for slot, entry in enumerate(mapping)]
            after[-1] = -1
            given = _lens([value for slot in slots for value in (slot, 0)], rng)[::2]
            for compute in (take_peers_triton, take_peers_reference):
                fresh = torch.tensor(mapping)
                got = watch.call(f"take, ps {ps}", lambda c=compute, f=fresh: c(given, f, ps))  # noqa: B023
                watch.compare(f"{count} pages of {ps}", (got.tolist(), fresh.tolist()), (expected, after))
    return watch.count, watch.wrong


def stay_inside_for_what_breaks_the_contract() -> Found:
    """Lengths, pages, slots and entries of nonsense: no access outside; answers do not matter."""
    rng, watch = random.Random(5), Watch()
    values = (-(1 << 40), -9, -1, 0, 1, 2, 3, 7, 8, 30, 39, 41, 1 << 31, 1 << 40)

    def some(count: int) -> torch.Tensor:
        return ids(*rng.choices(values, k=count))

    for ps in (1, 3, 4):
        for _ in range(40):
            rows, tokens = rng.randrange(1, 4), rng.randrange(1, 12)
            lens = ids(*rng.choices(values[1:9], k=rows)), ids(*rng.choices(values[1:10], k=rows)), some(rows)
            pages = some(rng.randrange(4)), some(rng.randrange(4))
            tail = rng.choice((None, 0, 2, tokens))
            mapping = some(41)
            launch = lambda: swa_extend_triton(*lens, *pages, mapping, tokens, tail, ps)  # noqa: B023, E731
            watch.inside(f"extend {lens} {pages} {tail} {ps}", launch)
            pages = some(2), some(2)
            watch.inside("decode", lambda: swa_decode_triton(lens[1], lens[2], *pages, mapping, ps))  # noqa: B023
            watch.inside("take", lambda: take_peers_triton(some(5), mapping, ps))  # noqa: B023
    return watch.count, watch.wrong


def give_no_peer_behind_a_slot_without_one() -> Found:
    """A caller's error that must at least not lead into the padding page; on either path."""
    watch = Watch()
    for kernels in (True, False):
        pool = swa_pool(4, 4, 4, kernels=kernels)
        slots = extend(pool, (0, 1, -1), (0, 1, -1))
        pool.free_swa(ids(*slots))
        watch.call("extend", lambda pool=pool: extend(pool, (1, 6, 4)))
        watch.call("decode", lambda pool=pool: decode(pool, (2, 8)))
        expected = [0] * 12 + [4, 5] + [0] * 6 + [-1]  # of the extend, positions 4 and 5 begin a page
        watch.compare(f"kernels {kernels}", pool.full_to_swa_index_mapping.tolist(), expected)
    return watch.count, watch.wrong


def launch_once_a_call() -> Found:
    """Each call of the allocator that has work for the device, on either side or both."""
    watch = Watch()
    pool = swa_pool(8, 8, 4)
    if not pool.use_triton_kernels:
        watch.wrong.append("the kernels are not the default under the interpreter")
    watch.call("extend", lambda: extend(pool, (0, 8, -1), (0, 3, -1)))
    watch.call("tail", lambda: extend(pool, (0, 12, -1), tail=4))
    watch.call("decode", lambda: decode(pool, (9, 11), (4, 14)))
    watch.call("free_swa", lambda: pool.free_swa(ids(4)))
    watch.call("segments", lambda: pool.free_segments([(ids(8, 9, 10, 11), 4), (ids(28), 8)]))
    watch.call("swa segment", lambda: pool.free_swa_segment(ids(12, 13, 14, 15), start_pos=0))
    watch.call("free", lambda: pool.free(ids(4, 5, 6, 7)))
    watch.call("refusal", lambda: extend(pool, (0, 100, -1)))
    watch.compare("launches", watch.launches, [1, 1, 1, 1, 1, 1, 1, 0])
    return watch.count, watch.wrong


def agree_with_the_oracle_in_use() -> Found:
    """Random lawful use, audited, with pages of one slot as well."""
    watch = Watch()
    for ps, need_sort in ((1, False), (2, True), (3, False), (4, True), (16, False)):
        run = Run(f"kernels {ps}", ps, need_sort=need_sort, checked=False)
        for step in range(40):
            watch.call(f"ps {ps}, step {step}", lambda run=run: run.steps(1))
        watch.compare(f"ps {ps}", run.wrong, "")
    return watch.count, watch.wrong


CHECKS: tuple[Callable[[], Found], ...] = (
    compare_extend,
    compare_tails,
    compare_decode,
    compare_take_peers,
    stay_inside_for_what_breaks_the_contract,
    give_no_peer_behind_a_slot_without_one,
    launch_once_a_call,
    agree_with_the_oracle_in_use,
)

if __name__ == "__main__":
    warnings.simplefilter("error")
    GUARD.install()
    AUDITOR.install()
    print(json.dumps({check.__name__: check() for check in CHECKS}))
