// Programmatic dependent launch; nothing in an ordinary launch.
#pragma once

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The line of the L2 cache where that lies.
__device__ __forceinline__ void prefetch_to_l2(const void* at) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

__device__ __forceinline__ void let_kernel_behind_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// An address behind a parameter. The compiler does not know how it was found, so it finds it here, and not where it is
// used.
template <class T>
__device__ __forceinline__ T* found(T* at, void* parameter) {
#ifdef __CUDA_ARCH__
    char* base = static_cast<char*>(parameter);
    long long offset = reinterpret_cast<const char*>(at) - base;
    asm volatile("" : "+l"(offset));
    at = reinterpret_cast<T*>(base + offset);
#endif
    return at;
}

// The same number, which is computed behind what was asked for before.
__device__ __forceinline__ float arrived(float x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(x));
#endif
    return x;
}
