"""The watch of hidden cost: with CUDA and Triton played here, and, where there is a GPU, the real ones.

What counts as too dear is said in `kvproof.impl.targets.instruments`, and tested with it.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import jit as jit_module

from kvproof.impl.instruments import cost
from kvproof.impl.instruments.cost import FRAMES_MAX, Account, CostWatch, Warmth

SYNC = "called a synchronizing CUDA operation (Triggered internally at somewhere.cpp:150.)"


@triton.jit
def scaled_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0), mask=at < n)


class Cuda:
    """CUDA and Triton as far as the watch knows them. mode: of sync debugging. lost: every wait fails."""

    def __init__(self) -> None:
        self.mode = 0
        self.told = False
        self.waits = 0
        self.lost = False

    def set_mode(self, mode: int) -> None:
        self.mode = mode
        if mode and not self.told:
            self.told = True
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    def synchronize(self) -> None:
        self.waits += 1
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def item(self) -> None:
        """As `Tensor.item`: warns when torch is told to."""
        if self.mode:
            warnings.warn(SYNC, UserWarning, stacklevel=2)

    def run(self, kernel, *args, grid, warmup, **_kwargs):
        """As `JITFunction.run`: the variant that serves these arguments."""
        if kernel.faults:
            self.lost = True
        return kernel.variants.setdefault(args, _Variant())


class _Variant:
    """A compiled kernel."""


class Kernel(jit_module.JITFunction):
    """A kernel that Triton would launch. Each combination of arguments has a variant of its own."""

    def __init__(self, name: str, *, faults: bool = False) -> None:
        self.fn = lambda: None
        self.fn.__name__ = name
        self.arg_names = ["n", "page_size"]
        self.variants: dict[tuple[object, ...], _Variant] = {}
        self.faults = faults


@pytest.fixture
def cuda(monkeypatch):
    played = Cuda()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", played.set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", played.synchronize)
    monkeypatch.setattr(cost, "_settle_device", played.synchronize)
    monkeypatch.setattr(
        jit_module.JITFunction, "run", lambda kernel, *args, **kwargs: played.run(kernel, *args, **kwargs)
    )
    return played


@pytest.fixture
def watch(cuda):
    watch = CostWatch("cuda")
    watch.install()  # what torch says of its mode would be an error here
    assert cuda.told
    yield watch
    watch.uninstall()


# --- waits ------------------------------------------------------------------------------------------


def inner(cuda):
    cuda.item()  # the line


def outer(cuda):
    inner(cuda)


def test_a_wait_is_heard_with_its_stack(watch, cuda):
    with watch.call() as account:
        assert cuda.mode == 1
        outer(cuda)
    assert cuda.mode == 0
    (stack,) = account.syncs
    line = inner.__code__.co_firstlineno + 1
    frames = stack.split(" < ")
    assert frames[1:3] == [f"test_cost.py:{line} in inner", f"test_cost.py:{line + 4} in outer"]
    # `item` is the play's own; this test made the call, and is no target.
    assert [frame.rsplit(" in ", 1)[1] for frame in frames] == ["item", "inner", "outer"]


def test_a_stack_ends_after_a_few_frames(watch, cuda):
    def deep(levels):
        return deep(levels - 1) if levels else cuda.item()

    with watch.call() as account:
        deep(20)
    assert len(account.syncs[0].split(" < ")) == FRAMES_MAX


def test_every_wait_counts_however_often_the_line_was_reached(watch, cuda):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch.call() as account:
            for _ in range(3):
                cuda.item()
    assert len(account.syncs) == 3


def test_other_warnings_go_where_they_went(watch):
    with pytest.warns(DeprecationWarning, match="old") as caught, watch.call() as account:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert len(caught) == 1
    assert account.syncs == []
    with pytest.raises(UserWarning, match="an error here"), watch.call():
        warnings.warn("an error here", UserWarning, stacklevel=1)


def test_an_explicit_wait_counts_too_and_waits(watch, cuda):
    synchronize = torch.cuda.synchronize
    with watch.call() as account:
        torch.cuda.synchronize()
    assert (len(account.syncs), cuda.waits) == (1, 1)
    assert torch.cuda.synchronize is synchronize


def test_without_syncs_nothing_is_listened_for(watch, cuda):
    with watch.call(syncs=False) as account:
        assert cuda.mode == 0
        cuda.item()
        torch.cuda.synchronize()
    assert account.syncs == []


def test_what_a_call_raises_goes_through_and_all_is_put_back(watch, cuda):
    show, filters, synchronize = warnings.showwarning, list(warnings.filters), torch.cuda.synchronize
    with pytest.raises(KeyError), watch.call():
        raise KeyError("x")
    assert (warnings.showwarning, list(warnings.filters)) == (show, filters)
    assert (torch.cuda.synchronize, cuda.mode) == (synchronize, 0)


# --- compilations -----------------------------------------------------------------------------------


def compiled_by(watch, warmth, kernel, *arguments, batch=1):
    """(kernel, again) for each new variant of a call that launches the kernel with these arguments."""
    with watch.call(warmth, batch=batch) as account:
        for argument in arguments:
            kernel[(1,)](argument)
    return [(one.kernel, one.again) for one in account.compiled]


def test_a_variant_behind_the_first_call_is_a_recompilation(watch):
    warmth, kernel = Warmth(), Kernel("k")
    assert compiled_by(watch, warmth, kernel, "a") == [("k", False)]
    assert compiled_by(watch, warmth, kernel, "a") == []
    assert compiled_by(watch, warmth, kernel, "b") == [("k", True)]
    assert compiled_by(watch, warmth, kernel, "b", "a") == []


def test_the_first_call_may_compile_more_than_once(watch):
    assert compiled_by(watch, Warmth(), Kernel("k"), "a", "b", "a") == [("k", False)] * 2


def test_larger_batches_may_have_a_variant_of_their_own(watch):
    """To the next power of two: 3 and 4 rows are one class, 5 to 8 the next."""
    warmth, kernel = Warmth(), Kernel("k")
    assert compiled_by(watch, warmth, kernel, 4, batch=3) == [("k", False)]
    assert compiled_by(watch, warmth, kernel, 8, batch=5) == [("k", False)]
    assert compiled_by(watch, warmth, kernel, 0, batch=0) == [("k", False)]
    assert compiled_by(watch, warmth, kernel, 1, batch=1) == [("k", False)]
    assert compiled_by(watch, warmth, kernel, 2, batch=2) == [("k", False)]
    assert compiled_by(watch, warmth, kernel, "other", batch=4) == [("k", True)]
    assert compiled_by(watch, warmth, kernel, "another", batch=8) == [("k", True)]


def test_kernels_and_allocators_are_told_apart(watch):
    """Two kernels of one name, and a second allocator in the process, which starts cold."""
    warmth, one, two = Warmth(), Kernel("k"), Kernel("k")
    assert compiled_by(watch, warmth, one, "a") == [("k", False)]
    assert compiled_by(watch, warmth, two, "b") == [("k", False)]
    assert compiled_by(watch, Warmth(), one, "b") == [("k", False)]
    assert compiled_by(watch, warmth, one, "b") == [("k", True)]


def test_what_was_launched_outside_calls_is_nobodys(watch):
    """A constructor's launches neither count nor warm up."""
    warmth, kernel = Warmth(), Kernel("k")
    kernel[(1,)]("a")
    assert compiled_by(watch, warmth, kernel, "b") == [("k", False)]


def test_a_compilation_has_the_stack_of_its_launch(watch):
    def launch(kernel):
        kernel[(1,)]("a")

    with watch.call() as account:
        launch(Kernel("k"))
    (one,) = account.compiled
    assert one.stack == f"test_cost.py:{launch.__code__.co_firstlineno + 1} in launch"


def test_launches_are_counted_and_warm_ups_are_not(watch):
    kernel = Kernel("k")
    with watch.call() as account:
        kernel.run("a", grid=(1,), warmup=True)
        for _ in range(3):
            kernel[(1,)]("a")
    assert (account.launches, len(account.compiled)) == (3, 1)
    assert watch.account is account
    with watch.call() as account:
        pass
    assert (account.launches, watch.account) == (0, account)


# --- where a device is lost ---------------------------------------------------------------------------


@pytest.fixture
def attributing(cuda):
    watch = CostWatch("cuda", attribute=True)
    watch.install()
    yield watch
    watch.uninstall()


def test_a_fault_is_the_kernels_behind_which_it_shows(attributing, cuda):
    good, bad = Kernel("good"), Kernel("bad", faults=True)
    with attributing.call(syncs=False) as account:
        good[(1,)]("a")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            bad[(1,)]("a")
    assert account.lost_in == "bad"


def test_a_fault_that_was_there_before_the_launch_is_torchs(attributing, cuda):
    kernel = Kernel("k")
    with attributing.call(syncs=False) as account:
        cuda.lost = True
        with pytest.raises(RuntimeError, match="illegal memory access"):
            kernel[(1,)]("a")
    assert account.lost_in == "torch"


def test_the_harness_waits_on_its_own_account(attributing, cuda):
    with attributing.call() as account:
        Kernel("k")[(1,)]("a")
    assert (account.syncs, cuda.waits, account.lost_in) == ([], 2, "")


# --- coming and going -------------------------------------------------------------------------------


def test_uninstalling_puts_triton_back(cuda):
    run = jit_module.JITFunction.run
    watch = CostWatch("cuda")
    watch.install()
    assert jit_module.JITFunction.run is not run
    watch.uninstall()
    watch.uninstall()
    assert jit_module.JITFunction.run is run


def test_on_a_cpu_nothing_is_touched():
    run, show = jit_module.JITFunction.run, warnings.showwarning
    watch = CostWatch("cpu")
    watch.install()
    with watch.call(Warmth(), batch=3) as account:
        assert warnings.showwarning is show
    assert jit_module.JITFunction.run is run
    assert (account.syncs, account.compiled, account.launches, account.lost_in) == ([], [], 0, "")
    assert watch.account is account
    assert isinstance(account, Account)


# --- the real things ----------------------------------------------------------------------------------


@pytest.fixture
def on_gpu():
    watch = CostWatch("cuda")
    watch.install()
    yield watch
    watch.uninstall()


@pytest.mark.gpu
def test_gpu_a_read_of_the_device_is_heard(on_gpu):
    values = torch.arange(8, device="cuda")

    def peeks():
        return values.sum().item()

    with on_gpu.call() as account:
        assert peeks() == 28
    line = peeks.__code__.co_firstlineno + 1
    assert account.syncs == [f"test_cost.py:{line} in peeks"]
    with on_gpu.call() as account:
        values.unique()
        torch.tensor([1, 2], device="cuda")
        torch.cuda.synchronize()
    assert len(account.syncs) >= 3


@pytest.mark.gpu
def test_gpu_what_does_not_wait_is_silent(on_gpu):
    values = torch.arange(1000, device="cuda")
    with on_gpu.call() as account:
        torch.cat((values, values[3:5])).sort()
        torch.empty(5, device="cuda")
        torch.arange(7, device="cuda")
        torch.repeat_interleave(values, output_size=499500)
    assert account.syncs == []


@pytest.mark.gpu
def test_gpu_a_length_that_is_specialised_on_recompiles(on_gpu):
    warmth, x, out = (
        Warmth(),
        torch.arange(64, device="cuda"),
        torch.zeros(64, dtype=torch.int64, device="cuda"),
    )

    def launched(n, start=0):
        with on_gpu.call(warmth, batch=2) as account:
            scaled_kernel[(1,)](x[start:], out, n, BLOCK=64)
        return [(one.kernel, one.again) for one in account.compiled], account.launches

    assert launched(1) == ([("scaled_kernel", False)], 1)
    assert launched(1) == ([], 1)
    assert launched(16) == ([("scaled_kernel", True)], 1)
    assert launched(17) == ([("scaled_kernel", True)], 1)
    assert launched(16, start=1) == ([("scaled_kernel", True)], 1)
    assert launched(32) == ([], 1)
    assert launched(33) == ([], 1)


@pytest.mark.gpu
def test_gpu_a_faultless_call_is_attributed_to_nobody():
    watch = CostWatch("cuda", attribute=True)
    watch.install()
    try:
        x = torch.arange(64, device="cuda")
        with watch.call() as account:
            scaled_kernel[(1,)](x, torch.zeros_like(x), 64, BLOCK=64)
    finally:
        watch.uninstall()
    assert (account.lost_in, account.syncs, account.launches) == ("", [], 1)
