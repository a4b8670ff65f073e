/* value_head.c - the value head of a critic: one number for each row, a linear
 * map of the final norm's output, and its gradient.  Hugging Face's
 * ForTokenClassification with one label and no dropout.
 *
 * Built from the ops that every backend has: the head is a matrix with one row.
 * Invariant: as in the rest of the model, a row's value depends on its own
 * sequence alone. */
#include "model/model_int.h"

#include "base/err.h"
#include "model/forward.h"

/* Rows [lo, lo + n) gathered and normalised into head.xn. */
static int head_input(struct model *m, struct model_acts *a, const int32_t *row, int64_t lo, int64_t n) {
    TRY(dev_copy_in(m->dev, a->head.row.data, row + lo, (size_t)n * sizeof(int32_t)));
    return model__head_norm(m, a, n);
}

int model_value(struct model *m, struct model_acts *a, const int32_t *row, int64_t n, float *value) {
    CHECK(m->cfg.value);
    if (n < 0 || n > a->max_rows) FAIL(ERR_INVAL, "values of %lld rows, planned for %lld", (long long)n, (long long)a->max_rows);
    for (int64_t i = 0; i < n; i++)
        if (row[i] < 0 || row[i] >= a->n_rows)
            FAIL(ERR_INVAL, "value %lld: row %d of a batch of %lld", (long long)i, row[i], (long long)a->n_rows);
    for (int64_t lo = 0; lo < n; lo += a->head_rows) {
        const int64_t k = n - lo < a->head_rows ? n - lo : a->head_rows;
        const struct tensor y = tensor_2d(a->head.logp.data, DT_F32, k, 1);
        TRY(head_input(m, a, row, lo, k));
        TRY(dev_matmul_fwd(m->dev, y, model__top(a->head.xn, k), m->head, model__vec(m->g_head_bias), false));
        TRY(dev_copy_out(m->dev, value + lo, y.data, (size_t)k * sizeof(float)));
    }
    a->n_head = n;
    a->head_entropy = false;
    return 0;
}

static int head_backward(struct model *m, struct model_acts *a, const int32_t *row, int64_t n, const float *dvalue,
                         struct model_grads *g) {
    struct dev *d = m->dev;
    const struct tensor xn = model__top(a->head.xn, n), dxn = model__top(a->dxn, n), dv = model__top(a->head.dvalue, n),
                        dv_f32 = tensor_2d(a->head.dlogp.data, DT_F32, n, 1);
    TRY(head_input(m, a, row, 0, n));
    TRY(dev_copy_in(d, dv_f32.data, dvalue, (size_t)n * sizeof(float)));
    TRY(dev_cast(d, dv, dv_f32)); /* rounded for the matmuls, as every gradient */
    TRY(model__bucket_begin(m, g, m->g_head, m->g_head_bias ? m->g_head_bias : m->g_head));
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        const struct model_range r = model__part_outputs(g, i, row, n);
        TRY(dev_matmul_dw(d, model__grad(m, &own, m->g_head), model__grad(m, &own, m->g_head_bias), model__range(dv, r),
                          model__range(xn, r), own.add));
    }
    TRY(model__bucket_end(g));
    TRY(dev_matmul_dx(d, dxn, dv, m->head, false));
    return model__head_norm_backward(m, a, row, dxn, g);
}

int model_value_backward(struct model *m, struct model_acts *a, const struct model_value_backward_args *args) {
    const struct model_batch *const b = args->batch;
    struct model_grads g = {.sink = args->sink, .parts = b->parts};
    CHECK(m->cfg.value && a->keep.train && b->kv == NULL);
    CHECK(a->n_rows == b->n_rows && a->n_head == args->n); /* the forward was of this batch */
    TRY(head_backward(m, a, args->row, args->n, args->dvalue, &g));
    return model__body_backward(m, b, a, &g);
}
