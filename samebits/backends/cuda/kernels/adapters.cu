// Adapters (LoRA) of a layer's tokens, added to its output: docs/contract.md, "Adapters".
//
// out[t, n] = base[t, n] + round(round(inner[t, s, i] . b[s, n]) * scalings[s, i]), for the adapter s of token t and
// the slice i that n is in. Where s names none of the slots, or its scaling is NaN, it is base[t, n].
//
// A warp has 32 columns of a slice, and 16 tokens at a time: the rows of one tensor-core step. It takes one step after
// the other for each adapter among them, with zeros in place of other tokens' rows, and a row keeps the result of its
// own. A chain of few k is short, so loads of base and stores of out bound this. Hence lanes have eight neighbours of a
// row: columns of a step are rows of b in such an order that they do. Matrices of the last adapter stay in registers.
//
// Macros
//   TYPE     of all matrices: F32, BF16 or F16
//   FMA      1: chains are those of FMA; 0: of TENSOR_CORE
//   GROUPS   groups of 16 in an adapter's rank
//   SLICES   whose columns lie side by side, each with an `inner` of its own
//   VECTOR   1: eight columns are aligned to 16 bytes, and those of a slice are a multiple of 8

#include "launch.cuh"
#include "ptx_sm80.cuh"
#include "vectors.cuh"

using E = Element<TYPE>;
using Stored = E::Stored;

constexpr int THREADS = 128, WARPS = THREADS / 32, COLUMNS = 32, TOKENS = 16, OF_LANE = 8;
constexpr int RANK = 16 * GROUPS;
constexpr int LINE = 128 / sizeof(Stored);                            // entries in a line of the L2 cache
constexpr int HELD = GROUPS <= 4 ? GROUPS : GROUPS % 4 == 0 ? 4 : 1;  // groups of b in registers
constexpr u32 ALL = 0xFFFFFFFFu;

struct Params {
    const Stored *base, *inner, *b;
    const i64* adapters;
    const float* scalings;
    Stored* out;
    i64 base_row, inner_row;
    int tokens, slots, of_block;  // the last: tokens of a block, a multiple of 16
    int ends[SLICES];
};

// Columns of a warp, which are in one slice.
struct Part {
    int slice, first, end;
};

__device__ __forceinline__ Part part_of(const Params& p, int tile) {
    Part part{0, 0, p.ends[0]};
#pragma unroll
    for (int i = 1; i < SLICES; ++i) {
        const int tiles = (part.end - part.first + COLUMNS - 1) / COLUMNS;
        if (part.slice == i - 1 && tile >= tiles) {
            tile -= tiles;
            part = {i, p.ends[i - 1], p.ends[i]};
        }
    }
    part.first += tile * COLUMNS;
    return part;
}

// Neighbours of a row, of which a lane has so many.
struct alignas(16) Run {
    Stored of[OF_LANE];
};

__device__ __forceinline__ Run read(const Stored* at, int count) {
    Run run{};
    if constexpr (VECTOR) {
        if (count > 0) run = *reinterpret_cast<const Run*>(at);
    } else {
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
            if (i < count) run.of[i] = at[i];
    }
    return run;
}

__device__ __forceinline__ void write(Stored* at, int count, const Run& run) {
    if constexpr (VECTOR) {
        if (count > 0) *reinterpret_cast<Run*>(at) = run;
    } else {
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
            if (i < count) at[i] = run.of[i];
    }
}

// The entries k and k + 1 of a row of b, as a step takes them; zeros behind the slice.
__device__ __forceinline__ u32 two_of(const Stored* at, bool there) {
    return there ? *reinterpret_cast<const u32*>(at) : 0u;
}

extern "C" __global__ void __launch_bounds__(THREADS, HELD > 2 ? 4 : 5)
    add_adapters(const __grid_constant__ Params p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const Part part = part_of(p, int(blockIdx.x) * WARPS + warp);
    const int column = part.first + quad * OF_LANE, columns = min(part.end - column, OF_LANE);
    const i64 slot = i64(p.ends[SLICES - 1]) * RANK;
    const int from = int(blockIdx.y) * p.of_block, to = min(from + p.of_block, p.tokens);
    if (from + row < to) {  // which adapter is read again below, after the wait
        const i64 named = p.adapters[from + row], entries = i64(min(part.end - part.first, COLUMNS)) * RANK;
        if (named >= 0 && named < p.slots)
            for (i64 i = quad * LINE; i < entries; i += 4 * LINE)
                prefetch_to_l2(p.b + named * slot + i64(part.first) * RANK + i);
    }
    wait_for_kernel_before();
    let_kernel_behind_start();
    if (part.first >= part.end) return;

#if !FMA
    // Column c of step j is column 8 (c / 2) + 2 j + c % 2 of the warp, so a lane has 8 neighbours of 4 steps.
    u32 held[HELD][4][2];
    int held_of = -1;
    const int mine = part.first + row / 2 * OF_LANE + row % 2;
#endif
#pragma unroll 1
    for (int first = from; first < to; first += TOKENS) {
        int token[2], of[2];
        Run base[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            token[h] = first + row + 8 * h;
            const bool there = token[h] < to;
            const i64 named = there ? p.adapters[token[h]] : -1;
            if (there) base[h] = read(p.base + token[h] * p.base_row + column, columns);
            of[h] = named >= 0 && named < p.slots ? int(named) : -1;
            if (there && of[h] < 0)
                write(p.out + i64(token[h]) * p.ends[SLICES - 1] + column, columns, base[h]);
        }
        const auto finish = [&](int h, const float (&sum)[OF_LANE]) {
            const float scaling = p.scalings[of[h] * SLICES + part.slice];
            Run out = base[h];
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i) {
                const float added = rounded_to<E>(__fmul_rn(rounded_to<E>(sum[i]), scaling));
                if (scaling == scaling)
                    out.of[i] = E::narrow(contract::canonical(__fadd_rn(E::widen(out.of[i]), added)));
            }
            write(p.out + i64(token[h]) * p.ends[SLICES - 1] + column, columns, out);
        };
#if FMA
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (of[h] < 0) continue;
            const Stored* x = p.inner + token[h] * p.inner_row + (i64(of[h]) * SLICES + part.slice) * RANK;
            const Stored* w = p.b + of[h] * slot + i64(column) * RANK;
            float sum[OF_LANE] = {};
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i)
                if (i < columns)
#pragma unroll 4
                    for (int k = 0; k < RANK; ++k)
                        sum[i] = __fmaf_rn(E::widen(x[k]), E::widen(w[i * RANK + k]), sum[i]);
            finish(h, sum);
        }
#else
        u32 left[2] = {__ballot_sync(ALL, of[0] >= 0), __ballot_sync(ALL, of[1] >= 0)};
#pragma unroll 1
        while (left[0] | left[1]) {
            const int next = left[0] ? __shfl_sync(ALL, of[0], __ffs(left[0]) - 1)
                                     : __shfl_sync(ALL, of[1], __ffs(left[1]) - 1);
            float c[4][4] = {};
            const Stored* w = p.b + next * slot + i64(mine) * RANK + quad * 2;
            const i64 at = (i64(next) * SLICES + part.slice) * RANK + quad * 2;
            const Stored* x[2] = {p.inner + token[0] * p.inner_row + at,
                                  p.inner + token[1] * p.inner_row + at};
#pragma unroll 1
            for (int g = 0; g < GROUPS; g += HELD) {
                if (HELD < GROUPS || next != held_of)
#pragma unroll
                    for (int i = 0; i < HELD; ++i)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
#pragma unroll
                            for (int e = 0; e < 2; ++e)
                                held[i][j][e] =
                                    two_of(w + j * 2 * RANK + (g + i) * 16 + e * 8, mine + j * 2 < part.end);
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    u32 a[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        a[e] = two_of(x[e % 2] + (g + i) * 16 + e / 2 * 8, of[e % 2] == next);
#pragma unroll
                    for (int j = 0; j < 4; ++j) mma_m16n8k16<TYPE == BF16>(c[j], a, held[i][j]);
                }
            }
            held_of = next;
            left[0] &= ~__ballot_sync(ALL, of[0] == next);
            left[1] &= ~__ballot_sync(ALL, of[1] == next);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (of[h] != next) continue;
                float sum[OF_LANE];
#pragma unroll
                for (int i = 0; i < OF_LANE; ++i) sum[i] = c[i / 2][2 * h + i % 2];
                finish(h, sum);
            }
        }
#endif
    }
}
