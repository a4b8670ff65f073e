/* sft.c - supervised fine-tuning: verl's sft_trainer (engine keys) and
 * fsdp_sft_trainer (the older keys, which conf moves to the new ones) on ppo's run, updates and trained model.
 *
 * This file has data and the run; the model is a worker's (worker.h), in this process or in those of several ranks (service.c).
 * Invariant: as ppo - a resumed run ends in the bits of an unbroken one, on any number of ranks. */
#include "sft/sft.h"

#include "plan/disk_plan.h"
#include "plan/time_probe.h"
#include "ranks/dispatch.h"
#include "ranks/restart.h"
#include "ranks/worker_calls.h"
#include "run/directories.h"
#include "run/run.h"
#include "sft/service.h"
#include "sft/worker.h"
#include "text/text.h"
#include "train/optimizer_keys.h"
#include "train/perf_metrics.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "ranks/launcher.h"

#include <stdlib.h>
#include <string.h>

extern char **environ;

struct sft {
    struct sft_config k;
    struct run run;
    struct sft_worker worker;     /* several ranks: without a device */
    struct rank_group ranks;      /* n 0: this process is the only one */
    struct rank_dealing dispatch; /* of validations, to them */
    struct tokenizer *tok;
    struct chat_template *chat;
    struct sft_dataset *train, *val;
    int64_t total_tokens;
};

/* ---- one step ---- */

static struct packed_seq seq_of(const struct sft_sample *x) {
    return (struct packed_seq){.ids = x->ids, .n = x->n, .mask = x->loss_mask};
}

/* On all ranks, each with all rows. */
static int update_ranks(struct sft *s, const struct sft_rows *rows) {
    struct message m = message_new(false);
    struct hub_reply *replies;
    struct batch none = {0};
    json_object_set_new(m.head, "step", json_integer((json_int_t)s->run.step));
    message_seqs(&m, rows->seqs, rows->n);
    message_add(&m, rows->row, (size_t)rows->n * sizeof *rows->row);
    s->ranks.steps = -1;
    int rc = rank_group_call(&s->ranks, "sft_update", "train", &m, &replies);
    if (rc == 0) rc = rank_group_updated(&s->ranks, replies, &none);
    batch_free(&none);
    message_free(&m);
    rank_group_free(&s->ranks, replies);
    return rc;
}

static int update(struct sft *s, const int64_t *rows, int64_t n) {
    struct packed_seq *seqs = xmalloc((size_t)n * sizeof *seqs);
    const struct sft_rows r = {seqs, rows, n};
    for (int64_t i = 0; i < n; i++) seqs[i] = seq_of(&s->train->samples[rows[i]]);
    stage_begin(s->run.stages, "train");
    const int rc = s->ranks.n > 0 ? update_ranks(s, &r) : sft_worker_update(&s->worker, &s->run, &r);
    stage_end(s->run.stages);
    free(seqs);
    return rc;
}

static int train_rows(struct sft *s, const int64_t *rows, int64_t n) {
    struct metrics *const m = &s->run.metrics;
    const double start = clock_now();
    double tokens = 0;
    TRY(update(s, rows, n));
    const double seconds = clock_now() - start;
    CHECK(metrics_get(m, "train/global_tokens", &tokens));
    s->total_tokens += (int64_t)tokens;
    metrics_set(m, seconds, "train/time(s)");
    metrics_set(m, (double)s->total_tokens / 1e9, "train/total_tokens(B)");
    metrics_set(m, tokens / seconds, "perf/throughput");
    if (s->ranks.n > 0) return rank_group_memory(&s->ranks, m, "");
    return train_memory_metrics(m, &s->worker.dev, "", &s->run.memory);
}

static int sft_step(struct sft *s) {
    const int64_t *rows;
    int64_t n;
    int got = data_sampler_next(&s->run.sampler, &rows, &n);
    if (got == 0) got = data_sampler_next(&s->run.sampler, &rows, &n);
    TRY(got);
    return train_rows(s, rows, n);
}

static int forward(struct sft *s, const struct packed_seq *seqs, int64_t n, float *logp) {
    const struct progress at = run_progress(&s->run);
    if (s->ranks.n == 0) return sft_worker_forward(&s->worker, &at, seqs, n, logp);
    json_t *args = json_object();
    const int rc = rank_forward(
        &s->dispatch,
        &(struct rank_forward_args){.args = args, .phase = "testing", .at = &at, .seqs = seqs, .n = n, .out = {.logp = logp}});
    json_decref(args);
    return rc;
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
    stage_begin(s->run.stages, "testing");
    const int rc = forward(s, seqs, n, logp);
    for (int64_t t = 0; t < targets && rc == 0; t++) sum -= (double)logp[t];
    if (rc == 0) metrics_set(&s->run.metrics, targets ? sum / (double)targets : 0, "val/loss");
    stage_end(s->run.stages);
    free(seqs);
    free(logp);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- callbacks of the run ---- */

static void state(const void *ctx, json_t *trainer) {
    const struct sft *s = ctx;
    json_object_set_new(trainer, "total_tokens", json_integer(s->total_tokens));
    json_object_set_new(trainer, "grad_chunk", json_integer((json_int_t)s->k.grad_chunk));
}

static int restore(void *ctx, const json_t *trainer, const char *where) {
    struct sft *s = ctx;
    TRY(resume_compare(trainer, "grad_chunk", "data.grad_chunk", s->k.grad_chunk, where));
    return json_i64_opt(trainer, "total_tokens", &s->total_tokens, where);
}

/* ---- opening ---- */

static int open_data(struct sft *s) {
    struct sft_config *k = &s->k;
    TRY(tokenizer_open(&s->tok, k->tokenizer_dir));
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
    if (k->run.early_warnings) train_optim_check_steps(&k->optim, "optim", run_warn_early, &s->run);
    const int64_t epoch = data_sampler_batches(&s->run.sampler);
    if (k->run.save_freq == SFT_EVERY_EPOCH) s->run.k.save_freq = epoch;
    if (k->run.test_freq == SFT_EVERY_EPOCH) s->run.k.test_freq = epoch;
    return 0;
}

static int64_t longest_sample(const struct sft_dataset *d, int64_t longest) {
    for (int64_t i = 0; d && i < d->n; i++) longest = d->samples[i].n > longest ? d->samples[i].n : longest;
    return longest;
}

/* The device, or the processes that have some. */
static int open_device(struct sft *s) {
    const struct sft_config *k = &s->k;
    const struct rank_group_args a = {.conf = k->conf,
                                      .ranks = (int)k->n_ranks,
                                      .dir = k->run.default_local_dir,
                                      .controller = k->devices.controller,
                                      .deadline_s = k->run.deadline_s,
                                      .run = &s->run,
                                      .ray_nodes = k->n_ray_nodes,
                                      .ray_gpus = !train_on_cpu(k->run.device)};
    s->worker.k = &s->k;
    if (k->n_ranks == 1) return run_open_device(&s->run, &s->worker.dev);
    TRY(rank_group_open(&s->ranks, &a, "sft_device", NULL, NULL));
    rank_dealing_init(&s->dispatch, &s->ranks);
    return 0;
}

static int open_ranks_model(struct sft *s, int64_t longest, struct sft_planned *out) {
    const char *text;
    json_t *first = NULL;
    TRY(rank_group_plain_call(
        &s->ranks, "sft_model",
        json_pack("{s:I, s:I}", "total_steps", (json_int_t)s->run.total_steps, "longest", (json_int_t)longest), &first));
    int rc = json_str(first, "text", &text, "sft_model");
    if (rc == 0) rc = json_bool(first, "async_save", &out->async_save, "sft_model");
    if (rc == 0) {
        out->text = xstrdup(text);
        out->json = json_incref(json_object_get(first, "plan"));
    }
    json_decref(first);
    return rc;
}

static int open_model(struct sft *s, struct checkpoints *models) {
    const int64_t longest = longest_sample(s->val, longest_sample(s->train, 1));
    struct sft_planned *const p = &s->worker.planned;
    TRY(s->ranks.n > 0 ? open_ranks_model(s, longest, p) : sft_worker_open(&s->worker, longest));
    log_info("%s", p->text);
    s->run.k.async_save = p->async_save;
    if (s->ranks.n > 0) rank_group_checkpoints(&s->ranks, models);
    else sft_worker_checkpoints(&s->worker, models);
    return 0;
}

static void phase(void *ctx, const char *name) {
    struct sft *s = ctx;
    if (s->ranks.n == 0) dev_trace_phase(&s->worker.dev, name);
}

static const json_t *plan(const void *ctx) { return ((const struct sft *)ctx)->worker.planned.json; }

/* The run's, or a plan's, where run has what the keys say. */
static struct disk_plan_args disk_args(const struct run_config *run, const struct disk_model *m) {
    return (struct disk_plan_args){.run = run, .keep_key = "trainer.max_ckpt_to_keep", .models = m, .n_models = 1};
}

static int check_disk(struct sft *s) {
    struct model_config shape = {0};
    struct disk_plan p;
    const struct disk_model m = {&shape, s->k.model_dir, &s->k.lora, &s->k.optim};
    struct disk_plan_args a = disk_args(&s->run.k, &m);
    a.from = s->run.from.step > 0 ? s->run.from.step : 0;
    a.steps = s->run.total_steps;
    for (int i = 0; i < TRACK_N_CLIENTS; i++) a.n_clients += s->run.loggers.client[i];
    TRY(model_config_load(&shape, s->k.model_dir));
    int rc = disk_plan_make(&p, &a);
    if (rc == 0) rc = disk_plan_check(&p, &a, run_warn_early, &s->run);
    model_config_free(&shape);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static int open_all(struct sft *s, const struct conf *c) {
    static const char *const headlines[][2] = {
        {"train/loss", "loss"}, {"perf/throughput", "tok/s"}, {"train/lr", "lr"}, {"train/grad_norm", "grad_norm"}, {NULL, NULL}};
    struct sft_config *const k = &s->k;
    struct checkpoints models;
    TRY(sft_config_read(k, c));
    TRY(train_check_files("data.train_files", k->train.files, k->train.n_files));
    TRY(train_check_files("data.val_files", k->val.files, k->val.n_files));
    TRY(train_ranks(c, &k->devices, NULL, k->run.device, &k->n_ranks, &k->n_ray_nodes));
    TRY(train_model_weights("model.path", k->raw.model_path, k->model_dir));
    const struct run_program program = {
        .ctx = s, .state = state, .restore = restore, .validate = validate, .phase = phase, .plan = plan, .headlines = headlines};
    TRY(run_open(&s->run, c, &k->run, &program));
    const struct resume_model model = {"model.path", k->model_dir, true};
    TRY(run_tell_changes(&s->run, c, &model, 1));
    TRY(resume_check_adapter(&s->run.from, "actor", "model", k->lora.on ? &k->lora.cfg : NULL));
    TRY(open_device(s));
    TRY(open_data(s));
    TRY(check_disk(s));
    TRY(open_model(s, &models));
    TRY(run_ready(&s->run, c, &models));
    return s->ranks.n > 0 ? rank_group_ready(&s->ranks) : dev_memory(&s->worker.dev, &s->run.memory);
}

static void close_all(struct sft *s, int rc) {
    run_close(&s->run, rc);
    rank_dealing_free(&s->dispatch);
    rank_group_close(&s->ranks, rc == 0 || rc == ERR_SIGNAL);
    sft_worker_close(&s->worker);
    sft_dataset_close(s->train);
    sft_dataset_close(s->val);
    chat_template_destroy(s->chat);
    tokenizer_close(s->tok);
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

/* A rank's process that a launcher has started next to the controller. Bad configuration ends it by itself: the controller, which
 * refuses the same, never opens the group. */
static int serve(const struct conf *c, const struct launch *l) {
    struct sft_config k = {0};
    log_set_level(LOG_WARN); /* what is logged once is logged by the controller */
    int rc = sft_config_read(&k, c);
    const struct ctl_args a = {.dir = k.run.default_local_dir, .controller = k.devices.controller, .start_s = RANK_START_S};
    if (rc == 0) rc = rank_serve(l, &a, (const struct ctl_service *const[]){sft_services, NULL});
    sft_config_free(&k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : rc;
}

int train_sft(const struct conf *c) {
    struct sft_config k = {0};
    struct sft s = {0};
    struct restart restart;
    struct launch l;
    TRY(launch_read(&l, environ));
    if (ctl_is_worker(&l)) return serve(c, &l);
    TRY(sft_config_fill(&k, c));
    restart_begin(&restart, k.run.default_local_dir, k.run.device, k.devices.max_restarts);
    int rc = open_all(&s, c);
    if (rc == 0) rc = steps(&s);
    restart.ranks = s.k.n_ranks;
    restart.by_ranks = s.k.devices.ranks > 0;
    restart.ray = s.k.n_ray_nodes > 0;
    close_all(&s, rc);
    return rc < 0 ? err_pass(restart_run(&restart, rc, stage_stop_signal() != 0), __FILE__, __LINE__) : 0;
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
        if (s.ranks.n > 0) probe_prepare(p, &s.run, s.ranks.device, s.ranks.own_memory);
        else probe_prepare(p, &s.run, s.worker.dev.describe, dev_has_own_memory(&s.worker.dev));
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

static void plan_disk(const struct sft_config *k, const struct model_config *shape, struct train_plan *out) {
    struct disk_plan p;
    const struct disk_model m = {shape, k->model_dir, &k->lora, &k->optim};
    struct disk_plan_args a = disk_args(&k->run, &m);
    a.steps = k->total_training_steps > 0 ? k->total_training_steps : 0;
    if (disk_plan_make(&p, &a) == 0) json_object_set_new(out->json, "disk", disk_plan_print(&p, &a, &out->text));
}

int train_plan_sft(const struct conf *c, const struct train_plan_args *a, struct train_plan *out) {
    struct sft_config k = {0};
    struct model_config shape = {0};
    struct dev dev = {0};
    int rc = 0;
    TRYG(sft_config_read(&k, c), end);
    k.host_memory = a->host;
    TRYG(train_plan_ranks(
             &(struct train_plan_ranks_args){
                 .conf = c, .keys = &k.devices, .device = k.run.device, .threads = k.run.threads, .plan = a},
             &dev, &k.n_ranks, &k.n_local),
         end);
    TRYG(model_config_load(&shape, k.model_dir), end);
    rc = sft_memory_plan_print(&k, &dev, &shape, out);
    if (rc == 0) plan_disk(&k, &shape, out);
    model_config_free(&shape);
end:
    dev_close(&dev);
    sft_config_free(&k);
    return rc;
}
