"""The expected result of a case, computed by the CPU reference."""

from __future__ import annotations

from torch import Tensor

from samebits.contract import Contract
from samebits.tools.verify.case import ProductCase
from samebits.tools.verify.operands import Inputs

REFERENCE = "CPU reference"


def on_cpu(case: ProductCase, inputs: Inputs, contract: Contract) -> Tensor:
    """The result that the contract specifies, computed on the CPU and moved to the operands' device."""
    from samebits.backends.reference import matmul as backend

    a, b, device = inputs.a.cpu(), inputs.b.cpu(), inputs.a.device
    if inputs.acc is None and inputs.cu_seqlens is None and not case.sequences:
        bias = None if inputs.bias is None else inputs.bias.cpu()
        out = backend.matmul(a, b, bias=bias, out_dtype=case.out_dtype, contract=contract.key)
        return out.to(device)
    batch = max(1, case.batch)
    if not case.sequences:
        a, b = a.unsqueeze(-3), b.unsqueeze(-3)
    a, b = (x.expand(batch, *x.shape[-3:]) for x in (a, b))
    acc = None if inputs.acc is None else inputs.acc.cpu().reshape(batch, case.m, case.n)
    cu_seqlens = None if inputs.cu_seqlens is None else inputs.cu_seqlens.cpu()
    out = backend.addbmm(acc, a, b, cu_seqlens, out_dtype=case.out_dtype, contract=contract.key)
    return out.reshape(((case.batch,) if case.batch else ()) + (case.m, case.n)).to(device)
