/* algo_json.c - the functions of algo on JSON requests, for `verlc algo` and for the golden tests, which so read what the tool
 * reads. What a request has is read by algo_request.c. Names are verl's.
 *
 * Invariant: an answer has the shape of its request. */
#include "cmd/algo_json.h"

#include "algo/kl_controller.h"
#include "algo/distillation.h"
#include "algo/micro_batch_balance.h"
#include "algo/pf_ppo.h"
#include "algo/value_loss.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"
#include "cmd/algo_request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- answering ---- */

static json_t *real_or_null(double x) { return isfinite(x) ? json_real(x) : json_null(); }

static json_t *row_json(const double *x, int64_t lo, int64_t hi) {
    json_t *row = json_array();
    for (int64_t t = lo; t < hi; t++) json_array_append_new(row, real_or_null(x[t]));
    return row;
}

static void put_tokens(json_t *out, const char *key, const struct algo_request *q, const double *x) {
    json_t *rows = q->flat ? row_json(x, 0, q->off[1]) : json_array();
    for (int64_t i = 0; !q->flat && i < q->r.n; i++) json_array_append_new(rows, row_json(x, q->off[i], q->off[i + 1]));
    json_object_set_new(out, key, rows);
}

static void put_mask(json_t *out, const char *key, const struct algo_request *q, const uint8_t *mask) {
    json_t *rows = json_array();
    for (int64_t i = 0; i < q->r.n; i++) {
        json_t *row = json_array();
        for (int64_t t = q->off[i]; t < q->off[i + 1]; t++) json_array_append_new(row, json_integer(mask[t]));
        if (q->flat) {
            json_array_extend(rows, row);
            json_decref(row);
        } else {
            json_array_append_new(rows, row);
        }
    }
    json_object_set_new(out, key, rows);
}

static void put_metrics(json_t *out, const struct algo_request *q) {
    json_t *m = json_object();
    for (int64_t i = 0; i < q->metrics.n; i++) json_object_set_new(m, q->metrics.v[i].name, real_or_null(q->metrics.v[i].value));
    json_object_set_new(out, "metrics", m);
}

/* A loss that is not a number must not pass for one. */
static int put_loss(json_t *out, const struct algo_request *q, double loss) {
    if (!isfinite(loss))
        FAIL(ERR_NUMERIC, "%s: the loss is not finite; look for extreme or missing numbers in the inputs", q->where);
    json_object_set_new(out, "loss", json_real(loss));
    return 0;
}

/* ---- operations ---- */

/* The reward components of gdpo: one number a sample under each of gdpo_reward_keys. */
static int read_components(struct algo_request *q, struct algo_adv_args *a) {
    const json_t *keys = algo_request_find(q, "gdpo_reward_keys"), *weights = algo_request_find(q, "gdpo_reward_weights");
    if (!keys) return 0; /* the token level rewards are the only component */
    a->n_components = (int64_t)json_array_size(keys);
    if (a->n_components == 0) FAIL(ERR_FORMAT, "%s: \"gdpo_reward_keys\" is not a list of names", q->where);
    double *x = algo_request_own(q, (size_t)(a->n_components * q->r.n), sizeof *x);
    for (int64_t k = 0; k < a->n_components; k++) {
        const char *key = json_string_value(json_array_get(keys, (size_t)k));
        if (!key) FAIL(ERR_FORMAT, "%s: \"gdpo_reward_keys\" holds something other than names", q->where);
        const json_t *v = algo_request_find(q, key);
        if (!v) v = json_object_get(json_object_get(q->req, "non_tensor_batch"), key);
        if (!v) v = json_object_get(json_object_get(q->req, "reward_extra_info"), key);
        if (!v) FAIL(ERR_FORMAT, "%s: the reward \"%s\" of gdpo_reward_keys is missing", q->where, key);
        TRY(algo_request_samples(q, key, v, x + k * q->r.n));
    }
    a->components = x;
    if (!weights) return 0;
    if ((int64_t)json_array_size(weights) != a->n_components)
        FAIL(ERR_FORMAT, "%s: \"gdpo_reward_weights\" must have %lld numbers, one for each key", q->where,
             (long long)a->n_components);
    double *w = algo_request_own(q, (size_t)a->n_components, sizeof *w);
    for (int64_t k = 0; k < a->n_components; k++) {
        const json_t *e = json_array_get(weights, (size_t)k);
        if (!json_is_number(e)) FAIL(ERR_FORMAT, "%s: \"gdpo_reward_weights\" holds something other than numbers", q->where);
        w[k] = json_number_value(e);
    }
    a->component_weights = w;
    return 0;
}

/* Code is named on the command line alone: a request can only ask for what is there. */
static int not_mine(const struct algo_request *q, const char *name, const char *option) {
    FAIL(ERR_INVAL, "%s: '%s' is a user-defined function; name it on the command line too: verlc algo %s %s", q->where, name,
         option, name);
}

static int find_adv(const struct algo_request *q, const char *name, const struct algo_adv_entry **e) {
    *e = q->user && q->user->adv ? algo_user_adv(q->user->adv) : NULL;
    if (*e && strcmp(name, (*e)->name) == 0) return 0;
    if (algo_user_named(name)) return not_mine(q, name, "--adv");
    *e = algo_adv_find(name);
    return *e ? 0 : ERR_INVAL;
}

static int find_loss(const struct algo_request *q, const char *name, const struct algo_policy_entry **e) {
    *e = q->user && q->user->loss ? algo_user_policy(q->user->loss) : NULL;
    if (*e && strcmp(name, algo_policy_name(*e)) == 0) return 0;
    if (algo_user_named(name)) return not_mine(q, name, "--loss");
    *e = algo_policy_find(name);
    return *e ? 0 : ERR_INVAL;
}

/* The parameters of a user-defined function. */
static int read_kwargs(const struct algo_request *q, const json_t **out) {
    *out = algo_request_find(q, "kwargs");
    if (*out && !json_is_object(*out)) FAIL(ERR_FORMAT, "%s: \"kwargs\" is not an object", q->where);
    return 0;
}

static int op_advantage(struct algo_request *q, json_t *out) {
    const char *name = NULL;
    TRY(algo_request_str(q, "estimator", &name));
    if (!name) TRY(algo_request_str(q, "adv_estimator", &name));
    if (!name) FAIL(ERR_FORMAT, "%s: \"estimator\" is missing", q->where);
    const struct algo_adv_entry *e;
    TRY(find_adv(q, name, &e));
    struct algo_adv_args a = algo_adv_defaults();
    if (e->user) TRY(read_kwargs(q, &a.kwargs));
    TRY(algo_request_mask(q, "response_mask"));
    a.r = &q->r;
    TRY(algo_request_tokens(q, "token_level_rewards", NULL, true, &a.rewards));
    TRY(algo_request_tokens(q, "values", NULL, false, &a.values));
    TRY(algo_request_tokens(q, "old_log_probs", "old_log_prob", false, &a.old_logp));
    TRY(algo_request_tokens(q, "sum_pi_squared", NULL, false, &a.sum_pi_squared));
    TRY(algo_request_tokens(q, "rollout_is_weights", NULL, false, &a.is_weights));
    TRY(algo_request_groups(q, "uid", "index", &a.group));
    TRY(algo_request_groups(q, "session", NULL, &a.session));
    TRY(read_components(q, &a));
    TRY(algo_request_f64(q, "gamma", &a.gamma));
    TRY(algo_request_f64(q, "lam", &a.lam));
    TRY(algo_request_bool(q, "norm_adv_by_std_in_grpo", &a.norm_by_std));
    TRY(algo_request_bool(q, "handle_zero_tail", &a.handle_zero_tail));
    const json_t *b = algo_request_find(q, "reward_baselines");
    if (b) {
        double *x = algo_request_own(q, (size_t)q->r.n, sizeof *x);
        TRY(algo_request_samples(q, "reward_baselines", b, x));
        a.reward_baselines = x;
    }
    const size_t n = (size_t)q->off[q->r.n];
    double *adv = algo_request_own(q, n, sizeof *adv), *ret = algo_request_own(q, n, sizeof *ret);
    TRY(algo_advantage(e, &a, adv, ret));
    put_tokens(out, "advantages", q, adv);
    put_tokens(out, "returns", q, ret);
    return 0;
}

static int read_corr(struct algo_request *q, const struct algo_request *in, struct algo_corr *c) {
    struct algo_corr_spec s = {0};
    TRY(algo_request_str(in, "rollout_is", &s.rollout_is));
    TRY(algo_request_text(q, in, "rollout_is_threshold", &s.rollout_is_threshold));
    TRY(algo_request_str(in, "rollout_rs", &s.rollout_rs));
    TRY(algo_request_text(q, in, "rollout_rs_threshold", &s.rollout_rs_threshold));
    TRY(algo_request_bool(in, "rollout_is_batch_normalize", &s.rollout_is_batch_normalize));
    TRY(algo_request_str(in, "loss_type", &s.loss_type));
    if (algo_request_is_null(in, "rollout_is_threshold")) s.rollout_is = NULL; /* as in verl: no weights then */
    return algo_corr_parse(c, &s);
}

static int read_policy_cfg(struct algo_request *q, struct algo_policy_cfg *c, struct algo_corr *corr) {
    *c = algo_policy_defaults();
    double clip = 0.2;
    TRY(algo_request_f64(q, "clip_ratio", &clip));
    /* the separate bounds have defaults of their own: only null falls back to clip_ratio */
    if (algo_request_is_null(q, "clip_ratio_low")) c->clip_ratio_low = clip;
    if (algo_request_is_null(q, "clip_ratio_high")) c->clip_ratio_high = clip;
    const struct {
        const char *key;
        double *out;
    } numbers[] = {
        {"clip_ratio_low", &c->clip_ratio_low},
        {"clip_ratio_high", &c->clip_ratio_high},
        {"clip_ratio_c", &c->clip_ratio_c},
        {"tau_pos", &c->tau_pos},
        {"tau_neg", &c->tau_neg},
        {"clip_cov_ratio", &c->clip_cov_ratio},
        {"clip_cov_lb", &c->clip_cov_lb},
        {"clip_cov_ub", &c->clip_cov_ub},
        {"kl_cov_ratio", &c->kl_cov_ratio},
        {"ppo_kl_coef", &c->ppo_kl_coef},
        {"dro_beta", &c->dro_beta},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) TRY(algo_request_f64(q, numbers[i].key, numbers[i].out));
    const json_t *rc = algo_request_find(q, "rollout_correction");
    if (rc) {
        const struct algo_request in = {.req = rc, .where = q->where};
        TRY(read_corr(q, &in, corr));
        c->corr = corr;
    }
    return 0;
}

static int read_policy(struct algo_request *q, struct algo_policy_args *p, struct algo_corr *corr,
                       const struct algo_policy_entry **e) {
    const char *name = "vanilla";
    TRY(algo_request_str(q, "loss_mode", &name));
    TRY(find_loss(q, name, e));
    TRY(algo_request_mask(q, "response_mask"));
    p->r = &q->r;
    TRY(algo_request_tokens(q, "old_log_prob", "old_log_probs", true, &p->old_logp));
    TRY(algo_request_tokens(q, "log_prob", "log_probs", true, &p->logp));
    TRY(algo_request_tokens(q, "advantages", NULL, true, &p->advantages));
    TRY(algo_request_tokens(q, "rollout_is_weights", NULL, false, &p->is_weights));
    TRY(read_policy_cfg(q, &p->cfg, corr));
    if (algo_user_named(name)) TRY(read_kwargs(q, &p->cfg.kwargs));
    /* verl's function defaults, where the request does not say */
    return algo_request_agg(q, strcmp(name, "gspo") == 0 ? "seq-mean-token-mean" : "token-mean", &p->agg);
}

static int op_policy_loss(struct algo_request *q, json_t *out) {
    struct algo_policy_args p = {0};
    struct algo_corr corr;
    const struct algo_policy_entry *e;
    TRY(read_policy(q, &p, &corr, &e));
    double loss, *dlogp = algo_request_own(q, (size_t)q->off[q->r.n], sizeof *dlogp);
    TRY(algo_policy_loss(e, &p, &loss, dlogp, &q->metrics));
    TRY(put_loss(out, q, loss));
    put_metrics(out, q);
    put_tokens(out, "dlogp", q, dlogp);
    return 0;
}

static int op_actor_loss(struct algo_request *q, json_t *out) {
    struct algo_actor_args a = {.kl_loss_coef = 0.001};
    struct algo_corr corr;
    struct algo_kl_type kl;
    TRY(read_policy(q, &a.policy, &corr, &a.loss_mode));
    const char *kl_name = "low_var_kl";
    TRY(algo_request_str(q, "kl_loss_type", &kl_name));
    TRY(algo_kl_find(&kl, kl_name));
    a.kl_loss_type = &kl;
    TRY(algo_request_f64(q, "kl_loss_coef", &a.kl_loss_coef));
    TRY(algo_request_f64(q, "entropy_coeff", &a.entropy_coeff));
    TRY(algo_request_tokens(q, "entropy", NULL, false, &a.entropy));
    TRY(algo_request_tokens(q, "ref_log_prob", "ref_log_probs", false, &a.ref_logp));
    const size_t n = (size_t)q->off[q->r.n];
    double loss, *dlogp = algo_request_own(q, n, sizeof *dlogp), *dentropy = algo_request_own(q, n, sizeof *dentropy);
    TRY(algo_actor_loss(&a, &loss, dlogp, dentropy, &q->metrics));
    TRY(put_loss(out, q, loss));
    put_metrics(out, q);
    put_tokens(out, "dlogp", q, dlogp);
    if (a.entropy) put_tokens(out, "dentropy", q, dentropy);
    return 0;
}

/* A list of k numbers for each token: samples x tokens x k. *k 0: taken from the first token. */
static int read_lists(struct algo_request *q, const char *key, int64_t *k, double **out) {
    const json_t *v;
    TRY(algo_request_array(q, key, NULL, &v));
    *out = NULL;
    for (int64_t i = 0; i < q->r.n; i++)
        for (int64_t t = q->off[i]; t < q->off[i + 1]; t++) {
            const json_t *list = json_array_get(json_array_get(v, (size_t)i), (size_t)(t - q->off[i]));
            if (*k == 0) *k = (int64_t)json_array_size(list);
            if (*k == 0 || (int64_t)json_array_size(list) != *k)
                FAIL(ERR_FORMAT, "%s: \"%s\" row %lld token %lld is not a list of the same length as the others", q->where, key,
                     (long long)i, (long long)(t - q->off[i]));
            if (!*out) *out = algo_request_own(q, (size_t)(q->off[q->r.n] * *k), sizeof **out);
            for (int64_t e = 0; e < *k; e++) {
                const json_t *x = json_array_get(list, (size_t)e);
                if (!json_is_number(x))
                    FAIL(ERR_FORMAT, "%s: \"%s\" row %lld token %lld is not numbers", q->where, key, (long long)i,
                         (long long)(t - q->off[i]));
                (*out)[t * *k + e] = json_number_value(x);
            }
        }
    if (!*out) FAIL(ERR_FORMAT, "%s: \"%s\" is empty", q->where, key);
    return 0;
}
static int read_list_ids(struct algo_request *q, const char *key, int64_t *k, const int32_t **out) {
    double *x;
    TRY(read_lists(q, key, k, &x));
    const int64_t n = q->off[q->r.n] * *k;
    int32_t *id = algo_request_own(q, (size_t)n, sizeof *id);
    for (int64_t i = 0; i < n; i++) {
        if (!(x[i] >= 0 && x[i] < 0x1p31) || x[i] != floor(x[i]))
            FAIL(ERR_FORMAT, "%s: \"%s\": %g is not a token id", q->where, key, x[i]);
        id[i] = (int32_t)x[i];
    }
    *out = id;
    return 0;
}

static int read_distill(struct algo_request *q, struct algo_distill *d) {
    const char *mode = "k3";
    double ratio = NAN;
    TRY(algo_request_str(q, "loss_mode", &mode));
    TRY(algo_distill_find(d, mode));
    TRY(algo_request_f64(q, "loss_max_clamp", &d->loss_max_clamp));
    TRY(algo_request_f64(q, "log_prob_min_clamp", &d->log_prob_min_clamp));
    TRY(algo_request_bool(q, "use_policy_gradient", &d->use_policy_gradient));
    TRY(algo_request_f64(q, "clip_ratio", &ratio));
    if (isfinite(ratio)) d->policy.clip_ratio_low = d->policy.clip_ratio_high = ratio;
    TRY(algo_request_f64(q, "clip_ratio_low", &d->policy.clip_ratio_low));
    return algo_request_f64(q, "clip_ratio_high", &d->policy.clip_ratio_high);
}

static int op_distillation_loss(struct algo_request *q, json_t *out) {
    struct algo_distill d;
    struct algo_distill_sums sums = {0};
    TRY(algo_request_mask(q, "response_mask"));
    struct algo_distill_args a = {.r = &q->r, .d = &d};
    if (q->flat) FAIL(ERR_FORMAT, "%s: distillation_loss reads samples x tokens", q->where);
    TRY(read_distill(q, &d));
    TRY(algo_request_agg(q, "token-mean", &a.agg));
    const bool pg = d.use_policy_gradient;
    TRY(algo_request_tokens(q, "log_prob", NULL, pg || !d.list, &a.logp));
    TRY(algo_request_tokens(q, "teacher_logprobs", NULL, !d.list, &a.teacher_logp));
    TRY(algo_request_tokens(q, "old_log_prob", NULL, pg, &a.old_logp));
    TRY(algo_request_tokens(q, "rollout_is_weights", NULL, false, &a.is_weights));
    const int64_t n = q->off[q->r.n];
    double loss, *lists[2] = {0}, *dlogp = algo_request_own(q, (size_t)n, sizeof *dlogp), *dlist = NULL;
    if (d.list) {
        TRY(read_lists(q, "teacher_topk_log_probs", &a.k, &lists[0]));
        TRY(read_lists(q, "student_topk_log_probs", &a.k, &lists[1]));
        TRY(read_list_ids(q, "teacher_topk_ids", &a.k, &a.list_id));
        TRY(read_list_ids(q, "student_topk_ids", &a.k, &a.student_top));
        a.list_teacher = lists[0];
        a.list_logp = lists[1];
        a.vocab = INT64_MAX;
        TRY(algo_request_i64(q, "vocab_size", &a.vocab));
        dlist = algo_request_own(q, (size_t)(n * a.k), sizeof *dlist);
    }
    a.coef = 1;
    TRY(algo_distill_loss(&a, &loss, dlogp, dlist, &sums, &q->metrics));
    algo_distill_metrics(&sums, &q->metrics);
    TRY(put_loss(out, q, loss));
    put_metrics(out, q);
    if (!d.list || pg) put_tokens(out, "dlogp", q, dlogp);
    if (!d.list || pg) return 0;
    json_t *rows = json_array(); /* samples x tokens x k */
    for (int64_t i = 0; i < q->r.n; i++) {
        json_t *row = json_array();
        for (int64_t t = q->off[i]; t < q->off[i + 1]; t++) json_array_append_new(row, row_json(dlist, t * a.k, (t + 1) * a.k));
        json_array_append_new(rows, row);
    }
    json_object_set_new(out, "dlist", rows);
    return 0;
}

static int op_kl(struct algo_request *q, json_t *out) {
    const char *name = NULL;
    struct algo_kl_type type;
    TRY(algo_request_str(q, "type", &name));
    if (!name) TRY(algo_request_str(q, "kl_penalty", &name));
    if (!name) FAIL(ERR_FORMAT, "%s: \"type\" is missing", q->where);
    TRY(algo_kl_find(&type, name));
    const double *lp, *ref;
    TRY(algo_request_shape(q, "logp"));
    TRY(algo_request_tokens(q, "logp", NULL, true, &lp));
    TRY(algo_request_tokens(q, "ref_logp", NULL, true, &ref));
    const int64_t n = q->off[q->r.n];
    double *kl = algo_request_own(q, (size_t)n, sizeof *kl), *d = algo_request_own(q, (size_t)n, sizeof *d);
    for (int64_t t = 0; t < n; t++) kl[t] = algo_kl(&type, lp[t], ref[t], &d[t]);
    put_tokens(out, "kl", q, kl);
    put_tokens(out, "dlogp", q, d);
    return 0;
}

static int op_agg_loss(struct algo_request *q, json_t *out) {
    struct algo_agg agg = {0};
    const double *mat;
    TRY(algo_request_mask(q, "loss_mask"));
    TRY(algo_request_tokens(q, "loss_mat", NULL, true, &mat));
    TRY(algo_request_agg(q, "token-mean", &agg));
    double loss, *d = algo_request_own(q, (size_t)q->off[q->r.n], sizeof *d);
    TRY(algo_agg_loss(&q->r, &agg, mat, &loss, d));
    TRY(put_loss(out, q, loss));
    put_tokens(out, "dloss_mat", q, d);
    if (algo_n_valid(&q->r) == 0) {
        algo_metrics_set(&q->metrics, "no_valid_tokens", 1);
        put_metrics(out, q);
    }
    return 0;
}

static int op_value_loss(struct algo_request *q, json_t *out) {
    struct algo_value_args a = {.r = &q->r, .cliprange_value = 0.5};
    TRY(algo_request_mask(q, "response_mask"));
    TRY(algo_request_tokens(q, "vpreds", NULL, true, &a.vpreds));
    TRY(algo_request_tokens(q, "values", NULL, true, &a.values));
    TRY(algo_request_tokens(q, "returns", NULL, true, &a.returns));
    TRY(algo_request_f64(q, "cliprange_value", &a.cliprange_value));
    TRY(algo_request_agg(q, "token-mean", &a.agg));
    double loss, clipfrac = 0, *d = algo_request_own(q, (size_t)q->off[q->r.n], sizeof *d);
    TRY(algo_value_loss(&a, &loss, d, &q->metrics));
    TRY(put_loss(out, q, loss));
    put_tokens(out, "dvpreds", q, d);
    algo_metrics_get(&q->metrics, "critic/vf_clipfrac", &clipfrac);
    json_object_set_new(out, "vf_clipfrac", json_real(clipfrac));
    put_metrics(out, q);
    return 0;
}

static int op_rollout_correction(struct algo_request *q, json_t *out) {
    struct algo_corr c;
    struct algo_corr_args a = {.r = &q->r, .c = &c};
    const json_t *nested = algo_request_find(q, "rollout_correction");
    const struct algo_request in = {.req = nested ? nested : q->req, .where = q->where, .looked_for = q->looked_for};
    TRY(read_corr(q, &in, &c));
    TRY(algo_request_mask(q, "response_mask"));
    TRY(algo_request_tokens(q, "old_log_prob", "old_log_probs", true, &a.old_logp));
    TRY(algo_request_tokens(q, "rollout_log_prob", "rollout_log_probs", true, &a.rollout_logp));
    const int64_t n = q->off[q->r.n];
    double *w = algo_request_own(q, (size_t)n, sizeof *w);
    uint8_t *kept = algo_request_own(q, (size_t)n, 1);
    TRY(algo_corr_run(&a, w, kept, &q->metrics));
    if (c.is != ALGO_IS_NONE) put_tokens(out, "rollout_is_weights", q, w);
    else json_object_set_new(out, "rollout_is_weights", json_null());
    put_mask(out, "response_mask", q, kept);
    put_metrics(out, q);
    return 0;
}

static int read_ctrl(struct algo_request *q, const char *type_key, struct algo_kl_ctrl *c) {
    const char *type = "fixed";
    double coef = 0.001, target = 0.1, horizon = 10000; /* algorithm.kl_ctrl's defaults */
    TRY(algo_request_str(q, type_key, &type));
    TRY(algo_request_f64(q, "kl_coef", &coef));
    TRY(algo_request_f64(q, "init_kl_coef", &coef));
    TRY(algo_request_f64(q, "target_kl", &target));
    TRY(algo_request_f64(q, "horizon", &horizon));
    return algo_kl_ctrl_init(c, type, coef, target, horizon);
}

/* One update, or a list of current_kl in turn; "value" is the coefficient after it. */
static int op_kl_controller(struct algo_request *q, json_t *out) {
    struct algo_kl_ctrl c;
    TRY(read_ctrl(q, "type", &c));
    int64_t n_steps = 1;
    TRY(algo_request_i64(q, "n_steps", &n_steps));
    const json_t *kl = algo_request_find(q, "current_kl"), *e;
    size_t i;
    if (json_is_array(kl)) {
        json_t *values = json_array();
        json_object_set_new(out, "values", values);
        json_array_foreach(kl, i, e) {
            if (!json_is_number(e)) FAIL(ERR_FORMAT, "%s: \"current_kl\" element %zu is not a number", q->where, i);
            algo_kl_ctrl_update(&c, json_number_value(e), n_steps);
            json_array_append_new(values, real_or_null(c.value));
        }
    } else if (kl) {
        double current = 0;
        TRY(algo_request_f64(q, "current_kl", &current));
        algo_kl_ctrl_update(&c, current, n_steps);
    }
    json_object_set_new(out, "value", real_or_null(c.value));
    return 0;
}

static int op_pf_ppo_weights(struct algo_request *q, json_t *out) {
    struct algo_pf_ppo c;
    const char *method = "pow";
    double weight_pow = 2;
    const double *score;
    TRY(algo_request_str(q, "reweight_method", &method));
    TRY(algo_request_f64(q, "weight_pow", &weight_pow));
    TRY(algo_pf_ppo_parse(&c, method, weight_pow));
    TRY(algo_request_shape(q, "scores"));
    TRY(algo_request_tokens(q, "scores", NULL, true, &score));
    const int64_t n = q->off[q->r.n];
    double *w = algo_request_own(q, (size_t)n, sizeof *w);
    algo_pf_ppo_weights(&c, score, n, w);
    put_tokens(out, "weights", q, w);
    return 0;
}

static int read_lengths(const struct algo_request *q, const json_t *v, int64_t *len) {
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *e = json_array_get(v, i);
        if (!json_is_integer(e)) FAIL(ERR_FORMAT, "%s: \"seqlen\" element %zu is not a whole number", q->where, i);
        len[i] = json_integer_value(e);
    }
    return 0;
}

static int op_rearrange_micro_batches(struct algo_request *q, json_t *out) {
    const json_t *v;
    int64_t max_tokens = 0, n_micro;
    TRY(algo_request_array(q, "seqlen", NULL, &v));
    TRY(algo_request_i64(q, "max_token_len", &max_tokens));
    const size_t n = json_array_size(v);
    int64_t *len = algo_request_own(q, n, sizeof *len), *row = algo_request_own(q, n, sizeof *row),
            *end = algo_request_own(q, n, sizeof *end);
    TRY(read_lengths(q, v, len));
    TRY(algo_micro_batches(len, (int64_t)n, max_tokens, row, end, &n_micro));
    json_t *all = json_array();
    for (int64_t m = 0, i = 0; m < n_micro; m++) {
        json_t *rows = json_array();
        for (; i < end[m]; i++) json_array_append_new(rows, json_integer(row[i]));
        json_array_append_new(all, rows);
    }
    json_object_set_new(out, "micro_batches", all);
    return 0;
}

static int op_kl_in_reward(struct algo_request *q, json_t *out) {
    struct algo_kl_ctrl c;
    struct algo_kl_type type;
    struct algo_kl_reward_args a = {.r = &q->r, .type = &type};
    const char *name = "kl";
    TRY(algo_request_str(q, "kl_penalty", &name));
    TRY(algo_kl_find(&type, name));
    TRY(read_ctrl(q, "type", &c));
    TRY(algo_request_mask(q, "response_mask"));
    TRY(algo_request_tokens(q, "token_level_scores", NULL, true, &a.scores));
    TRY(algo_request_tokens(q, "old_log_probs", "old_log_prob", true, &a.old_logp));
    TRY(algo_request_tokens(q, "ref_log_prob", "ref_log_probs", true, &a.ref_logp));
    double *rewards = algo_request_own(q, (size_t)q->off[q->r.n], sizeof *rewards);
    algo_kl_in_reward(&c, &a, rewards, &q->metrics);
    put_tokens(out, "token_level_rewards", q, rewards);
    put_metrics(out, q);
    json_object_set_new(out, "value", real_or_null(c.value));
    return 0;
}

static const struct {
    const char *name;
    int (*run)(struct algo_request *q, json_t *out);
} ops[] = {
    {"advantage", op_advantage},
    {"policy_loss", op_policy_loss},
    {"kl", op_kl},
    {"agg_loss", op_agg_loss},
    {"value_loss", op_value_loss},
    {"rollout_correction", op_rollout_correction},
    {"kl_controller", op_kl_controller},
    {"kl_in_reward", op_kl_in_reward},
    {"pf_ppo_weights", op_pf_ppo_weights},
    {"actor_loss", op_actor_loss},
    {"distillation_loss", op_distillation_loss},
    {"rearrange_micro_batches", op_rearrange_micro_batches},
};
enum { N_OPS = sizeof ops / sizeof ops[0] };

/* A key that nothing read is likely misspelt: warn, once for each name. */
static void note_unread(const struct map *looked_for, const char *op, const json_t *object) {
    static const char *const containers[] = {"op",
                                             "config",
                                             "policy_loss",
                                             "global_batch_info",
                                             "kl_ctrl",
                                             "rollout_correction",
                                             "non_tensor_batch",
                                             "reward_extra_info"};
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)object, key, v) {
        bool known = map_gets(looked_for, key, NULL);
        for (size_t i = 0; i < sizeof containers / sizeof *containers; i++) known |= strcmp(key, containers[i]) == 0;
        if (!known) log_note("op %s does not read \"%s\"", op, key);
    }
}

int algo_json(const json_t *request, const char *where, const struct algo_json_user *user, json_t **answer) {
    struct map looked_for = {0};
    struct algo_request q = {.req = request, .where = where, .user = user, .looked_for = &looked_for};
    const char *op;
    TRY(json_str(request, "op", &op, where));
    int i = 0;
    while (i < N_OPS && strcmp(op, ops[i].name) != 0) i++;
    if (i == N_OPS) {
        struct buf known = {0};
        for (int k = 0; k < N_OPS; k++) buf_addf(&known, "%s, ", ops[k].name);
        buf_adds(&known, "reward");
        return err_wrap(algo_unknown("op", op, &known), "%s", where);
    }
    json_t *out = json_object();
    const int rc = ops[i].run(&q, out);
    if (rc == 0) {
        note_unread(&looked_for, op, request);
        note_unread(&looked_for, op, json_object_get(request, "config"));
    }
    map_free(&looked_for);
    algo_request_free(&q);
    if (rc < 0) {
        json_decref(out);
        return rc;
    }
    *answer = out;
    return 0;
}
