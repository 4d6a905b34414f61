"""What is known of GPUs by their compute capability, and the kernels that run on each."""

from __future__ import annotations

import pytest

import samebits
from samebits.backends.arch import ARCHS, OLDEST, SM_75, SM_80, SM_90, Arch, arch_of
from samebits.backends.cuda import compiler, every


def test_an_unknown_gpu_runs_universal_kernels_and_has_no_tensor_cores() -> None:
    for capability in ((8, 7), (11, 0), (12, 1)):
        arch = arch_of(capability)
        assert (arch.mma, arch.fp8, arch.own) == (None, None, "")
        assert arch.runs("tensor_core")
        assert not arch.runs("tensor_core_sm90")
        assert arch.copies_tiles == (capability >= SM_90)
    assert not arch_of((7, 0)).at_least(OLDEST)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_a_kernel_with_an_ending_runs_where_the_ending_says(arch: Arch) -> None:
    hopper = arch.capability == SM_90
    assert arch.runs("fma")
    assert arch.runs("grouped_tensor_core")
    assert arch.runs("fma_sm90") == arch.fast_silu == (arch.fp8 is not None) == hopper
    assert Arch((10, 0), own="sm100").runs("tensor_core_sm100")
    assert not arch.runs("tensor_core_sm100")
    assert arch.target == str(arch) + "a" * arch.copies_tiles
    assert (arch.mma is None) == (arch.capability == SM_75)
    assert arch.third_half == (arch.capability[0] == 10)


def test_families_are_those_that_gpus_have_shown() -> None:
    ampere, hopper = (
        {arch.capability for arch in ARCHS.values() if arch.mma == family}
        for family in (samebits.AMPERE, samebits.HOPPER)
    )
    assert ampere == {SM_80, (8, 6), (8, 9)}
    assert hopper == {SM_90, (10, 0), (10, 3), (12, 0)}


def test_every_kernel_has_its_sources() -> None:
    for name, sources in every.KERNELS.items():
        assert sources, name
        assert all((compiler.KERNELS / source).is_file() for source in sources), name
