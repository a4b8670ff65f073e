/* files_int.h - private to model: bitsandbytes' NF4 in the files, weights as files, dtypes of files and their conversion. */
#ifndef VERLC_MODEL_FILES_INT_H
#define VERLC_MODEL_FILES_INT_H

#include "model/files/convert.h"
#include "model/files/safetensors.h"
#include "model/model_int.h"

/* ---- matrices that bitsandbytes saved in NF4 (model/files/bitsandbytes.c) ---- */
struct bnb_weight { /* tensors of a file; borrowed */
    const struct safetensors_tensor *code, *absmax, *nested_absmax, *nested_map;
    int64_t nested_block; /* 0: absmax is f32; else absmax is codes of nested_map, in blocks of so many */
    double offset;        /* nested: added to each */
};
struct bnb_args {
    const struct safetensors_tensor *(*find)(void *arg, const char *name); /* NULL: not in the files */
    void *arg;
    const struct model_param *param;
    const char *path; /* for messages */
};
/* ERR_FORMAT, ERR_UNSUPPORTED: not NF4 in blocks of 64 of the parameter's shape, with all its parts. */
int model__bnb_find(struct bnb_weight *b, const struct bnb_args *a);
void model__bnb_scales(const struct bnb_weight *b, int64_t n, float *scale); /* of its n blocks */

/* Tensors of the files that no parameter takes and that are written as they are (families.h: kept); read from the files, which
 * stay open. */
int64_t model__kept_count(const struct model *m);
struct safetensors_write_tensor model__kept_at(const struct model *m, int64_t i);

/* "float32", "bfloat16", "float16": the names of torch_dtype. */
const char *model__torch_dtype(enum dtype dt);
void model__set_config_dtype(json_t *config, enum dtype dt); /* under the name that this config.json has for it */

/* model.safetensors, or shards of at most max_shard bytes (0: 5 GB) and their index, with the tensors in this order. */
int model__write_weights(struct file_writer *w, const char *dir, const struct safetensors_write_tensor *t, int64_t n,
                         size_t max_shard);

int model__copy_file(const char *from, const char *to, const char *name); /* from/name to to/name */

/* Between the float dtypes of files; rounds to nearest even. */
void model__convert(void *dst, enum dtype dst_dt, const void *src, enum dtype src_dt, int64_t n);

#endif
