"""One call of a trace as the statements that make it: argument tensors first, then the call itself.

Spelled as `impl.targets.tensors` makes them, for the release at hand. Not here: what must come of a call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvproof.ci.literals import Group, call, listed, numbers
from kvproof.impl.targets.sglang.spelling import Spelling
from kvproof.model import calls
from kvproof.model.calls import Call
from kvproof.model.config import Config
from kvproof.properties.record import Record

_Values = list[tuple[str, str | Group]]


@dataclass(slots=True)
class Written:
    """One call. told: for people. given: assignments before it, "name = " and value. call: the call as an
    expression, None where the op makes none. after: statements that belong to it and have no answer."""

    told: str
    given: _Values = field(default_factory=list)
    call: Group | None = None
    after: list[str] = field(default_factory=list)


class Calls:
    """Writes the calls of one trace, in order, for the tensors that a caller may overwrite are those of
    earlier ones."""

    def __init__(self, spelling: Spelling, config: Config) -> None:
        self._spelling = spelling
        self._config = config
        self._extends = 0
        self._in_group = False
        self._freed: list[tuple[str, int]] = []
        self._outputs = 0
        self._writers: dict[type[Call], Callable[[int, Any], Written]] = {
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

    def write(self, number: int, record: Record) -> Written:
        """The call as statements. number: of it in the script, from 1."""
        written = self._writers[type(record.call)](number, record.call)
        if record.answer.slots is not None:
            self._outputs += 1
        return written

    def name(self, made: Call) -> str:
        """The allocator's method that it calls."""
        match made:
            case calls.ExtendCall():
                if made.logical:
                    return "alloc_logical_only"
                return "alloc_extend" if made.tail is None else "alloc_extend_swa_tail"
            case calls.FreeCall() | calls.FreeSegmentCall():
                return made.method
            case _:
                return _NAMES[type(made)]

    # --- allocation -------------------------------------------------------------------------------

    def _alloc(self, _number: int, made: calls.AllocCall) -> Written:
        return Written(f"alloc of {made.need} slots", [], self._call(made, str(made.need)))

    def _extend(self, _number: int, made: calls.ExtendCall) -> Written:
        given = self._lens("prefix_lens", made.prefix_lens) + self._lens("seq_lens", made.seq_lens)
        given.append(("last_loc = ", _tensor(made.last_locs)))
        told: dict[str, str | Group | None] = {}
        if made.tail is not None:
            told["swa_tail_len"] = str(made.tail)
        elif not made.logical and self._spelling.page_count:
            self._extends += 1
            told["num_new_pages"] = str(made.pages) if self._extends % 2 else None
        if made.bases is not None:
            given.append(("bases = ", listed([str(base) for base in made.bases])))
            told["rotation_bases"] = "bases"
        names = [before.removesuffix(" = ") for before, _ in given if before != "bases = "]
        grown = [f"{old} to {new}" for old, new in zip(made.prefix_lens, made.seq_lens, strict=True)]
        text = f"{self.name(made)}, rows grow from {', '.join(grown)} tokens" if grown else "no rows at all"
        return Written(text, given, self._call(made, *names, str(made.tokens), **told))

    def _decode(self, _number: int, made: calls.DecodeCall) -> Written:
        given = [*self._lens("seq_lens", made.seq_lens), ("last_loc = ", _tensor(made.last_locs))]
        names = [before.removesuffix(" = ") for before, _ in given]
        rows = ", ".join(map(str, made.seq_lens)) or "no rows"
        return Written(f"alloc_decode, a token more for each row: {rows}", given, self._call(made, *names))

    def _buffer(self, _number: int, made: calls.BufferCall) -> Written:
        given: _Values = [("slots = ", _tensor(made.slots))]
        text = f"alloc_device_buffer of {made.need} slots"
        return Written(text, given, self._call(made, "slots", str(made.need)))

    def _alloc_group_begin(self, _number: int, made: calls.AllocGroupBeginCall) -> Written:
        return Written(f"{made.slots} slots are set aside", [], self._call(made, str(made.slots)))

    def _alloc_group_end(self, _number: int, made: calls.AllocGroupEndCall) -> Written:
        return Written("what is left of them goes back", [], self._call(made))

    # --- release ----------------------------------------------------------------------------------

    def _free(self, number: int, made: calls.FreeCall) -> Written:
        name = self._kept(number)
        return Written(self.name(made), [(f"{name} = ", self._row(made.slots))], self._call(made, name))

    def _free_segment(self, number: int, made: calls.FreeSegmentCall) -> Written:
        name = self._kept(number)
        text = f"{made.method}, from position {made.start} of a row on"
        given: _Values = [(f"{name} = ", self._row(made.slots))]
        return Written(text, given, self._call(made, name, start_pos=str(made.start)))

    def _free_segments(self, number: int, made: calls.FreeSegmentsCall) -> Written:
        self._forget()
        given: _Values = []
        pairs: list[str | Group] = []
        for place, (slots, start) in enumerate(made.segments):
            name = f"freed_{number}_{place}"
            self._freed.append((name, 1))
            given.append((f"{name} = ", self._row(slots)))
            pairs.append(f"({name}, {start})")
        return Written("free_segments, of one row", given, self._call(made, listed(pairs)))

    def _free_page_ids(self, number: int, made: calls.FreePageIdsCall) -> Written:
        name = self._kept(number, self._config.page_size)
        given: _Values = [(f"{name} = ", _tensor(made.pages))]
        return Written("free_page_ids", given, self._call(made, name))

    def _group_begin(self, _number: int, made: calls.GroupBeginCall) -> Written:
        self._forget()
        self._in_group = True
        return Written("a group of frees begins", [], self._call(made))

    def _group_end(self, _number: int, made: calls.GroupEndCall) -> Written:
        self._in_group = False
        return Written("the group ends", [], self._call(made))

    def _clobber(self, _number: int, made: calls.ClobberCall) -> Written:
        lines = [f"{name}.fill_({made.slot // page_size})" for name, page_size in self._freed]
        if self._outputs:
            self._outputs -= 1
            lines.append(f"ANSWERS.pop().fill_({made.slot})")
        text = "none: the caller writes to tensors of its own, which it freed from or was given"
        return Written(text, after=lines)

    # --- the rest ---------------------------------------------------------------------------------

    def _clear(self, _number: int, made: calls.ClearCall) -> Written:
        self._in_group = False
        return Written("clear", [], self._call(made), list(self._spelling.reset))

    def _resize(self, _number: int, made: calls.ResizeCall) -> Written:
        self._in_group = False
        size = call(
            "SimpleNamespace",
            max_total_num_tokens=str(made.size),
            full_max_total_num_tokens=str(made.size),
            swa_max_total_num_tokens=str(made.side_size),
        )
        text = f"resize to {made.size} slots"
        return Written(text, [("size = ", size)], self._call(made, "size"), list(self._spelling.reset))

    def _remap(self, _number: int, made: calls.RemapCall) -> Written:
        given: _Values = [("full = ", _tensor(made.full)), ("swa = ", _tensor(made.swa))]
        given.append(("cleared = ", _tensor(made.cleared)))
        after = ["call(allocator.clear_full_to_swa_mapping, cleared)"]
        return Written("mapped slots change their places", given, self._call(made, "full", "swa"), after)

    def _call(self, made: Call, *arguments: str | Group, **named: str | Group | None) -> Group:
        return call("call", f"allocator.{self.name(made)}", *arguments, **named)

    def _lens(self, name: str, lens: list[int]) -> _Values:
        """Lengths on the device, and a host copy where the release wants one."""
        given: _Values = [(f"{name} = ", _tensor(lens))]
        if self._spelling.cpu_lens:
            given.append((f"{name}_cpu = ", call("tensor", numbers(lens), device='"cpu"')))
        return given

    def _row(self, slots: list[int]) -> Group:
        dtype = self._config.row_dtype
        return _tensor(slots) if dtype == "int64" else call("tensor", numbers(slots), f"torch.{dtype}")

    def _kept(self, number: int, page_size: int = 1) -> str:
        """A name for what is freed, which the caller may overwrite later."""
        self._forget()
        name = f"freed_{number}"
        self._freed.append((name, page_size))
        return name

    def _forget(self) -> None:
        """Outside a group only the last free's tensors matter."""
        if not self._in_group:
            self._freed.clear()


_NAMES = {
    calls.AllocCall: "alloc",
    calls.DecodeCall: "alloc_decode",
    calls.FreeSegmentsCall: "free_segments",
    calls.FreePageIdsCall: "free_page_ids",
    calls.GroupBeginCall: "free_group_begin",
    calls.GroupEndCall: "free_group_end",
    calls.ClobberCall: "tensors of the caller",
    calls.ClearCall: "clear",
    calls.ResizeCall: "resize",
    calls.RemapCall: "set_full_to_swa_mapping",
    calls.BufferCall: "alloc_device_buffer",
    calls.AllocGroupBeginCall: "alloc_group_begin",
    calls.AllocGroupEndCall: "alloc_group_end",
}


def _tensor(values: list[int]) -> Group:
    return call("tensor", numbers(values))
