// Batched products of tiny matrices, m, n, k <= 64: a block loads some matrices whole into shared memory, multiplies
// them, and writes them out.
//
// Every output element is one chain over ascending k with one f32 accumulator, in one thread: of fused multiply-adds,
// or of tensor-core steps of 16 k. How matrices are shared among blocks and threads is free, and changes no bit.

#include "epilogue.cuh"

// The matrices of a batch, as lines of neighbours: of a along k or along m, of b along k or along n, of out along n.
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

// Bytes from line to line in shared memory. Lines start at odd multiples of 16 bytes, so that eight of them meet no
// bank twice.
template <int TYPE>
__device__ __forceinline__ int pitch_of(int inner)
{
    return (inner * size_of(TYPE) + 15) / 16 * 16 | 16;
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

template <int BYTES>
__device__ __forceinline__ void copy_in(unsigned char* to, const unsigned char* from)
{
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    else if constexpr (BYTES > 2)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
    else
#endif
        *reinterpret_cast<typename Chunk<BYTES>::Type*>(to) =
            __ldg(reinterpret_cast<const typename Chunk<BYTES>::Type*>(from));
}

// Calls each(matrix, line, chunk) for all chunks of `count` matrices, neighbours in memory by neighbouring threads.
template <typename Each>
__device__ __forceinline__ void for_chunks(int count, u32 lines, u32 chunks, Each each)
{
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count * lines * chunks; i += THREADS) {
        const u32 line = i / chunks;
        each(line / lines, line, i - line * chunks);
    }
}

template <int TYPE, int VECTOR>
__device__ __forceinline__ void load(unsigned char* to, const Matrices& x, i64 first, int count, int lines, int inner)
{
    const int pitch = pitch_of<TYPE>(inner);
    const i64 step = VECTOR == size_of(TYPE) ? x.inner : VECTOR;
    const unsigned char* data = x.data + first * x.batch;
    for_chunks(x.batch ? count : 1, lines, inner * size_of(TYPE) / VECTOR, [&](u32 matrix, u32 line, u32 chunk) {
        copy_in<VECTOR>(to + line * pitch + chunk * VECTOR,
                        data + matrix * x.batch + (line - matrix * lines) * x.line + chunk * step);
    });
}

template <int VECTOR>
__device__ __forceinline__ void store(const unsigned char* from, const Matrices& x, i64 first, int count, int lines, int inner)
{
    const int pitch = pitch_of<OUT>(inner);
    const i64 step = VECTOR == size_of(OUT) ? x.inner : VECTOR;
    unsigned char* data = x.data + first * x.batch;
    for_chunks(count, lines, inner * size_of(OUT) / VECTOR, [&](u32 matrix, u32 line, u32 chunk) {
        using Type = typename Chunk<VECTOR>::Type;
        *reinterpret_cast<Type*>(data + matrix * x.batch + (line - matrix * lines) * x.line + chunk * step) =
            *reinterpret_cast<const Type*>(from + line * pitch + chunk * VECTOR);
    });
}

// The accumulator that an element's chain starts from.
__device__ __forceinline__ float start(const Matrices& out, i64 matrix, int row, int column, bool exists)
{
    if (!ACCUMULATE || !exists) return 0.0f;
    return *reinterpret_cast<const float*>(out.data + matrix * out.batch + row * out.line + column * out.inner);
}

struct Tiles {
    const unsigned char *a, *b;
    unsigned char* out;
    int a_matrix, b_matrix;  // bytes from one to the next
    i64 first;
    int count, m, n, k, out_kind;
};

#if TENSOR_CORE
// Matrices of at most eight rows and columns are taken in pairs: the second eight rows and columns of a step are the
// next matrix's. Of the four products two are wanted.
constexpr int PAIRED = M && M <= 8 && N <= 8;

// A warp takes 16 rows of a matrix and all its columns, or a pair of matrices.
__device__ __forceinline__ void multiply(const Tiles& t, const Params& p)
{
    constexpr int TILES = PAIRED ? 2 : M ? (N + 15) / 16 * 2 : 8;  // of eight columns
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
    const int a_pitch = pitch_of<A_TYPE>(A_K_MAJOR ? t.k : t.m), b_pitch = pitch_of<B_TYPE>(B_K_MAJOR ? t.k : t.n);
    const int a_row = A_K_MAJOR ? a_pitch : 2, a_k = A_K_MAJOR ? 2 : a_pitch;  // bytes from one to the next
    const int b_row = B_K_MAJOR ? b_pitch : 2, b_k = B_K_MAJOR ? 2 : b_pitch;
    const int out_pitch = pitch_of<OUT>(t.n);
    // Where this lane reads lines of fragments, see load_matrices.
    const int quarter = lane / 8, line = lane % 8;
    const u32 a_lane = shared_address(t.a) + line * (A_K_MAJOR ? a_row : a_k) +
                       quarter % 2 * (PAIRED ? t.a_matrix : 8 * a_row) + quarter / 2 * 8 * a_k;
    const u32 b_lane = shared_address(t.b) + line * (B_K_MAJOR ? b_row : b_k) +
                       quarter / 2 * (PAIRED ? t.b_matrix : 8 * b_row) + quarter % 2 * 8 * b_k;
    const int strips = PAIRED ? 1 : (t.m + 15) / 16, units = PAIRED ? (t.count + 1) / 2 : t.count * strips;

#pragma unroll(PAIRED ? 4 : 1)
    for (int unit = threadIdx.x / 32; unit < units; unit += THREADS / 32) {
        const int matrix = PAIRED ? unit * 2 : unit / strips, row0 = unit % strips * 16 + row;
        const u32 a = a_lane + matrix * t.a_matrix + unit % strips * 16 * a_row, b = b_lane + matrix * t.b_matrix;
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
                c[j][e] = start(p.out, t.first + matrix + PAIRED * half, row0 + (PAIRED ? 0 : half * 8), column,
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
            load_matrices<!A_K_MAJOR>(fa, a + k0 * a_k);
            if (k0 + 16 > t.k)
#pragma unroll
                for (int i = 0; i < 4; ++i) fa[i] &= mask[i / 2];
#pragma unroll
            for (int j = 0; j < TILES; j += 2) {
                if (j * 8 >= t.n) break;
                load_matrices<!B_K_MAJOR>(fb, b + k0 * b_k + j * 8 * b_row);
                if (k0 + 16 > t.k)
#pragma unroll
                    for (int i = 0; i < 4; ++i) fb[i] &= mask[i % 2];
                mma_step<A_TYPE == BF16>(c[j], fa, fb);
                if (PAIRED || j * 8 + 8 < t.n) mma_step<A_TYPE == BF16>(c[j + 1], fa, fb + 2);
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!exists(j, half)) continue;
                const u32 low = round_bits(c[j][half * 2], t.out_kind), high = round_bits(c[j][half * 2 + 1], t.out_kind);
                const int to_row = PAIRED ? (matrix + half) * t.m + row : matrix * t.m + row0 + half * 8;
                unsigned char* to = t.out + to_row * out_pitch + ((PAIRED ? 0 : j * 8) + pair) * size_of(OUT);
                if constexpr (OUT == F32)
                    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
                else
                    *reinterpret_cast<u32*>(to) = low | high << 16;
            }
    }
}
#else
// `COUNT` neighbours in shared memory, widened.
template <int TYPE, int COUNT>
__device__ __forceinline__ void read(float* x, const unsigned char* at)
{
    if constexpr (TYPE == F32) {
        const auto v = *reinterpret_cast<const typename Chunk<COUNT * 4>::Type*>(at);
        const u32* bits = reinterpret_cast<const u32*>(&v);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] = __uint_as_float(bits[i]);
    } else {
        const auto v = *reinterpret_cast<const typename Chunk<COUNT * 2>::Type*>(at);
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
    static constexpr int RUN = K_MAJOR ? 1 : COUNT < 4 ? COUNT : 4;  // neighbours, where they lie side by side
    const unsigned char* data;
    int pitch, at, threads;

    __device__ __forceinline__ int index(int i) const { return (i / RUN * threads + at) * RUN + i % RUN; }

    // Four k from `k` on.
    __device__ __forceinline__ void read_four(float (&x)[COUNT][4], int k) const
    {
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

// A thread takes TILE_M rows of four columns, and writes them out itself.
__device__ __forceinline__ void multiply(const Tiles& t, const Params& p)
{
    const int across = (t.n + 3) / 4, down = (t.m + TILE_M - 1) / TILE_M;
    const int a_pitch = pitch_of<A_TYPE>(A_K_MAJOR ? t.k : t.m), b_pitch = pitch_of<B_TYPE>(B_K_MAJOR ? t.k : t.n);

#pragma unroll 1
    for (int unit = threadIdx.x; unit < t.count * across * down; unit += THREADS) {
        const int matrix = unit / (across * down), rest = unit % (across * down);
        const Side<A_TYPE, A_K_MAJOR, TILE_M> a{t.a + matrix * t.a_matrix, a_pitch, rest / across, down};
        const Side<B_TYPE, B_K_MAJOR, 4> b{t.b + matrix * t.b_matrix, b_pitch, rest % across, across};
        float c[TILE_M][4];
#pragma unroll
        for (int i = 0; i < TILE_M; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = a.index(i), column = b.index(j);
                c[i][j] = start(p.out, t.first + matrix, row, column, row < t.m && column < t.n);
            }
#pragma unroll(M ? 4 : 1)
        for (int k = 0; k < t.k; k += 4) {
            float fa[TILE_M][4], fb[4][4];
            a.read_four(fa, k);
            b.read_four(fb, k);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (k + e < t.k)
#pragma unroll
                    for (int i = 0; i < TILE_M; ++i)
#pragma unroll
                        for (int j = 0; j < 4; ++j) c[i][j] = __fmaf_rn(fa[i][e], fb[j][e], c[i][j]);
        }
        if (p.closing_zero && t.k > 0)
#pragma unroll
            for (int i = 0; i < TILE_M; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) c[i][j] = __fmaf_rn(0.0f, 0.0f, c[i][j]);
        unsigned char* out = p.out.data + (t.first + matrix) * p.out.batch;
#pragma unroll
        for (int i = 0; i < TILE_M; ++i) {
            const int row = a.index(i);
            if (row >= t.m) break;
#pragma unroll
            for (int j = 0; j < 4; j += RUN) {
                u32 bits[RUN];
#pragma unroll
                for (int r = 0; r < RUN; ++r) bits[r] = round_bits(c[i][j + r], t.out_kind);
                if (b.index(j) >= t.n) break;
                unsigned char* to = out + row * p.out.line + b.index(j) * p.out.inner;
                if constexpr (RUN == 1 && OUT == F32)
                    *reinterpret_cast<u32*>(to) = bits[0];
                else if constexpr (RUN == 1)
                    *reinterpret_cast<u16*>(to) = static_cast<u16>(bits[0]);
                else if constexpr (OUT == F32)
                    *reinterpret_cast<uint4*>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
                else
                    *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
            }
        }
    }
}
#endif

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void prefetch(const Matrices& x, int span, i64 first, int count)
{
    if (span)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x.data + first * span), "r"(count * span) : "memory");
}
#endif

// Blocks that shall fit on a multiprocessor; 0 leaves it to the compiler, which spills where operands are widened.
constexpr int BLOCKS = TENSOR_CORE ? 768 / THREADS : A_TYPE == F32 && B_TYPE == F32 ? 0 : 512 / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) bmm_tiny(const __grid_constant__ Params p)
{
    extern __shared__ __align__(16) unsigned char memory[];
    Tiles t;
    t.m = M ? M : p.m, t.n = M ? N : p.n, t.k = M ? K : p.k;
    t.first = static_cast<i64>(blockIdx.x) * p.per_block;
    t.count = static_cast<int>(min(p.batch - t.first, static_cast<i64>(p.per_block)));
    t.out_kind = ACCUMULATE && t.k == 0 && OUT == F32 ? F32_AS_IS : OUT;
    const int a_lines = A_K_MAJOR ? t.m : t.k, a_inner = A_K_MAJOR ? t.k : t.m;
    const int b_lines = B_K_MAJOR ? t.n : t.k, b_inner = B_K_MAJOR ? t.k : t.n;
    const int a_bytes = a_lines * pitch_of<A_TYPE>(a_inner), b_bytes = b_lines * pitch_of<B_TYPE>(b_inner);
    t.a_matrix = p.a.batch ? a_bytes : 0, t.b_matrix = p.b.batch ? b_bytes : 0;
    // Operands come last: fragments reach past their ends, into memory that nobody writes then.
    unsigned char* a = memory + (TENSOR_CORE ? p.per_block * t.m * pitch_of<OUT>(t.n) : 0);
    unsigned char* b = a + p.per_block * a_bytes;
    t.out = memory, t.a = a, t.b = b;

#if __CUDA_ARCH__ >= 900
    // On their way into L2 while the kernel before this one ends: no harm if it still writes them.
    if (threadIdx.x == 0) {
        prefetch(p.a, p.a_span, t.first, t.count);
        prefetch(p.b, p.b_span, t.first, t.count);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    load<A_TYPE, A_VECTOR>(a, p.a, t.first, t.count, a_lines, a_inner);
    load<B_TYPE, B_VECTOR>(b, p.b, t.first, t.count, b_lines, b_inner);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    multiply(t, p);
#if TENSOR_CORE
    __syncthreads();
    store<OUT_VECTOR>(t.out, p.out, t.first, t.count, t.m, t.n);
#endif
}
