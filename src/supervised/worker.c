/* worker.c - see worker.h: the calls in this process. */
#include "supervised/worker.h"

#include "train/perf_metrics.h"
#include "train/update.h"

#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- opening ---- */

static int open_model(struct supervised_worker *w, int64_t longest, struct checkpoints *out) {
    struct supervised_config *const k = w->k;
    struct trained_model_args a;
    struct model_config shape;
    if (k->memory_limit > 0 && (size_t)k->memory_limit < w->dev.mem_total) w->dev.mem_total = (size_t)k->memory_limit;
    TRY(tokenizer_files_read(&w->tokenizer, k->tokenizer_dir));
    TRY(model_config_load(&shape, k->model_dir));
    const int rc = supervised_memory_plan(k, &w->dev, &shape, longest, &a, &w->planned);
    model_config_free(&shape);
    TRY(rc);
    if (w->comm) TRY(dev_group_open(&w->devices, &w->dev, w->comm));
    const struct model_open_args m = {.dir = k->model_dir,
                                      .act = k->act,
                                      .flags = k->optim.host_master ? MODEL_HOST_MASTER : 0,
                                      .max_len = k->max_length,
                                      .shard = rank_shard(w->devices, &k->optim)};
    TRY(train_open_model(&w->model, &w->dev, &m, &k->lora, k->seed));
    a.model = w->model;
    a.group = w->devices;
    TRY(trained_model_create(&w->policy, &a));
    const struct ckpt_part part = {"actor", w->model, trained_model_optim(w->policy), w->tokenizer};
    checkpoints_local(out, &part, 1, w->dev.isa, w->comm);
    return 0;
}

void supervised_worker_close(struct supervised_worker *w, int rc) {
    rank_dealing_free(&w->dispatch);
    rank_group_close(&w->ranks, rc == 0 || rc == ERR_SIGNAL);
    dev_group_close(w->devices); /* before the model: see worker_close of ppo */
    trained_model_destroy(w->policy);
    model_close(w->model);
    tokenizer_files_free(w->tokenizer);
    supervised_planned_free(&w->planned);
    dev_close(&w->dev);
}

/* ---- one step ---- */

struct step {
    const struct supervised_program *program;
    struct run *run;
    const struct supervised_rows *rows;
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
    progress_report(&at, "train", s->done, s->rows->n, 0);
    return run_check_stop(s->run, s->done, s->rows->n);
}

static int take_batch(void *ctx, const int64_t *rows, int64_t n, struct mini_batch *m) {
    struct step *s = ctx;
    int64_t targets = 0;
    s->seqs = xmalloc((size_t)n * sizeof *s->seqs);
    for (int64_t i = 0; i < n; i++) {
        s->seqs[i] = s->rows->seqs[rows[i]];
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
        const struct packed_seq *x = &r->s->rows->seqs[r->row[i]];
        json_t *ids = json_array(), *mask = json_array();
        for (int64_t t = 0; t < x->n; t++) {
            json_array_append_new(ids, json_integer(x->ids[t]));
            json_array_append_new(mask, json_integer(x->mask[t]));
        }
        json_t *o = json_pack("{s:I, s:I, s:o, s:o}", "step", (json_int_t)r->s->run->step, "row",
                              (json_int_t)r->s->rows->row[r->row[i]], "ids", ids, "loss_mask", mask);
        const int rc = json_dump_line(out, o);
        json_decref(o);
        TRY(rc);
        TRY(buf_addc(out, '\n'));
    }
    return 0;
}

static int update(struct supervised_worker *w, const struct supervised_rows *rows) {
    const struct supervised_config *const k = w->k;
    struct run *const run = w->run;
    struct metrics *const m = &run->metrics;
    const int64_t n = rows->n, index = run->step - (k->zero_indexed_step ? 1 : 0);
    struct step s = {.program = w->program, .run = run, .rows = rows};
    struct update_result r;
    while (w->program->stats[s.n_stats].name) s.n_stats++;
    CHECK(s.n_stats <= SUPERVISED_MAX_STATS);
    int64_t *len = xmalloc((size_t)n * sizeof *len);
    for (int64_t i = 0; i < n; i++) len[i] = rows->seqs[i].n;
    const struct update u = {.model = w->policy,
                             .optim = &k->optim,
                             .lr = optim_lr(&k->optim, index),
                             .n = n,
                             .mini_batch = n,
                             .epochs = 1,
                             .len = len,
                             .cut = k->cut,
                             .metrics = &s.metrics,
                             .ctx = &s,
                             .take = take_batch,
                             .drop = drop_batch};
    int rc = update_run(&u, &r);
    if (rc == 0 && r.bad) rc = run_bad_gradient(run, &r.why, dump_rows, &(struct bad_rows){&s, r.bad_rows, r.n_bad});
    free(r.bad_rows);
    free(len);
    update_metrics_set(&s.metrics, m);
    TRY(rc);
    if (r.n_steps > 0) metrics_set(m, r.grad_norm, "train/grad_norm");
    metrics_set(m, optim_lr(&k->optim, index + 1), "train/lr"); /* the next one's, as verl */
    metrics_set(m, r.flops / train_peak_flops(&w->dev) / (double)k->n_ranks, "train/mfu");
    metrics_set_i64(m, r.n_tokens, "train/global_tokens");
    return 0;
}

/* ---- forward passes ---- */

static int forward(struct supervised_worker *w, const struct packed_seq *seqs, int64_t n, float *logp) {
    const struct progress at = run_progress(w->run);
    for (int64_t lo = 0; lo < n; lo += 64) {
        const int64_t k = n - lo < 64 ? n - lo : 64;
        TRY(trained_model_forward(w->policy, seqs + lo, k, w->k->cut, 1, (struct forward_out){.logp = logp}));
        for (int64_t i = lo; i < lo + k; i++) logp += packed_seq_targets(&seqs[i]);
        progress_report(&at, "testing", lo + k, n, 0);
        TRY(stage_check_stop());
    }
    return 0;
}

/* ---- the others ---- */

static int open_device(struct supervised_worker *w) {
    TRY(run_open_device(w->run, &w->dev));
    w->device = w->dev.describe;
    w->own_memory = dev_has_own_memory(&w->dev);
    return 0;
}

static int ready(struct supervised_worker *w) { return dev_memory(&w->dev, &w->run->memory); }

static int memory(struct supervised_worker *w) { return train_memory_metrics(&w->run->metrics, &w->dev, "", &w->run->memory); }

const struct supervised_ops supervised_local = {
    .open_device = open_device, .open_model = open_model, .ready = ready, .update = update, .forward = forward, .memory = memory};
