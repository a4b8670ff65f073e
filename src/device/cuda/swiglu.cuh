/* swiglu.cuh - SwiGLU of one element (Shazeer 2020), for the kernel of its own and for GEMM epilogues.
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

#endif
