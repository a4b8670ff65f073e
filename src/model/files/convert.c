/* convert.c - see convert.h. Loops over what checkpoints are made of, f32 and bf16, go in blocks of fixed length, which a compiler
 * makes vectors of. */
#include "model/files/convert.h"

#include "model/files/files_int.h"

#include <string.h>

enum { BLOCK = 64 };

static float f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = h >> 10 & 31u, man = h & 0x3ffu;
    uint32_t u;
    float f;
    if (exp == 0) { /* zero or subnormal: man * 2^-24 is exact */
        f = (float)man * 0x1p-24f;
        return sign ? -f : f;
    }
    u = sign | (exp == 31 ? 0x7f800000u : (exp + 112) << 23) | man << 13;
    memcpy(&f, &u, sizeof f);
    return f;
}

static uint16_t f32_to_f16(float f) { /* nearest even; beyond the range Inf */
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return sign | 0x7e00u;
    if (u >= 0x477ff000u) return sign | 0x7c00u;
    if (u < 0x38800000u) { /* subnormal: adding 0.5 rounds at 2^-24 */
        float m, half = 0.5f;
        memcpy(&m, &u, sizeof m);
        m += half;
        memcpy(&u, &m, sizeof u);
        return (uint16_t)(sign | (u - 0x3f000000u));
    }
    u += 0xfffu + (u >> 13 & 1u);
    return (uint16_t)(sign | (u - 0x38000000u) >> 13);
}

/* Files promise no alignment: every element goes through memcpy. */
static uint32_t load_bits(const uint8_t *p) {
    uint32_t u;
    memcpy(&u, p, 4);
    return u;
}

static float load_f32(const uint8_t *p, enum dtype dt) {
    float f;
    uint16_t h;
    if (dt == DT_F32) {
        memcpy(&f, p, 4);
        return f;
    }
    memcpy(&h, p, 2);
    return dt == DT_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

static void f32_to_bf16_all(uint16_t *restrict dst, const uint8_t *restrict src, int64_t n) {
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK)
        for (int k = 0; k < BLOCK; k++) dst[i + k] = f32_to_bf16(load_f32(src + 4 * (i + k), DT_F32));
    for (; i < n; i++) dst[i] = f32_to_bf16(load_f32(src + 4 * i, DT_F32));
}

void model__convert(void *dst, enum dtype dst_dt, const void *src, enum dtype src_dt, int64_t n) {
    const size_t size = dtype_size(src_dt);
    const uint8_t *p = src;
    if (dst_dt == src_dt) {
        memcpy(dst, src, (size_t)n * size);
        return;
    }
    if (src_dt == DT_F32 && dst_dt == DT_BF16) {
        f32_to_bf16_all(dst, src, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const float f = load_f32(p + (size_t)i * size, src_dt);
        if (dst_dt == DT_F32) ((float *)dst)[i] = f;
        else ((uint16_t *)dst)[i] = dst_dt == DT_BF16 ? f32_to_bf16(f) : f32_to_f16(f);
    }
}

/* An exponent of all ones is Inf or NaN. */
static bool all_finite_f32(const uint8_t *p, int64_t n) {
    const uint32_t mask = 0x7f800000u;
    uint32_t bad = 0;
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK)
        for (int k = 0; k < BLOCK; k++) bad |= (load_bits(p + 4 * (i + k)) & mask) == mask;
    for (; i < n; i++) bad |= (load_bits(p + 4 * i) & mask) == mask;
    return !bad;
}

bool model_all_finite(const void *src, enum dtype dt, int64_t n) {
    const uint8_t *p = src;
    if (dt == DT_F32) return all_finite_f32(p, n);
    const uint16_t mask = dt == DT_BF16 ? 0x7f80u : 0x7c00u;
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t u;
        memcpy(&u, p + 2 * i, 2);
        bad |= (u & mask) == mask;
    }
    return !bad;
}
