"""Where tests run: on the CPU, and, marked ``gpu``, on the current CUDA device."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from samebits import HOPPER
from samebits.backends.arch import ARCHS, SM_90, arch_of
from samebits.backends.cuda import devices
from samebits.backends.cuda.plans import forget_plans
from samebits.testing import values

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]

# The family of the GPU here, so that CPU tensors can be asked for its bits.
ARCH = arch_of(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ARCHS[SM_90]
FAMILY = ARCH.mma or HOPPER


def case(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return values(kind, shape, dtype, seed).to(device)


@contextmanager
def multiprocessors(count: int | None) -> Iterator[None]:
    """Makes host sides of kernels believe in so many, if any are given: blocks take several tiles."""
    if count is None:
        yield
        return
    index = torch.cuda.current_device()
    here = replace(devices.device_info(index), sm_count=count)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "device_info", return_value=here))
        forget_plans()
        stack.callback(forget_plans)
        if importlib.util.find_spec("triton"):
            triton = importlib.import_module("samebits.backends.triton.runtime")
            gpu = triton.gpu(index)._replace(multiprocessors=count)
            stack.enter_context(mock.patch.object(triton, "gpu", return_value=gpu))
            planned = importlib.import_module("samebits.backends.triton.matmul")._plan
            planned.cache_clear()
            stack.callback(planned.cache_clear)
        yield
