"""Known answers: recorded results that the CPU reference must reproduce."""

from __future__ import annotations

import hashlib
import importlib.resources

import numpy as np
import torch

from samebits.contract import AMPERE, FMA, HOPPER, TENSOR_CORE, Contract
from samebits.ops.addmm import addmm_
from samebits.ops.matmul import matmul
from samebits.testing import bits
from samebits.tools.verify.case import BF16, F16, F32
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report

_KNOWN_DIGESTS = {
    "AMPERE": "37e69b606fd271b6",
    "FMA": "3bc67e0a9b1b9475",
}


def known_answers(report: Report) -> None:
    """Compare the CPU reference with results of an H200, and with digests of its own results."""
    path = importlib.resources.files("samebits") / "data" / "known_answers.npz"
    with path.open("rb") as file:
        recorded = np.load(file)
        answers = {
            key: torch.from_numpy(recorded[key].view(f"i{recorded[key].itemsize}")) for key in recorded
        }
    for case in sorted({key.rpartition("/")[0] for key in answers}):
        dtype = BF16 if case.startswith("bf16") else F16
        a, b = (answers[f"{case}/{side}"].view(dtype) for side in "ab")
        want = answers[f"{case}/out"].view(F32)
        start = answers.get(f"{case}/c0")
        acc = torch.zeros_like(want) if start is None else start.view(F32).clone()
        addmm_(acc, a, b.mT, contract=TENSOR_CORE.on(HOPPER))
        report.compare(REFERENCE, "known answers", "recorded on an H200", acc, want, case)
    for contract in (TENSOR_CORE.on(AMPERE), FMA):
        name = contract.mma.name if contract.mma else contract.name
        right = _digest(contract) == _KNOWN_DIGESTS[name]
        flag = torch.tensor([float(right)])
        report.compare(REFERENCE, "known answers", f"recorded digest, {name}", flag, torch.ones(1), name)


def _digest(contract: Contract) -> str:
    """The digest of a product. Its operands come from integer arithmetic, not from a random generator."""
    i = torch.arange(24 * 200, dtype=torch.int64)
    x = ((i * 2654435761 % 2**32 >> 20) % 255 - 127).float() / 64
    x *= torch.exp2(-((i * 40503 >> 7) % 12).float())
    a = x.to(BF16)[: 16 * 200].view(16, 200)
    b = x.to(BF16)[-8 * 200 :].view(8, 200)
    out = matmul(a, b.mT, out_dtype=F32, contract=contract)
    return hashlib.sha256(bits(out).numpy().tobytes()).hexdigest()[:16]
