/* model_case.h - what the tests of src/model share: a golden case of
 * tools/oracle_model.py opened on a backend, a packed batch on the device, and
 * comparisons.  Everything stops at the first failure, by cmocka's asserts. */
#ifndef TESTS_MODEL_CASE_H
#define TESTS_MODEL_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "worst.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "model/files/export.h"
#include "model/files/init.h"
#include "model/files/load.h"
#include "model/files/safetensors.h"
#include "model/forward.h"
#include "model/lora/lora.h"
#include "model/optim/optimizer.h"
#include "model/quantize.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(call)                                                                \
    do {                                                                        \
        if ((call) < 0) fail_msg("%s: %s (%s)", #call, err_msg(), err_trace()); \
    } while (0)

static inline void case_dev(struct dev *d, const char *backend, int threads) {
    if (strcmp(backend, "ref") == 0) OK(dev_open_ref(d));
    else if (strcmp(backend, "cuda") == 0) OK(dev_open_cuda(d, 0));
    else OK(dev_open_cpu(d, threads, NULL));
}
/* False, and says why once, where there is no GPU for "cuda"; the others are everywhere. */
static inline bool case_has(const char *backend) {
    static bool said;
    char why[512];
    if (strcmp(backend, "cuda") != 0 || dev_cuda_present(why, sizeof why)) return true;
    if (!said) print_message("skip: %s\n", why);
    said = true;
    return false;
}

static inline void *case_alloc(struct dev *d, size_t bytes) {
    void *p = NULL;
    OK(dev_alloc(d, bytes, &p));
    return p;
}
/* The same, every byte 0xff: what is read before it is written is NaN. */
static inline void *case_garbage(struct dev *d, size_t bytes) {
    void *p = case_alloc(d, bytes), *host = xmalloc(bytes);
    memset(host, 0xff, bytes);
    OK(dev_copy_in(d, p, host, bytes));
    free(host);
    return p;
}
static inline struct tensor case_ints(struct dev *d, const int32_t *v, int64_t n) {
    void *p = case_alloc(d, (size_t)n * 4);
    OK(dev_copy_in(d, p, v, (size_t)n * 4));
    return tensor_1d(p, DT_I32, n);
}
static inline void case_free(struct dev *d, struct tensor t) { dev_free(d, t.data, (size_t)tensor_count(t) * dtype_size(t.dt)); }

/* ---- packed batches: sequences one after the other, keys in the activations ---- */
struct case_seq {
    const int32_t *ids;
    int64_t n;
};
static inline void case_pack(struct dev *d, struct model_batch *b, const struct case_seq *seqs, int64_t n_seqs) {
    int64_t rows = 0, longest = 0;
    for (int64_t i = 0; i < n_seqs; i++) rows += seqs[i].n;
    int32_t *v = xcalloc((size_t)(3 * rows + 3 * n_seqs + 1), 4);
    int32_t *ids = v, *pos = ids + rows, *slots = pos + rows, *q_start = slots + rows, *pos0 = q_start + n_seqs + 1;
    int64_t r = 0;
    for (int64_t i = 0; i < n_seqs; i++) {
        q_start[i] = (int32_t)r;
        if (seqs[i].n > longest) longest = seqs[i].n;
        for (int64_t t = 0; t < seqs[i].n; t++, r++) {
            ids[r] = seqs[i].ids[t];
            pos[r] = (int32_t)t;
            slots[r] = (int32_t)r;
        }
    }
    q_start[n_seqs] = (int32_t)r;
    *b = (struct model_batch){
        .n_rows = rows,
        .ids = case_ints(d, ids, rows),
        .pos = case_ints(d, pos, rows),
        .slots = case_ints(d, slots, rows),
        .seqs = {.n = n_seqs,
                 .max_q = longest,
                 .max_kv = longest,
                 .q_start = case_ints(d, q_start, n_seqs + 1),
                 .pos0 = case_ints(d, pos0, n_seqs),
                 .kv_start = case_ints(d, q_start, n_seqs)},
    };
    free(v);
}
static inline void case_unpack(struct dev *d, struct model_batch *b) {
    case_free(d, b->ids);
    case_free(d, b->pos);
    case_free(d, b->slots);
    case_free(d, b->seqs.q_start);
    case_free(d, b->seqs.pos0);
    if (b->seqs.kv_start.data) case_free(d, b->seqs.kv_start);
    if (b->seqs.block_table.data) case_free(d, b->seqs.block_table);
}

/* ---- a golden case ---- */
struct model_case {
    struct dev dev;
    struct model *m;
    struct safetensors_file *golden;
    const int32_t *ids, *q_start; /* golden: n_seqs sequences */
    int64_t n_seqs, n_rows;
    struct model_logp_args l; /* golden rows, targets, 1 / temperature; outputs owned here */
    const float *want_logp, *want_entropy, *dlogp, *dentropy;
};

static inline const void *case_data(const struct safetensors_file *f, const char *name, enum dtype dt, int64_t *n) {
    const struct safetensors_tensor *t = safetensors_find(f, name);
    if (!t) fail_msg("the fixture has no %s", name);
    assert_int_equal(t->dt, dt);
    if (n) *n = (int64_t)(t->bytes / dtype_size(dt));
    return t->data;
}

static inline char *case_path(const char *name, const char *file) {
    const char *const other = getenv("VERLC_MODEL_FIXTURES");
    return xasprintf("%s/model/%s%s%s", other ? other : FIXTURES, name, *file ? "/" : "", file);
}

static inline void case_golden(struct model_case *c, const char *name) {
    char *path = case_path(name, "golden.safetensors");
    OK(safetensors_open(&c->golden, path));
    free(path);
    int64_t n;
    c->ids = case_data(c->golden, "ids", DT_I32, &c->n_rows);
    c->q_start = case_data(c->golden, "q_start", DT_I32, &n);
    c->n_seqs = n - 1;
    c->l = (struct model_logp_args){0};
    c->l.row = case_data(c->golden, "row", DT_I32, &c->l.n);
    c->l.target = case_data(c->golden, "target", DT_I32, NULL);
    c->l.inv_temp = case_data(c->golden, "inv_temp", DT_F32, NULL);
    c->want_logp = case_data(c->golden, "logp", DT_F32, NULL);
    c->want_entropy = case_data(c->golden, "entropy", DT_F32, NULL);
    c->dlogp = case_data(c->golden, "dlogp", DT_F32, NULL);
    c->dentropy = case_data(c->golden, "dentropy", DT_F32, NULL);
    c->l.logp = xcalloc((size_t)c->l.n, 4);
    c->l.entropy = xcalloc((size_t)c->l.n, 4);
    c->l.sum_pi_sq = xcalloc((size_t)c->l.n, 4);
}

struct case_args {
    const char *name, *backend;
    int threads;
    enum dtype act;
    int flags;
};
static inline void case_open(struct model_case *c, const struct case_args *a) {
    *c = (struct model_case){0};
    case_dev(&c->dev, a->backend, a->threads);
    char *dir = case_path(a->name, "");
    OK(model_open(&c->m, &c->dev, &(struct model_open_args){.dir = dir, .act = a->act, .flags = a->flags, .max_len = 128}));
    free(dir);
    case_golden(c, a->name);
}
static inline void case_close(struct model_case *c) {
    model_close(c->m);
    if (c->golden) safetensors_close(c->golden);
    assert_int_equal(c->dev.allocated, 0); /* nothing leaked on the device */
    dev_close(&c->dev);
    free(c->l.logp);
    free(c->l.entropy);
    free(c->l.sum_pi_sq);
}
static inline struct case_seq case_seq_at(const struct model_case *c, int64_t i) {
    return (struct case_seq){c->ids + c->q_start[i], c->q_start[i + 1] - c->q_start[i]};
}

/* ---- comparisons ---- */
/* Squared error over squared size: the figure of the golden tests. */
static inline double case_nmse(const float *got, const float *want, int64_t n) {
    double err = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = (double)got[i] - (double)want[i];
        err += e * e;
        size += (double)want[i] * (double)want[i];
    }
    return size > 0 ? err / size : err;
}
/* Largest difference, relative where the value is above 1. */
static inline double case_worst(const float *got, const float *want, int64_t n) {
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        worst = worse_of(worst, fabs((double)got[i] - (double)want[i]) / fmax(1, fabs((double)want[i])));
    }
    return worst;
}
/* Largest error of the tensors' gradients in g beside golden's grad.NAME, relative to the largest entry of each; *nmse: the
 * worst case_nmse of a tensor. */
static inline double case_gradient_error(const struct safetensors_file *golden, const struct model_param *params, int64_t n_params,
                                         const float *g, double *nmse) {
    double worst = 0;
    *nmse = 0;
    for (int64_t i = 0; i < n_params; i++) {
        const struct model_param *p = &params[i];
        char key[128];
        int64_t n;
        snprintf(key, sizeof key, "grad.%s", p->name);
        const float *want = case_data(golden, key, DT_F32, &n);
        assert_int_equal(n, p->rows * p->cols);
        double size = 0, diff = 0;
        for (int64_t k = 0; k < n; k++) {
            size = fmax(size, fabs((double)want[k]));
            diff = worse_of(diff, fabs((double)g[p->offset + k] - (double)want[k]));
        }
        if (size == 0 && strstr(p->name, ".experts.")) { /* that no token has chosen */
            assert_true(diff == 0);
            continue;
        }
        assert_true(size > 0);
        worst = worse_of(worst, diff / size);
        *nmse = worse_of(*nmse, case_nmse(g + p->offset, want, n));
    }
    return worst;
}

static inline char *case_temp_dir(void) {
    char *dir = xstrdup("/tmp/verlc_model_XXXXXX");
    assert_non_null(mkdtemp(dir));
    return dir;
}
static inline void case_drop_dir(char *dir) {
    OK(file_remove_tree(dir));
    free(dir);
}
static inline void case_copy(const char *from, const char *dir, const char *name) {
    struct buf b = {0};
    char *to = file_join(dir, name);
    OK(file_read(&b, from, 0));
    OK(file_write_atomic(to, b.p, b.n));
    free(to);
    buf_free(&b);
}

#endif
