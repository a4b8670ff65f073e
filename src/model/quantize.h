/* quantize.h - matrices in 4 or 8 bits (NF4, INT8), quantised as they are read. */
#ifndef VERLC_MODEL_QUANTIZE_H
#define VERLC_MODEL_QUANTIZE_H

#include "device/device.h"

#include <stdint.h>

/* What a load does to a matrix (rows, cols): code and scale as struct dequant_args has them, host. */
void model_quantize(enum quant_kind kind, const float *w, int64_t rows, int64_t cols, uint8_t *code, float *scale);

#endif
