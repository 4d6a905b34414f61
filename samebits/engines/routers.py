"""Routers of experts: what those of ``transformers`` compute, in two launches.

A router is a product, and what :func:`samebits.topk_routing` does with logits. Which of its forms one is
shows by what it computes: each that may be meant is compared with the router's own code, by bits. A router
that is none of them runs its own code.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samebits.mode import batch_invariant
from samebits.ops.linear import linear
from samebits.ops.topk_routing import topk_routing
from samebits.testing import bits

__all__ = ["fuse_router"]

_LOGITS = (2.0, 0.0), (200.0, 0.0), (1e-8, 0.0), (2.0, -30.0), (2.0, -45.0)
"""Deviations and means, of a token each: scores are ordinary, 0 or 1, all equal, or tiny."""
_TOKENS = 12 * len(_LOGITS)
_BIASES = (0.1, 0.0), (3.0, 0.0), (0.1, -5.0)
"""Deviations and means: scores matter, hardly matter, or are below 0, which some give hidden groups."""
_BIAS = "e_score_correction_bias"


class _Form(NamedTuple):
    """What a router computes.

    Attributes:
        wide: whether the product is one of float32.
        rounds: whether weights are in the router's dtype, or in float32.
        options: of :func:`samebits.topk_routing`, but for `bias` and `dtype`.
        biased: whether it has a bias.
    """

    wide: bool
    rounds: bool
    options: dict[str, Any]
    biased: bool

    def run(self, router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight: Tensor = router.weight
        x, dtype = hidden_states.reshape(-1, weight.shape[1]), weight.dtype if self.rounds else torch.float32
        if self.wide:
            x, weight = x.to(torch.float32), weight.to(torch.float32)
        logits = linear(x, weight, getattr(router, "bias", None))
        bias = getattr(router, _BIAS).to(torch.float32) if self.biased else None
        return logits, *topk_routing(logits, bias=bias, dtype=dtype, **self.options)

    def agrees(self, router: Any, x: Tensor, theirs: tuple[Tensor, Tensor, Tensor]) -> bool:
        """Whether it has the bits of the router's result."""
        _, weights, experts = self.run(router, x)
        _, wanted, chosen = theirs
        return torch.equal(experts, chosen) and _same(weights, wanted)


def fuse_router(router: nn.Module) -> None:
    """Let a router of ``transformers`` compute in two launches, with the same bits, if there is such a form.

    Its weight is loaded, or will be.
    """
    form = _form_of(router)
    if form is not None:
        router.forward = functools.partial(form.run, router)  # whose copies are copies' own


_known: dict[Any, _Form | None] = {}


def _form_of(router: Any) -> _Form | None:
    """The form that has a router's bits. None if none has."""
    if "forward" in vars(router):  # somebody else's
        return None
    values = tuple(sorted((name, v) for name, v in vars(router).items() if _is_plain(v)))
    key = type(router), values, tuple((n, t.shape, t.dtype) for n, t in _tensors(router))
    if key not in _known:
        _known[key] = _found(router)
    return _known[key]


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, (int, float, str))


def _tensors(router: nn.Module) -> list[tuple[str, Tensor]]:
    return [*router.named_parameters(), *router.named_buffers()]


def _found(router: Any) -> _Form | None:
    """The form that has a router's bits, by random weights on the CPU."""
    try:
        forms = [*_forms(router)]
        with torch.no_grad(), torch.device("cpu"), batch_invariant():
            theirs = [(probe, x, type(router).forward(probe, x)) for probe, x in _probes(router)]
            return next((form for form in forms if all(form.agrees(*of) for of in theirs)), None)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None  # it takes or returns something else, or has more experts than can be taken


def _forms(router: Any) -> Iterator[_Form]:
    """Those that a router may have, by its tensors and numbers."""
    k, renormalizes = router.top_k, dict.fromkeys((getattr(router, "norm_topk_prob", True), True, False))
    if hasattr(router, _BIAS):
        of = {"k": k, "score": "sigmoid", "eps": 1e-20, "scale": float(router.routed_scaling_factor)}
        of |= {"groups": router.num_group, "top_groups": router.topk_group}
        for renormalize in renormalizes:
            yield _Form(True, False, {**of, "renormalize": bool(renormalize)}, True)
        return
    for rounds in (True, False):
        for renormalize in renormalizes:
            yield _Form(False, rounds, {"k": k, "renormalize": bool(renormalize)}, False)
        yield _Form(False, rounds, {"k": k, "score": "logits"}, False)


def _probes(router: Any) -> Iterator[tuple[Any, Tensor]]:
    """Copies with random weights, some of which are those of other experts; and tokens.

    They have no modules and no configuration: a router that looks at such fails.
    The last one is in float32, as 16 bits hide how weights were computed. But its tokens are not, if it has a
    bias, so that a router shows whose dtype its results have.
    """
    own, biased = router.weight.dtype, hasattr(router, _BIAS)
    generator = torch.Generator().manual_seed(0)
    for i, (dtype, (deviation, mean)) in enumerate(
        [*((own, bias) for bias in _BIASES), (torch.float32, _BIASES[0])]
    ):
        probe = copy.copy(router)
        for attribute in [a for a, v in vars(probe).items() if not (a.startswith("_") or _is_plain(v))]:
            delattr(probe, attribute)
        probe._parameters, probe._buffers, probe._modules = {}, {}, {}
        for name, t in router.named_parameters():
            made = _random(t, generator) * (t.shape[1] ** -0.5 if t.ndim == 2 else 1.0)
            if t.ndim == 2:
                made[:, 0] = 1.0
            half = len(made) // 4 * 2
            made[1:half:2] = made[0:half:2]
            made = made.to(dtype if t.dtype == own else t.dtype)
            probe._parameters[name] = nn.Parameter(made, requires_grad=False)
        for name, t in router.named_buffers():
            probe._buffers[name] = (_random(t, generator) * deviation + mean).to(t.dtype)
        x = torch.randn(_TOKENS, router.weight.shape[1], generator=generator, dtype=torch.float32)
        deviations, means = torch.tensor(_LOGITS).repeat(_TOKENS // len(_LOGITS), 1).unbind(1)
        x *= deviations[:, None]
        x[:, 0], x[-1], x[-2, -1] = means, torch.nan, torch.inf
        yield probe, x.to(torch.bfloat16 if i == len(_BIASES) and biased else dtype)


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float32)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether bits are the same, but for those of NaN, which PyTorch's casts choose."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(bits(t.masked_fill(t.isnan(), torch.nan)) for t in (a, b)))
