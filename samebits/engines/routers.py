"""Routers of experts: what those of ``transformers`` compute, in two launches.

A router is a product, and what :func:`samebits.topk_routing` does with logits. Which of its forms one is
shows by what it computes: each that may be meant is compared with the router's own code, by bits. A router
that is none of them runs its own code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samebits.mode import batch_invariant
from samebits.ops.linear import linear
from samebits.ops.topk_routing import topk_routing
from samebits.testing import bits

__all__ = ["fuse_router"]

_TOKENS = 64
_BIAS = "e_score_correction_bias"


class _Form(NamedTuple):
    """What a router computes.

    Attributes:
        wide: whether the product is one of float32.
        options: of :func:`samebits.topk_routing`, but for `bias`.
        biased: whether it has one.
    """

    wide: bool
    options: dict[str, Any]
    biased: bool

    def run(self, router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight: Tensor = router.weight
        x = hidden_states.reshape(-1, weight.shape[1])
        if self.wide:
            x, weight = x.to(torch.float32), weight.to(torch.float32)
        logits = linear(x, weight, getattr(router, "bias", None))
        bias = getattr(router, _BIAS) if self.biased else None
        return logits, *topk_routing(logits, bias=bias, **self.options)


def fuse_router(router: nn.Module) -> None:
    """Let a router of ``transformers`` compute in two launches, with the same bits, if there is such a form.

    Its weight is loaded, or will be.
    """
    form = _form_of(router)
    if form is not None:
        router.forward = lambda hidden_states: form.run(router, hidden_states)


_known: dict[Any, _Form | None] = {}


def _form_of(router: Any) -> _Form | None:
    numbers = tuple(sorted((n, v) for n, v in vars(router).items() if isinstance(v, (int, float))))
    tensors = tuple((n, t.shape, t.dtype) for n, t in _tensors(router))
    key = type(router), numbers, tensors
    if key not in _known:
        _known[key] = _found(router)
    return _known[key]


def _tensors(router: nn.Module) -> list[tuple[str, Tensor]]:
    return [*router.named_parameters(), *router.named_buffers()]


def _found(router: Any) -> _Form | None:
    """The form that has a router's bits, by random weights on the CPU."""
    try:
        forms = [*_forms(router)]
    except AttributeError:
        return None
    probe, x = _probe(router)
    with torch.no_grad(), batch_invariant():
        want = type(router).forward(probe, x)
        for form in forms:
            try:
                got = form.run(probe, x)
            except (TypeError, ValueError):  # as it has more experts than are taken
                continue
            if _same(got[1], want[1]) and torch.equal(got[2], want[2]):
                return form
    return None


def _forms(router: Any) -> Iterator[_Form]:
    """Those that a router may have, by its tensors and numbers."""
    k, dtype, biased = router.top_k, router.weight.dtype, hasattr(router, _BIAS)
    dtypes = dict.fromkeys((dtype, torch.float32))
    renormalizes = getattr(router, "norm_topk_prob", True), True, False
    if biased:
        of = {"k": k, "score": "sigmoid", "eps": 1e-20, "scale": float(router.routed_scaling_factor)}
        of |= {"groups": router.num_group, "top_groups": router.topk_group}
        for renormalize in dict.fromkeys(renormalizes):
            yield _Form(True, {**of, "renormalize": bool(renormalize)}, True)
        return
    for to in dtypes:
        for renormalize in dict.fromkeys(renormalizes):
            yield _Form(False, {"k": k, "renormalize": bool(renormalize), "dtype": to}, False)
        yield _Form(False, {"k": k, "score": "logits", "dtype": to}, False)


def _probe(router: Any) -> tuple[Any, Tensor]:
    """A copy with random weights, some of which are those of other experts; and tokens."""
    probe, generator = copy.copy(router), torch.Generator().manual_seed(0)
    probe._parameters, probe._buffers = {}, {}

    def random(like: Tensor, scale: float = 1.0) -> Tensor:
        return (torch.randn(like.shape, generator=generator) * scale).to(like.dtype)

    hidden = router.weight.shape[1]
    for name, t in router.named_parameters():
        made = random(t, 2.0 * hidden**-0.5 if t.ndim == 2 else 1.0)
        made[1 : len(made) // 2 : 2] = made[0 : len(made) // 2 - 1 : 2][: len(made[1 : len(made) // 2 : 2])]
        probe._parameters[name] = nn.Parameter(made, requires_grad=False)
    for name, t in router.named_buffers():
        probe._buffers[name] = random(t, 0.1)
    return probe, random(router.weight.new_empty(_TOKENS, hidden, device="meta"))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
