/* rollout.c - the generation stage: prompts in, scored samples out.
 *
 * A sample is decoded and submitted to the scorers (reward.c) when it ends, while the rest is still being generated; those that end
 * together are decoded by all threads.
 * Invariant: what comes out depends on the weights, the data's order and the seeds
 * alone, not on the order in which samples end or scorers answer. */
#include "ppo/stages/generation.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "external_engine/external_engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int generation_decode(const struct generation *in, struct generation_sample *s) {
    buf_reset(&s->text);
    TRY(buf_adds(&s->text, "")); /* an empty text is one, too */
    free(s->token_bytes);
    s->token_bytes = xmalloc((size_t)s->n * sizeof *s->token_bytes);
    for (int64_t e = 0; s->user && e < s->user->n_before; e++) TRY(generation_decode(in, &s->user->before[e]));
    return tokenizer_decode_bytes(in->tok, s->ids, s->n, true, &s->text, s->token_bytes);
}

/* A sample of a group has ended. */
static void count_over(struct generation_state *g, int64_t i) {
    const int64_t k = i / g->per;
    g->samples[i].over = true;
    if (++g->groups[k].n_over == g->per) g->over[g->n_over++] = k;
}

/* Submits a sample that the step trains to the idle ranks. */
static void add_idle_passes(struct generation_state *g, int64_t i) {
    const struct generation_group *group = &g->groups[i / g->per];
    const struct batch_col *prompts = batch_find(group->prompts, "prompts");
    const struct generation_sample *s = &g->samples[i];
    if (i % g->per == g->n || s->n == 0 || s->user) return;
    const struct engine_sample sample = {
        .prompt = prompts->i32 + prompts->off[group->row], .n_prompt = batch_len(prompts, group->row), .ids = s->ids, .n = s->n};
    g->s->worker->ops->idle_add(g->s->worker, &sample, i);
}

static int on_sample(void *arg, const struct engine_sample *s) {
    struct generation_state *g = arg;
    const int64_t user = (int64_t)(intptr_t)s->user; /* 2 * group, + 1: the baseline */
    if (user_loop_is_call(user)) {
        agent_loop_drawn(g, user, s);
        return 0;
    }
    const int64_t i = user / 2 * g->per + (user % 2 ? g->n : s->index);
    struct generation_sample *o = &g->samples[i];
    if (s->n == o->n) return 0; /* interrupted before it drew a token */
    if (g->partial) o->versions = xrealloc(o->versions, (size_t)s->n * sizeof *o->versions);
    for (int64_t t = o->n; g->partial && t < s->n; t++) o->versions[t] = ppo_version(g->s);
    o->n = s->n;
    o->ids = xrealloc(o->ids, (size_t)s->n * sizeof *o->ids);
    o->logp = xrealloc(o->logp, (size_t)s->n * sizeof *o->logp);
    memcpy(o->ids, s->ids, (size_t)s->n * sizeof *o->ids);
    memcpy(o->logp, s->logp, (size_t)s->n * sizeof *o->logp);
    if (g->partial || (g->in->algorithm->sampling_log_probs && !g->validation)) {
        o->sampling_logp = xrealloc(o->sampling_logp, (size_t)s->n * sizeof *o->sampling_logp);
        memcpy(o->sampling_logp, s->logp_kept, (size_t)s->n * sizeof *o->sampling_logp);
    }
    o->finish = s->finish;
    o->seconds += s->seconds;
    o->ended = clock_wall();
    o->n_preempted += s->n_preempted;
    if (s->finish == ENGINE_INTERRUPTED) return 0;
    g->drafts.rate += s->n_drafted > 0 ? (double)s->n_accepted / (double)s->n_drafted : 0;
    g->drafts.length += s->n_verified > 0 ? 1 + (double)s->n_accepted / (double)s->n_verified : 0;
    g->drafts.n++;
    if (!o->agent) {
        generation_ended(g, i);
        return 0;
    }
    xgrow((void **)&g->turned, &g->cap_turned, g->n_turned + 1, sizeof *g->turned);
    g->turned[g->n_turned++] = i;
    return 0;
}

struct decoding {
    const struct generation_state *g;
    int *rc; /* of each */
};
static void decode_one(void *arg, int64_t part, int thread) {
    const struct decoding *d = arg;
    (void)thread;
    d->rc[part] = generation_decode(d->g->in, &d->g->samples[d->g->ended[part]]);
}

/* Decodes those of g->ended by all threads: samples of one length end together, and the device waits. */
static int decode_ended(struct generation_state *g) {
    struct decoding d = {g, xcalloc((size_t)g->n_ended + 1, sizeof *d.rc)};
    int rc = 0;
    pool_run(g->in->threads, g->n_ended, decode_one, &d);
    for (int64_t e = 0; e < g->n_ended && rc == 0; e++)
        if (d.rc[e] < 0) rc = generation_decode(g->in, &g->samples[g->ended[e]]); /* its message on this thread */
    free(d.rc);
    return rc;
}

/* Submits finished samples to the scorers. */
static int take_ended(struct generation_state *g) {
    if (g->n_ended == 0) return 0;
    TRY(decode_ended(g));
    for (int64_t e = 0; e < g->n_ended; e++) {
        const int64_t i = g->ended[e];
        if (g->partial) count_over(g, i);
        g->n_done++;
        g->tokens += g->samples[i].n;
        add_idle_passes(g, i);
        TRY(ppo_reward_submit(g, i));
    }
    g->n_ended = 0;
    return 0;
}

/* The result of pass `pass`: a number for each token of sample i. */
static int on_pass(void *arg, int pass, int64_t i, const float *x, int64_t n) {
    struct generation_state *g = arg;
    CHECK(n == g->samples[i].n);
    g->samples[i].precomputed[pass] = xmalloc((size_t)n * sizeof *x + 1);
    memcpy(g->samples[i].precomputed[pass], x, (size_t)n * sizeof *x);
    g->n_precomputed++;
    return 0;
}

/* Passes of this step over finished samples by weights that no update changes before them. */
static void choose_idle_passes(struct generation_state *g) {
    const struct worker *const w = g->s->worker;
    struct worker_generation *const x = &g->generation;
    if (g->validation || g->partial || g->filter || g->s->schedule != PPO_SYNC) return;
    if (agents_active(g->in->agents)) return; /* turns are requested while others end */
    if (w->has[VERLC_REF] && !w->collective[VERLC_REF])
        x->passes[x->n_passes++] = (struct worker_idle_pass){.role = VERLC_REF, .phase = "ref_log_prob"};
    if (w->has[VERLC_CRITIC] && !w->collective[VERLC_CRITIC] && g->in->critic_idle)
        x->passes[x->n_passes++] = (struct worker_idle_pass){.role = VERLC_CRITIC, .phase = "values", .value = true};
}

/* ---- submitting ---- */

/* What ends a turn of a conversation with tools. */
static void set_stop_ids(const struct generation_state *g, int64_t k, struct engine_request *q) {
    if (g->samples[k * g->per].agent) q->stop_ids = agents_stop_ids(g->in->agents, &q->n_stop_ids);
}

/* Sample i of a group that is partly generated. */
static int submit_part(struct generation_state *g, int64_t i) {
    const struct generation_sample *o = &g->samples[i];
    struct engine_request q;
    if (o->over || (o->pause_at != 0 && o->pause_at <= o->n)) return 0;
    if (o->agent) return agent_loop_draw(g, i);
    TRY(generation_request(g, i, &q));
    set_stop_ids(g, i / g->per, &q);
    q.begun = o->ids;
    q.begun_logp = o->logp;
    q.begun_logp_kept = o->sampling_logp;
    q.n_begun = o->n;
    q.pause_at = o->pause_at;
    return g->s->worker->ops->generate_add(g->s->worker, &q);
}

static int submit_group(struct generation_state *g, int64_t k) {
    struct engine_request q;
    if (g->samples[k * g->per].user) return 0; /* its loop asks for what it needs */
    TRY(generation_group_request(g, k, &q));
    set_stop_ids(g, k, &q);
    bool parts = false;
    for (int64_t i = k * g->per; i < (k + 1) * g->per; i++) parts |= g->samples[i].n > 0 || g->samples[i].pause_at != 0;
    for (int64_t i = k * g->per; parts && i < (k + 1) * g->per; i++) TRY(submit_part(g, i));
    if (parts) return 0;
    TRY(g->s->worker->ops->generate_add(g->s->worker, &q));
    if (!g->baseline) return 0;
    q.n = 1;
    generation_for_baseline(&q);
    return g->s->worker->ops->generate_add(g->s->worker, &q);
}

int generation_add_group(struct generation_state *g, const struct generation_group *group,
                         const struct generation_sample *samples) {
    const int64_t had = g->n_groups * g->per;
    xgrow((void **)&g->groups, &g->cap_groups, g->n_groups + 1, sizeof *g->groups);
    xgrow((void **)&g->samples, &g->cap_samples, had + g->per, sizeof *g->samples);
    memset(g->samples + had, 0, (size_t)g->per * sizeof *g->samples);
    if (samples) memcpy(g->samples + had, samples, (size_t)g->per * sizeof *samples);
    g->groups[g->n_groups] = *group;
    g->groups[g->n_groups].n_over = 0;
    if (g->partial) g->over = xrealloc(g->over, (size_t)(g->n_groups + 1) * sizeof *g->over);
    for (int64_t i = had; i < had + g->per; i++) {
        g->samples[i].earlier = g->samples[i].over;
        if (g->samples[i].over) count_over(g, i);
    }
    g->n_groups++;
    for (int64_t i = had; i < had + g->per; i++)
        if (agents_active(g->in->agents)) TRY(agent_loop_begin(g, i));
    return submit_group(g, g->n_groups - 1);
}

/* ---- prompts ---- */

static int next_prompts(const struct stage *s, const struct generation *in, struct batch *b) {
    const int64_t *rows;
    int64_t n;
    int got = data_sampler_next(&s->run->sampler, &rows, &n);
    if (got == 0) got = data_sampler_next(&s->run->sampler, &rows, &n); /* a new epoch */
    TRY(got);
    CHECK(got == 1);
    return rl_dataset_batch(in->data, rows, n, b);
}

/* The next prompt of the training data joins the running engine. */
int generation_add_next_prompt(struct generation_state *g) {
    struct generation_group group = {0};
    struct batch *b = xcalloc(1, sizeof *b);
    group.data_row = data_sampler_take(&g->s->run->sampler);
    group.seed = generation_epoch_seed(g->s);
    const int rc = rl_dataset_batch(g->in->data, &group.data_row, 1, b);
    if (rc < 0) {
        free(b);
        return rc;
    }
    group.prompts = group.owned = b;
    return generation_add_group(g, &group, NULL);
}

/* ---- the run ---- */

int generation_take_score(struct generation_state *g, int64_t tag, const struct reward_result *r) {
    const int64_t k = tag / g->per;
    g->samples[tag].reward = *r;
    g->samples[tag].scored = true;
    g->samples[tag].scoring = clock_now() - g->samples[tag].requested;
    phase_beat(g->s->run->stages);
    return ++g->groups[k].n_scored == g->per && g->filter ? dynamic_sampling_close(g, k) : 0;
}

static void show_progress(struct generation_state *g, int64_t sampled) {
    const double now = clock_now();
    if (g->overlapped || !g->s->run->track || now - g->shown < 0.2) return;
    track_progress(g->s->run->track, g->s->run->step, g->validation ? "validate" : "rollout", g->n_done, g->n_groups * g->per,
                   (double)sampled / (now - g->start));
    g->shown = now;
}

int generation_interrupt(struct generation_state *g) {
    g->interrupted = true;
    TRY(g->s->worker->ops->generate_interrupt(g->s->worker));
    return take_ended(g);
}

int generation_step(struct generation_state *g, bool wait) {
    struct worker *const w = g->s->worker;
    const double before = clock_now();
    const int drawn = w->ops->generate_step(w, wait && !(g->idle && agent_loop_waits(g)));
    TRY(drawn);
    if (!g->idle || drawn) g->drawing += clock_now() - before;
    g->idle = drawn == 0;
    TRY(agent_loop_step(g, wait && g->idle));
    TRY(take_ended(g));
    const struct engine_stats st = w->ops->generate_stats(w);
    const bool more = drawn || st.waiting + st.running > 0 || agent_loop_waits(g);
    if ((drawn || agent_loop_waits(g)) && g->enough > 0 && g->n_over >= g->enough && !g->interrupted) TRY(generation_interrupt(g));
    TRY(ppo_reward_take(g, more, wait));      /* may add further prompts */
    if (drawn) phase_beat(g->s->run->stages); /* waiting for a scorer alone is no progress */
    const struct engine_stats now = w->ops->generate_stats(w);
    show_progress(g, now.sampled);
    if (!more && now.waiting + now.running == 0 && ppo_reward_pending(g) == 0) return 0;
    if (!g->overlapped) TRY(phase_check_stop());
    return 1;
}

/* ---- the batch ---- */

/* What the rows of a batch are made of: the samples of the kept groups, and before each what its episode gave earlier. */
struct rows {
    int64_t n, cap, n_samples;
    struct row {
        const struct generation_sample *from;
        int64_t k, index, session; /* kept group; sample of it; episode, counted over all */
    } * row;
};

static void add_row(struct rows *r, const struct generation_sample *from, struct row row) {
    xgrow((void **)&r->row, &r->cap, r->n + 1, sizeof *r->row);
    row.from = from;
    r->row[r->n++] = row;
}

static void list_rows(const struct generation_state *g, const int64_t *kept, int64_t n, struct rows *r) {
    *r = (struct rows){.n_samples = n * g->n};
    for (int64_t i = 0; i < r->n_samples; i++) {
        const struct row row = {.k = i / g->n, .index = i % g->n, .session = i};
        const struct generation_sample *s = &g->samples[kept[row.k] * g->per + row.index];
        for (int64_t e = 0; s->user && e < s->user->n_before; e++) add_row(r, &s->user->before[e], row);
        add_row(r, s, row);
    }
}

/* What idle ranks have computed of the samples; rows without are empty. */
static int add_precomputed(struct generation_state *g, const struct rows *r, struct batch *b) {
    int64_t *lens = xcalloc((size_t)b->n_rows + 1, sizeof *lens);
    int rc = 0;
    for (int p = 0; p < g->generation.n_passes && g->n_precomputed > 0 && rc == 0; p++) {
        struct batch_col *c;
        for (int64_t i = 0; i < b->n_rows; i++) lens[i] = r->row[i].from->precomputed[p] ? r->row[i].from->n : 0;
        rc = batch_add(b, g->generation.passes[p].role == VERLC_REF ? PPO_REF_PRECOMPUTED : PPO_VALUES_PRECOMPUTED, BATCH_F32, lens,
                       NULL, &c);
        for (int64_t i = 0; i < b->n_rows && rc == 0; i++)
            if (lens[i]) memcpy(c->f32 + c->off[i], r->row[i].from->precomputed[p], (size_t)lens[i] * sizeof *c->f32);
    }
    free(lens);
    return rc;
}

static int add_episodes(const struct rows *r, struct batch *b) {
    const struct generation_sample **at = xmalloc((size_t)b->n_rows * sizeof *at + 1);
    for (int64_t i = 0; i < b->n_rows; i++) at[i] = r->row[i].from;
    const int rc = agent_loop_columns(at, b);
    free(at);
    return rc;
}

/* Which rows are of one episode, where one gave several; a row's record says which of them it is. */
static int add_sessions(const struct rows *r, struct batch *b) {
    const struct batch_col *episode = batch_find(b, BATCH_EPISODE);
    struct batch_col *c;
    if (r->n == r->n_samples) return 0;
    TRY(batch_add(b, BATCH_SESSION, BATCH_I64, NULL, NULL, &c));
    for (int64_t i = 0, first = 0; i < r->n; i++) {
        c->i64[i] = r->row[i].session;
        if (r->row[i].session != r->row[first].session) first = i;
        const int64_t n = r->row[i].from->user ? r->row[i].from->user->n_before + 1 : 1;
        for (int64_t k = first; n > 1 && k <= i; k++) {
            json_object_set_new(episode->json[k], "output", json_integer(k - first));
            json_object_set_new(episode->json[k], "outputs", json_integer(n));
        }
    }
    return 0;
}

/* A loop of the user may begin with another prompt than the row's. */
static int set_prompts(const struct rows *r, struct batch *b) {
    const struct batch_col *rows = batch_find(b, "prompts");
    struct text_ids all = {0};
    int64_t *lens = xmalloc((size_t)b->n_rows * sizeof *lens + 1);
    bool other = false;
    for (int64_t i = 0; i < b->n_rows; i++) {
        const struct user_episode *u = r->row[i].from->user;
        const bool own = u && u->out.n_prompt > 0;
        lens[i] = own ? u->out.n_prompt : batch_len(rows, i);
        text_ids_add(&all, own ? u->out.prompt : rows->i32 + rows->off[i], lens[i]);
        other |= own;
    }
    if (other) batch_drop(b, "prompts");
    const int rc = other ? batch_add(b, "prompts", BATCH_I32, lens, all.p, NULL) : 0;
    text_ids_free(&all);
    free(lens);
    return rc;
}

/* Columns of the rows' samples; b has their prompts. */
static int add_columns(struct generation_state *g, const int64_t *kept, const struct rows *r, struct batch *b) {
    const int64_t n = b->n_rows;
    int64_t *lens = xmalloc((size_t)n * sizeof *lens);
    struct batch_col *ids, *logp, *sampled, *bytes, *finish, *text, *status, *message, *score, *extra, *index, *seconds, *scoring,
        *ended, *preempted, *group, *versions;
    int rc = 0;
    for (int64_t i = 0; i < n; i++) lens[i] = r->row[i].from->n;
    TRYG(batch_add(b, "responses", BATCH_I32, lens, NULL, NULL), out);
    TRYG(batch_add(b, "rollout_log_probs", BATCH_F32, lens, NULL, NULL), out);
    TRYG(batch_add(b, "param_versions", BATCH_I32, lens, NULL, NULL), out);
    const bool sampling = g->in->algorithm->sampling_log_probs && !g->validation;
    if (sampling) TRYG(batch_add(b, "sampling_log_probs", BATCH_F32, lens, NULL, NULL), out);
    TRYG(batch_add(b, "token_bytes", BATCH_I32, lens, NULL, NULL), out);
    TRYG(batch_add(b, "finish", BATCH_STR, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "text", BATCH_STR, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "reward_status", BATCH_STR, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "reward_message", BATCH_STR, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "score", BATCH_F64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "reward_extra_info", BATCH_JSON, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "sample_index", BATCH_I64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "group", BATCH_I64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "seconds", BATCH_F64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "scoring_seconds", BATCH_F64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "ended", BATCH_F64, NULL, NULL, NULL), out);
    TRYG(batch_add(b, "num_preempted", BATCH_I64, NULL, NULL, NULL), out);
    ids = batch_find(b, "responses");
    logp = batch_find(b, "rollout_log_probs");
    versions = batch_find(b, "param_versions");
    sampled = batch_find(b, "sampling_log_probs");
    finish = batch_find(b, "finish");
    text = batch_find(b, "text");
    bytes = batch_find(b, "token_bytes");
    status = batch_find(b, "reward_status");
    message = batch_find(b, "reward_message");
    score = batch_find(b, "score");
    extra = batch_find(b, "reward_extra_info");
    index = batch_find(b, "sample_index");
    group = batch_find(b, "group");
    seconds = batch_find(b, "seconds");
    scoring = batch_find(b, "scoring_seconds");
    ended = batch_find(b, "ended");
    preempted = batch_find(b, "num_preempted");
    for (int64_t i = 0; i < n; i++) {
        const struct generation_sample *s = r->row[i].from;
        CHECK(s->scored);
        memcpy(ids->i32 + ids->off[i], s->ids, (size_t)s->n * sizeof *s->ids);
        memcpy(logp->f32 + logp->off[i], s->logp, (size_t)s->n * sizeof *s->logp);
        if (sampled) memcpy(sampled->f32 + sampled->off[i], s->sampling_logp, (size_t)s->n * sizeof *s->sampling_logp);
        for (int64_t t = 0; t < s->n; t++) versions->i32[versions->off[i] + t] = s->versions ? s->versions[t] : ppo_version(g->s);
        for (int64_t t = 0; t < s->n; t++) bytes->i32[bytes->off[i] + t] = s->token_bytes[t];
        const char *finish_name = engine_finish_name(s->finish), *status_name = reward_status_name(s->reward.status),
                   *why = s->reward.message ? s->reward.message : "";
        batch_set_str(finish, i, finish_name, strlen(finish_name));
        batch_set_str(text, i, s->text.p, s->text.n);
        batch_set_str(status, i, status_name, strlen(status_name));
        batch_set_str(message, i, why, strlen(why));
        score->f64[i] = s->reward.status == REWARD_SCORE ? s->reward.score : NAN;
        json_decref(extra->json[i]);
        extra->json[i] = s->reward.extra ? json_incref(s->reward.extra) : json_object();
        index->i64[i] = r->row[i].index;
        group->i64[i] = r->row[i].k;
        seconds->f64[i] = s->seconds;
        scoring->f64[i] = s->scoring;
        ended->f64[i] = s->ended;
        preempted->i64[i] = s->n_preempted;
    }
    TRYG(add_precomputed(g, r, b), out);
    TRYG(set_prompts(r, b), out);
    if (agents_active(g->in->agents)) TRYG(add_episodes(r, b), out);
    TRYG(add_sessions(r, b), out);
    if (!g->baseline) goto out;
    struct batch_col *baseline;
    TRYG(batch_add(b, "reward_baselines", BATCH_F64, NULL, NULL, &baseline), out);
    for (int64_t i = 0; i < n; i++) {
        const struct reward_result *x = &g->samples[kept[r->row[i].k] * g->per + g->n].reward;
        baseline->f64[i] = x->status == REWARD_SCORE ? x->score : NAN;
    }
out:
    free(lens);
    return rc;
}

static void rollout_metrics(const struct generation_state *g) {
    struct metrics *m = &g->s->run->metrics;
    const struct engine_stats st = g->s->worker->ops->generate_stats(g->s->worker);
    metrics_set(m, (double)st.cached_rows, "rollout/prefix_cached_tokens");
    metrics_set(m, (double)st.preempted, "rollout/num_preempted");
    if (g->generation.n_passes > 0) metrics_set_i64(m, g->n_precomputed, "perf/idle_rank_passes");
    if (g->s->worker->n_ranks > 1) metrics_set_i64(m, g->s->worker->tensor_parallel, "perf/tensor_parallel");
    if (agents_active(g->in->agents)) metrics_set(m, g->drawing / (clock_now() - g->start), "perf/engine_busy");
    if (g->n_again > 0) metrics_set(m, (double)g->n_again_differ / (double)g->n_again, "agent_loop/rendered_again_differ/mean");
    if (st.n_kv_blocks > 0) metrics_set(m, (double)st.kv_blocks_peak / (double)st.n_kv_blocks, "rollout/kv_blocks_peak");
    if (g->drafts.length > 0) {
        metrics_set(m, g->drafts.rate / (double)g->drafts.n, "rollout/spec_accept_rate");
        metrics_set(m, g->drafts.length / (double)g->drafts.n, "rollout/spec_accept_length");
    }
    if (g->s->worker->external) external_engine_metrics(g->s->worker->external, m);
    if (!g->filter) return;
    const int64_t size = g->in->algorithm->filter.gen_batch_size;
    metrics_set_i64(m, (g->n_groups + size - 1) / size, "train/num_gen_batches");
    metrics_set_i64(m, g->n_useless, "training/filter_groups/evicted_samples"); /* prompts: verl's name */
}

/* The samples of n kept groups, whose prompts are the rows of `prompts`. */
static int make_batch(struct generation_state *g, const int64_t *kept, int64_t n, const struct batch *prompts, struct batch *out) {
    struct rows r;
    list_rows(g, kept, n, &r);
    int64_t *of = xmalloc((size_t)r.n * sizeof *of + 1);
    for (int64_t i = 0; i < r.n; i++) of[i] = r.row[i].k;
    int rc = r.n == r.n_samples ? batch_repeat(out, prompts, g->n) : batch_select(out, prompts, of, r.n);
    if (rc == 0) {
        rc = add_columns(g, kept, &r, out);
        if (rc < 0) batch_free(out);
    }
    free(of);
    free(r.row);
    return rc;
}

int generation_collect(struct generation_state *g, const int64_t *kept, int64_t n, struct batch *out) {
    int64_t *rows = xmalloc((size_t)n * sizeof *rows);
    struct batch own = {0};
    int rc = 0;
    for (int64_t k = 0; k < n; k++) rows[k] = g->groups[kept[k]].data_row;
    TRYG(rl_dataset_batch(g->in->data, rows, n, &own), out);
    rc = make_batch(g, kept, n, &own, out);
out:
    batch_free(&own);
    free(rows);
    return rc;
}

/* The kept groups, in the order of the data, as a batch. */
static int collect(struct generation_state *g, const struct batch *prompts, struct batch *out) {
    int64_t *kept = xmalloc((size_t)g->n_groups * sizeof *kept), n = 0;
    for (int64_t k = 0; k < g->n_groups; k++)
        if (!g->groups[k].useless) kept[n++] = k;
    const int rc = prompts ? make_batch(g, kept, n, prompts, out) : generation_collect(g, kept, n, out);
    free(kept);
    return rc;
}

/* Ranks get other calls now, a judge none. */
static void end_generation(const struct stage *s) {
    s->worker->ops->generate_end(s->worker);
    if (s->scorer) s->scorer->ops->rest(s->scorer);
}

static void gen_free(struct generation_state *g) {
    end_generation(g->s);
    agent_loop_end(g);
    for (int64_t i = 0; i < g->n_groups * g->per; i++) {
        generation_drop_sample(&g->samples[i]);
        if (g->samples[i].scored) reward_result_free(&g->samples[i].reward);
    }
    for (int64_t k = 0; k < g->n_groups; k++) {
        if (!g->groups[k].owned) continue;
        batch_free(g->groups[k].owned);
        free(g->groups[k].owned);
    }
    free(g->samples);
    free(g->groups);
    free(g->over);
    free(g->ended);
}

int generation_begin(struct generation_state *g) {
    struct worker *const w = g->s->worker;
    g->generation = (struct worker_generation){.done = on_sample, .arg = g, .pass_done = on_pass};
    choose_idle_passes(g);
    g->n = g->sp->n;
    g->baseline = !g->validation && (g->in->algorithm->adv->needs & ALGO_NEEDS_BASELINES);
    g->per = g->n + (g->baseline ? 1 : 0);
    g->start = clock_now();
    TRY(w->ops->send_weights(w));
    if (!g->validation) metrics_set(&g->s->run->metrics, clock_now() - g->start, "timing_s/update_weights");
    return w->ops->generate_begin(w, &g->generation);
}

int generation_run(struct generation_state *g) {
    int more;
    while ((more = generation_step(g, true)) > 0) {
    }
    TRY(more);
    ppo_reward_report_errors(g);
    if (!g->validation) rollout_metrics(g);
    return 0;
}

void generation_end(struct generation_state *g, int rc) {
    if (rc < 0) ppo_reward_drop(g); /* pending answers are dropped */
    gen_free(g);
}

/* prompts NULL: from the training data, filtered. */
static int begin(struct generation_state *g, const struct batch *prompts, uint64_t seed) {
    TRY(generation_begin(g));
    for (int64_t r = 0; prompts && r < prompts->n_rows; r++)
        TRY(generation_add_group(g, &(struct generation_group){.prompts = prompts, .row = r, .data_row = -1, .seed = seed}, NULL));
    for (int64_t r = 0; !prompts && r < g->in->rows->train_batch_size; r++) TRY(generation_add_next_prompt(g));
    return 0;
}

int ppo_generate(const struct stage *s, const struct generation *in, const struct ppo_generate_args *a, struct batch *out) {
    struct generation_state g = {.s = s, .in = in, .sp = a->sampling, .validation = a->validation};
    int rc = begin(&g, a->prompts, a->seed);
    if (rc == 0) rc = generation_run(&g);
    if (rc == 0) rc = collect(&g, a->prompts, out);
    generation_end(&g, rc);
    return rc;
}

/* ---- a rollout that is overlapped with other stages ---- */

struct rollout_async {
    struct generation_state g;
    struct batch prompts; /* n_cols 0: taken one by one (filter_groups) */
    bool over;
    struct batch samples; /* with router replay of the rollout: what wait gives, with its choices of experts; else n_cols 0 */
};

static int step_overlapped(void *arg) {
    struct rollout_async *a = arg;
    if (a->over || phase_stop_due()) return 0;
    const int more = generation_step(&a->g, false);
    a->over = more <= 0;
    return more < 0 ? more : 0;
}

static const struct batch *prompts_of(const struct rollout_async *a) { return a->g.filter ? NULL : &a->prompts; }

int ppo_rollout_start(const struct stage *s, const struct generation *in, struct rollout_async **out) {
    struct rollout_async *a = xcalloc(1, sizeof *a);
    a->g = (struct generation_state){.s = s,
                                     .in = in,
                                     .sp = &in->rollout->train,
                                     .filter = in->algorithm->filter.enable,
                                     .overlapped = s->worker->disaggregated};
    int rc = a->g.filter ? 0 : next_prompts(s, in, &a->prompts);
    if (rc < 0) {
        free(a);
        return rc;
    }
    rc = begin(&a->g, prompts_of(a), generation_epoch_seed(s));
    if (rc == 0 && a->g.overlapped) s->worker->overlapped = (struct worker_overlapped){a, step_overlapped};
    else if (rc == 0) rc = generation_run(&a->g);
    if (rc == 0 && !a->g.overlapped) end_generation(s);
    if (rc == 0 && in->algorithm->replay_rollout) {
        CHECK(!a->g.overlapped); /* ppo_worker_plan */
        rc = collect(&a->g, prompts_of(a), &a->samples);
        if (rc == 0) rc = ppo_record_routes(s, in->algorithm->replay_words, &a->samples);
    }
    if (rc < 0) ppo_rollout_drop(a);
    else *out = a;
    return rc;
}

/* Frees it. */
static void rollout_async_free(struct rollout_async *a) {
    a->g.s->worker->overlapped.step = NULL;
    batch_free(&a->prompts);
    batch_free(&a->samples);
    free(a);
}

int ppo_rollout_wait(struct rollout_async *a, struct batch *out) {
    const bool overlapped = a->g.overlapped;
    int rc = 0;
    a->g.s->worker->overlapped.step = NULL;
    a->g.overlapped = false;
    if (overlapped) rc = generation_run(&a->g);
    if (rc == 0 && a->samples.n_cols > 0) {
        *out = a->samples;
        a->samples = (struct batch){0};
    } else if (rc == 0) {
        rc = collect(&a->g, prompts_of(a), out);
    }
    generation_end(&a->g, rc);
    rollout_async_free(a);
    return rc;
}

void ppo_rollout_drop(struct rollout_async *a) {
    struct err_saved why;
    if (!a) return;
    err_save(&why);
    generation_end(&a->g, ERR_SIGNAL);
    rollout_async_free(a);
    err_restore(&why);
}

int ppo_rollout(const struct stage *s, const struct generation *in, struct batch *out) {
    struct rollout_async *a;
    TRY(ppo_rollout_start(s, in, &a));
    return ppo_rollout_wait(a, out);
}
