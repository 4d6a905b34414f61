"""Record single steps and chains of FP8 ``wgmma`` on a Hopper GPU, for ``tests/data/fp8_chain_sm90.npz``.

``python -m tests.support.record_fp8 FILE [AGAINST]`` runs ``wgmma.m64n64k32`` with float32 accumulators on
all four pairs of e4m3 and e5m2, prints how many results differ from the model in docs/contract.md, and writes
operands as bytes and results as the bits of float32. It also counts how many differ through ``mma.sync``
(another arithmetic on Hopper), and where the first step overwrites its accumulator instead of adding to +0.
With AGAINST, an earlier recording, it counts the results that differ from it, and fails if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LOWEST = {"e4m3": -6, "e5m2": -14}
M = N = 64
ROWS = 48  # that are kept of every case, to keep the file small

_REGISTERS = ", ".join(f"%{i}" for i in range(32))
_SOURCE = (
    r"""
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// A K-major tile of 64 x 32 bytes: cores of 8 x 16, 128 bytes apart along k and 256 along rows.
__device__ u64 descriptor(const void* tile) {
    u64 at = (u64)__cvta_generic_to_shared(tile);
    return at >> 4 | u64(128 >> 4) << 16 | u64(256 >> 4) << 32;
}

extern "C" __global__ void __launch_bounds__(128) warpgroup(
    const u8* a, const u8* b, const float* start, float* out, int K, int overwrite) {
    __shared__ alignas(128) u8 tile_a[64 * 32], tile_b[64 * 32];
    int t = threadIdx.x, warp = t / 32, row = t % 32 / 4, pair = t % 4 * 2;
    float c[32];
    for (int i = 0; i < 32; i++)
        c[i] = start[(warp * 16 + row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + pair + i % 2];
    for (int k0 = 0; k0 < K; k0 += 32) {
        for (int i = t; i < 64 * 32; i += 128) {
            int r = i / 32, k = i % 32, at = (r / 8 * 2 + k / 16) * 128 + r % 8 * 16 + k % 16;
            tile_a[at] = a[r * K + k0 + k];
            tile_b[at] = b[r * K + k0 + k];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        u64 at_a = descriptor(tile_a), at_b = descriptor(tile_b);
        int add = !(overwrite && k0 == 0);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile(
            "{ .reg .pred add; setp.ne.b32 add, %34, 0;"
            "wgmma.mma_async.sync.aligned.m64n64k32.f32." FORMATS " {"""
    + _REGISTERS
    + r"""}, %32, %33, add, 1, 1; }"
            : """
    + ", ".join(f'"+f"(c[{i}])' for i in range(32))
    + r"""
            : "l"(at_a), "l"(at_b), "r"(add));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncthreads();
    }
    for (int i = 0; i < 32; i++)
        out[(warp * 16 + row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + pair + i % 2] = c[i];
}

extern "C" __global__ void __launch_bounds__(32) one_warp(
    const u8* a, const u8* b, const float* start, float* out, int K) {
    int q = threadIdx.x % 4, g = threadIdx.x / 4, row = blockIdx.x * 16 + g, column = blockIdx.y * 8 + g;
    float c[4];
    int at[4];
    for (int i = 0; i < 4; i++) {
        at[i] = (row + i / 2 * 8) * 64 + blockIdx.y * 8 + q * 2 + i % 2;
        c[i] = start[at[i]];
    }
    for (int k = q * 4; k < K; k += 32) {
        const u8 *x = a + row * K + k, *y = b + column * K + k;
        u32 x0 = *(const u32*)x, x1 = *(const u32*)(x + 8 * K), x2 = *(const u32*)(x + 16);
        u32 x3 = *(const u32*)(x + 8 * K + 16), y0 = *(const u32*)y, y1 = *(const u32*)(y + 16);
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32." FORMATS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(y0), "r"(y1));
    }
    for (int i = 0; i < 4; i++) out[at[i]] = c[i];
}
"""
)


class Case(NamedTuple):
    """``a[64, K] @ b[64, K].T + start``: operands as bytes, `start` in float32."""

    a: Tensor
    b: Tensor
    start: Tensor


def cases(left: str, right: str) -> Iterator[tuple[str, Case]]:
    """Operands of every kind, for one pair of formats."""
    draw = torch.Generator().manual_seed(30)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw)

    def normal(*shape: int, spread: int = 0) -> Tensor:
        exponents = torch.randint(-spread, spread + 1, shape, generator=draw)
        return torch.randn(*shape, generator=draw) * torch.exp2(exponents.float())

    def finite(form: str, K: int) -> Tensor:
        magnitudes = torch.randint(0, 0x7F if form == "e4m3" else 0x7C, (M, K), generator=draw)
        return (magnitudes + 128 * (uniform(M, K) < 0.5)).to(torch.uint8)

    def both(K: int, of: Any) -> tuple[Tensor, Tensor]:
        return of(left, K), of(right, K)

    def ordinary(form: str, K: int) -> Tensor:
        return normal(M, K, spread=3).to(FORMATS[form]).view(torch.uint8)

    def small(form: str, K: int) -> Tensor:
        """Subnormals, the smallest normals and zeros."""
        magnitudes = torch.randint(0, 12 if form == "e4m3" else 6, (M, K), generator=draw)
        return (magnitudes + 128 * (uniform(M, K) < 0.5)).to(torch.uint8)

    def sparse(form: str, K: int) -> Tensor:
        zero = (128 * (uniform(M, K) < 0.5)).to(torch.uint8)
        return torch.where(uniform(M, K) < 0.85, zero, finite(form, K))

    def some(x: Tensor, share: float, values: list[Any]) -> Tensor:
        """`x` with this share of its elements replaced by `values`."""
        chosen = torch.tensor(values, dtype=x.dtype)[torch.randint(len(values), x.shape, generator=draw)]
        return torch.where(uniform(*x.shape) < share, chosen, x)

    zero = torch.zeros(M, N)
    f32_edges = torch.tensor(
        [0x7F7FFFFF, 0x7F7FE000, 0x7F000001, 1, 0x7FFFFF, 0x800000, 0x80FFFF], dtype=torch.int32
    )
    edges = [0.0, -0.0, *f32_edges.view(torch.float32).tolist(), *(-f32_edges.view(torch.float32)).tolist()]
    yield "random", Case(*both(32, ordinary), zero)
    yield "random carried", Case(*both(32, ordinary), normal(M, N, spread=8))
    yield "random chain 128", Case(*both(128, ordinary), zero)
    yield "random chain 256 carried", Case(*both(256, ordinary), normal(M, N, spread=8))
    yield "wide", Case(*both(32, finite), zero)
    top = 6 if left == right == "e4m3" else 20
    yield "wide carried", Case(*both(32, finite), normal(M, N, spread=top) * 2.0 ** (top // 2))
    yield "wide chain 256", Case(*both(256, finite), zero)
    yield "small", Case(*both(32, small), zero)
    yield "small carried", Case(*both(32, small), normal(M, N, spread=10) * 2.0**-24)
    yield "sparse", Case(*both(32, sparse), some(normal(M, N, spread=10), 0.3, [0.0, -0.0]))
    # Every product zero: what becomes of the accumulator alone, down to the smallest subnormal.
    a, b = both(32, sparse)
    tiny = torch.randint(0, 0x0C000000, (M, N), generator=draw, dtype=torch.int32).view(torch.float32)
    shifted = torch.randint(0, 1 << 23, (M, N), generator=draw) >> torch.randint(
        0, 23, (M, N), generator=draw
    )
    tiny = torch.where(uniform(M, N) < 0.6, shifted.int().view(torch.float32), tiny)
    a[:36] &= 0x80
    yield "tiny carried", Case(a, b, some(tiny * torch.where(uniform(M, N) < 0.5, -1, 1), 0.1, edges))
    huge = torch.randint(0x7E000000, 0x7F800000, (M, N), generator=draw, dtype=torch.int32).view(
        torch.float32
    )
    yield "huge carried", Case(*both(32, finite), some(huge, 0.1, edges))
    # Terms that cancel: the second half is minus the first, but for a few.
    a, b = both(32, finite)
    a[:, 16:], b[:, 16:] = a[:, :16] ^ 0x80, b[:, :16]
    a = some(a, 0.02, list(range(64)))
    yield "cancelling", Case(a, b, some(normal(M, N, spread=4) * 2.0**-6, 0.5, [0.0, -0.0]))
    infinite = {"e4m3": [0x7F, 0xFF], "e5m2": [0x7C, 0xFC, 0x7C, 0xFC, 0x7D, 0x7E, 0x7F, 0xFF]}
    a, b = both(32, ordinary)
    a, b = (
        some(some(a, 0.004, infinite[left]), 0.02, [0, 0x80]),
        some(some(b, 0.004, infinite[right]), 0.02, [0, 0x80]),
    )
    start = some(normal(M, N), 0.05, [float("inf"), -float("inf"), float("nan"), 0.0])
    yield "special", Case(a, b, start)


def model(
    left: str, right: str, case: Case, significant: int = 14, fraction: int = 13
) -> np.ndarray[Any, Any]:
    """The chain of fused sums of 32 terms and the accumulator. Exact in float64: integers below 2**21."""
    a, b = (x.view(FORMATS[f]).double().numpy() for x, f in ((case.a, left), (case.b, right)))
    c = case.start.double().numpy()

    def exponent(x: np.ndarray[Any, Any], lowest: int) -> np.ndarray[Any, Any]:
        return np.where(x == 0, -9000, np.maximum(np.frexp(x)[1] - 1, lowest))

    with np.errstate(invalid="ignore"):
        for k in range(0, a.shape[1], 32):
            x, y = a[:, None, k : k + 32], b[None, :, k : k + 32]
            terms = x * y
            ieee = terms.sum(-1) + c
            exponents = exponent(x, LOWEST[left]) + exponent(y, LOWEST[right])
            top = np.maximum(exponents.max(-1), exponent(c, -126))
            top = np.where(np.isfinite(ieee), np.maximum(top, -200), 0)
            total = np.trunc(np.ldexp(terms, (fraction - top)[..., None])).sum(-1) + np.trunc(
                np.ldexp(c, fraction - top)
            )
            mantissa, e = np.frexp(total)
            bits = np.minimum(significant, e - fraction + top + 149)
            total = np.ldexp(np.trunc(np.ldexp(mantissa, bits)), e - bits)
            c = np.where(np.isfinite(ieee), np.ldexp(total, top - fraction), ieee) + 0.0
        found = c.astype(np.float32)
    return np.where(np.isnan(found), 0x7FFFFFFF, found.view(np.int32)).astype(np.int32)


class _Recorder:
    """The two kernels for one pair of formats."""

    def __init__(self, left: str, right: str) -> None:
        from cuda.core import Device, Program, ProgramOptions  # type: ignore[import-untyped]

        torch.empty(1, device="cuda")  # PyTorch's context is the one that cuda.core takes
        device = Device(0)
        device.set_current()
        self.stream = device.create_stream()
        source = _SOURCE.replace('" FORMATS "', f"{left}.{right}")
        code = Program(source, "c++", ProgramOptions(arch="sm_90a", std="c++17")).compile("cubin")
        self.warpgroup, self.one_warp = code.get_kernel("warpgroup"), code.get_kernel("one_warp")

    def __call__(self, case: Case, overwrite: bool | None) -> np.ndarray[Any, Any]:
        """Bits of the results of `case` by ``wgmma``; by ``mma.sync`` if `overwrite` is None."""
        from cuda.core import LaunchConfig, launch

        tensors = [x.cuda().contiguous() for x in case] + [torch.full((M, N), float("nan"), device="cuda")]
        torch.cuda.synchronize()
        values: list[Any] = [*(x.data_ptr() for x in tensors), np.int32(case.a.shape[1])]
        if overwrite is None:
            launch(self.stream, LaunchConfig(grid=(4, 8), block=32), self.one_warp, *values)
        else:
            config = LaunchConfig(grid=1, block=128)
            launch(self.stream, config, self.warpgroup, *values, np.int32(overwrite))
        self.stream.sync()
        return tensors[-1].cpu().view(torch.int32).numpy()


def main(file: str, against: str | None = None) -> int:
    """Record everything into `file`. Returns how many arrays differ from the recording `against`."""
    arrays: dict[str, Any] = {}
    for left in FORMATS:
        for right in FORMATS:
            record = _Recorder(left, right)
            for name, case in cases(left, right):
                found = record(case, overwrite=False)

                def differ(other: np.ndarray[Any, Any], found: np.ndarray[Any, Any] = found) -> int:
                    return int((other != found).sum())

                line = f"{left} {right} {name:25} K {case.a.shape[1]:3}  differ from the model"
                line += f" {differ(model(left, right, case))}, with 24 bits"
                line += f" {differ(model(left, right, case, 24))}; mma.sync {differ(record(case, None))}"
                start, key = case.start.view(torch.int32), f"{left} {right} {name}"
                if not bool(start.any()):
                    line += f"; overwriting {differ(record(case, overwrite=True))}"
                else:
                    arrays[f"{key}/start"] = start[:ROWS].numpy()
                print(line, flush=True)
                arrays |= {f"{key}/a": case.a[:ROWS].numpy(), f"{key}/b": case.b.numpy()}
                arrays[f"{key}/out"] = found[:ROWS]
    np.savez_compressed(file, **arrays)
    if against is None:
        return 0
    with np.load(against) as earlier:
        differing = [
            name
            for name in sorted(arrays.keys() | set(earlier.files))
            if not (name in arrays and name in earlier and np.array_equal(arrays[name], earlier[name]))
        ]
        count = sum(earlier[name].size for name in earlier.files if name.endswith("/out"))
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: {count} results of {against}, in {len(arrays)} arrays: {differing or 'none'} differ")
    return len(differing)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
