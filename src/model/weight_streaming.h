/* weight_streaming.h - forward passes with weights in host memory. */
#ifndef VERLC_MODEL_WEIGHT_STREAMING_H
#define VERLC_MODEL_WEIGHT_STREAMING_H

#include "model/parameters.h"

#include <stddef.h>

/* Weights in host memory (MODEL_HOST_WEIGHTS) are copied to the device layer by layer in each forward, through
 * a block of this size: two layers, the final norm and the head. */
size_t model_stream_bytes(const struct model_config *c, struct dev *dev, enum dtype act);
void model_stream_bind(struct model *m, void *block); /* once; forwards alone from then on. block may be shared between passes */
void model_stream_begin(struct model *m); /* of a pass: others may have used the block. Weights on the device: nothing */

#endif
