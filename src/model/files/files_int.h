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

/* ---- matrices saved in FP8 (model/files/fp8.c) ---- */
struct fp8_weight { /* tensors of a file; borrowed */
    const struct safetensors_tensor *codes, *scales;
    int64_t cols, block[2]; /* rows and columns of a block */
};
/* t: the parameter's tensor, of its shape. ERR_FORMAT, ERR_UNSUPPORTED: not by blocks as config.json says. */
int model__fp8_find(struct fp8_weight *w, const struct model_config *c, const struct safetensors_tensor *t,
                    const struct bnb_args *a);
/* Elements [first, first + n), each a number of bf16. */
void model__fp8_read(const struct fp8_weight *w, int64_t first, int64_t n, float *out);

/* Tensors of the files that no parameter takes and that are written as they are (families.h: kept); read from the files, which
 * stay open. */
int64_t model__kept_count(const struct model *m);
struct safetensors_write_tensor model__kept_at(const struct model *m, int64_t i);

/* ---- tensors of all experts in one (model/files/gpt_oss.c) ---- */
/* Its name, of a group of experts' matrices or of their biases: "model.layers.0.mlp.experts.gate_up_proj". */
enum { MODEL_STACK_NAME = 128 };
void model__stack_name(const struct model *m, const struct model_group *g, char out[MODEL_STACK_NAME]);
/* Whether files have such a tensor of this group, experts transposed and gate and up in turn, as gpt-oss has it. */
bool model__interleaved(const struct model *m, const struct model_group *g);
/* Whether they are one tensor of the files, so or as the parameters are: (E, rows, cols). */
bool model__stacked(const struct model *m, const struct model_group *g);
/* Its shape (E, k, n), or (E, n) of biases; the return is the number of dimensions. */
int model__interleaved_shape(const struct model_group *g, int64_t dim[3]);
/* Which row of its expert in the group column j of an expert has. */
int64_t model__interleaved_row(const struct model_group *g, int64_t j);
/* One parameter in it. */
int model__stack_shape(const struct model *m, const struct model_group *g, int64_t dim[3]); /* returns how many dimensions */
struct interleaved {
    const struct safetensors_tensor *t;      /* NULL: the parameter is not in such a tensor */
    const struct safetensors_tensor *scales; /* t has MXFP4's codes; NULL: it has values */
    int64_t expert, n, k;                    /* n outputs of k inputs of each expert */
    int64_t column, step;                    /* of the parameter's first row, and from one to the next */
};
/* ERR_FORMAT, ERR_UNSUPPORTED; t stays NULL where the files have none. */
int model__interleaved_find(struct interleaved *s, const struct model *m, const struct bnb_args *a);
/* Elements [first, first + n) of the parameter. */
void model__interleaved_read(const struct interleaved *s, int64_t first, int64_t n, float *out);

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
