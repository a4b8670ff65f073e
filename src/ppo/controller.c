/* controller.c - see controller.h. */
#include "ppo/controller.h"
#include "ppo/stages/agent_loop.h"

#include "external_engine/external_engine.h"
#include "run/directories.h"
#include "train/optimizer_keys.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"
#include "base/thread_pool.h"

#include <stdlib.h>
#include <string.h>

/* ---- callbacks of the run ---- */

/* Columns of a batch that are not a function of weights, data and seeds: a checkpoint has none of them. */
static const char *const timed[] = {"seconds", "scoring_seconds", "ended", "tool_seconds", "num_preempted", NULL};
enum { TIMED_F64 = 4 }; /* the first of them */

static void state(const void *ctx, json_t *trainer) {
    const struct controller *c = ctx;
    const struct batch *carry = c->carry ? c->carry : c->carried.n_cols > 0 ? &c->carried : NULL;
    if (carry) json_object_set_new(trainer, "carried", batch_json(carry, timed));
    if (c->async) json_object_set(trainer, "fully_async", c->async);
    json_object_set_new(trainer, "kl_ctrl", json_real(c->kl_ctrl.value));
    json_object_set_new(trainer, "grad_chunk", json_integer((json_int_t)c->k->actor.grad_chunk));
    json_object_set_new(trainer, "context_parallel", json_integer((json_int_t)c->k->actor.context));
    if (c->k->critic.enable) {
        json_object_set_new(trainer, "critic_grad_chunk", json_integer((json_int_t)c->k->critic.grad_chunk));
        json_object_set_new(trainer, "critic_context_parallel", json_integer((json_int_t)c->k->critic.context));
    }
    json_object_set_new(trainer, "seed", json_integer((json_int_t)c->k->trainer.seed));
}

static int restore(void *ctx, const json_t *trainer, const char *where) {
    struct controller *c = ctx;
    const json_t *carried = json_object_get(trainer, "carried");
    double kl_coef;
    TRY(json_f64(trainer, "kl_ctrl", &kl_coef, where));
    if (strcmp(c->k->algorithm.kl_ctrl_type, "adaptive") == 0) c->kl_ctrl.value = kl_coef; /* a fixed one is that of its key now */
    TRY(resume_compare(trainer, "grad_chunk", "actor_rollout_ref.actor.grad_chunk", c->k->actor.grad_chunk, where));
    TRY(resume_compare(trainer, "context_parallel", "actor_rollout_ref.actor.ulysses_sequence_parallel_size", c->k->actor.context,
                       where));
    if (c->k->critic.enable) {
        TRY(resume_compare(trainer, "critic_grad_chunk", "critic.grad_chunk", c->k->critic.grad_chunk, where));
        TRY(resume_compare(trainer, "critic_context_parallel", "critic.ulysses_sequence_parallel_size", c->k->critic.context,
                           where));
    }
    if (c->k->schedule == PPO_FULLY_ASYNC) c->async = json_incref(json_object_get(trainer, "fully_async"));
    if (!carried) return 0;
    TRY(batch_of_json(&c->carried, carried, where));
    for (int i = 0; timed[i]; i++) TRY(batch_add(&c->carried, timed[i], i < TIMED_F64 ? BATCH_F64 : BATCH_I64, NULL, NULL, NULL));
    return 0;
}

static void phase(void *ctx, const char *name) {
    dev_trace_phase(&((struct controller *)ctx)->worker.base.dev, name); /* on ranks each traces its own */
}

static const json_t *plan(const void *ctx) { return ((const struct controller *)ctx)->worker.plan_json; }

static json_t *special_tokens(const void *ctx) { return tokenizer_special_tokens(((const struct controller *)ctx)->tok); }

static int validate(void *ctx) {
    struct controller *c = ctx;
    return ppo_validate(&c->stage, &c->generation, c->val_data, c->k->output.log_val_generations, &c->validation_dir);
}

/* ---- opening ---- */

enum { TEXT_THREADS = 8 };

static int open_text(struct controller *c) {
    const struct ppo_config *const k = c->k;
    const int threads = k->trainer.run.threads > 0 ? (int)k->trainer.run.threads : pool_default_threads();
    TRY(pool_create(&c->threads, threads < TEXT_THREADS ? threads : TEXT_THREADS));
    TRY(tokenizer_open(&c->tok, k->model.tokenizer_dir));
    const struct agents_args agents = {.k = &k->agent,
                                       .rows = &k->data,
                                       .schedule = k->schedule,
                                       .partial_replay = k->async.partial && k->async.replay,
                                       .tok = c->tok,
                                       .model_dir = k->model.tokenizer_dir,
                                       .conf = c->k->conf};
    agents_create(&c->agents, &agents);
    return chat_template_create(&c->chat, c->tok);
}

static int open_dataset(struct controller *c, bool train, struct rl_dataset **out) {
    const struct ppo_config *k = c->k;
    const json_t *group;
    TRY(conf_json(k->conf, "data", &group));
    const struct rl_dataset_args a = {.files = train ? k->data.train_files : k->data.val_files,
                                      .n_files = train ? k->data.n_train_files : k->data.n_val_files,
                                      .cls = {k->data.cls.path, k->data.cls.name, k->model.tokenizer_dir, group},
                                      .prompt_key = k->data.prompt_key,
                                      .reward_fn_key = k->data.reward_fn_key,
                                      .own_scorer = k->reward.args.path || k->reward.own_manager || k->agent.command,
                                      .tok = c->tok,
                                      .chat = c->chat,
                                      .chat_kwargs = k->data.chat_kwargs,
                                      .max_prompt_length = k->data.max_prompt_length,
                                      .filter_overlong_prompts = k->data.filter_overlong_prompts,
                                      .truncation = k->data.truncation,
                                      .max_samples = train ? k->data.train_max_samples : k->data.val_max_samples,
                                      .shuffle = train && k->data.shuffle,
                                      .seed = k->data.seed,
                                      .what = train ? "data.train_files" : "data.val_files",
                                      .sampler = train ? &k->data.sampler : NULL,
                                      .tools = agents_row,
                                      .tools_arg = c->agents};
    return rl_dataset_open(out, &a);
}

/* Checks the metric of early stopping against the names that the validation data imply. */
static int check_stop_metric(const struct controller *c) {
    const struct rl_dataset *d = c->val_data;
    struct map seen = {0};
    const char **sources = xcalloc((size_t)d->n, sizeof *sources);
    for (int64_t i = 0; i < d->n; i++) {
        const char *s = json_string_value(json_object_get(d->prompts[i].row, d->reward_fn_key));
        if (map_get(&seen, s, strlen(s), NULL)) continue;
        sources[seen.n] = s;
        map_set(&seen, s, strlen(s), 1);
    }
    const int rc = early_stop_expect(&c->run.early, sources, seen.n, c->k->rollout.val.n);
    map_free(&seen);
    free(sources);
    return rc;
}

static int open_data(struct controller *c) {
    const struct ppo_config *k = c->k;
    int64_t steps = k->trainer.total_training_steps;
    TRY(open_text(c));
    TRY(open_dataset(c, true, &c->train_data));
    if (k->data.n_val_files > 0) TRY(open_dataset(c, false, &c->val_data));
    agents_check(c->agents);
    if (c->val_data) TRY(check_stop_metric(c));
    const struct data_sampler_args a = {.n_rows = c->train_data->n,
                                        .batch_size = k->schedule == PPO_FULLY_ASYNC ? 1 : k->data.train_batch_size,
                                        .order = k->data.sampler.order,
                                        .keys = c->train_data->keys,
                                        .drop_last = true,
                                        .seed = k->data.seed};
    if (k->schedule == PPO_FULLY_ASYNC)
        TRY(fully_async_steps(&k->async, &k->trainer, k->data.train_batch_size, c->train_data->n, &steps));
    TRY(run_open_sampler(&c->run, &a, k->trainer.total_epochs, steps));
    if (!k->trainer.run.early_warnings) return 0;
    train_optim_check_steps(k->actor.optim, c->run.total_steps, "actor_rollout_ref.actor.optim", run_warn_early, &c->run);
    if (k->critic.enable) train_optim_check_steps(k->critic.optim, c->run.total_steps, "critic.optim", run_warn_early, &c->run);
    return 0;
}

static void close_data(struct controller *c) {
    rl_dataset_close(c->val_data);
    rl_dataset_close(c->train_data);
    agents_destroy(c->agents);
    chat_template_destroy(c->chat);
    pool_destroy(c->threads);
    tokenizer_close(c->tok);
}

/* Whether native graders, where they score, can do so for every data source of the data. */
static int check_data_sources(const struct controller *c) {
    struct map seen = {0};
    const struct rl_dataset *const sets[] = {c->train_data, c->val_data};
    const char **sources = NULL;
    int64_t cap = 0, n = 0;
    if (c->k->rm.enable) return 0;
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; sets[k] && i < sets[k]->n; i++) {
            const char *source = json_string_value(json_object_get(sets[k]->prompts[i].row, sets[k]->reward_fn_key));
            if (!source || map_gets(&seen, source, NULL)) continue;
            map_set(&seen, source, strlen(source), 1);
            xgrow((void **)&sources, &cap, n + 1, sizeof *sources);
            sources[n++] = source;
        }
    int rc = reward_check_sources(c->reward, sources, n);
    if (rc == ERR_INPUT && c->k->agent.command) {
        log_note("an episode of agent.command that gives no reward has none: %s", err_msg());
        rc = 0;
    }
    free(sources);
    map_free(&seen);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int controller_try_data(const struct ppo_config *k, struct controller_rows *rows) {
    struct controller c = {.k = k};
    *rows = (struct controller_rows){0};
    int rc = open_text(&c);
    if (rc == 0) rc = open_dataset(&c, true, &c.train_data);
    if (rc == 0 && k->data.n_val_files > 0) rc = open_dataset(&c, false, &c.val_data);
    if (rc == 0 && !k->reward.args.path && !k->reward.own_manager) rc = reward_create(&c.reward, &k->reward.args);
    if (rc == 0 && c.reward) rc = check_data_sources(&c);
    if (c.train_data) rows->train = c.train_data->n;
    if (c.val_data) rows->val = c.val_data->n;
    reward_destroy(c.reward);
    close_data(&c);
    if (rc == 0 && k->reward.args.path && !file_exists(k->reward.args.path))
        FAIL(ERR_INPUT, "reward.custom_reward_function.path %s does not exist", k->reward.args.path);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static int open_run(struct controller *c, const struct conf *conf) {
    static const char *const headlines[][2] = {{"critic/rewards/mean", "reward"},
                                               {"actor/kl_loss", "kl"},
                                               {"perf/throughput", "tok/s"},
                                               {"critic/score/mean", "score"},
                                               {"actor/ppo_kl", "ppo_kl"},
                                               {"actor/entropy", "entropy"},
                                               {"actor/grad_norm", "grad_norm"},
                                               {"response_length/mean", "length"},
                                               {"response_length/clip_ratio", "clipped"},
                                               {NULL, NULL}};
    const struct run_program program = {.ctx = c,
                                        .state = state,
                                        .restore = restore,
                                        .validate = validate,
                                        .phase = phase,
                                        .plan = plan,
                                        .special_tokens = special_tokens,
                                        .headlines = headlines};
    TRY(run_open(&c->run, conf, &c->k->trainer.run, &program));
    c->run.warnings.samples = c->k->sizes.samples;
    c->run.warnings.n = c->k->rollout.train.n;
    return 0;
}

/* Reports what a resumed run changes: its keys, and the models that it reads from their directories at each start. */
static int report_changes(struct controller *c, const struct conf *conf) {
    const struct ppo_config *k = c->k;
    const struct resume_model models[] = {
        {"actor_rollout_ref.model.path", k->model.dir, true},
        {"critic.model.path", k->critic.enable ? k->critic.model_dir : NULL, k->critic.lora.on},
        {"distillation.teacher_models.teacher_model.model_path", k->distill.enable ? k->distill.teacher_dir : NULL, false},
        {"reward.reward_model.model_path", k->rm.enable ? k->rm.model_dir : NULL, false}};
    TRY(run_tell_changes(&c->run, conf, models, sizeof models / sizeof *models));
    TRY(resume_check_adapter(&c->run.from, "actor", "actor_rollout_ref.model", k->model.lora.on ? &k->model.lora.cfg : NULL));
    if (!k->critic.enable) return 0;
    return resume_check_adapter(&c->run.from, "critic", "critic.model", k->critic.lora.on ? &k->critic.lora.cfg : NULL);
}

/* The device, or with several ranks their processes; and what the run takes of it. */
static int plan_worker(struct controller *c) {
    c->worker.k = ppo_worker_config(c->k, &c->ranks);
    if (c->ranks.all.n > 1) return ppo_ranks_plan(&c->worker, &c->run);
    TRY(run_open_device(&c->run, &c->worker.base.dev));
    worker_open_local(&c->worker.base, NULL);
    return ppo_worker_plan(&c->worker);
}

static int open_worker(struct controller *c) {
    const int64_t val_rows = c->val_data ? c->val_data->n : 0;
    if (c->ranks.all.n > 1) return ppo_ranks_open(&c->worker, c->run.total_steps, val_rows);
    return ppo_worker_open(&c->worker, c->tok, c->run.total_steps, val_rows);
}

/* What the stages take, but the scorer, which open_scores has. */
static void set_stages(struct controller *c) {
    const struct ppo_config *k = c->k;
    c->stage = (struct stage){&c->worker.base, &c->run, &c->worker.scorer, k->trainer.seed, k->schedule};
    c->generation = (struct generation){.tok = c->tok,
                                        .data = c->train_data,
                                        .threads = c->threads,
                                        .agents = c->agents,
                                        .rollout = &k->rollout,
                                        .rows = &k->data,
                                        .algorithm = &k->algorithm,
                                        .scores = &k->reward,
                                        .rm = &k->rm,
                                        .critic_idle = c->ranks.pools.n[PPO_CRITIC] == 0};
}

static int open_scores(struct controller *c) {
    struct score_open_args a = {.g = &c->generation,
                                .judge_address = c->worker.judge_address,
                                .tokenizer = c->k->model.dir,
                                .experiment = c->k->trainer.run.experiment,
                                .deadline_s = c->k->trainer.run.deadline_s};
    if (c->k->reward.own_manager) TRY(conf_json(c->k->conf, "", &a.config));
    TRY(ppo_reward_open(&c->reward, &a));
    c->generation.reward = c->reward;
    return 0;
}

/* Below the run's own directory, or in that of the key under a name that no other run has: what is there is the run's alone. */
static char *engine_weights_dir(const struct ppo_config *k) {
    const char *const dir = k->trainer.run.default_local_dir, *const key = k->rollout.external.weights_dir;
    char *whole = realpath(dir, NULL), hex[33];
    hash_hex(whole ? whole : dir, strlen(whole ? whole : dir), hex);
    free(whole);
    return key ? xasprintf("%s/verlc-%.16s", key, hex) : file_join(dir, "engine_weights");
}

/* Servers that generate are asked before a model is read. */
static int open_external(struct controller *c) {
    const struct ppo_config *const k = c->k;
    const struct ppo_external_config *const e = &k->rollout.external;
    if (e->n_urls == 0) return 0;
    if (c->ranks.all.n > 1 && k->model.lora.on)
        FAIL(ERR_INVAL,
             "actor_rollout_ref.rollout.engine_url: an adapter is merged into the weights for the servers by one rank alone; "
             "this run has %lld: train without lora_rank, or on one",
             (long long)c->ranks.all.n);
    char *dir = engine_weights_dir(k);
    const struct external_engine_args a = {.urls = e->urls,
                                           .n_urls = e->n_urls,
                                           .kind = e->kind,
                                           .weights_dir = dir,
                                           .update_command = e->update_command,
                                           .model_dir = k->model.dir,
                                           .max_concurrent = e->max_concurrent,
                                           .n_retries = e->n_retries,
                                           .max_len = k->data.max_prompt_length + k->data.max_response_length,
                                           .timeout_s = e->timeout};
    const int rc = external_engine_open(&c->external, &a);
    free(dir);
    return rc < 0 ? err_wrap(rc, "actor_rollout_ref.rollout.engine_url") : 0;
}

/* What the run will read, before a model is fetched or a plan is made. */
static int check_files(const struct ppo_config *k) {
    if (k->data.cls.path && strncmp(k->data.cls.path, "pkg://", 6) != 0) /* what its files are only the class knows */
        TRY(run_check_files("data.custom_cls.path", &k->data.cls.path, 1));
    if (!k->data.cls.path) TRY(run_check_files("data.train_files", k->data.train_files, k->data.n_train_files));
    if (!k->data.cls.path) TRY(run_check_files("data.val_files", k->data.val_files, k->data.n_val_files));
    if (k->reward.args.path) TRY(run_check_files("reward.custom_reward_function.path", &k->reward.args.path, 1));
    return k->reward.manager_path ? run_check_files("reward.reward_manager.module.path", &k->reward.manager_path, 1) : 0;
}

int controller_open(struct controller *c, const struct conf *conf) {
    struct worker *const worker = &c->worker.base;
    TRY(ppo_config_read(&c->k, conf, PPO_RUN));
    const struct ppo_config *const k = c->k;
    const struct train_pool_devices pools = ppo_config_pool_devices(k);
    TRY(rank_count_decide(k->conf, &k->trainer, &pools, true, &c->ranks.all));
    ppo_config_pools(k, rank_count_launched(), &c->ranks);
    c->rollout_dir = k->output.rollout_data_dir;
    c->validation_dir = k->output.validation_data_dir;
    TRY(check_files(k));
    TRY(ppo_config_fetch(k));
    TRY(open_run(c, conf));
    TRY(report_changes(c, conf));
    TRY(open_external(c));
    if (k->output.rollout_data_dir) TRY(run_directory("trainer.rollout_data_dir", k->output.rollout_data_dir));
    if (k->output.validation_data_dir) TRY(run_directory("trainer.validation_data_dir", k->output.validation_data_dir));
    TRY(algo_user_check(k->algorithm.my_adv));
    TRY(algo_user_check(k->actor.my_loss));
    TRY(plan_worker(c));
    log_info("%s", c->worker.plan_text);
    c->run.k.async_save = c->worker.plan.copy > 0;
    TRY(open_data(c));
    set_stages(c);
    TRY(ppo_disk_check(&c->worker.k, &c->run, c->val_data ? c->val_data->n : 0));
    TRY(open_scores(c));
    TRY(check_data_sources(c));
    TRY(open_worker(c));
    if (c->external) external_engine_attach(c->external, worker, c->tok);
    TRY(algo_kl_ctrl_init(&c->kl_ctrl, k->algorithm.kl_ctrl_type, k->algorithm.kl_ctrl_coef, k->algorithm.kl_ctrl_target,
                          k->algorithm.kl_ctrl_horizon));
    struct checkpoints models;
    worker->ops->checkpoints(worker, &models);
    TRY(run_ready(&c->run, conf, &models));
    return worker->ops->ready(worker, &c->run);
}

void controller_close(struct controller *c, int rc) {
    run_close(&c->run, rc);
    if (rc == 0) agents_finish(c->agents);
    c->worker.ok = rc == 0 || rc == ERR_SIGNAL;
    ppo_worker_close(&c->worker);
    external_engine_close(c->external);
    reward_destroy(c->reward);
    close_data(c);
    batch_free(&c->carried);
    json_decref(c->async);
    if (!c->k || c->run.k.lock != c->k->trainer.run.lock) run_lock_release(c->run.k.lock);
    ppo_config_free(c->k);
}
