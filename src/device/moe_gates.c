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

/* Rows of n of E experts: offset (E + 1), vectors of E n. */
static int check_expert_rows(const char *op, const char *name, struct tensor rows, struct tensor offset) {
    TRY(want2(op, name, rows, ACT, ANY, ANY));
    TRY(want1(op, "offset", offset, I32, ANY));
    if (offset.dim[0] < 2 || offset.dim[0] - 1 > DEV_MAX_EXPERTS)
        FAIL(ERR_INVAL, "dev op %s: %lld experts", op, (long long)offset.dim[0] - 1);
    return 0;
}

int dev_expert_bias_fwd(struct dev *d, struct tensor y, struct tensor bias, struct tensor offset) {
    TRY(check_expert_rows("expert_bias_fwd", "y", y, offset));
    TRY(want1("expert_bias_fwd", "bias", bias, set_of(y.dt), (offset.dim[0] - 1) * y.dim[1]));
    HAVE(expert_bias_fwd);
    return tensor_count(y) ? TRACED(expert_bias_fwd, (d, y, bias, offset), y.dim[0], y.dim[1], offset.dim[0] - 1) : 0;
}

int dev_expert_bias_bwd(struct dev *d, struct tensor db, struct tensor dy, struct tensor offset, bool add) {
    TRY(check_expert_rows("expert_bias_bwd", "dy", dy, offset));
    TRY(want1("expert_bias_bwd", "db", db, F32, (offset.dim[0] - 1) * dy.dim[1]));
    HAVE(expert_bias_bwd);
    return tensor_count(db) ? TRACED(expert_bias_bwd, (d, db, dy, offset, add), dy.dim[0], dy.dim[1], offset.dim[0] - 1) : 0;
}

static int check_clamped(const char *op, const struct clamped_swiglu_args *a) {
    TRY(want2(op, "gate_up", a->gate_up, ACT, ANY, ANY));
    if (a->gate_up.dim[1] % 2 || !(a->limit > 0))
        FAIL(ERR_INVAL, "dev op %s: %lld columns, limit %g", op, (long long)a->gate_up.dim[1], (double)a->limit);
    return 0;
}

int dev_clamped_swiglu_fwd(struct dev *d, const struct clamped_swiglu_args *a) {
    TRY(check_clamped("clamped_swiglu_fwd", a));
    TRY(want2("clamped_swiglu_fwd", "y", a->y, set_of(a->gate_up.dt), a->gate_up.dim[0], a->gate_up.dim[1] / 2));
    HAVE(clamped_swiglu_fwd);
    return tensor_count(a->y) ? TRACED(clamped_swiglu_fwd, (d, a), a->y.dim[0], a->y.dim[1], 0) : 0;
}

int dev_clamped_swiglu_bwd(struct dev *d, const struct clamped_swiglu_args *a, struct tensor dgate_up, struct tensor dy) {
    TRY(check_clamped("clamped_swiglu_bwd", a));
    TRY(want2("clamped_swiglu_bwd", "dy", dy, set_of(a->gate_up.dt), a->gate_up.dim[0], a->gate_up.dim[1] / 2));
    TRY(want_like("clamped_swiglu_bwd", "dgate_up", dgate_up, set_of(a->gate_up.dt), a->gate_up));
    HAVE(clamped_swiglu_bwd);
    return tensor_count(dy) ? TRACED(clamped_swiglu_bwd, (d, a, dgate_up, dy), dy.dim[0], dy.dim[1], 0) : 0;
}

static int check_sink(const char *op, const struct attn_sink_args *a) {
    TRY(want2(op, "out", a->out, ACT, ANY, ANY));
    TRY(want2(op, "lse", a->lse, F32, a->out.dim[0], ANY));
    TRY(want1(op, "sink", a->sink, set_of(a->out.dt), a->lse.dim[1]));
    if (a->lse.dim[1] < 1 || a->out.dim[1] % a->lse.dim[1])
        FAIL(ERR_INVAL, "dev op %s: %lld columns of %lld heads", op, (long long)a->out.dim[1], (long long)a->lse.dim[1]);
    return 0;
}

int dev_attn_sink_fwd(struct dev *d, const struct attn_sink_args *a) {
    TRY(check_sink("attn_sink_fwd", a));
    HAVE(attn_sink_fwd);
    return tensor_count(a->out) ? TRACED(attn_sink_fwd, (d, a), a->out.dim[0], a->out.dim[1], a->lse.dim[1]) : 0;
}

int dev_attn_sink_bwd(struct dev *d, const struct attn_sink_args *a, struct tensor dout, struct tensor dsink) {
    TRY(check_sink("attn_sink_bwd", a));
    TRY(want_like("attn_sink_bwd", "dout", dout, set_of(a->out.dt), a->out));
    TRY(want_like("attn_sink_bwd", "dsink", dsink, F32, a->sink));
    HAVE(attn_sink_bwd);
    return tensor_count(a->out) ? TRACED(attn_sink_bwd, (d, a, dout, dsink), a->out.dim[0], a->out.dim[1], a->lse.dim[1]) : 0;
}
