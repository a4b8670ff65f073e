/* decoder.c - the real decoder behind struct engine_model: the KV cache on the device, one model_forward a
 * step, then head and sampler over the rows to sample; and multi-step decode bursts, as CUDA graphs where
 * there are such (decode_graph.c).  Schedules nothing.
 *
 * Invariant: it calls the same model_forward and the same head arithmetic as training, so log-probs come
 * out bit-equal. */
#include "engine/engine.h"

#include "engine/decode_graph.h"
#include "engine/draft_decoder.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "model/forward.h"
#include "model/parallel/tensor_parallel.h"

#include <stdlib.h>
#include <string.h>

enum {
    OUT_BLOCK = 128,                               /* rows of logits held at a time: 128 x 152k x 4 B = 78 MB */
    MAX_BURST = 16,                                /* steps, where the device has CUDA graphs */
    BURST_PARTS = 4,                               /* in which results are copied out */
    RESULT_COPY_STREAM = 3,                        /* of the first part; the others' follow */
    MAX_STOP = 32,                                 /* end tokens of a row */
    MOST_KV_BLOCKS = INT32_MAX / KV_BLOCK_LEN - 1, /* a slot is an int32 */
};
_Static_assert(RESULT_COPY_STREAM + BURST_PARTS <= DEV_COPY_STREAMS, "each part has a stream of its own");

struct decoder {
    struct model *model;
    struct model_acts *acts;
    struct model_kv kv;
    struct kv *layers;
    struct model_state *states; /* (n_layers) */
    int64_t n_kv_blocks, n_states, max_rows, max_seqs, max_blocks, max_burst, out_block;
    int64_t requested_rows, requested_seqs; /* the limits as the caller has them */
    /* device */
    void *owned_block;
    size_t block_bytes;
    void *acts_block;
    int32_t *ids, *pos, *slots, *q_start, *pos0, *block_table, *out_row, *id;
    int32_t *state; /* (decode_graph_rows(max_seqs)), of a model with states */
    float *logp, *logp_kept, *logits;
    void *hidden;
    uint8_t *seen;
    /* device, of bursts: n is decode_graph_rows(max_seqs) */
    struct decode_row *rows;
    int32_t *stop, *step, *iota;     /* (n, MAX_STOP), (1), (n + 1): 0, 1, 2, ... */
    int32_t *burst_table, *burst_id; /* (n, max_blocks), (max_burst, n) */
    float *burst_logp, *burst_kept;  /* (max_burst, n) */
    struct decode_graphs graphs;     /* of burst_step */
    struct draft_decoder draft;
    int32_t *host; /* as uploaded: the largest of the arrays above */
    struct decode_row *host_rows;
    int32_t *sent_stop;               /* what `stop` holds of n_sent_stop rows; `iota` holds n_sent_iota */
    int64_t n_sent_stop, n_sent_iota; /* 0 after a step: it may be the first since others had the memory */
    /* the running burst: its rows and steps, and its results, (steps, rows), in pinned host memory */
    int64_t burst_rows, burst_steps;
    void *results_block;
    size_t results_bytes;
    int32_t *host_id;
    float *host_logp, *host_kept;
    float *host_logits; /* of a row whose most probable tokens are wanted; NULL: none yet */
};

/* Of a block, in all layers. */
static size_t block_bytes(const struct model_config *c, enum dtype act) {
    return (size_t)(model_kv_sides(c) * (model_attention_layers(c) + c->mtp) * c->n_kv_heads * c->head_dim * KV_BLOCK_LEN) *
           dtype_size(act);
}

static int64_t max_blocks_of(const struct decoder_args *a) { return (a->max_len + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN; }

int64_t decoder_states(const struct model_config *c, const struct decoder_args *a) {
    const int64_t most = a->max_seqs < a->max_rows ? a->max_seqs : a->max_rows, n = 2 * a->n_kv_blocks / max_blocks_of(a);
    if (model_attention_layers(c) == c->n_layers) return 0;
    if (a->n_states > 0) return a->n_states < most ? a->n_states : most;
    return n < 1 ? 1 : n < most ? n : most;
}

/* The states of a layer with a gated delta net, from which `back` rows can be taken: measures, then binds. */
static struct model_state state_layout(struct arena *m, const struct model_config *c, enum dtype act, int64_t slots, int64_t back) {
    const int64_t hk = c->delta.k_heads, hv = c->delta.v_heads, dk = c->delta.k_dim, dv = c->delta.v_dim, chunk = DEV_DELTA_CHUNK;
    const int64_t channels = model_dim(c, MODEL_DELTA_QKV), inputs = DEV_CONV_TAPS - 1 + back, f = (int64_t)sizeof(float);
    struct model_state s = {.conv = {NULL, act, 3, {slots, inputs, channels, 1}},
                            .delta = {.s = {NULL, DT_F32, 4, {slots, hv, dk, dv}},
                                      .k = {NULL, act, 4, {slots, hk, chunk, dk}},
                                      .r = {NULL, DT_F32, 3, {slots, hk, chunk, 1}},
                                      .e = {NULL, DT_F32, 4, {slots, hv, chunk, dv}},
                                      .g = {NULL, DT_F32, 3, {slots, hv, chunk, 1}}}};
    s.conv.data = arena_take(m, SIZE_OF(slots, inputs, channels, (int64_t)dtype_size(act)));
    s.delta.s.data = arena_take(m, SIZE_OF(slots * hv, dk, dv, f));
    s.delta.k.data = arena_take(m, SIZE_OF(slots * hk, chunk, dk, (int64_t)dtype_size(act)));
    s.delta.r.data = arena_take(m, SIZE_OF(slots, hk, chunk, f));
    s.delta.e.data = arena_take(m, SIZE_OF(slots * hv, chunk, dv, f));
    s.delta.g.data = arena_take(m, SIZE_OF(slots, hv, chunk, f));
    return s;
}

size_t decoder_kv_bytes(const struct model_config *c, enum dtype act, const struct decoder_args *a) {
    struct arena m = {0};
    for (int64_t l = 0; l < c->n_layers; l++)
        if (model_layer_is_delta(c, l)) state_layout(&m, c, act, decoder_states(c, a), a->max_draft);
    return m.used + (size_t)a->n_kv_blocks * block_bytes(c, act);
}

int64_t decoder_kv_blocks_fit(const struct model_config *c, enum dtype act, const struct decoder_args *a, int64_t most,
                              size_t room) {
    struct decoder_args b = *a;
    int64_t fit = 0, over = most + 1; /* these do, and these do not */
    while (over - fit > 1) {
        b.n_kv_blocks = fit + (over - fit) / 2;
        if (decoder_kv_bytes(c, act, &b) <= room) fit = b.n_kv_blocks;
        else over = b.n_kv_blocks;
    }
    return fit;
}

/* Measures, then binds: see arena.h. */
static void decoder_layout(struct decoder *d, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t n_kv_blocks = d->n_kv_blocks + (d->max_burst > 1 || d->draft.most > 0); /* the last one is the dummy block */
    const size_t side = SIZE_OF(c->n_kv_heads, c->head_dim, KV_BLOCK_LEN, n_kv_blocks, (int64_t)dtype_size(act));
    const int64_t slots = d->n_states + (d->max_burst > 1 || d->draft.most > 0); /* the last one: padding rows' */
    for (int64_t l = 0; l < (d->draft.most > 0 ? model_layer_places(c) : c->n_layers); l++) {
        if (l == c->n_layers) continue; /* before the MTP layer */
        if (model_layer_is_delta(c, l)) {
            const struct model_state s = state_layout(m, c, act, slots, d->draft.most);
            if (d->states) d->states[l] = s;
            continue;
        }
        struct tensor t = {NULL, act, 4, {n_kv_blocks, c->n_kv_heads, KV_BLOCK_LEN, c->head_dim}};
        t.data = arena_take(m, side);
        if (d->layers) d->layers[l].k = t;
        if (model_kv_sides(c) == 2) t.data = arena_take(m, side);
        if (d->layers) d->layers[l].v = t;
    }
    const int64_t rows = d->max_rows, seqs = d->max_seqs, out = d->out_block, act_size = (int64_t)dtype_size(act);
    d->ids = arena_take(m, SIZE_OF(rows, 4));
    d->pos = arena_take(m, SIZE_OF(rows, 4));
    d->slots = arena_take(m, SIZE_OF(rows, 4));
    d->q_start = arena_take(m, SIZE_OF(seqs + 1, 4));
    d->pos0 = arena_take(m, SIZE_OF(seqs, 4));
    d->block_table = arena_take(m, SIZE_OF(seqs, d->max_blocks, 4));
    if (d->n_states) d->state = arena_take(m, SIZE_OF(decode_graph_rows(seqs), 4));
    d->out_row = arena_take(m, SIZE_OF(out, 4));
    d->id = arena_take(m, SIZE_OF(out, 4));
    d->logp = arena_take(m, SIZE_OF(out, 4));
    d->logp_kept = arena_take(m, SIZE_OF(out, 4));
    d->hidden = arena_take(m, SIZE_OF(out, c->hidden, act_size));
    d->logits = arena_take(m, SIZE_OF(out, c->vocab, 4));
    d->seen = arena_take(m, SIZE_OF(out, (c->vocab + 7) / 8));
    if (d->max_burst > 1) {
        const int64_t n = decode_graph_rows(d->max_seqs);
        const size_t results = SIZE_OF(n, d->max_burst, 4);
        d->rows = arena_take(m, SIZE_OF(n, (int64_t)sizeof *d->rows));
        d->stop = arena_take(m, SIZE_OF(n, MAX_STOP, 4));
        d->step = arena_take(m, 4);
        d->iota = arena_take(m, SIZE_OF(n + 1, 4));
        d->burst_table = arena_take(m, SIZE_OF(n, d->max_blocks, 4));
        d->burst_id = arena_take(m, results);
        d->burst_logp = arena_take(m, results);
        d->burst_kept = arena_take(m, results);
    }
    draft_layout(&d->draft, m, c, act);
    d->acts_block = arena_take(m, model_acts_bytes(c, act, d->max_rows, MODEL_KEEP_NONE));
}

static void decoder_limits(struct decoder *d, const struct decoder_args *a) {
    d->n_kv_blocks = a->n_kv_blocks;
    d->requested_rows = a->max_rows;
    d->requested_seqs = a->max_seqs;
    d->max_burst = a->max_burst > 1 ? a->max_burst : 1;
    d->max_seqs = a->max_seqs < a->max_rows ? a->max_seqs : a->max_rows;
    d->max_rows = a->max_rows;
    d->max_blocks = max_blocks_of(a);
    d->out_block = d->max_seqs < OUT_BLOCK ? d->max_seqs : OUT_BLOCK;
    draft_limits(&d->draft, a);
    if (d->max_burst > 1) d->out_block = decode_graph_rows(d->max_seqs); /* a CUDA graph samples all its rows at once */
    if (d->out_block < d->draft.rows) d->out_block = d->draft.rows;      /* as a verifying step does */
    if (d->max_rows < d->out_block) d->max_rows = d->out_block;
    d->draft.max_rows = d->max_rows;
    d->draft.max_blocks = d->max_blocks;
    d->draft.dummy = d->n_kv_blocks;
    d->draft.dummy_state = -1;
}

/* Steps of a burst; 1 on devices without CUDA graphs. */
static int64_t device_burst(const struct dev *d) { return dev_has_graphs(d) ? MAX_BURST : 1; }

struct decoder_args decoder_size(const struct dev *d, const struct model_config *c, enum dtype act,
                                 const struct decoder_args *limits, size_t room) {
    struct decoder_args a = *limits;
    a.max_burst = device_burst(d);
    const int64_t each = max_blocks_of(&a);
    const int64_t all = a.max_seqs * each < MOST_KV_BLOCKS ? a.max_seqs * each : MOST_KV_BLOCKS;
    a.n_kv_blocks = decoder_kv_blocks_fit(c, act, &a, all, room);
    if (a.n_kv_blocks < each) a.n_kv_blocks = each;
    return a;
}

struct engine_stop_ids engine_stop_ids(const struct model_config *c, const struct tokenizer *tok) {
    struct engine_stop_ids s = {.n = 0};
    for (int i = 0; i < c->n_eos; i++) s.id[s.n++] = (int32_t)c->eos[i];
    if (tok && tokenizer_eos(tok) >= 0) s.id[s.n++] = tokenizer_eos(tok);
    return s;
}

size_t decoder_bytes(const struct model_config *c, enum dtype act, const struct decoder_args *a) {
    struct decoder d = {0};
    struct arena m = {0};
    decoder_limits(&d, a);
    d.n_states = decoder_states(c, a);
    decoder_layout(&d, &m, c, act);
    return m.used;
}

int64_t decoder_verify_rows(const struct decoder_args *a) {
    struct decoder d = {0};
    decoder_limits(&d, a);
    return d.draft.rows;
}

int64_t decoder_most_rows(const struct decoder_args *a) {
    struct decoder d = {0};
    decoder_limits(&d, a);
    return d.max_rows;
}

int decoder_open(struct decoder **out, const struct decoder_args *a) {
    int rc = 0;
    struct decoder *d = xcalloc(1, sizeof *d);
    d->model = a->model;
    const struct model_config *c = &a->model->cfg;
    decoder_limits(d, a);
    d->n_states = decoder_states(c, a);
    CHECK(d->draft.most == 0 || c->mtp);
    d->layers = xcalloc((size_t)model_layer_places(c), sizeof *d->layers);
    d->kv.layers = d->layers;
    if (d->n_states) d->kv.states = d->states = xcalloc((size_t)c->n_layers, sizeof *d->states);
    struct arena m = {0};
    decoder_layout(d, &m, c, a->model->act);
    d->block_bytes = m.used;
    void *block = a->block;
    if (!block) {
        TRYG(dev_alloc(a->model->dev, d->block_bytes, &d->owned_block), fail);
        block = d->owned_block;
    }
    m = (struct arena){.base = block, .cap = d->block_bytes};
    decoder_layout(d, &m, c, a->model->act);
    TRYG(model_acts_create(&d->acts, a->model, d->max_rows, MODEL_KEEP_NONE, d->acts_block), fail);
    if (d->n_states) d->draft.dummy_state = d->n_states;
    d->draft.hidden = d->hidden;
    d->draft.logits = d->logits;
    draft_open(&d->draft, a->model, d->acts, &d->kv);
    if (d->max_burst > 1) {
        const size_t n = (size_t)decode_graph_rows(d->max_seqs), wide = d->max_blocks > MAX_STOP ? (size_t)d->max_blocks : MAX_STOP;
        const size_t results = n * (size_t)d->max_burst;
        d->host = xmalloc((n + 1) * wide * sizeof *d->host);
        d->host_rows = xmalloc(n * sizeof *d->host_rows);
        d->sent_stop = xmalloc(n * MAX_STOP * sizeof *d->sent_stop);
        d->results_bytes = 3 * results * sizeof(float);
        TRYG(dev_host_alloc(a->model->dev, d->results_bytes, &d->results_block), fail);
        d->host_id = d->results_block;
        d->host_logp = (float *)d->host_id + results;
        d->host_kept = d->host_logp + results;
    }
    *out = d;
    return 0;
fail:
    decoder_close(d);
    return rc;
}

void decoder_close(struct decoder *d) {
    if (!d) return;
    decode_graphs_free(&d->graphs, d->model->dev);
    draft_close(&d->draft);
    model_acts_destroy(d->acts);
    if (d->owned_block) dev_free(d->model->dev, d->owned_block, d->block_bytes);
    free(d->layers);
    free(d->states);
    if (d->results_block) dev_host_free(d->model->dev, d->results_block, d->results_bytes);
    free(d->host);
    free(d->host_rows);
    free(d->sent_stop);
    free(d->host_logits);
    free(d);
}

struct sampled { /* (n_out) on the host */
    int32_t *id;
    float *logp, *logp_kept;
};
/* The n largest of a row's logits, largest first. */
static void largest(const float *logits, int64_t vocab, int64_t n, int32_t *id) {
    int64_t have = 0;
    for (int64_t v = 0; v < vocab; v++) {
        if (have == n && !(logits[v] > logits[id[n - 1]])) continue;
        int64_t at = have < n ? have++ : n - 1;
        for (; at > 0 && logits[v] > logits[id[at - 1]]; at--) id[at] = id[at - 1];
        id[at] = (int32_t)v;
    }
}

/* Of the block's rows from lo on, whose logits are still there. */
static int top_block(struct decoder *d, const struct engine_plan *p, int64_t lo, int64_t n, const struct sampled *out) {
    const int64_t vocab = d->model->cfg.vocab;
    for (int64_t i = 0; i < n; i++) {
        const int64_t k = lo + i;
        if (p->n_top[k] == 0) continue;
        if (!d->host_logits) d->host_logits = xmalloc((size_t)vocab * sizeof *d->host_logits);
        TRY(dev_copy_out(d->model->dev, d->host_logits, d->logits + i * vocab, (size_t)vocab * sizeof *d->host_logits));
        int32_t *id = p->top_id + k * p->max_top;
        const float *z = d->host_logits, drawn = z[out->id[k]];
        largest(z, vocab, p->n_top[k], id);
        for (int32_t t = 0; t < p->n_top[k]; t++) /* the drawn token's log-prob, and how far from it they are */
            p->top_logp[k * p->max_top + t] = out->logp[k] + (z[id[t]] - drawn) * p->param[k].inv_temp;
    }
    return 0;
}

static int sample_block(struct decoder *d, const struct engine_plan *p, int64_t lo, int64_t n, const struct sampled *out) {
    struct dev *dev = d->model->dev;
    const struct model_config *c = &d->model->cfg;
    const size_t set = (size_t)((c->vocab + 7) / 8);
    TRY(dev_copy_in(dev, d->out_row, p->out_row + lo, (size_t)n * 4));
    const struct tensor hidden = tensor_2d(d->hidden, d->model->act, n, c->hidden);
    TRY(model_hidden(d->model, d->acts, tensor_1d(d->out_row, DT_I32, n), hidden));
    const struct tensor logits = tensor_2d(d->logits, DT_F32, n, c->vocab);
    TRY(model_logits(d->model, logits, hidden));
    struct tensor seen = TENSOR_NONE;
    if (p->seen) {
        seen = tensor_2d(d->seen, DT_U8, n, (int64_t)set);
        TRY(dev_copy_in(dev, d->seen, p->seen + set * (size_t)lo, set * (size_t)n));
    }
    const struct sample_args s = {
        .logits = logits,
        .param = p->param + lo,
        .seen = seen,
        .id = tensor_1d(d->id, DT_I32, n),
        .logp = tensor_1d(d->logp, DT_F32, n),
        .logp_kept = tensor_1d(d->logp_kept, DT_F32, n),
    };
    TRY(dev_sample(dev, &s));
    TRY(dev_copy_out(dev, out->id + lo, d->id, (size_t)n * 4));
    TRY(dev_copy_out(dev, out->logp + lo, d->logp, (size_t)n * 4));
    TRY(dev_copy_out(dev, out->logp_kept + lo, d->logp_kept, (size_t)n * 4));
    if (p->n_top) TRY(top_block(d, p, lo, n, out));
    return 0;
}

static struct tensor state_slots(const struct decoder *d, int64_t n) {
    return d->n_states ? tensor_1d(d->state, DT_I32, n) : TENSOR_NONE;
}

static int decoder_step(void *ctx, const struct engine_plan *p, int32_t *id, float *logp, float *logp_kept) {
    struct decoder *d = ctx;
    struct dev *dev = d->model->dev;
    CHECK(p->n_rows <= d->max_rows && p->n_seqs <= d->max_seqs && p->max_blocks <= d->max_blocks);
    const size_t rows = (size_t)p->n_rows * 4;
    d->n_sent_stop = d->n_sent_iota = 0;
    TRY(dev_copy_in(dev, d->ids, p->ids, rows));
    TRY(dev_copy_in(dev, d->pos, p->pos, rows));
    TRY(dev_copy_in(dev, d->slots, p->slots, rows));
    TRY(dev_copy_in(dev, d->q_start, p->q_start, (size_t)(p->n_seqs + 1) * 4));
    TRY(dev_copy_in(dev, d->pos0, p->pos0, (size_t)p->n_seqs * 4));
    TRY(dev_copy_in(dev, d->block_table, p->block_table, (size_t)(p->n_seqs * p->max_blocks) * 4));
    if (d->n_states) TRY(dev_copy_in(dev, d->state, p->state, (size_t)p->n_seqs * 4));
    const struct model_batch b = {
        .n_rows = p->n_rows,
        .ids = tensor_1d(d->ids, DT_I32, p->n_rows),
        .pos = tensor_1d(d->pos, DT_I32, p->n_rows),
        .slots = tensor_1d(d->slots, DT_I32, p->n_rows),
        .seqs =
            {
                .n = p->n_seqs,
                .max_q = p->max_q,
                .max_kv = p->max_kv,
                .q_start = tensor_1d(d->q_start, DT_I32, p->n_seqs + 1),
                .pos0 = tensor_1d(d->pos0, DT_I32, p->n_seqs),
                .block_table = tensor_2d(d->block_table, DT_I32, p->n_seqs, p->max_blocks),
            },
        .kv = &d->kv,
        .state_slots = state_slots(d, p->n_seqs),
    };
    TRY(model_forward(d->model, &b, d->acts));
    const struct sampled out = {.id = id, .logp = logp, .logp_kept = logp_kept};
    for (int64_t lo = 0; lo < p->n_out; lo += d->out_block) {
        const int64_t n = p->n_out - lo < d->out_block ? p->n_out - lo : d->out_block;
        TRY(sample_block(d, p, lo, n, &out));
    }
    TRY(model_tp_on_time(d->model));
    return p->next ? draft_step(&d->draft, p, &b, id) : 0;
}

static int decoder_verify(void *ctx, const struct engine_verify *v) {
    struct decoder *d = ctx;
    return draft_verify(&d->draft, v);
}

/* ---- bursts ---- */

/* One step of n rows, each the next token of its sequence. */
static int burst_step(void *ctx, int64_t n) {
    struct decoder *d = ctx;
    struct dev *dev = d->model->dev;
    const struct model_config *c = &d->model->cfg;
    const struct tensor hidden = tensor_2d(d->hidden, d->model->act, n, c->hidden);
    const struct model_batch b = {
        .n_rows = n,
        .ids = tensor_1d(d->ids, DT_I32, n),
        .pos = tensor_1d(d->pos, DT_I32, n),
        .slots = tensor_1d(d->slots, DT_I32, n),
        .seqs =
            {
                .n = n,
                .max_q = 1,
                .max_kv = d->max_blocks * KV_BLOCK_LEN,
                .q_start = tensor_1d(d->iota, DT_I32, n + 1),
                .pos0 = tensor_1d(d->pos, DT_I32, n),
                .block_table = tensor_2d(d->burst_table, DT_I32, n, d->max_blocks),
            },
        .kv = &d->kv,
        .state_slots = state_slots(d, n),
        .own_keys = true, /* padding rows share a slot, and a state, and write the same there */
    };
    const bool split = d->model->tp; /* its logits are gathered */
    const struct decode_args next = {
        .x = split ? TENSOR_NONE : hidden,
        .w = d->model->head,
        .logits = tensor_2d(d->logits, DT_F32, n, c->vocab),
        .rows = tensor_2d(d->rows, DT_U8, n, (int64_t)sizeof *d->rows),
        .stop = tensor_2d(d->stop, DT_I32, n, MAX_STOP),
        .block_len = KV_BLOCK_LEN,
        .block_table = b.seqs.block_table,
        .ids = b.ids,
        .pos = b.pos,
        .slots = b.slots,
        .step = tensor_1d(d->step, DT_I32, 1),
        .id = tensor_2d(d->burst_id, DT_I32, d->max_burst, n),
        .logp = tensor_2d(d->burst_logp, DT_F32, d->max_burst, n),
        .logp_kept = tensor_2d(d->burst_kept, DT_F32, d->max_burst, n),
    };
    TRY(model_forward(d->model, &b, d->acts));
    TRY(model_hidden(d->model, d->acts, TENSOR_NONE, hidden));
    if (split) TRY(model_logits(d->model, next.logits, hidden));
    return dev_decode_next(dev, &next);
}

static int upload(struct decoder *d, void *to, int64_t n) {
    return dev_copy_in(d->model->dev, to, d->host, (size_t)n * sizeof *d->host);
}

/* The burst's inputs for n >= b->n_seqs rows; padding rows stay at position 0 of the dummy block. */
static int burst_upload(struct decoder *d, const struct engine_burst *b, int64_t n) {
    const int32_t dummy = (int32_t)d->n_kv_blocks;
    const int64_t used = b->n_seqs;
    int32_t *h = d->host;
    for (int64_t i = 0; i < n; i++) h[i] = i < used ? b->ids[i] : 0;
    TRY(upload(d, d->ids, n));
    for (int64_t i = 0; i < n; i++) h[i] = i < used ? b->pos[i] : 0;
    TRY(upload(d, d->pos, n));
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i < used ? b->pos[i] : 0;
        h[i] = (i < used ? b->block_table[i * b->max_blocks + at / KV_BLOCK_LEN] : dummy) * KV_BLOCK_LEN +
               (int32_t)(at % KV_BLOCK_LEN);
    }
    TRY(upload(d, d->slots, n));
    for (int64_t i = 0; i < n && d->n_states; i++) h[i] = i < used ? b->state[i] : (int32_t)d->n_states;
    if (d->n_states) TRY(upload(d, d->state, n));
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < d->max_blocks; k++)
            h[i * d->max_blocks + k] = i < used && k < b->max_blocks ? b->block_table[i * b->max_blocks + k] : dummy;
    TRY(upload(d, d->burst_table, n * d->max_blocks));
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < MAX_STOP; k++)
            h[i * MAX_STOP + k] = i < used && k < b->max_stop ? b->stop[i * b->max_stop + k] : -1;
    const size_t stops = (size_t)(n * MAX_STOP) * sizeof *h;
    if (n > d->n_sent_stop || memcmp(h, d->sent_stop, stops) != 0) {
        TRY(upload(d, d->stop, n * MAX_STOP));
        memcpy(d->sent_stop, h, stops);
        d->n_sent_stop = n;
    }
    if (n > d->n_sent_iota) {
        for (int64_t i = 0; i <= n; i++) h[i] = (int32_t)i;
        TRY(upload(d, d->iota, n + 1));
        d->n_sent_iota = n;
    }
    for (int64_t i = 0; i < n; i++)
        d->host_rows[i] = i < used ? b->rows[i] : (struct decode_row){.rule = {.inv_temp = 1, .top_p = 1, .repetition_penalty = 1}};
    TRY(dev_copy_in(d->model->dev, d->rows, d->host_rows, (size_t)n * sizeof *d->rows));
    h[0] = 0;
    return upload(d, d->step, 1);
}

static int64_t part_of(const struct decoder *d) { return (d->max_burst + BURST_PARTS - 1) / BURST_PARTS; }

/* The results of steps [lo, hi), a part, go to the host, while the steps after them run. */
static int send_results(struct decoder *d, int64_t lo, int64_t hi) {
    struct dev *dev = d->model->dev;
    const int64_t at = lo * d->burst_rows;
    const size_t bytes = (size_t)((hi - lo) * d->burst_rows) * 4;
    const int stream = RESULT_COPY_STREAM + (int)(lo / part_of(d));
    TRY(dev_evict(dev, stream, d->host_id + at, d->burst_id + at, bytes));
    TRY(dev_evict(dev, stream, d->host_logp + at, d->burst_logp + at, bytes));
    return dev_evict(dev, stream, d->host_kept + at, d->burst_kept + at, bytes);
}

/* Its graph, where what ranks gather in between can be held by one. */
static int run_step(struct decoder *d, struct decode_graphs *graphs, int64_t n) {
    const bool in_graph = !d->model->tp || model_tp_in_graph(d->model);
    return in_graph ? decode_graph_run(graphs, d->model->dev, n, burst_step, d) : burst_step(d, n);
}

int decoder_repeat(struct decoder *d, struct decode_graphs *graphs, int64_t n) {
    if (d->burst_rows == 0) FAIL(ERR_INVAL, "decoder_repeat: there was no burst");
    for (int64_t t = 0; t < n; t++) {
        if (t % d->max_burst == 0) TRY(dev_zero(d->model->dev, d->step, sizeof *d->step));
        TRY(run_step(d, graphs, d->burst_rows));
    }
    return 0;
}

static int decoder_burst(void *ctx, const struct engine_burst *b) {
    struct decoder *d = ctx;
    const int64_t n = dev_has_graphs(d->model->dev) ? decode_graph_rows(b->n_seqs) : b->n_seqs, part = part_of(d);
    CHECK(b->n_seqs <= d->max_seqs && b->max_blocks <= d->max_blocks && b->steps <= d->max_burst);
    if (b->max_stop > MAX_STOP) FAIL(ERR_INVAL, "generate: %lld end tokens; at most %d", (long long)b->max_stop, MAX_STOP);
    TRY(burst_upload(d, b, n));
    d->burst_rows = n;
    d->burst_steps = b->steps;
    for (int64_t t = 0; t < b->steps; t++) {
        TRY(run_step(d, &d->graphs, n));
        if ((t + 1) % part == 0 || t + 1 == b->steps) TRY(send_results(d, t / part * part, t + 1));
    }
    return 0;
}

static int decoder_results(void *ctx, int64_t have, struct engine_results *out) {
    struct decoder *d = ctx;
    const int64_t part = part_of(d), left = d->burst_steps - have, at = have * d->burst_rows;
    CHECK(have % part == 0 && left > 0);
    TRY(dev_copy_stream_sync(d->model->dev, RESULT_COPY_STREAM + (int)(have / part)));
    TRY(model_tp_on_time(d->model));
    *out = (struct engine_results){left < part ? left : part, d->burst_rows, d->host_id + at, d->host_logp + at, d->host_kept + at};
    return 0;
}

static int copy_states(void *ctx, int64_t n, const int32_t *from, const int32_t *to) {
    const struct decoder *d = ctx;
    const struct model_config *c = &d->model->cfg;
    for (int64_t l = 0; l < c->n_layers; l++) {
        if (!model_layer_is_delta(c, l)) continue;
        const struct model_state *const s = &d->states[l];
        const struct tensor parts[] = {s->conv, s->delta.s, s->delta.k, s->delta.r, s->delta.e, s->delta.g};
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            const int64_t slots = parts[i].dim[0];
            const struct tensor x = tensor_2d(parts[i].data, parts[i].dt, slots, tensor_count(parts[i]) / slots);
            TRY(dev_copy_rows(d->model->dev, &(struct copy_rows_args){x, n, from, to}));
        }
    }
    return 0;
}

struct engine_model decoder_model(struct decoder *d) {
    return (struct engine_model){.ctx = d,
                                 .n_kv_blocks = d->n_kv_blocks,
                                 .vocab = d->model->cfg.vocab,
                                 .logit_scale = d->model->cfg.logit_scale,
                                 .step = decoder_step,
                                 .max_burst = d->max_burst,
                                 .burst = decoder_burst,
                                 .burst_results = decoder_results,
                                 .max_draft = d->model->tp ? 0 : d->draft.most, /* it is each rank's own */
                                 .draft_seqs = d->max_seqs < DRAFT_SEQS ? d->max_seqs : DRAFT_SEQS,
                                 .verify = decoder_verify,
                                 .n_states = d->n_states,
                                 .copy_states = copy_states};
}

int decoder_engine(struct engine **out, struct decoder *d, const struct engine_config *c) {
    const struct engine_model m = decoder_model(d);
    struct engine_config own = *c;
    if (own.max_rows == 0) own.max_rows = d->requested_rows;
    if (own.max_seqs == 0) own.max_seqs = d->requested_seqs;
    if (own.draft != ENGINE_DRAFT_NEVER) TRY(draft_begin(&d->draft));
    return engine_create(out, &m, &own);
}
