"""Attention on CUDA: launches and machine code without a GPU; every kernel and schedule on one."""

from __future__ import annotations

import importlib.util
import inspect
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits import FMA, TENSOR_CORE
from samebits.backends import UnavailableError
from samebits.backends.attention import Attention
from samebits.backends.cuda import attention as on_cuda
from samebits.backends.cuda import compiler, devices, matmul, runtime
from samebits.backends.cuda.attention import backward_sm90, catalogue, universal, universal_backward
from samebits.contract import AMPERE, HOPPER
from samebits.testing import assert_same_bits
from samebits.tools.verify import attention as cases
from samebits.tools.verify import plan
from samebits.tools.verify.attention import VARIANTS, AttentionCase, AttentionVariant, Form, build
from samebits.tools.verify.report import Report
from tests.support.cubins import resources
from tests.support.devices import FAMILY, case, multiprocessors
from tests.support.fake_gpu import fake_gpu

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
DRAWN = cases.attentions(thorough=False)

# Bytes of shared memory that a block may use, of every architecture.
SMEM = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120a": 99}
GPUS = {arch: SMEM.get(arch, 227) << 10 for arch in compiler.ARCHITECTURES}


def on_gpu(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a", multiprocessors: int = 132) -> None:
    """CPU tensors pass for those of such a GPU."""
    number = int(arch[3:].rstrip("a"))
    info = devices.DeviceInfo(-1, "a GPU", divmod(number, 10), multiprocessors, GPUS[arch], 50 << 20)
    assert info.arch.target == arch
    monkeypatch.setattr(devices, "device_info", lambda index: info)
    monkeypatch.setattr(matmul, "family", inspect.unwrap(matmul.family))  # which keeps what it found


def call(
    queries: int, keys: int, *, batch: int = 1, heads: int = 8, size: int = 128, dtype: torch.dtype = BF16
) -> Attention:
    """Causal, with two heads of q for each of k."""
    one = torch.empty((), dtype=dtype)
    q = one.expand(batch, queries, 2 * heads, size)
    k = one.expand(batch, keys, heads, size)
    key = (FMA if dtype == F32 else TENSOR_CORE).key
    return Attention(q, k, k, key, 0.125, window=(-1, 0), align="last")


@pytest.mark.parametrize("of", VARIANTS, ids=str)
def test_every_launch_adds_up(launches: list[str], of: AttentionVariant) -> None:
    """Under every schedule; and verify runs each of them without ``--thorough``, too."""
    schedules: dict[bool, set[object]] = {False: set(), True: set()}
    for i, drawn in enumerate(c for c in DRAWN if c.of == of):
        x, grad = build(drawn, TENSOR_CORE, CPU)
        every = [*catalogue.forwards(x)]
        tried = {way.schedule for way in cases._in_turn(iter(every), i, thorough=False)}
        for way in every:
            out, lse, lse2 = way.run()
            assert (out.shape, out.dtype) == ((*x.q.shape[:-1], of.of_values), of.dtype)
            assert out.is_contiguous()
            assert lse.shape == lse2.shape == x.lse_shape
        backwards = [*catalogue.backwards(x, grad)] if drawn.gradients else []
        for way in backwards:
            dq, dk, dv, dmask, dsinks = way.run(grad, out, lse2, grad_mask=drawn.grad_mask)
            assert [t.shape for t in (dq, dk, dv)] == [t.shape for t in (x.q, x.k, x.v)]
            assert (dmask is not None, dsinks is not None) == (drawn.grad_mask, drawn.sinks)
        tried |= {way.schedule for way in cases._in_turn(iter(backwards), i, thorough=False)}
        for way in every + backwards:
            s = way.schedule[0] if isinstance(way.schedule, tuple) else way.schedule  # with splits
            schedules[False].add(s)
            if way.schedule in tried:
                schedules[True].add(s)
    assert schedules[True] == schedules[False]
    assert all(Path(name).stem.startswith("attention") or name.startswith("columns") for name in launches)
    assert {"attention.cu"} <= set(launches)


@pytest.mark.parametrize("size", [64, 128, 136, 192, 256])
def test_gradients_are_launched_in_the_order_in_which_they_wait(launches: list[Any], size: int) -> None:
    """First what waits for D. The others wait for the end of that before them, by one block."""
    x = call(300, 300, size=size)
    lse = torch.empty(x.lse_shape)
    backward_sm90.backward(x, torch.empty(x.q.shape, dtype=BF16), torch.empty(x.q.shape, dtype=BF16), lse)
    assert launches[0] == "attention_dots.cu"
    found = [dict(launch.spec.constants)["GRADS"] for launch in launches[1:]]
    assert found == ([3, 4] if size <= 128 else [1, 2, 4])
    assert all(launch.spec.programmatic for launch in launches)
    static = 3 * 8
    assert all(launch.spec.smem + static <= GPUS["sm_90a"] for launch in launches)


def test_gradients_that_are_contiguous_but_not_aligned_are_copied() -> None:
    """Such as a part of what a concatenation gets. The copy engine takes multiples of 16 bytes alone."""
    x = call(300, 300)
    lse = torch.empty(x.lse_shape)
    out, room = torch.empty(x.q.shape, dtype=BF16), torch.empty(x.q.numel() + 4, dtype=BF16)
    with fake_gpu() as gpu:
        assert room.data_ptr() % 16 == 0
        backward_sm90.backward(x, room[4:].view(x.q.shape), out, lse)
        copied = [launch for launch in gpu.log if launch[0] == "attention_backward_sm90.cu"]
        assert len(copied) == 2
        for launch in copied:
            maps = [struct.unpack_from("@Q", launch[3], 128 * i)[0] for i in range(4)]
            assert not any(address % 16 for address in maps)


@pytest.mark.long
def test_what_verify_compiles_ahead_is_all_that_runs(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: set[object] = set()
    load = runtime.load

    def noted(spec: compiler.KernelSpec, device: int) -> object:
        if spec.source.startswith("attention") and spec.entry != "grad_dots":  # a small one
            loaded.add((spec.source, spec.constants))
        return load(spec, device)

    monkeypatch.setattr(runtime, "load", noted)
    for ahead in plan.attention_kernels(DRAWN, TENSOR_CORE.on(HOPPER), CPU):
        ahead()
    ready = loaded.copy()
    for drawn in DRAWN:
        x, grad = build(drawn, TENSOR_CORE, CPU)
        for way in catalogue.forwards(x):
            out, _, lse2 = way.run()
        for way in catalogue.backwards(x, grad) if drawn.gradients else ():
            way.run(grad, out, lse2, grad_mask=drawn.grad_mask)
    assert loaded == ready


def test_a_choice_is_one_of_the_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every GPU, for every size of heads; and no schedule takes more shared memory than there is."""
    for arch, smem in GPUS.items():
        on_gpu(monkeypatch, arch)
        for dtype in (BF16, F32) if arch != "sm_75" else (F32,):
            # Tiles of float32 with heads above 128 do not fit into a T4's shared memory.
            for size in (1, 16, 40, 64, 96, 128, *((192, 256) if arch != "sm_75" else ())):
                for queries, keys in ((1, 1), (1, 40_000), (17, 700), (4096, 4096)):
                    x = call(queries, keys, size=size, dtype=dtype)
                    of = universal.variant(x)
                    chosen, splits = universal.choose(x, of)
                    assert chosen in universal.forward_schedules(of, smem)
                    assert 1 <= splits <= (-(-keys // 512) if chosen.split else 1)
                    found = universal_backward.choose_backward(x, of)
                    assert found in universal_backward.backward_schedules(of, smem)
                assert all(spec.smem <= smem for spec in catalogue.specs(x)), (arch, size)


def test_packed_tokens_of_no_sequence() -> None:
    """The kernel finds out that the offsets are bad, as it does of others."""
    q, ends = torch.zeros(5, 4, 64, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    with fake_gpu():
        assert samebits.attention(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends).shape == q.shape


def test_keys_are_split_where_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)

    def splits(*shape: int, **more: int) -> int:
        x = call(*shape, **more)
        return universal.choose(x, universal.variant(x))[1]

    assert splits(1, 500) == splits(4096, 4096, batch=4) == splits(1, 512, batch=512) == 1
    assert splits(1, 65536) > 30
    assert splits(1, 65536, batch=4) > 1


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("of", "arch"),
    [
        (AttentionVariant(F32, 128, 128, step="fma"), "sm_75"),
        (AttentionVariant(BF16, 256, 256, BF16, softcap=True, place="odd"), "sm_80"),
        (AttentionVariant(F16, 64, 64, torch.bool), "sm_86"),
        (AttentionVariant(BF16, 40, 96, place="by head"), "sm_89"),
        (AttentionVariant(BF16, 128, 128), "sm_90a"),
        (AttentionVariant(F16, 192, 128, paged=True), "sm_90a"),
        (AttentionVariant(BF16, 576, 512), "sm_90a"),
        (AttentionVariant(BF16, 192, 256, softcap=True), "sm_90a"),
        (AttentionVariant(BF16, 256, 256, softcap=True), "sm_90a"),
        (AttentionVariant(BF16, 64, 64, F16, softcap=True), "sm_100a"),
        (AttentionVariant(F32, 64, 64, paged=True, step="fma"), "sm_103a"),
        (AttentionVariant(BF16, 128, 64, softcap=True, place="spread"), "sm_120a"),
    ],
    ids=str,
)
def test_kernels_compile_without_spills(
    of: AttentionVariant, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each under its first schedule, which has the most to hold."""
    on_gpu(monkeypatch, arch)
    form: Form = "pages" if of.paged else "batch"
    x, _ = build(AttentionCase(of, form, False, (3,), (20,), softcap=float(of.softcap)), TENSOR_CORE, CPU)
    grad_mask = of.mask is not None and of.mask.is_floating_point
    first = {
        (s.source, s.entry, dict(s.constants).get("GRADS")): s
        for s in reversed([*catalogue.specs(x, grad_mask=grad_mask)])
    }
    assert len(first) >= (2 if of.paged else 5)
    for spec in first.values():
        cubin = resources(spec, arch)
        # Registers do not hold the biases of a float mask beside scores.
        assert cubin.spill_bytes == 0 or grad_mask, spec
        assert not cubin.advice, spec


@pytest.mark.parametrize("backward", [False, True])
def test_refusals(backward: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Attention) -> object:
        if not backward:
            return on_cuda.forward(x)
        grad = torch.empty((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.q.dtype)
        return on_cuda.backward(x, grad, grad, torch.empty(x.lse_shape), grad_mask=False)

    refused: list[tuple[Callable[[], Attention], type[Exception], str]] = [
        (
            lambda: call(3, 20, size=513),
            UnavailableError,
            "keys up to 576 and of values up to 512, got 513 and 513",
        ),
        (
            lambda: replace(call(3, 20), contract=TENSOR_CORE.on(AMPERE).key),
            ValueError,
            "expected the family of NVIDIA H200, HOPPER",
        ),
    ]
    for x, error, match in refused:
        with pytest.raises(error, match=match):
            run(x())
    here = devices.device_info(0)
    monkeypatch.setattr(devices, "device_info", lambda index: replace(here, max_smem=4096))
    with pytest.raises(UnavailableError, match="has 4096 bytes of shared memory, too few for"):
        run(call(3, 20))
    on_gpu(monkeypatch, "sm_75")
    with pytest.raises(UnavailableError, match="which bits the tensor cores of a GPU"):
        run(call(3, 20))
    assert not launches
    run(call(3, 20, dtype=F32))
    assert launches


# Edges that drawn cases may miss: form, packed, queries, keys, heads of k, group, and the rest.
EDGES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("batch", False, (0, 0), (5, 5), 1, 2), {}),
    (("batch", False, (5, 5), (0, 0), 2, 1), {"sinks": True}),
    (("packed", True, (0, 0), (0, 0), 1, 1), {}),
    (("packed", True, (3, 0, 70, 1), (0, 9, 40, 1300), 2, 3), {"window": (-1, 0), "align": "last"}),
    (("batch", False, (130, 130), (20, 20), 1, 2), {"window": (-1, 0), "align": "last", "sinks": True}),
    (("batch", False, (64,), (3000,), 1, 2), {"window": (40, 7), "align": "last"}),
    (("batch", False, (1,), (9001,), 2, 4), {}),
    (("batch", False, (2, 2), (4100, 700), 1, 16), {"window": (1030, 0), "align": "last", "right": 3}),
    (("batch", False, (140, 140), (140, 11), 1, 1), {"align": "slots", "left": 3}),
    (("batch", False, (1100,), (1100,), 1, 1), {"window": (-1, 0), "align": "first"}),
    (("packed", True, (1, 1, 1, 1, 1), (513, 0, 1025, 1, 128), 1, 8), {"window": (-1, 0), "align": "last"}),
]


def assert_conforms(some: list[AttentionCase]) -> None:
    found = Report("", "", "", "", {}, True)
    contract = TENSOR_CORE.on(FAMILY)
    device = torch.device("cuda", torch.cuda.current_device())
    cases.verify_attention(found, some, catalogue, contract, device, thorough=True)
    assert found.compared > 0
    assert found.differing == 0, found.first


@pytest.mark.gpu
@pytest.mark.parametrize("of", VARIANTS, ids=str)
def test_every_schedule_of_what_is_drawn(of: AttentionVariant) -> None:
    assert_conforms([c for c in DRAWN if c.of == of])


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "options"), EDGES)
@pytest.mark.parametrize("of", [VARIANTS[i] for i in (0, 2, 8, 9, 14)], ids=str)
def test_every_schedule_at_the_edges(
    of: AttentionVariant, shape: tuple[Any, ...], options: dict[str, Any]
) -> None:
    assert_conforms([AttentionCase(of, *shape, **options)])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
def test_blocks_that_take_several_tiles(count: int) -> None:
    with multiprocessors(count):
        for of in VARIANTS[:3]:
            assert_conforms([c for c in DRAWN if c.of == of][:4])


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys"), [(1, 5000), (700, 700)])
def test_in_a_graph_and_back_to_back(queries: int, keys: int) -> None:
    """Launches that may begin early wait for what they read, and for who reads what they overwrite."""
    q, k = (case("normal", (2, *of, 64), BF16, "cuda", of[0]) for of in ((queries, 8), (keys, 2)))

    def steps(*, wait: bool) -> torch.Tensor:
        x = q
        for _ in range(8):
            x = samebits.attention(x, k, k, causal=True)
            if wait:
                torch.cuda.synchronize()
        return x

    want = steps(wait=True)
    assert_same_bits(steps(wait=False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps(wait=False)
    out.fill_(torch.nan)
    graph.replay()
    assert_same_bits(out, want)
