/* ppo.c - the controller: one step of PPO or GRPO as the algorithm reads on
 * paper, and what a run needs around it (opening, resuming, saving, stopping).
 * The stages live in ppo_rollout.c, ppo_update.c, ppo_validate.c.
 *
 * Invariant: what the next step computes is a function of the policy, the
 * optimizer, the data cursor and the step number, all of which a checkpoint
 * holds; so a run that was killed and resumed ends in the same bits. */
#include "train/ppo_int.h"
#include "train/resume.h"
#include "train/train_optim.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* ---- one step ---- */

/* The randomness of an epoch: a row seen again draws anew. */
static uint64_t epoch_seed(const struct ppo *p) {
    return p->k.seed ^ ((uint64_t)p->sampler.epoch * 0x9E3779B97F4A7C15u);
}

static int next_prompts(struct ppo *p, struct batch *b) {
    const int64_t *rows;
    int64_t n;
    int got = data_sampler_next(&p->sampler, &rows, &n);
    if (got == 0) got = data_sampler_next(&p->sampler, &rows, &n); /* a new epoch */
    TRY(got);
    CHECK(got == 1);
    return rl_dataset_batch(p->train_data, rows, n, b);
}

static int ppo_step(struct ppo *p) {
    struct batch prompts = {0}, b = {0};
    int rc = 0;
    metrics_reset(&p->metrics);
    stage_begin(p->stages, "gen");
    TRYG(next_prompts(p, &prompts), out);
    TRYG(ppo_generate(p, &prompts, &p->k.train, epoch_seed(p), false, &b), out);
    stage_begin(p->stages, "reward");
    TRYG(ppo_reward_errors(p, &b), out);
    TRYG(ppo_reward_weights(p, &b), out);
    TRYG(ppo_reference(p, &b), out);
    stage_begin(p->stages, "adv");
    TRYG(ppo_advantage(p, &b), out);
    stage_begin(p->stages, "update_actor");
    TRYG(ppo_update(p, &b), out);
    stage_begin(p->stages, "dump_rollout_generations");
    ppo_dump(p, &b, &p->k.rollout_data_dir);
    ppo_record(p, &b, false);
    stage_end(p->stages);
    stages_metrics(p->stages, &p->metrics);
    TRYG(ppo_data_metrics(p, &b), out);
    metrics_set_i64(&p->metrics, p->step, "training/global_step");
    metrics_set_i64(&p->metrics, p->sampler.epoch, "training/epoch");
out:
    stage_end(p->stages);
    batch_free(&prompts);
    batch_free(&b);
    return rc;
}

/* ---- checkpoints ---- */

/* keep: how many checkpoints stay on disk, <= 0: all. */
static int save(struct ppo *p, int64_t step, int64_t keep) {
    const struct ckpt_part actor = {"actor", p->policy, actor_optim(p->actor), p->k.tokenizer_dir};
    json_t *trainer = json_pack("{s:I, s:s, s:O, s:f, s:I, s:I, s:o}", "global_step", (json_int_t)step, "isa", p->dev.isa, "data", p->cursor,
                                "kl_ctrl", p->kl_ctrl.value, "seed", (json_int_t)p->k.seed, "bad_steps", (json_int_t)p->bad_steps,
                                "early_stopping", early_stop_state(&p->early));
    const struct ckpt_save_args a = {.root = p->k.default_local_dir, .step = step, .parts = &actor, .n_parts = 1,
                                     .trainer = trainer, .config_yaml = p->config_yaml, .keep = keep,
                                     .best = p->early.best_step};
    stage_begin(p->stages, "save_checkpoint");
    int rc = track_flush(p->track);
    if (rc < 0) log_warn("tracking: %s", err_msg()); /* a tracker never ends a run */
    rc = ckpt_save(&a);
    stage_end(p->stages);
    json_decref(trainer);
    if (rc == 0) p->saved_step = step;
    if (rc == 0) rc = early_stop_publish(&p->early, p->k.default_local_dir);
    return rc;
}

static int resume_from(struct ppo *p, const struct resume *r) {
    const struct ckpt_part actor = {"actor", p->policy, actor_optim(p->actor), NULL};
    TRY(ckpt_load_part(r->dir, &actor));
    TRY(json_i64_opt(r->trainer, "bad_steps", &p->bad_steps, r->dir));
    TRY(json_f64(r->trainer, "kl_ctrl", &p->kl_ctrl.value, r->dir));
    TRY(data_sampler_restore(&p->sampler, json_object_get(r->trainer, "data"), r->dir));
    TRY(early_stop_restore(&p->early, json_object_get(r->trainer, "early_stopping"), r->dir));
    TRY(early_stop_publish(&p->early, p->k.default_local_dir));
    p->step = p->saved_step = r->step;
    log_info("resumed from %s", r->dir);
    return 0;
}

/* ---- opening ---- */

static int open_dataset(struct ppo *p, bool train, struct rl_dataset **out) {
    const struct ppo_config *k = &p->k;
    const struct rl_dataset_args a = {
        .files = train ? k->train_files : k->val_files, .n_files = train ? k->n_train_files : k->n_val_files,
        .prompt_key = k->prompt_key, .reward_fn_key = k->reward_fn_key, .tok = p->tok, .chat = p->chat,
        .chat_kwargs = k->chat_kwargs, .max_prompt_length = k->max_prompt_length,
        .filter_overlong_prompts = k->filter_overlong_prompts, .truncation = k->truncation,
        .max_samples = train ? k->train_max_samples : k->val_max_samples, .shuffle = train && k->shuffle, .seed = k->seed,
        .what = train ? "data.train_files" : "data.val_files", .sampler = train ? &k->sampler : NULL};
    return rl_dataset_open(out, &a);
}

static int open_data(struct ppo *p) {
    TRY(tokenizer_open(&p->tok, p->k.tokenizer_dir));
    TRY(chat_template_create(&p->chat, p->tok));
    TRY(open_dataset(p, true, &p->train_data));
    if (p->k.n_val_files > 0) TRY(open_dataset(p, false, &p->val_data));
    const struct data_sampler_args a = {.n_rows = p->train_data->n, .batch_size = p->k.train_batch_size,
                                        .order = p->k.sampler.order, .keys = p->train_data->keys, .drop_last = true, .seed = p->k.seed};
    const int rc = data_sampler_init(&p->sampler, &a);
    if (rc < 0) return err_wrap(rc, "data.train_batch_size");
    p->total_steps = data_sampler_batches(&p->sampler) * p->k.total_epochs;
    if (p->k.total_training_steps > 0) p->total_steps = p->k.total_training_steps;
    train_optim_steps(&p->k.optim, p->total_steps, p->k.warmup_ratio);
    return 0;
}

static int open_models(struct ppo *p) {
    const struct ppo_plan *l = &p->plan;
    const struct model_open_args a = {.dir = p->k.model_dir, .act = p->k.act, .flags = MODEL_INFER, .max_len = l->max_len};
    TRY(train_open_model(&p->policy, &p->dev, &a, &p->k.lora, p->k.seed));
    if (l->ref > 0) TRY(model_open(&p->reference, &p->dev, &a));
    TRY(dev_alloc(&p->dev, l->block, &p->block));
    TRY(dev_zero(&p->dev, p->block, l->block)); /* the memory is really there, now rather than in mid-run */
    const struct roll_decoder_args r = {.model = p->policy, .n_pages = l->n_pages, .max_rows = l->max_rows_roll,
                                        .max_seqs = l->max_seqs, .max_len = l->max_len,
                                        .max_burst = roll_device_burst(&p->dev), .block = p->block};
    TRY(roll_decoder_open(&p->decoder, &r));
    const struct actor_args t = {.dev = &p->dev, .model = p->policy, .train = true, .keep = p->k.keep, .optim = &p->k.optim, .max_rows = l->max_rows_update,
                           .max_seqs = l->max_seqs_update, .block = p->block};
    TRY(actor_create(&p->actor, &t));
    if (l->max_rows_ref == 0) return 0;
    /* with an adapter the reference is the policy without it: no second copy of the weights */
    const struct actor_args f = {.dev = &p->dev, .model = p->k.lora.on ? p->policy : p->reference, .no_adapter = true, .max_rows = l->max_rows_ref, .max_seqs = l->max_seqs_ref,
                           .block = p->block};
    return actor_create(&p->ref_actor, &f);
}

static int open_track(struct ppo *p, int64_t resume_step) {
    const json_t *config;
    TRY(conf_json(p->k.conf, "", &config));
    const struct track_args a = {.loggers = p->k.loggers, .n_loggers = p->k.n_loggers, .project = p->k.project,
                                 .experiment = p->k.experiment, .run_dir = p->k.default_local_dir, .config = config,
                                 .total_steps = p->total_steps, .resume_step = resume_step, .title = p->k.adv_estimator};
    TRY(track_open(&p->track, &a));
    track_headline(p->track, "critic/rewards/mean", "reward");
    track_headline(p->track, "actor/kl_loss", "kl");
    track_headline(p->track, "perf/throughput", "tok/s");
    return 0;
}

static int open_all(struct ppo *p, const struct conf *c) {
    struct model_config m;
    struct buf text = {0};
    struct resume from = {.step = -1};
    int rc = 0;
    TRY(ppo_config_read(&p->k, c));
    TRY(early_stop_read(&p->early, c, NULL, p->k.n_val_files > 0 && p->k.test_freq > 0));
    TRY(conf_yaml(c, &text));
    p->config_yaml = buf_take(&text);
    TRY(train_run_dir("trainer.default_local_dir", p->k.default_local_dir));
    if (p->k.rollout_data_dir) TRY(train_run_dir("trainer.rollout_data_dir", p->k.rollout_data_dir));
    if (p->k.validation_data_dir) TRY(train_run_dir("trainer.validation_data_dir", p->k.validation_data_dir));
    TRY(stages_create(&p->stages, p->k.deadline_s));
    stage_begin(p->stages, "start");
    TRY(model_config_load(&m, p->k.model_dir));
    const struct resume_args a = {.mode = p->k.resume_mode, .path = p->k.resume_from, .root = p->k.default_local_dir};
    TRYG(resume_find(&from, &a), out);
    TRYG(resume_open_device(&p->dev, &from, p->k.device, p->k.threads), out);
    TRYG(ppo_plan_make(&p->plan, &p->k, &m, &p->dev), out);
    TRYG(ppo_plan_print(&p->plan, &p->k, &m, &text), out);
    log_info("%s", text.p);
    TRYG(ppo_plan_check(&p->plan, &p->k, &m), out);
    TRYG(open_data(p), out);
    TRYG(reward_create(&p->reward, &p->k.reward), out);
    TRYG(open_models(p), out);
    TRYG(algo_kl_ctrl_init(&p->kl_ctrl, p->k.kl_ctrl_type, p->k.kl_ctrl_coef, p->k.kl_ctrl_target, p->k.kl_ctrl_horizon), out);
    TRYG(open_track(p, from.step), out);
    if (from.dir) TRYG(resume_from(p, &from), out);
    p->cursor = data_sampler_state(&p->sampler);
out:
    stage_end(p->stages);
    model_config_free(&m);
    buf_free(&text);
    resume_free(&from);
    return rc;
}

static void close_all(struct ppo *p) {
    track_close(p->track);
    roll_decoder_close(p->decoder);
    actor_destroy(p->ref_actor);
    actor_destroy(p->actor);
    model_close(p->reference);
    model_close(p->policy);
    if (p->block) dev_free(&p->dev, p->block, p->plan.block);
    reward_destroy(p->reward);
    data_sampler_free(&p->sampler);
    rl_dataset_close(p->val_data);
    rl_dataset_close(p->train_data);
    chat_template_destroy(p->chat);
    tokenizer_close(p->tok);
    stages_destroy(p->stages);
    dev_close(&p->dev);
    metrics_free(&p->metrics);
    json_decref(p->cursor);
    free(p->config_yaml);
    ppo_config_free(&p->k);
}

/* ---- the run ---- */

static int validate_and_log(struct ppo *p) {
    metrics_reset(&p->metrics);
    TRY(ppo_validate(p));
    stages_metrics(p->stages, &p->metrics);
    track_log(p->track, p->step, &p->metrics);
    return 0;
}

/* After a whole step: cursor, validation, checkpoint, record. A signal in the
 * validation ends it; the step itself is done and is saved. */
static int finish_step(struct ppo *p) {
    const bool last = p->step == p->total_steps;
    int best = 0;
    json_decref(p->cursor);
    p->cursor = data_sampler_state(&p->sampler);
    p->optim_done = actor_optim(p->actor)->step;
    if (p->val_data && p->k.test_freq > 0 && !stage_stop_signal() && (last || p->step % p->k.test_freq == 0)) {
        const int rc = ppo_validate(p);
        if (rc < 0 && rc != ERR_SIGNAL) return rc;
        if (rc == 0) TRY(best = early_stop_look(&p->early, &p->metrics, p->step));
    }
    const int stop = stage_stop_signal(); /* read once: it may come at any moment */
    if (stop || best > 0 || early_stop_done(&p->early) || (p->k.save_freq > 0 && (last || p->step % p->k.save_freq == 0))) TRY(save(p, p->step, p->k.keep_ckpts));
    stages_metrics(p->stages, &p->metrics);
    track_log(p->track, p->step, &p->metrics);
    if (stop) FAIL(ERR_SIGNAL, "stopped by %s", stage_signal_name(stop));
    return 0;
}

/* Adds to the error where the run can go on from, after saving the last whole step
 * where it is not on disk yet. Not saved: weights of a step that was half made,
 * and weights that give no finite log-prob. After a numerical stop nothing is
 * retired, since an older checkpoint may be the one to return to. */
static int end_early(struct ppo *p, int rc) {
    char *why = xstrdup(err_msg());
    const bool whole = actor_optim(p->actor)->step == p->optim_done,
               diverged = rc == ERR_NUMERIC && p->bad_steps < p->k.max_bad_steps;
    if (p->step > 0 && p->saved_step != p->step && whole && !diverged && rc != ERR_IO &&
        save(p, p->step, rc == ERR_NUMERIC ? 0 : p->k.keep_ckpts) < 0)
        log_warn("%s", err_msg());
    if (p->saved_step > 0)
        err_set(rc, __FILE__, __LINE__, "%s; the state of step %lld is in %s, and trainer.resume_mode=auto goes on from there",
                why, (long long)p->saved_step, p->k.default_local_dir);
    else err_set(rc, __FILE__, __LINE__, "%s; no step was done, so there is no state to save", why);
    free(why);
    return rc;
}

static int one_step(struct ppo *p) {
    p->step++;
    const int rc = ppo_step(p);
    if (rc == 0) return finish_step(p);
    p->step--; /* made again after a resume, from the cursor of the step before */
    return rc;
}

static int run(struct ppo *p) {
    if (p->val_data && (p->k.val_before_train || p->k.val_only)) TRY(validate_and_log(p));
    if (p->k.val_only) return 0;
    if (p->step >= p->total_steps)
        log_note("nothing to do: step %lld of %lld is already done; raise trainer.total_training_steps or total_epochs to go on",
                 (long long)p->step, (long long)p->total_steps);
    while (p->step < p->total_steps && !early_stop_done(&p->early)) {
        const int rc = one_step(p);
        if (rc < 0) return end_early(p, rc);
    }
    if (early_stop_done(&p->early))
        log_info("stopped early after step %lld: %s has not improved for %lld validations", (long long)p->step, p->early.metric,
                 (long long)p->early.waited);
    return 0;
}

int train_ppo(const struct conf *c) {
    struct ppo p = {.saved_step = -1};
    int rc = open_all(&p, c);
    if (rc == 0) rc = run(&p);
    if (rc == 0 && p.saved_step > 0)
        log_info("done: %lld steps; the model is in %s/global_step_%lld/actor", (long long)p.step, p.k.default_local_dir,
                 (long long)p.saved_step);
    if (rc == 0) early_stop_report(&p.early, p.k.default_local_dir, "actor");
    close_all(&p);
    return rc;
}

int train_plan_ppo(const struct conf *c, struct buf *out, bool *fits) {
    struct ppo p = {0};
    struct model_config m = {0};
    int rc = ppo_config_read(&p.k, c);
    const struct resume none = {.step = -1};
    if (rc == 0) rc = resume_open_device(&p.dev, &none, p.k.device, p.k.threads);
    if (rc == 0) rc = model_config_load(&m, p.k.model_dir);
    if (rc == 0) rc = ppo_plan_make(&p.plan, &p.k, &m, &p.dev);
    if (rc == 0) rc = ppo_plan_print(&p.plan, &p.k, &m, out);
    if (rc == 0) {
        *fits = ppo_plan_check(&p.plan, &p.k, &m) == 0;
        if (!*fits) rc = buf_addf(out, "  does not fit: %s\n", err_msg());
    }
    model_config_free(&m);
    dev_close(&p.dev);
    ppo_config_free(&p.k);
    return rc;
}
