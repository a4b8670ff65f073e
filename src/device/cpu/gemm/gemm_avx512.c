/* gemm_avx512.c - matrix kernels for AVX-512: blocks of 14 x 32, bf16
 * widened to f32.  On CPUs whose vdpbf16ps is slow this is the fastest way to
 * multiply bf16 without AMX.  Called only where the CPU has the instructions. */
#include "device/cpu/gemm/gemm.h"

#if defined(__x86_64__)
#include "device/cpu/gemm/gemm_zmm.h"

/* src (rows, r) bf16 -> [r][rows] f32 */
static void pack_a_bf16(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    float *d = dst;
    const __mmask16 m = (__mmask16)((1u << rows) - 1);
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    for (int64_t r0 = 0; r0 < rn; r0 += 32) {
        __m512i r[16];
        zmm_pairs(r, (const uint16_t *)src + r0, ld, rows, rn - r0);
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++, d += 2 * rows) {
            _mm512_mask_storeu_epi32(d, m, _mm512_slli_epi32(r[p], 16));
            _mm512_mask_storeu_epi32(d + rows, m, _mm512_and_si512(r[p], high));
        }
    }
}

#define T_V __m512
#define T_W 16
#define T_ROWS 14
#define T_NV 2
#define T_KC 256
#define T_MC 18
#define T_NC 16
#define T_ZERO() _mm512_setzero_ps()
#define T_LOAD(p) _mm512_loadu_ps(p)
#define T_STORE(p, v) _mm512_storeu_ps((p), (v))
#define T_SET1(f) _mm512_set1_ps(f)
#define T_FMA(a, b, c) _mm512_fmadd_ps((a), (b), (c))
#define T_BF16_LO(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))
/* A masked load takes no slot of the ports that multiply. */
#define T_BF16_HI(p) _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(0xaaaaaaaau, (p)))
#define T_PACK_A_BF16 pack_a_bf16
#define T_TRANSPOSE zmm_transpose_words
#define T_PACK_W_BF16 zmm_pack_w
#define T_STORE_BLOCK zmm_store
#define T_F32_OPS cpu_gemm_avx512_f32
#include "device/cpu/gemm/gemm_tmpl.h"

const struct cpu_gemm_isa cpu_gemm_avx512 = {.name = "avx512", .bf16 = &tmpl_bf16, .f32 = &cpu_gemm_avx512_f32};
#endif
