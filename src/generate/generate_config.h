/* generate_config.h - a generation's configuration as one struct.
 *
 * conf/keys/generate.def says which key fills which member. */
#ifndef VERLC_GENERATE_CONFIG_H
#define VERLC_GENERATE_CONFIG_H

#include "ppo/config.h"

struct generate_config { /* constant once it is read */
    struct {
        const char *model_path, *chat_template;
        const json_t *chat_kwargs;
        int64_t seed;
    } raw; /* as it is written */
    const char *const *files;
    const char *prompt_key, *output_path;
    const char *episodes_key; /* NULL: main_generation, which has no agent loops */
    bool episode_tokens;
    json_t *chat_kwargs;                                         /* owned */
    const char *adapter;                                         /* peft directory; NULL: none */
    int64_t n_files, batch_size, prompt_length, response_length; /* batch_size 0: all prompts */
    struct train_model_config model;
    struct ppo_rollout_config rollout; /* .train and the engine's limits */
    struct ppo_agent_config agent;     /* with episodes_key */
    struct trainer_config trainer;     /* .devices, .seed, .run.device, .run.threads and .run.deadline_s */
    const char *length_key, *n_key;    /* of prompt_length and rollout.train.n, for messages */
    const struct conf *conf;           /* borrowed */
};
/* ERR_INVAL names the key; ERR_INPUT: the model's directory. The caller frees k after an error too. */
int generate_config_read(struct generate_config *k, const struct conf *c);
void generate_config_free(struct generate_config *k);
bool generate_writes_parquet(const struct generate_config *k); /* else JSONL */
/* The directory of the output file; caller frees. */
char *generate_output_dir(const struct generate_config *k);

#endif
