/* test_device_cpu_kernels.c - the kernels behind the cpu backend's attention, head and row ops, one by one:
 * exp against libm, tables of different instruction sets against each other, the
 * straight-from-bf16 path of decoding against the tile path, and sums that must not
 * depend on where an array ends.  The ops as a whole are compared with ref in tests/ops. */
#include "device/cpu/kernels.h"

#include "base/rng.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TILE = DEV_KEY_TILE, MAX_DIM = 128 };

struct table {
    const char *name;
    const struct cpu_kern *k;
};
static struct table tables[3];
static int n_tables;

static int find_tables(void **state) {
    (void)state;
    tables[n_tables++] = (struct table){"c", &cpu_kern_c};
#if defined(__x86_64__)
    if (cpu_isa_available(CPU_ISA_AVX2)) tables[n_tables++] = (struct table){"avx2", &cpu_kern_avx2};
    if (cpu_isa_available(CPU_ISA_AVX512)) tables[n_tables++] = (struct table){"avx512", &cpu_kern_avx512};
#endif
    pool_set_fp_mode();
    return 0;
}

static void fill(float *x, int64_t n, float scale, uint64_t seed) {
    struct rng r = {.seed = seed, .stream = RNG_TEST};
    for (int64_t i = 0; i < n; i++) x[i] = scale * rng_normal(&r);
}
static void fill_bf16(uint16_t *x, int64_t n, uint64_t seed) {
    struct rng r = {.seed = seed, .stream = RNG_TEST};
    for (int64_t i = 0; i < n; i++) x[i] = f32_to_bf16(rng_normal(&r));
}

/* ---- exp ---- */

static void test_exp(void **state) {
    (void)state;
    for (int t = 0; t < n_tables; t++) {
        double worst = 0;
        for (float x = -87; x < 88; x += 0.0009765f) {
            float e;
            tables[t].k->head_exp(&e, &x, 1, 1, 0);
            const double want = exp((double)x), ulp = ldexp(1, ilogb(want) - 23);
            const double err = fabs((double)e - want) / ulp;
            if (err > worst) worst = err;
        }
        print_message("%-6s exp: at most %.2f ulp from libm over [-87, 88)\n", tables[t].name, worst);
        assert_true(worst <= 1); /* what device/cpu/vec.h promises */
        const float ends[] = {0, -INFINITY, -88, 1000, NAN};
        float e[5];
        tables[t].k->head_exp(e, ends, 5, 1, 0);
        assert_true(e[0] == 1 && e[1] == 0 && e[2] == 0 && isinf(e[3]) && isnan(e[4]));
    }
}

/* ---- attention: the path of decoding against the path of blocks ---- */

struct fixture {
    int64_t rows, dim, n_keys;
    uint16_t k[TILE * MAX_DIM], v[TILE * MAX_DIM];
    float q[CPU_ATTN_DECODE_ROWS * MAX_DIM];
    int32_t pos[CPU_ATTN_DECODE_ROWS];
};
struct result {
    float acc[CPU_ATTN_DECODE_ROWS * MAX_DIM], max[CPU_ATTN_DECODE_ROWS], sum[CPU_ATTN_DECODE_ROWS];
};

static struct cpu_attn_tile tile_of(struct fixture *f, struct result *r, int64_t key0, int64_t window) {
    memset(r, 0, sizeof *r);
    for (int64_t i = 0; i < f->rows; i++) {
        f->pos[i] = (int32_t)(key0 + f->n_keys - 1);
        r->max[i] = -FLT_MAX;
    }
    return (struct cpu_attn_tile){.rows = f->rows,
                                  .group = f->rows,
                                  .dim = f->dim,
                                  .pos = f->pos,
                                  .key0 = key0,
                                  .n_keys = f->n_keys,
                                  .window = window,
                                  .scale = 0.125f,
                                  .q = f->q,
                                  .acc = r->acc,
                                  .max = r->max,
                                  .sum = r->sum};
}
static void run_block(const struct cpu_kern *k, struct fixture *f, struct result *r, int64_t window) {
    static float kt[MAX_DIM * TILE], v[TILE * MAX_DIM];
    struct cpu_attn_tile t = tile_of(f, r, 2 * TILE, window);
    for (int g = 0; g < TILE / 16; g++) k->pack_kt(kt + g * 16, f->k + g * 16 * f->dim, DT_BF16, f->dim);
    k->widen(v, f->v, DT_BF16, TILE, f->dim);
    t.kt = kt;
    t.v = v;
    k->attn_fwd(&t);
}
static void run_thin(const struct cpu_kern *k, struct fixture *f, struct result *r, int64_t window) {
    struct cpu_attn_tile t = tile_of(f, r, 2 * TILE, window);
    for (int g = 0; g < TILE / 16; g++) {
        t.k_rows[g] = t.k_next[g] = f->k + g * 16 * f->dim;
        t.v_rows[g] = t.v_next[g] = f->v + g * 16 * f->dim;
    }
    k->attn_decode(&t);
}

static void test_thin_equals_block(void **state) {
    (void)state;
    static struct fixture f;
    static struct result a, b;
    fill_bf16(f.k, TILE * MAX_DIM, 1);
    fill_bf16(f.v, TILE * MAX_DIM, 2);
    fill(f.q, CPU_ATTN_DECODE_ROWS * MAX_DIM, 1, 3);
    int n = 0;
    for (int t = 0; t < n_tables; t++)
        for (f.dim = 32; f.dim <= MAX_DIM; f.dim += 32)
            for (f.rows = 1; f.rows <= CPU_ATTN_DECODE_ROWS; f.rows++)
                for (f.n_keys = 1; f.n_keys <= TILE; f.n_keys += 7)
                    for (int64_t window = 0; window <= 20; window += 20) {
                        run_block(tables[t].k, &f, &a, window);
                        run_thin(tables[t].k, &f, &b, window);
                        if (memcmp(&a, &b, sizeof a) != 0)
                            fail_msg("%s: %lld rows, D %lld, %lld keys, window %lld differ", tables[t].name, (long long)f.rows,
                                     (long long)f.dim, (long long)f.n_keys, (long long)window);
                        n++;
                    }
    print_message("%d cases: 0 differing bits\n", n);
}

/* A row that sees no key of a tile keeps all that it has. */
static void test_masked_tile_is_nothing(void **state) {
    (void)state;
    static struct fixture f = {.rows = 7, .dim = 64, .n_keys = TILE};
    static struct result a, b;
    for (int t = 0; t < n_tables; t++) {
        fill_bf16(f.k, TILE * MAX_DIM, 1);
        fill_bf16(f.v, TILE * MAX_DIM, 2);
        run_block(tables[t].k, &f, &a, 0);
        static float kt[MAX_DIM * TILE], v[TILE * MAX_DIM];
        b = a;
        struct cpu_attn_tile tile = tile_of(&f, &b, 2 * TILE, 0);
        b = a;
        tile.kt = kt;
        tile.v = v;
        tile.key0 = 3 * TILE; /* the next tile lies after every row */
        fill(kt, MAX_DIM * TILE, 1, 5);
        fill(v, TILE * MAX_DIM, 1, 6);
        tables[t].k->attn_fwd(&tile);
        assert_memory_equal(&a, &b, sizeof a);
        f.pos[6] = 3 * TILE; /* now one of seven sees a key of it */
        tables[t].k->attn_fwd(&tile);
        assert_memory_equal(a.acc, b.acc, 6 * 64 * sizeof *a.acc);
        assert_memory_equal(a.sum, b.sum, 6 * sizeof *a.sum);
        assert_true(b.sum[6] != a.sum[6]);
    }
}

/* ---- instruction sets that fuse give the same bits ---- */

static void test_same_bits_when_fused(void **state) {
    (void)state;
    if (n_tables < 3) {
        print_message("this CPU has no two such sets\n");
        skip();
    }
    enum { N = 1037 };
    static float x[N], w[N], ya[N], yb[N];
    const struct cpu_kern *a = tables[1].k, *b = tables[2].k;
    fill(x, N, 3, 11);
    fill(w, N, 1, 12);
    struct cpu_norm norm = {.y = ya, .x = x, .w = w, .act = DT_F32, .n = N, .eps = 1e-6f};
    a->rmsnorm_fwd(&norm);
    norm.y = yb;
    b->rmsnorm_fwd(&norm);
    assert_memory_equal(ya, yb, sizeof ya);
    a->swiglu_fwd(ya, x, w, DT_F32, N);
    b->swiglu_fwd(yb, x, w, DT_F32, N);
    assert_memory_equal(ya, yb, sizeof ya);
    struct cpu_head_sum sa, sb;
    a->head_sum(&sa, x, N, 0.7f, true);
    b->head_sum(&sb, x, N, 0.7f, true);
    assert_memory_equal(&sa, &sb, sizeof sa);
    static struct fixture f = {.rows = 7, .dim = 128, .n_keys = 50};
    static struct result ra, rb;
    fill_bf16(f.k, TILE * MAX_DIM, 1);
    fill_bf16(f.v, TILE * MAX_DIM, 2);
    fill(f.q, CPU_ATTN_DECODE_ROWS * MAX_DIM, 1, 3);
    run_block(a, &f, &ra, 0);
    run_block(b, &f, &rb, 0);
    assert_memory_equal(&ra, &rb, sizeof ra);
}

/* ---- scans of the sampler ---- */

static void test_scans(void **state) {
    (void)state;
    float x[100];
    int32_t idx[100];
    fill(x, 100, 1, 21);
    for (int t = 0; t < n_tables; t++)
        for (int64_t n = 0; n <= 100; n++) {
            float max = -INFINITY;
            double mass = 0, all = 0;
            int64_t count = 0;
            for (int64_t i = 0; i < n; i++) {
                max = x[i] > max ? x[i] : max;
                count += x[i] >= 0.3f;
            }
            for (int64_t i = 0; i < n; i++) {
                mass += x[i] >= 0.3f ? exp((double)x[i] - (double)max) : 0;
                all += exp((double)x[i] - (double)max);
            }
            const struct cpu_kern *k = tables[t].k;
            assert_true(k->max(x, n) == max);
            assert_int_equal(k->at_least(idx, x, n, 0.3f), count);
            for (int64_t i = 0; i < count; i++) assert_true(x[idx[i]] >= 0.3f && (i == 0 || idx[i] > idx[i - 1]));
            if (n == 0) continue;
            struct cpu_head_sum s;
            k->head_sum(&s, x, n, 1, true);
            /* 1e-6: sums of at most 100 numbers in f32 */
            assert_true(fabs((double)k->mass(x, n, max, 0.3f) - mass) <= 1e-6 * all);
            assert_true(s.max == max && fabs((double)s.sum - all) <= 1e-6 * all);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_thin_equals_block),
        cmocka_unit_test(test_masked_tile_is_nothing),
        cmocka_unit_test(test_same_bits_when_fused),
        cmocka_unit_test(test_scans),
    };
    return cmocka_run_group_tests(tests, find_tables, NULL);
}
