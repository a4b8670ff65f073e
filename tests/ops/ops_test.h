/* ops_test.h - the harness of the ops rung: backends under test, named inputs
 * and results, and comparisons.
 *
 * An op of ops_table.h is described once by setup, fwd and bwd.  setup draws
 * the inputs; fwd and bwd upload them to a device, call the dev_* wrappers and
 * keep what comes back.  The programs then ask different questions of the same
 * description: agreement with ref (test_device_ops), finite differences
 * (test_device_grad), independence of rows and threads (test_device_batch_invariant).
 * Invariant: inputs depend on the op and the shape alone, so two runs differ
 * only in the device, the rows taken and the place of the buffers.
 *
 * VERLC_TEST_BACKENDS="cuda" (cpu/avx2, cuda ...) runs these beside ref alone.
 * VERLC_TEST_SHORT=1 takes a few shapes of each op, for tools that make a GPU some hundred times slower.
 * VERLC_OPS_NO_SKIP=1 turns an op that a backend lacks from a printed skip into
 * a failure. */
#ifndef VERLC_OPS_TEST_H
#define VERLC_OPS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"
#include "device/device.h"
#include "normals.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(a) ((int64_t)(sizeof(a) / sizeof((a)[0])))

/* A sanitizer looks at accesses, not at bits: what only compares bits of the same accesses again is left to the other builds. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* ---- backends ---- */

enum { MAX_BACKENDS = 7 };
struct backends { /* dev[0] is ref */
    struct dev dev[MAX_BACKENDS];
    char name[MAX_BACKENDS][32];
    int n;
};

/* Whether a backend's name, or what stands before its '/', is in VERLC_TEST_BACKENDS; all are when that is not set. */
static inline bool backend_wanted(const char *name) {
    const char *list = getenv("VERLC_TEST_BACKENDS");
    const size_t whole = strlen(name), kind = strcspn(name, "/");
    for (const char *at = list; at && *at; at += strspn(at, ", ")) {
        const size_t n = strcspn(at, ", ");
        if ((n == whole || n == kind) && strncmp(at, name, n) == 0) return true;
        at += n;
    }
    return list == NULL;
}

static inline void backends_open(struct backends *b, int n_threads) {
    static const char *const isa[] = {"amx", "avx512bf16", "avx512", "avx2", "c"};
    *b = (struct backends){.n = 1};
    if (dev_open_ref(&b->dev[0]) < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
    snprintf(b->name[0], sizeof b->name[0], "ref");
#ifdef __SANITIZE_THREAD__
    const int most = 2; /* threads are used alike with every instruction set: one is enough, and slow enough */
#else
    const int most = MAX_BACKENDS;
#endif
    for (int64_t i = 0; i < COUNT(isa) && b->n < most; i++) {
        char name[32];
        snprintf(name, sizeof name, "cpu/%s", isa[i]);
        if (!backend_wanted(name)) continue;
        const int rc = dev_open_cpu(&b->dev[b->n], n_threads, isa[i]);
        if (rc == ERR_UNSUPPORTED) print_message("skip: %s: %s\n", name, err_msg());
        else if (rc < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
        else snprintf(b->name[b->n++], sizeof b->name[0], "%s", name);
    }
    char why[512];
    if (!backend_wanted("cuda")) return;
    if (!dev_cuda_present(why, sizeof why)) print_message("skip: %s\n", why);
    else if (dev_open_cuda(&b->dev[b->n], 0) < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
    else snprintf(b->name[b->n++], sizeof b->name[0], "cuda");
}
static inline void backends_close(struct backends *b) {
    for (int i = 0; i < b->n; i++) dev_close(&b->dev[i]);
}
static inline bool test_short(void) {
    const char *s = getenv("VERLC_TEST_SHORT");
    return s && strcmp(s, "0") != 0;
}
/* How many of n cases to run: all, or the first few with VERLC_TEST_SHORT. */
static inline int64_t cases_of(int64_t n, int64_t few) { return test_short() && n > few ? few : n; }
static inline bool skip_fails(void) {
    const char *s = getenv("VERLC_OPS_NO_SKIP");
    return s && strcmp(s, "0") != 0;
}
/* Says that a backend lacks an op; fails where skips are not allowed. */
static inline void report_skip(const char *backend, const char *what) {
    print_message("skip: %s: %s: %s\n", backend, what, err_msg());
    if (skip_fails()) fail_msg("%s lacks %s", backend, what);
}

/* ---- one run of one op ---- */

/* How far a backend's result may be from ref's. */
enum tol {
    TOL_EXACT, /* moves and casts: no arithmetic, equal bits */
    TOL_SUM,   /* f32 sums in another order or width than ref's, rounded once */
    TOL_INNER, /* the backend may round an intermediate (p, dz) to act as a matmul input */
};

/* A named host array. Values are kept as f32 (bf16 converts exactly) or i32. */
struct slot {
    const char *name;
    enum dtype dt;
    int nd;
    int64_t dim[4];
    bool per_row; /* dim[0] runs over rows */
    enum tol tol; /* of results */
    int in;       /* of gradients: the input they belong to */
    bool acc;     /* of results: += (up_acc) */
    double floor; /* of results: errors are relative to at least this root mean square */
    float *f;     /* owned unless the run is a slice */
    int32_t *i;
};

/* Shape and variant of one case; an op reads the members it needs. */
enum shape_flags {
    S_BIAS = 1,       /* matmul: with bias */
    S_ADD = 2,        /* matmul: add to an f32 result */
    S_F32 = 4,        /* f32 result, or f32 dy, although act may be bf16 */
    S_NORM = 8,       /* qkv: with head norms */
    S_ENTROPY = 16,   /* lmhead: with entropy */
    S_PARTIAL = 32,   /* qkv: RoPE of half of a head */
    S_PAIRS = 64,     /* qkv: RoPE of neighbours */
    S_SOFTCAP = 128,  /* attention, head: under a softcap */
    S_ONE_PLUS = 256, /* qkv: head norms of that kind */
    S_LATENT = 512,   /* attention: values are the keys */
};
struct op_shape {
    int64_t rows, n, k;
    int64_t hq, hk, dim, window;
    int64_t lens[6]; /* attention: lengths of the packed sequences, their sum is rows */
    int flags;
};

enum { MAX_SLOTS = 8, MAX_BLOCKS = 48 };
struct run {
    struct dev *d;
    enum dtype act;
    const struct op_shape *s;
    int64_t rows;
    int64_t pad;     /* rows of garbage in front of every per-row buffer on the device */
    bool accumulate; /* += results start from random values instead of zero */
    bool slice;      /* inputs are borrowed */
    struct slot in[MAX_SLOTS], out[MAX_SLOTS], gout[MAX_SLOTS], gin[MAX_SLOTS];
    int n_in, n_out, n_gout, n_gin;
    struct {
        void *p;
        size_t bytes;
    } block[MAX_BLOCKS];
    int n_block;
    const void *acc[MAX_SLOTS]; /* += results of this execution */
    int n_acc;
};

struct op_def {
    const char *name;
    void (*setup)(struct run *r);
    int (*fwd)(struct run *r);
    int (*bwd)(struct run *r); /* NULL: none */
    const struct op_shape *shapes;
    int64_t n_shapes;
    bool row_op; /* per-row results depend on that row alone */
};

static inline struct tensor slot_shape(const struct slot *s) {
    struct tensor t = {NULL, s->dt, s->nd, {s->dim[0], s->dim[1], s->dim[2], s->dim[3]}};
    return t;
}
static inline int64_t slot_count(const struct slot *s) { return tensor_count(slot_shape(s)); }

/* ---- inputs (called by setup) ---- */

static inline struct slot *slot_new(struct slot *list, int *n, const char *name, struct tensor shape, bool per_row) {
    CHECK(*n < MAX_SLOTS);
    struct slot *s = &list[(*n)++];
    *s = (struct slot){.name = name, .dt = shape.dt, .nd = shape.nd, .per_row = per_row};
    memcpy(s->dim, shape.dim, sizeof s->dim);
    return s;
}
/* Normal values times scale plus mean, rounded to the dtype; seeded by the name. */
static inline void slot_fill(struct slot *s, float scale, float mean) {
    uint64_t seed = 7;
    for (const char *c = s->name; *c; c++) seed = seed * 131 + (uint64_t)*c;
    const int64_t n = slot_count(s);
    const float *drawn = normals(seed, n);
    s->f = xcalloc((size_t)n, sizeof *s->f);
    for (int64_t i = 0; i < n; i++) {
        const float v = drawn[i] * scale + mean;
        s->f[i] = s->dt == DT_BF16 ? bf16_to_f32(f32_to_bf16(v)) : v;
    }
}
static inline void add_in(struct run *r, const char *name, struct tensor shape, bool per_row, float scale, float mean) {
    slot_fill(slot_new(r->in, &r->n_in, name, shape, per_row), scale, mean);
}
static inline void add_gout(struct run *r, const char *name, struct tensor shape, bool per_row) {
    slot_fill(slot_new(r->gout, &r->n_gout, name, shape, per_row), 1, 0);
}
/* (rows) i32 in [0, limit). distinct: a permutation's head, limit >= rows. */
static inline void add_ids(struct run *r, const char *name, int64_t limit, bool distinct) {
    struct rng g = {.seed = 11, .stream = RNG_TEST};
    struct slot *s = slot_new(r->in, &r->n_in, name, tensor_1d(NULL, DT_I32, r->rows), true);
    int64_t *perm = xcalloc((size_t)limit, sizeof *perm);
    s->i = xcalloc((size_t)r->rows, sizeof *s->i);
    for (int64_t i = 0; i < limit; i++) perm[i] = i;
    rng_shuffle(&g, perm, limit);
    for (int64_t i = 0; i < r->rows; i++) s->i[i] = (int32_t)(distinct ? perm[i] : (int64_t)rng_below(&g, (uint64_t)limit));
    free(perm);
}
static inline struct tensor shape_1d(enum dtype dt, int64_t n) { return tensor_1d(NULL, dt, n); }
static inline struct tensor shape_2d(enum dtype dt, int64_t r, int64_t c) { return tensor_2d(NULL, dt, r, c); }
static inline struct tensor shape_4d(enum dtype dt, int64_t a, int64_t b, int64_t c, int64_t e) {
    struct tensor t = {NULL, dt, 4, {a, b, c, e}};
    return t;
}

/* ---- device buffers (called by fwd and bwd). Out of memory is a CHECK. ---- */

static inline void *run_block(struct run *r, size_t bytes) {
    CHECK(r->n_block < MAX_BLOCKS);
    void *p = NULL;
    if (dev_alloc(r->d, bytes, &p) < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
    r->block[r->n_block].p = p;
    r->block[r->n_block++].bytes = bytes;
    return p;
}
static inline void run_copy_in(struct run *r, void *dst, const void *src, size_t bytes) {
    if (dev_copy_in(r->d, dst, src, bytes) < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
}
/* A buffer of this shape, every byte 0xff: what is read before it is written is NaN or -1. */
static inline struct tensor dev_new(struct run *r, struct tensor shape, bool per_row) {
    const size_t bytes = (size_t)tensor_count(shape) * dtype_size(shape.dt);
    const int64_t pad = per_row ? r->pad : 0;
    const size_t off = pad && shape.dim[0] ? (size_t)pad * (bytes / (size_t)shape.dim[0]) : 0;
    char *host = xmalloc(off + bytes);
    memset(host, 0xff, off + bytes);
    shape.data = (char *)run_block(r, off + bytes) + off;
    run_copy_in(r, (char *)shape.data - off, host, off + bytes);
    free(host);
    return shape;
}
static inline struct tensor up_values(struct run *r, struct tensor shape, bool per_row, const float *f, const int32_t *ids) {
    struct tensor t = dev_new(r, shape, per_row);
    const int64_t n = tensor_count(t);
    void *host = xmalloc((size_t)n * dtype_size(t.dt));
    for (int64_t i = 0; i < n; i++) {
        if (ids) ((int32_t *)host)[i] = ids[i];
        else if (t.dt == DT_BF16) ((uint16_t *)host)[i] = f32_to_bf16(f[i]);
        else ((float *)host)[i] = f[i];
    }
    run_copy_in(r, t.data, host, (size_t)n * dtype_size(t.dt));
    free(host);
    return t;
}
static inline struct tensor up(struct run *r, const struct slot *s) { return up_values(r, slot_shape(s), s->per_row, s->f, s->i); }
static inline struct tensor up_i32(struct run *r, struct tensor shape, const int32_t *v) {
    return up_values(r, shape, false, NULL, v);
}
/* A += result: zero, or (accumulate) random values, small beside the sum. */
static inline struct tensor up_acc(struct run *r, struct tensor shape, bool per_row) {
    struct slot s = {.name = "acc", .dt = shape.dt, .nd = shape.nd, .per_row = per_row};
    memcpy(s.dim, shape.dim, sizeof s.dim);
    slot_fill(&s, r->accumulate ? 0.1f : 0, 0);
    const struct tensor t = up(r, &s);
    free(s.f);
    CHECK(r->n_acc < MAX_SLOTS);
    r->acc[r->n_acc++] = t.data;
    return t;
}
static inline bool is_acc(const struct run *r, struct tensor t) {
    for (int i = 0; i < r->n_acc; i++)
        if (r->acc[i] == t.data) return true;
    return false;
}
/* Packs input s, a matrix (n, k), in the backend's layout. */
static inline int up_weight(struct run *r, const struct slot *s, struct weight *w) {
    const size_t bytes = dev_weight_bytes(r->d, r->act, s->dim[0], s->dim[1]);
    *w = (struct weight){run_block(r, bytes), r->act, s->dim[0], s->dim[1], 0, 0};
    return dev_weight_pack(r->d, *w, up(r, s));
}
static inline void run_free_blocks(struct run *r) {
    for (int i = 0; i < r->n_block; i++) dev_free(r->d, r->block[i].p, r->block[i].bytes);
    r->n_block = r->n_acc = 0;
}

/* ---- results (called by fwd and bwd) ---- */

/* Host values of t as f32. The caller frees. */
static inline float *down_values(struct run *r, struct tensor t) {
    const int64_t n = tensor_count(t);
    void *host = xmalloc((size_t)n * dtype_size(t.dt));
    float *f = xcalloc((size_t)n, sizeof *f);
    if (dev_copy_out(r->d, host, t.data, (size_t)n * dtype_size(t.dt)) < 0) err_check_failed(err_msg(), __FILE__, __LINE__);
    for (int64_t i = 0; i < n; i++) {
        if (t.dt == DT_BF16) f[i] = bf16_to_f32(((uint16_t *)host)[i]);
        else if (t.dt == DT_I32) f[i] = (float)((int32_t *)host)[i];
        else f[i] = ((float *)host)[i];
    }
    free(host);
    return f;
}
static inline struct slot *down(struct run *r, const char *name, struct tensor t, bool per_row, enum tol tol) {
    struct slot *s = slot_new(r->out, &r->n_out, name, t, per_row);
    s->tol = tol;
    s->acc = is_acc(r, t);
    s->f = down_values(r, t);
    return s;
}
static inline struct slot *down_grad(struct run *r, int in, struct tensor t, enum tol tol) {
    struct slot *s = slot_new(r->gin, &r->n_gin, r->in[in].name, t, r->in[in].per_row);
    s->in = in;
    s->tol = tol;
    s->acc = is_acc(r, t);
    s->f = down_values(r, t);
    return s;
}

static inline void slots_free(struct slot *s, int *n) {
    for (int i = 0; i < *n; i++) {
        free(s[i].f);
        free(s[i].i);
    }
    *n = 0;
}
static inline void run_free_results(struct run *r) {
    run_free_blocks(r);
    slots_free(r->out, &r->n_out);
    slots_free(r->gin, &r->n_gin);
}
static inline void run_free(struct run *r) {
    run_free_results(r);
    if (r->slice) return;
    slots_free(r->in, &r->n_in);
    slots_free(r->gout, &r->n_gout);
}
static inline void run_init(struct run *r, const struct op_def *op, const struct op_shape *s, enum dtype act, struct dev *d) {
    *r = (struct run){.d = d, .act = act, .s = s, .rows = s->rows};
    op->setup(r);
}
/* Forward and, where there is one, backward. */
static inline int run_exec(struct run *r, const struct op_def *op) {
    run_free_results(r);
    int rc = op->fwd(r);
    if (rc == 0 && op->bwd) rc = op->bwd(r);
    run_free_blocks(r);
    return rc;
}

/* ---- comparisons ---- */

/* sum (got - want)^2 / max(sum want^2, n floor^2); infinite where one is finite and the other is not. */
static inline double nmse(const float *got, const float *want, int64_t n, double floor) {
    double num = 0, den = 0, least = (double)n * floor * floor;
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(want[i]) != isfinite(got[i])) return INFINITY;
        if (!isfinite(want[i])) continue;
        const double e = (double)got[i] - want[i];
        num += e * e;
        den += (double)want[i] * want[i];
    }
    return num == 0 ? 0 : num / fmax(fmax(den, least), 1e-300);
}
/* The largest NMSE that a result may have. */
static inline double tol_limit(enum tol tol, enum dtype act, enum dtype result) {
    switch (tol) {
    case TOL_EXACT: return 0;
    /* f32: a sum of k terms errs by 2e-8 sqrt(k) relative, 1.4e-6 at k = 5000, squared 2e-12.
     * bf16: both round values that agree to 1e-6, so of 1000 elements about one falls on the other
     * side of a tie and differs by 2^-8: 1.5e-5 / 1000. */
    case TOL_SUM: return result == DT_BF16 ? 1e-6 : 1e-11;
    /* bf16: an intermediate and the result each err by at most 2^-9, in the mean square 1.3e-6; where
     * large terms cancel (the target's row of W against the mean of all rows) several times that. */
    case TOL_INNER: return act == DT_BF16 ? 3e-5 : 1e-11;
    }
    return 0;
}
/* First index where bits differ, -1 if none. */
static inline int64_t first_diff(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof a[i]) != 0) return i;
    return -1;
}

#endif
