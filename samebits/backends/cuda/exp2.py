"""2**x as attention's kernels have it, for proofs: host side of ``kernels/exp2.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import SM_75
from samebits.backends.cuda import compiler, runtime
from samebits.contract import INTERPOLATION, Exp2Model


def spec(model: Exp2Model) -> compiler.KernelSpec:
    """The kernel of a model. INTERPOLATION is the instruction ``ex2.approx.ftz.f32``."""
    constants = (("HARDWARE_EXP2", int(model == INTERPOLATION)),)
    return compiler.KernelSpec("exp2.cu", "exp2_of_all", "PPq", constants, block=256, oldest=SM_75)


def exp2(x: Tensor, model: Exp2Model) -> Tensor:
    """``2**x`` of a contiguous float32 vector."""
    out = torch.empty_like(x)
    kernel = runtime.load(spec(model), x.get_device())
    kernel.launch((1024, 1, 1), x.data_ptr(), out.data_ptr(), x.numel())
    return out
