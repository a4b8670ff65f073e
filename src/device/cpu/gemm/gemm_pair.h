/* gemm_pair.h - packing of bf16 operands whose kernels take pairs of
 * neighbours in the reduction: vdpbf16ps and AMX.  A line of 64 bytes holds two
 * r of 16 columns; a packed weight is such a panel already.
 * Included only by files compiled for AVX-512. */
#ifndef VERLC_DEVICE_CPU_GEMM_PAIR_H
#define VERLC_DEVICE_CPU_GEMM_PAIR_H

#include "device/cpu/gemm/gemm_zmm.h"

/* Rows s and s + ld (absent: zero) of n <= 16 bf16 -> 16 pairs. */
static inline __attribute__((always_inline)) __m512i pair_rows(const uint16_t *s, int64_t ld, __mmask16 m, int64_t rows_left) {
    const __mmask16 m0 = rows_left > 0 ? m : 0, m1 = rows_left > 1 ? m : 0;
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m0, s));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m1, s + ld));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

static inline const void *pair_b_fwd(void *dst, const void *panel, int64_t r0, int64_t rn) {
    (void)dst;
    (void)rn;
    return (const uint16_t *)panel + r0 * CPU_PANEL;
}

/* Blocks of 32 k x 32 n with pairs along k -> pairs along n. */
static inline void pair_b_dx(void *dst, const void *src, int64_t stride, int64_t panels) {
    uint16_t *d = dst;
    for (int64_t p = 0; p < panels; p++, d += 1024)
        for (int half = 0; half < 2; half++) {
            const uint16_t *tile = (const uint16_t *)src + p * stride + half * 512;
            __m512i r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(tile + i * 32);
            zmm_transpose(r); /* r[n]: 32 k in order */
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                uint16_t *line = d + (half * 8 + q) * 32;
                const __m512i x = r[2 * q], y = r[2 * q + 1];
                const __m512i x0 = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x));
                const __m512i x1 = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1));
                const __m512i y0 = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(y));
                const __m512i y1 = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(y, 1));
                _mm512_storeu_si512(line, _mm512_or_si512(x0, _mm512_slli_epi32(y0, 16)));
                _mm512_storeu_si512(line + 512, _mm512_or_si512(x1, _mm512_slli_epi32(y1, 16)));
            }
        }
}

static inline void pair_b_rows(void *dst, const void *src, int64_t ld, int cols, int64_t rn) {
    uint16_t *d = dst;
    const uint16_t *s = src;
    const __mmask16 m0 = zmm_mask16(cols), m1 = zmm_mask16(cols - 16);
    for (int64_t r0 = 0; r0 < rn; r0 += 32, d += 1024)
        for (int p = 0; p < 16; p++) {
            const int64_t r = r0 + 2 * p;
            _mm512_storeu_si512(d + p * 32, pair_rows(s + r * ld, ld, m0, rn - r));
            _mm512_storeu_si512(d + 512 + p * 32, pair_rows(s + r * ld + 16, ld, m1, rn - r));
        }
}

/* What the tables of both sets share: the packed formats of B, blocking of k and n, results. */
#define PAIR_OPS                                                                                                    \
    .kc = 512, .nc = 16, .a_bytes = 2, .b_bytes = 2, .b_fwd = pair_b_fwd, .b_dx = pair_b_dx, .b_rows = pair_b_rows, \
    .store = zmm_store, .pack_w = zmm_pack_w

#endif
