/* checks_int.h - what the checked calls say of tensors: dtypes, shapes, data; for device.c and delta_net.c.
 * Invariant: every check of a tensor ends in `want`, whose message shows both shapes. */
#ifndef VERLC_DEVICE_CHECKS_INT_H
#define VERLC_DEVICE_CHECKS_INT_H

#include "base/err.h"
#include "device/device.h"

#include <stdio.h>

enum { /* sets of dtypes */
       F32 = 1 << DT_F32,
       BF16 = 1 << DT_BF16,
       ACT = F32 | BF16,
       F64 = 1 << DT_F64,
       I32 = 1 << DT_I32,
       I64 = 1 << DT_I64,
       U8 = 1 << DT_U8,
};
#define ANY (-1) /* a dimension that may be anything */

/* The set with one dtype: "the same act as x" is set_of(x.dt). */
static inline unsigned set_of(enum dtype dt) { return 1u << dt; }

/* "4, any, 64" for messages. */
static inline const char *shape_text(char out[128], int nd, const int64_t *dim) {
    size_t n = 0;
    out[0] = '\0';
    for (int i = 0; i < nd && i < 4 && n < 100; i++) {
        if (dim[i] == ANY) n += (size_t)snprintf(out + n, 128 - n, "%sany", i ? ", " : "");
        else n += (size_t)snprintf(out + n, 128 - n, "%s%lld", i ? ", " : "", (long long)dim[i]);
    }
    return out;
}

/* Tensor `arg` of `op` must have one of these dtypes, exactly this shape, and data unless it has no
 * element. Every check of a tensor ends here; the message shows both shapes. */
static inline int want(const char *op, const char *arg, struct tensor t, unsigned dts, int nd, const int64_t *dim) {
    char have[128], need[128], types[64] = "";
    bool fits = t.nd == nd && (dts & set_of(t.dt)) != 0;
    for (int i = 0; fits && i < nd; i++) fits = t.dim[i] >= 0 && (dim[i] == ANY || t.dim[i] == dim[i]);
    if (!fits) {
        for (int dt = DT_F32, n = 0; dt <= DT_U8; dt++)
            if (dts & set_of((enum dtype)dt))
                n += snprintf(types + n, sizeof types - (size_t)n, "%s%s", n ? "|" : "", dtype_name((enum dtype)dt));
        FAIL(ERR_INVAL, "dev op %s: %s is %s (%s), expected %s (%s)", op, arg, dtype_name(t.dt), shape_text(have, t.nd, t.dim),
             types, shape_text(need, nd, dim));
    }
    if (t.data == NULL && tensor_count(t) > 0) FAIL(ERR_INVAL, "dev op %s: %s is not given", op, arg);
    return 0;
}
static inline int want1(const char *op, const char *arg, struct tensor t, unsigned dts, int64_t n) {
    return want(op, arg, t, dts, 1, &n);
}
static inline int want2(const char *op, const char *arg, struct tensor t, unsigned dts, int64_t r, int64_t c) {
    return want(op, arg, t, dts, 2, (const int64_t[]){r, c});
}
static inline int want_like(const char *op, const char *arg, struct tensor t, unsigned dts, struct tensor like) {
    return want(op, arg, t, dts, like.nd, like.dim);
}
/* n, k: the shape that the op needs, ANY where it is free. */
static inline int want_weight(const char *op, struct weight w, unsigned dts, int64_t n, int64_t k) {
    if ((dts & ACT & set_of(w.dt)) == 0 || w.n <= 0 || w.k <= 0 || (n != ANY && w.n != n) || (k != ANY && w.k != k))
        FAIL(ERR_INVAL, "dev op %s: weight is %s (%lld, %lld), which does not fit (%lld, %lld; -1 is any)", op, dtype_name(w.dt),
             (long long)w.n, (long long)w.k, (long long)n, (long long)k);
    if (w.data == NULL) FAIL(ERR_INVAL, "dev op %s: weight is not given", op);
    return 0;
}
/* KV cache, (n_kv_blocks, Hk, block_len, D). */
static inline int want_kv(const char *op, const char *arg, struct tensor t, unsigned dts, int64_t n_kv_heads, int64_t head_dim) {
    return want(op, arg, t, dts, 4, (const int64_t[]){ANY, n_kv_heads, ANY, head_dim});
}
/* Query heads share key heads in equal groups; RoPE turns pairs, so a head has an even size. */
static inline int want_heads(const char *op, int64_t n_q, int64_t n_kv, int64_t head_dim) {
    if (n_q <= 0 || n_kv <= 0 || n_q % n_kv != 0 || head_dim <= 0 || head_dim % 2 != 0)
        FAIL(ERR_INVAL, "dev op %s: %lld query heads, %lld key heads of %lld do not fit each other", op, (long long)n_q,
             (long long)n_kv, (long long)head_dim);
    return 0;
}

#endif
