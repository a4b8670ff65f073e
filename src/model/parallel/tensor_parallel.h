/* tensor_parallel.h - inference with the layers' matrices split by output rows over the ranks of a group.
 *
 * No sum is ever split, outputs are: a rank has some rows of each matrix and computes those outputs of all tokens, each as one rank
 * would, and the outputs are gathered before the next matrix reads them. Attention is split by key head, the KV cache with it:
 * where heads do not divide, ranks have different numbers; where ranks are more than key heads, several have the same one and share
 * its queries. Gated delta nets are split the same way. Norms of whole rows of queries and keys are computed by each rank. Of
 * experts a rank has some, whole (expert_parallel.c). Of an adapter a rank has all A, and its rows of B; of a quantised base the
 * codes of its rows; of the embedding its columns, and of the head its rows, also where both are one weight. Norms and routers are
 * whole on each rank. Training is not split: such a model is made again of the trained one's weights for each generation, whether
 * these are whole on each rank or sharded over all (weight_streaming.h); one that never changes is read from its files.
 * Invariant: a row's bits are those of the model that is not split, whatever the number of ranks. */
#ifndef VERLC_MODEL_PARALLEL_TENSOR_PARALLEL_H
#define VERLC_MODEL_PARALLEL_TENSOR_PARALLEL_H

#include "device/collective/collective.h"
#include "model/lora/lora.h"
#include "model/parameters.h"

#include <stddef.h>
#include <stdint.h>

/* Why layers of this shape cannot be split over so many ranks, for people; NULL: they can. */
const char *model_tp_unable(const struct model_config *c, enum quant_kind quant, int size);
/* The shape that a rank computes: its heads and its part of the MLP; rank -1: the largest of each. json is c's, borrowed. */
struct model_config model_tp_config(const struct model_config *c, int rank, int size);
/* Device bytes of the rank that takes the most, for passes of so many rows. */
struct model_tp_shape {
    const struct model_config *config;
    struct dev *dev;
    enum dtype act;
    enum quant_kind quant; /* of the layers' matrices */
    int size;
    int64_t max_rows;
    const struct lora_config *lora; /* NULL: no adapter */
};
int model_tp_bytes(const struct model_tp_shape *s, size_t *out);

/* Collective. A model without weights yet, in block (model_tp_bytes). whole, g: borrowed until model_tp_close. Only for inference;
 * model_forward is then the group's common work: all its ranks pass the same rows. */
int model_tp_open(struct model **out, struct model *whole, struct collective *g, int64_t max_rows, void *block);
void model_tp_close(struct model *m); /* NULL ok */
/* Takes this rank's rows from the weights that `whole` has now. Where they are sharded: collective over the ranks that have them.
 * Where layers have stayed in the files (MODEL_FILE_LAYERS) they are read one by one, once; memory for one of them is taken
 * meanwhile. Then the split model reads no weights of `whole`: the room of its passes (model_stream_bind) is free, and what
 * `whole` had of files is freed. */
int model_tp_take(struct model *m);
/* Of a model whose layers have stayed in the files, instead: span i of the weights (weight_streaming.h) is in room, as a whole. */
int model_tp_take_span(struct model *m, int64_t i, void *room);
/* The adapter of `whole` has changed, and nothing else. */
int model_tp_take_adapter(struct model *m);
/* Whether a CUDA graph may hold a pass (collective_has_graphs). */
bool model_tp_in_graph(const struct model *m);
/* For measuring: passes without their gathers, which each rank makes by itself and whose results are nobody's; a CUDA graph may
 * hold them. Of models without experts. */
void model_tp_leave_out_gathers(struct model *m, bool out);
/* Of any model, when its passes have ended. ERR_TIMEOUT: one waited too long for another rank, and what it computed is void. */
int model_tp_on_time(const struct model *m);

#endif
