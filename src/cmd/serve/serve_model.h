/* serve_model.h - what a server has on a device: a model, or this rank's part of one, and its decoder.
 *
 * Knows no requests. Invariant: with a part the decoder takes as many KV blocks as the other ranks of its group. */
#ifndef VERLC_CMD_SERVE_SERVE_MODEL_H
#define VERLC_CMD_SERVE_SERVE_MODEL_H

#include "engine/engine.h"
#include "ranks/split_model.h"

struct serve_model_args {
    const char *dir, *adapter; /* adapter NULL: none */
    enum dtype act;
    int64_t max_len, max_seqs, max_rows, max_draft; /* max_len 0: the model's positions */
    int64_t together;                               /* ranks that have the model together; 1: each has it whole */
    double memory;                                  /* share of the device's memory */
};
struct serve_model { /* a zeroed one may be closed; dev is opened by the caller */
    struct dev dev;
    struct split_model split; /* with together above 1 */
    struct model *model;      /* else */
    struct decoder *decoder;
    int64_t max_len;    /* tokens of prompt and answer that there is room for */
    size_t weights, kv; /* bytes on the device, for people */
};
/* Tokens of prompt and answer, by the model's positions. ERR_INVAL: it has fewer than max_len. */
int serve_model_length(const struct serve_model_args *a, const struct model_config *c, int64_t *max_len);
/* Device bytes of the rank that takes the most, an adapter's but for a part's left out; and its decoder, without a model. */
struct serve_model_size {
    int64_t max_len;
    size_t weights, kv, passes;
    struct decoder_args decoder;
};
/* c: the model's; ranks: those of this host. ERR_UNSUPPORTED: it is not split over so many. */
int serve_model_size(struct serve_model_size *s, struct dev *dev, const struct serve_model_args *a, const struct model_config *c,
                     int ranks);
/* comm: the ranks, of which each has this call; NULL: this process is alone. */
int serve_model_open(struct serve_model *m, const struct serve_model_args *a, struct comm *comm);
void serve_model_close(struct serve_model *m);

#endif
