/* activation_recompute.h - what an update keeps of its forward pass, and what it computes
 * again in backward: the keys, the same in ppo and sft, and the choice.  Private to train. */
#ifndef VERLC_TRAIN_RECOMPUTE_H
#define VERLC_TRAIN_RECOMPUTE_H

#include "conf/conf.h"
#include "model/forward.h"

enum train_recompute {
    RECOMPUTE_AUTO, /* as little as the memory allows */
    RECOMPUTE_NONE,
    RECOMPUTE_MLP,   /* of every layer the MLP, whose buffers are the widest */
    RECOMPUTE_LAYER, /* every layer */
};
/* trainer.recompute; where that is not set, verl's switch at `key`: True is auto, False is none. */
int train_read_recompute(const struct conf *c, const char *key, enum train_recompute *out);
/* What such a pass keeps. extra: bytes of activations that auto may take beyond those of RECOMPUTE_LAYER. */
struct model_keep train_keep(enum train_recompute how, const struct model_config *c, enum dtype act, int64_t max_rows,
                             size_t extra);
/* "all activations kept", or of how many of the layers what is recomputed. Returns text. */
const char *train_keep_text(struct model_keep keep, const struct model_config *c, char *text, size_t size);

#endif
