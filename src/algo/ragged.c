/* ragged.c - what the algorithms share: named metrics, masked sums, groups of samples, and the message about an
 * unknown name.
 * Invariant: sums skip masked tokens and run in token order. */
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

/* ---- names ---- */

int algo_unknown(const char *kind, const char *name, struct buf *known) {
    char *near = str_near(known->p, name);
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s '%s' is unknown; %s%s%s %s", kind, name, near ? "did you mean " : "",
                           near ? near : "", near ? "? There are" : "use one of", known->p);
    free(near);
    buf_free(known);
    return rc;
}
