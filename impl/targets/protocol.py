"""What a target is: something that builds allocators, makes concrete calls on them and can be looked at.

Third parties add theirs through the entry-point group `kvproof.targets`: a factory that takes the part of
the target's name after its own (`sglang==0.5.23` → `==0.5.23`) and returns a Target. Everything here is
plain Python; a target alone knows about tensors, devices and signatures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvproof.model.base import AllocatorModel, Expectation
from kvproof.model.calls import Call
from kvproof.model.config import Config


@dataclass(frozen=True, slots=True)
class Damage:
    """What no caller may meet in one call: a memory access that the guards, the audited lane or a sanitizer
    found, or a cost that the call must not have.

    kind: "unwritten", "guard-words", "input-changed", "output-changed", one of the audited lane's or of the
    sanitizer's, or a cost: "synchronised", "recompiled", "launches". where: the tensor, the kernel or the
    method. detail: program, offset, extent, stack, for people.
    """

    kind: str
    where: str
    detail: str


@dataclass(slots=True, eq=False)
class Answer:
    """What came back from one call.

    slots: the answer of an allocating call, None when it refused or has no answer. error: the exception
    raised, if any. available: `available_size()` afterwards. dtype: of the answer, as in "int64". peers: what
    the side mappings say of these slots right after the call, by pool ("swa", "device"). bases: the caller's
    list of rotation bases as the call left it (page-interleave).
    damage: faults noticed in the call. lost: the device is gone (an illegal access, say), and with it
    whatever else this process could have asked. lost_in: whose work lost it, where that is known (fenced
    memory): a kernel's name, or "torch".
    """

    slots: list[int] | None = None
    error: Exception | None = None
    available: int = 0
    dtype: str = "int64"
    damage: tuple[Damage, ...] = ()
    lost: bool = False
    lost_in: str = ""
    peers: Mapping[str, list[int]] = field(default_factory=dict)
    bases: list[int | None] | None = None


@dataclass(frozen=True, slots=True)
class Lists:
    """One pool's page numbers in list order (slots where a page is one slot)."""

    free: list[int]
    staged: list[int]


@dataclass(frozen=True, slots=True)
class State:
    """The allocator seen from inside. free, staged: page numbers in list order (slots where a page is one
    slot) of the only pool, or of the main one: full, logical, class 0. sides: the other pools by name ("swa",
    "device", "class 1" …). mappings: side mappings by the name of the pool they lead to, whole, the trailing
    -1 included. sizes: what further methods say is available ("full", "swa", "aggregate"). damage: to tensors
    the caller holds, noticed only now. lost: the device's error, when it was found gone; then there is
    nothing else to see."""

    free: list[int]
    staged: list[int]
    damage: tuple[Damage, ...] = ()
    lost: Exception | None = None
    sides: Mapping[str, Lists] = field(default_factory=dict)
    mappings: Mapping[str, list[int]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can be asked. What it lacks is skipped and counted, never silently.

    allocators: the kinds it has. unloadable: kinds that are there and cannot be had, with the reason. lacks:
    names of op types it has no call for, lacks_of: those of one kind alone, by kind (`lacking` joins them).
    page_sizes: the least and the greatest it takes, where a kind does not take all. exact: held to the very
    slots of the contract, not only to legal ones. any_page_size: False where only powers of two work.
    page_offset: whether a window onto a larger pool can be built. checked: whether it has a checked mode.
    refuses: the misuses it promises to refuse when checked.
    """

    allocators: tuple[str, ...]
    lacks: frozenset[str] = field(default_factory=frozenset)
    exact: bool = False
    any_page_size: bool = True
    page_offset: bool = True
    checked: bool = False
    refuses: frozenset[str] = field(default_factory=frozenset)
    lacks_of: Mapping[str, frozenset[str]] = field(default_factory=dict)
    page_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unloadable: Mapping[str, str] = field(default_factory=dict)

    def lacking(self, allocator: str) -> frozenset[str]:
        """Names of the op types that this kind of allocator has no call for."""
        return self.lacks | self.lacks_of.get(allocator, frozenset())


class Subject(Protocol):
    """One allocator under test."""

    def apply(self, call: Call) -> Answer:
        """Make the call. Never raises what the allocator raised: that is `Answer.error`."""
        ...

    def observe(self) -> State:
        """The free and staged lists as they are. Changes nothing; may synchronise a device. A device found
        lost is `State.lost`."""
        ...


@runtime_checkable
class Mirror(Protocol):
    """A subject that answers from the model (null): told the right answer before each call."""

    def expect(self, expectation: Expectation, model: AllocatorModel) -> None:
        """Remember what the model says the next answer is, and where its lists are."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """How a target is to be run in this process.

    spec: what follows the target's own name. path: "torch" or "kernels" (compiled on a GPU, interpreted on
    a CPU), or "auto". device: "cpu" or "cuda". audited: every memory access of a kernel is checked. fence:
    "end" or "begin", the side at which each tensor on the GPU ends in memory that faults; "" for none.
    sanitizer, sanitizer_log: the tool of compute-sanitizer under which this process runs, and where it
    writes. allocators: the kinds that will be asked for; others may cost time when they are.
    """

    spec: str = ""
    path: str = "auto"
    device: str = "cpu"
    audited: bool = False
    fence: str = ""
    sanitizer: str = ""
    sanitizer_log: str = ""
    allocators: tuple[str, ...] = ()


class Target(Protocol):
    """A loaded target. `capabilities` depends on the release and on the path taken."""

    @property
    def name(self) -> str:
        """As the user wrote it, with what was resolved: "sglang==0.5.23"."""
        ...

    @property
    def release(self) -> str:
        """Whose code and which version it is, however it was named: "sglang 0.5.23" for a checkout as well.
        Known faults are listed by it."""
        ...

    @property
    def path(self) -> str:
        """The path in use: "torch" or "kernels" ("model" for null)."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can be asked."""
        ...

    @property
    def stood_in(self) -> tuple[str, ...]:
        """Packages it imports that are absent and were stood in for."""
        ...

    def build(self, config: Config) -> Subject:
        """A fresh allocator. Raises UserError when this config is beyond its capabilities."""
        ...

    def other_path(self) -> "Target | None":
        """The same target by its other path, when both can run in this process."""
        ...


class Factory(Protocol):
    """What an entry point of the group `kvproof.targets` names."""

    def __call__(self, ticket: Ticket) -> Target:
        """Load the target in this process. Raises UserError or InfrastructureError with one clear line."""
        ...
