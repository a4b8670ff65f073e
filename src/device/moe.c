/* moe.c - the checked calls of a mixture of experts: router, its losses, sort, grouped GEMMs, combination; as device.c's.
 * Invariant: a backend entry runs only with tensors that fit each other. */
#include "device/checks_int.h"
#include "device/device_int.h"

/* What route_fwd and route_bwd have in common. */
static int check_route(const char *op, const struct route_args *a) {
    TRY(want2(op, "logits", a->logits, ACT, ANY, ANY));
    TRY(want2(op, "expert", a->expert, I32, a->logits.dim[0], ANY));
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1];
    if (n < 1 || n > DEV_MAX_EXPERTS || k < 1 || k > n || k > DEV_MAX_CHOICES)
        FAIL(ERR_INVAL, "dev op %s: %lld of %lld experts, at most %d of %d are possible", op, (long long)k, (long long)n,
             DEV_MAX_CHOICES, DEV_MAX_EXPERTS);
    if (a->bias.data) TRY(want1(op, "bias", a->bias, F32, n));
    if (a->groups > 1 && (a->groups > DEV_MAX_EXPERT_GROUPS || n % a->groups || n / a->groups < (a->sigmoid ? 2 : 1) ||
                          a->top_groups < 1 || a->top_groups > a->groups || a->top_groups * (n / a->groups) < k))
        FAIL(ERR_INVAL, "dev op %s: %lld of %lld experts in %lld of %lld groups", op, (long long)k, (long long)n,
             (long long)a->top_groups, (long long)a->groups);
    return 0;
}

int dev_route_fwd(struct dev *d, const struct route_args *a) {
    TRY(check_route("route_fwd", a));
    TRY(want_like("route_fwd", "weight", a->weight, ACT, a->expert));
    if (a->given.data) TRY(want_like("route_fwd", "given", a->given, I32, a->expert));
    HAVE(route_fwd);
    return a->logits.dim[0] ? TRACED(route_fwd, (d, a), a->logits.dim[0], a->logits.dim[1], a->expert.dim[1]) : 0;
}
int dev_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight) {
    TRY(check_route("route_bwd", a));
    TRY(want_like("route_bwd", "dlogits", dlogits, ACT, a->logits));
    TRY(want_like("route_bwd", "dweight", dweight, F32, a->expert));
    HAVE(route_bwd);
    return a->logits.dim[0] ? TRACED(route_bwd, (d, a, dlogits, dweight), a->logits.dim[0], a->logits.dim[1], a->expert.dim[1]) : 0;
}

int dev_balance_bwd(struct dev *d, const struct balance_args *a) {
    TRY(want2("balance_bwd", "logits", a->logits, ACT, ANY, ANY));
    const int64_t rows = a->logits.dim[0], n = a->logits.dim[1];
    if (n < 1 || n > DEV_MAX_EXPERTS)
        FAIL(ERR_INVAL, "dev op balance_bwd: %lld experts, at most %d are possible", (long long)n, DEV_MAX_EXPERTS);
    TRY(want1("balance_bwd", "load", a->load, F32, n));
    TRY(want_like("balance_bwd", "dlogits", a->dlogits, ACT, a->logits));
    TRY(want1("balance_bwd", "loss", a->loss, F32, rows));
    if (a->z_loss.data) TRY(want1("balance_bwd", "z_loss", a->z_loss, F32, rows));
    HAVE(balance_bwd);
    return rows ? TRACED(balance_bwd, (d, a), rows, n, 0) : 0;
}

/* Rows of a grouped op are counted in i32 on the device. */
static int check_slots(const char *op, int64_t slots, struct tensor offset, int64_t experts) {
    TRY(want1(op, "offset", offset, I32, experts == ANY ? ANY : experts + 1));
    if (slots > INT32_MAX || offset.dim[0] < 2 || offset.dim[0] - 1 > DEV_MAX_EXPERTS)
        FAIL(ERR_INVAL, "dev op %s: %lld rows of %lld experts, at most %d of %d are possible", op, (long long)slots,
             (long long)(offset.dim[0] - 1), INT32_MAX, DEV_MAX_EXPERTS);
    return 0;
}

int dev_expert_sort(struct dev *d, struct tensor offset, struct tensor token, struct tensor row, struct tensor expert) {
    TRY(want2("expert_sort", "expert", expert, I32, ANY, ANY));
    TRY(check_slots("expert_sort", tensor_count(expert), offset, ANY));
    TRY(want1("expert_sort", "token", token, I32, tensor_count(expert)));
    TRY(want_like("expert_sort", "row", row, I32, expert));
    HAVE(expert_sort);
    if (tensor_count(expert) == 0) return dev_zero(d, offset.data, (size_t)offset.dim[0] * sizeof(int32_t));
    return TRACED(expert_sort, (d, offset, token, row, expert), expert.dim[0], expert.dim[1], offset.dim[0] - 1);
}

int dev_clip_offsets(struct dev *d, struct tensor dst, struct tensor offset, int64_t lo, int64_t n) {
    TRY(check_slots("clip_offsets", n, offset, ANY));
    TRY(want_like("clip_offsets", "dst", dst, I32, offset));
    if (lo < 0 || n < 0 || lo > INT32_MAX)
        FAIL(ERR_INVAL, "dev op clip_offsets: %lld rows from %lld on", (long long)n, (long long)lo);
    HAVE(clip_offsets);
    return TRACED(clip_offsets, (d, dst, offset, lo, n), n, offset.dim[0] - 1, 0);
}
int dev_grouped_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight_stack w, struct tensor offset) {
    TRY(want2("grouped_fwd", "x", x, ACT, ANY, ANY));
    TRY(want_weight("grouped_fwd", w.w, set_of(x.dt), ANY, x.dim[1]));
    TRY(want2("grouped_fwd", "y", y, F32 | set_of(x.dt), x.dim[0], w.w.n));
    TRY(check_slots("grouped_fwd", x.dim[0], offset, w.count));
    HAVE(grouped_fwd);
    return x.dim[0] ? TRACED(grouped_fwd, (d, y, x, w, offset), x.dim[0], w.w.n, w.w.k) : 0;
}
int dev_grouped_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight_stack w, struct tensor offset) {
    TRY(want2("grouped_dx", "dy", dy, ACT, ANY, ANY));
    TRY(want_weight("grouped_dx", w.w, set_of(dy.dt), dy.dim[1], ANY));
    TRY(want2("grouped_dx", "dx", dx, F32 | set_of(dy.dt), dy.dim[0], w.w.k));
    TRY(check_slots("grouped_dx", dy.dim[0], offset, w.count));
    HAVE(grouped_dx);
    return dy.dim[0] ? TRACED(grouped_dx, (d, dx, dy, w, offset), dy.dim[0], w.w.n, w.w.k) : 0;
}
int dev_grouped_dw(struct dev *d, struct tensor dw, struct tensor dy, struct tensor x, struct tensor offset, bool add) {
    TRY(want2("grouped_dw", "dy", dy, ACT, ANY, ANY));
    TRY(want2("grouped_dw", "x", x, set_of(dy.dt), dy.dim[0], ANY));
    TRY(check_slots("grouped_dw", dy.dim[0], offset, ANY));
    TRY(want("grouped_dw", "dw", dw, F32, 3, (const int64_t[]){offset.dim[0] - 1, dy.dim[1], x.dim[1]}));
    HAVE(grouped_dw);
    if (dy.dim[0]) return TRACED(grouped_dw, (d, dw, dy, x, offset, add), dy.dim[0], dy.dim[1], x.dim[1]);
    return add ? 0 : dev_zero(d, dw.data, (size_t)tensor_count(dw) * sizeof(float));
}

/* What combine_fwd and combine_bwd have in common. */
static int check_combine(const char *op, const struct combine_args *a) {
    TRY(want2(op, "row", a->row, I32, ANY, ANY));
    TRY(want2(op, "y", a->y, ACT, tensor_count(a->row), ANY));
    if (a->row.dim[1] < 1 || a->row.dim[1] > DEV_MAX_CHOICES)
        FAIL(ERR_INVAL, "dev op %s: %lld experts of a token, at most %d are possible", op, (long long)a->row.dim[1],
             DEV_MAX_CHOICES);
    return a->weight.data ? want_like(op, "weight", a->weight, ACT, a->row) : 0;
}

int dev_combine_fwd(struct dev *d, const struct combine_args *a) {
    TRY(check_combine("combine_fwd", a));
    TRY(want2("combine_fwd", "out", a->out, F32 | set_of(a->y.dt), a->row.dim[0], a->y.dim[1]));
    if (a->from.data) TRY(want_like("combine_fwd", "from", a->from, F32, a->out));
    HAVE(combine_fwd);
    return tensor_count(a->out) ? TRACED(combine_fwd, (d, a), a->row.dim[0], a->row.dim[1], a->y.dim[1]) : 0;
}
int dev_combine_bwd(struct dev *d, const struct combine_args *a, struct tensor dout, struct tensor dy, struct tensor dweight) {
    TRY(check_combine("combine_bwd", a));
    TRY(want_like("combine_bwd", "weight", a->weight, ACT, a->row));
    TRY(want2("combine_bwd", "dout", dout, set_of(a->y.dt), a->row.dim[0], a->y.dim[1]));
    TRY(want_like("combine_bwd", "dy", dy, set_of(a->y.dt), a->y));
    TRY(want_like("combine_bwd", "dweight", dweight, F32, a->row));
    HAVE(combine_bwd);
    return tensor_count(dy) ? TRACED(combine_bwd, (d, a, dout, dy, dweight), a->row.dim[0], a->row.dim[1], a->y.dim[1]) : 0;
}
