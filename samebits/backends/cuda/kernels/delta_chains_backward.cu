// Gradients of delta rules, of a chunk's rows: sums of products along rows of its record, in order.
//
// docs/contract.md, "Recurrent layers", has the sums: gradients of betas; and of the last row's decays, what the
// next matrix has of this one, which delta_rows_backward.cu adds to the others. A block is a warp, and takes 32 rows of
// two arrays: a lane has a row. All it does is wait for memory, so some of them share a multiprocessor.
//
// It also leaves both matrices rounded, in the order in which a warp's registers have them as right operands, if what
// computed them has not done so.
//
// Macros: TYPE, TENSOR_CORE, KEY_SIZE, WARPS, HARDWARE_EXP2, BY_CHANNEL and WEIGHTED are those of delta.cu.
//   VALUE_SIZE  of v, up to a multiple of 16
//   RIGHTS      which matrices are missing: 1: those at chunks' starts; 2: gradients; 3: both; or 0

#include "delta_backward.cuh"

constexpr int WIDTH = VALUE_SIZE < 128 ? VALUE_SIZE : 128;  // columns in shared memory
constexpr int ROWS = 32, PIECE = VALUE_SIZE < 32 ? VALUE_SIZE : 32;
constexpr int PIECES = (WIDTH + PIECE - 1) / PIECE, LINE = PIECES * PIECE + 4;

constexpr int OF_KEYS = (KEY_SIZE + ROWS - 1) / ROWS,
              PARTS = OF_KEYS + CHUNK / ROWS;  // of a chunk

static_assert(WARPS == 1);

struct Memory {
    float x[ROWS * LINE], y[ROWS * LINE];
};

// Copies `width` columns of `rows` rows of `size` elements. The others are zeros.
__device__ __forceinline__ void copy_piece(float* to, const float* from, int size, int rows, int width) {
    constexpr int EACH = PIECE / 4, STEP = ROWS / EACH;  // threads of a row; rows at a time
    const int lane = threadIdx.x % 32, row0 = lane / EACH, at = lane % EACH * 4;
    if (size % 4) {
#pragma unroll 1
        for (int x = lane; x < ROWS * PIECE; x += 32) {
            const int row = x / PIECE, e = x % PIECE;
            to[row * LINE + e] = row < rows && e < width ? from[i64(row) * size + e] : 0.0f;
        }
    } else if (rows == ROWS && width >= PIECE) {
        const float* source = from + row0 * size + at;
        const u32 target = shared_address(to + row0 * LINE + at);
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP, source += STEP * size)
            cp_async_16(target + row * LINE * 4, source);
    } else {
#pragma unroll 1
        for (int row = row0; row < ROWS; row += STEP) {
            const bool exists = row < rows && at < width;
            cp_async_16(shared_address(to + row * LINE + at), exists ? from + row * size + at : from,
                        exists ? 16 : 0);
        }
    }
}

// 16 rows and columns of an array, rounded.
__device__ __forceinline__ uint4 right_operand(const float* from) {
    const auto pair = [&](int row, int column) {
        const int lane = threadIdx.x % 32;
        const float2 both =
            *reinterpret_cast<const float2*>(from + (row + lane / 4) * LINE + column + lane % 4 * 2);
        return E::pack(both.x, both.y);
    };
    return make_uint4(pair(0, 0), pair(0, 8), pair(8, 0), pair(8, 8));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_chains_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int part = blockIdx.x % PARTS, place = blockIdx.x / PARTS, head = blockIdx.y;
    const int lane = threadIdx.x % 32;
    const int sequence = sequence_of(p, place);
    const int chunk = place - first_chunk(Tokens(p.spans, sequence, p.sequences, p.tokens).begin, sequence);
    if (chunk < 0 || chunk >= Span(p, sequence, 0).chunks) return;
    const Span span(p, sequence, chunk);
    const i64 index = i64(place) * p.heads + head;
    const Record record(p.records, index, p.key_size, p.size);

    const bool of_keys = part < OF_KEYS;
    const int row0 = (of_keys ? part : part - OF_KEYS) * ROWS, mine = row0 + lane;
    const int first = of_keys ? 0 : span.before, last = of_keys ? p.key_size : span.count;
    if (row0 >= last) return;
    const int rows = min(last - row0, ROWS);
    const float* x = (of_keys ? record.matrix : record.of_updates) + i64(row0) * p.size;
    const float* y = (of_keys ? record.of_matrix : record.z) + i64(row0) * p.size;

    float by = 1.0f, sum = 0.0f;
#pragma unroll 1
    for (int column = 0; column < p.size; column += WIDTH) {
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            const int e = column + n * PIECE;
            copy_piece(m.x + n * PIECE, x + e, p.size, rows, max(p.size - e, 0));
            copy_piece(m.y + n * PIECE, y + e, p.size, rows, max(p.size - e, 0));
            cp_async_commit();
        }
#if BY_CHANNEL
        if (of_keys && lane < rows) by = p.prepared[index].kept[mine];
#else
        if (of_keys) by = exp2_of(record.decays[span.count - 1]);
#endif
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            if (n == 0) cp_async_wait<PIECES - 1>();
            if (n == 1) cp_async_wait<PIECES - 2 < 0 ? 0 : PIECES - 2>();
            if (n == 2) cp_async_wait<PIECES - 3 < 0 ? 0 : PIECES - 3>();
            if (n == 3) cp_async_wait<0>();
            __syncwarp();
            const int left = p.size - column - n * PIECE;
            const float *of_x = m.x + lane * LINE + n * PIECE, *of_y = m.y + lane * LINE + n * PIECE;
#pragma unroll
            for (int e = 0; e < PIECE; e += 4) {
                const float4 a = *reinterpret_cast<const float4*>(of_x + e);
                const float4 b = *reinterpret_cast<const float4*>(of_y + e);
                if (e < left) sum = __fmaf_rn(a.x, __fmul_rn(b.x, by), sum);
                if (e + 1 < left) sum = __fmaf_rn(a.y, __fmul_rn(b.y, by), sum);
                if (e + 2 < left) sum = __fmaf_rn(a.z, __fmul_rn(b.z, by), sum);
                if (e + 3 < left) sum = __fmaf_rn(a.w, __fmul_rn(b.w, by), sum);
            }
#pragma unroll
            for (int i = 0; i < ROWS; i += 16)
#pragma unroll
                for (int e = 0; e < PIECE; e += 16) {
                    const int step = (column + n * PIECE + e) / 16;
                    if (!RIGHTS || !of_keys || row0 + i >= KEY_SIZE || step >= VALUE_SIZE / 16) continue;
                    const int at = ((row0 + i) / 16 * (VALUE_SIZE / 16) + step) * 32 + lane;
                    if (RIGHTS & 1) record.rights[at] = right_operand(m.x + i * LINE + n * PIECE + e);
                    if (RIGHTS & 2)
                        record.rights[KEY_SIZE / 16 * (VALUE_SIZE / 16) * 32 + at] =
                            right_operand(m.y + i * LINE + n * PIECE + e);
                }
        }
        __syncwarp();
    }
    if (mine < first || mine >= last) return;
    if (of_keys)
        record.kept[mine] = sum;
    else
        p.dbeta[(span.token + mine) * p.heads + head] = contract::canonical(sum);
}
