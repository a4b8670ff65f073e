/* show_sample.c - samples in a terminal: prompt, response with its tokens coloured by a number, score, what the scorer said. */
#include "view/show.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/encoding/number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- colours of tokens ---- */

/* Black on a background of the 256 colours; from the limit on, upwards. */
struct level {
    double from;
    const char *sgr, *text;
};
struct scale {
    const char *name;
    const struct level *levels;
    int n;
};
/* Surprising tokens stand out; what is usual has no colour. */
static const struct level by_nats[] = {{0.5, "30;48;5;230", "0.5"},
                                       {1, "30;48;5;222", "1"},
                                       {2, "30;48;5;215", "2"},
                                       {4, "30;48;5;209", "4"},
                                       {8, "30;48;5;203", "8"}};
static const struct level by_sign[] = {{-INFINITY, "30;48;5;203", "< -1"},
                                       {-1, "30;48;5;217", "< -0.1"},
                                       {-0.1, NULL, ""},
                                       {0.1, "30;48;5;157", "> 0.1"},
                                       {1, "30;48;5;77", "> 1"}};
static const struct scale scales[] = {
    [SHOW_LOGP] = {"-log-prob", by_nats, 5},
    [SHOW_ENTROPY] = {"entropy", by_nats, 5},
    [SHOW_ADVANTAGE] = {"advantage", by_sign, 5},
    [SHOW_KL] = {"log-prob less the reference's", by_sign, 5},
};

static const char *colour_of(enum show_colour by, double v) {
    const char *sgr = NULL;
    for (int i = 0; i < scales[by].n; i++)
        if (v >= scales[by].levels[i].from) sgr = scales[by].levels[i].sgr;
    return sgr;
}

static bool by_environment(const struct run_sample *s, int64_t i) {
    int64_t k = 0;
    for (int64_t left = i; k < s->n_segments && left >= s->segments[2 * k]; k++) left -= s->segments[2 * k];
    return k < s->n_segments && s->segments[2 * k + 1];
}

/* Of token i; NaN: not recorded, or the environment's. */
static double value_of(const struct run_sample *s, enum show_colour by, int64_t i) {
    if (by_environment(s, i)) return NAN;
    switch (by) {
    case SHOW_LOGP: return s->logp ? -(double)s->logp[i] : NAN;
    case SHOW_ENTROPY: return s->entropy ? (double)s->entropy[i] : NAN;
    case SHOW_ADVANTAGE: return s->advantages ? (double)s->advantages[i] : s->advantage;
    default: return s->logp && s->ref_logp ? (double)s->logp[i] - (double)s->ref_logp[i] : NAN;
    }
}

static void legend(const struct terminal *t, const struct run_sample *s, enum show_colour by, struct buf *out) {
    const struct scale *k = &scales[by];
    if (s->n == 0) return;
    if (isnan(value_of(s, by, 0))) {
        buf_addf(out, "(this sample has no %s: it was not computed)\n", k->name);
        return;
    }
    if (!t->colour) return;
    buf_addf(out, "%s: ", k->name);
    for (int i = 0; i < k->n; i++)
        if (k->levels[i].sgr) term_add(t, out, k->levels[i].sgr, " %s ", k->levels[i].text);
    buf_adds(out, s->ends ? "\n" : " (not of this sample: an earlier verlc wrote it, without the tokens' texts)\n");
}

/* A newline ends the colour, which would go on to the edge, and is seen as ↵. */
static void token(const struct terminal *t, const char *s, size_t n, const char *sgr, struct buf *out) {
    for (const char *end = s + n; s < end;) {
        const char *newline = memchr(s, '\n', (size_t)(end - s)), *stop = newline ? newline : end;
        if (sgr) term_begin(t, out, sgr);
        term_text(out, s, (size_t)(stop - s), true);
        if (sgr && newline) buf_adds(out, "↵");
        if (sgr) term_end(t, out);
        if (newline) buf_addc(out, '\n');
        s = newline ? newline + 1 : end;
    }
}

/* Tokens [lo, hi) of the response, without colours as text. */
static void tokens_text(const struct terminal *t, const struct run_sample *s, enum show_colour by, int64_t lo, int64_t hi,
                        struct buf *out) {
    if (!t->colour && hi > lo) {
        const int64_t from = lo ? s->ends[lo - 1] : 0;
        term_text(out, s->response.p + from, (size_t)(s->ends[hi - 1] - from), true);
    }
    for (int64_t i = lo; t->colour && i < hi; i++) {
        const int64_t from = i ? s->ends[i - 1] : 0;
        const double v = value_of(s, by, i);
        const char *sgr = isnan(v) ? NULL : colour_of(by, v);
        if (s->ends[i] == from) continue;
        token(t, s->response.p + from, (size_t)(s->ends[i] - from), sgr, out);
    }
}

/* ---- a sample ---- */

static void heading(const struct terminal *t, const char *title, const char *more, struct buf *out) {
    term_add(t, out, TERM_BOLD, "── %s ", title);
    term_begin(t, out, TERM_DIM);
    buf_adds(out, more);
    for (int i = term_width(title, strlen(title)) + term_width(more, strlen(more)) + 4; i < t->width; i++) buf_adds(out, "─");
    term_end(t, out);
    buf_addc(out, '\n');
}

/* ---- turns: segments below a heading each, with the calls of a policy's and what came of them below ---- */

static void call_line(const struct terminal *t, const struct run_call *c, struct buf *out) {
    term_add(t, out, TERM_BOLD, "  call ");
    term_text(out, c->name.p, c->name.n, false);
    buf_addc(out, ' ');
    term_text(out, c->arguments.p, c->arguments.n, false);
    buf_addc(out, '\n');
}

/* whole: with its text, which no segment of the response has. */
static void result_line(const struct terminal *t, const struct run_call *c, bool whole, struct buf *out) {
    const bool ok = c->status.n == 2 && memcmp(c->status.p, "ok", 2) == 0;
    term_add(t, out, TERM_BOLD, "  result of ");
    term_text(out, c->name.p, c->name.n, false);
    buf_adds(out, ": ");
    term_begin(t, out, ok ? TERM_GREEN : TERM_RED);
    term_text(out, c->status.p, c->status.n, false);
    term_end(t, out);
    if (isfinite(c->seconds)) buf_addf(out, ", %.3g s", c->seconds);
    if (isfinite(c->reward)) buf_addf(out, ", reward %.4g", c->reward);
    if (c->truncated) buf_adds(out, ", cut");
    if (whole) buf_adds(out, ", not in the response: ");
    if (whole) term_text(out, c->result.p, c->result.n, false);
    buf_addc(out, '\n');
}

/* Of the calls that segment `of` made. */
static void lines_of(const struct terminal *t, const struct run_sample *s, int64_t of, bool results, bool whole, struct buf *out) {
    struct run_call c;
    for (int64_t i = 0; run_episode_call(s->episode, i, &c); i++) {
        if (c.segment != of) continue;
        if (results) result_line(t, &c, whole, out);
        else call_line(t, &c, out);
    }
}

static void segment_heading(const struct terminal *t, const struct run_sample *s, int64_t k, struct buf *out) {
    char *more = s->episode ? xasprintf("%d tokens, %s ", s->segments[2 * k], s->segments[2 * k + 1] ? "mask 0" : "trained") : NULL;
    heading(t, s->segments[2 * k + 1] ? "environment" : "response", more ? more : "", out);
    free(more);
}

/* The response below its heading, segments below one each. A last turn's calls may have results that are no part of it. */
static void response(const struct terminal *t, const struct run_sample *s, enum show_colour by, struct buf *out) {
    const int64_t several = s->ends && s->n_segments > 1 ? s->n_segments : 0;
    int64_t at = 0, open = several ? -1 : 0; /* open: the segment whose results are to come */
    if (!several) heading(t, "response", "", out);
    if (!several && s->ends) tokens_text(t, s, by, 0, s->n, out);
    if (!several && !s->ends) term_text(out, s->response.p, s->response.n, true);
    for (int64_t k = 0; k < several; at += s->segments[2 * k++]) {
        const bool policy = s->segments[2 * k + 1] == 0;
        segment_heading(t, s, k, out);
        if (!policy && open >= 0) lines_of(t, s, open, true, false, out);
        tokens_text(t, s, by, at, at + s->segments[2 * k], out);
        if (k + 1 < several || s->episode) buf_addc(out, '\n');
        if (policy) lines_of(t, s, k, false, false, out);
        open = policy ? k : -1;
    }
    if (!several && s->episode) buf_addc(out, '\n');
    if (!several) lines_of(t, s, 0, false, false, out);
    if (open >= 0) lines_of(t, s, open, true, true, out);
}

static void episode_line(const struct run_sample *s, struct buf *out) {
    const struct run_episode e = run_episode_of(s->episode);
    if (!s->episode) return;
    buf_addf(out, "episode: %lld turns, ended by ", (long long)e.turns);
    term_text(out, e.end, strlen(e.end), false);
    if (e.reason) buf_adds(out, " (");
    if (e.reason) term_text(out, e.reason, strlen(e.reason), false);
    buf_addf(out, "%s; %lld tool calls, %lld failed, %lld malformed, %lld dropped", e.reason ? ")" : "", (long long)e.calls,
             (long long)e.failed, (long long)e.malformed, (long long)e.dropped);
    if (e.outputs > 1) buf_addf(out, "; sample %lld of %lld of its episode", (long long)e.output + 1, (long long)e.outputs);
    buf_addc(out, '\n');
}

static void text_line(struct buf *out, const char *label, const char *s, size_t n) {
    if (n == 0) return;
    buf_addf(out, "%s: ", label);
    term_text(out, s, n, false);
    buf_addc(out, '\n');
}

static void facts(const struct terminal *t, const struct run_sample *s, struct buf *out) {
    struct buf extra = {0};
    term_add(t, out, TERM_BOLD, "sample %lld.%lld of step %lld%s", (long long)s->uid, (long long)s->index, (long long)s->step,
             s->validation ? ", validation" : "");
    buf_adds(out, "  ");
    term_text(out, s->data_source, strlen(s->data_source), false);
    buf_adds(out, "\nscore ");
    term_begin(t, out, isnan(s->score) ? TERM_RED : TERM_BOLD);
    if (isnan(s->score)) term_text(out, s->reward_status, strlen(s->reward_status), false);
    else term_number(out, s->score);
    term_end(t, out);
    buf_adds(out, "   advantage ");
    term_number(out, s->advantage);
    buf_addf(out, "   %lld + %lld tokens, ended by ", (long long)s->n_prompt, (long long)s->n);
    term_text(out, s->finish, strlen(s->finish), false);
    buf_addc(out, '\n');
    for (int64_t i = 0; i < s->n_runs; i++)
        buf_addf(out, "%s%d (%d)%s", i ? ", " : "versions of the weights (tokens): ", s->runs[2 * i + 1], s->runs[2 * i],
                 i + 1 < s->n_runs ? "" : "\n");
    for (int64_t k = 0; k < s->n_segments && s->n_segments > 1; k++)
        buf_addf(out, "%s%s (%d)%s", k ? ", " : "segments (tokens): ", run_segment_name(s, k), s->segments[2 * k],
                 k + 1 < s->n_segments ? "" : "\n");
    episode_line(s, out);
    text_line(out, "ground truth", s->ground_truth.p, s->ground_truth.n);
    if (s->reward_message) text_line(out, "reward", s->reward_message, strlen(s->reward_message));
    if (json_object_size(s->extra) > 0 && json_dump_line(&extra, s->extra) == 0) text_line(out, "extra", extra.p, extra.n);
    buf_free(&extra);
}

static void as_text(const struct show_args *a, const struct run_sample *s, struct buf *out) {
    const struct terminal *t = &a->term;
    facts(t, s, out);
    heading(t, "prompt", "", out);
    term_text(out, s->prompt.p, s->prompt.n, true);
    buf_addc(out, '\n');
    response(t, s, a->by, out);
    buf_addc(out, '\n');
    legend(t, s, a->by, out);
    buf_addc(out, '\n');
}

/* ---- JSON ---- */

static json_t *numbers(const float *v, int64_t n) {
    json_t *list = v ? json_array() : json_null();
    for (int64_t i = 0; v && i < n; i++) json_array_append_new(list, show_number(number_of_f32(v[i])));
    return list;
}
static json_t *ids(const int32_t *v, int64_t n) {
    json_t *list = v ? json_array() : json_null();
    for (int64_t i = 0; v && i < n; i++) json_array_append_new(list, json_integer(v[i]));
    return list;
}
static json_t *tokens(const struct run_sample *s) {
    json_t *list = s->ends ? json_array() : json_null();
    for (int64_t i = 0; s->ends && i < s->n; i++) {
        const int64_t from = i ? s->ends[i - 1] : 0;
        json_array_append_new(list, json_stringn(s->response.p + from, (size_t)(s->ends[i] - from)));
    }
    return list;
}

/* [[tokens, version], ...]; null: of before the step. */
static json_t *versions(const struct run_sample *s) {
    json_t *list = s->runs ? json_array() : json_null();
    for (int64_t i = 0; i < s->n_runs; i++) json_array_append_new(list, json_pack("[i, i]", s->runs[2 * i], s->runs[2 * i + 1]));
    return list;
}

static int as_json(const struct run_sample *s, struct buf *out) {
    json_t *o =
        json_pack("{s:I, s:I, s:I, s:I, s:b, s:s, s:o, s:o, s:s, s:s?, s:s}", "id", (json_int_t)s->id, "step", (json_int_t)s->step,
                  "uid", (json_int_t)s->uid, "sample", (json_int_t)s->index, "validation", s->validation, "data_source",
                  s->data_source, "score", show_number(s->score), "advantage", show_number(s->advantage), "reward_status",
                  s->reward_status, "reward_message", s->reward_message, "finish", s->finish);
    json_object_set_new(o, "prompt", json_stringn(s->prompt.p, s->prompt.n));
    json_object_set_new(o, "response", json_stringn(s->response.p, s->response.n));
    json_object_set_new(o, "ground_truth", json_stringn(s->ground_truth.p, s->ground_truth.n));
    json_object_set_new(o, "prompt_ids", ids(s->prompt_ids, s->n_prompt));
    json_object_set_new(o, "ids", ids(s->ids, s->n));
    json_object_set_new(o, "tokens", tokens(s));
    json_object_set_new(o, "versions", versions(s));
    if (s->n_segments > 1) json_object_set_new(o, "segments", run_segments_json(s));
    if (s->episode) json_object_set(o, "episode", s->episode);
    json_object_set_new(o, "logp", numbers(s->logp, s->n));
    json_object_set_new(o, "entropy", numbers(s->entropy, s->n));
    json_object_set_new(o, "ref_logp", numbers(s->ref_logp, s->n));
    json_object_set_new(o, "advantages", numbers(s->advantages, s->n));
    json_object_set_new(o, "extra", s->extra ? json_incref(s->extra) : json_null());
    const int rc = json_dump_line(out, o);
    json_decref(o);
    return rc == 0 ? buf_addc(out, '\n') : rc;
}

/* ---- which ---- */

struct shown {
    const struct show_args *a;
    struct buf *out;
    int64_t n, filtered;
};

static int show_one(void *arg, const struct run_sample *s) {
    struct shown *k = arg;
    if (!run_episode_fits(s->episode, &k->a->fits)) return k->filtered++, 0;
    k->n++;
    if (k->a->json) return as_json(s, k->out);
    as_text(k->a, s, k->out);
    return 0;
}

/* The last step that has samples, where none is given. */
static int find_step(struct run_reader *r, const struct show_args *a, int64_t *step) {
    struct run_steps s;
    *step = a->step;
    if (a->step >= 0) return 0;
    TRY(run_reader_sample_steps(r, a->validation, &s));
    const int64_t n = s.n;
    if (n > 0) *step = s.v[n - 1];
    run_steps_free(&s);
    if (n == 0) FAIL(ERR_INPUT, "%s has no samples%s yet", run_reader_dir(r), a->validation ? " of validation" : "");
    return 0;
}

int show_sample(struct run_reader *r, const struct show_args *a, struct buf *out) {
    struct shown k = {.a = a, .out = out};
    struct run_sample_query q = {.uid = a->uid, .index = a->index, .validation = a->validation, .whole = true};
    TRY(find_step(r, a, &q.step));
    TRY(run_reader_samples(r, &q, show_one, &k));
    if (k.n > 0) return 0;
    if (k.filtered > 0)
        FAIL(ERR_INPUT, "step %lld: none of %lld samples fits --tool, --failed-calls, --turns", (long long)q.step,
             (long long)k.filtered);
    char one[32] = "";
    if (a->index >= 0) snprintf(one, sizeof one, ".%lld", (long long)a->index);
    FAIL(ERR_INPUT, "step %lld has no sample %lld%s%s; 'verlc show %s --step %lld%s' lists its samples", (long long)q.step,
         (long long)a->uid, one, a->validation ? " of validation" : "", run_reader_dir(r), (long long)q.step,
         a->validation ? " --validation" : "");
}
