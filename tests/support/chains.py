"""Sums over tokens and of long rows, for the sanitizer."""

from __future__ import annotations

import torch

from samebits.backends.cuda import rows

# Tokens and columns of sums over tokens: stages go round, in each way to share columns.
CHAINS = {
    torch.bfloat16: ((500, 40), (230, 4104), (230, 8192), (100, 12296), (100, 16384)),
    torch.float32: ((500, 40), (230, 4096), (120, 8192)),
}


def chains() -> None:
    """Gradients of norms, sums over tokens, and long sums, of which a block adds several rounds of steps."""
    for dtype, shapes in CHAINS.items():
        for count, n in shapes:
            x, w = (torch.ones(shape, dtype=dtype, device="cuda") for shape in ((count, n), (n,)))
            scales = torch.ones(count, device="cuda")
            for means in (torch.zeros(count, device="cuda"), scales[:0]):
                found = rows.norm_gradients(x, x, w, means, scales, torch.float32)[1:]
                for sums in (*found, *rows.norm_columns(x, x, means, scales, torch.float32)):
                    assert (sums == count).all()
            for of in (x, x[:, 1:], x[:3], x[:32, 1:]):  # the last two: few tokens
                assert (rows.column_sum(of, torch.float32) == len(of)).all()
        x = torch.ones(2, (1 << 21) + 40, dtype=dtype, device="cuda")
        for of in (x, x[:, 1:]):
            assert (rows.row_sum(of, False, torch.float32) == of.shape[1]).all()
