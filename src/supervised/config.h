/* config.h - a supervised run's configuration as one struct: every key that acts, read once.
 *
 * conf/keys/sft.def says which key fills which member. A program whose schema is based on it has the same keys, and binds its
 * further ones to a struct of its own. */
#ifndef VERLC_SUPERVISED_CONFIG_H
#define VERLC_SUPERVISED_CONFIG_H

#include "data/data.h"
#include "model/optim/optimizer.h"
#include "ranks/rank_count.h"
#include "run/run.h"
#include "train/activation_recompute.h"
#include "train/lora_keys.h"
#include "train/micro_batch.h"
#include "train/optimizer_keys.h"

struct supervised_program;

/* Where the text of a row of the data is; the program's `read` alone reads it. */
struct supervised_columns {
    const char *messages_key, *tools_key, *enable_thinking_key, *prompt_key, *response_key;
    const char *const *prompt_dict_keys, *const *response_dict_keys;
    int64_t n_prompt_dict_keys, n_response_dict_keys;
    bool multiturn, ignore_input_ids_mismatch;
};

/* Values as they are written, from which config.c derives members below; read by no other file but for model_path. */
struct supervised_raw_config {
    const char *model_path, *chat_template;
    int64_t seed;
    const json_t *chat_kwargs;
    bool checkpointing;
    struct {
        bool dynamic;
        int64_t tokens, each;
    } cut;
    struct train_optim_keys optim;
    struct train_offload_keys offload;
    struct train_lora_keys lora;
};

struct supervised_config {
    const struct conf *conf; /* borrowed */
    struct supervised_raw_config raw;
    struct supervised_columns columns;
    char *model_dir;
    const char *tokenizer_dir;
    json_t *chat_kwargs;
    bool zero_indexed_step;
    struct sft_dataset_args train, val;
    struct run_config run;
    int64_t train_batch_size, grad_chunk, max_length, total_epochs, total_training_steps, memory_limit; /* bytes; 0: all */
    struct micro_batch_limits cut;
    enum dtype act;
    enum train_recompute recompute;
    struct train_lora lora;
    struct optim_config optim;
    double warmup_ratio;
    struct data_sampler_spec sampler;
    uint64_t seed;
    struct train_devices_keys devices;                   /* as requested */
    int64_t n_ranks, n_local, host_memory;               /* of a run or a plan, as in struct ppo_config */
    int n_ray_nodes;                                     /* of a run: on which Ray starts them; 0: not Ray */
    const char **prompt_dict_keys, **response_dict_keys; /* NULL-terminated, owned */
};

/* What the keys say, as they are written. */
int supervised_config_fill(struct supervised_config *k, const struct conf *c);
/* With what follows from it. ERR_INVAL names the key; ERR_INPUT, ERR_FORMAT: a directory that a key names. The caller frees k
 * after an error too. */
int supervised_config_read(struct supervised_config *k, const struct supervised_program *p, const struct conf *c);
void supervised_config_free(struct supervised_config *k);

#endif
