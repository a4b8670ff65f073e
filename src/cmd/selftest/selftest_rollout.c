/* selftest_rollout.c - `verlc selftest`: are the log-probs of a rollout those of the training forward pass of the same
 * tokens, in every bit?
 *
 * A model samples answers to random prompts, then the same tokens are scored; each way of doing so is a line: many sequences at
 * a time or few, prompts in chunks, with too few KV blocks, scored in batches of any size. On small models with random weights, or
 * on the user's own at the sizes of the user's run.
 * Invariant: both sides are what a run calls, the rollout's engine and the trained model's log-probs. */
#include "cmd/selftest/selftest.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "base/rng.h"
#include "engine/engine.h"
#include "model/files/init.h"
#include "model/files/load.h"
#include "train/trained_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEMPERATURE 0.7f
enum { SAY_SECONDS = 5 };

/* What is sampled, and what came of it. */
struct rollout {
    struct rollout_size size;
    int64_t max_len;         /* prompt and answer */
    int32_t *ids;            /* (seqs, max_len) */
    float *logp;             /* (seqs, new) */
    struct packed_seq *seqs; /* (seqs) */
    int64_t *n;              /* (seqs): tokens of the answer */
    int64_t tokens, preempted;
};

/* One way of sampling, and of scoring. */
struct way {
    const char *what;
    int64_t max_rows, max_seqs; /* of a step of the rollout */
    int64_t cache_part;         /* the KV cache: one of so many parts of what all would need */
    struct micro_batch_limits cut;
};

static struct rollout *rollout_new(const struct rollout_size *size) {
    struct rollout *o = xcalloc(1, sizeof *o);
    const size_t seqs = (size_t)size->seqs;
    o->size = *size;
    o->max_len = size->prompt + size->new;
    o->ids = xcalloc(seqs * (size_t)o->max_len, sizeof *o->ids);
    o->logp = xcalloc(seqs * (size_t)size->new, sizeof *o->logp);
    o->seqs = xcalloc(seqs, sizeof *o->seqs);
    o->n = xcalloc(seqs, sizeof *o->n);
    return o;
}
static void rollout_free(struct rollout *o) {
    free(o->ids);
    free(o->logp);
    free(o->seqs);
    free(o->n);
    free(o);
}

static int take_sample(void *arg, const struct engine_sample *s) {
    struct rollout *o = arg;
    const int64_t i = (int64_t)(intptr_t)s->user * o->size.n + s->index;
    int32_t *ids = o->ids + i * o->max_len;
    memcpy(ids, s->prompt, (size_t)s->n_prompt * 4);
    memcpy(ids + s->n_prompt, s->ids, (size_t)s->n * 4);
    memcpy(o->logp + i * o->size.new, s->logp, (size_t)s->n * 4);
    o->seqs[i] = (struct packed_seq){.ids = ids, .n = s->n_prompt + s->n, .first = s->n_prompt};
    o->n[i] = s->n;
    o->tokens += s->n;
    o->preempted += s->n_preempted;
    return 0;
}

/* Lengths around those of KV blocks first, then any. */
static int64_t prompt_len(const struct rollout_size *size, int64_t i, struct rng *r) {
    static const int64_t first[] = {1, 16, 17, 40, 97, 150};
    const int64_t any = 1 + (int64_t)rng_below(r, (uint64_t)size->prompt);
    return i < (int64_t)(sizeof first / sizeof *first) && first[i] <= size->prompt ? first[i] : any;
}

static int submit(struct engine *e, const struct model *m, const struct rollout_size *size) {
    struct rng r = {.seed = 9, .stream = RNG_TEST};
    int32_t *prompt = xmalloc((size_t)size->prompt * sizeof *prompt);
    int rc = 0;
    for (int64_t i = 0; i < size->seqs / size->n && rc == 0; i++) {
        const int64_t n = prompt_len(size, i, &r), fewer = 3 * (i % 6);
        for (int64_t t = 0; t < n; t++) prompt[t] = (int32_t)rng_below(&r, (uint64_t)m->cfg.vocab);
        const struct engine_request q = {.prompt = prompt,
                                         .n_prompt = n,
                                         .n = size->n,
                                         .max_tokens = size->new > fewer ? size->new - fewer : size->new,
                                         .temperature = TEMPERATURE,
                                         .top_p = i == 2 ? 0.9f : 1,
                                         .repetition_penalty = 1,
                                         .top_k = -1,
                                         .seed = 5,
                                         .uid = (uint64_t)i,
                                         .ignore_eos = true,
                                         .user = (void *)(intptr_t)i};
        rc = engine_submit(e, &q, NULL);
    }
    free(prompt);
    return rc;
}

/* To the end, with a progress line now and then where that takes long. */
static int run(struct engine *e, const char *what) {
    double reported = clock_now();
    int more;
    do {
        more = engine_step(e);
        TRY(more);
        if (clock_now() - reported < SAY_SECONDS) continue;
        log_info("selftest: %s: %lld tokens sampled", what, (long long)engine_stats(e).sampled);
        reported = clock_now();
    } while (more > 0);
    return 0;
}

static int sample(struct model *m, const struct way *w, struct rollout *o) {
    struct decoder *d = NULL;
    struct engine *e = NULL;
    const int64_t each = (o->max_len + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN, part = o->size.seqs * each / w->cache_part;
    const int64_t max_seqs = w->max_seqs < o->size.seqs ? w->max_seqs : o->size.seqs;
    const struct decoder_args limits = {.max_seqs = max_seqs, .max_rows = w->max_rows, .max_len = o->max_len};
    struct decoder_args a = decoder_size(m->dev, &m->cfg, m->act, &limits, SIZE_MAX);
    const struct engine_config cfg = {.done = take_sample, .done_arg = o};
    a.model = m;
    a.n_kv_blocks = part > each ? part : each;
    o->tokens = o->preempted = 0;
    TRY(decoder_open(&d, &a));
    int rc = decoder_engine(&e, d, &cfg);
    if (rc == 0) rc = submit(e, m, &o->size);
    if (rc == 0) rc = run(e, w->what);
    engine_destroy(e);
    decoder_close(d);
    return rc;
}

static int64_t differing(const struct rollout *o, const float *scored) {
    int64_t bad = 0;
    for (int64_t i = 0; i < o->size.seqs; i++)
        for (int64_t t = 0; t < o->n[i]; t++) {
            const float f = *scored++;
            bad += memcmp(&o->logp[i * o->size.new + t], &f, sizeof f) != 0 || !isfinite(f);
        }
    return bad;
}

struct compare_args {
    struct model *model;
    const char *name; /* of the model, for the line */
    const struct rollout_size *size;
    const struct way *ways;
    int n_ways;
    int64_t batch_rows; /* most rows of a training pass */
};

static int compare(struct selftest *t, const struct compare_args *x) {
    struct model *const m = x->model;
    const struct rollout_size *const size = x->size;
    const struct way *const ways = x->ways;
    struct rollout *o = rollout_new(size);
    float *scored = xcalloc((size_t)(size->seqs * size->new), sizeof *scored);
    struct trained_model *a = NULL;
    const struct trained_model_args args = {.dev = m->dev, .model = m, .max_rows = x->batch_rows, .max_seqs = size->seqs};
    int rc = trained_model_create(&a, &args);
    for (int i = 0; i < x->n_ways && rc == 0; i++) {
        char what[96], detail[96];
        if ((rc = sample(m, &ways[i], o)) < 0) break;
        rc = trained_model_forward(a, o->seqs, size->seqs, ways[i].cut, TEMPERATURE, (struct forward_out){.logp = scored});
        if (rc < 0) break;
        const int64_t bad = differing(o, scored);
        snprintf(what, sizeof what, "rollout = training, %s, %s", x->name, ways[i].what);
        snprintf(detail, sizeof detail, "%lld of %lld log-probs differ", (long long)bad, (long long)o->tokens);
        const size_t end = strlen(detail);
        if (o->preempted) snprintf(detail + end, sizeof detail - end, "; %lld preemptions", (long long)o->preempted);
        selftest_line(t, what, bad == 0 && o->tokens > 0, detail);
    }
    trained_model_destroy(a);
    free(scored);
    rollout_free(o);
    return rc;
}

/* ---- small models ---- */

/* Heads of 64 and 128, a vocabulary of several chunks. */
static json_t *small_config(bool qwen3) {
    json_t *c = json_pack("{s:s, s:[s], s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:s, s:f, s:i, s:b, s:f, s:s}", "model_type",
                          qwen3 ? "qwen3" : "qwen2", "architectures", qwen3 ? "Qwen3ForCausalLM" : "Qwen2ForCausalLM",
                          "hidden_size", 256, "intermediate_size", 704, "num_hidden_layers", 3, "num_attention_heads", 4,
                          "num_key_value_heads", 2, "head_dim", qwen3 ? 128 : 64, "vocab_size", 9000, "max_position_embeddings",
                          512, "rms_norm_eps", 1e-6, "hidden_act", "silu", "initializer_range", 0.15, "eos_token_id", 2,
                          "tie_word_embeddings", 1, "rope_theta", 1e4, "torch_dtype", "float32");
    CHECK(c != NULL);
    return c;
}

static int check_small(struct selftest *t, bool qwen3, enum dtype act) {
    static const struct rollout_size size = {.seqs = 18, .n = 3, .prompt = 150, .new = 48};
    static const struct way ways[] = {{"all at once", 4096, 18, 1, {.max_seqs = 18}},
                                      {"7 rows a step", 7, 7, 1, {.max_seqs = 1}},
                                      {"one by one", 512, 1, 1, {.max_rows = 300}}};
    char dir[] = "/tmp/verlc-selftest-XXXXXX", name[64];
    struct model *m = NULL;
    json_t *c = NULL;
    if (!mkdtemp(dir)) FAIL(ERR_IO, "selftest: no directory can be made in /tmp");
    char *path = file_join(dir, "model");
    const int64_t longest = size.prompt + size.new;
    int rc = 0;
    c = small_config(qwen3);
    TRYG(model_init_dir(c, path, 3, DT_F32), out);
    TRYG(model_open(&m, t->dev, &(struct model_open_args){.dir = path, .act = act, .flags = MODEL_INFER, .max_len = longest}), out);
    snprintf(name, sizeof name, "%s %s", qwen3 ? "qwen3" : "qwen2", dtype_name(act));
    rc = compare(t, &(struct compare_args){.model = m,
                                           .name = name,
                                           .size = &size,
                                           .ways = ways,
                                           .n_ways = (int)(sizeof ways / sizeof *ways),
                                           .batch_rows = size.seqs * longest});
out:
    model_close(m);
    json_decref(c);
    free(path);
    (void)file_remove_tree(dir);
    return rc;
}

int selftest_rollout(struct selftest *t) {
    for (int i = 0; i < 4; i++) TRY(check_small(t, i / 2 == 1, i % 2 ? DT_BF16 : DT_F32));
    return 0;
}

/* ---- the user's model ---- */

int selftest_model(struct selftest *t, const char *dir, enum dtype act, const struct rollout_size *size) {
    enum { BATCH_ROWS = 8192 };
    const int64_t longest = size->prompt + size->new, batch = longest > BATCH_ROWS ? longest : BATCH_ROWS;
    const struct way ways[] = {{"all at once", batch, size->seqs, 1, {.max_rows = batch}},
                               {"a third of the KV cache", batch, size->seqs, 3, {.max_seqs = 1}},
                               {"7 at a time, 64 rows a step", 64, 7, 1, {.max_rows = longest}}};
    struct model *m = NULL;
    TRY(model_open(&m, t->dev, &(struct model_open_args){.dir = dir, .act = act, .flags = MODEL_INFER, .max_len = longest}));
    const char *slash = strrchr(dir, '/');
    const int rc = compare(t, &(struct compare_args){.model = m,
                                                     .name = slash && slash[1] ? slash + 1 : dir,
                                                     .size = size,
                                                     .ways = ways,
                                                     .n_ways = (int)(sizeof ways / sizeof *ways),
                                                     .batch_rows = batch});
    model_close(m);
    return rc;
}
