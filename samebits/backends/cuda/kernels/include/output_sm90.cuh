// The epilogue of a plain product: D, or D^T, in memory. Uses the macros OUTPUT, ACCUMULATE, ALIGNED and
// those of accumulators_sm90.cuh. With GROUPED, of a grouped product: groups.cuh.
#pragma once

#ifndef GROUPED
#define GROUPED 0
#endif

#include "accumulators_sm90.cuh"
#include "groups.cuh"

static_assert(PANEL == 0 || OUTPUT != F32, "panels are of 16-bit elements");
static_assert(PANEL == 0 || !TRANSPOSED || (ALIGNED && GROUPED != OF_ROWS),
              "those of transposed tiles leave by TMA");

// Whether TMA stores the panels: it cannot where rows do not lie multiples of 16 bytes apart.
constexpr bool BY_TMA = PANEL > 0 && ALIGNED;

struct Params {
    TensorMap a, b, out_map;
#ifdef STEP_MAPS
    TensorMap a_stage, b_stage;  // a and b are maps of a k16 step of a stage, these of a whole stage
#endif
    void* out;
    const void* bias;
    const void* bounds;            // of the sequences, one more than there are of them
    i64 row_stride, batch_stride;  // of the output
    int m, n, k, batch;
    int a_batch, b_batch;  // 0 where one matrix serves the whole batch
    int sequences;
    int group;  // rows of tiles that are taken together, so that their operands stay in L2
#if GROUPED
    Groups groups;
    i64 bias_group;
#endif
#if SEGMENTS > 1
    float* sums;  // of segments that wait for others: memory of warpgroups
#endif
#ifdef SCALED
    const float *scale_a, *scale_b;
    i64 scale_a_row, scale_a_k, scale_b_row, scale_b_k;  // from one scale to the next
#if GROUPED
    i64 scale_group;  // from the scales of one group's matrix to those of the next
#endif
#endif
};

#if GROUPED
__device__ __forceinline__ i64 bias_offset(const Params& p, const TileCoord& tile) {
    return tile.batch * p.bias_group;
}
#endif

// f(accumulators, offset in the output, step from one column to the next there, columns left) for each row of
// this thread's, its pairs of columns lying 8 apart.
template <typename F>
__device__ __forceinline__ void for_each_row(Accumulators& acc, const Params& p, const TileCoord& tile,
                                             u32 thread, F f) {
    Fragment fragment(tile, thread);
    i64 right = TRANSPOSED ? p.row_stride : 1, down = TRANSPOSED ? 1 : p.row_stride;
#pragma unroll
    for (int mma_m = 0; mma_m < MMA_M; ++mma_m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = fragment.row + mma_m * 64 + half * 8;
            bool inside = row < (GROUPED ? tile.m_end : p.m) && (ROWS % 64 == 0 || row < tile.m + int(ROWS));
            f(&acc[mma_m][half * 2],
              (GROUPED == OF_ROWS ? 0 : tile.batch * p.batch_stride) + row * down + fragment.column * right,
              right, inside ? (GROUPED ? tile.n_end : p.n) - fragment.column : 0);
        }
    }
}

// Straight from the registers.
template <int type>
__device__ __forceinline__ void store(Accumulators& acc, const Params& p, const TileCoord& tile, u32 thread) {
    using Out = Element<type>;
    for_each_row(acc, p, tile, thread, [&](const float* d, i64 offset, i64 right, int left) {
        auto* to = static_cast<typename Out::Stored*>(p.out) + offset;
#pragma unroll
        for (int i = 0; i < BLOCK_N; i += 8, d += 4) {
            if (ALIGNED && !TRANSPOSED && i + 1 < left) {
                Out::store_pair(to + i, d[0], d[1]);
            } else {
                if (i < left) to[i * right] = Out::narrow(d[0]);
                if (i + 1 < left) to[(i + 1) * right] = Out::narrow(d[1]);
            }
        }
    });
}

// Whether f32 leaves by store_units(). With 160 accumulators a thread or more, or 224 columns, registers spill.
constexpr bool IN_UNITS =
    OUTPUT == F32 && ALIGNED && !TRANSPOSED && MMA_M * BLOCK_N / 2 < 160 && BLOCK_N != 224;

// Transposes the matrix of two values of two lanes that are `mask` apart: the lower lane gets both firsts.
template <typename T>
__device__ __forceinline__ void transpose(T& first, T& second, u32 lane, u32 mask) {
    const bool upper = lane & mask;
    const T other = __shfl_xor_sync(0xFFFFFFFF, upper ? first : second, mask);
    if (upper)
        first = other;
    else
        second = other;
}

// Stores f32 straight from the registers, sixteen bytes a lane. Lanes trade what they have of 32 columns, so that
// eight of them store a whole line of 128 bytes: another GPU's memory takes those faster. Columns that are left
// in a tile of another width are stored in pairs.
__device__ __forceinline__ void store_units(Accumulators& acc, const Params& p, const TileCoord& tile,
                                            u32 thread) {
    constexpr int TRADED = BLOCK_N / 32 * 32;
    const Fragment own(tile, thread);
    const u32 lane = thread % 32;
    const int below = lane / 4 % 2, column = tile.n + below * 16 + int(lane % 2 * 8 + lane % 4 / 2 * 4);
    auto* out = static_cast<float*>(p.out) + (GROUPED == OF_ROWS ? 0 : tile.batch * p.batch_stride);
    auto inside = [&](int row) {
        return row < (GROUPED ? tile.m_end : p.m) && (ROWS % 64 == 0 || row < tile.m + int(ROWS));
    };
    const int columns = GROUPED ? tile.n_end : p.n, left = columns - column, own_left = columns - own.column;
#pragma unroll
    for (int half = 0; half < 2 * MMA_M; ++half) {
        float* d = &acc[half / 2][half % 2 * 2];
        const int row = own.row + half / 2 * 64 + half % 2 * 8, upper = row - below;
        float *to = out + upper * p.row_stride + column, *under = to + p.row_stride;
        const bool upper_inside = inside(upper), under_inside = inside(upper + 1);
#pragma unroll
        for (int i = 0; i < TRADED; i += 32, d += 16) {
            float a[4] = {d[0], d[1], d[4], d[5]}, b[4] = {d[8], d[9], d[12], d[13]};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                transpose(a[j], a[j + 2], lane, 1);
                transpose(b[j], b[j + 2], lane, 1);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) transpose(a[j], b[j], lane, 4);
            if (upper_inside && i < left)
                *reinterpret_cast<float4*>(to + i) = make_float4(a[0], a[1], a[2], a[3]);
            if (under_inside && i < left)
                *reinterpret_cast<float4*>(under + i) = make_float4(b[0], b[1], b[2], b[3]);
        }
        const bool row_inside = inside(row);
#pragma unroll
        for (int i = TRADED; i < BLOCK_N; i += 8, d += 4)
            if (row_inside && i < own_left)
                Element<F32>::store_pair(out + row * p.row_stride + own.column + i, d[0], d[1]);
    }
}

// Whether a transposed tile leaves by store_turned().
constexpr bool IN_PIECES = TRANSPOSED && ALIGNED && OUTPUT != F32 && PANEL == 0;

// Stores a transposed tile of 16-bit elements straight from the registers. Along the output's rows lie D's, of
// which a thread has single ones. So lanes trade: each then stores a piece of eight, 16 bytes, and two pieces
// that lie side by side fill a sector.
template <int type>
__device__ __forceinline__ void store_turned(Accumulators& acc, const Params& p, const TileCoord& tile,
                                             u32 thread) {
    using Out = Element<type>;
    const u32 lane = thread % 32, piece = lane % 4;  // of the four that sixteen tokens and sixteen rows have
    const int first = tile.m + int(thread / 32 * 16),
              end = min(GROUPED ? tile.m_end : p.m, tile.m + int(ROWS));
    const int tokens = GROUPED ? tile.n_end : p.n, token = tile.n + int(lane / 4);
    auto* out = static_cast<u16*>(p.out) + (GROUPED == OF_ROWS ? 0 : tile.batch * p.batch_stride);
    auto turned = [](const float* d) { return transpose_matrix(Out::pack(d[0], d[1])); };
#pragma unroll
    for (int mma_m = 0; mma_m < MMA_M; ++mma_m) {
        const int row = first + mma_m * 64;
#pragma unroll
        for (int i = 0; i + 16 <= BLOCK_N; i += 16) {
            const float* d = &acc[mma_m][i / 2];
            u32 x[4] = {turned(d), turned(d + 2), turned(d + 4), turned(d + 6)};
            transpose(x[0], x[1], lane, 1);
            transpose(x[2], x[3], lane, 1);
            transpose(x[0], x[2], lane, 2);
            transpose(x[1], x[3], lane, 2);
            const int to = token + i + int(piece / 2 * 8), at = row + int(piece % 2 * 8);
            if (at < end && to < tokens)
                *reinterpret_cast<uint4*>(out + to * p.row_stride + at) = make_uint4(x[0], x[1], x[2], x[3]);
        }
        if constexpr (BLOCK_N % 16 == 8) {
            const int to = token + BLOCK_N - 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 x = turned(&acc[mma_m][BLOCK_N / 2 - 4 + half * 2]);
                if (row + half * 8 < end && to < tokens)
                    *reinterpret_cast<u32*>(out + to * p.row_stride + row + half * 8 + piece * 2) = x;
            }
        }
    }
}

// Elements before the next multiple of eight bytes.
__device__ __forceinline__ u32 elements_before_quad(const u16* at) {
    return (0 - u32(reinterpret_cast<u64>(at)) / 2) % 4;
}

// Stores a warp's sixteen lines of a panel, `columns` of each: sixteen lanes a line, each what lies in eight bytes
// of memory. In the panel that begins up to three elements after eight bytes of its own.
__device__ __forceinline__ void store_quads(u32 lines, u16* out, i64 row_stride, int rows, int columns,
                                            u32 lane) {
    constexpr u32 LINE = PANEL * 2, AT_ONCE = 4;  // loads that are under way together
    const u32 quad = lane % 16, odd = lane / 16;
    auto place = [&](u32 quad) { return lines + odd * LINE + (quad / 2 ^ odd) * 16 + quad % 2 * 8; };
    const u32 here = place(quad), behind = place((quad + 1) % 16);
    u16* to = out + odd * row_stride + quad * 4;
#pragma unroll
    for (u32 first = 0; first < 16; first += 2 * AT_ONCE) {
        u32 words[AT_ONCE][4];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 line = first + 2 * i, swizzle = line % 8 * 16;
            load_shared_pair((here ^ swizzle) + line * LINE, words[i][0], words[i][1]);
            load_shared_pair((behind ^ swizzle) + line * LINE, words[i][2], words[i][3]);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i, to += 2 * row_stride) {
            const u32 skip = elements_before_quad(to), shift = skip % 2 * 16;
            u32 a = words[i][0], b = words[i][1], c = words[i][2];
            if (skip & 2) a = b, b = c, c = words[i][3];
            const bool whole = int(first + 2 * i + odd) < rows && int(quad * 4 + skip + 4) <= columns;
            store_pair_if(whole, to + skip, __funnelshift_r(a, b, shift), __funnelshift_r(b, c, shift));
        }
    }
}

// Stores the elements that those leave at the ends of the lines, up to three at each: a lane for each end.
__device__ __forceinline__ void store_ends(u32 lines, u16* out, i64 row_stride, int rows, int columns,
                                           u32 lane) {
    const u32 line = lane / 2;
    u16* to = out + line * row_stride;
    const int skip = elements_before_quad(to);
    const int begin = lane % 2 ? skip + max(columns - skip, 0) / 4 * 4 : 0;
    const int end = int(line) >= rows ? 0 : lane % 2 ? columns : min(skip, columns);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const u32 column = begin + i;
        if (int(column) < end)
            to[column] =
                load_shared_half(lines + line * PANEL * 2 + (column / 8 ^ line % 8) * 16 + column % 8 * 2);
    }
}

// Stores one wgmma tile of 64 rows where TMA cannot: each warp packs its sixteen lines of a panel, and then
// stores them, whatever a row's address.
template <int type>
__device__ __forceinline__ void store_lines(Accumulators& acc, u32 mma_m, u32 panels, const Params& p,
                                            const TileCoord& tile, u32 thread, u32& buffer) {
    static_assert(PANEL == 64, "sixteen lanes have a line");
    const u32 first = thread / 32 * 16, lane = thread % 32;
    const int row = tile.m + int(mma_m * 64 + first), rows = (GROUPED ? tile.m_end : p.m) - row;
#pragma unroll
    for (u32 column = 0; column < BLOCK_N; column += PANEL) {
        const u32 panel = panels + buffer * PANEL_BYTES, lines = panel + first * PANEL * 2;
        pack_panel<type>(acc[mma_m], column, panel + panel_offset(thread));
        __syncwarp();  // and no more: lanes that are done pack the other panel
        const int at = tile.n + int(column), columns = min((GROUPED ? tile.n_end : p.n) - at, PANEL);
        u16* out = static_cast<u16*>(p.out) + tile.batch * p.batch_stride + row * p.row_stride + at;
        store_quads(lines, out, p.row_stride, rows, columns, lane);
        store_ends(lines, out, p.row_stride, rows, columns, lane);
        buffer ^= 1;
    }
}

struct Output {
    static constexpr u32 smem_bytes = 2 * PANEL_BYTES;  // of shared memory, for a warpgroup
    static constexpr bool overlap_m = !ACCUMULATE && (GROUPED != OF_ROWS || TRANSPOSED);
    static constexpr bool overlap_n = !ACCUMULATE && (GROUPED != OF_ROWS || !TRANSPOSED);

    u32 buffer = 0;

    static __device__ __forceinline__ void prefetch_maps(const Params& p) {
        if constexpr (BY_TMA) prefetch_tensor_map(p.out_map);
    }
    // What the chains of a tile start from.
    __device__ __forceinline__ void init(Accumulators& acc, const Params& p, const TileCoord& tile,
                                         u32 thread) {
        for_each_row(acc, p, tile, thread, [&](float* d, i64 offset, i64 right, int left) {
            const float* from = static_cast<const float*>(p.out) + offset;
#pragma unroll
            for (int i = 0; i < BLOCK_N; i += 8, d += 4) {
                d[0] = d[1] = 0;
                if constexpr (ACCUMULATE) {
                    // Not in pairs: with a branch between two ways to load, ptxas serialises wgmma (C7515).
                    if (i < left) d[0] = from[i * right];
                    if (i + 1 < left) d[1] = from[(i + 1) * right];
                }
            }
        });
    }
    // What becomes of them.
    __device__ __forceinline__ void apply(Accumulators& acc, u32 panels, const Params& p,
                                          const TileCoord& tile, u32 warpgroup, u32 thread) {
        if constexpr (BIAS != NONE) add_bias<BIAS>(acc, p, tile, thread);
        bool whole = GROUPED != OF_ROWS || tile.m + int(ROWS) <= tile.m_end;  // panels are
        if (PANEL > 0 && whole) {
            TileCoord to = tile;
            if (GROUPED == OF_ROWS) to.batch = 0;  // rows of all groups are one matrix
#pragma unroll
            for (u32 mma_m = 0; mma_m < MMA_M; ++mma_m) {
                if constexpr (BY_TMA)
                    store_panels<OUTPUT>(acc, mma_m, panels, p, to, warpgroup, thread, buffer);
                else if constexpr (PANEL > 0)
                    store_lines<OUTPUT>(acc, mma_m, panels, p, to, thread, buffer);
            }
        } else if constexpr (IN_UNITS) {
            store_units(acc, p, tile, thread);
        } else if constexpr (IN_PIECES) {
            store_turned<OUTPUT>(acc, p, tile, thread);
        } else {
            store<OUTPUT>(acc, p, tile, thread);
        }
    }
    // The block may neither leave nor use its shared memory for something else while TMA still reads it.
    __device__ __forceinline__ void drain(u32 thread) {
        if constexpr (BY_TMA) {
            if (thread == 0) tma_store_wait_read<0>();
        }
    }
};
