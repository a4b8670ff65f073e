/* megatron.c - the weights of megatron-core's GPTModel, as its dist_checkpointing saves them, under Hugging Face's names.
 *
 * A layer's weights are tensors of their own (decoder.layers.3.mlp...) or slices of one with a leading axis of layers
 * (decoder.layers.mlp...). linear_qkv has for each KV head its query heads, its key and its value; linear_fc1 has gate, then up,
 * whatever the tensor parallel size was.  A layer's experts are one tensor with an axis of them, or tensors of their own.  Matrices
 * of latent attention are Hugging Face's as they are.
 * Every Hugging Face weight is equally long blocks at equal distances of such a tensor, so nothing is copied before it is read.
 * Invariant: after megatron_open the weights are those that config.json describes, in its shapes. */
#include "model/files/megatron.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"
#include "model/model_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CONFIG = 16 << 20 };
#define FAMILIES_READ "llama, qwen2, qwen3, mistral, seed_oss, qwen2_moe, qwen3_moe, mixtral, glm4_moe, deepseek_v2 and deepseek_v3"

struct megatron {
    struct dcp *dcp;
    struct model_config cfg;
    struct megatron_tensor *tensors;
    int64_t n, cap;
    struct map by_name;
    bool no_head, has_score, has_mtp;
    const char *dir;
    char *at; /* where .metadata is: dir/dist_ckpt, or dir */
};

/* ---- names ---- */

enum part { WHOLE, QKV, GATE_UP, VOCAB, HEAD };
struct rule {
    const char *theirs, *ours; /* '*' stands for q, k, v or gate, up */
    enum part part;
    /* of a layer with experts, without `ours`: of the family's group there (families.h) the tensors from the first on */
    size_t group;
    int first;
    bool every; /* it has an axis of experts */
};
#define GROUP(at) .group = offsetof(struct model_layer, at)
static const struct rule of_layer[] = {
    {"input_layernorm.weight", "input_layernorm.weight", .part = WHOLE},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", .part = WHOLE},
    {"self_attention.linear_qkv.weight", "self_attn.*_proj.weight", .part = QKV},
    {"self_attention.linear_qkv.bias", "self_attn.*_proj.bias", .part = QKV},
    {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight", .part = WHOLE},
    {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight", .part = WHOLE},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight", .part = WHOLE},
    {"self_attention.linear_proj.bias", "self_attn.o_proj.bias", .part = WHOLE},
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight", .part = WHOLE},
    {"mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", .part = WHOLE},
    {"mlp.linear_fc1.weight", "mlp.*_proj.weight", .part = GATE_UP},
    {"mlp.linear_fc1.bias", "mlp.*_proj.bias", .part = GATE_UP},
    {"mlp.linear_fc1.weight_w", "mlp.gate_proj.weight", .part = WHOLE}, /* saved with singleton_local_shards */
    {"mlp.linear_fc1.weight_v", "mlp.up_proj.weight", .part = WHOLE},
    {"mlp.linear_fc1.bias_w", "mlp.gate_proj.bias", .part = WHOLE},
    {"mlp.linear_fc1.bias_v", "mlp.up_proj.bias", .part = WHOLE},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight", .part = WHOLE},
    {"mlp.linear_fc2.bias", "mlp.down_proj.bias", .part = WHOLE},
    {"mlp.router.weight", GROUP(router)},
    {"mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", .part = WHOLE},
    {"mlp.experts.experts.linear_fc1.weight", .part = GATE_UP, GROUP(expert_gate_up), .every = true},
    {"mlp.experts.experts.linear_fc2.weight", GROUP(expert_down), .every = true},
    {"mlp.shared_experts.linear_fc1.weight", .part = GATE_UP, GROUP(shared_gate_up)},
    {"mlp.shared_experts.linear_fc1.weight_w", GROUP(shared_gate_up)},
    {"mlp.shared_experts.linear_fc1.weight_v", GROUP(shared_gate_up), .first = 1},
    {"mlp.shared_experts.linear_fc2.weight", GROUP(shared_down)},
    {"mlp.shared_experts.gate_weight", GROUP(shared_gate)},
};
/* Of a layer with latent attention, in addition. Norms of queries and keys are of the latent there: of a module of their own, or of
 * the matrix behind them. */
static const struct rule of_latent[] = {
    {"self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", .part = WHOLE},
    {"self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", .part = WHOLE},
    {"self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", .part = WHOLE},
    {"self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", .part = WHOLE},
    {"self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", .part = WHOLE},
    {"self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", .part = WHOLE},
    {"self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", .part = WHOLE},
    {"self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", .part = WHOLE},
    {"self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", .part = WHOLE},
};
static const struct rule of_expert[] = {
    /* behind its number, saved with singleton_local_shards */
    {"linear_fc1.weight_w", GROUP(expert_gate_up)},
    {"linear_fc1.weight_v", GROUP(expert_gate_up), .first = 1},
    {"linear_fc2.weight", GROUP(expert_down)},
};
static const struct rule of_model[] = {
    {"embedding.word_embeddings.weight", "model.embed_tokens.weight", .part = VOCAB},
    {"decoder.final_layernorm.weight", "model.norm.weight", .part = WHOLE},
    {"output_layer.weight", "lm_head.weight", .part = HEAD},
    {"output_layer.bias", "score.bias", .part = HEAD},
};

static const struct rule *find_rule(const struct rule *rules, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(rules[i].theirs, name) == 0) return &rules[i];
    return NULL;
}
#define RULE(rules, name) find_rule(rules, sizeof(rules) / sizeof *(rules), name)

struct place {
    int64_t layer;  /* -1: all layers; -2: none */
    int64_t expert; /* -1: all of a layer, or none */
};

/* A number and a dot at *at, which then goes on behind them; false: there is none. */
static bool take_number(const char **at, int64_t *n) {
    char *end;
    if (**at < '0' || **at > '9') return false;
    *n = strtoll(*at, &end, 10);
    if (*end != '.' || end - *at > 9) return false;
    *at = end + 1;
    return true;
}

static bool is_latent(const struct megatron *m) { return m->cfg.mla.kv_rank > 0; }

/* The rule of a tensor, and whose it is. */
static const struct rule *rule_of(const struct megatron *m, const char *name, struct place *p) {
    static const char layers[] = "decoder.layers.", experts[] = "mlp.experts.experts.";
    *p = (struct place){-2, -1};
    if (strncmp(name, layers, sizeof layers - 1) != 0) return RULE(of_model, name);
    const char *rest = name + sizeof layers - 1;
    p->layer = -1;
    take_number(&rest, &p->layer);
    const char *own = rest + sizeof experts - 1;
    if (strncmp(rest, experts, sizeof experts - 1) == 0 && take_number(&own, &p->expert)) return RULE(of_expert, own);
    const struct rule *latent = is_latent(m) ? RULE(of_latent, rest) : NULL;
    return latent ? latent : RULE(of_layer, rest);
}

/* Of the family's tensors; NULL: it has none there. */
static const char *name_in_family(const struct megatron *m, const struct rule *rule, int i) {
    for (const struct model_group_row *row = m->cfg.family->layer; row->part->name; row++)
        if (row->place == rule->group) return row->part[rule->first + i].name;
    return NULL;
}

static bool begins(const char *name, const char *with) { return strncmp(name, with, strlen(with)) == 0; }

/* dcp_choice: weights of the model; what is the optimizer's, or of random numbers, is left. */
static int choose(void *arg, const char *name) {
    struct megatron *m = arg;
    struct place place;
    m->has_mtp |= begins(name, "mtp.");
    if (!begins(name, "decoder.") && !begins(name, "embedding.") && !begins(name, "output_layer.")) return 0;
    if (m->no_head && begins(name, "output_layer.")) return 0;
    const struct rule *rule = rule_of(m, name, &place);
    if (rule && (rule->ours || name_in_family(m, rule, 0))) return 1;
    if (strstr(name, "adapter") || strstr(name, "to_wrap"))
        FAIL(ERR_UNSUPPORTED,
             "%s: unsupported weight %s: the checkpoint of a LoRA run of Megatron's; its huggingface/ has the model", m->at, name);
    FAIL(ERR_UNSUPPORTED, "%s: unsupported weight %s; of Megatron's models " FAMILIES_READ " are read", m->at, name);
}

/* ---- weights ---- */

struct piece { /* of one tensor of theirs */
    const char *name;
    int64_t first, block, stride, rows; /* in elements, but for rows */
};

static int add_weight(struct megatron *m, const struct dcp_tensor *of, const struct piece *p, bool vector, int64_t cols) {
    if (map_gets(&m->by_name, p->name, NULL)) FAIL(ERR_FORMAT, "%s: two tensors become %s", m->at, p->name);
    xgrow((void **)&m->tensors, &m->cap, m->n + 1, sizeof *m->tensors);
    m->tensors[m->n] = (struct megatron_tensor){.name = xstrdup(p->name),
                                                .dt = of->dt,
                                                .nd = vector ? 1 : 2,
                                                .dim = {p->rows, vector ? 0 : cols},
                                                .count = p->rows * cols,
                                                .of = of,
                                                .first = p->first,
                                                .block = p->block,
                                                .stride = p->stride};
    map_set(&m->by_name, p->name, strlen(p->name), m->n++);
    return 0;
}

/* '*' of a name becomes `star`. */
static char *weight_name(const char *ours, const struct place *p, const char *star, const char *end) {
    const size_t n = strcspn(ours, "*");
    char *name = xasprintf("%.*s%s%s%s", (int)n, ours, ours[n] ? star : "", ours[n] ? ours + n + 1 : "", end);
    if (p->layer < 0) return name;
    char *full = xasprintf("model.layers.%lld.%s", (long long)p->layer, name);
    free(name);
    return full;
}

static char *part_name(const struct megatron *m, const struct rule *rule, const struct place *p, int i) {
    static const char *const names[][3] = {[WHOLE] = {""}, [QKV] = {"q", "k", "v"}, [GATE_UP] = {"gate", "up"}};
    if (rule->ours) return weight_name(rule->ours, p, names[rule->part][i], "");
    char *expert = xasprintf("%lld", (long long)p->expert);
    char *name = weight_name(name_in_family(m, rule, i), p, expert, ".weight");
    free(expert);
    return name;
}

/* What one layer's part of a tensor becomes, or one expert's. at: the dimension of its rows, behind those of layers and experts;
 * first: its first element. */
static int add_parts(struct megatron *m, const struct dcp_tensor *of, const struct rule *rule, int at, const struct place *place,
                     int64_t first) {
    const struct model_config *c = &m->cfg;
    const bool vector = of->nd - at == 1;
    const int64_t rows = of->dim[at], cols = vector ? 1 : of->dim[at + 1], unit = c->head_dim * cols;
    const int64_t group = c->n_q_heads / c->n_kv_heads + 2; /* of heads: the queries of a KV head, its key, its value */
    int rc = 0;
    if (of->nd - at > 2 || of->nd - at < 1) FAIL(ERR_FORMAT, "%s: tensor %s has %d dimensions", m->at, of->name, of->nd);
    if (rule->part == QKV && rows != c->n_kv_heads * group * c->head_dim)
        FAIL(ERR_FORMAT, "%s: tensor %s has %lld rows, %lld query and %lld KV heads of %lld (config.json) need %lld", m->at,
             of->name, (long long)rows, (long long)c->n_q_heads, (long long)c->n_kv_heads, (long long)c->head_dim,
             (long long)(c->n_kv_heads * group * c->head_dim));
    if (rule->part == GATE_UP && rows % 2 != 0) FAIL(ERR_FORMAT, "%s: tensor %s has an odd number of rows", m->at, of->name);
    const int n = rule->part == QKV ? 3 : rule->part == GATE_UP ? 2 : 1;
    for (int i = 0; i < n && rc == 0; i++) {
        char *name = part_name(m, rule, place, i);
        struct piece p = {.name = name, .first = first, .rows = rows, .block = rows * cols, .stride = rows * cols};
        if (rule->part == QKV) {
            p.block = i == 0 ? (group - 2) * unit : unit;
            p.stride = group * unit;
            p.first += i == 0 ? 0 : (group - 3 + i) * unit;
            p.rows = i == 0 ? c->n_q_heads * c->head_dim : c->n_kv_heads * c->head_dim;
        } else if (rule->part == GATE_UP) {
            p.rows = rows / 2;
            p.block = p.stride = p.rows * cols;
            p.first += i * p.block;
        }
        rc = add_weight(m, of, &p, vector, cols);
        free(name);
    }
    return rc;
}

/* Embeddings and head, which Megatron pads to a multiple of the tensor parallel size; a head of one row is a value's. */
static int add_vocabulary(struct megatron *m, const struct dcp_tensor *of, const struct rule *rule) {
    const int64_t vocab = m->cfg.vocab, cols = of->nd > 1 ? of->dim[1] : 1;
    const bool score = rule->part == HEAD && of->dim[0] == 1;
    struct piece p = {.name = score && of->nd == 2 ? "score.weight" : rule->ours, .rows = score ? 1 : vocab};
    p.block = p.stride = p.rows * cols;
    if (of->nd > 2 || (rule->part == HEAD && of->nd == 1 && !score))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported shape of tensor %s", m->at, of->name);
    if (of->dim[0] < p.rows)
        FAIL(ERR_FORMAT, "%s: tensor %s has %lld rows, config.json has a vocabulary of %lld", m->at, of->name,
             (long long)of->dim[0], (long long)vocab);
    m->has_score |= score;
    return add_weight(m, of, &p, of->nd == 1, cols);
}

/* Of one layer. at, first: as add_parts has them, but for an axis of experts. */
static int add_layer(struct megatron *m, const struct dcp_tensor *of, const struct rule *rule, int at, struct place place,
                     int64_t first) {
    const int64_t n = m->cfg.n_experts, size = at > 0 ? of->count / of->dim[0] : of->count;
    if (!rule->every) return add_parts(m, of, rule, at, &place, first);
    if (of->dim[at] != n || of->nd == at)
        FAIL(ERR_FORMAT, "%s: tensor %s has %lld experts, config.json %lld", m->at, of->name, (long long)of->dim[at], (long long)n);
    for (place.expert = 0; place.expert < n; place.expert++)
        TRY(add_parts(m, of, rule, at + 1, &place, first + place.expert * (size / n)));
    return 0;
}

static int add_tensor(struct megatron *m, const struct dcp_tensor *of) {
    struct place place;
    const struct rule *rule = rule_of(m, of->name, &place);
    const int64_t n = m->cfg.n_layers;
    if (of->dt != DT_F32 && of->dt != DT_BF16 && of->dt != DT_F16)
        FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype %s for a weight", m->at, of->name, dtype_name(of->dt));
    if (rule->part == VOCAB || rule->part == HEAD) return add_vocabulary(m, of, rule);
    if (place.layer != -1) {
        if (place.layer >= n) FAIL(ERR_FORMAT, "%s: tensor %s: config.json has %lld layers", m->at, of->name, (long long)n);
        return add_layer(m, of, rule, 0, place, 0);
    }
    if (of->dim[0] != n || of->nd < 2)
        FAIL(ERR_FORMAT, "%s: tensor %s has %lld layers, config.json %lld", m->at, of->name, (long long)of->dim[0], (long long)n);
    for (place.layer = 0; place.layer < n; place.layer++) TRY(add_layer(m, of, rule, 1, place, place.layer * (of->count / n)));
    return 0;
}

/* ---- against config.json ---- */

static const struct megatron_tensor *find(const struct megatron *m, const char *name) {
    int64_t i;
    return map_gets(&m->by_name, name, &i) ? &m->tensors[i] : NULL;
}

static int check_shape(const struct megatron *m, const struct megatron_tensor *t, const struct model_param *p) {
    if (!t) FAIL(ERR_FORMAT, "%s: no tensor becomes %s, which config.json asks for", m->at, p->name);
    if (t->nd != p->nd || t->dim[0] != p->rows || (p->nd == 2 && t->dim[1] != p->cols))
        FAIL(ERR_FORMAT, "%s: tensor %s becomes %s of shape (%lld, %lld), config.json asks for (%lld, %lld)", m->at, t->of->name,
             t->name, (long long)t->dim[0], (long long)(t->nd == 2 ? t->dim[1] : 1), (long long)p->rows, (long long)p->cols);
    return 0;
}

static int check_shapes(struct megatron *m, const struct model *of) {
    struct map asked = {0};
    int rc = 0;
    for (int64_t i = 0; i < of->n_params && rc == 0; i++) {
        const struct model_param *p = &of->params[i];
        const struct megatron_tensor *t = find(m, p->name);
        map_set(&asked, p->name, strlen(p->name), i);
        if (t || (!begins(p->name, "lm_head.") && !begins(p->name, "score."))) rc = check_shape(m, t, p);
    }
    for (int64_t i = 0; i < of->n_buffers && rc == 0; i++) {
        struct model_param p = {.rows = of->buffers[i].n, .cols = 1, .nd = 1};
        int64_t at;
        memcpy(p.name, of->buffers[i].name, sizeof of->buffers[i].name);
        map_set(&asked, p.name, strlen(p.name), i);
        rc = check_shape(m, find(m, p.name), &p);
        if (rc == 0 && map_gets(&m->by_name, p.name, &at)) m->tensors[at].buffer = true;
    }
    for (int64_t i = 0; i < m->n && rc == 0; i++) {
        const char *name = m->tensors[i].name;
        if (!begins(name, "lm_head.") && !begins(name, "score.") && !map_gets(&asked, name, NULL))
            rc = err_set(ERR_UNSUPPORTED, __FILE__, __LINE__, "%s: unsupported weight %s, which config.json does not ask for",
                         m->at, m->tensors[i].of->name);
    }
    map_free(&asked);
    return rc;
}

static int check_weights(struct megatron *m) {
    struct model of = {.cfg = m->cfg};
    if (m->n == 0)
        FAIL(ERR_INPUT,
             "%s holds no weights under megatron-core's names (decoder.layers...): a run may have saved its optimizer "
             "alone there, and the model, as 'hf_model', in %s/huggingface",
             m->at, m->dir);
    model__params_build(&of);
    const int rc = check_shapes(m, &of);
    model__params_free(&of);
    TRY(rc);
    if (!m->no_head && !m->cfg.tied && !m->has_score && !find(m, "lm_head.weight"))
        FAIL(ERR_FORMAT, "%s: no output_layer.weight, and config.json does not say tied embeddings", m->at);
    return 0;
}

/* Megatron's own configuration, where the run saved it: next to dist_ckpt/, or above model/. */
static int check_transformer_config(const struct megatron *m) {
    const struct model_config *c = &m->cfg;
    json_t *config = NULL;
    char *above = file_join(m->dir, ".."), *path = NULL;
    int rc = file_in_dir(&path, m->dir, "transformer_config.json");
    if (rc == 0 && !path) rc = file_in_dir(&path, above, "transformer_config.json");
    free(above);
    TRY(rc);
    if (!path) return 0;
    TRYG(json_load(&config, path, MAX_CONFIG), out);
    const bool experts = c->n_experts > 0, latent = is_latent(m); /* what a model has not has defaults there */
    const struct {
        const char *key;
        int64_t value;
        bool asked;
    } same[] = {{"num_layers", c->n_layers, true},
                {"hidden_size", c->hidden, true},
                {"num_attention_heads", c->n_q_heads, true},
                {"num_query_groups", c->n_kv_heads, !latent},
                {"kv_channels", c->head_dim, !latent},
                {"q_lora_rank", c->mla.q_rank, latent},
                {"kv_lora_rank", c->mla.kv_rank, latent},
                {"qk_head_dim", c->mla.nope, latent},
                {"qk_pos_emb_head_dim", c->mla.rope, latent},
                {"v_head_dim", c->mla.v, latent},
                {"ffn_hidden_size", c->ffn, true},
                {"num_moe_experts", c->n_experts, true},
                {"moe_ffn_hidden_size", c->expert_ffn, experts},
                {"moe_router_topk", c->n_choices, experts}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        const json_t *v = json_object_get(config, same[i].key);
        if (same[i].asked && json_is_integer(v) && json_integer_value(v) != same[i].value)
            FAILG(out, ERR_FORMAT, "%s: %s is %lld, by config.json %lld", path, same[i].key, (long long)json_integer_value(v),
                  (long long)same[i].value);
    }
    static const char *const no[] = {"layernorm_zero_centered_gamma", "attention_output_gate"};
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        if (json_is_true(json_object_get(config, no[i]))) FAILG(out, ERR_UNSUPPORTED, "%s: unsupported %s", path, no[i]);
    const json_t *mla = json_object_get(config, "multi_latent_attention");
    if (json_is_boolean(mla) && json_is_true(mla) != latent)
        FAILG(out, ERR_FORMAT, "%s: multi_latent_attention is %s, by config.json %s", path, latent ? "false" : "true",
              latent ? "true" : "false");
out:
    json_decref(config);
    free(path);
    return rc;
}

/* ---- public ---- */

bool megatron_is_dir(const char *dir) {
    char *sub = file_join(dir, "dist_ckpt");
    const bool yes = dcp_is_dir(sub);
    free(sub);
    return yes;
}

static int check_family(const struct megatron *m, const char *where) {
    static const char *const read[] = {"llama",     "qwen2",   "qwen3",    "mistral",     "seed_oss",   "qwen2_moe",
                                       "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v3"};
    for (size_t i = 0; i < sizeof read / sizeof *read; i++)
        if (strcmp(m->cfg.family->type, read[i]) == 0) return 0;
    FAIL(ERR_UNSUPPORTED, "%s: unsupported family %s in a checkpoint of Megatron's; " FAMILIES_READ " are read", where,
         m->cfg.family->type);
}

int megatron_open(struct megatron **out, const struct megatron_args *a) {
    struct megatron *m = xcalloc(1, sizeof *m);
    char *link = NULL;
    int rc = 0;
    m->dir = a->dir;
    m->no_head = a->no_head;
    TRYG(model_config_load(&m->cfg, a->config_dir), out);
    TRYG(check_family(m, a->config_dir), out);
    TRYG(check_transformer_config(m), out);
    TRYG(file_in_dir(&link, a->dir, "huggingface/config.json"), out); /* no link out of the checkpoint */
    free(link);
    TRYG(file_in_dir(&link, a->dir, "dist_ckpt/.metadata"), out);
    m->at = link ? file_join(a->dir, "dist_ckpt") : xstrdup(a->dir);
    TRYG(dcp_open(&m->dcp, m->at, choose, m), out);
    for (int64_t i = 0; i < dcp_count(m->dcp); i++) TRYG(add_tensor(m, dcp_at(m->dcp, i)), out);
    TRYG(check_weights(m), out);
    if (m->has_mtp) log_note("%s: the weights of its MTP layers (mtp...) are not read", m->at);
out:
    free(link);
    m->dir = NULL; /* the caller's */
    if (rc == 0) *out = m;
    else megatron_close(m);
    return rc;
}

void megatron_close(struct megatron *m) {
    if (!m) return;
    for (int64_t i = 0; i < m->n; i++) free(m->tensors[i].name);
    free(m->tensors);
    free(m->at);
    map_free(&m->by_name);
    model_config_free(&m->cfg);
    dcp_close(m->dcp);
    free(m);
}

int64_t megatron_count(const struct megatron *m) { return m->n; }

const struct megatron_tensor *megatron_at(const struct megatron *m, int64_t i) {
    CHECK(i >= 0 && i < m->n);
    return &m->tensors[i];
}

int64_t megatron_files(const struct megatron *m) { return dcp_files(m->dcp); }

int64_t megatron_left(const struct megatron *m) { return dcp_left(m->dcp); }

bool megatron_has_score(const struct megatron *m) { return m->has_score; }

void megatron_read(const struct megatron_tensor *t, int64_t first, int64_t n, void *dst) {
    while (n > 0) {
        const int64_t at = first % t->block, k = n < t->block - at ? n : t->block - at;
        dcp_read(t->of, t->first + first / t->block * t->stride + at, k, dst);
        dst = (char *)dst + (size_t)k * dtype_size(t->dt);
        first += k;
        n -= k;
    }
}
