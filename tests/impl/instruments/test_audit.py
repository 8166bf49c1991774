"""The audited lane finds exactly what each kernel of `audit_cases` does wrong, and changes nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"the audited lane needs {name}")
    for name in ("numpy", "triton")
]

MISREAD = int.from_bytes(b"\xb6" * 8, "little", signed=True)
POISON = int.from_bytes(b"\xa5" * 8, "little", signed=True)

READ, WRITE = "read-out-of-bounds", "write-out-of-bounds"
RACE, OVER = "read-of-other-programs-write", "write-over-other-programs-write"
TWICE, UNWRITTEN, UNINITIALISED = "double-write", "unwritten", "uninitialised-read"
UNDEFINED = "undefined-lane-used"

# case -> findings [kind, argument, program, offset, extent, other program] and the values left behind
EXPECTED: dict[str, tuple[list[list[Any]], Any]] = {
    "clean": ([], list(range(8))),
    "discarded_read": ([[READ, "source", 0, 3, 3, None]], [5, 6, 7]),
    "neighbour_of_a_slice": ([[READ, "source", 0, 3, 3, None]], [12, 13, 14, MISREAD]),
    "before_a_slice": ([[READ, "source", 0, -1, 4, None]], [MISREAD, 4, 5, 6]),
    "write_past_a_slice": ([[WRITE, "out", 0, 3, 3, None]], [1, 2, 3, 0, 0, 0]),
    "two_writers": ([[OVER, "out", 1, 1, 3, 0]], [0, 1, 1]),
    "one_program_twice": ([[TWICE, "out", 0, 0, 2, None], [TWICE, "out", 1, 1, 2, None]], [2, 2]),
    "two_lanes_of_one_store": ([[TWICE, "out", 0, 0, 2, None], [TWICE, "out", 0, 1, 2, None]], 2),
    "unwritten": ([[UNWRITTEN, "out", None, 4, 5, None]], [1, 2, 3, 4, POISON]),
    "written_by_a_later_launch": ([], [1, 2, 3, 4, 9]),
    "reads_what_an_earlier_program_wrote": (
        [[RACE, "values", 1, 0, 3, 0], [RACE, "values", 2, 1, 3, 1]],
        [1, 2, 3],
    ),
    "reads_what_a_later_program_writes": ([[RACE, "values", 0, 1, 3, 1]], [8, 9, 9]),
    "race_through_an_alias": ([[RACE, "source", 1, 1, 2, 0]], [7, 7, 7, 10]),
    "uninitialised_read": ([[UNINITIALISED, "out", 0, 1, 2, None]], [1, 2]),
    "between_the_strides": ([[READ, "source", 0, 1, 7, None]], [0, MISREAD]),
    "along_the_strides": ([], [1, 3, 5, 7]),
    "bounded": ([[WRITE, "out", 0, offset, 1, None] for offset in range(1, 65)], [1]),
    "address_of_no_argument": ([[READ, "<unknown>", 0, 4096 // 8, 0, None]], [MISREAD]),
    "empty_slice": ([[READ, "source", 0, 0, 0, None]], [MISREAD]),
    # (1, 2, 3, 0, 0, 0, 0, 0) + 1, its running sums twice, and 14 + 2 * (0 + 1 + 2) + (0 + 1)
    "language": ([[UNDEFINED, "x", 0, 3, 3, None]], [2, 5, 9, 10, 11, 12, 13, 14] * 2 + [21]),
    "scalar_in_a_mask": ([], [7, 8, 9, -1]),
    "callable_grid": ([], [x * 100 + y * 10 + z for x in range(2) for y in range(3) for z in range(2)]),
    "atomics": ([], [10, 12, 14, 16, 5]),
    "atomics_out_of_bounds": (
        [[WRITE, "counters", 0, 3, 3, None], [WRITE, "locks", 0, 1, 1, None]],
        [1, 0, 1, 0, 0, 0, 0],
    ),
    "plain_read_of_an_atomic": ([[RACE, "counter", 0, 0, 1, 1], [RACE, "counter", 1, 0, 1, 0]], [1, 2]),
    "pointers_into_two_tensors": ([[READ, "b", 0, 3, 3, None]], [0, 11, 2, MISREAD, 4, -1, -1, -1]),
    # aliases, atomics, grids, several launches
    "launches_are_ordered": ([], [2, 2, 2]),
    "an_alias_within_one_program": ([], [2, 3, 4, 4]),
    "written_twice_through_an_alias": ([[TWICE, "y", 0, 0, 1, None]], [0, 2, 0]),
    "a_neighbour_through_an_alias": ([[OVER, "y", 1, 1, 3, 0]], [2, 2, 1]),
    "programs_of_a_grid_of_three_axes": ([[OVER, "x", 0, 0, 1, 0]] * 3, [11]),
    "atomics_overwritten": ([[OVER, "counter", 2, 0, 1, 0]], [0]),
    "read_before_others_atomics": ([[RACE, "counter", 0, 0, 1, 1]], [2]),
    "stored_before_others_atomics": ([[OVER, "counter", 1, 0, 1, 0]], [7]),
    "one_element_expanded": ([[OVER, "x", 1, 0, 1, 0]], [1]),
    # what nobody has written
    "fresh_in_every_dtype": ([[UNINITIALISED, "x", 0, 0, n, None] for n in range(1, 14)], None),
    "fresh_from_every_function": (
        [[UNINITIALISED, "x", 0, 0, n, None] for n in range(2, 8)],
        [[1, 2, 1], [3], [2, 2], [5], [2, 3], [7, 1]],
    ),
    "written_by_torch": ([], None),
    "written_by_a_kernel": ([], [-91] * 4),
    "partly_written_by_a_kernel": (
        [
            [UNINITIALISED, "x", 0, 1, 2, None],  # element 1 of x[1:3] is x[2]
            [UNWRITTEN, "x", None, 2, 4, None],
            [UNWRITTEN, "x", None, 3, 4, None],
        ],
        [-91] * 4,
    ),
    "resized_by_torch": ([], [2, 3, 4]),
    "kept_for_later_calls": (
        [[UNWRITTEN, "x", None, 1, 3, None], [UNWRITTEN, "x", None, 2, 3, None]],
        None,
    ),
    "kept_and_forgotten": ([], 2),
    "kept_from_an_earlier_call": (
        [
            [UNINITIALISED, "x", 0, 1, 2, None],
            [UNINITIALISED, "x", 0, 1, 3, None],
            [UNINITIALISED, "x", 0, 2, 3, None],
        ],
        None,
    ),
    # undefined lanes
    "undefined_in_a_sum": ([[UNDEFINED, "x", 0, 3, 3, None]], [6]),
    "no_lane_is_masked_off": ([], [10]),
    "a_difference_of_undefined_lanes": ([[UNDEFINED, "x", 0, 1, 3, None]], [0, 1, 3]),
    "undefined_lanes_dropped": ([], [3, 4, 5]),  # table[table[x]] + (0 + 1 + 2)
    "undefined_lanes_dropped_in_every_dtype": ([], [[1, 0, 1]] * 9),
    "undefined_lanes_stored_in_every_dtype": (
        [[UNDEFINED, "x", 0, n, n, None] for n in range(1, 10)],
        [1] * 9 + [0] * 7,
    ),
    "nan_is_itself": ([], [1, 0, 0]),
    "undefined_in_an_address": ([[UNDEFINED, "x", 0, 3, 3, None]], [8, 9, 8, 7]),
    "undefined_in_a_mask": ([[UNDEFINED, "x", 0, 3, 3, None]], [0, 1, 2, 3]),
    "undefined_in_a_minimum": ([[UNDEFINED, "x", 0, 3, 3, None]], [-6]),
    "undefined_in_a_maximum": ([[UNDEFINED, "x", 0, 3, 3, None]], [6]),
    "one_undefined_lane_of_either_sign": (
        [[UNDEFINED, "x", 0, 1, 1, None], [UNDEFINED, "x", 0, 3, 3, None]],
        [0, 1],
    ),
    "undefined_in_a_decision": ([[UNDEFINED, "x", 0, 1, 1, None]], [2]),
    "undefined_as_the_end_of_a_loop": ([[UNDEFINED, "x", 0, 1, 1, None]], [0]),
    "a_scalar_other_of_zero": ([], [0]),
    "undefined_scalar_dropped": ([], [9]),
    "an_atomics_result_under_its_mask": ([], [6, 7, 7, 11]),
    "an_atomics_result_beyond_its_mask": ([[UNDEFINED, "counter", 0, 2, 3, None]], [6, 7, 7, 11]),
    "undefined_in_an_atomic": ([[UNDEFINED, "x", 0, 3, 3, None]], [8, 6]),
    "the_argument_that_matters_is_named": ([[UNDEFINED, "y", 0, 3, 3, None]], [1, 2, 3, 15]),
    "two_arguments_matter_only_together": ([[UNDEFINED, "x", 0, 3, 3, None]], [3]),
    "a_full_tape_is_not_judged": ([], [6]),
    "prints_once": ([], 1),
    "block_pointer_padded": ([], [6]),
    "block_pointer_unpadded": ([[UNDEFINED, "x", 0, 3, 3, None]], [6]),
}

_READS_ONLY = ("fresh_in_every_dtype", "fresh_from_every_function")


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    script = Path(__file__).with_name("audit_cases.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    answers: dict[str, Any] = json.loads(run.stdout)
    return answers


@pytest.mark.parametrize("name", EXPECTED)
def test_findings_and_values(answers: dict[str, Any], name: str) -> None:
    if name.startswith("block_pointer") and name not in answers:
        pytest.skip("this Triton has no block pointers")
    findings, values = EXPECTED[name]
    found = answers[name]["findings"]
    if name in _READS_ONLY:
        found = [finding for finding in found if finding[0] != UNWRITTEN]
    assert found == findings
    assert answers[name]["values"] == values


@pytest.mark.gpu
def test_device_tensors_are_worked_on_in_host_copies(answers: dict[str, Any]) -> None:
    assert answers["on_a_device"]["findings"] == [[READ, "source", 0, 3, 3, None]]
    assert answers["on_a_device"]["values"] == [2, 3, 4, MISREAD]


def test_findings_past_the_limit_are_counted(answers: dict[str, Any]) -> None:
    assert answers["bounded"]["left_out"] == 127 - 64
    assert answers["clean"]["left_out"] == 0


def test_findings_name_the_kernel(answers: dict[str, Any]) -> None:
    assert answers["discarded_read"]["kernels"] == ["discarded_read_kernel"]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("undefined_in_a_sum", "a value stored to out"),
        ("undefined_in_an_address", "an address in table"),
        ("undefined_in_a_mask", "the mask of a store at out"),
        ("undefined_in_a_decision", "a decision"),
        ("undefined_in_an_atomic", "a value of an atomic on counter"),
    ],
)
def test_the_use_of_an_undefined_lane_is_told(answers: dict[str, Any], name: str, use: str) -> None:
    assert answers[name]["uses"] == [use]


def test_programs_of_a_grid_of_three_axes_are_told_apart(answers: dict[str, Any]) -> None:
    programs = answers["programs_of_a_grid_of_three_axes"]["programs"]
    assert programs == [[[0, 0, 1], [0, 0, 0]], [[0, 1, 0], [0, 0, 1]], [[0, 1, 1], [0, 1, 0]]]


def test_launches_are_counted(answers: dict[str, Any]) -> None:
    assert answers["clean"]["launches"] == [["copy_kernel", [2, 1, 1], 2, ["out"]]]
    assert len(answers["written_by_a_later_launch"]["launches"]) == 2
    assert answers["callable_grid"]["launches"] == [["grid_kernel", [2, 3, 2], 12, ["out"]]]
    assert answers["atomics"]["launches"] == [["atomic_kernel", [3, 1, 1], 3, ["counter", "tickets", "lock"]]]


def test_reinterpreted_pointers_are_refused(answers: dict[str, Any]) -> None:
    assert "cast_kernel reaches source (8-byte elements)" in answers["reinterpreted_pointer"]["values"]


def test_numbers_are_the_interpreters(answers: dict[str, Any]) -> None:
    assert answers["every_dtype"]["values"] == answers["plain"]["values"]
    assert answers["every_dtype"]["findings"] == []


def test_uninstall_restores(answers: dict[str, Any]) -> None:
    assert all(answers["uninstalled"]["restored"])
    assert answers["uninstalled"]["values"] == answers["plain"]["values"]


def test_an_unknown_interpreter_is_named(answers: dict[str, Any]) -> None:
    refusal = answers["refusal"]
    assert "'_implicit_cvt'" in refusal["message"]
    assert refusal["version"] in refusal["message"]


def test_triton_must_have_been_told_to_interpret() -> None:
    script = (
        "import os; os.environ.pop('TRITON_INTERPRET', None); import triton\n"
        "from kvproof.impl.instruments.audit import Auditor, InstrumentError\n"
        "try: Auditor().install()\n"
        "except InstrumentError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "TRITON_INTERPRET=1" in run.stdout, run.stderr
