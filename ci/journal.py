"""The journal: what a worker is about to do, on disk before it does it.

One file a worker, of a fixed size that its command line has set aside before the worker starts, so that a
disk that fills up later cannot end anybody. The worker maps it into memory; a store into the mapping costs
half a microsecond an op and outlives the process, however it dies (not the machine: nothing is forced to the
device).

    head     magic, count                     count: ops announced so far, never reset
    record   length, serial, crc32, payload   the config of a fresh allocator and the path it is on
    record   length, serial, crc32, payload   one op, as JSON
    ...

A fresh allocator begins the file anew under the next serial number: records of an older one end the reading,
and so does whatever is cut short or damaged. Ops beyond the end of the file are counted and not kept
(`whole`); a lease's longest trace takes a tenth of it.
"""

import mmap
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec

from kvproof.model.config import Config
from kvproof.model.errors import InfrastructureError
from kvproof.model.ops import OP_TYPES, Op

JOURNAL_BYTES: Final = 4 << 20

_HEAD: Final = struct.Struct("=8sQ")
_MAGIC: Final = b"kvproof1"
_COUNT: Final = struct.Struct("=Q")
_COUNT_AT: Final = 8
_RECORD: Final = struct.Struct("<III")
_RECORD_BYTES: Final = _RECORD.size
_pack_record: Final = _RECORD.pack_into
_record_at: Final = _RECORD.unpack_from

_encode: Final = msgspec.json.Encoder().encode
_OP_CODES: Final = {op_type: bytes([index]) for index, op_type in enumerate(OP_TYPES)}


class _Begin(msgspec.Struct, frozen=True):
    config: Config
    path: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What a journal held when its worker was last seen.

    config, path: of the allocator in hand. ops: announced for it, the last one perhaps not ended. whole:
    whether that is all of them.
    """

    config: Config
    path: str
    ops: tuple[Op, ...]
    whole: bool = True


def set_aside(path: Path) -> None:
    """Make the file, empty, with all its room taken. Raises InfrastructureError when there is none."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, JOURNAL_BYTES)
            file.write(_HEAD.pack(_MAGIC, 0))
    except OSError as error:
        raise InfrastructureError(
            f"{path}: no room for a journal of {JOURNAL_BYTES >> 20} MiB: {error.strerror or error}; free"
            " some space, or choose another folder"
        ) from None


class Journal:
    """The worker's end: a `Witness` that writes to a file made by `set_aside`."""

    __slots__ = ("_count", "_counter", "_end", "_map", "_most", "_serial")

    def __init__(self, path: Path) -> None:
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), JOURNAL_BYTES)
        except (OSError, ValueError) as error:
            raise InfrastructureError(f"{path}: the journal cannot be mapped: {error}") from None
        self._counter = memoryview(self._map)[_COUNT_AT : _HEAD.size].cast("Q")
        # Room is kept for the head of a record: with a length of zero it says that the file was full.
        self._most = JOURNAL_BYTES - _RECORD_BYTES
        self._count = 0
        self._serial = 0
        self._end = _HEAD.size

    def begin(self, config: Config, path: str) -> None:
        """See `Witness`."""
        # Another process may have written here since: its records must not pass for ours, nor its ops be
        # lost.
        self._count = self._counter[0]
        self._serial = (_record_at(self._map, _HEAD.size)[1] + 1) & 0xFFFFFFFF
        self._end = _HEAD.size
        self._add(_encode(_Begin(config, path)))

    def about_to(self, op: Op) -> None:
        """See `Witness`."""
        # Every op of a campaign comes by here, and half a microsecond is some percent of its throughput: what
        # `_add` does, without calling it.
        payload = _OP_CODES[type(op)] + _encode(op)
        at = self._end
        end = at + _RECORD_BYTES + len(payload)
        if end > self._most:
            self._add(payload)
            return
        self._map[at + _RECORD_BYTES : end] = payload
        _pack_record(self._map, at, len(payload), self._serial, crc32(payload, self._serial))
        self._end = end
        self._count += 1
        self._counter[0] = self._count

    def close(self) -> None:
        """Let go of the file."""
        self._counter.release()
        self._map.close()

    def _add(self, payload: bytes) -> None:
        at = self._end
        start = at + _RECORD_BYTES
        end = start + len(payload)
        if end <= self._most:
            self._map[start:end] = payload
            _pack_record(self._map, at, len(payload), self._serial, crc32(payload, self._serial))
            self._end = end
        elif at <= self._most:
            _pack_record(self._map, at, 0, self._serial, 0)
            self._end = JOURNAL_BYTES
        self._count += 1
        self._counter[0] = self._count


class Pulse:
    """Reads how many ops a worker has announced; changes as long as it gets on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def count(self) -> int:
        """Ops and allocators announced so far; 0 when the file has been cut off."""
        # Not by a mapping: when somebody cuts the file off, reading one ends the process that reads.
        found = os.pread(self._file.fileno(), _COUNT.size, _COUNT_AT)
        return int.from_bytes(found, sys.byteorder)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def read_journal(path: Path) -> Entry | None:
    """What the journal holds, as far as it is sound; None when that is nothing. Never raises for its
    contents."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if data[:8] != _MAGIC:
        return None
    records, whole = _records(data)
    try:
        begin = msgspec.json.decode(records[0], type=_Begin) if records else None
        ops = tuple(_op(record) for record in records[1:])
    except (msgspec.MsgspecError, IndexError):
        return None
    return None if begin is None else Entry(begin.config, begin.path, ops, whole)


def _records(data: bytes) -> tuple[list[bytes], bool]:
    """The sound records of the newest serial, and whether none was left out for want of room."""
    found: list[bytes] = []
    at, newest = _HEAD.size, None
    while at + _RECORD_BYTES <= len(data):
        length, serial, crc = _record_at(data, at)
        if newest is not None and serial != newest:
            break
        newest = serial
        if not length:
            return found, crc != 0 or not found
        payload = data[at + _RECORD_BYTES : at + _RECORD_BYTES + length]
        if len(payload) < length or crc32(payload, serial) != crc:
            break
        found.append(payload)
        at += _RECORD_BYTES + length
    return found, True


def _op(record: bytes) -> Op:
    op: Op = msgspec.json.decode(record[1:], type=OP_TYPES[record[0]])
    return op
