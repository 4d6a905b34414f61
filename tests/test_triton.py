"""Triton: the choice of it, kernels that compile for every GPU without one, indices in its interpreter."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import samebits
from samebits import FMA, TENSOR_CORE, backends
from samebits.contract import contract_from_key
from samebits.ops._library import check_operands

# ---- the choice of a backend: needs no Triton


def key_of(t: torch.Tensor) -> str:
    return check_operands("matmul", None, {"a": t, "b": t})[1]


def test_use_backend_as_a_context_nests_restores_and_stays_in_its_thread() -> None:
    before = backends.asked("cuda")
    seen: list[str] = []
    with samebits.use_backend("triton"):
        thread = threading.Thread(target=lambda: seen.append(backends.asked("cuda")))
        thread.start()
        thread.join()
        assert backends.asked("cuda") == "@triton"
        with samebits.use_backend(None):
            assert backends.asked("cuda") == ""
        with pytest.raises(RuntimeError, match="inside"), samebits.use_backend("cuda"):
            raise RuntimeError("inside")
        assert backends.asked("cuda") == "@triton"
    assert seen == [before] == [backends.asked("cuda")] == [""]


def test_use_backend_as_a_function() -> None:
    samebits.use_backend("triton")
    try:
        assert backends.asked("cuda") == "@triton"
    finally:
        samebits.use_backend(None)
    assert backends.asked("cuda") == ""


def test_an_explicit_backend_never_falls_back() -> None:
    a = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"expected one of .*, got 'cublas'"):
        samebits.use_backend("cublas")
    for name in ("cuda", "triton"):
        with (
            samebits.use_backend(name),
            pytest.raises(ValueError, match=f"backend {name}: expected GPU tensors, got cpu"),
        ):
            samebits.matmul(a, a)
    with samebits.use_backend("reference"):
        assert samebits.matmul(a, a).tolist() == [[2.0, 2.0], [2.0, 2.0]]
        with pytest.raises(ValueError, match="backend reference: expected CPU tensors, got cuda"):
            backends.asked("cuda")
    if not torch.cuda.is_available():
        with pytest.raises(
            backends.UnavailableError, match=r"^samebits: no backend for this GPU tensor. triton: "
        ):
            backends.on_gpu("matmul", f"{FMA.key}@triton", 0)
        with pytest.raises(backends.UnavailableError, match=r"tensor. cuda: .*; triton: "):
            backends.on_gpu("matmul", FMA.key, 0)
    with pytest.raises(backends.UnavailableError, match="triton: it does not compute rows yet"):
        backends.on_gpu("rows", f"{FMA.key}@triton", 0)


def test_the_choice_is_no_part_of_the_contract() -> None:
    assert contract_from_key(f"{TENSOR_CORE.key}@triton") == TENSOR_CORE


def test_torch_compile_sees_a_new_choice() -> None:
    compiled = torch.compile(lambda a: samebits.matmul(a, a), backend="aot_eager", fullgraph=True)
    a = torch.ones(2, 2)
    compiled(a)
    with samebits.use_backend("triton"), pytest.raises(Exception, match="expected GPU tensors, got cpu"):
        compiled(a)
    assert_ones = compiled(a)
    assert assert_ones.tolist() == [[2.0, 2.0], [2.0, 2.0]]


# ---- compiling for a GPU that is not here

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
NVIDIA = [name for name in TARGETS if name.startswith("sm_")]
SHARED = {"sm_90": 227 << 10, "sm_100": 227 << 10}  # bytes of shared memory that a program may have
PLACES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def scheduled(s: Any) -> dict[str, Any]:
    """The constants and options of a schedule."""
    blocks = {"BLOCK_M": s.block_m, "BLOCK_N": s.block_n, "BLOCK_K": s.block_k, "GROUP": s.group}
    return blocks | {"num_warps": s.warps, "num_stages": s.stages}


def compiled(target: str, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The assembly of a kernel; what is in neither dict is a 32-bit integer."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options["enable_fp_fusion"] = False
    result = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    assert result.metadata.shared <= SHARED.get(target, result.metadata.shared)
    text: str = result.asm["ptx"] if "ptx" in result.asm else result.asm["amdgcn"]
    assert ".ftz" not in text
    assert "tf32" not in text
    if "amdgcn" in result.asm:
        # The mode in which f32 subnormals are kept: FP_DENORM (both kinds) in the kernel's descriptor.
        assert re.search(r"\.amdhsa_float_denorm_mode_32 3", text)
    return text


def general(
    target: str, dtype: torch.dtype, out: torch.dtype, along: tuple[str, str], s: Any, **given: str
) -> str:
    from samebits.backends.triton import kernels

    types = {"a": f"*{PLACES[dtype]}", "b": f"*{PLACES[dtype]}", "out": f"*{PLACES[out]}", **given}
    constants = {name: None for name in ("acc", "bias", "spans") if name not in given}
    fma = s.stages == 1
    constants |= {"FMA": fma, "CLOSING_ZERO": fma, "A_ALONG": along[0], "B_ALONG": along[1]}
    return compiled(target, kernels.matmul, types, constants | scheduled(s))


@pytest.mark.parametrize("target", TARGETS)
def test_fma_compiles(target: str) -> None:
    pytest.importorskip("triton")
    from samebits.backends.triton.matmul import FMA_SCHEDULES

    for i, schedule in enumerate(FMA_SCHEDULES):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        carried = {"acc": "*fp32", "spans": "*i32"} if i % 2 else {"bias": "*fp32"}
        text = general(target, dtype, torch.float32, (("k", "row"), ("", ""))[i % 2], schedule, **carried)
        if target in NVIDIA:
            assert "fma.rn.f32" in text
            # Nothing but fused multiply-adds, and the sum with the bias.
            assert not re.search(r"\b(mul|mad|sub)(\.rn)?\.f32", text)
        else:
            assert re.search(r"v_(pk_)?fma(c|_mix)?_f32", text)


@pytest.mark.parametrize("target", NVIDIA)
def test_tensor_core_compiles(target: str) -> None:
    pytest.importorskip("triton")
    from samebits.backends.triton.matmul import MMA_SCHEDULES

    for i, schedule in enumerate(MMA_SCHEDULES):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        carried = {"acc": "*fp32", "spans": "*i64"} if i % 2 else {"bias": f"*{PLACES[dtype]}"}
        along = (("k", "k"), ("k", "row"), ("row", "row"), ("", ""))[i]
        text = general(target, dtype, torch.float32 if i % 2 else dtype, along, schedule, **carried)
        assert_multiplies_16_bit_operands(text, target)


@pytest.fixture
def gpu(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target instead of the GPU here."""
    pytest.importorskip("triton")
    from samebits.backends.triton import matmul

    found = matmul._Gpu(132, SHARED.get(target, 0) - 1024, target in SHARED, target == "sm_100")
    monkeypatch.setattr(matmul, "_gpu", lambda device: found)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("target", SHARED)
def test_tiles_compile(target: str) -> None:
    from samebits.backends.triton import kernels
    from samebits.backends.triton.matmul import TILE_SCHEDULES, fits, tile_constants

    device = torch.device("cuda")
    for i, s in enumerate(TILE_SCHEDULES):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        a_k_major, b_k_major, accumulate = i % 2 == 0, i % 3 == 0, i % 4 == 3
        size = 4 if accumulate else 2
        assert fits(s, size, accumulate, device)
        blocks = {
            "a": (s.block_m, s.block_k) if a_k_major else (s.block_k, s.block_m),
            "b": (s.block_n, s.block_k) if b_k_major else (s.block_k, s.block_n),
            "out": (s.block_m, s.block_n // s.parts),
        }
        held = dict.fromkeys("ab", PLACES[dtype]) | {"out": "fp32" if accumulate else PLACES[dtype]}
        types = {name: f"tensordesc<{held[name]}{list(block)}>" for name, block in blocks.items()}
        constants = {
            "bias": None,
            "A_K_MAJOR": a_k_major,
            "B_K_MAJOR": b_k_major,
            "ACCUMULATE": accumulate,
            "PARTS": s.parts,
        }
        made_for = tile_constants(s, size, accumulate, device)
        made_for.pop("enable_fp_fusion")
        text = compiled(target, kernels.matmul_tiles, types, constants | made_for)
        assert_multiplies_16_bit_operands(text, target)


ROWS = dict.fromkeys(
    ["m", "s", "u", "target_logit", "logp", "entropy", "shift", "log_sum", "grad", "grad_entropy"], "*fp32"
) | {"target": "*i64", "scale": "fp32"}


@pytest.mark.parametrize("target", TARGETS)
def test_log_probabilities_compile(target: str) -> None:
    pytest.importorskip("triton")
    from samebits.backends.triton import logp
    from samebits.backends.triton import logp_kernels as kernels

    for logits, u in itertools.product(PLACES.values(), ({}, {"u": None})):
        types = ROWS | {"logits": f"*{logits}"}
        text = compiled(target, kernels.block_statistics, types, logp.BLOCK_STATISTICS | u)
        assert_exact_functions(text, target)
    for u in ({}, {"u": None}):
        text = compiled(target, kernels.combine, ROWS, logp.COMBINE | u)
        assert_exact_functions(text, target)
        if target in NVIDIA:
            assert ("div.rn.f32" in text) == (not u)
    for dtype, none in itertools.product(PLACES.values(), ({}, {"grad_entropy": None})):
        types = ROWS | {"logits": "*fp32", "out": f"*{dtype}"}
        text = compiled(target, kernels.grad_logits, types, logp.GRAD_LOGITS | none)
        assert_exact_functions(text, target)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("target", SHARED)
def test_fused_log_probabilities_compile(target: str) -> None:
    from samebits.backends.triton import logp_kernels as kernels
    from samebits.backends.triton.linear_logp import STATISTICS_SCHEDULES
    from samebits.backends.triton.matmul import TILE_SCHEDULES, tile_constants

    fused = [(kernels.statistics_tiles, s) for s in STATISTICS_SCHEDULES]
    fused += [(kernels.grad_logits_tiles, s) for s in TILE_SCHEDULES]
    for i, (kernel, s) in enumerate(fused):
        dtype = ("bf16", "fp16")[i % 2]
        blocks = {
            "hidden": (s.block_m, s.block_k),
            "weight": (s.block_n, s.block_k),
            "out": (s.block_m, s.block_n // s.parts),
        }
        types = ROWS | {name: f"tensordesc<{dtype}{list(block)}>" for name, block in blocks.items()}
        types["bias"] = f"*{dtype}"
        size = 2 if kernel is kernels.grad_logits_tiles else 0
        constants = tile_constants(s, size, False, torch.device("cuda"))
        constants.pop("enable_fp_fusion")
        if size:
            constants["PARTS"] = s.parts
        if i % 3 == 0:
            constants |= dict.fromkeys({"bias", "u", "grad_entropy"} & set(kernel.arg_names))
        text = compiled(target, kernel, types, constants)
        assert_multiplies_16_bit_operands(text, target)
        assert_exact_functions(text, target)


def assert_exact_functions(text: str, target: str) -> None:
    """No exp, log or quotient of the GPU's own."""
    if target in NVIDIA:
        assert "fma.rn.f32" in text
        assert not re.search(r"\.approx|div\.full|\b(ex2|lg2|mad\.(rn\.)?f32)", text)
        assert not re.search(r"\b(add|sub|mul)\.f32", text)  # without .rn, which ptxas might fuse
    else:
        assert not re.search(r"v_(exp|log)_f32", text)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kernels", "matmul"),
        ("kernels", "matmul_tiles"),
        ("logp_kernels", "block_statistics"),
        ("logp_kernels", "combine"),
        ("logp_kernels", "grad_logits"),
        ("logp_kernels", "statistics_tiles"),
        ("logp_kernels", "grad_logits_tiles"),
    ],
)
def test_no_size_or_stride_is_compiled_in(module: str, name: str) -> None:
    """Triton compiles anew for an integer that is 1, or a multiple of 16, unless told not to."""
    pytest.importorskip("triton")
    kernels = importlib.import_module(f"samebits.backends.triton.{module}")
    others = {"a", "b", "acc", "bias", "spans", "out", "hidden", "weight", "logits", *ROWS}
    if module == "kernels":
        others -= {"m"}  # there it is a size
    sizes = [p for p in getattr(kernels, name).params if not p.is_constexpr and p.name not in others]
    assert len(sizes) >= 3
    assert all(p.do_not_specialize for p in sizes)


def test_tiles_are_stored_in_rows_of_whole_16_bytes() -> None:
    """The copy engine wrote beyond the one element of an output of [1, 1]."""
    pytest.importorskip("triton")
    from samebits.backends.triton.matmul import takes_tiles

    def takes(m: int, n: int, out_dtype: torch.dtype = torch.bfloat16) -> bool:
        room = -(-n // 8) * 8  # rows of every tensor start at multiples of 16 bytes
        a, b = torch.empty(1, 1, m, 64, dtype=torch.bfloat16), torch.empty(64, room, dtype=torch.bfloat16)
        out = torch.empty(1, m, room, dtype=out_dtype)
        return takes_tiles(a, b[None, None, :, :n], out[:, :, :n], None, None)

    for m in (1, 40):
        assert not takes(m, 1)
        assert not takes(m, 17)
        assert not takes(m, 18, torch.float32)
        assert takes(m, 20, torch.float32)
        assert takes(m, 520)


def assert_multiplies_16_bit_operands(text: str, target: str) -> None:
    """No instruction that would widen operands or join more than 16 k at a time to the accumulator."""
    shapes = set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\S*\.(m\d+n\d+k\d+)\S*", text))
    if target == "sm_100":
        assert "tcgen05.mma" in text or shapes
    else:
        assert shapes
    assert all(shape.endswith("k16") for shape in shapes), shapes


# ---- indices, in Triton's interpreter


def test_indices_in_the_interpreter() -> None:
    triton = pytest.importorskip("triton")
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(f"the interpreter of Triton {triton.__version__} takes no numpy {np.__version__}")
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_interpreted"]
    root = Path(__file__).parents[1]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) > 300
