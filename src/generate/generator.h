/* generator.h - the part of a generation that has a device: a model and its decoder.
 *
 * In one process a call is a function call; with several ranks each has one of these, which serves generate.c's calls.
 * Invariant: a sample is a function of (trainer.seed, row, sample): batch-invariant. */
#ifndef VERLC_GENERATE_GENERATOR_H
#define VERLC_GENERATE_GENERATOR_H

#include "engine/rollout.h"
#include "generate/generate_config.h"
#include "ranks/start_workers.h"
#include "text/text.h"

struct generator {
    const struct generate_config *k; /* borrowed */
    struct dev dev;                  /* opened before generator_open */
    struct tokenizer *tok;
    struct model *model;
    struct rollout_decoder *decoder;
    struct rollout_engine *engine; /* of the generation under way */
};
/* What a decoder is for: the longest prompt, prompts at a time (0: any number), and ranks that share the host's memory. */
struct generator_size {
    int64_t longest, prompts;
    int local_ranks;
};
struct rollout_decoder_args generator_decoder(const struct generate_config *k, struct dev *dev, const struct model_config *c,
                                              struct generator_size s);
int generator_open(struct generator *g, struct generator_size s);
void generator_close(struct generator *g); /* a zeroed one is fine */

/* ---- between begin and end ---- */
int generator_begin(struct generator *g, const struct rollout_config *c); /* of c: done and its argument */
int generator_add(struct generator *g, const struct rollout_request *q);  /* its end tokens are the model's */
int generator_step(struct generator *g);                                  /* 1: work remains */
void generator_end(struct generator *g);

/* A rank's own calls in addition to worker_calls.h's; they end with a name NULL. */
extern const struct ctl_service generator_services[];

#endif
