/* config.h - config.json of a model of any family (families.h) as one struct, with what follows from it alone: parameter
 * counts, the RoPE table.  No weights. */
#ifndef VERLC_MODEL_CONFIG_H
#define VERLC_MODEL_CONFIG_H

#include "device/device.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct model_family;
/* Tensors that not every model has; bits. */
enum model_feature {
    MODEL_QKV_BIAS = 1,
    MODEL_O_BIAS = 2,
    MODEL_MLP_BIAS = 4,
    MODEL_QK_NORM = 8,
    MODEL_EXPERT_BIAS = 128, /* of routers and experts */
    /* of a layer: model_layer_features */
    MODEL_DENSE_MLP = 16,
    MODEL_EXPERTS_MLP = 32,
    MODEL_SHARED_EXPERT = 64, /* all tokens have it, and experts as well */
    MODEL_ATTENTION = 256,    /* softmax attention, or a gated delta net */
    MODEL_DELTA_NET = 512,
    MODEL_Q_LORA = 2048, /* of latent attention: queries by two matrices, or by one */
    MODEL_Q_DIRECT = 4096,
    MODEL_OUTPUT_GATE = 1024, /* of all layers with attention */
};
enum rope_kind { ROPE_DEFAULT, ROPE_LINEAR, ROPE_DYNAMIC, ROPE_LLAMA3, ROPE_YARN, ROPE_LONGROPE, ROPE_NTK_ALPHA };

/* Rotary angles of layers. */
struct model_rope {
    enum rope_kind kind;
    int64_t dim; /* elements of a head that turn, the first ones */
    double theta, factor;
    double low_freq_factor, high_freq_factor; /* llama3 */
    double attention_factor;                  /* yarn, longrope; 0: computed */
    double beta_fast, beta_slow;              /* yarn */
    double mscale, mscale_all_dim;            /* yarn, optional (0: absent) */
    bool truncate;                            /* yarn: round the correction range */
    int64_t original_max_pos;
    double query_beta; /* queries are multiplied by 1 + beta ln(1 + floor(position / original_max_pos)); 0: they are not */
};

enum { MODEL_MAX_LAYERS = 1024 };
/* What a layer has unlike its neighbours; bits. */
enum model_layer_kind {
    MODEL_WINDOWED = 1,
    MODEL_NO_ROPE = 2,
    MODEL_SPARSE = 4 /* experts for an MLP */,
    MODEL_LINEAR_ATTENTION = 64
};
/* The tables of rotary angles that layers choose from. */
enum model_rope_table { MODEL_ROPE, MODEL_ROPE_LOCAL, MODEL_ROPE_NONE, MODEL_ROPE_TABLES };

struct model_config {
    const struct model_family *family;
    int64_t n_layers, hidden, ffn, n_q_heads, n_kv_heads, head_dim, vocab;
    int64_t n_experts, n_choices, expert_ffn; /* of layers with experts: of a layer, of a token, width; 0: no such layers */
    int64_t shared_ffn;                       /* width of the expert that all tokens have; 0: none */
    bool norm_topk;                           /* weights of a token's experts sum to 1 */
    int64_t expert_groups, top_groups;        /* of which a token's experts are in the best; 0: no groups */
    double route_scale;                       /* of weights; 0: 1 */
    struct {
        int64_t q_rank, kv_rank, nope, rope, v; /* ranks of q (0: none) and of K and V; sizes of a head's parts */
    } mla;                                      /* multi-head latent attention: n_kv_heads is 1, head_dim rope + kv_rank; 0: none */
    double swiglu_alpha, swiglu_limit;          /* of experts with limits */
    struct {
        int64_t k_heads, v_heads, k_dim, v_dim;
    } delta;                /* gated delta nets; 0: no layer has one */
    bool outer;             /* config.json is of a checkpoint with other parts, this model's is its text_config */
    int64_t max_pos;        /* max_position_embeddings */
    int64_t window;         /* sliding window of the layers that have one, 0: none */
    bool tied;              /* lm_head shares embed_tokens */
    int64_t mtp_layers;     /* MTP layers that the files have (multi-token prediction) */
    bool mtp;               /* one of them is a part of the model: model_config_use_mtp */
    bool mtp_detached;      /* its loss has no gradient below it */
    bool value, value_bias; /* a value head (score.weight, score.bias) in the place of lm_head */
    int features;           /* of enum model_feature */
    float rms_eps;
    /* Multipliers (Granite). The residual stream is kept divided by residual_multiplier, so that what layers add needs none:
     * RMSNorm of x / r with eps / r^2 is that of x with eps. */
    float stream_eps;  /* of norms of the residual stream */
    float embed_scale; /* of the embedding's rows */
    float attn_scale;  /* of q.k */
    float logit_scale;
    float attn_softcap, logit_softcap;  /* of scaled scores, of logits; 0: none */
    double init_range;                  /* initializer_range */
    struct model_rope rope, local_rope; /* of all layers; with has_local_rope of those without and with a window */
    bool has_local_rope;
    unsigned char layer[MODEL_MAX_LAYERS + 2]; /* of enum model_layer_kind */
    int64_t
        fp8_block[2]; /* quantization_config: matrices may be in FP8 in the files, in blocks of so many rows and columns; 0: no */
    bool saved_nf4;   /* quantization_config: matrices of the layers are bitsandbytes' NF4 in the files */
    enum dtype dtype; /* torch_dtype / dtype of the source: DT_F32, DT_BF16, DT_F16 */
    int64_t eos[16];  /* end tokens: generation_config.json, else config.json */
    int n_eos;
    int64_t bos, pad;        /* -1: none */
    json_t *json;            /* config.json as read, for export; owned */
    json_t *generation_json; /* generation_config.json or NULL; owned */
};
/* Reads dir/config.json (transformers 4 and 5 spellings) and generation_config.json.
 * ERR_INPUT: directory or file missing. ERR_UNSUPPORTED: names the architecture or feature. */
int model_config_load(struct model_config *c, const char *dir);
int model_config_from_json(struct model_config *c, const json_t *config, const char *where);
void model_config_free(struct model_config *c);
/* The same model with its MTP layer, which is layer model_mtp_layer of what is kept layer by layer. ERR_UNSUPPORTED: it has
 * none, or several; `where` names the directory. */
int model_config_use_mtp(struct model_config *c, bool detached, const char *where);
/* One index is left out, so that the residual stream after the last layer and that into the MTP layer are two. */
static inline int64_t model_mtp_layer(const struct model_config *c) { return c->n_layers + 1; }
/* Rows that the token embedding's gradient is made of, of a pass of so many rows: the MTP layer has its own. */
static inline int64_t model_embedded_rows(const struct model_config *c, int64_t rows) {
    return c->mtp && !c->mtp_detached ? 2 * rows : rows;
}
/* Places for what is kept layer by layer. */
static inline int64_t model_layer_places(const struct model_config *c) { return c->mtp ? c->n_layers + 2 : c->n_layers; }
/* The same model as a critic: Hugging Face's ForTokenClassification with one label. The head has
 * a bias unless config.json says token_classification_bias=false. */
void model_config_make_value(struct model_config *c);
bool model_config_classifies(const struct model_config *c); /* config.json names ...ForSequenceClassification */
/* The same model as a reward model: ForSequenceClassification with one label, whose head has no bias. ERR_UNSUPPORTED:
 * config.json names another head, or more labels; `where` names the directory. */
int model_config_make_reward(struct model_config *c, const char *where);
/* Which of a sequence's rows has the score: the last that is not config.json's pad token (transformers' rule). */
int64_t model_reward_row(const struct model_config *c, const int32_t *ids, int64_t n);
/* Layers with attention, which have a KV cache; the others have a gated delta net. */
int64_t model_attention_layers(const struct model_config *c);
static inline bool model_layer_is_delta(const struct model_config *c, int64_t l) { return c->layer[l] & MODEL_LINEAR_ATTENTION; }
/* Elements of a head as its matrix gives them, and those that a rope table has; with latent attention head_dim is neither, but of
 * what attention reads. */
static inline int64_t model_query_dim(const struct model_config *c) {
    return c->mla.kv_rank ? c->mla.nope + c->mla.rope : c->head_dim;
}
static inline int64_t model_rope_dim(const struct model_config *c) { return c->mla.kv_rank ? c->mla.rope : c->head_dim; }
/* Of a KV cache: K and V, or keys that are the values too. */
static inline int64_t model_kv_sides(const struct model_config *c) { return c->mla.kv_rank ? 1 : 2; }
static inline bool model_is_latent(const struct model_config *c) { return c->mla.kv_rank > 0; }
int64_t model_config_params(const struct model_config *c);        /* number of parameters */
int64_t model_config_linear_params(const struct model_config *c); /* those of the layers' matrices that a token meets */
/* What scores of latent attention are multiplied by besides, of rope's "mscale_all_dim". */
float model_mla_scale(const struct model_rope *r);
const char *model_rope_name(enum rope_kind kind);
enum model_rope_table model_layer_rope(const struct model_config *c, int64_t layer);
bool model_has_rope(const struct model_config *c, enum model_rope_table which); /* a layer reads this table */
/* The keys of the model itself: of a checkpoint with other parts its "text_config", else config. */
json_t *model_text_json(const json_t *config);
/* What config.json says of rope: "rope_parameters" (transformers 5) or "rope_scaling" (4); NULL or null: nothing. */
const json_t *model_rope_json(const json_t *config);
/* cos and sin of positions [0, n_pos): out (n_pos, model_rope_dim / 2, 2) f32, host; MODEL_ROPE_NONE: of angles 0. max_len: longest
 * sequence of the run (dynamic NTK and longrope are fixed from it). */
/* What queries of positions [0, n_pos) are multiplied by, rounded to act: out (n_pos) f32. */
void model_query_scales(const struct model_config *c, int64_t n_pos, enum dtype act, float *out);
/* Whether one of them is not 1. */
bool model_has_query_scales(const struct model_config *c, int64_t n_pos);
void model_rope_table(const struct model_config *c, enum model_rope_table which, int64_t n_pos, int64_t max_len, float *out);

#endif
