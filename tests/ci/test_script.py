"""Scripts that show a fault without us: written, refused, and run in interpreters of their own."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof.ci import commands
from kvproof.ci.cli import main
from kvproof.ci.commands import RunOptions, emit_script
from kvproof.ci.literals import WIDTH, call, entries, listed, mapping, numbers, statement
from kvproof.ci.script import script
from kvproof.corpus.format import TraceFile, encode
from kvproof.corpus.store import TRACES
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.impl.targets.sglang.fetch import fetch
from kvproof.impl.targets.sglang.spelling import Spelling
from kvproof.model import ops
from kvproof.model.base import Outcome
from kvproof.model.config import Config
from kvproof.model.errors import UserError
from kvproof.model.trace import Trace
from kvproof.properties.record import record
from kvproof.properties.replay import replay
from tests.model.strategies import new

TRACE = Trace(Config("paged", 16, 4), (ops.Alloc(1), new(9)))
AUTO = RunOptions(None, "auto", "auto")


# --- statements --------------------------------------------------------------------------------------


def test_a_statement_that_fits_stays_on_its_line():
    assert statement("a = ", call("tensor", numbers([4, 5, -1]), device='"cpu"'), 4) == [
        '    a = tensor([4, 5, -1], device="cpu")'
    ]


def test_a_long_run_is_a_range():
    assert str(numbers([0, *range(4, 14), 3])) == "[0, *range(4, 14), 3]"
    assert str(numbers([1, 2, 3])) == "[1, 2, 3]"


def test_arguments_go_on_one_line_of_their_own_before_each_gets_its_own():
    assert statement("", call("f" * 60, "a" * 30, "b" * 30), 0) == [
        "f" * 60 + "(",
        "    " + "a" * 30 + ", " + "b" * 30,
        ")",
    ]
    assert statement("", call("f", "a" * 60, "b" * 60), 0) == [
        "f(",
        "    " + "a" * 60 + ",",
        "    " + "b" * 60 + ",",
        ")",
    ]


def test_long_lists_and_dicts_have_an_item_a_line():
    lines = statement("x = ", listed(["y" * 50, "z" * 50]), 4)
    assert lines == ["    x = [", "        " + "y" * 50 + ",", "        " + "z" * 50 + ",", "    ]"]
    assert statement("x = ", mapping({"free": numbers([1]), "map": entries({4: 5})}), 0) == [
        "x = {",
        '    "free": [1],',
        '    "map": {4: 5},',
        "}",
    ]


# --- a fault of ours, under another name -------------------------------------------------------------

FAKE = """
from kvproof.impl.paged import PagedTokenToKVPoolAllocator as Right

class Paged(Right):
    def alloc_extend(self, *args, **kwargs):
        free = self.free_pages
        answer = super().alloc_extend(*args, **kwargs)
        if FAULTY:
            self.free_pages = free
        return answer
"""
SPELLING = Spelling(
    version="9.9",
    first=(),
    imports=(("sglang.fake", "Paged"),),
    classes=(),
    build=("allocator = Paged(16, 4, torch.float16, DEVICE, None, False)",),
    reset=(),
    pages={"": "pages(allocator)"},
    paged=(),
    mappings={},
    each={},
    sizes={},
    available="allocator.available_size()",
    cpu_lens=True,
    page_count=False,
)


@pytest.fixture(scope="module")
def planted():
    """The failure, its records and the script's text."""
    target = Planted(Ticket(":pages-not-taken"))
    (failure,) = replay(target, TRACE).failures
    records = record(target, TRACE)
    return failure, records, script(failure, TRACE.config, records, SPELLING, "cpu", kernels=False)


def run(text: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run it, with these folders to import from and nothing else of this environment."""
    (folder / "script.py").write_text(text)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-W", "ignore", str(folder / "script.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fake(folder: Path, *, faulty: bool = False) -> Path:
    package = folder / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "9.9"\n')
    (package / "fake.py").write_text(f"FAULTY = {faulty}\n{FAKE}")
    return folder


def ours() -> list[Path]:
    """Where kvproof itself comes from, for the fake release is made of it."""
    return [Path(entry) for entry in sys.path if entry]


def test_a_record_tells_call_prediction_and_answer(planted):
    failure, (first, last), _ = planted
    assert (failure.step, last.index, last.outcome) == (1, 1, Outcome.SLOTS)
    assert first.answer.slots == first.due == [4, 5, 6, 7]
    # 9 tokens take pages 2, 3 and 4, the last there are; the plant leaves them in the list.
    assert last.model.pages == {"": []}
    assert last.target.pages[""]
    (row,) = last.parts[""].rows
    assert (row.head, row.prefix, row.seq) == (0, 0, 9)


def test_it_is_python_that_imports_sglang_and_torch_alone(planted):
    tree = ast.parse(planted[2])
    modules = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert modules - set(sys.stdlib_module_names) == {"sglang", "torch"}
    assert max(map(len, planted[2].splitlines())) <= WIDTH


def test_the_same_records_make_the_same_text(planted):
    failure, records, text = planted
    assert script(failure, TRACE.config, records, SPELLING, "cpu", kernels=False) == text


def test_it_ends_with_1_where_the_fault_is(planted, tmp_path):
    done = run(planted[2], tmp_path, fake(tmp_path, faulty=True), *ours())
    assert "the fault shows\n" in done.stdout
    assert "available_size(): expected 0, got" in done.stdout
    assert done.returncode == 1, done.stderr


def test_it_ends_with_0_where_it_is_not(planted, tmp_path):
    done = run(planted[2], tmp_path, fake(tmp_path), *ours())
    assert (done.returncode, done.stdout) == (0, "the fault does not show\n"), done.stderr


def test_it_ends_with_2_without_sglang(planted, tmp_path):
    done = run(planted[2], tmp_path)
    assert (done.returncode, done.stdout) == (
        2,
        "sglang cannot be imported here; run: pip install sglang==9.9\n",
    )


def test_it_ends_with_2_where_the_calls_do_not_fit(planted, tmp_path):
    spelling = dataclasses.replace(SPELLING, build=("allocator = Paged(16, kvpool=None)",))
    failure, records, _ = planted
    text = script(failure, TRACE.config, records, spelling, "cpu", kernels=False)
    done = run(text, tmp_path, fake(tmp_path), *ours())
    assert done.returncode == 2
    assert done.stdout.startswith("this script does not fit the sglang that is installed: TypeError")


def test_the_layout_is_the_formatters(planted, tmp_path):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    (tmp_path / "script.py").write_text(planted[2])
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(WIDTH), "--check"]
    assert subprocess.run([*command, str(tmp_path / "script.py")], check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "path-torch", "divergence": "slots-differ"}, "compares two runs"),
        ({"divergence": "hang"}, "ends its process"),
        ({"divergence": "double-write alloc_extend_kernel.out_indices"}, "only seen with kvproof's"),
    ],
)
def test_what_no_script_can_show_is_refused(planted, change, words):
    failure, records, _ = planted
    with pytest.raises(UserError, match=words):
        script(dataclasses.replace(failure, **change), TRACE.config, records, SPELLING, "cpu", kernels=False)


# --- the command -------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(encode(TraceFile(TRACE)))
    return str(path)


def test_only_sglang_has_scripts(trace_file):
    with pytest.raises(UserError, match="for releases of SGLang, not for null"):
        emit_script(trace_file, dataclasses.replace(AUTO, target="null"), None, None)


def test_nothing_is_overwritten(trace_file, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "Worker", None)
    with pytest.raises(UserError, match="is there already"):
        emit_script(trace_file, AUTO, None, str(tmp_path / "trace.json"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--emit-script", "--times", "2"), "goes with none of"), (("--out", "x.py"), "give --emit-script")],
)
def test_flags_that_do_not_go_together(trace_file, flags, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvproof", "replay", trace_file, *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


# --- releases ----------------------------------------------------------------------------------------

FOUND = [
    # trace, release, what is printed, a release without the fault
    ("paged/found-extend-past-list", "0.5.20", "alloc_extend_kernel: read of free_page_ptr[1]", "0.5.22"),
    ("paged/found-decode-short-checked", "0.5.12", "expected None, got AssertionError", None),
    ("paged/found-decode-single-short", "0.5.23", "answer: expected None, got [2]", None),
    ("paged/found-deferred-view-leak", "0.5.15", "free pages: expected [1, 2], got [2]", "0.5.18"),
    ("token/found-deferred-view-twice", "0.5.15", "free pages: expected [2, 3], got [1, 1]", "0.5.18"),
    ("paged/found-free-pages-by-reference", "0.5.23", "free pages: expected [1], got [0]", None),
    ("paged/found-extend-undefined-lanes", "0.5.23", "slots: expected [1], got [", None),
    ("paged/found-empty-decode-refused", "0.4.9.post6", "slots: expected [], got None", None),
    ("swa/page-zero", "0.5.23", "swa_available_size(): expected 32, got 40", None),
    ("hisparse-v4/wrapper-gap", "0.5.15", "has and this has not: expected [], got ['alloc_", None),
]


@pytest.mark.network
@pytest.mark.parametrize(("trace", "version", "line", "clean"), FOUND, ids=[f"{t}-{v}" for t, v, *_ in FOUND])
def test_a_release_shows_its_fault_to_anybody(trace, version, line, clean, tmp_path, capsys):
    options = dataclasses.replace(AUTO, target=f"sglang=={version}")
    assert emit_script(str(TRACES / f"{trace}.json"), options, None, None) == 0
    text = capsys.readouterr().out
    assert not [word for word in (str(Path.home()), str(fetch(version)), sys.prefix) if word in text]
    assert max(map(len, text.splitlines())) <= WIDTH
    done = run(text, tmp_path, fetch(version))
    assert line in done.stdout, done.stderr
    assert done.returncode == 1
    if clean is not None:
        done = run(text, tmp_path, fetch(clean))
        assert "the fault does not show" in done.stdout, done.stderr
        assert done.returncode == 0
