"""Kernels that read what nobody has written, and what was written by kernels, by torch or in earlier calls.

Not run by itself: `audit_cases.py` imports it for its cases.
"""

from __future__ import annotations

from audit_registry import case, ints, output

import torch  # isort: skip - the registry comes first
import triton  # isort: skip
import triton.language as tl  # isort: skip

_ALL = (
    torch.int64,
    torch.uint64,
    torch.float64,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@triton.jit
def touch_kernel(x, seen, n, BLOCK: tl.constexpr):
    """Reads `n` elements and tells nothing of them."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0)
    tl.store(seen + at, value.to(tl.int64) * 0, mask=at < n)


@triton.jit
def poison_kernel(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at * 0 - 91, mask=at < n)  # -91 is the poison of int8


def touch(x: torch.Tensor) -> None:
    touch_kernel[(1,)](x, torch.zeros(8, dtype=torch.int64), x.numel(), BLOCK=8)


@case
def fresh_in_every_dtype():
    for n, dtype in enumerate(_ALL, 1):  # as many elements as tell the findings apart
        x = torch.empty(n, dtype=dtype)
        x.view(torch.uint8)  # looking at it is not writing to it
        touch_kernel[(1,)](x, torch.zeros(1, dtype=torch.int64), 1, BLOCK=1)


@case
def fresh_from_every_function():
    like = ints(1, 2, 3, 4, 5, 6).view(2, 3)
    made = [
        torch.empty((1, 2, 1), dtype=torch.int64),
        torch.empty(3),
        torch.empty_like(like[0, :2].view(2, 1).expand(2, 2).contiguous()),
        torch.empty_strided((5,), (1,), dtype=torch.int64),
        like.new_empty(2, 3),
        like.new_empty_strided((7, 1), (1, 1)),
    ]
    for x in made:
        touch_kernel[(1,)](x, torch.zeros(1, dtype=torch.int64), 1, BLOCK=1)
    return [list(x.shape) for x in made]


@case
def written_by_torch():
    for dtype in _ALL:
        for value in (0, -91, 1):  # -91 is the poison of int8
            x = torch.empty((2, 2), dtype=dtype)
            x.copy_(torch.tensor(value).to(dtype))
            touch(x)
    x = torch.empty(4, dtype=torch.int8)
    torch.add(torch.zeros(4, dtype=torch.int8), -91, out=x)
    touch(x)


@case
def written_by_a_kernel():
    x = torch.empty(4, dtype=torch.int8)
    poison_kernel[(1,)](x, 4, BLOCK=4)
    touch(x[1:])
    return x


@case
def partly_written_by_a_kernel():
    x = torch.empty(4, dtype=torch.int8)
    poison_kernel[(1,)](x, 2, BLOCK=4)
    touch(x[1:3])
    return x


@case
def resized_by_torch():
    x = torch.empty(0, dtype=torch.int64)
    torch.add(ints(1, 2, 3), 1, out=x)
    touch(x)
    return x


_scratch: list[torch.Tensor] = []


@case
def kept_for_later_calls():
    _scratch.append(output(2))
    _scratch.append(torch.empty(3, dtype=torch.int8))
    _scratch[0][0] = 1
    poison_kernel[(1,)](_scratch[1], 1, BLOCK=4)


@case
def kept_and_forgotten():
    return len(_scratch)


@case
def kept_from_an_earlier_call():
    touch(_scratch[0])
    touch(_scratch[1])
    _scratch[1].fill_(-91)
    touch(_scratch[1])
    _scratch.clear()
