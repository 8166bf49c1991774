"""What the fence does on a GPU: run by test_fence.py in processes, since a fault takes the context along.

`python fence_gpu_cases.py SIDE CACHE CASE...` runs the cases in turn and prints one JSON object of answers;
SIDE "none" is torch's own allocator. Not here: the fence on the stub driver; see `fence_cases`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kvproof.impl.instruments import fence
from kvproof.impl.instruments.findings import InstrumentError

GRANULE = 2 << 20
LENGTHS = [*range(1, 10), 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 1000, 1023, 1025, 4096, 4097]
SIDE, CACHE = sys.argv[1], Path(sys.argv[2])


@triton.jit
def read_kernel(source, out, offset):
    tl.store(out, tl.load(source + offset))


@triton.jit
def discarded_read_kernel(source, out, offset, keep):
    # Volatile, or the compiler moves the load to where its result is wanted, which is nowhere.
    value = tl.load(source + offset, volatile=True)
    tl.store(out, value, mask=keep != 0)


@triton.jit
def write_kernel(out, offset):
    tl.store(out + offset, 7)


@triton.jit
def read_address_kernel(address, out):
    tl.store(out, tl.load(address.to(tl.pointer_type(tl.int64))))


@triton.jit
def copy_kernel(source, out, length, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(source + lanes, mask=lanes < length), mask=lanes < length)


def numbers(length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(list(range(1, length + 1)), dtype=dtype, device="cuda")


def fault(launch: Callable[[], Any]) -> str:
    """First line of the error that the launch ends in; "" when it ends well."""
    try:
        launch()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def read_at(offset: int, length: int = 5, dtype: torch.dtype = torch.int64) -> str:
    source, out = numbers(length, dtype), numbers(1, dtype)
    return fault(lambda: read_kernel[(1,)](source, out, offset))


def discarded_read_past() -> str:
    source, out = numbers(5), numbers(1)
    return fault(lambda: discarded_read_kernel[(1,)](source, out, 5, 0))


def write_at(offset: int) -> str:
    out = numbers(5)
    return fault(lambda: write_kernel[(1,)](out, offset))


def read_freed() -> str:
    source, out = numbers(5), numbers(1)
    address = source.data_ptr()
    if wrong := fault(lambda: read_address_kernel[(1,)](address, out)):
        return f"while it lived: {wrong}"
    del source
    return fault(lambda: read_address_kernel[(1,)](address, out))


def in_bounds() -> str:
    """Empty when copies of every length and dtype arrive, the kernel being held to its mask."""
    for length, dtype in itertools.product(LENGTHS, (torch.int64, torch.int32, torch.int8)):
        source = torch.full((length,), 3, dtype=dtype, device="cuda")
        out = torch.zeros_like(source)
        grid = (triton.cdiv(length, 128),)
        if wrong := fault(lambda: copy_kernel[grid](source, out, length, BLOCK=128)):  # noqa: B023
            return f"{length} x {dtype}: {wrong}"
        if out.tolist() != [3] * length:
            return f"{length} x {dtype}: wrong values"
    return ""


def torch_works() -> list[str]:
    """What torch computes wrongly, or not at all: each operation by name, length and dtype."""
    wrong = []
    for length, dtype in itertools.product(LENGTHS, (torch.int64, torch.int32, torch.bool, torch.float16)):
        cycle = [(index * 37) % 11 - 5 for index in range(length)]  # sums to 0 every 11: exact in float16
        values = [value > 0 for value in cycle] if dtype is torch.bool else cycle
        given = torch.tensor(values, dtype=dtype, device="cuda")
        operations: dict[str, tuple[Callable[[], torch.Tensor], list[Any]]] = {
            "arange": (lambda: torch.arange(length, device="cuda"), list(range(length))),  # noqa: B023
            "clone": (lambda: given.clone(), values),  # noqa: B023
            "to the host": (lambda: given.cpu(), values),  # noqa: B023
            "slice": (lambda: given[1:].clone(), values[1:]),  # noqa: B023
            "cat": (lambda: torch.cat([given, given[:1], given[1:]]), values + values),  # noqa: B023
            "sort": (lambda: torch.sort(given).values, sorted(values)),  # noqa: B023
            "unique": (lambda: torch.unique(given), sorted(set(values))),  # noqa: B023
            "cumsum": (lambda: torch.cumsum(given, 0), list(itertools.accumulate(values))),  # noqa: B023
            "nonzero": (
                lambda: torch.nonzero(given).flatten(),  # noqa: B023
                [index for index, value in enumerate(values) if value],
            ),
            "to int64": (lambda: given.to(torch.int64), [int(value) for value in values]),  # noqa: B023
        }
        for name, (run, expected) in operations.items():
            try:
                answer = run().tolist()
            except RuntimeError as error:
                wrong.append(f"{name} of {length} x {dtype}: {str(error).splitlines()[0]}")
                if fault(lambda: None):
                    return wrong  # the context is lost
            else:
                if answer != expected:
                    wrong.append(f"{name} of {length} x {dtype}: {answer[:8]}, expected {expected[:8]}")
    return wrong


def places() -> dict[str, Any]:
    """Where tensors stand on either side, what new memory holds, and what was counted."""
    before = fence.allocations()
    answer: dict[str, Any] = {"end": [], "begin": []}
    for side in fence.SIDES:
        fence.install(side, CACHE)
        for length, dtype in ((5, torch.int64), (3, torch.int32), (GRANULE, torch.int8), (1, torch.bool)):
            new = torch.empty(length, dtype=dtype, device="cuda")
            answer[side].append((new.data_ptr() + (side == "end") * new.nbytes) % GRANULE)
    answer["filled"] = torch.empty(3, dtype=torch.int64, device="cuda").tolist()
    answer["empty"] = torch.empty(0, device="cuda").tolist()
    answer["allocations"] = fence.allocations() - before
    return answer


def out_of_memory() -> list[Any]:
    """The error of a request for 512 GiB, and a sum made afterwards."""
    try:
        torch.empty(1 << 39, dtype=torch.int8, device="cuda")
    except RuntimeError as error:
        return [str(error).splitlines()[0], numbers(5).sum().item()]
    return ["no error", 0]


def after_a_fault() -> list[str]:
    """A fault, then the error of the next allocation; the tensors are freed in the lost context."""
    source, out = numbers(5), numbers(1)
    return [
        fault(lambda: read_kernel[(1,)](source, out, 5)),
        fault(lambda: torch.empty(5, device="cuda")),
    ]


def other_stream() -> list[Any]:
    """A tensor freed by its owner while a kernel on another stream has yet to read it."""
    source, out = numbers(5), numbers(1)
    read_kernel[(1,)](source, out, 3)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        read_kernel[(1,)](source, out, 4)
    del source
    return [fault(lambda: None), out.item()]


def too_late() -> str:
    torch.zeros(1, device="cuda")
    try:
        fence.install("end", CACHE)
    except InstrumentError as error:
        return str(error)
    return "no error"


CASES: dict[str, Callable[[], Any]] = {
    "read past": lambda: read_at(5),
    "read before": lambda: read_at(-1),
    "read last": lambda: read_at(4),
    "read first": lambda: read_at(0),
    "read slack": lambda: read_at(3, 3, torch.int32),
    "read past slack": lambda: read_at(4, 3, torch.int32),
    "discarded read past": discarded_read_past,
    "write past": lambda: write_at(5),
    "write before": lambda: write_at(-1),
    "write last": lambda: write_at(4),
    "write first": lambda: write_at(0),
    "read freed": read_freed,
    "in bounds": in_bounds,
    "torch works": torch_works,
    "places": places,
    "out of memory": out_of_memory,
    "after a fault": after_a_fault,
    "other stream": other_stream,
    "too late": too_late,
}


if __name__ == "__main__":
    if SIDE != "none":
        fence.install(SIDE, CACHE)
    print(json.dumps({case: CASES[case]() for case in sys.argv[3:]}), flush=True)
