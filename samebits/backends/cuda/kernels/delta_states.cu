// Gradients of the delta rule: the matrix at each chunk's start, and the rest of what a forward leaves in records.
//
// docs/contract.md, "Recurrent layers", has the sums. The forward has saved z of each row, so updates are known, and no
// system is solved: as in linear_states.cu nothing but the matrix is in a row. A block takes 16 columns of values for each
// of its warps, and KEY_TILE channels of keys, of one head in one sequence. It holds the matrix, transposed, in registers,
// and goes through the chunks in order, of which STAGES - 1 are on their way to shared memory. linear_begin.cu comes
// before, or with a decay for each channel delta_prepare.cu, which has put keys into the records.
//
// Memory is what bounds this. So blocks of one chunk and head share the rows that they store.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and BY_CHANNEL are those of delta.cu, KEY_TILE and STAGES those of
// linear_states.cu.

#define WEIGHTED 0
#define SYSTEMS 1
#define KEEP 1  // what is prepared has all that gradients need
#include "linear_part.cuh"

constexpr int TILE = 16 * WARPS, WIDE = KEY_TILE / 16;
constexpr int KEY_STEPS = KEY_SIZE / 16, KEY_TILES = (KEY_SIZE + KEY_TILE - 1) / KEY_TILE;
constexpr int LINE = KEY_TILE + PAD;  // of keys in shared memory
constexpr int Z_LINE = TILE + 4;      // of z: rows two apart lie in banks of their own

struct Memory {
    // z and betas: their products are updates. Those of rows that the state had are here as they are, with betas of 1.
    float z[STAGES][CHUNK * Z_LINE], betas[STAGES][CHUNK];
    Stored keys[STAGES][CHUNK * LINE];
#if BY_CHANNEL
    float over_chunk[STAGES][KEY_TILE];  // decays
#else
    Decays decays[STAGES];
#endif
};

// Two neighbouring updates of a column, or of a row.
__device__ __forceinline__ u32 updates_of(float z, float beta, float other, float other_beta) {
    return E::pack(__fmul_rn(beta, z), __fmul_rn(other_beta, other));
}

// Stores updates, and z from `first` on, of rows `begin` to `end` - 1, from `column` on.
__device__ __forceinline__ void store_updates(const Record& record, const float* z, const float* betas,
                                              int begin, int end, int first, int column, int size) {
    if (size % 4 == 0) {
        const int e = threadIdx.x % (TILE / 4) * 4;
        if (column + e >= size) return;
#pragma unroll 2
        for (int i = begin + threadIdx.x / (TILE / 4); i < end; i += THREADS / (TILE / 4)) {
            const float4 four = *reinterpret_cast<const float4*>(z + i * Z_LINE + e);
            const float beta = betas[i];
            const i64 at = i64(i) * size + column + e;
            *reinterpret_cast<uint2*>(record.updates + at) =
                make_uint2(updates_of(four.x, beta, four.y, beta), updates_of(four.z, beta, four.w, beta));
            if (i >= first) *reinterpret_cast<float4*>(record.z + at) = four;
        }
        return;
    }
#pragma unroll 1
    for (int x = begin * TILE + threadIdx.x; x < end * TILE; x += THREADS) {
        const int i = x / TILE, e = x % TILE;
        if (column + e >= size) continue;
        const i64 at = i64(i) * size + column + e;
        record.updates[at] = Stored(updates_of(z[i * Z_LINE + e], betas[i], 0.0f, 0.0f));
        if (i >= first) record.z[at] = z[i * Z_LINE + e];
    }
}

#if !BY_CHANNEL
// Stores keys of rows `begin` to `end` - 1, of which the first `channels` exist, `line` from row to row.
__device__ __forceinline__ void store_keys(Stored* to, const Stored* keys, int begin, int end, int line,
                                           int channels) {
    if (line % 8 == 0) {
        const int d = threadIdx.x % (KEY_TILE / 8) * 8;
        if (d >= channels) return;
#pragma unroll 2
        for (int i = begin + threadIdx.x / (KEY_TILE / 8); i < end; i += THREADS / (KEY_TILE / 8))
            *reinterpret_cast<uint4*>(to + i * line + d) =
                *reinterpret_cast<const uint4*>(keys + i * LINE + d);
        return;
    }
#pragma unroll 1
    for (int x = begin * KEY_TILE + threadIdx.x; x < end * KEY_TILE; x += THREADS) {
        const int i = x / KEY_TILE, d = x % KEY_TILE;
        if (d < channels) to[i * line + d] = keys[i * LINE + d];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_states(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, sequence = blockIdx.z;
    const int key_tile = blockIdx.x % KEY_TILES, tile = blockIdx.x / KEY_TILES, tiles = gridDim.x / KEY_TILES;
    const int first_key = key_tile * KEY_TILE, first_column = tile * TILE;
    const int channels = p.key_size - first_key, columns = p.size - first_column;  // from there on
    const Chunks mine(p, sequence, rows_before(p, sequence));
    const int chunks = mine.number(), full = mine.before / CHUNK;  // which records leave out
    const i64 place = first_chunk(mine.begin, sequence), own = i64(head) * p.key_size * p.size;
    const float* state = p.state ? p.state + sequence * p.words : nullptr;

    const auto record_of = [&](int chunk) {  // where what is prepared of a full chunk comes last
        return (place + (BY_CHANNEL && chunk < full ? chunks - 1 : chunk - full)) * p.heads + head;
    };
    const auto load = [&](int chunk) {
        const int stage = chunk % STAGES, first = mine.first(chunk), count = mine.count(chunk);
        const i64 token = mine.token(chunk), line = i64(p.heads) * p.size;
#if BY_CHANNEL
        const Prepared& from = p.prepared[record_of(chunk)];
        copy_rows<LINE, KEY_TILE>(m.keys[stage], from.written[0] + first_key, KEY_SIZE, 0, CHUNK, CHUNK,
                                  KEY_SIZE - first_key);
        copy_rows<KEY_TILE, KEY_TILE>(m.over_chunk[stage], from.kept + first_key, 0, 0, 1, 1,
                                      KEY_SIZE - first_key);
#else
        const Stored* opened =
            reinterpret_cast<const Stored*>(state + p.keys) + i64(head) * CHUNK * p.key_size;
        load_rows<LINE, KEY_TILE>(m.keys[stage], opened + first_key, p.key_size,
                                  p.k + head / p.group * p.k_head + first_key + token * p.k_token, p.k_token,
                                  first, count, channels);
        load_whole(m.decays[stage], p.decays[(place + chunk) * p.heads + head]);
#endif
        copy_rows<Z_LINE, TILE>(m.z[stage], p.z + token * line + i64(head) * p.size + first_column, line,
                                first, CHUNK, count, columns);
        for (int x = threadIdx.x; x < first * TILE; x += THREADS) {
            const int i = x / TILE, e = x % TILE;
            const Stored* updates =
                reinterpret_cast<const Stored*>(state + p.updates) + i64(head) * CHUNK * p.size;
            m.z[stage][i * Z_LINE + e] =
                e < columns ? E::widen(updates[i * p.size + first_column + e]) : 0.0f;
        }
        for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
            float* to = m.betas[stage] + i;
            if (i < first || i >= count)
                *to = i < first ? 1.0f : 0.0f;
            else
                cp_async_4(shared_address(to), p.beta + (token + i) * p.beta_token + head * p.beta_head);
        }
    };

    Part<WIDE> part;
    part.first_key = first_key, part.first_column = first_column + warp * 16;
    const i64 of_sequence = sequence * i64(p.heads) * p.key_size * p.size + own;
    part.read(p, state ? state + p.matrix + own : p.initial ? p.initial + of_sequence : nullptr);

    for (int chunk = 0; chunk < STAGES - 1; ++chunk) {
        if (chunk < chunks) load(chunk);
        cp_async_commit();
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int stage = chunk % STAGES, first = mine.first(chunk), count = mine.count(chunk);
        const Record record(p.records, record_of(chunk), p.key_size, p.size);
        if (chunk >= full) {
            part.write(p, record.matrix, false);
            const int strip = part.first_column / 16, strips = (p.size + 15) / 16;
#pragma unroll
            for (int x = 0; x < WIDE; ++x) {
                const int step = first_key / 16 + x;
                if (strip >= strips || (KEY_SIZE % KEY_TILE && step >= KEY_STEPS)) continue;
                u32 left[4];
                part.rounded(x, left);
                record.rights[(step * strips + strip) * 32 + lane] = turned(left, p.size - part.first_column);
            }
        }
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (chunk + STAGES - 1 < chunks) load(chunk + STAGES - 1);
        cp_async_commit();
        const float *z = m.z[stage], *betas = m.betas[stage];
        if (chunk >= full) {
            // Blocks of other channels store other rows of z and updates, and blocks of other columns those of keys.
            const int begin = CHUNK * key_tile / KEY_TILES,
                      end = min(count, CHUNK * (key_tile + 1) / KEY_TILES);
            store_updates(record, z, betas, begin, end, first, first_column, p.size);
#if !BY_CHANNEL
            store_keys(record.keys + first_key, m.keys[stage], CHUNK * tile / tiles,
                       min(count, CHUNK * (tile + 1) / tiles), p.key_size, channels);
#endif
        }
        if (chunk == chunks - 1) break;
        const int in_pair = lane % 4 * 2;
        const float* of_column = z + warp * 16 + lane / 4;
#if BY_CHANNEL
        part.each([&](int d, int, float& s) { s = __fmul_rn(s, m.over_chunk[stage][d - first_key]); });
#else
        part.scale(exp2_of(m.decays[stage].sums[CHUNK - 1]));
#endif
        part.add<LINE>(m.keys[stage], CHUNK, [&](u32(&left)[4], int j) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int i = j + x / 2 * 8 + in_pair;
                const float2 both = *reinterpret_cast<const float2*>(betas + i);
                const float* from = of_column + i * Z_LINE + x % 2 * 8;
                left[x] = updates_of(from[0], both.x, from[Z_LINE], both.y);
            }
#if !BY_CHANNEL
            scale_pairs(left, m.decays[stage].left + j);
#endif
        });
    }
}
