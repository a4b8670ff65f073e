/* test_device_cuda_grouped_gemm.c - the CUDA backend's grouped GEMM with as many rows as training has: all rows have the bits that
 * they have in small batches, which other kernels compute, at every load; dw of an expert depends on its own rows alone; values
 * agree with ref.
 *
 * test_device_moe and test_device_ops ask the same of a few rows on every backend.  Without a GPU: a printed skip. */
#include "ops/ops_test.h"

static struct dev cuda, ref;

enum { E = 128, ROWS = 16384, N = 520, K = 776 }; /* n, k: not multiples of a tile */

static void must(int rc) {
    if (rc < 0) fail_msg("%s", err_msg());
}

static float *noise(int64_t count, uint32_t seed, float scale) {
    float *p = xcalloc((size_t)count, sizeof *p);
    uint32_t s = seed * 2654435761u + 12345;
    for (int64_t i = 0; i < count; i++) {
        s = s * 1664525u + 1013904223u;
        p[i] = bf16_to_f32(f32_to_bf16(((float)(s >> 8) * 0x1p-23f - 1.0f) * scale));
    }
    return p;
}
static struct tensor block(struct dev *d, enum dtype dt, int64_t r, int64_t c) {
    struct tensor t = tensor_2d(NULL, dt, r, c);
    must(dev_alloc(d, (size_t)(r * c) * dtype_size(dt), &t.data));
    return t;
}
/* The same values on any device, as bf16 or f32. */
static struct tensor upload(struct dev *d, enum dtype dt, int64_t r, int64_t c, const float *v) {
    const struct tensor t = block(d, dt, r, c);
    const size_t bytes = (size_t)(r * c) * dtype_size(dt);
    uint16_t *const half = xcalloc((size_t)(r * c), sizeof *half);
    for (int64_t i = 0; dt == DT_BF16 && i < r * c; i++) half[i] = f32_to_bf16(v[i]);
    must(dev_copy_in(d, t.data, dt == DT_BF16 ? (const void *)half : v, bytes));
    free(half);
    return t;
}
static void *download(struct dev *d, struct tensor t) {
    const size_t bytes = (size_t)tensor_count(t) * dtype_size(t.dt);
    void *const p = xmalloc(bytes);
    must(dev_copy_out(d, p, t.data, bytes));
    return p;
}
static void drop(struct dev *d, struct tensor t) { dev_free(d, t.data, (size_t)tensor_count(t) * dtype_size(t.dt)); }

/* ---- loads ---- */

enum { N_LOADS = 5 };
static const char *const load_names[N_LOADS] = {"all experts", "8 experts", "one row each but one", "the last expert",
                                                "every third expert"};
static void draw_offsets(int load, int32_t at[E + 1]) {
    struct rng g = {.seed = (uint64_t)(41 + load), .stream = RNG_TEST};
    memset(at, 0, (E + 1) * sizeof *at);
    for (int64_t i = 0; i < ROWS; i++) {
        int64_t e = (int64_t)rng_below(&g, E);
        if (load == 1) e = 3 + 16 * (e % 8);
        if (load == 2) e = i < E ? i : 77;
        if (load == 3) e = E - 1;
        if (load == 4) e = e / 3 * 3;
        at[1 + e]++;
    }
    for (int64_t e = 0; e < E; e++) at[e + 1] += at[e];
}

/* ---- forward and dx ---- */

struct operands {
    struct tensor x, dy, y, offset, part; /* part: offsets of some rows */
    struct weight_stack w;
    struct tensor wide; /* y or dx in f32 */
};

static int rows_of(struct operands *o, bool dx, bool f32, int64_t lo, int64_t n, struct tensor offset) {
    const struct tensor out =
        tensor_rows(tensor_2d(f32 ? o->wide.data : o->y.data, f32 ? DT_F32 : DT_BF16, ROWS, dx ? K : N), lo, n);
    return dx ? dev_grouped_dx(&cuda, out, tensor_rows(o->dy, lo, n), o->w, offset)
              : dev_grouped_fwd(&cuda, out, tensor_rows(o->x, lo, n), o->w, offset);
}

/* All rows at once beside blocks of so many. */
static void check_rows(struct operands *o, const char *load, bool dx, bool f32) {
    static const int64_t blocks[] = {1000, 4096};
    const struct tensor out = tensor_2d(f32 ? o->wide.data : o->y.data, f32 ? DT_F32 : DT_BF16, ROWS, dx ? K : N);
    const size_t row = (size_t)out.dim[1] * dtype_size(out.dt);
    must(dev_zero(&cuda, out.data, ROWS * row));
    must(rows_of(o, dx, f32, 0, ROWS, o->offset));
    char *const whole = download(&cuda, out);
    for (int64_t b = 0; b < COUNT(blocks); b++) {
        must(dev_zero(&cuda, out.data, ROWS * row));
        for (int64_t lo = 0; lo < ROWS; lo += blocks[b]) {
            const int64_t n = ROWS - lo < blocks[b] ? ROWS - lo : blocks[b];
            must(dev_clip_offsets(&cuda, o->part, o->offset, lo, n));
            must(rows_of(o, dx, f32, lo, n, o->part));
        }
        char *const some = download(&cuda, out);
        for (int64_t r = 0; r < ROWS; r++)
            if (memcmp(whole + (size_t)r * row, some + (size_t)r * row, row) != 0)
                fail_msg("%s to %s, rows of %s: row %lld of %d differs from blocks of %lld rows", dx ? "dx" : "fwd",
                         dtype_name(out.dt), load, (long long)r, ROWS, (long long)blocks[b]);
        free(some);
    }
    free(whole);
}

/* Largest NMSE against ref of a sum of r products: see test_device_cuda_gemm.c. */
static double limit_of(enum dtype out, int64_t r) {
    const double cut = 2.0 * (double)r / 16 * 0x1p-24;
    return fmax(tol_limit(TOL_SUM, DT_BF16, out), cut * cut);
}

/* Some rows of y beside ref. */
static void check_values(struct operands *o, const char *load, const float *x, const float *w, const int32_t *at) {
    static const int64_t rows[] = {0, 1, 127, 128, 5000, ROWS - 1};
    must(rows_of(o, false, true, 0, ROWS, o->offset));
    for (int64_t i = 0; i < COUNT(rows); i++) {
        int64_t e = 0;
        float got[N];
        while (at[e + 1] <= rows[i]) e++;
        must(dev_copy_out(&cuda, got, (float *)o->wide.data + rows[i] * N, sizeof got));
        const struct tensor a = upload(&ref, DT_BF16, 1, K, x + rows[i] * K), m = upload(&ref, DT_BF16, N, K, w + e * N * K);
        const struct tensor y = block(&ref, DT_F32, 1, N);
        must(dev_matmul_fwd(&ref, y, a, (struct weight){m.data, DT_BF16, N, K, 0, 0}, TENSOR_NONE, false));
        const double err = nmse(got, y.data, N, 0), limit = limit_of(DT_F32, K);
        if (!(err <= limit)) fail_msg("rows of %s: row %lld: NMSE %.3g, allowed %.3g", load, (long long)rows[i], err, limit);
        drop(&ref, a);
        drop(&ref, m);
        drop(&ref, y);
    }
}

static void test_rows(void **state) {
    float *const x = noise((int64_t)ROWS * K, 1, 1), *const dy = noise((int64_t)ROWS * N, 2, 1);
    float *const w = noise((int64_t)E * N * K, 3, 0.3f);
    struct operands o = {.x = upload(&cuda, DT_BF16, ROWS, K, x),
                         .dy = upload(&cuda, DT_BF16, ROWS, N, dy),
                         .y = block(&cuda, DT_BF16, ROWS, K), /* the wider of both */
                         .wide = block(&cuda, DT_F32, ROWS, K)};
    const struct tensor at = block(&cuda, DT_I32, 1, E + 1), part = block(&cuda, DT_I32, 1, E + 1);
    const struct tensor stack = upload(&cuda, DT_BF16, (int64_t)E * N, K, w);
    o.w = (struct weight_stack){{stack.data, DT_BF16, N, K, 0, 0}, E};
    o.offset = tensor_1d(at.data, DT_I32, E + 1);
    o.part = tensor_1d(part.data, DT_I32, E + 1);
    (void)state;
    for (int load = 0; load < N_LOADS; load++) {
        int32_t offset[E + 1];
        draw_offsets(load, offset);
        must(dev_copy_in(&cuda, at.data, offset, sizeof offset));
        for (int i = 0; i < 4; i++) check_rows(&o, load_names[load], i % 2, i / 2);
        check_values(&o, load_names[load], x, w, offset);
    }
    const struct tensor all[] = {o.x, o.dy, o.y, o.wide, at, part, stack};
    for (int64_t i = 0; i < COUNT(all); i++) drop(&cuda, all[i]);
    free(x);
    free(dy);
    free(w);
}

/* ---- dw ---- */

/* An expert's rows alone give what they gave among others, and a sum has the bits of its addend added. */
static void test_dw(void **state) {
    float *const x = noise((int64_t)ROWS * K, 1, 1), *const dy = noise((int64_t)ROWS * N, 2, 1);
    float *const before = noise((int64_t)N * K, 4, 1);
    const struct tensor dx = upload(&cuda, DT_BF16, ROWS, K, x), ddy = upload(&cuda, DT_BF16, ROWS, N, dy);
    const struct tensor dw = block(&cuda, DT_F32, (int64_t)E * N, K), one = block(&cuda, DT_F32, N, K);
    const struct tensor at = block(&cuda, DT_I32, 1, E + 1), two = block(&cuda, DT_I32, 1, 2);
    const size_t bytes = (size_t)N * K * sizeof(float);
    float *const got = xmalloc(bytes), *const alone = xmalloc(bytes);
    (void)state;
    for (int load = 0; load < N_LOADS; load++) {
        int32_t offset[E + 1];
        const int64_t experts[] = {0, 3, 77, E - 1};
        draw_offsets(load, offset);
        must(dev_copy_in(&cuda, at.data, offset, sizeof offset));
        for (int add = 0; add < 2; add++) {
            for (int64_t e = 0; e < E; e++) must(dev_copy_in(&cuda, (float *)dw.data + e * N * K, before, bytes));
            must(dev_grouped_dw(&cuda, (struct tensor){dw.data, DT_F32, 3, {E, N, K, 1}}, ddy, dx,
                                tensor_1d(at.data, DT_I32, E + 1), add));
            for (int64_t i = 0; i < COUNT(experts); i++) {
                const int64_t e = experts[i], lo = offset[e], rows = offset[e + 1] - lo;
                const int32_t part[2] = {0, (int32_t)rows};
                must(dev_copy_out(&cuda, got, (float *)dw.data + e * N * K, bytes));
                must(dev_copy_in(&cuda, two.data, part, sizeof part));
                must(dev_zero(&cuda, one.data, bytes));
                must(dev_grouped_dw(&cuda, (struct tensor){one.data, DT_F32, 3, {1, N, K, 1}}, tensor_rows(ddy, lo, rows),
                                    tensor_rows(dx, lo, rows), tensor_1d(two.data, DT_I32, 2), false));
                must(dev_copy_out(&cuda, alone, one.data, bytes));
                for (int64_t j = 0; j < (int64_t)N * K; j++) {
                    const float want = add && rows ? before[j] + alone[j] : add ? before[j] : alone[j];
                    if (memcmp(&got[j], &want, sizeof want) != 0)
                        fail_msg("dw%s, rows of %s: element %lld of expert %lld (%lld rows) is %.9g, alone %.9g", add ? " +=" : "",
                                 load_names[load], (long long)j, (long long)e, (long long)rows, (double)got[j], (double)want);
                }
                if (add || rows == 0 || rows > 300) continue;
                const struct tensor a = upload(&ref, DT_BF16, rows, K, x + lo * K), b = upload(&ref, DT_BF16, rows, N, dy + lo * N);
                const struct tensor want = block(&ref, DT_F32, N, K);
                must(dev_matmul_dw(&ref, want, TENSOR_NONE, b, a, false));
                const double err = nmse(got, want.data, (int64_t)N * K, 0), limit = limit_of(DT_F32, rows);
                if (!(err <= limit)) fail_msg("dw of %lld rows: NMSE %.3g, allowed %.3g", (long long)rows, err, limit);
                drop(&ref, a);
                drop(&ref, b);
                drop(&ref, want);
            }
        }
    }
    const struct tensor all[] = {dx, ddy, dw, one, at, two};
    for (int64_t i = 0; i < COUNT(all); i++) drop(&cuda, all[i]);
    free(x);
    free(dy);
    free(before);
    free(got);
    free(alone);
}

int main(void) {
    char why[256];
    if (!dev_cuda_present(why, sizeof why)) {
        print_message("skip: no GPU: %s\n", why);
        return 0;
    }
    if (dev_open_cuda(&cuda, 0) < 0 || dev_open_ref(&ref) < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows), cmocka_unit_test(test_dw)};
    const int failed = cmocka_run_group_tests_name("cuda: grouped GEMM", tests, NULL, NULL);
    dev_close(&cuda);
    dev_close(&ref);
    return failed;
}
