/* reward.c - from a finished response to its result: native graders by data_source, the
 * overlong penalty of verl's dapo manager, and the list of results to be polled.
 *
 * Native graders answer at once; the user's function is called in compute_score.c and
 * its calls finish in any order.
 * Invariant: whatever goes wrong with one sample is that sample's result, with a
 * status that is not a score; it never ends the run from here. */
#include "reward/reward_int.h"

#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct done {
    int64_t tag;
    struct reward_result result;
};
struct reward {
    struct reward_args args;     /* its pointers are not read after the start */
    struct reward__calls *calls; /* NULL: native */
    struct done *done;           /* finished, not yet polled: done[done_at .. n_done) */
    int64_t done_at, n_done, done_cap;
};

static const char *const status_names[REWARD_N_STATUS] = {"score", "timeout", "crash", "unparsed", "missing"};
const char *reward_status_name(enum reward_status s) { return status_names[s]; }

void reward_result_free(struct reward_result *r) {
    json_decref(r->extra);
    free(r->message);
    *r = (struct reward_result){0};
}

struct reward_result reward__failure(enum reward_status status, char *message) {
    return (struct reward_result){.status = status, .extra = json_object(), .message = message};
}

static struct reward_result scored(double score) {
    struct reward_result r = {.status = REWARD_SCORE, .score = score, .extra = json_object()};
    json_object_set_new(r.extra, "acc", json_real(score));
    return r;
}

/* ---- native graders ---- */

static struct reward_result grade_gsm8k(const struct reward_request *q, const char *truth) {
    return scored(reward_gsm8k(q->solution, q->n_solution, truth, q->method));
}

static struct reward_result grade_math(const struct reward_request *q, const char *truth) {
    return scored(reward_math(q->solution, q->n_solution, truth));
}

static struct reward_result grade_math_dapo(const struct reward_request *q, const char *truth) {
    char *pred;
    struct reward_result r = scored(reward_math_dapo(q->solution, q->n_solution, truth, &pred));
    json_object_set_new(r.extra, "score", json_real(r.score));
    json_object_set_new(r.extra, "acc", json_boolean(r.score > 0));
    json_object_set_new(r.extra, "pred", json_string(pred));
    free(pred);
    return r;
}

/* verl's default_compute_score; a name that ends in '*' is a prefix. grade NULL:
 * verl has a grader, this program has not. */
static const struct route {
    const char *data_source;
    struct reward_result (*grade)(const struct reward_request *q, const char *truth);
} routes[] = {
    {"openai/gsm8k", grade_gsm8k},
    {"lighteval/MATH", grade_math},
    {"DigitalLearningGmbH/MATH-lighteval", grade_math},
    {"HuggingFaceH4/MATH-500", grade_math},
    {"math_dapo", grade_math_dapo},
    {"math", grade_math_dapo},
    {"math_dapo_reasoning", grade_math_dapo},
    {"aime*", grade_math_dapo},
    {"numina_*", NULL},
    {"codecontests", NULL},
    {"apps", NULL},
    {"codeforces", NULL},
    {"taco", NULL},
    {"hiyouga/geometry3k", NULL},
    {"searchR1_*", NULL},
};

static const struct route *route_of(const char *data_source) {
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const char *name = routes[i].data_source, *star = strchr(name, '*');
        if (star ? strncmp(data_source, name, (size_t)(star - name)) == 0 : strcmp(data_source, name) == 0) return &routes[i];
    }
    return NULL;
}

/* The graders work on C strings.  A NUL in a text is this for them, a character that no text has, and comes back as
 * a NUL in what they say. */
static const struct {
    const char *p;
    size_t n;
} nul = {"", 1}, stand_in = {"\xF4\x8F\xBF\xBF", 4}; /* U+10FFFF */

static struct buf swap_nul(const char *s, size_t n, bool back) {
    const char *from = back ? stand_in.p : nul.p, *to = back ? nul.p : stand_in.p, *hit;
    const size_t n_from = back ? stand_in.n : nul.n, n_to = back ? nul.n : stand_in.n;
    struct buf out = {0};
    for (; (hit = memmem(s, n, from, n_from)); n -= (size_t)(hit - s) + n_from, s = hit + n_from) {
        buf_add(&out, s, (size_t)(hit - s));
        buf_add(&out, to, n_to);
    }
    buf_add(&out, s, n);
    return out;
}

static struct reward_result grade_without_nul(const struct route *r, const struct reward_request *q) {
    const char *truth = json_string_value(q->ground_truth);
    const size_t n_truth = json_string_length(q->ground_truth);
    if (!memchr(truth, 0, n_truth) && !(q->n_solution > 0 && memchr(q->solution, 0, q->n_solution))) return r->grade(q, truth);
    struct buf want = swap_nul(truth, n_truth, false), said = swap_nul(q->n_solution > 0 ? q->solution : "", q->n_solution, false);
    struct reward_request clean = *q;
    clean.solution = said.p;
    clean.n_solution = said.n;
    struct reward_result result = r->grade(&clean, want.p);
    const json_t *pred = json_object_get(result.extra, "pred");
    if (pred) {
        struct buf text = swap_nul(json_string_value(pred), json_string_length(pred), true);
        json_object_set_new(result.extra, "pred", json_stringn(text.p, text.n));
        buf_free(&text);
    }
    buf_free(&want);
    buf_free(&said);
    return result;
}

static struct reward_result grade(const struct reward_request *q) {
    const char *source = q->data_source ? q->data_source : "";
    const struct route *r = route_of(source);
    if (!r || !r->grade)
        return reward__failure(REWARD_MISSING, xasprintf("data_source '%s' has no %sgrader; give a compute_score with "
                                                         "custom_reward_function.path",
                                                         source, r ? "native " : ""));
    if (!json_is_string(q->ground_truth))
        return reward__failure(REWARD_MISSING,
                               xasprintf("reward_model.ground_truth of data_source '%s' is %s, not a string", source,
                                         q->ground_truth && !json_is_null(q->ground_truth) ? "of another type" : "missing"));
    return grade_without_nul(r, q);
}

/* ---- the overlong penalty (verl's DAPORewardManager) ---- */

int reward_check_overlong(const struct reward_args *a) {
    enum { LONGEST = 1 << 24 };
    if (a->overlong_len <= 0 || (a->max_resp_len >= a->overlong_len && a->max_resp_len <= LONGEST)) return 0;
    FAIL(ERR_INVAL, "reward_kwargs.max_resp_len (%lld) must be at least overlong_buffer_cfg.len (%lld) and at most 2^24",
         (long long)a->max_resp_len, (long long)a->overlong_len);
}

void reward_penalise_overlong(const struct reward_args *a, int64_t response_len, struct reward_result *r) {
    if (a->overlong_len <= 0 || r->status != REWARD_SCORE) return;
    const int64_t over = response_len - (a->max_resp_len - a->overlong_len);
    const double penalty = fmin(-(double)over / (double)a->overlong_len * a->overlong_penalty_factor, 0);
    r->score += penalty;
    if (!a->overlong_log) return;
    json_object_set_new(r->extra, "overlong_reward", json_real(penalty));
    json_object_set_new(r->extra, "overlong", json_boolean(penalty < 0));
}

/* ---- results that are ready ---- */

static void add_done(struct reward *r, int64_t tag, struct reward_result result) {
    if (r->done_at == r->n_done) r->done_at = r->n_done = 0;
    xgrow((void **)&r->done, &r->done_cap, r->n_done + 1, sizeof *r->done);
    r->done[r->n_done++] = (struct done){tag, result};
}

static int take_call(struct reward *r, double wait_s, struct reward__called *out) {
    const int rc = reward__call_take(r->calls, wait_s, out);
    if (rc == 1) reward_penalise_overlong(&r->args, out->response_len, &out->result);
    return rc;
}

/* ---- public ---- */

int reward_create(struct reward **out, const struct reward_args *args) {
    TRY(reward_check_overlong(args));
    struct reward *r = xcalloc(1, sizeof *r);
    r->args = *args;
    const int rc = args->path ? reward__calls_create(&r->calls, args) : 0;
    if (rc < 0) {
        reward_destroy(r);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *out = r;
    return 0;
}

void reward_drop(struct reward *r) {
    if (r->calls) reward__calls_cancel(r->calls);
    for (int64_t i = r->done_at; i < r->n_done; i++) reward_result_free(&r->done[i].result);
    r->done_at = r->n_done = 0;
}

void reward_destroy(struct reward *r) {
    if (!r) return;
    reward_drop(r);
    reward__calls_destroy(r->calls);
    free(r->done);
    free(r);
}

int reward_score(struct reward *r, const struct reward_request *q, struct reward_result *out) {
    if (!r->calls) {
        *out = grade(q);
        reward_penalise_overlong(&r->args, q->response_len, out);
        return 0;
    }
    struct reward__called c;
    TRY(reward__call_send(r->calls, q, -1));
    for (;;) { /* the helpers' deadlines bound this wait */
        const int rc = take_call(r, 1, &c);
        TRY(rc);
        if (rc == 1 && c.tag == -1) break;
        if (rc == 1) add_done(r, c.tag, c.result);
    }
    *out = c.result;
    return 0;
}

int reward_submit(struct reward *r, const struct reward_request *q, int64_t tag) {
    struct reward_result result;
    if (r->calls) return reward__call_send(r->calls, q, tag);
    TRY(reward_score(r, q, &result));
    add_done(r, tag, result);
    return 0;
}

int reward_poll(struct reward *r, double wait_s, int64_t *tag, struct reward_result *out) {
    if (r->done_at < r->n_done) {
        *tag = r->done[r->done_at].tag;
        *out = r->done[r->done_at++].result;
        return 1;
    }
    struct reward__called c;
    const int rc = r->calls ? take_call(r, wait_s, &c) : 0;
    if (rc == 1) {
        *tag = c.tag;
        *out = c.result;
    }
    return rc;
}

int64_t reward_pending(const struct reward *r) { return r->n_done - r->done_at + (r->calls ? reward__calls_pending(r->calls) : 0); }
