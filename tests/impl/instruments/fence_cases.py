"""What the fence does, on the stub driver of `fence_stub.c`: run by test_fence.py, one process a case.

`python fence_cases.py CASE LIBRARY DRIVER` prints "done" when every assertion of the case held. Accesses that
must die are made in forked children. torch is not imported. Not here: the fence on a GPU; see
`fence_gpu_cases`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvproof.impl.instruments import fence

FILLED = b"\xa5"
GRANULE = int(os.environ.get("STUB_GRANULE", 2 << 20))
FREED_MAX, SPARE_MAX = 4096, 64  # of fence.c
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
SIZES = [8, 16, 24, 1000, GRANULE - 8, GRANULE, GRANULE + 8, 3 * GRANULE]

library: Any
stub: Any


def alloc(size: int, device: int = 0) -> int | None:
    return library.kvproof_fence_alloc(size, device, None)


def free(pointer: int | None, device: int = 0) -> None:
    library.kvproof_fence_free(pointer, 0, device, None)


def made(size: int) -> int:
    pointer = alloc(size)
    assert pointer is not None
    return pointer


def read(address: int) -> None:
    ctypes.string_at(address, 1)


def write(address: int) -> None:
    ctypes.memset(address, 7, 1)


def how_ends(access: Callable[[int], None], address: int) -> int:
    """0 when the access works, else minus the signal that a process dies of."""
    child = os.fork()
    if child == 0:
        access(address)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_bounds(first: int, last: int) -> None:
    """The bytes `first` and `last` can be used, the ones before and after cannot."""
    for access in (read, write):
        assert how_ends(access, first) == 0
        assert how_ends(access, last) == 0
        assert how_ends(access, first - 1) == -signal.SIGSEGV
        assert how_ends(access, last + 1) == -signal.SIGSEGV


def mapped(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def past_the_end() -> None:
    for size in SIZES:
        pointer = made(size)
        assert pointer % 8 == 0
        check_bounds(pointer + size - mapped(size), pointer + size - 1)


def before_the_beginning() -> None:
    library.kvproof_fence_side(1)
    for size in [*SIZES, 1, 12]:
        pointer = made(size)
        assert pointer % GRANULE == 0
        check_bounds(pointer, pointer + mapped(size) - 1)


def sides_take_turns() -> None:
    for begin in (0, 1, 0):
        library.kvproof_fence_side(begin)
        pointers = [made(24), made(24)]
        assert [pointer % GRANULE for pointer in pointers] == [0 if begin else GRANULE - 24] * 2
        library.kvproof_fence_side(1 - begin)
        for pointer in pointers:
            free(pointer)
            assert how_ends(read, pointer) == -signal.SIGSEGV


def slack_of_small_elements() -> None:
    for size in [1, 2, 4, 7, 9, 12, 4097]:
        pointer = made(size)
        slack = -size % 8
        assert pointer % 8 == 0
        assert how_ends(read, pointer + size - 1 + slack) == 0
        assert how_ends(read, pointer + size + slack) == -signal.SIGSEGV


def use_after_free() -> None:
    pointers = [made(size) for size in SIZES]
    for pointer in pointers:
        free(pointer)
    for _ in range(FREED_MAX // 2):
        free(made(8))
    for pointer in pointers:
        assert how_ends(read, pointer) == -signal.SIGSEGV
        assert how_ends(write, pointer) == -signal.SIGSEGV


def new_memory_is_filled() -> None:
    for _ in range(2):
        for size in SIZES:
            pointer = made(size)
            assert ctypes.string_at(pointer, size) == FILLED * size
            ctypes.memset(pointer, 0, size)
            free(pointer)


def nothing_and_nonsense() -> None:
    assert alloc(0) is None
    assert alloc(-1) is None
    assert alloc((1 << 63) - 1) is None
    assert alloc(8, device=-1) is None
    assert alloc(8, device=2) is None
    assert alloc(8, device=1000) is None
    free(None)
    free(12345678)
    assert library.kvproof_fence_allocations() == 0
    pointer = made(8)
    free(pointer)
    free(pointer)
    assert library.kvproof_fence_allocations() == 1
    assert (stub.stub_ranges(), stub.stub_depth()) == (1, 0)


def many_pairs() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(10_000):
        pointer = made(8 + number % 5000)
        assert stub.stub_ranges() <= FREED_MAX + 1
        assert stub.stub_memories() <= SPARE_MAX + 1
        free(pointer)
    assert library.kvproof_fence_allocations() == 10_000
    assert stub.stub_ranges() == FREED_MAX
    assert stub.stub_memories() <= 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


def many_at_once() -> None:
    pointers = [made(8) for _ in range(2 * FREED_MAX)]
    assert len(set(pointers)) == 2 * FREED_MAX
    assert stub.stub_memories() == stub.stub_ranges() == 2 * FREED_MAX
    for pointer in pointers:
        free(pointer)
    assert (stub.stub_ranges(), stub.stub_memories()) == (FREED_MAX, SPARE_MAX)
    for _ in range(SPARE_MAX):
        made(8)
    assert stub.stub_creates() == 2 * FREED_MAX  # the spares were used


def threads() -> None:
    wrong: list[str] = []

    def work(mark: int) -> None:
        for _ in range(2000):
            pointers = [made(size) for size in (8, 24, 5000)]
            for pointer in pointers:
                if ctypes.string_at(pointer, 8) != FILLED * 8:
                    wrong.append("not filled")
                ctypes.memset(pointer, mark, 8)
            for pointer in pointers:
                if ctypes.string_at(pointer, 8) != bytes([mark]) * 8:
                    wrong.append("not its own")
                free(pointer)
        if stub.stub_depth() != 0:
            wrong.append("left a context behind")

    workers = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert library.kvproof_fence_allocations() == 2 * 2000 * 3
    assert stub.stub_ranges() == FREED_MAX


def failures_leak_nothing() -> None:
    pointer = made(8)
    calls = ["cuCtxPushCurrent_v2", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    for call in [*calls, "cuMemsetD8Async"]:
        for error in (OUT_OF_MEMORY, ILLEGAL_ADDRESS):
            for size in (8, 3 * GRANULE):
                stub.stub_fail(call.encode(), error, -1)
                assert alloc(size) is None, call
                assert stub.stub_ranges() == 1, call
                assert stub.stub_memories() <= 2, call  # what `pointer` has, and a spare
                assert stub.stub_depth() == 0, call
    stub.stub_fail(b"", 0, 0)
    free(made(3 * GRANULE))
    free(pointer)
    assert (stub.stub_ranges(), stub.stub_memories()) == (2, 2)


def first_look_may_fail() -> None:
    for call in ("cuDeviceGet", "cuMemGetAllocationGranularity", "cuDevicePrimaryCtxRetain"):
        stub.stub_fail(call.encode(), OUT_OF_MEMORY, 1)
        assert alloc(8) is None, call
    free(made(8))
    assert (stub.stub_retains(0), stub.stub_retains(1)) == (1, 0)


def room_is_made() -> None:
    for pointer in [made(8) for _ in range(100)]:
        free(pointer)
    assert (stub.stub_memories(), stub.stub_ranges()) == (SPARE_MAX, 100)
    stub.stub_fail(b"cuMemCreate", OUT_OF_MEMORY, 1)
    made(2 * GRANULE)
    assert (stub.stub_memories(), stub.stub_ranges()) == (1, 101)
    stub.stub_fail(b"cuMemAddressReserve", OUT_OF_MEMORY, 30)
    made(2 * GRANULE)
    assert (stub.stub_memories(), stub.stub_ranges()) == (2, 101 - 30 + 1)
    stub.stub_fail(b"cuMemAddressReserve", OUT_OF_MEMORY, 1000)
    assert alloc(8) is None
    assert stub.stub_ranges() == 2  # of what lives
    stub.stub_fail(b"", 0, 0)
    for pointer in [made(8) for _ in range(FREED_MAX + 10)]:
        free(pointer)
    assert stub.stub_ranges() == 2 + FREED_MAX


def lost_context() -> None:
    pointers = [made(8) for _ in range(100)]
    stub.stub_fail(b"*", ILLEGAL_ADDRESS, -1)
    for pointer in pointers[:50]:
        free(pointer)
    assert alloc(8) is None
    for call in (b"cuCtxSynchronize", b"cuMemUnmap"):
        stub.stub_fail(call, ILLEGAL_ADDRESS, -1)
        for pointer in pointers[50:60]:
            free(pointer)
        assert stub.stub_depth() == 0
    free(pointers[70])


def devices_and_contexts() -> None:
    first, second = alloc(8, device=0), alloc(8, device=1)
    assert (stub.stub_retains(0), stub.stub_retains(1)) == (1, 1)
    thread = threading.Thread(target=lambda: (free(second, device=1), free(first, device=0)))
    thread.start()
    thread.join()
    assert stub.stub_depth() == 0
    assert (stub.stub_retains(0), stub.stub_retains(1)) == (1, 1)
    assert stub.stub_memories() == 2


def failures_are_thrown() -> None:
    """`fence_catch.cpp` stands for torch: it calls the allocator from C++ and catches."""
    catch = ctypes.CDLL(sys.argv[4]).caught
    catch.restype = ctypes.c_char_p
    library.kvproof_fence_throw(fence.thrower())

    def caught(size: int, device: int = 0) -> str:
        return catch(library.kvproof_fence_alloc, ctypes.c_ssize_t(size), ctypes.c_int(device)).decode()

    assert caught(0) == caught(8) == ""
    stub.stub_fail(b"cuMemCreate", OUT_OF_MEMORY, -1)
    size = 9 * GRANULE
    assert caught(size) == f"CUDA out of memory (fence: cuMemCreate, for {size} bytes on device 0)"
    stub.stub_fail(b"cuMemsetD8Async", ILLEGAL_ADDRESS, -1)
    what = "an illegal memory access was encountered"
    assert caught(8) == f"CUDA error: {what} (fence: cuMemsetD8Async, for 8 bytes on device 0)"
    assert caught(-5) == "CUDA error: unknown error (fence: size, for -5 bytes on device 0)"
    assert caught(1 << 60) == f"CUDA out of memory (fence: size, for {1 << 60} bytes on device 0)"
    assert caught(8, 77) == "CUDA error: unknown error (fence: device, for 8 bytes on device 77)"
    stub.stub_fail(b"", 0, 0)
    free(made(8))  # no lock was left held


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        past_the_end,
        before_the_beginning,
        sides_take_turns,
        slack_of_small_elements,
        use_after_free,
        new_memory_is_filled,
        nothing_and_nonsense,
        many_pairs,
        many_at_once,
        threads,
        failures_leak_nothing,
        first_look_may_fail,
        room_is_made,
        lost_context,
        devices_and_contexts,
        failures_are_thrown,
    )
}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = fence.load(Path(sys.argv[2]), sys.argv[3])
    stub = ctypes.CDLL(sys.argv[3])
    stub.stub_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    CASES[sys.argv[1]]()
    print("done")
