/* lora.c - the CPU backend's op for LoRA adapters: a block of one matrix, or of those of a stack, added to a block of another.
 *
 * Invariant: each element is computed alone, so threads and parts change nothing. */
#include "device/cpu/cpu_int.h"

enum { PART = 1 << 14 /* elements of a part, about */ };

static int64_t rows_of_part(int64_t cols) { return cols < PART ? PART / cols : 1; }

static void add_part(void *arg, int64_t part, int thread) {
    const struct add_block_args *a = arg;
    const int64_t all = a->count * a->rows, per = rows_of_part(a->cols), end = (part + 1) * per, hi = end < all ? end : all;
    (void)thread;
    for (int64_t at = part * per; at < hi; at++) {
        const int64_t n = at / a->rows, i = at % a->rows;
        float *dst = (float *)a->dst.data + n * a->dst_next + (a->dst_row + i) * a->dst.dim[1] + a->dst_col;
        const float *src = (const float *)a->src.data + n * a->src_next + (a->src_row + i) * a->src.dim[1] + a->src_col;
        for (int64_t j = 0; j < a->cols; j++) dst[j] += a->scale * src[j];
    }
}

int cpu_add_block(struct dev *d, const struct add_block_args *a) {
    struct add_block_args job = *a;
    const int64_t per = rows_of_part(a->cols);
    pool_run(cpu_of(d)->pool, (a->count * a->rows + per - 1) / per, add_part, &job);
    return 0;
}
