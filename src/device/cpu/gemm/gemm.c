/* gemm.c - the three GEMMs of a linear layer over one set of micro-kernels: y = x W^T (fwd), dx = dy W,
 * dw += dy^T x.
 *
 * Rows are taken in bands whose packed A fits a fixed buffer.  A band is packed
 * by all threads, then cut into units of (blocks of rows x panels of columns)
 * that threads take in any order.  A unit walks K in cache blocks and keeps its sums in f32 in the thread's
 * memory.  At small M (decode) the weight is streamed once, straight from memory.
 *
 * Invariant: bands, units, cache blocks and threads change which element is
 * computed when and by whom, never its chain of operations. */
#include "device/cpu/gemm/gemm.h"

#include "base/buf.h"

#include <string.h>

enum {
    TILE = CPU_PANEL,
    UNITS_PER_THREAD = 6, /* for load balance */
    BAND_BYTES = 16 << 20 /* packed A of one band */
};

enum gemm_kind { GEMM_FWD, GEMM_DX, GEMM_DW };

struct gemm_job {
    const struct cpu_gemm_isa *isa;
    const struct cpu_gemm_ops *g;
    const struct cpu *cpu;
    enum gemm_kind kind;
    size_t elem;     /* bytes of an unpacked element of A and B */
    int64_t m, n, r; /* rows, columns, reduction */
    const char *a;   /* fwd, dx: (m, r), dw: (r, m) */
    int64_t lda;
    const char *b;           /* fwd, dx: first panel of a packed weight; dw: (r, n) */
    int64_t ldb;             /* dw: elements from row to row; else from panel to panel */
    struct cpu_gemm_out out; /* y is C[0][0]; bias unused */
    const void *bias;        /* (n) act, or NULL */
    /* the band at work: rows [m0, m0 + bm) in nb blocks */
    int64_t m0, bm, nb, kb, nkb; /* kb: reduction of a cache block; nkb of them */
    char *pa;                    /* packed A: [cache block][row block][max_rows x kb] */
    int64_t mu, nu;              /* units along rows and columns */
};

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void enter(const struct gemm_job *j) {
    if (j->isa->enter) j->isa->enter();
}
static void leave(const struct gemm_job *j) {
    if (j->isa->leave) j->isa->leave();
}

/* Rows [*lo, *lo + result) of block i, counted from the job's row 0. */
static int block_rows(const struct gemm_job *j, int64_t i, int64_t *lo) {
    int64_t hi;
    pool_range(j->bm, j->nb, i, lo, &hi);
    const int rows = (int)(hi - *lo);
    *lo += j->m0;
    return rows;
}

static size_t block_bytes(const struct gemm_job *j) { return (size_t)(j->g->max_rows * j->kb) * j->g->a_bytes; }

static void load_bias(const struct gemm_job *j, float bias[TILE], int64_t col, int cols) {
    for (int i = 0; i < TILE; i++) {
        bias[i] = i >= cols      ? 0
                  : j->elem == 2 ? bf16_to_f32(((const uint16_t *)j->bias)[col + i])
                                 : ((const float *)j->bias)[col + i];
    }
}

static struct cpu_gemm_out out_at(const struct gemm_job *j, int64_t row, int64_t col, const float *bias) {
    struct cpu_gemm_out o = j->out;
    o.y = (char *)o.y + (size_t)(row * o.ld + col) * dtype_size(o.dt);
    o.bias = bias;
    return o;
}

/* ---- small M: stream the weight ---- */
static const char *stream_panel(const struct gemm_job *j, int64_t p) { return j->b + (size_t)(p * j->ldb) * j->elem; }

static void stream_store(const struct gemm_job *j, int64_t p, const float *c) {
    float bias[TILE];
    const int64_t col = p * TILE;
    const int cols = (int)min64(TILE, j->n - col);
    if (j->bias) load_bias(j, bias, col, cols);
    const struct cpu_gemm_out o = out_at(j, 0, col, j->bias ? bias : NULL);
    j->g->store(&o, (int)j->m, cols, c);
}

/* The panels [p, hi): those of the first half together with those of the second where the kernel takes two. */
static void stream_part(void *arg, int64_t part, int thread) {
    const struct gemm_job *j = arg;
    const struct cpu_gemm_ops *g = j->g;
    const int64_t rn = cpu_up32(j->r);
    float *c = cpu_thread_mem(j->cpu, thread), *c2 = c + g->max_rows * TILE;
    int64_t p, hi;
    pool_range(ceil_div(j->n, TILE), j->nu, part, &p, &hi);
    const int64_t half = j->m <= g->two_rows ? (hi - p) / 2 : 0;
    enter(j);
    for (int64_t i = 0; i < half; i++, p++) {
        g->stream_two((int)j->m, rn, j->pa, stream_panel(j, p), stream_panel(j, p + half), c, c2);
        stream_store(j, p, c);
        stream_store(j, p + half, c2);
    }
    for (p += half; p < hi; p++) {
        g->stream((int)j->m, rn, j->pa, stream_panel(j, p), c);
        stream_store(j, p, c);
    }
    leave(j);
}

static int gemm_stream(struct cpu *cpu, struct gemm_job *j) {
    const int64_t np = ceil_div(j->n, TILE);
    void *pa;
    TRY(cpu_scratch(cpu, CPU_SCRATCH_GEMM, (size_t)(j->g->max_rows * cpu_up32(j->r)) * j->g->a_bytes, &pa));
    j->pa = pa;
    j->g->pack_a(pa, j->a, j->lda, (int)j->m, j->r);
    j->nu = min64(np, max64(np / 64, cpu->n_threads * (int64_t)UNITS_PER_THREAD));
    pool_run(cpu->pool, j->nu, stream_part, j);
    return 0;
}

/* ---- large M: bands, units, cache blocks ---- */
static void pack_part(void *arg, int64_t part, int thread) {
    const struct gemm_job *j = arg;
    const int64_t ik = part / j->nb, im = part % j->nb, r0 = ik * j->kb;
    int64_t row;
    const int rows = block_rows(j, im, &row);
    const int64_t rn = min64(j->kb, j->r - r0);
    char *dst = j->pa + (size_t)part * block_bytes(j);
    (void)thread;
    if (j->kind == GEMM_DW) j->g->pack_at(dst, j->a + (size_t)(r0 * j->lda + row) * j->elem, j->lda, rows, rn);
    else j->g->pack_a(dst, j->a + (size_t)(row * j->lda + r0) * j->elem, j->lda, rows, rn);
}

/* Where panel p's part of the reduction starts in memory. */
static const char *panel_src(const struct gemm_job *j, int64_t p, int64_t r0) {
    int64_t at = 0;
    switch (j->kind) {
    case GEMM_FWD: at = p * j->ldb; break;
    case GEMM_DX: at = r0 / TILE * j->ldb + p * TILE * TILE; break;
    case GEMM_DW: at = r0 * j->ldb + p * TILE; break;
    }
    return j->b + (size_t)at * j->elem;
}

static const void *panel_get(const struct gemm_job *j, void *buf, int64_t p, int64_t r0, int64_t rn) {
    const char *src = panel_src(j, p, r0);
    switch (j->kind) {
    case GEMM_FWD: return j->g->b_fwd(buf, src, r0, cpu_up32(rn));
    case GEMM_DX: j->g->b_dx(buf, src, j->ldb, ceil_div(rn, TILE)); break;
    case GEMM_DW: j->g->b_rows(buf, src, j->ldb, (int)min64(TILE, j->n - p * TILE), rn); break;
    }
    return buf;
}

/* Prefetches slice i of s of the next panel. */
static void panel_prefetch(const struct gemm_job *j, int64_t p, int64_t r0, int64_t rn, int64_t i, int64_t s) {
    const char *src = panel_src(j, p, r0);
    const int64_t row = (int64_t)(TILE * j->elem); /* bytes of 32 elements: one or two lines */
    int64_t lo, hi;
    pool_range(rn, s, i, &lo, &hi);
    switch (j->kind) {
    case GEMM_FWD: /* contiguous from r0 */
        for (int64_t b = (r0 + lo) * row; b < (r0 + hi) * row; b += 64) __builtin_prefetch(src + b, 0, 2);
        return;
    case GEMM_DX: /* 32 x 32 elements of each weight panel */
        for (int64_t r = lo; r < hi; r++) {
            const char *q = src + (size_t)(r / TILE * j->ldb) * j->elem + r % TILE * row;
            for (int64_t b = 0; b < row; b += 64) __builtin_prefetch(q + b, 0, 2);
        }
        return;
    case GEMM_DW:
        for (int64_t r = lo; r < hi; r++)
            for (int64_t b = 0; b < row; b += 64) __builtin_prefetch(src + (size_t)(r * j->ldb) * j->elem + b, 0, 2);
        return;
    }
}

static void unit_part(void *arg, int64_t part, int thread) {
    const struct gemm_job *j = arg;
    const struct cpu_gemm_ops *g = j->g;
    int64_t b0, b1, p0, p1;
    pool_range(j->nb, j->mu, part % j->mu, &b0, &b1);
    pool_range(ceil_div(j->n, TILE), j->nu, part / j->mu, &p0, &p1);
    const int64_t c_tile = (int64_t)g->max_rows * TILE;
    void *buf = cpu_thread_mem(j->cpu, thread); /* a packed panel, then the sums */
    float *sums = (float *)((char *)buf + (size_t)(g->kc * TILE) * g->b_bytes);
    enter(j);
    for (int64_t ik = 0; ik < j->nkb; ik++) {
        const int64_t r0 = ik * j->kb, rn = min64(j->kb, j->r - r0);
        const char *pa = j->pa + (size_t)(ik * j->nb) * block_bytes(j);
        for (int64_t p = p0; p < p1; p++) {
            const int64_t col = p * TILE;
            const int cols = (int)min64(TILE, j->n - col);
            const void *b = panel_get(j, buf, p, r0, rn);
            float bias[TILE];
            if (j->bias && ik + 1 == j->nkb) load_bias(j, bias, col, cols);
            for (int64_t im = b0; im < b1; im++) {
                int64_t row;
                const int rows = block_rows(j, im, &row);
                float *c = sums + ((p - p0) * (b1 - b0) + im - b0) * c_tile;
                if (p + 1 < p1) panel_prefetch(j, p + 1, r0, rn, im - b0, b1 - b0);
                g->block(rows, cpu_up32(rn), pa + (size_t)im * block_bytes(j), b, c, ik > 0);
                const struct cpu_gemm_out o = out_at(j, row, col, j->bias ? bias : NULL);
                if (ik + 1 == j->nkb) g->store(&o, rows, cols, c);
            }
        }
    }
    leave(j);
}

/* How many units: no larger than the kernels' cache sizes allow, enough for the
 * threads, none thinner than two panels unless there is nothing else to share. */
static void cut_units(struct gemm_job *j, int n_threads) {
    const int64_t np = ceil_div(j->n, TILE), want = (int64_t)n_threads * UNITS_PER_THREAD;
    j->mu = ceil_div(j->nb, j->g->mc);
    j->nu = ceil_div(np, j->g->nc);
    if (j->mu * j->nu < want) j->nu = max64(j->nu, min64(ceil_div(want, j->mu), ceil_div(np, 2)));
    if (j->mu * j->nu < n_threads) j->mu = min64(j->nb, ceil_div(n_threads, j->nu));
}

static int gemm(struct cpu *cpu, struct gemm_job *j) {
    const struct cpu_gemm_ops *g = j->g;
    if (j->m == 0 || j->n == 0) return 0;
    if (j->kind == GEMM_FWD && j->m <= g->max_rows) return gemm_stream(cpu, j);
    j->nkb = max64(1, ceil_div(j->r, g->kc));
    j->kb = cpu_up32(ceil_div(j->r, j->nkb));
    j->nkb = max64(1, ceil_div(j->r, j->kb));
    const size_t per_block = (size_t)j->nkb * block_bytes(j);
    const int64_t max_blocks = max64(1, (int64_t)(BAND_BYTES / per_block));
    const int64_t blocks = ceil_div(j->m, g->max_rows), bands = ceil_div(blocks, max_blocks);
    const int64_t band_blocks = ceil_div(blocks, bands);
    void *pa;
    TRY(cpu_scratch(cpu, CPU_SCRATCH_GEMM, (size_t)band_blocks * per_block, &pa));
    j->pa = pa;
    for (j->m0 = 0; j->m0 < j->m; j->m0 += j->bm) {
        j->bm = min64(j->m - j->m0, band_blocks * g->max_rows);
        j->nb = ceil_div(j->bm, g->max_rows);
        cut_units(j, cpu->n_threads);
        pool_run(cpu->pool, j->nb * j->nkb, pack_part, j);
        pool_run(cpu->pool, j->mu * j->nu, unit_part, j);
    }
    return 0;
}

size_t cpu_gemm_scratch_bytes(const struct dev_sizes *s) {
    const size_t bytes = (size_t)(s->rows * max64(s->ffn, s->hidden)) * sizeof(float);
    return bytes < BAND_BYTES ? bytes : BAND_BYTES;
}

static struct gemm_job job_of(const struct cpu *c, enum gemm_kind kind, enum dtype act) {
    return (struct gemm_job){.isa = c->gemm, .g = cpu_gemm_ops_of(c, act), .cpu = c, .kind = kind, .elem = dtype_size(act)};
}

static const char *weight_panel(const struct weight *w, int64_t n) {
    CHECK(n % CPU_PANEL == 0 && n <= w->n);
    return (const char *)w->data + (size_t)(n / CPU_PANEL * cpu_panel_elems(w->k)) * dtype_size(w->dt);
}

int cpu_matmul_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add) {
    struct gemm_job j = job_of(cpu_of(d), GEMM_FWD, x.dt);
    j.m = x.dim[0];
    j.n = w.n;
    j.r = j.lda = w.k;
    j.a = x.data;
    j.b = w.data;
    j.ldb = cpu_panel_elems(w.k);
    j.out = (struct cpu_gemm_out){.y = y.data, .ld = w.n, .dt = y.dt, .add = add};
    j.bias = bias.data;
    return gemm(cpu_of(d), &j);
}

int cpu_matmul_cols(struct cpu *c, struct tensor y, struct tensor x, const struct weight *w, int64_t n0, int64_t n1) {
    struct gemm_job j = job_of(c, GEMM_FWD, x.dt);
    j.m = x.dim[0];
    j.n = n1 - n0;
    j.r = j.lda = w->k;
    j.a = x.data;
    j.b = weight_panel(w, n0);
    j.ldb = cpu_panel_elems(w->k);
    j.out = (struct cpu_gemm_out){.y = y.data, .ld = y.dim[1], .dt = DT_F32};
    return gemm(c, &j);
}

static int matmul_dx(struct cpu *c, struct cpu_gemm_out out, struct tensor dy, const struct weight *w, int64_t n0, int64_t n1) {
    struct gemm_job j = job_of(c, GEMM_DX, dy.dt);
    j.m = dy.dim[0];
    j.n = w->k;
    j.r = j.lda = n1 - n0;
    j.a = dy.data;
    j.b = weight_panel(w, n0);
    j.ldb = cpu_panel_elems(w->k);
    j.out = out;
    return gemm(c, &j);
}

int cpu_matmul_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add) {
    const struct cpu_gemm_out out = {.y = dx.data, .ld = w.k, .dt = dx.dt, .add = add};
    return matmul_dx(cpu_of(d), out, dy, &w, 0, w.n);
}

int cpu_matmul_dx_cols(struct cpu *c, float *dx, struct tensor dz, const struct weight *w, int64_t n0, int64_t n1) {
    const struct cpu_gemm_out out = {.y = dx, .ld = w->k, .dt = DT_F32, .add = true};
    return matmul_dx(c, out, dz, w, n0, n1);
}

/* ---- column sums of dy, rows in order ---- */
struct colsum_job {
    float *db;
    const void *dy;
    bool bf16;
    int64_t rows, cols;
    bool add;
};
enum { COLSUM_COLS = 128 };

static void colsum_part(void *arg, int64_t part, int thread) {
    const struct colsum_job *j = arg;
    const int64_t c0 = part * COLSUM_COLS, cn = min64(COLSUM_COLS, j->cols - c0);
    float s[COLSUM_COLS] = {0};
    (void)thread;
    for (int64_t t = 0; t < j->rows; t++) {
        const int64_t at = t * j->cols + c0;
        if (j->bf16)
            for (int64_t i = 0; i < cn; i++) s[i] += bf16_to_f32(((const uint16_t *)j->dy)[at + i]);
        else
            for (int64_t i = 0; i < cn; i++) s[i] += ((const float *)j->dy)[at + i];
    }
    for (int64_t i = 0; i < cn; i++) j->db[c0 + i] = j->add ? j->db[c0 + i] + s[i] : s[i];
}

int cpu_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add) {
    struct gemm_job j = job_of(cpu_of(d), GEMM_DW, dy.dt);
    j.m = j.lda = dy.dim[1];
    j.n = j.ldb = x.dim[1];
    j.r = dy.dim[0];
    j.a = dy.data;
    j.b = x.data;
    j.out = (struct cpu_gemm_out){.y = dw.data, .ld = j.n, .dt = DT_F32, .add = add};
    if (j.r == 0) return 0;
    TRY(gemm(cpu_of(d), &j));
    if (db.data) {
        struct colsum_job s = {db.data, dy.data, dy.dt == DT_BF16, j.r, j.m, add};
        pool_run(cpu_of(d)->pool, ceil_div(j.m, COLSUM_COLS), colsum_part, &s);
    }
    return 0;
}

/* ---- heads with their own rows of a matrix ---- */

/* Head h's rows of a weight, as one of panels: where they are, unless they begin within a panel; then in `room`. */
static const char *head_panels(const struct heads_args *a, int64_t h, void *room) {
    const int64_t n0 = h * (a->w.n / a->n_heads) + a->row;
    const struct weight to = {.data = room, .dt = a->w.dt, .n = a->rows, .k = a->w.k};
    if (n0 % TILE == 0) return weight_panel(&a->w, n0);
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t k = 0; k < a->w.k; k++) {
            const int64_t y = cpu_weight_index(&to, i, k), x = cpu_weight_index(&a->w, n0 + i, k);
            if (to.dt == DT_BF16) ((uint16_t *)room)[y] = ((const uint16_t *)a->w.data)[x];
            else ((float *)room)[y] = ((const float *)a->w.data)[x];
        }
    return room;
}

static char *element(struct tensor t, int64_t at) { return (char *)t.data + (size_t)at * dtype_size(t.dt); }

/* A head's sums onto y, rounded: bf16 that is added to. */
static void add_rounded(struct tensor y, int64_t at, const float *sum, int64_t n) {
    for (int64_t t = 0; t < y.dim[0]; t++)
        for (int64_t c = 0; c < n; c++) {
            uint16_t *const to = (uint16_t *)y.data + t * y.dim[1] + at + c;
            *to = f32_to_bf16(bf16_to_f32(*to) + sum[t * n + c]);
        }
}

int cpu_heads_fwd(struct dev *d, const struct heads_args *a) {
    struct cpu *const c = cpu_of(d);
    const int64_t xs = a->x.dim[1] / a->n_heads, ys = a->y.dim[1] / a->n_heads;
    const int64_t n = a->transposed ? a->w.k : a->rows, panel = cpu_panel_elems(a->w.k);
    const size_t copy = (size_t)(ceil_div(a->rows, TILE) * panel) * dtype_size(a->w.dt);
    const bool sums = a->add && a->y.dt == DT_BF16;
    void *room;
    TRY(cpu_scratch(c, CPU_SCRATCH_ROW, copy + (sums ? (size_t)(a->x.dim[0] * n) * sizeof(float) : 0), &room));
    float *const sum = (float *)(void *)((char *)room + copy); /* copy is a multiple of 2 KiB */
    memset(room, 0, copy);
    for (int64_t h = 0; h < a->n_heads; h++) {
        struct gemm_job j = job_of(c, a->transposed ? GEMM_DX : GEMM_FWD, a->x.dt);
        j.m = a->x.dim[0];
        j.n = n;
        j.r = a->transposed ? a->rows : a->w.k;
        j.a = element(a->x, h * xs + a->x_at);
        j.lda = a->x.dim[1];
        j.b = head_panels(a, h, room);
        j.ldb = panel;
        j.out = (struct cpu_gemm_out){.y = element(a->y, h * ys + a->y_at), .ld = a->y.dim[1], .dt = a->y.dt, .add = a->add};
        if (sums) j.out = (struct cpu_gemm_out){.y = sum, .ld = n, .dt = DT_F32};
        TRY(gemm(c, &j));
        if (sums) add_rounded(a->y, h * ys + a->y_at, sum, n);
    }
    return 0;
}

int cpu_heads_dw(struct dev *d, const struct heads_dw_args *a) {
    const int64_t xs = a->x.dim[1] / a->n_heads, ys = a->y.dim[1] / a->n_heads, k = a->dw.dim[1];
    for (int64_t h = 0; h < a->n_heads; h++) {
        float *const dw = (float *)a->dw.data + (h * (a->dw.dim[0] / a->n_heads) + a->row) * k;
        struct gemm_job j = job_of(cpu_of(d), GEMM_DW, a->x.dt);
        j.m = a->rows;
        j.n = k;
        j.r = a->x.dim[0];
        j.a = element(a->x, h * xs + a->x_at);
        j.lda = a->x.dim[1];
        j.b = element(a->y, h * ys + a->y_at);
        j.ldb = a->y.dim[1];
        j.out = (struct cpu_gemm_out){.y = dw, .ld = k, .dt = DT_F32, .add = a->add};
        if (j.r > 0) TRY(gemm(cpu_of(d), &j));
        else memset(dw, 0, (size_t)(a->rows * k) * sizeof *dw);
    }
    return 0;
}
