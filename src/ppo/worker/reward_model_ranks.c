/* reward_model_ranks.c - the reward model on several ranks: finished samples are dispatched to the ranks between slices of
 * generation, and their scores come back; both sides of it. A judge that is served is rank 0's, which steps it at each call. Of
 * ranks that have the model together the first one gets the samples, and the others a call for as long as its own lasts.
 * Invariant: as reward_model_ranks.h's. */
#include "ppo/worker/reward_model_ranks.h"

#include "ppo/config.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* A slice of scoring on a rank, and how many samples wait before one begins, unless no more come. */
#define SCORE_S 0.05
enum { ENOUGH = 8 };

/* What a sample has in addition to its JSON: lengths of prompt and response in tokens, of the response's text in bytes. */
struct score_item {
    int64_t tag, n_prompt, n_response, n_text;
    uint64_t seed, uid;
};
struct share {
    json_t *texts;            /* of those that wait: [messages, ground truth] */
    struct score_item *items; /* (n) */
    struct buf bytes;         /* prompts and responses, one after the other */
    int64_t n, cap, open;     /* open: waiting, or at the rank */
};
struct scored {
    int64_t tag;
    struct reward_result result;
};
struct scorer_ranks {
    struct rank_dispatch *dispatch;
    bool model, generates, judge; /* there is a reward model, which is a generative judge; a judge is served */
    bool flush, judge_busy;
    bool alone;          /* on ranks that do nothing else */
    int together;        /* ranks that have the model together; 1: each has it whole */
    struct share *share; /* of each rank */
    struct scored *done;
    int64_t n_done, cap_done, at_done;
};

/* ---- the controller ---- */

static void share_clear(struct share *s) {
    json_decref(s->texts);
    free(s->items);
    buf_free(&s->bytes);
    s->texts = NULL;
    s->items = NULL;
    s->n = s->cap = 0;
}

static bool due(void *arg, int rank) {
    const struct scorer_ranks *s = arg;
    const struct share *h = &s->share[rank];
    return (s->judge && rank == 0) || (h->open > 0 && (s->flush || h->n >= ENOUGH || s->generates));
}

/* The others make the steps that it orders. */
static int start_others(struct scorer_ranks *s, int rank) {
    struct message none = message_new(true);
    int rc = 0;
    for (int i = rank + 1; i < rank + s->together && rc == 0; i++)
        rc = rank_group_start(s->dispatch->g, i, "score_together", &none);
    message_free(&none);
    return rc;
}

static int start(void *arg, int rank) {
    struct scorer_ranks *s = arg;
    struct share *h = &s->share[rank];
    if (!due(s, rank)) return 0;
    TRY(start_others(s, rank));
    struct message m = message_new(true);
    json_object_set_new(m.head, "flush", json_boolean(s->flush));
    json_object_set(m.head, "texts", h->texts ? h->texts : json_null());
    message_add(&m, h->items, (size_t)h->n * sizeof *h->items);
    message_add(&m, h->bytes.p, h->bytes.n);
    const int rc = rank_group_start(s->dispatch->g, rank, "score", &m);
    message_free(&m);
    share_clear(h);
    return rc < 0 ? rc : 1;
}

static int take_one(struct scorer_ranks *s, const json_t *x, double score, const char *who) {
    const char *message = NULL;
    struct scored one = {0};
    int64_t status;
    TRY(json_i64(x, "tag", &one.tag, who));
    TRY(json_i64(x, "status", &status, who));
    TRY(json_str_opt(x, "message", &message, who));
    one.result = (struct reward_result){.status = (enum reward_status)status,
                                        .score = score,
                                        .extra = json_incref(json_object_get(x, "extra")),
                                        .message = message ? xstrdup(message) : NULL};
    xgrow((void **)&s->done, &s->cap_done, s->n_done + 1, sizeof *s->done);
    s->done[s->n_done++] = one;
    return 0;
}

static int take(void *arg, int rank, const struct coordinator_reply *reply) {
    struct scorer_ranks *s = arg;
    struct message_reader in = rank_group_reader(s->dispatch->g, rank, reply);
    const json_t *results = json_object_get(in.head, "results");
    const size_t n = json_array_size(results);
    struct comm_bytes scores;
    if (rank % s->together != 0) return 0;
    if (rank == 0) s->judge_busy = json_is_true(json_object_get(in.head, "busy"));
    TRY(message_next(&in, n * sizeof(double), &scores));
    for (size_t i = 0; i < n; i++) TRY(take_one(s, json_array_get(results, i), ((const double *)scores.p)[i], in.who));
    s->share[rank].open -= (int64_t)n;
    return 0;
}

static const struct ppo_scorer_ops by_ranks;

void ppo_scorer_open_ranks(struct ppo_scorer *m, const struct ppo_rm_config *k, struct rank_dispatch *d, int together, bool alone) {
    struct scorer_ranks *const s = m->ranks = xcalloc(1, sizeof *s);
    m->ops = &by_ranks;
    s->dispatch = d;
    s->alone = alone;
    s->together = together;
    s->model = ppo_scores_by_model(k);
    s->generates = s->model && k->judge.prompt_template;
    s->judge = ppo_serves_judge(k);
    s->share = xcalloc((size_t)d->g->n, sizeof *s->share);
    if (k->enable) d->interleaved = (struct rank_interleaved){s, together, due, start, take};
}

static void forget(struct scorer_ranks *s) {
    for (int r = 0; r < s->dispatch->g->n; r++) {
        share_clear(&s->share[r]);
        s->share[r].open = 0;
    }
    for (; s->at_done < s->n_done; s->at_done++) reward_result_free(&s->done[s->at_done].result);
    s->at_done = s->n_done = 0;
}

void ppo_scorer_close(struct ppo_scorer *m) {
    struct scorer_ranks *const s = m->ranks;
    if (!s) return;
    forget(s);
    free(s->share);
    free(s->done);
    free(s);
}

static int ranks_submit(struct ppo_scorer *m, const struct reward_model_sample *x, int64_t tag) {
    struct scorer_ranks *const s = m->ranks;
    struct share *h = s->share;
    for (int r = s->together; r < s->dispatch->g->n; r += s->together)
        if (s->share[r].open < h->open) h = &s->share[r];
    if (!h->texts) h->texts = json_array();
    xgrow((void **)&h->items, &h->cap, h->n + 1, sizeof *h->items);
    h->items[h->n++] =
        (struct score_item){tag, x->n_prompt, x->n_response, (int64_t)x->judge.n_response, x->judge.seed, x->judge.uid};
    json_array_append_new(h->texts, json_pack("[O?, O?]", x->messages, x->judge.ground_truth));
    TRY(buf_add(&h->bytes, x->prompt, (size_t)x->n_prompt * 4));
    TRY(buf_add(&h->bytes, x->response, (size_t)x->n_response * 4));
    TRY(buf_add(&h->bytes, x->judge.response, x->judge.n_response));
    h->open++;
    return 0;
}

/* On ranks that generate too, the calls are made by the dispatch of generation, which continues while scores are pending. */
static int ranks_step(struct ppo_scorer *m, bool flush) {
    struct scorer_ranks *const s = m->ranks;
    s->flush = flush;
    if (s->alone) TRY(rank_dispatch_step(s->dispatch, false));
    return s->judge_busy;
}

static int ranks_poll(struct ppo_scorer *m, int64_t *tag, struct reward_result *out) {
    struct scorer_ranks *const s = m->ranks;
    if (s->at_done == s->n_done) return 0;
    *tag = s->done[s->at_done].tag;
    *out = s->done[s->at_done++].result;
    if (s->at_done == s->n_done) s->at_done = s->n_done = 0;
    return 1;
}

static int64_t ranks_pending(struct ppo_scorer *m) {
    const struct scorer_ranks *const s = m->ranks;
    int64_t n = s->n_done - s->at_done;
    for (int r = 0; r < s->dispatch->g->n; r++) n += s->share[r].open;
    return n;
}

static void ranks_rest(struct ppo_scorer *m) {
    struct scorer_ranks *const s = m->ranks;
    struct err_saved why;
    if (!s->alone) return;
    err_save(&why);
    rank_group_drain(s->dispatch->g); /* of a judge, which is polled all the time */
    s->judge_busy = false;
    err_restore(&why);
}

static void ranks_drop(struct ppo_scorer *m) {
    struct scorer_ranks *const s = m->ranks;
    struct err_saved why;
    err_save(&why);
    rank_group_drain(s->dispatch->g);
    forget(s);
    if (s->model || s->judge) (void)rank_group_plain_call(s->dispatch->g, "score_drop", json_object(), NULL);
    err_restore(&why);
}

static int no_pause(struct ppo_scorer *m) {
    (void)m;
    return 0;
}
static const struct ppo_scorer_ops by_ranks = {.submit = ranks_submit,
                                               .step = ranks_step,
                                               .pause = no_pause,
                                               .poll = ranks_poll,
                                               .pending = ranks_pending,
                                               .rest = ranks_rest,
                                               .drop = ranks_drop};

/* ---- in this process ---- */

static void rest(struct ppo_scorer *m) { (void)m; }

static int none_step(struct ppo_scorer *m, bool flush) {
    (void)m, (void)flush;
    return 0;
}
static int none_poll(struct ppo_scorer *m, int64_t *tag, struct reward_result *out) {
    (void)m, (void)tag, (void)out;
    return 0;
}
static int64_t none_pending(struct ppo_scorer *m) {
    (void)m;
    return 0;
}
static const struct ppo_scorer_ops by_none = {
    .step = none_step, .pause = no_pause, .poll = none_poll, .pending = none_pending, .rest = rest, .drop = rest};

static int served_judge_step(struct ppo_scorer *m, bool flush) {
    (void)flush;
    return judge_server_step(m->judge);
}
static void served_judge_drop(struct ppo_scorer *m) { judge_server_drop(m->judge); }
static int served_judge_pause(struct ppo_scorer *m) { return judge_server_pause(m->judge); }
static const struct ppo_scorer_ops by_judge = {.step = served_judge_step,
                                               .pause = served_judge_pause,
                                               .poll = none_poll,
                                               .pending = none_pending,
                                               .rest = rest,
                                               .drop = served_judge_drop};

static int model_submit(struct ppo_scorer *m, const struct reward_model_sample *s, int64_t tag) {
    return reward_model_submit(m->rm, s, tag);
}
static int model_step(struct ppo_scorer *m, bool flush) { return reward_model_step(m->rm, flush); }
static int model_poll(struct ppo_scorer *m, int64_t *tag, struct reward_result *out) { return reward_model_poll(m->rm, tag, out); }
static int64_t model_pending(struct ppo_scorer *m) { return reward_model_pending(m->rm); }
static void model_drop(struct ppo_scorer *m) { reward_model_drop(m->rm); }
static int model_pause(struct ppo_scorer *m) { return reward_model_pause(m->rm); }
static const struct ppo_scorer_ops by_model = {.submit = model_submit,
                                               .step = model_step,
                                               .pause = model_pause,
                                               .poll = model_poll,
                                               .pending = model_pending,
                                               .rest = rest,
                                               .drop = model_drop};

void ppo_scorer_open_local(struct ppo_scorer *m, struct reward_model *rm, struct judge_server *judge) {
    *m = (struct ppo_scorer){.ops = rm ? &by_model : judge ? &by_judge : &by_none, .rm = rm, .judge = judge};
}

/* ---- a rank ---- */

/* x's pointers go into bytes, from *at on. */
static int read_item(const struct score_item *i, const json_t *texts, const struct comm_bytes *bytes, size_t *at,
                     struct reward_model_sample *x) {
    const size_t prompt = (size_t)i->n_prompt * 4, response = (size_t)i->n_response * 4, text = (size_t)i->n_text;
    if (i->n_prompt < 0 || i->n_response < 0 || i->n_text < 0 || prompt + response + text > bytes->n - *at)
        FAIL(ERR_FORMAT, "the controller sent a sample to be scored without its tokens");
    const json_t *messages = json_array_get(texts, 0), *truth = json_array_get(texts, 1);
    const char *p = (const char *)bytes->p + *at;
    *x = (struct reward_model_sample){.messages = json_is_null(messages) ? NULL : messages,
                                      .prompt = (const int32_t *)(const void *)p,
                                      .n_prompt = i->n_prompt,
                                      .response = (const int32_t *)(const void *)(p + prompt),
                                      .n_response = i->n_response,
                                      .judge = {.messages = json_is_null(messages) ? NULL : messages,
                                                .response = p + prompt + response,
                                                .n_response = text,
                                                .ground_truth = json_is_null(truth) ? NULL : truth,
                                                .seed = i->seed,
                                                .uid = i->uid}};
    *at += prompt + response + text;
    return 0;
}

/* Those of the call join those that wait. */
static int submit_all(struct ppo_scorer *m, const struct comm_call *call) {
    struct message_reader in = {.head = call->args, .arrays = call->arrays, .n = call->n_arrays, .who = "the controller"};
    const json_t *texts = json_object_get(call->args, "texts");
    const struct score_item *items;
    struct comm_bytes bytes;
    size_t at = 0;
    int64_t n;
    TRY(message_items(&in, sizeof *items, &n, (void **)&items));
    TRY(message_next(&in, SIZE_MAX, &bytes));
    for (int64_t i = 0; i < n; i++) {
        struct reward_model_sample x;
        char *aligned; /* texts between them are of any length */
        const size_t from = at;
        TRY(read_item(&items[i], json_array_get(texts, (size_t)i), &bytes, &at, &x));
        aligned = xmalloc(at - from + 1);
        memcpy(aligned, (const char *)bytes.p + from, at - from);
        x.prompt = (const int32_t *)(const void *)aligned;
        x.response = x.prompt + x.n_prompt;
        const int rc = m->ops->submit(m, &x, items[i].tag);
        free(aligned);
        TRY(rc);
    }
    return 0;
}

int ppo_scorer_follow(struct ppo_scorer *m) {
    if (!m->rm) FAIL(ERR_INTERNAL, "there is no reward model to compute together");
    return reward_model_follow(m->rm);
}

int ppo_scorer_answer(struct ppo_scorer *scorer, const struct comm_call *call, struct ctl_result *out) {
    const double until = clock_now() + SCORE_S;
    bool flush;
    int more, rc = 0;
    TRY(json_bool(call->args, "flush", &flush, call->name));
    TRY(submit_all(scorer, call));
    do TRY(more = scorer->ops->step(scorer, flush));
    while (more && clock_now() < until);
    TRY(scorer->ops->pause(scorer));
    struct message m = message_new(false);
    struct scored one;
    struct buf scores = {0};
    json_t *results = json_array();
    json_object_set_new(m.head, "results", results);
    json_object_set_new(m.head, "busy", json_boolean(more));
    while (rc == 0 && scorer->ops->poll(scorer, &one.tag, &one.result) > 0) {
        json_array_append_new(results, json_pack("{s:I, s:i, s:O?, s:s?}", "tag", (json_int_t)one.tag, "status",
                                                 (int)one.result.status, "extra", one.result.extra, "message", one.result.message));
        rc = buf_add(&scores, &one.result.score, sizeof one.result.score);
        reward_result_free(&one.result);
    }
    message_add(&m, scores.p, scores.n);
    buf_free(&scores);
    if (rc == 0) *out = (struct ctl_result){m.head, m.arrays, m.n};
    else message_free(&m);
    return rc;
}
