"""The known answers of ``smoke.c``, by the CPU reference: python -m native.tests.answers"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import samebits
from samebits.contract import AMPERE, HOPPER, TENSOR_CORE, Contract, MmaModel

HEADER = Path(__file__).with_name("smoke_answers.h")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """The numbers of smoke.c: of seven bits, with exponents of nine."""
    count = int(np.prod(shape))
    x = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed * 40503)
    x = (x ^ x >> 15) * np.uint32(2246822519)
    x = (x ^ x >> 13) * np.uint32(3266489917)
    x ^= x >> 16
    value = (x >> 16).astype(np.int64) % 255 - 127
    scaled = value / 64 * (1 << ((x >> 8) & 0xFF).astype(np.int64) % 9) / 16
    return torch.from_numpy(scaled).to(dtype).view(shape)


def hash_of(x: Tensor) -> int:
    found = 0xCBF29CE484222325
    for byte in x.contiguous().view(torch.uint8).numpy().tobytes():
        found = (found ^ byte) * 0x100000001B3 % (1 << 64)
    return found


def operands(dtype: torch.dtype, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return made(dtype, a, 1), made(dtype, b, 2)


def cases(model: MmaModel) -> dict[str, Tensor]:
    """The results of smoke.c's cases for a family of tensor cores."""
    found = {}
    mma = TENSOR_CORE.on(model)
    a, b = operands(BF16, (70, 128), (96, 128))
    found["gemm NT bf16, bias"] = samebits.linear(a, b, made(BF16, (96,), 4), contract=mma)
    found["the same in a graph"] = found["gemm NT bf16, bias"]
    a, b = operands(F16, (64, 200), (200, 48))
    out = made(F32, (64, 48), 3)
    found["gemm NN f16, accumulate"] = samebits.addmm_(out, a, b, contract=mma)
    a, b = operands(BF16, (45, 33), (45, 17))
    found["gemm TN bf16, odd"] = samebits.matmul(a.mT, b, contract=mma)
    a, b = operands(F32, (50, 100), (60, 100))
    found["gemm NT f32"] = samebits.matmul(a, b.mT)
    found["bmm bf16"] = samebits.bmm(*operands(BF16, (3, 50, 72), (3, 72, 40)), contract=mma)
    found["gemm_ragged TN bf16"] = ragged(mma.key)
    ends = torch.tensor([5, 5, 33], dtype=torch.int32)
    a, b = operands(BF16, (38, 128), (3, 72, 128))
    found["gemm_grouped NT bf16, bias"] = samebits.grouped_mm(
        a, b.mT, ends, bias=made(BF16, (3, 72), 4), contract=mma
    )
    found["gemm_grouped NN f32"] = samebits.grouped_mm(*operands(F32, (38, 60), (3, 60, 50)), ends)
    found |= attention(mma)
    target = torch.tensor([0, 299, 7, -100, 128, 127, 300, 1, 2])
    known = target.clamp(max=299)  # a target outside of the vocabulary gives NaN, which the operation refuses
    hidden, weight = made(BF16, (9, 64), 5), made(BF16, (300, 64), 6)
    results = samebits.linear_logp(
        *(hidden, weight, known, made(BF16, (300,), 7)), temperature=50, return_entropy=True, contract=mma
    )
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)
    found["linear_logp bf16, entropy"] = torch.stack([torch.where(target == 300, nan, r) for r in results])
    return found


def attention(contract: Contract) -> dict[str, Tensor]:
    def tensors(queries: int, keys: int) -> list[Tensor]:
        shapes = (2, queries, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64)
        return [made(BF16, shape, i + 1) for i, shape in enumerate(shapes)]

    options: dict[str, Any] = {"scale": 2.0**-10, "contract": contract}
    lengths, offsets = (torch.tensor(x, dtype=torch.int32) for x in ([1100, 530], [0, 33, 100]))
    packed = [x.flatten(0, 1) for x in tensors(70, 70)]
    # A reference of its own for tokens of no sequence, which an operator refuses.
    ours = [x[:100] for x in packed]
    of_sequences = samebits.attention(
        *ours, causal=True, softcap=20, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **options
    )
    return {
        "attention bf16, causal": samebits.attention(*tensors(70, 70), causal=True, **options),
        "attention bf16, a cache": samebits.attention(*tensors(1, 1200), key_length=lengths, **options),
        "attention bf16, packed": torch.cat([of_sequences, of_sequences.new_zeros(40, 4, 64)]),
    }


def ragged(contract: str) -> Tensor:
    from samebits.backends.reference import matmul

    a, b = operands(BF16, (128, 64), (128, 40))
    out = made(F32, (1, 64, 40), 3)
    offsets = torch.tensor([0, 37, 100, 128], dtype=torch.int32)
    return matmul.addbmm(out, a.mT[None, None], b[None, None], offsets, out_dtype=F32, contract=contract)[0]


def header() -> str:
    models = (HOPPER, AMPERE)
    results = [cases(model) for model in models]
    digests = ", ".join(f'"{TENSOR_CORE.on(model).digest()}"' for model in models)
    names = ", ".join(f'"{name}"' for name in results[0])
    lines = [
        "/* Written by native/tests/answers.py: hashes of the CPU reference's results. */",
        "/* clang-format off */",
        "",
        "#include <stdint.h>",
        "",
        f"#define ANSWER_DIGESTS {digests}",
        f"#define ANSWER_NAMES {names}",
        "",
        f"static const uint64_t recorded[{len(models)}][{len(results[0])}] = {{",
        *(
            f"    {{{', '.join(f'0x{hash_of(x):016X}' for x in found.values())}}}, /* {model.name} */"
            for model, found in zip(models, results, strict=True)
        ),
        "};",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HEADER.write_text(header())
