/* context_parallel.h - the rows of a micro-batch over the ranks of a group, in updates and in passes without backward.
 *
 * Sequence parallelism by heads (Jacobs et al. 2023, DeepSpeed Ulysses): a rank has consecutive rows of the micro-batch for all
 * that works row by row, and its key heads, with their queries or values, of all rows for attention and the delta rule. Between
 * both, rows travel. Latent attention has one key head: its keys, which are the values too, go to all ranks, and each attends for
 * its own rows. Each output is computed as one rank computes it. A gradient of weights is a sum over rows: the micro-batch is cut
 * into as many parts as the configuration says, each part's gradient is one summand of the fold of gradients
 * (train/gradient_all_reduce.h). Where ranks are fewer, each has a run of consecutive parts and gives a summand of each; a rank
 * that has all parts adds them one after the other. What belongs to heads (sinks, the convolution and decay of gated delta nets)
 * has one summand a micro-batch, on the heads' rank; the gradient of latent attention's keys has one of each part. Knows no losses.
 * Invariant: numbers depend on the parts, never on how many ranks have them. */
#ifndef VERLC_MODEL_PARALLEL_CONTEXT_PARALLEL_H
#define VERLC_MODEL_PARALLEL_CONTEXT_PARALLEL_H

#include "device/collective/collective.h"
#include "model/parameters.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MODEL_MOST_PARTS = 64 };
/* Part i of a micro-batch has its rows [cut[i], cut[i + 1]). */
struct model_parts {
    int n;
    int64_t cut[MODEL_MOST_PARTS + 1];
};
void model_parts_cut(struct model_parts *p, int64_t rows, int n);
/* Of n parts rank r of `ranks` has those from the first of r to that of r + 1. */
static inline int model_parts_first(int n, int ranks, int r) { return (int)((int64_t)n * r / ranks); }
static inline int model_parts_times(int n, int ranks) { return (n + ranks - 1) / ranks; } /* the most parts of a rank */
/* A micro-batch of so many rows among ranks, as its n parts are: what each rank has is a part then. */
void model_parts_of_ranks(struct model_parts *of, const struct model_parts *p, int ranks);
/* The parts of rank r, from its first row on. */
void model_parts_own(struct model_parts *own, const struct model_parts *p, int ranks, int r);
/* How a micro-batch is shared: among so many ranks, each with a run of its parts; parts 0: as many as ranks. */
struct model_context_shape {
    int ranks, parts;
};
int64_t model_context_rows(int64_t rows, struct model_context_shape s); /* rows of the rank that has the most */

struct model_context;
/* The largest number of query and of key heads of a rank of `size`. */
void model_context_heads(const struct model_config *c, int size, int64_t *q, int64_t *kv);
/* The largest number of key and of value heads of a gated delta net. */
void model_context_delta(const struct model_config *c, int size, int64_t *k, int64_t *v);
/* Device bytes of a rank, for micro-batches of so many rows. */
size_t model_context_bytes(const struct model_config *c, enum dtype act, struct model_context_shape s, int64_t max_rows,
                           bool train);
/* Collective over the group; model and group are borrowed. room: model_context_bytes of device memory, which between two
 * passes others may use. */
struct model_context_args {
    const struct model *model;
    struct collective *group;
    int parts; /* as of model_context_shape */
    int64_t max_rows;
    bool train; /* with backward */
    void *room;
};
int model_context_open(struct model_context **out, const struct model_context_args *a);
void model_context_close(struct model_context *x); /* NULL ok */
/* The token after each row, which an MTP layer reads; likewise. After model_context_begin. */
void model_context_next(struct model_context *x, struct tensor next);
/* Before the passes of a micro-batch of which rank r has part r. ids: (rows) i32, those of all its rows, on the device. */
int model_context_begin(struct model_context *x, const struct model_parts *parts, struct tensor ids);

#endif
