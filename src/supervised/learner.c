/* learner.c - see supervised.h. Data's order, validation and the run; the model is a worker's (worker.h), in this process or in
 * those of several ranks. */
#include "supervised/supervised.h"

#include "plan/disk_plan.h"
#include "plan/time_probe.h"
#include "ranks/launcher.h"
#include "ranks/restart.h"
#include "ranks/worker_calls.h"
#include "run/directories.h"
#include "supervised/worker.h"
#include "train/optimizer_keys.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

extern char **environ;

struct learner {
    const struct supervised_program *program;
    struct supervised_config k; /* constant once read */
    struct rank_placement ranks;
    struct run run;
    struct supervised_worker worker;
    struct tokenizer *tok;
    struct supervised_data data;
    int64_t total_tokens;
};

/* ---- one step ---- */

/* The columns that supervised_update reads. */
static int make_batch(const struct supervised_rows *data, const int64_t *rows, int64_t n, struct batch *b) {
    struct batch_col *ids, *mask;
    int64_t *len = xmalloc((size_t)n * sizeof *len);
    batch_init(b, n);
    for (int64_t i = 0; i < n; i++) len[i] = data->seqs[rows[i]].n;
    int rc = batch_add(b, "row", BATCH_I64, NULL, rows, NULL);
    if (rc == 0) rc = batch_add(b, "input_ids", BATCH_I32, len, NULL, NULL);
    if (rc == 0) rc = batch_add(b, "loss_mask", BATCH_I32, len, NULL, &mask);
    free(len);
    TRY(rc);
    ids = batch_find(b, "input_ids");
    for (int64_t i = 0; i < n; i++) {
        const struct packed_seq *const x = &data->seqs[rows[i]];
        memcpy(ids->i32 + ids->off[i], x->ids, (size_t)x->n * sizeof *x->ids);
        for (int64_t t = 0; t < x->n; t++) mask->i32[mask->off[i] + t] = x->mask ? x->mask[t] : t >= x->first;
    }
    return 0;
}

static int update(struct learner *l, const int64_t *rows, int64_t n) {
    struct worker *const w = &l->worker.base;
    struct batch b;
    phase_begin(l->run.stages, "train");
    int rc = make_batch(&l->data.train, rows, n, &b);
    if (rc == 0) rc = w->ops->update(w, &supervised_update, &l->run, &b);
    phase_end(l->run.stages);
    batch_free(&b);
    return rc;
}

static int make_step(struct learner *l) {
    struct metrics *const m = &l->run.metrics;
    const int64_t *rows;
    int64_t n;
    double tokens = 0;
    int got = data_sampler_next(&l->run.sampler, &rows, &n);
    if (got == 0) got = data_sampler_next(&l->run.sampler, &rows, &n);
    TRY(got);
    const double start = clock_now();
    TRY(update(l, rows, n));
    const double seconds = clock_now() - start;
    CHECK(metrics_get(m, "train/global_tokens", &tokens));
    l->total_tokens += (int64_t)tokens;
    metrics_set(m, seconds, "train/time(s)");
    metrics_set(m, (double)l->total_tokens / 1e9, "train/total_tokens(B)");
    metrics_set(m, tokens / seconds, "perf/throughput");
    return l->worker.base.ops->memory(&l->worker.base, &l->run, "");
}

/* ---- callbacks of the run ---- */

static int validate(void *ctx) {
    struct learner *l = ctx;
    struct worker *const w = &l->worker.base;
    const struct supervised_rows *const val = &l->data.val;
    const struct progress at = run_progress(&l->run);
    int64_t targets = 0;
    for (int64_t i = 0; i < val->n; i++) targets += packed_seq_targets(&val->seqs[i]);
    float *logp = xmalloc((size_t)targets * 4);
    phase_begin(l->run.stages, "testing");
    const struct worker_pass pass = {
        .role = WORKER_POLICY, .phase = "testing", .at = &at, .seqs = val->seqs, .n = val->n, .out = {.logp = logp}};
    const int rc = w->ops->forward(w, &pass);
    if (rc == 0) l->program->validate(val, logp, &l->run.metrics);
    phase_end(l->run.stages);
    free(logp);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static void state(const void *ctx, json_t *trainer) {
    const struct learner *l = ctx;
    json_object_set_new(trainer, "total_tokens", json_integer(l->total_tokens));
    json_object_set_new(trainer, "grad_chunk", json_integer((json_int_t)l->k.data.grad_chunk));
    json_object_set_new(trainer, "context_parallel", json_integer((json_int_t)l->k.data.context));
}

static int restore(void *ctx, const json_t *trainer, const char *where) {
    struct learner *l = ctx;
    TRY(resume_compare(trainer, "grad_chunk", "data.grad_chunk", l->k.data.grad_chunk, where));
    TRY(resume_compare(trainer, "context_parallel", "engine.ulysses_sequence_parallel_size", l->k.data.context, where));
    return json_i64_opt(trainer, "total_tokens", &l->total_tokens, where);
}

static void phase(void *ctx, const char *name) { dev_trace_phase(&((struct learner *)ctx)->worker.base.dev, name); }

static const json_t *plan(const void *ctx) { return ((const struct learner *)ctx)->worker.planned.json; }

/* ---- opening ---- */

static int open_data(struct learner *l) {
    const struct supervised_config *k = &l->k;
    TRY(tokenizer_open(&l->tok, k->model.tokenizer_dir));
    TRY(chat_template_create(&l->data.chat, l->tok));
    l->data.tok = l->tok;
    TRY(l->program->open_data(&l->data, k));
    const struct data_sampler_args a = {.n_rows = l->data.train.n,
                                        .batch_size = k->data.train_batch_size,
                                        .order = k->data.sampler.order,
                                        .keys = l->data.train.keys,
                                        .drop_last = true,
                                        .seed = k->trainer.seed};
    TRY(run_open_sampler(&l->run, &a, k->trainer.total_epochs, k->trainer.total_training_steps));
    if (k->trainer.run.early_warnings) train_optim_check_steps(k->optim, l->run.total_steps, "optim", run_warn_early, &l->run);
    const int64_t epoch = data_sampler_batches(&l->run.sampler);
    if (k->trainer.run.save_freq == RUN_EVERY_EPOCH) l->run.k.save_freq = epoch;
    if (k->trainer.run.test_freq == RUN_EVERY_EPOCH) l->run.k.test_freq = epoch;
    return 0;
}

static int64_t longest_of(const struct supervised_rows *d, int64_t longest) {
    for (int64_t i = 0; i < d->n; i++) longest = d->seqs[i].n > longest ? d->seqs[i].n : longest;
    return longest;
}

/* The device, or with several ranks their processes. */
static int open_device(struct learner *l) {
    l->worker.k = supervised_worker_config(&l->k, l->ranks);
    if (l->ranks.n > 1) return supervised_ranks_start(&l->worker, &l->run);
    TRY(run_open_device(&l->run, &l->worker.base.dev));
    worker_open_local(&l->worker.base, NULL);
    return 0;
}

static int open_model(struct learner *l, struct checkpoints *models) {
    const int64_t longest = longest_of(&l->data.val, longest_of(&l->data.train, 1));
    TRY(l->ranks.n > 1 ? supervised_ranks_open(&l->worker, l->run.total_steps, longest)
                       : supervised_worker_open(&l->worker, l->run.total_steps, longest));
    l->worker.base.ops->checkpoints(&l->worker.base, models);
    log_info("%s", l->worker.planned.text);
    l->run.k.async_save = l->worker.planned.async_save;
    return 0;
}

static struct disk_plan_args disk_args(const struct disk_model *m) {
    return (struct disk_plan_args){.keep_key = "trainer.max_ckpt_to_keep", .models = m, .n_models = 1};
}

static int check_disk(struct learner *l) {
    struct model_config shape = {0};
    const struct disk_model m = {&shape, l->k.model.dir, &l->k.model.lora, &l->k.optim};
    struct disk_plan_args a = disk_args(&m);
    TRY(train_model_shape(&shape, l->k.model.dir, &l->k.model.mtp));
    const int rc = disk_plan_check(&a, &l->run);
    model_config_free(&shape);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static int open_all(struct learner *l, const struct conf *c) {
    static const char *const headlines[][2] = {
        {"train/loss", "loss"}, {"perf/throughput", "tok/s"}, {"train/lr", "lr"}, {"train/grad_norm", "grad_norm"}, {NULL, NULL}};
    const struct supervised_program *const p = l->program;
    const struct supervised_config *const k = &l->k;
    struct checkpoints models;
    TRY(supervised_config_read(&l->k, p, c));
    TRY(run_check_files("data.train_files", k->data.train.files, k->data.train.n_files));
    TRY(run_check_files("data.val_files", k->data.val.files, k->data.val.n_files));
    TRY(rank_count_decide(c, &k->trainer, NULL, true, &l->ranks));
    TRY(run_model_weights("model.path", k->raw.model_path, k->model.dir));
    const struct run_program program = {
        .ctx = l, .state = state, .restore = restore, .validate = validate, .phase = phase, .plan = plan, .headlines = headlines};
    l->worker = (struct supervised_worker){.program = p};
    TRY(run_open(&l->run, c, &k->trainer.run, &program));
    const struct resume_model model = {"model.path", k->model.dir, true};
    TRY(run_tell_changes(&l->run, c, &model, 1));
    TRY(resume_check_adapter(&l->run.from, "actor", "model", k->model.lora.on ? &k->model.lora.cfg : NULL));
    TRY(open_device(l));
    TRY(open_data(l));
    TRY(check_disk(l));
    TRY(open_model(l, &models));
    TRY(run_ready(&l->run, c, &models));
    return l->worker.base.ops->ready(&l->worker.base, &l->run);
}

static void close_all(struct learner *l, int rc) {
    run_close(&l->run, rc);
    supervised_worker_close(&l->worker, rc);
    l->program->close_data(&l->data);
    chat_template_destroy(l->data.chat);
    tokenizer_close(l->tok);
    supervised_config_free(&l->k);
    run_lock_release(l->run.k.lock);
}

/* ---- the program ---- */

static int steps(struct learner *l) {
    while (run_begin_step(&l->run)) {
        const int rc = make_step(l);
        if (rc < 0) return run_fail(&l->run, err_pass(rc, __FILE__, __LINE__));
        TRY(run_end_step(&l->run));
    }
    return 0;
}

/* A rank's process that a launcher has started next to the controller. Bad configuration ends it by itself: the controller, which
 * refuses the same, never opens the group. */
static int serve(const struct supervised_program *p, const struct conf *c, const struct launch *l) {
    struct supervised_config k = {0};
    log_set_level(LOG_WARN); /* what is logged once is logged by the controller */
    int rc = supervised_config_read(&k, p, c);
    const struct worker_process_service *const tables[] = {p->services, supervised_services, NULL};
    if (rc == 0) rc = rank_serve(l, k.trainer.run.default_local_dir, k.trainer.devices.controller, tables);
    supervised_config_free(&k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : rc;
}

int supervised_train(const struct supervised_program *p, const struct conf *c) {
    struct learner l = {.program = p};
    struct restart restart;
    struct launch launch;
    TRY(launch_read(&launch, environ));
    if (workers_started_this(&launch)) return serve(p, c, &launch);
    restart_begin(&restart);
    int rc = open_all(&l, c);
    if (rc == 0) rc = steps(&l);
    restart.k = &l.k.trainer;
    restart.ranks = l.ranks;
    close_all(&l, rc);
    return rc < 0 ? err_pass(restart_run(&restart, rc, phase_stop_signal() != 0), __FILE__, __LINE__) : 0;
}

/* ---- the steps that `verlc plan --probe` measures ---- */

static bool probe_begin(void *ctx) { return run_begin_step(&((struct learner *)ctx)->run); }

static int probe_step(void *ctx, struct time_probe *p) {
    struct learner *l = ctx;
    double tokens = 0;
    TRY(make_step(l));
    if (metrics_get(&l->run.metrics, "train/global_tokens", &tokens)) p->tokens = tokens;
    return run_end_step(&l->run);
}

static int probe_validate(void *ctx, struct time_probe *p) {
    p->validated = p->val_rows = ((struct learner *)ctx)->data.val.n;
    return validate(ctx);
}

int supervised_probe(const struct supervised_program *program, const struct conf *c, bool whole, struct time_probe *p) {
    struct learner l = {.program = program};
    const struct probe_calls calls = {.ctx = &l, .begin = probe_begin, .step = probe_step, .validate = probe_validate};
    *p = probe_opening();
    int rc = open_all(&l, c);
    probe_opened(p);
    if (rc == 0) {
        probe_prepare(p, &l.run, l.worker.base.device, l.worker.base.own_memory);
        p->validates = l.data.val.n > 0 && p->test_freq > 0;
        rc = probe_measure(p, &l.run, &calls, whole);
    }
    close_all(&l, rc);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int supervised_choices(const struct supervised_program *p, const struct conf *c, bool own_memory, struct buf *out) {
    struct supervised_config k = {0};
    const int rc = supervised_config_read(&k, p, c);
    const struct probe_keys keys = {.samples = "data.micro_batch_size_per_gpu",
                                    .tokens = "data.max_token_len_per_gpu",
                                    .cut = k.data.cut,
                                    .most = k.data.train_batch_size,
                                    .recompute = k.model.recompute,
                                    .offload = own_memory ? "engine.optimizer_offload" : NULL,
                                    .offloads = k.optim.host_state};
    if (rc == 0) probe_choices(&keys, out);
    supervised_config_free(&k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- `verlc plan` ---- */

static void plan_disk(const struct supervised_worker_config *k, const struct model_config *shape, struct run_plan *out) {
    const struct disk_model m = {shape, k->model.dir, &k->model.lora, &k->optim};
    struct disk_plan_args a = disk_args(&m);
    a.run = &k->trainer->run;
    a.steps = k->trainer->total_training_steps > 0 ? k->trainer->total_training_steps : 0;
    json_t *disk = disk_plan_print(&a, &out->text);
    if (disk) json_object_set_new(out->json, "disk", disk);
}

int supervised_plan(const struct supervised_program *program, const struct conf *c, const struct train_plan_args *a,
                    struct run_plan *out) {
    struct supervised_config read = {0};
    struct model_config shape = {0};
    struct dev dev = {0};
    struct rank_placement ranks;
    int rc = 0;
    TRYG(supervised_config_read(&read, program, c), end);
    TRYG(run_plan_ranks(c, &read.trainer, NULL, a, &dev, &ranks), end);
    TRYG(train_model_shape(&shape, read.model.dir, &read.model.mtp), end);
    struct supervised_worker_config k = supervised_worker_config(&read, ranks);
    rc = supervised_memory_plan_print(&k, &dev, &shape, out);
    if (rc == 0) plan_disk(&k, &shape, out);
    model_config_free(&shape);
end:
    dev_close(&dev);
    supervised_config_free(&read);
    return rc;
}
