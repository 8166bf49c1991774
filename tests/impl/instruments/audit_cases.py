"""Kernels for the tests of the audited lane, run in a process of their own.

Run as a script it prints one JSON object: case -> {findings, left_out, launches, values}. Triton must
be told to interpret before its first import, which the process that runs the tests cannot promise.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import audit_fresh_cases  # noqa: F401 - for its cases
import audit_language_cases  # noqa: F401
import audit_race_cases  # noqa: F401
import audit_undefined_cases  # noqa: F401
from audit_registry import CASES, case, ints, output

import torch  # isort: skip - the registry comes first
import triton  # isort: skip
import triton.language as tl  # isort: skip

from kvproof.impl.instruments.audit import Auditor  # isort: skip
from kvproof.impl.instruments.findings import InstrumentError  # isort: skip
from kvproof.impl.instruments.guards import OutputGuard  # isort: skip


# -- findings ----------------------------------------------------------------------------------------


@triton.jit
def copy_kernel(source, out, shift, BLOCK: tl.constexpr):
    """Program p copies BLOCK elements of its own, read `shift` further on."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at + shift))


@case
def clean():
    out = output(8)
    copy_kernel[(2,)](ints(*range(8)), out, 0, BLOCK=4)
    return out


@triton.jit
def discarded_read_kernel(source, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at <= n)  # one lane too many, and its value is thrown away
    tl.store(out + at, value, mask=at < n)


@case
def discarded_read():
    out = output(3)
    discarded_read_kernel[(1,)](ints(5, 6, 7), out, 3, BLOCK=8)
    return out


@case
def neighbour_of_a_slice():
    pages = ints(*range(10, 20))  # the storage goes on where the slice ends
    out = output(4)
    copy_kernel[(1,)](pages[2:5], out, 0, BLOCK=4)
    return out


@case
def before_a_slice():
    out = output(4)
    copy_kernel[(1,)](ints(*range(8))[4:], out, -1, BLOCK=4)
    return out


@triton.jit
def wrong_store_mask_kernel(out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, at + 1, mask=at <= n)


@case
def write_past_a_slice():
    storage = torch.zeros(6, dtype=torch.int64)
    wrong_store_mask_kernel[(1,)](storage[:3], 3, BLOCK=8)
    return storage


@triton.jit
def overlapping_store_kernel(out):
    pid = tl.program_id(0)
    tl.store(out + pid, pid)
    tl.store(out + pid + 1, pid)


@case
def two_writers():
    out = output(3)
    overlapping_store_kernel[(2,)](out)
    return out


@triton.jit
def twice_kernel(out):
    pid = tl.program_id(0)
    tl.store(out + pid, 1)
    tl.store(out + pid, 2)


@case
def one_program_twice():
    out = output(2)
    twice_kernel[(2,)](out)
    return out


@triton.jit
def same_lane_kernel(out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at // 2, at)


@case
def two_lanes_of_one_store():
    out = output(2)
    same_lane_kernel[(1,)](out, BLOCK=4)
    return out.numel()


@case
def unwritten():
    out = output(5)
    copy_kernel[(1,)](ints(1, 2, 3, 4), out, 0, BLOCK=4)
    return out


@case
def written_by_a_later_launch():
    out = output(5)
    copy_kernel[(1,)](ints(1, 2, 3, 4), out, 0, BLOCK=4)
    copy_kernel[(1,)](ints(9), out[4:], 0, BLOCK=1)
    return out


@triton.jit
def prefix_kernel(values):
    pid = tl.program_id(0)
    if pid > 0:
        tl.store(values + pid, tl.load(values + pid - 1) + 1)
    else:
        tl.store(values + pid, 1)


@case
def reads_what_an_earlier_program_wrote():
    values = torch.zeros(3, dtype=torch.int64)
    prefix_kernel[(3,)](values)
    return values


@triton.jit
def shift_kernel(values, step):
    pid = tl.program_id(0)
    tl.store(values + pid, tl.load(values + pid + step))


@case
def reads_what_a_later_program_writes():
    values = ints(7, 8, 9)
    shift_kernel[(2,)](values, 1)
    return values


@triton.jit
def two_arguments_kernel(source, target):
    pid = tl.program_id(0)
    tl.store(target + pid, tl.load(source + pid))


@case
def race_through_an_alias():
    values = ints(7, 8, 9, 10)
    two_arguments_kernel[(2,)](values[:2], values[1:3])
    return values


@triton.jit
def read_own_output_kernel(out, seen):
    tl.store(seen, tl.load(out + 1))
    tl.store(out, 1)
    tl.store(out + 1, 2)


@case
def uninitialised_read():
    out, seen = output(2), torch.zeros(1, dtype=torch.int64)
    read_own_output_kernel[(1,)](out, seen)
    return out


@case
def between_the_strides():
    pages = ints(*range(8))
    out = output(2)
    copy_kernel[(1,)](pages[::2], out, 0, BLOCK=2)
    return out


@triton.jit
def strided_kernel(source, out, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at * stride))


@case
def along_the_strides():
    out = output(4)
    strided_kernel[(1,)](ints(*range(8))[1::2], out, 2, BLOCK=4)
    return out


@case
def bounded():
    out = torch.zeros(1, dtype=torch.int64)
    wrong_store_mask_kernel[(1,)](out, 127, BLOCK=128)
    return out


@triton.jit
def cast_kernel(source, out):
    tl.store(out, tl.load(source.to(tl.pointer_type(tl.int32))))


@case
def reinterpreted_pointer():
    try:
        cast_kernel[(1,)](ints(1), torch.zeros(1, dtype=torch.int32))
    except InstrumentError as error:
        return str(error)


@triton.jit
def wild_kernel(addresses, out):
    pointer = tl.load(addresses).to(tl.pointer_type(tl.int64))
    tl.store(out, tl.load(pointer))


@case
def address_of_no_argument():
    out = output(1)
    wild_kernel[(1,)](ints(4096), out)
    return out


@case
def empty_slice():
    out = output(1)
    copy_kernel[(1,)](ints(1, 2)[2:], out, 0, BLOCK=1)
    return out


@triton.jit
def transpose_kernel(x, out, sx, sy, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + row * sx + column * sy)
    tl.store(out + row * BLOCK + column, tl.exp(value.to(tl.float32)) / 3)


if torch.cuda.is_available():

    @case
    def on_a_device():
        out = torch.empty((4,), dtype=torch.int64, device="cuda")
        copy_kernel[(1,)](ints(*range(8)).cuda()[2:5], out, 0, BLOCK=4)
        return out


def every_dtype() -> list[list[float]]:
    """One kernel over tensors of every dtype, transposed; the same before and after install()."""
    found = []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        x, out = torch.arange(16).reshape(4, 4).to(dtype).t(), torch.zeros(4, 4)
        transpose_kernel[(1,)](x, out, x.stride(0), x.stride(1), BLOCK=4)
        found.append(out.reshape(-1).tolist())
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.bool):
        x, out = torch.tensor([0, 1, 1, 0], dtype=dtype), torch.zeros(4, dtype=dtype)
        copy_kernel[(1,)](x, out, 0, BLOCK=4)
        found.append(out.to(torch.float32).tolist())
    return found


CASES["every_dtype"] = every_dtype


def refusal() -> str:
    """What install() says to an interpreter that lacks something."""
    interpreter = triton.runtime.interpreter
    held = interpreter._implicit_cvt
    del interpreter._implicit_cvt
    try:
        Auditor().install()
    except InstrumentError as error:
        return str(error)
    finally:
        interpreter._implicit_cvt = held
    return ""


def patched_things() -> list[object]:
    interpreter = triton.runtime.interpreter
    return [
        interpreter._interpreter,
        interpreter._get_np_dtype,
        interpreter.InterpretedFunction.run,
        interpreter.InterpretedFunction.__call__,
        tl.load,
        tl.core.load,
        tl.tensor.__init__,
        tl.tensor.__add__,
    ]


def main() -> None:
    answers: dict[str, Any] = {"plain": {"values": every_dtype()}}
    answers["refusal"] = {"message": refusal(), "version": triton.__version__}
    before = patched_things()
    guard = OutputGuard()
    auditor = Auditor(guard)
    guard.install()
    auditor.install()
    for name, run in CASES.items():
        with guard.call(), auditor.call() as audit:
            values = run()
        answers[name] = {
            "findings": [
                [f.kind, f.argument, f.program and f.program[0], f.offset, f.extent, f.other and f.other[0]]
                for f in audit.findings
            ],
            "programs": [[f.program, f.other] for f in audit.findings],
            "uses": [f.use for f in audit.findings if f.use],
            "kernels": sorted({f.kernel for f in audit.findings}),
            "left_out": audit.left_out,
            "launches": [[n.kernel, n.grid, n.programs, n.written] for n in audit.launches],
            "values": values.tolist() if isinstance(values, torch.Tensor) else values,
        }
    auditor.uninstall()
    guard.uninstall()
    restored = [a is b for a, b in zip(before, patched_things(), strict=True)]
    answers["uninstalled"] = {"values": every_dtype(), "restored": restored}
    json.dump(answers, sys.__stdout__)


if __name__ == "__main__":
    sys.stdout = sys.stderr  # what kernels print must not mix with the answer
    main()
