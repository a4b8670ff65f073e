/* moe_gates.c - the checked calls of the ops that some families' experts have besides router, GEMMs and combination, as device.c's.
 * Invariant: a backend entry runs only with tensors that fit each other. */
#include "device/checks_int.h"
#include "device/device_int.h"

/* What row_gate_fwd and row_gate_bwd have in common. */
static int check_row_gate(const char *op, const struct row_gate_args *a) {
    TRY(want2(op, "y", a->y, ACT, ANY, ANY));
    return want2(op, "gate", a->gate, set_of(a->y.dt), a->y.dim[0], 1);
}

int dev_row_gate_fwd(struct dev *d, const struct row_gate_args *a) {
    TRY(check_row_gate("row_gate_fwd", a));
    TRY(want_like("row_gate_fwd", "from", a->from, F32, a->y));
    TRY(want_like("row_gate_fwd", "out", a->out, F32, a->y));
    HAVE(row_gate_fwd);
    return tensor_count(a->y) ? TRACED(row_gate_fwd, (d, a), a->y.dim[0], a->y.dim[1], 0) : 0;
}

int dev_row_gate_bwd(struct dev *d, const struct row_gate_args *a, struct tensor dout, struct tensor dy, struct tensor dgate) {
    TRY(check_row_gate("row_gate_bwd", a));
    TRY(want_like("row_gate_bwd", "dout", dout, set_of(a->y.dt), a->y));
    TRY(want_like("row_gate_bwd", "dy", dy, set_of(a->y.dt), a->y));
    TRY(want_like("row_gate_bwd", "dgate", dgate, set_of(a->y.dt), a->gate));
    HAVE(row_gate_bwd);
    return tensor_count(a->y) ? TRACED(row_gate_bwd, (d, a, dout, dy, dgate), a->y.dim[0], a->y.dim[1], 0) : 0;
}
