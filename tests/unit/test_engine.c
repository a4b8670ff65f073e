/* test_engine.c - the scheduler and the pool of KV blocks against a fake model.
 *
 * The fake keeps a token per slot, as the real one keeps keys: what a step
 * samples is a hash of the whole history read back through the block table, so
 * a wrong block, slot, position or sharing decision changes the result.  The
 * expected result of a request is computed without any engine. */
#include "base/clock.h"
#include "base/err.h"
#include "base/hash.h"
#include "base/rng.h"
#include "engine/engine.h"
#include "engine/engine_int.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { VOCAB = 97, EOS = 7, MAX_RESULTS = 4096 };

struct fake {
    int32_t *token, *pos; /* per slot; -1: never written */
    int64_t n_blocks, max_rows_seen;
    int fail_at; /* this step fails */
    int steps, bursts, verified, drafted;
    int verify_us, burst_us; /* what a verifying step and a step of a burst take at least */
    int right;               /* of four drafts; 0: three */
    int64_t lengths[64];     /* of the first bursts */
    /* the running burst: its results, of rows that are farther apart than there are sequences; -1: drawn by nobody */
    int64_t burst_steps, stride, part, have;
    int32_t id[MAX_RESULTS];
    float logp[MAX_RESULTS], logp_kept[MAX_RESULTS];
    /* of a model with states: what each has of its sequence */
    int64_t n_states, copied;
    struct {
        uint64_t hash;
        int64_t n;
    } state[16];
};

/* A sequence's state takes its next token, the n-th. */
static void state_take(struct fake *f, int32_t slot, int64_t n, int32_t token) {
    if (f->n_states == 0) return;
    assert_in_range(slot, 0, f->n_states - 1);
    if (n == 0) f->state[slot].hash = 0;
    else assert_int_equal(f->state[slot].n, n);
    const uint64_t both[] = {f->state[slot].hash, (uint64_t)token};
    f->state[slot].hash = hash64(both, sizeof both);
    f->state[slot].n = n + 1;
}
/* It has taken these. */
static void state_check(const struct fake *f, int32_t slot, const int32_t *history, int64_t n) {
    uint64_t h = 0;
    if (f->n_states == 0) return;
    for (int64_t j = 0; j < n; j++) {
        const uint64_t both[] = {h, (uint64_t)history[j]};
        h = hash64(both, sizeof both);
    }
    assert_true(f->state[slot].n == n && f->state[slot].hash == h);
}
static int fake_copy_states(void *ctx, int64_t n, const int32_t *from, const int32_t *to) {
    struct fake *f = ctx;
    assert_true(n > 0);
    for (int64_t i = 0; i < n; i++) {
        assert_true(from[i] != to[i] && f->state[from[i]].n > 0 && f->state[from[i]].n % KV_BLOCK_LEN == 0);
        f->state[to[i]] = f->state[from[i]];
    }
    f->copied += n;
    return 0;
}

static int32_t draw(const int32_t *history, int64_t n, float u, float *logp) {
    const uint64_t h = hash64(history, (size_t)n * 4) ^ (uint64_t)(u * 16777216.0f) * 0x9E3779B97F4A7C15u;
    const uint64_t mixed = hash64(&h, 8);
    *logp = -(float)(mixed % 1000) / 100;
    return (int32_t)(mixed >> 20) % VOCAB >= 0 ? (int32_t)((mixed >> 20) % VOCAB) : 0;
}

/* A draft of the token after these: mostly what is drawn there. */
static int32_t guess(struct fake *f, const int32_t *history, int64_t n, const struct decode_row *w, int64_t after) {
    float logp;
    const int32_t id = draw(history, n, rng_token(w->seed, w->uid, w->sample, w->at + (uint32_t)after), &logp);
    const int right = f->right == 0 ? 3 : f->right;
    return f->drafted++ % 4 >= right ? (id + 1) % VOCAB : id;
}

static void takes(int us) {
    for (const double end = clock_now() + us * 1e-6; us > 0 && clock_now() < end;) {
    }
}

static int fake_step(void *ctx, const struct engine_plan *p, int32_t *id, float *logp, float *logp_kept) {
    struct fake *f = ctx;
    if (++f->steps == f->fail_at) FAIL(ERR_DEVICE, "injected");
    if (p->n_rows > f->max_rows_seen) f->max_rows_seen = p->n_rows;
    for (int64_t r = 0; r < p->n_rows; r++) {
        assert_in_range(p->slots[r], 0, f->n_blocks * KV_BLOCK_LEN - 1);
        f->token[p->slots[r]] = p->ids[r];
        f->pos[p->slots[r]] = p->pos[r];
    }
    for (int64_t s = 0; s < p->n_seqs; s++)
        for (int64_t r = p->q_start[s]; r < p->q_start[s + 1]; r++) state_take(f, p->state[s], p->pos[r], p->ids[r]);
    for (int64_t k = 0; k < p->n_out; k++) {
        int64_t s = 0;
        while (p->q_start[s + 1] <= p->out_row[k]) s++;
        assert_int_equal(p->out_row[k], p->q_start[s + 1] - 1); /* only the last row of a run is sampled */
        const int64_t n = p->pos0[s] + (p->q_start[s + 1] - p->q_start[s]);
        int32_t *history = malloc((size_t)n * 4);
        for (int64_t j = 0; j < n; j++) {
            const int64_t slot = p->block_table[s * p->max_blocks + j / KV_BLOCK_LEN] * KV_BLOCK_LEN + j % KV_BLOCK_LEN;
            assert_int_equal(f->pos[slot], j);
            history[j] = f->token[slot];
        }
        state_check(f, p->state[s], history, n);
        id[k] = draw(history, n, p->param[k].u, &logp[k]);
        logp_kept[k] = logp[k] / 2;
        if (p->next) {
            assert_int_equal(p->next[p->out_row[k]], -1);
            history = realloc(history, (size_t)(n + 1) * 4);
            history[n] = id[k];
            p->draft[k] = guess(f, history, n + 1, &p->draft_rule[k], 0);
        }
        free(history);
    }
    for (int64_t r = 0, s = 0; p->next && r < p->n_rows; r++) {
        if (r == p->q_start[s + 1]) s++;
        if (r + 1 < p->q_start[s + 1]) assert_int_equal(p->next[r], p->ids[r + 1]);
    }
    return 0;
}

/* The rows of all samples are written before any is read, as the real one writes keys. */
static int fake_verify(void *ctx, const struct engine_verify *v) {
    struct fake *f = ctx;
    const int64_t wide = v->most + 1;
    f->verified++;
    takes(f->verify_us);
    for (int64_t i = 0; i < v->n_seqs; i++)
        for (int64_t j = 0; j <= v->n_draft[i]; j++) {
            const int64_t at = v->pos[i] + j,
                          slot = v->block_table[i * v->max_blocks + at / KV_BLOCK_LEN] * KV_BLOCK_LEN + at % KV_BLOCK_LEN;
            assert_true(at / KV_BLOCK_LEN < v->n_blocks[i] && slot < f->n_blocks * KV_BLOCK_LEN);
            f->token[slot] = v->ids[i * wide + j];
            f->pos[slot] = (int32_t)at;
        }
    for (int64_t i = 0; i < v->n_seqs; i++) {
        int32_t history[512];
        const struct decode_row *const w = &v->rows[i];
        for (int64_t j = 0; j <= v->pos[i] + v->n_draft[i]; j++) {
            const int64_t slot = v->block_table[i * v->max_blocks + j / KV_BLOCK_LEN] * KV_BLOCK_LEN + j % KV_BLOCK_LEN;
            assert_int_equal(f->pos[slot], j);
            history[j] = f->token[slot];
        }
        for (int64_t j = 0; j <= v->n_draft[i]; j++) {
            const int64_t k = i * wide + j;
            v->id[k] = draw(history, v->pos[i] + j + 1, rng_token(w->seed, w->uid, w->sample, w->at + (uint32_t)j), &v->logp[k]);
            v->logp_kept[k] = v->logp[k] / 2;
        }
        const int64_t last = engine_accepted(v, i), n = v->pos[i] + last + 2;
        history[n - 1] = v->id[i * wide + last];
        for (int64_t c = 0; c < v->most; c++)
            history[n + c] = v->draft[i * v->most + c] = guess(f, history, n + c, w, last + 1 + c);
    }
    return 0;
}

/* The same, many steps at once: each row reads its history back and feeds itself. */
static int fake_burst(void *ctx, const struct engine_burst *b) {
    struct fake *f = ctx;
    assert_int_equal(f->have, f->burst_steps); /* all of the one before was taken */
    f->burst_steps = b->steps;
    takes(f->burst_us * (int)b->steps);
    f->have = 0;
    f->stride = b->n_seqs + f->bursts % 3;
    if (f->bursts < 64) f->lengths[f->bursts] = b->steps;
    f->part = 1 + f->bursts++ % 5;
    assert_true(f->stride * b->steps <= MAX_RESULTS);
    for (int64_t k = 0; k < f->stride * b->steps; k++) f->id[k] = -1;
    for (int64_t i = 0; i < b->n_seqs; i++) {
        const struct decode_row *w = &b->rows[i];
        int32_t token = b->ids[i];
        assert_in_range(w->left, 1, b->steps);
        for (int64_t t = 0, n = b->pos[i]; t < w->left; t++) {
            int32_t history[512];
            const int64_t put = b->block_table[i * b->max_blocks + n / KV_BLOCK_LEN] * KV_BLOCK_LEN + n % KV_BLOCK_LEN;
            assert_in_range(put, 0, f->n_blocks * KV_BLOCK_LEN - 1);
            f->token[put] = token;
            state_take(f, b->state[i], n, token);
            f->pos[put] = (int32_t)n++;
            for (int64_t j = 0; j < n; j++) {
                const int64_t slot = b->block_table[i * b->max_blocks + j / KV_BLOCK_LEN] * KV_BLOCK_LEN + j % KV_BLOCK_LEN;
                assert_int_equal(f->pos[slot], j);
                history[j] = f->token[slot];
            }
            state_check(f, b->state[i], history, n);
            const int64_t k = t * f->stride + i;
            token = f->id[k] = draw(history, n, rng_token(w->seed, w->uid, w->sample, w->at + (uint32_t)t), &f->logp[k]);
            f->logp_kept[k] = f->logp[k] / 2;
            bool stop = false;
            for (int64_t j = 0; j < b->max_stop; j++) stop |= b->stop[i * b->max_stop + j] == token;
            if (stop) break;
        }
    }
    return 0;
}

static int fake_results(void *ctx, int64_t have, struct engine_results *out) {
    struct fake *f = ctx;
    assert_int_equal(have, f->have);
    const int64_t left = f->burst_steps - have, at = have * f->stride;
    *out = (struct engine_results){left < f->part ? left : f->part, f->stride, f->id + at, f->logp + at, f->logp_kept + at};
    assert_true(out->steps > 0);
    f->have += out->steps;
    return 0;
}

static struct engine_model fake_model(struct fake *f, int64_t max_burst) {
    return (struct engine_model){.ctx = f,
                                 .n_kv_blocks = f->n_blocks,
                                 .vocab = VOCAB,
                                 .step = fake_step,
                                 .max_burst = max_burst,
                                 .burst = fake_burst,
                                 .burst_results = fake_results,
                                 .n_states = f->n_states,
                                 .copy_states = fake_copy_states};
}

static struct fake *fake_new(int64_t n_blocks) {
    struct fake *f = calloc(1, sizeof *f);
    f->n_blocks = n_blocks;
    f->token = malloc((size_t)(n_blocks * KV_BLOCK_LEN) * 4);
    f->pos = malloc((size_t)(n_blocks * KV_BLOCK_LEN) * 4);
    memset(f->token, -1, (size_t)(n_blocks * KV_BLOCK_LEN) * 4);
    memset(f->pos, -1, (size_t)(n_blocks * KV_BLOCK_LEN) * 4);
    return f;
}
static void fake_free(struct fake *f) {
    free(f->token);
    free(f->pos);
    free(f);
}

/* What sample `index` of r must be. */
static int64_t expected(const struct engine_request *r, uint32_t index, int32_t *ids, float *logp) {
    int32_t h[512];
    memcpy(h, r->prompt, (size_t)r->n_prompt * 4);
    for (int64_t k = 0; k < r->max_tokens; k++) {
        ids[k] = draw(h, r->n_prompt + k, rng_token(r->seed, r->uid, index, (uint32_t)k), &logp[k]);
        h[r->n_prompt + k] = ids[k];
        if (!r->ignore_eos && ids[k] == EOS) return k + 1;
    }
    return r->max_tokens;
}

struct seen {
    const struct engine_request *requests;
    int64_t n_done, n_preempted;
};
static int check_sample(void *arg, const struct engine_sample *s) {
    struct seen *c = arg;
    const struct engine_request *r = &c->requests[s->request];
    int32_t ids[256];
    float logp[256];
    assert_int_equal(s->n, expected(r, (uint32_t)s->index, ids, logp));
    assert_memory_equal(s->ids, ids, (size_t)s->n * 4);
    assert_memory_equal(s->logp, logp, (size_t)s->n * 4);
    assert_int_equal(s->finish, !r->ignore_eos && ids[s->n - 1] == EOS ? ENGINE_STOP : ENGINE_LENGTH);
    assert_ptr_equal(s->user, r->user);
    c->n_done++;
    c->n_preempted += s->n_preempted;
    return 0;
}

static const int32_t eos[1] = {EOS};

/* Random requests through engines of random limits: always the expected samples. */
static void test_any_limits(void **state) {
    (void)state;
    struct rng rng = {.seed = 5, .stream = RNG_TEST};
    int64_t preempted = 0, cached = 0, bursts = 0, copied = 0, verified = 0, accepted = 0;
    for (int round = 0; round < 60; round++) {
        enum { N = 12 };
        static int32_t prompts[N][128];
        struct engine_request rq[N];
        int64_t total = 0, longest = 0;
        for (int i = 0; i < N; i++) {
            const int64_t n = 1 + (int64_t)rng_below(&rng, 100);
            for (int64_t t = 0; t < n; t++) /* a common beginning of 40 tokens */
                prompts[i][t] = t < 40 ? (int32_t)t : (int32_t)rng_below(&rng, VOCAB);
            rq[i] = (struct engine_request){.prompt = prompts[i],
                                            .n_prompt = n,
                                            .n = 1 + (int64_t)rng_below(&rng, 6),
                                            .max_tokens = 1 + (int64_t)rng_below(&rng, 60),
                                            .temperature = 1,
                                            .top_p = 1,
                                            .repetition_penalty = 1,
                                            .seed = 11,
                                            .uid = (uint64_t)i,
                                            .ignore_eos = i % 3 == 0,
                                            .stop_ids = eos,
                                            .n_stop_ids = 1,
                                            .user = &prompts[i]};
            total += rq[i].n;
            const int64_t blocks = (n + rq[i].max_tokens - 1 + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN;
            if (blocks > longest) longest = blocks;
        }
        struct fake *f = fake_new(longest + (int64_t)rng_below(&rng, 30));
        f->n_states = round % 3 == 0 ? 1 + round % 16 : 0;
        struct engine_model model = fake_model(f, (int64_t[]){1, 2, 7, 16}[round % 4]);
        model.max_draft = round % 3 == 1 ? 1 + round / 3 % 4 : 0;
        model.draft_seqs = 15;
        model.verify = fake_verify;
        struct seen seen = {.requests = rq};
        const struct engine_config cfg = {.max_rows = 1 + (int64_t)rng_below(&rng, 80),
                                          .max_seqs = 1 + (int64_t)rng_below(&rng, 20),
                                          .no_prefix_cache = round % 4 == 3,
                                          .first_burst = round % 5,
                                          .longest_first = round % 7 < 3,
                                          .draft = round % 2 ? ENGINE_DRAFT_MEASURED : ENGINE_DRAFT_ALWAYS,
                                          .done = check_sample,
                                          .done_arg = &seen};
        struct engine *e;
        assert_int_equal(engine_create(&e, &model, &cfg), 0);
        for (int i = 0; i < N; i++) {
            int64_t id;
            assert_int_equal(engine_submit(e, &rq[i], &id), 0);
            assert_int_equal(id, i);
            if (i == N / 2) assert_true(engine_step(e) >= 0); /* later ones arrive in mid-run */
        }
        assert_int_equal(engine_run(e), 0);
        assert_int_equal(seen.n_done, total);
        assert_true(f->max_rows_seen <= cfg.max_rows);
        const struct engine_stats st = engine_stats(e);
        assert_int_equal(st.kv_blocks_used, 0); /* every block came back */
        assert_int_equal(st.finished, total);
        preempted += st.preempted;
        cached += st.cached_rows;
        bursts += f->bursts;
        copied += f->copied;
        verified += f->verified;
        accepted += st.accepted;
        assert_true(st.accepted <= st.drafted);
        if (cfg.no_prefix_cache) assert_int_equal(st.cached_rows, 0);
        engine_destroy(e);
        fake_free(f);
    }
    assert_true(preempted > 50); /* the small pools did preempt */
    assert_true(cached > 1000);  /* and blocks were shared */
    assert_true(bursts > 200);   /* and most of the decoding went in bursts */
    assert_true(copied > 10);    /* and samples with states began with a copy */
    assert_true(verified > 200 && accepted > 500);
}

/* Drafts that cost more than they bring end after a first look, those that pay stay; -1: none is right. */
static void test_drafts_measured(void **state) {
    (void)state;
    static const struct {
        int right, verify_us, burst_us, least, most;
    } cases[] = {{-1, 4000, 1000, 4, 8}, {1, 8000, 1000, 4, 8}, {4, 2000, 2000, 30, 70}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t prompt[4] = {1, 2, 3, 4};
        struct fake *f = fake_new(400);
        f->right = cases[i].right;
        f->verify_us = cases[i].verify_us;
        f->burst_us = cases[i].burst_us;
        struct engine_model model = fake_model(f, 16);
        model.max_draft = 3;
        model.draft_seqs = 128;
        model.verify = fake_verify;
        const struct engine_request r = {.prompt = prompt,
                                         .n_prompt = 4,
                                         .n = 16,
                                         .max_tokens = 200,
                                         .temperature = 1,
                                         .top_p = 1,
                                         .repetition_penalty = 1,
                                         .ignore_eos = true};
        struct seen seen = {.requests = &r};
        const struct engine_config cfg = {.max_rows = 64, .max_seqs = 16, .done = check_sample, .done_arg = &seen};
        struct engine *e;
        assert_int_equal(engine_create(&e, &model, &cfg), 0);
        assert_int_equal(engine_submit(e, &r, NULL), 0);
        assert_int_equal(engine_run(e), 0);
        assert_int_equal(seen.n_done, 16);
        assert_in_range(f->verified, cases[i].least, cases[i].most);
        engine_destroy(e);
        fake_free(f);
    }
}

/* Where samples with drafts end one by one, those that wait are admitted after some verifying steps, as after a burst: not one in
 * a step of its own, in which the others draw a single token. */
static void test_drafts_admit_together(void **state) {
    (void)state;
    enum { SAMPLES = 96, RUNNING = 12 };
    int32_t prompt[] = {1, 2, 3, 4};
    struct engine_request requests[SAMPLES];
    struct fake *f = fake_new(400);
    f->right = 4;
    struct engine_model model = fake_model(f, 16);
    model.max_draft = 1;
    model.draft_seqs = 128;
    model.verify = fake_verify;
    struct seen seen = {.requests = requests};
    const struct engine_config cfg = {
        .max_rows = 128, .max_seqs = RUNNING, .draft = ENGINE_DRAFT_ALWAYS, .done = check_sample, .done_arg = &seen};
    struct engine *e;
    assert_int_equal(engine_create(&e, &model, &cfg), 0);
    for (int i = 0; i < SAMPLES; i++) {
        requests[i] = (struct engine_request){.prompt = prompt,
                                              .n_prompt = 4,
                                              .n = 1,
                                              .max_tokens = 20 + 7 * i % 41,
                                              .temperature = 1,
                                              .top_p = 1,
                                              .repetition_penalty = 1,
                                              .ignore_eos = true,
                                              .uid = (uint64_t)i};
        assert_int_equal(engine_submit(e, &requests[i], NULL), 0);
    }
    assert_int_equal(engine_run(e), 0);
    assert_int_equal(seen.n_done, SAMPLES);
    assert_true(f->verified > 5 * f->steps);
    engine_destroy(e);
    fake_free(f);
}

/* The n samples of a prompt compute its full blocks once. */
static void test_prompt_computed_once(void **state) {
    (void)state;
    int32_t prompt[100];
    for (int i = 0; i < 100; i++) prompt[i] = i % VOCAB;
    struct fake *f = fake_new(200);
    const struct engine_model model = fake_model(f, 1);
    const struct engine_request r = {.prompt = prompt,
                                     .n_prompt = 100,
                                     .n = 8,
                                     .max_tokens = 5,
                                     .temperature = 1,
                                     .top_p = 1,
                                     .repetition_penalty = 1,
                                     .ignore_eos = true};
    for (int64_t budget = 30; budget <= 300; budget += 90) { /* chunked and whole */
        struct seen seen = {.requests = &r};
        const struct engine_config cfg = {.max_rows = budget, .max_seqs = 16, .done = check_sample, .done_arg = &seen};
        struct engine *e;
        assert_int_equal(engine_create(&e, &model, &cfg), 0);
        assert_int_equal(engine_submit(e, &r, NULL), 0);
        assert_int_equal(engine_run(e), 0);
        assert_int_equal(seen.n_done, 8);
        /* 100 rows once, then 4 rows (97..100) for each sibling, then 4 decoding rows each */
        assert_int_equal(engine_stats(e).rows, 100 + 7 * 4 + 8 * 4);
        engine_destroy(e);
    }
    fake_free(f);
}

static void test_prompt_again(void **state) {
    (void)state;
    int32_t prompt[40] = {1, 2, 3};
    struct fake *f = fake_new(20);
    const struct engine_model model = fake_model(f, 1);
    const struct engine_request r = {.prompt = prompt,
                                     .n_prompt = 40,
                                     .n = 1,
                                     .max_tokens = 2,
                                     .temperature = 1,
                                     .top_p = 1,
                                     .repetition_penalty = 1,
                                     .ignore_eos = true};
    const struct engine_config cfg = {.max_rows = 64, .max_seqs = 4};
    struct engine *e;
    assert_int_equal(engine_create(&e, &model, &cfg), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(engine_submit(e, &r, NULL), 0);
        assert_int_equal(engine_run(e), 0);
        assert_int_equal(engine_stats(e).cached_rows, 32 * i); /* its two whole blocks */
    }
    engine_destroy(e);
    fake_free(f);
}

static void test_refusals(void **state) {
    (void)state;
    int32_t prompt[4] = {1, 2, 3, 4};
    struct fake *f = fake_new(2);
    const struct engine_model model = fake_model(f, 1);
    const struct engine_config cfg = {.max_rows = 8, .max_seqs = 4};
    struct engine *e;
    assert_int_equal(engine_create(&e, &model, &cfg), 0);
    const struct engine_request ok = {
        .prompt = prompt, .n_prompt = 4, .n = 1, .max_tokens = 4, .temperature = 1, .top_p = 1, .repetition_penalty = 1};
    struct engine_request r = ok;
    r.max_tokens = 30; /* 33 positions: three blocks */
    assert_int_equal(engine_submit(e, &r, NULL), ERR_NOMEM);
    assert_non_null(strstr(err_msg(), "3 KV blocks"));
    r = ok;
    r.n_prompt = 0;
    assert_int_equal(engine_submit(e, &r, NULL), ERR_INVAL);
    r = ok;
    r.top_p = 0;
    assert_int_equal(engine_submit(e, &r, NULL), ERR_INVAL);
    r = ok;
    r.temperature = NAN;
    assert_int_equal(engine_submit(e, &r, NULL), ERR_INVAL);
    prompt[2] = VOCAB;
    assert_int_equal(engine_submit(e, &ok, NULL), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "97"));
    prompt[2] = 3;
    assert_int_equal(engine_step(e), 0); /* nothing was taken in */
    assert_int_equal(engine_submit(e, &ok, NULL), 0);
    f->fail_at = f->steps + 2;
    assert_int_equal(engine_run(e), ERR_DEVICE); /* an error of the model comes out */
    engine_destroy(e);
    fake_free(f);
}

/* ---- interrupted, and gone on with ---- */

struct part { /* a sample of a prompt, so far */
    int32_t ids[64];
    float logp[64], logp_kept[64];
    int64_t n, times; /* times: how often it was interrupted */
    bool done;
};
static int take_part(void *arg, const struct engine_sample *s) {
    struct part *p = (struct part *)arg + (intptr_t)s->user + s->index;
    assert_false(p->done);
    assert_true(s->n >= p->n);
    assert_memory_equal(s->ids, p->ids, (size_t)p->n * 4); /* what it had begun with */
    assert_memory_equal(s->logp, p->logp, (size_t)p->n * 4);
    if (s->n > 0) memcpy(p->ids, s->ids, (size_t)s->n * 4);
    if (s->n > 0) memcpy(p->logp, s->logp, (size_t)s->n * 4);
    if (s->n > 0) memcpy(p->logp_kept, s->logp_kept, (size_t)s->n * 4);
    p->n = s->n;
    p->done = s->finish != ENGINE_INTERRUPTED;
    p->times += !p->done;
    return 0;
}

/* Engine after engine makes some steps of requests of random lengths, is interrupted, and the next one goes on: the tokens and
 * log-probs of a run without interruption. */
static void test_interrupted(void **state) {
    (void)state;
    enum { N = 6, SAMPLES = 3 };
    struct rng rng = {.seed = 9, .stream = RNG_TEST};
    int64_t interrupted = 0, with_tokens = 0, paused = 0;
    for (int round = 0; round < 40; round++) {
        static struct part parts[N * SAMPLES];
        int32_t prompts[N][40];
        struct engine_request rq[N];
        memset(parts, 0, sizeof parts);
        for (int i = 0; i < N; i++) {
            for (int t = 0; t < 40; t++) prompts[i][t] = t < 20 ? t : (int32_t)rng_below(&rng, VOCAB);
            rq[i] = (struct engine_request){.prompt = prompts[i],
                                            .n_prompt = 1 + (int64_t)rng_below(&rng, 40),
                                            .n = SAMPLES,
                                            .max_tokens = 1 + (int64_t)rng_below(&rng, 60),
                                            .temperature = 1,
                                            .top_p = 1,
                                            .repetition_penalty = 1,
                                            .seed = 3,
                                            .uid = (uint64_t)i,
                                            .ignore_eos = i % 2 == 0,
                                            .stop_ids = eos,
                                            .n_stop_ids = 1,
                                            .user = (void *)(intptr_t)(i * SAMPLES)};
        }
        struct fake *f = fake_new(12);
        int64_t open = N * SAMPLES;
        for (int turn = 0; open > 0; turn++) {
            const struct engine_model model = fake_model(f, 1 + (int64_t)rng_below(&rng, 8));
            const struct engine_config cfg = {.max_rows = 1 + (int64_t)rng_below(&rng, 80),
                                              .max_seqs = 1 + (int64_t)rng_below(&rng, 20),
                                              .no_prefix_cache = round % 4 == 3,
                                              .done = take_part,
                                              .done_arg = parts};
            struct engine *e;
            assert_true(turn < 1000);
            assert_int_equal(engine_create(&e, &model, &cfg), 0);
            for (int i = 0; i < N * SAMPLES; i++) {
                struct engine_request r = rq[i / SAMPLES];
                if (turn == 0 && i % SAMPLES == 0) assert_int_equal(engine_submit(e, &r, NULL), 0);
                if (turn == 0 || parts[i].done) continue;
                r.n = 1;
                r.first_index = i % SAMPLES;
                r.begun = parts[i].ids;
                r.begun_logp = parts[i].logp;
                r.begun_logp_kept = parts[i].logp_kept;
                r.n_begun = parts[i].n;
                if (round % 2 && i % 2) r.pause_at = parts[i].n + 3;
                paused += r.pause_at > 0 && r.pause_at < r.max_tokens;
                assert_int_equal(engine_submit(e, &r, NULL), 0);
            }
            int more = 1;
            for (int64_t steps = (int64_t)rng_below(&rng, 12); steps > 0 && more > 0; steps--) more = engine_step(e);
            assert_true(more >= 0);
            assert_int_equal(engine_interrupt(e), 0);
            assert_int_equal(engine_stats(e).kv_blocks_used, 0);
            assert_int_equal(engine_step(e), 0); /* nothing is left in it */
            engine_destroy(e);
            memset(f->token, -1, (size_t)(f->n_blocks * KV_BLOCK_LEN) * 4); /* of other weights: nothing of it may be read */
            memset(f->pos, -1, (size_t)(f->n_blocks * KV_BLOCK_LEN) * 4);
            open = 0;
            for (int i = 0; i < N * SAMPLES; i++) open += !parts[i].done;
        }
        for (int i = 0; i < N * SAMPLES; i++) {
            int32_t ids[64];
            float logp[64];
            assert_int_equal(parts[i].n, expected(&rq[i / SAMPLES], (uint32_t)(i % SAMPLES), ids, logp));
            assert_memory_equal(parts[i].ids, ids, (size_t)parts[i].n * 4);
            assert_memory_equal(parts[i].logp, logp, (size_t)parts[i].n * 4);
            for (int64_t t = 0; t < parts[i].n; t++) assert_true(parts[i].logp_kept[t] == logp[t] / 2);
            interrupted += parts[i].times;
            with_tokens += parts[i].times > 0 && parts[i].n > 1;
        }
        fake_free(f);
    }
    assert_true(interrupted > 1000); /* it did interrupt, in mid-response too */
    assert_true(with_tokens > 200);
    assert_true(paused > 100);
}

static void test_interrupted_refusals(void **state) {
    (void)state;
    int32_t prompt[4] = {1, 2, 3, 4}, begun[4] = {5, 6, 8, 9};
    const float logp[4] = {0};
    struct fake *f = fake_new(4);
    const struct engine_model model = fake_model(f, 1);
    const struct engine_config cfg = {.max_rows = 8, .max_seqs = 4};
    struct engine *e;
    assert_int_equal(engine_create(&e, &model, &cfg), 0);
    const struct engine_request ok = {.prompt = prompt,
                                      .n_prompt = 4,
                                      .n = 1,
                                      .max_tokens = 4,
                                      .temperature = 1,
                                      .top_p = 1,
                                      .repetition_penalty = 1,
                                      .begun = begun,
                                      .begun_logp = logp,
                                      .begun_logp_kept = logp,
                                      .n_begun = 3};
    struct engine_request r = ok;
    r.n_begun = 4; /* nothing is left to draw */
    assert_int_equal(engine_submit(e, &r, NULL), ERR_INVAL);
    r = ok;
    r.n = 2; /* two samples with one beginning */
    assert_int_equal(engine_submit(e, &r, NULL), ERR_INVAL);
    r = ok;
    r.pause_at = 3; /* where it is already */
    assert_int_equal(engine_submit(e, &r, NULL), ERR_INVAL);
    r = ok;
    r.segment = 4; /* after the tokens that there are */
    assert_int_equal(engine_submit(e, &r, NULL), ERR_INVAL);
    begun[1] = VOCAB;
    assert_int_equal(engine_submit(e, &ok, NULL), ERR_INVAL);
    begun[1] = 6;
    assert_int_equal(engine_submit(e, &ok, NULL), 0);
    assert_int_equal(engine_run(e), 0);
    assert_int_equal(engine_stats(e).sampled, 1);
    engine_destroy(e);
    fake_free(f);
}

/* A tokenizer whose token i is a letter and a digit. */
static struct tokenizer *two_characters(void) {
    struct tokenizer *tok;
    char json[4096];
    int n = snprintf(json, sizeof json,
                     "{\"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {");
    for (int i = 0; i < VOCAB; i++)
        n += snprintf(json + n, sizeof json - (size_t)n, "%s\"%c%d\": %d", i ? ", " : "", 'A' + i / 10, i % 10, i);
    n += snprintf(json + n, sizeof json - (size_t)n, "}}}");
    if (tokenizer_open_bytes(&tok, json, (size_t)n, "test") < 0) fail_msg("%s", err_msg());
    return tok;
}

static int take_last(void *arg, const struct engine_sample *s) {
    struct engine_sample *last = arg;
    *last = *s;
    last->prompt = last->ids = NULL;
    last->logp = last->logp_kept = NULL;
    last->user = (void *)(intptr_t)s->ids[s->n - 1];
    return 0;
}

/* A stop string of the environment's last character and the policy's first one ends no segment; after an interruption, where the
 * policy wrote both, it does. */
static void test_stop_string_in_segment(void **state) {
    (void)state;
    int32_t prompt[4] = {1, 2, 3, 4}, begun[4] = {5, 6, 8, 9};
    const float logp[4] = {0};
    char stop[3] = "";
    const char *const stops[] = {stop};
    struct tokenizer *tok = two_characters();
    struct fake *f = fake_new(4);
    const struct engine_model model = fake_model(f, 1);
    struct engine_sample got;
    const struct engine_config cfg = {.max_rows = 8, .max_seqs = 4, .tok = tok, .done = take_last, .done_arg = &got};
    struct engine *e;
    assert_int_equal(engine_create(&e, &model, &cfg), 0);
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = 4,
                               .n = 1,
                               .max_tokens = 5,
                               .temperature = 1,
                               .top_p = 1,
                               .repetition_penalty = 1,
                               .begun = begun,
                               .begun_logp = logp,
                               .begun_logp_kept = logp,
                               .n_begun = 4};
    assert_int_equal(engine_submit(e, &r, NULL), 0);
    assert_int_equal(engine_run(e), 0);
    stop[0] = (char)('0' + begun[3] % 10);
    stop[1] = (char)('A' + (int)(intptr_t)got.user / 10);
    r.max_tokens = 6;
    r.stop = stops;
    r.n_stop = 1;
    for (r.segment = 0; r.segment <= 4; r.segment += 4) {
        assert_int_equal(engine_submit(e, &r, NULL), 0);
        assert_int_equal(engine_run(e), 0);
        assert_int_equal(got.finish, r.segment ? ENGINE_LENGTH : ENGINE_STOP);
        assert_int_equal(got.n, r.segment ? 6 : 5);
        assert_int_equal(got.text_bytes, r.segment ? -1 : 7);
    }
    engine_destroy(e);
    fake_free(f);
    tokenizer_close(tok);
}

/* ---- open sessions ---- */

enum { N_SESSIONS = 5, N_TURNS = 10, TURN = 7 };
struct session {
    int32_t ids[N_TURNS * (TURN + 40)];
    float logp[N_TURNS * (TURN + 40)];
    int64_t n;
};
static int keep_session(void *arg, const struct engine_sample *s) {
    struct session *x = &((struct session *)arg)[(int64_t)(intptr_t)s->user];
    memcpy(x->ids, s->ids, (size_t)s->n * 4);
    memcpy(x->logp, s->logp, (size_t)s->n * 4);
    x->n = s->n;
    return 0;
}

/* Ten turns of sessions, tools' answers between them; rows that were computed, and those not necessary. */
static void run_sessions(struct session *all, const struct engine_config *limits, int64_t n_blocks, int64_t max_burst,
                         struct engine_stats *st) {
    int32_t prompt[N_SESSIONS][30];
    struct fake *f = fake_new(n_blocks);
    const struct engine_model model = fake_model(f, max_burst);
    struct engine_config cfg = *limits;
    struct engine *e;
    cfg.done = keep_session;
    cfg.done_arg = all;
    memset(all, 0, N_SESSIONS * sizeof *all);
    assert_int_equal(engine_create(&e, &model, &cfg), 0);
    for (int turn = 0; turn < N_TURNS; turn++) {
        for (int i = 0; i < N_SESSIONS; i++) {
            struct session *x = &all[i];
            for (int t = 0; t < 30; t++) prompt[i][t] = t < 1 ? i : t;
            for (int t = 0; turn > 0 && t < 1 + (5 * i + 11 * turn) % 40; t++) { /* what a tool says */
                x->logp[x->n] = 0;
                x->ids[x->n++] = t % VOCAB;
            }
            const struct engine_request r = {.prompt = prompt[i],
                                             .n_prompt = 30,
                                             .n = 1,
                                             .max_tokens = x->n + TURN,
                                             .temperature = 1,
                                             .top_p = 1,
                                             .repetition_penalty = 1,
                                             .uid = (uint64_t)i,
                                             .begun = x->ids,
                                             .begun_logp = x->logp,
                                             .begun_logp_kept = x->logp,
                                             .n_begun = x->n,
                                             .segment = x->n,
                                             .ignore_eos = true,
                                             .user = (void *)(intptr_t)i};
            assert_int_equal(engine_submit(e, &r, NULL), 0);
        }
        assert_int_equal(engine_run(e), 0);
    }
    *st = engine_stats(e);
    assert_int_equal(st->kv_blocks_used, 0);
    engine_destroy(e);
    fake_free(f);
}

/* An open session computes no token twice; where memory is short it does, to the same tokens. */
static void test_sessions(void **state) {
    (void)state;
    static struct session want[N_SESSIONS], got[N_SESSIONS];
    struct engine_stats st;
    int64_t once = 0;
    run_sessions(want, &(struct engine_config){.max_rows = 64, .max_seqs = 4, .no_prefix_cache = true}, 500, 1, &st);
    for (int i = 0; i < N_SESSIONS; i++) once += 30 + want[i].n - 1; /* the last token has no successor */
    assert_true(st.rows > 3 * once);
    for (int64_t burst = 1; burst <= 16; burst += 5) {
        const struct engine_config cfg = {.max_rows = 10 + 20 * burst, .max_seqs = 4};
        run_sessions(got, &cfg, 500, burst, &st);
        assert_int_equal(st.rows, once);
        assert_memory_equal(got, want, sizeof want);
        run_sessions(got, &cfg, 40, burst, &st);
        assert_true(st.rows > once);
        assert_memory_equal(got, want, sizeof want);
    }
}

/* Samples that may become longest begin first: the engine is full until the end. */
static void test_longest_first(void **state) {
    (void)state;
    const int32_t prompt[] = {5, 6, 7};
    struct engine_request r[9];
    int64_t steps[2];
    for (int k = 0; k < 9; k++)
        r[k] = (struct engine_request){.prompt = prompt,
                                       .n_prompt = 3,
                                       .n = 1,
                                       .max_tokens = k == 8 ? 80 : 20,
                                       .temperature = 1,
                                       .top_p = 1,
                                       .repetition_penalty = 1,
                                       .uid = (uint64_t)k,
                                       .ignore_eos = true};
    for (int longest = 0; longest < 2; longest++) {
        struct fake *f = fake_new(64);
        const struct engine_model model = fake_model(f, 1);
        struct seen seen = {.requests = r};
        const struct engine_config cfg = {
            .max_rows = 8, .max_seqs = 3, .longest_first = longest, .done = check_sample, .done_arg = &seen};
        struct engine *e;
        assert_int_equal(engine_create(&e, &model, &cfg), 0);
        for (int k = 0; k < 9; k++) assert_int_equal(engine_submit(e, &r[k], NULL), 0);
        assert_int_equal(engine_run(e), 0);
        assert_int_equal(seen.n_done, 9);
        steps[longest] = engine_stats(e).steps;
        engine_destroy(e);
        fake_free(f);
    }
    assert_in_range(steps[1], 80, 84);   /* 240 tokens by three at a time */
    assert_in_range(steps[0], 120, 124); /* 20, 20, then the long one, two places empty */
}

static void test_pool(void **state) {
    (void)state;
    struct kv_pool p;
    const struct kv_key none = {0, 0};
    int32_t t[16] = {0};
    kv_pool_init(&p, 3);
    const int32_t a = kv_alloc(&p), b = kv_alloc(&p), c = kv_alloc(&p);
    assert_int_equal(kv_alloc(&p), -1);
    const struct kv_key ka = kv_key_next(none, t, 16), kb = kv_key_next(ka, t, 16);
    assert_true(ka.lo != kb.lo); /* the same tokens after another prefix are another block */
    kv_publish(&p, a, ka);
    kv_publish(&p, b, kb);
    assert_int_equal(kv_find(&p, ka), a);
    kv_unref(&p, a);
    kv_unref(&p, a);
    kv_unref(&p, b);
    assert_int_equal(kv_find(&p, kb), b); /* free blocks are still found */
    assert_int_equal(kv_alloc(&p), a);    /* until they are handed out again */
    assert_int_equal(kv_find(&p, ka), -1);
    const struct kv_key part = kv_key_next(kb, t, 5);
    kv_publish(&p, c, part);
    assert_int_equal(kv_take(&p, part), -1); /* it has an owner, who may still write */
    kv_unref(&p, c);
    assert_int_equal(kv_take(&p, kv_key_next(kb, t, 4)), -1);
    assert_int_equal(kv_take(&p, part), c);
    assert_int_equal(kv_find(&p, part), -1); /* what it holds next is another key's */
    kv_unref(&p, b);
    kv_unref(&p, c);
    assert_int_equal(p.n_free, 2);
    kv_pool_free(&p);
}

/* ---- progress and cancel ---- */

enum { N_WATCHED = 6 };
struct watched {
    int32_t ids[N_WATCHED][64];
    int64_t n[N_WATCHED], reports;
    bool ended[N_WATCHED];
};
static int watch(struct watched *w, const struct engine_sample *s, bool ended) {
    const int64_t k = (int64_t)(intptr_t)s->user;
    assert_true(!w->ended[k] && s->n > w->n[k] - (ended ? 1 : 0));
    assert_memory_equal(s->ids, w->ids[k], (size_t)w->n[k] * 4); /* what was reported stays */
    memcpy(w->ids[k], s->ids, (size_t)s->n * 4);
    w->n[k] = s->n;
    w->ended[k] = ended;
    return 0;
}
static int watch_progress(void *arg, const struct engine_sample *s) {
    ((struct watched *)arg)->reports++;
    return watch(arg, s, false);
}
static int watch_done(void *arg, const struct engine_sample *s) { return watch(arg, s, true); }

static int ignore_sample(void *arg, const struct engine_sample *s) {
    (void)arg;
    (void)s;
    return 0;
}

/* With first_burst bursts are short after a sample was admitted, and grow. */
static void test_first_burst(void **state) {
    (void)state;
    const int32_t prompt[] = {5, 6, 7};
    struct fake *f = fake_new(64);
    const struct engine_model model = fake_model(f, 16);
    const struct engine_config cfg = {.max_rows = 8, .max_seqs = 4, .first_burst = 2, .done = ignore_sample};
    struct engine *e;
    struct engine_request r = {.prompt = prompt,
                               .n_prompt = 3,
                               .n = 1,
                               .max_tokens = 60,
                               .temperature = 1,
                               .top_p = 1,
                               .repetition_penalty = 1,
                               .ignore_eos = true};
    int64_t id;
    assert_int_equal(engine_create(&e, &model, &cfg), 0);
    assert_int_equal(engine_submit(e, &r, &id), 0);
    for (int i = 0; i < 4; i++) assert_int_equal(engine_step(e), 1); /* the prompt, and bursts of 2, 4 and 8 steps */
    r.uid = 1;
    assert_int_equal(engine_submit(e, &r, &id), 0);
    assert_int_equal(engine_run(e), 0);
    static const int64_t want[] = {2, 4, 8, 2, 4, 8, 16};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) assert_int_equal(f->lengths[i], want[i]);
    engine_destroy(e);
    fake_free(f);
}

/* Tokens are reported as they are drawn, step by step and in bursts, and together are the response; a cancelled request reports
 * nothing more and changes no other one. */
static void test_progress_and_cancel(void **state) {
    (void)state;
    for (int64_t burst = 1; burst <= 8; burst *= 8) {
        struct fake *f = fake_new(64);
        struct watched w = {0};
        const struct engine_model m = fake_model(f, burst);
        const struct engine_config cfg = {
            .max_rows = 16, .max_seqs = 4, .done = watch_done, .progress = watch_progress, .done_arg = &w};
        struct engine *e;
        int32_t prompt[20];
        int64_t id[N_WATCHED];
        for (int i = 0; i < 20; i++) prompt[i] = i;
        assert_int_equal(engine_create(&e, &m, &cfg), 0);
        struct engine_request r = {
            .prompt = prompt, .n_prompt = 20, .n = 1, .max_tokens = 30, .temperature = 1, .top_p = 1, .repetition_penalty = 1};
        for (int64_t k = 0; k < N_WATCHED; k++) {
            r.uid = (uint64_t)k;
            r.user = (void *)(intptr_t)k;
            assert_int_equal(engine_submit(e, &r, &id[k]), 0);
        }
        for (int i = 0; i < 4; i++) assert_int_equal(engine_step(e), 1);
        engine_cancel(e, id[1]); /* running */
        engine_cancel(e, id[5]); /* waiting */
        const int64_t had = w.n[1];
        assert_int_equal(engine_run(e), 0);
        assert_true(w.n[1] == had && !w.ended[1] && w.n[5] == 0 && w.reports > 4);
        for (int64_t k = 0; k < N_WATCHED; k++) {
            int32_t want[64];
            float logp[64];
            r.uid = (uint64_t)k;
            if (k == 1 || k == 5) continue;
            assert_true(w.ended[k]);
            assert_int_equal(w.n[k], expected(&r, 0, want, logp));
            assert_memory_equal(w.ids[k], want, (size_t)w.n[k] * 4);
        }
        assert_int_equal(engine_stats(e).kv_blocks_used, 0);
        engine_destroy(e);
        fake_free(f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool),
        cmocka_unit_test(test_any_limits),
        cmocka_unit_test(test_drafts_measured),
        cmocka_unit_test(test_drafts_admit_together),
        cmocka_unit_test(test_prompt_computed_once),
        cmocka_unit_test(test_prompt_again),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_interrupted),
        cmocka_unit_test(test_interrupted_refusals),
        cmocka_unit_test(test_sessions),
        cmocka_unit_test(test_longest_first),
        cmocka_unit_test(test_stop_string_in_segment),
        cmocka_unit_test(test_first_burst),
        cmocka_unit_test(test_progress_and_cancel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
