"""The CUDA devices: the properties that schedules use, and whether CUDA kernels run on them."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch

from samebits.backends import UnavailableError
from samebits.backends.arch import OLDEST, Arch, arch_of
from samebits.backends.cuda import driver
from samebits.backends.cuda.compiler import CompileError, nvrtc_version, require_compiler
from samebits.remedies import see

__all__ = ["DeviceInfo", "Status", "describe", "device_info", "require", "status"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The properties of a GPU that schedules use."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    max_smem: int
    """Bytes of dynamic shared memory that one block may use."""
    l2_bytes: int
    memory_rate: float = 0
    """Bytes that memory moves in a microsecond at most; 0 if it is not known."""

    @property
    def arch(self) -> Arch:
        """What GPUs of this family can do."""
        return arch_of(self.capability)


@dataclass(frozen=True, slots=True)
class Status:
    """Whether CUDA kernels can run here. If not: why, and what to do."""

    available: bool
    reason: str
    remedy: str
    cuda_core: str | None
    nvrtc: str | None
    torch_cuda: str | None
    devices: tuple[DeviceInfo, ...]


_described: list[DeviceInfo] = []


def describe(name: str, capability: tuple[int, int], sm_count: int, max_smem: int) -> int:
    """An index below 0 for a GPU that is not here: schedules can be chosen for it, and nothing else."""
    index = -1 - len(_described)
    _described.append(DeviceInfo(index, name, capability, sm_count, max_smem, 0))
    return index


@functools.cache
def device_info(index: int) -> DeviceInfo:
    """Properties of the CUDA device ``index``, or of one that was described."""
    if index < 0:
        return _described[-1 - index]
    p: Any = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        index,
        p.name,
        (p.major, p.minor),
        p.multi_processor_count,
        p.shared_memory_per_block_optin,
        p.L2_cache_size,
        driver.memory_rate(index) if torch.version.cuda else 0,
    )


def status() -> Status:
    """The status that ``samebits info`` shows for the CUDA backend. Never raises."""
    reason, remedy = "", ""
    devices: tuple[DeviceInfo, ...] = ()
    core, nvrtc = _installed("cuda-core"), None
    if core is not None:
        try:
            nvrtc = nvrtc_version()
        except (UnavailableError, CompileError) as error:
            reason, _, remedy = str(error).partition(" — ")
    if torch.cuda.is_available():
        devices = tuple(device_info(i) for i in range(torch.cuda.device_count()))
    try:
        _require_gpu()  # first: without one, no package helps
        require_compiler()
        if devices and not any(d.arch.at_least(OLDEST) for d in devices):
            _require_capability(devices[0], OLDEST, "CUDA kernels need")
    except UnavailableError as error:
        reason, _, remedy = str(error).partition(" — ")
    return Status(not reason, reason, remedy, core, nvrtc, torch.version.cuda, devices)


def require(device: int, oldest: tuple[int, int] = OLDEST, who: str = "CUDA kernels need") -> None:
    """Raise UnavailableError unless CUDA kernels run on CUDA device `device`.

    Args:
        device: index of the device.
        oldest: the lowest compute capability that the kernels run on.
        who: the beginning of the message: the kernels, and a verb.
    """
    require_compiler()
    _require_gpu()
    _require_capability(device_info(device), oldest, who)


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _require_gpu() -> None:
    if torch.version.cuda is None:
        raise UnavailableError(
            f"this PyTorch ({torch.__version__}) is built without CUDA — install PyTorch's CUDA build"
            + see("no-gpu")
        )
    if not torch.cuda.is_available():
        raise UnavailableError(
            "PyTorch finds no NVIDIA GPU or no driver — check that nvidia-smi lists a GPU, and that "
            "CUDA_VISIBLE_DEVICES does not hide it" + see("no-gpu")
        )


def _require_capability(info: DeviceInfo, oldest: tuple[int, int], who: str) -> None:
    if not info.arch.at_least(oldest):
        raise UnavailableError(
            f"{info.name} is {info.arch}; samebits' {who} {arch_of(oldest)} or newer — "
            "use another GPU, or CPU tensors" + see("unsupported-gpus")
        )
