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
from typing import Any

import numpy as np
import torch

from . import language
from .arguments import Arguments
from .findings import CallAudit, InstrumentError, Launch
from .memory import LaunchMemory, share_shadows
from .poison import Poisoned
from .port import MEMORY_OPERATIONS, MemoryPort
from .tape import Diverged, Hole, Replay, Tape, failed_assertion


def _required(module: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """What must be found on Triton's interpreter: a name for messages -> (object, attributes)."""
    return {
        "triton.runtime.interpreter": (
            module,
            (
                "GridExecutor",
                "InterpreterBuilder",
                "InterpretedFunction",
                "InterpreterError",
                "TensorDescriptor",
                "TritonSemantic",
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
        "InterpreterBuilder": (getattr(module, "InterpreterBuilder", None), ("create_print",)),
        "TritonSemantic": (getattr(module, "TritonSemantic", None), ("load",)),
        "_LangPatchScope": (getattr(module, "_LangPatchScope", None), ("set_attr", "restore")),
        "the interpreter's memory": (getattr(module, "_interpreter", None), MEMORY_OPERATIONS),
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """What stays the same between launches of one kernel."""

    function: Callable[..., None]
    signature: inspect.Signature
    constexprs: frozenset[str]


class Interpreter:
    """Triton's interpreter with virtual memory. Process-wide while installed.

    `current_audit`: returns the account to report to. `poisoned`: for a tensor argument, what
    tells its unwritten elements if it is guarded (and then notes the launch), else None.
    """

    def __init__(
        self,
        current_audit: Callable[[], CallAudit],
        poisoned: Callable[[torch.Tensor, str, str, int], Poisoned | None],
    ) -> None:
        self._current_audit = current_audit
        self._poisoned = poisoned
        self._module: Any = None
        self._plans: dict[Any, _Plan] = {}

    def install(self) -> None:
        """Patches `triton.language` and Triton's interpreter. InstrumentError if that cannot be."""
        if self._module is not None:
            raise InstrumentError("the interpreter is already installed")
        module = import_interpreter()
        if isinstance(module._interpreter, MemoryPort):
            raise InstrumentError("another Auditor is installed in this process")
        self._module = module
        self._port = MemoryPort(module._interpreter)
        self._language = language.patch(module, self._port)
        module._interpreter = self._port
        self._saved = (module.InterpretedFunction.run, module.InterpretedFunction.__call__)
        module.InterpretedFunction.run = self._run_method()
        module.InterpretedFunction.__call__ = self._device_call_method()

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
        arguments = Arguments(self._module, name, ordinal, self._poisoned)
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
        tape = Tape(memory)
        judging = memory.reports
        self._port.serve(tape)
        try:
            for x in range(memory.grid[0]):
                for y in range(memory.grid[1]):
                    for z in range(memory.grid[2]):
                        memory.program += 1
                        builder.set_grid_idx(x, y, z)
                        tape.rewind()
                        function(**values)
                        if judging and tape.holes:
                            judging = not self._judge(function, values, tape, memory)
        except (InstrumentError, self._module.InterpreterError):
            raise
        except Exception as error:
            raise self._module.InterpreterError(repr(error)) from error
        finally:
            self._port.release()

    # -- undefined lanes -----------------------------------------------------------------------------

    def _judge(
        self, function: Callable[..., None], values: dict[str, Any], tape: Tape, memory: LaunchMemory
    ) -> bool:
        """Whether the program on `tape` used an undefined lane; if so, report the first argument that by
        itself makes a difference (or the first of all, where they do so only together)."""
        try:
            for sign in tape.signs:
                use = self._replay(function, values, Replay(tape, tape.holes, sign))
                if use:
                    hole, use = self._culprit(function, values, tape, sign, use)
                    memory.report_undefined(hole.argument, hole.offset, hole.extent, use)
                    return True
            return False
        finally:
            self._port.serve(tape)

    def _culprit(
        self, function: Callable[..., None], values: dict[str, Any], tape: Tape, sign: int, use: str
    ) -> tuple[Hole, str]:
        holes = list(tape.holes.values())
        if len(holes) > 1:
            for hole in holes:
                alone = self._replay(function, values, Replay(tape, (hole.argument,), sign))
                if alone:
                    return hole, alone
        return holes[0], use

    def _replay(self, function: Callable[..., None], values: dict[str, Any], replay: Replay) -> str:
        """What the program does otherwise than the tape says; empty if nothing."""
        self._port.serve(replay)
        try:
            with np.errstate(all="ignore"):  # numbers that no kernel was written for
                function(**values)
                replay.finish()
        except Diverged as diverged:
            return diverged.use
        except Exception as error:
            # Nothing is known of what the program would have gone on to do.
            return "an assertion" if failed_assertion(error) else ""
        return ""
