/* arena.h - one allocation, many tensors.
 *
 * A layout function takes an arena and claims every buffer it needs.  It runs
 * twice: with base == NULL to measure, then over the real block to bind.  The
 * sizes and the pointers therefore come from the same lines of code. */
#ifndef VERLC_BASE_ARENA_H
#define VERLC_BASE_ARENA_H

#include "base/err.h"
#include "base/size.h"

struct arena {
    char *base; /* NULL while measuring; not owned */
    size_t cap;
    size_t used;
};

#define ARENA_ALIGN 256 /* cache lines, cuBLASLt and cudaMalloc are all satisfied */

/* The next `bytes` of the block, 256-aligned; NULL while measuring, when `used` ends at SIZE_MOST. */
static inline void *arena_take(struct arena *a, size_t bytes) {
    const size_t off = (a->used + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    a->used = (size_t)size_add((int64_t)off, (int64_t)bytes);
    if (a->base == NULL) return NULL;
    CHECK(a->used <= a->cap);
    return a->base + off;
}

#endif
