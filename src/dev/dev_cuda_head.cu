/* dev_cuda_head.cu - the CUDA backend's LM head with log-softmax, and raw logits.
 *
 * Logits exist for a block of rows and some thousand entries of the vocabulary at a time:
 * 128 MiB of them in the forward, 300 in the backward, and half as much of their gradient;
 * on Hopper the backward has their gradient alone, 300 MiB of it (dev_cuda_head_sm90.cu).
 * Columns are the outer loop, so that the weight is read from memory once and from the cache
 * for the following rows.
 *
 * Invariant: logits come from products of one shape (n, k) a range of the vocabulary,
 * in `logits` and `lmhead_fwd` alike, and a row's bits do not depend on m (cuda_gemm); the
 * number of rows in a block does not show in any row's result. */
#include "dev/dev_cuda_head.cuh"

enum {
    /* Columns of the products that define the logits' bits, a multiple of DEV_VOCAB_CHUNK. `logits` makes one
     * product of them all where cuda_gemm sees the same bits. */
    HEAD_GEMM_COLS = DEV_VOCAB_CHUNK,
    /* Those of the backward, whose logits need no equal bits: 75 x 7 tiles of 128 x 128 of dw at a hidden size of 896. */
    BWD_COLS = 9600,
    /* The same without logits: twice as many entries of dz need less room than they did beside logits. */
    DZ_COLS = 19200,
    /* Rows of a block. On an H200 fewer and larger launches gain more than logits that stay in the L2 cache:
     * 0.5B, 16384 rows, forward and backward in ms: 1024 rows 14, 38; 4096 10.5, 24.6; 8192 9.7, 23.1. */
    HEAD_ROWS = 8192,
    DZ_THREADS = 256,
};
static_assert(HEAD_GEMM_COLS % DEV_VOCAB_CHUNK == 0, "a chunk lies in one product");

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static const char *at_row(struct tensor t, int64_t row) {
    return (const char *)t.data + (size_t)(row * t.dim[1]) * dtype_size(t.dt);
}

/* out (rows, n) = x rows [row, row + rows) . W[lo, lo + n)^T */
static int gemm_logits(struct cuda *c, float *out, int64_t ld, struct tensor x, int64_t row, int64_t rows, struct weight w,
                       int64_t lo, int64_t n) {
    struct cuda_gemm_args g = {};
    g.op = CUDA_GEMM_FWD;
    g.m = rows, g.n = n, g.k = w.k;
    g.a = at_row(x, row);
    g.b = (const char *)w.data + (size_t)(lo * w.k) * dtype_size(w.dt);
    g.out = out;
    g.in = w.dt, g.out_dt = DT_F32;
    g.ld_out = ld;
    g.part = HEAD_GEMM_COLS;
    return cuda_gemm(c, &g);
}

int cuda_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w) {
    return gemm_logits(cuda_of(d), (float *)out.data, w.n, x, 0, x.dim[0], w, 0, w.n);
}

/* ---- forward ---- */

struct sum_args {
    const float *logits; /* (rows of the block, cols), of entries [lo, lo + cols) */
    int64_t cols, lo;
    const float *inv_temp;
    const int32_t *target; /* these and all below: from the block's first row on */
    head_sum *sums;        /* (chunks of the vocabulary, stride) */
    int64_t stride;        /* rows of the call */
    float *raw_target;
};

/* Block (x, y): row x, chunk y of the block's columns. */
template <bool MOMENTS>
__global__ static void __launch_bounds__(HEAD_THREADS) sum_kernel(struct sum_args a) {
    __shared__ head_shared shared;
    const int64_t row = blockIdx.x, first = (int64_t)blockIdx.y * DEV_VOCAB_CHUNK, left = a.cols - first;
    const int n = left < DEV_VOCAB_CHUNK ? (int)left : DEV_VOCAB_CHUNK;
    const float *raw = a.logits + row * a.cols + first;
    float z[HEAD_PER_THREAD];
    head_load(z, raw, n);
    head_scale(z, n, a.inv_temp[row]);
    const head_sum s = head_chunk_sum<MOMENTS>(z, &shared);
    if (threadIdx.x != 0) return;
    a.sums[(a.lo + first) / DEV_VOCAB_CHUNK * a.stride + row] = s;
    const int64_t t = a.target[row] - (a.lo + first);
    if (t >= 0 && t < n) a.raw_target[row] = raw[t];
    else if (a.lo + first == 0) a.raw_target[row] = CUDART_NAN_F; /* until its chunk comes; for good if there is none */
}

struct finish_args {
    const head_sum *sums; /* (chunks, rows) */
    const float *raw_target, *inv_temp;
    float *logp, *entropy, *lse, *sum_pi_sq;
    int64_t rows, chunks;
};

__global__ static void finish_kernel(struct finish_args a) {
    const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows) return;
    float max = -CUDART_INF_F;
    for (int64_t i = 0; i < a.chunks; i++) max = fmaxf(max, a.sums[i * a.rows + row].max);
    double sum = 0, sum_t = 0, sum_sq = 0;
    for (int64_t i = 0; i < a.chunks; i++) {
        const head_sum c = a.sums[i * a.rows + row];
        sum = __dadd_rn(sum, head_weight(c, max));
        if (c.sum == 0) continue;
        const double t = (double)c.max - (double)max, e = exp(t); /* sum of e^t e (z - c.max + t) */
        sum_t += e * ((double)c.sum_t + t * (double)c.sum);
        sum_sq += e * e * (double)c.sum_sq;
    }
    const double lse = head_lse(max, sum);
    a.logp[row] = head_logp(__fmul_rn(a.raw_target[row], a.inv_temp[row]), lse);
    if (a.lse) a.lse[row] = (float)lse;
    if (a.entropy) a.entropy[row] = (float)(log(sum) - sum_t / sum);
    if (a.sum_pi_sq) a.sum_pi_sq[row] = (float)(sum_sq / (sum * sum));
}

int cuda_lmhead_fwd(struct dev *d, const struct lmhead_args *a) {
    struct cuda *c = cuda_of(d);
    const int64_t rows = a->x.dim[0], block = min64(rows, HEAD_ROWS), vocab = a->w.n;
    const bool moments = a->entropy.data || a->sum_pi_sq.data;
    const size_t logits_bytes = (size_t)(block * min64(HEAD_GEMM_COLS, vocab)) * sizeof(float);
    const size_t logits_room = (logits_bytes + 255) & ~(size_t)255;
    const size_t sums_bytes = (size_t)(head_chunks(vocab) * rows) * sizeof(head_sum);
    void *p;
    TRY(cuda_scratch(c, CUDA_SLOT_HEAD, logits_room + sums_bytes + (size_t)rows * sizeof(float), &p));
    float *logits = (float *)p;
    head_sum *sums = (head_sum *)((char *)p + logits_room);
    float *raw_target = (float *)((char *)p + logits_room + sums_bytes);
    for (int64_t lo = 0; lo < vocab; lo += HEAD_GEMM_COLS)
        for (int64_t row = 0; row < rows; row += block) {
            const int64_t n = min64(block, rows - row), cols = min64(HEAD_GEMM_COLS, vocab - lo);
            TRY(gemm_logits(c, logits, cols, a->x, row, n, a->w, lo, cols));
            const struct sum_args s = {logits, cols, lo, (const float *)a->inv_temp.data + row,
                                       (const int32_t *)a->target.data + row, sums + row, rows, raw_target + row};
            const dim3 grid((unsigned)n, (unsigned)head_chunks(cols));
            if (moments) sum_kernel<true><<<grid, HEAD_THREADS, 0, c->stream>>>(s);
            else sum_kernel<false><<<grid, HEAD_THREADS, 0, c->stream>>>(s);
            CU_LAUNCHED();
        }
    const struct finish_args f = {sums, raw_target, (const float *)a->inv_temp.data, (float *)a->logp.data,
                                  (float *)a->entropy.data, (float *)a->lse.data, (float *)a->sum_pi_sq.data, rows,
                                  head_chunks(vocab)};
    finish_kernel<<<(unsigned)((rows + 63) / 64), 64, 0, c->stream>>>(f);
    CU_LAUNCHED();
    return 0;
}

/* ---- backward ---- */

struct dz_args {
    const float *logits; /* (rows of the block, cols), of entries [lo, lo + cols) */
    void *dz;            /* (rows of the block, cols) act; may be the logits when act is f32 */
    int64_t cols, lo;
    const float *inv_temp, *lse, *dlogp, *dentropy, *entropy; /* from the block's first row on; the last two optional */
    const int32_t *target;
};

struct dz_row { /* dz_j = inv_temp (dlogp (1[j = target] - p_j) - dentropy p_j (log p_j + entropy)) */
    float inv_temp, lse, dlogp, dentropy, entropy;
    int64_t target; /* column, or outside */
};

static __device__ __forceinline__ float dz_at(float raw, int64_t j, const dz_row &r) {
    const float log_p = __fmul_rn(raw, r.inv_temp) - r.lse, p = expf(log_p);
    float g = -r.dlogp;
    if (r.dentropy != 0) g -= r.dentropy * (head_clamp(log_p) + r.entropy); /* a zero times an infinite log-prob stays out */
    g *= p;
    if (j == r.target) g += r.dlogp;
    return g * r.inv_temp;
}

static __device__ __forceinline__ void dz_store(float *to, const float (&v)[8]) {
    ((float4 *)to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
static __device__ __forceinline__ void dz_store(__nv_bfloat16 *to, const float (&v)[8]) {
    alignas(16) __nv_bfloat162 b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    *(uint4 *)to = *(const uint4 *)b;
}
static __device__ __forceinline__ void dz_store1(float *to, float v) { *to = v; }
static __device__ __forceinline__ void dz_store1(__nv_bfloat16 *to, float v) { *to = __float2bfloat16_rn(v); }

/* One block a row. A row without a gradient gets exact zeros, whatever its logits. */
template <class ACT>
__global__ static void __launch_bounds__(DZ_THREADS) dz_kernel(struct dz_args a) {
    const int64_t row = blockIdx.x;
    const dz_row r = {a.inv_temp[row], a.lse[row], a.dlogp[row], a.dentropy ? a.dentropy[row] : 0, a.dentropy ? a.entropy[row] : 0,
                      a.target[row] - a.lo};
    const bool none = r.dlogp == 0 && r.dentropy == 0, wide = a.cols % 8 == 0; /* the buffers are aligned, so rows are too */
    const float *raw = a.logits + row * a.cols;
    ACT *dz = (ACT *)a.dz + row * a.cols;
    if (!wide) {
        for (int64_t j = threadIdx.x; j < a.cols; j += DZ_THREADS) dz_store1(dz + j, none ? 0.0f : dz_at(raw[j], j, r));
        return;
    }
    for (int64_t j = (int64_t)threadIdx.x * 8; j < a.cols; j += DZ_THREADS * 8) {
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (!none) {
            const float4 lo = *(const float4 *)(raw + j), hi = *(const float4 *)(raw + j + 4);
            v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w, v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = dz_at(v[i], j + i, r);
        }
        dz_store(dz + j, v);
    }
}

/* A block's parts of dx (f32, = for the first columns, then +=) and dw; NULL: a frozen weight. */
static int gemm_grads(struct cuda *c, const struct lmhead_args *a, const void *dz, int64_t row, int64_t rows, int64_t lo,
                      int64_t cols, float *dx, float *dw) {
    struct cuda_gemm_args g = {};
    g.m = rows, g.n = cols, g.k = a->w.k;
    g.a = dz;
    g.in = a->w.dt, g.out_dt = DT_F32;
    g.op = CUDA_GEMM_DX;
    g.b = (const char *)a->w.data + (size_t)(lo * a->w.k) * dtype_size(a->w.dt);
    g.out = dx + row * a->w.k;
    g.add = lo > 0;
    TRY(cuda_gemm(c, &g));
    if (!dw) return 0;
    g.op = CUDA_GEMM_DW;
    g.b = at_row(a->x, row);
    g.out = dw + lo * a->w.k;
    g.add = true;
    return cuda_gemm(c, &g);
}

/* dz of a block by way of its logits. */
static int dz_of_logits(struct cuda *c, const struct lmhead_args *a, struct tensor dlogp, struct tensor dentropy, float *logits,
                        int64_t row, int64_t rows, int64_t lo, int64_t cols, void *dz) {
    TRY(gemm_logits(c, logits, cols, a->x, row, rows, a->w, lo, cols));
    const struct dz_args z = {logits, dz, cols, lo, (const float *)a->inv_temp.data + row, (const float *)a->lse.data + row,
                              (const float *)dlogp.data + row, dentropy.data ? (const float *)dentropy.data + row : NULL,
                              dentropy.data ? (const float *)a->entropy.data + row : NULL, (const int32_t *)a->target.data + row};
    if (a->x.dt == DT_BF16) dz_kernel<__nv_bfloat16><<<(unsigned)rows, DZ_THREADS, 0, c->stream>>>(z);
    else dz_kernel<float><<<(unsigned)rows, DZ_THREADS, 0, c->stream>>>(z);
    CU_LAUNCHED();
    return 0;
}

int cuda_lmhead_bwd(struct dev *d, const struct lmhead_args *a, struct tensor dlogp, struct tensor dentropy, struct tensor dx,
                    struct tensor dw) {
    struct cuda *c = cuda_of(d);
    const bool bf16 = a->x.dt == DT_BF16, fused = cuda_head_dz_takes(c, a, NULL);
    const int64_t rows = a->x.dim[0], block = min64(rows, HEAD_ROWS), vocab = a->w.n;
    const int64_t widest = min64(fused ? DZ_COLS : BWD_COLS, vocab);
    const size_t logits_bytes = fused ? 0 : ((size_t)(block * widest) * sizeof(float) + 255) & ~(size_t)255;
    const size_t dz_bytes = bf16 ? ((size_t)(block * widest) * 2 + 255) & ~(size_t)255 : 0;
    void *p;
    TRY(cuda_scratch(c, CUDA_SLOT_HEAD, logits_bytes + dz_bytes + (bf16 ? (size_t)(rows * a->w.k) * sizeof(float) : 0), &p));
    float *logits = (float *)p, *sum_dx = bf16 ? (float *)((char *)p + logits_bytes + dz_bytes) : (float *)dx.data;
    void *dz = bf16 ? (char *)p + logits_bytes : p;
    for (int64_t lo = 0; lo < vocab; lo += widest)
        for (int64_t row = 0; row < rows; row += block) {
            const int64_t n = min64(block, rows - row), cols = min64(widest, vocab - lo);
            if (fused) TRY(cuda_head_dz(c, a, dlogp, dentropy, row, n, lo, cols, dz));
            else TRY(dz_of_logits(c, a, dlogp, dentropy, logits, row, n, lo, cols, dz));
            TRY(gemm_grads(c, a, dz, row, n, lo, cols, sum_dx, (float *)dw.data));
        }
    return bf16 ? cuda_cast(d, dx, tensor_2d(sum_dx, DT_F32, rows, a->w.k)) : 0;
}
