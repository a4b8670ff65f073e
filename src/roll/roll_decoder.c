/* roll_decoder.c - the real decoder behind struct roll_model: the page pool on
 * the device, one model_forward a step, then head and sampler over the rows to
 * sample.  Schedules nothing.
 *
 * Invariant: it calls the same model_forward and the same head arithmetic as
 * training, so log-probs come out bit-equal. */
#include "roll/roll.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>

enum { OUT_BLOCK = 128 }; /* rows of logits held at a time: 128 x 152k x 4 B = 78 MB */

struct roll_decoder {
    struct model *model;
    struct model_acts *acts;
    struct model_kv kv;
    struct kv *layers;
    int64_t n_pages, max_rows, max_seqs, max_pages, out_block;
    /* device */
    void *owned_block;
    size_t block_bytes;
    void *acts_block;
    int32_t *ids, *pos, *slots, *q_start, *pos0, *pages, *out_row, *id;
    float *logp, *logp_kept, *logits;
    void *hidden;
    uint8_t *seen;
};

size_t roll_page_bytes(const struct model_config *c, enum dtype act) {
    return (size_t)(2 * c->n_layers * c->n_kv_heads * c->head_dim * ROLL_PAGE_LEN) * dtype_size(act);
}

static int64_t max_pages_of(const struct roll_decoder_args *a) {
    return (a->max_len + ROLL_PAGE_LEN - 1) / ROLL_PAGE_LEN;
}

/* Measures, then binds: see arena.h. */
static void decoder_layout(struct roll_decoder *d, struct arena *m, const struct model_config *c, enum dtype act) {
    const size_t side = (size_t)(c->n_kv_heads * c->head_dim * ROLL_PAGE_LEN * d->n_pages) * dtype_size(act);
    for (int64_t l = 0; l < c->n_layers; l++) {
        struct tensor t = {NULL, act, 4, {d->n_pages, c->n_kv_heads, ROLL_PAGE_LEN, c->head_dim}};
        t.data = arena_take(m, side);
        if (d->layers) d->layers[l].k = t;
        t.data = arena_take(m, side);
        if (d->layers) d->layers[l].v = t;
    }
    const size_t rows = (size_t)d->max_rows, seqs = (size_t)d->max_seqs, out = (size_t)d->out_block;
    d->ids = arena_take(m, rows * 4);
    d->pos = arena_take(m, rows * 4);
    d->slots = arena_take(m, rows * 4);
    d->q_start = arena_take(m, (seqs + 1) * 4);
    d->pos0 = arena_take(m, seqs * 4);
    d->pages = arena_take(m, seqs * (size_t)d->max_pages * 4);
    d->out_row = arena_take(m, out * 4);
    d->id = arena_take(m, out * 4);
    d->logp = arena_take(m, out * 4);
    d->logp_kept = arena_take(m, out * 4);
    d->hidden = arena_take(m, out * (size_t)c->hidden * dtype_size(act));
    d->logits = arena_take(m, out * (size_t)c->vocab * 4);
    d->seen = arena_take(m, out * (size_t)((c->vocab + 7) / 8));
    d->acts_block = arena_take(m, model_acts_bytes(c, act, d->max_rows, MODEL_KEEP_NONE));
}

static void decoder_limits(struct roll_decoder *d, const struct roll_decoder_args *a) {
    d->n_pages = a->n_pages;
    d->max_rows = a->max_rows;
    d->max_seqs = a->max_seqs < a->max_rows ? a->max_seqs : a->max_rows;
    d->max_pages = max_pages_of(a);
    d->out_block = d->max_seqs < OUT_BLOCK ? d->max_seqs : OUT_BLOCK;
}

size_t roll_decoder_bytes(const struct model_config *c, enum dtype act, const struct roll_decoder_args *a) {
    struct roll_decoder d = {0};
    struct arena m = {0};
    decoder_limits(&d, a);
    decoder_layout(&d, &m, c, act);
    return m.used;
}

int roll_decoder_open(struct roll_decoder **out, const struct roll_decoder_args *a) {
    int rc = 0;
    struct roll_decoder *d = xcalloc(1, sizeof *d);
    d->model = a->model;
    decoder_limits(d, a);
    const struct model_config *c = &a->model->cfg;
    d->layers = xcalloc((size_t)c->n_layers, sizeof *d->layers);
    d->kv.layers = d->layers;
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
    TRYG(model_acts_create(&d->acts, a->model, a->max_rows, MODEL_KEEP_NONE, d->acts_block), fail);
    *out = d;
    return 0;
fail:
    roll_decoder_close(d);
    return rc;
}

void roll_decoder_close(struct roll_decoder *d) {
    if (!d) return;
    model_acts_destroy(d->acts);
    if (d->owned_block) dev_free(d->model->dev, d->owned_block, d->block_bytes);
    free(d->layers);
    free(d);
}

static int sample_block(struct roll_decoder *d, const struct roll_plan *p, int64_t lo, int64_t n, int32_t *id,
                        float *logp, float *logp_kept) {
    struct dev *dev = d->model->dev;
    const struct model_config *c = &d->model->cfg;
    const size_t set = (size_t)((c->vocab + 7) / 8);
    TRY(dev_copy_in(dev, d->out_row, p->out_row + lo, (size_t)n * 4));
    const struct tensor hidden = tensor_2d(d->hidden, d->model->act, n, c->hidden);
    TRY(model_hidden(d->model, d->acts, tensor_1d(d->out_row, DT_I32, n), hidden));
    const struct tensor logits = tensor_2d(d->logits, DT_F32, n, c->vocab);
    TRY(dev_logits(dev, logits, hidden, d->model->head));
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
    TRY(dev_copy_out(dev, id + lo, d->id, (size_t)n * 4));
    TRY(dev_copy_out(dev, logp + lo, d->logp, (size_t)n * 4));
    TRY(dev_copy_out(dev, logp_kept + lo, d->logp_kept, (size_t)n * 4));
    return 0;
}

static int decoder_step(void *ctx, const struct roll_plan *p, int32_t *id, float *logp, float *logp_kept) {
    struct roll_decoder *d = ctx;
    struct dev *dev = d->model->dev;
    CHECK(p->n_rows <= d->max_rows && p->n_seqs <= d->max_seqs && p->max_pages <= d->max_pages);
    const size_t rows = (size_t)p->n_rows * 4;
    TRY(dev_copy_in(dev, d->ids, p->ids, rows));
    TRY(dev_copy_in(dev, d->pos, p->pos, rows));
    TRY(dev_copy_in(dev, d->slots, p->slots, rows));
    TRY(dev_copy_in(dev, d->q_start, p->q_start, (size_t)(p->n_seqs + 1) * 4));
    TRY(dev_copy_in(dev, d->pos0, p->pos0, (size_t)p->n_seqs * 4));
    TRY(dev_copy_in(dev, d->pages, p->pages, (size_t)(p->n_seqs * p->max_pages) * 4));
    const struct model_batch b = {
        .n_rows = p->n_rows,
        .ids = tensor_1d(d->ids, DT_I32, p->n_rows),
        .pos = tensor_1d(d->pos, DT_I32, p->n_rows),
        .slots = tensor_1d(d->slots, DT_I32, p->n_rows),
        .seqs = {
            .n = p->n_seqs,
            .max_q = p->max_q,
            .max_kv = p->max_kv,
            .q_start = tensor_1d(d->q_start, DT_I32, p->n_seqs + 1),
            .pos0 = tensor_1d(d->pos0, DT_I32, p->n_seqs),
            .pages = tensor_2d(d->pages, DT_I32, p->n_seqs, p->max_pages),
        },
        .kv = &d->kv,
    };
    TRY(model_forward(d->model, &b, d->acts));
    for (int64_t lo = 0; lo < p->n_out; lo += d->out_block) {
        const int64_t n = p->n_out - lo < d->out_block ? p->n_out - lo : d->out_block;
        TRY(sample_block(d, p, lo, n, id, logp, logp_kept));
    }
    return 0;
}

struct roll_model roll_decoder_model(struct roll_decoder *d) {
    return (struct roll_model){d, d->n_pages, d->model->cfg.vocab, decoder_step};
}
