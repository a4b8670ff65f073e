/* config.h - a ppo run's configuration as one struct: every key that acts, read once.
 *
 * conf/keys/ppo.def says which key fills which member. Knows no stage.
 * Invariant: no other file of ppo names a key but in messages. */
#ifndef VERLC_PPO_CONFIG_H
#define VERLC_PPO_CONFIG_H

#include "agent/tool_parser/tool_parser.h"
#include "algo/advantage.h"
#include "algo/custom/user.h"
#include "algo/distillation.h"
#include "algo/pf_ppo.h"
#include "data/data.h"
#include "model/optim/optimizer.h"
#include "plan/rank_plan.h"
#include "ppo/worker/resource_pools.h"
#include "ranks/trainer_config.h"
#include "reward/reward.h"
#include "reward_model/generative_judge.h"
#include "train/lora_keys.h"
#include "train/micro_batch.h"
#include "train/optimizer_keys.h"

/* What a sampling pass needs to know. */
struct ppo_sampling {
    int64_t n;
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
    bool ignore_eos;
};

/* The critic's keys (critic.*). */
struct ppo_critic_config {
    bool enable;     /* gae, unless critic.enable says otherwise */
    char *model_dir; /* owned */
    struct train_lora lora;
    bool shares_base; /* with adapters on both of one directory: the policy's frozen weights are the critic's, on the same ranks */
    enum train_recompute recompute;
    struct micro_batch_limits update_cut, values_cut;
    const struct algo_agg_mode *agg_mode;
    double loss_scale_factor, cliprange;
    int64_t mini_batch_size, epochs, grad_chunk, context; /* mini-batch in prompts; context: as the actor's */
    bool shuffle;
    uint64_t seed; /* data_loader_seed, else trainer.seed */
    struct optim_config optim;
    int64_t actor_from; /* trainer.critic_warmup: the policy is updated from this step on */
};

/* The reward model's keys (reward.reward_model.*). */
struct ppo_rm_config {
    bool enable, policy_tokens;
    char *model_dir;           /* owned */
    struct judge_args judge;   /* generative judge: what its keys say; no prompt_template: a classifier */
    struct model_config model; /* its config.json, a classifier's as a reward model; owned */
    struct micro_batch_limits cut;
    int64_t max_length; /* of a conversation; 0: that of prompt and response, and CHAT_SLACK */
    int64_t together;   /* ranks that have it together; 0: the plan chooses */
};

/* distillation.*: a teacher's distribution on the student's own samples. */
struct ppo_distill_config {
    bool enable;
    char *teacher_dir; /* owned */
    struct algo_distill loss;
    int64_t topk;          /* tokens of a list; read by the ..._topk losses */
    bool use_task_rewards; /* added to the policy loss, weighted by coef; else alone */
    double coef;
    struct micro_batch_limits cut; /* of the teacher's passes */
};

/* algorithm.filter_groups: DAPO's dynamic sampling. */
struct ppo_filter_config {
    bool enable;
    const char *metric;                      /* reward, or a key of reward_extra_info */
    int64_t gen_batch_size, max_gen_batches; /* max_gen_batches <= 0: no limit */
};

/* PPO_PLAN: nothing is written. PPO_RUN: a C function of the user's is compiled in the run's directory, whose lock the
 * configuration then has. PPO_WORKER: the same in a worker's process, below the controller's lock. */
enum ppo_config_use { PPO_PLAN, PPO_RUN, PPO_WORKER };

/* When a step's samples are generated (docs/asynchrony.md). */
enum ppo_schedule { PPO_SYNC, PPO_ONE_STEP_OFF, PPO_FULLY_ASYNC };

/* async_training.*, rollout.*: of PPO_FULLY_ASYNC alone. Counts are of prompts. */
struct ppo_async_config {
    double staleness;
    int64_t updates; /* of a step */
    bool partial;
    int64_t max_lag;       /* -1: no bound */
    const char *replay;    /* a run.db, or NULL */
    int64_t total_prompts; /* 0: as the epochs say */
    /* derived */
    int64_t required;         /* of an update */
    int64_t most_open;        /* begun and not trained yet */
    bool recompute_log_probs; /* old log-probs, by the weights of the last exchange */
};

enum reward_policy { REWARD_DROP_SAMPLE, REWARD_DROP_GROUP, REWARD_STOP };

enum { MAX_PROFILE_STEPS = 64 };

/* Whose choices of experts an update has (docs/models.md). */
enum router_replay { ROUTER_REPLAY_OFF, ROUTER_REPLAY_R2, ROUTER_REPLAY_R3 };

/* Values as they are written, from which config.c and config_reward.c derive members below. No other file but validate_config.c
 * reads them. */
struct ppo_raw_config {
    const char *model_path, *critic_path, *rm_path, *teacher_path, *chat_template, *loss_mode, *agg_mode, *critic_agg_mode,
        *kl_loss_type, *kl_penalty, *pf_method, *reward_manager, *manager_source, *manager_path, *manager_class;
    const json_t *chat_kwargs, *gdpo_weights, *teachers;
    enum router_replay replay; /* actor.router_replay.mode */
    bool routing_replay;
    enum dtype rollout_dtype;
    bool checkpointing, critic_checkpointing, bypass_mode, calculate_log_probs, prox;
    int64_t require_batches;
    int64_t seed, data_seed, mini_seed, critic_seed;
    double clip_ratio, grad_clip, critic_grad_clip, custom_timeout, pf_weight_pow;
    struct ppo_pool_keys rollout_pool, critic_pool, teacher_pool, rm_pool;
    struct train_optim_keys optim, critic_optim;
    struct train_engine_keys engine, critic_engine;
    struct train_lora_keys lora, critic_lora;
    struct micro_batch_keys update_cut, ref_cut, logp_cut, critic_cut, values_cut; /* values_cut: dynamic is critic_cut's */
    struct algo_corr_spec corr;
    struct {
        const char *loss_mode, *policy_loss_mode;
        double loss_max_clamp, log_prob_min_clamp, clip_ratio, clip_ratio_low, clip_ratio_high;
        bool use_policy_gradient;
    } distill;
    double profile_steps[MAX_PROFILE_STEPS]; /* global_profiler.steps */
    int64_t n_profile_steps;
};

/* Slices of the configuration by verl's groups; names as in the keys. Strings are borrowed from the conf. */
struct ppo_data_config { /* data */
    const char *const *train_files, *const *val_files;
    int64_t n_train_files, n_val_files;
    const char *prompt_key, *reward_fn_key;
    int64_t train_batch_size, val_batch_size, train_max_samples, val_max_samples;
    int64_t max_prompt_length, max_response_length;
    bool shuffle, filter_overlong_prompts;
    struct data_sampler_spec sampler;
    enum data_truncation truncation;
    uint64_t seed; /* of the order of the training rows: data.seed, else trainer.seed */
    json_t *chat_kwargs;
    struct {
        const char *path, *name;
    } cls; /* custom_cls; path NULL: none */
};
struct ppo_external_config { /* actor_rollout_ref.rollout.engine_*: generation on servers */
    const char *const *urls;
    int64_t n_urls; /* 0: in this program */
    const char *kind, *weights_dir, *update_command;
    int64_t max_concurrent, n_retries;
    double timeout;
};
struct ppo_rollout_config { /* actor_rollout_ref.rollout */
    struct ppo_external_config external;
    struct ppo_sampling train, val;
    int64_t max_num_seqs, max_num_batched_tokens;
    bool prefix_cache;
    double memory_fraction;
    int64_t tensor_parallel; /* ranks that generate together; 0: the plan chooses */
    int64_t expert_parallel; /* the same, of a model with experts; 1: not asked for */
    struct micro_batch_limits logp_cut;
};
/* tokenization_sanity_check_mode: which conversations count as other tokens when they are rendered again. */
enum ppo_sanity { SANITY_STRICT, SANITY_IGNORE_SPACE, SANITY_DISABLE };
struct ppo_agent_config { /* actor_rollout_ref.rollout.multi_turn, .agent */
    bool multi_turn, need_tools_kwargs;
    const char *default_loop, *format, *truncate_side, *tool_config_path, *function_tool_path, *interaction_config_path,
        *loop_config_path, *command;
    int64_t max_assistant_turns, max_user_turns, max_parallel_calls, max_tool_response_length, tool_processes,
        max_concurrent;                   /* turns 0: no limit; max_concurrent: programs that run at a time */
    double tool_timeout, episode_timeout; /* seconds of a call, of an episode of a loop of the user */
    double turn_timeout, idle_timeout;    /* of a program: until a turn is drawn, without a request */
    bool sandbox;                         /* programs run in one, and read sandbox_dirs there */
    const char *const *sandbox_dirs;
    int64_t n_sandbox_dirs;
    enum ppo_sanity sanity;
    bool run_again;                   /* on_restart: a program that ran when the run was killed is started again */
    const struct tool_parser *parser; /* of format */
};
/* The loop of rows that name none, and how a model writes its calls: default_loop and parser. ERR_INVAL names the key. */
int ppo_agent_config_derive(struct ppo_agent_config *a);
struct ppo_ref_config { /* actor_rollout_ref.ref */
    struct micro_batch_limits cut;
    bool offload; /* its weights are in host memory */
};
struct ppo_algorithm_config { /* algorithm */
    const char *adv_estimator;
    const struct algo_adv_entry *adv;
    struct algo_user *my_adv; /* user-defined, owned; NULL: of the table */
    const json_t *adv_kwargs;
    double gamma, lam;
    bool norm_adv_by_std, use_kl_in_reward, use_pf_ppo;
    struct algo_pf_ppo pf_ppo;
    const char *const *gdpo_keys; /* gdpo: rewards by their keys in reward_extra_info, and their weights */
    double *gdpo_weights;         /* (n_gdpo) or NULL: all 1; owned */
    int64_t n_gdpo;
    bool force_old_log_prob; /* trainer.force_old_log_prob */
    bool bypass;             /* the loss corrects from the distribution that was drawn from */
    bool correct;            /* rollout_correction between old and rollout log-probs: weights, rejection, or the metrics alone */
    int64_t replay_words;    /* of a token's recorded choices of experts (router_replay_words); 0: none are replayed */
    bool replay_rollout;     /* they are recorded as the rollout ends: before the weights move */
    bool sampling_log_probs; /* a correction is from the sampler's distribution, which penalty and truncation change */
    struct algo_corr corr;
    struct ppo_filter_config filter;
    struct algo_kl_type kl_penalty;
    const char *kl_ctrl_type;
    double kl_ctrl_coef, kl_ctrl_target, kl_ctrl_horizon;
};
struct ppo_actor_config { /* actor_rollout_ref.actor */
    const struct algo_policy_entry *loss_mode;
    struct algo_user *my_loss; /* user-defined, owned; NULL: of the table */
    struct algo_policy_cfg policy;
    const struct algo_agg_mode *agg_mode;
    double loss_scale_factor, entropy_coeff, kl_loss_coef;
    bool use_kl_loss, shuffle, calculate_entropy;
    struct algo_kl_type kl_loss_type;
    enum router_replay replay;
    int64_t replay_words; /* as algorithm's */
    struct micro_batch_limits update_cut;
    int64_t mini_batch_size, epochs; /* mini-batch in prompts */
    int64_t grad_chunk;              /* micro-batches whose gradients are summed first */
    int64_t expert_parallel;         /* above 1: updates have the experts on their ranks; else as the plan chooses */
    int64_t context;                 /* parts of a micro-batch's rows (model/parallel/context_parallel.h); 1: not cut */
    uint64_t seed;                   /* data_loader_seed, else trainer.seed */
    struct optim_config optim;
};
struct ppo_reward_config { /* reward */
    struct reward_args args;
    bool extra_agent_loop, extra_turns, extra_scores, extra_experiment; /* what a manager adds to extra_info (reward.c) */
    bool trial_call;                                                    /* of the scorer, before the run */
    bool own_manager;                                                   /* a class of the user's scores */
    const char *manager_path, *manager_names[2]; /* its file, NULL: the scorer's; its name, first that to try */
    enum reward_policy on_error;
    const json_t *kwargs;
    const json_t *source_weights; /* {data source: factor}, or NULL */
};
struct ppo_output_config { /* trainer, global_profiler: what is written in addition to metrics and checkpoints */
    const char *rollout_data_dir, *validation_data_dir;
    int64_t log_val_generations;
    double profile_steps[MAX_PROFILE_STEPS]; /* whole numbers */
    int64_t n_profile_steps;
};

/* Numbers that follow from the slices, computed once. */
struct ppo_sizes {
    int64_t samples;                       /* of a step */
    int64_t mini_batch, critic_mini_batch; /* samples */
    int64_t max_len;                       /* tokens of a prompt and its response */
    int64_t open_prompts;                  /* in generation at once */
};

/* The configuration, constant once it is read. */
struct ppo_config {
    const struct conf *conf;
    struct ppo_raw_config raw;
    enum ppo_config_use use;
    struct ppo_data_config data;
    struct train_model_config model; /* actor_rollout_ref.model */
    struct ppo_rollout_config rollout;
    struct ppo_agent_config agent;
    struct ppo_ref_config ref;
    struct ppo_algorithm_config algorithm;
    struct ppo_actor_config actor;
    struct ppo_critic_config critic;
    struct ppo_distill_config distill;
    struct ppo_reward_config reward;
    struct ppo_rm_config rm;
    struct trainer_config trainer;
    struct ppo_output_config output;
    enum weight_layout layout; /* trainer.layout: of several ranks, as requested */
    enum ppo_schedule schedule;
    struct ppo_async_config async;
    struct ppo_sizes sizes;
};
/* The keys as they are written, strings and JSON borrowed; nothing to free. */
int ppo_config_fill(struct ppo_config *k, const struct conf *c);
/* Fills, checks the rules between keys, derives. ERR_INVAL names the key; ERR_INPUT, ERR_FORMAT: a
 * directory or file that a key names; ERR_IO: another run has the directory. The caller frees *out after an error too. */
int ppo_config_read(const struct ppo_config **out, const struct conf *c, enum ppo_config_use use);
void ppo_config_free(const struct ppo_config *k); /* NULL ok */
void ppo_config_sizes(struct ppo_config *k);      /* by ppo_config_read */
/* ---- validate_config.c: verl's rules between keys, of k as ppo_config_fill and ppo_config_sizes leave it ---- */
/* validate_config of verl/utils/config.py: batch sizes that divide, micro-batch sizes set once, modes that exist. ERR_INVAL. */
int ppo_validate_config(const struct ppo_config *k);
int ppo_validate_critic_config(const struct ppo_config *k); /* of it what is about a critic */
/* The weights of the models that keys name by a hub id, where the local cache lacks them (run_model_dir). Before a run,
 * after its configuration was found good. */
int ppo_config_fetch(const struct ppo_config *k);
/* What the pools' keys request in addition to the trainer's ranks. */
struct train_pool_devices ppo_config_pool_devices(const struct ppo_config *k);
/* Assigns p's ranks to the pools that keys request. Too few ranks: no pools, and a note. launched: a launcher set the number of
 * ranks. */
void ppo_config_pools(const struct ppo_config *k, bool launched, struct ppo_placement *p);
/* A judge that is served: a scorer of the user's calls it. Else a reward model scores samples. */
static inline bool ppo_serves_judge(const struct ppo_rm_config *k) { return k->enable && k->judge.serve; }
static inline bool ppo_scores_by_model(const struct ppo_rm_config *k) { return k->enable && !k->judge.serve; }

/* The slices that say what is on devices, for a worker and its plan. By value where one of them decides what keys leave open: a
 * worker the offload that its device has and the steps of the optimizers, a plan what would fit instead. */
struct ppo_worker_config {
    const struct conf *conf;
    const struct ppo_data_config *data;
    const struct ppo_distill_config *distill;
    const struct trainer_config *trainer;
    const struct ppo_sizes *sizes;
    struct train_model_config model;
    struct ppo_rollout_config rollout;
    struct ppo_ref_config ref;
    struct ppo_actor_config actor;
    struct ppo_critic_config critic;
    struct ppo_rm_config rm;
    struct ppo_placement ranks;
    enum weight_layout layout;
    enum ppo_schedule schedule;
    bool has_ref; /* log-probs of a reference are needed; with an adapter they are the policy's without it */
};
struct ppo_worker_config ppo_worker_config(const struct ppo_config *k, const struct ppo_placement *ranks); /* borrows of k */
/* Whether this process' ranks have an engine: they generate, and not servers in their place. */
static inline bool ppo_has_engine(const struct ppo_worker_config *k) {
    return ppo_does(&k->ranks, PPO_ROLLOUT) && k->rollout.external.n_urls == 0;
}
/* Whether the critic's frozen weights are the policy's on the same ranks. */
static inline bool ppo_critic_shares(const struct ppo_worker_config *k) {
    return k->critic.shares_base && k->ranks.pools.n[PPO_CRITIC] == 0;
}

#endif
