"""Fetching into the cache, with a stand-in for pip and wheels made here; and once with the true registry.

Not covered: loading what was fetched (test_load).
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvproof.impl.targets.sglang import fetch
from kvproof.impl.targets.sglang.errors import SglangUnavailable, UnknownSglang

VERSION = "0.5.99"
PACKAGE = {
    "sglang/__init__.py": "answer = 42\n",
    "sglang/srt/deep/module.py": "",
    "sglang/data.json": "{}",
    "sglang/lib.so": "binary",
    "tools/other.py": "",
    f"sglang-{VERSION}.dist-info/METADATA": "Name: sglang\n",
    f"sglang-{VERSION}.dist-info/RECORD": (
        "sglang/__init__.py,sha256=x,12\nsglang/jit/csrc/k.cu,,\n"
        "sglang/../../evil/x,,\ntools/other.py,,\n/abs/x,,\n"
    ),
    f"sglang-{VERSION}.dist-info/entry_points.txt": "",
}
NO_MATCH = (
    "ERROR: Could not find a version that satisfies the requirement sglang==0.5.99 (from versions: {found})\n"
    "ERROR: No matching distribution found for sglang==0.5.99\n"
)
UNREACHABLE = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError()': /simple/\n"
)

Pip = Callable[[list[str], Path], "tuple[int, str]"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPROOF_CACHE", str(folder))
    return folder


def put_wheel(folder: Path, members: Mapping[str, str] = PACKAGE) -> Path:
    wheel = folder / f"sglang-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return wheel


def good_pip(_command: list[str], folder: Path) -> tuple[int, str]:
    put_wheel(folder)
    return 0, "WARNING: Location 'file:///somewhere/' is ignored\n"


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> list[list[str]]:
    """Let `pip(command, download folder) -> (exit status, stderr)` answer; returns the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        status, stderr = pip(command, Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, status, stdout="", stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def failing_pip(stderr: str) -> Pip:
    return lambda _command, _folder: (1, stderr)


def assert_refused(cache: Path, *fragments: str, kind: type[SglangUnavailable] = SglangUnavailable) -> None:
    """`fetch` fails in one line that holds the fragments, and the cache holds nothing, not even scraps."""
    with pytest.raises(SglangUnavailable) as caught:
        fetch.fetch(VERSION)
    assert caught.type is kind
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    assert fetch.cached(VERSION) is None
    assert [path for path in cache.rglob("*") if path != cache / "sglang"] == []


def test_python_files_and_records_are_unpacked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = use_pip(monkeypatch, good_pip)
    assert fetch.cached(VERSION) is None
    root = fetch.fetch(VERSION)
    assert root == fetch.cached(VERSION) == cache / "sglang" / VERSION
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert files == [
        f"sglang-{VERSION}.dist-info/METADATA",
        f"sglang-{VERSION}.dist-info/RECORD",
        "sglang/__init__.py",
        "sglang/srt/deep/module.py",
    ]
    assert (root / "sglang" / "__init__.py").read_text() == "answer = 42\n"
    assert os.listdir(cache / "sglang") == [VERSION], "the wheel and the working folder must be gone"
    assert fetch.fetch(VERSION) == root
    assert len(commands) == 1
    assert commands[0][-1] == f"sglang=={VERSION}"
    assert {"download", "--no-deps", "--only-binary=:all:"} <= set(commands[0])


def test_folders_without_python_are_there_and_empty(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules look for them. Those of a tree that was unpacked without them come at the next fetch."""
    use_pip(monkeypatch, good_pip)
    root = fetch.fetch(VERSION)
    folder = root / "sglang" / "jit" / "csrc"
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in root.iterdir()) == ["sglang", f"sglang-{VERSION}.dist-info"]
    assert not (cache / "evil").exists()
    folder.rmdir()
    assert fetch.fetch(VERSION) == root
    assert folder.is_dir()


def test_a_tree_that_cannot_be_completed_is_used_as_it_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, good_pip)
    root = fetch.fetch(VERSION)
    (root / "sglang" / "jit" / "csrc").rmdir()

    def refuse(_path: Path, **_options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert fetch.fetch(VERSION) == root


def test_a_hostile_version_reaches_neither_pip_nor_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = use_pip(monkeypatch, good_pip)
    for version in ("../../x", "1 --index-url=x", "0.5.23\n"):
        with pytest.raises(SglangUnavailable, match="is not a release number"):
            fetch.fetch(version)
        with pytest.raises(SglangUnavailable, match="is not a release number"):
            fetch.cached(version)
    assert commands == []
    assert not cache.exists()


def test_a_wheel_for_another_interpreter_will_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], folder: Path) -> tuple[int, str]:
        return good_pip(command, folder) if "--platform" in command else (1, NO_MATCH.format(found="0.1"))

    commands = use_pip(monkeypatch, pip)
    assert fetch.fetch(VERSION).is_dir()
    assert len(commands) == 2
    assert {"--platform", "--python-version", "--implementation"} <= set(commands[1])


@pytest.mark.parametrize(
    ("stderr", "fragments"),
    [
        (NO_MATCH.format(found="none"), ("no wheel of any release", "check PIP_INDEX_URL")),
        (UNREACHABLE + NO_MATCH.format(found="none"), ("cannot reach the package registry", "network")),
        ("/usr/bin/python3: No module named pip\n", ("has no pip", "ensurepip")),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", ("disk is full", "KVPROOF_CACHE")),
        ("Traceback ...\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n\nnotice: x\n", ("exit 1", "HASHES")),
        ("", ("pip said nothing",)),
    ],
)
def test_what_pip_says_becomes_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, fragments: tuple[str, ...]
) -> None:
    use_pip(monkeypatch, failing_pip(stderr))
    assert_refused(cache, VERSION, *fragments)


@pytest.mark.parametrize("before", ["", UNREACHABLE])
def test_a_number_that_no_release_has_is_the_callers_to_mend(
    cache: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The list of versions proves that the registry was reached after all."""
    use_pip(monkeypatch, failing_pip(before + NO_MATCH.format(found="0.1, 0.2")))
    assert_refused(cache, VERSION, "no wheel of it", "check the number", kind=UnknownSglang)


def test_a_pip_that_hangs_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], _folder: Path) -> tuple[int, str]:
        raise subprocess.TimeoutExpired(command, 1)

    use_pip(monkeypatch, pip)
    assert_refused(cache, VERSION, "network")


@pytest.mark.parametrize(
    "name", ["../evil.py", "/evil.py", "sglang/../../evil.py", "sglang\\..\\evil.py", "C:/evil.py"]
)
def test_a_path_out_of_the_folder_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def pip(_command: list[str], folder: Path) -> tuple[int, str]:
        put_wheel(folder, {**PACKAGE, name: "evil"})
        return 0, ""

    use_pip(monkeypatch, pip)
    assert_refused(cache, "unsafe path")
    assert list(tmp_path.rglob("*evil*")) == []


@pytest.mark.parametrize("limit", ["_MAX_FILES", "_MAX_FILE_BYTES", "_MAX_TOTAL_BYTES"])
def test_a_wheel_beyond_the_limits_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(fetch, limit, 3)
    use_pip(monkeypatch, good_pip)
    assert_refused(cache, "far too large")


def test_a_damaged_wheel_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(_command: list[str], folder: Path) -> tuple[int, str]:
        (folder / f"sglang-{VERSION}-py3-none-any.whl").write_bytes(b"no archive")
        return 0, ""

    use_pip(monkeypatch, pip)
    assert_refused(cache, "is damaged")


def test_a_wheel_without_the_package_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(_command: list[str], folder: Path) -> tuple[int, str]:
        put_wheel(folder, {"other/__init__.py": ""})
        return 0, ""

    use_pip(monkeypatch, pip)
    assert_refused(cache, "holds no package sglang")


def test_success_without_a_wheel_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, lambda _command, _folder: (0, ""))
    assert_refused(cache, "left 0 wheels")


def test_a_full_disk_while_unpacking(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    use_pip(monkeypatch, good_pip)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert_refused(cache, "disk is full", "KVPROOF_CACHE")


def test_an_unusable_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be stands for every folder that cannot be made or written."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path / "file"))
    commands = use_pip(monkeypatch, good_pip)
    with pytest.raises(
        SglangUnavailable, match=r"cannot be stored in .*set KVPROOF_CACHE to a writable folder"
    ):
        fetch.fetch(VERSION)
    assert commands == []


def test_a_half_deleted_release_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scraps = cache / "sglang" / VERSION / "sglang" / "srt"
    scraps.mkdir(parents=True)
    use_pip(monkeypatch, good_pip)
    assert (fetch.fetch(VERSION) / "sglang" / "__init__.py").is_file()
    assert os.listdir(cache / "sglang") == [VERSION]


def test_two_that_fetch_at_once_both_have_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have downloaded before either publishes, so one must find the place taken."""
    barrier = threading.Barrier(2, timeout=30)

    def pip(command: list[str], folder: Path) -> tuple[int, str]:
        result = good_pip(command, folder)
        barrier.wait()
        return result

    commands = use_pip(monkeypatch, pip)
    roots: list[Path] = []
    threads = [threading.Thread(target=lambda: roots.append(fetch.fetch(VERSION))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(commands) == 2
    assert roots == [cache / "sglang" / VERSION] * 2
    assert os.listdir(cache / "sglang") == [VERSION]


def test_the_order_of_the_cache_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPROOF_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_dir() == tmp_path / ".cache" / "kvproof"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_dir() == tmp_path / "xdg" / "kvproof"
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path / "own"))
    assert fetch.cache_dir() == tmp_path / "own"


@pytest.mark.network
def test_a_release_from_the_registry(cache: Path) -> None:
    """The smallest supported release, by this interpreter's own pip."""
    try:
        root = fetch.fetch("0.4.6.post5")
    except SglangUnavailable as error:
        if "cannot reach the package registry" in str(error):
            pytest.skip(str(error))
        raise
    assert (root / "sglang" / "srt" / "mem_cache" / "paged_allocator.py").is_file()
    assert {path.suffix for path in (root / "sglang").rglob("*") if path.is_file()} == {".py"}
    assert "0.4.6.post5" in (root / "sglang-0.4.6.post5.dist-info" / "METADATA").read_text()
