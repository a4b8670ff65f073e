/* shards.h - a checkpoint of verl's ranks, FSDP's (fsdp.h) or Megatron's (megatron.h), as the weights of a Hugging Face model. */
#ifndef VERLC_MODEL_SHARDS_H
#define VERLC_MODEL_SHARDS_H

#include "model/files/torch_file.h"

struct fsdp_tensor;
struct megatron_tensor;
struct shards_tensor { /* one weight of the model, whole */
    char *name;        /* as a Hugging Face model has it; of an adapter: as peft saves it */
    enum dtype dt;
    int nd;
    int64_t dim[TORCH_MAX_DIMS], count; /* elements */
    bool adapter;                       /* LoRA's, or a head that was trained with it */
    bool own_dtype;                     /* it is written in the dtype that it has, whatever is asked for */
    const struct fsdp_tensor *fsdp;     /* one of the two */
    const struct megatron_tensor *megatron;
};
struct shards_args {
    const char *dir;        /* shards_find_dir's */
    const char *config_dir; /* of config.json; NULL: shards_config_dir's */
    bool no_head;           /* Megatron's output_layer is left out */
};
struct shards;
/* The directory of shards that path means: path itself, its model/, actor/ or actor/model/ (a global_step_N of PPO), or the one
 * that path is the huggingface/ or the dist_ckpt/ of, or a distributed checkpoint alone. NULL: none of them. Caller frees. */
char *shards_find_dir(const char *path);
/* Where config.json and the tokenizer of such a directory are: its huggingface/, or itself; caller frees. */
char *shards_config_dir(const char *dir);
/* The model/huggingface/ of path or of its actor/, which has a config.json: where Megatron runs of verl with mbridge save the
 * model. NULL: none. Caller frees. */
char *shards_saved_model(const char *path);
const char *shards_backend(const char *dir); /* "fsdp" or "megatron", as verl.model_merger names them */
/* Maps the files of all ranks. Errors as fsdp_open's and megatron_open's. */
int shards_open(struct shards **out, const struct shards_args *a);
void shards_close(struct shards *s); /* NULL ok */
int64_t shards_count(const struct shards *s);
const struct shards_tensor *shards_at(const struct shards *s, int64_t i);
const struct shards_tensor *shards_find(const struct shards *s,
                                        const char *name); /* of the model, not of its adapter; NULL if absent */
char *shards_words(const struct shards *s);                /* "4 FSDP ranks", "8 files of Megatron's"; caller frees */
int64_t shards_left(const struct shards *s);               /* tensors of the files that are no weights: the optimizer's state */
bool shards_has_adapter(const struct shards *s);           /* a LoRA run's */
bool shards_is_value(const struct shards *s); /* Megatron's, with a head of one row: a critic's, whatever config.json says */
/* n elements from element `first` on, row-major. */
void shards_read(const struct shards_tensor *t, int64_t first, int64_t n, void *dst);

/* ---- as a model directory (shards_export.c) ---- */
struct shards_export_args {
    const struct shards *s;
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
int shards_export(const struct shards_export_args *a);
/* verl.model_merger's test: names and shapes are those of the model directory hf_dir, values equal as bf16 (1e-6 relative and
 * absolute). ERR_INPUT names the first difference. */
int shards_compare(const struct shards *s, const char *hf_dir);

#endif
