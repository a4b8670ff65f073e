/* adaptive.h - the scalars of one step of the adaptive op, the same for every backend: formed in double, rounded once.
 * The formulas are torch.optim's (Adam: Kingma and Ba, 2015; amsgrad: Reddi et al., 2018; RAdam: Liu et al., 2020; RMSprop:
 * Hinton, 2012). Invariant: nothing here depends on an element. */
#ifndef VERLC_DEVICE_ADAPTIVE_H
#define VERLC_DEVICE_ADAPTIVE_H

#include "device/ops.h"

#include <math.h>

struct adaptive_scalars {
    float scale;        /* of a gradient */
    float keep, couple; /* of p: in p, or in the gradient */
    float b1, one_b1;   /* RMSprop: momentum; 1 - beta2 for the mean of gradients */
    float b2, one_b2, eps;
    float step_size, root_bias2;
    float rectify; /* RAdam: times 1 / (root of v + eps); 0: not yet */
};

static inline struct adaptive_scalars adaptive_scalars_of(const struct adaptive_args *a) {
    const double t = (double)a->step, bias1 = 1.0 - pow(a->beta1, t), bias2 = 1.0 - pow(a->beta2, t);
    struct adaptive_scalars s;
    s.scale = a->grad_scale;
    s.keep = (float)(a->coupled ? 1.0 : 1.0 - a->lr * a->weight_decay);
    s.couple = (float)(a->coupled ? a->weight_decay : 0.0);
    s.b1 = (float)a->beta1;
    s.one_b1 = (float)(1.0 - a->beta1);
    s.b2 = (float)a->beta2;
    s.one_b2 = (float)(1.0 - a->beta2);
    s.eps = (float)a->eps;
    s.step_size = (float)(a->lr / bias1);
    s.root_bias2 = (float)sqrt(bias2);
    s.rectify = 0;
    if (a->rule == ADAPTIVE_RMSPROP) {
        s.one_b1 = s.one_b2;
        s.step_size = (float)a->lr;
    }
    if (a->rule != ADAPTIVE_RADAM) return s;
    /* how many steps the average of squares is worth, now and at the end; its variance is known from 5 on */
    const double last = 2.0 / (1.0 - a->beta2) - 1.0, now = last - 2.0 * t * pow(a->beta2, t) / bias2;
    if (now > 5.0) s.rectify = (float)(sqrt((now - 4.0) * (now - 2.0) * last / ((last - 4.0) * (last - 2.0) * now)) * sqrt(bias2));
    return s;
}

#endif
