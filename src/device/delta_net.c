/* delta_net.c - the checked calls of the ops of a gated delta net layer, as device.c's.
 * Invariant: a backend entry runs only with tensors that fit each other. */
#include "device/checks_int.h"
#include "device/device_int.h"

static int want_seqs(const char *op, const struct row_seqs *s, bool state) {
    if (s->n < 0) FAIL(ERR_INVAL, "dev op %s: %lld sequences", op, (long long)s->n);
    TRY(want1(op, "start", s->start, I32, s->n + 1));
    TRY(want1(op, "pos0", s->pos0, I32, s->n));
    if (state) return want1(op, "slot", s->slot, I32, s->n);
    if (s->slot.data) FAIL(ERR_INVAL, "dev op %s: slots without a state", op);
    return 0;
}

/* n columns of t from `at` on. */
static int want_columns(const char *op, const char *arg, struct tensor t, int64_t at, int64_t n) {
    if (at < 0 || at > t.dim[1] - n)
        FAIL(ERR_INVAL, "dev op %s: %lld columns of %s from %lld on; it has %lld", op, (long long)n, arg, (long long)at,
             (long long)t.dim[1]);
    return 0;
}

/* What causal_conv_fwd and causal_conv_bwd have in common. */
static int check_conv(const char *op, const struct causal_conv_args *a) {
    TRY(want2(op, "x", a->x, ACT, ANY, ANY));
    TRY(want2(op, "w", a->w, set_of(a->x.dt), ANY, DEV_CONV_TAPS));
    TRY(want_columns(op, "x", a->x, a->x_at, a->w.dim[0]));
    TRY(want_seqs(op, &a->seqs, a->state.data != NULL));
    if (!a->state.data) return 0;
    TRY(want(op, "state", a->state, set_of(a->x.dt), 3, (const int64_t[]){ANY, ANY, a->w.dim[0]}));
    if (a->state.dim[1] < DEV_CONV_TAPS - 1)
        FAIL(ERR_INVAL, "dev op %s: a state of %lld rows; at least %d", op, (long long)a->state.dim[1], DEV_CONV_TAPS - 1);
    return 0;
}

int dev_causal_conv_fwd(struct dev *d, const struct causal_conv_args *a) {
    TRY(check_conv("causal_conv_fwd", a));
    TRY(want2("causal_conv_fwd", "y", a->y, set_of(a->x.dt), a->x.dim[0], a->w.dim[0]));
    if (a->y.data == a->x.data && a->x.data) FAIL(ERR_INVAL, "dev op causal_conv_fwd: y is x");
    HAVE(causal_conv_fwd);
    return tensor_count(a->y) ? TRACED(causal_conv_fwd, (d, a), a->x.dim[0], a->w.dim[0], 0) : 0;
}

int dev_causal_conv_bwd(struct dev *d, const struct causal_conv_args *a, const struct causal_conv_bwd_args *g) {
    const char *const op = "causal_conv_bwd";
    TRY(check_conv(op, a));
    if (a->state.data) FAIL(ERR_INVAL, "dev op %s: a sequence with a state has no backward", op);
    TRY(want2(op, "dy", g->dy, set_of(a->x.dt), a->x.dim[0], a->w.dim[0]));
    TRY(want_like(op, "dx", g->dx, set_of(a->x.dt), a->x));
    TRY(want_like(op, "dw", g->dw, F32, a->w));
    HAVE(causal_conv_bwd);
    return tensor_count(g->dy) ? TRACED(causal_conv_bwd, (d, a, g), a->x.dim[0], a->w.dim[0], 0) : 0;
}

/* What delta_fwd and delta_bwd have in common. kept: states and e are given. */
static int check_delta(const char *op, const struct delta_args *a, bool kept) {
    const int64_t hk = a->n_k_heads, hv = a->n_v_heads, dk = a->k_dim, dv = a->v_dim, rows = a->qkv.dim[0];
    if (hk <= 0 || hv <= 0 || hv % hk != 0 || dk <= 0 || dv <= 0 || dk % 16 != 0 || dv % 16 != 0 || dk > DEV_DELTA_DIM ||
        dv > DEV_DELTA_DIM)
        FAIL(ERR_INVAL, "dev op %s: %lld key heads of %lld, %lld value heads of %lld: heads are multiples of 16 up to %d", op,
             (long long)hk, (long long)dk, (long long)hv, (long long)dv, DEV_DELTA_DIM);
    TRY(want2(op, "qkv", a->qkv, ACT, ANY, 2 * hk * dk + hv * dv));
    const unsigned act = set_of(a->qkv.dt);
    TRY(want2(op, "ba", a->ba, act, rows, ANY));
    TRY(want_columns(op, "ba", a->ba, a->ba_at, 2 * hv));
    TRY(want1(op, "a_log", a->a_log, act, hv));
    TRY(want1(op, "dt_bias", a->dt_bias, act, hv));
    TRY(want_seqs(op, &a->seqs, a->state.s.data != NULL));
    if (!kept) return 0;
    TRY(want(op, "states", a->states, F32, 4, (const int64_t[]){rows / DEV_DELTA_CHUNK + 1, hv, dk, dv}));
    return want2(op, "e", a->e, F32, rows, hv * dv);
}

int dev_delta_fwd(struct dev *d, const struct delta_args *a) {
    const char *const op = "delta_fwd";
    const struct delta_state *s = &a->state;
    TRY(check_delta(op, a, a->states.data != NULL));
    TRY(want2(op, "out", a->out, set_of(a->qkv.dt), a->qkv.dim[0], a->n_v_heads * a->v_dim));
    if (s->s.data) {
        TRY(want(op, "state.s", s->s, F32, 4, (const int64_t[]){ANY, a->n_v_heads, a->k_dim, a->v_dim}));
        const int64_t n = s->s.dim[0], c = DEV_DELTA_CHUNK;
        TRY(want(op, "state.k", s->k, set_of(a->qkv.dt), 4, (const int64_t[]){n, a->n_k_heads, c, a->k_dim}));
        TRY(want(op, "state.r", s->r, F32, 3, (const int64_t[]){n, a->n_k_heads, c}));
        TRY(want(op, "state.e", s->e, F32, 4, (const int64_t[]){n, a->n_v_heads, c, a->v_dim}));
        TRY(want(op, "state.g", s->g, F32, 3, (const int64_t[]){n, a->n_v_heads, c}));
        if (a->states.data) FAIL(ERR_INVAL, "dev op %s: with a state nothing is kept for backward", op);
    }
    HAVE(delta_fwd);
    return a->qkv.dim[0] ? TRACED(delta_fwd, (d, a), a->qkv.dim[0], a->n_v_heads, a->v_dim) : 0;
}

int dev_delta_bwd(struct dev *d, const struct delta_args *a, const struct delta_bwd_args *g) {
    const char *const op = "delta_bwd";
    TRY(check_delta(op, a, true));
    if (a->state.s.data) FAIL(ERR_INVAL, "dev op %s: a sequence with a state has no backward", op);
    const unsigned act = set_of(a->qkv.dt);
    TRY(want2(op, "dout", g->dout, act, a->qkv.dim[0], a->n_v_heads * a->v_dim));
    TRY(want_like(op, "dqkv", g->dqkv, act, a->qkv));
    TRY(want_like(op, "dba", g->dba, act, a->ba));
    TRY(want1(op, "da_log", g->da_log, F32, a->n_v_heads));
    TRY(want1(op, "ddt_bias", g->ddt_bias, F32, a->n_v_heads));
    HAVE(delta_bwd);
    return a->qkv.dim[0] ? TRACED(delta_bwd, (d, a, g), a->qkv.dim[0], a->n_v_heads, a->v_dim) : 0;
}

static int check_gated_norm(const char *op, const struct gated_norm_args *a) {
    TRY(want2(op, "x", a->x, ACT, ANY, ANY));
    TRY(want2(op, "z", a->z, set_of(a->x.dt), ANY, ANY));
    const int64_t rows = a->z.dim[0], heads = rows ? a->x.dim[0] / rows : 0;
    if (heads * rows != a->x.dim[0] || (rows && !heads))
        FAIL(ERR_INVAL, "dev op %s: %lld rows of x, %lld of z", op, (long long)a->x.dim[0], (long long)rows);
    TRY(want_columns(op, "z", a->z, a->z_at, heads * a->x.dim[1]));
    TRY(want1(op, "w", a->w, set_of(a->x.dt), a->x.dim[1]));
    return a->rstd.data ? want1(op, "rstd", a->rstd, F32, a->x.dim[0]) : 0;
}
int dev_gated_norm_fwd(struct dev *d, const struct gated_norm_args *a) {
    TRY(check_gated_norm("gated_norm_fwd", a));
    TRY(want_like("gated_norm_fwd", "y", a->y, set_of(a->x.dt), a->x));
    HAVE(gated_norm_fwd);
    return tensor_count(a->x) ? TRACED(gated_norm_fwd, (d, a), a->x.dim[0], a->x.dim[1], 0) : 0;
}
int dev_gated_norm_bwd(struct dev *d, const struct gated_norm_args *a, const struct gated_norm_bwd_args *g) {
    const char *const op = "gated_norm_bwd";
    TRY(check_gated_norm(op, a));
    const unsigned act = set_of(a->x.dt);
    TRY(want1(op, "rstd", a->rstd, F32, a->x.dim[0]));
    TRY(want_like(op, "dy", g->dy, act, a->x));
    TRY(want_like(op, "dx", g->dx, act, a->x));
    TRY(want_like(op, "dz", g->dz, act, a->z));
    TRY(want1(op, "dw", g->dw, F32, a->x.dim[1]));
    HAVE(gated_norm_bwd);
    return tensor_count(a->x) ? TRACED(gated_norm_bwd, (d, a, g), a->x.dim[0], a->x.dim[1], 0) : 0;
}

int dev_output_gate_fwd(struct dev *d, struct tensor y, struct tensor x, struct tensor gate) {
    TRY(want2("output_gate_fwd", "x", x, ACT, ANY, ANY));
    TRY(want_like("output_gate_fwd", "gate", gate, set_of(x.dt), x));
    TRY(want_like("output_gate_fwd", "y", y, set_of(x.dt), x));
    HAVE(output_gate_fwd);
    return tensor_count(x) ? TRACED(output_gate_fwd, (d, y, x, gate), x.dim[0], x.dim[1], 0) : 0;
}
int dev_output_gate_bwd(struct dev *d, const struct output_gate_bwd_args *a) {
    const struct tensor all[] = {a->x, a->gate, a->dx, a->dgate};
    const char *const names[] = {"x", "gate", "dx", "dgate"};
    TRY(want2("output_gate_bwd", "dy", a->dy, ACT, ANY, ANY));
    for (int i = 0; i < 4; i++) TRY(want_like("output_gate_bwd", names[i], all[i], set_of(a->dy.dt), a->dy));
    HAVE(output_gate_bwd);
    return tensor_count(a->dy) ? TRACED(output_gate_bwd, (d, a), a->dy.dim[0], a->dy.dim[1], 0) : 0;
}

static int check_split(const char *op, const struct gate_split_args *a) {
    int64_t of_heads = a->at;
    TRY(want2(op, "joint", a->joint, ACT, ANY, ANY));
    const unsigned act = set_of(a->joint.dt);
    if (a->n_heads <= 0 || a->n_parts < 1 || a->n_parts > DEV_SPLIT_PARTS)
        FAIL(ERR_INVAL, "dev op %s: %lld heads of %lld parts; at most %d", op, (long long)a->n_heads, (long long)a->n_parts,
             DEV_SPLIT_PARTS);
    for (int64_t p = 0; p < a->n_parts; p++) {
        if (a->width[p] <= 0) FAIL(ERR_INVAL, "dev op %s: a part of %lld columns", op, (long long)a->width[p]);
        of_heads += a->n_heads * a->width[p];
    }
    if (a->at < 0 || a->joint.dim[1] < of_heads)
        FAIL(ERR_INVAL, "dev op %s: heads that end at column %lld of %lld", op, (long long)of_heads, (long long)a->joint.dim[1]);
    const int64_t n = a->gate.data ? a->n_heads * a->width[a->n_parts - 1] : 0;
    if (n) TRY(want2(op, "gate", a->gate, act, a->joint.dim[0], n));
    return want2(op, "rest", a->rest, act, a->joint.dim[0], a->joint.dim[1] - n);
}
int dev_gate_split(struct dev *d, const struct gate_split_args *a) {
    TRY(check_split("gate_split", a));
    HAVE(gate_split);
    return tensor_count(a->joint) ? TRACED(gate_split, (d, a), a->joint.dim[0], a->joint.dim[1], 0) : 0;
}
int dev_gate_join(struct dev *d, const struct gate_split_args *a) {
    TRY(check_split("gate_join", a));
    HAVE(gate_join);
    return tensor_count(a->joint) ? TRACED(gate_join, (d, a), a->joint.dim[0], a->joint.dim[1], 0) : 0;
}
