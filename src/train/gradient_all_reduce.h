/* gradient_all_reduce.h - the gradient of a mini-batch, and the step with it, on several ranks.
 *
 * In each wave ranks 0..n-1 have a chunk of consecutive micro-batches, at first of one. A bucket of the gradient goes to a ring of
 * shared memory as soon as it is computed. Each rank folds its part of it onto its sums (model/parallel/parameter_segments.h),
 * overlapped with backward. With longer chunks a rank adds up its own in a whole array, whose buckets are folded from there as the
 * last micro-batch completes them. After the last wave each rank updates what it owns, and the new weights are gathered. Where a
 * rank computes a run of a micro-batch's parts (model/parallel/context_parallel.h), its bucket has a summand of each. Knows no
 * losses and no micro-batches but their rows.
 * Invariant: an element of the gradient is the left fold over the chunks in order, each the left fold over its micro-batches,
 * whatever the number of ranks, and all ranks make the same calls with the same sizes. */
#ifndef VERLC_TRAIN_GRADIENT_ALL_REDUCE_H
#define VERLC_TRAIN_GRADIENT_ALL_REDUCE_H

#include "device/collective/collective.h"
#include "model/files/load.h"
#include "model/forward.h"
#include "model/lora/lora.h"
#include "model/optim/optimizer.h"

/* A rank's shard of a model that is trained with this optimizer: model_open_args.shard. g NULL: all of it. experts: it has whole
 * experts (model/parallel/expert_dispatch.h), and adds up their gradients by itself. */
struct model_shard all_reduce_shard(const struct collective *g, const struct optim_config *c, bool experts);

struct all_reduce;
/* Collective. m was opened with the rank's shard. */
struct all_reduce_args {
    int64_t max_rows; /* of a micro-batch */
    bool chunks;      /* a chunk may have several micro-batches */
    int times;        /* summands of a rank's bucket, at most; 0: 1. With chunks 1 */
    float *sums;      /* (m->n_master) f32, device, borrowed */
};
int all_reduce_create(struct all_reduce **out, struct collective *g, struct model *m, const struct all_reduce_args *a);
void all_reduce_destroy(struct all_reduce *r); /* NULL ok; not while a rank may still read from this one */
/* A rank's memory for a trained model, in bytes, the largest of the ranks; before anything is opened. */
struct all_reduce_memory {
    size_t master, sums, moments; /* master: of the device's, or with c->host_master of the host's */
    size_t chunk;                 /* a chunk's gradient; 0: without chunks */
    size_t exchange;              /* the ring, other shared memory, the group's own */
    size_t host;                  /* of the moments: bytes in host memory instead */
};
struct rank_memory_args {
    const struct model_config *config;
    struct dev *dev;
    const struct model_open_args *open;
    const struct lora_config *lora; /* NULL: none */
    const struct optim_config *optim;
    int64_t max_rows;
    bool chunks;
    int times;        /* as in all_reduce_args */
    int ranks, local; /* all, and those of this host */
};
int all_reduce_memory(struct all_reduce_memory *out, const struct rank_memory_args *a);

/* The next wave, of n chunks, or runs of parts. */
struct all_reduce_wave {
    int n;
    /* (ranks) model_embedded_rows of each rank's micro-batch where chunks have one, 0 from n on. It must last until the wave's last
     * backward is queued; so must times, (n) the parts of each rank's run, NULL: one. */
    const int64_t *n_rows;
    const int *times;
    bool first; /* of the mini-batch */
};
void all_reduce_wave(struct all_reduce *r, const struct all_reduce_wave *w);
/* Where this rank's next backward pass of the wave goes. add: its chunk has a micro-batch already. fold: it is the wave's last
 * pass, on every rank the same. */
int all_reduce_sink(struct all_reduce *r, bool add, bool fold, struct model_grad_sink *sink);
/* Instead of the wave's last pass, of a rank without one: its chunk, if it has one, is complete. */
int all_reduce_idle(struct all_reduce *r);
/* The compute stream waits until sums are complete. */
int all_reduce_join(struct all_reduce *r);
/* As optim_step, with sums; o: of the rank's shard. */
int all_reduce_step(struct all_reduce *r, struct optim *o, const struct optim_config *c, double lr, struct optim_result *result);

#endif
