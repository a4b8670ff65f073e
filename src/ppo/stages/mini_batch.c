/* mini_batch.c - a batch as columns, sequences and mini-batches: what the stages share.
 * Knows no formula. */
#include "ppo/stages/stages.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- columns ---- */

int ppo_add_like(struct batch *b, const char *name, enum batch_type type, const char *like, int64_t k, const void *data) {
    const struct batch_col *shape = batch_find(b, like);
    int64_t *lens = xmalloc((size_t)b->n_rows * sizeof *lens);
    for (int64_t i = 0; i < b->n_rows; i++) lens[i] = batch_len(shape, i) * k;
    const int rc = batch_add(b, name, type, lens, data, NULL);
    free(lens);
    return rc;
}

int ppo_add_f64(struct batch *b, const char *name, const char *like, double **out) {
    TRY(ppo_add_like(b, name, BATCH_F64, like, 1, NULL));
    *out = batch_find(b, name)->f64;
    return 0;
}

int ppo_add_numbers(struct batch *b, const char *name, const float *v) {
    double *col;
    TRY(ppo_add_f64(b, name, "responses", &col));
    const int64_t n = batch_find(b, "responses")->off[b->n_rows];
    for (int64_t t = 0; t < n; t++) {
        if (!isfinite(v[t])) FAIL(ERR_NUMERIC, "%s: not finite at token %lld of the batch", name, (long long)t);
        col[t] = (double)v[t];
    }
    return 0;
}

double *ppo_column(const struct batch *b, const char *name) {
    const struct batch_col *c = batch_find(b, name);
    return c ? c->f64 : NULL;
}

uint8_t *ppo_mask(const struct batch *b, const char *name) {
    const struct batch_col *c = batch_find(b, name);
    const int64_t n = batch_find(b, "responses")->off[b->n_rows];
    uint8_t *mask = xmalloc((size_t)n + 1);
    if (!c) batch_policy_mask(b, mask);
    for (int64_t t = 0; c && t < n; t++) mask[t] = c->i32[t] != 0;
    return mask;
}

uint8_t *ppo_policy_mask(const struct batch *b) { return ppo_mask(b, batch_find(b, "loss_mask") ? "loss_mask" : "response_mask"); }

int ppo_sequences(const struct batch *b, struct packed_seq **out) {
    struct batch_col *prompts, *responses;
    TRY(batch_get(b, "prompts", BATCH_I32, &prompts));
    TRY(batch_get(b, "responses", BATCH_I32, &responses));
    /* one block: the sequences, then their ids */
    const int64_t tokens = prompts->off[b->n_rows] + responses->off[b->n_rows];
    char *block = xmalloc((size_t)b->n_rows * sizeof(struct packed_seq) + (size_t)tokens * 4);
    struct packed_seq *seqs = (struct packed_seq *)block;
    int32_t *ids = (int32_t *)(block + (size_t)b->n_rows * sizeof *seqs);
    for (int64_t i = 0; i < b->n_rows; i++) {
        const int64_t np = batch_len(prompts, i), nr = batch_len(responses, i);
        memcpy(ids, prompts->i32 + prompts->off[i], (size_t)np * 4);
        memcpy(ids + np, responses->i32 + responses->off[i], (size_t)nr * 4);
        seqs[i] = (struct packed_seq){.ids = ids, .n = np + nr, .first = np};
        ids += np + nr;
    }
    *out = seqs;
    return 0;
}

/* ---- the mini-batch of an update ---- */

/* token-mean's denominator: verl's default trainer counts rejected tokens too, its asynchronous ones do not. */
static int64_t loss_tokens(const struct ppo_mini *u) {
    const uint8_t *const counted = u->s->schedule == PPO_SYNC ? u->policy : u->mask;
    int64_t n = 0;
    for (int64_t t = 0; t < u->n_tokens; t++) n += counted[t];
    return n;
}

static int take(void *ctx, const int64_t *rows, int64_t n, struct mini_batch *m) {
    struct ppo_mini *u = ctx;
    const struct ppo_worker_config *k = u->k;
    TRY(batch_select(&u->b, u->whole, rows, n));
    TRY(ppo_sequences(&u->b, &u->seqs));
    u->mask = ppo_mask(&u->b, "response_mask");
    u->policy = ppo_policy_mask(&u->b);
    u->rows = rows;
    u->off = batch_find(&u->b, "responses")->off;
    u->n_tokens = u->off[n];
    u->work = xcalloc((size_t)(u->n_work * u->n_tokens), sizeof *u->work);
    u->agg.batch_num_tokens = loss_tokens(u);
    u->agg.global_batch_size = u->agg.batch_rows = n;
    u->agg.width = k->data->max_response_length;
    const float temperature = (float)k->rollout.train.temperature;
    *m =
        (struct mini_batch){.seqs = u->seqs, .n = n, .temperature = temperature, .loss = u->loss, .on_record = u->report, .arg = u};
    if (u->role != VERLC_ACTOR) return 0;
    const struct batch_col *const routes = batch_find(&u->b, PPO_ROUTES);
    for (int64_t i = 0; routes && i < n; i++) u->seqs[i].routes = routes->i32 + routes->off[i];
    if (k->distill->enable) ppo_distillation_begin(&u->distill, k->distill, u->s->worker->vocab, &u->b);
    m->list = u->distill.k > 0 ? &u->distill.list : NULL;
    m->entropy = true;
    m->entropy_grad = k->actor.entropy_coeff != 0;
    return 0;
}

static void drop(void *ctx) {
    struct ppo_mini *u = ctx;
    ppo_distillation_end(&u->distill);
    batch_free(&u->b);
    free(u->seqs);
    free(u->mask);
    free(u->policy);
    free(u->work);
    u->seqs = NULL;
    u->mask = u->policy = NULL;
    u->work = NULL;
}

/* verl's rules (workers/utils/losses.py, workers/engine_workers.py): losses are shares of the mini-batch's, plain numbers
 * lie in one list, an extreme is known by its name, the rest are Metric(MEAN). */
static enum reduce reduce_of(const char *name) {
    static const char *const sums[] = {"actor/loss",  "actor/pg_loss",  "actor/kl_loss",          "actor/entropy_loss",
                                       "critic/loss", "critic/vf_loss", "actor/distillation/loss"};
    static const char *const means[] = {"actor/distillation/abs_loss"};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        if (strcmp(name, sums[i]) == 0) return REDUCE_SUM;
    for (size_t i = 0; i < sizeof means / sizeof *means; i++)
        if (strcmp(name, means[i]) == 0) return REDUCE_MEAN;
    if (strstr(name, "max")) return REDUCE_MAX;
    if (strstr(name, "min")) return REDUCE_MIN;
    return strncmp(name, "critic/", 7) == 0 || strncmp(name, "actor/distillation/", 19) == 0 ? REDUCE_FLAT : REDUCE_MEAN;
}

int ppo_mini_record(const struct micro_loss *x, struct algo_metrics *m) {
    const int rc = buf_add(x->record, m->v, (size_t)m->n * sizeof *m->v);
    algo_metrics_free(m);
    return rc;
}

int ppo_mini_reported(void *arg, const struct pack_micro *x, const void *record, size_t n) {
    struct ppo_mini *u = arg;
    const char *const role = u->role == VERLC_CRITIC ? "critic/" : "actor/";
    const struct progress at = run_progress(u->s->run);
    struct algo_metric v;
    for (size_t i = 0; i + sizeof v <= n; i += sizeof v) {
        char name[112];
        memcpy(&v, (const char *)record + i, sizeof v);
        snprintf(name, sizeof name, "%s%s", strncmp(v.name, role, strlen(role)) == 0 ? "" : role, v.name);
        update_metric_add(&u->metrics, name, reduce_of(name), v.value);
    }
    u->done += x->hi - x->lo;
    phase_progress(&at, u->role == VERLC_CRITIC ? "update_critic" : "update_actor", u->done, u->total, 0);
    return run_check_stop(u->s->run, u->done, u->total);
}

/* ---- a mini-batch whose gradient is not finite ---- */

static json_t *numbers(const double *x, int64_t n) { /* NaN and Inf as null */
    json_t *a = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(a, isfinite(x[i]) ? json_real(x[i]) : json_null());
    return a;
}
static json_t *row_ids(const struct batch_col *c, int64_t row) { return json_i32_array(c->i32 + c->off[row], batch_len(c, row)); }

struct bad_mini {
    const struct stage *s;
    struct batch b;
};

/* All that its update read: one line a sample. */
static int dump_mini(void *arg, struct buf *out) {
    static const char *const per_token[] = {"old_log_probs", "ref_log_prob", "advantages", "values", "returns"};
    const struct bad_mini *u = arg;
    const struct batch *b = &u->b;
    const struct batch_col *prompts = batch_find(b, "prompts"), *responses = batch_find(b, "responses"),
                           *score = batch_find(b, "score"), *uid = batch_find(b, "uid");
    for (int64_t i = 0; i < b->n_rows; i++) {
        json_t *o = json_pack("{s:I, s:I, s:o, s:o, s:o}", "step", (json_int_t)u->s->run->step, "uid", (json_int_t)uid->i64[i],
                              "prompt_ids", row_ids(prompts, i), "response_ids", row_ids(responses, i), "score",
                              isfinite(score->f64[i]) ? json_real(score->f64[i]) : json_null());
        for (int k = 0; k < 5; k++) {
            const struct batch_col *c = batch_find(b, per_token[k]);
            if (c) json_object_set_new(o, per_token[k], numbers(c->f64 + c->off[i], batch_len(c, i)));
        }
        const int rc = json_dump_line(out, o);
        json_decref(o);
        TRY(rc);
        TRY(buf_addc(out, '\n'));
    }
    return 0;
}

static int not_finite(const struct ppo_mini *mini, const struct update_result *r) {
    struct bad_mini bad = {.s = mini->s};
    int rc = batch_select(&bad.b, mini->whole, r->bad_rows, r->n_bad);
    if (rc == 0) rc = run_bad_gradient(mini->s->run, &r->why, dump_mini, &bad);
    batch_free(&bad.b);
    return rc;
}

/* ---- the stage ---- */

int ppo_mini_run(struct ppo_mini *mini, struct update *u, double next_lr) {
    const char *const name = mini->role == VERLC_CRITIC ? "critic" : "actor";
    struct run *const run = mini->s->run;
    struct metrics *const m = &run->metrics;
    const struct batch_col *prompts = batch_find(mini->whole, "prompts"), *responses = batch_find(mini->whole, "responses");
    struct update_result *const r = &mini->result;
    int64_t *len = xmalloc((size_t)mini->whole->n_rows * sizeof *len);
    u->n = mini->whole->n_rows;
    for (int64_t i = 0; i < u->n; i++) len[i] = batch_len(prompts, i) + batch_len(responses, i);
    u->len = len;
    u->step = run->step;
    u->metrics = &mini->metrics;
    u->router = mini->role == VERLC_CRITIC ? "critic/router" : "actor/router";
    u->ctx = mini;
    u->take = take;
    u->drop = drop;
    mini->total = u->n * u->epochs;
    int rc = worker_update_model(mini->s->worker, mini->role, u, r);
    if (rc == 0 && r->bad) rc = not_finite(mini, r);
    free(r->bad_rows);
    free(len);
    update_metrics_set(&mini->metrics, m);
    TRY(rc);
    if (r->n_steps > 0) metrics_set(m, r->grad_norm, "%s/grad_norm", name);
    if (r->n_steps > 0) metrics_set(m, r->flops, "perf/mfu/%s", name);
    metrics_set(m, next_lr, "%s/lr", name);
    metrics_set_i64(m, r->bad ? 1 : 0, "%s/skipped_steps", name);
    return 0;
}
