"""Speed for Triton's interpreter: answers of its type system remembered instead of worked out anew.

A program of a few dozen operations asks the same questions about the same few types hundreds of
times. Each function here returns a replacement that gives the original's first answer again. Types
are told apart by name, as Triton's own equality does; pointers are left to the original, since their
name leaves out the address space. Not here: anything that computes with values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def numpy_dtype(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_get_np_dtype(type)`: the NumPy dtype of the elements. Pure."""
    known: dict[str, Any] = {}

    def get(type_: Any) -> Any:
        dtype = known.get(type_.name)
        if dtype is None:
            dtype = known[type_.name] = original(type_)
        return dtype

    return get


def with_element_type(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`block_type.with_element_ty(self, scalar)`: a type, never mutated, so one can be shared."""
    known: dict[tuple[str, str], Any] = {}

    def get(self: Any, scalar: Any) -> Any:
        if scalar.is_ptr():
            return original(self, scalar)
        key = (self.name, scalar.name)
        found = known.get(key)
        if found is None:
            found = known[key] = original(self, scalar)
        return found

    return get


def tensor_init(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """`tensor.__init__(self, handle, type)`: all attributes but `handle` follow from `type`."""
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        attributes = known.get(type.name)
        if attributes is None:
            original(self, handle, type)
            if not type.scalar.is_ptr():
                known[type.name] = {**self.__dict__, "handle": None}
            return
        own = self.__dict__
        own.update(attributes)
        own["handle"] = handle
        own["type"] = type

    return init
