"""The witness: told what is about to run, before it runs.

A call that kills its process leaves nobody to say which call it was. A worker process installs one witness
(its journal, `kvproof.ci.journal`), and every lockstep of the process tells it each allocator and each op
first. Process-wide, as the instruments are: whatever runs a trace, drawn, varied, replayed or shrunk, is
witnessed.
"""

from typing import Protocol

from kvproof.model.config import Config
from kvproof.model.ops import Op


class Witness(Protocol):
    """Somebody outside who is to know."""

    def begin(self, config: Config, path: str) -> None:
        """A fresh allocator of this config is about to be built. path: the target's, as in
        `protocol.Ticket`."""
        ...

    def about_to(self, op: Op) -> None:
        """This op is about to be done."""
        ...


_installed: Witness | None = None


def install(witness: Witness | None) -> None:
    """From now on every lockstep of this process that is made tells this witness; None: nobody."""
    global _installed
    _installed = witness


def installed() -> Witness | None:
    """The witness of this process."""
    return _installed
