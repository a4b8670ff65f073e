/* dequantize.c - the CPU backend's dequantization of NF4 and INT8 weights.  It does not quantize: a
 * weight is quantized once, on the host, by model.
 *
 * Invariant: each element is computed alone, so threads and parts change nothing. */
#include "device/cpu/cpu_int.h"

enum { PART = 1 << 14 /* elements of a part, about; a multiple of DEV_NF4_BLOCK */ };

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t rows_of_part(int64_t cols) { return cols < PART ? PART / cols : 1; }

static void put(const struct dequant_args *a, int64_t i, float v) {
    if (a->w.dt == DT_F32) ((float *)a->w.data)[i] = v;
    else ((uint16_t *)a->w.data)[i] = f32_to_bf16(v);
}

static void nf4_part(void *arg, int64_t part, int thread) {
    const struct dequant_args *a = arg;
    const uint8_t *code = a->code.data;
    const int64_t n = tensor_count(a->w), hi = min64(n, (part + 1) * PART);
    (void)thread;
    for (int64_t lo = part * PART; lo < hi; lo += DEV_NF4_BLOCK) {
        const float scale = ((const float *)a->scale.data)[lo / DEV_NF4_BLOCK];
        float value[16];
        for (int c = 0; c < 16; c++) value[c] = dev_nf4_book[c] * scale;
        for (int64_t i = lo, end = min64(hi, lo + DEV_NF4_BLOCK); i < end; i += 2) {
            put(a, i, value[code[i / 2] >> 4]);
            if (i + 1 < end) put(a, i + 1, value[code[i / 2] & 15]);
        }
    }
}

static void int8_part(void *arg, int64_t part, int thread) {
    const struct dequant_args *a = arg;
    const int8_t *code = a->code.data;
    const int64_t k = a->w.dim[1], per = rows_of_part(k), hi = min64(a->w.dim[0], (part + 1) * per);
    (void)thread;
    for (int64_t row = part * per; row < hi; row++) {
        const float scale = ((const float *)a->scale.data)[row];
        for (int64_t i = row * k; i < (row + 1) * k; i++) put(a, i, (float)code[i] * scale / 127.0f);
    }
}

int cpu_dequant(struct dev *d, const struct dequant_args *a) {
    struct dequant_args job = *a;
    const int64_t per = rows_of_part(a->w.dim[1]);
    if (a->kind == QUANT_NF4) pool_run(cpu_of(d)->pool, (tensor_count(a->w) + PART - 1) / PART, nf4_part, &job);
    else pool_run(cpu_of(d)->pool, (a->w.dim[0] + per - 1) / per, int8_part, &job);
    return 0;
}
