"""Write tables of benchmarks/results and of the mode's rules into README.md and docs, and constants for CUDA.

python -m benchmarks tables [--check]

A block starts with ``<!-- begin: NAME -->`` and ends with ``<!-- end: NAME -->``, each on its own line. With
``--check`` nothing is written: it fails if a block is not up to date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import support
from benchmarks.record import GPUS, ROOT, load, measured
from benchmarks.tables import constants, cpu, engines, mode, models, operations, products, proofs, tuning
from benchmarks.zoo import report

BLOCK = re.compile(
    r"(?<=^<!-- begin: )([a-z0-9-]+)( -->\n)(.*?)(?=^<!-- end: \1 -->$)", re.DOTALL | re.MULTILINE
)


GPU_BLOCKS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "bench.json": {
        "summary": products.gpu_summary,
        "behind": products.gpu_behind,
        "forward": products.gpu_forward,
        "backward": products.gpu_backward,
        "tiny": products.gpu_tiny,
        "drift": products.gpu_drift,
    },
    "attention.json": {
        "attention": operations.gpu_attention,
        "attention-cases": operations.gpu_attention_cases,
    },
    "paged.json": {"paged": operations.gpu_paged},
    "attention_invariance.json": {"attention-invariance": proofs.gpu_attention_invariance},
    "grouped.json": {"grouped": products.gpu_grouped, "grouped-cases": products.gpu_grouped_cases},
    "held_out.json": {"held-out": products.gpu_held_out},
    "native.json": {"native": products.gpu_native},
    "host.json": {"host-calls": models.gpu_host_calls},
    "logp.json": {"logp": operations.gpu_logp},
    "recurrent.json": {"recurrent": operations.gpu_recurrent},
    "hybrids.json": {"hybrids": operations.gpu_hybrids},
    "rows.json": {"rows": operations.gpu_rows},
    "steps.json": {"steps": models.gpu_steps},
    "segments.json": {"segments": products.gpu_segments},
    "segments_float32.json": {"segments-float32": products.gpu_segments},
    "scaled.json": {"scaled": products.gpu_scaled},
    "scaled_grouped.json": {
        "scaled-grouped": products.gpu_scaled_grouped,
        "quantize": products.gpu_quantize,
    },
    "fp8_accuracy.json": {"fp8-accuracy": products.gpu_fp8_accuracy},
    "fp8_invariance.json": {"fp8-invariance": proofs.gpu_fp8_invariance},
    "distributed.json": {"distributed": models.gpu_distributed},
    "triton_tune.json": {"triton-tune": products.gpu_triton_tune},
    "triton.json": {"triton": products.gpu_summary},
    "counters.json": {"counters": products.gpu_counters},
    "peers.json": {"peers": models.gpu_peers},
    "models.json": {"models-drift": models.gpu_models_drift, "models-time": models.gpu_models_time},
    "embeddings.json": {"embeddings": models.gpu_embeddings},
    "vllm.json": {"vllm": models.gpu_engine},
    "vllm_1.7b.json": {"vllm-small": models.gpu_engine},
    "vllm_tp2.json": {"vllm-split": models.gpu_engine},
    "trl_vllm.json": {"trl-vllm": models.gpu_trl_vllm},
    "vllm_30b-a3b.json": {"vllm-experts": models.gpu_engine},
    "vllm_8b-lora.json": {"vllm-lora": models.gpu_engine},
    "vllm_deepseek-v3.json": {"vllm-latent": models.gpu_engine},
    "vllm_8b-fp8.json": {"vllm-fp8": models.gpu_engine},
    "vllm_30b-a3b-fp8.json": {"vllm-experts-fp8": models.gpu_engine},
    "vllm_bits.json": {"vllm-bits": models.gpu_engine_bits},
    "sglang_8b.json": {"sglang": models.gpu_engine},
    "sglang_bits.json": {"sglang-bits": models.gpu_engine_bits},
    "vllm_bits_breadth.json": {"vllm-bits-breadth": models.gpu_engine_bits},
    "vllm_bits_breadth_tp2.json": {"vllm-bits-split": models.gpu_engine_bits},
    "unaligned.json": {"unaligned": products.gpu_unaligned},
    "verify.json": {"verify": proofs.gpu_verify},
}


ALSO = (
    *("summary", "behind", "held-out", "unaligned", "grouped", "distributed", "segments"),
    *("attention", "attention-cases", "host-calls"),
    *("verify", "attention-invariance", "fp8-invariance"),
)
"""What pages show of every GPU; all else is of the first that has it."""


def block_of(folder: str, results: str, write: Callable[[dict[str, Any]], str]) -> str:
    return write(load(f"{folder}/{results}"))


BLOCKS: dict[str, Callable[[], str]] = {
    "overview": models.overview,
    "price": partial(models.the_price, GPUS[0]),
    "reference-speed": cpu.reference_speed,
    "drift": cpu.drift,
    "support": proofs.supported,
    "verl": partial(block_of, "cpu", "verl.json", models.verl),
    "commits": proofs.commits,
    "mode-replaced": mode.mode_replaced,
    "mode-vectors": mode.mode_vectors,
    "mode-reported": mode.mode_reported,
    "mode-internals": mode.mode_internals,
    "tuned-tables": tuning.tuned_tables,
    "sglang-native": engines.sglang_native,
    "sglang-versions": engines.sglang_versions,
    "vllm-covered": engines.vllm_covered,
    "vllm-native": engines.vllm_native,
    "vllm-versions": engines.vllm_versions,
    "fused-architectures": partial(block_of, "cpu", "fusion.json", models.fused),
    "architectures": partial(block_of, "cpu", "zoo.json", report.architectures),
    "architectures-fp8": partial(block_of, "cpu", "zoo_fp8.json", report.fp8),
    **{f"{gpu}-price": partial(models.the_price, gpu) for gpu in GPUS[1:]},
    **{
        f"{gpu}-{what}": partial(block_of, gpu, results, write)
        for results, blocks in GPU_BLOCKS.items()
        for place, gpu in enumerate(gpu for gpu in GPUS if gpu in measured(results))
        for what, write in blocks.items()
        if place == 0 or what in ALSO
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a block is out of date")
    options = parser.parse_args()
    stale, used = [], set()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):

        def block(match: re.Match[str]) -> str:
            used.add(match[1])
            return f"{match[1]}{match[2]}{BLOCKS[match[1]]()}\n"

        text = path.read_text()
        new = BLOCK.sub(block, text)
        if path.parent != ROOT:
            new = new.replace("](docs/", "](")
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(new)
                print(f"wrote {path}")
    if unused := BLOCKS.keys() - used:
        raise SystemExit(f"no page has a block for {', '.join(sorted(unused))}")
    for path, whole in ((support.PROVEN, support.text()), (constants.HEADER, constants.text())):
        if not path.exists() or path.read_text() != whole:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(whole)
                print(f"wrote {path}")
    if options.check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks tables")


if __name__ == "__main__":
    main()
