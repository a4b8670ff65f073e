/* critic.h - a value model with what trains it, over packed sequences: the mirror
 * of actor.h.
 *
 * The value of target t is that of the state before it, V(ids[<t]): one for each
 * target of each sequence, in sequence order.  The loss is a function of the whole
 * mini-batch's normalisers, so the cut into micro-batches changes gradients by
 * fp32 rounding only, values not at all.
 * Knows nothing of rewards, returns or files. */
#ifndef VERLC_TRAIN_CRITIC_H
#define VERLC_TRAIN_CRITIC_H

#include "model/optim/optimizer.h"
#include "train/run/micro_batch.h"

struct critic_args {
    struct dev *dev;
    struct model *model;              /* with a value head and an fp32 master; borrowed */
    struct model_keep keep;           /* keep.train */
    const struct optim_config *optim; /* which optimizer; NULL: AdamW */
    int64_t max_rows;                 /* rows of the largest micro-batch, of values or of the update */
    int64_t max_seqs;
    void *block; /* critic_block_bytes of device memory to share with another phase; NULL: own */
};
/* Device bytes of activations and batch arrays (not of gradients and moments). */
size_t critic_block_bytes(const struct model_config *c, enum dtype act, const struct critic_args *a);

struct critic;
int critic_create(struct critic **out, const struct critic_args *a);
void critic_destroy(struct critic *c); /* NULL ok */
struct optim *critic_optim(struct critic *c);
float *critic_grads(struct critic *c); /* (n_train) f32, device */

/* values: sum of targets. */
int critic_values(struct critic *c, const struct actor_seq *seqs, int64_t n, struct actor_cut cut, float *values);

/* Called for each micro-batch of sequences [lo, hi) after its forward pass; their
 * targets are [t0, t1) of the mini-batch. Fills dvpreds: (t1 - t0). */
typedef int critic_loss_fn(void *arg, int64_t lo, int64_t hi, int64_t t0, int64_t t1, const float *vpreds, float *dvpreds);
struct critic_step_args {
    const struct actor_seq *seqs;
    int64_t n;
    struct actor_cut cut;
    critic_loss_fn *loss;
    void *loss_arg;
    const struct optim_config *optim;
    double lr;
};
/* One optimizer step over a mini-batch. A non-finite loss gradient or gradient
 * norm changes nothing and is reported in r. */
int critic_step(struct critic *c, const struct critic_step_args *s, struct optim_result *r);
/* Forward and backward only: leaves gradients in critic_grads. */
int critic_backward(struct critic *c, const struct critic_step_args *s, struct optim_result *r);

#endif
