"""Stand-ins for heavy packages that SGLang imports and its allocators never touch.

A stand-in module answers every attribute with a stand-in class. Such a class can be subclassed, annotated
with, used as a decorator and called while SGLang is being imported; called later it raises. Served are only
imports written in SGLang's own files, for others probe for optional packages and a stand-in would mislead
them; and only where SGLang does not cope with the absence (see `guards`). Light packages are never stood
in. This file does NOT decide what is imported; see `load`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

from .errors import SglangUnavailable
from .guards import absence_is_handled, is_sglang

# Packages that may be stood in: compiled kernels, model code and tokenisers, tensor notation, media decoding,
# servers. By top-level name.
HEAVY: frozenset[str] = frozenset(
    {
        "av", "compressed_tensors", "cuda", "cutlass", "decord", "deep_ep", "deep_gemm", "einops",
        "fastapi", "flash_attn", "flashinfer", "gguf", "huggingface_hub", "llguidance", "modelscope",
        "mooncake", "nixl", "openai", "outlines", "partial_json_parser", "regex", "safetensors",
        "sentencepiece", "sgl_kernel", "torch_memory_saver", "torchao", "torchaudio", "torchcodec",
        "torchvision", "transformers", "triton_kernels", "tvm_ffi", "uvicorn", "uvloop", "vllm", "xgrammar",
    }
)  # fmt: skip


class _StandInMeta(type):
    """Class of the stand-in classes. Any plain attribute is a further stand-in class, made once."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **_options: Any
    ) -> _StandInMeta:
        # A class of SGLang may pass options that its true base class takes, such as `total=False`.
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_options: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            # Protocol probes (__iter__, __fspath__ ...) must see an ordinary class.
            raise AttributeError(name)
        value = stand_in_class(f"{cls.__module__}.{cls.__qualname__}", name)
        setattr(cls, name, value)
        return value

    def __setitem__(cls, key: Any, value: Any) -> None:
        """Nothing is kept: SGLang enters its classes into registries that nobody here reads."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not FINDER.importing:
            top = cls.__mro__[-2].__module__.partition(".")[0]
            raise SglangUnavailable(
                f"{cls.__module__}.{cls.__qualname__} was called, but {top} is only stood in for; "
                f"install {top}"
            )
        # Stands for the instance, the decorated function or the result alike.
        return stand_in_class(cls.__module__, f"{cls.__qualname__}_result")


def stand_in_class(module: str, name: str) -> type[Any]:
    """A new stand-in class that calls itself `module.name`."""
    return _StandInMeta(name, (), {"__module__": module, "__get_pydantic_core_schema__": _ANYTHING})


# What pydantic asks of the type of a field, when SGLang declares its web requests: a stand-in allows
# anything.
_ANYTHING = classmethod(lambda cls, source, handler: {"type": "any"})


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in_class(self.__name__, name)
        setattr(self, name, value)
        return value


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Meta-path finder and loader of the stand-in modules; it belongs last on `sys.meta_path`.

    `stood_in` holds the top-level names it has served; `importing` is True while the loader imports SGLang.
    """

    def __init__(self) -> None:
        self.stood_in: set[str] = set()
        self.importing = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, below = fullname.partition(".")
        if top not in HEAVY or (below and top not in self.stood_in):
            return None
        importer = _importing_frame(sys._getframe(1))
        if importer is None or not is_sglang(importer) or absence_is_handled(importer):
            return None
        self.stood_in.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""

    def withdraw(self) -> None:
        """Take the stand-in modules out of `sys.modules`, for others look there to see what is installed.

        What SGLang has imported it keeps; what it imports later is served anew.
        """
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandInModule)]:
            del sys.modules[name]


FINDER = StandInFinder()


def install() -> StandInFinder:
    """The finder of this process, put last on `sys.meta_path` once."""
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)
    return FINDER


def _importing_frame(frame: FrameType | None) -> FrameType | None:
    """The frame whose import statement led to `frame`, a frame of the import machinery.

    None for a bare look for a spec (`importlib.util.find_spec`): that asks whether a package is installed,
    and it is not.
    """
    loading = False
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(
        ("importlib", "_frozen_importlib")
    ):
        loading = loading or frame.f_code.co_name == "_find_and_load"
        frame = frame.f_back
    return frame if loading else None
