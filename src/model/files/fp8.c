/* fp8.c - matrices that were saved in FP8 by blocks, as DeepSeek-V3 and Qwen3 are released: codes of E4M3 (Micikevicius et al.
 * 2022) in `weight`, and in `weight_scale_inv` a number for each block, which its values are multiplied by.
 *
 * A value is rounded to bf16, so that what is read is the model in bf16. Nothing is written in FP8.
 * Invariant: shapes are checked before an element is read. */
#include "model/files/files_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdio.h>

static int64_t blocks_of(int64_t n, int64_t block) { return (n + block - 1) / block; }

int model__fp8_find(struct fp8_weight *w, const struct model_config *c, const struct safetensors_tensor *t,
                    const struct bnb_args *a) {
    const struct model_param *const p = a->param;
    char *const name = xasprintf("%s_scale_inv", t->name);
    *w = (struct fp8_weight){.scales = a->find(a->arg, name), .cols = p->cols, .block = {c->fp8_block[0], c->fp8_block[1]}};
    int rc = 0;
    if (!c->fp8_block[0] || p->nd != 2)
        FAILG(out, ERR_UNSUPPORTED, "%s: tensor %s: unsupported FP8, which config.json's quantization_config does not name",
              a->path, t->name);
    if (!w->scales) FAILG(out, ERR_FORMAT, "%s: tensor %s is missing", a->path, name);
    const struct safetensors_tensor *const s = w->scales;
    const int64_t rows = blocks_of(p->rows, w->block[0]), cols = blocks_of(p->cols, w->block[1]);
    if (s->nd != 2 || s->dim[0] != rows || s->dim[1] != cols)
        FAILG(out, ERR_FORMAT, "%s: tensor %s does not have the shape (%lld, %lld): a number for each block of %lld x %lld",
              a->path, name, (long long)rows, (long long)cols, (long long)w->block[0], (long long)w->block[1]);
    if (s->dt != DT_F32 && s->dt != DT_BF16)
        FAILG(out, ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype %s for scales", a->path, name, dtype_name(s->dt));
    w->codes = t;
out:
    free(name);
    return rc;
}

/* Value of an E4M3 code: sign, four bits of exponent with bias 7, three of mantissa; no infinity. */
static float e4m3(unsigned c) {
    const unsigned e = c >> 3 & 15, m = c & 7;
    const float v = (c & 127) == 127 ? NAN : e ? ldexpf((float)(8 + m), (int)e - 10) : ldexpf((float)m, -9);
    return c & 128 ? -v : v;
}

void model__fp8_read(const struct fp8_weight *w, int64_t first, int64_t n, float *out) {
    const int64_t across = blocks_of(w->cols, w->block[1]);
    const size_t size = dtype_size(w->scales->dt);
    float value[256], scale = 0;
    int64_t at = -1;
    for (unsigned c = 0; c < 256; c++) value[c] = e4m3(c);
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = (first + i) / w->cols, col = (first + i) % w->cols;
        const int64_t block = row / w->block[0] * across + col / w->block[1];
        if (block != at) model__convert(&scale, DT_F32, w->scales->data + (size_t)block * size, w->scales->dt, 1);
        at = block;
        out[i] = bf16_to_f32(f32_to_bf16(value[w->codes->data[first + i]] * scale));
    }
}
