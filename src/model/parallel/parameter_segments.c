/* parameter_segments.c - see parameter_segments.h. */
#include "model/parallel/parameter_segments.h"

#include "model/model_int.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t model_n_segments(const struct model *m) {
    int64_t n = 0;
    for (int64_t i = 0; i < m->n_train_params; i++)
        n += (m->train_params[i].rows * m->train_params[i].cols + DEV_SEGMENT - 1) / DEV_SEGMENT;
    return n;
}

int64_t model_param_at(const struct model *m, int64_t element) {
    int64_t lo = 0, hi = m->n_train_params;
    while (lo < hi) {
        const int64_t i = lo + (hi - lo) / 2;
        const struct model_param *p = &m->train_params[i];
        if (p->offset + p->rows * p->cols <= element) lo = i + 1;
        else hi = i;
    }
    return lo;
}

/* ---- experts ---- */

struct model_range model__ep_experts(int64_t n, int rank, int size) {
    return (struct model_range){n * rank / size, n * (rank + 1) / size};
}

struct model_group model__ep_part(const struct model_group *g, int rank, int size) {
    const struct model_range own = model__ep_experts(g->count, rank, size);
    const int64_t rows = g->n / g->count, params = g->n_params / g->count;
    struct model_group part = *g;
    part.count = own.hi - own.lo;
    part.n = part.count * rows;
    part.offset += own.lo * rows * (g->k ? g->k : 1);
    part.first_param += own.lo * params;
    part.n_params = part.count * params;
    return part;
}

bool model_is_of_experts(const struct model *m, struct model_shard s, struct model_range bucket) {
    if (!s.experts || bucket.lo == bucket.hi) return false;
    const struct model_group *const g = &m->groups[m->train_params[model_param_at(m, bucket.lo)].group];
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        const struct model_layer *const y = &m->layers[l];
        if (g < y->first || g > y->last || !y->router) continue;
        return g == y->expert_gate_up || g == y->expert_down || g == y->expert_gate_up->bias || g == y->expert_down->bias;
    }
    return false;
}

/* The parameters of an expert follow each other, as experts do. */
static void cut_experts(const struct model *m, struct model_range all, int size, struct model_range *out) {
    const int64_t first = model_param_at(m, all.lo), end = model_param_at(m, all.hi), experts = m->cfg.n_experts,
                  each = (end - first) / experts;
    for (int r = 0; r < size; r++) {
        const struct model_range own = model__ep_experts(experts, r, size);
        const int64_t lo = first + own.lo * each, hi = first + own.hi * each;
        out[r].lo = lo < end ? m->train_params[lo].offset : all.hi;
        out[r].hi = hi < end ? m->train_params[hi].offset : all.hi;
    }
}

void model_cut(const struct model *m, struct model_range all, struct model_shard s, struct model_range *out) {
    const int64_t length = all.hi - all.lo, n = s.size;
    if (model_is_of_experts(m, s, all)) {
        cut_experts(m, all, s.size, out);
        return;
    }
    int64_t k = 0, at = all.lo; /* the run being filled */
    out[0] = (struct model_range){at, at};
    for (int64_t i = model_param_at(m, all.lo); i < m->n_train_params; i++) {
        const struct model_param *p = &m->train_params[i];
        if (p->offset >= all.hi) break;
        const enum model_role role = m->groups[p->group].role;
        const bool whole = s.whole_matrices && (role == MODEL_LINEAR || role == MODEL_EXPERTS);
        const int64_t end = p->offset + p->rows * p->cols, piece = whole ? end - p->offset : DEV_SEGMENT;
        if (p->offset >= all.lo && end <= all.hi && (__int128)(end - all.lo) * n < (__int128)(k + 1) * length) {
            at = out[k].hi = end; /* all of it before the next run */
            continue;
        }
        for (int64_t lo = p->offset; lo < end; lo += piece) {
            if (lo < all.lo || lo >= all.hi) continue;
            at = min64(lo + piece, end);
            const __int128 middle = lo + (at - lo) / 2 - all.lo; /* a piece is its middle's: of run middle n / length */
            while (middle * n >= (__int128)(k + 1) * length) out[++k] = (struct model_range){lo, lo};
            out[k].hi = at;
        }
    }
    while (k + 1 < n) out[++k] = (struct model_range){at, at};
}

/* The first element of what is trained of group g, or of those behind it. */
static int64_t trained_from(const struct model *m, int64_t g) {
    int64_t lo = 0, hi = m->n_train_params;
    while (lo < hi) {
        const int64_t i = lo + (hi - lo) / 2;
        if (m->train_params[i].group < g) lo = i + 1;
        else hi = i;
    }
    return lo < m->n_train_params ? m->train_params[lo].offset : m->n_train;
}

struct model_range model__trained(const struct model *m, const struct model_group *from, const struct model_group *to) {
    return (struct model_range){trained_from(m, from - m->groups), trained_from(m, to - m->groups + 1)};
}

struct model_range model_layer_bucket(const struct model *m, int64_t l) {
    return model__trained(m, m->layers[l].first, m->layers[l].last);
}

int model_layer_buckets(const struct model *m, struct model_shard s, int64_t l, struct model_range *out) {
    const struct model_layer *const y = &m->layers[l];
    const struct model_range all = model__trained(m, y->first, y->last);
    int n = 2;
    if (!s.experts || !y->router || l >= m->cfg.n_layers) {
        out[0] = all;
        return 1;
    }
    const struct model_group *const last = y->expert_down->bias ? y->expert_down->bias : y->expert_down;
    out[0] = (struct model_range){all.lo, model__trained(m, y->expert_gate_up, last).lo};
    out[1] = (struct model_range){model__trained(m, y->expert_gate_up, last).hi, all.hi};
    for (const struct model_group *g = y->expert_gate_up; g <= last; g++) out[n++] = model__trained(m, g, g);
    return n;
}

static int64_t add_bucket(struct model_range *b, int64_t n, struct model_range r) {
    b[n] = r;
    return r.lo < r.hi ? n + 1 : n;
}

int64_t model_buckets(const struct model *m, struct model_shard s, struct model_range **out) {
    const int64_t layers = m->cfg.n_layers;
    struct model_range *b = *out = xmalloc((size_t)(layers * MODEL_LAYER_BUCKETS + 4) * sizeof *b);
    int64_t n = 0;
    if (m->mtp.first) n = add_bucket(b, n, model__trained(m, m->mtp.first, m->mtp.last));
    n = add_bucket(b, n, model__trained(m, m->g_head, m->g_head_bias ? m->g_head_bias : m->g_head));
    n = add_bucket(b, n, model__trained(m, m->g_norm, m->g_norm));
    for (int64_t i = layers - 1; i >= 0; i--) {
        struct model_range of[MODEL_LAYER_BUCKETS];
        const int k = model_layer_buckets(m, s, i, of);
        for (int j = 0; j < k; j++) n = add_bucket(b, n, of[j]);
    }
    if (m->g_head != m->g_embed) n = add_bucket(b, n, model__trained(m, m->g_embed, m->g_embed));
    return n;
}

static int by_place(const void *a, const void *b) {
    const struct model_range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

void model_own_all(const struct model *m, struct model_shard s, struct model_owners *out) {
    struct model_range *bucket;
    const int64_t n_buckets = model_buckets(m, s, &bucket), size = s.size;
    struct model_range *part = xmalloc((size_t)(n_buckets * size) * sizeof *part); /* bucket by bucket */
    *out = (struct model_owners){.own = xmalloc((size_t)(n_buckets * size) * sizeof *part),
                                 .at = xcalloc((size_t)size + 1, sizeof *out->at)};
    for (int64_t i = 0; i < n_buckets; i++) model_cut(m, bucket[i], s, part + i * size);
    for (int64_t r = 0, n = 0; r < size; r++) {
        for (int64_t i = 0; i < n_buckets; i++)
            if (part[i * size + r].lo < part[i * size + r].hi) out->own[n++] = part[i * size + r];
        qsort(out->own + out->at[r], (size_t)(n - out->at[r]), sizeof *part, by_place);
        out->at[r + 1] = n;
    }
    free(part);
    free(bucket);
}

void model_owners_free(struct model_owners *o) {
    free(o->own);
    free(o->at);
}

int64_t model_own_most(const struct model *m, struct model_shard s) {
    struct model_owners o;
    int64_t most = 0;
    if (s.size <= 1) return m->n_train;
    model_own_all(m, s, &o);
    for (int r = 0; r < s.size; r++) {
        int64_t sum = 0;
        for (int64_t i = o.at[r]; i < o.at[r + 1]; i++) sum += o.own[i].hi - o.own[i].lo;
        most = sum > most ? sum : most;
    }
    model_owners_free(&o);
    return most;
}

int64_t model_own(const struct model *m, struct model_shard s, struct model_range **out) {
    struct model_owners o;
    model_own_all(m, s, &o);
    const int64_t n = o.at[s.rank + 1] - o.at[s.rank];
    *out = xmalloc((size_t)n * sizeof **out + 1);
    if (n) memcpy(*out, o.own + o.at[s.rank], (size_t)n * sizeof **out);
    model_owners_free(&o);
    return n;
}
