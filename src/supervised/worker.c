/* worker.c - see worker.h: the model in this process, and its update. */
#include "supervised/worker.h"

#include "train/optimizer_keys.h"

#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- opening ---- */

int supervised_worker_open(struct supervised_worker *w, int64_t total_steps, int64_t longest) {
    struct supervised_worker_config *const k = &w->k;
    struct trained_model_args a;
    struct model_config shape;
    const size_t limit = (size_t)k->trainer->memory_limit;
    if (limit > 0 && limit < w->base.dev.mem_total) w->base.dev.mem_total = limit;
    train_optim_steps(&k->optim, total_steps);
    TRY(tokenizer_files_read(&w->tokenizer, k->model.tokenizer_dir));
    TRY(train_model_shape(&shape, k->model.dir, &k->model.mtp));
    const int rc = supervised_memory_plan(k, &w->base.dev, &shape, longest, &a, &w->planned);
    model_config_free(&shape);
    TRY(rc);
    if (w->base.comm) TRY(collective_open(&w->devices, &w->base.dev, w->base.comm));
    const struct model_open_args m = {.dir = k->model.dir,
                                      .act = k->model.act,
                                      .flags = (k->optim.host_master ? MODEL_HOST_MASTER : 0) | model_stream_flags(a.stream),
                                      .mtp = k->model.mtp.used,
                                      .mtp_detached = k->model.mtp.detach,
                                      .max_len = k->data.max_length,
                                      .shard = all_reduce_shard(w->devices, &k->optim, a.experts.ranks > 1)};
    TRY(train_open_model(&w->model, &w->base.dev, &m, &k->model.lora, k->trainer->seed));
    w->model->frozen_routers = k->model.router.freeze;
    TRY(router_losses(&k->model.router, &w->model->cfg, &a.routers));
    a.model = w->model;
    a.group = w->devices;
    struct worker_role policy = {.cut = k->data.cut, .temperature = 1};
    TRY(trained_model_create(&policy.model, &a));
    worker_set_role(&w->base, WORKER_POLICY, &policy);
    w->base.parts[w->base.n_parts++] = (struct ckpt_part){"actor", w->model, trained_model_optim(policy.model), w->tokenizer};
    return 0;
}

void supervised_worker_close(struct supervised_worker *w, int rc) {
    dispatch_close(&w->ranks, rc == 0 || rc == ERR_SIGNAL);
    collective_close(w->devices); /* before the model: see worker_close of ppo */
    trained_model_destroy(w->base.role[WORKER_POLICY].model);
    model_close(w->model);
    tokenizer_files_free(w->tokenizer);
    supervised_planned_free(&w->planned);
    dev_close(&w->base.dev);
}

/* ---- one step ---- */

struct step {
    const struct supervised_program *program;
    struct run *run;
    struct packed_seq *rows; /* (n_rows) */
    const int64_t *row;      /* (n_rows) in the training data */
    int64_t n_rows;
    struct packed_seq *seqs; /* in the order of micro-batches */
    struct supervised_batch batch;
    struct update_metrics metrics;
    int64_t n_stats, done; /* done: samples, for the progress */
};

static int loss_fn(void *arg, const struct micro_loss *m) {
    const struct step *s = arg;
    double stats[SUPERVISED_MAX_STATS] = {0};
    TRY(s->program->loss(&s->batch, m, stats));
    return buf_add(m->record, stats, (size_t)s->n_stats * sizeof *stats);
}

static int report_fn(void *arg, const struct pack_micro *m, const void *record, size_t n) {
    struct step *s = arg;
    const struct progress at = run_progress(s->run);
    const struct supervised_stat *const stats = s->program->stats;
    const double *const v = record;
    CHECK(n == (size_t)s->n_stats * sizeof *v);
    for (int64_t i = 0; i < s->n_stats; i++) update_metric_add(&s->metrics, stats[i].name, stats[i].how, v[i]);
    s->done += m->hi - m->lo;
    phase_progress(&at, "train", s->done, s->n_rows, 0);
    return run_check_stop(s->run, s->done, s->n_rows);
}

static int take_batch(void *ctx, const int64_t *rows, int64_t n, struct mini_batch *m) {
    struct step *s = ctx;
    int64_t targets = 0;
    s->seqs = xmalloc((size_t)n * sizeof *s->seqs);
    for (int64_t i = 0; i < n; i++) {
        s->seqs[i] = s->rows[rows[i]];
        targets += packed_seq_targets(&s->seqs[i]);
    }
    s->batch = (struct supervised_batch){s->seqs, n, targets};
    *m = (struct mini_batch){.seqs = s->seqs, .n = n, .temperature = 1, .loss = loss_fn, .on_record = report_fn, .arg = s};
    return 0;
}

static void drop_batch(void *ctx) {
    struct step *s = ctx;
    free(s->seqs);
    s->seqs = NULL;
}

struct bad_rows {
    const struct step *s;
    const int64_t *row; /* (n) of the batch */
    int64_t n;
};

/* Ids and targets, one line a sample. */
static int dump_rows(void *arg, struct buf *out) {
    const struct bad_rows *r = arg;
    for (int64_t i = 0; i < r->n; i++) {
        const struct packed_seq *x = &r->s->rows[r->row[i]];
        json_t *ids = json_array(), *mask = json_array();
        for (int64_t t = 0; t < x->n; t++) {
            json_array_append_new(ids, json_integer(x->ids[t]));
            json_array_append_new(mask, json_integer(x->mask[t]));
        }
        json_t *o = json_pack("{s:I, s:I, s:o, s:o}", "step", (json_int_t)r->s->run->step, "row", (json_int_t)r->s->row[r->row[i]],
                              "ids", ids, "loss_mask", mask);
        const int rc = json_dump_line(out, o);
        json_decref(o);
        TRY(rc);
        TRY(buf_addc(out, '\n'));
    }
    return 0;
}

/* The sequences of a batch; their masks are *mask's. */
static int read_rows(const struct batch *b, struct packed_seq **seqs, uint8_t **mask) {
    struct batch_col *ids, *targets;
    TRY(batch_get(b, "input_ids", BATCH_I32, &ids));
    TRY(batch_get(b, "loss_mask", BATCH_I32, &targets));
    *seqs = xcalloc((size_t)b->n_rows, sizeof **seqs);
    *mask = xmalloc((size_t)ids->off[b->n_rows] + 1);
    for (int64_t t = 0; t < ids->off[b->n_rows]; t++) (*mask)[t] = targets->i32[t] != 0;
    for (int64_t i = 0; i < b->n_rows; i++)
        (*seqs)[i] = (struct packed_seq){.ids = ids->i32 + ids->off[i], .n = batch_len(ids, i), .mask = *mask + ids->off[i]};
    return 0;
}

static int update(struct worker *base, struct run *run, struct batch *b) {
    struct supervised_worker *const w = (struct supervised_worker *)base;
    const struct supervised_worker_config *const k = &w->k;
    struct metrics *const m = &run->metrics;
    const int64_t n = b->n_rows, index = train_lr_index(run->step, 1, k->optim.zero_indexed_step);
    struct step s = {.program = w->program, .run = run, .n_rows = n};
    struct update_result r;
    struct batch_col *row;
    uint8_t *mask;
    TRY(batch_get(b, "row", BATCH_I64, &row));
    TRY(read_rows(b, &s.rows, &mask));
    s.row = row->i64;
    while (w->program->stats[s.n_stats].name) s.n_stats++;
    CHECK(s.n_stats <= SUPERVISED_MAX_STATS);
    int64_t *len = xmalloc((size_t)n * sizeof *len);
    for (int64_t i = 0; i < n; i++) len[i] = s.rows[i].n;
    struct update u = {.optim = &k->optim,
                       .lr = optim_lr(&k->optim, index),
                       .n = n,
                       .mini_batch = n,
                       .epochs = 1,
                       .len = len,
                       .cut = k->data.cut,
                       .metrics = &s.metrics,
                       .router = "train/router",
                       .mtp_metric = "train/mtp_losses/mtp_1_loss",
                       .ctx = &s,
                       .take = take_batch,
                       .drop = drop_batch};
    int rc = worker_update_model(base, WORKER_POLICY, &u, &r);
    if (rc == 0 && r.bad) rc = run_bad_gradient(run, &r.why, dump_rows, &(struct bad_rows){&s, r.bad_rows, r.n_bad});
    free(r.bad_rows);
    free(len);
    free(s.rows);
    free(mask);
    update_metrics_set(&s.metrics, m);
    TRY(rc);
    if (r.n_steps > 0) metrics_set(m, r.grad_norm, "train/grad_norm");
    metrics_set(m, optim_lr(&k->optim, index + 1), "train/lr"); /* the next one's, as verl */
    metrics_set(m, r.flops, "train/mfu");
    metrics_set_i64(m, r.n_tokens, "train/global_tokens");
    const int together = trained_model_context(base->role[WORKER_POLICY].model);
    const int experts = trained_model_expert_ranks(base->role[WORKER_POLICY].model);
    if (together > 1) metrics_set_i64(m, together, "perf/context_parallel");
    if (experts > 1) metrics_set_i64(m, experts, "perf/expert_parallel");
    return 0;
}

const struct worker_update supervised_update = {.name = "train",
                                                .role = WORKER_POLICY,
                                                .reads = (const char *const[]){"input_ids", "loss_mask", "row", NULL},
                                                .writes = (const char *const[]){NULL},
                                                .run = update};
