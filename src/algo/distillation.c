/* distillation.c - on-policy distillation: a loss for each token of the student's own samples that draws its
 * distribution to a frozen teacher's (GKD, arXiv 2306.13649), and its derivative by the student's log-probs.
 * Names, order of clamps and metrics are verl's (trainer/distillation); reverse_kl_topk and jsd_topk are ours.
 *
 * The estimators k1, k2, ... see the sampled token alone and are kl.c's.  The others see the teacher's k most
 * probable tokens.  forward_kl_topk is verl's: the terms of these tokens and nothing else.  For the reverse KL and
 * JSD that would reward a student who moves its mass to tokens outside the list, so there all other tokens count
 * as one more, whose probability is what the list leaves.
 * Invariant: as in every loss, a token weighs the same in whatever micro-batch it comes. */
#include "algo/distillation.h"

#include "algo/algo_int.h"

#include <stdlib.h>
#include <string.h>

/* What the list leaves is known to the rounding of f32 log-probs only. */
#define REST_MIN 1e-7

/* ---- one token's list ---- */

struct entry {           /* of the list; after log_prob_min_clamp */
    double lq, lp, q, p; /* student's and teacher's log-prob and probability */
};

static double forward_kl(const struct entry *e, double *dq) {
    *dq = -e->p;
    return e->p * (e->lp - e->lq);
}
static double reverse_kl(const struct entry *e, double *dq) { /* dq: by lq; the share of the rest is separate */
    *dq = e->q * (e->lq - e->lp + 1);
    return e->q * (e->lq - e->lp);
}
static double jsd(const struct entry *e, double *dq) {
    const double lm = log((e->p + e->q) / 2);
    *dq = e->q > 0 ? 0.5 * e->q * (e->lq - lm) : 0;
    return 0.5 * ((e->p > 0 ? e->p * (e->lp - lm) : 0) + (e->q > 0 ? e->q * (e->lq - lm) : 0));
}

static const struct mode {
    const char *name;
    double (*term)(const struct entry *e, double *dq);
    bool rest; /* the tokens outside the list are an entry */
} modes[] = {{"forward_kl_topk", forward_kl, false}, {"reverse_kl_topk", reverse_kl, true}, {"jsd_topk", jsd, true}};
enum { N_MODES = sizeof modes / sizeof *modes };

int algo_distill_find(struct algo_distill *d, const char *loss_mode) {
    *d = (struct algo_distill){.loss_max_clamp = INFINITY, .log_prob_min_clamp = -INFINITY, .policy = algo_policy_defaults()};
    for (int i = 0; i < N_MODES; i++)
        if (strcmp(modes[i].name, loss_mode) == 0) {
            d->name = modes[i].name;
            d->list = i + 1;
            return 0;
        }
    if (strchr(loss_mode, '+') || algo_kl_find(&d->kl, loss_mode) < 0)
        FAIL(ERR_INVAL,
             "distillation loss '%s' is unknown; use k1 (kl), abs, k2 (mse), k3 (low_var_kl), forward_kl_topk, "
             "reverse_kl_topk or jsd_topk",
             loss_mode);
    d->name = d->kl.name;
    return 0;
}

/* The student's and teacher's mass in the list. */
struct mass {
    double q, p;
};
static struct mass mass_of(const double *lq, const double *lp, int64_t k) {
    struct mass m = {0, 0};
    for (int64_t i = 0; i < k; i++) {
        m.q += exp(lq[i]);
        m.p += exp(lp[i]);
    }
    return m;
}

/* The loss of one token; dlq (k). */
static double list_loss(const struct algo_distill_args *a, int64_t t, struct mass mass, double *dlq) {
    const struct mode *mode = &modes[a->d->list - 1];
    const double *lq = a->list_logp + t * a->k, *lp = a->list_teacher + t * a->k, least = a->d->log_prob_min_clamp;
    double loss = 0;
    for (int64_t i = 0; i < a->k; i++) {
        struct entry e = {.lq = fmax(lq[i], least), .lp = fmax(lp[i], least)};
        e.q = exp(e.lq);
        e.p = exp(e.lp);
        loss += mode->term(&e, &dlq[i]);
        if (!(lq[i] > least)) dlq[i] = 0;
    }
    if (!mode->rest || a->k >= a->vocab) return loss;
    struct entry rest = {.q = fmax(1 - mass.q, REST_MIN), .p = fmax(1 - mass.p, REST_MIN)};
    double d;
    rest.lq = log(rest.q);
    rest.lp = log(rest.p);
    loss += mode->term(&rest, &d);
    if (1 - mass.q > REST_MIN) /* d log rest / d lq[i] = -q[i] / rest */
        for (int64_t i = 0; i < a->k; i++) dlq[i] -= d / rest.q * exp(lq[i]);
    return loss;
}

/* ---- metrics ---- */

static void range_add(struct algo_range *r, int64_t n_before, double x) {
    r->sum += x;
    r->min = n_before == 0 || x < r->min ? x : r->min;
    r->max = n_before == 0 || x > r->max ? x : r->max;
}

/* How many of the teacher's list are in the student's, and the mean of -p (log p - log q) over these
 * (arXiv 2604.13016). */
static void overlap_add(const struct algo_distill_args *a, int64_t t, struct algo_distill_sums *s) {
    const int32_t *id = a->list_id + t * a->k, *top = a->student_top + t * a->k;
    int64_t n = 0;
    double advantage = 0;
    for (int64_t i = 0; i < a->k; i++) {
        bool both = false;
        for (int64_t j = 0; j < a->k && !both; j++) both = id[i] == top[j];
        if (!both) continue;
        const double lq = fmax(a->list_logp[t * a->k + i], a->d->log_prob_min_clamp);
        const double lp = fmax(a->list_teacher[t * a->k + i], a->d->log_prob_min_clamp);
        advantage -= exp(lp) * (lp - lq);
        n++;
    }
    s->overlap += (double)n / (double)a->k;
    if (n == 0) return;
    s->overlap_advantage += advantage / (double)n;
    s->n_overlap++;
}

void algo_distill_metrics(const struct algo_distill_sums *s, struct algo_metrics *m) {
    const double n = (double)s->n;
    if (s->n == 0) return;
    algo_metrics_set(m, "distillation/loss", s->loss);
    algo_metrics_set(m, "distillation/loss_min", s->token_loss.min);
    algo_metrics_set(m, "distillation/loss_max", s->token_loss.max);
    if (!s->list) {
        algo_metrics_set(m, "distillation/abs_loss", s->abs_loss / n);
        return;
    }
    algo_metrics_set(m, "distillation/student_mass", s->student_mass.sum / n);
    algo_metrics_set(m, "distillation/student_mass_min", s->student_mass.min);
    algo_metrics_set(m, "distillation/student_mass_max", s->student_mass.max);
    algo_metrics_set(m, "distillation/teacher_mass", s->teacher_mass.sum / n);
    algo_metrics_set(m, "distillation/teacher_mass_min", s->teacher_mass.min);
    algo_metrics_set(m, "distillation/teacher_mass_max", s->teacher_mass.max);
    algo_metrics_set(m, "distillation/overlap_ratio", s->overlap / n);
    algo_metrics_set(m, "distillation/overlap_token_advantage", s->n_overlap ? s->overlap_advantage / (double)s->n_overlap : 0);
}

/* ---- the loss ---- */

/* A loss for each valid token before loss_max_clamp, and its derivative: by logp, or by the list (r's range of dlist). */
static void token_losses(const struct algo_distill_args *a, double *mat, double *dlogp, double *dlist,
                         struct algo_distill_sums *s) {
    s->list = a->d->list != 0;
    ALGO__EACH_VALID(a->r, i, t) {
        if (s->list) {
            const struct mass m = mass_of(a->list_logp + t * a->k, a->list_teacher + t * a->k, a->k);
            mat[t] = list_loss(a, t, m, dlist + t * a->k);
            /* a part of a distribution can have a negative KL; verl takes 0 */
            if (!(mat[t] > 0)) memset(dlist + t * a->k, 0, (size_t)a->k * sizeof *dlist);
            if (mat[t] < 0) mat[t] = 0;
            range_add(&s->student_mass, s->n, m.q);
            range_add(&s->teacher_mass, s->n, m.p);
            overlap_add(a, t, s);
        } else {
            mat[t] = algo_kl(&a->d->kl, a->logp[t], a->teacher_logp[t], &dlogp[t]);
            s->abs_loss += fabs(mat[t]);
        }
        range_add(&s->token_loss, s->n, mat[t]);
        s->n++;
    }
}

/* The negative loss as the advantage of a clipped policy loss. Its metrics are distillation/... */
static int policy_gradient(const struct algo_distill_args *a, const double *mat, double *loss, double *dlogp,
                           struct algo_metrics *m) {
    double *adv = algo__tokens(a->r), *d = algo__tokens(a->r);
    struct algo_metrics own = {0};
    ALGO__EACH_VALID(a->r, i, t) adv[t] = -mat[t];
    const struct algo_policy_args p = {.r = a->r,
                                       .old_logp = a->old_logp,
                                       .logp = a->logp,
                                       .advantages = adv,
                                       .is_weights = a->is_weights,
                                       .agg = a->agg,
                                       .cfg = a->d->policy};
    const int rc = algo_policy_loss(algo_policy_find("vanilla"), &p, loss, d, &own);
    ALGO__EACH_VALID(a->r, i, t) dlogp[t] += a->coef * d[t];
    for (int64_t i = 0; i < own.n; i++) {
        char name[sizeof own.v[i].name + 8];
        const char *slash = strchr(own.v[i].name, '/');
        snprintf(name, sizeof name, "distillation%s", slash ? slash : "");
        algo_metrics_set(m, name, own.v[i].value);
    }
    algo_metrics_free(&own);
    free(adv);
    free(d);
    return rc;
}

int algo_distill_loss(const struct algo_distill_args *a, double *loss, double *dlogp, double *dlist, struct algo_distill_sums *s,
                      struct algo_metrics *m) {
    const double most = a->d->loss_max_clamp, coef = a->coef;
    double *mat = algo__tokens(a->r), *d = algo__tokens(a->r), *w = algo__tokens(a->r);
    int rc = 0;
    for (int64_t t = algo__first(a->r) * a->k; a->d->list && t < algo__last(a->r) * a->k; t++) dlist[t] = 0;
    token_losses(a, mat, d, dlist, s);
    ALGO__EACH_VALID(a->r, i, t) {
        if (!(fabs(mat[t]) < most)) { /* a clamp that acts passes no gradient */
            d[t] = 0;
            for (int64_t q = 0; a->d->list && q < a->k; q++) dlist[t * a->k + q] = 0;
        }
        mat[t] = algo__clamp(mat[t], -most, most);
    }
    if (a->d->use_policy_gradient) {
        for (int64_t t = algo__first(a->r) * a->k; a->d->list && t < algo__last(a->r) * a->k; t++) dlist[t] = 0;
        rc = policy_gradient(a, mat, loss, dlogp, m);
    } else {
        rc = algo_agg_loss(a->r, &a->agg, mat, loss, w);
        ALGO__EACH_VALID(a->r, i, t) {
            dlogp[t] += coef * w[t] * d[t];
            for (int64_t q = 0; a->d->list && q < a->k; q++) dlist[t * a->k + q] *= coef * w[t];
        }
    }
    if (rc == 0) s->loss += *loss;
    free(mat);
    free(d);
    free(w);
    return rc;
}
