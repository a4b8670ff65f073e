/* memory_plan.c - see memory_plan.h. */
#include "supervised/memory_plan.h"

#include "model/parallel/weight_streaming.h"
#include "plan/memory_limit.h"
#include "plan/memory_rows.h"
#include "plan/model_memory.h"
#include "plan/rank_plan.h"

#include "base/err.h"
#include "base/log.h"
#include "base/size.h"

#include <stdio.h>
#include <stdlib.h>

/* What is planned. */
struct query {
    const struct supervised_worker_config *k;
    struct dev *dev;
    const struct model_config *c;
    int64_t longest; /* tokens of the longest sample */
};

struct plan {
    struct model_memory model;
    struct trained_model_args a; /* but its model */
    struct dev_sizes sizes;
    size_t fixed, pass, limit; /* bytes: all but the pass; activations and scratch; what the run may take */
    size_t least;              /* with as little kept as the keys allow */
    const char *why_experts;   /* why ranks have no experts of their own, which the key asks for; NULL: they have, or it does not */
    size_t copy;               /* host memory for asynchronous checkpoints; 0: they are synchronous */
};

/* Of layers on ranks, where the key asks for it; the other weights are sharded then. */
static void plan_experts(struct plan *p, const struct query *q) {
    const struct supervised_worker_config *const k = q->k;
    struct trained_model_args *const a = &p->a;
    if (k->data.experts <= 1) return;
    p->why_experts = k->ranks.n < 2           ? "there is one rank"
                     : k->data.context > 1    ? "ranks share the rows of a micro-batch (context parallel)"
                     : k->data.grad_chunk > 1 ? "data.grad_chunk adds up gradients of several micro-batches first"
                                              : model_dispatch_unable(q->c);
    if (p->why_experts) return;
    a->stream = MODEL_STREAM_RANKS;
    a->quant = k->model.lora.quant;
    a->experts = (struct model_dispatch_shape){(int)k->ranks.n, a->max_rows};
    a->keep.experts = true;
}

/* All but activations: weights, adapter, master, gradients, optimizer state. */
static int model_bytes(struct model_memory *m, const struct query *q, const struct trained_model_args *t) {
    const struct supervised_worker_config *const k = q->k;
    const int64_t max_rows = t->max_rows;
    const struct model_open_args open = {
        .act = k->model.act,
        .flags = model_stream_flags(t->stream),
        .max_len = k->data.max_length,
        .quant = k->model.lora.quant,
        .shard = {.size = (int)k->ranks.n, .whole_matrices = k->optim.kind == OPTIM_MUON, .experts = t->experts.ranks > 1}};
    const struct model_memory_args a = {.config = q->c,
                                        .dev = q->dev,
                                        .open = &open,
                                        .lora = &k->model.lora,
                                        .optim = &k->optim,
                                        .max_rows = max_rows,
                                        .grad_chunk = k->data.grad_chunk,
                                        .parts = k->data.context,
                                        .ranks = k->ranks.n,
                                        .local = k->ranks.n_local};
    return model_memory(m, &a);
}

static size_t pass_bytes(const struct plan *p, const struct query *q) {
    return dev_working_bytes(q->dev, &p->sizes) + train_pages(trained_model_block_bytes(q->c, q->k->model.act, &p->a));
}

/* Parts of a micro-batch, and how many ranks share them. */
static void plan_parts(struct plan *p, const struct query *q) {
    const int64_t asked = q->k->data.context, ranks = q->k->ranks.n;
    p->a.parts = asked;
    p->a.keep.context = asked > 1 && ranks > 1 ? (int)(ranks < asked ? ranks : asked) : 0;
    p->a.keep.parts = p->a.keep.context ? (int)asked : 0;
}

static int plan_make(struct plan *p, const struct query *q) {
    const struct supervised_worker_config *const k = q->k;
    const struct micro_batch_limits cut = k->data.cut;
    const bool own = dev_has_own_memory(q->dev);
    *p = (struct plan){.a = {.dev = q->dev,
                             .train = true,
                             .mtp_loss = train_mtp_loss(&k->model.mtp),
                             .optim = &k->optim,
                             .grad_chunk = k->data.grad_chunk}};
    struct trained_model_args *const a = &p->a;
    a->max_rows = cut.max_rows == 0 ? size_mul(cut.max_seqs, q->longest) : cut.max_rows > q->longest ? cut.max_rows : q->longest;
    a->max_seqs = cut.max_seqs > 0 ? cut.max_seqs : k->data.train_batch_size;
    TRY(micro_batch_rows_check("data.micro_batch_size_per_gpu", a->max_seqs, q->longest, a->max_rows));
    p->sizes = model_dev_sizes(q->c, k->model.act, a->max_rows, a->max_rows, 1);
    p->limit = plan_memory_limit(q->dev, k->trainer->memory_limit);
    if (!own) p->limit /= (size_t)k->ranks.n_local;
    plan_experts(p, q);
    TRY(model_bytes(&p->model, q, a));
    plan_parts(p, q);
    const int together = a->keep.context;
    if (together > 1) p->model.exchange += train_pages(collective_bytes(q->dev, together, (int)k->ranks.n_local));
    p->fixed = model_memory_bytes(&p->model) + dev_driver_bytes(q->dev);
    a->keep = train_keep(k->model.recompute, q->c, k->model.act, a->max_rows, a->keep, 0);
    p->pass = pass_bytes(p, q);
    p->least = p->fixed + p->pass;
    if (own && together <= 1 && !a->keep.experts && k->model.recompute == RECOMPUTE_AUTO &&
        p->least < p->limit) { /* ranks that compute together keep alike */
        a->keep = train_keep(RECOMPUTE_AUTO, q->c, k->model.act, a->max_rows, (struct model_keep){0}, p->limit - p->least);
        p->pass = pass_bytes(p, q);
    }
    const size_t used = p->fixed + p->pass, room = own && used < p->limit ? (p->limit - used) / train_pages(1) * train_pages(1) : 0;
    a->keep = train_keep_logits(a->keep, q->dev, q->c, k->model.act, a->max_rows, room);
    p->pass = pass_bytes(p, q);
    const size_t host = plan_host_limit(k->ranks.host_memory) / (size_t)k->ranks.n_local;
    p->copy = plan_checkpoint_copy(&k->trainer->run, k->conf, p->model.copy, own ? p->model.host : p->fixed + p->pass,
                                   own ? host : p->limit);
    if (!own) p->fixed += p->copy;
    return 0;
}

/* ---- the refusal ---- */

/* Whether a run with this configuration instead would fit. */
static bool fits(const struct query *q, const struct supervised_worker_config *k) {
    const struct query other = {k, q->dev, q->c, q->longest};
    struct plan p;
    return plan_make(&p, &other) == 0 && p.least + (dev_has_own_memory(q->dev) ? 0 : p.copy) <= p.limit;
}

/* The nearest change that fits: first those that leave the result as it is and cost least. */
static int refuse(const struct plan *p, const struct query *q) {
    const bool own = dev_has_own_memory(q->dev), samples = q->k->data.cut.max_seqs > 0;
    struct supervised_worker_config k = *q->k;
    char text[160];
    const char *const need = memory_need(text, p->fixed + p->pass, p->limit, "");
    k.model.recompute = RECOMPUTE_AUTO;
    if (fits(q, &k)) return memory_refuse(need, "model.enable_gradient_checkpointing=True, without a trainer.recompute,");
    k = *q->k;
    while (micro_batch_limits_lower(&k.data.cut, q->longest))
        if (fits(q, &k))
            return memory_refuse(need, "data.%s=%lld", samples ? "micro_batch_size_per_gpu" : "max_token_len_per_gpu",
                                 (long long)(samples ? k.data.cut.max_seqs : k.data.cut.max_rows));
    k = *q->k;
    k.data.grad_chunk = 1;
    if (q->k->data.grad_chunk > 1 && fits(q, &k)) return memory_refuse(need, "without data.grad_chunk it");
    k = *q->k;
    k.optim.host_master = k.optim.host_state = true;
    if (own && !q->k->optim.host_state && fits(q, &k)) return memory_refuse(need, "engine.optimizer_offload=True");
    k = *q->k;
    for (k.data.context = 2; q->k->data.context == 1 && k.data.grad_chunk == 1 && k.data.context <= k.ranks.n; k.data.context++)
        if (k.ranks.n % k.data.context == 0 && fits(q, &k))
            return memory_refuse(need, "engine.ulysses_sequence_parallel_size=%lld (context parallel)", (long long)k.data.context);
    FAIL(ERR_NOMEM, "%s; no smaller micro-batch fits: train an adapter (model.lora_rank), or lower data.max_length", need);
}

static int plan_check(const struct plan *p, const struct query *q) {
    const size_t total = p->fixed + p->pass;
    if (p->copy && !dev_has_own_memory(q->dev) && p->least <= p->limit && total > p->limit)
        FAIL(ERR_NOMEM, "trainer.async_save=True needs %.2f GiB more than there is; without it the run fits",
             (double)(total - p->limit) / 0x1p30);
    return p->least > p->limit ? refuse(p, q) : 0;
}

/* ---- the rows ---- */

static json_t *add_rows(const struct plan *p, const struct query *q, struct buf *text) {
    struct memory_rows r = {.text = text, .narrow = true};
    const struct supervised_worker_config *const k = q->k;
    const bool several = k->ranks.n > 1;
    const struct memory_training t = {.model = &p->model,
                                      .master = k->optim.host_master ? "in host memory"
                                                : several            ? "a shard"
                                                                     : "",
                                      .state = optim_kind_name(k->optim.kind),
                                      .grad_chunk = k->data.grad_chunk,
                                      .own_grads = true,
                                      .several = several};
    char note[192], kept[96];
    memory_rows_open(&r, p->fixed + p->pass, p->limit);
    memory_row(&r, "weights", p->model.weights, k->model.lora.on ? "frozen" : "");
    if (p->model.adapter) memory_row(&r, "adapter", p->model.adapter, "compute copies and scratch");
    memory_rows_training(&r, &t);
    snprintf(note, sizeof note, "micro-batch of %lld tokens, %s", (long long)p->a.max_rows,
             train_keep_text(p->a.keep, q->c, kept, sizeof kept));
    memory_row(&r, "activations, scratch", p->pass - model_kept_bytes(q->c, p->a.keep.logits), note);
    memory_row_logits(&r, "kept logits", q->c, p->a.keep.logits);
    if (p->copy) memory_row(&r, "checkpoint", p->copy, "a copy in host memory, written during the next steps");
    memory_row_text(&r, "total", p->fixed + p->pass, "");
    memory_row_text(&r, "limit", p->limit, "");
    return r.json;
}

void supervised_planned_free(struct supervised_planned *p) {
    json_decref(p->json);
    free(p->text);
    *p = (struct supervised_planned){0};
}

static void plan_offload(struct supervised_worker_config *k, const struct dev *dev) {
    struct optim_config *const o = &k->optim;
    if (!plan_can_offload(dev, o->host_master)) o->host_master = o->host_state = false;
}

int supervised_memory_plan(struct supervised_worker_config *k, struct dev *dev, const struct model_config *c, int64_t longest,
                           struct trained_model_args *a, struct supervised_planned *out) {
    const struct query q = {k, dev, c, longest};
    struct plan p;
    char kept[96];
    plan_offload(k, dev);
    TRY(plan_make(&p, &q));
    *a = p.a;
    TRY(plan_check(&p, &q));
    out->text =
        xasprintf("update: micro-batch of %lld tokens, %.2f GiB of activations, %s", (long long)a->max_rows,
                  (double)trained_model_block_bytes(c, k->model.act, a) / 0x1p30, train_keep_text(a->keep, c, kept, sizeof kept));
    if (p.why_experts) log_note("expert parallel: the key has no effect: %s", p.why_experts);
    out->async_save = p.copy > 0;
    out->json = add_rows(&p, &q, NULL);
    dev->planned = p.fixed + p.pass;
    return dev_reserve(dev, &p.sizes);
}

/* How several ranks share the work; the plan of one alone for comparison. */
static json_t *ranks_table(const struct plan *p, const struct query *q, struct buf *b) {
    const struct supervised_worker_config *const k = q->k;
    struct rank_plan r = {.n = k->ranks.n,
                          .local = k->ranks.n_local,
                          .micro =
                              rank_plan_micro_batches(k->data.cut, p->a.max_rows, k->data.max_length, k->data.train_batch_size),
                          .chunk = k->data.grad_chunk,
                          .context = p->a.keep.context,
                          .key_heads = model_is_latent(q->c) ? 0 : q->c->n_kv_heads,
                          .parts = p->a.parts,
                          .uneven = p->model.uneven,
                          .limit = p->limit,
                          .layout = p->a.stream ? LAYOUT_SHARDED : LAYOUT_WHOLE,
                          .expert_ranks = p->a.experts.ranks,
                          .why_experts = p->why_experts};
    struct supervised_worker_config one = *k;
    struct plan own;
    r.least[r.layout] = p->least;
    one.ranks.n = one.ranks.n_local = 1;
    if (plan_make(&own, &(struct query){&one, q->dev, q->c, q->longest}) == 0) r.one = own.least;
    return rank_plan_print(&r, b);
}

int supervised_memory_plan_print(struct supervised_worker_config *k, struct dev *dev, const struct model_config *c,
                                 struct run_plan *out) {
    const struct query q = {k, dev, c, k->data.max_length};
    struct plan p;
    struct err_saved why;
    struct buf *const b = &out->text;
    plan_offload(k, dev);
    TRY(plan_make(&p, &q));
    buf_addf(b, "memory plan: %s of %.3f B parameters, %s, samples of up to %lld tokens", k->trainer->run.title,
             (double)model_config_params(c) / 1e9, dtype_name(k->model.act), (long long)k->data.max_length);
    if (k->ranks.n > 1) buf_addf(b, "; each of %lld ranks:", (long long)k->ranks.n);
    buf_adds(b, "\n");
    out->json = add_rows(&p, &q, b);
    out->fits = plan_check(&p, &q) == 0;
    err_save(&why);
    json_object_set_new(out->json, "fits", json_boolean(out->fits));
    if (k->ranks.n > 1) json_object_set_new(out->json, "ranks", ranks_table(&p, &q, b));
    err_restore(&why);
    if (!out->fits) buf_addf(b, "  does not fit: %s\n", err_msg());
    return 0;
}
