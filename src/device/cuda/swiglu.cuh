/* swiglu.cuh - SwiGLU and GeGLU of one element (Shazeer 2020), for the kernels of their own and for GEMM epilogues.
 *
 * Invariant: intrinsics alone, which the compiler does not fuse, so the bits are the same in each kernel. */
#ifndef VERLC_DEV_CUDA_SWIGLU_CUH
#define VERLC_DEV_CUDA_SWIGLU_CUH

#include "device/cuda/ptx.cuh"

/* To some ulp, in four instructions: an exact division and exponential take as long as the memory that a chunk needs. */
static __device__ __forceinline__ float sigmoid(float g) {
    return rcp_approx(__fadd_rn(1.0f, exp2_approx(__fmul_rn(g, -1.4426950408889634f))));
}
/* silu(g) * u */
static __device__ __forceinline__ float swiglu(float g, float u) { return __fmul_rn(__fmul_rn(g, sigmoid(g)), u); }
/* gelu(g) = g s, s = sigmoid(2u), u = sqrt(2/pi) (g + 0.044715 g^3) */
#define GELU_K 1.5957691216057308f /* 2 sqrt(2/pi) */
static __device__ __forceinline__ float gelu_sigmoid(float g) {
    return sigmoid(__fmul_rn(__fmul_rn(GELU_K, g), __fmaf_rn(__fmul_rn(0.044715f, g), g, 1.0f)));
}
static __device__ __forceinline__ float geglu(float g, float u) { return __fmul_rn(__fmul_rn(g, gelu_sigmoid(g)), u); }

#endif
