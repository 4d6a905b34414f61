"""Steps of routers, as models of ``transformers`` take them, and operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.testing import values

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """Arguments of :func:`samebits.topk_routing`."""

    name: str
    experts: int
    k: int
    score: Any = "softmax"
    biased: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    dtype: torch.dtype = F32

    def __str__(self) -> str:
        return self.name

    def options(self, device: Any = "cpu") -> dict[str, Any]:
        found = {
            name: getattr(self, name)
            for name in self._fields
            if name not in ("name", "experts", "k", "biased")
        }
        return found | {"bias": self.bias(device)}

    def bias(self, device: Any = "cpu") -> Tensor | None:
        return values("normal", (self.experts,), F32, 7).to(device) if self.biased else None


_DEEPSEEK: dict[str, Any] = {
    "score": "sigmoid",
    "biased": True,
    "renormalize": True,
    "eps": 1e-20,
    "scale": 2.5,
}
CASES = [
    Case("qwen3_moe", 128, 8, renormalize=True, dtype=BF16),
    Case("olmoe", 64, 8, dtype=BF16),
    Case("mixtral", 8, 2, renormalize=True),
    Case("qwen3_next", 512, 10, renormalize=True, dtype=F16),
    Case("glm4_moe", 160, 8, **_DEEPSEEK),
    Case("deepseek_v3", 256, 8, groups=8, top_groups=4, **_DEEPSEEK),
    Case("few groups", 48, 3, "sigmoid", groups=12, top_groups=1, scale=0.5),
    Case("softmax in groups", 66, 16, groups=33 // 3, top_groups=9, renormalize=True),
    Case("gpt_oss", 32, 4, "logits", dtype=BF16),
    Case("granite", 129, 16, "logits"),
    Case("one", 1, 1, renormalize=True),
    Case("most", 1024, 16, "sigmoid", biased=True),
]


def logits_of(kind: str, tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Random ones; with many equal ones; with NaN, infinities and rows of them; all equal."""
    x = values("normal", (tokens, experts), dtype, tokens + experts)
    if kind == "ties":
        return (x * 2).round() / 2 * torch.where(x < -1, -0.0, 1.0).to(dtype)
    if kind == "equal":
        return torch.zeros_like(x)
    if kind == "special" and tokens:
        some = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e4], dtype=dtype)
        hit = torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
        which = torch.randint(6, x.shape, generator=torch.Generator().manual_seed(4))
        x = torch.where(hit < 0.05, some[which], x)
        x[::3] = values("normal", x[::3].shape, dtype, 9) * 40
        x[::7], x[1::7] = -torch.inf, torch.nan
        x[2::7] = torch.where(hit[2::7] < 0.5, -torch.inf, x[2::7])
    return x


def steps(logits: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """One by one, as in the modelling code of Qwen3-MoE, DeepSeek-V3 and GPT-OSS."""
    if case.score == "logits":
        top, chosen = torch.topk(logits, case.k, dim=-1)
        if top.dtype == case.dtype:
            return F.softmax(top, dim=1, dtype=case.dtype), chosen
        return F.softmax(top.float(), dim=1).to(case.dtype), chosen
    wide = logits.float()
    scores = F.softmax(wide, dim=-1) if case.score == "softmax" else wide.sigmoid()
    bias, each = case.bias(logits.device), (case.groups, case.experts // case.groups)
    choice = scores if bias is None else scores + bias
    if case.groups > 1:
        of_groups = choice.view(-1, *each).topk(2, dim=-1)[0].sum(dim=-1)
        chosen = torch.topk(of_groups, k=case.top_groups, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(of_groups).scatter_(1, chosen, 1)
        mask = mask.unsqueeze(-1).expand(-1, *each).reshape(-1, case.experts)
        choice = choice.masked_fill(~mask.bool(), float("-inf"))
    chosen = torch.topk(choice, k=case.k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, chosen)
    if case.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + case.eps if case.eps else total)
    if case.scale != 1.0:
        weights = weights * case.scale
    return weights.to(case.dtype), chosen
