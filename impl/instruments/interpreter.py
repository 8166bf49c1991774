"""The part of the audited lane that knows Triton's internals: launching kernels over virtual memory.

Triton's interpreter patches `triton.language` at every launch and every call of a device function,
several milliseconds each. `Interpreter` patches once, when installed, and then a launch only binds
its arguments, turns tensors into addresses of their regions and walks the grid: about half a
millisecond a program for a kernel of fifty operations. All arithmetic, and the accesses themselves,
stay Triton's own.

Private names used, in Triton 3.6 to 3.9 alike: see `_required`. Where one is missing, `install()`
says which and in which version.

Not covered: kernels compiled for a device (their `triton.jit` ran without TRITON_INTERPRET=1), and
launches from several threads at once.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import memo
from .findings import CallAudit, InstrumentError, Launch
from .memory import LaunchMemory, Region, share_shadows

_MEMORY_OPERATIONS = ("load", "store", "atomic_rmw", "atomic_cas")


def _required(module: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """What must be found on Triton's interpreter: a name for messages -> (object, attributes)."""
    return {
        "triton.runtime.interpreter": (
            module,
            (
                "GridExecutor",
                "InterpretedFunction",
                "InterpreterError",
                "TensorDescriptor",
                "_LangPatchScope",
                "_get_np_dtype",
                "_implicit_cvt",
                "_interpreter",
                "_patch_lang",
                "_unwrap_tensor",
                "interpreter_builder",
            ),
        ),
        "InterpretedFunction": (
            getattr(module, "InterpretedFunction", None),
            ("run", "__call__", "rewrite"),
        ),
        "interpreter_builder": (
            getattr(module, "interpreter_builder", None),
            ("set_grid_dim", "set_grid_idx"),
        ),
        "_LangPatchScope": (getattr(module, "_LangPatchScope", None), ("set_attr", "restore")),
        "the interpreter's memory": (getattr(module, "_interpreter", None), _MEMORY_OPERATIONS),
    }


def import_interpreter() -> Any:
    """Triton's interpreter module, checked. InstrumentError if it cannot serve here."""
    try:
        import triton
        import triton.language as tl
        import triton.runtime.interpreter as module
    except ImportError as error:
        raise InstrumentError(f"the audited lane needs Triton: {error}") from error
    for owner, (thing, names) in _required(module).items():
        for name in names:
            if not hasattr(thing, name):
                raise InstrumentError(f"Triton {triton.__version__}: {owner} has no attribute {name!r}")
    if not isinstance(tl.sum, module.InterpretedFunction):
        raise InstrumentError(
            f"Triton {triton.__version__} was imported without TRITON_INTERPRET=1;"
            " set it before the first import"
        )
    return module


class _Pointer:
    """Passes for a tensor with the interpreter: an element type and an address, no memory."""

    def __init__(self, dtype: Any, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _MemoryPort:
    """Stands in for Triton's native memory module; `LaunchMemory` takes its operations over and back."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def serve(self, memory: LaunchMemory) -> None:
        for name in _MEMORY_OPERATIONS:
            setattr(self, name, getattr(memory, name))

    def release(self) -> None:
        for name in _MEMORY_OPERATIONS:
            setattr(self, name, getattr(self.real, name))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What stays the same between launches of one kernel."""

    function: Callable[..., None]
    signature: inspect.Signature
    constexprs: frozenset[str]


class Interpreter:
    """Triton's interpreter with virtual memory. Process-wide while installed.

    `current_audit`: returns the account to report to. `fresh_poison`: for a tensor argument, the value
    an unwritten element of it holds if it is a guarded output (and then notes the launch), else None.
    """

    def __init__(
        self,
        current_audit: Callable[[], CallAudit],
        fresh_poison: Callable[[torch.Tensor, str, str, int], int | None],
    ) -> None:
        self._current_audit = current_audit
        self._fresh_poison = fresh_poison
        self._module: Any = None
        self._plans: dict[Any, _Plan] = {}

    def install(self) -> None:
        """Patches `triton.language` and Triton's interpreter. InstrumentError if that cannot be."""
        if self._module is not None:
            raise InstrumentError("the interpreter is already installed")
        module = import_interpreter()
        if isinstance(module._interpreter, _MemoryPort):
            raise InstrumentError("another Auditor is installed in this process")
        self._module = module
        self._patch_language(module)
        self._port = _MemoryPort(module._interpreter)
        module._interpreter = self._port
        self._saved = (module.InterpretedFunction.run, module.InterpretedFunction.__call__)
        module.InterpretedFunction.run = self._run_method()
        module.InterpretedFunction.__call__ = self._device_call_method()

    def _patch_language(self, module: Any) -> None:
        import triton.language as tl

        # Only the globals are looked at: both faces of the language, as kernels and as Triton's own
        # library functions see it.
        scope = module._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        tensor, block_type = tl.core.tensor, tl.core.block_type
        # A scalar is an array of one element; Triton 3.6 gives it to int(), which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(module, "_get_np_dtype", memo.numpy_dtype(module._get_np_dtype))
        scope.set_attr(tensor, "__init__", memo.tensor_init(tensor.__init__))
        scope.set_attr(block_type, "with_element_ty", memo.with_element_type(block_type.with_element_ty))
        self._language = scope

    def uninstall(self) -> None:
        """Undoes `install()`. Does nothing if not installed."""
        if self._module is None:
            return
        module, self._module = self._module, None
        module.InterpretedFunction.run, module.InterpretedFunction.__call__ = self._saved
        module._interpreter = self._port.real
        self._language.restore()
        self._plans.clear()

    def _run_method(self) -> Callable[..., None]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if not warmup:
                self._launch(kernel, args, kwargs, grid)

        return run

    def _device_call_method(self) -> Callable[..., Any]:
        failure = self._module.InterpreterError

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function.rewrite()(*args, **kwargs)
            except InstrumentError:
                raise
            except Exception as error:
                raise failure(repr(error)) from error

        return call

    # -- one launch ----------------------------------------------------------------------------------

    def _plan(self, kernel: Any) -> _Plan:
        plan = self._plans.get(kernel)
        if plan is None:
            function = kernel.rewrite()
            constexprs = self._module.GridExecutor(function, kernel.arg_names, (), []).constexprs
            plan = _Plan(function, inspect.signature(function), frozenset(constexprs))
            self._plans[kernel] = plan
        return plan

    def _launch(self, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], grid: Any) -> None:
        plan = self._plan(kernel)
        parameters = plan.signature.parameters
        kwargs = {name: value for name, value in kwargs.items() if name in parameters}
        for hook in kernel.pre_run_hooks:
            hook(*args, **kwargs)
        bound = plan.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        audit = self._current_audit()
        name, ordinal = kernel.fn.__name__, len(audit.launches)
        arguments = _Arguments(self._module, name, ordinal, self._fresh_poison)
        values = {
            key: value if key in plan.constexprs else arguments.convert(key, value)
            for key, value in bound.arguments.items()
        }
        share_shadows(arguments.regions)
        memory = LaunchMemory(self._port.real, name, ordinal, arguments.regions, audit)
        sizes = tuple(operator.index(n) for n in (grid(bound.arguments) if callable(grid) else grid))
        if not 1 <= len(sizes) <= 3:
            raise ValueError(f"grid must have 1 to 3 dimensions, not {sizes}")
        x, y, z = sizes + (1,) * (3 - len(sizes))
        memory.grid, memory.programs = (x, y, z), x * y * z
        try:
            self._walk(plan.function, values, memory)
        finally:
            written = tuple(region.name for region in arguments.regions if region.written)
            audit.add_launch(Launch(name, memory.grid, memory.programs, written))
        arguments.copy_back()

    def _walk(self, function: Callable[..., None], values: dict[str, Any], memory: LaunchMemory) -> None:
        builder = self._module.interpreter_builder
        builder.set_grid_dim(*memory.grid)
        self._port.serve(memory)
        try:
            for x in range(memory.grid[0]):
                for y in range(memory.grid[1]):
                    for z in range(memory.grid[2]):
                        memory.program += 1
                        builder.set_grid_idx(x, y, z)
                        function(**values)
        except (InstrumentError, self._module.InterpreterError):
            raise
        except Exception as error:
            raise self._module.InterpreterError(repr(error)) from error
        finally:
            self._port.release()


class _Arguments:
    """Turns the arguments of one launch into what the interpreter computes with; owns its regions."""

    def __init__(
        self,
        module: Any,
        kernel: str,
        launch: int,
        fresh_poison: Callable[[torch.Tensor, str, str, int], int | None],
    ) -> None:
        self._module = module
        self._kernel = kernel
        self._launch = launch
        self._fresh_poison = fresh_poison
        self._host_copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.regions: list[Region] = []

    def convert(self, name: str, value: Any) -> Any:
        return self._module._implicit_cvt(self._virtual(name, value))

    def copy_back(self) -> None:
        """Device tensors were worked on in host copies of their storages."""
        for device, host in self._host_copies.values():
            device.copy_(host)

    def _virtual(self, name: str, value: Any) -> Any:
        """`value` with every tensor in it replaced by a `_Pointer` into a region of its own."""
        if isinstance(value, tuple):
            parts = [self._virtual(f"{name}[{i}]", part) for i, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, self._module.TensorDescriptor):
            # Made anew rather than through its constructor, whose fields differ between versions.
            descriptor = object.__new__(type(value))
            descriptor.__dict__.update(value.__dict__, base=self._virtual(name, value.base))
            return descriptor
        if not hasattr(value, "data_ptr"):
            return value
        tensor = self._module._unwrap_tensor(value)
        if not isinstance(tensor, torch.Tensor):
            raise InstrumentError(f"{self._kernel}: argument {name} is no tensor of torch: {type(value)}")
        region = self._region(name, tensor)
        return _Pointer(value.dtype, region.base)

    def _region(self, name: str, tensor: torch.Tensor) -> Region:
        extent, reachable = tensor.numel(), None
        if not tensor.is_contiguous() and extent:
            shape, strides = tuple(tensor.shape), tensor.stride()
            extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            reachable = np.zeros(extent, bool)
            np.lib.stride_tricks.as_strided(reachable, shape, strides)[...] = True
        region = Region(
            name,
            self._host_address(tensor),
            tensor.element_size(),
            extent,
            reachable,
            self._fresh_poison(tensor, self._kernel, name, self._launch),
        )
        region.place(len(self.regions))
        self.regions.append(region)
        return region

    def _host_address(self, tensor: torch.Tensor) -> int:
        if tensor.device.type == "cpu":
            return tensor.data_ptr()
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self._host_copies:
            self._host_copies[start] = (storage, storage.cpu())  # type: ignore[no-untyped-call]
        return self._host_copies[start][1].data_ptr() + tensor.data_ptr() - start
