/* ref_int.h - what the files of the ref backend share: element access by
 * dtype and the declarations of its ops.
 *
 * ref works element by element: a value is read as f32 whatever its dtype,
 * sums run in double, and a result is rounded once where it is stored.  Bad
 * ids and indices are a CHECK, since here they can be seen. */
#ifndef VERLC_DEVICE_REF_INT_H
#define VERLC_DEVICE_REF_INT_H

#include "base/err.h"
#include "device/device.h"

static inline float ref_round(float v, enum dtype dt) { /* to dt and back */
    return dt == DT_BF16 ? bf16_to_f32(f32_to_bf16(v)) : v;
}
static inline float ref_get(const void *p, enum dtype dt, int64_t i) {
    return dt == DT_BF16 ? bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}
static inline void ref_put(void *p, enum dtype dt, int64_t i, double v) {
    if (dt == DT_BF16) ((uint16_t *)p)[i] = f32_to_bf16((float)v);
    else ((float *)p)[i] = (float)v;
}
static inline float ref_at(struct tensor t, int64_t i) { return ref_get(t.data, t.dt, i); }
static inline float ref_w(struct weight w, int64_t n, int64_t k) { /* row-major (n, k) */
    return ref_get(w.data, w.dt, n * w.k + k);
}
static inline float *ref_f32(struct tensor t) { return t.data; }
/* Weight c as a norm multiplies by it. */
static inline float ref_norm_weight(struct tensor w, enum norm_kind kind, int64_t c) {
    return ref_at(w, c) + (kind == NORM_ONE_PLUS ? 1 : 0);
}
static inline int64_t ref_index(struct tensor t, int64_t i, int64_t limit) { /* of an i32 tensor */
    const int64_t v = ((const int32_t *)t.data)[i];
    CHECK(v >= 0 && v < limit);
    return v;
}

#define OP(name, ...) int ref_##name(struct dev *d, __VA_ARGS__);
#include "device/ops.def"

/* Of matmul.c, summed in double in the order of the index. out[n - lo] = x (w.k) . row n of w, for n in [lo, hi). */
void ref_dots(double *out, const double *x, struct weight w, int64_t lo, int64_t hi);
/* sum[i] += a * v[at + i], i < n. */
void ref_add_scaled(double *restrict sum, double a, const void *v, enum dtype dt, int64_t at, int64_t n);
/* A row of n of x. */
void ref_row(double *out, struct tensor x, int64_t row, int64_t n);

/* Routers that choose by scores (score_route.c). */
int ref_score_route_fwd(const struct route_args *a);
int ref_score_route_bwd(const struct route_args *a, struct tensor dlogits, struct tensor dweight);

#endif
