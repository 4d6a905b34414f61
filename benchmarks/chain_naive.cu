// The chain with nothing clever in it: one warp, 16 x 64 outputs, operands read element by element.
// What every faster kernel is compared with, bit for bit.
struct Problem {
    const unsigned short *a, *b;
    float* out;               // [m, n], f32; the chain starts from it
    const long long* bounds;  // of sequences along k
    long long a_row, a_k, b_k, b_column;
    int m, n, sequences, pad;
};

__device__ unsigned pair(const unsigned short* x, long long at, long long stride, bool inside, int left) {
    unsigned low = inside && left > 0 ? x[at] : 0, high = inside && left > 1 ? x[at + stride] : 0;
    return low | high << 16;
}

extern "C" __global__ void chain(const __grid_constant__ Problem p) {
    int lane = threadIdx.x, group = lane / 4, pick = lane % 4 * 2;
    int row = blockIdx.y * 16 + group, column = blockIdx.x * 64;
    float d[8][4];
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 4; ++j) {
            int r = row + j / 2 * 8, c = column + i * 8 + pick + j % 2;
            d[i][j] = r < p.m && c < p.n ? p.out[(long long)r * p.n + c] : 0;
        }
    for (int s = 0; s < p.sequences; ++s) {
        for (long long k = p.bounds[s], end = p.bounds[s + 1]; k < end; k += 16) {
            unsigned a[4];
            for (int j = 0; j < 4; ++j) {
                int r = row + j % 2 * 8;
                long long at = k + pick + j / 2 * 8;
                a[j] = pair(p.a, r * p.a_row + at * p.a_k, p.a_k, r < p.m, int(end - at));
            }
            for (int i = 0; i < 8; ++i) {
                unsigned b[2];
                for (int j = 0; j < 2; ++j) {
                    int c = column + i * 8 + group;
                    long long at = k + pick + j * 8;
                    b[j] = pair(p.b, c * p.b_column + at * p.b_k, p.b_k, c < p.n, int(end - at));
                }
                asm("mma.sync.aligned.m16n8k16.row.col.f32." INPUT "." INPUT ".f32 {%0, %1, %2, %3},"
                    " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
            }
        }
    }
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 4; ++j) {
            int r = row + j / 2 * 8, c = column + i * 8 + pick + j % 2;
            if (r < p.m && c < p.n) p.out[(long long)r * p.n + c] = d[i][j];
        }
}
