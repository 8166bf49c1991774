"""Stand-in modules: who is served, what they bear during the import, what they refuse afterwards.

The importing module is a small `sglang` package written to a temporary folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvproof.impl.targets.sglang import standins
from kvproof.impl.targets.sglang.errors import SglangUnavailable

# Heavy packages that no environment of ours has.
ABSENT = "sgl_kernel"
OTHER = "triton_kernels"

Import = Callable[[str], ModuleType]


@pytest.fixture
def import_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Imports the given source as `sglang.some`, with the finder at work; puts everything back afterwards."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in kept:
        del sys.modules[name]
    finder = standins.StandInFinder()
    monkeypatch.setattr(standins, "FINDER", finder)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()

    def import_source(source: str) -> ModuleType:
        (tmp_path / "sglang" / "some.py").write_text(textwrap.dedent(source))
        standins.install().importing = True
        try:
            return importlib.import_module("sglang.some")
        finally:
            finder.importing = False

    yield import_source
    finder.withdraw()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_all_that_imports_do_with_a_package_works(import_sglang: Import) -> None:
    module = import_sglang(
        f"""
        from typing import Optional, TypedDict
        import abc
        import {ABSENT}
        import {ABSENT}.deep.er as er
        from {ABSENT}.ops import Config, register, logging, AutoThing

        logger = logging.get_logger(__name__)
        logger.warning_once("x")
        AutoThing.register("name", Config, exist_ok=True)
        AutoThing._extra_content["name"] = Config
        DEFAULT = {ABSENT}.constants.DEFAULT

        class Mine(Config, total=False):
            field: Optional[Config] = None
            other: Config | None

        @register
        def plain(): ...

        @register("name", level=3)
        class Decorated: ...

        with_default = lambda config=Config(size=3): config
        """
    )
    assert issubclass(module.Mine, module.Config)
    assert module.er.__name__ == f"{ABSENT}.deep.er"
    assert standins.FINDER.stood_in == {ABSENT}


def test_a_call_after_the_import_is_refused(import_sglang: Import) -> None:
    module = import_sglang(f"from {ABSENT} import run, Config\nclass Mine(Config): ...\n")
    with pytest.raises(SglangUnavailable, match=rf"{ABSENT}\.run was called, but {ABSENT} is only stood in"):
        module.run(1)
    with pytest.raises(
        SglangUnavailable, match=rf"sglang\.some\.Mine was called, but {ABSENT} is only stood in"
    ):
        module.Mine()


def test_pydantic_takes_a_stand_in_as_the_type_of_a_field(import_sglang: Import) -> None:
    pytest.importorskip("pydantic", reason="needs pydantic: pip install 'kvproof[sglang]'")
    module = import_sglang(
        f"""
        from pydantic import BaseModel
        from {ABSENT} import Tool
        class Request(BaseModel):
            tools: list[Tool]
        """
    )
    assert module.Request(tools=[1]).tools == [1]


def test_an_import_that_sglang_guards_finds_nothing(import_sglang: Import) -> None:
    module = import_sglang(f"try:\n    import {ABSENT}\nexcept ImportError:\n    {ABSENT} = None\n")
    assert getattr(module, ABSENT) is None
    assert standins.FINDER.stood_in == set()


def test_the_question_whether_a_package_is_installed_is_answered_no(import_sglang: Import) -> None:
    module = import_sglang(f"import importlib.util\nfound = importlib.util.find_spec('{ABSENT}')\n")
    assert module.found is None


def test_import_module_is_an_import_too(import_sglang: Import) -> None:
    module = import_sglang(f"import importlib\nit = importlib.import_module('{ABSENT}.ops')\n")
    assert module.it.__name__ == f"{ABSENT}.ops"


def test_nobody_else_is_served(import_sglang: Import) -> None:
    import_sglang(f"import {ABSENT}\n")
    assert ABSENT in sys.modules
    standins.FINDER.withdraw()
    assert ABSENT not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(ABSENT)
    assert importlib.util.find_spec(ABSENT) is None


def test_a_late_import_of_sglang_is_served_anew(import_sglang: Import) -> None:
    module = import_sglang(
        f"import {ABSENT}\ndef late():\n    import {OTHER}, {ABSENT}\n    return {OTHER}\n"
    )
    standins.FINDER.withdraw()
    assert module.late().__name__ == OTHER
    assert standins.FINDER.stood_in == {ABSENT, OTHER}


def test_a_package_off_the_list_stays_absent(import_sglang: Import) -> None:
    with pytest.raises(ModuleNotFoundError, match="kvproof_no_such_package"):
        import_sglang("import kvproof_no_such_package\n")


def test_a_missing_part_of_an_installed_package_stays_missing(import_sglang: Import, tmp_path: Path) -> None:
    (tmp_path / ABSENT).mkdir()
    (tmp_path / ABSENT / "__init__.py").write_text("real = True\n")
    with pytest.raises(ModuleNotFoundError, match=f"{ABSENT}.ops"):
        import_sglang(f"import {ABSENT}.ops\n")
    del sys.modules[ABSENT]


def test_special_names_are_not_invented(import_sglang: Import) -> None:
    """Python asks objects for protocols; a stand-in that answered would pass for a path or an iterator."""
    module = import_sglang(f"import {ABSENT}\nfrom {ABSENT} import thing\n")
    for holder in (getattr(module, ABSENT), module.thing):
        assert not hasattr(holder, "__version__")
        assert not hasattr(holder, "__fspath__")
    with pytest.raises(TypeError):
        iter(module.thing)


def test_install_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    assert standins.install() is standins.install()
    assert sys.meta_path.count(standins.FINDER) == 1
    assert sys.meta_path[-1] is standins.FINDER
