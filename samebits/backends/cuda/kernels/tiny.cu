// Batched products of tiny matrices, m, n and k up to 64, on sm_75 (FMA) and sm_80 (tensor cores) and newer.
//
// Every output element is one chain over ascending k with one f32 accumulator, in one thread: of fused
// multiply-adds, or of tensor-core steps of 16 k. How matrices are shared among blocks and threads is free,
// and changes no bit.
//
// A block takes some matrices of the batch. STAGED, it copies them whole into shared memory, as lines at odd
// multiples of 16 bytes, then multiplies; tensor cores also leave results there, which are then written out
// in wide vectors. Else threads load what they multiply straight into registers.
//
// Macros
//   TENSOR_CORE                     1: chains of tensor-core steps; 0: of fused multiply-adds
//   STAGED                          1: through shared memory; 0: straight into registers, for dense matrices
//   THREADS, BLOCKS                 threads of a block; blocks that shall fit on a multiprocessor, 0: no
//                                   matter
//   TILE_M, TILE_N                  rows and columns of a thread under FMA; TILE_N is a multiple of 4
//   IN_FLIGHT                       tiles that a warp loads at once: tensor cores, not STAGED
//   PARTS                           1 or 2: parts of k, so that multiplication begins when the first has
//                                   arrived
//   A_TYPE, B_TYPE, OUT             types: 0 f32, 1 bf16, 2 f16 (enum Kind of epilogue.cuh)
//   A_K_MAJOR, B_K_MAJOR            1: the operand's lines run along k; 0: along m (n)
//   A_VECTOR, B_VECTOR, OUT_VECTOR  bytes that move at once: 2, 4, 8 or 16
//   DENSE                           1: lines lie end to end, and so do matrices that do not broadcast
//   A_BROADCAST, B_BROADCAST        1: one matrix serves the whole batch; counts if DENSE
//   ACCUMULATE                      1: chains start from the output, which is f32
//   M, N, K                         sizes, multiples of 4; 0: the launch gives them

#if !defined(TENSOR_CORE) || !defined(STAGED)
#error "TENSOR_CORE and STAGED are needed: #if takes a missing macro for 0"
#endif

#include "epilogue.cuh"

// The matrices of a batch, as lines of neighbours: of a along k or along m, of b along k or along n, of out
// along n.
struct Matrices {
    unsigned char* data;
    i64 batch, line, inner;  // strides in bytes
};

struct Params {
    Matrices a, b, out;
    i64 batch;
    int per_block, m, n, k;  // sizes may be compiled in, as M, N and K; else those are 0
    int closing_zero;
    int a_span, b_span;  // bytes of a matrix, where those of a batch lie end to end, else 0
};

__device__ constexpr int size_of(int type) { return type == F32 ? 4 : 2; }

// Bytes from line to line. In shared memory lines start at odd multiples of 16 bytes, so that eight of them
// meet no bank twice; else they lie end to end.
template <int TYPE>
__device__ __forceinline__ int pitch_of(int inner) {
    return STAGED ? (inner * size_of(TYPE) + 15) / 16 * 16 | 16 : inner * size_of(TYPE);
}

template <int BYTES>
struct Chunk;
template <>
struct Chunk<2> {
    using Type = u16;
};
template <>
struct Chunk<4> {
    using Type = u32;
};
template <>
struct Chunk<8> {
    using Type = uint2;
};
template <>
struct Chunk<16> {
    using Type = uint4;
};

// Loads of an operand. They are volatile: the kernel before this one may write it, so no load may move up.
template <typename Type>
__device__ __forceinline__ Type load_operand(const unsigned char* from) {
    Type v;
    if constexpr (STAGED)
        v = *reinterpret_cast<const Type*>(from);
    else if constexpr (sizeof(Type) == 16)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from));
    else if constexpr (sizeof(Type) == 8)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    else if constexpr (sizeof(Type) == 4)
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
    else
        asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(from));
    return v;
}

template <int BYTES>
__device__ __forceinline__ void copy_chunk(unsigned char* to, const unsigned char* from) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                     : "memory");
    else if constexpr (BYTES > 2)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                     "n"(BYTES)
                     : "memory");
    else
#endif
        *reinterpret_cast<typename Chunk<BYTES>::Type*>(to) =
            __ldg(reinterpret_cast<const typename Chunk<BYTES>::Type*>(from));
}

// The same matrices with strides that the compiler knows, if they are DENSE.
__device__ __forceinline__ Matrices with_known_strides(Matrices x, int lines, int inner, int size,
                                                       bool broadcast) {
    if (DENSE) x.inner = size, x.line = inner * size, x.batch = broadcast ? 0 : lines * inner * size;
    return x;
}

// Calls each(offset in shared memory, offset in global memory) for all chunks of `count` matrices, neighbours
// in memory by neighbouring threads.
template <int TYPE, int VECTOR, typename Each>
__device__ __forceinline__ void for_chunks(const Matrices& x, int count, u32 lines, int inner, Each each) {
    const int pitch = pitch_of<TYPE>(inner);
    const u32 chunks = inner * size_of(TYPE) / VECTOR;
    const i64 step = VECTOR == size_of(TYPE) ? x.inner : VECTOR;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count * lines * chunks; i += THREADS) {
        const u32 line = i / chunks, chunk = i - line * chunks, matrix = line / lines;
        const i64 from =
            DENSE ? i * VECTOR : matrix * x.batch + (line - matrix * lines) * x.line + chunk * step;
        each(line * pitch + chunk * VECTOR, from);
    }
}

template <int TYPE, int VECTOR>
__device__ __forceinline__ void load(unsigned char* to, const Matrices& x, i64 first, int count, int lines,
                                     int inner) {
    const unsigned char* data = x.data + first * x.batch;
    for_chunks<TYPE, VECTOR>(x, x.batch ? count : 1, lines, inner,
                             [&](u32 shared, i64 global) { copy_chunk<VECTOR>(to + shared, data + global); });
}

// A part of one matrix: a range of k, for all rows.
template <int TYPE, int VECTOR, bool K_MAJOR>
__device__ __forceinline__ void load_part(unsigned char* to, const Matrices& x, i64 matrix, int lines,
                                          int inner, int part) {
    const int pitch = pitch_of<TYPE>(inner), chunks = inner * size_of(TYPE) / VECTOR / (K_MAJOR ? PARTS : 1);
    const i64 step = VECTOR == size_of(TYPE) ? x.inner : VECTOR;
    if (!K_MAJOR) lines /= PARTS;
    const int first_line = K_MAJOR ? 0 : part * lines, first_chunk = K_MAJOR ? part * chunks : 0;
    const unsigned char* data = x.data + matrix * x.batch;
#pragma unroll 4
    for (int i = threadIdx.x; i < lines * chunks; i += THREADS) {
        const int line = first_line + i / chunks, chunk = first_chunk + i % chunks;
        copy_chunk<VECTOR>(to + line * pitch + chunk * VECTOR, data + line * x.line + chunk * step);
    }
}

template <int VECTOR>
__device__ __forceinline__ void store(const unsigned char* from, const Matrices& x, i64 first, int count,
                                      int lines, int inner) {
    using Type = typename Chunk<VECTOR>::Type;
    unsigned char* data = x.data + first * x.batch;
    for_chunks<OUT, VECTOR>(x, count, lines, inner, [&](u32 shared, i64 global) {
        *reinterpret_cast<Type*>(data + global) = *reinterpret_cast<const Type*>(from + shared);
    });
}

// The accumulator that an element's chain starts from.
__device__ __forceinline__ float initial_accumulator(const Matrices& out, i64 matrix, int row, int column,
                                                     bool exists) {
    if (!ACCUMULATE || !exists) return 0.0f;
    return *reinterpret_cast<const float*>(out.data + matrix * out.batch + row * out.line +
                                           column * out.inner);
}

// Four neighbours of a row.
__device__ __forceinline__ void store_four(unsigned char* to, const float* x, int kind) {
    if constexpr (OUT == F32)
        *reinterpret_cast<uint4*>(to) = make_uint4(round_bits(x[0], kind), round_bits(x[1], kind),
                                                   round_bits(x[2], kind), round_bits(x[3], kind));
    else
        *reinterpret_cast<uint2*>(to) = make_uint2(round_pair<OUT>(x[0], x[1]), round_pair<OUT>(x[2], x[3]));
}

// What a block multiplies: its matrices of the batch, in shared memory if STAGED.
struct Work {
    const unsigned char *a, *b;
    unsigned char* staged;   // results, in shared memory
    int a_matrix, b_matrix;  // bytes from one to the next
    Matrices out;
    i64 first;
    int count, m, n, k, out_kind, closing_zero;
};

#if TENSOR_CORE && STAGED
// Matrices of at most eight rows and columns are taken in pairs: the second eight rows and columns of a step
// are the next matrix's. Of the four products two are wanted.
constexpr int PAIRED = M && M <= 8 && N <= 8;

// A warp takes 16 rows of a matrix and all its columns, or a pair of matrices.
__device__ __forceinline__ void multiply(const Work& t) {
    constexpr int TILES = PAIRED ? 2 : M ? (N + 15) / 16 * 2 : 8;  // of eight columns
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
    const int a_pitch = pitch_of<A_TYPE>(A_K_MAJOR ? t.k : t.m),
              b_pitch = pitch_of<B_TYPE>(B_K_MAJOR ? t.k : t.n);
    const int a_row = A_K_MAJOR ? a_pitch : 2, a_k = A_K_MAJOR ? 2 : a_pitch;  // bytes from one to the next
    const int b_row = B_K_MAJOR ? b_pitch : 2, b_k = B_K_MAJOR ? 2 : b_pitch;
    const int out_pitch = pitch_of<OUT>(t.n);
    // Where this lane reads lines of fragments, see ldmatrix_x4.
    const int quarter = lane / 8, line = lane % 8;
    const u32 a_lane = shared_address(t.a) + line * (A_K_MAJOR ? a_row : a_k) +
                       quarter % 2 * (PAIRED ? t.a_matrix : 8 * a_row) + quarter / 2 * 8 * a_k;
    const u32 b_lane = shared_address(t.b) + line * (B_K_MAJOR ? b_row : b_k) +
                       quarter / 2 * (PAIRED ? t.b_matrix : 8 * b_row) + quarter % 2 * 8 * b_k;
    const int strips = PAIRED ? 1 : (t.m + 15) / 16, units = PAIRED ? (t.count + 1) / 2 : t.count * strips;

#pragma unroll(PAIRED ? 4 : 1)
    for (int unit = threadIdx.x / 32; unit < units; unit += THREADS / 32) {
        const int matrix = PAIRED ? unit * 2 : unit / strips, row0 = unit % strips * 16 + row;
        const u32 a = a_lane + matrix * t.a_matrix + unit % strips * 16 * a_row,
                  b = b_lane + matrix * t.b_matrix;
        const auto exists = [&](int j, int half) {
            if (PAIRED) return j == half && matrix + half < t.count && row < t.m && pair < t.n;
            return row0 + half * 8 < t.m && j * 8 + pair < t.n;
        };
        float c[TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int half = e / 2, column = (PAIRED ? 0 : j * 8) + pair + e % 2;
                c[j][e] = initial_accumulator(t.out, t.first + matrix + PAIRED * half,
                                              row0 + (PAIRED ? 0 : half * 8), column,
                                              exists(j, half) && column < t.n);
            }
#pragma unroll
        for (int k0 = 0; k0 < (M ? K : 64); k0 += 16) {
            if (k0 >= t.k) break;
            u32 mask[2];  // past k both operands are zeros
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = k0 + half * 8 + pair;
                mask[half] = (k < t.k ? 0xFFFF : 0) | (k + 1 < t.k ? 0xFFFF0000 : 0);
            }
            u32 fa[4], fb[4];
            ldmatrix_x4<!A_K_MAJOR>(fa, a + k0 * a_k);
            if (k0 + 16 > t.k)
#pragma unroll
                for (int i = 0; i < 4; ++i) fa[i] &= mask[i / 2];
#pragma unroll
            for (int j = 0; j < TILES; j += 2) {
                if (j * 8 >= t.n) break;
                ldmatrix_x4<!B_K_MAJOR>(fb, b + k0 * b_k + j * 8 * b_row);
                if (k0 + 16 > t.k)
#pragma unroll
                    for (int i = 0; i < 4; ++i) fb[i] &= mask[i % 2];
                mma_m16n8k16<A_TYPE == BF16>(c[j], fa, fb);
                if (PAIRED || j * 8 + 8 < t.n) mma_m16n8k16<A_TYPE == BF16>(c[j + 1], fa, fb + 2);
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!exists(j, half)) continue;
                const float low = c[j][half * 2], high = c[j][half * 2 + 1];
                const int to_row = PAIRED ? (matrix + half) * t.m + row : matrix * t.m + row0 + half * 8;
                unsigned char* to =
                    t.staged + to_row * out_pitch + ((PAIRED ? 0 : j * 8) + pair) * size_of(OUT);
                if constexpr (OUT == F32)
                    *reinterpret_cast<uint2*>(to) =
                        make_uint2(round_bits(low, t.out_kind), round_bits(high, t.out_kind));
                else
                    *reinterpret_cast<u32*>(to) = round_pair<OUT>(low, high);
            }
    }
}
#elif TENSOR_CORE
// A tile has 16 rows, 16 columns and 16 k. Small matrices share one: each has its own SIDE rows and SIDE
// columns, and of the products only those on the diagonal are wanted. Never along k: 0 times a neighbour's
// infinity would be NaN.
constexpr int LONGER = M > N ? M : N, SIDE = LONGER <= 4 ? 4 : LONGER <= 8 ? 8 : 16, SHARE = 16 / SIDE;
constexpr int ROW_TILES = (M + 15) / 16, TILES = ROW_TILES * ((N + 15) / 16), STEPS = (K + 15) / 16;

// This lane's pairs of k of two lines: rows of a, or columns of b. The lines are neighbours (2 g and 2 g + 1,
// where a fragment has g and g + 8) if NEIGHBOURS, as they have to be where they lie side by side in memory.
template <bool K_MAJOR, bool NEIGHBOURS, int LINES>
struct Lines {
    u32 pairs[STEPS][2][2];  // [step][line][half of k]

    static __device__ __forceinline__ int line(int which) {
        const int group = threadIdx.x % 32 / 4;
        return NEIGHBOURS ? group * 2 + which : group + which * 8;
    }

    __device__ __forceinline__ void load(const unsigned char* data, int stride, int matrix, int count,
                                         int line0) {
        const int pair = threadIdx.x % 4 * 2;
        const unsigned char* from[2];
        bool exists[2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int at = line(which) % SIDE + line0, m = matrix + line(which) / SIDE;
            from[which] = data + (m * stride + (K_MAJOR ? at * K + pair : pair * LINES + at) * 2);
            exists[which] = m < count && at < LINES;
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = step * 16 + half * 8;
                u32 x[2] = {0, 0};  // two lines, or two k of both
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (k < K && exists[K_MAJOR ? i : 0] && k + pair < K)
                        x[i] = load_operand<u32>(K_MAJOR ? from[i] + k * 2 : from[0] + (k + i) * LINES * 2);
                pairs[step][0][half] = K_MAJOR ? x[0] : __byte_perm(x[0], x[1], 0x5410);
                pairs[step][1][half] = K_MAJOR ? x[1] : __byte_perm(x[0], x[1], 0x7632);
            }
    }
};

// A warp takes IN_FLIGHT tiles: loads all, then multiplies and writes out one after the other.
__device__ __forceinline__ void multiply(const Work& t) {
    const int units = (t.count + SHARE - 1) / SHARE * TILES, column = threadIdx.x % 4 * 4;
    unsigned char* out = t.out.data + t.first * t.out.batch;
#pragma unroll 1
    for (int unit0 = threadIdx.x / 32 * IN_FLIGHT; unit0 < units; unit0 += THREADS / 32 * IN_FLIGHT) {
        Lines<A_K_MAJOR, !A_K_MAJOR, M> a[IN_FLIGHT];
        Lines<B_K_MAJOR, true, N> b[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int matrix = (unit0 + i) / TILES * SHARE, tile = (unit0 + i) % TILES;
            a[i].load(t.a, t.a_matrix, matrix, t.count, tile % ROW_TILES * 16);
            b[i].load(t.b, t.b_matrix, matrix, t.count, tile / ROW_TILES * 16);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int tile = (unit0 + i) % TILES;
            const int to_column = column % SIDE + tile / ROW_TILES * 16;
            int to_row[2];
            const int matrix = (unit0 + i) / TILES * SHARE + column / SIDE;
            bool wanted[2];
            float c[2][4];  // [column % 2][row, column / 2]
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int line = a[i].line(which);
                to_row[which] = line % SIDE + tile % ROW_TILES * 16;
                wanted[which] =
                    line / SIDE == column / SIDE && matrix < t.count && to_row[which] < M && to_column < N;
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    c[e % 2][which * 2 + e / 2] = initial_accumulator(t.out, t.first + matrix, to_row[which],
                                                                      to_column + e, wanted[which]);
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const auto& x = a[i].pairs[step];
                const u32 rows[4] = {x[0][0], x[1][0], x[0][1], x[1][1]};
                mma_m16n8k16<A_TYPE == BF16>(c[0], rows, b[i].pairs[step][0]);
                mma_m16n8k16<A_TYPE == BF16>(c[1], rows, b[i].pairs[step][1]);
            }
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                if (!wanted[which]) continue;
                const float x[4] = {c[0][which * 2], c[1][which * 2], c[0][which * 2 + 1],
                                    c[1][which * 2 + 1]};
                store_four(out + ((matrix * M + to_row[which]) * N + to_column) * size_of(OUT), x, OUT);
            }
        }
    }
}
#else
// `COUNT` neighbours in shared memory, widened.
template <int TYPE, int COUNT>
__device__ __forceinline__ void read(float* x, const unsigned char* at) {
    if constexpr (TYPE == F32) {
        const auto v = load_operand<typename Chunk<COUNT * 4>::Type>(at);
        const u32* bits = reinterpret_cast<const u32*>(&v);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] = __uint_as_float(bits[i]);
    } else {
        const auto v = load_operand<typename Chunk<COUNT * 2>::Type>(at);
        const u16* bits = reinterpret_cast<const u16*>(&v);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if constexpr (TYPE == BF16)
                x[i] = __uint_as_float(static_cast<u32>(bits[i]) << 16);
            else
                asm("cvt.f32.f16 %0, %1;" : "=f"(x[i]) : "h"(bits[i]));
        }
    }
}

// `COUNT` rows of a, or columns of b, that a thread multiplies: `threads` threads share all of them.
template <int TYPE, bool K_MAJOR, int COUNT>
struct Side {
    static constexpr int RUN = K_MAJOR     ? 1
                               : COUNT < 4 ? COUNT
                                           : 4;  // neighbours, where they lie side by side
    const unsigned char* data;
    int pitch, at, threads;

    __device__ __forceinline__ int index(int i) const { return (i / RUN * threads + at) * RUN + i % RUN; }

    // Four k from `k` on.
    __device__ __forceinline__ void read_four(float (&x)[COUNT][4], int k) const {
        if constexpr (K_MAJOR) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) read<TYPE, 4>(x[i], data + index(i) * pitch + k * size_of(TYPE));
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int i = 0; i < COUNT; i += RUN) {
                    float run[RUN];
                    read<TYPE, RUN>(run, data + (k + e) * pitch + index(i) * size_of(TYPE));
#pragma unroll
                    for (int r = 0; r < RUN; ++r) x[i + r][e] = run[r];
                }
        }
    }
};

// Neighbours of a row that are stored at once: a thread has them unless b lies along k.
constexpr int RUN = !B_K_MAJOR && OUT_VECTOR >= 4 * size_of(OUT) ? 4 : 1;

// Waits for one of PARTS parts. Only blocks do whose every thread has one tile.
__device__ __forceinline__ void await_part(int part) {
    static_assert(PARTS <= 2);
    if (part < PARTS - 1)
        cp_async_wait<1>();
    else
        cp_async_wait<0>();
    __syncthreads();
}

// A thread takes TILE_M rows of TILE_N columns, and writes them out itself.
__device__ __forceinline__ void multiply(const Work& t) {
    const int across = (t.n + TILE_N - 1) / TILE_N, down = (t.m + TILE_M - 1) / TILE_M;
    const int a_pitch = pitch_of<A_TYPE>(A_K_MAJOR ? t.k : t.m),
              b_pitch = pitch_of<B_TYPE>(B_K_MAJOR ? t.k : t.n);

#pragma unroll 1
    for (int unit = threadIdx.x; unit < t.count * across * down; unit += THREADS) {
        const int matrix = unit / (across * down), rest = unit % (across * down);
        const Side<A_TYPE, A_K_MAJOR, TILE_M> a{t.a + matrix * t.a_matrix, a_pitch, rest / across, down};
        const Side<B_TYPE, B_K_MAJOR, TILE_N> b{t.b + matrix * t.b_matrix, b_pitch, rest % across, across};
        float c[TILE_M][TILE_N];
#pragma unroll
        for (int i = 0; i < TILE_M; ++i)
#pragma unroll
            for (int j = 0; j < TILE_N; ++j) {
                const int row = a.index(i), column = b.index(j);
                c[i][j] =
                    initial_accumulator(t.out, t.first + matrix, row, column, row < t.m && column < t.n);
            }
        const int terms = PARTS > 1 ? K / PARTS : t.k;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (PARTS > 1) await_part(part);
#pragma unroll(M ? 4 : 1)
            for (int k = part * terms; k < part * terms + terms; k += 4) {
                float fa[TILE_M][4], fb[TILE_N][4];
                a.read_four(fa, k);
                b.read_four(fb, k);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (k + e < t.k)
#pragma unroll
                        for (int i = 0; i < TILE_M; ++i)
#pragma unroll
                            for (int j = 0; j < TILE_N; ++j) c[i][j] = __fmaf_rn(fa[i][e], fb[j][e], c[i][j]);
            }
        }
        if (t.closing_zero && t.k > 0)
#pragma unroll
            for (int i = 0; i < TILE_M; ++i)
#pragma unroll
                for (int j = 0; j < TILE_N; ++j) c[i][j] = __fmaf_rn(0.0f, 0.0f, c[i][j]);
        unsigned char* out = t.out.data + (t.first + matrix) * t.out.batch;
#pragma unroll
        for (int i = 0; i < TILE_M; ++i) {
            const int row = a.index(i);
            if (row >= t.m) break;
#pragma unroll
            for (int j = 0; j < TILE_N; j += RUN) {
                if (b.index(j) >= t.n) break;
                unsigned char* to = out + row * t.out.line + b.index(j) * t.out.inner;
                if constexpr (RUN == 4)
                    store_four(to, &c[i][j], t.out_kind);
                else if constexpr (OUT == F32)
                    *reinterpret_cast<u32*>(to) = round_bits(c[i][j], t.out_kind);
                else
                    *reinterpret_cast<u16*>(to) = static_cast<u16>(round_bits(c[i][j], t.out_kind));
            }
        }
    }
}
#endif

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void prefetch(const Matrices& x, int span, i64 first, int count) {
    if (span)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x.data + first * span),
                     "r"(count * span)
                     : "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tiny(const __grid_constant__ Params p) {
    Work t;
    t.m = M ? M : p.m, t.n = M ? N : p.n, t.k = M ? K : p.k;
    t.first = static_cast<i64>(blockIdx.x) * p.per_block;
    t.count = static_cast<int>(min(p.batch - t.first, static_cast<i64>(p.per_block)));
    t.closing_zero = p.closing_zero, t.out_kind = ACCUMULATE && t.k == 0 && OUT == F32 ? F32_AS_IS : OUT;
    const int a_lines = A_K_MAJOR ? t.m : t.k, a_inner = A_K_MAJOR ? t.k : t.m;
    const int b_lines = B_K_MAJOR ? t.n : t.k, b_inner = B_K_MAJOR ? t.k : t.n;
    const Matrices a = with_known_strides(p.a, a_lines, a_inner, size_of(A_TYPE), A_BROADCAST);
    const Matrices b = with_known_strides(p.b, b_lines, b_inner, size_of(B_TYPE), B_BROADCAST);
    t.out = with_known_strides(p.out, t.m, t.n, size_of(OUT), false);
#if __CUDA_ARCH__ >= 900
    // L2 prefetches run while the kernel before this one ends. It may still write there: only L2 is filled.
    if (threadIdx.x == 0) {
        prefetch(p.a, p.a_span, t.first, t.count);
        prefetch(p.b, p.b_span, t.first, t.count);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#if STAGED
    extern __shared__ __align__(16) unsigned char memory[];
    const int a_bytes = a_lines * pitch_of<A_TYPE>(a_inner), b_bytes = b_lines * pitch_of<B_TYPE>(b_inner);
    t.a_matrix = a.batch ? a_bytes : 0, t.b_matrix = b.batch ? b_bytes : 0;
    // Operands come last: fragments reach past their ends, into memory that nobody writes meanwhile.
    unsigned char* to_a = memory + (TENSOR_CORE ? p.per_block * t.m * pitch_of<OUT>(t.n) : 0);
    unsigned char* to_b = to_a + p.per_block * a_bytes;
    t.staged = memory, t.a = to_a, t.b = to_b;
    if constexpr (PARTS > 1) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            load_part<A_TYPE, A_VECTOR, A_K_MAJOR>(to_a, a, t.first, a_lines, a_inner, part);
            load_part<B_TYPE, B_VECTOR, B_K_MAJOR>(to_b, b, t.first, b_lines, b_inner, part);
            cp_async_commit();
        }
    } else {
        load<A_TYPE, A_VECTOR>(to_a, a, t.first, t.count, a_lines, a_inner);
        load<B_TYPE, B_VECTOR>(to_b, b, t.first, t.count, b_lines, b_inner);
        cp_async_commit();
    }
#else
    t.a = a.data + t.first * a.batch, t.a_matrix = a.batch;
    t.b = b.data + t.first * b.batch, t.b_matrix = b.batch;
#endif
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#if STAGED
    if constexpr (PARTS == 1) {
        cp_async_wait<0>();
        __syncthreads();
    }
#endif
    multiply(t);
#if STAGED && TENSOR_CORE
    __syncthreads();
    store<OUT_VECTOR>(t.staged, t.out, t.first, t.count, t.m, t.n);
#endif
}
