/* archs.c - built-in shapes: config.json of the well-known models of each family.
 *
 * A row has what nearly all families have, and as JSON what is the family's own.  Weights and tokenizers are not
 * its business (init.c, cmd/model.c).
 * Invariant: a shape is the released model's; the number of its parameters is the card's
 * (tests/unit/test_model.c, built_in_shapes), and transformers makes the same of it. */
#include "base/err.h"
#include "base/json.h"
#include "model/families.h"
#include "model/files/init.h"

#include <string.h>

struct arch {
    const char *name, *type;
    int64_t hidden, ffn, layers, q_heads, kv_heads, head_dim, vocab, max_pos;
    double theta, eps;
    int64_t eos, bos, pad; /* -1: null */
    bool tied;
    double llama3_factor; /* 0: no such rope scaling */
    int64_t window;       /* sliding_window; 0: none */
    const char *more;     /* members of the family's own; NULL: none */
};

/* Value heads of gated delta nets; their key heads are 16, all of 128. */
#define DELTA(v_heads)                                                                                                             \
    "\"linear_num_key_heads\": 16, \"linear_num_value_heads\": " #v_heads                                                          \
    ", \"linear_key_head_dim\": 128, \"linear_value_head_dim\": 128, \"linear_conv_kernel_dim\": 4, \"full_attention_interval\": " \
    "4"
#define EXPERTS(n, choices, width) \
    "\"num_experts\": " #n ", \"num_experts_per_tok\": " #choices ", \"moe_intermediate_size\": " #width
#define SHARED(width) ", \"shared_expert_intermediate_size\": " #width
#define QWEN_EXPERTS ", \"decoder_sparse_step\": 1, \"mlp_only_layers\": [], \"norm_topk_prob\": "
#define MLA(q_rank)             \
    "\"q_lora_rank\": " #q_rank \
    ", \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64, \"v_head_dim\": 128, "
#define GLM_MLA \
    "\"q_lora_rank\": 768, \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 192, \"qk_rope_head_dim\": 64, \"v_head_dim\": 256, "
#define ROUTED(n, choices, width, shared, groups, top_groups, scale, first)                                   \
    "\"n_routed_experts\": " #n ", \"num_experts_per_tok\": " #choices ", \"moe_intermediate_size\": " #width \
    ", \"n_shared_experts\": " #shared ", \"n_group\": " #groups ", \"topk_group\": " #top_groups             \
    ", \"routed_scaling_factor\": " #scale ", \"first_k_dense_replace\": " #first
#define YARN(factor, original, more)                                                                                 \
    "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": " #factor ", \"beta_fast\": 32.0, \"beta_slow\": 1.0, " \
    "\"original_max_position_embeddings\": " #original more "}"
#define MULTIPLIERS(attention, logits)                                                                     \
    "\"embedding_multiplier\": 12.0, \"residual_multiplier\": 0.22, \"attention_multiplier\": " #attention \
    ", \"logits_scaling\": " #logits
#define MSCALE(m) ", \"mscale\": " #m ", \"mscale_all_dim\": " #m
#define GLM_MOE(qk_norm) \
    ", \"norm_topk_prob\": true, \"attention_bias\": true, \"partial_rotary_factor\": 0.5, \"use_qk_norm\": " #qk_norm
#define LINEAR8 "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8.0}"
#define GPT_OSS(n)               \
    "\"num_local_experts\": " #n \
    ", \"num_experts_per_tok\": 4, \"attention_bias\": true, \"swiglu_limit\": 7.0, " YARN(32.0, 4096, ", \"truncate\": false")
#define MINISTRAL3 YARN(16.0, 16384, ", \"mscale\": 1.0, \"mscale_all_dim\": 1.0, \"llama_4_scaling_beta\": 0.1")

#define PHI_4_MINI                                                                                                        \
    "\"partial_rotary_factor\": 0.75, \"original_max_position_embeddings\": 4096, "                                       \
    "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [" ONES16 "," ONES16 "," ONES16 "], \"long_factor\": [" \
    "1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, "          \
    "2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, "            \
    "6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, "              \
    "16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, "     \
    "32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]}"
#define ONES16 "1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0"

/* From the config.json of the released models on the Hugging Face hub; of those with vision the text part. */
/* clang-format off */
static const struct arch archs[] = {
    {"qwen2.5-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0, NULL},
    {"qwen2.5-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0, NULL},
    {"qwen2.5-3b", "qwen2", 2048, 11008, 36, 16, 2, 128, 151936, 32768, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0, NULL},
    {"qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0, NULL},
    {"qwen2.5-14b", "qwen2", 5120, 13824, 48, 40, 8, 128, 152064, 32768, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0, NULL},
    {"qwen2.5-32b", "qwen2", 5120, 27648, 64, 40, 8, 128, 152064, 32768, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0, NULL},
    {"qwen2.5-72b", "qwen2", 8192, 29568, 80, 64, 8, 128, 152064, 32768, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0, NULL},
    {"deepseek-r1-distill-qwen-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 131072, 1e4, 1e-6, 151643, 151646, -1, false,
     0, 0, NULL},
    {"deepseek-r1-distill-qwen-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 131072, 1e4, 1e-6, 151643, 151646, -1, false,
     0, 0, NULL},
    {"qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0, NULL},
    {"qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0, NULL},
    {"qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, true, 0, 0, NULL},
    {"qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0, NULL},
    {"qwen3-14b", "qwen3", 5120, 17408, 40, 40, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0, NULL},
    {"qwen3-32b", "qwen3", 5120, 25600, 64, 64, 8, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0, NULL},
    {"qwen1.5-moe-a2.7b", "qwen2_moe", 2048, 5632, 24, 16, 16, 128, 151936, 8192, 1e6, 1e-6, 151643, 151643, -1, false, 0, 0,
     EXPERTS(60, 4, 1408) SHARED(5632) QWEN_EXPERTS "false"},
    {"qwen3-30b-a3b", "qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0,
     EXPERTS(128, 8, 768) QWEN_EXPERTS "true"},
    {"qwen3-235b-a22b", "qwen3_moe", 4096, 12288, 94, 64, 4, 128, 151936, 40960, 1e6, 1e-6, 151645, 151643, -1, false, 0, 0,
     EXPERTS(128, 8, 1536) QWEN_EXPERTS "true"},
    {"qwen3-next-80b-a3b", "qwen3_next", 2048, 5120, 48, 16, 2, 256, 151936, 262144, 1e7, 1e-6, 151645, 151643, -1, false, 0, 0,
     EXPERTS(512, 10, 512) SHARED(512) QWEN_EXPERTS "true, " DELTA(32) ", \"partial_rotary_factor\": 0.25"},
    {"qwen3.5-0.8b", "qwen3_5_text", 1024, 3584, 24, 8, 2, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, true, 0, 0, DELTA(16)},
    {"qwen3.5-2b", "qwen3_5_text", 2048, 6144, 24, 8, 2, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, true, 0, 0, DELTA(16)},
    {"qwen3.5-4b", "qwen3_5_text", 2560, 9216, 32, 16, 4, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, true, 0, 0, DELTA(32)},
    {"qwen3.5-9b", "qwen3_5_text", 4096, 12288, 32, 16, 4, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, false, 0, 0, DELTA(32)},
    {"qwen3.5-27b", "qwen3_5_text", 5120, 17408, 64, 24, 4, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, false, 0, 0, DELTA(48)},
    {"qwen3.5-35b-a3b", "qwen3_5_moe_text", 2048, 512, 40, 16, 2, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, false, 0, 0,
     EXPERTS(256, 8, 512) SHARED(512) ", " DELTA(32)},
    {"qwen3.5-122b-a10b", "qwen3_5_moe_text", 3072, 1024, 48, 32, 2, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, false, 0, 0,
     EXPERTS(256, 8, 1024) SHARED(1024) ", " DELTA(64)},
    {"qwen3.5-397b-a17b", "qwen3_5_moe_text", 4096, 1024, 60, 32, 2, 256, 248320, 262144, 1e7, 1e-6, 248044, -1, -1, false, 0, 0,
     EXPERTS(512, 10, 1024) SHARED(1024) ", " DELTA(64)},
    {"llama-2-7b", "llama", 4096, 11008, 32, 32, 32, 128, 32000, 4096, 1e4, 1e-5, 2, 1, -1, false, 0, 0, NULL},
    {"llama-3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, 1e-5, 128001, 128000, -1, true, 32, 0, NULL},
    {"llama-3.2-3b", "llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, 5e5, 1e-5, 128001, 128000, -1, true, 32, 0, NULL},
    {"llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 5e5, 1e-5, 128001, 128000, -1, false, 8, 0, NULL},
    {"llama-3.1-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256, 131072, 5e5, 1e-5, 128001, 128000, -1, false, 8, 0, NULL},
    {"deepseek-llm-7b", "llama", 4096, 11008, 30, 32, 32, 128, 102400, 4096, 1e4, 1e-6, 100001, 100000, -1, false, 0, 0, NULL},
    {"mimo-7b", "mimo", 4096, 11008, 36, 32, 8, 128, 151680, 32768, 640000, 1e-5, 151645, 151643, -1, false, 0, 0, NULL},
    {"mistral-7b", "mistral", 4096, 14336, 32, 32, 8, 128, 32000, 32768, 1e4, 1e-5, 2, 1, -1, false, 0, 0, NULL},
    {"mistral-nemo-12b", "mistral", 5120, 14336, 40, 32, 8, 128, 131072, 131072, 1e6, 1e-5, 2, 1, -1, false, 0, 0, NULL},
    {"mistral-small-24b", "mistral", 5120, 32768, 40, 32, 8, 128, 131072, 32768, 1e8, 1e-5, 2, 1, -1, false, 0, 0, NULL},
    {"ministral-3-3b", "ministral3", 3072, 9216, 26, 32, 8, 128, 131072, 262144, 1e6, 1e-5, 2, 1, 11, true, 0, 0, MINISTRAL3},
    {"ministral-3-8b", "ministral3", 4096, 14336, 34, 32, 8, 128, 131072, 262144, 1e6, 1e-5, 2, 1, 11, false, 0, 0, MINISTRAL3},
    {"ministral-3-14b", "ministral3", 5120, 16384, 40, 32, 8, 128, 131072, 262144, 1e6, 1e-5, 2, 1, 11, false, 0, 0, MINISTRAL3},
    {"mixtral-8x7b", "mixtral", 4096, 14336, 32, 32, 8, 128, 32000, 32768, 1e6, 1e-5, 2, 1, -1, false, 0, 0,
     "\"num_local_experts\": 8, \"num_experts_per_tok\": 2"},
    {"seed-oss-36b", "seed_oss", 5120, 27648, 64, 80, 8, 128, 155136, 524288, 1e7, 1e-6, 2, 0, 1, false, 0, 0, NULL},
    {"smollm3-3b", "smollm3", 2048, 11008, 36, 16, 4, 128, 128256, 65536, 5e6, 1e-6, 128012, 128000, 128004, true, 0, 0, NULL},
    {"phi-3-mini", "phi3", 3072, 8192, 32, 32, 32, 96, 32064, 4096, 1e4, 1e-5, 32000, 1, 32000, false, 0, 2047, NULL},
    {"phi-4", "phi3", 5120, 17920, 40, 40, 10, 128, 100352, 16384, 250000, 1e-5, 100265, 100257, 100349, false, 0, 0, NULL},
    {"phi-4-mini", "phi3", 3072, 8192, 32, 24, 8, 128, 200064, 131072, 1e4, 1e-5, 199999, 199999, 199999, true, 0, 262144,
     PHI_4_MINI},
    {"granite-3.3-2b", "granite", 2048, 8192, 40, 32, 8, 64, 49159, 131072, 1e7, 1e-5, 0, 0, 0, true, 0, 0,
     MULTIPLIERS(0.015625, 8.0)},
    {"granite-3.3-8b", "granite", 4096, 12800, 40, 32, 8, 128, 49159, 131072, 1e7, 1e-5, 0, 0, 0, true, 0, 0,
     MULTIPLIERS(0.0078125, 16.0)},
    {"granite-4.0-micro", "granitemoehybrid", 2560, 8192, 40, 40, 8, 64, 100352, 131072, 1e7, 1e-6, 100257, 100257, 100256, true,
     0, 0, MULTIPLIERS(0.015625, 10.0)},
    {"glm-4-9b", "glm", 4096, 13696, 40, 32, 2, 128, 151552, 8192, 1e4, 1.5625e-7, 151329, -1, 151329, false, 0, 0, NULL},
    {"glm-4-9b-0414", "glm4", 4096, 13696, 40, 32, 2, 128, 151552, 32768, 1e4, 1e-5, 151329, -1, 151329, false, 0, 0, NULL},
    {"glm-4-32b-0414", "glm4", 6144, 23040, 61, 48, 2, 128, 151552, 32768, 1e4, 1e-5, 151329, -1, 151329, false, 0, 0,
     "\"attention_bias\": false"},
    {"glm-4.5-air", "glm4_moe", 4096, 10944, 46, 96, 8, 128, 151552, 131072, 1e6, 1e-5, 151329, -1, 151329, false, 0, 0,
     ROUTED(128, 8, 1408, 1, 1, 1, 1.0, 1) GLM_MOE(false)},
    {"glm-4.5", "glm4_moe", 5120, 12288, 92, 96, 8, 128, 151552, 131072, 1e6, 1e-5, 151329, -1, 151329, false, 0, 0,
     ROUTED(160, 8, 1536, 1, 1, 1, 2.5, 3) GLM_MOE(true)},
    {"glm-4.7-flash", "glm4_moe_lite", 2048, 10240, 47, 20, 20, 64, 154880, 202752, 1e6, 1e-5, 154820, -1, 154820, false, 0, 0,
     GLM_MLA ROUTED(64, 4, 1536, 1, 1, 1, 1.8, 1) ", \"norm_topk_prob\": true"},
    {"minimax-m2", "minimax_m2", 3072, 1536, 62, 48, 8, 128, 200064, 196608, 5e6, 1e-6, 200020, 200034, -1, false, 0, 0,
     "\"num_local_experts\": 256, \"num_experts_per_tok\": 8, \"rotary_dim\": 64"},
    {"hunyuan-3", "hy_v3", 4096, 13312, 80, 64, 8, 128, 120832, 262144, 11158840, 1e-5, 120025, 120000, 120002, false, 0, 0,
     EXPERTS(192, 8, 1536) ", \"num_shared_experts\": 1, \"first_k_dense_replace\": 1, \"router_scaling_factor\": 2.826, "
                           "\"initializer_range\": 0.006"},
    {"deepseek-v2-lite", "deepseek_v2", 2048, 10944, 27, 16, 16, 64, 102400, 163840, 1e4, 1e-6, 100001, 100000, -1, false, 0, 0,
     MLA(null) ROUTED(64, 6, 1408, 2, 1, 1, 1.0, 1)
     ", \"topk_method\": \"greedy\", \"norm_topk_prob\": false, " YARN(40.0, 4096, MSCALE(0.707))},
    {"deepseek-v3", "deepseek_v3", 7168, 18432, 61, 128, 128, 64, 129280, 163840, 1e4, 1e-6, 1, 0, -1, false, 0, 0,
     MLA(1536) ROUTED(256, 8, 2048, 1, 8, 4, 2.5, 3) ", \"norm_topk_prob\": true, " YARN(40.0, 4096, MSCALE(1.0))},
    {"moonlight-16b-a3b", "deepseek_v3", 2048, 11264, 27, 16, 16, 64, 163840, 8192, 5e4, 1e-5, 163585, 163584, -1, false, 0, 0,
     MLA(null) ROUTED(64, 6, 1408, 2, 1, 1, 2.446, 1) ", \"norm_topk_prob\": true"},
    {"gpt-oss-20b", "gpt_oss", 2880, 2880, 24, 64, 8, 64, 201088, 131072, 150000, 1e-5, 200002, -1, 199999, false, 0, 128,
     GPT_OSS(32)},
    {"gpt-oss-120b", "gpt_oss", 2880, 2880, 36, 64, 8, 64, 201088, 131072, 150000, 1e-5, 200002, -1, 199999, false, 0, 128,
     GPT_OSS(128)},
    {"gemma-2b", "gemma", 2048, 16384, 18, 8, 1, 256, 256000, 8192, 1e4, 1e-6, 1, 2, 0, true, 0, 0, NULL},
    {"gemma-7b", "gemma", 3072, 24576, 28, 16, 16, 256, 256000, 8192, 1e4, 1e-6, 1, 2, 0, true, 0, 0, NULL},
    {"gemma-2-2b", "gemma2", 2304, 9216, 26, 8, 4, 256, 256000, 8192, 1e4, 1e-6, 1, 2, 0, true, 0, 4096, NULL},
    {"gemma-2-9b", "gemma2", 3584, 14336, 42, 16, 8, 256, 256000, 8192, 1e4, 1e-6, 1, 2, 0, true, 0, 4096, NULL},
    {"gemma-2-27b", "gemma2", 4608, 36864, 46, 32, 16, 128, 256000, 8192, 1e4, 1e-6, 1, 2, 0, true, 0, 4096,
     "\"query_pre_attn_scalar\": 144"},
    {"gemma-3-1b", "gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 32768, 1e6, 1e-6, 1, 2, 0, true, 0, 512, NULL},
    {"gemma-3-4b", "gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, 131072, 1e6, 1e-6, 1, 2, 0, true, 0, 1024, LINEAR8},
    {"gemma-3-12b", "gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, 131072, 1e6, 1e-6, 1, 2, 0, true, 0, 1024, LINEAR8},
    {"gemma-3-27b", "gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, 131072, 1e6, 1e-6, 1, 2, 0, true, 0, 1024,
     LINEAR8 ", \"query_pre_attn_scalar\": 168"},
    {"olmo-2-1b", "olmo2", 2048, 8192, 16, 16, 16, 128, 100352, 4096, 5e5, 1e-6, 100257, -1, 100277, false, 0, 0, NULL},
    {"olmo-2-7b", "olmo2", 4096, 11008, 32, 32, 32, 128, 100352, 4096, 5e5, 1e-6, 100257, -1, 100277, false, 0, 0, NULL},
    {"olmo-2-13b", "olmo2", 5120, 13824, 40, 40, 40, 128, 100352, 4096, 5e5, 1e-6, 100257, -1, 100277, false, 0, 0, NULL},
    {"olmo-3-7b", "olmo3", 4096, 11008, 32, 32, 32, 128, 100278, 65536, 5e5, 1e-6, 100257, -1, 100277, false, 0, 4096,
     YARN(8.0, 8192, ", \"attention_factor\": 1.2079441541679836")},
    {"olmoe-1b-7b", "olmoe", 2048, 1024, 16, 16, 16, 128, 50304, 4096, 1e4, 1e-5, 50279, -1, 1, false, 0, 0,
     "\"num_experts\": 64, \"num_experts_per_tok\": 8, \"norm_topk_prob\": false, \"clip_qkv\": null"},
    {"exaone-4.0-32b", "exaone4", 5120, 27392, 64, 40, 8, 128, 102400, 131072, 1e6, 1e-5, 361, 1, 0, false, 16, 4096,
     "\"sliding_window_pattern\": 4"},
    /* for the demo: trains in minutes on two cores; vocabulary and end tokens come with its tokenizer */
    {"tiny", "qwen2", 192, 512, 4, 6, 2, 32, 640, 4096, 1e4, 1e-6, -1, -1, -1, true, 0, 0, NULL},
};
/* clang-format on */
enum { N_ARCHS = sizeof archs / sizeof archs[0] };

/* Granite 4's: layers of attention alone, its multipliers. */
static void add_granite4(json_t *o, const struct arch *a) {
    json_t *const types = json_array();
    for (int64_t l = 0; l < a->layers; l++) json_array_append_new(types, json_string("attention"));
    json_object_update_new(o, json_pack("{s:o, s:I, s:i, s:s}", "layer_types", types, "shared_intermediate_size",
                                        (json_int_t)a->ffn, "num_local_experts", 0, "position_embedding_type", "rope"));
}

static json_t *token_or_null(int64_t id) { return id < 0 ? json_null() : json_integer(id); }

/* What all rows of a family have alike. */
static void add_windows(json_t *o, const struct arch *a, const struct model_family *f) {
    if (a->window > 0) json_object_set_new(o, "sliding_window", json_integer(a->window));
    else if (f->windows == MODEL_WINDOW_ALL) json_object_set_new(o, "sliding_window", json_null()); /* Mistral v0.3 */
    if (f->windows == MODEL_WINDOW_FROM || f->windows == MODEL_WINDOW_NO_ROPE || f->windows == MODEL_WINDOW_USED ||
        f->windows == MODEL_WINDOW_EVEN)
        json_object_set_new(o, "use_sliding_window", json_false());
}

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
    add_windows(o, a, f);
    if (f->mtp) json_object_set_new(o, f->mtp->key, json_integer(1));
    if (a->more) {
        char *const text = xasprintf("{%s}", a->more);
        json_t *const more = json_loads(text, 0, NULL);
        CHECK(more != NULL);
        json_object_update_new(o, more);
        free(text);
    }
    return o;
}

void model_arch_names(void (*fn)(void *arg, const char *name), void *arg) {
    for (int i = 0; i < N_ARCHS; i++) fn(arg, archs[i].name);
}
