"""Our own allocators as targets: `kvproof` (the kernels where they can run) and `reference` (torch alone)."""

from dataclasses import replace

from kvproof.impl.targets import built
from kvproof.impl.targets.built import classes_of
from kvproof.impl.targets.instruments import interpreter_on, process_watch
from kvproof.impl.targets.protocol import Capabilities, Ticket
from kvproof.impl.targets.tensors import Surface, TensorSubject
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES


class Kvproof:
    """Factory and target in one."""

    name = release = "kvproof"
    classes = classes_of("kvproof.impl")
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

        kind = config.allocator
        surface = Surface(
            lambda config, device: built.construct(self.classes, config, device, kernels=self._kernels),
            cpu_lens=True,
            page_count=built.counts_pages(self.classes[kind]),
            lists=lambda allocator: built.state(allocator, kind),
            sides=lambda allocator: built.sides(allocator, kind),
            wraps=lambda allocator: built.wrapped(allocator, kind),
            sync_free=built.sync_free(config),
        )
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
