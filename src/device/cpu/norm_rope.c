/* norm_rope.c - ops that work row by row: RMSNorm, the split and rotation of
 * Q, K and V, and SwiGLU, each with its backward.
 *
 * Gradients of norm weights sum over rows: each block of BLOCK rows adds up its
 * own sum, the blocks' sums are added in order, and their sum to the gradient.
 * Invariant: BLOCK does not depend on the number of threads, so neither do bits. */
#include "device/cpu/cpu_int.h"
#include "device/cpu/kernels.h"

#include <string.h>

enum {
    BLOCK = 32,        /* rows of one partial sum */
    PART_ELEMS = 8192, /* about this many elements make a part of an op without sums */
};

static int64_t n_blocks(int64_t rows, int64_t per) { return (rows + per - 1) / per; }
static int64_t part_end(int64_t lo, int64_t per, int64_t n) { return lo + per < n ? lo + per : n; }
static char *at(struct tensor t, int64_t i) { return (char *)t.data + (size_t)i * dtype_size(t.dt); }
/* Rows of c elements that make a part. */
static int64_t rows_per_part(int64_t c) { return c < PART_ELEMS ? PART_ELEMS / c : 1; }

/* dst (c) += the sum of the n partial sums, with that stride, in order; the first one takes it. */
static void add_partials(const struct cpu_kern *k, float *dst, float *sums, int64_t n, int64_t stride, int64_t c) {
    for (int64_t i = 1; i < n; i++) k->add(sums, sums + i * stride, c);
    k->add(dst, sums, c);
}

/* ---- RMSNorm ---- */

struct norm_job {
    const struct cpu_kern *k;
    const struct rmsnorm_args *fwd;
    const struct rmsnorm_bwd_args *bwd;
    float *sums; /* (blocks, c) */
    int64_t per;
};

static void rmsnorm_fwd_part(void *arg, int64_t part, int thread) {
    const struct norm_job *j = arg;
    const struct rmsnorm_args *a = j->fwd;
    const int64_t c = a->x.dim[1], lo = part * j->per, hi = part_end(lo, j->per, a->x.dim[0]);
    (void)thread;
    for (int64_t t = lo; t < hi; t++) {
        const float rs = j->k->rmsnorm_fwd(&(struct cpu_norm){.y = at(a->y, t * c),
                                                              .x = (const float *)a->x.data + t * c,
                                                              .w = a->w.data,
                                                              .from = a->from.data ? (const float *)a->from.data + t * c : NULL,
                                                              .act = a->w.dt,
                                                              .kind = a->kind,
                                                              .n = c,
                                                              .eps = a->eps});
        if (a->rstd.data) ((float *)a->rstd.data)[t] = rs;
    }
}
int cpu_rmsnorm_fwd(struct dev *d, const struct rmsnorm_args *a) {
    struct norm_job j = {.k = cpu_kern_of(cpu_of(d)), .fwd = a, .per = rows_per_part(a->x.dim[1])};
    pool_run(cpu_of(d)->pool, n_blocks(a->x.dim[0], j.per), rmsnorm_fwd_part, &j);
    return 0;
}

static void rmsnorm_bwd_part(void *arg, int64_t part, int thread) {
    const struct norm_job *j = arg;
    const struct rmsnorm_bwd_args *a = j->bwd;
    const int64_t c = a->x.dim[1], lo = part * BLOCK, hi = part_end(lo, BLOCK, a->x.dim[0]);
    float *sum = j->sums + part * c;
    (void)thread;
    memset(sum, 0, (size_t)c * sizeof *sum);
    for (int64_t t = lo; t < hi; t++)
        j->k->rmsnorm_bwd(&(struct cpu_norm_grad){.dx = (float *)a->dx.data + t * c,
                                                  .dw = sum,
                                                  .dy = at(a->dy, t * c),
                                                  .w = a->w.data,
                                                  .dy_dt = a->dy.dt,
                                                  .w_dt = a->w.dt,
                                                  .kind = a->kind,
                                                  .x = (const float *)a->x.data + t * c,
                                                  .n = c,
                                                  .rstd = ((const float *)a->rstd.data)[t]});
}
int cpu_rmsnorm_bwd(struct dev *d, const struct rmsnorm_bwd_args *a) {
    struct cpu *c = cpu_of(d);
    struct norm_job j = {.k = cpu_kern_of(c), .bwd = a};
    const int64_t blocks = n_blocks(a->x.dim[0], BLOCK), n = a->x.dim[1];
    void *p;
    TRY(cpu_scratch(c, CPU_SCRATCH_ROW, (size_t)(blocks * n) * sizeof *j.sums, &p));
    j.sums = p;
    pool_run(c->pool, blocks, rmsnorm_bwd_part, &j);
    add_partials(j.k, a->dw.data, j.sums, blocks, n, n);
    return a->rounded.data ? cpu_cast(d, a->rounded, a->dx) : 0;
}

/* ---- RMSNorm of all queries and of all keys of a row ---- */

struct qk_norm_job {
    const struct cpu *cpu;
    const struct cpu_kern *k;
    const struct qk_norm_args *a;
    const struct qk_norm_bwd_args *g;
    float *sums, *wide; /* (blocks, N + M); (threads, 2, N + M) */
};
/* Where queries (0) or keys (1) begin in a row, and how many there are. */
static int64_t qk_first(const struct qk_norm_args *a, int which) { return which ? a->q_norm.dim[0] : 0; }
static struct tensor qk_weight(const struct qk_norm_args *a, int which) { return which ? a->k_norm : a->q_norm; }

static void widen_row(float *dst, struct tensor src, int64_t from, int64_t n) {
    if (src.dt == DT_F32) {
        memcpy(dst, (const float *)src.data + from, (size_t)n * sizeof *dst);
        return;
    }
    const uint16_t *x = (const uint16_t *)src.data + from;
    for (int64_t i = 0; i < n; i++) dst[i] = bf16_to_f32(x[i]);
}

static void qk_norm_fwd_part(void *arg, int64_t part, int thread) {
    const struct qk_norm_job *j = arg;
    const struct qk_norm_args *a = j->a;
    const int64_t width = a->x.dim[1], both = a->q_norm.dim[0] + a->k_norm.dim[0], hi = part_end(part * BLOCK, BLOCK, a->x.dim[0]);
    float *const x = j->wide + (int64_t)thread * 2 * both;
    for (int64_t t = part * BLOCK; t < hi; t++) {
        widen_row(x, a->x, t * width, both);
        for (int i = 0; i < 2; i++) {
            const struct tensor w = qk_weight(a, i);
            const int64_t first = qk_first(a, i);
            const float rs = j->k->rmsnorm_fwd(&(struct cpu_norm){.y = at(a->y, t * width + first),
                                                                  .x = x + first,
                                                                  .w = w.data,
                                                                  .act = w.dt,
                                                                  .kind = a->kind,
                                                                  .n = w.dim[0],
                                                                  .eps = a->eps});
            if (a->rstd.data) ((float *)a->rstd.data)[2 * t + i] = rs;
        }
        memcpy(at(a->y, t * width + both), at(a->x, t * width + both), (size_t)(width - both) * dtype_size(a->x.dt));
    }
}

static void qk_norm_bwd_part(void *arg, int64_t part, int thread) {
    const struct qk_norm_job *j = arg;
    const struct qk_norm_args *a = j->a;
    const int64_t width = a->x.dim[1], both = a->q_norm.dim[0] + a->k_norm.dim[0], hi = part_end(part * BLOCK, BLOCK, a->x.dim[0]);
    float *const x = j->wide + (int64_t)thread * 2 * both, *const dx = x + both, *const sum = j->sums + part * both;
    memset(sum, 0, (size_t)both * sizeof *sum);
    for (int64_t t = part * BLOCK; t < hi; t++) {
        widen_row(x, a->x, t * width, both);
        memset(dx, 0, (size_t)both * sizeof *dx);
        for (int i = 0; i < 2; i++) {
            const struct tensor w = qk_weight(a, i);
            const int64_t first = qk_first(a, i);
            j->k->rmsnorm_bwd(&(struct cpu_norm_grad){.dx = dx + first,
                                                      .dw = sum + first,
                                                      .dy = at(j->g->dy, t * width + first),
                                                      .w = w.data,
                                                      .dy_dt = j->g->dy.dt,
                                                      .w_dt = w.dt,
                                                      .kind = a->kind,
                                                      .x = x + first,
                                                      .n = w.dim[0],
                                                      .rstd = ((const float *)a->rstd.data)[2 * t + i]});
        }
        j->k->narrow(at(j->g->dy, t * width), j->g->dy.dt, dx, both);
    }
}

/* The scratch of a job: sums of blocks (backward), then of each thread. */
static int qk_norm_job_of(struct qk_norm_job *j, struct cpu *c, const struct qk_norm_args *a, int64_t blocks) {
    const int64_t both = a->q_norm.dim[0] + a->k_norm.dim[0];
    void *p;
    *j = (struct qk_norm_job){.cpu = c, .k = cpu_kern_of(c), .a = a};
    TRY(cpu_scratch(c, CPU_SCRATCH_ROW, (size_t)((blocks + 2 * pool_threads(c->pool)) * both) * sizeof *j->sums, &p));
    j->sums = p;
    j->wide = j->sums + blocks * both;
    return 0;
}
int cpu_qk_norm_fwd(struct dev *d, const struct qk_norm_args *a) {
    struct qk_norm_job j;
    TRY(qk_norm_job_of(&j, cpu_of(d), a, 0));
    pool_run(cpu_of(d)->pool, n_blocks(a->x.dim[0], BLOCK), qk_norm_fwd_part, &j);
    return 0;
}
int cpu_qk_norm_bwd(struct dev *d, const struct qk_norm_args *a, const struct qk_norm_bwd_args *g) {
    struct qk_norm_job j;
    const int64_t blocks = n_blocks(a->x.dim[0], BLOCK), n = a->q_norm.dim[0], m = a->k_norm.dim[0];
    TRY(qk_norm_job_of(&j, cpu_of(d), a, blocks));
    j.g = g;
    pool_run(cpu_of(d)->pool, blocks, qk_norm_bwd_part, &j);
    add_partials(j.k, g->dq_norm.data, j.sums, blocks, n + m, n);
    add_partials(j.k, g->dk_norm.data, j.sums + n, blocks, n + m, m);
    return 0;
}

/* ---- RoPE, then RMSNorm of each head ---- */

struct rope_norm_job {
    const struct cpu_kern *k;
    const struct rope_norm_args *a;
    const struct qk_norm_bwd_args *g;
    float *sums, *wide; /* (blocks, 2, D): of q_norm, of k_norm; (threads, 2, (Hq + Hk) D) */
};

static int64_t turned(const struct rope_norm_args *a) { return (a->n_q_heads + a->n_kv_heads) * a->head_dim; }
static const float *angles_of(const struct rope_norm_args *a, int64_t t) {
    const int64_t p = ((const int32_t *)a->pos.data)[t];
    CHECK(p >= 0 && p < a->rope.dim[0]);
    return (const float *)a->rope.data + p * a->head_dim;
}
static float rounded(float v, enum dtype act) { return act == DT_BF16 ? bf16_to_f32(f32_to_bf16(v)) : v; }

/* x = the queries and keys of row t, turned and rounded. */
static void turn_row(const struct rope_norm_args *a, int64_t t, float *x) {
    const int64_t n = turned(a), dim = a->head_dim, half = dim / 2;
    const float *const rope = angles_of(a, t);
    widen_row(x, a->x, t * a->x.dim[1], n);
    for (float *h = x; h < x + n; h += dim)
        for (int64_t i = 0; i < half; i++) {
            const float x0 = h[i], x1 = h[half + i], c = rope[2 * i], s = rope[2 * i + 1];
            h[i] = rounded(x0 * c - x1 * s, a->x.dt);
            h[half + i] = rounded(x1 * c + x0 * s, a->x.dt);
        }
}

static void rope_norm_fwd_part(void *arg, int64_t part, int thread) {
    const struct rope_norm_job *j = arg;
    const struct rope_norm_args *a = j->a;
    const int64_t width = a->x.dim[1], n = turned(a), dim = a->head_dim, heads = n / dim;
    const int64_t hi = part_end(part * BLOCK, BLOCK, a->x.dim[0]);
    float *const x = j->wide + (int64_t)thread * 2 * n;
    for (int64_t t = part * BLOCK; t < hi; t++) {
        turn_row(a, t, x);
        for (int64_t h = 0; h < heads; h++) {
            const float rs = j->k->rmsnorm_fwd(&(struct cpu_norm){.y = at(a->y, t * width + h * dim),
                                                                  .x = x + h * dim,
                                                                  .w = h < a->n_q_heads ? a->q_norm.data : a->k_norm.data,
                                                                  .act = a->x.dt,
                                                                  .kind = a->kind,
                                                                  .n = dim,
                                                                  .eps = a->eps});
            if (a->rstd.data) ((float *)a->rstd.data)[t * heads + h] = rs;
        }
        memcpy(at(a->y, t * width + n), at(a->x, t * width + n), (size_t)(width - n) * dtype_size(a->x.dt));
    }
}

static void rope_norm_bwd_part(void *arg, int64_t part, int thread) {
    const struct rope_norm_job *j = arg;
    const struct rope_norm_args *a = j->a;
    const int64_t width = a->x.dim[1], n = turned(a), dim = a->head_dim, half = dim / 2, heads = n / dim;
    const int64_t hi = part_end(part * BLOCK, BLOCK, a->x.dim[0]);
    float *const x = j->wide + (int64_t)thread * 2 * n, *const dx = x + n, *const sum = j->sums + part * 2 * dim;
    memset(sum, 0, (size_t)(2 * dim) * sizeof *sum);
    for (int64_t t = part * BLOCK; t < hi; t++) {
        const float *const rope = angles_of(a, t);
        turn_row(a, t, x);
        memset(dx, 0, (size_t)n * sizeof *dx);
        for (int64_t h = 0; h < heads; h++) {
            const bool is_q = h < a->n_q_heads;
            float *const dh = dx + h * dim;
            j->k->rmsnorm_bwd(&(struct cpu_norm_grad){.dx = dh,
                                                      .dw = sum + (is_q ? 0 : dim),
                                                      .dy = at(j->g->dy, t * width + h * dim),
                                                      .w = is_q ? a->q_norm.data : a->k_norm.data,
                                                      .dy_dt = j->g->dy.dt,
                                                      .w_dt = a->q_norm.dt,
                                                      .kind = a->kind,
                                                      .x = x + h * dim,
                                                      .n = dim,
                                                      .rstd = ((const float *)a->rstd.data)[t * heads + h]});
            for (int64_t i = 0; i < half; i++) { /* back */
                const float d0 = dh[i], d1 = dh[half + i], c = rope[2 * i], s = rope[2 * i + 1];
                dh[i] = d0 * c + d1 * s;
                dh[half + i] = d1 * c - d0 * s;
            }
        }
        j->k->narrow(at(j->g->dy, t * width), j->g->dy.dt, dx, n);
    }
}

static int rope_norm_job_of(struct rope_norm_job *j, struct cpu *c, const struct rope_norm_args *a, int64_t blocks) {
    const int64_t sums = blocks * 2 * a->head_dim;
    void *p;
    *j = (struct rope_norm_job){.k = cpu_kern_of(c), .a = a};
    TRY(cpu_scratch(c, CPU_SCRATCH_ROW, (size_t)(sums + 2 * pool_threads(c->pool) * turned(a)) * sizeof *j->sums, &p));
    j->sums = p;
    j->wide = j->sums + sums;
    return 0;
}
int cpu_rope_norm_fwd(struct dev *d, const struct rope_norm_args *a) {
    struct rope_norm_job j;
    TRY(rope_norm_job_of(&j, cpu_of(d), a, 0));
    pool_run(cpu_of(d)->pool, n_blocks(a->x.dim[0], BLOCK), rope_norm_fwd_part, &j);
    return 0;
}
int cpu_rope_norm_bwd(struct dev *d, const struct rope_norm_args *a, const struct qk_norm_bwd_args *g) {
    struct rope_norm_job j;
    const int64_t blocks = n_blocks(a->x.dim[0], BLOCK), dim = a->head_dim;
    TRY(rope_norm_job_of(&j, cpu_of(d), a, blocks));
    j.g = g;
    pool_run(cpu_of(d)->pool, blocks, rope_norm_bwd_part, &j);
    add_partials(j.k, g->dq_norm.data, j.sums, blocks, 2 * dim, dim);
    add_partials(j.k, g->dk_norm.data, j.sums + dim, blocks, 2 * dim, dim);
    return 0;
}

/* ---- qkv ---- */

struct qkv_job {
    const struct qkv_args *a;
    const struct cpu *cpu;
    const struct cpu_kern *k;
    struct tensor dq, dk, dv, dqkv;
    float *sums; /* (blocks, 2, D): of dq_norm, of dk_norm */
    int64_t per;
};
/* What a thread needs besides: cos and sin (D/2 each), D of scratch, and where heads are reordered: the order, a head of qkv and
 * one of its gradient, the norms of q and of k. */
#define QKV_BYTES(dim) ((size_t)(7 * (dim)) * sizeof(float))
struct qkv_thread {
    float *cos, *sin, *tmp;
    int32_t *order; /* NULL: as in qkv */
    char *x, *dx, *q_norm, *k_norm;
};

/* dst[i] = src[order[i]], or dst[order[i]] = src[i]; n elements of `size` bytes. */
static void gather(void *dst, const void *src, const int32_t *order, int64_t n, size_t size) {
    for (int64_t i = 0; i < n && size == 2; i++) ((uint16_t *)dst)[i] = ((const uint16_t *)src)[order[i]];
    for (int64_t i = 0; i < n && size == 4; i++) ((uint32_t *)dst)[i] = ((const uint32_t *)src)[order[i]];
}
static void scatter(void *dst, const void *src, const int32_t *order, int64_t n, size_t size) {
    for (int64_t i = 0; i < n && size == 2; i++) ((uint16_t *)dst)[order[i]] = ((const uint16_t *)src)[i];
    for (int64_t i = 0; i < n && size == 4; i++) ((uint32_t *)dst)[order[i]] = ((const uint32_t *)src)[i];
}

static struct qkv_thread qkv_thread_of(const struct qkv_job *j, int thread) {
    const struct qkv_args *a = j->a;
    const int64_t dim = a->head_dim;
    const size_t size = dtype_size(a->qkv.dt);
    float *const mem = cpu_thread_mem(j->cpu, thread);
    struct qkv_thread t = {.cos = mem, .sin = mem + dim / 2, .tmp = mem + dim, .q_norm = a->q_norm.data, .k_norm = a->k_norm.data};
    if (!dev_rope_reorders(a)) return t;
    t.order = (int32_t *)(mem + 2 * dim);
    t.x = (char *)(mem + 3 * dim);
    t.dx = (char *)(mem + 4 * dim);
    for (int64_t i = 0; i < dim; i++) t.order[i] = (int32_t)dev_rope_source(a, i);
    if (t.q_norm) gather(mem + 5 * dim, t.q_norm, t.order, dim, size), t.q_norm = (char *)(mem + 5 * dim);
    if (t.k_norm) gather(mem + 6 * dim, t.k_norm, t.order, dim, size), t.k_norm = (char *)(mem + 6 * dim);
    return t;
}
/* The head of qkv at element i, in the order of queries and keys. */
static const void *qkv_head(const struct qkv_args *a, const struct qkv_thread *t, int64_t i) {
    if (!t->order) return at(a->qkv, i);
    gather(t->x, at(a->qkv, i), t->order, a->head_dim, dtype_size(a->qkv.dt));
    return t->x;
}

/* Row of head `head` at slot `slot` of the KV cache (n_kv_blocks, H, block_len, D): first element. */
static int64_t slot_elem(struct tensor t, int64_t slot, int64_t head) {
    const int64_t len = t.dim[2];
    CHECK(slot >= 0 && slot / len < t.dim[0]);
    return ((slot / len * t.dim[1] + head) * len + slot % len) * t.dim[3];
}

/* cos and sin of row t, each in its array. */
static void load_rope(const struct qkv_args *a, int64_t t, float *cos, float *sin) {
    const int64_t half = a->head_dim / 2, p = ((const int32_t *)a->pos.data)[t];
    CHECK(p >= 0 && p < a->rope.dim[0]);
    const float *rope = (const float *)a->rope.data + p * a->head_dim;
    for (int64_t i = 0; i < half; i++) {
        cos[i] = rope[2 * i];
        sin[i] = rope[2 * i + 1];
    }
}

static void qkv_fwd_part(void *arg, int64_t part, int thread) {
    const struct qkv_job *j = arg;
    const struct qkv_args *a = j->a;
    const int64_t dim = a->head_dim, n_q = a->n_q_heads, n_k = a->n_kv_heads, c = a->qkv.dim[1];
    const struct qkv_thread m = qkv_thread_of(j, thread);
    const struct cpu_head_rot q = {
        .dim = dim, .act = a->qkv.dt, .eps = a->eps, .norm = m.q_norm, .kind = a->kind, .cos = m.cos, .sin = m.sin};
    const struct cpu_head_rot k = {
        .dim = dim, .act = a->qkv.dt, .eps = a->eps, .norm = m.k_norm, .kind = a->kind, .cos = m.cos, .sin = m.sin};
    const int64_t lo = part * j->per, hi = part_end(lo, j->per, a->qkv.dim[0]);
    for (int64_t t = lo; t < hi; t++) {
        const int64_t slot = ((const int32_t *)a->slots.data)[t];
        load_rope(a, t, m.cos, m.sin);
        for (int64_t h = 0; h < n_q; h++) j->k->rot_fwd(at(a->q, (t * n_q + h) * dim), qkv_head(a, &m, t * c + h * dim), &q);
        for (int64_t h = 0; h < n_k; h++) {
            const int64_t to = slot_elem(a->kv.k, slot, h);
            j->k->rot_fwd(at(a->kv.k, to), qkv_head(a, &m, t * c + (n_q + h) * dim), &k);
            memcpy(at(a->kv.v, to), at(a->qkv, t * c + (n_q + n_k + h) * dim), (size_t)dim * dtype_size(a->qkv.dt));
        }
    }
}

static int check_dim(const struct qkv_args *a) {
    if (QKV_BYTES(a->head_dim) > CPU_THREAD_BYTES) FAIL(ERR_UNSUPPORTED, "cpu: head_dim %lld is too large", (long long)a->head_dim);
    return 0;
}

int cpu_qkv_fwd(struct dev *d, const struct qkv_args *a) {
    TRY(check_dim(a));
    struct cpu *c = cpu_of(d);
    struct qkv_job j = {.a = a, .cpu = c, .k = cpu_kern_of(c), .per = rows_per_part(a->qkv.dim[1])};
    pool_run(c->pool, n_blocks(a->qkv.dim[0], j.per), qkv_fwd_part, &j);
    return 0;
}

/* rot_bwd of the head of qkv at element i, dy given. */
static void head_bwd(const struct qkv_job *j, const struct qkv_thread *m, int64_t i, const void *dy, const struct cpu_head_rot *h) {
    const struct qkv_args *a = j->a;
    j->k->rot_bwd(m->order ? m->dx : at(j->dqkv, i), dy, qkv_head(a, m, i), h);
    if (m->order) scatter(at(j->dqkv, i), m->dx, m->order, a->head_dim, dtype_size(a->qkv.dt));
}

static void qkv_bwd_part(void *arg, int64_t part, int thread) {
    const struct qkv_job *j = arg;
    const struct qkv_args *a = j->a;
    const int64_t dim = a->head_dim, n_q = a->n_q_heads, n_k = a->n_kv_heads, c = a->qkv.dim[1];
    const struct qkv_thread m = qkv_thread_of(j, thread);
    float *sum_q = j->sums + part * 2 * dim, *sum_k = sum_q + dim;
    const struct cpu_head_rot q = {dim, a->qkv.dt, a->eps, m.q_norm, a->kind, m.cos, m.sin, j->dq.dt, sum_q, m.tmp};
    const struct cpu_head_rot k = {dim, a->qkv.dt, a->eps, m.k_norm, a->kind, m.cos, m.sin, DT_F32, sum_k, m.tmp};
    memset(sum_q, 0, (size_t)(2 * dim) * sizeof *sum_q);
    const int64_t lo = part * BLOCK, hi = part_end(lo, BLOCK, a->qkv.dim[0]);
    for (int64_t t = lo; t < hi; t++) {
        const int64_t slot = ((const int32_t *)a->slots.data)[t];
        load_rope(a, t, m.cos, m.sin);
        for (int64_t h = 0; h < n_q; h++) head_bwd(j, &m, t * c + h * dim, at(j->dq, (t * n_q + h) * dim), &q);
        for (int64_t h = 0; h < n_k; h++) {
            const int64_t x = t * c + (n_q + h) * dim, from = slot_elem(j->dk, slot, h);
            head_bwd(j, &m, x, at(j->dk, from), &k);
            j->k->narrow(at(j->dqkv, x + n_k * dim), j->dqkv.dt, (const float *)j->dv.data + from, dim);
        }
    }
}

/* The blocks' sums, in the order of queries and keys, to the gradient of a norm. */
static void add_norm(const struct qkv_job *j, const struct qkv_thread *m, float *dst, float *sums, int64_t blocks) {
    const int64_t dim = j->a->head_dim;
    if (!m->order) {
        add_partials(j->k, dst, sums, blocks, 2 * dim, dim);
        return;
    }
    memset(m->tmp, 0, (size_t)dim * sizeof *m->tmp);
    add_partials(j->k, m->tmp, sums, blocks, 2 * dim, dim);
    for (int64_t i = 0; i < dim; i++) dst[m->order[i]] += m->tmp[i];
}

int cpu_qkv_bwd(struct dev *d, const struct qkv_args *a, const struct qkv_bwd_args *g) {
    TRY(check_dim(a));
    struct cpu *c = cpu_of(d);
    struct qkv_job j = {.a = a, .cpu = c, .k = cpu_kern_of(c), .dq = g->dq, .dk = g->dk, .dv = g->dv, .dqkv = g->dqkv};
    const int64_t blocks = n_blocks(a->qkv.dim[0], BLOCK), dim = a->head_dim;
    void *p;
    TRY(cpu_scratch(c, CPU_SCRATCH_ROW, (size_t)(blocks * 2 * dim) * sizeof *j.sums, &p));
    j.sums = p;
    pool_run(c->pool, blocks, qkv_bwd_part, &j);
    const struct qkv_thread m = qkv_thread_of(&j, 0);
    if (a->q_norm.data) add_norm(&j, &m, g->dq_norm.data, j.sums, blocks);
    if (a->k_norm.data) add_norm(&j, &m, g->dk_norm.data, j.sums + dim, blocks);
    return 0;
}

/* ---- SwiGLU, GeGLU ---- */

struct swiglu_job {
    const struct cpu_kern *k;
    struct tensor y, gate_up, dgate_up; /* y: dy in backward */
    int64_t col_parts;                  /* parts of a row */
    bool gelu;                          /* GeGLU */
};

/* The part's piece of its row: columns [lo, lo + n). */
static int64_t swiglu_piece(const struct swiglu_job *j, int64_t part, int64_t *lo, int64_t *n) {
    const int64_t f = j->y.dim[1], col = part % j->col_parts * PART_ELEMS;
    *lo = col;
    *n = part_end(col, PART_ELEMS, f) - col;
    return part / j->col_parts;
}
static void swiglu_fwd_part(void *arg, int64_t part, int thread) {
    const struct swiglu_job *j = arg;
    int64_t lo, n;
    const int64_t t = swiglu_piece(j, part, &lo, &n), f = j->y.dim[1];
    (void)thread;
    (j->gelu ? j->k->geglu_fwd : j->k->swiglu_fwd)(at(j->y, t * f + lo), at(j->gate_up, t * 2 * f + lo),
                                                   at(j->gate_up, t * 2 * f + f + lo), j->y.dt, n);
}
static int glu_fwd(struct cpu *c, struct tensor y, struct tensor gate_up, bool gelu) {
    struct swiglu_job j = {
        .k = cpu_kern_of(c), .y = y, .gate_up = gate_up, .col_parts = n_blocks(y.dim[1], PART_ELEMS), .gelu = gelu};
    pool_run(c->pool, y.dim[0] * j.col_parts, swiglu_fwd_part, &j);
    return 0;
}
int cpu_swiglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) { return glu_fwd(cpu_of(d), y, gate_up, false); }
int cpu_geglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) { return glu_fwd(cpu_of(d), y, gate_up, true); }

static void swiglu_bwd_part(void *arg, int64_t part, int thread) {
    const struct swiglu_job *j = arg;
    int64_t lo, n;
    const int64_t t = swiglu_piece(j, part, &lo, &n), f = j->y.dim[1], g = t * 2 * f + lo;
    (void)thread;
    const struct cpu_swiglu_grad s = {at(j->dgate_up, g), at(j->dgate_up, g + f), at(j->y, t * f + lo),
                                      at(j->gate_up, g),  at(j->gate_up, g + f),  n};
    (j->gelu ? j->k->geglu_bwd : j->k->swiglu_bwd)(&s, j->y.dt);
}
static int glu_bwd(struct cpu *c, struct tensor dgate_up, struct tensor dy, struct tensor gate_up, bool gelu) {
    struct swiglu_job j = {.k = cpu_kern_of(c),
                           .y = dy,
                           .gate_up = gate_up,
                           .dgate_up = dgate_up,
                           .col_parts = n_blocks(dy.dim[1], PART_ELEMS),
                           .gelu = gelu};
    pool_run(c->pool, dy.dim[0] * j.col_parts, swiglu_bwd_part, &j);
    return 0;
}
int cpu_swiglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    return glu_bwd(cpu_of(d), dgate_up, dy, gate_up, false);
}
int cpu_geglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    return glu_bwd(cpu_of(d), dgate_up, dy, gate_up, true);
}
