"""verl's workers with the log-probs of the engine that samples: importing this module turns it on.

verl (0.9.1) imports it in its workers, if its configuration names it::

    python -m verl.trainer.main_ppo actor_rollout_ref.model.external_lib=samebits.verl ...

or, for every process, its environment: ``VERL_USE_EXTERNAL_MODULES=samebits.verl``. Both halves are on then:

* **Rollout.** ``SAMEBITS_VLLM=1`` is set in each process that imports it, before vLLM starts there.
* **Actor and reference.** Forwards, backwards, gradient norms and optimizer steps of verl's FSDP engine run
  in ``samebits.batch_invariant("error")``. Attention is ``attn_implementation="samebits"``, whatever the
  configuration says: packed sequences (``use_remove_padding``) and padded ones.
* **Log-probs** of the actor are those of float32 logits, divided by the temperature in float32, as the
  engine's. verl rounds both to 16 bits. So do its fused kernels (``use_fused_kernels``), in whose place the
  head runs in pieces. Words that the tokenizer does not have count nothing, since verl's rollout never
  samples them.
* **A head in float32**, if both ``model.override_config.head_dtype`` and
  ``rollout.engine_kwargs.vllm.hf_overrides.head_dtype`` say so: logits are not rounded to 16 bits.
* **Fused layers**, if ``model.override_config.samebits_fuse=True``: those of :func:`samebits.fuse`.
* **Metrics.** ``training/rollout_probs_diff_*`` are verl's own. ``samebits/*`` beside them count tokens whose
  log-probs have other bits, and bound the importance ratios.

Settings that have no equal bits are refused by name, when a worker builds what they are for.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from samebits.engines.logprobs import convert_head, head_dtype, of_hidden, without_words
from samebits.engines.parity import ratios
from samebits.engines.plugin import Plugin
from samebits.engines.refusals import RefusedError
from samebits.fusion import fuse
from samebits.mode import batch_invariant
from samebits.ops.logp import logp
from samebits.transformers import register

__all__ = ["disable", "enable", "is_enabled"]

_plugin = Plugin("samebits.verl", "SAMEBITS_VLLM")


class _State:
    """Of this process, where verl's functions are not told.

    Attributes:
        words: of the running engine's tokenizer.
        head: dtype of its logits, if it is not that of the model.
        dtype: in which the actor computes.
    """

    words: int | None = None
    head: torch.dtype | None = None
    dtype: torch.dtype | None = None


_state = _State()


def enable() -> None:
    """Replace what verl computes otherwise than an engine. Importing the module does so.

    Raises:
        MovedError: this version of verl is not what the hooks expect.
    """
    if _plugin.hooks is None:
        import verl

        register()
        _plugin.enable(_install, f"verl {verl.__version__}")


def disable() -> None:
    """Put everything back."""
    _plugin.disable()
    _state.words = _state.dtype = _state.head = None


def is_enabled() -> bool:
    return _plugin.hooks is not None


def _install(hooks: Any) -> None:
    from verl.utils.debug import metrics
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl as fsdp
    from verl.workers.rollout.base import BaseRollout

    engine = fsdp.FSDPEngine
    covered = (fsdp.FSDPEngineWithLMHead, fsdp.FSDPEngineWithValueHead)

    def method(owner: type, name: str, wrapper: Callable[..., Any], *parameters: str) -> None:
        hooks.expect(owner, name)
        own = getattr(owner, name)

        @functools.wraps(own)
        def new(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(own, self, *args, **kwargs)

        hooks.replace(owner, name, new, "self", *parameters)

    hooks.expect(EngineRegistry, "get_engine_cls", "model_type", "backend")
    classes = EngineRegistry.get_engine_cls

    def get_engine_cls(cls: type, model_type: str, backend: str) -> Any:
        found = classes(model_type, backend)
        if found not in covered:
            _refuse(f"strategy={backend!r}", "only verl's FSDP engine is covered", "set strategy=fsdp2")
        return found

    hooks.replace(EngineRegistry, "get_engine_cls", classmethod(get_engine_cls), "model_type", "backend")
    method(engine, "__init__", _init, "model_config", "engine_config")
    method(engine, "_build_module", _build_module)
    method(engine, "_build_fsdp_module", _build_fsdp_module, "module")
    head = fsdp.FSDPEngineWithLMHead
    method(head, "forward_step", _run, "micro_batch", "loss_function", "forward_only")
    method(engine, "optimizer_step", _run)
    method(BaseRollout, "__init__", _rollout, "config", "model_config", "device_mesh")
    hooks.replace(
        fsdp, "_scale_logits_by_temperature", _scaled, "logits", "temperature", "is_unit_temperature"
    )
    hooks.replace(fsdp, "logprobs_from_logits", _log_probs, "logits", "labels", "inplace_backward")
    fused = ("self", "hidden_states", "vocab_weights", "input_ids", "temperature")
    hooks.replace(FusedLinearForPPO, "forward", _fused, *fused)
    hooks.expect(metrics, "calculate_debug_metrics", "data")
    with_ratios = functools.partial(_metrics, metrics.calculate_debug_metrics)
    hooks.replace(metrics, "calculate_debug_metrics", with_ratios, "data")
    trainer = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
    if trainer is not None:  # it has taken the function by then
        hooks.replace(trainer, "calculate_debug_metrics", with_ratios, "data")


def _refuse(what: str, reason: str, remedy: str) -> NoReturn:
    raise RefusedError(f"samebits.verl: {what}", reason, remedy)


def _init(own: Any, self: Any, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse what an engine may not have."""
    from verl.workers.engine.fsdp import transformer_impl as fsdp

    config = model_config.hf_config
    head = [
        n for n in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(config, n, None)
    ]
    fused = model_config.use_fused_kernels
    backend = (model_config.fused_kernel_options or {}).get("impl_backend")
    qat = getattr(engine_config, "qat", None)
    dtype = getattr(config, "head_dtype", None)
    merged = "the rollout gets other weights than the actor's layers have"
    off = "turn it off"
    for refused, what, reason, remedy in (
        (
            engine_config.ulysses_sequence_parallel_size > 1,
            *("ulysses_sequence_parallel_size > 1", "its attention is not covered", "set it to 1"),
        ),
        (model_config.lora_rank > 0 or model_config.lora_adapter_path, "LoRA", merged, "train all weights"),
        (model_config.use_liger, "use_liger", "samebits does not see its kernels", off),
        (model_config.mtp.enable, "mtp", "its heads are not covered", off),
        (qat is not None and qat.enable, "qat", "quantised weights are not covered", off),
        (
            fused and backend == "triton",
            *("fused_kernel_options.impl_backend='triton'", "its sums have another order", "set it to torch"),
        ),
        (
            dtype not in (None, "model", "float32"),
            *(f"head_dtype={dtype!r}", "heads compute in the model's dtype or in float32", "give 'float32'"),
        ),
        (
            getattr(config, _FUSE, False) and engine_config.strategy != "fsdp2",
            *(
                _FUSE,
                "FSDP1 wraps modules by one class, and fused ones may have several",
                "set strategy=fsdp2",
            ),
        ),
        (fused and head, f"use_fused_kernels with {head}", "verl leaves that out of its fused head", off),
    ):
        if refused:
            _refuse(what, reason, remedy)
    own(self, model_config, engine_config, *args, **kwargs)
    chunks = "_with_chunking" if engine_config.entropy_from_logits_with_chunking else ""
    self.compute_entropy_from_logits = getattr(fsdp.verl_F, f"entropy_from_logits{chunks}")  # uncompiled


def _build_module(own: Any, self: Any) -> Any:
    config = self.model_config.hf_config
    config._attn_implementation = "samebits"
    asked = vars(config).pop(_FUSE, False)  # verl puts there what overrides it. It is no part of a checkpoint
    module = own(self)
    if self.model_config.model_type == "language_model":
        convert_head(module)
    if asked:
        _fuse_as_a_twin(self, module)
    return module


_FUSE = "samebits_fuse"


def _fuse_as_a_twin(engine: Any, module: Any) -> None:
    """Fuse a module whose weights are on a CPU, or nowhere yet, by what is proven where it will run.

    :func:`samebits.fuse` proves it of another model of the same configuration, on the engine's device. It has
    random weights, in 16 bits, and is dropped then.
    """
    from verl.utils.device import get_device_name

    config = copy.deepcopy(module.config)
    with torch.device(get_device_name()):
        twin = type(module)._from_config(config, dtype=torch.bfloat16)
    own = {name: type(m) for name, m in twin.named_modules()}
    fusion = fuse(twin)
    for name, m in twin.named_modules():
        mine = module.get_submodule(name)
        if type(mine) is own[name] and "forward" not in vars(mine):
            mine.__class__ = type(m)
    if engine.rank == 0:
        print(f"samebits.verl: {fusion}")


def _build_fsdp_module(own: Any, self: Any, module: Any) -> Any:
    built = own(self, module)
    if not self.engine_config.forward_only:
        _state.dtype = self._autocast_dtype
    return built


def _run(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A step of the engine, in the mode."""
    before, tokenizer = (_state.words, _state.head), self.model_config.tokenizer
    _state.words = None if tokenizer is None else len(tokenizer)
    _state.head = head_dtype(self.model_config.hf_config)
    try:
        with batch_invariant("error"):
            return own(self, *args, **kwargs)
    finally:
        _state.words, _state.head = before


# Settings of verl's rollout, the values that are covered, and what the others do.
_COVERED = (
    ("name", ("vllm",), "samebits has no engine of verl's but vLLM"),
    *(
        (name, values, "the engine's log-probs are of the tokens that it leaves; the actor's are of all")
        for name, values in (("top_p", (1, 1.0)), ("top_k", (-1, 0)))
    ),
    ("repetition_penalty", (1, 1.0), "the engine's log-probs have it, and the actor's do not"),
    ("quantization", (None,), "the actor's weights are not quantised"),
    ("full_determinism", (False,), "it turns on vLLM's own kernels"),
    ("logprobs_mode", ("processed_logprobs",), "the actor's log-probs are divided by the temperature"),
)


def _rollout(own: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a rollout that has other log-probs than the actor."""
    model_config = kwargs.get("model_config", args[0] if args else None)
    engine = ((config.engine_kwargs or {}).get("vllm") or {}).get("hf_overrides") or {}
    actor = getattr(model_config, "override_config", None) or {}
    actor = actor.get("model_config", actor)  # as verl reads it
    if actor.get("head_dtype") != engine.get("head_dtype"):
        got = f"{actor.get('head_dtype')!r}: the rollout's is {engine.get('head_dtype')!r}"
        remedy = "set rollout.engine_kwargs.vllm.hf_overrides.head_dtype to the same, 'float32' or none"
        _refuse("model.override_config.head_dtype", got, remedy)
    for name, values, reason in _COVERED:
        value = getattr(config, name, values[0])
        if value not in values:
            _refuse(f"rollout.{name}={value!r}", reason, f"set it to {values[0]!r}")
    from verl.utils.torch_dtypes import PrecisionType

    dtype = PrecisionType.to_dtype(config.dtype)
    if _state.dtype not in (None, dtype):
        remedy = "set actor.fsdp_config.mixed_precision.param_dtype and rollout.dtype to one dtype"
        _refuse(f"rollout.dtype={config.dtype!r}", f"the actor computes in {_state.dtype}", remedy)
    own(self, config, *args, **kwargs)


def _scaled(logits: Tensor, temperature: Tensor, *, is_unit_temperature: bool) -> Tensor:
    """Logits as the engine has them: divided in float32."""
    if is_unit_temperature:
        return logits
    return logits.float() / temperature.float().clamp(min=1e-8)


def _log_probs(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    return logp(without_words(logits, _state.words), labels)


def _fused(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    if isinstance(vocab_weights, DTensor):
        remedy = "turn it off, or set strategy=fsdp"
        _refuse("use_fused_kernels under fsdp2", "verl hands over a shard of the head's weight", remedy)
    shape = input_ids.shape
    log_probs, entropy = of_hidden(
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        vocab_weights,
        None,
        input_ids.reshape(-1).to(torch.int64),
        float(temperature),
        words=_state.words,
        entropy=True,
        out_dtype=_state.head,
    )
    assert entropy is not None
    return log_probs.view(shape), entropy.view(shape)


def _metrics(own: Any, data: Any) -> dict[str, Any]:
    """verl's metrics, and this library's: of bits, and of importance ratios."""
    batch = data.batch
    responses = batch["responses"].size(1)
    mask = batch["response_mask"][:, -responses:]
    ours = ratios(batch["old_log_probs"], batch["rollout_log_probs"], mask)
    return {**own(data), **{f"samebits/{name}": value for name, value in ours.items()}}


enable()
