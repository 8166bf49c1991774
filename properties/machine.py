"""The Hypothesis engine: a state machine over the same generator, for anybody's pytest suite.

    from kvproof.properties.machine import state_machine

    TestMyAllocator = state_machine("mine", allocator="paged").TestCase

Hypothesis draws, the generator turns draws into ops, lockstep judges; a failing example is Hypothesis's own
to shrink and to store.
"""

from typing import ClassVar

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.impl.targets.registry import load_target
from kvproof.model.ops import Op
from kvproof.model.trace import Origin, Trace
from kvproof.properties.draw import Draw
from kvproof.properties.failure import Failure
from kvproof.properties.generate import Generator
from kvproof.properties.lockstep import Lockstep
from kvproof.properties.run import lockstep_for
from kvproof.properties.space import WIDE_OPS, Space, draw_config, is_wide, space_for


class HypothesisDraw(Draw):
    """Choices that Hypothesis makes, stores and shrinks."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def integer(self, low: int, high: int) -> int:
        """See Draw."""
        return self.data.draw(st.integers(low, high))


class PropertyBroken(AssertionError):
    """A property does not hold; what a failing Hypothesis test raises. failure, trace: what and how."""

    def __init__(self, failure: Failure, trace: Trace) -> None:
        super().__init__(
            f"{failure.property_id} [{failure.fingerprint}] op {failure.step}: {failure.message}"
        )
        self.failure = failure
        self.trace = trace


class AllocatorMachine(RuleBasedStateMachine):
    """One target, one space; subclasses set both. Every step is one op of the generator."""

    target: ClassVar[Target]
    space: ClassVar[Space]
    runs: ClassVar[list[Lockstep]]
    broken: ClassVar[list[PropertyBroken]]

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[Op] = []

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        """Draw a config and a taste."""
        draw = HypothesisDraw(data)
        self._draw = draw
        self._config = draw_config(draw, self.space, wide=draw.integer(0, 15) == 15)
        note(f"config: {self._config}")
        self._pair = lockstep_for(self.target, self._config)
        self._generator = Generator(draw, self._pair.model, self.space)
        self.runs.append(self._pair)

    @rule(data=st.data())
    def op(self, data: st.DataObject) -> None:
        """Draw an op and do it; raises PropertyBroken when a property does not hold."""
        if self._pair.spoilt or (is_wide(self._config) and len(self._ops) >= WIDE_OPS):
            return
        self._draw.data = data
        op = self._generator.next_op()
        self._ops.append(op)
        note(f"op {len(self._ops) - 1}: {op}")
        failure = self._pair.step(op)
        if failure is not None:
            origin = Origin(target=self.target.name, lane="hypothesis")
            self.breaks(PropertyBroken(failure, Trace(self._config, tuple(self._ops), origin)))

    def breaks(self, broken: PropertyBroken) -> None:
        """A property does not hold: end the example."""
        self.broken.append(broken)
        raise broken


def state_machine(
    target: str | Target, *, allocator: str = "paged", path: str = "auto", device: str = "cpu"
) -> type[AllocatorMachine]:
    """A state machine class for this target; its `.TestCase` is a unittest class that pytest collects.

    target: a name as on the command line, or a loaded target. Raises UserError when there is no such target.
    """
    loaded = load_target(target, Ticket(path=path, device=device)) if isinstance(target, str) else target
    space = space_for(loaded.capabilities, allocator, slow=loaded.path == "kernels")
    return machine_for(loaded, space)


def machine_for(target: Target, space: Space) -> type[AllocatorMachine]:
    """A state machine class over exactly this space."""
    members = {
        "target": target,
        "space": space,
        "runs": [],
        "broken": [],
        "__doc__": AllocatorMachine.__doc__,
    }
    machine: type[AllocatorMachine] = type("AllocatorMachine", (AllocatorMachine,), members)
    machine.TestCase.settings = settings(
        deadline=None,
        # Explaining a failure takes ten times as long as finding it, and says nothing about draws in rules.
        phases=[phase for phase in settings().phases if phase is not Phase.explain],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return machine
