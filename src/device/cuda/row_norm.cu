/* row_norm.cu - the CUDA backend's RMSNorm of all queries and of all keys of a row (OLMo 2), forward and backward. That of each
 * head is in norm_rope.cu.
 *
 * A block has the queries, the keys or the values of one row. The weights' gradients: a thread adds up its columns over a run
 * of rows in order, then the runs are added in order. RoPE with a norm of each head after it (Hunyuan) is here too.
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

/* ---- RoPE, then the norm of each head (Hunyuan): a warp has a head ---- */

enum { HEAD_PAIRS = 4, HEAD_RUNS = 512, WARPS = ROW_THREADS / 32 }; /* HEAD_PAIRS: of a lane, at most */

template <typename T> struct rope_norm_job {
    int64_t rows, n_q, n_k, dim, width, n_pos, per;
    const T *x, *w[2];
    T *y; /* backward: dy -> dx, in place */
    const float *rope;
    const int32_t *pos;
    float *rstd, eps; /* (rows, n_q + n_k) */
    bool one_plus, cast_first;
    float *sums; /* (runs, 2, D) */
};

/* cos and sin of pair i of row t; a position outside of the table ends the kernel. */
template <typename T> static __device__ __forceinline__ float2 angle_of(const rope_norm_job<T> &j, int64_t t, int64_t i) {
    const int64_t p = j.pos[t];
    if (p < 0 || p >= j.n_pos) __trap();
    return *(const float2 *)(j.rope + p * j.dim + 2 * i);
}

/* The lane's pairs of the head at x, turned and rounded. */
template <typename T>
static __device__ __forceinline__ void load_turned(const rope_norm_job<T> &j, const T *x, int64_t t, float a[HEAD_PAIRS],
                                                   float b[HEAD_PAIRS]) {
    const int64_t half = j.dim / 2;
#pragma unroll
    for (int k = 0; k < HEAD_PAIRS; k++) {
        const int64_t i = (threadIdx.x & 31) + 32 * k;
        a[k] = b[k] = 0;
        if (i >= half) continue;
        const float2 cs = angle_of(j, t, i);
        const float x0 = (float)x[i], x1 = (float)x[i + half];
        a[k] = round_to<T>(__fsub_rn(__fmul_rn(x0, cs.x), __fmul_rn(x1, cs.y)));
        b[k] = round_to<T>(__fadd_rn(__fmul_rn(x1, cs.x), __fmul_rn(x0, cs.y)));
    }
}

template <typename T> static __device__ __forceinline__ float head_weight(const rope_norm_job<T> &j, int64_t h, int64_t i) {
    const float w = (float)j.w[h < j.n_q ? 0 : 1][i];
    return j.one_plus ? __fadd_rn(w, 1.0f) : w;
}
template <typename T> static __device__ __forceinline__ T head_norm(const rope_norm_job<T> &j, float x, float rs, float w) {
    const float v = __fmul_rn(x, rs);
    return (T)__fmul_rn(j.cast_first ? round_to<T>(v) : v, w);
}

template <typename T> static __global__ void __launch_bounds__(ROW_THREADS) rope_norm_fwd_kernel(const rope_norm_job<T> j) {
    const int64_t t = blockIdx.x, heads = j.n_q + j.n_k, half = j.dim / 2;
    pdl_launch_dependents();
    pdl_wait();
    for (int64_t h = threadIdx.x / 32; h < heads + j.n_k; h += WARPS) {
        const T *x = j.x + t * j.width + h * j.dim;
        T *y = j.y + t * j.width + h * j.dim;
        if (h >= heads) {
            for (int64_t i = threadIdx.x & 31; i < j.dim; i += 32) y[i] = x[i];
            continue;
        }
        float a[HEAD_PAIRS], b[HEAD_PAIRS], sum = 0;
        load_turned(j, x, t, a, b);
#pragma unroll
        for (int k = 0; k < HEAD_PAIRS; k++) sum = __fmaf_rn(b[k], b[k], __fmaf_rn(a[k], a[k], sum));
        const float rs = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(sum), (float)j.dim), j.eps)));
        if (j.rstd && (threadIdx.x & 31) == 0) j.rstd[t * heads + h] = rs;
#pragma unroll
        for (int k = 0; k < HEAD_PAIRS; k++) {
            const int64_t i = (threadIdx.x & 31) + 32 * k;
            if (i >= half) continue;
            y[i] = head_norm(j, a[k], rs, head_weight(j, h, i));
            y[i + half] = head_norm(j, b[k], rs, head_weight(j, h, i + half));
        }
    }
}

/* Weight c of queries' norm, then of keys', over the run blockIdx.y of rows. */
template <typename T> static __global__ void __launch_bounds__(ROW_THREADS) rope_norm_dw_kernel(const rope_norm_job<T> j) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, heads = j.n_q + j.n_k, half = j.dim / 2;
    const int64_t lo = blockIdx.y * j.per, hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    float sum = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (c >= 2 * j.dim) return;
    const int64_t i = c % j.dim, pair = i % half, first = c < j.dim ? 0 : j.n_q, last = c < j.dim ? j.n_q : heads;
    for (int64_t t = lo; t < hi; t++) {
        const float2 cs = angle_of(j, t, pair);
        for (int64_t h = first; h < last; h++) {
            const int64_t at = t * j.width + h * j.dim;
            const float x0 = (float)j.x[at + pair], x1 = (float)j.x[at + pair + half];
            const float turned = i < half ? __fsub_rn(__fmul_rn(x0, cs.x), __fmul_rn(x1, cs.y))
                                          : __fadd_rn(__fmul_rn(x1, cs.x), __fmul_rn(x0, cs.y));
            sum = __fmaf_rn((float)j.y[at + i], __fmul_rn(round_to<T>(turned), j.rstd[t * heads + h]), sum);
        }
    }
    j.sums[blockIdx.y * 2 * j.dim + c] = sum;
}

template <typename T> static __global__ void __launch_bounds__(ROW_THREADS) rope_norm_bwd_kernel(const rope_norm_job<T> j) {
    const int64_t t = blockIdx.x, heads = j.n_q + j.n_k, half = j.dim / 2;
    pdl_launch_dependents();
    pdl_wait();
    for (int64_t h = threadIdx.x / 32; h < heads; h += WARPS) {
        T *dy = j.y + t * j.width + h * j.dim;
        float a[HEAD_PAIRS], b[HEAD_PAIRS], ga[HEAD_PAIRS], gb[HEAD_PAIRS], sum = 0;
        const float rs = j.rstd[t * heads + h];
        load_turned(j, j.x + t * j.width + h * j.dim, t, a, b);
#pragma unroll
        for (int k = 0; k < HEAD_PAIRS; k++) {
            const int64_t i = (threadIdx.x & 31) + 32 * k;
            ga[k] = i < half ? __fmul_rn((float)dy[i], head_weight(j, h, i)) : 0.0f;
            gb[k] = i < half ? __fmul_rn((float)dy[i + half], head_weight(j, h, i + half)) : 0.0f;
            a[k] = __fmul_rn(a[k], rs), b[k] = __fmul_rn(b[k], rs);
            sum = __fmaf_rn(gb[k], b[k], __fmaf_rn(ga[k], a[k], sum));
        }
        const float mean = __fdiv_rn(warp_sum(sum), (float)j.dim);
#pragma unroll
        for (int k = 0; k < HEAD_PAIRS; k++) {
            const int64_t i = (threadIdx.x & 31) + 32 * k;
            if (i >= half) continue;
            const float2 cs = angle_of(j, t, i);
            const float d0 = __fmul_rn(rs, __fmaf_rn(-a[k], mean, ga[k])), d1 = __fmul_rn(rs, __fmaf_rn(-b[k], mean, gb[k]));
            dy[i] = (T)__fadd_rn(__fmul_rn(d0, cs.x), __fmul_rn(d1, cs.y));
            dy[i + half] = (T)__fsub_rn(__fmul_rn(d1, cs.x), __fmul_rn(d0, cs.y));
        }
    }
}

template <typename T> static int rope_norm_job_of(rope_norm_job<T> *j, const struct rope_norm_args *a, struct tensor y) {
    if (a->head_dim > 64 * HEAD_PAIRS)
        FAIL(ERR_UNSUPPORTED, "cuda: norm of heads of %lld after RoPE: at most %d", (long long)a->head_dim, 64 * HEAD_PAIRS);
    *j = {};
    j->rows = a->x.dim[0], j->width = a->x.dim[1], j->n_q = a->n_q_heads, j->n_k = a->n_kv_heads, j->dim = a->head_dim;
    j->n_pos = a->rope.dim[0], j->per = 1;
    j->x = (const T *)a->x.data, j->y = (T *)y.data, j->w[0] = (const T *)a->q_norm.data, j->w[1] = (const T *)a->k_norm.data;
    j->rope = (const float *)a->rope.data, j->pos = (const int32_t *)a->pos.data, j->rstd = (float *)a->rstd.data, j->eps = a->eps;
    j->one_plus = a->kind == NORM_ONE_PLUS, j->cast_first = a->kind == NORM_CAST_SCALE;
    return 0;
}

template <typename T> static int rope_norm_fwd(struct cuda *c, const struct rope_norm_args *a) {
    rope_norm_job<T> j;
    TRY(rope_norm_job_of(&j, a, a->y));
    CU_TRY(cuda_launch_pdl(c, rope_norm_fwd_kernel<T>, (unsigned)j.rows, ROW_THREADS, 0, j));
    return 0;
}
int cuda_rope_norm_fwd(struct dev *d, const struct rope_norm_args *a) {
    return a->x.dt == DT_BF16 ? rope_norm_fwd<bf16>(cuda_of(d), a) : rope_norm_fwd<float>(cuda_of(d), a);
}

template <typename T> static int rope_norm_bwd(struct cuda *c, const struct rope_norm_args *a, const struct qk_norm_bwd_args *g) {
    rope_norm_job<T> j;
    void *sums;
    TRY(rope_norm_job_of(&j, a, g->dy));
    j.per = ceil_div(j.rows, HEAD_RUNS);
    const int64_t runs = ceil_div(j.rows, j.per), both = 2 * j.dim;
    TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)(runs * both) * sizeof(float), &sums));
    j.sums = (float *)sums;
    const dim3 grid((unsigned)ceil_div(both, ROW_THREADS), (unsigned)runs);
    const unsigned add = (unsigned)ceil_div(j.dim, ROW_THREADS);
    CU_TRY(cuda_launch_pdl(c, rope_norm_dw_kernel<T>, grid, ROW_THREADS, 0, j));
    CU_TRY(cuda_launch_pdl(c, row_norm_add_kernel, add, ROW_THREADS, 0, (float *)g->dq_norm.data, (const float *)j.sums, runs, both,
                           j.dim));
    CU_TRY(cuda_launch_pdl(c, row_norm_add_kernel, add, ROW_THREADS, 0, (float *)g->dk_norm.data, (const float *)(j.sums + j.dim),
                           runs, both, j.dim));
    CU_TRY(cuda_launch_pdl(c, rope_norm_bwd_kernel<T>, (unsigned)j.rows, ROW_THREADS, 0, j));
    return 0;
}
int cuda_rope_norm_bwd(struct dev *d, const struct rope_norm_args *a, const struct qk_norm_bwd_args *g) {
    return a->x.dt == DT_BF16 ? rope_norm_bwd<bf16>(cuda_of(d), a, g) : rope_norm_bwd<float>(cuda_of(d), a, g);
}
