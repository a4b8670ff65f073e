/* optimizer_keys.c - see optimizer_keys.h.  Names and defaults are verl's (OptimizerConfig and
 * related ones) and those of the classes that verl takes by name from torch.optim and bitsandbytes.optim. */
#include "train/optimizer_keys.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Which keyword arguments of a class mean something here. */
static bool takes(enum optim_kind kind, const char *key) {
    static const char *const keys[][6] = {
        [OPTIM_ADAMW] = {"eps", "amsgrad", "maximize"},
        [OPTIM_ADAMW8] = {"eps"},
        [OPTIM_SGD] = {"momentum", "dampening", "nesterov", "maximize"},
        [OPTIM_MUON] = {"eps", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"},
        [OPTIM_ADAM] = {"eps", "amsgrad", "maximize", "decoupled_weight_decay"},
        [OPTIM_RADAM] = {"eps", "maximize", "decoupled_weight_decay"},
        [OPTIM_RMSPROP] = {"eps", "alpha", "momentum", "centered", "maximize"},
    };
    for (int i = 0; i < 6 && keys[kind][i]; i++)
        if (strcmp(keys[kind][i], key) == 0) return true;
    return false;
}

/* Options of Megatron's optimizer in host memory: only whether it is in host memory counts here. */
static bool megatron_offload(const char *key) {
    static const char *const keys[] = {"optimizer_cpu_offload", "optimizer_offload_fraction", "offload_fraction",
                                       "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(keys[i], key) == 0) return true;
    return false;
}

/* Options that choose among torch's kernels: no effect here. */
static bool torch_kernels(const char *key) {
    static const char *const keys[] = {"foreach", "fused", "capturable", "differentiable"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(keys[i], key) == 0) return true;
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

static int read_options(struct optim_config *o, const json_t *more, const char *key) {
    const char *name;
    json_t *v;
    bool offload = false, noted = false;
    json_object_foreach((json_t *)(uintptr_t)more, name, v) {
        if (!takes(o->kind, name) && !megatron_offload(name) && !torch_kernels(name))
            FAIL(ERR_INVAL, "%s.%s: %s has no such option here", key, name, optim_kind_name(o->kind));
        if (torch_kernels(name)) log_note("%s.%s: no effect, it chooses among torch's kernels", key, name);
        noted |= megatron_offload(name);
    }
    int rc = json_bool_opt(more, "optimizer_cpu_offload", &offload, key);
    if (noted)
        log_note(
            "%s: of Megatron's options for an optimizer in host memory optimizer_cpu_offload holds, for all of master and state, "
            "as optimizer_offload does",
            key);
    if (offload) o->host_state = o->host_master = true;
    if (rc == 0) rc = json_f64_opt(more, "eps", &o->eps, key);
    if (rc == 0) rc = json_f64_opt(more, "momentum", &o->momentum, key);
    if (rc == 0) rc = json_f64_opt(more, "dampening", &o->dampening, key);
    if (rc == 0) rc = json_bool_opt(more, "nesterov", &o->nesterov, key);
    if (rc == 0) rc = json_i64_opt(more, "ns_steps", &o->ns_steps, key);
    if (rc == 0) rc = json_f64_opt(more, "alpha", &o->alpha, key);
    if (rc == 0) rc = json_bool_opt(more, "amsgrad", &o->amsgrad, key);
    if (rc == 0) rc = json_bool_opt(more, "centered", &o->centered, key);
    if (rc == 0) rc = json_bool_opt(more, "maximize", &o->maximize, key);
    if (rc == 0) rc = json_bool_opt(more, "decoupled_weight_decay", &o->decoupled, key);
    if (rc == 0) rc = read_lr_rule(o, more, key);
    if (rc < 0) return err_set(ERR_INVAL, __FILE__, __LINE__, "%s", err_msg());
    if (o->momentum < 0 || o->momentum >= 1)
        FAIL(ERR_INVAL, "%s.momentum=%g: expected 0 or more and less than 1", key, o->momentum);
    if (o->ns_steps < 1 || o->ns_steps > 99) FAIL(ERR_INVAL, "%s.ns_steps=%lld: expected 1 to 99", key, (long long)o->ns_steps);
    if (!(o->alpha >= 0 && o->alpha < 1)) FAIL(ERR_INVAL, "%s.alpha=%g: expected 0 or more and less than 1", key, o->alpha);
    if (!(o->eps > 0)) FAIL(ERR_INVAL, "%s.eps=%g: expected a number above 0", key, o->eps);
    if (o->kind == OPTIM_SGD && o->nesterov && (o->momentum == 0 || o->dampening != 0))
        FAIL(ERR_INVAL, "%s: nesterov needs a momentum and no dampening", key);
    return 0;
}

int train_make_optim(struct optim_config *o, const char *section, const struct train_optim_keys *k,
                     const struct train_engine_keys *engine) {
    char key[128];
    const bool muon = k->kind == OPTIM_MUON;
    *o = (struct optim_config){.kind = k->kind,
                               .lr = k->lr,
                               .beta1 = k->betas[0],
                               .beta2 = k->betas[1],
                               .eps = 1e-8,
                               .weight_decay = k->weight_decay,
                               .clip = k->clip_grad,
                               .momentum = muon ? 0.95 : 0,
                               .nesterov = muon,
                               .ns_steps = 5,
                               .alpha = 0.99,
                               .schedule = k->schedule,
                               .warmup_steps = k->warmup_steps,
                               .warmup_ratio = k->warmup_ratio,
                               .decay_steps = k->decay_steps,
                               .zero_indexed_step = k->zero_indexed_step || strcmp(k->schedule, "cosine") != 0, /* as verl */
                               .min_lr_ratio = k->min_lr_ratio,
                               .num_cycles = k->num_cycles,
                               .init_lr_ratio = k->init_lr_ratio,
                               .host_state = engine->state,
                               .host_master = engine->master || engine->state};
    if (k->min_lr > k->lr || k->init_lr > k->lr)
        FAIL(ERR_INVAL, "%s: the schedule goes from %g over lr=%g to %g; neither end may be above lr", section, k->init_lr, k->lr,
             k->min_lr);
    if (k->min_lr > 0) o->min_lr_ratio = k->min_lr / k->lr;
    if (k->init_lr > 0) o->init_lr_ratio = k->init_lr / k->lr;
    if (k->n_betas != 2) FAIL(ERR_INVAL, "%s.betas: expected two numbers", section);
    snprintf(key, sizeof key, "%s.override_optimizer_config", section);
    return k->options ? read_options(o, k->options, key) : 0;
}

void train_optim_steps(struct optim_config *o, int64_t total_steps) {
    o->total_steps = o->decay_steps > 0 ? o->decay_steps : total_steps;
    if (o->warmup_steps <= 0) o->warmup_steps = (int64_t)(o->warmup_ratio * (double)o->total_steps);
}

void train_optim_check_steps(struct optim_config o, int64_t total_steps, const char *section,
                             void (*say)(void *arg, const char *line), void *arg) {
    train_optim_steps(&o, total_steps);
    if (total_steps <= 1 || o.warmup_steps < total_steps) return;
    char *line =
        xasprintf("unusual_setting: %s.lr_warmup_steps=%lld, and the run has %lld steps: the learning rate never reaches lr=%g",
                  section, (long long)o.warmup_steps, (long long)total_steps, o.lr);
    say(arg, line);
    free(line);
}
