/* router_load.c - what routers have chosen in a training pass, and the load that their load-balancing loss reads.
 *
 * The loss itself is an op of backward (experts.c); what it is multiplied by is the caller's (train/router_balance.h).
 * Invariant: loads are whole numbers, so their sums over passes and ranks do not depend on an order. */
#include "model/model_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>

int64_t model_router_layers(const struct model_config *c) {
    int64_t n = 0;
    for (int64_t l = 0; c->n_experts && l < c->n_layers; l++) n += (c->layer[l] & MODEL_SPARSE) != 0;
    return n;
}

int model_router_load(struct model *m, struct model_acts *a, int64_t *load) {
    const int64_t layers = m->cfg.n_layers, n = m->cfg.n_experts;
    if (!n) return 0;
    CHECK(a->keep.train);
    int32_t *const at = xmalloc((size_t)(layers * (n + 1)) * sizeof *at);
    const int rc = dev_copy_out(m->dev, at, a->experts.offsets.data, (size_t)(layers * (n + 1)) * sizeof *at);
    for (int64_t l = 0; l < layers && rc == 0; l++) {
        const int32_t *const o = at + l * (n + 1);
        if (!m->layers[l].router) continue;
        for (int64_t e = 0; e < n; e++) load[e] += o[e + 1] - o[e];
        load += n;
    }
    free(at);
    return rc;
}

int model_router_balance(struct model *m, struct model_acts *a, const float *load) {
    a->experts.balanced = load && m->cfg.n_experts;
    return a->experts.balanced ? dev_copy_in(m->dev, a->experts.load.data, load, (size_t)m->cfg.n_experts * sizeof *load) : 0;
}

int model_router_balance_loss(struct model *m, const struct model_acts *a, double *loss) {
    const size_t bytes = (size_t)a->n_rows * sizeof(float);
    float *const row = xmalloc(bytes + 1);
    int rc = 0;
    *loss = 0;
    for (int64_t l = 0; l < m->cfg.n_layers && a->experts.balanced && rc == 0; l++) {
        if (!m->layers[l].router) continue;
        rc = dev_copy_out(m->dev, row, (const float *)a->experts.loss.data + l * a->max_rows, bytes);
        for (int64_t t = 0; t < a->n_rows && rc == 0; t++) *loss += (double)row[t];
    }
    free(row);
    return rc;
}
