/* weight_streaming.c - a forward pass with weights in host memory: two layers of them are on the device at
 * a time, the next one is prefetched while one is computed.
 *
 * For a reference model, which is read once a micro-batch and never written. The head and the last norm
 * stay on the device for a pass; the embedding is read from host memory, as a pass reads few of its rows.
 * Knows nothing of the arithmetic: groups point into the buffers, so the forward is the one of forward.c.
 * Invariant: layer l is read from buffer l % 2, after its copy stream has brought it. */
#include "model/weight_streaming.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "model/files/load.h"
#include "model/model_int.h"

#include <stdlib.h>

enum { TAIL_COPY_STREAM = 2 };

/* A part of the block of weights, and where it is read. */
struct span {
    char *host, *here;
    size_t bytes;
};
struct model_stream {
    struct span *layers; /* (n_layers); layer l and l + 2 are read in one place */
    struct span tail[2]; /* final norm and head; the embedding where it is the head */
    bool whole;          /* the copy of the tail is enqueued */
};

static const void *group_data(const struct model_group *g) { return g->k ? g->mat.data : g->vec.data; }
static size_t group_bytes(const struct model *m, const struct model_group *g) {
    return g->k ? dev_weight_bytes(m->dev, g->mat.dt, g->n, g->k) : (size_t)g->n * dtype_size(g->vec.dt);
}

/* From one group to another, both included: neighbours in the block. base: it, NULL while measuring. */
static struct span span_of(const struct model *m, const struct model_group *first, const struct model_group *last) {
    struct arena a = {0};
    struct span s = {.host = (char *)(uintptr_t)group_data(first)};
    for (const struct model_group *g = first; g <= last; g++) arena_take(&a, group_bytes(m, g));
    s.bytes = a.used;
    return s;
}

/* The groups of layer l are those between two neighbours' attn_norm. */
static struct span layer_span(const struct model *m, int64_t l) {
    const struct model_group *end = l + 1 < m->cfg.n_layers ? m->layers[l + 1].attn_norm : m->g_norm;
    return span_of(m, m->layers[l].attn_norm, end - 1);
}

static void stream_layout(struct model_stream *s, const struct model *m, struct arena *a) {
    size_t longest = 0;
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        s->layers[l] = layer_span(m, l);
        if (s->layers[l].bytes > longest) longest = s->layers[l].bytes;
    }
    char *buffer[2];
    for (int i = 0; i < 2; i++) buffer[i] = arena_take(a, longest);
    for (int64_t l = 0; l < m->cfg.n_layers; l++) s->layers[l].here = buffer[l % 2];
    s->tail[0] = span_of(m, m->g_norm, &m->groups[m->n_groups - 1]);
    if (m->g_head == m->g_embed) s->tail[1] = span_of(m, m->g_embed, m->g_embed);
    for (int i = 0; i < 2; i++) s->tail[i].here = arena_take(a, s->tail[i].bytes);
}

static struct model_stream *stream_new(const struct model *m) {
    struct model_stream *s = xcalloc(1, sizeof *s);
    s->layers = xcalloc((size_t)m->cfg.n_layers, sizeof *s->layers);
    return s;
}

void model__stream_free(struct model *m) {
    if (!m->stream) return;
    free(m->stream->layers);
    free(m->stream);
    m->stream = NULL;
}

size_t model_stream_bytes(const struct model_config *c, struct dev *dev, enum dtype act) {
    struct model m = {.cfg = *c, .dev = dev, .act = act};
    struct arena a = {0};
    model__params_build(&m);
    model__weights_layout(&m, &a);
    a = (struct arena){0};
    m.stream = stream_new(&m);
    stream_layout(m.stream, &m, &a);
    model__stream_free(&m);
    model__params_free(&m);
    return a.used;
}

/* What points into the span on the host points to where it is read. */
static void turn(struct model *m, const struct span *s, const struct model_group *first, const struct model_group *last) {
    for (struct model_group *g = &m->groups[first - m->groups]; g <= last; g++) {
        void **data = g->k ? &g->mat.data : &g->vec.data;
        *data = s->here + ((char *)*data - s->host);
    }
}

void model_stream_bind(struct model *m, void *block) {
    CHECK(m->flags & MODEL_HOST_WEIGHTS && !m->stream && !m->master && !m->cfg.value);
    struct arena a = {.base = block, .cap = model_stream_bytes(&m->cfg, m->dev, m->act)};
    struct model_stream *s = stream_new(m);
    stream_layout(s, m, &a);
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        const struct model_group *end = l + 1 < m->cfg.n_layers ? m->layers[l + 1].attn_norm : m->g_norm;
        turn(m, &s->layers[l], m->layers[l].attn_norm, end - 1);
    }
    turn(m, &s->tail[0], m->g_norm, &m->groups[m->n_groups - 1]);
    m->final_norm = m->g_norm->vec;
    m->head = m->g_head->mat;
    if (m->g_head == m->g_embed) m->head.data = s->tail[1].here; /* m->embed stays in host memory */
    m->stream = s;
}

void model_stream_begin(struct model *m) {
    if (m->stream) m->stream->whole = false;
}

static int fetch(struct model *m, const struct span *s, int stream) {
    return dev_fetch(m->dev, stream, s->here, s->host, s->bytes);
}

int model__stream_start(struct model *m) {
    struct model_stream *s = m->stream;
    if (!s) return 0;
    for (int64_t l = 0; l < 2 && l < m->cfg.n_layers; l++) TRY(fetch(m, &s->layers[l], (int)l));
    if (s->whole) return 0;
    for (int i = 0; i < 2; i++) TRY(fetch(m, &s->tail[i], TAIL_COPY_STREAM));
    s->whole = true;
    return 0;
}

int model__stream_layer(struct model *m, int64_t l) { return m->stream ? dev_copy_stream_wait(m->dev, (int)(l % 2)) : 0; }

int model__stream_done(struct model *m, int64_t l) {
    struct model_stream *s = m->stream;
    if (!s) return 0;
    if (l + 2 < m->cfg.n_layers) return fetch(m, &s->layers[l + 2], (int)(l % 2));
    return l + 1 == m->cfg.n_layers ? dev_copy_stream_wait(m->dev, TAIL_COPY_STREAM) : 0;
}
