"""The audited lane: every memory access of every Triton kernel checked, on a machine without a GPU.

    os.environ["TRITON_INTERPRET"] = "1"      # before the first import of triton
    guard, auditor = OutputGuard(), Auditor(guard)
    guard.install(), auditor.install()
    with guard.call(), auditor.call() as audit:
        target.extend(...)
    audit.findings

Kernels run in Triton's interpreter, one program after the other, over virtual memory (`memory`). An
access outside a tensor as it was passed (a slice ends where the slice ends) is reported and not
performed: a load gives a negative nonsense value, a store is dropped. A program with lanes that are
undefined is run once or twice more, off memory, to see whether it used them (`tape`). The process should
do nothing else with Triton.

Programs run in one order, the grid's: races are inferred from who touched what. Another order would find
nothing more. Where no two programs conflict, each reads only what was there before the launch and what it
wrote itself, so every order comes to the same; where two do, both orders are reported as one finding.
What this leaves open is kernels whose atomics hand out places in order of arrival.

Not covered: what `memory`, `tape` and `interpreter` list, and tensors that torch operations (not kernels)
read or write: a read by torch of an output that nobody has written goes unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from .findings import CallAudit, InstrumentError, MemoryFinding
from .guards import GuardedBuffer, OutputGuard
from .poison import Poisoned

if TYPE_CHECKING:
    from .interpreter import Interpreter

MAX_FINDINGS: Final = 64


class Auditor:
    """Audits launches in this process between `install()` and `uninstall()`.

    `guard`: whose buffers count as outputs that kernels must write; without one there are no
    `unwritten` and no `uninitialised-read` findings. Its `kernels_are_watched` is set while
    this is installed. `max_findings`: kept for each call.
    Launches outside a call run over virtual memory too; what is found there is forgotten.
    """

    def __init__(self, guard: OutputGuard | None = None, max_findings: int = MAX_FINDINGS) -> None:
        self._guard = guard
        self._max_findings = max_findings
        self._audit: CallAudit | None = None
        self._outputs: dict[int, tuple[GuardedBuffer, str, str, int]] = {}
        self._interpreter: Interpreter | None = None

    def install(self) -> None:
        """Patches Triton. InstrumentError if Triton or NumPy is missing, Triton was imported without
        TRITON_INTERPRET=1, its internals are not those known here, or an Auditor is installed."""
        if self._interpreter is not None:
            raise InstrumentError("this Auditor is already installed")
        try:
            from .interpreter import Interpreter
        except ImportError as error:
            raise InstrumentError(f"the audited lane needs NumPy: {error}") from error
        interpreter = Interpreter(self._current_audit, self._poisoned)
        interpreter.install()
        self._interpreter = interpreter
        if self._guard is not None:
            self._guard.kernels_are_watched = True

    def uninstall(self) -> None:
        """Puts Triton back as `install()` found it. Does nothing if not installed."""
        if self._interpreter is not None:
            self._interpreter.uninstall()
            self._interpreter = None
            if self._guard is not None:
                self._guard.kernels_are_watched = False

    @contextmanager
    def call(self) -> Iterator[CallAudit]:
        """Account for the launches of the block. Enter the guard's `call()` first, as in the head
        comment: `unwritten` elements are looked for when this block ends without an exception."""
        if self._interpreter is None or self._audit is not None:
            raise InstrumentError("Auditor.call() needs install() first and does not nest")
        audit = CallAudit(self._max_findings)
        self._audit = audit
        self._outputs = {}
        try:
            yield audit
            for buffer, kernel, argument, launch in self._outputs.values():
                _report_unwritten(audit, buffer, kernel, argument, launch)
        finally:
            self._audit = None

    def _current_audit(self) -> CallAudit:
        return CallAudit(0) if self._audit is None else self._audit

    def _poisoned(self, tensor: torch.Tensor, kernel: str, argument: str, launch: int) -> Poisoned | None:
        """What tells unwritten elements of `tensor`, if it is guarded and they can be told. Remembers the
        latest launch of an output of this call."""
        if self._guard is None or self._audit is None:
            return None
        poisoned = self._guard.poisoned(tensor)
        if poisoned is None or poisoned.dtype != tensor.dtype:
            return None
        buffer = self._guard.find(tensor)
        if buffer is not None:
            self._outputs[buffer.ordinal] = (buffer, kernel, argument, launch)
        return poisoned if poisoned.telling(tensor) else None


def _report_unwritten(
    audit: CallAudit, buffer: GuardedBuffer, kernel: str, argument: str, launch: int
) -> None:
    for offset in buffer.unwritten():
        audit.add(MemoryFinding("unwritten", kernel, argument, None, offset, buffer.numel, launch))
