"""The operations on CUDA tensors: bits of the CPU at every shape and layout, graphs, streams, compile."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

import samebits
from samebits import AMPERE, FMA, HOPPER, TENSOR_CORE
from samebits.backends.cuda import matmul, runtime
from samebits.backends.product import Product
from samebits.ops import _products, _sequences
from samebits.testing import KINDS, assert_same_bits, values
from samebits.tools import verify
from samebits.tools.verify.operands import Inputs
from tests.contract.test_invariance import LAYOUTS, relaid
from tests.ops.test_torch import OPERATORS, PUBLIC, public, registered
from tests.support.compiled import assert_compiles
from tests.support.devices import ARCH, FAMILY, multiprocessors
from tests.support.threads import in_threads

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALF = (BF16, F16)
ON_CPU = TENSOR_CORE.on(FAMILY)
Named = dict[str, Tensor]


def gradients(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = samebits.linear(*leaves, **options)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def packed(x: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, ...]:
    tokens = len(x)
    ends = [0, tokens // 7, tokens // 7, tokens // 3, tokens - tokens // 5, tokens]
    offsets = torch.tensor(ends, dtype=torch.int64, device=x.device)
    return gradients(x, *others, cu_seqlens=offsets, **options)


def accumulated(a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, ...]:
    acc = values("normal", (a.shape[0], b.shape[1]), F32, 9).to(a.device)
    return (samebits.addmm_(acc, a, b, **options),)


# name -> the call, and the shapes of its inputs at (M, K, N)
OPS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., list[tuple[int, ...]]]]] = {
    "matmul": (lambda a, b, **o: (samebits.matmul(a, b, **o),), lambda m, k, n: [(m, k), (k, n)]),
    "matmul f32": (
        lambda a, b, **o: (samebits.matmul(a, b, out_dtype=F32, **o),),
        lambda m, k, n: [(m, k), (k, n)],
    ),
    "matmul broadcast": (
        lambda a, b, **o: (samebits.matmul(a, b, **o),),
        lambda m, k, n: [(3, 1, m, k), (2, k, n)],
    ),
    "addmm_": (accumulated, lambda m, k, n: [(m, k), (k, n)]),
    "bmm": (lambda a, b, **o: (samebits.bmm(a, b, **o),), lambda m, k, n: [(4, m, k), (4, k, n)]),
    "bmm, b shared": (lambda a, b, **o: (samebits.bmm(a, b, **o),), lambda m, k, n: [(4, m, k), (1, k, n)]),
    "bmm, a shared": (lambda a, b, **o: (samebits.bmm(a, b, **o),), lambda m, k, n: [(m, k), (4, k, n)]),
    "linear": (gradients, lambda m, k, n: [(m, k), (n, k), (n,), (m, n)]),
    "linear, rows of a batch": (gradients, lambda m, k, n: [(3, m, k), (n, k), (n,), (3, m, n)]),
    "linear, packed": (packed, lambda m, k, n: [(m, k), (n, k), (n,), (m, n)]),
}
SHAPES = [
    (1, 1, 1), (1, 17, 64), (3, 16, 5), (16, 40, 32), (17, 33, 31), (64, 64, 64), (130, 100, 1),
    (1, 4097, 33), (257, 129, 65), (200, 264, 136), (512, 512, 256), (1, 1024, 2048), (33, 2048, 512),
    (1037, 40, 24), (7, 0, 5), (0, 16, 8), (8, 16, 0), (0, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("name", OPS)
def test_operations_have_the_bits_of_the_cpu(name: str, shape: tuple[int, int, int]) -> None:
    call, shapes = OPS[name]
    seed = sum(map(ord, name)) + sum(shape)
    for dtype, kind in zip((*HALF, F32), (KINDS[seed % len(KINDS)], "normal", "wide"), strict=True):
        inputs = [values(kind, s, dtype, seed + i) for i, s in enumerate(shapes(*shape))]
        want = call(*inputs, contract=FMA if dtype == F32 else ON_CPU)
        got = call(*(t.cuda() for t in inputs))
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert g.is_cuda
            assert_same_bits(g, w, f"{kind} {dtype}, result {i}")


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_strides_and_alignments(first: str, second: str) -> None:
    for name in ("matmul", "linear", "linear, packed", "bmm"):
        call, shapes = OPS[name]
        inputs = [values("normal", s, BF16, i) for i, s in enumerate(shapes(72, 48, 40))]
        want = call(*inputs, contract=ON_CPU)
        placed = [t.cuda() for t in inputs]
        if name != "bmm":
            placed[:2] = [relaid(placed[0], first), relaid(placed[1], second)]
            placed[3:] = [relaid(t, first) for t in placed[3:]]
        else:
            placed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in placed]
        for g, w in zip(call(*placed), want, strict=True):
            assert_same_bits(g, w, name)


def test_misaligned_views() -> None:
    room = values("normal", (70_000,), BF16, 0)
    weight = values("normal", (64, 96), BF16, 1)
    for offset in (0, 1, 2, 4, 7, 8, 9):
        x = room[offset : offset + 50 * 96].view(50, 96)
        on_gpu = room.cuda()[offset : offset + 50 * 96].view(50, 96)
        assert_same_bits(
            samebits.linear(on_gpu, weight.cuda()), samebits.linear(x, weight, contract=ON_CPU), f"{offset}"
        )


def test_huge_strides() -> None:
    """Offsets beyond 2**31 elements, of either operand."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB")
    big = torch.empty((1 << 32) + 4096, dtype=BF16, device="cuda")
    x, weight = values("normal", (4, 64), BF16, 1), values("normal", (24, 64), BF16, 2)
    far = big.as_strided((4, 64), (1 << 30, 1)).copy_(x.cuda())
    want = samebits.linear(x, weight, contract=ON_CPU)
    assert_same_bits(samebits.linear(far, weight.cuda()), want)
    assert_same_bits(samebits.linear(weight.cuda(), far), want.mT.contiguous())


@given(
    m=st.integers(1, 700),
    k=st.sampled_from([64, 200, 768, 1024]),
    n=st.sampled_from([8, 72, 256, 1000]),
    dtype=st.sampled_from(HALF),
    kind=st.sampled_from(["normal", "wide", "cancel", "sparse"]),
    data=st.data(),
)
def test_rows_over_tiles_and_schedules(
    m: int, k: int, n: int, dtype: torch.dtype, kind: str, data: st.DataObject
) -> None:
    """Sizes at which batches of one row, of some and of all go to different schedules."""
    x, weight = values(kind, (m, k), dtype, m, "cuda"), values(kind, (n, k), dtype, n, "cuda")
    full = samebits.linear(x, weight)
    start = data.draw(st.integers(0, m - 1), "start")
    stop = data.draw(st.integers(start + 1, m), "stop")
    assert_same_bits(samebits.linear(x[start:stop], weight), full[start:stop], "some rows")
    assert_same_bits(samebits.linear(x[start], weight), full[start], "one row")
    company = values("special", (m, k), dtype, 5, "cuda")
    company[start:stop] = x[start:stop]
    assert_same_bits(samebits.linear(company, weight)[start:stop], full[start:stop], "beside NaN and inf")


def test_equals_cublas_where_it_does_not_split_k() -> None:
    if not ARCH.copies_tiles:
        pytest.skip("known of Hopper")
    a, weight = (
        values("normal", (4096, 2048), BF16, 0, "cuda"),
        values("normal", (6144, 2048), BF16, 1, "cuda"),
    )
    assert_same_bits(samebits.linear(a, weight), torch.mm(a, weight.mT))


# ---- graphs, streams, threads


@pytest.mark.parametrize("m", [1, 40, 300, 1000])
def test_cuda_graph(m: int) -> None:
    x, weight = values("normal", (m, 256), BF16, 0, "cuda"), values("normal", (512, 256), BF16, 1, "cuda")
    bias, dy = values("normal", (512,), BF16, 2, "cuda"), values("normal", (m, 512), BF16, 3, "cuda")
    want = gradients(x, weight, bias, dy)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(x, weight, bias, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        got = gradients(x, weight, bias, dy)
    for _ in range(2):
        for t in got:
            t.detach().fill_(torch.nan)
        graph.replay()
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same_bits(g, w, f"result {i}")


CAPTURE = """
import torch, samebits
x, w = torch.ones(40, 264, device="cuda").bfloat16(), torch.ones(136, 264, device="cuda").bfloat16()
{first}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = samebits.linear(x, w)
graph.replay()
print(y[0, 0].item())
"""


def test_capture_before_a_kernel_is_loaded_is_a_clear_error() -> None:
    def run(first: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", CAPTURE.format(first=first)], capture_output=True, text=True, timeout=120
        )

    bare = run("")
    assert bare.returncode != 0
    assert "samebits.prepare" in bare.stderr
    ready = run("samebits.prepare(w, [40])")
    assert ready.stdout.strip() == "264.0", ready.stderr


def model_step(device: str) -> Callable[[], list[Tensor]]:
    """Embedding, norm, attention, products, softmax and log-probabilities, forward and backward."""
    table, proj = (values("normal", shape, BF16, i, device) for i, shape in enumerate(((300, 64), (64, 64))))
    gain, ids = (
        values("normal", (64,), BF16, 2, device),
        torch.arange(80, device=device).view(2, 40) * 7 % 300,
    )
    leaves = [t.requires_grad_() for t in (table, proj, gain)]

    def step() -> list[Tensor]:
        with samebits.batch_invariant("error"):
            x = F.layer_norm(F.embedding(ids, table), (64,), gain, gain)
            q = x.unflatten(2, (4, 16)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.linear(x, proj).softmax(-1) * gain
            results = samebits.linear_logp(x, table, ids, return_entropy=True)
        return [*results, *torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])]

    return step


def test_after_one_step_its_capture_loads_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    step = model_step("cuda")
    monkeypatch.setattr(runtime, "_kernels", {})
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's nodes of the leaves belong to the stream that made them
        want = step()
    with (
        mock.patch.object(runtime, "_load", side_effect=AssertionError("a kernel was not loaded yet")),
        torch.cuda.graph(graph, stream=stream),
    ):
        got = step()
    for t in got:
        t.detach().fill_(torch.nan)
    graph.replay()
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(g, w, f"result {i}")


def test_streams_and_threads() -> None:
    x, weight = values("normal", (700, 512), BF16, 0, "cuda"), values("normal", (768, 512), BF16, 1, "cuda")
    load = values("normal", (4096, 4096), BF16, 2, "cuda")
    want = samebits.linear(x, weight)
    torch.cuda.synchronize()

    def work() -> list[Tensor]:
        results, stream = [], torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for m in (1, 30, 200, 700):
                torch.mm(load, load)
                results.append(samebits.linear(x[:m], weight))
        stream.synchronize()
        return results

    for got in itertools.chain(*in_threads(*[work] * 4)):
        assert_same_bits(got, want[: len(got)])


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("name", ["tensor_core_sm90", "triton matmul_tiles"])
def test_blocks_that_take_several_tiles(name: str, part: int) -> None:
    """Under every schedule, each operand contiguous along k and not, rings going round from tile to tile."""
    universal, *kernels = verify.kernels(torch.cuda.current_device())
    kernel = next((k for k in kernels if k.name == name), None)
    if kernel is None:
        pytest.skip(f"{name} does not run here")
    for i, s in enumerate(kernel.catalogue[part::8]):
        cluster = getattr(s, "cluster", 1)
        tall, wide = 2 * s.block_m + 8, 2 * s.block_n * cluster + 8
        m, n = (wide, tall) if s.swap else (tall, wide)
        k = s.block_k * (s.stages + 2)
        spans = torch.tensor([0, 3, k // 2, k // 2, k], device="cuda")
        bias = values("normal", (n,), F32, 2, "cuda")
        for j, (a_mn, b_mn) in enumerate(itertools.product((False, True), repeat=2)):
            a = values("normal", (k, m) if a_mn else (m, k), BF16, 0, "cuda")
            b = values("normal", (k, n) if b_mn else (n, k), BF16, 1, "cuda")
            a, b = a.mT if a_mn else a, b if b_mn else b.mT
            out = values("normal", (m, n), F32 if (i + j) % 2 else BF16, 3, "cuda")
            if (i + j) % 2:  # continued from what is there
                x = Inputs(a, b, acc=out, cu_seqlens=spans if a_mn and b_mn else None)
            else:
                x = Inputs(a, b, bias=bias)
                out.fill_(torch.nan)
            if not verify.takes(kernel, Product.of(x.into(out), kernel.step), s):
                continue
            want = out.clone()
            universal.run(x.into(want))
            with multiprocessors(2 * cluster):
                kernel.run(x.into(out), s)
            assert_same_bits(out, want, f"{s}, contiguous along m: {a_mn}, n: {b_mn}")


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def same_on_second_gpu(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    """While the first one is current."""
    assert torch.cuda.current_device() == 0
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.device == torch.device("cuda", 1)
        assert_same_bits(g.cpu(), w.cpu(), f"{what}, result {i}")


@needs_two_gpus
def test_a_second_gpu() -> None:
    for (name, (call, shapes)), dtype in itertools.product(OPS.items(), (*HALF, F32)):
        for shape in ((3, 16, 5), (200, 264, 136), (33, 2048, 512)):
            inputs = [values("normal", s, dtype, i) for i, s in enumerate(shapes(*shape))]
            got = call(*(t.to("cuda:1") for t in inputs))
            want = call(*(t.to("cuda:0") for t in inputs))
            same_on_second_gpu(got, want, f"{name}, {dtype}, {shape}")
    x, weight = (values("normal", s, BF16, i, "cuda:1") for i, s in enumerate(((72, 56), (88, 56))))
    results = in_threads(lambda: samebits.linear(x, weight))
    want = (samebits.linear(x.to("cuda:0"), weight.to("cuda:0")),)
    same_on_second_gpu(results, want, "another thread")
    with pytest.raises(ValueError, match="device"):
        samebits.linear(x, weight.to("cuda:0"))
    with pytest.raises(IndexError, match="position 1"):
        samebits.linear_logp(x, weight, torch.tensor([0, 88] + 70 * [1], device="cuda:1"))


@needs_two_gpus
def test_a_step_on_a_second_gpu() -> None:
    step, want = model_step("cuda:1"), model_step("cuda:0")()
    same_on_second_gpu(step(), want, "a step")
    stream, graph = torch.cuda.Stream(1), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    graph.replay()
    same_on_second_gpu(got, want, "a captured step")


@needs_two_gpus
def test_capture_on_a_gpu_that_is_not_current() -> None:
    logits, target = torch.randn(5, 40, device="cuda:1"), torch.tensor([0, 3, 39, 1, 2], device="cuda:1")
    x, weight = torch.randn(8, 16, device="cuda:1"), torch.randn(4, 16, device="cuda:1")
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda:1")

    def step() -> tuple[Tensor, ...]:
        return samebits.logp(logits, target), samebits.linear(x, weight, cu_seqlens=offsets)

    stream, graph = torch.cuda.Stream(1), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(stream):
        want = step()
    with (
        mock.patch("samebits.ops._sequences.on_gpu", wraps=_sequences.on_gpu) as asked,
        torch.cuda.graph(graph, stream=stream),
        torch.cuda.device(0),
    ):
        got = step()
    assert "assert_spans" in [call.args[0] for call in asked.call_args_list]  # again, for the replays
    graph.replay()
    torch.cuda.synchronize(1)
    same_on_second_gpu(got, want, "captured")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("features", [64, 33])
def test_offsets_rewritten_unseen_read_nothing_else(features: int, dtype: torch.dtype) -> None:
    """They are taken as the nearer end of the tokens, and spans that end before they start as empty."""
    x, dy = (torch.randn(64, features, device="cuda").to(dtype) for _ in range(2))
    weight = torch.zeros(features, features, dtype=dtype, device="cuda", requires_grad=True)
    for kind in (torch.int32, torch.int64):
        offsets = torch.tensor([0, 20, 50, 64], dtype=kind, device="cuda")
        samebits.linear(x, weight, cu_seqlens=offsets)
        offsets.data.copy_(torch.tensor([-(2**31), 40, 10, 2**31 - 1]))
        (got,) = torch.autograd.grad(samebits.linear(x, weight, cu_seqlens=offsets), weight, dy)
        want = torch.zeros(features, features, device="cuda")
        for span in (slice(40), slice(10, 64)):
            samebits.addmm_(want, dy[span].mT, x[span])
        assert_same_bits(got, want.to(dtype))


@pytest.mark.parametrize("features", [8, 9])  # 9: by the universal kernel, on Hopper too
def test_many_short_sequences(features: int) -> None:
    tokens, sequences = 524_288, 65_536
    shapes = (tokens, features), (features, features), (features,), (tokens, features)
    inputs = [values("normal", s, BF16, i) for i, s in enumerate(shapes)]
    offsets = torch.arange(0, tokens + 1, tokens // sequences, dtype=torch.int32)
    offsets[1:-1] += torch.arange(sequences - 1) % 3
    want = gradients(*inputs, cu_seqlens=offsets, contract=ON_CPU)
    got = gradients(*(t.cuda() for t in inputs), cu_seqlens=offsets.cuda())
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)


def test_a_thread_that_has_called_no_cuda() -> None:
    """It has no context yet, and the Hopper kernel's tensor maps are made before anything is launched."""
    x, weight = values("normal", (72, 56), BF16, 0, "cuda"), values("normal", (88, 56), BF16, 1, "cuda")
    acc = torch.zeros(72, 88, device="cuda")
    want = samebits.addmm_(acc.clone(), x, weight.mT)  # loads the kernel, which would make a context
    x, weight = x.clone(), weight.clone()  # at addresses of which no map was made
    (got,) = in_threads(lambda: samebits.addmm_(acc, x, weight.mT))
    assert_same_bits(got, want)


# ---- within PyTorch


def on_gpu(tree: Any) -> Any:
    def move(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.detach().cuda().requires_grad_(t.requires_grad)

    return tree_map(move, tree)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    operator = getattr(torch.ops.samebits, name.split()[0])
    torch.library.opcheck(operator, on_gpu(OPERATORS[name](BF16, TENSOR_CORE.key)))


def halves(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """`tests.ops.test_torch.public`, its leaves on the GPU in bf16, but for accumulators."""
    op, leaves = public(name, "cuda")
    keep = 1 if name == "addmm_" else 0
    return op, [
        t.detach().cuda().to(F32 if i < keep else BF16).requires_grad_() for i, t in enumerate(leaves)
    ]


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in PUBLIC), ("linear", "inductor"), ("addmm_", "inductor")],
)
def test_compile(name: str, backend: str) -> None:
    assert_compiles(*halves(name), backend)


@pytest.mark.counts_calls
@pytest.mark.parametrize("name", PUBLIC)
def test_both_ways_to_an_operator_give_the_same_bits(name: str) -> None:
    """Past PyTorch's dispatcher, and through it."""
    op, leaves = halves(name)

    def run() -> list[Tensor]:
        out = op(*leaves)
        with torch.no_grad():
            again = op(*leaves)
        return [out, again, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    for _ in range(4):  # the second call of its kind is recorded, by a mode that calls operators
        run()
    with mock.patch("torch._ops.OpOverload.__call__", side_effect=AssertionError("not the short way")):
        got = run()
    with registered():
        want = run()
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(g, w, f"result {i}")


def test_autocast() -> None:
    x, weight = values("normal", (30, 40), F32, 0, "cuda"), values("normal", (50, 40), F32, 1, "cuda")
    with torch.autocast("cuda", BF16):
        assert_same_bits(samebits.linear(x, weight), samebits.linear(x.bfloat16(), weight.bfloat16()))


def test_gradients_accumulate_like_one_long_batch() -> None:
    """dW of micro-batches, cut where groups of 16 tokens end, into one f32 accumulator."""
    x, dy = values("normal", (640, 72), BF16, 0, "cuda"), values("normal", (640, 136), BF16, 1, "cuda")
    whole = samebits.addmm_(torch.zeros(136, 72, device="cuda"), dy.mT, x)
    parts = torch.zeros(136, 72, device="cuda")
    for i, j in itertools.pairwise((0, 16, 160, 400, 640)):
        samebits.addmm_(parts, dy[i:j].mT, x[i:j])
    assert_same_bits(parts, whole)
    reference = samebits.addmm_(torch.zeros(136, 72), dy.cpu().mT, x.cpu(), contract=ON_CPU)
    assert_same_bits(whole, reference)


def test_bias_gradients_on_a_stream_beside_the_first() -> None:
    """Replays read one 1, which the recorded call fills, here on a stream that is busy."""
    grad = values("normal", (64, 72), BF16, 0, "cuda")
    x, weight, bias = (torch.ones(s, dtype=BF16, device="cuda") for s in ((64, 48), (72, 48), (72,)))
    bias.requires_grad_()
    found = []
    with mock.patch.dict(_products._ones, clear=True):
        for wait in (0, 200_000_000, 0, 0):  # the second one is recorded
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.full((), torch.nan, dtype=BF16, device="cuda")  # what is there otherwise
                torch.cuda._sleep(wait)
                found += torch.autograd.grad(samebits.linear(x, weight, bias), bias, grad)
        torch.cuda.synchronize()
    want = samebits.linear(torch.ones(1, 64, dtype=BF16), grad.cpu().mT)[0]
    for got in found:
        assert_same_bits(got.cpu(), want)


def test_weight_gradients_of_equal_sequences_on_a_stream_beside_the_first() -> None:
    """Replays read the offsets that the recorded call writes, here on a stream that is busy."""
    x, grad = (values("normal", (3, 35, n), BF16, n, "cuda") for n in (48, 64))
    weight = torch.zeros(64, 48, dtype=BF16, device="cuda").requires_grad_()
    torch.cuda.synchronize()
    found = []
    with mock.patch.dict(matmul._kept_offsets, clear=True):
        for wait in (0, 200_000_000, 0, 0):  # the second one is recorded
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(wait)
                found += torch.autograd.grad(samebits.linear(x, weight), weight, grad)
        torch.cuda.synchronize()
        assert list(matmul._kept_offsets) == [(3, 35, x.device)]
    x, grad, weight = x.cpu(), grad.cpu(), weight.cpu().detach().requires_grad_()
    (want,) = torch.autograd.grad(samebits.linear(x, weight), weight, grad)
    for got in found:
        assert_same_bits(got.cpu(), want)


# ---- errors


def gpu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def cpu(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


OTHER = AMPERE if FAMILY is HOPPER else HOPPER
ERRORS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    (
        "devices",
        lambda: samebits.matmul(gpu(2, 3), cpu(3, 4)),
        ValueError,
        "expected device cuda:0 like a, got cpu",
    ),
    ("devices, linear", lambda: samebits.linear(cpu(2, 3), gpu(4, 3)), ValueError, "like x, got cuda:0"),
    (
        "devices, bias",
        lambda: samebits.linear(gpu(2, 3), gpu(4, 3), cpu(4)),
        ValueError,
        "bias: expected device",
    ),
    (
        "devices, acc",
        lambda: samebits.addmm_(torch.zeros(2, 2), gpu(2, 2), gpu(2, 2)),
        ValueError,
        "acc: expected device",
    ),
    (
        "devices, offsets",
        lambda: samebits.linear(gpu(4, 3), gpu(4, 3), cu_seqlens=torch.tensor([0, 4])),
        ValueError,
        "cu_seqlens: expected device",
    ),
    (
        "another family",
        lambda: samebits.matmul(gpu(2, 2), gpu(2, 2), contract=TENSOR_CORE.on(OTHER)),
        ValueError,
        f"{FAMILY.name}; CPU tensors follow any family",
    ),
    (
        "overlap",
        lambda: samebits.addmm_(torch.zeros(4, device="cuda").expand(3, 4), gpu(3, 5), gpu(5, 4)),
        ValueError,
        "do not overlap",
    ),
    ("shapes", lambda: samebits.matmul(gpu(2, 3), gpu(4, 5)), ValueError, "inner dimensions must be equal"),
]


@pytest.mark.parametrize(("call", "error", "message"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert_same_bits(samebits.matmul(gpu(2, 3), gpu(3, 4)), gpu(2, 4), "and the next call works")


@pytest.mark.parametrize("backend", verify.BACKENDS)
def test_verify(backend: str) -> None:
    """All that ``samebits verify`` compares: every kernel, every schedule."""
    report = verify.verify(backend=backend)
    assert report.exit_code == 0, report.failure or report.first
    assert report.compared > 10**8
