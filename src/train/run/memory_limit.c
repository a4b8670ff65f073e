/* memory_limit.c - see memory_limit.h. */
#include "train/run/memory_limit.h"

#include <string.h>

enum { SYSTEM_MIB = 64 }; /* at most this was measured on an H200: a model of 24 layers, a few recorded steps */

bool train_on_gpu(const struct dev *dev) { return strcmp(dev->ops->name, "cuda") == 0; }

size_t train_memory_limit(const struct dev *dev, int64_t set) {
    const size_t there = (size_t)((double)dev->mem_total * 0.95);
    const bool beyond = train_on_gpu(dev) && (size_t)set > there; /* of a CPU one may plan for another machine */
    return set > 0 && !beyond ? (size_t)set : there;
}

size_t train_system_bytes(const struct dev *dev) { return train_on_gpu(dev) ? (size_t)SYSTEM_MIB << 20 : 0; }
