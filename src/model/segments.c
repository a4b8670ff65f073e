/* segments.c - see segments.h. */
#include "model/segments.h"

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t model_n_segments(const struct model *m) {
    int64_t n = 0;
    for (int64_t i = 0; i < m->n_train_params; i++)
        n += (m->train_params[i].rows * m->train_params[i].cols + DEV_SEGMENT - 1) / DEV_SEGMENT;
    return n;
}

void model_cut(const struct model *m, struct model_range all, int64_t n, bool whole_matrices, struct model_range *out) {
    const int64_t length = all.hi - all.lo;
    int64_t k = 0, at = all.lo; /* the run being filled */
    out[0] = (struct model_range){at, at};
    for (int64_t i = 0; i < m->n_train_params; i++) {
        const struct model_param *p = &m->train_params[i];
        const int64_t end = p->offset + p->rows * p->cols, piece = whole_matrices && p->nd == 2 ? end - p->offset : DEV_SEGMENT;
        for (int64_t lo = p->offset; lo < end; lo += piece) {
            if (lo < all.lo || lo >= all.hi) continue;
            at = min64(lo + piece, end);
            const int64_t middle = lo + (at - lo) / 2 - all.lo; /* a piece is its middle's */
            for (const int64_t want = (int64_t)((__int128)middle * n / length); k < want;) out[++k] = (struct model_range){lo, lo};
            out[k].hi = at;
        }
    }
    while (k + 1 < n) out[++k] = (struct model_range){at, at};
}
