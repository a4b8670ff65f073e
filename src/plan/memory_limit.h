/* memory_limit.h - how much of a device a run may take, the same in ppo and sft. */
#ifndef VERLC_PLAN_MEMORY_LIMIT_H
#define VERLC_PLAN_MEMORY_LIMIT_H

#include "device/device.h"
#include "run/run.h"

/* Bytes rounded up to the 2 MiB pages in which a block of device memory comes. */
static inline size_t train_pages(size_t bytes) { return (bytes + ((size_t)2 << 20) - 1) & ~(((size_t)2 << 20) - 1); }
/* Bytes that a run may take: the set limit (trainer.device_memory_limit in bytes; 0: none), or nearly all of the device. */
size_t plan_memory_limit(const struct dev *dev, int64_t set);
/* Host memory that may be pinned: what the host has, less an eighth for everything else. bytes 0: this machine's. */
size_t plan_host_limit(int64_t bytes);
/* Bytes of the copy from which checkpoints are written during the next steps (ckpt/async_save.h); 0: they are synchronous. So where
 * trainer.async_save says it, and where that is not set if the copy takes at most half of what `there` has beyond `taken`. */
size_t plan_checkpoint_copy(const struct run_config *k, const struct conf *c, size_t copy, size_t taken, size_t there);
/* Whether the device can offload to host memory; where a run wants to and it cannot, with a note. */
bool plan_can_offload(const struct dev *dev, bool wanted);

#endif
