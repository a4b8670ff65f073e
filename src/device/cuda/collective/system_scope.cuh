/* system_scope.cuh - what a kernel that exchanges lines with another GPU needs: loads and stores of the system's scope, the time, a
 * nap. One function each, which the emulation of streams has its own of (tests/ops/cuda_streams). */
#ifndef VERLC_DEV_CUDA_SYSTEM_SCOPE_CUH
#define VERLC_DEV_CUDA_SYSTEM_SCOPE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* 16 bytes that are read and written together; each word by itself is read as it was written. */
struct alignas(16) line {
    uint32_t word[4];
};
static __device__ __forceinline__ void store_line(struct line *p, const struct line &v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
                 "r"(v.word[3])
                 : "memory");
}
static __device__ __forceinline__ struct line load_line(const struct line *p) {
    struct line v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(p)
                 : "memory");
    return v;
}
/* For this GPU; the compiler makes four of an assignment behind sums. */
static __device__ __forceinline__ void write_line(struct line *p, const struct line &v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}
/* What this thread has read and written is behind it, for whoever reads what it writes next. */
static __device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
/* Words, of pinned host memory too, never from a cache. */
static __device__ __forceinline__ uint32_t load_relaxed(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void store_relaxed(uint32_t *p, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
static __device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
static __device__ __forceinline__ void nap_ns(unsigned ns) { __nanosleep(ns); }

#endif
