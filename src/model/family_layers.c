/* family_layers.c - the groups of weights of a layer, of each kind of layer that families.c has: what reads them, and the names and
 * sizes of their tensors in files.
 *
 * Invariant: a tensor of a layer's files is in one group of its list. */
#include "model/family_layers.h"

#include "model/parameters.h"

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

const struct model_group_row model_llama_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),         QKV,     HEAD_NORMS, O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0), GATE_UP, DOWN,       {0},
};
/* Phi-3's files have q, k, v and gate, up as the passes read them: one matrix each. */
const struct model_group_row model_phi3_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    LINEAR(qkv, MODEL_HIDDEN, 0, {"self_attn.qkv_proj", MODEL_QKV}),
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    FUSED_GATE_UP,
    DOWN,
    {0},
};

const struct model_group_row model_granite4_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    LINEAR(gate_up, MODEL_HIDDEN, 0, {"shared_mlp.input_linear", MODEL_GATE_UP}),
    LINEAR(down, MODEL_FFN, 0, {"shared_mlp.output_linear", MODEL_HIDDEN}),
    {0},
};

const struct model_group_row model_glm_layer[] = {
    NORM(attn_norm, "input_layernorm", MODEL_HIDDEN, 0),
    QKV,
    O,
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    FUSED_GATE_UP,
    DOWN,
    {0},
};

const struct model_group_row model_gemma2_layer[] = {
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
const struct model_group_row model_glm4_layer[] = {
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
const struct model_group_row model_hunyuan_layer[] = {
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
const struct model_group_row model_olmo_layer[] = {
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
const struct model_group_row model_post_norm_layer[] = {
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
const struct model_group_row model_qwen_moe_layer[] = {
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

const struct model_group_row model_qwen2_moe_layer[] = {
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

const struct model_group_row model_glm4_moe_layer[] = {
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

const struct model_group_row model_hy_v3_layer[] = {
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
const struct model_group_row model_minimax_m2_layer[] = {
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
const struct model_group_row model_deepseek_layer[] = {
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
const struct model_group_row model_gpt_oss_layer[] = {
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

const struct model_group_row model_olmoe_layer[] = {
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

const struct model_group_row model_mixtral_layer[] = {
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

const struct model_group_row model_delta_layer[] = {
    DELTA_MIXERS(DELTA_INPUTS), NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0), GATE_UP, DOWN, {0},
};

const struct model_group_row model_delta_moe_layer[] = {
    DELTA_MIXERS(DELTA_INPUTS),
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_expert"),
    SHARED_GATE("mlp.shared_expert_gate"),
    {0},
};

const struct model_group_row model_delta_next_layer[] = {
    DELTA_MIXERS(JOINT_DELTA_INPUTS),
    NORM(mlp_norm, "post_attention_layernorm", MODEL_HIDDEN, 0),
    DENSE_MLP,
    ROUTER("mlp.gate"),
    EXPERTS("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    SHARED_EXPERT("mlp.shared_expert"),
    SHARED_GATE("mlp.shared_expert_gate"),
    {0},
};
