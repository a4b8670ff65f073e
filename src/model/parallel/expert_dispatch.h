/* expert_dispatch.h - updates and passes of log-probs with the experts of each layer on their ranks (expert parallel).
 *
 * A rank has a run of whole experts: weights, master, gradient and optimizer state. Each rank computes micro-batches of its own;
 * at a layer with experts its rows travel to the ranks of their experts, and the outputs back, to be added there in the order of
 * choice. In backward rows and gradients of outputs travel, and gradients of rows come back. An expert's rank takes the
 * micro-batches one after the other, so the gradient of its matrices is the fold of their summands in order, in place: no gradient
 * travels. Nothing is dropped: what does not fit the room goes in several rounds of whole micro-batches. All other weights are
 * sharded and gathered (weight_streaming.h). Knows no routers.
 * Invariant: a row's numbers do not depend on which rank computes them, nor a gradient on the rounds. */
#ifndef VERLC_MODEL_PARALLEL_EXPERT_DISPATCH_H
#define VERLC_MODEL_PARALLEL_EXPERT_DISPATCH_H

#include "model/config.h"

#include <stddef.h>
#include <stdint.h>

struct model_dispatch_shape {
    int ranks;        /* 0, 1: each has all experts */
    int64_t max_rows; /* of a pass */
};
/* Device bytes of what a rank sends, receives and computes for others. */
size_t model_dispatch_bytes(const struct model_config *c, enum dtype act, struct model_dispatch_shape s);
/* Why the experts of a model of this shape cannot be on ranks, for people; NULL: they can. */
const char *model_dispatch_unable(const struct model_config *c);

struct model;
struct collective;
/* Of a model that was opened with shard.experts, once its weights' stream is bound with a room of model_dispatch_bytes. */
void model_dispatch_bind(struct model *m, struct collective *g, int64_t max_rows);
/* Of the passes to come: the first `all` layers keep their activations until backward. The same on all ranks. */
void model_dispatch_keep(struct model *m, int64_t all);
struct model_grad_sink;
/* Instead of a model_forward of this rank, where weights or experts are on ranks. no_adapter: as the other ranks' passes. */
int model_idle(struct model *m, bool no_adapter);
/* Of the model_backward after it: layer l, whose bucket comes next; or all of them, where no experts are on ranks. */
struct model_grad_sink;
int model_idle_back_layer(struct model *m, int64_t l, const struct model_grad_sink *sink);
int model_idle_back(struct model *m);

#endif
