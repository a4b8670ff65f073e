/* memory.h - memory of a device: allocations, scratch, copies; pinned host memory and copy streams for offload.
 *
 * Work is queued in order on the device's compute stream; copies on a copy stream overlap it. */
#ifndef VERLC_DEVICE_MEMORY_H
#define VERLC_DEVICE_MEMORY_H

#include "device/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DEV_COPY_STREAMS 7 /* three of the model's (weight streaming), four of the decoder's (results) */

/* bytes == 0 gives NULL. ERR_NOMEM says how much was asked and is there. */
int dev_alloc(struct dev *d, size_t bytes, void **out);
void dev_free(struct dev *d, void *p, size_t bytes);
/* Bytes of scratch that the ops of a run of these sizes take at most, each thread's included. */
size_t dev_working_bytes(struct dev *d, const struct dev_sizes *s);
/* With memory of its own the device takes them now: afterwards no op of a run within these sizes allocates. Without, the ops
 * take them as they need them. ERR_NOMEM. */
int dev_reserve(struct dev *d, const struct dev_sizes *s);
/* Bytes that the driver takes in addition to every allocation: kernels' code and CUDA graphs. The context's are not
 * part of mem_total. */
size_t dev_driver_bytes(const struct dev *d);
int dev_memory(struct dev *d, struct dev_memory *out);

/* Whether the device's memory is not the host's (a GPU). */
bool dev_has_own_memory(const struct dev *d);
/* Pinned host memory, for offload. Every call takes it as it takes device memory; a GPU's ops reach it at the speed of its bus.
 * Without own memory it is dev_alloc's. */
int dev_host_alloc(struct dev *d, size_t bytes, void **out);
void dev_host_free(struct dev *d, void *p, size_t bytes); /* NULL ok */
/* Pins whole pages of host memory of another kind, a mapping, so that copies to and from it run at the speed of the bus. Each
 * once. Without own memory nothing is to be done. ERR_NOMEM. */
int dev_host_register(struct dev *d, void *p, size_t bytes);
void dev_host_unregister(struct dev *d, void *p);

/* Asynchronous copies on copy stream 0 to DEV_COPY_STREAMS - 1: fetch is host to device, evict is device to host. A copy starts
 * when all that was queued before it, and the copies of its stream before it, are done. What is queued after
 * dev_copy_stream_wait starts when that stream's copies are done. Leave source and destination alone until then. Not while a
 * CUDA graph is captured. */
int dev_fetch(struct dev *d, int stream, void *dst_dev, const void *src_host, size_t bytes);
int dev_evict(struct dev *d, int stream, void *dst_host, const void *src_dev, size_t bytes);
int dev_copy_stream_wait(struct dev *d, int stream);
int dev_copy_stream_sync(struct dev *d, int stream); /* the host waits for that stream's copies */

int dev_sync(struct dev *d);
int dev_copy_in(struct dev *d, void *dst_dev, const void *src_host, size_t bytes);
int dev_copy_out(struct dev *d, void *dst_host, const void *src_dev, size_t bytes); /* waits */
int dev_copy(struct dev *d, void *dst_dev, const void *src_dev, size_t bytes);
int dev_zero(struct dev *d, void *dst_dev, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
