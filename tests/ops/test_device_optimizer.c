/* test_device_optimizer.c - sum of squares, AdamW, the adaptive ones, linear combinations and 8-bit codes on every backend this
 * machine has, against ref, at lengths around vectors and blocks and from an odd place in a buffer. */
#include "ops/ops_test.h"

static struct backends backends;
static const int64_t LENGTHS[] = {1, 3, 4, 31, 1000, 1024, 8191, 70001, 2200003};

static float *scaled_normals(int64_t n, uint64_t seed, float scale, bool positive) {
    struct rng g = {.seed = seed, .stream = RNG_TEST};
    float *f = xmalloc((size_t)n * sizeof *f);
    for (int64_t i = 0; i < n; i++) {
        const float v = rng_normal(&g) * scale;
        f[i] = positive ? fabsf(v) : v;
    }
    return f;
}
/* n floats on the device, `off` floats into their buffer. */
static struct tensor place(struct run *r, const float *f, int64_t n, int64_t off) {
    struct tensor t = tensor_1d((float *)run_block(r, (size_t)(n + off) * 4) + off, DT_F32, n);
    run_copy_in(r, t.data, f, (size_t)n * 4);
    return t;
}

/* Sums of the segments [lo, hi) of n elements, f beginning with element `base`. */
static void sums_of(struct dev *d, const float *f, int64_t n, int64_t off, int64_t base, const int64_t (*seg)[2], int64_t n_seg,
                    double *sums) {
    struct run r = {.d = d};
    const size_t bytes = (size_t)n_seg * sizeof *sums;
    const struct tensor out = tensor_1d(run_block(&r, bytes), DT_F64, n_seg),
                        table = tensor_2d(run_block(&r, 2 * bytes), DT_I64, n_seg, 2);
    run_copy_in(&r, table.data, seg, 2 * bytes);
    if (dev_sumsq(d, out, place(&r, f, n, off), table, base) < 0) fail_msg("%s: %s", d->describe, err_msg());
    if (dev_copy_out(d, sums, out.data, bytes) < 0) fail_msg("%s: %s", d->describe, err_msg());
    run_free_blocks(&r);
}
/* Segments as a model's: cut at DEV_SEGMENT. */
enum { MAX_SEGMENTS = 64 };
static int64_t segments(int64_t n, int64_t seg[MAX_SEGMENTS][2]) {
    int64_t k = 0;
    for (int64_t at = 0; at < n; at += DEV_SEGMENT, k++) {
        seg[k][0] = at;
        seg[k][1] = n - at < DEV_SEGMENT ? n - at : DEV_SEGMENT;
    }
    return k;
}
static void test_sumsq(void **state) {
    (void)state;
    for (int64_t i = 0; i < COUNT(LENGTHS); i++) {
        const int64_t n = LENGTHS[i];
        int64_t seg[MAX_SEGMENTS][2];
        double want[MAX_SEGMENTS], got[MAX_SEGMENTS], part[MAX_SEGMENTS];
        const int64_t k = segments(n, seg), half = k / 2;
        float *f = scaled_normals(n, 3, 2, false);
        sums_of(&backends.dev[0], f, n, 0, 0, seg, k, want);
        for (int b = 1; b < backends.n; b++)
            for (int64_t off = 0; off < 2; off++) {
                sums_of(&backends.dev[b], f, n, off, 0, seg, k, got);
                for (int64_t s = 0; s < k; s++) /* additions in double, each off by at most 2^-53 of the sum */
                    if (!(fabs(got[s] - want[s]) <= want[s] * (double)seg[s][1] * 0x1p-52))
                        fail_msg("%s, %lld values: segment %lld: %.17g, ref has %.17g", backends.name[b], (long long)n,
                                 (long long)s, got[s], want[s]);
                /* a shard: the second half of the segments, in an array of its own at another place */
                const int64_t base = seg[half][0];
                sums_of(&backends.dev[b], f + base, n - base, 1 - off, base, seg + half, k - half, part);
                for (int64_t s = half; s < k; s++)
                    if (part[s - half] != got[s]) fail_msg("%s: segment %lld differs in a shard", backends.name[b], (long long)s);
            }
        f[n / 2] = INFINITY;
        const int64_t hit = n / 2 / DEV_SEGMENT;
        for (int b = 0; b < backends.n; b++) {
            sums_of(&backends.dev[b], f, n, 0, 0, seg, k, got);
            for (int64_t s = 0; s < k; s++) assert_true(s == hit ? isinf(got[s]) : isfinite(got[s]));
        }
        f[n - 1] = NAN;
        for (int b = 0; b < backends.n; b++) {
            sums_of(&backends.dev[b], f, n, 0, 0, seg, k, got);
            assert_true(isnan(got[k - 1]));
        }
        free(f);
    }
}

/* One more step, which leaves p rounded as well: what it leaves is p, rounded once. */
static void adamw_rounded(struct run *r, const struct adamw_args *a, enum dtype dt, int64_t off) {
    const int64_t n = a->p.dim[0];
    const size_t size = dtype_size(dt);
    const struct tensor rounded = tensor_1d((char *)run_block(r, (size_t)(n + off) * size) + (size_t)off * size, dt, n);
    float *p = xmalloc((size_t)n * 4);
    char *got = xmalloc((size_t)n * size);
    int rc = dev_adamw_round(r->d, a, rounded);
    if (rc == 0) rc = dev_copy_out(r->d, p, a->p.data, (size_t)n * 4);
    if (rc == 0) rc = dev_copy_out(r->d, got, rounded.data, (size_t)n * size);
    if (rc < 0) fail_msg("%s: %s", r->d->describe, err_msg());
    for (int64_t i = 0; i < n; i++) {
        const uint16_t half = f32_to_bf16(p[i]);
        assert_memory_equal(got + (size_t)i * size, dt == DT_BF16 ? (const void *)&half : (const void *)&p[i], size);
    }
    free(p);
    free(got);
}

/* Four steps; p, m, v after them in out (3, n). */
static void adamw_on(struct dev *d, float *const in[4], int64_t n, int64_t off, float *out) {
    struct run r = {.d = d};
    struct adamw_args a = {.p = place(&r, in[0], n, off),
                           .m = place(&r, in[1], n, off),
                           .v = place(&r, in[2], n, off),
                           .g = place(&r, in[3], n, off),
                           .lr = 1e-2,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .grad_scale = 0.7f};
    for (a.step = 1; a.step <= 2; a.step++)
        if (dev_adamw(d, &a) < 0) fail_msg("%s: %s", d->describe, err_msg());
    adamw_rounded(&r, &a, DT_BF16, off);
    a.step++;
    adamw_rounded(&r, &a, DT_F32, off);
    const struct tensor *t[] = {&a.p, &a.m, &a.v};
    for (int k = 0; k < 3; k++)
        if (dev_copy_out(d, out + k * n, t[k]->data, (size_t)n * 4) < 0) fail_msg("%s: %s", d->describe, err_msg());
    run_free_blocks(&r);
}
static void test_adamw(void **state) {
    (void)state;
    for (int64_t i = 0; i < COUNT(LENGTHS); i++) {
        const int64_t n = LENGTHS[i];
        float *in[4] = {scaled_normals(n, 4, 1, false), scaled_normals(n, 5, 0.1f, false), scaled_normals(n, 6, 0.1f, true),
                        scaled_normals(n, 7, 1, false)};
        float *want = xmalloc((size_t)n * 12), *got = xmalloc((size_t)n * 12);
        adamw_on(&backends.dev[0], in, n, 0, want);
        for (int b = 1; b < backends.n; b++)
            for (int64_t off = 0; off < 2; off++) {
                adamw_on(&backends.dev[b], in, n, off, got);
                for (int k = 0; k < 3; k++) { /* a fused product may round once less */
                    const double e = nmse(got + k * n, want + k * n, n, 0);
                    if (!(e <= 1e-12)) fail_msg("%s, %lld values: result %d has NMSE %.3g", backends.name[b], (long long)n, k, e);
                }
            }
        for (int k = 0; k < 4; k++) free(in[k]);
        free(want);
        free(got);
    }
}

/* ---- Adam, AMSGrad, RAdam, RMSprop ---- */

static const struct adaptive_kind {
    const char *name;
    enum adaptive_rule rule;
    bool m, x, coupled;
    float scale;
} ADAPTIVE[] = {
    {"AdamW", ADAPTIVE_ADAM, true, false, false, 0.7f},      {"Adam", ADAPTIVE_ADAM, true, false, true, -0.7f},
    {"AMSGrad", ADAPTIVE_ADAM, true, true, false, 0.7f},     {"RAdam", ADAPTIVE_RADAM, true, false, true, 0.7f},
    {"RMSprop", ADAPTIVE_RMSPROP, false, false, true, 0.7f}, {"with momentum", ADAPTIVE_RMSPROP, true, false, true, -0.7f},
    {"centered", ADAPTIVE_RMSPROP, false, true, true, 0.7f}, {"both", ADAPTIVE_RMSPROP, true, true, true, 0.7f},
};

/* Steps 1, 2 and 9, on both sides of RAdam's limit; p, m, v, x after them in out (4, n), what is not kept as it was. */
static void adaptive_on(struct dev *d, const struct adaptive_kind *k, float *const in[5], int64_t n, int64_t off, float *out) {
    struct run r = {.d = d};
    struct tensor t[5];
    for (int i = 0; i < 5; i++) t[i] = place(&r, in[i], n, off);
    struct adaptive_args a = {.rule = k->rule,
                              .p = t[0],
                              .m = k->m ? t[1] : TENSOR_NONE,
                              .v = t[2],
                              .x = k->x ? t[3] : TENSOR_NONE,
                              .g = t[4],
                              .lr = 1e-2,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .weight_decay = 0.1,
                              .coupled = k->coupled,
                              .grad_scale = k->scale};
    static const int64_t steps[] = {1, 2, 9};
    for (int64_t i = 0; i < COUNT(steps); i++) {
        a.step = steps[i];
        if (dev_adaptive(d, &a) < 0) fail_msg("%s: %s", d->describe, err_msg());
    }
    for (int i = 0; i < 4; i++)
        if (dev_copy_out(d, out + i * n, t[i].data, (size_t)n * 4) < 0) fail_msg("%s: %s", d->describe, err_msg());
    run_free_blocks(&r);
}

/* AdamW by this op: the bits of the op of its own. */
static void adaptive_is_adamw(struct dev *d, float *const in[5], int64_t n, const float *got) {
    struct run r = {.d = d};
    float *want = xmalloc((size_t)n * 4);
    struct adamw_args a = {.p = place(&r, in[0], n, 0),
                           .m = place(&r, in[1], n, 0),
                           .v = place(&r, in[2], n, 0),
                           .g = place(&r, in[4], n, 0),
                           .lr = 1e-2,
                           .beta1 = 0.9,
                           .beta2 = 0.99,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .grad_scale = 0.7f};
    static const int64_t steps[] = {1, 2, 9};
    for (int64_t i = 0; i < COUNT(steps); i++) {
        a.step = steps[i];
        if (dev_adamw(d, &a) < 0) fail_msg("%s: %s", d->describe, err_msg());
    }
    if (dev_copy_out(d, want, a.p.data, (size_t)n * 4) < 0) fail_msg("%s: %s", d->describe, err_msg());
    assert_memory_equal(got, want, (size_t)n * 4);
    run_free_blocks(&r);
    free(want);
}

static void check_adaptive(const struct adaptive_kind *k, float *const in[5], int64_t n) {
    float *want = xmalloc((size_t)n * 16), *got = xmalloc((size_t)n * 16);
    adaptive_on(&backends.dev[0], k, in, n, 0, want);
    if (k == &ADAPTIVE[0]) adaptive_is_adamw(&backends.dev[0], in, n, want);
    for (int b = 1; b < backends.n; b++)
        for (int64_t off = 0; off < 2; off++) {
            adaptive_on(&backends.dev[b], k, in, n, off, got);
            for (int i = 0; i < 4; i++) { /* a fused product may round once less */
                const double e = nmse(got + i * n, want + i * n, n, 0);
                if (!(e <= 1e-12))
                    fail_msg("%s, %s, %lld values: result %d has NMSE %.3g", k->name, backends.name[b], (long long)n, i, e);
            }
            if (strcmp(backends.name[b], "cuda") == 0) assert_memory_equal(got, want, (size_t)n * 16); /* it spells its roundings */
        }
    free(want);
    free(got);
}

static void test_adaptive(void **state) {
    (void)state;
    for (int64_t i = 0; i < COUNT(LENGTHS); i++) {
        const int64_t n = LENGTHS[i];
        float *in[5] = {scaled_normals(n, 4, 1, false), scaled_normals(n, 5, 0.1f, false), scaled_normals(n, 6, 0.1f, true),
                        scaled_normals(n, 8, 0.1f, true), scaled_normals(n, 7, 1, false)};
        for (int64_t e = 0; e < n; e++) in[2][e] += in[3][e] * in[3][e]; /* a variance is not below 0 */
        for (int64_t k = 0; k < COUNT(ADAPTIVE); k++) check_adaptive(&ADAPTIVE[k], in, n);
        for (int k = 0; k < 5; k++) free(in[k]);
    }
}

/* A mean of squares that rounding has left below the squared mean divides by eps alone: no NaN. */
static void test_centered_without_spread(void **state) {
    (void)state;
    for (int b = 0; b < backends.n; b++) {
        struct run r = {.d = &backends.dev[b]};
        float one[5] = {1, 1, 1, 1, 1}, below[5], got[5];
        for (int i = 0; i < 5; i++) below[i] = 0.999f;
        const struct tensor p = place(&r, one, 5, 0);
        const struct adaptive_args a = {.rule = ADAPTIVE_RMSPROP,
                                        .p = p,
                                        .v = place(&r, below, 5, 0),
                                        .x = place(&r, one, 5, 0),
                                        .g = place(&r, one, 5, 0),
                                        .lr = 1e-3,
                                        .beta2 = 0.99,
                                        .eps = 1e-2,
                                        .grad_scale = 1,
                                        .step = 1};
        if (dev_adaptive(r.d, &a) < 0 || dev_copy_out(r.d, got, p.data, sizeof got) < 0) fail_msg("%s", err_msg());
        for (int i = 0; i < 5; i++) assert_true(fabsf(got[i] - 0.9f) < 1e-6f);
        run_free_blocks(&r);
    }
}

/* Definitions that leave nothing open: the bits are ref's, wherever the arrays begin. */
static void flat_on(struct dev *d, const float *x, const float *y, const float *book, int64_t n, int64_t off, float *out,
                    uint8_t *codes) {
    struct run r = {.d = d};
    const int64_t blocks = (n + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK;
    const struct tensor tx = place(&r, x, n, off), ty = place(&r, y, n, off);
    const struct quant8_args q = {.x = tx,
                                  .code = tensor_1d((uint8_t *)run_block(&r, (size_t)(n + off)) + off, DT_U8, n),
                                  .scale = place(&r, x, blocks, off),
                                  .book = place(&r, book, 256, 0)};
    int rc = dev_axpby(d, ty, 0.3f, tx, -1.7f);
    if (rc == 0) rc = dev_copy_out(d, out, ty.data, (size_t)n * 4);
    if (rc == 0) rc = dev_axpby(d, ty, 1.1f, ty, 0); /* in place; y is not read */
    if (rc == 0) rc = dev_copy_out(d, out + n, ty.data, (size_t)n * 4);
    if (rc == 0) rc = dev_quant8(d, &q);
    if (rc == 0) rc = dev_zero(d, tx.data, (size_t)n * 4);
    if (rc == 0) rc = dev_dequant8(d, &q);
    if (rc == 0) rc = dev_copy_out(d, out + 2 * n, tx.data, (size_t)n * 4);
    if (rc == 0) rc = dev_copy_out(d, out + 3 * n, q.scale.data, (size_t)blocks * 4);
    if (rc == 0) rc = dev_copy_out(d, codes, q.code.data, (size_t)n);
    if (rc < 0) fail_msg("%s: %s", d->describe, err_msg());
    run_free_blocks(&r);
}
static void test_combinations_and_codes(void **state) {
    (void)state;
    float book[256];
    for (int i = 0; i < 256; i++) book[i] = (float)(i - 127) * (float)abs(i - 127) / (128.0f * 128.0f);
    for (int64_t i = 0; i < COUNT(LENGTHS); i++) {
        const int64_t n = LENGTHS[i], all = 3 * n + (n + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK;
        float *x = scaled_normals(n, 8, 1, false), *y = scaled_normals(n, 9, 1, false);
        float *want = xmalloc((size_t)all * 4), *got = xmalloc((size_t)all * 4);
        uint8_t *want_codes = xmalloc((size_t)n), *codes = xmalloc((size_t)n);
        flat_on(&backends.dev[0], x, y, book, n, 0, want, want_codes);
        for (int b = 1; b < backends.n; b++)
            for (int64_t off = 0; off < 2; off++) {
                flat_on(&backends.dev[b], x, y, book, n, off, got, codes);
                for (int64_t k = 0; k < all; k++)
                    if (memcmp(&got[k], &want[k], 4) != 0)
                        fail_msg("%s, %lld values from place %lld: result %lld is %.9g, ref has %.9g", backends.name[b],
                                 (long long)n, (long long)off, (long long)k, (double)got[k], (double)want[k]);
                assert_memory_equal(codes, want_codes, (size_t)n);
            }
        free(x);
        free(y);
        free(want);
        free(got);
        free(want_codes);
        free(codes);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sumsq), cmocka_unit_test(test_adamw), cmocka_unit_test(test_adaptive),
                                       cmocka_unit_test(test_centered_without_spread),
                                       cmocka_unit_test(test_combinations_and_codes)};
    backends_open(&backends, 2);
    const int failed = cmocka_run_group_tests_name("ops: optimizer", tests, NULL, NULL);
    backends_close(&backends);
    return failed;
}
