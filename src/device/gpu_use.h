/* gpu_use.h - how busy a GPU is and how much of its memory is in use, as its driver counts them (NVML). */
#ifndef VERLC_DEVICE_GPU_USE_H
#define VERLC_DEVICE_GPU_USE_H

#include "device/device.h"

#include <stdbool.h>

/* The means of what was seen since the last call: the share of the time in which the GPU ran a kernel, of whatever program,
 * and the bytes of its memory that all programs use. The first call begins to look, twice a second in a thread of its own,
 * until dev_close. False: nothing was seen yet, or d is no GPU, or has no NVML (libnvidia-ml.so.1; VERLC_NVML_LIB names
 * another). */
bool dev_gpu_use(struct dev *d, double *busy, double *bytes);

#endif
