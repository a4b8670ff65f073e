/* gpt_oss.c - tensors that have all experts of a layer, as gpt-oss' files have them: transposed, gate and up in turn, in bf16 or as
 * MXFP4 (OCP Microscaling Formats 1.0: blocks of 32 E2M1 codes along the inputs with a power of two each).
 *
 * Where parameters are rows of the flat master, gate before up, each element has one place in such a tensor.
 * Invariant: shapes are checked before an element is read; a code's value is exact in bf16. */
#include "model/files/files_int.h"

#include "base/err.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BLOCK = 32 /* values of a block */, CODES = BLOCK / 2 /* bytes */ };

static int64_t parts_of(const struct model_group *g) { return g->n_params / g->count; }

void model__stack_name(const struct model *m, const struct model_group *g, char out[MODEL_STACK_NAME]) {
    static const char mark[] = ".experts.";
    const char *const name = m->params[g->first_param].name, *const at = strstr(name, mark);
    CHECK(at != NULL);
    snprintf(out, MODEL_STACK_NAME, "%.*s%s%s", (int)(at - name) + (int)sizeof mark - 1, name,
             parts_of(g) == 2 ? "gate_up_proj" : "down_proj", g->k ? "" : "_bias");
}

bool model__interleaved(const struct model *m, const struct model_group *g) {
    return m->cfg.family->experts.interleaved && g->count > 1;
}

bool model__stacked(const struct model *m, const struct model_group *g) {
    return model__interleaved(m, g) || (m->cfg.family->experts.stacked && !g->split_experts && g->role == MODEL_EXPERTS);
}

int model__interleaved_shape(const struct model_group *g, int64_t dim[3]) {
    dim[0] = g->count;
    dim[1] = g->k ? g->k : g->n / g->count;
    dim[2] = g->n / g->count;
    return g->k ? 3 : 2;
}

int model__stack_shape(const struct model *m, const struct model_group *g, int64_t dim[3]) {
    if (model__interleaved(m, g)) return model__interleaved_shape(g, dim);
    dim[0] = g->count, dim[1] = g->n / g->count, dim[2] = g->k;
    return 3;
}

int64_t model__interleaved_row(const struct model_group *g, int64_t j) {
    return parts_of(g) == 2 ? j % 2 * (g->n / g->count / 2) + j / 2 : j;
}

static int check_shape(const struct safetensors_tensor *t, const char *path, int nd, const int64_t *dim) {
    bool same = t->nd == nd;
    for (int i = 0; i < nd && same; i++) same = t->dim[i] == dim[i];
    if (same) return 0;
    char want[96];
    for (int i = 0, n = 0; i < nd && n < 90; i++)
        n += snprintf(want + n, sizeof want - (size_t)n, "%s%lld", i ? ", " : "", (long long)dim[i]);
    FAIL(ERR_FORMAT, "%s: tensor %s does not have the shape (%s) that config.json asks for", path, t->name, want);
}

static int find_mxfp4(struct interleaved *s, const struct bnb_args *a, const char *name) {
    char part[MODEL_STACK_NAME + 8];
    snprintf(part, sizeof part, "%s_blocks", name);
    const struct safetensors_tensor *const codes = a->find(a->arg, part);
    if (!codes) return 0;
    snprintf(part, sizeof part, "%s_scales", name);
    s->scales = a->find(a->arg, part);
    if (!s->scales) FAIL(ERR_FORMAT, "%s: tensor %s is missing", a->path, part);
    if (codes->dt != DT_U8 || s->scales->dt != DT_U8 || s->k % BLOCK)
        FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported MXFP4, expected bytes of blocks of %d of %lld inputs", a->path,
             codes->name, BLOCK, (long long)s->k);
    TRY(check_shape(codes, a->path, 4, (const int64_t[]){s->expert, s->n, s->k / BLOCK, CODES}));
    TRY(check_shape(s->scales, a->path, 3, (const int64_t[]){s->expert, s->n, s->k / BLOCK}));
    s->t = codes;
    return 0;
}

int model__interleaved_find(struct interleaved *s, const struct model *m, const struct bnb_args *a) {
    const struct model_group *const g = &m->groups[a->param->group];
    const int64_t in_group = a->param - m->params - g->first_param, parts = parts_of(g);
    char name[MODEL_STACK_NAME];
    int64_t dim[3];
    const int nd = model__interleaved_shape(g, dim);
    model__stack_name(m, g, name);
    *s = (struct interleaved){
        .expert = g->count, .n = g->n / g->count, .k = g->k ? g->k : 1, .column = in_group % parts, .step = parts};
    if (g->k) TRY(find_mxfp4(s, a, name));
    if (!s->t) {
        s->t = a->find(a->arg, name);
        if (!s->t) return 0;
        if (s->t->dt != DT_F32 && s->t->dt != DT_BF16 && s->t->dt != DT_F16)
            FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype %s for a weight", a->path, name, dtype_name(s->t->dt));
        TRY(check_shape(s->t, a->path, nd, dim));
    }
    s->expert = in_group / parts;
    return 0;
}

/* Value of E2M1 code c (sign, two bits of exponent, one of mantissa). */
static float e2m1(unsigned c) {
    static const float size[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return c & 8 ? -size[c & 7] : size[c & 7];
}

/* Input c of output j of the expert. */
static float decode(const struct interleaved *s, int64_t j, int64_t c) {
    const int64_t block = (s->expert * s->n + j) * (s->k / BLOCK) + c / BLOCK, at = c % BLOCK;
    const unsigned code = s->t->data[block * CODES + at / 2], scale = s->scales->data[block];
    return scale == 255 ? NAN : ldexpf(e2m1(at % 2 ? code >> 4 : code & 15), (int)scale - 127);
}

void model__interleaved_read(const struct interleaved *s, int64_t first, int64_t n, float *out) {
    const int64_t r0 = first / s->k, r1 = (first + n - 1) / s->k;
    if (s->scales) {
        for (int64_t i = first; i < first + n; i++) out[i - first] = decode(s, s->column + i / s->k * s->step, i % s->k);
        return;
    }
    const size_t size = dtype_size(s->t->dt);
    for (int64_t c = 0; c < s->k && n > 0; c++) /* neighbours of the file are the rows of a column */
        for (int64_t r = r0; r <= r1; r++) {
            const int64_t at = r * s->k + c - first;
            if (at < 0 || at >= n) continue;
            const int64_t from = (s->expert * s->k + c) * s->n + s->column + r * s->step;
            model__convert(&out[at], DT_F32, s->t->data + (size_t)from * size, s->t->dt, 1);
        }
}
