/* row_norm.cu - the CUDA backend's RMSNorm of all queries and of all keys of a row (OLMo 2), forward and backward. That of each
 * head is in norm_rope.cu.
 *
 * A block has the queries, the keys or the values of one row. The weights' gradients: a thread adds up its columns over a run of
 * rows in order, then the runs are added in order.
 * Invariant: what a row's own results are made of is decided by its widths alone. */
#include "device/cuda/vec.cuh"

typedef __nv_bfloat16 bf16;

enum { ROW_THREADS = 256, ROW_RUNS = 64 }; /* ROW_RUNS: runs of rows at most; their sums fit the scratch of norms */

template <typename T> struct row_norm_job {
    int64_t rows, cols[3], first[3], width; /* of queries, keys, values: columns, where they begin; all of a row */
    const T *x, *w[2];
    T *y; /* backward: dy -> dx, in place */
    float *rstd, eps;
    bool one_plus, cast_first;
    float *sums; /* (runs, cols[0] + cols[1]) */
    int64_t per; /* rows of a run */
};

template <typename T> static __device__ __forceinline__ float row_weight(const row_norm_job<T> &j, float w) {
    return j.one_plus ? __fadd_rn(w, 1.0f) : w;
}

template <typename T, bool VEC> static __global__ void __launch_bounds__(ROW_THREADS) row_norm_fwd_kernel(const row_norm_job<T> j) {
    __shared__ float sh[32];
    const int64_t t = blockIdx.x, which = blockIdx.y, n = j.cols[which], at = t * j.width + j.first[which];
    const int64_t step = (int64_t)blockDim.x * CHUNK, first = (int64_t)threadIdx.x * CHUNK;
    float v[CHUNK], w[CHUNK], sum = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (which == 2) {
        for (int64_t c = first; c < n; c += step) {
            const int left = n - c < CHUNK ? (int)(n - c) : CHUNK;
            load8<VEC>(v, j.x + at + c, left);
            store8<VEC>(j.y + at + c, v, left);
        }
        return;
    }
    for (int64_t c = first; c < n; c += step) {
        load8<VEC>(v, j.x + at + c, n - c < CHUNK ? (int)(n - c) : CHUNK);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum = __fmaf_rn(v[i], v[i], sum);
    }
    sum = block_sum(sum, sh);
    const float rs = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), j.eps)));
    if (j.rstd && threadIdx.x == 0) j.rstd[2 * t + which] = rs;
    for (int64_t c = first; c < n; c += step) {
        const int left = n - c < CHUNK ? (int)(n - c) : CHUNK;
        load8<VEC>(v, j.x + at + c, left);
        load8<VEC>(w, j.w[which] + c, left);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const float u = __fmul_rn(v[i], rs);
            v[i] = __fmul_rn(j.cast_first ? round_to<T>(u) : u, row_weight(j, w[i]));
        }
        store8<VEC>(j.y + at + c, v, left);
    }
}

/* dw: column c of queries and keys, over the run blockIdx.y of rows. Before dy is overwritten. */
template <typename T> static __global__ void __launch_bounds__(ROW_THREADS) row_norm_dw_kernel(const row_norm_job<T> j) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, both = j.cols[0] + j.cols[1];
    const int64_t lo = blockIdx.y * j.per, hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    float sum = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (c >= both) return;
    const int which = c < j.cols[0] ? 0 : 1;
#pragma unroll 4
    for (int64_t t = lo; t < hi; t++) {
        const int64_t at = t * j.width + c;
        sum = __fmaf_rn((float)j.y[at], __fmul_rn((float)j.x[at], j.rstd[2 * t + which]), sum);
    }
    j.sums[blockIdx.y * both + c] = sum;
}

static __global__ void __launch_bounds__(ROW_THREADS)
    row_norm_add_kernel(float *dw, const float *sums, int64_t runs, int64_t stride, int64_t cols) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (c >= cols) return;
    float sum = sums[c];
    for (int64_t i = 1; i < runs; i++) sum = __fadd_rn(sum, sums[i * stride + c]);
    dw[c] = __fadd_rn(dw[c], sum);
}

/* With v = x rstd and g = dy w: dx = rstd (g - v mean(g v)). */
template <typename T, bool VEC> static __global__ void __launch_bounds__(ROW_THREADS) row_norm_bwd_kernel(const row_norm_job<T> j) {
    __shared__ float sh[32];
    const int64_t t = blockIdx.x, which = blockIdx.y, n = j.cols[which], at = t * j.width + j.first[which];
    const int64_t step = (int64_t)blockDim.x * CHUNK, first = (int64_t)threadIdx.x * CHUNK;
    float v[CHUNK], g[CHUNK], w[CHUNK], sum = 0;
    pdl_launch_dependents();
    pdl_wait();
    const float rs = j.rstd[2 * t + which];
    for (int64_t c = first; c < n; c += step) {
        const int left = n - c < CHUNK ? (int)(n - c) : CHUNK;
        load8<VEC>(v, j.x + at + c, left);
        load8<VEC>(g, j.y + at + c, left);
        load8<VEC>(w, j.w[which] + c, left);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            if (i < left) sum = __fmaf_rn(__fmul_rn(g[i], row_weight(j, w[i])), __fmul_rn(v[i], rs), sum);
    }
    const float mean = __fdiv_rn(block_sum(sum, sh), (float)n);
    for (int64_t c = first; c < n; c += step) {
        const int left = n - c < CHUNK ? (int)(n - c) : CHUNK;
        load8<VEC>(v, j.x + at + c, left);
        load8<VEC>(g, j.y + at + c, left);
        load8<VEC>(w, j.w[which] + c, left);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            g[i] = __fmul_rn(rs, __fmaf_rn(-__fmul_rn(v[i], rs), mean, __fmul_rn(g[i], row_weight(j, w[i]))));
        store8<VEC>(j.y + at + c, g, left);
    }
}

/* y: of forward, or dy. */
template <typename T> static row_norm_job<T> row_norm_job_of(const struct qk_norm_args *a, struct tensor y) {
    row_norm_job<T> j = {};
    j.rows = a->x.dim[0], j.width = a->x.dim[1], j.per = 1;
    j.cols[0] = a->q_norm.dim[0], j.cols[1] = j.cols[2] = a->k_norm.dim[0];
    j.first[1] = j.cols[0], j.first[2] = j.cols[0] + j.cols[1];
    j.x = (const T *)a->x.data, j.y = (T *)y.data, j.rstd = (float *)a->rstd.data, j.eps = a->eps;
    j.w[0] = (const T *)a->q_norm.data, j.w[1] = (const T *)a->k_norm.data;
    j.one_plus = a->kind == NORM_ONE_PLUS, j.cast_first = a->kind == NORM_CAST_SCALE;
    return j;
}
template <typename T> static bool row_norm_wide(const row_norm_job<T> &j) {
    return j.cols[0] % CHUNK == 0 && j.cols[1] % CHUNK == 0 && aligned16(j.x) && aligned16(j.y) && aligned16(j.w[0]) &&
           aligned16(j.w[1]);
}

template <typename T> static int row_norm_fwd(struct cuda *c, const struct qk_norm_args *a) {
    const row_norm_job<T> j = row_norm_job_of<T>(a, a->y);
    const int threads = warps_for(ceil_div(j.cols[0], CHUNK), ROW_THREADS);
    const dim3 grid((unsigned)j.rows, 3);
    if (row_norm_wide(j)) CU_TRY(cuda_launch_pdl(c, row_norm_fwd_kernel<T, true>, grid, threads, 0, j));
    else CU_TRY(cuda_launch_pdl(c, row_norm_fwd_kernel<T, false>, grid, threads, 0, j));
    return 0;
}
int cuda_qk_norm_fwd(struct dev *d, const struct qk_norm_args *a) {
    return a->x.dt == DT_BF16 ? row_norm_fwd<bf16>(cuda_of(d), a) : row_norm_fwd<float>(cuda_of(d), a);
}

template <typename T> static int row_norm_bwd(struct cuda *c, const struct qk_norm_args *a, const struct qk_norm_bwd_args *g) {
    row_norm_job<T> j = row_norm_job_of<T>(a, g->dy);
    const int64_t both = j.cols[0] + j.cols[1];
    const unsigned blocks = (unsigned)ceil_div(both, ROW_THREADS);
    j.per = ceil_div(j.rows, ROW_RUNS);
    const int64_t runs = ceil_div(j.rows, j.per);
    void *sums;
    TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)(runs * both) * sizeof(float), &sums));
    j.sums = (float *)sums;
    CU_TRY(cuda_launch_pdl(c, row_norm_dw_kernel<T>, dim3(blocks, (unsigned)runs), ROW_THREADS, 0, j));
    CU_TRY(cuda_launch_pdl(c, row_norm_add_kernel, (unsigned)ceil_div(j.cols[0], ROW_THREADS), ROW_THREADS, 0,
                           (float *)g->dq_norm.data, (const float *)j.sums, runs, both, j.cols[0]));
    CU_TRY(cuda_launch_pdl(c, row_norm_add_kernel, (unsigned)ceil_div(j.cols[1], ROW_THREADS), ROW_THREADS, 0,
                           (float *)g->dk_norm.data, (const float *)(j.sums + j.cols[0]), runs, both, j.cols[1]));
    const int threads = warps_for(ceil_div(j.cols[0], CHUNK), ROW_THREADS);
    const dim3 grid((unsigned)j.rows, 2);
    if (row_norm_wide(j)) CU_TRY(cuda_launch_pdl(c, row_norm_bwd_kernel<T, true>, grid, threads, 0, j));
    else CU_TRY(cuda_launch_pdl(c, row_norm_bwd_kernel<T, false>, grid, threads, 0, j));
    return 0;
}
int cuda_qk_norm_bwd(struct dev *d, const struct qk_norm_args *a, const struct qk_norm_bwd_args *g) {
    return a->x.dt == DT_BF16 ? row_norm_bwd<bf16>(cuda_of(d), a, g) : row_norm_bwd<float>(cuda_of(d), a, g);
}
