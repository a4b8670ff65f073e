/* draft_decoder.c - see draft_decoder.h. What is planned, and what becomes of a drafted token, is speculative.c's.
 *
 * A verifying step is one forward pass over the last token of each sample and the tokens drafted after it. A row is a sequence of
 * one row to attention, with the block table of its sample: all keys of a layer are written before any is read, and the kernel is
 * that of decoding. A layer with states reads a sample's rows as one sequence; what its state has of rejected ones is taken back by
 * going on from the last accepted one. Each row is sampled as a decoding step would sample it. Then the MTP layer reads the same
 * rows with the tokens that were drawn, so what it keeps of accepted rows is right, and rejected ones are written again by later
 * steps.
 * Invariant: rows are batch-invariant, so a row whose tokens were accepted has the bits of a step without drafts. */
#include "engine/draft_decoder.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>

void draft_limits(struct draft_decoder *t, const struct decoder_args *a) {
    t->most = a->max_draft;
    t->max_len = a->max_len;
    t->seqs = t->rows = 0;
    if (t->most == 0) return;
    const int64_t seqs = a->max_seqs < a->max_rows ? a->max_seqs : a->max_rows;
    t->seqs = decode_graph_rows(seqs < DRAFT_SEQS ? seqs : DRAFT_SEQS);
    t->rows = t->seqs * (t->most + 1);
}

static void *part(char **at, size_t bytes) {
    void *const p = *at;
    *at += (bytes + 63) / 64 * 64;
    return p;
}

/* Returns the bytes that are copied. */
static size_t bind_in(struct draft_in *i, char *base, int64_t rows) {
    const size_t ints = SIZE_OF(rows, 4), rules = SIZE_OF(rows, (int64_t)sizeof(struct decode_row));
    char *at = base;
    i->ids = part(&at, ints);
    i->pos = part(&at, ints);
    i->slots = part(&at, ints);
    i->select = part(&at, ints);
    i->step = part(&at, 16);
    i->start = part(&at, ints + sizeof(int32_t));
    i->pos0 = part(&at, ints);
    i->state = part(&at, ints);
    i->rule = part(&at, rules);
    i->draft_rule = part(&at, rules);
    return (size_t)(at - base);
}
static size_t bind_out(struct draft_out *o, char *base, int64_t rows) {
    const size_t n = SIZE_OF(rows, 4);
    char *at = base;
    o->id = part(&at, n);
    o->draft = part(&at, n);
    o->logp = part(&at, n);
    o->logp_kept = part(&at, n);
    o->unread = (float *)(void *)at;
    return (size_t)(at - base);
}
/* At least as large as these. */
static size_t in_room(int64_t rows) {
    return 7 * SIZE_OF(rows + 17, 4) + 64 + 2 * SIZE_OF(rows + 1, (int64_t)sizeof(struct decode_row));
}
static size_t out_room(int64_t rows) { return 6 * SIZE_OF(rows + 16, 4); }

void draft_layout(struct draft_decoder *t, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t h = c->hidden, size = (int64_t)dtype_size(act);
    if (t->most == 0) return;
    char *const in = arena_take(m, in_room(t->rows)), *const out = arena_take(m, out_room(t->rows));
    if (in) t->in_bytes = bind_in(&t->in, in, t->rows);
    if (out) t->out_bytes = bind_out(&t->out, out, t->rows);
    t->next = arena_take(m, SIZE_OF(t->max_rows, 4));
    t->table = arena_take(m, SIZE_OF(t->rows, t->max_blocks, 4));
    t->iota = arena_take(m, SIZE_OF(t->rows + 1, 4));
    t->state = arena_take(m, SIZE_OF(t->rows, h, size));
    t->chained = arena_take(m, SIZE_OF(t->seqs, h, size));
}

void draft_open(struct draft_decoder *t, struct model *m, struct model_acts *acts, const struct model_kv *kv) {
    if (t->most == 0) return;
    t->model = m;
    t->acts = acts;
    t->kv = kv;
    bind_in(&t->host_in, xcalloc(1, in_room(t->rows)), t->rows);
    bind_out(&t->host_out, xcalloc(1, out_room(t->rows)), t->rows);
    t->host_table = xmalloc(SIZE_OF(t->rows, t->max_blocks, 4));
    t->host_next = xmalloc(SIZE_OF(t->max_rows, 4));
    t->host_iota = xmalloc(SIZE_OF(t->rows + 1, 4));
    for (int64_t i = 0; i <= t->rows; i++) t->host_iota[i] = (int32_t)i;
}

void draft_close(struct draft_decoder *t) {
    if (!t->model) return;
    decode_graphs_free(&t->verify, t->model->dev);
    decode_graphs_free(&t->chain, t->model->dev);
    free(t->host_in.ids);
    free(t->host_out.id);
    free(t->host_table);
    free(t->host_next);
    free(t->host_iota);
}

int draft_begin(struct draft_decoder *t) {
    if (!t->model) return 0;
    const struct kv *const kv = &t->kv->layers[model_mtp_layer(&t->model->cfg)];
    const size_t bytes = (size_t)tensor_count(kv->k) * dtype_size(kv->k.dt);
    t->sent = false;
    TRY(dev_zero(t->model->dev, kv->k.data, bytes));
    return dev_zero(t->model->dev, kv->v.data, bytes);
}

/* The arrays that hold for all steps. */
static int send(struct draft_decoder *t) {
    if (t->sent) return 0;
    TRY(model_mtp_begin(t->model, t->acts));
    TRY(dev_copy_in(t->model->dev, t->iota, t->host_iota, (size_t)(t->rows + 1) * sizeof *t->iota));
    t->sent = true;
    return 0;
}

static struct tensor ints(int32_t *p, int64_t n) { return tensor_1d(p, DT_I32, n); }

/* n rows, each the one new row of a sequence. */
static struct model_batch batch_of(const struct draft_decoder *t, int32_t *ids, int64_t n) {
    return (struct model_batch){.n_rows = n,
                                .ids = ints(ids, n),
                                .pos = ints(t->in.pos, n),
                                .slots = ints(t->in.slots, n),
                                .seqs = {.n = n,
                                         .max_q = 1,
                                         .max_kv = t->max_blocks * KV_BLOCK_LEN,
                                         .q_start = ints(t->iota, n + 1),
                                         .pos0 = ints(t->in.pos, n),
                                         .block_table = tensor_2d(t->table, DT_I32, n, t->max_blocks),
                                         .shared_new_keys = true},
                                .kv = t->kv};
}

/* Draws of n rows of x by the model's head: tokens, or drafts of those after them. */
static int draw(struct draft_decoder *t, void *x, int64_t n, bool drafts) {
    const struct model_config *const c = &t->model->cfg;
    const struct decode_args a = {
        .x = tensor_2d(x, t->model->act, n, c->hidden),
        .w = t->model->head,
        .logits = tensor_2d(t->logits, DT_F32, n, c->vocab),
        .rows = tensor_2d(drafts ? t->in.draft_rule : t->in.rule, DT_U8, n, (int64_t)sizeof(struct decode_row)),
        .block_len = KV_BLOCK_LEN,
        .block_table = tensor_2d(t->table, DT_I32, n, t->max_blocks),
        .ids = ints(t->in.ids, n), /* every row has one token left: they do not move on */
        .pos = ints(t->in.pos, n),
        .slots = ints(t->in.slots, n),
        .step = ints(t->in.step + drafts, 1),
        .id = tensor_2d(drafts ? t->out.draft : t->out.id, DT_I32, 1, n),
        .logp = tensor_2d(drafts ? t->out.unread : t->out.logp, DT_F32, 1, n),
        .logp_kept = tensor_2d(drafts ? t->out.unread + n : t->out.logp_kept, DT_F32, 1, n),
    };
    return dev_decode_next(t->model->dev, &a);
}

static int send_in(struct draft_decoder *t) {
    memset(t->host_in.step, 0, 4 * sizeof *t->host_in.step);
    return dev_copy_in(t->model->dev, t->in.ids, t->host_in.ids, t->in_bytes);
}
static int take_out(struct draft_decoder *t) { return dev_copy_out(t->model->dev, t->host_out.id, t->out.id, t->out_bytes); }

int draft_step(struct draft_decoder *t, const struct engine_plan *p, const struct model_batch *b, const int32_t *id) {
    struct model_batch after = *b;
    const size_t bytes = (size_t)p->n_rows * sizeof *t->next;
    t->sent = false; /* it may be the first step since others had the memory */
    TRY(send(t));
    memcpy(t->host_next, p->next, bytes);
    for (int64_t k = 0; k < p->n_out; k++) t->host_next[p->out_row[k]] = id[k];
    TRY(dev_copy_in(t->model->dev, t->next, t->host_next, bytes));
    after.ids = ints(t->next, p->n_rows);
    TRY(model_mtp_forward(t->model, &after, t->acts, TENSOR_NONE));
    for (int64_t lo = 0; lo < p->n_out; lo += t->rows) {
        const int64_t n = p->n_out - lo < t->rows ? p->n_out - lo : t->rows;
        memcpy(t->host_in.select, p->out_row + lo, (size_t)n * sizeof(int32_t));
        memcpy(t->host_in.draft_rule, p->draft_rule + lo, (size_t)n * sizeof(struct decode_row));
        TRY(send_in(t));
        TRY(model_mtp_hidden(t->model, t->acts, ints(t->in.select, n),
                             tensor_2d(t->state, t->model->act, n, t->model->cfg.hidden)));
        TRY(draw(t, t->state, n, true));
        TRY(take_out(t));
        memcpy(p->draft + lo, t->host_out.draft, (size_t)n * sizeof(int32_t));
    }
    return 0;
}

/* ---- verification ---- */

/* One step of n rows: tokens, then drafts of those after them. */
static int verify_rows(void *ctx, int64_t n) {
    struct draft_decoder *const t = ctx;
    struct model_batch b = batch_of(t, t->in.ids, n);
    const struct model_batch after = batch_of(t, t->out.id, n);
    const struct tensor all = ints(t->iota, n);
    TRY(dev_zero(t->model->dev, t->out.id, (size_t)n * sizeof *t->out.id)); /* of rows without a draw */
    if (t->dummy_state >= 0)
        b.state_seqs = (struct row_seqs){n, t->most + 1, ints(t->in.start, n + 1), ints(t->in.pos0, n), ints(t->in.state, n)};
    TRY(model_forward(t->model, &b, t->acts));
    TRY(model_hidden(t->model, t->acts, TENSOR_NONE, tensor_2d(t->hidden, t->model->act, n, t->model->cfg.hidden)));
    TRY(draw(t, t->hidden, n, false));
    TRY(model_mtp_forward(t->model, &after, t->acts, TENSOR_NONE));
    TRY(model_mtp_hidden(t->model, t->acts, all, tensor_2d(t->state, t->model->act, n, t->model->cfg.hidden)));
    return draw(t, t->state, n, true);
}

/* The next draft of n samples, from the states of rows `select` and the drafts before. */
static int chain_rows(void *ctx, int64_t n) {
    struct draft_decoder *const t = ctx;
    const int64_t h = t->model->cfg.hidden;
    const struct model_batch b = batch_of(t, t->in.ids, n);
    const struct tensor chained = tensor_2d(t->chained, t->model->act, n, h);
    TRY(dev_gather_rows(t->model->dev, chained, tensor_2d(t->state, t->model->act, t->rows, h), ints(t->in.select, n)));
    TRY(model_mtp_forward(t->model, &b, t->acts, chained));
    TRY(model_mtp_hidden(t->model, t->acts, ints(t->iota, n), tensor_2d(t->state, t->model->act, n, h)));
    return draw(t, t->state, n, true);
}

/* Row r is that of sample i at this position, or with i < 0 padding. */
static void fill_row(struct draft_decoder *t, const struct engine_verify *v, int64_t r, int64_t i, int64_t pos) {
    const int64_t block = pos / KV_BLOCK_LEN;
    const bool there = i >= 0 && block < v->n_blocks[i];
    t->host_in.pos[r] = i < 0 ? 0 : (int32_t)(pos < t->max_len ? pos : t->max_len - 1);
    t->host_in.slots[r] =
        (int32_t)((there ? v->block_table[i * v->max_blocks + block] : t->dummy) * KV_BLOCK_LEN + (i < 0 ? 0 : pos % KV_BLOCK_LEN));
    for (int64_t k = 0; k < t->max_blocks; k++)
        t->host_table[r * t->max_blocks + k] =
            (int32_t)(i >= 0 && k < v->n_blocks[i] ? v->block_table[i * v->max_blocks + k] : t->dummy);
}

static struct decode_row idle_row(void) {
    return (struct decode_row){.rule = {.inv_temp = 1, .top_p = 1, .repetition_penalty = 1}};
}
static struct decode_row row_at(const struct decode_row *first, int64_t after) {
    struct decode_row r = *first;
    r.at += (uint32_t)after;
    r.left = 1;
    return r;
}

static int send_table(struct draft_decoder *t, int64_t n) {
    return dev_copy_in(t->model->dev, t->table, t->host_table, (size_t)(n * t->max_blocks) * sizeof *t->table);
}

/* Samples i < n: their rows accepted, and drafts after the first one. */
static int chain(struct draft_decoder *t, const struct engine_verify *v, int64_t n, const int64_t *last) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t own = i < v->n_seqs ? i : -1;
        t->host_in.select[i] = (int32_t)(own < 0 ? 0 : t->first[i] + last[i]);
        if (own >= 0) v->draft[i * t->most] = t->host_out.draft[t->first[i] + last[i]];
    }
    for (int64_t c = 1; c < t->most; c++) {
        for (int64_t i = 0; i < n; i++) {
            const int64_t own = i < v->n_seqs ? i : -1;
            t->host_in.ids[i] = own < 0 ? 0 : v->draft[i * t->most + c - 1];
            t->host_in.draft_rule[i] = own < 0 ? idle_row() : row_at(&v->rows[i], last[i] + 1 + c);
            fill_row(t, v, i, own, own < 0 ? 0 : v->pos[i] + last[i] + c);
        }
        TRY(send_in(t));
        TRY(send_table(t, n));
        TRY(decode_graph_run(&t->chain, t->model->dev, n, chain_rows, t));
        TRY(take_out(t));
        for (int64_t i = 0; i < n; i++) {
            t->host_in.select[i] = (int32_t)i;
            if (i < v->n_seqs) v->draft[i * t->most + c] = t->host_out.draft[i];
        }
    }
    return 0;
}

/* Row r is the token of sample i, at j = 0, or its draft j; with i < 0 padding. */
static void fill_verified(struct draft_decoder *t, const struct engine_verify *v, int64_t r, int64_t i, int64_t j) {
    t->host_in.ids[r] = i < 0 ? 0 : v->ids[i * (t->most + 1) + j];
    t->host_in.rule[r] = i < 0 ? idle_row() : row_at(&v->rows[i], j);
    t->host_in.draft_rule[r] = i < 0 ? idle_row() : row_at(&v->rows[i], j + 1);
    fill_row(t, v, r, i, i < 0 ? 0 : v->pos[i] + j);
}
/* Sequence k of layers with states begins in row r; with i < 0 it is a row of padding, or none. */
static void fill_sequence(struct draft_decoder *t, const struct engine_verify *v, int64_t k, int64_t r, int64_t i) {
    t->host_in.start[k] = (int32_t)r;
    t->host_in.pos0[k] = i < 0 ? 0 : v->pos[i];
    t->host_in.state[k] = (int32_t)(i < 0 ? t->dummy_state : v->state[i]);
}
/* Rows of the step: each sample's, and with graphs padding up to all drafts of `seqs` samples. */
static int64_t fill_step(struct draft_decoder *t, const struct engine_verify *v, int64_t seqs) {
    const bool pad = dev_has_graphs(t->model->dev);
    int64_t r = 0, k = 0;
    for (int64_t i = 0; i < seqs; i++) {
        const int64_t own = i < v->n_seqs ? v->n_draft[i] + 1 : 0, all = pad ? t->most + 1 : own;
        t->first[i] = (int32_t)r;
        if (own > 0) fill_sequence(t, v, k++, r, i);
        for (int64_t j = 0; j < all; j++, r++) {
            if (j >= own) fill_sequence(t, v, k++, r, -1);
            fill_verified(t, v, r, j < own ? i : -1, j);
        }
    }
    while (k < r) fill_sequence(t, v, k++, r, -1);
    t->host_in.start[r] = (int32_t)r;
    return r;
}

int draft_verify(struct draft_decoder *t, const struct engine_verify *v) {
    const int64_t n = dev_has_graphs(t->model->dev) ? decode_graph_rows(v->n_seqs) : v->n_seqs, wide = t->most + 1;
    int64_t last[DRAFT_SEQS];
    CHECK(v->n_seqs <= DRAFT_SEQS && n <= t->seqs && v->max_blocks <= t->max_blocks);
    TRY(send(t));
    const int64_t rows = fill_step(t, v, n);
    TRY(send_in(t));
    TRY(send_table(t, rows));
    TRY(decode_graph_run(&t->verify, t->model->dev, rows, verify_rows, t));
    TRY(take_out(t));
    for (int64_t i = 0; i < v->n_seqs; i++) {
        const size_t bytes = (size_t)(v->n_draft[i] + 1) * sizeof *v->id;
        memcpy(v->id + i * wide, t->host_out.id + t->first[i], bytes);
        memcpy(v->logp + i * wide, t->host_out.logp + t->first[i], bytes);
        memcpy(v->logp_kept + i * wide, t->host_out.logp_kept + t->first[i], bytes);
        last[i] = engine_accepted(v, i);
    }
    return chain(t, v, n, last);
}
