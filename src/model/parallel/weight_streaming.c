/* weight_streaming.c - passes with weights that are in host memory, or sharded over ranks: two layers of them are on the device
 * at a time, the next one is prefetched while one is computed; and sharded weights that are gathered for a while.
 *
 * The unit of a transfer is a span: a layer, the MTP layer, the final norm, the head, the embedding. All but layers stay on the
 * device for a phase. The embedding is read from host memory where it is there, as a pass reads few of its rows; of a sharded
 * model it is gathered. Knows nothing of the arithmetic: groups point into the buffers, so the passes are those of forward.c and
 * backward.c.
 * Where spans are arrays in the master's order, a rank's share is what it owns of the master (parameter_segments.h); else a run
 * of bytes. Where ranks have experts (expert_dispatch.h) each group of those is a span of its own, of which a rank's share is its
 * experts: passes read them where they are, and they are gathered only with the whole model, or for a split one. A value head, of
 * one row, is whole on each rank, behind the shares: with an adapter it is trained and is no part of what is frozen.
 * Invariant: layer l is read from buffer l % 2, after its transfer, and all ranks request the same spans in the same order. */
#include "model/parallel/weight_streaming.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "comm/comm.h"
#include "model/files/load.h"
#include "model/model_int.h"
#include "model/parallel/parameter_segments.h"

#include <stdlib.h>
#include <string.h>

enum { TAIL_COPY_STREAM = 2, MOST_TAIL = 4 };

/* Groups that are neighbours in the block of weights. */
struct span {
    struct model_group *first, *last;
    size_t bytes;
    char *from;     /* in host memory; of a sharded model this rank's share */
    bool experts;   /* of which passes read this rank's share alone */
    int runs;       /* sharded: of bytes that a rank has, one or two */
    size_t *cut[2]; /* (size + 1) of each run: rank r has bytes cut[r]..cut[r + 1] */
};
struct model_stream {
    struct collective *group; /* NULL: all is in host memory */
    struct span *spans;       /* those of layers; then n_tail: MTP layer, final norm, head unless it is tied, embedding */
    int64_t *layer;           /* (n_layers + 1) where the spans of layer l begin: without its experts one or two, then theirs */
    int64_t n_tail;
    bool with_experts; /* passes gather the experts too */
    size_t room_bytes; /* of room, at least */
    char *block;       /* from model_stream_bind */
    char **here;       /* (spans) where each is read; NULL: in host memory */
    char **whole;      /* (spans) where each is while all are gathered */
    bool gathered;     /* they are */
    bool flat;         /* a share is what a rank owns of the master */
    char *room;        /* for what expert_dispatch.c exchanges; passes with experts have these there */
    int64_t in[2];     /* the layer in each buffer, or on its way there; -1: none */
    int64_t ticket[2]; /* of its gather */
    bool tail;         /* it is there, or on its way */
    int64_t tail_ticket;
    size_t *cuts, *at; /* of all spans; and the ranges of a gather */
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

static bool sharded(const struct model *m) { return m->flags & MODEL_SHARDED_WEIGHTS; }

static void **group_data(struct model_group *g) { return g->k ? &g->mat.data : &g->vec.data; }

/* The groups of a span lie one after the other from base on (NULL: measures). Returns its bytes. */
static size_t place(struct model *m, const struct span *s, char *base) {
    struct arena a = {.base = base, .cap = s->bytes};
    for (struct model_group *g = s->first; g <= s->last; g++) {
        if (m->quant && model__adaptable(g)) {
            model__quant_place(m, g, &a);
            continue;
        }
        void *const at = arena_take(&a, model__group_bytes(m, g));
        if (base) *group_data(g) = at;
    }
    return a.used;
}

static struct span span_of(struct model *m, struct model_group *first, struct model_group *last) {
    struct span s = {.first = first, .last = last, .runs = 1};
    s.bytes = place(m, &s, NULL);
    s.from = *group_data(first);
    return s;
}

static struct model_range elements(const struct span *s) {
    return (struct model_range){s->first->offset, s->last->offset + model__group_count(s->last)};
}

/* The groups of all spans are arrays in the master's order, without padding. */
static bool spans_are_flat(const struct model *m, const struct span *s, int64_t n) {
    bool flat = m->dev->ops->caps.plain_weights && !m->quant;
    for (int64_t i = 0; i < n; i++)
        for (const struct model_group *g = s[i].first; g <= s[i].last; g++)
            flat = flat && (size_t)(g->offset - s[i].first->offset) * dtype_size(m->act) % ARENA_ALIGN == 0;
    return flat;
}

/* Rank r has a run of whole ARENA_ALIGN bytes, about one in `size`. */
static void cut_bytes(struct span *s, int size) {
    for (int r = 0; r <= size; r++) {
        const size_t at = (size_t)((__int128)s->bytes * (unsigned)r / (unsigned)size);
        s->cut[0][r] = r < size ? at / ARENA_ALIGN * ARENA_ALIGN : s->bytes;
    }
}

static size_t up(size_t n) { return (n + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN; }

/* Bytes of the first n experts of a group in run `run` of its span. */
static size_t experts_end(const struct model *m, const struct span *s, int64_t n, int run) {
    struct model_group g = *s->first;
    g.n_params = n * (g.n_params / g.count);
    g.n = n * (g.n / g.count);
    g.count = n;
    if (n == 0) return 0;
    if (!m->quant || !model__adaptable(&g)) return model__group_bytes(m, &g);
    if (s->runs == 2 && run == 0) return (size_t)model__quant_codes(m->quant->kind, g.n * g.k);
    if (s->runs == 2) return (size_t)model__quant_scales(m->quant->kind, g.n, g.k) * sizeof(float);
    struct arena a = {0};
    model__quant_measure(m, &g, &a);
    return n < s->first->count ? up(a.used) : a.used; /* of the last one without padding behind it */
}

/* Whole experts. Of a quantised group all codes may come first, and then all scales. */
static void cut_experts(const struct model *m, struct span *s) {
    const int64_t n = s->first->count;
    const int size = m->shard.size;
    s->runs = m->quant && model__adaptable(s->first) && model__quant_one_part(m, s->first) ? 2 : 1;
    for (int run = 0; run < s->runs; run++)
        for (int r = 0; r <= size; r++)
            s->cut[run][r] =
                (run ? up(experts_end(m, s, n, 0)) : 0) + experts_end(m, s, r < size ? model__ep_experts(n, r, size).lo : n, run);
}

/* What a rank owns of the master. */
static void cut_elements(const struct model *m, struct span *s) {
    const struct model_range all = elements(s);
    struct model_range *part = xmalloc((size_t)m->shard.size * sizeof *part);
    model_cut(m, all, m->shard, part);
    for (int r = 0; r < m->shard.size; r++) s->cut[0][r] = (size_t)(part[r].lo - all.lo) * dtype_size(m->act);
    s->cut[0][m->shard.size] = s->bytes;
    free(part);
}

static int64_t n_layer_spans(const struct model *m) { return m->stream->layer[m->cfg.n_layers]; }
static int64_t n_spans(const struct model *m) { return n_layer_spans(m) + m->stream->n_tail; }
static size_t run_bytes(const struct span *s, int run, int rank) { return s->cut[run][rank + 1] - s->cut[run][rank]; }
static size_t share_bytes(const struct span *s, int rank) {
    return s->runs == 2 ? up(run_bytes(s, 0, rank)) + run_bytes(s, 1, rank) : run_bytes(s, 0, rank);
}
/* Where run `run` of a share is. */
static char *run_of(const struct span *s, int run, int rank) { return s->from + (run ? up(run_bytes(s, 0, rank)) : 0); }

/* The spans of layer l. */
static int64_t add_layer(struct model *m, int64_t l, int64_t n) {
    struct span *const spans = m->stream->spans;
    const struct model_layer *const y = &m->layers[l];
    if (!m->shard.experts || !y->router) {
        spans[n++] = span_of(m, y->first, y->last);
        return n;
    }
    struct model_group *const last = y->expert_down->bias ? y->expert_down->bias : y->expert_down;
    spans[n++] = span_of(m, y->first, y->expert_gate_up - 1);
    if (last < y->last) spans[n++] = span_of(m, last + 1, y->last);
    for (struct model_group *g = y->expert_gate_up; g <= last; g++) {
        spans[n] = span_of(m, g, g);
        spans[n++].experts = true;
    }
    return n;
}

void model__stream_create(struct model *m) {
    const int64_t layers = m->cfg.n_layers;
    const int size = m->shard.size;
    struct model_stream *s = m->stream = xcalloc(1, sizeof *s);
    s->spans = xcalloc((size_t)(layers * MODEL_LAYER_BUCKETS) + MOST_TAIL, sizeof *s->spans);
    s->layer = xcalloc((size_t)layers + 1, sizeof *s->layer);
    for (int64_t l = 0; l < layers; l++) s->layer[l + 1] = add_layer(m, l, s->layer[l]);
    struct span *const tail = s->spans + s->layer[layers];
    if (m->mtp.first) tail[s->n_tail++] = span_of(m, m->mtp.first, m->mtp.last);
    tail[s->n_tail++] = span_of(m, m->g_norm, m->g_norm);
    if (m->g_head != m->g_embed && !m->cfg.value) tail[s->n_tail++] = span_of(m, m->g_head, m->g_head);
    tail[s->n_tail++] = span_of(m, m->g_embed, m->g_embed);
    s->here = xcalloc((size_t)n_spans(m), sizeof *s->here);
    s->whole = xcalloc((size_t)n_spans(m), sizeof *s->whole);
    s->in[0] = s->in[1] = -1;
    if (!sharded(m)) return;
    CHECK(size > 0);
    s->flat = spans_are_flat(m, s->spans, n_spans(m));
    s->cuts = xcalloc((size_t)(2 * n_spans(m) * (size + 1)), sizeof *s->cuts);
    s->at = xcalloc((size_t)(2 * n_spans(m) * (size + 1)), sizeof *s->at);
    for (int64_t i = 0; i < n_spans(m); i++) {
        for (int run = 0; run < 2; run++) s->spans[i].cut[run] = s->cuts + (2 * i + run) * (size + 1);
        if (s->flat) cut_elements(m, &s->spans[i]);
        else if (s->spans[i].experts) cut_experts(m, &s->spans[i]);
        else cut_bytes(&s->spans[i], size);
    }
}

void model__stream_free(struct model *m) {
    if (!m->stream) return;
    free(m->stream->spans);
    free(m->stream->layer);
    free(m->stream->here);
    free(m->stream->whole);
    free(m->stream->cuts);
    free(m->stream->at);
    free(m->stream);
    m->stream = NULL;
}

/* Of a value head, which is whole on each rank of a sharded model; else none. */
static struct model_range head_groups(const struct model *m) {
    const int64_t head = m->g_head - m->groups;
    return m->cfg.value && sharded(m) ? (struct model_range){head, m->n_groups} : (struct model_range){0};
}

void model__shares_layout(struct model *m, int rank, struct arena *a) {
    for (int64_t i = 0; i < n_spans(m); i++) m->stream->spans[i].from = arena_take(a, share_bytes(&m->stream->spans[i], rank));
    const struct model_range head = head_groups(m);
    for (int64_t i = head.lo; i < head.hi; i++) *group_data(&m->groups[i]) = arena_take(a, model__group_bytes(m, &m->groups[i]));
    if (m->quant) model__quant_scratch(m, a);
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
    if (i == n_spans(m)) *groups = head_groups(m);
    if (i >= n_spans(m)) return i == n_spans(m) && groups->lo < groups->hi;
    const struct span *s = &m->stream->spans[i];
    place(m, s, at ? at : m->stream->here[i]);
    *groups = (struct model_range){s->first - m->groups, s->last - m->groups + 1};
    return true;
}

int model__span_keep(struct model *m, int64_t i, const void *at) {
    if (i == n_spans(m)) return 0; /* it is there */
    const struct span *s = &m->stream->spans[i];
    const char *const from = at ? at : m->stream->here[i];
    const int rank = m->shard.rank;
    for (int run = 0; run < s->runs; run++)
        TRY(dev_copy(m->dev, run_of(s, run, rank), from + s->cut[run][rank], run_bytes(s, run, rank)));
    return 0;
}

/* ---- new weights ---- */

static int64_t find_span(const struct model *m, int64_t element) {
    int64_t i = 0;
    while (element < elements(&m->stream->spans[i]).lo || element >= elements(&m->stream->spans[i]).hi) i++;
    return i;
}

bool model_share_is_owned(const struct model *m) { return m->stream->flat; }
bool model_share_is_whole(const struct model *m, struct model_range r) { return m->cfg.value && r.lo >= m->g_head->offset; }

void *model_share(struct model *m, struct model_range own) {
    const struct span *s = &m->stream->spans[find_span(m, own.lo)];
    CHECK(m->stream->flat && (size_t)(own.hi - own.lo) * dtype_size(m->act) == share_bytes(s, m->shard.rank));
    return s->from;
}

/* The experts that this rank has of a group, from their master. */
static int experts_from(struct model *m, const struct span *s, float *own) {
    struct model_group g = model__ep_part(s->first, m->shard.rank, m->shard.size);
    if (g.count == 0) return 0;
    if (g.k) g.mat.data = s->from;
    else g.vec = tensor_1d(s->from, m->act, g.n);
    return model__group_from(m, &g, own);
}

int model_share_from(struct model *m, struct model_range all, float *flat) {
    const int64_t i = model_share_is_whole(m, all) ? n_spans(m) : find_span(m, all.lo);
    struct model_range groups = {0};
    if (i < n_spans(m) && m->stream->spans[i].experts) return experts_from(m, &m->stream->spans[i], flat);
    CHECK(model__span_open(m, i, NULL, &groups));
    for (int64_t k = groups.lo; k < groups.hi; k++) TRY(model__group_from(m, &m->groups[k], flat + (m->groups[k].offset - all.lo)));
    return model__span_keep(m, i, NULL);
}

/* ---- the room on the device ---- */

/* Places the spans of a layer, without its experts or these alone, one after the other; where they end. */
static size_t layer_layout(const struct model *m, int64_t l, bool experts, char *base) {
    const struct model_stream *const s = m->stream;
    struct arena a = {.base = base, .cap = SIZE_MAX};
    for (int64_t i = s->layer[l]; i < s->layer[l + 1]; i++)
        if (s->spans[i].experts == experts) s->here[i] = arena_take(&a, s->spans[i].bytes);
    return a.used;
}

static void stream_layout(const struct model *m, struct arena *a) {
    const struct span *const spans = m->stream->spans;
    const int64_t layers = m->cfg.n_layers, embed = n_spans(m) - 1;
    char **const here = m->stream->here;
    size_t longest = 0, experts = m->stream->room_bytes;
    char *buffer[2];
    for (int64_t l = 0; l < layers; l++) {
        const size_t n = layer_layout(m, l, false, NULL), e = layer_layout(m, l, true, NULL);
        longest = n > longest ? n : longest;
        experts = e > experts ? e : experts;
    }
    for (int i = 0; i < 2; i++) buffer[i] = arena_take(a, longest);
    m->stream->room = arena_take(a, experts);
    for (int64_t l = 0; l < layers; l++) {
        layer_layout(m, l, false, buffer[l % 2]);
        layer_layout(m, l, true, m->stream->room);
    }
    for (int64_t i = n_layer_spans(m); i < embed; i++) here[i] = arena_take(a, spans[i].bytes);
    if (sharded(m) || m->g_head == m->g_embed) here[embed] = arena_take(a, spans[embed].bytes);
}

static void whole_layout(const struct model *m, struct arena *a) {
    for (int64_t i = 0; i < n_spans(m); i++) m->stream->whole[i] = arena_take(a, m->stream->spans[i].bytes);
}

static size_t measure(const struct model_stream_shape *s, void (*layout)(const struct model *m, struct arena *a)) {
    struct model m = {.cfg = *s->config, .dev = s->dev, .act = s->act, .shard = {.size = 1, .experts = s->experts}};
    struct arena a = {0};
    m.flags = model_stream_flags(s->from);
    model__params_build(&m);
    model__quant_create(&m, s->quant);
    model__weights_layout(&m, &a);
    model__stream_create(&m);
    m.stream->room_bytes = s->room;
    a = (struct arena){0};
    layout(&m, &a);
    model__stream_free(&m);
    model__params_free(&m);
    return a.used;
}

size_t model_stream_bytes(const struct model_stream_shape *s) {
    return s->from == MODEL_STREAM_NONE ? 0 : measure(s, stream_layout);
}

size_t model_gathered_bytes(const struct model_stream_shape *s) { return measure(s, whole_layout); }

struct model_stream_shape model_stream_shape(const struct model *m, enum model_stream_from from, size_t room) {
    const enum quant_kind quant = m->quant ? m->quant->kind : QUANT_NONE;
    return (struct model_stream_shape){&m->cfg, m->dev, m->act, quant, from, m->shard.experts, room};
}

/* The experts that this rank has are read where they are. */
static void place_own(struct model *m, const struct span *s) {
    struct model_group own = model__ep_part(s->first, m->shard.rank, m->shard.size);
    struct arena a = {.base = s->from, .cap = share_bytes(s, m->shard.rank)};
    if (!m->quant || !model__adaptable(&own)) *group_data(s->first) = s->from;
    else if (own.count > 0) model__quant_place(m, &own, &a);
}

/* All groups are read at these places. own: but for experts. */
static void read_at(struct model *m, char *const *places, bool own) {
    const int64_t embed = n_spans(m) - 1;
    for (int64_t i = 0; i < n_spans(m); i++) {
        const struct span *const s = &m->stream->spans[i];
        if (own && s->experts) place_own(m, s);
        else if (i < embed || sharded(m)) place(m, s, places[i]);
    }
    m->final_norm = m->g_norm->vec;
    m->embed = m->g_embed->mat;
    m->head = m->g_head->mat;
    if (m->g_head == m->g_embed) m->head.data = places[embed]; /* m->embed may be in host memory */
}

void model_stream_bind(struct model *m, void *block, struct collective *g, size_t room) {
    struct model_stream *const s = m->stream;
    CHECK(s && !s->block && sharded(m) == (g != NULL) && (g || !m->master));
    struct arena a = {.base = block, .cap = SIZE_MAX};
    s->block = block;
    s->group = g;
    s->room_bytes = room;
    stream_layout(m, &a);
    read_at(m, s->here, true);
}

bool model_stream_is_bound(const struct model *m) { return m->stream && m->stream->block; }

void model_stream_begin(struct model *m) {
    struct model_stream *const s = m->stream;
    if (!s) return;
    s->in[0] = s->in[1] = -1;
    s->tail = s->gathered = s->with_experts = false;
    read_at(m, s->here, true);
}

void model__stream_with_experts(struct model *m) {
    m->stream->with_experts = m->shard.experts;
    read_at(m, m->stream->here, false);
}

void *model__stream_room(const struct model *m) { return m->stream->room; }

bool model__dispatches(const struct model *m, int64_t l) {
    return m->dispatch && l < m->cfg.n_layers && m->layers[l].router && !m->stream->gathered && !m->stream->with_experts;
}

int model_stream_end(struct model *m) {
    const struct model_stream *const s = m->stream;
    if (!s || !s->group) return 0;
    int64_t last = s->tail_ticket;
    for (int b = 0; b < 2; b++) last = s->ticket[b] > last ? s->ticket[b] : last;
    return collective_reuse(s->group, last);
}

/* ---- transfers ---- */

/* n spans from the first on are on their way to their places behind base. *ticket: of the last gather there, then of this. */
static int gather(struct model *m, int64_t first, int64_t n, char *base, char *const *places, int64_t *ticket) {
    struct model_stream *const s = m->stream;
    const int rank = m->shard.rank, size = m->shard.size;
    const bool experts = s->with_experts || places == s->whole;
    int64_t parts = 0;
    TRY(collective_reuse(s->group, *ticket)); /* this rank's bytes there have been read */
    for (int64_t i = first; i < first + n; i++) {
        const struct span *const x = &s->spans[i];
        for (int run = 0; run < x->runs && (experts || !x->experts); run++, parts++) {
            TRY(dev_copy(m->dev, places[i] + x->cut[run][rank], run_of(x, run, rank), run_bytes(x, run, rank)));
            for (int r = 0; r <= size; r++) s->at[parts * (size + 1) + r] = (size_t)(places[i] - base) + x->cut[run][r];
        }
    }
    return collective_gather_begin(s->group, base, s->at, parts, ticket);
}

int model_gather(struct model *m, void *block) {
    struct model_stream *const s = m->stream;
    struct arena a = {.base = block, .cap = SIZE_MAX};
    int64_t ticket = 0;
    whole_layout(m, &a);
    TRY(gather(m, 0, n_spans(m), block, s->whole, &ticket));
    TRY(collective_gather_end(s->group));
    TRY(collective_reuse(s->group, ticket)); /* others use the memory next */
    s->gathered = true;
    read_at(m, s->whole, false);
    return 0;
}

static int bring_layer(struct model *m, int64_t l) {
    struct model_stream *const s = m->stream;
    const int64_t b = l % 2;
    if (s->in[b] == l) return 0;
    s->in[b] = l;
    const int64_t first = s->layer[l];
    if (s->group) return gather(m, first, s->layer[l + 1] - first, s->block, s->here, &s->ticket[b]);
    return dev_fetch(m->dev, (int)b, s->here[first], s->spans[first].from, s->spans[first].bytes);
}

static int bring_tail(struct model *m) {
    struct model_stream *const s = m->stream;
    if (s->tail) return 0;
    s->tail = true;
    if (s->group) {
        TRY(gather(m, n_layer_spans(m), s->n_tail, s->block, s->here, &s->tail_ticket));
        return collective_gather_end(s->group); /* the embedding is read first */
    }
    for (int64_t i = n_layer_spans(m); i < n_spans(m); i++)
        if (s->here[i]) TRY(dev_fetch(m->dev, TAIL_COPY_STREAM, s->here[i], s->spans[i].from, s->spans[i].bytes));
    return 0;
}

int model__stream_start(struct model *m) {
    if (!m->stream || m->stream->gathered) return 0;
    TRY(bring_layer(m, 0));
    return bring_tail(m);
}

int model_stream_layer(struct model *m, int64_t l, int64_t next) {
    struct model_stream *const s = m->stream;
    if (!s || s->gathered) return 0;
    TRY(bring_layer(m, l));
    TRY(s->group ? collective_gather_end(s->group) : dev_copy_stream_wait(m->dev, (int)(l % 2)));
    const bool prefetch = next >= 0 && next < m->cfg.n_layers && !s->with_experts; /* of experts there is room for one layer */
    return prefetch ? bring_layer(m, next) : 0;
}

int model__stream_head(struct model *m) {
    return m->stream && !m->stream->group ? dev_copy_stream_wait(m->dev, TAIL_COPY_STREAM) : 0;
}

/* ---- all weights in spans ---- */

int64_t model_spans(const struct model *m) {
    CHECK(!m->mtp.first && !m->quant && !m->shard.experts);
    return m->cfg.n_layers + 2 + (m->g_head != m->g_embed);
}

/* Its groups: *first..*last. */
static void span_groups(const struct model *m, int64_t i, struct model_group **first, struct model_group **last) {
    struct model_group *const tail[] = {m->g_embed, m->g_norm, m->g_head};
    const bool layer = i < m->cfg.n_layers;
    *first = layer ? m->layers[i].first : tail[i - m->cfg.n_layers];
    *last = layer ? m->layers[i].last : *first;
}

static struct span whole_span(struct model *m, int64_t i) {
    struct model_group *first, *last;
    span_groups(m, i, &first, &last);
    return span_of(m, first, last);
}

/* Of a sharded model, as its shares are. */
static const struct span *shared_span(const struct model *m, int64_t i) {
    struct model_group *first, *last;
    span_groups(m, i, &first, &last);
    return &m->stream->spans[find_span(m, first->offset)];
}

size_t model_span_bytes(struct model *m, int64_t i) { return whole_span(m, i).bytes; }

static void longest_span(const struct model *m, struct arena *a) {
    size_t most = 0;
    for (int64_t i = 0; i < n_spans(m); i++) most = m->stream->spans[i].bytes > most ? m->stream->spans[i].bytes : most;
    arena_take(a, most);
}
size_t model_span_most(const struct model_stream_shape *s) { return measure(s, longest_span); }

void model_span_cut(struct model *m, int64_t i, int ranks, size_t *cut) {
    struct span own = whole_span(m, i);
    if (m->stream && sharded(m)) {
        CHECK(m->shard.size == ranks);
        memcpy(cut, shared_span(m, i)->cut[0], (size_t)(ranks + 1) * sizeof *cut);
        return;
    }
    own.cut[0] = cut;
    cut_bytes(&own, ranks);
}

int model_span_give(struct model *m, int64_t i, int rank, int ranks, void *room) {
    size_t *const cut = xcalloc((size_t)ranks + 1, sizeof *cut);
    const bool shares = m->stream && sharded(m);
    model_span_cut(m, i, ranks, cut);
    const char *const from = shares ? shared_span(m, i)->from : whole_span(m, i).from + cut[rank];
    const int rc = dev_copy(m->dev, (char *)room + cut[rank], from, cut[rank + 1] - cut[rank]);
    free(cut);
    return rc;
}
