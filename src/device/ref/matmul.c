/* matmul.c - the ref backend's matmul, forward and backward, and the sums that its LM head shares.
 * Invariant: products of two f32 are exact in double, and every sum runs over its index in order: how many sums run side by side
 * changes no bit. Row t of a result reads row t of its inputs alone; weight gradients sum over rows in row order. */
#include "device/ref/ref_int.h"

#include "base/buf.h"

#include <stdlib.h>

enum { LANES = 8 }; /* sums side by side, since each waits for its last addition */

static inline void dot_lanes(double *out, const double *x, const void *w, enum dtype dt, int64_t at, int64_t k) {
    double s[LANES] = {0};
    for (int64_t c = 0; c < k; c++)
#pragma GCC unroll 8
        for (int i = 0; i < LANES; i++) s[i] += x[c] * ref_get(w, dt, at + i * k + c);
    for (int i = 0; i < LANES; i++) out[i] = s[i];
}

void ref_dots(double *out, const double *x, struct weight w, int64_t lo, int64_t hi) {
    int64_t n = lo;
    for (; n + LANES <= hi; n += LANES) {
        if (w.dt == DT_BF16) dot_lanes(out + n - lo, x, w.data, DT_BF16, n * w.k, w.k);
        else dot_lanes(out + n - lo, x, w.data, DT_F32, n * w.k, w.k);
    }
    for (; n < hi; n++) {
        double sum = 0;
        for (int64_t c = 0; c < w.k; c++) sum += x[c] * ref_w(w, n, c);
        out[n - lo] = sum;
    }
}

void ref_add_scaled(double *restrict sum, double a, const void *v, enum dtype dt, int64_t at, int64_t n) {
    if (dt == DT_BF16)
        for (int64_t i = 0; i < n; i++) sum[i] += a * bf16_to_f32(((const uint16_t *)v)[at + i]);
    else
        for (int64_t i = 0; i < n; i++) sum[i] += a * ((const float *)v)[at + i];
}

void ref_row(double *out, struct tensor x, int64_t row, int64_t n) {
    for (int64_t c = 0; c < n; c++) out[c] = ref_at(x, row * n + c);
}

/* v become the n elements of t from at on, or are added to them. */
static void store(struct tensor t, int64_t at, const double *v, int64_t n, bool add) {
    for (int64_t i = 0; i < n; i++) {
        if (add) ref_f32(t)[at + i] += (float)v[i];
        else ref_put(t.data, t.dt, at + i, v[i]);
    }
}

int ref_matmul_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight w, struct tensor bias, bool add) {
    (void)d;
    double *row = xcalloc((size_t)(w.k + w.n) + 1, sizeof *row), *sum = row + w.k;
    for (int64_t t = 0; t < x.dim[0]; t++) {
        ref_row(row, x, t, w.k);
        ref_dots(sum, row, w, 0, w.n);
        for (int64_t n = 0; bias.data && n < w.n; n++) sum[n] += ref_at(bias, n);
        store(y, t * w.n, sum, w.n, add);
    }
    free(row);
    return 0;
}

int ref_matmul_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight w, bool add) {
    (void)d;
    double *sum = xcalloc((size_t)w.k + 1, sizeof *sum);
    for (int64_t t = 0; t < dy.dim[0]; t++) {
        for (int64_t k = 0; k < w.k; k++) sum[k] = 0;
        for (int64_t n = 0; n < w.n; n++) ref_add_scaled(sum, ref_at(dy, t * w.n + n), w.data, w.dt, n * w.k, w.k);
        store(dx, t * w.k, sum, w.k, add);
    }
    free(sum);
    return 0;
}

int ref_matmul_dw(struct dev *d, struct tensor dw, struct tensor db, struct tensor dy, struct tensor x, bool add) {
    (void)d;
    const int64_t rows = dy.dim[0], n_out = dy.dim[1], n_in = x.dim[1];
    double *sum = xcalloc((size_t)n_in + 1, sizeof *sum), bias;
    for (int64_t n = 0; n < n_out; n++) {
        for (int64_t k = 0; k < n_in; k++) sum[k] = 0;
        bias = 0;
        for (int64_t t = 0; t < rows; t++) {
            const double g = ref_at(dy, t * n_out + n);
            ref_add_scaled(sum, g, x.data, x.dt, t * n_in, n_in);
            bias += g;
        }
        store(dw, n * n_in, sum, n_in, add);
        if (db.data) store(db, n, &bias, 1, add);
    }
    free(sum);
    return 0;
}
