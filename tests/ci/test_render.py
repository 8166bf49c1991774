"""Failures as text: ops, configs and everything a person needs to see a failure again."""

from __future__ import annotations

import pytest

from kvproof.ci.render import config_text, failure_lines, heading, op_text
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.trace import Trace
from kvproof.properties.failure import Failure
from kvproof.properties.pagemap import PageMaps
from tests.model import strategies
from tests.model.strategies import new

POOL = Config("paged", 16, 4)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (ops.Extend(((-1, 33), (0, 1))), "extend new +33, row 0 +1"),
        (ops.Extend(()), "extend nothing"),
        (ops.Decode((0, 2)), "decode rows 0, 2"),
        (ops.Decode(()), "decode rows none"),
        (ops.Alloc(3), "alloc pages 3"),
        (ops.Free((1,), 2, 1), "free rows 1 keep 2 order 1"),
        (ops.Free((1,), 2, False), "free rows 1 keep 2"),
        (ops.FreeSegments(1, 2, (3,)), "free-segments row 1 start 2 cuts 3"),
        (ops.GroupBegin(), "group-begin"),
        (ops.Resize(3, 1), "resize pages 3 spare 1 side 0"),
        (ops.Resize(3, 1, 2), "resize pages 3 spare 1 side 2"),
        (ops.ExtendLogical(((-1, 33), (0, 1))), "extend-logical new +33, row 0 +1"),
        (ops.ExtendTail(1, 9, 2), "extend-tail row 1 tokens 9 tail 2"),
        (ops.Remap(0, 1, 2, 3), "remap row 0 donor 1 start 2 pages 3"),
        (ops.Misuse("double-free", 2), "misuse kind double-free row 2"),
        (ops.Decode(tuple(range(20))), "decode rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … 8 more"),
    ],
)
def test_an_op_is_one_line(op, text):
    assert op_text(op) == text


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (POOL, "paged, 4 pages of 4, size 16"),
        (
            Config("token", 5, 1, need_sort=True, checked=True),
            "token, 5 pages of 1, size 5, need_sort, checked",
        ),
        (Config("paged", 18, 4, row_dtype="int32"), "paged, 4 pages of 4, size 18, rows int32"),
        (Config("paged", 16, 4, page_offset=1000), "paged, 4 pages of 4, size 16, pages from 1001"),
    ],
)
def test_a_config_is_one_line_without_its_defaults(config, text):
    assert config_text(config) == text


@pytest.mark.parametrize(
    ("allocator", "text"),
    [
        ("swa", "swa, 8 pages of 4, size 32, swa_size 24"),
        ("swa-ring", "swa-ring, 8 pages of 4, size 32, ring 5, request_rows 3"),
        ("pure-swa", "pure-swa, 8 pages of 1, size 8"),
        ("hisparse", "hisparse, 8 pages of 4, size 16, ratio 2"),
        ("hisparse-v4", "hisparse-v4, 8 pages of 8, size 64, swa_size 48, device_size 12"),
        ("mamba", "mamba, 8 pages of 1, size 8"),
        ("page-interleave", "page-interleave, 4 pages of 4, size 16, shards 2"),
    ],
)
def test_a_config_names_its_sides(allocator, text):
    assert config_text(strategies.SMALL[allocator]) == text


def test_a_heading_names_fingerprint_property_and_fault():
    failure = Failure("P1", "Extend", "paged", "owned-page-in-free-list", 1, "message")
    assert heading(failure) == f"{failure.fingerprint}  P1 single ownership  Extend: owned-page-in-free-list"


def test_a_failure_shows_trace_maps_and_the_line_to_reproduce_it():
    failure = Failure("P1", "Extend", "paged", "x", 1, "page 1 is owned twice")
    maps = PageMaps("1-4 free", "1 row 0 · 2-4 free", "1 free and row 0 · 2-4 free")
    assert failure_lines(Trace(POOL, (new(1), ops.Clear())), failure, maps, "kvproof replay f.json") == [
        "allocator  paged, 4 pages of 4, size 16",
        "   op 0     extend new +1",
        "-> op 1     clear",
        "found      page 1 is owned twice",
        "before     1-4 free",
        "expected   1 row 0 · 2-4 free",
        "actual     1 free and row 0 · 2-4 free",
        "reproduce  kvproof replay f.json",
    ]


def test_of_a_long_trace_the_ops_before_the_failing_one_are_shown():
    trace = Trace(POOL, (new(1),) * 100 + (ops.Clear(),))
    lines = failure_lines(trace, Failure("P1", "Clear", "paged", "x", 100, "m"), None, "r")
    assert lines[1] == "           … 61 ops before"
    assert lines[2] == "   op 61    extend new +1"
    assert lines[41] == "-> op 100   clear"
    assert lines[42:] == ["found      m", "reproduce  r"]


def test_a_relation_may_fail_behind_the_last_op():
    lines = failure_lines(Trace(POOL, (new(1),)), Failure("P17", "rows", "paged", "x", 1, "m"), None, "r")
    assert lines == [
        "allocator  paged, 4 pages of 4, size 16",
        "   op 0     extend new +1",
        "found      m",
        "reproduce  r",
    ]
