/* activation_recompute.h - what an update keeps of its forward pass, and what it computes
 * again in backward. */
#ifndef VERLC_TRAIN_ACTIVATION_RECOMPUTE_H
#define VERLC_TRAIN_ACTIVATION_RECOMPUTE_H

#include "model/forward.h"

/* trainer.recompute; where that is not set, verl's enable_gradient_checkpointing: True is auto, False is none. */
enum train_recompute {
    RECOMPUTE_AUTO, /* as little as the memory allows */
    RECOMPUTE_NONE,
    RECOMPUTE_MLP,   /* of every layer the MLP, whose buffers are the widest */
    RECOMPUTE_LAYER, /* every layer */
};
/* What such a pass keeps. like: whose context and experts it has. extra: bytes of activations that auto may take beyond those of
 * RECOMPUTE_LAYER. */
struct model_keep train_keep(enum train_recompute how, const struct model_config *c, enum dtype act, int64_t max_rows,
                             struct model_keep like, size_t extra);
/* The same pass with the logits of as many outputs kept as fit `room` bytes beyond k: none where layers are recomputed, whose
 * activations come first, or where the device has no use for them. */
struct model_keep train_keep_logits(struct model_keep k, struct dev *dev, const struct model_config *c, enum dtype act,
                                    int64_t max_rows, size_t room);
/* "all activations kept", or of how many of the layers what is recomputed. Returns text. */
const char *train_keep_text(struct model_keep keep, const struct model_config *c, char *text, size_t size);

#endif
