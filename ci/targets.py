"""`kvproof targets`: which targets there are, which SGLang releases load here, what was stood in for them."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvproof.ci.process import Seat, Worker
from kvproof.impl.targets.registry import known_targets
from kvproof.impl.targets.sglang import fetch
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.releases import SUPPORTED
from kvproof.model.config import ALLOCATORS
from kvproof.model.errors import KvproofError
from kvproof.properties.lanes import lane_for


@dataclass(frozen=True, slots=True)
class Release:
    """One SGLang release as seen on this machine. state: "loads", "not fetched" or why it does not load.
    allocators: the kinds it has. lacks: calls that its paged allocator does not have."""

    name: str
    state: str
    torch_path: bool = False
    allocators: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    stood_in: tuple[str, ...] = ()


def show_targets(*, fetch_all: bool, as_json: bool) -> int:
    """List targets and releases; 3 when a release that is here does not load."""
    releases = []
    if not as_json:
        for name, entry in known_targets().items():
            print(f"{name:<22} {entry.value}")
    for release in _releases(fetch_all=fetch_all):
        releases.append(release)
        if not as_json:
            print(_line(release))
    if as_json:
        entries = {name: entry.value for name, entry in known_targets().items()}
        print(msgspec.json.encode({"targets": entries, "sglang": releases}).decode())
    elif any(release.state == "not fetched" for release in releases):
        print("fetch and load every supported release with `kvproof targets --fetch`")
    return 3 if any(release.state not in ("loads", "not fetched") for release in releases) else 0


def _releases(*, fetch_all: bool) -> Iterator[Release]:
    for number in SUPPORTED:
        name = f"sglang=={number}"
        try:
            if fetch_all:
                fetch.fetch(number)
            if fetch.cached(number) is None:
                yield Release(name, "not fetched")
                continue
            seat = Seat(allocators=ALLOCATORS)
            with Worker(name, lane_for("seeded", device="cpu"), seat) as worker:
                ready = worker.ready
            able = ready.capabilities
            lacks = tuple(sorted(able.lacking("paged")))
            yield Release(name, "loads", ready.path == "torch", able.allocators, lacks, ready.stood_in)
        except (KvproofError, SglangUnavailable) as error:
            yield Release(name, str(error))


def _line(release: Release) -> str:
    if release.state != "loads":
        return f"{release.name:<22} {release.state}"
    parts = ["torch path and kernels" if release.torch_path else "kernels"]
    parts.append(f"has {', '.join(release.allocators)}")
    if release.lacks:
        parts.append(f"no {', '.join(release.lacks)}")
    parts.append(f"stood in: {', '.join(release.stood_in) or 'nothing'}")
    return f"{release.name:<22} loads; " + "; ".join(parts)
