// What attention's gradients begin with: D, for each row of queries the sum of g * out; and what the row adds to
// its sink's gradient. Bits are those of docs/contract.md, "Attention".
//
// A warp has some rows at once, and loads all of its rows before it adds anything.
//
// Macros
//   TYPE           F32, BF16 or F16
//   COLUMNS        of g and out, or more: a power of two of at least 16, at most those of a block of a row's sum
//   VECTOR         1: g and out have rows of whole, aligned, contiguous 16 bytes; 0: any strides
//   HARDWARE_EXP2  1: exp2 is the instruction; 0: the polynomial

#include "attention_softmax.cuh"
#include "convert.cuh"
#include "launch.cuh"

using Type = Element<TYPE>;
using Stored = Type::Stored;

struct Strides {
    i64 batch, token, head, column;  // in elements
};

struct Params {
    const Stored *g, *out;
    const float* sinks;  // of each head, or null: then `of_sinks` is, too
    const float* lse2;
    float* dots;
    float* of_sinks;  // [tokens, heads]
    Strides g_strides, out_strides;
    i64 lse_batch, lse_head;  // of `dots` too
    i64 rows;                 // of all queries and heads
    int queries, heads, values;
    int unused;
};

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(u16 x) { return x; }

constexpr int WIDTH = 16 / sizeof(Stored);  // elements that a lane has of a block
constexpr int LANES = COLUMNS / WIDTH;      // of a row
static_assert(COLUMNS <= contract::VOCAB_BLOCK && LANES <= 32);
constexpr int ABREAST = 32 / LANES, PASSES = 4;  // rows of a warp: at once, and one after another

// Of a row, 16 bytes; elements from `count` on are zeros.
struct Chunk {
    u32 words[4] = {};

    __device__ __forceinline__ void load(const Stored* from, i64 stride, int count) {
        if constexpr (VECTOR) {
            if (count <= 0) return;
            const uint4 x = *reinterpret_cast<const uint4*>(from);
            words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < count)
                    words[i * 4 / WIDTH] |= bits_of(from[i * stride]) << (TYPE == F32 ? 0 : i % 2 * 16);
        }
    }
    __device__ __forceinline__ float at(int i) const {
        if constexpr (TYPE == F32)
            return __uint_as_float(words[i]);
        else
            return Type::widen(Stored(words[i / 2] >> (i % 2 * 16)));
    }
};

// By halves, the sum of values that lie side by side, `count` in each of `lanes`. Of two lanes that are to add
// the same, one goes on with even sums, the other with odd ones; at the end they add what they have.
template <int lanes, int count>
__device__ __forceinline__ float sum_of_chunks(float (&x)[count]) {
    if constexpr (count == 1) {
        return contract::sum_of_lanes<lanes>(x[0]);
    } else {
        constexpr int half = lanes / 2;
        const bool odd = threadIdx.x & half;
        float own[count / 2];
#pragma unroll
        for (int i = 0; i < count; i += 2) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, odd ? x[i] : x[i + 1], half);
            own[i / 2] = __fadd_rn(odd ? x[i + 1] : x[i], other);
        }
        const float sum = sum_of_chunks<half>(own);
        return __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFF, sum, half));
    }
}

// The rows of a lane.
struct Rows {
    i64 first, batch;
    int query, head;  // of the first

    __device__ __forceinline__ explicit Rows(const Params& p) {
        const i64 warp = i64(blockIdx.x) * 8 + threadIdx.x / 32;
        first = warp * (ABREAST * PASSES) + threadIdx.x % 32 / LANES;
        const i64 token = first / p.heads;
        head = first - token * p.heads;
        batch = token / p.queries;
        query = token - batch * p.queries;
    }

    // f(pass, row, batch, query, head) for each that exists.
    template <typename F>
    __device__ __forceinline__ void for_each(const Params& p, F f) const {
        Rows at = *this;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const i64 row = first + pass * ABREAST;
            if (row < p.rows) f(pass, row, at.batch, at.query, at.head);
            for (at.head += ABREAST; at.head >= p.heads; at.head -= p.heads)
                if (++at.query == p.queries) at.query = 0, ++at.batch;
        }
    }
};

extern "C" __global__ void __launch_bounds__(256) grad_dots(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const int lane = threadIdx.x % LANES;
    const Rows rows(p);
    float sum[PASSES] = {},
          other[PASSES] = {};  // of every second block: each of up to four is a chain of its own
#pragma unroll 1
    for (int first = 0; first < p.values; first += contract::VOCAB_BLOCK) {
        const int column = first + lane * WIDTH;
        Chunk g[PASSES], out[PASSES];
        rows.for_each(p, [&](int pass, i64, i64 batch, int query, int head) {
            const Strides &of_g = p.g_strides, &of_out = p.out_strides;
            g[pass].load(
                p.g + batch * of_g.batch + query * of_g.token + head * of_g.head + column * of_g.column,
                of_g.column, p.values - column);
            out[pass].load(p.out + batch * of_out.batch + query * of_out.token + head * of_out.head +
                               column * of_out.column,
                           of_out.column, p.values - column);
        });
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            float product[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                product[i] = __fmul_rn(g[pass].at(i), out[pass].at(i));
                if (COLUMNS < contract::VOCAB_BLOCK)
                    product[i] = __fadd_rn(product[i], 0.0f);  // the other half
            }
            const float next = __fadd_rn(sum[pass], sum_of_chunks<LANES>(product));
            sum[pass] = other[pass], other[pass] = next;
        }
    }
    if (lane > 0) return;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) sum[pass] = __fadd_rn(sum[pass], other[pass]);
    rows.for_each(p, [&](int pass, i64 row, i64 batch, int query, int head) {
        const i64 at = batch * p.lse_batch + head * p.lse_head + query;
        p.dots[at] = sum[pass];
        if (!p.sinks) return;
        const float exponent = __fsub_rn(__fmul_rn(p.sinks[head], contract::LOG2E), p.lse2[at]);
        p.of_sinks[row] = p.lse2[at] == -INF ? 0.0f : -__fmul_rn(scores::exp2(exponent), sum[pass]);
    });
}
