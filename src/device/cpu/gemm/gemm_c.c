/* gemm_c.c - matrix kernels in portable C: vectors of four floats by
 * the compiler's vector extension, which any processor has or imitates.
 * Multiplication and addition round separately here (no fused multiply-add). */
#include "device/cpu/gemm/gemm.h"

#include <string.h>

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t vec4u __attribute__((vector_size(16), aligned(4), may_alias));

#define T_V vec4
#define T_W 4
#define T_ROWS 4
#define T_NV 2
#define T_KC 256
#define T_MC 32
#define T_NC 8
#define T_ZERO() ((vec4){0})
#define T_LOAD(p) (*(const vec4 *)(const void *)(p))
#define T_STORE(p, v) (*(vec4 *)(void *)(p) = (v))
#define T_SET1(f) ((vec4){(f), (f), (f), (f)})
#define T_FMA(a, b, c) ((a) * (b) + (c))
#define T_BF16_LO(p) ((vec4)(*(const vec4u *)(const void *)(p) << 16))
#define T_BF16_HI(p) ((vec4)(*(const vec4u *)(const void *)(p)&0xffff0000u))
#include "device/cpu/gemm/gemm_tmpl.h"

const struct cpu_gemm_isa cpu_gemm_c = {.name = "c", .bf16 = &tmpl_bf16, .f32 = &tmpl_f32};
