/* optimizer.c - optimizers on the fp32 master, clipping by global norm, schedules.
 *
 * AdamW, its relatives and SGD are here, muon.c and adamw_8bit.c have the others,
 * optimizer_offload.c has the former on what is in host memory.
 * One learning rate and one weight decay for all parameters, as verl's FSDP workers
 * have it.  The flat master is cut into runs, each with its rule and its place in
 * the state arrays.
 * Invariant: a gradient that is not finite changes nothing, and is named. */
#include "model/optim/optimizer.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "model/files/load.h"
#include "model/lora/lora_int.h"
#include "model/master_weights.h"
#include "model/optim/optimizer_int.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- schedules: verl/utils/torch_functional.py; linear is Megatron's lr_decay_style ---- */

static double cosine_wave(const struct optim_config *c, double progress) { return cos(M_PI * c->num_cycles * 2 * progress); }

/* The factor after warmup, step counted from its end, of n steps in all. */
static double decay_factor(const struct optim_config *c, int64_t step, int64_t n) {
    const double at_step = (double)step / (double)(n > 1 ? n : 1);
    const double min = c->min_lr_ratio,
                 progress = c->decay_steps > 0 ? fmin(1, at_step) : at_step; /* Megatron's ends, verl's goes on */
    if (strcmp(c->schedule, "cosine") == 0) return fmax(min, cosine_wave(c, progress) * (1 - min) * 0.5 + (1 + min) * 0.5);
    if (strcmp(c->schedule, "linear") == 0) return fmax(min, 1 - (1 - min) * progress);
    if (strcmp(c->schedule, "wsd") == 0) { /* stable for 9/10, then half a cosine */
        const int64_t all = n > 0 ? n : 0, stable = (int64_t)((double)all * 0.9), down = all - stable;
        if (step < stable) return 1;
        if (step >= n) return min;
        const double at = (double)(step - stable) / (double)(down > 1 ? down : 1);
        return (1 - min) * fmax(0, 0.5 * (1 + cosine_wave(c, at))) + min;
    }
    return 1; /* constant */
}

double optim_lr(const struct optim_config *c, int64_t step) {
    const int64_t w = c->warmup_steps;
    if (step >= w) return c->lr * decay_factor(c, step - w, c->total_steps - w);
    const double up = (double)step / (double)w;
    /* verl starts the warmup elsewhere than 0 in the cosine schedule alone */
    const double from = strcmp(c->schedule, "cosine") == 0 ? c->init_lr_ratio : 0;
    return c->lr * (from + (1 - from) * up);
}

const char *optim_kind_name(enum optim_kind k) {
    static const char *const text[] = {"AdamW", "AdamW8bit", "SGD", "Muon", "Adam", "RAdam", "RMSprop"};
    return text[k];
}

/* ---- state ---- */

enum { MIN_QUANTIZED = 4096 }; /* smaller tensors keep f32 moments, as bitsandbytes has it */

static enum optim_kind rule_of(const struct model *m, const struct model_param *p, enum optim_kind kind) {
    const enum model_role role = m->groups[p->group].role;
    if (kind == OPTIM_MUON && role != MODEL_LINEAR && role != MODEL_EXPERTS) return OPTIM_ADAMW;
    if (kind == OPTIM_ADAMW8 && (p->nd != 2 || p->rows * p->cols < MIN_QUANTIZED)) return OPTIM_ADAMW;
    return kind;
}

/* The next stretch of o's arrays for elements [lo, lo + n) of one parameter. */
static struct optim_run place(struct optim *o, const struct model_param *p, int64_t lo, int64_t n, enum optim_kind rule) {
    struct optim_run r = {.rule = rule,
                          .offset = p->offset + lo,
                          .n = n,
                          .at = o->n_own,
                          .rows = p->rows,
                          .cols = p->cols,
                          .seg = o->n_segments,
                          .m_at = -1,
                          .v_at = -1,
                          .x_at = -1,
                          .q_at = -1,
                          .b_at = -1};
    CHECK(rule != OPTIM_MUON || n == p->rows * p->cols);
    o->n_own += n;
    if (rule == OPTIM_ADAMW8) {
        r.q_at = o->n_q;
        r.b_at = o->n_b;
        o->n_q += r.n;
        o->n_b += (r.n + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK;
        return r;
    }
    if ((rule != OPTIM_SGD && rule != OPTIM_RMSPROP) || o->momentum) {
        r.m_at = o->n_m;
        o->n_m += r.n;
    }
    if (!optim__adaptive(rule)) return r;
    r.v_at = o->n_v;
    o->n_v += r.n;
    if (!o->third) return r;
    r.x_at = o->n_x;
    o->n_x += r.n;
    return r;
}

/* Neighbours under an elementwise rule become one run, so that AdamW and SGD alone are one call of the device. */
static void add_run(struct optim *o, struct optim_run r) {
    struct optim_run *last = o->n_runs > 0 ? &o->runs[o->n_runs - 1] : NULL;
    const bool joins = last && last->rule == r.rule && last->frozen == r.frozen &&
                       (optim__adaptive(r.rule) || r.rule == OPTIM_SGD) && last->offset + last->n == r.offset;
    if (joins) {
        last->n += r.n;
        last->n_seg += r.n_seg;
    } else {
        o->runs[o->n_runs++] = r;
    }
}

/* The segments of a range, and a run for each of its parameters. */
static void add_range(struct optim *o, const struct model *m, struct model_range own) {
    for (int64_t i = model_param_at(m, own.lo); i < m->n_train_params && m->train_params[i].offset < own.hi; i++) {
        const struct model_param *p = &m->train_params[i];
        const int64_t end = p->offset + p->rows * p->cols, lo = own.lo > p->offset ? own.lo : p->offset,
                      hi = own.hi < end ? own.hi : end;
        if (lo >= hi) continue;
        CHECK((lo - p->offset) % DEV_SEGMENT == 0 && (hi == end || (hi - p->offset) % DEV_SEGMENT == 0));
        struct optim_run r = place(o, p, lo - p->offset, hi - lo, rule_of(m, p, o->kind));
        r.n_seg = (r.n + DEV_SEGMENT - 1) / DEV_SEGMENT;
        const struct model_group *const g = &m->groups[p->group];
        r.frozen =
            m->frozen_routers && !m->lora && (g->role == MODEL_ROUTER || (g->role == MODEL_BIAS && g[-1].role == MODEL_ROUTER));
        for (int64_t k = 0; o->segments && k < r.n_seg; k++) {
            int64_t *s = &o->segments[2 * (r.seg + k)];
            s[0] = r.at + k * DEV_SEGMENT;
            s[1] = r.n - k * DEV_SEGMENT < DEV_SEGMENT ? r.n - k * DEV_SEGMENT : DEV_SEGMENT;
        }
        o->n_segments += r.n_seg;
        add_run(o, r);
    }
}

/* own NULL: all that m trains. Without o->segments they are counted alone, since a plan may be of any shape. */
static void make_runs(struct optim *o, const struct model *m, const struct model_range *own, int64_t n) {
    const struct model_range all = {0, m->n_train};
    o->runs = xcalloc((size_t)(m->n_train_params + n), sizeof *o->runs); /* a range's end splits one parameter */
    if (!own) add_range(o, m, all);
    for (int64_t i = 0; own && i < n; i++) add_range(o, m, own[i]);
}

/* a: the device's block; h: the host's, or measuring. */
static void layout(struct optim *o, struct dev *dev, enum dtype act, struct arena *a, struct arena *h) {
    struct arena *const arrays = o->host_state ? h : a;
    if (o->n_m) o->m = arena_take(arrays, (size_t)o->n_m * 4);
    if (o->n_v) o->v = arena_take(arrays, (size_t)o->n_v * 4);
    if (o->n_x) o->x = arena_take(arrays, (size_t)o->n_x * 4);
    optim__adamw8_layout(o, a, arrays);
    optim__muon_layout(o, dev, act, a);
    optim__pieces_layout(o, a);
    o->d_segments = arena_take(a, (size_t)o->n_segments * 2 * sizeof *o->d_segments);
    o->d_sums = arena_take(a, (size_t)o->n_segments * sizeof *o->d_sums);
    o->block_bytes = a->used;
    o->host_bytes = h->used;
}

static bool keeps_third(const struct optim_config *c) {
    const bool adam = c->kind == OPTIM_ADAMW || c->kind == OPTIM_ADAM;
    return adam ? c->amsgrad : c->kind == OPTIM_RMSPROP && c->centered;
}

static size_t part_bytes(const struct model *m, const struct optim_config *c, const struct model_range *own, int64_t n,
                         size_t *host) {
    struct optim o = {.kind = c->kind,
                      .momentum = c->momentum != 0,
                      .third = keeps_third(c),
                      .host_state = c->host_state,
                      .host_master = c->host_master};
    struct arena a = {0}, h = {0};
    make_runs(&o, m, own, n);
    layout(&o, m->dev, m->act, &a, &h);
    free(o.runs);
    if (host) *host = o.host_bytes;
    return o.block_bytes;
}

size_t optim_part_bytes(const struct model *m, const struct optim_config *c, struct model_shard s, size_t *host) {
    size_t most = 0, most_host = 0;
    struct model_owners o;
    model_own_all(m, s, &o);
    for (int r = 0; r < s.size; r++) {
        size_t on_host;
        const size_t bytes = part_bytes(m, c, o.own + o.at[r], o.at[r + 1] - o.at[r], &on_host);
        if (bytes > most) most = bytes;
        if (on_host > most_host) most_host = on_host;
    }
    model_owners_free(&o);
    if (host) *host = most_host;
    return most;
}

int optim_plan(struct optim_plan *p, const struct model_config *c, struct dev *dev, enum dtype act, const struct lora_config *lora,
               const struct optim_config *o) {
    struct arena a = {0};
    struct model *m;
    TRY(model_shape(&m, c, dev, act, QUANT_NONE, lora));
    if (lora) model__lora_layout(m->lora, m, &a);
    *p = (struct optim_plan){.adapter = a.used, .master = (size_t)m->n_train * sizeof(float), .n_train = m->n_train};
    p->moments = part_bytes(m, o, NULL, 0, &p->host);
    model_shape_free(m);
    return 0;
}

static int fill_books(struct optim *o, struct dev *dev) {
    float books[2][256];
    if (!o->book) return 0;
    optim__dynamic_book(true, books[0]);
    optim__dynamic_book(false, books[1]);
    return dev_copy_in(dev, o->book, books, sizeof books);
}

int optim_create(struct optim **out, struct model *m, const struct optim_config *c) {
    return optim_create_part(out, m, c, NULL, 0);
}

int optim_create_part(struct optim **out, struct model *m, const struct optim_config *c, const struct model_range *own, int64_t n) {
    int rc = 0;
    struct arena a = {0}, h = {0};
    struct optim *o = xcalloc(1, sizeof *o);
    CHECK(m->master != NULL && c->host_master == ((m->flags & MODEL_HOST_MASTER) != 0));
    const struct dev_ops *ops = m->dev->ops;
    const bool wants_8bit = c->kind == OPTIM_ADAMW8, wants_axpby = c->kind == OPTIM_SGD || c->kind == OPTIM_MUON;
    const bool wants_adaptive = (optim__adaptive(c->kind) && c->kind != OPTIM_ADAMW) || keeps_third(c);
    if ((wants_8bit && (!ops->quant8 || !ops->dequant8)) || (wants_axpby && !ops->axpby) || (wants_adaptive && !ops->adaptive))
        FAILG(fail, ERR_UNSUPPORTED, "the optimizer %s is unsupported on the %s device; use AdamW, or trainer.device=cpu",
              optim_kind_name(c->kind), ops->name);
    o->kind = c->kind;
    o->host_state = c->host_state;
    o->host_master = c->host_master;
    o->segments = xmalloc((size_t)model_n_segments(m) * 2 * sizeof *o->segments);
    o->momentum = c->momentum != 0;
    o->third = keeps_third(c);
    make_runs(o, m, own, n);
    o->sums = xmalloc((size_t)o->n_segments * sizeof *o->sums);
    layout(o, m->dev, m->act, &a, &h);
    TRYG(dev_alloc(m->dev, o->block_bytes, &o->block), fail);
    TRYG(dev_zero(m->dev, o->block, o->block_bytes), fail);
    TRYG(dev_host_alloc(m->dev, o->host_bytes, &o->host_block), fail);
    if (o->host_bytes) TRYG(dev_zero(m->dev, o->host_block, o->host_bytes), fail);
    a = (struct arena){.base = o->block, .cap = o->block_bytes};
    h = (struct arena){.base = o->host_block, .cap = o->host_bytes};
    layout(o, m->dev, m->act, &a, &h);
    TRYG(fill_books(o, m->dev), fail);
    TRYG(dev_copy_in(m->dev, o->d_segments, o->segments, (size_t)o->n_segments * 2 * sizeof *o->segments), fail);
    *out = o;
    return 0;
fail:
    optim_destroy(o, m);
    return rc;
}

void optim_destroy(struct optim *o, struct model *m) {
    if (!o) return;
    dev_free(m->dev, o->block, o->block_bytes);
    dev_host_free(m->dev, o->host_block, o->host_bytes);
    free(o->runs);
    free(o->segments);
    free(o->sums);
    free(o);
}

static void all_arrays(const struct optim *o, struct optim_array out[OPTIM_MAX_ARRAYS]) {
    const bool momentum = o->kind == OPTIM_SGD || o->kind == OPTIM_MUON || o->kind == OPTIM_RMSPROP, rms = o->kind == OPTIM_RMSPROP;
    const struct optim_array all[OPTIM_MAX_ARRAYS] = {
        {momentum ? "momentum_buffer" : "exp_avg", DT_F32, o->n_m, o->m},
        {rms ? "square_avg" : "exp_avg_sq", DT_F32, o->n_v, o->v},
        {"exp_avg_code", DT_U8, o->n_q, o->m_code},
        {"exp_avg_scale", DT_F32, o->n_b, o->m_scale},
        {"exp_avg_sq_code", DT_U8, o->n_q, o->v_code},
        {"exp_avg_sq_scale", DT_F32, o->n_b, o->v_scale},
        {rms ? "grad_avg" : "max_exp_avg_sq", DT_F32, o->n_x, o->x},
    };
    memcpy(out, all, sizeof all);
}

int optim_arrays(const struct optim *o, struct optim_array out[OPTIM_MAX_ARRAYS]) {
    struct optim_array all[OPTIM_MAX_ARRAYS];
    int n = 0;
    all_arrays(o, all);
    for (int i = 0; i < OPTIM_MAX_ARRAYS; i++)
        if (all[i].n > 0) out[n++] = all[i];
    return n;
}

void optim_set_array(struct optim *o, const struct optim_array *a, void *data) {
    const struct {
        const char *name;
        void **data;
        int64_t *n;
    } members[] = {{"exp_avg", (void **)&o->m, &o->n_m},
                   {"momentum_buffer", (void **)&o->m, &o->n_m},
                   {"exp_avg_sq", (void **)&o->v, &o->n_v},
                   {"square_avg", (void **)&o->v, &o->n_v},
                   {"max_exp_avg_sq", (void **)&o->x, &o->n_x},
                   {"grad_avg", (void **)&o->x, &o->n_x},
                   {"exp_avg_code", (void **)&o->m_code, &o->n_q},
                   {"exp_avg_scale", (void **)&o->m_scale, &o->n_b},
                   {"exp_avg_sq_code", (void **)&o->v_code, &o->n_q},
                   {"exp_avg_sq_scale", (void **)&o->v_scale, &o->n_b}};
    size_t i = 0;
    while (i < sizeof members / sizeof *members && strcmp(members[i].name, a->name) != 0) i++;
    CHECK(i < sizeof members / sizeof *members);
    *members[i].data = data;
    *members[i].n = a->n;
}

/* The places of a run in master and the arrays of all_arrays; -1: none. */
static void places_of(const struct optim_run *r, int64_t at, int64_t out[OPTIM_MAX_ARRAYS + 1]) {
    const int64_t places[] = {at, r->m_at, r->v_at, r->q_at, r->b_at, r->q_at, r->b_at, r->x_at};
    memcpy(out, places, sizeof places);
}

/* Adds array k's piece of the run r, which is in the run `whole` of the model's optimizer. */
static void add_piece(struct optim_piece *p, int64_t *n, int array, int k, const struct optim_run *r,
                      const struct optim_run *whole) {
    const bool blocks = k == 4 || k == 6;
    const int64_t unit = blocks ? DEV_QUANT_BLOCK : 1;
    int64_t here[OPTIM_MAX_ARRAYS + 1], there[OPTIM_MAX_ARRAYS + 1];
    places_of(r, r->at, here);
    places_of(whole, whole->at, there);
    if (here[k] < 0) return;
    const struct optim_piece x = {array, there[k] + (r->offset - whole->offset) / unit, here[k], (r->n + unit - 1) / unit};
    struct optim_piece *last = *n > 0 ? &p[*n - 1] : NULL;
    if (last && last->array == array && last->at + last->n == x.at && last->own + last->n == x.own) last->n += x.n;
    else p[(*n)++] = x;
}

int optim_pieces(const struct optim *o, const struct model *m, struct optim_array whole[OPTIM_MAX_ARRAYS + 1],
                 struct optim_piece **pieces, int64_t *n_pieces) {
    struct optim_array own[OPTIM_MAX_ARRAYS], all[OPTIM_MAX_ARRAYS];
    struct optim w = {.kind = o->kind, .momentum = o->momentum, .third = o->third};
    int n = 0;
    make_runs(&w, m, NULL, 0);
    all_arrays(o, own);
    all_arrays(&w, all);
    *pieces = xmalloc((size_t)(o->n_runs * (OPTIM_MAX_ARRAYS + 1) + 1) * sizeof **pieces);
    *n_pieces = 0;
    for (int k = 0; k <= OPTIM_MAX_ARRAYS; k++) {
        if (k > 0 && all[k - 1].n == 0) continue;
        if (k == 0) whole[n] = (struct optim_array){"master", DT_F32, w.n_own, o->n_own > 0 ? m->master : NULL};
        else
            whole[n] =
                (struct optim_array){all[k - 1].name, all[k - 1].dt, all[k - 1].n, own[k - 1].n > 0 ? own[k - 1].data : NULL};
        for (int64_t i = 0, j = 0; i < o->n_runs; i++) {
            while (w.runs[j].offset + w.runs[j].n <= o->runs[i].offset) j++;
            add_piece(*pieces, n_pieces, n, k, &o->runs[i], &w.runs[j]);
        }
        n++;
    }
    free(w.runs);
    return n;
}

/* ---- the step ---- */

/* Squares of segments [seg, seg + n) to o->sums, of x, which begins at element `base` of the optimizer's arrays. */
static int sums_of(struct optim *o, struct dev *d, int64_t seg, int64_t n, struct tensor x, int64_t base) {
    TRY(dev_sumsq(d, tensor_1d(o->d_sums + seg, DT_F64, n), x, tensor_2d(o->d_segments + 2 * seg, DT_I64, n, 2), base));
    return dev_copy_out(d, o->sums + seg, o->d_sums + seg, (size_t)n * sizeof *o->sums);
}

int optim__sumsq(struct optim *o, struct model *m, const struct optim_run *r, struct tensor x) {
    return sums_of(o, m->dev, r->seg, r->n_seg, x, r->at);
}

int optim_sums(struct optim *o, struct model *m, float *grads) {
    return sums_of(o, m->dev, 0, o->n_segments, tensor_1d(grads, DT_F32, o->n_own), 0);
}

void optim_norm(const struct model *m, const double *sums, struct optim_result *r) {
    double sum = 0;
    int64_t seg = 0;
    *r = (struct optim_result){0};
    for (int64_t i = 0; i < m->n_train_params; i++) {
        const struct model_param *p = &m->train_params[i];
        for (int64_t lo = 0; lo < p->rows * p->cols; lo += DEV_SEGMENT, seg++) {
            if (!isfinite(sums[seg]) && !r->bad_tensor[0]) snprintf(r->bad_tensor, sizeof r->bad_tensor, "%s", p->name);
            sum += sums[seg];
        }
    }
    r->grad_norm = sqrt(sum);
}

/* rounded: the run's compute copy. */
static int adamw_round_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a, struct tensor rounded) {
    const struct adamw_args x =
        optim__adamw(a, tensor_1d(a->m->master + r->at, DT_F32, r->n), tensor_1d(o->m + r->m_at, DT_F32, r->n),
                     tensor_1d(o->v + r->v_at, DT_F32, r->n), tensor_1d(a->grads + r->at, DT_F32, r->n));
    return dev_adamw_round(a->m->dev, &x, rounded);
}

/* torch.optim.Adam, RAdam and RMSprop, and AdamW with amsgrad. */
static int adaptive_step(const struct optim_run_args *a, enum optim_kind rule, float *const at[4], float *grads, int64_t n) {
    static const enum adaptive_rule rules[] = {[OPTIM_ADAMW] = ADAPTIVE_ADAM,
                                               [OPTIM_ADAM] = ADAPTIVE_ADAM,
                                               [OPTIM_RADAM] = ADAPTIVE_RADAM,
                                               [OPTIM_RMSPROP] = ADAPTIVE_RMSPROP};
    const struct optim_config *const c = a->c;
    const bool rms = rule == OPTIM_RMSPROP;
    struct tensor t[4] = {TENSOR_NONE, TENSOR_NONE, TENSOR_NONE, TENSOR_NONE};
    for (int k = 0; k < 4; k++)
        if (at[k]) t[k] = tensor_1d(at[k], DT_F32, n);
    const struct adaptive_args x = {.rule = rules[rule],
                                    .p = t[0],
                                    .m = t[1],
                                    .v = t[2],
                                    .x = t[3],
                                    .g = tensor_1d(grads, DT_F32, n),
                                    .lr = a->lr,
                                    .beta1 = rms ? c->momentum : c->beta1,
                                    .beta2 = rms ? c->alpha : c->beta2,
                                    .eps = c->eps,
                                    .weight_decay = c->weight_decay,
                                    .coupled = rule != OPTIM_ADAMW && !c->decoupled,
                                    .grad_scale = a->scale,
                                    .step = a->step};
    return dev_adaptive(a->m->dev, &x);
}

int optim__adaptive_step(const struct optim_run_args *a, enum optim_kind rule, float *const at[4], float *grads, int64_t n) {
    if (rule != OPTIM_ADAMW || at[3]) return adaptive_step(a, rule, at, grads, n);
    const struct adamw_args x = optim__adamw(a, tensor_1d(at[0], DT_F32, n), tensor_1d(at[1], DT_F32, n),
                                             tensor_1d(at[2], DT_F32, n), tensor_1d(grads, DT_F32, n));
    return dev_adamw(a->m->dev, &x);
}

/* A run whose arrays are all on the device. */
static int adaptive_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a) {
    float *const at[4] = {a->m->master + r->at, r->m_at < 0 ? NULL : o->m + r->m_at, o->v + r->v_at,
                          r->x_at < 0 ? NULL : o->x + r->x_at};
    return optim__adaptive_step(a, r->rule, at, a->grads + r->at, r->n);
}

/* torch.optim.SGD: g += wd p; b = mu b + (1 - dampening) g, in the first step b = g; p -= lr b,
 * with nesterov lr (g + mu b). The gradients' array takes g. */
static int sgd_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a) {
    struct dev *d = a->m->dev;
    const struct tensor p = tensor_1d(a->m->master + r->at, DT_F32, r->n), g = tensor_1d(a->grads + r->at, DT_F32, r->n);
    const float mu = (float)a->c->momentum, lr = (float)a->lr;
    TRY(dev_axpby(d, g, (float)a->c->weight_decay, p, a->scale));
    if (r->m_at < 0) return dev_axpby(d, p, -lr, g, 1);
    const struct tensor buf = tensor_1d(o->m + r->m_at, DT_F32, r->n);
    if (a->step == 1) TRY(dev_axpby(d, buf, 1, g, 0));
    else TRY(dev_axpby(d, buf, (float)(1 - a->c->dampening), g, mu));
    if (!a->c->nesterov) return dev_axpby(d, p, -lr, buf, 1);
    TRY(dev_axpby(d, g, mu, buf, 1));
    return dev_axpby(d, p, -lr, g, 1);
}

/* What is in host memory is taken from there: by AdamW and its relatives in pieces, by the others as they go. A master that is
 * there is left in the gradients as well, from which the compute copy is made at the device's speed. */
static int step_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a) {
    if (r->frozen) return o->host_master ? dev_copy(a->m->dev, a->grads + r->at, a->m->master + r->at, (size_t)r->n * 4) : 0;
    switch (r->rule) {
    case OPTIM_ADAMW:
    case OPTIM_ADAM:
    case OPTIM_RADAM:
    case OPTIM_RMSPROP: return o->host_state || o->host_master ? optim__pieces(o, r, a) : adaptive_run(o, r, a);
    case OPTIM_ADAMW8: TRY(optim__adamw8_run(o, r, a)); break;
    case OPTIM_SGD: TRY(sgd_run(o, r, a)); break;
    case OPTIM_MUON: TRY(optim__muon_run(o, r, a)); break;
    }
    return o->host_master ? dev_copy(a->m->dev, a->grads + r->at, a->m->master + r->at, (size_t)r->n * 4) : 0;
}

static struct optim_run_args run_args(const struct optim *o, struct model *m, float *grads, const struct optim_config *c, double lr,
                                      double norm) {
    double scale = 1; /* torch.nn.utils.clip_grad_norm_ */
    if (c->clip > 0) scale = fmin(1, c->clip / (norm + 1e-6));
    if (c->maximize) scale = -scale;
    return (struct optim_run_args){.m = m, .grads = grads, .c = c, .lr = lr, .scale = (float)scale, .step = o->step + 1};
}

int optim_update(struct optim *o, struct model *m, float *grads, const struct optim_config *c, double lr, double norm) {
    const struct optim_run_args a = run_args(o, m, grads, c, lr, norm);
    for (int64_t i = 0; i < o->n_runs; i++) TRY(step_run(o, &o->runs[i], &a));
    o->step++;
    return 0;
}

int optim_step(struct optim *o, struct model *m, float *grads, const struct optim_config *c, double lr, struct optim_result *r) {
    CHECK(o->n_own == m->n_train);
    TRY(optim_sums(o, m, grads));
    optim_norm(m, o->sums, r);
    if (!isfinite(r->grad_norm)) return 0;
    const bool whole =
        o->n_runs == 1 && o->runs[0].rule == OPTIM_ADAMW && !o->runs[0].frozen && !o->third && !o->host_state && !o->host_master;
    if (whole && !m->lora && m->flat.data) { /* weights are written where they are made */
        const struct optim_run_args a = run_args(o, m, grads, c, lr, r->grad_norm);
        TRY(adamw_round_run(o, &o->runs[0], &a, m->flat));
        o->step++;
        return 0;
    }
    TRY(optim_update(o, m, grads, c, lr, r->grad_norm));
    return o->host_master ? model_refresh_from(m, grads) : model_refresh(m);
}
