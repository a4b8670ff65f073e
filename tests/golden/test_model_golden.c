/* test_model_golden.c - fp32 against Hugging Face transformers and torch, on every
 * backend: logits, log-probs, entropies, every gradient, AdamW over ten steps.
 * The fixtures come from tools/oracle_model.py. */
#include "model_case.h"

/* Bars of the project: 1e-5 relative, NMSE of a tensor 1e-9. */
static const double MAX_REL = 1e-5, MAX_NMSE = 1e-9;

static const char *const CASES[] = {
    "qwen2",   "qwen3",     "llama",      "mistral",    "llama_bias",  "qwen2_window", "seed_oss",      "seed_oss_bias",
    "smollm3", "phi3",      "phi4_mini",  "glm",        "glm4",        "gemma",        "gemma2",        "gemma3_text",
    "exaone4", "granite",   "ministral3", "olmo2",      "olmo3",       "hunyuan",      "qwen3_moe",     "mixtral",
    "olmoe",   "qwen2_moe", "glm4_moe",   "gpt_oss",    "deepseek_v3", "qwen3_5",      "qwen3_5_types", "qwen3_5_experts",
    "mimo",    "granite4",  "qwen3_next", "minimax_m2", "hy_v3",
};
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)

/* Logits of all rows of the last forward, on the host; caller frees. */
static float *logits_of(struct model *m, struct model_acts *a, int64_t n) {
    struct dev *d = m->dev;
    int32_t *idx = xmalloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) idx[i] = (int32_t)i;
    const struct tensor rows = case_ints(d, idx, n);
    const struct tensor h = tensor_2d(case_alloc(d, (size_t)(n * m->cfg.hidden) * dtype_size(m->act)), m->act, n, m->cfg.hidden);
    const struct tensor z = tensor_2d(case_alloc(d, (size_t)(n * m->cfg.vocab) * 4), DT_F32, n, m->cfg.vocab);
    float *out = xmalloc((size_t)(n * m->cfg.vocab) * 4);
    OK(model_hidden(m, a, rows, h));
    OK(dev_logits(d, z, h, m->head));
    OK(dev_copy_out(d, out, z.data, (size_t)(n * m->cfg.vocab) * 4));
    for (int64_t i = 0; i < n * m->cfg.vocab; i++) out[i] *= m->cfg.logit_scale;
    case_free(d, rows);
    case_free(d, h);
    case_free(d, z);
    free(idx);
    return out;
}

static void pack_case(struct model_case *c, struct model_batch *b) {
    struct case_seq s[4];
    assert_true(c->n_seqs <= 4);
    for (int64_t i = 0; i < c->n_seqs; i++) s[i] = case_seq_at(c, i);
    case_pack(&c->dev, b, s, c->n_seqs);
}

/* Choices of experts that are not transformers', after a forward pass that kept them. */
static int64_t other_choices(struct model_case *c, const struct model_batch *b) {
    int64_t n, other = 0;
    const int64_t k = c->m->cfg.n_choices;
    if (!safetensors_find(c->golden, "choices")) return 0;
    const int32_t *const want = case_data(c->golden, "choices", DT_I32, &n);
    assert_int_equal(n, tensor_count(b->routes));
    int32_t *const got = xmalloc((size_t)n * sizeof *got);
    OK(dev_copy_out(&c->dev, got, b->routes.data, (size_t)n * sizeof *got));
    for (int64_t i = 0; i < n; i++) {
        bool found = false;
        for (int64_t s = i / k * k; s < i / k * k + k; s++) found = found || want[s] == got[i];
        other += !found;
    }
    free(got);
    return other;
}

static void check_case(const char *name, const char *backend, struct model_keep keep, bool with_pad) {
    struct model_case c;
    struct model_batch b;
    struct model_acts *a;
    case_open(&c, &(struct case_args){name, backend, 2, DT_F32, MODEL_TRAIN});
    if (with_pad) c.m->cfg.pad = case_seq_at(&c, 0).ids[0];
    pack_case(&c, &b);
    const int64_t routers = model_router_layers(&c.m->cfg), k = c.m->cfg.n_choices;
    if (routers)
        b.routes = (struct tensor){case_alloc(&c.dev, (size_t)(routers * c.n_rows * k) * 4), DT_I32, 3, {routers, c.n_rows, k, 1}};
    b.routes_kept = routers > 0;
    OK(model_acts_create(&a, c.m, c.n_rows, keep, NULL));
    OK(model_forward(c.m, &b, a));
    const int64_t others = other_choices(&c, &b);
    if (routers) case_free(&c.dev, b.routes);
    b.routes = TENSOR_NONE;
    b.routes_kept = false;
    int64_t n;
    const float *want = case_data(c.golden, "logits", DT_F32, &n);
    float *logits = logits_of(c.m, a, c.n_rows);
    const double e_logits = case_worst(logits, want, n), n_logits = case_nmse(logits, want, n);
    free(logits);
    OK(model_logp(c.m, a, &c.l));
    const double e_logp = case_worst(c.l.logp, c.want_logp, c.l.n), e_ent = case_worst(c.l.entropy, c.want_entropy, c.l.n);

    float *g_dev = case_garbage(&c.dev, (size_t)c.m->n_elems * 4), *g = xmalloc((size_t)c.m->n_elems * 4);
    OK(model_backward(c.m, a,
                      &(struct model_backward_args){.batch = &b,
                                                    .logp = &c.l,
                                                    .dlogp = c.dlogp,
                                                    .dentropy = c.dentropy,
                                                    .sink = &(struct model_grad_sink){.flat = g_dev}}));
    OK(dev_copy_out(&c.dev, g, g_dev, (size_t)c.m->n_elems * 4));
    double worst;
    const double e_grad = case_gradient_error(c.golden, c.m->params, c.m->n_params, g, &worst);
    print_message("%-12s %-3s: logits %.1e (nmse %.1e), logp %.1e, entropy %.1e, gradients %.1e (nmse %.1e)", name, backend,
                  e_logits, n_logits, e_logp, e_ent, e_grad, worst);
    print_message(routers ? ", %lld other choices of experts\n" : "\n", (long long)others);
    assert_int_equal(others, 0);
    assert_true(e_logits <= MAX_REL && n_logits <= MAX_NMSE);
    assert_true(e_logp <= MAX_REL && e_ent <= MAX_REL);
    assert_true(e_grad <= MAX_REL && worst <= MAX_NMSE);
    dev_free(&c.dev, g_dev, (size_t)c.m->n_elems * 4);
    free(g);
    model_acts_destroy(a);
    case_unpack(&c.dev, &b);
    case_close(&c);
}

static void against_transformers(void **state) {
    (void)state;
    EACH(k, BACKENDS) EACH(i, CASES) if (case_has(BACKENDS[k])) check_case(CASES[i], BACKENDS[k], MODEL_KEEP_ALL, false);
}
static void with_recompute(void **state) {
    (void)state;
    EACH(i, CASES) check_case(CASES[i], "ref", MODEL_KEEP_LAYER, false);
}
/* pad-row (docs/differences.md): torch's padding_idx would leave the look-up's gradient out of this row. */
static void pad_token_is_trained(void **state) {
    (void)state;
    EACH(i, CASES) check_case(CASES[i], "cpu", MODEL_KEEP_ALL, true);
}

/* The same weights under other rope_scaling entries of config.json. */
static void rope_variants(void **state) {
    (void)state;
    static const char *const names[] = {"linear", "dynamic", "yarn", "yarn_mscale", "yarn_attention"};
    struct safetensors_file *golden;
    char *path = case_path("llama", "ropes.safetensors"), *weights = case_path("llama", "model.safetensors");
    OK(safetensors_open(&golden, path));
    free(path);
    EACH(i, names) {
        struct model_case c = {0};
        struct model_batch b;
        struct model_acts *a;
        char *dir = case_temp_dir(), *file = xasprintf("config_%s.json", names[i]), *key = xasprintf("logits.%s", names[i]);
        char *config = case_path("llama", file);
        case_copy(weights, dir, "model.safetensors");
        case_copy(config, dir, "config.json");
        case_dev(&c.dev, "ref", 1);
        case_golden(&c, "llama");
        const struct case_seq s = case_seq_at(&c, 1);
        OK(model_open(&c.m, &c.dev, &(struct model_open_args){.dir = dir, .act = DT_F32, .max_len = s.n}));
        case_pack(&c.dev, &b, &s, 1);
        OK(model_acts_create(&a, c.m, s.n, MODEL_KEEP_NONE, NULL));
        OK(model_forward(c.m, &b, a));
        float *logits = logits_of(c.m, a, s.n);
        int64_t n;
        const float *want = case_data(golden, key, DT_F32, &n);
        assert_int_equal(n, s.n * c.m->cfg.vocab);
        const double e = case_worst(logits, want, n);
        print_message("rope %-14s: logits %.1e\n", names[i], e);
        assert_true(e <= MAX_REL);
        free(logits);
        model_acts_destroy(a);
        case_unpack(&c.dev, &b);
        case_close(&c);
        free(config);
        free(key);
        free(file);
        case_drop_dir(dir);
    }
    free(weights);
    safetensors_close(golden);
}

/* Ten steps of forward, backward, clip_grad_norm_, AdamW under a cosine schedule with warmup. */
static void check_adamw(const char *backend) {
    enum { STEPS = 10 };
    const struct optim_config o = {.lr = 1e-3,
                                   .beta1 = 0.9,
                                   .beta2 = 0.999,
                                   .eps = 1e-8,
                                   .weight_decay = 0.01,
                                   .clip = 5.0,
                                   .schedule = "cosine",
                                   .warmup_steps = 2,
                                   .total_steps = STEPS,
                                   .min_lr_ratio = 0.1,
                                   .num_cycles = 0.5};
    struct model_case c;
    struct model_batch b;
    struct model_acts *a;
    struct optim *opt;
    struct safetensors_file *golden;
    char *path = case_path("qwen2", "adamw.safetensors");
    OK(safetensors_open(&golden, path));
    free(path);
    const double *norms = case_data(golden, "norms", DT_F64, NULL), *rates = case_data(golden, "rates", DT_F64, NULL);
    const double *losses = case_data(golden, "losses", DT_F64, NULL);
    case_open(&c, &(struct case_args){"qwen2", backend, 2, DT_F32, MODEL_TRAIN});
    pack_case(&c, &b);
    OK(model_acts_create(&a, c.m, c.n_rows, MODEL_KEEP_LAYER, NULL));
    OK(optim_create(&opt, c.m, &o));
    const size_t bytes = (size_t)c.m->n_elems * 4;
    float *g = case_alloc(&c.dev, bytes);
    double e_norm = 0, e_loss = 0;
    for (int i = 0; i < STEPS; i++) {
        struct optim_result r;
        double want, loss = 0;
        OK(model_forward(c.m, &b, a));
        OK(model_logp(c.m, a, &c.l));
        for (int64_t k = 0; k < c.l.n; k++)
            loss += (double)c.dlogp[k] * (double)c.l.logp[k] + (double)c.dentropy[k] * (double)c.l.entropy[k];
        OK(model_backward(c.m, a,
                          &(struct model_backward_args){.batch = &b,
                                                        .logp = &c.l,
                                                        .dlogp = c.dlogp,
                                                        .dentropy = c.dentropy,
                                                        .sink = &(struct model_grad_sink){.flat = g}}));
        memcpy(&want, &rates[i], sizeof want);
        const double lr = optim_lr(&o, i);
        assert_true(fabs(lr - want) <= 1e-15); /* both in double */
        OK(optim_step(opt, c.m, g, &o, lr, &r));
        memcpy(&want, &norms[i], sizeof want);
        e_norm = worse_of(e_norm, fabs(r.grad_norm - want) / want);
        memcpy(&want, &losses[i], sizeof want);
        e_loss = fmax(e_loss, fabs(loss - want) / fmax(1, fabs(want)));
    }
    assert_int_equal(opt->step, STEPS);
    float *w = xmalloc(bytes);
    double worst = 0;
    OK(dev_copy_out(&c.dev, w, c.m->master, bytes));
    for (int64_t i = 0; i < c.m->n_params; i++) {
        const struct model_param *p = &c.m->params[i];
        int64_t n;
        const float *want = case_data(golden, p->name, DT_F32, &n);
        worst = worse_of(worst, case_nmse(w + p->offset, want, n));
    }
    print_message("adamw %s, %d steps: loss %.1e, grad norm %.1e, weights nmse %.1e\n", backend, STEPS, e_loss, e_norm, worst);
    assert_true(e_loss <= MAX_REL && e_norm <= MAX_REL && worst <= MAX_NMSE);
    free(w);
    dev_free(&c.dev, g, bytes);
    optim_destroy(opt, c.m);
    model_acts_destroy(a);
    case_unpack(&c.dev, &b);
    safetensors_close(golden);
    case_close(&c);
}
static void adamw_against_torch(void **state) {
    (void)state;
    EACH(k, BACKENDS) if (case_has(BACKENDS[k])) check_adamw(BACKENDS[k]);
}

/* The cases of a directory that `tools/oracle_model.py families` made. */
static void families(void **state) {
    char *path = case_path("cases", ""), name[64];
    FILE *const f = fopen(path, "r");
    (void)state;
    if (!f) fail_msg("%s: cannot be read", path);
    while (fscanf(f, "%63s", name) == 1)
        EACH(k, BACKENDS) if (case_has(BACKENDS[k])) check_case(name, BACKENDS[k], MODEL_KEEP_ALL, false);
    fclose(f);
    free(path);
}

int main(void) {
    const struct CMUnitTest more[] = {cmocka_unit_test(families)};
    if (getenv("VERLC_MODEL_FIXTURES")) return cmocka_run_group_tests_name("families", more, NULL, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_transformers), cmocka_unit_test(with_recompute),      cmocka_unit_test(pad_token_is_trained),
        cmocka_unit_test(rope_variants),        cmocka_unit_test(adamw_against_torch),
    };
    return cmocka_run_group_tests_name("model golden", tests, NULL, NULL);
}
