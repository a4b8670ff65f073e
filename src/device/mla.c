/* mla.c - the checked calls of multi-head latent attention's ops, as device.c's.
 * Invariant: a backend entry runs only with tensors that fit each other. */
#include "device/checks_int.h"
#include "device/device_int.h"

static int check_join(const char *op, const struct mla_join_args *a, unsigned latent, unsigned keys) {
    const int64_t h = a->n_heads, rope = a->rope;
    if (h < 1 || a->nope < 1 || rope < 2 || rope % 2)
        FAIL(ERR_INVAL, "dev op %s: %lld heads of %lld + %lld", op, (long long)h, (long long)a->nope, (long long)rope);
    TRY(want2(op, "cn", a->cn, ACT, ANY, ANY));
    const int64_t rows = a->cn.dim[0], dim = rope + a->cn.dim[1];
    const unsigned act = set_of(a->cn.dt);
    TRY(want2(op, "heads", a->heads, act, rows, h * (a->nope + rope)));
    TRY(want2(op, "latent", a->latent, latent, rows, dim));
    TRY(want2(op, "q", a->q, act, rows, h * dim));
    TRY(want(op, "table", a->table, F32, 3, (const int64_t[]){ANY, rope / 2, 2}));
    TRY(want1(op, "pos", a->pos, I32, rows));
    TRY(want1(op, "slots", a->slots, I32, rows));
    return want_kv(op, "k", a->k, keys, 1, dim);
}

int dev_mla_join_fwd(struct dev *d, const struct mla_join_args *a) {
    TRY(check_join("mla_join_fwd", a, F32, set_of(a->cn.dt)));
    HAVE(mla_join_fwd);
    return a->cn.dim[0] ? TRACED(mla_join_fwd, (d, a), a->q.dim[0], a->q.dim[1], 0) : 0;
}

int dev_mla_join_bwd(struct dev *d, const struct mla_join_args *a) {
    TRY(check_join("mla_join_bwd", a, set_of(a->cn.dt), F32));
    TRY(want_like("mla_join_bwd", "v", a->v, F32, a->k));
    HAVE(mla_join_bwd);
    return a->cn.dim[0] ? TRACED(mla_join_bwd, (d, a), a->q.dim[0], a->q.dim[1], 0) : 0;
}

/* Columns of a head from `at` on, n of them. */
static int check_columns(const char *op, const char *arg, struct tensor t, int64_t n_heads, int64_t at, int64_t n) {
    if (t.dim[1] % n_heads || at < 0 || at + n > t.dim[1] / n_heads)
        FAIL(ERR_INVAL, "dev op %s: columns %lld to %lld of the heads of %s, of which %lld have %lld", op, (long long)at,
             (long long)(at + n), arg, (long long)n_heads, (long long)t.dim[1]);
    return 0;
}
static int check_rows(const char *op, int64_t n, int64_t n_heads, int64_t row, int64_t rows) {
    if (n_heads < 1 || n % n_heads || row < 0 || rows < 1 || row + rows > n / n_heads)
        FAIL(ERR_INVAL, "dev op %s: rows %lld to %lld of each of %lld heads of a matrix of %lld", op, (long long)row,
             (long long)(row + rows), (long long)n_heads, (long long)n);
    return 0;
}

int dev_heads_fwd(struct dev *d, const struct heads_args *a) {
    const char *const op = "heads_fwd";
    TRY(want2(op, "x", a->x, ACT, ANY, ANY));
    TRY(want2(op, "y", a->y, a->x.dt == DT_F32 ? F32 : ACT, a->x.dim[0], ANY));
    TRY(want_weight(op, a->w, set_of(a->x.dt), ANY, ANY));
    TRY(check_rows(op, a->w.n, a->n_heads, a->row, a->rows));
    TRY(check_columns(op, "x", a->x, a->n_heads, a->x_at, a->transposed ? a->rows : a->w.k));
    TRY(check_columns(op, "y", a->y, a->n_heads, a->y_at, a->transposed ? a->w.k : a->rows));
    HAVE(heads_fwd);
    return a->x.dim[0] ? TRACED(heads_fwd, (d, a), a->x.dim[0] * a->n_heads, a->rows, a->w.k) : 0;
}

int dev_heads_dw(struct dev *d, const struct heads_dw_args *a) {
    const char *const op = "heads_dw";
    TRY(want2(op, "x", a->x, ACT, ANY, ANY));
    TRY(want2(op, "y", a->y, set_of(a->x.dt), a->x.dim[0], ANY));
    TRY(want2(op, "dw", a->dw, F32, ANY, ANY));
    TRY(check_rows(op, a->dw.dim[0], a->n_heads, a->row, a->rows));
    TRY(check_columns(op, "x", a->x, a->n_heads, a->x_at, a->rows));
    TRY(check_columns(op, "y", a->y, a->n_heads, a->y_at, a->dw.dim[1]));
    HAVE(heads_dw);
    return a->x.dim[0] || !a->add ? TRACED(heads_dw, (d, a), a->x.dim[0] * a->n_heads, a->rows, a->dw.dim[1]) : 0;
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
