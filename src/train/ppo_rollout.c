/* ppo_rollout.c - the generation stage: prompts in, scored samples out.
 * A sample is decoded and handed to the grader the moment it ends, while the
 * rest is still being generated. */
#include "train/ppo_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct gen_sample {
    int32_t *ids;
    float *logp;
    char *text;
    int64_t n, n_preempted;
    enum roll_finish finish;
    double seconds;
    struct reward_result reward;
    bool scored;
};

struct gen {
    struct ppo *p;
    const struct batch_col *prompts, *data_source, *reward_model, *extra_info;
    struct gen_sample *samples; /* (rows * n), row-major */
    int64_t n, n_total, n_done, tokens;
    double start;
    bool validation;
};

static int score_sample(struct gen *g, int64_t i) {
    struct gen_sample *s = &g->samples[i];
    const int64_t row = i / g->n;
    const json_t *rm = g->reward_model ? g->reward_model->json[row] : NULL;
    const struct reward_request q = {
        .data_source = g->data_source ? g->data_source->str[row] : "",
        .solution = s->text,
        .n_solution = strlen(s->text),
        .ground_truth = json_object_get(rm, "ground_truth"),
        .extra_info = g->extra_info ? g->extra_info->json[row] : NULL,
        .response_len = s->n,
    };
    return reward_submit(g->p->reward, &q, i);
}

static int take_scores(struct gen *g, double wait_s) {
    int64_t tag;
    struct reward_result r;
    int got;
    while ((got = reward_poll(g->p->reward, wait_s, &tag, &r)) > 0) {
        g->samples[tag].reward = r;
        g->samples[tag].scored = true;
        stage_beat(g->p->stages);
    }
    return got;
}

static int on_sample(void *arg, const struct roll_sample *s) {
    struct gen *g = arg;
    const int64_t i = (int64_t)(intptr_t)s->user * g->n + s->index;
    struct gen_sample *o = &g->samples[i];
    struct buf text = {0};
    o->n = s->n;
    o->ids = xmalloc((size_t)s->n * sizeof *o->ids);
    o->logp = xmalloc((size_t)s->n * sizeof *o->logp);
    memcpy(o->ids, s->ids, (size_t)s->n * sizeof *o->ids);
    memcpy(o->logp, s->logp, (size_t)s->n * sizeof *o->logp);
    o->finish = s->finish;
    o->seconds = s->seconds;
    o->n_preempted = s->n_preempted;
    const int rc = tokenizer_decode(g->p->tok, s->ids, s->n, true, &text);
    o->text = buf_take(&text);
    TRY(rc);
    g->n_done++;
    g->tokens += s->n;
    return score_sample(g, i);
}

static int submit_all(struct gen *g, struct roll_engine *e, const struct batch *prompts, const struct ppo_sampling *sp,
                      uint64_t seed) {
    struct batch_col *uid;
    const struct model_config *c = &g->p->policy->cfg;
    int32_t stop_ids[17];
    int64_t n_stop = 0;
    for (int i = 0; i < c->n_eos; i++) stop_ids[n_stop++] = (int32_t)c->eos[i];
    const int32_t eos = tokenizer_eos(g->p->tok);
    if (eos >= 0) stop_ids[n_stop++] = eos;
    TRY(batch_get(prompts, "uid", BATCH_I64, &uid));
    for (int64_t r = 0; r < prompts->n_rows; r++) {
        const struct roll_request q = {
            .prompt = g->prompts->i32 + g->prompts->off[r],
            .n_prompt = batch_len(g->prompts, r),
            .n = sp->n,
            .max_tokens = g->p->k.max_response_length,
            .temperature = (float)sp->temperature,
            .top_p = (float)sp->top_p,
            .min_p = (float)sp->min_p,
            .repetition_penalty = (float)sp->repetition_penalty,
            .top_k = (int32_t)sp->top_k,
            .seed = seed,
            .uid = (uint64_t)uid->i64[r],
            .ignore_eos = sp->ignore_eos,
            .stop_ids = stop_ids,
            .n_stop_ids = n_stop,
            .user = (void *)(intptr_t)r,
        };
        TRY(roll_submit(e, &q, NULL));
    }
    return 0;
}

static int run_engine(struct gen *g, struct roll_engine *e) {
    double shown = 0;
    for (;;) {
        const int more = roll_step(e);
        TRY(more);
        TRY(take_scores(g, 0));
        stage_beat(g->p->stages);
        const double now = clock_now();
        if (now - shown > 0.2) {
            const struct roll_stats st = roll_stats(e);
            track_progress(g->p->track, g->p->step, g->validation ? "validate" : "rollout", g->n_done, g->n_total,
                           (double)st.sampled / (now - g->start));
            shown = now;
        }
        if (!more) break;
        if (stage_stop_signal()) FAIL(ERR_SIGNAL, "stopped by %s", stage_signal_name(stage_stop_signal()));
    }
    while (reward_pending(g->p->reward) > 0) {
        TRY(take_scores(g, 0.5));
        if (stage_stop_signal()) FAIL(ERR_SIGNAL, "stopped by %s", stage_signal_name(stage_stop_signal()));
    }
    return 0;
}

static int add_columns(struct gen *g, struct batch *b) {
    const int64_t n = g->n_total;
    int64_t *lens = xmalloc((size_t)n * sizeof *lens);
    struct batch_col *ids, *logp, *finish, *text, *status, *score, *extra, *index, *seconds, *preempted;
    int rc = 0;
    for (int64_t i = 0; i < n; i++) lens[i] = g->samples[i].n;
    TRYG(batch_add(b, "responses", BATCH_I32, lens, NULL, NULL), out);
    TRYG(batch_add(b, "rollout_log_probs", BATCH_F32, lens, NULL, NULL), out);
    TRYG(batch_add(b, "finish", BATCH_STR, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "text", BATCH_STR, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "reward_status", BATCH_STR, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "score", BATCH_F64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "reward_extra_info", BATCH_JSON, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "sample_index", BATCH_I64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "seconds", BATCH_F64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "num_preempted", BATCH_I64, NULL, NULL, NULL), out);
    ids = batch_find(b, "responses");
    logp = batch_find(b, "rollout_log_probs");
    finish = batch_find(b, "finish");
    text = batch_find(b, "text");
    status = batch_find(b, "reward_status");
    score = batch_find(b, "score");
    extra = batch_find(b, "reward_extra_info");
    index = batch_find(b, "sample_index");
    seconds = batch_find(b, "seconds");
    preempted = batch_find(b, "num_preempted");
    for (int64_t i = 0; i < n; i++) {
        struct gen_sample *s = &g->samples[i];
        memcpy(ids->i32 + ids->off[i], s->ids, (size_t)s->n * sizeof *s->ids);
        memcpy(logp->f32 + logp->off[i], s->logp, (size_t)s->n * sizeof *s->logp);
        free(finish->str[i]);
        finish->str[i] = xstrdup(roll_finish_name(s->finish));
        free(text->str[i]);
        text->str[i] = s->text;
        s->text = NULL;
        free(status->str[i]);
        status->str[i] = xstrdup(reward_status_name(s->reward.status));
        score->f64[i] = s->reward.status == REWARD_SCORE ? s->reward.score : NAN;
        json_decref(extra->json[i]);
        extra->json[i] = s->reward.extra ? json_incref(s->reward.extra) : json_object();
        index->i64[i] = i % g->n;
        seconds->f64[i] = s->seconds;
        preempted->i64[i] = s->n_preempted;
    }
out:
    free(lens);
    return rc;
}

static void report_errors(const struct gen *g) {
    int64_t count[REWARD_N_STATUS] = {0};
    const char *first[REWARD_N_STATUS] = {0};
    for (int64_t i = 0; i < g->n_total; i++) {
        const struct reward_result *r = &g->samples[i].reward;
        if (count[r->status]++ == 0) first[r->status] = r->message;
    }
    for (int s = 0; s < REWARD_N_STATUS; s++)
        if (s != REWARD_SCORE && count[s] > 0)
            log_warn("reward: %lld of %lld samples ended as %s (first: %s)", (long long)count[s], (long long)g->n_total,
                     reward_status_name((enum reward_status)s), first[s] ? first[s] : "no message");
}

int ppo_generate(struct ppo *p, const struct batch *prompts, const struct ppo_sampling *sp, uint64_t seed,
                 bool validation, struct batch *out) {
    int rc = 0;
    struct roll_engine *e = NULL;
    struct gen g = {.p = p, .n = sp->n, .n_total = prompts->n_rows * sp->n, .start = clock_now(), .validation = validation,
                    .data_source = batch_find(prompts, p->k.reward_fn_key), .reward_model = batch_find(prompts, "reward_model"),
                    .extra_info = batch_find(prompts, "extra_info")};
    struct batch_col *col;
    TRY(batch_get(prompts, "prompts", BATCH_I32, &col));
    g.prompts = col;
    g.samples = xcalloc((size_t)g.n_total, sizeof *g.samples);
    const struct roll_model model = roll_decoder_model(p->decoder);
    const struct roll_config cfg = {.max_rows = p->plan.max_rows_roll, .max_seqs = p->plan.max_seqs,
                                    .no_prefix_cache = !p->k.prefix_cache, .tok = p->tok, .done = on_sample, .done_arg = &g};
    TRYG(roll_create(&e, &model, &cfg), out); /* a new engine has an empty cache: the weights may have changed */
    TRYG(submit_all(&g, e, prompts, sp, seed), out);
    TRYG(run_engine(&g, e), out);
    report_errors(&g);
    TRYG(batch_repeat(out, prompts, sp->n, true), out);
    rc = add_columns(&g, out);
    if (rc < 0) batch_free(out);
    if (rc == 0 && !validation) {
        const struct roll_stats st = roll_stats(e);
        metrics_set(&p->metrics, (double)st.cached_rows, "rollout/prefix_cached_tokens");
        metrics_set(&p->metrics, (double)st.preempted, "rollout/num_preempted");
        metrics_set(&p->metrics, (double)st.pages_peak / (double)st.n_pages, "rollout/kv_pages_peak");
    }
out:
    roll_destroy(e);
    if (rc < 0) { /* answers still on their way belong to nobody */
        int64_t tag;
        struct reward_result r;
        while (reward_pending(p->reward) > 0 && reward_poll(p->reward, 1.0, &tag, &r) > 0) reward_result_free(&r);
    }
    for (int64_t i = 0; i < g.n_total; i++) {
        free(g.samples[i].ids);
        free(g.samples[i].logp);
        free(g.samples[i].text);
        if (g.samples[i].scored) reward_result_free(&g.samples[i].reward);
    }
    free(g.samples);
    return rc;
}

/* ---- errors of the reward (DESIGN invariant 8) ---- */

int ppo_reward_errors(struct ppo *p, struct batch *b) {
    struct batch_col *score, *uid;
    TRY(batch_get(b, "score", BATCH_F64, &score));
    TRY(batch_get(b, "uid", BATCH_I64, &uid));
    int64_t n_bad = 0, n_keep = 0;
    int64_t *keep = xmalloc((size_t)b->n_rows * sizeof *keep);
    for (int64_t i = 0; i < b->n_rows; i++) n_bad += isnan(score->f64[i]) != 0;
    metrics_set_i64(&p->metrics, n_bad, "reward/num_errors");
    for (int64_t i = 0; i < b->n_rows; i++) {
        bool drop = isnan(score->f64[i]);
        if (p->k.on_error == REWARD_DROP_GROUP) /* samples of a prompt are neighbours */
            for (int64_t j = 0; j < b->n_rows && !drop; j++) drop = uid->i64[j] == uid->i64[i] && isnan(score->f64[j]);
        if (!drop) keep[n_keep++] = i;
    }
    int rc = 0;
    if (n_bad > 0 && p->k.on_error == REWARD_STOP)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__, "reward: %lld of %lld samples have no score and reward.on_error=stop",
                     (long long)n_bad, (long long)b->n_rows);
    else if (n_keep == 0)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__, "reward: none of the %lld samples of this step has a score; see the warnings above",
                     (long long)b->n_rows);
    else if (n_keep < b->n_rows) {
        struct batch kept;
        rc = batch_select(&kept, b, keep, n_keep);
        if (rc == 0) {
            batch_free(b);
            *b = kept;
        }
    }
    free(keep);
    return rc;
}

int ppo_reward_weights(struct ppo *p, struct batch *b) {
    struct batch_col *score, *source;
    if (!json_object_size(p->k.source_weights)) return 0;
    TRY(batch_get(b, "score", BATCH_F64, &score));
    TRY(batch_get(b, p->k.reward_fn_key, BATCH_STR, &source));
    for (int64_t i = 0; i < b->n_rows; i++) {
        const json_t *w = json_object_get(p->k.source_weights, source->str[i]);
        if (w) score->f64[i] *= json_number_value(w);
    }
    return 0;
}
