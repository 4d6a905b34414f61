"""TorchTitan's batch-invariant mode on this library's operators: what its ``debug.batch_invariant`` calls.

TorchTitan 0.3.0 imports ``enable_batch_invariant_mode`` from a package ``batch_invariant_ops``. The one in
``shims/`` of samebits' repository has the functions of this module, and nothing else::

    pip install ./shims/batch_invariant_ops
    python -m torchtitan.experiments.rl.train ... --trainer.debug.batch_invariant

Or, where a process has a line before TorchTitan starts::

    sys.modules["batch_invariant_ops"] = importlib.import_module("samebits.torchtitan")

The whole process is in the mode of :func:`samebits.enable_batch_invariant_mode` then, and attention is
:func:`samebits.attention`, also with pages in vLLM: PyTorch's ``varlen_attn``, and FlexAttention with the
mask that its blocks stand for.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from typing import Any, NoReturn

from torch import Tensor

from samebits.engines.hooks import Hooks
from samebits.engines.plugin import Plugin
from samebits.engines.refusals import RefusedError
from samebits.mode import calls, process
from samebits.ops.attention import attention

__all__ = [
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
]

_VARLEN = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
_plugin = Plugin("samebits.torchtitan")


def enable_batch_invariant_mode(on_uncovered: calls.OnUncovered = "error") -> None:
    """Turn the mode on in the process, and replace TorchTitan's attention.

    Args:
        on_uncovered: as in :func:`samebits.enable_batch_invariant_mode`. TorchTitan gives none.

    Raises:
        MovedError: this version of TorchTitan or PyTorch is not what the hooks expect.
    """
    if _plugin.hooks is None:
        _plugin.enable(_install, f"TorchTitan {version('torchtitan')}")
    process.enable_batch_invariant_mode(on_uncovered)


def disable_batch_invariant_mode() -> None:
    """Undo :func:`enable_batch_invariant_mode`."""
    process.disable_batch_invariant_mode()
    _plugin.disable()


def is_batch_invariant_mode_enabled() -> bool:
    """Whether the process is in the mode."""
    return process.is_batch_invariant_mode_enabled()


def _install(hooks: Hooks) -> None:
    from torch.nn.attention import varlen
    from torchtitan.models.common import attention as titan

    tensors = ("query", "key", "value", *_VARLEN)
    hooks.replace(varlen, "varlen_attn", _varlen, *tensors)
    hooks.replace(titan, "varlen_attn", _varlen, *tensors)
    hooks.replace(varlen, "varlen_attn_out", _varlen_out, "out", *tensors)
    hooks.replace(titan.FlexAttention, "compiled_flex_attn", staticmethod(_flex), "q", "k", "v", "score_mod")
    rl = "torchtitan.experiments.rl"
    if rl in sys.modules:  # a kernel of vLLM's for one operator, which the mode has
        module = importlib.import_module(f"{rl}.batch_invariance")
        hooks.replace(module, "patch_bmm_for_batch_invariance", _nothing)


def _nothing() -> None: ...


def _refuse(what: str, reason: str) -> NoReturn:
    raise RefusedError(f"samebits.torchtitan: {what}", reason, "use a model without it")


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Any:
    """``torch.nn.attention.varlen.varlen_attn``: packed operands, or pages with ``block_table``."""
    lse = return_aux is not None and return_aux.lse
    given = attention(
        query,
        key,
        value,
        causal=window_size[1] == 0,
        window=(window_size[0], window_size[1]),
        scale=scale,
        cu_seqlens_q=cu_seq_q,
        cu_seqlens_k=None if block_table is not None else cu_seq_k,
        key_length=seqused_k,
        block_table=block_table,
        return_lse=lse,
        out=out,
    )
    if lse and query.requires_grad:
        _refuse("a gradient of the log-sum-exp of scores", "attention has none")
    return given


def _varlen_out(out: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _varlen(*args, **kwargs, out=out)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_aux: Any,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Any]:
    """FlexAttention of ``[B, H, T, D]``: a key is visible where ``block_mask.mask_mod`` says so."""
    from torch.nn.attention.flex_attention import AuxOutput, create_mask

    if score_mod is not None:
        _refuse("FlexAttention with a score_mod", "attention adds nothing to scores but a mask")
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"samebits.torchtitan: k: expected {q.shape[1]} heads without enable_gqa, got {k.shape[1]}"
        )
    mask = None
    if block_mask is not None:
        mask = getattr(block_mask, "_samebits_mask", None)  # all layers have the same blocks
        if mask is None:
            batch, heads = block_mask.kv_num_blocks.shape[:2]
            mask = create_mask(block_mask.mask_mod, batch, heads, q.shape[2], k.shape[2], q.device)
            block_mask._samebits_mask = mask
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not return_aux.lse:
        out = attention(q, k, v, scale=scale, mask=mask)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2), AuxOutput()
    if q.requires_grad:
        _refuse("a gradient of the log-sum-exp of scores", "attention has none")
    out, lse = attention(q, k, v, scale=scale, mask=mask, return_lse=True)
    return out.transpose(1, 2), AuxOutput(lse=lse)
