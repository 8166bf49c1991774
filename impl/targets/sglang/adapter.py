"""SGLang's allocators as a target: `sglang`, `sglang==VERSION`, `sglang@PATH`.

Releases differ in signatures, in where released pages wait, and in which calls there are. All of that is read
off the loaded classes, so that a checkout between two releases works as well; nothing is patched but the free
list of a window (`page_offset`). Held to the contract, not to exact slots: the order of releases changed
between versions.

On a CPU the kernels run interpreted and audited; the torch path exists from 0.5.22.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvproof.impl.targets.instruments import install_fence, interpreter_on, process_watch
from kvproof.impl.targets.protocol import Capabilities, State, Ticket
from kvproof.impl.targets.sglang.errors import SglangUnavailable, UnknownSglang
from kvproof.impl.targets.sglang.load import LoadedSglang, load
from kvproof.impl.targets.tensors import Surface, TensorSubject, free_list_name
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import InfrastructureError, UserError

_CHECKED_VARIABLE = "SGLANG_DEBUG_MEMORY_POOL"
_CALL_OF_OP = {
    "Alloc": "alloc",
    "FreeSegment": "free_segment",
    "FreeSegments": "free_segments",
    "FreePages": "free_page_ids",
    "Resize": "resize",
}


class Sglang:
    """Factory and target in one. See `protocol.Factory` and `protocol.Target`."""

    def __init__(self, ticket: Ticket) -> None:
        self.name = f"sglang{ticket.spec}"
        install_fence(ticket)  # SGLang's imports may use CUDA
        try:
            self._loaded: LoadedSglang = load(self.name)
        except UnknownSglang as error:
            raise UserError(str(error)) from None
        except SglangUnavailable as error:
            raise InfrastructureError(str(error)) from None
        if self.name == "sglang":
            self.name = f"sglang=={self._loaded.version}"
        self._ticket = ticket
        self._kernels = self._takes_kernels()
        if self._kernels and ticket.device == "cpu" and not interpreter_on():
            raise UserError(
                f"{self.name}: its kernels on the CPU need Triton's interpreter; set TRITON_INTERPRET=1"
            )
        # Interpreted kernels are audited in any case: that launcher is also the faster one.
        audited = ticket.audited or (self._kernels and ticket.device == "cpu")
        self._watch = process_watch(replace(ticket, audited=audited))

    def _takes_kernels(self) -> bool:
        path, on_cpu = self._ticket.path, self._ticket.device == "cpu"
        if path == "torch" and not self._loaded.has_naive_path:
            raise UserError(f"{self.name} has no torch path (it came with 0.5.22); use --path kernels")
        if path == "auto":
            return not (on_cpu and self._loaded.has_naive_path)
        return path == "kernels"

    @property
    def release(self) -> str:
        """See `protocol.Target`."""
        return f"sglang {self._loaded.version}"

    @property
    def path(self) -> str:
        """See `protocol.Target`."""
        return "kernels" if self._kernels else "torch"

    @property
    def stood_in(self) -> tuple[str, ...]:
        """See `protocol.Target`."""
        return self._loaded.standins

    @property
    def capabilities(self) -> Capabilities:
        """See `protocol.Target`."""
        classes = (self._loaded.token_class, self._loaded.paged_class)
        lacks = {op for op, call in _CALL_OF_OP.items() if not all(hasattr(cls, call) for cls in classes)}
        return Capabilities(
            ALLOCATORS, frozenset(lacks), exact=False, any_page_size=not self._kernels, checked=True
        )

    def build(self, config: Config) -> TensorSubject:
        """See `protocol.Target`."""
        if self._kernels and config.page_size & (config.page_size - 1):
            raise UserError(
                f"{self.name}: its kernels take powers of two as page size, not {config.page_size}"
            )
        known = inspect.signature(self._loaded.paged_class.alloc_extend).parameters
        cpu_lens = "seq_lens_cpu" in known
        surface = Surface(
            self._construct,
            cpu_lens=cpu_lens,
            page_count="num_new_pages" in known,
            lists=_lists,
            sync_free=self._sync_free(cpu_lens),
        )
        return TensorSubject(surface, config, self._ticket.device, self._watch)

    def other_path(self) -> "Sglang | None":
        """See `protocol.Target`."""
        if not self._kernels or not self._loaded.has_naive_path:
            return None
        return Sglang(replace(self._ticket, path="torch"))

    def _sync_free(self, cpu_lens: bool) -> frozenset[str]:
        """What a release documents not to wait for the device: `free_segment`, from when there is one, and
        the launches of the two kernels, for which lengths are passed on the host as well. Its torch path
        promises nothing there."""
        launches = {"alloc_extend", "alloc_decode"} if cpu_lens and self._kernels else set()
        return frozenset({"free_segment"} | launches)

    def _construct(self, config: Config, device: str) -> Any:
        cls = self._loaded.token_class if config.allocator == "token" else self._loaded.paged_class
        arguments: dict[str, Any] = {
            "size": config.size,
            "page_size": config.page_size,
            "dtype": torch.float16,
            "device": device,
            "kvcache": None,
            "need_sort": config.need_sort,
        }
        known = inspect.signature(cls.__init__).parameters
        with _environment(_CHECKED_VARIABLE, "true" if config.checked else "false"):
            allocator = cls(**{name: value for name, value in arguments.items() if name in known})
        if self._loaded.has_naive_path and config.allocator == "paged":
            allocator.use_triton_kernels = self._kernels
        return allocator


def _lists(allocator: Any) -> State:
    free = getattr(allocator, free_list_name(allocator))
    staged: list[int] = []
    if getattr(allocator, "release_pages", None) is not None:
        staged.extend(allocator.release_pages.tolist())
    for pages in getattr(allocator, "staged_pages", ()):
        staged.extend(pages.tolist())
    return State(free.tolist(), staged)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set one variable while a constructor reads it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
