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

enum { MAX_OTHER = 8 };
static const struct model_group_row embed = {.cols = MODEL_HIDDEN, .part = {{"embed_tokens", MODEL_VOCAB}}},
                                    norm = {.role = MODEL_NORM, .part = {{"norm", MODEL_HIDDEN}}},
                                    lm_head = {.cols = MODEL_HIDDEN, .part = {{"lm_head", MODEL_VOCAB}}},
                                    score = {.cols = MODEL_HIDDEN, .part = {{"score", MODEL_NO_DIM}}};

const char *model__prefix(const struct model_config *c) { return c->outer ? "model.language_model." : "model."; }

/* "mlp.experts.*.up_proj" of expert e; names without '*' are as they are. */
static void name_param(struct model_param *p, const char *prefix, const char *name, int64_t e, const char *kind) {
    const char *const star = strchr(name, '*');
    const size_t bare = strcspn(name, "!"); /* a name that is whole */
    const int n =
        star ? snprintf(p->name, sizeof p->name, "%s%.*s%lld%s.%s", prefix, (int)(star - name), name, (long long)e, star + 1, kind)
        : name[bare] ? snprintf(p->name, sizeof p->name, "%s%.*s", prefix, (int)bare, name)
                     : snprintf(p->name, sizeof p->name, "%s%s.%s", prefix, name, kind);
    CHECK(n > 0 && (size_t)n < sizeof p->name);
}

/* Of a row its weights, or its biases. */
static struct model_group *add_group(struct model *m, const char *prefix, const struct model_group_row *row, bool bias) {
    const bool conv = row->role == MODEL_CONV;
    const int64_t k = bias || !row->cols || conv ? 0 : model_dim(&m->cfg, row->cols), count = model_matrices(&m->cfg, row->role);
    int n_parts = 0;
    while (n_parts < MODEL_MAX_PARTS && row->part[n_parts].name) n_parts++;
    struct model_group *g = &m->groups[m->n_groups++];
    *g = (struct model_group){
        .offset = m->n_elems, .k = k, .count = count, .first_param = m->n_params, .role = bias ? MODEL_BIAS : row->role};
    for (int64_t e = 0; e < count * n_parts; e++) {
        const int64_t i = e % n_parts;
        struct model_param *p = &m->params[m->n_params++];
        *p = (struct model_param){.rows = model_dim(&m->cfg, row->part[i].rows),
                                  .cols = conv ? model_dim(&m->cfg, row->cols)
                                          : k  ? k
                                               : 1,
                                  .nd = conv ? 3
                                        : k  ? 2
                                             : 1,
                                  .offset = m->n_elems,
                                  .group = g - m->groups,
                                  .src_dt = m->cfg.dtype};
        name_param(p, prefix, row->part[i].name, e / n_parts, bias ? "bias" : "weight");
        g->n += k ? p->rows : p->rows * p->cols;
        g->n_params++;
        m->n_elems += p->rows * p->cols;
    }
    return g;
}

static void add_layer(struct model *m, int64_t l, const char *prefix) {
    const struct model_config *c = &m->cfg;
    struct model_layer *y = &m->layers[l];
    *y = (struct model_layer){
        .first = &m->groups[m->n_groups], .window = c->layer[l] & MODEL_WINDOWED ? c->window : 0, .rope = model_layer_rope(c, l)};
    for (const struct model_group_row *row = c->family->layer; row->part->name; row++) {
        if (row->needs & ~model_layer_features(c, l)) continue;
        struct model_group *const g = add_group(m, prefix, row, false);
        if (row->bias & c->features) g->bias = add_group(m, prefix, row, true);
        memcpy((char *)y + row->place, &g, sizeof g);
    }
    y->last = &m->groups[m->n_groups - 1];
    if (!y->router || !c->family->experts.bias) return;
    struct model_buffer *const b = y->route_bias = &m->buffers[m->n_buffers++];
    *b = (struct model_buffer){.n = c->n_experts, .src_dt = DT_F32};
    snprintf(b->name, sizeof b->name, "%s%s", prefix, c->family->experts.bias);
}

/* Behind everything else, so that the model without it has the same places. */
static void add_mtp(struct model *m) {
    const struct model_mtp_row *const row = m->cfg.family->mtp;
    const struct model_group_row hidden_norm = {.role = MODEL_NORM, .part = {{row->hidden_norm, MODEL_HIDDEN}}},
                                 token_norm = {.role = MODEL_NORM, .part = {{row->token_norm, MODEL_HIDDEN}}},
                                 out = {.role = MODEL_NORM, .part = {{row->norm, MODEL_HIDDEN}}},
                                 proj = {.role = MODEL_LINEAR, .cols = MODEL_TWO_HIDDEN, .part = {{row->proj, MODEL_HIDDEN}}};
    struct model_mtp *const t = &m->mtp;
    t->first = t->hidden_norm = add_group(m, row->prefix, &hidden_norm, false);
    t->token_norm = add_group(m, row->prefix, &token_norm, false);
    t->proj = add_group(m, row->prefix, &proj, false);
    add_layer(m, model_mtp_layer(&m->cfg), row->layer_prefix);
    t->last = t->norm = add_group(m, row->prefix, &out, false);
}

void model__params_build(struct model *m) {
    const struct model_config *c = &m->cfg;
    size_t n = 0; /* rows of a layer, each with a bias at most */
    while (c->family->layer[n].part->name) n++;
    const int64_t layers = model_layer_places(c);
    char prefix[64];
    n = n * 2 * (size_t)layers + MAX_OTHER;
    const size_t of_experts = (size_t)(c->n_experts * layers) * 4 * MODEL_MAX_PARTS; /* at most two rows have experts */
    m->params = xcalloc(n * MODEL_MAX_PARTS + of_experts, sizeof *m->params);
    m->groups = xcalloc(n, sizeof *m->groups);
    m->layers = xcalloc((size_t)layers, sizeof *m->layers);
    m->buffers = xcalloc((size_t)layers, sizeof *m->buffers);
    m->n_params = m->n_groups = m->n_elems = m->n_buffers = 0;
    m->g_embed = add_group(m, model__prefix(c), &embed, false);
    for (int64_t l = 0; l < c->n_layers; l++) {
        snprintf(prefix, sizeof prefix, "%slayers.%lld.", model__prefix(c), (long long)l);
        add_layer(m, l, prefix);
    }
    m->g_norm = add_group(m, model__prefix(c), &norm, false);
    if (c->value) m->g_head = add_group(m, "", &score, false);
    else m->g_head = c->tied ? m->g_embed : add_group(m, "", &lm_head, false);
    m->g_head_bias = c->value && c->value_bias ? add_group(m, "", &score, true) : NULL;
    if (c->mtp) add_mtp(m);
    CHECK(m->n_elems == model_config_params(c));
    m->train_params = m->params;
    m->n_train_params = m->n_params;
    m->n_train = m->n_elems;
}

void model__params_free(struct model *m) {
    model__quant_free(m);
    for (int64_t i = 0; i < m->n_buffers; i++) free(m->buffers[i].host);
    free(m->buffers);
    m->buffers = NULL;
    m->n_buffers = 0;
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

/* It is read from the files later, to wherever it is wanted then. */
static bool stays_in_files(const struct model *m, const struct model_group *g) {
    return m->flags & MODEL_FILE_LAYERS && g >= m->layers[0].first && g <= m->layers[m->cfg.n_layers - 1].last;
}

void model__weights_layout(struct model *m, struct arena *a) {
    for (int64_t i = share_base(m); i < m->n_groups; i++) {
        struct model_group *g = &m->groups[i];
        if (m->quant && model__adaptable(g)) continue;
        const size_t bytes = stays_in_files(m, g) ? 0 : model__group_bytes(m, g);
        if (g->k) {
            g->mat = (struct weight){
                .dt = m->act, .n = g->n / g->count, .k = g->k, .softcap = g == m->g_head ? m->cfg.logit_softcap : 0};
            g->mat.data = arena_take(a, bytes);
        } else {
            g->vec = tensor_1d(arena_take(a, bytes), m->act, g->n);
        }
    }
    m->embed = m->g_embed->mat;
    m->head = m->g_head->mat;
    m->final_norm = m->g_norm->vec;
    if (m->quant) model__quant_layout(m, a);
}

bool model_is_flat(const struct model *m) {
    if (m->quant || m->flags & (MODEL_SHARED_BASE | MODEL_SHARDED_WEIGHTS | MODEL_FILE_LAYERS) || !m->dev->ops->caps.plain_weights)
        return false;
    for (int64_t i = 0; i < m->n_groups; i++)
        if ((size_t)m->groups[i].offset * dtype_size(m->act) % ARENA_ALIGN) return false; /* padding before it */
    return true;
}

void model__find_flat(struct model *m) { m->flat = model_is_flat(m) ? tensor_1d(m->weights, m->act, m->n_elems) : TENSOR_NONE; }

size_t model__group_bytes(const struct model *m, const struct model_group *g) {
    if (!g->k) return (size_t)g->n * dtype_size(m->act);
    return (size_t)g->count * dev_weight_bytes(m->dev, m->act, g->n / g->count, g->k);
}

int model__pack(const struct model *m, const struct model_group *g, struct tensor rows) {
    return dev_weight_stack_pack(m->dev, (struct weight_stack){g->mat, g->count}, rows);
}

int model__unpack(const struct model *m, const struct model_group *g, struct tensor rows) {
    struct weight w;
    TRY(model__weight(m, g, &w));
    return dev_weight_stack_unpack(m->dev, rows, (struct weight_stack){w, g->count});
}

int model__group_from(struct model *m, const struct model_group *g, float *flat) {
    if (g->k) return model__pack(m, g, tensor_2d(flat, DT_F32, g->n, g->k));
    return dev_cast(m->dev, g->vec, tensor_1d(flat, DT_F32, g->n));
}

const char *model__torch_dtype(enum dtype dt) { return dt == DT_BF16 ? "bfloat16" : dt == DT_F16 ? "float16" : "float32"; }
