/* generator.h - what a generation has on devices: a model and its decoder. generate.c calls the operations of a worker
 * (ranks/worker.h). Here is how it is opened in this process, which may be a rank.
 *
 * Invariant: a sample is a function of (trainer.seed, row, sample): batch-invariant. */
#ifndef VERLC_GENERATE_GENERATOR_H
#define VERLC_GENERATE_GENERATOR_H

#include "engine/engine.h"
#include "generate/generate_config.h"
#include "ranks/start_workers.h"
#include "ranks/worker.h"
#include "text/text.h"

struct generator {
    struct worker base;              /* first; worker_open_local comes before generator_open */
    const struct generate_config *k; /* borrowed */
    struct tokenizer *tok;
    /* of ranks that generate together, each with a part of the model (model/parallel/tensor_parallel.h); else NULL */
    struct comm *together;               /* them */
    struct collective *devices, *splits; /* the devices of all ranks, which have shares of the weights, and theirs */
    struct model *split;                 /* in block, behind the room that layers go through */
    void *block;
    size_t block_bytes;
    const char *alone; /* why not as many as the key says generate together; NULL: they do */
};
/* What a decoder is for: the longest prompt, prompts at a time (0: any number), and ranks that share the host's memory. */
struct generator_size {
    int64_t longest, prompts;
    int local_ranks;
};
/* How many of so many ranks, `local` of them on a host, generate together; *why: why not as many as the key says, or NULL. */
int64_t generator_together(const struct generate_config *k, const struct model_config *c, int64_t ranks, int64_t local,
                           const char **why);
/* Bytes of the block above for passes of the decoder's rows. */
int generator_split_bytes(const struct generate_config *k, struct dev *dev, const struct model_config *c, int64_t together,
                          const struct decoder_args *a, size_t *bytes);
struct decoder_args generator_decoder(const struct generate_config *k, struct dev *dev, const struct model_config *c,
                                      struct generator_size s);
int generator_open(struct generator *g, struct generator_size s);
void generator_close(struct generator *g); /* a zeroed one is fine */

/* A rank's own calls in addition to worker_calls.h's; they end with a name NULL. */
extern const struct worker_process_service generator_services[];

#endif
