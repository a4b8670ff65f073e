/* gemm_avx512bf16.c - bf16 matrix kernels with vdpbf16ps: blocks of
 * 14 x 32, two k at a time.  Twice the f32 rate on AMD Zen 4 and 5, half of it
 * on Intel server cores (there the probe prefers avx512).  f32 operands use
 * the AVX-512 kernels. */
#include "device/cpu/gemm/gemm.h"

#if defined(__x86_64__)
#include "device/cpu/gemm/gemm_pair.h"

enum { ROWS = 14, PREFETCH = 8192 };

static inline __attribute__((always_inline)) __m512bh as_bh(__m512i v) { return (__m512bh)v; }

/* a [rn / 2][rows] pairs, b tiles of a panel, c [rows][32] */
static inline __attribute__((always_inline)) void block_rows(const int rows, int64_t rn, const int32_t *a, const uint16_t *b,
                                                             float *c, bool load, const bool stream) {
    __m512 s[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        s[i][0] = load ? _mm512_loadu_ps(c + i * CPU_PANEL) : _mm512_setzero_ps();
        s[i][1] = load ? _mm512_loadu_ps(c + i * CPU_PANEL + 16) : _mm512_setzero_ps();
    }
    for (int64_t r = 0; r < rn; r += 32, b += 1024)
        for (int p = 0; p < 16; p++, a += rows) {
            const uint16_t *line = b + p * 32;
            if (stream) {
                __builtin_prefetch((const char *)line + PREFETCH, 0, 3);
                __builtin_prefetch((const char *)(line + 512) + PREFETCH, 0, 3);
            }
            const __m512bh w0 = as_bh(_mm512_loadu_si512(line));
            const __m512bh w1 = as_bh(_mm512_loadu_si512(line + 512));
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                const __m512bh x = as_bh(_mm512_set1_epi32(a[i]));
                s[i][0] = _mm512_dpbf16_ps(s[i][0], x, w0);
                s[i][1] = _mm512_dpbf16_ps(s[i][1], x, w1);
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(c + i * CPU_PANEL, s[i][0]);
        _mm512_storeu_ps(c + i * CPU_PANEL + 16, s[i][1]);
    }
}

#define X(R)                                                                                                         \
    static __attribute__((noinline)) void block_##R(int64_t rn, const void *a, const void *b, float *c, bool load) { \
        block_rows(R, rn, a, b, c, load, false);                                                                     \
    }                                                                                                                \
    static __attribute__((noinline)) void stream_##R(int64_t rn, const void *a, const void *b, float *c) {           \
        block_rows(R, rn, a, b, c, false, true);                                                                     \
    }
CPU_ROWS_14(X)
#undef X

static void block(int rows, int64_t rn, const void *a, const void *b, float *c, bool load) {
#define X(R) \
    case R: block_##R(rn, a, b, c, load); return;
    CPU_PICK_ROWS(CPU_ROWS_14);
#undef X
}

static void stream(int rows, int64_t rn, const void *a, const void *b, float *c) {
#define X(R) \
    case R: stream_##R(rn, a, b, c); return;
    CPU_PICK_ROWS(CPU_ROWS_14);
#undef X
}

static void pack_a(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    uint32_t *d = dst;
    const __mmask16 m = zmm_mask16(rows);
    for (int64_t r0 = 0; r0 < rn; r0 += 32) {
        __m512i r[16];
        zmm_pairs(r, (const uint16_t *)src + r0, ld, rows, rn - r0);
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++, d += rows) _mm512_mask_storeu_epi32(d, m, r[p]);
    }
}

static void pack_at(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    uint32_t *d = dst;
    const uint16_t *s = src;
    const __mmask16 m = zmm_mask16(rows);
    for (int64_t r = 0; r < cpu_up32(rn); r += 2, d += rows) _mm512_mask_storeu_epi32(d, m, pair_rows(s + r * ld, ld, m, rn - r));
}

static const struct cpu_gemm_ops ops = {
    PAIR_OPS, .max_rows = ROWS, .mc = 18, .pack_a = pack_a, .pack_at = pack_at, .block = block, .stream = stream,
};

const struct cpu_gemm_isa cpu_gemm_avx512bf16 = {.name = "avx512bf16", .bf16 = &ops, .f32 = &cpu_gemm_avx512_f32};
#endif
