"""Our own allocators as targets: `kvproof` (the kernels where they can run) and `reference` (torch alone)."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.targets.instruments import interpreter_on, process_watch
from kvproof.impl.targets.protocol import Capabilities, State, Ticket
from kvproof.impl.targets.tensors import Surface, TensorSubject
from kvproof.impl.token import TokenToKVPoolAllocator
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES


@dataclass(frozen=True, slots=True)
class Classes:
    """The two allocator classes a target speaks to: ours, or those of a copy of our package (`planted`)."""

    token: type[TokenToKVPoolAllocator]
    paged: type[PagedTokenToKVPoolAllocator]


OURS: Final = Classes(TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)

# As `impl/base.py` says of itself: nothing waits for the device but a plain `free` at the paged allocator,
# which a group puts off to its end.
_EVERYWHERE: Final = frozenset(
    {
        "alloc",
        "alloc_extend",
        "alloc_decode",
        "free_segment",
        "free_segments",
        "free_page_ids",
        "free_group_begin",
        "clear",
        "resize",
    }
)
_SYNC_FREE: Final = {"paged": _EVERYWHERE, "token": _EVERYWHERE | {"free", "free_group_end"}}


def _construct(classes: Classes, config: Config, device: str, *, kernels: bool) -> Any:
    if config.allocator == "token":
        return classes.token(
            config.size, torch.float16, device, None, config.need_sort, checked=config.checked
        )
    allocator = classes.paged(
        config.size, config.page_size, torch.float16, device, None, config.need_sort, checked=config.checked
    )
    allocator.use_triton_kernels = kernels
    return allocator


def _lists(allocator: Any) -> State:
    staged = [page for ids in allocator.staged_pages for page in ids.tolist()]
    return State(allocator.free_pages.tolist(), staged)


class Kvproof:
    """Factory and target in one."""

    name = release = "kvproof"
    classes = OURS
    stood_in: tuple[str, ...] = ()
    capabilities = Capabilities(ALLOCATORS, exact=True, checked=True, refuses=frozenset(MISUSES))

    def __init__(self, ticket: Ticket) -> None:
        if ticket.spec:
            raise UserError(f"{self.name}{ticket.spec}: this target is the one installed; write {self.name}")
        self._ticket = ticket
        self._kernels = self._takes_kernels(ticket)
        if self._kernels and ticket.device == "cpu" and not interpreter_on():
            raise UserError(
                "kernels on the CPU need Triton's interpreter; set TRITON_INTERPRET=1, or use --path torch"
            )
        # Interpreted kernels are audited in any case: that launcher is also the faster one.
        audited = ticket.audited or (self._kernels and ticket.device == "cpu")
        self._watch = process_watch(replace(ticket, audited=audited))

    @staticmethod
    def _takes_kernels(ticket: Ticket) -> bool:
        return ticket.path == "kernels" or (ticket.path == "auto" and ticket.device != "cpu")

    @property
    def path(self) -> str:
        """See `protocol.Target`."""
        return "kernels" if self._kernels else "torch"

    def build(self, config: Config) -> TensorSubject:
        """See `protocol.Target`."""

        def construct(config: Config, device: str) -> Any:
            return _construct(self.classes, config, device, kernels=self._kernels)

        sync_free = _SYNC_FREE[config.allocator]
        surface = Surface(construct, cpu_lens=True, page_count=True, lists=_lists, sync_free=sync_free)
        return TensorSubject(surface, config, self._ticket.device, self._watch)

    def other_path(self) -> "Kvproof | None":
        """See `protocol.Target`."""
        if self._kernels:
            return Reference(replace(self._ticket, path="torch"))
        return None


class Reference(Kvproof):
    """The same allocators by plain torch, without kernels."""

    name = release = "reference"

    @staticmethod
    def _takes_kernels(ticket: Ticket) -> bool:
        if ticket.path == "kernels":
            raise UserError("the target reference has no kernels; use --path torch, or the target kvproof")
        return False
