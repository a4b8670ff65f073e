/* test_ppo_drafts.c - invariant 2, of speculative decoding: what a generation gives with drafts has the bits of one without, in
 * any cache, with any rule, whatever ends a sample, and on every device; and drafts that are right are accepted.
 *
 * The models are fixtures, MiMo's and Qwen3.5's with gated delta nets, dense and with experts: as they are (random: few drafts are
 * right), and made to count: their layers add nothing, the head reads token t + 1 from token t, and so does the MTP layer, so
 * every draft of a greedy sample is right. One prompt is longer than a chunk of the delta rule, and samples go on into the next. */
#include "model_case.h"

#include "engine/engine.h"

enum { PROMPTS = 5, SAMPLES = 3, LONGEST = 61, VOCAB = 100 };

/* ---- the model that counts ---- */

static bool ends_with(const char *name, const char *end) {
    const size_t n = strlen(name), k = strlen(end);
    return n >= k && strcmp(name + n - k, end) == 0;
}

/* Changes one tensor of n elements. embed: the embeddings (VOCAB, h). */
static void make_counting(const struct safetensors_tensor *x, float *v, int64_t n, const float *embed) {
    static const char *const outputs[] = {"o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"};
    const char *const name = x->name;
    const int64_t rows = x->dim[0], cols = n / rows;
    for (size_t i = 0; i < 4; i++)
        if (ends_with(name, outputs[i])) memset(v, 0, (size_t)n * sizeof *v);
    if (ends_with(name, "norm.weight") || strstr(name, "pre_fc_norm"))
        for (int64_t i = 0; i < rows; i++) v[i] = 1;
    if (ends_with(name, "input_proj.weight") || ends_with(name, "mtp.fc.weight")) /* the embedding's half */
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++) v[i * cols + j] = j == (ends_with(name, "mtp.fc.weight") ? 0 : rows) + i ? 1 : 0;
    if (strcmp(name, "lm_head.weight") == 0)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++) v[i * cols + j] = embed[(i + rows - 1) % rows * cols + j];
}

static char *counting_model(const char *name) {
    struct safetensors_file *f;
    char *weights = case_path(name, "model.safetensors"), *config = case_path(name, "config.json"), *dir = case_temp_dir();
    OK(safetensors_open(&f, weights));
    const int64_t n = safetensors_count(f);
    struct safetensors_write_tensor *t = xcalloc((size_t)n, sizeof *t);
    const struct safetensors_tensor *const embed = safetensors_find(f, "model.embed_tokens.weight");
    for (int64_t i = 0; i < n; i++) {
        const struct safetensors_tensor *const x = safetensors_at(f, i);
        float *v = xmalloc(x->bytes);
        memcpy(v, x->data, x->bytes);
        make_counting(x, v, (int64_t)(x->bytes / sizeof *v), (const float *)(const void *)embed->data);
        t[i] = (struct safetensors_write_tensor){.name = x->name, .dt = DT_F32, .nd = x->nd, .data = v};
        memcpy(t[i].dim, x->dim, (size_t)x->nd * sizeof *x->dim);
    }
    char *to = file_join(dir, "model.safetensors");
    OK(safetensors_write(NULL, to, t, n, NULL));
    case_copy(config, dir, "config.json");
    for (int64_t i = 0; i < n; i++) free((void *)(uintptr_t)t[i].data);
    free(t);
    free(to);
    free(weights);
    free(config);
    safetensors_close(f);
    return dir;
}

/* ---- generations ---- */

struct result {
    int64_t n;
    int32_t ids[LONGEST];
    float logp[LONGEST], kept[LONGEST];
    enum engine_finish finish;
};
struct generation {
    struct result r[PROMPTS][SAMPLES];
    struct engine_stats stats;
    int64_t preempted;
};
struct how {
    int64_t max_draft, blocks, max_rows;
    enum engine_draft draft;
    float temperature, penalty;
    bool no_prefix_cache;
};

static int take(void *arg, const struct engine_sample *s) {
    struct generation *const g = arg;
    struct result *const r = &g->r[(intptr_t)s->user][s->index];
    assert_true(s->n <= LONGEST && r->n == 0);
    r->n = s->n;
    r->finish = s->finish;
    memcpy(r->ids, s->ids, (size_t)s->n * sizeof *r->ids);
    memcpy(r->logp, s->logp, (size_t)s->n * sizeof *r->logp);
    memcpy(r->kept, s->logp_kept, (size_t)s->n * sizeof *r->kept);
    g->preempted += s->n_preempted;
    return 0;
}

static void generate(struct model *m, const struct how *h, struct generation *g) {
    struct decoder *d;
    struct engine *e;
    *g = (struct generation){0};
    struct decoder_args a = {.max_rows = h->max_rows, .max_seqs = 8, .max_len = 128, .n_states = 8};
    a = decoder_size(m->dev, &m->cfg, m->act, &a, SIZE_MAX);
    a.model = m;
    a.max_draft = h->max_draft;
    if (h->blocks) a.n_kv_blocks = h->blocks;
    OK(decoder_open(&d, &a));
    OK(decoder_engine(
        &e, d, &(struct engine_config){.draft = h->draft, .no_prefix_cache = h->no_prefix_cache, .done = take, .done_arg = g}));
    static const int32_t stop[] = {7, 93};
    for (intptr_t i = 0; i < PROMPTS; i++) {
        int32_t prompt[70];
        const int64_t n = i == 4 ? 70 : 3 + 9 * i;
        for (int64_t k = 0; k < n; k++) prompt[k] = (int32_t)((11 + k * (i + 1)) % VOCAB);
        const struct engine_request q = {.prompt = prompt,
                                         .n_prompt = n,
                                         .n = SAMPLES,
                                         .max_tokens = LONGEST - 7 * i,
                                         .temperature = h->temperature,
                                         .top_p = i == 2 ? 0.9f : 1,
                                         .repetition_penalty = h->penalty,
                                         .top_k = i == 3 ? 20 : -1,
                                         .seed = 5,
                                         .uid = (uint64_t)i,
                                         .stop_ids = stop,
                                         .n_stop_ids = i == 4 ? 0 : 2,
                                         .pause_at = i == 1 ? 30 : 0,
                                         .user = (void *)i};
        OK(engine_submit(e, &q, NULL));
    }
    OK(engine_run(e));
    g->stats = engine_stats(e);
    engine_destroy(e);
    decoder_close(d);
}

static void same(const struct generation *a, const struct generation *b) {
    for (int i = 0; i < PROMPTS; i++)
        for (int k = 0; k < SAMPLES; k++) {
            const struct result *const x = &a->r[i][k], *const y = &b->r[i][k];
            assert_true(x->n > 0 && x->n == y->n && x->finish == y->finish);
            assert_memory_equal(x->ids, y->ids, (size_t)x->n * sizeof *x->ids);
            assert_memory_equal(x->logp, y->logp, (size_t)x->n * sizeof *x->logp);
            assert_memory_equal(x->kept, y->kept, (size_t)x->n * sizeof *x->kept);
        }
}

static double accepted(const struct generation *g) { return 1 + (double)g->stats.accepted / (double)g->stats.verified; }

static void open_model(struct dev *d, const char *backend, enum dtype act, const char *dir, struct model **m) {
    case_dev(d, backend, 2);
    OK(model_open(m, d, &(struct model_open_args){.dir = dir, .act = act, .max_len = 128, .mtp = true}));
}

/* Every way of drafting, beside none. */
static void check(const char *backend, enum dtype act, const char *dir, bool counts) {
    struct dev d;
    struct model *m;
    open_model(&d, backend, act, dir, &m);
    for (int greedy = 0; greedy < 2; greedy++) {
        struct generation without, with;
        struct how h = {.max_rows = 64, .draft = ENGINE_DRAFT_NEVER, .temperature = greedy ? 0 : 1, .penalty = 1};
        generate(m, &h, &without);
        assert_int_equal(without.stats.drafted, 0);
        static const struct {
            int64_t most, blocks, rows;
            enum engine_draft draft;
            bool no_cache;
        } ways[] = {{1, 0, 64, ENGINE_DRAFT_ALWAYS, false},
                    {2, 7, 64, ENGINE_DRAFT_ALWAYS, false},
                    {3, 0, 8, ENGINE_DRAFT_ALWAYS, true},
                    {2, 0, 64, ENGINE_DRAFT_MEASURED, false}};
        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
            h.max_draft = ways[i].most;
            h.blocks = ways[i].blocks;
            h.max_rows = ways[i].rows;
            h.draft = ways[i].draft;
            h.no_prefix_cache = ways[i].no_cache;
            generate(m, &h, &with);
            same(&without, &with);
            assert_true(with.stats.verified > 0 && with.stats.drafted > 0);
            assert_true(ways[i].blocks == 0 || with.preempted > 0);
            print_message("%s %s%s, %lld drafts: %.2f tokens a step, %lld preempted\n", backend, counts ? "counts" : "random",
                          greedy ? ", greedy" : "", (long long)h.max_draft, accepted(&with), (long long)with.preempted);
            if (counts && greedy && ways[i].draft == ENGINE_DRAFT_ALWAYS)
                assert_true(accepted(&with) > 0.7 * (double)h.max_draft + 1);
        }
    }
    model_close(m);
    dev_close(&d);
}

static void bits(void **state) {
    (void)state;
    static const char *const backends[] = {"cpu", "cuda"}, *const models[] = {"mimo", "qwen3_5_mtp_experts", "qwen3_5_mtp"};
    for (size_t k = 0; k < 3; k++) {
        char *counting = k < 2 ? counting_model(models[k]) : NULL, *random = case_path(models[k], "");
        for (size_t i = 0; i < 2; i++) {
            if (!case_has(backends[i])) continue;
            print_message("%s\n", models[k]);
            check(backends[i], k == 1 ? DT_BF16 : DT_F32, random, false);
            if (!counting) continue; /* its head is the embeddings */
            check(backends[i], DT_F32, counting, true);
            check(backends[i], DT_BF16, counting, true);
        }
        if (counting) case_drop_dir(counting);
        free(random);
    }
}

/* Rules that need the host between two tokens are drafted for by nothing. */
static void no_drafts(void **state) {
    (void)state;
    struct dev d;
    struct model *m;
    struct generation a, b;
    char *dir = case_path("mimo", "");
    open_model(&d, "cpu", DT_F32, dir, &m);
    struct how h = {.max_rows = 64, .draft = ENGINE_DRAFT_NEVER, .temperature = 1, .penalty = 1.3f};
    generate(m, &h, &a);
    h.max_draft = 2;
    h.draft = ENGINE_DRAFT_ALWAYS;
    generate(m, &h, &b);
    same(&a, &b);
    assert_int_equal(b.stats.verified, 0);
    model_close(m);
    dev_close(&d);
    free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(bits), cmocka_unit_test(no_drafts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
