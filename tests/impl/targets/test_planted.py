"""The planted faults as data, the copies they are made in, and the targets that offer them.

Not covered here: whether the faults are found (`tests/properties/test_controls.py`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof.impl.paged import PagedTokenToKVPoolAllocator
from kvproof.impl.targets.planted.catalogue import DEADLY, PLANTS
from kvproof.impl.targets.planted.copy import faulty, load_copy, sources
from kvproof.impl.targets.planted.plant import Plant
from kvproof.impl.targets.planted.target import Canary, Planted, plant_named
from kvproof.impl.targets.protocol import Ticket
from kvproof.model import ops
from kvproof.model.calls import AllocCall, ClearCall, ExtendCall, FreeCall, GroupBeginCall
from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, Config
from kvproof.model.errors import InfrastructureError, UserError
from kvproof.properties.catalogue import PROPERTIES

by_id = pytest.mark.parametrize("plant", PLANTS + DEADLY, ids=lambda plant: plant.id)


@by_id
def test_the_text_to_replace_occurs_exactly_once(plant: Plant) -> None:
    """A change of `impl/` that would disarm a plant fails here, under the plant's name."""
    assert sources()[plant.file].count(plant.old) == 1


@by_id
def test_a_plant_changes_its_file_and_no_other(plant: Plant) -> None:
    """One fault, one place."""
    before, after = sources(), faulty(plant)
    assert [file for file in before if before[file] != after[file]] == [plant.file]
    assert before.keys() == after.keys()


@by_id
def test_a_plant_is_described_in_known_terms(plant: Plant) -> None:
    """Ids that a shell needs no quotes for, one sentence, and names that exist."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", plant.id)
    assert plant.fault.endswith(".")
    assert plant.caught_by
    assert {entry.id for entry in PROPERTIES if entry.asked != "later"} >= set(plant.caught_by)
    assert plant.allocator in ALLOCATORS
    # A kernel's faults are the kernel path's; a launch that should not be is one of the allocator's file.
    assert plant.path == "kernels" or not plant.file.endswith("kernels.py")
    assert plant.deadly in ("", "crash", "hang", "memory", "exit")


def test_the_catalogue_is_broad() -> None:
    """No two faults the same, in every file that decides or computes, by every property that can see one."""
    assert len({plant.id for plant in PLANTS}) == len(PLANTS)
    assert len({(plant.file, plant.old, plant.new, plant.allocator) for plant in PLANTS}) == len(PLANTS)
    files = Counter(plant.file for plant in PLANTS)
    assert files.keys() == sources().keys() - {"__init__.py", "errors.py"}
    assert min(count for file, count in files.items() if file.endswith("kernels.py")) >= 6
    caught_by = {property_id for plant in PLANTS for property_id in plant.caught_by}
    assert caught_by >= {entry.id for entry in PROPERTIES if entry.asked in ("step", "both")}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_kind_of_allocator_has_its_faults(allocator: str) -> None:
    """At least six of each, some in its own kernels where it has any, and a misuse; fewer of token."""
    plants = [plant for plant in PLANTS if plant.allocator == allocator]
    assert len(plants) >= (6 if allocator != "token" else 4)
    files = {plant.file for plant in plants}
    kernels = {
        "paged": {"kernels.py"},
        "swa": {"swa_kernels.py"},
        "hisparse": {"swa_kernels.py"},
        "hisparse-v4": {"swa_kernels.py", "hisparse_kernels.py"},
        "page-interleave": {"interleave_kernels.py"},
    }
    assert kernels.get(allocator, set()) <= files
    assert allocator == "token" or any(plant.misuse for plant in plants)


def test_deadly_plants_are_kept_apart() -> None:
    """Nobody who goes through PLANTS in one process meets one, and every kind of death is there."""
    assert not [plant.id for plant in PLANTS if plant.deadly]
    assert {plant.deadly for plant in DEADLY} == {"crash", "hang", "memory", "exit"}
    assert not {plant.id for plant in PLANTS} & {plant.id for plant in DEADLY}


GROW = "ExtendCall([0], [4], [-1], 4, 1)"
DEATHS = {
    "decode-crashes": (f"{GROW}, DecodeCall([5], [7])", -signal.SIGSEGV),
    "group-end-aborts": (
        f"{GROW}, GroupBeginCall(), FreeCall([4, 5, 6, 7]), GroupEndCall()",
        -signal.SIGABRT,
    ),
    "last-page-hangs": ("ExtendCall([0], [13], [-1], 13, 4)", None),
    "release-grows": (f"{GROW}, FreeCall([4, 5, 6, 7])", 0),
    "batch-exits": (f"{GROW}, ExtendCall([0, 0], [1, 1], [-1, -1], 2, 2)", 7),
    "kernel-hangs": (f"{GROW}, ExtendCall([0], [8], [-1], 8, 2)", None),
}
DIE = """
import sys
from pathlib import Path
from kvproof.impl.targets.planted.target import Planted
from kvproof.impl.targets.protocol import Ticket
from kvproof.model.calls import *
from kvproof.model.config import Config
subject = Planted(Ticket(":" + sys.argv[1])).build(Config("paged", 16, 4))
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
for call in [{calls}]:
    before = resident()
    print(type(call).__name__, flush=True)
    assert subject.apply(call).error is None
print((resident() - before) * 4 // 1024, "MiB")
"""


def test_every_deadly_plant_is_tried() -> None:
    """Below."""
    assert DEATHS.keys() == {plant.id for plant in DEADLY}


@pytest.mark.parametrize("plant_id", DEATHS)
def test_a_deadly_plant_ends_its_process_at_its_call_and_not_before(plant_id: str) -> None:
    """Lawful calls, the last of which is the end; where nothing happens any more, a while shows it."""
    made, status = DEATHS[plant_id]
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", DIE.format(calls=made), plant_id],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        names = re.findall(r"(\w+)\(", made)
        assert [process.stdout.readline().strip() for _ in names] == names
        try:
            ended = process.wait(30 if status is not None else 2)
        except subprocess.TimeoutExpired:
            process.kill()
            ended = None
        said = process.stdout.read()
    assert ended == status
    if plant_named(plant_id).deadly == "memory":
        assert int(said.split()[0]) >= 60


def test_a_plant_that_no_longer_fits_says_so() -> None:
    """The error names plant, file and how often the text was found."""
    for old, found in (("no such text", 0), ("self", None)):
        gone = replace(PLANTS[0], old=old)
        with pytest.raises(InfrastructureError, match=rf"{gone.id} .*impl/{gone.file}.*occurs {found or ''}"):
            load_copy(gone)


def test_copies_share_nothing() -> None:
    """Classes and modules of a copy are its own, and all that they import of our package is in the copy."""
    one, two = load_copy(None), load_copy(None)
    assert one.keys() == two.keys() == set(ALLOCATORS)
    assert len({one["paged"], two["paged"], PagedTokenToKVPoolAllocator}) == 3
    package = one["paged"].__module__.partition(".")[0]
    assert one["token"].__module__ == f"{package}.token"
    for cls in one.values():
        assert all(base.__module__.startswith((package, "abc", "builtins")) for base in cls.__mro__)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            origins = {getattr(value, "__module__", "") for value in vars(module).values()}
            assert not [origin for origin in origins if origin.startswith("kvproof.")]


def test_a_copy_without_fault_is_the_source_itself() -> None:
    """Nothing but the package's name differs."""
    module = sys.modules[load_copy(None)["paged"].__module__]
    package = module.__name__.partition(".")[0]
    with open(str(module.__file__), encoding="utf-8") as copied:
        assert copied.read().replace(package, "kvproof.impl") == sources()["paged.py"]


def test_copies_are_gone_when_the_process_ends() -> None:
    """Nothing is left in the folder for temporary files."""
    code = (
        "import os, sys\n"
        "from kvproof.impl.targets.planted.copy import load_copy\n"
        "file = sys.modules[load_copy(None)['paged'].__module__].__file__\n"
        "print(file, os.path.exists(file), os.path.exists(os.path.dirname(os.path.dirname(file))))\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    file, *existed = run.stdout.split()
    assert existed == ["True", "True"]
    assert not Path(file).parent.parent.exists()


def test_a_planted_target_differs_from_ours_by_its_fault() -> None:
    """`padding-page-free` hands out page 0 first; the copy without a fault starts with page 1, as §4 says."""
    extend = ExtendCall([0], [5], [-1], 5, 2)
    config = Config("paged", 16, 4)
    clean = Planted(Ticket(":none")).build(config).apply(extend)
    faulty = Planted(Ticket(":padding-page-free")).build(config).apply(extend)
    assert (clean.slots, clean.available) == ([4, 5, 6, 7, 8], 8)
    assert (faulty.slots, faulty.available) == ([0, 1, 2, 3, 4], 8)


def test_a_planted_target_introduces_itself() -> None:
    """Name and path are the plant's; only a fault that takes legal pages is held to the contract alone."""
    target = Planted(Ticket(":order-of-birth"))
    assert (target.name, target.release, target.path) == ("planted:order-of-birth",) * 2 + ("torch",)
    assert not target.capabilities.exact
    assert target.other_path() is None
    assert Planted(Ticket(":last-page-lost")).capabilities.exact


def test_unknown_plants_are_refused_with_the_known_ones() -> None:
    """The user is told what to write."""
    with pytest.raises(UserError, match=r"no planted fault 'nonsense'; known: none, padding-page-free, "):
        Planted(Ticket(":nonsense"))
    assert plant_named("free-repeats").file == "paged.py"


@pytest.mark.parametrize(
    ("plant_id", "path", "only"),
    [
        ("page-before", "kernels", "torch"),
        ("swa-head-mapped", "kernels", "torch"),
        ("v4-last-block-rounded-up", "kernels", "torch"),
        ("kernel-writes-on", "torch", "kernels"),
        ("kernel-swa-maps-on", "torch", "kernels"),
        ("kernel-refuses-late", "torch", "kernels"),
    ],
)
def test_a_fault_is_not_looked_for_where_it_never_runs(plant_id: str, path: str, only: str) -> None:
    """A fault of the kernels by the torch path, or the reverse, would be a silent pass."""
    with pytest.raises(UserError, match=f"is a fault of the {only} path; use --path {only}"):
        Planted(Ticket(f":{plant_id}", path))


def test_kernel_plants_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without it there is nothing to run."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="TRITON_INTERPRET=1"):
        Planted(Ticket(":kernel-writes-on"))


CONFIGS = (
    Config("token", 8, 1),
    Config("paged", 8, 1),
    Config("swa", 8, 1, swa_size=8),
    Config("swa-ring", 16, 2, ring=3, request_rows=2),
    Config("pure-swa", 8, 1),
    Config("hisparse", 8, 1, ratio=2),
    Config("hisparse-v4", 32, 4, swa_size=32, device_size=8),
    Config("mamba", 8, 1),
    Config("page-interleave", 8, 1, shards=2),
)


def test_every_kind_has_a_config_here() -> None:
    """For the canary below."""
    assert tuple(config.allocator for config in CONFIGS) == ALLOCATORS


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.allocator)
def test_the_canary_never_tells_the_truth(config: Config) -> None:
    """Whatever the call, `available_size()` is one slot too many; the rest of the answer is right."""
    model, subject = model_for(config), Canary(Ticket()).build(config)
    called = set()
    grow = ops.Extend(((-1, 4),))
    refused = (ops.Extend(((-1, 4000),)), ops.Alloc(100))
    for op in (grow, ops.Alloc(2), *refused, ops.GroupBegin(), ops.Free((0,)), ops.Clear()):
        expectation = model.apply(op)
        subject.expect(expectation, model)
        answer = subject.apply(expectation.call)
        called.add(type(expectation.call))
        assert answer.available == expectation.available + 1
        assert answer.slots == expectation.slots
        assert answer.peers == expectation.peers
        assert answer.bases == expectation.bases
        state = subject.observe()
        assert (state.free, state.mappings) == (model.free_pages, model.mappings)
    assert {FreeCall, ClearCall} <= called
    assert called & {AllocCall, ExtendCall}
    assert GroupBeginCall in called or config.allocator == "mamba"
