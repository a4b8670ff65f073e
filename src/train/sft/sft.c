/* sft.c - supervised fine-tuning: verl's sft_trainer (engine keys) and
 * fsdp_sft_trainer (the older keys, which conf moves to the new ones) on the same actor as ppo.
 *
 * Loss: the mean of -log p over the batch's target tokens (verl sft_loss),
 * defined over the whole batch, so that micro-batches do not change it.
 * Invariant: as ppo - a resumed run ends in the bits of an unbroken one. */
#include "ckpt/ckpt.h"
#include "data/data.h"
#include "text/text.h"
#include "train/run/actor.h"
#include "train/sft/config.h"
#include "train/run/phases.h"
#include "train/run/resume.h"
#include "train/train.h"
#include "train/run/lora_keys.h"
#include "train/run/memory_limit.h"
#include "train/run/optimizer_keys.h"
#include "train/run/activation_recompute.h"
#include "train/run/early_stopping.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct sft {
    struct sft_config k;
    struct dev dev;
    struct model *model;
    struct actor *actor;
    struct tokenizer *tok;
    struct chat_template *chat;
    struct sft_dataset *train, *val;
    struct data_sampler sampler;
    struct track *track;
    struct stages *stages;
    struct metrics metrics;
    int64_t step, total_steps, saved_step, bad_steps, total_tokens;
    int64_t optim_done; /* optimizer steps at the end of the last whole step */
    struct early_stop early;
    char *config_yaml;
    json_t *cursor;
};

/* ---- one step ---- */

struct sft_loss {
    struct sft *s;
    double sum, scale;   /* of -log p, and 1 / target tokens of the batch */
    int64_t done, total; /* samples, for the progress */
};

static int loss_fn(void *arg, int64_t lo, int64_t hi, int64_t t0, int64_t t1, const float *logp, const float *entropy, float *dlogp,
                   float *dentropy) {
    struct sft_loss *l = arg;
    (void)entropy, (void)dentropy;
    for (int64_t t = 0; t < t1 - t0; t++) {
        l->sum -= (double)logp[t];
        dlogp[t] = (float)-l->scale;
    }
    l->done += hi - lo;
    stage_beat(l->s->stages);
    track_progress(l->s->track, l->s->step, "train", l->done, l->total, 0);
    return 0;
}

static int64_t fill_seqs(const struct sft_dataset *d, const int64_t *rows, int64_t n, struct actor_seq *seqs) {
    int64_t targets = 0;
    for (int64_t i = 0; i < n; i++) {
        const struct sft_sample *x = &d->samples[rows ? rows[i] : i];
        seqs[i] = (struct actor_seq){.ids = x->ids, .n = x->n, .mask = x->loss_mask};
        targets += actor_seq_targets(&seqs[i]);
    }
    return targets;
}

/* A batch whose gradient is not finite: ids and targets, one line a sample. */
static int save_bad_batch(const struct sft *s, const int64_t *rows, int64_t n) {
    char *dir = xasprintf("%s/bad_batches", s->k.default_local_dir), *path = xasprintf("%s/%lld.jsonl", dir, (long long)s->step);
    struct buf out = {0};
    int rc = file_mkdirs(dir);
    for (int64_t i = 0; i < n && rc == 0; i++) {
        const struct sft_sample *x = &s->train->samples[rows[i]];
        json_t *ids = json_array(), *mask = json_array();
        for (int64_t t = 0; t < x->n; t++) {
            json_array_append_new(ids, json_integer(x->ids[t]));
            json_array_append_new(mask, json_integer(x->loss_mask[t]));
        }
        json_t *o = json_pack("{s:I, s:I, s:o, s:o}", "step", (json_int_t)s->step, "row", (json_int_t)rows[i], "ids", ids,
                              "loss_mask", mask);
        rc = json_dump_line(&out, o);
        json_decref(o);
        if (rc == 0) rc = buf_addc(&out, '\n');
    }
    if (rc == 0) rc = file_write_atomic(path, out.p ? out.p : "", out.n);
    buf_free(&out);
    free(path);
    free(dir);
    return rc;
}

/* One optimizer step over n rows. */
static int train_rows(struct sft *s, const int64_t *rows, int64_t n, struct actor_cut cut) {
    const double start = clock_now(), lr = optim_lr(&s->k.optim, s->step - (s->k.zero_indexed_step ? 1 : 0));
    struct actor_seq *seqs = xmalloc((size_t)n * sizeof *seqs);
    const int64_t targets = fill_seqs(s->train, rows, n, seqs);
    struct sft_loss l = {.s = s, .scale = targets ? 1.0 / (double)targets : 0, .total = n};
    struct actor_step_result r;
    const struct actor_step_args a = {
        .seqs = seqs, .n = n, .cut = cut, .temperature = 1, .loss = loss_fn, .loss_arg = &l, .optim = &s->k.optim, .lr = lr};
    stage_begin(s->stages, "train");
    const int rc = actor_step(s->actor, &a, &r);
    stage_end(s->stages);
    free(seqs);
    TRY(rc);
    metrics_reset(&s->metrics);
    metrics_set(&s->metrics, l.sum * l.scale, "train/loss");
    metrics_set(&s->metrics, r.optim.grad_norm, "train/grad_norm");
    metrics_set(&s->metrics, lr, "train/lr");
    metrics_set(&s->metrics, clock_now() - start, "train/time(s)");
    metrics_set_i64(&s->metrics, r.n_rows, "train/global_tokens");
    s->total_tokens += r.n_rows;
    metrics_set(&s->metrics, (double)s->total_tokens / 1e9, "train/total_tokens(B)");
    metrics_set(&s->metrics, (double)r.n_rows / (clock_now() - start), "perf/throughput");
    if (isfinite(r.optim.grad_norm)) {
        s->bad_steps = 0;
        return 0;
    }
    log_warn("step %lld: %s is not finite; nothing was changed; its batch is in bad_batches/%lld.jsonl", (long long)s->step,
             r.optim.bad_tensor[0] ? r.optim.bad_tensor : "the gradient norm", (long long)s->step);
    TRY(save_bad_batch(s, rows, n));
    if (++s->bad_steps >= s->k.max_bad_steps)
        FAIL(ERR_NUMERIC, "step %lld: %s is not finite, %lld times in a row (trainer.max_bad_steps)", (long long)s->step,
             r.optim.bad_tensor[0] ? r.optim.bad_tensor : "the gradient norm", (long long)s->bad_steps);
    return 0;
}

static int sft_step(struct sft *s) {
    const int64_t *next;
    int64_t n;
    struct actor_cut cut = s->k.cut;
    int got = data_sampler_next(&s->sampler, &next, &n);
    if (got == 0) got = data_sampler_next(&s->sampler, &next, &n);
    TRY(got);
    int64_t *rows = xmalloc((size_t)n * 2 * sizeof *rows), *len = rows + n;
    for (int64_t i = 0; i < n; i++) len[i] = s->train->samples[rows[i] = next[i]].n;
    int rc = pack_balance(&cut, len, rows, n);
    if (rc == 0) rc = train_rows(s, rows, n, cut);
    free(cut.ends);
    free(rows);
    return rc;
}

static int validate(struct sft *s) {
    const int64_t n = s->val->n;
    struct actor_seq *seqs = xmalloc((size_t)n * sizeof *seqs);
    const int64_t targets = fill_seqs(s->val, NULL, n, seqs);
    float *logp = xmalloc((size_t)targets * 4);
    double sum = 0;
    int rc = 0;
    stage_begin(s->stages, "testing");
    for (int64_t lo = 0, at = 0; lo < n && rc == 0; lo += 64) {
        const int64_t k = n - lo < 64 ? n - lo : 64;
        rc = actor_logp(s->actor, seqs + lo, k, s->k.cut, 1, (struct actor_out){.logp = logp + at});
        for (int64_t i = lo; i < lo + k; i++) at += actor_seq_targets(&seqs[i]);
        stage_beat(s->stages);
    }
    for (int64_t t = 0; t < targets; t++) sum -= (double)logp[t];
    if (rc == 0) metrics_set(&s->metrics, targets ? sum / (double)targets : 0, "val/loss");
    stage_end(s->stages);
    free(seqs);
    free(logp);
    return rc;
}

/* ---- checkpoints ---- */

/* keep: how many checkpoints stay on disk, <= 0: all. */
static int save(struct sft *s, int64_t step, int64_t keep) {
    const struct ckpt_part actor = {"actor", s->model, actor_optim(s->actor), s->k.tokenizer_dir};
    json_t *trainer = json_pack("{s:I, s:s, s:O, s:I, s:I, s:o}", "global_step", (json_int_t)step, "isa", s->dev.isa, "data",
                                s->cursor, "total_tokens", (json_int_t)s->total_tokens, "bad_steps", (json_int_t)s->bad_steps,
                                "early_stopping", early_stop_state(&s->early));
    const struct ckpt_save_args a = {.root = s->k.default_local_dir,
                                     .step = step,
                                     .parts = &actor,
                                     .n_parts = 1,
                                     .trainer = trainer,
                                     .config_yaml = s->config_yaml,
                                     .keep = keep,
                                     .best = s->early.best_step};
    stage_begin(s->stages, "save_checkpoint");
    if (track_flush(s->track) < 0) log_warn("tracking: %s", err_msg());
    int rc = ckpt_save(&a);
    stage_end(s->stages);
    json_decref(trainer);
    if (rc == 0) s->saved_step = step;
    if (rc == 0) rc = early_stop_publish(&s->early, s->k.default_local_dir);
    return rc;
}

static int resume_from(struct sft *s, const struct resume *r) {
    const struct ckpt_part actor = {"actor", s->model, actor_optim(s->actor), NULL};
    TRY(ckpt_load_part(r->dir, &actor));
    TRY(json_i64_opt(r->trainer, "total_tokens", &s->total_tokens, r->dir));
    TRY(json_i64_opt(r->trainer, "bad_steps", &s->bad_steps, r->dir));
    TRY(data_sampler_restore(&s->sampler, json_object_get(r->trainer, "data"), r->dir));
    TRY(early_stop_restore(&s->early, json_object_get(r->trainer, "early_stopping"), r->dir));
    TRY(early_stop_publish(&s->early, s->k.default_local_dir));
    s->step = s->saved_step = r->step;
    s->optim_done = actor_optim(s->actor)->step;
    log_info("resumed from %s", r->dir);
    return 0;
}

/* ---- opening and running ---- */

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
    const int rc = data_sampler_init(&s->sampler, &a);
    if (rc < 0) return err_wrap(rc, "data.train_batch_size");
    s->total_steps = data_sampler_batches(&s->sampler) * k->total_epochs;
    if (k->total_training_steps > 0) s->total_steps = k->total_training_steps;
    train_optim_steps(&k->optim, s->total_steps, k->warmup_ratio);
    return 0;
}

static int open_track(struct sft *s, const struct conf *c, int64_t resume_step) {
    const json_t *config;
    TRY(conf_json(c, "", &config));
    const struct track_args a = {.loggers = s->k.loggers,
                                 .n_loggers = s->k.n_loggers,
                                 .project = s->k.project,
                                 .experiment = s->k.experiment,
                                 .run_dir = s->k.default_local_dir,
                                 .config = config,
                                 .total_steps = s->total_steps,
                                 .resume_step = resume_step,
                                 .title = "sft"};
    TRY(track_open(&s->track, &a));
    track_headline(s->track, "train/loss", "loss");
    track_headline(s->track, "perf/throughput", "tok/s");
    return 0;
}

static int64_t longest_sample(const struct sft_dataset *d, int64_t longest) {
    for (int64_t i = 0; d && i < d->n; i++) longest = d->samples[i].n > longest ? d->samples[i].n : longest;
    return longest;
}

/* ---- memory: planned from the model's shape, before its weights are read ---- */

/* Device bytes of all but activations: weights, adapter, master, gradients, optimizer state, and the driver's. */
static int fixed_bytes(struct sft *s, const struct model_config *c, const struct optim_config *o, size_t *out) {
    const struct sft_config *k = &s->k;
    const struct model_open_args open = {.act = k->act, .flags = MODEL_INFER, .max_len = k->max_length, .quant = k->lora.quant};
    struct lora_plan l = {.master = (size_t)model_config_params(c) * 4};
    size_t host;
    if (k->lora.on) TRY(model_lora_plan(&l, c, &s->dev, k->act, &k->lora.cfg, o));
    else l.moments = optim_bytes(c, &s->dev, k->act, o, &host);
    *out = train_pages(model_open_bytes(c, &s->dev, &open)) + train_pages(l.weights) + train_pages(l.moments) +
           train_pages(l.master) * (o->host_master ? 1 : 2) + dev_driver_bytes(&s->dev);
    return 0;
}

static struct dev_sizes sizes_of(const struct sft *s, const struct model_config *c, const struct actor_args *a) {
    return (struct dev_sizes){.act = s->k.act,
                              .rows = a->max_rows,
                              .decode = 1,
                              .hidden = c->hidden,
                              .ffn = c->ffn,
                              .qkv = (c->n_q_heads + 2 * c->n_kv_heads) * c->head_dim,
                              .vocab = c->vocab,
                              .n_q_heads = c->n_q_heads,
                              .head_dim = c->head_dim,
                              .train = true};
}

static size_t pass_bytes(struct sft *s, const struct model_config *c, const struct actor_args *a) {
    const struct dev_sizes z = sizes_of(s, c, a);
    return dev_working_bytes(&s->dev, &z) + train_pages(actor_block_bytes(c, s->k.act, a));
}

static void set_cut(struct actor_args *a, struct actor_cut cut, int64_t longest, int64_t batch) {
    a->max_rows = cut.max_rows == 0 ? cut.max_seqs * longest : cut.max_rows > longest ? cut.max_rows : longest;
    a->max_seqs = cut.max_seqs > 0 ? cut.max_seqs : batch;
}

/* The first micro-batch on the way to the smallest one whose pass takes at most `room` bytes; false: none does. */
static bool smaller_cut(struct sft *s, const struct model_config *c, struct actor_args a, int64_t longest, size_t room,
                        struct actor_cut *cut) {
    int64_t *limit = cut->max_seqs > 0 ? &cut->max_seqs : &cut->max_rows;
    const int64_t least = cut->max_seqs > 0 ? 1 : longest;
    while (*limit > least) {
        *limit = *limit > 16 ? *limit / 2 : *limit - 1;
        if (*limit < least) *limit = least;
        set_cut(&a, *cut, longest, s->k.train_batch_size);
        if (pass_bytes(s, c, &a) <= room) return true;
    }
    return false;
}

/* The nearest change that fits: first those that leave the result as it is and cost least. */
static int refuse(struct sft *s, const struct model_config *c, const struct actor_args *a, int64_t longest, size_t fixed,
                  size_t limit) {
    struct actor_args again = *a;
    struct actor_cut cut = s->k.cut;
    struct optim_config o = s->k.optim;
    char need[96];
    snprintf(need, sizeof need, "the run needs %.2f GiB, the limit is %.2f GiB", (double)(fixed + pass_bytes(s, c, a)) / 0x1p30,
             (double)limit / 0x1p30);
    again.keep = train_keep(RECOMPUTE_AUTO, c, s->k.act, a->max_rows, 0);
    if (fixed + pass_bytes(s, c, &again) <= limit)
        FAIL(ERR_NOMEM, "%s; model.enable_gradient_checkpointing=True, without a trainer.recompute, fits (the result is the same)",
             need);
    if (fixed < limit && smaller_cut(s, c, *a, longest, limit - fixed, &cut))
        FAIL(ERR_NOMEM, "%s; data.%s=%lld fits (the result is the same)", need,
             cut.max_seqs > 0 ? "micro_batch_size_per_gpu" : "max_token_len_per_gpu",
             (long long)(cut.max_seqs > 0 ? cut.max_seqs : cut.max_rows));
    o.host_master = o.host_state = true;
    if (dev_has_own_memory(&s->dev) && !s->k.optim.host_state) {
        TRY(fixed_bytes(s, c, &o, &fixed));
        if (fixed + pass_bytes(s, c, a) <= limit)
            FAIL(ERR_NOMEM, "%s; engine.optimizer_offload=True fits (the result is the same)", need);
    }
    FAIL(ERR_NOMEM, "%s; no smaller micro-batch fits: train an adapter (model.lora_rank), or lower data.max_length", need);
}

/* Chooses a->keep, takes what the ops need, and refuses what does not fit. Where the plan may choose, a GPU's free
 * memory is used, and of a CPU no more than it must be. */
static int plan_activations(struct sft *s, const struct model_config *c, struct actor_args *a, int64_t longest) {
    const struct sft_config *k = &s->k;
    const struct dev_sizes sizes = sizes_of(s, c, a);
    const size_t limit = train_memory_limit(&s->dev, k->memory_limit);
    size_t fixed;
    char text[96];
    TRY(fixed_bytes(s, c, &k->optim, &fixed));
    a->keep = train_keep(k->recompute, c, k->act, a->max_rows, 0);
    const size_t least = fixed + pass_bytes(s, c, a);
    if (dev_has_own_memory(&s->dev) && k->recompute == RECOMPUTE_AUTO && least < limit)
        a->keep = train_keep(RECOMPUTE_AUTO, c, k->act, a->max_rows, limit - least);
    log_info("update: micro-batch of %lld tokens, %.2f GiB of activations, %s", (long long)a->max_rows,
             (double)actor_block_bytes(c, k->act, a) / 0x1p30, train_keep_text(a->keep, c, text, sizeof text));
    if (least > limit) return refuse(s, c, a, longest, fixed, limit);
    return dev_reserve(&s->dev, &sizes);
}

static int open_model(struct sft *s) {
    const int64_t longest = longest_sample(s->val, longest_sample(s->train, 1));
    struct optim_config *const o = &s->k.optim;
    struct model_config shape;
    if (o->host_master && !dev_has_own_memory(&s->dev)) {
        log_note("param_offload and optimizer_offload change nothing on this device, whose memory is the host's");
        o->host_master = o->host_state = false;
    }
    struct actor_args a = {.dev = &s->dev, .train = true, .optim = &s->k.optim};
    set_cut(&a, s->k.cut, longest, s->k.train_batch_size);
    TRY(model_config_load(&shape, s->k.model_dir));
    const int rc = plan_activations(s, &shape, &a, longest);
    model_config_free(&shape);
    TRY(rc);
    const struct model_open_args m = {
        .dir = s->k.model_dir, .act = s->k.act, .flags = o->host_master ? MODEL_HOST_MASTER : 0, .max_len = s->k.max_length};
    TRY(train_open_model(&s->model, &s->dev, &m, &s->k.lora, s->k.seed));
    a.model = s->model;
    return actor_create(&s->actor, &a);
}

static int open_all(struct sft *s, const struct conf *c) {
    struct buf text = {0};
    struct resume from = {.step = -1};
    int rc = 0;
    TRY(sft_config_read(&s->k, c));
    TRY(early_stop_read(&s->early, &s->k.early_stop, "val/loss",
                        s->k.val.n_files > 0 && s->k.test_freq != 0 && s->k.test_freq != -1));
    TRY(conf_yaml(c, &text));
    s->config_yaml = buf_take(&text);
    TRY(train_run_dir("trainer.default_local_dir", s->k.default_local_dir));
    TRY(stages_create(&s->stages, s->k.deadline_s));
    stage_begin(s->stages, "start");
    const struct resume_args a = {.mode = s->k.resume_mode, .path = s->k.resume_from, .root = s->k.default_local_dir};
    TRYG(resume_find(&from, &a), out);
    TRYG(resume_open_device(&s->dev, &from, s->k.device, (int)s->k.threads), out);
    if (s->k.memory_limit > 0 && (size_t)s->k.memory_limit < s->dev.mem_total) s->dev.mem_total = (size_t)s->k.memory_limit;
    TRYG(open_data(s), out);
    TRYG(resume_check_room(&from, s->k.default_local_dir, s->total_steps), out);
    TRYG(open_model(s), out);
    TRYG(open_track(s, c, from.step), out);
    if (from.dir) TRYG(resume_from(s, &from), out);
    s->cursor = data_sampler_state(&s->sampler);
out:
    stage_end(s->stages);
    resume_free(&from);
    return rc;
}

static void close_all(struct sft *s) {
    track_close(s->track);
    actor_destroy(s->actor);
    model_close(s->model);
    data_sampler_free(&s->sampler);
    sft_dataset_close(s->train);
    sft_dataset_close(s->val);
    chat_template_destroy(s->chat);
    tokenizer_close(s->tok);
    stages_destroy(s->stages);
    dev_close(&s->dev);
    metrics_free(&s->metrics);
    json_decref(s->cursor);
    free(s->config_yaml);
    sft_config_free(&s->k);
}

static bool due(const struct sft *s, int64_t freq) {
    const int64_t per_epoch = data_sampler_batches(&s->sampler);
    if (freq == SFT_EVERY_EPOCH) return s->step % per_epoch == 0 || s->step == s->total_steps;
    return freq > 0 && (s->step % freq == 0 || s->step == s->total_steps);
}

static int finish_step(struct sft *s) {
    int best = 0;
    json_decref(s->cursor);
    s->cursor = data_sampler_state(&s->sampler);
    s->optim_done = actor_optim(s->actor)->step;
    if (s->val && !stage_stop_signal() && due(s, s->k.test_freq)) {
        TRY(validate(s));
        TRY(best = early_stop_look(&s->early, &s->metrics, s->step));
    }
    const int stop = stage_stop_signal(); /* read once: it may come at any moment */
    if (stop || best > 0 || early_stop_done(&s->early) || due(s, s->k.save_freq)) TRY(save(s, s->step, s->k.keep_ckpts));
    stages_metrics(s->stages, &s->metrics);
    track_log(s->track, s->step, &s->metrics);
    if (stop) FAIL(ERR_SIGNAL, "stopped by %s", stage_signal_name(stop));
    return 0;
}

/* Adds to the error where the run can go on from, after saving the last whole step where it is not
 * on disk yet, as ppo does. After a numerical stop nothing is retired. */
static int end_early(struct sft *s, int rc) {
    char *why = xstrdup(err_msg());
    const bool whole = actor_optim(s->actor)->step == s->optim_done;
    if (s->step > 0 && s->saved_step != s->step && whole && rc != ERR_IO &&
        save(s, s->step, rc == ERR_NUMERIC ? 0 : s->k.keep_ckpts) < 0)
        log_warn("%s", err_msg());
    if (s->saved_step > 0)
        err_set(rc, __FILE__, __LINE__, "%s; the state of step %lld is in %s, and trainer.resume_mode=auto goes on from there", why,
                (long long)s->saved_step, s->k.default_local_dir);
    else err_set(rc, __FILE__, __LINE__, "%s; no step was saved", why);
    free(why);
    return rc;
}

static int run(struct sft *s) {
    if (s->step >= s->total_steps)
        log_note("nothing to do: step %lld of %lld is already done; raise trainer.total_training_steps or total_epochs to go on",
                 (long long)s->step, (long long)s->total_steps);
    while (s->step < s->total_steps && !early_stop_done(&s->early)) {
        s->step++;
        int rc = sft_step(s);
        if (rc < 0) s->step--;
        else rc = finish_step(s);
        if (rc < 0) return end_early(s, rc);
    }
    early_stop_say(&s->early, s->step);
    return 0;
}

int train_sft(const struct conf *c) {
    struct sft s = {.saved_step = -1};
    int rc = open_all(&s, c);
    if (rc == 0) rc = run(&s);
    if (rc == 0 && s.saved_step > 0)
        log_info("done: %lld steps; the model is in %s/global_step_%lld/actor", (long long)s.step, s.k.default_local_dir,
                 (long long)s.saved_step);
    if (rc == 0) early_stop_report(&s.early, s.k.default_local_dir, "actor");
    close_all(&s);
    return rc;
}
