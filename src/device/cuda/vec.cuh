/* vec.cuh - reading and writing eight numbers at a time, and sums over a warp or a block.
 *
 * A thread's unit is a chunk of 8 neighbouring columns.  VEC: vectorised, chunks are whole and
 * 16-byte aligned.  Without it elements come one by one; those from n on read as 0 and are not written.
 * Invariant: VEC changes instructions only.  Which thread adds which elements, and in what
 * order, is the same either way, so neither alignment nor width's remainder changes a bit. */
#ifndef VERLC_DEV_CUDA_VEC_CUH
#define VERLC_DEV_CUDA_VEC_CUH

#include "device/cuda/context.cuh"

#include <stdint.h>

enum { CHUNK = 8 };

static __host__ __device__ __forceinline__ bool aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* Whole warps for n threads, at most `most`. */
static inline int warps_for(int64_t n, int most) { return (int)(n >= most ? most : (n + 31) / 32 * 32); }

template <bool VEC> __device__ __forceinline__ void load8(float v[CHUNK], const float *p, int n) {
    if (VEC) {
        const float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) v[i] = i < n ? p[i] : 0.0f;
    }
}
template <bool VEC> __device__ __forceinline__ void load8(float v[CHUNK], const __nv_bfloat16 *p, int n) {
    if (VEC) {
        const uint4 a = *(const uint4 *)p;
        const uint32_t u[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; i++) { /* bf16 is the upper half of f32 */
            v[2 * i] = __uint_as_float(u[i] << 16);
            v[2 * i + 1] = __uint_as_float(u[i] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) v[i] = i < n ? __bfloat162float(p[i]) : 0.0f;
    }
}
template <bool VEC> __device__ __forceinline__ void store8(float *p, const float v[CHUNK], int n) {
    if (VEC) {
        *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            if (i < n) p[i] = v[i];
    }
}
template <bool VEC> __device__ __forceinline__ void store8(__nv_bfloat16 *p, const float v[CHUNK], int n) {
    if (VEC) {
        __nv_bfloat162 b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        *(uint4 *)p = *(const uint4 *)b;
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            if (i < n) p[i] = __float2bfloat16_rn(v[i]);
    }
}
/* Chunk of a tensor of either dtype, from element `at`. */
template <bool VEC> __device__ __forceinline__ void load8_any(float v[CHUNK], const void *p, bool bf16, int64_t at, int n) {
    if (bf16) load8<VEC>(v, (const __nv_bfloat16 *)p + at, n);
    else load8<VEC>(v, (const float *)p + at, n);
}

/* To T and back. */
template <typename T> __device__ __forceinline__ float round_to(float v);
template <> __device__ __forceinline__ float round_to<float>(float v) { return v; }
template <> __device__ __forceinline__ float round_to<__nv_bfloat16>(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

/* Sums over `lanes` (a power of two) neighbouring lanes; every lane gets the same bits. */
__device__ __forceinline__ float lanes_sum(float v, int lanes) {
    for (int o = 1; o < lanes; o <<= 1) v = __fadd_rn(v, __shfl_xor_sync(WARP_ALL, v, o));
    return v;
}
/* Sum over the block, in an order fixed by its size, given to every thread. sh: 32 floats,
 * free again after the next __syncthreads. */
__device__ __forceinline__ float block_sum(float v, float *sh) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    v = lanes_sum(v, 32);
    if (lane == 0) sh[warp] = v;
    __syncthreads();
    return lanes_sum(lane < warps ? sh[lane] : 0.0f, 32);
}

#endif
