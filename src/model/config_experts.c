/* config_experts.c - what config.json says of mixtures of experts: sizes, groups, scores, shared experts, and which layers have
 * them. What differs between families is in families.c.
 * Invariant: what is not supported is refused by name. */
#include "model/config_int.h"

#include "base/err.h"
#include "base/json.h"
#include "device/ops.h"
#include "model/families.h"

#include <string.h>

/* Which layers have experts: those that "mlp_only_layers" does not list, of each "decoder_sparse_step". */
static int parse_sparse_layers(struct model_config *c, const json_t *o, const char *where) {
    const json_t *const dense = json_object_get(o, "mlp_only_layers");
    int64_t step = 1;
    TRY(json_i64_opt(o, "decoder_sparse_step", &step, where));
    if (step < 1) FAIL(ERR_FORMAT, "%s: \"decoder_sparse_step\" is %lld, below 1", where, (long long)step);
    for (int64_t l = step - 1; l < c->n_layers; l += step) c->layer[l] |= MODEL_SPARSE;
    for (size_t i = 0; i < json_array_size(dense); i++) {
        const json_t *const l = json_array_get(dense, i);
        if (!json_is_integer(l)) FAIL(ERR_FORMAT, "%s: \"mlp_only_layers\" is not a list of layers", where);
        if (json_integer_value(l) >= 0 && json_integer_value(l) < c->n_layers)
            c->layer[json_integer_value(l)] &= (unsigned char)~MODEL_SPARSE;
    }
    return 0;
}

/* "topk_method", as remote code and transformers have it. */
static int parse_topk_method(const struct model_config *c, const json_t *o, const char *where, bool *grouped) {
    const bool greedy = c->family->experts.greedy;
    const char *method = greedy ? "greedy" : "noaux_tc";
    bool normalize = false;
    TRY(json_str_opt(o, "topk_method", &method, where));
    *grouped = strcmp(method, greedy ? "group_limited_greedy" : "noaux_tc") == 0;
    if (!*grouped && !(greedy && strcmp(method, "greedy") == 0))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported topk_method \"%s\" of a %s model", where, method, c->family->type);
    if (greedy) TRY(json_bool_opt(o, "norm_topk_prob", &normalize, where));
    if (normalize) FAIL(ERR_UNSUPPORTED, "%s: unsupported norm_topk_prob of a %s model", where, c->family->type);
    return 0;
}

/* Groups of experts (DeepSeek-V2, DeepSeek-V3). */
static int parse_expert_groups(struct model_config *c, const json_t *o, const char *where) {
    const struct config_dim dims[] = {{"n_group", &c->expert_groups, 1, DEV_MAX_EXPERT_GROUPS},
                                      {"topk_group", &c->top_groups, 1, DEV_MAX_EXPERT_GROUPS}};
    const struct model_experts_row *const row = &c->family->experts;
    const char *scoring = NULL;
    bool grouped;
    c->expert_groups = c->top_groups = 1;
    if (!row->groups) return 0;
    TRY(parse_topk_method(c, o, where, &grouped));
    if (grouped) TRY(model__parse_dims(o, where, dims, 2));
    const int64_t n = c->expert_groups, each = c->n_experts / n;
    if (c->n_experts % n || c->top_groups > n || c->top_groups * each < c->n_choices || (n > 1 && row->sigmoid && each < 2))
        FAIL(ERR_FORMAT, "%s: %lld of %lld experts in %lld of %lld groups", where, (long long)c->n_choices, (long long)c->n_experts,
             (long long)c->top_groups, (long long)n);
    TRY(json_str_opt(o, "scoring_func", &scoring, where));
    if (scoring && strcmp(scoring, row->sigmoid ? "sigmoid" : "softmax") != 0)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported scoring_func \"%s\" of a %s model", where, scoring, c->family->type);
    return 0;
}

/* What the weights of a token's experts are multiplied by. */
static int parse_route_scale(struct model_config *c, const json_t *o, const char *where) {
    const char *const key = c->family->experts.scale_key;
    if (!key) return 0;
    c->route_scale = c->family->experts.scale;
    TRY(json_f64_opt(o, key, &c->route_scale, where));
    if (!(c->route_scale > 1e-6 && c->route_scale < 1e6))
        FAIL(ERR_FORMAT, "%s: \"%s\" is %g, outside 1e-6 .. 1e6", where, key, c->route_scale);
    return 0;
}

static int parse_swiglu_limits(struct model_config *c, const json_t *o, const char *where) {
    if (!c->family->experts.clamped) return 0;
    c->swiglu_alpha = 1.702;
    c->swiglu_limit = 7;
    TRY(json_f64_opt(o, "swiglu_alpha", &c->swiglu_alpha, where));
    TRY(json_f64_opt(o, "swiglu_limit", &c->swiglu_limit, where));
    if (!(c->swiglu_alpha > 0 && c->swiglu_alpha < 1e3 && c->swiglu_limit > 0 && c->swiglu_limit < 1e6))
        FAIL(ERR_FORMAT, "%s: \"swiglu_alpha\" is %g, \"swiglu_limit\" %g, expected positive numbers", where, c->swiglu_alpha,
             c->swiglu_limit);
    return 0;
}

/* Experts that all tokens have, as one MLP. */
static int parse_shared_expert(struct model_config *c, const json_t *o, const char *where) {
    const struct model_experts_row *const row = &c->family->experts;
    const struct config_dim width[] = {{"shared_expert_intermediate_size", &c->shared_ffn, row->shared, 1 << 22}};
    int64_t n = row->n_shared;
    if (row->shared) return model__parse_dims(o, where, width, 1);
    if (!n) return 0;
    const char *const key = row->n_shared_key ? row->n_shared_key : "n_shared_experts";
    if (json_is_null(json_object_get(o, key))) n = 0;
    TRY(json_i64_opt(o, key, &n, where));
    if (n < 0 || n > DEV_MAX_EXPERTS) FAIL(ERR_FORMAT, "%s: \"%s\" is %lld", where, key, (long long)n);
    c->shared_ffn = n * c->expert_ffn;
    return 0;
}

static const char *experts_key(const json_t *o) { /* all are in use */
    static const char *const keys[] = {"num_experts", "n_routed_experts", "num_local_experts"};
    for (int i = 0; i < 3; i++)
        if (json_object_get(o, keys[i])) return keys[i];
    return keys[0];
}

/* Which layers have experts: those that "mlp_layer_types" calls sparse. */
static int parse_mlp_types(struct model_config *c, const json_t *types, const char *where) {
    if ((int64_t)json_array_size(types) != c->n_layers)
        FAIL(ERR_FORMAT, "%s: \"mlp_layer_types\" is not a list of %lld layers' types", where, (long long)c->n_layers);
    for (int64_t l = 0; l < c->n_layers; l++) {
        const char *const t = json_string_value(json_array_get(types, (size_t)l));
        if (!t || (strcmp(t, "dense") != 0 && strcmp(t, "sparse") != 0))
            FAIL(ERR_UNSUPPORTED, "%s: unsupported mlp_layer_types entry \"%s\"; verlc has dense and sparse", where,
                 t ? t : "(not a string)");
        if (strcmp(t, "sparse") == 0) c->layer[l] |= MODEL_SPARSE;
    }
    return 0;
}

int model__parse_experts(struct model_config *c, const json_t *o, const char *where) {
    const struct model_experts_row *const row = &c->family->experts;
    int64_t first = row->first_dense;
    bool bias = false;
    const struct config_dim dims[] = {
        {experts_key(o), &c->n_experts, row->n, DEV_MAX_EXPERTS},
        {"num_experts_per_tok", &c->n_choices, row->choices, DEV_MAX_CHOICES},
        {row->width_key, &c->expert_ffn, row->width, 1 << 18},
    };
    if (!row->n) return 0;
    TRY(model__parse_dims(o, where, dims, sizeof dims / sizeof dims[0]));
    TRY(json_bool_opt(o, "mlp_bias", &bias, where));
    if (bias) FAIL(ERR_UNSUPPORTED, "%s: unsupported mlp_bias of a %s model", where, c->family->type);
    TRY(parse_shared_expert(c, o, where));
    TRY(parse_swiglu_limits(c, o, where));
    if (c->n_choices > c->n_experts)
        FAIL(ERR_FORMAT, "%s: \"num_experts_per_tok\" is %lld of %lld experts", where, (long long)c->n_choices,
             (long long)c->n_experts);
    TRY(parse_expert_groups(c, o, where));
    TRY(parse_route_scale(c, o, where));
    c->norm_topk = row->normalize || row->norm_key;
    if (!row->normalize) TRY(json_bool_opt(o, "norm_topk_prob", &c->norm_topk, where));
    if (row->dense) return parse_sparse_layers(c, o, where);
    const json_t *const types = json_object_get(o, "mlp_layer_types");
    if (row->mlp_types && types && !json_is_null(types)) return parse_mlp_types(c, types, where);
    if (row->dense_first) TRY(json_i64_opt(o, "first_k_dense_replace", &first, where));
    if (first < 0) FAIL(ERR_FORMAT, "%s: negative \"first_k_dense_replace\"", where);
    for (int64_t l = first; l < c->n_layers; l++) c->layer[l] |= MODEL_SPARSE;
    return 0;
}
