/* context_parallel.h - the rows of a micro-batch over the ranks of a group, in updates and in passes without backward.
 *
 * Sequence parallelism by heads (Jacobs et al. 2023, DeepSpeed Ulysses): a rank has consecutive rows of the micro-batch for all
 * that works row by row, and its key heads, with their queries or values, of all rows for attention and the delta rule. Between
 * both, rows travel. Each output is computed as one rank computes it. A gradient of weights is a sum over rows: the micro-batch is
 * cut into as many parts as the configuration says, each part's gradient is one summand of the fold of gradients
 * (train/gradient_all_reduce.h), and a rank that has all parts adds them one after the other. What belongs to heads (sinks, the
 * convolution and decay of gated delta nets) has one summand a micro-batch, on the heads' rank. Knows no
 * losses.
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
int64_t model_parts_most(int64_t rows, int n); /* rows of the longest part */

struct model_context;
/* The largest number of query and of key heads of a rank of `size`. */
void model_context_heads(const struct model_config *c, int size, int64_t *q, int64_t *kv);
/* The largest number of key and of value heads of a gated delta net. */
void model_context_delta(const struct model_config *c, int size, int64_t *k, int64_t *v);
/* Device bytes of a rank, for micro-batches of so many rows. */
size_t model_context_bytes(const struct model_config *c, enum dtype act, int size, int64_t max_rows, bool train);
/* Collective over g, whose rank r has part r; m and g are borrowed. room: model_context_bytes of device memory, which between two
 * passes others may use. */
struct model_context_args {
    const struct model *model;
    struct collective *group;
    int64_t max_rows;
    bool train; /* with backward */
    void *room;
};
int model_context_open(struct model_context **out, const struct model_context_args *a);
void model_context_close(struct model_context *x); /* NULL ok */
/* The token after each row, which an MTP layer reads; likewise. After model_context_begin. */
void model_context_next(struct model_context *x, struct tensor next);
/* Before the passes of a micro-batch that is cut like this. ids: (rows) i32, those of all its rows, on the device. */
int model_context_begin(struct model_context *x, const struct model_parts *parts, struct tensor ids);

#endif
