/* family_layers.h - the groups of weights of a layer (struct model_group_row, families.h): a list for each kind of layer that a
 * row of families.c may name. A list ends with a row that has no part. */
#ifndef VERLC_MODEL_FAMILY_LAYERS_H
#define VERLC_MODEL_FAMILY_LAYERS_H

#include "model/families.h"

extern const struct model_group_row model_llama_layer[], model_phi3_layer[], model_granite4_layer[], model_glm_layer[],
    model_gemma2_layer[], model_glm4_layer[], model_hunyuan_layer[], model_olmo_layer[], model_post_norm_layer[],
    model_qwen_moe_layer[], model_qwen2_moe_layer[], model_glm4_moe_layer[], model_hy_v3_layer[], model_minimax_m2_layer[],
    model_deepseek_layer[], model_gpt_oss_layer[], model_olmoe_layer[], model_mixtral_layer[], model_delta_layer[],
    model_delta_moe_layer[], model_delta_next_layer[];

#endif
