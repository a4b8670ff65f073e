/* router_load.c - what routers have chosen in a training pass, and the load that their load-balancing loss reads.
 *
 * The losses themselves are an op of backward (experts.c); what they are multiplied by is the caller's (train/router_balance.h).
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

void model_router_by_scores(struct model_acts *a) { a->experts.by_scores = a->keep.train; }

/* load += that of kept (n_layers, MODEL_MOST_PARTS, E + 1), of which so many parts are there. */
static int add_load(struct model *m, struct tensor kept, int parts, int64_t *load) {
    const int64_t n = m->cfg.n_experts, each = parts * (n + 1);
    int32_t *const at = xmalloc((size_t)each * sizeof *at);
    int rc = 0;
    for (int64_t l = 0; l < m->cfg.n_layers && rc == 0; l++) {
        if (!m->layers[l].router) continue;
        rc = dev_copy_out(m->dev, at, tensor_rows(kept, l * MODEL_MOST_PARTS, parts).data, (size_t)each * sizeof *at);
        for (const int32_t *o = at; o < at + each && rc == 0; o += n + 1)
            for (int64_t e = 0; e < n; e++) load[e] += o[e + 1] - o[e];
        load += n;
    }
    free(at);
    return rc;
}

int model_router_load(struct model *m, struct model_acts *a, int64_t *load, int64_t *scored) {
    if (!m->cfg.n_experts) return 0;
    CHECK(a->keep.train);
    TRY(add_load(m, a->experts.offsets, a->experts.n_parts, load));
    return a->experts.by_scores && scored ? add_load(m, a->experts.scored, a->experts.n_parts, scored) : 0;
}

int model_router_balance(struct model *m, struct model_acts *a, const struct model_router_losses *losses) {
    const int64_t n = m->cfg.n_experts;
    a->experts.balanced = losses && n;
    if (!a->experts.balanced) return 0;
    a->experts.z = losses->z;
    const float *load = losses->load;
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        if (!m->layers[l].router) continue;
        TRY(dev_copy_in(m->dev, (float *)a->experts.load.data + l * n, load, (size_t)n * sizeof *load));
        load += n;
    }
    return 0;
}

/* sum += v (n_layers, max_rows) of the rows r of layers with a router. */
static int add_rows(struct model *m, const struct model_acts *a, struct tensor v, struct model_range r, double *sum) {
    const size_t bytes = (size_t)(r.hi - r.lo) * sizeof(float);
    float *const row = xmalloc(bytes + 1);
    int rc = 0;
    for (int64_t l = 0; l < m->cfg.n_layers && rc == 0; l++) {
        if (!m->layers[l].router) continue;
        rc = dev_copy_out(m->dev, row, (const float *)v.data + l * a->max_rows + r.lo, bytes);
        for (int64_t t = 0; t < r.hi - r.lo && rc == 0; t++) *sum += (double)row[t];
    }
    free(row);
    return rc;
}

int model_router_balance_loss(struct model *m, const struct model_acts *a, struct model_range rows, double *loss, double *z_loss) {
    *loss = *z_loss = 0;
    if (!a->experts.balanced) return 0;
    TRY(add_rows(m, a, a->experts.loss, rows, loss));
    return a->experts.z > 0 ? add_rows(m, a, a->experts.z_loss, rows, z_loss) : 0;
}
