/* verlc.h - the dataflow of a training run as a short C program.
 *
 * A run is what a configuration describes: the worker groups (the actor, which also
 * generates; its frozen reference; a critic), the data, the scorer, checkpoints and
 * trackers.  A batch is named columns over samples and goes from stage to stage; a
 * stage reads some columns and adds others.  `verlc ppo` itself is a program of these
 * calls (src/ppo/ppo.c), and examples/ has four more.
 *
 * Errors stick: after the first failure every call on that run returns the same
 * negative code and does nothing, verlc_begin_step is false, and verlc_close prints what
 * happened.  So a program may leave the codes unread.  What a failed step computed is
 * dropped; the last whole step is saved, and the same command line goes on from there.
 *
 * One thread, one run at a time.  Link with -lverlc and what verlc.pc says. */
#ifndef VERLC_H
#define VERLC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the run ---- */
struct verlc;

/* argv are keys as `verlc ppo` takes them, argv[0] left out; own: keys of this program,
 * NULL-terminated, which argv may override; NULL: none.  Never NULL: a failure is said
 * by verlc_close.  --help and --cfg job are answered, and the run has no steps. */
struct verlc *verlc_open(const char *const *own, int argc, char **argv);
/* The exit status of the program (README), after printing the error if there was one. */
int verlc_close(struct verlc *v);
/* The first failure's code, or 0. */
int verlc_failed(const struct verlc *v);

/* The worker groups, verl's roles. */
enum verlc_role {
    VERLC_ACTOR,   /* the policy: generates and learns */
    VERLC_REF,     /* its start, frozen; there when a KL term uses it */
    VERLC_CRITIC,  /* values; there with adv_estimator=gae or critic.enable */
    VERLC_TEACHER, /* of distillation, frozen; there with distillation.enabled */
};
bool verlc_has(const struct verlc *v, enum verlc_role role);

/* Begins the next step; false at the end, after early stopping and after a failure.
 * Before the first one comes trainer.val_before_train's validation. */
bool verlc_begin_step(struct verlc *v);
int64_t verlc_step(const struct verlc *v);      /* counts from 1 */
int64_t verlc_last_step(const struct verlc *v); /* of the run, unless it stops early */

/* ---- batches ---- */
struct verlc_batch;
struct verlc_batch *verlc_batch_create(void); /* empty; a stage fills it, and empties it before */
void verlc_batch_free(struct verlc_batch *b); /* NULL ok */

/* One column: sample i owns the elements off[i] .. off[i + 1) of the array that is not
 * NULL.  A column of one number a sample has off[i] == i.  The numbers may be written;
 * they are the batch's and valid until a column is added or the batch is filled again. */
struct verlc_column {
    int64_t n;          /* samples */
    const int64_t *off; /* n + 1 */
    int32_t *i32;
    int64_t *i64;
    float *f32;
    double *f64;
    char **str;            /* UTF-8; a text may hold NUL: */
    const size_t *str_len; /* bytes of each */
};
/* A failure: the batch has no such column, or it holds JSON values. */
int verlc_column(struct verlc *v, const struct verlc_batch *b, const char *name, struct verlc_column *out);
/* A new column of doubles, each `value`, in the shape of the column `like`; replaces a column of doubles
 * of that name. */
int verlc_add_column(struct verlc *v, struct verlc_batch *b, const char *name, const char *like, double value);
/* out: the n rows of b, in this order, as copies. */
int verlc_select(struct verlc *v, const struct verlc_batch *b, const int64_t *rows, int64_t n, struct verlc_batch *out);

/* ---- samples of one step that a later one trains ---- */
/* b, as it is at verlc_end_step, goes into that step's checkpoint, so that a resumed run has it: asynchronous schedules hold
 * samples over. Borrowed until the next call; NULL: none. */
int verlc_carry(struct verlc *v, const struct verlc_batch *b);
/* Once, after verlc_open: fills b with what the checkpoint has that the run goes on from; false: nothing. */
bool verlc_carried(struct verlc *v, struct verlc_batch *b);

/* ---- stages, in the order of a step ---- */
/* The next data.train_batch_size prompts, rollout.n samples of each, scored as they end:
 * prompts, responses (i32 tokens), rollout_log_probs (f32; of the full softmax at the temperature; with
 * algorithm.rollout_correction and top-p, top-k, min-p or a repetition penalty also
 * sampling_log_probs, of what these leave), score (f64, one a sample),
 * param_versions (i32: how many steps had updated the policy that drew each token),
 * token_bytes (i32: bytes of text that came with each token), group (i64: which prompt of the batch), text,
 * with tools segments (i32, pairs: tokens, and 0 for the policy's or 1 for an environment's, which no stage trains),
 * reward_status and reward_message, uid and data_source (string: the data's column data.reward_fn_key).  The
 * further columns of the data go along under names of their own, so that none of them can meet a stage's; compute_score
 * finds extra_info, as in verl.  With algorithm.filter_groups useless prompts are replaced meanwhile. */
int verlc_rollout(struct verlc *v, struct verlc_batch *b);
/* The same in two calls of one step, by the weights of the first. Where ranks of their own generate (rollout.n_gpus_per_node of
 * --config-name=one_step_off_ppo_trainer) it is overlapped with the calls between them; else it is done when verlc_rollout_start
 * returns. The samples are the same. */
int verlc_rollout_start(struct verlc *v);
int verlc_rollout_wait(struct verlc *v, struct verlc_batch *b);
/* Drops what has no score (reward.on_error), weighs sources; token_level_scores. */
int verlc_reward(struct verlc *v, struct verlc_batch *b);
/* VERLC_ACTOR: old_log_probs.  While the policy has not moved they are the rollout's, bit
 * for bit, and cost nothing; samples of an earlier step's rollout (param_versions) take a forward pass, unless
 * algorithm.rollout_correction.bypass_mode takes the rollout's all the same.  VERLC_REF: ref_log_prob.
 * VERLC_TEACHER: teacher_logprobs, of a ..._topk loss also teacher_ids. */
int verlc_log_probs(struct verlc *v, enum verlc_role role, struct verlc_batch *b);
/* The critic's: values. */
int verlc_values(struct verlc *v, struct verlc_batch *b);
/* algorithm.adv_estimator: token_level_rewards, response_mask, advantages, returns. Where rollout correction rejects tokens also
 * loss_mask: response_mask before; the denominators of losses count it (those of asynchronous configurations response_mask). */
int verlc_advantage(struct verlc *v, struct verlc_batch *b);
/* algorithm.pf_ppo: rows of b drawn again by their scores. */
int verlc_resample(struct verlc *v, const struct verlc_batch *b, struct verlc_batch *out);
/* ppo_epochs over b in mini-batches.  VERLC_ACTOR reads old_log_probs and advantages, with
 * actor.use_kl_loss ref_log_prob, with distillation teacher_logprobs, and does nothing before trainer.critic_warmup; it adds
 * entropys (f32: the policy's when it first met a token). VERLC_CRITIC reads values and returns. */
int verlc_update(struct verlc *v, enum verlc_role role, struct verlc_batch *b);
/* Ends the step: metrics and samples of b, validation, and a checkpoint when trainer.test_freq
 * and save_freq say so. */
int verlc_end_step(struct verlc *v, struct verlc_batch *b);
/* A checkpoint of the last whole step now, where there is none of it yet; between steps. */
int verlc_save(struct verlc *v);

#ifdef __cplusplus
}
#endif
#endif
