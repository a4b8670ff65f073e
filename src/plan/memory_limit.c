/* memory_limit.c - see memory_limit.h. */
#include "plan/memory_limit.h"

#include <unistd.h>

size_t train_memory_limit(const struct dev *dev, int64_t set) {
    const size_t there = (size_t)((double)dev->mem_total * 0.95);
    const bool beyond = dev_has_own_memory(dev) && (size_t)set > there; /* without: one may plan for another machine */
    return set > 0 && !beyond ? (size_t)set : there;
}

size_t train_host_limit(int64_t bytes) {
    if (bytes > 0) return (size_t)bytes / 8 * 7;
    const long n = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return n > 0 && page > 0 ? (size_t)n / 8 * 7 * (size_t)page : SIZE_MAX;
}

bool train_async_save(bool is_set, bool value, size_t copy, size_t free_bytes) { return is_set ? value : copy <= free_bytes / 2; }
