/* ref.c - the ref backend: plain C, one thread, the definition of every op.
 *
 * Here: the device itself, row moves, the optimizer, and the table.  The layer,
 * attention and head ops are in layer.c, attention.c and
 * lm_head.c, each forward with its backward.
 * Invariant: clarity over speed.  Weights are plain row-major, one result
 * element is one loop in ascending order, and nothing depends on how many rows
 * a call has. */
#include "device/adaptive.h"
#include "device/host_decode.h"
#include "device/ref/ref_int.h"

#include "base/thread_pool.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- memory: host memory, no queue ---- */

enum { ALIGN = 256 };

static void ref_close(struct dev *d) { (void)d; }

static int ref_alloc(struct dev *d, size_t bytes, void **out) {
    (void)d;
    if (bytes > SIZE_MAX - ALIGN) return ERR_NOMEM; /* the wrapper words the message */
    void *p = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
    if (p == NULL) return ERR_NOMEM;
    *out = p;
    return 0;
}
static void ref_free(struct dev *d, void *p, size_t bytes) {
    (void)d, (void)bytes;
    free(p);
}
static int ref_sync(struct dev *d) {
    (void)d;
    return 0;
}
static int ref_copy(struct dev *d, void *dst, const void *src, size_t bytes) {
    (void)d;
    memmove(dst, src, bytes);
    return 0;
}
static int ref_zero(struct dev *d, void *dst, size_t bytes) {
    (void)d;
    memset(dst, 0, bytes);
    return 0;
}

/* ---- casts, weights, rows ---- */

int ref_cast(struct dev *d, struct tensor dst, struct tensor src) {
    (void)d;
    const int64_t n = tensor_count(src);
    if (dst.dt == src.dt) memmove(dst.data, src.data, (size_t)n * dtype_size(src.dt));
    else
        for (int64_t i = 0; i < n; i++) ref_put(dst.data, dst.dt, i, ref_at(src, i));
    return 0;
}

static size_t ref_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k) {
    (void)d;
    return (size_t)(n * k) * dtype_size(dt);
}
int ref_weight_pack(struct dev *d, struct weight w, struct tensor src) {
    return ref_cast(d, tensor_2d(w.data, w.dt, w.n, w.k), src);
}
int ref_weight_unpack(struct dev *d, struct tensor dst, struct weight w) {
    return ref_cast(d, dst, tensor_2d(w.data, w.dt, w.n, w.k));
}

int ref_embed_fwd(struct dev *d, struct tensor x, struct tensor ids, struct weight w) {
    (void)d;
    for (int64_t t = 0; t < ids.dim[0]; t++) {
        const int64_t id = ref_index(ids, t, w.n);
        for (int64_t c = 0; c < w.k; c++) ref_f32(x)[t * w.k + c] = ref_w(w, id, c);
    }
    return 0;
}
int ref_embed_bwd(struct dev *d, struct tensor dw, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    (void)d;
    const int64_t h = dx.dim[1], rows = ids.dim[0], hi = lo + dw.dim[0];
    for (int64_t t = 0; t < rows; t++) {
        const int64_t id = ref_index(ids, t, vocab);
        bool first = true;
        for (int64_t u = 0; u < t && first; u++) first = ref_index(ids, u, vocab) != id;
        for (int64_t e = id * h; first && e < (id + 1) * h; e++) {
            float sum = 0;
            for (int64_t u = t; u < rows; u++)
                if (ref_index(ids, u, vocab) == id) sum += ref_f32(dx)[u * h + e - id * h];
            if (e >= lo && e < hi) ref_f32(dw)[e - lo] += sum;
        }
    }
    return 0;
}

int ref_gather_rows(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    (void)d;
    const size_t row = (size_t)src.dim[1] * dtype_size(src.dt);
    for (int64_t r = 0; r < idx.dim[0]; r++) {
        const size_t from = (size_t)ref_index(idx, r, src.dim[0]);
        memcpy((char *)dst.data + (size_t)r * row, (const char *)src.data + from * row, row);
    }
    return 0;
}
int ref_scale_rows(struct dev *d, struct tensor x, struct tensor factor, struct tensor pos) {
    (void)d;
    const int64_t n = x.dim[1];
    for (int64_t t = 0; t < x.dim[0]; t++) {
        const float by = ref_f32(factor)[ref_index(pos, t, factor.dim[0])];
        for (int64_t c = 0; c < n; c++) ref_put(x.data, x.dt, t * n + c, ref_at(x, t * n + c) * by);
    }
    return 0;
}

int ref_join_columns(struct dev *d, const struct join_columns_args *a) {
    (void)d;
    const int64_t rows = a->y.dim[0], width = a->y.dim[1];
    for (int i = 0; i < a->n; i++) {
        const int64_t n = a->cut[i + 1] - a->cut[i];
        for (int64_t t = 0; t < rows; t++)
            for (int64_t c = 0; c < n; c++) {
                const int64_t to = t * width + a->cut[i] + c;
                const float x = ref_at(a->x, rows * a->cut[i] + t * n + c);
                ref_put(a->y.data, a->y.dt, to, a->from.data ? ref_f32(a->from)[to] + x : x);
            }
    }
    return 0;
}

int ref_copy_columns(struct dev *d, const struct copy_columns_args *a) {
    const size_t unit = dtype_size(a->y.dt);
    (void)d;
    for (int64_t t = 0; t < a->y.dim[0]; t++)
        memcpy((char *)a->y.data + (size_t)(t * a->y.dim[1] + a->y_at) * unit,
               (const char *)a->x.data + (size_t)(t * a->x.dim[1] + a->x_at) * unit, (size_t)a->n * unit);
    return 0;
}

int ref_copy_rows(struct dev *d, const struct copy_rows_args *a) {
    const size_t bytes = (size_t)a->x.dim[1] * dtype_size(a->x.dt);
    char *const x = a->x.data;
    (void)d;
    for (int64_t i = 0; i < a->n; i++) memcpy(x + (size_t)a->to[i] * bytes, x + (size_t)a->from[i] * bytes, bytes);
    return 0;
}

int ref_scatter_rows_add(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    (void)d;
    const int64_t n = dst.dim[1];
    for (int64_t r = 0; r < idx.dim[0]; r++) {
        const int64_t to = ref_index(idx, r, dst.dim[0]);
        for (int64_t c = 0; c < n; c++) ref_f32(dst)[to * n + c] += ref_at(src, r * n + c);
    }
    return 0;
}

/* ---- optimizer ---- */

int ref_checksum(struct dev *d, struct tensor sum, struct tensor bytes) {
    uint64_t s = 0;
    (void)d;
    for (int64_t i = 0; i < bytes.dim[0]; i += 8) {
        uint64_t w = 0;
        for (int64_t k = 0; k < 8 && i + k < bytes.dim[0]; k++) w |= (uint64_t)((const uint8_t *)bytes.data)[i + k] << (8 * k);
        s += dev_checksum_word(w, i / 8);
    }
    *(uint64_t *)sum.data = s;
    return 0;
}

int ref_sumsq(struct dev *d, struct tensor sums, struct tensor x, struct tensor segments, int64_t base) {
    (void)d;
    const int64_t *seg = segments.data;
    for (int64_t s = 0; s < segments.dim[0]; s++) {
        const int64_t at = seg[2 * s] - base, n = seg[2 * s + 1];
        CHECK(at >= 0 && n >= 1 && n <= DEV_SEGMENT && at + n <= x.dim[0]);
        double sum = 0; /* f32 squares cannot overflow it, so only Inf gives Inf and NaN gives NaN */
        for (int64_t i = at; i < at + n; i++) sum += (double)ref_f32(x)[i] * ref_f32(x)[i];
        ((double *)sums.data)[s] = sum;
    }
    return 0;
}

int ref_fold(struct dev *d, struct tensor y, const struct tensor *x, int n, bool add) {
    (void)d;
    for (int64_t i = 0; i < tensor_count(y); i++) {
        float sum = add ? ref_f32(y)[i] + ref_f32(x[0])[i] : ref_f32(x[0])[i];
        for (int k = 1; k < n; k++) sum += ref_f32(x[k])[i];
        ref_f32(y)[i] = sum;
    }
    return 0;
}

/* Loshchilov & Hutter (2019), in torch.optim.AdamW's order of f32 operations:
 * scalars are formed in double and rounded once. */
int ref_adamw(struct dev *d, const struct adamw_args *a) {
    (void)d;
    const double t = (double)a->step;
    const float keep = (float)(1.0 - a->lr * a->weight_decay);
    const float one_b1 = (float)(1.0 - a->beta1), b2 = (float)a->beta2;
    const float one_b2 = (float)(1.0 - a->beta2), eps = (float)a->eps;
    const float step_size = (float)(a->lr / (1.0 - pow(a->beta1, t)));
    const float root_bias2 = (float)sqrt(1.0 - pow(a->beta2, t));
    float *p = a->p.data, *m = a->m.data, *v = a->v.data;
    const float *grad = a->g.data;
    for (int64_t i = 0; i < a->p.dim[0]; i++) {
        const float g = grad[i] * a->grad_scale;
        m[i] += one_b1 * (g - m[i]);
        v[i] = v[i] * b2 + one_b2 * g * g;
        p[i] = p[i] * keep - step_size * m[i] / (sqrtf(v[i]) / root_bias2 + eps);
    }
    return 0;
}

/* Element i of an array that may not be kept. */
static float *element(struct tensor t, int64_t i) { return t.data ? ref_f32(t) + i : NULL; }

/* Element i of the adaptive op. */
static void adaptive_one(const struct adaptive_args *a, const struct adaptive_scalars *s, int64_t i) {
    float *const p = element(a->p, i), *const m = element(a->m, i), *const v = element(a->v, i), *const x = element(a->x, i);
    float g = ref_f32(a->g)[i] * s->scale + s->couple * *p;
    *p *= s->keep;
    *v = *v * s->b2 + s->one_b2 * g * g;
    if (a->rule == ADAPTIVE_RMSPROP) {
        if (x) *x += s->one_b1 * (g - *x);
        const float spread = x ? fmaxf(*v - *x * *x, 0) : *v; /* rounding may leave less than nothing */
        g /= sqrtf(spread) + s->eps;
        if (m) g = *m = *m * s->b1 + g;
        *p -= s->step_size * g;
        return;
    }
    *m += s->one_b1 * (g - *m);
    if (a->rule == ADAPTIVE_RADAM) {
        const float by = s->rectify > 0 ? s->rectify / (sqrtf(*v) + s->eps) : 1;
        *p -= s->step_size * *m * by;
        return;
    }
    const float top = x ? (*x = fmaxf(*x, *v)) : *v;
    *p -= s->step_size * *m / (sqrtf(top) / s->root_bias2 + s->eps);
}

int ref_adaptive(struct dev *d, const struct adaptive_args *a) {
    const struct adaptive_scalars s = adaptive_scalars_of(a);
    (void)d;
    for (int64_t i = 0; i < a->p.dim[0]; i++) adaptive_one(a, &s, i);
    return 0;
}

int ref_axpby(struct dev *d, struct tensor y, float a, struct tensor x, float b) {
    (void)d;
    float *to = y.data;
    const float *from = x.data;
    for (int64_t i = 0; i < tensor_count(y); i++) to[i] = b == 0 ? a * from[i] : a * from[i] + b * to[i];
    return 0;
}

/* ---- 8 bits ---- */

/* The number of midpoints between neighbours of the book below v. */
static uint8_t nearest_code(const float *book, float v) {
    int code = 0;
    while (code < 255 && 0.5f * (book[code] + book[code + 1]) < v) code++;
    return (uint8_t)code;
}

int ref_quant8(struct dev *d, const struct quant8_args *a) {
    const float *x = a->x.data;
    float *scale = a->scale.data;
    uint8_t *code = a->code.data;
    (void)d;
    for (int64_t b = 0, n = a->x.dim[0]; b < a->scale.dim[0]; b++) {
        const int64_t lo = b * DEV_QUANT_BLOCK, hi = lo + DEV_QUANT_BLOCK < n ? lo + DEV_QUANT_BLOCK : n;
        scale[b] = 0;
        for (int64_t i = lo; i < hi; i++) scale[b] = fmaxf(scale[b], fabsf(x[i]));
        for (int64_t i = lo; i < hi; i++) code[i] = nearest_code(a->book.data, scale[b] > 0 ? x[i] / scale[b] : 0);
    }
    return 0;
}

int ref_dequant8(struct dev *d, const struct quant8_args *a) {
    float *x = a->x.data;
    const float *scale = a->scale.data, *book = a->book.data;
    const uint8_t *code = a->code.data;
    (void)d;
    for (int64_t i = 0; i < a->x.dim[0]; i++) x[i] = book[code[i]] * scale[i / DEV_QUANT_BLOCK];
    return 0;
}

/* ---- LoRA and dequantization ---- */

int ref_add_block(struct dev *d, const struct add_block_args *a) {
    (void)d;
    for (int64_t n = 0; n < a->count; n++)
        for (int64_t i = 0; i < a->rows; i++)
            for (int64_t j = 0; j < a->cols; j++)
                ref_f32(a->dst)[n * a->dst_next + (a->dst_row + i) * a->dst.dim[1] + a->dst_col + j] +=
                    a->scale * ref_f32(a->src)[n * a->src_next + (a->src_row + i) * a->src.dim[1] + a->src_col + j];
    return 0;
}

int ref_dequant(struct dev *d, const struct dequant_args *a) {
    const uint8_t *code = a->code.data;
    (void)d;
    for (int64_t i = 0; i < tensor_count(a->w); i++) {
        const float v = a->kind == QUANT_NF4
                            ? dev_nf4_book[i % 2 ? code[i / 2] & 15 : code[i / 2] >> 4] * ref_f32(a->scale)[i / DEV_NF4_BLOCK]
                            : (float)(int8_t)code[i] * ref_f32(a->scale)[i / a->w.dim[1]] / 127.0f;
        ref_put(a->w.data, a->w.dt, i, v);
    }
    return 0;
}

/* ---- the table ---- */

static bool ref_keeps_logits(struct dev *d, struct weight w) {
    (void)d, (void)w;
    return true;
}

static const struct dev_ops ref_ops = {
    .name = "ref",
    .caps = {.plain_weights = true},
    .close = ref_close,
    .alloc = ref_alloc,
    .free = ref_free,
    .sync = ref_sync,
    .copy_in = ref_copy,
    .copy_out = ref_copy,
    .copy = ref_copy,
    .zero = ref_zero,
    .weight_bytes = ref_weight_bytes,
    .keeps_logits = ref_keeps_logits,
    .decode_next = host_decode_next,
#define OP(name, ...) .name = ref_##name,
#include "device/ops.def"
};

int dev_open_ref(struct dev *d) {
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    *d = (struct dev){.ops = &ref_ops};
    if (pages > 0 && page > 0) d->mem_total = (size_t)pages * (size_t)page;
    snprintf(d->isa, sizeof d->isa, "ref");
    snprintf(d->describe, sizeof d->describe, "ref: 1 thread, plain C");
    pool_set_fp_mode(); /* denormals as on every other backend */
    return 0;
}
