/* ppo_int.h - the parts of the ppo program, private to train. */
#ifndef VERLC_TRAIN_PPO_INT_H
#define VERLC_TRAIN_PPO_INT_H

#include "algo/algo.h"
#include "ckpt/ckpt.h"
#include "data/data.h"
#include "reward/reward.h"
#include "rollout/rollout.h"
#include "text/text.h"
#include "track/track.h"
#include "train/ppo/config.h"
#include "train/run/actor.h"
#include "train/run/critic.h"
#include "train/score/reward_model.h"
#include "train/run/phases.h"
#include "train/train.h"
#include "train/run/lora_keys.h"
#include "train/run/activation_recompute.h"
#include "train/run/early_stopping.h"

#include <verlc.h>

/* ---- memory ---- */
/* The shapes of the models beside the policy; borrowed, NULL where a run has none. */
struct ppo_others {
    const struct model_config *critic, *teacher;
};
struct ppo_plan {
    /* bytes; critic: weights, master, gradients and moments */
    size_t weights, adapter, master, grads, moments, ref, teacher, critic, rm;
    size_t offload, host_limit;                                  /* bytes in host memory beside the device's, and how many may be */
    size_t rollout, update, ref_pass, teacher_pass, critic_pass; /* share one block */
    size_t block, working, system, host, total, limit;           /* working: the backend's; system: the driver's */
    struct dev_sizes sizes;                                      /* of what the backend takes */
    struct ppo_others others;
    struct model_keep keep, critic_keep; /* of the updates' activations; chosen where ppo_config leaves it to the plan */
    int64_t n_train, n_train_critic;     /* elements of an adapter, of the critic's with its head; 0: none */
    int64_t n_kv_blocks, max_seqs, max_rows_roll, max_rows_update, max_seqs_update, max_rows_ref, max_seqs_ref, max_rows_critic,
        max_seqs_critic, max_rows_teacher, max_seqs_teacher, max_len;
    struct reward_model_args rm_args; /* its sizes */
};
/* Turns offload off where the device's memory is the host's, with a note. Before the plan. */
void ppo_plan_offload(struct ppo_config *k, const struct dev *dev);
/* Sizes everything a run allocates. */
int ppo_plan_make(struct ppo_plan *p, const struct ppo_config *k, const struct model_config *m, struct ppo_others others,
                  struct dev *dev);
/* ERR_NOMEM with the nearest change that fits when it does not. */
int ppo_plan_check(const struct ppo_plan *p, const struct ppo_config *k, const struct model_config *m, struct dev *dev);
int ppo_plan_print(const struct ppo_plan *p, const struct ppo_config *k, const struct model_config *m, struct buf *out);

/* ---- the run ---- */
struct ppo {
    struct ppo_config k;
    struct ppo_plan plan;
    struct dev dev;
    struct model *policy, *reference; /* reference: NULL when no KL is used, and with an adapter */
    struct model *value_model;        /* NULL without a critic */
    struct model *teacher;            /* NULL without distillation */
    struct actor *actor, *ref_actor;  /* ref_actor: NULL when no KL is used */
    struct actor *teacher_actor;      /* NULL without distillation */
    struct critic *critic;
    void *block; /* shared by rollout, update and reference passes */
    struct rollout_decoder *decoder;
    struct tokenizer *tok;
    struct chat_template *chat;
    struct rl_dataset *train_data, *val_data;
    struct data_sampler sampler;
    struct reward *reward;
    struct reward_model *rm; /* NULL without one */
    struct track *track;
    struct stages *stages;
    struct algo_kl_ctrl kl_ctrl;
    struct metrics metrics; /* of the step being made */
    int64_t step, total_steps, bad_steps, saved_step;
    bool step_bad;            /* this step has met a gradient that is not finite */
    struct dev_memory memory; /* at the end of the step before */
    int64_t optim_done;       /* optimizer steps of both models at the end of the last whole step */
    struct early_stop early;
    char *config_yaml;
    json_t *cursor; /* data cursor at the end of the last complete step */
};

/* What include/verlc.h is about. */
struct verlc_batch {
    struct batch b;
};
struct verlc {
    struct ppo p;
    struct conf *conf;               /* of verlc_open; NULL: the caller's */
    int rc;                          /* the first failure */
    char *error;                     /* its message */
    bool started, in_step, answered; /* answered: --help, --cfg: there is nothing to run */
};

/* ---- the run ---- */
/* Never NULL; a failure is in ->rc. */
struct verlc *ppo_run_open(const struct conf *c);
int ppo_run_close(struct verlc *v); /* ->rc, with its message */
/* A validation before the first step, recorded. */
int ppo_run_validate(struct ppo *p);
/* After a whole step: cursor, validation, checkpoint, record. */
int ppo_run_finish(struct ppo *p);
/* A checkpoint. keep: how many stay on disk, <= 0: all. */
int ppo_run_save(struct ppo *p, int64_t step, int64_t keep);
/* After a failure: saves the last whole step where it is not on disk yet, and adds to the
 * error where the run can go on from. Returns rc. */
int ppo_run_end_early(struct ppo *p, int rc);

/* ---- stages ----
 * The next prompts of the training data and their samples, as ppo_generate's. */
int ppo_rollout(struct ppo *p, struct batch *out);
/* Generates sampling->n responses for each row of prompts and scores them as they
 * end. out: rows interleaved (p0 p0 p1 p1 ...) with the columns of prompts and
 *   responses i32, rollout_log_probs f32 (ragged); finish, text, reward_status (string);
 *   score f64 (NaN unless scored), reward_extra_info JSON, sample_index i64, group i64 (which
 *   prompt of this batch), seconds f64; for an estimator that needs it reward_baselines f64,
 *   the score of a greedy response (NaN unless scored), in training alone */
int ppo_generate(struct ppo *p, const struct batch *prompts, const struct ppo_sampling *sampling, uint64_t seed, bool validation,
                 struct batch *out);
/* The same for train_batch_size prompts whose samples differ, taken from the training
 * data one by one: a prompt whose samples are all alike is replaced as soon as its last
 * one is scored (algorithm.filter_groups). Which prompts are kept depends on the order
 * of the data alone, never on which sample ended first. */
int ppo_generate_filtered(struct ppo *p, struct batch *out);
/* Applies reward.on_error to rows without a score; *kept replaces b's rows. */
int ppo_reward_errors(struct ppo *p, struct batch *b);
/* reward.source_weights: multiplies the scores of a batch, and its baselines, in place. */
int ppo_reward_weights(struct ppo *p, struct batch *b);
/* Adds token_level_scores (f64 ragged): a sample's score on its last token. */
int ppo_token_scores(struct batch *b);
/* Adds old_log_probs and, where needed, sum_pi_squared (f64 ragged). */
int ppo_old_log_probs(struct ppo *p, struct batch *b);
/* Adds ref_log_prob (f64 ragged). */
int ppo_reference(struct ppo *p, struct batch *b);
/* Distillation: adds teacher_logprobs (f32) of the response tokens; of a ..._topk loss topk for each, most probable
 * first, with their teacher_ids (i32). */
int ppo_teacher(struct ppo *p, struct batch *b);
/* Adds values (f64 ragged). */
int ppo_values(struct ppo *p, struct batch *b);
/* Adds token_level_rewards, response_mask (i32), advantages, returns,
 * and with rollout correction rollout_is_weights (ragged, f64 unless said). */
int ppo_advantage(struct ppo *p, struct batch *b);
/* PF-PPO: b's rows drawn again, with replacement, by their scores. */
int ppo_pf_resample(struct ppo *p, const struct batch *b, struct batch *out);
int ppo_update(struct ppo *p, struct batch *b);
int ppo_update_critic(struct ppo *p, struct batch *b);

/* ---- distillation's part of an update ---- */
struct ppo_distill {
    int64_t k;                     /* 0: an estimator, no lists */
    const float *teacher;          /* of the mini-batch's tokens, k or 1 for each; borrowed */
    struct actor_list list;        /* of the mini-batch; arrays other than id are owned */
    struct algo_distill_sums sums; /* of the step */
};
int ppo_open_teacher(struct ppo *p);
int64_t ppo_distill_k(const struct ppo_config *k);
void ppo_distill_begin(struct ppo_distill *d, const struct ppo *p, const struct batch *mini);
void ppo_distill_end(struct ppo_distill *d);
/* A micro-batch: adds to dlogp (indexed as policy's arrays), fills d->list.dlogp of its tokens. */
int ppo_distill_loss(struct ppo_distill *d, const struct ppo *p, const struct algo_policy_args *policy, double *dlogp,
                     struct algo_metrics *m);

/* ---- shared by the stages ---- */
/* A new f64 column shaped like another one, zeros. *out is valid until the next column is added. */
int ppo_add_f64(struct batch *b, const char *name, const char *like, double **out);
/* response_mask as bytes, all 1 where the batch has no such column; caller frees. */
uint8_t *ppo_mask(const struct batch *b);
/* Rows in the order of an epoch of updates. */
void ppo_epoch_order(const struct ppo *p, bool shuffle, uint64_t seed, int64_t n, int64_t epoch, int64_t *order);
/* The rows order[n] of b; with a limit on tokens in the order of micro-batches of balanced work, which cut says from then on
 * (pack_balance). The caller frees mini and cut->ends. */
int ppo_mini_batch(struct batch *mini, struct actor_cut *cut, const struct batch *b, int64_t *order, int64_t n);
/* Sums metrics over micro-batches. */
void ppo_add_metrics(struct algo_metrics *sum, const struct algo_metrics *m);
/* A mini-batch whose gradient is not finite: its batch is saved, the step counted.
 * ERR_NUMERIC after trainer.max_bad_steps such steps in a row. */
int ppo_bad_gradient(struct ppo *p, const struct batch *mini, const struct optim_result *r);
/* Sequences of a batch for the actor; caller frees. Borrow b's columns. */
int ppo_sequences(const struct batch *b, struct actor_seq **seqs);
/* verl's data metrics (verl/trainer/ppo/metric_utils.py). */
int ppo_data_metrics(struct ppo *p, const struct batch *b);
/* Every sample of the batch to run.db. */
void ppo_record(struct ppo *p, const struct batch *b, bool validation);
int ppo_validate(struct ppo *p);
/* The batch as *dir/STEP.jsonl, *dir NULL: nothing. The step is done by then, so a
 * failure is a warning, and *dir becomes NULL. */
void ppo_dump(struct ppo *p, const struct batch *b, const char **dir);

/* ---- validation statistics (verl metric_utils.process_validation_metrics) ---- */
struct val_row { /* one scored sample */
    const char *data_source;
    int64_t uid;
    double reward;
    const json_t *extra;
};
int val_metrics(const struct val_row *rows, int64_t n, struct metrics *m);

#endif
