/* rope.c - the tables of rotary angles.
 *
 * Follows transformers' modeling_rope_utils.py operation by operation in f32
 * (the order of roundings included), so that the angles agree bit for bit
 * except where the two libraries' pow, cos and sin differ in the last place.
 * Invariant: the table depends on the config and, for dynamic NTK, on the
 * run's longest sequence; never on the sequence being computed. */
#include "model/model_int.h"

#include "base/buf.h"
#include "base/log.h"
#include "model/config.h"

#include <math.h>
#include <stdlib.h>

/* 1 / base^(2i/dim) */
static void plain_freqs(float *f, int64_t half, double base) {
    for (int64_t i = 0; i < half; i++) f[i] = 1.0f / powf((float)base, (float)(2 * i) / (float)(2 * half));
}

static void llama3_freqs(float *f, int64_t half, const struct model_rope *r) {
    const float factor = (float)r->factor, low = (float)r->low_freq_factor;
    const double len = (double)r->original_max_pos;
    const float low_wave = (float)(len / r->low_freq_factor), high_wave = (float)(len / r->high_freq_factor);
    const float span = (float)(r->high_freq_factor - r->low_freq_factor);
    for (int64_t i = 0; i < half; i++) {
        const float wave = 1.0f / f[i] * (float)(2 * M_PI); /* torch: scalar / tensor = reciprocal * scalar */
        if (wave > low_wave) {
            f[i] /= factor;
        } else if (wave >= high_wave) {
            const float smooth = (1.0f / wave * (float)len - low) / span;
            f[i] = (1.0f - smooth) * f[i] / factor + smooth * f[i];
        }
    }
}

/* YaRN (Peng et al. 2023), find_correction_dim: the pair that makes n_rot turns over the length. */
static double yarn_dim(double n_rot, int64_t dim, double base, double len) {
    return (double)dim * log(len / (n_rot * 2 * M_PI)) / (2 * log(base));
}

static void yarn_freqs(float *f, int64_t half, const struct model_rope *r) {
    const int64_t dim = 2 * half;
    const double len = (double)r->original_max_pos;
    double low = yarn_dim(r->beta_fast, dim, r->theta, len);
    double high = yarn_dim(r->beta_slow, dim, r->theta, len);
    if (r->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, (double)(dim - 1));
    if (low == high) high += 0.001;
    for (int64_t i = 0; i < half; i++) {
        const float pos_freq = powf((float)r->theta, (float)(2 * i) / (float)dim);
        const float extra = 1.0f / pos_freq, inter = 1.0f / ((float)r->factor * pos_freq);
        const float ramp = fminf(fmaxf(((float)i - (float)low) / (float)(high - low), 0.0f), 1.0f);
        const float keep = 1.0f - ramp;
        f[i] = inter * (1.0f - keep) + extra * keep;
    }
}

static double yarn_mscale(double scale, double m) { return scale <= 1 ? 1.0 : 0.1 * m * log(scale) + 1.0; }

float model_mla_scale(const struct model_rope *r) {
    const double m = r->kind == ROPE_YARN && r->mscale_all_dim != 0 ? yarn_mscale(r->factor, r->mscale_all_dim) : 1;
    return (float)(m * m);
}

/* What cos and sin are multiplied by. */
static float attention_scaling(const struct model_rope *r) {
    if (r->kind != ROPE_YARN && r->kind != ROPE_LONGROPE) return 1.0f;
    if (r->attention_factor != 0) return (float)r->attention_factor;
    if (r->kind == ROPE_LONGROPE) return r->factor <= 1 ? 1.0f : (float)sqrt(1 + log(r->factor) / log((double)r->original_max_pos));
    if (r->mscale != 0 && r->mscale_all_dim != 0)
        return (float)(yarn_mscale(r->factor, r->mscale) / yarn_mscale(r->factor, r->mscale_all_dim));
    return (float)yarn_mscale(r->factor, 1);
}

/* Dynamic NTK: transformers recomputes the base whenever a longer sequence comes by, which
 * would make a row's numbers depend on its batch; here the run's longest length sets it once. */
static double dynamic_base(const struct model_config *c, const struct model_rope *r, int64_t max_len) {
    const double max_pos = (double)c->max_pos, len = (double)(max_len > c->max_pos ? max_len : c->max_pos);
    const double dim = (double)r->dim;
    log_note("dynamic rope scaling is fixed for a longest sequence of %.0f tokens", len);
    return r->theta * pow(r->factor * len / max_pos - (r->factor - 1), dim / (dim - 2));
}

/* LongRoPE (Ding et al. 2024). transformers chooses between the lists by each batch's longest sequence; here the run's chooses. */
static void longrope_freqs(float *f, int64_t half, const struct model_config *c, const struct model_rope *r, int64_t max_len) {
    const bool longer = max_len > r->original_max_pos;
    const json_t *o = model_rope_json(model_text_json(c->json)),
                 *by_type = json_object_get(o, r == &c->rope ? "full_attention" : "sliding_attention");
    const json_t *list = json_object_get(json_is_object(by_type) ? by_type : o, longer ? "long_factor" : "short_factor");
    log_note("longrope: %s, for a longest sequence of %lld tokens", longer ? "long_factor" : "short_factor", (long long)max_len);
    for (int64_t i = 0; i < half; i++) {
        const float by = (float)json_number_value(json_array_get(list, (size_t)i));
        f[i] = 1.0f / (by * powf((float)r->theta, (float)(2 * i) / (float)(2 * half)));
    }
}

static void frequencies(float *f, int64_t half, const struct model_config *c, const struct model_rope *r, int64_t max_len) {
    plain_freqs(f, half, r->kind == ROPE_DYNAMIC ? dynamic_base(c, r, max_len) : r->theta);
    if (r->kind == ROPE_LINEAR)
        for (int64_t i = 0; i < half; i++) f[i] /= (float)r->factor;
    if (r->kind == ROPE_LLAMA3) llama3_freqs(f, half, r);
    if (r->kind == ROPE_YARN) yarn_freqs(f, half, r);
    if (r->kind == ROPE_LONGROPE) longrope_freqs(f, half, c, r, max_len);
    if (r->kind == ROPE_NTK_ALPHA) plain_freqs(f, half, r->theta * pow(r->factor, (double)r->dim / (double)(r->dim - 2)));
}

enum model_rope_table model_layer_rope(const struct model_config *c, int64_t layer) {
    if (c->layer[layer] & MODEL_NO_ROPE) return MODEL_ROPE_NONE;
    return c->has_local_rope && c->layer[layer] & MODEL_WINDOWED ? MODEL_ROPE_LOCAL : MODEL_ROPE;
}

bool model_has_rope(const struct model_config *c, enum model_rope_table which) {
    if (which == MODEL_ROPE_NONE && model_has_group(c, offsetof(struct model_layer, q_rope_norm))) return true;
    for (int64_t l = 0; l < c->n_layers; l++)
        if (model_layer_rope(c, l) == which) return true;
    return false;
}

void model_rope_table(const struct model_config *c, enum model_rope_table which, int64_t n_pos, int64_t max_len, float *out) {
    const struct model_rope *const r = which == MODEL_ROPE_LOCAL ? &c->local_rope : &c->rope;
    const int64_t half = model_rope_dim(c) / 2, turned = r->dim / 2;
    const float scale = which == MODEL_ROPE_NONE ? 1.0f : attention_scaling(r);
    float *f = xcalloc((size_t)half, sizeof *f);
    if (which != MODEL_ROPE_NONE) frequencies(f, turned, c, r, max_len);
    for (int64_t p = 0; p < n_pos; p++) {
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)p * f[i];
            out[(p * half + i) * 2] = i < turned ? cosf(angle) * scale : 1.0f;
            out[(p * half + i) * 2 + 1] = i < turned ? sinf(angle) * scale : 0.0f;
        }
    }
    free(f);
}

bool model_has_query_scales(const struct model_config *c, int64_t n_pos) {
    return c->rope.query_beta > 0 && n_pos > c->rope.original_max_pos;
}

void model_query_scales(const struct model_config *c, int64_t n_pos, enum dtype act, float *out) {
    const float beta = (float)c->rope.query_beta;
    for (int64_t p = 0; p < n_pos; p++) {
        const float scale = 1.0f + beta * logf(1.0f + (float)(p / c->rope.original_max_pos));
        out[p] = act == DT_BF16 ? bf16_to_f32(f32_to_bf16(scale)) : scale;
    }
}
