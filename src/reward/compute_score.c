/* compute_score.c - calls the user's Python compute_score in helper processes.
 *
 * A def runs once at a time in each process; calls of an async def run up to max_concurrent at once
 * on the event loop of each.  Knows nothing of native graders, penalties or groups.
 * Invariant: every call gives one result, in the order of finishing; what goes wrong in it is a status. */
#include "reward/reward_int.h"

#include "base/err.h"
#include "base/file.h"
#include "helper/helper.h"

#include <stdlib.h>

#define DEFAULT_TIMEOUT_S 300.                /* verl's for a reward call */
#define USER_MEMORY_BYTES ((int64_t)32 << 30) /* user code may import torch, which maps much */
enum { DEFAULT_CONCURRENT = 256, TRIES = 5 }; /* TRIES: processes that a sample may end before it is a crash */

struct in_flight {
    int64_t tag, response_len;
};
struct reward__calls {
    struct helper_pool *pool;
    double timeout_s;
    struct in_flight *flight; /* of ticket first_ticket + i */
    int64_t n_flight, flight_cap, first_ticket;
};

/* Starts one helper and loads the file, so that a mistake in it shows before step 1. */
static int load_once(const struct helper_args *h, bool *is_async) {
    struct helper *probe;
    json_t *reply = NULL, *ping = json_pack("{s:b}", "ping", 1);
    int rc = helper_create(&probe, h);
    if (rc < 0 && h->python) err_wrap(rc, "reward.python");
    if (rc == 0) {
        rc = helper_call(probe, ping, DEFAULT_TIMEOUT_S, &reply);
        helper_destroy(probe);
    }
    *is_async = json_is_true(json_object_get(reply, "async"));
    json_decref(ping);
    json_decref(reply);
    return rc;
}

int reward__calls_create(struct reward__calls **out, const struct reward_args *a) {
    struct reward__calls *c = xcalloc(1, sizeof *c);
    char *path = file_expand(a->path);
    const char *name = a->name ? a->name : "compute_score";
    json_t *init = json_pack("{s:s, s:s, s:O?}", "path", path, "name", name, "kwargs", a->kwargs);
    const struct helper_args h = {
        .module = "verlc_helpers.reward", .init = init, .python = a->python, .log_as = "reward", .memory_bytes = USER_MEMORY_BYTES};
    const int64_t concurrent = a->max_concurrent > 0 ? a->max_concurrent : DEFAULT_CONCURRENT;
    bool is_async;
    int rc = 0;
    c->timeout_s = a->timeout_s > 0 ? a->timeout_s : DEFAULT_TIMEOUT_S;
    if (!file_exists(path)) FAILG(out, ERR_INPUT, "custom_reward_function.path %s does not exist", path);
    TRYG(file_check(path), out);
    TRYG(load_once(&h, &is_async), out);
    const struct helper_pool_args pool = {
        .n = a->n_workers > 0 ? a->n_workers : 1, .n_calls = is_async ? concurrent : 1, .n_tries = TRIES};
    TRYG(helper_pool_create(&c->pool, &h, &pool), out);
out:
    json_decref(init);
    free(path);
    if (rc < 0) reward__calls_destroy(c);
    else *out = c;
    return rc;
}

void reward__calls_destroy(struct reward__calls *c) {
    if (!c) return;
    helper_pool_destroy(c->pool);
    free(c->flight);
    free(c);
}

void reward__calls_cancel(struct reward__calls *c) {
    helper_pool_cancel(c->pool);
    c->n_flight = 0;
}

int reward__call_send(struct reward__calls *c, const struct reward_request *q, int64_t tag) {
    int64_t ticket;
    json_t *solution = json_stringn(q->solution, q->n_solution);
    if (!solution) FAIL(ERR_INPUT, "a response is not valid UTF-8 and cannot be scored");
    json_t *call = json_pack("{s:s, s:o, s:O?, s:O?}", "data_source", q->data_source ? q->data_source : "", "solution_str",
                             solution, "ground_truth", q->ground_truth, "extra_info", q->extra_info);
    CHECK(call != NULL);
    const int rc = helper_pool_send(c->pool, call, c->timeout_s, &ticket);
    json_decref(call);
    if (rc < 0) return rc;
    if (c->n_flight == 0) c->first_ticket = ticket;
    const int64_t at = ticket - c->first_ticket;
    CHECK(at == c->n_flight);
    xgrow((void **)&c->flight, &c->flight_cap, at + 1, sizeof *c->flight);
    c->flight[c->n_flight++] = (struct in_flight){tag, q->response_len};
    return 0;
}

/* What verlc_helpers/reward.py answers: {"score", "extra"}, {"crash"} or {"unparsed"}. */
static struct reward_result from_reply(const json_t *reply) {
    const char *what = json_string_value(json_object_get(reply, "crash"));
    if (what) return reward__failure(REWARD_CRASH, xstrdup(what));
    what = json_string_value(json_object_get(reply, "unparsed"));
    if (what) return reward__failure(REWARD_UNPARSED, xstrdup(what));
    const json_t *score = json_object_get(reply, "score"), *extra = json_object_get(reply, "extra");
    if (!json_is_number(score) || !json_is_object(extra))
        return reward__failure(REWARD_UNPARSED, xstrdup("the reward helper's reply has no score"));
    return (struct reward_result){.status = REWARD_SCORE, .score = json_number_value(score), .extra = json_deep_copy(extra)};
}

int reward__call_take(struct reward__calls *c, double wait_s, struct reward__called *out) {
    struct helper_result h;
    const int rc = helper_pool_recv(c->pool, wait_s, &h);
    if (rc <= 0) return rc;
    const struct in_flight *f = &c->flight[h.ticket - c->first_ticket];
    *out = (struct reward__called){.tag = f->tag, .response_len = f->response_len};
    if (h.rc == 0) out->result = from_reply(h.reply);
    else out->result = reward__failure(h.rc == ERR_TIMEOUT ? REWARD_TIMEOUT : REWARD_CRASH, xstrdup(h.error));
    helper_result_free(&h);
    if (helper_pool_pending(c->pool) == 0) c->n_flight = 0; /* tickets start over at the next call */
    return 1;
}

int64_t reward__calls_pending(const struct reward__calls *c) { return helper_pool_pending(c->pool); }
