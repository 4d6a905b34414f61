"""What sums over ranks cost beside NCCL's, and whether models of several sizes have the same bits.

torchrun --nproc-per-node N -m benchmarks distributed [--smoke] [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/distributed.json: exchanges, row-parallel linear layers, log-probabilities
with the vocabulary split, whole training steps of two Llamas, eager and in a CUDA graph, and how many values
of such a step differ from one rank's. Times are medians, of the slowest rank. ``--smoke`` runs tiny sizes,
also on a CPU, to see that it runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, parallel

import samebits
from benchmarks.models import BILLION
from benchmarks.record import arguments, environment, save
from samebits.distributed import (
    ordered_all_reduce,
    ordered_reduce_scatter,
    row_parallel_linear,
    tp_plan,
    vocab_parallel_linear_logp,
)
from samebits.tools.graphs import capture

ROWS = (1, 16, 128, 1024, 8192)
PRODUCTS = ((8192, 4096), (8192, 8192), (14336, 4096), (28672, 8192))
CONTRACT = samebits.TENSOR_CORE.segmented(8)
LARGE = BILLION | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 18,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""4.5 billion parameters: the layers of Llama 3 8B, fewer of them."""
LLAMAS = {"1.2 billion": BILLION, "4.5 billion": LARGE}
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
}


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of a call, on the slowest rank. A CPU's is of one call: it only shows that all runs."""
    times = []
    warm = 3 if device == "cuda" else 0
    for i in range(warm + repeats if device == "cuda" else 1):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= warm:
            times.append(1e3 * (time.perf_counter() - start))
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 4)


def graphed(run: Callable[[], object], device: str, calls: int = 20) -> Callable[[], object]:
    """Calls as a CUDA graph, so that the CPU's part does not count."""
    if device != "cuda":
        return run
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()

    def repeat() -> None:
        for _ in range(calls):
            run()

    graph, _ = capture(repeat)
    return graph.replay


def compare(runs: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Milliseconds of each: of calls one by one, and within a graph."""
    found = {name: milliseconds(run, device, 15) for name, run in runs.items()}
    calls = 20 if device == "cuda" else 1
    return found | {
        f"{name}, graph": round(milliseconds(graphed(run, device), device, 7) / calls, 4)
        for name, run in runs.items()
    }


def exchanges(device: str, rows: tuple[int, ...], features: int) -> list[dict[str, Any]]:
    cases = []
    for m in rows:
        x = torch.randn(m, features, device=device)
        low = x.bfloat16()
        runs: dict[str, Callable[[], object]] = {
            "ordered_all_reduce": partial(ordered_all_reduce, x, out_dtype=torch.bfloat16),
            "all_reduce bf16": partial(dist.all_reduce, low),
            "all_reduce f32": partial(dist.all_reduce, x.clone()),
        }
        if m % dist.get_world_size() == 0:
            runs["ordered_reduce_scatter"] = partial(ordered_reduce_scatter, x, out_dtype=torch.bfloat16)
        cases.append({"rows": m, "features": features, "ms": compare(runs, device)})
    return cases


def row_parallel(
    device: str, rows: tuple[int, ...], products: tuple[tuple[int, int], ...]
) -> list[dict[str, Any]]:
    cases, ranks = [], dist.get_world_size()
    for k, n in products:
        weight = torch.randn(n, k // ranks, device=device, dtype=torch.bfloat16)
        for m in rows:
            x = torch.randn(m, k // ranks, device=device, dtype=torch.bfloat16)

            def theirs(x: Tensor = x, weight: Tensor = weight) -> None:
                dist.all_reduce(torch.mm(x, weight.T))

            def ours(x: Tensor = x, weight: Tensor = weight) -> None:
                row_parallel_linear(x, weight, contract=CONTRACT)

            with torch.no_grad():
                times = compare({"torch": theirs, "samebits": ours}, device)
            cases.append({"M": m, "K": k, "N": n, "ms": times})
    return cases


def log_probabilities(device: str, tokens: int, features: int, vocabulary: int) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    hidden, weight = (
        torch.randn(rows, features, device=device, generator=generator).bfloat16()
        for rows in (tokens, vocabulary)
    )
    target = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    part = weight.chunk(dist.get_world_size())[dist.get_rank()].clone()
    with torch.no_grad():
        ms = {
            "one GPU": milliseconds(
                lambda: samebits.linear_logp(hidden, weight, target, contract=CONTRACT), device, 15
            ),
            "split": milliseconds(
                lambda: vocab_parallel_linear_logp(hidden, part, target, contract=CONTRACT), device, 15
            ),
        }
    return {"tokens": tokens, "features": features, "vocabulary": vocabulary, "ms": ms}


def llama(sizes: dict[str, Any], mesh: DeviceMesh, how: str) -> Any:
    """A Llama: whole ("one"), split by PyTorch's styles ("torch") or by samebits' ("samebits")."""
    from transformers import LlamaConfig, LlamaForCausalLM

    samebits.transformers.register()
    own: dict[str, Any] = {} if how == "torch" else {"attn_implementation": "samebits"}
    kind: Any = LlamaForCausalLM
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model: Any = kind(LlamaConfig(**sizes, **own)).to(torch.bfloat16)
    if how == "one":
        samebits.convert(model, contract=CONTRACT)
        return model
    plan: Any = tp_plan(model, contract=CONTRACT)
    if how == "torch":
        styles: dict[str, Callable[[], Any]] = {
            "colwise": parallel.ColwiseParallel,
            "rowwise": parallel.RowwiseParallel,
            "colwise_gather_output": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
            "embedding_rowwise": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
        }
        plan = {name: styles[style]() for name, style in model.tp_plan.items()}
    parallel.parallelize_module(model, mesh, plan)
    model.tie_weights()
    return model


def step(model: Any, ids: Tensor, how: str) -> Tensor:
    """Forward and backward. Returns the loss, or log-probabilities."""
    if how == "torch":
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()
    with samebits.batch_invariant():
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        weight = model.lm_head.weight
        if isinstance(weight, DTensor):
            logp = vocab_parallel_linear_logp(hidden, weight.to_local(), ids[:, 1:], contract=CONTRACT)
        else:
            logp = samebits.linear_logp(hidden, weight, ids[:, 1:], contract=CONTRACT)
        (-logp.mean()).backward()
    return logp.detach()


def steps(
    mesh: DeviceMesh, name: str, sizes: dict[str, Any], batches: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    """Times of steps, and how many values of a step differ from those of one rank."""
    device, kept = mesh.device_type, {}
    cases: list[dict[str, Any]] = []
    for how in ("torch", "samebits", "one"):
        model = llama(sizes, mesh, how)
        for rows, tokens in batches:
            ids = torch.randint(
                sizes["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(1)
            )
            ids = ids.to(device)

            def run(model: Any = model, ids: Tensor = ids, how: str = how) -> None:
                step(model, ids, how)
                model.zero_grad(set_to_none=True)

            cases.append({"model": name, "how": how, "rows": rows, "tokens": tokens})
            cases[-1]["ms"] = milliseconds(run, device, 7)
            if how != "torch" and device == "cuda":
                try:
                    cases[-1]["graph"] = milliseconds(graphed(run, device, 1), device, 7)
                except RuntimeError as error:
                    cases[-1]["refused"] = f"{type(error).__name__}: {error}"[:200]
                    fresh = torch.Generator(device)  # PyTorch's own believes that the capture goes on
                    torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(
                        fresh.graphsafe_get_state()
                    )
        if how != "torch":
            logp = step(model, ids, how)
            kept[how] = [logp, *(p.grad for p in model.parameters())]
        del model
    values = differing = 0
    for one, split in zip(kept["one"], kept["samebits"], strict=True):
        own = split.full_tensor() if isinstance(split, DTensor) else split
        kind = torch.int32 if one.dtype == torch.float32 else torch.int16
        differing += int((one.view(kind) != own.view(kind)).sum())
        values += one.numel()
    return {"steps": cases, "values compared": values, "values that differ from one rank's": differing}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, and no file")
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif not options.smoke:
        sys.exit(f"expected {ranks} GPUs, got {torch.cuda.device_count()}; --smoke runs on a CPU")
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
    small = options.smoke
    data: dict[str, Any] = {"environment": environment(options.commit), "ranks": ranks}
    data["exchanges"] = exchanges(device, (1, 16) if small else ROWS, 64 if small else 8192)
    data["row_parallel"] = row_parallel(
        device, (1, 16) if small else ROWS, ((128, 64),) if small else PRODUCTS
    )
    data["log_probabilities"] = log_probabilities(
        device, *((16, 64, 2048) if small else (4096, 4096, 131072))
    )
    batches = ((2, 16),) if small else ((1, 4096), (8, 512))
    blocks = -(-BILLION["vocab_size"] // (128 * ranks))  # of the vocabulary, which is split at whole blocks
    data["llama"] = {"steps": []}
    for name, sizes in ({"small": SMALL} if small else LLAMAS).items():
        whole = sizes if small else sizes | {"vocab_size": 128 * ranks * blocks}
        found = steps(mesh, name, whole, batches)
        data["llama"]["steps"] += found.pop("steps")
        data["llama"] |= {what: count + data["llama"].get(what, 0) for what, count in found.items()}
        if dist.get_rank() == 0 and not small:
            save(options.out, "distributed.json", data)
    if dist.get_rank() == 0:
        Console(width=150).print_json(data=data)
    differing = data["llama"]["values that differ from one rank's"]
    dist.destroy_process_group()
    sys.exit(bool(differing))
