/* router_balance.h - the load of experts in a mini-batch: what the load-balancing loss is multiplied by, and its metrics.
 *
 * Two losses. transformers' load_balancing_loss_func: E sum_e f_e P_e, f_e the choices of expert e and P_e its probability, both a
 * mean over all tokens and routers together; it is k where the load is even. Megatron's aux_loss: E/k sum_e f_e P_e of each layer,
 * added up, 1 for a layer whose load is even; f counts the k largest scores, whatever a bias, groups or recorded choices make of
 * them. And Megatron's z-loss. They are defined over the mini-batch, so f is counted before the first backward pass.
 * Invariant: none depends on micro-batches or ranks. */
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
    bool balanced, has_z;          /* there is a load-balancing loss, a z-loss: */
    double loss, z_loss;           /* with their coefficients, the sum over the layers */
};
/* What is added to the loss of a model with experts. */
struct router_losses {
    double balance; /* coefficient of the load-balancing loss; 0: none */
    bool by_layer;  /* Megatron's */
    double z;       /* coefficient of the z-loss */
};
/* load (layers, E), z: of model_router_balance, from count (layers, E) of choices, k a token. */
void router_balance_load(const struct router_load *r, const int64_t *count, int64_t k, const struct router_losses *c, float *load);
float router_z(const struct router_load *r, const struct router_losses *c);
/* The busiest expert's load over the mean, the largest of all layers; the entropy of the load over that of an even one, the mean
 * over layers. */
void router_load_metrics(struct router_load *r, const int64_t *count);

enum router_balancing { ROUTER_BALANCING_NONE, ROUTER_BALANCING_AUX_LOSS }; /* Megatron's moe_router_load_balancing_type */

/* The keys of a router. */
struct train_router_keys {
    bool balance;                   /* override_config.output_router_logits */
    double aux_coef;                /* override_config.router_aux_loss_coef */
    bool freeze;                    /* override_config.moe_config.freeze_moe_router */
    bool has_balance, has_aux_coef; /* they are given; else config.json has them (train_router_given) */
    struct {
        enum router_balancing balancing;
        double aux, z; /* moe_aux_loss_coeff, moe_z_loss_coeff */
        bool has_aux;
    } megatron; /* override_transformer_config.* of Megatron's engine */
};
/* section: "model" and the like; engine: "engine", "actor_rollout_ref.actor.megatron". Notes a coefficient that does nothing. */
void train_router_given(struct train_router_keys *k, const struct conf *c, const char *section, const char *engine);
/* ERR_INVAL: two load-balancing losses; ERR_FORMAT: config.json's coefficient is no number. */
int router_losses(const struct train_router_keys *k, const struct model_config *c, struct router_losses *out);

#endif
