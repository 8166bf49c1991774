"""Carrying out the contract's calls on an allocator that speaks torch.

What differs between ours, the reference and SGLang's releases is a `Surface`: how the constructor and the
calls are spelled, and where the lists are. Everything else (building argument tensors, reading answers back,
keeping the caller's tensors for a later Clobber) is done once, here.
"""

import operator
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvproof.impl.instruments.cost import Warmth
from kvproof.impl.instruments.findings import InstrumentError
from kvproof.impl.targets.instruments import Watch
from kvproof.impl.targets.protocol import Answer, Damage, State
from kvproof.model import calls
from kvproof.model.calls import Call
from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError

_OUTPUTS_KEPT = 12
_DTYPES = {"int64": torch.int64, "int32": torch.int32}


@dataclass(frozen=True, slots=True)
class NewSize:
    """What `resize` reads of SGLang's configuration object; pools of two sides read the last two."""

    max_total_num_tokens: int
    full_max_total_num_tokens: int
    swa_max_total_num_tokens: int


def _available_size(allocator: Any) -> int:
    return operator.index(allocator.available_size())


def _wraps_nothing(_allocator: Any) -> Any:
    return None


def not_forwarded(wrapper: Any, wrapped: Any) -> list[str]:
    """Public methods and properties of the wrapped object's class that the wrapper does not have."""
    public = (name for name in dir(type(wrapped)) if not name.startswith("_"))
    return [name for name in public if not hasattr(wrapper, name)]


def _no_sides(_allocator: Any) -> Mapping[str, tuple[torch.Tensor, int]]:
    return {}


@dataclass(frozen=True, slots=True)
class Surface:
    """How an allocator class is spoken to.

    construct: a fresh allocator from a config and a device. cpu_lens: alloc_extend and alloc_decode take
    host copies of the lengths. page_count: alloc_extend may be told the number of new pages, and is told by
    turns. lists: free and staged page numbers as they are, of every pool, and what else a State tells. sides:
    the side mappings by name, each with the slots that one of its entries stands for. available: what
    `available_size()` says. wraps: the allocator that this one wraps, None for none. sync_free: methods
    documented not to wait for the device (checked mode may).
    """

    construct: Callable[[Config, str], Any]
    cpu_lens: bool
    page_count: bool
    lists: Callable[[Any], State]
    sides: Callable[[Any], Mapping[str, tuple[torch.Tensor, int]]] = _no_sides
    available: Callable[[Any], int] = _available_size
    wraps: Callable[[Any], Any] = _wraps_nothing
    sync_free: frozenset[str] = field(default_factory=frozenset)


_HANDS_OUT = (calls.AllocCall, calls.ExtendCall, calls.DecodeCall)


def _takes_the_device(error: Exception) -> bool:
    """Whether the error is CUDA's, after which every later call in the process fails as well."""
    return isinstance(error, torch.AcceleratorError) or "[CUDA]" in str(error) or "CUDA error" in str(error)


def free_list_name(allocator: Any) -> str:
    """The attribute that is the free list: the token allocator of the oldest releases calls it free_slots."""
    return "free_slots" if hasattr(allocator, "free_slots") else "free_pages"


class TensorSubject:
    """One torch allocator under test. See `protocol.Subject`."""

    def __init__(self, surface: Surface, config: Config, device: str, watch: Watch) -> None:
        self._surface = surface
        self._config = config
        self._device = device
        self._watch = watch
        self._row_dtype = _DTYPES[config.row_dtype]
        self._warmth = Warmth()
        self._sync_free = frozenset() if config.checked else surface.sync_free
        # Watched, so that scratch tensors it makes hold poison and not what the memory held before.
        with watch.open():
            self._allocator = surface.construct(config, device)
        self._shift_window()
        self._gaps = self._forwarding_gaps()
        self._inputs: list[tuple[str, torch.Tensor, list[int]]] = []
        self._slots_given: list[torch.Tensor] = []
        self._pages_given: list[torch.Tensor] = []
        self._outputs: deque[tuple[torch.Tensor, list[int]]] = deque(maxlen=_OUTPUTS_KEPT)
        self._extends = 0
        self._in_group = False
        self._bases: list[int | None] | None = None
        self._handlers: dict[type[Call], Callable[[Any], torch.Tensor | None]] = {
            calls.AllocCall: self._alloc,
            calls.ExtendCall: self._extend,
            calls.DecodeCall: self._decode,
            calls.FreeCall: self._free,
            calls.FreeSegmentCall: self._free_segment,
            calls.FreeSegmentsCall: self._free_segments,
            calls.FreePageIdsCall: self._free_page_ids,
            calls.GroupBeginCall: self._group_begin,
            calls.GroupEndCall: self._group_end,
            calls.ClobberCall: self._clobber,
            calls.ClearCall: self._clear,
            calls.ResizeCall: self._resize,
            calls.RemapCall: self._remap,
            calls.BufferCall: self._buffer,
            calls.AllocGroupBeginCall: self._alloc_group_begin,
            calls.AllocGroupEndCall: self._alloc_group_end,
        }

    def apply(self, call: Call) -> Answer:
        """See `protocol.Subject`. Raises InfrastructureError when an instrument cannot follow a kernel."""
        answer = Answer()
        output: torch.Tensor | None = None
        self._inputs.clear()
        self._bases = None
        try:
            with self._watch.open():
                output = self._handlers[type(call)](call)
        except InstrumentError as error:
            raise InfrastructureError(f"the audited lane cannot follow this target: {error}") from error
        except Exception as error:  # whatever an allocator raises is an answer, to be judged by others
            answer.error = error
        try:
            self._watch.settle()
            self._read(answer, output)
            if answer.slots is not None and isinstance(call, _HANDS_OUT):
                answer.peers = self._peers(answer.slots)
        except Exception as error:  # what a kernel did shows when it is waited for
            if answer.error is None or _takes_the_device(error):
                answer.error = error
        if answer.error is not None and _takes_the_device(answer.error):
            answer.lost = True
            answer.damage += tuple(self._watch.reports())
            answer.lost_in = self._watch.lost_in
        return answer

    def _read(self, answer: Answer, output: torch.Tensor | None) -> None:
        """Fill in what the call left behind."""
        answer.slots, answer.damage = self._watch.read(output)
        if output is not None and answer.slots is not None:
            self._outputs.append((output, answer.slots))
            answer.dtype = str(output.dtype).removeprefix("torch.")
        if self._inputs:
            answer.damage += tuple(self._changed_inputs())
        answer.available = self._surface.available(self._allocator)
        answer.bases = self._bases

    def _peers(self, slots: list[int]) -> dict[str, list[int]]:
        """What the side mappings say of these slots."""
        peers: dict[str, list[int]] = {}
        for name, (mapping, each) in self._surface.sides(self._allocator).items():
            entries = slots if each == 1 else [slot // each for slot in slots if (slot + 1) % each == 0]
            # A slot out of range is found by others; to look it up here could take the device.
            if not entries or (min(entries) >= 0 and max(entries) < mapping.numel()):
                index = torch.tensor(entries, dtype=torch.int64, device=mapping.device)
                peers[name] = mapping[index].tolist()
        return peers

    def observe(self) -> State:
        """See `protocol.Subject`."""
        try:
            return self._look()
        except Exception as error:
            if not _takes_the_device(error):
                raise
            return State([], [], lost=error)

    def _forwarding_gaps(self) -> tuple[Damage, ...]:
        wrapped = self._surface.wraps(self._allocator)
        names = [] if wrapped is None else not_forwarded(self._allocator, wrapped)
        if not names:
            return ()
        detail = f"it wraps {type(wrapped).__name__} and lacks {', '.join(names)}"
        return (Damage("not-forwarded", type(self._allocator).__name__, detail),)

    def _look(self) -> State:
        state = self._surface.lists(self._allocator)
        if self._gaps:
            state, self._gaps = replace(state, damage=self._gaps), ()  # told once
        for index, (output, slots) in enumerate(self._outputs):
            now = output.tolist()
            if now != slots:
                del self._outputs[index]  # told once
                detail = f"was {slots[:8]} when it was returned, is {now[:8]}"
                changed = Damage("output-changed", "an earlier output", detail)
                return replace(state, damage=(*state.damage, changed))
        return state

    # --- the calls --------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any, batch: int = 1, **kwargs: Any) -> Any:
        """Make the call itself: its cost is the allocator's, and what comes before and after is not."""
        act = getattr(self._allocator, method)
        sync_free = method in self._sync_free
        with self._watch.call(method, self._warmth, sync_free=sync_free, batch=batch):
            return act(*args, **kwargs)

    def _alloc(self, call: calls.AllocCall) -> torch.Tensor | None:
        return self._output(self._call("alloc", call.need))

    def _extend(self, call: calls.ExtendCall) -> torch.Tensor | None:
        prefix, prefix_cpu = self._lens("prefix_lens", call.prefix_lens)
        seq, seq_cpu = self._lens("seq_lens", call.seq_lens)
        last_loc = self._input("last_loc", call.last_locs)
        lens = (prefix, prefix_cpu, seq, seq_cpu) if self._surface.cpu_lens else (prefix, seq)
        method, told = "alloc_extend", dict[str, Any]()
        if call.logical:
            method = "alloc_logical_only"
        elif call.tail is not None:
            method, told = "alloc_extend_swa_tail", {"swa_tail_len": call.tail}
        elif self._surface.page_count:
            self._extends += 1
            told = {"num_new_pages": call.pages} if self._extends % 2 else {}
        if call.bases is not None:
            self._bases = list(call.bases)
            told["rotation_bases"] = self._bases
        batch = len(call.seq_lens)
        return self._output(self._call(method, *lens, last_loc, call.tokens, batch=batch, **told))

    def _decode(self, call: calls.DecodeCall) -> torch.Tensor | None:
        seq, seq_cpu = self._lens("seq_lens", call.seq_lens)
        last_loc = self._input("last_loc", call.last_locs)
        lens = (seq, seq_cpu) if self._surface.cpu_lens else (seq,)
        return self._output(self._call("alloc_decode", *lens, last_loc, batch=len(call.seq_lens)))

    def _free(self, call: calls.FreeCall) -> None:
        self._call(call.method, self._given(call.slots))

    def _free_segment(self, call: calls.FreeSegmentCall) -> None:
        self._call(call.method, self._given(call.slots), start_pos=call.start)

    def _free_segments(self, call: calls.FreeSegmentsCall) -> None:
        self._forget_given()
        segments = [(self._row_tensor(slots), start) for slots, start in call.segments]
        for (tensor, _), (slots, _) in zip(segments, call.segments, strict=True):
            self._slots_given.append(tensor)
            self._inputs.append(("free_index", tensor, slots))
        self._call("free_segments", segments)

    def _free_page_ids(self, call: calls.FreePageIdsCall) -> None:
        self._forget_given()
        pages = torch.tensor(call.pages, dtype=torch.int64, device=self._device)
        self._pages_given.append(pages)
        self._inputs.append(("page_ids", pages, call.pages))
        self._call("free_page_ids", pages)

    def _group_begin(self, _call: calls.GroupBeginCall) -> None:
        self._forget_given()
        self._call("free_group_begin")
        self._in_group = True

    def _group_end(self, _call: calls.GroupEndCall) -> None:
        self._in_group = False
        self._call("free_group_end")

    def _clobber(self, call: calls.ClobberCall) -> None:
        for slots in self._slots_given:
            slots.fill_(call.slot)
        for pages in self._pages_given:
            pages.fill_(call.slot // self._config.page_size)
        if self._outputs:
            output, _ = self._outputs.pop()
            output.fill_(call.slot)

    def _clear(self, _call: calls.ClearCall) -> None:
        self._call("clear")
        self._in_group = False
        self._shift_window()

    def _resize(self, call: calls.ResizeCall) -> None:
        self._call("resize", NewSize(call.size, call.size, call.side_size))
        self._in_group = False
        self._shift_window()

    def _remap(self, call: calls.RemapCall) -> None:
        full, swa = self._input("full_indices", call.full), self._input("swa_indices", call.swa)
        self._call("set_full_to_swa_mapping", full, swa)
        cleared = self._input("full_indices", call.cleared)
        if hasattr(self._allocator, "clear_full_to_swa_mapping"):
            self._call("clear_full_to_swa_mapping", cleared)
        else:  # as callers did before there was one
            self._call("set_full_to_swa_mapping", cleared, torch.zeros_like(cleared))

    def _buffer(self, call: calls.BufferCall) -> torch.Tensor | None:
        slots = self._input("allocated_indices", call.slots)
        return self._output(self._call("alloc_device_buffer", slots, call.need))

    def _alloc_group_begin(self, call: calls.AllocGroupBeginCall) -> None:
        self._call("alloc_group_begin", call.slots)

    def _alloc_group_end(self, _call: calls.AllocGroupEndCall) -> None:
        self._call("alloc_group_end")

    # --- tensors ----------------------------------------------------------------------------------

    def _output(self, output: Any) -> torch.Tensor | None:
        if output is None or (isinstance(output, torch.Tensor) and output.dim() == 1):
            return output
        kind = f"{output.dim()}-D tensor" if isinstance(output, torch.Tensor) else type(output).__name__
        raise TypeError(f"an allocation answered with a {kind}, neither None nor a 1-D tensor")

    def _lens(self, name: str, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths on the device, and their host copy (never one tensor: a caller has two)."""
        host = torch.tensor(lens, dtype=torch.int64)
        self._inputs.append((f"{name}_cpu", host, lens))
        return self._input(name, lens), host

    def _input(self, name: str, values: list[int]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        self._inputs.append((name, tensor, values))
        return tensor

    def _changed_inputs(self) -> list[Damage]:
        changed: list[Damage] = []
        for name, tensor, values in self._inputs:
            now = tensor.tolist()
            if now != values:
                changed.append(Damage("input-changed", name, f"was {values[:8]}, is {now[:8]}"))
        return changed

    def _row_tensor(self, slots: list[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=self._row_dtype, device=self._device)

    def _given(self, slots: list[int]) -> torch.Tensor:
        """A slot tensor for a free, remembered as the caller's own."""
        self._forget_given()
        tensor = self._row_tensor(slots)
        self._slots_given.append(tensor)
        self._inputs.append(("free_index", tensor, slots))
        return tensor

    def _forget_given(self) -> None:
        """Outside a group only the last free's tensors matter."""
        if not self._in_group:
            self._slots_given.clear()
            self._pages_given.clear()

    def _shift_window(self) -> None:
        """Make the pool a window onto a larger one, by renumbering its fresh free list."""
        if self._config.page_offset:
            name = free_list_name(self._allocator)
            setattr(self._allocator, name, getattr(self._allocator, name) + self._config.page_offset)
