"""``libsamebits`` on a GPU: the bits of the library's operators, also in a graph; and known answers."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from native.tests import answers, support
from samebits.backends.cuda import devices, matmul
from samebits.contract import HOPPER, resolve
from samebits.testing import assert_same_bits
from samebits_native import engine
from samebits_native.export.command import compile_all
from samebits_native.export.kernels import build

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
COMPILER = pytest.mark.skipif(not support.HAS_COMPILER, reason="no C compiler")


@COMPILER
def test_the_known_answers_are_the_references() -> None:
    assert answers.HEADER.read_text() == answers.header()


@pytest.fixture(scope="module")
def archive() -> Path:
    arch = devices.device_info(0).arch.target
    made = build(arch, [F32, BF16, F16], sizes=support.SMALL)
    path = support.folder() / "gpu.samebits"
    path.write_bytes(made.pack(compile_all(made.specs, arch)))
    return path


@pytest.fixture(scope="module")
def of(archive: Path) -> Iterator[engine.Engine]:
    found = engine.Engine(archive, library=support.build())
    yield found
    torch.cuda.synchronize()
    found.close()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def matrix(drawn: random.Random, dtype: torch.dtype, rows: int, columns: int, batch: int) -> Tensor:
    """Of either layout, padded and shifted or not."""
    turned = drawn.random() < 0.5
    outer, inner = (columns, rows) if turned else (rows, columns)
    pitch = inner + drawn.choice((0, 0, -inner % 8, 3, 8))
    room = torch.randn(batch * outer * pitch + 8, device="cuda").to(dtype)
    x = room[drawn.choice((0, 0, 0, 1)) :][: batch * outer * pitch].view(batch, outer, pitch)[..., :inner]
    x = x.mT if turned else x
    return x if batch > 1 else x[0]


@pytest.mark.gpu
@COMPILER
def test_random_products_have_the_librarys_bits(of: engine.Engine) -> None:
    drawn = random.Random(3)
    torch.manual_seed(3)
    for _ in range(400):
        dtype = drawn.choice((F32, BF16, BF16, F16))
        sizes = (1, 2, 7, 8, 33, 64, 100, 128, 256, 300, 768, 1000, 4096)
        m, n, k = (
            drawn.choice(sizes) if drawn.random() < 0.7 else drawn.randrange(1, 2000) for _ in range(3)
        )
        out_dtype = drawn.choice((dtype, F32))
        accumulate = out_dtype == F32 and drawn.random() < 0.3
        batch = 1 if accumulate or drawn.random() < 0.8 else drawn.randrange(2, 20)
        a, b = matrix(drawn, dtype, m, k, batch), matrix(drawn, dtype, k, n, batch)
        bias = torch.randn(n, device="cuda").to(dtype) if drawn.random() < 0.3 else None
        key, shape = resolve(None, dtype, "cuda"), (batch, m, n)[batch == 1 :]
        out = torch.randn(shape, device="cuda").to(out_dtype)
        if accumulate:
            want = out.clone()
            matmul.matmul_later(want, a, b, bias=bias, accumulate=True, contract=key)()
        else:
            want = matmul.matmul(a, b, bias=bias, out_dtype=out_dtype, contract=key)
        of.matmul(a, b, out=out, bias=bias, accumulate=accumulate, stream=stream())
        assert_same_bits(out, want, f"{dtype} {shape} k {k}")


@pytest.mark.gpu
@COMPILER
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_weights_gradients_of_packed_sequences_have_the_librarys_bits(
    of: engine.Engine, dtype: torch.dtype
) -> None:
    drawn = random.Random(4)
    for turn in range(40):
        tokens, m, n = (drawn.choice((16, 63, 128, 500, 2048)) for _ in range(3))
        dy, x = (torch.randn(tokens, width, device="cuda").to(dtype) for width in (m, n))
        ends = sorted(drawn.randrange(tokens) for _ in range(drawn.randrange(6)))
        kind = drawn.choice((torch.int32, torch.int64))
        offsets = torch.tensor([0, *ends, tokens], dtype=kind, device="cuda") if turn % 4 else None
        accumulate = turn % 2 == 0
        out = torch.randn(m, n, device="cuda").to(F32 if accumulate else dtype)
        want, key = out.clone()[None], resolve(None, dtype, "cuda")
        operands = dy.mT[None, None], x[None, None], offsets
        matmul.addbmm_later(want, *operands, accumulate=accumulate, contract=key)()
        of.matmul_sequences(dy.mT, x, offsets, out=out, accumulate=accumulate, stream=stream())
        assert_same_bits(out, want[0], f"{dtype} {tokens} {m} {n} {ends}")


@pytest.mark.gpu
@COMPILER
def test_random_grouped_products_have_the_librarys_bits(of: engine.Engine) -> None:
    drawn = random.Random(5)
    torch.manual_seed(5)
    for _ in range(300):
        dtype = drawn.choice((F32, BF16, BF16, F16))
        groups, rows = drawn.choice((1, 2, 8, 32, 128, 300, 1100)), drawn.choice((1, 40, 500, 3000))
        n, k = (drawn.choice((1, 8, 64, 100, 256, 768, 2048, drawn.randrange(1, 900))) for _ in range(2))
        a = matrix(drawn, dtype, rows, k, 1)
        b = matrix(drawn, dtype, k, n, groups) if groups > 1 else matrix(drawn, dtype, k, n, 1)[None]
        ends = sorted(drawn.randrange(rows + 1) for _ in range(groups))
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        bias = torch.randn(groups, n + 3, device="cuda").to(dtype)[:, :n] if drawn.random() < 0.4 else None
        out = torch.full((rows, n), torch.nan, device="cuda", dtype=drawn.choice((dtype, F32)))
        of.grouped_mm(a, b, offs, out=out, bias=bias, stream=stream())
        want = samebits.grouped_mm(a, b, offs, bias=bias, out_dtype=out.dtype)
        assert_same_bits(out, want, f"{dtype} {rows} rows, {groups} groups, {n} by {k}")


@pytest.mark.gpu
@COMPILER
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 64, 300])
@pytest.mark.parametrize(("features", "vocabulary"), [(64, 1000), (200, 129), (41, 3000), (512, 20_000)])
def test_log_probabilities_have_the_librarys_bits(
    of: engine.Engine, dtype: torch.dtype, tokens: int, features: int, vocabulary: int
) -> None:
    hidden, weight = (torch.randn(r, features, device="cuda").to(dtype) for r in (tokens, vocabulary))
    bias, target = torch.randn(vocabulary, device="cuda").to(dtype), torch.randint(vocabulary, (tokens,))
    target[::5] = -100
    target = target.cuda()
    want = samebits.linear_logp(hidden, weight, target, bias, temperature=0.7, return_entropy=True)
    size = of.workspace_size(hidden, weight, entropy=True)
    room = torch.empty(size // 4, device="cuda")
    found = torch.empty(2, tokens, device="cuda")
    given: dict[str, Any] = {"bias": bias, "entropy": found[1], "temperature": 0.7, "stream": stream()}
    of.linear_logp(hidden, weight, target, out=found[0], workspace=room, **given)
    assert_same_bits(found, torch.stack(want), "log-probabilities, and entropies")


def attention_call(drawn: random.Random) -> tuple[list[Tensor], dict[str, Any]]:
    """Operands and options, of every form."""
    dtype = drawn.choice((BF16, BF16, F16, F32))
    head, values = drawn.choice(
        ((64, 64), (128, 128), (128, 128), (192, 128), (256, 256), (56, 50), (96, 80))
    )
    group, kv_heads, batch = drawn.choice((1, 2, 4, 7, 8)), drawn.choice((1, 2, 4)), drawn.choice((1, 2, 5))
    form = drawn.choice(("whole", "whole", "padded", "packed", "paged"))
    queries, keys = drawn.choice((1, 1, 3, 64, 200, 700)), drawn.choice((1, 100, 512, 513, 2000, 5000))

    def tensor(*shape: int) -> Tensor:
        pitch = shape[-1] + drawn.choice((0, 0, 8, 3))
        return torch.randn(*shape[:-1], pitch, device="cuda").to(dtype)[..., : shape[-1]]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    window = drawn.choice(((-1, -1), (-1, 0), (-1, 0), (127, 0), (5, 9)))
    options: dict[str, Any] = {"window": window, "softcap": drawn.choice((0.0, 0.0, 30.0))}
    if drawn.random() < 0.3:
        options["sinks"] = torch.randn(group * kv_heads, device="cuda")
    if form == "packed":
        for name, tokens in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
            options[name] = integers(
                [0, *sorted(drawn.randrange(tokens + 1) for _ in range(batch - 1)), tokens]
            )
        q, of_k = tensor(queries, group * kv_heads, head), (keys,)
    else:
        q, of_k = tensor(batch, queries, group * kv_heads, head), (batch, keys)
    if form in ("padded", "paged"):
        starts = [drawn.randrange(keys // 2 + 1) for _ in range(batch)]
        options["key_start"] = integers(starts)
        options["key_length"] = integers([drawn.randrange(start, keys + 1) for start in starts])
    if form == "paged":
        page = drawn.choice((16, 64, 100))
        columns = -(-keys // page)
        of_k = batch * columns + 3, page
        pages = drawn.sample(range(of_k[0]), batch * columns)
        options["block_table"] = integers(pages).view(batch, columns)
    return [q, tensor(*of_k, kv_heads, head), tensor(*of_k, kv_heads, values)], options


@pytest.mark.gpu
@COMPILER
def test_random_attention_has_the_librarys_bits(of: engine.Engine) -> None:
    drawn = random.Random(7)
    torch.manual_seed(7)
    for _ in range(300):
        operands, options = attention_call(drawn)
        want, want_lse = samebits.attention(*operands, return_lse=True, **options)
        out, lse = torch.full_like(want, torch.nan), torch.full_like(want_lse, torch.nan)
        size = of.attention_workspace_size(*operands, **options)
        room = torch.randint(-9, 9, (-(-size // 4),), dtype=torch.int32, device="cuda")
        of.attention(*operands, out=out, lse=lse, workspace=room, stream=stream(), **options)
        shapes = [tuple(x.shape) for x in operands]
        assert_same_bits(out, want, f"{out.dtype} {shapes} {options}")
        assert_same_bits(lse, want_lse, f"log-sum-exps of {out.dtype} {shapes} {options}")


@pytest.mark.gpu
@COMPILER
def test_grouped_products_and_attention_are_captured_in_a_graph(of: engine.Engine) -> None:
    x, w = torch.randn(64, 512, device="cuda").to(BF16), torch.randn(8, 768, 512, device="cuda").to(BF16)
    offs = torch.arange(8, 65, 8, dtype=torch.int32, device="cuda")
    y, graph = torch.empty(64, 768, device="cuda", dtype=BF16), torch.cuda.CUDAGraph()
    q, k = (torch.randn(2, n, 8, 128, device="cuda").to(BF16) for n in (1, 3000))
    lengths, out = torch.tensor([700, 1], dtype=torch.int32, device="cuda"), torch.empty_like(q)
    room = torch.empty(of.attention_workspace_size(q, k, k, key_length=lengths) // 4, device="cuda")
    with torch.cuda.graph(graph):
        of.grouped_mm(x, w.mT, offs, out=y, stream=stream())
        of.attention(q, k, k, out=out, workspace=room, key_length=lengths, stream=stream())
    x.copy_(torch.randn(64, 512, device="cuda"))
    offs.copy_(torch.tensor([0, 9, 9, 30, 31, 50, 60, 64]))
    lengths.copy_(torch.tensor([3000, 513]))
    graph.replay()
    assert_same_bits(y, samebits.grouped_mm(x, w.mT, offs), "a replay, with other groups")
    assert_same_bits(out, samebits.attention(q, k, k, key_length=lengths), "a replay, with other lengths")


@pytest.mark.gpu
@COMPILER
def test_calls_are_captured_in_a_graph(of: engine.Engine) -> None:
    x, w = torch.randn(8, 4096, device="cuda").to(BF16), torch.randn(4096, 4096, device="cuda").to(BF16)
    out, graph = torch.empty(8, 4096, device="cuda", dtype=BF16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of.matmul(x, w.mT, out=out, stream=stream())
    x.copy_(torch.randn(8, 4096, device="cuda"))
    graph.replay()
    assert_same_bits(out, samebits.linear(x, w), "a replay, with other values")


@pytest.mark.gpu
@COMPILER
def test_smoke_in_c(archive: Path) -> None:
    program = support.folder() / "smoke"
    smoke = str(Path(__file__).with_name("smoke.c"))
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_POSIX_C_SOURCE=200809L", f"-I{support.SOURCES}"]
    subprocess.run(
        ["cc", *flags, smoke, *support.sources(), "-o", str(program), "-ldl", "-lpthread"], check=True
    )
    done = subprocess.run([str(program), str(archive)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == len(answers.cases(HOPPER))
