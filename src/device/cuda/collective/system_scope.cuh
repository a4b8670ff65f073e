/* system_scope.cuh - what a kernel that waits for another GPU or for the host needs: loads and stores of the system's scope, the
 * time, a nap. One function each, which the emulation of streams has its own of (tests/ops/cuda_streams). */
#ifndef VERLC_DEV_CUDA_SYSTEM_SCOPE_CUH
#define VERLC_DEV_CUDA_SYSTEM_SCOPE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* All that this thread has seen is there for whoever acquires v. */
static __device__ __forceinline__ void store_release(uint64_t *p, uint64_t v) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
static __device__ __forceinline__ uint64_t load_acquire(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
/* Words of pinned host memory, never from a cache. */
static __device__ __forceinline__ uint32_t load_host(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void store_host(uint32_t *p, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
static __device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
static __device__ __forceinline__ void nap_ns(unsigned ns) { __nanosleep(ns); }

#endif
