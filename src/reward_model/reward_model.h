/* reward_model.h - scores of finished responses by a second model during generation: one with a
 * sequence-classification head, a micro-batch at a time, or a generative judge (generative_judge.h).
 *
 * The conversation (prompt and answer) is rendered through the reward model's own chat template and tokenised by its
 * own tokenizer, as verl does, so the two models need not share one; or the policy's tokens are scored as they are.
 * Knows nothing of rewards by rule, of groups or of advantages.
 * Invariant: a score depends on its own conversation alone, not on the micro-batch it was in. */
#ifndef VERLC_REWARD_MODEL_H
#define VERLC_REWARD_MODEL_H

#include "reward/reward.h"
#include "reward_model/generative_judge.h"
#include "text/text.h"
#include "train/micro_batch.h"

struct reward_model_args {
    struct dev *dev;
    const char *dir; /* ForSequenceClassification directory with one label */
    enum dtype act;
    struct micro_batch_limits cut;      /* of the micro-batches */
    int64_t max_rows, max_seqs;         /* of the largest one */
    int64_t max_len;                    /* tokens of a conversation; a longer one gets no score */
    bool policy_tokens;                 /* score prompt and response ids as they are; ERR_INPUT: another tokenizer */
    const struct tokenizer *policy_tok; /* borrowed */
    struct comm *comm;                  /* as judge_args has them */
    int together;
    struct judge_args judge; /* where one is wanted: a judge; dir to together are not read */
};
/* Device bytes: weights, then activations and batch arrays. c was prepared by model_config_make_reward, except a judge's. */
size_t reward_model_bytes(const struct model_config *c, const struct reward_model_args *a);

struct reward_model;
int reward_model_create(struct reward_model **out, const struct reward_model_args *a);
void reward_model_destroy(struct reward_model *r); /* NULL ok */

struct reward_model_sample { /* borrowed for the call */
    const json_t *messages;  /* of the prompt */
    const int32_t *prompt, *response;
    int64_t n_prompt, n_response;
    struct judge_sample judge; /* read by a judge alone */
};
int reward_model_submit(struct reward_model *r, const struct reward_model_sample *s, int64_t tag);
/* Scores one micro-batch where enough samples wait for one, or, with flush, any. 1: it did. */
int reward_model_step(struct reward_model *r, bool flush);
/* 1: *tag and *out are one finished sample; the caller frees *out. REWARD_MISSING: longer than max_len;
 * REWARD_CRASH: the template refused it, or its score is not finite. */
int reward_model_poll(struct reward_model *r, int64_t *tag, struct reward_result *out);
/* Of ranks that have it together the first one is given samples, and ends a run of steps; the others compute with it, until that
 * end. Else: nothing. */
int reward_model_pause(struct reward_model *r);
int reward_model_follow(struct reward_model *r);
int64_t reward_model_pending(const struct reward_model *r); /* waiting, or finished and not polled */
void reward_model_drop(struct reward_model *r);             /* forgets all of them */

#endif
