"""The null target: the model answers itself. It measures the harness, and nothing else."""

from kvproof.impl.targets.protocol import Answer, Capabilities, Lists, State, Ticket
from kvproof.model.base import AllocatorModel, Expectation, Outcome
from kvproof.model.calls import Call
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES


class NullSubject:
    """Says what it was told to say."""

    def __init__(self) -> None:
        self._answer = Answer()
        self._model: AllocatorModel | None = None

    def expect(self, expectation: Expectation, model: AllocatorModel) -> None:
        """See `protocol.Mirror`."""
        error = ValueError("refused") if expectation.outcome is Outcome.REFUSED else None
        self._answer = Answer(
            expectation.slots,
            error,
            expectation.available,
            peers=expectation.peers,
            bases=expectation.bases,
        )
        self._model = model

    def apply(self, call: Call) -> Answer:
        """See `protocol.Subject`."""
        return self._answer

    def observe(self) -> State:
        """See `protocol.Subject`."""
        model = self._model
        if model is None:
            return State([], [])
        return State(
            model.free_pages,
            model.staged,
            sides={name: Lists(pool.free, pool.staged) for name, pool in model.sides.items()},
            mappings=model.mappings,
            sizes=model.sizes,
        )


class Null:
    """Factory and target in one: there is nothing to load."""

    name = release = "null"
    path = "model"
    stood_in: tuple[str, ...] = ()
    capabilities = Capabilities(ALLOCATORS, exact=True, checked=True, refuses=frozenset(MISUSES))

    def __init__(self, ticket: Ticket) -> None:
        if ticket.spec:
            raise UserError(
                f"the target null takes no version or path, but got null{ticket.spec}; write null"
            )

    def build(self, config: Config) -> NullSubject:
        """See `protocol.Target`."""
        return NullSubject()

    def other_path(self) -> None:
        """See `protocol.Target`: there is no other."""
