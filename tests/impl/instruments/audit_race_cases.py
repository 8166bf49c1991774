"""Kernels whose programs get in each other's way, or seem to: aliases, atomics, grids, several launches.

Not run by itself: `audit_cases.py` imports it for its cases.
"""

from __future__ import annotations

from audit_registry import case, ints, output

import torch  # isort: skip - the registry comes first
import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def fill_kernel(x, value):
    tl.store(x + tl.program_id(0), value)


@case
def launches_are_ordered():
    """What one launch wrote, the next may read and overwrite."""
    out = output(3)
    fill_kernel[(3,)](out, 1)
    fill_kernel[(3,)](out, 2)
    add_kernel[(3,)](out, torch.zeros(3, dtype=torch.int64))
    return out


@triton.jit
def add_kernel(x, y):
    pid = tl.program_id(0)
    tl.store(y + pid, tl.load(x + pid) + 1)


@case
def an_alias_within_one_program():
    """Each program reads through one argument what it overwrites through the other."""
    values = ints(1, 2, 3, 4)
    add_kernel[(3,)](values[:3], values[0:])
    return values


@triton.jit
def through_two_arguments_kernel(x, y):
    pid = tl.program_id(0)
    tl.store(x + pid, 1)
    tl.store(y + pid, 2)


@case
def written_twice_through_an_alias():
    values = torch.zeros(3, dtype=torch.int64)
    through_two_arguments_kernel[(1,)](values[1:], values[1:2])
    return values


@case
def a_neighbour_through_an_alias():
    values = torch.zeros(3, dtype=torch.int64)
    through_two_arguments_kernel[(2,)](values[1:], values)
    return values


@triton.jit
def everywhere_kernel(x):
    tl.store(x, tl.program_id(0) * 100 + tl.program_id(1) * 10 + tl.program_id(2))


@case
def programs_of_a_grid_of_three_axes():
    x = torch.zeros(1, dtype=torch.int64)
    everywhere_kernel[(1, 2, 2)](x)
    return x


@triton.jit
def count_then_store_kernel(counter):
    tl.atomic_add(counter, 1)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(counter, 0)


@case
def atomics_overwritten():
    counter = torch.zeros(1, dtype=torch.int64)
    count_then_store_kernel[(3,)](counter)
    return counter


@triton.jit
def read_then_count_kernel(counter, out):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(out, tl.load(counter))
    tl.atomic_add(counter, 1)


@case
def read_before_others_atomics():
    counter, out = torch.zeros(1, dtype=torch.int64), output(1)
    read_then_count_kernel[(2,)](counter, out)
    return counter


@triton.jit
def store_then_count_kernel(counter):
    if tl.program_id(0) == 0:
        tl.store(counter, 5)
    tl.atomic_add(counter, 1)


@case
def stored_before_others_atomics():
    counter = torch.zeros(1, dtype=torch.int64)
    store_then_count_kernel[(2,)](counter)
    return counter


@case
def one_element_expanded():
    """All of its elements are the same one, of which two programs write."""
    values = torch.zeros(1, dtype=torch.int64)
    expanded_kernel[(2,)](values.expand(4), 0)
    return values


@triton.jit
def expanded_kernel(x, stride):
    tl.store(x + tl.program_id(0) * stride, tl.program_id(0))
