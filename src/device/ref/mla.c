/* mla.c - the ref backend's multi-head latent attention: what RoPE turns of queries and keys, the keys, and products of heads
 * with their own rows of a matrix.
 *
 * Invariant: a row of a result reads the inputs of its own token alone. */
#include "device/ref/ref_int.h"

/* Elements i and i + rope/2 of y, from element j of x on, are pair i of what RoPE turns, turned; back: the other way round. */
struct turn {
    const struct mla_join_args *a;
    int64_t p; /* position */
};
static int64_t source_of(const struct mla_join_args *a, int64_t i, bool second) {
    return a->interleaved ? 2 * i + second : i + second * (a->rope / 2);
}
static void turned(struct turn t, struct tensor y, int64_t at, struct tensor x, int64_t from) {
    const struct mla_join_args *const a = t.a;
    for (int64_t i = 0; i < a->rope / 2; i++) {
        const float c = ref_f32(a->table)[t.p * a->rope + 2 * i], s = ref_f32(a->table)[t.p * a->rope + 2 * i + 1];
        const float x0 = ref_at(x, from + source_of(a, i, false)), x1 = ref_at(x, from + source_of(a, i, true));
        ref_put(y.data, y.dt, at + i, x0 * c - x1 * s);
        ref_put(y.data, y.dt, at + i + a->rope / 2, x1 * c + x0 * s);
    }
}
static void turned_back(struct turn t, struct tensor x, int64_t at, struct tensor y, int64_t from) {
    const struct mla_join_args *const a = t.a;
    for (int64_t i = 0; i < a->rope / 2; i++) {
        const double c = ref_f32(a->table)[t.p * a->rope + 2 * i], s = ref_f32(a->table)[t.p * a->rope + 2 * i + 1];
        const double y0 = ref_at(y, from + i), y1 = ref_at(y, from + i + a->rope / 2);
        ref_put(x.data, x.dt, at + source_of(a, i, false), y0 * c + y1 * s);
        ref_put(x.data, x.dt, at + source_of(a, i, true), y1 * c - y0 * s);
    }
}

int ref_mla_join_fwd(struct dev *d, const struct mla_join_args *a) {
    const int64_t h = a->n_heads, r = a->cn.dim[1], dim = a->rope + r;
    (void)d;
    for (int64_t t = 0; t < a->cn.dim[0]; t++) {
        const struct turn turn = {a, ref_index(a->pos, t, a->table.dim[0])};
        const int64_t key = ref_index(a->slots, t, a->k.dim[0] * a->k.dim[2]) * dim;
        for (int64_t i = 0; i < h; i++)
            turned(turn, a->q, (t * h + i) * dim, a->heads, (t * h + i) * (a->nope + a->rope) + a->nope);
        turned(turn, a->k, key, a->latent, t * dim + r);
        for (int64_t c = 0; c < r; c++) ref_put(a->k.data, a->k.dt, key + a->rope + c, ref_at(a->cn, t * r + c));
    }
    return 0;
}

int ref_mla_join_bwd(struct dev *d, const struct mla_join_args *a) {
    const int64_t h = a->n_heads, r = a->cn.dim[1], dim = a->rope + r;
    (void)d;
    for (int64_t t = 0; t < a->cn.dim[0]; t++) {
        const struct turn turn = {a, ref_index(a->pos, t, a->table.dim[0])};
        const int64_t key = ref_index(a->slots, t, a->k.dim[0] * a->k.dim[2]) * dim;
        for (int64_t i = 0; i < h; i++)
            turned_back(turn, a->heads, (t * h + i) * (a->nope + a->rope) + a->nope, a->q, (t * h + i) * dim);
        turned_back(turn, a->latent, t * dim + r, a->k, key);
        for (int64_t c = a->rope; c < dim; c++)
            ref_put(a->cn.data, a->cn.dt, t * r + c - a->rope, (double)ref_at(a->k, key + c) + ref_at(a->v, key + c));
    }
    return 0;
}

/* ---- heads with their own rows of a matrix ---- */

int ref_heads_fwd(struct dev *d, const struct heads_args *a) {
    const int64_t h = a->n_heads, xs = a->x.dim[1] / h, ys = a->y.dim[1] / h, step = a->w.n / h;
    const int64_t n = a->transposed ? a->w.k : a->rows, r = a->transposed ? a->rows : a->w.k;
    (void)d;
    for (int64_t i = 0; i < a->x.dim[0] * h; i++)
        for (int64_t c = 0; c < n; c++) {
            const int64_t row = i % h * step + a->row, to = i * ys + a->y_at + c;
            double sum = 0;
            for (int64_t k = 0; k < r; k++)
                sum += (double)ref_at(a->x, i * xs + a->x_at + k) *
                       (a->transposed ? ref_w(a->w, row + k, c) : ref_w(a->w, row + c, k));
            ref_put(a->y.data, a->y.dt, to, a->add ? ref_at(a->y, to) + sum : sum);
        }
    return 0;
}

int ref_heads_dw(struct dev *d, const struct heads_dw_args *a) {
    const int64_t h = a->n_heads, xs = a->x.dim[1] / h, ys = a->y.dim[1] / h, n = a->dw.dim[0], k = a->dw.dim[1];
    (void)d;
    for (int64_t i = 0; i < h; i++)
        for (int64_t row = 0; row < a->rows; row++)
            for (int64_t c = 0; c < k; c++) {
                const int64_t to = (i * (n / h) + a->row + row) * k + c;
                double sum = 0;
                for (int64_t t = 0; t < a->x.dim[0]; t++)
                    sum += (double)ref_at(a->x, (t * h + i) * xs + a->x_at + row) * ref_at(a->y, (t * h + i) * ys + a->y_at + c);
                ref_f32(a->dw)[to] = a->add ? ref_f32(a->dw)[to] + (float)sum : (float)sum;
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
