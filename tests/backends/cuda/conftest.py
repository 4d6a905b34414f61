"""CPU tensors in place of those of an H200, up to the launch of a kernel."""

from __future__ import annotations

import functools
import inspect
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.backends.cuda import (
    compiler,
    devices,
    runtime,
    tensor_maps,
)
from samebits.backends.cuda.plans import forget_plans


class Launch(str):
    """The source of a kernel that was launched, its blocks, and the values of its parameters."""

    grid: tuple[int, int, int]
    values: tuple[Any, ...]
    spec: compiler.KernelSpec


def _without_device(allocate: Any, shape: Any, dtype: torch.dtype, device: int) -> torch.Tensor:
    found: torch.Tensor = allocate(shape, dtype=dtype)
    return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """CPU tensors pass for those of an H200: everything of a launch but the launch, which is noted."""
    found: list[Launch] = []

    class Kernel:
        def __init__(self, spec: compiler.KernelSpec) -> None:
            self.spec = spec

        def launch(self, grid: tuple[int, int, int], *values: Any) -> None:
            assert min(grid) > 0
            assert grid[0] % self.spec.cluster[0] == 0
            struct.pack("@" + self.spec.params, *values)
            launch = Launch(self.spec.source)
            launch.grid, launch.values, launch.spec = grid, values, self.spec
            found.append(launch)

    signature = inspect.signature(tensor_maps.tensor_map)

    def tensor_map(*args: Any, **more: Any) -> bytes:
        given = signature.bind(*args, **more)
        given.apply_defaults()
        x = SimpleNamespace(**given.arguments)
        # What the driver asks of a tensor map.
        assert len(x.shape) == len(x.box) == len(x.strides) + 1 <= 5
        assert all(s % 16 == 0 for s in (x.address, *x.strides))
        assert all(0 < n <= 256 for n in x.box)
        assert min(x.shape) > 0
        assert x.swizzle == 0 or x.box[0] * x.dtype.itemsize <= x.swizzle
        assert x.box[0] * x.dtype.itemsize % 16 == 0
        assert x.l2_promotion in (0, 64, 128, 256)
        return bytes(128)

    info = devices.DeviceInfo(-1, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
    monkeypatch.setattr(devices, "device_info", lambda index: info)
    monkeypatch.setattr(runtime, "load", lambda spec, device: Kernel(spec))
    monkeypatch.setattr(tensor_maps, "tensor_map", tensor_map)
    for name, allocate in (("empty", torch.empty), ("zeros", torch.zeros)):
        fake = functools.partial(_without_device, allocate)
        monkeypatch.setattr(runtime, name, fake)
    monkeypatch.setattr(runtime, "zeroed", torch.Tensor.zero_)
    forget_plans()
    yield found
    forget_plans()
