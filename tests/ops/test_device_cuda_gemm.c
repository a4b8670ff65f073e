/* test_device_cuda_gemm.c - the CUDA backend's GEMMs at the shapes of real models: forward is batch-invariant,
 * values agree with ref, and the backward GEMMs are deterministic.
 *
 * test_device_ops and test_device_batch_invariant ask the same of small awkward shapes on every backend; here
 * the sizes are those at which cuBLASLt changes its algorithm.  Without a GPU: a printed skip. */
#include "ops/ops_test.h"
#include "worst.h"

static struct dev cuda, ref;

enum { MOST_ROWS = 2048, HEAD = 100000 }; /* GEMMs with more columns than HEAD run with fewer rows */
static const int64_t row_counts[] = {1, 2, 3, 5, 8, 17, 64, 80, 81, 127, 128, 129, 300, 500, 700, 1024, 1280, 2048};
static const int64_t ref_rows[] = {0, 1, 299};

struct fwd_case {
    int64_t n, k;
    enum dtype act, out;
    bool bias, add;
};

static void must(int rc) {
    if (rc < 0) fail_msg("%s", err_msg());
}

/* Uniform in [-scale, scale), rounded to dt: a function of seed and place. The caller frees. */
static void *noise(enum dtype dt, int64_t count, uint32_t seed, float scale) {
    void *p = xmalloc((size_t)count * dtype_size(dt));
    uint32_t s = seed * 2654435761u + 12345;
    for (int64_t i = 0; i < count; i++) {
        s = s * 1664525u + 1013904223u;
        const float v = ((float)(s >> 8) * 0x1p-23f - 1.0f) * scale;
        if (dt == DT_BF16) ((uint16_t *)p)[i] = f32_to_bf16(v);
        else ((float *)p)[i] = v;
    }
    return p;
}
static struct tensor upload(struct dev *d, enum dtype dt, int64_t r, int64_t c, const void *host) {
    struct tensor t = tensor_2d(NULL, dt, r, c);
    must(dev_alloc(d, (size_t)(r * c) * dtype_size(dt), &t.data));
    must(dev_copy_in(d, t.data, host, (size_t)(r * c) * dtype_size(dt)));
    return t;
}
static void drop(struct dev *d, struct tensor t) { dev_free(d, t.data, (size_t)tensor_count(t) * dtype_size(t.dt)); }
static struct tensor vector(struct tensor t) { return t.data ? tensor_1d(t.data, t.dt, tensor_count(t)) : t; }

/* Operands of one forward GEMM on one device; y starts as y0. */
struct operands {
    struct tensor x, w, bias, y, y0;
};
struct host_operands {
    void *x, *w, *bias, *y0;
};
static struct operands operands_on(struct dev *d, const struct fwd_case *s, const struct host_operands *h, int64_t rows) {
    struct operands o = {.x = upload(d, s->act, rows, s->k, h->x),
                         .w = upload(d, s->act, s->n, s->k, h->w),
                         .y = upload(d, s->out, rows, s->n, h->y0),
                         .y0 = upload(d, s->out, rows, s->n, h->y0)};
    if (s->bias) o.bias = upload(d, s->act, 1, s->n, h->bias);
    return o;
}
static void operands_free(struct dev *d, struct operands *o) {
    drop(d, o->x);
    drop(d, o->w);
    drop(d, o->y);
    drop(d, o->y0);
    if (o->bias.data) drop(d, o->bias);
}
/* The GEMM of rows [lo, lo + m) alone, to host. */
static void gemm(struct dev *d, const struct fwd_case *s, const struct operands *o, int64_t lo, int64_t m, void *host) {
    const size_t row = (size_t)s->n * dtype_size(s->out);
    const struct weight w = {o->w.data, s->act, s->n, s->k, 0, 0}; /* ref and cuda: row-major */
    const struct tensor y = tensor_rows(o->y, lo, m);
    must(dev_copy(d, o->y.data, o->y0.data, (size_t)o->y.dim[0] * row));
    must(dev_matmul_fwd(d, y, tensor_rows(o->x, lo, m), w, vector(o->bias), s->add));
    must(dev_copy_out(d, host, y.data, (size_t)m * row));
}

/* Largest NMSE against ref of a sum of r products. Tensor cores cut the running sum off instead of
 * rounding it, once for 16 products: r / 16 errors of one sign, half an ulp (2^-24) each; twice that. */
static double limit_of(enum dtype act, enum dtype out, int64_t r) {
    const double cut = 2.0 * (double)r / 16 * 0x1p-24;
    return fmax(tol_limit(TOL_SUM, act, out), act == DT_BF16 ? cut * cut : 0);
}

static float value(const void *p, enum dtype dt, int64_t i) {
    return dt == DT_BF16 ? bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

/* Rows of got (rows, n) against ref, one after the other. */
static double against_ref(const struct fwd_case *s, const struct host_operands *h, const void *got, int64_t rows) {
    float *a = xcalloc((size_t)s->n, sizeof *a), *b = xcalloc((size_t)s->n, sizeof *b);
    const size_t in = dtype_size(s->act), out = dtype_size(s->out);
    void *want = xmalloc((size_t)s->n * out);
    double worst = 0;
    for (int64_t i = 0; i < COUNT(ref_rows) && (i == 0 || s->n < HEAD); i++) {
        const int64_t r = ref_rows[i];
        if (r >= rows) continue;
        struct host_operands one = *h;
        one.x = (char *)h->x + (size_t)(r * s->k) * in;
        one.y0 = (char *)h->y0 + (size_t)(r * s->n) * out;
        struct operands o = operands_on(&ref, s, &one, 1);
        gemm(&ref, s, &o, 0, 1, want);
        operands_free(&ref, &o);
        for (int64_t j = 0; j < s->n; j++) {
            a[j] = value(got, s->out, r * s->n + j);
            b[j] = value(want, s->out, j);
        }
        worst = worse_of(worst, nmse(a, b, s->n, 0));
    }
    free(a);
    free(b);
    free(want);
    return worst;
}

static void check_fwd(const struct fwd_case *s) {
    const int64_t rows = s->n > HEAD ? 300 : MOST_ROWS;
    const size_t row = (size_t)s->n * dtype_size(s->out);
    struct host_operands h = {noise(s->act, rows * s->k, 1, 1), noise(s->act, s->n * s->k, 2, 0.5f),
                              s->bias ? noise(s->act, s->n, 3, 1) : NULL, NULL};
    if (s->add) h.y0 = noise(s->out, rows * s->n, 4, 1);
    else h.y0 = memset(xmalloc((size_t)rows * row), 0xff, (size_t)rows * row);
    struct operands o = operands_on(&cuda, s, &h, rows);
    char *all = xmalloc((size_t)rows * row), *some = xmalloc((size_t)rows * row), what[128];
    snprintf(what, sizeof what, "n %lld k %lld %s to %s%s%s", (long long)s->n, (long long)s->k, dtype_name(s->act),
             dtype_name(s->out), s->bias ? " bias" : "", s->add ? " add" : "");
    gemm(&cuda, s, &o, 0, rows, all);
    for (int64_t i = 0; i < COUNT(row_counts) && row_counts[i] <= rows; i++) {
        const int64_t m = row_counts[i], places[] = {0, rows - m, (rows - m) / 2};
        for (int64_t p = 0; p < COUNT(places); p++) {
            gemm(&cuda, s, &o, places[p], m, some);
            for (int64_t r = 0; r < m; r++)
                if (memcmp(some + (size_t)r * row, all + (size_t)(places[p] + r) * row, row) != 0)
                    fail_msg("%s: row %lld differs between %lld rows and %lld", what, (long long)(places[p] + r), (long long)m,
                             (long long)rows);
        }
    }
    const double e = against_ref(s, &h, all, rows), limit = limit_of(s->act, s->out, s->k);
    print_message("%-40s rows equal at %lld counts, NMSE %.2g of %.2g allowed\n", what, (long long)COUNT(row_counts), e, limit);
    if (!(e <= limit)) fail_msg("%s: NMSE %.3g, allowed %.3g", what, e, limit);
    operands_free(&cuda, &o);
    free(h.x);
    free(h.w);
    free(h.bias);
    free(h.y0);
    free(all);
    free(some);
}

static void test_models(void **state) { /* Qwen2.5-0.5B, Qwen3-1.7B: qkv, o, gate_up, down, head */
    static const struct fwd_case cases[] = {
        {1152, 896, DT_BF16, DT_BF16, true, false},   {896, 896, DT_BF16, DT_F32, false, true},
        {9728, 896, DT_BF16, DT_BF16, false, false},  {896, 4864, DT_BF16, DT_F32, false, true},
        {151936, 896, DT_BF16, DT_F32, false, false}, {4096, 2048, DT_BF16, DT_BF16, false, false},
        {2048, 2048, DT_BF16, DT_F32, false, true},   {12288, 2048, DT_BF16, DT_BF16, false, false},
        {2048, 6144, DT_BF16, DT_F32, false, true},   {151936, 2048, DT_BF16, DT_F32, false, false},
        {4096, 896, DT_BF16, DT_F32, false, false},   {384, 896, DT_BF16, DT_F32, false, false},
    };
    (void)state;
    for (int64_t i = 0; i < COUNT(cases); i++) check_fwd(&cases[i]);
}

static void test_kinds_of_output(void **state) { /* what the models do not ask for */
    static const struct fwd_case cases[] = {
        {896, 896, DT_BF16, DT_BF16, false, false}, {1152, 896, DT_BF16, DT_F32, true, false},
        {1152, 896, DT_BF16, DT_F32, true, true},   {1152, 896, DT_F32, DT_F32, true, false},
        {896, 4864, DT_F32, DT_F32, false, true},   {896, 896, DT_F32, DT_F32, false, false},
    };
    (void)state;
    for (int64_t i = 0; i < COUNT(cases); i++) check_fwd(&cases[i]);
}

static void test_odd_sizes(void **state) { /* not multiples of 16 bytes: our own kernel; and the smallest that are */
    static const struct fwd_case cases[] = {
        {49, 50, DT_BF16, DT_BF16, true, false}, {301, 48, DT_BF16, DT_F32, false, false}, {1, 7, DT_BF16, DT_BF16, false, false},
        {50, 33, DT_F32, DT_F32, true, true},    {48, 48, DT_BF16, DT_BF16, true, false},  {8, 8, DT_BF16, DT_F32, false, true},
        {4, 4, DT_F32, DT_F32, false, false},
    };
    (void)state;
    for (int64_t i = 0; i < COUNT(cases); i++) check_fwd(&cases[i]);
}

/* Fused SwiGLU has the bits of GEMM and then SwiGLU, at the first call and once autotuned. */
static void check_swiglu(const struct fwd_case *s) {
    const int64_t rows = 200, f = s->n / 2;
    struct host_operands h = {noise(s->act, rows * s->k, 1, 1), noise(s->act, s->n * s->k, 2, 0.1f),
                              s->bias ? noise(s->act, s->n, 3, 1) : NULL, noise(s->act, rows * s->n, 4, 1)};
    struct operands o = operands_on(&cuda, s, &h, rows);
    const struct weight w = {o.w.data, s->act, s->n, s->k, 0, 0};
    const size_t bytes = (size_t)(rows * f) * dtype_size(s->act);
    char *want = xmalloc(bytes), *got = xmalloc(bytes);
    const struct tensor y = upload(&cuda, s->act, rows, f, h.y0);
    must(dev_matmul_fwd(&cuda, o.y, o.x, w, vector(o.bias), false));
    must(dev_swiglu_fwd(&cuda, y, o.y));
    must(dev_copy_out(&cuda, want, y.data, bytes));
    for (int64_t i = 0; i < COUNT(row_counts) && row_counts[i] <= rows; i++)
        for (int time = 0; time < 2; time++) {
            const int64_t m = row_counts[i], lo = (rows - m) / 2;
            const size_t row = (size_t)f * dtype_size(s->act);
            must(dev_copy_in(&cuda, y.data, h.y0, bytes));
            must(dev_matmul_swiglu(&cuda, tensor_rows(y, lo, m), tensor_rows(o.y, 0, m), tensor_rows(o.x, lo, m), w,
                                   vector(o.bias)));
            must(dev_copy_out(&cuda, got, y.data, bytes));
            if (memcmp(got + (size_t)lo * row, want + (size_t)lo * row, (size_t)m * row) != 0)
                fail_msg("fused SwiGLU, f %lld k %lld %s: %lld rows differ from those of two ops", (long long)f, (long long)s->k,
                         dtype_name(s->act), (long long)m);
            const size_t end = (size_t)(lo + m) * row;
            if (memcmp(got, h.y0, (size_t)lo * row) != 0 || memcmp(got + end, (char *)h.y0 + end, bytes - end) != 0)
                fail_msg("fused SwiGLU, f %lld k %lld: %lld rows write to others", (long long)f, (long long)s->k, (long long)m);
        }
    operands_free(&cuda, &o);
    drop(&cuda, y);
    free(h.x);
    free(h.w);
    free(h.bias);
    free(h.y0);
    free(want);
    free(got);
}
static void test_swiglu(void **state) {
    static const struct fwd_case cases[] = {
        {9728, 896, DT_BF16, DT_BF16, false, false}, {12288, 2048, DT_BF16, DT_BF16, false, false},
        {1824, 384, DT_BF16, DT_BF16, true, false},  {16, 128, DT_BF16, DT_BF16, true, false},
        {176, 64, DT_BF16, DT_BF16, false, false},   {100, 66, DT_BF16, DT_BF16, true, false},
        {96, 128, DT_F32, DT_F32, true, false},
    };
    (void)state;
    for (int64_t i = 0; i < COUNT(cases); i++) check_swiglu(&cases[i]);
}

/* Logits have the bits of GEMMs of DEV_VOCAB_CHUNK columns, in which training computes them. */
static void test_logits(void **state) {
    enum { V = 151936, K = 896, ROWS = 512 };
    static const int64_t counts[] = {1, 16, 33, 77, 80, 96, 128, 300, ROWS};
    void *hx = noise(DT_BF16, (int64_t)ROWS * K, 1, 1), *hw = noise(DT_BF16, (int64_t)V * K, 2, 0.5f);
    float *part = xmalloc((size_t)ROWS * DEV_VOCAB_CHUNK * 4), *all = xmalloc((size_t)ROWS * V * 4);
    const struct tensor x = upload(&cuda, DT_BF16, ROWS, K, hx), w = upload(&cuda, DT_BF16, V, K, hw);
    struct tensor y = tensor_2d(NULL, DT_F32, ROWS, DEV_VOCAB_CHUNK), z = tensor_2d(NULL, DT_F32, ROWS, V);
    (void)state;
    must(dev_alloc(&cuda, (size_t)tensor_count(y) * 4, &y.data));
    must(dev_alloc(&cuda, (size_t)tensor_count(z) * 4, &z.data));
    for (int64_t i = 0; i < COUNT(counts); i++) {
        const int64_t m = counts[i];
        must(dev_logits(&cuda, tensor_rows(z, 0, m), tensor_rows(x, 0, m), (struct weight){w.data, DT_BF16, V, K, 0, 0}));
        must(dev_copy_out(&cuda, all, z.data, (size_t)(m * V) * 4));
        for (int64_t lo = 0; lo < V; lo += DEV_VOCAB_CHUNK) {
            const int64_t n = V - lo < DEV_VOCAB_CHUNK ? V - lo : DEV_VOCAB_CHUNK;
            const struct weight some = {(uint16_t *)w.data + lo * K, DT_BF16, n, K, 0, 0};
            const struct tensor out = tensor_2d(y.data, DT_F32, ROWS, n);
            must(dev_matmul_fwd(&cuda, out, x, some, TENSOR_NONE, false));
            must(dev_copy_out(&cuda, part, y.data, (size_t)(m * n) * 4));
            for (int64_t r = 0; r < m; r++) assert_memory_equal(all + r * V + lo, part + r * n, (size_t)n * 4);
        }
    }
    drop(&cuda, x);
    drop(&cuda, w);
    drop(&cuda, y);
    drop(&cuda, z);
    free(hx);
    free(hw);
    free(part);
    free(all);
}

/* dx, dw and db of one shape on one device, to host as f32 or act. */
struct back {
    void *dx, *dw, *db;
};
static struct back backward(struct dev *d, enum dtype act, int64_t m, int64_t n, int64_t k) {
    void *hx = noise(act, m * k, 5, 1), *hw = noise(act, n * k, 6, 0.5f), *hdy = noise(act, m * n, 7, 1);
    void *h0 = noise(DT_F32, n * k, 8, 1), *hb = noise(DT_F32, n, 9, 1);
    struct back b = {xmalloc((size_t)(m * k) * dtype_size(act)), xmalloc((size_t)(n * k) * 4), xmalloc((size_t)n * 4)};
    const struct tensor x = upload(d, act, m, k, hx), w = upload(d, act, n, k, hw), dy = upload(d, act, m, n, hdy);
    const struct tensor dx = upload(d, act, m, k, hx), dw = upload(d, DT_F32, n, k, h0), db = upload(d, DT_F32, 1, n, hb);
    must(dev_matmul_dx(d, dx, dy, (struct weight){w.data, act, n, k, 0, 0}, false));
    must(dev_matmul_dw(d, dw, vector(db), dy, x, true));
    must(dev_copy_out(d, b.dx, dx.data, (size_t)(m * k) * dtype_size(act)));
    must(dev_copy_out(d, b.dw, dw.data, (size_t)(n * k) * 4));
    must(dev_copy_out(d, b.db, db.data, (size_t)n * 4));
    const struct tensor all[] = {x, w, dy, dx, dw, db};
    for (int64_t i = 0; i < COUNT(all); i++) drop(d, all[i]);
    void *const host[] = {hx, hw, hdy, h0, hb};
    for (int64_t i = 0; i < COUNT(host); i++) free(host[i]);
    return b;
}
static void back_free(struct back *b) {
    free(b->dx);
    free(b->dw);
    free(b->db);
}
static void close_to(const char *what, const void *got, const void *want, enum dtype act, enum dtype dt, int64_t r, int64_t count) {
    float *a = xcalloc((size_t)count, sizeof *a), *b = xcalloc((size_t)count, sizeof *b);
    for (int64_t i = 0; i < count; i++) a[i] = value(got, dt, i), b[i] = value(want, dt, i);
    const double e = nmse(a, b, count, 0), limit = limit_of(act, dt, r);
    if (!(e <= limit)) fail_msg("%s: NMSE %.3g, allowed %.3g", what, e, limit);
    free(a);
    free(b);
}

static void test_backward(void **state) {
    static const struct {
        enum dtype act;
        int64_t m, n, k;
        bool with_ref; /* ref takes seconds for the large ones */
    } cases[] = {
        {DT_BF16, 600, 1152, 64, true},    {DT_BF16, 80, 384, 896, true}, {DT_F32, 300, 96, 128, true},
        {DT_BF16, 33, 49, 50, true},       {DT_F32, 1, 30, 31, true},     {DT_BF16, 4097, 1152, 896, false},
        {DT_BF16, 3000, 896, 4864, false},
    };
    (void)state;
    for (int64_t i = 0; i < COUNT(cases); i++) {
        const enum dtype act = cases[i].act;
        const int64_t m = cases[i].m, n = cases[i].n, k = cases[i].k;
        struct back one = backward(&cuda, act, m, n, k), two = backward(&cuda, act, m, n, k);
        assert_memory_equal(one.dx, two.dx, (size_t)(m * k) * dtype_size(act));
        assert_memory_equal(one.dw, two.dw, (size_t)(n * k) * 4);
        assert_memory_equal(one.db, two.db, (size_t)n * 4);
        back_free(&two);
        if (cases[i].with_ref) {
            struct back want = backward(&ref, act, m, n, k);
            close_to("dx", one.dx, want.dx, act, act, n, m * k);
            close_to("dw", one.dw, want.dw, act, DT_F32, m, n * k);
            close_to("db", one.db, want.db, act, DT_F32, 1, n);
            back_free(&want);
        }
        back_free(&one);
    }
}

/* Some rows of a matrix give the bits that they have within it. */
static void test_parts(void **state) {
    static const struct fwd_case shapes[] = {{4608, 3584, DT_BF16, DT_BF16, true, false},
                                             {3584, 18944, DT_BF16, DT_F32, false, false},
                                             {37888, 3584, DT_BF16, DT_BF16, false, false},
                                             {896, 896, DT_BF16, DT_F32, false, true},
                                             {1152, 896, DT_F32, DT_F32, false, false}};
    static const int64_t rows[] = {1, 8, 80, 300}, most = 300;
    (void)state;
    for (int64_t i = 0; i < COUNT(shapes); i++) {
        const struct fwd_case *const s = &shapes[i];
        struct host_operands h = {.x = noise(s->act, most * s->k, 1, 1), .w = noise(s->act, s->n * s->k, 2, 1)};
        h.bias = noise(s->act, s->n, 3, 1);
        h.y0 = noise(s->out, most * s->n, 4, 1);
        struct operands o = operands_on(&cuda, s, &h, most);
        const size_t unit = dtype_size(s->out);
        char *whole = xmalloc((size_t)(most * s->n) * unit), *part = xmalloc((size_t)(most * s->n) * unit);
        for (int64_t j = 0; j < COUNT(rows); j++)
            for (int of = 2; of <= 4; of += 2) {
                const int64_t n = s->n / of, lo = s->n - n, m = rows[j];
                gemm(&cuda, s, &o, 0, m, whole);
                const struct weight w = {(char *)o.w.data + (size_t)(lo * s->k) * dtype_size(s->act), s->act, n, s->k, 0, s->n};
                const struct tensor y = tensor_2d(o.y.data, s->out, m, n);
                const struct tensor bias =
                    s->bias ? tensor_1d((char *)o.bias.data + (size_t)lo * dtype_size(s->act), s->act, n) : TENSOR_NONE;
                for (int64_t r = 0; r < m; r++)
                    must(dev_copy_in(&cuda, (char *)y.data + (size_t)(r * n) * unit, (char *)h.y0 + (size_t)(r * s->n + lo) * unit,
                                     (size_t)n * unit));
                must(dev_matmul_fwd(&cuda, y, tensor_rows(o.x, 0, m), w, bias, s->add));
                must(dev_copy_out(&cuda, part, y.data, (size_t)(m * n) * unit));
                for (int64_t r = 0; r < m; r++)
                    assert_memory_equal(part + (size_t)(r * n) * unit, whole + (size_t)(r * s->n + lo) * unit, (size_t)n * unit);
            }
        free(whole);
        free(part);
        operands_free(&cuda, &o);
        free(h.x);
        free(h.w);
        free(h.bias);
        free(h.y0);
    }
}

int main(void) {
    char why[256];
    if (!dev_cuda_present(why, sizeof why)) {
        print_message("skip: no GPU: %s\n", why);
        return 0;
    }
    if (dev_open_cuda(&cuda, 0) < 0 || dev_open_ref(&ref) < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_odd_sizes), cmocka_unit_test(test_parts),  cmocka_unit_test(test_kinds_of_output),
        cmocka_unit_test(test_models),    cmocka_unit_test(test_swiglu), cmocka_unit_test(test_logits),
        cmocka_unit_test(test_backward),
    };
    const int failed = cmocka_run_group_tests_name("cuda: GEMM", tests, NULL, NULL);
    dev_close(&cuda);
    dev_close(&ref);
    return failed;
}
