// Copies of matrices of 16-bit elements, for the copy engine: columns side by side, rows at multiples of 16
// bytes, with zeros in between.
//
// A thread writes eight neighbours at once. It reads words of four bytes that lie within the eight, whatever
// their address, and takes one element from each end where it is odd.

#include "launch.cuh"
#include "types.cuh"

struct Params {
    const u16* from;
    i64 from_batch, from_row, from_col;
    uint4* to;
    u32 count, chunks, rows;  // eights in all, and in a row; rows of a matrix
    int columns;
};

extern "C" __global__ void __launch_bounds__(256) padded_sm90(const __grid_constant__ Params p) {
    wait_for_kernel_before();
    let_kernel_behind_start();
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.count) return;
    const u32 row = i / p.chunks, batch = row / p.rows;
    const int column = int(i - row * p.chunks) * 8, inside = p.columns - column;
    const u16* from =
        p.from + batch * p.from_batch + (row - batch * p.rows) * p.from_row + column * p.from_col;
    u32 words[4];
    if (p.from_col == 1 && inside >= 8) {
        const bool odd = reinterpret_cast<u64>(from) & 2;
        const u32* four = reinterpret_cast<const u32*>(from + odd);
        if (odd) {
            const u32 first = from[0], last = from[7], a = four[0], b = four[1], c = four[2];
            words[0] = first | a << 16;
            words[1] = __funnelshift_l(a, b, 16);
            words[2] = __funnelshift_l(b, c, 16);
            words[3] = c >> 16 | last << 16;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = four[j];
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 low = 2 * j < inside ? from[2 * j * p.from_col] : 0;
            const u32 high = 2 * j + 1 < inside ? from[(2 * j + 1) * p.from_col] : 0;
            words[j] = low | high << 16;
        }
    }
    p.to[i] = make_uint4(words[0], words[1], words[2], words[3]);
}
