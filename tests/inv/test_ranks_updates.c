/* test_ranks_updates.c - inv11: steps of a trained model on 1 to 4 processes, with weights whole and sharded, end in the
 * bits of one: master, optimizer state, compute copy, what the losses told and in which order, norms, and what is named when a
 * gradient is not finite. The ranks are this program again.
 *
 *   test_ranks_updates                     cpu and ref
 *   test_ranks_updates run DEVICE RANKS    one device, for one process and so many: cpu, ref, or cuda (GPU r of rank r) */
#include "model_case.h"

#include "base/log.h"
#include "base/rng.h"
#include "ranks/launcher.h"
#include "ranks/start_workers.h"
#include "run/phase_watchdog.h"
#include "train/trained_model.h"

#include <signal.h>

extern char **environ;

enum { N = 9, MAX_LEN = 12, LIST = 3, STEPS = 4, MOST_RANKS = 4 };
#define EACH(i, array) for (size_t i = 0; i < sizeof(array) / sizeof *(array); i++)

/* Sequences and the micro-batch's limit of each step: more micro-batches than ranks, fewer, one. */
static const struct { int64_t lo, hi, max_seqs; } MINI[STEPS] = {{0, 7, 1}, {2, 4, 1}, {0, 9, 2}, {5, 9, 4}};

enum fault { FINE, NAN_LOSS, HUGE_LOSS };
static const struct setup {
    const char *name, *model;
    struct optim_config optim;
    int64_t chunk, parts;                  /* grad_chunk; parts of a micro-batch; 0: 1 */
    bool ref;                              /* by the definition of the ops too, whose compute copy is one flat array */
    bool value, lora, list, mtp, detached; /* mtp: with an MTP layer's loss */
    bool experts;                          /* sharded, on ranks that have experts each */
    enum quant_kind quant;
    enum fault fault; /* of the first step */
} SETUPS[] = {
    {.name = "AdamW, tied", .model = "tied", .ref = true, .optim = {.kind = OPTIM_ADAMW, .clip = 0.01}},
    {.name = "AdamW, untied, without clipping", .model = "untied", .optim = {.kind = OPTIM_ADAMW}},
    {.name = "AdamW8bit", .model = "tied", .optim = {.kind = OPTIM_ADAMW8, .clip = 0.01}},
    {.name = "AMSGrad", .model = "tied", .ref = true, .optim = {.kind = OPTIM_ADAMW, .amsgrad = true, .clip = 0.01}},
    {.name = "RMSprop",
     .model = "untied",
     .optim = {.kind = OPTIM_RMSPROP, .alpha = 0.9, .momentum = 0.5, .centered = true, .maximize = true, .clip = 1}},
    {.name = "SGD", .model = "untied", .optim = {.kind = OPTIM_SGD, .momentum = 0.9, .nesterov = true, .clip = 0.5}},
    {.name = "Muon", .model = "tied", .optim = {.kind = OPTIM_MUON, .momentum = 0.95, .ns_steps = 3, .clip = 1}},
    {.name = "critic", .model = "untied", .ref = true, .optim = {.kind = OPTIM_ADAMW, .clip = 0.01}, .value = true},
    {.name = "LoRA", .model = "untied", .ref = true, .optim = {.kind = OPTIM_ADAMW, .clip = 0.01}, .lora = true},
    {.name = "QLoRA, Muon", .model = "untied", .optim = {.kind = OPTIM_MUON, .ns_steps = 2}, .lora = true, .quant = QUANT_NF4},
    {.name = "LoRA of a critic", .model = "tied", .optim = {.kind = OPTIM_ADAMW, .clip = 1}, .value = true, .lora = true},
    {.name = "state in host memory", .model = "tied", .optim = {.kind = OPTIM_ADAMW, .host_state = true, .clip = 1}},
    {.name = "master in host memory",
     .model = "untied",
     .optim = {.kind = OPTIM_ADAMW8, .host_state = true, .host_master = true, .clip = 1}},
    {.name = "lists of a teacher", .model = "tied", .optim = {.kind = OPTIM_ADAMW, .clip = 1}, .list = true},
    {.name = "MTP, tied", .model = "tied", .ref = true, .optim = {.kind = OPTIM_ADAMW, .clip = 0.01}, .mtp = true},
    {.name = "MTP", .model = "mtp", .optim = {.kind = OPTIM_ADAMW}, .mtp = true},
    {.name = "MTP, detached", .model = "mtp", .optim = {.kind = OPTIM_MUON, .ns_steps = 2}, .mtp = true, .detached = true},
    {.name = "chunks of 2, MTP, tied", .model = "tied", .optim = {.kind = OPTIM_ADAMW8}, .mtp = true, .chunk = 2},
    {.name = "a loss of NaN", .model = "untied", .optim = {.kind = OPTIM_ADAMW, .clip = 1}, .fault = NAN_LOSS},
    {.name = "a gradient of Inf", .model = "tied", .optim = {.kind = OPTIM_ADAMW, .clip = 1}, .fault = HUGE_LOSS},
    {.name = "chunks of 2, tied", .model = "tied", .ref = true, .optim = {.kind = OPTIM_ADAMW, .clip = 0.01}, .chunk = 2},
    {.name = "chunks of 3, untied", .model = "untied", .ref = true, .optim = {.kind = OPTIM_ADAMW}, .chunk = 3},
    {.name = "chunks of 4, Muon", .model = "tied", .optim = {.kind = OPTIM_MUON, .ns_steps = 3, .clip = 1}, .chunk = 4},
    {.name = "chunks of all", .model = "untied", .optim = {.kind = OPTIM_ADAMW}, .chunk = 1 << 24},
    {.name = "chunks of 2, critic", .model = "untied", .optim = {.kind = OPTIM_ADAMW}, .value = true, .chunk = 2},
    {.name = "chunks of 2, LoRA", .model = "untied", .ref = true, .optim = {.kind = OPTIM_ADAMW}, .lora = true, .chunk = 2},
    {.name = "chunks of 2, lists of a teacher", .model = "tied", .optim = {.kind = OPTIM_ADAMW}, .list = true, .chunk = 2},
    {.name = "chunks of 2, a loss of NaN", .model = "tied", .optim = {.kind = OPTIM_ADAMW}, .fault = NAN_LOSS, .chunk = 2},
    {.name = "2 parts, tied", .model = "tied", .ref = true, .optim = {.kind = OPTIM_ADAMW, .clip = 0.01}, .parts = 2},
    {.name = "2 parts, a loss of NaN", .model = "untied", .optim = {.kind = OPTIM_ADAMW}, .fault = NAN_LOSS, .parts = 2},
    {.name = "3 parts, critic", .model = "untied", .optim = {.kind = OPTIM_ADAMW}, .value = true, .parts = 3},
    {.name = "3 parts, LoRA", .model = "tied", .optim = {.kind = OPTIM_ADAMW}, .lora = true, .parts = 3},
    {.name = "4 parts, more than key heads", .model = "untied", .optim = {.kind = OPTIM_ADAMW}, .parts = 4},
    {.name = "3 parts, lists of a teacher", .model = "tied", .optim = {.kind = OPTIM_ADAMW}, .list = true, .parts = 3},
    {.name = "5 parts, MTP, tied",
     .model = "tied",
     .ref = true,
     .optim = {.kind = OPTIM_ADAMW, .clip = 0.01},
     .mtp = true,
     .parts = 5},
    {.name = "3 parts, MTP", .model = "mtp", .optim = {.kind = OPTIM_ADAMW}, .mtp = true, .parts = 3},
    {.name = "2 parts, MTP, detached", .model = "mtp", .optim = {.kind = OPTIM_ADAMW}, .mtp = true, .detached = true, .parts = 2},
    {.name = "experts", .model = "moe", .ref = true, .optim = {.kind = OPTIM_ADAMW, .clip = 0.01}, .experts = true},
    {.name = "experts, Muon, a loss of NaN",
     .model = "moe",
     .optim = {.kind = OPTIM_MUON, .ns_steps = 2},
     .fault = NAN_LOSS,
     .experts = true},
    {.name = "experts, LoRA", .model = "moe", .ref = true, .optim = {.kind = OPTIM_ADAMW8}, .lora = true, .experts = true},
    {.name = "experts, QLoRA", .model = "moe", .optim = {.kind = OPTIM_ADAMW}, .lora = true, .quant = QUANT_INT8, .experts = true},
    {.name = "chunks of 3, a loss of NaN", .model = "untied", .optim = {.kind = OPTIM_ADAMW}, .fault = NAN_LOSS, .chunk = 3},
};
static const struct {
    const char *name;
    enum dtype act;
} DEVICES[] = {{"cpu", DT_BF16}, {"ref", DT_F32}, {"cuda", DT_BF16}};
enum { TESTED = 2 }; /* of these, without arguments */

/* ---- the steps ---- */

/* What a process ends with. whole: master and state as in a checkpoint; here are the elements that pieces name. */
struct result {
    struct optim_array whole[OPTIM_MAX_ARRAYS + 1];
    void *own[OPTIM_MAX_ARRAYS + 1]; /* (own_bytes) */
    size_t own_bytes[OPTIM_MAX_ARRAYS + 1];
    int n_arrays;
    struct optim_piece *pieces;
    int64_t n_pieces;
    struct buf log; /* what was told, norms, the compute copy, log-probs: equal on all ranks */
    bool changed;
};

static void result_free(struct result *r) {
    for (int i = 0; i < r->n_arrays; i++) free(r->own[i]);
    free(r->pieces);
    buf_free(&r->log);
}

struct rig {
    const struct setup *s;
    struct dev dev;
    struct model *m;
    struct trained_model *t;
    struct packed_seq seqs[N];
    int32_t ids[N][MAX_LEN], list_id[N * MAX_LEN * LIST];
    float list_logp[N * MAX_LEN * LIST], list_dlogp[N * MAX_LEN * LIST];
    int step;
    int64_t n_micro;
    bool sharded;
    void *whole; /* sharded: all weights, of which the ranks have a share each */
    size_t whole_bytes;
    void *block; /* of the trained model, its gradients included */
    size_t block_bytes;
    struct result *out;
};

static double noise(int64_t a, int64_t b) {
    struct rng g = {.seed = 3, .stream = RNG_TEST, .n = (uint64_t)(a * 1000 + b) << 8};
    return (double)rng_normal(&g);
}

/* As a policy's or a critic's, of numbers that the forward pass gives. */
static int loss_fn(void *arg, const struct micro_loss *x) {
    struct rig *r = arg;
    double sum = 0;
    for (int64_t t = x->t0; t < x->t1; t++) {
        const double out = (double)x->out[t - x->t0], a = noise(r->step, t);
        const double d = r->s->value ? out - a : -a * exp(out - (out + 0.1 * noise(7, t)));
        x->dout[t - x->t0] = (float)(d / 100);
        if (x->dentropy) x->dentropy[t - x->t0] = 0.001f;
        for (int64_t k = t * LIST; r->s->list && k < (t + 1) * LIST; k++) r->list_dlogp[k] = -0.01f * expf(r->list_logp[k]);
        sum += d;
    }
    const bool third = r->s->fault != FINE && r->step == 0 && (x->lo == 3 || x->lo == 5);
    if (third) x->dout[0] = r->s->fault == NAN_LOSS ? NAN : 3e38f;
    TRY(buf_add(x->record, &sum, sizeof sum));
    return buf_add(x->record, x->out, (size_t)(x->t1 - x->t0) * sizeof *x->out);
}

static int told_fn(void *arg, const struct pack_micro *m, const void *record, size_t n) {
    struct rig *r = arg;
    const int64_t head[] = {r->step, m->index, m->lo, m->hi, m->t0, m->n_targets, (int64_t)n};
    r->n_micro++;
    if ((uintptr_t)record % 8) FAIL(ERR_INTERNAL, "a record is not aligned");
    TRY(buf_add(&r->out->log, head, sizeof head));
    TRY(buf_add(&r->out->log, record, n));
    return phase_check_stop();
}

/* What a rank has taken is what all_reduce_memory says, at most. before: bytes without the trained model. */
static int check_memory(const struct rig *r, const struct model_open_args *open, const struct lora_config *lora,
                        const struct trained_model_args *a, size_t before) {
    const struct optim *o = trained_model_optim(r->t);
    const int size = collective_size(a->group);
    const size_t share = (size_t)r->m->n_master * 4;
    struct all_reduce_memory x;
    const struct rank_memory_args args = {
        .config = &r->m->cfg,
        .dev = a->dev,
        .open = open,
        .lora = lora,
        .optim = a->optim,
        .max_rows = a->max_rows,
        .chunks = a->grad_chunk > 1,
        .times = model_parts_times(a->parts > 1 ? (int)a->parts : 1, a->keep.context > 1 ? a->keep.context : 1),
        .ranks = size,
        .local = size};
    TRY(all_reduce_memory(&x, &args));
    const size_t taken = a->dev->allocated - before, no_share = share ? 0 : 4,
                 exchange = x.chunk + x.exchange - collective_bytes(a->dev, size, size),
                 state = o->block_bytes + (dev_has_own_memory(a->dev) ? 0 : o->host_bytes);
    if (taken != no_share + state + exchange || share > x.master || share > x.sums || o->block_bytes > x.moments ||
        o->host_bytes > x.host)
        FAIL(ERR_INTERNAL, "%zu bytes were taken for state %zu, exchange %zu, share %zu", taken, state, exchange, share);
    return 0;
}

static int open_model(struct rig *r, const char *dir, const char *device, enum dtype act, struct collective **g, struct comm *c) {
    const struct setup *s = r->s;
    if (strcmp(device, "ref") == 0) TRY(dev_open_ref(&r->dev));
    else if (strcmp(device, "cuda") == 0) TRY(dev_open_cuda(&r->dev, c ? comm_rank(c) % dev_cuda_count() : 0));
    else TRY(dev_open_cpu(&r->dev, 1, NULL));
    if (c) TRY(collective_open(g, &r->dev, c));
    const bool experts = s->experts && r->sharded;
    const struct model_open_args a = {.dir = dir,
                                      .act = act,
                                      .flags = (s->lora ? MODEL_INFER : MODEL_TRAIN) |
                                               (s->optim.host_master ? MODEL_HOST_MASTER : 0) |
                                               (r->sharded ? MODEL_SHARDED_WEIGHTS : 0),
                                      .mtp = s->mtp,
                                      .mtp_detached = s->detached,
                                      .max_len = MAX_LEN,
                                      .quant = s->quant,
                                      .shard = all_reduce_shard(*g, &s->optim, experts)};
    TRY(s->value ? model_open_value(&r->m, &r->dev, &a, 5) : model_open(&r->m, &r->dev, &a));
    if (r->sharded && !s->optim.host_master && r->dev.allocated > model_open_bytes(&r->m->cfg, &r->dev, &a))
        FAIL(ERR_INTERNAL, "%zu bytes of weights", r->dev.allocated);
    struct lora_config l = {.rank = 4, .alpha = 8, .targets = json_string("all-linear")};
    struct trained_model_args t = {
        .dev = &r->dev,
        .model = r->m,
        .train = true,
        .keep = {.train = true,
                 .context = c && comm_size(c) > 1 ? (int)(comm_size(c) < s->parts ? comm_size(c) : s->parts) : 0,
                 .experts = experts},
        .parts = s->parts,
        .stream = r->sharded ? MODEL_STREAM_RANKS : MODEL_STREAM_NONE,
        .experts = {experts ? comm_size(c) : 0, 4 * MAX_LEN},
        .max_rows = 4 * MAX_LEN,
        .max_seqs = 4,
        .grad_chunk = s->chunk,
        .optim = &s->optim,
        .mtp_loss = s->mtp ? 0.3 : 0,
        .list = s->list ? LIST : 0,
        .group = *g};
    int rc = s->lora ? model_lora_create(r->m, &l, 3) : 0;
    t.grads = (size_t)r->m->n_master * 4;
    t.chunk = s->chunk > 1 && !(c && comm_size(c) > 1) ? t.grads : 0;
    r->block_bytes = trained_model_block_bytes(&r->m->cfg, act, &t);
    if (rc == 0) rc = dev_alloc(&r->dev, r->block_bytes, &r->block);
    t.block = r->block;
    const size_t before = r->dev.allocated;
    if (rc == 0) rc = trained_model_create(&r->t, &t);
    CHECK(rc < 0 || trained_model_expert_ranks(r->t) == (experts ? comm_size(c) : 1));
    if (rc == 0 && c && comm_size(c) > 1) rc = check_memory(r, &a, s->lora ? &l : NULL, &t, before);
    lora_config_free(&l);
    return rc;
}

static void make_sequences(struct rig *r) {
    struct rng g = {.seed = 8, .stream = RNG_TEST};
    for (int64_t i = 0; i < N; i++) {
        const int64_t n = 3 + (int64_t)rng_below(&g, MAX_LEN - 2);
        for (int64_t t = 0; t < n; t++) r->ids[i][t] = (int32_t)rng_below(&g, (uint64_t)r->m->cfg.vocab);
        r->seqs[i] =
            (struct packed_seq){.ids = r->ids[i], .n = n, .first = i == 2 ? n : 1 + (int64_t)rng_below(&g, (uint64_t)n / 2)};
    }
    for (int64_t i = 0; i < N * MAX_LEN; i++)
        for (int64_t k = 0; k < LIST; k++) r->list_id[i * LIST + k] = (int32_t)(i * 5 + k) % 1000;
}

/* As phases of a run leave it that use the same block. */
static int spoil(struct rig *r) {
    void *nan = xmalloc(r->block_bytes);
    memset(nan, 0xff, r->block_bytes);
    const int rc = dev_copy_in(&r->dev, r->block, nan, r->block_bytes);
    free(nan);
    return rc;
}

static int steps(struct rig *r) {
    const struct token_lists list = {.id = r->list_id, .logp = r->list_logp, .dlogp = r->list_dlogp};
    struct optim_config c = r->s->optim;
    c.lr = 1e-3;
    c.beta1 = 0.9;
    c.beta2 = 0.99;
    c.eps = 1e-8;
    c.weight_decay = 0.1;
    for (; r->step < STEPS; r->step++) {
        struct step_result x;
        const struct mini_batch m = {.seqs = r->seqs + MINI[r->step].lo,
                                     .n = MINI[r->step].hi - MINI[r->step].lo,
                                     .cut = {.max_seqs = MINI[r->step].max_seqs},
                                     .temperature = 0.8f,
                                     .entropy = !r->s->value,
                                     .entropy_grad = !r->s->value && r->step % 2,
                                     .list = r->s->list ? &list : NULL,
                                     .loss = loss_fn,
                                     .on_record = told_fn,
                                     .arg = r};
        TRY(spoil(r));
        TRY(trained_model_step(r->t, &m, &c, c.lr, &x));
        TRY(buf_add(&r->out->log, &x.optim.grad_norm, sizeof x.optim.grad_norm));
        TRY(buf_adds(&r->out->log, x.optim.bad_tensor));
        TRY(buf_add(&r->out->log, &x.n_rows, sizeof x.n_rows));
        TRY(buf_add(&r->out->log, &x.mtp, sizeof x.mtp));
        if (r->s->mtp && x.mtp.n <= 0) FAIL(ERR_INTERNAL, "the MTP layer predicted nothing");
        if (r->step == 0) r->out->changed = isfinite(x.optim.grad_norm);
    }
    return 0;
}

/* The compute copy, and what it says. */
static int take_weights(struct rig *r, struct collective *group) {
    struct model *const m = r->m;
    float out[N * MAX_LEN] = {0}, first[N * MAX_LEN];
    const int rank = group ? collective_rank(group) : 0, each = trained_model_context(r->t);
    const bool over = group && rank / each == collective_size(group) / each; /* of ranks that share rows none */
    const int64_t n = over ? 0 : N;
    const struct forward_out f = r->s->value ? (struct forward_out){.value = out} : (struct forward_out){.logp = out};
    trained_model_begin(r->t);
    TRY(trained_model_forward(r->t, r->seqs, n, (struct micro_batch_limits){.max_seqs = 2}, 1, f));
    for (int i = 0; r->sharded && i < rank / each; i++) /* the others take part in what they have not asked for */
        TRY(trained_model_forward(r->t, r->seqs, n, (struct micro_batch_limits){.max_seqs = 2}, 1, f));
    TRY(trained_model_end(r->t));
    memcpy(first, out, sizeof first);
    if (each > 1) TRY(comm_broadcast(collective_comm(group), 0, first, sizeof first));
    if (over) memcpy(out, first, sizeof out);
    TRY(buf_add(&r->out->log, out, sizeof out));
    if (r->sharded) {
        const struct model_stream_shape shape = model_stream_shape(m, MODEL_STREAM_RANKS, 0);
        const size_t all = r->whole_bytes = model_gathered_bytes(&shape);
        TRY(dev_alloc(&r->dev, all, &r->whole));
        TRY(collective_share(group, r->whole, all));
        TRY(model_gather(m, r->whole));
    }
    for (int64_t i = 0; i < m->n_groups && !m->quant; i++) {
        const struct model_group *g = &m->groups[i];
        const size_t bytes = (size_t)(g->n * (g->k ? g->k : 1)) * dtype_size(m->act);
        void *plain = NULL, *host = xmalloc(bytes);
        TRY(dev_alloc(&r->dev, bytes, &plain));
        struct weight w = g->mat;
        for (int64_t e = 0; g->k && e < g->count; e++) {
            TRY(dev_weight_unpack(&r->dev, tensor_rows(tensor_2d(plain, m->act, g->n, g->k), e * w.n, w.n), w));
            w.data = (char *)w.data + dev_weight_bytes(&r->dev, m->act, w.n, w.k);
        }
        if (!g->k) TRY(dev_copy(&r->dev, plain, g->vec.data, bytes));
        TRY(dev_copy_out(&r->dev, host, plain, bytes));
        TRY(buf_add(&r->out->log, host, bytes));
        dev_free(&r->dev, plain, bytes);
        free(host);
    }
    return 0;
}

static int take_state(struct rig *r) {
    struct result *out = r->out;
    struct optim *o = trained_model_optim(r->t);
    out->n_arrays = optim_pieces(o, r->m, out->whole, &out->pieces, &out->n_pieces);
    for (int64_t i = 0; i < out->n_pieces; i++) {
        const struct optim_piece *p = &out->pieces[i];
        const size_t end = (size_t)(p->own + p->n) * dtype_size(out->whole[p->array].dt);
        if (end > out->own_bytes[p->array]) out->own_bytes[p->array] = end;
    }
    for (int i = 0; i < out->n_arrays; i++) {
        out->own[i] = xmalloc(out->own_bytes[i] + 1);
        if (out->own_bytes[i]) TRY(dev_copy_out(&r->dev, out->own[i], out->whole[i].data, out->own_bytes[i]));
    }
    return 0;
}

/* comm NULL: one process. */
static int run_setup(const struct setup *s, const char *dir, size_t device, bool sharded, struct comm *c, struct result *out) {
    struct rig *r = xcalloc(1, sizeof *r);
    struct collective *g = NULL;
    int rc = 0;
    r->s = s;
    r->sharded = sharded;
    r->out = out;
    TRYG(open_model(r, dir, DEVICES[device].name, DEVICES[device].act, &g, c), out);
    make_sequences(r);
    TRYG(steps(r), out);
    TRYG(take_weights(r, g), out);
    TRYG(take_state(r), out);
    if (c) TRYG(comm_barrier(c), out);
out:
    collective_close(g);
    if (r->whole) dev_free(&r->dev, r->whole, r->whole_bytes);
    trained_model_destroy(r->t);
    if (r->block) dev_free(&r->dev, r->block, r->block_bytes);
    model_close(r->m);
    if (rc == 0 && r->dev.allocated + r->dev.host_allocated > 0) rc = ERR_INTERNAL;
    dev_close(&r->dev);
    free(r);
    return rc;
}

/* ---- a rank ---- */

static void add(struct ctl_result *to, const void *p, size_t n) {
    to->arrays = xrealloc(to->arrays, (size_t)(to->n_arrays + 1) * sizeof *to->arrays);
    to->arrays[to->n_arrays].p = xmalloc(n + 1);
    if (n > 0) memcpy(to->arrays[to->n_arrays].p, p, n);
    to->arrays[to->n_arrays++].n = n;
}

/* The log, the pieces, the arrays' own elements. */
static int train(struct comm *c, const struct comm_call *call, struct ctl_result *to) {
    struct result r = {0};
    log_set_level(LOG_WARN);
    const struct setup *s = &SETUPS[json_integer_value(json_object_get(call->args, "setup"))];
    int rc = run_setup(s, json_string_value(json_object_get(call->args, "dir")),
                       (size_t)json_integer_value(json_object_get(call->args, "device")),
                       json_is_true(json_object_get(call->args, "sharded")), c, &r);
    if (rc == ERR_SIGNAL) to->value = json_pack("{s:i}", "signal", phase_stop_signal());
    if (rc == ERR_SIGNAL) rc = 0;
    if (rc == 0) {
        add(to, r.log.p, r.log.n);
        add(to, r.pieces, (size_t)r.n_pieces * sizeof *r.pieces);
        for (int i = 0; i < r.n_arrays; i++) add(to, r.own[i], r.own_bytes[i]);
    }
    result_free(&r);
    return rc;
}

static const struct worker_process_service services[] = {{"train", train}, {NULL, NULL}};

/* ---- the test ---- */

/* Tensors of several segments; tied, mtp: with biases and an MTP layer, untied: with norms of queries and keys; moe: with experts,
 * and a shared one behind a gate. */
static char *make_model(const char *name, const char *top) {
    const bool tied = strcmp(name, "tied") == 0, mtp = tied || strcmp(name, "mtp") == 0;
    const bool moe = strcmp(name, "moe") == 0;
    char *path = case_path(mtp ? "mimo" : moe ? "qwen2_moe" : "qwen3", "config.json"), *dir = file_join(top, name);
    json_t *config = json_load_file(path, 0, NULL);
    assert_non_null(config);
    json_object_set_new(config, "num_hidden_layers", json_integer(3));
    json_object_set_new(config, "hidden_size", json_integer(64));
    json_object_set_new(config, "num_attention_heads", json_integer(4));
    json_object_set_new(config, "num_key_value_heads", json_integer(2));
    json_object_set_new(config, "head_dim", json_integer(16));
    json_object_set_new(config, "intermediate_size", json_integer(1088));
    json_object_set_new(config, "vocab_size", json_integer(1100));
    json_object_set_new(config, "tie_word_embeddings", json_boolean(tied));
    json_object_del(config, "layer_types");
    if (moe) json_object_set_new(config, "num_experts", json_integer(5));
    if (moe) json_object_set_new(config, "moe_intermediate_size", json_integer(544));
    OK(model_init_dir(config, dir, 7, DT_F32));
    json_decref(config);
    free(path);
    return dir;
}

static void same(const struct setup *s, size_t device, bool sharded, int ranks, const struct result *want,
                 const struct coordinator_reply *replies) {
    const char *const layout = sharded ? ", sharded" : "";
    for (int r = 0; r < ranks; r++) {
        const struct comm_bytes *a = replies[r].arrays;
        assert_int_equal(replies[r].n_arrays, 2 + want->n_arrays);
        if (a[0].n != want->log.n || memcmp(a[0].p, want->log.p, a[0].n) != 0)
            fail_msg("%s on %s%s: rank %d of %d ends with other weights, or was told otherwise", s->name, DEVICES[device].name,
                     layout, r, ranks);
    }
    for (int i = 0; i < want->n_arrays; i++) {
        const size_t unit = dtype_size(want->whole[i].dt);
        int64_t covered = 0;
        for (int r = 0; r < ranks; r++) {
            const struct optim_piece *p = replies[r].arrays[1].p;
            for (size_t k = 0; k < replies[r].arrays[1].n / sizeof *p; k++) {
                if (p[k].array != i) continue;
                covered += p[k].n;
                const char *got = (const char *)replies[r].arrays[2 + i].p + (size_t)p[k].own * unit;
                if (memcmp(got, (const char *)want->own[i] + (size_t)p[k].at * unit, (size_t)p[k].n * unit) != 0)
                    fail_msg("%s on %s%s: %s of rank %d of %d differs from one process'", s->name, DEVICES[device].name, layout,
                             want->whole[i].name, r, ranks);
            }
        }
        assert_int_equal(covered, want->whole[i].n);
    }
}

enum { MODELS = 4 };
static const char *const MODEL_NAMES[MODELS] = {"tied", "untied", "mtp", "moe"};
struct models {
    char *top, *dirs[MODELS];
};
static const char *dir_of(const struct models *m, const struct setup *s) {
    int i = 0;
    while (strcmp(s->model, MODEL_NAMES[i]) != 0) i++;
    return m->dirs[i];
}
static void models_open(struct models *m) {
    log_set_level(LOG_WARN); /* value heads are new */
    m->top = case_temp_dir();
    for (int i = 0; i < MODELS; i++) m->dirs[i] = make_model(MODEL_NAMES[i], m->top);
}
static void models_close(struct models *m) {
    case_drop_dir(m->top);
    for (int i = 0; i < MODELS; i++) free(m->dirs[i]);
}

static struct workers *open_ranks(int ranks) {
    struct workers *c;
    struct launch l;
    OK(launch_read(&l, environ));
    OK(workers_open(&c, &(struct workers_args){.ranks = ranks, .start_s = 60}, &l));
    return c;
}

/* The setup on all of a group's ranks; replies (MOST_RANKS). */
static void call(struct workers *c, const struct models *m, size_t setup, size_t device, bool sharded,
                 struct coordinator_reply *replies) {
    const char *dir = dir_of(m, &SETUPS[setup]);
    json_t *args =
        json_pack("{s:I, s:s, s:I, s:b}", "setup", (json_int_t)setup, "dir", dir, "device", (json_int_t)device, "sharded", sharded);
    if (workers_call_all(c, &(struct coordinator_call_args){.name = "train", .args = args, .answer_s = 60}, replies) < 0)
        fail_msg("%s, %d ranks: %s", SETUPS[setup].name, workers_size(c), err_msg());
    json_decref(args);
}

/* One process and each group end the same. */
static void compare(const struct models *m, size_t setup, size_t device, struct workers **groups, int n_groups) {
    const struct setup *s = &SETUPS[setup];
    struct result want = {0};
    OK(run_setup(s, dir_of(m, s), device, false, NULL, &want));
    assert_true(want.changed == (s->fault == FINE));
    for (int i = 0; i < 2 * n_groups; i++) {
        struct workers *const c = groups[i / 2];
        struct coordinator_reply replies[MOST_RANKS];
        const bool sharded = i % 2;
        if (sharded && ((s->lora && !s->experts && !s->value) || workers_size(c) < 2)) continue;
        if (s->experts && !sharded) continue;                                       /* as other models */
        if (sharded && n_groups > 1 && setup > 0 && workers_size(c) != 3) continue; /* of other numbers once */
        call(c, m, setup, device, sharded, replies);
        same(s, device, sharded, workers_size(c), &want, replies);
        for (int r = 0; r < workers_size(c); r++) coordinator_reply_free(&replies[r]);
    }
    result_free(&want);
}

static void inv11_any_number_of_ranks(void **state) {
    (void)state;
    struct models m;
    struct workers *groups[MOST_RANKS];
    models_open(&m);
    for (int i = 0; i < MOST_RANKS; i++) groups[i] = open_ranks(i + 1);
    EACH(i, SETUPS) for (size_t d = 0; d < TESTED; d++) {
        const int from = i == 0 ? 0 : 1; /* of one rank once */
        if (strcmp(DEVICES[d].name, "ref") != 0 || SETUPS[i].ref) compare(&m, i, d, groups + from, MOST_RANKS - from);
    }
    for (int i = 0; i < MOST_RANKS; i++) workers_close(groups[i], true);
    models_close(&m);
}

/* Chunks and parts decide the order of sums: chunks of several micro-batches give other bits, one of all those of none; parts
 * give others. */
static void chunks_and_parts_decide_bits(void **state) {
    (void)state;
    const int64_t chunks[] = {1, 2, 3, 1 << 24, 1, 1}, parts[] = {1, 1, 1, 1, 2, 3};
    struct result r[6] = {0};
    struct models m;
    models_open(&m);
    for (size_t d = 0; d < TESTED; d++) {
        for (int i = 0; i < 6; i++) {
            struct setup s = SETUPS[0];
            s.chunk = chunks[i];
            s.parts = parts[i];
            OK(run_setup(&s, m.dirs[0], d, false, NULL, &r[i]));
            assert_int_equal(r[i].own_bytes[0], r[0].own_bytes[0]);
        }
        assert_memory_equal(r[3].own[0], r[0].own[0], r[0].own_bytes[0]);
        assert_memory_not_equal(r[1].own[0], r[0].own[0], r[0].own_bytes[0]);
        assert_memory_not_equal(r[2].own[0], r[0].own[0], r[0].own_bytes[0]);
        assert_memory_not_equal(r[2].own[0], r[1].own[0], r[0].own_bytes[0]);
        assert_memory_not_equal(r[4].own[0], r[0].own[0], r[0].own_bytes[0]);
        assert_memory_not_equal(r[5].own[0], r[0].own[0], r[0].own_bytes[0]);
        assert_memory_not_equal(r[5].own[0], r[4].own[0], r[0].own_bytes[0]);
        for (int i = 0; i < 6; i++) result_free(&r[i]);
        memset(r, 0, sizeof r);
    }
    models_close(&m);
}

/* All stop after the same micro-batch, and are told no more. */
static void stop(const struct models *m, size_t setup) {
    struct result want = {0};
    struct coordinator_reply replies[MOST_RANKS];
    OK(run_setup(&SETUPS[setup], m->dirs[0], 0, false, NULL, &want));
    struct workers *c = open_ranks(3);
    coordinator_ask_stop(workers_coordinator(c), SIGTERM);
    call(c, m, setup, 0, true, replies);
    for (int r = 0; r < 3; r++) {
        const struct comm_bytes *a = replies[r].arrays;
        assert_int_equal(json_integer_value(json_object_get(replies[r].result, "signal")), SIGTERM);
        assert_true(a[0].n > 0 && a[0].n < want.log.n && a[0].n == replies[0].arrays[0].n);
        assert_memory_equal(a[0].p, want.log.p, a[0].n);
    }
    for (int r = 0; r < 3; r++) coordinator_reply_free(&replies[r]);
    workers_close(c, true);
    result_free(&want);
}

static void a_stop_is_everywhere_the_same(void **state) {
    (void)state;
    struct models m;
    size_t chunks = 0;
    models_open(&m);
    while (SETUPS[chunks].chunk == 0) chunks++;
    stop(&m, 0);
    stop(&m, chunks);
    models_close(&m);
}

static void run_device(void **state) {
    char **const args = *state;
    struct models m;
    size_t d = 0;
    while (d + 1 < sizeof DEVICES / sizeof *DEVICES && strcmp(DEVICES[d].name, args[0]) != 0) d++;
    models_open(&m);
    struct workers *c = open_ranks(atoi(args[1]));
    EACH(i, SETUPS) {
        if (args[2] && !strstr(SETUPS[i].name, args[2])) continue;
        compare(&m, i, d, &c, 1);
        print_message("%s: %s\n", SETUPS[i].name, "the same bits");
    }
    workers_close(c, true);
    models_close(&m);
}

static int worker(void) {
    struct launch l;
    int rc = launch_read(&l, environ);
    if (rc >= 0) rc = worker_process_serve(&(struct workers_args){.start_s = 60}, &l, services);
    if (rc < 0) fprintf(stderr, "%s\n", err_msg());
    return rc < 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "worker") == 0) return worker();
    if ((argc == 4 || argc == 5) && strcmp(argv[1], "run") == 0) { /* DEVICE RANKS, of setups with a word in their name */
        const struct CMUnitTest run[] = {cmocka_unit_test_prestate(run_device, argv + 2)};
        return cmocka_run_group_tests_name("updates of ranks", run, NULL, NULL);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inv11_any_number_of_ranks),
        cmocka_unit_test(chunks_and_parts_decide_bits),
        cmocka_unit_test(a_stop_is_everywhere_the_same),
    };
    return cmocka_run_group_tests_name("updates of ranks", tests, NULL, NULL);
}
