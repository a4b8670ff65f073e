/* parameter_segments.h - the segments of what a model trains, and runs of them: what a gradient's norm is summed by, and the unit
 * of distribution over ranks.
 *
 * A segment is at most DEV_SEGMENT consecutive elements of one parameter. Whatever holds a part of the flat arrays holds
 * whole segments, so a block of 8-bit codes, a segment's sum and an element's update do not depend on who has them.
 * Invariant: segments follow from the parameters alone, in the order of the flat arrays and without gaps. */
#ifndef VERLC_MODEL_PARALLEL_PARAMETER_SEGMENTS_H
#define VERLC_MODEL_PARALLEL_PARAMETER_SEGMENTS_H

#include "model/parameters.h"

int64_t model_n_segments(const struct model *m);
/* The parameter with this element of what m trains. */
int64_t model_param_at(const struct model *m, int64_t element);

/* Cuts a range into n runs of segments, some of them empty, of about the same length. whole_matrices: a matrix that is neither
 * embedding nor head is not cut. */
void model_cut(const struct model *m, struct model_range all, int64_t n, bool whole_matrices, struct model_range *out);
/* The buckets of a gradient (forward.h) in the order in which a backward pass makes them; last the table of an untied embedding,
 * which gets rows alone. With an adapter those of layers that have one, and a value model's head. Caller frees. */
int64_t model_buckets(const struct model *m, struct model_range **out);
struct model_range model_layer_bucket(const struct model *m, int64_t l); /* may be empty with an adapter */
/* What a rank owns: its part of each bucket by model_cut, in the order of the flat arrays, none empty. Caller frees. */
int64_t model_own(const struct model *m, struct model_shard s, struct model_range **out);
/* The same of all ranks at once: rank r has own[at[r]] to own[at[r + 1]]. */
struct model_owners {
    struct model_range *own;
    int64_t *at;
};
void model_own_all(const struct model *m, struct model_shard s, struct model_owners *out);
void model_owners_free(struct model_owners *o);
/* Elements that the rank with the most owns. */
int64_t model_own_most(const struct model *m, struct model_shard s);

#endif
