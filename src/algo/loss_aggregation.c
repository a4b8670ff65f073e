/* loss_aggregation.c - verl's agg_loss as a weight per token: every mode is linear in the loss matrix, so the weights
 * are also the derivative.
 * Invariant: with the global counts given, the weights of a token do not depend on the micro-batch it is in. */
#include "algo/algo_int.h"

#include <stdlib.h>
#include <string.h>

struct algo_agg_mode {
    const char *name;
    bool per_token;                 /* normalised by tokens, not by sequences */
    double (*row)(int64_t n_valid); /* factor of each token of a row with n_valid tokens */
    bool by_tokens, by_width;       /* divide by batch_num_tokens; by loss_scale_factor */
};

static double row_sum_factor(int64_t n_valid) {
    (void)n_valid;
    return 1;
}
static double row_mean_factor(int64_t n_valid) { return 1 / ((double)n_valid + ALGO__EPS); }

static const struct algo_agg_mode agg_modes[] = {
    {"token-mean", true, row_sum_factor, true, false},
    {"token-sum", true, row_sum_factor, false, false},
    {"seq-mean-token-sum", false, row_sum_factor, false, false},
    {"seq-mean-token-sum-norm", false, row_sum_factor, false, true},
    {"seq-mean-token-mean", false, row_mean_factor, false, false},
};
enum { N_AGG = sizeof agg_modes / sizeof agg_modes[0] };

const struct algo_agg_mode *algo_agg_find(const char *name) {
    struct buf known = {0};
    for (int i = 0; i < N_AGG; i++) {
        if (strcmp(name, agg_modes[i].name) == 0) return buf_free(&known), &agg_modes[i];
        buf_addf(&known, "%s%s", i ? ", " : "", agg_modes[i].name);
    }
    algo_unknown("loss_agg_mode", name, &known);
    return NULL;
}

/* The divisor of the mode: the global count where given, else the count here. */
static int normaliser(const struct algo_ragged *r, const struct algo_agg *g, double *out) {
    const struct algo_agg_mode *mode = g->mode;
    int64_t n = mode->per_token ? g->batch_num_tokens : g->global_batch_size;
    *out = 1;
    if (mode->per_token && !mode->by_tokens) return 0;
    if (n < 0) FAIL(ERR_INVAL, "%s: the global batch counts are negative", mode->name);
    if (n == 0) {
        if (g->dp_size > 1)
            FAIL(ERR_INVAL, "%s: dp_size %lld needs %s of the global batch", mode->name, (long long)g->dp_size,
                 mode->per_token ? "batch_num_tokens" : "global_batch_size");
        for (int64_t i = 0; i < r->n; i++) {
            const int64_t valid = algo__row_valid(r, i);
            n += mode->per_token ? valid : valid > 0;
        }
    }
    *out = (double)n;
    return 0;
}

int algo_agg_weights(const struct algo_ragged *r, const struct algo_agg *g, double *w) {
    CHECK(g->mode != NULL);
    double n;
    TRY(normaliser(r, g, &n));
    const double dp = g->dp_size > 1 ? (double)g->dp_size : 1;
    double width = 1;
    if (g->mode->by_width) {
        if (g->loss_scale_factor < 0) FAIL(ERR_INVAL, "loss_scale_factor must be positive");
        width = g->loss_scale_factor > 0 ? g->loss_scale_factor : g->width > 0 ? (double)g->width : (double)algo__max_row(r);
    }
    for (int64_t i = 0; i < r->n; i++) {
        const int64_t valid = algo__row_valid(r, i);
        const double of_token = valid ? g->mode->row(valid) / n * dp / width : 0;
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) w[t] = r->mask[t] ? of_token : 0;
    }
    return 0;
}

int algo_agg_loss(const struct algo_ragged *r, const struct algo_agg *agg, const double *loss_mat, double *loss,
                  double *dloss_mat) {
    double *w = dloss_mat ? dloss_mat : algo__tokens(r);
    const int rc = algo_agg_weights(r, agg, w);
    if (rc == 0) {
        double s = 0;
        ALGO__EACH_VALID(r, i, t) s += w[t] * loss_mat[t];
        *loss = s;
    }
    if (!dloss_mat) free(w);
    return rc;
}
