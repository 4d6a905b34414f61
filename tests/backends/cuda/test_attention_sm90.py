"""Attention on Hopper: the kernel that stores no scores has the bits of those that do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from samebits import TENSOR_CORE
from samebits.backends.cuda import attention_sm90, devices
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.ops.attention import scaled_dot_product_attention as attention
from samebits.testing import assert_same_bits, values
from samebits.tools.verify.reductions import _stored as stored
from tests.support.devices import FAMILY, case

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="Hopper's kernel"
)


# Where no scores are stored: kind, heads (of k, in a group), queries, keys, sizes (of k, of v), mask.
ATTENTIONS = [
    ("normal", (1, 1), 1, 1, (64, 64), None),
    ("normal", (2, 1), 64, 15, (8, 8), None),
    ("cancel", (1, 8), 3, 16, (72, 80), None),
    ("wide", (2, 2), 65, 127, (64, 128), "causal"),
    ("normal", (2, 4), 1, 128, (128, 128), None),
    ("sparse", (3, 3), 40, 129, (96, 64), "causal"),
    ("normal", (2, 1), 130, 1000, (80, 96), "causal"),
    ("special", (2, 2), 100, 300, (64, 64), None),
    ("huge", (2, 1), 100, 129, (64, 72), None),
    ("normal", (1, 2), 5, 4500, (64, 64), None),
    ("normal", (1, 2), 300, 4500, (128, 64), "causal"),
    ("peaked", (1, 2), 200, 700, (64, 64), None),
    ("normal", (2, 2), 300, 70, (64, 64), "causal"),
    ("normal", (2, 2), 60, 260, (64, 64), "boolean"),
    ("wide", (1, 4), 33, 260, (128, 104), "float"),
    ("normal", (1, 1), 1, 9000, (16, 112), "boolean"),
]


def mask_of(kind: str | None, shape: tuple[int, ...]) -> Tensor | None:
    """A mask ``[B, H, G, L, S]`` that hides all keys from some queries; one of f32 also a key from all."""
    B, H, _, L, S = shape
    if kind == "boolean":
        mask = torch.rand(B, 1, 1, L, S, generator=torch.Generator().manual_seed(3)) > 0.5
        mask[-1, ..., L // 2, :] = False
    elif kind == "float":
        mask = values("normal", (1, H, 1, L, S), F32, 3)
        mask[:, -1, :, L // 3] = -torch.inf
        mask[..., 5] = -torch.inf
    else:
        return None
    return mask.expand(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("kind", "heads", "L", "S", "sizes", "mask"), ATTENTIONS)
@on_hopper
def test_every_schedule(
    dtype: torch.dtype,
    kind: str,
    heads: tuple[int, int],
    L: int,
    S: int,
    sizes: tuple[int, int],
    mask: str | None,
) -> None:
    """The bits of the kernels that store scores, and of the CPU, from any strides."""
    B, (H, G), (E, Ev) = 2, heads, sizes
    made = "normal" if kind == "peaked" else kind
    q, k, v = (
        values("normal" if mask and seed == 2 else made, shape, dtype, seed)
        for seed, shape in enumerate([(B, H, G, L, E), (B, H, S, E), (B, H, S, Ev)])
    )
    if kind == "peaked":
        q = q * 12  # most probabilities are subnormal numbers, or zeros
    given = mask_of(mask, (B, H, G, L, S))
    scale = float(np.float32(1 / math.sqrt(E)))
    key, causal = TENSOR_CORE.key, mask == "causal"
    on_gpu = [t.cuda() for t in (q, k, v)]
    gpu_mask = None if given is None else given.cuda()
    want = stored(*on_gpu, gpu_mask, causal, scale, key)
    if B * H * G * L * S * (E + Ev) < 1 << 28:
        on_cpu = stored(q, k, v, given, causal, scale, TENSOR_CORE.on(FAMILY).key)
        assert_same_bits(want.cpu(), on_cpu, "stored")
    wide = [
        torch.full((B, t.shape[-2], *t.shape[1:-2], t.shape[-1] + 8), torch.nan, dtype=dtype, device="cuda")
        for t in on_gpu
    ]
    views = [w.movedim(1, -2)[..., : t.shape[-1]].copy_(t) for w, t in zip(wide, on_gpu, strict=True)]
    schedules = attention_sm90.schedules(round_up(E, 16), round_up(Ev, 16))
    for s in (None, *schedules[(L + S) % 3 :: 3]):  # which take turns
        for operands in (on_gpu, views):
            assert attention_sm90.supports(*operands, key)
            out = torch.full_like(want, torch.nan)
            attention_sm90.attention(*operands, gpu_mask, causal, scale, key, out=out, schedule=s)
            assert_same_bits(out, want, str(s))
    shared = [t[:1, :1].expand(t.shape) for t in on_gpu[1:]]  # one head for all
    got = attention_sm90.attention(on_gpu[0], *shared, gpu_mask, causal, scale, key)
    copies = [t.contiguous() for t in shared]
    assert_same_bits(got, stored(on_gpu[0], *copies, gpu_mask, causal, scale, key), "shared")


# Batch, heads, queries, keys, sizes, and how many multiprocessors share the tiles; 0: those that are here.
SEVERAL_TILES = [
    (2, (2, 1), 200, 300, (64, 64), (1, 2, 3)),
    (1, (5, 3), 37, 260, (128, 104), (2, 3)),
    (3, (2, 5), 1, 700, (64, 80), (1, 2)),
    (1, (3, 2), 150, 513, (72, 40), (2, 3)),
    (8, (16, 2), 600, 450, (64, 64), (0,)),
]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], int]]:
    """Makes the kernel's host side believe in so many multiprocessors."""

    def set_count(count: int) -> int:
        info = replace(here, sm_count=count or here.sm_count)
        monkeypatch.setattr(devices, "device_info", lambda index: info)
        attention_sm90._prepared.cache_clear()  # it keeps the grid
        return info.sm_count

    here = devices.device_info(torch.cuda.current_device())
    yield set_count
    attention_sm90._prepared.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("B", "heads", "L", "S", "sizes", "counts"), SEVERAL_TILES)
@pytest.mark.parametrize("mask", [None, "causal", "boolean", "float"])
@on_hopper
def test_blocks_that_take_several_tiles(
    pretend: Callable[[int], int],
    dtype: torch.dtype,
    B: int,
    heads: tuple[int, int],
    L: int,
    S: int,
    sizes: tuple[int, int],
    counts: tuple[int, ...],
    mask: str | None,
) -> None:
    """As with very many keys, statistics lie in memory. The ring is as long, and as short, as it may be."""
    (H, G), (E, Ev) = heads, sizes
    shapes = (B, H, G, L, E), (B, H, S, E), (B, H, S, Ev)
    q, k, v = (values("normal", shape, dtype, seed).cuda() for seed, shape in enumerate(shapes))
    given = mask_of(mask, (B, H, G, L, S))
    given = None if given is None else given.cuda()
    rest = given, mask == "causal", float(np.float32(1 / math.sqrt(E))), TENSOR_CORE.key
    want = stored(q, k, v, *rest)
    for count, warpgroups in itertools.product(counts, (1, 2)):
        longest = attention_sm90.AttentionSchedule(warpgroups).filled(round_up(E, 16), round_up(Ev, 16))
        _, _, of_queries, of_members = attention_sm90._tiles(longest, G, L)
        multiprocessors = pretend(count)
        assert B * H * of_queries * of_members >= 2 * multiprocessors
        for s in (longest, replace(longest, stages=3)):
            out = torch.full_like(want, torch.nan)
            attention_sm90.attention(q, k, v, *rest, out=out, schedule=s)
            assert_same_bits(out, want, f"{count} multiprocessors, {s}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("group", [1, 4])
def test_decoding_and_a_full_forward_are_the_same_over_many_blocks(dtype: torch.dtype, group: int) -> None:
    T, E = 4300, 64
    q = case("normal", (1, 2 * group, T, E), dtype, "cuda")
    k, v = (case("normal", (1, 2, T, E), dtype, "cuda", seed) for seed in (1, 2))
    full = attention(q, k, v, is_causal=True, enable_gqa=True)
    for t in (0, 127, 128, 1000, 4095, 4096, 4299):
        step = attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], enable_gqa=True)
        assert_same_bits(step, full[:, :, t : t + 1], f"step {t}")


@pytest.mark.gpu
def test_in_a_graph() -> None:
    q, k = case("normal", (2, 4, 200, 64), BF16, "cuda"), case("normal", (2, 2, 5000, 64), BF16, "cuda", 1)
    want = attention(q, k, k, enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, k, enable_gqa=True)
    out.fill_(torch.nan)
    graph.replay()
    assert_same_bits(out, want)
