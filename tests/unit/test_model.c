/* test_model.c - configuration, schedules, init, export, safetensors, and the
 * optimizer's refusal of non-finite gradients.  Numbers against transformers
 * are in tests/golden. */
#include "model_case.h"

#include "base/json.h"

/* ---- config ---- */

static int parse(struct model_config *c, const char *text) {
    json_t *o = NULL;
    OK(json_parse(&o, text, strlen(text), "test"));
    const int rc = model_config_from_json(c, o, "config.json");
    json_decref(o);
    return rc;
}
#define BASE "\"num_hidden_layers\":30,\"hidden_size\":64,\"intermediate_size\":128,\"num_attention_heads\":4,\"vocab_size\":100"

#define FIVE "\"attention\",\"attention\",\"attention\",\"attention\",\"attention\""
#define ALL_ATTENTION ",\"layer_types\":[" FIVE "," FIVE "," FIVE "," FIVE "," FIVE "," FIVE "]"
#define GRANITE4 "{\"model_type\":\"granitemoehybrid\",\"num_local_experts\":0," BASE
#define LAST_LAYER(is) ",\"layer_types\":[" FIVE "," FIVE "," FIVE "," FIVE "," FIVE ",\"full_attention\"," is "]"

static void config_spellings(void **state) {
    (void)state;
    struct model_config a, b;
    OK(parse(&a, "{\"model_type\":\"llama\"," BASE ",\"num_key_value_heads\":2,\"max_position_embeddings\":8192,"
                 "\"rope_theta\":500000.0,"
                 "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
                 "\"original_max_position_embeddings\":4096},\"torch_dtype\":\"bfloat16\",\"eos_token_id\":[1,2]}"));
    OK(parse(&b, "{\"model_type\":\"llama\"," BASE ",\"num_key_value_heads\":2,\"max_position_embeddings\":8192,"
                 "\"rope_parameters\":{\"rope_theta\":500000.0,\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
                 "\"high_freq_factor\":4,\"original_max_position_embeddings\":4096},\"dtype\":\"bfloat16\",\"eos_token_id\":2}"));
    assert_memory_equal(&a.rope, &b.rope, sizeof a.rope);
    assert_true(a.rope.kind == ROPE_LLAMA3 && a.rope.theta == 500000 && a.dtype == DT_BF16 && b.dtype == DT_BF16);
    assert_true(a.n_eos == 2 && a.eos[1] == 2 && b.n_eos == 1 && b.eos[0] == 2 && a.bos == -1);
    model_config_free(&a);
    model_config_free(&b);
}

static void config_defaults(void **state) {
    (void)state;
    struct model_config c;
    OK(parse(&c, "{\"model_type\":\"qwen3\"," BASE "}"));
    assert_true(c.head_dim == 128 && c.n_kv_heads == 4 && c.features == MODEL_QK_NORM && !c.tied && c.rope.theta == 10000);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"qwen2\"," BASE ",\"use_sliding_window\":true,\"sliding_window\":7}"));
    assert_true(c.head_dim == 16 && c.features == MODEL_QKV_BIAS && c.window == 7 && !c.layer[27] && c.layer[28] == MODEL_WINDOWED);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"qwen2\"," BASE ",\"sliding_window\":7}"));
    assert_int_equal(c.window, 0);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"mistral\"," BASE ",\"num_key_value_heads\":2}"));
    assert_true(c.window == 4096 && c.layer[0] == MODEL_WINDOWED);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"mistral\"," BASE ",\"num_key_value_heads\":2,\"sliding_window\":null}"));
    assert_int_equal(c.window, 0);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"llama\"," BASE ",\"attention_bias\":true,\"mlp_bias\":true}"));
    assert_true(c.features == (MODEL_QKV_BIAS | MODEL_O_BIAS | MODEL_MLP_BIAS) && c.window == 0);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"seed_oss\"," BASE
                 ",\"num_key_value_heads\":2,\"attention_dropout\":0.1,\"residual_dropout\":0.1}"));
    assert_true(c.features == MODEL_QKV_BIAS && c.head_dim == 128 && c.window == 0);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"seed_oss\"," BASE
                 ",\"num_key_value_heads\":2,\"attention_bias\":false,\"attention_out_bias\":true}"));
    assert_int_equal(c.features, MODEL_O_BIAS);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"gemma2\"," BASE "}"));
    assert_true(c.tied && c.attn_softcap == 50 && c.logit_softcap == 30 && c.attn_scale == 0.0625f && c.embed_scale == 8);
    assert_true(c.window == 4096 && c.layer[0] == MODEL_WINDOWED && c.layer[1] == 0);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"gemma2\"," BASE ",\"final_logit_softcapping\":null,\"attn_logit_softcapping\":null}"));
    assert_true(c.attn_softcap == 0 && c.logit_softcap == 0);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"gemma3_text\"," BASE ",\"sliding_window\":512}"));
    assert_true(c.rope.theta == 1e6 && c.local_rope.theta == 1e4 && c.layer[5] == 0 && c.layer[4] == MODEL_WINDOWED);
    model_config_free(&c);
    OK(parse(&c, "{\"model_type\":\"phi3\"," BASE "}"));
    assert_true(c.window == 0 && c.rms_eps == 1e-5f && c.n_kv_heads == 4);
    model_config_free(&c);
}

/* Which layers have rope and windows: bit l of each. */
static void config_layers(void **state) {
    (void)state;
    static const struct {
        const char *keys;
        unsigned no_rope, windowed;
    } rows[] = {
        {"\"smollm3\"", 0x88, 0},
        {"\"smollm3\",\"no_rope_layer_interval\":2,\"use_sliding_window\":true,\"sliding_window\":5", 0xaa, 0xaa},
        {"\"smollm3\",\"no_rope_layers\":[1,1,0,1,1,1,1,0],\"use_sliding_window\":true,\"sliding_window\":5", 0x84, 0x84},
        {"\"smollm3\",\"no_rope_layers\":[1,1,0,1,1,1,1,0],\"sliding_window\":5", 0x84, 0},
        {"\"exaone4\",\"num_key_value_heads\":2", 0x88, 0x77},
        {"\"exaone4\",\"num_key_value_heads\":2,\"sliding_window_pattern\":\"LLG\"", 0xa4, 0x5b},
        {"\"exaone4\",\"num_key_value_heads\":2,\"sliding_window_pattern\":\"L\"", 0x80, 0x7f},
        {"\"exaone4\",\"num_key_value_heads\":2,\"sliding_window\":null", 0, 0},
        {"\"exaone4\",\"num_key_value_heads\":2,\"sliding_window_pattern\":null", 0xff, 0},
        {"\"olmo3\"", 0, 0x77},
        {"\"qwen2\",\"use_sliding_window\":true,\"max_window_layers\":6", 0, 0xc0},
        {"\"qwen3_moe\",\"use_sliding_window\":true,\"max_window_layers\":6", 0, 0xff},
        {"\"qwen2_moe\",\"num_key_value_heads\":2,\"use_sliding_window\":true,\"max_window_layers\":6", 0, 0x15},
        {"\"qwen3\",\"use_sliding_window\":true,\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\","
         "\"full_attention\",\"sliding_attention\",\"full_attention\",\"full_attention\",\"full_attention\"]",
         0, 0x11},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct model_config c;
        char *text = xasprintf("{\"num_hidden_layers\":8,\"hidden_size\":64,\"intermediate_size\":128,\"num_attention_heads\":4,"
                               "\"vocab_size\":100,\"model_type\":%s}",
                               rows[i].keys);
        unsigned no_rope = 0, windowed = 0;
        OK(parse(&c, text));
        for (int l = 0; l < 8; l++) {
            no_rope |= (unsigned)(model_layer_rope(&c, l) == MODEL_ROPE_NONE) << l;
            windowed |= (unsigned)(c.layer[l] & MODEL_WINDOWED) << l;
        }
        if (no_rope != rows[i].no_rope || windowed != rows[i].windowed) fail_msg("%s: %x, %x", text, no_rope, windowed);
        assert_true(model_has_rope(&c, MODEL_ROPE_NONE) == (no_rope != 0) && (c.window > 0) == (windowed != 0));
        model_config_free(&c);
        free(text);
    }
}

/* The text of a checkpoint with other parts: its keys, its names. */
static void config_of_text(void **state) {
    (void)state;
    struct model_config c;
    struct model *m;
    OK(parse(&c, "{\"model_type\":\"qwen3_5\",\"tie_word_embeddings\":true,\"dtype\":\"bfloat16\",\"vision_config\":{},"
                 "\"text_config\":{\"model_type\":\"qwen3_5_text\"," BASE ",\"eos_token_id\":7,\"rope_parameters\":"
                 "{\"rope_theta\":1e7,\"mrope_section\":[11,11,10],\"rope_type\":\"default\"}}}"));
    assert_true(c.outer && c.tied && c.dtype == DT_BF16 && c.eos[0] == 7 && c.rope.theta == 1e7 && c.rope.dim == 64);
    assert_true(model_attention_layers(&c) == 7 && model_layer_is_delta(&c, 0) && !model_layer_is_delta(&c, 3));
    OK(model_shape(&m, &c, NULL, DT_F32, QUANT_NONE, NULL));
    assert_string_equal(m->params[0].name, "model.language_model.embed_tokens.weight");
    assert_string_equal(m->params[1].name, "model.language_model.layers.0.input_layernorm.weight");
    model_shape_free(m);
    model_config_make_value(&c); /* of the text alone */
    assert_true(!c.outer && strcmp(json_string_value(json_object_get(c.json, "model_type")), "qwen3_5_text") == 0);
    model_config_free(&c);
}

/* Lists of the full layers' own rope, and of which the run's longest sequence chooses one. */
static void longrope_lists(void **state) {
    (void)state;
    struct model_config c;
    float table[2 * 16], longer[2 * 16];
    OK(parse(&c, "{\"model_type\":\"gemma3_text\"," BASE ",\"head_dim\":16,\"rope_parameters\":{\"full_attention\":{\"rope_type\":"
                 "\"longrope\",\"rope_theta\":1e4,\"short_factor\":[1,1,1,1,1,1,1,1],\"long_factor\":[2,2,2,2,2,2,2,2],"
                 "\"original_max_position_embeddings\":2048}}}"));
    model_rope_table(&c, MODEL_ROPE, 2, 2048, table);
    model_rope_table(&c, MODEL_ROPE, 2, 2049, longer);
    assert_true(fabsf(table[16] - cosf(1)) < 1e-6f);
    assert_true(fabsf(longer[16] - cosf(0.5f)) < 1e-6f);
    model_config_free(&c);
}

/* The tensors of a layer, in the order of the flat master and so of checkpoints. */
#define QKV(kind) " self_attn.q_proj." kind " self_attn.k_proj." kind " self_attn.v_proj." kind
#define GATE_UP(kind) " mlp.gate_proj." kind " mlp.up_proj." kind
#define EXPERT(n) " mlp.experts." n ".gate_proj.weight mlp.experts." n ".up_proj.weight"
static void families(void **state) {
    (void)state;
    static const struct {
        const char *type, *keys, *layer;
    } rows[] = {
        {"llama", ",\"attention_bias\":true,\"mlp_bias\":true",
         "input_layernorm.weight" QKV("weight") QKV("bias") " self_attn.o_proj.weight self_attn.o_proj.bias "
                                                            "post_attention_layernorm.weight" GATE_UP("weight")
                                                                GATE_UP("bias") " mlp.down_proj.weight mlp.down_proj.bias"},
        {"qwen2", "",
         "input_layernorm.weight" QKV("weight")
             QKV("bias") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP("weight") " mlp.down_proj.weight"},
        {"qwen3", "",
         "input_layernorm.weight" QKV("weight") " self_attn.q_norm.weight self_attn.k_norm.weight self_attn.o_proj.weight "
                                                "post_attention_layernorm.weight" GATE_UP("weight") " mlp.down_proj.weight"},
        {"seed_oss", ",\"num_key_value_heads\":2",
         "input_layernorm.weight" QKV("weight")
             QKV("bias") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP("weight") " mlp.down_proj.weight"},
        {"gemma", ",\"num_key_value_heads\":2",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
             "weight") " mlp.down_proj.weight"},
        {"gemma2", "",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight "
                                                "pre_feedforward_layernorm.weight" GATE_UP(
                                                    "weight") " mlp.down_proj.weight post_feedforward_layernorm.weight"},
        {"gemma3_text", "",
         "input_layernorm.weight" QKV("weight") " self_attn.q_norm.weight self_attn.k_norm.weight self_attn.o_proj.weight "
                                                "post_attention_layernorm.weight pre_feedforward_layernorm.weight" GATE_UP(
                                                    "weight") " mlp.down_proj.weight post_feedforward_layernorm.weight"},
        {"glm4", ",\"num_key_value_heads\":2,\"attention_bias\":false",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_self_attn_layernorm.weight "
                                                "post_attention_layernorm.weight mlp.gate_up_proj.weight mlp.down_proj.weight "
                                                "post_mlp_layernorm.weight"},
        {"glm", ",\"num_key_value_heads\":2",
         "input_layernorm.weight" QKV("weight") QKV("bias") " self_attn.o_proj.weight post_attention_layernorm.weight "
                                                            "mlp.gate_up_proj.weight mlp.down_proj.weight"},
        {"phi3", "",
         "input_layernorm.weight self_attn.qkv_proj.weight self_attn.o_proj.weight post_attention_layernorm.weight "
         "mlp.gate_up_proj.weight mlp.down_proj.weight"},
        {"mistral", ",\"num_key_value_heads\":2",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
             "weight") " mlp.down_proj.weight"},
        {"exaone4", ",\"num_key_value_heads\":2",
         "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight self_attn.q_norm.weight self_attn.k_norm.weight "
         "self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
             "weight") " mlp.down_proj.weight post_feedforward_layernorm.weight"},
        {"granite", "",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
             "weight") " mlp.down_proj.weight"},
        {"granitemoehybrid", ",\"num_local_experts\":0" ALL_ATTENTION,
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight "
                                                "shared_mlp.input_linear.weight shared_mlp.output_linear.weight"},
        {"ministral3", ",\"num_key_value_heads\":2,\"rope_parameters\":{\"rope_theta\":1e6}",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
             "weight") " mlp.down_proj.weight"},
        {"olmo2", "",
         "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight self_attn.q_norm.weight self_attn.k_norm.weight "
         "self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
             "weight") " mlp.down_proj.weight post_feedforward_layernorm.weight"},
        {"mimo", ",\"num_nextn_predict_layers\":1",
         "input_layernorm.weight" QKV("weight")
             QKV("bias") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP("weight") " mlp.down_proj.weight"},
        {"qwen3_moe", ",\"num_key_value_heads\":2,\"num_experts\":2,\"num_experts_per_tok\":1,\"mlp_only_layers\":[3]",
         "input_layernorm.weight" QKV("weight") " self_attn.q_norm.weight self_attn.k_norm.weight self_attn.o_proj.weight "
                                                "post_attention_layernorm.weight mlp.gate.weight" EXPERT("0")
                                                    EXPERT("1") " mlp.experts.0.down_proj.weight mlp.experts.1.down_proj.weight"},
        {"qwen2_moe", ",\"num_key_value_heads\":2,\"num_experts\":2,\"num_experts_per_tok\":1,\"mlp_only_layers\":[3]",
         "input_layernorm.weight" QKV("weight")
             QKV("bias") " self_attn.o_proj.weight post_attention_layernorm.weight mlp.gate.weight" EXPERT("0")
                 EXPERT("1") " mlp.experts.0.down_proj.weight mlp.experts.1.down_proj.weight mlp.shared_expert.gate_proj.weight "
                             "mlp.shared_expert.up_proj.weight mlp.shared_expert.down_proj.weight mlp.shared_expert_gate.weight"},
        {"glm4_moe", ",\"num_key_value_heads\":2,\"n_routed_experts\":2,\"num_experts_per_tok\":1,\"first_k_dense_replace\":4",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight mlp.gate.weight" EXPERT(
             "0") EXPERT("1") " mlp.experts.0.down_proj.weight mlp.experts.1.down_proj.weight mlp.shared_experts.gate_proj.weight "
                              "mlp.shared_experts.up_proj.weight mlp.shared_experts.down_proj.weight"},
        {"hy_v3", ",\"num_key_value_heads\":2,\"num_experts\":1,\"num_experts_per_tok\":1",
         "input_layernorm.weight" QKV("weight") " self_attn.q_norm.weight self_attn.k_norm.weight self_attn.o_proj.weight "
                                                "post_attention_layernorm.weight mlp.router.gate.weight" EXPERT(
                                                    "0") " mlp.experts.0.down_proj.weight mlp.shared_mlp.gate_proj.weight "
                                                         "mlp.shared_mlp.up_proj.weight mlp.shared_mlp.down_proj.weight"},
        {"minimax_m2", ",\"num_key_value_heads\":2,\"num_local_experts\":1,\"num_experts_per_tok\":1",
         "input_layernorm.weight" QKV("weight") " self_attn.q_norm.weight self_attn.k_norm.weight self_attn.o_proj.weight "
                                                "post_attention_layernorm.weight block_sparse_moe.gate.weight "
                                                "block_sparse_moe.experts.0.w1.weight block_sparse_moe.experts.0.w3.weight "
                                                "block_sparse_moe.experts.0.w2.weight"},
        {"glm4_moe_lite", ",\"q_lora_rank\":null,\"n_routed_experts\":1,\"num_experts_per_tok\":1,\"n_shared_experts\":0",
         "input_layernorm.weight self_attn.q_proj.weight self_attn.kv_a_proj_with_mqa.weight self_attn.kv_a_layernorm.weight "
         "self_attn.kv_b_proj.weight self_attn.o_proj.weight post_attention_layernorm.weight mlp.gate.weight" EXPERT(
             "0") " mlp.experts.0.down_proj.weight"},
        {"gpt_oss",
         ",\"num_key_value_heads\":2,\"num_local_experts\":2,\"num_experts_per_tok\":1,\"rope_scaling\":{\"rope_type\":"
         "\"default\"}",
         "input_layernorm.weight" QKV("weight")
             QKV("bias") " self_attn.sinks self_attn.o_proj.weight self_attn.o_proj.bias "
                         "post_attention_layernorm.weight mlp.router.weight mlp.router.bias" EXPERT("0")
                             EXPERT("1") " mlp.experts.0.gate_proj.bias mlp.experts.0.up_proj.bias mlp.experts.1.gate_proj.bias "
                                         "mlp.experts.1.up_proj.bias "
                                         "mlp.experts.0.down_proj.weight mlp.experts.1.down_proj.weight "
                                         "mlp.experts.0.down_proj.bias mlp.experts.1.down_proj.bias"},
        {"deepseek_v3", ",\"q_lora_rank\":null,\"n_routed_experts\":2,\"num_experts_per_tok\":1,\"n_group\":1,\"topk_group\":1",
         "input_layernorm.weight self_attn.q_proj.weight self_attn.kv_a_proj_with_mqa.weight self_attn.kv_a_layernorm.weight "
         "self_attn.kv_b_proj.weight "
         "self_attn.o_proj.weight post_attention_layernorm.weight mlp.gate.weight" EXPERT("0")
             EXPERT("1") " mlp.experts.0.down_proj.weight mlp.experts.1.down_proj.weight mlp.shared_experts.gate_proj.weight "
                         "mlp.shared_experts.up_proj.weight mlp.shared_experts.down_proj.weight"},
        {"deepseek_v2", ",\"n_routed_experts\":2,\"num_experts_per_tok\":1",
         "input_layernorm.weight self_attn.q_a_proj.weight self_attn.q_a_layernorm.weight self_attn.q_b_proj.weight "
         "self_attn.kv_a_proj_with_mqa.weight self_attn.kv_a_layernorm.weight self_attn.kv_b_proj.weight "
         "self_attn.o_proj.weight post_attention_layernorm.weight mlp.gate.weight" EXPERT("0")
             EXPERT("1") " mlp.experts.0.down_proj.weight mlp.experts.1.down_proj.weight mlp.shared_experts.gate_proj.weight "
                         "mlp.shared_experts.up_proj.weight mlp.shared_experts.down_proj.weight"},
        {"hunyuan_v1_dense", "",
         "input_layernorm.weight" QKV("weight") " self_attn.query_layernorm.weight self_attn.key_layernorm.weight "
                                                "self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
                                                    "weight") " mlp.down_proj.weight"},
        {"olmoe", ",\"num_experts\":1,\"num_experts_per_tok\":1",
         "input_layernorm.weight" QKV("weight") " self_attn.q_norm.weight self_attn.k_norm.weight self_attn.o_proj.weight "
                                                "post_attention_layernorm.weight mlp.gate.weight" EXPERT(
                                                    "0") " mlp.experts.0.down_proj.weight"},
        {"mixtral", ",\"num_key_value_heads\":2,\"num_local_experts\":1,\"num_experts_per_tok\":1",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight "
                                                "block_sparse_moe.gate.weight block_sparse_moe.experts.0.w1.weight "
                                                "block_sparse_moe.experts.0.w3.weight block_sparse_moe.experts.0.w2.weight"},
        {"qwen3_5_text", ",\"full_attention_interval\":1",
         "input_layernorm.weight" QKV("weight") " self_attn.q_norm.weight self_attn.k_norm.weight self_attn.o_proj.weight "
                                                "post_attention_layernorm.weight" GATE_UP("weight") " mlp.down_proj.weight"},
        {"qwen3_5_text", ",\"full_attention_interval\":100",
         "input_layernorm.weight linear_attn.in_proj_qkv.weight linear_attn.in_proj_z.weight linear_attn.in_proj_b.weight "
         "linear_attn.in_proj_a.weight linear_attn.conv1d.weight linear_attn.A_log linear_attn.dt_bias linear_attn.norm.weight "
         "linear_attn.out_proj.weight post_attention_layernorm.weight" GATE_UP("weight") " mlp.down_proj.weight"},
        {"qwen3_5_moe_text",
         ",\"full_attention_interval\":100,\"num_key_value_heads\":2,\"num_experts\":1,\"num_experts_per_tok\":1",
         "input_layernorm.weight linear_attn.in_proj_qkv.weight linear_attn.in_proj_z.weight linear_attn.in_proj_b.weight "
         "linear_attn.in_proj_a.weight linear_attn.conv1d.weight linear_attn.A_log linear_attn.dt_bias linear_attn.norm.weight "
         "linear_attn.out_proj.weight post_attention_layernorm.weight mlp.gate.weight" EXPERT(
             "0") " mlp.experts.0.down_proj.weight mlp.shared_expert.gate_proj.weight mlp.shared_expert.up_proj.weight "
                  "mlp.shared_expert.down_proj.weight mlp.shared_expert_gate.weight"},
        {"qwen3_next", ",\"full_attention_interval\":100,\"num_key_value_heads\":2,\"num_experts\":1,\"num_experts_per_tok\":1",
         "input_layernorm.weight linear_attn.in_proj_qkvz.weight linear_attn.in_proj_ba.weight linear_attn.conv1d.weight "
         "linear_attn.A_log linear_attn.dt_bias linear_attn.norm.weight linear_attn.out_proj.weight "
         "post_attention_layernorm.weight mlp.gate.weight" EXPERT(
             "0") " mlp.experts.0.down_proj.weight mlp.shared_expert.gate_proj.weight mlp.shared_expert.up_proj.weight "
                  "mlp.shared_expert.down_proj.weight mlp.shared_expert_gate.weight"},
        {"smollm3", "",
         "input_layernorm.weight" QKV("weight") " self_attn.o_proj.weight post_attention_layernorm.weight" GATE_UP(
             "weight") " mlp.down_proj.weight"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct model_config c;
        struct model *m;
        struct buf names = {0};
        char *text = xasprintf("{\"model_type\":\"%s\"," BASE "%s}", rows[i].type, rows[i].keys);
        int64_t met = 0, dense = 0; /* by a token: in this layer, in all */
        OK(parse(&c, text));
        OK(model_shape(&m, &c, NULL, DT_F32, QUANT_NONE, NULL));
        const struct model_layer *y = &m->layers[29];
        for (int64_t p = y->first->first_param; p < y->last->first_param + y->last->n_params; p++)
            buf_addf(&names, "%s%s", names.n ? " " : "", m->params[p].name + strlen("model.layers.29."));
        assert_string_equal(names.p, rows[i].layer);
        assert_true(y->first == m->layers[28].last + 1 && y->last == m->g_norm - 1 && strstr(model_family_types, rows[i].type));
        for (const struct model_group *g = y->first; g <= y->last; g++)
            met += g->role == MODEL_EXPERTS ? g->n / g->count * g->k * c.n_choices : g->n * g->k;
        for (int l = 0; l < 30; l++) /* an MLP instead of a router and one expert of two */
            if (y->router && !m->layers[l].router)
                dense += (m->layers[l].gate_up->n + m->layers[l].down->k) * c.hidden -
                         (c.n_experts + 3 * (c.expert_ffn + c.shared_ffn) + (y->shared_gate ? 1 : 0)) * c.hidden;
        assert_int_equal(model_config_linear_params(&c), 30 * met + dense);
        model_shape_free(m);
        model_config_free(&c);
        buf_free(&names);
        free(text);
    }
}

static void config_refusals(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
        int code;
    } bad[] = {
        {"{\"model_type\":\"gemma4_text\",\"architectures\":[\"Gemma4ForCausalLM\"]," BASE "}",
         "unsupported architecture gemma4_text, Gemma4ForCausalLM", ERR_UNSUPPORTED},
        {"{\"model_type\":\"gemma2\"," BASE ",\"hidden_activation\":\"gelu\"}", "unsupported hidden_act \"gelu\"", ERR_UNSUPPORTED},
        {"{\"model_type\":\"gemma\"," BASE ",\"num_key_value_heads\":4,\"use_bidirectional_attention\":true}",
         "unsupported use_bidirectional_attention", ERR_UNSUPPORTED},
        {"{\"model_type\":\"gemma2\"," BASE ",\"query_pre_attn_scalar\":0}", "\"query_pre_attn_scalar\" is 0", ERR_FORMAT},
        {"{\"model_type\":\"gemma2\"," BASE ",\"attn_logit_softcapping\":-1}", "\"attn_logit_softcapping\" is -1", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"final_logit_softcapping\":30}",
         "unsupported final_logit_softcapping 30 of a llama model", ERR_UNSUPPORTED},
        {"{" BASE "}", "unsupported architecture", ERR_UNSUPPORTED},
        {"{\"model_type\":\"granitemoehybrid\"," BASE "}", "unsupported num_local_experts 8 of a granitemoehybrid model",
         ERR_UNSUPPORTED},
        {GRANITE4 "}", "granitemoehybrid model without layer_types, whose layers are Mamba's", ERR_UNSUPPORTED},
        {GRANITE4 ",\"layer_types\":[\"attention\"]}", "\"layer_types\" has 1 entries for 30 layers", ERR_FORMAT},
        {GRANITE4 LAST_LAYER("1,1,1,\"mamba\"") "}", "unsupported layer_types entry \"(not a string)\"", ERR_UNSUPPORTED},
        {GRANITE4 LAST_LAYER("\"attention\",\"attention\",\"attention\",\"mamba\"") "}",
         "unsupported layer_types entry \"mamba\" of a granitemoehybrid model; verlc has those of attention alone",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"hidden_act\":\"gelu\"}", "unsupported hidden_act \"gelu\"", ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"rope_scaling\":{\"type\":\"ntk\"}}", "unsupported rope type \"ntk\"",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"phi3\"," BASE ",\"rope_scaling\":{\"type\":\"su\",\"short_factor\":[1,1,1]}}",
         "rope \"short_factor\" is not a list of 8 numbers", ERR_FORMAT},
        {"{\"model_type\":\"phi3\"," BASE
         ",\"partial_rotary_factor\":0.125,\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1],\"long_factor\":[0]}}",
         "rope \"long_factor\" entry 0 is not a positive number", ERR_FORMAT},
        {"{\"model_type\":\"glm\"," BASE ",\"num_key_value_heads\":2,\"partial_rotary_factor\":0.01}",
         "unsupported partial_rotary_factor 0.01 of heads of 128", ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"partial_rotary_factor\":0.5}", "unsupported partial_rotary_factor", ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"quantization_config\":{}}", "unsupported quantization_config", ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"quantization_config\":{\"quant_method\":\"bitsandbytes\",\"load_in_8bit\":true}}",
         "(bitsandbytes int8); bitsandbytes' NF4 and FP8 by blocks are read, for the rest give the unquantized model: with "
         "quantization=int8",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"dtype\":\"float8_e4m3fn\"}", "unsupported dtype", ERR_UNSUPPORTED},
        {"{\"model_type\":\"qwen3\"," BASE ",\"rope_parameters\":{\"full_attention\":{}}}", "unsupported rope_parameters",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"residual_multiplier\":0.22}", "unsupported residual_multiplier 0.22",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"granite\"," BASE ",\"residual_multiplier\":0}", "\"residual_multiplier\" is 0", ERR_FORMAT},
        {"{\"model_type\":\"ministral3\"," BASE ",\"num_key_value_heads\":2}", "needs \"rope_parameters\"", ERR_INPUT},
        {"{\"model_type\":\"ministral3\"," BASE ",\"num_key_value_heads\":2,\"rope_parameters\":{\"llama_4_scaling_beta\":-1}}",
         "llama_4_scaling_beta", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"no_rope_layers\":[1]}", "unsupported no_rope_layers of a llama", ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"layer_types\":[\"full_attention\",\"chunked_attention\"]}",
         "unsupported layer_types entry \"chunked_attention\" of a llama", ERR_UNSUPPORTED},
        {"{\"model_type\":\"exaone4\"," BASE ",\"num_key_value_heads\":2,\"sliding_window_pattern\":\"LXG\"}",
         "\"sliding_window_pattern\" is \"LXG\"", ERR_FORMAT},
        {"{\"model_type\":\"olmoe\"," BASE ",\"clip_qkv\":8.0}", "unsupported clip_qkv", ERR_UNSUPPORTED},
        {"{\"model_type\":\"qwen3_moe\"," BASE ",\"num_key_value_heads\":2,\"num_experts\":4,\"num_experts_per_tok\":5}",
         "\"num_experts_per_tok\" is 5 of 4 experts", ERR_FORMAT},
        {"{\"model_type\":\"qwen3_moe\"," BASE ",\"num_key_value_heads\":2,\"num_local_experts\":2000}",
         "\"num_local_experts\" is 2000, outside 1 .. 1024", ERR_FORMAT},
        {"{\"model_type\":\"qwen3_moe\"," BASE ",\"num_key_value_heads\":2,\"decoder_sparse_step\":0}", "decoder_sparse_step",
         ERR_FORMAT},
        {"{\"model_type\":\"glm4_moe\"," BASE ",\"num_key_value_heads\":2,\"n_group\":3}", "8 of 128 experts in 1 of 3 groups",
         ERR_FORMAT},
        {"{\"model_type\":\"glm4_moe\"," BASE ",\"num_key_value_heads\":2,\"n_group\":32}", "in 1 of 32 groups", ERR_FORMAT},
        {"{\"model_type\":\"deepseek_v3\"," BASE ",\"qk_rope_head_dim\":63}", "unsupported odd qk_rope_head_dim 63",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"deepseek_v3\"," BASE ",\"attention_bias\":true}", "unsupported attention_bias", ERR_UNSUPPORTED},
        {"{\"model_type\":\"deepseek_v3\"," BASE ",\"rope_interleave\":false}", "unsupported rope_interleave false",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"deepseek_v3\"," BASE ",\"kv_lora_rank\":0}", "kv_lora_rank", ERR_FORMAT},
        {"{\"model_type\":\"deepseek_v3\"," BASE ",\"quantization_config\":{\"quant_method\":\"fp8\"}}",
         "unsupported quantization_config (fp8, fmt e4m3, activation_scheme dynamic, no weight_block_size)", ERR_UNSUPPORTED},
        {"{\"model_type\":\"deepseek_v2\"," BASE ",\"topk_method\":\"noaux_tc\"}", "unsupported topk_method \"noaux_tc\"",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"deepseek_v2\"," BASE ",\"norm_topk_prob\":true}", "unsupported norm_topk_prob", ERR_UNSUPPORTED},
        {"{\"model_type\":\"gpt_oss\"," BASE ",\"num_key_value_heads\":2}", "a gpt_oss model needs \"rope_parameters\"", ERR_INPUT},
        {"{\"model_type\":\"gpt_oss\"," BASE ",\"num_key_value_heads\":2,\"swiglu_limit\":0}", "swiglu_limit", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"quantization_config\":{\"quant_method\":\"mxfp4\"}}",
         "unsupported quantization_config (mxfp4)", ERR_UNSUPPORTED},
        {"{\"model_type\":\"glm4_moe\"," BASE ",\"num_key_value_heads\":2,\"n_group\":64}", "n_group", ERR_FORMAT},
        {"{\"model_type\":\"glm4_moe\"," BASE ",\"num_key_value_heads\":2,\"scoring_func\":\"softmax\"}",
         "unsupported scoring_func", ERR_UNSUPPORTED},
        {"{\"model_type\":\"glm4_moe\"," BASE ",\"num_key_value_heads\":2,\"routed_scaling_factor\":0}", "routed_scaling_factor",
         ERR_FORMAT},
        {"{\"model_type\":\"glm4_moe\"," BASE ",\"num_key_value_heads\":2,\"first_k_dense_replace\":-1}", "first_k_dense_replace",
         ERR_FORMAT},
        {"{\"model_type\":\"glm4_moe\"," BASE ",\"num_key_value_heads\":2,\"n_shared_experts\":-1}", "n_shared_experts",
         ERR_FORMAT},
        {"{\"model_type\":\"hy_v3\"," BASE ",\"num_key_value_heads\":2,\"mlp_layer_types\":[\"sparse\"]}",
         "\"mlp_layer_types\" is not a list of 30 layers' types", ERR_FORMAT},
        {"{\"model_type\":\"hy_v3\"," BASE ",\"num_key_value_heads\":2,\"mlp_layer_types\":7}", "mlp_layer_types", ERR_FORMAT},
        {"{\"model_type\":\"hy_v3\"," BASE ",\"num_key_value_heads\":2,\"mlp_bias\":true}", "unsupported mlp_bias of a hy_v3",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"hy_v3\"," BASE ",\"num_key_value_heads\":2,\"router_scaling_factor\":0}",
         "\"router_scaling_factor\" is 0", ERR_FORMAT},
        {"{\"model_type\":\"hy_v3\"," BASE ",\"num_key_value_heads\":2,\"num_shared_experts\":-1}", "num_shared_experts",
         ERR_FORMAT},
        {"{\"model_type\":\"minimax_m2\"," BASE ",\"num_key_value_heads\":2,\"rotary_dim\":-8}", "partial_rotary_factor",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"minimax_m2\"," BASE ",\"num_key_value_heads\":2,\"rotary_dim\":4096}", "partial_rotary_factor",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"qwen3_moe\"," BASE ",\"num_key_value_heads\":2,\"mlp_only_layers\":[\"a\"]}", "mlp_only_layers",
         ERR_FORMAT},
        {"{\"model_type\":\"qwen3_5_text\"," BASE ",\"linear_conv_kernel_dim\":3}", "unsupported linear_conv_kernel_dim 3",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"qwen3_5_text\"," BASE ",\"linear_key_head_dim\":24}", "unsupported heads of 24 and 128",
         ERR_UNSUPPORTED},
        {"{\"model_type\":\"qwen3_5_text\"," BASE ",\"linear_num_key_heads\":3}", "not a multiple of linear_num_key_heads 3",
         ERR_FORMAT},
        {"{\"model_type\":\"qwen3_5_text\"," BASE ",\"layer_types\":[\"full_attention\"]}",
         "\"layer_types\" has 1 entries for 30 layers", ERR_FORMAT},
        {"{\"model_type\":\"qwen3_5\"," BASE "}", "a qwen3_5 model without \"text_config\"", ERR_FORMAT},
        {"{\"model_type\":\"smollm3\"," BASE ",\"no_rope_layers\":[1,0]}", "\"no_rope_layers\" has 2 entries for 30", ERR_FORMAT},
        {"{\"model_type\":\"smollm3\"," BASE ",\"no_rope_layer_interval\":0}", "no_rope_layer_interval", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"num_key_value_heads\":3}", "not a multiple of num_key_value_heads", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"num_key_value_heads\":0}", "num_key_value_heads", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"head_dim\":15}", "odd head_dim", ERR_UNSUPPORTED},
        {"{\"model_type\":\"llama\"," BASE ",\"rope_theta\":-1}", "rope_theta", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"rope_scaling\":{\"type\":\"linear\"}}", "\"factor\"", ERR_FORMAT},
        {"{\"model_type\":\"llama\",\"hidden_size\":64}", "num_hidden_layers", ERR_FORMAT},
        {"{\"model_type\":\"llama\",\"num_hidden_layers\":99999999,\"hidden_size\":64}", "num_hidden_layers", ERR_FORMAT},
        {"{\"model_type\":\"llama\"," BASE ",\"eos_token_id\":\"x\"}", "eos_token_id", ERR_FORMAT},
        {"[]", "not a JSON object", ERR_FORMAT},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct model_config c;
        const int rc = parse(&c, bad[i].text);
        if (rc != bad[i].code || !strstr(err_msg(), bad[i].says)) fail_msg("%s: %d, %s", bad[i].text, rc, err_msg());
    }
}

/* Parameter counts that the model cards give, and transformers (tools/oracle_archs.py); correction biases are not among them. */
static void built_in_shapes(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int64_t params;
    } known[] = {
        {"qwen2.5-0.5b", 494032768},
        {"qwen2.5-1.5b", 1543714304},
        {"qwen2.5-3b", 3085938688},
        {"qwen2.5-7b", 7615616512},
        {"qwen2.5-14b", 14770033664},
        {"qwen2.5-32b", 32763876352},
        {"qwen2.5-72b", 72706203648},
        {"deepseek-r1-distill-qwen-1.5b", 1777088000},
        {"deepseek-r1-distill-qwen-7b", 7615616512},
        {"qwen3-0.6b", 596049920},
        {"qwen3-1.7b", 1720574976},
        {"qwen3-4b", 4022468096},
        {"qwen3-8b", 8190735360},
        {"qwen3-14b", 14768307200},
        {"qwen3-32b", 32762123264},
        {"qwen1.5-moe-a2.7b", 14315784192},
        {"qwen3-30b-a3b", 30532122624},
        {"qwen3-235b-a22b", 235093634560},
        {"qwen3-next-80b-a3b", 79674391296},
        {"qwen3.5-0.8b", 752393024},
        {"qwen3.5-2b", 1881825088},
        {"qwen3.5-4b", 4205751296},
        {"qwen3.5-9b", 8953803264},
        {"qwen3.5-27b", 26895998464},
        {"qwen3.5-35b-a3b", 34660610688},
        {"qwen3.5-122b-a10b", 122111526912},
        {"qwen3.5-397b-a17b", 396346350336},
        {"llama-2-7b", 6738415616},
        {"llama-3.2-1b", 1235814400},
        {"llama-3.2-3b", 3212749824},
        {"llama-3.1-8b", 8030261248},
        {"llama-3.1-70b", 70553706496},
        {"deepseek-llm-7b", 6910365696},
        {"mimo-7b", 7622619136},
        {"mistral-7b", 7241732096},
        {"mistral-nemo-12b", 12247782400},
        {"mistral-small-24b", 23572403200},
        {"ministral-3-3b", 3429006336},
        {"ministral-3-8b", 8489553920},
        {"ministral-3-14b", 13506073600},
        {"mixtral-8x7b", 46702792704},
        {"seed-oss-36b", 36151104512},
        {"smollm3-3b", 3075098624},
        {"phi-3-mini", 3821079552},
        {"phi-4", 14659507200},
        {"phi-4-mini", 3836021760},
        {"granite-3.3-2b", 2533539840},
        {"granite-3.3-8b", 8170864640},
        {"granite-4.0-micro", 3402836480},
        {"glm-4-9b", 9399951360},
        {"glm-4-9b-0414", 9400279040},
        {"glm-4-32b-0414", 32566081536},
        {"glm-4.5-air", 106852245504},
        {"glm-4.5", 352797814784},
        {"glm-4.7-flash", 29943390976},
        {"minimax-m2", 228689748992},
        {"hunyuan-3", 295033528320},
        {"deepseek-v2-lite", 15706484224},
        {"deepseek-v3", 671026404352},
        {"moonlight-16b-a3b", 15960108544},
        {"gpt-oss-20b", 20914757184},
        {"gpt-oss-120b", 116829156672},
        {"gemma-2b", 2506172416},
        {"gemma-7b", 8537680896},
        {"gemma-2-2b", 2614341888},
        {"gemma-2-9b", 9241705984},
        {"gemma-2-27b", 27227128320},
        {"gemma-3-1b", 999885952},
        {"gemma-3-4b", 3880263168},
        {"gemma-3-12b", 11766034176},
        {"gemma-3-27b", 27009346304},
        {"olmo-2-1b", 1484916736},
        {"olmo-2-7b", 7298617344},
        {"olmo-2-13b", 13716198400},
        {"olmo-3-7b", 7298011136},
        {"olmoe-1b-7b", 6919161856},
        {"exaone-4.0-32b", 32003216384},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        struct model_config c;
        json_t *o = model_arch_config(known[i].name);
        assert_non_null(o);
        OK(model_config_from_json(&c, o, known[i].name));
        assert_int_equal(model_config_params(&c), known[i].params);
        model_config_free(&c);
        json_decref(o);
    }
    assert_null(model_arch_config("gpt-2"));
}

/* ---- schedules ---- */

static void near(double got, double want) {
    if (fabs(got - want) > 1e-12) fail_msg("%.15g, expected %.15g", got, want);
}
static void schedules(void **state) {
    (void)state;
    struct optim_config c = {
        .lr = 2, .schedule = "constant", .warmup_steps = 4, .total_steps = 24, .num_cycles = 0.5, .min_lr_ratio = 0.1};
    near(optim_lr(&c, 0), 0);
    near(optim_lr(&c, 1), 0.5);
    near(optim_lr(&c, 4), 2);
    near(optim_lr(&c, 1000), 2);
    c.warmup_steps = 0;
    near(optim_lr(&c, 0), 2);
    c.warmup_steps = 4;
    c.schedule = "cosine";
    near(optim_lr(&c, 4), 2);
    near(optim_lr(&c, 14), 2 * 0.55); /* half way between 1 and 0.1 */
    near(optim_lr(&c, 24), 0.2);
    c.decay_steps = 24;
    near(optim_lr(&c, 40), 0.2);
    c.decay_steps = 0;
    c.init_lr_ratio = 0.5;
    near(optim_lr(&c, 2), 1.5);
    c.schedule = "linear";
    near(optim_lr(&c, 2), 1);
    near(optim_lr(&c, 14), 2 * 0.55);
    near(optim_lr(&c, 40), 0.2);
    c.schedule = "wsd"; /* 20 steps after warmup: 18 stable, 2 down */
    near(optim_lr(&c, 21), 2);
    near(optim_lr(&c, 22), 2);
    near(optim_lr(&c, 23), 2 * 0.55);
    near(optim_lr(&c, 24), 0.2);
}

/* ---- safetensors ---- */

static int read_bytes(void *arg, size_t off, void *dst, size_t n) {
    memcpy(dst, (const char *)arg + off, n);
    return 0;
}
static void safetensors_round_trip(void **state) {
    (void)state;
    static float big[3 << 20]; /* several chunks of the writer */
    for (size_t i = 0; i < sizeof big / sizeof big[0]; i++) big[i] = (float)i;
    int64_t scalar = 7;
    uint8_t odd[3] = {1, 2, 3};
    const struct safetensors_write_tensor t[] = {
        {.name = "big", .dt = DT_F32, .nd = 2, .dim = {3, 1 << 20}, .read = read_bytes, .arg = big},
        {.name = "scalar", .dt = DT_I64, .nd = 0, .read = read_bytes, .arg = &scalar},
        {.name = "empty", .dt = DT_BF16, .nd = 2, .dim = {0, 5}, .read = read_bytes, .arg = NULL},
        {.name = "odd \"name\"", .dt = DT_U8, .nd = 1, .dim = {3}, .read = read_bytes, .arg = odd},
    };
    char *dir = case_temp_dir(), *path = file_join(dir, "t.safetensors");
    json_t *meta = json_pack("{s:s}", "format", "pt");
    struct safetensors_file *f;
    OK(safetensors_write(NULL, path, t, 4, meta));
    OK(safetensors_open(&f, path));
    assert_int_equal(safetensors_count(f), 4);
    const struct safetensors_tensor *b = safetensors_find(f, "big"), *s = safetensors_find(f, "scalar"),
                                    *e = safetensors_find(f, "empty");
    const struct safetensors_tensor *o = safetensors_find(f, "odd \"name\"");
    assert_true(b && s && e && o && !safetensors_find(f, "none"));
    assert_true(b->nd == 2 && b->dim[1] == 1 << 20 && b->bytes == sizeof big && s->nd == 0 && e->bytes == 0 && o->dt == DT_U8);
    assert_memory_equal(b->data, big, sizeof big);
    assert_memory_equal(s->data, &scalar, 8);
    assert_memory_equal(o->data, odd, 3);
    assert_true((uintptr_t)b->data % 8 == 0);
    safetensors_close(f);
    json_decref(meta);
    free(path);
    case_drop_dir(dir);
}

/* ---- init and export ---- */

static json_t *small_config(void) {
    json_t *o = model_arch_config("tiny");
    json_object_set_new(o, "num_hidden_layers", json_integer(2));
    json_object_set_new(o, "pad_token_id", json_integer(3));
    json_object_set_new(o, "eos_token_id", json_integer(4));
    return o;
}

static void init_is_a_function_of_the_seed(void **state) {
    (void)state;
    char *dir = case_temp_dir();
    json_t *config = small_config();
    struct safetensors_file *f[3];
    static const uint64_t seeds[] = {1, 1, 2};
    for (int i = 0; i < 3; i++) {
        char *sub = xasprintf("%s/%d", dir, i), *st = file_join(sub, "model.safetensors");
        setenv("VERLC_THREADS", i == 1 ? "3" : "1", 1);
        OK(model_init_dir(config, sub, seeds[i], DT_F32));
        OK(safetensors_open(&f[i], st));
        free(sub);
        free(st);
    }
    unsetenv("VERLC_THREADS");
    bool differs = false;
    for (int64_t k = 0; k < safetensors_count(f[0]); k++) {
        const struct safetensors_tensor *a = safetensors_at(f[0], k), *b = safetensors_find(f[1], a->name),
                                        *c = safetensors_find(f[2], a->name);
        assert_memory_equal(a->data, b->data, a->bytes);
        differs = differs || memcmp(a->data, c->data, a->bytes) != 0;
    }
    assert_true(differs);
    const struct safetensors_tensor *e = safetensors_find(f[0], "model.embed_tokens.weight"),
                                    *n = safetensors_find(f[0], "model.norm.weight");
    const float *w = (const float *)(const void *)e->data;
    double sum = 0, sq = 0;
    const int64_t h = e->dim[1], count = e->dim[0] * h;
    for (int64_t i = 0; i < count; i++) {
        sum += (double)w[i];
        sq += (double)w[i] * (double)w[i];
        if (i / h == 3) assert_true(w[i] == 0); /* the padding row */
    }
    /* 122,688 draws of N(0, 0.02): five standard errors of mean and deviation */
    assert_true(fabs(sum / (double)count) < 5 * 0.02 / sqrt((double)count));
    assert_true(fabs(sqrt(sq / (double)(count - h)) - 0.02) < 5 * 0.02 / sqrt(2.0 * (double)count));
    float one;
    memcpy(&one, n->data, 4);
    assert_true(one == 1);
    for (int i = 0; i < 3; i++) safetensors_close(f[i]);
    json_decref(config);
    case_drop_dir(dir);
}

static void same_weights(const struct model *a, const struct model *b) {
    const size_t bytes = (size_t)a->n_elems * 4;
    float *x = xmalloc(bytes), *y = xmalloc(bytes);
    OK(dev_copy_out(a->dev, x, a->master, bytes));
    OK(dev_copy_out(b->dev, y, b->master, bytes));
    assert_memory_equal(x, y, bytes);
    free(x);
    free(y);
}

/* bf16 files -> fp32 in shards -> the same values; from a master and from a compute copy. */
static void export_keeps_every_value(void **state) {
    (void)state;
    static const char *const backends[] = {"ref", "cpu", "cuda"};
    for (int k = 0; k < 3 && case_has(backends[k]); k++) {
        struct dev d;
        struct model *a, *b, *c;
        char *dir = case_temp_dir(), *src = file_join(dir, "src"), *shards = file_join(dir, "shards"), *one = file_join(dir, "one");
        json_t *config = small_config();
        OK(model_init_dir(config, src, 3, DT_BF16));
        case_dev(&d, backends[k], 2);
        OK(model_open(&a, &d, &(struct model_open_args){.dir = src, .act = DT_BF16, .flags = MODEL_TRAIN, .max_len = 16}));
        OK(model_export(a, shards, &(struct model_export_args){.dt = DT_F32, .max_shard = 200000}));
        char *index = file_join(shards, "model.safetensors.index.json");
        assert_true(file_exists(index));
        OK(model_open(&b, &d, &(struct model_open_args){.dir = shards, .act = DT_F32, .flags = MODEL_TRAIN, .max_len = 16}));
        assert_true(b->cfg.dtype == DT_F32 && b->params[0].src_dt == DT_F32 && b->cfg.n_eos == 1);
        same_weights(a, b);
        model_close(b);
        /* packed groups, no master */
        OK(model_open(&b, &d, &(struct model_open_args){.dir = src, .act = DT_BF16, .max_len = 16}));
        OK(model_export(b, one, &(struct model_export_args){.dt = -1}));
        OK(model_open(&c, &d, &(struct model_open_args){.dir = one, .act = DT_BF16, .flags = MODEL_TRAIN, .max_len = 16}));
        assert_true(c->params[0].src_dt == DT_BF16);
        same_weights(a, c);
        model_close(c);
        model_close(b);
        model_close(a);
        assert_int_equal(d.allocated, 0);
        dev_close(&d);
        json_decref(config);
        free(index);
        free(src);
        free(shards);
        free(one);
        case_drop_dir(dir);
    }
}

static void every_f16_value(void **state) {
    (void)state;
    /* f16 -> f32 -> f16 through files of all 63488 finite values as a (256, 248) embedding */
    char *dir = case_temp_dir(), *src = file_join(dir, "src"), *out = file_join(dir, "out");
    char *st = file_join(src, "model.safetensors");
    json_t *config = small_config();
    json_object_set_new(config, "hidden_size", json_integer(248));
    json_object_set_new(config, "vocab_size", json_integer(256));
    json_object_set_new(config, "num_hidden_layers", json_integer(1));
    OK(model_init_dir(config, src, 3, DT_F16));
    struct buf b = {0};
    OK(file_read(&b, st, 0));
    uint64_t header;
    memcpy(&header, b.p, 8);
    uint16_t v = 0;
    for (size_t i = 0; i < 63488; i++, v++) {
        if ((v & 0x7c00u) == 0x7c00u) v = 0x8000u; /* Inf and NaN are refused on reading */
        memcpy(b.p + 8 + header + 2 * i, &v, 2);
    }
    OK(file_write_atomic(st, b.p, b.n));
    struct dev d;
    struct model *m;
    struct safetensors_file *x, *y;
    OK(dev_open_ref(&d));
    OK(model_open(&m, &d, &(struct model_open_args){.dir = src, .act = DT_F32, .max_len = 1}));
    OK(model_export(m, out, &(struct model_export_args){.dt = -1}));
    char *st2 = file_join(out, "model.safetensors");
    OK(safetensors_open(&x, st));
    OK(safetensors_open(&y, st2));
    const struct safetensors_tensor *a = safetensors_find(x, "model.embed_tokens.weight"),
                                    *c = safetensors_find(y, "model.embed_tokens.weight");
    assert_true(a->dt == DT_F16 && c->dt == DT_F16 && a->bytes == 2 * 63488);
    assert_memory_equal(a->data, c->data, a->bytes);
    safetensors_close(x);
    safetensors_close(y);
    model_close(m);
    dev_close(&d);
    buf_free(&b);
    json_decref(config);
    free(src);
    free(out);
    free(st);
    free(st2);
    case_drop_dir(dir);
}

/* ---- optimizer ---- */

static void non_finite_gradient_changes_nothing(void **state) {
    (void)state;
    struct model_case c;
    struct optim *o;
    struct optim_result r;
    const struct optim_config cfg = {.lr = 1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = 1, .schedule = "constant"};
    case_open(&c, &(struct case_args){"qwen2", "ref", 1, DT_F32, MODEL_TRAIN});
    OK(optim_create(&o, c.m, &cfg));
    const size_t bytes = (size_t)c.m->n_elems * 4;
    float *g = case_alloc(&c.dev, bytes), *before = xmalloc(bytes), *after = xmalloc(bytes);
    OK(dev_zero(&c.dev, g, bytes));
    const struct model_param *p = &c.m->params[5];
    const float bad[] = {NAN, INFINITY};
    OK(dev_copy_out(&c.dev, before, c.m->master, bytes));
    for (int i = 0; i < 2; i++) {
        OK(dev_copy_in(&c.dev, g + p->offset + 1, &bad[i], 4));
        OK(optim_step(o, c.m, g, &cfg, 1, &r));
        assert_false(isfinite(r.grad_norm));
        assert_string_equal(r.bad_tensor, p->name);
    }
    OK(dev_copy_out(&c.dev, after, c.m->master, bytes));
    assert_memory_equal(before, after, bytes);
    assert_int_equal(o->step, 0);
    const float fine = 3;
    OK(dev_copy_in(&c.dev, g + p->offset + 1, &fine, 4));
    OK(optim_step(o, c.m, g, &cfg, 1, &r));
    assert_true(r.grad_norm == 3 && r.bad_tensor[0] == '\0' && o->step == 1);
    dev_free(&c.dev, g, bytes);
    free(before);
    free(after);
    optim_destroy(o, c.m);
    case_close(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(config_spellings),
        cmocka_unit_test(config_defaults),
        cmocka_unit_test(config_of_text),
        cmocka_unit_test(config_layers),
        cmocka_unit_test(families),
        cmocka_unit_test(longrope_lists),
        cmocka_unit_test(config_refusals),
        cmocka_unit_test(built_in_shapes),
        cmocka_unit_test(schedules),
        cmocka_unit_test(safetensors_round_trip),
        cmocka_unit_test(init_is_a_function_of_the_seed),
        cmocka_unit_test(export_keeps_every_value),
        cmocka_unit_test(every_f16_value),
        cmocka_unit_test(non_finite_gradient_changes_nothing),
    };
    return cmocka_run_group_tests_name("model", tests, NULL, NULL);
}
