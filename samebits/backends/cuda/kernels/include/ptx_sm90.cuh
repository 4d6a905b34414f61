// PTX of Hopper, by its own names: mbarriers, TMA, registers, clusters, programmatic dependent launch.
#pragma once

#include "types.cuh"

struct alignas(64) TensorMap {
    char opaque[128];
};

__device__ __forceinline__ float load_shared(u32 from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ u16 load_shared_half(u32 from) {
    u16 x;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void load_shared_pair(u32 from, u32& low, u32& high) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(from) : "memory");
}

// Without a branch, so that what was loaded before stays in flight. The address is a multiple of eight bytes.
__device__ __forceinline__ void store_pair_if(bool condition, void* to, u32 low, u32 high) {
    asm volatile(
        "{\n"
        ".reg .pred condition;\n"
        "setp.ne.u32 condition, %3, 0;\n"
        "@condition st.global.v2.b32 [%0], {%1, %2};\n"
        "}\n" ::"l"(to),
        "r"(low), "r"(high), "r"(u32(condition))
        : "memory");
}

// Transposes a matrix of 8 x 8 16-bit elements, of whose row lane / 4 a lane has pair lane % 4.
__device__ __forceinline__ u32 transpose_matrix(u32 pair) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ __forceinline__ void store_shared(u32 to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// ---- mbarrier

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival for the warp, after what all its lanes have read and written. ptxas drops the __syncwarp() of a
// warp that is together. Then racecheck sees lanes that never arrive, so for that tool all do.
#ifdef ALL_LANES_ARRIVE
constexpr u32 WARP_ARRIVALS = 32;
__device__ __forceinline__ void warp_arrive(u32 barrier) { mbarrier_arrive(barrier); }
#else
constexpr u32 WARP_ARRIVALS = 1;
__device__ __forceinline__ void warp_arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
#endif

// Arrives at the same barrier of another block of the cluster. Its scope is the block's, no wider: it reports
// that the tensor cores have read a stage, which they had before this thread went on. A release to the
// cluster would cost a fence.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(block)
        : "memory");
}

// Whether the phase of this parity is over; does not wait long.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// The same, without any waiting.
__device__ __forceinline__ bool mbarrier_test_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Hardware barrier `id` among `threads` threads of the block.
__device__ __forceinline__ void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The first half of a named barrier: does not wait.
__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z,
                                         int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(batch)
        : "memory");
}

__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z,
                                         int w, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(batch)
        : "memory");
}

// Writes the same shared-memory offset, and signals the same barrier, in every block whose bit `blocks` has.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap& map, u32 barrier, int x, int y,
                                                   int z, int batch, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(batch), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int x, int y, int z, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x),
                 "r"(y), "r"(z), "r"(batch)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, int x, int y, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(from), "r"(x), "r"(y), "r"(batch)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's TMA stores still read shared memory.
template <int pending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Orders this thread's ordinary accesses of shared memory before those of TMA and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers: all warps of a warpgroup execute these

template <int count>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- clusters

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same place in the shared memory of another block.
__device__ __forceinline__ u32 mapa(u32 address, u32 block) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    return remote;
}

__device__ __forceinline__ void store_shared_cluster(u32 to, const float (&x)[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// ---- programmatic dependent launch; both do nothing in an ordinary launch

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
