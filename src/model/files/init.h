/* init.h - model directories with random weights. */
#ifndef VERLC_MODEL_INIT_H
#define VERLC_MODEL_INIT_H

#include "device/device.h"

#include <jansson.h>
#include <stdint.h>

/* Random weights: transformers' init (normal, initializer_range; norms 1, biases 0). Value i of
 * tensor t is a pure function of (seed, t, i). */
int model_init_dir(const json_t *config, const char *dir, uint64_t seed, enum dtype dt);
/* Built-in shapes of `model init --arch`; NULL if unknown. Caller owns. */
json_t *model_arch_config(const char *name);
void model_arch_names(void (*fn)(void *arg, const char *name), void *arg);

#endif
