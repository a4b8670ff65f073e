/* user_python.c - a Python function of the user's, called in a helper process
 * (python/verlc_helpers/algo.py): arrays go and come as base64 of their bytes, so no
 * number changes on the way.
 *
 * Does not judge the numbers (user.c does).  A helper that dies is started again
 * once for a call, since the function is one of its arguments alone; one that is too
 * slow ends the call.
 * Invariant: a reply has exactly the elements that were requested. */
#include "algo/custom/user_int.h"

#include "base/encoding/base64.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

int algo__unpack_f64(const json_t *reply, const char *key, int64_t n, double *out) {
    const json_t *v = json_object_get(reply, key);
    if (!json_is_string(v) || !base64_read(out, (size_t)n * sizeof *out, json_string_value(v), json_string_length(v)))
        FAIL(ERR_FORMAT, "the helper's reply has no \"%s\" of %lld numbers", key, (long long)n);
    return 0;
}

/* ---- requests ---- */

static void put(json_t *o, const char *key, const void *p, size_t bytes) {
    if (!p) return;
    char *text = base64_text(p, bytes);
    json_object_set_new(o, key, json_string(text));
    free(text);
}

static json_t *shape(int64_t n, const int64_t *off, const uint8_t *mask) {
    json_t *q = json_object(), *lens = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(lens, json_integer(off[i + 1] - off[i]));
    json_object_set_new(q, "lens", lens);
    put(q, "mask", mask, (size_t)off[n]);
    return q;
}

/* The reply of one call; `q` is taken. */
static int call(struct algo_user *u, json_t *q, const json_t *kwargs, json_t **reply) {
    if (kwargs) json_object_set(q, "kwargs", (json_t *)(uintptr_t)kwargs);
    int rc = helper_call(u->helper, q, u->timeout_s, reply);
    if (rc == ERR_HELPER) {
        log_warn("%s: %s; called once more", u->key, err_msg());
        rc = helper_call(u->helper, q, u->timeout_s, reply);
    }
    json_decref(q);
    return rc < 0 ? err_wrap(rc, "%s: %s", u->key, u->spec) : 0;
}

struct reply_array {
    const char *key;
    double *out;
};
/* Two arrays of n numbers each; `reply` is taken. */
static int unpack(struct algo_user *u, json_t *reply, int64_t n, const struct reply_array x[2]) {
    int rc = 0;
    for (int i = 0; i < 2 && rc == 0; i++) rc = algo__unpack_f64(reply, x[i].key, n, x[i].out);
    json_decref(reply);
    return rc < 0 ? err_wrap(rc, "%s: %s", u->key, u->spec) : 0;
}

int algo__user_adv_py(struct algo_user *u, const struct verlc_adv *a, const json_t *kwargs, double *adv, double *ret) {
    const size_t bytes = (size_t)a->off[a->n] * sizeof(double);
    json_t *q = shape(a->n, a->off, a->mask), *tokens = json_object(), *samples = json_object(), *reply;
    put(tokens, "token_level_rewards", a->rewards, bytes);
    put(tokens, "old_log_probs", a->old_logp, bytes);
    put(tokens, "values", a->values, bytes);
    put(tokens, "sum_pi_squared", a->sum_pi_squared, bytes);
    put(tokens, "rollout_is_weights", a->is_weights, bytes);
    put(samples, "reward_baselines", a->reward_baselines, (size_t)a->n * sizeof(double));
    put(q, "index", a->group, a->group ? (size_t)a->n * sizeof *a->group : 0);
    json_object_set_new(q, "tokens", tokens);
    json_object_set_new(q, "samples", samples);
    json_object_set_new(q, "numbers", json_pack("{s:f, s:f}", "gamma", a->gamma, "lam", a->lam));
    TRY(call(u, q, kwargs, &reply));
    return unpack(u, reply, a->off[a->n], (const struct reply_array[2]){{"advantages", adv}, {"returns", ret}});
}

int algo__user_loss_py(struct algo_user *u, const struct verlc_loss *a, const json_t *kwargs, double *loss, double *dlogp) {
    const size_t bytes = (size_t)a->off[a->n] * sizeof(double);
    json_t *q = shape(a->n, a->off, a->mask), *tokens = json_object(), *reply;
    put(tokens, "log_prob", a->logp, bytes);
    put(tokens, "log_prob_fixed", a->logp_fixed, bytes);
    put(tokens, "old_log_prob", a->old_logp, bytes);
    put(tokens, "advantages", a->advantages, bytes);
    put(tokens, "weight", a->weight, bytes);
    json_object_set_new(q, "tokens", tokens);
    json_object_set_new(q, "numbers",
                        json_pack("{s:f, s:f, s:f}", "clip_ratio_low", a->clip_ratio_low, "clip_ratio_high", a->clip_ratio_high,
                                  "clip_ratio_c", a->clip_ratio_c));
    TRY(call(u, q, kwargs, &reply));
    return unpack(u, reply, a->off[a->n], (const struct reply_array[2]){{"loss", loss}, {"dlog_prob", dlogp}});
}

/* ---- opening ---- */

/* What the function's parameters require. */
static unsigned read_needs(const json_t *reply) {
    static const struct {
        const char *name;
        unsigned bit;
    } known[] = {{"values", ALGO_NEEDS_VALUES}, {"reward_baselines", ALGO_NEEDS_BASELINES}, {"sum_pi_squared", ALGO_NEEDS_SUM_PI}};
    const json_t *list = json_object_get(reply, "needs");
    unsigned needs = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        for (size_t k = 0; name && k < sizeof known / sizeof *known; k++)
            if (strcmp(name, known[k].name) == 0) needs |= known[k].bit;
    }
    return needs;
}

int algo__user_open_py(struct algo_user *u) {
    json_t *init = json_pack("{s:s, s:s, s:b}", "path", u->path, "name", u->name, "loss", u->loss), *reply;
    if (!init) FAIL(ERR_INVAL, "%s: %s is not valid UTF-8", u->key, u->spec);
    const struct helper_args h = {.module = "verlc_helpers.algo", .init = init};
    const int rc = helper_create(&u->helper, &h);
    json_decref(init);
    TRY(rc);
    TRY(call(u, json_pack("{s:b}", "describe", 1), u->kwargs, &reply));
    u->adv.needs = read_needs(reply);
    json_decref(reply);
    return 0;
}
