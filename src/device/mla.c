/* mla.c - the checked calls of multi-head latent attention's ops, as device.c's.
 * Invariant: a backend entry runs only with tensors that fit each other. */
#include "device/checks_int.h"
#include "device/device_int.h"

static int check_join(const char *op, const struct mla_join_args *a, unsigned latent) {
    const int64_t h = a->n_heads, dim = a->nope + a->rope;
    if (h < 1 || a->nope < 1 || a->rope < 2 || a->rope % 2 || a->v < 1 || a->v > dim)
        FAIL(ERR_INVAL, "dev op %s: %lld heads of %lld + %lld, values of %lld", op, (long long)h, (long long)a->nope,
             (long long)a->rope, (long long)a->v);
    TRY(want2(op, "qkv", a->qkv, ACT, ANY, 3 * h * dim));
    TRY(want2(op, "q", a->q, set_of(a->qkv.dt), a->qkv.dim[0], h * dim));
    TRY(want2(op, "kv", a->kv, set_of(a->qkv.dt), a->qkv.dim[0], h * (a->nope + a->v)));
    TRY(want2(op, "latent", a->latent, latent, a->qkv.dim[0], ANY));
    if (a->latent.dim[1] < a->rope) FAIL(ERR_INVAL, "dev op %s: latent of %lld columns", op, (long long)a->latent.dim[1]);
    return 0;
}

int dev_mla_join_fwd(struct dev *d, const struct mla_join_args *a) {
    TRY(check_join("mla_join_fwd", a, F32));
    HAVE(mla_join_fwd);
    return tensor_count(a->qkv) ? TRACED(mla_join_fwd, (d, a), a->qkv.dim[0], a->qkv.dim[1], 0) : 0;
}

int dev_mla_join_bwd(struct dev *d, const struct mla_join_args *a) {
    TRY(check_join("mla_join_bwd", a, set_of(a->qkv.dt)));
    HAVE(mla_join_bwd);
    return tensor_count(a->qkv) ? TRACED(mla_join_bwd, (d, a), a->qkv.dim[0], a->qkv.dim[1], 0) : 0;
}

int dev_resize_heads(struct dev *d, struct tensor dst, struct tensor src, int64_t n_heads, bool keep) {
    const char *const op = "resize_heads";
    TRY(want2(op, "dst", dst, ACT, ANY, ANY));
    TRY(want2(op, "src", src, ACT, dst.dim[0], ANY));
    if (n_heads < 1 || dst.dim[1] % n_heads || src.dim[1] % n_heads)
        FAIL(ERR_INVAL, "dev op %s: %lld and %lld columns of %lld heads", op, (long long)dst.dim[1], (long long)src.dim[1],
             (long long)n_heads);
    HAVE(resize_heads);
    return tensor_count(dst) ? TRACED(resize_heads, (d, dst, src, n_heads, keep), dst.dim[0], dst.dim[1], src.dim[1]) : 0;
}
