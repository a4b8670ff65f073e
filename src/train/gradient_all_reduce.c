/* gradient_all_reduce.c - see gradient_all_reduce.h.
 *
 * The ring is taken in turn by the buckets of a wave, then by the rows of the token embedding. A place is reused when all
 * ranks have read its fold. The head of a model with tied embeddings has memory of its own, since its fold waits
 * for the rows.
 * A chunk of several micro-batches is one flat array in place of both, with the rows added to the table in it: it is written again
 * when all ranks have read the last fold. */
#include "train/gradient_all_reduce.h"

#include "comm/comm.h"
#include "model/master_weights.h"
#include "model/parallel/expert_dispatch.h"
#include "model/parallel/weight_streaming.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 }; /* bytes: a bucket lies as in a flat array modulo this */

struct place { /* of the ring, until its fold has been read */
    size_t lo, hi;
    int64_t ticket;
};

struct all_reduce {
    struct dev *dev;
    struct collective *g;
    struct model *m;
    int rank, size, times; /* times: summands that a place has room for */
    float *sums;           /* (m->n_master), borrowed */
    /* the buckets, in the order of backward: their cuts, and where this rank's part is in sums */
    struct model_range *bucket;
    int64_t n_buckets;
    int64_t n_before; /* buckets that come before those of layers */
    int64_t *cut;     /* (n_buckets, size + 1), from the bucket's first element on */
    int64_t *own_at;  /* (n_buckets) */
    bool tied, rows;  /* rows: the token embedding is trained */
    int64_t head;     /* the head's bucket: behind that of an MTP layer */
    /* the ring, and the head's memory where it is tied: shared */
    char *ring;
    size_t ring_bytes, ring_at, table_bytes, chunk_bytes;
    struct place *places; /* oldest first */
    int64_t n_places, cap_places;
    float *table;
    float *chunk;        /* (m->n_train), shared; NULL: the ring and the table instead */
    int64_t last_ticket; /* of the table, or with a chunk of all; 0: not folded yet */
    /* the wave under way */
    struct all_reduce_wave wave;
    bool add;     /* onto the sums of chunks before */
    bool more;    /* the pass adds to the chunk */
    int64_t next; /* bucket */
    struct place open;
    float *open_at;
    int n_open[2]; /* buckets of the layer at hand: those in the place, and with those of experts */
    /* the step */
    bool shares;       /* the weights are sharded: each rank writes its own */
    bool gathers_flat; /* they are one array, which is gathered */
    size_t *gather_at; /* (n_buckets, size + 1) bytes of m->flat */
    int *owner;        /* (n_segments) of the model */
    int64_t n_segments;
    size_t *sums_at; /* (size + 1) bytes */
    double *parts, *squares;
};

struct model_shard all_reduce_shard(const struct collective *g, const struct optim_config *c, bool experts) {
    if (!g) return (struct model_shard){0};
    return (struct model_shard){
        .rank = collective_rank(g), .size = collective_size(g), .whole_matrices = c && c->kind == OPTIM_MUON, .experts = experts};
}

/* ---- memory ---- */

static size_t length(struct model_range r) { return (size_t)(r.hi - r.lo) * sizeof(float); }
static size_t up(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* What rows of the token embedding take: dx, then ids. */
static size_t rows_bytes(const struct model *m, int64_t rows) {
    return up((size_t)(rows * m->cfg.hidden) * sizeof(float)) + (size_t)rows * sizeof(int32_t);
}

struct room {
    size_t ring, table, chunk; /* bytes; table 0: not tied; either the first two or the last */
};

/* New weights are written where they are read; else buckets of the master go through the ring (gather_masters). */
static bool writes_in_place(const struct model *m) {
    struct model whole = *m;
    whole.flags &= ~MODEL_SHARDED_WEIGHTS;
    return model_is_flat(&whole);
}
/* Bytes of so many summands. */
static size_t summands(struct model_range bucket, int times) {
    return length(bucket) + (size_t)((times - 1) * model_summand_stride(bucket)) * sizeof(float);
}
/* Bytes in the ring of a bucket, and of the others of its layer that are there with it. */
static size_t bytes_with(const struct model *m, struct model_shard s, const struct model_range *bucket, int64_t n, int64_t i,
                         int times) {
    if (!m->lora && model_is_of_experts(m, s, bucket[i])) return 0; /* an adapter's new values go through it */
    size_t sum = summands(bucket[i], times);
    if (s.experts && i + 1 < n && bucket[i + 1].lo > bucket[i].hi && !model_is_of_experts(m, s, bucket[i + 1]))
        sum += length(bucket[i + 1]); /* behind the experts */
    return sum;
}

/* Two places at least, so that a bucket is made while the one before is read; of small ones three. Of a token embedding that is not
 * the head, the last bucket, there is one gradient, in rows, and at most the master. */
static struct room room_of(const struct model *m, struct model_shard s, const struct model_range *bucket, int64_t n,
                           const struct all_reduce_args *a) {
    const int times = a->times > 1 ? a->times : 1;
    const bool tied = !m->lora && m->g_head == m->g_embed, untied_table = !m->lora && !tied;
    size_t layer = 0, most = m->lora ? 0 : rows_bytes(m, model_embedded_rows(&m->cfg, a->max_rows));
    const int64_t head = m->mtp.first != NULL;
    if (a->chunks) return (struct room){.chunk = (size_t)m->n_train * sizeof(float)};
    for (int64_t i = 0; i < n; i++) {
        const bool table = untied_table && i == n - 1;
        if ((tied && i == head) || (table && writes_in_place(m))) continue;
        const size_t bytes = table ? length(bucket[i]) : bytes_with(m, s, bucket, n, i, times);
        most = larger(most, bytes);
        if (table) continue;
        if (m->lora || i >= head + 2 || i < head) layer = larger(layer, bytes);
    }
    most += 2 * ALIGN;
    layer += 2 * ALIGN;
    return (struct room){.ring = up(larger(most + layer, m->lora ? 0 : 3 * layer)),
                         .table = tied ? summands(bucket[head], times) : 0};
}

int all_reduce_memory(struct all_reduce_memory *out, const struct rank_memory_args *a) {
    const struct model_shard s = {
        .size = a->ranks, .whole_matrices = a->optim->kind == OPTIM_MUON, .experts = a->open->shard.experts};
    struct model *m;
    struct model_range *bucket;
    TRY(model_shape(&m, a->config, a->dev, a->open->act, a->open->quant, a->lora));
    m->flags = a->open->flags;
    const int64_t n = model_buckets(m, s, &bucket);
    const struct all_reduce_args own = {.max_rows = a->max_rows, .chunks = a->chunks, .times = a->times};
    const struct room room = room_of(m, s, bucket, n, &own);
    *out = (struct all_reduce_memory){.chunk = room.chunk,
                                      .exchange = room.ring + room.table + collective_bytes(a->dev, a->ranks, a->local)};
    out->master = out->sums = (size_t)model_own_most(m, s) * sizeof(float);
    out->moments = optim_part_bytes(m, a->optim, s, &out->host);
    free(bucket);
    model_shape_free(m);
    return 0;
}

/* Nothing where bytes is 0. */
static int share(struct collective *g, struct dev *d, size_t bytes, void *out) {
    void *p = NULL;
    if (bytes == 0) return 0;
    TRY(dev_alloc(d, bytes, &p));
    memcpy(out, &p, sizeof p); /* from here on *out must be freed */
    return collective_share(g, p, bytes);
}

/* The cuts of all buckets, where this rank's parts are in sums, and the bytes of the gathered array. */
static void make_cuts(struct all_reduce *r) {
    const int64_t n = r->n_buckets, stride = r->size + 1;
    const size_t unit = dtype_size(r->m->act);
    struct model_range *part = xmalloc((size_t)r->size * sizeof *part);
    r->cut = xmalloc((size_t)(n * stride) * sizeof *r->cut);
    r->gather_at = xmalloc((size_t)(n * stride) * sizeof *r->gather_at);
    r->own_at = xcalloc((size_t)n, sizeof *r->own_at);
    for (int64_t i = 0; i < n; i++) {
        model_cut(r->m, r->bucket[i], r->m->shard, part);
        for (int k = 0; k <= r->size; k++) {
            const int64_t at = k < r->size ? part[k].lo : r->bucket[i].hi;
            r->cut[i * stride + k] = at - r->bucket[i].lo;
            r->gather_at[i * stride + k] = (size_t)at * unit;
        }
        for (int64_t k = 0; k < r->m->n_own && r->m->own[k].lo < part[r->rank].lo; k++)
            r->own_at[i] += r->m->own[k].hi - r->m->own[k].lo;
    }
    free(part);
}

/* The owner of each segment. */
static void find_owners(struct all_reduce *r) {
    const struct model *m = r->m;
    const int64_t stride = r->size + 1;
    int64_t s = 0;
    r->n_segments = model_n_segments(m);
    r->owner = xcalloc((size_t)r->n_segments, sizeof *r->owner);
    r->sums_at = xcalloc((size_t)stride, sizeof *r->sums_at);
    r->parts = xmalloc((size_t)r->n_segments * sizeof *r->parts);
    r->squares = xmalloc((size_t)r->n_segments * sizeof *r->squares);
    for (int64_t p = 0; p < m->n_train_params; p++) {
        const struct model_param *x = &m->train_params[p];
        int64_t i = 0;
        while (x->offset < r->bucket[i].lo || x->offset >= r->bucket[i].hi) i++;
        for (int64_t lo = 0; lo < x->rows * x->cols; lo += DEV_SEGMENT, s++) {
            const int64_t *const cut = r->cut + i * stride, at = x->offset + lo - r->bucket[i].lo;
            while (at >= cut[r->owner[s] + 1]) r->owner[s]++;
            for (int k = r->owner[s] + 1; k <= r->size; k++) r->sums_at[k] += sizeof *r->parts;
        }
    }
}

int all_reduce_create(struct all_reduce **out, struct collective *g, struct model *m, const struct all_reduce_args *a) {
    struct all_reduce *r = *out = xcalloc(1, sizeof *r);
    *r = (struct all_reduce){.dev = m->dev,
                             .g = g,
                             .m = m,
                             .rank = collective_rank(g),
                             .size = collective_size(g),
                             .times = a->times > 1 ? a->times : 1,
                             .sums = a->sums,
                             .tied = !m->lora && m->g_head == m->g_embed,
                             .rows = !m->lora,
                             .head = m->mtp.first != NULL,
                             .shares = m->flags & MODEL_SHARDED_WEIGHTS && !m->lora,
                             .gathers_flat = !m->lora && m->flat.data};
    CHECK(m->own && m->shard.rank == r->rank && m->shard.size == r->size);
    r->n_buckets = model_buckets(m, m->shard, &r->bucket);
    r->n_before = r->n_buckets - (r->rows && !r->tied);
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        struct model_range of[MODEL_LAYER_BUCKETS];
        for (int i = 0, n = model_layer_buckets(m, m->shard, l, of); i < n; i++) r->n_before -= of[i].lo < of[i].hi;
    }
    CHECK((!m->shard.experts && r->times == 1) || !a->chunks);
    CHECK(!m->shard.experts || r->times == 1);
    const struct room room = room_of(m, m->shard, r->bucket, r->n_buckets, a);
    r->ring_bytes = room.ring;
    r->table_bytes = room.table;
    r->chunk_bytes = room.chunk;
    TRY(share(g, r->dev, room.ring, &r->ring));
    TRY(share(g, r->dev, room.table, &r->table));
    TRY(share(g, r->dev, room.chunk, &r->chunk));
    if (r->gathers_flat) TRY(collective_share(g, m->weights, m->weights_bytes));
    make_cuts(r);
    find_owners(r);
    return 0;
}

void all_reduce_destroy(struct all_reduce *r) {
    if (!r) return;
    dev_free(r->dev, r->ring, r->ring_bytes);
    dev_free(r->dev, r->table, r->table_bytes);
    dev_free(r->dev, r->chunk, r->chunk_bytes);
    free(r->bucket);
    free(r->cut);
    free(r->own_at);
    free(r->places);
    free(r->gather_at);
    free(r->owner);
    free(r->sums_at);
    free(r->parts);
    free(r->squares);
    free(r);
}

/* ---- a wave ---- */

/* The next place of the ring, congruent with byte `like` of a flat array. All ranks have read its previous content. */
static int take(struct all_reduce *r, size_t bytes, size_t like, char **at) {
    size_t lo = up(r->ring_at) + like % ALIGN;
    int64_t kept = 0;
    if (lo + bytes > r->ring_bytes) lo = like % ALIGN;
    CHECK(lo + bytes <= r->ring_bytes);
    r->open = (struct place){.lo = lo, .hi = lo + bytes};
    r->ring_at = lo + bytes;
    for (int64_t i = 0; i < r->n_places; i++) {
        const struct place p = r->places[i];
        if (p.hi <= lo || p.lo >= lo + bytes) r->places[kept++] = p;
        else TRY(collective_reuse(r->g, p.ticket));
    }
    r->n_places = kept;
    *at = r->ring + lo;
    return 0;
}

static void keep_place(struct all_reduce *r) {
    xgrow((void **)&r->places, &r->cap_places, r->n_places + 1, sizeof *r->places);
    r->places[r->n_places++] = r->open;
}

/* Folds bucket i; with ids also rows. */
static int fold(struct all_reduce *r, int64_t i, const float *x, const int32_t *ids, const float *dx, int64_t *ticket) {
    const struct dev_bucket b = {.x = x,
                                 .cut = r->cut + i * (r->size + 1),
                                 .n = r->wave.n,
                                 .times = r->times > 1 ? r->wave.times : NULL,
                                 .stride = model_summand_stride(r->bucket[i]),
                                 .own = r->sums + r->own_at[i],
                                 .add = r->add,
                                 .ids = ids,
                                 .dx = dx,
                                 .n_rows = r->wave.n_rows,
                                 .width = r->m->cfg.hidden};
    return collective_fold(r->g, &b, ticket);
}

/* The same of the bucket in the open place of the ring. */
static int fold_place(struct all_reduce *r, int64_t i, const float *x, const int32_t *ids, const float *dx) {
    TRY(fold(r, i, x, ids, dx, &r->open.ticket));
    keep_place(r);
    return 0;
}

static bool waits_for_rows(const struct all_reduce *r, int64_t i) { return r->tied && i == r->head; }

/* Memory for bucket i. */
static int place_of(struct all_reduce *r, int64_t i, float **at) {
    const struct model_range bucket = r->bucket[i];
    char *p;
    if (r->chunk) {
        *at = r->chunk + bucket.lo;
        return 0;
    }
    if (waits_for_rows(r, i)) {
        TRY(collective_reuse(r->g, r->last_ticket));
        *at = r->table;
        return 0;
    }
    const bool table = r->rows && !r->tied && i == r->n_buckets - 1; /* its master */
    TRY(take(r, table ? length(bucket) : summands(bucket, r->times), (size_t)bucket.lo * sizeof(float), &p));
    *at = r->open_at = (float *)(void *)p;
    return 0;
}

/* Its reader has r->open.ticket. */
static void leave(struct all_reduce *r, int64_t i) {
    if (r->chunk || waits_for_rows(r, i)) r->last_ticket = r->open.ticket;
    else keep_place(r);
}

/* A layer whose experts are on ranks has several buckets: what comes before and behind these is in one place. */
static void count_open(struct all_reduce *r, struct model_range layer) {
    r->n_open[0] = r->n_open[1] = 0;
    for (int64_t i = r->next; i < r->n_buckets && r->bucket[i].lo >= layer.lo && r->bucket[i].hi <= layer.hi; i++) {
        r->n_open[0] += !model_is_of_experts(r->m, r->m->shard, r->bucket[i]);
        r->n_open[1]++;
    }
}

static int begin(void *ctx, struct model_range bucket, float **at) {
    struct all_reduce *r = ctx;
    size_t bytes = 0;
    char *p;
    count_open(r, bucket);
    CHECK(r->n_open[1] > 0 && (r->m->shard.experts || r->n_open[1] == 1));
    if (r->n_open[1] == 1 && r->n_open[0] == 1) return place_of(r, r->next, at);
    for (int i = 0; i < r->n_open[0]; i++) bytes += length(r->bucket[r->next + i]);
    TRY(take(r, bytes, (size_t)bucket.lo * sizeof(float), &p));
    *at = r->open_at = (float *)(void *)p;
    return 0;
}

static int end(void *ctx, struct model_range bucket) {
    struct all_reduce *r = ctx;
    const int64_t i = r->next;
    r->next += r->n_open[1];
    if (r->n_open[0] == 1 && waits_for_rows(r, i)) return 0;
    if (r->chunk) return fold(r, i, r->chunk + bucket.lo, NULL, NULL, &r->last_ticket);
    const float *at = r->open_at;
    for (int k = 0; k < r->n_open[0]; k++) {
        TRY(fold(r, i + k, at, NULL, NULL, &r->open.ticket));
        at += r->bucket[i + k].hi - r->bucket[i + k].lo;
    }
    if (r->n_open[0] > 0) keep_place(r);
    return 0;
}

/* This rank's experts add micro-batch after micro-batch where the sum is. */
static int experts(void *ctx, struct model_range bucket, float **at, bool *add) {
    struct all_reduce *r = ctx;
    int64_t i = 0;
    while (r->bucket[i].lo != bucket.lo || r->bucket[i].hi != bucket.hi) i++;
    *at = r->sums + r->own_at[i];
    *add = r->add;
    return 0;
}

/* The rows are added to the chunk's table, which is then complete. ids absent: it was before. */
static int rows_to_chunk(struct all_reduce *r, int64_t i, struct tensor ids, struct tensor dx) {
    const int64_t h = r->m->cfg.hidden;
    float *const table = r->chunk + r->bucket[i].lo;
    if (ids.nd && !r->more && !r->tied) TRY(dev_zero(r->dev, table, length(r->bucket[i])));
    if (ids.nd) TRY(dev_embed_bwd(r->dev, tensor_2d(table, DT_F32, r->m->cfg.vocab, h), ids, dx));
    return fold(r, i, table, NULL, NULL, &r->last_ticket);
}

/* The rows go to the ring, where dx and ids have the same places on all ranks; then the table's fold. ids absent: this rank has
 * none. */
static int rows(void *ctx, struct model_range table, struct tensor ids, struct tensor dx) {
    struct all_reduce *r = ctx;
    const int64_t i = r->tied ? r->head : r->n_buckets - 1, n = ids.nd ? ids.dim[0] : 0, h = r->m->cfg.hidden;
    int64_t most = 0;
    char *at;
    CHECK(table.lo == r->bucket[i].lo);
    if (r->chunk) return rows_to_chunk(r, i, ids, dx);
    CHECK(n == r->wave.n_rows[r->rank]);
    for (int k = 0; k < r->size; k++) most = r->wave.n_rows[k] > most ? r->wave.n_rows[k] : most;
    TRY(take(r, rows_bytes(r->m, most), 0, &at));
    char *const at_ids = at + up((size_t)(most * h) * sizeof(float));
    if (n > 0) TRY(dev_copy(r->dev, at, dx.data, (size_t)(n * h) * sizeof(float)));
    if (n > 0) TRY(dev_copy(r->dev, at_ids, ids.data, (size_t)n * sizeof(int32_t)));
    TRY(fold_place(r, i, r->tied ? r->table : NULL, (const int32_t *)(void *)at_ids, (const float *)(void *)at));
    r->last_ticket = r->open.ticket;
    return 0;
}

void all_reduce_wave(struct all_reduce *r, const struct all_reduce_wave *w) {
    r->wave = *w;
    r->add = !w->first;
    r->next = 0;
}

int all_reduce_sink(struct all_reduce *r, bool add, bool fold, struct model_grad_sink *sink) {
    CHECK(r->chunk || (fold && !add));
    r->more = add;
    *sink = fold ? (struct model_grad_sink){.add = add,
                                            .ctx = r,
                                            .begin = begin,
                                            .separate = r->times > 1,
                                            .end = end,
                                            .rows = rows,
                                            .experts = experts}
                 : (struct model_grad_sink){.flat = r->chunk, .add = add};
    return r->chunk && !add ? collective_reuse(r->g, r->last_ticket) : 0;
}

static int idle_bucket(struct all_reduce *r, struct model_range bucket) {
    float *at;
    TRY(begin(r, bucket, &at));
    return end(r, bucket);
}

int all_reduce_idle(struct all_reduce *r) {
    const struct model_grad_sink sink = {.ctx = r, .experts = experts};
    while (r->next < r->n_before) TRY(idle_bucket(r, r->bucket[r->next]));
    for (int64_t l = r->m->cfg.n_layers - 1; l >= 0; l--) {
        const struct model_range layer = model_layer_bucket(r->m, l);
        TRY(model_idle_back_layer(r->m, l, &sink));
        if (layer.lo < layer.hi) TRY(idle_bucket(r, layer));
    }
    return r->rows ? rows(r, r->bucket[r->tied ? r->head : r->n_buckets - 1], TENSOR_NONE, TENSOR_NONE) : 0;
}

int all_reduce_join(struct all_reduce *r) { return collective_join(r->g); }

/* ---- the step ---- */

/* The squares of all segments of the model, in order. */
static int gather_squares(struct all_reduce *r, const struct optim *o) {
    size_t *const at = xmalloc((size_t)(r->size + 1) * sizeof *at);
    char *const all = (char *)r->parts;
    const size_t own = r->sums_at[r->rank + 1] - r->sums_at[r->rank];
    CHECK(own == (size_t)o->n_segments * sizeof *o->sums);
    memcpy(all + r->sums_at[r->rank], o->sums, own);
    const int rc = comm_all_gather(collective_comm(r->g), r->parts, r->sums_at);
    memcpy(at, r->sums_at, (size_t)(r->size + 1) * sizeof *at);
    for (int64_t s = 0; s < r->n_segments; s++) {
        memcpy(&r->squares[s], all + at[r->owner[s]], sizeof *r->squares);
        at[r->owner[s]] += sizeof *r->squares;
    }
    free(at);
    return rc;
}

/* Writes this rank's new weights to the array where all ranks' are gathered. */
static int put_own(struct all_reduce *r, const float *from) {
    const struct model *m = r->m;
    for (int64_t i = 0; i < m->n_own; i++) {
        const int64_t lo = m->own[i].lo, n = m->own[i].hi - lo;
        const struct tensor x = tensor_1d((void *)(uintptr_t)from, DT_F32, n);
        TRY(dev_cast(r->dev, tensor_1d((char *)m->flat.data + (size_t)lo * dtype_size(m->act), m->act, n), x));
        from += n;
    }
    return 0;
}

/* Of a sharded model: where the part that this rank owns is its share of the weights. */
static int put_shares(struct all_reduce *r, const float *from) {
    struct model *const m = r->m;
    for (int64_t i = 0; i < m->n_own; i++) {
        const int64_t n = m->own[i].hi - m->own[i].lo;
        const struct tensor x = tensor_1d((void *)(uintptr_t)from, DT_F32, n);
        if (!model_share_is_whole(m, m->own[i])) TRY(dev_cast(r->dev, tensor_1d(model_share(m, m->own[i]), m->act, n), x));
        from += n;
    }
    return 0;
}

/* Else, and of a bucket that is whole on each rank: its master is gathered in place of its gradient, and the rank makes of it the
 * weights that it has. */
static int gather_masters(struct all_reduce *r, const float *from) {
    const bool in_place = r->shares && model_share_is_owned(r->m); /* by put_shares */
    size_t *const at = xmalloc((size_t)(r->size + 1) * sizeof *at);
    int rc = 0;
    for (int64_t i = 0; i < r->n_buckets; i++) {
        const int64_t *const cut = r->cut + i * (r->size + 1), own = cut[r->rank + 1] - cut[r->rank];
        float *to;
        if (in_place && !model_share_is_whole(r->m, r->bucket[i])) continue;
        if (r->shares && model_is_of_experts(r->m, r->m->shard, r->bucket[i])) { /* they are this rank's alone */
            TRYG(model_share_from(r->m, r->bucket[i], (float *)(uintptr_t)(from + r->own_at[i])), out);
            continue;
        }
        for (int k = 0; k <= r->size; k++) at[k] = (size_t)cut[k] * sizeof *to;
        if (r->chunk) TRYG(collective_reuse(r->g, r->last_ticket), out);
        TRYG(place_of(r, i, &to), out);
        TRYG(dev_copy(r->dev, to + cut[r->rank], from + r->own_at[i], (size_t)own * sizeof *to), out);
        TRYG(collective_gather_begin(r->g, to, at, 1, &r->open.ticket), out);
        TRYG(collective_gather_end(r->g), out);
        TRYG((r->shares ? model_share_from : model_refresh_bucket)(r->m, r->bucket[i], to), out);
        leave(r, i);
    }
out:
    free(at);
    return rc;
}

/* The new weights of all ranks: where they are whole, gathered. */
static int spread(struct all_reduce *r, const struct optim *o) {
    const float *from = o->host_master ? r->sums : r->m->master; /* a master in host memory was left in the gradients */
    if (r->shares && model_share_is_owned(r->m)) TRY(put_shares(r, from));
    if (!r->gathers_flat) return gather_masters(r, from);
    TRY(put_own(r, from));
    return collective_all_gather(r->g, r->m->flat.data, r->gather_at, r->n_buckets);
}

int all_reduce_step(struct all_reduce *r, struct optim *o, const struct optim_config *c, double lr, struct optim_result *result) {
    struct model *const m = r->m;
    TRY(optim_sums(o, m, r->sums));
    TRY(gather_squares(r, o));
    optim_norm(m, r->squares, result);
    if (!isfinite(result->grad_norm)) return 0;
    TRY(optim_update(o, m, r->sums, c, lr, result->grad_norm));
    return spread(r, o);
}
