/* memory_plan.c - see memory_plan.h. */
#include "supervised/memory_plan.h"

#include "algo/micro_batch_balance.h"
#include "model/parallel/weight_streaming.h"
#include "plan/memory_limit.h"
#include "plan/model_memory.h"
#include "plan/rank_plan.h"

#include "base/err.h"
#include "base/log.h"
#include "base/size.h"

#include <stdio.h>
#include <stdlib.h>

/* All but activations: weights, adapter, master, gradients, optimizer state. */
static int model_bytes(struct model_memory *m, const struct supervised_config *k, struct dev *dev, const struct model_config *c,
                       const struct optim_config *o, int64_t max_rows) {
    const struct model_open_args open = {.act = k->act, .flags = MODEL_INFER, .max_len = k->max_length, .quant = k->lora.quant};
    const struct model_memory_args a = {.config = c,
                                        .dev = dev,
                                        .open = &open,
                                        .lora = &k->lora,
                                        .optim = o,
                                        .max_rows = max_rows,
                                        .grad_chunk = k->grad_chunk,
                                        .ranks = k->n_ranks,
                                        .local = k->n_local};
    return model_memory(m, &a);
}

static size_t pass_bytes(const struct supervised_config *k, struct dev *dev, const struct model_config *c,
                         const struct trained_model_args *a) {
    const struct dev_sizes z = model_dev_sizes(c, k->act, a->max_rows, a->max_rows, 1);
    return dev_working_bytes(dev, &z) + train_pages(trained_model_block_bytes(c, k->act, a));
}

static void set_cut(struct trained_model_args *a, struct micro_batch_limits cut, int64_t longest, int64_t batch) {
    a->max_rows = cut.max_rows == 0 ? size_mul(cut.max_seqs, longest) : cut.max_rows > longest ? cut.max_rows : longest;
    a->max_seqs = cut.max_seqs > 0 ? cut.max_seqs : batch;
}

/* A run as it was sized, for the search of a smaller one. */
struct planned {
    const struct supervised_config *k;
    struct dev *dev;
    const struct model_config *c;
    const struct trained_model_args *a;
    int64_t longest; /* tokens of the longest sample */
};

/* The first micro-batch on the way to the smallest one whose pass takes at most `room` bytes; false: none does. */
static bool smaller_cut(const struct planned *x, size_t room, struct micro_batch_limits *cut) {
    struct trained_model_args a = *x->a;
    while (micro_batch_limits_lower(cut, x->longest)) {
        set_cut(&a, *cut, x->longest, x->k->train_batch_size);
        if (pass_bytes(x->k, x->dev, x->c, &a) <= room) return true;
    }
    return false;
}

/* The nearest change that fits: first those that leave the result as it is and cost least. chunk: bytes of `fixed` that a chunk
 * takes. */
static int refuse(const struct planned *x, size_t fixed, size_t chunk, size_t limit) {
    const struct supervised_config *const k = x->k;
    const struct model_config *const c = x->c;
    const struct trained_model_args *const a = x->a;
    struct dev *const dev = x->dev;
    struct trained_model_args again = *a;
    struct micro_batch_limits cut = k->cut;
    struct optim_config o = k->optim;
    char need[96];
    snprintf(need, sizeof need, "the run needs %.2f GiB, the limit is %.2f GiB",
             (double)(fixed + pass_bytes(k, dev, c, a)) / 0x1p30, (double)limit / 0x1p30);
    again.keep = train_keep(RECOMPUTE_AUTO, c, k->act, a->max_rows, 0);
    if (fixed + pass_bytes(k, dev, c, &again) <= limit)
        FAIL(ERR_NOMEM, "%s; model.enable_gradient_checkpointing=True, without a trainer.recompute, fits (the result is the same)",
             need);
    if (fixed < limit && smaller_cut(x, limit - fixed, &cut))
        FAIL(ERR_NOMEM, "%s; data.%s=%lld fits (the result is the same)", need,
             cut.max_seqs > 0 ? "micro_batch_size_per_gpu" : "max_token_len_per_gpu",
             (long long)(cut.max_seqs > 0 ? cut.max_seqs : cut.max_rows));
    if (chunk > 0 && fixed - chunk + pass_bytes(k, dev, c, a) <= limit)
        FAIL(ERR_NOMEM, "%s; without data.grad_chunk it fits (the result is the same)", need);
    o.host_master = o.host_state = true;
    if (dev_has_own_memory(dev) && !k->optim.host_state) {
        struct model_memory m;
        TRY(model_bytes(&m, k, dev, c, &o, a->max_rows));
        fixed = model_memory_bytes(&m) + dev_driver_bytes(dev);
        if (fixed + pass_bytes(k, dev, c, a) <= limit)
            FAIL(ERR_NOMEM, "%s; engine.optimizer_offload=True fits (the result is the same)", need);
    }
    FAIL(ERR_NOMEM, "%s; no smaller micro-batch fits: train an adapter (model.lora_rank), or lower data.max_length", need);
}

struct supervised_plan {
    struct model_memory model;
    struct dev_sizes sizes;
    size_t fixed, pass, limit; /* bytes: all but the pass; activations and scratch; what the run may take */
    size_t least;              /* with as little kept as the keys allow */
    size_t copy;               /* host memory for asynchronous checkpoints; 0: they are synchronous */
};

/* Whether a checkpoint is copied and written during the next steps. */
static void plan_async_save(struct supervised_plan *p, const struct supervised_config *k, const struct dev *dev) {
    const bool own = dev_has_own_memory(dev), is_set = !conf_is_null(k->conf, "trainer.async_save");
    const size_t taken = own ? p->model.host : p->fixed + p->pass,
                 there = own ? train_host_limit(k->host_memory) / (size_t)k->n_local : p->limit;
    const size_t room = there > taken ? there - taken : 0, copy = p->model.copy;
    if (!run_saves_midway(&k->run) || !train_async_save(is_set, k->run.async_save, copy, room)) return;
    p->copy = copy;
    if (!own) p->fixed += copy;
}

static int plan(struct supervised_plan *p, struct supervised_config *k, struct dev *dev, const struct model_config *c,
                int64_t longest, struct trained_model_args *a) {
    struct optim_config *const o = &k->optim;
    if (o->host_master && !dev_has_own_memory(dev)) {
        log_note("param_offload and optimizer_offload change nothing on this device, whose memory is the host's");
        o->host_master = o->host_state = false;
    }
    *a = (struct trained_model_args){.dev = dev, .train = true, .optim = o, .grad_chunk = k->grad_chunk};
    set_cut(a, k->cut, longest, k->train_batch_size);
    TRY(micro_batch_rows_check("data.micro_batch_size_per_gpu", a->max_seqs, longest, a->max_rows));
    p->sizes = model_dev_sizes(c, k->act, a->max_rows, a->max_rows, 1);
    p->limit = train_memory_limit(dev, k->memory_limit);
    if (!dev_has_own_memory(dev)) p->limit /= (size_t)k->n_local;
    TRY(model_bytes(&p->model, k, dev, c, o, a->max_rows));
    p->fixed = model_memory_bytes(&p->model) + dev_driver_bytes(dev);
    a->keep = train_keep(k->recompute, c, k->act, a->max_rows, 0);
    const size_t least = p->fixed + pass_bytes(k, dev, c, a);
    if (dev_has_own_memory(dev) && k->recompute == RECOMPUTE_AUTO && least < p->limit)
        a->keep = train_keep(RECOMPUTE_AUTO, c, k->act, a->max_rows, p->limit - least);
    p->least = least;
    p->pass = pass_bytes(k, dev, c, a);
    plan_async_save(p, k, dev);
    if (p->copy && !dev_has_own_memory(dev) && least <= p->limit && p->fixed + p->pass > p->limit)
        FAIL(ERR_NOMEM, "trainer.async_save=True needs %.2f GiB more than there is; without it the run fits",
             (double)(p->fixed + p->pass - p->limit) / 0x1p30);
    const struct planned x = {.k = k, .dev = dev, .c = c, .a = a, .longest = longest};
    return least > p->limit ? refuse(&x, p->fixed, p->model.chunk + p->model.shared_chunk, p->limit) : 0;
}

struct plan_table {
    struct buf *text;
    json_t *parts; /* the same rows for run.db (track/run_db.c has their form) */
};

static void text_row(struct buf *b, const char *what, size_t bytes, const char *note) {
    buf_addf(b, "  %-22s %9.2f GiB%s%s\n", what, (double)bytes / 0x1p30, *note ? "  " : "", note);
}

/* A part of the total. */
static void row(const struct plan_table *b, const char *what, size_t bytes, const char *note) {
    text_row(b->text, what, bytes, note);
    json_array_append_new(
        b->parts, json_pack("{s:s, s:I, s:s, s:b}", "name", what, "bytes", (json_int_t)bytes, "note", note, "block", false));
}

static void parts_table(const struct supervised_plan *p, const struct supervised_config *k, const struct model_config *c,
                        const struct trained_model_args *a, const struct plan_table *b) {
    char note[192], text[96];
    row(b, "weights", p->model.weights, k->lora.on ? "frozen" : "");
    if (p->model.adapter) row(b, "adapter", p->model.adapter, "compute copies and scratch");
    const bool several = k->n_ranks > 1;
    row(b, "fp32 master", p->model.master, k->optim.host_master ? "in host memory" : several ? "a shard" : "");
    row(b, "gradients", p->model.grads, several ? "fp32, a shard" : "fp32");
    snprintf(note, sizeof note, "fp32, of %lld micro-batches", (long long)k->grad_chunk);
    if (p->model.chunk + p->model.shared_chunk) row(b, "gradients of a chunk", p->model.chunk + p->model.shared_chunk, note);
    row(b, "optimizer state", p->model.moments, optim_kind_name(k->optim.kind));
    if (several) row(b, "exchange", p->model.exchange, "gradients and weights in transfer between ranks");
    snprintf(note, sizeof note, "micro-batch of %lld tokens, %s", (long long)a->max_rows,
             train_keep_text(a->keep, c, text, sizeof text));
    row(b, "activations, scratch", p->pass, note);
    if (p->copy) row(b, "checkpoint", p->copy, "a copy in host memory, written during the next steps");
}

void supervised_planned_free(struct supervised_planned *p) {
    json_decref(p->json);
    free(p->text);
    *p = (struct supervised_planned){0};
}

int supervised_memory_plan(struct supervised_config *k, struct dev *dev, const struct model_config *c, int64_t longest,
                           struct trained_model_args *a, struct supervised_planned *out) {
    struct supervised_plan p;
    struct buf table = {0};
    char text[96];
    TRY(plan(&p, k, dev, c, longest, a));
    out->text = xasprintf("update: micro-batch of %lld tokens, %.2f GiB of activations, %s", (long long)a->max_rows,
                          (double)trained_model_block_bytes(c, k->act, a) / 0x1p30, train_keep_text(a->keep, c, text, sizeof text));
    out->async_save = p.copy > 0;
    out->json = json_pack("{s:I, s:I, s:[]}", "total", (json_int_t)(p.fixed + p.pass), "limit", (json_int_t)p.limit, "parts");
    parts_table(&p, k, c, a, &(struct plan_table){&table, json_object_get(out->json, "parts")});
    buf_free(&table);
    dev->planned = p.fixed + p.pass;
    return dev_reserve(dev, &p.sizes);
}

/* How several ranks share the work; the plan of one alone for comparison. */
static json_t *ranks_table(const struct supervised_plan *p, const struct supervised_config *k, struct dev *dev,
                           const struct model_config *c, const struct trained_model_args *a, struct buf *b) {
    const int64_t each = k->cut.max_seqs > 0 ? k->cut.max_seqs : a->max_rows / k->max_length;
    struct rank_plan r = {.n = k->n_ranks,
                          .local = k->n_local,
                          .micro = algo_update_micro_batch_count(k->train_batch_size, each > 0 ? each : 1),
                          .chunk = k->grad_chunk,
                          .uneven = p->model.uneven,
                          .limit = p->limit,
                          .layout = LAYOUT_WHOLE,
                          .least = {[LAYOUT_WHOLE] = p->least}};
    struct supervised_config one = *k;
    struct trained_model_args own;
    struct supervised_plan q;
    one.n_ranks = one.n_local = 1;
    const int rc = plan(&q, &one, dev, c, k->max_length, &own);
    if (rc == 0 || rc == ERR_NOMEM) r.one = q.least;
    return rank_plan_print(&r, b);
}

int supervised_memory_plan_print(struct supervised_config *k, struct dev *dev, const struct model_config *c,
                                 struct train_plan *out) {
    struct trained_model_args a;
    struct err_saved why;
    struct supervised_plan p;
    struct buf *const b = &out->text;
    const int rc = plan(&p, k, dev, c, k->max_length, &a);
    err_save(&why);
    if (rc < 0 && rc != ERR_NOMEM) return rc;
    out->fits = rc == 0;
    buf_addf(b, "memory plan: %s of %.3f B parameters, %s, samples of up to %lld tokens", k->run.title,
             (double)model_config_params(c) / 1e9, dtype_name(k->act), (long long)k->max_length);
    if (k->n_ranks > 1) buf_addf(b, "; each of %lld ranks:", (long long)k->n_ranks);
    buf_adds(b, "\n");
    out->json = json_pack("{s:I, s:I, s:[], s:b}", "total", (json_int_t)(p.fixed + p.pass), "limit", (json_int_t)p.limit, "parts",
                          "fits", out->fits);
    parts_table(&p, k, c, &a, &(struct plan_table){b, json_object_get(out->json, "parts")});
    text_row(b, "total", p.fixed + p.pass, "");
    text_row(b, "limit", p.limit, "");
    if (k->n_ranks > 1) json_object_set_new(out->json, "ranks", ranks_table(&p, k, dev, c, &a, b));
    err_restore(&why);
    if (!out->fits) buf_addf(b, "  does not fit: %s\n", err_msg());
    return 0;
}
