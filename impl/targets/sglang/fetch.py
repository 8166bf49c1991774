"""Fetching a release of SGLang from the package registry into the cache folder, once.

pip downloads the wheel without its dependencies; the Python files of the package are unpacked to
`<cache>/sglang/<version>/`, and the wheel is deleted. Folders that hold no Python are made as well, empty:
modules look for those of the C++ sources when they are imported, and into them only to compile. Nothing of
the wheel is run, and nothing is installed. The folder appears in one rename, so a reader sees all of it or
nothing, and of two processes that fetch at once one wins and both have it. This file does NOT import SGLang;
see `load`.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .errors import SglangUnavailable, UnknownSglang
from .releases import check_version

_PIP_TIMEOUT_S = 900
# Far above any release (the largest: 5,000 files, 60 MB of Python), far below what fills a disk.
_MAX_FILES = 50_000
_MAX_FILE_BYTES = 32 * 1024 * 1024
_MAX_TOTAL_BYTES = 512 * 1024 * 1024

# The Python text of a wheel built for another machine is just as good: the interpreters to ask for when pip
# has none for this one.
_OTHER_PYTHONS: tuple[str, ...] = ("3.12", "3.11", "3.13")
_OTHER_PLATFORMS: tuple[str, ...] = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")


def cache_dir() -> Path:
    """Our cache folder: `KVPROOF_CACHE`, else `XDG_CACHE_HOME/kvproof`, else `~/.cache/kvproof`."""
    if own := os.environ.get("KVPROOF_CACHE"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "kvproof"
    try:
        return Path.home() / ".cache" / "kvproof"
    except RuntimeError as error:
        raise SglangUnavailable(
            f"no cache folder: {error}; set KVPROOF_CACHE to a writable folder"
        ) from error


def cached(version: str) -> Path | None:
    """The folder of the release if it is in the cache (it holds `sglang/`), else None. Touches no network."""
    root = cache_dir() / "sglang" / check_version(version)
    return root if _holds_package(root) else None


def _holds_package(root: Path) -> bool:
    return (root / "sglang" / "__init__.py").is_file()


def fetch(version: str) -> Path:
    """The folder of the release, fetched unless it is in the cache.

    Raises `SglangUnavailable` with one line that names cause and remedy; `UnknownSglang` when there is no
    such release.
    """
    if (found := cached(version)) is not None:
        with contextlib.suppress(OSError):  # not ours to write: then a kind or two cannot be imported
            _make_folders(found)
        return found
    final = cache_dir() / "sglang" / version
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=final.parent))
    except OSError as error:
        raise _disk_error(version, final.parent, error) from error
    try:
        wheel = _download(version, work)
        _unpack(wheel, work / "tree")
        if not _holds_package(work / "tree"):
            raise SglangUnavailable(f"the wheel {wheel.name} holds no package sglang; choose another release")
        _make_folders(work / "tree")
        _publish(work / "tree", final)
    except OSError as error:
        raise _disk_error(version, final.parent, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if cached(version) is None:
        raise SglangUnavailable(
            f"the wheel of sglang {version} holds no package sglang; choose another release"
        )
    return final


def _publish(tree: Path, final: Path) -> None:
    """Move `tree` to `final` in one step; another process may have been first, and then its tree stands."""
    if final.exists() and not _holds_package(final):
        # Left behind half deleted. Moved aside, it is deleted with the working folder.
        final.rename(tree.parent / "damaged")
    try:
        tree.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _download(version: str, work: Path) -> Path:
    """The wheel, downloaded into `work`: for this interpreter when there is one, else for another."""
    attempts: list[list[str]] = [[]]
    attempts += [
        ["--implementation", "cp", "--python-version", python]
        + [part for platform in _OTHER_PLATFORMS for part in ("--platform", platform)]
        for python in _OTHER_PYTHONS
    ]
    for options in attempts:
        result = _run_pip(version, work, options)
        if result.returncode == 0:
            wheels = sorted(work.glob("sglang-*.whl"))
            if len(wheels) != 1:
                raise SglangUnavailable(
                    f"pip reported success for sglang {version} but left {len(wheels)} wheels"
                )
            return wheels[0]
        if not _lacks_wheel(result):
            raise SglangUnavailable(f"sglang {version} cannot be fetched: {_cause(result)}")
    if not _lists_versions(result):
        raise SglangUnavailable(
            f"sglang {version} cannot be fetched: the registry has no wheel of any release; "
            "check PIP_INDEX_URL"
        )
    raise UnknownSglang(
        f"sglang {version} cannot be fetched: the registry has no wheel of it; "
        "check the number (kvproof targets lists the supported ones)"
    )


def _run_pip(version: str, work: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", *options, "--dest", str(work)]
    command.append(f"sglang=={version}")
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SglangUnavailable(
            f"sglang {version} cannot be fetched: pip took over {_PIP_TIMEOUT_S} s; check the network"
        ) from error


def _lacks_wheel(result: subprocess.CompletedProcess[str]) -> bool:
    """Whether the registry answered, and has no matching wheel."""
    return "No matching distribution found" in result.stderr and not _no_network(result)


def _no_network(result: subprocess.CompletedProcess[str]) -> bool:
    # pip ends with "No matching distribution" also when it never reached the registry; its complaints tell.
    if _lists_versions(result):
        return False
    complaints = r"Retrying \(|NewConnectionError|NameResolutionError|connection broken|timed out|SSLError"
    return re.search(complaints, result.stderr) is not None


def _lists_versions(result: subprocess.CompletedProcess[str]) -> bool:
    """Whether the registry was reached and named releases that it has."""
    return re.search(r"from versions: (?!none)", result.stderr) is not None


def _cause(result: subprocess.CompletedProcess[str]) -> str:
    if re.search(r"No module named '?pip\b", result.stderr):
        return f"{sys.executable} has no pip; run: {sys.executable} -m ensurepip"
    if _no_network(result):
        return "pip cannot reach the package registry; check network, proxy and PIP_INDEX_URL, then try again"
    if "No space left on device" in result.stderr:
        return "the disk is full; free some space, or set KVPROOF_CACHE and TMPDIR to folders elsewhere"
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR:").strip()
    return f"pip failed (exit {result.returncode}): {last:.300}"


def _unpack(wheel: Path, tree: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = 0
            for count, (member, relative) in enumerate(_wanted(archive), start=1):
                total += member.file_size
                if count > _MAX_FILES or member.file_size > _MAX_FILE_BYTES or total > _MAX_TOTAL_BYTES:
                    raise SglangUnavailable(
                        f"{wheel.name} is far too large to be SGLang; it was not unpacked"
                    )
                target = tree / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                # zipfile reads no more than the declared size, and checks the sum.
                target.write_bytes(archive.read(member))
    except zipfile.BadZipFile as error:
        raise SglangUnavailable(f"{wheel.name} is damaged ({error}); try again") from error


def _wanted(archive: zipfile.ZipFile) -> Iterator[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """The members to unpack: Python files of the package, and the two records of what they are."""
    for member in archive.infolist():
        relative = PurePosixPath(member.filename)
        if (
            relative.is_absolute()
            or ".." in relative.parts
            or "\\" in member.filename
            or ":" in member.filename
        ):
            raise SglangUnavailable(
                f"the wheel holds the unsafe path {member.filename!r:.80}; it was not unpacked"
            )
        top = relative.parts[0] if relative.parts else ""
        if (top == "sglang" and relative.suffix == ".py") or (
            top.endswith(".dist-info")
            and relative.name in ("METADATA", "RECORD")
            and len(relative.parts) == 2
        ):
            yield member, relative


def _make_folders(root: Path) -> None:
    """Make the folders of the package that hold no Python, as the wheel's record names them. Also for trees
    that an earlier kvproof unpacked; where all are there nothing is written."""
    for record in root.glob("sglang-*.dist-info/RECORD"):
        with record.open(encoding="utf-8", errors="replace", newline="") as lines:
            paths = {PurePosixPath(row[0]).parent for row in csv.reader(lines) if row}
        for path in sorted(paths):
            if path.parts[:1] == ("sglang",) and ".." not in path.parts and len(paths) <= _MAX_FILES:
                (root / path).mkdir(parents=True, exist_ok=True)


def _disk_error(version: str, folder: Path, error: OSError) -> SglangUnavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "the disk is full; free some space, or set KVPROOF_CACHE to a folder elsewhere"
    else:
        remedy = f"{error.strerror or error}; set KVPROOF_CACHE to a writable folder"
    return SglangUnavailable(f"sglang {version} cannot be stored in {folder}: {remedy}")
