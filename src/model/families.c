/* families.c - the families of models, a row each. Adding one whose layers are Llama's up to names, fusion, biases, norms of
 * heads and windows is a row here and nothing else.
 *
 * Invariant: a row has transformers' defaults of that family. */
#include "model/families.h"

#include "model/parameters.h"

#include <string.h>

#define NORM(at, name, n, feature)                                                \
    {                                                                             \
        offsetof(struct model_layer, at), MODEL_NORM, MODEL_NO_DIM, feature, 0, { \
            { name, n }                                                           \
        }                                                                         \
    }
#define LINEAR(at, k, feature, ...)                                                    \
    {                                                                                  \
        offsetof(struct model_layer, at), MODEL_LINEAR, k, 0, feature, { __VA_ARGS__ } \
    }

/* Matrices that layers of one kind have alone. */
#define OF_KIND(at, role, k, needs, ...)                                     \
    {                                                                        \
        offsetof(struct model_layer, at), role, k, needs, 0, { __VA_ARGS__ } \
    }
#define WITH_BIAS(at, role, k, ...)                                                                      \
    {                                                                                                    \
        offsetof(struct model_layer, at), role, k, MODEL_EXPERTS_MLP, MODEL_EXPERT_BIAS, { __VA_ARGS__ } \
    }
#define ROUTER(name) OF_KIND(router, MODEL_ROUTER, MODEL_HIDDEN, MODEL_EXPERTS_MLP, {name, MODEL_N_EXPERTS})
#define EXPERTS(stem, gate, up, down)                                                                            \
    OF_KIND(expert_gate_up, MODEL_EXPERTS, MODEL_HIDDEN, MODEL_EXPERTS_MLP, {stem ".*." gate, MODEL_EXPERT_FFN}, \
            {stem ".*." up, MODEL_EXPERT_FFN}),                                                                  \
        OF_KIND(expert_down, MODEL_EXPERTS, MODEL_EXPERT_FFN, MODEL_EXPERTS_MLP, {stem ".*." down, MODEL_HIDDEN})
/* An expert that all tokens have, and what its output is multiplied by. */
#define SHARED_EXPERT(stem)                                                                                         \
    OF_KIND(shared_gate_up, MODEL_LINEAR, MODEL_HIDDEN, MODEL_SHARED_EXPERT, {stem ".gate_proj", MODEL_SHARED_FFN}, \
            {stem ".up_proj", MODEL_SHARED_FFN}),                                                                   \
        OF_KIND(shared_down, MODEL_LINEAR, MODEL_SHARED_FFN, MODEL_SHARED_EXPERT, {stem ".down_proj", MODEL_HIDDEN})
#define SHARED_GATE(name) OF_KIND(shared_gate, MODEL_ROUTER, MODEL_HIDDEN, MODEL_SHARED_EXPERT, {name, MODEL_NO_DIM})
#define DENSE_MLP                                                                                                            \
    OF_KIND(gate_up, MODEL_LINEAR, MODEL_HIDDEN, MODEL_DENSE_MLP, {"mlp.gate_proj", MODEL_FFN}, {"mlp.up_proj", MODEL_FFN}), \
        OF_KIND(down, MODEL_LINEAR, MODEL_FFN, MODEL_DENSE_MLP, {"mlp.down_proj", MODEL_HIDDEN})

#define QKV                                                                                                  \
    LINEAR(qkv, MODEL_HIDDEN, MODEL_QKV_BIAS, {"self_attn.q_proj", MODEL_Q}, {"self_attn.k_proj", MODEL_KV}, \
           {"self_attn.v_proj", MODEL_KV})
#define O LINEAR(o, MODEL_Q, MODEL_O_BIAS, {"self_attn.o_proj", MODEL_HIDDEN})
#define GATE_UP LINEAR(gate_up, MODEL_HIDDEN, MODEL_MLP_BIAS, {"mlp.gate_proj", MODEL_FFN}, {"mlp.up_proj", MODEL_FFN})
#define FUSED_GATE_UP LINEAR(gate_up, MODEL_HIDDEN, 0, {"mlp.gate_up_proj", MODEL_GATE_UP})
#define HEAD_NORMS \
    NORM(q_norm, "self_attn.q_norm", MODEL_HEAD, MODEL_QK_NORM), NORM(k_norm, "self_attn.k_norm", MODEL_HEAD, MODEL_QK_NORM)
#define DOWN LINEAR(down, MODEL_FFN, MODEL_MLP_BIAS, {"mlp.down_proj", MODEL_HIDDEN})

static const struct model_group_row llama_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),         QKV,     HEAD_NORMS, O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0), GATE_UP, DOWN,       {0},
};
/* Phi-3's files have q, k, v and gate, up as the passes read them: one matrix each. */
static const struct model_group_row phi3_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    LINEAR(qkv, MODEL_HIDDEN, 0, {"self_attn.qkv_proj", MODEL_QKV}),
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    FUSED_GATE_UP,
    DOWN,
    {0},
};

static const struct model_group_row granite4_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    LINEAR(gate_up, MODEL_HIDDEN, 0, {"shared_mlp.input_linear", MODEL_GATE_UP}),
    LINEAR(down, MODEL_FFN, 0, {"shared_mlp.output_linear", MODEL_HIDDEN}),
    {0},
};

static const struct model_group_row glm_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    FUSED_GATE_UP,
    DOWN,
    {0},
};

static const struct model_group_row gemma2_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    HEAD_NORMS,
    O,
    NORM(attn_post_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    NORM(mlp_norm, "pre_feedforward_layernorm", MODEL_HIDDEN, 0),
    GATE_UP,
    DOWN,
    NORM(mlp_post_norm, "post_feedforward_layernorm", MODEL_HIDDEN, 0),
    {0},
};

/* GLM-4-0414: norms of both inputs and outputs. */
static const struct model_group_row glm4_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    O,
    NORM(attn_post_norm, "post_self_attn_layernorm", MODEL_HIDDEN, 0),
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    FUSED_GATE_UP,
    DOWN,
    NORM(mlp_post_norm, "post_mlp_layernorm", MODEL_HIDDEN, 0),
    {0},
};

/* Norms of what attention and MLP give (EXAONE 4). */
/* Norms of heads after rope. */
static const struct model_group_row hunyuan_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    NORM(q_rope_norm, "self_attn.query_layernorm", MODEL_HEAD, 0),
    NORM(k_rope_norm, "self_attn.key_layernorm", MODEL_HEAD, 0),
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    GATE_UP,
    DOWN,
    {0},
};
static const struct model_group_row olmo_layer[] = {
    QKV,
    NORM(q_row_norm, "self_attn.q_norm", MODEL_Q, 0),
    NORM(k_row_norm, "self_attn.k_norm", MODEL_KV, 0),
    O,
    NORM(attn_post_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    GATE_UP,
    DOWN,
    NORM(mlp_post_norm, "post_feedforward_layernorm", MODEL_HIDDEN, 0),
    {0},
};
static const struct model_group_row post_norm_layer[] = {
    QKV,
    HEAD_NORMS,
    O,
    NORM(attn_post_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    GATE_UP,
    DOWN,
    NORM(mlp_post_norm, "post_feedforward_layernorm", MODEL_HIDDEN, 0),
    {0},
};

/* Experts, or in some layers one MLP. */
static const struct model_group_row qwen_moe_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    HEAD_NORMS,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    DENSE_MLP,
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    {0},
};

static const struct model_group_row qwen2_moe_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    DENSE_MLP,
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_expert"),
    SHARED_GATE("mlp.shared_expert_gate"),
    {0},
};

static const struct model_group_row glm4_moe_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    HEAD_NORMS,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    DENSE_MLP,
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_experts"),
    {0},
};

static const struct model_group_row hy_v3_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    HEAD_NORMS,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    DENSE_MLP,
    ROUTER("mlp.router.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_mlp"),
    {0},
};

/* Norms of q's and k's whole rows. */
static const struct model_group_row minimax_m2_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    NORM(q_row_norm, "self_attn.q_norm", MODEL_Q, 0),
    NORM(k_row_norm, "self_attn.k_norm", MODEL_KV, 0),
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    ROUTER("block_sparse_moe.gate"),
    EXPERTS("block_sparse_moe.experts", "w1", "w3", "w2"),
    {0},
};

/* Latent attention. */
static const struct model_group_row deepseek_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    OF_KIND(mla_q_a, MODEL_LINEAR, MODEL_HIDDEN, MODEL_Q_LORA, {"self_attn.q_a_proj", MODEL_MLA_Q_RANK}),
    NORM(mla_q_norm, "self_attn.q_a_layernorm", MODEL_MLA_Q_RANK, MODEL_Q_LORA),
    OF_KIND(mla_q, MODEL_LINEAR, MODEL_MLA_Q_RANK, MODEL_Q_LORA, {"self_attn.q_b_proj", MODEL_MLA_Q}),
    OF_KIND(mla_q, MODEL_LINEAR, MODEL_HIDDEN, MODEL_Q_DIRECT, {"self_attn.q_proj", MODEL_MLA_Q}),
    LINEAR(mla_kv_a, MODEL_HIDDEN, 0, {"self_attn.kv_a_proj_with_mqa", MODEL_MLA_LATENT}),
    NORM(mla_kv_norm, "self_attn.kv_a_layernorm", MODEL_MLA_KV_RANK, 0),
    LINEAR(mla_kv, MODEL_MLA_KV_RANK, 0, {"self_attn.kv_b_proj", MODEL_MLA_KV}),
    LINEAR(o, MODEL_MLA_V, 0, {"self_attn.o_proj", MODEL_HIDDEN}),
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    DENSE_MLP,
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_experts"),
    {0},
};

/* Sinks of attention; biases of router and experts. */
static const struct model_group_row gpt_oss_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    OF_KIND(sinks, MODEL_SINKS, MODEL_NO_DIM, 0, {"self_attn.sinks!", MODEL_Q_HEADS}),
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    WITH_BIAS(router, MODEL_ROUTER, MODEL_HIDDEN, {"mlp.router", MODEL_N_EXPERTS}),
    WITH_BIAS(expert_gate_up, MODEL_EXPERTS, MODEL_HIDDEN, {"mlp.experts.*.gate_proj", MODEL_EXPERT_FFN},
              {"mlp.experts.*.up_proj", MODEL_EXPERT_FFN}),
    WITH_BIAS(expert_down, MODEL_EXPERTS, MODEL_EXPERT_FFN, {"mlp.experts.*.down_proj", MODEL_HIDDEN}),
    {0},
};

static const struct model_group_row olmoe_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    NORM(q_row_norm, "self_attn.q_norm", MODEL_Q, 0),
    NORM(k_row_norm, "self_attn.k_norm", MODEL_KV, 0),
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    {0},
};

static const struct model_group_row mixtral_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    ROUTER("block_sparse_moe.gate"),
    EXPERTS("block_sparse_moe.experts", "w1", "w3", "w2"),
    {0},
};

/* Gated attention, or a gated delta net. */
#define DELTA_MIXERS(...)                                                                                                   \
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),                                                                    \
        {offsetof(struct model_layer, qkv),                                                                                 \
         MODEL_LINEAR,                                                                                                      \
         MODEL_HIDDEN,                                                                                                      \
         MODEL_ATTENTION,                                                                                                   \
         MODEL_QKV_BIAS,                                                                                                    \
         {{"self_attn.q_proj", MODEL_Q_GATE}, {"self_attn.k_proj", MODEL_KV}, {"self_attn.v_proj", MODEL_KV}}},             \
        NORM(q_norm, "self_attn.q_norm", MODEL_HEAD, MODEL_ATTENTION),                                                      \
        NORM(k_norm, "self_attn.k_norm", MODEL_HEAD, MODEL_ATTENTION),                                                      \
        {offsetof(struct model_layer, o),     MODEL_LINEAR, MODEL_Q, MODEL_ATTENTION, MODEL_O_BIAS,                         \
         {{"self_attn.o_proj", MODEL_HIDDEN}}},                                                                             \
        __VA_ARGS__, OF_KIND(delta_conv, MODEL_CONV, MODEL_TAPS, MODEL_DELTA_NET, {"linear_attn.conv1d", MODEL_DELTA_QKV}), \
        OF_KIND(delta_a_log, MODEL_A_LOG, MODEL_NO_DIM, MODEL_DELTA_NET, {"linear_attn.A_log!", MODEL_DELTA_HEADS}),        \
        OF_KIND(delta_dt_bias, MODEL_ONES, MODEL_NO_DIM, MODEL_DELTA_NET, {"linear_attn.dt_bias!", MODEL_DELTA_HEADS}),     \
        OF_KIND(delta_norm, MODEL_ONES, MODEL_NO_DIM, MODEL_DELTA_NET, {"linear_attn.norm", MODEL_DELTA_HEAD}),             \
        OF_KIND(o, MODEL_LINEAR, MODEL_DELTA_V, MODEL_DELTA_NET, {"linear_attn.out_proj", MODEL_HIDDEN})
#define DELTA_INPUTS                                                                                             \
    OF_KIND(delta_in, MODEL_LINEAR, MODEL_HIDDEN, MODEL_DELTA_NET, {"linear_attn.in_proj_qkv", MODEL_DELTA_QKV}, \
            {"linear_attn.in_proj_z", MODEL_DELTA_V}, {"linear_attn.in_proj_b", MODEL_DELTA_HEADS},              \
            {"linear_attn.in_proj_a", MODEL_DELTA_HEADS})
/* By key heads. */
#define JOINT_DELTA_INPUTS                                                                                         \
    OF_KIND(delta_in, MODEL_LINEAR, MODEL_HIDDEN, MODEL_DELTA_NET, {"linear_attn.in_proj_qkvz", MODEL_DELTA_QKVZ}, \
            {"linear_attn.in_proj_ba", MODEL_DELTA_BA})

static const struct model_group_row delta_layer[] = {
    DELTA_MIXERS(DELTA_INPUTS), NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0), GATE_UP, DOWN, {0},
};

static const struct model_group_row delta_moe_layer[] = {
    DELTA_MIXERS(DELTA_INPUTS),
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_expert"),
    SHARED_GATE("mlp.shared_expert_gate"),
    {0},
};

static const struct model_group_row delta_next_layer[] = {
    DELTA_MIXERS(JOINT_DELTA_INPUTS),
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    DENSE_MLP,
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_expert"),
    SHARED_GATE("mlp.shared_expert_gate"),
    {0},
};

/* MTP layers by the names of their tensors. */
enum { MTP_MIMO, MTP_QWEN, MTP_QWEN_NEXT };
#define QWEN_MTP                                                                                                                   \
    .prefix = "mtp.", .layer_prefix = "mtp.layers.0.", .hidden_norm = "pre_fc_norm_hidden", .token_norm = "pre_fc_norm_embedding", \
    .proj = "fc", .norm = "norm", .token_first = true
static const struct model_mtp_row mtp_rows[] = {
    [MTP_MIMO] = {.key = "num_nextn_predict_layers",
                  .prefix = "model.mtp_layers.0.",
                  .layer_prefix = "model.mtp_layers.0.",
                  .hidden_norm = "hidden_layernorm",
                  .token_norm = "token_layernorm",
                  .proj = "input_proj",
                  .norm = "final_layernorm"},
    [MTP_QWEN] = {.key = "mtp_num_hidden_layers", QWEN_MTP},
    /* files have it, config.json does not say so */
    [MTP_QWEN_NEXT] = {.key = "num_nextn_predict_layers", .layers = 1, QWEN_MTP},
};

#define ATTENTION_BIAS \
    { "attention_bias", MODEL_QKV_BIAS | MODEL_O_BIAS }
static const struct model_family families[] = {
    {.type = "llama", .class_prefix = "Llama", .keys = {ATTENTION_BIAS, {"mlp_bias", MODEL_MLP_BIAS}}, .layer = llama_layer},
    {.type = "qwen2",
     .class_prefix = "Qwen2",
     .features = MODEL_QKV_BIAS,
     .windows = MODEL_WINDOW_FROM,
     .window = 4096,
     .layer = llama_layer},
    {.type = "mimo", /* Qwen2 with an MTP layer */
     .kept = {"model.mtp_layers."},
     .class_prefix = "MiMo",
     .features = MODEL_QKV_BIAS,
     .windows = MODEL_WINDOW_FROM,
     .window = 4096,
     .mtp = &mtp_rows[MTP_MIMO],
     .layer = llama_layer},
    {.type = "qwen3",
     .class_prefix = "Qwen3",
     .head_dim = 128,
     .features = MODEL_QK_NORM,
     .keys = {ATTENTION_BIAS},
     .windows = MODEL_WINDOW_FROM,
     .window = 4096,
     .layer = llama_layer},
    {.type = "qwen3_moe",
     .class_prefix = "Qwen3Moe",
     .n_kv_heads = 4,
     .features = MODEL_QK_NORM,
     .keys = {ATTENTION_BIAS},
     .windows = MODEL_WINDOW_USED,
     .window = 4096,
     .experts = {.n = 128, .choices = 8, .width = 768, .width_key = "moe_intermediate_size", .dense = true},
     .layer = qwen_moe_layer},
    {.type = "qwen2_moe",
     .class_prefix = "Qwen2Moe",
     .n_kv_heads = 16,
     .features = MODEL_QKV_BIAS,
     .keys = {{"qkv_bias", MODEL_QKV_BIAS}},
     .windows = MODEL_WINDOW_EVEN,
     .window = 4096,
     .experts = {.n = 60, .choices = 4, .width = 1408, .width_key = "moe_intermediate_size", .dense = true, .shared = 5632},
     .layer = qwen2_moe_layer},
    {.type = "mistral",
     .class_prefix = "Mistral",
     .n_kv_heads = 8,
     .windows = MODEL_WINDOW_ALL,
     .window = 4096,
     .layer = llama_layer},
    {.type = "mixtral",
     .class_prefix = "Mixtral",
     .theta = 1e6,
     .n_kv_heads = 8,
     .windows = MODEL_WINDOW_ALL,
     .rms_eps = 1e-5,
     .experts = {.n = 8, .choices = 2, .width = 14336, .width_key = "intermediate_size", .normalize = true, .f32_weights = true},
     .layer = mixtral_layer},
    {.type = "olmoe",
     .class_prefix = "Olmoe",
     .rms_eps = 1e-5,
     .keys = {ATTENTION_BIAS},
     .experts = {.n = 64, .choices = 8, .width = 2048, .width_key = "intermediate_size"},
     .layer = olmoe_layer},
    {.type = "seed_oss",
     .class_prefix = "SeedOss",
     .n_kv_heads = 8,
     .head_dim = 128,
     .features = MODEL_QKV_BIAS,
     .keys = {{"attention_bias", MODEL_QKV_BIAS}, {"attention_out_bias", MODEL_O_BIAS}, {"mlp_bias", MODEL_MLP_BIAS}},
     .layer = llama_layer},
    {.type = "smollm3",
     .class_prefix = "SmolLM3",
     .n_kv_heads = 4,
     .theta = 2e6,
     .tied = true,
     .keys = {ATTENTION_BIAS, {"mlp_bias", MODEL_MLP_BIAS}},
     .windows = MODEL_WINDOW_NO_ROPE,
     .rope_layers = MODEL_ROPE_LISTED,
     .layer = llama_layer},
    {.type = "phi3",
     .class_prefix = "Phi3",
     .windows = MODEL_WINDOW_ALL,
     .rms_eps = 1e-5,
     .partial_rotary = 1,
     .longrope_aliases = true,
     .layer = phi3_layer},
    {.type = "glm",
     .class_prefix = "Glm",
     .n_kv_heads = 2,
     .head_dim = 128,
     .features = MODEL_QKV_BIAS,
     .keys = {{"attention_bias", MODEL_QKV_BIAS}},
     .rms_eps = 1.5625e-7,
     .partial_rotary = 0.5,
     .interleaved = true,
     .layer = glm_layer},
    {.type = "glm4",
     .class_prefix = "Glm4",
     .n_kv_heads = 2,
     .head_dim = 128,
     .features = MODEL_QKV_BIAS,
     .keys = {{"attention_bias", MODEL_QKV_BIAS}},
     .rms_eps = 1.5625e-7,
     .partial_rotary = 0.5,
     .interleaved = true,
     .layer = glm4_layer},
    {.type = "glm4_moe",
     .keeps_layers = true,
     .class_prefix = "Glm4Moe",
     .n_kv_heads = 8,
     .keys = {{"attention_bias", MODEL_QKV_BIAS}, {"use_qk_norm", MODEL_QK_NORM}},
     .rms_eps = 1e-5,
     .partial_rotary = 0.5,
     .experts = {.n = 128,
                 .choices = 8,
                 .width = 1408,
                 .width_key = "moe_intermediate_size",
                 .f32_weights = true,
                 .f32_logits = true,
                 .norm_key = true,
                 .sigmoid = true,
                 .bias = "mlp.gate.e_score_correction_bias",
                 .groups = true,
                 .scale_key = "routed_scaling_factor",
                 .scale = 1,
                 .n_shared = 1,
                 .dense_first = true,
                 .first_dense = 1},
     .layer = glm4_moe_layer},
    {.type = "deepseek_v2",
     .class_prefix = "DeepseekV2",
     .interleaved = true,
     .mla = {1536, 512, 128, 64, 128},
     .experts = {.n = 64,
                 .choices = 6,
                 .width = 1407,
                 .width_key = "moe_intermediate_size",
                 .f32_weights = true,
                 .f32_logits = true,
                 .groups = true,
                 .scale_key = "routed_scaling_factor",
                 .scale = 1,
                 .greedy = true,
                 .n_shared = 2,
                 .dense_first = true},
     .layer = deepseek_layer},
    {.type = "deepseek_v3",
     .keeps_layers = true,
     .class_prefix = "DeepseekV3",
     .interleaved = true,
     .mla = {1536, 512, 128, 64, 128},
     .experts = {.n = 256,
                 .choices = 8,
                 .width = 2048,
                 .width_key = "moe_intermediate_size",
                 .f32_weights = true,
                 .f32_logits = true,
                 .norm_key = true,
                 .sigmoid = true,
                 .bias = "mlp.gate.e_score_correction_bias",
                 .groups = true,
                 .scale_key = "routed_scaling_factor",
                 .scale = 2.5,
                 .n_shared = 1,
                 .dense_first = true,
                 .first_dense = 3},
     .layer = deepseek_layer},
    {.type = "glm4_moe_lite", /* GLM-4.7-Flash: DeepSeek-V3's layers */
     .keeps_layers = true,
     .class_prefix = "Glm4MoeLite",
     .rms_eps = 1e-5,
     .partial_rotary = 1,
     .interleaved = true,
     .mla = {768, 512, 192, 64, 256},
     .experts = {.n = 64,
                 .choices = 4,
                 .width = 1536,
                 .width_key = "moe_intermediate_size",
                 .f32_weights = true,
                 .f32_logits = true,
                 .norm_key = true,
                 .sigmoid = true,
                 .bias = "mlp.gate.e_score_correction_bias",
                 .groups = true,
                 .scale_key = "routed_scaling_factor",
                 .scale = 1.8,
                 .n_shared = 1,
                 .dense_first = true,
                 .first_dense = 1,
                 .mlp_types = true},
     .layer = deepseek_layer},
    {.type = "hy_v3", /* Hunyuan 3 */
     .keeps_layers = true,
     .class_prefix = "HYV3",
     .n_kv_heads = 8,
     .head_dim = 128,
     .theta = 11158840,
     .rms_eps = 1e-5,
     .features = MODEL_QK_NORM,
     .keys = {ATTENTION_BIAS},
     .experts = {.n = 192,
                 .choices = 8,
                 .width = 1536,
                 .width_key = "moe_intermediate_size",
                 .normalize = true,
                 .f32_weights = true,
                 .f32_logits = true,
                 .sigmoid = true,
                 .bias = "mlp.expert_bias",
                 .scale_key = "router_scaling_factor",
                 .scale = 2.826,
                 .n_shared = 1,
                 .n_shared_key = "num_shared_experts",
                 .dense_first = true,
                 .first_dense = 1,
                 .mlp_types = true},
     .layer = hy_v3_layer},
    {.type = "minimax_m2",
     .class_prefix = "MiniMaxM2",
     .n_kv_heads = 8,
     .head_dim = 128,
     .theta = 5e6,
     .partial_rotary = 1,
     .rotary_dim = true,
     .experts = {.n = 256,
                 .choices = 8,
                 .width = 1536,
                 .width_key = "intermediate_size",
                 .normalize = true,
                 .f32_weights = true,
                 .sigmoid = true,
                 .bias = "block_sparse_moe.e_score_correction_bias"},
     .layer = minimax_m2_layer},
    {.type = "gpt_oss",
     .class_prefix = "GptOss",
     .n_kv_heads = 8,
     .head_dim = 64,
     .theta = 150000,
     .rms_eps = 1e-5,
     .norm = NORM_SCALE_CAST,
     .features = MODEL_QKV_BIAS | MODEL_O_BIAS | MODEL_EXPERT_BIAS,
     .keys = {ATTENTION_BIAS},
     .windows = MODEL_WINDOW_PATTERN,
     .window_pattern = 2,
     .window = 128,
     .needs_rope = true,
     .experts = {.n = 128,
                 .choices = 4,
                 .width = 2880,
                 .width_key = "intermediate_size",
                 .normalize = true,
                 .clamped = true,
                 .interleaved = true},
     .layer = gpt_oss_layer},

    {.type = "ministral3",
     .class_prefix = "Ministral3",
     .n_kv_heads = 8,
     .head_dim = 128,
     .rms_eps = 1e-5,
     .windows = MODEL_WINDOW_ALL,
     .query_scale = true,
     .layer = llama_layer},
    {.type = "olmo2",
     .class_prefix = "Olmo2",
     .rms_eps = 1e-5,
     .norm = NORM_SCALE_CAST,
     .keys = {ATTENTION_BIAS},
     .layer = olmo_layer},
    {.type = "olmo3",
     .class_prefix = "Olmo3",
     .rms_eps = 1e-5,
     .theta = 5e5,
     .norm = NORM_SCALE_CAST,
     .keys = {ATTENTION_BIAS},
     .windows = MODEL_WINDOW_PATTERN,
     .window_pattern = 4,
     .window = 4096,
     .local_theta = "rope_theta",
     .layer = olmo_layer},
    {.type = "gemma",
     .class_prefix = "Gemma",
     .n_kv_heads = 16,
     .head_dim = 256,
     .tied = true,
     .norm = NORM_ONE_PLUS,
     .keys = {ATTENTION_BIAS},
     .gelu = true,
     .scaled_embedding = true,
     .layer = llama_layer},
    {.type = "gemma2",
     .class_prefix = "Gemma2",
     .n_kv_heads = 4,
     .head_dim = 256,
     .tied = true,
     .norm = NORM_ONE_PLUS,
     .keys = {ATTENTION_BIAS},
     .windows = MODEL_WINDOW_PATTERN,
     .window_pattern = 2,
     .window = 4096,
     .gelu = true,
     .scaled_embedding = true,
     .query_scalar = 256,
     .softcaps = true,
     .attn_softcap = 50,
     .logit_softcap = 30,
     .layer = gemma2_layer},
    {.type = "gemma3_text",
     .class_prefix = "Gemma3",
     .n_kv_heads = 4,
     .head_dim = 256,
     .theta = 1e6,
     .tied = true,
     .norm = NORM_ONE_PLUS,
     .features = MODEL_QK_NORM,
     .keys = {ATTENTION_BIAS},
     .windows = MODEL_WINDOW_PATTERN,
     .window_pattern = 6,
     .window = 4096,
     .local_theta = "rope_local_base_freq",
     .gelu = true,
     .scaled_embedding = true,
     .query_scalar = 256,
     .softcaps = true,
     .layer = gemma2_layer},
    {.type = "hunyuan_v1_dense",
     .class_prefix = "HunYuanDenseV1",
     .rms_eps = 1e-5,
     .keys = {ATTENTION_BIAS},
     .ntk_alpha = true,
     .layer = hunyuan_layer},
    {.type = "granite",
     .class_prefix = "Granite",
     .keys = {ATTENTION_BIAS, {"mlp_bias", MODEL_MLP_BIAS}},
     .multipliers = true,
     .layer = llama_layer},
    {.type = "granitemoehybrid", /* Granite 4, of which the dense ones */
     .class_prefix = "GraniteMoeHybrid",
     .keys = {ATTENTION_BIAS},
     .rope_layers = MODEL_ROPE_NAMED,
     .ffn_key = "shared_intermediate_size",
     .ffn = 1024,
     .hybrid = true,
     .multipliers = true,
     .layer = granite4_layer},
    {.type = "exaone4",
     .class_prefix = "Exaone4",
     .n_kv_heads = 32,
     .rms_eps = 1e-5,
     .features = MODEL_QK_NORM,
     .windows = MODEL_WINDOW_PATTERN,
     .window_pattern = 4,
     .window = 4096,
     .rope_layers = MODEL_ROPE_WINDOWS,
     .layer = post_norm_layer},
    {.type = "qwen3_5_text",
     .outer_type = "qwen3_5",
     .kept = {"model.visual.", "mtp."},
     .class_prefix = "Qwen3_5",
     .n_kv_heads = 4,
     .head_dim = 256,
     .norm = NORM_ONE_PLUS,
     .features = MODEL_OUTPUT_GATE,
     .keys = {ATTENTION_BIAS},
     .partial_rotary = 0.25,
     .delta_interval = 4,
     .mtp = &mtp_rows[MTP_QWEN],
     .layer = delta_layer},
    {.type = "qwen3_5_moe_text",
     .outer_type = "qwen3_5_moe",
     .kept = {"model.visual.", "mtp."},
     .class_prefix = "Qwen3_5Moe",
     .n_kv_heads = 2,
     .head_dim = 256,
     .norm = NORM_ONE_PLUS,
     .features = MODEL_OUTPUT_GATE,
     .keys = {ATTENTION_BIAS},
     .partial_rotary = 0.25,
     .delta_interval = 4,
     .mtp = &mtp_rows[MTP_QWEN],
     .experts = {.n = 256,
                 .choices = 8,
                 .width = 512,
                 .width_key = "moe_intermediate_size",
                 .normalize = true,
                 .shared = 512,
                 .stacked = true},
     .layer = delta_moe_layer},
    {.type = "qwen3_next",
     .kept = {"mtp."},
     .class_prefix = "Qwen3Next",
     .n_kv_heads = 2,
     .head_dim = 256,
     .norm = NORM_ONE_PLUS,
     .features = MODEL_OUTPUT_GATE,
     .keys = {ATTENTION_BIAS},
     .partial_rotary = 0.25,
     .delta_interval = 4,
     .mtp = &mtp_rows[MTP_QWEN_NEXT],
     .experts = {.n = 512,
                 .choices = 10,
                 .width = 512,
                 .width_key = "moe_intermediate_size",
                 .dense = true,
                 .norm_key = true,
                 .shared = 512},
     .layer = delta_next_layer},
};
const char model_family_types[] =
    "llama, qwen2, qwen3, mistral, seed_oss, smollm3, phi3, glm, glm4, glm4_moe, glm4_moe_lite, deepseek_v2, deepseek_v3, "
    "hy_v3, minimax_m2, gpt_oss, ministral3, "
    "olmo2, olmo3, gemma, gemma2, gemma3_text, hunyuan_v1_dense, granite, granitemoehybrid, exaone4, qwen3_5, qwen3_5_text, "
    "qwen3_5_moe, "
    "qwen3_5_moe_text, qwen3_next, mimo, qwen2_moe, "
    "qwen3_moe, mixtral and olmoe";

const struct model_family *model_family_find(const char *type) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strcmp(type, families[i].type) == 0 || (families[i].outer_type && strcmp(type, families[i].outer_type) == 0))
            return &families[i];
    return NULL;
}

int model_layer_features(const struct model_config *c, int64_t l) {
    const int of_q = !c->mla.kv_rank ? 0 : c->mla.q_rank ? MODEL_Q_LORA : MODEL_Q_DIRECT;
    const int attention = c->features | of_q | (model_layer_is_delta(c, l) ? MODEL_DELTA_NET : MODEL_ATTENTION);
    if (!(c->layer[l] & MODEL_SPARSE)) return attention | MODEL_DENSE_MLP;
    return attention | MODEL_EXPERTS_MLP | (c->shared_ffn ? MODEL_SHARED_EXPERT : 0);
}

int64_t model_matrices(const struct model_config *c, enum model_role role) { return role == MODEL_EXPERTS ? c->n_experts : 1; }

bool model_has_group(const struct model_config *c, size_t place) {
    int kinds = 0;
    for (int64_t l = 0; l < c->n_layers; l++) kinds |= model_layer_features(c, l);
    if (c->mtp) kinds |= model_layer_features(c, model_mtp_layer(c));
    for (const struct model_group_row *row = c->family->layer; row->part->name; row++)
        if (row->place == place && !(row->needs & ~kinds)) return true;
    return false;
}

bool model_joint_delta(const struct model_config *c) {
    for (const struct model_group_row *row = c->family->layer; row->part->name; row++)
        if (row->part->rows == MODEL_DELTA_QKVZ) return c->delta.v_heads > 0;
    return false;
}

int64_t model_dim(const struct model_config *c, enum model_dim d) {
    const int64_t q = c->n_q_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    const int64_t n[] = {[MODEL_NO_DIM] = 1,
                         [MODEL_HIDDEN] = c->hidden,
                         [MODEL_TWO_HIDDEN] = 2 * c->hidden,
                         [MODEL_FFN] = c->ffn,
                         [MODEL_Q] = q,
                         [MODEL_KV] = kv,
                         [MODEL_QKV] = q + 2 * kv,
                         [MODEL_HEAD] = c->head_dim,
                         [MODEL_VOCAB] = c->vocab,
                         [MODEL_N_EXPERTS] = c->n_experts,
                         [MODEL_EXPERT_FFN] = c->expert_ffn,
                         [MODEL_SHARED_FFN] = c->shared_ffn,
                         [MODEL_Q_HEADS] = c->n_q_heads,
                         [MODEL_MLA_Q_RANK] = c->mla.q_rank,
                         [MODEL_MLA_KV_RANK] = c->mla.kv_rank,
                         [MODEL_MLA_LATENT] = c->mla.kv_rank + c->mla.rope,
                         [MODEL_MLA_Q] = c->n_q_heads * model_query_dim(c),
                         [MODEL_MLA_KV] = c->n_q_heads * (c->mla.nope + c->mla.v),
                         [MODEL_MLA_V] = c->n_q_heads * c->mla.v,
                         [MODEL_GATE_UP] = 2 * c->ffn,
                         [MODEL_Q_GATE] = 2 * q,
                         [MODEL_DELTA_QKV] = 2 * c->delta.k_heads * c->delta.k_dim + c->delta.v_heads * c->delta.v_dim,
                         [MODEL_DELTA_QKVZ] = 2 * (c->delta.k_heads * c->delta.k_dim + c->delta.v_heads * c->delta.v_dim),
                         [MODEL_DELTA_BA] = 2 * c->delta.v_heads,
                         [MODEL_DELTA_IN] = 2 * (c->delta.k_heads * c->delta.k_dim + c->delta.v_heads * (c->delta.v_dim + 1)),
                         [MODEL_DELTA_V] = c->delta.v_heads * c->delta.v_dim,
                         [MODEL_DELTA_HEADS] = c->delta.v_heads,
                         [MODEL_DELTA_HEAD] = c->delta.v_dim,
                         [MODEL_TAPS] = DEV_CONV_TAPS};
    return n[d];
}
