/* load.h - opens a Hugging Face model directory on a device. */
#ifndef VERLC_MODEL_LOAD_H
#define VERLC_MODEL_LOAD_H

#include "model/parameters.h"

#include <stddef.h>
#include <stdint.h>

enum model_load_flags {
    MODEL_INFER = 0,            /* compute copy only */
    MODEL_TRAIN = 1,            /* and the fp32 master */
    MODEL_HOST_MASTER = 2,      /* the master of what is trained (an adapter's too) is in host memory */
    MODEL_HOST_WEIGHTS = 4,     /* the compute copy is: for forward passes by model_stream_bind; not with MODEL_TRAIN */
    MODEL_SHARED_BASE = 8,      /* a value model's compute copy below its head is that of model_open_args.base */
    MODEL_SHARDED_WEIGHTS = 16, /* of the compute copy this rank keeps its share; likewise, and with MODEL_TRAIN too */
    MODEL_FILE_LAYERS = 32,     /* layers stay in the files, for model_tp_take alone; embedding, norm and head until then */
};
struct model_open_args {
    const char *dir; /* Hugging Face directory */
    enum dtype act;  /* DT_F32 or DT_BF16 */
    int flags;
    bool mtp, mtp_detached;   /* model_config_use_mtp */
    int64_t max_len;          /* longest sequence of the run: sizes the rope table */
    enum quant_kind quant;    /* matrices of the layers in 4 or 8 bits, quantised as they are read; MODEL_INFER alone.
                              A directory that is saved so (saved_nf4) opens as QUANT_NF4 only, with the codes it has */
    const struct model *base; /* with MODEL_SHARED_BASE: a frozen model of the same directory, act and quant, on the same
                                 device; borrowed, and closed after this one */
    struct model_shard shard; /* what the master holds of what is trained, an adapter's too; what sharded weights are shares of */
};
/* Validates every tensor (name, shape, dtype, finiteness of values) before use.
 * ERR_INPUT, ERR_FORMAT (file and tensor named), ERR_UNSUPPORTED, ERR_NOMEM. */
int model_open(struct model **out, struct dev *dev, const struct model_open_args *a);
/* The same directory as a critic (model_config_make_value): lm_head is not read; a head that the files lack is
 * new, drawn as transformers does (normal with initializer_range, bias 0), a pure function of head_seed. */
int model_open_value(struct model **out, struct dev *dev, const struct model_open_args *a, uint64_t head_seed);
/* The same directory as a reward model (model_config_make_reward): its head must be there. */
int model_open_reward(struct model **out, struct dev *dev, const struct model_open_args *a);
/* What distinguishes one model from another without reading all of it, 32 hex digits: XXH3-128 of config.json, less what
 * names its origin, and of each tensor's name, type, shape and values at its beginning, middle and end, whatever files they are
 * in. ERR_INPUT, ERR_FORMAT as model_open. */
int model_fingerprint(const char *dir, char out[33]);
void model_close(struct model *m); /* NULL ok */
/* Device bytes that model_open keeps for these settings (compute copy, rope table, master); dir is not read.
 * For a critic c has passed model_config_make_value. The master of a shard: of the largest. */
size_t model_open_bytes(const struct model_config *c, struct dev *dev, const struct model_open_args *a);
/* Of a model whose layers have stayed in the files: what is freed once they are read, and with it those that reading them takes. */
size_t model_file_ends(const struct model_config *c, struct dev *dev, enum dtype act);
size_t model_file_room(const struct model_config *c, struct dev *dev, enum dtype act);

#endif
