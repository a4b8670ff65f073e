/* abi.h - the symbols that the program looks up in libverlc_cuda.so, and how the two notice that they come from different
 * builds: each carries VERLC_CUDA_ABI, one hash of the headers that both include (cmake/cuda_abi.cmake). No size or version
 * stands here. */
#ifndef VERLC_DEVICE_CUDA_ABI_H
#define VERLC_DEVICE_CUDA_ABI_H

#include "device/collective/peers.h"
#include "device/collective/transport.h"
#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const char verlc_cuda_abi[]; /* VERLC_CUDA_ABI of the library's build */
/* How many GPUs the driver shows, at least 1; ERR_DEVICE: none, or the driver is too old. */
int verlc_cuda_count(int *count);
/* pre: index in [0, count). */
int verlc_cuda_open(struct dev *d, int index);

#ifdef __cplusplus
}
#endif
#endif
