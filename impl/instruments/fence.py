"""The fence: device memory in which one element too far faults in hardware, on the real compiled kernels.

`install` makes it torch's CUDA allocator for the process. Every allocation becomes a mapping of its own
between two unmapped granules (2 MiB); `side` says at which of them the tensor stands. An access outside is an
illegal memory access, also when its result is thrown away, and so is one after the free; it ends the CUDA
context of the process. At side "end" the fence stands exactly behind tensors of 8-byte elements, and up to 7
bytes behind others, since addresses stay multiples of 8. New memory is filled with 0xA5. An allocation and
its free cost tens of microseconds, and every free waits for the device.

The allocator itself is `fence.c` beside this file, compiled once per machine with the compiler that is there.

Not covered: which kernel or element faulted (CUDA does not say), strays that land inside another tensor or
in the up to 2 MiB of slack at the other side, capture into CUDA graphs, and access from another GPU. torch's
memory statistics do not exist under a pluggable allocator.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from .findings import InstrumentError

SIDES: Final = ("end", "begin")
"""Where a tensor stands in its mapping: its last byte is the last mapped one, or its first the first."""

_SOURCE = Path(__file__).with_name("fence.c")
_COMPILERS = ("cc", "gcc", "clang", "nvcc")
_COMPILE_TIMEOUT_S = 300
# -fexceptions: a failed allocation is thrown through the C code into torch, which tells Python.
_HOST_FLAGS = ("-std=c11", "-fPIC", "-fexceptions")
_LIBRARIES = ("-ldl", "-lpthread")

_installed: ctypes.CDLL | None = None


def build(cache: Path) -> Path:
    """The compiled allocator under `cache`, compiled unless it is there already.

    The file's name holds a hash of source, compiler and machine. It appears in one rename, so any number of
    processes may build at once. Runs no compiler when the file is there. Raises `InstrumentError` with one
    line when there is no compiler, when compiling fails, or when `cache` cannot be written.
    """
    compiler = _compiler()
    source = _SOURCE.read_bytes()
    library = cache / "fence" / f"fence-{_fingerprint(source, compiler)}.so"
    if library.is_file():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as work:
            copy, made = Path(work, _SOURCE.name), Path(work, library.name)
            copy.write_bytes(source)
            _compile(compiler, copy, made)
            os.replace(made, library)
    except OSError as error:
        raise InstrumentError(
            f"the fence cannot be built in {library.parent}: {error.strerror};"
            " set KVPROOF_CACHE to a writable folder"
        ) from error
    return library


def _compiler() -> list[str]:
    """Command line of the compiler: `CC` if set, else the first of the usual names."""
    named = os.environ.get("CC", "")
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise InstrumentError(f"CC={named!r} is no command line: {error}; correct or unset it") from error
    for name in words[:1] or _COMPILERS:
        if (path := shutil.which(name)) is not None:
            return [path, *words[1:]]
    if words:
        raise InstrumentError(f"no C compiler: CC={named!r} is not there; install gcc or clang, or unset CC")
    raise InstrumentError("no C compiler: install gcc or clang, or set CC")


def _fingerprint(source: bytes, compiler: list[str]) -> str:
    """16 hex digits for what the compiled file depends on. A compiler is told by its file's size and date."""
    stat = os.stat(compiler[0])
    machine = (sys.platform, platform.machine(), *platform.libc_ver())
    parts = (*compiler, stat.st_size, stat.st_mtime_ns, *machine, *_HOST_FLAGS, *_LIBRARIES)
    return hashlib.sha256(repr(parts).encode() + source).hexdigest()[:16]


def _compile(compiler: list[str], source: Path, made: Path) -> None:
    """Compile `source` to the shared library `made`. Raises `InstrumentError` when that fails."""
    flags = list(_HOST_FLAGS)
    if Path(compiler[0]).name.startswith("nvcc"):
        flags = ["-cudart", "none", f"-Xcompiler={','.join(flags)}"]
    command = [*compiler, "-O2", "-shared", *flags, "-o", str(made), str(source), *_LIBRARIES]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise InstrumentError(
            f"the C compiler {compiler[0]} does not run: {error.strerror}; set CC to another"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise InstrumentError(
            f"the C compiler {compiler[0]} was not done after {_COMPILE_TIMEOUT_S} s; set CC to another"
        ) from error
    if done.returncode or not made.is_file():
        said = (done.stderr + done.stdout).decode(errors="replace").splitlines()
        lines = [line.strip() for line in said if line.strip()]
        why = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
        raise InstrumentError(
            f"the C compiler {compiler[0]} failed with status {done.returncode}: {why}; set CC to another"
        )


def load(library: Path, driver: str = "libcuda.so.1") -> ctypes.CDLL:
    """The compiled allocator, bound to the CUDA driver of that name; its functions are declared in `fence.c`.

    Raises `InstrumentError` when the file cannot be loaded or the driver is missing or too old.
    """
    try:
        fence = ctypes.CDLL(str(library))
    except OSError as error:
        raise InstrumentError(
            f"the fence cannot be loaded: {error}; set KVPROOF_CACHE to a folder that allows execution"
        ) from error
    fence.kvproof_fence_open.argtypes = [ctypes.c_char_p]
    fence.kvproof_fence_open.restype = ctypes.c_char_p
    fence.kvproof_fence_side.argtypes = [ctypes.c_int]
    fence.kvproof_fence_side.restype = None
    fence.kvproof_fence_throw.argtypes = [ctypes.c_void_p]
    fence.kvproof_fence_throw.restype = None
    fence.kvproof_fence_allocations.argtypes = []
    fence.kvproof_fence_allocations.restype = ctypes.c_ulonglong
    fence.kvproof_fence_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    fence.kvproof_fence_alloc.restype = ctypes.c_void_p
    fence.kvproof_fence_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    fence.kvproof_fence_free.restype = None
    wrong = fence.kvproof_fence_open(driver.encode())
    if wrong is not None:
        raise InstrumentError(
            f"no CUDA driver: {wrong.decode(errors='replace')}; the fence needs an NVIDIA GPU"
        )
    return fence


def thrower() -> int:
    """Address of the C++ library's function that throws `std::runtime_error`; torch makes it RuntimeError."""
    function = ctypes.CDLL("libstdc++.so.6")._ZSt21__throw_runtime_errorPKc
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def install(side: str, cache: Path) -> None:
    """Make the fence torch's CUDA allocator for the rest of this process; later calls only switch the side.

    Failed allocations raise RuntimeError: "CUDA out of memory (fence: …)", or "CUDA error: …". Raises
    `InstrumentError` when CUDA is in use already, when torch has no CUDA or another allocator already, and
    for what `build` and `load` say; ValueError when `side` is not one of SIDES.
    """
    global _installed
    _check(side)
    if _installed is None:
        # Imported late: everything else here does without torch.
        import torch

        if torch.version.cuda is None:
            raise InstrumentError(f"torch {torch.__version__} has no CUDA; install a CUDA build of torch")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise InstrumentError("CUDA is in use already in this process; install the fence before that")
        library = build(cache)
        fence = load(library)
        fence.kvproof_fence_throw(thrower())
        memory = torch.cuda.memory
        try:
            memory.change_current_allocator(
                memory.CUDAPluggableAllocator(str(library), "kvproof_fence_alloc", "kvproof_fence_free")
            )
        except RuntimeError as error:
            raise InstrumentError(f"torch does not take the fence as its allocator: {error}") from error
        _installed = fence
    set_side(side)


def set_side(side: str) -> None:
    """Where tensors allocated from now on stand: one of SIDES, else ValueError. Needs `install`."""
    _check(side)
    if _installed is None:
        raise InstrumentError("the fence is not installed in this process; call install first")
    _installed.kvproof_fence_side(SIDES.index(side))


def allocations() -> int:
    """Allocations that the fence has made in this process; empty tensors need none. 0 before `install`."""
    return 0 if _installed is None else int(_installed.kvproof_fence_allocations())


def _check(side: str) -> None:
    if side not in SIDES:
        raise ValueError(f"side must be one of {SIDES}, not {side!r}")
