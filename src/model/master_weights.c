/* master_weights.c - the fp32 master of what is trained: its memory, its values from host memory, and the compute copy from it.
 *
 * Not the optimizer, which changes it, nor files.
 * Invariant: after each of these calls the compute copy is the master, rounded once. */
#include "model/master_weights.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/files/load.h"
#include "model/lora/lora_int.h"
#include "model/parallel/parameter_segments.h"
#include "model/parallel/weight_streaming.h"

#include <stdlib.h>

enum { STAGE = 1 << 22 }; /* elements on the device at a time */

/* ---- memory ---- */

int model__alloc(struct model *m, int on_host, size_t bytes, void **out) {
    return m->flags & on_host ? dev_host_alloc(m->dev, bytes, out) : dev_alloc(m->dev, bytes, out);
}
void model__release(struct model *m, int on_host, void *p, size_t bytes) {
    if (m->flags & on_host) dev_host_free(m->dev, p, bytes);
    else dev_free(m->dev, p, bytes);
}

/* Never 0: where there is a master there is memory of it. */
static size_t master_bytes(const struct model *m) { return (size_t)(m->n_master > 0 ? m->n_master : 1) * sizeof(float); }

int model__alloc_master(struct model *m) {
    void *p = NULL;
    m->n_master = m->n_train;
    if (m->shard.size > 1) {
        m->n_own = model_own(m, m->shard, &m->own);
        m->n_master = 0;
        for (int64_t i = 0; i < m->n_own; i++) m->n_master += m->own[i].hi - m->own[i].lo;
    }
    TRY(model__alloc(m, MODEL_HOST_MASTER, master_bytes(m), &p));
    m->master = p;
    return 0;
}

void model__free_master(struct model *m) { model__release(m, MODEL_HOST_MASTER, m->master, master_bytes(m)); }

/* ---- the compute copy ---- */

int model_refresh(struct model *m) {
    CHECK(!m->own);
    return model_refresh_from(m, m->master);
}

int model_refresh_from(struct model *m, float *flat) {
    if (m->flat.data && !m->lora) return dev_cast(m->dev, m->flat, tensor_1d(flat, DT_F32, m->n_elems));
    return model_refresh_bucket(m, (struct model_range){0, m->n_train}, flat);
}

int model_refresh_bucket(struct model *m, struct model_range r, float *flat) {
    CHECK(flat != NULL);
    if (m->lora) return model__lora_refresh(m, r, flat);
    CHECK(!m->stream);
    for (int64_t i = 0; i < m->n_groups; i++)
        if (m->groups[i].offset >= r.lo && m->groups[i].offset < r.hi)
            TRY(model__group_from(m, &m->groups[i], flat + (m->groups[i].offset - r.lo)));
    return 0;
}

/* Group by group, through `stage`. */
static int groups_from_host(struct model *m, struct model_range groups, const float *flat, void *stage) {
    for (int64_t i = groups.lo; i < groups.hi; i++) {
        const struct model_group *g = &m->groups[i];
        TRY(dev_copy_in(m->dev, stage, flat + g->offset, (size_t)model__group_count(g) * sizeof *flat));
        TRY(model__group_from(m, g, stage));
    }
    return 0;
}

/* The compute copy from a master in host memory, group by group or in chunks: the device need not have room for all of it. */
static int refresh_from_host(struct model *m, const float *flat) {
    const bool chunks = m->flat.data != NULL, shares = m->flags & MODEL_SHARDED_WEIGHTS;
    size_t most = chunks ? (size_t)STAGE : 1;
    void *stage = NULL;
    int rc = 0;
    for (int64_t i = 0; !chunks && i < m->n_groups; i++) {
        const size_t n = (size_t)model__group_count(&m->groups[i]);
        most = n > most ? n : most;
    }
    TRY(dev_alloc(m->dev, most * sizeof *flat, &stage));
    for (int64_t at = 0, n; chunks && at < m->n_elems; at += n) {
        n = m->n_elems - at < STAGE ? m->n_elems - at : STAGE;
        TRYG(dev_copy_in(m->dev, stage, flat + at, (size_t)n * sizeof *flat), out);
        TRYG(dev_cast(m->dev, tensor_1d((char *)m->flat.data + (size_t)at * dtype_size(m->act), m->act, n),
                      tensor_1d(stage, DT_F32, n)),
             out);
    }
    struct model_range groups = {0, m->n_groups};
    for (int64_t k = 0; shares && model__span_open(m, k, NULL, &groups); k++) {
        TRYG(groups_from_host(m, groups, flat, stage), out);
        TRYG(model__span_keep(m, k, NULL), out);
    }
    if (shares) model_stream_begin(m);
    if (!chunks && !shares) TRYG(groups_from_host(m, groups, flat, stage), out);
    TRYG(dev_sync(m->dev), out);
out:
    dev_free(m->dev, stage, most * sizeof *flat);
    return rc;
}

/* An adapter's compute copies, bucket by bucket. */
static int adapter_from_host(struct model *m, const float *flat) {
    struct model_range *bucket;
    const int64_t n = model_buckets(m, m->shard, &bucket);
    size_t most = 1;
    void *stage = NULL;
    int rc = 0;
    for (int64_t i = 0; i < n; i++)
        if ((size_t)(bucket[i].hi - bucket[i].lo) > most) most = (size_t)(bucket[i].hi - bucket[i].lo);
    TRYG(dev_alloc(m->dev, most * sizeof *flat, &stage), out);
    for (int64_t i = 0; i < n; i++) {
        TRYG(dev_copy_in(m->dev, stage, flat + bucket[i].lo, (size_t)(bucket[i].hi - bucket[i].lo) * sizeof *flat), out);
        TRYG(model_refresh_bucket(m, bucket[i], stage), out);
        TRYG(dev_sync(m->dev), out);
    }
out:
    if (stage) dev_free(m->dev, stage, most * sizeof *flat);
    free(bucket);
    return rc;
}

int model_set_master(struct model *m, const float *flat) {
    float *at = m->master;
    for (int64_t i = 0; i < m->n_own; i++) {
        const struct model_range r = m->own[i];
        TRY(dev_copy_in(m->dev, at, flat + r.lo, (size_t)(r.hi - r.lo) * sizeof *flat));
        at += r.hi - r.lo;
    }
    if (!m->own) TRY(dev_copy_in(m->dev, m->master, flat, (size_t)m->n_train * sizeof *flat));
    TRY(dev_sync(m->dev));
    if (!m->own) return model_refresh(m);
    return m->lora ? adapter_from_host(m, flat) : refresh_from_host(m, flat);
}
