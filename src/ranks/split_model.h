/* split_model.h - a frozen model whose layers are split over consecutive ranks, which compute it together: opened straight from its
 * files, so that no rank ever has room for all of it.
 *
 * For models that never change: those of generation, of a server, a judge. A policy that is trained is split by
 * ppo/worker/worker.c, from the weights of the moment. Knows nothing of what the model is for.
 * Invariant: tensor_parallel.h's: a row's bits are those of the model on one rank. */
#ifndef VERLC_RANKS_SPLIT_MODEL_H
#define VERLC_RANKS_SPLIT_MODEL_H

#include "model/files/load.h"
#include "model/parallel/tensor_parallel.h"

struct split_model_args { /* borrowed, until close */
    struct dev *dev;
    const char *dir;     /* Hugging Face directory */
    const char *adapter; /* peft directory; NULL: none */
    enum dtype act;
    int64_t max_len; /* as model_open_args */
    int size;        /* ranks that compute as one, which model_tp_unable allows */
    bool reward;     /* as a reward model: model_open_reward */
};
struct split_model { /* a zeroed one may be closed */
    struct split_model_args a;
    struct comm *together;      /* the ranks that compute as one */
    struct collective *devices; /* theirs */
    struct model *whole;        /* configuration, adapter; until the split embedding, norm and head */
    struct model *part;         /* what passes are made with */
    void *block;                /* of part */
    size_t block_bytes;
};
/* How many of `ranks`, `local` of them on a host, compute as one where n are asked for: n, or 1 with *why, for people. */
int64_t split_model_together(const struct model_config *c, int64_t n, int64_t ranks, int64_t local, const char **why);
/* Device bytes of a rank but for an adapter, for passes of so many rows. dir is read where there is an adapter. */
int split_model_bytes(const struct split_model_args *a, const struct model_config *c, int64_t max_rows, size_t *bytes);
/* The whole one; passes cannot be made yet. The caller sizes its decoder, then splits. */
int split_model_open(struct split_model *s, const struct split_model_args *a);
/* Collective. The groups that compute as one are consecutive ranks of comm, from its first on. For passes of so many rows. */
int split_model_split(struct split_model *s, struct comm *comm, int64_t max_rows);
/* All ranks go on with as many KV blocks as the one with the fewest: they schedule alike. Collective over comm. */
int split_model_agree_blocks(struct comm *comm, int64_t *n);
/* In this order: before what uses the part is closed, so that what waits for a lost rank ends and no memory is read any more; and
 * after it. */
void split_model_leave(struct split_model *s);
void split_model_close(struct split_model *s);

#endif
