"""Hidden cost on the real device: ours has none, and dear allocators are caught in lockstep.

Not covered: what is damage and how it is called (test_instruments.py), stacks (tests/impl/instruments).
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvproof.impl.targets.instruments import process_watch
from kvproof.impl.targets.ours import Kvproof, Reference
from kvproof.impl.targets.planted.copy import faulty, load_copy
from kvproof.impl.targets.planted.plant import Plant
from kvproof.impl.targets.protocol import State, Ticket
from kvproof.impl.targets.tensors import Surface, TensorSubject
from kvproof.model import calls
from kvproof.model.config import ALLOCATORS, Config
from kvproof.properties.lease import Lease, run_lease
from kvproof.properties.space import space_for


@triton.jit
def length_kernel(out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, at.to(tl.int64) + 4, mask=at < n)


class Dear:
    """An allocator that reads the device, and whose kernel is compiled anew for a length of 1 or 16."""

    free_pages = torch.arange(4)

    def available_size(self):
        return 0

    def free_segment(self, slots, *, start_pos):
        slots.sum().item()

    def alloc(self, need):
        out = torch.empty(need, dtype=torch.int64, device="cuda")
        length_kernel[(1,)](out, need, BLOCK=64)
        return out


@pytest.mark.gpu
def test_gpu_waits_and_recompilations_are_damage():
    surface = Surface(
        lambda *_: Dear(),
        cpu_lens=True,
        page_count=False,
        lists=lambda _: State([], []),
        sync_free=frozenset({"free_segment"}),
    )
    subject = TensorSubject(surface, Config("paged", 64, 4), "cuda", process_watch(Ticket(device="cuda")))
    assert [subject.apply(calls.AllocCall(n)).damage for n in (3, 5, 3)] == [()] * 3
    (damage,) = subject.apply(calls.AllocCall(16)).damage
    assert (damage.kind, damage.where) == ("recompiled", "length_kernel")
    assert "test_costs_on_gpu.py" in damage.detail
    assert "in alloc" in damage.detail
    (damage,) = subject.apply(calls.FreeSegmentCall([4], 0)).damage
    assert (damage.kind, damage.where) == ("synchronised", "free_segment")
    assert "in free_segment" in damage.detail


@pytest.mark.gpu
@pytest.mark.parametrize("target", [Kvproof, Reference])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_gpu_ours_hides_no_cost(target, allocator):
    ours = target(Ticket(device="cuda"))
    space = space_for(ours.capabilities, allocator)
    verdict = run_lease(ours, Lease(0, 3, ours.name, "seeded", space, 1200, longest=300))
    assert [found.failure for found in verdict.found.values()] == []
    assert verdict.tally.checked > 800


WAITS = Plant(
    "decode-waits",
    "alloc_decode counts pages by the lengths on the device.",
    "paged.py",
    "self._new_pages_of_decode(seq_lens_cpu)",
    "self._new_pages_of_decode(seq_lens)",
    ("P15",),
)
SPECIALISES = Plant(
    "kernel-specialises",
    "The kernels are compiled for a length of 1, for multiples of 16 and for aligned free lists.",
    "kernels.py",
    '        "free_pages_ptr",\n        "out_ptr",\n        "num_pages",\n        "num_tokens",\n    ]',
    '        "out_ptr",\n    ]',
    ("P15",),
)


@pytest.mark.parametrize("plant", [WAITS, SPECIALISES], ids=lambda plant: plant.id)
def test_the_dear_copies_can_be_made(plant):
    faulty(plant)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("plant", "divergence"),
    [(WAITS, "synchronised alloc_decode"), (SPECIALISES, "recompiled alloc_extend_kernel")],
)
def test_gpu_a_dear_copy_of_ours_is_caught(plant, divergence):
    target = Kvproof(Ticket(path="kernels", device="cuda"))
    target.classes = load_copy(plant)
    space = space_for(target.capabilities, "paged")
    verdict = run_lease(target, Lease(0, 0, target.name, "seeded", space, 300, longest=100))
    found = {(found.failure.property_id, found.failure.divergence) for found in verdict.found.values()}
    assert found == {("P15", divergence)}
