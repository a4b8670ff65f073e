/* init.c - built-in shapes, and directories of random weights.
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

/* ---- shapes ---- */

/* The fields of config.json in which the models of the table differ. */
struct arch {
    const char *name, *type;
    int64_t hidden, ffn, layers, q_heads, kv_heads, head_dim, vocab, max_pos;
    double theta, eps;
    int64_t eos, bos, pad; /* -1: null */
    bool tied;
    double llama3_factor; /* 0: no rope scaling */
    int64_t window;       /* sliding_window; 0: none */
};

/* From the config.json of the released models on the Hugging Face hub. */
static const struct arch archs[] = {
    {"qwen2.5-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0},
    {"qwen2.5-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0},
    {"qwen2.5-3b", "qwen2", 2048, 11008, 36, 16, 2, 128, 151936, 32768, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0},
    {"qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0},
    {"qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0},
    {"qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0},
    {"qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0},
    {"qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0},
    {"llama-3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, 1e-5, 128001, 128000, -1, true, 32, 0},
    {"llama-3.2-3b", "llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, 5e5, 1e-5, 128001, 128000, -1, true, 32, 0},
    {"llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 5e5, 1e-5, 128001, 128000, -1, false, 8, 0},
    {"mimo-7b", "mimo", 4096, 11008, 36, 32, 8, 128, 151680, 32768, 640000, 1e-5, 151645, 151643, -1, false, 0, 0},
    {"mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 128, 32000, 32768, 1e4, 1e-5, 2, 1, -1, false, 0, 0},
    {"seed-oss-36b", "seed_oss", 5120, 27648, 64, 80, 8, 128, 155136, 524288, 1e7, 1e-6, 2, 0, 1, false, 0, 0},
    {"smollm3-3b", "smollm3", 2048, 11008, 36, 16, 4, 128, 128256, 65536, 5e6, 1e-6, 128012, 128000, 128004, true, 0, 0},
    {"phi-4", "phi3", 5120, 17920, 40, 40, 10, 128, 100352, 16384, 250000, 1e-5, 100265, 100257, 100349, false, 0, 0},
    {"granite-4.0-micro", "granitemoehybrid", 2560, 8192, 40, 40, 8, 64, 100352, 131072, 1e7, 1e-6, 100257, 100257, 100256, true, 0,
     0},
    {"glm-4-9b-0414", "glm4", 4096, 13696, 40, 32, 2, 128, 151552, 32768, 1e4, 1e-5, 151329, -1, 151329, false, 0, 0},
    {"gemma-2-2b", "gemma2", 2304, 9216, 26, 8, 4, 256, 256000, 8192, 1e4, 1e-6, 1, 2, 0, true, 0, 4096},
    {"gemma-3-1b", "gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 32768, 1e6, 1e-6, 1, 2, 0, true, 0, 512},
    {"qwen3.5-0.8b", "qwen3_5_text", 1024, 3584, 24, 8, 2, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, true, 0, 0},
    {"qwen3.5-2b", "qwen3_5_text", 2048, 6144, 24, 8, 2, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, true, 0, 0},
    {"qwen3.5-4b", "qwen3_5_text", 2560, 9216, 32, 16, 4, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, true, 0, 0},
    {"qwen3.5-9b", "qwen3_5_text", 4096, 12288, 32, 16, 4, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, false, 0, 0},
    {"qwen3.5-27b", "qwen3_5_text", 5120, 17408, 64, 24, 4, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, false, 0, 0},
    /* for the demo: trains in minutes on two cores; vocabulary and end tokens come with its tokenizer */
    {"tiny", "qwen2", 192, 512, 4, 6, 2, 32, 640, 4096, 1e4, 1e-6, -1, -1, -1, true, 0, 0},
};
enum { N_ARCHS = sizeof archs / sizeof archs[0] };

/* Value heads of gated delta nets; their key heads are 16, all of 128. */
static const struct {
    const char *name;
    int v_heads;
} delta_archs[] = {
    {"qwen3.5-0.8b", 16}, {"qwen3.5-2b", 16}, {"qwen3.5-4b", 32}, {"qwen3.5-9b", 32}, {"qwen3.5-27b", 48},
};

/* Granite 4's: layers of attention alone, its multipliers. */
static void add_granite4(json_t *o, const struct arch *a) {
    json_t *const types = json_array();
    for (int64_t l = 0; l < a->layers; l++) json_array_append_new(types, json_string("attention"));
    json_object_update_new(o, json_pack("{s:o, s:I, s:i, s:s, s:f, s:f, s:f, s:f}", "layer_types", types,
                                        "shared_intermediate_size", (json_int_t)a->ffn, "num_local_experts", 0,
                                        "position_embedding_type", "rope", "embedding_multiplier", 12.0, "residual_multiplier",
                                        0.22, "attention_multiplier", 0.015625, "logits_scaling", 10.0));
}

static json_t *token_or_null(int64_t id) { return id < 0 ? json_null() : json_integer(id); }

json_t *model_arch_config(const char *name) {
    const struct arch *a = NULL;
    for (int i = 0; i < N_ARCHS && !a; i++)
        if (strcmp(name, archs[i].name) == 0) a = &archs[i];
    if (!a) return NULL;
    const struct model_family *const f = model_family_find(a->type);
    CHECK(f != NULL);
    json_t *o = json_pack(
        "{s:[s+], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:s, s:f, s:b, s:s, s:o, s:o, s:b, s:f}", "architectures",
        f->class_prefix, "ForCausalLM", "model_type", a->type, "hidden_size", (json_int_t)a->hidden, "intermediate_size",
        (json_int_t)a->ffn, "num_hidden_layers", (json_int_t)a->layers, "num_attention_heads", (json_int_t)a->q_heads,
        "num_key_value_heads", (json_int_t)a->kv_heads, "head_dim", (json_int_t)a->head_dim, "vocab_size", (json_int_t)a->vocab,
        "max_position_embeddings", (json_int_t)a->max_pos, "rope_theta", a->theta, "rms_norm_eps", a->eps,
        f->gelu ? "hidden_activation" : "hidden_act", f->gelu ? "gelu_pytorch_tanh" : "silu", "initializer_range", 0.02,
        "tie_word_embeddings", (int)a->tied, "torch_dtype", strcmp(a->name, "tiny") == 0 ? "float32" : "bfloat16", "eos_token_id",
        token_or_null(a->eos), "bos_token_id", token_or_null(a->bos), "use_cache", 1, "attention_dropout", 0.0);
    CHECK(o != NULL);
    if (a->pad >= 0) json_object_set_new(o, "pad_token_id", json_integer(a->pad));
    if (f->hybrid) add_granite4(o, a);
    if (a->llama3_factor > 0)
        json_object_set_new(o, "rope_scaling",
                            json_pack("{s:s, s:f, s:f, s:f, s:i}", "rope_type", "llama3", "factor", a->llama3_factor,
                                      "low_freq_factor", 1.0, "high_freq_factor", 4.0, "original_max_position_embeddings", 8192));
    for (size_t i = 0; i < sizeof delta_archs / sizeof *delta_archs; i++)
        if (strcmp(name, delta_archs[i].name) == 0)
            json_object_update_new(o,
                                   json_pack("{s:i, s:i, s:i, s:i, s:i, s:i}", "linear_num_key_heads", 16, "linear_num_value_heads",
                                             delta_archs[i].v_heads, "linear_key_head_dim", 128, "linear_value_head_dim", 128,
                                             "linear_conv_kernel_dim", 4, "full_attention_interval", 4));
    if (a->window > 0) json_object_set_new(o, "sliding_window", json_integer(a->window));
    if (f->windows == MODEL_WINDOW_ALL) json_object_set_new(o, "sliding_window", json_null()); /* Mistral v0.3 */
    if (f->mtp) json_object_set_new(o, f->mtp->key, json_integer(1));
    if (f->windows == MODEL_WINDOW_FROM || f->windows == MODEL_WINDOW_NO_ROPE)
        json_object_set_new(o, "use_sliding_window", json_false());
    return o;
}

void model_arch_names(void (*fn)(void *arg, const char *name), void *arg) {
    for (int i = 0; i < N_ARCHS; i++) fn(arg, archs[i].name);
}

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
