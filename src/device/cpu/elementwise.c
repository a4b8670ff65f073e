/* elementwise.c - the CPU backend's ops without a GEMM: packing of
 * weights, casts, embedding, rows by index, sums of squares, ordered sums, AdamW.
 *
 * All are bound by memory, so they are plain loops that the compiler turns
 * into vectors, cut into parts of a fixed size.  Invariant: a part is a fixed
 * range of elements, so sums do not depend on the number of threads. */
#include "device/cpu/gemm/gemm.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum {
    PART = 1 << 15, /* elements of a part of a flat array */
    LANES = 16      /* independent sums, and the step of the vector loops */
};

static int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }
static int64_t part_end(int64_t n, int64_t lo) { return n - lo < PART ? n : lo + PART; }

/* ---- packed weights ---- */

struct weight_job {
    const struct cpu *cpu;
    struct weight w;
    void *rows; /* (n, k) row-major */
    enum dtype dt;
};

size_t cpu_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k) {
    (void)d;
    return (size_t)(cpu_up32(n) * cpu_up32(k)) * dtype_size(dt);
}

static void pack_part(void *arg, int64_t p, int thread) {
    const struct weight_job *j = arg;
    const int64_t n0 = p * CPU_PANEL, k = j->w.k;
    const int rows = (int)(j->w.n - n0 < CPU_PANEL ? j->w.n - n0 : CPU_PANEL);
    (void)thread;
    cpu_gemm_ops_of(j->cpu, j->w.dt)
        ->pack_w((char *)j->w.data + (size_t)(p * cpu_panel_elems(k)) * dtype_size(j->w.dt),
                 (const char *)j->rows + (size_t)(n0 * k) * dtype_size(j->dt), j->dt, k, rows, k);
}

int cpu_weight_pack(struct dev *d, struct weight w, struct tensor src) {
    struct weight_job j = {cpu_of(d), w, src.data, src.dt};
    pool_run(cpu_of(d)->pool, parts_of(w.n, CPU_PANEL), pack_part, &j);
    return 0;
}

/* Row n of w as f32 or as bits, to out (k). */
static void weight_row(const struct weight *w, int64_t n, void *out, enum dtype dt) {
    const int64_t base = cpu_weight_index(w, n, 0), k = w->k;
    if (w->dt == DT_F32) {
        const float *s = (const float *)w->data + base;
        for (int64_t i = 0; i < k; i++) ((float *)out)[i] = s[i * CPU_PANEL];
        return;
    }
    const uint16_t *s = (const uint16_t *)w->data + base;
    for (int64_t i = 0; i < k; i++) {
        const uint16_t v = s[i / 32 * 1024 + i % 32 / 2 * 32 + i % 2];
        if (dt == DT_BF16) ((uint16_t *)out)[i] = v;
        else ((float *)out)[i] = bf16_to_f32(v);
    }
}

static void unpack_part(void *arg, int64_t p, int thread) {
    const struct weight_job *j = arg;
    const int64_t hi = (p + 1) * CPU_PANEL < j->w.n ? (p + 1) * CPU_PANEL : j->w.n;
    (void)thread;
    for (int64_t n = p * CPU_PANEL; n < hi; n++)
        weight_row(&j->w, n, (char *)j->rows + (size_t)(n * j->w.k) * dtype_size(j->dt), j->dt);
}

int cpu_weight_unpack(struct dev *d, struct tensor dst, struct weight w) {
    struct weight_job j = {cpu_of(d), w, dst.data, dst.dt};
    pool_run(cpu_of(d)->pool, parts_of(w.n, CPU_PANEL), unpack_part, &j);
    return 0;
}

/* ---- casts ---- */

struct cast_job {
    struct tensor dst, src;
    int64_t n;
};

static void cast_part(void *arg, int64_t part, int thread) {
    const struct cast_job *j = arg;
    const int64_t lo = part * PART, hi = part_end(j->n, lo);
    (void)thread;
    if (j->dst.dt == DT_BF16) {
        uint16_t *restrict y = j->dst.data;
        const float *restrict x = j->src.data;
        int64_t i = lo;
        for (; i + LANES <= hi; i += LANES)
            for (int l = 0; l < LANES; l++) y[i + l] = f32_to_bf16(x[i + l]);
        for (; i < hi; i++) y[i] = f32_to_bf16(x[i]);
    } else {
        float *restrict y = j->dst.data;
        const uint16_t *restrict x = j->src.data;
        int64_t i = lo;
        for (; i + LANES <= hi; i += LANES)
            for (int l = 0; l < LANES; l++) y[i + l] = bf16_to_f32(x[i + l]);
        for (; i < hi; i++) y[i] = bf16_to_f32(x[i]);
    }
}

int cpu_cast(struct dev *d, struct tensor dst, struct tensor src) {
    struct cast_job j = {dst, src, tensor_count(src)};
    if (dst.dt == src.dt) return d->ops->copy(d, dst.data, src.data, (size_t)j.n * dtype_size(src.dt));
    pool_run(cpu_of(d)->pool, parts_of(j.n, PART), cast_part, &j);
    return 0;
}

/* ---- rows by index ---- */

enum { ROWS = 16 }; /* rows of a part */

struct rows_job {
    struct tensor dst, src, idx;
    struct weight w;
};

static void rows_each(const struct rows_job *j, int64_t part, void (*fn)(const struct rows_job *j, int64_t r, int64_t id)) {
    const int32_t *idx = j->idx.data;
    const int64_t n = j->idx.dim[0], hi = (part + 1) * ROWS < n ? (part + 1) * ROWS : n;
    for (int64_t r = part * ROWS; r < hi; r++) fn(j, r, idx[r]);
}

static void embed_row(const struct rows_job *j, int64_t r, int64_t id) {
    CHECK(id >= 0 && id < j->w.n);
    weight_row(&j->w, id, (float *)j->dst.data + r * j->w.k, DT_F32);
}
static void embed_part(void *arg, int64_t part, int thread) {
    (void)thread;
    rows_each(arg, part, embed_row);
}
int cpu_embed_fwd(struct dev *d, struct tensor x, struct tensor ids, struct weight w) {
    struct rows_job j = {.dst = x, .idx = ids, .w = w};
    pool_run(cpu_of(d)->pool, parts_of(ids.dim[0], ROWS), embed_part, &j);
    return 0;
}

static void gather_row(const struct rows_job *j, int64_t r, int64_t id) {
    const size_t bytes = (size_t)j->src.dim[1] * dtype_size(j->src.dt);
    CHECK(id >= 0 && id < j->src.dim[0]);
    memcpy((char *)j->dst.data + (size_t)r * bytes, (const char *)j->src.data + (size_t)id * bytes, bytes);
}
static void gather_part(void *arg, int64_t part, int thread) {
    (void)thread;
    rows_each(arg, part, gather_row);
}
int cpu_gather_rows(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    struct rows_job j = {.dst = dst, .src = src, .idx = idx};
    pool_run(cpu_of(d)->pool, parts_of(idx.dim[0], ROWS), gather_part, &j);
    return 0;
}

static void scale_row(const struct rows_job *j, int64_t r, int64_t pos) {
    const int64_t n = j->dst.dim[1];
    CHECK(pos >= 0 && pos < j->src.dim[0]);
    const float by = ((const float *)j->src.data)[pos];
    if (j->dst.dt == DT_BF16) {
        uint16_t *x = (uint16_t *)j->dst.data + r * n;
        for (int64_t i = 0; i < n; i++) x[i] = f32_to_bf16(bf16_to_f32(x[i]) * by);
    } else {
        float *x = (float *)j->dst.data + r * n;
        for (int64_t i = 0; i < n; i++) x[i] *= by;
    }
}
static void scale_part(void *arg, int64_t part, int thread) {
    (void)thread;
    rows_each(arg, part, scale_row);
}
int cpu_scale_rows(struct dev *d, struct tensor x, struct tensor factor, struct tensor pos) {
    struct rows_job j = {.dst = x, .src = factor, .idx = pos};
    pool_run(cpu_of(d)->pool, parts_of(pos.dim[0], ROWS), scale_part, &j);
    return 0;
}

static void join_part(void *arg, int64_t part, int thread) {
    const struct join_columns_args *const a = arg;
    const int64_t rows = a->y.dim[0], width = a->y.dim[1], hi = (part + 1) * ROWS < rows ? (part + 1) * ROWS : rows;
    const size_t unit = dtype_size(a->y.dt);
    (void)thread;
    for (int i = 0; i < a->n; i++) {
        const int64_t n = a->cut[i + 1] - a->cut[i];
        for (int64_t t = part * ROWS; t < hi; t++) {
            const int64_t to = t * width + a->cut[i], at = rows * a->cut[i] + t * n;
            if (!a->from.data) {
                memcpy((char *)a->y.data + (size_t)to * unit, (const char *)a->x.data + (size_t)at * unit, (size_t)n * unit);
                continue;
            }
            const float *const x = (const float *)a->x.data + at, *const from = (const float *)a->from.data + to;
            float *const y = (float *)a->y.data + to;
            for (int64_t c = 0; c < n; c++) y[c] = from[c] + x[c];
        }
    }
}
int cpu_join_columns(struct dev *d, const struct join_columns_args *a) {
    struct join_columns_args j = *a;
    pool_run(cpu_of(d)->pool, parts_of(a->y.dim[0], ROWS), join_part, &j);
    return 0;
}

static void copy_columns_part(void *arg, int64_t part, int thread) {
    const struct copy_columns_args *const a = arg;
    const int64_t rows = a->y.dim[0], hi = (part + 1) * ROWS < rows ? (part + 1) * ROWS : rows;
    const size_t unit = dtype_size(a->y.dt);
    (void)thread;
    for (int64_t t = part * ROWS; t < hi; t++)
        memcpy((char *)a->y.data + (size_t)(t * a->y.dim[1] + a->y_at) * unit,
               (const char *)a->x.data + (size_t)(t * a->x.dim[1] + a->x_at) * unit, (size_t)a->n * unit);
}
int cpu_copy_columns(struct dev *d, const struct copy_columns_args *a) {
    struct copy_columns_args c = *a;
    pool_run(cpu_of(d)->pool, parts_of(a->y.dim[0], ROWS), copy_columns_part, &c);
    return 0;
}

static void copy_rows_part(void *arg, int64_t part, int thread) {
    const struct copy_rows_args *const a = arg;
    const size_t bytes = (size_t)a->x.dim[1] * dtype_size(a->x.dt);
    char *const x = a->x.data;
    (void)thread;
    memcpy(x + (size_t)a->to[part] * bytes, x + (size_t)a->from[part] * bytes, bytes);
}
int cpu_copy_rows(struct dev *d, const struct copy_rows_args *a) {
    struct copy_rows_args c = *a;
    pool_run(cpu_of(d)->pool, a->n, copy_rows_part, &c);
    return 0;
}

static void scatter_row(const struct rows_job *j, int64_t r, int64_t id) {
    const int64_t n = j->dst.dim[1];
    CHECK(id >= 0 && id < j->dst.dim[0]);
    float *y = (float *)j->dst.data + id * n;
    if (j->src.dt == DT_BF16) {
        const uint16_t *x = (const uint16_t *)j->src.data + r * n;
        for (int64_t i = 0; i < n; i++) y[i] += bf16_to_f32(x[i]);
    } else {
        const float *x = (const float *)j->src.data + r * n;
        for (int64_t i = 0; i < n; i++) y[i] += x[i];
    }
}
static void scatter_part(void *arg, int64_t part, int thread) {
    (void)thread;
    rows_each(arg, part, scatter_row);
}
int cpu_scatter_rows_add(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    struct rows_job j = {.dst = dst, .src = src, .idx = idx};
    pool_run(cpu_of(d)->pool, parts_of(idx.dim[0], ROWS), scatter_part, &j);
    return 0;
}

/* The rows of an id, chained in row order: the first one adds them up, EMBED_COLS columns at a time, then adds the sum to
 * the id's row of the table, of which dw has the elements from lo on. Places count from 1; 0: none. */
enum { EMBED_COLS = 512 };

struct embed_bwd_job {
    struct tensor dw, ids, dx;
    int64_t lo;
    const int32_t *first, *next; /* (V) of an id, (T) of its next row */
};

static void embed_bwd_row(const struct embed_bwd_job *j, int64_t t) {
    const int64_t h = j->dx.dim[1], id = ((const int32_t *)j->ids.data)[t], row = id * h - j->lo; /* where it begins in dw */
    const int64_t from = row < 0 ? -row : 0, to = j->dw.dim[0] - row < h ? j->dw.dim[0] - row : h;
    if (j->first[id] != t + 1) return;
    for (int64_t c0 = from; c0 < to; c0 += EMBED_COLS) {
        const int64_t n = to - c0 < EMBED_COLS ? to - c0 : EMBED_COLS;
        const float *const dx = (const float *)j->dx.data + c0;
        float sum[EMBED_COLS], *restrict y = (float *)j->dw.data + (row + c0);
        memset(sum, 0, (size_t)n * sizeof *sum);
        for (int64_t u = t + 1; u > 0; u = j->next[u - 1])
            for (int64_t c = 0; c < n; c++) sum[c] += dx[(u - 1) * h + c];
        for (int64_t c = 0; c < n; c++) y[c] += sum[c];
    }
}
static void embed_bwd_part(void *arg, int64_t part, int thread) {
    const struct embed_bwd_job *j = arg;
    const int64_t n = j->ids.dim[0], hi = (part + 1) * ROWS < n ? (part + 1) * ROWS : n;
    (void)thread;
    for (int64_t t = part * ROWS; t < hi; t++) embed_bwd_row(j, t);
}
int cpu_embed_bwd(struct dev *d, struct tensor dw, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    const int64_t rows = ids.dim[0];
    const int32_t *id = ids.data;
    void *p;
    TRY(cpu_scratch(cpu_of(d), CPU_SCRATCH_ROW, (size_t)(vocab + rows) * sizeof *id, &p));
    int32_t *first = p, *next = first + vocab;
    memset(first, 0, (size_t)vocab * sizeof *first);
    for (int64_t t = rows - 1; t >= 0; t--) {
        CHECK(id[t] >= 0 && id[t] < vocab);
        next[t] = first[id[t]];
        first[id[t]] = (int32_t)(t + 1);
    }
    struct embed_bwd_job j = {dw, ids, dx, lo, first, next};
    pool_run(cpu_of(d)->pool, parts_of(rows, ROWS), embed_bwd_part, &j);
    return 0;
}

/* ---- sums of squares ---- */

struct sumsq_job {
    struct tensor x, segments;
    int64_t base;
    double *sums;
};

/* A segment: LANES interleaved sums in double, then added in lane order. */
static void sumsq_part(void *arg, int64_t part, int thread) {
    const struct sumsq_job *j = arg;
    const int64_t *seg = (const int64_t *)j->segments.data + 2 * part, at = seg[0] - j->base, n = seg[1];
    const float *x = (const float *)j->x.data + at;
    double s[LANES] = {0};
    int64_t i = 0;
    (void)thread;
    CHECK(at >= 0 && n >= 1 && n <= DEV_SEGMENT && at + n <= j->x.dim[0]);
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            const double v = x[i + l];
            s[l] += v * v;
        }
    for (int l = 0; i < n; i++, l++) s[l] += (double)x[i] * x[i];
    double sum = 0;
    for (int l = 0; l < LANES; l++) sum += s[l];
    j->sums[part] = sum;
}

int cpu_sumsq(struct dev *d, struct tensor sums, struct tensor x, struct tensor segments, int64_t base) {
    struct sumsq_job j = {x, segments, base, sums.data};
    pool_run(cpu_of(d)->pool, segments.dim[0], sumsq_part, &j);
    return 0;
}

/* ---- checksums ---- */

enum { CHECKSUM_PART = 1 << 20 /* bytes */ };
struct checksum_job {
    const uint8_t *p;
    int64_t n;
    atomic_uint_fast64_t sum; /* of whole numbers: the order does not matter */
};

static void checksum_part(void *arg, int64_t part, int thread) {
    struct checksum_job *j = arg;
    const int64_t lo = part * CHECKSUM_PART, hi = lo + CHECKSUM_PART < j->n ? lo + CHECKSUM_PART : j->n;
    uint64_t s = 0, w;
    (void)thread;
    for (int64_t i = lo; i < hi; i += 8) {
        w = 0;
        memcpy(&w, j->p + i, hi - i < 8 ? (size_t)(hi - i) : 8);
        s += dev_checksum_word(w, i / 8);
    }
    atomic_fetch_add(&j->sum, s);
}

int cpu_checksum(struct dev *d, struct tensor sum, struct tensor bytes) {
    struct checksum_job j = {.p = bytes.data, .n = bytes.dim[0]};
    pool_run(cpu_of(d)->pool, (j.n + CHECKSUM_PART - 1) / CHECKSUM_PART, checksum_part, &j);
    *(uint64_t *)sum.data = atomic_load(&j.sum);
    return 0;
}

/* ---- ordered sums ---- */

struct fold_job {
    float *y;
    const struct tensor *x;
    int n;
    bool add;
    int64_t count;
};

static void fold_part(void *arg, int64_t part, int thread) {
    const struct fold_job *j = arg;
    const int64_t lo = part * PART, n = part_end(j->count, lo) - lo;
    float *restrict y = j->y + lo;
    (void)thread;
    if (!j->add) memcpy(y, (const float *)j->x[0].data + lo, (size_t)n * sizeof *y);
    for (int k = j->add ? 0 : 1; k < j->n; k++) {
        const float *restrict x = (const float *)j->x[k].data + lo;
        for (int64_t i = 0; i < n; i++) y[i] += x[i];
    }
}

int cpu_fold(struct dev *d, struct tensor y, const struct tensor *x, int n, bool add) {
    struct fold_job j = {y.data, x, n, add, tensor_count(y)};
    pool_run(cpu_of(d)->pool, parts_of(j.count, PART), fold_part, &j);
    return 0;
}

/* ---- AdamW ---- */

/* Loshchilov & Hutter (2019), in torch.optim.AdamW's order of f32 operations;
 * scalars are formed in double and rounded once. */
struct adamw_job {
    float *p, *m, *v;
    const float *g;
    int64_t n;
    float scale, keep, one_b1, b2, one_b2, eps, step_size, root_bias2;
};

static inline void adamw_one(const struct adamw_job *j, int64_t i) {
    const float g = j->g[i] * j->scale;
    const float m = j->m[i] + j->one_b1 * (g - j->m[i]);
    const float v = j->v[i] * j->b2 + j->one_b2 * g * g;
    j->m[i] = m;
    j->v[i] = v;
    j->p[i] = j->p[i] * j->keep - j->step_size * m / (sqrtf(v) / j->root_bias2 + j->eps);
}

static void adamw_part(void *arg, int64_t part, int thread) {
    const struct adamw_job j = *(const struct adamw_job *)arg; /* own copy: scalars stay in registers */
    const int64_t lo = part * PART, hi = part_end(j.n, lo);
    int64_t i = lo;
    (void)thread;
    for (; i + LANES <= hi; i += LANES)
#pragma GCC ivdep
        for (int l = 0; l < LANES; l++) adamw_one(&j, i + l);
    for (; i < hi; i++) adamw_one(&j, i);
}

int cpu_adamw(struct dev *d, const struct adamw_args *a) {
    const double t = (double)a->step;
    struct adamw_job j = {
        .p = a->p.data,
        .m = a->m.data,
        .v = a->v.data,
        .g = a->g.data,
        .n = tensor_count(a->p),
        .scale = (float)a->grad_scale,
        .keep = (float)(1.0 - a->lr * a->weight_decay),
        .one_b1 = (float)(1.0 - a->beta1),
        .b2 = (float)a->beta2,
        .one_b2 = (float)(1.0 - a->beta2),
        .eps = (float)a->eps,
        .step_size = (float)(a->lr / (1.0 - pow(a->beta1, t))),
        .root_bias2 = (float)sqrt(1.0 - pow(a->beta2, t)),
    };
    pool_run(cpu_of(d)->pool, parts_of(j.n, PART), adamw_part, &j);
    return 0;
}
