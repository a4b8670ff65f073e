/* actor.h - a model with what trains it, over packed sequences.
 *
 * Sequences are packed side by side without padding and cut into micro-batches
 * by samples or by tokens.  The loss is a function of the whole mini-batch's
 * normalisers, so the cut changes gradients by fp32 rounding only (DESIGN
 * invariant 3); log-probs do not change at all.
 * Used by ppo (policy, reference) and sft.  Knows nothing of rewards or files. */
#ifndef VERLC_TRAIN_ACTOR_H
#define VERLC_TRAIN_ACTOR_H

#include "model/optim/optimizer.h"
#include "train/run/micro_batch.h"

#include <stdbool.h>
#include <stdint.h>

struct actor_args {
    struct dev *dev;
    struct model *model;    /* borrowed */
    bool train;             /* gradients and optimizer state; else log-probs only */
    struct model_keep keep; /* what a training pass keeps; read when train */
    int64_t max_rows;       /* rows of the largest micro-batch */
    int64_t max_seqs;
    bool no_adapter;                  /* the base model alone (the reference); not with train */
    bool stream;                      /* the model's weights rest in host memory (MODEL_HOST_WEIGHTS); not with train */
    const struct optim_config *optim; /* train: whose state to keep; NULL: AdamW */
    int64_t list;                     /* tokens of a row's list (struct actor_list); 0: none */
    void *block;                      /* actor_block_bytes of device memory to share with another phase; NULL: own */
};
/* Device bytes of activations, batch arrays and weights on their way (not of gradients and moments). a->dev: with stream. */
size_t actor_block_bytes(const struct model_config *c, enum dtype act, const struct actor_args *a);

struct actor;
int actor_create(struct actor **out, const struct actor_args *a);
void actor_destroy(struct actor *a); /* NULL ok */
struct optim *actor_optim(struct actor *a);

/* Before the first actor_logp after another phase has used the block. */
void actor_begin(struct actor *a);

/* Log-probs of several tokens for each target (distillation): arrays (targets, k) in sequence order, k that of the actor. */
struct actor_list {
    const int32_t *id; /* distinct tokens of a target; NULL: none given */
    float *logp;       /* of these */
    int32_t *top_id;   /* the k most probable, largest first; NULL: not wanted */
    float *top_logp;   /* NULL: not wanted */
    float *dlogp;      /* of a step: d loss / d logp, filled by its loss for its range; NULL: none */
};
/* logp, entropy, sum_pi_sq (each NULL or sum of targets) in sequence order, at this temperature. */
struct actor_out {
    float *logp, *entropy, *sum_pi_sq;
    const struct actor_list *list; /* NULL: none */
};
int actor_logp(struct actor *a, const struct actor_seq *seqs, int64_t n, struct actor_cut cut, float temperature,
               struct actor_out out);

/* Called for each micro-batch of sequences [lo, hi) after its forward pass.
 * Targets of these are [t0, t1) of the mini-batch's target order. Fills dlogp
 * (and dentropy when it was asked for) of the same range: (t1 - t0) each. */
typedef int actor_loss_fn(void *arg, int64_t lo, int64_t hi, int64_t t0, int64_t t1, const float *logp, const float *entropy,
                          float *dlogp, float *dentropy);
struct actor_step_args {
    const struct actor_seq *seqs;
    int64_t n;
    struct actor_cut cut;
    float temperature;
    bool entropy;                  /* the loss reads entropy */
    bool entropy_grad;             /* and gives dentropy */
    const struct actor_list *list; /* filled before loss reads it; NULL: none */
    actor_loss_fn *loss;
    void *loss_arg;
    const struct optim_config *optim;
    double lr;
};
struct actor_step_result {
    struct optim_result optim;
    int64_t n_micro, n_rows; /* micro-batches, tokens forwarded */
};
/* One optimizer step over a mini-batch. A non-finite loss gradient or gradient
 * norm changes nothing and is reported in r->optim. */
int actor_step(struct actor *a, const struct actor_step_args *s, struct actor_step_result *r);
/* Forward and backward only: leaves gradients in actor_grads (tests, gradient checks). */
int actor_backward(struct actor *a, const struct actor_step_args *s, struct actor_step_result *r);
float *actor_grads(struct actor *a); /* (n_train) f32, device */

#endif
