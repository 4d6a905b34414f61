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

// The same address, behind a parameter. How it was computed is hidden from the compiler: so it is computed here, and not
// again where it is used.
template <class T>
__device__ __forceinline__ T* computed_here(T* at, void* parameter) {
#ifdef __CUDA_ARCH__
    char* base = static_cast<char*>(parameter);
    long long offset = reinterpret_cast<const char*>(at) - base;
    asm volatile("" : "+l"(offset));
    at = reinterpret_cast<T*>(base + offset);
#endif
    return at;
}

// The same number. The compiler moves nothing that needs it to before what was asked for until here.
__device__ __forceinline__ float needed_from_here(float x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(x));
#endif
    return x;
}
