/* test_model_quant.c - 4- and 8-bit bases.  Codes, scales and what they stand for against bitsandbytes' own, exactly; and an
 * adapter on a quantised base against the same adapter on a plain model of the dequantised weights, to the bit, forward
 * and backward (test_model_peft.c compares that one with peft).  The fixture comes from tools/oracle_quant.py. */
#include "model_case.h"

#include "base/json.h"
#include "model/master_weights.h"
#include "base/rng.h"

static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
static const struct {
    enum quant_kind kind;
    const char *name;
} KINDS[] = {{QUANT_NF4, "nf4"}, {QUANT_INT8, "int8"}};
static const char *const BASES[] = {"qwen2", "deepseek_v3"}; /* of adapters; the latter multiplies by W and by W^T in forward */
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)

static struct safetensors_file *fixture(void) {
    struct safetensors_file *f;
    OK(safetensors_open(&f, FIXTURES "/quant/codes.safetensors"));
    return f;
}

static void codes_of_bitsandbytes(void **state) {
    (void)state;
    struct safetensors_file *f = fixture();
    int64_t n, n_codes, n_scales;
    assert_memory_equal(dev_nf4_book, case_data(f, "book", DT_F32, &n), sizeof dev_nf4_book);
    assert_int_equal(n, 16);
    const struct safetensors_tensor *w = safetensors_find(f, "w");
    EACH(k, KINDS) {
        char name[32];
        snprintf(name, sizeof name, "%s.code", KINDS[k].name);
        const uint8_t *want = case_data(f, name, DT_U8, &n_codes);
        snprintf(name, sizeof name, "%s.absmax", KINDS[k].name);
        const float *want_scale = case_data(f, name, DT_F32, &n_scales);
        uint8_t *code = xcalloc((size_t)n_codes, 1);
        float *scale = xcalloc((size_t)n_scales, sizeof *scale);
        model_quantize(KINDS[k].kind, case_data(f, "w", DT_F32, NULL), w->dim[0], w->dim[1], code, scale);
        assert_memory_equal(scale, want_scale, (size_t)n_scales * sizeof *scale);
        assert_memory_equal(code, want, (size_t)n_codes);
        free(code);
        free(scale);
    }
    safetensors_close(f);
}

/* The numbers that bitsandbytes gives back, on every backend. */
static void values_of_bitsandbytes(void **state) {
    (void)state;
    struct safetensors_file *f = fixture();
    const struct safetensors_tensor *t = safetensors_find(f, "w");
    const int64_t n = t->dim[0] * t->dim[1];
    int64_t n_codes, n_scales;
    const void *code = case_data(f, "nf4.code", DT_U8, &n_codes), *scale = case_data(f, "nf4.absmax", DT_F32, &n_scales);
    EACH(b, BACKENDS) {
        if (!case_has(BACKENDS[b])) continue;
        struct dev d;
        case_dev(&d, BACKENDS[b], 2);
        struct dequant_args a = {.kind = QUANT_NF4,
                                 .code = tensor_1d(case_alloc(&d, (size_t)n_codes), DT_U8, n_codes),
                                 .scale = tensor_1d(case_alloc(&d, (size_t)n_scales * 4), DT_F32, n_scales),
                                 .w = tensor_2d(case_alloc(&d, (size_t)n * 4), DT_F32, t->dim[0], t->dim[1])};
        float *w = xmalloc((size_t)n * 4);
        OK(dev_copy_in(&d, a.code.data, code, (size_t)n_codes));
        OK(dev_copy_in(&d, a.scale.data, scale, (size_t)n_scales * 4));
        OK(dev_dequant(&d, &a));
        OK(dev_copy_out(&d, w, a.w.data, (size_t)n * 4));
        const float *want = case_data(f, "nf4.w", DT_F32, NULL);
        for (int64_t i = 0; i < n; i++)
            if (w[i] != want[i])
                fail_msg("%s: element %lld is %g, bitsandbytes' %g", BACKENDS[b], (long long)i, (double)w[i], (double)want[i]);
        free(w);
        case_free(&d, a.code);
        case_free(&d, a.scale);
        case_free(&d, a.w);
        dev_close(&d);
    }
    safetensors_close(f);
}

/* ---- an adapter on it ---- */

/* An adapter in mid-training: B is not zero. */
static void put_adapter(struct model *m) {
    struct lora_config l = {.rank = 4, .alpha = 8, .targets = json_string("all-linear")};
    struct rng rng = {.seed = 8, .stream = RNG_TEST};
    OK(model_lora_create(m, &l, 1));
    lora_config_free(&l);
    float *w = xmalloc((size_t)m->n_train * sizeof *w);
    for (int64_t i = 0; i < m->n_train; i++) w[i] = 0.1f * rng_normal(&rng);
    OK(dev_copy_in(m->dev, m->master, w, (size_t)m->n_train * sizeof *w));
    OK(model_refresh(m));
    free(w);
}

/* Log-probs, then the adapter's gradients; caller frees. */
static float *both_ways(struct model_case *c, struct model_keep keep, size_t *bytes) {
    struct model_batch b;
    struct model_acts *a;
    const struct case_seq s[2] = {case_seq_at(c, 0), case_seq_at(c, 1)};
    const size_t n_logp = (size_t)c->l.n * 4, n_grad = (size_t)c->m->n_train * 4;
    float *out = xmalloc(n_logp + n_grad), *g = case_garbage(&c->dev, n_grad);
    case_pack(&c->dev, &b, s, 2);
    OK(model_acts_create(&a, c->m, c->n_rows, keep, NULL));
    OK(model_forward(c->m, &b, a));
    OK(model_logp(c->m, a, &c->l));
    OK(model_backward(
        c->m, a,
        &(struct model_backward_args){
            .batch = &b, .logp = &c->l, .dlogp = c->dlogp, .dentropy = c->dentropy, .sink = &(struct model_grad_sink){.flat = g}}));
    memcpy(out, c->l.logp, n_logp);
    OK(dev_copy_out(&c->dev, out + c->l.n, g, n_grad));
    dev_free(&c->dev, g, n_grad);
    model_acts_destroy(a);
    case_unpack(&c->dev, &b);
    *bytes = n_logp + n_grad;
    return out;
}

static void open_case(struct model_case *c, const char *name, const char *backend, const char *dir, enum quant_kind quant) {
    *c = (struct model_case){0};
    case_dev(&c->dev, backend, 2);
    OK(model_open(&c->m, &c->dev, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = 128, .quant = quant}));
    case_golden(c, name);
}

static void adapter_check(const char *name, const char *backend, size_t kind, struct model_keep keep) {
    char *base = case_path(name, ""), *dir = case_temp_dir();
    struct model_case c, plain;
    size_t bytes, same;
    open_case(&c, name, backend, base, KINDS[kind].kind);
    const struct model_open_args args = {.act = DT_F32, .max_len = 128, .quant = KINDS[kind].kind};
    const size_t planned = model_open_bytes(&c.m->cfg, &c.dev, &args);
    assert_true(c.dev.allocated <= planned + 4096 && planned <= c.dev.allocated + 4096); /* what the plan counts is what is taken */
    OK(model_export(c.m, dir, &(struct model_export_args){.dt = DT_F32}));
    put_adapter(c.m);
    float *got = both_ways(&c, keep, &bytes);
    open_case(&plain, name, backend, dir, QUANT_NONE);
    put_adapter(plain.m);
    float *want = both_ways(&plain, keep, &same);
    assert_int_equal(bytes, same);
    assert_memory_equal(got, want, bytes);
    const double off = case_worst(c.l.logp, c.want_logp, c.l.n);
    print_message("%s, %-4s on %s: log-probs and gradients are those of the dequantised model, 0 bits differ\n", name,
                  KINDS[kind].name, backend);
    assert_true(off > 1e-3); /* and it is not the model before */
    free(got);
    free(want);
    case_close(&c);
    case_close(&plain);
    case_drop_dir(dir);
    free(base);
}

static void adapter_on_codes(void **state) {
    (void)state;
    EACH(b, BACKENDS) {
        if (!case_has(BACKENDS[b])) continue;
        EACH(k, KINDS) EACH(i, BASES) adapter_check(BASES[i], BACKENDS[b], k, MODEL_KEEP_ALL);
    }
    EACH(i, BASES) adapter_check(BASES[i], "cpu", 0, MODEL_KEEP_LAYER);
}

/* Directories that transformers saved in 4 bits give the f32 values that bitsandbytes makes of them, to the bit. */
static void saved_by_bitsandbytes(void **state) {
    (void)state;
    static const char *const names[] = {"bnb_single", "bnb_double"};
    EACH(k, names) EACH(b, BACKENDS) {
        if (!case_has(BACKENDS[b])) continue;
        char *from = xasprintf("%s/quant/%s", FIXTURES, names[k]), *golden = file_join(from, "weights.safetensors"),
             *dir = case_temp_dir(), *path = file_join(dir, "model.safetensors");
        struct dev dev;
        struct model *m;
        struct safetensors_file *want, *got;
        case_dev(&dev, BACKENDS[b], 2);
        struct model_open_args a = {.dir = from, .act = DT_F32, .max_len = 128, .quant = QUANT_NF4};
        OK(model_open(&m, &dev, &a));
        OK(model_export(m, dir, &(struct model_export_args){.dt = DT_F32}));
        OK(safetensors_open(&want, golden));
        OK(safetensors_open(&got, path));
        assert_int_equal(safetensors_count(want), 14);
        for (int64_t i = 0; i < safetensors_count(want); i++) {
            const struct safetensors_tensor *w = safetensors_at(want, i), *g = safetensors_find(got, w->name);
            assert_true(g && g->dt == DT_F32 && g->bytes == w->bytes);
            assert_memory_equal(g->data, w->data, w->bytes);
        }
        model_close(m);
        OK(model_open(&m, &dev, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = 128})); /* in full */
        model_close(m);
        a.quant = QUANT_NONE;
        assert_int_equal(model_open(&m, &dev, &a), ERR_UNSUPPORTED);
        assert_non_null(strstr(err_msg(), "set quantization=nf4"));
        safetensors_close(want);
        safetensors_close(got);
        /* a config.json that promises codes beside weights that are none */
        json_t *config = NULL;
        char *promise = file_join(from, "config.json"), *there = file_join(dir, "config.json");
        OK(json_load(&config, promise, 1 << 20));
        OK(json_save_atomic(there, config));
        json_decref(config);
        a = (struct model_open_args){.dir = dir, .act = DT_F32, .max_len = 128, .quant = QUANT_NF4};
        assert_int_equal(model_open(&m, &dev, &a), ERR_UNSUPPORTED);
        assert_non_null(strstr(err_msg(), "q_proj.weight is not in NF4 as bitsandbytes saves it"));
        free(promise);
        free(there);
        assert_int_equal(dev.allocated, 0);
        dev_close(&dev);
        case_drop_dir(dir);
        free(from);
        free(golden);
        free(path);
    }
}

/* What a base of the shape of Qwen2.5-0.5B takes. */
static void sizes(void **state) {
    (void)state;
    struct dev d;
    struct model_config c;
    json_t *o = model_arch_config("qwen2.5-0.5b");
    assert_non_null(o);
    OK(dev_open_ref(&d));
    OK(model_config_from_json(&c, o, "qwen2.5-0.5b"));
    struct model_open_args a = {.act = DT_BF16, .max_len = 16};
    const double plain = (double)model_open_bytes(&c, &d, &a), linear = plain - 2.0 * 151936 * 896;
    a.quant = QUANT_NF4;
    const double nf4 = (double)model_open_bytes(&c, &d, &a) - 2.0 * 151936 * 896;
    a.quant = QUANT_INT8;
    const double int8 = (double)model_open_bytes(&c, &d, &a) - 2.0 * 151936 * 896;
    print_message("layers in bf16 %.0f MB, int8 %.0f MB, nf4 %.0f MB with the scratch of one matrix\n", linear / 1e6, int8 / 1e6,
                  nf4 / 1e6);
    assert_true(nf4 < 0.36 * linear && int8 < 0.57 * linear); /* 4.5 and 8 bits of 16, and the scratch */
    model_config_free(&c);
    json_decref(o);
    dev_close(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(codes_of_bitsandbytes), cmocka_unit_test(values_of_bitsandbytes),
                                       cmocka_unit_test(adapter_on_codes), cmocka_unit_test(saved_by_bitsandbytes),
                                       cmocka_unit_test(sizes)};
    return cmocka_run_group_tests_name("quantised bases", tests, NULL, NULL);
}
