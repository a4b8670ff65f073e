/* advantage.c - the advantage estimators of verl.trainer.ppo.core_algos, each one
 * function and one row of the table at the end.
 *
 * s[i] is the sum of rewards over the whole row, masked tokens too, as in verl
 * (a value there that is not finite is ignored).  A group is the samples of one
 * prompt; mean and standard deviation (n - 1) are over its s.
 * Invariant: what an estimator reads beyond rewards and mask is named in its row
 * and checked before it runs. */
#include "algo/algo_int.h"

#include <stdlib.h>
#include <string.h>

#define STD_EPS 1e-6 /* verl's epsilon next to a group's standard deviation */

static double *row_scores(const struct algo_adv_args *a) {
    double *s = xcalloc((size_t)a->r->n + 1, sizeof *s);
    for (int64_t i = 0; i < a->r->n; i++)
        for (int64_t t = a->r->off[i]; t < a->r->off[i + 1]; t++)
            if (a->r->mask[t] || isfinite(a->rewards[t])) s[i] += a->rewards[t];
    return s;
}

/* adv[t] = per_row[i] on valid tokens, else 0; the outcome estimators' last step. */
static void spread(const struct algo_ragged *r, const double *per_row, double *adv, double *ret) {
    for (int64_t i = 0; i < r->n; i++)
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) adv[t] = r->mask[t] ? per_row[i] : 0;
    for (int64_t t = algo__first(r); t < algo__last(r); t++) ret[t] = adv[t];
}

/* Mean 0 and variance 1 over valid tokens (verl_F.masked_whiten).  Masked tokens
 * are shifted and scaled too, as verl does, unless clear is set. */
static int whiten(const struct algo_ragged *r, double *x, bool clear) {
    const int64_t n = algo_n_valid(r);
    if (n < 2)
        FAIL(ERR_INPUT,
             "advantages are whitened over the batch, which needs at least 2 valid tokens; "
             "response_mask has %lld",
             (long long)n);
    const double mean = algo_masked_mean(r, x);
    double ss = 0;
    ALGO__EACH_VALID(r, i, t) ss += (x[t] - mean) * (x[t] - mean);
    const double var = ss / ((double)n + ALGO__EPS) * ((double)n / (double)(n - 1));
    const double scale = 1 / sqrt(var + ALGO__EPS);
    for (int64_t t = algo__first(r); t < algo__last(r); t++) x[t] = clear && !r->mask[t] ? 0 : (x[t] - mean) * scale;
    return 0;
}

/* ---- generalised advantage estimation (Schulman et al., arXiv 1506.02438) ---- */

static int gae(const struct algo_adv_args *a, double *adv, double *ret) {
    const struct algo_ragged *r = a->r;
    for (int64_t i = 0; i < r->n; i++) {
        double next_value = 0, last = 0;
        for (int64_t t = r->off[i + 1]; t-- > r->off[i];) {
            if (r->mask[t]) { /* a masked token is passed over: it copies what follows it */
                const double delta = a->rewards[t] + a->gamma * next_value - a->values[t];
                last = delta + a->gamma * a->lam * last;
                next_value = a->values[t];
            }
            adv[t] = last;
            ret[t] = last + a->values[t];
        }
    }
    return whiten(r, adv, false);
}

/* ---- estimators from a group's scores ---- */

struct stats {
    double mean, std; /* n - 1; a group of one: 0 and 1 */
};

static struct stats group_stats(const struct algo__groups *g, int64_t k, const double *s) {
    const int64_t n = g->first[k + 1] - g->first[k];
    if (n == 1) return (struct stats){0, 1};
    struct stats st = {0, 0};
    for (int64_t j = g->first[k]; j < g->first[k + 1]; j++) st.mean += s[g->row[j]];
    st.mean /= (double)n;
    for (int64_t j = g->first[k]; j < g->first[k + 1]; j++) st.std += (s[g->row[j]] - st.mean) * (s[g->row[j]] - st.mean);
    st.std = sqrt(st.std / (double)(n - 1));
    return st;
}

/* s := (s - mean) / (std + eps), or s - mean; the heart of GRPO (arXiv 2402.03300)
 * and of Dr.GRPO (arXiv 2503.20783). */
static void normalise_groups(int64_t n, const int64_t *group, double *s, bool by_std) {
    struct algo__groups g;
    algo__groups_init(&g, n, group);
    for (int64_t k = 0; k < g.n; k++) {
        const struct stats st = group_stats(&g, k, s);
        for (int64_t j = g.first[k]; j < g.first[k + 1]; j++) {
            s[g.row[j]] -= st.mean;
            if (by_std) s[g.row[j]] /= st.std + STD_EPS;
        }
    }
    algo__groups_free(&g);
}

static int grpo_of_rows(const struct algo_adv_args *a, double *adv, double *ret) {
    double *s = row_scores(a);
    normalise_groups(a->r->n, a->group, s, a->norm_by_std);
    spread(a->r, s, adv, ret);
    free(s);
    return 0;
}

void algo_session_finals(int64_t n, const int64_t *session, int64_t *final) {
    for (int64_t i = 0; i < n; i++) final[i] = i;
    if (!session) return;
    struct algo__groups g;
    algo__groups_init(&g, n, session);
    for (int64_t k = 0; k < g.n; k++)
        for (int64_t j = g.first[k]; j < g.first[k + 1]; j++) final[g.row[j]] = g.row[g.first[k + 1] - 1];
    algo__groups_free(&g);
}

/* Of the final output of each session alone; its advantage is that of all outputs of the session, and 0 where it has no valid token
 * (verl's trainer/ppo/v1/utils.py compute_advantage_for_multi_trajectories, which grpo alone has). */
static int grpo(const struct algo_adv_args *a, double *adv, double *ret) {
    if (!a->session) return grpo_of_rows(a, adv, ret);
    const int64_t n = a->r->n;
    double *s = row_scores(a), *of = xcalloc((size_t)n + 1, sizeof *of);
    int64_t *final = xmalloc((size_t)(3 * n + 1) * sizeof *final), *group = final + n, *at = group + n, k = 0;
    algo_session_finals(n, a->session, final);
    for (int64_t i = 0; i < n; i++) {
        if (final[i] != i) continue;
        group[k] = a->group[i];
        of[k] = s[i];
        at[i] = k++;
    }
    normalise_groups(k, group, of, a->norm_by_std);
    for (int64_t i = 0; i < n; i++) s[i] = algo__row_valid(a->r, final[i]) > 0 ? of[at[final[i]]] : 0;
    spread(a->r, s, adv, ret);
    free(s);
    free(of);
    free(final);
    return 0;
}

/* GDPO (arXiv 2601.05242): GRPO on each reward by itself, weighted sum, whitened. */
static int gdpo(const struct algo_adv_args *a, double *adv, double *ret) {
    const struct algo_ragged *r = a->r;
    const int64_t n_comp = a->n_components ? a->n_components : 1;
    double *total = xcalloc((size_t)r->n + 1, sizeof *total);
    for (int64_t k = 0; k < n_comp; k++) {
        double *s = row_scores(a);
        if (a->n_components) memcpy(s, a->components + k * r->n, (size_t)r->n * sizeof *s);
        normalise_groups(r->n, a->group, s, a->norm_by_std);
        const double w = a->component_weights ? a->component_weights[k] : 1;
        for (int64_t i = 0; i < r->n; i++) total[i] += w * s[i];
        free(s);
    }
    spread(r, total, adv, ret);
    free(total);
    TRY(whiten(r, adv, true));
    for (int64_t t = algo__first(r); t < algo__last(r); t++) ret[t] = adv[t];
    return 0;
}

/* Pass@k (arXiv 2503.19595): only a group's best sample gets something, its lead
 * over the second. */
static int grpo_passk(const struct algo_adv_args *a, double *adv, double *ret) {
    double *s = row_scores(a), *out = xcalloc((size_t)a->r->n + 1, sizeof *out);
    struct algo__groups g;
    int rc = 0;
    algo__groups_init(&g, a->r->n, a->group);
    for (int64_t k = 0; k < g.n; k++) {
        const int64_t n = g.first[k + 1] - g.first[k];
        if (n < 2)
            FAILG(done, ERR_INPUT,
                  "grpo_passk needs at least 2 samples of each prompt (rollout.n >= 2); "
                  "the prompt of sample %lld has 1",
                  (long long)g.row[g.first[k]]);
        int64_t best = g.row[g.first[k]];
        for (int64_t j = g.first[k]; j < g.first[k + 1]; j++)
            if (s[g.row[j]] > s[best]) best = g.row[j];
        double second = -INFINITY;
        for (int64_t j = g.first[k]; j < g.first[k + 1]; j++)
            if (g.row[j] != best && s[g.row[j]] > second) second = s[g.row[j]];
        out[best] = s[best] - second;
        if (a->norm_by_std) out[best] /= group_stats(&g, k, s).std + STD_EPS;
    }
    spread(a->r, out, adv, ret);
done:
    algo__groups_free(&g);
    free(s);
    free(out);
    return rc;
}

/* REINFORCE++ with a group-mean baseline (arXiv 2501.03262). */
static int reinforce_pp_baseline(const struct algo_adv_args *a, double *adv, double *ret) {
    double *s = row_scores(a);
    normalise_groups(a->r->n, a->group, s, false);
    spread(a->r, s, adv, ret);
    free(s);
    TRY(whiten(a->r, adv, true));
    for (int64_t t = algo__first(a->r); t < algo__last(a->r); t++) ret[t] = adv[t];
    return 0;
}

/* Leave-one-out baseline (arXiv 2402.14740).  A single sample keeps its score in
 * verl's loop version and gets 0 in its vectorised one. */
static int leave_one_out(const struct algo_adv_args *a, double single, double *adv, double *ret) {
    double *s = row_scores(a);
    struct algo__groups g;
    algo__groups_init(&g, a->r->n, a->group);
    for (int64_t k = 0; k < g.n; k++) {
        const double n = (double)(g.first[k + 1] - g.first[k]);
        const double mean = group_stats(&g, k, s).mean;
        for (int64_t j = g.first[k]; j < g.first[k + 1]; j++)
            s[g.row[j]] = n == 1 ? single * s[g.row[j]] : (s[g.row[j]] - mean) * n / (n - 1);
    }
    algo__groups_free(&g);
    spread(a->r, s, adv, ret);
    free(s);
    return 0;
}
static int rloo(const struct algo_adv_args *a, double *adv, double *ret) { return leave_one_out(a, 1, adv, ret); }
static int rloo_vectorized(const struct algo_adv_args *a, double *adv, double *ret) { return leave_one_out(a, 0, adv, ret); }

/* OPO (arXiv 2505.23585): the baseline is the length-weighted mean of the group. */
static int opo(const struct algo_adv_args *a, double *adv, double *ret) {
    double *s = row_scores(a);
    struct algo__groups g;
    algo__groups_init(&g, a->r->n, a->group);
    for (int64_t k = 0; k < g.n; k++) {
        if (g.first[k + 1] - g.first[k] == 1) continue; /* baseline 0 */
        double ls = 0, l = 0;
        for (int64_t j = g.first[k]; j < g.first[k + 1]; j++) {
            const double len = (double)algo__row_valid(a->r, g.row[j]);
            ls += len * s[g.row[j]];
            l += len;
        }
        const double b = l > 0 ? ls / l : 0; /* all empty: nothing will read it */
        for (int64_t j = g.first[k]; j < g.first[k + 1]; j++) s[g.row[j]] -= b;
    }
    algo__groups_free(&g);
    spread(a->r, s, adv, ret);
    free(s);
    return 0;
}

/* GPG (arXiv 2504.02546): group-mean baseline, scaled by batch size over the
 * number of samples with a score. */
static int gpg(const struct algo_adv_args *a, double *adv, double *ret) {
    double *s = row_scores(a);
    int64_t n_nonzero = 0;
    for (int64_t i = 0; i < a->r->n; i++) n_nonzero += s[i] != 0;
    const double alpha = (double)a->r->n / (double)(n_nonzero > 1 ? n_nonzero : 1);
    normalise_groups(a->r->n, a->group, s, false);
    for (int64_t i = 0; i < a->r->n; i++) s[i] *= alpha;
    spread(a->r, s, adv, ret);
    free(s);
    return 0;
}

/* ---- estimators from the rewards to go ---- */

/* REINFORCE++ (arXiv 2501.03262): discounted return, carried across masked
 * tokens, whitened over the batch. */
static int reinforce_pp(const struct algo_adv_args *a, double *adv, double *ret) {
    const struct algo_ragged *r = a->r;
    for (int64_t i = 0; i < r->n; i++) {
        double run = 0;
        for (int64_t t = r->off[i + 1]; t-- > r->off[i];) {
            if (r->mask[t]) run = a->rewards[t] + a->gamma * run;
            ret[t] = adv[t] = r->mask[t] ? run : 0;
        }
    }
    return whiten(r, adv, true);
}

/* ReMax (arXiv 2310.10505): the baseline is the reward of a greedy response. */
static int remax(const struct algo_adv_args *a, double *adv, double *ret) {
    const struct algo_ragged *r = a->r;
    for (int64_t i = 0; i < r->n; i++) {
        double run = 0;
        for (int64_t t = r->off[i + 1]; t-- > r->off[i];) {
            if (r->mask[t]) run += a->rewards[t];
            ret[t] = run;
            adv[t] = r->mask[t] ? run - a->reward_baselines[i] : run;
        }
    }
    return 0;
}

/* ---- the table ---- */

#define ROW(id, what, function) \
    { .name = id, .needs = what, .run = function }
static const struct algo_adv_entry estimators[] = {
    ROW("gae", ALGO_NEEDS_VALUES, gae),
    ROW("grpo", ALGO_NEEDS_GROUP, grpo),
    ROW("grpo_vectorized", ALGO_NEEDS_GROUP, grpo_of_rows), /* the same numbers since verl 0.9.1, but for sessions */
    ROW("grpo_passk", ALGO_NEEDS_GROUP, grpo_passk),
    ROW("gdpo", ALGO_NEEDS_GROUP, gdpo),
    ROW("reinforce_plus_plus", 0, reinforce_pp),
    ROW("reinforce_plus_plus_baseline", ALGO_NEEDS_GROUP, reinforce_pp_baseline),
    ROW("rloo", ALGO_NEEDS_GROUP, rloo),
    ROW("rloo_vectorized", ALGO_NEEDS_GROUP, rloo_vectorized),
    ROW("remax", ALGO_NEEDS_BASELINES, remax),
    ROW("opo", ALGO_NEEDS_GROUP, opo),
    ROW("gpg", ALGO_NEEDS_GROUP, gpg),
    ROW("optimal_token_baseline", ALGO_NEEDS_GROUP | ALGO_NEEDS_SUM_PI, algo__otb),
    ROW("tir_optimal_token_baseline", ALGO_NEEDS_GROUP | ALGO_NEEDS_SUM_PI, algo__otb_tir),
};
#undef ROW
enum { N_ESTIMATORS = sizeof estimators / sizeof estimators[0] };

struct algo_adv_args algo_adv_defaults(void) {
    return (struct algo_adv_args){.gamma = 1, .lam = 1, .norm_by_std = true, .handle_zero_tail = true};
}

const struct algo_adv_entry *algo_adv_find(const char *name) {
    struct buf known = {0};
    for (int i = 0; i < N_ESTIMATORS; i++) {
        if (strcmp(name, estimators[i].name) == 0) return buf_free(&known), &estimators[i];
        buf_addf(&known, "%s%s", i ? ", " : "", estimators[i].name);
    }
    algo_unknown("adv_estimator", name, &known);
    return NULL;
}

int algo_advantage(const struct algo_adv_entry *e, const struct algo_adv_args *a, double *adv, double *ret) {
    CHECK(a->r && a->rewards);
    if ((e->needs & ALGO_NEEDS_GROUP) && !a->group) FAIL(ERR_INVAL, "%s compares the samples of one prompt and needs uid", e->name);
    if ((e->needs & ALGO_NEEDS_VALUES) && !a->values) FAIL(ERR_INVAL, "%s needs values from a critic", e->name);
    if ((e->needs & ALGO_NEEDS_BASELINES) && !a->reward_baselines)
        FAIL(ERR_INVAL, "%s needs reward_baselines, one for each sample", e->name);
    if ((e->needs & ALGO_NEEDS_SUM_PI) && (!a->sum_pi_squared || !a->old_logp))
        FAIL(ERR_INVAL, "%s needs old_log_probs and sum_pi_squared (actor.calculate_sum_pi_squared=True)", e->name);
    return e->user ? e->user(e->ctx, a, adv, ret) : e->run(a, adv, ret);
}
