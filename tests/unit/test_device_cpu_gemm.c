/* test_device_cpu_gemm.c - the CPU backend's GEMMs, packing and optimizer ops on every instruction
 * set this machine has: agreement with the ref backend, and batch invariance
 * across M, threads and column ranges.  The rest of the backend is
 * tested with the other backends in tests/ops. */
#include "base/rng.h"
#include "device/cpu/cpu_int.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define OK(call)                                       \
    do {                                               \
        if ((call) < 0) {                              \
            print_error("%s: %s\n", #call, err_msg()); \
            fail();                                    \
        }                                              \
    } while (0)

static struct rng g_rng = {.seed = 7, .stream = RNG_TEST};

/* Random values on the host; both CPU backends take host pointers. The caller frees. */
static struct tensor random_tensor(enum dtype dt, int64_t r, int64_t c) {
    void *p = malloc((size_t)(r * c + 1) * dtype_size(dt));
    assert_non_null(p);
    for (int64_t i = 0; i < r * c; i++) {
        const float v = rng_normal(&g_rng);
        if (dt == DT_BF16) ((uint16_t *)p)[i] = f32_to_bf16(v);
        else ((float *)p)[i] = v;
    }
    return tensor_2d(p, dt, r, c);
}
static struct tensor copy_tensor(struct tensor t) {
    const size_t n = (size_t)tensor_count(t) * dtype_size(t.dt);
    void *p = malloc(n + 1);
    assert_non_null(p);
    memcpy(p, t.data, n);
    t.data = p;
    return t;
}
static float at(struct tensor t, int64_t i) {
    return t.dt == DT_BF16 ? bf16_to_f32(((uint16_t *)t.data)[i]) : ((float *)t.data)[i];
}
static struct weight pack(struct dev *d, struct tensor src) {
    struct weight w = {NULL, src.dt, src.dim[0], src.dim[1], 0, 0};
    OK(dev_alloc(d, dev_weight_bytes(d, w.dt, w.n, w.k), &w.data));
    memset(w.data, 0xff, dev_weight_bytes(d, w.dt, w.n, w.k)); /* NaN: padding must be written */
    OK(dev_weight_pack(d, w, src));
    return w;
}
static void unpack_free(struct dev *d, struct weight w) { dev_free(d, w.data, dev_weight_bytes(d, w.dt, w.n, w.k)); }
static struct tensor vec(struct tensor row) { return tensor_1d(row.data, row.dt, row.dim[1]); }

/* A sum of r products of unit normals is about sqrt(r) and its f32 chain errs by
 * about sqrt(r) eps of that; twice that for the largest of many. A bf16 result that
 * falls on the other side of a rounding boundary differs by 2^-7. */
static void assert_near(struct tensor a, struct tensor b, int64_t r, const char *what) {
    for (int64_t i = 0, n = tensor_count(a); i < n; i++) {
        const double x = at(a, i), y = at(b, i);
        const double tol = 2.4e-7 * (double)r + fabs(y) * (a.dt == DT_BF16 ? 1.0 / 128 : 2.4e-7);
        if (!(fabs(x - y) <= tol)) {
            print_error("%s: element %lld: %.9g, expected %.9g (r = %lld)\n", what, (long long)i, x, y, (long long)r);
            fail();
        }
    }
}

/* Rows, outputs, inputs: below, at and above every block size of every set. */
static const int64_t shapes[][3] = {
    {1, 1, 1},    {1, 33, 31},   {2, 64, 64},   {3, 100, 70},   {5, 31, 257},    {14, 96, 512},
    {15, 65, 33}, {29, 128, 96}, {33, 40, 300}, {64, 257, 600}, {130, 70, 1100}, {300, 550, 90},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void check_products(struct dev *ref, struct dev *cpu, enum dtype act) {
    for (int s = 0; s < N_SHAPES; s++) {
        const int64_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
        struct tensor src = random_tensor(act, n, k), x = random_tensor(act, m, k);
        struct tensor dy = random_tensor(act, m, n), bias = random_tensor(act, 1, n);
        struct weight wr = pack(ref, src), wc = pack(cpu, src);
        char what[128];
        /* output act or f32, bias, add; of the large ones two, since ref is slow */
        for (int mode = 0; mode<6; mode += m * n * k> 1000000 ? 4 : 1) {
            const bool add = mode >= 4, has_bias = mode % 2;
            const enum dtype dt = mode < 2 ? act : DT_F32;
            struct tensor yr = random_tensor(dt, m, n), yc = copy_tensor(yr);
            const struct tensor b = has_bias ? vec(bias) : TENSOR_NONE;
            OK(dev_matmul_fwd(ref, yr, x, wr, b, add));
            OK(dev_matmul_fwd(cpu, yc, x, wc, b, add));
            snprintf(what, sizeof what, "%s fwd %s mode %d", cpu->describe, dtype_name(act), mode);
            assert_near(yc, yr, k, what);
            free(yr.data);
            free(yc.data);
            if (has_bias) continue;
            struct tensor dxr = random_tensor(dt, m, k), dxc = copy_tensor(dxr);
            OK(dev_matmul_dx(ref, dxr, dy, wr, add));
            OK(dev_matmul_dx(cpu, dxc, dy, wc, add));
            snprintf(what, sizeof what, "%s dx %s mode %d", cpu->describe, dtype_name(act), mode);
            assert_near(dxc, dxr, n, what);
            free(dxr.data);
            free(dxc.data);
        }
        struct tensor dwr = random_tensor(DT_F32, n, k), dwc = copy_tensor(dwr);
        struct tensor dbr = random_tensor(DT_F32, 1, n), dbc = copy_tensor(dbr);
        OK(dev_matmul_dw(ref, dwr, vec(dbr), dy, x, true));
        OK(dev_matmul_dw(cpu, dwc, vec(dbc), dy, x, true));
        snprintf(what, sizeof what, "%s dw %s", cpu->describe, dtype_name(act));
        assert_near(dwc, dwr, m, what);
        assert_near(dbc, dbr, m, what);
        OK(dev_matmul_dw(cpu, dwc, TENSOR_NONE, dy, x, true)); /* without db */
        OK(dev_matmul_dw(ref, dwr, TENSOR_NONE, dy, x, true));
        assert_near(dwc, dwr, 2 * m, what);
        OK(dev_matmul_dw(ref, dwr, vec(dbr), dy, x, false));
        OK(dev_matmul_dw(cpu, dwc, vec(dbc), dy, x, false));
        assert_near(dwc, dwr, m, what);
        assert_near(dbc, dbr, m, what);
        unpack_free(ref, wr);
        unpack_free(cpu, wc);
        for (int i = 0; i < 8; i++)
            free((void *[]){src.data, x.data, dy.data, bias.data, dwr.data, dwc.data, dbr.data, dbc.data}[i]);
    }
}

/* Each row alone, in other batches, at other offsets and with other numbers of
 * threads has the bits it has in the whole; so has each column range. */
static void check_bits(const char *isa, enum dtype act) {
    const int64_t m = 120, n = 200, k = 700;
    static const int64_t cuts[] = {1, 3, 7, 13, 14, 15, 16, 17, 28, 33, 119};
    struct tensor src = random_tensor(act, n, k), x = random_tensor(act, m, k);
    struct tensor dy = random_tensor(act, m, n);
    struct tensor y = random_tensor(DT_F32, m, n), dx = random_tensor(DT_F32, m, k);
    struct tensor dw = random_tensor(DT_F32, n, k), dw0 = copy_tensor(dw);
    struct tensor y2 = copy_tensor(y), dx2 = copy_tensor(dx);
    const int threads[] = {1, 2, 5};
    for (int t = 0; t < 3; t++) {
        struct dev d;
        OK(dev_open_cpu(&d, threads[t], isa));
        struct weight w = pack(&d, src);
        if (t == 0) {
            OK(dev_matmul_fwd(&d, y, x, w, TENSOR_NONE, false));
            OK(dev_matmul_dx(&d, dx, dy, w, false));
            OK(dev_matmul_dw(&d, dw, TENSOR_NONE, dy, x, true));
        }
        struct tensor dw2 = copy_tensor(dw0);
        OK(dev_matmul_dw(&d, dw2, TENSOR_NONE, dy, x, true));
        assert_memory_equal(dw2.data, dw.data, (size_t)(n * k) * 4);
        free(dw2.data);
        for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c += t ? 3 : 1) {
            memset(y2.data, 0, (size_t)(m * n) * 4);
            memset(dx2.data, 0, (size_t)(m * k) * 4);
            for (int64_t r = 0; r < m; r += cuts[c]) { /* blocks of cuts[c] rows */
                const int64_t rows = m - r < cuts[c] ? m - r : cuts[c];
                OK(dev_matmul_fwd(&d, tensor_rows(y2, r, rows), tensor_rows(x, r, rows), w, TENSOR_NONE, false));
                OK(dev_matmul_dx(&d, tensor_rows(dx2, r, rows), tensor_rows(dy, r, rows), w, false));
            }
            assert_memory_equal(y2.data, y.data, (size_t)(m * n) * 4);
            assert_memory_equal(dx2.data, dx.data, (size_t)(m * k) * 4);
        }
        /* columns, as the LM head takes them; rows few and many */
        for (int64_t rows = 3; rows <= m; rows += m - 3) {
            float *cols = malloc((size_t)(m * 80) * 4);
            assert_non_null(cols);
            for (int64_t n0 = 0; n0 < n; n0 += 64) {
                const int64_t n1 = n0 + 64 < n ? n0 + 64 : n;
                OK(cpu_matmul_cols(cpu_of(&d), tensor_2d(cols, DT_F32, rows, 80), tensor_rows(x, 0, rows), &w, n0, n1));
                for (int64_t r = 0; r < rows; r++)
                    assert_memory_equal(cols + r * 80, (float *)y.data + r * n + n0, (size_t)(n1 - n0) * 4);
            }
            free(cols);
        }
        unpack_free(&d, w);
        dev_close(&d);
    }
    for (int i = 0; i < 9; i++)
        free((void *[]){src.data, x.data, dy.data, y.data, dx.data, dw.data, dw0.data, y2.data, dx2.data}[i]);
}

/* dx summed over column ranges of the weight is dx, up to the order of adding. */
static void check_dx_cols(struct dev *d, enum dtype act) {
    const int64_t m = 40, n = 150, k = 90;
    struct tensor src = random_tensor(act, n, k), dy = random_tensor(act, m, n);
    struct tensor whole = random_tensor(DT_F32, m, k), sum = copy_tensor(whole);
    struct weight w = pack(d, src);
    OK(dev_matmul_dx(d, whole, dy, w, true));
    for (int64_t n0 = 0; n0 < n; n0 += 64) {
        const int64_t nn = n - n0 < 64 ? n - n0 : 64;
        struct tensor dz = random_tensor(act, m, nn);
        for (int64_t r = 0; r < m; r++)
            memcpy((char *)dz.data + (size_t)(r * nn) * dtype_size(act), (char *)dy.data + (size_t)(r * n + n0) * dtype_size(act),
                   (size_t)nn * dtype_size(act));
        OK(cpu_matmul_dx_cols(cpu_of(d), sum.data, dz, &w, n0, n0 + nn));
        free(dz.data);
    }
    assert_near(sum, whole, n, "dx of column ranges");
    unpack_free(d, w);
    for (int i = 0; i < 4; i++) free((void *[]){src.data, dy.data, whole.data, sum.data}[i]);
}

static void each_isa(void (*fn)(struct dev *ref, struct dev *cpu, enum dtype act)) {
    struct dev ref;
    OK(dev_open_ref(&ref));
    for (int i = 0; i < CPU_N_ISA; i++) {
        if (!cpu_isa_available((enum cpu_isa_id)i)) continue;
        struct dev d;
        OK(dev_open_cpu(&d, 3, cpu_isa_name((enum cpu_isa_id)i)));
        fn(&ref, &d, DT_F32);
        fn(&ref, &d, DT_BF16);
        dev_close(&d);
    }
    dev_close(&ref);
}

static void test_products(void **s) {
    (void)s;
    each_isa(check_products);
}
static void run_dx_cols(struct dev *ref, struct dev *cpu, enum dtype act) {
    (void)ref;
    check_dx_cols(cpu, act);
}
static void test_dx_cols(void **s) {
    (void)s;
    each_isa(run_dx_cols);
}
static void test_bits(void **s) {
    (void)s;
    for (int i = 0; i < CPU_N_ISA; i++) {
        if (!cpu_isa_available((enum cpu_isa_id)i)) continue;
        check_bits(cpu_isa_name((enum cpu_isa_id)i), DT_F32);
        check_bits(cpu_isa_name((enum cpu_isa_id)i), DT_BF16);
    }
}

/* Several bands, cache blocks and units: a training-sized GEMM against ref. */
static void test_large(void **s) {
    (void)s;
    struct dev ref, d;
    OK(dev_open_ref(&ref));
    OK(dev_open_cpu(&d, 2, NULL));
    const int64_t m = 24, n = 400, k = 9000, big = 1800;
    struct tensor src = random_tensor(DT_BF16, n, k), x = random_tensor(DT_BF16, big, k);
    struct weight wr = pack(&ref, tensor_rows(src, 0, n)), wc = pack(&d, src);
    struct tensor yc = random_tensor(DT_F32, big, n), yr = random_tensor(DT_F32, m, n);
    OK(dev_matmul_fwd(&d, yc, x, wc, TENSOR_NONE, false)); /* 16 MiB of packed rows hold 465 rows */
    for (int64_t r = 0; r + m <= big; r += 584) {
        OK(dev_matmul_fwd(&ref, yr, tensor_rows(x, r, m), wr, TENSOR_NONE, false));
        assert_near(tensor_rows(yc, r, m), yr, k, "large fwd");
    }
    unpack_free(&ref, wr);
    unpack_free(&d, wc);
    for (int i = 0; i < 4; i++) free((void *[]){src.data, x.data, yc.data, yr.data}[i]);
    dev_close(&ref);
    dev_close(&d);
}

static void check_weights(struct dev *ref, struct dev *cpu, enum dtype act) {
    (void)ref;
    for (int s = 0; s < N_SHAPES; s++) {
        struct tensor src = random_tensor(DT_F32, shapes[s][1], shapes[s][2]);
        const int64_t n = src.dim[0], k = src.dim[1];
        ((float *)src.data)[0] = NAN; /* stays NaN */
        if (n * k > 3) {
            ((float *)src.data)[1] = -INFINITY;
            ((float *)src.data)[2] = 1.00390625f; /* half way between two bf16: to even */
            ((float *)src.data)[3] = 3.4e38f;     /* rounds to infinity */
        }
        struct tensor rounded = random_tensor(act, n, k), back = random_tensor(act, n, k);
        struct tensor wide = random_tensor(DT_F32, n, k);
        for (int64_t i = 0; i < n * k; i++) {
            if (act == DT_BF16) ((uint16_t *)rounded.data)[i] = f32_to_bf16(((float *)src.data)[i]);
            else ((float *)rounded.data)[i] = ((float *)src.data)[i];
        }
        for (int from = 0; from < 2; from++) { /* from f32 (rounding), from act */
            struct weight w = {NULL, act, n, k, 0, 0};
            OK(dev_alloc(cpu, dev_weight_bytes(cpu, act, n, k), &w.data));
            OK(dev_weight_pack(cpu, w, from ? rounded : src));
            OK(dev_weight_unpack(cpu, back, w));
            OK(dev_weight_unpack(cpu, wide, w));
            assert_memory_equal(back.data, rounded.data, (size_t)(n * k) * dtype_size(act));
            for (int64_t i = 1; i < n * k; i++) assert_true(at(wide, i) == at(rounded, i));
            assert_true(isnan(at(wide, 0)));
            /* embedding reads the same rows */
            int32_t ids[3] = {(int32_t)(n - 1), 0, (int32_t)(n / 2)};
            struct tensor e = random_tensor(DT_F32, 3, k);
            OK(dev_embed_fwd(cpu, e, tensor_1d(ids, DT_I32, 3), w));
            for (int r = 0; r < 3; r++)
                assert_memory_equal((float *)e.data + r * k, (float *)wide.data + ids[r] * k, (size_t)k * 4);
            free(e.data);
            unpack_free(cpu, w);
        }
        for (int i = 0; i < 4; i++) free((void *[]){src.data, rounded.data, back.data, wide.data}[i]);
    }
}
static void test_weights(void **s) {
    (void)s;
    each_isa(check_weights);
}

/* Flat ops: bits equal for every number of threads; AdamW's equal to ref's. */
static void test_flat(void **s) {
    (void)s;
    const int64_t n = 200003;
    struct tensor x = random_tensor(DT_F32, 1, n);
    x = vec(x);
    double first = 0, exact = 0;
    for (int64_t i = n - DEV_SEGMENT; i < n; i++) exact += (double)at(x, i) * at(x, i);
    struct dev ref;
    OK(dev_open_ref(&ref));
    struct tensor p0 = random_tensor(DT_F32, 1, n), m0 = random_tensor(DT_F32, 1, n);
    struct tensor v0 = random_tensor(DT_F32, 1, n);
    for (int64_t i = 0; i < n; i++) ((float *)v0.data)[i] = fabsf(((float *)v0.data)[i]);
    struct tensor pr = copy_tensor(p0), mr = copy_tensor(m0), vr = copy_tensor(v0);
    struct adamw_args a = {.p = vec(pr),
                           .m = vec(mr),
                           .v = vec(vr),
                           .g = x,
                           .lr = 1e-3,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .weight_decay = 0.01,
                           .grad_scale = 0.5f,
                           .step = 3};
    OK(dev_adamw(&ref, &a));
    for (int t = 1; t <= 4; t++) {
        struct dev d;
        OK(dev_open_cpu(&d, t, NULL));
        int64_t segment[] = {n - DEV_SEGMENT, DEV_SEGMENT};
        const struct tensor table = tensor_2d(segment, DT_I64, 1, 2);
        double sum = 0;
        OK(dev_sumsq(&d, tensor_1d(&sum, DT_F64, 1), x, table, 0));
        if (t == 1) first = sum;
        assert_true(sum == first);
        assert_true(fabs(sum - exact) <= 1e-12 * exact); /* doubles: n eps at most */
        struct tensor pc = copy_tensor(p0), mc = copy_tensor(m0), vc = copy_tensor(v0);
        a.p = vec(pc);
        a.m = vec(mc);
        a.v = vec(vc);
        OK(dev_adamw(&d, &a));
        assert_memory_equal(pc.data, pr.data, (size_t)n * 4);
        assert_memory_equal(mc.data, mr.data, (size_t)n * 4);
        assert_memory_equal(vc.data, vr.data, (size_t)n * 4);
        for (int i = 0; i < 3; i++) free((void *[]){pc.data, mc.data, vc.data}[i]);
        /* NaN and Inf are seen */
        struct tensor bad = copy_tensor(x);
        ((float *)bad.data)[n - 1] = INFINITY;
        OK(dev_sumsq(&d, tensor_1d(&sum, DT_F64, 1), bad, table, 0));
        assert_true(isinf(sum));
        ((float *)bad.data)[n - 777] = NAN;
        OK(dev_sumsq(&d, tensor_1d(&sum, DT_F64, 1), bad, table, 0));
        assert_true(isnan(sum));
        free(bad.data);
        dev_close(&d);
    }
    dev_close(&ref);
    for (int i = 0; i < 7; i++) free((void *[]){x.data, p0.data, m0.data, v0.data, pr.data, mr.data, vr.data}[i]);
}

/* Copies of every alignment and overlap, and large ones over several parts. */
static void test_memory(void **s) {
    (void)s;
    struct dev d;
    OK(dev_open_cpu(&d, 3, NULL));
    const size_t n = (5u << 20) + 123;
    void *a, *b;
    OK(dev_alloc(&d, n, &a));
    OK(dev_alloc(&d, n, &b));
    assert_int_equal((uintptr_t)a % 256, 0);
    for (size_t i = 0; i < n; i++) ((uint8_t *)a)[i] = (uint8_t)(i * 7 + i / 251);
    OK(dev_copy(&d, b, a, n));
    assert_memory_equal(a, b, n);
    OK(dev_copy(&d, (char *)b + 1000, b, n - 1000)); /* overlapping, up */
    assert_memory_equal((char *)b + 1000, a, n - 1000);
    OK(dev_zero(&d, (char *)b + 1, n - 1));
    for (size_t i = 1; i < n; i++) assert_int_equal(((uint8_t *)b)[i], 0);
    dev_free(&d, a, n);
    dev_free(&d, b, n);
    void *huge;
    assert_int_equal(dev_alloc(&d, (size_t)1 << 60, &huge), ERR_NOMEM);
    dev_close(&d);
}

static void test_open(void **s) {
    (void)s;
    struct dev d;
    assert_int_equal(dev_open_cpu(&d, 1, "sse9"), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "sse9"));
    if (!cpu_isa_available(CPU_ISA_AMX)) assert_int_equal(dev_open_cpu(&d, 1, "amx"), ERR_UNSUPPORTED);
    OK(dev_open_cpu(&d, 2, NULL));
    assert_non_null(strstr(d.describe, "2 threads"));
    print_message("%s\n", d.describe);
    dev_close(&d);
    setenv("VERLC_ISA", "c", 1);
    OK(dev_open_cpu(&d, 2, NULL));
    unsetenv("VERLC_ISA");
    assert_string_equal(d.describe, "cpu: 2 threads, c");
    dev_close(&d);
}

/* Memory for the probe of the instruction sets, and the choices of one thread. */
enum { CHOICES = 6, CHOOSERS = 8 };
struct chooser {
    pthread_t thread;
    void *mem;
    enum cpu_isa_id chosen[CHOICES];
};
static void *choose(void *arg) {
    struct chooser *c = arg;
    for (int i = 0; i < CHOICES; i++) c->chosen[i] = cpu_isa_fastest(c->mem);
    return NULL;
}

/* Processes that start beside many others on the same cores choose alike. */
static void test_choice(void **state) {
    (void)state;
    struct chooser c[CHOOSERS] = {0};
    for (int t = 0; t < CHOOSERS; t++) {
        c[t].mem = cpu_pages_alloc(CPU_THREAD_BYTES);
        assert_non_null(c[t].mem);
        assert_int_equal(pthread_create(&c[t].thread, NULL, choose, &c[t]), 0);
    }
    for (int t = 0; t < CHOOSERS; t++) pthread_join(c[t].thread, NULL);
    for (int t = 0; t < CHOOSERS; t++) {
        for (int i = 0; i < CHOICES; i++) assert_int_equal(c[t].chosen[i], c[0].chosen[0]);
        cpu_pages_free(c[t].mem, CPU_THREAD_BYTES);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),     cmocka_unit_test(test_memory),  cmocka_unit_test(test_weights),
        cmocka_unit_test(test_products), cmocka_unit_test(test_dx_cols), cmocka_unit_test(test_bits),
        cmocka_unit_test(test_large),    cmocka_unit_test(test_flat),    cmocka_unit_test(test_choice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
