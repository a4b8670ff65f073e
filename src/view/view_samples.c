/* view_samples.c - a run's samples as JSON: of a step, of a prompt, their tokens, those without a score, search.
 *
 * Invariant: what is sent of a text is whole characters. */
#include "view/run_episode.h"
#include "view/view_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    EXCERPT_BYTES = 240,
    MAX_HITS = 500,
    MAX_IDS = 100000,
    MAX_ERROR_STEPS = 50,
    MAX_PROMPT_STEPS = 5000,
    PROMPT_EXCERPTS = 200,
    LINE_BYTES = 400
};

static json_t *f32_base64(const float *v, int64_t n) { return v ? view__base64(v, (size_t)n * sizeof *v) : json_null(); }

/* ---- of a step ---- */

int view__steps_answer(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    struct run_steps s = {0};
    bool validation;
    TRY(view__is_validation(g, &validation));
    TRY(view__reader(v, g, &r));
    TRY(run_reader_sample_steps(r, validation, &s));
    json_t *o = json_pack("{s:o}", "step", view__steps(s.v, s.n));
    run_steps_free(&s);
    return view__send(reply, o);
}

static int sample_query(struct view *v, const struct http_get *g, struct run_reader **r, struct run_sample_query *q) {
    *q = (struct run_sample_query){.uid = -1, .index = -1};
    TRY(http_param_i64(g, "step", 0, INT64_MAX, &q->step));
    TRY(http_param_i64(g, "uid", 0, INT64_MAX, &q->uid));
    TRY(http_param_i64(g, "id", 1, INT64_MAX, &q->id));
    TRY(http_param_i64(g, "offset", 0, INT64_MAX, &q->offset));
    TRY(http_param_i64(g, "limit", 1, 1000, &q->limit));
    TRY(view__is_validation(g, &q->validation));
    return view__reader(v, g, r);
}

/* The head of a sample: what both lists and single samples have. */
static json_t *sample_json(const struct run_sample *s) {
    json_t *o = json_pack("{s:I, s:I, s:I, s:I, s:I}", "id", (json_int_t)s->id, "uid", (json_int_t)s->uid, "sample",
                          (json_int_t)s->index, "tokens", (json_int_t)s->n, "prompt_tokens", (json_int_t)s->n_prompt);
    json_object_set_new(o, "score", view__number(s->score));
    json_object_set_new(o, "advantage", view__number(s->advantage));
    json_object_set_new(o, "status", view__text0(s->reward_status));
    json_object_set_new(o, "finish", view__text0(s->finish));
    if (!s->episode) return o;
    const struct run_episode e = run_episode_of(s->episode);
    json_object_set_new(o, "turns", json_integer(e.turns));
    json_object_set_new(o, "calls", json_integer(e.calls));
    json_object_set_new(o, "failed", json_integer(e.failed + e.malformed));
    json_object_set_new(o, "tools", run_episode_tools(s->episode));
    if (e.outputs > 1) json_object_set_new(o, "output", json_integer(e.output + 1));
    if (e.outputs > 1) json_object_set_new(o, "outputs", json_integer(e.outputs));
    return o;
}
static int add_sample(void *list, const struct run_sample *s) { return json_array_append_new(list, sample_json(s)); }

/* All samples of a query as {key: [...]}. */
static int answer_query(struct run_reader *r, const struct run_sample_query *q, int (*add)(void *, const struct run_sample *),
                        struct http_reply *reply) {
    json_t *list = json_array();
    const int rc = run_reader_samples(r, q, add, list);
    if (rc < 0) json_decref(list);
    TRY(rc);
    return view__send(reply, json_pack("{s:o}", "samples", list));
}

int view__samples(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    struct run_sample_query q;
    TRY(sample_query(v, g, &r, &q));
    return answer_query(r, &q, add_sample, reply);
}

static size_t whole_characters(const char *p, size_t n, size_t most) {
    if (n <= most) return n;
    for (n = most; n > 0 && ((unsigned char)p[n] & 0xc0) == 0x80;) n--;
    return n;
}
static json_t *excerpt(struct track_text t) { return view__text(t.p, whole_characters(t.p, t.n, EXCERPT_BYTES)); }

struct excerpts {
    json_t *list, *special; /* borrowed */
};
static int add_excerpt(void *arg, const struct run_sample *s) {
    const struct excerpts *e = arg;
    json_t *pair = json_array();
    json_array_append_new(pair, excerpt(run_user_message(s, e->special))); /* what stands before it is alike in a run */
    json_array_append_new(pair, excerpt(s->response));
    return json_array_append_new(e->list, pair);
}
int view__excerpts(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    struct run_sample_query q;
    TRY(sample_query(v, g, &r, &q));
    q.whole = true;
    if (q.limit == 0) q.limit = 100;
    struct run_meta m;
    TRY(run_reader_meta(r, &m));
    struct excerpts e = {json_array(), m.special_tokens};
    const int rc = run_reader_samples(r, &q, add_excerpt, &e);
    run_meta_free(&m);
    if (rc < 0) json_decref(e.list);
    TRY(rc);
    return view__send(reply, json_pack("{s:o}", "samples", e.list));
}

/* [[tokens, version], ...] */
static json_t *versions_json(const struct run_sample *s) {
    json_t *runs = json_array();
    for (int64_t i = 0; i < s->n_runs; i++) json_array_append_new(runs, json_pack("[i, i]", s->runs[2 * i], s->runs[2 * i + 1]));
    return runs;
}
static int add_whole(void *list, const struct run_sample *s) {
    json_t *o = sample_json(s);
    json_object_set_new(o, "response", view__text(s->response.p, s->response.n));
    json_object_set_new(o, "message", view__text0(s->reward_message));
    if (s->extra) json_object_set(o, "extra", s->extra);
    if (s->n_runs > 1) json_object_set_new(o, "versions", versions_json(s));
    if (s->n_segments > 1) json_object_set_new(o, "segments", run_segments_json(s));
    if (s->episode) json_object_set(o, "episode", s->episode);
    if (json_array_size(list) == 0) { /* of the whole group */
        json_object_set_new(o, "prompt", view__text(s->prompt.p, s->prompt.n));
        json_object_set_new(o, "ground_truth", view__text(s->ground_truth.p, s->ground_truth.n));
        json_object_set_new(o, "data_source", view__text0(s->data_source));
    }
    return json_array_append_new(list, o);
}
int view__group(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    struct run_sample_query q;
    TRY(sample_query(v, g, &r, &q));
    q.whole = true;
    return answer_query(r, &q, add_whole, reply);
}

/* ---- a prompt in all steps ---- */

static int add_of_prompt(void *list, const struct run_sample *s) {
    json_t *o = sample_json(s);
    json_object_set_new(o, "step", json_integer(s->step));
    return json_array_append_new(list, o);
}
static int add_first(void *o, const struct run_sample *s) {
    char step[24];
    snprintf(step, sizeof step, "%lld", (long long)s->step);
    json_object_set_new(json_object_get(o, "excerpts"), step, excerpt(s->response));
    if (json_object_get(o, "prompt")) return 0;
    json_object_set_new(o, "prompt", view__text(s->prompt.p, s->prompt.n));
    json_object_set_new(o, "ground_truth", view__text(s->ground_truth.p, s->ground_truth.n));
    return json_object_set_new(o, "data_source", view__text0(s->data_source));
}
/* The newest MAX_PROMPT_STEPS steps that have it; of the newest of these the beginning of the first response, and the prompt's
 * text as the last one has it. */
int view__prompt(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    struct run_sample_query q;
    struct run_steps steps = {0};
    TRY(sample_query(v, g, &r, &q));
    if (q.uid < 0) FAIL(ERR_INVAL, "uid: a prompt's is wanted");
    TRY(run_reader_prompt_steps(r, q.uid, q.validation, &steps));
    json_t *o = json_pack("{s:{}}", "excerpts"), *list = json_array();
    int rc = 0;
    for (int64_t i = steps.n > MAX_PROMPT_STEPS ? steps.n - MAX_PROMPT_STEPS : 0; i < steps.n && rc == 0; i++) {
        q.step = steps.v[i];
        rc = run_reader_samples(r, &q, add_of_prompt, list);
    }
    q.whole = true;
    q.limit = 1;
    for (int64_t i = steps.n; i-- > 0 && i >= steps.n - PROMPT_EXCERPTS && rc == 0;) {
        q.step = steps.v[i];
        rc = run_reader_samples(r, &q, add_first, o);
    }
    json_object_set_new(o, "steps", json_integer(steps.n));
    json_object_set_new(o, "samples", list);
    run_steps_free(&steps);
    if (rc < 0) json_decref(o);
    TRY(rc);
    return view__send(reply, o);
}

/* ---- tokens ---- */

/* Where n tokens end in a text, in UTF-16 units, as a browser counts. */
static json_t *ends_json(struct track_text t, const int64_t *bytes, int64_t n) {
    if (!bytes) return json_null();
    int32_t *ends = xmalloc((size_t)(n + 1) * sizeof *ends), units = 0;
    size_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        for (; at < t.n && (int64_t)at < bytes[i]; at++) {
            const unsigned char c = (unsigned char)t.p[at];
            units += (c & 0xc0) != 0x80 ? 1 + (c >= 0xf0) : 0;
        }
        ends[i] = units;
    }
    json_t *o = view__base64(ends, (size_t)n * sizeof *ends);
    free(ends);
    return o;
}
static int add_prompt_tokens(void *list, const struct run_sample *s) {
    json_t *o = json_object();
    json_object_set_new(o, "ids", view__base64(s->prompt_ids, (size_t)(s->prompt_ids ? s->n_prompt : 0) * sizeof *s->prompt_ids));
    json_object_set_new(o, "ends", ends_json(s->prompt, s->prompt_ends, s->n_prompt));
    return json_array_append_new(list, o);
}
static int add_tokens(void *list, const struct run_sample *s) {
    json_t *o = json_object();
    json_object_set_new(o, "ids", view__base64(s->ids, (size_t)(s->ids ? s->n : 0) * sizeof *s->ids));
    json_object_set_new(o, "ends", ends_json(s->response, s->ends, s->n));
    json_object_set_new(o, "logp", f32_base64(s->logp, s->n));
    json_object_set_new(o, "entropy", f32_base64(s->entropy, s->n));
    json_object_set_new(o, "ref_logp", f32_base64(s->ref_logp, s->n));
    json_object_set_new(o, "advantages", f32_base64(s->advantages, s->n));
    json_object_set_new(o, "advantage", view__number(s->advantage));
    return json_array_append_new(list, o);
}
int view__tokens(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    struct run_sample_query q;
    int64_t prompt = 0;
    TRY(http_param_i64(g, "prompt", 0, 1, &prompt));
    TRY(sample_query(v, g, &r, &q));
    if (q.id == 0) FAIL(ERR_INVAL, "id: a sample's is wanted");
    q.whole = true;
    return answer_query(r, &q, prompt ? add_prompt_tokens : add_tokens, reply);
}

/* ---- samples without a score ---- */

/* by_status: status -> an example and how many there are */
static int count_error(void *by_status, const struct run_sample *s) {
    if (isfinite(s->score)) return 0;
    const char *status = s->reward_status && *s->reward_status ? s->reward_status : "unknown";
    json_t *o = json_object_get(by_status, status);
    if (!o) {
        o = sample_json(s);
        json_object_set_new(o, "step", json_integer(s->step));
        json_object_set_new(o, "message", view__text0(s->reward_message));
        json_object_set_new(o, "count", json_integer(0));
        json_object_set_new(by_status, status, o);
    }
    return json_integer_set(json_object_get(o, "count"), json_integer_value(json_object_get(o, "count")) + 1);
}

int view__errors(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    struct run_series s = {0};
    json_t *by_status = json_object();
    int rc = view__reader(v, g, &r);
    if (rc == 0) rc = run_reader_series(r, "reward/num_errors", -1, &s);
    int64_t looked = 0;
    double all = 0;
    for (int64_t i = s.n; i-- > 0 && rc == 0;) {
        if (!(s.value[i] > 0) || !isfinite(s.value[i])) continue;
        all += s.value[i];
        const struct run_sample_query q = {.step = s.step[i], .uid = -1, .index = -1};
        if (looked++ < MAX_ERROR_STEPS) rc = run_reader_samples(r, &q, count_error, by_status);
    }
    run_series_free(&s);
    if (rc < 0) json_decref(by_status);
    TRY(rc);
    return view__send(reply, json_pack("{s:f, s:I, s:I, s:o}", "all", all, "steps", (json_int_t)looked, "looked",
                                       (json_int_t)(looked < MAX_ERROR_STEPS ? looked : MAX_ERROR_STEPS), "by_status", by_status));
}

/* ---- search ---- */

struct search {
    struct run_reader *reader;
    struct run_search *search;
    bool ids; /* only which samples, not what is in them */
    int64_t n_hits, most;
    double reported;
};

/* The line around its match: {from, to} are in bytes, cut at characters. */
static json_t *match_json(const struct run_match *m) {
    const char *p = m->line.p;
    size_t from = m->lo > LINE_BYTES / 4 ? m->lo - LINE_BYTES / 4 : 0;
    while (from > 0 && ((unsigned char)p[from] & 0xc0) == 0x80) from--;
    const size_t to = from + whole_characters(p + from, m->line.n - from, LINE_BYTES);
    const size_t hi = m->hi < to ? m->hi : to, lo = m->lo < hi ? m->lo : hi;
    json_t *o =
        json_pack("{s:I, s:I, s:I, s:I, s:b, s:b}", "id", (json_int_t)m->id, "step", (json_int_t)m->step, "uid", (json_int_t)m->uid,
                  "sample", (json_int_t)m->index, "validation", m->validation, "response", m->in_response);
    json_object_set_new(o, "score", view__number(m->score));
    json_object_set_new(o, "before", view__text(p + from, lo - from));
    json_object_set_new(o, "match", view__text(p + lo, hi - lo));
    json_object_set_new(o, "after", view__text(p + hi, to - hi));
    return o;
}

static int add_line(struct buf *out, json_t *o) {
    const int rc = json_dump_line(out, o);
    json_decref(o);
    return rc < 0 ? rc : buf_addc(out, '\n');
}

/* Some 10 ms of it; RUN_SEARCH_END or RUN_SEARCH_MORE. ids: of the samples found, where those are requested. */
static int search_slice(struct search *s, json_t *ids, struct buf *out) {
    struct run_match m;
    const double end = clock_now() + 0.01;
    while (clock_now() < end && s->n_hits < s->most) {
        const int what = run_search_next(s->search, 0.01, &m);
        TRY(what);
        if (what == RUN_SEARCH_END) return what;
        if (what != RUN_SEARCH_MATCH) continue;
        s->n_hits++;
        if (s->ids) json_array_append_new(ids, json_integer(m.id));
        else TRY(add_line(out, match_json(&m)));
        run_search_skip_sample(s->search);
    }
    return RUN_SEARCH_MORE;
}

static int search_next(void *state, struct buf *out) {
    struct search *s = state;
    json_t *ids = json_array();
    int64_t done, total;
    int what = search_slice(s, ids, out);
    if (what >= 0 && json_array_size(ids) > 0 && add_line(out, json_pack("{s:O}", "ids", ids)) < 0) what = ERR_INTERNAL;
    json_decref(ids);
    TRY(what);
    const bool more = what == RUN_SEARCH_MORE && s->n_hits < s->most;
    if (more && out->n == 0 && clock_now() - s->reported < 0.2) return 1;
    run_search_progress(s->search, &done, &total);
    s->reported = clock_now();
    TRY(add_line(out, json_pack("{s:I, s:I, s:b, s:b}", "done", (json_int_t)done, "total", (json_int_t)total, "more", more, "full",
                                s->n_hits >= s->most)));
    return more;
}

static void search_close(void *state) {
    struct search *s = state;
    run_search_destroy(s->search);
    run_reader_close(s->reader);
    free(s);
}

static int number_param(const struct http_get *g, const char *name, double *out) {
    const char *p = http_param(g, name);
    char *end;
    if (!p) return 0;
    *out = strtod(p, &end);
    if (!*p || *end || !isfinite(*out)) FAIL(ERR_INVAL, "%s=%.40s: a number is wanted", name, p);
    return 1;
}
static int score_range(const struct http_get *g, struct run_search_args *a) {
    int low, high;
    a->min = -INFINITY;
    a->max = INFINITY;
    TRY(low = number_param(g, "min", &a->min));
    TRY(high = number_param(g, "max", &a->max));
    a->ranged = low || high;
    return 0;
}

/* With a reader of its own, since it outlives this call. */
int view__search(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run_reader *r;
    const char *pattern = http_param(g, "q"), *in = http_param(g, "in");
    struct run_search_args a = {.pattern = pattern, .ignore_case = true, .prompts = true, .responses = true, .step = -1};
    int64_t match_case = 0;
    int64_t ids = 0;
    if (!pattern || !*pattern) FAIL(ERR_INVAL, "q: what to search for is missing");
    TRY(http_param_i64(g, "case", 0, 1, &match_case));
    TRY(http_param_i64(g, "step", -1, INT64_MAX, &a.step));
    TRY(http_param_i64(g, "ids", 0, 1, &ids));
    TRY(score_range(g, &a));
    a.ignore_case = !match_case;
    if (in && strcmp(in, "prompt") == 0) a.responses = false;
    if (in && strcmp(in, "response") == 0) a.prompts = false;
    TRY(view__reader(v, g, &r));
    struct search *s = xcalloc(1, sizeof *s);
    s->ids = ids;
    s->most = ids ? MAX_IDS : MAX_HITS;
    int rc = run_reader_open(&s->reader, run_reader_dir(r));
    if (rc == 0) rc = run_search_create(&s->search, s->reader, &a);
    if (rc < 0) search_close(s);
    TRY(rc);
    reply->type = "application/x-ndjson";
    reply->stream = (struct http_stream){.next = search_next, .close = search_close, .state = s};
    return 0;
}
