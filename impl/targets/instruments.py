"""The instruments of one process: guarded outputs and watched cost always, the others as the ticket says.

`torch.empty`, Triton's interpreter and CUDA's allocator are patched for the whole process, so there is one
set of instruments in it, whichever target asks first.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvproof.impl.instruments import fence
from kvproof.impl.instruments.audit import Auditor
from kvproof.impl.instruments.cost import Account, CostWatch, Warmth
from kvproof.impl.instruments.findings import CallAudit, InstrumentError
from kvproof.impl.instruments.guards import OutputGuard
from kvproof.impl.targets.protocol import Damage, Ticket
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.fetch import cache_dir
from kvproof.model.errors import InfrastructureError

if TYPE_CHECKING:
    from kvproof.impl.instruments.sanitizer import SanitizerLog

LAUNCHES_MAX: Final = 4
"""Triton launches in one call, whatever the batch: one for each of two paired pools, and one each for the
mapping between them. A number that grows with the batch passes it at five rows."""

_MOST_DAMAGE = 8
_RECOMPILED = "compiled again, though launched before for as large a batch: a length or alignment changed"


class Watch:
    """Watches calls. `open()` around one call of the contract with its tensors, `call()` inside it around the
    allocator's method alone, then `read()` what it returned.

    fenced: memory faults in hardware, so no guard words stand in the way, and every launch is waited for.
    sanitizer, sanitizer_log: as in a ticket. memcheck knows where tensors end, so guard words would only hide
    that; initcheck asks what nobody has written, so nothing is poisoned for it.
    """

    def __init__(self, *, fenced: bool = False, sanitizer: str = "", sanitizer_log: str = "") -> None:
        self.fenced = fenced
        self.sanitizer_log = sanitizer_log
        self._guard = OutputGuard(words=0) if fenced or sanitizer else OutputGuard()
        self._guard.install()
        self._guards = sanitizer != "initcheck"
        self._log = _sanitizer_log(sanitizer_log) if sanitizer_log else None
        self._auditor: Auditor | None = None
        self._audit: CallAudit | None = None
        self._device = "cpu"
        self._cost = CostWatch("cpu")
        self._installed = True
        self._method = ""

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

    def watch_device(self, device: str) -> None:
        """From the next call on, watch what calls cost on this device as well. That starts CUDA, which must
        not be before: a process that has started it cannot fork others that use it."""
        if device != self._device:
            self._device = device
            self._cost = CostWatch(device, attribute=self.fenced)
            self._installed = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the call made inside."""
        if not self._installed:
            self._cost.install()
            self._installed = True
        self._method = ""
        if not self._guards:
            yield
        elif self._auditor is None:
            with self._guard.call():
                yield
        else:
            with self._guard.call(), self._auditor.call() as self._audit:
                yield

    def call(
        self, method: str, warmth: Warmth, *, sync_free: bool, batch: int
    ) -> AbstractContextManager[Account]:
        """Watch what the allocator's method, and nothing else, costs. Inside `open()`.

        warmth: the allocator's own. sync_free: to wait for the device is damage. batch: rows in the call.
        """
        self._method = method
        return self._cost.call(warmth, syncs=sync_free, batch=batch)

    def settle(self) -> None:
        """Wait for the device, so that what the call did to it shows now. Raises what the device raises."""
        if self._device != "cpu":
            torch.cuda.synchronize()

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
        damage.extend(self.reports())
        del damage[_MOST_DAMAGE:]
        return values, (*damage, *self._costs())

    def reports(self) -> list[Damage]:
        """What compute-sanitizer has written since it was last asked. Asks nothing of the device."""
        if self._log is None:
            return []
        return [Damage(report.kind, report.kernel, report.detail) for report in self._log.read()]

    @property
    def lost_in(self) -> str:
        """Whose work the device was lost in, when that is known: a kernel's name, or "torch"."""
        if self.fenced and self._method:
            return self._cost.account.lost_in or "torch"
        return ""

    def _costs(self) -> Iterator[Damage]:
        """What the call cost that it should not have. Its stack has the innermost frame first."""
        if not self._method:
            return
        account = self._cost.account
        for stack in account.syncs[:1]:
            detail = f"documented not to wait for the device, but does at {stack}"
            yield Damage("synchronised", self._method, detail)
        # A fence or a tool changes what pointers are aligned to, and with it what is compiled.
        if not self.fenced and self._log is None:
            told: set[str] = set()
            for one in account.compiled:
                if one.again and one.kernel not in told:
                    told.add(one.kernel)
                    yield Damage("recompiled", one.kernel, f"{_RECOMPILED}; launched at {one.stack}")
        launches = account.launches + (0 if self._audit is None else len(self._audit.launches))
        if launches > LAUNCHES_MAX:
            yield Damage("launches", self._method, f"{launches} launches in one call; at most {LAUNCHES_MAX}")


def _sanitizer_log(path: str) -> "SanitizerLog":
    # Imported late: few processes run under the tool.
    from kvproof.impl.instruments.sanitizer import SanitizerLog

    return SanitizerLog(Path(path))


_watch: Watch | None = None


def process_watch(ticket: Ticket) -> Watch:
    """The watch of this process; audited, and watching a GPU, from the first time anybody asks for it.

    Raises InfrastructureError for an instrument that cannot be had here, and when the process is fenced (or
    run under a sanitizer) and a ticket for its GPU is not, or the reverse.
    """
    global _watch
    install_fence(ticket)
    fenced = bool(ticket.fence)
    if _watch is None:
        _watch = Watch(fenced=fenced, sanitizer=ticket.sanitizer, sanitizer_log=ticket.sanitizer_log)
    elif ticket.device != "cpu" and (_watch.fenced, _watch.sanitizer_log) != (fenced, ticket.sanitizer_log):
        raise InfrastructureError("fenced and sanitized targets need a process of their own, from its start")
    if ticket.audited:
        _watch.audit()
    if ticket.device != "cpu":
        _watch.watch_device(ticket.device)
    return _watch


def install_fence(ticket: Ticket) -> None:
    """Fence CUDA's memory when the ticket asks for it: before anything uses CUDA, a target's imports too.

    Raises InfrastructureError where that cannot be.
    """
    if not ticket.fence:
        return
    try:
        fence.install(ticket.fence, cache_dir())
    except (InstrumentError, SglangUnavailable) as error:
        raise InfrastructureError(f"memory cannot be fenced here: {error}") from None


def interpreter_on() -> bool:
    """Whether Triton, when imported, interprets kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "True", "on")
