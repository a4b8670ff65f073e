/* model_optim.c - AdamW on the fp32 master, clipping by global norm, schedules.
 *
 * One parameter group with one weight decay for all, as verl's FSDP workers
 * have it.  Arithmetic of the step is the device's (torch.optim.AdamW).
 * Invariant: a gradient that is not finite changes nothing, and is named. */
#include "model/model_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- schedules: verl/utils/torch_functional.py; linear is Megatron's lr_decay_style ---- */

static double cosine_wave(const struct optim_config *c, double progress) { return cos(M_PI * c->num_cycles * 2 * progress); }

/* The factor after warmup, step counted from its end, of n steps in all. */
static double decay_factor(const struct optim_config *c, int64_t step, int64_t n) {
    const double min = c->min_lr_ratio, progress = (double)step / (double)(n > 1 ? n : 1);
    if (strcmp(c->schedule, "cosine") == 0)
        return fmax(min, cosine_wave(c, progress) * (1 - min) * 0.5 + (1 + min) * 0.5);
    if (strcmp(c->schedule, "linear") == 0) return fmax(min, 1 - (1 - min) * progress);
    if (strcmp(c->schedule, "wsd") == 0) { /* stable for 9/10, then half a cosine */
        const int64_t all = n > 0 ? n : 0, stable = (int64_t)((double)all * 0.9), down = all - stable;
        if (step < stable) return 1;
        if (step >= n) return min;
        const double at = (double)(step - stable) / (double)(down > 1 ? down : 1);
        return (1 - min) * fmax(0, 0.5 * (1 + cosine_wave(c, at))) + min;
    }
    return 1; /* constant */
}

double optim_lr(const struct optim_config *c, int64_t step) {
    const int64_t w = c->warmup_steps;
    if (step >= w) return c->lr * decay_factor(c, step - w, c->total_steps - w);
    const double up = (double)step / (double)w;
    /* verl starts the warmup elsewhere than 0 in the cosine schedule alone */
    const double from = strcmp(c->schedule, "cosine") == 0 ? c->init_lr_ratio : 0;
    return c->lr * (from + (1 - from) * up);
}

/* ---- state ---- */

int optim_create(struct optim **out, struct model *m) {
    int rc = 0;
    const size_t bytes = (size_t)m->n_elems * sizeof(float);
    struct optim *o = xcalloc(1, sizeof *o);
    void *p = NULL;
    CHECK(m->master != NULL);
    TRYG(dev_alloc(m->dev, bytes, &p), fail);
    o->m = p;
    TRYG(dev_alloc(m->dev, bytes, &p), fail);
    o->v = p;
    TRYG(dev_alloc(m->dev, sizeof(double), &o->sum), fail);
    TRYG(dev_zero(m->dev, o->m, bytes), fail);
    TRYG(dev_zero(m->dev, o->v, bytes), fail);
    *out = o;
    return 0;
fail:
    optim_destroy(o, m);
    return rc;
}

void optim_destroy(struct optim *o, struct model *m) {
    if (!o) return;
    dev_free(m->dev, o->m, (size_t)m->n_elems * sizeof(float));
    dev_free(m->dev, o->v, (size_t)m->n_elems * sizeof(float));
    dev_free(m->dev, o->sum, sizeof(double));
    free(o);
}

/* ---- the step ---- */

static int grad_norm(struct model *m, struct tensor g, void *sum_dev, double *norm) {
    double sum;
    TRY(dev_sumsq(m->dev, tensor_1d(sum_dev, DT_F64, 1), g));
    TRY(dev_copy_out(m->dev, &sum, sum_dev, sizeof sum));
    *norm = sqrt(sum);
    return 0;
}

static int name_bad_tensor(struct model *m, float *grads, void *sum_dev, char name[96]) {
    for (int64_t i = 0; i < m->n_params; i++) {
        const struct model_param *p = &m->params[i];
        double norm;
        TRY(grad_norm(m, tensor_1d(grads + p->offset, DT_F32, p->rows * p->cols), sum_dev, &norm));
        if (isfinite(norm)) continue;
        snprintf(name, 96, "%s", p->name);
        return 0;
    }
    return 0;
}

int optim_step(struct optim *o, struct model *m, float *grads, const struct optim_config *c, double lr,
               struct optim_result *r) {
    const int64_t n = m->n_elems;
    *r = (struct optim_result){0};
    TRY(grad_norm(m, tensor_1d(grads, DT_F32, n), o->sum, &r->grad_norm));
    if (!isfinite(r->grad_norm)) return name_bad_tensor(m, grads, o->sum, r->bad_tensor);
    double scale = 1; /* torch.nn.utils.clip_grad_norm_ */
    if (c->clip > 0) scale = fmin(1, c->clip / (r->grad_norm + 1e-6));
    const struct adamw_args a = {
        .p = tensor_1d(m->master, DT_F32, n),
        .m = tensor_1d(o->m, DT_F32, n),
        .v = tensor_1d(o->v, DT_F32, n),
        .g = tensor_1d(grads, DT_F32, n),
        .lr = lr,
        .beta1 = c->beta1,
        .beta2 = c->beta2,
        .eps = c->eps,
        .weight_decay = c->weight_decay,
        .grad_scale = (float)scale,
        .step = o->step + 1,
    };
    TRY(dev_adamw(m->dev, &a));
    o->step++;
    return model_refresh(m);
}
