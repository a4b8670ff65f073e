/* generate_config.h - a generation's configuration as one struct.
 *
 * conf/keys/generate.def says which key fills which member. */
#ifndef VERLC_GENERATE_CONFIG_H
#define VERLC_GENERATE_CONFIG_H

#include "device/device.h"
#include "ranks/rank_count.h"

#include <jansson.h>

struct generate_config {
    const char *const *files;
    const char *prompt_key, *output_path, *device, *model_path, *tokenizer_dir, *chat_template;
    const char *adapter; /* peft directory; NULL: none */
    char *model_dir;
    int64_t n_files, n_samples, batch_size, prompt_length, response_length, max_num_seqs, max_num_batched_tokens, seed;
    struct train_devices_keys devices;
    int64_t n_ranks;
    int n_ray_nodes; /* on which Ray starts them; 0: not Ray */
    int threads;
    double temperature, top_p, memory_fraction;
    int64_t top_k;
    bool ignore_eos;
    enum dtype act;
    const json_t *chat_kwargs;
    const char *length_key, *n_key; /* of prompt_length and n_samples, for messages */
    const struct conf *conf;        /* borrowed */
};
/* ERR_INVAL names the key; ERR_INPUT: the model's directory. The caller frees k after an error too. */
int generate_config_read(struct generate_config *k, const struct conf *c);
void generate_config_free(struct generate_config *k);
/* The directory of the output file; caller frees. */
char *generate_output_dir(const struct generate_config *k);

#endif
