/* norm_rope.cu - the CUDA backend's RMSNorm; and the split of QKV, QK-norm, RoPE and the store to the
 * KV cache; each with its backward.
 *
 * A row is one block's (RMSNorm) or its heads are groups of lanes' (qkv).  Gradients of norm
 * weights: each block adds up its run of rows in order, then one kernel adds the blocks' sums.
 * Invariant: what a row's own results are made of is decided by its width alone; how many rows
 * a block takes touches only the order in which weight gradients are added. */
#include "device/cuda/norm_rope.cuh"

typedef __nv_bfloat16 bf16;

/* ---- sums of blocks ---- */

enum { SUM_COLS = 32, SUM_WAYS = 32 };

/* out[c] += sum over n of part[i * stride + c], c in [0, cols): SUM_WAYS sums of every SUM_WAYS-th, then theirs. */
static __global__ void add_parts_kernel(float *out, const float *part, int64_t n, int64_t stride, int64_t cols) {
    __shared__ float sh[SUM_WAYS][SUM_COLS];
    const int64_t c = (int64_t)blockIdx.x * SUM_COLS + threadIdx.x % SUM_COLS;
    const int way = (int)threadIdx.x / SUM_COLS;
    float s = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (c < cols)
#pragma unroll 8
        for (int64_t i = way; i < n; i += SUM_WAYS) s = __fadd_rn(s, part[i * stride + c]);
    sh[way][threadIdx.x % SUM_COLS] = s;
    __syncthreads();
    if (way == 0 && c < cols) {
        for (int i = 1; i < SUM_WAYS; i++) s = __fadd_rn(s, sh[i][threadIdx.x]);
        out[c] = __fadd_rn(out[c], s);
    }
}
int cuda_add_parts(struct cuda *c, float *out, const float *part, int64_t n, int64_t stride, int64_t cols) {
    CU_TRY(cuda_launch_pdl(c, add_parts_kernel, (unsigned)ceil_div(cols, SUM_COLS), SUM_COLS * SUM_WAYS, 0, out, part, n, stride,
                           cols));
    return 0;
}

/* Rows that one block takes where it adds them up: enough blocks to fill the GPU, few enough sums to add. */
static int64_t rows_per_block(const struct cuda *c, int64_t rows) { return ceil_div(rows, (int64_t)c->n_sm * 6); }

/* ---- RMSNorm (Zhang & Sennrich 2019), rounded as Hugging Face does ---- */

enum { NORM_THREADS = 256, NORM_BWD_THREADS = 512, NORM_BWD_CHUNKS = 4 };

/* The norm of x, before the rounding of the result; ADD: nothing is rounded. */
template <typename T, norm_kind KIND, bool ADD> static __device__ __forceinline__ float norm_value(float x, float rs, float w) {
    const float v = __fmul_rn(x, rs);
    if (KIND == NORM_CAST_SCALE && !ADD) return __fmul_rn(round_to<T>(v), w);
    return __fmul_rn(v, KIND == NORM_ONE_PLUS ? __fadd_rn(w, 1.0f) : w);
}

template <typename Y> struct norm_out {
    Y *y;
    float *rstd;       /* or NULL */
    const float *from; /* with ADD */
};

/* Y is T; with ADD float. */
template <typename T, typename Y, norm_kind KIND, bool ADD, bool VEC>
static __global__ void __launch_bounds__(NORM_THREADS)
    rmsnorm_fwd_kernel(norm_out<Y> out, const float *x, const T *w, int64_t n, float eps) {
    __shared__ float sh[32];
    const int64_t t = cuda_block_reversed(), row = t * n, step = (int64_t)blockDim.x * CHUNK, first = (int64_t)threadIdx.x * CHUNK;
    float v[CHUNK], g[CHUNK], sum = 0;
    pdl_launch_dependents();
    pdl_wait();
    if (first < n) load8<VEC>(g, w + first, n - first < CHUNK ? (int)(n - first) : CHUNK); /* while x is loading */
    for (int64_t c = first; c < n; c += step) {
        load8<VEC>(v, x + row + c, n - c < CHUNK ? (int)(n - c) : CHUNK);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum = __fmaf_rn(v[i], v[i], sum);
    }
    sum = block_sum(sum, sh);
    const float rs = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), eps)));
    if (out.rstd && threadIdx.x == 0) out.rstd[t] = rs;
    for (int64_t c = first; c < n; c += step) {
        const int left = n - c < CHUNK ? (int)(n - c) : CHUNK;
        if (step < n) { /* else v and g still hold the thread's one chunk */
            load8<VEC>(v, x + row + c, left);
            load8<VEC>(g, w + c, left);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; i++) v[i] = norm_value<T, KIND, ADD>(v[i], rs, g[i]);
        if (ADD) {
            float old[CHUNK];
            load8<VEC>(old, out.from + row + c, left);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) v[i] = __fadd_rn(old[i], v[i]);
        }
        store8<VEC>(out.y + row + c, v, left);
    }
}

template <typename T, typename Y, norm_kind KIND, bool ADD>
static int rmsnorm_fwd_of(struct cuda *c, const struct rmsnorm_args *a) {
    const int64_t n = a->x.dim[1];
    const int threads = warps_for(ceil_div(n, CHUNK), NORM_THREADS);
    const unsigned rows = (unsigned)a->x.dim[0];
    const norm_out<Y> out = {(Y *)a->y.data, (float *)a->rstd.data, (const float *)a->from.data};
    const float *x = (const float *)a->x.data;
    const T *w = (const T *)a->w.data;
    const bool wide = n % CHUNK == 0 && aligned16(out.y) && aligned16(x) && aligned16(w) && aligned16(out.from);
    if (wide) CU_TRY(cuda_launch_pdl(c, rmsnorm_fwd_kernel<T, Y, KIND, ADD, true>, rows, threads, 0, out, x, w, n, a->eps));
    else CU_TRY(cuda_launch_pdl(c, rmsnorm_fwd_kernel<T, Y, KIND, ADD, false>, rows, threads, 0, out, x, w, n, a->eps));
    return 0;
}
template <typename T, norm_kind KIND> static int rmsnorm_fwd_any(struct cuda *c, const struct rmsnorm_args *a) {
    return a->from.data ? rmsnorm_fwd_of<T, float, KIND, true>(c, a) : rmsnorm_fwd_of<T, T, KIND, false>(c, a);
}
template <typename T> static int rmsnorm_fwd_kind(struct cuda *c, const struct rmsnorm_args *a) {
    return a->kind == NORM_CAST_SCALE   ? rmsnorm_fwd_any<T, NORM_CAST_SCALE>(c, a)
           : a->kind == NORM_SCALE_CAST ? rmsnorm_fwd_any<T, NORM_SCALE_CAST>(c, a)
                                        : rmsnorm_fwd_any<T, NORM_ONE_PLUS>(c, a);
}
int cuda_rmsnorm_fwd(struct dev *d, const struct rmsnorm_args *a) {
    return a->w.dt == DT_BF16 ? rmsnorm_fwd_kind<bf16>(cuda_of(d), a) : rmsnorm_fwd_kind<float>(cuda_of(d), a);
}

struct norm_bwd {
    float *dx, *sums; /* sums: (blocks, n) */
    bf16 *rounded;    /* of dx; optional */
    const void *dy, *w;
    bool dy_bf16, w_bf16;
    const float *x, *rstd;
    int64_t rows, n;
};

/* With v = x * rstd and g = dy * w: dx += rstd * (g - v * mean(g * v)), dw = sum over rows of dy * v.
 * A block has every gridDim.x-th row, the last first; a thread C chunks of columns with a stride of blockDim.x chunks. */
template <int C, bool VEC, bool ONE_PLUS>
static __global__ void __launch_bounds__(NORM_BWD_THREADS) rmsnorm_bwd_kernel(const norm_bwd a) {
    __shared__ float sh[2][32];
    float dw[C][CHUNK] = {};
    int turn = 0;
    pdl_launch_dependents();
    pdl_wait();
    for (int64_t t = a.rows - 1 - blockIdx.x; t >= 0; t -= gridDim.x, turn ^= 1) {
        const float rs = a.rstd[t];
        float v[C][CHUNK], g[C][CHUNK], old[C][CHUNK], sum = 0; /* old: read before the barrier, so that nothing waits for it */
#pragma unroll
        for (int k = 0; k < C; k++) {
            const int64_t c = ((int64_t)k * blockDim.x + threadIdx.x) * CHUNK;
            const int left = c >= a.n ? 0 : a.n - c < CHUNK ? (int)(a.n - c) : CHUNK;
            float w[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; i++) v[k][i] = g[k][i] = 0;
            if (left == 0) continue;
            load8<VEC>(v[k], a.x + t * a.n + c, left);
            load8_any<VEC>(g[k], a.dy, a.dy_bf16, t * a.n + c, left);
            load8_any<VEC>(w, a.w, a.w_bf16, c, left);
            load8<VEC>(old[k], a.dx + t * a.n + c, left);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                v[k][i] = __fmul_rn(v[k][i], rs);
                dw[k][i] = __fmaf_rn(g[k][i], v[k][i], dw[k][i]);
                g[k][i] = __fmul_rn(g[k][i], ONE_PLUS ? __fadd_rn(w[i], 1.0f) : w[i]);
                sum = __fmaf_rn(g[k][i], v[k][i], sum);
            }
        }
        const float mean = __fdiv_rn(block_sum(sum, sh[turn]), (float)a.n); /* two buffers: one barrier a row is enough */
#pragma unroll
        for (int k = 0; k < C; k++) {
            const int64_t c = ((int64_t)k * blockDim.x + threadIdx.x) * CHUNK;
            const int left = c >= a.n ? 0 : a.n - c < CHUNK ? (int)(a.n - c) : CHUNK;
            if (left == 0) continue;
#pragma unroll
            for (int i = 0; i < CHUNK; i++) old[k][i] = __fadd_rn(old[k][i], __fmul_rn(rs, __fmaf_rn(-v[k][i], mean, g[k][i])));
            store8<VEC>(a.dx + t * a.n + c, old[k], left);
            if (a.rounded) store8<VEC>(a.rounded + t * a.n + c, old[k], left);
        }
    }
#pragma unroll
    for (int k = 0; k < C; k++) {
        const int64_t c = ((int64_t)k * blockDim.x + threadIdx.x) * CHUNK;
        if (c < a.n) store8<VEC>(a.sums + blockIdx.x * a.n + c, dw[k], a.n - c < CHUNK ? (int)(a.n - c) : CHUNK);
    }
}

/* One wave of blocks, at most CUDA_NORM_BLOCKS a multiprocessor; *blocks: how many. */
template <bool VEC, bool ONE_PLUS> static int rmsnorm_bwd_launch(struct cuda *c, norm_bwd *a, int64_t *blocks) {
    const int64_t chunks = ceil_div(a->n, CHUNK);
    const int threads = warps_for(chunks, NORM_BWD_THREADS);
    const auto kernel = chunks <= threads       ? rmsnorm_bwd_kernel<1, VEC, ONE_PLUS>
                        : chunks <= 2 * threads ? rmsnorm_bwd_kernel<2, VEC, ONE_PLUS>
                                                : rmsnorm_bwd_kernel<NORM_BWD_CHUNKS, VEC, ONE_PLUS>;
    int fit = 1;
    CU_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, threads, 0));
    if (fit > CUDA_NORM_BLOCKS) fit = CUDA_NORM_BLOCKS;
    *blocks = (int64_t)c->n_sm * (fit < 1 ? 1 : fit);
    if (*blocks > a->rows) *blocks = a->rows;
    CU_TRY(cuda_launch_pdl(c, kernel, (unsigned)*blocks, threads, 0, *a));
    return 0;
}

int cuda_rmsnorm_bwd(struct dev *d, const struct rmsnorm_bwd_args *g) {
    struct cuda *c = cuda_of(d);
    const int64_t n = g->x.dim[1], rows = g->x.dim[0], widest = NORM_BWD_THREADS * NORM_BWD_CHUNKS * CHUNK;
    if (n > widest) FAIL(ERR_UNSUPPORTED, "cuda: RMSNorm over %lld columns: at most %lld", (long long)n, (long long)widest);
    const int64_t most = (int64_t)c->n_sm * CUDA_NORM_BLOCKS;
    int64_t blocks = 0;
    void *sums;
    TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)((rows < most ? rows : most) * n) * sizeof(float), &sums));
    norm_bwd a;
    a.dx = (float *)g->dx.data, a.sums = (float *)sums;
    a.rounded = g->rounded.dt == DT_BF16 ? (bf16 *)g->rounded.data : NULL;
    a.dy = g->dy.data, a.w = g->w.data;
    a.dy_bf16 = g->dy.dt == DT_BF16, a.w_bf16 = g->w.dt == DT_BF16;
    a.x = (const float *)g->x.data, a.rstd = (const float *)g->rstd.data;
    a.rows = rows, a.n = n;
    const bool wide =
        n % CHUNK == 0 && aligned16(a.dx) && aligned16(a.rounded) && aligned16(a.dy) && aligned16(a.w) && aligned16(a.x);
    if (g->kind == NORM_ONE_PLUS) TRY((wide ? rmsnorm_bwd_launch<true, true> : rmsnorm_bwd_launch<false, true>)(c, &a, &blocks));
    else TRY((wide ? rmsnorm_bwd_launch<true, false> : rmsnorm_bwd_launch<false, false>)(c, &a, &blocks));
    TRY(cuda_add_parts(c, (float *)g->dw.data, a.sums, blocks, n, n));
    return g->rounded.data && !a.rounded ? cuda_cast(d, g->rounded, g->dx) : 0;
}

/* ---- qkv: lanes and heads as in norm_rope.cuh ---- */

enum { QKV_THREADS = 256, QKV_LANES = 32, QKV_ROPE_ROWS = 1024 }; /* QKV_ROPE_ROWS: rows from which a block need not be one row */

template <typename T> struct qkv_job {
    int64_t n_q, n_k, dim, rows, per; /* per: rows of a block */
    int lanes;
    float eps;
    const T *qkv, *q_norm, *k_norm;
    const float *rope;
    const int32_t *pos, *slots;
    int64_t n_pos, n_slots, block_len;
    T *q, *k, *v; /* forward */
    const T *dq;  /* backward */
    const float *dk, *dv;
    T *dqkv;
    float *sums;    /* (blocks, 2, D): of dq_norm, of dk_norm */
    int64_t turned; /* pairs that RoPE turns */
};

template <typename T> static __device__ __forceinline__ int64_t slot_elem(const qkv_job<T> &j, int64_t slot, int64_t head) {
    return ((slot / j.block_len * j.n_k + head) * j.block_len + slot % j.block_len) * j.dim;
}
template <typename T>
static __device__ __forceinline__ void row_place(const qkv_job<T> &j, int64_t t, int64_t *pos, int64_t *slot) {
    *pos = j.pos[t];
    *slot = j.slots[t];
    if (*pos < 0 || *pos >= j.n_pos || *slot < 0 || *slot >= j.n_slots) __trap();
}

/* How a head of qkv is to be read as pairs (dev_rope_source): whole and in halves; partly turned; neighbours. */
enum {
    PAIRS_HALVES,
    PAIRS_PARTIAL,
    PAIRS_NEIGHBOURS,
    PAIRS_ONE_PLUS, /* PAIRS_HALVES and PAIRS_PARTIAL, norms of that kind */
    PAIRS_PARTIAL_ONE_PLUS,
};
static constexpr __host__ __device__ bool one_plus(int pairs) { return pairs == PAIRS_ONE_PLUS || pairs == PAIRS_PARTIAL_ONE_PLUS; }
static constexpr __host__ __device__ bool halves(int pairs) { return pairs == PAIRS_HALVES || pairs == PAIRS_ONE_PLUS; }
template <int PAIRS> static __device__ __forceinline__ int64_t pair_place(int64_t j, int second, int64_t half, int64_t turned) {
    if (halves(PAIRS)) return second ? half + j : j;
    if (j >= turned) return second ? half + j : turned + j;
    return PAIRS == PAIRS_NEIGHBOURS ? 2 * j + second : second ? turned + j : j;
}
/* Pairs [i, i + n) of a head, of which `turned` turn and `half` are all. */
struct pair_span {
    int64_t i, half, turned;
    int n;
};
/* Their first and second elements; head: of qkv, or a norm's weights. */
template <int PAIRS, bool VEC, typename T>
static __device__ __forceinline__ void load_pairs(float x0[CHUNK], float x1[CHUNK], const T *head, pair_span p) {
    const int64_t i = p.i, half = p.half, turned = p.turned;
    const int n = p.n;
    if (halves(PAIRS)) {
        load8<VEC>(x0, head + i, n);
        load8<VEC>(x1, head + half + i, n);
    } else if (!VEC) {
#pragma unroll
        for (int e = 0; e < CHUNK; e++) {
            x0[e] = e < n ? (float)head[pair_place<PAIRS>(i + e, 0, half, turned)] : 0.0f;
            x1[e] = e < n ? (float)head[pair_place<PAIRS>(i + e, 1, half, turned)] : 0.0f;
        }
    } else if (PAIRS == PAIRS_NEIGHBOURS && i < turned) {
        float v[2 * CHUNK];
        load8<VEC>(v, head + 2 * i, n);
        load8<VEC>(v + CHUNK, head + 2 * i + CHUNK, n);
#pragma unroll
        for (int e = 0; e < CHUNK; e++) x0[e] = v[2 * e], x1[e] = v[2 * e + 1];
    } else {
        load8<VEC>(x0, head + (i < turned ? i : turned + i), n);
        load8<VEC>(x1, head + (i < turned ? turned : half) + i, n);
    }
}
template <int PAIRS, bool VEC, typename T>
static __device__ __forceinline__ void store_pairs(T *head, const float x0[CHUNK], const float x1[CHUNK], pair_span p) {
    const int64_t i = p.i, half = p.half, turned = p.turned;
    const int n = p.n;
    if (halves(PAIRS)) {
        store8<VEC>(head + i, x0, n);
        store8<VEC>(head + half + i, x1, n);
    } else if (!VEC) {
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
            if (e < n) {
                head[pair_place<PAIRS>(i + e, 0, half, turned)] = (T)x0[e];
                head[pair_place<PAIRS>(i + e, 1, half, turned)] = (T)x1[e];
            }
    } else if (PAIRS == PAIRS_NEIGHBOURS && i < turned) {
        float v[2 * CHUNK];
#pragma unroll
        for (int e = 0; e < CHUNK; e++) v[2 * e] = x0[e], v[2 * e + 1] = x1[e];
        store8<VEC>(head + 2 * i, v, n);
        store8<VEC>(head + 2 * i + CHUNK, v + CHUNK, n);
    } else {
        store8<VEC>(head + (i < turned ? i : turned + i), x0, n);
        store8<VEC>(head + (i < turned ? turned : half) + i, x1, n);
    }
}

/* norm_head of NORM_ONE_PLUS. */
template <typename T>
static __device__ __forceinline__ void norm_head_one_plus(float x0[CHUNK], float x1[CHUNK], const float w0[CHUNK],
                                                          const float w1[CHUNK], float rs) {
#pragma unroll
    for (int e = 0; e < CHUNK; e++) {
        x0[e] = round_to<T>(__fmul_rn(__fmul_rn(x0[e], rs), __fadd_rn(w0[e], 1.0f)));
        x1[e] = round_to<T>(__fmul_rn(__fmul_rn(x1[e], rs), __fadd_rn(w1[e], 1.0f)));
    }
}

/* One row a block. Every lane runs every round, since sums are over lanes; `on` guards memory. */
template <int PAIRS, typename T, bool VEC>
static __global__ void __launch_bounds__(QKV_THREADS) qkv_fwd_kernel(const qkv_job<T> j) {
    const int64_t t = blockIdx.x, half = j.dim / 2, heads = j.n_q + 2 * j.n_k;
    const int groups = blockDim.x / j.lanes, group = threadIdx.x / j.lanes;
    const int64_t i = (int64_t)(threadIdx.x % j.lanes) * CHUNK;
    const int n = i >= half ? 0 : half - i < CHUNK ? (int)(half - i) : CHUNK;
    int64_t p, slot;
    float cs[2 * CHUNK] = {};
    pdl_launch_dependents();
    pdl_wait();
    row_place(j, t, &p, &slot);
    if (n) load_rope<VEC>(cs, j.rope, p, j.dim, i, n);
    for (int64_t h0 = 0; h0 < heads; h0 += groups) {
        const int64_t h = h0 + group;
        const bool on = n > 0 && h < heads, is_v = h >= j.n_q + j.n_k, is_q = h < j.n_q;
        float x0[CHUNK] = {}, x1[CHUNK] = {};
        if (on) {
            const T *from = j.qkv + (t * heads + h) * j.dim;
            if (halves(PAIRS) || is_v) load_pairs<PAIRS_HALVES, VEC>(x0, x1, from, pair_span{i, half, half, n});
            else load_pairs<PAIRS, VEC>(x0, x1, from, pair_span{i, half, j.turned, n});
        }
        const T *norm = is_q ? j.q_norm : j.k_norm;
        if (j.q_norm || j.k_norm) { /* alike for all lanes */
            const float rs = head_rstd(x0, x1, j.dim, j.lanes, j.eps);
            if (on && !is_v && norm) {
                float w0[CHUNK], w1[CHUNK];
                load_pairs<PAIRS, VEC>(w0, w1, norm, pair_span{i, half, j.turned, n});
                if (one_plus(PAIRS)) norm_head_one_plus<T>(x0, x1, w0, w1, rs);
                else norm_head<T>(x0, x1, w0, w1, rs);
            }
        }
        if (!on) continue;
        if (!is_v) rotate(x0, x1, cs);
        T *to =
            is_q ? j.q + (t * j.n_q + h) * j.dim : (is_v ? j.v : j.k) + slot_elem(j, slot, is_v ? h - j.n_q - j.n_k : h - j.n_q);
        store8<VEC>(to + i, x0, n);
        store8<VEC>(to + i + half, x1, n);
    }
}

static __device__ __forceinline__ void rotate_back(float d0[CHUNK], float d1[CHUNK], const float cs[2 * CHUNK]) {
#pragma unroll
    for (int e = 0; e < CHUNK; e++) {
        const float c = cs[2 * e], s = cs[2 * e + 1], a = d0[e], b = d1[e];
        d0[e] = __fadd_rn(__fmul_rn(a, c), __fmul_rn(b, s));
        d1[e] = __fsub_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
}

/* qkv_fwd_kernel without norms, for many rows: a thread has a lane's part of one head of one row. The same operations. */
template <int PAIRS, typename T, bool VEC>
static __global__ void __launch_bounds__(QKV_THREADS) qkv_fwd_rope_kernel(const qkv_job<T> j) {
    const unsigned heads = (unsigned)(j.n_q + 2 * j.n_k), per_row = heads * (unsigned)j.lanes;
    const unsigned unit = cuda_block_reversed() * QKV_THREADS + threadIdx.x, t = unit / per_row, in_row = unit % per_row;
    const int64_t half = j.dim / 2, h = in_row / (unsigned)j.lanes, i = (int64_t)(in_row % (unsigned)j.lanes) * CHUNK;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= j.rows || i >= half) return;
    const int n = half - i < CHUNK ? (int)(half - i) : CHUNK;
    const bool is_q = h < j.n_q, is_v = h >= j.n_q + j.n_k;
    const T *from = j.qkv + ((int64_t)t * heads + h) * j.dim;
    int64_t p, slot;
    float x0[CHUNK], x1[CHUNK], cs[2 * CHUNK];
    row_place(j, t, &p, &slot);
    if (halves(PAIRS) || is_v) load_pairs<PAIRS_HALVES, VEC>(x0, x1, from, pair_span{i, half, half, n});
    else load_pairs<PAIRS, VEC>(x0, x1, from, pair_span{i, half, j.turned, n});
    if (!is_v) {
        load_rope<VEC>(cs, j.rope, p, j.dim, i, n);
        rotate(x0, x1, cs);
    }
    T *to = is_q ? j.q + (t * j.n_q + h) * j.dim : (is_v ? j.v : j.k) + slot_elem(j, slot, is_v ? h - j.n_q - j.n_k : h - j.n_q);
    store8<VEC>(to + i, x0, n);
    store8<VEC>(to + i + half, x1, n);
}

/* Lane's two chunks of a head of dy -> of dqkv, in place; the norm's sums += dn * v. Formulas of rmsnorm_bwd. */
template <int PAIRS, bool VEC, typename T>
static __device__ __forceinline__ void norm_back(const qkv_job<T> &j, const T *norm, const T *x, int64_t i, int n, bool on,
                                                 float d0[CHUNK], float d1[CHUNK], float sum[2 * CHUNK]) {
    const int64_t half = j.dim / 2;
    float x0[CHUNK] = {}, x1[CHUNK] = {}, w0[CHUNK] = {}, w1[CHUNK] = {}, mean = 0;
    if (on) {
        load_pairs<PAIRS, VEC>(x0, x1, x, pair_span{i, half, j.turned, n});
        load_pairs<PAIRS, VEC>(w0, w1, norm, pair_span{i, half, j.turned, n});
        if (one_plus(PAIRS))
#pragma unroll
            for (int e = 0; e < CHUNK; e++) w0[e] = __fadd_rn(w0[e], 1.0f), w1[e] = __fadd_rn(w1[e], 1.0f);
    }
    const float all = head_rstd(x0, x1, j.dim, j.lanes, j.eps), rs = on ? all : 0.0f; /* 0: idle lanes add nothing, whatever eps */
#pragma unroll
    for (int e = 0; e < CHUNK; e++) {
        x0[e] = __fmul_rn(x0[e], rs);
        x1[e] = __fmul_rn(x1[e], rs);
        sum[e] = __fmaf_rn(d0[e], x0[e], sum[e]);
        sum[CHUNK + e] = __fmaf_rn(d1[e], x1[e], sum[CHUNK + e]);
        d0[e] = __fmul_rn(d0[e], w0[e]);
        d1[e] = __fmul_rn(d1[e], w1[e]);
        mean = __fmaf_rn(d1[e], x1[e], __fmaf_rn(d0[e], x0[e], mean));
    }
    mean = __fdiv_rn(lanes_sum(mean, j.lanes), (float)j.dim);
#pragma unroll
    for (int e = 0; e < CHUNK; e++) {
        d0[e] = __fmul_rn(rs, __fmaf_rn(-x0[e], mean, d0[e]));
        d1[e] = __fmul_rn(rs, __fmaf_rn(-x1[e], mean, d1[e]));
    }
}

/* Heads [first, first + count) of row t, all queries or all keys; sum: the lane's part of the norm's gradient. */
template <int PAIRS, typename T, bool VEC, bool IS_Q>
static __device__ __forceinline__ void heads_back(const qkv_job<T> &j, int64_t t, int64_t slot, int64_t first, int64_t count,
                                                  const float cs[2 * CHUNK], int64_t i, int n, float sum[2 * CHUNK]) {
    const int64_t half = j.dim / 2, heads = j.n_q + 2 * j.n_k;
    const int groups = blockDim.x / j.lanes, group = threadIdx.x / j.lanes;
    const T *norm = IS_Q ? j.q_norm : j.k_norm;
    for (int64_t h0 = 0; h0 < count; h0 += groups) {
        const int64_t h = h0 + group, at = (t * heads + first + h) * j.dim;
        const bool on = n > 0 && h < count;
        float d0[CHUNK] = {}, d1[CHUNK] = {};
        if (on) {
            if (IS_Q) {
                const T *from = j.dq + (t * j.n_q + h) * j.dim + i;
                load8<VEC>(d0, from, n);
                load8<VEC>(d1, from + half, n);
            } else {
                const float *from = j.dk + slot_elem(j, slot, h) + i;
                load8<VEC>(d0, from, n);
                load8<VEC>(d1, from + half, n);
            }
        }
        rotate_back(d0, d1, cs);
        if (norm) norm_back<PAIRS, VEC>(j, norm, j.qkv + at, i, n, on, d0, d1, sum);
        if (!on) continue;
        store_pairs<PAIRS, VEC>(j.dqkv + at, d0, d1, pair_span{i, half, j.turned, n});
    }
}

/* The block's sum of the norms' gradients, group by group, into row blockIdx.x of j.sums. */
template <int PAIRS, typename T>
static __device__ void store_sums(const qkv_job<T> &j, float *sh, const float sum[2 * CHUNK], int64_t i, int n, int which) {
    const int64_t half = j.dim / 2;
    const int groups = blockDim.x / j.lanes, group = threadIdx.x / j.lanes;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
        if (e < n) {
            sh[group * j.dim + pair_place<PAIRS>(i + e, 0, half, j.turned)] = sum[e];
            sh[group * j.dim + pair_place<PAIRS>(i + e, 1, half, j.turned)] = sum[CHUNK + e];
        }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < j.dim; c += blockDim.x) {
        float s = sh[c];
        for (int g = 1; g < groups; g++) s = __fadd_rn(s, sh[g * j.dim + c]);
        j.sums[(blockIdx.x * 2 + which) * j.dim + c] = s;
    }
}

template <int PAIRS, typename T, bool VEC>
static __global__ void __launch_bounds__(QKV_THREADS) qkv_bwd_kernel(const qkv_job<T> j) {
    extern __shared__ float sh[]; /* (groups, D), with norms */
    pdl_launch_dependents();
    pdl_wait();
    const int64_t half = j.dim / 2, heads = j.n_q + 2 * j.n_k;
    const int groups = blockDim.x / j.lanes, group = threadIdx.x / j.lanes;
    const int64_t i = (int64_t)(threadIdx.x % j.lanes) * CHUNK;
    const int n = i >= half ? 0 : half - i < CHUNK ? (int)(half - i) : CHUNK;
    const int64_t lo = blockIdx.x * j.per, hi = lo + j.per < j.rows ? lo + j.per : j.rows;
    float sum_q[2 * CHUNK] = {}, sum_k[2 * CHUNK] = {};
    for (int64_t t = lo; t < hi; t++) {
        int64_t p, slot;
        float cs[2 * CHUNK] = {};
        row_place(j, t, &p, &slot);
        if (n) load_rope<VEC>(cs, j.rope, p, j.dim, i, n);
        heads_back<PAIRS, T, VEC, true>(j, t, slot, 0, j.n_q, cs, i, n, sum_q);
        heads_back<PAIRS, T, VEC, false>(j, t, slot, j.n_q, j.n_k, cs, i, n, sum_k);
        for (int64_t h = group; n && h < j.n_k; h += groups) {
            float v[CHUNK];
            const float *from = j.dv + slot_elem(j, slot, h) + i;
            T *to = j.dqkv + (t * heads + j.n_q + j.n_k + h) * j.dim + i;
            load8<VEC>(v, from, n);
            store8<VEC>(to, v, n);
            load8<VEC>(v, from + half, n);
            store8<VEC>(to + half, v, n);
        }
    }
    if (j.q_norm) store_sums<PAIRS>(j, sh, sum_q, i, n, 0);
    if (j.k_norm) store_sums<PAIRS>(j, sh, sum_k, i, n, 1);
}

/* The same without norms, where nothing is summed: a thread has a lane's part of one head of one row. */
template <int PAIRS, typename T, bool VEC>
static __global__ void __launch_bounds__(QKV_THREADS) qkv_bwd_rope_kernel(const qkv_job<T> j) {
    const unsigned heads = (unsigned)(j.n_q + 2 * j.n_k), per_row = heads * (unsigned)j.lanes;
    const unsigned unit = cuda_block_reversed() * QKV_THREADS + threadIdx.x, t = unit / per_row, in_row = unit % per_row;
    const int64_t half = j.dim / 2, h = in_row / (unsigned)j.lanes, i = (int64_t)(in_row % (unsigned)j.lanes) * CHUNK;
    pdl_launch_dependents();
    pdl_wait();
    if (t >= j.rows || i >= half) return;
    const int n = half - i < CHUNK ? (int)(half - i) : CHUNK;
    int64_t p, slot;
    float d0[CHUNK], d1[CHUNK], cs[2 * CHUNK];
    row_place(j, t, &p, &slot);
    if (h < j.n_q) {
        const T *from = j.dq + (t * j.n_q + h) * j.dim + i;
        load8<VEC>(d0, from, n);
        load8<VEC>(d1, from + half, n);
    } else {
        const bool is_v = h >= j.n_q + j.n_k;
        const float *from = (is_v ? j.dv : j.dk) + slot_elem(j, slot, h - j.n_q - (is_v ? j.n_k : 0)) + i;
        load8<VEC>(d0, from, n);
        load8<VEC>(d1, from + half, n);
    }
    if (h < j.n_q + j.n_k) {
        load_rope<VEC>(cs, j.rope, p, j.dim, i, n);
        rotate_back(d0, d1, cs);
    }
    T *to = j.dqkv + (t * heads + h) * j.dim;
    if (halves(PAIRS) || h >= j.n_q + j.n_k) store_pairs<PAIRS_HALVES, VEC>(to, d0, d1, pair_span{i, half, half, n});
    else store_pairs<PAIRS, VEC>(to, d0, d1, pair_span{i, half, j.turned, n});
}

/* What forward and backward have in common; cache: of keys (forward) or of their gradients. */
template <typename T> static int qkv_job_of(qkv_job<T> *j, const struct qkv_args *a, struct tensor cache) {
    const int64_t chunks = ceil_div(a->head_dim / 2, CHUNK);
    *j = qkv_job<T>{};
    j->n_q = a->n_q_heads, j->n_k = a->n_kv_heads, j->dim = a->head_dim, j->rows = a->qkv.dim[0], j->per = 1;
    for (j->lanes = 1; j->lanes < chunks;) j->lanes *= 2;
    if (j->lanes > QKV_LANES)
        FAIL(ERR_UNSUPPORTED, "cuda: head_dim %lld: at most %d", (long long)a->head_dim, 2 * CHUNK * QKV_LANES);
    j->turned = (a->rotary ? a->rotary : a->head_dim) / 2;
    j->eps = a->eps;
    j->qkv = (const T *)a->qkv.data, j->q_norm = (const T *)a->q_norm.data, j->k_norm = (const T *)a->k_norm.data;
    j->rope = (const float *)a->rope.data, j->pos = (const int32_t *)a->pos.data, j->slots = (const int32_t *)a->slots.data;
    j->n_pos = a->rope.dim[0], j->block_len = cache.dim[2], j->n_slots = cache.dim[0] * cache.dim[2];
    return 0;
}
/* Whole chunks everywhere: the half of a head is a multiple of 8, and so is every offset. */
template <typename T> static bool qkv_wide(const qkv_job<T> *j) {
    return j->dim % (2 * CHUNK) == 0 && j->turned % CHUNK == 0 && aligned16(j->qkv) && aligned16(j->q_norm) &&
           aligned16(j->k_norm) && aligned16(j->rope);
}

/* Lanes' parts of heads of all rows, which the kernels without norms number in 32 bits. */
template <typename T> static int64_t qkv_units(const qkv_job<T> *j) { return j->rows * (j->n_q + 2 * j->n_k) * j->lanes; }
static const int64_t QKV_MOST = (int64_t)UINT32_MAX - QKV_THREADS;

template <int PAIRS, typename T> static int qkv_fwd_any(struct cuda *c, const struct qkv_args *a) {
    qkv_job<T> j;
    TRY(qkv_job_of(&j, a, a->kv.k));
    j.q = (T *)a->q.data, j.k = (T *)a->kv.k.data, j.v = (T *)a->kv.v.data;
    const int threads = warps_for((j.n_q + 2 * j.n_k) * j.lanes, QKV_THREADS);
    const unsigned rows = (unsigned)j.rows;
    const bool wide = qkv_wide(&j) && aligned16(j.q) && aligned16(j.k) && aligned16(j.v);
    if (!j.q_norm && !j.k_norm && j.rows >= QKV_ROPE_ROWS && qkv_units(&j) <= QKV_MOST) {
        const unsigned grid = (unsigned)ceil_div(qkv_units(&j), QKV_THREADS);
        if (wide) CU_TRY(cuda_launch_pdl(c, qkv_fwd_rope_kernel<PAIRS, T, true>, grid, QKV_THREADS, 0, j));
        else CU_TRY(cuda_launch_pdl(c, qkv_fwd_rope_kernel<PAIRS, T, false>, grid, QKV_THREADS, 0, j));
        return 0;
    }
    if (wide) CU_TRY(cuda_launch_pdl(c, qkv_fwd_kernel<PAIRS, T, true>, rows, threads, 0, j));
    else CU_TRY(cuda_launch_pdl(c, qkv_fwd_kernel<PAIRS, T, false>, rows, threads, 0, j));
    return 0;
}
static int qkv_check_kind(const struct qkv_args *a) {
    const bool norms = a->q_norm.data || a->k_norm.data;
    if (norms && (a->kind == NORM_SCALE_CAST || (a->kind == NORM_ONE_PLUS && a->interleaved)))
        FAIL(ERR_UNSUPPORTED, "cuda: norms of heads of this kind, with this rope");
    return 0;
}

int cuda_qkv_fwd(struct dev *d, const struct qkv_args *a) {
    const bool narrow = a->qkv.dt == DT_BF16;
    struct cuda *c = cuda_of(d);
    TRY(qkv_check_kind(a));
    if (a->kind == NORM_ONE_PLUS && a->q_norm.data && dev_rope_reorders(a))
        return narrow ? qkv_fwd_any<PAIRS_PARTIAL_ONE_PLUS, bf16>(c, a) : qkv_fwd_any<PAIRS_PARTIAL_ONE_PLUS, float>(c, a);
    if (a->kind == NORM_ONE_PLUS && a->q_norm.data)
        return narrow ? qkv_fwd_any<PAIRS_ONE_PLUS, bf16>(c, a) : qkv_fwd_any<PAIRS_ONE_PLUS, float>(c, a);
    if (!dev_rope_reorders(a)) return narrow ? qkv_fwd_any<PAIRS_HALVES, bf16>(c, a) : qkv_fwd_any<PAIRS_HALVES, float>(c, a);
    if (!a->interleaved) return narrow ? qkv_fwd_any<PAIRS_PARTIAL, bf16>(c, a) : qkv_fwd_any<PAIRS_PARTIAL, float>(c, a);
    return narrow ? qkv_fwd_any<PAIRS_NEIGHBOURS, bf16>(c, a) : qkv_fwd_any<PAIRS_NEIGHBOURS, float>(c, a);
}

template <int PAIRS, typename T> static int qkv_bwd_any(struct cuda *c, const struct qkv_args *a, const struct qkv_bwd_args *g) {
    qkv_job<T> j;
    TRY(qkv_job_of(&j, a, g->dk));
    j.dq = (const T *)g->dq.data, j.dqkv = (T *)g->dqkv.data;
    j.dk = (const float *)g->dk.data, j.dv = (const float *)g->dv.data;
    const int64_t widest = j.n_q > j.n_k ? j.n_q : j.n_k;
    const int threads = warps_for(widest * j.lanes, QKV_THREADS);
    const bool norms = j.q_norm || j.k_norm,
               wide = qkv_wide(&j) && aligned16(j.dq) && aligned16(j.dk) && aligned16(j.dv) && aligned16(j.dqkv);
    if (!norms && qkv_units(&j) <= QKV_MOST) {
        const unsigned grid = (unsigned)ceil_div(qkv_units(&j), QKV_THREADS);
        if (wide) CU_TRY(cuda_launch_pdl(c, qkv_bwd_rope_kernel<PAIRS, T, true>, grid, QKV_THREADS, 0, j));
        else CU_TRY(cuda_launch_pdl(c, qkv_bwd_rope_kernel<PAIRS, T, false>, grid, QKV_THREADS, 0, j));
        return 0;
    }
    if (norms) j.per = rows_per_block(c, j.rows);
    const int64_t blocks = ceil_div(j.rows, j.per);
    const size_t shared = norms ? (size_t)(threads / j.lanes) * (size_t)j.dim * sizeof(float) : 0; /* at most 16 KiB */
    void *sums = NULL;
    if (norms) TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)(blocks * 2 * j.dim) * sizeof(float), &sums));
    j.sums = (float *)sums;
    if (wide) CU_TRY(cuda_launch_pdl(c, qkv_bwd_kernel<PAIRS, T, true>, (unsigned)blocks, threads, shared, j));
    else CU_TRY(cuda_launch_pdl(c, qkv_bwd_kernel<PAIRS, T, false>, (unsigned)blocks, threads, shared, j));
    if (j.q_norm) TRY(cuda_add_parts(c, (float *)g->dq_norm.data, j.sums, blocks, 2 * j.dim, j.dim));
    if (j.k_norm) TRY(cuda_add_parts(c, (float *)g->dk_norm.data, j.sums + j.dim, blocks, 2 * j.dim, j.dim));
    return 0;
}
int cuda_qkv_bwd(struct dev *d, const struct qkv_args *a, const struct qkv_bwd_args *g) {
    const bool narrow = a->qkv.dt == DT_BF16;
    struct cuda *c = cuda_of(d);
    TRY(qkv_check_kind(a));
    if (a->kind == NORM_ONE_PLUS && a->q_norm.data && dev_rope_reorders(a))
        return narrow ? qkv_bwd_any<PAIRS_PARTIAL_ONE_PLUS, bf16>(c, a, g) : qkv_bwd_any<PAIRS_PARTIAL_ONE_PLUS, float>(c, a, g);
    if (a->kind == NORM_ONE_PLUS && a->q_norm.data)
        return narrow ? qkv_bwd_any<PAIRS_ONE_PLUS, bf16>(c, a, g) : qkv_bwd_any<PAIRS_ONE_PLUS, float>(c, a, g);
    if (!dev_rope_reorders(a)) return narrow ? qkv_bwd_any<PAIRS_HALVES, bf16>(c, a, g) : qkv_bwd_any<PAIRS_HALVES, float>(c, a, g);
    if (!a->interleaved) return narrow ? qkv_bwd_any<PAIRS_PARTIAL, bf16>(c, a, g) : qkv_bwd_any<PAIRS_PARTIAL, float>(c, a, g);
    return narrow ? qkv_bwd_any<PAIRS_NEIGHBOURS, bf16>(c, a, g) : qkv_bwd_any<PAIRS_NEIGHBOURS, float>(c, a, g);
}
