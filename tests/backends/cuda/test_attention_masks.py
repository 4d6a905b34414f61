"""Float masks on Hopper's kernel: how it reads them, and its bits under every schedule."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import TENSOR_CORE
from samebits.backends.attention import Attention
from samebits.backends.cuda.attention import sm90, universal
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.backends.reference import attention as reference
from samebits.testing import assert_same_bits, values
from tests.support.cubins import resources
from tests.support.devices import ARCH, FAMILY
from tests.support.fake_gpu import fake_gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
hopper = pytest.mark.skipif(ARCH.own != "sm90", reason="Hopper's kernel")


def masked(
    queries: int,
    keys: int,
    of_mask: torch.dtype = BF16,
    *,
    form: str = "causal",
    heads: tuple[int, int] = (1, 4),
    sizes: tuple[int, int] = (128, 128),
    batch: int = 2,
    **options: Any,
) -> Attention:
    """A call on CPU tensors.

    Args:
        form: of the mask: causal; with ``gaps``; ``special``, with infinities and NaN; one of each ``head``;
            the same ``row`` for all queries; ``columns`` that lie side by side; ``zeros`` that add nothing;
            ``padded`` by 13 keys in the first sequence and 8 in the next; in ``spans`` of 50 keys.
        heads: of k, and of q for each.
    """
    shape = (batch, heads[0] * heads[1] if form == "head" else 1, 1 if form == "row" else queries, keys)
    mask = values("normal", shape, of_mask, 5)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(6))
    if form == "zeros":
        mask = torch.zeros_like(mask)
    later = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    if form == "special":
        mask[drawn < 0.1] = -math.inf
        mask[(drawn > 0.1) & (drawn < 0.101)] = math.inf
        mask[(drawn > 0.2) & (drawn < 0.2005)] = math.nan
    elif form == "gaps":
        mask.masked_fill_(later | (drawn[:, :, :1] < 0.2), -math.inf)
    elif form != "row":
        mask.masked_fill_(later, -math.inf)
    if form == "padded":
        for i in range(batch):
            mask[i, ..., : 13 - 5 * i] = -math.inf
    elif form == "spans":
        spans = torch.arange(keys) // 50
        mask.masked_fill_(spans != spans[keys - queries :, None], -math.inf)
    mask = mask.expand(batch, heads[0] * heads[1], queries, keys)
    if form == "columns":
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    kv, size = heads[0], sizes[0]
    return Attention(
        values("normal", (batch, queries, kv * heads[1], size), BF16, 1),
        values("normal", (batch, keys, kv, size), BF16, 2),
        values("normal", (batch, keys, kv, sizes[1]), BF16, 3),
        TENSOR_CORE.on(FAMILY).key,
        0.125,
        mask=mask,
        **options,
    )


@pytest.mark.parametrize(
    ("x", "lines"),
    [
        (masked(130, 256), 4),  # 16 rows of a warp, of 4 heads side by side
        (masked(130, 256, heads=(4, 1)), 16),
        (masked(130, 256, heads=(1, 7)), 4),
        (masked(1, 256), 2),  # and 8 rows of a tile
        (masked(130, 256, form="head"), 16),
        (masked(130, 257), 0),
        (masked(130, 260), 0),
        (masked(130, 260, F32), 4),
        (masked(130, 256, form="row"), 0),
        (masked(130, 256, form="columns"), 0),
    ],
    ids=str,
)
def test_lines_of_a_mask_that_one_copy_brings(x: Attention, lines: int) -> None:
    """None where the copy engine cannot read the mask."""
    with fake_gpu():
        assert sm90.supports(x)
        plan = sm90.make_plan(x)
        assert plan.strides[-1] == lines
        assert len(plan.maps) == 4
        assert not sm90.supports(replace(x, window=(5, 0)))


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("of_mask", [None, torch.bool, BF16, F32], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_shared_memory_is_what_kernels_declare(of_mask: torch.dtype | None, size: int) -> None:
    """So that tiles begin where there is room for them."""
    of = sm90.HopperVariant(BF16, size, size, False, False, of_mask)
    for s in sm90.schedules(of):
        declared = resources(sm90.spec(of, s), "sm_90a").static_smem
        # Neither more nor less: what the first tile is rounded up by depends on it.
        assert round_up(declared, 16) == round_up(s.static_smem(of), 16), s


# ---- on a GPU


def on_gpu(x: Attention) -> Attention:
    def moved(t: Tensor) -> Tensor:
        flat = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).cuda()
        return flat.as_strided(t.shape, t.stride(), t.storage_offset())

    names = ("q", "k", "v", "mask", "sinks", "key_start", "key_length")
    given: dict[str, Any] = {n: moved(t) for n in names if (t := getattr(x, n)) is not None}
    return replace(x, **given)


def check(x: Attention) -> None:
    """Every schedule, the choice and the universal kernel against the reference; on outputs of NaN."""
    want = reference.forward(x)
    on = on_gpu(x)
    for s in (None, *sm90.schedules(sm90.variant(on))):
        out = torch.full((*x.q.shape[:-1], x.v.shape[-1]), math.nan, dtype=x.q.dtype, device="cuda")
        for got, right in zip(sm90.make_plan(on, s).run(on, out), want, strict=True):
            assert_same_bits(got.cpu(), right)
    for got, right in zip(universal.forward(on), want, strict=True):
        assert_same_bits(got.cpu(), right)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("of_mask", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(
    "form", ["causal", "gaps", "special", "head", "row", "columns", "zeros", "padded", "spans"]
)
def test_every_schedule_under_float_masks(form: str, of_mask: torch.dtype) -> None:
    """The copy engine reads masks from multiples of 16 bytes only: padding and spans begin anywhere."""
    check(masked(150, 584, of_mask, form=form))
    check(masked(70, 301, of_mask, form=form, sizes=(64, 64), heads=(2, 3), batch=1))
    check(masked(1, 1032, of_mask, form=form, heads=(1, 8)))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("of_mask", [BF16, F32], ids=str)
def test_what_lies_outside_of_sequences_adds_nothing(of_mask: torch.dtype) -> None:
    x = masked(90, 456, of_mask, form="special", batch=3)
    assert x.mask is not None
    starts, ends = (torch.tensor(t, dtype=torch.int32) for t in ((0, 7, 130), (456, 100, 333)))
    x.mask[1, 0, :, 100:] = math.nan  # of all heads
    x.mask[2, 0, :, 333:] = math.inf
    check(replace(x, key_start=starts, key_length=ends))
