/* lora_merge.c - an adapter merged into the base weights, as they are exported: W + scale B A, a piece of a tensor at a time.
 *
 * Invariant: a row's sum does not depend on the pieces. */
#include "model/lora/lora.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/lora/lora_int.h"
#include "model/master_weights.h"

#include <stdlib.h>
#include <string.h>

/* The part that adapts parameter i of m; false: there is none. */
static bool part_of(const struct model *m, int64_t i, struct lora_part *out) {
    const struct model_param *p = &m->params[i];
    const struct model_group *mg = &m->groups[p->group];
    const struct lora_group *const g = mg->lora;
    if (!g) return false;
    const int64_t row = (p->offset - mg->offset) / mg->k, expert = row / g->n;
    for (int64_t k = 0; k < g->n_parts; k++) {
        *out = g->part[k];
        out->a += expert * g->stride;
        out->b += expert * g->stride;
        if (row % g->n == out->row) return true;
    }
    return false;
}

int model__lora_host_open(struct lora_host *h, const struct model *m) {
    *h = (struct lora_host){.m = m};
    if (!m->lora) return 0;
    if (m->own) FAIL(ERR_UNSUPPORTED, "an adapter of which a rank has a share is not merged");
    h->flat = xmalloc((size_t)m->n_train * sizeof *h->flat);
    return dev_copy_out(m->dev, h->flat, m->master, (size_t)m->n_train * sizeof *h->flat);
}

void model__lora_host_close(struct lora_host *h) { free(h->flat); }

void model__lora_merge(const struct lora_host *h, const struct model_param *p, int64_t at, float *w, int64_t n) {
    const struct model_lora *l = h->m->lora;
    for (int64_t i = l ? l->n_sides : 0; l && i < l->n_params; i++)
        if (strcmp(l->params[i].name, p->name) == 0) memcpy(w, h->flat + l->params[i].offset + at, (size_t)n * sizeof *w);
    struct lora_part t;
    if (!h->flat || p->nd != 2 || !part_of(h->m, p - h->m->params, &t)) return;
    const int64_t r = h->m->lora->cfg.rank, k = p->cols;
    float *sum = xmalloc((size_t)k * sizeof *sum);
    for (int64_t i = 0, len; i < n; i += len) { /* the rest of one row at a time */
        const int64_t row = (at + i) / k, col = (at + i) % k;
        len = n - i < k - col ? n - i : k - col;
        memset(sum, 0, (size_t)len * sizeof *sum);
        for (int64_t q = 0; q < r; q++) {
            const float b = h->flat[t.b + row * r + q];
            const float *a = h->flat + t.a + q * k + col;
            for (int64_t j = 0; j < len; j++) sum[j] += b * a[j];
        }
        for (int64_t j = 0; j < len; j++) w[i + j] += h->m->lora->scale * sum[j];
    }
    free(sum);
}
