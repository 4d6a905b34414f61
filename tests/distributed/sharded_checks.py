"""Checks of training with FSDP2 that run on every rank: ``test_sharded.py``."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_

import samebits
from samebits.distributed import GradientGroups
from samebits.mode.calls import UncoveredError
from samebits.testing import assert_same_bits, values
from tests.support.ranks import device, place

GROUPS = 8
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(12, 130), nn.GELU(), nn.Linear(130, 128, bias=False), nn.Linear(128, 6)
    return nn.Sequential(*layers).to(device())


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy = POLICY) -> Any:
    model: Any = make()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def backward(model: Any, step: int, part: int, dtype: torch.dtype) -> None:
    y = model(place(values("normal", (5, 12), dtype, 100 * step + part)))
    y.backward(y.detach())


class Alone:
    """One process without FSDP2: float32 weights, cast for each group."""

    def __init__(self, policy: MixedPrecisionPolicy = POLICY) -> None:
        self.module, self.policy = make(), policy

    def gradients(self, step: int) -> None:
        dtype = self.policy.param_dtype or torch.float32
        grads = [list[Tensor]() for _ in self.module.parameters()]
        for part in range(GROUPS):
            cast = copy.deepcopy(self.module).to(dtype)
            cast.zero_grad()
            backward(cast, step, part, dtype)
            for of, p in zip(grads, cast.parameters(), strict=True):
                assert p.grad is not None
                of.append(p.grad.float())
        for p, of in zip(self.module.parameters(), grads, strict=True):
            while len(of) > 1:
                of[:] = [a + b for a, b in zip(of[0::2], of[1::2], strict=True)]
            p.grad = of[0]


def gradients(model: Any, groups: GradientGroups, step: int, dtype: torch.dtype = torch.bfloat16) -> None:
    model.zero_grad()
    for part in groups.own:
        backward(model, step, part, dtype)
        groups.add()
    groups.reduce()


def whole(t: Any) -> Tensor:
    full: Tensor = t.full_tensor() if isinstance(t, DTensor) else t
    return full


def check_gradients_have_the_bits_of_one_process() -> None:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for policy in (POLICY, MixedPrecisionPolicy()):
        dtype = policy.param_dtype or torch.float32
        with samebits.batch_invariant("error"):
            alone, model = Alone(policy), sharded(mesh, policy)
            groups = GradientGroups(model, GROUPS)
            for step in range(2 if policy is POLICY else 1):
                alone.gradients(step)
                gradients(model, groups, step, dtype)
                for p, q in zip(model.parameters(), alone.module.parameters(), strict=True):
                    assert isinstance(p.grad, DTensor)
                    assert_same_bits(whole(p.grad), q.grad, f"{dtype} {tuple(q.shape)}")


def check_norms_have_the_bits_of_one_process() -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device().type, (ranks,))
    meshes: list[tuple[DeviceMesh, Any]] = [(mesh, [p]) for p in (Shard(0), Shard(1), Replicate())]
    if ranks > 2:
        both = init_device_mesh(device().type, (2, ranks // 2), mesh_dim_names=("a", "b"))
        meshes += [(both, (p, Shard(0))) for p in (Shard(0), Shard(1), Replicate())]
    shapes = (9, 256), (16, 1024), (5, 3), (3, 8, 128), (7, 2, 96), (1, 9_000)
    for on, placements in meshes:
        for i, shape in enumerate(shapes):
            for dtype in (torch.float32, torch.bfloat16):
                x = place(values("wide" if i % 2 else "normal", shape, dtype, i))
                for order in (1, 2, float("inf")) if shape == (16, 1024) else (2,):
                    with samebits.batch_invariant("error"):
                        want = torch.linalg.vector_norm(x, order)
                        split = distribute_tensor(x, on, placements)
                        got = torch.linalg.vector_norm(split, order)
                        many = torch._foreach_norm([split, split], order)
                    for norm in (got, *many):
                        assert_same_bits(whole(norm), want, f"{placements} {shape} {dtype} {order}")
    line = distribute_tensor(place(torch.ones(128 * ranks + 1)), mesh, [Shard(0)])
    sums = DTensor.from_local(place(torch.ones(128)), mesh, [Partial()], run_check=False)
    with samebits.batch_invariant("error"):
        assert_same_bits(whole(torch.linalg.vector_norm(line)), place(torch.tensor(128.0 * ranks + 1)).sqrt())
        for refused in (
            lambda: torch.linalg.vector_norm(line, 3),
            lambda: torch.linalg.vector_norm(line, dim=0),
            lambda: torch.linalg.vector_norm(line.clone().requires_grad_()),
            lambda: torch.linalg.vector_norm(sums),
        ):
            with pytest.raises(UncoveredError, match="norm"):
                refused()


class Training:
    """AdamW with clipped gradients, with FSDP2 and in one process, compared at each step."""

    def __init__(self, mesh: DeviceMesh, **kernel: bool) -> None:
        self.alone, self.kernel = Alone(), kernel
        self.want = torch.optim.AdamW(self.alone.module.parameters(), lr=0.01, **kernel)
        self.shard(mesh)

    def shard(self, mesh: DeviceMesh) -> None:
        self.model, self.group = sharded(mesh), mesh.get_group()
        self.got = torch.optim.AdamW(self.model.parameters(), lr=0.01, **self.kernel)
        self.groups = GradientGroups(self.model, GROUPS, self.group)

    def step(self, number: int) -> None:
        self.alone.gradients(number)
        gradients(self.model, self.groups, number)
        pairs = list(zip(self.model.parameters(), self.alone.module.parameters(), strict=True))
        got, want = (clip_grad_norm_(parameters, 0.5) for parameters in zip(*pairs, strict=True))
        assert want > 0.5
        assert_same_bits(whole(got), want)
        for optimizer in (self.want, self.got):
            optimizer.step()
            optimizer.zero_grad()
        for p, q in pairs:
            assert_same_bits(whole(p.detach()), q.detach(), f"step {number} {self.kernel}")

    def state(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.got), strict=True))

    def save(self, to: str) -> None:
        dcp.save(self.state(), checkpoint_id=to)

    def load(self, at: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=at, process_group=self.group)
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.got, **loaded)


def check_clipped_steps_and_checkpoints_have_the_bits_of_one_process() -> None:
    ranks, kind = dist.get_world_size(), device().type
    mesh = half = init_device_mesh(kind, (ranks,))
    if ranks > 1:  # two halves, which do the same side by side
        half = init_device_mesh(kind, (2, ranks // 2), mesh_dim_names=("copy", "dp"))["dp"]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    with samebits.batch_invariant("error"):
        training = Training(mesh, foreach=True)
        training.step(0)
        training.step(1)
        training = Training(mesh, fused=True)
        training.step(0)
        training.save(folder[0])
        alone = copy.deepcopy((training.alone.module.state_dict(), training.want.state_dict()))
        for others in (mesh, half):
            training.shard(others)
            training.load(folder[0])
            training.alone.module.load_state_dict(alone[0])
            training.want.load_state_dict(copy.deepcopy(alone[1]))
            training.step(1)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def check_refusals() -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device().type, (ranks,))
    model = sharded(mesh)
    with pytest.raises(ValueError, match="the module that fully_shard was called on"):
        GradientGroups(model.parameters())
    with pytest.raises(TypeError, match=r"float32, got DTensor of torch\.bfloat16"):
        GradientGroups(fully_shard(nn.Linear(2, 2, dtype=torch.bfloat16, device=device()), mesh=mesh))
    beside = nn.Sequential(sharded(mesh), nn.Linear(2, 2, device=device()))
    with pytest.raises(ValueError, match="got Parameter"):
        GradientGroups(beside)
    if ranks > 1:
        replicas = init_device_mesh(device().type, (2, ranks // 2), mesh_dim_names=("r", "s"))
        with pytest.raises(ValueError, match="HSDP"):
            GradientGroups(fully_shard(nn.Linear(8, 8, device=device()), mesh=replicas))
    low = sharded(mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    GradientGroups(low, GROUPS)
    with pytest.raises(TypeError, match=r"reduce_dtype=torch\.float32"):
        backward(low, 0, 0, torch.bfloat16)
