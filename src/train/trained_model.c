/* trained_model.c - forward passes, gradient accumulation and the optimizer step over packed micro-batches.
 * The arithmetic of the loss is the caller's, that of the model model/forward.h's. */
#include "train/trained_model.h"

#include "comm/comm.h"
#include "run/phase_watchdog.h"
#include "train/router_replay.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct trained_model {
    struct dev *dev;
    struct model *model;
    struct model_acts *acts;
    struct optim *optim;
    float *grads;
    void *owned_grads, *owned_chunk; /* NULL: in the block */
    int64_t grad_chunk;              /* micro-batches of a chunk */
    float *chunk;                    /* one rank, as grads: the current chunk, after the first; NULL: a chunk has one micro-batch */
    struct collective *group;        /* NULL: one rank */
    struct all_reduce *ranks;        /* with a group, in training */
    struct pack pack;
    struct model_list list; /* k 0: none */
    bool no_adapter;
    bool collective;       /* passes are: the weights are sharded, or ranks share rows */
    struct {               /* rows of a micro-batch over ranks (parallel/context_parallel.h) */
        int parts;         /* of an update; 1: not cut */
        int size;          /* ranks that share rows; 1: none */
        int groups;        /* of these; 0: none */
        struct comm *comm; /* this rank's group; NULL: it is in none */
        struct collective *group;
        bool borrowed; /* both are another model's */
        struct model_context *ranks;
        struct model_parts cut; /* of the micro-batch at hand: what ranks have of it; of one rank, its parts */
        struct model_parts own; /* of this rank's rows, among several that share them */
        int first;              /* of its parts */
        int *times;             /* (ranks) parts of each in a wave, where there may be several */
    } context;
    struct routers { /* of a mini-batch */
        struct router_losses losses;
        int64_t n, *count;  /* (n): choices by layer and expert; n 0: the model has none */
        int64_t *scored;    /* (n), of Megatron's load-balancing loss: model_router_by_scores; else NULL */
        float *load;        /* (n) */
        double *loss;       /* by micro-batch and part both losses, of those that are this rank's; the others 0 */
        bool counted, read; /* count is of the whole mini-batch; load has been read from it */
    } routers;
    void *owned_block;
    size_t block_bytes;
    /* host, (max_rows); out: log-probs or values */
    float *inv_temp, *out, *entropy, *sum_pi_sq, *dout, *dentropy;
    struct {
        double weight;   /* 0: no loss */
        int64_t n;       /* of the mini-batch: tokens that it predicts */
        int32_t *d_next; /* (max_rows) device: the token after each row */
        int32_t *next, *row, *target;
        float *ones, *logp, *dlogp;
    } mtp;
    struct buf record;  /* of the current micro-batch */
    struct buf records; /* with a group: those of a wave's chunk */
    size_t slot;        /* the largest size of any rank's records so far */
};

static struct model_keep keep_of(const struct trained_model_args *a) {
    struct model_keep k = a->train ? a->keep : (struct model_keep){.context = a->keep.context};
    k.parts = a->train && a->parts > 1 ? (int)a->parts : 0;
    return k;
}

/* Of a rank's rows, where attention asks for the sequences of each part. */
static int most_parts(const struct model_config *c, const struct trained_model_args *a) {
    const struct model_keep k = keep_of(a);
    const int ranks = k.context > 1 ? k.context : 1, parts = k.parts > ranks ? k.parts : ranks;
    return model_is_latent(c) && parts > 1 ? model_parts_times(parts, ranks) : 0;
}

static const struct model_config *routed(const struct model_config *c, const struct trained_model_args *a) {
    return a->routes && model_router_layers(c) > 0 ? c : NULL;
}

static size_t mtp_bytes(const struct model_config *c, const struct trained_model_args *a) {
    return a->train && c->mtp ? (size_t)a->max_rows * sizeof(int32_t) : 0;
}

static size_t context_bytes(const struct model_config *c, enum dtype act, const struct trained_model_args *a) {
    const struct model_keep k = keep_of(a);
    return k.context > 1 ? model_context_bytes(c, act, (struct model_context_shape){k.context, k.parts}, a->max_rows, a->train) : 0;
}

size_t trained_model_block_bytes(const struct model_config *c, enum dtype act, const struct trained_model_args *a) {
    struct pack p = {.max_rows = a->max_rows, .max_seqs = a->max_seqs, .routed = routed(c, a), .most_parts = most_parts(c, a)};
    struct arena m = {0};
    struct model_list list;
    const enum quant_kind quant = a->model ? model_stream_shape(a->model, a->stream, 0).quant : a->quant;
    const struct model_stream_shape stream = {
        c, a->dev, act, quant, a->stream, a->experts.ranks > 1, model_dispatch_bytes(c, act, a->experts)};
    arena_take(&m, model_stream_bytes(&stream));
    arena_take(&m, context_bytes(c, act, a));
    micro_batch_layout(&p, &m);
    if (a->list > 0) model_list_layout(&list, a->list, a->max_rows, &m);
    arena_take(&m, mtp_bytes(c, a));
    arena_take(&m, a->grads);
    arena_take(&m, a->chunk);
    arena_take(&m, model_acts_bytes(c, act, a->max_rows, keep_of(a)));
    return m.used;
}

/* Never 0, as of the master. */
static size_t grads_bytes(const struct trained_model *t) {
    return (size_t)(t->model->n_master > 0 ? t->model->n_master : 1) * sizeof *t->grads;
}

/* As many floats as the master's: `room`, of so many bytes, or memory of their own. */
static int take_grads(struct trained_model *t, void *room, size_t bytes, void **owned, float **at) {
    CHECK(bytes == 0 || bytes >= grads_bytes(t));
    if (bytes == 0) TRY(dev_alloc(t->dev, grads_bytes(t), owned));
    *at = bytes ? room : *owned;
    return 0;
}

/* grads, chunk: their places in the block. */
static int open_training(struct trained_model *t, const struct trained_model_args *a, void *grads, void *chunk) {
    const struct optim_config adamw = {.kind = OPTIM_ADAMW};
    struct model *const m = t->model;
    const bool chunks = t->grad_chunk > 1;
    CHECK(m->master != NULL);
    TRY(take_grads(t, grads, a->grads, &t->owned_grads, &t->grads));
    if (chunks && !t->group) TRY(take_grads(t, chunk, a->chunk, &t->owned_chunk, &t->chunk));
    const struct all_reduce_args all = {
        .max_rows = a->max_rows, .chunks = chunks, .times = model_parts_times(t->context.parts, t->context.size), .sums = t->grads};
    if (t->group) TRY(all_reduce_create(&t->ranks, t->group, m, &all));
    return optim_create_part(&t->optim, m, a->optim ? a->optim : &adamw, m->own, m->n_own);
}

/* The groups of ranks that share rows: the first ranks, as many as are whole groups. */
static int open_context(struct trained_model *t, const struct trained_model_args *a, void *room) {
    const int n = t->context.size, ranks = t->group ? collective_size(t->group) : 1;
    const struct model_context_args rows = {
        .model = t->model, .parts = keep_of(a).parts, .max_rows = a->max_rows, .train = a->train, .room = room};
    struct model_context_args own = rows;
    if (n <= 1 && t->context.parts <= 1) return 0;
    CHECK(t->grad_chunk == 1);
    CHECK(!a->train || n == (ranks < t->context.parts ? ranks : t->context.parts));
    if (n <= 1) return 0;
    if (ranks < n) FAIL(ERR_INVAL, "context parallel over %d ranks, and there are %d", n, ranks);
    t->context.groups = ranks / n;
    t->context.times = xcalloc((size_t)ranks, sizeof *t->context.times);
    for (int r = 0; r < ranks; r++)
        t->context.times[r] = model_parts_first(t->context.parts, n, r % n + 1) - model_parts_first(t->context.parts, n, r % n);
    const int rank = collective_rank(t->group);
    if (rank >= t->context.groups * n) return 0;
    t->context.borrowed = a->shares && a->shares->context.size == n;
    if (t->context.borrowed) {
        t->context.comm = a->shares->context.comm;
        t->context.group = a->shares->context.group;
    } else {
        TRY(comm_part(&t->context.comm, collective_comm(t->group), rank - rank % n, n));
        TRY(collective_open(&t->context.group, t->dev, t->context.comm));
    }
    own.group = t->context.group;
    return model_context_open(&t->context.ranks, &own);
}

/* Weights on their way go through this room. */
static int bind_stream(struct trained_model *t, const struct trained_model_args *a, void *room) {
    struct collective *const g = a->stream == MODEL_STREAM_RANKS ? t->group : NULL;
    if (a->stream == MODEL_STREAM_NONE || model_stream_is_bound(t->model)) return 0;
    const size_t dispatch = model_dispatch_bytes(&t->model->cfg, t->model->act, a->experts);
    const struct model_stream_shape shape = model_stream_shape(t->model, a->stream, dispatch);
    if (g) TRY(collective_share(g, room, model_stream_bytes(&shape)));
    model_stream_bind(t->model, room, g, dispatch);
    if (t->model->shard.experts) model_dispatch_bind(t->model, g, a->experts.max_rows);
    return 0;
}

static void alloc_mtp(struct trained_model *t, const struct trained_model_args *a) {
    const size_t bytes = (size_t)a->max_rows * 4;
    CHECK(t->model->cfg.mtp);
    t->mtp.weight = a->mtp_loss;
    int32_t **const ints[] = {&t->mtp.next, &t->mtp.row, &t->mtp.target};
    float **const floats[] = {&t->mtp.ones, &t->mtp.logp, &t->mtp.dlogp};
    for (size_t i = 0; i < 3; i++) {
        *ints[i] = xmalloc(bytes);
        *floats[i] = xmalloc(bytes);
    }
    for (int64_t i = 0; i < a->max_rows; i++) t->mtp.ones[i] = 1;
}

static void open_routers(struct trained_model *t, const struct trained_model_args *a) {
    struct routers *const u = &t->routers;
    *u = (struct routers){.losses = a->routers, .n = model_router_layers(&a->model->cfg) * a->model->cfg.n_experts};
    if (u->n == 0) return;
    u->count = xmalloc((size_t)u->n * sizeof *u->count);
    u->load = xmalloc((size_t)u->n * sizeof *u->load);
    if (!u->losses.by_layer || u->losses.balance == 0) return;
    u->scored = xmalloc((size_t)u->n * sizeof *u->scored);
    model_router_by_scores(t->acts);
}

int trained_model_create(struct trained_model **out, const struct trained_model_args *a) {
    int rc = 0;
    struct model *m = a->model;
    struct trained_model *t = xcalloc(1, sizeof *t);
    t->dev = a->dev;
    t->model = m;
    t->no_adapter = a->no_adapter;
    t->grad_chunk = a->grad_chunk > 1 ? a->grad_chunk : 1;
    t->context.parts = a->train && a->parts > 1 ? (int)a->parts : 1;
    t->context.size = keep_of(a).context > 1 ? keep_of(a).context : 1;
    t->collective = a->stream == MODEL_STREAM_RANKS || t->context.size > 1;
    t->group = a->group && collective_size(a->group) > 1 ? a->group : NULL;
    t->pack = (struct pack){.dev = a->dev,
                            .max_rows = a->max_rows,
                            .max_seqs = a->max_seqs,
                            .routed = routed(&m->cfg, a),
                            .most_parts = most_parts(&m->cfg, a)};
    t->block_bytes = trained_model_block_bytes(&m->cfg, m->act, a);
    void *block = a->block;
    if (!block) {
        TRYG(dev_alloc(t->dev, t->block_bytes, &t->owned_block), fail);
        block = t->owned_block;
    }
    struct arena arena = {.base = block, .cap = t->block_bytes};
    const struct model_stream_shape stream = model_stream_shape(m, a->stream, model_dispatch_bytes(&m->cfg, m->act, a->experts));
    TRYG(bind_stream(t, a, arena_take(&arena, model_stream_bytes(&stream))), fail);
    void *const shared = arena_take(&arena, context_bytes(&m->cfg, m->act, a));
    micro_batch_layout(&t->pack, &arena);
    if (a->list > 0) model_list_layout(&t->list, a->list, a->max_rows, &arena);
    t->mtp.d_next = arena_take(&arena, mtp_bytes(&m->cfg, a));
    void *const grads = arena_take(&arena, a->grads), *const chunk = arena_take(&arena, a->chunk);
    void *acts = arena_take(&arena, model_acts_bytes(&m->cfg, m->act, a->max_rows, keep_of(a)));
    TRYG(model_acts_create(&t->acts, m, a->max_rows, keep_of(a), acts), fail);
    TRYG(open_context(t, a, shared), fail);
    if (a->train) TRYG(open_training(t, a, grads, chunk), fail);
    micro_batch_alloc_host(&t->pack);
    float **const host[] = {&t->inv_temp, &t->out, &t->entropy, &t->sum_pi_sq, &t->dout, &t->dentropy};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) *host[i] = xmalloc((size_t)a->max_rows * 4);
    if (a->train) model_dispatch_keep(m, keep_of(a).all);
    if (a->train) open_routers(t, a);
    if (a->train && a->mtp_loss > 0) alloc_mtp(t, a);
    *out = t;
    return 0;
fail:
    trained_model_destroy(t);
    return rc;
}

void trained_model_destroy(struct trained_model *t) {
    if (!t) return;
    model_context_close(t->context.ranks);
    free(t->context.times);
    if (!t->context.borrowed) collective_close(t->context.group);
    if (!t->context.borrowed) comm_close(t->context.comm);
    model_acts_destroy(t->acts);
    optim_destroy(t->optim, t->model);
    all_reduce_destroy(t->ranks);
    if (t->owned_chunk) dev_free(t->dev, t->owned_chunk, grads_bytes(t));
    if (t->owned_grads) dev_free(t->dev, t->owned_grads, grads_bytes(t));
    if (t->owned_block) dev_free(t->dev, t->owned_block, t->block_bytes);
    micro_batch_free_host(&t->pack);
    free(t->inv_temp);
    free(t->out);
    free(t->entropy);
    free(t->sum_pi_sq);
    free(t->dout);
    free(t->dentropy);
    free(t->routers.count);
    free(t->routers.scored);
    free(t->routers.load);
    free(t->mtp.next);
    free(t->mtp.row);
    free(t->mtp.target);
    free(t->mtp.ones);
    free(t->mtp.logp);
    free(t->mtp.dlogp);
    buf_free(&t->record);
    buf_free(&t->records);
    free(t);
}

struct model *trained_model_model(struct trained_model *t) {
    return t->model;
}
struct optim *trained_model_optim(struct trained_model *t) {
    return t->optim;
}
float *trained_model_grads(struct trained_model *t) { return t->grads; }

/* Consecutive ranks that compute a micro-batch together. */
static int ranks_of_one(const struct trained_model *t) { return t->context.size; }

/* ---- passes ---- */

/* The ranks agree on whether one of them has a pass to do, before each. */
static int agree(struct trained_model *t, bool more, bool *any) {
    struct vote {
        int32_t more, stop;
    } * all;
    struct comm *const c = collective_comm(t->group);
    const int size = collective_size(t->group);
    size_t *at = xmalloc((size_t)(size + 1) * sizeof *at);
    all = xcalloc((size_t)size, sizeof *all);
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * sizeof *all;
    all[collective_rank(t->group)] = (struct vote){more, comm_stop_asked(c)};
    int rc = comm_all_gather(c, all, at), stop = 0;
    *any = false;
    for (int r = 0; r < size && rc == 0; r++) {
        *any |= all[r].more != 0;
        if (all[r].stop) stop = all[r].stop;
    }
    free(all);
    free(at);
    TRY(rc);
    if (!stop) return 0;
    phase_ask_stop(stop);
    return phase_check_stop();
}

int trained_model_context(const struct trained_model *t) { return ranks_of_one(t); }
int trained_model_expert_ranks(const struct trained_model *t) { return t->model->shard.experts ? t->model->shard.size : 1; }
bool trained_model_collective(const struct trained_model *t) { return t->collective; }
void trained_model_begin(struct trained_model *t) { model_stream_begin(t->model); }

int trained_model_end(struct trained_model *t) {
    for (bool any = t->collective; any;) {
        TRY(agree(t, false, &any));
        if (any) TRY(model_idle(t->model, t->no_adapter));
    }
    return model_stream_end(t->model);
}

/* The lists of the targets from `at` on; NULL where there are none. */
static struct model_list *list_at(struct trained_model *t, const struct token_lists *s, int64_t at) {
    const int64_t k = t->list.k;
    if (!s) return NULL;
    CHECK(k > 0);
    t->list.id = s->id ? s->id + at * k : NULL;
    t->list.logp = s->logp ? s->logp + at * k : NULL;
    t->list.top_id = s->top_id ? s->top_id + at * k : NULL;
    t->list.top_logp = s->top_logp ? s->top_logp + at * k : NULL;
    t->list.dlogp = s->dlogp ? s->dlogp + at * k : NULL;
    return &t->list;
}

/* The rows of b through model and head: t->out of targets r. l: what the head adds to log-probs; completed here. */
static int forward(struct trained_model *t, float temperature, struct pack_targets r, struct model_batch *b,
                   struct model_logp_args *l) {
    b->no_adapter = t->no_adapter;
    TRY(model_forward(t->model, b, t->acts));
    if (t->model->cfg.value) return model_value(t->model, t->acts, t->pack.row + r.lo, r.hi - r.lo, t->out + r.lo);
    for (int64_t k = 0; k < r.hi - r.lo; k++) t->inv_temp[k] = 1.0f / temperature;
    l->n = r.hi - r.lo;
    l->row = t->pack.row + r.lo;
    l->target = t->pack.target + r.lo;
    l->inv_temp = t->inv_temp;
    l->logp = t->out + r.lo;
    if (l->entropy) l->entropy += r.lo;
    if (l->sum_pi_sq) l->sum_pi_sq += r.lo;
    return model_logp(t->model, t->acts, l);
}

/* ---- rows over ranks (parallel/context_parallel.h) ---- */

/* Cuts the micro-batch in b; where ranks share rows, b and *own are left with this rank's part, and at[size + 1] says where the
 * outputs of each begin. */
static int take_part(struct trained_model *t, const struct pack_micro *m, int parts, struct model_batch *b,
                     struct pack_targets *own, int64_t *at) {
    struct model_parts *const cut = &t->context.cut, all;
    *own = (struct pack_targets){0, m->n_targets};
    if (parts == 1) return 0;
    model_parts_cut(&all, m->n_rows, parts);
    *cut = all;
    b->parts = cut;
    if (!t->context.ranks) return t->pack.most_parts ? micro_batch_part_seqs(&t->pack, cut, 0, b) : 0;
    const int ranks = t->context.size, rank = collective_rank(t->context.group);
    model_parts_of_ranks(cut, &all, ranks);
    model_parts_own(&t->context.own, &all, ranks, rank);
    t->context.first = model_parts_first(parts, ranks, rank);
    b->parts = &t->context.own;
    if (t->pack.most_parts) TRY(micro_batch_part_seqs(&t->pack, b->parts, cut->cut[rank], b));
    TRY(model_context_begin(t->context.ranks, cut, b->ids));
    b->context = t->context.ranks;
    at[0] = 0;
    for (int i = 0; i < cut->n; i++) at[i + 1] = micro_batch_targets(&t->pack, m, cut, i).hi;
    *own = micro_batch_part(&t->pack, m, cut, rank, b);
    return 0;
}

/* x: outputs of own targets, `width` of 4 bytes each, become those of all, on each rank of the group. NULL: nothing. */
static int gather_outputs(struct trained_model *t, void *x, const int64_t *at, int64_t width) {
    size_t bytes[MODEL_MOST_PARTS + 1];
    if (!x || !t->context.ranks) return 0;
    for (int r = 0; r <= t->context.size; r++) bytes[r] = (size_t)(at[r] * width) * 4;
    return comm_all_gather(t->context.comm, x, bytes);
}

/* The same of lists of the targets from `first` on. */
static int gather_lists(struct trained_model *t, const struct token_lists *s, int64_t first, const int64_t *at) {
    const int64_t k = t->list.k;
    if (!s) return 0;
    TRY(gather_outputs(t, s->id ? s->logp + first * k : NULL, at, k));
    TRY(gather_outputs(t, s->top_id ? s->top_id + first * k : NULL, at, k));
    return gather_outputs(t, s->top_logp ? s->top_logp + first * k : NULL, at, k);
}

/* The pass over a micro-batch with targets, which are those from `at` on. */
static int forward_micro(struct trained_model *t, const struct packed_seq *seqs, const struct pack_micro *m, float temperature,
                         const struct forward_out *out, int64_t at) {
    int64_t of[MODEL_MOST_PARTS + 1];
    struct model_batch b;
    struct pack_targets own;
    struct model_logp_args l = {.entropy = out->entropy ? t->entropy : NULL, .sum_pi_sq = out->sum_pi_sq ? t->sum_pi_sq : NULL};
    TRY(micro_batch_fill(&t->pack, seqs, m, &b));
    TRY(take_part(t, m, t->context.size, &b, &own, of));
    l.list = list_at(t, out->list, at + own.lo);
    TRY(forward(t, temperature, own, &b, &l));
    TRY(gather_outputs(t, t->out, of, 1));
    TRY(gather_outputs(t, out->entropy ? t->entropy : NULL, of, 1));
    TRY(gather_outputs(t, out->sum_pi_sq ? t->sum_pi_sq : NULL, of, 1));
    return gather_lists(t, out->list, at, of);
}

int trained_model_forward(struct trained_model *t, const struct packed_seq *seqs, int64_t n, struct micro_batch_limits cut,
                          float temperature, struct forward_out out) {
    struct pack_micro m;
    float *const to = t->model->cfg.value ? out.value : out.logp;
    int64_t at = 0, rows = 0;
    const int64_t words = router_replay_words(&t->model->cfg);
    for (int64_t lo = 0; lo < n; lo = m.hi) {
        bool any;
        TRY(micro_batch_next(&t->pack, seqs, n, lo, cut, &m));
        if (m.n_targets > 0 && t->collective) TRY(agree(t, true, &any));
        t->pack.keep_routes = out.routes && t->pack.routed;
        const int rc = m.n_targets > 0 ? forward_micro(t, seqs, &m, temperature, &out, at) : 0;
        t->pack.keep_routes = false;
        TRY(rc);
        if (out.routes) memset(out.routes + rows * words, 0xff, (size_t)(m.n_rows * words) * 4);
        if (out.routes && m.n_targets > 0) TRY(micro_batch_routes(&t->pack, &m, out.routes + rows * words));
        if (out.routes && m.n_targets > 0) TRY(gather_outputs(t, out.routes + rows * words, t->context.cut.cut, words));
        rows += m.n_rows;
        const size_t bytes = (size_t)m.n_targets * 4;
        if (to) memcpy(to + at, t->out, bytes);
        if (out.entropy) memcpy(out.entropy + at, t->entropy, bytes);
        if (out.sum_pi_sq) memcpy(out.sum_pi_sq + at, t->sum_pi_sq, bytes);
        at += m.n_targets;
    }
    return 0;
}

/* ---- training ---- */

static bool all_finite(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return false;
    return true;
}

/* The loss of a micro-batch to its record; 1: all its derivatives are finite. */
static int micro_loss(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m,
                      const struct model_logp_args *l) {
    const size_t bytes = (size_t)m->n_targets * 4;
    float *const dentropy = s->entropy_grad ? t->dentropy : NULL;
    const struct micro_loss x = {.lo = m->lo,
                                 .hi = m->hi,
                                 .t0 = m->t0,
                                 .t1 = m->t0 + m->n_targets,
                                 .out = t->out,
                                 .entropy = s->entropy ? t->entropy : NULL,
                                 .dout = t->dout,
                                 .dentropy = dentropy,
                                 .record = &t->record};
    memset(t->dout, 0, bytes);
    memset(t->dentropy, 0, bytes);
    buf_reset(&t->record);
    TRY(s->loss(s->arg, &x));
    return all_finite(t->dout, m->n_targets) && (!dentropy || all_finite(dentropy, m->n_targets)) &&
           (!l->list || !l->list->dlogp || all_finite(l->list->dlogp, m->n_targets * l->list->k));
}

static void loss_not_finite(const struct trained_model *t, struct optim_result *r) {
    r->grad_norm = NAN;
    snprintf(r->bad_tensor, sizeof r->bad_tensor, "%s",
             t->model->cfg.value ? "the critic's loss (d loss / d value)" : "the loss (d loss / d log-prob)");
}

/* A micro-batch after its loss. */
struct computed {
    struct model_batch b, next; /* next: with the token after each row */
    struct model_logp_args l, mtp;
    struct pack_targets own;       /* targets that are computed here */
    struct pack_targets predicted; /* of mtp, likewise */
    int64_t n_predicted;           /* of the whole micro-batch */
    bool finite;
};

/* ---- routers (router_balance.h) ---- */

/* v (n) of 8 bytes = its sum over the ranks, in their order. */
static int sum_ranks(struct trained_model *t, void *v, int64_t n, bool f64) {
    if (!t->group) return 0;
    const int size = collective_size(t->group);
    size_t *at = xmalloc((size_t)(size + 1) * sizeof *at);
    char *all = xmalloc((size_t)size * (size_t)n * 8);
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * (size_t)n * 8;
    memcpy(all + at[collective_rank(t->group)], v, (size_t)n * 8);
    const int rc = comm_all_gather(collective_comm(t->group), all, at);
    memset(v, 0, (size_t)n * 8);
    for (int64_t i = 0; i < size * n && rc == 0; i++) {
        if (f64) ((double *)v)[i % n] += ((const double *)(const void *)all)[i];
        else ((int64_t *)v)[i % n] += ((const int64_t *)(const void *)all)[i];
    }
    free(all);
    free(at);
    return rc;
}

static int sum_load(struct trained_model *t) {
    const struct routers *const u = &t->routers;
    TRY(sum_ranks(t, u->count, u->n, false));
    return u->scored ? sum_ranks(t, u->scored, u->n, false) : 0;
}

/* Passes over the mini-batch that count the load of experts. */
static int count_load(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n) {
    const int64_t each = ranks_of_one(t), size = (t->group ? collective_size(t->group) : 1) / each,
                  place = (t->group ? collective_rank(t->group) : 0) / each;
    int64_t at[MODEL_MOST_PARTS + 1];
    struct model_batch b;
    struct pack_targets own;
    for (int64_t i = 0; i < n; i += size) { /* a round of the ranks: the same passes over sharded weights */
        if (i + place < n && place < size) {
            TRY(micro_batch_fill(&t->pack, s->seqs, &list[i + place], &b));
            TRY(take_part(t, &list[i + place], t->context.parts, &b, &own, at));
            TRY(model_forward(t->model, &b, t->acts));
            TRY(model_router_load(t->model, t->acts, t->routers.count, t->routers.scored));
        } else if (t->collective) {
            TRY(model_idle(t->model, t->no_adapter));
        }
    }
    t->routers.counted = true;
    return sum_load(t);
}

/* n: micro-batches of the list, all of them with a target. */
static int begin_routers(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                         struct step_result *r) {
    struct routers *const u = &t->routers;
    const struct router_losses *const c = &u->losses;
    r->router = (struct router_load){.layers = model_router_layers(&t->model->cfg),
                                     .experts = t->model->cfg.n_experts,
                                     .balanced = c->balance > 0,
                                     .has_z = c->z > 0};
    for (int64_t i = 0; i < n; i++) r->router.rows += list[i].n_rows;
    u->counted = u->read = false;
    if (u->n == 0) return 0;
    memset(u->count, 0, (size_t)u->n * sizeof *u->count);
    if (u->scored) memset(u->scored, 0, (size_t)u->n * sizeof *u->scored);
    u->loss = xcalloc((size_t)(r->n_micro * t->context.parts) + 1, 2 * sizeof *u->loss);
    return c->balance > 0 && (n > 1 || t->group) ? count_load(t, s, list, n) : 0;
}

/* After the forward pass of a micro-batch. */
static int read_routers(struct trained_model *t, const struct router_load *r) {
    struct routers *const u = &t->routers;
    const struct model_router_losses losses = {.load = u->load, .z = router_z(r, &u->losses)};
    if (u->n == 0) return 0;
    if (!u->counted) TRY(model_router_load(t->model, t->acts, u->count, u->scored));
    if ((!r->balanced && !r->has_z) || u->read) return 0;
    u->read = true;
    router_balance_load(r, u->scored ? u->scored : u->count, t->model->cfg.n_choices, &u->losses, u->load);
    return model_router_balance(t->model, t->acts, &losses);
}

static int end_routers(struct trained_model *t, int rc, struct step_result *r) {
    struct routers *const u = &t->routers;
    double *const loss = u->loss;
    u->loss = NULL;
    if (rc == 0 && u->n && !u->counted) rc = sum_load(t);
    const int64_t n = r->n_micro * t->context.parts;
    if (rc == 0 && u->n && (r->router.balanced || r->router.has_z)) rc = sum_ranks(t, loss, 2 * n, true);
    for (int64_t i = 0; loss && i < n; i++) {
        r->router.loss += loss[2 * i];
        r->router.z_loss += loss[2 * i + 1];
    }
    if (u->n) router_load_metrics(&r->router, u->count);
    free(loss);
    return rc;
}

/* ---- the MTP layer's loss ---- */

/* Tokens of s that it predicts: targets with two tokens before them. */
static int64_t mtp_targets(const struct packed_seq *s) {
    int64_t n = 0;
    for (int64_t i = 2; i < s->n; i++) n += s->mask ? s->mask[i] != 0 : i >= s->first;
    return n;
}

/* Fills next, row and target; returns how many are predicted. */
static int64_t mtp_fill(struct trained_model *t, const struct packed_seq *seqs, const struct pack_micro *m) {
    int64_t r = 0, k = 0;
    for (int64_t i = m->lo; i < m->hi; i++) {
        const struct packed_seq *const s = &seqs[i];
        for (int64_t at = 0; at < s->n; at++) {
            t->mtp.next[r + at] = at + 1 < s->n ? s->ids[at + 1] : 0; /* read by no row with a loss */
            if (at < 2 || (s->mask ? s->mask[at] == 0 : at < s->first)) continue;
            t->mtp.row[k] = (int32_t)(r + at - 2);
            t->mtp.target[k] = s->ids[at];
            t->mtp.dlogp[k++] = (float)(-t->mtp.weight / (double)t->mtp.n);
        }
        r += s->n;
    }
    return k;
}

/* Leaves c with what is this rank's; at: where the log-probs of each rank's begin. */
static void mtp_part(struct trained_model *t, struct computed *c, int64_t *at) {
    const struct model_parts *const cut = &t->context.cut;
    const int rank = collective_rank(t->context.group);
    int64_t k = at[0] = 0;
    for (int r = 0; r < cut->n; r++) {
        while (k < c->n_predicted && t->mtp.row[k] < cut->cut[r + 1]) k++;
        at[r + 1] = k;
    }
    c->predicted = (struct pack_targets){at[rank], at[rank + 1]};
    c->next.ids = tensor_rows(c->next.ids, cut->cut[rank], c->next.n_rows);
    for (k = at[rank]; k < at[rank + 1]; k++) t->mtp.row[k] -= (int32_t)cut->cut[rank];
}

/* Its pass over a micro-batch; the sum goes behind the record. */
static int mtp_forward(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c) {
    struct mtp_sum sum = {.n = mtp_fill(t, s->seqs, m)};
    const struct tensor next = tensor_1d(t->mtp.d_next, DT_I32, m->n_rows);
    int64_t at[MODEL_MOST_PARTS + 1];
    c->n_predicted = sum.n;
    c->predicted = (struct pack_targets){0, sum.n};
    c->next = c->b;
    c->next.ids = next;
    if (t->context.ranks) mtp_part(t, c, at);
    const int64_t lo = c->predicted.lo;
    c->mtp = (struct model_logp_args){.n = c->predicted.hi - lo,
                                      .row = t->mtp.row + lo,
                                      .target = t->mtp.target + lo,
                                      .inv_temp = t->mtp.ones,
                                      .logp = t->mtp.logp + lo};
    TRY(dev_copy_in(t->dev, t->mtp.d_next, t->mtp.next, (size_t)m->n_rows * sizeof *t->mtp.next));
    if (t->context.ranks) model_context_next(t->context.ranks, next);
    TRY(model_mtp_begin(t->model, t->acts));
    TRY(model_mtp_forward(t->model, &c->next, t->acts, TENSOR_NONE));
    TRY(model_mtp_logp(t->model, t->acts, &c->mtp));
    TRY(gather_outputs(t, t->mtp.logp, at, 1));
    for (int64_t i = 0; i < sum.n; i++) sum.logp += (double)t->mtp.logp[i];
    return buf_add(&t->record, &sum, sizeof sum);
}

/* Forward and loss of a micro-batch with a target; the loss' statistics are in t->record. */
static int forward_loss(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c) {
    c->l = (struct model_logp_args){.entropy = s->entropy ? t->entropy : NULL, .train = true};
    int64_t at[MODEL_MOST_PARTS + 1];
    TRY(micro_batch_fill(&t->pack, s->seqs, m, &c->b));
    TRY(take_part(t, m, t->context.parts, &c->b, &c->own, at));
    c->l.list = list_at(t, s->list, m->t0 + c->own.lo);
    TRY(forward(t, s->temperature, c->own, &c->b, &c->l));
    TRY(gather_outputs(t, t->out, at, 1));
    TRY(gather_outputs(t, s->entropy ? t->entropy : NULL, at, 1));
    TRY(gather_lists(t, s->list, m->t0, at));
    list_at(t, s->list, m->t0);
    const int finite = micro_loss(t, s, m, &c->l);
    TRY(finite);
    c->finite = finite;
    list_at(t, s->list, m->t0 + c->own.lo);
    return t->mtp.weight > 0 ? mtp_forward(t, s, m, c) : 0;
}

/* Those of the parts that are here. */
static int router_losses_of(struct trained_model *t, const struct pack_micro *m, const struct model_batch *b) {
    const int first = b->context ? t->context.first : 0;
    for (int i = 0; i < (b->parts ? b->parts->n : 1); i++) {
        const struct model_range rows =
            b->parts ? (struct model_range){b->parts->cut[i], b->parts->cut[i + 1]} : (struct model_range){0, b->n_rows};
        double *const loss = t->routers.loss + 2 * (m->index * t->context.parts + first + i);
        TRY(model_router_balance_loss(t->model, t->acts, rows, loss, loss + 1));
    }
    return 0;
}

static int backward(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c,
                    const struct model_grad_sink *sink) {
    const struct model_value_backward_args value = {
        .batch = &c->b, .row = t->pack.row + c->own.lo, .n = c->own.hi - c->own.lo, .dvalue = t->dout + c->own.lo, .sink = sink};
    struct model_backward_args logp = {.batch = &c->b,
                                       .logp = &c->l,
                                       .dlogp = t->dout + c->own.lo,
                                       .dentropy = s->entropy_grad ? t->dentropy + c->own.lo : NULL,
                                       .sink = sink};
    if (t->mtp.weight > 0) {
        logp.mtp.batch = &c->next;
        logp.mtp.logp = c->n_predicted > 0 ? &c->mtp : NULL;
        logp.mtp.dlogp = t->mtp.dlogp + c->predicted.lo;
    }
    TRY(t->model->cfg.value ? model_value_backward(t->model, t->acts, &value) : model_backward(t->model, t->acts, &logp));
    return t->routers.read ? router_losses_of(t, m, &c->b) : 0;
}

static int report(const struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, const void *record,
                  size_t n, struct step_result *r) {
    r->n_rows += m->n_rows;
    if (t->mtp.weight > 0) {
        struct mtp_sum sum;
        CHECK(n >= sizeof sum);
        n -= sizeof sum;
        memcpy(&sum, (const char *)record + n, sizeof sum);
        r->mtp.logp += sum.logp;
        r->mtp.n += sum.n;
    }
    return s->on_record ? s->on_record(s->arg, m, record, n) : 0;
}

/* One rank: micro-batch after micro-batch, added in place; the first chunk where the sum is. */
static int all_micros(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                      struct step_result *r) {
    const int64_t chunk = t->chunk ? t->grad_chunk : n; /* chunks of one: a sum in place has the bits of their fold */
    for (int64_t i = 0; i < n; i++) {
        const struct model_grad_sink sink = {.flat = i < chunk ? t->grads : t->chunk, .add = i % chunk > 0};
        struct computed c;
        TRY(forward_loss(t, s, &list[i], &c));
        TRY(read_routers(t, &r->router));
        TRY(report(t, s, &list[i], t->record.p, t->record.n, r));
        if (!c.finite) {
            loss_not_finite(t, &r->optim);
            return 0;
        }
        TRY(backward(t, s, &list[i], &c, &sink));
        if (i < chunk || (i % chunk < chunk - 1 && i < n - 1)) continue;
        const struct tensor x = tensor_1d(t->chunk, DT_F32, t->model->n_master);
        TRY(dev_fold(t->dev, tensor_1d(t->grads, DT_F32, t->model->n_master), &x, 1, true));
    }
    return 0;
}

/* ---- several ranks ---- */

/* The headers of a rank's message in a wave: of the message, whose micro-batches' records have `bytes`, and of each record. */
struct wave_head {
    uint64_t bytes;
    int64_t stop;
};
struct micro_head {
    uint64_t bytes; /* without what aligns the next one to 8 */
    int64_t finite;
};

/* Keeps the record of the current micro-batch until the wave ends. */
static int keep_record(struct trained_model *t, bool finite) {
    const struct micro_head w = {.bytes = t->record.n, .finite = finite};
    TRY(buf_add(&t->records, &w, sizeof w));
    TRY(buf_add(&t->records, t->record.p, t->record.n));
    return buf_add(&t->records, (char[8]){0}, (8 - t->record.n % 8) % 8);
}

/* Gathers all ranks' headers to *all, each followed by t->slot bytes for its records, as far as they fit. */
static int gather_records(struct trained_model *t, const struct wave_head *own, char **all) {
    const int size = collective_size(t->group);
    const size_t one = sizeof *own + t->slot, n = own->bytes < t->slot ? own->bytes : t->slot;
    size_t *at = xcalloc((size_t)size + 1, sizeof *at);
    char *const mine = (*all = xcalloc((size_t)size, one)) + (size_t)collective_rank(t->group) * one;
    for (int k = 0; k < size; k++) at[k + 1] = at[k] + one;
    memcpy(mine, own, sizeof *own);
    if (n > 0) memcpy(mine + sizeof *own, t->records.p, n);
    const int rc = comm_all_gather(collective_comm(t->group), *all, at);
    free(at);
    return rc;
}

/* *all: every rank's message. A stop request that reached one rank counts for all. */
static int gather_wave(struct trained_model *t, char **all) {
    const struct wave_head own = {.bytes = t->records.n, .stop = comm_stop_asked(collective_comm(t->group))};
    struct wave_head head;
    uint64_t most = 0;
    TRY(gather_records(t, &own, all));
    for (int k = 0; k < collective_size(t->group); k++) {
        memcpy(&head, *all + (size_t)k * (sizeof head + t->slot), sizeof head);
        if (head.bytes > most) most = head.bytes;
        if (head.stop) phase_ask_stop((int)head.stop);
    }
    if (most <= t->slot) return 0;
    free(*all); /* the longest message so far: gather again, with room for it from now on */
    t->slot = most;
    return gather_records(t, &own, all);
}

/* The passes of a mini-batch on several ranks. */
struct waves {
    const struct mini_batch *s;
    struct step_result *r;
    bool bad; /* a micro-batch had a loss that is not finite */
};

/* Reports the micro-batches of a wave, in the order of the list, which is that of ranks; none after a bad one. */
static int report_wave(struct trained_model *t, struct waves *w, const struct pack_micro *list, int64_t n) {
    struct micro_head head;
    char *all = NULL;
    const char *at = NULL;
    int rc = 0;
    TRYG(gather_wave(t, &all), out);
    for (int64_t i = 0; i < n && !w->bad; i++) {
        const size_t rank = (size_t)(i / t->grad_chunk) * (size_t)ranks_of_one(t);
        if (i % t->grad_chunk == 0) at = all + rank * (sizeof(struct wave_head) + t->slot) + sizeof(struct wave_head);
        memcpy(&head, at, sizeof head);
        TRYG(report(t, w->s, &list[i], at + sizeof head, head.bytes, w->r), out);
        w->bad = !head.finite;
        at += sizeof head + (head.bytes + 7) / 8 * 8;
    }
out:
    free(all);
    return rc;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* This rank's chunk of a wave of n micro-batches. Where a loss is not finite its gradients are folded like others, and discarded
 * afterwards. */
static int run_chunk(struct trained_model *t, const struct waves *w, const struct pack_micro *list, int64_t n) {
    const struct mini_batch *const s = w->s;
    const int64_t longest = least(n, t->grad_chunk), left = n - collective_rank(t->group) / ranks_of_one(t) * t->grad_chunk,
                  own = least(left, longest);
    buf_reset(&t->records);
    for (int64_t i = 0; i < own; i++) {
        const struct pack_micro *const m = &list[n - left + i];
        struct model_grad_sink sink;
        struct computed c;
        TRY(forward_loss(t, s, m, &c));
        TRY(read_routers(t, &w->r->router));
        TRY(keep_record(t, c.finite));
        TRY(all_reduce_sink(t->ranks, i > 0, i == longest - 1, &sink));
        TRY(backward(t, s, m, &c, &sink));
    }
    for (int64_t i = own > 0 ? own : 0; i < longest; i++) { /* others compute: the same passes over the sharded weights */
        TRY(model_idle(t->model, t->no_adapter));
        if (i + 1 < longest) TRY(model_idle_back(t->model));
    }
    return own == longest ? 0 : all_reduce_idle(t->ranks);
}

/* A wave of n micro-batches, a chunk on each of the first ranks. Gathering the records overlaps with backward on the devices. */
static int wave(struct trained_model *t, struct waves *w, const struct pack_micro *list, int64_t n, bool first) {
    const int chunks = (int)((n + t->grad_chunk - 1) / t->grad_chunk), each = ranks_of_one(t);
    int64_t *rows = xcalloc((size_t)collective_size(t->group), sizeof *rows);
    int rc = 0;
    for (int k = 0; k < chunks && t->grad_chunk == 1; k++) /* of those that share a micro-batch the last has its rows */
        rows[(k + 1) * each - 1] = model_embedded_rows(&t->model->cfg, list[k].n_rows);
    all_reduce_wave(t->ranks, &(struct all_reduce_wave){chunks * each, rows, t->context.times, first});
    TRYG(run_chunk(t, w, list, n), out);
    TRYG(report_wave(t, w, list, n), out);
out:
    free(rows);
    return rc;
}

static int all_waves(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                     struct step_result *r) {
    const int64_t each = t->context.groups ? t->context.groups : t->grad_chunk * collective_size(t->group);
    struct waves w = {.s = s, .r = r};
    int rc = 0;
    for (int64_t i = 0; i < n && !w.bad && rc == 0; i += each) rc = wave(t, &w, list + i, least(n - i, each), i == 0);
    if (rc < 0 && rc != ERR_SIGNAL) return err_pass(rc, __FILE__, __LINE__);
    TRY(all_reduce_join(t->ranks)); /* after a stop as well, on which all agree: the ranks go on */
    TRY(model_stream_end(t->model));
    if (w.bad) loss_not_finite(t, &r->optim);
    return rc;
}

int trained_model_backward(struct trained_model *t, const struct mini_batch *s, struct step_result *r) {
    struct pack_micro *list;
    int64_t n = 0;
    CHECK(t->grads != NULL);
    *r = (struct step_result){0};
    TRY(micro_batch_list(&t->pack, s->seqs, s->n, s->cut, &list, &r->n_micro));
    t->mtp.n = 0;
    for (int64_t i = 0; i < s->n && t->mtp.weight > 0; i++) t->mtp.n += mtp_targets(&s->seqs[i]);
    model_stream_begin(t->model); /* the weights have changed, or others have used the block */
    for (int64_t i = 0; i < r->n_micro; i++) {
        if (list[i].n_targets > 0) list[n++] = list[i];
        else r->n_rows += list[i].n_rows;
    }
    int rc = begin_routers(t, s, list, n, r);
    if (rc == 0)
        rc = n == 0     ? dev_zero(t->dev, t->grads, grads_bytes(t))
             : t->group ? all_waves(t, s, list, n, r)
                        : all_micros(t, s, list, n, r);
    rc = end_routers(t, rc, r);
    free(list);
    return rc;
}

int trained_model_step(struct trained_model *t, const struct mini_batch *m, const struct optim_config *optim, double lr,
                       struct step_result *r) {
    TRY(trained_model_backward(t, m, r));
    if (!isfinite(r->optim.grad_norm)) return 0;
    if (t->ranks) return all_reduce_step(t->ranks, t->optim, optim, lr, &r->optim);
    return optim_step(t->optim, t->model, t->grads, optim, lr, &r->optim);
}
