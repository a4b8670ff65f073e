/* model_memory.h - device memory of a trained model in addition to its activations, the same in every plan. */
#ifndef VERLC_PLAN_MODEL_MEMORY_H
#define VERLC_PLAN_MODEL_MEMORY_H

#include "model/files/load.h"
#include "train/lora_keys.h"

/* Bytes in 2 MiB pages, of one rank; where ranks differ, of the one that takes the most. */
struct model_memory {
    size_t weights, adapter, master, grads, moments, host; /* master 0: in host memory; host: bytes in host memory instead */
    size_t chunk,
        shared_chunk; /* the gradient of a chunk of micro-batches: of one rank, and that several share; 0: there is none */
    size_t exchange;  /* in addition, memory that several ranks share for gradients and weights */
    size_t copy;      /* a rank's share of the copy of what a checkpoint holds, in its host's memory (ckpt/async_save.h) */
    int64_t n_train;  /* elements of an adapter; 0: the whole model is trained */
    double uneven;    /* by how much the largest shard is over the mean of all, as a share of it */
};
struct model_memory_args {
    const struct model_config *config;
    struct dev *dev;
    const struct model_open_args *open;
    const struct train_lora *lora;
    const struct optim_config *optim;
    int64_t max_rows;     /* of an update's micro-batch */
    int64_t grad_chunk;   /* micro-batches whose gradients are summed first */
    int64_t parts;        /* of a micro-batch, a summand each (parallel/context_parallel.h); 0: 1 */
    int64_t ranks, local; /* all, and those of a host; 0, 1: one */
};
int model_memory(struct model_memory *o, const struct model_memory_args *a);
static inline size_t model_memory_bytes(const struct model_memory *o) {
    return o->weights + o->adapter + o->master + o->grads + o->chunk + o->shared_chunk + o->moments + o->exchange;
}
/* Without gradients that are unused between updates, whose memory other phases may use. */
static inline size_t model_memory_kept_bytes(const struct model_memory *o) { return model_memory_bytes(o) - o->grads - o->chunk; }
/* What the ops need to know of it. rows: of the largest pass; train_rows: of the largest update; decode: of the largest decoding
 * step. */
struct dev_sizes model_dev_sizes(const struct model_config *c, enum dtype act, int64_t rows, int64_t train_rows, int64_t decode);
/* The ops serve another model as well. */
void model_dev_sizes_widen(struct dev_sizes *s, const struct model_config *c);

#endif
