/* gemm_zmm.h - packing and results in AVX-512 registers, shared by the
 * three wide instruction sets.  Everything rests on a 16 x 16 transpose of
 * 32-bit words: a word is a f32, or a pair of bf16 that are neighbours in k.
 * Included only by files compiled for AVX-512. */
#ifndef VERLC_DEVICE_CPU_GEMM_ZMM_H
#define VERLC_DEVICE_CPU_GEMM_ZMM_H

#include "device/cpu/gemm/gemm.h"

#include <immintrin.h>

/* The first n lanes; n may be negative or beyond 16. */
static inline __mmask16 zmm_mask16(int64_t n) { return (__mmask16)(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1); }

/* r[i] lane j <-> r[j] lane i */
static inline __attribute__((always_inline)) void zmm_transpose(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* 128-bit lanes: 4 x 4 */
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/* dst [16][16] words, 64-aligned = the transpose of 16 rows of src, with a stride of ld words. */
static inline void zmm_transpose_words(uint32_t *dst, const uint32_t *src, int64_t ld) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(src + i * ld);
    zmm_transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(dst + i * 16, r[i]);
}

/* r[p] = the pair (2p, 2p + 1) of up to 16 bf16 rows: 32 values each, kn of them valid. */
static inline __attribute__((always_inline)) void zmm_pairs(__m512i r[16], const uint16_t *src, int64_t ld, int rows, int64_t kn) {
    const __mmask32 m = kn >= 32 ? 0xffffffffu : (1u << kn) - 1;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_maskz_loadu_epi16(m, src + i * ld) : _mm512_setzero_si512();
    zmm_transpose(r);
}

/* Up to 32 f32, rounded to nearest even as f32_to_bf16 does (vcvtneps2bf16 would
 * flush denormals, and not every CPU here has it). */
static inline __attribute__((always_inline)) __m256i zmm_round_bf16(__m512 v) {
    const __m512i u = _mm512_castps_si512(v);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i h = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    h = _mm512_mask_or_epi32(h, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(h);
}

/* cpu_gemm_ops.store */
static inline void zmm_store(const struct cpu_gemm_out *o, int rows, int cols, const float *c) {
    const __mmask16 m0 = zmm_mask16(cols), m1 = zmm_mask16(cols - 16);
    __m512 b0 = _mm512_setzero_ps(), b1 = b0;
    if (o->bias) {
        b0 = _mm512_loadu_ps(o->bias);
        b1 = _mm512_loadu_ps(o->bias + 16);
    }
    for (int i = 0; i < rows; i++, c += CPU_PANEL) {
        __m512 v0 = _mm512_loadu_ps(c), v1 = _mm512_loadu_ps(c + 16);
        if (o->bias) { /* -0 + 0 would lose its sign */
            v0 = _mm512_add_ps(v0, b0);
            v1 = _mm512_add_ps(v1, b1);
        }
        if (o->dt == DT_BF16) {
            uint16_t *y = (uint16_t *)o->y + i * o->ld;
            _mm256_mask_storeu_epi16(y, m0, zmm_round_bf16(v0));
            _mm256_mask_storeu_epi16(y + 16, m1, zmm_round_bf16(v1));
            continue;
        }
        float *y = (float *)o->y + i * o->ld;
        if (o->add) {
            v0 = _mm512_add_ps(_mm512_maskz_loadu_ps(m0, y), v0);
            v1 = _mm512_add_ps(_mm512_maskz_loadu_ps(m1, y + 16), v1);
        }
        _mm512_mask_storeu_ps(y, m0, v0);
        _mm512_mask_storeu_ps(y + 16, m1, v1);
    }
}

/* cpu_gemm_ops.pack_w for bf16 weights */
static inline void zmm_pack_w(void *panel, const void *src, enum dtype dt, int64_t ld, int rows, int64_t k) {
    uint16_t *d = panel;
    for (int64_t k0 = 0; k0 < k; k0 += 32)
        for (int half = 0; half < 2; half++) {
            const int64_t kn = k - k0 < 32 ? k - k0 : 32;
            const int n = rows - half * 16;
            __m512i r[16];
            if (dt == DT_BF16) {
                zmm_pairs(r, (const uint16_t *)src + half * 16 * ld + k0, ld, n, kn);
            } else {
                const __mmask32 m = kn == 32 ? 0xffffffffu : (1u << kn) - 1;
                const float *s = (const float *)src + half * 16 * ld + k0;
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) {
                    const __mmask32 mi = i < n ? m : 0;
                    const __m512 lo = _mm512_maskz_loadu_ps((__mmask16)mi, s + i * ld);
                    const __m512 hi = _mm512_maskz_loadu_ps((__mmask16)(mi >> 16), s + i * ld + 16);
                    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(zmm_round_bf16(lo)), zmm_round_bf16(hi), 1);
                }
                zmm_transpose(r);
            }
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++, d += 32) _mm512_storeu_si512(d, r[i]);
        }
}

#endif
