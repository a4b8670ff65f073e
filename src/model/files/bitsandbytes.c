/* bitsandbytes.c - matrices that bitsandbytes has saved in 4 bits (NF4, Dettmers et al. 2023): the packed codes as they
 * are, the scales of their blocks, themselves quantised or not, and the description next to them.
 *
 * Nothing is quantised here, and FP4 and other block sizes are refused.  Invariant: codes and scales give the f32
 * values that bitsandbytes' dequantize_4bit gives, to the bit. */
#include "model/files/files_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAP = 256, STATE_MAX = 4096 };
#define STATE "quant_state.bitsandbytes__nf4"

static float f32_at(const struct safetensors_tensor *t, int64_t i) { /* files promise no alignment */
    float f;
    memcpy(&f, t->data + 4 * i, sizeof f);
    return f;
}

/* The tensor NAME.PART with n elements of this type. */
static int find_part(const struct safetensors_tensor **out, const struct bnb_args *a, const char *part, enum dtype dt, int64_t n) {
    char name[160];
    snprintf(name, sizeof name, "%s.%s", a->param->name, part);
    const struct safetensors_tensor *t = *out = a->find(a->arg, name);
    if (!t) FAIL(ERR_FORMAT, "%s: tensor %s of a 4-bit matrix is missing", a->path, name);
    if (t->dt == dt && t->bytes == (size_t)n * dtype_size(dt)) return 0;
    FAIL(ERR_FORMAT, "%s: tensor %s: expected %lld elements of %s", a->path, name, (long long)n, dtype_name(dt));
}

/* What the description says of blocks, shape and the scales' own scales. */
static int read_state(struct bnb_weight *b, const struct bnb_args *a, const json_t *o) {
    const struct model_param *p = a->param;
    const json_t *shape = json_object_get(o, "shape");
    int64_t block = 0;
    TRY(json_i64(o, "blocksize", &block, a->path));
    if (block != DEV_NF4_BLOCK)
        FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported blocks of %lld; %d are", a->path, p->name, (long long)block,
             DEV_NF4_BLOCK);
    if (json_array_size(shape) != 2 || json_integer_value(json_array_get(shape, 0)) != p->rows ||
        json_integer_value(json_array_get(shape, 1)) != p->cols)
        FAIL(ERR_FORMAT, "%s: tensor %s is not of shape (%lld, %lld), which config.json asks for", a->path, p->name,
             (long long)p->rows, (long long)p->cols);
    if (!json_object_get(o, "nested_blocksize")) return 0;
    TRY(json_i64(o, "nested_blocksize", &b->nested_block, a->path));
    TRY(json_f64(o, "nested_offset", &b->offset, a->path));
    if (b->nested_block < 1) FAIL(ERR_FORMAT, "%s: tensor %s: nested_blocksize=%lld", a->path, p->name, (long long)b->nested_block);
    return 0;
}

static int check_book(const struct bnb_args *a, const struct safetensors_tensor *map) {
    for (int i = 0; i < 16; i++)
        if (f32_at(map, i) != dev_nf4_book[i])
            FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported code book, entry %d is %g", a->path, a->param->name, i,
                 (double)f32_at(map, i));
    return 0;
}

int model__bnb_find(struct bnb_weight *b, const struct bnb_args *a) {
    char name[160];
    json_t *o;
    const struct safetensors_tensor *map;
    const int64_t n = a->param->rows * a->param->cols, blocks = model__quant_scales(QUANT_NF4, a->param->rows, a->param->cols);
    *b = (struct bnb_weight){.code = a->find(a->arg, a->param->name)};
    snprintf(name, sizeof name, "%s." STATE, a->param->name);
    const struct safetensors_tensor *state = a->find(a->arg, name);
    if (!b->code || !state || state->dt != DT_U8 || state->bytes > STATE_MAX)
        FAIL(ERR_UNSUPPORTED,
             "%s: tensor %s is not in NF4 as bitsandbytes saves it, with " STATE ": unsupported in a model whose "
             "quantization_config says so",
             a->path, a->param->name);
    if (b->code->dt != DT_U8 || b->code->bytes != (size_t)model__quant_codes(QUANT_NF4, n))
        FAIL(ERR_FORMAT, "%s: tensor %s: expected %lld bytes of codes", a->path, a->param->name,
             (long long)model__quant_codes(QUANT_NF4, n));
    TRY(json_parse(&o, (const char *)state->data, state->bytes, a->path));
    const int rc = read_state(b, a, o);
    json_decref(o);
    TRY(rc);
    TRY(find_part(&map, a, "quant_map", DT_F32, 16));
    TRY(check_book(a, map));
    TRY(find_part(&b->absmax, a, "absmax", b->nested_block ? DT_U8 : DT_F32, blocks));
    if (!b->nested_block) return 0;
    TRY(find_part(&b->nested_map, a, "nested_quant_map", DT_F32, MAP));
    return find_part(&b->nested_absmax, a, "nested_absmax", DT_F32, (blocks + b->nested_block - 1) / b->nested_block);
}

void model__bnb_scales(const struct bnb_weight *b, int64_t n, float *scale) {
    for (int64_t i = 0; i < n; i++) {
        if (!b->nested_block) {
            scale[i] = f32_at(b->absmax, i);
            continue;
        }
        const float s = f32_at(b->nested_map, b->absmax->data[i]) * f32_at(b->nested_absmax, i / b->nested_block);
        scale[i] = s + (float)b->offset;
    }
}
