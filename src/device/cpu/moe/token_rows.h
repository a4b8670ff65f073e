/* token_rows.h - elements and parts of the CPU ops that go token by token: experts' and latent attention's.
 *
 * Invariant: a part is whole tokens, so a token's results are made by one thread. */
#ifndef VERLC_DEVICE_CPU_MOE_TOKEN_ROWS_H
#define VERLC_DEVICE_CPU_MOE_TOKEN_ROWS_H

#include "device/cpu/cpu_int.h"

enum { ROWS = 16 /* tokens of a part */ };

/* Element i of a tensor in bf16 or f32. */
static inline float value_at(struct tensor t, int64_t i) {
    return t.dt == DT_BF16 ? bf16_to_f32(((const uint16_t *)t.data)[i]) : ((const float *)t.data)[i];
}
static inline void put(struct tensor t, int64_t i, float v) {
    if (t.dt == DT_BF16) ((uint16_t *)t.data)[i] = f32_to_bf16(v);
    else ((float *)t.data)[i] = v;
}
static inline int64_t parts_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static inline int64_t part_end(int64_t rows, int64_t part) { return (part + 1) * ROWS < rows ? (part + 1) * ROWS : rows; }

#endif
