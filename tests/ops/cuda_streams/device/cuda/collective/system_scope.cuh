/* system_scope.cuh - as the backend's, on memory of one process. */
#ifndef VERLC_TESTS_CUDA_STREAMS_SYSTEM_SCOPE_CUH
#define VERLC_TESTS_CUDA_STREAMS_SYSTEM_SCOPE_CUH

#include <time.h>
#include <unistd.h>

static inline void store_release(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline uint64_t load_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint32_t load_host(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void store_host(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline uint64_t now_ns() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline void nap_ns(unsigned ns) { usleep(20 + ns / 1000); }

#endif
