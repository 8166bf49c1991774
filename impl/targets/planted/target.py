"""Two targets for the harness itself: `planted:ID`, a copy of our allocators with one fault, and `canary`.

Not covered: hunting the faults (`kvproof.properties.controls`).
"""

from copy import copy
from dataclasses import replace
from typing import Final

from kvproof.impl.targets.null import Null, NullSubject
from kvproof.impl.targets.ours import Kvproof
from kvproof.impl.targets.planted.catalogue import DEADLY, PLANTS
from kvproof.impl.targets.planted.copy import load_copy
from kvproof.impl.targets.planted.plant import Plant
from kvproof.impl.targets.protocol import Answer, Ticket
from kvproof.model.calls import Call
from kvproof.model.config import Config
from kvproof.model.errors import UserError

UNCHANGED: Final = "none"
"""`planted:none` is a copy without a fault: what is found there is the fault of the copying."""

_TORCH_FILES: Final = "reference.py"
"""How the names of files end whose faults show on the torch path alone."""


def plant_named(plant_id: str) -> Plant:
    """The plant with this id. Raises UserError, which lists them all."""
    plants = PLANTS + DEADLY
    for plant in plants:
        if plant.id == plant_id:
            return plant
    known = ", ".join([UNCHANGED, *(plant.id for plant in plants)])
    raise UserError(f"there is no planted fault {plant_id!r}; known: {known}")


class Planted(Kvproof):
    """A fresh copy of our allocators with one fault. The path is the fault's own unless the ticket says."""

    def __init__(self, ticket: Ticket) -> None:
        plant_id = ticket.spec.removeprefix(":")
        plant = None if plant_id == UNCHANGED else plant_named(plant_id)
        path = ticket.path
        if plant is not None:
            path = plant.path if path == "auto" else path
            on_torch = "torch" if plant.file.endswith(_TORCH_FILES) else path
            only = plant.path if plant.path == "kernels" else on_torch
            if path != only:
                raise UserError(f"planted:{plant.id} is a fault of the {only} path; use --path {only}")
            self.capabilities = replace(Kvproof.capabilities, exact=plant.exact)
        super().__init__(replace(ticket, spec="", path=path))
        self.name = self.release = f"planted:{plant_id}"
        self.classes = load_copy(plant)

    def other_path(self) -> "Planted | None":
        """See `protocol.Target`: the same copy, by torch."""
        if not self._kernels:
            return None
        sibling = copy(self)
        sibling._kernels = False
        return sibling


class _CanarySubject(NullSubject):
    def apply(self, call: Call) -> Answer:
        """The right answer, but for `available_size()`, which is one slot too many."""
        answer = super().apply(call)
        answer.available += 1
        return answer


class Canary(Null):
    """Factory and target in one. Every call fails on it, whatever it is, or the harness is blind."""

    name = release = "canary"

    def build(self, config: Config) -> _CanarySubject:
        """See `protocol.Target`."""
        return _CanarySubject()
