/* reward.c - from a finished response to its result: native graders by
 * data_source, or the user's compute_score in helper processes, and the overlong
 * penalty of verl's dapo manager.
 *
 * Native graders answer at once and wait in a list to be polled; calls of user
 * code run in the helper pool and finish in any order.
 * Invariant: whatever goes wrong with one sample is that sample's result, with a
 * status that is not a score; it never ends the run from here. */
#include "reward/reward_int.h"

#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "helper/helper.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_TIMEOUT_S 300.                /* verl's for a reward call */
#define USER_MEMORY_BYTES ((int64_t)32 << 30) /* user code may import torch, which maps much */

struct done {
    int64_t tag;
    struct reward_result result;
};
struct flight { /* a call in the helper pool */
    int64_t tag, response_len;
};
struct reward {
    struct reward_args args;  /* its pointers are not kept */
    struct helper_pool *pool; /* NULL: native */
    struct flight *flight;    /* of ticket first_ticket + i */
    int64_t n_flight, flight_cap, first_ticket;
    struct done *done; /* finished, not yet polled: done[done_at .. n_done) */
    int64_t done_at, n_done, done_cap;
};

static const char *const status_names[REWARD_N_STATUS] = {"score", "timeout", "crash", "unparsed", "missing"};
const char *reward_status_name(enum reward_status s) { return status_names[s]; }

void reward_result_free(struct reward_result *r) {
    json_decref(r->extra);
    free(r->message);
    *r = (struct reward_result){0};
}

/* Takes message. */
static struct reward_result failure(enum reward_status status, char *message) {
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

static struct reward_result grade(const struct reward_request *q) {
    const char *source = q->data_source ? q->data_source : "";
    const struct route *r = route_of(source);
    if (!r || !r->grade)
        return failure(REWARD_MISSING, xasprintf("data_source '%s' has no %sgrader; give a compute_score with "
                                                 "custom_reward_function.path",
                                                 source, r ? "native " : ""));
    if (!json_is_string(q->ground_truth))
        return failure(REWARD_MISSING,
                       xasprintf("reward_model.ground_truth of data_source '%s' is %s, not a string", source,
                                 q->ground_truth && !json_is_null(q->ground_truth) ? "of another type" : "missing"));
    return r->grade(q, json_string_value(q->ground_truth));
}

/* ---- the overlong penalty (verl's DAPORewardManager) ---- */

int reward_check_overlong(const struct reward_args *a) {
    if (a->overlong_len <= 0 || a->max_resp_len >= a->overlong_len) return 0;
    FAIL(ERR_INVAL, "reward_kwargs.max_resp_len (%lld) must be at least overlong_buffer_cfg.len (%lld)", (long long)a->max_resp_len,
         (long long)a->overlong_len);
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

/* ---- the user's compute_score ---- */

/* What verlc_helpers/reward.py answers: {"score", "extra"}, {"crash"} or {"unparsed"}. */
static struct reward_result from_reply(const json_t *reply) {
    const char *what = json_string_value(json_object_get(reply, "crash"));
    if (what) return failure(REWARD_CRASH, xstrdup(what));
    what = json_string_value(json_object_get(reply, "unparsed"));
    if (what) return failure(REWARD_UNPARSED, xstrdup(what));
    const json_t *score = json_object_get(reply, "score"), *extra = json_object_get(reply, "extra");
    if (!json_is_number(score) || !json_is_object(extra))
        return failure(REWARD_UNPARSED, xstrdup("the reward helper's reply has no score"));
    return (struct reward_result){.status = REWARD_SCORE, .score = json_number_value(score), .extra = json_deep_copy(extra)};
}

static struct reward_result from_helper(const struct helper_result *h) {
    if (h->rc == 0) return from_reply(h->reply);
    return failure(h->rc == ERR_TIMEOUT ? REWARD_TIMEOUT : REWARD_CRASH, xstrdup(h->error ? h->error : err_name(h->rc)));
}

static int send_call(struct reward *r, const struct reward_request *q, int64_t tag, int64_t *ticket) {
    json_t *solution = json_stringn(q->solution, q->n_solution);
    if (!solution) FAIL(ERR_INPUT, "a response is not valid UTF-8 and cannot be scored");
    json_t *call = json_pack("{s:s, s:o, s:O?, s:O?}", "data_source", q->data_source ? q->data_source : "", "solution_str",
                             solution, "ground_truth", q->ground_truth, "extra_info", q->extra_info);
    CHECK(call != NULL);
    const int rc = helper_pool_send(r->pool, call, r->args.timeout_s, ticket);
    json_decref(call);
    if (rc < 0) return rc;
    if (r->n_flight == 0) r->first_ticket = *ticket;
    const int64_t at = *ticket - r->first_ticket;
    CHECK(at == r->n_flight);
    xgrow((void **)&r->flight, &r->flight_cap, at + 1, sizeof *r->flight);
    r->flight[r->n_flight++] = (struct flight){tag, q->response_len};
    return 0;
}

static void add_done(struct reward *r, int64_t tag, struct reward_result result) {
    if (r->done_at == r->n_done) r->done_at = r->n_done = 0;
    xgrow((void **)&r->done, &r->done_cap, r->n_done + 1, sizeof *r->done);
    r->done[r->n_done++] = (struct done){tag, result};
}

/* 1: one call has finished; its result is in *out. */
static int take_call(struct reward *r, double wait_s, int64_t *ticket, struct flight *f, struct reward_result *out) {
    struct helper_result h;
    const int rc = helper_pool_recv(r->pool, wait_s, &h);
    if (rc <= 0) return rc;
    *ticket = h.ticket;
    *f = r->flight[h.ticket - r->first_ticket];
    *out = from_helper(&h);
    reward_penalise_overlong(&r->args, f->response_len, out);
    helper_result_free(&h);
    if (helper_pool_pending(r->pool) == 0) r->n_flight = 0; /* tickets start over at the next call */
    return 1;
}

/* ---- public ---- */

/* Starts one helper and loads the file, so that a mistake in it shows before step 1. */
static int check_loads(const struct helper_args *h) {
    struct helper *probe;
    json_t *reply = NULL, *ping = json_pack("{s:b}", "ping", 1);
    int rc = helper_create(&probe, h);
    if (rc == 0) {
        rc = helper_call(probe, ping, DEFAULT_TIMEOUT_S, &reply);
        helper_destroy(probe);
    }
    json_decref(ping);
    json_decref(reply);
    return rc;
}

static int start_helpers(struct reward *r, const struct reward_args *args) {
    char *path = file_expand(args->path);
    const char *name = args->name ? args->name : "compute_score";
    json_t *init = json_pack("{s:s, s:s, s:O?}", "path", path, "name", name, "kwargs", args->kwargs);
    const struct helper_args h = {.module = "verlc_helpers.reward", .init = init, .memory_bytes = USER_MEMORY_BYTES};
    int rc = 0;
    if (!file_exists(path)) FAILG(done, ERR_INPUT, "custom_reward_function.path %s does not exist", path);
    TRYG(check_loads(&h), done);
    TRYG(helper_pool_create(&r->pool, &h, args->n_workers > 0 ? args->n_workers : 1), done);
done:
    json_decref(init);
    free(path);
    return rc;
}

int reward_create(struct reward **out, const struct reward_args *args) {
    TRY(reward_check_overlong(args));
    struct reward *r = xcalloc(1, sizeof *r);
    r->args = *args;
    r->args.path = r->args.name = NULL;
    r->args.kwargs = NULL;
    if (!(r->args.timeout_s > 0)) r->args.timeout_s = DEFAULT_TIMEOUT_S;
    const int rc = args->path ? start_helpers(r, args) : 0;
    if (rc < 0) {
        reward_destroy(r);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *out = r;
    return 0;
}

void reward_destroy(struct reward *r) {
    if (!r) return;
    helper_pool_destroy(r->pool);
    for (int64_t i = r->done_at; i < r->n_done; i++) reward_result_free(&r->done[i].result);
    free(r->done);
    free(r->flight);
    free(r);
}

int reward_score(struct reward *r, const struct reward_request *q, struct reward_result *out) {
    if (!r->pool) {
        *out = grade(q);
        reward_penalise_overlong(&r->args, q->response_len, out);
        return 0;
    }
    int64_t mine, ticket;
    struct flight f;
    TRY(send_call(r, q, -1, &mine));
    for (;;) { /* the pool's deadlines bound this wait */
        const int rc = take_call(r, 1, &ticket, &f, out);
        TRY(rc);
        if (rc == 1 && ticket == mine) return 0;
        if (rc == 1) add_done(r, f.tag, *out);
    }
}

int reward_submit(struct reward *r, const struct reward_request *q, int64_t tag) {
    int64_t ticket;
    struct reward_result result;
    if (r->pool) return send_call(r, q, tag, &ticket);
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
    if (!r->pool) return 0;
    int64_t ticket;
    struct flight f;
    const int rc = take_call(r, wait_s, &ticket, &f, out);
    if (rc == 1) *tag = f.tag;
    return rc;
}

int64_t reward_pending(const struct reward *r) { return r->n_done - r->done_at + (r->pool ? helper_pool_pending(r->pool) : 0); }
