/* scratch_memory.c - pages of host memory, huge ones where they are large, and the scratch that the CPU's ops take from them.
 *
 * Invariant: scratch of a purpose grows and never shrinks, so ops allocate nothing once every shape has been seen. */
#include "base/buf.h"
#include "base/err.h"
#include "device/cpu/cpu_int.h"

#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20 };

static size_t page_round(size_t bytes) {
    const size_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096;
    return (bytes + unit - 1) & ~(unit - 1);
}

void *cpu_pages_alloc(size_t bytes) {
    const size_t n = page_round(bytes);
    if (n < bytes || n > SIZE_MAX - HUGE_PAGE) return NULL;
    if (n < HUGE_PAGE) {
        void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return p == MAP_FAILED ? NULL : p;
    }
    /* Take one huge page more, give back what is outside the aligned part. */
    char *raw = mmap(NULL, n + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    const size_t skip = (size_t)(-(uintptr_t)raw & (HUGE_PAGE - 1));
    if (skip) munmap(raw, skip);
    if (skip < HUGE_PAGE) munmap(raw + skip + n, HUGE_PAGE - skip);
    madvise(raw + skip, n, MADV_HUGEPAGE); /* only speed depends on it */
    return raw + skip;
}

void cpu_pages_free(void *p, size_t bytes) {
    if (p) munmap(p, page_round(bytes));
}

int cpu_scratch(struct cpu *c, enum cpu_scratch_id id, size_t bytes, void **out) {
    if (c->scratch[id].bytes < bytes) {
        cpu_pages_free(c->scratch[id].p, c->scratch[id].bytes);
        c->scratch[id].bytes = 0;
        c->scratch[id].p = cpu_pages_alloc(bytes);
        if (!c->scratch[id].p) FAIL(ERR_NOMEM, "cpu: out of memory for %zu MiB of scratch", bytes >> 20);
        c->scratch[id].bytes = bytes;
    }
    *out = c->scratch[id].p;
    return 0;
}
