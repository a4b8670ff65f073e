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
/* What a gated delta net exchanges: q, k and v; b and a; what the delta rule gives. */
enum { DELTA_QKV, DELTA_BA, DELTA_V, DELTA_ARRAYS };

struct model_context {
    const struct model *m;
    struct collective *group;
    int rank, size, n_parts; /* n_parts: of all ranks, in backward */
    int64_t max_rows;
    char *shared;
    size_t shared_bytes;
    int32_t *host, *index; /* room for the indices; on the device */
    int32_t *both;         /* room for ids and next */
    /* of the micro-batch at hand */
    struct model_parts parts;
    struct tensor ids, next;         /* next: of an MTP layer */
    struct tensor rows_q, rows_kv;   /* own heads of all rows: (T, q), (kv, T) heads, from what ranks have by rows */
    struct tensor heads_q, heads_kv; /* all heads of own rows: (R, Hq), (Hk, R), from what ranks have by heads */
    struct delta_index {
        struct tensor rows, heads; /* own columns of all rows; all columns of own rows */
    } delta[DELTA_ARRAYS];
    struct tensor channels; /* own ones of the convolution */
    char *taps;             /* room for their weights, and the gradients of these */
};

void model_parts_cut(struct model_parts *p, int64_t rows, int n) {
    CHECK(n > 0 && n <= MODEL_MOST_PARTS);
    p->n = n;
    for (int i = 0; i <= n; i++) p->cut[i] = rows * i / n;
}

void model_parts_of_ranks(struct model_parts *of, const struct model_parts *p, int ranks) {
    of->n = ranks;
    for (int r = 0; r <= ranks; r++) of->cut[r] = p->cut[model_parts_first(p->n, ranks, r)];
}

void model_parts_own(struct model_parts *own, const struct model_parts *p, int ranks, int r) {
    const int first = model_parts_first(p->n, ranks, r);
    own->n = model_parts_first(p->n, ranks, r + 1) - first;
    for (int i = 0; i <= own->n; i++) own->cut[i] = p->cut[first + i] - p->cut[first];
}

int64_t model_context_rows(int64_t rows, struct model_context_shape s) {
    const int parts = s.parts > 0 ? s.parts : s.ranks, times = model_parts_times(parts, s.ranks);
    return (rows * times + parts - 1) / parts;
}

/* ---- heads ---- */

struct heads {
    int64_t q0, q1, kv0, kv1; /* [q0, q1) of the queries' and [kv0, kv1) of the keys' */
};
/* Whole key heads: the sum over the queries of one is the gradient of its keys. A rank may have none. */
static struct heads split(int64_t q, int64_t kv, int rank, int size) {
    const int64_t group = kv ? q / kv : 0, lo = kv * rank / size, hi = kv * (rank + 1) / size;
    return (struct heads){lo * group, hi * group, lo, hi};
}
static struct heads heads_of(const struct model_config *c, int rank, int size) {
    return split(c->n_q_heads, c->n_kv_heads, rank, size);
}
/* Of a gated delta net, whose value heads are as queries. */
static struct heads delta_heads(const struct model_config *c, int rank, int size) {
    return split(c->delta.v_heads, c->delta.k_heads, rank, size);
}
static struct heads own_heads(const struct model_context *x) { return heads_of(&x->m->cfg, x->rank, x->size); }

void model_context_heads(const struct model_config *c, int size, int64_t *q, int64_t *kv) {
    *kv = (c->n_kv_heads + size - 1) / size;
    *q = *kv * (c->n_q_heads / c->n_kv_heads);
}

void model_context_delta(const struct model_config *c, int size, int64_t *k, int64_t *v) {
    *k = (c->delta.k_heads + size - 1) / size;
    *v = c->delta.k_heads ? *k * (c->delta.v_heads / c->delta.k_heads) : 0;
}

/* ---- columns of what gated delta nets exchange ---- */

static int64_t divisor(int64_t a, int64_t b) {
    while (b) {
        const int64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

/* Elements of a column of an array, which is of one head: a head, or what heads of both sizes are made of. */
static int64_t column_width(const struct model_config *c, int array) {
    return array == DELTA_QKV ? divisor(c->delta.k_dim, c->delta.v_dim) : array == DELTA_V ? c->delta.v_dim : 1;
}

/* The columns of a rank's heads, up to three ranges of them; returns how many columns there are. */
static int64_t columns_of(const struct model_config *c, int array, int64_t width, struct heads h, struct model_range *range) {
    const int64_t k = c->delta.k_dim / width, v = c->delta.v_dim / width, keys = c->delta.k_heads * k;
    range[0] = range[1] = range[2] = (struct model_range){0, 0};
    if (array == DELTA_QKV) {
        range[0] = (struct model_range){h.kv0 * k, h.kv1 * k};
        range[1] = (struct model_range){keys + h.kv0 * k, keys + h.kv1 * k};
        range[2] = (struct model_range){2 * keys + h.q0 * v, 2 * keys + h.q1 * v};
    } else {
        range[0] = (struct model_range){h.q0, h.q1};
        if (array == DELTA_BA) range[1] = (struct model_range){c->delta.v_heads + h.q0, c->delta.v_heads + h.q1};
    }
    int64_t n = 0;
    for (int i = 0; i < 3; i++) n += range[i].hi - range[i].lo;
    return n;
}

static int64_t all_columns(const struct model_config *c, int array) {
    struct model_range range[3];
    return columns_of(c, array, column_width(c, array), (struct heads){0, c->delta.v_heads, 0, c->delta.k_heads}, range);
}

/* At most, of a rank. */
static int64_t most_columns(const struct model_config *c, int array, int64_t width, int size) {
    struct model_range range[3];
    int64_t k, v;
    model_context_delta(c, size, &k, &v);
    return columns_of(c, array, width, (struct heads){0, v, 0, k}, range);
}

static int64_t most_channels(const struct model_config *c, int size) { return most_columns(c, DELTA_QKV, 1, size); }

/* ---- memory ---- */

static size_t up(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* The dk and dv of latent attention of a part, one after the other; a part is of all keys. */
static size_t latent_bytes(const struct model_config *c, int64_t rows) {
    return SIZE_OF(rows, c->head_dim, (int64_t)sizeof(float));
}

static int all_parts(struct model_context_shape s) { return s.parts > 0 ? s.parts : s.ranks; }

/* The largest exchange: queries, K and V; in training their gradients, and rows of the token embedding. */
static size_t shared_bytes(const struct model_config *c, enum dtype act, struct model_context_shape s, int64_t rows, bool train) {
    const int64_t unit = (int64_t)dtype_size(act), d = c->head_dim;
    const size_t q = up(SIZE_OF(rows, c->n_q_heads * d, unit)), kv = up(SIZE_OF(rows, c->n_kv_heads * d, unit)),
                 dkv = up(SIZE_OF(rows, c->n_kv_heads * d, (int64_t)sizeof(float)));
    const int64_t channels = model_dim(c, MODEL_DELTA_QKV), ba = 2 * c->delta.v_heads;
    const size_t delta = c->delta.v_heads ? up(SIZE_OF(rows, channels, unit)) + up(SIZE_OF(rows, ba, unit)) : 0;
    const size_t latent = train ? larger(kv, 2 * up((size_t)all_parts(s) * latent_bytes(c, rows))) : kv;
    const size_t attention = model_is_latent(c) ? latent : q + 2 * (train ? larger(kv, dkv) : kv), most = larger(attention, delta);
    const size_t dx = up(SIZE_OF(model_embedded_rows(c, rows), c->hidden, (int64_t)sizeof(float)));
    return train ? larger(most, dx) : most;
}

static int64_t index_count(const struct model_config *c, struct model_context_shape s, int64_t rows) {
    const int size = s.ranks;
    int64_t q, kv;
    if (model_is_latent(c)) return 0;
    model_context_heads(c, size, &q, &kv);
    int64_t own = q + kv, all = c->n_q_heads + c->n_kv_heads;
    for (int i = 0; i < DELTA_ARRAYS && c->delta.v_heads; i++) {
        own += most_columns(c, i, column_width(c, i), size);
        all += all_columns(c, i);
    }
    return rows * own + model_context_rows(rows, s) * all + (c->delta.v_heads ? most_channels(c, size) : 0);
}

/* The tokens of an MTP layer's rows behind the others. */
static size_t ids_bytes(const struct model_config *c, int64_t rows) {
    return c->mtp ? up((size_t)model_embedded_rows(c, rows) * sizeof(int32_t)) : 0;
}

/* Weights of the convolution in act, and their gradients. */
static size_t taps_bytes(const struct model_config *c, int size) {
    return c->delta.v_heads ? 2 * up(SIZE_OF(most_channels(c, size), DEV_CONV_TAPS, (int64_t)sizeof(float))) : 0;
}

size_t model_context_bytes(const struct model_config *c, enum dtype act, struct model_context_shape s, int64_t max_rows,
                           bool train) {
    return shared_bytes(c, act, s, max_rows, train) + taps_bytes(c, s.ranks) + ids_bytes(c, max_rows) +
           (size_t)index_count(c, s, max_rows) * sizeof(int32_t);
}

int model_context_open(struct model_context **out, const struct model_context_args *a) {
    struct model_context *const x = *out = xcalloc(1, sizeof *x);
    const struct model *const m = x->m = a->model;
    const struct model_context_shape shape = {collective_size(a->group), a->parts};
    x->group = a->group;
    x->rank = collective_rank(a->group);
    x->size = shape.ranks;
    x->n_parts = all_parts(shape);
    x->max_rows = a->max_rows;
    x->shared = a->room;
    x->shared_bytes = shared_bytes(&m->cfg, m->act, shape, a->max_rows, a->train);
    x->taps = x->shared + x->shared_bytes;
    x->both = (int32_t *)(void *)(x->taps + taps_bytes(&m->cfg, x->size));
    x->index = (int32_t *)(void *)((char *)x->both + ids_bytes(&m->cfg, a->max_rows));
    x->host = xmalloc((size_t)(index_count(&m->cfg, shape, a->max_rows) + 1) * sizeof *x->host);
    return collective_share(a->group, x->shared, x->shared_bytes);
}

void model_context_close(struct model_context *x) {
    if (!x) return;
    free(x->host);
    free(x);
}

/* ---- indices ---- */

static int64_t part_rows(const struct model_context *x, int r) { return x->parts.cut[r + 1] - x->parts.cut[r]; }

/* Both indices of an array of gated delta nets; returns their end. */
static int32_t *delta_index(struct model_context *x, int array, int32_t *to) {
    const struct model_config *const c = &x->m->cfg;
    const int64_t width = column_width(c, array), all = all_columns(c, array), rows = x->parts.cut[x->size];
    const int64_t r0 = x->parts.cut[x->rank], n = part_rows(x, x->rank);
    struct model_range range[3];
    int64_t before = 0;
    x->delta[array].rows =
        tensor_1d(x->index + (to - x->host), DT_I32, rows * columns_of(c, array, width, delta_heads(c, x->rank, x->size), range));
    for (int64_t t = 0; t < rows; t++)
        for (int i = 0; i < 3; i++)
            for (int64_t k = range[i].lo; k < range[i].hi; k++) *to++ = (int32_t)(t * all + k);
    x->delta[array].heads = tensor_1d(x->index + (to - x->host), DT_I32, n * all);
    for (int r = 0; r < x->size; r++) { /* the ranges of the ranks one after the other, each (rows, its columns) */
        const int64_t own = columns_of(c, array, width, delta_heads(c, r, x->size), range);
        int64_t at = 0;
        for (int i = 0; i < 3; i++)
            for (int64_t k = range[i].lo; k < range[i].hi; k++, at++)
                for (int64_t t = 0; t < n; t++) to[t * all + k] = (int32_t)(rows * before + (r0 + t) * own + at);
        before += own;
    }
    return to + n * all;
}

/* Those of gated delta nets. */
static int32_t *delta_indices(struct model_context *x, int32_t *to) {
    const struct model_config *const c = &x->m->cfg;
    struct model_range range[3];
    if (!c->delta.v_heads) return to;
    for (int i = 0; i < DELTA_ARRAYS; i++) to = delta_index(x, i, to);
    const int64_t own = columns_of(c, DELTA_QKV, 1, delta_heads(c, x->rank, x->size), range);
    x->channels = tensor_1d(x->index + (to - x->host), DT_I32, own);
    for (int i = 0; i < 3; i++)
        for (int64_t k = range[i].lo; k < range[i].hi; k++) *to++ = (int32_t)k;
    return to;
}

int model_context_begin(struct model_context *x, const struct model_parts *parts, struct tensor ids) {
    const struct model_config *const c = &x->m->cfg;
    const struct heads own = own_heads(x);
    const int64_t rows = parts->cut[parts->n], hq = c->n_q_heads, hk = c->n_kv_heads;
    int32_t *to = x->host;
    CHECK(parts->n == x->size && rows <= x->max_rows);
    x->parts = *parts;
    x->ids = ids;
    x->next = TENSOR_NONE;
    if (model_is_latent(c)) return 0;
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
    CHECK(at - x->index == to - x->host);
    to = delta_indices(x, to);
    return dev_copy_in(x->m->dev, x->index, x->host, (size_t)(to - x->host) * sizeof *to);
}

void model_context_next(struct model_context *x, struct tensor next) { x->next = next; }

/* ---- exchanges ---- */

/* An array of an exchange: of each row `heads` vectors of `width` elements, of which ranks have a range of rows, or of heads. */
struct area {
    enum dtype dt;
    int64_t heads, width;
    bool by_heads, keys; /* keys: heads are those of keys */
    bool delta;          /* of a gated delta net: heads are columns of `array` */
    int array;
    char *base;
    size_t at[MODEL_MOST_PARTS + 1]; /* bytes */
};

/* Heads, or columns, of the ranks before r. */
static int64_t heads_before(const struct model_context *x, const struct area *a, int r) {
    const struct model_config *const c = &x->m->cfg;
    if (r == x->size) return a->heads;
    if (!a->delta) return a->keys ? heads_of(c, r, x->size).kv0 : heads_of(c, r, x->size).q0;
    const struct heads h = delta_heads(c, r, x->size);
    struct model_range range[3];
    return columns_of(c, a->array, column_width(c, a->array), (struct heads){0, h.q0, 0, h.kv0}, range);
}

/* Places n areas in the shared memory. */
static void place(const struct model_context *x, struct area *v, int n) {
    const int64_t rows = x->parts.cut[x->size];
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        struct area *const a = &v[i];
        const size_t vector = (size_t)a->width * dtype_size(a->dt);
        a->base = x->shared + at;
        for (int r = 0; r <= x->size; r++) {
            const int64_t before = heads_before(x, a, r);
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

/* Keys that are the values too, of one head: the ranks' rows one after the other are those of the micro-batch. */
static struct area latent_area(const struct model_context *x) {
    struct area a = {.dt = x->m->act, .heads = 1, .width = x->m->cfg.head_dim, .keys = true};
    place(x, &a, 1);
    return a;
}

static void latent_args(const struct model_batch *b, const struct model_stage *s, struct qkv_args *qkv, struct attn_args *attn) {
    const struct model_context *const x = b->context;
    const struct area own = latent_area(x);
    qkv->kv.k = qkv->kv.v = keys(own_place(x, &own), x->m->act, 1, b->n_rows, qkv->head_dim);
    attn->kv.k = attn->kv.v = keys(s->kv.k.data, x->m->act, 1, x->parts.cut[x->size], qkv->head_dim);
}

void model__context_args(const struct model_batch *b, const struct model_stage *s, struct qkv_args *qkv, struct attn_args *attn) {
    const struct model_context *const x = b->context;
    const struct heads own = own_heads(x);
    const int64_t rows = x->parts.cut[x->size], d = qkv->head_dim, q = own.q1 - own.q0, kv = own.kv1 - own.kv0;
    const enum dtype act = x->m->act;
    struct area v[AREAS];
    if (model_is_latent(&x->m->cfg)) {
        latent_args(b, s, qkv, attn);
        return;
    }
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

int model__context_latent_fwd(const struct model_batch *b, const struct attn_args *attn) {
    struct model_context *const x = b->context;
    const struct area all = latent_area(x);
    TRY(gather(x, &all, 1));
    TRY(dev_copy(x->m->dev, attn->kv.k.data, all.base, all.at[x->size] - all.at[0]));
    CHECK(b->part_seqs);
    for (int i = 0; i < b->parts->n; i++) {
        const struct model_range r = {b->parts->cut[i], b->parts->cut[i + 1]};
        struct attn_args part = *attn;
        part.seqs = b->part_seqs[i];
        part.q = model__range(part.q, r);
        part.out = model__range(part.out, r);
        part.lse = model__range(part.lse, r);
        TRY(dev_attn_fwd(x->m->dev, &part));
    }
    return 0;
}

int model__latent_part_bwd(const struct model *m, const struct model_batch *b, int i, const struct attn_args *attn,
                           struct tensor datt, const struct qkv_bwd_args *out) {
    const struct model_range r = {b->parts->cut[i], b->parts->cut[i + 1]};
    struct attn_args part = *attn;
    CHECK(b->part_seqs);
    part.seqs = b->part_seqs[i];
    part.q = model__range(part.q, r);
    part.out = model__range(part.out, r);
    part.lse = model__range(part.lse, r);
    TRY(dev_zero(m->dev, out->dk.data, (size_t)tensor_count(out->dk) * sizeof(float)));
    TRY(dev_zero(m->dev, out->dv.data, (size_t)tensor_count(out->dv) * sizeof(float)));
    return dev_attn_bwd(m->dev, &part, model__range(datt, r), model__range(out->dq, r), out->dk, out->dv);
}

int model__context_latent_bwd(const struct model_batch *b, const struct attn_args *attn, struct tensor datt,
                              const struct qkv_bwd_args *out) {
    struct model_context *const x = b->context;
    const int64_t all = attn->kv.k.dim[2], d = attn->head_dim, r0 = x->parts.cut[x->rank];
    const int first = model_parts_first(x->n_parts, x->size, x->rank);
    const size_t part = latent_bytes(&x->m->cfg, all), side = up((size_t)x->n_parts * part);
    const struct tensor *const sums[] = {&out->dk, &out->dv};
    size_t at[2 * (MODEL_MOST_PARTS + 1)];
    CHECK(2 * side <= x->shared_bytes && b->parts->n == model_parts_first(x->n_parts, x->size, x->rank + 1) - first);
    for (int i = 0; i < b->parts->n; i++) {
        char *const to = x->shared + (size_t)(first + i) * part;
        const struct qkv_bwd_args own = {
            .dq = out->dq, .dk = keys(to, DT_F32, 1, all, d), .dv = keys(to + side, DT_F32, 1, all, d)};
        TRY(model__latent_part_bwd(x->m, b, i, attn, datt, &own));
    }
    for (int k = 0; k < 2; k++)
        for (int r = 0; r <= x->size; r++)
            at[k * (x->size + 1) + r] = (size_t)k * side + (size_t)model_parts_first(x->n_parts, x->size, r) * part;
    TRY(collective_all_gather(x->group, x->shared, at, 2));
    for (int k = 0; k < 2; k++) /* own keys of all parts */
        for (int i = 0; i < x->n_parts; i++) {
            char *const from = x->shared + (size_t)k * side + (size_t)i * part + (size_t)(r0 * d) * sizeof(float);
            if (i > 0) TRY(dev_axpby(x->m->dev, *sums[k], 1, keys(from, DT_F32, 1, b->n_rows, d), 1));
            else TRY(dev_copy(x->m->dev, sums[k]->data, from, (size_t)(b->n_rows * d) * sizeof(float)));
        }
    return 0;
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
    struct dev *const d = x->m->dev;
    const int64_t rows = x->parts.cut[x->size], h = x->m->cfg.hidden, own = b->n_rows;
    const struct model_config *const c = &x->m->cfg;
    const int times = c->mtp && !c->mtp_detached ? 2 : 1; /* an MTP layer's rows behind the others; a rank may have none */
    const size_t row = (size_t)h * sizeof(float);
    size_t at[2 * (MODEL_MOST_PARTS + 1)];
    for (int i = 0; i < times; i++) {
        for (int r = 0; r <= x->size; r++) at[i * (x->size + 1) + r] = (size_t)(i * rows + x->parts.cut[r]) * row;
        TRY(dev_copy(d, x->shared + at[i * (x->size + 1) + x->rank], tensor_rows(*dx, i * own, own).data, (size_t)own * row));
    }
    CHECK(at[times * (x->size + 1) - 1] <= x->shared_bytes);
    TRY(collective_all_gather(x->group, x->shared, at, times));
    const bool last = x->rank == x->size - 1;
    *ids = last ? x->ids : TENSOR_NONE;
    *dx = last ? tensor_2d(x->shared, DT_F32, times * rows, h) : TENSOR_NONE;
    if (!last || times == 1) return 0;
    const size_t bytes = (size_t)rows * sizeof *x->both;
    TRY(dev_copy(d, x->both, x->ids.data, bytes));
    TRY(dev_copy(d, x->both + rows, x->next.data, bytes));
    *ids = tensor_1d(x->both, DT_I32, 2 * rows);
    return 0;
}

/* ---- gated delta nets ---- */

static struct area delta_area(const struct model_context *x, int array, bool by_heads) {
    const struct model_config *const c = &x->m->cfg;
    return (struct area){.dt = x->m->act,
                         .heads = all_columns(c, array),
                         .width = column_width(c, array),
                         .by_heads = by_heads,
                         .delta = true,
                         .array = array};
}

/* q, k and v, and b and a; or their gradients. */
static void delta_areas(const struct model_context *x, bool by_heads, struct area *v) {
    v[0] = delta_area(x, DELTA_QKV, by_heads);
    v[1] = delta_area(x, DELTA_BA, by_heads);
    place(x, v, 2);
}

/* What the delta rule gives; or its gradient. */
static struct area delta_out(const struct model_context *x, bool by_heads) {
    struct area a = delta_area(x, DELTA_V, by_heads);
    place(x, &a, 1);
    return a;
}

static struct tensor matrix(const struct model_context *x, void *p, int64_t rows, int64_t cols) {
    return tensor_2d(p, x->m->act, rows, cols);
}

int model__context_delta_rows(const struct model_batch *b, struct tensor in, struct tensor z) {
    const struct model_context *const x = b->context;
    struct area v[2];
    delta_areas(x, false, v);
    const struct tensor part[] = {matrix(x, own_place(x, &v[0]), b->n_rows, v[0].heads * v[0].width), z,
                                  matrix(x, own_place(x, &v[1]), b->n_rows, v[1].heads)};
    for (int64_t i = 0, at = 0; i < 3; at += part[i++].dim[1])
        TRY(dev_copy_columns(x->m->dev, &(struct copy_columns_args){.y = part[i], .x = in, .x_at = at, .n = part[i].dim[1]}));
    return 0;
}

struct tensor model__context_delta_dout(const struct model_batch *b) {
    const struct model_context *const x = b->context;
    const struct area a = delta_out(x, false);
    return matrix(x, own_place(x, &a), b->n_rows, a.heads * a.width);
}

/* The part of a vector of all value heads that is of own ones. */
static struct tensor own_values(const struct model_context *x, struct tensor v) {
    const struct heads own = delta_heads(&x->m->cfg, x->rank, x->size);
    return tensor_1d((char *)v.data + (size_t)own.q0 * dtype_size(v.dt), v.dt, own.q1 - own.q0);
}

void model__context_delta_args(const struct model_batch *b, const struct model_delta_stage *s, struct causal_conv_args *conv,
                               struct delta_args *rule) {
    const struct model_context *const x = b->context;
    const struct model_config *const c = &x->m->cfg;
    const struct heads own = delta_heads(c, x->rank, x->size);
    const int64_t rows = x->parts.cut[x->size], n = own.q1 - own.q0, channels = x->channels.dim[0];
    conv->x = matrix(x, s->qkv.data, rows, channels);
    conv->y = rule->qkv = matrix(x, s->u.data, rows, channels);
    rule->n_k_heads = own.kv1 - own.kv0;
    rule->n_v_heads = n;
    rule->ba = matrix(x, s->ba.data, rows, 2 * n);
    rule->ba_at = 0;
    rule->a_log = own_values(x, rule->a_log);
    rule->dt_bias = own_values(x, rule->dt_bias);
    rule->out = TENSOR_NONE; /* where it is exchanged */
    if (!s->e.data) return;
    rule->states = (struct tensor){s->states.data, DT_F32, 4, {rows / DEV_DELTA_CHUNK + 1, n, c->delta.k_dim, c->delta.v_dim}};
    rule->e = tensor_2d(s->e.data, DT_F32, rows, n * c->delta.v_dim);
}

/* The own channels' weights of the convolution. */
static int take_taps(const struct model_context *x, struct causal_conv_args *conv) {
    const struct tensor own = matrix(x, x->taps, x->channels.dim[0], DEV_CONV_TAPS);
    TRY(dev_gather_rows(x->m->dev, own, conv->w, x->channels));
    conv->w = own;
    return 0;
}

int model__context_delta_fwd(const struct model_batch *b, const struct causal_conv_args *of, const struct delta_args *r,
                             struct tensor o) {
    struct model_context *const x = b->context;
    struct causal_conv_args conv = *of;
    struct delta_args rule = *r;
    struct area v[2], out;
    delta_areas(x, false, v);
    TRY(gather(x, v, 2));
    TRY(pick(x, &v[0], x->delta[DELTA_QKV].rows, conv.x));
    TRY(pick(x, &v[1], x->delta[DELTA_BA].rows, rule.ba));
    out = delta_out(x, true);
    rule.out = matrix(x, own_place(x, &out), conv.x.dim[0], rule.n_v_heads * rule.v_dim);
    if (rule.n_v_heads > 0) {
        TRY(take_taps(x, &conv));
        TRY(dev_causal_conv_fwd(x->m->dev, &conv));
        TRY(dev_delta_fwd(x->m->dev, &rule));
    }
    TRY(gather(x, &out, 1));
    return pick(x, &out, x->delta[DELTA_V].heads, o);
}

int model__context_delta_bwd(const struct model_batch *b, const struct context_delta_bwd_args *a) {
    struct model_context *const x = b->context;
    struct dev *const d = x->m->dev;
    struct causal_conv_args conv = *a->conv;
    const int64_t rows = conv.x.dim[0], channels = x->channels.dim[0], n = a->rule->n_v_heads;
    const struct tensor dout = matrix(x, a->dout.data, rows, n * a->rule->v_dim), du = matrix(x, a->du.data, rows, channels);
    const struct tensor dw = tensor_2d(x->taps + taps_bytes(&x->m->cfg, x->size) / 2, DT_F32, channels, DEV_CONV_TAPS);
    struct area in = delta_out(x, false), v[2];
    struct delta_args rule = *a->rule;
    TRY(gather(x, &in, 1));
    TRY(pick(x, &in, x->delta[DELTA_V].rows, dout));
    delta_areas(x, true, v);
    const struct tensor dqkv = matrix(x, own_place(x, &v[0]), rows, channels), dba = matrix(x, own_place(x, &v[1]), rows, 2 * n);
    if (n > 0) {
        rule.out = dout; /* not read */
        TRY(take_taps(x, &conv));
        TRY(dev_delta_bwd(d, &rule, &(struct delta_bwd_args){dout, du, dba, own_values(x, a->da_log), own_values(x, a->ddt_bias)}));
        TRY(dev_zero(d, dw.data, (size_t)tensor_count(dw) * sizeof(float)));
        TRY(dev_causal_conv_bwd(d, &conv, &(struct causal_conv_bwd_args){du, dqkv, dw}));
        TRY(dev_scatter_rows_add(d, a->dtaps, dw, x->channels));
    }
    TRY(gather(x, v, 2));
    TRY(pick(x, &v[0], x->delta[DELTA_QKV].heads, a->dqkv));
    return pick(x, &v[1], x->delta[DELTA_BA].heads, a->dba);
}
