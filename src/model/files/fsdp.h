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
/* The directory of shards that path means: path itself, its actor/ (a global_step_N of PPO), or the one that path is the
 * huggingface/ of. NULL: none of them. Caller frees. */
char *fsdp_find_dir(const char *path);
/* Where config.json and the tokenizer of such a directory are: its huggingface/, or itself; caller frees. */
char *fsdp_config_dir(const char *dir);
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

/* ---- as a model directory (fsdp_export.c) ---- */
struct fsdp_export_args {
    const struct fsdp *f;
    const char *dir;                             /* of the shards: lora_adapter/ and lora_train_meta.json are read there */
    const char *config_dir;                      /* of config.json and the tokenizer */
    const char *out;                             /* an empty directory */
    int dt;                                      /* DT_F32, DT_BF16, DT_F16, or -1: each tensor's own */
    size_t max_shard;                            /* 0: 5 GB */
    void (*progress)(size_t done, size_t total); /* bytes; may be NULL */
};
/* config.json, tokenizer and model*.safetensors; of a LoRA run the base model and lora_adapter/, as verl.model_merger does. A
 * copy of tied embeddings is left out. Reads and writes a few MB at a time. ERR_IO: also where the disk has not the room;
 * ERR_FORMAT: NaN or Inf in a weight; ERR_INPUT: an adapter whose lora_alpha nothing says. */
int fsdp_export(const struct fsdp_export_args *a);
/* verl.model_merger's test: names and shapes are those of the model directory hf_dir, values equal as bf16 (1e-6 relative and
 * absolute). ERR_INPUT names the first difference. */
int fsdp_compare(const struct fsdp *f, const char *hf_dir);

#endif
