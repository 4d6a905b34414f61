// Sums of segments: what each segment of k gives, added by the contract's tree. Uses the macros SEGMENTS and
// HELD.
//
// A warpgroup takes a tile's segments in order. At most one sum of every level waits for its right neighbour:
//
//   segment   0      1      2      3      4      5      6      7
//   level 0   wait   add    wait   add    wait   add    wait   add
//   level 1          wait          add           wait          add
//   level 2                        wait                        add
//
// The HELD lowest levels, which change most often, wait in registers; the others in memory, that is, in L2.
// There each thread reads what it wrote itself, so nothing is synchronised.
#pragma once

#include "ptx_sm90.cuh"

#ifndef SEGMENTS
#define SEGMENTS 1
#define HELD 0
#endif

// Of a thread's accumulators, TILES times FLOATS.
template <int TILES, int FLOATS>
class SegmentSums {
    using Sum = float (&)[TILES][FLOATS];
    static constexpr int FOURS = TILES * FLOATS / 4;

    float held[HELD ? HELD : 1][TILES][FLOATS];

    static __device__ __forceinline__ void plus(float& right, float left) { right = __fadd_rn(left, right); }

    template <int level>
    __device__ __forceinline__ void add_from(Sum sum, u32 segment, float4* memory) {
        if constexpr (1 << level < SEGMENTS) {
            if (segment >> level & 1) {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int i = 0; i < FLOATS; i += 4) {
                        float* d = &sum[tile][i];
                        if constexpr (level < HELD) {
#pragma unroll
                            for (int j = 0; j < 4; ++j) plus(d[j], held[level][tile][i + j]);
                        } else {
                            float4 left = __ldcg(memory + place(level, tile, i));
                            plus(d[0], left.x);
                            plus(d[1], left.y);
                            plus(d[2], left.z);
                            plus(d[3], left.w);
                        }
                    }
                }
                add_from<level + 1>(sum, segment, memory);
            } else {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int i = 0; i < FLOATS; i += 4) {
                        const float* d = &sum[tile][i];
                        if constexpr (level < HELD) {
#pragma unroll
                            for (int j = 0; j < 4; ++j) held[level][tile][i + j] = d[j];
                        } else {
                            __stcg(memory + place(level, tile, i), make_float4(d[0], d[1], d[2], d[3]));
                        }
                    }
                }
            }
        }
    }

    static __device__ constexpr int place(int level, int tile, int i) {
        return ((level - HELD) * FOURS + (tile * FLOATS + i) / 4) * 128;
    }

  public:
    static __device__ constexpr int levels_in_memory() {
        int levels = 0;
        while (1 << levels < SEGMENTS) ++levels;
        return levels - HELD;
    }

    static __device__ __forceinline__ void clear(Sum sum) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) sum[tile][i] = 0;
        }
    }

    // Adds the sum of a segment, or puts it aside. After the last one, `sum` is that of all. `of_all`: where the
    // memory of all warpgroups begins; host code counts it.
    __device__ __forceinline__ void add(Sum sum, u32 segment, float* of_all, u32 warpgroup, u32 thread) {
        asm volatile("" : "+r"(thread));  // or the address stays in registers from one segment to the next
        i64 start = i64(warpgroup) * (levels_in_memory() * FOURS * 128) + thread;
        add_from<0>(sum, segment, reinterpret_cast<float4*>(of_all) + start);
    }
};
