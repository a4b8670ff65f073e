/* trained_model_int.h - what the files of a trained model share: its state (trained_model.c), and the passes that training is made
 * of (training_pass.c). */
#ifndef VERLC_TRAIN_TRAINED_MODEL_INT_H
#define VERLC_TRAIN_TRAINED_MODEL_INT_H

#include "comm/comm.h"
#include "train/trained_model.h"

#include "base/buf.h"

struct trained_model {
    struct dev *dev;
    struct model *model;
    struct model_acts *acts;
    struct optim *optim;
    float *grads;
    void *owned_grads, *owned_chunk; /* NULL: in the block */
    int64_t grad_chunk;              /* micro-batches of a chunk */
    float *chunk;                    /* one rank, as grads: the current chunk, after the first; NULL: a chunk has one micro-batch */
    struct collective *group;        /* NULL: one rank */
    struct all_reduce *ranks;        /* with a group, in training */
    struct pack pack;
    struct model_list list; /* k 0: none */
    bool no_adapter;
    bool collective;       /* passes are: the weights are sharded, or ranks share rows */
    struct {               /* rows of a micro-batch over ranks (parallel/context_parallel.h) */
        int parts;         /* of an update; 1: not cut */
        int size;          /* ranks that share rows; 1: none */
        int groups;        /* of these; 0: none */
        struct comm *comm; /* this rank's group; NULL: it is in none */
        struct collective *group;
        bool borrowed; /* both are another model's */
        struct model_context *ranks;
        struct model_parts cut; /* of the micro-batch at hand: what ranks have of it; of one rank, its parts */
        struct model_parts own; /* of this rank's rows, among several that share them */
        int first;              /* of its parts */
        int *times;             /* (ranks) parts of each in a wave, where there may be several */
    } context;
    struct routers { /* of a mini-batch */
        struct router_losses losses;
        int64_t n, *count;  /* (n): choices by layer and expert; n 0: the model has none */
        int64_t *scored;    /* (n), of Megatron's load-balancing loss: model_router_by_scores; else NULL */
        float *load;        /* (n) */
        double *loss;       /* by micro-batch and part both losses, of those that are this rank's; the others 0 */
        bool counted, read; /* count is of the whole mini-batch; load has been read from it */
    } routers;
    void *owned_block;
    size_t block_bytes;
    /* host, (max_rows); out: log-probs or values */
    float *inv_temp, *out, *entropy, *sum_pi_sq, *dout, *dentropy;
    struct {
        double weight;   /* 0: no loss */
        int64_t n;       /* of the mini-batch: tokens that it predicts */
        int32_t *d_next; /* (max_rows) device: the token after each row */
        int32_t *next, *row, *target;
        float *ones, *logp, *dlogp;
    } mtp;
    struct buf record;  /* of the current micro-batch */
    struct buf records; /* with a group: those of a wave's chunk */
    size_t slot;        /* the largest size of any rank's records so far */
};

/* Consecutive ranks that compute a micro-batch together. */
static inline int ranks_of_one(const struct trained_model *t) { return t->context.size; }
/* Never 0, as of the master. */
size_t trained_model__grads_bytes(const struct trained_model *t);
/* The lists of the targets from `at` on; NULL where there are none. */
struct model_list *trained_model__list(struct trained_model *t, const struct token_lists *s, int64_t at);
/* The rows of b through model and head: t->out of targets r. l: what the head adds to log-probs; completed here. */
int trained_model__forward(struct trained_model *t, float temperature, struct pack_targets r, struct model_batch *b,
                           struct model_logp_args *l);
/* Cuts the micro-batch in b; where ranks share rows, b and *own are left with this rank's part, and at[size + 1] says where the
 * outputs of each begin. */
int trained_model__take_part(struct trained_model *t, const struct pack_micro *m, int parts, struct model_batch *b,
                             struct pack_targets *own, int64_t *at);
/* x: outputs of own targets, `width` of 4 bytes each, become those of all, on each rank of the group. NULL: nothing. */
int trained_model__gather(struct trained_model *t, void *x, const int64_t *at, int64_t width);
/* The same of lists of the targets from `first` on. */
int trained_model__gather_lists(struct trained_model *t, const struct token_lists *s, int64_t first, const int64_t *at);

#endif
