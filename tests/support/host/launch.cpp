// Runs SOURCE's kernel ENTRY: one block after the other, whose threads take turns at barriers.

#include <setjmp.h>
#include <ucontext.h>

#include "cuda.h"

alignas(1024) unsigned char bytes[256 << 10];  // shared memory

#include SOURCE

static constexpr int MOST = 1024, WARP = 32;

struct Barrier {
    int arrived, passed, threads;
};

template <class P>
P taken_by(void (*)(P));
using KernelParams = decltype(taken_by(ENTRY));

static const KernelParams* params;
static jmp_buf all, threads[MOST];
static ucontext_t at_start;
static char stacks[MOST][1 << 17];
static Barrier of_block, of_warp[MOST / WARP], of_number[16], *waits_at[MOST];
static bool started[MOST], ended[MOST];
static int now, seen[MOST], turn[MOST];
static float told[2][MOST];

// setjmp, unlike swapcontext, calls no system: kernels spend most of their time here.
static void go_to(jmp_buf& from, jmp_buf& to) {
    if (!_setjmp(from)) _longjmp(to, 1);
}

static void pass(Barrier& at) { at.arrived = 0, ++at.passed; }

static void meet(Barrier& at) {
    if (++at.arrived == at.threads) return pass(at);
    waits_at[now] = &at, seen[now] = at.passed;
    go_to(threads[now], all);
}

static void leave(Barrier& at) {
    if (--at.threads && at.arrived == at.threads) pass(at);
}

void __syncthreads() { meet(of_block); }

void meet_at(int barrier, int threads, bool waits) {
    Barrier& at = of_number[barrier];
    at.threads = threads;
    if (waits)
        meet(at);
    else if (++at.arrived == threads)
        pass(at);
}

// Whether a thread says so: the last one to leave forgets it.
int __syncthreads_or(int x) {
    static int any, left;
    any |= x != 0;
    meet(of_block);
    const int found = any;
    if (++left == of_block.threads) any = left = 0;
    meet(of_block);
    return found;
}

void __syncwarp(unsigned) { meet(of_warp[now / WARP]); }

// A lane that goes on may tell its next value before others have read this one: there is room for both.
float told_by(float x, int lane) {
    const int half = turn[now] ^= 1;
    told[half][now] = x;
    __syncwarp();
    return told[half][now / WARP * WARP + lane];
}

static void run() {
    ENTRY(*params);
    ended[now] = true;
    leave(of_block), leave(of_warp[now / WARP]);
    _longjmp(all, 1);
}

static void start() {
    getcontext(&at_start);
    at_start.uc_stack.ss_sp = stacks[now];
    at_start.uc_stack.ss_size = sizeof(stacks[now]);
    makecontext(&at_start, run, 0);
    if (!_setjmp(all)) setcontext(&at_start);
}

static void run_block(int count, bool backwards) {
    std::memset(bytes, 0xFF, sizeof(bytes));
    of_block = {0, 0, count};
    for (Barrier& at : of_number) at = {};
    for (int i = 0; i < count; ++i) {
        ended[i] = started[i] = false, turn[i] = 0, waits_at[i] = nullptr;
        of_warp[i / WARP] = {0, 0, WARP};
    }
    for (int left = count; left;) {
        left = 0;
        for (int i = 0; i < count; ++i) {
            now = backwards ? count - 1 - i : i;
            if (ended[now]) continue;
            ++left;
            if (waits_at[now] && waits_at[now]->passed == seen[now]) continue;
            waits_at[now] = nullptr;
            threadIdx.x = now;
            if (started[now])
                go_to(all, threads[now]);
            else
                started[now] = true, start();
        }
    }
}

// Every second launch begins with the last warps and blocks: order must not matter. Returns whether blocks kept to
// their `shared` bytes of shared memory.
extern "C" bool launch(const KernelParams* given, int x, int y, int z, int count, int shared) {
    static bool backwards = true;
    backwards = !backwards;
    params = given;
    gridDim = {unsigned(x), unsigned(y), unsigned(z)}, blockDim = {unsigned(count), 1, 1};
    for (int n = 0; n < x * y * z; ++n) {
        const int i = backwards ? x * y * z - 1 - n : n;
        blockIdx = {unsigned(i % x), unsigned(i / x % y), unsigned(i / x / y)};
        run_block(count, backwards);
        for (int at = shared; at < int(sizeof(bytes)); ++at)
            if (bytes[at] != 0xFF) return false;
    }
    return true;
}
