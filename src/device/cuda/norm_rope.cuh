/* norm_rope.cuh - QK-norm (Qwen3) and RoPE of one head of a new query or key, for the kernel of its own and for
 * decode attention.
 *
 * A head is `lanes` lanes, a power of two; each has a chunk of the first half of the head and the
 * chunk opposite in the second half, so RoPE's pairs (i, i + D/2) meet in one thread.
 * Invariant: intrinsics alone, which the compiler does not fuse, and sums in an order set by the head's
 * size, so that a head's bits are the same whichever kernel computes it. */
#ifndef VERLC_DEV_CUDA_NORM_ROPE_CUH
#define VERLC_DEV_CUDA_NORM_ROPE_CUH

#include "device/cuda/vec.cuh"

/* cos and sin of the pairs [i, i + 8) at position p. */
template <bool VEC>
static __device__ __forceinline__ void load_rope(float cs[2 * CHUNK], const float *rope, int64_t p, int64_t dim, int64_t i, int n) {
    const float *at = rope + p * dim + 2 * i;
    load8<VEC>(cs, at, 2 * n < CHUNK ? 2 * n : CHUNK);
    load8<VEC>(cs + CHUNK, at + CHUNK, 2 * n - CHUNK);
}
/* 1 / rms of a head whose lanes hold x0, x1. */
static __device__ __forceinline__ float head_rstd(const float x0[CHUNK], const float x1[CHUNK], int64_t dim, int lanes, float eps) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) sum = __fmaf_rn(x1[i], x1[i], __fmaf_rn(x0[i], x0[i], sum));
    sum = lanes_sum(sum, lanes);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)dim), eps)));
}
/* The lane's part of a head normalised to weights w0, w1, rounded as Hugging Face does; rs: its head_rstd. */
template <typename T>
static __device__ __forceinline__ void norm_head(float x0[CHUNK], float x1[CHUNK], const float w0[CHUNK], const float w1[CHUNK],
                                                 float rs) {
#pragma unroll
    for (int e = 0; e < CHUNK; e++) {
        x0[e] = round_to<T>(__fmul_rn(round_to<T>(__fmul_rn(x0[e], rs)), w0[e]));
        x1[e] = round_to<T>(__fmul_rn(round_to<T>(__fmul_rn(x1[e], rs)), w1[e]));
    }
}

static __device__ __forceinline__ void rotate(float x0[CHUNK], float x1[CHUNK], const float cs[2 * CHUNK]) {
#pragma unroll
    for (int e = 0; e < CHUNK; e++) {
        const float c = cs[2 * e], s = cs[2 * e + 1], a = x0[e], b = x1[e];
        x0[e] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
        x1[e] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
}

#endif
