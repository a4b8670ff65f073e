/* mla.c - the CPU backend's multi-head latent attention: what RoPE turns of queries and keys, and the keys. Products of heads with
 * their own rows of a matrix are gemm/gemm.c's.
 *
 * Invariant: a token's results are made by one thread in one order. */
#include "device/cpu/moe/token_rows.h"

#include <string.h>

/* What RoPE turns, of which pair i is elements source(i, 0) and source(i, 1), and in queries and keys i and i + rope/2. */
static int64_t source(const struct mla_join_args *a, int64_t i, bool second) {
    return a->interleaved ? 2 * i + second : i + second * (a->rope / 2);
}
/* Cosines and sines of the position of token t. */
static const float *angles_of(const struct mla_join_args *a, int64_t t) {
    const int64_t p = ((const int32_t *)a->pos.data)[t];
    CHECK(p >= 0 && p < a->table.dim[0]);
    return (const float *)a->table.data + p * a->rope;
}
static int64_t key_of(const struct mla_join_args *a, int64_t t) {
    const int64_t slot = ((const int32_t *)a->slots.data)[t];
    CHECK(slot >= 0 && slot < a->k.dim[0] * a->k.dim[2]);
    return slot * a->k.dim[3];
}

static void turn(const struct mla_join_args *a, const float *angle, struct tensor y, int64_t to, struct tensor x, int64_t from) {
    const int64_t half = a->rope / 2;
    for (int64_t i = 0; i < half; i++) {
        const float c = angle[2 * i], s = angle[2 * i + 1];
        const float x0 = value_at(x, from + source(a, i, false)), x1 = value_at(x, from + source(a, i, true));
        put(y, to + i, x0 * c - x1 * s);
        put(y, to + i + half, x1 * c + x0 * s);
    }
}
static void turn_back(const struct mla_join_args *a, const float *angle, struct tensor x, int64_t to, struct tensor y,
                      int64_t from) {
    const int64_t half = a->rope / 2;
    for (int64_t i = 0; i < half; i++) {
        const float c = angle[2 * i], s = angle[2 * i + 1];
        const float y0 = value_at(y, from + i), y1 = value_at(y, from + i + half);
        put(x, to + source(a, i, false), y0 * c + y1 * s);
        put(x, to + source(a, i, true), y1 * c - y0 * s);
    }
}

static void join_fwd_part(void *arg, int64_t part, int thread) {
    const struct mla_join_args *const a = arg;
    const int64_t r = a->cn.dim[1], dim = a->rope + r, of_head = a->nope + a->rope, end = part_end(a->cn.dim[0], part);
    const size_t size = dtype_size(a->cn.dt);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        const float *const angle = angles_of(a, t);
        const int64_t key = key_of(a, t);
        for (int64_t i = t * a->n_heads; i < (t + 1) * a->n_heads; i++)
            turn(a, angle, a->q, i * dim, a->heads, i * of_head + a->nope);
        turn(a, angle, a->k, key, a->latent, t * dim + r);
        memcpy((char *)a->k.data + (size_t)(key + a->rope) * size, (const char *)a->cn.data + (size_t)(t * r) * size,
               (size_t)r * size);
    }
}

int cpu_mla_join_fwd(struct dev *d, const struct mla_join_args *a) {
    struct mla_join_args job = *a;
    pool_run(cpu_of(d)->pool, parts_of(a->cn.dim[0]), join_fwd_part, &job);
    return 0;
}

static void join_bwd_part(void *arg, int64_t part, int thread) {
    const struct mla_join_args *const a = arg;
    const int64_t r = a->cn.dim[1], dim = a->rope + r, of_head = a->nope + a->rope, end = part_end(a->cn.dim[0], part);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        const float *const angle = angles_of(a, t);
        const int64_t key = key_of(a, t);
        const float *const dk = (const float *)a->k.data + key + a->rope, *const dv = (const float *)a->v.data + key + a->rope;
        for (int64_t i = t * a->n_heads; i < (t + 1) * a->n_heads; i++)
            turn_back(a, angle, a->heads, i * of_head + a->nope, a->q, i * dim);
        turn_back(a, angle, a->latent, t * dim + r, a->k, key);
        for (int64_t c = 0; c < r; c++) put(a->cn, t * r + c, dk[c] + dv[c]);
    }
}

int cpu_mla_join_bwd(struct dev *d, const struct mla_join_args *a) {
    struct mla_join_args job = *a;
    pool_run(cpu_of(d)->pool, parts_of(a->cn.dim[0]), join_bwd_part, &job);
    return 0;
}

/* n elements of y from element i on = those of x from element j on. */
static void move(struct tensor y, int64_t i, struct tensor x, int64_t j, int64_t n) {
    for (int64_t c = 0; c < n; c++) put(y, i + c, value_at(x, j + c));
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
