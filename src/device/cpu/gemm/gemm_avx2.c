/* gemm_avx2.c - matrix kernels for AVX2 with FMA: blocks of 6 x 16.
 * Compiled for that instruction set alone; called only where the CPU has it. */
#include "device/cpu/gemm/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define T_V __m256
#define T_W 8
#define T_ROWS 6
#define T_NV 2
#define T_KC 256
#define T_MC 42
#define T_NC 8
#define T_ZERO() _mm256_setzero_ps()
#define T_LOAD(p) _mm256_loadu_ps(p)
#define T_STORE(p, v) _mm256_storeu_ps((p), (v))
#define T_SET1(f) _mm256_set1_ps(f)
#define T_FMA(a, b, c) _mm256_fmadd_ps((a), (b), (c))
#define T_LINE(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define T_BF16_LO(p) _mm256_castsi256_ps(_mm256_slli_epi32(T_LINE(p), 16))
#define T_BF16_HI(p) _mm256_castsi256_ps(_mm256_and_si256(T_LINE(p), _mm256_set1_epi32((int)0xffff0000u)))
#include "device/cpu/gemm/gemm_tmpl.h"

const struct cpu_gemm_isa cpu_gemm_avx2 = {.name = "avx2", .bf16 = &tmpl_bf16, .f32 = &tmpl_f32};
#endif
