/* stages.h - the stages of a ppo step, one file each: from prompts to a new policy.
 *
 * A stage reads and adds columns of a batch. It knows the worker that has the device, and the run that it reports to; its slice of
 * the configuration is an argument, as is what else it needs.
 * Invariant: no stage sees the whole configuration. */
#ifndef VERLC_PPO_STAGES_H
#define VERLC_PPO_STAGES_H

#include "algo/kl_controller.h"
#include "ppo/worker/worker.h"
#include "run/run.h"

struct stage {
    struct worker *worker;
    struct run *run;
    struct ppo_scorer *scorer; /* the worker's; NULL where nothing is scored */
    uint64_t seed;             /* trainer.seed */
    enum ppo_schedule schedule;
};

/* ---- rollout.c, dynamic_sampling.c: prompts -> samples with scores ---- */
/* What generation reads, and its scorers. */
struct generation {
    const struct tokenizer *tok;
    struct reward *reward;
    const struct rl_dataset *data; /* of training; its order is the run's sampler */
    struct pool *threads;          /* decode samples that end together */
    struct agents *agents;         /* of rows with several turns (agent_loop.h) */
    const struct ppo_rollout_config *rollout;
    const struct ppo_data_config *rows;
    const struct ppo_algorithm_config *algorithm;
    const struct ppo_reward_config *scores; /* NULL: samples are not scored, and reward, data and rm are not read */
    const struct ppo_rm_config *rm;
    bool critic_idle; /* the ranks that generate have the critic too */
};
/* The next prompts of the training data and their samples, as ppo_generate's. With algorithm.filter_groups prompts
 * are taken one by one: one whose samples are all alike is replaced as soon as its last one is scored. Which prompts
 * are kept depends on the order of the data alone, never on which sample ended first. */
int ppo_rollout(const struct stage *s, const struct generation *g, struct batch *out);
/* The same in two parts of one step. Where generation has ranks of its own it is overlapped with the stages between the two; else
 * it is done when start returns. s, g: borrowed; wait and drop free *out. */
struct rollout_async;
int ppo_rollout_start(const struct stage *s, const struct generation *g, struct rollout_async **out);
int ppo_rollout_wait(struct rollout_async *a, struct batch *out);
void ppo_rollout_drop(struct rollout_async *a); /* NULL ok */
/* The version of the policy's weights before this step's updates: how many steps have updated it. */
static inline int32_t ppo_version(const struct stage *s) { return (int32_t)(s->run->step - 1); }
/* Whether the policy of before this step's updates drew every token of b that a policy wrote (column param_versions; without it:
 * yes). */
bool ppo_on_policy(const struct stage *s, const struct batch *b);
/* Generates sampling->n responses for each row of prompts and scores them as they
 * end. out: rows interleaved (p0 p0 p1 p1 ...) with the columns of prompts and
 *   responses i32, rollout_log_probs f32, param_versions i32 (ragged; of the weights that drew each token), with rollout
 *   correction of a sampler with penalty or truncation
 *   sampling_log_probs f32 (ragged): over what it draws from; token_bytes i32 (ragged): bytes of text that came with each
 *   token; finish, text, reward_status, reward_message (string; the last "" for a score);
 *   score f64 (NaN unless scored), reward_extra_info JSON, sample_index i64, group i64 (which
 *   prompt of this batch), seconds f64, ended f64 (wall clock); for an estimator that needs it reward_baselines f64,
 *   the score of a greedy response (NaN unless scored), in training alone; where rows of the data have several turns segments,
 *   episode JSON (agent/tool_agent.h), num_turns i64, num_tool_calls i64, tool_seconds f64 */
struct ppo_generate_args {
    const struct batch *prompts;
    const struct ppo_sampling *sampling;
    uint64_t seed;
    bool validation;
};
int ppo_generate(const struct stage *s, const struct generation *g, const struct ppo_generate_args *a, struct batch *out);

/* ---- reward.c ---- */
/* How many rows of b ended without a score, by reason, as metrics prefix + "timeout", "crash", ... */
void ppo_reward_counts(struct metrics *m, const struct batch *b, const char *prefix);
/* What scores by rule or by the user's Python, as the configuration says; g: with data and its slices. config: the whole, as JSON
 * for a manager of the user's; tokenizer: the policy's directory; judge_address: of the judge that the
 * run serves, or NULL; deadline_s: of a stage. */
struct score_open_args {
    const struct generation *g;
    const json_t *config;
    const char *tokenizer, *experiment, *judge_address;
    double deadline_s;
};
int ppo_reward_open(struct reward **out, const struct score_open_args *a);
/* An episode of several samples (BATCH_SESSION) is scored by its last one: what came of that goes to the others (verl's
 * trainer/ppo/v1/agent_loop_tq.py). */
void ppo_share_scores(struct batch *b);
/* The same first; then applies reward.on_error to rows without a score, which replaces b's
 * rows, and reward.source_weights; adds
 * token_level_scores (f64 ragged): a sample's score on its last token. *dropped: the rows that b has lost, for the caller. */
int ppo_reward(const struct stage *s, const struct ppo_reward_config *k, struct batch *b, struct batch *dropped);

/* ---- log_probs.c, distillation.c, update_critic.c: passes ---- */
/* Adds old_log_probs and, where needed, sum_pi_squared (f64 ragged). */
int ppo_old_log_probs(const struct stage *s, const struct ppo_algorithm_config *k, struct batch *b);
/* What rollout correction takes as the rollout's: sampling_log_probs where they are, else rollout_log_probs. */
const struct batch_col *ppo_sampling_log_probs(const struct batch *b);
/* Columns that idle ranks have computed while others still generated (idle_ranks.h). */
#define PPO_REF_PRECOMPUTED "ref_log_prob_precomputed"
#define PPO_VALUES_PRECOMPUTED "values_precomputed"
/* Which experts each token of prompt and response had, where an update replays it: verl's name; router_replay_words of each. */
#define PPO_ROUTES "routed_experts"
/* Adds them, by the policy as it is, which has to be the one that generated: its choices are the rollout's (invariant 1). */
int ppo_record_routes(const struct stage *s, int64_t words, struct batch *b);
/* One number a token of all responses: a frozen role's log-probs, or the critic's values. precomputed: one of the columns above,
 * which is removed from the batch; the other rows take a forward pass. */
int ppo_numbers(const struct stage *s, enum verlc_role role, struct batch *b, const char *precomputed, float *out);
/* Adds ref_log_prob (f64 ragged). */
int ppo_reference(const struct stage *s, struct batch *b);
/* Distillation: adds teacher_logprobs (f32) of the response tokens; of a ..._topk loss topk for each, most probable
 * first, with their teacher_ids (i32). */
int ppo_teacher(const struct stage *s, const struct ppo_distill_config *c, struct batch *b);
/* Adds values (f64 ragged). */
int ppo_values(const struct stage *s, struct batch *b);

/* ---- advantage.c ---- */
/* Adds token_level_rewards, response_mask (i32), advantages, returns, and with rollout correction rollout_is_weights and, where
 * it rejects tokens, loss_mask (i32): response_mask before (ragged, f64 unless said). */
int ppo_advantage(const struct stage *s, const struct ppo_algorithm_config *k, struct algo_kl_ctrl *kl, struct batch *b);
/* PF-PPO: b's rows drawn again, with replacement, by their scores. */
int ppo_pf_resample(const struct stage *s, const struct ppo_algorithm_config *k, const struct batch *b, struct batch *out);

/* ---- update_actor.c, update_critic.c ---- */
/* The first adds entropys (f32 ragged, verl's name): of the policy at a token's first forward pass, NaN without one. */
extern const struct worker_update ppo_update_actor, ppo_update_critic;

/* ---- distillation.c: its part of the actor's loss ---- */
struct distill_batch {
    int64_t k, vocab;        /* k 0: an estimator, no lists */
    const float *teacher;    /* of the mini-batch's tokens, k or 1 for each; borrowed */
    struct token_lists list; /* of the mini-batch; arrays other than id are owned */
};
void ppo_distillation_begin(struct distill_batch *d, const struct ppo_distill_config *c, int64_t vocab, const struct batch *mini);
void ppo_distillation_end(struct distill_batch *d);
/* A micro-batch: adds to dlogp (indexed as policy's arrays) and to *loss, fills d->list.dlogp of its tokens. */
int ppo_distillation_loss(struct distill_batch *d, const struct ppo_distill_config *k, const struct algo_policy_args *policy,
                          double *loss, double *dlogp, struct algo_metrics *m);

/* ---- batches, shared by the stages (mini_batch.c) ---- */
/* A new f64 column shaped like another one, zeros. *out is valid until the next column is added. */
int ppo_add_f64(struct batch *b, const char *name, const char *like, double **out);
/* The same of i32 or f32, or of k elements for each of its elements; data NULL: zeros. */
int ppo_add_like(struct batch *b, const char *name, enum batch_type type, const char *like, int64_t k, const void *data);
/* A column from one number for each response token; ERR_NUMERIC where one is not finite. */
int ppo_add_numbers(struct batch *b, const char *name, const float *v);
/* response_mask or loss_mask as bytes, from the segments where the batch has no such column; caller frees. */
uint8_t *ppo_mask(const struct batch *b, const char *name);
/* 1 for the tokens that the policy wrote, rejected ones too; caller frees. */
uint8_t *ppo_policy_mask(const struct batch *b);
/* The f64 array of a column, or NULL. */
double *ppo_column(const struct batch *b, const char *name);
/* Sequences of a batch, whose targets are the responses' tokens; one block that the caller frees. */
int ppo_sequences(const struct batch *b, struct packed_seq **seqs);

/* The stage of a worker_update, in the process that has the device. */
static inline struct stage ppo_update_stage(struct worker *w, struct run *run) {
    const struct ppo_worker_config *const k = ppo_worker_slices(w);
    return (struct stage){.worker = w, .run = run, .seed = k->trainer->seed, .schedule = k->schedule};
}
/* What mini-batches are made of, and what is written of one whose gradient is not finite. */
#define PPO_MINI_READS                                                                                                        \
    "prompts", "responses", "response_mask", "loss_mask", "old_log_probs", "ref_log_prob", "advantages", "values", "returns", \
        "uid", "score", BATCH_SEGMENTS
/* An update's stage, and the mini-batch that is under way. */
struct ppo_mini {
    const struct stage *s;
    enum verlc_role role;
    const struct ppo_worker_config *k;
    const struct batch *whole;
    micro_loss_fn *loss; /* its argument, and that of report, is this struct */
    micro_record_fn *report;
    int n_work;          /* arrays of a number for each token that the loss works with */
    struct algo_agg agg; /* mode and factor are the caller's */
    /* the mini-batch: its rows, in the order of its micro-batches */
    struct batch b;
    struct packed_seq *seqs;
    uint8_t *mask, *policy; /* ppo_mask, ppo_policy_mask */
    const int64_t *off;     /* of responses */
    const int64_t *rows;    /* of whole */
    int64_t n_tokens;
    double *work; /* (n_work, n_tokens), zeros */
    struct distill_batch distill;
    /* the stage so far */
    struct update_metrics metrics;
    struct update_result result;
    int64_t done, total; /* samples, for the progress */
};
/* The stage: u's rows are those of mini->whole; u has the optimizer and the cut. Sets the role's metrics, with the next
 * step's rate. */
int ppo_mini_run(struct ppo_mini *mini, struct update *u, double next_lr);
/* By the loss: its metrics to the end of the micro-batch's record. Frees m. */
int ppo_mini_record(const struct micro_loss *x, struct algo_metrics *m);
/* Reports a micro-batch that is done: the metrics that its record (n bytes) ends with, under verl's names for the role, and the
 * progress. ERR_SIGNAL as run_check_stop. */
int ppo_mini_reported(void *mini, const struct pack_micro *x, const void *record, size_t n);

/* ---- metrics.c, validation.c ---- */
/* verl's data metrics (verl/trainer/ppo/metric_utils.py). */
int ppo_data_metrics(const struct stage *s, const struct ppo_data_config *k, const struct batch *b);
/* episode_metrics.c: of conversations with tools (BATCH_EPISODE) agent_loop/tool_errors/mean and others; without them nothing. */
void ppo_episode_metrics(struct metrics *m, const struct batch *b);
/* verl's num_turns of its samples as PREFIXnum_turns/min, max and mean. */
void ppo_turn_metrics(struct metrics *m, const struct batch *b, const char *prefix);
/* Every sample of the batch to run.db, and as traces those that actor_rollout_ref.rollout.trace selects. */
/* sp: what drew its samples. */
void ppo_record(const struct stage *s, const struct tokenizer *tok, const struct batch *b, const struct ppo_sampling *sp,
                bool validation);
/* ---- rollout_trace.c ---- */
/* Which rows are traced, caller frees; NULL: none. All samples of max_samples_per_step_per_worker prompts, which seed and
 * step choose. */
bool *ppo_traced_rows(const struct stage *s, const struct batch *b);
struct ppo_trace_args {
    const struct tokenizer *tok;
    const struct batch *b;
    int64_t row;
    const struct ppo_sampling *sp;
    struct buf *prompt, *response; /* hold the texts */
};
/* Adds what only a trace has of a row to x: times, sampling parameters (borrowed), texts. */
void ppo_trace_row(const struct stage *s, const struct ppo_trace_args *a, struct track_sample *x);

/* The batch as *dir/STEP.jsonl, *dir NULL: nothing. The step is done by then, so a
 * failure is a warning, and *dir becomes NULL. */
void ppo_dump(const struct stage *s, const struct tokenizer *tok, const struct batch *b, const char **dir);
/* shown: samples of it as a table (trainer.log_val_generations). */
int ppo_validate(const struct stage *s, const struct generation *g, const struct rl_dataset *data, int64_t shown,
                 const char **dump_dir);

/* ---- validation statistics (verl metric_utils.process_validation_metrics) ---- */
struct val_row { /* one scored sample */
    const char *data_source;
    int64_t uid;
    double reward;
    const json_t *extra;
};
int validation_metrics(const struct val_row *rows, int64_t n, struct metrics *m);
/* verlc's pass@k: the chance that k of n samples, drawn without replacement, have one of the c that pass, 1 - C(n-c,k) / C(n,k).
 * Its mean over prompts is an unbiased estimate; verl's best@k draws with replacement. 0 <= c <= n, 1 <= k <= n. */
double validation_pass_at_k(int64_t n, int64_t c, int64_t k);

#endif
