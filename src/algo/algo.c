/* algo.c - metrics, masked sums, groups and loss aggregation.
 *
 * Aggregation is expressed as a weight per token: every mode of verl's agg_loss
 * is linear in the loss matrix, so the weights are at once the derivative.
 * Invariant: with the global counts given, the weights of a token do not depend
 * on the micro-batch it is in. */
#include "algo/algo_int.h"

#include <stdlib.h>
#include <string.h>

/* ---- metrics ---- */

void algo_metrics_set(struct algo_metrics *m, const char *name, double value) {
    if (!m) return;
    CHECK(strlen(name) < sizeof m->v->name);
    for (int64_t i = 0; i < m->n; i++) {
        if (strcmp(m->v[i].name, name) != 0) continue;
        m->v[i].value = value;
        return;
    }
    xgrow((void **)&m->v, &m->cap, m->n + 1, sizeof *m->v);
    struct algo_metric *e = &m->v[m->n++];
    strcpy(e->name, name);
    e->value = value;
}

bool algo_metrics_get(const struct algo_metrics *m, const char *name, double *value) {
    for (int64_t i = 0; i < m->n; i++) {
        if (strcmp(m->v[i].name, name) != 0) continue;
        *value = m->v[i].value;
        return true;
    }
    return false;
}

void algo_metrics_free(struct algo_metrics *m) {
    free(m->v);
    *m = (struct algo_metrics){0};
}

/* ---- masked sums ---- */

int64_t algo__row_valid(const struct algo_ragged *r, int64_t i) {
    int64_t n = 0;
    for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) n += r->mask[t] != 0;
    return n;
}

int64_t algo_n_valid(const struct algo_ragged *r) {
    int64_t n = 0;
    for (int64_t i = 0; i < r->n; i++) n += algo__row_valid(r, i);
    return n;
}

double algo__row_sum(const struct algo_ragged *r, int64_t i, const double *x) {
    double s = 0;
    for (int64_t t = r->off[i]; t < r->off[i + 1]; t++)
        if (r->mask[t]) s += x[t];
    return s;
}

double algo__row_mean(const struct algo_ragged *r, int64_t i, const double *x) {
    return algo__row_sum(r, i, x) / ((double)algo__row_valid(r, i) + ALGO__EPS);
}

double algo_masked_mean(const struct algo_ragged *r, const double *x) {
    double s = 0;
    for (int64_t i = 0; i < r->n; i++) s += algo__row_sum(r, i, x);
    return s / ((double)algo_n_valid(r) + ALGO__EPS);
}

int64_t algo__max_row(const struct algo_ragged *r) {
    int64_t w = 0;
    for (int64_t i = 0; i < r->n; i++)
        if (r->off[i + 1] - r->off[i] > w) w = r->off[i + 1] - r->off[i];
    return w;
}

double *algo__tokens(const struct algo_ragged *r) { return xcalloc((size_t)algo__last(r) + 1, sizeof(double)); }

/* ---- groups ---- */

struct member {
    int64_t id, row;
};

static int by_id_then_row(const void *pa, const void *pb) {
    const struct member *a = pa, *b = pb;
    if (a->id != b->id) return a->id < b->id ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

void algo__groups_init(struct algo__groups *g, int64_t n, const int64_t *id) {
    struct member *m = xmalloc((size_t)(n + 1) * sizeof *m);
    for (int64_t i = 0; i < n; i++) m[i] = (struct member){id[i], i};
    qsort(m, (size_t)n, sizeof *m, by_id_then_row);
    g->n = 0;
    g->first = xmalloc((size_t)(n + 1) * sizeof *g->first);
    g->row = xmalloc((size_t)(n + 1) * sizeof *g->row);
    for (int64_t i = 0; i < n; i++) {
        if (i == 0 || m[i].id != m[i - 1].id) g->first[g->n++] = i;
        g->row[i] = m[i].row;
    }
    g->first[g->n] = n;
    free(m);
}

void algo__groups_free(struct algo__groups *g) {
    free(g->first);
    free(g->row);
}

/* ---- aggregation ---- */

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

int algo_unknown(const char *kind, const char *name, struct buf *known) {
    char *near = str_near(known->p, name);
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s '%s' is unknown; %s%s%s %s", kind, name, near ? "did you mean " : "",
                           near ? near : "", near ? "? There are" : "use one of", known->p);
    free(near);
    buf_free(known);
    return rc;
}

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
