"""TRL's trainers with the log-probs of the engine that samples: :func:`samebits.trl.batch_invariant`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samebits.engines.logprobs import of_hidden
from samebits.mode import batch_invariant as mode
from samebits.mode.calls import OnUncovered

__all__ = ["batch_invariant"]

_HEAD = "_ChunkedLogProbFunction"  # the name by which trl.trainer.utils calls it
_PARAMETERS = (
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)


@contextmanager
def batch_invariant(trainer: Any, on_uncovered: OnUncovered = "error") -> Iterator[None]:
    """A context for ``trainer.train()``: :class:`samebits.batch_invariant`, and what TRL needs besides.

    ::

        # with SAMEBITS_VLLM=1 in the environment, from the start
        args = GRPOConfig(use_vllm=True, model_init_kwargs={"dtype": "bfloat16"}, ...)
        trainer = GRPOTrainer(model_name, args=args, ...)
        with samebits.trl.batch_invariant(trainer):
            trainer.train()

    The log-prob of a token in the loss then has the bits that a forward of the ``transformers`` model gives
    it. vLLM with :mod:`samebits.vllm` has the same. TRL computes two things otherwise, which are replaced
    meanwhile:

    * **Positions** are counted from the first token that ``attention_mask`` shows, as engines do. TRL gives
      none, so that ``transformers`` would count the padding before a prompt.
    * **The head.** TRL sums exponentials over parts of the vocabulary, on a GPU in a Triton kernel. Here a
      log-prob is that of ``log_softmax(z, -1)`` with ``z = logits.float() / temperature``. The logits are
      rounded to the dtype of the hidden states, scaled and capped, as by the model's own head. (A head with
      an ``out_dtype``, by :func:`samebits.convert`, has logits of that dtype.) So are their
      gradients. At most about 2**27 logits exist at a time: those of more tokens are computed in pieces, and
      again in the backward.

    The head is replaced for the whole process: other trainers have it meanwhile, too. A vLLM in another
    process (``vllm_mode="server"``) is not looked at: start it with ``SAMEBITS_VLLM=1``.

    Args:
        trainer: a ``GRPOTrainer`` or another of TRL's with its fused head, which is ready to train.
        on_uncovered: as in :class:`samebits.batch_invariant`.

    Raises:
        ValueError: under this setting of the trainer's, the loss and the engine have other log-probs.
        RuntimeError: this version of TRL has another head.
    """
    from trl.trainer import utils

    theirs = getattr(utils, _HEAD, None)
    found = tuple(inspect.signature(theirs.forward).parameters) if theirs is not None else ()
    if found != _PARAMETERS:
        raise RuntimeError(
            f"samebits.trl.batch_invariant: trl.trainer.utils.{_HEAD}: expected a function of"
            f" ({', '.join(_PARAMETERS)}), got ({', '.join(found)}). This version of TRL has"
            " another head: install trl 1.16"
        )
    models = [
        trainer.accelerator.unwrap_model(model)
        for model in (trainer.model, getattr(trainer, "ref_model", None))
        if model is not None
    ]
    head = _check(trainer, models)
    hooks = [m.base_model.register_forward_pre_hook(_count_positions, with_kwargs=True) for m in models]
    setattr(utils, _HEAD, _Head(getattr(models[0].config, "logits_scaling", None), head))
    try:
        with mode(on_uncovered):
            yield
    finally:
        setattr(utils, _HEAD, theirs)
        for hook in hooks:
            hook.remove()


# Settings of a trainer's arguments, the values that are covered, and what the others do.
_NEEDED: Sequence[tuple[str, tuple[Any, ...], str]] = (
    ("use_liger_kernel", (False,), "its kernels are not seen by samebits"),
    ("use_transformers_continuous_batching", (False,), "its attention is not covered"),
)
_NEEDED_BY_VLLM: Sequence[tuple[str, tuple[Any, ...], str]] = (
    *(
        (name, values, "vLLM's log-probs are those of the tokens that it leaves; TRL's loss has all")
        for name, values in (
            ("top_p", (1.0,)),
            ("top_k", (0, -1, None)),
            ("min_p", (0.0, None)),
            ("vllm_structured_outputs_regex", (None,)),
        )
    ),
    ("repetition_penalty", (1.0,), "vLLM's log-probs have it, and those of TRL's loss do not"),
    (
        *("cast_lm_head_to_fp32", (False,)),
        "vLLM's head keeps its weight in 16 bits. For float32 logits of such weights convert the head, by"
        " samebits.convert(model, filter=lambda name, _: name == 'lm_head', out_dtype=torch.float32)",
    ),
)
_HARMLESS = {"seed", "stop", "stop_token_ids", "ignore_eos"}  # arguments that move no log-prob


def _check(trainer: Any, models: Sequence[Any]) -> torch.dtype | None:
    """Refuse settings under which the loss has other log-probs than the engine. Returns the logits' dtype."""
    args: Any = trainer.args
    model = models[0]

    def refuse(name: str, expected: str, got: Any, why: str) -> None:
        raise ValueError(f"samebits.trl.batch_invariant: {name}: expected {expected}, got {got!r}: {why}")

    vllm = getattr(args, "use_vllm", False)
    for name, values, why in (*_NEEDED, *(_NEEDED_BY_VLLM if vllm else ())):
        value = getattr(args, name, values[0])
        if value not in values:
            refuse(name, repr(values[0]), value, why)
    heads = [getattr(m.get_output_embeddings(), "out_dtype", None) for m in models]
    if len({*heads}) > 1:
        refuse("ref_model", f"a head of out_dtype={heads[0]}", heads[1], "the model's head has it")
    head = heads[0]
    if not vllm:
        return head
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in ("sdpa", "samebits"):
        why = "its sums are others. Call samebits.transformers.register() first for the second form"
        refuse("attn_implementation", '"sdpa" or "samebits"', attention, why)
    others = sorted({*(args.generation_kwargs or {})} - _HARMLESS)
    if others:
        refuse("generation_kwargs", f"only {sorted(_HARMLESS)}", others, "vLLM's log-probs may have them")
    if hasattr(model, "peft_config"):
        refuse("peft_config", "none", "adapters", "vLLM gets merged weights, which round otherwise")
    dtypes = {p.dtype for p in model.parameters()}
    engine = engine_head = None
    if args.vllm_mode == "colocate":
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
        engine, engine_head = config.model_config.dtype, config.model_config.head_dtype
        if not (config.additional_config or {}).get("samebits"):
            why = "set SAMEBITS_VLLM=1 in the environment before the trainer is made"
            refuse("vllm_generation", "an engine under samebits", "vLLM as it is", why)
    if len(dtypes) > 1 or engine not in (None, *dtypes):
        why = "load the model in the engine's dtype: model_init_kwargs={'dtype': 'bfloat16'}"
        refuse("model", f"all weights in {engine or 'one dtype'}", sorted(map(str, dtypes)), why)
    if engine_head not in (None, head or engine):
        why = 'vLLM reads "head_dtype" in the config.json of the model; samebits.convert sets the trainer\'s'
        refuse("model", f"a head whose logits are {engine_head}", head or engine, why)
    return head


def _count_positions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count positions from the first token that is not padding."""
    mask = kwargs.get("attention_mask")
    given = kwargs.get("position_ids") is not None or kwargs.get("past_key_values") is not None
    if mask is None or given or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    return args, {**kwargs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


class _Head:
    """What stands in for TRL's autograd function.

    Args:
        divisor: of the logits, in models that divide them. TRL has only its inverse.
        dtype: to which logits are rounded; that of the hidden states by default.
    """

    def __init__(self, divisor: float | None, dtype: torch.dtype | None) -> None:
        self._divisor, self._dtype = divisor, dtype

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: Sequence[str] = (),
    ) -> tuple[Tensor | None, ...]:
        if {*outputs} - {"log_probs", "entropy"}:
            raise ValueError(
                f"samebits.trl.batch_invariant: outputs: expected log_probs and entropy, got {outputs}"
            )
        divisor = self._divisor if self._divisor is not None and scale == 1 / self._divisor else None

        log_probs, entropy = of_hidden(
            hidden,
            weight,
            bias,
            targets,
            temperature,
            divisor=divisor,
            scale=scale,
            softcap=softcap,
            entropy="entropy" in outputs,
            out_dtype=self._dtype,
        )
        return log_probs, entropy, None, None, None
