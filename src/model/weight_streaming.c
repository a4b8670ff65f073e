/* weight_streaming.c - passes with weights that are in host memory, or sharded over ranks: two layers of them are on the device
 * at a time, the next one is brought while one is computed.
 *
 * What is brought at once is a span: a layer, the final norm, the head, the embedding. All but layers stay on the device for a
 * phase. The embedding is read from host memory where it is there, as a pass reads few of its rows; of a sharded model it is
 * gathered. Knows nothing of the arithmetic: groups point into the buffers, so the passes are those of forward.c and backward.c.
 * Invariant: layer l is read from buffer l % 2, after it has come, and all ranks ask for the same spans in the same order. */
#include "model/weight_streaming.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "comm/comm.h"
#include "model/files/load.h"
#include "model/model_int.h"

#include <stdlib.h>
#include <string.h>

enum { TAIL_COPY_STREAM = 2, MOST_TAIL = 3 };

/* Groups that are neighbours in the block of weights. */
struct span {
    struct model_group *first, *last;
    size_t bytes;
    char *from;  /* in host memory; of a sharded model this rank's share */
    char *here;  /* where it is read; NULL: in host memory */
    size_t *cut; /* (size + 1) sharded: rank r has bytes cut[r]..cut[r + 1] */
};
struct model_stream {
    struct dev_group *group; /* NULL: all is in host memory */
    struct span *spans;      /* (n_layers) the layers; then n_tail: final norm, head unless it is tied, embedding */
    int64_t n_tail;
    char *block;       /* from model_stream_bind */
    int64_t in[2];     /* the layer in each buffer, or on its way there; -1: none */
    int64_t ticket[2]; /* of its gather */
    bool tail;         /* it is there, or on its way */
    int64_t tail_ticket;
    size_t *cuts; /* of all spans */
};

int model_stream_flags(enum model_stream_from from) {
    switch (from) {
    case MODEL_STREAM_NONE: break;
    case MODEL_STREAM_HOST: return MODEL_HOST_WEIGHTS;
    case MODEL_STREAM_RANKS: return MODEL_SHARDED_WEIGHTS;
    }
    return MODEL_INFER;
}

/* ---- spans ---- */

static size_t group_bytes(const struct model *m, const struct model_group *g) {
    return g->k ? dev_weight_bytes(m->dev, g->mat.dt, g->n, g->k) : (size_t)g->n * dtype_size(g->vec.dt);
}
static void **group_data(struct model_group *g) { return g->k ? &g->mat.data : &g->vec.data; }

/* The groups of a span lie one after the other from base on (NULL: measures). Returns its bytes. */
static size_t place(const struct model *m, const struct span *s, char *base) {
    struct arena a = {.base = base, .cap = s->bytes};
    for (struct model_group *g = s->first; g <= s->last; g++) {
        void *const at = arena_take(&a, group_bytes(m, g));
        if (base) *group_data(g) = at;
    }
    return a.used;
}

static struct span span_of(const struct model *m, struct model_group *first, struct model_group *last) {
    struct span s = {.first = first, .last = last};
    s.bytes = place(m, &s, NULL);
    s.from = *group_data(first);
    return s;
}

/* Rank r has a run of whole ARENA_ALIGN bytes, about one in `size`. */
static void cut_bytes(struct span *s, int size) {
    for (int r = 0; r <= size; r++) {
        const size_t at = (size_t)((__int128)s->bytes * (unsigned)r / (unsigned)size);
        s->cut[r] = r < size ? at / ARENA_ALIGN * ARENA_ALIGN : s->bytes;
    }
}

static int64_t n_spans(const struct model *m) { return m->cfg.n_layers + m->stream->n_tail; }
static bool sharded(const struct model *m) { return m->flags & MODEL_SHARDED_WEIGHTS; }
static size_t share_bytes(const struct span *s, int rank) { return s->cut[rank + 1] - s->cut[rank]; }

void model__stream_create(struct model *m) {
    const int64_t layers = m->cfg.n_layers;
    const int size = m->shard.size;
    struct model_stream *s = m->stream = xcalloc(1, sizeof *s);
    s->spans = xcalloc((size_t)layers + MOST_TAIL, sizeof *s->spans);
    struct span *const tail = s->spans + layers;
    for (int64_t l = 0; l < layers; l++) /* a layer ends where the next one, or the final norm, begins */
        s->spans[l] = span_of(m, m->layers[l].attn_norm, (l + 1 < layers ? m->layers[l + 1].attn_norm : m->g_norm) - 1);
    tail[s->n_tail++] = span_of(m, m->g_norm, m->g_norm);
    if (m->g_head != m->g_embed) tail[s->n_tail++] = span_of(m, m->g_head, m->g_head);
    tail[s->n_tail++] = span_of(m, m->g_embed, m->g_embed);
    s->in[0] = s->in[1] = -1;
    if (!sharded(m)) return;
    CHECK(size > 0);
    s->cuts = xcalloc((size_t)(n_spans(m) * (size + 1)), sizeof *s->cuts);
    for (int64_t i = 0; i < n_spans(m); i++) {
        s->spans[i].cut = s->cuts + i * (size + 1);
        cut_bytes(&s->spans[i], size);
    }
}

void model__stream_free(struct model *m) {
    if (!m->stream) return;
    free(m->stream->spans);
    free(m->stream->cuts);
    free(m->stream);
    m->stream = NULL;
}

void model__shares_layout(struct model *m, int rank, struct arena *a) {
    for (int64_t i = 0; i < n_spans(m); i++) m->stream->spans[i].from = arena_take(a, share_bytes(&m->stream->spans[i], rank));
}

size_t model__shares_most(struct model *m, struct model_shard shard) {
    size_t most = 0;
    m->shard = shard;
    model__stream_create(m);
    for (int r = 0; r < shard.size; r++) {
        struct arena a = {0};
        model__shares_layout(m, r, &a);
        most = a.used > most ? a.used : most;
    }
    model__stream_free(m);
    return most;
}

/* ---- loading ---- */

size_t model__span_most(const struct model *m) {
    size_t most = 0;
    for (int64_t i = 0; i < n_spans(m); i++)
        if (m->stream->spans[i].bytes > most) most = m->stream->spans[i].bytes;
    return most;
}

bool model__span_open(struct model *m, int64_t i, void *at, struct model_range *groups) {
    if (i == n_spans(m)) return false;
    const struct span *s = &m->stream->spans[i];
    place(m, s, at);
    *groups = (struct model_range){s->first - m->groups, s->last - m->groups + 1};
    return true;
}

int model__span_keep(struct model *m, int64_t i, const void *at) {
    const struct span *s = &m->stream->spans[i];
    return dev_copy(m->dev, s->from, (const char *)at + s->cut[m->shard.rank], share_bytes(s, m->shard.rank));
}

/* ---- the room on the device ---- */

static void stream_layout(const struct model *m, struct arena *a) {
    struct span *const spans = m->stream->spans, *const embed = &spans[n_spans(m) - 1];
    size_t longest = 0;
    char *buffer[2];
    for (int64_t l = 0; l < m->cfg.n_layers; l++) longest = spans[l].bytes > longest ? spans[l].bytes : longest;
    for (int i = 0; i < 2; i++) buffer[i] = arena_take(a, longest);
    for (int64_t l = 0; l < m->cfg.n_layers; l++) spans[l].here = buffer[l % 2];
    for (struct span *s = spans + m->cfg.n_layers; s < embed; s++) s->here = arena_take(a, s->bytes);
    if (sharded(m) || m->g_head == m->g_embed) embed->here = arena_take(a, embed->bytes);
}

size_t model_stream_bytes(const struct model_config *c, struct dev *dev, enum dtype act, enum model_stream_from from) {
    struct model m = {.cfg = *c, .dev = dev, .act = act, .shard = {.size = 1}};
    struct arena a = {0};
    if (from == MODEL_STREAM_NONE) return 0;
    m.flags = model_stream_flags(from);
    model__params_build(&m);
    model__weights_layout(&m, &a);
    model__stream_create(&m);
    a = (struct arena){0};
    stream_layout(&m, &a);
    model__stream_free(&m);
    model__params_free(&m);
    return a.used;
}

void model_stream_bind(struct model *m, void *block, struct dev_group *g) {
    struct model_stream *const s = m->stream;
    CHECK(s && !s->block && !m->master && !m->cfg.value && sharded(m) == (g != NULL));
    struct arena a = {.base = block, .cap = SIZE_MAX};
    s->block = block;
    s->group = g;
    stream_layout(m, &a);
    for (int64_t i = 0; i + 1 < n_spans(m); i++) place(m, &s->spans[i], s->spans[i].here);
    const struct span *const embed = &s->spans[n_spans(m) - 1];
    if (g) place(m, embed, embed->here);
    m->final_norm = m->g_norm->vec;
    m->embed = m->g_embed->mat;
    m->head = m->g_head->mat;
    if (m->g_head == m->g_embed) m->head.data = embed->here; /* m->embed may be in host memory */
}

void model_stream_begin(struct model *m) {
    if (!m->stream) return;
    m->stream->in[0] = m->stream->in[1] = -1;
    m->stream->tail = false;
}

/* ---- transfers ---- */

/* Each of n spans from s on is on its way. *ticket: of the last gather into this memory, then of this one. */
static int gather(struct model *m, const struct span *s, int64_t n, int64_t *ticket) {
    const struct model_stream *const w = m->stream;
    const int rank = m->shard.rank, size = m->shard.size;
    size_t at[MOST_TAIL * (COMM_MOST_RANKS + 1)];
    TRY(dev_group_reuse(w->group, *ticket)); /* this rank's bytes there have been read */
    for (int64_t i = 0; i < n; i++) {
        TRY(dev_copy(m->dev, s[i].here + s[i].cut[rank], s[i].from, share_bytes(&s[i], rank)));
        for (int r = 0; r <= size; r++) at[i * (size + 1) + r] = (size_t)(s[i].here - w->block) + s[i].cut[r];
    }
    return dev_group_gather_begin(w->group, w->block, at, n, ticket);
}

static int bring_layer(struct model *m, int64_t l) {
    struct model_stream *const s = m->stream;
    const int64_t b = l % 2;
    if (s->in[b] == l) return 0;
    s->in[b] = l;
    if (s->group) return gather(m, &s->spans[l], 1, &s->ticket[b]);
    return dev_fetch(m->dev, (int)b, s->spans[l].here, s->spans[l].from, s->spans[l].bytes);
}

static int bring_tail(struct model *m) {
    struct model_stream *const s = m->stream;
    const struct span *const tail = s->spans + m->cfg.n_layers;
    if (s->tail) return 0;
    s->tail = true;
    if (s->group) {
        TRY(gather(m, tail, s->n_tail, &s->tail_ticket));
        return dev_group_gather_end(s->group); /* the embedding is read first */
    }
    for (int64_t i = 0; i < s->n_tail; i++)
        if (tail[i].here) TRY(dev_fetch(m->dev, TAIL_COPY_STREAM, tail[i].here, tail[i].from, tail[i].bytes));
    return 0;
}

int model__stream_start(struct model *m) {
    if (!m->stream) return 0;
    TRY(bring_layer(m, 0));
    return bring_tail(m);
}

int model_stream_layer(struct model *m, int64_t l, int64_t next) {
    struct model_stream *const s = m->stream;
    if (!s) return 0;
    TRY(bring_layer(m, l));
    TRY(s->group ? dev_group_gather_end(s->group) : dev_copy_stream_wait(m->dev, (int)(l % 2)));
    return next >= 0 && next < m->cfg.n_layers ? bring_layer(m, next) : 0;
}

int model__stream_head(struct model *m) {
    return m->stream && !m->stream->group ? dev_copy_stream_wait(m->dev, TAIL_COPY_STREAM) : 0;
}

int model_stream_idle(struct model *m) {
    TRY(model__stream_start(m));
    for (int64_t l = 0; l < m->cfg.n_layers; l++) TRY(model_stream_layer(m, l, l + 1));
    return model__stream_head(m);
}
