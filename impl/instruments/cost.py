"""Hidden cost of one call on a GPU: waiting for the device, compiling a kernel anew, launching many.

    watch, warmth = CostWatch("cuda"), Warmth()     # one warmth per allocator
    with watch.call(warmth, batch=len(rows)) as account:
        target.extend(...)
    account.syncs, account.compiled, account.launches

Waiting is what torch's sync debug mode sees, in its mode "warn", which leaves the call as it is, and
`torch.cuda.synchronize`. Compiling is judged by the *variants* of a kernel that its launches use (Triton
keeps one compiled kernel per variant): what an allocator's calls have not used yet, they would compile or
load in a process of their own. So the verdict depends on the calls alone, not on what else the process or
the cache on disk has seen. On a CPU nothing is watched and nothing is patched.

Not covered: `Event.synchronize`, waiting inside other libraries and in torch.distributed or torch.sparse
(torch's mode does not see it), kernels launched by torch itself, kernels started through a compiled kernel's
own `[grid]`, and time: a call may be slow in other ways.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, TextIO

import torch

FRAMES_MAX: Final = 6
"""Frames in a stack text."""

_SYNC_WARNING: Final = "called a synchronizing CUDA operation"
_WARN, _DEFAULT = 1, 0


@dataclass(frozen=True, slots=True)
class Compilation:
    """A variant of a kernel that the allocator's calls had not used before.

    kernel: its function's name. stack: where it was launched. again: an earlier call with as large a batch
    (to the next power of two) had launched this kernel, so it was a length or an alignment that changed.
    """

    kernel: str
    stack: str
    again: bool


@dataclass(slots=True, eq=False)
class Account:
    """What one call cost. syncs: stacks of its waits, innermost frame first. launches: of Triton kernels,
    compiled ones. lost_in: the kernel behind which the device was gone, "torch" for other work, "" when it is
    not gone or nobody knows."""

    syncs: list[str] = field(default_factory=list)
    compiled: list[Compilation] = field(default_factory=list)
    launches: int = 0
    lost_in: str = ""


class Warmth:
    """What the calls of one allocator have compiled so far."""

    __slots__ = ("launched", "variants")

    def __init__(self) -> None:
        self.launched: set[tuple[Any, int, Any]] = set()
        """Kernels, each with the size class of a batch that it was launched for, and with the page size that
        was compiled in: an allocator of two pools may have two."""
        self.variants: set[Any] = set()
        """Compiled kernels. Held on to, so that no other gets their identity."""


class CostWatch:
    """Watches calls in this process between `install()` and `uninstall()`; on a CPU there is nothing to do.

    attribute: wait for the device before and after every Triton launch of a call, so that a fault shows at
    the kernel it happened in (`Account.lost_in`). Slow, and for memory that faults (`fence`).
    """

    def __init__(self, device: str, *, attribute: bool = False) -> None:
        self._active = device.startswith("cuda")
        self._attribute = attribute
        self._call: _Call | None = None
        self._kernels: Any = None
        self._run: Callable[..., Any] | None = None
        self.account = Account()
        """Of the latest call."""
        self._idle = nullcontext(self.account)

    def install(self) -> None:
        """Patches `JITFunction.run` of Triton, where Triton is. Starts CUDA."""
        if not self._active:
            return
        with warnings.catch_warnings():  # torch says once that its mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(_WARN)
            torch.cuda.set_sync_debug_mode(_DEFAULT)
        try:
            from triton.runtime.jit import JITFunction
        except ImportError:
            return
        self._kernels, self._run = JITFunction, JITFunction.run
        JITFunction.run = self._run_method(JITFunction.run)

    def uninstall(self) -> None:
        """Puts Triton back as `install()` found it. Does nothing if not installed."""
        if self._kernels is not None:
            self._kernels.run = self._run
            self._kernels = None

    def call(
        self, warmth: Warmth | None = None, *, syncs: bool = True, batch: int = 1
    ) -> AbstractContextManager[Account]:
        """Account for the block. Calls do not nest.

        warmth: of the allocator that is called; None for one that has just been made. syncs: whether waits
        are looked for. batch: rows in the call.
        """
        if not self._active:
            return self._idle
        call = _Call(self, Warmth() if warmth is None else warmth, syncs, batch)
        self.account = call.account
        return call

    def running(self, call: _Call | None) -> None:
        """Launches from now on belong to this call."""
        self._call = call

    def _run_method(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None:
                return run(kernel, *args, **kwargs)
            name = kernel.fn.__name__
            if not self._attribute:
                variant = run(kernel, *args, **kwargs)
            else:
                _settle(call.account, "torch")
                try:
                    variant = run(kernel, *args, **kwargs)
                finally:
                    _settle(call.account, name)
            page_size = _page_size(kernel, args, kwargs)
            call.launched(kernel.fn, name, variant, page_size, warmup=kwargs.get("warmup", False))
            return variant

        return watched


def _page_size(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The page size that a launch passes, by the name of the kernel's parameter; None where it has none."""
    for index, name in enumerate(kernel.arg_names):
        if name.lower() == "page_size":
            return args[index] if index < len(args) else kwargs.get(name)
    return None


class _Call(AbstractContextManager[Account]):
    """One call while it is being made."""

    def __init__(self, watch: CostWatch, warmth: Warmth, syncs: bool, batch: int) -> None:
        self.account = Account()
        self._watch = watch
        self._warmth = warmth
        self._syncs = syncs
        self._size_class = (batch - 1).bit_length() if batch else -1
        self._launched: set[tuple[Any, int, Any]] = set()
        self._caller: FrameType | None = None

    def __enter__(self) -> Account:
        self._caller = sys._getframe(1)
        if self._syncs:
            self._listen()
        self._watch.running(self)
        return self.account

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._watch.running(None)
        if self._syncs:
            torch.cuda.set_sync_debug_mode(_DEFAULT)
            torch.cuda.synchronize = self._synchronize
            self._warnings.__exit__(kind, error, at)
        self._warmth.launched |= self._launched
        self._caller = None

    def launched(self, function: Any, name: str, variant: Any, page_size: Any, *, warmup: bool) -> None:
        """A kernel's function was launched (or only compiled, in a warm-up), in this variant."""
        self.account.launches += not warmup
        key = (function, self._size_class, page_size)
        if variant is not None and variant not in self._warmth.variants:
            self._warmth.variants.add(variant)
            again = key in self._warmth.launched
            self.account.compiled.append(Compilation(name, self._stack(), again))
        self._launched.add(key)

    def _listen(self) -> None:
        """Hear of waits: torch's warnings, whatever filters are set, and `torch.cuda.synchronize`."""
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.filterwarnings("always", message=_SYNC_WARNING)
        self._show = warnings.showwarning
        warnings.showwarning = self._show_warning
        self._synchronize = torch.cuda.synchronize
        torch.cuda.synchronize = self._heard_synchronize
        torch.cuda.set_sync_debug_mode(_WARN)

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message).startswith(_SYNC_WARNING):
            self.account.syncs.append(self._stack())
        else:
            self._show(message, category, filename, lineno, file, line)

    def _heard_synchronize(self, *args: Any, **kwargs: Any) -> None:
        self.account.syncs.append(self._stack())
        self._synchronize(*args, **kwargs)

    def _stack(self) -> str:
        """Where the call is now: frames of the target's code only."""
        frames: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._caller and len(frames) < FRAMES_MAX:
            code = frame.f_code
            if not code.co_filename.startswith(_foreign()):
                frames.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return " < ".join(frames)


_settle_device = torch.cuda.synchronize
"""Taken before anything is patched: the harness's own waits are not the target's."""


def _settle(account: Account, whose: str) -> None:
    """Wait for the device. When that fails, and nothing has before, it was this work."""
    try:
        _settle_device()
    except Exception:
        account.lost_in = account.lost_in or whose
        raise


def _foreign() -> tuple[str, ...]:
    """How the file names of code that is nobody's allocator begin: instruments, warnings, torch, Triton."""
    triton = getattr(sys.modules.get("triton"), "__file__", None)
    folders = [f"{Path(file).parent}/" for file in (__file__, torch.__file__, triton) if file]
    return (warnings.__file__, *folders)
