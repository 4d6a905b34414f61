"""``samebits.gather_logp``: the bits of ``logp`` and ``log_softmax`` at any number of ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import samebits
from samebits import gather_logp, logp
from samebits.backends.cuda import compiler
from samebits.backends.cuda.logp import kernel_spec
from samebits.testing import assert_same_bits
from tests.support import naive
from tests.support.cubins import resources
from tests.support.devices import DEVICES, GPU, case

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


def ids_of(rows: int, n: int, vocabulary: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, n), generator=torch.Generator().manual_seed(seed)).to(device)


@on_devices
@in_dtypes
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize(("rows", "vocabulary", "n"), [(1, 1, 3), (5, 300, 4), (3, 9000, 21), (70, 129, 1)])
def test_bits_of_logp_and_log_softmax(
    device: str, dtype: torch.dtype, kind: str, rows: int, vocabulary: int, n: int
) -> None:
    logits = case(kind, (rows, vocabulary), dtype, device)
    ids = ids_of(rows, n, vocabulary, device)
    got = gather_logp(logits, ids)
    assert got.dtype == F32
    with samebits.batch_invariant("error"):
        want = torch.log_softmax(logits.float(), -1).gather(-1, ids)
    assert_same_bits(got, want, "log_softmax")
    for i in range(n):
        assert_same_bits(got[:, i], logp(logits, ids[:, i]), "logp")


@on_devices
def test_bits_of_the_naive_implementation(device: str) -> None:
    logits, ids = (
        case("normal", (2, 200), BF16, device),
        torch.tensor([[0, 199, 7], [5, 5, 130]], device=device),
    )
    want = [
        [float(naive.logp(z, i)[0]) for i in of] for z, of in zip(logits.tolist(), ids.tolist(), strict=True)
    ]
    assert_same_bits(gather_logp(logits, ids).cpu(), torch.tensor(want))


@on_devices
@in_dtypes
def test_places(device: str, dtype: torch.dtype) -> None:
    """Any strides, dimensions and kinds of ids, and rows beside any others."""
    logits, ids = case("normal", (6, 300), dtype, device), ids_of(6, 3, 300, device)
    want = gather_logp(logits, ids)
    wide = torch.full((6, 311), torch.nan, dtype=dtype, device=device)
    wide[:, 5:305] = logits
    tall = torch.stack((logits, logits), -1)[..., 0]
    for got in (
        gather_logp(wide[:, 5:305], ids),
        gather_logp(tall, ids),
        gather_logp(logits, ids.int()),
        gather_logp(logits, torch.stack((ids, ids), -1)[..., 0]),
        gather_logp(logits, ids.mT.contiguous().mT),
        gather_logp(logits.view(2, 3, 300), ids.view(2, 3, 3)).view(6, 3),
        torch.stack([gather_logp(z, i) for z, i in zip(logits, ids, strict=True)]),
    ):
        assert_same_bits(got, want)
    beside = torch.cat((torch.full_like(logits[:1], torch.nan), logits))
    assert_same_bits(gather_logp(beside, torch.cat((ids[:1], ids)))[1:], want)
    assert gather_logp(logits, ids[:, :0]).shape == (6, 0)
    assert gather_logp(logits[:0], ids[:0]).shape == (0, 3)


@on_devices
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unknown_ids_give_nan(device: str, dtype: torch.dtype) -> None:
    logits = case("normal", (1, 140), BF16, device)
    ids = torch.tensor([[0, -1, 140, 139, -(2**31), 2**31 - 1]], dtype=dtype, device=device)
    got = gather_logp(logits, ids)
    assert got.isnan().tolist() == [[False, True, True, False, True, True]]
    assert_same_bits(got[:, [0, 3]], gather_logp(logits, ids[:, [0, 3]]))


@pytest.mark.parametrize("device", [GPU])
def test_in_a_graph(device: str) -> None:
    logits, ids = case("normal", (3, 40_000), BF16, device), ids_of(3, 5, 40_000, device)
    want = gather_logp(logits, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gather_logp(logits, ids)
    got.fill_(torch.nan)
    graph.replay()
    assert_same_bits(got, want)


Z, IDS = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64)
call: Any = gather_logp
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: call(Z.double(), IDS), TypeError, "logits: expected bfloat16"),
    (lambda: call(Z[:, :0], IDS), ValueError, "logits: expected .* with V > 0"),
    (lambda: call(Z, IDS.float()), TypeError, "ids: expected int64 or int32"),
    (lambda: call(Z, IDS[:1]), ValueError, r"ids: expected shape \(2, n\)"),
    (lambda: call(Z, IDS[:, 0]), ValueError, r"ids: expected shape \(2, n\)"),
    (lambda: call(Z.clone().requires_grad_(), IDS), NotImplementedError, "logits: gradients"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number: int) -> None:
    wrong, kind, message = REFUSED[number]
    with pytest.raises(kind, match=rf"samebits\.gather_logp: {message}"):
        wrong()


def test_the_operator_is_what_it_says() -> None:
    torch.library.opcheck(torch.ops.samebits.gather_logp, (torch.randn(3, 9), ids_of(3, 2, 9, "cpu"), "FMA"))


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES[1::2])
def test_the_kernel_compiles(arch: str) -> None:
    pytest.importorskip("cuda.core")
    cubin = resources(kernel_spec("combine_ids", BF16), arch)
    assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0)
