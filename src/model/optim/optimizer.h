/* optimizer.h - AdamW, 8-bit AdamW, Adam, RAdam, RMSprop, SGD and Muon over the flat fp32 master; learning-rate schedules. */
#ifndef VERLC_MODEL_OPTIMIZER_H
#define VERLC_MODEL_OPTIMIZER_H

#include "model/lora/lora.h"
#include "model/parallel/parameter_segments.h"
#include "model/parameters.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum optim_kind {
    OPTIM_ADAMW,  /* torch.optim.AdamW on everything */
    OPTIM_ADAMW8, /* the same with 8-bit moments of matrices (Dettmers et al., 2022) */
    OPTIM_SGD,    /* torch.optim.SGD: momentum, dampening, nesterov; weight decay in the gradient */
    OPTIM_MUON,   /* torch.optim.Muon on the matrices of the layers, AdamW on embedding, head and vectors */
    OPTIM_ADAM,   /* torch.optim.Adam: weight decay in the gradient */
    OPTIM_RADAM,  /* torch.optim.RAdam: the same */
    OPTIM_RMSPROP /* torch.optim.RMSprop: the same */
};
const char *optim_kind_name(enum optim_kind k);

struct optim_config {
    enum optim_kind kind;
    double lr, beta1, beta2, eps, weight_decay, clip;
    double momentum, dampening;   /* SGD; Muon, RMSprop: momentum */
    double alpha;                 /* RMSprop */
    bool amsgrad;                 /* AdamW, Adam: divides by the largest mean of squares so far */
    bool centered;                /* RMSprop: by the spread about the mean gradient */
    bool maximize;                /* AdamW, Adam, RAdam, RMSprop, SGD: up the gradient */
    bool decoupled;               /* Adam, RAdam: weight decay as AdamW's */
    bool nesterov;                /* SGD, Muon */
    int64_t ns_steps;             /* Muon: Newton-Schulz iterations */
    bool host_state, host_master; /* state arrays, and what model_open put there: the master, are in host memory */
    bool muon_original_lr;        /* Muon's update times sqrt(max(1, rows / cols)), else 0.2 sqrt(max(rows, cols)), AdamW's size */
    const char *schedule;         /* constant | cosine | linear | wsd */
    int64_t warmup_steps, total_steps; /* of the schedule, warm-up included */
    int64_t decay_steps;               /* over 0: total_steps, whatever the run has, and its end holds after them (Megatron) */
    double warmup_ratio, min_lr_ratio, num_cycles, init_lr_ratio; /* warmup_ratio: of total_steps, where warmup_steps is 0 */
    bool zero_indexed_step;                                       /* the schedule's first step is 0 (verl 0.9.1), else 1 */
};
double optim_lr(const struct optim_config *c, int64_t step); /* factor * lr at 0-based step, by c->schedule */

/* A range of what the model trains under one rule. State indices count elements of their arrays. */
struct optim_run {
    enum optim_kind rule;
    int64_t offset, n;        /* elements of the model's flat arrays */
    int64_t at;               /* where they are in the optimizer's master and gradients */
    int64_t rows, cols;       /* of its parameter */
    int64_t seg, n_seg;       /* its segments */
    int64_t m_at, v_at, x_at; /* f32 state; -1: none */
    int64_t q_at, b_at;       /* 8-bit state: codes and blocks; -1: none */
    bool frozen;              /* it stays as it is */
};
/* Optimizer state, on the device, in arrays that are as long as this optimizer needs. */
struct optim {
    enum optim_kind kind;
    struct optim_run *runs; /* in the order of the flat arrays */
    int64_t n_runs;
    int64_t n_own; /* elements of master and gradients */
    int64_t n_segments;
    int64_t *segments, *d_segments; /* (n_segments, 2), host and device: first element, length */
    double *sums, *d_sums;          /* (n_segments): of squares */
    int64_t n_m, n_v, n_x, n_q, n_b;
    float *m, *v;             /* (n_m) momentum, (n_v) second moment */
    float *x;                 /* (n_x) the largest second moment (amsgrad), the mean gradient (centered) */
    uint8_t *m_code, *v_code; /* (n_q) */
    float *m_scale, *v_scale; /* (n_b) */
    float *book;              /* (2, 256): code books of m and of v */
    struct optim_scratch {    /* of one matrix, or of a piece of it */
        float *x, *y;         /* f32 */
        void *act, *pack;     /* compute dtype; packed for the GEMMs */
        void *gram_act;
        float *gram, *gram2; /* (r, r), r the shorter side */
        size_t pack_bytes;
        float *piece[2][4]; /* of what is in host memory: master, m, v, x on the device, two pieces in turn */
    } s;
    bool momentum; /* SGD, RMSprop: it keeps one */
    bool third;    /* amsgrad, centered: it keeps x */
    bool host_state, host_master;
    void *host_block; /* the state arrays where they are in host memory; owned */
    size_t host_bytes;
    void *block; /* all of the above; owned */
    size_t block_bytes;
    int64_t step; /* steps taken */
};
/* What training takes on the device, in bytes. */
struct optim_plan {
    size_t adapter;         /* its compute copies and scratch; 0: there is none */
    size_t master, moments; /* gradients take as much as the master */
    size_t host;            /* of the moments: what is in host memory instead */
    int64_t n_train;        /* elements */
};
/* Of all weights of such a model, or of its adapter where lora is not NULL. */
int optim_plan(struct optim_plan *p, const struct model_config *c, struct dev *dev, enum dtype act, const struct lora_config *lora,
               const struct optim_config *o);
/* Device bytes of the state of a rank's part, the largest of the ranks; m: a shape is enough. *host: in host memory; NULL ok. */
size_t optim_part_bytes(const struct model *m, const struct optim_config *c, struct model_shard s, size_t *host);
/* c: which optimizer, its momentum, amsgrad and centered; the rest may change from step to step. All state is zero. */
int optim_create(struct optim **out, struct model *m, const struct optim_config *c);
/* Of the ranges own (n) alone, in order, each a run of segments; Muon's hold whole matrices. Then master, gradients and state
 * are arrays of these ranges, one after the other, and each element is updated as by the optimizer of the whole. */
int optim_create_part(struct optim **out, struct model *m, const struct optim_config *c, const struct model_range *own, int64_t n);
void optim_destroy(struct optim *o, struct model *m);
/* The arrays that a checkpoint must hold, under their names there ("exp_avg", ...). */
enum { OPTIM_MAX_ARRAYS = 7 };
struct optim_array {
    const char *name;
    enum dtype dt;
    int64_t n;
    void *data; /* device */
};
int optim_arrays(const struct optim *o, struct optim_array out[OPTIM_MAX_ARRAYS]);
/* o takes elements at `data` for its array of a's name, and a's length for its own. */
void optim_set_array(struct optim *o, const struct optim_array *a, void *data);
/* Where the arrays of an optimizer of some ranges are in those of the whole model's: elements [own, own + n) here are
 * [at, at + n) there. */
struct optim_piece {
    int array; /* of `whole` */
    int64_t at, own, n;
};
/* whole: the arrays of a checkpoint, master and then optim_arrays of the whole, with their lengths there; data: this
 * optimizer's own elements, NULL: it has none. pieces: by array, then by place; caller frees. Returns how many arrays. */
int optim_pieces(const struct optim *o, const struct model *m, struct optim_array whole[OPTIM_MAX_ARRAYS + 1],
                 struct optim_piece **pieces, int64_t *n_pieces);
struct optim_result {
    double grad_norm;    /* before clipping; not finite: nothing was changed */
    char bad_tensor[96]; /* first tensor with a non-finite gradient, or "" */
};
/* Clips by global norm, updates master and state, refreshes the compute copy. A
 * non-finite norm changes nothing and is reported in r (return is 0). grads is overwritten. */
int optim_step(struct optim *o, struct model *m, float *grads, const struct optim_config *c, double lr, struct optim_result *r);

/* Its two parts, for an optimizer of some ranges: o->sums; then, given the sums of all segments of the model (n, in order),
 * the norm; then clipping and the update of what is the optimizer's. The compute copy is left to the caller. */
int optim_sums(struct optim *o, struct model *m, float *grads);
void optim_norm(const struct model *m, const double *sums, struct optim_result *r);
int optim_update(struct optim *o, struct model *m, float *grads, const struct optim_config *c, double lr, double grad_norm);

#endif
