/* fsdp.h - verl's FSDP checkpoints: model_world_size_W_rank_R.pt, fsdp_config.json, huggingface/. */
#ifndef VERLC_MODEL_FSDP_H
#define VERLC_MODEL_FSDP_H

#include "model/files/torch_file.h"

struct fsdp_tensor { /* one weight of the model, whole */
    char *name;      /* as a Hugging Face model has it; of an adapter: as peft saves it */
    enum dtype dt;
    int nd;
    int64_t dim[TORCH_MAX_DIMS], count; /* elements */
    bool adapter;                       /* LoRA's, or a head that was trained with it */
    int shard_dim;                      /* of parts */
    const struct torch_tensor **parts;  /* of the ranks in order */
    int64_t n_parts;
};
struct fsdp;
bool fsdp_is_dir(const char *dir); /* shards are in it */
/* Maps the shards of every rank. fsdp_config.json gives the world size; without it the names of the files do.
 * Every weight is complete: its parts tile it, or are equal bytes where each rank holds all of it.
 * ERR_INPUT: a file is missing, no directory of shards; else as torch_file_open, ERR_FORMAT: the ranks do not fit together. */
int fsdp_open(struct fsdp **out, const char *dir);
void fsdp_close(struct fsdp *f); /* NULL ok */
int64_t fsdp_count(const struct fsdp *f);
const struct fsdp_tensor *fsdp_at(const struct fsdp *f, int64_t i);
const struct fsdp_tensor *fsdp_find(const struct fsdp *f, const char *name); /* of the model, not of its adapter; NULL if absent */
int64_t fsdp_shards(const struct fsdp *f);                                   /* files that were read */
bool fsdp_has_adapter(const struct fsdp *f);                                 /* a LoRA run's */
/* n elements from element `first` on, row-major. */
void fsdp_read(const struct fsdp_tensor *t, int64_t first, int64_t n, void *dst);

#endif
