"""Attention's universal kernels at the sizes of latent attention, and packed, on a CPU: the same bits."""

from __future__ import annotations

import pytest
import torch

from samebits import FMA, TENSOR_CORE
from samebits.backends.attention import Attention
from samebits.backends.cuda import devices, matmul, runtime
from samebits.backends.cuda.attention import sm90, universal, universal_backward
from samebits.backends.reference import attention as reference
from samebits.contract import AMPERE
from samebits.testing import assert_same_bits, values
from tests.support import host_kernels

pytestmark = host_kernels.needs_compiler
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INFO = devices.DeviceInfo(-1, "a GPU", (9, 0), 132, 227 << 10, 50 << 20)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        return torch.full(tuple(shape), torch.nan, dtype=dtype)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    monkeypatch.setattr(devices, "device_info", lambda device: INFO)
    monkeypatch.setattr(matmul, "family", lambda device: AMPERE)
    monkeypatch.setattr(matmul, "check_contract", lambda contract, device: None)
    monkeypatch.setattr(runtime, "load", lambda spec, device: host_kernels.HostKernel(spec))
    monkeypatch.setattr(runtime, "empty", empty)
    monkeypatch.setattr(runtime, "zeros", zeros)


@pytest.mark.parametrize(
    ("dtype", "sizes", "keys"), [(BF16, (576, 512), 150), (F16, (280, 264), 37), (F32, (576, 512), 40)]
)
def test_heads_above_256(dtype: torch.dtype, sizes: tuple[int, int], keys: int) -> None:
    """Every schedule of the forward, and those of the backward."""
    shapes = (1, 2, 8, sizes[0]), (1, keys, 1, sizes[0]), (1, keys, 1, sizes[1])
    q, k, v = (values("normal", shape, dtype, seed) for seed, shape in enumerate(shapes))
    key = FMA.key if dtype == F32 else TENSOR_CORE.on(AMPERE).key
    x = Attention(q, k, v, key, 0.06, window=(-1, 0), align="last")
    want = reference.forward(x)
    of = universal.variant(x)
    for schedule in universal.forward_schedules(of, INFO.max_smem)[:2]:
        for got, right in zip(universal.forward(x, schedule=schedule), want, strict=True):
            assert_same_bits(got, right, str(schedule))
    grad = values("normal", want[0].shape, dtype, 4)
    given = grad, want[0], want[2]
    gradients = reference.backward(x, *given, grad_mask=False)[:3]
    for s in universal_backward.backward_schedules(of, INFO.max_smem)[:1]:
        found = universal_backward.backward(x, *given, schedule=s)[:3]
        for name, got, right in zip("qkv", found, gradients, strict=True):
            assert_same_bits(got, right, f"d{name} {s}")


def test_as_many_offsets_as_tokens() -> None:
    """In a capture of whole or packed rows the last sequences are empty. They come in groups of 32."""
    ends = [*range(0, 40), 100, 133]
    q, k, v = (values("normal", (133, heads, 32), BF16, heads) for heads in (2, 1, 1))
    grad = values("normal", q.shape, BF16, 4)

    def packed(ends: list[int]) -> Attention:
        offsets = torch.tensor(ends, dtype=torch.int32)
        told = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        return Attention(q, k, v, TENSOR_CORE.on(AMPERE).key, 0.2, window=(-1, 0), align="last", **told)

    x = packed(ends + [133] * (134 - len(ends)))
    one = packed([0, 133])
    assert not sm90.choose(x, sm90.variant(x)).few
    row_warps = [universal.choose(y, universal.variant(y))[0].row_warps for y in (x, one)]
    assert row_warps[0] == row_warps[1] > 1
    want = reference.forward(packed(ends))
    for schedule in universal.forward_schedules(universal.variant(x), INFO.max_smem)[:2]:
        for got, right in zip(universal.forward(x, schedule=schedule), want, strict=True):
            assert_same_bits(got, right, str(schedule))
    given = grad, want[0], want[2]
    gradients = reference.backward(packed(ends), *given, grad_mask=False)[:3]
    for name, got, right in zip("qkv", universal_backward.backward(x, *given)[:3], gradients, strict=True):
        assert_same_bits(got, right, f"d{name}")
