/* ppo.c - the controller: one step of PPO, GRPO and kin as the algorithm reads on
 * paper, in the calls of include/verlc.h as any program of them, and what a run needs
 * around it (opening, resuming, saving, stopping).  The calls are in verlc_api.c, the
 * stages in rollout.c, advantage.c, update_actor.c, update_critic.c, validation.c.
 *
 * Invariant: what the next step computes is a function of the policy, the
 * optimizer, the data cursor and the step number, all of which a checkpoint
 * holds; so a run that was killed and resumed ends in the same bits. */
#include "train/ppo/ppo_int.h"
#include "train/run/resume.h"
#include "train/run/optimizer_keys.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* ---- one step ---- */

static int ppo_step(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn) {
    struct verlc_batch *train = b;
    TRY(verlc_rollout(v, b));
    TRY(verlc_reward(v, b));
    TRY(verlc_log_probs(v, VERLC_ACTOR, b));
    if (verlc_has(v, VERLC_REF)) TRY(verlc_log_probs(v, VERLC_REF, b));
    if (verlc_has(v, VERLC_TEACHER)) TRY(verlc_log_probs(v, VERLC_TEACHER, b));
    if (verlc_has(v, VERLC_CRITIC)) TRY(verlc_values(v, b));
    TRY(verlc_advantage(v, b));
    if (v->p.k.use_pf_ppo) {
        TRY(verlc_resample(v, b, drawn));
        train = drawn;
    }
    if (verlc_has(v, VERLC_CRITIC)) TRY(verlc_update(v, VERLC_CRITIC, train));
    TRY(verlc_update(v, VERLC_ACTOR, train));
    return verlc_end_step(v, b);
}

int train_ppo(const struct conf *c) {
    struct verlc *v = ppo_run_open(c);
    struct verlc_batch *b = verlc_batch_create(), *drawn = verlc_batch_create();
    while (verlc_begin_step(v))
        if (ppo_step(v, b, drawn) < 0) break;
    verlc_batch_free(b);
    verlc_batch_free(drawn);
    return ppo_run_close(v);
}

/* ---- checkpoints ---- */

/* The models that a checkpoint holds. */
static int checkpoint_parts(struct ppo *p, struct ckpt_part parts[2]) {
    parts[0] = (struct ckpt_part){"actor", p->policy, actor_optim(p->actor), p->k.tokenizer_dir};
    if (!p->critic) return 1;
    parts[1] = (struct ckpt_part){"critic", p->value_model, critic_optim(p->critic), p->k.tokenizer_dir};
    return 2;
}

static int64_t optim_steps(struct ppo *p) { return actor_optim(p->actor)->step + (p->critic ? critic_optim(p->critic)->step : 0); }

int ppo_run_save(struct ppo *p, int64_t step, int64_t keep) {
    struct ckpt_part parts[2];
    const int n_parts = checkpoint_parts(p, parts);
    json_t *trainer = json_pack("{s:I, s:s, s:O, s:f, s:I, s:I, s:o}", "global_step", (json_int_t)step, "isa", p->dev.isa, "data",
                                p->cursor, "kl_ctrl", p->kl_ctrl.value, "seed", (json_int_t)p->k.seed, "bad_steps",
                                (json_int_t)p->bad_steps, "early_stopping", early_stop_state(&p->early));
    const struct ckpt_save_args a = {.root = p->k.default_local_dir,
                                     .step = step,
                                     .parts = parts,
                                     .n_parts = n_parts,
                                     .trainer = trainer,
                                     .config_yaml = p->config_yaml,
                                     .keep = keep,
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
    struct ckpt_part parts[2];
    const int n_parts = checkpoint_parts(p, parts);
    for (int i = 0; i < n_parts; i++) {
        char *dir = ckpt_part_dir(r->dir, parts[i].name);
        const bool there = file_is_dir(dir);
        free(dir);
        if (!there)
            FAIL(ERR_INPUT,
                 "%s has no %s: it is of a run without one; go on with the same algorithm.adv_estimator, or start anew "
                 "with trainer.resume_mode=disable or another trainer.default_local_dir",
                 r->dir, parts[i].name);
        TRY(ckpt_load_part(r->dir, &parts[i]));
    }
    p->optim_done = optim_steps(p);
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
    const struct rl_dataset_args a = {.files = train ? k->train_files : k->val_files,
                                      .n_files = train ? k->n_train_files : k->n_val_files,
                                      .prompt_key = k->prompt_key,
                                      .reward_fn_key = k->reward_fn_key,
                                      .tok = p->tok,
                                      .chat = p->chat,
                                      .chat_kwargs = k->chat_kwargs,
                                      .max_prompt_length = k->max_prompt_length,
                                      .filter_overlong_prompts = k->filter_overlong_prompts,
                                      .truncation = k->truncation,
                                      .max_samples = train ? k->train_max_samples : k->val_max_samples,
                                      .shuffle = train && k->shuffle,
                                      .seed = k->data_seed,
                                      .what = train ? "data.train_files" : "data.val_files",
                                      .sampler = train ? &k->sampler : NULL};
    return rl_dataset_open(out, &a);
}

static int open_data(struct ppo *p) {
    TRY(tokenizer_open(&p->tok, p->k.tokenizer_dir));
    TRY(chat_template_create(&p->chat, p->tok));
    TRY(open_dataset(p, true, &p->train_data));
    if (p->k.n_val_files > 0) TRY(open_dataset(p, false, &p->val_data));
    const struct data_sampler_args a = {.n_rows = p->train_data->n,
                                        .batch_size = p->k.train_batch_size,
                                        .order = p->k.sampler.order,
                                        .keys = p->train_data->keys,
                                        .drop_last = true,
                                        .seed = p->k.data_seed};
    const int rc = data_sampler_init(&p->sampler, &a);
    if (rc < 0) return err_wrap(rc, "data.train_batch_size");
    p->total_steps = data_sampler_batches(&p->sampler) * p->k.total_epochs;
    if (p->k.total_training_steps > 0) p->total_steps = p->k.total_training_steps;
    train_optim_steps(&p->k.optim, p->total_steps, p->k.warmup_ratio);
    train_optim_steps(&p->k.critic.optim, p->total_steps, p->k.critic.warmup_ratio);
    return 0;
}

static int open_critic(struct ppo *p) {
    const struct ppo_plan *l = &p->plan;
    const bool shares = p->k.critic.shares_base;
    const int flags = (p->k.critic.optim.host_master ? MODEL_HOST_MASTER : 0) | (shares ? MODEL_SHARED_BASE : 0);
    const struct model_open_args a = {
        .dir = p->k.critic.model_dir, .act = p->k.act, .flags = flags, .max_len = l->max_len, .base = shares ? p->policy : NULL};
    const int rc = train_open_critic(&p->value_model, &p->dev, &a, &p->k.critic.lora, p->k.seed);
    if (rc < 0) return err_wrap(rc, "critic.model");
    const struct critic_args c = {.dev = &p->dev,
                                  .model = p->value_model,
                                  .keep = l->critic_keep,
                                  .optim = &p->k.critic.optim,
                                  .max_rows = l->max_rows_critic,
                                  .max_seqs = l->max_seqs_critic,
                                  .block = p->block};
    return critic_create(&p->critic, &c);
}

static int open_reward_model(struct ppo *p) {
    struct reward_model_args a = p->plan.rm_args;
    a.dev = &p->dev;
    a.policy_tok = p->tok;
    const int rc = reward_model_create(&p->rm, &a);
    return rc < 0 ? err_wrap(rc, "reward.reward_model") : 0;
}

static int open_models(struct ppo *p) {
    const struct ppo_plan *l = &p->plan;
    struct model_open_args a = {.dir = p->k.model_dir, .act = p->k.act, .max_len = l->max_len};
    TRY(dev_reserve(&p->dev, &l->sizes));
    a.flags = p->k.optim.host_master ? MODEL_HOST_MASTER : 0;
    TRY(train_open_model(&p->policy, &p->dev, &a, &p->k.lora, p->k.seed));
    a.flags = p->k.ref_offload ? MODEL_HOST_WEIGHTS : MODEL_INFER;
    if (l->ref > 0) TRY(model_open(&p->reference, &p->dev, &a));
    TRY(dev_alloc(&p->dev, l->block, &p->block));
    TRY(dev_zero(&p->dev, p->block, l->block)); /* the memory is really there, now rather than in mid-run */
    const struct rollout_decoder_args r = {.model = p->policy,
                                           .n_kv_blocks = l->n_kv_blocks,
                                           .max_rows = l->max_rows_roll,
                                           .max_seqs = l->max_seqs,
                                           .max_len = l->max_len,
                                           .max_burst = rollout_device_burst(&p->dev),
                                           .block = p->block};
    TRY(rollout_decoder_open(&p->decoder, &r));
    const struct actor_args t = {.dev = &p->dev,
                                 .model = p->policy,
                                 .train = true,
                                 .keep = l->keep,
                                 .optim = &p->k.optim,
                                 .list = ppo_distill_k(&p->k),
                                 .max_rows = l->max_rows_update,
                                 .max_seqs = l->max_seqs_update,
                                 .block = p->block};
    TRY(actor_create(&p->actor, &t));
    if (l->critic > 0) TRY(open_critic(p));
    if (l->rm > 0) TRY(open_reward_model(p));
    if (l->teacher > 0) TRY(ppo_open_teacher(p));
    if (l->max_rows_ref == 0) return 0;
    /* with an adapter the reference is the policy without it: no second copy of the weights */
    const struct actor_args f = {.dev = &p->dev,
                                 .model = p->k.lora.on ? p->policy : p->reference,
                                 .no_adapter = true,
                                 .stream = p->k.ref_offload,
                                 .max_rows = l->max_rows_ref,
                                 .max_seqs = l->max_seqs_ref,
                                 .block = p->block};
    return actor_create(&p->ref_actor, &f);
}

static int open_track(struct ppo *p, int64_t resume_step) {
    const json_t *config;
    TRY(conf_json(p->k.conf, "", &config));
    const struct track_args a = {.loggers = p->k.loggers,
                                 .n_loggers = p->k.n_loggers,
                                 .project = p->k.project,
                                 .experiment = p->k.experiment,
                                 .run_dir = p->k.default_local_dir,
                                 .config = config,
                                 .total_steps = p->total_steps,
                                 .resume_step = resume_step,
                                 .title = p->k.adv_estimator};
    TRY(track_open(&p->track, &a));
    track_headline(p->track, "critic/rewards/mean", "reward");
    track_headline(p->track, "actor/kl_loss", "kl");
    track_headline(p->track, "perf/throughput", "tok/s");
    return 0;
}

/* The shapes of a run's models; json is NULL of those that it does not have. */
struct configs {
    struct model_config policy, critic, teacher;
};
static void configs_free(struct configs *c) {
    model_config_free(&c->policy);
    model_config_free(&c->critic);
    model_config_free(&c->teacher);
}
static struct ppo_others others_of(const struct configs *c) {
    return (struct ppo_others){.critic = c->critic.json ? &c->critic : NULL, .teacher = c->teacher.json ? &c->teacher : NULL};
}

static int load_critic_config(const struct ppo_config *k, struct configs *c) {
    const int rc = model_config_load(&c->critic, k->critic.model_dir);
    if (rc < 0) return err_wrap(rc, "critic.model.path");
    model_config_make_value(&c->critic);
    if (c->critic.vocab < c->policy.vocab)
        FAIL(ERR_INPUT,
             "critic.model.path: %s has a vocabulary of %lld and the policy one of %lld; the critic reads the policy's "
             "tokens, so it must have the same tokenizer",
             k->critic.model_dir, (long long)c->critic.vocab, (long long)c->policy.vocab);
    return 0;
}

static int load_teacher_config(const struct ppo_config *k, struct configs *c) {
    const int rc = model_config_load(&c->teacher, k->distill.teacher_dir);
    if (rc < 0) return err_wrap(rc, "distillation.teacher_models.teacher_model.model_path");
    const int64_t least = c->teacher.vocab < c->policy.vocab ? c->teacher.vocab : c->policy.vocab;
    if (ppo_distill_k(k) > least)
        FAIL(ERR_INVAL, "distillation.distillation_loss.topk=%lld: the vocabulary has %lld tokens", (long long)k->distill.topk,
             (long long)least);
    return 0;
}

static int load_configs(const struct ppo_config *k, struct configs *c) {
    TRY(model_config_load(&c->policy, k->model_dir));
    if (k->critic.enable) TRY(load_critic_config(k, c));
    return k->distill.enable ? load_teacher_config(k, c) : 0;
}

/* The run's stages are phases of a trace. */
static void phase(void *dev, const char *name) { dev_trace_phase(dev, name); }

static int open_all(struct ppo *p, const struct conf *c) {
    struct configs shapes = {0};
    const struct model_config *m = &shapes.policy;
    struct buf text = {0};
    struct resume from = {.step = -1};
    int rc = 0;
    TRY(ppo_config_read(&p->k, c));
    TRY(early_stop_read(&p->early, &p->k.early_stop, NULL, p->k.n_val_files > 0 && p->k.test_freq > 0));
    TRY(conf_yaml(c, &text));
    p->config_yaml = buf_take(&text);
    TRY(train_run_dir("trainer.default_local_dir", p->k.default_local_dir));
    if (p->k.rollout_data_dir) TRY(train_run_dir("trainer.rollout_data_dir", p->k.rollout_data_dir));
    if (p->k.validation_data_dir) TRY(train_run_dir("trainer.validation_data_dir", p->k.validation_data_dir));
    TRY(stages_create(&p->stages, p->k.deadline_s));
    stage_begin(p->stages, "start");
    TRYG(algo_user_check(p->k.my_adv), out);
    TRYG(algo_user_check(p->k.my_loss), out);
    TRYG(load_configs(&p->k, &shapes), out);
    const struct resume_args a = {.mode = p->k.resume_mode, .path = p->k.resume_from, .root = p->k.default_local_dir};
    TRYG(resume_find(&from, &a), out);
    TRYG(resume_open_device(&p->dev, &from, p->k.device, p->k.threads), out);
    ppo_plan_offload(&p->k, &p->dev);
    TRYG(ppo_plan_make(&p->plan, &p->k, m, others_of(&shapes), &p->dev), out);
    TRYG(ppo_plan_print(&p->plan, &p->k, m, &text), out);
    log_info("%s", text.p);
    TRYG(ppo_plan_check(&p->plan, &p->k, m, &p->dev), out);
    TRYG(open_data(p), out);
    if (!p->k.val_only) TRYG(resume_check_room(&from, p->k.default_local_dir, p->total_steps), out);
    TRYG(reward_create(&p->reward, &p->k.reward), out);
    TRYG(open_models(p), out);
    TRYG(algo_kl_ctrl_init(&p->kl_ctrl, p->k.kl_ctrl_type, p->k.kl_ctrl_coef, p->k.kl_ctrl_target, p->k.kl_ctrl_horizon), out);
    TRYG(open_track(p, from.step), out);
    if (from.dir) TRYG(resume_from(p, &from), out);
    p->cursor = data_sampler_state(&p->sampler);
    TRYG(dev_memory(&p->dev, &p->memory), out);
    stages_follow(p->stages, phase, &p->dev);
out:
    stage_end(p->stages);
    configs_free(&shapes);
    buf_free(&text);
    resume_free(&from);
    return rc;
}

static void close_all(struct ppo *p) {
    track_close(p->track);
    rollout_decoder_close(p->decoder);
    actor_destroy(p->ref_actor);
    actor_destroy(p->teacher_actor);
    actor_destroy(p->actor);
    critic_destroy(p->critic);
    reward_model_destroy(p->rm);
    model_close(p->value_model);
    model_close(p->reference);
    model_close(p->teacher);
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

/* ---- around the steps ---- */

int ppo_run_validate(struct ppo *p) {
    metrics_reset(&p->metrics);
    TRY(ppo_validate(p));
    stages_metrics(p->stages, &p->metrics);
    track_log(p->track, p->step, &p->metrics);
    return 0;
}

/* A signal in the validation ends it; the step itself is done and is saved. */
int ppo_run_finish(struct ppo *p) {
    const bool last = p->step == p->total_steps;
    int best = 0;
    json_decref(p->cursor);
    p->cursor = data_sampler_state(&p->sampler);
    p->optim_done = optim_steps(p);
    if (p->val_data && p->k.test_freq > 0 && !stage_stop_signal() && (last || p->step % p->k.test_freq == 0)) {
        const int rc = ppo_validate(p);
        if (rc < 0 && rc != ERR_SIGNAL) return rc;
        if (rc == 0) TRY(best = early_stop_look(&p->early, &p->metrics, p->step));
    }
    const int stop = stage_stop_signal(); /* read once: it may come at any moment */
    const bool due = p->k.save_freq > 0 && (last || p->step % p->k.save_freq == 0);
    if (stop || best > 0 || due || early_stop_done(&p->early)) TRY(ppo_run_save(p, p->step, p->k.keep_ckpts));
    stages_metrics(p->stages, &p->metrics);
    track_log(p->track, p->step, &p->metrics);
    if (stop) FAIL(ERR_SIGNAL, "stopped by %s", stage_signal_name(stop));
    return 0;
}

/* Not saved: weights of a step that was half made,
 * and weights that give no finite log-prob; nothing of a device that failed. After a numerical stop nothing is
 * retired, since an older checkpoint may be the one to return to. */
int ppo_run_end_early(struct ppo *p, int rc) {
    char *why = xstrdup(err_msg());
    const bool whole = optim_steps(p) == p->optim_done, diverged = rc == ERR_NUMERIC && p->bad_steps < p->k.max_bad_steps;
    if (p->step > 0 && p->saved_step != p->step && whole && !diverged && rc != ERR_IO && rc != ERR_DEVICE &&
        ppo_run_save(p, p->step, rc == ERR_NUMERIC ? 0 : p->k.keep_ckpts) < 0)
        log_warn("%s", err_msg());
    if (p->saved_step > 0)
        err_set(rc, __FILE__, __LINE__, "%s; the state of step %lld is in %s, and trainer.resume_mode=auto goes on from there", why,
                (long long)p->saved_step, p->k.default_local_dir);
    else err_set(rc, __FILE__, __LINE__, "%s; no step was done, so there is no state to save", why);
    free(why);
    return rc;
}

/* ---- the run ---- */

struct verlc *ppo_run_open(const struct conf *c) {
    struct verlc *v = xcalloc(1, sizeof *v);
    v->p.saved_step = -1;
    v->rc = open_all(&v->p, c);
    if (v->rc < 0) v->error = xstrdup(err_msg());
    return v;
}

int ppo_run_close(struct verlc *v) {
    struct ppo *p = &v->p;
    const int rc = v->rc;
    if (rc == 0) early_stop_say(&p->early, p->step);
    if (rc == 0 && p->saved_step > 0)
        log_info("done: %lld steps; the model is in %s/global_step_%lld/actor", (long long)p->step, p->k.default_local_dir,
                 (long long)p->saved_step);
    if (rc == 0 && !v->answered) early_stop_report(&p->early, p->k.default_local_dir, "actor");
    close_all(p);
    if (rc < 0) err_set(rc, __FILE__, __LINE__, "%s", v->error);
    free(v->error);
    free(v);
    return rc;
}

int train_plan_ppo(const struct conf *c, int64_t gpu, struct buf *out, bool *fits) {
    struct ppo p = {0};
    struct configs shapes = {0};
    const struct model_config *m = &shapes.policy;
    int rc = ppo_config_read(&p.k, c);
    const struct resume none = {.step = -1};
    if (gpu > 0) dev_open_cuda_planned(&p.dev, (size_t)gpu);
    else if (rc == 0) rc = resume_open_device(&p.dev, &none, p.k.device, p.k.threads);
    if (rc == 0) ppo_plan_offload(&p.k, &p.dev);
    if (rc == 0) rc = load_configs(&p.k, &shapes);
    if (rc == 0) rc = ppo_plan_make(&p.plan, &p.k, m, others_of(&shapes), &p.dev);
    if (rc == 0) rc = ppo_plan_print(&p.plan, &p.k, m, out);
    if (rc == 0) {
        *fits = ppo_plan_check(&p.plan, &p.k, m, &p.dev) == 0;
        if (!*fits) rc = buf_addf(out, "  does not fit: %s\n", err_msg());
    }
    configs_free(&shapes);
    dev_close(&p.dev);
    ppo_config_free(&p.k);
    return rc;
}
