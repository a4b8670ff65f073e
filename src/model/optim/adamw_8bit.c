/* adamw_8bit.c - AdamW whose moments are stored as 8-bit codes with a scale for each
 * block of 256 (Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via
 * Block-wise Quantization", 2022).  A matrix is taken piece by piece: moments to
 * f32, the AdamW step, moments back to codes; the step itself sees f32.
 * Invariant: blocks start at the beginning of a matrix, so none spans two. */
#include "model/optim/optimizer_int.h"

#include "base/err.h"

#include <math.h>
#include <stdlib.h>

enum { PIECE = 1 << 22 }; /* elements in f32 at a time: whole blocks */

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The dynamic tree type (section 1.3 of the paper; create_dynamic_map of bitsandbytes): leading
 * zero bits pick a power of ten from 1e-6 to 1, the bits after them a fraction in [0.1, 1] by the
 * middles of equal intervals; 0 and 1 are in it exactly. Without a sign there is one fraction bit more. */
void optim__dynamic_book(bool is_signed, float book[256]) {
    enum { EXPONENTS = 7 };
    int n = 0;
    for (int e = 0; e < EXPONENTS; e++) {
        const int parts = 1 << (is_signed ? e : e + 1);
        for (int i = 0; i < parts; i++) {
            const double middle = 0.1 + 0.9 * ((double)i + 0.5) / (double)parts, v = pow(10, e - (EXPONENTS - 1)) * middle;
            book[n++] = (float)v;
            if (is_signed) book[n++] = (float)-v;
        }
    }
    book[n++] = 0;
    book[n++] = 1;
    CHECK(n == 256);
    qsort(book, 256, sizeof *book, ascending);
}

void optim__adamw8_layout(struct optim *o, struct arena *a, struct arena *arrays) {
    if (o->n_q == 0) return;
    int64_t longest = 0;
    for (int64_t i = 0; i < o->n_runs; i++)
        if (o->runs[i].rule == OPTIM_ADAMW8 && o->runs[i].n > longest) longest = o->runs[i].n;
    const size_t piece = (size_t)(longest < PIECE ? longest : PIECE) * 4;
    o->m_code = arena_take(arrays, (size_t)o->n_q);
    o->v_code = arena_take(arrays, (size_t)o->n_q);
    o->m_scale = arena_take(arrays, (size_t)o->n_b * 4);
    o->v_scale = arena_take(arrays, (size_t)o->n_b * 4);
    o->book = arena_take(a, 2 * 256 * 4);
    o->s.x = arena_take(a, piece);
    o->s.y = arena_take(a, piece);
}

int optim__adamw8_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a) {
    struct dev *d = a->m->dev;
    for (int64_t lo = 0; lo < r->n; lo += PIECE) {
        const int64_t n = r->n - lo < PIECE ? r->n - lo : PIECE, q = r->q_at + lo, b = r->b_at + lo / DEV_QUANT_BLOCK,
                      blocks = (n + DEV_QUANT_BLOCK - 1) / DEV_QUANT_BLOCK, at = r->at + lo;
        const struct quant8_args m = {tensor_1d(o->s.x, DT_F32, n), tensor_1d(o->m_code + q, DT_U8, n),
                                      tensor_1d(o->m_scale + b, DT_F32, blocks), tensor_1d(o->book, DT_F32, 256)};
        const struct quant8_args v = {tensor_1d(o->s.y, DT_F32, n), tensor_1d(o->v_code + q, DT_U8, n),
                                      tensor_1d(o->v_scale + b, DT_F32, blocks), tensor_1d(o->book + 256, DT_F32, 256)};
        const struct adamw_args x =
            optim__adamw(a, tensor_1d(a->m->master + at, DT_F32, n), m.x, v.x, tensor_1d(a->grads + at, DT_F32, n));
        TRY(dev_dequant8(d, &m));
        TRY(dev_dequant8(d, &v));
        TRY(dev_adamw(d, &x));
        TRY(dev_quant8(d, &m));
        TRY(dev_quant8(d, &v));
    }
    return 0;
}
