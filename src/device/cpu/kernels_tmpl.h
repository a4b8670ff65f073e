/* kernels_tmpl.h - the table of kernels.h for the instruction set
 * that the including file is compiled for. KERN_TABLE names it. */
#include "device/cpu/kernels.h"
#include "device/cpu/vec.h"

#include "device/cpu/attention_kernels_tmpl.h"
#include "device/cpu/norm_rope_kernels_tmpl.h"
#include "device/cpu/lm_head_kernels_tmpl.h"
#include "device/cpu/delta_net/delta_rule_kernels_tmpl.h"
#include "device/cpu/delta_net/row_kernels_tmpl.h"

const struct cpu_kern KERN_TABLE = {
    .pack_kt = kern_pack_kt,
    .widen = kern_widen,
    .attn_fwd = kern_attn_fwd,
    .attn_decode = kern_attn_decode,
    .attn_bwd = kern_attn_bwd,
    .attn_out = kern_attn_out,
    .row_dots = kern_row_dots,
    .rmsnorm_fwd = kern_rmsnorm_fwd,
    .rmsnorm_bwd = kern_rmsnorm_bwd,
    .rot_fwd = kern_rot_fwd,
    .rot_bwd = kern_rot_bwd,
    .swiglu_fwd = kern_swiglu_fwd,
    .swiglu_bwd = kern_swiglu_bwd,
    .geglu_fwd = kern_geglu_fwd,
    .geglu_bwd = kern_geglu_bwd,
    .narrow = kern_narrow,
    .add = kern_add,
    .l2_fwd = kern_l2_fwd,
    .l2_bwd = kern_l2_bwd,
    .delta_keys = kern_delta_keys,
    .delta_open_keys = kern_delta_open_keys,
    .delta_dots = kern_delta_dots,
    .delta_fwd = kern_delta_fwd,
    .delta_state = kern_delta_state,
    .delta_bwd = kern_delta_bwd,
    .conv_fwd = kern_conv_fwd,
    .conv_du = kern_conv_du,
    .conv_dx = kern_conv_dx,
    .gated_norm_fwd = kern_gated_norm_fwd,
    .gated_norm_bwd = kern_gated_norm_bwd,
    .output_gate_fwd = kern_output_gate_fwd,
    .output_gate_bwd = kern_output_gate_bwd,
    .head_sum = kern_head_sum,
    .head_dz = kern_head_dz,
    .head_exp = kern_head_exp,
    .softcap = kern_softcap,
    .scale = kern_scale,
    .mass = kern_mass,
    .max = kern_max,
    .at_least = kern_at_least,
};
