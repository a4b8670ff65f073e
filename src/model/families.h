/* families.h - what differs between families of models (Llama, Qwen2, Qwen3, Mistral, ...) as data: a row of families.c each.
 *
 * Configuration, names, files, adapters, shards, forward, backward and FLOPs follow from the row. No numbers of a model here.
 * Invariant: nothing else branches on a family. */
#ifndef VERLC_MODEL_FAMILIES_H
#define VERLC_MODEL_FAMILIES_H

#include "model/config.h"

#include <stddef.h>

/* What an array of weights is to the ops, the optimizers and a random start. */
enum model_role {
    MODEL_TABLE,   /* embedding, head */
    MODEL_LINEAR,  /* a matrix of a layer: may be quantised, have adapters, be Muon's */
    MODEL_ROUTER,  /* a matrix of a layer that is never quantised and has no adapter */
    MODEL_EXPERTS, /* matrices of one shape, one an expert: as MODEL_LINEAR */
    MODEL_BIAS,    /* of a matrix: backward writes its gradient */
    MODEL_NORM,    /* backward only adds to its gradient */
    MODEL_SINKS,   /* likewise; begins as a matrix does */
    /* of a gated delta net; likewise */
    MODEL_CONV,  /* of a convolution: (channels, 1, DEV_CONV_TAPS), a vector to all but the files */
    MODEL_ONES,  /* starts at 1 whatever the family's norms are */
    MODEL_A_LOG, /* starts at the logarithm of a number between 0.01 and 16 */
};
enum model_dim {
    MODEL_NO_DIM,
    MODEL_HIDDEN,
    MODEL_FFN,
    MODEL_Q, /* Q, KV: of all heads */
    MODEL_KV,
    MODEL_QKV, /* q, k and v in one tensor of the file; gate and up */
    MODEL_GATE_UP,
    MODEL_HEAD,
    MODEL_VOCAB,
    MODEL_N_EXPERTS,
    MODEL_EXPERT_FFN, /* width of an expert */
    MODEL_SHARED_FFN,
    MODEL_MLA_Q_RANK, /* of latent attention: ranks; the latent with what RoPE turns; queries; K and V of a latent; outputs */
    MODEL_MLA_KV_RANK,
    MODEL_MLA_LATENT,
    MODEL_MLA_Q,
    MODEL_MLA_KV,
    MODEL_MLA_V,
    MODEL_Q_GATE,    /* queries and their gates, head by head */
    MODEL_DELTA_QKV, /* of a gated delta net: q, k and v; v; value heads; a value head */
    MODEL_DELTA_V,
    MODEL_DELTA_HEADS,
    MODEL_DELTA_HEAD,
    MODEL_DELTA_QKVZ, /* q, k, v and z of all heads; b and a; all of these */
    MODEL_DELTA_BA,
    MODEL_DELTA_IN,
    MODEL_TAPS,
    MODEL_Q_HEADS,
    MODEL_TWO_HIDDEN, /* what an MTP layer's projection reads */
};
int64_t model_dim(const struct model_config *c, enum model_dim d); /* MODEL_NO_DIM: 1 */

/* A group (parameters.h): a matrix or a vector made of one or more Hugging Face tensors, one below the other. */
enum { MODEL_MAX_PARTS = 4 };
struct model_group_row {
    size_t place; /* of a layer's: in struct model_layer */
    enum model_role role;
    enum model_dim cols; /* MODEL_NO_DIM: vectors */
    int needs, bias;     /* of enum model_feature: without it there is no group (0: always); with it there is a bias (0: never) */
    struct {
        const char *name; /* between "model.layers.N." and ".weight"; of MODEL_EXPERTS with '*' for the expert's number; with '!'
                             at its end without ".weight" */
        enum model_dim rows;
    } part[MODEL_MAX_PARTS]; /* none: a list of rows ends */
};

/* Which layers have a sliding window ("sliding_window"), where "layer_types" does not say it. */
enum model_windows {
    MODEL_NO_WINDOW,
    MODEL_WINDOW_ALL,
    MODEL_WINDOW_USED,    /* with "use_sliding_window": all */
    MODEL_WINDOW_FROM,    /* with "use_sliding_window": from layer "max_window_layers" on */
    MODEL_WINDOW_EVEN,    /* with "use_sliding_window": each second, from layer 0 to "max_window_layers" */
    MODEL_WINDOW_NO_ROPE, /* with "use_sliding_window": the layers without rope */
    MODEL_WINDOW_PATTERN, /* all but each n-th, n of "sliding_window_pattern"; or as a text of it says, "LLLG" again and again, but
                             for the last layer */
};
/* Which layers have rotary embeddings. */
enum model_rope_layers {
    MODEL_ROPE_ALL,
    MODEL_ROPE_LISTED,  /* "no_rope_layers" (1: it has), else all but each "no_rope_layer_interval"-th */
    MODEL_ROPE_WINDOWS, /* with a "sliding_window" those that have it */
    MODEL_ROPE_NAMED,   /* with "position_embedding_type": "rope" all, else none */
};
/* The experts of layers. */
struct model_experts_row {
    int64_t n, choices,
        width; /* "num_experts", "num_local_experts" or "n_routed_experts", "num_experts_per_tok", width_key: without
                                  the key */
    const char *width_key;
    bool normalize;   /* weights of a token's experts sum to 1; else by "norm_topk_prob" */
    bool f32_weights; /* they stay f32 */
    bool dense;       /* some layers have an MLP instead: "mlp_only_layers", "decoder_sparse_step" */
    bool stacked;     /* files have all experts of a layer in one tensor, unless they were read otherwise; no layer has an MLP */
    int64_t shared;   /* "shared_expert_intermediate_size" without the key; 0: there is no shared expert */
    bool norm_key;    /* "norm_topk_prob" without the key */
    /* of DeepSeek-V3 and related ones: */
    bool sigmoid;          /* scores are sigmoids */
    const char *bias;      /* buffer of what is added to scores where experts are chosen, after "model.layers.N."; NULL: none */
    bool groups;           /* "n_group", "topk_group" are read */
    const char *scale_key; /* of what the weights are multiplied by, without the key scale; NULL: nothing */
    double scale;
    bool f32_logits; /* of the router */
    bool greedy;     /* "topk_method": "greedy", without groups, unless it says group_limited_greedy */
    /* of gpt-oss: */
    bool clamped;     /* SwiGLU with limits: "swiglu_alpha", "swiglu_limit" */
    bool interleaved; /* files have all experts in one tensor, transposed, gate and up in turn; or MXFP4 (files/gpt_oss.c) */
    /* of both: */
    int64_t n_shared; /* "n_shared_experts" (or n_shared_key) without the key, as one MLP that wide; 0: the key is not read */
    const char *n_shared_key;
    bool dense_first; /* "first_k_dense_replace" layers have an MLP instead, first_dense without the key */
    int64_t first_dense;
    bool mlp_types; /* "mlp_layer_types", where it is there, says it instead: "dense", "sparse" */
};
/* A layer for multi-token prediction (DeepSeek-V3, section 2.2): from the last state h of row t, which the final norm has
 * normalised, and the embedding e of token t + 1, a state for token t + 2:
 *     norm(layer(proj [hidden_norm h; token_norm e]))
 * with a layer of the family, full attention, at position t, and the model's head. */
struct model_mtp_row {
    const char *key;                   /* of config.json: how many there are */
    const char *prefix, *layer_prefix; /* of the tensors around its layer, and of that */
    const char *hidden_norm, *token_norm, *proj, *norm;
    bool token_first; /* proj reads [token_norm e; hidden_norm h] */
    int64_t layers;   /* without the key */
};
/* A member that is left out is 0. */
struct model_family {
    const char *type;             /* "model_type" of config.json */
    const char *class_prefix;     /* of transformers' classes: "Qwen2" of Qwen2ForCausalLM */
    int64_t n_kv_heads, head_dim; /* without the key; 0: n_q_heads, hidden / n_q_heads */
    double theta;                 /* "rope_theta" without the key; 0: 10000 */
    bool tied;                    /* "tie_word_embeddings" without the key */
    enum norm_kind norm;          /* of norms of rows; which places have one is in `layer` */
    int features;                 /* of enum model_feature, where no key says otherwise */
    struct {
        const char *key; /* a boolean; NULL: none */
        int features;
    } keys[3];
    enum model_windows windows;
    int64_t window_pattern; /* "sliding_window_pattern" without the key */
    enum model_rope_layers rope_layers;
    struct model_experts_row experts; /* n 0: layers have none */
    const struct model_mtp_row *mtp;  /* NULL: no such layers */
    const char *local_theta;          /* with it layers with a window have a rope of their own: of "rope_parameters", else plain
                                            with this key's theta; NULL: all layers have one */
    int64_t window;                   /* without "sliding_window" */
    double rms_eps;                   /* without "rms_norm_eps"; 0: 1e-6 */
    double partial_rotary;            /* "partial_rotary_factor" without the key; 0: it has to be 1 */
    bool rotary_dim;                  /* "rotary_dim" elements of a head instead, where that key is there */
    bool ntk_alpha;                   /* "dynamic" rope with "alpha" has the base theta alpha^(d / (d - 2)), whatever the length */
    struct {
        int64_t q_rank, kv_rank, nope, rope, v; /* "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                                   "v_head_dim" without the keys */
    } mla;                                      /* 0: no latent attention */
    bool needs_rope;                            /* "rope_parameters" or "rope_scaling" has to be there */
    bool query_scale;      /* "llama_4_scaling_beta" of "rope_parameters", which has to be there (Ministral 3) */
    const char *ffn_key;   /* the width of the MLP; NULL: "intermediate_size" */
    int64_t ffn;           /* without that key; 0: it has to be there */
    bool hybrid;           /* others of the type have Mamba layers and experts: "layer_types" has to name attention alone, and
                              "num_local_experts" to be 0 (without the keys they are not) */
    bool multipliers;      /* "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling" */
    bool interleaved;      /* rope turns elements 2i and 2i + 1, else i and i + n/2 of n */
    bool longrope_aliases; /* rope types "su" and "yarn" mean longrope */
    bool gelu;             /* the MLP's activation is GELU in its tanh form, else silu */
    bool scaled_embedding; /* by sqrt(hidden), rounded to the compute dtype */
    double query_scalar;   /* scores are divided by its square root: "query_pre_attn_scalar" without the key; 0: by
                                            that of the head size */
    bool softcaps;         /* "attn_logit_softcapping", "final_logit_softcapping" are read */
    double attn_softcap, logit_softcap; /* without these keys */
    /* Layers with a gated delta net for attention: those that "layer_types" calls linear_attention, else all but each n-th, n of
     * "full_attention_interval", without it this; 0: none. */
    int64_t delta_interval;
    /* "model_type" of a checkpoint with other parts, whose "text_config" is this family's; then names begin with
     * "model.language_model.". What begins with one of `kept` is kept as it is in what is written. */
    const char *outer_type, *kept[2];
    bool keeps_layers; /* likewise tensors of layers behind the last one (MTP layers of GLM-4.5 and DeepSeek-V3) */
    const struct model_group_row *layer; /* in the order of the flat master */
};
/* features and which MLP layer l has, as `needs` of a row asks. */
int model_layer_features(const struct model_config *c, int64_t l);
/* Whether backward only adds to the gradient of this role, so that it is zeroed first. */
static inline bool model_role_adds(enum model_role r) { return r >= MODEL_NORM && r <= MODEL_A_LOG; }
/* How many matrices a group of this role has. */
int64_t model_matrices(const struct model_config *c, enum model_role role);
/* Whether layers of this model have the group of this place. */
bool model_has_group(const struct model_config *c, size_t place);
/* Whether the files of its gated delta nets have the rows of a key head together: q, k, v and z; b and a. */
bool model_joint_delta(const struct model_config *c);
const struct model_family *model_family_find(const char *type); /* NULL: there is none */
extern const char model_family_types[];                         /* of all, for messages */

#endif
