"""The arguments of one launch: every tensor becomes a pointer into a region of virtual memory.

Not here: what happens to an access (`memory`). Not covered: arguments that hold their memory otherwise than
as a torch tensor (InstrumentError).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .findings import InstrumentError
from .fresh import Fresh
from .memory import Region
from .poison import Poisoned


class _Pointer:
    """Passes for a tensor with the interpreter: an element type and an address, no memory."""

    def __init__(self, dtype: Any, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class Arguments:
    """Turns the arguments of one launch into what the interpreter computes with; owns its regions."""

    def __init__(
        self,
        module: Any,
        kernel: str,
        launch: int,
        poisoned: Callable[[torch.Tensor, str, str, int], Poisoned | None],
    ) -> None:
        self._module = module
        self._kernel = kernel
        self._launch = launch
        self._poisoned = poisoned
        self._host_copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.regions: list[Region] = []

    def convert(self, name: str, value: Any) -> Any:
        return self._module._implicit_cvt(self._virtual(name, value))

    def copy_back(self) -> None:
        """Device tensors were worked on in host copies of their storages."""
        for device, host in self._host_copies.values():
            device.copy_(host)

    def _virtual(self, name: str, value: Any) -> Any:
        """`value` with every tensor in it replaced by a `_Pointer` into a region of its own."""
        if isinstance(value, tuple):
            parts = [self._virtual(f"{name}[{i}]", part) for i, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, self._module.TensorDescriptor):
            # Made anew rather than through its constructor, whose fields differ between versions.
            descriptor = object.__new__(type(value))
            descriptor.__dict__.update(value.__dict__, base=self._virtual(name, value.base))
            return descriptor
        if not hasattr(value, "data_ptr"):
            return value
        tensor = self._module._unwrap_tensor(value)
        if not isinstance(tensor, torch.Tensor):
            raise InstrumentError(f"{self._kernel}: argument {name} is no tensor of torch: {type(value)}")
        region = self._region(name, tensor)
        return _Pointer(value.dtype, region.base)

    def _region(self, name: str, tensor: torch.Tensor) -> Region:
        extent, reachable = tensor.numel(), None
        if not tensor.is_contiguous() and extent:
            shape, strides = tuple(tensor.shape), tensor.stride()
            extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            reachable = np.zeros(extent, bool)
            np.lib.stride_tricks.as_strided(reachable, shape, strides)[...] = True
        poisoned = self._poisoned(tensor, self._kernel, name, self._launch)
        fresh = None if poisoned is None else Fresh(poisoned, tensor)
        region = Region(name, self._host_address(tensor), tensor.element_size(), extent, reachable, fresh)
        region.place(len(self.regions))
        self.regions.append(region)
        return region

    def _host_address(self, tensor: torch.Tensor) -> int:
        if tensor.device.type == "cpu":
            return tensor.data_ptr()
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self._host_copies:
            self._host_copies[start] = (storage, storage.cpu())  # type: ignore[no-untyped-call]
        return self._host_copies[start][1].data_ptr() + tensor.data_ptr() - start
