"""Failures as text for people: the minimal trace, the page maps around the failing op, the line to reproduce.

Plain strings; colours are the terminal reporter's.
"""

from dataclasses import fields
from shlex import quote

from kvproof.ci.isolation import RUNS_TO_GROW
from kvproof.corpus.format import op_name
from kvproof.model.config import Config
from kvproof.model.ops import NEW_ROW, Extend, ExtendLogical, Op
from kvproof.model.trace import Trace
from kvproof.properties.catalogue import by_id
from kvproof.properties.failure import OUT_OF_MEMORY, Failure
from kvproof.properties.pagemap import PageMaps

_MOST_OPS = 40
_MOST_ENTRIES = 12
_SIDES = ("swa_size", "device_size", "ratio", "shards", "ring", "request_rows")


def replay_line(path: str, flags: str, failure: Failure) -> str:
    """The command that shows the failure again. flags: with a space before each."""
    if failure.divergence == OUT_OF_MEMORY:
        flags += f" --times {RUNS_TO_GROW}"  # memory is kept, and adds up, within one process
    return f"kvproof replay {quote(path)}{flags}"


def op_text(op: Op) -> str:
    """One op on one line: "extend new +33, row 0 +1"."""
    name = op_name(type(op))
    if isinstance(op, (Extend, ExtendLogical)):
        entries = [f"{'new' if row <= NEW_ROW else f'row {row}'} +{tokens}" for row, tokens in op.entries]
        return f"{name} {_listed(entries)}" if entries else f"{name} nothing"
    details = []
    for entry in fields(op):
        value = getattr(op, entry.name)
        if isinstance(value, tuple):
            details.append(f"{entry.name} {_listed([str(item) for item in value]) or 'none'}")
        elif isinstance(value, bool):
            details.extend([entry.name] if value else [])
        else:
            details.append(f"{entry.name} {value}")
    return " ".join([name, *details])


def _listed(entries: list[str]) -> str:
    left = len(entries) - _MOST_ENTRIES
    return ", ".join(entries[:_MOST_ENTRIES]) + (f", … {left} more" if left > 0 else "")


def config_text(config: Config) -> str:
    """The config on one line, defaults left out."""
    text = f"{config.allocator}, {config.num_pages} pages of {config.page_size}, size {config.size}"
    for name in _SIDES:
        if value := getattr(config, name):
            text += f", {name} {value}"
    if config.need_sort:
        text += ", need_sort"
    if config.checked:
        text += ", checked"
    if config.row_dtype != "int64":
        text += f", rows {config.row_dtype}"
    if config.page_offset:
        text += f", pages from {config.page_offset + 1}"
    return text


def heading(failure: Failure) -> str:
    """Fingerprint, property and kind of fault."""
    name = by_id(failure.property_id).name
    return f"{failure.fingerprint}  {failure.property_id} {name}  {failure.op}: {failure.divergence}"


def failure_lines(trace: Trace, failure: Failure, maps: PageMaps | None, reproduce: str) -> list[str]:
    """Everything a person needs, without the heading."""
    lines = [f"allocator  {config_text(trace.config)}"]
    first = max(0, min(failure.step + 1, len(trace.ops)) - _MOST_OPS)
    if first:
        lines.append(f"           … {first} ops before")
    for index, op in enumerate(trace.ops[first:], first):
        lines.append(f"{'->' if index == failure.step else '  '} op {index:<5} {op_text(op)}")
    lines.append(f"found      {failure.message}")
    if maps is not None:
        lines.append(f"before     {maps.before}")
        lines.append(f"expected   {maps.expected}")
        lines.append(f"actual     {maps.actual}")
    lines.append(f"reproduce  {reproduce}")
    return lines
