// Gradients of linear attention without the delta rule: of the matrix at each chunk's end.
//
// docs/contract.md, "Recurrent layers", has the sums. As in linear_states.cu nothing but this is in a row, from the last
// chunk to the first. A block takes KEY_TILE channels of keys of one head in one sequence, by all columns of values. WARPS
// have columns of these in registers. More, CHAINS, have a channel for each lane: the sum over all columns of the matrix
// times its gradient, for decays.
//
// Macros: TYPE, KEY_SIZE, WARPS and HARDWARE_EXP2 are those of delta.cu.
//   VALUE_SIZE  of v, up to a multiple of 16
//   KEY_TILE    channels of a block, a multiple of 16
//   STAGES      chunks in shared memory

#include "linear_part.cuh"

constexpr int WIDE = KEY_TILE / 16, CHAINS = (KEY_TILE + 31) / 32;
constexpr int KEY_STEPS = KEY_SIZE / 16, VALUE_STEPS = VALUE_SIZE / 16;
constexpr int STRIPS = (VALUE_STEPS + WARPS - 1) / WARPS;  // of columns, of a warp
constexpr int LINE = KEY_TILE + PAD, VALUES = VALUE_SIZE + PAD,
              FLOATS = KEY_TILE + 8;  // of rows in shared memory

struct Memory {
    Stored queries[STAGES][CHUNK * LINE], grads[STAGES][CHUNK * VALUES];
    float starts[STAGES][VALUE_SIZE * FLOATS], matrix[VALUE_SIZE * FLOATS];  // [column, channel]
    float sums[STAGES][CHUNK], since[CHUNK];                                 // decays from the chunk's start
};
constexpr int BLOCKS = sizeof(Memory) <= 113 << 10 ? 2 : 1;  // of a multiprocessor

// Of a warp with sums.
struct Strips {
    Part<WIDE> parts[STRIPS];

    __device__ __forceinline__ Strips(int first_key) {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
            parts[s].first_key = first_key, parts[s].first_column = (s * WARPS + threadIdx.x / 32) * 16;
    }
    template <class F>
    __device__ __forceinline__ void each(const F& f) {
        if (threadIdx.x >= THREADS) return;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
            if (VALUE_STEPS % WARPS == 0 || parts[s].first_column < VALUE_SIZE) f(parts[s]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32 * CHAINS, BLOCKS)
    linear_matrices_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int head = blockIdx.y, sequence = blockIdx.z;
    const int first_key = blockIdx.x * KEY_TILE, keys = min(KEY_SIZE - first_key, KEY_TILE);
    const Chunks mine(p, sequence, rows_before(p, sequence));
    const int last = mine.rows > mine.before ? mine.number() - 1 : -1;
    const int full = mine.before / CHUNK;  // chunks that were full before this call
    const i64 place = first_chunk(mine.begin, sequence);
    const i64 own = (i64(sequence) * p.heads + head) * p.key_size * p.size;
    const int d = int(threadIdx.x) - THREADS;  // the channel of a lane of CHAINS
    const bool multiplies = d < 0;
    const auto index = [&](int chunk) { return (place + chunk) * p.heads + head; };

    const Stored* q = p.q + head / p.group * p.q_head + first_key;
    const Stored* grad = p.of.grad + head * p.of.grad_head;
    const auto load = [&](int chunk) {
        const int stage = chunk % STAGES, first = mine.first(chunk), count = mine.count(chunk);
        const i64 token = mine.token(chunk);
        load_given<LINE, KEY_TILE>(m.queries[stage], q + token * p.q_token, p.q_token, first, count,
                                   p.key_size - first_key);
        load_given<VALUES, VALUE_SIZE>(m.grads[stage], grad + token * p.of.grad_token, p.of.grad_token, first,
                                       count, p.size);
        load_whole(m.sums[stage], p.decays[index(chunk)].sums);
        const float* starts = p.of.starts + index(chunk) * VALUE_SIZE * KEY_SIZE + first_key;
#pragma unroll 4
        for (int x = threadIdx.x; p.of.starts && x < VALUE_SIZE * KEY_TILE / 4; x += THREADS) {
            const int e = x / (KEY_TILE / 4), at = x % (KEY_TILE / 4) * 4;
            if (at < keys)
                cp_async_16(shared_address(m.starts[stage] + e * FLOATS + at), starts + e * KEY_SIZE + at);
        }
    };

    Strips strips(first_key);
    strips.each([&](Part<WIDE>& part) { part.read(p, p.of.of_closed ? p.of.of_closed + own : nullptr); });

    for (int chunk = last; chunk > last - (STAGES - 1); --chunk) {
        if (multiplies && chunk >= full) load(chunk);
        cp_async_commit();
    }
    for (int chunk = last; chunk >= full; --chunk) {
        const int stage = chunk % STAGES, count = mine.count(chunk);
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (multiplies && chunk - (STAGES - 1) >= full) load(chunk - (STAGES - 1));
        cp_async_commit();
        const float kept = exp2_of(m.sums[stage][CHUNK - 1]);
        for (int i = threadIdx.x; i < CHUNK; i += THREADS + 32 * CHAINS)
            m.since[i] = i < count ? __fmul_rn(exp2_of(m.sums[stage][i]), p.scale) : 0.0f;
        strips.each([&](Part<WIDE>& part) {
            part.write_rounded(p, p.of.matrices + index(chunk) * VALUE_STEPS * KEY_STEPS * 32);
            part.put(m.matrix + part.first_column * FLOATS, FLOATS, KEY_TILE);
        });
        __syncthreads();
        strips.each([&](Part<WIDE>& part) {
            part.scale(kept);
            part.add<LINE, VALUES>(m.queries[stage], m.grads[stage] + part.first_column, m.since, count);
        });
        if (d >= 0 && d < min(KEY_TILE, p.key_size - first_key) && p.of.starts) {
            float sum = 0.0f;
#pragma unroll 16
            for (int e = 0; e < p.size; ++e) {
                const float of_matrix = __fmul_rn(m.matrix[e * FLOATS + d], kept);
                sum = __fmaf_rn(m.starts[stage][e * FLOATS + d], of_matrix, sum);
            }
            p.of.kept[index(chunk) * p.key_size + first_key + d] = sum;
        }
    }
    if (p.of.dinitial) strips.each([&](Part<WIDE>& part) { part.write(p, p.of.dinitial + own, true); });
}
