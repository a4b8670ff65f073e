/* activation_recompute.c - see activation_recompute.h. Whatever is chosen, the same code computes
 * the same bits (model/forward.h, struct model_keep): the choice is time against memory alone. */
#include "train/activation_recompute.h"

#include "base/err.h"

#include <stdio.h>
#include <string.h>

struct model_keep train_keep(enum train_recompute how, const struct model_config *c, enum dtype act, int64_t max_rows,
                             struct model_keep like, size_t extra) {
    struct model_keep k = MODEL_KEEP_LAYER;
    if (how == RECOMPUTE_AUTO) return model_keep_fit(c, act, max_rows, like, extra);
    if (how == RECOMPUTE_NONE) k = MODEL_KEEP_ALL;
    if (how == RECOMPUTE_MLP) k = MODEL_KEEP_ATTENTION;
    k.context = like.context;
    k.parts = like.parts;
    k.experts = like.experts;
    return k;
}

struct model_keep train_keep_logits(struct model_keep k, struct dev *dev, const struct model_config *c, enum dtype act,
                                    int64_t max_rows, size_t room) {
    const struct weight head = {.dt = act, .n = c->vocab, .k = c->hidden, .softcap = c->logit_softcap};
    const int64_t most = model_kept_most(c, max_rows, k), fit = (int64_t)(room / model_kept_bytes(c, 1)) * DEV_KEPT_ROWS;
    k.logits = 0;
    if (k.all < c->n_layers - 1 || !dev_keeps_logits(dev, head)) return k;
    k.logits = fit < most ? fit : most;
    return k;
}

const char *train_keep_text(struct model_keep keep, const struct model_config *c, char *text, size_t size) {
    const int64_t last = c->n_layers - 1; /* nothing of the last layer is ever recomputed */
    const int64_t all = keep.all < last ? keep.all : last;
    const int64_t mlp = keep.attention < last - all ? keep.attention : last - all, whole = last - all - mlp;
    if (all == last) snprintf(text, size, "all activations kept");
    else if (whole == last) snprintf(text, size, "layers recomputed");
    else if (whole == 0) snprintf(text, size, "the MLPs of %lld of %lld layers recomputed", (long long)mlp, (long long)c->n_layers);
    else
        snprintf(text, size, "%lld of %lld layers recomputed, and the MLPs of %lld", (long long)whole, (long long)c->n_layers,
                 (long long)mlp);
    return text;
}
