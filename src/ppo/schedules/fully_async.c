/* fully_async.c - fully asynchronous training (verl.experimental.fully_async_policy), with partial rollouts.
 *
 * A step is what lies between two exchanges of weights: several updates, each of require_batches mini-batches. It begins more
 * prompts than it needs (staleness_threshold). When as many as it needs have ended, generation is interrupted; what is not trained
 * now is held for a later step. An interrupted sample continues in the next step under the new weights: its KV cache is recomputed
 * from its tokens so far, as verl's servers do after an abort. Each token keeps its log-prob and its version.
 *
 * Disaggregated, on ranks of its own, generation is overlapped with the updates until the weights are exchanged; colocated, they
 * take turns. Timing decides which version draws which token. run.db records it, and async_training.replay repeats the record of
 * either mode.
 * Invariant: a token's rollout log-prob is that of the weights which drew it; a checkpoint has all samples that are held. */
#include "ppo/controller.h"
#include "ppo/stages/generation.h"
#include "ppo/stages/program_journal.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/size.h"
#include "track/async_schedule.h"

#include <stdlib.h>
#include <string.h>

/* A prompt that was begun and is not trained yet. */
struct held {
    int64_t number, data_row; /* its place in the order of the data, its row */
    uint64_t seed;
    struct generation_sample *samples; /* (per), owned */
};

struct fully_async {
    const struct ppo_async_config *k;
    int64_t batch;     /* prompts of a step */
    int64_t n, per;    /* samples of a prompt without and with the baseline */
    struct held *held; /* those that have ended, in that order, then the others by their number */
    int64_t n_held, cap_held;
    int64_t next;                      /* number of the next prompt */
    int64_t generated, dropped, stale; /* prompts that have ended; dropped as too old; samples trained by later weights */
    int64_t at_exchange;               /* held when the step began */
    struct track_schedule record;      /* to replay; n 0: none */
    bool started;
    /* the generation of a step */
    struct generation_state g;
    int64_t *kept;         /* groups of g that the step trains */
    bool generating, over; /* it is open; all of it has ended */
    bool disaggregated;    /* on ranks of its own, overlapped with training */
};

/* ---- the number of steps ---- */

int fully_async_steps(const struct ppo_async_config *a, const struct trainer_config *t, int64_t batch, int64_t n_rows,
                      int64_t *steps) {
    int64_t prompts = size_mul(n_rows, t->total_epochs);
    *steps = t->total_training_steps;
    if (*steps > 0) return 0;
    if (a->total_prompts > 0 && a->total_prompts < prompts) prompts = a->total_prompts;
    *steps = prompts / batch;
    if (*steps < 1)
        FAIL(ERR_INVAL,
             "rollout.total_rollout_steps=%lld and trainer.total_epochs=%lld of %lld rows give %lld prompts, fewer than the %lld "
             "of a "
             "step (async_training.trigger_parameter_sync_step x require_batches x actor_rollout_ref.actor.ppo_mini_batch_size)",
             (long long)a->total_prompts, (long long)t->total_epochs, (long long)n_rows, (long long)prompts, (long long)batch);
    return 0;
}

/* ---- prompts that are held ---- */

static void held_free(const struct fully_async *a, struct held *h) {
    for (int64_t i = 0; h->samples && i < a->per; i++) {
        generation_drop_sample(&h->samples[i]);
        if (h->samples[i].scored) reward_result_free(&h->samples[i].reward);
    }
    free(h->samples);
    h->samples = NULL;
}

static struct held *hold(struct fully_async *a) {
    xgrow((void **)&a->held, &a->cap_held, a->n_held + 1, sizeof *a->held);
    a->held[a->n_held] = (struct held){.samples = xcalloc((size_t)a->per, sizeof(struct generation_sample))};
    return &a->held[a->n_held++];
}

/* A prompt that does not go on. */
static void drop(const struct fully_async *a, struct held *h, const struct generation *in) {
    for (int64_t i = 0; i < a->per; i++) {
        char *name = generation_open_name(h->number, i);
        agent_loop_forget(in->agents, &h->samples[i], name);
        free(name);
    }
    held_free(a, h);
}

/* Whether a token of it, or of what its episode gave before it, was drawn before that version. */
static bool has_older(const struct generation_sample *s, int64_t version) {
    bool old = s->user && s->user->held && s->user->oldest >= 0 && s->user->oldest < version;
    for (int64_t t = 0; t < s->n && s->versions; t++) old |= s->versions[t] < version;
    for (int64_t e = 0; s->user && e < s->user->n_before; e++) old |= has_older(&s->user->before[e], version);
    return old;
}

/* Drops prompts with a token that would be older than async_training.max_version_lag at the next updates. */
static void drop_old(struct fully_async *a, int32_t version, const struct generation *in) {
    int64_t n = 0;
    for (int64_t k = 0; k < a->n_held; k++) {
        struct held *h = &a->held[k];
        bool old = false;
        for (int64_t i = 0; i < a->per; i++) old |= has_older(&h->samples[i], version - a->k->max_lag);
        if (!old || a->k->max_lag < 0) {
            a->held[n++] = *h;
            continue;
        }
        a->dropped++;
        drop(a, h, in);
    }
    a->n_held = n;
}

/* The next prompt of the training data. */
static void begin(struct fully_async *a, const struct stage *s) {
    struct held *h = hold(a);
    h->number = a->next++;
    h->data_row = data_sampler_take(&s->run->sampler);
    h->seed = generation_epoch_seed(s);
}

/* ---- replay of a record ---- */

static const struct track_schedule_row *recorded(const struct fully_async *a, int64_t number, int64_t sample) {
    return track_schedule_find(&a->record, number, sample);
}

/* Tokens of versions up to this one. */
static int64_t tokens_by(const struct track_schedule_row *r, int32_t version) {
    int64_t n = 0;
    for (int64_t i = 0; i < r->n_runs; i++) n += r->runs[2 * i + 1] <= version ? r->runs[2 * i] : 0;
    return n;
}

/* Begins the prompts that the record began by this version, and sets how far each sample goes in this step. */
static int follow(struct fully_async *a, const struct stage *s, const struct generation *in) {
    const int32_t version = ppo_version(s);
    int64_t last = -1, n = 0, steps = 0;
    for (int64_t i = 0; i < a->record.n; i++) {
        const struct track_schedule_row *r = &a->record.rows[i];
        if (r->number > last && (tokens_by(r, version) > 0 || (r->n_runs == 0 && r->step <= s->run->step))) last = r->number;
        steps = r->step > steps ? r->step : steps;
    }
    if (s->run->step > steps)
        FAIL(ERR_INPUT, "async_training.replay=%s: the record ends with step %lld; trainer.total_training_steps=%lld is more",
             a->k->replay, (long long)steps, (long long)s->run->total_steps);
    while (a->next <= last) begin(a, s);
    for (int64_t k = 0; k < a->n_held; k++) { /* what was never trained is not generated either */
        struct held *h = &a->held[k];
        bool has = recorded(a, h->number, 0) != NULL;
        for (int64_t i = 0; has && i < a->per; i++) {
            const struct track_schedule_row *r = recorded(a, h->number, i);
            const int64_t to = r ? tokens_by(r, version) : 0;
            h->samples[i].pause_at = r && to == tokens_by(r, INT32_MAX) ? 0 : to > 0 ? to : -1; /* without a token: 0 */
        }
        if (has) a->held[n++] = *h;
        else drop(a, h, in);
    }
    a->n_held = n;
    return 0;
}

static int by_place(const void *x, const void *y) {
    const int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
    return a < b ? -1 : a > b;
}

/* The groups that the record trains in this step, in their order. */
static int chosen_by_record(const struct fully_async *a, const struct generation_state *g, int64_t step, int64_t *kept) {
    int64_t(*at)[2] = xmalloc((size_t)(g->n_groups + 1) * sizeof *at), n = 0;
    bool same = true;
    for (int64_t k = 0; k < g->n_groups; k++) {
        const struct track_schedule_row *first = recorded(a, g->groups[k].number, 0);
        if (first->step != step) continue;
        for (int64_t i = 0; i < a->per; i++) {
            const struct track_schedule_row *r = recorded(a, g->groups[k].number, i);
            same &= g->samples[k * a->per + i].over && r && g->samples[k * a->per + i].n == tokens_by(r, INT32_MAX);
        }
        at[n][0] = first->place;
        at[n++][1] = k;
    }
    qsort(at, (size_t)n, sizeof *at, by_place);
    for (int64_t i = 0; i < n && n <= a->batch; i++) kept[i] = at[i][1];
    free(at);
    if (!same || n != a->batch)
        FAIL(ERR_INPUT,
             "async_training.replay=%s: step %lld does not come out as recorded; model, data, keys and instruction set must be "
             "those of "
             "the record",
             a->k->replay, (long long)step);
    return 0;
}

/* ---- generation ---- */

/* Submits everything that is held to the engine. */
static int submit(struct fully_async *a, struct generation_state *g) {
    for (int64_t k = 0; k < a->n_held; k++) {
        struct held *h = &a->held[k];
        struct generation_group group = {.data_row = h->data_row, .seed = h->seed, .number = h->number};
        struct batch *b = xcalloc(1, sizeof *b);
        const int rc = rl_dataset_batch(g->in->data, &h->data_row, 1, b);
        if (rc < 0) free(b);
        TRY(rc);
        group.prompts = group.owned = b;
        struct generation_sample *samples = h->samples;
        h->samples = NULL;
        const int added = generation_add_group(g, &group, samples);
        free(samples);
        TRY(added);
    }
    return 0;
}

/* Group k of g stays held. */
static void hold_on(struct fully_async *a, struct generation_state *g, int64_t k) {
    const size_t bytes = (size_t)a->per * sizeof *g->samples;
    struct held *h = hold(a);
    h->number = g->groups[k].number;
    h->data_row = g->groups[k].data_row;
    h->seed = g->groups[k].seed;
    memcpy(h->samples, g->samples + k * a->per, bytes);
    memset(g->samples + k * a->per, 0, bytes);
}

/* Holds what is not chosen: those that have ended, in that order, then the others. */
static void hold_rest(struct fully_async *a, struct generation_state *g, const int64_t *kept, int64_t n) {
    bool *chosen = xcalloc((size_t)g->n_groups + 1, sizeof *chosen);
    for (int64_t i = 0; i < n; i++) chosen[kept[i]] = true;
    for (int64_t i = 0; i < g->n_over; i++)
        if (!chosen[g->over[i]]) hold_on(a, g, g->over[i]);
    for (int64_t k = 0; k < g->n_groups; k++)
        if (!chosen[k] && g->groups[k].n_over < g->per) hold_on(a, g, k);
    free(chosen);
}

/* For the record: which prompt of the data a row is of, and its prompt's place in the step. */
static int add_places(const struct generation_state *g, const int64_t *kept, struct batch *b) {
    struct batch_col *number, *place, *group;
    TRY(batch_add(b, "prompt_number", BATCH_I64, NULL, NULL, NULL));
    TRY(batch_add(b, "place", BATCH_I64, NULL, NULL, &place));
    number = batch_find(b, "prompt_number");
    group = batch_find(b, "group");
    for (int64_t i = 0; i < b->n_rows; i++) {
        number->i64[i] = g->groups[kept[group->i64[i]]].number;
        place->i64[i] = group->i64[i];
    }
    return 0;
}

/* How many prompts of g have ended in this generation. */
static int64_t ended_now(const struct generation_state *g) {
    int64_t n = 0;
    for (int64_t k = 0; k < g->n_groups; k++) {
        bool earlier = true;
        for (int64_t i = k * g->per; i < (k + 1) * g->per; i++) earlier &= g->samples[i].earlier;
        n += g->groups[k].n_over == g->per && !earlier;
    }
    return n;
}

/* Held samples continue, with further prompts, under the current weights. */
static int open_generation(struct fully_async *a, const struct stage *s, const struct generation *in) {
    const bool replay = a->record.n > 0;
    const int64_t n = a->batch, left = (s->run->total_steps - s->run->step + 1) * n; /* no more are trained */
    const int64_t most = a->k->most_open < left ? a->k->most_open : left;
    a->disaggregated = s->worker->disaggregated;
    a->g = (struct generation_state){.s = s, .in = in, .sp = &in->rollout->train, .partial = true};
    if (a->k->partial && !replay && !a->disaggregated) a->g.enough = n;
    a->generating = true;
    a->over = false;
    TRY(generation_begin(&a->g));
    if (!replay) drop_old(a, ppo_version(s), in);
    a->at_exchange = a->n_held;
    if (replay) TRY(follow(a, s, in));
    while (!replay && a->n_held < most) begin(a, s);
    TRY(submit(a, &a->g));
    a->n_held = 0;
    return 0;
}

/* Whether the prompts that a step needs have ended, with their scores. */
static bool has_enough(const struct fully_async *a) {
    const struct generation_state *g = &a->g;
    bool enough = g->n_over >= a->batch;
    for (int64_t i = 0; enough && i < a->batch * a->per; i++) enough = g->samples[g->over[i / a->per] * a->per + i % a->per].scored;
    return enough;
}

/* Generates until as many prompts have ended as a step needs; colocated, or in a replay, until all have ended. */
static int wait_for_samples(struct fully_async *a) {
    const bool all = !a->disaggregated || a->record.n > 0;
    while (!a->over && (all || !has_enough(a))) {
        const int more = generation_step(&a->g, true);
        TRY(more);
        a->over = more == 0;
    }
    return 0;
}

/* Overlapped with training. */
static int generate_overlapped(void *arg) {
    struct fully_async *a = arg;
    if (a->over || phase_stop_due()) return 0;
    const int more = generation_step(&a->g, false);
    a->over = more <= 0;
    return more < 0 ? more : 0;
}

static int by_number(const void *x, const void *y, void *arg) {
    const struct generation_state *g = arg;
    const int64_t a = g->groups[*(const int64_t *)x].number, b = g->groups[*(const int64_t *)y].number;
    return a < b ? -1 : a > b;
}

/* Where all that was begun has ended in turns with training, tools have a say in when, and none in what is trained. */
static void in_order_of_data(struct fully_async *a) {
    if (a->disaggregated || a->k->partial || !agents_active(a->g.in->agents)) return;
    qsort_r(a->g.over, (size_t)a->g.n_over, sizeof *a->g.over, by_number, &a->g);
}

/* The samples of a step, update by update. */
static int choose(struct fully_async *a, struct batch *out) {
    const int64_t n = a->batch;
    a->kept = xrealloc(a->kept, (size_t)n * sizeof *a->kept);
    in_order_of_data(a);
    if (a->record.n > 0) TRY(chosen_by_record(a, &a->g, a->g.s->run->step, a->kept));
    for (int64_t i = 0; a->record.n == 0 && i < n; i++) a->kept[i] = a->g.over[i];
    TRY(generation_collect(&a->g, a->kept, n, out));
    return add_places(&a->g, a->kept, out);
}

/* The exchange of weights is due: what is not chosen is held. */
static int close_generation(struct fully_async *a) {
    if (!a->over && a->k->partial) TRY(generation_interrupt(&a->g));
    TRY(generation_run(&a->g));
    agent_loop_hold(&a->g);
    const int64_t now = ended_now(&a->g);
    a->generated += now;
    metrics_set_i64(&a->g.s->run->metrics, now, "fully_async/rollouter/step_generated_samples");
    hold_rest(a, &a->g, a->kept, a->batch);
    generation_end(&a->g, 0);
    a->generating = false;
    return 0;
}

/* ---- checkpoints ---- */

static struct generation_sample *sample_at(const struct fully_async *a, int64_t row) {
    return &a->held[row / a->per].samples[row % a->per];
}

/* v: taken over; NULL: the row stays as it is. */
static void set_json(struct batch_col *c, int64_t i, json_t *v) {
    if (!v) return;
    json_decref(c->json[i]);
    c->json[i] = v;
}

/* What a checkpoint has of an episode; NULL: nothing. A program that runs is started again. */
static json_t *episode_state(const struct generation_sample *x) {
    if (x->agent) return tool_agent_state(x->agent);
    if (x->user && x->over) return program_journal_episode(x);
    return x->user && x->user->program ? json_pack("{s:I}", "starts", (json_int_t)x->user->n_starts) : NULL;
}

/* All samples that are held, as a batch; times are left out. */
static void held_batch(const struct fully_async *a, struct batch *b) {
    const int64_t n = a->n_held * a->per;
    int64_t *lens = xmalloc((size_t)(n + 1) * sizeof *lens);
    struct batch_col *ids, *logp, *kept, *versions, *number, *row, *seed, *over, *status, *score, *message, *extra, *episode;
    batch_init(b, n);
    for (int64_t i = 0; i < n; i++) lens[i] = sample_at(a, i)->n;
    static const struct {
        const char *name;
        enum batch_type type;
        bool ragged;
    } columns[] = {{"ids", BATCH_I32, true},      {"logp", BATCH_F32, true},     {"logp_kept", BATCH_F32, true},
                   {"versions", BATCH_I32, true}, {"number", BATCH_I64, false},  {"row", BATCH_I64, false},
                   {"seed", BATCH_I64, false},    {"over", BATCH_I64, false},    {"status", BATCH_I64, false},
                   {"score", BATCH_F64, false},   {"message", BATCH_STR, false}, {"extra", BATCH_JSON, false},
                   {"episode", BATCH_JSON, false}};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        CHECK(batch_add(b, columns[i].name, columns[i].type, columns[i].ragged ? lens : NULL, NULL, NULL) == 0);
    ids = &b->cols[0], logp = &b->cols[1], kept = &b->cols[2], versions = &b->cols[3], number = &b->cols[4], row = &b->cols[5];
    seed = &b->cols[6], over = &b->cols[7], status = &b->cols[8], score = &b->cols[9], message = &b->cols[10], extra = &b->cols[11];
    episode = &b->cols[12];
    for (int64_t i = 0; i < n; i++) {
        const struct generation_sample *x = sample_at(a, i);
        const struct held *h = &a->held[i / a->per];
        const size_t bytes = (size_t)x->n * 4;
        if (bytes) memcpy(ids->i32 + ids->off[i], x->ids, bytes);
        if (bytes) memcpy(logp->f32 + logp->off[i], x->logp, bytes);
        if (bytes) memcpy(kept->f32 + kept->off[i], x->sampling_logp, bytes);
        if (bytes) memcpy(versions->i32 + versions->off[i], x->versions, bytes);
        number->i64[i] = h->number;
        row->i64[i] = h->data_row;
        seed->i64[i] = (int64_t)h->seed;
        over->i64[i] = x->over ? 1 + (int64_t)x->finish : 0;
        status->i64[i] = x->reward.status;
        score->f64[i] = x->reward.score;
        if (x->reward.message) batch_set_str(message, i, x->reward.message, strlen(x->reward.message));
        set_json(extra, i, x->reward.extra ? json_incref(x->reward.extra) : NULL);
        set_json(episode, i, episode_state(x));
    }
    free(lens);
}

static json_t *state(const struct fully_async *a) {
    struct batch b;
    held_batch(a, &b);
    json_t *o = json_pack("{s:o, s:I, s:I, s:I, s:I}", "held", batch_json(&b, NULL), "next", (json_int_t)a->next, "generated",
                          (json_int_t)a->generated, "dropped", (json_int_t)a->dropped, "stale", (json_int_t)a->stale);
    batch_free(&b);
    return o;
}

static int restore_sample(struct generation_sample *x, const struct batch *b, int64_t i, const struct generation *in) {
    struct batch_col *ids, *logp, *kept, *versions, *over, *status, *score, *message, *extra;
    TRY(batch_get(b, "ids", BATCH_I32, &ids));
    TRY(batch_get(b, "logp", BATCH_F32, &logp));
    TRY(batch_get(b, "logp_kept", BATCH_F32, &kept));
    TRY(batch_get(b, "versions", BATCH_I32, &versions));
    TRY(batch_get(b, "over", BATCH_I64, &over));
    TRY(batch_get(b, "status", BATCH_I64, &status));
    TRY(batch_get(b, "score", BATCH_F64, &score));
    TRY(batch_get(b, "message", BATCH_STR, &message));
    TRY(batch_get(b, "extra", BATCH_JSON, &extra));
    const struct batch_col *episode = batch_find(b, "episode"); /* of tool_agent */
    const int64_t n = batch_len(ids, i), at = ids->off[i];
    if (episode && episode->type == BATCH_JSON && json_is_object(episode->json[i])) x->agent_state = json_incref(episode->json[i]);
    if (n == 0 && over->i64[i] == 0) return 0;
    if (batch_len(logp, i) != n || batch_len(kept, i) != n || batch_len(versions, i) != n || over->i64[i] < 0 ||
        over->i64[i] > 1 + ENGINE_LENGTH || status->i64[i] < 0 || status->i64[i] >= REWARD_N_STATUS)
        FAIL(ERR_FORMAT, "a held sample has invalid values");
    x->n = n;
    x->ids = xcopy(ids->i32 + at, n, 4);
    x->logp = xcopy(logp->f32 + logp->off[i], n, 4);
    x->sampling_logp = xcopy(kept->f32 + kept->off[i], n, 4);
    x->versions = xcopy(versions->i32 + versions->off[i], n, 4);
    if (over->i64[i] == 0) return 0;
    x->over = x->scored = true;
    x->finish = (enum engine_finish)(over->i64[i] - 1);
    x->reward = (struct reward_result){.status = (enum reward_status)status->i64[i],
                                       .score = score->f64[i],
                                       .message = message->str_len[i] ? xstrdup(message->str[i]) : NULL,
                                       .extra = json_is_object(extra->json[i]) ? json_incref(extra->json[i]) : NULL};
    return generation_decode(in, x);
}

static int restore_held(struct fully_async *a, const struct batch *b, const struct generation *in) {
    struct batch_col *number, *row, *seed;
    TRY(batch_get(b, "number", BATCH_I64, &number));
    TRY(batch_get(b, "row", BATCH_I64, &row));
    TRY(batch_get(b, "seed", BATCH_I64, &seed));
    if (b->n_rows % a->per != 0)
        FAIL(ERR_INPUT,
             "its prompts have another number of samples; resume with the same actor_rollout_ref.rollout.n and estimator");
    for (int64_t i = 0; i < b->n_rows; i++) {
        if (i % a->per == 0) hold(a);
        struct held *h = &a->held[i / a->per];
        if (row->i64[i] < 0 || row->i64[i] >= in->data->n) FAIL(ERR_INPUT, "its prompts are of other data.train_files");
        h->number = number->i64[i];
        h->data_row = row->i64[i];
        h->seed = (uint64_t)seed->i64[i];
        TRY(restore_sample(&h->samples[i % a->per], b, i, in));
    }
    return 0;
}

static int restore(struct fully_async *a, const json_t *o, const struct generation *in) {
    const char *where = "held samples of the checkpoint";
    struct batch b;
    TRY(json_i64(o, "next", &a->next, where));
    TRY(json_i64(o, "generated", &a->generated, where));
    TRY(json_i64(o, "dropped", &a->dropped, where));
    TRY(json_i64(o, "stale", &a->stale, where));
    TRY(batch_of_json(&b, json_object_get(o, "held"), where));
    const int rc = restore_held(a, &b, in);
    batch_free(&b);
    return rc < 0 ? err_wrap(rc, "%s", where) : 0;
}

/* ---- metrics ---- */

static int by_value(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return a < b ? -1 : a > b;
}

/* numpy's percentile of n sorted numbers. */
static double percentile(const double *v, int64_t n, double q) {
    const double at = q / 100 * (double)(n - 1);
    const int64_t lo = (int64_t)at, hi = lo + 1 < n ? lo + 1 : lo;
    return v[lo] + (at - (double)lo) * (v[hi] - v[lo]);
}

static void time_metrics(struct metrics *m, const struct batch *b) {
    const int64_t n = b->n_rows;
    double *v = xmalloc((size_t)n * sizeof *v), sum = 0;
    memcpy(v, batch_find(b, "seconds")->f64, (size_t)n * sizeof *v);
    qsort(v, (size_t)n, sizeof *v, by_value);
    for (int64_t i = 0; i < n; i++) sum += v[i];
    metrics_set(m, sum / (double)n, "fully_async/processing_time/avg");
    metrics_set(m, v[n - 1], "fully_async/processing_time/max");
    metrics_set(m, v[0], "fully_async/processing_time/min");
    metrics_set(m, percentile(v, n, 50), "fully_async/processing_time/tp50");
    metrics_set(m, percentile(v, n, 95), "fully_async/processing_time/tp95");
    metrics_set(m, percentile(v, n, 99), "fully_async/processing_time/tp99");
    free(v);
}

/* Of the samples of a step as they were generated (verl detach_utils.py assemble_batch_from_rollout_samples). */
static void sample_metrics(struct fully_async *a, const struct stage *s, const struct batch *b) {
    struct metrics *m = &s->run->metrics;
    const struct batch_col *c = batch_find(b, "param_versions");
    int64_t partial = 0, span = 0, ended = 0;
    for (int64_t i = 0; i < b->n_rows; i++) { /* versions only grow */
        if (batch_len(c, i) == 0) continue;   /* an episode that has failed */
        const int32_t first = c->i32[c->off[i]], last = c->i32[c->off[i + 1] - 1];
        partial += last != first;
        span = last - first > span ? last - first : span;
        a->stale += last < ppo_version(s);
    }
    for (int64_t k = 0; k < a->n_held; k++) {
        int64_t over = 0;
        for (int64_t i = 0; i < a->per; i++) over += a->held[k].samples[i].over;
        ended += over == a->per;
    }
    metrics_set_i64(m, ppo_version(s), "fully_async/count/current_param_version");
    metrics_set_i64(m, a->generated, "fully_async/count/total_generated_samples");
    metrics_set_i64(m, a->at_exchange, "fully_async/count/staleness_samples");
    metrics_set_i64(m, a->dropped, "fully_async/count/dropped_stale_samples");
    metrics_set_i64(m, a->stale, "fully_async/count/stale_trajectory_processed");
    metrics_set_i64(m, partial, "fully_async/partial/total_partial_num");
    metrics_set(m, (double)partial / (double)b->n_rows, "fully_async/partial/partial_ratio");
    metrics_set_i64(m, span, "fully_async/partial/max_partial_span");
    metrics_set_i64(m, ended, "fully_async/monitor/queue/mq_queue_size");
    metrics_set_i64(m, a->k->required, "fully_async/static/required_samples");
    metrics_set_i64(m, a->k->most_open, "fully_async/static/max_required_samples");
    metrics_set(m, a->k->staleness, "fully_async/static/staleness_threshold");
    time_metrics(m, b);
}

enum rule { MEAN, SUM, MOST, LEAST };

/* How verl makes one number of those of several updates (detach_utils.py MetricsAggregator); counts of errors are sums. */
static enum rule rule_of(const char *name) {
    if (strncmp(name, "timing_s/", 9) == 0 || strncmp(name, "reward/num_", 11) == 0) return SUM;
    if (strstr(name, "mean") || strstr(name, "avg")) return MEAN;
    if (strstr(name, "max")) return MOST;
    if (strstr(name, "min")) return LEAST;
    return strstr(name, "sum") || strstr(name, "total") ? SUM : MEAN;
}

/* m of n updates in one. */
static void join_metrics(const struct metrics *m, int64_t n, struct metrics *out) {
    for (int64_t u = 0; u < n; u++)
        for (int64_t i = 0; i < m[u].n; i++) {
            const char *name = m[u].items[i].name;
            const enum rule rule = rule_of(name);
            double v = 0, x;
            int64_t have = 0;
            if (metrics_get(out, name, &x)) continue; /* an update before has it */
            for (int64_t j = u; j < n; j++) {
                if (!metrics_get(&m[j], name, &x)) continue;
                v = have++ == 0 ? x : rule == MOST ? (x > v ? x : v) : rule == LEAST ? (x < v ? x : v) : v + x;
            }
            v = rule == MEAN ? v / (double)have : v;
            if (m[u].items[i].whole && v == (double)(int64_t)v) metrics_set_i64(out, (int64_t)v, "%s", name);
            else metrics_set(out, v, "%s", name);
        }
}

/* ---- a step ---- */

struct generation_call {
    struct fully_async *a;
    const json_t *held; /* of the checkpoint that the run resumes from; NULL: none */
    struct batch *out;
};

/* Before the first step of a run. */
static int start(struct fully_async *a, const struct generation_call *c, const struct generation *in) {
    a->started = true;
    if (c->held) TRY(restore(a, c->held, in));
    if (!a->k->replay) return 0;
    if (a->per > a->n)
        FAIL(ERR_INVAL, "async_training.replay: algorithm.adv_estimator=%s has greedy responses, which run.db does not record",
             in->algorithm->adv_estimator);
    return track_schedule_read(&a->record, a->k->replay);
}

static int open_stage(void *arg, const struct stage *s, const struct generation *in) {
    struct generation_call *c = arg;
    if (!c->a->started) TRY(start(c->a, c, in));
    return open_generation(c->a, s, in);
}

static int wait_stage(void *arg, const struct stage *s, const struct generation *in) {
    struct generation_call *c = arg;
    (void)s, (void)in;
    batch_free(c->out);
    TRY(wait_for_samples(c->a));
    return choose(c->a, c->out);
}

static int close_stage(void *arg, const struct stage *s, const struct generation *in) {
    struct generation_call *c = arg;
    (void)in;
    TRY(close_generation(c->a));
    sample_metrics(c->a, s, c->out);
    return 0;
}

/* The rows of update u. */
static int cut(struct verlc *v, const struct fully_async *a, struct verlc_batch *all, int64_t u, struct verlc_batch *out) {
    const struct batch *b = verlc_batch_data(all);
    const struct batch_col *group = batch_find(b, "group");
    int64_t *rows = xmalloc((size_t)b->n_rows * sizeof *rows + 1), n = 0;
    for (int64_t i = 0; i < b->n_rows; i++)
        if (group->i64[i] / a->k->required == u) rows[n++] = i;
    const int rc = verlc_select(v, all, rows, n, out);
    free(rows);
    return rc;
}

static int train(struct fully_async *a, struct verlc *v, struct verlc_batch *all, struct verlc_batch **part,
                 struct verlc_batch *drawn) {
    struct run *r = &verlc_controller(v)->run;
    const int64_t n = a->k->updates;
    struct metrics *each = xcalloc((size_t)n, sizeof *each), whole = {0};
    const struct batch **parts = xmalloc((size_t)n * sizeof *parts);
    struct batch joined;
    int rc = 0;
    for (int64_t u = 0; u < n; u++) TRYG(cut(v, a, all, u, part[u]), out);
    /* the policy of the last exchange, before any update: what verl keeps a copy of the weights for */
    for (int64_t u = 0; u < n && a->k->recompute_log_probs; u++) TRYG(verlc_log_probs(v, VERLC_ACTOR, part[u]), out);
    metrics_merge(&whole, &r->metrics);
    for (int64_t u = 0; u < n; u++) {
        metrics_reset(&r->metrics);
        TRYG(ppo_update(v, part[u], drawn), out);
        metrics_merge(&each[u], &r->metrics);
        parts[u] = verlc_batch_data(part[u]);
    }
    metrics_reset(&r->metrics);
    metrics_merge(&r->metrics, &whole);
    join_metrics(each, n, &r->metrics);
    TRYG(batch_concat(&joined, parts, n), out);
    batch_free(verlc_batch_data(all));
    *verlc_batch_data(all) = joined;
out:
    for (int64_t u = 0; u < n; u++) metrics_free(&each[u]);
    metrics_free(&whole);
    free(each);
    free(parts);
    return rc;
}

static int step(struct fully_async *a, struct verlc *v, struct verlc_batch *all, struct verlc_batch **part,
                struct verlc_batch *drawn) {
    struct controller *c = verlc_controller(v);
    struct worker *w = &c->worker.base;
    struct generation_call call = {a, c->async, verlc_batch_data(all)};
    TRY(verlc_stage(v, w->disaggregated ? "sync_rollout_weights" : "gen", open_stage, &call));
    TRY(verlc_stage(v, "gen", wait_stage, &call));
    if (!a->disaggregated) TRY(verlc_stage(v, "gen", close_stage, &call));
    a->g.overlapped = a->disaggregated;
    if (a->disaggregated) w->overlapped = (struct worker_overlapped){a, generate_overlapped};
    TRY(train(a, v, all, part, drawn));
    w->overlapped.step = NULL;
    a->g.overlapped = false;
    call.out = verlc_batch_data(all); /* with what the updates added */
    if (a->disaggregated) TRY(verlc_stage(v, "sync_rollout_weights", close_stage, &call));
    json_decref(c->async);
    c->async = state(a);
    return verlc_end_step(v, all);
}

void ppo_fully_async(struct verlc *v) {
    const struct controller *const c = verlc_controller(v);
    const struct ppo_async_config *const k = &c->k->async;
    const struct algo_adv_entry *const adv = c->k->algorithm.adv;
    const int64_t n = c->k->rollout.train.n;
    struct fully_async a = {
        .k = k, .batch = c->k->data.train_batch_size, .n = n, .per = n + (adv && adv->needs & ALGO_NEEDS_BASELINES ? 1 : 0)};
    struct verlc_batch *all = verlc_batch_create(), *drawn = verlc_batch_create(),
                       **part = xmalloc((size_t)k->updates * sizeof *part);
    for (int64_t u = 0; u < k->updates; u++) part[u] = verlc_batch_create();
    while (verlc_begin_step(v))
        if (step(&a, v, all, part, drawn) < 0) break;
    if (a.generating) generation_end(&a.g, ERR_SIGNAL); /* the run has failed */
    for (int64_t i = 0; i < a.n_held; i++) held_free(&a, &a.held[i]);
    free(a.held);
    free(a.kept);
    track_schedule_free(&a.record);
    for (int64_t u = 0; u < k->updates; u++) verlc_batch_free(part[u]);
    free(part);
    verlc_batch_free(all);
    verlc_batch_free(drawn);
}
