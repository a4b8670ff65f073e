/* online_softmax.cuh - the online softmax of a row of attention's forward, one function for each step of the chain
 * that attention_fwd.cu describes; all forward kernels are made of these and of MMA.
 *
 * Invariant: intrinsics alone, which the compiler does not fuse, so that a row's bits are the same
 * whichever kernel computes it. */
#ifndef VERLC_DEV_CUDA_ONLINE_SOFTMAX_CUH
#define VERLC_DEV_CUDA_ONLINE_SOFTMAX_CUH

#include "device/cuda/attention/attention.cuh"

/* New running maximum (scaled) of a row whose largest unmasked score of this tile is `top`; *correction rescales the sums so
 * far. Returns what p is relative to: the maximum, or 0 while no key has been seen. */
static __device__ __forceinline__ float row_rescale(float *m, float top, float scale_log2, float *correction) {
    const float now = fmaxf(*m, __fmul_rn(top, scale_log2)), base = now == -INFINITY ? 0.0f : now;
    *correction = exp2_approx(__fsub_rn(*m, base));
    *m = now;
    return base;
}
static __device__ __forceinline__ float row_p(float s, float scale_log2, float base) {
    return exp2_approx(__fmaf_rn(s, scale_log2, -base));
}
/* One lane's part of a quarter of the tile, and its running sum. */
static __device__ __forceinline__ float row_quarter(float p0, float p1, float p2, float p3) {
    return __fadd_rn(__fadd_rn(p0, p1), __fadd_rn(p2, p3));
}
static __device__ __forceinline__ float row_sum(float l, float correction, float quarter) {
    return __fmaf_rn(l, correction, quarter);
}
static __device__ __forceinline__ float quad_sum(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(WARP_ALL, v, 1));
    return __fadd_rn(v, __shfl_xor_sync(WARP_ALL, v, 2));
}
static __device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(WARP_ALL, v, 1));
    return fmaxf(v, __shfl_xor_sync(WARP_ALL, v, 2));
}
static __device__ __forceinline__ uint32_t row_out(float x, float y, float inv) {
    return pack_bf16(__fadd_rn(__fmul_rn(x, inv), 0.0f), __fadd_rn(__fmul_rn(y, inv), 0.0f));
}
static __device__ __forceinline__ float row_lse(float m, float l) { return __fmul_rn(__fadd_rn(m, log2_approx(l)), LN_2); }

#endif
