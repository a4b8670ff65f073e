/* gemm_amx.c - bf16 matrix kernels on Intel's tile unit: blocks of
 * 32 x 32, 32 k at a time.  f32 operands use the AVX-512 kernels.
 *
 * Tiles 0-3 hold the sums of (upper, lower) x (left, right) 16 x 16 quarters,
 * 4 and 5 the A halves, 6 and 7 the B halves.  A thread configures full tiles
 * once on entry to a part: blocks are padded with zero rows to 16 or 32, which
 * costs less than another configuration. */
#include "device/cpu/gemm/gemm.h"

#if defined(__x86_64__)
#include "device/cpu/gemm/gemm_pair.h"

#include <string.h>

enum { ROWS = 32, LINE = 64, C_LINE = CPU_PANEL * 4 }; /* strides in bytes */

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16]; /* bytes of a row */
    uint8_t rows[16];
};

/* The intrinsic tells GCC 12 of 8 bytes only; the rest would be stored too late. */
static void enter(void) {
    struct tile_config t;
    memset(&t, 0, sizeof t);
    t.palette = 1;
    for (int i = 0; i < 8; i++) {
        t.rows[i] = 16;
        t.colsb[i] = LINE;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(t) : "memory");
}

static void leave(void) { _tile_release(); }

/* a [rn / 32][32 rows][32] bf16 */
static void block_32(int64_t rn, const uint16_t *a, const uint16_t *b, float *c, bool load) {
    float *lower = c + 16 * CPU_PANEL;
    if (load) {
        _tile_loadd(0, c, C_LINE);
        _tile_loadd(1, c + 16, C_LINE);
        _tile_loadd(2, lower, C_LINE);
        _tile_loadd(3, lower + 16, C_LINE);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t r = 0; r < rn; r += 32, a += 1024, b += 1024) {
        _tile_stream_loadd(4, a, LINE); /* A passes by; the panel stays in L1 */
        _tile_loadd(6, b, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 512, LINE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(5, a + 16 * 32, LINE);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, C_LINE);
    _tile_stored(1, c + 16, C_LINE);
    _tile_stored(2, lower, C_LINE);
    _tile_stored(3, lower + 16, C_LINE);
}

/* 16 rows; prefetch: bytes from what is read to what is prefetched; 0: nothing is. */
static void block_16(int64_t rn, const uint16_t *a, const uint16_t *b, float *c, bool load, int64_t prefetch) {
    if (load) {
        _tile_loadd(0, c, C_LINE);
        _tile_loadd(1, c + 16, C_LINE);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (int64_t r = 0; r < rn; r += 32, a += 512, b += 1024) {
        if (prefetch) {
#pragma GCC unroll 32
            for (int i = 0; i < 32; i++) __builtin_prefetch((const char *)b + prefetch + i * 64, 0, 3);
        }
        _tile_loadd(4, a, LINE);
        _tile_loadd(6, b, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 512, LINE);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, C_LINE);
    _tile_stored(1, c + 16, C_LINE);
}

/* The compiler does not see that tile loads read memory and stores write it. */
static void block(int rows, int64_t rn, const void *a, const void *b, float *c, bool load) {
    __asm__ volatile("" ::: "memory");
    if (rows > 16) block_32(rn, a, b, c, load);
    else block_16(rn, a, b, c, load, 0);
    __asm__ volatile("" ::: "memory");
}

static void stream(int rows, int64_t rn, const void *a, const void *b, float *c) {
    __asm__ volatile("" ::: "memory");
    if (rows > 16) block_32(rn, a, b, c, false);
    else block_16(rn, a, b, c, false, 8192);
    __asm__ volatile("" ::: "memory");
}

static int padded(int rows) { return rows > 16 ? 32 : 16; }

static void pack_a(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    uint16_t *d = dst;
    for (int64_t r = 0; r < rn; r += 32) {
        const __mmask32 m = rn - r >= 32 ? 0xffffffffu : (1u << (rn - r)) - 1;
        for (int i = 0; i < padded(rows); i++, d += 32)
            _mm512_storeu_si512(d, i < rows ? _mm512_maskz_loadu_epi16(m, (const uint16_t *)src + i * ld + r)
                                            : _mm512_setzero_si512());
    }
}

static void pack_at(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    uint16_t *d = dst;
    const uint16_t *s = src;
    for (int64_t r0 = 0; r0 < rn; r0 += 32)
        for (int i0 = 0; i0 < padded(rows); i0 += 16, d += 512) {
            const __mmask16 m = zmm_mask16(rows - i0);
            __m512i t[16];
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++) {
                const int64_t r = r0 + 2 * p;
                t[p] = pair_rows(s + r * ld + i0, ld, m, rn - r);
            }
            zmm_transpose(t); /* t[i]: 32 r of row i0 + i */
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(d + i * 32, t[i]);
        }
}

static const struct cpu_gemm_ops ops = {
    PAIR_OPS, .max_rows = ROWS, .mc = 16, .pack_a = pack_a, .pack_at = pack_at, .block = block, .stream = stream,
};

const struct cpu_gemm_isa cpu_gemm_amx = {
    .name = "amx",
    .bf16 = &ops,
    .f32 = &cpu_gemm_avx512_f32,
    .enter = enter,
    .leave = leave,
};
#endif
