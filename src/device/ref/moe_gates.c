/* moe_gates.c - the ref backend's ops that some families' experts have besides router, GEMMs and combination.
 *
 * Invariant: a row of a result reads the inputs of its own token alone. */
#include "device/ref/ref_int.h"

#include <math.h>

/* ---- the gate of a shared expert ---- */

static double gate_of(const struct row_gate_args *a, int64_t t) { return 1 / (1 + exp(-(double)ref_at(a->gate, t))); }

int ref_row_gate_fwd(struct dev *d, const struct row_gate_args *a) {
    const int64_t h = a->y.dim[1];
    (void)d;
    for (int64_t i = 0; i < tensor_count(a->y); i++)
        ref_f32(a->out)[i] = ref_f32(a->from)[i] + (float)(gate_of(a, i / h) * ref_at(a->y, i));
    return 0;
}

int ref_row_gate_bwd(struct dev *d, const struct row_gate_args *a, struct tensor dout, struct tensor dy, struct tensor dgate) {
    const int64_t h = a->y.dim[1];
    (void)d;
    for (int64_t t = 0; t < a->y.dim[0]; t++) {
        const double s = gate_of(a, t);
        double dot = 0;
        for (int64_t i = t * h; i < (t + 1) * h; i++) {
            dot += (double)ref_at(dout, i) * ref_at(a->y, i);
            ref_put(dy.data, dy.dt, i, s * ref_at(dout, i));
        }
        ref_put(dgate.data, dgate.dt, t, s * (1 - s) * dot);
    }
    return 0;
}

/* ---- biases of experts ---- */

int ref_expert_bias_fwd(struct dev *d, struct tensor y, struct tensor bias, struct tensor offset) {
    const int64_t n = y.dim[1];
    (void)d;
    for (int64_t e = 0; e < offset.dim[0] - 1; e++)
        for (int64_t i = ref_index(offset, e, y.dim[0] + 1) * n; i < ref_index(offset, e + 1, y.dim[0] + 1) * n; i++)
            ref_put(y.data, y.dt, i, (double)ref_at(y, i) + ref_at(bias, e * n + i % n));
    return 0;
}

int ref_expert_bias_bwd(struct dev *d, struct tensor db, struct tensor dy, struct tensor offset, bool add) {
    const int64_t n = dy.dim[1];
    (void)d;
    for (int64_t i = 0; i < tensor_count(db); i++) {
        double sum = 0;
        for (int64_t r = ref_index(offset, i / n, dy.dim[0] + 1); r < ref_index(offset, i / n + 1, dy.dim[0] + 1); r++)
            sum += ref_at(dy, r * n + i % n);
        ref_f32(db)[i] = add ? ref_f32(db)[i] + (float)sum : (float)sum;
    }
    return 0;
}

/* ---- SwiGLU with limits ---- */

int ref_clamped_swiglu_fwd(struct dev *d, const struct clamped_swiglu_args *a) {
    const int64_t f = a->y.dim[1];
    (void)d;
    for (int64_t i = 0; i < tensor_count(a->y); i++) {
        const int64_t at = i / f * 2 * f + i % f;
        const double g = fmin(ref_at(a->gate_up, at), a->limit), u = fmax(fmin(ref_at(a->gate_up, at + f), a->limit), -a->limit);
        ref_put(a->y.data, a->y.dt, i, (u + 1) * g / (1 + exp(-a->alpha * g)));
    }
    return 0;
}

int ref_clamped_swiglu_bwd(struct dev *d, const struct clamped_swiglu_args *a, struct tensor dgate_up, struct tensor dy) {
    const int64_t f = dy.dim[1];
    (void)d;
    for (int64_t i = 0; i < tensor_count(dy); i++) {
        const int64_t at = i / f * 2 * f + i % f;
        const float gate = ref_at(a->gate_up, at), up = ref_at(a->gate_up, at + f);
        const double g = fmin(gate, a->limit), u = fmax(fmin(up, a->limit), -a->limit), s = 1 / (1 + exp(-a->alpha * g));
        const double grad = ref_at(dy, i);
        ref_put(dgate_up.data, dgate_up.dt, at, gate <= a->limit ? grad * (u + 1) * s * (1 + a->alpha * g * (1 - s)) : 0);
        ref_put(dgate_up.data, dgate_up.dt, at + f, fabsf(up) <= a->limit ? grad * g * s : 0);
    }
    return 0;
}

/* ---- sinks of attention ---- */

int ref_attn_sink_fwd(struct dev *d, const struct attn_sink_args *a) {
    const int64_t heads = a->lse.dim[1], dim = a->out.dim[1] / heads;
    (void)d;
    for (int64_t i = 0; i < tensor_count(a->lse); i++) {
        const double lse = ref_f32(a->lse)[i], sink = ref_at(a->sink, i % heads), keep = 1 / (1 + exp(sink - lse));
        for (int64_t c = i * dim; c < (i + 1) * dim; c++) ref_put(a->out.data, a->out.dt, c, keep * ref_at(a->out, c));
        ref_f32(a->lse)[i] = (float)(fmax(lse, sink) + log1p(exp(-fabs(lse - sink))));
    }
    return 0;
}

int ref_attn_sink_bwd(struct dev *d, const struct attn_sink_args *a, struct tensor dout, struct tensor dsink) {
    const int64_t heads = a->lse.dim[1], dim = a->out.dim[1] / heads;
    (void)d;
    for (int64_t h = 0; h < heads; h++) {
        double sum = 0;
        for (int64_t i = h; i < tensor_count(a->lse); i += heads) {
            double dot = 0;
            for (int64_t c = i * dim; c < (i + 1) * dim; c++) dot += (double)ref_at(dout, c) * ref_at(a->out, c);
            sum += exp((double)ref_at(a->sink, h) - ref_f32(a->lse)[i]) * dot;
        }
        ref_f32(dsink)[h] -= (float)sum;
    }
    return 0;
}
