/* parameter_segments.c - see parameter_segments.h. */
#include "model/parallel/parameter_segments.h"

#include "model/model_int.h"

#include "base/buf.h"

#include <stdlib.h>

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t model_n_segments(const struct model *m) {
    int64_t n = 0;
    for (int64_t i = 0; i < m->n_train_params; i++)
        n += (m->train_params[i].rows * m->train_params[i].cols + DEV_SEGMENT - 1) / DEV_SEGMENT;
    return n;
}

void model_cut(const struct model *m, struct model_range all, int64_t n, bool whole_matrices, struct model_range *out) {
    const int64_t length = all.hi - all.lo;
    int64_t k = 0, at = all.lo; /* the run being filled */
    out[0] = (struct model_range){at, at};
    for (int64_t i = 0; i < m->n_train_params; i++) {
        const struct model_param *p = &m->train_params[i];
        if (p->offset >= all.hi || p->offset + p->rows * p->cols <= all.lo) continue;
        const enum model_role role = m->groups[p->group].role;
        const bool whole = whole_matrices && (role == MODEL_LINEAR || role == MODEL_EXPERTS);
        const int64_t end = p->offset + p->rows * p->cols, piece = whole ? end - p->offset : DEV_SEGMENT;
        for (int64_t lo = p->offset; lo < end; lo += piece) {
            if (lo < all.lo || lo >= all.hi) continue;
            at = min64(lo + piece, end);
            const int64_t middle = lo + (at - lo) / 2 - all.lo; /* a piece is its middle's */
            for (const int64_t want = (int64_t)((__int128)middle * n / length); k < want;) out[++k] = (struct model_range){lo, lo};
            out[k].hi = at;
        }
    }
    while (k + 1 < n) out[++k] = (struct model_range){at, at};
}

static struct model_range groups(const struct model_group *from, const struct model_group *to) {
    return (struct model_range){from->offset, to->offset + model__group_count(to)};
}

int64_t model_buckets(const struct model *m, struct model_range **out) {
    const int64_t layers = m->cfg.n_layers;
    struct model_range *b = *out = xmalloc((size_t)(layers + 4) * sizeof *b);
    int64_t n = 0;
    if (m->lora) {
        b[n++] = (struct model_range){0, m->n_train};
        return n;
    }
    if (m->mtp.first) b[n++] = groups(m->mtp.first, m->mtp.last);
    b[n++] = groups(m->g_head, m->g_head_bias ? m->g_head_bias : m->g_head);
    b[n++] = groups(m->g_norm, m->g_norm);
    for (int64_t i = layers - 1; i >= 0; i--) b[n++] = groups(m->layers[i].first, m->layers[i].last);
    if (m->g_head != m->g_embed) b[n++] = groups(m->g_embed, m->g_embed);
    return n;
}

static int by_place(const void *a, const void *b) {
    const struct model_range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

int64_t model_own_most(const struct model *m, struct model_shard s) {
    int64_t most = 0;
    if (s.size <= 1) return m->n_train;
    for (s.rank = 0; s.rank < s.size; s.rank++) {
        struct model_range *own;
        const int64_t n = model_own(m, s, &own);
        int64_t sum = 0;
        for (int64_t i = 0; i < n; i++) sum += own[i].hi - own[i].lo;
        most = sum > most ? sum : most;
        free(own);
    }
    return most;
}

int64_t model_own(const struct model *m, struct model_shard s, struct model_range **out) {
    struct model_range *part = xmalloc((size_t)s.size * sizeof *part), *own;
    const int64_t n_buckets = model_buckets(m, &own);
    int64_t n = 0;
    for (int64_t i = 0; i < n_buckets; i++) {
        model_cut(m, own[i], s.size, s.whole_matrices, part);
        if (part[s.rank].lo < part[s.rank].hi) own[n++] = part[s.rank];
    }
    free(part);
    qsort(own, (size_t)n, sizeof *own, by_place);
    *out = own;
    return n;
}
