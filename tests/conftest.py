from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from samebits import backends
from samebits.backends.cuda import (
    attention_sm90,
    compiler,
    devices,
    linear_logp_sm90,
    logp,
    matmul,
    runtime,
    tensor_maps,
)

# Examples are drawn from a fixed seed, so that a red run stays red; deadlines would time the first compile.
settings.register_profile("samebits", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("samebits")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=("cuda", "triton"), help="what computes the operations on GPU tensors"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The option holds for every thread and leaves CPU tensors alone, so it is no `use_backend`."""
    if config.getoption("--backend"):
        backends.AUTOMATIC = (config.getoption("--backend"),)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, tests marked ``gpu`` are skipped, with the reason."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    status = devices.status() if marked else None
    if status is not None and not status.available:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {status.reason}"))


@pytest.fixture(autouse=True)
def _cuda_context(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test that breaks the process's CUDA context is named, and those after it are not blamed for it."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"an earlier test broke the CUDA context: {error}")
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.fail(f"this test broke the CUDA context: {error}")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors pass for those of an H200: everything of a launch but the launch, which is noted."""
    found: list[str] = []

    class Kernel:
        def __init__(self, spec: compiler.KernelSpec) -> None:
            self.spec = spec

        def launch(self, grid: tuple[int, int, int], *values: Any) -> None:
            assert min(grid) > 0
            assert grid[0] % self.spec.cluster[0] == 0
            struct.pack("@" + self.spec.params, *values)
            found.append(self.spec.source)

    def tensor_map(
        address: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int = 128,
        l2_promotion: int = 256,
    ) -> bytes:
        # What the driver asks of a tensor map.
        assert len(shape) == len(box) == len(strides) + 1 <= 5
        assert all(s % 16 == 0 for s in (address, *strides))
        assert all(0 < n <= 256 for n in box)
        assert min(shape) > 0
        assert swizzle == 0 or box[0] * dtype.itemsize <= swizzle
        assert box[0] * dtype.itemsize % 16 == 0
        assert l2_promotion in (0, 64, 128, 256)
        return bytes(128)

    info = devices.DeviceInfo(-1, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
    monkeypatch.setattr(devices, "device_info", lambda index: info)
    monkeypatch.setattr(runtime, "load", lambda spec, device: Kernel(spec))
    monkeypatch.setattr(tensor_maps, "tensor_map", tensor_map)
    monkeypatch.setattr(runtime, "empty_matrix", lambda m, n, dtype, device: torch.empty((m, n), dtype=dtype))
    monkeypatch.setattr(matmul, "_plans", {})
    linear_logp_sm90._prepared.cache_clear()
    logp._kernel.cache_clear()
    attention_sm90._prepared.cache_clear()
    return found
