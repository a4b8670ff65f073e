/* test_model_mtp.c - the MTP layer in fp32 beside torch (tools/oracle_mtp.py), on every backend: logits, log-probs, gradients
 * with and without those below it; and that files keep what is not read. */
#include "model_case.h"

static const double MAX_REL = 1e-5, MAX_NMSE = 1e-9; /* bars of the project */
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH_BACKEND(k) for (size_t k = 0; k < sizeof BACKENDS / sizeof *BACKENDS; k++)

static const char *const CASES[] = {"mimo", "qwen3_5_mtp", "qwen3_5_mtp_experts", "qwen3_next_mtp"};
#define EACH_CASE(k) for (size_t k = 0; k < sizeof CASES / sizeof *CASES; k++)

static void open_case(struct model_case *c, const char *name, const char *backend, bool detached) {
    char *dir = case_path(name, "");
    *c = (struct model_case){0};
    case_dev(&c->dev, backend, 2);
    OK(model_open(&c->m, &c->dev,
                  &(struct model_open_args){
                      .dir = dir, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = 128, .mtp = true, .mtp_detached = detached}));
    free(dir);
    case_golden(c, name);
}

/* The batch with each row's next token; 0 where there is none. */
static struct model_batch shifted(struct model_case *c, const struct model_batch *b) {
    struct model_batch s = *b;
    int32_t *ids = xcalloc((size_t)c->n_rows, sizeof *ids);
    for (int64_t i = 0; i < c->n_seqs; i++)
        for (int64_t r = c->q_start[i]; r + 1 < c->q_start[i + 1]; r++) ids[r] = c->ids[r + 1];
    s.ids = case_ints(&c->dev, ids, c->n_rows);
    free(ids);
    return s;
}

static double check_logits(struct model_case *c, struct model_acts *a) {
    struct dev *d = &c->dev;
    const int64_t n = c->n_rows, h = c->m->cfg.hidden, vocab = c->m->cfg.vocab;
    int32_t *idx = xmalloc((size_t)n * sizeof *idx);
    for (int64_t i = 0; i < n; i++) idx[i] = (int32_t)i;
    const struct tensor rows = case_ints(d, idx, n), x = tensor_2d(case_alloc(d, (size_t)(n * h) * 4), DT_F32, n, h),
                        z = tensor_2d(case_alloc(d, (size_t)(n * vocab) * 4), DT_F32, n, vocab);
    float *out = xmalloc((size_t)(n * vocab) * 4);
    int64_t n_want;
    const float *want = case_data(c->golden, "mtp_logits", DT_F32, &n_want);
    OK(model_mtp_hidden(c->m, a, rows, x));
    OK(dev_logits(d, z, x, c->m->head));
    OK(dev_copy_out(d, out, z.data, (size_t)(n * vocab) * 4));
    assert_int_equal(n_want, n * vocab);
    const double worst = case_worst(out, want, n_want);
    case_free(d, rows);
    case_free(d, x);
    case_free(d, z);
    free(idx);
    free(out);
    return worst;
}

/* Gradients under the golden prefix: parameters of the MTP layer (mtp), or the others. */
static double check_grads(const struct model_case *c, const float *g, const char *prefix, bool mtp) {
    double worst = 0;
    for (int64_t i = 0; i < c->m->n_params; i++) {
        const struct model_param *const p = &c->m->params[i];
        char key[128];
        int64_t n;
        double size = 0, diff = 0;
        if ((p->offset >= c->m->mtp.first->offset) != mtp) continue;
        snprintf(key, sizeof key, "%s.%s", prefix, p->name);
        const float *want = case_data(c->golden, key, DT_F32, &n);
        for (int64_t k = 0; k < n; k++) {
            size = fmax(size, fabs((double)want[k]));
            diff = worse_of(diff, fabs((double)g[p->offset + k] - (double)want[k]));
        }
        assert_true(size > 0 && case_nmse(g + p->offset, want, n) <= MAX_NMSE);
        worst = worse_of(worst, diff / size);
    }
    return worst;
}

static void check_case(const char *name, const char *backend, struct model_keep keep, bool detached) {
    struct model_case c;
    struct model_batch b, next;
    struct model_acts *a;
    open_case(&c, name, backend, detached);
    struct case_seq s[2] = {case_seq_at(&c, 0), case_seq_at(&c, 1)};
    case_pack(&c.dev, &b, s, 2);
    next = shifted(&c, &b);
    OK(model_acts_create(&a, c.m, c.n_rows, keep, NULL));
    OK(model_forward(c.m, &b, a));
    OK(model_logp(c.m, a, &c.l));
    OK(model_mtp_begin(c.m, a));
    OK(model_mtp_forward(c.m, &next, a, TENSOR_NONE));
    const double e_logits = check_logits(&c, a);
    struct model_logp_args l = {0};
    l.row = case_data(c.golden, "mtp_row", DT_I32, &l.n);
    l.target = case_data(c.golden, "mtp_target", DT_I32, NULL);
    float *ones = xmalloc((size_t)l.n * 4);
    for (int64_t i = 0; i < l.n; i++) ones[i] = 1;
    l.inv_temp = ones;
    l.logp = xmalloc((size_t)l.n * 4);
    OK(model_mtp_logp(c.m, a, &l));
    const double e_logp = case_worst(l.logp, case_data(c.golden, "mtp_logp", DT_F32, NULL), l.n);

    float *g_dev = case_garbage(&c.dev, (size_t)c.m->n_elems * 4), *g = xmalloc((size_t)c.m->n_elems * 4);
    OK(model_backward(
        c.m, a,
        &(struct model_backward_args){.batch = &b,
                                      .logp = &c.l,
                                      .dlogp = c.dlogp,
                                      .dentropy = c.dentropy,
                                      .mtp = {.batch = &next, .logp = &l, .dlogp = case_data(c.golden, "mtp_dlogp", DT_F32, NULL)},
                                      .sink = &(struct model_grad_sink){.flat = g_dev}}));
    OK(dev_copy_out(&c.dev, g, g_dev, (size_t)c.m->n_elems * 4));
    const double e_own = check_grads(&c, g, "mtp_grad", true), e_rest = check_grads(&c, g, detached ? "grad" : "mtp_grad", false);
    print_message("%s %-4s%s: logits %.1e, logp %.1e, its gradients %.1e, the others' %.1e\n", name, backend,
                  detached ? " detached" : "", e_logits, e_logp, e_own, e_rest);
    assert_true(e_logits <= MAX_REL && e_logp <= MAX_REL && e_own <= MAX_REL && e_rest <= MAX_REL);

    /* without a loss of its own: its gradient is 0, the others' are the plain ones */
    OK(model_forward(c.m, &b, a));
    OK(model_logp(c.m, a, &c.l));
    OK(model_backward(c.m, a,
                      &(struct model_backward_args){.batch = &b,
                                                    .logp = &c.l,
                                                    .dlogp = c.dlogp,
                                                    .dentropy = c.dentropy,
                                                    .sink = &(struct model_grad_sink){.flat = g_dev}}));
    OK(dev_copy_out(&c.dev, g, g_dev, (size_t)c.m->n_elems * 4));
    for (int64_t i = c.m->mtp.first->offset; i < c.m->n_elems; i++) assert_true(g[i] == 0);
    assert_true(check_grads(&c, g, "grad", false) <= MAX_REL);

    dev_free(&c.dev, g_dev, (size_t)c.m->n_elems * 4);
    free(g);
    free(ones);
    free(l.logp);
    model_acts_destroy(a);
    case_free(&c.dev, next.ids);
    case_unpack(&c.dev, &b);
    case_close(&c);
}

static void against_torch(void **state) {
    (void)state;
    EACH_BACKEND(k) {
        if (!case_has(BACKENDS[k])) continue;
        EACH_CASE(i) {
            check_case(CASES[i], BACKENDS[k], MODEL_KEEP_ALL, false);
            check_case(CASES[i], BACKENDS[k], MODEL_KEEP_LAYER, true);
        }
    }
}

static void same_tensors(const char *a_path, const char *b_path) {
    struct safetensors_file *a, *b;
    OK(safetensors_open(&a, a_path));
    OK(safetensors_open(&b, b_path));
    assert_int_equal(safetensors_count(a), safetensors_count(b));
    for (int64_t i = 0; i < safetensors_count(a); i++) {
        const struct safetensors_tensor *const x = safetensors_at(a, i), *const y = safetensors_find(b, x->name);
        assert_non_null(y);
        assert_true(x->dt == y->dt && x->nd == y->nd && x->bytes == y->bytes);
        assert_memory_equal(x->dim, y->dim, (size_t)x->nd * sizeof *x->dim);
        assert_memory_equal(x->data, y->data, x->bytes);
    }
    safetensors_close(a);
    safetensors_close(b);
}

/* Not a part of the model, its tensors are exported as they were; a part of it, they are exported like others. */
static void check_files(const char *name) {
    char *dir = case_path(name, ""), *weights = case_path(name, "model.safetensors");
    for (int used = 0; used < 2; used++) {
        struct dev d;
        struct model *m;
        char *to = case_temp_dir(), *exported = file_join(to, "model.safetensors");
        case_dev(&d, "ref", 1);
        OK(model_open(&m, &d,
                      &(struct model_open_args){.dir = dir, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = 8, .mtp = used > 0}));
        assert_true((m->mtp.first != NULL) == (used > 0));
        OK(model_export(m, to, &(struct model_export_args){.dt = -1}));
        same_tensors(weights, exported);
        model_close(m);
        assert_int_equal(d.allocated, 0);
        dev_close(&d);
        case_drop_dir(to);
        free(exported);
    }
    free(dir);
    free(weights);
}
static void files_keep_it(void **state) {
    (void)state;
    EACH_CASE(i) check_files(CASES[i]);
}

static void refusals(void **state) {
    (void)state;
    struct dev d;
    struct model *m;
    char *dir = case_path("qwen2", "");
    case_dev(&d, "ref", 1);
    assert_int_equal(model_open(&m, &d, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = 8, .mtp = true}),
                     ERR_UNSUPPORTED);
    assert_non_null(strstr(err_msg(), "0 layers for multi-token prediction of a qwen2 model"));
    free(dir);
    dev_close(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(against_torch), cmocka_unit_test(files_keep_it),
                                       cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
