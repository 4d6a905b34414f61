// Warpgroup matrix instructions in FP8: D[64, N] += A[64, 32] B[32, N], both operands in shared memory and
// contiguous along k, which these instructions need. Uses the macros A_E5M2 and B_E5M2: 1 where the operand is
// of e5m2, 0 where it is of e4m3.
#pragma once

#include "wgmma_sm90.cuh"

#if A_E5M2
#define A_FORMAT "e5m2"
#else
#define A_FORMAT "e4m3"
#endif
#if B_E5M2
#define B_FORMAT "e5m2"
#else
#define B_FORMAT "e4m3"
#endif

template <int n>
struct WgmmaFp8;

// One k32 step of a 64-row chain; without `accumulate` the first of it, from +0. The three numbers are the
// operands' places in the instruction, after the n / 2 accumulators.
#define WGMMA_FP8(n, regs, a, b, on, ...)                                                                  \
    template <>                                                                                            \
    struct WgmmaFp8<n> {                                                                                   \
        static __device__ __forceinline__ void step(float (&d)[n / 2], u64 a_tile, u64 b_tile,             \
                                                    u32 accumulate) {                                      \
            asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #on                        \
                         ", 0;\n"                                                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." A_FORMAT "." B_FORMAT " {" regs \
                         "}, %" #a ", %" #b ", accumulate, 1, 1;\n}\n"                                     \
                         : __VA_ARGS__                                                                     \
                         : "l"(a_tile), "l"(b_tile), "r"(accumulate));                                     \
        }                                                                                                  \
    };

WGMMA_FP8(8, REGS_4, 4, 5, 6, ACC_4(0))
WGMMA_FP8(16, REGS_8, 8, 9, 10, ACC_8(0))
WGMMA_FP8(32, REGS_16, 16, 17, 18, ACC_16(0))
WGMMA_FP8(64, REGS_32, 32, 33, 34, ACC_32(0))
WGMMA_FP8(128, REGS_64, 64, 65, 66, ACC_64(0))
