/* context_parallel.c - see context_parallel.h.
 *
 * What ranks exchange lies in memory that they share. Heads of D elements are its rows: a rank writes its own range, the ranges are
 * gathered, and each rank picks the rows that it reads by an index. */
#include "model/parallel/context_parallel.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/model_int.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Arrays of one exchange, at most; where one begins. */
enum { AREAS = 3, ALIGN = 256 };

struct model_context {
    const struct model *m;
    struct collective *group;
    int rank, size;
    int64_t max_rows;
    char *shared;
    size_t shared_bytes;
    int32_t *host, *index; /* room for the four indices; on the device */
    /* of the micro-batch at hand */
    struct model_parts parts;
    struct tensor ids;
    struct tensor rows_q, rows_kv;   /* own heads of all rows: (T, q), (kv, T) heads, from what ranks have by rows */
    struct tensor heads_q, heads_kv; /* all heads of own rows: (R, Hq), (Hk, R), from what ranks have by heads */
};

void model_parts_cut(struct model_parts *p, int64_t rows, int n) {
    CHECK(n > 0 && n <= MODEL_MOST_PARTS);
    p->n = n;
    for (int i = 0; i <= n; i++) p->cut[i] = rows * i / n;
}

int64_t model_parts_most(int64_t rows, int n) { return (rows + n - 1) / n; }

const char *model_context_unable(const struct model_config *c) {
    if (c->mtp) return "the model has an MTP layer";
    return model_has_group(c, offsetof(struct model_layer, delta_qkv)) ? "the model has layers with a gated delta net" : NULL;
}

/* ---- heads ---- */

struct heads {
    int64_t q0, q1, kv0, kv1; /* [q0, q1) of the queries' and [kv0, kv1) of the keys' */
};
/* Whole key heads: the sum over the queries of one is the gradient of its keys. A rank may have none. */
static struct heads heads_of(const struct model_config *c, int rank, int size) {
    const int64_t kv = c->n_kv_heads, group = c->n_q_heads / kv, lo = kv * rank / size, hi = kv * (rank + 1) / size;
    return (struct heads){lo * group, hi * group, lo, hi};
}
static struct heads own_heads(const struct model_context *x) { return heads_of(&x->m->cfg, x->rank, x->size); }

void model_context_heads(const struct model_config *c, int size, int64_t *q, int64_t *kv) {
    *kv = (c->n_kv_heads + size - 1) / size;
    *q = *kv * (c->n_q_heads / c->n_kv_heads);
}

/* ---- memory ---- */

static size_t up(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* The largest exchange: queries, K and V; in training their gradients, and rows of the token embedding. */
static size_t shared_bytes(const struct model_config *c, enum dtype act, int64_t rows, bool train) {
    const int64_t unit = (int64_t)dtype_size(act), d = c->head_dim;
    const size_t q = up(SIZE_OF(rows, c->n_q_heads * d, unit)), kv = up(SIZE_OF(rows, c->n_kv_heads * d, unit)),
                 dkv = up(SIZE_OF(rows, c->n_kv_heads * d, (int64_t)sizeof(float)));
    return train ? larger(q + 2 * larger(kv, dkv), up(SIZE_OF(rows, c->hidden, (int64_t)sizeof(float)))) : q + 2 * kv;
}

static int64_t index_count(const struct model_config *c, int size, int64_t rows) {
    int64_t q, kv;
    model_context_heads(c, size, &q, &kv);
    return rows * (q + kv) + model_parts_most(rows, size) * (c->n_q_heads + c->n_kv_heads);
}

size_t model_context_bytes(const struct model_config *c, enum dtype act, int size, int64_t max_rows, bool train) {
    return shared_bytes(c, act, max_rows, train) + (size_t)index_count(c, size, max_rows) * sizeof(int32_t);
}

int model_context_open(struct model_context **out, const struct model_context_args *a) {
    struct model_context *const x = *out = xcalloc(1, sizeof *x);
    const struct model *const m = x->m = a->model;
    x->group = a->group;
    x->rank = collective_rank(a->group);
    x->size = collective_size(a->group);
    x->max_rows = a->max_rows;
    x->shared = a->room;
    x->shared_bytes = shared_bytes(&m->cfg, m->act, a->max_rows, a->train);
    x->index = (int32_t *)(void *)(x->shared + x->shared_bytes);
    x->host = xmalloc((size_t)index_count(&m->cfg, x->size, a->max_rows) * sizeof *x->host);
    return collective_share(a->group, x->shared, x->shared_bytes);
}

void model_context_close(struct model_context *x) {
    if (!x) return;
    free(x->host);
    free(x);
}

/* ---- indices ---- */

static int64_t part_rows(const struct model_context *x, int r) { return x->parts.cut[r + 1] - x->parts.cut[r]; }

int model_context_begin(struct model_context *x, const struct model_parts *parts, struct tensor ids) {
    const struct model_config *const c = &x->m->cfg;
    const struct heads own = own_heads(x);
    const int64_t rows = parts->cut[parts->n], hq = c->n_q_heads, hk = c->n_kv_heads;
    int32_t *to = x->host;
    CHECK(parts->n == x->size && rows <= x->max_rows);
    x->parts = *parts;
    x->ids = ids;
    const int64_t r0 = parts->cut[x->rank], n = part_rows(x, x->rank);
    for (int64_t t = 0; t < rows; t++) /* ranges by rows, one after the other, are the matrix of all rows */
        for (int64_t h = own.q0; h < own.q1; h++) *to++ = (int32_t)(t * hq + h);
    for (int64_t h = own.kv0; h < own.kv1; h++)
        for (int r = 0; r < x->size; r++)
            for (int64_t t = 0; t < part_rows(x, r); t++) *to++ = (int32_t)(parts->cut[r] * hk + h * part_rows(x, r) + t);
    for (int64_t t = r0; t < r0 + n; t++)
        for (int r = 0; r < x->size; r++) {
            const struct heads k = heads_of(c, r, x->size);
            for (int64_t h = k.q0; h < k.q1; h++) *to++ = (int32_t)(rows * k.q0 + t * (k.q1 - k.q0) + h - k.q0);
        }
    for (int64_t h = 0; h < hk; h++)
        for (int64_t t = r0; t < r0 + n; t++) *to++ = (int32_t)(h * rows + t);
    int32_t *at = x->index;
    const int64_t count[] = {rows * (own.q1 - own.q0), rows * (own.kv1 - own.kv0), n * hq, n * hk};
    struct tensor *const index[] = {&x->rows_q, &x->rows_kv, &x->heads_q, &x->heads_kv};
    for (int i = 0; i < 4; i++) {
        *index[i] = tensor_1d(at, DT_I32, count[i]);
        at += count[i];
    }
    return dev_copy_in(x->m->dev, x->index, x->host, (size_t)(to - x->host) * sizeof *to);
}

/* ---- exchanges ---- */

/* An array of an exchange: of each row `heads` vectors of `width` elements, of which ranks have a range of rows, or of heads. */
struct area {
    enum dtype dt;
    int64_t heads, width;
    bool by_heads, keys; /* keys: heads are those of keys */
    char *base;
    size_t at[MODEL_MOST_PARTS + 1]; /* bytes */
};

/* Places n areas in the shared memory. */
static void place(const struct model_context *x, struct area *v, int n) {
    const struct model_config *const c = &x->m->cfg;
    const int64_t rows = x->parts.cut[x->size];
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        struct area *const a = &v[i];
        const size_t vector = (size_t)a->width * dtype_size(a->dt);
        a->base = x->shared + at;
        for (int r = 0; r <= x->size; r++) {
            const struct heads k = heads_of(c, r < x->size ? r : x->size - 1, x->size);
            const int64_t before = r == x->size ? a->heads : a->keys ? k.kv0 : k.q0;
            a->at[r] = at + (size_t)(a->by_heads ? rows * before : x->parts.cut[r] * a->heads) * vector;
        }
        at = up(a->at[x->size]);
    }
    CHECK(at <= x->shared_bytes);
}

/* Where this rank writes. */
static void *own_place(const struct model_context *x, const struct area *a) { return x->shared + a->at[x->rank]; }

static int gather(struct model_context *x, const struct area *v, int n) {
    size_t at[AREAS * (MODEL_MOST_PARTS + 1)];
    for (int i = 0; i < n; i++) memcpy(at + i * (x->size + 1), v[i].at, (size_t)(x->size + 1) * sizeof *at);
    return collective_all_gather(x->group, x->shared, at, n);
}

/* y: the vectors of an area that index names. */
static int pick(const struct model_context *x, const struct area *a, struct tensor index, struct tensor y) {
    const int64_t all = x->parts.cut[x->size] * a->heads;
    return dev_gather_rows(x->m->dev, tensor_2d(y.data, a->dt, index.dim[0], a->width), tensor_2d(a->base, a->dt, all, a->width),
                           index);
}

/* Queries, K and V, or their gradients. */
static void qkv_areas(const struct model_context *x, enum dtype q, enum dtype kv, bool by_heads, struct area *v) {
    const struct model_config *const c = &x->m->cfg;
    v[0] = (struct area){.dt = q, .heads = c->n_q_heads, .width = c->head_dim, .by_heads = by_heads};
    v[1] = v[2] = (struct area){.dt = kv, .heads = c->n_kv_heads, .width = c->head_dim, .by_heads = by_heads, .keys = true};
    place(x, v, AREAS);
}

static struct tensor keys(void *p, enum dtype dt, int64_t heads, int64_t rows, int64_t dim) {
    return (struct tensor){p, dt, 4, {1, heads, rows, dim}};
}

void model__context_args(const struct model_batch *b, const struct model_stage *s, struct qkv_args *qkv, struct attn_args *attn) {
    const struct model_context *const x = b->context;
    const struct heads own = own_heads(x);
    const int64_t rows = x->parts.cut[x->size], d = qkv->head_dim, q = own.q1 - own.q0, kv = own.kv1 - own.kv0;
    const enum dtype act = x->m->act;
    struct area v[AREAS];
    qkv_areas(x, act, act, false, v);
    qkv->q = tensor_2d(own_place(x, &v[0]), act, b->n_rows, qkv->n_q_heads * d);
    qkv->kv.k = keys(own_place(x, &v[1]), act, qkv->n_kv_heads, b->n_rows, d);
    qkv->kv.v = keys(own_place(x, &v[2]), act, qkv->n_kv_heads, b->n_rows, d);
    attn->n_q_heads = q;
    attn->n_kv_heads = kv;
    attn->q = tensor_2d(s->q.data, act, rows, q * d);
    attn->kv.k = keys(s->kv.k.data, act, kv, rows, d);
    attn->kv.v = keys(s->kv.v.data, act, kv, rows, d);
    attn->out = tensor_2d(s->context_att.data, act, rows, q * d);
    if (s->lse.nd) attn->lse = tensor_2d(s->lse.data, DT_F32, rows, q);
}

/* An area of queries' shape. */
static struct area like_queries(const struct model_context *x, bool by_heads) {
    const struct model_config *const c = &x->m->cfg;
    struct area a = {.dt = x->m->act, .heads = c->n_q_heads, .width = c->head_dim, .by_heads = by_heads};
    place(x, &a, 1);
    return a;
}

/* The part of a vector of all query heads that is of own ones. */
static struct tensor own_part(const struct model_context *x, struct tensor v) {
    const struct heads own = own_heads(x);
    return tensor_1d((char *)v.data + (size_t)own.q0 * dtype_size(v.dt), v.dt, own.q1 - own.q0);
}

int model__context_attn_fwd(const struct model_batch *b, const struct attn_args *attn, const struct model_group *sinks,
                            struct tensor att) {
    struct model_context *const x = b->context;
    struct dev *const d = x->m->dev;
    struct area v[AREAS], out;
    qkv_areas(x, x->m->act, x->m->act, false, v);
    TRY(gather(x, v, AREAS));
    TRY(pick(x, &v[0], x->rows_q, attn->q));
    TRY(pick(x, &v[1], x->rows_kv, attn->kv.k));
    TRY(pick(x, &v[2], x->rows_kv, attn->kv.v));
    if (attn->n_kv_heads > 0) TRY(dev_attn_fwd(d, attn));
    if (attn->n_kv_heads > 0 && sinks)
        TRY(dev_attn_sink_fwd(d, &(struct attn_sink_args){attn->out, attn->lse, own_part(x, sinks->vec)}));
    out = like_queries(x, true);
    TRY(dev_copy(d, own_place(x, &out), attn->out.data, out.at[x->rank + 1] - out.at[x->rank]));
    TRY(gather(x, &out, 1));
    return pick(x, &out, x->heads_q, att);
}

struct tensor model__context_datt(const struct model_batch *b) {
    const struct model_context *const x = b->context;
    const struct area a = like_queries(x, false);
    return tensor_2d(own_place(x, &a), x->m->act, b->n_rows, a.heads * a.width);
}

int model__context_attn_bwd(const struct model_batch *b, const struct context_bwd_args *a) {
    struct model_context *const x = b->context;
    const struct attn_args *const attn = a->attn;
    const struct qkv_bwd_args *const out = a->out;
    const int64_t rows = attn->q.dim[0], kv = attn->n_kv_heads;
    const struct tensor dout = tensor_2d(a->room.data, x->m->act, rows, attn->q.dim[1]);
    struct area in = like_queries(x, false), v[AREAS];
    TRY(gather(x, &in, 1));
    TRY(pick(x, &in, x->rows_q, dout));
    if (kv > 0 && a->sinks) {
        const struct attn_sink_args sinks = {attn->out, attn->lse, own_part(x, a->sinks->vec)};
        TRY(dev_attn_sink_bwd(x->m->dev, &sinks, dout, own_part(x, a->dsinks)));
    }
    qkv_areas(x, x->m->act, DT_F32, true, v);
    const struct tensor dq = tensor_2d(own_place(x, &v[0]), x->m->act, rows, attn->q.dim[1]),
                        dk = keys(own_place(x, &v[1]), DT_F32, kv, rows, attn->head_dim),
                        dv = keys(own_place(x, &v[2]), DT_F32, kv, rows, attn->head_dim);
    if (kv > 0) TRY(dev_attn_bwd(x->m->dev, attn, dout, dq, dk, dv));
    TRY(gather(x, v, AREAS));
    TRY(pick(x, &v[0], x->heads_q, out->dq));
    TRY(pick(x, &v[1], x->heads_kv, out->dk));
    return pick(x, &v[2], x->heads_kv, out->dv);
}

int model__context_rows(const struct model_batch *b, struct tensor *ids, struct tensor *dx) {
    struct model_context *const x = b->context;
    const int64_t rows = x->parts.cut[x->size];
    struct area a = {.dt = DT_F32, .heads = 1, .width = x->m->cfg.hidden};
    place(x, &a, 1);
    TRY(dev_copy(x->m->dev, own_place(x, &a), dx->data, (size_t)tensor_count(*dx) * sizeof(float)));
    TRY(gather(x, &a, 1));
    const bool last = x->rank == x->size - 1;
    *ids = last ? x->ids : TENSOR_NONE;
    *dx = last ? tensor_2d(a.base, DT_F32, rows, a.width) : TENSOR_NONE;
    return 0;
}
