/* experts.c - the MLP of a layer with experts: router, the chosen experts of each token, their combination; forward and backward.
 *
 * Rows are sorted by expert on the device, and the grouped GEMMs find them there, so a CUDA graph of a decoding step serves every
 * load. Nothing is dropped, and no expert has a capacity. Where the gradient has several summands (struct model_parts), the rows of
 * each part are sorted by themselves. The grouped GEMMs with adapters and of a
 * quantised base are expert_linear.c's.
 * Invariant: a token's result depends on that token alone, so rollout and training choose the same experts with the same bits. */
#include "model/model_int.h"

#include "base/err.h"

/* ---- buffers ---- */

static int64_t slots_of(const struct model_config *c, int64_t rows) { return rows * c->n_choices; }

/* Whether experts are not on other ranks: those of an MTP layer never are. */
static bool computed_here(const struct model_acts *a, const struct model_config *c) { return !a->keep.experts || c->mtp; }

void model__experts_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    if (!c->n_experts) return;
    a->experts.x = model__take2(m, act, slots_of(c, a->max_rows), c->hidden);
    if (!a->keep.train) return;
    a->experts.offsets = model__take2(m, DT_I32, model_layer_places(c) * MODEL_MOST_PARTS, c->n_experts + 1);
    a->experts.scored = model__take2(m, DT_I32, c->n_layers * MODEL_MOST_PARTS, c->n_experts + 1);
    a->experts.load = model__take2(m, DT_F32, c->n_layers, c->n_experts);
    a->experts.loss = model__take2(m, DT_F32, c->n_layers, a->max_rows);
    a->experts.z_loss = model__take2(m, DT_F32, c->n_layers, a->max_rows);
}

void model__experts_stage_layout(struct model_expert_stage *e, const struct model_acts *a, struct arena *m,
                                 const struct model_config *c, enum dtype act) {
    const int64_t rows = a->max_rows, slots = slots_of(c, rows);
    if (!c->n_experts) return;
    e->logits = model__take2(m, c->family->experts.f32_logits ? DT_F32 : act, rows, c->n_experts);
    e->expert = model__take2(m, DT_I32, rows, c->n_choices);
    e->weight = model__take2(m, c->family->experts.f32_weights ? DT_F32 : act, rows, c->n_choices);
    e->offset = model__take2(m, DT_I32, a->keep.train ? MODEL_MOST_PARTS : 1, c->n_experts + 1);
    e->token = model__take1(m, DT_I32, slots);
    e->row = model__take2(m, DT_I32, rows, c->n_choices);
    if (computed_here(a, c)) e->gate_up = model__take2(m, act, slots, 2 * c->expert_ffn);
    if (computed_here(a, c)) e->mlp = model__take2(m, act, slots, c->expert_ffn);
    e->y = a->keep.train ? model__take2(m, act, slots, c->hidden) : a->experts.x;
}

void model__experts_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t rows = a->max_rows, slots = slots_of(c, rows);
    if (!c->n_experts) return;
    if (computed_here(a, c)) a->experts.dmlp = model__take2(m, act, slots, c->expert_ffn);
    if (computed_here(a, c)) a->experts.dgate_up = model__take2(m, act, slots, 2 * c->expert_ffn);
    a->experts.dweight = model__take2(m, DT_F32, rows, c->n_choices);
    a->experts.dlogits = model__take2(m, act, rows, c->n_experts);
    a->experts.dx = model__take2(m, DT_F32, rows, c->hidden);
}

/* A stage's buffers of n tokens. */
static struct model_expert_stage stage_of(const struct model_acts *a, const struct model_config *c, int64_t l, int64_t n) {
    struct model_expert_stage e = a->stages[l].experts;
    const int64_t slots = slots_of(c, n);
    e.logits = model__top(e.logits, n);
    e.expert = model__top(e.expert, n);
    e.weight = model__top(e.weight, n);
    e.token = model__top(e.token, slots);
    e.row = model__top(e.row, n);
    e.gate_up = model__top(e.gate_up, slots);
    e.mlp = model__top(e.mlp, slots);
    e.y = model__top(e.y, slots);
    return e;
}

/* Of the stage's buffers of n tokens those of the tokens r, which are part i. */
static struct model_expert_stage part_of(const struct model_expert_stage *s, const struct model_config *c, int i,
                                         struct model_range r) {
    const struct model_range slots = {slots_of(c, r.lo), slots_of(c, r.hi)};
    struct model_expert_stage e = *s;
    e.expert = model__range(e.expert, r);
    e.weight = model__range(e.weight, r);
    e.row = model__range(e.row, r);
    e.token = model__range(e.token, slots);
    e.gate_up = model__range(e.gate_up, slots);
    e.mlp = model__range(e.mlp, slots);
    e.y = model__range(e.y, slots);
    e.offset = tensor_1d((int32_t *)e.offset.data + i * (c->n_experts + 1), DT_I32, c->n_experts + 1);
    return e;
}

/* The parts of a forward pass' rows that are here. */
static int parts_of(const struct model_batch *b) { return b->parts ? b->parts->n : 1; }
static struct model_range rows_of(const struct model_batch *b, int i) {
    return parts_of(b) > 1 ? (struct model_range){b->parts->cut[i], b->parts->cut[i + 1]} : (struct model_range){0, b->n_rows};
}

static struct route_args route_of(const struct model *m, const struct model_layer *y, const struct model_expert_stage *e) {
    return (struct route_args){.logits = e->logits,
                               .expert = e->expert,
                               .weight = e->weight,
                               .normalize = m->cfg.norm_topk,
                               .sigmoid = m->cfg.family->experts.sigmoid,
                               .bias = y->route_bias ? y->route_bias->dev : TENSOR_NONE,
                               .groups = m->cfg.expert_groups,
                               .top_groups = m->cfg.top_groups,
                               .scale = (float)m->cfg.route_scale};
}

/* ---- forward ---- */

/* A layer's load, for model_router_load: of part i. */
static int keep_offset(struct dev *d, struct tensor kept, int64_t l, int i, struct tensor offset) {
    const struct tensor at = tensor_rows(kept, l * MODEL_MOST_PARTS + i, 1);
    return dev_copy(d, at.data, offset.data, (size_t)tensor_count(offset) * sizeof(int32_t));
}

/* Whether something but the scores decides on choices. */
static bool given_or_moved(const struct route_args *route) { return route->given.data || route->bias.data || route->groups > 1; }

/* The load as it were without. In the buffers of the choices, which come later. */
static int keep_scored(struct model *m, const struct model_batch *b, const struct model_acts *a, int64_t l,
                       const struct route_args *route, const struct model_expert_stage *s) {
    const struct route_args plain = {.logits = s->logits, .expert = s->expert, .weight = s->weight, .sigmoid = route->sigmoid};
    TRY(dev_route_fwd(m->dev, &plain));
    for (int i = 0; i < parts_of(b); i++) {
        const struct model_expert_stage e = part_of(s, &m->cfg, i, rows_of(b, i));
        TRY(dev_expert_sort(m->dev, e.offset, e.token, e.row, e.expert));
        TRY(keep_offset(m->dev, a->experts.scored, l, i, e.offset));
    }
    return 0;
}

/* Layer l's part of a batch's recorded choices. */
static struct tensor routes_of(const struct model *m, const struct model_batch *b, int64_t l) {
    const struct tensor r = b->routes;
    int64_t at = 0;
    for (int64_t i = 0; i < l && r.data; i++) at += m->layers[i].router != NULL;
    return r.data ? tensor_2d((int32_t *)r.data + at * r.dim[1] * r.dim[2], DT_I32, b->n_rows, r.dim[2]) : TENSOR_NONE;
}

/* From xn to y; token: where rows come from. */
static int experts_mlp(struct model *m, const struct model_batch *b, const struct model_layer *y, struct tensor xn,
                       struct tensor token, const struct model_expert_rows *r) {
    TRY(dev_gather_rows(m->dev, r->x, xn, token));
    return model__experts_mlp(m, b->no_adapter, &(struct model_experts){y->expert_gate_up, y->expert_down}, r);
}

/* The same where ranks have the experts: this rank's rows of r, then all outputs. */
static int split_experts_mlp(struct model *m, const struct model_batch *b, const struct model_layer *y, struct tensor xn,
                             struct tensor token, const struct model_expert_rows *r) {
    struct model_ep p;
    TRY(model__ep_begin(m, r->offset, &p));
    const int64_t lo = p.rows.lo, n = p.rows.hi - lo;
    const struct model_expert_rows own = {model__top(r->x, n), model__top(r->gate_up, n), model__top(r->mlp, n),
                                          model__ep_outputs(m, p.rows), p.offset};
    if (n > 0) TRY(experts_mlp(m, b, y, xn, tensor_rows(token, lo, n), &own));
    return model__ep_gather(m, &p);
}

/* The experts of part i's tokens. scored: their load is that of the scores alone. */
static int experts_part(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, int i, bool scored) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const struct model_range r = rows_of(b, i), slots = {slots_of(&m->cfg, r.lo), slots_of(&m->cfg, r.hi)};
    const struct model_expert_stage all = stage_of(a, &m->cfg, l, b->n_rows), e = part_of(&all, &m->cfg, i, r);
    const struct tensor xn = model__range(a->stages[l].xn2, r), x = model__range(a->experts.x, slots);
    TRY(dev_expert_sort(d, e.offset, e.token, e.row, e.expert));
    if (a->keep.train) TRY(keep_offset(d, a->experts.offsets, l, i, e.offset));
    if (scored) TRY(keep_offset(d, a->experts.scored, l, i, e.offset));
    const struct model_expert_rows rows = {x, e.gate_up, e.mlp, e.y, e.offset};
    if (m->tp) return split_experts_mlp(m, b, y, xn, e.token, &rows);
    if (!model__dispatches(m, l)) return experts_mlp(m, b, y, xn, e.token, &rows);
    return model__dispatch_forward(m, l, &(struct dispatch_forward){xn, e.token, e.offset, e.y, b->no_adapter});
}

int model__experts_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    struct dev *d = m->dev;
    const int64_t n = b->n_rows;
    const struct tensor routes = routes_of(m, b, l);
    const struct model_layer *y = &m->layers[l];
    const struct model_expert_stage e = stage_of(a, &m->cfg, l, n);
    const struct tensor xn = model__top(a->stages[l].xn2, n);
    struct route_args route = route_of(m, y, &e);
    if (!b->routes_kept) route.given = routes;
    TRY(dev_matmul_fwd(d, e.logits, xn, y->router->mat, model__vec(y->router->bias), false));
    const bool scored = a->experts.by_scores && a->keep.train && l < m->cfg.n_layers, moved = scored && given_or_moved(&route);
    if (moved) TRY(keep_scored(m, b, a, l, &route, &e));
    TRY(dev_route_fwd(d, &route));
    if (b->routes_kept) TRY(dev_copy(d, routes.data, e.expert.data, (size_t)tensor_count(e.expert) * sizeof(int32_t)));
    a->experts.n_parts = parts_of(b);
    for (int i = 0; i < parts_of(b); i++) TRY(experts_part(m, b, a, l, i, scored && !moved));
    return m->tp ? 0 : model__shared_stage(m, b, a, l);
}

static struct combine_args combine_of(const struct model_expert_stage *e) {
    return (struct combine_args){.y = e->y, .row = e->row, .weight = e->weight};
}

int model__experts_output(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    const int64_t n = b->n_rows;
    const struct model_expert_stage all = stage_of(a, &m->cfg, l, n);
    for (int i = 0; i < parts_of(b); i++) {
        const struct model_range r = rows_of(b, i);
        const struct model_expert_stage e = part_of(&all, &m->cfg, i, r);
        struct combine_args c = combine_of(&e);
        c.out = model__range(a->x[l + 1], r);
        c.from = model__range(a->stages[l].x_mid, r);
        if (m->tp) c.y = model__ep_outputs(m, (struct model_range){0, slots_of(&m->cfg, n)});
        TRY(dev_combine_fwd(m->dev, &c));
    }
    if (m->tp) TRY(model__shared_stage(m, b, a, l)); /* behind the outputs that have been gathered */
    return model__shared_output(m, b, a, l);
}

/* ---- backward ---- */

/* The gradient of experts' matrices, (E, n, k). */
static struct tensor stack_grad(const struct model *m, const struct model_grads *g, const struct model_group *group) {
    const struct tensor t = model__grad(m, g, group);
    return (struct tensor){t.data, t.dt, 3, {group->count, group->n / group->count, group->k, 1}};
}

int model__router_dw(struct model *m, const struct model_grads *g, const struct model_group *router, struct tensor dlogits,
                     struct tensor xn) {
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        const struct tensor dw = model__grad(m, &own, router), db = model__grad(m, &own, router->bias);
        const struct model_range r = model__part(g, i, xn.dim[0]);
        if (!m->frozen_routers) TRY(dev_matmul_dw(m->dev, dw, db, model__range(dlogits, r), model__range(xn, r), own.add));
        if (!m->frozen_routers || own.add) continue;
        if (router->bias) TRY(dev_zero(m->dev, db.data, (size_t)tensor_count(db) * sizeof(float)));
        TRY(dev_zero(m->dev, dw.data, (size_t)tensor_count(dw) * sizeof(float)));
    }
    return 0;
}

/* The losses of layer l's router. */
static int balance_backward(struct model *m, const struct model_acts *a, int64_t l, struct tensor logits, struct tensor dlogits) {
    const int64_t n = logits.dim[0], at = l * a->max_rows;
    struct balance_args b = {.logits = logits,
                             .load = tensor_1d((float *)a->experts.load.data + l * m->cfg.n_experts, DT_F32, m->cfg.n_experts),
                             .sigmoid = m->cfg.family->experts.sigmoid,
                             .z = a->experts.z,
                             .dlogits = dlogits,
                             .loss = tensor_1d((float *)a->experts.loss.data + at, DT_F32, n)};
    if (b.z > 0) b.z_loss = tensor_1d((float *)a->experts.z_loss.data + at, DT_F32, n);
    return dev_balance_bwd(m->dev, &b);
}

/* Of experts' matrices, and of their biases. */
static int experts_dw(struct model *m, const struct model_grads *g, const struct model_group *group, struct tensor dy,
                      struct tensor x, struct tensor offset) {
    TRY(dev_grouped_dw(m->dev, stack_grad(m, g, group), dy, x, offset, g->add));
    return group->bias ? dev_expert_bias_bwd(m->dev, model__grad(m, g, group->bias), dy, offset, g->add) : 0;
}

/* Of part i, the tokens r: to a->experts.x, the gradient of the experts' inputs, and dweight. */
static int part_backward(struct model *m, struct model_acts *a, int64_t l, struct tensor dy_all, const struct model_grads *g,
                         int i) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const struct model_range r = model__part(g, i, dy_all.dim[0]), slots = {slots_of(&m->cfg, r.lo), slots_of(&m->cfg, r.hi)};
    const struct model_expert_stage all = stage_of(a, &m->cfg, l, dy_all.dim[0]), e = part_of(&all, &m->cfg, i, r);
    const struct tensor dy = model__range(dy_all, r), xn = model__range(a->stages[l].xn2, r), dexp = e.y;
    const struct tensor x = model__range(a->experts.x, slots), dweight = model__range(a->experts.dweight, r);
    const struct tensor dmlp = model__range(a->experts.dmlp, slots), dgate_up = model__range(a->experts.dgate_up, slots);
    const struct model_grads own = model__summand(g, i);
    const struct combine_args c = combine_of(&e);
    TRY(dev_combine_bwd(d, &c, dy, dexp, dweight)); /* in the place of y */
    if (model__dispatches(m, l))
        return model__dispatch_backward(m, l, &(struct dispatch_backward){xn, e.token, e.offset, dexp, x}, g->sink);
    if (!m->lora) TRY(experts_dw(m, &own, y->expert_down, dexp, e.mlp, e.offset));
    TRY(model__expert_linear_bwd(m, &(struct expert_linear_bwd_args){y->expert_down, dmlp, dexp, e.mlp, e.offset, &own}));
    TRY(model__experts_gate_bwd(m, dgate_up, dmlp, e.gate_up));
    if (!m->lora || y->expert_gate_up->lora) TRY(dev_gather_rows(d, x, xn, e.token));
    if (!m->lora) TRY(experts_dw(m, &own, y->expert_gate_up, dgate_up, x, e.offset));
    /* x: its gradient */
    return model__expert_linear_bwd(m, &(struct expert_linear_bwd_args){y->expert_gate_up, x, dgate_up, x, e.offset, &own});
}

int model__experts_backward(struct model *m, struct model_acts *a, int64_t l, struct tensor dy, const struct model_grads *g) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const int64_t n = dy.dim[0];
    const struct model_expert_stage e = stage_of(a, &m->cfg, l, n);
    const struct tensor xn = model__top(a->stages[l].xn2, n), dx = model__top(a->experts.dx, n);
    const struct tensor dweight = model__top(a->experts.dweight, n), dlogits = model__top(a->experts.dlogits, n);
    const struct route_args route = route_of(m, y, &e);
    for (int i = 0; i < model__n_parts(g); i++) TRY(part_backward(m, a, l, dy, g, i));
    TRY(dev_route_bwd(d, &route, dlogits, dweight));
    if (a->experts.balanced && l < m->cfg.n_layers) TRY(balance_backward(m, a, l, e.logits, dlogits));
    if (!m->lora) TRY(model__router_dw(m, g, y->router, dlogits, xn));
    TRY(dev_matmul_dx(d, dx, dlogits, y->router->mat, false));
    TRY(model__shared_backward(m, a, l, dy, dx, g));
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_range r = model__part(g, i, n), slots = {slots_of(&m->cfg, r.lo), slots_of(&m->cfg, r.hi)};
        TRY(dev_combine_fwd(d, &(struct combine_args){.out = model__range(a->dxn, r),
                                                      .from = model__range(dx, r),
                                                      .y = model__range(a->experts.x, slots),
                                                      .row = model__range(e.row, r)}));
    }
    return 0;
}
