"""The universal attention kernels compile for every architecture, and keep everything in registers."""

from __future__ import annotations

import pytest
import torch

from samebits.backends.cuda import compiler
from samebits.backends.cuda.attention import universal, universal_backward
from samebits.backends.cuda.attention.universal import Variant

pytest.importorskip("cuda.core", reason="NVRTC is called through the package cuda-core")

# Bytes of shared memory that a block may use.
SMEM = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_120a": 99 << 10}

PLAIN = Variant(torch.bfloat16, 64, 64, True, None, False, False, True)
PAGED = Variant(torch.float16, 192, 128, True, None, False, True, True)
EVERYTHING = Variant(torch.bfloat16, 256, 256, False, torch.bool, True, False, False)
FMA = Variant(torch.float32, 128, 128, True, None, False, False, False)


@pytest.mark.parametrize(
    ("variant", "arch"),
    [(PLAIN, "sm_120a"), (PAGED, "sm_90a"), (EVERYTHING, "sm_80"), (FMA, "sm_75")],
    ids=lambda x: x if isinstance(x, str) else f"{x.dtype}-{x.head}-{x.values}",
)
def test_registers_suffice(variant: Variant, arch: str) -> None:
    """Every kernel under its first schedule, which has the most to hold."""
    smem = SMEM.get(arch, 227 << 10)
    every = [*universal.specs(variant, smem)]
    if not variant.paged:
        every += universal_backward.specs(variant, smem)
    first = {(s.entry, dict(s.constants).get("GRADS")): s for s in reversed(every)}
    for spec in first.values():
        cubin = compiler.compile(spec, arch)
        assert cubin.spill_bytes == 0, spec
        assert not cubin.advice, spec
