"""Patches of `triton.language` while the audited lane is installed: speed, and what a kernel tells Python.

`patch` patches both faces of the language once, as Triton's interpreter does at every launch, and tells the
port three things that memory operations do not say: that a load has no `other`, that a number of the kernel
was handed to Python (`if`, `while`, `range`), and that a kernel wants to print.

Not here: what is made of them (`tape`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from . import memo
from .port import MemoryPort


def patch(module: Any, port: MemoryPort) -> Any:
    """`module`: Triton's interpreter. Returns the scope, whose `restore()` undoes everything."""
    import triton.language as tl

    # Only the globals are looked at: both faces of the language, as kernels and as Triton's own library
    # functions see it.
    scope = module._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    tensor, block_type, semantic = tl.core.tensor, tl.core.block_type, module.TritonSemantic
    # A scalar is an array of one element; Triton 3.6 gives it to int(), which NumPy 2.4 refuses.
    scope.set_attr(tensor, "__index__", _decision(port, lambda self: int(self.handle.data.item())))
    scope.set_attr(tensor, "__bool__", _decision(port, tensor.__bool__))
    scope.set_attr(semantic, "load", _load(port, semantic.load))
    if hasattr(semantic, "atomic_load"):  # newer than Triton 3.6
        scope.set_attr(semantic, "atomic_load", _load(port, semantic.atomic_load))
    builder = module.InterpreterBuilder
    scope.set_attr(builder, "create_print", _print(port, builder.create_print))
    scope.set_attr(module, "_get_np_dtype", memo.numpy_dtype(module._get_np_dtype))
    scope.set_attr(tensor, "__init__", memo.tensor_init(tensor.__init__))
    scope.set_attr(block_type, "with_element_ty", memo.with_element_type(block_type.with_element_ty))
    return scope


def _decision(port: MemoryPort, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(self: Any) -> Any:
        value = original(self)
        return value if port.server is None or port.loading else port.server.decide(value)

    return convert


def _load(port: MemoryPort, original: Callable[..., Any]) -> Callable[..., Any]:
    """`TritonSemantic.load` and `atomic_load`. The builder below cannot tell: it is given no `other` either
    where a scalar one is 0."""
    places = [*inspect.signature(original).parameters, "other", "padding_option"]
    other_at, padding_at = places.index("other"), places.index("padding_option")

    def load(*args: Any) -> Any:
        padding = args[padding_at] if padding_at < len(args) else ""
        port.bare = not padding and (other_at >= len(args) or args[other_at] is None)
        port.loading = True
        try:
            return original(*args)
        finally:
            port.loading = port.bare = False

    return load


def _print(port: MemoryPort, original: Callable[..., Any]) -> Callable[..., Any]:
    def create_print(*args: Any) -> Any:
        return None if port.server is not None and port.server.silent else original(*args)

    return create_print
