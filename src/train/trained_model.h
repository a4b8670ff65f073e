/* trained_model.h - a model with what trains it, over packed sequences: weights, activations, gradients, optimizer.
 *
 * The head's output for a target (a token of a sequence) is its log-prob, on request with its entropy and the log-probs of
 * other tokens; with a value head, the value of the state before it.
 * Sequences are packed side by side without padding and cut into micro-batches.  The loss is a function of the whole
 * mini-batch's normalisers, so the cut changes gradients by fp32 rounding only (DESIGN invariant 3), log-probs and
 * values not at all.  Used by policy, reference, teacher, critic and sft.  Knows nothing of rewards or files. */
#ifndef VERLC_TRAIN_TRAINED_MODEL_H
#define VERLC_TRAIN_TRAINED_MODEL_H

#include "model/optim/optimizer.h"
#include "model/parallel/expert_dispatch.h"
#include "model/parallel/weight_streaming.h"
#include "train/gradient_all_reduce.h"
#include "train/micro_batch.h"
#include "train/router_balance.h"

#include "base/buf.h"

#include <stdbool.h>
#include <stdint.h>

struct trained_model_args {
    struct dev *dev;
    struct model *model;    /* borrowed */
    bool train;             /* gradients and optimizer state; else forward passes only */
    struct model_keep keep; /* what a training pass keeps; keep.context: ranks that share the rows of all passes, else alone */
    int64_t parts; /* train: of a micro-batch, a summand of the gradient each (parallel/context_parallel.h); 0: 1. keep.context is
                      the same number, or all ranks where they are fewer; 0: there is one rank, which has all parts */
    const struct trained_model *shares; /* of as many ranks that share rows: their groups are this one's too; NULL: its own */
    int64_t max_rows;                   /* rows of the largest micro-batch */
    int64_t max_seqs;
    int64_t grad_chunk;                  /* train: consecutive micro-batches whose gradients are summed first; 0: 1 */
    struct router_losses routers;        /* train: what routers add to the loss */
    bool routes;                         /* passes record or replay choices of routers */
    bool no_adapter;                     /* the base model alone (the reference); not with train */
    enum model_stream_from stream;       /* where the model's weights come from, as it was opened; with train not the host */
    struct model_dispatch_shape experts; /* where ranks have them, as the model was opened; max_rows of its largest pass anywhere */
    enum quant_kind quant;               /* read without a model: of what is to be opened */
    const struct optim_config *optim;    /* train: whose state to keep; NULL: AdamW */
    double mtp_loss;                     /* train: weight of the loss of the model's MTP layer, which has one then; 0: none */
    int64_t list;                        /* tokens of a row's list (struct token_lists); 0: none */
    void *block;                         /* trained_model_block_bytes of device memory to share with another phase; NULL: own */
    size_t grads, chunk;      /* train: bytes of the gradients, and of a chunk's on one rank, in the block: between updates
                                         they hold nothing; 0: memory of their own */
    struct collective *group; /* train on several ranks, or sharded weights: model has this one's share (all_reduce_shard); of ranks
                                 that share rows; NULL: one rank. Borrowed */
};
/* Device bytes of streamed weights, batch arrays, activations, and gradients of a->grads and a->chunk. a->dev: with stream. */
size_t trained_model_block_bytes(const struct model_config *c, enum dtype act, const struct trained_model_args *a);

struct trained_model;
/* With a group: collective, as trained_model_step and trained_model_backward. Weights from ranks come first in the block, which
 * is at the same place of what it is a part of on all ranks. */
int trained_model_create(struct trained_model **out, const struct trained_model_args *a);
void trained_model_destroy(struct trained_model *t); /* NULL ok */
struct model *trained_model_model(struct trained_model *t);
struct optim *trained_model_optim(struct trained_model *t);
float *trained_model_grads(struct trained_model *t); /* (model's n_master) f32, device */

/* Before the first pass after another phase has used the block. */
void trained_model_begin(struct trained_model *t);
/* After the last one. Where weights are sharded or ranks share rows, passes are collective: each rank begins and ends a phase, has
 * any number of passes in between (ranks that share rows the same ones), and takes part in the others' passes here. They stop
 * together: ERR_SIGNAL of a pass or of the end is all ranks'. */
int trained_model_end(struct trained_model *t);
bool trained_model_collective(const struct trained_model *t);  /* they are collective */
int trained_model_expert_ranks(const struct trained_model *t); /* that have the experts of its layers; 1: none */
int trained_model_context(const struct trained_model *t);      /* ranks that share the rows of a micro-batch; 1: none */

/* Log-probs of several tokens for each target (distillation): arrays (targets, k) in sequence order, k that of the model. */
struct token_lists {
    const int32_t *id; /* distinct tokens of a target; NULL: none given */
    float *logp;       /* of these */
    int32_t *top_id;   /* the k most probable, largest first; NULL: not wanted */
    float *top_logp;   /* NULL: not wanted */
    float *dlogp;      /* of a step: d loss / d logp, filled by its loss for its range; NULL: none */
};
/* Each NULL or one number a target, in sequence order. */
struct forward_out {
    float *logp, *entropy, *sum_pi_sq; /* at this temperature; not of a model with a value head */
    float *value;                      /* of one with a value head */
    int32_t
        *routes; /* (tokens of all sequences, router_replay_words): what routers chose; all ones of a micro-batch without target */
    const struct token_lists *list;
};
int trained_model_forward(struct trained_model *t, const struct packed_seq *seqs, int64_t n, struct micro_batch_limits cut,
                          float temperature, struct forward_out out);

/* A micro-batch after its forward pass, and where the derivatives of its loss go: arrays of its targets alone. */
struct micro_loss {
    int64_t lo, hi;       /* its sequences */
    int64_t t0, t1;       /* its targets in the mini-batch's order */
    const float *out;     /* log-probs or values */
    const float *entropy; /* NULL: not requested */
    float *dout;          /* d loss / d out; zeros */
    float *dentropy;      /* zeros; NULL: not requested */
    struct buf *record;   /* empty: takes the loss' statistics of this micro-batch, for on_record */
};
typedef int micro_loss_fn(void *arg, const struct micro_loss *m);
/* A micro-batch with its loss' record (n bytes, aligned to 8). */
typedef int micro_record_fn(void *arg, const struct pack_micro *m, const void *record, size_t n);
struct mini_batch {
    const struct packed_seq *seqs;
    int64_t n;
    struct micro_batch_limits cut;
    float temperature;              /* of log-probs */
    bool entropy;                   /* the loss reads entropy */
    bool entropy_grad;              /* and gives dentropy */
    const struct token_lists *list; /* filled before loss reads it; NULL: none */
    micro_loss_fn *loss;            /* runs where its micro-batch is computed; what others need goes to its record */
    micro_record_fn *on_record;     /* of each micro-batch with a target, in order, whichever rank computed it; NULL: none */
    void *arg;                      /* of both */
};
/* Its gradient is the left fold over chunks of grad_chunk micro-batches with a target, in order, each the left fold over its
 * micro-batches; with parts that over all parts of all micro-batches with a target, in order; on any number of ranks. */
struct step_result {
    struct optim_result optim;
    int64_t n_micro, n_rows;   /* micro-batches, tokens forwarded */
    struct router_load router; /* of the micro-batches with a target */
    struct mtp_sum {
        double logp; /* sum over the n tokens that the MTP layer predicts */
        int64_t n;
    } mtp;
};
/* One optimizer step over a mini-batch. With a load-balancing loss and several micro-batches a forward pass over all of them comes
 * first, which counts the load of experts. With mtp_loss w, w times the mean over the mini-batch of -log p, at temperature 1, is
 * added to the loss: of each target with two tokens before it, as the MTP layer predicts it.
 * A non-finite loss gradient or gradient norm changes nothing and is reported in r->optim.
 * On several ranks all have the same mini-batch, and end with the same weights and the same *r. */
int trained_model_step(struct trained_model *t, const struct mini_batch *m, const struct optim_config *optim, double lr,
                       struct step_result *r);
/* Forward and backward only: leaves gradients in trained_model_grads (tests, gradient checks). */
int trained_model_backward(struct trained_model *t, const struct mini_batch *m, struct step_result *r);

#endif
