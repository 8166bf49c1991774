"""The audited lane: every memory access of every Triton kernel checked, on a machine without a GPU.

    os.environ["TRITON_INTERPRET"] = "1"      # before the first import of triton
    guard, auditor = OutputGuard(), Auditor(guard)
    guard.install(), auditor.install()
    with guard.call(), auditor.call() as audit:
        target.extend(...)
    audit.findings

Kernels run in Triton's interpreter, one program after the other, over virtual memory (`memory`). An
access outside a tensor as it was passed (a slice ends where the slice ends) is reported and not
performed: a load gives a negative nonsense value, a store is dropped. The process should do nothing
else with Triton.

Not covered: what `memory` and `interpreter` list, tensors that torch operations (not kernels) read
or write, and orders of execution other than Triton's; races are inferred from who touched what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from .findings import CallAudit, InstrumentError, MemoryFinding
from .guards import GUARD_WORDS, GuardedBuffer, OutputGuard

if TYPE_CHECKING:
    from .interpreter import Interpreter

MAX_FINDINGS: Final = 64


class Auditor:
    """Audits launches in this process between `install()` and `uninstall()`.

    `guard`: whose buffers count as outputs that kernels must write; without one there are no
    `unwritten` and no `uninitialised-read` findings. `max_findings`: kept for each call.
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
        interpreter = Interpreter(self._current_audit, self._fresh_poison)
        interpreter.install()
        self._interpreter = interpreter

    def uninstall(self) -> None:
        """Puts Triton back as `install()` found it. Does nothing if not installed."""
        if self._interpreter is not None:
            self._interpreter.uninstall()
            self._interpreter = None

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

    def _fresh_poison(self, tensor: torch.Tensor, kernel: str, argument: str, launch: int) -> int | None:
        """If `tensor` is a guarded output of this call: its poison, and remember the latest launch."""
        buffer = None if self._guard is None or self._audit is None else self._guard.find(tensor)
        if buffer is None or buffer.base.dtype != tensor.dtype:
            return None
        self._outputs[buffer.ordinal] = (buffer, kernel, argument, launch)
        return buffer.poison


def _report_unwritten(
    audit: CallAudit, buffer: GuardedBuffer, kernel: str, argument: str, launch: int
) -> None:
    values = buffer.base.tolist()[GUARD_WORDS : GUARD_WORDS + buffer.numel]
    for offset, value in enumerate(values):
        if value == buffer.poison:
            audit.add(MemoryFinding("unwritten", kernel, argument, None, offset, buffer.numel, launch))
