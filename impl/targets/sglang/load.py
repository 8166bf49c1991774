"""Loading the allocator classes of one SGLang release into this process.

`load("sglang")` takes whatever is importable, `load("sglang==0.5.23")` the release of that number from the
cache, and `load("sglang@PATH")` a source checkout. SGLang's own modules run unmodified. Two releases cannot
live in one process. The token and the paged allocator come at once; the modules of the other kinds import
half of SGLang, which takes seconds, so `load_kind` gets each when it is wanted. Works with and without
Triton's interpreter: `TRITON_INTERPRET` must be set before Triton is first imported, and whoever starts the
process does that. This file does NOT construct or drive allocators.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from . import fetch, standins
from .errors import SglangUnavailable, UnknownSglang
from .isolation import quiet_import
from .releases import KIND_HOMES, Layout, Place, check_version, kinds_of, layout_of

# Names that old releases import from Triton and new Triton lacks; SGLang uses them only when a server
# compiles kernels.
_GONE_FROM_TRITON: dict[str, tuple[str, ...]] = {
    "triton.runtime.cache": ("default_cache_dir", "default_dump_dir", "default_override_dir"),
}

# Light packages: the extra `kvproof[sglang]`. Named here only to word the remedy.
LIGHT: frozenset[str] = frozenset(
    {
        "IPython", "PIL", "aiohttp", "dill", "msgspec", "numpy", "orjson", "packaging", "psutil", "pybase64",
        "pydantic", "pydantic_core", "requests", "starlette", "tqdm", "typing_extensions", "zmq",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedSglang:
    """The allocator classes of one release.

    `root` is the folder that holds the package `sglang`. `stood_in` names what has been stood in for so far.
    `kernels` and `naive` map `alloc_extend_kernel`, `alloc_decode_kernel`, `alloc_extend_naive` and
    `alloc_decode_naive` to the objects of that name, as far as the release has them; the paged class looks
    them up in `paged_module`. `has_naive_path`: the paged class can itself choose the naive functions (its
    instances have `use_triton_kernels`).

    `offers` says where the classes of the other kinds stand in this release. `kinds` holds those of the kinds
    that `load_kind` has imported, by role ("allocator", "pool" ...); `absent` says of the kinds that it could
    not import why, in one line each.
    """

    spec: str
    version: str
    root: Path
    layout: Layout
    token_module: ModuleType
    paged_module: ModuleType
    token_class: type[Any]
    paged_class: type[Any]
    kernels: dict[str, Any]
    naive: dict[str, Any]
    has_naive_path: bool
    stood_in: set[str]
    offers: dict[str, dict[str, Place]]
    kinds: dict[str, dict[str, type[Any]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def standins(self) -> tuple[str, ...]:
        """`stood_in`, sorted."""
        return tuple(sorted(self.stood_in))


_loaded: LoadedSglang | None = None


def load(spec: str) -> LoadedSglang:
    """The allocator classes of the SGLang that `spec` names, loaded once per process.

    Raises `SglangUnavailable` when it cannot be fetched, found or imported (with the first cause and its
    place in SGLang), and when this process already holds a different SGLang; `UnknownSglang` when `spec` is
    at fault.
    """
    global _loaded
    root = _root_of(spec)
    if _loaded is not None:
        if _loaded.root != root:
            raise SglangUnavailable(
                f"{spec} cannot be loaded: this process already holds SGLang {_loaded.version} "
                f"from {_loaded.root}; use one process for each release"
            )
        return _loaded
    _refuse_other_sglang(spec, root)
    layout = layout_of(root / "sglang")
    stood_in = _import_allocators(spec, root, layout)
    _loaded = _collect(spec, root, layout, stood_in)
    return _loaded


def _root_of(spec: str) -> Path:
    if spec == "sglang":
        return _importable_root()
    if spec.startswith("sglang=="):
        return fetch.fetch(check_version(spec.removeprefix("sglang=="))).resolve()
    if spec.startswith("sglang@"):
        return _checkout_root(spec.removeprefix("sglang@"))
    raise UnknownSglang(f"{spec!r:.80} names no SGLang; write sglang, sglang==VERSION or sglang@PATH")


def _importable_root() -> Path:
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise SglangUnavailable(
            "no sglang can be imported here; install it, or use sglang==VERSION or sglang@PATH"
        )
    return Path(found.origin).resolve().parent.parent


def _checkout_root(name: str) -> Path:
    if not name:  # the working folder, to pathlib; nobody means that
        raise UnknownSglang("sglang@ names no folder; write sglang@PATH, the path of a source checkout")
    try:
        path = Path(name).expanduser()
        for root in (path / "python", path):
            if (root / "sglang" / "__init__.py").is_file():
                return root.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no such home
        words = error.strerror if isinstance(error, OSError) else error
        raise UnknownSglang(f"{name} cannot be read: {words}; name the path of a source checkout") from None
    raise UnknownSglang(
        f"{path} is no SGLang checkout: "
        f"neither {path / 'python' / 'sglang'} nor {path / 'sglang'} is a package"
    )


def _refuse_other_sglang(spec: str, root: Path) -> None:
    present = sys.modules.get("sglang")
    if present is None:
        return
    place = Path(str(present.__file__)).resolve().parent.parent
    if place != root:
        raise SglangUnavailable(
            f"{spec} cannot be loaded: sglang was already imported from {place}; use a process of its own"
        )


def load_kind(loaded: LoadedSglang, kind: str) -> dict[str, type[Any]]:
    """The classes of a kind beside token and paged, by role; imported on the first call, which takes seconds
    for most. Leaves `loaded.kinds` or `loaded.absent` with one entry more.

    Raises `SglangUnavailable` when the release has no such kind, or it cannot be imported; the other kinds
    are none the worse.
    """
    if kind in loaded.kinds:
        return loaded.kinds[kind]
    if kind not in loaded.absent:
        try:
            loaded.kinds[kind] = _import_kind(loaded, kind)
            return loaded.kinds[kind]
        except SglangUnavailable as error:
            loaded.absent[kind] = str(error)
    raise SglangUnavailable(loaded.absent[kind])


def load_kinds(loaded: LoadedSglang) -> None:
    """Try every kind once: afterwards each of `KIND_HOMES` is in `loaded.kinds` or in `loaded.absent`."""
    for kind in KIND_HOMES:
        with contextlib.suppress(SglangUnavailable):
            load_kind(loaded, kind)


def _import_kind(loaded: LoadedSglang, kind: str) -> dict[str, type[Any]]:
    places = loaded.offers.get(kind)
    if places is None:
        raise SglangUnavailable(f"SGLang {loaded.version} has no {kind} allocator")
    try:
        loaded.stood_in.update(_import(loaded.root, [place.module for place in places.values()]))
        return {role: getattr(sys.modules[place.module], place.name) for role, place in places.items()}
    except Exception as error:
        what = f"{kind} of SGLang {loaded.version}"
        raise _explained(what, loaded.root, error) from error


def _import_allocators(spec: str, root: Path, layout: Layout) -> set[str]:
    """Import the token and the paged allocator from `root`; returns what was stood in for.

    A failure leaves no module of SGLang behind.
    """
    try:
        return _import(root, (*layout.first, layout.token_module, layout.paged_module))
    except Exception as error:
        _forget_sglang()
        raise _explained(spec, root, error) from error


def _import(root: Path, names: Iterable[str]) -> set[str]:
    """Import these modules of SGLang; returns what has been stood in for so far."""
    finder = standins.install()
    finder.importing = True
    try:
        with quiet_import(), _first_on_path(root), _gone_names() as used:
            for name in names:
                importlib.import_module(name)
    finally:
        finder.importing = False
        finder.withdraw()
    return finder.stood_in | used


@contextlib.contextmanager
def _gone_names() -> Iterator[set[str]]:
    """Answer for the names that Triton no longer has, during the imports alone; yields those asked for."""
    used: set[str] = set()
    # Triton is not made for every system; SGLang has its own answer to that.
    names = _GONE_FROM_TRITON if importlib.util.find_spec("triton") is not None else {}
    modules = [importlib.import_module(name) for name in names]
    for module in modules:
        module.__getattr__ = functools.partial(_gone_name, module.__name__, used)  # type: ignore[method-assign]
    try:
        yield used
    finally:
        for module in modules:
            del module.__getattr__


def _gone_name(module_name: str, used: set[str], name: str) -> type[Any]:
    if name not in _GONE_FROM_TRITON[module_name]:
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
    used.add(f"{module_name}.{name}")
    return standins.stand_in_class(module_name, name)


@contextlib.contextmanager
def _first_on_path(root: Path) -> Iterator[None]:
    """`root` first on `sys.path`; once the package is imported its own path finds its modules."""
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))


def _forget_sglang() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def _explained(spec: str, root: Path, error: BaseException) -> SglangUnavailable:
    """`error` as one line: the cause, its place in SGLang, and the remedy where there is one."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(root / "sglang"):
            place = f" at {path.relative_to(root)}:{frame.lineno}"
    message = " ".join(str(error).split())
    cause = f"{spec} cannot be loaded from {root}: {type(error).__name__}{place}: {message:.300}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        if top in LIGHT:
            return SglangUnavailable(f'{cause}; run: pip install "kvproof[sglang]"')
        if top != "sglang":
            return SglangUnavailable(f"{cause}; install {top}, or choose another release")
    return SglangUnavailable(cause)


def _collect(spec: str, root: Path, layout: Layout, stood_in: set[str]) -> LoadedSglang:
    package = sys.modules["sglang"]
    place = Path(str(package.__file__)).resolve().parent.parent
    if place != root:
        raise SglangUnavailable(f"{spec} should come from {root}, but Python imported sglang from {place}")
    token_module = sys.modules[layout.token_module]
    paged_module = sys.modules[layout.paged_module]
    paged_class = paged_module.PagedTokenToKVPoolAllocator
    return LoadedSglang(
        spec=spec,
        version=str(package.__version__),
        root=root,
        layout=layout,
        token_module=token_module,
        paged_module=paged_module,
        token_class=token_module.TokenToKVPoolAllocator,
        paged_class=paged_class,
        kernels=_named(paged_module, ("alloc_extend_kernel", "alloc_decode_kernel")),
        naive=_named(paged_module, ("alloc_extend_naive", "alloc_decode_naive")),
        # Set in the constructor, so the class itself does not have it; the compiled constructor names it.
        has_naive_path="use_triton_kernels" in paged_class.__init__.__code__.co_names,
        stood_in=stood_in,
        offers=kinds_of(root / "sglang"),
    )


def _named(module: ModuleType, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names if hasattr(module, name)}
