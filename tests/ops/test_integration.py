"""Converted models within PyTorch: compile, autocast, checkpoints, torch.func, CUDA graphs, DDP and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.testing import assert_same_bits, values

SEQUENCES, TOKENS, WIDTH = 4, 12, 32


class Model(nn.Module):
    """Layers whose activation is exact, so that all rounding is in products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def make(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    assert len(samebits.convert(model).converted) == 2
    return model


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return values("normal", (SEQUENCES, TOKENS, WIDTH), dtype, 1)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [*model.parameters()], y.detach())]


def assert_all_same(got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, f"result {i}")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(backend: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model, x = make(dtype), batch(dtype)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_all_same(gradients(model, compiled, x), gradients(model, model, x))
    assert_same_bits(compiled(x[:1]), model(x)[:1])


def test_compiled_code_computes_an_operand_once_for_all_operators() -> None:
    torch._dynamo.reset()
    x, weights = torch.ones(8, 16), [torch.ones(16, 16) for _ in range(3)]

    def layer(x: Tensor) -> list[Tensor]:
        y = x * x + 1
        return [samebits.linear(y, w) for w in weights]

    _, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), x)
    assert code.count("empty_strided_cpu(") == 1


def test_convert_after_compile_is_seen() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(batch())
    samebits.convert(compiled)
    assert_same_bits(compiled(batch()), make()(batch()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, x = make(), batch().requires_grad_()
    want = gradients(model, model, x)
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.backward(y.detach())
    assert_all_same([y.detach(), *(p.grad for p in model.parameters())], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    model, x = make(), batch()
    low = copy.deepcopy(model).to(dtype)
    with torch.autocast("cpu", dtype):
        y, *got = gradients(model, model, x)
    assert_same_bits(y, low(x.to(dtype)).detach())
    want = gradients(low, low, x.to(dtype))
    assert_all_same(got, [g.float() for g in want[1:]])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func() -> None:
    model, x = make(), batch()
    parameters = dict(model.named_parameters())
    assert_same_bits(torch.func.functional_call(model, parameters, x), model(x))
    mapped = torch.func.vmap(lambda row: torch.func.functional_call(model, parameters, row))(x)
    assert_same_bits(mapped, model(x))
    with pytest.raises(NotImplementedError, match=r"torch.func's gradients are not implemented"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum())(parameters)


def test_inference_mode_and_no_grad() -> None:
    model, x = make(), batch()
    want = model(x).detach()
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert_same_bits(model(x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_with_main_grad_end_in_the_same_weights(dtype: torch.dtype) -> None:
    """Three steps of AdamW on float32 copies of the weights, with 1, 2 and 4 micro-batches."""
    target = values("normal", (SEQUENCES, TOKENS, WIDTH), dtype, 2)

    def train(micro_batches: int) -> list[Tensor]:
        model = make(dtype)
        masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=1e-2)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.main_grad = master.grad = torch.zeros_like(master)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            for x, t in zip(batch(dtype).chunk(micro_batches), target.chunk(micro_batches), strict=True):
                (model(x) - t).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
        return [m.detach() for m in masters]

    whole = train(1)
    assert not torch.equal(whole[0], make(dtype).up.weight.float())
    for micro_batches in (2, 4):
        assert_all_same(train(micro_batches), whole)


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = batch().chunk(2)[rank]
    ddp = nn.parallel.DistributedDataParallel(make())
    y = ddp(x)
    y.backward(y.detach())
    results = {"ddp": [y.detach(), *(p.grad for p in ddp.parameters())]}

    fsdp: Any = make()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (fsdp.up, fsdp.down, fsdp):
        fully_shard(layer, mesh=mesh)
    y = fsdp(x)
    y.backward(y.detach())
    results["fsdp"] = [y.detach(), *(p.grad.full_tensor() for p in fsdp.parameters())]
    late: Any = Model()
    fully_shard(late.up, mesh=mesh)
    results["late"] = [str(u.reason) for u in samebits.convert(late).unconverted]  # type: ignore[misc]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_two_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    """A sum of two addends has one order: that of two micro-batches in one process."""
    mp.spawn(_worker, (str(tmp_path),), nprocs=2)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    model = make()
    outputs = [model(part) for part in batch().chunk(2)]
    for y in outputs:
        (y / 2).backward(y.detach())
    for y, results in zip(outputs, of_ranks, strict=True):
        for kind in ("ddp", "fsdp"):
            assert_all_same(results[kind], [y.detach(), *(p.grad for p in model.parameters())])
        assert ["not a plain torch.nn.Linear" in reason for reason in results["late"]] == [True]


@pytest.mark.gpu
def test_cuda_graph_of_a_converted_model() -> None:
    model, x = make(torch.bfloat16, "cuda"), batch(torch.bfloat16).cuda()
    samebits.prepare(model, [x.shape[:2]], backward=True)
    want = gradients(model, model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(model, model, x)
    for t in got:
        t.fill_(torch.nan)
    graph.replay()
    assert_all_same(got, want)


@pytest.mark.gpu
def test_main_grad_on_a_gpu_has_the_bits_of_the_cpu() -> None:
    from tests.support.devices import FAMILY

    grads = []
    for device in ("cpu", "cuda"):
        model, x = make(torch.bfloat16).to(device), batch(torch.bfloat16).to(device)
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device=device)
        with samebits.use_mma_model(FAMILY):
            for part in x.chunk(2):
                y = model(part)
                y.backward(y.detach())
        grads.append([p.main_grad.cpu() for p in model.parameters()])
    assert_all_same(grads[1], grads[0])


@pytest.mark.gpu
def test_audit_of_operators_on_a_gpu() -> None:
    model, x = make(torch.bfloat16, "cuda"), batch(torch.bfloat16).cuda()
    report = samebits.audit(model, x, backward=True)
    assert not report.drifts
    assert report.device == "cuda:0"
