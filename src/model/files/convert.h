/* convert.h - values of the float dtypes of files (F32, BF16, F16), at any address. */
#ifndef VERLC_MODEL_CONVERT_H
#define VERLC_MODEL_CONVERT_H

#include "device/tensor.h"

#include <stdbool.h>
#include <stdint.h>

bool model_all_finite(const void *src, enum dtype dt, int64_t n);

#endif
