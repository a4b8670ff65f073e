/* reward.c - from a finished response to its result: a native grader (grade.c) or the user's function (custom_reward_function.c),
 * the overlong penalty of verl's dapo manager, and the list of results to be polled.
 *
 * Native graders answer at once; programs are run (grade_code.c), the user's function is called in custom_reward_function.c, and
 * these finish in any order.
 * Invariant: whatever goes wrong with one sample is that sample's result, with a
 * status that is not a score; it never ends the run from here. */
#include "reward/reward_int.h"

#include "base/clock.h"
#include "base/err.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TURN_S 0.05 /* of waiting, where two may have a result */

struct done {
    int64_t tag;
    struct reward_result result;
};
struct reward {
    struct reward_args args;         /* its pointers are not read after the start, but for these copies: */
    char *python, *service_url;      /* of code */
    struct reward__calls *calls;     /* NULL: native */
    struct reward__graders *graders; /* NULL: calls */
    struct reward__calls *code;      /* of rows that are programs; NULL: there was none yet */
    struct done *done;               /* finished, not yet polled: done[done_at .. n_done) */
    int64_t done_at, n_done, done_cap;
    bool reported[REWARD_N_STATUS];
};

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

/* ---- scores that are none ---- */

void reward_check_score(struct reward_result *r) {
    if (r->status != REWARD_SCORE || fabs(r->score) <= (double)FLT_MAX) return; /* false for NaN too */
    r->status = REWARD_UNPARSED;
    free(r->message);
    r->message = xasprintf("the score %g is beyond what float32 holds (%g)", r->score, (double)FLT_MAX);
    r->score = 0;
}

/* ---- results that are ready ---- */

static void add_done(struct reward *r, int64_t tag, struct reward_result result) {
    if (r->done_at == r->n_done) r->done_at = r->n_done = 0;
    xgrow((void **)&r->done, &r->done_cap, r->n_done + 1, sizeof *r->done);
    r->done[r->n_done++] = (struct done){tag, result};
}

/* Of the graders and of code: waits for the one that has work in flight; where both have, they take turns. */
static int take_grade(struct reward *r, double wait_s, struct reward__called *out) {
    const bool code = r->code && reward__calls_pending(r->code) > 0, other = reward__graders_pending(r->graders) > 0;
    const double deadline = clock_awake() + wait_s, turn = fmin(wait_s, code && other ? TURN_S : wait_s);
    int rc = 0;
    do {
        if (code) rc = reward__call_take(r->code, turn, out);
        if (rc == 0) rc = reward__graders_take(r->graders, code ? 0 : turn, out);
    } while (rc == 0 && code && other && clock_awake() < deadline);
    return rc;
}

static void finish(const struct reward *r, int64_t response_len, struct reward_result *result) {
    reward_penalise_overlong(&r->args, response_len, result);
    reward_check_score(result);
}

static int take_call(struct reward *r, double wait_s, struct reward__called *out) {
    const int rc = r->calls ? reward__call_take(r->calls, wait_s, out) : take_grade(r, wait_s, out);
    if (rc == 1) finish(r, out->response_len, &out->result);
    return rc;
}

/* ---- public ---- */

int reward_create(struct reward **out, const struct reward_args *args) {
    TRY(reward_check_overlong(args));
    struct reward *r = xcalloc(1, sizeof *r);
    r->args = *args;
    r->args.python = r->python = args->python ? xstrdup(args->python) : NULL;
    r->args.code.service_url = r->service_url = args->code.service_url ? xstrdup(args->code.service_url) : NULL;
    const int rc = args->path || args->manager ? reward__calls_create(&r->calls, args) : reward__graders_create(&r->graders, args);
    if (rc < 0) {
        reward_destroy(r);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *out = r;
    return 0;
}

void reward_drop(struct reward *r) {
    if (r->calls) reward__calls_cancel(r->calls);
    if (r->graders) reward__graders_cancel(r->graders);
    if (r->code) reward__calls_cancel(r->code);
    for (int64_t i = r->done_at; i < r->n_done; i++) reward_result_free(&r->done[i].result);
    r->done_at = r->n_done = 0;
}

void reward_destroy(struct reward *r) {
    if (!r) return;
    reward_drop(r);
    reward__calls_destroy(r->calls);
    reward__graders_destroy(r->graders);
    reward__calls_destroy(r->code);
    free(r->python);
    free(r->service_url);
    free(r->done);
    free(r);
}

int reward_check_sources(struct reward *r, const char *const *sources, int64_t n) {
    TRY(r->graders ? reward__graders_check(r->graders, sources, n) : 0);
    for (int64_t i = 0; r->graders && i < n; i++)
        if (reward__graders_is_code(r->graders, NULL, sources[i])) return reward__code_check(&r->args, sources[i]);
    return 0;
}

/* Whoever calls Python for this row: compute_score, or the grader of code; NULL: a native grader. */
static int calls_of(struct reward *r, const struct reward_request *q, struct reward__calls **calls) {
    *calls = r->calls;
    if (r->calls || !reward__graders_is_code(r->graders, q->grader, q->data_source)) return 0;
    if (!r->code) {
        TRY(reward__code_check(&r->args, q->data_source));
        TRY(reward__code_create(&r->code, &r->args));
    }
    *calls = r->code;
    return 0;
}

/* 1: *now is the result; 0: it is under way. */
static int start(struct reward *r, const struct reward_request *q, int64_t tag, struct reward_result *now) {
    struct reward__calls *calls;
    TRY(calls_of(r, q, &calls));
    const int rc = calls ? reward__call_send(calls, q, tag) : reward__graders_start(r->graders, q, tag, now);
    if (rc == 1) finish(r, q->response_len, now);
    return rc;
}

int reward_score(struct reward *r, const struct reward_request *q, struct reward_result *out) {
    struct reward__called c;
    int rc = start(r, q, -1, out);
    if (rc == 0) rc = reward_flush(r);
    while (rc == 0) { /* the helpers' deadlines bound this wait */
        rc = take_call(r, 1, &c);
        if (rc == 1 && c.tag == -1) {
            *out = c.result;
        } else if (rc == 1) {
            add_done(r, c.tag, c.result);
            rc = 0;
        }
    }
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int reward_submit(struct reward *r, const struct reward_request *q, int64_t tag) {
    struct reward_result result;
    const int rc = start(r, q, tag, &result);
    TRY(rc);
    if (rc == 1) add_done(r, tag, result);
    return 0;
}

bool reward_is_unreported(const struct reward *r, enum reward_status s) { return !r->reported[s]; }
void reward_mark_reported(struct reward *r, enum reward_status s) { r->reported[s] = true; }

int reward_flush(struct reward *r) { return r->calls ? reward__calls_flush(r->calls) : 0; }

int reward_poll(struct reward *r, double wait_s, int64_t *tag, struct reward_result *out) {
    if (r->done_at < r->n_done) {
        *tag = r->done[r->done_at].tag;
        *out = r->done[r->done_at++].result;
        return 1;
    }
    struct reward__called c;
    const int rc = take_call(r, wait_s, &c);
    if (rc == 1) {
        *tag = c.tag;
        *out = c.result;
    }
    return rc;
}

int64_t reward_pending(const struct reward *r) {
    return r->n_done - r->done_at + (r->calls ? reward__calls_pending(r->calls) : reward__graders_pending(r->graders)) +
           (r->code ? reward__calls_pending(r->code) : 0);
}
