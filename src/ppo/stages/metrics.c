/* metrics.c - verl's per-step numbers from a finished batch
 * (verl/trainer/ppo/metric_utils.py compute_data_metrics), and the dumps. */
#include "ppo/stages/stages.h"
#include "train/perf_metrics.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct spread {
    double sum, max, min;
    int64_t n;
};
static void spread_add(struct spread *s, double v) {
    s->max = s->n == 0 || v > s->max ? v : s->max;
    s->min = s->n == 0 || v < s->min ? v : s->min;
    s->sum += v;
    s->n++;
}
/* Of nothing: NaN. */
static void spread_set(struct metrics *m, const struct spread *s, const char *name) {
    metrics_set(m, s->n > 0 ? s->sum / (double)s->n : NAN, "%s/mean", name);
    metrics_set(m, s->n > 0 ? s->max : NAN, "%s/max", name);
    metrics_set(m, s->n > 0 ? s->min : NAN, "%s/min", name);
}

static struct spread token_spread(const struct batch *b, const char *name) {
    struct spread s = {0};
    const struct batch_col *c = batch_find(b, name);
    uint8_t *mask = ppo_mask(b, "response_mask");
    for (int64_t t = 0; c && t < c->off[b->n_rows]; t++)
        if (mask[t]) spread_add(&s, c->f64[t]);
    free(mask);
    return s;
}

/* 1 - var(returns - values) / var(returns), n - 1, over valid tokens (verl adds 1e-5 below); NaN of fewer than two. */
static double explained_variance(const struct batch *b) {
    const double *ret = batch_find(b, "returns")->f64, *val = batch_find(b, "values")->f64;
    const int64_t n_tokens = batch_find(b, "returns")->off[b->n_rows];
    uint8_t *mask = ppo_mask(b, "response_mask");
    double n = 0, mean_r = 0, mean_d = 0, var_r = 0, var_d = 0;
    for (int64_t t = 0; t < n_tokens; t++) {
        if (!mask[t]) continue;
        n++;
        mean_r += ret[t];
        mean_d += ret[t] - val[t];
    }
    mean_r /= n;
    mean_d /= n;
    for (int64_t t = 0; t < n_tokens; t++) {
        if (!mask[t]) continue;
        var_r += (ret[t] - mean_r) * (ret[t] - mean_r);
        var_d += (ret[t] - val[t] - mean_d) * (ret[t] - val[t] - mean_d);
    }
    free(mask);
    return n > 1 ? 1 - var_d / (n - 1) / (var_r / (n - 1) + 1e-5) : NAN;
}

/* How much of the gradient is noise, where the old pass gave sums of squared probabilities (verl
 * compute_variance_proxy_metrics): W of a row is the sum of 1 - 2 pi + sum pi^2 over its tokens. */
static void variance_proxy(struct metrics *m, const struct batch *b) {
    const struct batch_col *adv = batch_find(b, "advantages"), *pi2 = batch_find(b, "sum_pi_squared"),
                           *old = batch_find(b, "old_log_probs"), *is = batch_find(b, "rollout_is_weights");
    const double rows = (double)b->n_rows;
    double norm = 0, power = 0, a2 = 0, w_is = 0;
    if (!pi2 || !adv || !metrics_get(m, "actor/grad_norm", &norm)) return;
    uint8_t *mask = ppo_mask(b, "response_mask");
    for (int64_t i = 0; i < b->n_rows; i++) {
        double a = 0, w = 0, rho = 0, n = 1e-8;
        for (int64_t t = adv->off[i]; t < adv->off[i + 1]; t++) {
            if (!mask[t]) continue;
            const double x = 1 - 2 * exp(old->f64[t]) + pi2->f64[t], r = is ? is->f64[t] : 1;
            a += adv->f64[t];
            w += x * r * r / fmax(r * r, 1e-10); /* a token of weight 0 does not count */
            w_is += x * r * r / rows;
            rho += r;
            n++;
        }
        a /= n;
        rho = is ? rho / n : 1;
        power += rho * rho * a * a * fmax(w, 0) / rows;
        a2 += a * a / rows;
    }
    free(mask);
    metrics_set(m, norm * norm, "variance_proxy/proxy1_signal_strength");
    metrics_set(m, power, "variance_proxy/proxy2_total_power");
    metrics_set(m, rows > 1 ? fmax(0, (power - norm * norm) / (rows - 1)) : 0, "variance_proxy/proxy3_pure_noise");
    metrics_set(m, a2, "variance_proxy/expected_a_squared");
    metrics_set(m, w_is, "variance_proxy/expected_w");
}

/* Of responses that have a token. */
static struct spread row_sums(const struct batch *b, const char *name) {
    struct spread s = {0};
    const struct batch_col *c = batch_find(b, name);
    for (int64_t i = 0; c && i < b->n_rows; i++) {
        double sum = 0;
        if (batch_len(c, i) == 0) continue;
        for (int64_t t = c->off[i]; t < c->off[i + 1]; t++) sum += c->f64[t];
        spread_add(&s, sum);
    }
    return s;
}

static struct spread lengths(const struct batch *b, const char *name, int64_t width, double *clip) {
    struct spread s = {0};
    int64_t full = 0;
    const struct batch_col *c = batch_find(b, name);
    for (int64_t i = 0; c && i < b->n_rows; i++) {
        spread_add(&s, (double)batch_len(c, i));
        full += batch_len(c, i) == width;
    }
    *clip = b->n_rows ? (double)full / (double)b->n_rows : 0;
    return s;
}

/* An agent loop may give an output without a token; verl calls it aborted. */
static struct spread response_lengths(struct metrics *m, const struct batch *b, int64_t width) {
    const struct batch_col *c = batch_find(b, "responses");
    struct spread some = {0};
    double clip;
    const struct spread all = lengths(b, "responses", width, &clip);
    for (int64_t i = 0; i < b->n_rows; i++)
        if (batch_len(c, i) > 0) spread_add(&some, (double)batch_len(c, i));
    spread_set(m, &all, "response_length");
    metrics_set(m, clip, "response_length/clip_ratio");
    spread_set(m, &some, "response_length_non_aborted");
    metrics_set(m, some.n > 0 ? clip * (double)all.n / (double)some.n : NAN, "response_length_non_aborted/clip_ratio");
    metrics_set(m, all.n > 0 ? (double)(all.n - some.n) / (double)all.n : 0, "response/aborted_ratio");
    return all;
}

/* How many versions before the one that is trained the tokens were drawn. */
static void version_lag(const struct stage *st, const struct batch *b) {
    const struct batch_col *c = batch_find(b, "param_versions");
    struct spread s = {0};
    uint8_t *mask = ppo_policy_mask(b);
    for (int64_t t = 0; c && t < c->off[b->n_rows]; t++)
        if (mask[t]) spread_add(&s, (double)(ppo_version(st) - c->i32[t]));
    free(mask);
    if (s.n > 0) spread_set(&st->run->metrics, &s, "training/version_lag");
}

/* Seconds from a sample's request to its end, and on to its score, as verl's agent loop has them. */
static void agent_loop_metrics(struct metrics *m, const struct batch *b) {
    const struct batch_col *seconds = batch_find(b, "seconds"), *preempted = batch_find(b, "num_preempted"),
                           *scoring = batch_find(b, "scoring_seconds"), *tool = batch_find(b, "tool_seconds");
    struct spread time = {0}, tools = {0}, score = {0}, times_preempted = {0};
    int64_t slowest = 0;
    double most = -1;
    if (!seconds || !scoring || !preempted || b->n_rows == 0) return;
    for (int64_t i = 0; i < b->n_rows; i++) {
        spread_add(&time, seconds->f64[i]);
        spread_add(&tools, tool ? tool->f64[i] : 0);
        spread_add(&score, scoring->f64[i]);
        spread_add(&times_preempted, (double)preempted->i64[i]);
        const double all = seconds->f64[i] + scoring->f64[i] + (tool ? tool->f64[i] : 0);
        if (all > most) slowest = i;
        if (all > most) most = all;
    }
    spread_set(m, &time, "timing_s/agent_loop/generate_sequences");
    spread_set(m, &tools, "timing_s/agent_loop/tool_calls");
    spread_set(m, &score, "timing_s/agent_loop/compute_score");
    spread_set(m, &times_preempted, "timing_s/agent_loop/num_preempted");
    metrics_set(m, seconds->f64[slowest], "timing_s/agent_loop/slowest/generate_sequences");
    metrics_set(m, tool ? tool->f64[slowest] : 0, "timing_s/agent_loop/slowest/tool_calls");
    metrics_set(m, scoring->f64[slowest], "timing_s/agent_loop/slowest/compute_score");
    metrics_set_i64(m, preempted->i64[slowest], "timing_s/agent_loop/slowest/num_preempted");
    metrics_set_i64(m, batch_len(batch_find(b, "prompts"), slowest), "timing_s/agent_loop/slowest/prompt_length");
    metrics_set_i64(m, batch_len(batch_find(b, "responses"), slowest), "timing_s/agent_loop/slowest/response_length");
}

/* As verl's agent loop counts: the prompt, and whenever policy and environment take turns. */
static struct spread turns(const struct batch *b) {
    const struct batch_col *counted = batch_find(b, "num_turns");
    struct spread s = {0};
    for (int64_t i = 0; i < b->n_rows; i++) {
        int64_t n = counted ? counted->i64[i] : 2;
        for (int64_t k = 1; !counted && k < batch_n_segments(b, i); k++)
            n += batch_segment(b, i, k).kind != batch_segment(b, i, k - 1).kind;
        spread_add(&s, (double)n);
    }
    return s;
}

void ppo_turn_metrics(struct metrics *m, const struct batch *b, const char *prefix) {
    const struct spread s = turns(b);
    metrics_set(m, s.min, "%snum_turns/min", prefix);
    metrics_set(m, s.max, "%snum_turns/max", prefix);
    metrics_set(m, s.sum / (double)s.n, "%snum_turns/mean", prefix);
}

/* Calls of tools in an episode. */
static void tool_metrics(struct metrics *m, const struct batch *b) {
    const struct batch_col *calls = batch_find(b, "num_tool_calls");
    struct spread s = {0};
    for (int64_t i = 0; calls && i < b->n_rows; i++) spread_add(&s, (double)calls->i64[i]);
    if (s.n > 0) spread_set(m, &s, "tool_call_counts");
}

int ppo_data_metrics(const struct stage *st, const struct ppo_data_config *k, const struct batch *b) {
    static const char *const rows[][2] = {{"token_level_scores", "critic/score"}, {"token_level_rewards", "critic/rewards"}};
    static const char *const tokens[][2] = {
        {"advantages", "critic/advantages"}, {"returns", "critic/returns"}, {"values", "critic/values"}};
    struct metrics *m = &st->run->metrics;
    struct spread s;
    double clip;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) { /* what a program of verlc.h did not compute has no metric */
        s = row_sums(b, rows[i][0]);
        if (s.n > 0) spread_set(m, &s, rows[i][1]);
    }
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        s = token_spread(b, tokens[i][0]);
        if (batch_find(b, tokens[i][0])) spread_set(m, &s, tokens[i][1]);
    }
    if (batch_find(b, "values") && batch_find(b, "returns")) metrics_set(m, explained_variance(b), "critic/vf_explained_var");
    variance_proxy(m, b);
    if (st->schedule != PPO_SYNC) version_lag(st, b);
    const struct spread resp = response_lengths(m, b, k->max_response_length);
    const struct spread prompt = lengths(b, "prompts", k->max_prompt_length, &clip);
    spread_set(m, &prompt, "prompt_length");
    metrics_set(m, clip, "prompt_length/clip_ratio");
    agent_loop_metrics(m, b);
    ppo_turn_metrics(m, b, "");
    tool_metrics(m, b);
    /* groups that teach nothing: every sample of the prompt has the same score */
    const struct batch_col *group = batch_find(b, "group"), *score = batch_find(b, "score");
    int64_t groups = 0, flat = 0;
    for (int64_t lo = 0, hi; lo < b->n_rows; lo = hi) {
        bool same = true;
        for (hi = lo; hi < b->n_rows && group->i64[hi] == group->i64[lo]; hi++) same &= score->f64[hi] == score->f64[lo];
        groups++;
        flat += same;
    }
    metrics_set(m, groups ? (double)flat / (double)groups : 0, "train/zero_variance_groups");
    const double total = prompt.sum + resp.sum;
    static const char *const balanced[] = {"min", "max", "balanced_min", "balanced_max", "mean"};
    for (int i = 0; i < 5; i++) metrics_set(m, total, "global_seqlen/%s", balanced[i]); /* one rank */
    metrics_set(m, 0, "global_seqlen/minmax_diff");
    double step = 0, t;
    static const char *const stages[] = {
        "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "dump_rollout_generations"};
    char name[64];
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        snprintf(name, sizeof name, "timing_s/%s", stages[i]);
        if (metrics_get(m, name, &t)) step += t;
    }
    metrics_set(m, step, "timing_s/step");
    if (st->schedule == PPO_FULLY_ASYNC && step > 0 && metrics_get(m, "timing_s/gen", &t))
        metrics_set(m, t / step, "fully_async/trainer/idle_ratio");
    if (metrics_get(m, "timing_s/gen", &t)) metrics_set(m, t * 1000 / resp.sum, "timing_per_token_ms/gen");
    static const char *const whole[] = {"ref", "values", "adv", "update_critic", "update_actor"};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        snprintf(name, sizeof name, "timing_s/%s", whole[i]);
        if (metrics_get(m, name, &t)) metrics_set(m, t * 1000 / total, "timing_per_token_ms/%s", whole[i]);
    }
    metrics_set(m, total, "perf/total_num_tokens");
    metrics_set(m, step, "perf/time_per_step");
    metrics_set(m, step > 0 ? total / step / st->worker->n_ranks : 0, "perf/throughput"); /* a device's, as verl */
    return st->worker->ops->memory(st->worker, st->run, "actor/");
}

/* ---- dumps: one JSON object a sample (verl's _dump_generations) ---- */

/* NULL: none; row NULL: a batch without the data's columns. */
static json_t *ground_truth(const struct batch_col *row, int64_t i) {
    return row ? json_object_get(json_object_get(row->json[i], "reward_model"), "ground_truth") : NULL;
}

static int write_dump(const struct stage *s, const struct tokenizer *tok, const struct batch *b, const char *dir) {
    struct batch_col *prompts;
    struct buf out = {0}, text = {0};
    int rc = 0;
    TRY(batch_get(b, "prompts", BATCH_I32, &prompts));
    const struct batch_col *resp = batch_find(b, "text"), *score = batch_find(b, "score"), *row = batch_find(b, "row"),
                           *extra = batch_find(b, "reward_extra_info"), *status = batch_find(b, "reward_status");
    for (int64_t i = 0; i < b->n_rows; i++) {
        buf_reset(&text);
        TRYG(tokenizer_decode(tok, prompts->i32 + prompts->off[i], batch_len(prompts, i), true, &text), out);
        json_t *gt = ground_truth(row, i);
        json_t *o = json_pack("{s:s%, s:s%, s:O?, s:o, s:I}", "input", text.p ? text.p : "", text.n, "output", resp->str[i],
                              resp->str_len[i], "gts", gt, "score", isnan(score->f64[i]) ? json_null() : json_real(score->f64[i]),
                              "step", (json_int_t)s->run->step);
        if (!o) FAILG(out, ERR_INTERNAL, "a generated sample cannot be written as JSON");
        if (!gt) json_object_set_new(o, "gts", json_null());
        if (extra) json_object_update_missing(o, extra->json[i]);
        if (status && strcmp(status->str[i], "score") != 0) json_object_set_new(o, "reward_status", json_string(status->str[i]));
        rc = json_dump_line(&out, o);
        json_decref(o);
        if (rc < 0) goto out;
        TRYG(buf_addc(&out, '\n'), out);
    }
    TRYG(file_mkdirs(dir), out);
    char *path = xasprintf("%s/%lld.jsonl", dir, (long long)s->run->step);
    rc = file_write_atomic(path, out.p ? out.p : "", out.n);
    free(path);
out:
    buf_free(&out);
    buf_free(&text);
    return rc;
}

void ppo_dump(const struct stage *s, const struct tokenizer *tok, const struct batch *b, const char **dir) {
    if (!*dir || write_dump(s, tok, b, *dir) == 0) return;
    log_warn("the samples of step %lld were not written: %s; the run continues without these files", (long long)s->run->step,
             err_msg());
    *dir = NULL;
}

/* ---- samples for run.db ---- */

/* Numbers of a row's tokens as run.db has them; room for the longest row. */
struct token_numbers {
    float *entropy, *ref_logp, *advantages;
    uint16_t *bytes;
};

static struct token_numbers token_numbers_alloc(const struct batch *b) {
    const struct batch_col *resp = batch_find(b, "responses");
    int64_t n = 1;
    for (int64_t i = 0; i < b->n_rows; i++) n = batch_len(resp, i) > n ? batch_len(resp, i) : n;
    float *block = xmalloc((size_t)n * (3 * sizeof *block + sizeof(uint16_t)));
    return (struct token_numbers){block, block + n, block + 2 * n, (uint16_t *)(block + 3 * n)};
}

/* The numbers of a row, NULL where the column is missing or one of them is. */
static const float *row_numbers(const struct batch *b, const char *name, int64_t i, float *out) {
    const struct batch_col *c = batch_find(b, name);
    if (!c || batch_len(c, i) != batch_len(batch_find(b, "responses"), i)) return NULL;
    bool all = true;
    for (int64_t t = c->off[i]; t < c->off[i + 1]; t++) {
        out[t - c->off[i]] = c->type == BATCH_F32 ? c->f32[t] : (float)c->f64[t];
        all = all && !isnan(out[t - c->off[i]]);
    }
    return all ? out : NULL;
}

static bool differ(const float *v, int64_t n) {
    for (int64_t t = 1; t < n; t++)
        if (v[t] != v[0]) return true;
    return false;
}

static void add_token_numbers(struct track_sample *x, const struct batch *b, int64_t i, const struct token_numbers *at) {
    const struct batch_col *bytes = batch_find(b, "token_bytes");
    x->entropy = row_numbers(b, "entropys", i, at->entropy);
    x->ref_logp = row_numbers(b, "ref_log_prob", i, at->ref_logp);
    x->advantages = row_numbers(b, "advantages", i, at->advantages);
    if (x->advantages && !differ(x->advantages, x->n)) x->advantages = NULL;
    if (!bytes) return;
    for (int64_t t = 0; t < x->n; t++) at->bytes[t] = (uint16_t)bytes->i32[bytes->off[i] + t];
    x->token_bytes = at->bytes;
}

static int64_t number_of(const struct batch *b, const char *name, int64_t i) {
    const struct batch_col *c = batch_find(b, name);
    return c ? c->i64[i] : -1;
}

/* That of the first token that the policy wrote; NaN: it wrote none. */
static double first_advantage(const struct batch *b, const struct batch_col *adv, int64_t i) {
    for (int64_t k = 0; k < batch_n_segments(b, i); k++) {
        const struct segment x = batch_segment(b, i, k);
        if (x.kind == SEGMENT_POLICY && x.n > 0) return adv->f64[adv->off[i] + x.begin];
    }
    return NAN;
}

static struct track_sample sample_of(const struct stage *s, const struct batch *b, int64_t i) {
    const struct batch_col *prompts = batch_find(b, "prompts"), *resp = batch_find(b, "responses"),
                           *source = batch_find(b, "data_source"), *adv = batch_find(b, "advantages"),
                           *text = batch_find(b, "text"), *message = batch_find(b, "reward_message"),
                           *versions = s->schedule == PPO_SYNC ? NULL : batch_find(b, "param_versions"),
                           *segments = batch_find(b, BATCH_SEGMENTS), *episode = batch_find(b, "episode"),
                           *routes = batch_find(b, PPO_ROUTES);
    const json_t *gt = ground_truth(batch_find(b, "row"), i);
    return (struct track_sample){
        .step = s->run->step,
        .uid = batch_find(b, "uid")->i64[i],
        .index = batch_find(b, "sample_index")->i64[i],
        .data_source = source ? source->str[i] : "",
        .response = {text->str[i], text->str_len[i]},
        .ground_truth = {json_string_value(gt), json_string_length(gt)},
        .prompt_ids = prompts->i32 + prompts->off[i],
        .n_prompt = batch_len(prompts, i),
        .ids = resp->i32 + resp->off[i],
        .n = batch_len(resp, i),
        .logp = batch_find(b, "rollout_log_probs")->f32 + resp->off[i],
        .score = batch_find(b, "score")->f64[i],
        .advantage = adv ? first_advantage(b, adv, i) : NAN,
        .reward_status = batch_find(b, "reward_status")->str[i],
        .reward_message = message && message->str_len[i] > 0 ? message->str[i] : NULL,
        .extra = batch_find(b, "reward_extra_info")->json[i],
        .finish = batch_find(b, "finish")->str[i],
        .versions = versions ? versions->i32 + versions->off[i] : NULL,
        .segments = segments ? segments->i32 + segments->off[i] : NULL,
        .n_segments = batch_n_segments(b, i),
        .routes = routes ? routes->i32 + routes->off[i] : NULL,
        .n_routes = routes ? batch_len(routes, i) : 0,
        .episode = episode ? episode->json[i] : NULL,
        .prompt_number = number_of(b, "prompt_number", i),
        .place = number_of(b, "place", i),
    };
}

/* A prompt's text and the bytes of it that came with each token; that of the row before where it is the same prompt. */
struct prompt_text {
    struct buf text;
    uint16_t *bytes;
    int64_t cap, n;
    const int32_t *ids; /* what text is of; NULL: nothing yet */
};
static int prompt_text_of(struct prompt_text *p, const struct tokenizer *tok, struct track_sample *x) {
    const bool same = p->ids && p->n == x->n_prompt && memcmp(p->ids, x->prompt_ids, (size_t)p->n * sizeof *p->ids) == 0;
    if (!same) {
        xgrow((void **)&p->bytes, &p->cap, x->n_prompt, sizeof *p->bytes);
        buf_reset(&p->text);
        p->ids = NULL;
        TRY(tokenizer_decode_bytes(tok, x->prompt_ids, x->n_prompt, true, &p->text, p->bytes));
        p->ids = x->prompt_ids;
        p->n = x->n_prompt;
    }
    x->prompt = (struct track_text){p->text.p, p->text.n};
    x->prompt_bytes = p->bytes;
    return 0;
}

void ppo_record(const struct stage *s, const struct tokenizer *tok, const struct batch *b, const struct ppo_sampling *sp,
                bool validation) {
    struct buf whole_prompt = {0}, whole_response = {0};
    struct prompt_text prompt = {0};
    if (b->n_rows == 0) return;
    bool *traced = ppo_traced_rows(s, b);
    const struct token_numbers numbers = token_numbers_alloc(b);
    for (int64_t i = 0; i < b->n_rows; i++) {
        struct track_sample x = sample_of(s, b, i);
        if (prompt_text_of(&prompt, tok, &x) < 0) continue;
        x.validation = validation;
        if (validation) x.versions = NULL;
        add_token_numbers(&x, b, i, &numbers);
        const struct ppo_trace_args trace = {
            .tok = tok, .b = b, .row = i, .sp = sp, .prompt = &whole_prompt, .response = &whole_response};
        if (traced && traced[i]) ppo_trace_row(s, &trace, &x);
        track_sample(s->run->track, &x);
        json_decref((json_t *)(uintptr_t)x.trace.sampling);
    }
    buf_free(&prompt.text);
    free(prompt.bytes);
    buf_free(&whole_prompt);
    buf_free(&whole_response);
    free(traced);
    free(numbers.entropy);
}
