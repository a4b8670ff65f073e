/* router_balance.c - see router_balance.h. */
#include "train/router_balance.h"

#include "base/err.h"
#include "base/json.h"
#include "model/families.h"

#include <math.h>
#include <stdio.h>

void router_balance_load(const struct router_load *r, const int64_t *count, double coef, float *load) {
    const double tokens = (double)(r->layers * r->rows);
    for (int64_t e = 0; e < r->experts; e++) {
        int64_t n = 0;
        for (int64_t l = 0; l < r->layers; l++) n += count[l * r->experts + e];
        load[e] = tokens > 0 ? (float)(coef * (double)r->experts * ((double)n / tokens) / tokens) : 0;
    }
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

void train_router_given(struct train_router_keys *k, const struct conf *c, const char *section) {
    char key[160];
    snprintf(key, sizeof key, "%s.override_config.output_router_logits", section);
    k->has_balance = !conf_is_null(c, key);
    snprintf(key, sizeof key, "%s.override_config.router_aux_loss_coef", section);
    k->has_aux_coef = !conf_is_null(c, key);
}

int router_balance_coef(const struct train_router_keys *k, const struct model_config *c, double *coef) {
    bool on = false;
    *coef = 0.001; /* transformers' default */
    if (c->n_experts == 0) *coef = 0;
    if (c->n_experts == 0) return 0;
    TRY(json_bool_opt(c->json, "output_router_logits", &on, "config.json"));
    TRY(json_f64_opt(c->json, "router_aux_loss_coef", coef, "config.json"));
    if (k->has_aux_coef) *coef = k->aux_coef;
    if (k->has_balance) on = k->balance;
    if (!on) *coef = 0;
    if (on && c->family && c->family->experts.sigmoid)
        FAIL(ERR_UNSUPPORTED, "output_router_logits: transformers has no load-balancing loss of %s, whose routers are no softmax",
             c->family->type);
    if (!isfinite(*coef) || *coef < 0) FAIL(ERR_FORMAT, "config.json: \"router_aux_loss_coef\" is %g, expected 0 or more", *coef);
    return 0;
}
