/* test_train_routers.c - routers in training: the load-balancing loss against transformers on every backend, and over a mini-batch
 * of several micro-batches; recorded choices in later passes. The fixtures come from tools/oracle_model.py. */
#include "model_case.h"

#include "model/families.h"
#include "train/router_balance.h"
#include "train/router_replay.h"
#include "train/trained_model.h"

/* The bar of the project: 1e-5 relative. */
static const double MAX_REL = 1e-5;

static const char *const CASES[] = {"qwen3_moe", "mixtral", "olmoe"};
static const char *const MEGATRON_CASES[] = {"qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3"};
static const struct router_losses TRANSFORMERS = {.balance = 1}, MEGATRON = {.balance = 1, .by_layer = true, .z = 0.3};
static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)

static void pack_case(struct model_case *c, struct model_batch *b) {
    struct case_seq s[2];
    assert_int_equal(c->n_seqs, 2);
    for (int i = 0; i < 2; i++) s[i] = case_seq_at(c, i);
    case_pack(&c->dev, b, s, 2);
}

static double error_of(struct safetensors_file *golden, const char *name, double got) {
    const double want = (double)*(const float *)case_data(golden, name, DT_F32, NULL);
    return fabs(got - want) / want;
}

/* The losses of routers, and what they give to routers and to what is before them. */
static void check_balance(const char *name, const char *backend, struct model_keep keep, const struct router_losses *how) {
    struct model_case c;
    struct model_batch b;
    struct model_acts *a;
    struct safetensors_file *golden;
    char *path = case_path(name, how->by_layer ? "megatron_balance.safetensors" : "balance.safetensors");
    case_open(&c, &(struct case_args){name, backend, 2, DT_F32, MODEL_TRAIN});
    OK(safetensors_open(&golden, path));
    pack_case(&c, &b);
    OK(model_acts_create(&a, c.m, c.n_rows, keep, NULL));
    if (how->by_layer) model_router_by_scores(a);
    OK(model_forward(c.m, &b, a));
    OK(model_logp(c.m, a, &c.l));
    struct router_load r = {.layers = model_router_layers(&c.m->cfg), .experts = c.m->cfg.n_experts, .rows = c.n_rows};
    const int64_t k = c.m->cfg.n_choices, n_counts = r.layers * r.experts;
    int64_t *count = xcalloc((size_t)n_counts, sizeof *count), *scored = xcalloc((size_t)n_counts, sizeof *scored), sum = 0;
    OK(model_router_load(c.m, a, count, scored));
    for (int64_t i = 0; i < n_counts; i++) sum += count[i];
    assert_int_equal(sum, r.layers * r.rows * k); /* nothing is dropped */
    for (int64_t i = 0; i < n_counts; i++) sum -= scored[i];
    assert_int_equal(sum, how->by_layer ? 0 : r.layers * r.rows * k);
    const bool moved = c.m->cfg.expert_groups > 1; /* and a bias */
    assert_int_equal(how->by_layer && memcmp(count, scored, (size_t)n_counts * sizeof *count) == 0, how->by_layer && !moved);
    float *load = xmalloc((size_t)n_counts * sizeof *load), *zeros = xcalloc((size_t)c.l.n, sizeof *zeros);
    float *g_dev = case_garbage(&c.dev, (size_t)c.m->n_elems * 4), *g = xmalloc((size_t)c.m->n_elems * 4);
    const struct model_grad_sink sink = {.flat = g_dev};
    const struct model_backward_args back = {.batch = &b, .logp = &c.l, .dlogp = zeros, .sink = &sink};
    double loss, z_loss, worst = 0;
    router_balance_load(&r, how->by_layer ? scored : count, k, how, load);
    OK(model_router_balance(c.m, a, &(struct model_router_losses){load, router_z(&r, how)}));
    OK(model_backward(c.m, a, &back));
    OK(model_router_balance_loss(c.m, a, (struct model_range){0, b.n_rows}, &loss, &z_loss));
    OK(dev_copy_out(&c.dev, g, g_dev, (size_t)c.m->n_elems * 4));
    for (int64_t i = 0, n; i < safetensors_count(golden); i++) {
        const struct safetensors_tensor *t = safetensors_at(golden, i);
        if (strncmp(t->name, "grad.", 5) != 0) continue;
        int64_t p = 0;
        while (p < c.m->n_params && strcmp(c.m->params[p].name, t->name + 5) != 0) p++;
        assert_true(p < c.m->n_params);
        const float *want = case_data(golden, t->name, DT_F32, &n);
        worst = fmax(worst, case_worst(g + c.m->params[p].offset, want, n));
    }
    const double error = error_of(golden, "loss", loss), z_error = how->z > 0 ? error_of(golden, "z_loss", z_loss) : z_loss;
    print_message("%-12s %-3s: %s load-balancing loss %.1e, z-loss %.1e, gradients %.1e\n", name, backend,
                  how->by_layer ? "Megatron's" : "transformers'", error, z_error, worst);
    assert_true(error <= MAX_REL && z_error <= MAX_REL && worst <= MAX_REL);
    OK(model_router_balance(c.m, a, NULL));
    OK(model_forward(c.m, &b, a));
    OK(model_logp(c.m, a, &c.l));
    OK(model_backward(c.m, a, &back));
    OK(dev_copy_out(&c.dev, g, g_dev, (size_t)c.m->n_elems * 4));
    for (int64_t i = 0; i < c.m->n_elems; i++) assert_true(g[i] == 0);
    free(load);
    free(zeros);
    free(count);
    free(scored);
    free(g);
    free(path);
    dev_free(&c.dev, g_dev, (size_t)c.m->n_elems * 4);
    safetensors_close(golden);
    model_acts_destroy(a);
    case_unpack(&c.dev, &b);
    case_close(&c);
}

static void load_balancing(void **state) {
    (void)state;
    EACH(k, BACKENDS) EACH(i, CASES) if (case_has(BACKENDS[k])) check_balance(CASES[i], BACKENDS[k], MODEL_KEEP_ALL, &TRANSFORMERS);
    check_balance("qwen3_moe", "cpu", MODEL_KEEP_LAYER, &TRANSFORMERS);
}

static void megatron_losses(void **state) {
    (void)state;
    EACH(k, BACKENDS)
    EACH(i, MEGATRON_CASES) if (case_has(BACKENDS[k])) check_balance(MEGATRON_CASES[i], BACKENDS[k], MODEL_KEEP_ALL, &MEGATRON);
    check_balance("glm4_moe", "cpu", MODEL_KEEP_LAYER, &MEGATRON);
}

/* ---- a mini-batch of several micro-batches has the loss of the whole ---- */

enum { N = 6, LEN = 20 };

static int no_loss(void *arg, const struct micro_loss *m) {
    (void)arg;
    (void)m;
    return 0; /* zeros */
}

/* The flat gradient of the load-balancing loss alone; caller frees. */
static float *gradient(struct trained_model *t, const struct packed_seq *seqs, int64_t micro, struct step_result *r) {
    const struct model *const m = trained_model_model(t);
    const struct mini_batch a = {.seqs = seqs, .n = N, .cut = {.max_seqs = micro}, .temperature = 1, .loss = no_loss};
    float *g = xmalloc((size_t)m->n_elems * sizeof *g);
    OK(trained_model_backward(t, &a, r));
    OK(dev_copy_out(m->dev, g, trained_model_grads(t), (size_t)m->n_elems * sizeof *g));
    return g;
}

static void check_mini_batch(const char *name, const struct router_losses *losses) {
    struct model_case c;
    struct trained_model *t;
    int32_t ids[N * LEN];
    struct packed_seq seqs[N];
    struct step_result whole, cut;
    struct router_load *const r = &whole.router;
    case_open(&c, &(struct case_args){name, "cpu", 2, DT_F32, MODEL_TRAIN});
    struct trained_model_args a = {.dev = &c.dev,
                                   .model = c.m,
                                   .train = true,
                                   .keep = MODEL_KEEP_LAYER,
                                   .max_rows = N * LEN,
                                   .max_seqs = N,
                                   .routers = *losses};
    for (int i = 0; i < N * LEN; i++) ids[i] = (i * 37 + i / 7) % 100;
    for (int i = 0; i < N; i++) seqs[i] = (struct packed_seq){.ids = ids + i * LEN, .n = LEN - i, .first = 3};
    OK(trained_model_create(&t, &a));
    float *const one = gradient(t, seqs, N, &whole), *const many = gradient(t, seqs, 2, &cut);
    assert_int_equal(whole.n_micro, 1);
    assert_int_equal(cut.n_micro, 3);
    assert_true(case_worst(many, one, c.m->n_elems) <= MAX_REL);
    /* f32 of each token, added in double */
    assert_true(losses->balance > 0 ? fabs(cut.router.loss / r->loss - 1) <= 1e-6 : r->loss == 0 && cut.router.loss == 0);
    assert_true(losses->z > 0 ? fabs(cut.router.z_loss / r->z_loss - 1) <= 1e-6 : r->z_loss == 0 && cut.router.z_loss == 0);
    assert_true(r->balanced == (losses->balance > 0) && r->has_z == (losses->z > 0));
    assert_true(cut.router.max_over_mean == r->max_over_mean && cut.router.entropy == r->entropy);
    assert_true(r->max_over_mean >= 1 && r->max_over_mean <= 3 && r->entropy > 0.5 && r->entropy <= 1);
    assert_int_equal(r->rows, N * LEN - 15);
    double size = 0;
    for (int64_t i = 0; i < c.m->n_elems; i++) size += (double)one[i] * (double)one[i];
    assert_true(size > 0);
    free(one);
    free(many);
    trained_model_destroy(t);
    a.routers = (struct router_losses){0};
    OK(trained_model_create(&t, &a));
    float *const none = gradient(t, seqs, 2, &cut);
    for (int64_t i = 0; i < c.m->n_elems; i++) assert_true(none[i] == 0);
    assert_true(cut.router.max_over_mean == r->max_over_mean && !cut.router.balanced && cut.router.loss == 0);
    free(none);
    trained_model_destroy(t);
    case_close(&c);
}

static void over_the_mini_batch(void **state) {
    (void)state;
    check_mini_batch("qwen3_moe", &(struct router_losses){.balance = 0.5});
    check_mini_batch("glm4_moe", &(struct router_losses){.balance = 0.5, .by_layer = true, .z = 0.1});
    check_mini_batch("qwen3_moe", &(struct router_losses){.z = 0.1});
}

/* What config.json says, and the keys that go before it. */
static void coefficient(void **state) {
    static const struct {
        const char *config;
        struct train_router_keys keys;
        double want;
    } cases[] = {
        {"{}", {0}, 0},
        {"{\"output_router_logits\":true}", {0}, 0.001},
        {"{\"output_router_logits\":true,\"router_aux_loss_coef\":0.02}", {0}, 0.02},
        {"{\"output_router_logits\":true,\"router_aux_loss_coef\":0.02}", {.has_balance = true}, 0},
        {"{\"router_aux_loss_coef\":0.02}", {.balance = true, .has_balance = true}, 0.02},
        {"{\"router_aux_loss_coef\":0.02}", {.balance = true, .has_balance = true, .aux_coef = 0.5, .has_aux_coef = true}, 0.5},
        {"{\"router_aux_loss_coef\":0.02}", {.aux_coef = 0.5, .has_aux_coef = true}, 0},
        {"{\"output_router_logits\":true}", {.megatron.balancing = ROUTER_BALANCING_AUX_LOSS}, 0.001},
        {"{\"router_aux_loss_coef\":0.02}", {.megatron.balancing = ROUTER_BALANCING_AUX_LOSS}, 0.02},
        {"{\"router_aux_loss_coef\":0.02}", {.megatron = {ROUTER_BALANCING_AUX_LOSS, .aux = 0.5, .has_aux = true, .z = 0.1}}, 0.5},
        {"{\"router_aux_loss_coef\":0.02}", {.megatron = {.aux = 0.5, .has_aux = true, .z = 0.1}}, 0},
    };
    struct router_losses got;
    (void)state;
    EACH(i, cases) {
        struct model_config c = {.n_experts = 4, .json = json_loads(cases[i].config, 0, NULL)};
        OK(router_losses(&cases[i].keys, &c, &got));
        assert_true(got.balance == cases[i].want && got.z == cases[i].keys.megatron.z);
        assert_int_equal(got.by_layer, cases[i].keys.megatron.balancing);
        c.n_experts = 0;
        OK(router_losses(&cases[i].keys, &c, &got));
        assert_true(got.balance == 0 && got.z == 0);
        json_decref(c.json);
    }
    const char *const negative = "{\"output_router_logits\":true,\"router_aux_loss_coef\":-1}";
    const struct model_family sigmoid = {.type = "glm4_moe", .experts = {.n = 4, .sigmoid = true}};
    const struct train_router_keys of_layers = {.megatron.balancing = ROUTER_BALANCING_AUX_LOSS},
                                   two = {.has_balance = true, .balance = true, .megatron = of_layers.megatron};
    struct model_config c = {.n_experts = 4, .family = &sigmoid, .json = json_loads("{\"output_router_logits\":true}", 0, NULL)};
    assert_int_equal(router_losses(&cases[0].keys, &c, &got), ERR_UNSUPPORTED);
    OK(router_losses(&of_layers, &c, &got));
    assert_int_equal(router_losses(&two, &c, &got), ERR_INVAL);
    json_decref(c.json);
    c = (struct model_config){.n_experts = 4, .json = json_loads(negative, 0, NULL)};
    assert_int_equal(router_losses(&cases[0].keys, &c, &got), ERR_FORMAT);
    json_decref(c.json);
}

/* ---- replay ---- */

static void words_of_choices(void **state) {
    static const int64_t experts[] = {2, 255, 256, 1024};
    (void)state;
    EACH(i, experts) {
        enum { ROWS = 7, AT = 2, TOKENS = 4, K = 2 };
        struct model_config c = {.n_experts = experts[i], .n_choices = K, .n_layers = 3, .layer = {MODEL_SPARSE, 0, MODEL_SPARSE}};
        int32_t choices[2 * ROWS * K], back[2 * ROWS * K], words[TOKENS * 2];
        const int64_t size = router_replay_words(&c);
        assert_int_equal(size, experts[i] > 255 ? 2 : 1);
        for (int k = 0; k < 2 * ROWS * K; k++) choices[k] = (int32_t)(experts[i] - 1 - k % experts[i]);
        memset(back, 0x55, sizeof back);
        router_replay_pack(&c, choices, ROWS, AT, TOKENS, words);
        OK(router_replay_unpack(&c, words, TOKENS, ROWS, AT, back));
        for (int k = 0; k < 2 * ROWS * K; k++) {
            const int row = k / K % ROWS;
            assert_int_equal(back[k], row >= AT && row < AT + TOKENS ? choices[k] : 0x55555555);
        }
        memset(words, 0xff, sizeof words);
        OK(router_replay_unpack(&c, words, TOKENS, ROWS, AT, back));
        assert_int_equal(back[AT * K], -1);
        memset(words, 0xfe, sizeof words);
        assert_int_equal(router_replay_unpack(&c, words, TOKENS, ROWS, AT, back), experts[i] == 255 ? 0 : ERR_FORMAT);
    }
}

static int some_loss(void *arg, const struct micro_loss *m) {
    (void)arg;
    for (int64_t t = 0; t < m->t1 - m->t0; t++) m->dout[t] = t % 3 ? -0.1f : 0.05f;
    return 0;
}

/* What the words say of each expert's load, by layer. */
static void count_words(const struct model_config *c, const int32_t *words, int64_t n, int64_t *count) {
    const int64_t layers = model_router_layers(c), k = c->n_choices;
    int32_t *choices = xmalloc((size_t)(layers * n * k) * sizeof *choices);
    OK(router_replay_unpack(c, words, n, n, 0, choices));
    for (int64_t i = 0; i < layers * n * k; i++) count[i / (n * k) * c->n_experts + choices[i]]++;
    free(choices);
}

/* Choices that were recorded are those of the passes that follow, whatever the weights are by then; with the same weights nothing
 * changes. */
static void replayed(void **state) {
    struct model_case c;
    struct trained_model *t;
    int32_t ids[N * LEN];
    struct packed_seq seqs[N], own[N];
    struct step_result r, again;
    float logp[2][N * LEN];
    int64_t tokens = 0, targets = 0;
    (void)state;
    case_open(&c, &(struct case_args){"qwen3_moe", "cpu", 2, DT_F32, MODEL_TRAIN});
    const struct optim_config optim = {.lr = 0.02, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .schedule = "constant"};
    const struct trained_model_args a = {.dev = &c.dev,
                                         .model = c.m,
                                         .train = true,
                                         .keep = MODEL_KEEP_LAYER,
                                         .max_rows = N * LEN,
                                         .max_seqs = N,
                                         .routes = true,
                                         .optim = &optim};
    const int64_t words = router_replay_words(&c.m->cfg), counts = model_router_layers(&c.m->cfg) * c.m->cfg.n_experts;
    const size_t bytes = (size_t)c.m->n_elems * sizeof(float);
    int32_t *routes = xmalloc((size_t)(N * LEN * words) * sizeof *routes),
            *then = xmalloc((size_t)(N * LEN * words) * sizeof *then);
    int64_t *want = xcalloc((size_t)counts, sizeof *want), *got = xcalloc((size_t)counts, sizeof *got);
    float *g[2] = {xmalloc(bytes), xmalloc(bytes)};
    struct router_load load = {.layers = model_router_layers(&c.m->cfg), .experts = c.m->cfg.n_experts};
    for (int i = 0; i < N * LEN; i++) ids[i] = (i * 37 + i / 7) % 100;
    for (int i = 0; i < N; i++) {
        own[i] = (struct packed_seq){.ids = ids + i * LEN, .n = LEN - i, .first = 3};
        tokens += own[i].n;
        targets += packed_seq_targets(&own[i]);
    }
    OK(trained_model_create(&t, &a));
    const struct micro_batch_limits cut = {.max_seqs = 4};
    OK(trained_model_forward(t, own, N, cut, 1, (struct forward_out){.logp = logp[0], .routes = routes}));
    for (int64_t i = 0, at = 0; i < N; at += own[i++].n) {
        seqs[i] = own[i];
        seqs[i].routes = routes + at * words;
    }
    OK(trained_model_forward(t, seqs, N, cut, 1, (struct forward_out){.logp = logp[1]}));
    assert_memory_equal(logp[0], logp[1], (size_t)targets * sizeof(float)); /* the same weights: the same bits */
    count_words(&c.m->cfg, routes, tokens, want);
    router_load_metrics(&load, want);
    for (int k = 0; k < 2; k++) { /* and the same gradient */
        const struct mini_batch m = {.seqs = k ? seqs : own, .n = N, .cut = cut, .temperature = 1, .loss = some_loss};
        OK(trained_model_backward(t, &m, &r));
        OK(dev_copy_out(&c.dev, g[k], trained_model_grads(t), bytes));
        assert_true(r.router.entropy == load.entropy && r.router.max_over_mean == load.max_over_mean);
    }
    assert_memory_equal(g[0], g[1], bytes);
    for (int k = 0; k < 3; k++) {
        const struct mini_batch m = {.seqs = seqs, .n = N, .cut = cut, .temperature = 1, .loss = some_loss};
        OK(trained_model_step(t, &m, &optim, optim.lr, &again));
        assert_true(again.router.entropy == load.entropy && again.router.max_over_mean == load.max_over_mean);
    }
    OK(trained_model_forward(t, own, N, cut, 1, (struct forward_out){.logp = logp[0], .routes = then}));
    OK(trained_model_forward(t, seqs, N, cut, 1, (struct forward_out){.logp = logp[1]}));
    count_words(&c.m->cfg, then, tokens, got);
    assert_true(memcmp(want, got, (size_t)counts * sizeof *want) != 0);          /* other weights choose others, */
    assert_true(memcmp(logp[0], logp[1], (size_t)targets * sizeof(float)) != 0); /* and that is seen */
    free(routes);
    free(then);
    free(want);
    free(got);
    for (int k = 0; k < 2; k++) free(g[k]);
    trained_model_destroy(t);
    case_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(load_balancing),      cmocka_unit_test(megatron_losses),
                                       cmocka_unit_test(over_the_mini_batch), cmocka_unit_test(coefficient),
                                       cmocka_unit_test(words_of_choices),    cmocka_unit_test(replayed)};
    return cmocka_run_group_tests_name("routers in training", tests, NULL, NULL);
}
