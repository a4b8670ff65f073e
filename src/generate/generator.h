/* generator.h - what a generation has on devices: a model and its decoder. generate.c calls the operations of a worker
 * (ranks/worker.h). Here is how it is opened in this process, which may be a rank.
 *
 * Invariant: a sample is a function of (trainer.seed, row, sample): batch-invariant. */
#ifndef VERLC_GENERATE_GENERATOR_H
#define VERLC_GENERATE_GENERATOR_H

#include "engine/engine.h"
#include "generate/generate_config.h"
#include "ranks/split_model.h"
#include "ranks/start_workers.h"
#include "ranks/worker.h"
#include "text/text.h"

struct generator {
    struct worker base;              /* first; worker_open_local comes before generator_open */
    const struct generate_config *k; /* borrowed */
    struct tokenizer *tok;
    struct split_model split; /* of ranks that generate together; else zeros */
    const char *alone;        /* why not as many as the key says generate together; NULL: they do */
};
/* What a decoder is for: the longest prompt, prompts at a time (0: any number), and ranks that share the host's memory. */
struct generator_size {
    int64_t longest, prompts, together; /* together: ranks that generate as one */
    int local_ranks;
};
/* The model as so many ranks that generate together have it. */
struct split_model_args generator_split(const struct generate_config *k, struct dev *dev, int64_t max_len, int64_t together);
/* The decoder of a rank, with rollout.gpu_memory_utilization of the memory for its KV cache, or
 * what the weights leave; and their bytes, without an adapter. c: the model's. */
int generator_decoder(struct decoder_args *out, const struct generate_config *k, struct dev *dev, const struct model_config *c,
                      struct generator_size s, size_t *weights);
int generator_open(struct generator *g, struct generator_size s);
void generator_close(struct generator *g); /* a zeroed one is fine */

/* A rank's own calls in addition to worker_calls.h's; they end with a name NULL. */
extern const struct worker_process_service generator_services[];

#endif
