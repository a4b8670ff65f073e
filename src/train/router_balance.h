/* router_balance.h - the load of experts in a mini-batch: what the load-balancing loss is multiplied by, and its metrics.
 *
 * The loss is transformers' load_balancing_loss_func: E sum_e f_e P_e, f_e the choices of expert e and P_e its probability, both a
 * mean over all tokens and routers together; it is k where the load is even. It is defined over the mini-batch, so f is counted
 * before the first backward pass.
 * Invariant: neither depends on micro-batches or ranks. */
#ifndef VERLC_TRAIN_ROUTER_BALANCE_H
#define VERLC_TRAIN_ROUTER_BALANCE_H

#include "conf/conf.h"
#include "model/config.h"

#include <stdint.h>

/* The load of a mini-batch, and what came of it. */
struct router_load {
    int64_t layers, experts;       /* layers 0: the model has no router */
    int64_t rows;                  /* tokens */
    double max_over_mean, entropy; /* router_load_metrics */
    bool balanced;                 /* there is a load-balancing loss: */
    double loss;                   /* with its coefficient */
};
/* load (E): of model_router_balance, from count (layers, E). */
void router_balance_load(const struct router_load *r, const int64_t *count, double coef, float *load);
/* The busiest expert's load over the mean, the largest of all layers; the entropy of the load over that of an even one, the mean
 * over layers. */
void router_load_metrics(struct router_load *r, const int64_t *count);

/* The keys of a router. */
struct train_router_keys {
    bool balance;                   /* override_config.output_router_logits */
    double aux_coef;                /* override_config.router_aux_loss_coef */
    bool freeze;                    /* override_config.moe_config.freeze_moe_router */
    bool has_balance, has_aux_coef; /* they are given; else config.json has them (train_router_given) */
};
void train_router_given(struct train_router_keys *k, const struct conf *c, const char *section); /* "model" and the like */
/* The coefficient of the load-balancing loss; 0: there is none. ERR_FORMAT: config.json's is no number. */
int router_balance_coef(const struct train_router_keys *k, const struct model_config *c, double *coef);

#endif
