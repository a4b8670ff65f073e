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

/* Cuts a bucket into a run of segments for each rank, some of them empty, of about the same length; that of experts between them
 * (model_is_of_experts). */
void model_cut(const struct model *m, struct model_range all, struct model_shard s, struct model_range *out);
/* The buckets of a gradient (forward.h) in the order in which a backward pass makes them; last the table of an untied embedding,
 * which gets rows alone. With an adapter those of layers that have one, and a value model's head. With s.experts a layer with
 * experts has several, model_layer_buckets. Caller frees. */
int64_t model_buckets(const struct model *m, struct model_shard s, struct model_range **out);
/* Those of a layer, which may be empty with an adapter: one; or what comes before its experts, what comes behind them, and each
 * group of experts. */
struct model_range model_layer_bucket(const struct model *m, int64_t l); /* all of it */
enum { MODEL_LAYER_BUCKETS = 6 };
int model_layer_buckets(const struct model *m, struct model_shard s, int64_t l, struct model_range *out);
/* Whether a bucket is one of experts, of which each rank has some whole and makes the gradient of these by itself. */
bool model_is_of_experts(const struct model *m, struct model_shard s, struct model_range bucket);
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
