"""Adapters by ``kernels/adapters.cu``: compiled, run on a CPU, and on a GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from samebits.backends import replay
from samebits.backends.cuda import adapters as host
from samebits.backends.cuda import compiler, devices
from samebits.backends.reference import adapters as reference
from samebits.contract import AMPERE, FMA, TENSOR_CORE, resolve
from samebits.ops.adapters import add_adapters
from samebits.testing import assert_same_bits, values
from tests.support import host_kernels
from tests.support.cubins import resources
from tests.support.fake_gpu import INFO, fake_gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
on_dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)


class Case(NamedTuple):
    tokens: int
    slots: int
    rank: int
    ends: tuple[int, ...]
    whose: str  # "none", "one", "mixed", "runs": of the tokens
    of_block: int = 0  # tokens; 0: what is chosen
    gaps: bool = True  # base and inner are columns of one matrix


CASES = [
    Case(1, 1, 16, (32,), "one"),
    Case(1, 4, 16, (64, 96, 128), "one", gaps=False),
    Case(5, 4, 16, (64, 64, 72), "mixed"),
    Case(16, 3, 32, (40, 80), "mixed"),
    Case(17, 2, 48, (24,), "none"),
    Case(33, 5, 16, (136, 144), "mixed", 16),
    Case(70, 4, 64, (32, 57, 58), "mixed", 32),
    Case(70, 4, 64, (128,), "runs", 32),
    Case(50, 2, 80, (33,), "runs", 64, gaps=False),
    Case(50, 2, 128, (40,), "mixed", 48),
]


class Operands(NamedTuple):
    base: Tensor
    inner: Tensor
    b: Tensor
    adapters: Tensor
    scalings: Tensor
    ends: tuple[int, ...]


def operands(case: Case, dtype: torch.dtype, kind: str) -> Operands:
    """Rows of other adapters than a token's own are NaN."""
    tokens, slots, rank, ends = case[:4]
    g = torch.Generator().manual_seed(tokens)
    whose = torch.randint(-1, slots, (tokens,), generator=g)
    if case.whose == "none":
        whose = torch.where(whose % 2 == 0, -1, slots)
    elif case.whose == "one":
        whose = torch.full_like(whose, slots - 1)
    elif case.whose == "runs":
        whose = whose.sort()[0]
    inner = values(kind, (tokens, slots, len(ends), rank), dtype, 1)
    inner[whose[:, None] != torch.arange(slots)] = torch.nan
    base, inner = values("normal", (tokens, ends[-1]), dtype, 2), inner.flatten(1)
    base[:, ::5] = -0.0
    if case.gaps:
        base, inner = torch.cat([base, inner], 1).split([base.shape[1], inner.shape[1]], 1)
    b = values(kind, (slots, ends[-1], rank), dtype, 3)
    scalings = torch.randn(slots, len(ends), generator=g)
    scalings[torch.rand(scalings.shape, generator=g) < 0.3] = torch.nan
    return Operands(base, inner, b, whose, scalings, ends)


def check(case: Case, dtype: torch.dtype, kind: str, device: str, contract: Any, *others: int) -> None:
    """With blocks of the case's tokens, and of `others`."""
    given = operands(case, dtype, kind)
    want = reference.add_adapters(*given, resolve(contract, dtype, "cpu"))
    put = Operands(*(t.to(device) if isinstance(t, Tensor) else t for t in given))
    for of_block in (case.of_block, *others):
        got = host.add_adapters(*put, resolve(contract, dtype, device), of_block)
        assert_same_bits(got.cpu(), want, f"{case}, {kind}, {of_block} tokens of a block")


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@on_dtypes
def test_the_kernels_compile(arch: str, dtype: torch.dtype) -> None:
    """And keep what they hold in registers."""
    fma = dtype == F32
    if arch == compiler.ARCHITECTURES[0] and not fma:
        return
    for groups, slices, vector in ((1, 1, True), (1, 3, True), (4, 2, True), (5, 1, False), (8, 3, True)):
        found = resources(host.kernel_spec(dtype, fma, groups, slices, vector), arch)
        assert found.local_bytes == 0, (groups, slices, vector)


def test_calls_are_replayed() -> None:
    """Adapters, outputs and all else may lie elsewhere in the next call."""
    with fake_gpu() as gpu, torch.no_grad():
        replay.forget()
        for _ in range(5):
            given = operands(CASES[3], BF16, "normal")
            gpu.start()
            add_adapters(*given)
            (launch,) = gpu.log
            found = struct.unpack("@6P2q5i", launch[3])
            assert found[:5] == tuple(t.data_ptr() for t in given[:5])
            assert found[6:] == (given.base.stride(0), given.inner.stride(0), 16, 3, 16, 40, 80)


def test_entries_that_are_read_two_at_once_are_aligned() -> None:
    def shifted(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    given = operands(Case(*CASES[3][:5], gaps=False), BF16, "normal")
    moved = given._replace(inner=shifted(given.inner), b=shifted(given.b))
    assert moved.inner.data_ptr() & 3 == moved.b.data_ptr() & 3 == 2
    with fake_gpu() as gpu, torch.no_grad():
        replay.forget()
        for _ in range(5):
            gpu.start()
            add_adapters(*moved)
            (launch,) = gpu.log
            _, inner, b, *_ = struct.unpack("@6P2q5i", launch[3])
            assert inner & 3 == b & 3 == 0


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    host_kernels.use(monkeypatch, host)
    monkeypatch.setattr(host, "check_contract", lambda contract, device: None)
    monkeypatch.setattr(devices, "device_info", lambda device: INFO)
    return


@host_kernels.needs_compiler
@on_dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_a_cpu(on_cpu: None, case: Case, dtype: torch.dtype) -> None:
    contract = FMA if dtype == F32 else TENSOR_CORE.on(AMPERE)
    for kind in ("normal", "wide", "special"):
        check(case, dtype, kind, "cpu", contract)


@host_kernels.needs_compiler
def test_16_bits_under_fma(on_cpu: None) -> None:
    for case in CASES[::4]:
        check(case, BF16, "normal", "cpu", FMA)


MORE = [
    Case(n, slots, rank, ends, whose)
    for n, whose in ((1, "one"), (8, "mixed"), (64, "mixed"), (256, "mixed"), (2048, "runs"), (2048, "mixed"))
    for slots, rank, ends in ((4, 16, (512, 640, 768)), (4, 64, (1024,)), (9, 32, (96, 200)))
]


@pytest.mark.gpu
@on_dtypes
@pytest.mark.parametrize("case", CASES + MORE, ids=str)
def test_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: torch.dtype) -> None:
    """With what blocks choose, and with blocks of other sizes. Results begin as NaN."""
    from samebits.backends.cuda import runtime

    empty = runtime.empty
    monkeypatch.setattr(runtime, "empty", lambda *args: empty(*args).fill_(torch.nan))
    for kind in ("normal", "special"):
        check(case, dtype, kind, "cuda", None, 16, 128)
