/* memory_limit.h - how much of a device a run may take, the same in ppo and sft. */
#ifndef VERLC_PLAN_MEMORY_LIMIT_H
#define VERLC_PLAN_MEMORY_LIMIT_H

#include "device/device.h"

/* Bytes rounded up to the 2 MiB pages in which a block of device memory comes. */
static inline size_t train_pages(size_t bytes) { return (bytes + ((size_t)2 << 20) - 1) & ~(((size_t)2 << 20) - 1); }
/* Bytes that a run may take: the set limit (trainer.device_memory_limit in bytes; 0: none), or nearly all of the device. */
size_t train_memory_limit(const struct dev *dev, int64_t set);
/* Host memory that may be pinned: what the host has, less an eighth for everything else. bytes 0: this machine's. */
size_t train_host_limit(int64_t bytes);
/* Whether writing checkpoints overlaps with the next steps (ckpt/async_save.h), with a copy of so many bytes: the key's value where
 * it is set, else where the copy takes at most half of the memory that is free. */
bool train_async_save(bool is_set, bool value, size_t copy, size_t free_bytes);

#endif
