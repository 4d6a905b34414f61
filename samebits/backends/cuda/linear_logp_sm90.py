"""Log-probabilities on Hopper: host side of ``statistics_sm90.cu`` and ``grad_logits_sm90.cu``."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Later
from samebits.backends.cuda import compiler, devices, runtime, shapes, tensor_maps, tuned
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.plans import kept
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up
from samebits.backends.cuda.products.tensor_core_sm90 import EPILOGUE_TYPES
from samebits.backends.cuda.shapes import LogpShape, dtype_name
from samebits.backends.cuda.tensor_maps import Maps, Side, operand_maps
from samebits.backends.product import LARGEST
from samebits.backends.token_logps import GradLogitsInputs, Rows, Statistics
from samebits.functions import VOCAB_BLOCK

__all__ = ["choose", "grad_logits_later", "schedules", "spec", "statistics", "supports"]

_PARAMS = {"statistics_sm90": "128s128sPPPPPPiiiiif", "grad_logits_sm90": "128s128s128sPPPPPPPqqqiiiif"}
_KEPT = "Pqi"  # of statistics_sm90 that keeps logits, after the others
_LINE = (VOCAB_BLOCK + 4) * 4  # bytes of a line in statistics_sm90.cu


def _epilogue_bytes(entry: str, s: Sm90Schedule) -> int:
    if entry == "grad_logits_sm90":
        return s.panels
    return s.warpgroups * s.block_n * _LINE if s.swap else 0


def schedules(entry: str) -> list[Sm90Schedule]:
    """All schedules that :func:`choose` may return. None changes a bit."""
    # Two teams of one warpgroup: one runs its epilogue while the other multiplies.
    statistics = entry == "statistics_sm90"
    columns = 128 if statistics else 192  # statistics need whole blocks of the vocabulary
    found = [
        Sm90Schedule(128, 128, 64, 0, 2, 1),
        Sm90Schedule(128, columns, 64, 0, 2, 1, cluster=2, early=True),
    ]
    if statistics:  # for few tokens, the vocabulary takes the tall side of tiles
        found += [Sm90Schedule(128, tokens, 128, 0, 1, 1, swap=True) for tokens in (8, 16, 32, 64)]
    return [s.filled(_epilogue_bytes(entry, s)) for s in found]


@functools.lru_cache(maxsize=1024)
def choose(entry: str, tokens: int, vocabulary: int) -> Sm90Schedule:
    """The schedule for `tokens` tokens, and `vocabulary` entries of the vocabulary at a time."""
    alone, pairs, *few = schedules(entry)
    wide = round_up(vocabulary, pairs.block_n * pairs.cluster) > 1.15 * vocabulary  # many padded columns
    return next((s for s in few if s.block_n >= tokens), alone if tokens <= 256 or wide else pairs)


def spec(
    entry: str,
    s: Sm90Schedule,
    *,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    entropy: bool,
    folded: bool,
    kept: bool = False,
) -> compiler.KernelSpec:
    """The kernel ``statistics_sm90``, which may keep logits, or ``grad_logits_sm90``, under a schedule."""
    constants = {
        "INPUT_F16": int(dtype == torch.float16),
        "A_MN": 0,
        "B_MN": 0,
        **s.constants(),
        "FOLDED": int(folded and s.block_k > 64),
        "TRANSPOSED": int(s.swap),
        "OUTPUT": EPILOGUE_TYPES[dtype],
        "BIAS": EPILOGUE_TYPES[bias],
        "PANEL": s.panel if entry == "grad_logits_sm90" else 0,
        "RAGGED": 0,
        "ENTROPY": int(entropy),
        **({"KEPT": int(kept)} if entry == "statistics_sm90" else {}),
    }
    return compiler.KernelSpec(
        source=f"{entry}.cu",
        entry=entry,
        params=_PARAMS[entry] + _KEPT * kept,
        constants=tuple(constants.items()),
        block=s.threads,
        smem=s.smem(0, False, False) + _epilogue_bytes(entry, s),
        cluster=(s.cluster, 1, 1),
        programmatic=True,
    )


def supports(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these kernels take ``hidden[tokens, D]`` and ``weight[V, D]``."""
    return (
        devices.device_info(hidden.get_device()).arch.runs("statistics_sm90")
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.numel() > 0
        and max(*hidden.shape, *weight.shape) <= LARGEST
        and (bias is None or bias.is_contiguous())
        and _readable(hidden)
        and _readable(weight)
    )


def _readable(x: Tensor) -> bool:
    """Whether the copy engine can read the rows of `x`."""
    row = x.stride(0)
    return x.stride(1) == 1 and (len(x) == 1 or (row > 0 and row % 8 == 0)) and x.data_ptr() % 16 == 0


@kept
def _prepared(
    entry: str,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    entropy: bool,
    kept: bool,
    tokens: int,
    vocabulary: int,
    features: int,
    hidden_stride: int,
    weight_stride: int,
    device: int,
    schedule: Sm90Schedule | None,
) -> tuple[Sm90Schedule, runtime.Kernel, tuple[int, int, int], Maps, Maps]:
    """The schedule, the kernel, the grid, and the tensor maps of hidden states and weights."""
    s = schedule or _tuned(entry, dtype, tokens, vocabulary, features, device)
    s = s or choose(entry, tokens, vocabulary)
    folded = features % 64 == 0
    rows, columns = (vocabulary, tokens) if s.swap else (tokens, vocabulary)
    (hidden_block, hidden_sharers), (weight_block, weight_sharers) = (
        ((s.block_n, 1), (s.block_m, s.cluster)) if s.swap else ((s.block_m, s.cluster), (s.block_n, 1))
    )
    how = folded and s.block_k > 64, s.l2_promotion
    hidden = Side(tokens, features, 0, hidden_stride, 1)
    weight = Side(vocabulary, features, 0, weight_stride, 1)
    return (
        s,
        runtime.load(
            spec(entry, s, dtype=dtype, bias=bias, entropy=entropy, folded=folded, kept=kept), device
        ),
        s.grid(rows, columns, 1, devices.device_info(device).sm_count),
        operand_maps(dtype, hidden, 1, False, hidden_block, s.block_k, hidden_sharers, *how),
        operand_maps(dtype, weight, 1, False, weight_block, s.block_k, weight_sharers, *how),
    )


def _tuned(
    entry: str, dtype: torch.dtype, tokens: int, vocabulary: int, features: int, device: int
) -> Sm90Schedule | None:
    """A tuned table's schedule. Only statistics have some: gradients have two schedules."""
    if entry != "statistics_sm90":
        return None
    shape = LogpShape(dtype_name(dtype), tokens, vocabulary, features)
    shapes.met(shape)
    found = tuned.find(shape, device, lambda name: [(None, s) for s in schedules(entry)])
    return None if found is None else found[1]


def _prepare(
    entry: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    entropy: bool,
    schedule: Sm90Schedule | None,
    kept: bool = False,
) -> tuple[Sm90Schedule, runtime.Kernel, tuple[Any, ...]]:
    """The schedule, the kernel, and the first arguments of its launch."""
    (tokens, features), vocabulary = hidden.shape, weight.shape[0]
    s, kernel, grid, hidden_maps, weight_maps = _prepared(
        *(entry, hidden.dtype, None if bias is None else bias.dtype, entropy, kept),
        *(tokens, vocabulary, features, hidden.stride(0), weight.stride(0)),
        *(hidden.get_device(), schedule),
    )
    maps = hidden_maps[hidden.data_ptr()], weight_maps[weight.data_ptr()]
    return s, kernel, (grid, *(maps[::-1] if s.swap else maps))


def load(entry: str, hidden: Tensor, weight: Tensor, schedule: Sm90Schedule) -> None:
    """Compile and load a kernel without bias and entropy for operands like these."""
    _prepare(entry, hidden, weight, None, False, schedule)


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    keep: Tensor | None = None,
    *,
    schedule: Sm90Schedule | None = None,
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``.

    The vocabulary's first logits go into `keep`, with as many columns: ``token_logps.room_for_logits``.
    `schedule` replaces the default choice. It never changes a bit.
    """
    (tokens, features), vocabulary = hidden.shape, weight.shape[0]
    kept = keep is not None
    s, kernel, begin = _prepare("statistics_sm90", hidden, weight, bias, rows.with_entropy, schedule, kept)
    out = Statistics.empty(rows)
    kernel.launch(
        *begin,
        *(address(bias), rows.target.data_ptr()),
        *(t.data_ptr() for t in (out.m, out.s, out.u, out.target_logit)),
        *((vocabulary, tokens) if s.swap else (tokens, vocabulary)),
        *(features, s.group, out.m.shape[1], rows.scale),
        *(() if keep is None else (keep.data_ptr(), keep.stride(0), keep.shape[1])),
    )
    return out


def grad_logits_later(out: Tensor, given: GradLogitsInputs, *, schedule: Sm90Schedule | None = None) -> Later:
    """Write dz of a part of the vocabulary, in the dtype of ``hidden``, into ``out``.

    ``out`` has the shape of ``logits_in_pieces.empty_grads``. `schedule` replaces the default choice.
    """
    hidden, weight, bias, part, rows, grad, grad_entropy = given
    weight, bias = weight[part], None if bias is None else bias[part]
    (tokens, features), width = hidden.shape, weight.shape[0]
    stride = out.stride(0)
    entropy = grad_entropy is not None
    s, kernel, begin = _prepare("grad_logits_sm90", hidden, weight, bias, entropy, schedule)
    out_map = tensor_maps.tensor_map(
        *(out.data_ptr(), out.dtype, (width, tokens, 1), (stride * 2, stride * tokens * 2)),
        *((s.panel, 64, 1), s.panel * 2),
    )
    return partial(
        kernel.launch,
        *begin,
        out_map,
        *(address(bias), rows.target.data_ptr()),
        *(t.data_ptr() for t in (rows.shift, rows.log_sum, rows.entropy, grad)),
        address(grad_entropy),
        *(part.start, rows.vocabulary, rows.ignore_index),
        *(tokens, width, features, s.group, rows.scale),
    )
