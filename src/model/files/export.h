/* export.h - writes a model as a Hugging Face directory. */
#ifndef VERLC_MODEL_EXPORT_H
#define VERLC_MODEL_EXPORT_H

#include "model/files/tokenizer_files.h"
#include "model/parameters.h"

#include <stddef.h>

/* Writes a directory that transformers loads as it is: config.json, generation_config.json,
 * model*.safetensors (shards of <= max_shard bytes, 0: 5 GB). dt: DT_F32/DT_BF16, or -1: each
 * tensor's source dtype. tokenizer: its files go along; NULL: none. An adapter
 * is merged into the weights: W + scale B A in f32, rounded once. */
int model_export(const struct model *m, const char *dir, int dt, const struct tokenizer_files *tokenizer, size_t max_shard);

#endif
