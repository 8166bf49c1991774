"""A plant: one fault, as data. The faults themselves stand in `pools`, `slots` and `deaths`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plant:
    """One fault.

    id: as in `planted:ID`. fault: one sentence. file: of `impl/`. old, new: the text replaced, and by what.
    caught_by: ids of the properties that may name it first; which of them does depends on the trace.
    path: "torch" or "kernels", the path on which it is hunted. allocator: the kind it is hunted on.
    misuse: only a caller who breaks the contract meets it. exact: whether the copy is held to the contract's
    very slots; False for a fault that takes legal pages, which only running a trace twice can show. deadly:
    how the process that meets it ends: "crash", "hang", "memory" (it grows) or "exit"; "" for a fault that
    can be hunted within a process.
    """

    id: str
    fault: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    path: str = "torch"
    allocator: str = "paged"
    misuse: bool = False
    exact: bool = True
    deadly: str = ""
