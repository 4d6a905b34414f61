// Runs SOURCE's kernel ENTRY: one block after the other, one warp after the other, whose lanes take turns.

#include "cuda.h"

#include <ucontext.h>

#include SOURCE

static constexpr int LANES_OF_WARP = 32;

static const Params* params;
static ucontext_t all, lanes[LANES_OF_WARP];
static char stacks[LANES_OF_WARP][1 << 17];
static bool ended[LANES_OF_WARP];
static int now, turn[LANES_OF_WARP];
static float told[2][LANES_OF_WARP];

// Every other lane gets as far, too, before this one goes on.
void __syncwarp(unsigned) { swapcontext(&lanes[now], &all); }

// A lane that goes on may tell its next value before others have read this one: there is room for both.
float __shfl_xor_sync(unsigned, float x, int distance) {
    const int lane = now, half = turn[lane] ^= 1;
    told[half][lane] = x;
    __syncwarp();
    return told[half][lane ^ distance];
}

static void run() {
    ENTRY(*params);
    ended[now] = true;
    swapcontext(&lanes[now], &all);
}

extern "C" void launch(const Params* given, int blocks, int threads) {
    params = given;
    for (int thread = 0; thread < blocks * threads; thread += LANES_OF_WARP) {
        blockIdx.x = thread / threads;
        for (int i = 0; i < LANES_OF_WARP; ++i) {
            getcontext(&lanes[i]);
            lanes[i].uc_stack.ss_sp = stacks[i];
            lanes[i].uc_stack.ss_size = sizeof(stacks[i]);
            makecontext(&lanes[i], run, 0);
            ended[i] = false;
            turn[i] = 0;
        }
        for (bool some = true; some;) {
            some = false;
            for (now = 0; now < LANES_OF_WARP; ++now) {
                if (ended[now]) continue;
                threadIdx.x = thread % threads + now;
                swapcontext(&all, &lanes[now]);
                some |= !ended[now];
            }
        }
    }
}
