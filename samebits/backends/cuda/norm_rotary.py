"""RMS norms and rotary positions of heads on CUDA tensors: ``kernels/norm_rotary{,_backward}.cu``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.backends.cuda import add_rms_norm, compiler, rotary, runtime
from samebits.backends.cuda.operands import TYPES, address
from samebits.functions import VOCAB_BLOCK

_THREADS = 256
_HEADS = 12 * "q" + rotary.TABLE + "qqq" + "iii" + "ff" + "i"
_PARAMS = {"norm_rotary": 6 * "P" + _HEADS, "norm_rotary_backward": 10 * "P" + 6 * "q" + _HEADS + "f"}
_LAYOUTS = {"halves": "HALVES", "pairs": "PAIRS"}

Two = tuple[Tensor | None, Tensor | None]


def kernel_spec(
    entry: str,
    x: torch.dtype,
    param: torch.dtype,
    trig: torch.dtype,
    layout: str,
    full: bool,
    lanes: int,
    gradients: str = "none",
    *,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``norm_rotary.cu`` or ``norm_rotary_backward.cu``."""
    types = ("IN", TYPES[x]), ("PARAM", TYPES[param]), ("TRIG", TYPES[trig])
    turned = ("LAYOUT", _LAYOUTS[layout]), ("FULL", int(full)), ("GRADIENTS", gradients.upper())
    shared = ("LANES", lanes), ("WARPS", 1), ("PASSES", 1), ("VECTOR", 16 // x.itemsize), ("WHOLE", 0)
    return compiler.KernelSpec(
        *(f"{entry}.cu", entry, _PARAMS[entry], (*types, *turned, *shared)),
        block=_THREADS,
        programmatic=programmatic,
    )


_kernel = runtime.loader(kernel_spec)


def norm_rotary(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    pairs: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[..., H, D]`` with norms of heads and then positions."""
    device = q.get_device()
    q_out = runtime.empty(q.shape, q.dtype, device)
    k_out = runtime.empty((0,) if k is None else k.shape, q.dtype, device)
    into = None if k is None else k_out
    norm_rotary_into(
        q, k, q_weight, k_weight, cos, sin, positions, q_out, into, eps, offset, once, pairs, layout
    )
    return q_out, k_out


def norm_rotary_into(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    pairs: int,
    layout: str,
) -> None:
    """The same into `q_out` and `k_out`, which may be `q` and `k`, but for the layout "pairs to halves"."""
    weights = q_weight, k_weight
    done = _launch(
        *("norm_rotary", (), (q, k), weights, (q_out, k_out), (), cos, sin, positions),
        *(eps, offset, once, pairs, layout, "none"),
    )
    if not done:
        normed = [
            None if x is None else add_rms_norm.add_rms_norm(x, None, w, eps, offset, once, q.dtype)[0]
            for x, w in zip((q, k), weights, strict=True)
        ]
        assert normed[0] is not None
        rotary.rotary_into(normed[0], normed[1], cos, sin, positions, q_out, k_out, pairs, layout)


def norm_rotary_backward(
    of_q: Tensor | None,
    of_k: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    pairs: int,
    layout: str,
    gradients: str,
    of_q_weight: bool,
    of_k_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `q` and `k`, and what is summed over heads for those of the weights: `q`'s, then `k`'s."""
    device, dtype = q.get_device(), torch.float32 if once else q.dtype
    grads, xs, weights = (of_q, of_k), (q, k), (q_weight, k_weight)
    asked = of_q_weight, of_k_weight

    def empty(i: int, of: torch.dtype, there: bool) -> Tensor:
        g = grads[i]
        return runtime.empty((0,) if g is None or not there else g.shape, of, device)

    found = [empty(i, q.dtype, True) for i in (0, 1)]
    terms = [empty(i, dtype, asked[i] and weights[i] is not None) for i in (0, 1)]
    given = [i for i in (0, 1) if grads[i] is not None]

    def of(tensors: Sequence[Tensor | None]) -> Two:
        return (*(tensors[i] for i in given), None)[:2]  # type: ignore[return-value]

    done = _launch(
        *("norm_rotary_backward", of(grads), of(xs), of(weights), of(found), of(terms), cos, sin, positions),
        *(eps, offset, once, pairs, layout, gradients),
    )
    if not done:
        back = rotary.rotary_backward(of_q, of_k, cos, sin, positions, pairs, layout, gradients)
        for i in given:
            x = xs[i]
            assert x is not None
            found[i], terms[i] = add_rms_norm.add_rms_norm_backward(
                back[i], None, x, weights[i], eps, offset, once, asked[i]
            )
    return found[0], found[1], terms[0], terms[1]


def _launch(
    entry: str,
    grads: Sequence[Tensor | None],
    xs: Two,
    weights: Two,
    outs: Two,
    terms: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    pairs: int,
    layout: str,
    gradients: str,
) -> bool:
    """Run a kernel, if it takes these operands. Of two tensors the first is there."""
    lead = xs[0]
    assert lead is not None
    n, size = lead.shape[-1], lead.itemsize
    heads = [0 if t is None else t.shape[-2] for t in xs]
    count = lead.shape[:-2].numel() * sum(heads)
    if count * n == 0:
        return True
    params = {w.dtype for w in weights if w is not None} or {torch.float32}
    run = 16 // size
    whole = n % run == 0 and (pairs if layout == "halves" else 2 * pairs) % run == 0
    if layout not in _LAYOUTS or not whole or n > 2 * VOCAB_BLOCK or len(params) > 1:
        return False
    cos, sin, at = rotary.placed(cos, sin, positions, lead.shape[:-2])
    weights = tuple(w if w is None or w.stride(0) == 1 else w.contiguous() for w in weights)  # type: ignore[assignment]
    rows = [None if t is None else rotary.head_rows(t, 2) for t in (*grads, *xs, *outs)]
    low = 0
    for t in (*rows, cos, sin):
        if t is not None:
            low |= t.data_ptr() | functools.reduce(int.__or__, t.stride()[:-1], 0) * t.itemsize
    for t in (*weights, *terms):
        low |= address(t)
    if low & 15:
        return False
    batch, tokens = rows[len(grads)].shape[:2]  # type: ignore[union-attr]
    steps = [(0, 0, 0) if t is None else t.stride()[:3] for t in rows]
    (param,) = params
    lanes = 8 if n <= VOCAB_BLOCK else 16
    kernel = _kernel(
        *(lead.get_device(), entry, lead.dtype, param, cos.dtype),
        *(layout, cos.shape[-1] == 2 * pairs, lanes, gradients),
    )
    of_terms = [0 if t is None or t.numel() == 0 else t.data_ptr() for t in terms]
    addresses = *map(address, rows[: -len(outs)]), *map(address, weights), *map(address, rows[-2:]), *of_terms
    kernel.launch(
        (-(-batch * tokens * sum(heads) * lanes // _THREADS), 1, 1),
        *(*addresses, *itertools.chain(*steps), *rotary.table_of(cos, sin, at)),
        *(tokens, batch * tokens * sum(heads), n, *heads, pairs, eps, offset, int(once)),
        *((1 / n,) if grads else ()),
    )
    for written, into in zip(rows[-2:], outs, strict=True):
        if into is not None and written is not None and written.data_ptr() != into.data_ptr():
            into.copy_(written.view(into.shape))
    return True
