"""Kernels with undefined lanes: masked loads without `other`, and what a mask leaves of an atomic's result.

Not run by itself: `audit_cases.py` imports it for its cases. Some use the lanes, the others drop them.
"""

from __future__ import annotations

import contextlib
import io

from audit_registry import case, ints, output

import torch  # isort: skip - the registry comes first
import triton  # isort: skip
import triton.language as tl  # isort: skip

from kvproof.impl.instruments import tape  # isort: skip


@triton.jit
def sum_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < n)))


@case
def undefined_in_a_sum():
    out = output(1)
    sum_kernel[(1,)](ints(1, 2, 3), out, 3, BLOCK=4)
    return out


@case
def no_lane_is_masked_off():
    out = output(1)
    sum_kernel[(1,)](ints(1, 2, 3, 4), out, 4, BLOCK=4)
    return out


@triton.jit
def prefix_sum_kernel(x, y, out, BLOCK: tl.constexpr):
    """Both loads are undefined beyond the program's own lane, and only their difference is used."""
    pid, at = tl.program_id(0), tl.arange(0, BLOCK)
    left = tl.load(x + at, mask=at <= pid)
    right = tl.load(y + at * 0, mask=at <= pid)
    tl.store(out + pid, tl.sum(left - right))


@case
def a_difference_of_undefined_lanes():
    out = output(3)
    prefix_sum_kernel[(3,)](ints(1, 2, 3), ints(1), out, BLOCK=4)
    return out


@triton.jit
def dropped_kernel(x, table, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    there = at < n
    value = tl.load(x + at, mask=there)
    total = tl.sum(tl.where(there, value, 0))
    again = tl.load(table + value, mask=there)  # masked-off lanes address anything: never performed
    twice = tl.load(table + again, mask=there & (again > 0), other=value)
    tl.store(out + at, twice + total, mask=there)


@case
def undefined_lanes_dropped():
    out = output(3)
    dropped_kernel[(1,)](ints(0, 1, 2), ints(0, 2, 1), out, 3, BLOCK=8)
    return out


_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@case
def undefined_lanes_dropped_in_every_dtype():
    found = []
    for dtype in _DTYPES:
        out = torch.empty(3, dtype=dtype)
        masked_copy_kernel[(1,)](torch.tensor([1, 0, 1]).to(dtype), out, 3, BLOCK=4)
        found.append(out.to(torch.float64).tolist())
    return found


@triton.jit
def masked_copy_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def unmasked_store_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n))


@case
def undefined_lanes_stored_in_every_dtype():
    for n, dtype in enumerate(_DTYPES, 1):  # as many elements as tell the findings apart
        x, out = torch.ones(n, dtype=dtype), torch.empty(16, dtype=dtype)
        unmasked_store_kernel[(1,)](x, out, n, BLOCK=16)
    return out.to(torch.int64)


@case
def nan_is_itself():
    out = torch.empty(3, dtype=torch.float32)
    masked_copy_kernel[(1,)](torch.tensor([float("nan"), 1, 2]), out, 3, BLOCK=4)
    return out.isnan().to(torch.int64)


@triton.jit
def address_kernel(x, table, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    where = tl.load(x + at, mask=at < n)
    tl.store(out + at, tl.load(table + where))


@case
def undefined_in_an_address():
    out = output(4)
    address_kernel[(1,)](ints(1, 2, 1), ints(7, 8, 9), out, 3, BLOCK=4)
    return out


@triton.jit
def mask_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, at, mask=tl.load(x + at, mask=at < n) >= 0)


@case
def undefined_in_a_mask():
    """All lanes are stored for 0 and above: it takes a filling below."""
    out = output(4)
    mask_kernel[(1,)](ints(1, 2, 1), out, 3, BLOCK=4)
    return out


@triton.jit
def least_kernel(x, out, n, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if LEAST:
        tl.store(out, tl.min(value))
    else:
        tl.store(out, tl.max(value))


@case
def undefined_in_a_minimum():
    out = output(1)
    least_kernel[(1,)](ints(-4, -5, -6), out, 3, BLOCK=4, LEAST=True)
    return out


@case
def undefined_in_a_maximum():
    out = output(1)
    least_kernel[(1,)](ints(4, 5, 6), out, 3, BLOCK=4, LEAST=False)
    return out


@triton.jit
def clip_kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.maximum(tl.load(x + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < n), 0)))


@case
def one_undefined_lane_of_either_sign():
    out = output(2)
    mask_kernel[(1,)](ints(1), out, 1, BLOCK=2)
    clip_kernel[(1,)](ints(1, 2, 3), torch.zeros(1, dtype=torch.int64), 3, BLOCK=4)
    return out


@triton.jit
def decision_kernel(x, out, n, at):
    value = tl.load(x + at, mask=at < n)
    if value > 5:
        tl.store(out, 1)
    else:
        tl.store(out, 2)


@case
def undefined_in_a_decision():
    out = output(1)
    decision_kernel[(1,)](ints(1), out, 1, 1)
    return out


@triton.jit
def endless_kernel(x, out, n, at):
    bound = tl.load(x + at, mask=at < n)
    i = 0
    while i < bound:
        i += 1
    for _ in range(bound):
        i += 1
    tl.store(out, i)


@case
def undefined_as_the_end_of_a_loop():
    out = output(1)
    endless_kernel[(1,)](ints(1), out, 1, 1)
    return out


@triton.jit
def scalar_other_kernel(x, out, n, at):
    """Triton's interpreter forgets an `other` of 0 here."""
    tl.store(out, tl.load(x + at, mask=at < n, other=0))


@case
def a_scalar_other_of_zero():
    out = output(1)
    scalar_other_kernel[(1,)](ints(1), out, 1, 1)
    return out


@triton.jit
def smallest_kernel(x, out, n, at):
    value = tl.load(x + at, mask=at < n)
    less = min(value, 3)
    other = tl.load(x, mask=n == n, other=value)  # the interpreter asks whether there is an `other`
    tl.store(out, tl.where(at < n, less, other))


@case
def undefined_scalar_dropped():
    out = output(1)
    smallest_kernel[(1,)](ints(9), out, 1, 1)
    return out


@triton.jit
def tickets_kernel(counter, out, n, BLOCK: tl.constexpr, DROP: tl.constexpr):
    at = tl.arange(0, BLOCK)
    old = tl.atomic_add(counter + at, 1, mask=at < n)
    if DROP:
        old = tl.where(at < n, old, 0)
    tl.store(out, tl.sum(old))


@case
def an_atomics_result_under_its_mask():
    counter, out = ints(5, 6, 7), output(1)
    tickets_kernel[(1,)](counter, out, 2, BLOCK=4, DROP=True)
    return [*counter.tolist(), *out.tolist()]


@case
def an_atomics_result_beyond_its_mask():
    counter, out = ints(5, 6, 7), output(1)
    tickets_kernel[(1,)](counter, out, 2, BLOCK=4, DROP=False)
    return [*counter.tolist(), *out.tolist()]


@triton.jit
def atomic_operand_kernel(x, counter, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(counter, tl.sum(tl.load(x + at, mask=at < n)).to(tl.int32))
    tl.store(out, tl.atomic_cas(counter, 6, 8))


@case
def undefined_in_an_atomic():
    counter, out = torch.zeros(1, dtype=torch.int32), output(1)
    atomic_operand_kernel[(1,)](ints(1, 2, 3), counter, out, 3, BLOCK=4)
    return [*counter.tolist(), *out.tolist()]


@triton.jit
def second_culprit_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first = tl.load(x + at, mask=at < n)
    second = tl.load(y + at, mask=at < n)
    tl.store(out + at, first, mask=at < n)
    tl.store(out + n, tl.sum(second))


@case
def the_argument_that_matters_is_named():
    out = output(4)
    second_culprit_kernel[(1,)](ints(1, 2, 3), ints(4, 5, 6), out, 3, BLOCK=4)
    return out


@triton.jit
def only_together_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    both = (tl.load(x + at, mask=at < n) != 0) & (tl.load(y + at, mask=at < n) != 0)
    tl.store(out, tl.sum(both.to(tl.int64)))


@case
def two_arguments_matter_only_together():
    out = output(1)
    only_together_kernel[(1,)](ints(1, 2, 3), ints(4, 5, 6), out, 3, BLOCK=4)
    return out


@case
def a_full_tape_is_not_judged():
    out, limit = output(1), tape.TAPE_LANES
    tape.TAPE_LANES = 4  # one load fills it
    try:
        sum_kernel[(1,)](ints(1, 2, 3), out, 3, BLOCK=4)
    finally:
        tape.TAPE_LANES = limit
    return out


@triton.jit
def noisy_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.device_print("once", tl.sum(tl.where(at < n, value, 0)))
    tl.store(out + at, value, mask=at < n)


@case
def prints_once():
    with contextlib.redirect_stdout(io.StringIO()) as said:
        noisy_kernel[(1,)](ints(1, 2, 3), output(3), 3, BLOCK=4)
    return said.getvalue().count("once")


if hasattr(triton.runtime.interpreter, "BlockPointerHandle"):  # gone after Triton 3.6

    @triton.jit
    def block_pointer_kernel(x, out, n, BLOCK: tl.constexpr, PADDED: tl.constexpr):
        block = tl.make_block_ptr(x, (n,), (1,), (0,), (BLOCK,), (0,))
        if PADDED:
            value = tl.load(block, boundary_check=(0,), padding_option="zero")
        else:
            value = tl.load(block, boundary_check=(0,))
        tl.store(out, tl.sum(value))

    @case
    def block_pointer_padded():
        out = output(1)
        block_pointer_kernel[(1,)](ints(1, 2, 3), out, 3, BLOCK=4, PADDED=True)
        return out

    @case
    def block_pointer_unpadded():
        out = output(1)
        block_pointer_kernel[(1,)](ints(1, 2, 3), out, 3, BLOCK=4, PADDED=False)
        return out
