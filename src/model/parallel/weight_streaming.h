/* weight_streaming.h - passes with weights that the device does not have as a whole: in host memory, or sharded over ranks.
 *
 * Such a model is opened with MODEL_HOST_WEIGHTS or MODEL_SHARDED_WEIGHTS (files/load.h). Of a sharded one every pass is
 * collective: all ranks walk through the layers equally often, one that has nothing to compute by model_stream_idle. */
#ifndef VERLC_MODEL_PARALLEL_WEIGHT_STREAMING_H
#define VERLC_MODEL_PARALLEL_WEIGHT_STREAMING_H

#include "device/collective/collective.h"
#include "model/parameters.h"

#include <stddef.h>

enum model_stream_from { MODEL_STREAM_NONE, MODEL_STREAM_HOST, MODEL_STREAM_RANKS };
int model_stream_flags(enum model_stream_from from); /* of model_load_flags: what such a model is opened with */
struct model_stream_shape {
    const struct model_config *config;
    struct dev *dev;
    enum dtype act;
    enum quant_kind quant; /* of the layers' matrices, whose codes are sharded then; not from the host */
    enum model_stream_from from;
    bool experts; /* ranks have those of layers (expert_dispatch.h) */
    size_t room;  /* for what is exchanged then, at least */
};
struct model_stream_shape model_stream_shape(const struct model *m, enum model_stream_from from,
                                             size_t room); /* borrows its config */
/* Device bytes of a pass's buffers: two layers, the final norm, the head and, from ranks, the embedding; where ranks have experts
 * those layers without them, and room for what is exchanged or for one layer's experts. */
size_t model_stream_bytes(const struct model_stream_shape *s);
/* Once; block may be used by others between passes. g: the ranks of a sharded model, which share the block, all at the same
 * place of what they share; else NULL. Borrowed. */
void model_stream_bind(struct model *m, void *block, struct collective *g, size_t room);
bool model_stream_is_bound(
    const struct model *m); /* as of two passes of one model: a policy's and, without its adapter, a reference's */
/* Of a phase of passes: others may have used the block, or the weights have changed. Ends what model_gather began. Weights on
 * the device: nothing. */
void model_stream_begin(struct model *m);
/* After its last pass: all ranks have read what this one gave before the compute stream goes on, so others may use the block. */
int model_stream_end(struct model *m);
/* Layer l is read from here on, and layer `next` (-1: none) soon; for a caller that walks through the layers by itself. */
int model_stream_layer(struct model *m, int64_t l, int64_t next);

/* ---- sharded weights as a whole, and new ones ---- */
size_t model_gathered_bytes(const struct model_stream_shape *s);
/* Collective. Passes read all weights from block, which the ranks share as in model_stream_bind, until model_stream_begin; such
 * passes are each rank's own. */
int model_gather(struct model *m, void *block);
/* Whether a rank's share of a bucket (parameter_segments.h) is what it owns of the master; and where it is. */
bool model_share_is_owned(const struct model *m);
void *model_share(struct model *m, struct model_range own);
/* Whether what is trained there, a bucket or what a rank owns of it, is whole on each rank: a value head's. */
bool model_share_is_whole(const struct model *m, struct model_range r);
/* Else: this rank's share, from the master of the whole bucket on the device; of a bucket of experts from that of its own. Uses the
 * room that passes use: begin the stream again. Of what is whole on each rank, all of it. */
int model_share_from(struct model *m, struct model_range bucket, float *flat);

/* ---- all weights in spans, for ranks that have them in another way (ranks/weight_sync.h) ---- */
/* Layers, then embedding, final norm and, unless it is tied, head; without an MTP layer. */
int64_t model_spans(const struct model *m);
size_t model_span_bytes(struct model *m, int64_t i);
size_t model_span_most(const struct model_stream_shape *s); /* of the longest */
/* Of m, whole or sharded over so many ranks: rank r sends bytes cut[r]..cut[r + 1] of span i; cut: (ranks + 1). */
void model_span_cut(struct model *m, int64_t i, int ranks, size_t *cut);
/* Those of this rank, to their place in room, which has the span. */
int model_span_give(struct model *m, int64_t i, int rank, int ranks, void *room);

#endif
