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
