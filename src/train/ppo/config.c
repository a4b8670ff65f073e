/* config.c - the keys of a ppo run, read once into struct ppo_config.
 * Every later stage reads that struct; no other file of ppo names a key. */
#include "train/ppo/validate_config.h"
#include "train/ppo/config.h"
#include "train/run/optimizer_keys.h"
#include "train/run/sampler_keys.h"
#include "train/train.h"

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define ARR "actor_rollout_ref."

enum { CHAT_SLACK = 256 }; /* tokens that another model's chat template may add to a conversation */

static int read_data(struct ppo_config *k, const struct conf *c) {
    const char *truncation;
    int64_t seed = 0;
    const json_t *kwargs;
    TRY(conf_strs(c, "data.train_files", &k->train_files, &k->n_train_files));
    TRY(conf_strs(c, "data.val_files", &k->val_files, &k->n_val_files));
    TRY(conf_str(c, "data.prompt_key", &k->prompt_key));
    TRY(conf_str(c, "data.reward_fn_key", &k->reward_fn_key));
    TRY(conf_i64(c, "data.train_batch_size", &k->train_batch_size));
    TRY(conf_i64_opt(c, "data.val_batch_size", &k->val_batch_size));
    TRY(conf_i64(c, "data.train_max_samples", &k->train_max_samples));
    TRY(conf_i64(c, "data.val_max_samples", &k->val_max_samples));
    TRY(conf_i64(c, "data.max_prompt_length", &k->max_prompt_length));
    TRY(conf_i64(c, ARR "rollout.response_length", &k->max_response_length));
    TRY(conf_bool(c, "data.shuffle", &k->shuffle));
    TRY(train_read_sampler(c, k->shuffle, k->reward_fn_key, &k->sampler));
    TRY(conf_bool(c, "data.filter_overlong_prompts", &k->filter_overlong_prompts));
    TRY(conf_str(c, "data.truncation", &truncation));
    TRY(data_truncation_parse(truncation, &k->truncation));
    TRY(conf_json(c, "data.apply_chat_template_kwargs", &kwargs));
    k->chat_kwargs = json_deep_copy(kwargs);
    TRY(conf_i64(c, "trainer.seed", &seed));
    TRY(conf_i64_opt(c, "data.seed", &seed));
    k->seed = (uint64_t)seed;
    return 0;
}

static int read_dtype(const struct conf *c, const char *key, enum dtype *dt) {
    const char *s;
    TRY(conf_str(c, key, &s));
    if (strcmp(s, "bfloat16") == 0 || strcmp(s, "bf16") == 0 || strcmp(s, "auto") == 0) *dt = DT_BF16;
    else if (strcmp(s, "float32") == 0 || strcmp(s, "fp32") == 0 || strcmp(s, "float") == 0) *dt = DT_F32;
    else FAIL(ERR_INVAL, "%s=%s: the compute dtypes are bfloat16 and float32", key, s);
    return 0;
}

static int read_model(struct ppo_config *k, const struct conf *c) {
    const char *path, *template = NULL;
    enum dtype rollout;
    TRY(conf_str(c, ARR "model.path", &path));
    TRY(train_model_dir(path, &k->model_dir));
    TRY(train_read_lora(c, ARR "model", path, &k->lora));
    k->tokenizer_dir = k->model_dir;
    TRY(conf_str_opt(c, ARR "model.tokenizer_path", &k->tokenizer_dir));
    TRY(conf_str_opt(c, ARR "model.custom_chat_template", &template));
    if (template) json_object_set_new(k->chat_kwargs, "chat_template", json_string(template));
    TRY(read_dtype(c, ARR "actor.fsdp_config.dtype", &k->act));
    TRY(read_dtype(c, ARR "rollout.dtype", &rollout));
    if (rollout != k->act) {
        const bool by_rollout = conf_is_set(c, ARR "rollout.dtype") && !conf_is_set(c, ARR "actor.fsdp_config.dtype");
        if (by_rollout) k->act = rollout;
        log_note("rollout.dtype and actor.fsdp_config.dtype differ; generation and training share one set of weights, in %s",
                 dtype_name(k->act));
    }
    return train_read_recompute(c, ARR "model.enable_gradient_checkpointing", &k->recompute);
}

static int read_cut(const struct conf *c, const char *dynamic, const char *tokens, const char *micro, const char *old_micro,
                    struct actor_cut *cut) {
    bool dyn;
    *cut = (struct actor_cut){0};
    TRY(conf_bool(c, dynamic, &dyn));
    if (dyn) return conf_i64(c, tokens, &cut->max_rows);
    TRY(conf_i64_opt(c, old_micro, &cut->max_seqs));
    TRY(conf_i64_opt(c, micro, &cut->max_seqs));
    if (cut->max_seqs < 1)
        FAIL(ERR_INVAL, "%s is not set; set it to the number of samples in a micro-batch, or %s=True", micro, dynamic);
    return 0;
}

static int read_rollout(struct ppo_config *k, const struct conf *c) {
    struct ppo_sampling *t = &k->train, *v = &k->val;
    t->repetition_penalty = v->repetition_penalty = 1;
    TRY(conf_i64(c, ARR "rollout.n", &t->n));
    TRY(conf_f64(c, ARR "rollout.temperature", &t->temperature));
    TRY(conf_f64(c, ARR "rollout.top_p", &t->top_p));
    TRY(conf_i64(c, ARR "rollout.top_k", &t->top_k));
    TRY(conf_f64_opt(c, ARR "rollout.min_p", &t->min_p));
    TRY(conf_f64_opt(c, ARR "rollout.repetition_penalty", &t->repetition_penalty));
    TRY(conf_bool(c, ARR "rollout.ignore_eos", &t->ignore_eos));
    if (t->n == 1 && !k->my_adv && (k->adv->needs & ALGO_NEEDS_GROUP))
        log_warn(ARR "rollout.n=1: algorithm.adv_estimator=%s compares the samples of one prompt, and here each is alone: its "
                     "advantage is its score without a baseline, or 0; set " ARR "rollout.n to 2 or more",
                 k->adv_estimator);
    if (t->temperature <= 0)
        FAIL(ERR_INVAL,
             ARR "rollout.temperature=%g: training samples need a temperature above 0 (greedy is for validation: "
                 "rollout.val_kwargs.temperature)",
             t->temperature);
    TRY(conf_i64(c, ARR "rollout.val_kwargs.n", &v->n));
    TRY(conf_f64(c, ARR "rollout.val_kwargs.temperature", &v->temperature));
    TRY(conf_f64(c, ARR "rollout.val_kwargs.top_p", &v->top_p));
    TRY(conf_i64(c, ARR "rollout.val_kwargs.top_k", &v->top_k));
    v->ignore_eos = t->ignore_eos;
    v->repetition_penalty = t->repetition_penalty;
    TRY(conf_i64(c, ARR "rollout.max_num_seqs", &k->max_num_seqs));
    TRY(conf_i64(c, ARR "rollout.max_num_batched_tokens", &k->max_num_batched_tokens));
    TRY(conf_bool(c, ARR "rollout.enable_prefix_caching", &k->prefix_cache));
    TRY(conf_f64(c, ARR "rollout.gpu_memory_utilization", &k->memory_fraction));
    TRY(conf_bool_opt(c, "trainer.force_old_log_prob", &k->force_old_log_prob));
    TRY(read_cut(c, ARR "rollout.log_prob_use_dynamic_bsz", ARR "rollout.log_prob_max_token_len_per_gpu",
                 ARR "rollout.log_prob_micro_batch_size_per_gpu", ARR "rollout.log_prob_micro_batch_size", &k->logp_cut));
    if (k->use_kl_loss || k->use_kl_in_reward)
        TRY(read_cut(c, ARR "ref.log_prob_use_dynamic_bsz", ARR "ref.log_prob_max_token_len_per_gpu",
                     ARR "ref.log_prob_micro_batch_size_per_gpu", ARR "ref.log_prob_micro_batch_size", &k->ref_cut));
    return 0;
}

/* gdpo's rewards: keys of the scorer's dict, and their weights. */
static int read_gdpo(struct ppo_config *k, const struct conf *c) {
    int64_t n = 0;
    if (conf_has(c, "algorithm.gdpo_reward_keys")) TRY(conf_strs(c, "algorithm.gdpo_reward_keys", &k->gdpo_keys, &k->n_gdpo));
    if (k->n_gdpo == 0)
        FAIL(ERR_INVAL, "algorithm.adv_estimator=gdpo needs the rewards it normalises one by one: "
                        "+algorithm.gdpo_reward_keys=[KEY,...], keys of the dict that the scorer returns");
    if (conf_is_null(c, "algorithm.gdpo_reward_weights")) return 0;
    k->gdpo_weights = xcalloc((size_t)k->n_gdpo, sizeof *k->gdpo_weights);
    TRY(conf_f64s(c, "algorithm.gdpo_reward_weights", k->gdpo_weights, k->n_gdpo, &n));
    if (n != k->n_gdpo)
        FAIL(ERR_INVAL, "algorithm.gdpo_reward_weights has %lld numbers for %lld algorithm.gdpo_reward_keys", (long long)n,
             (long long)k->n_gdpo);
    return 0;
}

/* algorithm.rollout_correction: between the old and the rollout's log-probs (decoupled), or inside the
 * loss between the current and the rollout's (bypass). Reads loss_mode's place: comes after read_actor. */
static int read_correction(struct ppo_config *k, const struct conf *c) {
    struct algo_corr_spec s = {0};
    bool bypass = false;
#define RC "algorithm.rollout_correction."
    TRY(conf_str_opt(c, RC "rollout_is", &s.rollout_is));
    TRY(conf_str_opt(c, RC "rollout_is_threshold", &s.rollout_is_threshold));
    TRY(conf_str_opt(c, RC "rollout_rs", &s.rollout_rs));
    TRY(conf_str_opt(c, RC "rollout_rs_threshold", &s.rollout_rs_threshold));
    TRY(conf_str_opt(c, RC "loss_type", &s.loss_type));
    TRY(conf_bool_opt(c, RC "rollout_is_batch_normalize", &s.rollout_is_batch_normalize));
    TRY(conf_bool_opt(c, RC "bypass_mode", &bypass));
#undef RC
    const int rc = algo_corr_parse(&k->corr, &s);
    if (rc < 0) return err_wrap(rc, "algorithm.rollout_correction");
    const struct algo_policy_entry *mode = algo_policy_find("bypass_mode");
    if (bypass && k->my_loss)
        FAIL(ERR_INVAL, "algorithm.rollout_correction.bypass_mode has a loss of its own, so the one of " ARR
                        "actor.policy_loss.loss_mode would not be used; take one of them");
    if (bypass) k->loss_mode = mode;
    if (k->loss_mode == mode) {
        k->policy.corr = &k->corr;
        if (k->force_old_log_prob)
            log_note("trainer.force_old_log_prob has no effect: bypass_mode takes the rollout's log-probs as old ones");
        k->force_old_log_prob = false;
    } else {
        k->correct = k->corr.is != ALGO_IS_NONE || k->corr.n_rs > 0;
    }
    return 0;
}

/* DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). */
static int read_filter(struct ppo_config *k, const struct conf *c) {
    struct ppo_filter_config *f = &k->filter;
    f->gen_batch_size = k->train_batch_size;
    TRY(conf_bool(c, "algorithm.filter_groups.enable", &f->enable));
    if (!f->enable) return 0;
    TRY(conf_str(c, "algorithm.filter_groups.metric", &f->metric));
    TRY(conf_i64_opt(c, "algorithm.filter_groups.max_num_gen_batches", &f->max_gen_batches));
    TRY(conf_i64_opt(c, "data.gen_batch_size", &f->gen_batch_size));
    if (strcmp(f->metric, "seq_final_reward") == 0)
        FAIL(ERR_INVAL, "algorithm.filter_groups.metric=seq_final_reward: groups are judged while others are still generated, "
                        "before any KL penalty is known; use reward");
    if (strcmp(f->metric, "score") == 0 || strcmp(f->metric, "seq_reward") == 0) f->metric = "reward";
    if (f->max_gen_batches > 0 && f->max_gen_batches * f->gen_batch_size < k->train_batch_size)
        FAIL(ERR_INVAL,
             "algorithm.filter_groups.max_num_gen_batches=%lld of data.gen_batch_size=%lld prompts are fewer than "
             "data.train_batch_size=%lld",
             (long long)f->max_gen_batches, (long long)f->gen_batch_size, (long long)k->train_batch_size);
    if (k->train.n < 2) log_warn("algorithm.filter_groups with rollout.n=1: one sample is never alike, so nothing is filtered");
    return 0;
}

/* An estimator or loss in a file of the user's. *kwargs: its parameters, borrowed. */
static int read_mine(const struct conf *c, const char *key, const char *spec, bool loss, const char *kwargs_key,
                     const json_t **kwargs, struct algo_user **out) {
    const char *run_dir;
    struct algo_user_args a = {.key = key, .spec = spec, .loss = loss};
    *kwargs = NULL;
    const bool set = !conf_is_null(c, kwargs_key);
    if (!algo_user_named(spec)) {
        if (set)
            FAIL(ERR_INVAL, "%s: %s=%s takes no parameters; they are for a function in a file of one's own", kwargs_key, key, spec);
        return 0;
    }
    if (set) TRY(conf_json(c, kwargs_key, kwargs));
    TRY(conf_str(c, "trainer.default_local_dir", &run_dir));
    TRY(conf_f64_opt(c, "algorithm.custom_timeout", &a.timeout_s));
    char *dir = file_join(run_dir, "custom");
    a.dir = dir;
    a.kwargs = *kwargs;
    const int rc = algo_user_open(out, &a);
    free(dir);
    return rc;
}

static int read_algorithm(struct ppo_config *k, const struct conf *c) {
    const char *s;
    double weight_pow;
    TRY(conf_str(c, "algorithm.adv_estimator", &k->adv_estimator));
    TRY(read_mine(c, "algorithm.adv_estimator", k->adv_estimator, false, "algorithm.adv_kwargs", &k->adv_kwargs, &k->my_adv));
    k->adv = k->my_adv ? algo_user_adv(k->my_adv) : algo_adv_find(k->adv_estimator);
    if (!k->adv) FAIL(ERR_INVAL, "algorithm.adv_estimator: %s; or a function of your own, FILE.c:NAME or FILE.py:NAME", err_msg());
    TRY(conf_f64(c, "algorithm.gamma", &k->gamma));
    TRY(conf_f64(c, "algorithm.lam", &k->lam));
    TRY(conf_bool(c, "algorithm.norm_adv_by_std_in_grpo", &k->norm_adv_by_std));
    TRY(conf_bool(c, "algorithm.use_kl_in_reward", &k->use_kl_in_reward));
    TRY(conf_str(c, "algorithm.kl_penalty", &s));
    TRY(algo_kl_find(&k->kl_penalty, s));
    TRY(conf_str(c, "algorithm.kl_ctrl.type", &k->kl_ctrl_type));
    TRY(conf_f64(c, "algorithm.kl_ctrl.kl_coef", &k->kl_ctrl_coef));
    TRY(conf_f64(c, "algorithm.kl_ctrl.target_kl", &k->kl_ctrl_target));
    TRY(conf_f64(c, "algorithm.kl_ctrl.horizon", &k->kl_ctrl_horizon));
    if (strcmp(k->adv_estimator, "gdpo") == 0) TRY(read_gdpo(k, c));
    TRY(conf_bool(c, "algorithm.use_pf_ppo", &k->use_pf_ppo));
    if (!k->use_pf_ppo) return 0;
    if (!(k->adv->needs & ALGO_NEEDS_VALUES))
        FAIL(ERR_INVAL, "algorithm.use_pf_ppo=True is for adv_estimator=gae (verl ignores it elsewhere); the estimator is %s",
             k->adv_estimator);
    TRY(conf_str(c, "algorithm.pf_ppo.reweight_method", &s));
    TRY(conf_f64(c, "algorithm.pf_ppo.weight_pow", &weight_pow));
    const int rc = algo_pf_ppo_parse(&k->pf_ppo, s, weight_pow);
    return rc < 0 ? err_wrap(rc, "algorithm") : 0;
}

static int read_clip(struct ppo_config *k, const struct conf *c) {
    double ratio;
    k->policy = algo_policy_defaults();
    TRY(conf_f64(c, ARR "actor.clip_ratio", &ratio));
    k->policy.clip_ratio_low = k->policy.clip_ratio_high = ratio;
    TRY(conf_f64_opt(c, ARR "actor.clip_ratio_low", &k->policy.clip_ratio_low));
    TRY(conf_f64_opt(c, ARR "actor.clip_ratio_high", &k->policy.clip_ratio_high));
    if (conf_is_set(c, ARR "actor.clip_ratio") && (k->policy.clip_ratio_low != ratio || k->policy.clip_ratio_high != ratio))
        log_note("actor.clip_ratio=%g has no effect: clip_ratio_low=%g and clip_ratio_high=%g are used, as in verl", ratio,
                 k->policy.clip_ratio_low, k->policy.clip_ratio_high);
    TRY(conf_f64(c, ARR "actor.clip_ratio_c", &k->policy.clip_ratio_c));
    TRY(conf_f64(c, ARR "actor.tau_pos", &k->policy.tau_pos));
    TRY(conf_f64(c, ARR "actor.tau_neg", &k->policy.tau_neg));
    TRY(conf_f64(c, ARR "actor.policy_loss.clip_cov_ratio", &k->policy.clip_cov_ratio));
    TRY(conf_f64(c, ARR "actor.policy_loss.clip_cov_lb", &k->policy.clip_cov_lb));
    TRY(conf_f64(c, ARR "actor.policy_loss.clip_cov_ub", &k->policy.clip_cov_ub));
    TRY(conf_f64(c, ARR "actor.policy_loss.kl_cov_ratio", &k->policy.kl_cov_ratio));
    TRY(conf_f64(c, ARR "actor.policy_loss.ppo_kl_coef", &k->policy.ppo_kl_coef));
    TRY(conf_f64_opt(c, ARR "actor.policy_loss.dro_beta", &k->policy.dro_beta));
    k->policy.seed = k->seed;
    return 0;
}

/* Whether one of these switches of verl's engines is on; keys ends with NULL. */
static int any_on(const struct conf *c, const char *const *keys, bool *out) {
    *out = false;
    for (; *keys; keys++) {
        bool on = false;
        if (conf_has(c, *keys)) TRY(conf_bool_opt(c, *keys, &on));
        *out |= on;
    }
    return 0;
}

/* What rests in host memory: with param_offload the fp32 master, with optimizer_offload the optimizer's state and
 * the master, which is a part of it here. The one weight buffer is read in every phase and stays. */
static int read_offload(struct ppo_config *k, const struct conf *c) {
    static const char *const params[] = {ARR "actor.fsdp_config.param_offload", ARR "actor.megatron.param_offload", NULL};
    static const char *const state[] = {ARR "actor.fsdp_config.optimizer_offload", ARR "actor.fsdp_config.offload_policy",
                                        ARR "actor.megatron.optimizer_offload", NULL};
    static const char *const ref[] = {ARR "ref.fsdp_config.param_offload", ARR "ref.fsdp_config.offload_policy",
                                      ARR "ref.megatron.param_offload", NULL};
    static const char *const critic_params[] = {"critic.fsdp.param_offload", "critic.megatron.param_offload", NULL};
    static const char *const critic_state[] = {"critic.fsdp.optimizer_offload", "critic.fsdp.offload_policy",
                                               "critic.megatron.optimizer_offload", NULL};
    struct optim_config *const o = &k->optim, *const v = &k->critic.optim;
    TRY(any_on(c, state, &o->host_state));
    TRY(any_on(c, params, &o->host_master));
    TRY(any_on(c, critic_state, &v->host_state));
    TRY(any_on(c, critic_params, &v->host_master));
    o->host_master |= o->host_state;
    v->host_master |= v->host_state;
    TRY(any_on(c, ref, &k->ref_offload));
    k->ref_offload &= !k->lora.on && (k->use_kl_loss || k->use_kl_in_reward); /* else there are no reference weights */
    return 0;
}

static int read_optim(struct ppo_config *k, const struct conf *c) {
    TRY(train_read_optim(c, ARR "actor.optim", &k->optim, &k->warmup_ratio, &k->zero_indexed_step));
    TRY(conf_f64(c, ARR "actor.grad_clip", &k->optim.clip));
    if (!conf_is_set(c, ARR "actor.grad_clip")) TRY(conf_f64_opt(c, ARR "actor.optim.clip_grad", &k->optim.clip));
    return 0;
}

static int read_actor(struct ppo_config *k, const struct conf *c) {
    const json_t *kwargs;
    const char *s;
    int64_t seed;
    TRY(conf_str(c, ARR "actor.policy_loss.loss_mode", &s));
    TRY(read_mine(c, ARR "actor.policy_loss.loss_mode", s, true, ARR "actor.policy_loss.kwargs", &kwargs, &k->my_loss));
    k->loss_mode = k->my_loss ? algo_user_policy(k->my_loss) : algo_policy_find(s);
    if (!k->loss_mode)
        FAIL(ERR_INVAL, ARR "actor.policy_loss.loss_mode: %s; or a function of your own, FILE.c:NAME or FILE.py:NAME", err_msg());
    TRY(read_clip(k, c));
    k->policy.kwargs = kwargs;
    TRY(conf_str(c, ARR "actor.loss_agg_mode", &s));
    if (!(k->agg_mode = algo_agg_find(s))) FAIL(ERR_INVAL, ARR "actor.loss_agg_mode: %s", err_msg());
    TRY(conf_f64_opt(c, ARR "actor.loss_scale_factor", &k->loss_scale_factor));
    TRY(conf_f64(c, ARR "actor.entropy_coeff", &k->entropy_coeff));
    TRY(conf_bool(c, ARR "actor.use_kl_loss", &k->use_kl_loss));
    TRY(conf_f64(c, ARR "actor.kl_loss_coef", &k->kl_loss_coef));
    TRY(conf_str(c, ARR "actor.kl_loss_type", &s));
    TRY(algo_kl_find(&k->kl_loss_type, s));
    TRY(conf_i64(c, ARR "actor.ppo_mini_batch_size", &k->ppo_mini_batch_size));
    TRY(conf_i64(c, ARR "actor.ppo_epochs", &k->ppo_epochs));
    TRY(conf_bool(c, ARR "actor.shuffle", &k->mini_shuffle));
    TRY(conf_i64(c, ARR "actor.data_loader_seed", &seed));
    k->mini_seed = (uint64_t)seed;
    TRY(read_cut(c, ARR "actor.use_dynamic_bsz", ARR "actor.ppo_max_token_len_per_gpu", ARR "actor.ppo_micro_batch_size_per_gpu",
                 ARR "actor.ppo_micro_batch_size", &k->update_cut));
    return read_optim(k, c);
}

static int read_critic_updates(struct ppo_critic_config *v, const struct conf *c) {
    const char *s;
    int64_t seed = 0;
    TRY(read_cut(c, "critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu", "critic.ppo_micro_batch_size_per_gpu",
                 "critic.ppo_micro_batch_size", &v->update_cut));
    TRY(read_cut(c, "critic.use_dynamic_bsz", "critic.forward_max_token_len_per_gpu", "critic.forward_micro_batch_size_per_gpu",
                 "critic.forward_micro_batch_size", &v->values_cut));
    TRY(conf_str(c, "critic.loss_agg_mode", &s));
    if (!(v->agg_mode = algo_agg_find(s))) FAIL(ERR_INVAL, "critic.loss_agg_mode: %s", err_msg());
    TRY(conf_f64_opt(c, "critic.loss_scale_factor", &v->loss_scale_factor));
    TRY(conf_f64(c, "critic.cliprange_value", &v->cliprange));
    TRY(conf_i64(c, "critic.ppo_mini_batch_size", &v->mini_batch_size));
    TRY(conf_i64(c, "critic.ppo_epochs", &v->epochs));
    TRY(conf_bool(c, "critic.shuffle", &v->shuffle));
    TRY(conf_i64(c, "trainer.seed", &seed));
    TRY(conf_i64_opt(c, "critic.data_loader_seed", &seed));
    v->seed = (uint64_t)seed;
    TRY(train_read_optim(c, "critic.optim", &v->optim, &v->warmup_ratio, &v->zero_indexed_step));
    TRY(conf_f64(c, "critic.grad_clip", &v->optim.clip));
    if (!conf_is_set(c, "critic.grad_clip")) TRY(conf_f64_opt(c, "critic.optim.clip_grad", &v->optim.clip));
    return 0;
}

/* Keys of a critic that there is not. */
static int note_no_critic(const struct ppo_config *k, const struct conf *c) {
    int64_t n;
    const char *key = conf_first_set(c, "critic.", "critic.enable", &n);
    char others[32] = "";
    if (n > 1) snprintf(others, sizeof others, " and %lld more", (long long)n - 1);
    if (key)
        log_note("%s%s: no effect, as algorithm.adv_estimator=%s has no critic; gae has one, and critic.enable=True trains one "
                 "beside any",
                 key, others, k->adv_estimator);
    return 0;
}

static bool same_dir(const char *a, const char *b) {
    char full[2][PATH_MAX];
    return realpath(a, full[0]) && realpath(b, full[1]) && strcmp(full[0], full[1]) == 0;
}

/* Whether there is a critic is verl's need_critic: critic.enable, or by default the estimator. */
static int read_critic(struct ppo_config *k, const struct conf *c) {
    struct ppo_critic_config *v = &k->critic;
    const bool needed = (k->adv->needs & ALGO_NEEDS_VALUES) != 0;
    const char *path;
    v->enable = needed;
    TRY(conf_bool_opt(c, "critic.enable", &v->enable));
    TRY(conf_i64(c, "trainer.critic_warmup", &v->actor_from));
    if (needed && !v->enable)
        FAIL(ERR_INVAL, "critic.enable=False: algorithm.adv_estimator=%s computes advantages from a critic's values",
             k->adv_estimator);
    if (!v->enable && v->actor_from > 1)
        FAIL(ERR_INVAL, "trainer.critic_warmup=%lld trains a critic alone for that long, and algorithm.adv_estimator=%s has none",
             (long long)v->actor_from, k->adv_estimator);
    if (!v->enable) return note_no_critic(k, c);
    if (!needed)
        log_note("critic.enable=True: the critic is trained, and algorithm.adv_estimator=%s does not read its values",
                 k->adv_estimator);
    if (!conf_is_set(c, "critic.model.path"))
        FAIL(ERR_INVAL,
             "critic.model.path is not set: a critic (algorithm.adv_estimator=%s) starts from a model; the policy's "
             "own, critic.model.path=%s, is the usual one",
             k->adv_estimator, k->tokenizer_dir);
    TRY(conf_str(c, "critic.model.path", &path));
    const int rc = train_model_dir(path, &v->model_dir);
    if (rc < 0) return err_wrap(rc, "critic.model.path");
    if (k->my_adv) TRY(ppo_validate_critic_config(c));
    TRY(train_read_lora(c, "critic.model", path, &v->lora));
    v->shares_base = k->lora.on && v->lora.on && k->lora.quant == v->lora.quant && same_dir(k->model_dir, v->model_dir);
    TRY(train_read_recompute(c, "critic.model.enable_gradient_checkpointing", &v->recompute));
    return read_critic_updates(v, c);
}

static int read_distill_loss(struct ppo_distill_config *v, const struct conf *c) {
#define LOSS "distillation.distillation_loss."
    const char *s;
    double ratio;
    TRY(conf_str(c, LOSS "loss_mode", &s));
    const int rc = algo_distill_find(&v->loss, s);
    if (rc < 0) return err_wrap(rc, LOSS "loss_mode");
    if (v->loss.list && conf_is_null(c, LOSS "topk")) FAIL(ERR_INVAL, LOSS "topk is not set; loss_mode=%s needs it", s);
    if (v->loss.list) TRY(conf_i64(c, LOSS "topk", &v->topk));
    if (v->loss.list && v->topk < 1) FAIL(ERR_INVAL, LOSS "topk=%lld: at least one token", (long long)v->topk);
    TRY(conf_bool(c, LOSS "use_task_rewards", &v->use_task_rewards));
    TRY(conf_f64(c, LOSS "distillation_loss_coef", &v->coef));
    if (!v->use_task_rewards && conf_is_set(c, LOSS "distillation_loss_coef") && v->coef != 1)
        log_note(LOSS "distillation_loss_coef=%g has no effect: without task rewards the loss is the distillation's alone, as in "
                      "verl",
                 v->coef);
    TRY(conf_f64_opt(c, LOSS "loss_max_clamp", &v->loss.loss_max_clamp));
    TRY(conf_f64_opt(c, LOSS "log_prob_min_clamp", &v->loss.log_prob_min_clamp));
    TRY(conf_bool(c, LOSS "use_policy_gradient", &v->loss.use_policy_gradient));
    TRY(conf_str(c, LOSS "policy_loss_mode", &s));
    if (strcmp(s, "vanilla") != 0) FAIL(ERR_INVAL, LOSS "policy_loss_mode=%s: vanilla is the one there is, as in verl", s);
    TRY(conf_f64(c, LOSS "clip_ratio", &ratio));
    v->loss.policy.clip_ratio_low = v->loss.policy.clip_ratio_high = ratio;
    TRY(conf_f64_opt(c, LOSS "clip_ratio_low", &v->loss.policy.clip_ratio_low));
    TRY(conf_f64_opt(c, LOSS "clip_ratio_high", &v->loss.policy.clip_ratio_high));
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
static int read_distill(struct ppo_config *k, const struct conf *c) {
    struct ppo_distill_config *v = &k->distill;
#define TEACHER "distillation.teacher_models.teacher_model."
    const char *path;
    TRY(conf_bool(c, "distillation.enabled", &v->enable));
    if (!v->enable) return 0;
    if (conf_is_null(c, TEACHER "model_path"))
        FAIL(ERR_INVAL, TEACHER "model_path is not set: distillation.enabled=True needs a teacher with the student's tokenizer");
    TRY(conf_str(c, TEACHER "model_path", &path));
    const int rc = train_model_dir(path, &v->teacher_dir);
    if (rc < 0) return err_wrap(rc, TEACHER "model_path");
    TRY(conf_i64(c, TEACHER "inference.max_num_batched_tokens", &v->cut.max_rows));
    if (v->cut.max_rows < 1)
        FAIL(ERR_INVAL, TEACHER "inference.max_num_batched_tokens=%lld: at least 1", (long long)v->cut.max_rows);
    return read_distill_loss(v, c);
#undef TEACHER
}

/* reward.reward_kwargs has the dapo manager's keys: another is refused, and under the naive manager, which reads
 * none, they are noted. */
static int check_reward_kwargs(const struct conf *c, bool dapo) {
#define KWARGS "reward.reward_kwargs"
    static const char *const known[] = {"max_resp_len", "overlong_buffer_cfg", NULL};
    static const char *const of_buffer[] = {"enable", "len", "penalty_factor", "log", NULL};
    const struct {
        const char *key;
        const char *const *known;
    } dicts[] = {{KWARGS, known}, {KWARGS ".overlong_buffer_cfg", of_buffer}};
    for (int i = 0; i < 2; i++) {
        const json_t *given;
        const char *name;
        json_t *v;
        if (conf_is_null(c, dicts[i].key)) return 0;
        TRY(conf_json(c, dicts[i].key, &given));
        if (!json_is_object(given)) FAIL(ERR_INVAL, "%s: expected a dictionary", dicts[i].key);
        json_object_foreach((json_t *)(uintptr_t)given, name, v) {
            int k = 0;
            while (dicts[i].known[k] && strcmp(dicts[i].known[k], name) != 0) k++;
            if (!dicts[i].known[k])
                FAIL(ERR_INVAL,
                     "%s.%s: no reward manager reads it; known are max_resp_len and "
                     "overlong_buffer_cfg.{enable,len,penalty_factor,log}, and arguments of a function of your own go to "
                     "reward.custom_reward_function.reward_kwargs",
                     dicts[i].key, name);
            if (i == 0 && !dapo)
                log_note(KWARGS ".%s has no effect: reward.reward_manager.name=naive does not read it, as in verl; "
                                "the overlong penalty is the dapo manager's",
                         name);
        }
    }
    return 0;
#undef KWARGS
}

/* DAPO's penalty on long answers: reward.reward_kwargs.overlong_buffer_cfg. */
static int read_overlong(struct ppo_config *k, const struct conf *c) {
    bool enable = false;
    k->reward.max_resp_len = k->max_response_length;
    if (conf_has(c, "reward.reward_kwargs.max_resp_len"))
        TRY(conf_i64(c, "reward.reward_kwargs.max_resp_len", &k->reward.max_resp_len));
#define BUFFER "reward.reward_kwargs.overlong_buffer_cfg."
    TRY(conf_bool_opt(c, BUFFER "enable", &enable));
    if (!enable) return 0;
    TRY(conf_i64(c, BUFFER "len", &k->reward.overlong_len));
    if (k->reward.overlong_len <= 0)
        FAIL(ERR_INVAL, BUFFER "len=%lld: the tokens over which the penalty grows; set it above 0, or " BUFFER "enable=False",
             (long long)k->reward.overlong_len);
    TRY(conf_f64(c, BUFFER "penalty_factor", &k->reward.overlong_penalty_factor));
    return conf_bool_opt(c, BUFFER "log", &k->reward.overlong_log);
#undef BUFFER
}

static int read_source_weights(struct ppo_config *k, const struct conf *c) {
    const char *source;
    json_t *w;
    if (conf_is_null(c, "reward.source_weights")) return 0;
    TRY(conf_json(c, "reward.source_weights", &k->source_weights));
    json_object_foreach((json_t *)(uintptr_t)k->source_weights, source, w) if (!json_is_number(w))
        FAIL(ERR_INVAL, "reward.source_weights.%s: expected a number", source);
    return 0;
}

static int read_reward(struct ppo_config *k, const struct conf *c) {
    const char *policy = "drop_sample", *manager;
    int64_t workers;
    TRY(conf_str_opt(c, "reward.custom_reward_function.path", &k->reward.path));
    TRY(conf_str_opt(c, "reward.custom_reward_function.name", &k->reward.name));
    if (conf_has(c, "reward.custom_reward_function.reward_kwargs"))
        TRY(conf_json(c, "reward.custom_reward_function.reward_kwargs", &k->reward.kwargs));
    TRY(conf_f64(c, "reward.timeout", &k->reward.timeout_s));
    TRY(conf_i64(c, "reward.num_workers", &workers));
    k->reward.n_workers = (int)workers;
    TRY(conf_i64(c, "reward.max_concurrent", &k->reward.max_concurrent));
    TRY(conf_str(c, "reward.reward_manager.name", &manager));
    const bool dapo = strcmp(manager, "dapo") == 0;
    k->tell_rollout = strcmp(manager, "naive") == 0;
    if (!dapo && !k->tell_rollout) FAIL(ERR_INVAL, "reward.reward_manager.name=%s: expected naive or dapo", manager);
    TRY(check_reward_kwargs(c, dapo));
    if (dapo) TRY(read_overlong(k, c));
    TRY(read_source_weights(k, c));
    TRY(conf_str(c, "reward.on_error", &policy));
    if (strcmp(policy, "drop_sample") == 0) k->on_error = REWARD_DROP_SAMPLE;
    else if (strcmp(policy, "drop_group") == 0) k->on_error = REWARD_DROP_GROUP;
    else if (strcmp(policy, "stop") == 0) k->on_error = REWARD_STOP;
    else FAIL(ERR_INVAL, "reward.on_error=%s: expected drop_sample, drop_group or stop", policy);
    return 0;
}

/* A judge: verl's keys of the engine that serves it, and the two that say what is asked and what is read. */
static int read_judge(struct ppo_rm_config *r, const struct conf *c) {
#define RM "reward.reward_model."
    struct judge_args *j = &r->judge;
    int64_t top_k = -1;
    double temperature = 1, top_p = 1;
    TRY(conf_str_opt(c, RM "prompt_template", &j->prompt_template));
    if (!j->prompt_template) return 0;
    j->score_regex = "([-+]?[0-9]+(\\.[0-9]+)?)";
    j->prompt_length = j->response_length = 2048;
    j->max_rows = 8192;
    j->max_seqs = 1024;
    TRY(conf_str_opt(c, RM "score_regex", &j->score_regex));
    TRY(conf_i64_opt(c, RM "rollout.prompt_length", &j->prompt_length));
    TRY(conf_i64_opt(c, RM "rollout.response_length", &j->response_length));
    TRY(conf_i64_opt(c, RM "rollout.max_num_batched_tokens", &j->max_rows));
    TRY(conf_i64_opt(c, RM "rollout.max_num_seqs", &j->max_seqs));
    TRY(conf_f64_opt(c, RM "rollout.temperature", &temperature));
    TRY(conf_f64_opt(c, RM "rollout.top_p", &top_p));
    TRY(conf_i64_opt(c, RM "rollout.top_k", &top_k));
    if (j->prompt_length < 1 || j->response_length < 1 || j->max_rows < 1 || j->max_seqs < 1 || temperature < 0)
        FAIL(ERR_INVAL, RM "rollout: prompt_length, response_length, max_num_batched_tokens and max_num_seqs are at least 1, "
                           "temperature at least 0");
    j->temperature = (float)temperature;
    j->top_p = (float)top_p;
    j->top_k = top_k > INT32_MAX ? INT32_MAX : (int32_t)top_k;
    return 0;
}

/* Its micro-batches are cut by samples where those are given, else by the tokens of verl's engine for it. */
static int read_reward_model(struct ppo_config *k, const struct conf *c) {
    struct ppo_rm_config *r = &k->rm;
    const char *path = NULL, *template = "own";
    TRY(conf_bool(c, RM "enable", &r->enable));
    if (!r->enable) return 0;
    TRY(conf_str_opt(c, RM "model_path", &path));
    if (!path) FAIL(ERR_INVAL, RM "enable=True and no " RM "model_path: set it to the directory of the reward model");
    TRY(read_judge(r, c));
    int rc = train_model_dir(path, &r->model_dir);
    if (rc == 0) rc = model_config_load(&r->model, r->model_dir);
    if (rc == 0 && !r->judge.prompt_template) rc = model_config_make_reward(&r->model, r->model_dir);
    if (rc < 0) return err_wrap(rc, RM "model_path");
    if (r->judge.prompt_template) return 0;
    TRY(conf_str_opt(c, RM "template", &template));
    r->policy_tokens = strcmp(template, "policy") == 0;
    TRY(conf_i64_opt(c, RM "micro_batch_size_per_gpu", &r->cut.max_seqs));
    if (r->cut.max_seqs == 0) TRY(conf_i64_opt(c, RM "rollout.max_num_batched_tokens", &r->cut.max_rows));
    if (r->cut.max_seqs < 1 && r->cut.max_rows < 1)
        FAIL(ERR_INVAL, RM "rollout.max_num_batched_tokens: expected a positive number");
    r->max_length = k->max_prompt_length + k->max_response_length + (r->policy_tokens ? 0 : CHAT_SLACK);
    return conf_i64_opt(c, RM "max_length", &r->max_length);
#undef RM
}

int train_read_bytes(const char *key, const char *text, int64_t *out) {
    static const struct {
        const char *unit;
        double bytes;
    } units[] = {{"", 1}, {"B", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}};
    char *end;
    const double v = strtod(text, &end);
    while (*end == ' ') end++;
    for (size_t i = 0; end != text && i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].unit) != 0 || !(v * units[i].bytes < 0x1p62) || !(v >= 0)) continue;
        *out = (int64_t)(v * units[i].bytes);
        return 0;
    }
    FAIL(ERR_INVAL, "%s=%s: expected bytes, or a number with KiB, MiB or GiB", key, text);
}

/* trainer.profile_steps, else verl's key of the same meaning. */
static int read_profile(struct ppo_config *k, const struct conf *c) {
    const bool verl = conf_is_null(c, "trainer.profile_steps");
    if (verl) {
        if (conf_is_null(c, "global_profiler.steps")) return 0;
        return conf_f64s(c, "global_profiler.steps", k->profile_steps, MAX_PROFILE_STEPS, &k->n_profile_steps);
    }
    return conf_f64s(c, "trainer.profile_steps", k->profile_steps, MAX_PROFILE_STEPS, &k->n_profile_steps);
}

static int read_trainer(struct ppo_config *k, const struct conf *c) {
    const char *limit = NULL;
    int64_t threads = 0;
    TRY(conf_str(c, "trainer.project_name", &k->project));
    TRY(conf_str(c, "trainer.experiment_name", &k->experiment));
    TRY(conf_str(c, "trainer.default_local_dir", &k->default_local_dir));
    TRY(conf_str(c, "trainer.resume_mode", &k->resume_mode));
    TRY(conf_str_opt(c, "trainer.resume_from_path", &k->resume_from));
    TRY(conf_str_opt(c, "trainer.rollout_data_dir", &k->rollout_data_dir));
    TRY(conf_str_opt(c, "trainer.validation_data_dir", &k->validation_data_dir));
    TRY(conf_strs(c, "trainer.logger", &k->loggers, &k->n_loggers));
    TRY(conf_i64(c, "trainer.total_epochs", &k->total_epochs));
    TRY(conf_i64_opt(c, "trainer.total_training_steps", &k->total_training_steps));
    TRY(conf_i64(c, "trainer.save_freq", &k->save_freq));
    TRY(conf_i64(c, "trainer.test_freq", &k->test_freq));
    TRY(conf_i64_opt(c, "trainer.max_actor_ckpt_to_keep", &k->keep_ckpts));
    TRY(conf_bool(c, "trainer.val_before_train", &k->val_before_train));
    TRY(conf_bool(c, "trainer.val_only", &k->val_only));
    k->max_bad_steps = 3;
    TRY(conf_i64_opt(c, "trainer.max_bad_steps", &k->max_bad_steps));
    TRY(conf_i64_opt(c, "trainer.threads", &threads));
    k->threads = (int)threads;
    TRY(conf_str_opt(c, "trainer.device", &k->device));
    TRY(conf_str_opt(c, "trainer.device_memory_limit", &limit));
    if (limit) TRY(train_read_bytes("trainer.device_memory_limit", limit, &k->memory_limit));
    TRY(conf_f64(c, "trainer.deadline", &k->deadline_s));
    return read_profile(k, c);
}

int ppo_config_read(struct ppo_config *k, const struct conf *c) {
    *k = (struct ppo_config){.conf = c};
    TRY(read_data(k, c));
    TRY(read_model(k, c));
    TRY(read_algorithm(k, c));
    TRY(read_actor(k, c));
    TRY(read_rollout(k, c)); /* after actor: whether there is a reference */
    TRY(read_correction(k, c));
    TRY(read_filter(k, c));
    TRY(read_critic(k, c));
    TRY(read_offload(k, c)); /* after the optimizers and whether there is a reference */
    TRY(read_distill(k, c));
    TRY(read_reward(k, c));
    TRY(read_reward_model(k, c));
    return read_trainer(k, c);
}

void ppo_config_free(struct ppo_config *k) {
    json_decref(k->chat_kwargs);
    free(k->gdpo_weights);
    algo_user_close(k->my_adv);
    algo_user_close(k->my_loss);
    free(k->critic.model_dir);
    train_lora_free(&k->critic.lora);
    free(k->rm.model_dir);
    model_config_free(&k->rm.model);
    free(k->distill.teacher_dir);
    free(k->model_dir);
    train_lora_free(&k->lora);
    *k = (struct ppo_config){0};
}
