/* quantize.c - a frozen base in 4 or 8 bits: the matrices of the layers are kept as codes and dequantised,
 * one group at a time, to the compute dtype for each GEMM (QLoRA: Dettmers et al. 2023). Embedding, head,
 * norms and biases stay as they are.
 *
 * NF4 codes go through each Hugging Face tensor in blocks of DEV_NF4_BLOCK with an f32 absmax each, as
 * bitsandbytes does without double quantisation; INT8 has one absmax a row. Does no training of what it
 * quantises.
 * Invariant: forward, backward and generation multiply by the same dequantised bits. */
#include "model/quantize.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/files/load.h"
#include "model/model_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- codes ---- */

int64_t model__quant_codes(enum quant_kind kind, int64_t n) { return kind == QUANT_NF4 ? (n + 1) / 2 : n; }
int64_t model__quant_scales(enum quant_kind kind, int64_t rows, int64_t cols) {
    return kind == QUANT_NF4 ? (rows * cols + DEV_NF4_BLOCK - 1) / DEV_NF4_BLOCK : rows;
}

static float absmax(const float *w, int64_t n) {
    float m = 0;
    for (int64_t i = 0; i < n; i++) m = fmaxf(m, fabsf(w[i]));
    return m;
}

/* The nearest entry of the book is as many as there are midpoints below x: the lower one of two equally near. */
static uint8_t nf4_code(const float mid[15], float x) {
    int code = 0;
    for (int i = 0; i < 15; i++) code += x > mid[i];
    return (uint8_t)code;
}

static void quantize_nf4(const float *w, int64_t n, uint8_t *code, float *scale) {
    float mid[15];
    for (int i = 0; i < 15; i++) mid[i] = 0.5f * (dev_nf4_book[i] + dev_nf4_book[i + 1]);
    for (int64_t lo = 0; lo < n; lo += DEV_NF4_BLOCK) {
        const int64_t hi = lo + DEV_NF4_BLOCK < n ? lo + DEV_NF4_BLOCK : n;
        const float s = scale[lo / DEV_NF4_BLOCK] = absmax(w + lo, hi - lo);
        for (int64_t i = lo; i < hi; i += 2) {
            const uint8_t a = nf4_code(mid, s > 0 ? w[i] / s : 0), b = nf4_code(mid, s > 0 && i + 1 < hi ? w[i + 1] / s : 0);
            code[i / 2] = (uint8_t)(a << 4 | b);
        }
    }
}

static void quantize_int8(const float *w, int64_t rows, int64_t cols, uint8_t *code, float *scale) {
    for (int64_t r = 0; r < rows; r++) {
        const float s = scale[r] = absmax(w + r * cols, cols);
        for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
            const int8_t q = s > 0 ? (int8_t)lrintf(w[i] * 127.0f / s) : 0;
            memcpy(&code[i], &q, 1);
        }
    }
}

void model_quantize(enum quant_kind kind, const float *w, int64_t rows, int64_t cols, uint8_t *code, float *scale) {
    if (kind == QUANT_NF4) quantize_nf4(w, rows * cols, code, scale);
    else quantize_int8(w, rows, cols, code, scale);
}

/* ---- memory ---- */

/* Whether codes and scales of all tensors of a group lie one after the other, so that they are dequantised by one call: experts are
 * many. NF4's blocks must not cross from one tensor to the next. */
bool model__quant_one_part(const struct model *m, const struct model_group *g) {
    const struct model_param *const p = &m->params[g->first_param];
    bool whole = g->role == MODEL_EXPERTS;
    for (int64_t i = 0; i < g->n_params / g->count && whole; i++)
        whole = m->quant->kind == QUANT_INT8 || p[i].rows * g->k % DEV_NF4_BLOCK == 0;
    return whole;
}

static void place_parts(struct model *m, const struct model_group *g, struct arena *a) {
    struct model_quant *const q = m->quant;
    uint8_t *code = arena_take(a, (size_t)model__quant_codes(q->kind, g->n * g->k));
    float *scale = arena_take(a, (size_t)model__quant_scales(q->kind, g->n, g->k) * sizeof(float));
    for (int64_t p = g->first_param; p < g->first_param + g->n_params; p++) {
        const int64_t rows = m->params[p].rows, codes = model__quant_codes(q->kind, rows * g->k),
                      scales = model__quant_scales(q->kind, rows, g->k);
        q->parts[p].code = tensor_1d(code, DT_U8, codes);
        q->parts[p].scale = tensor_1d(scale, DT_F32, scales);
        if (!a->base) continue; /* measuring */
        code += codes;
        scale += scales;
    }
}

void model__quant_place(struct model *m, const struct model_group *g, struct arena *a) {
    struct model_quant *const q = m->quant;
    if (model__quant_one_part(m, g)) {
        place_parts(m, g, a);
        return;
    }
    for (int64_t p = g->first_param; p < g->first_param + g->n_params; p++) {
        const int64_t rows = m->params[p].rows, codes = model__quant_codes(q->kind, rows * g->k),
                      scales = model__quant_scales(q->kind, rows, g->k);
        q->parts[p].code = tensor_1d(arena_take(a, (size_t)codes), DT_U8, codes);
        q->parts[p].scale = tensor_1d(arena_take(a, (size_t)scales * sizeof(float)), DT_F32, scales);
    }
}

void model__quant_measure(const struct model *m, const struct model_group *g, struct arena *a) {
    for (int64_t p = g->first_param; p < g->first_param + g->n_params; p++) {
        arena_take(a, (size_t)model__quant_codes(m->quant->kind, m->params[p].rows * g->k));
        arena_take(a, (size_t)model__quant_scales(m->quant->kind, m->params[p].rows, g->k) * sizeof(float));
    }
}

void model__quant_scratch(struct model *m, struct arena *a) {
    int64_t stage = 0;
    size_t pack = 0;
    for (int64_t i = 0; i < m->n_groups; i++) {
        const struct model_group *g = &m->groups[i];
        if (!model__adaptable(g)) continue;
        const size_t bytes = model__group_bytes(m, g);
        if (bytes > pack) pack = bytes;
        if (g->n * g->k > stage) stage = g->n * g->k;
    }
    m->quant->stage = arena_take(a, (size_t)stage * dtype_size(m->act));
    m->quant->pack = arena_take(a, pack);
}

void model__quant_layout(struct model *m, struct arena *a) {
    struct model_quant *q = m->quant;
    if (m->flags & MODEL_SHARED_BASE) { /* the base's codes, and its scratch: the two models run in turn */
        if (!m->base) return;
        memcpy(q->parts, m->base->quant->parts, (size_t)m->g_head->first_param * sizeof *q->parts);
        q->stage = m->base->quant->stage;
        q->pack = m->base->quant->pack;
        return;
    }
    for (int64_t i = 0; i < m->n_groups; i++)
        if (model__adaptable(&m->groups[i])) model__quant_place(m, &m->groups[i], a);
    model__quant_scratch(m, a);
}

void model__quant_create(struct model *m, enum quant_kind kind) {
    if (kind == QUANT_NONE) return;
    m->quant = xcalloc(1, sizeof *m->quant);
    m->quant->kind = kind;
    m->quant->parts = xcalloc((size_t)m->n_params, sizeof *m->quant->parts);
}

void model__quant_free(struct model *m) {
    if (!m->quant) return;
    free(m->quant->parts);
    free(m->quant);
    m->quant = NULL;
}

/* ---- codes -> weight ---- */

/* The matrices of a group from q->stage to *out, one after the other; experts stay there where that is their form. */
static int pack_experts(const struct model *m, const struct model_group *g, struct weight *out) {
    const size_t bytes = dev_weight_bytes(m->dev, m->act, out->n, out->k);
    char *const stage = m->quant->stage;
    if (g->count > 1 && m->dev->ops->caps.plain_weights && bytes == (size_t)(out->n * out->k) * dtype_size(m->act)) {
        out->data = stage;
        return 0;
    }
    return dev_weight_stack_pack(m->dev, (struct weight_stack){*out, g->count},
                                 tensor_2d(stage, m->act, g->count * out->n, out->k));
}

int model__weight(const struct model *m, const struct model_group *g, struct weight *out) {
    const struct model_quant *q = m->quant;
    *out = g->mat;
    if (!q || !model__adaptable(g)) return 0;
    *out = (struct weight){q->pack, m->act, g->n / g->count, g->k, 0, 0};
    if (model__quant_one_part(m, g)) {
        const struct quant_part *const first = &q->parts[g->first_param];
        const int64_t codes = model__quant_codes(q->kind, g->n * g->k), scales = model__quant_scales(q->kind, g->n, g->k);
        const struct dequant_args a = {.kind = q->kind,
                                       .code = tensor_1d(first->code.data, DT_U8, codes),
                                       .scale = tensor_1d(first->scale.data, DT_F32, scales),
                                       .w = tensor_2d(q->stage, m->act, g->n, g->k)};
        TRY(dev_dequant(m->dev, &a));
        return pack_experts(m, g, out);
    }
    char *at = q->stage;
    for (int64_t p = g->first_param; p < g->first_param + g->n_params; p++) {
        const int64_t rows = m->params[p].rows;
        const struct dequant_args a = {
            .kind = q->kind, .code = q->parts[p].code, .scale = q->parts[p].scale, .w = tensor_2d(at, m->act, rows, g->k)};
        TRY(dev_dequant(m->dev, &a));
        at += (size_t)(rows * g->k) * dtype_size(m->act);
    }
    return pack_experts(m, g, out);
}
