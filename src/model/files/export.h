/* export.h - writes a model as a Hugging Face directory. */
#ifndef VERLC_MODEL_EXPORT_H
#define VERLC_MODEL_EXPORT_H

#include "base/file_writer.h"
#include "model/files/tokenizer_files.h"
#include "model/parameters.h"

#include <stddef.h>

struct model_export_args {
    int dt;                                  /* DT_F32, DT_BF16, DT_F16, or -1: each tensor's source dtype */
    const struct tokenizer_files *tokenizer; /* its files go along; NULL: none */
    size_t max_shard;                        /* bytes of a shard at most; 0: 5 GB */
    struct file_writer *writer;              /* of the weights, as safetensors_write has it; NULL: all is on disk on return */
};
/* Writes a directory that transformers loads as it is: config.json, generation_config.json, model*.safetensors. An adapter
 * is merged into the weights: W + scale B A in f32, rounded once. Where the master
 * is a rank's share, the compute copy is written; ERR_UNSUPPORTED: that of an adapter. */
int model_export(const struct model *m, const char *dir, const struct model_export_args *a);
/* config.json and generation_config.json alone, as they were read: of an adapter's base model. */
int model_export_config(const struct model *m, const char *dir);

#endif
