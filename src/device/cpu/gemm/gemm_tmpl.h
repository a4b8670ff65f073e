/* gemm_tmpl.h - f32 multiply-add kernels, written once for every
 * vector width.  Included by one .c file for each instruction set, which
 * defines the T_ macros below.  bf16 operands are widened to f32 (exact), so
 * the GEMMs of both dtypes run through the same chain: c = a_r * b_r + c
 * with r ascending, one rounding (two without fused multiply-add, where the
 * product of two bf16 is exact anyway).
 *
 *   T_V, T_W       vector of T_W floats
 *   T_ROWS         most rows of a block;  T_NV: vectors side by side in it
 *   T_ZERO() T_LOAD(p) T_STORE(p, v) T_SET1(f) T_FMA(a, b, c)
 *   T_BF16_LO(p)   even 16-bit lanes of a line of pairs, as f32;  T_BF16_HI(p): odd
 *   T_PACK_A_BF16  optional: a faster pack_a for bf16
 *   T_TRANSPOSE    optional: void (uint32_t *dst, const uint32_t *src, ld): 16 x 16
 *   T_PACK_W_BF16, T_STORE_BLOCK  optional: faster pack_w for bf16, store
 *   T_F32_OPS      optional: name of the f32 table, which then is not static
 *   T_KC T_MC T_NC blocking
 *
 * Defines `static const struct cpu_gemm_ops tmpl_bf16, tmpl_f32`. */
#include "device/cpu/gemm/gemm.h"

#include <string.h>

enum { T_COLS = T_W * T_NV, T_PREFETCH = 8192 }; /* bytes to what is prefetched of a streamed panel */
_Static_assert(CPU_PANEL % T_COLS == 0, "a block covers a whole part of a panel");

/* One block of `rows` x T_COLS columns starting at column col of the panel. All
 * arguments but the pointers and rn are constants after inlining. */
static inline __attribute__((always_inline)) void block_f32(const int rows, int64_t rn, const float *a, const float *b, float *c,
                                                            bool load, const bool stream) {
    T_V s[T_ROWS][T_NV];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < T_NV; j++) s[i][j] = load ? T_LOAD(c + i * CPU_PANEL + j * T_W) : T_ZERO();
    for (int64_t r = 0; r < rn; r++) {
        T_V w[T_NV];
#pragma GCC unroll 4
        for (int j = 0; j < T_NV; j++) w[j] = T_LOAD(b + j * T_W);
        if (stream) {
#pragma GCC unroll 4
            for (int j = 0; j < T_COLS; j += 16) __builtin_prefetch((const char *)(b + j) + T_PREFETCH, 0, 3);
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const T_V x = T_SET1(a[i]);
#pragma GCC unroll 4
            for (int j = 0; j < T_NV; j++) s[i][j] = T_FMA(x, w[j], s[i][j]);
        }
        a += rows;
        b += CPU_PANEL;
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < T_NV; j++) T_STORE(c + i * CPU_PANEL + j * T_W, s[i][j]);
}

/* The same straight from bf16 weight panels, lines of 16 outputs x 2 k: of one, or of two
 * at a time (the second's block goes to c2). Two streams of memory hide more
 * of its latency than one; each output's chain is the same. */
static inline __attribute__((always_inline)) void block_bf16(const int rows, const int panels, int64_t rn, const float *a,
                                                             const uint16_t *b, const uint16_t *b2, float *c, float *c2) {
    const int nv = panels * T_NV;
    T_V s[T_ROWS][2 * T_NV];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) s[i][j] = T_ZERO();
    for (int64_t r = 0; r < rn * 32; r += 1024) /* 32 k of a panel: two tiles of 16 lines */
        for (int64_t line = r; line < r + 512; line += 32, a += 2 * rows) {
            const uint16_t *p[2 * T_NV];
            T_V w[2 * T_NV];
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) {
                p[j] = (j < T_NV ? b : b2) + line + j % T_NV * T_W / 16 * 512 + j % T_NV * T_W % 16 * 2;
                if (j % T_NV * T_W % 16 == 0) __builtin_prefetch((const char *)p[j] + T_PREFETCH, 0, 3);
                w[j] = T_BF16_LO(p[j]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                const T_V x = T_SET1(a[i]);
#pragma GCC unroll 8
                for (int j = 0; j < nv; j++) s[i][j] = T_FMA(x, w[j], s[i][j]);
            }
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) w[j] = T_BF16_HI(p[j]);
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                const T_V x = T_SET1(a[rows + i]);
#pragma GCC unroll 8
                for (int j = 0; j < nv; j++) s[i][j] = T_FMA(x, w[j], s[i][j]);
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) T_STORE((j < T_NV ? c : c2) + i * CPU_PANEL + j % T_NV * T_W, s[i][j]);
}

/* Instances for each number of rows, and the switch over them. */
#if T_ROWS == 14
#define T_EACH_ROWS CPU_ROWS_14
#define T_EACH_TWO CPU_ROWS_6
#elif T_ROWS == 6
#define T_EACH_ROWS CPU_ROWS_6
#define T_EACH_TWO CPU_ROWS_2
#elif T_ROWS == 4
#define T_EACH_ROWS CPU_ROWS_4
#define T_EACH_TWO CPU_ROWS_1
#endif
enum { T_TWO_ROWS = (T_ROWS - 2) / 2 }; /* rows of two panels that the registers hold */

#define X(R)                                                                                                                   \
    static __attribute__((noinline)) void block_f32_##R(int64_t rn, const float *a, const float *b, float *c, bool load) {     \
        for (int j = 0; j < CPU_PANEL; j += T_COLS) block_f32(R, rn, a, b + j, c + j, load, false);                            \
    }                                                                                                                          \
    static __attribute__((noinline)) void stream_f32_##R(int64_t rn, const float *a, const float *b, float *c) {               \
        for (int j = 0; j < CPU_PANEL; j += T_COLS) block_f32(R, rn, a, b + j, c + j, false, true);                            \
    }                                                                                                                          \
    static __attribute__((noinline)) void stream_bf16_##R(int64_t rn, const float *a, const uint16_t *b, float *c) {           \
        for (int j = 0; j < CPU_PANEL; j += T_COLS) block_bf16(R, 1, rn, a, b + j / 16 * 512 + j % 16 * 2, NULL, c + j, NULL); \
    }
T_EACH_ROWS(X)
#undef X

#define X(R)                                                                                                              \
    static __attribute__((noinline)) void two_bf16_##R(int64_t rn, const float *a, const uint16_t *b, const uint16_t *b2, \
                                                       float *c, float *c2) {                                             \
        for (int j = 0; j < CPU_PANEL; j += T_COLS) {                                                                     \
            const int at = j / 16 * 512 + j % 16 * 2;                                                                     \
            block_bf16(R, 2, rn, a, b + at, b2 + at, c + j, c2 + j);                                                      \
        }                                                                                                                 \
    }
T_EACH_TWO(X)
#undef X

static void tmpl_block(int rows, int64_t rn, const void *a, const void *b, float *c, bool load) {
#define X(R) \
    case R: block_f32_##R(rn, a, b, c, load); return;
    CPU_PICK_ROWS(T_EACH_ROWS);
#undef X
}

static void tmpl_stream_f32(int rows, int64_t rn, const void *a, const void *b, float *c) {
#define X(R) \
    case R: stream_f32_##R(rn, a, b, c); return;
    CPU_PICK_ROWS(T_EACH_ROWS);
#undef X
}

static void tmpl_stream_bf16(int rows, int64_t rn, const void *a, const void *b, float *c) {
#define X(R) \
    case R: stream_bf16_##R(rn, a, b, c); return;
    CPU_PICK_ROWS(T_EACH_ROWS);
#undef X
}

static void tmpl_stream_two_bf16(int rows, int64_t rn, const void *a, const void *b, const void *b2, float *c, float *c2) {
#define X(R) \
    case R: two_bf16_##R(rn, a, b, b2, c, c2); return;
    CPU_PICK_ROWS(T_EACH_TWO);
#undef X
}

/* ---- packing ---- */
static inline float widen(uint16_t b) {
    const uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void tmpl_pack_a_f32(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    float *d = dst;
    const float *s = src;
    for (int64_t r = 0; r < rn; r++, d += rows)
        for (int i = 0; i < rows; i++) d[i] = s[i * ld + r];
    memset(d, 0, (size_t)((cpu_up32(rn) - rn) * rows) * 4);
}

static void tmpl_pack_at_f32(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    float *d = dst;
    const float *s = src;
    for (int64_t r = 0; r < rn; r++, d += rows, s += ld)
        for (int i = 0; i < rows; i++) d[i] = s[i];
    memset(d, 0, (size_t)((cpu_up32(rn) - rn) * rows) * 4);
}

static void tmpl_pack_at_bf16(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    float *d = dst;
    const uint16_t *s = src;
    for (int64_t r = 0; r < rn; r++, d += rows, s += ld)
        for (int i = 0; i < rows; i++) d[i] = widen(s[i]);
    memset(d, 0, (size_t)((cpu_up32(rn) - rn) * rows) * 4);
}

#ifndef T_PACK_A_BF16
static void tmpl_pack_a_bf16(void *dst, const void *src, int64_t ld, int rows, int64_t rn) {
    float *d = dst;
    const uint16_t *s = src;
    for (int64_t r = 0; r < rn; r++, d += rows)
        for (int i = 0; i < rows; i++) d[i] = widen(s[i * ld + r]);
    memset(d, 0, (size_t)((cpu_up32(rn) - rn) * rows) * 4);
}
#define T_PACK_A_BF16 tmpl_pack_a_bf16
#endif

static const void *tmpl_b_fwd_f32(void *dst, const void *panel, int64_t r0, int64_t rn) {
    (void)dst;
    (void)rn;
    return (const float *)panel + r0 * CPU_PANEL;
}

static const void *tmpl_b_fwd_bf16(void *dst, const void *panel, int64_t r0, int64_t rn) {
    float *d = dst;
    const uint16_t *b = (const uint16_t *)panel + r0 * CPU_PANEL;
    for (int64_t r = 0; r < rn; r += 32, b += 1024)
        for (int pair = 0; pair < 16; pair++, d += 2 * CPU_PANEL) {
#pragma GCC unroll 8
            for (int j = 0; j < CPU_PANEL; j += T_W) {
                const uint16_t *p = b + j / 16 * 512 + pair * 32 + j % 16 * 2;
                T_STORE(d + j, T_BF16_LO(p));
                T_STORE(d + CPU_PANEL + j, T_BF16_HI(p));
            }
        }
    return dst;
}

#ifndef T_TRANSPOSE
static void tmpl_transpose(uint32_t *dst, const uint32_t *src, int64_t ld) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) dst[i * 16 + j] = src[j * ld + i];
}
#define T_TRANSPOSE tmpl_transpose
#endif

static void tmpl_b_dx_f32(void *dst, const void *src, int64_t stride, int64_t panels) {
    float *d = dst;
    uint32_t t[256] __attribute__((aligned(64)));
    for (int64_t p = 0; p < panels; p++, d += 32 * CPU_PANEL)
        for (int n0 = 0; n0 < 32; n0 += 16)
            for (int k0 = 0; k0 < 32; k0 += 16) { /* [k][n] -> [n][k] */
                T_TRANSPOSE(t, (const uint32_t *)src + p * stride + k0 * CPU_PANEL + n0, CPU_PANEL);
                for (int i = 0; i < 16; i++) memcpy(d + (n0 + i) * CPU_PANEL + k0, t + i * 16, 64);
            }
}

static void tmpl_b_dx_bf16(void *dst, const void *src, int64_t stride, int64_t panels) {
    float *d = dst;
    uint32_t t[256] __attribute__((aligned(64)));
    for (int64_t p = 0; p < panels; p++)
        for (int half = 0; half < 2; half++) {
            /* [16 pairs of k][16 n] words -> [16 n][16 pairs]: 32 k of each n in order */
            const uint16_t *tile = (const uint16_t *)src + p * stride + half * 512;
            T_TRANSPOSE(t, (const uint32_t *)(const void *)tile, 16);
            for (int i = 0; i < 16; i++, d += CPU_PANEL) {
                uint32_t out[32];
                for (int j = 0; j < 16; j++) {
                    out[2 * j] = t[i * 16 + j] << 16;
                    out[2 * j + 1] = t[i * 16 + j] & 0xffff0000u;
                }
                memcpy(d, out, sizeof out);
            }
        }
}

static void tmpl_b_rows_f32(void *dst, const void *src, int64_t ld, int cols, int64_t rn) {
    float *d = dst;
    const float *s = src;
    for (int64_t r = 0; r < rn; r++, d += CPU_PANEL, s += ld) {
        if (cols < CPU_PANEL) memset(d, 0, CPU_PANEL * 4);
        memcpy(d, s, (size_t)cols * 4);
    }
    memset(d, 0, (size_t)((cpu_up32(rn) - rn) * CPU_PANEL) * 4);
}

static void tmpl_b_rows_bf16(void *dst, const void *src, int64_t ld, int cols, int64_t rn) {
    float *d = dst;
    const uint16_t *s = src;
    for (int64_t r = 0; r < rn; r++, d += CPU_PANEL, s += ld) {
        uint16_t row[CPU_PANEL] = {0};
        memcpy(row, s, (size_t)cols * 2);
#pragma GCC ivdep
        for (int j = 0; j < CPU_PANEL; j++) d[j] = widen(row[j]);
    }
    memset(d, 0, (size_t)((cpu_up32(rn) - rn) * CPU_PANEL) * 4);
}

static void tmpl_pack_w_f32(void *panel, const void *src, enum dtype dt, int64_t ld, int rows, int64_t k) {
    float *d = panel;
    for (int64_t r = 0; r < cpu_up32(k); r++, d += CPU_PANEL)
        for (int i = 0; i < CPU_PANEL; i++) {
            const int64_t at = i * ld + r;
            d[i] = i >= rows || r >= k ? 0 : dt == DT_F32 ? ((const float *)src)[at] : widen(((const uint16_t *)src)[at]);
        }
}

#ifndef T_PACK_W_BF16
/* Rows are copied to a 16 x 16 square of pairs, rounded on the way, and turned. */
static void tmpl_pack_w_bf16(void *panel, const void *src, enum dtype dt, int64_t ld, int rows, int64_t k) {
    uint16_t *d = panel;
    for (int64_t k0 = 0; k0 < k; k0 += 32)
        for (int half = 0; half < 2; half++, d += 512) {
            uint16_t t[16][32] __attribute__((aligned(64)));
            const int64_t kn = k - k0 < 32 ? k - k0 : 32;
            memset(t, 0, sizeof t);
            for (int i = 0; i < 16 && half * 16 + i < rows; i++) {
                const int64_t at = (half * 16 + i) * ld + k0;
                if (dt == DT_BF16) memcpy(t[i], (const uint16_t *)src + at, (size_t)kn * 2);
                else
                    for (int64_t j = 0; j < kn; j++) t[i][j] = f32_to_bf16(((const float *)src)[at + j]);
            }
            T_TRANSPOSE((uint32_t *)(void *)d, (const uint32_t *)(const void *)t, 16);
        }
}

#define T_PACK_W_BF16 tmpl_pack_w_bf16
#endif

/* ---- results ---- */
#ifndef T_STORE_BLOCK
static void tmpl_store(const struct cpu_gemm_out *o, int rows, int cols, const float *c) {
    for (int i = 0; i < rows; i++, c += CPU_PANEL) {
        float v[CPU_PANEL];
        if (o->bias)
            for (int j = 0; j < CPU_PANEL; j++) v[j] = c[j] + o->bias[j];
        else memcpy(v, c, sizeof v);
        if (o->dt == DT_BF16) {
            uint16_t h[CPU_PANEL];
            for (int j = 0; j < CPU_PANEL; j++) h[j] = f32_to_bf16(v[j]);
            memcpy((uint16_t *)o->y + i * o->ld, h, (size_t)cols * 2);
        } else if (o->add) {
            float *y = (float *)o->y + i * o->ld;
            for (int j = 0; j < cols; j++) y[j] += v[j];
        } else {
            memcpy((float *)o->y + i * o->ld, v, (size_t)cols * 4);
        }
    }
}

#define T_STORE_BLOCK tmpl_store
#endif

#define T_OPS(type)                                                                                                     \
    .max_rows = T_ROWS, .kc = T_KC, .mc = T_MC, .nc = T_NC, .a_bytes = 4, .b_bytes = 4, .pack_at = tmpl_pack_at_##type, \
    .b_fwd = tmpl_b_fwd_##type, .b_dx = tmpl_b_dx_##type, .b_rows = tmpl_b_rows_##type, .block = tmpl_block,            \
    .stream = tmpl_stream_##type, .store = T_STORE_BLOCK
static const struct cpu_gemm_ops tmpl_bf16 = {T_OPS(bf16), .pack_a = T_PACK_A_BF16, .two_rows = T_TWO_ROWS,
                                              .stream_two = tmpl_stream_two_bf16, .pack_w = T_PACK_W_BF16};
#ifndef T_F32_OPS
#define T_F32_OPS tmpl_f32
static
#endif
    const struct cpu_gemm_ops T_F32_OPS = {T_OPS(f32), .pack_a = tmpl_pack_a_f32, .pack_w = tmpl_pack_w_f32};
