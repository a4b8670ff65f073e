/* master_weights.h - the fp32 master of what is trained, and the compute copy from it. */
#ifndef VERLC_MODEL_MASTER_WEIGHTS_H
#define VERLC_MODEL_MASTER_WEIGHTS_H

#include "model/parameters.h"

/* master -> compute copy, after a load of a whole master. */
int model_refresh(struct model *m);
/* The same from another flat array (n_train) f32 on the device: a copy of a master in host memory. */
int model_refresh_from(struct model *m, float *flat);
/* Of a bucket alone (parallel/parameter_segments.h), from its elements. Weights are here, or are an adapter's. */
int model_refresh_bucket(struct model *m, struct model_range bucket, float *flat);
/* What is trained, from host memory (n_train): to the master what m's shard has of it, to the compute copy all. */
int model_set_master(struct model *m, const float *flat);

#endif
