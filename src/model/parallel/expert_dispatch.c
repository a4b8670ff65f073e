/* expert_dispatch.c - see expert_dispatch.h.
 *
 * Rows are sorted by expert on their own rank, and a rank's experts follow each other, so what goes to a rank is one range, and
 * outputs come back to the places of their rows. All ranks know the load of each expert in each micro-batch, so each knows what
 * comes, from where and in which round. */
#include "model/parallel/expert_dispatch.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "comm/comm.h"
#include "device/collective/collective.h"
#include "model/lora/lora_int.h"
#include "model/model_int.h"
#include "model/parallel/weight_streaming.h"

#include <stdlib.h>
#include <string.h>

struct model_dispatch {
    struct collective *group;
    int rank, size;
    int64_t max_rows, experts, keep_all;
    /* Rows of experts: what this rank sends, x and in backward the gradient of outputs; what it receives of both, x in memory that
     * the others read, as outputs are left there. Then those of one micro-batch. */
    struct tensor send, dsend, x, dy;
    struct tensor gate_up, mlp, dgate_up, dmlp;
    struct tensor offset;    /* (own experts + 1) i32 of a micro-batch */
    int32_t *first;          /* (size, experts + 1) host: where an expert's rows begin on each rank */
    size_t *at, *bytes;      /* (size, size) of an exchange */
    int32_t *own_offset;     /* (experts + 1) */
    int64_t *received;       /* (size, size + 1) by rank of the experts: where the rows of each rank begin there */
    struct model_range *own; /* (size) the experts of each rank */
};

/* ---- memory ---- */

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t most_own(const struct model_config *c, int ranks) { return (c->n_experts + ranks - 1) / ranks; }

/* Rows of experts that a rank gets of one micro-batch, and those that it has room for: half more than an even load gives. */
static int64_t most_of_one(const struct model_config *c, struct model_dispatch_shape s) {
    return s.max_rows * min64(c->n_choices, most_own(c, s.ranks));
}
static int64_t most_received(const struct model_config *c, struct model_dispatch_shape s) {
    const int64_t one = most_of_one(c, s), even = s.max_rows * c->n_choices;
    return max64(one, min64(even + even / 2, one * s.ranks));
}

static void layout(struct model_dispatch *d, struct arena *a, const struct model_config *c, enum dtype act,
                   struct model_dispatch_shape s) {
    const int64_t slots = s.max_rows * c->n_choices, one = most_of_one(c, s), all = most_received(c, s), h = c->hidden,
                  f = c->expert_ffn;
    d->send = model__take2(a, act, slots, h);
    d->dsend = model__take2(a, act, slots, h);
    d->x = model__take2(a, act, all, h);
    d->dy = model__take2(a, act, all, h);
    d->gate_up = model__take2(a, act, one, 2 * f);
    d->mlp = model__take2(a, act, one, f);
    d->dgate_up = model__take2(a, act, one, 2 * f);
    d->dmlp = model__take2(a, act, one, f);
    d->offset = model__take1(a, DT_I32, most_own(c, s.ranks) + 1);
}

size_t model_dispatch_bytes(const struct model_config *c, enum dtype act, struct model_dispatch_shape s) {
    struct model_dispatch d;
    struct arena a = {0};
    if (s.ranks > 1) layout(&d, &a, c, act, s);
    return a.used;
}

const char *model_dispatch_unable(const struct model_config *c) { return c->n_experts ? NULL : "the model has no experts"; }

void model_dispatch_bind(struct model *m, struct collective *g, int64_t max_rows) {
    struct model_dispatch *const d = m->dispatch = xcalloc(1, sizeof *d);
    struct arena a = {.base = model__stream_room(m), .cap = SIZE_MAX};
    const int size = collective_size(g);
    CHECK(size <= COMM_MOST_RANKS && max_rows > 0);
    d->group = g;
    d->rank = collective_rank(g);
    d->size = size;
    d->max_rows = max_rows;
    d->experts = m->cfg.n_experts;
    layout(d, &a, &m->cfg, m->act, (struct model_dispatch_shape){size, max_rows});
    d->first = xcalloc((size_t)size * (size_t)(d->experts + 1), sizeof *d->first);
    d->at = xcalloc((size_t)(size * size), sizeof *d->at);
    d->bytes = xcalloc((size_t)(size * size), sizeof *d->bytes);
    d->own_offset = xcalloc((size_t)d->experts + 1, sizeof *d->own_offset);
    d->received = xcalloc((size_t)(size * (size + 1)), sizeof *d->received);
    d->own = xcalloc((size_t)size, sizeof *d->own);
    for (int r = 0; r < size; r++) d->own[r] = model__ep_experts(d->experts, r, size);
}

void model__dispatch_free(struct model_dispatch *d) {
    if (!d) return;
    free(d->first);
    free(d->at);
    free(d->bytes);
    free(d->own_offset);
    free(d->received);
    free(d->own);
    free(d);
}

void model_dispatch_keep(struct model *m, int64_t all) {
    if (m->dispatch) m->dispatch->keep_all = all;
}

/* ---- loads, and rounds ---- */

/* offset: of this rank's rows; absent: it has none. */
static int gather_loads(struct model *m, struct tensor offset) {
    struct model_dispatch *const d = m->dispatch;
    const size_t one = (size_t)(d->experts + 1) * sizeof *d->first;
    int32_t *const mine = d->first + d->rank * (d->experts + 1);
    size_t at[COMM_MOST_RANKS + 1];
    memset(mine, 0, one);
    if (offset.nd) TRY(dev_copy_out(m->dev, mine, offset.data, one));
    for (int r = 0; r <= d->size; r++) at[r] = (size_t)r * one;
    return comm_all_gather(collective_comm(d->group), d->first, at);
}

static int64_t begins(const struct model_dispatch *d, int from, int64_t expert) {
    return d->first[from * (d->experts + 1) + expert];
}
/* Rows that go from one rank to the experts of another. */
static int64_t rows_to(const struct model_dispatch *d, int from, int to) {
    return begins(d, from, d->own[to].hi) - begins(d, from, d->own[to].lo);
}
/* The next round begins with the micro-batch of rank `from`: fills d->received, returns where it ends. */
static int next_round(struct model_dispatch *d, int from) {
    int to = from;
    for (bool fits = true; to < d->size && fits;) {
        for (int r = 0; r < d->size; r++) {
            int64_t sum = 0;
            for (int s = from; s <= to; s++) sum += rows_to(d, s, r);
            fits = fits && sum <= d->x.dim[0];
        }
        CHECK(fits || to > from);
        to += fits;
    }
    for (int r = 0; r < d->size; r++) {
        int64_t *const at = d->received + r * (d->size + 1);
        at[0] = 0;
        for (int s = 0; s < d->size; s++) at[s + 1] = at[s] + (s >= from && s < to ? rows_to(d, s, r) : 0);
    }
    return to;
}

/* ---- exchanges ---- */

/* Rows of a round to their experts, from `send` to `x`. */
static int to_experts(struct model *m, int from, int to, struct tensor send, struct tensor x) {
    const struct model_dispatch *const d = m->dispatch;
    const size_t row = (size_t)m->cfg.hidden * dtype_size(m->act);
    for (int s = 0; s < d->size; s++)
        for (int r = 0; r < d->size; r++) {
            d->at[s * d->size + r] = (size_t)begins(d, s, d->own[r].lo) * row;
            d->bytes[s * d->size + r] = s >= from && s < to ? (size_t)rows_to(d, s, r) * row : 0;
        }
    return collective_exchange(d->group, &(struct dev_exchange){send.data, d->at, d->bytes, x.data});
}

/* And what is in their places in x back, to `y`. */
static int to_rows(struct model *m, int from, int to, struct tensor y) {
    const struct model_dispatch *const d = m->dispatch;
    const size_t row = (size_t)m->cfg.hidden * dtype_size(m->act);
    for (int r = 0; r < d->size; r++)
        for (int s = 0; s < d->size; s++) {
            d->at[r * d->size + s] = (size_t)d->received[r * (d->size + 1) + s] * row;
            d->bytes[r * d->size + s] = s >= from && s < to ? (size_t)rows_to(d, s, r) * row : 0;
        }
    return collective_exchange(d->group, &(struct dev_exchange){d->x.data, d->at, d->bytes, y.data});
}

/* ---- this rank's experts ---- */

/* A group as this rank has it. */
struct own_group {
    struct model_group g, bias;
    struct lora_group lora;
};

static const struct model_group *own_group(const struct model *m, const struct model_group *of, struct own_group *own) {
    const struct model_dispatch *const d = m->dispatch;
    own->g = model__ep_part(of, d->rank, d->size);
    if (of->bias) {
        own->bias = model__ep_part(of->bias, d->rank, d->size);
        own->bias.vec = tensor_1d(of->bias->vec.data, m->act, own->bias.n);
        own->g.bias = &own->bias;
    }
    if (of->lora) {
        own->lora = model__ep_lora(m, of->lora, d->rank, d->size);
        for (int64_t i = 0; i < own->lora.n_parts; i++) {
            own->lora.part[i].a += d->own[d->rank].lo * own->lora.stride;
            own->lora.part[i].b += d->own[d->rank].lo * own->lora.stride;
        }
        own->g.lora = &own->lora;
    }
    return &own->g;
}

/* The rows of rank `of` in this round, and where each expert's begin. */
static int rows_of(struct model *m, int of, struct model_range *rows) {
    struct model_dispatch *const d = m->dispatch;
    const struct model_range own = d->own[d->rank];
    const int64_t *const at = d->received + d->rank * (d->size + 1);
    *rows = (struct model_range){at[of], at[of + 1]};
    for (int64_t e = own.lo; e <= own.hi; e++) d->own_offset[e - own.lo] = (int32_t)(begins(d, of, e) - begins(d, of, own.lo));
    return dev_copy_in(m->dev, d->offset.data, d->own_offset, (size_t)(own.hi - own.lo + 1) * sizeof *d->own_offset);
}

static struct tensor own_offset(const struct model_dispatch *d) {
    return model__top(d->offset, d->own[d->rank].hi - d->own[d->rank].lo + 1);
}

/* ---- forward ---- */

int model__dispatch_forward(struct model *m, int64_t l, const struct dispatch_forward *home) {
    struct model_dispatch *const d = m->dispatch;
    const struct model_layer *const y = &m->layers[l];
    struct own_group own[2];
    const struct model_experts of = {own_group(m, y->expert_gate_up, &own[0]), own_group(m, y->expert_down, &own[1])};
    TRY(gather_loads(m, home->offset));
    if (home->xn.nd) TRY(dev_gather_rows(m->dev, model__top(d->send, home->token.dim[0]), home->xn, home->token));
    for (int from = 0, to; from < d->size; from = to) {
        to = next_round(d, from);
        TRY(to_experts(m, from, to, d->send, d->x));
        for (int s = from; s < to; s++) {
            struct model_range r;
            TRY(rows_of(m, s, &r));
            const int64_t rows = r.hi - r.lo;
            const struct tensor x = model__range(d->x, r);
            const struct model_expert_rows in = {x, model__top(d->gate_up, rows), model__top(d->mlp, rows), x, own_offset(d)};
            if (rows > 0) TRY(model__experts_mlp(m, home->no_adapter, &of, &in));
        }
        TRY(to_rows(m, from, to, home->y));
    }
    return 0;
}

int model_idle(struct model *m, bool no_adapter) {
    const struct dispatch_forward none = {.no_adapter = no_adapter};
    if (!m->stream) return 0;
    TRY(model__stream_start(m));
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        TRY(model_stream_layer(m, l, l + 1));
        if (model__dispatches(m, l)) TRY(model__dispatch_forward(m, l, &none));
    }
    return model__stream_head(m);
}

/* ---- backward ---- */

/* Where this rank sums the gradient of its part of a group: own, of `of`; nothing where that is not trained. */
static int open_grads(const struct model *m, const struct model_group *of, const struct model_group *own,
                      const struct model_grad_sink *sink, struct model_grads *g) {
    const struct model_range all = model__trained(m, of, of);
    *g = (struct model_grads){0};
    if (all.lo == all.hi || own->count == 0) return 0;
    const int64_t lo = m->lora ? own->lora->part->a : own->offset;
    g->bucket = (struct model_range){lo, all.hi};
    return sink->experts(sink->ctx, all, &g->at, &g->add);
}

/* A group of this rank's experts, and where the gradients of its matrices and of its biases go. */
struct own_back {
    const struct model_group *group;
    struct model_grads grads, bias;
};

static int own_dw(struct model *m, const struct own_back *o, struct tensor dy, struct tensor x, struct tensor offset) {
    const struct model_group *const own = o->group;
    if (m->lora || own->count == 0) return 0;
    const struct tensor dw = model__grad(m, &o->grads, own);
    const struct tensor stack = {dw.data, dw.dt, 3, {own->count, own->n / own->count, own->k, 1}};
    TRY(dev_grouped_dw(m->dev, stack, dy, x, offset, o->grads.add));
    return own->bias ? dev_expert_bias_bwd(m->dev, model__grad(m, &o->bias, own->bias), dy, offset, o->bias.add) : 0;
}

struct backward {
    struct own_back gate_up, down;
};

/* Of one micro-batch's rows: x is replaced by its gradient. */
static int rows_backward(struct model *m, const struct backward *w, struct tensor x, struct tensor dy, struct tensor offset) {
    const struct model_dispatch *const d = m->dispatch;
    const int64_t n = x.dim[0];
    const struct tensor gate_up = model__top(d->gate_up, n), mlp = model__top(d->mlp, n);
    const struct tensor dgate_up = model__top(d->dgate_up, n), dmlp = model__top(d->dmlp, n);
    if (n > 0) TRY(model__experts_inner(m, w->gate_up.group, x, gate_up, mlp, offset));
    TRY(own_dw(m, &w->down, dy, mlp, offset));
    if (n > 0)
        TRY(model__expert_linear_bwd(m, &(struct expert_linear_bwd_args){w->down.group, dmlp, dy, mlp, offset, &w->down.grads}));
    if (n > 0) TRY(model__experts_gate_bwd(m, dgate_up, dmlp, gate_up));
    TRY(own_dw(m, &w->gate_up, dgate_up, x, offset));
    if (n > 0)
        TRY(model__expert_linear_bwd(
            m, &(struct expert_linear_bwd_args){w->gate_up.group, x, dgate_up, x, offset, &w->gate_up.grads}));
    return 0;
}

static int open_back(struct model *m, const struct model_group *of, const struct model_grad_sink *sink, struct own_group *own,
                     struct own_back *o) {
    o->group = own_group(m, of, own);
    TRY(open_grads(m, of, o->group, sink, &o->grads));
    if (of->bias && !m->lora) TRY(open_grads(m, of->bias, &own->bias, sink, &o->bias));
    if (!m->lora || !o->grads.at || o->grads.add) return 0;
    return dev_zero(m->dev, o->grads.at, (size_t)(own->lora.count * own->lora.stride) * sizeof(float));
}

int model__dispatch_backward(struct model *m, int64_t l, const struct dispatch_backward *home, const struct model_grad_sink *sink) {
    struct model_dispatch *const d = m->dispatch;
    struct own_group own[2];
    struct backward w = {0};
    TRY(open_back(m, m->layers[l].expert_gate_up, sink, &own[0], &w.gate_up));
    TRY(open_back(m, m->layers[l].expert_down, sink, &own[1], &w.down));
    TRY(gather_loads(m, home->offset));
    if (home->xn.nd) {
        TRY(dev_gather_rows(m->dev, model__top(d->send, home->token.dim[0]), home->xn, home->token));
        TRY(dev_copy(m->dev, d->dsend.data, home->dy.data, (size_t)tensor_count(home->dy) * dtype_size(m->act)));
    }
    for (int from = 0, to; from < d->size; from = to) {
        to = next_round(d, from);
        TRY(to_experts(m, from, to, d->send, d->x));
        TRY(to_experts(m, from, to, d->dsend, d->dy));
        for (int s = from; s < to; s++) {
            struct model_range r;
            if (begins(d, s, d->experts) == 0) continue; /* it has no micro-batch in this wave */
            TRY(rows_of(m, s, &r));
            TRY(rows_backward(m, &w, model__range(d->x, r), model__range(d->dy, r), own_offset(d)));
            w.gate_up.grads.add = w.gate_up.bias.add = w.down.grads.add = w.down.bias.add = true;
        }
        TRY(to_rows(m, from, to, home->dx));
    }
    return 0;
}

int model_idle_back_layer(struct model *m, int64_t l, const struct model_grad_sink *sink) {
    const struct dispatch_forward no_rows = {0};
    const struct dispatch_backward none = {0};
    TRY(model_stream_layer(m, l, l - 1));
    if (!model__dispatches(m, l)) return 0;
    if (l != m->cfg.n_layers - 1 && l >= m->dispatch->keep_all) TRY(model__dispatch_forward(m, l, &no_rows)); /* computed again */
    return model__dispatch_backward(m, l, &none, sink);
}

int model_idle_back(struct model *m) {
    CHECK(!m->dispatch); /* the gradients of its experts need a place */
    for (int64_t l = m->cfg.n_layers - 1; l >= 0; l--) TRY(model_stream_layer(m, l, l - 1));
    return 0;
}
