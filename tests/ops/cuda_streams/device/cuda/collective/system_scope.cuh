/* system_scope.cuh - as the backend's, on memory of one process. */
#ifndef VERLC_TESTS_CUDA_STREAMS_SYSTEM_SCOPE_CUH
#define VERLC_TESTS_CUDA_STREAMS_SYSTEM_SCOPE_CUH

#include <time.h>
#include <unistd.h>

struct alignas(16) line {
    uint32_t word[4];
};
/* A thread is late at random. */
static inline unsigned line_turn() {
    static thread_local unsigned x = (unsigned)(uintptr_t)&x;
    x = x * 1664525u + 1013904223u;
    if (x >> 24 == 0) usleep(x >> 16 & 127);
    return x >> 24;
}
/* Words in some order: nothing may depend on it. */
static inline void store_line(struct line *p, const struct line &v) {
    const unsigned turn = line_turn();
    for (unsigned k = 0; k < 4; k++) __atomic_store_n(&p->word[(k + turn) % 4], v.word[(k + turn) % 4], __ATOMIC_SEQ_CST);
}
static inline struct line load_line(const struct line *p) {
    struct line v;
    (void)line_turn();
    for (int k = 0; k < 4; k++) v.word[k] = __atomic_load_n(&p->word[k], __ATOMIC_SEQ_CST);
    return v;
}
static inline void write_line(struct line *p, const struct line &v) { *p = v; }
static inline void fence_system() {}
static inline uint32_t load_relaxed(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void store_relaxed(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline uint64_t now_ns() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline void nap_ns(unsigned ns) { usleep(20 + ns / 1000); }

#endif
