/* worker.c - see worker.h.
 *
 * Loss: the mean of -log p over the batch's target tokens (verl sft_loss),
 * defined over the whole batch, so that micro-batches do not change it. */
#include "sft/worker.h"

#include "train/perf_metrics.h"
#include "train/update.h"

#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- opening ---- */

int sft_worker_open(struct sft_worker *w, int64_t longest) {
    struct sft_config *const k = w->k;
    struct trained_model_args a;
    struct model_config shape;
    if (k->memory_limit > 0 && (size_t)k->memory_limit < w->dev.mem_total) w->dev.mem_total = (size_t)k->memory_limit;
    TRY(tokenizer_files_read(&w->tokenizer, k->tokenizer_dir));
    TRY(model_config_load(&shape, k->model_dir));
    const int rc = sft_memory_plan(k, &w->dev, &shape, longest, &a, &w->planned);
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
    return trained_model_create(&w->policy, &a);
}

void sft_worker_close(struct sft_worker *w) {
    dev_group_close(w->devices); /* first: see worker_close of ppo */
    trained_model_destroy(w->policy);
    model_close(w->model);
    tokenizer_files_free(w->tokenizer);
    sft_planned_free(&w->planned);
    dev_close(&w->dev);
}

void sft_worker_checkpoints(struct sft_worker *w, struct checkpoints *out) {
    const struct ckpt_part part = {"actor", w->model, trained_model_optim(w->policy), w->tokenizer};
    checkpoints_local(out, &part, 1, w->dev.isa, w->comm);
}

/* ---- one step ---- */

struct sft_batch {
    struct run *run;
    const struct sft_rows *rows;
    struct packed_seq *seqs; /* in the order of micro-batches */
    struct update_metrics metrics;
    double scale; /* 1 / target tokens of the batch */
    int64_t done; /* samples, for the progress */
};

static int loss_fn(void *arg, const struct micro_loss *m) {
    const struct sft_batch *b = arg;
    double sum = 0;
    for (int64_t t = 0; t < m->t1 - m->t0; t++) {
        sum -= (double)m->out[t];
        m->dout[t] = (float)-b->scale;
    }
    sum *= b->scale;
    return buf_add(m->record, &sum, sizeof sum);
}

static int report_fn(void *arg, const struct pack_micro *m, const void *record, size_t n) {
    struct sft_batch *b = arg;
    const struct progress at = run_progress(b->run);
    double loss;
    CHECK(n == sizeof loss);
    memcpy(&loss, record, n);
    update_metric_add(&b->metrics, "train/loss", REDUCE_SUM, loss);
    b->done += m->hi - m->lo;
    progress_report(&at, "train", b->done, b->rows->n, 0);
    return run_check_stop(b->run, b->done, b->rows->n);
}

static int take_batch(void *ctx, const int64_t *rows, int64_t n, struct mini_batch *m) {
    struct sft_batch *b = ctx;
    int64_t targets = 0;
    b->seqs = xmalloc((size_t)n * sizeof *b->seqs);
    for (int64_t i = 0; i < n; i++) {
        b->seqs[i] = b->rows->seqs[rows[i]];
        targets += packed_seq_targets(&b->seqs[i]);
    }
    b->scale = targets ? 1.0 / (double)targets : 0;
    *m = (struct mini_batch){.seqs = b->seqs, .n = n, .temperature = 1, .loss = loss_fn, .on_record = report_fn, .arg = b};
    return 0;
}

static void drop_batch(void *ctx) {
    struct sft_batch *b = ctx;
    free(b->seqs);
    b->seqs = NULL;
}

struct bad_rows {
    const struct sft_batch *b;
    const int64_t *row; /* (n) of the batch */
    int64_t n;
};

/* Ids and targets, one line a sample. */
static int dump_rows(void *arg, struct buf *out) {
    const struct bad_rows *r = arg;
    for (int64_t i = 0; i < r->n; i++) {
        const struct packed_seq *x = &r->b->rows->seqs[r->row[i]];
        json_t *ids = json_array(), *mask = json_array();
        for (int64_t t = 0; t < x->n; t++) {
            json_array_append_new(ids, json_integer(x->ids[t]));
            json_array_append_new(mask, json_integer(x->mask[t]));
        }
        json_t *o = json_pack("{s:I, s:I, s:o, s:o}", "step", (json_int_t)r->b->run->step, "row",
                              (json_int_t)r->b->rows->row[r->row[i]], "ids", ids, "loss_mask", mask);
        const int rc = json_dump_line(out, o);
        json_decref(o);
        TRY(rc);
        TRY(buf_addc(out, '\n'));
    }
    return 0;
}

int sft_worker_update(struct sft_worker *w, struct run *run, const struct sft_rows *rows) {
    const struct sft_config *const k = w->k;
    struct metrics *const m = &run->metrics;
    const int64_t n = rows->n, index = run->step - (k->zero_indexed_step ? 1 : 0);
    struct sft_batch b = {.run = run, .rows = rows};
    struct update_result r;
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
                             .metrics = &b.metrics,
                             .ctx = &b,
                             .take = take_batch,
                             .drop = drop_batch};
    int rc = update_run(&u, &r);
    if (rc == 0 && r.bad) rc = run_bad_gradient(run, &r.why, dump_rows, &(struct bad_rows){&b, r.bad_rows, r.n_bad});
    free(r.bad_rows);
    free(len);
    update_metrics_set(&b.metrics, m);
    TRY(rc);
    if (r.n_steps > 0) metrics_set(m, r.grad_norm, "train/grad_norm");
    metrics_set(m, optim_lr(&k->optim, index + 1), "train/lr"); /* the next one's, as verl */
    metrics_set(m, r.flops / train_peak_flops(&w->dev) / (double)k->n_ranks, "train/mfu");
    metrics_set_i64(m, r.n_tokens, "train/global_tokens");
    return 0;
}

/* ---- forward passes ---- */

int sft_worker_forward(struct sft_worker *w, const struct progress *at, const struct packed_seq *seqs, int64_t n, float *logp) {
    for (int64_t lo = 0; lo < n; lo += 64) {
        const int64_t k = n - lo < 64 ? n - lo : 64;
        TRY(trained_model_forward(w->policy, seqs + lo, k, w->k->cut, 1, (struct forward_out){.logp = logp}));
        for (int64_t i = lo; i < lo + k; i++) logp += packed_seq_targets(&seqs[i]);
        progress_report(at, "testing", lo + k, n, 0);
        TRY(stage_check_stop());
    }
    return 0;
}
