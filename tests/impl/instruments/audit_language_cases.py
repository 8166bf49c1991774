"""Kernels that use much of the language: under the audited lane it must do what the interpreter does.

Not run by itself: `audit_cases.py` imports it for its cases.
"""

from __future__ import annotations

from audit_registry import case, ints, output

import torch  # isort: skip - the registry comes first
import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def bump(x, by: tl.constexpr):
    return x + by


@triton.jit
def add_pair(a, b):
    return a + b


@triton.jit
def language_kernel(x, out, n, nothing, step=2, BLOCK: tl.constexpr = 8):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)  # undefined lanes are 0, as always in the interpreter
    if nothing is None:
        value = bump(value, by=1)
    tl.store(out + at, tl.cumsum(value, 0))
    tl.store(out + BLOCK + at, tl.associative_scan(value, 0, add_pair))
    total = tl.sum(value)
    for i in range(n):
        total += i * step
    for i in tl.static_range(2):
        total += i
    tl.debug_barrier()
    tl.device_print("total", total)
    tl.store(out + 2 * BLOCK, total)
    if n == 3:
        return
    tl.store(out + 2 * BLOCK, -1)


@case
def language():
    out = output(17)
    language_kernel[(1,)](ints(1, 2, 3), out=out, n=3, nothing=None, num_warps=4)
    return out


@triton.jit
def scalar_in_mask_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = (at < 3) & (tl.load(x) > 0)
    tl.store(out + at, tl.load(x + at, mask=mask, other=-1), mask=mask | (at == 3))


@case
def scalar_in_a_mask():
    out = output(4)
    scalar_in_mask_kernel[(1,)](ints(7, 8, 9), out, BLOCK=4)
    return out


@triton.jit(do_not_specialize=["count"])
def grid_kernel(out, count, BLOCK: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + at, x * 100 + y * 10 + z, mask=at < count)


@case
def callable_grid():
    out = output(12)
    grid_kernel[lambda meta: (meta["count"] // 6, triton.cdiv(3, 1), meta["BLOCK"])](out, 12, BLOCK=2)
    return out


@triton.jit
def atomic_kernel(counter, tickets, lock):
    pid = tl.program_id(0)
    tl.store(tickets + pid, tl.atomic_add(counter, 2))
    tl.atomic_cas(lock, 0, 5)


@case
def atomics():
    counter, lock = torch.tensor(10), torch.zeros(1, dtype=torch.int32)  # counter is 0-D
    tickets = output(3)
    atomic_kernel[(3,)](counter, tickets, lock)
    return [*tickets.tolist(), counter.item(), lock.item()]


@triton.jit
def atomic_outside_kernel(counters, locks):
    at = tl.arange(0, 4)
    tl.atomic_add(counters + at, 1, mask=at != 1)
    tl.atomic_cas(locks + 1, 0, 5)


@case
def atomics_out_of_bounds():
    counters, locks = torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    atomic_outside_kernel[(1,)](counters[:3], locks[:1])
    return [*counters.tolist(), *locks.tolist()]


@triton.jit
def atomic_and_plain_kernel(counter, out):
    pid = tl.program_id(0)
    tl.atomic_add(counter, 1)
    tl.store(out + pid, tl.load(counter))


@case
def plain_read_of_an_atomic():
    out = output(2)
    atomic_and_plain_kernel[(2,)](torch.zeros(1, dtype=torch.int64), out)
    return out


@triton.jit
def select_kernel(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    source = tl.where(at % 2 == 0, a + at, b + at)
    tl.store(out + at, tl.load(source, mask=at < 5, other=-1))


@case
def pointers_into_two_tensors():
    out = output(8)
    select_kernel[(1,)](ints(0, 1, 2, 3, 4), ints(10, 11, 12), out, BLOCK=8)
    return out
