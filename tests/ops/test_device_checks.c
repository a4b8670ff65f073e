/* test_device_checks.c - what device.c promises for every backend: tensor helpers,
 * memory accounts, refusal of what does not fit, missing entries; and the two
 * optimizer ops, whose results are checked against formulas in double. */
#include "ops/ops_table.h"

static struct backends two, one; /* threads */

static void test_tensor(void **state) {
    (void)state;
    float f[24];
    const struct tensor t = {f, DT_F32, 3, {4, 3, 2, 1}};
    assert_int_equal(tensor_count(t), 24);
    assert_int_equal(tensor_count(TENSOR_NONE), 0);
    const struct tensor s = tensor_rows(t, 1, 2);
    assert_ptr_equal(s.data, f + 6);
    assert_int_equal(tensor_count(s), 12);
    assert_int_equal(tensor_count(tensor_rows(t, 4, 0)), 0);
    static const struct {
        enum dtype dt;
        size_t size;
        const char *name;
    } types[] = {{DT_F32, 4, "f32"}, {DT_BF16, 2, "bf16"}, {DT_F16, 2, "f16"}, {DT_F64, 8, "f64"},
                 {DT_I32, 4, "i32"}, {DT_I64, 8, "i64"},   {DT_U8, 1, "u8"}};
    for (int64_t i = 0; i < COUNT(types); i++) {
        assert_int_equal(dtype_size(types[i].dt), types[i].size);
        assert_string_equal(dtype_name(types[i].dt), types[i].name);
    }
    /* nearest even on both sides of a tie; NaN stays NaN; Inf and overflow */
    assert_int_equal(f32_to_bf16(1.0f + 0x1p-8f), 0x3f80);
    assert_int_equal(f32_to_bf16(1.0f + 0x3p-8f), 0x3f82);
    assert_int_equal(f32_to_bf16(0x1.fffffep127f), 0x7f80);
    assert_true(isnan(bf16_to_f32(f32_to_bf16(NAN))));
    assert_true(isinf(bf16_to_f32(f32_to_bf16(-INFINITY))));
}

static void test_memory(void **state) {
    (void)state;
    for (int b = 0; b < two.n; b++) {
        struct dev *d = &two.dev[b];
        const size_t before = d->allocated;
        void *p = d, *q = NULL;
        char in[1000], out[1000];
        assert_int_equal(dev_alloc(d, 0, &p), 0);
        assert_null(p);
        dev_free(d, NULL, 0);
        assert_int_equal(dev_alloc(d, 1000, &p), 0);
        assert_int_equal(dev_alloc(d, 5000, &q), 0);
        assert_int_equal((uintptr_t)p % 256, 0);
        assert_int_equal((uintptr_t)q % 256, 0);
        assert_int_equal(d->allocated, before + 6000);
        assert_true(d->peak >= d->allocated);
        for (int i = 0; i < 1000; i++) in[i] = (char)(i * 7);
        assert_int_equal(dev_copy_in(d, p, in, 1000), 0);
        assert_int_equal(dev_copy(d, (char *)q + 3000, p, 1000), 0);
        assert_int_equal(dev_copy_out(d, out, (char *)q + 3000, 1000), 0);
        assert_memory_equal(in, out, 1000);
        assert_int_equal(dev_zero(d, (char *)q + 3500, 500), 0);
        assert_int_equal(dev_copy_out(d, out, (char *)q + 3000, 1000), 0);
        assert_memory_equal(in, out, 500);
        for (int i = 500; i < 1000; i++) assert_int_equal(out[i], 0);
        assert_int_equal(dev_sync(d), 0);
        dev_free(d, p, 1000);
        dev_free(d, q, 5000);
        assert_int_equal(d->allocated, before);
        assert_int_equal(dev_alloc(d, (size_t)1 << 55, &p), ERR_NOMEM);
        assert_non_null(strstr(err_msg(), "GiB"));
        assert_int_equal(d->allocated, before);
    }
    struct dev closed = {0};
    dev_close(&closed);
}

/* A call that does not fit is refused by name, before the backend sees it. */
static void test_misfits(void **state) {
    (void)state;
    struct dev *d = &two.dev[0];
    static float f[64], g[64];
    static int32_t ids[8];
    const struct tensor x = tensor_2d(f, DT_F32, 4, 8), y = tensor_2d(g, DT_F32, 4, 8), v = tensor_1d(g, DT_F32, 8);
    const struct tensor b16 = tensor_2d(f, DT_BF16, 4, 8), id4 = tensor_1d(ids, DT_I32, 4);
    const struct weight w = {f, DT_F32, 8, 8, 0, 0}, w7 = {f, DT_F32, 8, 7, 0, 0}, w16 = {f, DT_BF16, 8, 8, 0, 0};
    const struct attn_args attn = {.n_q_heads = 3, .n_kv_heads = 2, .head_dim = 4, .q = x};
    const struct qkv_args qkv = {.n_q_heads = 2, .n_kv_heads = 1, .head_dim = 3, .qkv = x};
    const struct lmhead_args head = {.x = x, .w = w, .inv_temp = v, .target = id4, .logp = v};
    struct sample_param p = {.inv_temp = 1, .top_p = 1.5f, .repetition_penalty = 1};
    const struct sample_args smp = {
        .logits = tensor_2d(f, DT_F32, 1, 8), .param = &p, .id = tensor_1d(ids, DT_I32, 1), .logp = tensor_1d(g, DT_F32, 1)};
    const struct decode_args loop = {
        .x = x, .w = w, .logits = tensor_2d(g, DT_F32, 4, 8), .rows = tensor_2d(f, DT_U8, 4, 8), .block_len = 16};
    struct decode_args given = loop;
    given.x = TENSOR_NONE;
    given.logits = tensor_2d(g, DT_F32, 32, 1);
    const struct adamw_args opt = {.p = v, .m = v, .v = v, .g = v, .step = 0};
#define REFUSED(op, call)                \
    assert_int_equal((call), ERR_INVAL); \
    assert_non_null(strstr(err_msg(), "op " #op))
    REFUSED(cast, dev_cast(d, tensor_1d(g, DT_F32, 31), x));
    REFUSED(embed_fwd, dev_embed_fwd(d, y, id4, w7));
    REFUSED(gather_rows, dev_gather_rows(d, b16, x, id4));
    REFUSED(rmsnorm_fwd, dev_rmsnorm_fwd(d, &(struct rmsnorm_args){.y = y, .x = x, .w = tensor_1d(g, DT_F32, 7)}));
    REFUSED(rmsnorm_fwd, dev_rmsnorm_fwd(d, &(struct rmsnorm_args){.y = y, .x = b16, .w = v}));
    REFUSED(rmsnorm_fwd, dev_rmsnorm_fwd(d, &(struct rmsnorm_args){.y = y, .x = x, .w = v, .from = b16}));
    REFUSED(matmul_fwd, dev_matmul_fwd(d, y, x, w7, TENSOR_NONE, false));
    REFUSED(matmul_fwd, dev_matmul_fwd(d, y, x, w16, TENSOR_NONE, false));
    REFUSED(matmul_fwd, dev_matmul_fwd(d, b16, b16, w16, TENSOR_NONE, true));
    REFUSED(matmul_fwd, dev_matmul_fwd(d, tensor_2d(NULL, DT_F32, 4, 8), x, w, TENSOR_NONE, false));
    REFUSED(matmul_add, dev_matmul_add(d, y, x, b16, w, TENSOR_NONE));
    REFUSED(matmul_swiglu, dev_matmul_swiglu(d, y, x, x, w, TENSOR_NONE));
    REFUSED(matmul_dx, dev_matmul_dx(d, y, tensor_2d(f, DT_F32, 4, 7), w, false));
    REFUSED(matmul_dw, dev_matmul_dw(d, tensor_2d(g, DT_F32, 8, 7), TENSOR_NONE, x, y, true));
    REFUSED(swiglu_fwd, dev_swiglu_fwd(d, y, x));
    REFUSED(swiglu_bwd, dev_swiglu_bwd(d, y, x, x));
    REFUSED(geglu_fwd, dev_geglu_fwd(d, y, x));
    REFUSED(geglu_bwd, dev_geglu_bwd(d, y, x, x));
    REFUSED(attn_fwd, dev_attn_fwd(d, &attn));
    REFUSED(qkv_fwd, dev_qkv_fwd(d, &qkv));
    REFUSED(qkv_attn_fwd, dev_qkv_attn_fwd(d, &qkv, &attn));
    REFUSED(lmhead_fwd, dev_lmhead_fwd(d, &head));
    REFUSED(logits, dev_logits(d, y, x, w7));
    REFUSED(sample, dev_sample(d, &smp));
    REFUSED(decode_next, dev_decode_next(d, &loop));
    REFUSED(decode_next, dev_decode_next(d, &given));
    REFUSED(qk_norm_fwd, dev_qk_norm_fwd(d, &(struct qk_norm_args){.x = x, .q_norm = v, .k_norm = v, .y = y}));
    REFUSED(rope_norm_fwd,
            dev_rope_norm_fwd(d, &(struct rope_norm_args){
                                     .n_q_heads = 1, .n_kv_heads = 1, .head_dim = 2, .x = x, .q_norm = v, .k_norm = v, .y = y}));
    REFUSED(scale_rows, dev_scale_rows(d, x, v, tensor_1d(f, DT_I32, 3)));
    REFUSED(join_columns, dev_join_columns(d, &(struct join_columns_args){.y = y, .x = v, .n = 1, .cut = {0, 1}}));
    REFUSED(copy_columns, dev_copy_columns(d, &(struct copy_columns_args){.y = y, .y_at = 1, .x = y, .n = y.dim[1]}));
    REFUSED(copy_rows, dev_copy_rows(d, &(struct copy_rows_args){x, 1, (const int32_t[]){0}, (const int32_t[]){0}}));
    REFUSED(scatter_rows_add, dev_scatter_rows_add(d, b16, x, id4));
    REFUSED(embed_bwd, dev_embed_bwd(d, y, id4, b16));
    REFUSED(embed_bwd, dev_embed_bwd_part(d, v, 1, 1, id4, tensor_2d(f, DT_F32, 4, tensor_count(v))));
    REFUSED(weight_pack, dev_weight_pack(d, w7, tensor_2d(g, DT_F32, 8, 8)));
    REFUSED(weight_unpack, dev_weight_unpack(d, b16, w));
    REFUSED(sumsq, dev_sumsq(d, tensor_1d(g, DT_F32, 1), v, tensor_2d(f, DT_I64, 1, 2), 0));
    REFUSED(sumsq, dev_sumsq(d, tensor_1d(g, DT_F64, 2), v, tensor_2d(f, DT_I64, 1, 2), 0));
    REFUSED(checksum, dev_checksum(d, tensor_1d(g, DT_F32, 1), tensor_1d(f, DT_U8, 64)));
    REFUSED(checksum, dev_checksum(d, tensor_1d(g, DT_I64, 1), v));
    REFUSED(fold, dev_fold(d, x, &x, 1, true));
    REFUSED(fold, dev_fold(d, x, &v, 1, true));
    REFUSED(fold, dev_fold(d, x, &y, 0, true));
    REFUSED(adamw, dev_adamw(d, &opt));
    REFUSED(axpby, dev_axpby(d, x, 1, tensor_2d(g, DT_F32, 8, 4), 1));
    const struct quant8_args q8 = {
        .x = tensor_1d(f, DT_F32, 64), .code = tensor_1d(g, DT_U8, 64), .scale = tensor_1d(g, DT_F32, 2)};
    REFUSED(quant8, dev_quant8(d, &q8));
    REFUSED(dequant8, dev_dequant8(d, &q8));
#undef REFUSED
    /* nothing to do is no error, even without buffers */
    assert_int_equal(dev_matmul_fwd(d, tensor_2d(NULL, DT_F32, 0, 8), tensor_2d(NULL, DT_F32, 0, 8), w, TENSOR_NONE, false), 0);
    assert_int_equal(dev_embed_fwd(d, tensor_2d(NULL, DT_F32, 0, 8), tensor_1d(NULL, DT_I32, 0), w), 0);
}

/* A backend of memory and weights alone answers every other op with ERR_UNSUPPORTED. */
static void test_missing(void **state) {
    (void)state;
    struct dev d;
    assert_int_equal(dev_open_ref(&d), 0);
    const struct dev_ops *full = d.ops;
    const struct dev_ops bare = {.name = "bare",
                                 .alloc = full->alloc,
                                 .free = full->free,
                                 .copy_in = full->copy_in,
                                 .copy_out = full->copy_out,
                                 .weight_bytes = full->weight_bytes,
                                 .weight_pack = full->weight_pack,
                                 .weight_unpack = full->weight_unpack};
    for (int64_t i = 0; i < N_OPS; i++) {
        struct run r;
        if (strcmp(ops_table[i].name, "weight") == 0) continue;
        d.ops = full;
        run_init(&r, &ops_table[i], &ops_table[i].shapes[1], DT_F32, &d);
        d.ops = &bare;
        assert_int_equal(ops_table[i].fwd(&r), ERR_UNSUPPORTED);
        assert_non_null(strstr(err_msg(), "bare backend"));
        if (ops_table[i].bwd) assert_int_equal(ops_table[i].bwd(&r), ERR_UNSUPPORTED);
        run_free(&r);
    }
    dev_close(&d);
}

/* ---- optimizer ---- */

static const int64_t lengths[] = {1, 17, 1003, DEV_SEGMENT};

/* Of one segment; n 0: of none. */
static int sumsq(struct dev *d, const float *f, int64_t n, double *out) {
    struct run r = {.d = d};
    const int64_t segment[] = {0, n}, n_seg = n > 0;
    const struct tensor sum = dev_new(&r, shape_1d(DT_F64, 1), false), table = dev_new(&r, shape_2d(DT_I64, 1, 2), false);
    run_copy_in(&r, table.data, segment, sizeof segment);
    int rc = dev_sumsq(d, tensor_rows(sum, 0, n_seg), up_values(&r, shape_1d(DT_F32, n), false, f, NULL),
                       tensor_rows(table, 0, n_seg), 0);
    if (rc == 0) rc = dev_copy_out(d, out, sum.data, sizeof *out);
    run_free_blocks(&r);
    return rc;
}

static void test_sumsq(void **state) {
    (void)state;
    static const float odd[] = {NAN, INFINITY, -INFINITY};
    for (int b = 0; b < two.n; b++)
        for (int64_t k = 0; k < COUNT(lengths); k++) {
            const int64_t n = lengths[k];
            struct rng g = {.seed = 1, .stream = RNG_TEST};
            float *f = xcalloc((size_t)n, sizeof *f);
            double got = 0, again = 0, want = 0;
            for (int64_t i = 0; i < n; i++) {
                f[i] = rng_normal(&g) * (i % 2 ? 1e25f : 1); /* squares beyond f32 */
                want += (double)f[i] * f[i];
            }
            const int rc = sumsq(&two.dev[b], f, n, &got);
            if (rc == ERR_UNSUPPORTED) {
                report_skip(two.name[b], "sumsq");
                free(f);
                break;
            }
            assert_int_equal(rc, 0);
            if (fabs(got - want) > 1e-12 * want) /* sums in double in another order */
                fail_msg("%s: sum of squares of %lld is %.17g, want %.17g", two.name[b], (long long)n, got, want);
            assert_int_equal(sumsq(&one.dev[b], f, n, &again), 0);
            assert_memory_equal(&got, &again, sizeof got);
            for (int64_t i = 0; i < COUNT(odd); i++) {
                f[n / 2] = odd[i];
                assert_int_equal(sumsq(&two.dev[b], f, n, &got), 0);
                assert_true(isnan(odd[i]) ? isnan(got) : isinf(got));
            }
            free(f);
        }
    double none;
    assert_int_equal(sumsq(&two.dev[0], NULL, 0, &none), 0); /* nothing to do */
}

/* A byte that differs anywhere is seen, every device has the same sum, on any number of threads. */
static void test_checksum(void **state) {
    (void)state;
    enum { MOST = (3 << 20) + 5 };
    static const int64_t sizes[] = {0, 1, 7, 8, 9, 4096, (1 << 20) + 3, MOST};
    uint8_t *x = xmalloc(MOST);
    for (int64_t i = 0; i < MOST; i++) x[i] = (uint8_t)(i * 131 >> 3);
    for (int64_t k = 0; k < COUNT(sizes); k++) {
        uint64_t want = 0, got = 0;
        for (int b = -1; b < 2 * two.n; b++) {
            struct dev *d = b < 0 ? &two.dev[0] : b % 2 ? &one.dev[b / 2] : &two.dev[b / 2];
            struct run r = {.d = d};
            const struct tensor sum = dev_new(&r, shape_1d(DT_I64, 1), false),
                                bytes = tensor_rows(dev_new(&r, shape_1d(DT_U8, sizes[k] + 1), false), 0, sizes[k]);
            run_copy_in(&r, bytes.data, x, (size_t)sizes[k]);
            const int rc = dev_checksum(d, sum, bytes);
            if (rc == 0) assert_int_equal(dev_copy_out(d, &got, sum.data, sizeof got), 0);
            if (rc == 0 && b < 0) want = got;
            if (rc == 0) assert_true(got == want);
            for (int64_t at = 0; rc == 0 && at < sizes[k]; at += sizes[k] / 3 + 1) {
                const uint8_t other = x[at] ^ 1;
                run_copy_in(&r, (char *)bytes.data + at, &other, 1);
                assert_int_equal(dev_checksum(d, sum, bytes), 0);
                assert_int_equal(dev_copy_out(d, &got, sum.data, sizeof got), 0);
                assert_true(got != want);
                run_copy_in(&r, (char *)bytes.data + at, x + at, 1);
            }
            run_free_blocks(&r);
            if (rc == ERR_UNSUPPORTED) report_skip(d->describe, "checksum");
            else assert_int_equal(rc, 0);
        }
    }
    free(x);
}

/* Ten steps of AdamW on n elements; out (3, n): p, m, v. want: the same in double. */
static int adamw_steps(struct dev *d, int64_t n, float *out, double *want) {
    struct run r = {.d = d};
    struct rng g = {.seed = 2, .stream = RNG_TEST};
    float *p = xcalloc((size_t)n, sizeof *p), *grad = xcalloc((size_t)n, sizeof *grad);
    for (int64_t i = 0; i < n; i++) {
        want[i] = p[i] = rng_normal(&g);
        want[n + i] = want[2 * n + i] = 0;
    }
    const struct tensor shape = shape_1d(DT_F32, n);
    struct adamw_args a = {.p = up_values(&r, shape, false, p, NULL),
                           .m = up_acc(&r, shape, false),
                           .v = up_acc(&r, shape, false),
                           .g = dev_new(&r, shape, false),
                           .lr = 1e-2,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .grad_scale = 0.5f};
    int rc = 0;
    for (a.step = 1; a.step <= 10 && rc == 0; a.step++) {
        const double t = (double)a.step;
        for (int64_t i = 0; i < n; i++) {
            double *pd = &want[i], *m = &want[n + i], *v = &want[2 * n + i];
            grad[i] = rng_normal(&g);
            const double gs = 0.5 * grad[i];
            *m = 0.9 * *m + 0.1 * gs;
            *v = 0.999 * *v + 0.001 * gs * gs;
            *pd -= 1e-2 * 0.1 * *pd;
            *pd -= 1e-2 * (*m / (1 - pow(0.9, t))) / (sqrt(*v / (1 - pow(0.999, t))) + 1e-8);
        }
        run_copy_in(&r, a.g.data, grad, (size_t)n * sizeof *grad);
        rc = dev_adamw(d, &a);
    }
    const struct tensor state[] = {a.p, a.m, a.v};
    for (int k = 0; k < 3 && rc == 0; k++) rc = dev_copy_out(d, out + k * n, state[k].data, (size_t)n * sizeof *out);
    run_free_blocks(&r);
    free(p);
    free(grad);
    return rc;
}

static void test_adamw(void **state) {
    (void)state;
    for (int b = 0; b < two.n; b++)
        for (int64_t k = 0; k < COUNT(lengths); k++) {
            const int64_t n = lengths[k];
            float *got = xcalloc((size_t)n * 3, sizeof *got), *again = xcalloc((size_t)n * 3, sizeof *again);
            double *want = xcalloc((size_t)n * 3, sizeof *want);
            const int rc = adamw_steps(&two.dev[b], n, got, want);
            if (rc == 0) {
                /* ten steps, each a handful of f32 roundings of values up to 5 */
                for (int64_t i = 0; i < 3 * n; i++)
                    if (fabs(got[i] - want[i]) > 2e-6 * (i < 2 * n ? 1 : 0.1) * (1 + fabs(want[i])))
                        fail_msg("%s: adamw %c[%lld] is %.9g, want %.9g", two.name[b], "pmv"[i / n], (long long)(i % n),
                                 (double)got[i], want[i]);
                for (int64_t i = 2 * n; i < 3 * n; i++) /* v is a sum of squares: relative */
                    assert_true(fabs(got[i] - want[i]) <= 2e-6 * fabs(want[i]));
                assert_int_equal(adamw_steps(&one.dev[b], n, again, want), 0);
                assert_memory_equal(got, again, (size_t)n * 3 * sizeof *got);
            } else if (rc != ERR_UNSUPPORTED) {
                fail_msg("%s: %s", two.name[b], err_msg());
            }
            free(got);
            free(again);
            free(want);
            if (rc < 0) {
                report_skip(two.name[b], "adamw");
                break;
            }
        }
}

/* y = a x + b y of n elements, then x as codes and back. out: y, x from codes, codes as floats, scales. */
static int combine_and_quantize(struct dev *d, const float *x, const float *y, const float *book, int64_t n, float *out) {
    struct run r = {.d = d};
    const int64_t blocks = (n + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK;
    const struct tensor shape = shape_1d(DT_F32, n), ty = up_values(&r, shape, false, y, NULL);
    struct quant8_args q = {.x = up_values(&r, shape, false, x, NULL),
                            .code = dev_new(&r, shape_1d(DT_U8, n), false),
                            .scale = dev_new(&r, shape_1d(DT_F32, blocks), false),
                            .book = up_values(&r, shape_1d(DT_F32, 256), false, book, NULL)};
    uint8_t *codes = xcalloc((size_t)n, 1);
    int rc = dev_axpby(d, ty, 0.3f, q.x, -1.7f);
    if (rc == 0) rc = dev_copy_out(d, out, ty.data, (size_t)n * 4);
    if (rc == 0) rc = dev_quant8(d, &q);
    if (rc == 0) rc = dev_zero(d, q.x.data, (size_t)n * 4);
    if (rc == 0) rc = dev_dequant8(d, &q);
    if (rc == 0) rc = dev_copy_out(d, out + n, q.x.data, (size_t)n * 4);
    if (rc == 0) rc = dev_copy_out(d, codes, q.code.data, (size_t)n);
    for (int64_t i = 0; i < n; i++) out[2 * n + i] = codes[i];
    if (rc == 0) rc = dev_copy_out(d, out + 3 * n, q.scale.data, (size_t)blocks * 4);
    free(codes);
    run_free_blocks(&r);
    return rc;
}

/* Definitions that leave nothing open: every backend gives the same bits, and they are right. */
static void test_flat_ops(void **state) {
    (void)state;
    float book[256];
    for (int i = 0; i < 256; i++) book[i] = (float)(i - 127) * (float)abs(i - 127) / (128.0f * 128.0f);
    for (int64_t k = 0; k < COUNT(lengths); k++) {
        const int64_t n = lengths[k], blocks = (n + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK, all = 3 * n + blocks;
        struct rng g = {.seed = 3, .stream = RNG_TEST};
        float *x = xcalloc((size_t)n, 4), *y = xcalloc((size_t)n, 4);
        float *want = xcalloc((size_t)all, 4), *got = xcalloc((size_t)all, 4);
        for (int64_t i = 0; i < n; i++) {
            x[i] = i / DEV_QUANT_BLOCK == 2 ? 0 : rng_normal(&g) * (i % 3 ? 1e-6f : 1); /* a block of zeros */
            y[i] = rng_normal(&g);
        }
        assert_int_equal(combine_and_quantize(&two.dev[0], x, y, book, n, want), 0);
        for (int64_t i = 0; i < n; i++) {
            const float scale = want[3 * n + i / DEV_QUANT_BLOCK], v = scale > 0 ? x[i] / scale : 0;
            const int code = (int)want[2 * n + i];
            assert_true(want[i] == 0.3f * x[i] + -1.7f * y[i]);
            assert_true(fabsf(x[i]) <= scale && want[n + i] == book[code] * scale);
            for (int c = 0; c < 256; c++) assert_true(fabsf(book[code] - v) <= fabsf(book[c] - v) + 1e-7f); /* none is nearer */
        }
        for (int b = 0; b < two.n; b++) {
            assert_int_equal(combine_and_quantize(&two.dev[b], x, y, book, n, got), 0);
            assert_memory_equal(got, want, (size_t)all * 4);
            assert_int_equal(combine_and_quantize(&one.dev[b], x, y, book, n, got), 0);
            assert_memory_equal(got, want, (size_t)all * 4);
        }
        free(x);
        free(y);
        free(want);
        free(got);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flat_ops), cmocka_unit_test(test_tensor),  cmocka_unit_test(test_memory),
        cmocka_unit_test(test_misfits),  cmocka_unit_test(test_missing), cmocka_unit_test(test_sumsq),
        cmocka_unit_test(test_checksum), cmocka_unit_test(test_adamw),
    };
    backends_open(&two, 2);
    backends_open(&one, 1);
    const int failed = cmocka_run_group_tests_name("ops: checks, memory, optimizer", tests, NULL, NULL);
    backends_close(&two);
    backends_close(&one);
    return failed;
}
