"""Batch-invariant operators for PyTorch, from matrix products to attention, with specified bits."""

import importlib
from typing import TYPE_CHECKING, Any

from samebits import nn, transformers
from samebits._version import __version__
from samebits.backends import use_backend
from samebits.backends.cuda.shapes import record_shapes
from samebits.backends.cuda.tuned import load_tuned
from samebits.backends.recurrent import RecurrentState
from samebits.contract import (
    AMPERE,
    FMA,
    FP8,
    HOPPER,
    TENSOR_CORE,
    Contract,
    Exp2Model,
    MmaModel,
    use_mma_model,
)
from samebits.fusion import fuse
from samebits.mode import (
    UncoveredError,
    batch_invariant,
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    inherit_mode,
    is_batch_invariant_mode_enabled,
    set_batch_invariant_mode,
)
from samebits.nn import convert
from samebits.ops.add_rms_norm import add_rms_norm
from samebits.ops.addmm import addmm_
from samebits.ops.attention import attention
from samebits.ops.bmm import bmm
from samebits.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from samebits.ops.delta_rule import gated_delta_rule, kda, lightning_attention
from samebits.ops.gated import gated
from samebits.ops.grouped_mm import grouped_mm
from samebits.ops.linear import linear
from samebits.ops.linear_logp import linear_logp
from samebits.ops.logp import gather_logp, logp
from samebits.ops.matmul import matmul
from samebits.ops.norm_rotary import norm_rotary
from samebits.ops.quantize import quantize
from samebits.ops.rotary import rotary
from samebits.ops.scaled_grouped_mm import scaled_grouped_mm
from samebits.ops.scaled_mm import scaled_mm
from samebits.ops.selective_scan import selective_scan
from samebits.ops.silu_mul_quantize import silu_mul_quantize
from samebits.ops.ssd import ssd
from samebits.ops.state_space import selective_state_update
from samebits.ops.topk_routing import topk_routing
from samebits.prepare import prepare

if TYPE_CHECKING:
    from samebits import distributed, routing
    from samebits.tools.audit import audit

__all__ = [
    "AMPERE",
    "FMA",
    "FP8",
    "HOPPER",
    "TENSOR_CORE",
    "Contract",
    "Exp2Model",
    "MmaModel",
    "RecurrentState",
    "UncoveredError",
    "__version__",
    "add_rms_norm",
    "addmm_",
    "attention",
    "audit",
    "batch_invariant",
    "bmm",
    "causal_conv1d",
    "causal_conv1d_update",
    "convert",
    "disable_batch_invariant_mode",
    "distributed",
    "enable_batch_invariant_mode",
    "fuse",
    "gated",
    "gated_delta_rule",
    "gather_logp",
    "grouped_mm",
    "is_batch_invariant_mode_enabled",
    "kda",
    "lightning_attention",
    "linear",
    "linear_logp",
    "load_tuned",
    "logp",
    "matmul",
    "nn",
    "norm_rotary",
    "prepare",
    "quantize",
    "record_shapes",
    "rotary",
    "routing",
    "scaled_grouped_mm",
    "scaled_mm",
    "selective_scan",
    "selective_state_update",
    "set_batch_invariant_mode",
    "silu_mul_quantize",
    "ssd",
    "topk_routing",
    "transformers",
    "use_backend",
    "use_mma_model",
]

inherit_mode()


def __getattr__(name: str) -> Any:
    if name == "audit":  # loaded only when it is used
        from samebits.tools.audit import audit

        return audit
    if name in ("distributed", "routing"):
        return importlib.import_module(f"samebits.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
