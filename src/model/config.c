/* config.c - config.json and generation_config.json into struct model_config.
 *
 * Reads the spellings of transformers 4 (rope_theta, rope_scaling, torch_dtype)
 * and 5 (rope_parameters, dtype), with transformers' defaults for absent keys;
 * what differs between families is in families.c.  Looks at no weights.
 * Invariant: a setting that would change the numbers and is not supported is
 * an error that says "unsupported" and names it; it is never ignored. */
#include "model/config.h"

#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "model/config_int.h"
#include "model/families.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CONFIG_BYTES = 16 << 20 };
#define MAX_PARAMS ((int64_t)1 << 48) /* and no sum of their bytes wraps */

json_t *model_text_json(const json_t *o) {
    const char *const type = json_string_value(json_object_get(o, "model_type"));
    const struct model_family *const f = type ? model_family_find(type) : NULL;
    json_t *const text = json_object_get(o, "text_config");
    return f && f->outer_type && strcmp(type, f->outer_type) == 0 && text ? text : (json_t *)(uintptr_t)o;
}

/* *text: the object with this model's keys. */
static int parse_family(struct model_config *c, const json_t *o, const json_t **text, const char *where) {
    const char *type = NULL;
    TRY(json_str_opt(o, "model_type", &type, where));
    c->family = type ? model_family_find(type) : NULL;
    c->outer = c->family && c->family->outer_type && strcmp(type, c->family->outer_type) == 0;
    *text = model_text_json(o);
    if (c->outer && (*text == o || !json_is_object(*text))) FAIL(ERR_FORMAT, "%s: a %s model without \"text_config\"", where, type);
    if (c->family) return 0;
    const char *name = json_string_value(json_array_get(json_object_get(o, "architectures"), 0));
    FAIL(ERR_UNSUPPORTED, "%s: unsupported architecture %s%s%s; verlc has %s", where, type ? type : "(no model_type)",
         name ? ", " : "", name ? name : "", model_family_types);
}

/* ---- shape ---- */

int model__parse_dims(const json_t *o, const char *where, const struct config_dim *d, int n) {
    for (int i = 0; i < n; i++) {
        *d[i].out = d[i].fallback;
        if (d[i].fallback == 0) TRY(json_i64(o, d[i].key, d[i].out, where));
        else TRY(json_i64_opt(o, d[i].key, d[i].out, where));
        if (*d[i].out < 1 || *d[i].out > d[i].max)
            FAIL(ERR_FORMAT, "%s: \"%s\" is %lld, outside 1 .. %lld", where, d[i].key, (long long)*d[i].out, (long long)d[i].max);
    }
    return 0;
}

/* Sizes of gated delta nets, and which layers have one. */
static int parse_delta(struct model_config *c, const json_t *o, const char *where) {
    const json_t *const types = json_object_get(o, "layer_types");
    int64_t every = c->family->delta_interval, taps = DEV_CONV_TAPS;
    const struct config_dim dims[] = {{"linear_num_key_heads", &c->delta.k_heads, 16, 4096},
                                      {"linear_num_value_heads", &c->delta.v_heads, 32, 4096},
                                      {"linear_key_head_dim", &c->delta.k_dim, 128, 4096},
                                      {"linear_value_head_dim", &c->delta.v_dim, 128, 4096},
                                      {"linear_conv_kernel_dim", &taps, DEV_CONV_TAPS, 4096},
                                      {"full_attention_interval", &every, c->family->delta_interval, MODEL_MAX_LAYERS}};
    if (!c->family->delta_interval) return 0;
    TRY(model__parse_dims(o, where, dims, sizeof dims / sizeof dims[0]));
    if (taps != DEV_CONV_TAPS)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported linear_conv_kernel_dim %lld; verlc has %d", where, (long long)taps, DEV_CONV_TAPS);
    if (c->delta.v_heads % c->delta.k_heads != 0)
        FAIL(ERR_FORMAT, "%s: linear_num_value_heads %lld is not a multiple of linear_num_key_heads %lld", where,
             (long long)c->delta.v_heads, (long long)c->delta.k_heads);
    if (c->delta.k_dim % 16 != 0 || c->delta.v_dim % 16 != 0 || c->delta.k_dim > DEV_DELTA_DIM || c->delta.v_dim > DEV_DELTA_DIM)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported heads of %lld and %lld in linear attention; multiples of 16 up to %d are supported",
             where, (long long)c->delta.k_dim, (long long)c->delta.v_dim, DEV_DELTA_DIM);
    if (json_is_array(types) && (int64_t)json_array_size(types) != c->n_layers)
        FAIL(ERR_FORMAT, "%s: \"layer_types\" has %zu entries for %lld layers", where, json_array_size(types),
             (long long)c->n_layers);
    for (int64_t l = 0; l < c->n_layers; l++) {
        const char *const t = json_string_value(json_array_get(types, (size_t)l));
        const bool linear = json_is_array(types) ? t && strcmp(t, "linear_attention") == 0 : (l + 1) % every != 0;
        if (json_is_array(types) && !linear && !(t && strcmp(t, "full_attention") == 0))
            FAIL(ERR_UNSUPPORTED, "%s: unsupported layer_types entry \"%s\"; verlc has full_attention and linear_attention of %s",
                 where, t ? t : "(not a string)", c->family->type);
        if (linear) c->layer[l] |= MODEL_LINEAR_ATTENTION;
    }
    return 0;
}

/* Multi-head latent attention (DeepSeek-V2): in the form that is computed (mla.c) one key head, which is the values too. */
static int parse_mla(struct model_config *c, const json_t *o, const char *where) {
    const struct model_family *const f = c->family;
    const json_t *const q_rank = json_object_get(o, "q_lora_rank");
    const struct config_dim dims[] = {{"kv_lora_rank", &c->mla.kv_rank, f->mla.kv_rank, 1 << 16},
                                      {"qk_nope_head_dim", &c->mla.nope, f->mla.nope, 4096},
                                      {"qk_rope_head_dim", &c->mla.rope, f->mla.rope, 4096},
                                      {"v_head_dim", &c->mla.v, f->mla.v, 4096},
                                      {"q_lora_rank", &c->mla.q_rank, f->mla.q_rank, 1 << 16}};
    bool bias = false, interleave = true, mlp_bias = false;
    if (!f->mla.kv_rank) return 0;
    TRY(model__parse_dims(o, where, dims, q_rank && json_is_null(q_rank) ? 4 : 5));
    c->head_dim = c->mla.rope + c->mla.kv_rank;
    c->n_kv_heads = 1;
    if (c->mla.rope % 2)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported odd qk_rope_head_dim %lld (rotary embedding turns pairs)", where,
             (long long)c->mla.rope);
    TRY(json_bool_opt(o, "attention_bias", &bias, where));
    TRY(json_bool_opt(o, "mlp_bias", &mlp_bias, where));
    TRY(json_bool_opt(o, "rope_interleave", &interleave, where));
    if (bias || mlp_bias || !interleave)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported %s of a %s model", where,
             bias       ? "attention_bias"
             : mlp_bias ? "mlp_bias"
                        : "rope_interleave false",
             f->type);
    return 0;
}

/* Granite 4's type without what verlc has not of it. */
static int refuse_hybrid(const struct model_config *c, const json_t *o, const char *where) {
    const char *const type = c->family->type;
    const json_t *const types = json_object_get(o, "layer_types");
    int64_t experts = 8; /* transformers' default */
    if (!c->family->hybrid) return 0;
    TRY(json_i64_opt(o, "num_local_experts", &experts, where));
    if (experts != 0)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported num_local_experts %lld of a %s model; verlc has those without experts", where,
             (long long)experts, type);
    if (!json_is_array(types))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported %s model without layer_types, whose layers are Mamba's", where, type);
    if ((int64_t)json_array_size(types) != c->n_layers)
        FAIL(ERR_FORMAT, "%s: \"layer_types\" has %zu entries for %lld layers", where, json_array_size(types),
             (long long)c->n_layers);
    for (size_t l = 0; l < json_array_size(types); l++) {
        const char *const t = json_string_value(json_array_get(types, l));
        if (!t || (strcmp(t, "attention") != 0 && strcmp(t, "full_attention") != 0))
            FAIL(ERR_UNSUPPORTED, "%s: unsupported layer_types entry \"%s\" of a %s model; verlc has those of attention alone",
                 where, t ? t : "(not a string)", type);
    }
    return 0;
}

static int parse_shape(struct model_config *c, const json_t *o, const char *where) {
    const struct model_family *const f = c->family;
    const struct config_dim dims[] = {
        /* ceilings keep every product far below 2^63 */
        {"num_hidden_layers", &c->n_layers, 0, MODEL_MAX_LAYERS},
        {"hidden_size", &c->hidden, 0, 1 << 20},
        {f->ffn_key ? f->ffn_key : "intermediate_size", &c->ffn, f->experts.stacked ? f->experts.width : f->ffn, 1 << 22},
        {"num_attention_heads", &c->n_q_heads, 0, 4096},
        {"vocab_size", &c->vocab, 0, 1 << 24},
        {"max_position_embeddings", &c->max_pos, 2048, INT32_MAX},
    };
    TRY(model__parse_dims(o, where, dims, sizeof dims / sizeof dims[0]));
    int64_t kv_default = c->n_q_heads, head_default = c->hidden / c->n_q_heads;
    if (c->family->n_kv_heads && !json_object_get(o, "num_key_value_heads")) kv_default = c->family->n_kv_heads;
    if (c->family->head_dim && !json_object_get(o, "head_dim")) head_default = c->family->head_dim;
    else if (!c->family->mla.kv_rank && !json_is_integer(json_object_get(o, "head_dim")) && c->hidden % c->n_q_heads != 0)
        FAIL(ERR_FORMAT, "%s: hidden_size %lld is not a multiple of num_attention_heads %lld", where, (long long)c->hidden,
             (long long)c->n_q_heads);
    const struct config_dim heads[] = {
        {"num_key_value_heads", &c->n_kv_heads, kv_default, c->n_q_heads},
        {"head_dim", &c->head_dim, head_default ? head_default : 1, 4096},
    };
    TRY(model__parse_dims(o, where, heads, c->family->mla.kv_rank ? 0 : 2));
    TRY(parse_mla(c, o, where));
    TRY(refuse_hybrid(c, o, where));
    if (c->n_q_heads % c->n_kv_heads != 0)
        FAIL(ERR_FORMAT, "%s: num_attention_heads %lld is not a multiple of num_key_value_heads %lld", where,
             (long long)c->n_q_heads, (long long)c->n_kv_heads);
    TRY(model__parse_experts(c, o, where));
    TRY(parse_delta(c, o, where));
    if (c->family->mtp) c->mtp_layers = c->family->mtp->layers;
    if (c->family->mtp) TRY(json_i64_opt(o, c->family->mtp->key, &c->mtp_layers, where));
    if (c->mtp_layers < 0 || c->mtp_layers > MODEL_MAX_LAYERS)
        FAIL(ERR_FORMAT, "%s: \"%s\" is %lld", where, c->family->mtp->key, (long long)c->mtp_layers);
    if (model_config_params(c) > MAX_PARAMS)
        FAIL(ERR_FORMAT, "%s: a model of %.3g parameters, at most 2^48 are possible", where, (double)model_config_params(c));
    if (c->head_dim % 2 != 0)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported odd head_dim %lld (rotary embedding turns pairs)", where, (long long)c->head_dim);
    return 0;
}

/* FP8 by blocks, as DeepSeek-V3 and Qwen3 are released. Activations are not quantised here. */
static int read_fp8(struct model_config *c, const json_t *q, const char *where) {
    const json_t *const block = json_object_get(q, "weight_block_size");
    const char *format = "e4m3", *scheme = "dynamic";
    TRY(json_str_opt(q, "fmt", &format, where));
    TRY(json_str_opt(q, "activation_scheme", &scheme, where));
    if (strcmp(format, "e4m3") != 0 || strcmp(scheme, "dynamic") != 0 || json_array_size(block) != 2)
        FAIL(ERR_UNSUPPORTED,
             "%s: unsupported quantization_config (fp8, fmt %s, activation_scheme %s%s); e4m3 with weight_block_size "
             "and dynamic activations is read",
             where, format, scheme, json_array_size(block) == 2 ? "" : ", no weight_block_size");
    for (size_t i = 0; i < 2; i++) {
        const json_t *const n = json_array_get(block, i);
        c->fp8_block[i] = json_is_integer(n) ? json_integer_value(n) : 0;
        if (c->fp8_block[i] < 1 || c->fp8_block[i] > 1 << 20)
            FAIL(ERR_FORMAT, "%s: \"weight_block_size\" is not two numbers from 1 to 2^20", where);
    }
    return 0;
}

/* bitsandbytes' NF4 as transformers saves it; what is not given has that method's default. */
static int read_quantization(struct model_config *c, const json_t *q, const char *where) {
    const char *method = "", *type = "fp4", *storage = "uint8";
    bool four = false, eight = false;
    if (!json_is_object(q)) return 0;
    TRY(json_str_opt(q, "quant_method", &method, where));
    TRY(json_bool_opt(q, "load_in_4bit", &four, where));
    TRY(json_bool_opt(q, "load_in_8bit", &eight, where));
    TRY(json_str_opt(q, "bnb_4bit_quant_type", &type, where));
    TRY(json_str_opt(q, "bnb_4bit_quant_storage", &storage, where));
    c->saved_nf4 = strcmp(method, "bitsandbytes") == 0 && four && strcmp(type, "nf4") == 0 && strcmp(storage, "uint8") == 0;
    if (c->saved_nf4) return 0;
    if (c->family->experts.interleaved && strcmp(method, "mxfp4") == 0) return 0; /* by tensor */
    if (!c->family->experts.interleaved && strcmp(method, "fp8") == 0) return read_fp8(c, q, where);
    FAIL(ERR_UNSUPPORTED,
         "%s: unsupported quantization_config (%s%s%s); bitsandbytes' NF4 and FP8 by blocks are read, for the rest give the "
         "unquantized model: with quantization=%s and an adapter it is quantized as it is read",
         where, method, four || eight ? " " : "",
         four    ? type
         : eight ? "int8"
                 : "",
         eight ? "int8" : "nf4");
}

/* ---- biases, norms, activation ---- */

static int parse_multipliers(struct model_config *c, const json_t *o, double eps, const char *where) {
    static const char *const keys[] = {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"};
    double v[4];
    for (int i = 0; i < 4; i++) {
        v[i] = 1;
        TRY(json_f64_opt(o, keys[i], &v[i], where));
        if (!c->family->multipliers && json_is_number(json_object_get(o, keys[i])))
            FAIL(ERR_UNSUPPORTED, "%s: unsupported %s %g of a %s model", where, keys[i], v[i], c->family->type);
        if (!(v[i] > 1e-6 && v[i] < 1e6)) FAIL(ERR_FORMAT, "%s: \"%s\" is %g, outside 1e-6 .. 1e6", where, keys[i], v[i]);
    }
    c->stream_eps = (float)(eps / (v[1] * v[1]));
    double scalar = c->family->query_scalar;
    if (scalar > 0) TRY(json_f64_opt(o, "query_pre_attn_scalar", &scalar, where));
    else scalar = (double)model_query_dim(c);
    if (!(scalar > 0 && scalar < 1e6)) FAIL(ERR_FORMAT, "%s: \"query_pre_attn_scalar\" is %g", where, scalar);
    c->embed_scale = (float)(c->family->scaled_embedding ? sqrt((double)c->hidden) : v[0] / v[1]);
    c->attn_scale = (float)(c->family->multipliers ? v[2] : 1.0 / sqrt(scalar));
    c->logit_scale = (float)(1.0 / v[3]);
    return 0;
}

/* A softcap; null is none. */
static int parse_softcap(const struct model_config *c, float *out, const json_t *o, const char *key, double without,
                         const char *where) {
    double v = json_object_get(o, key) ? 0 : without;
    TRY(json_f64_opt(o, key, &v, where));
    if (v != 0 && !c->family->softcaps)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported %s %g of a %s model", where, key, v, c->family->type);
    if (!(v >= 0 && v < 1e6)) FAIL(ERR_FORMAT, "%s: \"%s\" is %g, outside 0 .. 1e6", where, key, v);
    *out = (float)v;
    return 0;
}

/* "hidden_act", which "hidden_activation" overrides in families with GELU; there "gelu" of old files means the tanh form. */
static int parse_activation(const struct model_config *c, const json_t *o, const char *where) {
    const bool gelu = c->family->gelu;
    const char *act = gelu ? "gelu_pytorch_tanh" : "silu", *newer = NULL;
    TRY(json_str_opt(o, "hidden_act", &act, where));
    if (gelu) TRY(json_str_opt(o, "hidden_activation", &newer, where));
    if (newer) act = newer;
    const bool known = gelu ? strcmp(act, "gelu_pytorch_tanh") == 0 || (!newer && strcmp(act, "gelu") == 0)
                            : strcmp(act, "silu") == 0 || strcmp(act, "swish") == 0;
    if (!known)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported hidden_act \"%s\"; verlc has %s", where, act,
             gelu ? "gelu_pytorch_tanh for this family" : "silu");
    return 0;
}

static int parse_features(struct model_config *c, const json_t *o, const char *where) {
    const struct model_family *const f = c->family;
    bool both_ways = false;
    double eps = f->rms_eps ? f->rms_eps : 1e-6;
    c->init_range = 0.02;
    c->tied = f->tied;
    TRY(json_bool_opt(o, "tie_word_embeddings", &c->tied, where));
    TRY(json_f64_opt(o, "rms_norm_eps", &eps, where));
    TRY(json_f64_opt(o, "initializer_range", &c->init_range, where));
    TRY(parse_activation(c, o, where));
    TRY(parse_softcap(c, &c->attn_softcap, o, "attn_logit_softcapping", f->attn_softcap, where));
    TRY(parse_softcap(c, &c->logit_softcap, o, "final_logit_softcapping", f->logit_softcap, where));
    TRY(json_bool_opt(o, "use_bidirectional_attention", &both_ways, where));
    if (both_ways) FAIL(ERR_UNSUPPORTED, "%s: unsupported use_bidirectional_attention", where);
    if (!(eps > 0 && eps < 1)) FAIL(ERR_FORMAT, "%s: \"rms_norm_eps\" is %g, outside (0, 1)", where, eps);
    if (!(c->init_range >= 0 && c->init_range <= 100))
        FAIL(ERR_FORMAT, "%s: \"initializer_range\" is %g, outside 0 .. 100", where, c->init_range);
    c->rms_eps = (float)eps;
    TRY(parse_multipliers(c, o, eps, where));
    c->features = f->features;
    for (size_t i = 0; i < sizeof f->keys / sizeof *f->keys && f->keys[i].key; i++) {
        bool on = f->features & f->keys[i].features;
        TRY(json_bool_opt(o, f->keys[i].key, &on, where));
        c->features = on ? c->features | f->keys[i].features : c->features & ~f->keys[i].features;
    }
    static const char *const dropouts[] = {"attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop",
                                           "router_jitter_noise"};
    for (size_t i = 0; i < sizeof dropouts / sizeof *dropouts; i++) {
        double dropout = 0;
        TRY(json_f64_opt(o, dropouts[i], &dropout, where));
        if (dropout > 0) log_note("%s: %s %g is not applied in training", where, dropouts[i], dropout);
    }
    const json_t *const clip = json_object_get(o, "clip_qkv"); /* OLMoE */
    if (clip && !json_is_null(clip)) FAIL(ERR_UNSUPPORTED, "%s: unsupported clip_qkv; verlc has it null", where);
    const json_t *chunks = json_object_get(o, "dual_chunk_attention_config");
    if (json_is_object(chunks)) /* Qwen2.5-1M */
        log_note(
            "%s: dual_chunk_attention_config is not applied, as in transformers: within chunk_size - local_size = %lld tokens it "
            "changes nothing",
            where,
            (long long)(json_integer_value(json_object_get(chunks, "chunk_size")) -
                        json_integer_value(json_object_get(chunks, "local_size"))));
    return read_quantization(c, json_object_get(o, "quantization_config"), where);
}

/* ---- sliding window ---- */

/* ---- what differs between layers ---- */

/* What a family's rule and config.json say of windows, where "layer_types" does not. */
struct window_rule {
    enum model_windows kind;
    int64_t n;           /* MODEL_WINDOW_FROM: first layer; MODEL_WINDOW_EVEN: end; MODEL_WINDOW_PATTERN: each n-th has none, 0:
                            all have none */
    const char *pattern; /* of L and G, or NULL */
};

static int parse_window_rule(struct window_rule *r, const struct model_config *c, const json_t *o, const char *where) {
    const json_t *const pattern = json_object_get(o, "sliding_window_pattern");
    *r = (struct window_rule){.kind = c->family->windows};
    if (r->kind == MODEL_WINDOW_FROM || r->kind == MODEL_WINDOW_EVEN) {
        r->n = 28;
        TRY(json_i64_opt(o, "max_window_layers", &r->n, where));
    }
    if (r->kind == MODEL_WINDOW_PATTERN) {
        r->n = pattern && json_is_null(pattern) ? 0 : c->family->window_pattern;
        r->pattern = json_string_value(pattern);
        if (!r->pattern) TRY(json_i64_opt(o, "sliding_window_pattern", &r->n, where));
        if (r->pattern && (!*r->pattern || strspn(r->pattern, "LG") != strlen(r->pattern)))
            FAIL(ERR_FORMAT, "%s: \"sliding_window_pattern\" is \"%s\", not a number or a text of L and G", where, r->pattern);
    }
    if (r->n < 0) FAIL(ERR_FORMAT, "%s: negative \"sliding_window_pattern\" or \"max_window_layers\"", where);
    return 0;
}

static bool rule_windows(const struct window_rule *r, const struct model_config *c, int64_t l) {
    if (r->kind == MODEL_WINDOW_NO_ROPE) return c->layer[l] & MODEL_NO_ROPE;
    if (r->kind == MODEL_WINDOW_FROM) return l >= r->n;
    if (r->kind == MODEL_WINDOW_EVEN) return l % 2 == 0 && l < r->n;
    if (r->kind != MODEL_WINDOW_PATTERN) return true;
    if (r->pattern) return r->pattern[(size_t)l % strlen(r->pattern)] == 'L' && l + 1 < c->n_layers;
    return r->n > 0 && (l + 1) % r->n != 0;
}

/* Entry l of layer_types, or what the rule says. */
static int layer_windowed(const struct window_rule *r, const struct model_config *c, const json_t *types, int64_t l,
                          const char *where, bool *out) {
    const char *const t = json_string_value(json_array_get(types, (size_t)l));
    *out = types ? t && strcmp(t, "sliding_attention") == 0 : rule_windows(r, c, l);
    if (types && !*out && !(t && strcmp(t, "full_attention") == 0))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported layer_types entry \"%s\"; verlc has full_attention and sliding_attention", where,
             t ? t : "(not a string)");
    return 0;
}

/* Of a family whose layers are all alike. */
static int refuse_layer_types(const struct model_config *c, const json_t *types, const char *where) {
    for (size_t l = 0; l < json_array_size(types); l++) {
        const char *const t = json_string_value(json_array_get(types, l));
        if (!t || strcmp(t, "full_attention") != 0)
            FAIL(ERR_UNSUPPORTED, "%s: unsupported layer_types entry \"%s\" of a %s model", where, t ? t : "(not a string)",
                 c->family->type);
    }
    return 0;
}

static int parse_window(struct model_config *c, const json_t *o, const char *where) {
    const enum model_windows kind = c->family->windows;
    const json_t *types = json_object_get(o, "layer_types");
    struct window_rule rule;
    bool use = kind == MODEL_WINDOW_ALL || kind == MODEL_WINDOW_PATTERN, any = false;
    if (kind == MODEL_NO_WINDOW) return c->family->delta_interval || c->family->hybrid ? 0 : refuse_layer_types(c, types, where);
    if (!json_is_array(types) || kind == MODEL_WINDOW_ALL || kind == MODEL_WINDOW_USED) types = NULL;
    if (types && (int64_t)json_array_size(types) != c->n_layers)
        FAIL(ERR_FORMAT, "%s: \"layer_types\" has %zu entries for %lld layers", where, json_array_size(types),
             (long long)c->n_layers);
    TRY(parse_window_rule(&rule, c, o, where));
    c->window = json_object_get(o, "sliding_window") ? 0 : c->family->window;
    TRY(json_i64_opt(o, "sliding_window", &c->window, where));
    if (!use) TRY(json_bool_opt(o, "use_sliding_window", &use, where));
    if (c->window < 0) FAIL(ERR_FORMAT, "%s: negative \"sliding_window\"", where);
    if (!use) c->window = 0;
    for (int64_t l = 0; l < c->n_layers; l++) {
        bool windowed;
        TRY(layer_windowed(&rule, c, types, l, where, &windowed));
        if (c->window > 0 && windowed) c->layer[l] |= MODEL_WINDOWED;
        else if (c->window > 0 && c->family->rope_layers == MODEL_ROPE_WINDOWS) c->layer[l] |= MODEL_NO_ROPE;
        any = any || c->layer[l] & MODEL_WINDOWED;
    }
    if (!any) c->window = 0;
    return 0;
}

static int parse_rope_layers(struct model_config *c, const json_t *o, const char *where) {
    const json_t *list = json_object_get(o, "no_rope_layers");
    const char *kind = NULL;
    int64_t every = 4;
    TRY(json_str_opt(o, "position_embedding_type", &kind, where));
    for (int64_t l = 0; c->family->rope_layers == MODEL_ROPE_NAMED && l < c->n_layers; l++)
        if (!kind || strcmp(kind, "rope") != 0) c->layer[l] |= MODEL_NO_ROPE;
    if (c->family->rope_layers != MODEL_ROPE_LISTED) {
        if (json_is_array(list)) FAIL(ERR_UNSUPPORTED, "%s: unsupported no_rope_layers of a %s model", where, c->family->type);
        return 0;
    }
    if (!json_is_array(list)) list = NULL;
    if (list && (int64_t)json_array_size(list) != c->n_layers)
        FAIL(ERR_FORMAT, "%s: \"no_rope_layers\" has %zu entries for %lld layers", where, json_array_size(list),
             (long long)c->n_layers);
    TRY(json_i64_opt(o, "no_rope_layer_interval", &every, where));
    if (every < 1) FAIL(ERR_FORMAT, "%s: \"no_rope_layer_interval\" is %lld, below 1", where, (long long)every);
    for (int64_t l = 0; l < c->n_layers; l++) {
        const json_t *const has = json_array_get(list, (size_t)l);
        if (list && !json_is_integer(has) && !json_is_boolean(has))
            FAIL(ERR_FORMAT, "%s: \"no_rope_layers\" is not a list of 0 and 1", where);
        if (list ? json_is_false(has) || (json_is_integer(has) && json_integer_value(has) == 0) : (l + 1) % every == 0)
            c->layer[l] |= MODEL_NO_ROPE;
    }
    return 0;
}

/* ---- dtype and end tokens ---- */

static int parse_dtype(struct model_config *c, const json_t *o, const char *where) {
    const char *name = NULL;
    TRY(json_str_opt(o, "torch_dtype", &name, where));
    TRY(json_str_opt(o, "dtype", &name, where));
    c->dtype = DT_F32;
    if (!name) return 0;
    if (strncmp(name, "torch.", 6) == 0) name += 6;
    if (strcmp(name, "bfloat16") == 0) c->dtype = DT_BF16;
    else if (strcmp(name, "float16") == 0) c->dtype = DT_F16;
    else if (strcmp(name, "float32") != 0)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported dtype \"%s\"; verlc reads float32, bfloat16 and float16", where, name);
    return 0;
}

static int parse_eos(struct model_config *c, const json_t *v, const char *where) {
    const size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > sizeof c->eos / sizeof c->eos[0])
        FAIL(ERR_UNSUPPORTED, "%s: unsupported list of %zu end tokens (at most 16)", where, n);
    c->n_eos = 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id)) FAIL(ERR_FORMAT, "%s: \"eos_token_id\" is not a token id or a list of them", where);
        c->eos[c->n_eos++] = json_integer_value(id);
    }
    return 0;
}

static int parse_tokens(struct model_config *c, const json_t *o, const char *where) {
    const json_t *eos = json_object_get(o, "eos_token_id");
    if (eos && !json_is_null(eos)) TRY(parse_eos(c, eos, where));
    TRY(json_i64_opt(o, "bos_token_id", &c->bos, where));
    return json_i64_opt(o, "pad_token_id", &c->pad, where);
}

/* ---- public ---- */

int model_config_from_json(struct model_config *c, const json_t *o, const char *where) {
    struct model_config t = {.bos = -1, .pad = -1};
    const json_t *const all = o;
    if (!json_is_object(o)) FAIL(ERR_FORMAT, "%s: not a JSON object", where);
    TRY(parse_family(&t, all, &o, where));
    TRY(parse_shape(&t, o, where));
    TRY(parse_features(&t, o, where));
    TRY(parse_rope_layers(&t, o, where));
    TRY(parse_window(&t, o, where));
    TRY(model__parse_rope(&t, o, where));
    if (t.outer) TRY(json_bool_opt(all, "tie_word_embeddings", &t.tied, where));
    if (t.outer) TRY(read_quantization(&t, json_object_get(all, "quantization_config"), where));
    TRY(parse_dtype(&t, json_object_get(o, "dtype") || json_object_get(o, "torch_dtype") ? o : all, where));
    TRY(parse_tokens(&t, o, where));
    t.json = json_deep_copy(all);
    CHECK(t.json != NULL);
    *c = t;
    return 0;
}

static int load_generation(struct model_config *c, const char *dir) {
    char *path;
    int rc = 0;
    TRY(file_in_dir(&path, dir, "generation_config.json"));
    if (!path) return 0;
    TRYG(json_load(&c->generation_json, path, MAX_CONFIG_BYTES), out);
    if (!json_is_object(c->generation_json)) FAILG(out, ERR_FORMAT, "%s: not a JSON object", path);
    TRYG(parse_tokens(c, c->generation_json, path), out);
out:
    free(path);
    return rc;
}

/* A directory without config.json: it may be an adapter, whose model is elsewhere. */
static int refuse_dir(const char *dir) {
    char *path = NULL;
    json_t *o = NULL;
    int rc = file_in_dir(&path, dir, "adapter_config.json");
    if (rc == 0 && path) rc = json_load(&o, path, MAX_CONFIG_BYTES);
    const char *base = json_string_value(json_object_get(o, "base_model_name_or_path"));
    if (rc == 0 && !path)
        rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: no config.json; is this a Hugging Face model directory?", dir);
    else if (rc == 0)
        rc = err_set(
            ERR_INPUT, __FILE__, __LINE__,
            "%s is a LoRA adapter, not a model; give its base model%s%s as the model and the adapter in addition (--adapter "
            "DIR; the key lora_adapter_path=DIR next to the model's path), or make one model of both with 'verlc model "
            "merge --adapter %s --out DIR'",
            dir, base ? " " : "", base ? base : "", dir);
    json_decref(o);
    free(path);
    return rc;
}

int model_config_load(struct model_config *c, const char *dir) {
    int rc = 0;
    struct model_config t = {0};
    json_t *o = NULL;
    char *path = NULL;
    if (!file_exists(dir)) FAILG(out, ERR_INPUT, "model directory %s does not exist", dir);
    if (!file_is_dir(dir)) FAILG(out, ERR_INPUT, "%s is not a model directory", dir);
    TRYG(file_in_dir(&path, dir, "config.json"), out);
    if (!path) TRYG(refuse_dir(dir), out);
    TRYG(json_load(&o, path, MAX_CONFIG_BYTES), out);
    TRYG(model_config_from_json(&t, o, path), out);
    TRYG(load_generation(&t, dir), out);
    *c = t;
    t = (struct model_config){0};
out:
    model_config_free(&t);
    json_decref(o);
    free(path);
    return rc;
}

void model_config_free(struct model_config *c) {
    json_decref(c->json);
    json_decref(c->generation_json);
    c->json = c->generation_json = NULL;
}

void model_config_make_value(struct model_config *c) {
    char name[64];
    snprintf(name, sizeof name, "%sForTokenClassification", c->family->class_prefix);
    if (c->outer) { /* a classifier has the text alone */
        json_t *const text = json_deep_copy(json_object_get(c->json, "text_config"));
        CHECK(text != NULL);
        json_object_set_new(text, "model_type", json_string(c->family->type));
        json_decref(c->json);
        c->json = text;
        c->outer = false;
    }
    c->value = true;
    c->value_bias = !json_is_false(json_object_get(c->json, "token_classification_bias"));
    json_object_set_new(c->json, "architectures", json_pack("[s]", name));
    /* one label; transformers derives num_labels from the length of id2label */
    json_object_set_new(c->json, "id2label", json_pack("{s:s}", "0", "LABEL_0"));
    json_object_set_new(c->json, "label2id", json_pack("{s:i}", "LABEL_0", 0));
    json_object_set_new(c->json, "classifier_dropout", json_real(0)); /* as verl sets it */
}

int model_config_use_mtp(struct model_config *c, bool detached, const char *where) {
    if (c->mtp_layers != 1)
        FAIL(ERR_UNSUPPORTED,
             "%s: unsupported %lld layers for multi-token prediction of a %s model; mtp.enable wants one, of MiMo, Qwen3.5 or "
             "Qwen3-Next",
             where, (long long)c->mtp_layers, c->family->type);
    bool own_embeddings = false;
    TRY(json_bool_opt(model_text_json(c->json), "mtp_use_dedicated_embeddings", &own_embeddings, where));
    if (own_embeddings)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported mtp_use_dedicated_embeddings; an MTP layer has the model's embeddings", where);
    c->mtp = true;
    c->mtp_detached = detached;
    c->layer[model_mtp_layer(c)] = c->n_experts ? MODEL_SPARSE : 0;
    return 0;
}

static const char *architecture(const struct model_config *c) {
    return json_string_value(json_array_get(json_object_get(c->json, "architectures"), 0));
}

bool model_config_classifies(const struct model_config *c) {
    static const char head[] = "ForSequenceClassification";
    const char *name = architecture(c);
    const size_t n = name ? strlen(name) : 0, k = sizeof head - 1;
    return n >= k && strcmp(name + n - k, head) == 0;
}

int model_config_make_reward(struct model_config *c, const char *where) {
    const char *name = architecture(c);
    if (!model_config_classifies(c))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported architecture %s for a reward model; verlc has ForSequenceClassification of %s",
             where, name ? name : "(none)", model_family_types);
    /* transformers derives num_labels from id2label and leaves 2 where neither is there */
    const json_t *labels = json_object_get(c->json, "id2label");
    int64_t n_labels = json_is_object(labels) ? (int64_t)json_object_size(labels) : 2;
    if (!json_is_object(labels)) TRY(json_i64_opt(c->json, "num_labels", &n_labels, where));
    if (n_labels != 1)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported classifier of %lld labels; a reward model has one (id2label in config.json)", where,
             (long long)n_labels);
    c->value = true;
    c->value_bias = false;
    return 0;
}

int64_t model_reward_row(const struct model_config *c, const int32_t *ids, int64_t n) {
    for (int64_t t = n - 1; t > 0; t--)
        if (ids[t] != c->pad || c->pad < 0) return t;
    return 0;
}

/* Of all layers: matrices that a token meets, or everything. */
static int64_t layers_params(const struct model_config *c, bool active) {
    int64_t n = 0;
    for (int64_t l = 0; l < model_layer_places(c); l++) {
        const int features = model_layer_features(c, l);
        if (l == c->n_layers) continue;
        for (const struct model_group_row *g = c->family->layer; g->part->name; g++) {
            const bool matrix = g->role == MODEL_LINEAR || g->role == MODEL_ROUTER || g->role == MODEL_EXPERTS;
            const int64_t count = active && g->role == MODEL_EXPERTS ? c->n_choices : model_matrices(c, g->role);
            if (g->needs & ~features || (active && !matrix)) continue;
            const int64_t bias = !active && g->bias & features ? 1 : 0;
            for (int i = 0; i < MODEL_MAX_PARTS && g->part[i].name; i++)
                n += count * model_dim(c, g->part[i].rows) * (model_dim(c, g->cols) + bias);
        }
    }
    return n;
}
int64_t model_attention_layers(const struct model_config *c) {
    int64_t n = 0;
    for (int64_t l = 0; l < c->n_layers; l++) n += !model_layer_is_delta(c, l);
    return n;
}
int64_t model_config_linear_params(const struct model_config *c) {
    return layers_params(c, true) + (c->mtp ? 2 * c->hidden * c->hidden : 0);
}

int64_t model_config_params(const struct model_config *c) {
    const int64_t h = c->hidden, head = c->value ? h + (c->value_bias ? 1 : 0) : c->tied ? 0 : c->vocab * h;
    return layers_params(c, false) + c->vocab * h + head + h + (c->mtp ? 2 * h * h + 3 * h : 0);
}
