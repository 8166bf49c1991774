"""Copies of our package `kvproof.impl` under another name, with one piece of text replaced.

A copy lies on disk while the process lives, because Triton reads a kernel's source from its file. Only the
modules at the top of the package are copied: targets and instruments stay the harness's own.

Not covered: what is planted (`catalogue`), and copies of other packages.
"""

import atexit
import importlib.util
import re
import shutil
import sys
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

from kvproof import impl
from kvproof.impl.targets.built import Classes, classes_of
from kvproof.impl.targets.planted.plant import Plant
from kvproof.model.errors import InfrastructureError

_PACKAGE: Final = re.compile(r"\bkvproof\.impl\b")
_numbers = count()


def sources() -> dict[str, str]:
    """The text of every module at the top of `kvproof.impl`, by file name."""
    folder = Path(impl.__path__[0])
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}


def faulty(plant: Plant) -> dict[str, str]:
    """`sources()` with the fault in. Raises InfrastructureError unless the text to replace is there once."""
    texts = sources()
    found = texts.get(plant.file, "").count(plant.old)
    if found != 1:
        raise InfrastructureError(
            f"the planted fault {plant.id} no longer fits impl/{plant.file}: the text that it replaces occurs"
            f" {found} times there, not once; mend it in impl/targets/planted/"
        )
    texts[plant.file] = texts[plant.file].replace(plant.old, plant.new)
    return texts


def load_copy(plant: Plant | None) -> Classes:
    """A fresh copy with this fault, or with none, imported. Its classes share nothing with other copies."""
    texts = sources() if plant is None else faulty(plant)
    label = "clean" if plant is None else plant.id.replace("-", "_")
    name = f"kvproof_planted_{label}_{next(_numbers)}"
    folder = _folder() / name
    folder.mkdir()
    for file, text in texts.items():
        (folder / file).write_text(_PACKAGE.sub(name, text), encoding="utf-8")
    _import_package(name, folder)
    return classes_of(name)


def _import_package(name: str, folder: Path) -> None:
    """Import the package from its folder, which is on no search path; its modules are found through it."""
    where = [str(folder)]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=where
    )
    if spec is None or spec.loader is None:
        raise InfrastructureError(f"the copy of kvproof.impl in {folder} cannot be imported")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)


@cache
def _folder() -> Path:
    """Where the copies of this process lie; gone when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="kvproof-planted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
