/* lora.c - adapters on a frozen model: which tensors there are, their memory, initialization, and the
 * compute copies from the f32 master. The GEMMs are in model/linear.c, the files in lora_files.c.
 *
 * The modules of a fused matrix (q, k, v; gate, up) have their A stacked and their B on the diagonal of
 * one matrix, so that a group costs two small GEMMs.
 * Invariant: outside its own rectangles a compute copy is zero, so a module's adapter touches its own
 * columns of the output alone. */
#include "model/lora/lora.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "base/rng.h"
#include "model/files/files_int.h"
#include "model/files/load.h"
#include "model/master_weights.h"
#include "model/lora/lora_int.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH_ALIGN = 16 };

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
/* Of the base's norms. */
static size_t longest_vector(const struct model *m) {
    int64_t n = 1;
    for (int64_t i = 0; i < m->n_groups; i++)
        if (m->groups[i].k == 0) n = max64(n, m->groups[i].n);
    return (size_t)n;
}

/* ---- which tensors ---- */

static void add_param(struct model_lora *l, const char *module, const char *side, int64_t rows, int64_t cols, int64_t group) {
    struct model_param *p = &l->params[l->n_params++];
    *p = (struct model_param){.rows = rows, .cols = cols, .nd = 2, .offset = l->n_elems, .group = group, .src_dt = DT_F32};
    const int n = snprintf(p->name, sizeof p->name, "%s.%s.weight", module, side);
    CHECK(n > 0 && (size_t)n < sizeof p->name);
    l->n_elems += rows * cols;
}

static void add_head(struct model_lora *l, const struct model *m, const struct model_group *g) {
    struct model_param *p = &l->params[l->n_params++];
    *p = m->params[g->first_param];
    p->offset = l->n_elems;
    l->n_elems += p->rows * p->cols;
}

/* The adapters of one group, if any of its modules has one; of experts each has them on the same modules. */
static int build_group(struct model_lora *l, struct model *m, struct model_group *mg, struct lora_match *match) {
    const int64_t n = mg->n_params / mg->count; /* modules of an expert */
    struct lora_group g = {.n = mg->n / mg->count, .k = mg->k, .count = mg->count};
    bool on[MODEL_MAX_PARTS] = {false};
    for (int64_t e = 0; e < mg->count; e++) {
        const int64_t first = l->n_elems;
        int64_t row = 0;
        for (int64_t i = 0; i < n; i++) {
            const struct model_param *p = &m->params[mg->first_param + e * n + i];
            char module[sizeof p->name];
            snprintf(module, sizeof module, "%s", p->name);
            *strrchr(module, '.') = '\0'; /* .weight */
            const bool matches = model__lora_match(match, module);
            if (e == 0) on[i] = matches;
            if (matches != on[i])
                FAIL(ERR_UNSUPPORTED,
                     "target_modules: an adapter on some experts of a layer alone is unsupported: %s differs from "
                     "expert 0's",
                     module);
            if (matches) {
                if (e == 0)
                    g.part[g.n_parts++] =
                        (struct lora_part){.row = row, .n = p->rows, .a = l->n_elems, .b = l->n_elems + l->cfg.rank * p->cols};
                add_param(l, module, "lora_A", l->cfg.rank, p->cols, mg - m->groups);
                add_param(l, module, "lora_B", p->rows, l->cfg.rank, mg - m->groups);
            }
            row += p->rows;
        }
        g.stride = mg->count > 1 ? l->n_elems - first : 0;
    }
    if (g.n_parts == 0) return 0;
    g.width = (g.n_parts * l->cfg.rank + WIDTH_ALIGN - 1) / WIDTH_ALIGN * WIDTH_ALIGN;
    l->groups[l->n_groups] = g;
    mg->lora = &l->groups[l->n_groups++];
    return 0;
}

/* Which modules: groups, params and sizes of an adapter on m (its parameters built); no device memory. */
static int build_adapter(struct model_lora *l, struct model *m) {
    int rc = 0;
    struct lora_match *match = NULL;
    if (l->cfg.rank < 1 || l->cfg.rank > m->cfg.hidden)
        FAIL(ERR_INVAL, "lora_rank=%lld: expected 1 to %lld, the model's width", (long long)l->cfg.rank, (long long)m->cfg.hidden);
    if (!isfinite(l->cfg.alpha)) FAIL(ERR_INVAL, "lora_alpha is not finite");
    l->scale = (float)(l->cfg.alpha / (l->cfg.rslora ? sqrt((double)l->cfg.rank) : (double)l->cfg.rank));
    TRY(model__lora_match_create(&match, &l->cfg));
    l->groups = xcalloc((size_t)m->n_groups, sizeof *l->groups);
    l->params = xcalloc((size_t)m->n_params * 2, sizeof *l->params); /* at most two sides each */
    for (int64_t i = 0; i < m->n_groups && rc == 0; i++)
        if (model__adaptable(&m->groups[i])) rc = build_group(l, m, &m->groups[i], match);
    l->n_sides = l->n_params;
    if (m->cfg.value) {
        model__lora_match_head(match);
        add_head(l, m, m->g_head);
        if (m->g_head_bias) add_head(l, m, m->g_head_bias);
    }
    if (rc == 0) rc = model__lora_match_check(match, m);
    model__lora_match_free(match);
    return rc;
}

/* ---- memory ---- */

void model_trained_weights(const struct model *m, void **p, size_t *bytes) {
    *p = m->lora ? m->lora->block : m->weights;
    *bytes = m->lora ? (size_t)((char *)m->lora->z - (char *)m->lora->block) : m->weights_bytes; /* scratch begins with z */
}

void model__lora_layout(struct model_lora *l, struct model *m, struct arena *a) {
    const size_t act = dtype_size(m->act);
    int64_t width = 0, side = 0, mat_a = 0, mat_b = 0, sum = 0;
    for (int64_t i = 0; i < l->n_groups; i++) {
        struct lora_group *g = &l->groups[i];
        const size_t count = (size_t)g->count;
        g->a = (struct weight){.dt = m->act, .n = g->width, .k = g->k};
        g->a.data = arena_take(a, count * dev_weight_bytes(m->dev, m->act, g->width, g->k));
        g->b = (struct weight){.dt = m->act, .n = g->n, .k = g->width};
        g->b.data = arena_take(a, count * dev_weight_bytes(m->dev, m->act, g->n, g->width));
        width = max64(width, g->width);
        side = max64(side, max64(g->n, g->k));
        mat_a = max64(mat_a, g->count * g->width * g->k);
        mat_b = max64(mat_b, g->count * g->n * g->width);
        if (g->count > 1) sum = max64(sum, max64(g->n, g->k));
    }
    const int64_t rows = m->cfg.mla.kv_rank ? max64(LORA_ROWS, m->cfg.n_q_heads) : LORA_ROWS;  /* of one head */
    l->z = arena_take(a, (size_t)max64(rows * width, m->cfg.value ? m->cfg.hidden : 0) * act); /* lora_head_start too */
    l->dz = arena_take(a, (size_t)(rows * width) * act);
    if (m->act != DT_F32) l->wide = arena_take(a, (size_t)(LORA_ROWS * side) * sizeof(float));
    l->mat_a = arena_take(a, (size_t)mat_a * sizeof(float));
    l->mat_b = arena_take(a, (size_t)mat_b * sizeof(float));
    l->vec = arena_take(a, longest_vector(m) * sizeof(float));
    if (sum == 0) return;
    for (int i = 0; i < 2; i++) l->sum[i] = arena_take(a, (size_t)(LORA_ROWS * sum) * sizeof(float));
    l->offset = arena_take(a, (size_t)(m->cfg.n_experts + 1) * sizeof *l->offset);
}

static void lora_free_host(struct model_lora *l) {
    free(l->groups);
    free(l->params);
    lora_config_free(&l->cfg);
}

static struct lora_config config_copy(const struct lora_config *l) {
    struct lora_config c = *l;
    json_incref(c.targets);
    json_incref(c.exclude);
    if (c.base) c.base = xstrdup(c.base);
    return c;
}

static void use_params(struct model *m, const struct model_lora *l) {
    m->train_params = l->params;
    m->n_train_params = l->n_params;
    m->n_train = l->n_elems;
}

int model_shape(struct model **out, const struct model_config *c, struct dev *dev, enum dtype act, enum quant_kind quant,
                const struct lora_config *lora) {
    struct model *m = xcalloc(1, sizeof *m);
    struct arena measure = {0};
    int rc = 0;
    m->cfg = *c;
    m->dev = dev;
    m->act = act;
    model__params_build(m);
    model__quant_create(m, quant);
    if (dev) model__weights_layout(m, &measure);
    if (lora) {
        m->lora = xcalloc(1, sizeof *m->lora);
        m->lora->cfg = config_copy(lora);
        TRYG(build_adapter(m->lora, m), out);
        use_params(m, m->lora);
    }
    *out = m;
    m = NULL;
out:
    model_shape_free(m);
    return rc;
}

void model_shape_free(struct model *m) {
    if (!m) return;
    model__lora_free(m);
    model__params_free(m);
    free(m);
}

void model__lora_free(struct model *m) {
    struct model_lora *l = m->lora;
    if (!l) return;
    dev_free(m->dev, l->block, l->block_bytes);
    for (int64_t i = 0; i < m->n_groups; i++) m->groups[i].lora = NULL;
    lora_free_host(l);
    free(l);
    m->lora = NULL;
}

/* An adapter with its memory, master not filled yet. */
static int attach(struct model *m, const struct lora_config *c) {
    struct arena a = {0};
    CHECK(m->master == NULL && m->lora == NULL); /* an inference-only model: its weights are frozen */
    struct model_lora *l = m->lora = xcalloc(1, sizeof *l);
    l->cfg = config_copy(c);
    TRY(build_adapter(l, m));
    model__lora_layout(l, m, &a);
    l->block_bytes = a.used;
    TRY(dev_alloc(m->dev, l->block_bytes, &l->block));
    a = (struct arena){.base = l->block, .cap = l->block_bytes};
    model__lora_layout(l, m, &a);
    TRY(dev_zero(m->dev, l->vec, longest_vector(m) * sizeof(float)));
    use_params(m, l);
    return model__alloc_master(m);
}

int model__lora_attach(struct model *m, const struct lora_config *c) { /* model_close frees what is there after an error */
    int rc = attach(m, c);
    if (rc == 0) rc = model__lora_hash_base(m);
    if (rc < 0 && !m->master) model__lora_free(m);
    return rc;
}

void model_lora_set_base(struct model *m, const char *base) {
    free(m->lora->cfg.base);
    m->lora->cfg.base = xstrdup(base);
}

/* ---- initialization ---- */

/* Uniform in (-1, 1), a pure function of its address. */
static float uniform(uint64_t seed, uint32_t tensor, int64_t i) {
    const uint32_t ctr[4] = {(uint32_t)(i / 4), (uint32_t)(i / 4 >> 32), tensor, RNG_INIT};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t u[4];
    philox4x32(u, ctr, key);
    return ((float)(u[i % 4] >> 8) + 0.5f) * 0x1p-23f - 1.0f;
}

int model__lora_head_start(struct model *m, float *flat) {
    for (int64_t i = m->lora->n_sides; i < m->lora->n_params; i++) {
        const struct model_param *p = &m->lora->params[i];
        const struct model_group *g = &m->groups[p->group];
        const int64_t n = p->rows * p->cols;
        const struct tensor as = tensor_2d(m->lora->z, m->act, p->rows, p->cols); /* as long as a head */
        if (g->k) TRY(dev_weight_unpack(m->dev, as, g->mat));
        else TRY(dev_copy(m->dev, as.data, g->vec.data, (size_t)n * dtype_size(m->act)));
        void *host = xmalloc((size_t)n * dtype_size(m->act));
        const int rc = dev_copy_out(m->dev, host, as.data, (size_t)n * dtype_size(m->act));
        if (rc == 0) model__convert(flat + p->offset, DT_F32, host, m->act, n);
        free(host);
        TRY(rc);
    }
    return 0;
}

int model_lora_create(struct model *m, const struct lora_config *c, uint64_t seed) {
    int rc = 0;
    TRY(model__lora_attach(m, c));
    float *flat = xcalloc((size_t)m->n_train, sizeof *flat);
    TRYG(model__lora_head_start(m, flat), out);
    for (int64_t i = 0; i < m->lora->n_sides; i += 2) { /* A, B, A, B, ... */
        const struct model_param *p = &m->train_params[i];
        const float bound = (float)(1 / sqrt((double)p->cols)); /* Kaiming with a = sqrt(5) */
        for (int64_t k = 0; k < p->rows * p->cols; k++) flat[p->offset + k] = bound * uniform(seed, (uint32_t)i, k);
    }
    TRYG(model_set_master(m, flat), out);
out:
    free(flat);
    return rc;
}

/* ---- master -> compute copies ---- */

/* flat has the elements from lo on. */
static int refresh_group(struct model *m, const struct lora_group *g, float *flat, int64_t lo) {
    const struct model_lora *l = m->lora;
    const int64_t r = l->cfg.rank;
    const struct tensor a = tensor_2d(l->mat_a, DT_F32, g->count * g->width, g->k);
    const struct tensor b = tensor_2d(l->mat_b, DT_F32, g->count * g->n, g->width);
    TRY(dev_zero(m->dev, a.data, (size_t)tensor_count(a) * sizeof(float)));
    TRY(dev_zero(m->dev, b.data, (size_t)tensor_count(b) * sizeof(float)));
    for (int64_t i = 0; i < g->n_parts; i++) {
        const struct lora_part *p = &g->part[i];
        const struct add_block_args put_a = {.dst = tensor_2d(l->mat_a, DT_F32, g->width, g->k),
                                             .src = tensor_2d(flat + (p->a - lo), DT_F32, r, g->k),
                                             .dst_row = i * r,
                                             .rows = r,
                                             .cols = g->k,
                                             .scale = 1,
                                             .count = g->count,
                                             .dst_next = g->width * g->k,
                                             .src_next = g->stride};
        const struct add_block_args put_b = {.dst = tensor_2d(l->mat_b, DT_F32, g->n, g->width),
                                             .src = tensor_2d(flat + (p->b - lo), DT_F32, p->n, r),
                                             .dst_row = p->row,
                                             .dst_col = i * r,
                                             .rows = p->n,
                                             .cols = r,
                                             .scale = l->scale,
                                             .count = g->count,
                                             .dst_next = g->n * g->width,
                                             .src_next = g->stride};
        TRY(dev_add_block(m->dev, &put_a));
        TRY(dev_add_block(m->dev, &put_b));
    }
    TRY(dev_weight_stack_pack(m->dev, (struct weight_stack){g->a, g->count}, a));
    return dev_weight_stack_pack(m->dev, (struct weight_stack){g->b, g->count}, b);
}

/* A value head's matrix or bias. */
static int refresh_head(struct model *m, const struct model_group *g, float *flat, struct model_range r) {
    if (!g) return 0;
    const struct model_param *const p = &m->lora->params[m->lora->n_sides + (g == m->g_head_bias)];
    if (p->offset < r.lo || p->offset >= r.hi) return 0;
    float *const at = flat + (p->offset - r.lo);
    if (g->k) return dev_weight_pack(m->dev, g->mat, tensor_2d(at, DT_F32, g->n, g->k));
    return dev_cast(m->dev, g->vec, tensor_1d(at, DT_F32, g->n));
}

int model__lora_refresh(struct model *m, struct model_range r, float *flat) {
    for (int64_t i = 0; i < m->lora->n_groups; i++) {
        const struct lora_group *const g = &m->lora->groups[i];
        if (g->part->a >= r.lo && g->part->a < r.hi) TRY(refresh_group(m, g, flat, r.lo));
    }
    if (!m->cfg.value) return 0;
    TRY(refresh_head(m, m->g_head, flat, r));
    return refresh_head(m, m->g_head_bias, flat, r);
}
