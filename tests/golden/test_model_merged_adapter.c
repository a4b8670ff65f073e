/* test_model_merged_adapter.c - an adapter on latent attention, whose kv_b_proj multiplies queries by its rows of keys: log-probs
 * beside the model that has it merged, gradients beside that one's, dB = scale dW A^T and dA = scale B^T dW. The gradients of
 * weights are compared with transformers' by test_model_golden.c. */
#include "model_case.h"

#include "model/master_weights.h"
#include "base/rng.h"

enum { RANK = 4, N_SEQS = 3, LEN = 100, ROWS = N_SEQS * LEN, N = N_SEQS * (LEN - 1) }; /* rows: more than adapters take at a time */
static const float SCALE = 2;
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};

struct side {
    struct dev dev;
    struct model *m;
    struct model_logp_args l;
    float logp[N], entropy[N], *grad; /* of what is trained */
};

static void put_adapter(struct model *m) {
    struct lora_config l = {.rank = RANK, .alpha = (double)SCALE * RANK, .targets = json_string("all-linear")};
    struct rng rng = {.seed = 8, .stream = RNG_TEST};
    OK(model_lora_create(m, &l, 1));
    lora_config_free(&l);
    float *w = xmalloc((size_t)m->n_train * sizeof *w);
    for (int64_t i = 0; i < m->n_train; i++) w[i] = 0.05f * rng_normal(&rng);
    OK(dev_copy_in(m->dev, m->master, w, (size_t)m->n_train * sizeof *w));
    OK(model_refresh(m));
    free(w);
}

static void both_ways(struct side *s, struct model_keep keep) {
    int32_t ids[ROWS], row[N], target[N];
    float inv_temp[N], dlogp[N], dentropy[N];
    struct case_seq seqs[N_SEQS];
    struct rng rng = {.seed = 3, .stream = RNG_TEST};
    for (int i = 0; i < ROWS; i++) ids[i] = (int32_t)rng_below(&rng, (uint64_t)s->m->cfg.vocab);
    for (int i = 0, k = 0; i < N_SEQS; i++) {
        seqs[i] = (struct case_seq){ids + (ptrdiff_t)i * LEN, LEN};
        for (int t = 0; t < LEN - 1; t++, k++) {
            row[k] = i * LEN + t;
            target[k] = ids[row[k] + 1];
            inv_temp[k] = 1;
            dlogp[k] = rng_normal(&rng);
            dentropy[k] = 0.1f * rng_normal(&rng);
        }
    }
    const size_t bytes = (size_t)s->m->n_train * sizeof(float);
    const struct model_logp_args l = {
        .n = N, .row = row, .target = target, .inv_temp = inv_temp, .logp = s->logp, .entropy = s->entropy};
    struct model_batch b;
    struct model_acts *a;
    float *g = case_garbage(&s->dev, bytes);
    case_pack(&s->dev, &b, seqs, N_SEQS);
    OK(model_acts_create(&a, s->m, ROWS, keep, NULL));
    OK(model_forward(s->m, &b, a));
    OK(model_logp(s->m, a, &l));
    OK(model_backward(
        s->m, a,
        &(struct model_backward_args){
            .batch = &b, .logp = &l, .dlogp = dlogp, .dentropy = dentropy, .sink = &(struct model_grad_sink){.flat = g}}));
    s->grad = xmalloc(bytes);
    OK(dev_copy_out(&s->dev, s->grad, g, bytes));
    dev_free(&s->dev, g, bytes);
    model_acts_destroy(a);
    case_unpack(&s->dev, &b);
}

static void open_side(struct side *s, const char *backend, const char *dir, int flags) {
    case_dev(&s->dev, backend, 2);
    OK(model_open(&s->m, &s->dev, &(struct model_open_args){.dir = dir, .act = DT_F32, .flags = flags, .max_len = 128}));
}
static void close_side(struct side *s) {
    model_close(s->m);
    assert_int_equal(s->dev.allocated, 0);
    dev_close(&s->dev);
    free(s->grad);
    free(s);
}

/* Largest difference of A's and B's gradients from those of W, relative to the largest entry. */
static double module_error(const struct side *own, const struct side *merged, const float *master, const struct model_param *a) {
    const struct model_param *const b = a + 1, *w = NULL;
    const size_t module = (size_t)(strstr(a->name, ".lora_A") - a->name);
    for (int64_t i = 0; i < merged->m->n_params && !w; i++)
        if (strncmp(merged->m->params[i].name, a->name, module) == 0 && strcmp(merged->m->params[i].name + module, ".weight") == 0)
            w = &merged->m->params[i];
    assert_true(w && a->rows == RANK && b->rows == w->rows && a->cols == w->cols);
    const float *const dw = merged->grad + w->offset, *const wa = master + a->offset, *const wb = master + b->offset;
    double worst_a = 0, worst_b = 0, size_a = 0, size_b = 0;
    for (int64_t r = 0; r < RANK; r++) {
        for (int64_t k = 0; k < a->cols; k++) {
            double want = 0;
            for (int64_t n = 0; n < b->rows; n++) want += (double)SCALE * wb[n * RANK + r] * dw[n * a->cols + k];
            size_a = fmax(size_a, fabs(want));
            worst_a = worse_of(worst_a, fabs((double)own->grad[a->offset + r * a->cols + k] - want));
        }
        for (int64_t n = 0; n < b->rows; n++) {
            double want = 0;
            for (int64_t k = 0; k < a->cols; k++) want += (double)SCALE * wa[r * a->cols + k] * dw[n * a->cols + k];
            size_b = fmax(size_b, fabs(want));
            worst_b = worse_of(worst_b, fabs((double)own->grad[b->offset + n * RANK + r] - want));
        }
    }
    assert_true(size_a > 0 && size_b > 0);
    return worse_of(worst_a / size_a, worst_b / size_b);
}

static void check(const char *backend, struct model_keep keep) {
    struct side *own = xcalloc(1, sizeof *own), *merged = xcalloc(1, sizeof *merged);
    char *base = case_path("deepseek_v3", ""), *dir = case_temp_dir();
    double worst = 0, of_latent = 0;
    int n_latent = 0;
    open_side(own, backend, base, MODEL_INFER);
    put_adapter(own->m);
    both_ways(own, keep);
    OK(model_export(own->m, dir, &(struct model_export_args){.dt = DT_F32}));
    open_side(merged, backend, dir, MODEL_TRAIN);
    both_ways(merged, MODEL_KEEP_ALL);
    float *master = xmalloc((size_t)own->m->n_train * sizeof *master);
    OK(dev_copy_out(&own->dev, master, own->m->master, (size_t)own->m->n_train * sizeof *master));
    for (int64_t i = 0; i < own->m->n_train_params; i += 2) {
        const double e = module_error(own, merged, master, &own->m->train_params[i]);
        worst = worse_of(worst, e);
        if (!strstr(own->m->train_params[i].name, "kv_b_proj")) continue;
        of_latent = worse_of(of_latent, e);
        n_latent++;
    }
    const double e_logp = case_worst(own->logp, merged->logp, N), e_ent = case_worst(own->entropy, merged->entropy, N);
    print_message("deepseek_v3 %-4s: beside merged weights: logp %.1e, entropy %.1e, gradients %.1e, of kv_b_proj %.1e\n", backend,
                  e_logp, e_ent, worst, of_latent);
    assert_int_equal(n_latent, own->m->cfg.n_layers);
    assert_true(e_logp <= 1e-5 && e_ent <= 1e-5 && worst <= 2e-5);
    free(master);
    close_side(own);
    close_side(merged);
    case_drop_dir(dir);
    free(base);
}

static void beside_merged(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof BACKENDS / sizeof *BACKENDS; i++)
        if (case_has(BACKENDS[i])) check(BACKENDS[i], MODEL_KEEP_ALL);
    check("cpu", MODEL_KEEP_LAYER);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(beside_merged)};
    return cmocka_run_group_tests_name("merged adapters", tests, NULL, NULL);
}
