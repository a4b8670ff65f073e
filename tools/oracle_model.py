#!/usr/bin/env python3
"""Golden numbers for src/model from Hugging Face transformers and torch, in fp32.

  oracle_model.py make DIR [CASE...]    writes the fixtures (tests/fixtures/model), all or these
  oracle_model.py families DIR [CASE...] three configurations of each family, with sequences of other lengths and the experts of
                                        each token, for build/release/test_model_golden with VERLC_MODEL_FIXTURES=DIR
  oracle_model.py table LOG              of what that test printed, the table of docs/models.md
  oracle_model.py check VERLC DIR [CASE...]
                                        in a scratch directory, the other way round: transformers loads what `verlc model init`
                                        and `export` write, and `verlc score` gives the same log-probs

Each case is a tiny random model (model.safetensors, config.json) and golden.safetensors with
  ids, q_start            two sequences, packed
  logits                  (rows, vocab)
  row, target, inv_temp   one log-prob per row that has a successor
  logp, entropy           at temperature 0.7
  dlogp, dentropy         random d loss / d logp, d loss / d entropy
  grad.NAME               of loss = sum(dlogp * logp + dentropy * entropy), for every parameter
The rope variants share the Llama weights and record logits alone.
"""
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import typing

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TEMPERATURE = 0.7
LENS = (23, 70)  # one is longer than a key tile of 64
SHAPE = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100, max_position_embeddings=128, rms_norm_eps=1e-6, hidden_act="silu", initializer_range=0.02,
    bos_token_id=1, eos_token_id=2, torch_dtype="float32",
)
NO_PAD = dict(SHAPE, pad_token_id=None)  # where the class has one
QWEN35 = dict(NO_PAD, model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], linear_conv_kernel_dim=4, head_dim=16,
              linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2)
GRANITE4 = dict(NO_PAD, model_type="granitemoehybrid", architectures=["GraniteMoeHybridForCausalLM"], num_local_experts=0,
                num_experts_per_tok=0, intermediate_size=12, shared_intermediate_size=40, mamba_n_heads=4)
NEXT = dict(QWEN35, model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"])
GEMMA = dict(SHAPE, hidden_act="gelu_pytorch_tanh", pad_token_id=0, tie_word_embeddings=True, rope_theta=1e4)
CASES = {
    # transformers 4 spellings
    "qwen2": dict(SHAPE, model_type="qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True,
                  rope_theta=1e6, use_sliding_window=False, sliding_window=8, max_window_layers=1),
    "llama": dict(SHAPE, model_type="llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=False,
                  rope_theta=5e5, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                                    high_freq_factor=4.0, original_max_position_embeddings=32)),
    # transformers 5 spellings
    "qwen3": dict(SHAPE, model_type="qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False,
                  head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "mistral": dict(SHAPE, model_type="mistral", architectures=["MistralForCausalLM"], tie_word_embeddings=False,
                    head_dim=8, sliding_window=8, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    "seed_oss": dict(SHAPE, model_type="seed_oss", architectures=["SeedOssForCausalLM"], tie_word_embeddings=False,
                     head_dim=16, attention_bias=True, attention_out_bias=False, mlp_bias=False, residual_dropout=0.1,
                     attention_dropout=0.1, rope_parameters=dict(rope_type="default", rope_theta=1e7)),
    "seed_oss_bias": dict(SHAPE, model_type="seed_oss", architectures=["SeedOssForCausalLM"], tie_word_embeddings=True,
                          num_hidden_layers=1, head_dim=8, attention_bias=False, attention_out_bias=True, mlp_bias=True,
                          rope_theta=1e4),
    # rope in layers 0 and 2 alone
    "smollm3": dict(NO_PAD, model_type="smollm3", architectures=["SmolLM3ForCausalLM"], tie_word_embeddings=True,
                    num_hidden_layers=3, no_rope_layers=[1, 0, 1], use_sliding_window=False, sliding_window=None,
                    attention_bias=False, mlp_bias=False, rope_theta=5e6, rope_scaling=None),
    # q, k, v and gate, up as one tensor each
    "phi3": dict(SHAPE, model_type="phi3", architectures=["Phi3ForCausalLM"], tie_word_embeddings=False, sliding_window=12,
                 original_max_position_embeddings=128, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, rope_theta=1e4,
                 rope_scaling=None),
    # heads of 8 of which 6 turn; sequences longer than the original length, so the long list
    "phi4_mini": dict(SHAPE, model_type="phi3", architectures=["Phi3ForCausalLM"], tie_word_embeddings=True, rms_norm_eps=1e-5,
                      sliding_window=262144, original_max_position_embeddings=4, partial_rotary_factor=0.75, pad_token_id=0,
                      rope_theta=1e4, rope_scaling=dict(type="longrope", short_factor=[1.0, 1.1, 1.2],
                                                        long_factor=[1.0, 1.7, 3.1])),
    "glm": dict(SHAPE, model_type="glm", architectures=["GlmForCausalLM"], tie_word_embeddings=False, rms_norm_eps=1.5625e-7,
                head_dim=16, num_key_value_heads=1, attention_bias=True, partial_rotary_factor=0.5, rope_theta=1e4,
                pad_token_id=0),
    # queries that grow with their position, from the 17th on
    "ministral3": dict(NO_PAD, model_type="ministral3", architectures=["Ministral3ForCausalLM"], tie_word_embeddings=False,
                       head_dim=16, sliding_window=None, rms_norm_eps=1e-5,
                       rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=16.0, beta_fast=32.0, beta_slow=1.0,
                                            original_max_position_embeddings=16, max_position_embeddings=256, mscale=1.0,
                                            mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
    # scale-then-cast norms of what attention and MLP give, norms of all queries and all keys of a row
    "olmo2": dict(NO_PAD, model_type="olmo2", architectures=["Olmo2ForCausalLM"], tie_word_embeddings=False,
                  rms_norm_eps=1e-5, attention_bias=False, rope_theta=5e5),
    # two tables of angles, of which rope_scaling is that of the layer without a window
    "olmo3": dict(NO_PAD, model_type="olmo3", architectures=["Olmo3ForCausalLM"], tie_word_embeddings=False,
                  rms_norm_eps=1e-5, sliding_window=8, layer_types=["sliding_attention", "full_attention"], rope_theta=5e5,
                  rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=32.0,
                                    beta_slow=1.0, attention_factor=1.2)),
    # norms of heads after rope
    "hunyuan": dict(NO_PAD, model_type="hunyuan_v1_dense", architectures=["HunYuanDenseV1ForCausalLM"], tie_word_embeddings=True,
                    rms_norm_eps=1e-5, head_dim=16, rope_theta=1e4,
                    rope_scaling=dict(type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0,
                                      mscale_all_dim=1.0)),
    # every multiplier
    "granite": dict(NO_PAD, model_type="granite", architectures=["GraniteForCausalLM"], tie_word_embeddings=True,
                    rms_norm_eps=1e-5, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.3,
                    logits_scaling=3.0, attention_bias=False, rope_theta=1e4, attention_dropout=0.1),
    # Granite 4's dense ones: gate and up in one tensor of the "shared" MLP, whose width has a key of its own
    "granite4": dict(GRANITE4, tie_word_embeddings=True, rms_norm_eps=1e-5, position_embedding_type="rope",
                     layer_types=["attention", "attention"], embedding_multiplier=12.0, residual_multiplier=0.22,
                     attention_multiplier=0.3, logits_scaling=3.0, rope_theta=1e4),
    "glm4": dict(SHAPE, model_type="glm4", architectures=["Glm4ForCausalLM"], tie_word_embeddings=False, rms_norm_eps=1e-5,
                 head_dim=8, attention_bias=False, partial_rotary_factor=0.5, rope_theta=1e4, pad_token_id=0),
    # 1 + weight in norms, GELU, scaled embeddings
    "gemma": dict(GEMMA, model_type="gemma", architectures=["GemmaForCausalLM"], head_dim=16, num_key_value_heads=1,
                  hidden_act="gelu", hidden_activation=None),
    # softcaps that bite; windows on layers 0, 2
    "gemma2": dict(GEMMA, model_type="gemma2", architectures=["Gemma2ForCausalLM"], head_dim=8, num_hidden_layers=3,
                   hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=12, sliding_window=8, attn_logit_softcapping=2.0,
                   final_logit_softcapping=3.0),
    # norms of heads; two tables of rotary angles
    "gemma3_text": dict(GEMMA, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], head_dim=8, num_hidden_layers=3,
                        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=8, sliding_window=8, sliding_window_pattern=2,
                        rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0),
                        attn_logit_softcapping=None, final_logit_softcapping=None),
    # norms of what attention and MLP give; a window in layer 0, no rope in layer 1
    "exaone4": dict(NO_PAD, model_type="exaone4", architectures=["Exaone4ForCausalLM"], tie_word_embeddings=False,
                    head_dim=16, sliding_window=8, sliding_window_pattern=2, rope_theta=1e6,
                    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_max_position_embeddings=32)),
    # experts in layers 0 and 2, one MLP in layer 1; the files have a matrix of each expert
    "qwen3_moe": dict(NO_PAD, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=False,
                      num_hidden_layers=3, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
                      norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1], use_sliding_window=False,
                      rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    # norms of q's and k's whole rows
    # a shared expert behind a gate; one layer with an MLP
    "qwen2_moe": dict(NO_PAD, model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], tie_word_embeddings=False,
                      num_hidden_layers=3, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
                      shared_expert_intermediate_size=56, norm_topk_prob=False, mlp_only_layers=[1], use_sliding_window=False,
                      sliding_window=8, max_window_layers=1, rope_theta=1e6),
    # sigmoids with a correction bias, groups, a shared expert without a gate, a dense first layer
    "glm4_moe": dict(NO_PAD, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], tie_word_embeddings=False,
                     rms_norm_eps=1e-5, head_dim=8, attention_bias=True, use_qk_norm=True,
                     partial_rotary_factor=0.5, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
                     n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=1.7, norm_topk_prob=True,
                     first_k_dense_replace=1, rope_theta=1e4),
    # sinks, biases of everything, limits that bite, alternating windows, yarn without rounding of its range
    "gpt_oss": dict(NO_PAD, model_type="gpt_oss", architectures=["GptOssForCausalLM"], tie_word_embeddings=False, head_dim=8,
                    rms_norm_eps=1e-5, intermediate_size=12, num_local_experts=6, num_experts_per_tok=3, attention_bias=True,
                    sliding_window=8, layer_types=["sliding_attention", "full_attention"], swiglu_limit=1.0, rope_theta=150000,
                    rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                                      original_max_position_embeddings=16)),
    # latent attention with a latent of queries, as DeepSeek-V3
    "deepseek_v3": dict(NO_PAD, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], tie_word_embeddings=False,
                        num_key_value_heads=4, rms_norm_eps=1e-5, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8,
                        qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
                        n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
                        first_k_dense_replace=1, rope_theta=1e4,
                        rope_scaling=dict(rope_type="yarn", factor=40.0, beta_fast=32, beta_slow=1, mscale=1.0,
                                          mscale_all_dim=1.0, original_max_position_embeddings=16)),
    # norms of q's and k's whole rows, rope of half of a head, sigmoids with a correction bias
    "minimax_m2": dict(NO_PAD, model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], tie_word_embeddings=False,
                       head_dim=16, intermediate_size=12, num_local_experts=8, num_experts_per_tok=3, rotary_dim=8, rope_theta=5e6),
    # experts as GLM-4.5's under other names, norms of heads
    "hy_v3": dict(NO_PAD, model_type="hy_v3", architectures=["HYV3ForCausalLM"], tie_word_embeddings=False, rms_norm_eps=1e-5,
                  head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, num_shared_experts=1,
                  num_hidden_layers=3, router_scaling_factor=2.826, mlp_layer_types=["sparse", "dense", "sparse"],
                  rope_parameters=dict(rope_type="default", rope_theta=11158840.0)),
    "olmoe": dict(SHAPE, model_type="olmoe", architectures=["OlmoeForCausalLM"], tie_word_embeddings=False, num_experts=8,
                  num_experts_per_tok=3, intermediate_size=16, norm_topk_prob=False, clip_qkv=None, attention_bias=False,
                  pad_token_id=0, rope_theta=1e4),
    "mixtral": dict(NO_PAD, model_type="mixtral", architectures=["MixtralForCausalLM"], tie_word_embeddings=False, head_dim=8,
                    num_local_experts=4, num_experts_per_tok=2, sliding_window=9, rms_norm_eps=1e-5, rope_theta=1e6),
    # two gated delta nets, then gated attention; several value heads of a key head
    "qwen3_5": dict(QWEN35, tie_word_embeddings=True, num_hidden_layers=3, linear_num_value_heads=4,
                    full_attention_interval=3,
                    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                                         mrope_section=[1, 1, 0], mrope_interleaved=True)),
    "qwen3_5_types": dict(QWEN35, tie_word_embeddings=False, num_key_value_heads=1, attention_bias=True,
                          linear_value_head_dim=32, layer_types=["full_attention", "linear_attention"],
                          rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    # and experts, with a shared one that has a gate; the files have them in one tensor
    "qwen3_5_experts": dict(QWEN35, model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"],
                            tie_word_embeddings=False, num_key_value_heads=1, full_attention_interval=2, num_experts=6,
                            num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
                            rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)),
    # q, k, v and z of a key head together in the files; one layer without experts
    "qwen3_next": dict(NEXT, tie_word_embeddings=False, num_hidden_layers=3, full_attention_interval=3, num_key_value_heads=1,
                       linear_num_value_heads=4, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
                       shared_expert_intermediate_size=24, mlp_only_layers=[1], rope_theta=1e7, partial_rotary_factor=0.25),
    # every optional bias; a window in the upper layer alone
    "llama_bias": dict(SHAPE, model_type="llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=True,
                       num_hidden_layers=1, attention_bias=True, mlp_bias=True, rope_theta=1e4),
    "qwen2_window": dict(SHAPE, model_type="qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True,
                         rope_theta=1e4, use_sliding_window=True, sliding_window=5, max_window_layers=1),
}
# More configurations, which `check` and `families` compare.
MORE = {
    "qwen3_wide": dict(SHAPE, model_type="qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True, head_dim=24,
                       num_key_value_heads=4, attention_bias=True, num_hidden_layers=3, rope_theta=1e4),
    "qwen3_window": dict(SHAPE, model_type="qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False, head_dim=8,
                         num_key_value_heads=1, use_sliding_window=True, sliding_window=7, max_window_layers=1,
                         rope_scaling=dict(rope_type="linear", factor=3.0), rope_theta=1e6),
    "mistral_full": dict(SHAPE, model_type="mistral", architectures=["MistralForCausalLM"], tie_word_embeddings=True, head_dim=24,
                         num_key_value_heads=1, sliding_window=None, num_hidden_layers=3, rope_theta=1e6),
    "mistral_heads": dict(SHAPE, model_type="mistral", architectures=["MistralForCausalLM"], tie_word_embeddings=False,
                          num_key_value_heads=4, sliding_window=3, rope_theta=1e4),
    "glm_half": dict(SHAPE, model_type="glm", architectures=["GlmForCausalLM"], tie_word_embeddings=False, pad_token_id=0,
                     head_dim=24, num_key_value_heads=4, attention_bias=True, num_hidden_layers=3,
                     rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)),
    "glm4_heads": dict(SHAPE, model_type="glm4", architectures=["Glm4ForCausalLM"], tie_word_embeddings=False, pad_token_id=0,
                       head_dim=24, num_key_value_heads=4, attention_bias=True, num_hidden_layers=3, rope_theta=1e4,
                       partial_rotary_factor=1.0),
    "gemma_heads": dict(GEMMA, model_type="gemma", architectures=["GemmaForCausalLM"], head_dim=24, num_key_value_heads=2,
                        num_hidden_layers=3, hidden_act="gelu_pytorch_tanh"),
    "gemma2_full": dict(GEMMA, model_type="gemma2", architectures=["Gemma2ForCausalLM"], head_dim=24, num_hidden_layers=4,
                        num_key_value_heads=1, query_pre_attn_scalar=30, layer_types=["full_attention"] * 3 + ["sliding_attention"],
                        sliding_window=3, attn_logit_softcapping=20.0, final_logit_softcapping=None),
    "gemma3_heads": dict(GEMMA, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], head_dim=24, num_hidden_layers=7,
                         num_key_value_heads=1, query_pre_attn_scalar=20, sliding_window=9, rope_theta=1e6,
                         rope_local_base_freq=1e4),
    "qwen2_moe_shared": dict(NO_PAD, model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], tie_word_embeddings=False,
                             num_key_value_heads=1, num_experts=9, num_experts_per_tok=4, moe_intermediate_size=20,
                             shared_expert_intermediate_size=12, norm_topk_prob=True, use_sliding_window=False, rope_theta=1e4),
    "glm4_moe_heads": dict(NO_PAD, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], tie_word_embeddings=False,
                           rms_norm_eps=1e-5, head_dim=16, num_key_value_heads=1, attention_bias=False, use_qk_norm=True,
                           partial_rotary_factor=0.25, n_routed_experts=12, num_experts_per_tok=2, moe_intermediate_size=16,
                           n_shared_experts=1, n_group=3, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
                           first_k_dense_replace=0, rope_theta=1e6),
    "gpt_oss_heads": dict(NO_PAD, model_type="gpt_oss", architectures=["GptOssForCausalLM"], tie_word_embeddings=False,
                          head_dim=24, num_key_value_heads=1, intermediate_size=20, num_local_experts=9, num_experts_per_tok=2,
                          sliding_window=5, layer_types=["full_attention", "sliding_attention"], attention_bias=True,
                          rope_parameters=dict(rope_type="default", rope_theta=1e5)),
    "deepseek_v3_heads": dict(NO_PAD, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], tie_word_embeddings=True,
                              num_attention_heads=2, num_key_value_heads=2, q_lora_rank=12, kv_lora_rank=32, qk_nope_head_dim=12,
                              qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=12, num_experts_per_tok=4,
                              moe_intermediate_size=20, n_shared_experts=1, n_group=2, topk_group=1, routed_scaling_factor=1.5,
                              norm_topk_prob=False, first_k_dense_replace=2, num_hidden_layers=4, rope_theta=1e4),
    "deepseek_v2_heads": dict(NO_PAD, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], tie_word_embeddings=False,
                              num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=12,
                              qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=12, num_experts_per_tok=4,
                              moe_intermediate_size=20, n_shared_experts=1, n_group=3, topk_group=2,
                              topk_method="group_limited_greedy", routed_scaling_factor=1.0, norm_topk_prob=False,
                              first_k_dense_replace=0, rope_theta=1e6),
    "minimax_m2_heads": dict(NO_PAD, model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], tie_word_embeddings=True,
                             head_dim=24, num_key_value_heads=1, intermediate_size=20, num_local_experts=12,
                             num_experts_per_tok=4, rotary_dim=12, rope_theta=1e4),
    "minimax_m2_whole": dict(NO_PAD, model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], tie_word_embeddings=False,
                             head_dim=8, num_key_value_heads=4, num_hidden_layers=3, intermediate_size=16, num_local_experts=5,
                             num_experts_per_tok=2, rope_theta=1e6),
    "hy_v3_heads": dict(NO_PAD, model_type="hy_v3", architectures=["HYV3ForCausalLM"], tie_word_embeddings=True, rms_norm_eps=1e-5,
                        head_dim=24, num_key_value_heads=1, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=20,
                        num_shared_experts=2, router_scaling_factor=1.5, attention_bias=True, rope_theta=1e4),
    "hy_v3_sparse": dict(NO_PAD, model_type="hy_v3", architectures=["HYV3ForCausalLM"], tie_word_embeddings=False,
                         head_dim=16, num_key_value_heads=4, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
                         num_shared_experts=1, mlp_layer_types=["sparse"] * 2, enable_moe_fp32_combine=False, rope_theta=1e6),
    # GLM-4.7-Flash: DeepSeek-V3's layers
    "glm4_moe_lite": dict(NO_PAD, model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"], tie_word_embeddings=False,
                          num_key_value_heads=4, rms_norm_eps=1e-5, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12,
                          qk_rope_head_dim=4, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
                          n_shared_experts=1, routed_scaling_factor=1.8, norm_topk_prob=True, rope_theta=1e6),
    "glm4_moe_lite_types": dict(NO_PAD, model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"],
                                tie_word_embeddings=True, num_key_value_heads=4, num_hidden_layers=3, q_lora_rank=None,
                                kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=12,
                                num_experts_per_tok=4, moe_intermediate_size=20, n_shared_experts=2, n_group=3, topk_group=2,
                                norm_topk_prob=False, mlp_layer_types=["sparse", "dense", "sparse"], rope_theta=1e4),
    "glm4_moe_lite_heads": dict(NO_PAD, model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"],
                                tie_word_embeddings=False, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=12,
                                kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=6,
                                num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, routed_scaling_factor=1.0,
                                mlp_layer_types=["sparse"] * 2, rope_theta=1e6),
    "olmoe_heads": dict(SHAPE, model_type="olmoe", architectures=["OlmoeForCausalLM"], tie_word_embeddings=True, num_experts=16,
                        num_key_value_heads=1, num_experts_per_tok=8, intermediate_size=12, norm_topk_prob=True,
                        attention_bias=True, pad_token_id=0, rope_theta=1e5),
    "olmoe_one": dict(SHAPE, model_type="olmoe", architectures=["OlmoeForCausalLM"], tie_word_embeddings=False, num_experts=5,
                      num_key_value_heads=4, num_experts_per_tok=1, intermediate_size=24, norm_topk_prob=False, pad_token_id=0,
                      num_hidden_layers=3, rope_theta=1e4),
    "mixtral_heads": dict(NO_PAD, model_type="mixtral", architectures=["MixtralForCausalLM"], tie_word_embeddings=True, head_dim=16,
                          num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=3, sliding_window=None, rope_theta=1e4),
    "mixtral_window": dict(NO_PAD, model_type="mixtral", architectures=["MixtralForCausalLM"], tie_word_embeddings=False,
                        num_key_value_heads=4, num_local_experts=3, num_experts_per_tok=2, sliding_window=4, num_hidden_layers=3,
                        rope_theta=1e6),
    "qwen3_5_experts_tied": dict(QWEN35, model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"],
                                 tie_word_embeddings=True, full_attention_interval=3, num_hidden_layers=3, num_experts=9,
                                 num_experts_per_tok=4, moe_intermediate_size=12, shared_expert_intermediate_size=16,
                                 linear_num_value_heads=4, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    "qwen3_5_experts_types": dict(QWEN35, model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"],
                                tie_word_embeddings=False, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2,
                                moe_intermediate_size=20, shared_expert_intermediate_size=12, linear_value_head_dim=32,
                                layer_types=["linear_attention", "full_attention"],
                                rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5)),
    "hunyuan_plain": dict(NO_PAD, model_type="hunyuan_v1_dense", architectures=["HunYuanDenseV1ForCausalLM"], head_dim=8,
                          tie_word_embeddings=False, num_key_value_heads=1, attention_bias=True, rope_theta=1e6),
    "hunyuan_linear": dict(NO_PAD, model_type="hunyuan_v1_dense", architectures=["HunYuanDenseV1ForCausalLM"], head_dim=24,
                           tie_word_embeddings=False, num_key_value_heads=4,
                           rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
    "olmo2_bias": dict(NO_PAD, model_type="olmo2", architectures=["Olmo2ForCausalLM"], tie_word_embeddings=True,
                       num_key_value_heads=4, attention_bias=True, rope_theta=1e4,
                       rope_scaling=dict(type="linear", factor=2.0)),
    "olmo2_one": dict(NO_PAD, model_type="olmo2", architectures=["Olmo2ForCausalLM"], tie_word_embeddings=False,
                      num_key_value_heads=1, rms_norm_eps=1e-6, rope_theta=5e5),
    "olmo3_pattern": dict(NO_PAD, model_type="olmo3", architectures=["Olmo3ForCausalLM"], tie_word_embeddings=False,
                          num_hidden_layers=5, num_key_value_heads=4, sliding_window=6, rope_theta=5e5),
    "olmo3_types": dict(NO_PAD, model_type="olmo3", architectures=["Olmo3ForCausalLM"], tie_word_embeddings=True,
                        num_hidden_layers=4, sliding_window=5,
                        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=4.0, rope_theta=1e6),
                                             sliding_attention=dict(rope_type="default", rope_theta=1e3))),
    "ministral3_window": dict(NO_PAD, model_type="ministral3", architectures=["Ministral3ForCausalLM"], head_dim=8,
                              tie_word_embeddings=True, sliding_window=5,
                              rope_parameters=dict(type="yarn", rope_theta=1e4, factor=4.0, llama_4_scaling_beta=0.7,
                                                   original_max_position_embeddings=3)),
    "ministral3_short": dict(NO_PAD, model_type="ministral3", architectures=["Ministral3ForCausalLM"], head_dim=16,
                             tie_word_embeddings=False, num_key_value_heads=4, sliding_window=None,
                             rope_parameters=dict(type="yarn", rope_theta=1e6, factor=16.0, mscale=1.0, mscale_all_dim=1.0,
                                                  llama_4_scaling_beta=0.1, original_max_position_embeddings=16384)),
    "granite_plain": dict(NO_PAD, model_type="granite", architectures=["GraniteForCausalLM"], tie_word_embeddings=False,
                          num_key_value_heads=1, rope_theta=1e4),
    "granite4_nope": dict(GRANITE4, tie_word_embeddings=False, num_hidden_layers=3, num_key_value_heads=1,
                          position_embedding_type="nope", layer_types=["full_attention"] * 3, embedding_multiplier=12,
                          residual_multiplier=0.22, attention_multiplier=0.015625, logits_scaling=10),
    "granite4_bias": dict(GRANITE4, tie_word_embeddings=True, num_key_value_heads=4, attention_bias=True,
                          position_embedding_type="rope", layer_types=["attention"] * 2, logits_scaling=2.0,
                          rope_parameters=dict(rope_type="default", rope_theta=1e7)),
    "granite_3b": dict(NO_PAD, model_type="granite", architectures=["GraniteForCausalLM"], tie_word_embeddings=True,
                       num_hidden_layers=4, embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.015625,
                       logits_scaling=10, attention_bias=True, mlp_bias=True, rope_theta=1e7),
    "exaone4_types": dict(NO_PAD, model_type="exaone4", architectures=["Exaone4ForCausalLM"], tie_word_embeddings=True,
                          num_hidden_layers=5, num_key_value_heads=4, sliding_window=6, rope_theta=1e4,
                          layer_types=["sliding_attention"] * 3 + ["full_attention"] * 2),
    "exaone4_full": dict(NO_PAD, model_type="exaone4", architectures=["Exaone4ForCausalLM"], tie_word_embeddings=True,
                         num_key_value_heads=1, sliding_window=None, sliding_window_pattern=None, rope_theta=1e4,
                         layer_types=["full_attention"] * 2),
    "qwen3_moe_all": dict(NO_PAD, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=True,
                          head_dim=8, num_experts=40, num_experts_per_tok=8, moe_intermediate_size=16, norm_topk_prob=False,
                          attention_bias=True, use_sliding_window=True, sliding_window=6, rope_theta=1e4),
    "qwen2_moe_window": dict(NO_PAD, model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], tie_word_embeddings=True,
                             num_hidden_layers=4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16,
                             shared_expert_intermediate_size=20, norm_topk_prob=True, qkv_bias=False, decoder_sparse_step=2,
                             use_sliding_window=True, sliding_window=6, max_window_layers=3, rope_theta=1e4),
    # as GLM-4.5-Air: one group, no norms of heads
    "glm4_moe_air": dict(NO_PAD, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], tie_word_embeddings=True,
                         num_hidden_layers=3, rms_norm_eps=1e-5, head_dim=8, attention_bias=True, use_qk_norm=False,
                         partial_rotary_factor=0.5, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=24,
                         n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False,
                         first_k_dense_replace=2, rope_theta=1e6),
    "gpt_oss_default": dict(NO_PAD, model_type="gpt_oss", architectures=["GptOssForCausalLM"], tie_word_embeddings=True,
                            head_dim=16, num_hidden_layers=3, intermediate_size=32, num_local_experts=5,
                            num_experts_per_tok=4, sliding_window=6,
                            attention_bias=False, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    # as Moonlight-16B-A3B: no latent of queries, no groups
    "moonlight": dict(NO_PAD, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], tie_word_embeddings=False,
                      num_key_value_heads=4, rms_norm_eps=1e-5, q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=16,
                      qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12,
                      n_shared_experts=2, n_group=1, topk_group=1, routed_scaling_factor=2.446, norm_topk_prob=True,
                      first_k_dense_replace=1, rope_theta=5e4),
    "deepseek_v2": dict(NO_PAD, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], tie_word_embeddings=False,
                        num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                        v_head_dim=8, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2,
                        n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0,
                        norm_topk_prob=False, first_k_dense_replace=1, rope_theta=1e4),
    "deepseek_v2_lite": dict(NO_PAD, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], tie_word_embeddings=True,
                             num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                             v_head_dim=8, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=2,
                             n_group=1, topk_group=1, topk_method="greedy", routed_scaling_factor=1.0, norm_topk_prob=False,
                             first_k_dense_replace=1, rope_theta=1e4,
                             rope_scaling=dict(type="yarn", factor=40.0, beta_fast=32, beta_slow=1, mscale=0.707,
                                               mscale_all_dim=0.707, original_max_position_embeddings=16)),
    "qwen3_moe_step": dict(NO_PAD, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=False,
                           num_hidden_layers=4, num_experts=5, num_experts_per_tok=5, moe_intermediate_size=36,
                           decoder_sparse_step=2, norm_topk_prob=True, rope_theta=1e4),
    "qwen3_5_interval": dict(QWEN35, tie_word_embeddings=True, num_hidden_layers=4,
                             linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=32, rope_theta=1e6),
    "qwen3_5_heads": dict(QWEN35, tie_word_embeddings=False, full_attention_interval=2, head_dim=32, num_key_value_heads=4,
                          linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=48,
                          rope_parameters=dict(rope_type="default", rope_theta=1e5)),
    "qwen3_next_dense": dict(NEXT, tie_word_embeddings=True, num_hidden_layers=4, full_attention_interval=2, decoder_sparse_step=2,
                             linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=32, num_experts=5,
                             num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=20,
                             norm_topk_prob=False, rope_parameters=dict(rope_type="default", rope_theta=1e5)),
    "qwen3_next_types": dict(NEXT, tie_word_embeddings=False, num_key_value_heads=4, attention_bias=True, head_dim=32,
                             linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=48,
                             layer_types=["full_attention", "linear_attention"], num_experts=4, num_experts_per_tok=4,
                             moe_intermediate_size=24, shared_expert_intermediate_size=8,
                             rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "smollm3_every": dict(NO_PAD, model_type="smollm3", architectures=["SmolLM3ForCausalLM"], num_hidden_layers=4,
                          tie_word_embeddings=False, num_key_value_heads=1, no_rope_layer_interval=2, rope_theta=1e4),
    # no bias of keys: without rope its gradient is 0 but for rounding
    "smollm3_window": dict(NO_PAD, model_type="smollm3", architectures=["SmolLM3ForCausalLM"], num_hidden_layers=4,
                           tie_word_embeddings=True, use_sliding_window=True, sliding_window=6, mlp_bias=True,
                           rope_parameters=dict(rope_type="linear", rope_theta=1e5, factor=2.0)),
    "seed_oss_rope": dict(SHAPE, model_type="seed_oss", architectures=["SeedOssForCausalLM"], tie_word_embeddings=False,
                          head_dim=24, num_key_value_heads=1,
                          rope_parameters=dict(rope_type="linear", rope_theta=1e5, factor=2.0)),
    # DeepSeek-LLM and R1's distils are Llama and Qwen2 as they are
    "deepseek_llm": dict(SHAPE, model_type="llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=False,
                         num_key_value_heads=4, attention_bias=False, rope_theta=1e4),
    "phi4_mini_short": dict(SHAPE, model_type="phi3", architectures=["Phi3ForCausalLM"], tie_word_embeddings=True,
                            original_max_position_embeddings=64, partial_rotary_factor=0.5, pad_token_id=0, rope_theta=1e4,
                            rope_scaling=dict(type="longrope", short_factor=[1.0, 1.3], long_factor=[1.0, 1.7])),
    "glm_plain": dict(SHAPE, model_type="glm", architectures=["GlmForCausalLM"], tie_word_embeddings=True, pad_token_id=0,
                      head_dim=8, attention_bias=False, rope_parameters=dict(rope_type="default", rope_theta=5e5,
                                                                             partial_rotary_factor=1.0)),
    "glm4_bias": dict(SHAPE, model_type="glm4", architectures=["Glm4ForCausalLM"], tie_word_embeddings=True, pad_token_id=0,
                      head_dim=16, num_key_value_heads=1, attention_bias=True,
                      rope_parameters=dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.25)),
    "gemma_old": dict(GEMMA, model_type="gemma", architectures=["GemmaForCausalLM"], head_dim=8, num_key_value_heads=4,
                      hidden_act="gelu_pytorch_tanh", attention_bias=True),
    "gemma2_plain": dict(GEMMA, model_type="gemma2", architectures=["Gemma2ForCausalLM"], head_dim=16, query_pre_attn_scalar=16,
                         sliding_window=4096, attn_logit_softcapping=None, final_logit_softcapping=30.0),
    "gemma3_new": dict(GEMMA, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], head_dim=16, num_hidden_layers=2,
                       query_pre_attn_scalar=16, sliding_window=4, layer_types=["full_attention", "sliding_attention"],
                       rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e6),
                                            sliding_attention=dict(rope_type="default", rope_theta=1e4))),
    "phi4": dict(SHAPE, model_type="phi3", architectures=["Phi3ForCausalLM"], tie_word_embeddings=False, rms_norm_eps=1e-5,
                 num_attention_heads=2, num_key_value_heads=1, sliding_window=None, pad_token_id=0, rope_theta=250000),
    "r1_distil_qwen": dict(SHAPE, model_type="qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=False,
                           use_sliding_window=False, sliding_window=4096, max_window_layers=21, rope_theta=1e4),
}
ROPES = {
    "linear": dict(rope_type="linear", factor=3.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn_mscale": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0,
                        mscale_all_dim=0.5, beta_fast=16.0, beta_slow=2.0, truncate=False),
    "yarn_attention": dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=1.3),
}


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def randomize(model, gen):
    """Weights wide enough that every nonlinearity works; wider, and fp32 itself differs from fp64 by 1e-5."""
    one_plus = model.config.model_type.startswith(("gemma", "qwen3_5", "qwen3_next"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            r = torch.randn(p.shape, generator=gen)
            if name.endswith("norm.weight"):
                p.copy_(0.2 * r if one_plus and not name.endswith("linear_attn.norm.weight") else 1 + 0.2 * r)
            elif name.endswith(("bias", "sinks")):
                p.copy_(0.3 * r)
            else:
                p.copy_(r / p.shape[-1] ** 0.5)
            if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                # keys near their queries: what the gated norm divides by is then no sum that cancels
                n = model.config.linear_num_key_heads * model.config.linear_key_head_dim
                p[n:2 * n] = p[:n] + 0.3 * p[n:2 * n]
            if name.endswith("in_proj_qkvz.weight"):  # likewise, in each key head
                n = model.config.linear_key_head_dim
                heads = p.view(model.config.linear_num_key_heads, -1, p.shape[1])
                heads[:, n:2 * n] = heads[:, :n] + 0.3 * heads[:, n:2 * n]
            if name.endswith("A_log"):
                p -= 2
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.2 * torch.randn(b.shape, generator=gen))


def experts_of(tensors, parts_of):
    """Each expert's part of the tensors of all, as parts_of (a tensor's last name, an expert's part of it) names its matrices."""
    out = {}
    for name, t in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            out[name] = t
            continue
        for e, w in enumerate(t):
            out |= {f"{stem}.{e}.{k}": v.contiguous() for k, v in parts_of(last, w).items()}
    return out


def gpt_oss_parts(last, w):
    """Transposed, gate and up in turn; biases too."""
    kind, parts = "bias" if last.endswith("bias") else "weight", ("gate_proj", "up_proj") if "gate" in last else ("down_proj",)
    return {f"{part}.{kind}": w[..., i :: len(parts)].t() for i, part in enumerate(parts)}


def parts(gate, up, down):
    """Of those that have gate's rows in front of up's."""
    def of(last, w):
        return {f"{gate}.weight": w.chunk(2)[0], f"{up}.weight": w.chunk(2)[1]} if last == "gate_up_proj" else {f"{down}.weight": w}
    return of


class Files(typing.NamedTuple):
    """What a family's released files have otherwise than transformers in memory: parts of names; an expert's matrices; whether
    experts are stacked in files too, so that gradients alone are taken apart."""
    names: dict = {}
    parts_of: typing.Callable = parts("gate_proj", "up_proj", "down_proj")
    stacked: bool = False


MIXTRAL = Files({".mlp.": ".block_sparse_moe."}, parts("w1", "w3", "w2"))
FILES = {
    "mixtral": MIXTRAL,
    "minimax_m2": MIXTRAL,
    "hy_v3": Files({".mlp.gate.": ".mlp.router.gate.", ".mlp.e_score_correction_bias": ".mlp.expert_bias",
                    ".mlp.shared_experts.": ".mlp.shared_mlp."}),
    "gpt_oss": Files(parts_of=gpt_oss_parts, stacked=True),
    "qwen3_5_moe_text": Files(stacked=True),
}


def released(tensors, kind, grads=False):
    """Experts, which transformers has stacked in memory, under the names of released files: a matrix each."""
    files = FILES.get(kind, Files())
    if files.stacked and not grads:
        return tensors
    out = {}
    for name, t in tensors.items():
        for ours, theirs in files.names.items():
            name = name.replace(ours, theirs)
        out[name] = t
    return experts_of(out, files.parts_of)


def sequences(gen, lens):
    return [torch.randint(3, SHAPE["vocab_size"], (n,), generator=gen) for n in lens]


def logits_of(model, seqs):
    return [model(input_ids=s[None]).logits[0] for s in seqs]


def targets(seqs):
    row, target, at = [], [], 0
    for s in seqs:
        row += range(at, at + len(s) - 1)
        target += s[1:].tolist()
        at += len(s)
    return torch.tensor(row, dtype=torch.int32), torch.tensor(target, dtype=torch.int32)


def head(logits, row, target):
    z = torch.cat(logits)[row.long()] / TEMPERATURE
    logp = torch.log_softmax(z, -1)
    return logp.gather(1, target.long()[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def golden_pass(model, gen, lens=LENS):
    """A backward pass of random weights of log-probs and entropies, which leaves the gradients in the model: the sequences,
    and the pass as tensors of golden.safetensors."""
    seqs = sequences(gen, lens)
    row, target = targets(seqs)
    dlogp, dentropy = torch.randn(len(row), generator=gen), 0.3 * torch.randn(len(row), generator=gen)
    logits = logits_of(model, seqs)
    logp, entropy = head(logits, row, target)
    (dlogp @ logp + dentropy @ entropy).backward()
    return seqs, {
        "ids": torch.cat(seqs).int(),
        "q_start": torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32),
        "logits": torch.cat(logits).detach(), "row": row, "target": target,
        "inv_temp": torch.full((len(row),), 1 / TEMPERATURE), "logp": logp.detach(), "entropy": entropy.detach(),
        "dlogp": dlogp, "dentropy": dentropy,
    }


def make_case(name, config, out, lens=LENS):
    os.makedirs(out, exist_ok=True)
    write_json(f"{out}/config.json", config)
    gen = torch.Generator().manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), attn_implementation="eager").float().eval()
    randomize(model, gen)
    skip = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k not in skip}
    save_file(released(state, config["model_type"]), f"{out}/model.safetensors", metadata={"format": "pt"})
    choices = {}
    hooks = [m.register_forward_pre_hook(lambda m, args, kwargs: choices.setdefault(m, []).append(
        next(x for x in [*args, *kwargs.values()] if not x.is_floating_point())), with_kwargs=True)
        for n, m in model.named_modules() if n.endswith(".experts") and lens != LENS]
    seqs, golden = golden_pass(model, gen, lens)
    for h in hooks:
        h.remove()
    if choices:  # (layers, rows, k)
        golden["choices"] = torch.stack([torch.cat([c.reshape(-1, c.shape[-1]) for c in v]) for v in choices.values()]).int()
    grads = {k: p.grad for k, p in model.named_parameters() if k not in skip}
    golden |= {f"grad.{k}": v for k, v in released(grads, config["model_type"], True).items()}
    save_file(golden, f"{out}/golden.safetensors")
    return model, seqs, *(golden[k] for k in ("row", "target", "dlogp", "dentropy"))


BALANCED = ("qwen3_moe", "mixtral", "olmoe")
MEGATRON_BALANCED = (*BALANCED, "glm4_moe", "deepseek_v3")


def router_gradients(loss, config, model, path, more):
    kept = (".gate.", "embed_tokens", "norm")
    grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None and any(x in k for x in kept)}
    save_file({"loss": loss.detach()[None], **more} | {f"grad.{k}": v for k, v in released(grads, config.model_type).items()}, path)


def make_balance(out, model, seqs):
    """balance.safetensors: transformers' load_balancing_loss_func over the routers of all tokens, and its gradients of routers and
    of what is before them."""
    balance = importlib.import_module(type(model).__module__).load_balancing_loss_func
    config = model.config
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    routers = [model(input_ids=s[None], output_router_logits=True).router_logits for s in seqs]
    loss = balance(tuple(torch.cat(layer) for layer in zip(*routers)), experts, config.num_experts_per_tok)
    model.zero_grad()
    loss.backward()
    router_gradients(loss, config, model, f"{out}/balance.safetensors", {})


def make_megatron_balance(out, model, seqs):
    """megatron_balance.safetensors: Megatron's aux_loss and 0.3 of its z-loss, summed over the layers, and the gradients of both
    together. The formulas are those of megatron/core/transformer/moe/moe_utils.py: switch_load_balancing_loss_func, z_loss_func,
    and compute_routing_scores_for_aux_loss, whose choices know neither a correction bias nor groups."""
    config, seen = model.config, {}
    experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None) or config.num_local_experts
    k, tokens = config.num_experts_per_tok, sum(map(len, seqs))

    def keep(module, args):
        x = args[0].reshape(-1, args[0].shape[-1])
        seen.setdefault(module, []).append(torch.nn.functional.linear(x.float(), module.weight.float()))

    hooks = [m.register_forward_pre_hook(keep) for n, m in model.named_modules() if n.endswith(".mlp.gate")]
    for s in seqs:
        model(input_ids=s[None])
    for h in hooks:
        h.remove()
    loss = z_loss = 0
    for logits in map(torch.cat, seen.values()):
        scores = logits.softmax(-1)
        if config.model_type in ("glm4_moe", "deepseek_v3"):
            scores = logits.sigmoid() / (logits.sigmoid().sum(-1, keepdim=True) + 1e-20)
        count = torch.bincount(scores.topk(k, -1).indices.flatten(), minlength=experts)
        loss = loss + (scores.sum(0) * count).sum() * experts / (k * tokens * tokens)
        z_loss = z_loss + 0.3 * logits.logsumexp(-1).square().mean()
    model.zero_grad()
    (loss + z_loss).backward()
    router_gradients(loss, config, model, f"{out}/megatron_balance.safetensors", {"z_loss": z_loss.detach()[None]})


def make_fp8(out, name, kept):
    """A case as DeepSeek-V3 and Qwen3 are released, in blocks that no side is a multiple of: OUT has the codes, torch's e4m3, and
    scales in bf16 or f32; OUT/bf16.safetensors what they are in bf16."""
    src, (rows, cols) = f"{os.path.dirname(out)}/{name}", (24, 20)
    os.makedirs(out, exist_ok=True)
    config = json.load(open(f"{src}/config.json"))
    write_json(f"{out}/config.json", config | {"quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, cols]}})
    files, want = {}, {}
    for i, (k, w) in enumerate(sorted(load_file(f"{src}/model.safetensors").items())):
        if w.dim() != 2 or any(x in k for x in kept):
            files[k] = want[k] = w.bfloat16()
            continue
        n, m = (-(-a // b) for a, b in zip(w.shape, (rows, cols)))
        block = torch.zeros(n * rows, m * cols)
        block[: w.shape[0], : w.shape[1]] = w
        scale = (block.reshape(n, rows, m, cols).abs().amax((1, 3)) / 448).to(torch.float32 if i % 2 else torch.bfloat16)
        each = scale.float().repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: w.shape[0], : w.shape[1]]
        files[k] = (w / each).to(torch.float8_e4m3fn)
        files[f"{k}_scale_inv"], want[k] = scale, (files[k].float() * each).bfloat16()
    save_file(files, f"{out}/model.safetensors", metadata={"format": "pt"})
    save_file(want, f"{out}/bf16.safetensors")


def make_adamw(out, model, seqs, row, target, dlogp, dentropy):
    """Ten clipped AdamW steps under a cosine schedule with warmup: norms, rates, final weights."""
    warmup, total, base, floor = 2, 10, 1e-3, 0.1
    opt = torch.optim.AdamW(model.parameters(), lr=base, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def factor(step):  # verl/utils/torch_functional.py, get_cosine_schedule_with_warmup
        if step < warmup:
            return step / warmup
        x = torch.cos(torch.tensor(torch.pi * (step - warmup) / (total - warmup), dtype=torch.float64)).item()
        return max(floor, x * (1 - floor) / 2 + (1 + floor) / 2)

    sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
    norms, rates, losses = [], [], []
    for _ in range(10):
        opt.zero_grad()
        logp, entropy = head(logits_of(model, seqs), row, target)
        loss = dlogp @ logp + dentropy @ entropy
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0).item())
        rates.append(sched.get_last_lr()[0])
        losses.append(loss.item())
        opt.step()
        sched.step()
    golden = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    golden |= {"norms": torch.tensor(norms, dtype=torch.float64), "rates": torch.tensor(rates, dtype=torch.float64),
               "losses": torch.tensor(losses, dtype=torch.float64)}
    save_file(golden, f"{out}/adamw.safetensors")


def make_ropes(out, seqs):
    config = json.load(open(f"{out}/config.json"))
    golden = {}
    for name, rope in ROPES.items():
        variant = dict(config, rope_scaling=rope)
        if name == "dynamic":  # shorter than the sequences; its frequencies are those of the longest, met first
            variant["max_position_embeddings"] = 48
        write_json(f"{out}/config_{name}.json", variant)
        with tempfile.TemporaryDirectory() as d:
            shutil.copy(f"{out}/model.safetensors", d)
            write_json(f"{d}/config.json", variant)
            model = load(d)
            with torch.no_grad():
                golden[f"logits.{name}"] = model(input_ids=seqs[1][None]).logits[0].contiguous()
    save_file(golden, f"{out}/ropes.safetensors")


RAGGED = ((2, 127, 64), (65, 1, 17, 40), (33, 96))  # none alone without a successor


def make_families(out, names):
    torch.set_num_threads(1)
    kinds, made = {}, []
    for name, config in (CASES | MORE).items():
        longrope = "longrope" in json.dumps([config.get("rope_scaling"), config.get("rope_parameters")])
        if longrope and config["original_max_position_embeddings"] > 8:
            continue  # its list is by the length of each sequence there, by the longest of a run here
        i = kinds.setdefault(config["model_type"], []).append(name) or len(kinds[config["model_type"]]) - 1
        if name in (names or [name]):
            make_case(name, config, f"{out}/model/{name}", (23, 70, 9) if longrope else RAGGED[i % len(RAGGED)])
            made.append(name)
    few = {k: v for k, v in kinds.items() if len(v) < 3}
    assert not few, few
    with open(f"{out}/model/cases", "w") as f:
        f.write("".join(n + "\n" for n in made))


def table(log):
    families = {}
    with open(log) as f:
        for line in f:
            at = re.match(r"(\w+) +(ref|cpu|cuda): logits (\S+) .* gradients (\S+) [^,]*(?:, (\d+) other choices)?", line)
            if at:
                kind = (CASES | MORE)[at[1]]["model_type"]
                families.setdefault(kind, []).append((at[1], float(at[3]), float(at[4]), at[5]))
    print("| family | configurations | logits | gradients | other choices of experts |\n|---|---|---|---|---|")
    for kind, rows in families.items():
        other = sum(int(r[3]) for r in rows) if rows[0][3] is not None else ""
        logits, gradients = (max(r[i] for r in rows) for i in (1, 2))
        print(f"| `{kind}` | {len({r[0] for r in rows})} | {logits:.1e} | {gradients:.1e} | {other} |")


def make(out, names):
    torch.set_num_threads(1)
    for name in names or CASES:
        config = CASES[name]
        made = make_case(name, config, f"{out}/{name}")
        if name == "qwen2":
            make_adamw(f"{out}/{name}", *made)
        if name in BALANCED:
            make_balance(f"{out}/{name}", *made[:2])
        if name in MEGATRON_BALANCED:
            make_megatron_balance(f"{out}/{name}", *made[:2])
        if name == "qwen3_moe":
            make_fp8(f"{out}/qwen3_moe_fp8", name, ("embed_tokens", "lm_head", ".gate."))
        if name == "llama":
            make_ropes(f"{out}/{name}", made[1])
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, fs in os.walk(out) for f in fs)
    print(f"{out}: {size} bytes")


# ---- the other direction ----

def run(*args, stdin=None):
    return subprocess.run(args, input=stdin, text=True, check=True, stdout=subprocess.PIPE).stdout


def compare_scores(verlc, path, gen):
    model = load(path)
    vocab = model.config.vocab_size
    seqs = [torch.randint(0, vocab, (n,), generator=gen) for n in (5, 17)]
    lines = [json.dumps({"ids": s.tolist(), "response_start": 1}) for s in seqs]
    out = [json.loads(x) for x in run(verlc, "score", "--model", path, "--dtype", "fp32",
                                      stdin="\n".join(lines) + "\n").splitlines()]
    worst = 0.0
    for s, o in zip(seqs, out, strict=True):
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=s[None]).logits[0].double(), -1)
        want = logp[:-1].gather(1, s[1:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)[:-1]
        for got, ref in ((o["logp"], want), (o["entropy"], entropy)):
            got = torch.tensor(got, dtype=torch.float64)
            worst = max(worst, ((got - ref).abs() / ref.abs().clamp(min=1)).max().item())
    return worst


def check(verlc, work, names):
    os.makedirs(work, exist_ok=True)
    torch.set_num_threads(2)
    gen = torch.Generator().manual_seed(1)
    failed = 0
    for name in names or CASES | MORE:
        config = (CASES | MORE)[name]
        with tempfile.TemporaryDirectory(dir=work) as d:
            write_json(f"{d}/in.json", dict(config, initializer_range=0.2))
            run(verlc, "model", "init", "--arch", f"{d}/in.json", "--out", f"{d}/init", "--seed", "7", "--dtype", "bf16")
            run(verlc, "model", "export", "--model", f"{d}/init", "--out", f"{d}/f32", "--dtype", "fp32")
            run(verlc, "model", "export", "--model", f"{d}/f32", "--out", f"{d}/again")
            a, b, c = (load_file(f"{d}/{x}/model.safetensors") for x in ("init", "f32", "again"))
            same = a.keys() == b.keys() == c.keys() and all(
                torch.equal(a[k].float(), b[k]) and torch.equal(b[k], c[k]) and a[k].dtype == torch.bfloat16 for k in a)
            worst = max(compare_scores(verlc, f"{d}/{x}", gen) for x in ("init", "f32"))
            ok = same and worst <= 1e-5
            failed += not ok
            print(f"{name:14s} loads in transformers, export is exact: {same}, log-prob difference {worst:.1e} "
                  f"{'ok' if ok else 'FAILED'}")
    with tempfile.TemporaryDirectory(dir=work) as d:
        run(verlc, "model", "init", "--preset", "tiny", "--out", f"{d}/tiny")
        AutoTokenizer.from_pretrained(f"{d}/tiny")
        worst = compare_scores(verlc, f"{d}/tiny", gen)
        failed += worst > 1e-5
        print(f"preset tiny    loads with its tokenizer, log-prob difference {worst:.1e} {'ok' if worst <= 1e-5 else 'FAILED'}")
    return failed


if __name__ == "__main__":
    if len(sys.argv) >= 3 and sys.argv[1] == "make":
        make(sys.argv[2], sys.argv[3:])
    elif len(sys.argv) >= 3 and sys.argv[1] == "families":
        make_families(sys.argv[2], sys.argv[3:])
    elif len(sys.argv) == 3 and sys.argv[1] == "table":
        table(sys.argv[2])
    elif len(sys.argv) >= 4 and sys.argv[1] == "check":
        sys.exit(1 if check(sys.argv[2], sys.argv[3], sys.argv[4:]) else 0)
    else:
        sys.exit(__doc__)
