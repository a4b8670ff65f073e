/* vec.h - sixteen f32 lanes in AVX-512, AVX2 or plain C, with exp.
 *
 * The kernels of *_kernels_tmpl.h are written once against this header and
 * compiled for each instruction set.  A vec is always 16 lanes, whatever the
 * registers are, so that lane orders and sums are the same everywhere; only
 * plain C differs in bits, where vfma rounds twice.
 *
 * Invariant: every function is elementwise or goes in one fixed lane order, so
 * what a lane holds depends on that lane's inputs alone. */
#ifndef VERLC_DEVICE_CPU_VEC_H
#define VERLC_DEVICE_CPU_VEC_H

#include "device/device.h"

#include <math.h>
#include <string.h>

/* Under a sanitizer a call: inlined into every kernel, the instrumented lanes of plain C are a minute of compiling. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define VEC_FN static __attribute__((unused))
#else
#define VEC_FN static inline __attribute__((always_inline, unused))
#endif
#define VEC_UNROLL _Pragma("GCC unroll 16")

enum { VEC = 16 };
VEC_FN int64_t vec_up(int64_t n) { return (n + VEC - 1) & ~(int64_t)(VEC - 1); }

#if defined(__AVX512F__)

#include <immintrin.h>

/* Rows and vectors of a register block of a GEMM: 24 sums, 4 of B, 1 of A. With bf16 up to
 * MM_ROWS rows go over MM_WIDE_NV vectors, so that B is widened once. */
enum { VEC_MR = 6, VEC_NV = 4, MM_ROWS = 8, MM_WIDE_NV = 2 };
typedef __m512 vec;

VEC_FN vec vset1(float x) { return _mm512_set1_ps(x); }
VEC_FN vec vload(const float *p) { return _mm512_loadu_ps(p); }
VEC_FN void vstore(float *p, vec a) { _mm512_storeu_ps(p, a); }
VEC_FN __mmask16 vec__mask(int64_t n) { return (__mmask16)((1u << n) - 1u); }
/* Lanes >= n are 0, and not stored. 0 <= n <= 16. */
VEC_FN vec vload_n(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(vec__mask(n), p); }
VEC_FN void vstore_n(float *p, vec a, int64_t n) { _mm512_mask_storeu_ps(p, vec__mask(n), a); }
VEC_FN vec vec__widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
VEC_FN vec vload_bf16(const uint16_t *p) { return vec__widen(_mm256_loadu_si256((const __m256i *)p)); }
VEC_FN vec vload_bf16_n(const uint16_t *p, int64_t n) { return vec__widen(_mm256_maskz_loadu_epi16(vec__mask(n), p)); }
/* Nearest even; a NaN keeps its upper half and becomes quiet. */
VEC_FN __m256i vec__narrow(vec a) {
    const __m512i u = _mm512_castps_si512(a), hi = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(hi, _mm512_set1_epi32(1));
    const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(up, nan, hi, _mm512_set1_epi32(0x40)));
}
VEC_FN void vstore_bf16(uint16_t *p, vec a) { _mm256_storeu_si256((__m256i *)p, vec__narrow(a)); }
VEC_FN void vstore_bf16_n(uint16_t *p, vec a, int64_t n) { _mm256_mask_storeu_epi16(p, vec__mask(n), vec__narrow(a)); }
VEC_FN vec vround_bf16(vec a) { return vec__widen(vec__narrow(a)); }
VEC_FN vec vadd(vec a, vec b) { return _mm512_add_ps(a, b); }
VEC_FN vec vsub(vec a, vec b) { return _mm512_sub_ps(a, b); }
VEC_FN vec vmul(vec a, vec b) { return _mm512_mul_ps(a, b); }
VEC_FN vec vdiv(vec a, vec b) { return _mm512_div_ps(a, b); }
VEC_FN vec vfma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); } /* a b + c */
/* b where either is NaN, and where they are equal. */
VEC_FN vec vmax(vec a, vec b) { return _mm512_max_ps(a, b); }
VEC_FN vec vmin(vec a, vec b) { return _mm512_min_ps(a, b); }
/* Lanes [lo, hi) of a, others `fill`. 0 <= lo, hi <= 16. */
VEC_FN vec vkeep(vec a, int64_t lo, int64_t hi, float fill) {
    const __mmask16 m = (__mmask16)(vec__mask(hi) & ~vec__mask(lo));
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), m, a);
}
/* Bit i: lane i of a >= b. */
VEC_FN unsigned vge_bits(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
/* Lanes whose bit is set keep their value, others become 0. */
VEC_FN vec vmask(vec a, unsigned bits) { return _mm512_maskz_mov_ps((__mmask16)bits, a); }
/* 2^n for whole n in [-127, 128]: 0 and infinity at the ends. */
VEC_FN vec vpow2(vec n) {
    const __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23));
}
/* Two bf16 in each lane: the lower and the upper one as f32. */
VEC_FN vec vpair_lo(vec a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 16)); }
VEC_FN vec vpair_hi(vec a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0xffff0000u)));
}
VEC_FN float vsum(vec a) {
    const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
VEC_FN float vmax_lanes(vec a) { return _mm512_reduce_max_ps(a); }
/* r[i] lane j <-> r[j] lane i. */
VEC_FN void vtranspose(vec r[VEC]) {
    vec t[VEC];
    VEC_UNROLL for (int i = 0; i < 16; i += 2) { /* 2 x 2 in each 128 bits */
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    VEC_UNROLL for (int i = 0; i < 16; i += 4) { /* 4 x 4 */
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    VEC_UNROLL for (int i = 0; i < 4; i++) { /* the 4 x 4 grid of those blocks */
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    VEC_UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#elif defined(__AVX2__)

#include <immintrin.h>

enum { VEC_MR = 6, VEC_NV = 1, MM_ROWS = 6, MM_WIDE_NV = 1 }; /* 12 sums, 2 of B, 1 of A in 16 registers */
typedef struct {
    __m256 a, b; /* lanes 0..7, 8..15 */
} vec;
#define VEC2(fa, fb) ((vec){(fa), (fb)})

VEC_FN vec vset1(float x) { return VEC2(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
VEC_FN vec vload(const float *p) { return VEC2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
VEC_FN void vstore(float *p, vec v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
VEC_FN __m256i vec__mask8(int64_t lo, int64_t hi) { /* lanes lo <= i < hi of 8 */
    const __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_and_si256(_mm256_cmpgt_epi32(i, _mm256_set1_epi32((int)lo - 1)),
                            _mm256_cmpgt_epi32(_mm256_set1_epi32((int)hi), i));
}
VEC_FN vec vload_n(const float *p, int64_t n) {
    return VEC2(_mm256_maskload_ps(p, vec__mask8(0, n)),
                n > 8 ? _mm256_maskload_ps(p + 8, vec__mask8(0, n - 8)) : _mm256_setzero_ps());
}
VEC_FN void vstore_n(float *p, vec v, int64_t n) {
    _mm256_maskstore_ps(p, vec__mask8(0, n), v.a);
    if (n > 8) _mm256_maskstore_ps(p + 8, vec__mask8(0, n - 8), v.b);
}
VEC_FN __m256 vec__widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
VEC_FN vec vload_bf16(const uint16_t *p) {
    return VEC2(vec__widen(_mm_loadu_si128((const __m128i *)p)), vec__widen(_mm_loadu_si128((const __m128i *)(p + 8))));
}
VEC_FN vec vload_bf16_n(const uint16_t *p, int64_t n) {
    uint16_t t[VEC] = {0};
    memcpy(t, p, (size_t)n * sizeof *t);
    return vload_bf16(t);
}
VEC_FN __m128i vec__narrow(__m256 a) {
    const __m256i u = _mm256_castps_si256(a), hi = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(hi, _mm256_set1_epi32(1));
    const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i r = _mm256_blendv_epi8(up, _mm256_or_si256(hi, _mm256_set1_epi32(0x40)), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
VEC_FN void vstore_bf16(uint16_t *p, vec v) {
    _mm_storeu_si128((__m128i *)p, vec__narrow(v.a));
    _mm_storeu_si128((__m128i *)(p + 8), vec__narrow(v.b));
}
VEC_FN void vstore_bf16_n(uint16_t *p, vec v, int64_t n) {
    uint16_t t[VEC];
    vstore_bf16(t, v);
    memcpy(p, t, (size_t)n * sizeof *t);
}
VEC_FN vec vround_bf16(vec v) { return VEC2(vec__widen(vec__narrow(v.a)), vec__widen(vec__narrow(v.b))); }
VEC_FN vec vadd(vec x, vec y) { return VEC2(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
VEC_FN vec vsub(vec x, vec y) { return VEC2(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
VEC_FN vec vmul(vec x, vec y) { return VEC2(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
VEC_FN vec vdiv(vec x, vec y) { return VEC2(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
VEC_FN vec vfma(vec x, vec y, vec z) { return VEC2(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
VEC_FN vec vmax(vec x, vec y) { return VEC2(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
VEC_FN vec vmin(vec x, vec y) { return VEC2(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
VEC_FN vec vkeep(vec v, int64_t lo, int64_t hi, float fill) {
    const __m256 f = _mm256_set1_ps(fill);
    return VEC2(_mm256_blendv_ps(f, v.a, _mm256_castsi256_ps(vec__mask8(lo, hi))),
                _mm256_blendv_ps(f, v.b, _mm256_castsi256_ps(vec__mask8(lo - 8, hi - 8))));
}
VEC_FN unsigned vge_bits(vec x, vec y) {
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) |
           (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
VEC_FN __m256 vec__bits8(unsigned bits) {
    const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), one), one));
}
VEC_FN vec vmask(vec v, unsigned bits) {
    return VEC2(_mm256_and_ps(v.a, vec__bits8(bits)), _mm256_and_ps(v.b, vec__bits8(bits >> 8)));
}
VEC_FN __m256 vec__pow2(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
VEC_FN vec vpow2(vec n) { return VEC2(vec__pow2(n.a), vec__pow2(n.b)); }
VEC_FN __m256 vec__pair_lo(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
VEC_FN vec vpair_lo(vec v) { return VEC2(vec__pair_lo(v.a), vec__pair_lo(v.b)); }
VEC_FN vec vpair_hi(vec v) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u));
    return VEC2(_mm256_and_ps(v.a, m), _mm256_and_ps(v.b, m));
}
VEC_FN float vsum(vec v) {
    const __m256 x = _mm256_add_ps(v.a, v.b);
    const __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
VEC_FN float vmax_lanes(vec v) {
    const __m256 x = _mm256_max_ps(v.a, v.b);
    const __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
VEC_FN void vec__transpose8(__m256 r[8]) {
    __m256 t[8];
    VEC_UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    VEC_UNROLL for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    VEC_UNROLL for (int i = 0; i < 4; i++) {
        const __m256 lo = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
        r[i] = lo;
    }
}
VEC_FN void vtranspose(vec r[VEC]) {
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) { /* the four 8 x 8 blocks, each in place */
            __m256 t[8];
            VEC_UNROLL for (int k = 0; k < 8; k++) t[k] = j ? r[8 * i + k].b : r[8 * i + k].a;
            vec__transpose8(t);
            VEC_UNROLL for (int k = 0; k < 8; k++) {
                if (j) r[8 * i + k].b = t[k];
                else r[8 * i + k].a = t[k];
            }
        }
    VEC_UNROLL for (int k = 0; k < 8; k++) { /* then the two off the diagonal change places */
        const __m256 t = r[k].b;
        r[k].b = r[8 + k].a;
        r[8 + k].a = t;
    }
}

#else /* plain C: GCC vectors of four lanes, which every target has or emulates */

enum { VEC_MR = 2, VEC_NV = 1, MM_ROWS = 2, MM_WIDE_NV = 1 };
typedef float vec4 __attribute__((vector_size(16)));
typedef uint32_t vec4u __attribute__((vector_size(16)));
typedef int32_t vec4i __attribute__((vector_size(16)));
typedef struct {
    vec4 q[4]; /* lanes 0..3, 4..7, ... */
} vec;
#define VEC_EACH(r, expr) \
    vec r;                \
    VEC_UNROLL for (int i = 0; i < 4; i++) r.q[i] = (expr)

VEC_FN vec vset1(float x) {
    VEC_EACH(r, ((vec4){x, x, x, x}));
    return r;
}
VEC_FN vec vload(const float *p) {
    vec r;
    memcpy(&r, p, sizeof r);
    return r;
}
VEC_FN void vstore(float *p, vec a) { memcpy(p, &a, sizeof a); }
VEC_FN vec vload_n(const float *p, int64_t n) {
    vec r = vset1(0);
    memcpy(&r, p, (size_t)n * sizeof *p);
    return r;
}
VEC_FN void vstore_n(float *p, vec a, int64_t n) { memcpy(p, &a, (size_t)n * sizeof *p); }
VEC_FN vec vload_bf16(const uint16_t *p) {
    float t[VEC];
    for (int i = 0; i < VEC; i++) t[i] = bf16_to_f32(p[i]);
    return vload(t);
}
VEC_FN vec vload_bf16_n(const uint16_t *p, int64_t n) {
    float t[VEC] = {0};
    for (int i = 0; i < n; i++) t[i] = bf16_to_f32(p[i]);
    return vload(t);
}
VEC_FN void vstore_bf16_n(uint16_t *p, vec a, int64_t n) {
    float t[VEC];
    vstore(t, a);
    for (int i = 0; i < n; i++) p[i] = f32_to_bf16(t[i]);
}
VEC_FN void vstore_bf16(uint16_t *p, vec a) { vstore_bf16_n(p, a, VEC); }
VEC_FN vec vround_bf16(vec a) {
    uint16_t t[VEC];
    vstore_bf16(t, a);
    return vload_bf16(t);
}
VEC_FN vec vadd(vec a, vec b) {
    VEC_EACH(r, a.q[i] + b.q[i]);
    return r;
}
VEC_FN vec vsub(vec a, vec b) {
    VEC_EACH(r, a.q[i] - b.q[i]);
    return r;
}
VEC_FN vec vmul(vec a, vec b) {
    VEC_EACH(r, a.q[i] * b.q[i]);
    return r;
}
VEC_FN vec vdiv(vec a, vec b) {
    VEC_EACH(r, a.q[i] / b.q[i]);
    return r;
}
VEC_FN vec vfma(vec a, vec b, vec c) {
    VEC_EACH(r, a.q[i] * b.q[i] + c.q[i]);
    return r;
}
VEC_FN vec4 vec__pick(vec4i m, vec4 a, vec4 b) { return (vec4)((m & (vec4i)a) | (~m & (vec4i)b)); }
VEC_FN vec vmax(vec a, vec b) {
    VEC_EACH(r, vec__pick(a.q[i] > b.q[i], a.q[i], b.q[i]));
    return r;
}
VEC_FN vec vmin(vec a, vec b) {
    VEC_EACH(r, vec__pick(a.q[i] < b.q[i], a.q[i], b.q[i]));
    return r;
}
VEC_FN vec vkeep(vec a, int64_t lo, int64_t hi, float fill) {
    float t[VEC];
    vstore(t, a);
    for (int i = 0; i < VEC; i++)
        if (i < lo || i >= hi) t[i] = fill;
    return vload(t);
}
VEC_FN unsigned vge_bits(vec a, vec b) {
    unsigned bits = 0;
    for (int i = 0; i < VEC; i++) bits |= (unsigned)(a.q[i / 4][i % 4] >= b.q[i / 4][i % 4]) << i;
    return bits;
}
VEC_FN vec vmask(vec a, unsigned bits) {
    float t[VEC];
    vstore(t, a);
    for (int i = 0; i < VEC; i++)
        if (!(bits >> i & 1u)) t[i] = 0;
    return vload(t);
}
VEC_FN vec vpow2(vec n) {
    VEC_EACH(r, (vec4)((vec4u)(__builtin_convertvector(n.q[i], vec4i) + 127) << 23));
    return r;
}
VEC_FN vec vpair_lo(vec a) {
    VEC_EACH(r, (vec4)((vec4u)a.q[i] << 16));
    return r;
}
VEC_FN vec vpair_hi(vec a) {
    VEC_EACH(r, (vec4)((vec4u)a.q[i] & 0xffff0000u));
    return r;
}
VEC_FN float vsum(vec a) {
    const vec4 y = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
VEC_FN float vmax_lanes(vec a) {
    float m = a.q[0][0];
    for (int i = 1; i < VEC; i++) m = a.q[i / 4][i % 4] > m ? a.q[i / 4][i % 4] : m;
    return m;
}
VEC_FN void vtranspose(vec r[VEC]) {
    float t[VEC][VEC];
    for (int i = 0; i < VEC; i++)
        for (int j = 0; j < VEC; j++) t[j][i] = r[i].q[j / 4][j % 4];
    memcpy(r, t, sizeof t);
}

#endif

/* One lane of vfma. */
VEC_FN float fma1(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* ---- act elements ---- */
VEC_FN vec vload_act(const void *p, enum dtype dt, int64_t i) {
    return dt == DT_BF16 ? vload_bf16((const uint16_t *)p + i) : vload((const float *)p + i);
}
VEC_FN vec vload_act_n(const void *p, enum dtype dt, int64_t i, int64_t n) {
    return dt == DT_BF16 ? vload_bf16_n((const uint16_t *)p + i, n) : vload_n((const float *)p + i, n);
}
VEC_FN void vstore_act_n(void *p, enum dtype dt, int64_t i, vec a, int64_t n) {
    if (dt == DT_BF16) vstore_bf16_n((uint16_t *)p + i, a, n);
    else vstore_n((float *)p + i, a, n);
}
VEC_FN vec vround_act(vec a, enum dtype dt) { return dt == DT_BF16 ? vround_bf16(a) : a; }

/* ---- exp (polynomials of Cephes' expf and exp2f, Moshier 1992; e^x is within 1 ulp) ---- */

/* Adding and taking away 1.5 * 2^23 rounds to the nearest whole number. */
VEC_FN vec vec__whole(vec x) { return vsub(vadd(x, vset1(12582912.0f)), vset1(12582912.0f)); }

/* 2^x. Exactly 1 at 0 and exactly 0 below -126.5; NaN stays NaN. */
VEC_FN vec vexp2(vec x) {
    x = vmin(vset1(128), vmax(vset1(-127), x));
    const vec n = vec__whole(x), f = vsub(x, n);
    vec p = vset1(1.535336188319500e-4f);
    p = vfma(p, f, vset1(1.339887440266574e-3f));
    p = vfma(p, f, vset1(9.618437357674640e-3f));
    p = vfma(p, f, vset1(5.550332471162809e-2f));
    p = vfma(p, f, vset1(2.402264791363012e-1f));
    p = vfma(p, f, vset1(6.931472028550421e-1f));
    return vmul(vfma(p, f, vset1(1)), vpow2(n));
}
/* e^x. Exactly 1 at 0, exactly 0 below -87.7, infinite above 88.4; NaN stays NaN. */
VEC_FN vec vexp(vec x) {
    x = vmin(vset1(88.72f), vmax(vset1(-88), x));
    const vec n = vec__whole(vmul(x, vset1(1.44269504088896341f)));
    const vec r = vfma(n, vset1(2.12194440e-4f), vfma(n, vset1(-0.693359375f), x));
    vec p = vset1(1.9875691500e-4f);
    p = vfma(p, r, vset1(1.3981999507e-3f));
    p = vfma(p, r, vset1(8.3334519073e-3f));
    p = vfma(p, r, vset1(4.1665795894e-2f));
    p = vfma(p, r, vset1(1.6666665459e-1f));
    p = vfma(p, r, vset1(5.0000001201e-1f));
    return vmul(vadd(vfma(p, vmul(r, r), r), vset1(1)), vpow2(n));
}

#endif
