/* attention.cuh - what attention's forward, decode and backward kernels share: their parameters, where rows and keys are,
 * tiles in shared memory, MMA of tiles.
 *
 * GQA: the query heads of one KV head are taken together.  "Packed row" r of a sequence is query row r / group
 * with head r % group of the group, so that one tile of rows reads its keys once for all of them.  A packed row is D
 * contiguous elements.
 *
 * Three classes of shapes, chosen by dtype, head size, sign of the scale and whether values are the keys alone: bf16
 * with a head size that is a multiple of 8 up to 256 runs on tensor cores, with the head
 * size padded with zeros to one of 32, 64, 96, 128, 192, 256 (a zero term changes no
 * sum); up to 576 with values that are the keys of one head likewise (attention_latent.cu); all else runs on the plain kernels.
 * Invariant: rows of a tile are SIZE bf16 and 16 bytes of padding, so that
 * the 8 rows of an ldmatrix lie in different banks and every row is 16-aligned. */
#ifndef VERLC_DEV_CUDA_ATTENTION_CUH
#define VERLC_DEV_CUDA_ATTENTION_CUH

#include "device/cuda/context.cuh"
#include "device/cuda/ptx.cuh"

#include <math.h>

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

enum { ATTN_PLAIN_WARPS = 4, ATTN_PLAIN_COLS = 256 }; /* plain kernels: warps of a block, columns that a warp sums */

/* Bytes between rows of a tile. */
static constexpr __host__ __device__ int tile_stride(int size) { return size * 2 + 16; }

/* Parameter of every kernel of attention, by value. */
struct cuda_attn {
    const void *q, *k, *v;
    void *out;
    float *lse;       /* optional */
    const void *dout; /* backward: these six */
    void *dq;
    float *dk, *dv;
    float2 *stat;                                           /* (T, Hq): lse * log2(e), dout . out */
    const int32_t *q_start, *pos0, *block_table, *kv_start; /* one of the last two is NULL */
    int max_blocks, n_kv_blocks, block_len, block_shift;    /* block_shift: log2(block_len), -1 if there is none */
    int n_q_heads, n_kv_heads, group, dim, window;
    int n_tiles;             /* blocks of one sequence (and head) along blockIdx.x */
    bool shared_new_keys;    /* attn_seqs' */
    int decode_rows;         /* forward: sequences of up to so many packed rows are the decode kernel's; -1: all, 0: none */
    float scale, scale_log2; /* scale * log2(e) */
    float softcap;           /* 0: none; the kernels' instances CAP */
};

/* Rows of sequence `seq`: `first` is its first row of q. */
struct seq_rows {
    int seq, first, n, pos0, packed; /* packed = n * group */
};
static __device__ __forceinline__ struct seq_rows seq_rows_of(const struct cuda_attn &a, int seq) {
    struct seq_rows s;
    s.seq = seq;
    s.first = a.q_start[seq];
    s.n = a.q_start[seq + 1] - s.first;
    s.pos0 = a.pos0[seq];
    s.packed = s.n * a.group;
    return s;
}

/* Where packed row r of kv head `head` is: index into (T, Hq). */
static __device__ __forceinline__ int64_t packed_index(const struct cuda_attn &a, const struct seq_rows &s, int head, int r) {
    const int p = r / a.group;
    return (int64_t)(s.first + p) * a.n_q_heads + head * a.group + (r - p * a.group);
}

/* First key that a query at position p sees. */
static __device__ __forceinline__ int first_key(const struct cuda_attn &a, int p) {
    return a.window > 0 && p >= a.window ? p - a.window + 1 : 0;
}

/* Index of key j's row among all rows (of D) of kv.k: fits an int, even times D / 8, attn_params has checked. */
static __device__ __forceinline__ int key_row(const struct cuda_attn &a, int seq, int head, int j) {
    const int at = a.block_table ? j : a.kv_start[seq] + j;
    int kv_block = 0, off = at;
    if (a.block_table || a.n_kv_blocks > 1) {
        kv_block = a.block_shift >= 0 ? at >> a.block_shift : at / a.block_len;
        off = at - kv_block * a.block_len;
    }
    if (a.block_table) kv_block = a.block_table[(int64_t)seq * a.max_blocks + kv_block];
    return (kv_block * a.n_kv_heads + head) * a.block_len + off;
}

/* ---- tiles ---- */

/* The i-th 16-byte chunk that this one of NT threads copies of a tile: columns [col, col + 8) of a row. */
struct chunk {
    int row, col;
};
template <int SIZE, int NT> static __device__ __forceinline__ struct chunk chunk_of(int i) {
    constexpr unsigned CHUNKS = SIZE / 8;
    if (NT % CHUNKS == 0) /* always the same columns */
        return {(int)(threadIdx.x / CHUNKS) + i * (int)(NT / CHUNKS), (int)(threadIdx.x % CHUNKS * 8)};
    const unsigned at = threadIdx.x + (unsigned)i * NT;
    return {(int)(at / CHUNKS), (int)(at % CHUNKS * 8)};
}
/* How many of them a thread copies. */
template <int SIZE, int N, int NT> static constexpr __host__ __device__ int chunks_of() {
    static_assert(N * SIZE / 8 % NT == 0, "every thread copies equally often");
    return N * SIZE / 8 / NT;
}
/* A chunk into two tiles, at a distance of N rows: row `row` (of a.dim elements) of x and of y, zeros when it is negative. */
template <int SIZE, int N>
static __device__ __forceinline__ void copy_chunk(const struct cuda_attn &a, uint32_t to, struct chunk at, const void *x,
                                                  const void *y, int64_t row) {
    const bool take = row >= 0 && at.col < a.dim;
    const int64_t from = take ? (row * a.dim + at.col) * 2 : 0;
    to += (uint32_t)(at.row * tile_stride(SIZE) + at.col * 2);
    cp_async16(to, (const char *)x + from, take);
    cp_async16(to + N * tile_stride(SIZE), (const char *)y + from, take);
}

/* s (16, N) += A . B^T: A 16 rows and B N rows of SIZE at these tile addresses. */
template <int SIZE, int N> static __device__ __forceinline__ void mma_abt(float (&s)[N / 8][4], uint32_t a, uint32_t b) {
    const int lane = (int)threadIdx.x % 32;
    a += (lane % 16) * tile_stride(SIZE) + lane / 16 * 16;
    b += (lane % 8 + lane / 16 * 8) * tile_stride(SIZE) + lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < SIZE / 16; k++) {
        uint32_t x[4], y[4];
        ldmatrix_x4(x, a + k * 32);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            ldmatrix_x4(y, b + n * 16 * tile_stride(SIZE) + k * 32);
            mma_bf16(s[2 * n], x, y[0], y[1]);
            mma_bf16(s[2 * n + 1], x, y[2], y[3]);
        }
    }
}

/* acc (16, COLS) += P . B: P 16 rows of N as A fragments, B N rows of SIZE of which COLS columns from this address. */
template <int SIZE, int COLS, int N>
static __device__ __forceinline__ void mma_pb(float (&acc)[COLS / 8][4], const uint32_t (&p)[N / 16][4], uint32_t b) {
    const int lane = (int)threadIdx.x % 32;
    b += (lane % 16) * tile_stride(SIZE) + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
        for (int n = 0; n < COLS / 16; n++) {
            uint32_t y[4];
            ldmatrix_x4_trans(y, b + k * 16 * tile_stride(SIZE) + n * 32);
            mma_bf16(acc[2 * n], p[k], y[0], y[1]);
            mma_bf16(acc[2 * n + 1], p[k], y[2], y[3]);
        }
}

/* Accumulators (16, N), rounded to bf16, as A fragments of the next MMA. */
template <int N> static __device__ __forceinline__ void pack_fragments(uint32_t (&p)[N / 16][4], const float (&s)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        p[k][0] = pack_bf16(s[2 * k][0], s[2 * k][1]);
        p[k][1] = pack_bf16(s[2 * k][2], s[2 * k][3]);
        p[k][2] = pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]);
        p[k][3] = pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3]);
    }
}

template <int N> static __device__ __forceinline__ void fill_zero(float (&s)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[i][j] = 0;
}

/* ---- softcap ---- */

/* tanh to an absolute error of some 1e-7; NaN stays. */
static __device__ __forceinline__ float soft_tanh(float x) {
    const float e = exp2_approx(__fmul_rn(x < -20.0f ? -20.0f : x, -2.0f * LOG2_E));
    return __fdiv_rn(__fsub_rn(1.0f, e), __fadd_rn(1.0f, e));
}
/* Raw scores become what is under the softcap times scale. */
template <int N> static __device__ __forceinline__ void cap_scores(const struct cuda_attn &a, float (&s)[N][4]) {
    const float in = __fdiv_rn(a.scale, a.softcap), out = __fdiv_rn(a.softcap, a.scale);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = __fmul_rn(soft_tanh(__fmul_rn(s[n][e], in)), out);
}
/* The softcap's slope at scores that cap_scores has made: what ds is multiplied by. */
template <int N>
static __device__ __forceinline__ void cap_slopes(const struct cuda_attn &a, float (&to)[N][4], const float (&s)[N][4]) {
    const float in = __fdiv_rn(a.scale, a.softcap);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float t = __fmul_rn(s[n][e], in);
            to[n][e] = __fsub_rn(1.0f, __fmul_rn(t, t));
        }
}

/* ---- plain kernels: elements of either dtype ---- */

struct bf16_bits {
    uint16_t bits;
};
static __device__ __forceinline__ float plain_get(const float *p, int64_t i) { return p[i]; }
static __device__ __forceinline__ float plain_get(const bf16_bits *p, int64_t i) {
    return __uint_as_float((uint32_t)p[i].bits << 16);
}
static __device__ __forceinline__ void plain_put(float *p, int64_t i, float v) { p[i] = v; }
static __device__ __forceinline__ void plain_put(bf16_bits *p, int64_t i, float v) { p[i].bits = (uint16_t)pack_bf16(v, v); }

/* Sum of x[i] y[i], i ascending. */
template <class T> static __device__ __forceinline__ float plain_dot(const T *x, const T *y, int n) {
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < n; i++) sum = __fmaf_rn(plain_get(x, i), plain_get(y, i), sum);
    return sum;
}

/* A scaled score under the softcap; *slope: its derivative. */
static __device__ __forceinline__ float plain_capped(const struct cuda_attn &a, float s, float *slope) {
    const float t = a.softcap > 0 ? tanhf(__fdiv_rn(s, a.softcap)) : 0.0f;
    *slope = __fsub_rn(1.0f, __fmul_rn(t, t));
    return a.softcap > 0 ? __fmul_rn(a.softcap, t) : s;
}

/* ---- host ---- */

/* attention_bwd_sm90.cu: dq, dk and dv from p.stat. *ran: false, it does not take this device or shape.
 * scratch: cuda_attn_bwd_sm90_bytes, zeroed. */
size_t cuda_attn_bwd_sm90_bytes(const struct cuda *c, const struct attn_args *a, const struct cuda_attn &p);
int cuda_attn_bwd_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, void *scratch, bool *ran);

/* attention_fwd_sm90.cu: the forward of packed sequences (not a paged KV cache). *ran: false, it does not take this
 * device, shape or batch. */
int cuda_attn_fwd_sm90(struct cuda *c, const struct attn_args *a, struct cuda_attn p, bool *ran);

/* attention_decode_sm90.cu: decode attention. *ran: false, it does not take this device, shape or batch. */
int cuda_attn_decode_sm90(struct cuda *c, const struct attn_args *a, const struct cuda_attn &p, bool *ran);

/* attention_latent.cu: both of a shape that attn_is_latent; backward fills p.stat. */
int cuda_attn_fwd_latent(struct cuda *c, const struct attn_args *a, struct cuda_attn p);
int cuda_attn_bwd_latent(struct cuda *c, const struct attn_args *a, struct cuda_attn p);

/* Whether the kernels of values that are the keys take this shape. */
static inline bool attn_is_latent(const struct attn_args *a) {
    return a->q.dt == DT_BF16 && a->kv.v.data == a->kv.k.data && a->n_kv_heads == 1 && a->head_dim > 256 && a->head_dim <= 576 &&
           a->head_dim % 8 == 0 && a->scale > 0 && a->softcap == 0;
}
/* Whether tensor-core kernels take this shape. */
static inline bool attn_on_tensor_cores(const struct attn_args *a) {
    return attn_is_latent(a) || (a->q.dt == DT_BF16 && a->head_dim % 8 == 0 && a->head_dim <= 256 && a->scale > 0);
}

/* Everything but the members of the backward. */
static inline int attn_params(const char *op, const struct attn_args *a, struct cuda_attn *p) {
    const struct attn_seqs *s = &a->seqs;
    const struct tensor k = a->kv.k;
    if (k.dim[0] * k.dim[1] > INT32_MAX / k.dim[2] / ((a->head_dim + 7) / 8) || a->q.dim[0] * a->n_q_heads > INT32_MAX ||
        s->max_q * a->n_q_heads > INT32_MAX - 1024)
        FAIL(ERR_INVAL, "dev op %s: %lld KV blocks of %lld keys and %lld rows of %lld heads: over 2^31 rows or chunks of keys", op,
             (long long)k.dim[0], (long long)k.dim[2], (long long)a->q.dim[0], (long long)a->n_q_heads);
    if (attn_on_tensor_cores(a) &&
        (((uintptr_t)a->q.data | (uintptr_t)k.data | (uintptr_t)a->kv.v.data | (uintptr_t)a->out.data) & 15))
        FAIL(ERR_INVAL, "dev op %s: q, k, v and out must be aligned to 16 bytes", op);
    *p = cuda_attn{};
    p->q = a->q.data;
    p->k = k.data;
    p->v = a->kv.v.data;
    p->out = a->out.data;
    p->lse = (float *)a->lse.data;
    p->q_start = (const int32_t *)s->q_start.data;
    p->pos0 = (const int32_t *)s->pos0.data;
    p->block_table = (const int32_t *)s->block_table.data;
    p->kv_start = (const int32_t *)s->kv_start.data;
    p->max_blocks = p->block_table ? (int)s->block_table.dim[1] : 0;
    p->n_kv_blocks = (int)k.dim[0];
    p->block_len = (int)k.dim[2];
    p->block_shift = -1;
    for (int i = 0; i < 31; i++)
        if (k.dim[2] == (int64_t)1 << i) p->block_shift = i;
    p->n_q_heads = (int)a->n_q_heads;
    p->n_kv_heads = (int)a->n_kv_heads;
    p->group = (int)(a->n_q_heads / a->n_kv_heads);
    p->dim = (int)a->head_dim;
    p->window = a->window > INT32_MAX ? 0 : (int)a->window;
    p->shared_new_keys = s->shared_new_keys;
    p->scale = a->scale;
    p->softcap = a->softcap;
    p->scale_log2 = (float)((double)a->scale * 1.4426950408889634);
    return 0;
}

/* Blocks of `rows` packed rows that the longest sequence of the call needs. */
static inline int attn_tiles(const struct attn_args *a, int64_t rows) {
    const int64_t longest = a->seqs.max_q * (a->n_q_heads / a->n_kv_heads);
    return (int)((longest + rows - 1) / rows);
}

/* Of the longest sequence's keys, in backward. */
static inline int attn_key_tiles(const struct attn_args *a, int64_t keys) {
    const int64_t longest = a->seqs.max_kv > a->seqs.max_q ? a->seqs.max_kv : a->seqs.max_q;
    return (int)((longest + keys - 1) / keys);
}

struct attn_grid { /* (seqs * p.n_tiles, KV heads, parts) blocks */
    int64_t n_seqs;
    int parts, threads;
    size_t smem; /* bytes of a block */
    bool pdl;    /* the kernel waits as cuda_launch_pdl asks */
};
/* Queues kernel(p). */
static inline int attn_launch(struct cuda *c, void (*kernel)(struct cuda_attn), const struct attn_grid &g, struct cuda_attn p) {
    const int64_t n = g.n_seqs * p.n_tiles;
    if (n == 0) return 0;
    if (n > INT32_MAX || p.n_kv_heads > 65535)
        FAIL(ERR_INVAL, "attention on the GPU: %lld sequences of %d tiles of rows, %d heads: too many for one call",
             (long long)g.n_seqs, p.n_tiles, p.n_kv_heads);
    if (g.smem > c->smem_max)
        FAIL(ERR_UNSUPPORTED, "attention with heads of %d needs %zu bytes of shared memory, this GPU has %zu a block", p.dim,
             g.smem, c->smem_max);
    if (g.smem > 48 * 1024)
        CU_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)g.smem));
    void *args[] = {&p};
    const dim3 grid((unsigned)n, (unsigned)p.n_kv_heads, (unsigned)g.parts);
    if (g.pdl) CU_TRY(cuda_launch_pdl(c, kernel, grid, g.threads, g.smem, p));
    else CU_TRY(cudaLaunchKernel((const void *)kernel, grid, dim3((unsigned)g.threads), args, g.smem, c->stream));
    return 0;
}
/* Queues kernel(args), which waits as cuda_launch_pdl asks; its blocks are numbers of one dimension. */
template <class... P, class... A>
static inline int attn_launch_blocks(struct cuda *c, void (*kernel)(P...), int64_t blocks, int threads, size_t smem, A... args) {
    if (blocks == 0) return 0;
    if (blocks > INT32_MAX) FAIL(ERR_INVAL, "attention on the GPU: %lld blocks: too many for one call", (long long)blocks);
    CU_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem));
    CU_TRY(cuda_launch_pdl(c, kernel, dim3((unsigned)blocks), threads, smem, args...));
    return 0;
}

#endif
