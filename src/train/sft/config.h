/* config.h - an sft run's configuration as one struct: every key that acts, read once.  Private to train. */
#ifndef VERLC_TRAIN_SFT_CONFIG_H
#define VERLC_TRAIN_SFT_CONFIG_H

#include "data/data.h"
#include "model/optim/optimizer.h"
#include "train/run/activation_recompute.h"
#include "train/run/lora_keys.h"
#include "train/run/micro_batch.h"

enum { SFT_EVERY_EPOCH = -2 }; /* save_freq, test_freq = after_each_epoch */

struct sft_config {
    char *model_dir;
    const char *tokenizer_dir;
    json_t *chat_kwargs;
    bool zero_indexed_step;
    struct sft_dataset_args train, val;
    int64_t train_batch_size, max_length, total_epochs, total_training_steps, save_freq, test_freq, keep_ckpts, threads,
        max_bad_steps, memory_limit; /* bytes; 0: all */
    double deadline_s;
    struct actor_cut cut;
    enum dtype act;
    enum train_recompute recompute;
    struct train_lora lora;
    struct optim_config optim;
    double warmup_ratio;
    struct data_sampler_spec sampler;
    uint64_t seed;
    const char *project, *experiment, *default_local_dir, *resume_mode, *resume_from, *device;
    const char *const *loggers;
    int64_t n_loggers;
    const char **prompt_dict_keys, **response_dict_keys; /* NULL-terminated, owned */
};

int sft_config_read(struct sft_config *k, const struct conf *c);
void sft_config_free(struct sft_config *k);

#endif
