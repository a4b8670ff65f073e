/* memory_limit.c - see memory_limit.h. */
#include "train/run/memory_limit.h"

size_t train_memory_limit(const struct dev *dev, int64_t set) {
    const size_t there = (size_t)((double)dev->mem_total * 0.95);
    const bool beyond = dev_has_own_memory(dev) && (size_t)set > there; /* without: one may plan for another machine */
    return set > 0 && !beyond ? (size_t)set : there;
}
