/* config_rope.c - what config.json says of rotary embeddings, in the spellings of transformers 4 (rope_theta, rope_scaling) and 5
 * (rope_parameters). The angles are rope.c's.
 * Invariant: no table has a frequency that is infinite or NaN. */
#include "model/config_int.h"

#include "base/err.h"
#include "base/json.h"
#include "model/families.h"

#include <string.h>

static const char *const rope_names[] = {"default", "linear",   "dynamic",  "llama3",
                                         "yarn",    "longrope", "ntk_alpha"}; /* by enum rope_kind */
enum { N_ROPES = sizeof rope_names / sizeof *rope_names };
const char *model_rope_name(enum rope_kind kind) { return rope_names[kind]; }

static int parse_rope_kind(const struct model_family *f, struct model_rope *t, const json_t *r, const char *where) {
    const char *type = "default";
    TRY(json_str_opt(r, "type", &type, where));
    TRY(json_str_opt(r, "rope_type", &type, where));
    if (f->longrope_aliases && (strcmp(type, "su") == 0 || strcmp(type, "yarn") == 0)) type = "longrope";
    for (int i = 0; i < N_ROPES; i++) {
        if (strcmp(type, rope_names[i]) != 0 || i == ROPE_NTK_ALPHA) continue;
        t->kind = (enum rope_kind)i;
        if (t->kind == ROPE_DYNAMIC && f->ntk_alpha && json_number_value(json_object_get(r, "alpha")) != 0)
            t->kind = ROPE_NTK_ALPHA;
        return 0;
    }
    FAIL(ERR_UNSUPPORTED, "%s: unsupported rope type \"%s\"; verlc has default, linear, dynamic, llama3, yarn and longrope", where,
         type);
}

/* short_factor or long_factor: a number for each pair. */
static int check_longrope_list(const struct model_rope *t, const json_t *r, const char *key, const char *where) {
    const json_t *list = json_object_get(r, key);
    if (!json_is_array(list) || (int64_t)json_array_size(list) != t->dim / 2)
        FAIL(ERR_FORMAT, "%s: rope \"%s\" is not a list of %lld numbers", where, key, (long long)(t->dim / 2));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const double v = json_number_value(json_array_get(list, i));
        if (!(v > 1e-6 && v < 1e6)) FAIL(ERR_FORMAT, "%s: rope \"%s\" entry %zu is not a positive number", where, key, i);
    }
    return 0;
}

/* The length of training that config.json names at its top wins over the one of rope, as in transformers. */
static int parse_longrope(const struct model_config *c, struct model_rope *t, const json_t *r, const json_t *o, const char *where) {
    TRY(json_i64_opt(o, "original_max_position_embeddings", &t->original_max_pos, where));
    if (t->original_max_pos < 2)
        FAIL(ERR_FORMAT, "%s: \"original_max_position_embeddings\" is %lld", where, (long long)t->original_max_pos);
    t->factor = (double)c->max_pos / (double)t->original_max_pos;
    TRY(json_f64_opt(r, "factor", &t->factor, where));
    TRY(json_f64_opt(r, "attention_factor", &t->attention_factor, where));
    if (!(t->attention_factor >= 0 && t->attention_factor < 1e6))
        FAIL(ERR_FORMAT, "%s: rope \"attention_factor\" is %g, outside 0 .. 1e6", where, t->attention_factor);
    TRY(check_longrope_list(t, r, "short_factor", where));
    return check_longrope_list(t, r, "long_factor", where);
}

/* The keys of one kind; each is checked so that no frequency is infinite or NaN. */
static int parse_rope_scaling(const struct model_config *c, struct model_rope *t, const json_t *r, const json_t *o,
                              const char *where) {
    t->factor = 1;
    t->original_max_pos = c->max_pos;
    t->beta_fast = 32;
    t->beta_slow = 1;
    t->truncate = true;
    if (t->kind == ROPE_DEFAULT) return 0;
    TRY(json_i64_opt(r, "original_max_position_embeddings", &t->original_max_pos, where));
    if (t->original_max_pos < 1)
        FAIL(ERR_FORMAT, "%s: rope \"original_max_position_embeddings\" is %lld", where, (long long)t->original_max_pos);
    if (t->kind == ROPE_YARN) { /* transformers: an absent factor is the ratio of the lengths */
        t->factor = (double)c->max_pos / (double)t->original_max_pos;
        TRY(json_f64_opt(r, "factor", &t->factor, where));
        TRY(json_f64_opt(r, "attention_factor", &t->attention_factor, where));
        TRY(json_f64_opt(r, "beta_fast", &t->beta_fast, where));
        TRY(json_f64_opt(r, "beta_slow", &t->beta_slow, where));
        TRY(json_f64_opt(r, "mscale", &t->mscale, where));
        TRY(json_f64_opt(r, "mscale_all_dim", &t->mscale_all_dim, where));
        TRY(json_bool_opt(r, "truncate", &t->truncate, where));
        if (t->beta_fast == 0) t->beta_fast = 32;
        if (t->beta_slow == 0) t->beta_slow = 1;
        const double factors[] = {t->attention_factor, t->beta_fast, t->beta_slow, t->mscale, t->mscale_all_dim};
        for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++)
            if (!(factors[i] >= 0 && factors[i] < 1e6))
                FAIL(ERR_FORMAT, "%s: a yarn factor of rope is %g, outside 0 .. 1e6", where, factors[i]);
    } else if (t->kind == ROPE_LONGROPE) {
        TRY(parse_longrope(c, t, r, o, where));
    } else {
        TRY(json_f64(r, t->kind == ROPE_NTK_ALPHA ? "alpha" : "factor", &t->factor, where));
    }
    if (!(t->factor > 0 && t->factor < 1e6))
        FAIL(ERR_FORMAT, "%s: rope \"factor\" is %g, expected a positive number", where, t->factor);
    if (t->kind == ROPE_NTK_ALPHA && t->dim <= 2)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported rope with alpha of heads of %lld", where, (long long)t->dim);
    if (t->kind == ROPE_DYNAMIC && (t->dim <= 2 || t->factor < 1))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported dynamic rope with head_dim %lld and factor %g", where, (long long)t->dim, t->factor);
    if (t->kind == ROPE_LLAMA3) {
        TRY(json_f64(r, "low_freq_factor", &t->low_freq_factor, where));
        TRY(json_f64(r, "high_freq_factor", &t->high_freq_factor, where));
        if (!(t->low_freq_factor > 0 && t->high_freq_factor > t->low_freq_factor))
            FAIL(ERR_FORMAT, "%s: rope \"high_freq_factor\" must be above \"low_freq_factor\", both positive", where);
    }
    return 0;
}

/* One table, of the object that describes it (NULL: plain) with what the top level says. */
static int parse_rope_of(const struct model_config *c, struct model_rope *t, const json_t *r, const json_t *o, const char *where) {
    double partial = c->family->partial_rotary ? c->family->partial_rotary : 1;
    if (c->family->rotary_dim && json_is_integer(json_object_get(o, "rotary_dim")))
        partial = (double)json_integer_value(json_object_get(o, "rotary_dim")) / (double)c->head_dim;
    TRY(json_f64_opt(o, "partial_rotary_factor", &partial, where));
    if (json_is_object(r)) {
        TRY(json_f64_opt(r, "rope_theta", &t->theta, where));
        TRY(json_f64_opt(r, "partial_rotary_factor", &partial, where));
        TRY(parse_rope_kind(c->family, t, r, where));
    }
    t->dim = partial > 0 && partial <= 1 ? (int64_t)((double)model_rope_dim(c) * partial) : 0;
    if ((partial != 1 && !c->family->partial_rotary) || t->dim < 2 || t->dim % 2 != 0)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported partial_rotary_factor %g of heads of %lld", where, partial, (long long)c->head_dim);
    if (!json_is_object(r) && c->family->needs_rope)
        FAIL(ERR_INPUT, "%s: a %s model needs \"rope_parameters\" or \"rope_scaling\"", where, c->family->type);
    if (json_is_object(r) && c->family->query_scale) TRY(json_f64_opt(r, "llama_4_scaling_beta", &t->query_beta, where));
    else if (c->family->query_scale) FAIL(ERR_INPUT, "%s: a %s model needs \"rope_parameters\"", where, c->family->type);
    if (!(t->query_beta >= 0 && t->query_beta < 1e3))
        FAIL(ERR_FORMAT, "%s: rope \"llama_4_scaling_beta\" is %g, outside 0 .. 1e3", where, t->query_beta);
    if (!(t->theta > 1 && t->theta < 1e30))
        FAIL(ERR_FORMAT, "%s: \"rope_theta\" is %g, expected a number above 1", where, t->theta);
    return parse_rope_scaling(c, t, r, o, where);
}

const json_t *model_rope_json(const json_t *o) {
    const json_t *const r = json_object_get(o, "rope_parameters");
    return json_is_object(r) ? r : json_object_get(o, "rope_scaling");
}

int model__parse_rope(struct model_config *c, const json_t *o, const char *where) {
    const char *const local = c->family->local_theta;
    const json_t *const r = model_rope_json(o);
    const json_t *const full = json_object_get(r, "full_attention"), *const sliding = json_object_get(r, "sliding_attention");
    const bool by_type = json_is_object(full) || json_is_object(sliding);
    if (by_type && !local) FAIL(ERR_UNSUPPORTED, "%s: unsupported rope_parameters that differ between layers", where);
    c->rope.theta = c->family->theta > 0 ? c->family->theta : 10000;
    TRY(json_f64_opt(o, "rope_theta", &c->rope.theta, where));
    if (local) {
        c->has_local_rope = true;
        c->local_rope.theta = strcmp(local, "rope_theta") == 0 ? c->rope.theta : 10000;
        TRY(json_f64_opt(o, local, &c->local_rope.theta, where));
        TRY(parse_rope_of(c, &c->local_rope, by_type ? sliding : NULL, o, where));
    }
    TRY(parse_rope_of(c, &c->rope, by_type ? full : r, o, where));
    if (c->mla.kv_rank) c->attn_scale *= model_mla_scale(&c->rope);
    return 0;
}
