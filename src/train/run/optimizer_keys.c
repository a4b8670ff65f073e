/* optimizer_keys.c - see optimizer_keys.h.  Names and defaults are verl's (OptimizerConfig and its
 * kin) and those of the classes that verl takes by name from torch.optim and bitsandbytes.optim. */
#include "train/run/optimizer_keys.h"

#include "base/err.h"
#include "base/json.h"

#include <stdio.h>
#include <string.h>

/* Which keyword arguments of a class mean something here. */
static bool takes(enum optim_kind kind, const char *key) {
    static const char *const keys[][5] = {
        [OPTIM_ADAMW] = {"eps", NULL},
        [OPTIM_ADAMW8] = {"eps", NULL},
        [OPTIM_SGD] = {"momentum", "dampening", "nesterov", NULL},
        [OPTIM_MUON] = {"eps", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"},
    };
    for (int i = 0; i < 5 && keys[kind][i]; i++)
        if (strcmp(keys[kind][i], key) == 0) return true;
    return false;
}

static int read_lr_rule(struct optim_config *o, const json_t *more, const char *where) {
    const char *rule = NULL;
    TRY(json_str_opt(more, "adjust_lr_fn", &rule, where));
    if (!rule) return 0;
    o->muon_original_lr = strcmp(rule, "original") == 0;
    if (!o->muon_original_lr && strcmp(rule, "match_rms_adamw") != 0)
        FAIL(ERR_INVAL, "%s: adjust_lr_fn=%s: expected match_rms_adamw or original", where, rule);
    return 0;
}

static int read_override(const struct conf *c, const char *key, struct optim_config *o) {
    const json_t *more;
    const char *name;
    json_t *v;
    if (!conf_has(c, key) || conf_is_null(c, key)) return 0;
    TRY(conf_json(c, key, &more));
    json_object_foreach((json_t *)(uintptr_t)more, name, v) if (!takes(o->kind, name))
        FAIL(ERR_INVAL, "%s.%s: %s has no such option here", key, name, optim_kind_name(o->kind));
    int rc = json_f64_opt(more, "eps", &o->eps, key);
    if (rc == 0) rc = json_f64_opt(more, "momentum", &o->momentum, key);
    if (rc == 0) rc = json_f64_opt(more, "dampening", &o->dampening, key);
    if (rc == 0) rc = json_bool_opt(more, "nesterov", &o->nesterov, key);
    if (rc == 0) rc = json_i64_opt(more, "ns_steps", &o->ns_steps, key);
    if (rc == 0) rc = read_lr_rule(o, more, key);
    if (rc < 0) return err_set(ERR_INVAL, __FILE__, __LINE__, "%s", err_msg());
    if (o->momentum < 0 || o->momentum >= 1)
        FAIL(ERR_INVAL, "%s.momentum=%g: expected 0 or more and less than 1", key, o->momentum);
    if (o->ns_steps < 1 || o->ns_steps > 99) FAIL(ERR_INVAL, "%s.ns_steps=%lld: expected 1 to 99", key, (long long)o->ns_steps);
    if (!(o->eps > 0)) FAIL(ERR_INVAL, "%s.eps=%g: expected a number above 0", key, o->eps);
    if (o->kind == OPTIM_SGD && o->nesterov && (o->momentum == 0 || o->dampening != 0))
        FAIL(ERR_INVAL, "%s: nesterov needs a momentum and no dampening", key);
    return 0;
}

int train_read_optim(const struct conf *c, const char *section, struct optim_config *o, double *warmup_ratio,
                     bool *zero_indexed_step) {
    char key[128];
    const char *name;
    double betas[2] = {0.9, 0.999};
    int64_t n;
#define KEY(k) (snprintf(key, sizeof key, "%s." k, section), key)
    *o = (struct optim_config){.eps = 1e-8, .num_cycles = 0.5, .warmup_steps = -1, .ns_steps = 5};
    TRY(conf_str(c, KEY("optimizer"), &name));
    if (!optim_kind_find(name, &o->kind)) FAIL(ERR_INVAL, "%s=%s: expected AdamW, AdamW8bit, SGD or Muon", key, name);
    if (o->kind == OPTIM_MUON) {
        o->momentum = 0.95;
        o->nesterov = true;
    }
    TRY(conf_f64(c, KEY("lr"), &o->lr));
    TRY(conf_f64(c, KEY("weight_decay"), &o->weight_decay));
    TRY(conf_f64s(c, KEY("betas"), betas, 2, &n));
    o->beta1 = betas[0];
    o->beta2 = betas[1];
    for (int i = 0; i < 2; i++)
        if (!(betas[i] >= 0 && betas[i] < 1)) FAIL(ERR_INVAL, "%s: %g: expected 0 or more and less than 1", key, betas[i]);
    TRY(conf_f64_opt(c, KEY("lr_warmup_steps_ratio"), warmup_ratio));
    TRY(conf_i64_opt(c, KEY("lr_warmup_steps"), &o->warmup_steps));
    TRY(conf_f64_opt(c, KEY("min_lr_ratio"), &o->min_lr_ratio));
    TRY(conf_f64_opt(c, KEY("init_lr_ratio"), &o->init_lr_ratio));
    TRY(conf_f64_opt(c, KEY("num_cycles"), &o->num_cycles));
    TRY(conf_bool_opt(c, KEY("zero_indexed_step"), zero_indexed_step));
    TRY(conf_str(c, KEY("lr_scheduler_type"), &o->schedule));
    *zero_indexed_step |= strcmp(o->schedule, "cosine") != 0; /* in verl the cosine schedule alone has it */
    return read_override(c, KEY("override_optimizer_config"), o);
#undef KEY
}

void train_optim_steps(struct optim_config *o, int64_t total_steps, double warmup_ratio) {
    o->total_steps = total_steps;
    if (o->warmup_steps <= 0) o->warmup_steps = (int64_t)(warmup_ratio * (double)total_steps);
}
