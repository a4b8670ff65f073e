/* lora_config.c - which modules an adapter is on, by peft's rules, and
 * adapter_config.json in and out.
 *
 * A list names modules by their last component (or more of their path); a string
 * is a regular expression for the whole path, or "all-linear", which is every
 * linear layer but lm_head.  Embeddings and lm_head take no adapter here.
 * Invariant: what adapter_config.json requests is done or refused, never skipped. */
#include "model/lora/lora.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"
#include "model/lora/lora_int.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CONFIG = 16 << 20 };

/* ---- matching ---- */

struct rule { /* a list, a regular expression, or neither */
    const json_t *names;
    pcre2_code *re;
    bool *hit; /* per name */
};
struct lora_match {
    bool all_linear;
    struct rule targets, exclude;
    int64_t n_matched;
    const json_t *requested; /* borrowed, for messages */
};

static int rule_regex(struct rule *r, const char *key, const char *pattern) {
    int code;
    PCRE2_SIZE at;
    r->re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_ANCHORED | PCRE2_ENDANCHORED, &code, &at, NULL);
    if (r->re) return 0;
    char why[128];
    pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
    FAIL(ERR_INVAL, "%s: '%s' is not a regular expression: %s at character %zu", key, pattern, why, (size_t)at);
}

static int rule_create(struct rule *r, const char *key, const json_t *v) {
    if (!v || json_is_null(v)) return 0;
    if (json_is_string(v)) return rule_regex(r, key, json_string_value(v));
    if (!json_is_array(v)) FAIL(ERR_INVAL, "%s: expected a list of module names or a regular expression", key);
    for (size_t i = 0; i < json_array_size(v); i++) {
        const char *s = json_string_value(json_array_get(v, i));
        if (!s || !*s) FAIL(ERR_INVAL, "%s: entry %zu is not a module name", key, i);
    }
    r->names = v;
    r->hit = xcalloc(json_array_size(v) + 1, sizeof *r->hit);
    return 0;
}

/* The whole path, or its end from a dot on. */
static bool name_fits(const char *name, const char *module) {
    const size_t n = strlen(name), m = strlen(module);
    return strcmp(name, module) == 0 || (m > n && module[m - n - 1] == '.' && strcmp(module + m - n, name) == 0);
}

static bool rule_fits(struct rule *r, const char *module) {
    bool fits = false;
    if (r->re) {
        pcre2_match_data *d = pcre2_match_data_create_from_pattern(r->re, NULL);
        fits = pcre2_match(r->re, (PCRE2_SPTR)module, strlen(module), 0, 0, d, NULL) >= 0;
        pcre2_match_data_free(d);
    }
    for (size_t i = 0; r->names && i < json_array_size(r->names); i++) {
        if (!name_fits(json_string_value(json_array_get(r->names, i)), module)) continue;
        r->hit[i] = fits = true;
    }
    return fits;
}

static void rule_free(struct rule *r) {
    if (r->re) pcre2_code_free(r->re);
    free(r->hit);
}

int model__lora_match_create(struct lora_match **out, const struct lora_config *l) {
    int rc = 0;
    struct lora_match *t = xcalloc(1, sizeof *t);
    const char *s = json_string_value(l->targets);
    t->requested = l->targets;
    t->all_linear = s && strcasecmp(s, "all-linear") == 0;
    if (!l->targets || json_is_null(l->targets))
        FAILG(fail, ERR_INVAL, "target_modules is null; give all-linear, a list such as [q_proj,v_proj], or a regular expression");
    if (!t->all_linear) TRYG(rule_create(&t->targets, "target_modules", l->targets), fail);
    TRYG(rule_create(&t->exclude, "exclude_modules", l->exclude), fail);
    *out = t;
    return 0;
fail:
    model__lora_match_free(t);
    return rc;
}

void model__lora_match_free(struct lora_match *t) {
    if (!t) return;
    rule_free(&t->targets);
    rule_free(&t->exclude);
    free(t);
}

bool model__lora_match(struct lora_match *t, const char *module) {
    const bool wanted = t->all_linear || rule_fits(&t->targets, module); /* first: an excluded name is still a known one */
    if (!wanted || rule_fits(&t->exclude, module)) return false;
    t->n_matched++;
    return true;
}

/* "q_proj, k_proj, ..." of the linear modules of all layers, experts' included, each once. */
static void add_modules(struct buf *b, const struct model *m) {
    struct map had = {0};
    for (const struct model_group *g = m->layers[0].first; g <= m->layers[m->cfg.n_layers - 1].last; g++) {
        const int64_t n = g->n_params / g->count; /* of the first expert */
        for (int64_t k = g->first_param; k < g->first_param + n && model__adaptable(g); k++) {
            char name[sizeof m->params[k].name];
            snprintf(name, sizeof name, "%s", m->params[k].name);
            *strrchr(name, '.') = '\0'; /* .weight */
            const char *const last = strrchr(name, '.') + 1;
            if (map_gets(&had, last, NULL)) continue;
            map_set(&had, last, strlen(last), 0);
            buf_addf(b, "%s%s", b->n ? ", " : "", last);
        }
    }
    map_free(&had);
}

static int unknown_name(const char *name, const struct model *m) {
    static const char *const without[] = {"lm_head", "embed_tokens"};
    struct buf names = {0};
    const char *last = strrchr(name, '.') ? strrchr(name, '.') + 1 : name;
    add_modules(&names, m);
    int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "target_modules: no linear module is called '%s'; there are %s", name, names.p);
    for (size_t i = 0; i < sizeof without / sizeof *without; i++)
        if (strcmp(last, without[i]) == 0)
            rc = err_set(ERR_UNSUPPORTED, __FILE__, __LINE__, "target_modules: an adapter on %s is unsupported; it can be on %s",
                         name, names.p);
    for (int64_t i = 0; i < m->n_params; i++) {
        const enum model_role role = m->groups[m->params[i].group].role;
        char module[sizeof m->params[i].name];
        snprintf(module, sizeof module, "%s", m->params[i].name);
        *strrchr(module, '.') = '\0'; /* .weight */
        if (role != MODEL_ROUTER || strcmp(last, strrchr(module, '.') + 1) != 0) continue;
        rc = err_set(ERR_UNSUPPORTED, __FILE__, __LINE__,
                     "target_modules: an adapter on %s, the router of the experts, is unsupported; it can be on %s", name, names.p);
        break;
    }
    buf_free(&names);
    return rc;
}

void model__lora_match_head(struct lora_match *t) {
    rule_fits(&t->targets, "score");
    rule_fits(&t->exclude, "score");
}

int model__lora_match_check(const struct lora_match *t, const struct model *m) {
    for (size_t i = 0; t->targets.names && i < json_array_size(t->targets.names); i++)
        if (!t->targets.hit[i]) return unknown_name(json_string_value(json_array_get(t->targets.names, i)), m);
    if (t->n_matched > 0) return 0;
    struct buf names = {0};
    char *requested = json_dumps(t->requested, JSON_ENCODE_ANY);
    add_modules(&names, m);
    const int rc = err_set(
        ERR_INVAL, __FILE__, __LINE__, "target_modules=%s%s matches no module; there are %s in model.layers.0 to %lld", requested,
        t->exclude.names || t->exclude.re ? " without exclude_modules" : "", names.p, (long long)m->cfg.n_layers - 1);
    free(requested);
    buf_free(&names);
    return rc;
}

/* ---- reading ---- */

/* Fields under which peft does something else with the same tensors, as does each *_config but eva's, which is
 * about the start alone: they must be absent, null, false, 0 or empty. */
static const char *const OTHER[] = {
    "use_dora",  "layers_to_transform",     "rank_pattern",      "alpha_pattern",           "fan_in_fan_out", "layer_replication",
    "lora_bias", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_qalora",     "use_bdlora",
};

static bool is_variant(const char *key) {
    const size_t n = strlen(key);
    for (size_t i = 0; i < sizeof OTHER / sizeof *OTHER; i++)
        if (strcmp(key, OTHER[i]) == 0) return true;
    return n > 7 && strcmp(key + n - 7, "_config") == 0 && strcmp(key, "eva_config") != 0;
}

static bool is_empty(const json_t *v) {
    return !v || json_is_null(v) || json_is_false(v) || (json_is_number(v) && json_number_value(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) || (json_is_object(v) && json_object_size(v) == 0);
}

/* The start of training is in the tensors, except where it has changed the base as well. */
static bool init_is_plain(const json_t *v) {
    const char *s = json_string_value(v);
    if (!v || json_is_boolean(v) || json_is_null(v)) return true;
    return s && (strcmp(s, "gaussian") == 0 || strcmp(s, "orthogonal") == 0 || strcmp(s, "eva") == 0);
}

/* modules_to_save: the head of a token classifier, under one of the two names that peft lists for it. */
static int read_saved(const json_t *o, const char *path, bool *head) {
    const json_t *v = json_object_get(o, "modules_to_save");
    if (is_empty(v)) return 0;
    bool other = !json_is_array(v);
    for (size_t i = 0; i < json_array_size(v); i++) {
        const char *s = json_string_value(json_array_get(v, i));
        *head |= s && strcmp(s, "score") == 0;
        other |= !s || (strcmp(s, "score") != 0 && strcmp(s, "classifier") != 0);
    }
    if (other || !*head)
        FAIL(ERR_UNSUPPORTED,
             "%s: unsupported modules_to_save; with an adapter only a critic's score head is trained; merge it "
             "with peft instead",
             path);
    return 0;
}

static int check_kind(const json_t *o, const char *path) {
    const char *type = "LORA", *bias = "none";
    double dropout = 0;
    TRY(json_str_opt(o, "peft_type", &type, path));
    if (strcasecmp(type, "LORA") != 0) FAIL(ERR_UNSUPPORTED, "%s: unsupported peft_type %s; LORA is", path, type);
    TRY(json_str_opt(o, "bias", &bias, path));
    if (strcmp(bias, "none") != 0) FAIL(ERR_UNSUPPORTED, "%s: unsupported bias=%s; none is", path, bias);
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)o, key, v) if (is_variant(key) && !is_empty(v))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported %s; merge the adapter with peft instead", path, key);
    if (!init_is_plain(json_object_get(o, "init_lora_weights")))
        FAIL(ERR_UNSUPPORTED,
             "%s: unsupported init_lora_weights=%s, which changes the base model; save it with peft's "
             "path_initial_model_for_weight_conversion first",
             path, json_string_value(json_object_get(o, "init_lora_weights")));
    TRY(json_f64_opt(o, "lora_dropout", &dropout, path));
    if (dropout != 0) log_note("%s: lora_dropout=%g is not applied; training here has no dropout", path, dropout);
    return 0;
}

static int read_fields(struct lora_config *l, const json_t *o, const char *path) {
    const char *base = NULL;
    TRY(check_kind(o, path));
    TRY(read_saved(o, path, &l->saves_head));
    TRY(json_i64(o, "r", &l->rank, path));
    if (l->rank < 1) FAIL(ERR_FORMAT, "%s: r=%lld, must be at least 1", path, (long long)l->rank);
    l->alpha = (double)l->rank;
    TRY(json_f64_opt(o, "lora_alpha", &l->alpha, path));
    if (!(fabs(l->alpha) <= FLT_MAX)) FAIL(ERR_FORMAT, "%s: lora_alpha=%g is no number of fp32", path, l->alpha);
    TRY(json_bool_opt(o, "use_rslora", &l->rslora, path));
    l->targets = json_incref(json_object_get(o, "target_modules"));
    json_t *exclude = json_object_get(o, "exclude_modules");
    if (!is_empty(exclude)) l->exclude = json_incref(exclude);
    TRY(json_str_opt(o, "base_model_name_or_path", &base, path));
    if (base) l->base = xstrdup(base);
    return 0;
}

int lora_config_load(struct lora_config *l, const char *dir) {
    json_t *o = NULL;
    char *path;
    int rc = 0;
    *l = (struct lora_config){0};
    TRY(file_in_dir(&path, dir, "adapter_config.json"));
    if (!path) FAILG(out, ERR_INPUT, "adapter %s: no adapter_config.json in it", dir);
    TRYG(json_load(&o, path, MAX_CONFIG), out);
    if (!json_is_object(o)) FAILG(out, ERR_FORMAT, "%s: not a JSON object", path);
    TRYG(read_fields(l, o, path), out);
out:
    if (rc < 0) lora_config_free(l);
    json_decref(o);
    free(path);
    return rc;
}

void lora_config_free(struct lora_config *l) {
    json_decref(l->targets);
    json_decref(l->exclude);
    free(l->base);
    *l = (struct lora_config){0};
}

/* ---- writing ---- */

static json_t *all_linear(const struct model *m) {
    json_t *names = json_array();
    struct buf b = {0};
    add_modules(&b, m);
    for (char *at = b.p, *next; at; at = next) {
        next = strstr(at, ", ");
        if (next) {
            *next = '\0';
            next += 2;
        }
        json_array_append_new(names, json_string(at));
    }
    buf_free(&b);
    return names;
}

json_t *model__lora_json(const struct model *m) {
    const struct lora_config *l = &m->lora->cfg;
    const char *s = json_string_value(l->targets);
    json_t *targets = s && strcasecmp(s, "all-linear") == 0 ? all_linear(m) : json_deep_copy(l->targets);
    json_t *alpha = l->alpha == (double)(int64_t)l->alpha ? json_integer((json_int_t)l->alpha) : json_real(l->alpha);
    json_t *saved = m->cfg.value ? json_pack("[s, s]", "classifier", "score") : json_null();
    return json_pack("{s:s?, s:s, s:s, s:o, s:I, s:o, s:b, s:f, s:s, s:b, s:b, s:b, s:o, s:O?}", "base_model_name_or_path", l->base,
                     "peft_type", "LORA", "task_type", m->cfg.value ? "TOKEN_CLS" : "CAUSAL_LM", "modules_to_save", saved, "r",
                     (json_int_t)l->rank, "lora_alpha", alpha, "use_rslora", (int)l->rslora, "lora_dropout", 0.0, "bias", "none",
                     "fan_in_fan_out", 0, "inference_mode", 1, "init_lora_weights", 1, "target_modules", targets, "exclude_modules",
                     l->exclude);
}
