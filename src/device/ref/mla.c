/* mla.c - the ref backend's multi-head latent attention: what joins its parts into heads of queries, K and V.
 *
 * Invariant: a row of a result reads the inputs of its own token alone. */
#include "device/ref/ref_int.h"

/* Element c of part p (q, k, v) of head h in row t of qkv, from the inputs. */
static float joined(const struct mla_join_args *a, int64_t t, int p, int64_t h, int64_t c) {
    const int64_t dim = a->nope + a->rope, of_kv = (t * a->n_heads + h) * (a->nope + a->v);
    if (p == 0) return ref_at(a->q, (t * a->n_heads + h) * dim + (c < a->rope ? a->nope + c : c - a->rope));
    if (p == 2) return c < a->v ? ref_at(a->kv, of_kv + a->nope + c) : 0;
    return c < a->rope ? ref_at(a->latent, (t + 1) * a->latent.dim[1] - a->rope + c) : ref_at(a->kv, of_kv + c - a->rope);
}

int ref_mla_join_fwd(struct dev *d, const struct mla_join_args *a) {
    const int64_t dim = a->nope + a->rope, each = a->n_heads * dim;
    (void)d;
    for (int64_t i = 0; i < tensor_count(a->qkv); i++) {
        const int64_t in = i % (3 * each);
        ref_put(a->qkv.data, a->qkv.dt, i, joined(a, i / (3 * each), (int)(in / each), in % each / dim, in % dim));
    }
    return 0;
}

int ref_mla_join_bwd(struct dev *d, const struct mla_join_args *a) {
    const int64_t dim = a->nope + a->rope, each = a->n_heads * dim, of_kv = a->nope + a->v;
    (void)d;
    for (int64_t t = 0; t < a->qkv.dim[0]; t++) {
        const int64_t q = t * 3 * each, k = q + each, v = k + each;
        for (int64_t h = 0; h < a->n_heads; h++) {
            const int64_t to = t * each + h * dim, kv = (t * a->n_heads + h) * of_kv;
            for (int64_t c = 0; c < dim; c++)
                ref_put(a->q.data, a->q.dt, to + (c < a->rope ? a->nope + c : c - a->rope), ref_at(a->qkv, q + h * dim + c));
            for (int64_t c = 0; c < a->nope; c++) ref_put(a->kv.data, a->kv.dt, kv + c, ref_at(a->qkv, k + h * dim + a->rope + c));
            for (int64_t c = 0; c < a->v; c++) ref_put(a->kv.data, a->kv.dt, kv + a->nope + c, ref_at(a->qkv, v + h * dim + c));
        }
        for (int64_t c = 0; c < a->rope; c++) {
            double sum = 0;
            for (int64_t h = 0; h < a->n_heads; h++) sum += ref_at(a->qkv, k + h * dim + c);
            ref_put(a->latent.data, a->latent.dt, (t + 1) * a->latent.dim[1] - a->rope + c, sum);
        }
    }
    return 0;
}

int ref_resize_heads(struct dev *d, struct tensor dst, struct tensor src, int64_t n_heads, bool keep) {
    const int64_t to = dst.dim[1] / n_heads, from = src.dim[1] / n_heads;
    (void)d;
    for (int64_t i = 0; i < tensor_count(dst); i++)
        if (i % to < from || !keep) ref_put(dst.data, dst.dt, i, i % to < from ? ref_at(src, i / to * from + i % to) : 0);
    return 0;
}
