/* user.c - a user-defined estimator or loss as an entry like any other: its name,
 * its call, and the checks of what it gives.
 *
 * Does not know how a C file becomes a function (user_c.c) nor how Python is called (user_python.c).
 * Invariants: only finite numbers leave here; a loss that was checked has the derivative
 * that finite differences find, on every token of the check's batch. */
#include "algo/custom/user_int.h"

#include "base/file.h"
#include "base/rng.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ---- the name ---- */

static bool ends_with(const char *s, size_t n, const char *end) {
    const size_t m = strlen(end);
    return n > m && strncmp(s + n - m, end, m) == 0;
}

bool algo_user_named(const char *spec) {
    const char *colon = strrchr(spec, ':');
    const size_t n = colon ? (size_t)(colon - spec) : strlen(spec);
    return ends_with(spec, n, ".c") || ends_with(spec, n, ".py") || ends_with(spec, strlen(spec), ".c") ||
           ends_with(spec, strlen(spec), ".py");
}

static bool identifier(const char *s) {
    if (!isalpha((unsigned char)*s) && *s != '_') return false;
    while (isalnum((unsigned char)*s) || *s == '_') s++;
    return *s == '\0';
}

int algo__user_parse(const char *spec, char **path, char **name, bool *python) {
    const char *colon = strrchr(spec, ':');
    if (!colon || !algo_user_named(spec) || strchr(colon, '.'))
        FAIL(ERR_INVAL, "'%s' names no function: it must be FILE.c:NAME or FILE.py:NAME", spec);
    if (!identifier(colon + 1))
        FAIL(ERR_INVAL, "'%s' is not the name of a function; it must be FILE.c:NAME or FILE.py:NAME", colon + 1);
    for (const char *s = spec; s < colon; s++)
        if (*s == '"' || *s == '\\' || (unsigned char)*s < ' ')
            FAIL(ERR_INVAL, "the path of a user's file must not contain quotes, backslashes or control characters");
    char *given = xstrndup(spec, (size_t)(colon - spec));
    *path = file_expand(given);
    free(given);
    *name = xstrdup(colon + 1);
    *python = ends_with(spec, (size_t)(colon - spec), ".py");
    return 0;
}

/* ---- calls ---- */

static struct verlc_param *params(const json_t *kwargs, int64_t *n) {
    struct verlc_param *p = xcalloc(json_object_size(kwargs) + 1, sizeof *p);
    const char *key;
    json_t *v;
    *n = 0;
    json_object_foreach((json_t *)(uintptr_t)kwargs, key, v) p[(*n)++] =
        (struct verlc_param){key, json_is_boolean(v) ? (double)json_is_true(v) : json_number_value(v)};
    return p;
}

static int refused(const struct algo_user *u, int code) {
    FAIL(ERR_INPUT, "%s: %s gave %d, which refuses the batch", u->key, u->spec, code);
}

/* Offsets from 0. Caller frees. */
static int64_t *rebased(const struct algo_ragged *r) {
    int64_t *off = xmalloc((size_t)(r->n + 1) * sizeof *off);
    for (int64_t i = 0; i <= r->n; i++) off[i] = r->off[i] - r->off[0];
    return off;
}

static const double *at(const double *x, int64_t base) { return x ? x + base : NULL; }

/* What it gave for one number a token: 0 where the mask is, or the first valid token where x is not finite. */
static int take_tokens(const struct algo_user *u, const struct algo_ragged *r, double *x, const char *what) {
    for (int64_t t = algo__first(r); t < algo__last(r); t++)
        if (!r->mask[t]) x[t] = 0;
    ALGO__EACH_VALID(r, i, t) {
        if (isfinite(x[t])) continue;
        FAIL(ERR_NUMERIC, "%s: %s: %s of sample %lld token %lld is not a finite number", u->key, u->spec, what, (long long)i,
             (long long)(t - r->off[i]));
    }
    return 0;
}

static int user_advantage(void *ctx, const struct algo_adv_args *a, double *adv, double *ret) {
    struct algo_user *u = ctx;
    const int64_t base = algo__first(a->r), n = algo__last(a->r) - base;
    int64_t *off = rebased(a->r);
    struct verlc_adv q = {.n = a->r->n,
                          .off = off,
                          .mask = a->r->mask + base,
                          .rewards = a->rewards + base,
                          .group = a->group,
                          .old_logp = at(a->old_logp, base),
                          .values = at(a->values, base),
                          .reward_baselines = a->reward_baselines,
                          .sum_pi_squared = at(a->sum_pi_squared, base),
                          .is_weights = at(a->is_weights, base),
                          .gamma = a->gamma,
                          .lam = a->lam};
    memset(adv + base, 0, (size_t)n * sizeof *adv);
    memset(ret + base, 0, (size_t)n * sizeof *ret);
    int rc = 0;
    if (u->python) {
        rc = algo__user_adv_py(u, &q, a->kwargs, adv + base, ret + base);
    } else {
        struct verlc_param *p = params(a->kwargs, &q.n_params);
        q.params = p;
        const int code = u->run_adv(&q, adv + base, ret + base);
        if (code != 0) rc = refused(u, code);
        free(p);
    }
    free(off);
    TRY(rc);
    TRY(take_tokens(u, a->r, adv, "the advantage"));
    return take_tokens(u, a->r, ret, "the return");
}

static int user_loss(void *ctx, const struct algo_policy_args *a, const double *fixed, const double *w, double *loss,
                     double *dlogp) {
    struct algo_user *u = ctx;
    const int64_t base = algo__first(a->r), n = algo__last(a->r) - base;
    int64_t *off = rebased(a->r);
    struct verlc_loss q = {.n = a->r->n,
                           .off = off,
                           .mask = a->r->mask + base,
                           .logp = a->logp + base,
                           .old_logp = a->old_logp + base,
                           .advantages = a->advantages + base,
                           .logp_fixed = fixed + base,
                           .weight = w + base,
                           .clip_ratio_low = a->cfg.clip_ratio_low,
                           .clip_ratio_high = a->cfg.clip_ratio_high,
                           .clip_ratio_c = a->cfg.clip_ratio_c};
    memset(loss + base, 0, (size_t)n * sizeof *loss);
    memset(dlogp + base, 0, (size_t)n * sizeof *dlogp);
    int rc = 0;
    if (u->python) {
        rc = algo__user_loss_py(u, &q, a->cfg.kwargs, loss + base, dlogp + base);
    } else {
        struct verlc_param *p = params(a->cfg.kwargs, &q.n_params);
        q.params = p;
        const int code = u->run_loss(&q, loss + base, dlogp + base);
        if (code != 0) rc = refused(u, code);
        free(p);
    }
    free(off);
    TRY(rc);
    TRY(take_tokens(u, a->r, loss, "the loss"));
    return take_tokens(u, a->r, dlogp, "dlogp");
}

/* ---- the check at load ---- */

enum { CHECK_N = 4, CHECK_TOKENS = 14 };
struct check { /* a batch of four samples, two of each of two prompts; one token is masked */
    double rewards[CHECK_TOKENS], values[CHECK_TOKENS], logp[CHECK_TOKENS], old[CHECK_TOKENS], adv[CHECK_TOKENS], pi2[CHECK_TOKENS],
        weight[CHECK_TOKENS], baselines[CHECK_N];
    uint8_t mask[CHECK_TOKENS];
    struct algo_ragged r;
};
static const int64_t check_off[CHECK_N + 1] = {0, 4, 5, 11, CHECK_TOKENS}, check_group[CHECK_N] = {0, 0, 1, 1};

static void fill_check(struct check *c) {
    struct rng g = {.seed = 20240601, .stream = RNG_TEST};
    for (int t = 0; t < CHECK_TOKENS; t++) {
        c->rewards[t] = rng_unit(&g) - 0.3;
        c->values[t] = rng_unit(&g);
        c->old[t] = -0.5 - 2 * rng_unit(&g);
        c->logp[t] = c->old[t] + 0.9 * (rng_unit(&g) - 0.5);
        c->adv[t] = 3 * (rng_unit(&g) - 0.5);
        c->pi2[t] = rng_unit(&g);
        c->mask[t] = t != 7;
        c->weight[t] = c->mask[t] ? 0.02 + 0.1 * rng_unit(&g) : 0;
    }
    for (int i = 0; i < CHECK_N; i++) c->baselines[i] = rng_unit(&g);
    c->r = (struct algo_ragged){CHECK_N, check_off, c->mask};
}

static int check_advantage(struct algo_user *u, const struct check *c) {
    double adv[CHECK_TOKENS], ret[CHECK_TOKENS];
    struct algo_adv_args a = algo_adv_defaults();
    a.r = &c->r;
    a.rewards = c->rewards;
    a.group = check_group;
    a.old_logp = c->old;
    a.kwargs = u->kwargs;
    if (u->adv.needs & ALGO_NEEDS_VALUES) a.values = c->values;
    if (u->adv.needs & ALGO_NEEDS_BASELINES) a.reward_baselines = c->baselines;
    if (u->adv.needs & ALGO_NEEDS_SUM_PI) a.sum_pi_squared = c->pi2;
    return user_advantage(u, &a, adv, ret);
}

/* The loss of the check's batch with this logp. */
static int check_value(struct algo_user *u, const struct check *c, const double *logp, double *value, double *dlogp) {
    double loss[CHECK_TOKENS];
    const struct algo_policy_args a = {.r = &c->r, .old_logp = c->old, .logp = logp, .advantages = c->adv, .cfg = u->cfg};
    TRY(user_loss(u, &a, c->logp, c->weight, loss, dlogp));
    *value = 0;
    ALGO__EACH_VALID(&c->r, i, t) *value += c->weight[t] * loss[t];
    return 0;
}

/* Where a clip or a maximum has its corner between the two points any slope between the two sides' is right. */
static bool agrees(double d, double left, double right, double weight) {
    const double mean = (left + right) / 2, tol = 1e-5 * (fabs(d) + fabs(mean) + weight);
    const double lo = left < right ? left : right, hi = left < right ? right : left;
    return fabs(d - mean) <= tol || (hi - lo > tol && d >= lo - tol && d <= hi + tol);
}

static int check_loss(struct algo_user *u, const struct check *c) {
    const double h = 1e-5;
    double value, dlogp[CHECK_TOKENS], logp[CHECK_TOKENS], up, down, unused[CHECK_TOKENS];
    memcpy(logp, c->logp, sizeof logp);
    TRY(check_value(u, c, logp, &value, dlogp));
    ALGO__EACH_VALID(&c->r, i, t) {
        logp[t] = c->logp[t] + h;
        TRY(check_value(u, c, logp, &up, unused));
        logp[t] = c->logp[t] - h;
        TRY(check_value(u, c, logp, &down, unused));
        logp[t] = c->logp[t];
        const double left = (value - down) / h, right = (up - value) / h;
        if (agrees(dlogp[t], left, right, c->weight[t])) continue;
        FAIL(ERR_INPUT,
             "%s: %s: dlogp of sample %lld token %lld is %.9g, and by finite differences of its loss %.9g (weight %.6g, "
             "logp %.6g, old_logp %.6g, advantage %.6g); dlogp is the derivative of the sum of weight * loss, and what is constant "
             "in it is read from logp_fixed",
             u->key, u->spec, (long long)i, (long long)(t - check_off[i]), dlogp[t], (left + right) / 2, c->weight[t], c->logp[t],
             c->old[t], c->adv[t]);
    }
    return 0;
}

int algo_user_check(struct algo_user *u) {
    struct check c;
    if (!u) return 0;
    fill_check(&c);
    return u->loss ? check_loss(u, &c) : check_advantage(u, &c);
}

/* ---- opening ---- */

static int check_kwargs(const struct algo_user *u) {
    const char *key;
    json_t *v;
    if (u->python) return 0;
    json_object_foreach(u->kwargs, key, v) if (!json_is_number(v) && !json_is_boolean(v))
        FAIL(ERR_INVAL, "%s: %s: the parameter %s is not a number, and a C function takes numbers", u->key, u->spec, key);
    return 0;
}

static int open_parts(struct algo_user *u, const struct algo_user_args *a) {
    const int rc = algo__user_parse(a->spec, &u->path, &u->name, &u->python);
    if (rc < 0) return err_wrap(rc, "%s", u->key);
    if (!file_exists(u->path)) FAIL(ERR_INPUT, "%s: %s does not exist", u->key, u->path);
    TRY(file_check(u->path));
    TRY(check_kwargs(u));
    return u->python ? algo__user_open_py(u) : algo__user_open_c(u, a->dir);
}

int algo_user_open(struct algo_user **out, const struct algo_user_args *a) {
    struct algo_user *u = xcalloc(1, sizeof *u);
    u->spec = xstrdup(a->spec);
    u->key = xstrdup(a->key);
    u->loss = a->loss;
    u->timeout_s = a->timeout_s > 0 ? a->timeout_s : 60;
    u->kwargs = a->kwargs ? json_deep_copy(a->kwargs) : NULL;
    u->adv = (struct algo_adv_entry){.name = u->spec, .user = user_advantage, .ctx = u};
    u->policy = (struct algo_policy_entry){.name = u->spec, .user = user_loss, .ctx = u};
    u->cfg = algo_policy_defaults();
    u->cfg.kwargs = u->kwargs;
    const int rc = open_parts(u, a);
    if (rc < 0) {
        algo_user_close(u);
        return rc;
    }
    *out = u;
    return 0;
}

void algo_user_close(struct algo_user *u) {
    if (!u) return;
    algo__user_close_c(u);
    helper_destroy(u->helper);
    json_decref(u->kwargs);
    free(u->spec);
    free(u->key);
    free(u->path);
    free(u->name);
    free(u);
}

const struct algo_adv_entry *algo_user_adv(const struct algo_user *u) { return &u->adv; }
const struct algo_policy_entry *algo_user_policy(const struct algo_user *u) { return &u->policy; }
