// Linear attention without the delta rule, the second of three launches: the matrix at each chunk's start.
//
// docs/contract.md, "Recurrent layers", has the sums. Nothing but this is in a row. A block takes 16 columns of values for
// each of its warps, and KEY_TILE channels of keys, of one head in one sequence. It holds the matrix, transposed, in
// registers, and goes through the chunks in order, of which STAGES - 1 are on their way to shared memory.
//
// Macros: TYPE, KEY_SIZE, WARPS, HARDWARE_EXP2 and WEIGHTED are those of delta.cu.
//   KEY_TILE   channels of a block, a multiple of 16
//   STAGES     chunks in shared memory
//   GRADIENTS  1: for a backward, which reads the matrices in float32, too; a state stays as it is

#include "linear_part.cuh"

constexpr int TILE = 16 * WARPS, WIDE = KEY_TILE / 16;
constexpr int KEY_STEPS = KEY_SIZE / 16, KEY_TILES = (KEY_SIZE + KEY_TILE - 1) / KEY_TILE;
constexpr int LINE = KEY_TILE + PAD, VALUES = TILE + PAD;  // of rows in shared memory, in elements

struct Memory {
    Stored keys[STAGES][CHUNK * LINE], values[STAGES][CHUNK * VALUES];
    Decays decays[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_states(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Memory& m = *reinterpret_cast<Memory*>(bytes);
    const int warp = threadIdx.x / 32, head = blockIdx.y, sequence = blockIdx.z;
    const int first_key = blockIdx.x % KEY_TILES * KEY_TILE, first_column = blockIdx.x / KEY_TILES * TILE;
    const Chunks mine(p, sequence, rows_before(p, sequence));
    const int chunks = mine.number();
    const int value_steps = (p.size + 15) / 16;
    const i64 place = first_chunk(mine.begin, sequence), own = i64(head) * p.key_size * p.size;
    float* state = p.state ? p.state + sequence * p.words : nullptr;
    const bool updates_state = state && !GRADIENTS && mine.rows > mine.before;

    const Stored* k = p.k + head / p.group * p.k_head + first_key;
    const Stored* v = p.v + head * p.v_head + first_column;
    const auto load = [&](int chunk) {
        const int stage = chunk % STAGES, first = mine.first(chunk), count = mine.count(chunk);
        const i64 token = mine.token(chunk);
        load_rows<LINE, KEY_TILE>(m.keys[stage], opened_keys(p, sequence, head) + first_key, p.key_size,
                                  k + token * p.k_token, p.k_token, first, count, p.key_size - first_key);
        load_rows<VALUES, TILE>(m.values[stage], opened_updates(p, sequence, head) + first_column, p.size,
                                v + token * p.v_token, p.v_token, first, count, p.size - first_column);
        load_whole(m.decays[stage], p.decays[(place + chunk) * p.heads + head]);
    };

    Part<WIDE> part;
    part.first_key = first_key, part.first_column = first_column + warp * 16;
    const i64 of_sequence = sequence * i64(p.heads) * p.key_size * p.size + own;
    part.read(p, state ? state + p.matrix + own : p.initial ? p.initial + of_sequence : nullptr);

    const int loads = p.closed ? chunks : chunks - 1;
    for (int chunk = 0; chunk < STAGES - 1; ++chunk) {
        if (chunk < loads) load(chunk);
        cp_async_commit();
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int stage = chunk % STAGES;
        const i64 index = (place + chunk) * p.heads + head;
        part.write_rounded(p, p.matrices + index * value_steps * KEY_STEPS * 32);
#if GRADIENTS
        if (p.of.starts) part.write_turned(p, p.of.starts + index * value_steps * KEY_SIZE * 16);
#endif
        if (updates_state && chunk && chunk == chunks - 1) part.write(p, state + p.matrix + own, false);
        if (chunk >= loads) break;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (chunk + STAGES - 1 < loads) load(chunk + STAGES - 1);
        cp_async_commit();
        const Decays& decays = m.decays[stage];
        part.scale(exp2_of(decays.sums[CHUNK - 1]));
        part.add<LINE, VALUES>(m.keys[stage], m.values[stage] + warp * 16, decays.left, CHUNK);
    }
    if (p.closed) part.write(p, p.closed + of_sequence, true);
    if (!updates_state) return;

    // The rows of the chunk that stays open. All blocks have those that were there from linear_begin.cu.
    const int last = chunks - 1, first = mine.first(last), count = mine.count(last);
    const i64 token = mine.token(last);
    Stored* keys = reinterpret_cast<Stored*>(state + p.keys) + i64(head) * CHUNK * p.key_size + first_key;
    Stored* updates =
        reinterpret_cast<Stored*>(state + p.updates) + i64(head) * CHUNK * p.size + first_column;
    for (int x = first * TILE + threadIdx.x; first_key == 0 && x < count * TILE; x += THREADS) {
        const int i = x / TILE, e = x % TILE;
        if (first_column + e < p.size) updates[i * p.size + e] = v[(token + i) * p.v_token + e];
    }
    for (int x = first * KEY_TILE + threadIdx.x; first_column == 0 && x < count * KEY_TILE; x += THREADS) {
        const int i = x / KEY_TILE, d = x % KEY_TILE;
        if (first_key + d < p.key_size) keys[i * p.key_size + d] = k[(token + i) * p.k_token + d];
    }
    if (blockIdx.x) return;
    const Decays& decays = p.decays[(place + last) * p.heads + head];
    for (int i = first + threadIdx.x; i < count; i += THREADS) {
        state[p.decays_at + head * CHUNK + i] = decays.sums[i];
#if WEIGHTED
        state[p.row_weights + head * CHUNK + i] = decays.weights[i];
#endif
    }
    if (head == 0 && threadIdx.x == 0) state[0] = float(count);
}
