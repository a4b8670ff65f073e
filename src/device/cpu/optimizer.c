/* optimizer.c - the CPU backend's ops of the optimizers other than AdamW: the adaptive ones, a
 * linear combination, and 8-bit codes with a scale for each block.
 *
 * Bound by memory like elementwise.c.  Invariant: every element (every block of
 * the codes) is computed alone, so threads change nothing. */
#include "device/adaptive.h"
#include "device/cpu/gemm/gemm.h"

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

/* ---- Adam, AMSGrad, RAdam, RMSprop ---- */

struct adaptive_job {
    float *p, *m, *v, *x;
    const float *g;
    struct adaptive_scalars s;
    int64_t n;
};

static inline void adam_one(const struct adaptive_job *j, int64_t i, bool largest) {
    const float g = j->g[i] * j->s.scale + j->s.couple * j->p[i];
    const float m = j->m[i] + j->s.one_b1 * (g - j->m[i]);
    const float v = j->v[i] * j->s.b2 + j->s.one_b2 * g * g;
    float top = v;
    j->m[i] = m;
    j->v[i] = v;
    if (largest) j->x[i] = top = j->x[i] > v ? j->x[i] : v;
    j->p[i] = j->p[i] * j->s.keep - j->s.step_size * m / (sqrtf(top) / j->s.root_bias2 + j->s.eps);
}

static inline void radam_one(const struct adaptive_job *j, int64_t i, bool rectified) {
    const float g = j->g[i] * j->s.scale + j->s.couple * j->p[i];
    const float m = j->m[i] + j->s.one_b1 * (g - j->m[i]);
    const float v = j->v[i] * j->s.b2 + j->s.one_b2 * g * g;
    j->m[i] = m;
    j->v[i] = v;
    const float by = rectified ? j->s.rectify / (sqrtf(v) + j->s.eps) : 1;
    j->p[i] = j->p[i] * j->s.keep - j->s.step_size * m * by;
}

static inline void rmsprop_one(const struct adaptive_job *j, int64_t i, bool centered, bool momentum) {
    float g = j->g[i] * j->s.scale + j->s.couple * j->p[i];
    const float v = j->v[i] * j->s.b2 + j->s.one_b2 * g * g;
    float spread = v;
    j->v[i] = v;
    if (centered) {
        const float x = j->x[i] + j->s.one_b1 * (g - j->x[i]);
        j->x[i] = x;
        spread = v - x * x > 0 ? v - x * x : 0;
    }
    g /= sqrtf(spread) + j->s.eps;
    if (momentum) j->m[i] = g = j->m[i] * j->s.b1 + g;
    j->p[i] = j->p[i] * j->s.keep - j->s.step_size * g;
}

/* A part of a job of one rule, whose switches are constants of the compiler. */
#define ADAPTIVE_PART(name, one)                                                                                 \
    static void name(void *arg, int64_t part, int thread) {                                                      \
        const struct adaptive_job j = *(const struct adaptive_job *)arg;                                         \
        const int64_t lo = part * PART, hi = j.n - lo < PART ? j.n : lo + PART;                                  \
        int64_t i = lo;                                                                                          \
        (void)thread;                                                                                            \
        for (; i + LANES <= hi; i += LANES) _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) one(&j, i + l); \
        for (; i < hi; i++) one(&j, i);                                                                          \
    }
#define ADAM(j, i) adam_one(j, i, false)
#define AMSGRAD(j, i) adam_one(j, i, true)
#define RADAM(j, i) radam_one(j, i, true)
#define RADAM_EARLY(j, i) radam_one(j, i, false)
#define RMSPROP(j, i) rmsprop_one(j, i, (j)->x != NULL, (j)->m != NULL)
ADAPTIVE_PART(adam_part, ADAM)
ADAPTIVE_PART(amsgrad_part, AMSGRAD)
ADAPTIVE_PART(radam_part, RADAM)
ADAPTIVE_PART(radam_early_part, RADAM_EARLY)
ADAPTIVE_PART(rmsprop_part, RMSPROP)

int cpu_adaptive(struct dev *d, const struct adaptive_args *a) {
    struct adaptive_job j = {a->p.data, a->m.data, a->v.data, a->x.data, a->g.data, adaptive_scalars_of(a), tensor_count(a->p)};
    void (*part)(void *, int64_t, int) = rmsprop_part;
    if (a->rule == ADAPTIVE_ADAM) part = j.x ? amsgrad_part : adam_part;
    if (a->rule == ADAPTIVE_RADAM) part = j.s.rectify > 0 ? radam_part : radam_early_part;
    pool_run(cpu_of(d)->pool, parts_of(j.n), part, &j);
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
