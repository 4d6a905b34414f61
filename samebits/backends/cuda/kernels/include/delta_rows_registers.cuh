// Gradients of a chunk's rows with tensor cores, operands in shared memory and one decay for each head: the faster of
// delta_rows_backward.cu's two forms.
//
// Warps share the columns of keys. A matrix is read once, and rounded in registers, which hold all sums.
#pragma once

#include "delta_backward.cuh"

constexpr int VALUES = VALUE_SIZE + PAD, COLUMNS = CHUNK + PAD;  // in elements
constexpr int LINE = KEY_SIZE + 4;                               // in floats

struct Memory {
    Stored keys[CHUNK * KEYS], queries[CHUNK * KEYS], updates[CHUNK * VALUES];
    union {
        Stored of_rows[2][CHUNK * VALUES];  // gradients of results, and of z
        float rows[CHUNK * LINE];           // once these were read
    };
    Stored of_scores[CHUNK * COLUMNS], of_mutual[CHUNK * COLUMNS];
    float decays[CHUNK], since[CHUNK], left[CHUNK], sums[CHUNK], written[CHUNK], kept[KEY_SIZE], total[4];
};
constexpr int BLOCKS = sizeof(Memory) <= 113 << 10 ? 2 : 1;  // of a multiprocessor

// For rows from `first` to `last` - 1 of x and y, a chain of FMA over x and y times `by`. Eight lanes hold a row's next
// 32 elements, and hand the sum on. HEIGHT is a multiple of 16.
template <int HEIGHT, class F>
__device__ __forceinline__ void chains(const float* x, const float* y, float by, int first, int last,
                                       int size, const F& store) {
    constexpr int SETS = (HEIGHT + 4 * WARPS - 1) / (4 * WARPS);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 4 + lane / 8;
    float sums[SETS] = {};
    for (int e = lane % 8 * 4; e < (size + 31) / 32 * 32; e += 32) {
        float of_x[SETS][4] = {}, of_y[SETS][4] = {};
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            const int row = row0 + s * 4 * WARPS, at = row * size + e;
            if (row < first || row >= last || e >= size) continue;
            if (size % 4 == 0) {
                const uint4 a = *reinterpret_cast<const uint4*>(x + at);
                const uint4 b = *reinterpret_cast<const uint4*>(y + at);
                of_x[s][0] = __uint_as_float(a.x), of_x[s][1] = __uint_as_float(a.y);
                of_x[s][2] = __uint_as_float(a.z), of_x[s][3] = __uint_as_float(a.w);
                of_y[s][0] = __uint_as_float(b.x), of_y[s][1] = __uint_as_float(b.y);
                of_y[s][2] = __uint_as_float(b.z), of_y[s][3] = __uint_as_float(b.w);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (e + i < size) of_x[s][i] = x[at + i], of_y[s][i] = y[at + i];
            }
        }
#pragma unroll
        for (int hop = 0; hop < 8; ++hop)
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (e + i < size) sums[s] = __fmaf_rn(of_x[s][i], __fmul_rn(of_y[s][i], by), sums[s]);
                sums[s] = __shfl_sync(0xFFFFFFFF, sums[s], lane / 8 * 8 + (lane + 7) % 8);
            }
    }
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
        const int row = row0 + s * 4 * WARPS;
        if (lane % 8 == 0 && row >= first && row < last) store(row, sums[s]);
    }
}

// A chain of FMA over x and y, from `sum`. Both are in shared memory.
__device__ __forceinline__ float chain(const Stored* x, const float* y, int size, float sum) {
    int d = 0;
#pragma unroll 4
    for (; d + 4 <= size; d += 4) {
        const uint2 a = *reinterpret_cast<const uint2*>(x + d);
        const uint4 b = *reinterpret_cast<const uint4*>(y + d);
        sum = __fmaf_rn(E::widen(u16(a.x)), __uint_as_float(b.x), sum);
        sum = __fmaf_rn(E::widen(u16(a.x >> 16)), __uint_as_float(b.y), sum);
        sum = __fmaf_rn(E::widen(u16(a.y)), __uint_as_float(b.z), sum);
        sum = __fmaf_rn(E::widen(u16(a.y >> 16)), __uint_as_float(b.w), sum);
    }
    for (; d < size; ++d) sum = __fmaf_rn(E::widen(x[d]), y[d], sum);
    return sum;
}

// Elements of a chunk's rows by a key's channels: a warp has GROUPS of 16 channels, in one of PARTS of the rows.
struct Sums {
    static constexpr int PARTS = KEY_SIZE > 64 ? 1 : KEY_SIZE > 32 ? 2 : 4, TALL = CHUNK / 16 / PARTS;
    static constexpr int STEP = WARPS / PARTS, GROUPS = (KEY_SIZE / 16 + STEP - 1) / STEP;
    float c[GROUPS][TALL][2][4] = {};

    static __device__ __forceinline__ int row(int t) { return (threadIdx.x / 32 % PARTS * TALL + t) * 16; }
    static __device__ __forceinline__ int channel(int g) {
        return (g * STEP + threadIdx.x / 32 / PARTS) * 16;
    }
    static __device__ __forceinline__ bool has(int g) {
        return KEY_SIZE / 16 % STEP == 0 || channel(g) < KEY_SIZE;
    }

    // Calls `f` with the row, the first channel and the sums of two neighbours, and those of `other` there.
    template <class F>
    __device__ __forceinline__ void each_with(Sums& other, const F& f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int x = 0; has(g) && x < TALL * 4; ++x)
                f(row(x / 4) + lane / 4 + x % 2 * 8, channel(g) + x / 2 % 2 * 8 + lane % 4 * 2,
                  c[g][x / 4][x / 2 % 2] + x % 2 * 2, other.c[g][x / 4][x / 2 % 2] + x % 2 * 2);
    }
    template <class F>
    __device__ __forceinline__ void each(const F& f) {
        each_with(*this, [&](int i, int d, float* x, const float*) { f(i, d, x); });
    }

    __device__ __forceinline__ void put(float* rows) {
        each([&](int i, int d, const float* x) {
            *reinterpret_cast<float2*>(rows + i * LINE + d) = make_float2(x[0], x[1]);
        });
    }

    // Carries chains on over `count` rows of x: by rows of scores, or, TURNED, by their columns.
    template <bool TURNED>
    __device__ __forceinline__ void add(const Stored* scores, const Stored* x, int count) {
#pragma unroll 1
        for (int k = 0; k < count; k += 16) {
            u32 right[GROUPS][4], left[4];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                if (has(g)) ldmatrix_x4<true>(right[g], by_rows(x + k * KEYS + channel(g), KEYS));
#pragma unroll
            for (int t = 0; t < TALL; ++t) {
                const Stored* from = scores + (TURNED ? k * COLUMNS + row(t) : row(t) * COLUMNS + k);
                ldmatrix_x4<TURNED>(left, TURNED ? by_columns(from, COLUMNS) : by_rows(from, COLUMNS));
#pragma unroll
                for (int x = 0; x < GROUPS * 2; ++x)
                    if (has(x / 2))
                        mma_m16n8k16<TYPE == BF16>(c[x / 2][t][x % 2], left, right[x / 2] + x % 2 * 2);
            }
        }
    }
};

// Products of COUNT arrays of rows, behind each other, with a matrix in global memory. It is read two steps ahead.
template <int COUNT>
__device__ __forceinline__ void read_matrix(const Params& p, const float* matrix, const Stored* of_rows,
                                            Sums (&sums)[COUNT]) {
    constexpr int STEPS = VALUE_SIZE / 16, GROUPS = Sums::GROUPS, AHEAD = COUNT == 1 ? 2 : 1;
    const int lane = threadIdx.x % 32;
    float2 ahead[AHEAD][GROUPS * 4];
    const auto fetch = [&](int step) {
#pragma unroll
        for (int x = 0; x < GROUPS * 4; ++x) {
            const int d = Sums::channel(x / 4) + x / 2 % 2 * 8 + lane / 4;
            const int e = step * 16 + x % 2 * 8 + lane % 4 * 2;
            const float* from = matrix + d * p.size + e;
            const bool exists = d < p.key_size && e < p.size;
            if (p.size % 2 == 0)
                ahead[step % AHEAD][x] =
                    exists ? *reinterpret_cast<const float2*>(from) : make_float2(0.0f, 0.0f);
            else
                ahead[step % AHEAD][x] =
                    make_float2(exists ? from[0] : 0.0f, exists && e + 1 < p.size ? from[1] : 0.0f);
        }
    };
    fetch(0);
    if constexpr (AHEAD == 2 && STEPS > 1) fetch(1);
#pragma unroll 2
    for (int step = 0; step < STEPS; ++step) {
        u32 right[GROUPS * 4], left[4];
#pragma unroll
        for (int x = 0; x < GROUPS * 4; ++x)
            right[x] = E::pack(ahead[step % AHEAD][x].x, ahead[step % AHEAD][x].y);
        if (step + AHEAD < STEPS) fetch(step + AHEAD);
#pragma unroll
        for (int x = 0; x < COUNT * Sums::TALL; ++x) {
            const int n = x % COUNT, t = x / COUNT;
            ldmatrix_x4<false>(left,
                               by_rows(of_rows + (n * CHUNK + Sums::row(t)) * VALUES + step * 16, VALUES));
#pragma unroll
            for (int y = 0; y < GROUPS * 2; ++y)
                if (Sums::has(y / 2))
                    mma_m16n8k16<TYPE == BF16>(sums[n].c[y / 2][t][y % 2], left, right + y * 2);
        }
    }
}

// Of one of the heads that share `key_head`.
__device__ __forceinline__ void of_head(const Params& p, Memory& m, const Span& span, int place, int head) {
    const int count = span.count, before = span.before, last = count - 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Record record(p.records, i64(place) * p.heads + head, p.key_size, p.size);

    copy_rows<KEYS, KEY_SIZE>(m.queries, p.q + head / p.group * p.q_head + span.token * p.q_token, p.q_token,
                              before, count, p.key_size);
    copy_rows<KEYS, KEY_SIZE>(m.keys, record.keys, p.key_size, 0, count, p.key_size);
    copy_rows<VALUES, VALUE_SIZE>(m.updates, record.updates, p.size, 0, count, p.size);
    copy_rows<VALUES, VALUE_SIZE>(m.of_rows[0], p.grad + head * p.grad_head + span.token * p.grad_token,
                                  p.grad_token, before, count, p.size);
    if constexpr (DELTA) copy_rows<VALUES, VALUE_SIZE>(m.of_rows[1], record.of_z, p.size, 0, count, p.size);
    cp_async_commit();
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const float decay = i < count ? record.decays[i] : 0.0f;
        m.decays[i] = decay, m.since[i] = exp2_of(decay);
        m.left[i] = exp2_of(__fsub_rn(record.decays[last], decay));
#if WEIGHTED
        if (i < count) m.left[i] = __fmul_rn(m.left[i], record.weights[i]);
#endif
    }

    // Of betas or weights; and of the last row's decay, what the next matrix has of this one.
    if constexpr (DELTA || WEIGHTED)
        chains<CHUNK>(record.of_updates, record.z, 1.0f, before, count, p.size, [&](int i, float sum) {
            (WEIGHTED ? p.dweights : p.dbeta)[(span.token + i) * p.heads + head] = contract::canonical(sum);
        });
    if (p.dg)
        chains<KEY_SIZE>(record.matrix, record.of_matrix, exp2_of(record.decays[last]), 0, p.key_size, p.size,
                         [&](int d, float sum) { m.kept[d] = sum; });
    cp_async_wait<0>();
    __syncthreads();

    // Of scores, times decays.
    {
        const int row = warp / 2 * 16, column = warp % 2 * 32;
        float of[1 + DELTA][4][4] = {};
#pragma unroll 1
        for (int e = 0; e < p.size; e += 16) {
            u32 right[2][4], left[4];
#pragma unroll
            for (int x = 0; x < 2; ++x)
                ldmatrix_x4<false>(right[x], by_columns(m.updates + (column + x * 16) * VALUES + e, VALUES));
#pragma unroll
            for (int n = 0; n < 1 + DELTA; ++n) {
                ldmatrix_x4<false>(left, by_rows(m.of_rows[n] + row * VALUES + e, VALUES));
#pragma unroll
                for (int x = 0; x < 4; ++x)
                    mma_m16n8k16<TYPE == BF16>(of[n][x], left, right[x / 2] + x % 2 * 2);
            }
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) {
            const int i = row + lane / 4 + x % 2 * 8, j = column + x / 2 * 8 + lane % 4 * 2;
            float scores[2], mutual[2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                const int at = x % 2 * 2 + y;
                const bool seen = j + y <= i && i < count;
                float decay = seen ? exp2_of(__fsub_rn(m.decays[i], m.decays[j + y])) : 0.0f;
#if WEIGHTED
                if (seen) decay = __fmul_rn(decay, record.weights[j + y]);
#endif
                scores[y] = seen ? __fmul_rn(__fmul_rn(of[0][x / 2][at], p.scale), decay) : 0.0f;
                if constexpr (DELTA)
                    mutual[y] = seen && j + y < i ? __fmul_rn(-of[1][x / 2][at], decay) : 0.0f;
            }
            E::store_pair(m.of_scores + i * COLUMNS + j, scores[0], scores[1]);
            if constexpr (DELTA) E::store_pair(m.of_mutual + i * COLUMNS + j, mutual[0], mutual[1]);
        }
    }
    __syncthreads();

    // Stores what is in `rows`, in sums over heads, in order, by one thread for each element.
    const auto store = [&](Stored* to, float* sums) {
        const bool begins = head % p.group == 0, ends = head % p.group == p.group - 1;
        const i64 row = i64(p.heads / p.group) * p.key_size;
        const i64 at = span.token * row + i64(head / p.group) * p.key_size;
#pragma unroll 2
        for (int x = threadIdx.x; x < CHUNK * KEY_SIZE / 2; x += THREADS) {
            const int i = x / (KEY_SIZE / 2), d = x % (KEY_SIZE / 2) * 2;
            if (i < before || i >= count || d >= p.key_size) continue;
            const i64 mine = at + i * row + d;
            const bool both = d + 1 < p.key_size;
            float2 sum = *reinterpret_cast<const float2*>(m.rows + i * LINE + d);
            if (!begins) {
                sum.x = __fadd_rn(sums[mine], sum.x);
                if (both) sum.y = __fadd_rn(sums[mine + 1], sum.y);
            }
            if (!ends) {
                sums[mine] = sum.x;
                if (both) sums[mine + 1] = sum.y;
                continue;
            }
            sum.x = contract::canonical(sum.x), sum.y = contract::canonical(sum.y);
            if (p.key_size % 2 == 0) {
                E::store_pair(to + mine, sum.x, sum.y);
            } else {
                to[mine] = E::narrow(sum.x);
                if (both) to[mine + 1] = E::narrow(sum.y);
            }
        }
    };

    // Of queries, and of keys as rows of scores: by what they read of the matrix and of the keys before them.
    Sums read[1 + DELTA];
    read_matrix(p, record.matrix, m.of_rows[0], read);
    read[0].each([&](int i, int, float* c) {
        const float factor = __fmul_rn(m.since[i], p.scale);
        c[0] = i < count ? __fmul_rn(c[0], factor) : 0.0f, c[1] = i < count ? __fmul_rn(c[1], factor) : 0.0f;
    });
    read[0].add<false>(m.of_scores, m.keys, count);
    if constexpr (DELTA) {
        read[1].each([&](int i, int, float* c) {
            c[0] = i < count ? __fmul_rn(c[0], -m.since[i]) : 0.0f;
            c[1] = i < count ? __fmul_rn(c[1], -m.since[i]) : 0.0f;
        });
        read[1].add<false>(m.of_mutual, m.keys, count);
    }
    __syncthreads();
    read[0].put(m.rows);
    __syncthreads();
    store(p.dq, p.sums_of_dq);
    float sum = 0.0f;  // of this thread's row: of its decay
    if (p.dg && threadIdx.x < CHUNK)
        sum = chain(m.queries + threadIdx.x * KEYS, m.rows + threadIdx.x * LINE, p.key_size, sum);

    // Of keys, as what the next matrix consists of.
    Sums next[1];
    read_matrix(p, record.of_matrix, m.updates, next);
    next[0].each([&](int j, int, float* c) {
        c[0] = j < count ? __fmul_rn(c[0], m.left[j]) : 0.0f;
        c[1] = j < count ? __fmul_rn(c[1], m.left[j]) : 0.0f;
    });
    __syncthreads();
    next[0].put(m.rows);
    if (p.dg) {
        __syncthreads();
        const int x = threadIdx.x - CHUNK;
        if (x >= 0 && x < count) m.written[x] = chain(m.keys + x * KEYS, m.rows + x * LINE, p.key_size, 0.0f);
        if (threadIdx.x == THREADS - 1) {
            float kept = m.kept[0];
            for (int d = 1; d < p.key_size; ++d) kept = __fadd_rn(kept, m.kept[d]);
            m.total[0] = kept;
        }
    }

    // As columns of scores.
    Sums columns;
    columns.add<true>(m.of_scores, m.queries, count);
    if constexpr (DELTA) columns.add<true>(m.of_mutual, m.keys, count);
    columns.each([&](int j, int d, float* c) {
        const float2 x = *reinterpret_cast<const float2*>(m.rows + j * LINE + d);
        c[0] = __fadd_rn(c[0], x.x), c[1] = __fadd_rn(c[1], x.y);
    });
    if constexpr (!DELTA) read[0] = Sums();
    __syncthreads();
    columns.each_with(read[DELTA], [&](int j, int d, float* c, const float* x) {
        *reinterpret_cast<float2*>(m.rows + j * LINE + d) =
            make_float2(__fadd_rn(x[0], c[0]), __fadd_rn(x[1], c[1]));
        c[0] = __fsub_rn(x[0], c[0]), c[1] = __fsub_rn(x[1], c[1]);
    });
    __syncthreads();
    store(p.dk, p.sums_of_dk);

    // Of decays: a row's running sum scales what the row reads, and inversely what is read of it.
    if (!p.dg) return;
    __syncthreads();
    columns.put(m.rows);
    __syncthreads();
    if (threadIdx.x < CHUNK)
        m.sums[threadIdx.x] =
            chain(m.keys + threadIdx.x * KEYS, m.rows + threadIdx.x * LINE, p.key_size, sum);
    if (threadIdx.x == THREADS - 1) {
        float written = m.written[0];
        for (int j = 1; j < count; ++j) written = __fadd_rn(written, m.written[j]);
        m.total[0] = __fadd_rn(written, m.total[0]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = m.total[0];
#pragma unroll 16
        for (int i = CHUNK - 1; i >= 0; --i) {
            const float mine = m.sums[i];
            if (i < count) sum = i == last ? __fadd_rn(mine, sum) : __fadd_rn(sum, mine);
            m.sums[i] = sum;
        }
    }
    __syncthreads();
    for (int i = before + threadIdx.x; i < count; i += THREADS)
        p.dg[(span.token + i) * p.heads + head] = contract::canonical(m.sums[i]);
}
