/* cuda_bf16.h - bf16 of the host, as CUDA names it. */
#ifndef VERLC_TESTS_CUDA_THREADS_BF16_H
#define VERLC_TESTS_CUDA_THREADS_BF16_H

#include <cuda_runtime.h>

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
static inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float((uint32_t)v.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const uint32_t u = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {(uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }

#endif
