/* sft.c - supervised fine-tuning: verl's sft_trainer (engine keys) and
 * fsdp_sft_trainer (the older keys, which conf moves to the new ones) on ppo's run, updates and trained model.
 *
 * Loss: the mean of -log p over the batch's target tokens (verl sft_loss),
 * defined over the whole batch, so that micro-batches do not change it.
 * Invariant: as ppo - a resumed run ends in the bits of an unbroken one. */
#include "text/text.h"
#include "train/run/devices_asked.h"
#include "train/run/lora_keys.h"
#include "train/run/optimizer_keys.h"
#include "train/run/perf_metrics.h"
#include "train/run/run.h"
#include "train/run/time_probe.h"
#include "train/run/update.h"
#include "train/sft/memory_plan.h"
#include "train/train.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>

struct sft {
    struct sft_config k;
    struct run run;
    struct dev dev;
    struct model *model;
    struct trained_model *policy;
    struct tokenizer *tok;
    struct tokenizer_files *tok_files; /* for checkpoints */
    struct chat_template *chat;
    struct sft_dataset *train, *val;
    int64_t total_tokens;
    json_t *plan_json; /* for run.db */
};

/* ---- one step ---- */

struct sft_batch {
    struct sft *s;
    const int64_t *rows; /* of the training data */
    struct packed_seq *seqs;
    struct update_metrics metrics;
    double scale;        /* 1 / target tokens of the batch */
    int64_t done, total; /* samples, for the progress */
};

static int loss_fn(void *arg, const struct micro_loss *m) {
    struct sft_batch *b = arg;
    const struct progress at = run_progress(&b->s->run);
    double sum = 0;
    for (int64_t t = 0; t < m->t1 - m->t0; t++) {
        sum -= (double)m->out[t];
        m->dout[t] = (float)-b->scale;
    }
    update_metric_add(&b->metrics, "train/loss", REDUCE_SUM, sum * b->scale);
    b->done += m->hi - m->lo;
    progress_report(&at, "train", b->done, b->total, 0);
    return run_check_stop(&b->s->run, b->done, b->total);
}

static struct packed_seq seq_of(const struct sft_sample *x) {
    return (struct packed_seq){.ids = x->ids, .n = x->n, .mask = x->loss_mask};
}

static int take_batch(void *ctx, const int64_t *rows, int64_t n, struct mini_batch *m) {
    struct sft_batch *b = ctx;
    int64_t targets = 0;
    b->seqs = xmalloc((size_t)n * sizeof *b->seqs);
    for (int64_t i = 0; i < n; i++) {
        b->seqs[i] = seq_of(&b->s->train->samples[b->rows[rows[i]]]);
        targets += packed_seq_targets(&b->seqs[i]);
    }
    b->scale = targets ? 1.0 / (double)targets : 0;
    *m = (struct mini_batch){.seqs = b->seqs, .n = n, .temperature = 1, .loss = loss_fn, .loss_arg = b};
    return 0;
}

static void drop_batch(void *ctx) {
    struct sft_batch *b = ctx;
    free(b->seqs);
    b->seqs = NULL;
}

struct rows {
    const struct sft_batch *b;
    const int64_t *row; /* (n) of the batch */
    int64_t n;
};

/* Ids and targets, one line a sample. */
static int dump_rows(void *arg, struct buf *out) {
    const struct rows *r = arg;
    for (int64_t i = 0; i < r->n; i++) {
        const int64_t row = r->b->rows[r->row[i]];
        const struct sft_sample *x = &r->b->s->train->samples[row];
        json_t *ids = json_array(), *mask = json_array();
        for (int64_t t = 0; t < x->n; t++) {
            json_array_append_new(ids, json_integer(x->ids[t]));
            json_array_append_new(mask, json_integer(x->loss_mask[t]));
        }
        json_t *o = json_pack("{s:I, s:I, s:o, s:o}", "step", (json_int_t)r->b->s->run.step, "row", (json_int_t)row, "ids", ids,
                              "loss_mask", mask);
        const int rc = json_dump_line(out, o);
        json_decref(o);
        TRY(rc);
        TRY(buf_addc(out, '\n'));
    }
    return 0;
}

static int not_finite(void *ctx, const int64_t *rows, int64_t n, const struct optim_result *o) {
    struct sft_batch *b = ctx;
    struct rows r = {b, rows, n};
    return run_bad_gradient(&b->s->run, o, dump_rows, &r);
}

static int train_rows(struct sft *s, const int64_t *rows, int64_t n) {
    const struct sft_config *k = &s->k;
    struct metrics *const m = &s->run.metrics;
    const double start = clock_now();
    const int64_t index = s->run.step - (k->zero_indexed_step ? 1 : 0);
    struct sft_batch b = {.s = s, .rows = rows, .total = n};
    struct update_result r;
    int64_t *len = xmalloc((size_t)n * sizeof *len);
    for (int64_t i = 0; i < n; i++) len[i] = s->train->samples[rows[i]].n;
    const struct update u = {.model = s->policy,
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
                             .drop = drop_batch,
                             .not_finite = not_finite};
    stage_begin(s->run.stages, "train");
    const int rc = update_run(&u, &r);
    stage_end(s->run.stages);
    free(len);
    update_metrics_set(&b.metrics, m);
    TRY(rc);
    const double seconds = clock_now() - start;
    s->total_tokens += r.n_tokens;
    if (r.n_steps > 0) metrics_set(m, r.grad_norm, "train/grad_norm");
    metrics_set(m, optim_lr(&k->optim, index + 1), "train/lr"); /* the next one's, as verl */
    metrics_set(m, r.flops / train_peak_flops(&s->dev), "train/mfu");
    metrics_set(m, seconds, "train/time(s)");
    metrics_set_i64(m, r.n_tokens, "train/global_tokens");
    metrics_set(m, (double)s->total_tokens / 1e9, "train/total_tokens(B)");
    metrics_set(m, (double)r.n_tokens / seconds, "perf/throughput");
    return train_memory_metrics(m, &s->dev, "", &s->run.memory);
}

static int sft_step(struct sft *s) {
    const int64_t *rows;
    int64_t n;
    int got = data_sampler_next(&s->run.sampler, &rows, &n);
    if (got == 0) got = data_sampler_next(&s->run.sampler, &rows, &n);
    TRY(got);
    return train_rows(s, rows, n);
}

static int validate(void *ctx) {
    struct sft *s = ctx;
    const int64_t n = s->val->n;
    struct packed_seq *seqs = xmalloc((size_t)n * sizeof *seqs);
    int64_t targets = 0;
    for (int64_t i = 0; i < n; i++) {
        seqs[i] = seq_of(&s->val->samples[i]);
        targets += packed_seq_targets(&seqs[i]);
    }
    float *logp = xmalloc((size_t)targets * 4);
    double sum = 0;
    int rc = 0;
    stage_begin(s->run.stages, "testing");
    for (int64_t lo = 0, at = 0; lo < n && rc == 0; lo += 64) {
        const int64_t k = n - lo < 64 ? n - lo : 64;
        rc = trained_model_forward(s->policy, seqs + lo, k, s->k.cut, 1, (struct forward_out){.logp = logp + at});
        for (int64_t i = lo; i < lo + k; i++) at += packed_seq_targets(&seqs[i]);
        stage_beat(s->run.stages);
        if (rc == 0) rc = stage_check_stop();
    }
    for (int64_t t = 0; t < targets && rc == 0; t++) sum -= (double)logp[t];
    if (rc == 0) metrics_set(&s->run.metrics, targets ? sum / (double)targets : 0, "val/loss");
    stage_end(s->run.stages);
    free(seqs);
    free(logp);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- what the run asks for ---- */

static int parts(void *ctx, struct ckpt_part p[RUN_MAX_PARTS]) {
    struct sft *s = ctx;
    p[0] = (struct ckpt_part){"actor", s->model, trained_model_optim(s->policy), s->tok_files};
    return 1;
}

static void state(const void *ctx, json_t *trainer) {
    json_object_set_new(trainer, "total_tokens", json_integer(((const struct sft *)ctx)->total_tokens));
}

static int restore(void *ctx, const json_t *trainer, const char *where) {
    return json_i64_opt(trainer, "total_tokens", &((struct sft *)ctx)->total_tokens, where);
}

/* ---- opening ---- */

static int open_data(struct sft *s) {
    struct sft_config *k = &s->k;
    TRY(tokenizer_open(&s->tok, k->tokenizer_dir));
    TRY(tokenizer_files_read(&s->tok_files, k->tokenizer_dir));
    TRY(chat_template_create(&s->chat, s->tok));
    const char *const *val_files = k->val.files;
    const int64_t n_val = k->val.n_files, val_max_samples = k->val.max_samples;
    k->train.tok = s->tok;
    k->train.chat = s->chat;
    k->train.max_length = k->max_length;
    k->train.seed = k->seed;
    k->train.shuffle = true;
    k->train.what = "data.train_files";
    k->train.sampler = &k->sampler;
    k->val = k->train;
    k->val.files = val_files;
    k->val.n_files = n_val;
    k->val.max_samples = val_max_samples;
    k->val.what = "data.val_files";
    k->val.sampler = NULL;
    TRY(sft_dataset_open(&s->train, &k->train));
    if (n_val > 0) TRY(sft_dataset_open(&s->val, &k->val));
    const struct data_sampler_args a = {.n_rows = s->train->n,
                                        .batch_size = k->train_batch_size,
                                        .order = k->sampler.order,
                                        .keys = s->train->keys,
                                        .drop_last = true,
                                        .seed = k->seed};
    TRY(run_open_sampler(&s->run, &a, k->total_epochs, k->total_training_steps));
    train_optim_steps(&k->optim, s->run.total_steps, k->warmup_ratio);
    const int64_t epoch = data_sampler_batches(&s->run.sampler);
    if (k->run.save_freq == SFT_EVERY_EPOCH) s->run.k.save_freq = epoch;
    if (k->run.test_freq == SFT_EVERY_EPOCH) s->run.k.test_freq = epoch;
    return 0;
}

static int64_t longest_sample(const struct sft_dataset *d, int64_t longest) {
    for (int64_t i = 0; d && i < d->n; i++) longest = d->samples[i].n > longest ? d->samples[i].n : longest;
    return longest;
}

static int open_model(struct sft *s) {
    const int64_t longest = longest_sample(s->val, longest_sample(s->train, 1));
    struct sft_config *const k = &s->k;
    struct trained_model_args a;
    struct model_config shape;
    TRY(model_config_load(&shape, k->model_dir));
    const int rc = sft_memory_plan(k, &s->dev, &shape, longest, &a, &s->plan_json);
    model_config_free(&shape);
    TRY(rc);
    s->run.k.async_save = k->run.async_save;
    const struct model_open_args m = {
        .dir = k->model_dir, .act = k->act, .flags = k->optim.host_master ? MODEL_HOST_MASTER : 0, .max_len = k->max_length};
    TRY(train_open_model(&s->model, &s->dev, &m, &k->lora, k->seed));
    a.model = s->model;
    return trained_model_create(&s->policy, &a);
}

static const json_t *plan(const void *ctx) { return ((const struct sft *)ctx)->plan_json; }

static int open_all(struct sft *s, const struct conf *c) {
    static const char *const headlines[][2] = {
        {"train/loss", "loss"}, {"perf/throughput", "tok/s"}, {"train/lr", "lr"}, {"train/grad_norm", "grad_norm"}, {NULL, NULL}};
    struct sft_config *const k = &s->k;
    TRY(sft_config_read(k, c));
    TRY(train_model_weights("model.path", k->raw.model_path, k->model_dir));
    const struct run_program program = {
        .ctx = s, .parts = parts, .state = state, .restore = restore, .validate = validate, .plan = plan, .headlines = headlines};
    TRY(run_open(&s->run, c, &k->run, &program));
    TRY(run_open_device(&s->run, &s->dev));
    if (k->memory_limit > 0 && (size_t)k->memory_limit < s->dev.mem_total) s->dev.mem_total = (size_t)k->memory_limit;
    TRY(open_data(s));
    TRY(open_model(s));
    return run_ready(&s->run, c);
}

static void close_all(struct sft *s, int rc) {
    run_close(&s->run, rc);
    trained_model_destroy(s->policy);
    model_close(s->model);
    sft_dataset_close(s->train);
    sft_dataset_close(s->val);
    chat_template_destroy(s->chat);
    tokenizer_close(s->tok);
    tokenizer_files_free(s->tok_files);
    json_decref(s->plan_json);
    dev_close(&s->dev);
    sft_config_free(&s->k);
}

static int steps(struct sft *s) {
    while (run_begin_step(&s->run)) {
        const int rc = sft_step(s);
        if (rc < 0) return run_fail(&s->run, err_pass(rc, __FILE__, __LINE__));
        TRY(run_end_step(&s->run));
    }
    return 0;
}

int train_sft(const struct conf *c) {
    struct sft s = {0};
    int rc = open_all(&s, c);
    if (rc == 0) rc = steps(&s);
    close_all(&s, rc);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- the steps that `verlc plan --probe sft` measures ---- */

static bool probe_begin(void *ctx) { return run_begin_step(&((struct sft *)ctx)->run); }

static int probe_step(void *ctx, struct time_probe *p) {
    struct sft *s = ctx;
    double tokens = 0;
    TRY(sft_step(s));
    if (metrics_get(&s->run.metrics, "train/global_tokens", &tokens)) p->tokens = tokens;
    return run_end_step(&s->run);
}

static int probe_validate(void *ctx, struct time_probe *p) {
    p->validated = p->val_rows = ((struct sft *)ctx)->val->n;
    return validate(ctx);
}

int train_probe_sft(const struct conf *c, bool whole, struct time_probe *p) {
    struct sft s = {0};
    const struct probe_calls calls = {.ctx = &s, .begin = probe_begin, .step = probe_step, .validate = probe_validate};
    const enum log_level level = log_level();
    if (level == LOG_INFO) log_set_level(LOG_WARN); /* the memory plan has been printed */
    const double start = clock_now();
    int rc = open_all(&s, c);
    log_set_level(level);
    *p = (struct time_probe){.start = clock_now() - start};
    if (rc == 0) {
        probe_prepare(p, &s.run);
        p->validates = s.val && p->test_freq > 0;
        rc = probe_measure(p, &s.run, &calls, whole);
    }
    close_all(&s, rc);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int train_choices_sft(const struct conf *c, bool own_memory, struct buf *out) {
    struct sft_config k = {0};
    const int rc = sft_config_read(&k, c);
    if (rc == 0) {
        const bool samples = k.cut.max_seqs > 0;
        const char *key = samples ? "data.micro_batch_size_per_gpu" : "data.max_token_len_per_gpu";
        const int64_t now = samples ? k.cut.max_seqs : k.cut.max_rows;
        if (!samples || now * 2 <= k.train_batch_size) buf_addf(out, "%s=%lld\n", key, (long long)now * 2);
        if (now > 1) buf_addf(out, "%s=%lld\n", key, (long long)now / 2);
        if (k.recompute != RECOMPUTE_NONE) buf_addf(out, "trainer.recompute=none\n");
        if (k.recompute != RECOMPUTE_LAYER) buf_addf(out, "trainer.recompute=layer\n");
        if (own_memory) buf_addf(out, "engine.optimizer_offload=%s\n", k.optim.host_state ? "False" : "True");
    }
    sft_config_free(&k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int train_plan_sft(const struct conf *c, int64_t gpu, struct buf *out, bool *fits) {
    const struct resume none = {.step = -1};
    struct sft_config k = {0};
    struct model_config shape = {0};
    struct dev dev = {0};
    int rc = 0;
    TRYG(sft_config_read(&k, c), out);
    if (gpu > 0) dev_open_cuda_planned(&dev, (size_t)gpu);
    else TRYG(resume_open_device(&dev, &none, k.run.device, k.run.threads), out);
    TRYG(model_config_load(&shape, k.model_dir), out);
    rc = sft_memory_plan_print(&k, &dev, &shape, out, fits);
    model_config_free(&shape);
out:
    dev_close(&dev);
    sft_config_free(&k);
    return rc;
}
