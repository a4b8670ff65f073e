/* trained_model.c - a trained model's memory, and forward passes over packed micro-batches without a loss.
 * Its training is training_pass.c's, the arithmetic of the model model/forward.h's. */
#include "train/trained_model_int.h"

#include "run/phase_watchdog.h"
#include "train/router_replay.h"

#include "base/arena.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>

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

size_t trained_model__grads_bytes(const struct trained_model *t) {
    return (size_t)(t->model->n_master > 0 ? t->model->n_master : 1) * sizeof *t->grads;
}

/* As many floats as the master's: `room`, of so many bytes, or memory of their own. */
static int take_grads(struct trained_model *t, void *room, size_t bytes, void **owned, float **at) {
    CHECK(bytes == 0 || bytes >= trained_model__grads_bytes(t));
    if (bytes == 0) TRY(dev_alloc(t->dev, trained_model__grads_bytes(t), owned));
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
    if (t->owned_chunk) dev_free(t->dev, t->owned_chunk, trained_model__grads_bytes(t));
    if (t->owned_grads) dev_free(t->dev, t->owned_grads, trained_model__grads_bytes(t));
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

struct model_list *trained_model__list(struct trained_model *t, const struct token_lists *s, int64_t at) {
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

int trained_model__forward(struct trained_model *t, float temperature, struct pack_targets r, struct model_batch *b,
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

int trained_model__take_part(struct trained_model *t, const struct pack_micro *m, int parts, struct model_batch *b,
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

int trained_model__gather(struct trained_model *t, void *x, const int64_t *at, int64_t width) {
    size_t bytes[MODEL_MOST_PARTS + 1];
    if (!x || !t->context.ranks) return 0;
    for (int r = 0; r <= t->context.size; r++) bytes[r] = (size_t)(at[r] * width) * 4;
    return comm_all_gather(t->context.comm, x, bytes);
}

int trained_model__gather_lists(struct trained_model *t, const struct token_lists *s, int64_t first, const int64_t *at) {
    const int64_t k = t->list.k;
    if (!s) return 0;
    TRY(trained_model__gather(t, s->id ? s->logp + first * k : NULL, at, k));
    TRY(trained_model__gather(t, s->top_id ? s->top_id + first * k : NULL, at, k));
    return trained_model__gather(t, s->top_logp ? s->top_logp + first * k : NULL, at, k);
}

/* The pass over a micro-batch with targets, which are those from `at` on. */
static int forward_micro(struct trained_model *t, const struct packed_seq *seqs, const struct pack_micro *m, float temperature,
                         const struct forward_out *out, int64_t at) {
    int64_t of[MODEL_MOST_PARTS + 1];
    struct model_batch b;
    struct pack_targets own;
    struct model_logp_args l = {.entropy = out->entropy ? t->entropy : NULL, .sum_pi_sq = out->sum_pi_sq ? t->sum_pi_sq : NULL};
    TRY(micro_batch_fill(&t->pack, seqs, m, &b));
    TRY(trained_model__take_part(t, m, t->context.size, &b, &own, of));
    l.list = trained_model__list(t, out->list, at + own.lo);
    TRY(trained_model__forward(t, temperature, own, &b, &l));
    TRY(trained_model__gather(t, t->out, of, 1));
    TRY(trained_model__gather(t, out->entropy ? t->entropy : NULL, of, 1));
    TRY(trained_model__gather(t, out->sum_pi_sq ? t->sum_pi_sq : NULL, of, 1));
    return trained_model__gather_lists(t, out->list, at, of);
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
        if (out.routes && m.n_targets > 0) TRY(trained_model__gather(t, out.routes + rows * words, t->context.cut.cut, words));
        rows += m.n_rows;
        const size_t bytes = (size_t)m.n_targets * 4;
        if (to) memcpy(to + at, t->out, bytes);
        if (out.entropy) memcpy(out.entropy + at, t->entropy, bytes);
        if (out.sum_pi_sq) memcpy(out.sum_pi_sq + at, t->sum_pi_sq, bytes);
        at += m.n_targets;
    }
    return 0;
}
