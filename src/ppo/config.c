/* config.c - the keys of a ppo run in struct ppo_config: filled by the rows of the tables, then derived where a member is
 * more than a key's value (a loss's table entry, the cut of a batch, a directory).
 * Every later stage reads that struct; no other file of ppo names a key. Rules between keys are validate_config.c's, but for
 * those that need what is derived here. Rewards are config_reward.c's. */
#include "ppo/config_int.h"
#include "run/directories.h"

#include "base/buf.h"
#include "train/router_replay.h"

#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/size.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONF_STRUCT struct ppo_config
#include "conf/bind.h"

static const struct conf_binding bindings[] = {
#include "conf/keys/ppo.def"
#include "conf/keys/megatron.def"
#include "conf/keys/veomni.def"
#include "conf/keys/async.def"
};

#define ARR "actor_rollout_ref."

/* Which of verl's trainers this is, by the configuration's name; fully asynchronous: the prompts of a step. */
static int derive_schedule(struct ppo_config *k) {
    const char *schema = conf_schema(k->conf);
    k->schedule = strncmp(schema, "one_step_off_", 13) == 0  ? PPO_ONE_STEP_OFF
                  : strncmp(schema, "fully_async_", 12) == 0 ? PPO_FULLY_ASYNC
                                                             : PPO_SYNC;
    if (k->schedule != PPO_FULLY_ASYNC) return 0;
    struct ppo_async_config *a = &k->async;
    const int64_t most = (int64_t)1 << 24;
    a->required = k->actor.mini_batch_size * k->raw.require_batches;
    if (a->required > most || a->required * a->updates > most || (double)(a->required * a->updates) * (1 + a->staleness) > 0x1p24)
        FAIL(ERR_INVAL,
             "a step of " ARR
             "actor.ppo_mini_batch_size=%lld x async_training.require_batches=%lld x trigger_parameter_sync_step=%lld "
             "prompts, and staleness_threshold=%g times as many begun: more than %lld",
             (long long)k->actor.mini_batch_size, (long long)k->raw.require_batches, (long long)a->updates, a->staleness,
             (long long)most);
    k->data.train_batch_size = a->required * a->updates;
    a->most_open = (int64_t)((double)k->data.train_batch_size * (1 + a->staleness));
    if (k->raw.prox) k->raw.bypass_mode = false;
    a->recompute_log_probs = !k->raw.bypass_mode;
    if (k->algorithm.filter.enable)
        FAIL(ERR_INVAL, "algorithm.filter_groups.enable=True: prompts are not replaced in fully asynchronous training; take "
                        "--config-name=one_step_off_ppo_trainer, or ppo_trainer");
    return 0;
}

static void derive_data(struct ppo_config *k) {
    const bool own = !conf_is_null(k->conf, "data.seed");
    k->trainer.seed = (uint64_t)k->raw.seed;
    k->data.seed = own ? (uint64_t)k->raw.data_seed : k->trainer.seed;
    k->data.chat_kwargs = json_deep_copy(k->raw.chat_kwargs);
    if (k->raw.chat_template) json_object_set_new(k->data.chat_kwargs, "chat_template", json_string(k->raw.chat_template));
    if (conf_is_null(k->conf, "data.sampler.name")) k->data.sampler.order = k->data.shuffle ? DATA_SHUFFLE : DATA_SEQUENTIAL;
    k->data.sampler.source_key = k->data.reward_fn_key;
    if (k->algorithm.filter.gen_batch_size == 0) k->algorithm.filter.gen_batch_size = k->data.train_batch_size;
    else if (!k->algorithm.filter.enable)
        log_note(
            "data.gen_batch_size=%lld has no effect without algorithm.filter_groups.enable=True: data.train_batch_size prompts "
            "are generated in each step",
            (long long)k->algorithm.filter.gen_batch_size);
}

int ppo_config__model_dir(const char *key, const char *path, char **out) {
    const int rc = run_model_dir(path, false, out);
    return rc < 0 ? err_wrap(rc, "%s", key) : 0;
}

static enum train_recompute recompute(const struct ppo_config *k, bool checkpointing) {
    if (!conf_is_null(k->conf, "trainer.recompute")) return k->model.recompute;
    return checkpointing ? RECOMPUTE_AUTO : RECOMPUTE_NONE;
}

static int derive_model(struct ppo_config *k) {
    TRY(ppo_config__model_dir(ARR "model.path", k->raw.model_path, &k->model.dir));
    TRY(train_make_lora(&k->model.lora, ARR "model", &k->raw.lora, k->raw.model_path));
    train_router_given(&k->model.router, k->conf, ARR "model", ARR "actor.megatron");
    TRY(train_make_mtp(&k->model.mtp, ARR "model", k->conf, k->model.lora.on));
    if (!k->model.tokenizer_dir) k->model.tokenizer_dir = k->model.dir;
    if (k->raw.rollout_dtype != k->model.act) {
        const bool by_rollout = conf_is_set(k->conf, ARR "rollout.dtype") && !conf_is_set(k->conf, ARR "actor.fsdp_config.dtype");
        if (by_rollout) k->model.act = k->raw.rollout_dtype;
        log_note("rollout.dtype and actor.fsdp_config.dtype differ; generation and training share one set of weights, in %s",
                 dtype_name(k->model.act));
    }
    k->critic.recompute = recompute(k, k->raw.critic_checkpointing); /* first: both look at trainer.recompute */
    k->model.recompute = recompute(k, k->raw.checkpointing);
    return 0;
}

/* micro, dynamic: the keys, for the message. */
static int derive_cut(const struct ppo_config *k, const struct micro_batch_keys *w, const char *micro, const char *dynamic,
                      struct micro_batch_limits *cut) {
    const char *per_gpu = strstr(micro, "_per_gpu");
    *cut = w->dynamic ? (struct micro_batch_limits){.max_rows = w->tokens}
                      : (struct micro_batch_limits){.max_seqs = w->each ? w->each : w->all};
    if (cut->max_seqs < 1 && cut->max_rows < 1)
        FAIL(ERR_INVAL, "%s is not set; set it to the number of samples in a micro-batch, or %s=True", micro, dynamic);
    if (!w->dynamic && !w->each && rank_count_devices(k->conf, &k->trainer.devices) > 1)
        log_note("%.*s=%lld: each rank's micro-batches have so many samples, whatever the number of ranks, on which no result "
                 "depends; %s says the same",
                 (int)(per_gpu - micro), micro, (long long)w->all, micro);
    return 0;
}

static int derive_rollout(struct ppo_config *k) {
    struct ppo_sampling *t = &k->rollout.train, *v = &k->rollout.val;
    if (!conf_is_set(k->conf, ARR "rollout.tensor_model_parallel_size")) k->rollout.tensor_parallel = 0; /* verl's default is 2 */
    if (t->n == 1 && !k->algorithm.my_adv && (k->algorithm.adv->needs & ALGO_NEEDS_GROUP))
        log_warn(ARR "rollout.n=1: algorithm.adv_estimator=%s compares the samples of one prompt, and here each is alone: its "
                     "advantage is its score without a baseline, or 0; set " ARR "rollout.n to 2 or more",
                 k->algorithm.adv_estimator);
    if (t->temperature <= 0)
        FAIL(ERR_INVAL,
             ARR "rollout.temperature=%g: training samples need a temperature above 0 (greedy is for validation: "
                 "rollout.val_kwargs.temperature)",
             t->temperature);
    v->ignore_eos = t->ignore_eos;
    v->repetition_penalty = t->repetition_penalty;
    TRY(derive_cut(k, &k->raw.logp_cut, ARR "rollout.log_prob_micro_batch_size_per_gpu", ARR "rollout.log_prob_use_dynamic_bsz",
                   &k->rollout.logp_cut));
    if (!k->actor.use_kl_loss && !k->algorithm.use_kl_in_reward) return 0;
    return derive_cut(k, &k->raw.ref_cut, ARR "ref.log_prob_micro_batch_size_per_gpu", ARR "ref.log_prob_use_dynamic_bsz",
                      &k->ref.cut);
}

int ppo_agent_config_derive(struct ppo_agent_config *a) {
#define MULTI_TURN ARR "rollout.multi_turn."
    static const char *const loops[] = {"single_turn_agent", "tool_agent", "program_agent"};
    bool known = a->loop_config_path != NULL;
    for (size_t i = 0; i < sizeof loops / sizeof *loops; i++) known |= strcmp(a->default_loop, loops[i]) == 0;
    if (!known)
        FAIL(ERR_INVAL,
             ARR
             "rollout.agent.default_agent_loop=%s: the agent loops there are: single_turn_agent, tool_agent, program_agent, and "
             "the classes of " ARR "rollout.agent.agent_loop_config_path",
             a->default_loop);
    if (a->command && strcmp(a->default_loop, "single_turn_agent") == 0) a->default_loop = "program_agent";
    const bool qwen = strcmp(a->format, "qwen") == 0;
    if (qwen) log_note(MULTI_TURN "format=qwen is hermes by its name in SGLang, which verl's search example had");
    a->parser = tool_parser_find(qwen ? "hermes" : a->format);
    if (!a->parser) FAIL(ERR_INVAL, MULTI_TURN "format=%s: expected one of %s", a->format, tool_parser_names());
    if (strcmp(a->truncate_side, "left") == 0 || strcmp(a->truncate_side, "right") == 0)
        log_note(MULTI_TURN "tool_response_truncate_side=%s leaves out the %s of a longer text, as verl from 0.8 on; until 0.7.1 "
                            "left and right were exchanged there",
                 a->truncate_side, a->truncate_side[0] == 'l' ? "beginning" : "end");
    return 0;
#undef MULTI_TURN
}

/* gdpo's rewards: keys of the scorer's dict, and their weights. */
static int derive_gdpo(struct ppo_config *k) {
    const json_t *w = k->raw.gdpo_weights;
    if (strcmp(k->algorithm.adv_estimator, "gdpo") != 0) {
        if (k->algorithm.n_gdpo > 0 || w)
            log_note("algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights: no effect with algorithm.adv_estimator=%s",
                     k->algorithm.adv_estimator);
        k->algorithm.n_gdpo = 0;
        return 0;
    }
    if (k->algorithm.n_gdpo == 0)
        FAIL(ERR_INVAL, "algorithm.adv_estimator=gdpo needs the rewards it normalises one by one: "
                        "+algorithm.gdpo_reward_keys=[KEY,...], keys of the dict that the scorer returns");
    if (!w) return 0;
    if ((int64_t)json_array_size(w) != k->algorithm.n_gdpo)
        FAIL(ERR_INVAL, "algorithm.gdpo_reward_weights has %zu numbers for %lld algorithm.gdpo_reward_keys", json_array_size(w),
             (long long)k->algorithm.n_gdpo);
    k->algorithm.gdpo_weights = xcalloc((size_t)k->algorithm.n_gdpo, sizeof *k->algorithm.gdpo_weights);
    for (int64_t i = 0; i < k->algorithm.n_gdpo; i++)
        k->algorithm.gdpo_weights[i] = json_number_value(json_array_get(w, (size_t)i));
    return 0;
}

/* Servers' log-probs are not training's: training's are computed, and the difference is corrected for. */
static int derive_external(struct ppo_config *k) {
#define EXTERNAL ARR "rollout.engine_url: "
    const struct ppo_external_config *e = &k->rollout.external;
    const struct ppo_sampling *t = &k->rollout.train;
    if (e->n_urls == 0) {
        static const char *const keys[] = {"kind", "max_concurrent", "timeout", "retries", "weights_dir", "update_command"};
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
            char key[80];
            snprintf(key, sizeof key, ARR "rollout.engine_%s", keys[i]);
            if (conf_is_set(k->conf, key)) log_warn("%s has no effect without " ARR "rollout.engine_url", key);
        }
        return 0;
    }
    if (e->kind && strcmp(e->kind, "vllm") != 0 && strcmp(e->kind, "sglang") != 0 && strcmp(e->kind, "trtllm") != 0)
        FAIL(ERR_INVAL, ARR "rollout.engine_kind=%s: expected vllm, sglang or trtllm", e->kind);
    if (k->schedule != PPO_SYNC)
        FAIL(ERR_INVAL, EXTERNAL "generation that overlaps with updates needs verlc's own engine; take --config-name=ppo_trainer");
    if (k->raw.rollout_pool.nnodes > 0 || k->raw.rollout_pool.ranks > 0)
        FAIL(ERR_INVAL, EXTERNAL "ranks that only generate (rollout.nnodes) would have nothing to do; leave them out");
    if (t->top_p < 1 || t->top_k > 0 || t->min_p > 0 || t->repetition_penalty != 1)
        log_warn(EXTERNAL
                 "with top_p, top_k, min_p or repetition_penalty a server's log-probs may be those after truncation, which "
                 "training/rollout_probs_diff_* and the importance weights then have in them");
    if (!conf_is_set(k->conf, "algorithm.rollout_correction.rollout_is") && !k->raw.bypass_mode) k->raw.corr.rollout_is = "token";
    k->algorithm.force_old_log_prob = !k->raw.bypass_mode;
    return 0;
#undef EXTERNAL
}

/* algorithm.rollout_correction: between the old and the rollout's log-probs (decoupled), or inside the
 * loss between the current and the rollout's (bypass). Takes loss_mode's place: comes after derive_actor. */
static int derive_correction(struct ppo_config *k) {
    const int rc = algo_corr_parse(&k->algorithm.corr, &k->raw.corr);
    if (rc < 0) return err_wrap(rc, "algorithm.rollout_correction");
    const struct algo_policy_entry *mode = algo_policy_find("bypass_mode");
    if (k->raw.bypass_mode && k->actor.my_loss)
        FAIL(ERR_INVAL, "algorithm.rollout_correction.bypass_mode has a loss of its own, so the one of " ARR
                        "actor.policy_loss.loss_mode would not be used; take one of them");
    if (k->raw.bypass_mode) k->actor.loss_mode = mode;
    if (k->actor.loss_mode == mode) {
        k->actor.policy.corr = &k->algorithm.corr;
        k->algorithm.bypass = true;
        if (k->algorithm.force_old_log_prob)
            log_note("trainer.force_old_log_prob has no effect: bypass_mode takes the rollout's log-probs as old ones");
        k->algorithm.force_old_log_prob = false;
    } else {
        k->algorithm.correct = k->algorithm.corr.is != ALGO_IS_NONE || k->algorithm.corr.n_rs > 0 ||
                               k->raw.calculate_log_probs; /* at least measured */
    }
    const struct ppo_sampling *t = &k->rollout.train;
    const bool changed = t->top_p < 1 || t->top_k > 0 || t->min_p > 0 || t->repetition_penalty != 1;
    k->algorithm.sampling_log_probs = changed && t->temperature > 0 && (k->algorithm.correct || k->algorithm.bypass);
    return 0;
}

/* DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). */
static int derive_filter(struct ppo_config *k) {
    struct ppo_filter_config *f = &k->algorithm.filter;
    if (!f->enable) return 0;
    if (strcmp(f->metric, "seq_final_reward") == 0)
        FAIL(ERR_INVAL, "algorithm.filter_groups.metric=seq_final_reward: groups are judged while others are still generated, "
                        "before any KL penalty is known; use reward");
    if (strcmp(f->metric, "score") == 0 || strcmp(f->metric, "seq_reward") == 0) f->metric = "reward";
    if (f->max_gen_batches > 0 && f->max_gen_batches * f->gen_batch_size < k->data.train_batch_size)
        FAIL(ERR_INVAL,
             "algorithm.filter_groups.max_num_gen_batches=%lld of data.gen_batch_size=%lld prompts are fewer than "
             "data.train_batch_size=%lld",
             (long long)f->max_gen_batches, (long long)f->gen_batch_size, (long long)k->data.train_batch_size);
    if (k->rollout.train.n < 2)
        log_warn("algorithm.filter_groups with rollout.n=1: one sample is never alike, so nothing is filtered");
    return 0;
}

/* A user-defined estimator or loss: a has its key, spec, loss and kwargs. A spec that is a name of the tables: *out stays. */
static int open_user_function(struct ppo_config *k, struct algo_user_args a, const char *kwargs_key, struct algo_user **out) {
    if (!algo_user_named(a.spec)) {
        if (a.kwargs)
            FAIL(ERR_INVAL, "%s: %s=%s takes no parameters; a user-defined function (FILE:NAME) does", kwargs_key, a.key, a.spec);
        return 0;
    }
    if (k->use == PPO_RUN) TRY(run_config_lock(&k->trainer.run));
    char *dir = k->use != PPO_PLAN ? file_join(k->trainer.run.default_local_dir, "custom") : NULL;
    a.dir = dir;
    a.timeout_s = k->raw.custom_timeout;
    const int rc = algo_user_open(out, &a);
    free(dir);
    return rc;
}

static int find_kl(const char *key, const char *name, struct algo_kl_type *out) {
    const int rc = algo_kl_find(out, name);
    return rc < 0 ? err_wrap(rc, "%s", key) : 0;
}

static int derive_algorithm(struct ppo_config *k) {
    const struct algo_user_args own = {
        .key = "algorithm.adv_estimator", .spec = k->algorithm.adv_estimator, .kwargs = k->algorithm.adv_kwargs};
    TRY(open_user_function(k, own, "algorithm.adv_kwargs", &k->algorithm.my_adv));
    k->algorithm.adv = k->algorithm.my_adv ? algo_user_adv(k->algorithm.my_adv) : algo_adv_find(k->algorithm.adv_estimator);
    if (!k->algorithm.adv)
        FAIL(ERR_INVAL, "algorithm.adv_estimator: %s; or a function of your own, FILE.c:NAME or FILE.py:NAME", err_msg());
    TRY(find_kl("algorithm.kl_penalty", k->raw.kl_penalty, &k->algorithm.kl_penalty));
    TRY(derive_gdpo(k));
    if (!k->algorithm.use_pf_ppo) return 0;
    if (!(k->algorithm.adv->needs & ALGO_NEEDS_VALUES))
        FAIL(ERR_INVAL, "algorithm.use_pf_ppo=True is for adv_estimator=gae (verl ignores it elsewhere); the estimator is %s",
             k->algorithm.adv_estimator);
    const int rc = algo_pf_ppo_parse(&k->algorithm.pf_ppo, k->raw.pf_method, k->raw.pf_weight_pow);
    return rc < 0 ? err_wrap(rc, "algorithm") : 0;
}

static int find_agg(const char *key, const char *name, const struct algo_agg_mode **out) {
    *out = algo_agg_find(name);
    return *out ? 0 : err_wrap(ERR_INVAL, "%s", key);
}

/* actor.grad_clip where it is set, else the newer name, which may be null too. */
static double largest_norm(const struct conf *c, const char *key, double old, double now) {
    return conf_is_set(c, key) || now == 0 ? old : now;
}

static int derive_actor(struct ppo_config *k) {
    const struct algo_policy_cfg *p = &k->actor.policy;
    const struct algo_user_args own = {
        .key = ARR "actor.policy_loss.loss_mode", .spec = k->raw.loss_mode, .loss = true, .kwargs = p->kwargs};
    TRY(open_user_function(k, own, ARR "actor.policy_loss.kwargs", &k->actor.my_loss));
    k->actor.loss_mode = k->actor.my_loss ? algo_user_policy(k->actor.my_loss) : algo_policy_find(k->raw.loss_mode);
    if (!k->actor.loss_mode)
        FAIL(ERR_INVAL, ARR "actor.policy_loss.loss_mode: %s; or a function of your own, FILE.c:NAME or FILE.py:NAME", err_msg());
    k->actor.policy.seed = k->trainer.seed;
    if (conf_is_set(k->conf, ARR "actor.clip_ratio") &&
        (p->clip_ratio_low != k->raw.clip_ratio || p->clip_ratio_high != k->raw.clip_ratio))
        log_note("actor.clip_ratio=%g has no effect: clip_ratio_low=%g and clip_ratio_high=%g are used, as in verl",
                 k->raw.clip_ratio, p->clip_ratio_low, p->clip_ratio_high);
    TRY(find_agg(ARR "actor.loss_agg_mode", k->raw.agg_mode, &k->actor.agg_mode));
    TRY(find_kl(ARR "actor.kl_loss_type", k->raw.kl_loss_type, &k->actor.kl_loss_type));
    k->actor.seed = conf_is_null(k->conf, ARR "actor.data_loader_seed") ? k->trainer.seed : (uint64_t)k->raw.mini_seed;
    TRY(derive_cut(k, &k->raw.update_cut, ARR "actor.ppo_micro_batch_size_per_gpu", ARR "actor.use_dynamic_bsz",
                   &k->actor.update_cut));
    TRY(train_make_optim(&k->actor.optim, ARR "actor.optim", &k->raw.optim, &k->raw.engine));
    k->actor.context = k->raw.engine.context > 1 ? k->raw.engine.context : 1;
    k->actor.expert_parallel = k->raw.engine.experts;
    k->actor.optim.clip = largest_norm(k->conf, ARR "actor.grad_clip", k->raw.grad_clip, k->raw.optim.clip_grad);
    k->ref.offload &=
        !k->model.lora.on && (k->actor.use_kl_loss || k->algorithm.use_kl_in_reward); /* else there are no reference weights */
    return 0;
}

static int derive_critic_updates(struct ppo_config *k) {
    struct ppo_critic_config *v = &k->critic;
    struct micro_batch_keys values = k->raw.values_cut;
    values.dynamic = k->raw.critic_cut.dynamic;
    TRY(derive_cut(k, &k->raw.critic_cut, "critic.ppo_micro_batch_size_per_gpu", "critic.use_dynamic_bsz", &v->update_cut));
    TRY(derive_cut(k, &values, "critic.forward_micro_batch_size_per_gpu", "critic.use_dynamic_bsz", &v->values_cut));
    TRY(find_agg("critic.loss_agg_mode", k->raw.critic_agg_mode, &v->agg_mode));
    v->seed = conf_is_null(k->conf, "critic.data_loader_seed") ? k->trainer.seed : (uint64_t)k->raw.critic_seed;
    TRY(train_make_optim(&v->optim, "critic.optim", &k->raw.critic_optim, &k->raw.critic_engine));
    v->context = k->raw.critic_engine.context > 1 ? k->raw.critic_engine.context : 1;
    v->optim.clip = largest_norm(k->conf, "critic.grad_clip", k->raw.critic_grad_clip, k->raw.critic_optim.clip_grad);
    return 0;
}

/* Notes the keys of a critic where the run has none. */
static int note_no_critic(const struct ppo_config *k) {
    int64_t n;
    const char *key = conf_first_set(k->conf, "critic.", "critic.enable", &n);
    char others[32] = "";
    if (n > 1) snprintf(others, sizeof others, " and %lld more", (long long)n - 1);
    if (key)
        log_note("%s%s: no effect, as algorithm.adv_estimator=%s has no critic; gae has one, and critic.enable=True trains one "
                 "with any estimator",
                 key, others, k->algorithm.adv_estimator);
    return 0;
}

static bool same_dir(const char *a, const char *b) {
    char *x = realpath(a, NULL), *y = realpath(b, NULL);
    const bool same = x && y && strcmp(x, y) == 0;
    free(x);
    free(y);
    return same;
}

/* Whether there is a critic is verl's need_critic: critic.enable, or by default the estimator. */
static int derive_critic(struct ppo_config *k) {
    struct ppo_critic_config *v = &k->critic;
    const bool needed = (k->algorithm.adv->needs & ALGO_NEEDS_VALUES) != 0;
    if (conf_is_null(k->conf, "critic.enable")) v->enable = needed;
    if (needed && !v->enable)
        FAIL(ERR_INVAL, "critic.enable=False: algorithm.adv_estimator=%s computes advantages from a critic's values",
             k->algorithm.adv_estimator);
    if (!v->enable && v->actor_from > 1)
        FAIL(ERR_INVAL, "trainer.critic_warmup=%lld trains a critic alone for that long, and algorithm.adv_estimator=%s has none",
             (long long)v->actor_from, k->algorithm.adv_estimator);
    if (!v->enable) return note_no_critic(k);
    if (!needed)
        log_note("critic.enable=True: the critic is trained, and algorithm.adv_estimator=%s does not read its values",
                 k->algorithm.adv_estimator);
    if (!conf_is_set(k->conf, "critic.model.path") || !k->raw.critic_path)
        FAIL(ERR_INVAL,
             "critic.model.path is not set: a critic (algorithm.adv_estimator=%s) starts from a model; the policy's "
             "own, critic.model.path=%s, is the usual one",
             k->algorithm.adv_estimator, k->model.tokenizer_dir);
    TRY(ppo_config__model_dir("critic.model.path", k->raw.critic_path, &v->model_dir));
    if (k->algorithm.my_adv) TRY(ppo_validate_critic_config(k));
    TRY(train_make_lora(&v->lora, "critic.model", &k->raw.critic_lora, k->raw.critic_path));
    v->shares_base = k->model.lora.on && v->lora.on && k->model.lora.quant == v->lora.quant && same_dir(k->model.dir, v->model_dir);
    return derive_critic_updates(k);
}

/* A key's value, or the default in place of null. */
static double or_else(const struct conf *c, const char *key, double v, double none) { return conf_is_null(c, key) ? none : v; }

static int derive_distill_loss(struct ppo_config *k) {
#define LOSS "distillation.distillation_loss."
    struct ppo_distill_config *v = &k->distill;
    const char *mode = k->raw.distill.loss_mode;
    const double ratio = k->raw.distill.clip_ratio;
    const int rc = algo_distill_find(&v->loss, mode);
    if (rc < 0) return err_wrap(rc, LOSS "loss_mode");
    if (v->loss.list && conf_is_null(k->conf, LOSS "topk")) FAIL(ERR_INVAL, LOSS "topk is not set; loss_mode=%s needs it", mode);
    if (!v->loss.list) v->topk = 0;
    if (!v->use_task_rewards && conf_is_set(k->conf, LOSS "distillation_loss_coef") && v->coef != 1)
        log_note(LOSS "distillation_loss_coef=%g has no effect: without task rewards the loss is the distillation's alone, as in "
                      "verl",
                 v->coef);
    v->loss.loss_max_clamp = or_else(k->conf, LOSS "loss_max_clamp", k->raw.distill.loss_max_clamp, INFINITY);
    v->loss.log_prob_min_clamp = or_else(k->conf, LOSS "log_prob_min_clamp", k->raw.distill.log_prob_min_clamp, -INFINITY);
    v->loss.use_policy_gradient = k->raw.distill.use_policy_gradient;
    if (strcmp(k->raw.distill.policy_loss_mode, "vanilla") != 0)
        FAIL(ERR_INVAL, LOSS "policy_loss_mode=%s: vanilla is the one there is, as in verl", k->raw.distill.policy_loss_mode);
    v->loss.policy.clip_ratio_low = or_else(k->conf, LOSS "clip_ratio_low", k->raw.distill.clip_ratio_low, ratio);
    v->loss.policy.clip_ratio_high = or_else(k->conf, LOSS "clip_ratio_high", k->raw.distill.clip_ratio_high, ratio);
    if (!v->loss.use_policy_gradient && v->loss.kl.name && (strcmp(v->loss.name, "k1") == 0 || strcmp(v->loss.name, "kl") == 0))
        FAIL(ERR_INVAL,
             LOSS "loss_mode=%s without use_policy_gradient: the gradient of log p - log q by the student's weights "
                  "does not contain the teacher; set use_policy_gradient=True, or take k2, k3 or forward_kl_topk",
             v->loss.name);
    if (v->loss.use_policy_gradient && v->loss.list)
        log_warn(LOSS "loss_mode=%s with use_policy_gradient=True: only the sampled token's probability is moved; without it the "
                      "whole list is",
                 v->loss.name);
    return 0;
#undef LOSS
}

/* On-policy distillation from one frozen teacher. */
static int derive_distill(struct ppo_config *k) {
#define TEACHERS "distillation.teacher_models"
    struct ppo_distill_config *v = &k->distill;
    const char *name, *other = NULL, *path = k->raw.teacher_path;
    const json_t *teacher;
    if (!v->enable) return 0;
    json_object_foreach((json_t *)(uintptr_t)k->raw.teachers, name, teacher) {
        if (strcmp(name, "teacher_model") == 0) continue;
        if (path)
            FAIL(ERR_INVAL, TEACHERS ".%s: one teacher is supported, for every row, and " TEACHERS ".%s is set; drop the others",
                 name, other ? other : "teacher_model");
        path = json_string_value(json_object_get(teacher, "model_path"));
        if (!path) FAIL(ERR_INVAL, TEACHERS ".%s.model_path is not set", name);
        log_note(TEACHERS ".%s: the one teacher, for every row; of its keys model_path alone is read", name);
        other = name;
    }
    if (!path)
        FAIL(ERR_INVAL, TEACHERS ".teacher_model.model_path is not set: distillation.enabled=True needs a teacher with the "
                                 "student's tokenizer");
    k->raw.teacher_path = path;
    const int rc = run_model_dir(path, false, &v->teacher_dir);
    if (rc < 0) return err_wrap(rc, TEACHERS ".%s.model_path", other ? other : "teacher_model");
    return derive_distill_loss(k);
#undef TEACHERS
}

/* trainer.profile_steps, else verl's key of the same meaning. */
static void derive_profile(struct ppo_config *k) {
    if (!conf_is_null(k->conf, "trainer.profile_steps")) return;
    memcpy(k->output.profile_steps, k->raw.profile_steps, sizeof k->output.profile_steps);
    k->output.n_profile_steps = k->raw.n_profile_steps;
}

/* ---- pools ---- */

static bool has_critic(const struct ppo_config *k) {
    return conf_is_null(k->conf, "critic.enable") ? strcmp(k->algorithm.adv_estimator, "gae") == 0 : k->critic.enable;
}

struct pool_request {
    const char *gpus; /* its key of GPUs a host: verl's default is 8, so only a number that was set is a promise */
    const struct ppo_pool_keys *keys;
    bool wanted;
};
static struct pool_request pool_request(const struct ppo_config *k, int pool) {
    switch ((enum ppo_pool)pool) {
    case PPO_ROLLOUT: return (struct pool_request){"rollout.n_gpus_per_node", &k->raw.rollout_pool, k->schedule != PPO_SYNC};
    case PPO_CRITIC: return (struct pool_request){"critic.n_gpus_per_node", &k->raw.critic_pool, has_critic(k)};
    case PPO_TEACHER: return (struct pool_request){"distillation.n_gpus_per_node", &k->raw.teacher_pool, k->distill.enable};
    case PPO_REWARD:
        return (struct pool_request){"reward.reward_model.n_gpus_per_node", &k->raw.rm_pool, k->rm.enable && k->raw.rm_pool.enable};
    default: return (struct pool_request){0};
    }
}

static struct ppo_pools requested_pools(const struct ppo_config *k, bool by_ranks) {
    struct ppo_pools p = {{0}};
    for (int i = PPO_TRAIN + 1; i < PPO_POOLS; i++) {
        const struct pool_request a = pool_request(k, i);
        if (a.wanted && by_ranks) p.n[i] = a.keys->ranks;
        if (a.wanted && !by_ranks && conf_is_set(k->conf, a.gpus)) p.n[i] = a.keys->nnodes * a.keys->n_gpus_per_node;
    }
    return p;
}

struct train_pool_devices ppo_config_pool_devices(const struct ppo_config *k) {
    const struct ppo_pools gpus = requested_pools(k, false), ranks = requested_pools(k, true);
    struct train_pool_devices b = {.gpus = ppo_pool_ranks(&gpus), .ranks = ppo_pool_ranks(&ranks)};
    for (int i = PPO_TRAIN + 1; i < PPO_POOLS; i++) { /* hosts of another size are the trainer's, which have room for both */
        const struct ppo_pool_keys *keys = pool_request(k, i).keys;
        if (gpus.n[i] > 0 && keys->n_gpus_per_node == k->trainer.devices.n_gpus_per_node) b.nodes += keys->nnodes;
    }
    return b;
}

void ppo_config_pools(const struct ppo_config *k, bool launched, struct ppo_placement *p) {
    const struct train_pool_devices other = ppo_config_pool_devices(k);
    const bool by_ranks = rank_count_on_cpu(k->trainer.run.device) || k->trainer.devices.ranks > 0 || other.gpus == 0;
    const int64_t pools = by_ranks ? other.ranks : other.gpus, own = k->trainer.devices.ranks > 0 ? k->trainer.devices.ranks : 1;
    const int64_t all = pools + (by_ranks ? own : rank_count_devices(k->conf, &k->trainer.devices));
    p->pools = (struct ppo_pools){.n = {[PPO_TRAIN] = p->all.n}};
    if (pools == 0) return;
    if (p->all.n < (launched ? pools + 1 : all)) {
        log_note("pools and the trainer request %lld ranks, not all there: no pools, the work takes turns on %lld rank%s",
                 (long long)all, (long long)p->all.n, p->all.n == 1 ? "" : "s");
        return;
    }
    p->pools = requested_pools(k, by_ranks);
    p->pools.n[PPO_TRAIN] = p->all.n - pools;
}

/* Notes pools that are requested and not created; a critic's keys: note_no_critic. */
static void note_no_pools(const struct ppo_config *k) {
    const struct ppo_pool_keys *const rm = &k->raw.rm_pool;
    if (k->raw.teacher_pool.ranks > 0 && !k->distill.enable)
        log_note("distillation.ranks=%lld: no effect without distillation.enabled=True", (long long)k->raw.teacher_pool.ranks);
    if ((rm->ranks > 0 || rm->enable) && !k->rm.enable)
        log_note("reward.reward_model.%s: no effect without reward.reward_model.enable=True",
                 rm->ranks > 0 ? "ranks" : "enable_resource_pool");
    else if (rm->ranks > 0 && !rm->enable)
        log_note("reward.reward_model.ranks=%lld: no effect without reward.reward_model.enable_resource_pool=True",
                 (long long)rm->ranks);
    else if (rm->enable && rm->ranks == 0 && !conf_is_set(k->conf, "reward.reward_model.n_gpus_per_node"))
        log_note(
            "reward.reward_model.enable_resource_pool=True: no effect, as reward.reward_model.n_gpus_per_node (on a CPU ranks) "
            "does not say how many");
}

/* ---- what is not set ---- */

/* Micro-batches by tokens where no key gives their size. own: the key that requests them. */
static void default_cut(const struct ppo_config *k, const char *own, struct micro_batch_keys *w, struct buf *said) {
    if (w->all || w->each || w->dynamic || conf_is_set(k->conf, own) || conf_is_set(k->conf, ARR "actor.use_dynamic_bsz")) return;
    w->dynamic = true;
    buf_addf(said, "%s%s", said->n ? ", " : "", own);
}

static void default_cuts(struct ppo_config *k) {
    struct buf said = {0};
    default_cut(k, ARR "actor.use_dynamic_bsz", &k->raw.update_cut, &said);
    default_cut(k, ARR "rollout.log_prob_use_dynamic_bsz", &k->raw.logp_cut, &said);
    if (k->actor.use_kl_loss || k->algorithm.use_kl_in_reward)
        default_cut(k, ARR "ref.log_prob_use_dynamic_bsz", &k->raw.ref_cut, &said);
    if (has_critic(k)) default_cut(k, "critic.use_dynamic_bsz", &k->raw.critic_cut, &said);
    if (said.n) log_note("no size of micro-batches is given: they are cut by tokens, as if these were True: %s", said.p);
    buf_free(&said);
}

/* The keys without which there is no run, all at once: verl's defaults for them are files that seldom exist. */
static int check_given(const struct ppo_config *k) {
    struct buf b = {0};
    if (!conf_is_set(k->conf, ARR "model.path") && !file_is_dir(k->raw.model_path))
        buf_adds(&b, ", " ARR "model.path=DIR (or a hub id)");
    const bool run = k->use == PPO_RUN; /* a plan needs no data */
    if (run && !conf_is_set(k->conf, "data.train_files") && k->data.n_train_files > 0 && !file_exists(k->data.train_files[0]))
        buf_adds(&b, ", data.train_files=FILE");
    if (run && has_critic(k) && !conf_is_set(k->conf, "critic.model.path"))
        buf_addf(&b, ", critic.model.path=DIR (algorithm.adv_estimator=%s has a critic, grpo for one has none)",
                 k->algorithm.adv_estimator);
    const int rc = b.n ? err_set(ERR_INVAL, __FILE__, __LINE__, "not set: %s", b.p + 2) : 0;
    buf_free(&b);
    return rc;
}

/* verl's default file counts where it exists. Without data there is no validation, whichever key requests one. */
static int derive_validation(struct ppo_config *k) {
    if (!run_val_files(k->conf, k->data.val_files, k->data.n_val_files)) k->data.n_val_files = 0;
    if (k->data.n_val_files > 0) return 0;
    if (k->trainer.run.val_only)
        FAIL(ERR_INVAL,
             "trainer.val_only=True: there is nothing to validate on, as data.val_files is not set; set data.val_files=FILE");
    if (k->use != PPO_WORKER && (k->trainer.run.val_before_train || k->trainer.run.test_freq > 0))
        log_note(
            "data.val_files is not set: there is no validation, and trainer.val_before_train and trainer.test_freq have no effect");
    k->trainer.run.val_before_train = false;
    return 0;
}

/* router_replay.mode, by verl's rules; whether it can change anything. After derive_correction. */
static int derive_replay(struct ppo_config *k) {
    struct ppo_actor_config *const a = &k->actor;
    if (k->raw.replay != ROUTER_REPLAY_OFF) a->replay = k->raw.replay;
    const bool r3 = a->replay == ROUTER_REPLAY_R3, quiet = k->use == PPO_WORKER;
    const char *const name = r3 ? "R3" : "R2";
    if (r3 != k->raw.routing_replay) {
        if (r3) FAIL(ERR_INVAL, "router_replay.mode=R3 needs " ARR "rollout.enable_rollout_routing_replay=True");
        if (a->replay == ROUTER_REPLAY_R2)
            FAIL(ERR_INVAL, "router_replay.mode=R2 replays the old log-probs' pass; " ARR
                            "rollout.enable_rollout_routing_replay=True is for R3: take one of them");
        if (!quiet) log_note(ARR "rollout.enable_rollout_routing_replay has no effect without router_replay.mode=R3");
    }
    if (a->replay == ROUTER_REPLAY_OFF) return 0;
    if (!r3 && k->algorithm.bypass)
        FAIL(ERR_INVAL,
             "router_replay.mode=R2 replays the old log-probs' pass, which algorithm.rollout_correction.bypass_mode leaves "
             "out; take R3, or bypass_mode=False");
    if (r3 && k->rollout.external.n_urls > 0)
        FAIL(ERR_UNSUPPORTED, "router_replay.mode=R3: which experts a server of rollout.engine_url chose is not known; take R2");
    if (r3 && k->schedule == PPO_FULLY_ASYNC)
        FAIL(ERR_UNSUPPORTED,
             "router_replay.mode=R3 is not there in fully asynchronous training, whose samples are of several weights; "
             "take R2, whose choices are those of the old log-probs' pass");
    struct model_config c;
    TRY(model_config_load(&c, k->model.dir));
    const int64_t words = router_replay_words(&c), steps = (k->sizes.samples + k->sizes.mini_batch - 1) / k->sizes.mini_batch;
    model_config_free(&c);
    const bool moves = r3 && k->schedule != PPO_SYNC; /* the update's first weights are not those that generated */
    const char *const why = words == 0 ? "the model has no experts"
                            : steps * a->epochs == 1 && !moves
                                ? "with one optimizer step a step, an update makes the choices of that pass anyway"
                                : NULL;
    if (why && !quiet) log_note("router_replay.mode=%s changes nothing: %s", name, why);
    if (why) return 0;
    k->algorithm.replay_words = a->replay_words = words;
    k->algorithm.replay_rollout = moves;
    return 0;
}

int ppo_config_fill(struct ppo_config *k, const struct conf *c) {
    *k = (struct ppo_config){.conf = c, .trainer.run.early_stop.threshold = NAN, .async.max_lag = -1};
    return conf_fill(c, bindings, sizeof bindings / sizeof *bindings, k);
}

void ppo_config_sizes(struct ppo_config *k) {
    const int64_t n = k->rollout.train.n;
    k->sizes = (struct ppo_sizes){.samples = size_mul(k->data.train_batch_size, n),
                                  .mini_batch = size_mul(k->actor.mini_batch_size, n),
                                  .critic_mini_batch = size_mul(k->critic.mini_batch_size, n),
                                  .max_len = k->data.max_prompt_length + k->data.max_response_length,
                                  .open_prompts = k->schedule == PPO_FULLY_ASYNC ? k->async.most_open : k->data.train_batch_size};
}

static int read(struct ppo_config *k, const struct conf *c, enum ppo_config_use use) {
    TRY(ppo_config_fill(k, c));
    k->use = use;
    TRY(derive_schedule(k));
    ppo_config_sizes(k);
    if (use != PPO_WORKER) TRY(check_given(k));
    default_cuts(k);
    TRY(derive_validation(k));
    TRY(ppo_validate_config(k));
    if (use != PPO_WORKER) note_no_pools(k);
    derive_data(k);
    TRY(data_sampler_spec_check(&k->data.sampler));
    TRY(derive_model(k));
    TRY(derive_algorithm(k));
    TRY(derive_actor(k));
    TRY(derive_rollout(k));
    TRY(ppo_agent_config_derive(&k->agent));
    TRY(derive_external(k));
    TRY(derive_correction(k));
    TRY(derive_replay(k));
    TRY(derive_filter(k));
    TRY(derive_critic(k));
    TRY(derive_distill(k));
    TRY(ppo_config__reward(k));
    TRY(ppo_config__reward_model(k));
    derive_profile(k);
    k->trainer.run.title = k->algorithm.adv_estimator;
    k->trainer.run.validates = k->data.n_val_files > 0 && k->trainer.run.test_freq > 0;
    return 0;
}

int ppo_config_read(const struct ppo_config **out, const struct conf *c, enum ppo_config_use use) {
    struct ppo_config *const k = xmalloc(sizeof *k);
    *out = k;
    return read(k, c, use);
}

struct ppo_worker_config ppo_worker_config(const struct ppo_config *k, const struct ppo_placement *ranks) {
    const bool ref = k->actor.use_kl_loss || k->algorithm.use_kl_in_reward;
    return (struct ppo_worker_config){k->conf,  &k->data,  &k->distill, &k->trainer, &k->sizes, k->model,    k->rollout, k->ref,
                                      k->actor, k->critic, k->rm,       *ranks,      k->layout, k->schedule, ref};
}

int ppo_config_fetch(const struct ppo_config *k) {
    TRY(run_model_weights(ARR "model.path", k->raw.model_path, k->model.dir));
    TRY(run_model_weights("critic.model.path", k->raw.critic_path, k->critic.model_dir));
    TRY(run_model_weights("distillation.teacher_models.teacher_model.model_path", k->raw.teacher_path, k->distill.teacher_dir));
    return k->rm.enable ? run_model_weights("reward.reward_model.model_path", k->raw.rm_path, k->rm.model_dir) : 0;
}

void ppo_config_free(const struct ppo_config *read) {
    struct ppo_config *const k = (struct ppo_config *)(uintptr_t)read;
    if (!k) return;
    json_decref(k->data.chat_kwargs);
    free(k->algorithm.gdpo_weights);
    algo_user_close(k->algorithm.my_adv);
    algo_user_close(k->actor.my_loss);
    run_lock_release(k->trainer.run.lock);
    free(k->critic.model_dir);
    train_lora_free(&k->critic.lora);
    free(k->rm.model_dir);
    model_config_free(&k->rm.model);
    free(k->distill.teacher_dir);
    train_model_config_free(&k->model);
    free(k);
}
