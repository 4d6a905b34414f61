"""``kernels/routing.cu`` and ``sort_slots.cu``: on a CPU by a C++ compiler, and on a GPU."""

from __future__ import annotations

import pytest
import torch

import samebits
from samebits.backends.cuda import compiler, routing, rows, slots
from samebits.backends.reference import rows as reference
from samebits.testing import assert_same_bits
from tests.support import host_kernels
from tests.support.cubins import resources
from tests.support.routers import CASES, Case, logits_of, steps

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
on_cases = pytest.mark.parametrize("case", CASES, ids=str)
KINDS = "normal", "ties", "special", "equal"


def check(case: Case, kind: str, tokens: int, dtype: torch.dtype, device: str) -> None:
    x = logits_of(kind, tokens, case.experts, dtype)
    options = case.options()
    rest = [
        options[name] for name in ("score", "groups", "top_groups", "renormalize", "eps", "scale", "dtype")
    ]
    want = reference.topk_routing(x, options["bias"], case.k, *rest)
    got = routing.topk_routing(x.to(device), case.bias(device), case.k, *rest)
    assert_same_bits(got[0].cpu(), want[0], f"{case}, {kind}, {tokens} tokens, {dtype}")
    assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_the_kernels_compile(arch: str) -> None:
    specs = [slots.sort_spec("sort_slots")]  # and all of its file
    for blocks, score, grouped in ((1, "softmax", False), (2, "sigmoid", True), (4, "logits", False)):
        specs.append(routing.kernel_spec(BF16, F32, score, blocks, grouped))
    assert {resources(spec, arch).local_bytes for spec in specs} == {0}


@host_kernels.needs_compiler
@on_cases
def test_routing_on_a_cpu(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    host_kernels.use(monkeypatch, routing)
    for i, kind in enumerate(KINDS):
        check(case, kind, 5 + i, (BF16, F16, F32)[i % 3], "cpu")
    check(case, "normal", 0, BF16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@on_cases
def test_routing_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    for kind in KINDS:
        for tokens in (0, 1, 3, 64, 257):
            check(case, kind, tokens, dtype, "cuda")


@pytest.mark.gpu
@on_cases
def test_it_is_the_steps_one_by_one_on_a_gpu(case: Case) -> None:
    for kind in KINDS:
        x = logits_of(kind, 65, case.experts, BF16).cuda()
        with samebits.batch_invariant():
            want = steps(x, case)
        weights, experts = samebits.topk_routing(x, case.k, **case.options("cuda"))
        assert_same_bits(weights, want[0])
        assert torch.equal(experts, want[1])


# Slots, experts that are chosen among, experts that there are, and slots of a sequence.
SORTED = [(0, 3, 3, 0), (1, 1, 1, 0), (8, 128, 128, 0), (512, 128, 128, 8), (2048, 128, 128, 0)]
SORTED += [(2047, 3, 2, 5), (700, 600, 512, 0), (33, 1023, 1023, 1), (300, 40, 31, 3), (64, 1, 9, 64)]
MANY = [(2049, 128, 128, 8), (2600, 1, 1, 0), (2048, 600, 512, 1), (5000, 1500, 1023, 7), (9001, 3, 0, 0)]
"""More than one block sorts."""
LARGEST = [(65536, 128, 128, 0), (70001, 1, 64, 5), (131072, 256, 256, 64), (1_000_003, 300, 256, 8)]


def check_sorted(slots_: int, most: int, count: int, each: int, device: str) -> None:
    experts = torch.randint(-2, most, (slots_,), generator=torch.Generator().manual_seed(slots_))
    got = rows.route(experts.to(device), count, each)
    for one, want in zip(got, reference.route(experts, count, each), strict=True):
        assert one.dtype == want.dtype
        assert torch.equal(one.cpu(), want)


@host_kernels.needs_compiler
@pytest.mark.parametrize("case", [*SORTED, *MANY], ids=str)
def test_sorted_slots_on_a_cpu(monkeypatch: pytest.MonkeyPatch, case: tuple[int, int, int, int]) -> None:
    host_kernels.use(monkeypatch, slots)
    check_sorted(*case, "cpu")


@host_kernels.needs_compiler
def test_warps_that_sort_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of more than 65,536 slots do."""
    host_kernels.use(monkeypatch, slots)
    monkeypatch.setattr(slots, "_shares", lambda *_: (3, 11 * 16 * 32, 16))
    check_sorted(16000, 12, 9, 3, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SORTED, *MANY, *LARGEST], ids=str)
def test_sorted_slots_on_a_gpu(case: tuple[int, int, int, int]) -> None:
    check_sorted(*case, "cuda")


def test_when_one_block_sorts() -> None:
    assert slots._one_block_sorts(2048, 256)
    assert not slots._one_block_sorts(2049, 8)
    assert not slots._one_block_sorts(2048, 512)
    assert not slots._one_block_sorts(32, 1024)


@pytest.mark.parametrize("experts", [0, 1, 128, 1023])
def test_every_slot_has_a_block_and_a_warp(experts: int) -> None:
    for count in (1, 2049, 65536, 65537, 999_999, 2**31 - 1):
        blocks, span, warps = slots._shares(count, experts)
        assert blocks <= 128
        assert span % (32 * warps) == 0
        assert span * (blocks - 1) < count <= span * blocks
