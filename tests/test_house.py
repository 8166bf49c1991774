"""The rules of the house that no single file shows: who imports whom, what ships, what lies at the top.

Not covered: style (ruff), types (mypy), and imports made by name at run time, which no reading of the source
finds.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ci", "corpus", "impl", "model", "properties")
MODULE_LINES_MAX = 450

REQUIRED_AT_TOP = {
    *PACKAGES,
    *("tests", "pyproject.toml", "Makefile", ".ci", ".github", ".pre-commit-config.yaml", ".gitignore"),
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
}
ALLOWED_AT_TOP = REQUIRED_AT_TOP | {".gitattributes", "action.yml"}

# Parts of the code, and the parts whose modules each may import. `impl.targets` is a part of its own: only
# adapters know the model; what is checked shares no code with the specification it is checked against.
MAY_IMPORT = {
    "model": {"model"},
    "impl": {"impl"},
    "impl.targets": {"impl.targets", "impl", "model"},
    "corpus": {"corpus", "model"},
    "properties": {"properties", "impl.targets", "impl", "model"},
    "ci": {"ci", "properties", "corpus", "impl.targets", "impl", "model"},
}


@cache
def tree() -> tuple[Path, ...]:
    """Every file that is or would be committed, relative to the root; without git, all that may lie there."""
    if in_git_checkout():
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        paths = [Path(name) for name in listing.split("\0") if name]
    else:
        tops = [ROOT / name for name in sorted(ALLOWED_AT_TOP)]
        found = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
        paths = [path.relative_to(ROOT) for path in found if "__pycache__" not in path.parts]
    return tuple(path for path in paths if (ROOT / path).is_file())


@cache
def in_git_checkout() -> bool:
    """Whether the root is the top of a git work tree, so that git can say which files count."""
    return (ROOT / ".git").exists()


@cache
def modules() -> tuple[Path, ...]:
    """Every Python file of the five packages."""
    return tuple(path for path in tree() if path.suffix == ".py" and path.parts[0] in PACKAGES)


@cache
def pyproject() -> dict[str, dict]:
    """The project's own pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def part_of(dotted: str) -> str:
    """The part that `model.ops`, `impl.targets.null`, … belongs to."""
    return "impl.targets" if f"{dotted}.".startswith("impl.targets.") else dotted.split(".")[0]


def imports_of(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything the module at `path` imports; `from a import b` counts as a.b."""
    package = ["kvproof", *path.parent.parts]
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def wrong_imports(path: Path, source: str) -> list[str]:
    """What the module at `path` imports against the rules, one line each."""
    part = part_of(".".join(path.with_suffix("").parts))
    wrong = []
    for line, name in imports_of(path, source):
        top, _, rest = name.partition(".")
        if top == "kvproof":
            allowed = part_of(rest) in MAY_IMPORT[part]
        elif top in (*PACKAGES, "tests"):
            allowed = False
        else:
            allowed = part != "model" or top in sys.stdlib_module_names
        if not allowed:
            wrong.append(f"{path}:{line}: {part} must not import {name}")
    return wrong


@pytest.mark.parametrize(
    ("path", "source", "verdict"),
    [
        ("model/a.py", "import dataclasses\nfrom kvproof.model import ops", []),
        ("model/a.py", "import torch", ["model/a.py:1: model must not import torch"]),
        (
            "model/a.py",
            "from ..impl import paged",
            ["model/a.py:1: model must not import kvproof.impl.paged"],
        ),
        ("impl/a.py", "from kvproof import model", ["impl/a.py:1: impl must not import kvproof.model"]),
        (
            "impl/a.py",
            "import kvproof.impl.targets.x",
            ["impl/a.py:1: impl must not import kvproof.impl.targets.x"],
        ),
        ("impl/a.py", "from .targets import x", ["impl/a.py:1: impl must not import kvproof.impl.targets.x"]),
        ("impl/targets/a.py", "from kvproof.model import ops\nfrom ..paged import Paged", []),
        (
            "impl/targets/a.py",
            "def f():\n    from kvproof.properties import x",
            ["impl/targets/a.py:2: impl.targets must not import kvproof.properties.x"],
        ),
        ("corpus/a.py", "import kvproof.impl", ["corpus/a.py:1: corpus must not import kvproof.impl"]),
        (
            "properties/a.py",
            "from kvproof.ci import cli",
            ["properties/a.py:1: properties must not import kvproof.ci.cli"],
        ),
        ("ci/a.py", "from kvproof.corpus import x\nfrom kvproof.properties import y\nimport typer", []),
        ("ci/a.py", "from model import ops", ["ci/a.py:1: ci must not import model.ops"]),
    ],
)
def test_the_import_rule_itself(path: str, source: str, verdict: list[str]) -> None:
    """The reading of imports catches each direction that is forbidden, in each way of writing it."""
    assert wrong_imports(Path(path), source) == verdict


def test_imports_point_one_way() -> None:
    """ci → properties → impl.targets → model; corpus → model; impl neither; model only the stdlib."""
    assert modules()
    wrong = [
        line for path in modules() for line in wrong_imports(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    """Each Python file, tests among them, opens with a docstring."""
    python = [path for path in tree() if path.suffix == ".py"]
    silent = [
        str(p) for p in python if not ast.get_docstring(ast.parse((ROOT / p).read_text(encoding="utf-8")))
    ]
    assert not silent, f"no module docstring: {silent}"


def test_modules_stay_readable() -> None:
    """No Python file is longer than one sitting: split it by noun."""
    lengths = {
        str(p): len((ROOT / p).read_text(encoding="utf-8").splitlines()) for p in tree() if p.suffix == ".py"
    }
    long = {path: lines for path, lines in lengths.items() if lines > MODULE_LINES_MAX}
    assert not long, f"longer than {MODULE_LINES_MAX} lines: {long}"


# Written so that this file holds none of the paths that it forbids.
MACHINE_PATH = re.compile(
    rb"(?<![\w.~$}>])/(?:" + b"|".join([b"home", b"root", b"Users", b"tmp", b"work", b"mnt"]) + rb")/\w"
)


@pytest.mark.parametrize("top", ["home", "root", "tmp", "work"])
def test_the_path_rule_itself(top: str) -> None:
    """An absolute path of a machine is seen; a relative path through a folder of that name is not."""
    assert MACHINE_PATH.search(f'cache = "/{top}/someone"'.encode())
    assert not MACHINE_PATH.search(f"see docs/{top}/page.md".encode())


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    """A test takes a temporary folder from the library; a cache folder is computed from the user's home."""
    found = []
    for path in tree():
        for number, line in enumerate((ROOT / path).read_bytes().splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path}:{number}: {line.decode(errors='replace').strip()}")
    assert not found, "\n".join(found)


def test_top_level_is_what_the_architecture_says() -> None:
    """Nothing lies at the top but the six folders and the customary files, and none of them is missing."""
    if not in_git_checkout():
        pytest.skip("needs a git checkout: only git can say which files at the top count")
    tops = {path.parts[0] for path in tree()}
    assert (sorted(tops - ALLOWED_AT_TOP), sorted(REQUIRED_AT_TOP - tops)) == ([], [])


def test_every_package_ships() -> None:
    """Each folder that holds Python is a package, and pyproject.toml lists exactly those packages."""
    folders = {path.parent for path in modules()}
    bare = sorted(str(folder) for folder in folders if folder / "__init__.py" not in modules())
    assert not bare, f"Python files without an __init__.py beside them: {bare}"
    here = sorted(".".join(["kvproof", *folder.parts]) for folder in folders)
    assert sorted(pyproject()["tool"]["setuptools"]["packages"]) == here


@pytest.mark.parametrize("package", PACKAGES)
def test_types_ship(package: str) -> None:
    """Type checkers believe the annotations of a package only where a py.typed lies in it."""
    assert Path(package, "py.typed") in tree()


def test_data_ships() -> None:
    """Each file of the packages that is not Python matches a package-data pattern; no other is installed."""
    patterns = pyproject()["tool"]["setuptools"]["package-data"]
    shipped = set()
    for package in pyproject()["tool"]["setuptools"]["packages"]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        for pattern in patterns["*"] + patterns.get(package, []):
            shipped |= {path.relative_to(ROOT) for path in folder.glob(pattern)}
    data = {path for path in tree() if path.parts[0] in PACKAGES and path.suffix != ".py"}
    assert not data - shipped, f"no package-data pattern ships {sorted(map(str, data - shipped))}"


@pytest.mark.parametrize("group", ["scripts", "entry-points"])
def test_entry_points_lead_somewhere(group: str) -> None:
    """Each declared command and target names an attribute that exists."""
    declared = pyproject()["project"][group]
    names = declared if group == "scripts" else declared["kvproof.targets"]
    assert names
    for value in names.values():
        module, _, attribute = value.partition(":")
        assert hasattr(importlib.import_module(module), attribute), value
