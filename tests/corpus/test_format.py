"""The trace format: what is written is read back, equal files have equal bytes, and damage is named.

The literal bytes below were written by hand from the format's description and pin version 1.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof.corpus import format as trace_format
from kvproof.corpus.format import Evidence, TraceFile, decode, encode, op_name, read
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.errors import UserError
from kvproof.model.ops import OP_TYPES
from kvproof.model.trace import Origin, Trace
from kvproof.properties import generate, space
from tests.model.strategies import SMALL, configs, op_lists

PINNED = b"""{
  "format": 1,
  "config": {"allocator":"paged","size":18,"page_size":4,"need_sort":true,"row_dtype":"int32"},
  "ops": [
    {"op":"extend","entries":[[-1,5],[0,2]]},
    {"op":"decode","rows":[0]},
    {"op":"alloc","pages":1},
    {"op":"free","rows":[1,0],"keep":4,"order":1},
    {"op":"free-segment","row":1},
    {"op":"free-segments","row":0,"start":4,"cuts":[1]},
    {"op":"free-pages","row":0,"keep":1},
    {"op":"group-begin"},
    {"op":"group-end"},
    {"op":"clobber"},
    {"op":"clear"},
    {"op":"resize","pages":3,"spare":2},
    {"op":"misuse","kind":"double-free"}
  ],
  "origin": {"target":"null","lane":"seeded","seed":7,"lease":0,"index":3,"note":"by hand"},
  "outcomes": ["None","done",[4],"done","done","done","done","done","done","done","done","no call","refused"],
  "evidence": {"fingerprint":"0123abcd","property":"P1","op":"Free","divergence":"x","step":12,"message":"m"}
}
"""

PINNED_FAMILY = b"""{
  "format": 1,
  "config": {"allocator":"hisparse-v4","size":64,"page_size":8,"swa_size":48,"device_size":12},
  "ops": [
    {"op":"extend-tail","row":-1,"tokens":9,"tail":2},
    {"op":"extend-logical","entries":[[-1,5]]},
    {"op":"free-swa","row":1,"start":3,"tokens":2},
    {"op":"free-swa-segment","row":0,"start":8},
    {"op":"free-full","row":0,"keep":8},
    {"op":"free-full-segment","row":0},
    {"op":"remap","row":0,"donor":1,"pages":1},
    {"op":"free-device","row":0,"tokens":4},
    {"op":"device-buffer","row":1,"pages":2},
    {"op":"free-buffer"},
    {"op":"resize","pages":6,"side":4},
    {"op":"alloc-group-begin","slots":3},
    {"op":"alloc-group-end"},
    {"op":"chain","base":1,"tokens":16}
  ],
  "origin": {}
}
"""

FAMILY = TraceFile(
    Trace(
        Config("hisparse-v4", 64, 8, swa_size=48, device_size=12),
        (
            ops.ExtendTail(-1, 9, 2),
            ops.ExtendLogical(((-1, 5),)),
            ops.FreeSwa(1, 3, 2),
            ops.FreeSwaSegment(0, 8),
            ops.FreeFull(0, 8),
            ops.FreeFullSegment(0),
            ops.Remap(0, 1, 0, 1),
            ops.FreeDevice(0, 0, 4),
            ops.DeviceBuffer(1, 2),
            ops.FreeBuffer(),
            ops.Resize(6, 0, 4),
            ops.AllocGroupBegin(3),
            ops.AllocGroupEnd(),
            ops.Chain(1, 16),
        ),
    )
)
"""Any op may stand in any trace: one that a kind does not know comes to nothing there."""

SIDES = {
    "swa": b'"size":32,"page_size":4,"swa_size":24',
    "swa-ring": b'"size":32,"page_size":4,"ring":5,"request_rows":3',
    "pure-swa": b'"size":8,"page_size":1',
    "hisparse": b'"size":16,"page_size":4,"ratio":2',
    "mamba": b'"size":8,"page_size":1',
    "page-interleave": b'"size":16,"page_size":4,"shards":2',
}


@pytest.mark.parametrize("allocator", SIDES)
def test_what_a_config_says_of_its_sides_is_pinned(allocator):
    written = encode(TraceFile(Trace(SMALL[allocator], ())))
    assert b'"config": {"allocator":"%s",%s},\n' % (allocator.encode(), SIDES[allocator]) in written
    assert decode(written, "x").trace.config == SMALL[allocator]


FILE = TraceFile(
    Trace(
        Config("paged", 18, 4, need_sort=True, row_dtype="int32"),
        (
            ops.Extend(((-1, 5), (0, 2))),
            ops.Decode((0,)),
            ops.Alloc(1),
            ops.Free((1, 0), 4, 1),
            ops.FreeSegment(1),
            ops.FreeSegments(0, 4, (1,)),
            ops.FreePages(0, 1),
            ops.GroupBegin(),
            ops.GroupEnd(),
            ops.Clobber(),
            ops.Clear(),
            ops.Resize(3, 2),
            ops.Misuse("double-free"),
        ),
        Origin("null", "seeded", 7, 0, 3, note="by hand"),
    ),
    ("None", "done", [4], *["done"] * 8, "no call", "refused"),
    Evidence("0123abcd", "P1", "Free", "x", 12, "m"),
)


def test_version_1_is_pinned_in_both_directions():
    assert {type(op) for file in (FILE, FAMILY) for op in file.trace.ops} == set(OP_TYPES)
    for file, pinned in ((FILE, PINNED), (FAMILY, PINNED_FAMILY)):
        assert encode(file) == pinned
        assert decode(pinned, "pinned.json") == file


def test_op_names():
    assert [op_name(op_type) for op_type in (ops.FreeSegments, ops.Clear)] == ["free-segments", "clear"]
    assert len({op_name(op_type) for op_type in OP_TYPES}) == len(OP_TYPES)


ORIGINS = st.builds(
    Origin,
    target=st.text(max_size=5),
    seed=st.none() | st.integers(0, 1 << 62),
    case=st.text(max_size=5),
    note=st.text(max_size=20),
)
OUTCOMES = st.one_of(
    st.sampled_from(["None", "done", "refused", "no call"]), st.lists(st.integers(0, 1 << 40), max_size=3)
)


@given(configs(), op_lists(most=12), ORIGINS, st.data())
def test_what_is_written_is_read_back(config, trace, origin, data):
    outcomes = data.draw(st.none() | st.tuples(*[OUTCOMES] * len(trace)))
    file = TraceFile(Trace(config, tuple(trace), origin), outcomes)
    written = encode(file)
    assert decode(written, "x") == file
    assert encode(decode(written, "x")) == written
    # One op a line, and plain JSON to everybody else.
    assert written.endswith(b"\n}\n")
    assert len(json.loads(written)["ops"]) == len(trace)
    assert written.count(b'\n    {"op":') == len(trace)


def test_layout_and_order_of_the_fields_do_not_matter_to_a_reader():
    shuffled = json.dumps(dict(reversed(json.loads(PINNED).items())), indent=3).encode()
    assert shuffled != PINNED
    assert encode(decode(shuffled, "x")) == PINNED


DAMAGE = [
    (b'"format": 1', b'"format": 2', r"format 2 is not known, only 1"),
    (b'"format": 1', b'"format": "1"', r"\$\.format"),
    (b'"format": 1', b'"fmt": 1', r"field `format`"),
    (b'"config": ', b'"konfig": ', r"field `(konfig|config)`"),
    (b'"page_size":4', b'"page_size":"4"', r"\$\.config\.page_size"),
    (b'"page_size":4', b'"page_size":4.5', r"\$\.config\.page_size"),
    (b'"page_size":4', b'"page_size":null', r"\$\.config\.page_size"),
    (b'"page_size":4', b'"page_size":0', r"\$\.config\.page_size is 0"),
    (b'"page_size":4', b'"page_size":4,"swa":3', r"field `swa` - at `\$\.config`"),
    (b',"page_size":4', b"", r"field `page_size` - at `\$\.config`"),
    (b'"need_sort":true', b'"need_sort":1', r"\$\.config\.need_sort"),
    (b'"size":18', b'"size":99999999999', r"\$\.config\.size is 99999999999"),
    (b'"size":18', b'"size":3', r"\$\.config\.size is 3"),
    (b'"paged"', b'"heap"', r"\$\.config\.allocator is 'heap'"),
    (b'"int32"', b'"int8"', r"\$\.config\.row_dtype is 'int8'"),
    (b'"ops": [', b'"ops": {}, "more": [', r"\$\.ops|`more`"),
    (b'"op":"clear"', b'"op":"erase"', r"'erase' - at `\$\.ops\[10\]\.op`"),
    (b'"op":"clear"', b'"po":"clear"', r"`op` - at `\$\.ops\[10\]`"),
    (b'{"op":"clear"}', b"7", r"\$\.ops\[10\]"),
    (b'"op":"alloc","pages":1', b'"op":"alloc"', r"field `pages` - at `\$\.ops\[2\]`"),
    (b'"op":"alloc","pages":1', b'"op":"alloc","pages":true', r"\$\.ops\[2\]\.pages"),
    (b'"op":"alloc","pages":1', b'"op":"alloc","pages":1,"rows":[]', r"field `rows` - at `\$\.ops\[2\]`"),
    (b'"op":"alloc","pages":1', b'"op":"alloc","pages":1099511627777', r"\$\.ops\[2\]\.pages .*2\*\*40"),
    (b'"op":"alloc","pages":1', b'"op":"alloc","pages":-1099511627777', r"\$\.ops\[2\]\.pages .*2\*\*40"),
    (b"[0,2]", b"[0,1099511627777]", r"\$\.ops\[0\]\.entries .*2\*\*40"),
    (b"[0,2]", b"[0,2,3]", r"\$\.ops\[0\]\.entries\[1\]"),
    (b"[0,2]", b'[0,"2"]', r"\$\.ops\[0\]\.entries\[1\]\[1\]"),
    (b'"double-free"', b'"treble-free"', r"\$\.ops\[12\]\.kind is 'treble-free'"),
    (b'"seed":7', b'"seed":"7"', r"\$\.origin\.seed"),
    (b'"lane":"seeded"', b'"line":"seeded"', r"field `line` - at `\$\.origin`"),
    (b'"None",', b"", r"\$\.outcomes has 12 entries for 13 ops"),
    (b'"None",', b'"none",', r"\$\.outcomes\[0\] is 'none'"),
    (b'"None",', b'{"a":1},', r"\$\.outcomes\[0\]"),
    (b'"None",', b"[4.5],", r"\$\.outcomes\[0\]\[0\]"),
    (b'"step":12', b'"step":"12"', r"\$\.evidence\.step"),
    (b'"step":12', b'"steps":12', r"\$\.evidence"),
    (b'"origin": {', b'"origins": {', r"field `origins`"),
]
DAMAGED_SIDES = [
    (b'"device_size":12', b'"device_size":1', r"\$\.config\.device_size is 1; it must give 1\.\."),
    (b',"device_size":12', b"", r"\$\.config\.device_size is 0"),
    (b'"swa_size":48', b'"swa_size":48,"ratio":2', r"\$\.config\.ratio is 2; .* no such thing"),
    (b'"swa_size":48', b'"swa_size":"48"', r"\$\.config\.swa_size"),
    (b'"page_size":8', b'"page_size":6', r"\$\.config\.page_size is 6; .* multiples of 4"),
    (b'"donor":1,', b"", r"field `donor` - at `\$\.ops\[6\]`"),
    (b'"side":4', b'"side":1099511627777', r"\$\.ops\[10\]\.side .*2\*\*40"),
]


@pytest.mark.parametrize(
    ("pinned", "old", "damaged", "message"),
    [(PINNED, *damage) for damage in DAMAGE] + [(PINNED_FAMILY, *damage) for damage in DAMAGED_SIDES],
)
def test_damage_is_an_error_that_names_file_and_field(pinned, old, damaged, message):
    assert pinned.count(old) == 1
    with pytest.raises(UserError, match=message) as caught:
        decode(pinned.replace(old, damaged), "folder/a.json")
    assert str(caught.value).startswith("folder/a.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x01\x02",
        b"null",
        b"[]",
        PINNED[:200],
        PINNED + b"x",
        b"\xef\xbb\xbf" + PINNED,
        PINNED.replace(b"by hand", b"by \xff hand"),
        b'{"format": ' + b"[" * 200_000,
        b'{"format": 1, "config": ' + b'{"a":' * 200_000,
    ],
    ids=range(10),
)
def test_what_is_no_json_of_ours_is_an_error_that_names_the_file(data):
    with pytest.raises(UserError, match=r"^a\.json: not a valid trace: "):
        decode(data, "a.json")


@pytest.mark.parametrize("size", range(0, len(PINNED) - 1, 37))
def test_a_cut_file_is_never_a_trace(size):
    with pytest.raises(UserError, match=r"^a\.json: "):
        decode(PINNED[:size], "a.json")


def test_the_bounds_of_numbers_are_allowed_themselves():
    for number in (1 << 40, -(1 << 40)):
        file = TraceFile(Trace(Config("paged", 16, 4), (ops.Alloc(number),)))
        assert decode(encode(file), "x") == file


def test_too_many_ops(monkeypatch):
    monkeypatch.setattr(trace_format, "MAX_OPS", 12)
    with pytest.raises(UserError, match=r"^a\.json: \$\.ops has 13 entries, more than 12$"):
        decode(PINNED, "a.json")


def test_an_op_that_names_too_many(monkeypatch):
    """In whatever field; the bound itself is allowed."""
    named = {
        "entries": ops.ExtendLogical(((-1, 1),) * 5),
        "rows": ops.Free((1,) * 5),
        "cuts": ops.FreeSegments(0, 0, (1,) * 5),
    }
    for field, op in named.items():
        data = encode(TraceFile(Trace(Config("paged", 16, 4), (ops.Clear(), op))))
        monkeypatch.setattr(trace_format, "MAX_ENTRIES", 5)
        assert decode(data, "a.json").trace.ops[1] == op
        monkeypatch.setattr(trace_format, "MAX_ENTRIES", 4)
        with pytest.raises(UserError, match=rf"^a\.json: \$\.ops\[1\]\.{field} has 5 entries, more than 4; "):
            decode(data, "a.json")


def test_the_bound_is_far_below_minutes_and_above_the_generator():
    """Rows that the ops of a wide trace have opened may all be decoded at once."""
    assert space.WIDE_OPS * max(generate._WIDE_BATCHES) <= trace_format.MAX_ENTRIES <= 10_000
    long = Trace(Config("paged", 16, 4), (ops.Extend(((-1, 1), (0, 2))), ops.Decode((0, 1))) * 50_000)
    assert decode(encode(TraceFile(long)), "x").trace == long


def test_too_many_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(trace_format, "MAX_FILE_BYTES", len(PINNED) - 1)
    with pytest.raises(UserError, match=r"^a\.json: larger than a trace may be"):
        decode(PINNED, "a.json")
    path = tmp_path / "big.json"
    path.write_bytes(PINNED)
    with pytest.raises(UserError, match=r"big\.json: larger than a trace may be"):
        read(path)


def test_reading_a_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(PINNED)
    assert read(path) == FILE


def test_only_a_regular_file_is_read(tmp_path):
    """A device may never end, and opening a pipe waits for somebody to write."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), Path("/dev/null"), tmp_path):
        with pytest.raises(
            UserError, match="cannot be read: it is a folder, a pipe or a device; name a trace"
        ):
            read(path)


def test_what_a_file_says_of_its_size_is_not_believed(monkeypatch):
    """Files of /proc say 0."""
    monkeypatch.setattr(trace_format, "MAX_FILE_BYTES", 10)
    with pytest.raises(UserError, match=r"^/proc/self/status: larger than a trace may be"):
        read(Path("/proc/self/status"))


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_what_cannot_be_read_is_named(tmp_path: Path, name):
    with pytest.raises(UserError, match="cannot be read") as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_damaged_file_is_named_by_its_path(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(PINNED[:100])
    with pytest.raises(UserError, match="not a valid trace") as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
