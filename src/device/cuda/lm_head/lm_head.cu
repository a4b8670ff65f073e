/* lm_head.cu - the CUDA backend's LM head with log-softmax, and raw logits.
 *
 * On Hopper the forward's softmax statistics and the gradient of the logits are made in the epilogue of the head's GEMM
 * (lm_head_sm90.cu): what reaches memory is 16 bytes for each 256 logits, and 300 MiB of that gradient.  Elsewhere, for f32 and
 * for lists, logits exist for a block of rows and some thousand vocabulary entries at a time: 128 MiB of them in the forward,
 * 300 in the backward, and half as much of their gradient.  Columns are the outer loop, so that the weight is
 * read from memory once and from L2 for the following rows.
 *
 * Kept logits (lmhead_args.kept) are those of the fused kernel alone; the backward makes the others again.
 * A softcap has stored logits everywhere, and keeps none.
 *
 * Invariant: logits come from GEMMs of one shape (n, k) for each range of the vocabulary, in `logits` and
 * `lmhead_fwd` alike, or from a kernel that was seen to give their bits.  A row's bits do not depend on m (cuda_gemm)
 * nor on the number of rows in a block. */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/lm_head/log_softmax.cuh"

#include "base/log.h"

enum {
    /* Columns of the GEMMs that define the logits' bits, a multiple of DEV_VOCAB_CHUNK. `logits` is one GEMM
     * where that gives the same bits (cuda_gemm_args.split_cols). */
    HEAD_GEMM_COLS = DEV_VOCAB_CHUNK,
    /* Those of the backward, whose logits need no such bits: 75 x 7 tiles of 128 x 128 of dw at a hidden size of 896. */
    BWD_COLS = CUDA_HEAD_BWD_COLS,
    /* The same for the fused kernel: twice as many entries of dz need less memory than with logits. */
    DZ_COLS = CUDA_HEAD_DZ_COLS,
    /* Rows of a block. On an H200 fewer and larger launches gain more than logits that stay in the L2 cache:
     * 0.5B, 16384 rows, forward and backward in ms: 1024 rows 14, 38; 4096 10.5, 24.6; 8192 9.7, 23.1. */
    HEAD_ROWS = CUDA_HEAD_ROWS,
    DZ_THREADS = 256,
    DZ_LIST = 4, /* entries of a row's list that a thread holds */
};
static_assert(HEAD_GEMM_COLS % DEV_VOCAB_CHUNK == 0, "a chunk lies in one GEMM");
static_assert(DZ_COLS % DEV_KEPT_COLS == 0 && HEAD_ROWS % DEV_KEPT_ROWS == 0, "blocks are whole tiles of kept logits");

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static const char *at_row(struct tensor t, int64_t row) {
    return (const char *)t.data + (size_t)(row * t.dim[1]) * dtype_size(t.dt);
}

static __global__ void cap_kernel(float *z, int64_t n, float cap) {
    const int64_t i = (int64_t)blockIdx.x * DZ_THREADS + threadIdx.x;
    if (i < n) z[i] = __fmul_rn(cap, tanhf(__fdiv_rn(z[i], cap)));
}

/* out (rows, cols) = the block's rows of x . its entries of W^T, with its softcap */
static int gemm_logits(struct cuda *c, float *out, struct tensor x, struct weight w, const struct head_block &b) {
    struct cuda_gemm_args g = {};
    g.op = CUDA_GEMM_FWD;
    g.m = b.rows, g.n = b.cols, g.k = w.k;
    g.a = at_row(x, b.row);
    g.b = (const char *)w.data + (size_t)(b.lo * w.k) * dtype_size(w.dt);
    g.out = out;
    g.in = w.dt, g.out_dt = DT_F32;
    g.ld_out = b.cols;
    g.split_cols = HEAD_GEMM_COLS;
    TRY(cuda_gemm(c, &g));
    if (w.softcap > 0) {
        const int64_t n = b.rows * b.cols;
        cap_kernel<<<(unsigned)((n + DZ_THREADS - 1) / DZ_THREADS), DZ_THREADS, 0, c->stream>>>(out, n, w.softcap);
        CU_LAUNCHED();
    }
    return 0;
}

int cuda_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w) {
    return gemm_logits(cuda_of(d), (float *)out.data, x, w, {0, x.dim[0], 0, w.n});
}

/* ---- forward ---- */

struct stats_args {
    const float *logits; /* (rows of the block, cols), of entries [lo, lo + cols) */
    int64_t cols, lo;
    const float *inv_temp;
    const int32_t *target; /* these and all below: from the block's first row on */
    head_stats *sums;      /* (chunks of the vocabulary, stride) */
    int64_t stride;        /* rows of the call */
    float *raw_target;
    const int32_t *list_id; /* (rows, n_list), or n_list 0 */
    float *list;            /* raw logits of these */
    int64_t n_list;
};

/* Block (x, y): row x, chunk y of the block's columns. */
template <bool MOMENTS> __global__ static void __launch_bounds__(HEAD_THREADS) stats_kernel(struct stats_args a) {
    __shared__ head_shared shared;
    const int64_t row = blockIdx.x, first = (int64_t)blockIdx.y * DEV_VOCAB_CHUNK, left = a.cols - first;
    const int n = left < DEV_VOCAB_CHUNK ? (int)left : DEV_VOCAB_CHUNK;
    const float *raw = a.logits + row * a.cols + first;
    float z[HEAD_PER_THREAD];
    head_load(z, raw, n);
    head_scale(z, n, a.inv_temp[row]);
    const head_stats s = head_chunk_stats<MOMENTS>(z, &shared);
    for (int64_t i = threadIdx.x; i < a.n_list; i += HEAD_THREADS) {
        const int64_t t = a.list_id[row * a.n_list + i] - (a.lo + first);
        if (t >= 0 && t < n) a.list[row * a.n_list + i] = raw[t];
    }
    if (threadIdx.x != 0) return;
    a.sums[(a.lo + first) / DEV_VOCAB_CHUNK * a.stride + row] = s;
    const int64_t t = a.target[row] - (a.lo + first);
    if (t >= 0 && t < n) a.raw_target[row] = raw[t];
    else if (a.lo + first == 0)
        a.raw_target[row] = CUDART_NAN_F; /* until its chunk comes; it stays for an id outside of the vocabulary */
}

/* ---- top-k ----
 * One block a row. The row's list so far, largest first, is in shared memory with the candidates of a piece of the
 * logits; both are sorted together (bitonic) and the first k stay. Most pieces after the first have few candidates or
 * none. An entry is a number that orders as (logit, lower id first); its id is the place in the vocabulary. */

enum { TOP_THREADS = 256, TOP_PIECE = 1024, TOP_MAX = 1024, TOP_ROOM = TOP_MAX + TOP_PIECE };

typedef unsigned long long top_key;
/* Larger for larger logits, for equal ones (0 and -0 too) by lower id; 0: none, or NaN. */
static __device__ __forceinline__ top_key top_key_of(float raw, int32_t id) {
    if (isnan(raw)) return 0;
    const unsigned bits = __float_as_uint(raw == 0 ? 0.0f : raw);
    const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (top_key)ordered << 32 | ~(unsigned)id;
}
static __device__ __forceinline__ float top_raw(top_key k) {
    const unsigned ordered = (unsigned)(k >> 32);
    return k == 0 ? CUDART_NAN_F : __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}
static __device__ __forceinline__ int32_t top_id(top_key k) { return k == 0 ? 0 : (int32_t) ~(unsigned)k; }

/* Largest first; n, a power of two, of keys in shared memory. */
static __device__ void top_sort(top_key *key, int n) {
    for (int size = 2; size <= n; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = (int)threadIdx.x; i < n / 2; i += TOP_THREADS) {
                const int lo = i / step * step * 2 + i % step, hi = lo + step;
                const bool down = (lo & size) == 0;
                const top_key a = key[lo], b = key[hi];
                if ((a < b) == down) key[lo] = b, key[hi] = a;
            }
        }
    __syncthreads();
}

struct top_args {
    const float *logits; /* (rows of the block, cols), of entries [lo, lo + cols) */
    int64_t cols, lo;
    int32_t *id; /* (rows, k): the list so far; with lo 0 there is none */
    float *raw;
    int k; /* at most TOP_MAX */
};

__global__ static void __launch_bounds__(TOP_THREADS) top_kernel(struct top_args a) {
    __shared__ top_key key[TOP_ROOM];
    __shared__ int found;
    const int64_t row = blockIdx.x;
    const float *raw = a.logits + row * a.cols;
    for (int i = (int)threadIdx.x; i < a.k; i += TOP_THREADS)
        key[i] = a.lo == 0 ? 0 : top_key_of(a.raw[row * a.k + i], a.id[row * a.k + i]);
    for (int64_t first = 0; first < a.cols; first += TOP_PIECE) {
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        const top_key least = key[a.k - 1];
        for (int64_t j = first + (int64_t)threadIdx.x; j < first + TOP_PIECE && j < a.cols; j += TOP_THREADS) {
            const top_key k = top_key_of(raw[j], (int32_t)(a.lo + j));
            if (k > least) key[a.k + atomicAdd(&found, 1)] = k; /* in any order: keys are distinct, and they are sorted */
        }
        __syncthreads();
        const int n = a.k + found; /* the same in every thread */
        __syncthreads();
        if (n == a.k) continue;
        int room = 2;
        while (room < n) room *= 2;
        for (int i = n + (int)threadIdx.x; i < room; i += TOP_THREADS) key[i] = 0;
        top_sort(key, room);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < a.k; i += TOP_THREADS) {
        a.id[row * a.k + i] = top_id(key[i]);
        a.raw[row * a.k + i] = top_raw(key[i]);
    }
}

struct finish_args {
    const head_stats *sums; /* (chunks, rows) */
    const float *raw_target, *inv_temp;
    float *logp, *entropy, *lse, *sum_pi_sq;
    int64_t rows, chunks;
    float *list, *top; /* (rows, n_list), (rows, n_top): raw logits to log-probs */
    int64_t n_list, n_top;
};

__global__ static void finish_kernel(struct finish_args a) {
    const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows) return;
    float max = -CUDART_INF_F;
    for (int64_t i = 0; i < a.chunks; i++) max = fmaxf(max, a.sums[i * a.rows + row].max);
    double sum = 0, sum_t = 0, sum_sq = 0;
    for (int64_t i = 0; i < a.chunks; i++) {
        const head_stats c = a.sums[i * a.rows + row];
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
    for (int64_t i = row * a.n_list; i < (row + 1) * a.n_list; i++)
        a.list[i] = head_logp(__fmul_rn(a.list[i], a.inv_temp[row]), lse);
    for (int64_t i = row * a.n_top; i < (row + 1) * a.n_top; i++) a.top[i] = head_logp(__fmul_rn(a.top[i], a.inv_temp[row]), lse);
}

/* The sums of the chunks of a row from those of its tiles. Block: some rows, chunk y. */
template <bool MOMENTS>
__global__ static void __launch_bounds__(HEAD_THREADS)
    merge_tiles_kernel(head_stats *sums, int64_t stride, const head_stats *tiles, int64_t n_tiles, int64_t rows) {
    const int64_t row = (int64_t)blockIdx.x * HEAD_THREADS + threadIdx.x, first = (int64_t)blockIdx.y * HEAD_TILES;
    if (row >= rows) return;
    head_stats v[HEAD_TILES];
    head_load_tiles(v, tiles, first, n_tiles, rows, row);
    const head_stats s = head_merge_tiles<MOMENTS>(v);
    *(float4 *)&sums[blockIdx.y * stride + row] = make_float4(s.max, s.sum, s.sum_t, s.sum_sq);
}

/* Of a call: statistics of the chunks (chunks, rows), the targets' raw logits (rows), and room for what they are made of. */
struct head_work {
    head_stats *sums;
    float *raw_target;
    void *room;
};

/* What `room` holds: logits of a block of rows, or statistics of its tiles. */
static size_t work_bytes(const struct lmhead_args *a) {
    const int64_t block = min64(a->x.dim[0], HEAD_ROWS), vocab = a->w.n;
    const size_t logits = (size_t)(block * min64(HEAD_GEMM_COLS, vocab)) * sizeof(float);
    const size_t tiles = (size_t)(head_tiles(vocab) * block) * sizeof(head_stats);
    return ((logits > tiles ? logits : tiles) + 255) & ~(size_t)255;
}
/* Scratch for a call's work, and `more` bytes before it. */
static int work_take(struct cuda *c, const struct lmhead_args *a, size_t more, struct head_work *w, char **before) {
    const size_t room = work_bytes(a), sums = (size_t)(head_chunks(a->w.n) * a->x.dim[0]) * sizeof(head_stats);
    void *p;
    TRY(cuda_scratch(c, CUDA_SCRATCH_HEAD, more + room + sums + (size_t)a->x.dim[0] * sizeof(float), &p));
    *before = (char *)p;
    w->room = (char *)p + more;
    w->sums = (head_stats *)((char *)w->room + room);
    w->raw_target = (float *)((char *)w->room + room + sums);
    return 0;
}
static bool wants_moments(const struct lmhead_args *a) { return a->entropy.data || a->sum_pi_sq.data; }

/* Statistics, lists and top-k from stored logits. */
static int stats_from_logits(struct cuda *c, const struct lmhead_args *a, const struct head_work *w) {
    const int64_t rows = a->x.dim[0], block = min64(rows, HEAD_ROWS), vocab = a->w.n;
    const int64_t n_list = a->list_id.data ? a->list_id.dim[1] : 0, n_top = a->top_id.data ? a->top_id.dim[1] : 0;
    if (n_top > TOP_MAX)
        FAIL(ERR_UNSUPPORTED, "dev op lmhead_fwd: top-k of %lld; on a GPU at most %d", (long long)n_top, (int)TOP_MAX);
    float *const logits = (float *)w->room;
    for (int64_t lo = 0; lo < vocab; lo += HEAD_GEMM_COLS)
        for (int64_t row = 0; row < rows; row += block) {
            const int64_t n = min64(block, rows - row), cols = min64(HEAD_GEMM_COLS, vocab - lo);
            TRY(gemm_logits(c, logits, a->x, a->w, {row, n, lo, cols}));
            const struct stats_args s = {logits,
                                         cols,
                                         lo,
                                         (const float *)a->inv_temp.data + row,
                                         (const int32_t *)a->target.data + row,
                                         w->sums + row,
                                         rows,
                                         w->raw_target + row,
                                         n_list ? (const int32_t *)a->list_id.data + row * n_list : NULL,
                                         n_list ? (float *)a->list_logp.data + row * n_list : NULL,
                                         n_list};
            const dim3 grid((unsigned)n, (unsigned)head_chunks(cols));
            if (wants_moments(a)) stats_kernel<true><<<grid, HEAD_THREADS, 0, c->stream>>>(s);
            else stats_kernel<false><<<grid, HEAD_THREADS, 0, c->stream>>>(s);
            CU_LAUNCHED();
            if (n_top == 0) continue;
            const struct top_args t = {
                logits, cols, lo, (int32_t *)a->top_id.data + row * n_top, (float *)a->top_logp.data + row * n_top, (int)n_top};
            top_kernel<<<(unsigned)n, TOP_THREADS, 0, c->stream>>>(t);
            CU_LAUNCHED();
        }
    return 0;
}

/* Statistics in the GEMM's epilogue. */
static int stats_fused(struct cuda *c, const struct lmhead_args *a, const struct head_work *w) {
    const int64_t rows = a->x.dim[0], block = min64(rows, HEAD_ROWS), vocab = a->w.n;
    head_stats *const tiles = (head_stats *)w->room;
    for (int64_t row = 0; row < rows; row += block) {
        const int64_t n = min64(block, rows - row);
        const dim3 grid((unsigned)((n + HEAD_THREADS - 1) / HEAD_THREADS), (unsigned)head_chunks(vocab));
        TRY(cuda_head_fused_stats(c, a, {row, n, 0, vocab}, wants_moments(a), tiles, w->raw_target + row));
        const auto kernel = wants_moments(a) ? merge_tiles_kernel<true> : merge_tiles_kernel<false>;
        kernel<<<grid, HEAD_THREADS, 0, c->stream>>>(w->sums + row, rows, tiles, head_tiles(vocab), n);
        CU_LAUNCHED();
    }
    return 0;
}

/* ---- whether both give the same bits: checked once for each shape of head, on values whose sums cancel ---- */

enum { CHECK_ROWS = 300 /* two clusters' rows, the last not whole */ };

static __global__ void check_inputs_kernel(float *inv_temp, int32_t *target, int64_t rows, int64_t vocab) {
    const int64_t row = threadIdx.x;
    if (row >= rows) return;
    inv_temp[row] = row % 2 ? 1.0f : 0.7f;
    target[row] = (int32_t)(row * 7919 % vocab);
}

/* Vocabulary of the head that is checked: whole GEMMs of `logits` and its last, narrower one. */
static int64_t check_vocab(int64_t vocab) { return vocab < HEAD_GEMM_COLS ? vocab : HEAD_GEMM_COLS + vocab % HEAD_GEMM_COLS; }
static size_t padded(size_t bytes) { return (bytes + 255) & ~(size_t)255; }
static size_t check_stats_bytes(int64_t vocab) {
    return (size_t)(head_chunks(vocab) * CHECK_ROWS) * sizeof(head_stats) + CHECK_ROWS * sizeof(float);
}

size_t cuda_head_check_bytes(int64_t k, int64_t vocab) {
    const int64_t n = check_vocab(vocab);
    const size_t inputs = padded((size_t)(CHECK_ROWS * k) * 2) + padded((size_t)(n * k) * 2) + 3 * padded(CHECK_ROWS * 4);
    struct lmhead_args a = {};
    a.x.dim[0] = CHECK_ROWS, a.w.n = n;
    return inputs + padded(check_stats_bytes(n)) + work_bytes(&a) + check_stats_bytes(n);
}

/* *same: whether all statistics of rows and of a head of these sizes agree. */
static int compare_stats(struct cuda *c, int64_t k, int64_t vocab, bool *same) {
    struct lmhead_args a = {};
    struct head_work w;
    char *p;
    const size_t x = padded((size_t)(CHECK_ROWS * k) * 2), weight = padded((size_t)(vocab * k) * 2), row = padded(CHECK_ROWS * 4);
    const size_t sums = check_stats_bytes(vocab);
    int differ = 1;
    a.x = tensor_2d(NULL, DT_BF16, CHECK_ROWS, k);
    a.w.dt = DT_BF16, a.w.n = vocab, a.w.k = k;
    TRY(work_take(c, &a, x + weight + 3 * row + padded(sums), &w, &p));
    a.x.data = p, a.w.data = p + x;
    a.inv_temp = tensor_1d(p + x + weight, DT_F32, CHECK_ROWS);
    a.target = tensor_1d(p + x + weight + row, DT_I32, CHECK_ROWS);
    a.entropy = a.inv_temp; /* moments are asked for; it is not written here */
    int *const flag = (int *)(p + x + weight + 2 * row);
    char *const want = p + x + weight + 3 * row;
    TRY(gemm_fill_test_values(c, a.x, 1, 1, 1));
    TRY(gemm_fill_test_values(c, tensor_2d(a.w.data, DT_BF16, vocab, k), 2, -1, 1));
    check_inputs_kernel<<<1, 512, 0, c->stream>>>((float *)a.inv_temp.data, (int32_t *)a.target.data, CHECK_ROWS, vocab);
    CU_LAUNCHED();
    CU_TRY(cudaMemsetAsync(flag, 0, sizeof *flag, c->stream));
    TRY(stats_from_logits(c, &a, &w));
    CU_TRY(cudaMemcpyAsync(want, w.sums, sums, cudaMemcpyDeviceToDevice, c->stream));
    CU_TRY(cudaMemsetAsync(w.sums, 0xff, sums, c->stream)); /* what is not written must differ */
    TRY(stats_fused(c, &a, &w));
    TRY(gemm_compare(c, want, w.sums, sums, flag));
    CU_TRY(cudaMemcpyAsync(&differ, flag, sizeof differ, cudaMemcpyDeviceToHost, c->stream));
    CU_TRY(cudaStreamSynchronize(c->stream));
    *same = !differ;
    return 0;
}

int cuda_head_fused(struct cuda *c, struct tensor x, struct weight w, bool *yes) {
    const int64_t vocab = check_vocab(w.n);
    *yes = false;
    if (!cuda_head_fused_takes(c, x, w)) return 0;
    for (int i = 0; i < c->n_heads; i++)
        if (c->head[i].k == w.k && c->head[i].vocab == vocab) {
            *yes = c->head[i].same;
            return 0;
        }
    if (c->n_heads == CUDA_MAX_HEADS) return 0;
    TRY(compare_stats(c, w.k, vocab, yes));
    if (*yes)
        log_debug("cuda: LM head (n %lld, k %lld): softmax statistics in the GEMM's epilogue", (long long)w.n, (long long)w.k);
    else
        log_warn("cuda: LM head (n %lld, k %lld): the fused kernel is not bitwise identical to cuBLASLt's logits; these are stored",
                 (long long)w.n, (long long)w.k);
    c->head[c->n_heads].k = w.k, c->head[c->n_heads].vocab = vocab, c->head[c->n_heads].same = *yes;
    c->n_heads++;
    return 0;
}

int cuda_lmhead_fwd(struct dev *d, const struct lmhead_args *a) {
    struct cuda *c = cuda_of(d);
    const int64_t rows = a->x.dim[0];
    const int64_t n_list = a->list_id.data ? a->list_id.dim[1] : 0, n_top = a->top_id.data ? a->top_id.dim[1] : 0;
    struct head_work w;
    char *before;
    bool fused = false;
    if (n_list == 0 && n_top == 0) TRY(cuda_head_fused(c, a->x, a->w, &fused));
    TRY(work_take(c, a, 0, &w, &before));
    TRY(fused ? stats_fused(c, a, &w) : stats_from_logits(c, a, &w));
    const struct finish_args f = {w.sums,
                                  w.raw_target,
                                  (const float *)a->inv_temp.data,
                                  (float *)a->logp.data,
                                  (float *)a->entropy.data,
                                  (float *)a->lse.data,
                                  (float *)a->sum_pi_sq.data,
                                  rows,
                                  head_chunks(a->w.n),
                                  (float *)a->list_logp.data,
                                  (float *)a->top_logp.data,
                                  n_list,
                                  n_top};
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
    const int32_t *list_id; /* (rows, n_list), or n_list 0 */
    const float *dlist;
    int64_t n_list; /* at most DZ_LIST * DZ_THREADS */
    float softcap;  /* CAP: the logits are under it, and the gradient is that of what is under */
};

/* dz_j = inv_temp (dlogp 1[j = target] - dsum p_j - dentropy p_j (log p_j + entropy)), before the list's own terms */
struct dz_row {
    float inv_temp, lse, dlogp, dentropy, entropy;
    int64_t target; /* column, or outside */
    float dsum;     /* dlogp + the sum of the row's dlist */
};

/* The gradient g at a logit times the softcap's slope there. */
template <bool CAP> static __device__ __forceinline__ float dz_under(float g, float raw, float cap) {
    const float t = CAP ? __fdiv_rn(raw, cap) : 0.0f;
    return CAP ? g * (1.0f - t * t) : g;
}

static __device__ __forceinline__ float dz_at(float raw, int64_t j, const dz_row &r) {
    const float log_p = __fmul_rn(raw, r.inv_temp) - r.lse, p = expf(log_p);
    float g = -r.dsum;
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

/* dlogp + the sum of the row's dlist: by one warp in lane order, so that no other row shows. */
static __device__ float dz_sum(const struct dz_args &a, int64_t row) {
    __shared__ float sum;
    if (a.n_list == 0) return a.dlogp[row];
    if (threadIdx.x < 32) {
        float s = 0;
        for (int64_t i = threadIdx.x; i < a.n_list; i += 32) s = __fadd_rn(s, a.dlist[row * a.n_list + i]);
        s = warp_sum(s);
        if (threadIdx.x == 0) sum = __fadd_rn(a.dlogp[row], s);
    }
    __syncthreads();
    return sum;
}
/* Whether any of the row's listed entries has a gradient; the same in every thread. */
static __device__ bool dz_listed(const struct dz_args &a, int64_t row) {
    int any = 0;
    for (int64_t i = threadIdx.x; i < a.n_list; i += DZ_THREADS) any |= a.dlist[row * a.n_list + i] != 0;
    return a.n_list > 0 && __syncthreads_or(any);
}

/* One block a row. A row without a gradient gets exact zeros, whatever its logits. */
template <class ACT, bool CAP> __global__ static void __launch_bounds__(DZ_THREADS) dz_kernel(struct dz_args a) {
    const int64_t row = blockIdx.x;
    const dz_row r = {
        a.inv_temp[row],      a.lse[row],    a.dlogp[row], a.dentropy ? a.dentropy[row] : 0, a.dentropy ? a.entropy[row] : 0,
        a.target[row] - a.lo, dz_sum(a, row)};
    const bool none = r.dlogp == 0 && r.dentropy == 0 && !dz_listed(a, row);
    const bool wide = a.cols % 8 == 0; /* the buffers are aligned, so rows are too */
    const float *raw = a.logits + row * a.cols;
    ACT *dz = (ACT *)a.dz + row * a.cols;
    float own[DZ_LIST]; /* of the list's entries: read before dz, which may be the logits, is written */
#pragma unroll
    for (int i = 0; i < DZ_LIST; i++) {
        const int64_t q = threadIdx.x + (int64_t)i * DZ_THREADS, j = q < a.n_list ? a.list_id[row * a.n_list + q] - a.lo : -1;
        own[i] = j >= 0 && j < a.cols
                     ? dz_under<CAP>(dz_at(raw[j], j, r) + a.dlist[row * a.n_list + q] * r.inv_temp, raw[j], a.softcap)
                     : 0;
    }
    if (a.n_list) __syncthreads();
    for (int64_t j = threadIdx.x; !wide && j < a.cols; j += DZ_THREADS)
        dz_store1(dz + j, none ? 0.0f : dz_under<CAP>(dz_at(raw[j], j, r), raw[j], a.softcap));
    for (int64_t j = (int64_t)threadIdx.x * 8; wide && j < a.cols; j += DZ_THREADS * 8) {
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (!none) {
            const float4 lo = *(const float4 *)(raw + j), hi = *(const float4 *)(raw + j + 4);
            v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w, v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = dz_under<CAP>(dz_at(v[i], j + i, r), v[i], a.softcap);
        }
        dz_store(dz + j, v);
    }
    if (a.n_list == 0 || none) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < DZ_LIST; i++) {
        const int64_t q = threadIdx.x + (int64_t)i * DZ_THREADS, j = q < a.n_list ? a.list_id[row * a.n_list + q] - a.lo : -1;
        if (j >= 0 && j < a.cols) dz_store1(dz + j, own[i]);
    }
}

/* A block's part of dx (f32): = for the first columns, then +=. */
static int gemm_dx(struct cuda *c, const struct lmhead_args *a, const struct head_block &b, const void *dz, float *dx) {
    struct cuda_gemm_args g = {};
    g.m = b.rows, g.n = b.cols, g.k = a->w.k;
    g.a = dz;
    g.in = a->w.dt, g.out_dt = DT_F32;
    g.op = CUDA_GEMM_DX;
    g.b = (const char *)a->w.data + (size_t)(b.lo * a->w.k) * dtype_size(a->w.dt);
    g.out = dx + b.row * a->w.k;
    g.add = b.lo > 0;
    return cuda_gemm(c, &g);
}

/* Its part of dw: the first block's rows write it, the others add. Where there are several and it adds to what is there,
 * `sums` (cols, k) takes it first. */
static int gemm_dw(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *out, const struct head_block &b,
                   const void *dz, float *sums) {
    float *const dw = (float *)out->dw.data + b.lo * a->w.k;
    struct cuda_gemm_args g = {};
    g.m = b.rows, g.n = b.cols, g.k = a->w.k;
    g.a = dz;
    g.in = a->w.dt, g.out_dt = DT_F32;
    g.op = CUDA_GEMM_DW;
    g.b = at_row(a->x, b.row);
    g.out = sums ? sums : dw;
    g.add = b.row > 0 || (out->add && !sums);
    TRY(cuda_gemm(cuda_of(d), &g));
    if (!sums || b.row + b.rows < a->x.dim[0]) return 0;
    return cuda_axpby(d, tensor_2d(dw, DT_F32, b.cols, a->w.k), 1, tensor_2d(sums, DT_F32, b.cols, a->w.k), 1);
}

/* dz of a block from stored logits. */
static int dz_from_logits(struct cuda *c, const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b,
                          float *logits, void *dz) {
    const int64_t row = b.row;
    const int64_t n_list = a->dlist.data ? a->dlist.dim[1] : 0;
    if (n_list > DZ_LIST * DZ_THREADS)
        FAIL(ERR_UNSUPPORTED, "dev op lmhead_bwd: a list of %lld entries; on a GPU at most %d", (long long)n_list,
             DZ_LIST * DZ_THREADS);
    TRY(gemm_logits(c, logits, a->x, a->w, b));
    const struct dz_args z = {logits,
                              dz,
                              b.cols,
                              b.lo,
                              (const float *)a->inv_temp.data + row,
                              (const float *)a->lse.data + row,
                              (const float *)g->dlogp.data + row,
                              g->dentropy.data ? (const float *)g->dentropy.data + row : NULL,
                              g->dentropy.data ? (const float *)a->entropy.data + row : NULL,
                              (const int32_t *)a->target.data + row,
                              n_list ? (const int32_t *)a->list_id.data + row * n_list : NULL,
                              n_list ? (const float *)a->dlist.data + row * n_list : NULL,
                              n_list,
                              a->w.softcap};
    const bool narrow = a->x.dt == DT_BF16, cap = a->w.softcap > 0;
    const auto kernel = narrow ? cap ? dz_kernel<__nv_bfloat16, true> : dz_kernel<__nv_bfloat16, false>
                        : cap ? dz_kernel<float, true>
                               : dz_kernel<float, false>;
    kernel<<<(unsigned)b.rows, DZ_THREADS, 0, c->stream>>>(z);
    CU_LAUNCHED();
    return 0;
}

bool cuda_keeps_logits(struct dev *d, struct weight w) {
    struct tensor x = {};
    x.dt = w.dt;
    w.data = NULL;
    return cuda_head_fused_takes(cuda_of(d), x, w);
}

/* dz of a block: from kept logits as far as there are some, else from logits made again. */
static int dz_fused(struct cuda *c, const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b,
                    int64_t kept, char *dz) {
    if (kept > 0) TRY(cuda_head_kept_dz(c, a, g, {b.row, kept, b.lo, b.cols}, dz));
    if (kept == b.rows) return 0;
    return cuda_head_fused_dz(c, a, g, {b.row + kept, b.rows - kept, b.lo, b.cols}, dz + (size_t)(kept * b.cols) * 2);
}

int cuda_lmhead_bwd(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *g) {
    struct cuda *c = cuda_of(d);
    const bool bf16 = a->x.dt == DT_BF16, fused = !a->dlist.data && cuda_head_fused_takes(c, a->x, a->w);
    bool kept = false; /* where the forward has written them */
    if (fused && a->kept.data) TRY(cuda_head_fused(c, a->x, a->w, &kept));
    const int64_t rows = a->x.dim[0], block = min64(rows, HEAD_ROWS), vocab = a->w.n, k = a->w.k;
    const int64_t widest = min64(fused ? DZ_COLS : BWD_COLS, vocab);
    const size_t logits_bytes = fused ? 0 : padded((size_t)(block * widest) * sizeof(float));
    const size_t dz_bytes = bf16 ? padded((size_t)(block * widest) * 2) : 0;
    const size_t dx_bytes = bf16 ? padded((size_t)(rows * k) * sizeof(float)) : 0;
    const size_t dw_bytes = g->dw.data && g->add && rows > block ? (size_t)(widest * k) * sizeof(float) : 0;
    char *p;
    TRY(cuda_scratch(c, CUDA_SCRATCH_HEAD, logits_bytes + dz_bytes + dx_bytes + dw_bytes, (void **)&p));
    float *logits = (float *)p, *sum_dx = bf16 ? (float *)(p + logits_bytes + dz_bytes) : (float *)g->dx.data;
    float *sum_dw = dw_bytes ? (float *)(p + logits_bytes + dz_bytes + dx_bytes) : NULL;
    void *dz = bf16 ? p + logits_bytes : p;
    for (int64_t lo = 0; lo < vocab; lo += widest)
        for (int64_t row = 0; row < rows; row += block) {
            const struct head_block b = {row, min64(block, rows - row), lo, min64(widest, vocab - lo)};
            if (fused) TRY(dz_fused(c, a, g, b, kept ? dev_kept_rows(a, b.row, b.rows) : 0, (char *)dz));
            else TRY(dz_from_logits(c, a, g, b, logits, dz));
            TRY(gemm_dx(c, a, b, dz, sum_dx));
            if (g->dw.data) TRY(gemm_dw(d, a, g, b, dz, sum_dw));
        }
    return bf16 ? cuda_cast(d, g->dx, tensor_2d(sum_dx, DT_F32, rows, k)) : 0;
}
