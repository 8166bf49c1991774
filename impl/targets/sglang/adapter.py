"""SGLang's allocators as a target: `sglang`, `sglang==VERSION`, `sglang@PATH`.

Releases differ in signatures, in where released pages wait, and in which kinds and calls there are. All of
that is read off the loaded classes (`kinds`), so that a checkout between two releases works as well; nothing
is patched but the free list of a window (`page_offset`). Held to the contract, not to exact slots: the order
of releases changed between versions.

On a CPU the kernels run interpreted and audited; the torch path exists from 0.5.22.
"""

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from kvproof.impl.targets import built
from kvproof.impl.targets.instruments import install_fence, interpreter_on, process_watch
from kvproof.impl.targets.protocol import Capabilities, Ticket
from kvproof.impl.targets.sglang import kinds
from kvproof.impl.targets.sglang.errors import SglangUnavailable, UnknownSglang
from kvproof.impl.targets.sglang.load import LoadedSglang, load, load_kind
from kvproof.impl.targets.tensors import Surface, TensorSubject
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, MAX_PAGE_SIZE, SINGLE_SLOT, Config
from kvproof.model.errors import InfrastructureError, UserError

_CHECKED_VARIABLE = "SGLANG_DEBUG_MEMORY_POOL"
# Ops that some kind of some release has no call for. Not among them are those for which a kind calls what it
# has, and without which it could not be used: Extend, Decode, Alloc, Free.
_CALLS_OF_OP: Final = {
    "FreeSegment": ("free_segment",),
    "FreeSegments": ("free_segments",),
    "FreePages": ("free_page_ids",),
    "GroupBegin": ("free_group_begin",),
    "GroupEnd": ("free_group_begin",),
    "Resize": ("resize",),
    "ExtendTail": ("alloc_extend_swa_tail",),
    "FreeSwa": ("free_swa",),
    "FreeSwaSegment": ("free_swa_segment",),
    "FreeFull": ("free_full",),
    "FreeFullSegment": ("free_full_segment",),
    "Remap": ("set_full_to_swa_mapping",),
    "ExtendLogical": ("alloc_logical_only",),
    "FreeDevice": ("free_hisparse",),
    "DeviceBuffer": ("alloc_device_buffer",),
    "FreeBuffer": ("free_hisparse_indices",),
    "AllocGroupBegin": ("alloc_group_begin",),
    "AllocGroupEnd": ("alloc_group_begin",),
}
# Some sides for a config of each kind that has them.
_SIDES: Final[dict[str, dict[str, Any]]] = {
    "swa": {"swa_size": 16},
    "swa-ring": {"ring": 4, "request_rows": 1},
    "hisparse": {"ratio": 2},
    "hisparse-v4": {"swa_size": 16, "device_size": 4},
    "page-interleave": {"shards": 2},
}
_PAGE_SIZES: Final = (1, 2, 4, 8, 64, 256)
# In every release and imported with it; the other kinds cost seconds and come when they are asked for.
_AT_ONCE: Final = ("token", "paged")
# What sliding-window classes document not to wait for the device, where they have it of their own.
_SWA_SEGMENTS: Final = ("free_segment", "free_swa_segment", "free_full_segment")


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
        self._import_kinds(ticket.allocators)  # now, not in every process that is forked from this one
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

    @cached_property
    def capabilities(self) -> Capabilities:
        """See `protocol.Target`. The kinds are those whose classes stand in the release, less those that
        cannot be imported. What a kind lacks is told of those that the ticket names, of all when it names
        none."""
        self._import_kinds(self._ticket.allocators or tuple(self._loaded.offers))
        has = {*_AT_ONCE, *self._loaded.offers} - self._loaded.absent.keys()
        known = [kind for kind in ALLOCATORS if kind in {*_AT_ONCE, *self._loaded.kinds}]
        return Capabilities(
            tuple(kind for kind in ALLOCATORS if kind in has),
            lacks_of={kind: self._lacks(kind) for kind in known},
            page_sizes={kind: self._page_sizes(kind) for kind in known},
            unloadable={
                kind: self._loaded.absent[kind]
                for kind in ALLOCATORS
                if kind in self._loaded.absent and kind in self._loaded.offers
            },
            exact=False,
            any_page_size=not self._kernels,
            checked=True,
        )

    def _lacks(self, kind: str) -> frozenset[str]:
        missing = kinds.calls_missing(self._loaded, kind)
        lacking = {op for op, calls in _CALLS_OF_OP.items() if not missing.isdisjoint(calls)}
        return frozenset(lacking & _ops_of(kind))

    def _page_sizes(self, kind: str) -> tuple[int, int]:
        """The least and the greatest that the kind takes, by a few that are typical."""
        takes = [size for size in _PAGE_SIZES if kinds.takes_page_size(self._loaded, kind, size)]
        return takes[0], MAX_PAGE_SIZE if takes[-1] == _PAGE_SIZES[-1] else takes[-1]

    def _import_kinds(self, allocators: Iterable[str]) -> None:
        """What cannot be had is left for `LoadedSglang.absent` to explain."""
        for kind in allocators:
            if kind in self._loaded.offers:
                with suppress(SglangUnavailable):
                    load_kind(self._loaded, kind)

    def build(self, config: Config) -> TensorSubject:
        """See `protocol.Target`."""
        kind = config.allocator
        if self._kernels and config.page_size & (config.page_size - 1):
            raise UserError(
                f"{self.name}: its kernels take powers of two as page size, not {config.page_size}"
            )
        if kind not in {*_AT_ONCE, *self._loaded.offers}:
            raise UserError(f"{self.name} has no {kind} allocator")
        # Here, and not while the new allocator's memory is watched: importing may take memory as well.
        self._import_kinds((kind,))
        if kind in self._loaded.absent:
            raise InfrastructureError(f"{self.name}: {self._loaded.absent[kind]}")
        if not kinds.takes_page_size(self._loaded, kind, config.page_size):
            raise UserError(f"{self.name}: its {kind} allocator takes no pages of {config.page_size} slots")
        cls = kinds.allocator_class(self._loaded, kind)
        cpu_lens = "seq_lens_cpu" in inspect.signature(self._loaded.paged_class.alloc_extend).parameters
        surface = Surface(
            self._construct,
            cpu_lens=cpu_lens,
            page_count=built.counts_pages(cls),
            lists=lambda allocator: kinds.state(allocator, kind),
            sides=lambda allocator: built.sides(allocator, kind),
            available=lambda allocator: kinds.available(allocator, kind),
            wraps=lambda allocator: built.wrapped(allocator, kind),
            sync_free=self._sync_free(kind, cls, cpu_lens),
        )
        return TensorSubject(surface, config, self._ticket.device, self._watch)

    def other_path(self) -> "Sglang | None":
        """See `protocol.Target`."""
        if not self._kernels or not self._loaded.has_naive_path:
            return None
        return Sglang(replace(self._ticket, path="torch"))

    def _sync_free(self, kind: str, cls: type[Any], cpu_lens: bool) -> frozenset[str]:
        """What a release documents not to wait for the device: `free_segment` of the token and the paged
        allocator, from when there is one; the launches of the paged one's two kernels, for which lengths are
        passed on the host as well; the segment frees of the sliding-window allocator. Its torch path promises
        nothing of its launches, and the other kinds promise nothing."""
        if kind in _AT_ONCE:
            launches = {"alloc_extend", "alloc_decode"} if cpu_lens and self._kernels else set()
            return frozenset({"free_segment"} | launches)
        if kind in ("swa", "swa-ring"):
            return frozenset(name for name in _SWA_SEGMENTS if name in vars(cls))
        return frozenset()

    def _construct(self, config: Config, device: str) -> Any:
        with _environment(_CHECKED_VARIABLE, "true" if config.checked else "false"):
            return kinds.construct(self._loaded, config, device, self._kernels)


def _ops_of(kind: str) -> set[str]:
    """Names of the op types that the contract has for the kind, whatever its page size."""
    sizes = (1,) if kind in SINGLE_SLOT else (4,) if kind in ("swa-ring", "hisparse-v4") else (1, 4)
    models = (model_for(Config(kind, size=16, page_size=size, **_SIDES.get(kind, {}))) for size in sizes)
    return {op.__name__ for model in models for op in model.knows}


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
