"""The JSON form of traces, version 1: strict, plain, and stable.

A file is data and nothing else: it is decoded field by field against this shape, and anything unknown,
missing, mistyped, too large or of another version is refused with the file's name and the field's path.
The shape follows from the dataclasses of `kvproof.model`, so there is no second list of ops to keep.
"""

import stat
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, Union

import msgspec

from kvproof.model.base import Outcome
from kvproof.model.config import Config, validate
from kvproof.model.errors import UserError
from kvproof.model.ops import MISUSES, OP_TYPES, Misuse, Op
from kvproof.model.trace import Origin, Trace

FORMAT_VERSION: Final = 1
MAX_FILE_BYTES: Final = 32 << 20
MAX_OPS: Final = 1_000_000
MAX_NUMBER: Final = 1 << 40
MAX_ENTRIES: Final = 10_000
"""Rows, or other entries, that one op may name. Varied, a batch becomes as many calls as it has rows, each
with a look at the whole pool after it: 200,000 rows are minutes of work hidden in one op. The generator stays
below: its wide traces have 8 ops of at most 1025 new rows, so 8200 rows to decode; others have hundreds. The
sum over all ops is left to the file's size: 100,000 honest ops name as many rows as that one."""

OUTCOME_WORDS: Final = {
    Outcome.OOM: "None",
    Outcome.DONE: "done",
    Outcome.REFUSED: "refused",
    Outcome.NOTHING: "no call",
}
"""How a file says what the right answer to an op is, where it is not slots."""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a failing trace showed. `times`: "k of n" replays in a fresh process that failed alike."""

    fingerprint: str
    property: str
    op: str
    divergence: str
    step: int
    message: str
    times: str = ""


class TraceFile(msgspec.Struct, frozen=True):
    """A decoded file: the trace; the right outcome of each op, the slots or one of `OUTCOME_WORDS`, where a
    person wrote them down; and what the trace showed, where it failed."""

    trace: Trace
    outcomes: tuple[str | list[int], ...] | None = None
    evidence: Evidence | None = None


def op_name(op_type: type[Op]) -> str:
    """The op's name in a file: "FreeSegment" → "free-segment"."""
    name = op_type.__name__
    return "".join("-" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("-")


def _struct(source: type[Any], name: str, **options: Any) -> type[msgspec.Struct]:
    """A strict wire struct with the fields of a dataclass."""
    shape: list[Any] = [
        (entry.name, entry.type) if entry.default is MISSING else (entry.name, entry.type, entry.default)
        for entry in fields(source)
    ]
    return msgspec.defstruct(
        name, shape, frozen=True, forbid_unknown_fields=True, omit_defaults=True, **options
    )


_WIRE_OPS: Final[dict[type[Op], type[msgspec.Struct]]] = {
    op_type: _struct(op_type, f"Wire{op_type.__name__}", tag=op_name(op_type), tag_field="op")
    for op_type in OP_TYPES
}
_OP_OF_WIRE: Final = {wire: op_type for op_type, wire in _WIRE_OPS.items()}
_WireConfig: Final = _struct(Config, "WireConfig")
_WireOrigin: Final = _struct(Origin, "WireOrigin")
_WireOp: Final[Any] = Union[tuple(_WIRE_OPS.values())]  # noqa: UP007 - built at run time
_WireFile: Final[Any] = msgspec.defstruct(
    "WireFile",
    [
        ("format", int),
        ("config", _WireConfig),
        ("ops", tuple[_WireOp, ...]),
        ("origin", _WireOrigin, msgspec.field(default_factory=_WireOrigin)),
        ("outcomes", tuple[str | list[int], ...] | None, None),
        ("evidence", Evidence | None, None),
    ],
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
)


class _Versioned(msgspec.Struct):
    """Just enough of any version to say which one it is."""

    format: int


def encode(file: TraceFile) -> bytes:
    """The file's bytes: the same for equal files, one op a line, newline at the end."""
    trace = file.trace
    head = msgspec.to_builtins(
        _WireFile(
            format=FORMAT_VERSION,
            config=_wire(_WireConfig, trace.config),
            ops=(),
            origin=_wire(_WireOrigin, trace.origin),
            outcomes=file.outcomes,
            evidence=file.evidence,
        )
    )
    head.pop("ops", None)
    lines = [f"  {_json(key)}: {_json(value)}" for key, value in head.items()]
    ops = ",\n".join("    " + _json(msgspec.to_builtins(_wire(_WIRE_OPS[type(op)], op))) for op in trace.ops)
    lines.insert(2, '  "ops": [' + (f"\n{ops}\n  " if ops else "") + "]")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def decode(data: bytes, name: str) -> TraceFile:
    """The trace in these bytes. Raises UserError naming the file and the field."""
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{name}: larger than a trace may be ({MAX_FILE_BYTES} bytes); is it a trace?")
    try:
        version = msgspec.json.decode(data, type=_Versioned).format
        if version != FORMAT_VERSION:
            raise UserError(
                f"{name}: format {version} is not known, only {FORMAT_VERSION}; use the kvproof that wrote it"
            )
        wire = msgspec.json.decode(data, type=_WireFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{name}: not a valid trace: {error}") from None
    trace = Trace(
        _plain(Config, wire.config),
        tuple(_plain(_OP_OF_WIRE[type(op)], op) for op in wire.ops),
        _plain(Origin, wire.origin),
    )
    _check_bounds(trace, name)
    _check_outcomes(wire.outcomes, trace, name)
    return TraceFile(trace, wire.outcomes, wire.evidence)


def read(path: Path) -> TraceFile:
    """The trace in this file. Raises UserError when it cannot be read or is not one.

    Regular files only: a device may never end, and a named pipe may never begin.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: cannot be read: it is a folder, a pipe or a device; name a trace file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)  # what a file says of its size need not be so
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return decode(data, str(path))


def _check_bounds(trace: Trace, name: str) -> None:
    try:
        validate(trace.config)
    except UserError as error:
        raise UserError(f"{name}: $.{error}") from None
    if len(trace.ops) > MAX_OPS:
        raise UserError(f"{name}: $.ops has {len(trace.ops)} entries, more than {MAX_OPS}")
    for index, op in enumerate(trace.ops):
        if isinstance(op, Misuse) and op.kind not in MISUSES:
            raise UserError(f"{name}: $.ops[{index}].kind is {op.kind!r}; known: {', '.join(MISUSES)}")
        for entry in fields(op):
            value = getattr(op, entry.name)
            if isinstance(value, tuple) and len(value) > MAX_ENTRIES:
                raise UserError(
                    f"{name}: $.ops[{index}].{entry.name} has {len(value)} entries, more than {MAX_ENTRIES}; "
                    "spread them over several ops"
                )
            if not _small(value):
                raise UserError(f"{name}: $.ops[{index}].{entry.name} holds a number beyond 2**40")


def _check_outcomes(outcomes: tuple[str | list[int], ...] | None, trace: Trace, name: str) -> None:
    if outcomes is None:
        return
    if len(outcomes) != len(trace.ops):
        raise UserError(
            f"{name}: $.outcomes has {len(outcomes)} entries for {len(trace.ops)} ops; give one an op"
        )
    known = OUTCOME_WORDS.values()
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, str) and outcome not in known:
            raise UserError(
                f"{name}: $.outcomes[{index}] is {outcome!r}; give the slots, or one of: {', '.join(known)}"
            )


def _small(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_small(item) for item in value)
    return not isinstance(value, int) or abs(value) <= MAX_NUMBER


def _wire(shape: Any, source: Any) -> Any:
    return shape(**{entry.name: getattr(source, entry.name) for entry in fields(source)})


def _plain(shape: Any, wire: Any) -> Any:
    return shape(**{entry.name: getattr(wire, entry.name) for entry in fields(shape)})


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
