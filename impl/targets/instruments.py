"""The instruments of one process: guarded outputs always, audited kernels on request.

`torch.empty` and Triton's interpreter are patched for the whole process, so there is one set of instruments
in it, whichever target asks first.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvproof.impl.instruments.audit import Auditor
from kvproof.impl.instruments.findings import CallAudit, InstrumentError
from kvproof.impl.instruments.guards import OutputGuard
from kvproof.impl.targets.protocol import Damage
from kvproof.model.errors import InfrastructureError

_MOST_DAMAGE = 8


class Watch:
    """Watches calls. `open()` around a call, then `read()` what it returned."""

    def __init__(self) -> None:
        self._guard = OutputGuard()
        self._guard.install()
        self._auditor: Auditor | None = None
        self._audit: CallAudit | None = None

    def audit(self) -> None:
        """From now on, check every memory access of every kernel. Raises InfrastructureError where Triton's
        interpreter is not on or not known."""
        if self._auditor is not None:
            return
        auditor = Auditor(self._guard)
        try:
            auditor.install()
        except InstrumentError as error:
            raise InfrastructureError(f"the audited lane cannot run here: {error}") from None
        self._auditor = auditor

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the call made inside."""
        if self._auditor is None:
            with self._guard.call():
                yield
        else:
            with self._guard.call(), self._auditor.call() as self._audit:
                yield

    def read(self, output: torch.Tensor | None) -> tuple[list[int] | None, tuple[Damage, ...]]:
        """The values of what the call returned, and the damage seen in the call."""
        damage: list[Damage] = []
        values: list[int] | None = None
        if output is not None:
            report = self._guard.inspect(output)
            values = report.values
            if report.unwritten:
                detail = f"elements {list(report.unwritten[:8])} of {len(values)} were never written"
                damage.append(Damage("unwritten", "the output", detail))
        if self._guard.buffers:
            for word in self._guard.damaged():
                detail = f"element {word.offset} now holds {word.value}"
                damage.append(Damage("guard-words", "an output", detail))
        if self._audit is not None:
            for finding in self._audit.findings:
                # What of a discarded output was left unwritten is nobody's business.
                if finding.kind != "unwritten":
                    detail = str(finding).removeprefix(f"{finding.kind}: ")
                    damage.append(Damage(finding.kind, f"{finding.kernel}.{finding.argument}", detail))
        return values, tuple(damage[:_MOST_DAMAGE])


_watch: Watch | None = None


def process_watch(*, audited: bool) -> Watch:
    """The watch of this process; audited from the first time anybody asks for it."""
    global _watch
    if _watch is None:
        _watch = Watch()
    if audited:
        _watch.audit()
    return _watch


def interpreter_on() -> bool:
    """Whether Triton, when imported, interprets kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "True", "on")
