/* router_replay.h - recorded choices of routers, as they travel with samples: which experts each token had in each layer.
 *
 * A token has router_replay_words(c) words of 4 bytes: its choices layer by layer, largest first, a byte or, of more than 255
 * experts, two each, in this machine's order; all ones: none are recorded, the router chooses. On the device they are i32, layer
 * by layer.
 * Invariant: what was recorded comes back as it was. */
#ifndef VERLC_TRAIN_ROUTER_REPLAY_H
#define VERLC_TRAIN_ROUTER_REPLAY_H

#include "model/config.h"

#include <stdint.h>

int64_t router_replay_words(const struct model_config *c); /* 0: the model has no router */
/* Between words (n tokens) and choices of a device array (layers, rows, k), whose rows [at, at + n) they are. */
void router_replay_pack(const struct model_config *c, const int32_t *choices, int64_t rows, int64_t at, int64_t n, int32_t *words);
/* ERR_FORMAT: an expert that the model does not have. */
int router_replay_unpack(const struct model_config *c, const int32_t *words, int64_t n, int64_t rows, int64_t at, int32_t *choices);

#endif
