/* router_balance.c - see router_balance.h. */
#include "train/router_balance.h"

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "model/families.h"

#include <math.h>
#include <stdio.h>

void router_balance_load(const struct router_load *r, const int64_t *count, int64_t k, const struct router_losses *c, float *load) {
    const int64_t n = r->experts;
    const double rows = (double)r->rows, tokens = (double)r->layers * rows, by = c->balance * (double)n;
    for (int64_t e = 0; e < n; e++) {
        int64_t all = 0;
        for (int64_t l = 0; l < r->layers; l++) all += count[l * n + e];
        for (int64_t l = 0; l < r->layers; l++) {
            const double share = c->by_layer ? (double)count[l * n + e] / ((double)k * rows) : (double)all / tokens;
            load[l * n + e] = rows > 0 && c->balance > 0 ? (float)(by * share / (c->by_layer ? rows : tokens)) : 0;
        }
    }
}

float router_z(const struct router_load *r, const struct router_losses *c) {
    return r->rows > 0 ? (float)(c->z / (double)r->rows) : 0;
}

void router_load_metrics(struct router_load *r, const int64_t *count) {
    double entropies = 0;
    r->max_over_mean = 0;
    for (int64_t l = 0; l < r->layers; l++, count += r->experts) {
        int64_t sum = 0, most = 0;
        double entropy = 0;
        for (int64_t e = 0; e < r->experts; e++) {
            sum += count[e];
            most = count[e] > most ? count[e] : most;
        }
        for (int64_t e = 0; e < r->experts; e++) {
            const double share = sum > 0 ? (double)count[e] / (double)sum : 0;
            if (share > 0) entropy -= share * log(share);
        }
        const double ratio = sum > 0 ? (double)most * (double)r->experts / (double)sum : 0;
        r->max_over_mean = fmax(r->max_over_mean, ratio);
        entropies += r->experts > 1 ? entropy / log((double)r->experts) : 1;
    }
    r->entropy = r->layers > 0 ? entropies / (double)r->layers : 0;
}

void train_router_given(struct train_router_keys *k, const struct conf *c, const char *section, const char *engine) {
    char key[160];
    snprintf(key, sizeof key, "%s.override_config.output_router_logits", section);
    k->has_balance = !conf_is_null(c, key);
    snprintf(key, sizeof key, "%s.override_config.router_aux_loss_coef", section);
    k->has_aux_coef = !conf_is_null(c, key);
    snprintf(key, sizeof key, "%s.override_transformer_config.moe_aux_loss_coeff", engine);
    k->megatron.has_aux = !conf_is_null(c, key);
    if (k->megatron.has_aux && k->megatron.aux > 0 && k->megatron.balancing == ROUTER_BALANCING_NONE)
        log_note("%s=%g adds no loss: moe_router_load_balancing_type is none, as in verl, unless it is set to aux_loss", key,
                 k->megatron.aux);
}

/* transformers' loss; it is off unless the model or the key says otherwise. */
static int of_transformers(const struct train_router_keys *k, const struct model_config *c, bool *on) {
    TRY(json_bool_opt(c->json, "output_router_logits", on, "config.json"));
    if (k->has_balance) *on = k->balance;
    if (*on && c->family && c->family->experts.sigmoid)
        FAIL(ERR_UNSUPPORTED, "output_router_logits: transformers has no load-balancing loss of %s, whose routers are no softmax",
             c->family->type);
    return 0;
}

int router_losses(const struct train_router_keys *k, const struct model_config *c, struct router_losses *out) {
    const bool megatron = k->megatron.balancing == ROUTER_BALANCING_AUX_LOSS;
    bool on = false;
    *out = (struct router_losses){0};
    if (c->n_experts == 0) return 0;
    *out = (struct router_losses){.balance = 0.001, .by_layer = megatron, .z = k->megatron.z}; /* transformers' default */
    if (megatron && k->has_balance && k->balance)
        FAIL(ERR_INVAL, "override_transformer_config.moe_router_load_balancing_type=aux_loss and "
                        "override_config.output_router_logits=True: there is one load-balancing loss; leave one of the keys out");
    TRY(json_f64_opt(c->json, "router_aux_loss_coef", &out->balance, "config.json"));
    if (megatron && k->megatron.has_aux) out->balance = k->megatron.aux;
    if (!megatron && k->has_aux_coef) out->balance = k->aux_coef;
    if (!megatron) TRY(of_transformers(k, c, &on));
    if (!megatron && !on) out->balance = 0;
    if (!isfinite(out->balance) || out->balance < 0)
        FAIL(ERR_FORMAT, "config.json: \"router_aux_loss_coef\" is %g, expected 0 or more", out->balance);
    return 0;
}
