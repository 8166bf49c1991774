"""compute-sanitizer's log: what it writes becomes reports, whole and once, however it arrives.

READ, WRITE and UNINITIALISED are the tool's own output on an H200 (version 2025.3.1), frames of the host left
out; OLD_RACE is as NVIDIA's training material shows it for an older one. The others are made from these. Not
covered: the tool itself, but for the GPU test at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof.impl.instruments import sanitizer
from kvproof.impl.instruments.findings import InstrumentError
from kvproof.impl.instruments.sanitizer import TOOLS, Report, SanitizerLog, command, find

HEAD = "========= COMPUTE-SANITIZER\n"
END = "========= ERROR SUMMARY: 1 error\n"
READ = """\
========= Invalid __global__ read of size 8 bytes
=========     at oob+0xc0 in san.py:4
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f6ee6800028 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f6ee6800000 of size 40 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: run in jit.py:744
=========
"""
WRITE = READ.replace("read of", "write of").replace("oob+0xc0 in san.py:4", "oobw+0xd0 in san.py:7")
UNINITIALISED = """\
========= Uninitialized __global__ memory read of size 8 bytes
=========     at copyk+0x60 in san.py:10
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f9e3a800400
=========
"""
LIBRARY = UNINITIALISED.replace(
    "copyk+0x60 in san.py:10", "void at::native::vectorized_kernel<4>(int, T2)+0x60"
)
MISALIGNED = READ.replace("is out of bounds", "is misaligned")
API = """\
========= Program hit cudaErrorInvalidDevice (error 101) due to "invalid device ordinal" on CUDA API call to
cudaSetDevice.
=========     Saved host backtrace up to driver entry point at error
=========
"""
RACE = """\
========= Error: Race reported between Write access at scan+0x40 in k.py:9
=========     and Read access at scan+0x90 in k.py:11 [8 hazards]
=========
"""
OLD_RACE = """\
========= ERROR: Race reported between Read access at 0x6360 in /a/conv.cu:123:convolution(pixel*, int)
=========     and Write access at 0x1fe0 in /a/conv.cu:63:convolution(pixel*, int) [64 hazards]
=========
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "tool.log"


def reports(log: Path, text: str) -> list[Report]:
    log.write_text(HEAD + text + END)
    return SanitizerLog(log).read()


@pytest.mark.parametrize(
    ("text", "kind", "kernel", "where"),
    [
        (READ, "read-out-of-bounds", "oob", "san.py:4"),
        (WRITE, "write-out-of-bounds", "oobw", "san.py:7"),
        (UNINITIALISED, "uninitialised-read", "copyk", "san.py:10"),
        (MISALIGNED, "misaligned-access", "oob", "san.py:4"),
        (RACE, "race", "scan", "k.py:9"),
        (OLD_RACE, "race", "convolution", "/a/conv.cu:123"),
    ],
)
def test_a_report_says_what_where_and_how_far(log, text, kind, kernel, where):
    (report,) = reports(log, text)
    assert (report.kind, report.kernel, report.where) == (kind, kernel, where)
    assert report.in_python is (".py:" in where)
    assert "\n" not in report.detail
    if text is READ:
        assert "1 bytes after the nearest allocation" in report.detail
        assert "Host Frame" not in report.detail


@pytest.mark.parametrize("text", ["", API, LIBRARY, "========= RACECHECK SUMMARY: 0 hazards displayed\n"])
def test_what_is_no_fault_of_a_kernel_of_the_target_is_left_out(log, text):
    assert reports(log, text) == []


def test_what_is_not_known_is_kept(log):
    (report,) = reports(log, "========= Barrier error detected. Divergent thread(s)\n=========\n")
    assert (report.kind, report.kernel) == ("sanitizer", "")
    assert report.detail.startswith("Barrier error")


def test_threads_of_one_read_are_one_report(log):
    other = READ.replace("thread (0,0,0)", "thread (1,0,0)")
    first, second = reports(log, READ + other + WRITE + other)
    assert first.detail.endswith("(and 2 alike)")
    assert second.kind == "write-out-of-bounds"


def test_a_log_that_grows_byte_by_byte_is_read_once(log):
    whole = (HEAD + READ + WRITE + END).encode()
    reader, found = SanitizerLog(log), []
    assert reader.read() == []  # not there yet
    for at in range(len(whole)):
        with log.open("ab") as file:
            file.write(whole[at : at + 1])
        found += reader.read()
    assert [report.kernel for report in found] == ["oob", "oobw"]
    assert reader.read() == []


def test_garbage_is_no_report_and_no_error(log):
    log.write_bytes(bytes(range(256)) * 40 + b"\n=========\n=========\xff\n")
    SanitizerLog(log).read()
    log.write_text("a program's own output\n" + READ)
    assert [report.kernel for report in SanitizerLog(log).read()] == ["oob"]


@pytest.mark.parametrize(
    "words", ["Error: Device not supported. Please refer to the manual", "Internal Sanitizer Error: 3"]
)
def test_a_tool_that_cannot_work_says_so_in_one_line(log, words):
    log.write_text(f"{HEAD}========= {words}\n=========\n")
    with pytest.raises(InstrumentError, match="cannot work on this machine") as caught:
        SanitizerLog(log).read()
    assert "\n" not in str(caught.value)


def test_an_absent_tool_is_one_line_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _name, path: None)
    with pytest.raises(InstrumentError, match="comes with the CUDA toolkit"):
        find()
    with pytest.raises(
        InstrumentError, match="has no tool 'lint'; choose one of memcheck, initcheck, racecheck"
    ):
        command("lint", tmp_path / "log")


def test_a_command_goes_before_another(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in TOOLS:
        words = command(name, tmp_path / "log")
        assert words[0] == str(tool)
        assert words[words.index("--tool") + 1] == name
        assert words[words.index("--log-file") + 1] == str(tmp_path / "log")


SCRIPT = """\
import sys
import torch
import triton
import triton.language as tl


@triton.jit
def read_kernel(source, out, at):
    tl.store(out, tl.load(source + at))


source = torch.empty(5, dtype=torch.int64, device="cuda")
if sys.argv[1] != "initcheck":
    source.fill_(3)
out = torch.zeros(1, dtype=torch.int64, device="cuda")
read_kernel[(1,)](source, out, 5 if sys.argv[1] == "memcheck" else 2)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "kinds"),
    [("memcheck", ["read-out-of-bounds"]), ("initcheck", ["uninitialised-read"]), ("racecheck", [])],
)
def test_the_tool_sees_what_a_kernel_does(tool, kinds, log, tmp_path):
    try:
        prefix = command(tool, log)
    except InstrumentError as error:
        pytest.skip(str(error))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | sanitizer.environment()
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [*prefix, sys.executable, str(script), tool],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = SanitizerLog(log).read()
    assert [report.kind for report in found] == kinds
    assert all(report.kernel == "read_kernel" for report in found)
