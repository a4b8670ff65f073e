/* optimizer.cu - the CUDA backend's ops of the optimizers other than AdamW: the adaptive ones, a linear
 * combination, and 8-bit codes with a scale for each block.
 *
 * Bound by memory.  A lane takes 8 neighbouring elements; of the codes a warp takes one block
 * of DEV_QUANT_BLOCK = 32 x 8, so its scale is a maximum over the warp.
 * Invariant: each element (each block of the codes) is computed alone, in the order of
 * roundings of device/ref/ref.c, so the bits are ref's. */
#include "device/adaptive.h"
#include "device/cuda/vec.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, CODES = 256 };
static_assert(DEV_QUANT_BLOCK == 32 * CHUNK, "a warp holds one block of codes");

static __host__ __device__ __forceinline__ bool aligned8(const void *p) { return ((uintptr_t)p & 7) == 0; }

/* ---- a * x + b * y; y may be x ---- */

template <bool VEC, bool READ_Y>
static __global__ void __launch_bounds__(THREADS) axpby_kernel(float *y, float a, const float *x, float b, int64_t n) {
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK;
    float v[CHUNK], w[CHUNK];
    if (i >= n) return;
    const int left = n - i < CHUNK ? (int)(n - i) : CHUNK;
    const bool whole = VEC && left == CHUNK;
    if (whole) load8<true>(v, x + i, CHUNK);
    else load8<false>(v, x + i, left);
    if (READ_Y) {
        if (whole) load8<true>(w, y + i, CHUNK);
        else load8<false>(w, y + i, left);
    }
#pragma unroll
    for (int k = 0; k < CHUNK; k++) {
        v[k] = __fmul_rn(a, v[k]);
        if (READ_Y) v[k] = __fadd_rn(v[k], __fmul_rn(b, w[k]));
    }
    if (whole) store8<true>(y + i, v, CHUNK);
    else store8<false>(y + i, v, left);
}
template <bool VEC> static void axpby_any(struct cuda *c, float *y, float a, const float *x, float b, int64_t n) {
    const unsigned blocks = (unsigned)ceil_div(n, THREADS * CHUNK);
    if (b == 0) axpby_kernel<VEC, false><<<blocks, THREADS, 0, c->stream>>>(y, a, x, b, n);
    else axpby_kernel<VEC, true><<<blocks, THREADS, 0, c->stream>>>(y, a, x, b, n);
}
int cuda_axpby(struct dev *d, struct tensor y, float a, struct tensor x, float b) {
    struct cuda *c = cuda_of(d);
    float *to = (float *)y.data;
    const float *from = (const float *)x.data;
    if (aligned16(to) && aligned16(from)) axpby_any<true>(c, to, a, from, b, tensor_count(y));
    else axpby_any<false>(c, to, a, from, b, tensor_count(y));
    CU_LAUNCHED();
    return 0;
}

/* ---- Adam, AMSGrad, RAdam, RMSprop ---- */

struct adaptive_arrays {
    float *p, *m, *v, *x;
    const float *g;
};

/* p, m, v, x of one element; every rounding is spelled out, so that the bits are ref's. */
template <int RULE, bool M, bool X>
static __device__ __forceinline__ void adaptive_one(float &p, float &m, float &v, float &x, float grad, const adaptive_scalars &s) {
    float g = __fadd_rn(__fmul_rn(grad, s.scale), __fmul_rn(s.couple, p)), by;
    p = __fmul_rn(p, s.keep);
    v = __fadd_rn(__fmul_rn(v, s.b2), __fmul_rn(__fmul_rn(s.one_b2, g), g));
    if (RULE == ADAPTIVE_RMSPROP) {
        float spread = v;
        if (X) {
            x = __fadd_rn(x, __fmul_rn(s.one_b1, __fsub_rn(g, x)));
            spread = fmaxf(__fsub_rn(v, __fmul_rn(x, x)), 0.0f);
        }
        g = __fdiv_rn(g, __fadd_rn(__fsqrt_rn(spread), s.eps));
        if (M) g = m = __fadd_rn(__fmul_rn(m, s.b1), g);
        p = __fsub_rn(p, __fmul_rn(s.step_size, g));
        return;
    }
    m = __fadd_rn(m, __fmul_rn(s.one_b1, __fsub_rn(g, m)));
    if (RULE == ADAPTIVE_RADAM) {
        by = s.rectify > 0 ? __fdiv_rn(s.rectify, __fadd_rn(__fsqrt_rn(v), s.eps)) : 1.0f;
        p = __fsub_rn(p, __fmul_rn(__fmul_rn(s.step_size, m), by));
        return;
    }
    if (X) x = fmaxf(x, v);
    by = __fadd_rn(__fdiv_rn(__fsqrt_rn(X ? x : v), s.root_bias2), s.eps);
    p = __fsub_rn(p, __fdiv_rn(__fmul_rn(s.step_size, m), by));
}

/* Four neighbours a thread. */
template <bool VEC, int RULE, bool M, bool X>
static __global__ void __launch_bounds__(THREADS) adaptive_kernel(adaptive_arrays a, int64_t n, adaptive_scalars s) {
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    float none = 0;
    if (i >= n) return;
    if (VEC && i + 4 <= n) {
        alignas(16) float p[4], m[4], v[4], x[4], g[4];
        *(float4 *)p = *(const float4 *)(a.p + i);
        *(float4 *)v = *(const float4 *)(a.v + i);
        *(float4 *)g = *(const float4 *)(a.g + i);
        if (M) *(float4 *)m = *(const float4 *)(a.m + i);
        if (X) *(float4 *)x = *(const float4 *)(a.x + i);
#pragma unroll
        for (int k = 0; k < 4; k++) adaptive_one<RULE, M, X>(p[k], M ? m[k] : none, v[k], X ? x[k] : none, g[k], s);
        *(float4 *)(a.p + i) = *(const float4 *)p;
        *(float4 *)(a.v + i) = *(const float4 *)v;
        if (M) *(float4 *)(a.m + i) = *(const float4 *)m;
        if (X) *(float4 *)(a.x + i) = *(const float4 *)x;
    } else {
        for (int64_t k = i; k < i + 4 && k < n; k++)
            adaptive_one<RULE, M, X>(a.p[k], M ? a.m[k] : none, a.v[k], X ? a.x[k] : none, a.g[k], s);
    }
}

template <int RULE, bool M, bool X>
static void adaptive_any(struct cuda *c, const adaptive_arrays &a, int64_t n, const adaptive_scalars &s) {
    const unsigned blocks = (unsigned)ceil_div(n, THREADS * 4);
    const bool vec = aligned16(a.p) && aligned16(a.m) && aligned16(a.v) && aligned16(a.x) && aligned16(a.g); /* NULL is */
    if (vec) adaptive_kernel<true, RULE, M, X><<<blocks, THREADS, 0, c->stream>>>(a, n, s);
    else adaptive_kernel<false, RULE, M, X><<<blocks, THREADS, 0, c->stream>>>(a, n, s);
}

int cuda_adaptive(struct dev *d, const struct adaptive_args *a) {
    struct cuda *c = cuda_of(d);
    const adaptive_arrays t = {(float *)a->p.data, (float *)a->m.data, (float *)a->v.data, (float *)a->x.data,
                               (const float *)a->g.data};
    const adaptive_scalars s = adaptive_scalars_of(a);
    const int64_t n = tensor_count(a->p);
    if (a->rule == ADAPTIVE_RADAM) adaptive_any<ADAPTIVE_RADAM, true, false>(c, t, n, s);
    else if (a->rule == ADAPTIVE_ADAM && t.x) adaptive_any<ADAPTIVE_ADAM, true, true>(c, t, n, s);
    else if (a->rule == ADAPTIVE_ADAM) adaptive_any<ADAPTIVE_ADAM, true, false>(c, t, n, s);
    else if (t.m && t.x) adaptive_any<ADAPTIVE_RMSPROP, true, true>(c, t, n, s);
    else if (t.m) adaptive_any<ADAPTIVE_RMSPROP, true, false>(c, t, n, s);
    else if (t.x) adaptive_any<ADAPTIVE_RMSPROP, false, true>(c, t, n, s);
    else adaptive_any<ADAPTIVE_RMSPROP, false, false>(c, t, n, s);
    CU_LAUNCHED();
    return 0;
}

/* ---- 8 bits ---- */

static __device__ __forceinline__ void store_codes(uint8_t *code, const uint32_t v[CHUNK], int n) {
    if (n == CHUNK && aligned8(code)) {
        *(uint2 *)code = make_uint2(v[0] | v[1] << 8 | v[2] << 16 | v[3] << 24, v[4] | v[5] << 8 | v[6] << 16 | v[7] << 24);
    } else {
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            if (k < n) code[k] = (uint8_t)v[k];
    }
}

/* The number of midpoints below v, by halving; the last one is never passed. */
static __device__ __forceinline__ uint32_t nearest_code(const float *middle, float v) {
    int code = 0;
#pragma unroll
    for (int half = CODES / 2; half > 0; half /= 2) code += middle[code + half - 1] < v ? half : 0;
    return (uint32_t)code;
}

/* One block of codes a warp at a time: grid-stride, so that the midpoints are made once a thread block. */
static __global__ void __launch_bounds__(THREADS)
    quant8_kernel(const float *x, uint8_t *code, float *scale, const float *book, int64_t n) {
    __shared__ float middle[CODES];
    static_assert(THREADS == CODES, "one midpoint a thread");
    const int t = (int)threadIdx.x, lane = t % 32;
    middle[t] = t < CODES - 1 ? __fmul_rn(0.5f, __fadd_rn(book[t], book[t + 1])) : INFINITY;
    __syncthreads();
    for (int64_t b = (int64_t)blockIdx.x * WARPS + t / 32; b * DEV_QUANT_BLOCK < n; b += (int64_t)gridDim.x * WARPS) {
        const int64_t i = b * DEV_QUANT_BLOCK + lane * CHUNK;
        const int left = n - i >= CHUNK ? CHUNK : n > i ? (int)(n - i) : 0;
        float v[CHUNK], most = 0;
        uint32_t q[CHUNK];
        if (left == CHUNK && ((uintptr_t)(x + i) & 15) == 0) load8<true>(v, x + i, CHUNK);
        else load8<false>(v, x + i, left); /* 0 behind the end */
#pragma unroll
        for (int k = 0; k < CHUNK; k++) most = fmaxf(most, fabsf(v[k]));
#pragma unroll
        for (int o = 16; o > 0; o /= 2) most = fmaxf(most, __shfl_xor_sync(WARP_ALL, most, o));
#pragma unroll
        for (int k = 0; k < CHUNK; k++) q[k] = nearest_code(middle, most > 0 ? __fdiv_rn(v[k], most) : 0.0f);
        store_codes(code + i, q, left);
        if (lane == 0) scale[b] = most;
    }
}
int cuda_quant8(struct dev *d, const struct quant8_args *a) {
    struct cuda *c = cuda_of(d);
    const int64_t need = ceil_div(a->scale.dim[0], (int64_t)WARPS), most = (int64_t)c->n_sm * 8;
    quant8_kernel<<<(unsigned)(need < most ? need : most), THREADS, 0, c->stream>>>(
        (const float *)a->x.data, (uint8_t *)a->code.data, (float *)a->scale.data, (const float *)a->book.data, a->x.dim[0]);
    CU_LAUNCHED();
    return 0;
}

static __global__ void __launch_bounds__(THREADS)
    dequant8_kernel(float *x, const uint8_t *code, const float *scale, const float *book, int64_t n) {
    __shared__ float entry[CODES];
    entry[threadIdx.x] = book[threadIdx.x];
    __syncthreads();
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK;
    if (i >= n) return;
    const int left = n - i < CHUNK ? (int)(n - i) : CHUNK;
    const float s = scale[i / DEV_QUANT_BLOCK]; /* a chunk lies in one block */
    float v[CHUNK];
    if (left == CHUNK && aligned8(code + i)) {
        const uint2 q = *(const uint2 *)(code + i);
#pragma unroll
        for (int k = 0; k < CHUNK; k++) v[k] = entry[((k < 4 ? q.x : q.y) >> (k % 4 * 8)) & 255u];
    } else {
#pragma unroll
        for (int k = 0; k < CHUNK; k++) v[k] = k < left ? entry[code[i + k]] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < CHUNK; k++) v[k] = __fmul_rn(v[k], s);
    if (left == CHUNK && ((uintptr_t)(x + i) & 15) == 0) store8<true>(x + i, v, CHUNK);
    else store8<false>(x + i, v, left);
}
int cuda_dequant8(struct dev *d, const struct quant8_args *a) {
    dequant8_kernel<<<(unsigned)ceil_div(a->x.dim[0], THREADS * CHUNK), THREADS, 0, cuda_of(d)->stream>>>(
        (float *)a->x.data, (const uint8_t *)a->code.data, (const float *)a->scale.data, (const float *)a->book.data, a->x.dim[0]);
    CU_LAUNCHED();
    return 0;
}
