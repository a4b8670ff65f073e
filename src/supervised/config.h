/* config.h - a supervised run's configuration as one struct: every key that acts, read once.
 *
 * conf/keys/sft.def says which key fills which member. A program whose schema is based on it has the same keys, and binds its
 * further ones to a struct of its own. */
#ifndef VERLC_SUPERVISED_CONFIG_H
#define VERLC_SUPERVISED_CONFIG_H

#include "data/data.h"
#include "model/optim/optimizer.h"
#include "ranks/trainer_config.h"
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
    struct micro_batch_keys cut;
    struct train_optim_keys optim;
    struct train_engine_keys engine;
    struct train_lora_keys lora;
};

struct supervised_data_config { /* data */
    struct sft_dataset_args train, val;
    struct data_sampler_spec sampler;
    struct micro_batch_limits cut;
    int64_t train_batch_size, grad_chunk, max_length, context; /* context: parts of a micro-batch; 1: not cut */
    int64_t experts;                                           /* above 1: updates have the experts on their ranks */
    json_t *chat_kwargs;
};

/* The configuration, constant once it is read. */
struct supervised_config {
    const struct conf *conf; /* borrowed */
    struct supervised_raw_config raw;
    struct supervised_columns columns;
    struct supervised_data_config data;
    struct train_model_config model;
    struct optim_config optim;
    struct trainer_config trainer;
};

/* What of it is on devices, for a worker and its plan, who decide what keys leave open: offload, the optimizer's steps. */
struct supervised_worker_config {
    const struct conf *conf;
    const struct trainer_config *trainer;
    struct supervised_data_config data;
    struct train_model_config model;
    struct optim_config optim;
    struct rank_placement ranks;
};
static inline struct supervised_worker_config supervised_worker_config(const struct supervised_config *k,
                                                                       struct rank_placement ranks) {
    return (struct supervised_worker_config){k->conf, &k->trainer, k->data, k->model, k->optim, ranks};
}

/* ERR_INVAL names the key; ERR_INPUT, ERR_FORMAT: a directory that a key names. The caller frees k after an error too. */
int supervised_config_read(struct supervised_config *k, const struct supervised_program *p, const struct conf *c);
void supervised_config_free(struct supervised_config *k);

#endif
