/* optimizer.c - the CPU backend's ops of the optimizers other than AdamW: a
 * linear combination, and 8-bit codes with a scale for each block.
 *
 * Bound by memory like elementwise.c.  Invariant: every element (every block of
 * the codes) is computed alone, so threads change nothing. */
#include "dev/cpu/gemm.h"

#include <math.h>
#include <string.h>

enum {
    PART = 1 << 15, /* elements of a part: whole blocks */
    LANES = 16,
    CODES = 256,
};
_Static_assert(PART % DEV_QUANT_BLOCK == 0, "a part holds whole blocks");

static int64_t parts_of(int64_t n) { return (n + PART - 1) / PART; }

/* ---- a * x + b * y ---- */

struct axpby_job {
    float *y;
    const float *x;
    float a, b;
    int64_t n;
};

static void axpby_part(void *arg, int64_t part, int thread) {
    const struct axpby_job j = *(const struct axpby_job *)arg;
    const int64_t lo = part * PART, hi = j.n - lo < PART ? j.n : lo + PART;
    (void)thread;
    if (j.b == 0) {
        for (int64_t i = lo; i < hi; i++) j.y[i] = j.a * j.x[i];
        return;
    }
    int64_t i = lo;
    for (; i + LANES <= hi; i += LANES)
#pragma GCC ivdep
        for (int l = 0; l < LANES; l++) j.y[i + l] = j.a * j.x[i + l] + j.b * j.y[i + l];
    for (; i < hi; i++) j.y[i] = j.a * j.x[i] + j.b * j.y[i];
}

int cpu_axpby(struct dev *d, struct tensor y, float a, struct tensor x, float b) {
    struct axpby_job j = {y.data, x.data, a, b, tensor_count(y)};
    pool_run(cpu_of(d)->pool, parts_of(j.n), axpby_part, &j);
    return 0;
}

/* ---- 8 bits ---- */

struct quant_job {
    const struct quant8_args *a;
    float middle[CODES]; /* between entry i and i + 1 of the book; the last is never passed */
};

/* The number of midpoints below v, by halving. */
static uint8_t nearest_code(const float *middle, float v) {
    int code = 0;
    for (int half = CODES / 2; half > 0; half /= 2) code += middle[code + half - 1] < v ? half : 0;
    return (uint8_t)code;
}

static void quant_part(void *arg, int64_t part, int thread) {
    const struct quant_job *j = arg;
    const int64_t n = j->a->x.dim[0], end = n - part * PART < PART ? n : (part + 1) * PART;
    const float *x = j->a->x.data;
    uint8_t *code = j->a->code.data;
    (void)thread;
    for (int64_t lo = part * PART; lo < end; lo += DEV_QUANT_BLOCK) {
        const int64_t hi = lo + DEV_QUANT_BLOCK < end ? lo + DEV_QUANT_BLOCK : end;
        float scale = 0;
        for (int64_t i = lo; i < hi; i++) scale = fabsf(x[i]) > scale ? fabsf(x[i]) : scale;
        ((float *)j->a->scale.data)[lo / DEV_QUANT_BLOCK] = scale;
        for (int64_t i = lo; i < hi; i++) code[i] = nearest_code(j->middle, scale > 0 ? x[i] / scale : 0);
    }
}

int cpu_quant8(struct dev *d, const struct quant8_args *a) {
    struct quant_job j = {.a = a};
    const float *book = a->book.data;
    for (int i = 0; i < CODES - 1; i++) j.middle[i] = 0.5f * (book[i] + book[i + 1]);
    j.middle[CODES - 1] = INFINITY;
    pool_run(cpu_of(d)->pool, parts_of(a->x.dim[0]), quant_part, &j);
    return 0;
}

static void dequant_part(void *arg, int64_t part, int thread) {
    const struct quant8_args *a = arg;
    const int64_t n = a->x.dim[0], end = n - part * PART < PART ? n : (part + 1) * PART;
    const float *scale = a->scale.data, *book = a->book.data;
    const uint8_t *code = a->code.data;
    float *x = a->x.data;
    (void)thread;
    for (int64_t i = part * PART; i < end; i++) x[i] = book[code[i]] * scale[i / DEV_QUANT_BLOCK];
}

int cpu_dequant8(struct dev *d, const struct quant8_args *a) {
    struct quant8_args j = *a;
    pool_run(cpu_of(d)->pool, parts_of(a->x.dim[0]), dequant_part, &j);
    return 0;
}
