"""`kvproof targets`: what there is, what loads, and why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvproof.ci import targets, wire
from kvproof.impl.targets.protocol import Capabilities
from kvproof.impl.targets.sglang.errors import SglangUnavailable
from kvproof.impl.targets.sglang.releases import SUPPORTED
from kvproof.model.config import ALLOCATORS
from kvproof.model.errors import InfrastructureError

OLD, NEW, BROKEN = SUPPORTED[0], SUPPORTED[-1], SUPPORTED[1]


class _Worker:
    """Loads the oldest and the newest release; the second breaks."""

    def __init__(self, name, lane, seat):
        assert lane.name == "seeded"
        # Every kind is loaded, or what a kind lacks or needs would not be known.
        assert seat.allocators == ALLOCATORS
        version = name.removeprefix("sglang==")
        if version == BROKEN:
            raise InfrastructureError(f"{name} cannot be loaded: no orjson")
        capabilities = Capabilities(ALLOCATORS, lacks_of={"swa": frozenset({"Remap"})})
        if version == OLD:
            lacks = {"token": frozenset({"Resize"}), "paged": frozenset({"Resize", "FreePages"})}
            capabilities = Capabilities(("token", "paged"), lacks_of=lacks)
        stood_in = ("sgl_kernel",) if version == OLD else ()
        path = "kernels" if version == OLD else "torch"
        self.ready = wire.Ready(name, f"sglang {version}", path, capabilities, stood_in)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def machine(monkeypatch):
    """The releases that are here; `fetch` adds to them."""
    here = {OLD, NEW}
    monkeypatch.setattr(targets, "Worker", _Worker)
    monkeypatch.setattr(targets.fetch, "cached", lambda version: Path(version) if version in here else None)
    monkeypatch.setattr(targets.fetch, "fetch", here.add)
    return here


def test_targets_and_releases_are_listed(machine, capsys):
    assert targets.show_targets(fetch_all=False, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("canary", "kvproof", "null", "planted", "reference", "sglang"):
        assert any(line.startswith(f"{name} ") for line in lines)
    assert (
        f"sglang=={OLD}    loads; kernels; has token, paged; no FreePages, Resize; stood in: sgl_kernel"
        in lines
    )
    kinds = ", ".join(ALLOCATORS)
    new = f"sglang=={NEW}         loads; torch path and kernels; has {kinds}; stood in: nothing"
    assert new in lines
    assert sum(line.endswith("not fetched") for line in lines) == len(SUPPORTED) - 2
    assert lines[-1] == "fetch and load every supported release with `kvproof targets --fetch`"


def test_a_release_that_does_not_load_is_an_error_with_its_cause(machine, capsys):
    machine.add(BROKEN)
    assert targets.show_targets(fetch_all=False, as_json=False) == 3
    assert f"sglang=={BROKEN}    sglang=={BROKEN} cannot be loaded: no orjson" in capsys.readouterr().out


def test_every_release_is_fetched_on_request(machine, capsys):
    assert targets.show_targets(fetch_all=True, as_json=False) == 3
    assert machine == set(SUPPORTED)
    assert "not fetched" not in capsys.readouterr().out


def test_a_release_that_cannot_be_fetched_is_an_error_with_its_cause(machine, monkeypatch, capsys):
    def no_network(version):
        raise SglangUnavailable(f"{version}: no network")

    monkeypatch.setattr(targets.fetch, "fetch", no_network)
    assert targets.show_targets(fetch_all=True, as_json=False) == 3
    assert f"{NEW}: no network" in capsys.readouterr().out


def test_json(machine, capsys):
    machine.add(BROKEN)
    assert targets.show_targets(fetch_all=False, as_json=True) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["targets"]["null"] == "kvproof.impl.targets.null:Null"
    releases = {entry["name"]: entry for entry in report["sglang"]}
    assert list(releases) == [f"sglang=={version}" for version in SUPPORTED]
    assert releases[f"sglang=={OLD}"] == {
        "name": f"sglang=={OLD}",
        "state": "loads",
        "torch_path": False,
        "allocators": ["token", "paged"],
        "lacks": ["FreePages", "Resize"],
        "stood_in": ["sgl_kernel"],
    }
    assert releases[f"sglang=={NEW}"]["allocators"] == list(ALLOCATORS)
    assert releases[f"sglang=={NEW}"]["torch_path"] is True
