/* host_decode.c - decode_next for the backends whose memory is the host's (ref and cpu): logits, sampling through the
 * backend's own sampler, and the next step's inputs.
 *
 * Invariant: a token and its log-prob do not depend on whether the decoding loop runs here or in its caller. */
#include "device/host_decode.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"

#include <stdlib.h>

static bool ends(const struct decode_args *a, int64_t row, int32_t id) {
    const int64_t n = a->stop.data ? a->stop.dim[1] : 0;
    for (int64_t i = 0; i < n; i++)
        if (((const int32_t *)a->stop.data)[row * n + i] == id) return true;
    return false;
}

/* Row `r` drew `id`: the inputs of its next forward. */
static void move_on(const struct decode_args *a, int64_t r, struct decode_row *w, int32_t id) {
    w->at++;
    w->left = ends(a, r, id) ? 0 : w->left - 1;
    if (w->left == 0) return;
    int32_t *pos = (int32_t *)a->pos.data + r;
    const int64_t at = ++*pos, kv_block = at / a->block_len;
    CHECK(kv_block < a->block_table.dim[1]);
    ((int32_t *)a->ids.data)[r] = id;
    ((int32_t *)a->slots.data)[r] =
        (int32_t)(((const int32_t *)a->block_table.data)[r * a->block_table.dim[1] + kv_block] * a->block_len + at % a->block_len);
}

int host_decode_next(struct dev *d, const struct decode_args *a) {
    const int64_t n = a->logits.dim[0], step = *(int32_t *)a->step.data;
    struct decode_row *rows = a->rows.data;
    CHECK(step >= 0 && step < a->id.dim[0]);
    if (a->x.nd) TRY(d->ops->logits(d, a->logits, a->x, a->w));
    struct sample_param *param = xmalloc((size_t)n * sizeof *param);
    int32_t *id = xmalloc((size_t)n * sizeof *id);
    float *logp = xmalloc((size_t)n * 2 * sizeof *logp);
    for (int64_t r = 0; r < n; r++) {
        param[r] = rows[r].rule;
        param[r].u = rng_token(rows[r].seed, rows[r].uid, rows[r].sample, rows[r].at);
    }
    const struct sample_args s = {.logits = a->logits,
                                  .param = param,
                                  .id = tensor_1d(id, DT_I32, n),
                                  .logp = tensor_1d(logp, DT_F32, n),
                                  .logp_kept = tensor_1d(logp + n, DT_F32, n)};
    const int rc = d->ops->sample(d, &s);
    for (int64_t r = 0; r < n && rc == 0; r++) {
        if (rows[r].left == 0) continue;
        ((int32_t *)a->id.data)[step * n + r] = id[r];
        ((float *)a->logp.data)[step * n + r] = logp[r];
        ((float *)a->logp_kept.data)[step * n + r] = logp[n + r];
        move_on(a, r, &rows[r], id[r]);
    }
    *(int32_t *)a->step.data = (int32_t)(step + 1);
    free(param);
    free(id);
    free(logp);
    return rc;
}
