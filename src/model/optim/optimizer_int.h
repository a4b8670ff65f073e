/* optimizer_int.h - private to model: one step of one run of each optimizer, and their layouts. */
#ifndef VERLC_MODEL_OPTIMIZER_INT_H
#define VERLC_MODEL_OPTIMIZER_INT_H

#include "model/model_int.h"
#include "model/optim/optimizer.h"

/* One step of one run, with gradients times scale. */
struct optim_run_args {
    struct model *m;
    float *grads;
    const struct optim_config *c;
    double lr;
    float scale;
    int64_t step; /* 1-based */
};
/* A step of AdamW: the master, the moments and the gradients of one piece. */
static inline struct adamw_args optim__adamw(const struct optim_run_args *a, struct tensor p, struct tensor m, struct tensor v,
                                             struct tensor g) {
    return (struct adamw_args){p, m, v, g, a->lr, a->c->beta1, a->c->beta2, a->c->eps, a->c->weight_decay, a->scale, a->step};
}
/* One that is updated element by element from f32 means of squares, whole or piece by piece. */
static inline bool optim__adaptive(enum optim_kind rule) {
    return rule == OPTIM_ADAMW || rule == OPTIM_ADAM || rule == OPTIM_RADAM || rule == OPTIM_RMSPROP;
}
/* A step of such a run on one piece: of master, m, v and x (NULL: not kept) in `at`, and the gradients. */
int optim__adaptive_step(const struct optim_run_args *a, enum optim_kind rule, float *const at[4], float *grads, int64_t n);
/* o->sums of the run's segments, of x (r->n) in place of its gradients. */
int optim__sumsq(struct optim *o, struct model *m, const struct optim_run *r, struct tensor x);
int optim__adamw8_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a);
int optim__muon_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a);
/* An adaptive run's arrays in host memory, piece by piece; the new master is left in the gradients. */
int optim__pieces(struct optim *o, const struct optim_run *r, const struct optim_run_args *a);
void optim__pieces_layout(struct optim *o, struct arena *m);
/* Claims the scratch of the largest runs; fields that no run needs stay NULL. arrays: of the state. */
void optim__adamw8_layout(struct optim *o, struct arena *m, struct arena *arrays);
void optim__muon_layout(struct optim *o, struct dev *dev, enum dtype act, struct arena *m);
/* Ascending code book of the dynamic data type, signed for m, not negative for v. */
void optim__dynamic_book(bool is_signed, float book[256]);

#endif
