/* init.c - directories of random weights.
 *
 * The distribution is transformers' _init_weights: matrices and embeddings
 * normal with initializer_range, the padding row of the embedding 0, norms 1 (0 where 1 is added),
 * biases 0.  (The numbers are not torch's.)
 * Invariant: value i of tensor t is a pure function of (seed, t, i), whatever
 * the number of threads or the size of a chunk. */
#include "model/files/init.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "model/files/files_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- values ---- */

struct init_source { /* one safetensors_write_tensor's arg */
    struct pool *pool;
    enum model_role role;
    enum dtype dt;
    uint32_t tensor;
    uint64_t seed;
    float std, norm;          /* norm: a weight of a norm */
    int64_t zero_lo, zero_hi; /* elements of the padding row */
    /* the chunk being filled */
    int64_t first, count;
    void *dst;
};

/* Four standard normals: Box and Muller's two pairs from one Philox block. */
static void four_normals(float out[4], const struct init_source *s, int64_t block) {
    const uint32_t ctr[4] = {(uint32_t)block, (uint32_t)(block >> 32), s->tensor, RNG_INIT};
    const uint32_t key[2] = {(uint32_t)s->seed, (uint32_t)(s->seed >> 32)};
    uint32_t u[4];
    philox4x32(u, ctr, key);
    for (int i = 0; i < 4; i += 2) {
        const float r = sqrtf(-2.0f * logf(((float)(u[i] >> 8) + 0.5f) * 0x1p-24f));
        const float angle = (float)(u[i + 1] >> 8) * (float)(0x1p-24 * 2 * M_PI);
        float sine, cosine;
        sincosf(angle, &sine, &cosine);
        out[i] = r * cosine;
        out[i + 1] = r * sine;
    }
}

/* log of a uniform number between 0.01 and 16, as in transformers. */
static float a_log(const struct init_source *s, int64_t i) {
    const uint32_t ctr[4] = {(uint32_t)i, (uint32_t)(i >> 32), s->tensor, RNG_INIT};
    const uint32_t key[2] = {(uint32_t)s->seed, (uint32_t)(s->seed >> 32)};
    uint32_t u[4];
    philox4x32(u, ctr, key);
    return logf(0.01f + 15.99f * ((float)(u[0] >> 8) * 0x1p-24f));
}

enum { PART = 1 << 14 /* elements of one part; a multiple of 4 */ };

static void fill_part(void *arg, int64_t part, int thread) {
    const struct init_source *s = arg;
    (void)thread;
    const int64_t lo = part * PART, hi = lo + PART < s->count ? lo + PART : s->count;
    const bool normal = s->role != MODEL_BIAS && (!model_role_adds(s->role) || s->role == MODEL_CONV || s->role == MODEL_SINKS);
    float v[4] = {0};
    for (int64_t i = lo; i < hi; i++) {
        const int64_t at = s->first + i;
        if (normal && (i == lo || at % 4 == 0)) four_normals(v, s, at / 4);
        float f = normal ? v[at % 4] * s->std : s->role == MODEL_NORM ? s->norm : s->role == MODEL_ONES ? 1.0f : 0.0f;
        if (s->role == MODEL_A_LOG) f = a_log(s, at);
        if (at >= s->zero_lo && at < s->zero_hi) f = 0.0f;
        if (s->dt == DT_F32) ((float *)s->dst)[i] = f;
        else if (s->dt == DT_BF16) ((uint16_t *)s->dst)[i] = f32_to_bf16(f);
        else model__convert((uint16_t *)s->dst + i, s->dt, &f, DT_F32, 1);
    }
}

static int fill(void *arg, size_t off, void *dst, size_t n) {
    struct init_source *s = arg;
    const size_t size = dtype_size(s->dt);
    s->first = (int64_t)(off / size);
    s->count = (int64_t)(n / size);
    s->dst = dst;
    pool_run(s->pool, (s->count + PART - 1) / PART, fill_part, s);
    return 0;
}

/* Buffers begin as zeros. */
static int fill_zeros(void *arg, size_t off, void *dst, size_t n) {
    (void)arg, (void)off;
    memset(dst, 0, n);
    return 0;
}

static int write_random(const struct model *m, const char *path, uint64_t seed, enum dtype dt) {
    struct pool *pool = NULL;
    TRY(pool_create(&pool, 0));
    struct init_source *s = xcalloc((size_t)m->n_params, sizeof *s);
    struct safetensors_write_tensor *t = xcalloc((size_t)(m->n_params + m->n_buffers), sizeof *t);
    json_t *meta = json_pack("{s:s}", "format", "pt");
    char(*const stack_names)[MODEL_STACK_NAME] = xcalloc((size_t)m->n_groups, sizeof *stack_names);
    int64_t n = 0;
    for (int64_t i = 0; i < m->n_params; i++) {
        const struct model_param *p = &m->params[i];
        const struct model_group *const g = &m->groups[p->group];
        if (model__stacked(m, g) && i != g->first_param) continue; /* with that one */
        s[i] = (struct init_source){.pool = pool,
                                    .role = m->groups[p->group].role,
                                    .dt = dt,
                                    .tensor = (uint32_t)i,
                                    .seed = seed,
                                    .std = (float)m->cfg.init_range,
                                    .norm = m->cfg.family->norm == NORM_ONE_PLUS ? 0.0f : 1.0f};
        if (i == 0 && m->cfg.pad >= 0) {
            s[i].zero_lo = m->cfg.pad * p->cols;
            s[i].zero_hi = s[i].zero_lo + p->cols;
        }
        t[n] = (struct safetensors_write_tensor){
            .name = p->name, .dt = dt, .nd = p->nd, .dim = {p->rows, p->cols}, .read = fill, .arg = &s[i]};
        if (p->nd == 3) t[n].dim[1] = 1, t[n].dim[2] = p->cols;
        if (model__stacked(m, g)) {
            model__stack_name(m, g, stack_names[p->group]);
            t[n].name = stack_names[p->group];
            t[n].nd = model__stack_shape(m, g, t[n].dim);
        }
        n++;
    }
    for (int64_t i = 0; i < m->n_buffers; i++)
        t[n++] = (struct safetensors_write_tensor){
            .name = m->buffers[i].name, .dt = dt, .nd = 1, .dim = {m->buffers[i].n}, .read = fill_zeros};
    const int rc = safetensors_write(NULL, path, t, n, meta);
    free(stack_names);
    json_decref(meta);
    free(t);
    free(s);
    pool_destroy(pool);
    return rc;
}

/* ---- public ---- */

/* generation_config.json with the ids of config.json, which transformers would derive as well. */
static json_t *generation_of(const struct model_config *c) {
    json_t *g = json_object();
    static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    for (int i = 0; i < 3; i++) {
        json_t *v = json_object_get(model_text_json(c->json), keys[i]);
        if (v && !json_is_null(v)) json_object_set(g, keys[i], v);
    }
    return g;
}

int model_init_dir(const json_t *config, const char *dir, uint64_t seed, enum dtype dt) {
    int rc = 0;
    struct model m = {.act = DT_F32};
    json_t *o = json_deep_copy(config), *generation = NULL;
    char *weights = file_join(dir, "model.safetensors"), *cfg_path = file_join(dir, "config.json");
    char *gen_path = file_join(dir, "generation_config.json");
    CHECK(dt == DT_F32 || dt == DT_BF16 || dt == DT_F16);
    TRYG(model_config_from_json(&m.cfg, o, "config.json"), out);
    json_t *const text = model_text_json(o);
    if (m.cfg.mtp_layers > 0) TRYG(model_config_use_mtp(&m.cfg, false, "config.json"), out);
    json_object_del(o, "dtype");
    json_object_set_new(o, "torch_dtype", json_string(model__torch_dtype(dt)));
    if (text != o && json_object_get(text, "dtype")) json_object_set_new(text, "dtype", json_string(model__torch_dtype(dt)));
    model__params_build(&m);
    TRYG(file_mkdirs(dir), out);
    TRYG(write_random(&m, weights, seed, dt), out);
    generation = generation_of(&m.cfg);
    TRYG(json_save_atomic(gen_path, generation), out);
    TRYG(json_save_atomic(cfg_path, o), out);
    TRYG(file_fsync_dir(dir), out);
out:
    model__params_free(&m);
    model_config_free(&m.cfg);
    json_decref(o);
    json_decref(generation);
    free(weights);
    free(cfg_path);
    free(gen_path);
    return rc;
}
