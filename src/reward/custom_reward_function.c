/* custom_reward_function.c - calls the user's Python scorer, compute_score or a reward manager, in helper processes.
 *
 * concurrency.c says how many calls run at once. Some scorers take all samples in one call, when there are no more to come.
 * Knows nothing of native graders, penalties or groups.
 * Invariant: every sample gives one result, in the order of finishing; what goes wrong in it is a status. */
#include "reward/reward_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "helper/helper.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEFAULT_TIMEOUT_S 300.                /* verl's for a reward call */
#define USER_MEMORY_BYTES ((int64_t)32 << 30) /* user code may import torch, which maps much */

struct in_flight { /* one call */
    struct reward__sample *samples;
    int64_t n;
};
struct reward__calls {
    struct helper_pool *pool;
    double timeout_s;
    bool batch;                                         /* one call takes all samples, which are held until reward__calls_flush */
    struct reward__limit limit;                         /* with max_in_flight */
    struct in_flight *flight;                           /* of ticket first_ticket + i */
    int64_t n_flight, flight_cap, first_ticket, n_sent; /* n_sent: samples in flight */
    struct reward__called *done;                        /* of a batch: done[done_head .. n_done) */
    int64_t done_head, n_done, done_cap;
};

/* ---- start and end ---- */

/* The request to a helper for a sample; NULL: a text is not UTF-8. */
static json_t *request_json(const struct reward_request *q) {
    json_t *solution = json_stringn(q->solution, q->n_solution);
    if (!solution) return NULL;
    json_t *call = json_pack("{s:s, s:o, s:O?, s:O?, s:O?}", "data_source", q->data_source ? q->data_source : "", "solution_str",
                             solution, "ground_truth", q->ground_truth, "extra_info", q->extra_info, "data", q->data);
    return call;
}

/* Whether the function can score at all, by one call that counts nowhere. */
static int try_first(struct helper *probe, const struct reward_args *a) {
    json_t *reply = NULL, *call = json_pack("{s:o, s:b}", "trial", request_json(a->trial), "call", !a->trial_binds);
    const char *file = a->path ? a->path : json_string_value(json_object_get(a->manager, "path"));
    const double most = a->timeout_s > 0 ? fmin(a->timeout_s, a->trial_s) : a->trial_s;
    if (!call) return 0;
    const int rc = helper_call(probe, call, most, &reply);
    const int stopped = rc < 0 && a->check ? a->check() : 0;
    if (stopped < 0) {
        json_decref(call);
        return stopped;
    }
    const char *refuse = json_string_value(json_object_get(reply, "refuse")), *doubt = rc < 0 ? err_msg() : NULL;
    if (rc == 0) doubt = json_string_value(json_object_get(reply, "doubt"));
    if (doubt)
        log_warn("reward: %s: a trial call with the first row gave no score: %s; the run goes on, since a real answer may have one "
                 "(reward.trial_call=False makes no such call)",
                 file ? file : "the reward manager", doubt);
    const int refused =
        refuse ? err_set(ERR_INPUT, __FILE__, __LINE__, "reward: %s: a trial call with the first row, before the run: %s",
                         file ? file : "the reward manager", refuse)
               : 0;
    json_decref(call);
    json_decref(reply);
    return refused;
}

/* Starts one helper and loads the file, so that a mistake in it shows before step 1. */
static int load_once(const struct helper_args *h, const struct reward_args *a, bool *is_async, bool *batch) {
    struct helper *probe;
    json_t *reply = NULL, *ping = json_pack("{s:b}", "ping", 1);
    int rc = helper_create(&probe, h);
    if (rc < 0 && h->python) err_wrap(rc, "reward.python");
    if (rc == 0) {
        rc = helper_call(probe, ping, DEFAULT_TIMEOUT_S, &reply);
        if (rc == 0 && a->trial) rc = try_first(probe, a);
        helper_destroy(probe);
    }
    *is_async = json_is_true(json_object_get(reply, "async"));
    *batch = json_is_true(json_object_get(reply, "batch"));
    json_decref(ping);
    json_decref(reply);
    return rc;
}

/* Every process is up: else calls that the rate limit has admitted wait for its start and run all at once. */
static int start_all(struct helper_pool *p, int n, int (*check)(void)) {
    json_t *ping = json_pack("{s:b}", "ping", 1);
    int64_t ticket;
    int rc = 0;
    for (int i = 0; i < n && rc >= 0; i++) rc = helper_pool_send(p, ping, DEFAULT_TIMEOUT_S, &ticket);
    while (rc >= 0 && helper_pool_pending(p) > 0) {
        struct helper_result r;
        rc = helper_pool_recv(p, 1, &r);
        if (rc == 1) helper_result_free(&r); /* what fails here fails again with a sample */
        if (rc >= 0 && check) rc = check();
    }
    json_decref(ping);
    return rc < 0 ? rc : 0;
}

static int check_path(const char *key, const char *path) {
    if (!path) return 0;
    if (!file_exists(path)) FAIL(ERR_INPUT, "%s %s does not exist", key, path);
    return file_check(path);
}

int reward__calls_open(struct reward__calls **out, const struct helper_args *h, const struct helper_pool_args *pool,
                       double timeout_s) {
    struct reward__calls *c = xcalloc(1, sizeof *c);
    c->timeout_s = timeout_s > 0 ? timeout_s : DEFAULT_TIMEOUT_S;
    const int rc = helper_pool_create(&c->pool, h, pool);
    if (rc < 0) reward__calls_destroy(c);
    else *out = c;
    return rc;
}

int reward__calls_create(struct reward__calls **out, const struct reward_args *a) {
    static const char *const styles[] = {"named", "positional", "batch"};
    struct reward__calls *c = xcalloc(1, sizeof *c);
    char *path = a->path ? file_expand(a->path) : NULL;
    const char *name = a->name ? a->name : "compute_score";
    json_t *init =
        json_pack("{s:s?, s:s, s:O?, s:s, s:O?, s:s?, s:s?}", "path", path, "name", name, "kwargs", a->kwargs, "style",
                  styles[a->style], "manager", a->manager, "router_address", a->router_address, "rm_tokenizer", a->rm_tokenizer);
    const struct helper_args h = {.module = "verlc_helpers.reward",
                                  .init = init,
                                  .python = a->python,
                                  .log_as = "reward",
                                  .memory_bytes = USER_MEMORY_BYTES,
                                  .check = a->check};
    bool is_async;
    int rc = 0;
    CHECK(init != NULL);
    c->timeout_s = a->timeout_s > 0 ? a->timeout_s : DEFAULT_TIMEOUT_S;
    reward__limit_open(&c->limit, a);
    TRYG(check_path("custom_reward_function.path", path), out);
    TRYG(check_path("reward.reward_manager.module.path", json_string_value(json_object_get(a->manager, "path"))), out);
    TRYG(load_once(&h, a, &is_async, &c->batch), out);
    const struct helper_pool_args pool = reward__pool_size(a, is_async);
    TRYG(helper_pool_create(&c->pool, &h, &pool), out);
    if (c->limit.max_in_flight > 0) TRYG(start_all(c->pool, pool.n, a->check), out);
out:
    json_decref(init);
    free(path);
    if (rc < 0) reward__calls_destroy(c);
    else *out = c;
    return rc;
}

static void forget_flights(struct reward__calls *c) {
    for (int64_t i = 0; i < c->n_flight; i++) free(c->flight[i].samples);
    c->n_flight = c->n_sent = 0;
}

void reward__calls_destroy(struct reward__calls *c) {
    if (!c) return;
    if (c->pool) reward__calls_cancel(c);
    helper_pool_destroy(c->pool);
    free(c->limit.held);
    free(c->flight);
    free(c->done);
    free(c);
}

void reward__calls_cancel(struct reward__calls *c) {
    helper_pool_cancel(c->pool);
    forget_flights(c);
    reward__limit_drop(&c->limit);
    for (; c->done_head < c->n_done; c->done_head++) reward_result_free(&c->done[c->done_head].result);
}

/* ---- to the helpers ---- */

/* Takes call; samples are its own. */
static int send(struct reward__calls *c, json_t *call, const struct reward__sample *samples, int64_t n) {
    int64_t ticket;
    const int rc = helper_pool_send(c->pool, call, c->timeout_s, &ticket);
    json_decref(call);
    if (rc < 0) return rc;
    if (c->n_flight == 0) c->first_ticket = ticket;
    CHECK(ticket - c->first_ticket == c->n_flight);
    xgrow((void **)&c->flight, &c->flight_cap, c->n_flight + 1, sizeof *c->flight);
    struct in_flight *f = &c->flight[c->n_flight++];
    *f = (struct in_flight){xmalloc((size_t)n * sizeof *samples), n};
    memcpy(f->samples, samples, (size_t)n * sizeof *samples);
    c->n_sent += n;
    return 0;
}

/* Sends what the limits admit. Seconds until more may go: INFINITY where that waits for a call to end, or nothing is held. */
static int send_held(struct reward__calls *c, double *wait_s) {
    struct reward__held next;
    *wait_s = INFINITY;
    if (c->batch) return 0;
    while (reward__limit_next(&c->limit, helper_pool_pending(c->pool), clock_awake(), &next, wait_s))
        TRY(send(c, next.call, &next.sample, 1));
    return 0;
}

int reward__call_send(struct reward__calls *c, const struct reward_request *q, int64_t tag) {
    const struct reward__sample s = {tag, q->response_len};
    double wait;
    json_t *call = request_json(q);
    if (!call) FAIL(ERR_INPUT, "a response or its data_source is not valid UTF-8, and cannot be scored");
    if (!c->batch && c->limit.max_in_flight <= 0) return send(c, call, &s, 1);
    reward__limit_hold(&c->limit, call, s);
    return send_held(c, &wait);
}

int reward__calls_flush(struct reward__calls *c) {
    const int64_t n = c->limit.n - c->limit.head;
    if (!c->batch || n == 0) return 0;
    struct reward__sample *samples = xmalloc((size_t)n * sizeof *samples);
    json_t *all = json_array();
    for (int64_t i = 0; i < n; i++) {
        const struct reward__held *h = &c->limit.held[c->limit.head++];
        samples[i] = h->sample;
        json_array_append_new(all, h->call);
    }
    const int rc = send(c, json_pack("{s:o}", "batch", all), samples, n);
    free(samples);
    return rc;
}

/* ---- from the helpers ---- */

/* What verlc_helpers/reward.py and code_reward.py answer: {"score", "extra"}, {"crash"}, {"unparsed"} or {"missing"}. */
static struct reward_result from_reply(const json_t *reply) {
    const char *what = json_string_value(json_object_get(reply, "crash"));
    if (what) return reward__failure(REWARD_CRASH, xstrdup(what));
    what = json_string_value(json_object_get(reply, "unparsed"));
    if (what) return reward__failure(REWARD_UNPARSED, xstrdup(what));
    what = json_string_value(json_object_get(reply, "missing"));
    if (what) return reward__failure(REWARD_MISSING, xstrdup(what));
    const json_t *score = json_object_get(reply, "score"), *extra = json_object_get(reply, "extra");
    if (!json_is_number(score) || !json_is_object(extra))
        return reward__failure(REWARD_UNPARSED, xstrdup("the reward helper's reply has no score"));
    return (struct reward_result){.status = REWARD_SCORE, .score = json_number_value(score), .extra = json_deep_copy(extra)};
}

/* The results of one call's samples: of a batch {"results": [reply, ...]}, or one reply for all. */
static void add_results(struct reward__calls *c, const struct in_flight *f, const struct helper_result *h) {
    const json_t *results = json_object_get(h->reply, "results");
    const enum reward_status failed = h->rc == ERR_TIMEOUT ? REWARD_TIMEOUT : REWARD_CRASH;
    for (int64_t i = 0; i < f->n; i++) {
        const json_t *reply = c->batch && results ? json_array_get(results, (size_t)i) : h->reply;
        const struct reward__called one = {
            .tag = f->samples[i].tag,
            .response_len = f->samples[i].response_len,
            .result = h->rc == 0 ? from_reply(reply) : reward__failure(failed, xstrdup(h->error)),
        };
        xgrow((void **)&c->done, &c->done_cap, c->n_done + 1, sizeof *c->done);
        c->done[c->n_done++] = one;
    }
}

static int take(struct reward__calls *c, double wait_s) {
    struct helper_result h;
    const int rc = helper_pool_recv(c->pool, wait_s, &h);
    if (rc <= 0) return rc;
    struct in_flight *f = &c->flight[h.ticket - c->first_ticket];
    add_results(c, f, &h);
    c->n_sent -= f->n;
    free(f->samples);
    f->samples = NULL;
    helper_result_free(&h);
    if (helper_pool_pending(c->pool) == 0) forget_flights(c); /* tickets start over at the next call */
    return 1;
}

int reward__call_take(struct reward__calls *c, double wait_s, struct reward__called *out) {
    const double deadline = clock_awake() + wait_s;
    while (c->done_head == c->n_done) {
        double held_s, left = fmax(0, deadline - clock_awake());
        c->done_head = c->n_done = 0;
        TRY(send_held(c, &held_s));
        const double slice = fmin(left, held_s);
        const int rc = take(c, slice);
        TRY(rc);
        if (rc == 0 && helper_pool_pending(c->pool) == 0 && slice > 0 && isfinite(held_s)) /* nothing to wait for but the rate */
            nanosleep(&(struct timespec){.tv_sec = (time_t)slice, .tv_nsec = (long)((slice - floor(slice)) * 1e9)}, NULL);
        if (rc == 0 && (left <= 0 || !isfinite(held_s))) return 0;
    }
    *out = c->done[c->done_head++];
    return 1;
}

int64_t reward__calls_pending(const struct reward__calls *c) {
    return c->limit.n - c->limit.head + c->n_sent + c->n_done - c->done_head;
}
