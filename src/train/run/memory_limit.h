/* memory_limit.h - how much of a device a run may take, the same in ppo and sft.  Private to train. */
#ifndef VERLC_TRAIN_MEMORY_H
#define VERLC_TRAIN_MEMORY_H

#include "dev/dev.h"

/* A block of device memory comes in pages of 2 MiB. */
static inline size_t train_pages(size_t bytes) { return (bytes + ((size_t)2 << 20) - 1) & ~(((size_t)2 << 20) - 1); }
/* Whether the host's memory and the device's are not the same. */
bool train_on_gpu(const struct dev *dev);
/* What a run may take: the limit that was set (trainer.device_memory_limit in bytes; 0: none), or nearly all that is there. */
size_t train_memory_limit(const struct dev *dev, int64_t set);
/* What the driver of a GPU takes beside all blocks: the code of our kernels and of the library's that run, and
 * the recorded decoding steps (what the context takes was gone before the device said what it has). */
size_t train_system_bytes(const struct dev *dev);

#endif
