"""The fence stands where it says, on a stub driver and on a GPU; building it is safe, and errors are clear.

The cases run in processes of their own: `fence_cases` without a GPU, `fence_gpu_cases` with one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvproof.impl.instruments import fence
from kvproof.impl.instruments.findings import InstrumentError

HERE = Path(__file__).parent
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
CXX = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler: cc, gcc or clang")

HOST_CASES = (
    "past_the_end",
    "before_the_beginning",
    "sides_take_turns",
    "slack_of_small_elements",
    "use_after_free",
    "new_memory_is_filled",
    "nothing_and_nonsense",
    "many_pairs",
    "many_at_once",
    "threads",
    "failures_leak_nothing",
    "first_look_may_fail",
    "room_is_made",
    "lost_context",
    "devices_and_contexts",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub driver, compiled."""
    assert COMPILER is not None
    made = tmp_path_factory.mktemp("stub") / "libstub.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, *flags, "-o", made, HERE / "fence_stub.c", "-lpthread"], check=True)
    return made


def run_host_case(name: str, cache: Path, stub: Path, *more: Path, granule: int = 4096) -> None:
    run = subprocess.run(
        [
            sys.executable,
            str(HERE / "fence_cases.py"),
            name,
            str(fence.build(cache)),
            str(stub),
            *map(str, more),
        ],
        env={**os.environ, "STUB_GRANULE": str(granule)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


@needs_compiler
@pytest.mark.parametrize("name", HOST_CASES)
def test_on_the_stub_driver(name: str, cache: Path, stub: Path) -> None:
    run_host_case(name, cache, stub)


@needs_compiler
@pytest.mark.parametrize("name", ["past_the_end", "before_the_beginning", "sides_take_turns"])
def test_granules_as_large_as_a_gpus(name: str, cache: Path, stub: Path) -> None:
    run_host_case(name, cache, stub, granule=2 << 20)


@needs_compiler
@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler: c++, g++ or clang++")
def test_failed_allocations_are_thrown(cache: Path, stub: Path, tmp_path: Path) -> None:
    assert CXX is not None
    catch = tmp_path / "libcatch.so"
    subprocess.run([CXX, "-shared", "-fPIC", "-o", catch, HERE / "fence_catch.cpp"], check=True)
    run_host_case("failures_are_thrown", cache, stub, catch)


@needs_compiler
def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    assert COMPILER is not None
    flags = ["-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared"]
    source = Path(fence.__file__).with_name("fence.c")
    subprocess.run([COMPILER, *flags, "-o", tmp_path / "fence.so", source, "-ldl", "-lpthread"], check=True)


# --- building -----------------------------------------------------------------------------------------------


def compiler_script(path: Path, body: str) -> str:
    """A command for `CC` that leaves a line in `<path>.log` each time it runs."""
    path.write_text(f'#!/bin/sh\necho run >> "{path}.log"\n{body}\n')
    path.chmod(0o755)
    return str(path)


def runs_of(path: Path) -> int:
    log = path.with_name(f"{path.name}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


@needs_compiler
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "mycc"
    monkeypatch.setenv("CC", compiler_script(compiler, f'exec "{COMPILER}" "$@"'))
    first = fence.build(tmp_path / "cache")
    assert (fence.build(tmp_path / "cache"), runs_of(compiler)) == (first, 1)
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # no temporary file is left
    compiler_script(compiler, f'exec  "{COMPILER}"  "$@"')  # another compiler
    second = fence.build(tmp_path / "cache")
    assert (second != first, runs_of(compiler)) == (True, 2)


@needs_compiler
def test_many_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "mycc"
    monkeypatch.setenv("CC", compiler_script(compiler, f'sleep 0.3; exec "{COMPILER}" "$@"'))
    code = "import sys; from pathlib import Path; from kvproof.impl.instruments import fence;"
    code += "print(fence.build(Path(sys.argv[1])))"

    def build(_: int) -> str:
        command = [sys.executable, "-c", code, str(tmp_path / "cache")]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(build, range(4)))
    assert len(answers) == 1
    assert runs_of(compiler) > 1, "they did not build at the same time"
    (made,) = (tmp_path / "cache" / "fence").iterdir()
    assert answers == {f"{made}\n"}


@needs_compiler
def test_words_after_the_compiler_are_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DNOTHING=1")
    first = fence.build(tmp_path)
    monkeypatch.setenv("CC", f"{COMPILER}")
    assert fence.build(tmp_path) != first


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(InstrumentError) as raised:
        fence.build(tmp_path / "cache")
    assert str(raised.value) == "no C compiler: install gcc or clang, or set CC"
    monkeypatch.setenv("CC", "notacompiler -m64")
    with pytest.raises(InstrumentError, match=r"CC='notacompiler -m64' is not there; .* or unset CC$"):
        fence.build(tmp_path / "cache")
    monkeypatch.setenv("CC", "'gcc")
    with pytest.raises(InstrumentError, match=r"no command line: No closing quotation; correct or unset it$"):
        fence.build(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "echo 'fence.c: In function f:' >&2; echo 'fence.c:9:1: error: no luck' >&2; exit 7",
            "failed with status 7: fence.c:9:1: error: no luck; set CC to another",
        ),
        ("echo; echo '  sorry'; exit 1", "failed with status 1: sorry; set CC to another"),
        ("exit 3", "failed with status 3: no message; set CC to another"),
        ("exit 0", "failed with status 0: no message; set CC to another"),
    ],
)
def test_a_broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str) -> None:
    monkeypatch.setenv("CC", compiler_script(tmp_path / "badcc", body))
    with pytest.raises(InstrumentError) as raised:
        fence.build(tmp_path / "cache")
    assert str(raised.value) == f"the C compiler {tmp_path / 'badcc'} {why}"
    assert list((tmp_path / "cache" / "fence").iterdir()) == []


def test_a_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cc").write_bytes(b"\x7fnonsense")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    with pytest.raises(InstrumentError, match="does not run: Exec format error; set CC to another"):
        fence.build(tmp_path / "cache")


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InstrumentError, match=r"Not a directory; set KVPROOF_CACHE to a writable folder$"):
        fence.build(tmp_path / "file")


@needs_compiler
@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ("libnosuchdriver.so.1", "libnosuchdriver.so.1: cannot open shared object file"),
        ("libm.so.6", "libm.so.6 has no cuInit"),
    ],
)
def test_no_driver(cache: Path, driver: str, why: str) -> None:
    with pytest.raises(InstrumentError, match=f"^no CUDA driver: {why}.*; the fence needs an NVIDIA GPU$"):
        fence.load(fence.build(cache), driver)


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "fence.so").write_text("nonsense")
    with pytest.raises(InstrumentError, match=r"^the fence cannot be loaded: .*allows execution$"):
        fence.load(tmp_path / "fence.so")


def test_before_it_is_installed(tmp_path: Path) -> None:
    assert fence.allocations() == 0
    for side in fence.SIDES:
        with pytest.raises(InstrumentError, match="not installed"):
            fence.set_side(side)
    for call in (fence.set_side, lambda side: fence.install(side, tmp_path)):
        with pytest.raises(ValueError, match="not 'middle'"):
            call("middle")


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_torch_without_cuda(tmp_path: Path) -> None:
    with pytest.raises(InstrumentError, match=r"has no CUDA; install a CUDA build of torch$"):
        fence.install("end", tmp_path)


# --- on a GPU -----------------------------------------------------------------------------------------------

# What must not fault, in the order in which one process runs it.
_IN_BOUNDS = ("read first", "write first", "read last", "write last", "in bounds")
_ON_THE_FENCE = ("torch works", "other stream", "out of memory", "places")
CALM_CASES: dict[str, tuple[str, ...]] = {
    "none": ("read past", "discarded read past", "write past", "too late"),
    "end": (*_IN_BOUNDS, "read before", "read slack", *_ON_THE_FENCE),
    "begin": (*_IN_BOUNDS, "read past", *_ON_THE_FENCE),
}


def start_gpu_cases(side: str, cache: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "fence_gpu_cases.py"), side, str(cache), *cases]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def on_gpu(side: str, cache: Path, *cases: str) -> dict[str, Any]:
    """The answers of the cases, run in one process. How the process ended is not asked."""
    run = start_gpu_cases(side, cache, *cases)
    assert run.stdout, run.stderr
    answers: dict[str, Any] = json.loads(run.stdout)
    return answers


@pytest.fixture(scope="module", params=CALM_CASES)
def calm(request: pytest.FixtureRequest, cache: Path) -> dict[str, Any]:
    """The answers of one side; its tests share them."""
    return on_gpu(request.param, cache, *CALM_CASES[request.param])


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize(
    ("side", "case"),
    [
        ("end", "read past"),
        ("end", "discarded read past"),
        ("end", "read past slack"),
        ("end", "write past"),
        ("end", "read freed"),
        ("begin", "read before"),
        ("begin", "write before"),
        ("begin", "read freed"),
    ],
)
def test_strays_fault(side: str, case: str, cache: Path) -> None:
    fault = on_gpu(side, cache, case)[case]
    assert "illegal memory access" in fault
    assert "while it lived" not in fault


@pytest.mark.gpu
@needs_compiler
def test_what_must_not_fault(calm: dict[str, Any]) -> None:
    faults = {case: answer for case, answer in calm.items() if case.startswith(("read", "write", "in"))}
    assert len(faults) >= 2
    assert faults == dict.fromkeys(faults, "")


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("calm", fence.SIDES, indirect=True)
def test_torch_works_on_it(calm: dict[str, Any]) -> None:
    assert calm["torch works"] == []
    assert calm["other stream"] == ["", 5]
    message, total = calm["out of memory"]
    assert message.startswith("CUDA out of memory (fence: ")
    assert total == 1 + 2 + 3 + 4 + 5


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("calm", fence.SIDES, indirect=True)
def test_where_tensors_stand(calm: dict[str, Any]) -> None:
    assert calm["places"] == {
        "end": [0, -4 % (2 << 20), 0, -7 % (2 << 20)],
        "begin": [0, 0, 0, 0],
        "filled": [int.from_bytes(b"\xa5" * 8, "little", signed=True)] * 3,
        "empty": [],
        "allocations": 9,
    }


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("calm", ["none"], indirect=True)
def test_it_must_come_before_cuda(calm: dict[str, Any]) -> None:
    assert "CUDA is in use already" in calm["too late"]


@pytest.mark.gpu
@needs_compiler
def test_a_lost_context_makes_no_noise(cache: Path) -> None:
    run = start_gpu_cases("end", cache, "after a fault")
    fault, after = json.loads(run.stdout)["after a fault"]
    assert "illegal memory access" in fault
    assert "CUDA error: an illegal memory access" in after
    assert (run.returncode, run.stderr) == (0, "")
