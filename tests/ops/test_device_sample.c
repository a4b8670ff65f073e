/* test_device_sample.c - the sampler's parameters on every backend: hand-made rows whose
 * answer is plain, and random rows against a second implementation by rank
 * counting.  That its log-prob equals the LM head's is test_device_batch_invariant's. */
#include "ops/ops_test.h"

static struct backends backends, one; /* 2 threads, 1 thread */

struct sampled {
    int32_t id;
    float logp, logp_kept;
};

/* n rows of `vocab` logits. seen may be NULL. The caller's out (n). */
static int sample(struct dev *d, const float *logits, int64_t n, int64_t vocab, const struct sample_param *p, const uint8_t *seen,
                  struct sampled *out) {
    struct run r = {.d = d};
    struct sample_args a = {.logits = up_values(&r, shape_2d(DT_F32, n, vocab), false, logits, NULL),
                            .param = p,
                            .id = dev_new(&r, shape_1d(DT_I32, n), false),
                            .logp = dev_new(&r, shape_1d(DT_F32, n), false),
                            .logp_kept = dev_new(&r, shape_1d(DT_F32, n), false)};
    if (seen) {
        a.seen = dev_new(&r, shape_2d(DT_U8, n, (vocab + 7) / 8), false);
        run_copy_in(&r, a.seen.data, seen, (size_t)tensor_count(a.seen));
    }
    const int rc = dev_sample(d, &a);
    if (rc == 0) {
        float *id = down_values(&r, a.id), *logp = down_values(&r, a.logp), *kept = down_values(&r, a.logp_kept);
        for (int64_t i = 0; i < n; i++) out[i] = (struct sampled){(int32_t)id[i], logp[i], kept[i]};
        free(id);
        free(logp);
        free(kept);
    }
    run_free_blocks(&r);
    return rc;
}

/* ---- plain rows: ids 0..3 have probability 0.4, 0.3, 0.2, 0.1 at temperature 1 ---- */

#define PLAIN .inv_temp = 1, .top_p = 1, .repetition_penalty = 1
static const double plain_p[4] = {0.4, 0.3, 0.2, 0.1};
struct plain {
    const char *what;
    struct sample_param p;
    uint8_t seen;
    int32_t id;
    double prob, kept; /* of the id: full softmax, and among the kept */
};
static const struct plain plain[] = {
    {"u = 0", {PLAIN, .u = 0}, 0, 0, 0.4, 0.4},
    {"u in the second", {PLAIN, .u = 0.69f}, 0, 1, 0.3, 0.3},
    {"u in the last", {PLAIN, .u = 0.99f}, 0, 3, 0.1, 0.1},
    {"u just under 1", {PLAIN, .u = 1 - 0x1p-24f}, 0, 3, 0.1, 0.1},
    {"top-k 2", {PLAIN, .top_k = 2, .u = 0.99f}, 0, 1, 0.3, 0.3 / 0.7},
    {"top-k over the vocabulary", {PLAIN, .top_k = 9, .u = 0.99f}, 0, 3, 0.1, 0.1},
    {"top-p cuts after it is reached", {.inv_temp = 1, .repetition_penalty = 1, .top_p = 0.6f, .u = 0.99f}, 0, 1, 0.3, 0.3 / 0.7},
    {"top-p keeps one at least", {.inv_temp = 1, .repetition_penalty = 1, .top_p = 1e-6f, .u = 0.99f}, 0, 0, 0.4, 1},
    /* 0.4 / 0.7 = 0.57 reaches 0.55 alone; without renormalising 0.4 would not */
    {"top-p after top-k", {.inv_temp = 1, .repetition_penalty = 1, .top_p = 0.55f, .top_k = 2, .u = 0.99f}, 0, 0, 0.4, 1},
    {"min-p", {PLAIN, .min_p = 0.45f, .u = 0.99f}, 0, 2, 0.2, 0.2 / 0.9},
    {"min-p 1", {PLAIN, .min_p = 1, .u = 0.99f}, 0, 0, 0.4, 1},
    /* 1/T = 2 squares the odds: 16, 9, 4, 1 of 30 */
    {"temperature", {.inv_temp = 2, .top_p = 1, .repetition_penalty = 1, .u = 0.9f}, 0, 2, 4.0 / 30, 4.0 / 30},
    {"greedy", {PLAIN, .greedy = 1, .u = 0.99f}, 0, 0, 0.4, 1},
    {"greedy has its log-prob at inv_temp", {.inv_temp = 2, .top_p = 1, .repetition_penalty = 1, .greedy = 1}, 0, 0, 16.0 / 30, 1},
    /* log 0.4 and log 0.3 are negative: times 2 they are log 0.16 and log 0.09; 0.16 + 0.09 + 0.3 = 0.55 */
    {"penalty of negative logits", {.inv_temp = 1, .top_p = 1, .repetition_penalty = 2, .u = 0.5f}, 3, 2, 0.2, 0.2 / 0.55},
    {"greedy with penalty", {.inv_temp = 1, .top_p = 1, .repetition_penalty = 2, .greedy = 1}, 3, 2, 0.2, 1},
};

static void test_plain(void **state) {
    (void)state;
    float logits[4];
    for (int j = 0; j < 4; j++) logits[j] = (float)log(plain_p[j]);
    for (int b = 0; b < backends.n; b++)
        for (int64_t i = 0; i < COUNT(plain); i++) {
            const struct plain *c = &plain[i];
            struct sampled s = {0};
            const int rc = sample(&backends.dev[b], logits, 1, 4, &c->p, &c->seen, &s);
            if (rc == ERR_UNSUPPORTED) {
                report_skip(backends.name[b], "sample");
                break;
            }
            if (rc < 0) fail_msg("%s: %s", backends.name[b], err_msg());
            /* 2e-6: logits are log p rounded to f32, exp and log in f32 */
            if (s.id != c->id || fabs(s.logp - log(c->prob)) > 2e-6 || fabs(s.logp_kept - log(c->kept)) > 2e-6)
                fail_msg("%s, %s: got id %d, logp %.7g, kept %.7g; want %d, %.7g, %.7g", backends.name[b], c->what, (int)s.id,
                         (double)s.logp, (double)s.logp_kept, (int)c->id, log(c->prob), log(c->kept));
        }
}

/* Equal logits rank by id; a spike is found in every chunk; positive logits are divided by the
 * penalty; logits that are NaN still give an id of the vocabulary, and a log-prob that is NaN. */
static void test_edges(void **state) {
    (void)state;
    enum { V = 2 * DEV_VOCAB_CHUNK + 300 };
    static const int32_t spike[] = {0, DEV_VOCAB_CHUNK - 1, DEV_VOCAB_CHUNK, 2 * DEV_VOCAB_CHUNK, V - 1};
    float *logits = xcalloc(V, sizeof *logits);
    uint8_t *seen = xcalloc((V + 7) / 8, 1);
    for (int b = 0; b < backends.n; b++) {
        struct sample_param greedy = {PLAIN, .greedy = 1}, top3 = {PLAIN, .top_k = 3, .u = 0.99f}, all = {PLAIN, .u = 0.5f};
        struct sampled s;
        for (int64_t j = 0; j < V; j++) logits[j] = 1;
        const int rc = sample(&backends.dev[b], logits, 1, V, &greedy, NULL, &s);
        if (rc == ERR_UNSUPPORTED) {
            report_skip(backends.name[b], "sample");
            continue;
        }
        assert_int_equal(rc, 0);
        assert_int_equal(s.id, 0);
        assert_int_equal(sample(&backends.dev[b], logits, 1, V, &top3, NULL, &s), 0);
        assert_int_equal(s.id, 2); /* kept: 0, 1, 2 */
        assert_true(fabs(s.logp_kept - log(1.0 / 3)) < 1e-6 && fabs(s.logp - log(1.0 / V)) < 1e-5);
        for (int64_t i = 0; i < COUNT(spike); i++) {
            logits[spike[i]] = 40;
            for (int k = 0; k < 3; k++) {
                const struct sample_param *p = k == 0 ? &greedy : k == 1 ? &top3 : &all;
                assert_int_equal(sample(&backends.dev[b], logits, 1, V, p, NULL, &s), 0);
                assert_int_equal(s.id, spike[i]);
                assert_true(fabs(s.logp) < 1e-6); /* the others have e^-39 each */
            }
            seen[spike[i] / 8] = (uint8_t)(1u << (spike[i] % 8));
            greedy.repetition_penalty = 41; /* 40 / 41 < 1: another id wins */
            assert_int_equal(sample(&backends.dev[b], logits, 1, V, &greedy, seen, &s), 0);
            assert_int_equal(s.id, spike[i] == 0 ? 1 : 0);
            greedy.repetition_penalty = 1;
            seen[spike[i] / 8] = 0;
            logits[spike[i]] = 1;
        }
        for (int64_t j = 0; j < V; j++) logits[j] = NAN;
        const struct sample_param *p[] = {&greedy, &top3, &all};
        for (int k = 0; k < 3; k++) {
            assert_int_equal(sample(&backends.dev[b], logits, 1, V, p[k], NULL, &s), 0);
            assert_in_range(s.id, 0, V - 1);
            assert_true(isnan(s.logp));
        }
    }
    free(logits);
    free(seen);
}

/* ---- random rows against a second implementation ---- */

/* The kept distribution by rank counting; prob (V) gets 0 for what is cut. */
static void rule(const float *logits, int64_t vocab, const uint8_t *seen, const struct sample_param *p, double *prob) {
    double *z = xcalloc((size_t)vocab, sizeof *z), total = 0, top = 0;
    int64_t *rank = xcalloc((size_t)vocab, sizeof *rank);
    for (int64_t j = 0; j < vocab; j++) {
        float v = logits[j];
        if (seen[j / 8] >> (j % 8) & 1) v = v > 0 ? v / p->repetition_penalty : v * p->repetition_penalty;
        z[j] = v * p->inv_temp;
    }
    for (int64_t j = 0; j < vocab; j++) {
        for (int64_t i = 0; i < vocab; i++) rank[j] += z[i] > z[j] || (z[i] == z[j] && i < j);
        prob[j] = p->top_k > 0 && rank[j] >= p->top_k ? 0 : exp(z[j]);
        total += prob[j];
        if (prob[j] > top) top = prob[j];
    }
    for (int64_t j = 0; j < vocab; j++) { /* probability of what ranks before j */
        double before = 0;
        for (int64_t i = 0; i < vocab; i++)
            if (rank[i] < rank[j]) before += prob[i] / total;
        if (p->top_p < 1 && before >= p->top_p) z[j] = -INFINITY;
    }
    total = 0;
    for (int64_t j = 0; j < vocab; j++) {
        if (z[j] == -INFINITY || prob[j] < p->min_p * top) prob[j] = 0;
        total += prob[j];
    }
    for (int64_t j = 0; j < vocab; j++) prob[j] /= total;
    free(z);
    free(rank);
}

/* Chooses a kept id and sets u to the middle of its interval: rounding cannot move it out. */
static int32_t aim(const double *prob, int64_t vocab, struct rng *g, struct sample_param *p) {
    int64_t j;
    do j = (int64_t)rng_below(g, (uint64_t)vocab);
    while (prob[j] < 1e-6);
    double before = 0;
    for (int64_t i = 0; i < j; i++) before += prob[i];
    p->u = (float)(before + prob[j] / 2);
    return (int32_t)j;
}

enum { ROWS = 24 };
struct batch {
    int64_t vocab;
    float *logits; /* (ROWS, vocab) */
    uint8_t *seen;
    struct sample_param p[ROWS];
    int32_t id[ROWS];
    double prob[ROWS]; /* of id among the kept */
};

static void batch_init(struct batch *b, int64_t vocab) {
    struct rng g = {.seed = 21 + (uint64_t)vocab, .stream = RNG_TEST};
    const int64_t bytes = (vocab + 7) / 8;
    double *prob = xcalloc((size_t)vocab, sizeof *prob);
    *b = (struct batch){
        .vocab = vocab, .logits = xcalloc((size_t)(ROWS * vocab), sizeof(float)), .seen = xcalloc((size_t)(ROWS * bytes), 1)};
    for (int64_t i = 0; i < ROWS * vocab; i++) b->logits[i] = rng_normal(&g) * 2;
    for (int64_t i = 0; i < ROWS * bytes; i++) b->seen[i] = (uint8_t)(rng_u32(&g) & rng_u32(&g));
    for (int64_t i = 0; i < ROWS; i++) {
        b->p[i] = (struct sample_param){.inv_temp = 0.5f + (float)rng_unit(&g),
                                        .top_k = i % 2 ? 1 + (int32_t)rng_below(&g, 60) : 0,
                                        .top_p = i % 3 ? 0.3f + 0.6f * (float)rng_unit(&g) : 1,
                                        .min_p = i % 4 == 3 ? 0.05f : 0,
                                        .repetition_penalty = i % 5 ? 1 : 1.3f};
        rule(b->logits + i * vocab, vocab, b->seen + i * bytes, &b->p[i], prob);
        b->id[i] = aim(prob, vocab, &g, &b->p[i]);
        b->prob[i] = prob[b->id[i]];
    }
    free(prob);
}
static void batch_free(struct batch *b) {
    free(b->logits);
    free(b->seen);
}

static void test_random(void **state) {
    (void)state;
    static const int64_t vocab[] = {7, 100, 1001, DEV_VOCAB_CHUNK + 5};
    for (int64_t v = 0; v < cases_of(COUNT(vocab), 2); v++) {
        struct batch b;
        batch_init(&b, vocab[v]);
        for (int k = 0; k < backends.n; k++) {
            struct sampled s[ROWS], t[ROWS], alone;
            const int rc = sample(&backends.dev[k], b.logits, ROWS, b.vocab, b.p, b.seen, s);
            if (rc == ERR_UNSUPPORTED) {
                report_skip(backends.name[k], "sample");
                continue;
            }
            assert_int_equal(rc, 0);
            assert_int_equal(sample(&one.dev[k], b.logits, ROWS, b.vocab, b.p, b.seen, t), 0);
            assert_memory_equal(s, t, sizeof s); /* threads */
            for (int64_t i = 0; i < ROWS; i++) {
                /* 1e-5: f32 sums of up to 4101 terms */
                if (s[i].id != b.id[i] || fabs(s[i].logp_kept - log(b.prob[i])) > 1e-5)
                    fail_msg("%s, vocabulary %lld, row %lld: got id %d, kept %.7g; want %d, %.7g", backends.name[k],
                             (long long)b.vocab, (long long)i, (int)s[i].id, (double)s[i].logp_kept, (int)b.id[i], log(b.prob[i]));
                assert_int_equal(
                    sample(&backends.dev[k], b.logits + i * b.vocab, 1, b.vocab, &b.p[i], b.seen + i * ((b.vocab + 7) / 8), &alone),
                    0);
                assert_memory_equal(&s[i], &alone, sizeof alone); /* batch-invariant */
            }
        }
        batch_free(&b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_random),
    };
    backends_open(&backends, 2);
    backends_open(&one, 1);
    const int failed = cmocka_run_group_tests_name("ops: sampler", tests, NULL, NULL);
    backends_close(&backends);
    backends_close(&one);
    return failed;
}
