/* parameters.c - which parameters a model has, where each lies in the flat
 * master, and the block of the compute copy.  Reads no file.
 *
 * Invariant: the flat arrays (master, gradients, moments) have no gaps, and
 * the parameters of a group follow each other, so a group is one matrix there. */
#include "model/parameters.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/files/files_int.h"
#include "model/files/load.h"
#include "model/model_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_GROUPS_PER_LAYER = 12, MAX_PARAMS_PER_LAYER = 17, MAX_OTHER = 4 };

/* One Hugging Face tensor of a group: its name inside the layer and its rows. */
struct part {
    const char *name;
    int64_t rows;
};

/* layer < 0: parts are full names. cols == 0: vectors. */
static struct model_group *add_group(struct model *m, int64_t layer, int64_t cols, int n_parts, const struct part *parts) {
    struct model_group *g = &m->groups[m->n_groups];
    *g = (struct model_group){.offset = m->n_elems, .k = cols, .first_param = m->n_params, .n_params = n_parts};
    for (int i = 0; i < n_parts; i++) {
        struct model_param *p = &m->params[m->n_params++];
        *p = (struct model_param){.rows = parts[i].rows,
                                  .cols = cols ? cols : 1,
                                  .nd = cols ? 2 : 1,
                                  .offset = m->n_elems,
                                  .group = m->n_groups,
                                  .src_dt = m->cfg.dtype};
        const int n = layer < 0 ? snprintf(p->name, sizeof p->name, "%s", parts[i].name)
                                : snprintf(p->name, sizeof p->name, "model.layers.%lld.%s", (long long)layer, parts[i].name);
        CHECK(n > 0 && (size_t)n < sizeof p->name);
        g->n += p->rows;
        m->n_elems += p->rows * p->cols;
    }
    m->n_groups++;
    return g;
}
#define GROUP(layer, cols, ...) \
    add_group(m, (layer), (cols), sizeof((struct part[]){__VA_ARGS__}) / sizeof(struct part), (const struct part[]){__VA_ARGS__})

static void add_layer(struct model *m, int64_t l) {
    const struct model_config *c = &m->cfg;
    const int64_t h = c->hidden, q = c->n_q_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, f = c->ffn;
    struct model_layer *y = &m->layers[l];
    y->attn_norm = GROUP(l, 0, {"input_layernorm.weight", h});
    y->qkv = GROUP(l, h, {"self_attn.q_proj.weight", q}, {"self_attn.k_proj.weight", kv}, {"self_attn.v_proj.weight", kv});
    y->qkv->linear = true;
    if (c->qkv_bias)
        y->qkv_bias = GROUP(l, 0, {"self_attn.q_proj.bias", q}, {"self_attn.k_proj.bias", kv}, {"self_attn.v_proj.bias", kv});
    if (c->qk_norm) {
        y->q_norm = GROUP(l, 0, {"self_attn.q_norm.weight", c->head_dim});
        y->k_norm = GROUP(l, 0, {"self_attn.k_norm.weight", c->head_dim});
    }
    y->o = GROUP(l, q, {"self_attn.o_proj.weight", h});
    y->o->linear = true;
    if (c->o_bias) y->o_bias = GROUP(l, 0, {"self_attn.o_proj.bias", h});
    y->mlp_norm = GROUP(l, 0, {"post_attention_layernorm.weight", h});
    y->gate_up = GROUP(l, h, {"mlp.gate_proj.weight", f}, {"mlp.up_proj.weight", f});
    y->gate_up->linear = true;
    if (c->mlp_bias) y->gate_up_bias = GROUP(l, 0, {"mlp.gate_proj.bias", f}, {"mlp.up_proj.bias", f});
    y->down = GROUP(l, f, {"mlp.down_proj.weight", h});
    y->down->linear = true;
    if (c->mlp_bias) y->down_bias = GROUP(l, 0, {"mlp.down_proj.bias", h});
}

void model__params_build(struct model *m) {
    const struct model_config *c = &m->cfg;
    const size_t n_layers = (size_t)c->n_layers;
    m->params = xcalloc(n_layers * MAX_PARAMS_PER_LAYER + MAX_OTHER, sizeof *m->params);
    m->groups = xcalloc(n_layers * MAX_GROUPS_PER_LAYER + MAX_OTHER, sizeof *m->groups);
    m->layers = xcalloc(n_layers, sizeof *m->layers);
    m->n_params = m->n_groups = m->n_elems = 0;
    m->g_embed = GROUP(-1, c->hidden, {"model.embed_tokens.weight", c->vocab});
    for (int64_t l = 0; l < c->n_layers; l++) add_layer(m, l);
    m->g_norm = GROUP(-1, 0, {"model.norm.weight", c->hidden});
    if (c->value) m->g_head = GROUP(-1, c->hidden, {"score.weight", 1});
    else m->g_head = c->tied ? m->g_embed : GROUP(-1, c->hidden, {"lm_head.weight", c->vocab});
    m->g_head_bias = c->value && c->value_bias ? GROUP(-1, 0, {"score.bias", 1}) : NULL;
    CHECK(m->n_elems == model_config_params(c));
    m->train_params = m->params;
    m->n_train_params = m->n_params;
    m->n_train = m->n_elems;
}

void model__params_free(struct model *m) {
    model__quant_free(m);
    free(m->params);
    free(m->groups);
    free(m->layers);
    m->params = NULL;
    m->train_params = NULL;
    m->groups = NULL;
    m->layers = NULL;
}

/* The groups before the head are the base's; without a base (measuring) they only take no place. */
static int64_t share_base(struct model *m) {
    if (!(m->flags & MODEL_SHARED_BASE)) return 0;
    const int64_t n = m->g_head - m->groups;
    for (int64_t i = 0; m->base && i < n; i++) {
        m->groups[i].mat = m->base->groups[i].mat;
        m->groups[i].vec = m->base->groups[i].vec;
    }
    return n;
}

void model__weights_layout(struct model *m, struct arena *a) {
    for (int64_t i = share_base(m); i < m->n_groups; i++) {
        struct model_group *g = &m->groups[i];
        if (m->quant && g->linear) continue;
        if (g->k) {
            void *p = arena_take(a, dev_weight_bytes(m->dev, m->act, g->n, g->k));
            g->mat = (struct weight){p, m->act, g->n, g->k};
        } else {
            g->vec = tensor_1d(arena_take(a, (size_t)g->n * dtype_size(m->act)), m->act, g->n);
        }
    }
    m->embed = m->g_embed->mat;
    m->head = m->g_head->mat;
    m->final_norm = m->g_norm->vec;
    if (m->quant) model__quant_layout(m, a);
}

bool model_is_flat(const struct model *m) {
    if (m->quant || m->flags & (MODEL_SHARED_BASE | MODEL_SHARDED_WEIGHTS) || !m->dev->ops->caps.plain_weights) return false;
    for (int64_t i = 0; i < m->n_groups; i++)
        if ((size_t)m->groups[i].offset * dtype_size(m->act) % ARENA_ALIGN) return false; /* padding before it */
    return true;
}

void model__find_flat(struct model *m) { m->flat = model_is_flat(m) ? tensor_1d(m->weights, m->act, m->n_elems) : TENSOR_NONE; }

int model__group_from(struct model *m, const struct model_group *g, float *flat) {
    if (g->k) return dev_weight_pack(m->dev, g->mat, tensor_2d(flat, DT_F32, g->n, g->k));
    return dev_cast(m->dev, g->vec, tensor_1d(flat, DT_F32, g->n));
}

const char *model__torch_dtype(enum dtype dt) { return dt == DT_BF16 ? "bfloat16" : dt == DT_F16 ? "float16" : "float32"; }
