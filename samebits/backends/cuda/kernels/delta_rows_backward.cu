// Gradients of delta rules and linear attention, of a chunk's rows: of queries, keys, decays and betas.
//
// docs/contract.md, "Recurrent layers", has the sums. A block takes one head in one chunk. Its record has all that the
// passes over the sequence found: see delta_matrices_backward.cu. So blocks need nothing of each other. Where heads share
// one of keys, delta_sums_backward.cu adds their gradients of that.
//
// Macros: TYPE, TENSOR_CORE, KEY_SIZE, WARPS, HARDWARE_EXP2, DELTA, BY_CHANNEL and WEIGHTED are those of delta.cu.
//   VALUE_SIZE  of v, up to a multiple of 16
//   STAGED      1: operands are copied to shared memory; 0: they are read where they are
//
// With tensor cores and operands in shared memory: include/delta_rows_registers.cuh for one decay for each head, and
// include/delta_rows_channels.cuh. Here an element is a call of functors.

#include "delta_backward.cuh"

#if TENSOR_CORE && STAGED && BY_CHANNEL
#include "delta_rows_channels.cuh"
#elif TENSOR_CORE && STAGED
#include "delta_rows_registers.cuh"
#else
constexpr int VALUES = VALUE_SIZE + PAD, COLUMNS = CHUNK + PAD;  // in elements
constexpr int LINE = KEY_SIZE + 1;                               // in floats
constexpr int BLOCKS = 1;

#if BY_CHANNEL
using Score = float;  // which within a block are not rounded
constexpr int SCORES = CHUNK + 8;
#else
using Score = Stored;
constexpr int SCORES = COLUMNS;
#endif

struct Memory {
#if STAGED || BY_CHANNEL
    Stored keys[CHUNK * KEYS], queries[CHUNK * KEYS];
#endif
#if STAGED
    Stored updates[CHUNK * VALUES], of_z[CHUNK * VALUES], grads[CHUNK * VALUES];
#if !BY_CHANNEL
    Stored matrix[KEY_SIZE * VALUES];
#endif
#endif
    Score of_scores[CHUNK * SCORES], of_mutual[CHUNK * SCORES];
    float rows[CHUNK * LINE], columns[CHUNK * LINE];
    float decays[CHUNK * DECAYS], sums[CHUNK], written[CHUNK], kept[KEY_SIZE];
};

// Rows of an array in global memory, of which those from `first` to `last` - 1 exist; the others are zeros.
template <class T>
struct Given {
    static constexpr bool PAIRS = false;
    const T* from;
    i64 line;
    int first, last, size;

    __device__ __forceinline__ T raw(int row, int k) const {
        return row >= first && row < last && k < size ? from[row * line + k] : T(0);
    }
    __device__ __forceinline__ float operator()(int row, int k) const {
        if constexpr (sizeof(T) == 4)
            return raw(row, k);
        else
            return E::widen(raw(row, k));
    }
};

template <int LINES, int WIDTH, int STEP, class T>
__device__ __forceinline__ void stage(Stored* to, const Given<T>& given) {
    for (int x = threadIdx.x; x < LINES * WIDTH; x += THREADS)
        to[x / WIDTH * STEP + x % WIDTH] = E::narrow(given(x / WIDTH, x % WIDTH));
}

__device__ __forceinline__ void of_head(const Params& p, Memory& m, const Span& span, int place, int head) {
    const int count = span.count, before = span.before;
    const Record record(p.records, i64(place) * p.heads + head, p.key_size, p.size);

    const Stored* first_q = p.q + head / p.group * p.q_head + span.token * p.q_token;
    const Stored* first_grad = p.grad + head * p.grad_head + span.token * p.grad_token;
    const Given<Stored> given_q{first_q, p.q_token, before, count, p.key_size};
    const Given<Stored> given_grad{first_grad, p.grad_token, before, count, p.size};
    const Given<Stored> given_keys{record.keys, p.key_size, 0, count, p.key_size};
    const Given<Stored> given_updates{record.updates, p.size, 0, count, p.size};
    const Given<Stored> given_of_z{record.of_z, p.size, 0, count, p.size};
    const Given<float> given_matrix{record.matrix, p.size, 0, p.key_size, p.size};
    const Given<float> given_of_matrix{record.of_matrix, p.size, 0, p.key_size, p.size};
#if STAGED || BY_CHANNEL
    stage<CHUNK, KEY_SIZE, KEYS>(m.queries, given_q);
    stage<CHUNK, KEY_SIZE, KEYS>(m.keys, given_keys);
    const Rows q{m.queries, KEYS}, keys{m.keys, KEYS};
#else
    const auto &q = given_q, &keys = given_keys;
#endif
#if STAGED
    stage<CHUNK, VALUE_SIZE, VALUES>(m.grads, given_grad);
    stage<CHUNK, VALUE_SIZE, VALUES>(m.updates, given_updates);
    if constexpr (DELTA) stage<CHUNK, VALUE_SIZE, VALUES>(m.of_z, given_of_z);
    const Rows grads{m.grads, VALUES}, updates{m.updates, VALUES}, of_z{m.of_z, VALUES};
#else
    const auto &grads = given_grad, &updates = given_updates, &of_z = given_of_z;
#endif
#if STAGED && !BY_CHANNEL
    stage<KEY_SIZE, VALUE_SIZE, VALUES>(m.matrix, given_matrix);
    const Rows matrix{m.matrix, VALUES}, of_matrix{m.matrix, VALUES};
    const Columns turned_q{m.queries, KEYS}, turned_keys{m.keys, KEYS};
#else
    const auto &matrix = given_matrix, &of_matrix = given_of_matrix;
#if !BY_CHANNEL
    const Turned<Given<Stored> > turned_q{given_q}, turned_keys{given_keys};
#endif
#endif
#if BY_CHANNEL
    const Prepared& prepared = p.prepared[i64(place) * p.heads + head];
    for (int x = threadIdx.x; x < CHUNK * KEY_SIZE; x += THREADS) {
        const int i = x / KEY_SIZE, d = x % KEY_SIZE;
        m.decays[i * DECAYS + d] = i < count ? prepared.decays[i][d] : 0.0f;
    }
#else
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) m.decays[i] = i < count ? record.decays[i] : 0.0f;
#endif
    __syncthreads();

    // A decay, which has one value for all channels or one for each.
    const auto decays = [&](int i, int d) { return m.decays[i * DECAYS + (BY_CHANNEL ? d : 0)]; };
    const auto decay = [&](int i, int j, int d) { return exp2_of(__fsub_rn(decays(i, d), decays(j, d))); };
    const int last = count - 1;
    // A decay from row j on, times the row's weight.
    const auto weighted = [&](float decay, int j) {
#if WEIGHTED
        return __fmul_rn(decay, record.weights[j]);
#else
        return decay;
#endif
    };

    // Of scores, times decays where these are one for all channels.
    const auto zero = [](int, int, float& c) { c = 0.0f; };
    for_tiles<CHUNK, CHUNK>([&](TileOf<CHUNK>& t) {
        t.each(zero);
        t.add(0, p.size, grads, updates);
        t.each([&](int i, int j, float& c) {
            const bool seen = j <= i && i < count;
            const float x = seen ? __fmul_rn(c, p.scale) : 0.0f;
#if BY_CHANNEL
            m.of_scores[i * SCORES + j] = x;
#else
            m.of_scores[i * SCORES + j] = E::narrow(seen ? __fmul_rn(x, weighted(decay(i, j, 0), j)) : 0.0f);
#endif
        });
        if constexpr (DELTA) {
            t.each(zero);
            t.add(0, p.size, of_z, updates);
            t.each([&](int i, int j, float& c) {
                const bool seen = j < i && i < count;
#if BY_CHANNEL
                m.of_mutual[i * SCORES + j] = seen ? -c : 0.0f;
#else
                m.of_mutual[i * SCORES + j] = E::narrow(seen ? __fmul_rn(-c, decay(i, j, 0)) : 0.0f);
#endif
            });
        }
    });
    __syncthreads();

    // Of rows, by what they read of the keys before them.
#if BY_CHANNEL
    const auto add_read = [&](TileOf<KEY_SIZE>& t, const float* of) {
        const int block = t.row / 16 * 16;
        if (block >= count) return;
        if (block) {
            const float* reference = m.decays + (block - 1) * DECAYS;
            TileOf<KEY_SIZE> earlier = t;
            earlier.each(zero);
            earlier.add(0, block, Floats{of, SCORES},
                        Turned<Decayed>{{m.keys, m.decays, reference, block, true, 1.0f}});
            t.each_with(earlier, [&](int i, int d, float& c, float found) {
                if (i < count) c = __fadd_rn(c, __fmul_rn(found, decay(i, block - 1, d)));
            });
        }
        t.each([&](int i, int d, float& c) {
            for (int j = block; j <= i && i < count; ++j)
                c = __fmaf_rn(of[i * SCORES + j], __fmul_rn(keys(j, d), decay(i, j, d)), c);
        });
    };
#else
    const auto add_read = [&](TileOf<KEY_SIZE>& t, const Stored* of) {
        t.add(0, count, Rows{of, SCORES}, turned_keys);
    };
#endif

    // Of queries.
    for_tiles<CHUNK, KEY_SIZE>([&](TileOf<KEY_SIZE>& t) {
        t.each(zero);
        t.add(0, p.size, grads, matrix);
        t.each([&](int i, int d, float& c) {
            c = i < count ? __fmul_rn(c, __fmul_rn(exp2_of(decays(i, d)), p.scale)) : 0.0f;
        });
        add_read(t, m.of_scores);
        t.each([&](int i, int d, float& c) { m.rows[i * LINE + d] = c; });
    });
    __syncthreads();
    const auto store = [&](Stored* to, float* sums, int i, int d, float x) {
        const i64 at = ((span.token + i) * p.heads + head) * p.key_size + d;
        if (sums)
            sums[at] = x;
        else
            to[at] = E::narrow(contract::canonical(x));
    };
    for (int x = threadIdx.x; x < count * p.key_size; x += THREADS) {
        const int i = x / p.key_size, d = x % p.key_size;
        if (i < before) continue;
        store(p.dq, p.sums_of_dq, i, d, m.rows[i * LINE + d]);
        if constexpr (BY_CHANNEL)  // a part of its gradient
            p.dg[((span.token + i) * p.heads + head) * p.key_size + d] =
                __fmul_rn(q(i, d), m.rows[i * LINE + d]);
    }
    if (p.dg && !BY_CHANNEL)
        for (int i = threadIdx.x; i < count; i += THREADS) {
            float sum = 0.0f;
            for (int d = 0; d < p.key_size; ++d) sum = __fmaf_rn(q(i, d), m.rows[i * LINE + d], sum);
            m.sums[i] = sum;
        }
    __syncthreads();

    // Of keys, as rows of scores.
    for_tiles<CHUNK, KEY_SIZE>([&](TileOf<KEY_SIZE>& t) {
        t.each(zero);
        if constexpr (DELTA) {
            t.add(0, p.size, of_z, matrix);
            t.each(
                [&](int i, int d, float& c) { c = i < count ? __fmul_rn(c, -exp2_of(decays(i, d))) : 0.0f; });
            add_read(t, m.of_mutual);
        }
        t.each([&](int i, int d, float& c) { m.rows[i * LINE + d] = c; });
    });
    __syncthreads();

    // As what the next matrix consists of, and as columns of scores.
#if STAGED && !BY_CHANNEL
    stage<KEY_SIZE, VALUE_SIZE, VALUES>(m.matrix, given_of_matrix);
    __syncthreads();
#endif
    for_tiles<CHUNK, KEY_SIZE>([&](TileOf<KEY_SIZE>& t) {
        t.each(zero);
        t.add(0, p.size, updates, of_matrix);
        t.each([&](int j, int d, float& c) {
            m.columns[j * LINE + d] = j < count ? __fmul_rn(c, weighted(decay(last, j, d), j)) : 0.0f;
        });
    });
    __syncthreads();
    // Of the last row's decay: what the next matrix has of each row, and of the matrix.
    if (p.dg) {
        for (int x = threadIdx.x; !BY_CHANNEL && x < count; x += THREADS) {
            float sum = 0.0f;
            for (int d = 0; d < p.key_size; ++d) sum = __fmaf_rn(keys(x, d), m.columns[x * LINE + d], sum);
            m.written[x] = sum;
        }
        for (int d = THREADS - 1 - threadIdx.x; d < p.key_size; d += THREADS) {
            const float kept = exp2_of(decays(last, d));
            float sum = 0.0f;
            for (int e = 0; e < p.size; ++e)
                sum = __fmaf_rn(record.matrix[i64(d) * p.size + e],
                                __fmul_rn(record.of_matrix[i64(d) * p.size + e], kept), sum);
            m.kept[d] = sum;
            if constexpr (BY_CHANNEL) {
                float written = __fmul_rn(keys(0, d), m.columns[d]);
                for (int j = 1; j < count; ++j)
                    written = __fadd_rn(written, __fmul_rn(keys(j, d), m.columns[j * LINE + d]));
                m.kept[d] = __fadd_rn(written, sum);
            }
        }
        __syncthreads();
    }

    // Of keys, by the rows behind them.
    for_tiles<CHUNK, KEY_SIZE>([&](TileOf<KEY_SIZE>& t) {
        t.each(zero);
#if BY_CHANNEL
        const int block = t.row / 16 * 16;
        const auto add_own = [&](const Rows& x, const float* of) {
            t.each([&](int j, int d, float& c) {
                for (int i = j; i < min(block + 16, count); ++i)
                    c = __fmaf_rn(of[i * SCORES + j], __fmul_rn(x(i, d), decay(i, j, d)), c);
            });
        };
        const auto add_later = [&](int row, const Stored* x, const float* of) {
            const float* reference = m.decays + (row - 1) * DECAYS;
            TileOf<KEY_SIZE> later = t;
            later.each(zero);
            later.add(row, min(row + 16, count), Turned<Floats>{{of, SCORES}},
                      Turned<Decayed>{{x, m.decays, reference, count, false, 1.0f}});
            t.each_with(later, [&](int j, int d, float& c, float found) {
                c = __fadd_rn(c, __fmul_rn(found, decay(row - 1, j, d)));
            });
        };
        add_own(q, m.of_scores);
        add_own(keys, m.of_mutual);
        for (int row = block + 16; row < count; row += 16) {
            add_later(row, m.queries, m.of_scores);
            add_later(row, m.keys, m.of_mutual);
        }
#else
        t.add(0, count, Columns{m.of_scores, SCORES}, turned_q);
        if constexpr (DELTA) t.add(0, count, Columns{m.of_mutual, SCORES}, turned_keys);
#endif
        t.each([&](int j, int d, float& c) {
            const float of_column = __fadd_rn(c, m.columns[j * LINE + d]), of_row = m.rows[j * LINE + d];
            m.columns[j * LINE + d] = __fadd_rn(of_row, of_column);
            m.rows[j * LINE + d] = __fsub_rn(of_row, of_column);
        });
    });
    __syncthreads();
    for (int x = threadIdx.x; x < count * p.key_size; x += THREADS) {
        const int i = x / p.key_size, d = x % p.key_size;
        if (i >= before) store(p.dk, p.sums_of_dk, i, d, m.columns[i * LINE + d]);
    }

    // Of betas or weights, and of decays: a row's running sum scales what the row reads, and inversely what is read of it.
    if constexpr (DELTA || WEIGHTED)
        for (int i = THREADS - 1 - threadIdx.x; i < count; i += THREADS) {
            float sum = 0.0f;
            for (int e = 0; e < p.size && i >= before; ++e)
                sum = __fmaf_rn(record.of_updates[i64(i) * p.size + e], record.z[i64(i) * p.size + e], sum);
            float* to = WEIGHTED ? p.dweights : p.dbeta;
            if (i >= before) to[(span.token + i) * p.heads + head] = contract::canonical(sum);
        }
    if (!p.dg) return;
#if BY_CHANNEL
    for (int d = threadIdx.x; d < p.key_size; d += THREADS) {
        float sum = 0.0f;
        for (int i = count - 1; i >= before; --i) {
            float& dg = p.dg[((span.token + i) * p.heads + head) * p.key_size + d];
            float mine = __fadd_rn(dg, __fmul_rn(keys(i, d), m.rows[i * LINE + d]));
            if (i == last) mine = __fadd_rn(mine, m.kept[d]);
            sum = i == last ? mine : __fadd_rn(sum, mine);
            dg = contract::canonical(sum);
        }
    }
    return;
#endif
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float sum = m.sums[i];
        for (int d = 0; d < p.key_size; ++d) sum = __fmaf_rn(keys(i, d), m.rows[i * LINE + d], sum);
        m.sums[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x) return;
    float written = m.written[0], kept = m.kept[0];
    for (int j = 1; j < count; ++j) written = __fadd_rn(written, m.written[j]);
    for (int d = 1; d < p.key_size; ++d) kept = __fadd_rn(kept, m.kept[d]);
    float sum = __fadd_rn(m.sums[count - 1], __fadd_rn(written, kept));
    for (int i = count - 1; i >= before; --i) {
        if (i < count - 1) sum = __fadd_rn(sum, m.sums[i]);
        p.dg[(span.token + i) * p.heads + head] = contract::canonical(sum);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_rows_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int place = blockIdx.x, sequence = sequence_of(p, place);
    const int chunk = place - first_chunk(Tokens(p.spans, sequence, p.sequences, p.tokens).begin, sequence);
    if (chunk < 0 || chunk >= Span(p, sequence, 0).chunks) return;
    of_head(p, m, Span(p, sequence, chunk), place, blockIdx.y);
}
