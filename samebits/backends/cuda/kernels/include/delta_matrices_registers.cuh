// Gradients of matrices with tensor cores and the delta rule: delta_matrices_backward.cu after delta_scores_backward.cu,
// or with a decay for each channel delta_prepare.cu, which have found all that is in no row of chunks.
//
// A chunk's latency is what counts, so warps have roles. Two hold the gradient of the matrix, transposed, in registers,
// each for 16 columns. A third solves the triangular system of these columns, one for each lane. Within a chunk the
// three meet twice: before the system is solved, and after it. Meanwhile the matrix is stored, and gets the products
// that do not need updates. The last warps, HELPERS, copy what the next chunk needs, and store z of the one behind.

#if BY_CHANNEL
#include "delta_backward.cuh"
#include "delta_system.cuh"
#else
#include "delta_scores.cuh"
#endif
#include "named_barriers.cuh"

constexpr int GROUPS = TILE / 32, WIDE = KEY_SIZE / 16;
constexpr int HELPERS = WARPS - 3 * GROUPS, FIRST_HELPER = 3 * GROUPS * 32;
constexpr bool AHEAD = WARPS <= 8;  // there are registers to read operands a step ahead
static_assert(STAGES == 2 && TILE % 32 == 0 && (HELPERS == 1 || HELPERS == 2 || HELPERS == 4));
// Rows in shared memory, padded so that they are read without conflicts of banks.
constexpr int VALUES = TILE + PAD, COLUMNS = CHUNK + PAD;  // in elements
constexpr int UPDATES = CHUNK + 4;                         // in floats

#if BY_CHANNEL
constexpr int BLOCKS_OF_ROWS = CHUNK / 16;

// As delta_scores.cuh, of what delta_prepare.cu has left.
struct Scores {
    Stored rows[CHUNK * COLUMNS];       // of queries, times the scale, [row, key]
    uint4 weights[6][32];               // as System::earlier
    float own[BLOCKS_OF_ROWS][16][16];  // within a block, [row, key], not negative
    float betas[CHUNK], kept[KEY_SIZE];
    static __device__ __forceinline__ int below(int rows, int keys) { return rows * (rows - 1) / 2 + keys; }
};
#endif

struct Memory {
    Stored keys[2][CHUNK * KEYS], queries[2][CHUNK * KEYS], grads[2][CHUNK * VALUES];
#if BY_CHANNEL
    Stored readers[2][CHUNK * KEYS];  // keys that read the matrix; `keys` are written to it
#endif
    Scores scores[2];
    float of_updates[GROUPS][32 * UPDATES];  // [column, row]
    Stored of_z[2][GROUPS][32 * COLUMNS];    // of this chunk and the one behind it; or of values
};

// Copies a chunk's rows of `size` elements, by helpers: those from `first` to `last` - 1 exist, others are zeros.
template <int LINE, int WIDTH>
__device__ __forceinline__ void copy_by_helpers(Stored* to, const Stored* from, i64 line, int first, int last,
                                                int size) {
    constexpr int EACH = WIDTH > 64 ? 16 : WIDTH > 32 ? 8 : 4;  // threads of a row
    constexpr int ROWS = HELPERS * 32 / EACH;
    const int thread = threadIdx.x - FIRST_HELPER, in_row = thread / EACH, at = thread % EACH * 8;
    if ((reinterpret_cast<u64>(from) | u64(line) * SIZE) % 16 == 0) {
        const Stored* source = from + in_row * line + at;
        const u32 target = shared_address(to + in_row * LINE + at);
        if (WIDTH < EACH * 8 && at >= WIDTH) return;
        if (first == 0 && last == CHUNK && size >= WIDTH) {
#pragma unroll 8
            for (int row = 0; row < CHUNK; row += ROWS, source += ROWS * line)
                cp_async_16(target + row * LINE * SIZE, source);
            return;
        }
        const int bytes = min(max(size - at, 0) * SIZE, 16);
#pragma unroll 1
        for (int row = in_row; row < CHUNK; row += ROWS, source += ROWS * line) {
            const bool exists = row >= first && row < last && bytes;
            cp_async_16(target + (row - in_row) * LINE * SIZE, exists ? source : from, exists ? bytes : 0);
        }
    } else {
#pragma unroll 1
        for (int x = thread; x < CHUNK * WIDTH; x += HELPERS * 32) {
            const int row = x / WIDTH, at = x % WIDTH;
            const bool exists = row >= first && row < last && at < size;
            to[row * LINE + at] = exists ? from[row * line + at] : E::narrow(0.0f);
        }
    }
}

__device__ __forceinline__ float part_of(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Sums, transposed: 16 columns of values by STEPS times 16 channels of keys, or rows.
template <int STEPS>
struct Strip {
    float c[STEPS][2][4];

    // Calls `f` with the channel or row, the column, and the sums of two neighbours.
    template <class F>
    __device__ __forceinline__ void each(const F& f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int x = 0; x < STEPS * 4; ++x)
            f(x / 2 * 8 + lane % 4 * 2, lane / 4 + x % 2 * 8, c[x / 4][x / 2 % 2] + x % 2 * 2);
    }

    // Rounded, as a left operand whose k are step x.
    __device__ __forceinline__ void operand(int x, u32 (&left)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = E::pack(c[x][i / 2][i % 2 * 2], c[x][i / 2][i % 2 * 2 + 1]);
    }

    __device__ __forceinline__ void add(int x, const u32 (&left)[4], const u32 (&right)[4]) {
        mma_m16n8k16<TYPE == BF16>(c[x][0], left, right);
        mma_m16n8k16<TYPE == BF16>(c[x][1], left, right + 2);
    }
    __device__ __forceinline__ void add(int x, const u32 (&left)[4], const uint4& given) {
        const u32 right[4] = {given.x, given.y, given.z, given.w};
        add(x, left, right);
    }
};

// Multiplies a left operand by a factor for each k, and rounds it again.
__device__ __forceinline__ void scale(u32 (&left)[4], const float* factors) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const float2 by = *reinterpret_cast<const float2*>(factors + x / 2 * 8 + threadIdx.x % 4 * 2);
        left[x] =
            E::pack(__fmul_rn(E::widen(u16(left[x])), by.x), __fmul_rn(E::widen(u16(left[x] >> 16)), by.y));
    }
}

// Of the gradient of the matrix: columns from `first` on.
struct Part : Strip<WIDE> {
    int first;

    // Calls `f` with each element, where it is in `[key size, size]`, and whether it is there.
    template <class F>
    __device__ __forceinline__ void each_in(float* at, const Params& p, const F& f) {
        const int lane = threadIdx.x % 32, d = lane % 4 * 2, e = first + lane / 4;
        at += d * p.size + e;
#pragma unroll
        for (int x = 0; x < WIDE * 2; ++x, at += 8 * p.size)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                f(c[x / 2][x % 2][i], at + i % 2 * p.size + i / 2 * 8,
                  x * 8 + d + i % 2 < p.key_size && e + i / 2 * 8 < p.size);
    }
    __device__ __forceinline__ void read(const Params& p, const float* from) {
        each_in(const_cast<float*>(from), p,
                [&](float& s, const float* at, bool exists) { s = from && exists ? *at : 0.0f; });
    }
    __device__ __forceinline__ void write(const Params& p, float* to, bool canonical) {
        each_in(to, p, [&](float s, float* at, bool exists) {
            if (exists) *at = canonical ? contract::canonical(s) : s;
        });
    }
    // Rounded, for delta_rows_backward.cu.
    __device__ __forceinline__ void write_rights(uint4* to, int size) const {
        if (first >= size) return;
        const int steps = (size + 15) / 16;
        to += (WIDE * steps + first / 16) * 32 + threadIdx.x % 32;
#pragma unroll
        for (int x = 0; x < WIDE; ++x, to += steps * 32) {
            u32 left[4];
            operand(x, left);
            *to = turned(left, size - first);
        }
    }
};

// Keys or queries of 16 rows, as right operands.
struct Rights {
    u32 of[WIDE][4];

    __device__ __forceinline__ void read(int x, const Stored* rows) {
        ldmatrix_x4<true>(of[x], by_rows(rows + x * 16, KEYS));
    }
};

struct Block {
    const Params& p;
    Memory& m;
    const Chunks chunks;
    const int number;  // of them
    const int head, sequence, first_column;

    __device__ __forceinline__ i64 index(int chunk) const {
        return i64(first_chunk(chunks.begin, sequence) + chunk) * p.heads + head;
    }
    __device__ __forceinline__ Record record(int chunk) const {
        return Record(p.records, index(chunk), p.key_size, p.size);
    }

    __device__ __forceinline__ void load(int chunk) const {
        const int stage = chunk % 2, first = chunks.first(chunk), count = chunks.count(chunk);
        const i64 token = chunks.token(chunk);
        copy_by_helpers<VALUES, TILE>(m.grads[stage],
                                      p.grad + head * p.grad_head + token * p.grad_token + first_column,
                                      p.grad_token, first, count, p.size - first_column);
        const int thread = threadIdx.x - FIRST_HELPER;
#if BY_CHANNEL
        const Prepared& from = p.prepared[index(chunk)];
        const System& system = p.systems[index(chunk)];
        Scores& scores = m.scores[stage];
        const auto whole = [](Stored* to, const Stored* from) {
            copy_by_helpers<KEYS, KEY_SIZE>(to, from, KEY_SIZE, 0, CHUNK, KEY_SIZE);
        };
        const auto copy = [&](void* to, const void* from, int bytes) {
            for (int x = thread; x < bytes / 16; x += HELPERS * 32)
                cp_async_16(shared_address(to) + x * 16, static_cast<const uint4*>(from) + x);
        };
        whole(m.keys[stage], from.written[0]), whole(m.queries[stage], from.queries[0]);
        whole(m.readers[stage], from.keys[0]);
        copy_by_helpers<COLUMNS, CHUNK>(scores.rows, from.scores[0], CHUNK, 0, CHUNK, CHUNK);
        copy(scores.weights, system.earlier, sizeof scores.weights);
        copy(scores.betas, system.betas, sizeof scores.betas);
        copy(scores.kept, from.kept, sizeof scores.kept);
#pragma unroll 4
        for (int x = thread; x < CHUNK * 4; x += HELPERS * 32)
            cp_async_16(shared_address(scores.own) + x * 16, from.weights[x / 4] + x / 64 * 16 + x % 4 * 4);
#else
        const uint4* scores = reinterpret_cast<const uint4*>(p.scores + index(chunk));
        copy_by_helpers<KEYS, KEY_SIZE>(m.keys[stage], record(chunk).keys, p.key_size, 0, count, p.key_size);
#pragma unroll 8
        for (int x = thread; x < int(sizeof(Scores) / 16); x += HELPERS * 32)
            cp_async_16(shared_address(m.scores + stage) + x * 16, scores + x);
        copy_by_helpers<KEYS, KEY_SIZE>(m.queries[stage], p.q + head / p.group * p.q_head + token * p.q_token,
                                        p.q_token, first, count, p.key_size);
#endif
    }

    // Of a chunk: z, and values where it has the rule's gradient of them. It is behind this one: nobody changes it.
    __device__ __forceinline__ void store(int chunk) const {
        const int count = chunks.count(chunk), first = chunks.first(chunk);
        const int thread = threadIdx.x - FIRST_HELPER, lane = thread % 32;
        const i64 step = i64(p.heads) * p.size;
        Stored* dv = p.dv + chunks.token(chunk) * step + i64(head) * p.size + first_column;
        Stored* of_z = record(chunk).of_z + first_column;
        const auto& from = m.of_z[chunk % 2];
        if (p.size % 8) {
#pragma unroll 1
            for (int x = thread; x < count * TILE; x += HELPERS * 32) {
                const int i = x / TILE, e = x % TILE;
                if (first_column + e >= p.size) continue;
                const Stored z = from[e / 32][e % 32 * COLUMNS + i];
                of_z[i * p.size + e] = z;
                if (i >= first) dv[i * step + e] = z;
            }
            return;
        }
        // Rows of ldmatrix are columns: a lane gets eight that are neighbours, of one row.
        const int mine = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
#pragma unroll 2
        for (int x = thread / 32; x < GROUPS * (CHUNK / 8); x += HELPERS) {
            const int group = x % GROUPS, row = x / GROUPS * 8;
            u32 z[4];
            ldmatrix_x4<true>(z, shared_address(from[group] + mine * COLUMNS + row));
            const int i = row + lane / 4, e = group * 32 + lane % 4 * 8;
            if (i >= count || first_column + e >= p.size) continue;
            const uint4 eight = make_uint4(z[0], z[1], z[2], z[3]);
            *reinterpret_cast<uint4*>(of_z + i * p.size + e) = eight;
            if (i >= first) *reinterpret_cast<uint4*>(dv + i * step + e) = eight;
        }
    }

    // All have read a chunk, and the next one is there. Twice: racecheck loses hold of the first time, at which
    // some wait while others have yet to meet at a barrier of their tile.
    __device__ __forceinline__ void meet() const {
        wait_for<THREADS>(15);
        __syncthreads();
    }

    __device__ __forceinline__ void help() const {
#pragma unroll 1
        for (int chunk = number; chunk >= -1; --chunk) {
            if (chunk < number) {
                cp_async_wait<0>();
                meet();
            }
            if (chunk > 0) load(chunk - 1);
            cp_async_commit();
            if (chunk < number - 1) store(chunk + 1);
        }
    }

    __device__ __forceinline__ void matrices(int group, int column) const {  // of the tile
        const int lane = threadIdx.x % 32;
        const i64 own = (i64(sequence) * p.heads + head) * p.key_size * p.size;
        Part part;
        part.first = first_column + column;
        part.read(p, p.of_closed ? p.of_closed + own : nullptr);
#pragma unroll 1
        for (int chunk = number - 1; chunk >= 0; --chunk) {
            const int stage = chunk % 2, count = chunks.count(chunk);
            const Stored *keys = m.keys[stage], *queries = m.queries[stage];
            const Scores& scores = m.scores[stage];
#if BY_CHANNEL
            const Stored* readers = m.readers[stage];
#else
            const Stored* readers = keys;
#endif
            meet();

            // Of updates: by the next matrix, and by results.
            u32 grads[4];
            uint4 of_queries[BLOCKS_OF_ROWS];
            const auto next = [&](int i) {
                i = min(i, CHUNK - 16);
                ldmatrix_x4<true>(grads, by_columns(m.grads[stage] + i * VALUES + column, VALUES));
#pragma unroll
                for (int n = 0; n < BLOCKS_OF_ROWS; ++n) {
#if BY_CHANNEL
                    u32 right[4];
                    ldmatrix_x4<true>(right, by_rows(scores.rows + i * COLUMNS + n * 16, COLUMNS));
                    of_queries[n] = make_uint4(right[0], right[1], right[2], right[3]);
#else
                    of_queries[n] = scores.scores[i / 16][n][lane];
#endif
                }
            };
            Strip<BLOCKS_OF_ROWS> u = {};
#pragma unroll
            for (int x = 0; x < WIDE; ++x) {
                u32 left[4], right[4];
                part.operand(x, left);
#pragma unroll
                for (int n = 0; n < BLOCKS_OF_ROWS; ++n) {
                    ldmatrix_x4<false>(right, by_columns(keys + n * 16 * KEYS + x * 16, KEYS));
                    u.add(n, left, right);
                }
                if (AHEAD && x == WIDE - 1) next(0);
                if (!AHEAD) __syncwarp();  // so that no more is read ahead
            }
            u.each([&](int j, int, float* c) {
#if BY_CHANNEL
                c[0] = j < count ? c[0] : 0.0f, c[1] = j + 1 < count ? c[1] : 0.0f;
#else
                const float2 left = *reinterpret_cast<const float2*>(scores.left + j);
                c[0] = j < count ? __fmul_rn(c[0], left.x) : 0.0f;
                c[1] = j + 1 < count ? __fmul_rn(c[1], left.y) : 0.0f;
#endif
            });
#pragma unroll 1
            for (int i = 0; i < count; i += 16) {
                if (!AHEAD) next(i);
#pragma unroll
                for (int n = 0; n < BLOCKS_OF_ROWS; ++n) u.add(n, grads, of_queries[n]);
                if (AHEAD) next(i + 16);
            }
            u.each([&](int j, int e, const float* c) {
                *reinterpret_cast<float2*>(m.of_updates[group] + (column % 32 + e) * UPDATES + j) =
                    make_float2(c[0], c[1]);
            });
            wait_for<96>(1 + 2 * group);

            // Of the matrix: at this chunk's end, and at its start.
            part.write(p, record(chunk).of_matrix, false);
            part.write_rights(record(chunk).rights, p.size);
            part.each([&](int d, int, float* s) {
#if BY_CHANNEL
                const float2 kept = *reinterpret_cast<const float2*>(scores.kept + d);
#else
                const float2 kept = make_float2(scores.kept, scores.kept);
#endif
                s[0] = __fmul_rn(s[0], kept.x), s[1] = __fmul_rn(s[1], kept.y);
            });
            Rights right;
#pragma unroll 1
            for (int i = 0; i < count; i += 16) {
                u32 left[4];
                ldmatrix_x4<true>(left, by_columns(m.grads[stage] + i * VALUES + column, VALUES));
#if !BY_CHANNEL
                scale(left, scores.since + i);
#endif
#pragma unroll
                for (int x = 0; x < WIDE; ++x) {
                    right.read(x, queries + i * KEYS);
                    part.add(x, left, right.of[x]);
                }
            }
#pragma unroll
            for (int x = 0; AHEAD && x < WIDE; ++x) right.read(x, readers);
            wait_for<96>(2 + 2 * group);
            const Stored* z = m.of_z[chunk % 2][group] + column % 32 * COLUMNS;
#pragma unroll 1
            for (int i = 0; i < count; i += 16) {
                u32 left[4];
                ldmatrix_x4<false>(left, by_rows(z + i, COLUMNS));
#if BY_CHANNEL
                for (u32& both : left) both ^= 0x80008000;
#else
                scale(left, scores.read + i);
#endif
#pragma unroll
                for (int x = 0; x < WIDE; ++x) {
                    if (!AHEAD) right.read(x, readers + i * KEYS);
                    part.add(x, left, right.of[x]);
                    if (AHEAD) right.read(x, readers + min(i + 16, CHUNK - 16) * KEYS);
                }
            }
        }
        meet();
        if (p.dinitial) part.write(p, p.dinitial + own, true);
    }

    // Updates' gradients of a chunk, 16 rows after 16 from the last, and z or values. A lane has a column.
    __device__ __forceinline__ void solve(int group, int chunk) const {
        const int lane = threadIdx.x % 32, stage = chunk % 2;
        const Scores& scores = m.scores[stage];
        float* updates = m.of_updates[group];
        Stored* z = m.of_z[chunk % 2][group];
#pragma unroll 1
        for (int block = (chunks.count(chunk) - 1) / 16, last = block; block >= 0; --block) {
            float u[16], mine[16], weights[16][16];
            // It takes longer to get weights than to solve a row: with registers for it, NEXT rows' are on their way.
            constexpr int NEXT = AHEAD ? 8 : 0;
            const float4* own = reinterpret_cast<const float4*>(scores.own[block]);
            const auto load = [&](int i) {
#pragma unroll
                for (int j = 0; j < i; j += 4) {
                    const float4 four = own[i * 4 + j / 4];
                    float* to = weights[i] + j;
                    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
                }
            };
#pragma unroll
            for (int i = 0; i < NEXT; ++i) load(15 - i);
            if (block < last) {  // by the rows of later blocks, ascending; of the next one they came last
                constexpr int LATER = BLOCKS_OF_ROWS - 1;
                Strip<1> sums[2];
                u32 left[LATER][2][4];
                uint4 rights[LATER];
#pragma unroll
                for (int n = 0; n < LATER; ++n) {
                    const int i = min(block + 1 + n, last);
                    rights[n] = scores.weights[Scores::below(i, block)][lane];
#if BY_CHANNEL  // whose k are the keys
                    rights[n] = make_uint4(transposed(rights[n].x), transposed(rights[n].z),
                                           transposed(rights[n].y), transposed(rights[n].w));
#endif
#pragma unroll
                    for (int x = 0; x < 2; ++x)
                        ldmatrix_x4<false>(left[n][x], by_rows(z + x * 16 * COLUMNS + i * 16, COLUMNS));
                }
#pragma unroll
                for (int x = 0; x < 2; ++x)
                    sums[x].each([&](int j, int e, float* c) {
                        const float2 from = *reinterpret_cast<const float2*>(
                            updates + (x * 16 + e) * UPDATES + block * 16 + j);
                        c[0] = from.x, c[1] = from.y;
                    });
#pragma unroll
                for (int n = 0; n < LATER; ++n)
                    if (block + 1 + n <= last)
#pragma unroll
                        for (int x = 0; x < 2; ++x) sums[x].add(0, left[n][x], rights[n]);
#pragma unroll
                for (int x = 0; x < 2; ++x)
                    sums[x].each([&](int j, int e, const float* c) {
                        *reinterpret_cast<float2*>(updates + (x * 16 + e) * UPDATES + block * 16 + j) =
                            make_float2(c[0], c[1]);
                    });
                __syncwarp();
            }
            float4* of_column = reinterpret_cast<float4*>(updates + lane * UPDATES + block * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 x = of_column[i];
                u[i * 4] = x.x, u[i * 4 + 1] = x.y, u[i * 4 + 2] = x.z, u[i * 4 + 3] = x.w;
            }
            float4 betas[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                betas[i] = reinterpret_cast<const float4*>(scores.betas + block * 16)[i];
#pragma unroll
            for (int i = 15; i >= 0; --i) {
                if (!AHEAD) load(i);
                mine[i] = rounded(__fmul_rn(u[i], part_of(betas[i / 4], i % 4)));
#pragma unroll
                for (int j = 0; j < i; ++j)
                    u[j] = __fmaf_rn(BY_CHANNEL ? -weights[i][j] : weights[i][j], mine[i], u[j]);
                if (AHEAD && i >= NEXT) load(i - NEXT);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                of_column[i] = make_float4(u[i * 4], u[i * 4 + 1], u[i * 4 + 2], u[i * 4 + 3]);
            u32 pairs[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) pairs[i] = E::pack(mine[2 * i], mine[2 * i + 1]);
            uint4* line = reinterpret_cast<uint4*>(z + lane * COLUMNS + block * 16);
            line[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            line[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
            __syncwarp();
        }
    }

    __device__ __forceinline__ void keep_updates(int group, int chunk) const {
        const int lane = threadIdx.x % 32, column = first_column + group * 32 + lane;
        const int count = column < p.size ? chunks.count(chunk) : 0;
        float* to = record(chunk).of_updates + column;
        const auto four = [&](int row) {
            return *reinterpret_cast<const float4*>(m.of_updates[group] + lane * UPDATES + row);
        };
        int row = 0;
#pragma unroll 4
        for (; row + 4 <= count; row += 4, to += 4 * p.size) {
            const float4 x = four(row);
            to[0] = x.x, to[p.size] = x.y, to[2 * p.size] = x.z, to[3 * p.size] = x.w;
        }
        if (row < count) {
            const float4 x = four(row);
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (row + i < count) to[i * p.size] = part_of(x, i);
        }
    }

    __device__ __forceinline__ void updates(int group) const {
#pragma unroll 1
        for (int chunk = number - 1; chunk >= 0; --chunk) {
            meet();
            wait_for<96>(1 + 2 * group);
            solve(group, chunk);
            wait_for<96>(2 + 2 * group);
            keep_updates(group, chunk);
        }
        meet();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_matrices_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int head = blockIdx.y, sequence = blockIdx.z, warp = threadIdx.x / 32;
    const Span first(p, sequence, 0);
    const Block block{
        p, m, Chunks(p, sequence, first.before), first.chunks, head, sequence, int(blockIdx.x) * TILE};
    if (warp < 2 * GROUPS)
        block.matrices(warp / 2, warp * 16);
    else if (warp < 3 * GROUPS)
        block.updates(warp - 2 * GROUPS);
    else
        block.help();
}
