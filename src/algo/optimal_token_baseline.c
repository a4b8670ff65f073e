/* optimal_token_baseline.c - optimal token baselines: one baseline for each prompt and step,
 * b_t = sum G_t W_t / sum W_t over the samples of the prompt, where G_t is the
 * reward to go and W_t the sum of 1 - 2 pi + sum pi^2 up to t, a proxy of the
 * gradient's variance (verl compute_optimal_token_baseline_advantage and its
 * multi-turn form).
 *
 * The two differ in what "step t" means: the column of the padded matrix, or the
 * t-th valid token of the row (tool output between turns left out). */
#include "algo/algo_int.h"

#include <stdlib.h>

struct tracks { /* per token of the ragged array */
    double *g;  /* reward to go */
    double *w;  /* cumulative variance proxy */
};

static void tracks_init(struct tracks *k, const struct algo_adv_args *a) {
    const struct algo_ragged *r = a->r;
    k->g = algo__tokens(r);
    k->w = algo__tokens(r);
    for (int64_t i = 0; i < r->n; i++) {
        double g = 0, w = 0;
        for (int64_t t = r->off[i + 1]; t-- > r->off[i];) {
            if (r->mask[t]) g += a->rewards[t];
            k->g[t] = g;
        }
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            if (r->mask[t]) {
                const double rho = a->is_weights ? a->is_weights[t] : 1;
                w += (1 - 2 * exp(a->old_logp[t]) + a->sum_pi_squared[t]) * rho * rho;
            }
            k->w[t] = w;
        }
    }
}

static void tracks_free(struct tracks *k) {
    free(k->g);
    free(k->w);
}

/* The token of row i at each step: by column, or by count of valid tokens. -1
 * where the row has no valid token at that step.  Returns the number of steps. */
static int64_t steps_of_row(const struct algo_ragged *r, int64_t i, bool compact, int64_t *token) {
    int64_t n = 0;
    for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
        if (r->mask[t]) token[n++] = t;
        else if (!compact) token[n++] = -1;
    }
    return n;
}

/* The one row of the group that is strictly the longest, -1 if none; *second is
 * the next length (in valid tokens). */
static int64_t longest_row(const struct algo_ragged *r, const int64_t *row, int64_t n, int64_t *second) {
    int64_t best = -1, first = -1;
    *second = -1;
    for (int64_t j = 0; j < n; j++) {
        const int64_t len = algo__row_valid(r, row[j]);
        if (len > first) {
            *second = first;
            first = len;
            best = row[j];
        } else if (len > *second) {
            *second = len;
        }
    }
    return first > *second ? best : -1;
}

/* adv = G - b on the valid tokens of one prompt's samples. */
static void group_advantage(const struct algo_adv_args *a, const struct tracks *k, const int64_t *row, int64_t n, bool compact,
                            double *adv) {
    const struct algo_ragged *r = a->r;
    const int64_t width = algo__max_row(r);
    double *num = xcalloc((size_t)width + 1, sizeof *num), *den = xcalloc((size_t)width + 1, sizeof *den);
    int64_t *token = xmalloc((size_t)(width + 1) * sizeof *token);
    for (int64_t j = 0; j < n; j++) {
        const int64_t steps = steps_of_row(r, row[j], compact, token);
        for (int64_t c = 0; c < steps; c++) {
            if (token[c] < 0) continue;
            num[c] += k->g[token[c]] * k->w[token[c]];
            den[c] += k->w[token[c]];
        }
    }
    int64_t second = 0;
    const int64_t longest = a->handle_zero_tail ? longest_row(r, row, n, &second) : -1;
    for (int64_t j = 0; j < n; j++) {
        const int64_t steps = steps_of_row(r, row[j], compact, token);
        for (int64_t c = 0; c < steps; c++) {
            if (token[c] < 0) continue;
            /* a lone sample, or the part that only the longest one has: no baseline */
            const bool none = n == 1 || (row[j] == longest && c >= second);
            adv[token[c]] = k->g[token[c]] - (none ? 0 : num[c] / (den[c] + ALGO__EPS));
        }
    }
    free(num);
    free(den);
    free(token);
}

static int token_baseline(const struct algo_adv_args *a, bool compact, double *adv, double *ret) {
    const struct algo_ragged *r = a->r;
    struct tracks k;
    struct algo__groups g;
    tracks_init(&k, a);
    algo__groups_init(&g, r->n, a->group);
    for (int64_t t = algo__first(r); t < algo__last(r); t++) {
        adv[t] = 0;
        ret[t] = k.g[t];
    }
    int64_t *row = xmalloc((size_t)(r->n + 1) * sizeof *row);
    for (int64_t q = 0; q < g.n; q++) {
        int64_t n = 0;
        for (int64_t j = g.first[q]; j < g.first[q + 1]; j++) /* compact: empty rows do not count */
            if (!compact || algo__row_valid(r, g.row[j]) > 0) row[n++] = g.row[j];
        group_advantage(a, &k, row, n, compact, adv);
    }
    free(row);
    algo__groups_free(&g);
    tracks_free(&k);
    return 0;
}

int algo__otb(const struct algo_adv_args *a, double *adv, double *ret) { return token_baseline(a, false, adv, ret); }

int algo__otb_tir(const struct algo_adv_args *a, double *adv, double *ret) { return token_baseline(a, true, adv, ret); }
