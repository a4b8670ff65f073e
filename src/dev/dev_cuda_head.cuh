/* dev_cuda_head.cuh - the log-softmax that the LM head and the sampler share.
 *
 * A row's statistics are those of its chunks of DEV_VOCAB_CHUNK entries, each summed in
 * f32 by one block of HEAD_THREADS threads that holds the chunk in registers (one read),
 * then put together in double in chunk order.
 *
 * Invariant: both callers walk the same chunks through these functions, and every
 * operation that the compiler could fuse in one place and not in another is written as an
 * intrinsic that fixes its rounding; so the log-prob of a sampled id and that of a training
 * row have equal bits, wherever the logits lie in memory. */
#ifndef VERLC_DEV_CUDA_HEAD_CUH
#define VERLC_DEV_CUDA_HEAD_CUH

#include "dev/dev_cuda_int.cuh"

#include <math_constants.h>

enum {
    HEAD_THREADS = 256,
    HEAD_WARPS = HEAD_THREADS / 32,
    HEAD_PER_THREAD = DEV_VOCAB_CHUNK / HEAD_THREADS,
    HEAD_GROUP = DEV_VOCAB_CHUNK / HEAD_WARPS, /* entries that one warp holds: its share of the chunk, contiguous */
};

/* Of a chunk: sum e, sum e (z - max), sum e^2, with e = exp(z - max); the last two when asked. */
struct head_sum {
    float max, sum, sum_t, sum_sq;
};

static inline int64_t head_chunks(int64_t vocab) { return (vocab + DEV_VOCAB_CHUNK - 1) / DEV_VOCAB_CHUNK; }

/* ---- one chunk; called by all HEAD_THREADS threads ---- */

/* Place in the chunk of this thread's i-th value: runs of four, so that a warp reads 512 bytes at once. */
static __device__ __forceinline__ int head_at(int i) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    return warp * HEAD_GROUP + i / 4 * 128 + lane * 4 + i % 4;
}

/* v = raw[0, n), n <= DEV_VOCAB_CHUNK; -inf beyond. */
static __device__ __forceinline__ void head_load(float (&v)[HEAD_PER_THREAD], const float *raw, int n) {
    const bool wide = ((uintptr_t)raw & 15) == 0;
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i += 4) {
        const int at = head_at(i);
        if (wide && at + 4 <= n) {
            const float4 f = *(const float4 *)(raw + at);
            v[i] = f.x, v[i + 1] = f.y, v[i + 2] = f.z, v[i + 3] = f.w;
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) v[i + c] = at + c < n ? raw[at + c] : -CUDART_INF_F;
        }
    }
}

/* v = v * by inside the chunk, -inf beyond. */
static __device__ __forceinline__ void head_scale(float (&v)[HEAD_PER_THREAD], int n, float by) {
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i++) v[i] = head_at(i) < n ? __fmul_rn(v[i], by) : -CUDART_INF_F;
}

static __device__ __forceinline__ float head_warp_max(float m) {
    for (int d = 16; d > 0; d /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
    return m;
}
static __device__ __forceinline__ float head_warp_sum(float s) { /* the same bits in every lane */
    for (int d = 16; d > 0; d /= 2) s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, d));
    return s;
}

/* A difference of logits held above the point where its e^t is 0, so that 0 * t is 0. NaN stays. */
static __device__ __forceinline__ float head_clamp(float t) { return t < -104.0f ? -104.0f : t; }

struct head_shared {
    float max[HEAD_WARPS], sum[3][HEAD_WARPS];
};

/* Statistics of the chunk whose z the block holds; the result is the same in every thread, and
 * s->max the maxima of the warps' groups until the next call. NaN entries do not enter max and make
 * the sums NaN; a chunk of -inf has max -inf and sum 0. */
template <bool MOMENTS>
static __device__ __forceinline__ head_sum head_chunk_sum(const float (&z)[HEAD_PER_THREAD], head_shared *s) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float m = -CUDART_INF_F; /* fmaxf passes over NaN */
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i++) m = fmaxf(m, z[i]);
    m = head_warp_max(m);
    if (lane == 0) s->max[warp] = m;
    __syncthreads();
    head_sum r = {-CUDART_INF_F, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < HEAD_WARPS; w++) r.max = fmaxf(r.max, s->max[w]);
    const float base = r.max == -CUDART_INF_F ? 0.0f : r.max;
    float e0[4] = {0, 0, 0, 0}, e1[4] = {0, 0, 0, 0}, e2[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i++) {
        const float t = __fsub_rn(z[i], base), e = expf(t);
        e0[i % 4] = __fadd_rn(e0[i % 4], e);
        if (MOMENTS) {
            e1[i % 4] = __fmaf_rn(e, head_clamp(t), e1[i % 4]);
            e2[i % 4] = __fmaf_rn(e, e, e2[i % 4]);
        }
    }
    const float s0 = head_warp_sum(__fadd_rn(__fadd_rn(e0[0], e0[1]), __fadd_rn(e0[2], e0[3])));
    if (lane == 0) s->sum[0][warp] = s0;
    if (MOMENTS) {
        const float s1 = head_warp_sum(__fadd_rn(__fadd_rn(e1[0], e1[1]), __fadd_rn(e1[2], e1[3])));
        const float s2 = head_warp_sum(__fadd_rn(__fadd_rn(e2[0], e2[1]), __fadd_rn(e2[2], e2[3])));
        if (lane == 0) s->sum[1][warp] = s1, s->sum[2][warp] = s2;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < HEAD_WARPS; w++) {
        r.sum = __fadd_rn(r.sum, s->sum[0][w]);
        if (MOMENTS) {
            r.sum_t = __fadd_rn(r.sum_t, s->sum[1][w]);
            r.sum_sq = __fadd_rn(r.sum_sq, s->sum[2][w]);
        }
    }
    return r;
}

/* ---- chunks together ---- */

/* A chunk's part of sum exp(z - max) of the row; 0 for one that holds nothing but -inf. The row's sum
 * is that of its chunks' weights, added in chunk order from 0 by __dadd_rn. */
static __device__ __forceinline__ double head_weight(const head_sum &c, float max) {
    return c.sum == 0 ? 0.0 : __dmul_rn(exp((double)c.max - (double)max), (double)c.sum);
}
static __device__ __forceinline__ double head_lse(float max, double sum) { return __dadd_rn((double)max, log(sum)); }
/* The log-prob of an entry from its z = raw * inv_temp, rounded to f32. */
static __device__ __forceinline__ float head_logp(float z, double lse) { return (float)__dadd_rn((double)z, -lse); }

/* ---- dev_cuda_head_sm90.cu: the gradient of the logits without the logits ---- */

/* Whether it takes this device and this head; dz: where to. */
bool cuda_head_dz_takes(const struct cuda *c, const struct lmhead_args *a, const void *dz);
/* dz (rows, cols) bf16 of rows [row, row + rows) and entries [lo, lo + cols), cols a multiple of 8. */
int cuda_head_dz(struct cuda *c, const struct lmhead_args *a, struct tensor dlogp, struct tensor dentropy, int64_t row,
                 int64_t rows, int64_t lo, int64_t cols, void *dz);

#endif
