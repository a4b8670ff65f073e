/* mla.c - the CPU backend's multi-head latent attention: what joins its parts into heads of queries, K and V.
 *
 * Invariant: a token's results are made by one thread in one order. */
#include "device/cpu/moe/token_rows.h"

struct join_job {
    const struct mla_join_args *a;
};

/* n elements of y from element i on = those of x from element j on. */
static void move(struct tensor y, int64_t i, struct tensor x, int64_t j, int64_t n) {
    for (int64_t c = 0; c < n; c++) put(y, i + c, value_at(x, j + c));
}

static void join_fwd_part(void *arg, int64_t part, int thread) {
    const struct mla_join_args *const a = ((const struct join_job *)arg)->a;
    const int64_t dim = a->nope + a->rope, each = a->n_heads * dim, end = part_end(a->qkv.dim[0], part);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++)
        for (int64_t h = 0; h < a->n_heads; h++) {
            const int64_t q = t * 3 * each + h * dim, k = q + each, v = k + each, from = t * each + h * dim;
            const int64_t kv = (t * a->n_heads + h) * (a->nope + a->v);
            move(a->qkv, q, a->q, from + a->nope, a->rope);
            move(a->qkv, q + a->rope, a->q, from, a->nope);
            move(a->qkv, k, a->latent, (t + 1) * a->latent.dim[1] - a->rope, a->rope);
            move(a->qkv, k + a->rope, a->kv, kv, a->nope);
            move(a->qkv, v, a->kv, kv + a->nope, a->v);
            for (int64_t c = a->v; c < dim; c++) put(a->qkv, v + c, 0);
        }
}

int cpu_mla_join_fwd(struct dev *d, const struct mla_join_args *a) {
    struct join_job j = {a};
    pool_run(cpu_of(d)->pool, parts_of(a->qkv.dim[0]), join_fwd_part, &j);
    return 0;
}

static void join_bwd_part(void *arg, int64_t part, int thread) {
    const struct mla_join_args *const a = ((const struct join_job *)arg)->a;
    const int64_t dim = a->nope + a->rope, each = a->n_heads * dim, end = part_end(a->qkv.dim[0], part);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        const int64_t k0 = t * 3 * each + each;
        for (int64_t h = 0; h < a->n_heads; h++) {
            const int64_t q = t * 3 * each + h * dim, k = q + each, v = k + each, to = t * each + h * dim;
            const int64_t kv = (t * a->n_heads + h) * (a->nope + a->v);
            move(a->q, to + a->nope, a->qkv, q, a->rope);
            move(a->q, to, a->qkv, q + a->rope, a->nope);
            move(a->kv, kv, a->qkv, k + a->rope, a->nope);
            move(a->kv, kv + a->nope, a->qkv, v, a->v);
        }
        for (int64_t c = 0; c < a->rope; c++) {
            float sum = 0;
            for (int64_t h = 0; h < a->n_heads; h++) sum += value_at(a->qkv, k0 + h * dim + c);
            put(a->latent, (t + 1) * a->latent.dim[1] - a->rope + c, sum);
        }
    }
}

int cpu_mla_join_bwd(struct dev *d, const struct mla_join_args *a) {
    struct join_job j = {a};
    pool_run(cpu_of(d)->pool, parts_of(a->qkv.dim[0]), join_bwd_part, &j);
    return 0;
}

struct resize_job {
    struct tensor dst, src;
    int64_t n_heads;
    bool keep;
};

static void resize_part(void *arg, int64_t part, int thread) {
    const struct resize_job *const j = arg;
    const int64_t to = j->dst.dim[1] / j->n_heads, from = j->src.dim[1] / j->n_heads, end = part_end(j->dst.dim[0], part);
    (void)thread;
    for (int64_t i = part * ROWS * j->n_heads; i < end * j->n_heads; i++) {
        move(j->dst, i * to, j->src, i * from, to < from ? to : from);
        for (int64_t c = from; c < to && !j->keep; c++) put(j->dst, i * to + c, 0);
    }
}

int cpu_resize_heads(struct dev *d, struct tensor dst, struct tensor src, int64_t n_heads, bool keep) {
    struct resize_job j = {dst, src, n_heads, keep};
    pool_run(cpu_of(d)->pool, parts_of(dst.dim[0]), resize_part, &j);
    return 0;
}
