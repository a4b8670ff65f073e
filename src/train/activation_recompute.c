/* activation_recompute.c - see activation_recompute.h. Whatever is chosen, the same code computes
 * the same bits (model/forward.h, struct model_keep): the choice is time against memory alone. */
#include "train/activation_recompute.h"

#include "base/err.h"

#include <stdio.h>
#include <string.h>

struct model_keep train_keep(enum train_recompute how, const struct model_config *c, enum dtype act, int64_t max_rows,
                             size_t extra) {
    switch (how) {
    case RECOMPUTE_NONE: return MODEL_KEEP_ALL;
    case RECOMPUTE_MLP: return MODEL_KEEP_ATTENTION;
    case RECOMPUTE_LAYER: return MODEL_KEEP_LAYER;
    case RECOMPUTE_AUTO: break;
    }
    return model_keep_fit(c, act, max_rows, extra);
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
