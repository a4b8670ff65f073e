/* reward.c - scores of finished samples, and rewards from them: which scorer is called (rules, a reward model, compute_score), with
 * which arguments, samples without a score, weights of data sources, scores on tokens.
 *
 * Invariant: an error is never a number (DESIGN 8). */
#include "ppo/stages/generation.h"

#include "algo/advantage.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "base/encoding/utf8.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- to the scorers ---- */

static json_t *messages_of(const struct generation_group *g) { return batch_find(g->prompts, "raw_prompt")->json[g->row]; }

/* What the data have in a column for this prompt; NULL: nothing. */
static json_t *data_of(const struct generation_group *g, const char *column) {
    return json_object_get(batch_find(g->prompts, "row")->json[g->row], column);
}
static const json_t *ground_truth_of(const struct generation_group *g) {
    return json_object_get(data_of(g, "reward_model"), "ground_truth");
}

/* The fields of verl's agent loop for sample i. */
static void add_agent_loop(const struct generation_state *g, int64_t i, json_t *extra) {
    const struct generation_sample *x = &g->samples[i];
    const int64_t now = g->validation ? g->s->run->step : g->s->run->step - 1; /* the version of the weights */
    const bool known = x->versions && x->n > 0;
    const int64_t first = known ? x->versions[0] : now, last = known ? x->versions[x->n - 1] : now;
    json_object_set_new(extra, "global_steps", json_integer(last));
    json_object_set_new(extra, "min_global_steps", json_integer(first));
    json_object_set_new(extra, "max_global_steps", json_integer(last));
    json_object_set(extra, "raw_prompt", messages_of(&g->groups[i / g->per]));
    agent_loop_extra_info(x, extra);
}

static json_t *reward_scores(const struct generation_group *group) {
    json_t *scores = data_of(group, "reward_scores");
    return scores ? json_incref(scores) : json_object();
}

/* What the reward manager adds to extra_info. */
static void add_rollout(const struct generation_state *g, int64_t i, json_t *extra) {
    const struct ppo_reward_config *k = g->in->scores;
    if (k->extra_agent_loop) add_agent_loop(g, i, extra);
    if (k->extra_turns) json_object_set_new(extra, "num_turns", json_integer((json_int_t)agent_loop_num_turns(&g->samples[i])));
    if (k->extra_scores) json_object_set_new(extra, "rollout_reward_scores", reward_scores(&g->groups[i / g->per]));
    if (k->extra_experiment) json_object_set_new(extra, "experiment_name", json_string(g->s->run->k.experiment));
}

/* The row's columns other than prompt and data source: what is known of a prompt whose row lacks verl's columns. */
static json_t *other_columns(const struct ppo_data_config *k, json_t *row) {
    json_t *other = json_copy(row);
    json_object_del(other, k->prompt_key);
    json_object_del(other, k->reward_fn_key);
    return other;
}

/* The data's column; a row without it and without reward_model passes all its columns. */
static json_t *given_info(const struct ppo_data_config *k, json_t *row) {
    const json_t *given = json_object_get(row, "extra_info"), *truth = json_object_get(row, "reward_model");
    if (json_is_object(given)) return json_copy((json_t *)(uintptr_t)given);
    return truth && !json_is_null(truth) ? json_object() : other_columns(k, row);
}

/* What a Python scorer finds in extra_info: the data's, the reward model's result (rm; NULL: there is none), and the rollout's
 * fields. */
static json_t *extra_info(const struct generation_state *g, int64_t i, const struct reward_result *rm) {
    const struct generation_group *group = &g->groups[i / g->per];
    json_t *extra = given_info(g->in->rows, batch_find(group->prompts, "row")->json[group->row]);
    if (rm) json_object_update(extra, rm->extra);
    if (rm) json_object_set_new(extra, "rm_score", json_real(rm->score));
    add_rollout(g, i, extra);
    return extra;
}

/* For a manager of the user's: the tokens, and the columns that verl's batch has; extra: extra_info. */
static json_t *manager_data(const struct generation_state *g, int64_t i, json_t *extra) {
    const struct generation_sample *s = &g->samples[i];
    const struct generation_group *group = &g->groups[i / g->per];
    const struct batch_col *prompts = batch_find(group->prompts, "prompts"), *uid = batch_find(group->prompts, "uid"),
                           *source = batch_find(group->prompts, "data_source");
    json_t *columns = json_copy(batch_find(group->prompts, "row")->json[group->row]), *fields = json_object();
    json_object_del(columns, g->in->rows->prompt_key);
    add_agent_loop(g, i, fields);
    json_object_set_new(columns, g->in->rows->reward_fn_key, json_string(source->str[group->row]));
    json_object_set_new(columns, "uid", json_integer(uid->i64[group->row]));
    json_object_set_new(columns, "__num_turns__", json_integer((json_int_t)agent_loop_num_turns(s)));
    json_object_set_new(columns, "reward_scores", reward_scores(group));
    json_object_set_new(columns, "tool_extra_fields", fields);
    json_object_set(columns, "raw_prompt", messages_of(group));
    json_object_set(columns, "extra_info", extra);
    return json_pack("{s:o, s:o, s:o}", "prompts",
                     json_i32_array(prompts->i32 + prompts->off[group->row], batch_len(prompts, group->row)), "responses",
                     json_i32_array(s->ids, s->n), "columns", columns);
}

/* ---- a call before the run ---- */

#define TRIAL_S 20. /* at most */

struct trial { /* of the data's first row, with its ground truth as the answer */
    struct reward_request q;
    char *answer;
    json_t *extra, *data;
};

/* The rollout's fields, before there is a step. */
static void trial_info(const struct score_open_args *a, json_t *extra, json_t *row) {
    static const char *const steps[] = {"global_steps", "min_global_steps", "max_global_steps"};
    for (int i = 0; a->g->scores->extra_agent_loop && i < 3; i++) json_object_set_new(extra, steps[i], json_integer(0));
    if (a->g->scores->extra_agent_loop) json_object_set_new(extra, "turn_scores", json_array());
    if (a->g->scores->extra_agent_loop) json_object_set_new(extra, "tool_rewards", json_array());
    if (a->g->scores->extra_agent_loop) json_object_set(extra, "raw_prompt", json_object_get(row, a->g->rows->prompt_key));
    if (a->g->scores->extra_turns) json_object_set_new(extra, "num_turns", json_integer(2));
    if (a->g->scores->extra_scores) json_object_set_new(extra, "rollout_reward_scores", json_object());
    if (a->g->scores->extra_experiment) json_object_set_new(extra, "experiment_name", json_string(a->experiment));
    if (a->g->rm->enable) json_object_set_new(extra, "rm_score", json_real(0));
}

/* For a manager of the user's: the prompt, answered by its own tokens. */
static json_t *trial_data(const struct score_open_args *a, const struct rl_prompt *p, json_t *extra) {
    json_t *columns = json_copy(p->row), *ids = json_i32_array(p->ids, p->n_ids);
    json_object_del(columns, a->g->rows->prompt_key);
    json_object_set(columns, "raw_prompt", json_object_get(p->row, a->g->rows->prompt_key));
    json_object_set(columns, "extra_info", extra);
    json_object_set_new(columns, "uid", json_integer(p->uid));
    json_object_set_new(columns, "__num_turns__", json_integer(2));
    json_object_set_new(columns, "reward_scores", json_object());
    json_object_set_new(columns, "tool_extra_fields", json_object());
    return json_pack("{s:O, s:o, s:o}", "prompts", ids, "responses", ids, "columns", columns);
}

static void trial_make(struct trial *t, const struct score_open_args *a) {
    const struct rl_prompt *p = &a->g->data->prompts[0];
    json_t *truth = json_object_get(json_object_get(p->row, "reward_model"), "ground_truth");
    *t = (struct trial){.extra = given_info(a->g->rows, p->row)};
    t->answer = json_is_string(truth)   ? xstrdup(json_string_value(truth))
                : json_is_number(truth) ? json_dumps(truth, JSON_ENCODE_ANY)
                                        : xstrdup("1");
    trial_info(a, t->extra, p->row);
    if (a->g->scores->own_manager) t->data = trial_data(a, p, t->extra);
    t->q = (struct reward_request){.data_source = json_string_value(json_object_get(p->row, a->g->rows->reward_fn_key)),
                                   .solution = t->answer,
                                   .n_solution = strlen(t->answer),
                                   .ground_truth = truth,
                                   .extra_info = t->extra,
                                   .data = t->data,
                                   .response_len = 1};
}

static void trial_free(struct trial *t) {
    free(t->answer);
    json_decref(t->extra);
    json_decref(t->data);
}

int ppo_reward_open(struct reward **out, const struct score_open_args *args) {
    const struct ppo_reward_config *k = args->g->scores;
    struct reward_args a = k->args;
    struct trial trial;
    json_t *manager = NULL;
    if (k->own_manager) {
        manager = json_pack("{s:s?, s:[s, s], s:O, s:s, s:O?, s:s}", "path", k->manager_path, "names", k->manager_names[0],
                            k->manager_names[1], "config", args->config, "tokenizer", args->tokenizer, "kwargs", k->kwargs,
                            "reward_fn_key", args->g->rows->reward_fn_key);
        CHECK(manager != NULL);
        a.manager = manager;
    }
    if (args->judge_address) a.router_address = args->judge_address;
    trial_make(&trial, args);
    if (k->trial_call) a.trial = &trial.q;
    a.trial_s = fmin(TRIAL_S, args->deadline_s / 2); /* a stage that waits for it makes no progress */
    a.check = phase_check_stop;
    a.trial_binds = args->g->rm->judge.serve || a.router_address; /* a judge's server answers in generation alone */
    const int rc = reward_create(out, &a);
    trial_free(&trial);
    json_decref(manager);
    return rc;
}

/* To the scorer by rule; rm as above. */
static int score_by_rule(struct generation_state *g, int64_t i, const struct reward_result *rm) {
    const struct generation_sample *s = &g->samples[i];
    const struct generation_group *group = &g->groups[i / g->per];
    const bool own = g->in->scores->own_manager;
    const char *said = s->user ? s->user->solution : NULL; /* a program's last turn */
    json_t *extra = own || g->in->scores->args.path ? extra_info(g, i, rm) : NULL, *data = own ? manager_data(g, i, extra) : NULL;
    const struct reward_request q = {
        .data_source = batch_find(group->prompts, "data_source")->str[group->row],
        .solution = said ? said : s->text.p,
        .n_solution = said ? strlen(said) : s->text.n,
        .ground_truth = ground_truth_of(group),
        .extra_info = extra,
        .response_len = s->n,
        .data = data,
    };
    const int rc = reward_submit(g->in->reward, &q, i);
    json_decref(data);
    json_decref(extra);
    return rc;
}

int ppo_reward_submit(struct generation_state *g, int64_t i) {
    struct generation_sample *s = &g->samples[i];
    const struct generation_group *group = &g->groups[i / g->per];
    const struct batch_col *prompts = batch_find(group->prompts, "prompts");
    const struct batch_col *uid = batch_find(group->prompts, "uid");
    if (!g->in->scores) return 0;
    s->requested = clock_now();
    char *failure = agent_loop_failure(s);
    if (failure) return generation_take_score(g, i, &(struct reward_result){.status = REWARD_CRASH, .message = failure});
    if (s->user && s->user->out.has_reward) {
        struct reward_result r = {
            .status = REWARD_SCORE, .score = s->user->out.reward, .extra = json_incref(s->user->reward_extra)};
        reward_check_score(&r);
        return generation_take_score(g, i, &r);
    }
    if (!ppo_scores_by_model(g->in->rm)) return score_by_rule(g, i, NULL);
    const struct reward_model_sample q = {
        .messages = messages_of(group),
        .prompt = prompts->i32 + prompts->off[group->row],
        .n_prompt = batch_len(prompts, group->row),
        .response = s->ids,
        .n_response = s->n,
        .judge = {.messages = messages_of(group),
                  .response = s->text.p,
                  .n_response = s->text.n,
                  .ground_truth = ground_truth_of(group),
                  .seed = ~group->seed, /* not the policy's draws */
                  .uid = (uint64_t)uid->i64[group->row] * (uint64_t)g->per + (uint64_t)(i % g->per)},
    };
    return g->s->scorer->ops->submit(g->s->scorer, &q, i);
}

/* ---- from the scorers ---- */

/* One step of the reward model, and its scores: they are the reward, unless a Python scorer uses them (verl). 1: a judge that is
 * served has more to do. */
static int take_model_scores(struct generation_state *g, bool flush) {
    int64_t tag;
    struct reward_result r;
    struct ppo_scorer *const m = g->s->scorer;
    const int busy = m->ops->step(m, flush);
    TRY(busy);
    while (m->ops->poll(m, &tag, &r) > 0) {
        if (r.status != REWARD_SCORE || !g->in->scores->args.path) {
            TRY(generation_take_score(g, tag, &r));
            continue;
        }
        const int rc = score_by_rule(g, tag, &r);
        reward_result_free(&r);
        TRY(rc);
    }
    return ppo_serves_judge(g->in->rm) ? busy : 0;
}

static int take_scores(struct generation_state *g, double wait_s) {
    int64_t tag;
    struct reward_result r;
    int got;
    for (; (got = reward_poll(g->in->reward, wait_s, &tag, &r)) > 0; wait_s = 0) TRY(generation_take_score(g, tag, &r));
    return got;
}

int64_t ppo_reward_pending(const struct generation_state *g) {
    if (!g->in->scores) return 0;
    return reward_pending(g->in->reward) + g->s->scorer->ops->pending(g->s->scorer);
}

int ppo_reward_take(struct generation_state *g, bool more, bool wait) {
    if (!g->in->scores) return 0;
    const double wait_s = ppo_serves_judge(g->in->rm) ? 0.002 : 0.5; /* a scorer may call the judge while it is waited for */
    const int busy = take_model_scores(g, !more);
    TRY(busy);
    if (!more && g->s->scorer->ops->pending(g->s->scorer) == 0) TRY(reward_flush(g->in->reward));
    return take_scores(g, more || busy || !wait || reward_pending(g->in->reward) == 0 ? 0 : wait_s);
}

void ppo_reward_drop(struct generation_state *g) {
    if (!g->in->scores) return;
    g->s->scorer->ops->drop(g->s->scorer);
    reward_drop(g->in->reward);
}

enum { EXAMPLE_CHARS = 200 };

/* The start of a response on one line. */
static char *start_of(const struct buf *text) {
    const char *p = text->n > 0 ? text->p : "";
    size_t n = 0;
    for (int i = 0; i < EXAMPLE_CHARS && n < text->n; i++) {
        const int step = utf8_step(p + n, text->n - n);
        n += step > 0 ? (size_t)step : 1;
    }
    char *line = xstrndup(p, n < text->n ? n : text->n);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';
    return line;
}

/* count[kind] samples without a score, of which sample i is the first: an event, and the first time a warning. */
static void report_kind(const struct generation_state *g, enum reward_status kind, int64_t count, int64_t i) {
    const struct generation_sample *s = &g->samples[i];
    const struct generation_group *group = &g->groups[i / g->per];
    const char *source = batch_find(group->prompts, "data_source")->str[group->row];
    char *start = start_of(&s->text);
    char *what = xasprintf("%lld of %lld samples ended as %s (first: %s; data_source %s, response: %s)", (long long)count,
                           (long long)(g->n_groups * g->per), reward_status_name(kind),
                           s->reward.message ? s->reward.message : "no message", source, start);
    if (reward_is_unreported(g->in->reward, kind)) log_warn("reward: %s", what);
    track_event(g->s->run->track, g->s->run->step, "reward_error", what);
    free(what);
    free(start);
}

void ppo_reward_report_errors(const struct generation_state *g) {
    int64_t count[REWARD_N_STATUS] = {0}, first[REWARD_N_STATUS], known = 0;
    struct buf kinds = {0};
    for (int64_t i = 0; i < g->n_groups * g->per; i++) {
        const enum reward_status kind = g->samples[i].reward.status;
        if (g->samples[i].earlier) continue; /* reported then */
        if (count[kind]++ == 0) first[kind] = i;
    }
    for (int k = REWARD_SCORE + 1; k < REWARD_N_STATUS; k++) {
        if (count[k] == 0) continue;
        if (!reward_is_unreported(g->in->reward, (enum reward_status)k)) {
            buf_addf(&kinds, "%s%lld %s", known ? ", " : "", (long long)count[k], reward_status_name((enum reward_status)k));
            known += count[k];
        }
        report_kind(g, (enum reward_status)k, count[k], first[k]);
        reward_mark_reported(g->in->reward, (enum reward_status)k);
    }
    if (known > 0)
        log_warn("reward: %lld of %lld samples have no score: %s (examples: verlc show, run.db)", (long long)known,
                 (long long)(g->n_groups * g->per), kinds.p);
    buf_free(&kinds);
}

void ppo_reward_counts(struct metrics *m, const struct batch *b, const char *prefix) {
    const struct batch_col *status = batch_find(b, "reward_status");
    for (int k = REWARD_SCORE + 1; status && k < REWARD_N_STATUS; k++) {
        const char *name = reward_status_name((enum reward_status)k);
        int64_t n = 0;
        for (int64_t i = 0; i < b->n_rows; i++) n += strcmp(status->str[i], name) == 0;
        metrics_set_i64(m, n, "%s%s", prefix, name);
    }
}

/* ---- the stage ---- */

static bool no_score(const struct batch_col *score, const struct batch_col *baseline, int64_t i) {
    return isnan(score->f64[i]) || (baseline && isnan(baseline->f64[i]));
}

/* Whether row i is lost with a row of its prompt that has no score: REWARD_DROP_GROUP. Samples of a prompt are neighbours. */
static void mark_groups(const struct batch_col *group, int64_t n, bool *lost) {
    for (int64_t first = 0, end; first < n; first = end) {
        bool any = false;
        for (end = first; end < n && group->i64[end] == group->i64[first]; end++) any |= lost[end];
        for (int64_t i = first; i < end; i++) lost[i] = any;
    }
}

static int drop_errors(const struct stage *s, const struct ppo_reward_config *k, struct batch *b, struct batch *dropped) {
    struct batch_col *score, *group;
    TRY(batch_get(b, "score", BATCH_F64, &score));
    TRY(batch_get(b, "group", BATCH_I64, &group));
    const struct batch_col *baseline = batch_find(b, "reward_baselines"); /* without it a sample has no advantage */
    int64_t n_bad = 0, n_keep = 0, n_drop = 0;
    int64_t *keep = xmalloc((size_t)b->n_rows * 2 * sizeof *keep), *drops = keep + b->n_rows;
    bool *lost = xcalloc((size_t)b->n_rows, sizeof *lost);
    for (int64_t i = 0; i < b->n_rows; i++) n_bad += lost[i] = no_score(score, baseline, i);
    if (k->on_error == REWARD_DROP_GROUP) mark_groups(group, b->n_rows, lost);
    metrics_set_i64(&s->run->metrics, n_bad, "reward/num_errors");
    ppo_reward_counts(&s->run->metrics, b, "reward/num_");
    for (int64_t i = 0; i < b->n_rows; i++) {
        if (lost[i]) drops[n_drop++] = i;
        else keep[n_keep++] = i;
    }
    int rc = 0;
    if (n_bad > 0 && k->on_error == REWARD_STOP)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__, "reward: %lld of %lld samples have no score and reward.on_error=stop",
                     (long long)n_bad, (long long)b->n_rows);
    else if (n_keep == 0)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__,
                     "reward: none of the %lld samples of this step has a score; see the warnings above", (long long)b->n_rows);
    else if (n_keep < b->n_rows) {
        struct batch kept;
        rc = batch_select(dropped, b, drops, n_drop);
        if (rc == 0) rc = batch_select(&kept, b, keep, n_keep);
        if (rc == 0) {
            batch_free(b);
            *b = kept;
        }
    }
    free(lost);
    free(keep);
    return rc;
}

static int weigh_sources(const struct ppo_reward_config *k, struct batch *b) {
    struct batch_col *score, *source;
    if (!json_object_size(k->source_weights)) return 0;
    TRY(batch_get(b, "score", BATCH_F64, &score));
    TRY(batch_get(b, "data_source", BATCH_STR, &source));
    struct batch_col *baseline = batch_find(b, "reward_baselines");
    for (int64_t i = 0; i < b->n_rows; i++) {
        const json_t *w = json_object_get(k->source_weights, source->str[i]);
        if (w) score->f64[i] *= json_number_value(w);
        if (w && baseline) baseline->f64[i] *= json_number_value(w);
    }
    return 0;
}

void ppo_share_scores(struct batch *b) {
    const struct batch_col *session = batch_find(b, BATCH_SESSION);
    static const char *const texts[] = {"reward_status", "reward_message"}, *const numbers[] = {"score", "reward_baselines"};
    const struct batch_col *extra = batch_find(b, "reward_extra_info");
    if (!session) return;
    int64_t *final = xmalloc((size_t)(b->n_rows + 1) * sizeof *final);
    algo_session_finals(b->n_rows, session->i64, final);
    for (int64_t i = 0; i < b->n_rows; i++) {
        if (final[i] == i) continue;
        for (int k = 0; k < 2; k++) {
            struct batch_col *text = batch_find(b, texts[k]), *number = batch_find(b, numbers[k]);
            if (text) batch_set_str(text, i, text->str[final[i]], text->str_len[final[i]]);
            if (number) number->f64[i] = number->f64[final[i]];
        }
        if (!extra) continue;
        json_decref(extra->json[i]);
        extra->json[i] = json_incref(extra->json[final[i]]);
    }
    free(final);
}

int ppo_reward(const struct stage *s, const struct ppo_reward_config *k, struct batch *b, struct batch *dropped) {
    double *level;
    *dropped = (struct batch){0};
    ppo_share_scores(b);
    ppo_episode_metrics(&s->run->metrics, b); /* of those that are lost below too */
    TRY(drop_errors(s, k, b, dropped));
    TRY(weigh_sources(k, b));
    TRY(ppo_add_f64(b, "token_level_scores", "responses", &level));
    const struct batch_col *responses = batch_find(b, "responses"), *score = batch_find(b, "score");
    for (int64_t i = 0; i < b->n_rows; i++) {
        if (!(fabs(score->f64[i]) <= (double)FLT_MAX)) /* by a weight, or from a program that calls verlc.h */
            FAIL(ERR_NUMERIC, "reward: the score %g of sample %lld is beyond what float32 holds; smaller scores or weights",
                 score->f64[i], (long long)i);
        if (batch_len(responses, i) > 0) level[responses->off[i + 1] - 1] = score->f64[i]; /* an output may be empty */
    }
    return 0;
}
