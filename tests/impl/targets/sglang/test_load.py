"""Loading: the three spellings, one SGLang a process, errors that name the cause; and real releases.

Real releases are loaded in processes of their own. Small packages written here stand for the rest; they
need Triton, as `load` does. Not covered: how the loaded classes are driven.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproof.impl.targets.sglang import fetch, load, standins
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.releases import KIND_HOMES

PACKAGE = {
    "__init__.py": "__version__ = '9.9'\n",
    "srt/mem_cache/allocator/__init__.py": "",
    "srt/mem_cache/allocator/token.py": "class TokenToKVPoolAllocator: ...\n",
    "srt/mem_cache/allocator/paged.py": (
        "alloc_extend_kernel, alloc_decode_kernel = 'kernels'.split('n')\n"
        "def alloc_extend_naive(): ...\n"
        "class PagedTokenToKVPoolAllocator:\n"
        "    def __init__(self): self.use_triton_kernels = True\n"
    ),
}


def write_package(root: Path, changes: dict[str, str] | None = None) -> Path:
    for name, text in {**PACKAGE, **(changes or {})}.items():
        path = root / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this process had never seen SGLang; what it had is back afterwards."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in kept:
        del sys.modules[name]
    monkeypatch.setattr(load, "_loaded", None)
    monkeypatch.setattr(standins, "FINDER", standins.StandInFinder())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update(kept)


def refusal(spec: str) -> str:
    with pytest.raises(SglangUnavailable) as caught:
        load.load(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("below", [".", "python"])
def test_a_checkout_is_loaded(tmp_path: Path, below: str) -> None:
    root = write_package(tmp_path / below)
    path_before = list(sys.path)
    loaded = load.load(f"sglang@{tmp_path}")
    assert (loaded.version, loaded.root, loaded.standins) == ("9.9", root.resolve(), ())
    assert loaded.layout.row == "0.5.13 - 0.5.15"
    assert loaded.token_class.__module__ == "sglang.srt.mem_cache.allocator.token"
    assert (
        loaded.paged_class.__module__
        == loaded.paged_module.__name__
        == "sglang.srt.mem_cache.allocator.paged"
    )
    assert loaded.kernels == {"alloc_extend_kernel": "ker", "alloc_decode_kernel": "els"}
    assert list(loaded.naive) == ["alloc_extend_naive"]
    assert loaded.has_naive_path
    assert sys.path == path_before


def test_a_class_without_the_switch_has_no_naive_path(tmp_path: Path) -> None:
    text = "class PagedTokenToKVPoolAllocator:\n    def __init__(self): self.debug_mode = False\n"
    loaded = load.load(f"sglang@{write_package(tmp_path, {'srt/mem_cache/allocator/paged.py': text})}")
    assert not loaded.has_naive_path
    assert (loaded.kernels, loaded.naive) == ({}, {})


def test_a_version_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path))
    write_package(tmp_path / "sglang" / "9.9")
    assert load.load("sglang==9.9").root == (tmp_path / "sglang" / "9.9").resolve()


def test_the_importable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write_package(tmp_path))
    assert load.load("sglang").root == tmp_path.resolve()


def test_one_release_a_process(tmp_path: Path) -> None:
    one, two = write_package(tmp_path / "one"), write_package(tmp_path / "two")
    loaded = load.load(f"sglang@{one}")
    assert load.load(f"sglang@{one}") is loaded
    message = refusal(f"sglang@{two}")
    assert f"already holds SGLang 9.9 from {one.resolve()}" in message
    assert "one process for each release" in message


def test_an_sglang_that_somebody_imported_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write_package(tmp_path / "one"), write_package(tmp_path / "two")
    monkeypatch.syspath_prepend(one)
    present = __import__("sglang")
    assert f"already imported from {one.resolve()}" in refusal(f"sglang@{two}")
    assert sys.modules["sglang"] is present
    assert load.load("sglang").root == one.resolve()


@pytest.mark.parametrize(
    ("spec", "fragment"),
    [
        ("sglang=0.5.23", "names no SGLang"),
        ("vllm", "names no SGLang"),
        ("sglang==../x", "is not a release number"),
        ("sglang@/no/such/folder", "is no SGLang checkout"),
        ("sglang", "no sglang can be imported here"),
    ],
)
def test_what_cannot_be_found_is_refused(
    spec: str, fragment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "sglang").exists()])
    assert fragment in refusal(spec)


def test_a_heavy_package_is_stood_in_and_named(tmp_path: Path) -> None:
    changes = {
        "srt/mem_cache/allocator/token.py": "import sgl_kernel.ops\n"
        + PACKAGE["srt/mem_cache/allocator/token.py"]
    }
    assert load.load(f"sglang@{write_package(tmp_path, changes)}").standins == ("sgl_kernel",)
    assert not any(name.startswith("sgl_kernel") for name in sys.modules)


def test_a_name_gone_from_triton_is_stood_in_and_named(tmp_path: Path) -> None:
    import triton.runtime.cache

    gone = "default_dump_dir"
    had = hasattr(triton.runtime.cache, gone)
    text = f"from triton.runtime.cache import {gone}\n" + PACKAGE["srt/mem_cache/allocator/token.py"]
    loaded = load.load(f"sglang@{write_package(tmp_path, {'srt/mem_cache/allocator/token.py': text})}")
    assert loaded.standins == (() if had else (f"triton.runtime.cache.{gone}",))
    assert hasattr(triton.runtime.cache, gone) == had


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("import orjson", ("orjson", 'pip install "kvproof[sglang]"')),
        ("import kvproof_no_such_package.part", ("No module named", "install kvproof_no_such_package")),
        ("from triton.runtime.cache import kvproof_no_such_name", ("ImportError", "kvproof_no_such_name")),
        ("1 / 0", ("ZeroDivisionError", "division by zero")),
    ],
)
def test_what_cannot_be_imported_names_cause_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, fragments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "orjson", None)  # as good as not installed
    helper = {
        "srt/utils.py": f"\n{line}\n",
        "srt/mem_cache/allocator/token.py": "from sglang.srt import utils\n",
    }
    root = write_package(tmp_path, helper)
    path_before = list(sys.path)
    message = refusal(f"sglang@{root}")
    for fragment in (f"{Path('sglang/srt/utils.py')}:2", str(root.resolve()), *fragments):
        assert fragment in message
    assert not any(name.partition(".")[0] == "sglang" for name in sys.modules)
    assert sys.path == path_before
    # Nothing is left of the failure: once mended, the package loads.
    write_package(tmp_path)
    assert load.load(f"sglang@{root}").version == "9.9"


FAMILY = {
    "srt/mem_cache/allocator/swa.py": "class SWATokenToKVPoolAllocator: ...\n",
    "srt/mem_cache/swa_memory_pool.py": "import orjson\nclass SWAKVPool: ...\n",
    "srt/mem_cache/allocator/mamba.py": "import sgl_kernel\nclass MambaSlotAllocator: ...\n",
}


def test_other_kinds_are_imported_when_they_are_wanted(tmp_path: Path) -> None:
    loaded = load.load(f"sglang@{write_package(tmp_path, FAMILY)}")
    assert set(loaded.offers) == {"swa", "mamba"}
    assert (loaded.kinds, loaded.absent, loaded.standins) == ({}, {}, ())
    assert "sglang.srt.mem_cache.allocator.mamba" not in sys.modules
    classes = load.load_kind(loaded, "mamba")
    assert {role: cls.__name__ for role, cls in classes.items()} == {"allocator": "MambaSlotAllocator"}
    assert load.load_kind(loaded, "mamba") is classes
    assert loaded.standins == ("sgl_kernel",)


def test_a_kind_that_cannot_be_imported_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orjson", None)
    loaded = load.load(f"sglang@{write_package(tmp_path, FAMILY)}")
    load.load_kinds(loaded)
    assert set(loaded.kinds) == {"mamba"}
    assert set(loaded.absent) == {*KIND_HOMES} - {"mamba"}
    assert loaded.absent["hisparse"] == "SGLang 9.9 has no hisparse allocator"
    for fragment in ("swa of SGLang 9.9", "swa_memory_pool.py:1", 'pip install "kvproof[sglang]"'):
        assert fragment in loaded.absent["swa"]
    assert "\n" not in loaded.absent["swa"]
    # It stays missing for this process, and everything else stays loaded.
    monkeypatch.delitem(sys.modules, "orjson")
    with pytest.raises(SglangUnavailable) as caught:
        load.load_kind(loaded, "swa")
    assert str(caught.value) == loaded.absent["swa"]
    assert sys.modules[loaded.paged_module.__name__] is loaded.paged_module


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    assert "none of the allocator layouts" in refusal(f"sglang@{tmp_path}")


def test_a_package_that_python_takes_from_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finder that goes before the path, as some editable installs put one there."""
    wanted, other = write_package(tmp_path / "wanted"), write_package(tmp_path / "other")

    class Elsewhere:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> Any:
            import importlib.machinery

            return importlib.machinery.PathFinder.find_spec(name, [str(other)]) if name == "sglang" else None

    monkeypatch.setattr(sys, "meta_path", [Elsewhere, *sys.meta_path])
    assert (
        f"should come from {wanted.resolve()}, but Python imported sglang from {other.resolve()}"
        in refusal(f"sglang@{wanted}")
    )


REAL = """
import inspect, json, os, sys, warnings
before = dict(os.environ), list(sys.path), list(warnings.filters)
from kvproof.impl.targets.sglang.load import load
loaded = load("sglang==" + sys.argv[1])
unchanged = before == (dict(os.environ), list(sys.path), list(warnings.filters))
import torch

def call(function, **arguments):
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in taken})

common = dict(dtype=torch.float16, device="cpu", kvcache=None, need_sort=False)
token = call(loaded.token_class, size=8, **common)
paged = call(loaded.paged_class, size=64, page_size=4, **common)
zero, five = torch.tensor([0]), torch.tensor([5])
extended = None
if loaded.has_naive_path or os.environ.get("TRITON_INTERPRET") == "1":
    extended = call(
        paged.alloc_extend, prefix_lens=zero, prefix_lens_cpu=zero, seq_lens=five, seq_lens_cpu=five,
        last_loc=torch.tensor([-1]), extend_num_tokens=5,
    ).tolist()
print(json.dumps({
    "version": loaded.version, "row": loaded.layout.row, "unchanged": unchanged,
    "token": token.alloc(3).tolist(), "extended": extended, "paged": paged.alloc(4).tolist(),
    "kernels": sorted(loaded.kernels), "naive": loaded.has_naive_path,
    "leaked": sorted(set(loaded.standins) & set(sys.modules)),
}))
"""


@pytest.mark.network
@pytest.mark.parametrize("interpret", ["0", "1"])
@pytest.mark.parametrize(
    ("version", "row", "naive"),
    [
        ("0.4.6.post5", "0.4.4 - 0.4.7", False),
        ("0.4.9.post6", "0.4.8 - 0.5.12", False),
        ("0.5.23", "0.5.16 - 0.5.23", True),
    ],
)
def test_a_real_release_loads_and_allocates(version: str, row: str, naive: bool, interpret: str) -> None:
    """The slots are those of a fresh pool: 1, 2, 3 and, with pages of 4, page 1 on (specification, 3, 4)."""
    try:
        fetch.fetch(version)
    except SglangUnavailable as error:
        if "cannot reach the package registry" in str(error):
            pytest.skip(str(error))
        raise
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(REAL), version]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    extended = [4, 5, 6, 7, 8] if naive or interpret == "1" else None
    first_free = 12 if extended else 4
    assert json.loads(done.stdout) == {
        "version": version,
        "row": row,
        "unchanged": True,
        "token": [1, 2, 3],
        "extended": extended,
        "paged": list(range(first_free, first_free + 4)),
        "kernels": ["alloc_decode_kernel", "alloc_extend_kernel"],
        "naive": naive,
        "leaked": [],
    }
