/* log_softmax.cuh - the log-softmax that the LM head and the sampler share.
 *
 * Statistics are of tiles of HEAD_TILE entries first, each summed in f32 relative to its own maximum; those of a
 * chunk's tiles (DEV_VOCAB_CHUNK) are merged in f32, those of the chunks in double, in chunk order.  The order within a tile is
 * that of the accumulators of a warpgroup's MMA (lm_head_sm90.cu), so that the fused head can sum in its
 * epilogue: columns 8 n + 2 q and 8 n + 2 q + 1 are lane q's, with n ascending by four.
 *
 * Invariant: all callers walk the same tiles and chunks through these functions, and every
 * operation that the compiler could fuse in one place and not in another is written as an
 * intrinsic that fixes its rounding; so the log-prob of a sampled id and that of a training
 * row have equal bits, whether logits are stored or not. */
#ifndef VERLC_DEV_CUDA_LOG_SOFTMAX_CUH
#define VERLC_DEV_CUDA_LOG_SOFTMAX_CUH

#include "device/cuda/context.cuh"

#include <math_constants.h>

enum {
    HEAD_THREADS = 256,
    HEAD_WARPS = HEAD_THREADS / 32,
    HEAD_PER_THREAD = DEV_VOCAB_CHUNK / HEAD_THREADS,
    HEAD_GROUP = CUDA_HEAD_GROUP, /* entries that one warp holds: its share of the chunk, contiguous */
    HEAD_TILE = CUDA_HEAD_TILE,
    HEAD_TILES = DEV_VOCAB_CHUNK / HEAD_TILE,
    HEAD_LANES = HEAD_TILE / HEAD_PER_THREAD, /* lanes that hold a tile */
};
static_assert(HEAD_GROUP * HEAD_WARPS == DEV_VOCAB_CHUNK && HEAD_GROUP == 2 * HEAD_TILE && HEAD_LANES == 16 &&
                  HEAD_TILES == HEAD_LANES,
              "a warp has two tiles");

static inline int64_t head_tiles(int64_t vocab) { return (vocab + HEAD_TILE - 1) / HEAD_TILE; }
static inline int64_t head_chunks(int64_t vocab) { return (vocab + DEV_VOCAB_CHUNK - 1) / DEV_VOCAB_CHUNK; }

/* ---- one tile ---- */

/* A difference of logits held above the point where its e^t is 0, so that 0 * t is 0. NaN stays. */
static __device__ __forceinline__ float head_clamp(float t) { return t < -104.0f ? -104.0f : t; }
static __device__ __forceinline__ float head_exp(float t) { return exp2_approx(__fmul_rn(t, 1.4426950408889634f)); }
/* What entries are relative to: their maximum, or 0 where all are -inf. */
static __device__ __forceinline__ float head_base(float max) { return max == -CUDART_INF_F ? 0.0f : max; }

/* Two chains of sums, of even and of odd columns. */
struct head_chains {
    float sum[2], sum_t[2], sum_sq[2];
};
template <bool MOMENTS> static __device__ __forceinline__ void head_add(head_chains &s, int odd, float z, float base) {
    const float t = __fsub_rn(z, base), e = head_exp(t);
    s.sum[odd] = __fadd_rn(s.sum[odd], e);
    if (!MOMENTS) return;
    s.sum_t[odd] = __fmaf_rn(e, head_clamp(t), s.sum_t[odd]);
    s.sum_sq[odd] = __fmaf_rn(e, e, s.sum_sq[odd]);
}
static __device__ __forceinline__ head_stats head_ends(const head_chains &s, float max) {
    return {max, __fadd_rn(s.sum[0], s.sum[1]), __fadd_rn(s.sum_t[0], s.sum_t[1]), __fadd_rn(s.sum_sq[0], s.sum_sq[1])};
}
/* The sums of both; max is a's. */
template <bool MOMENTS> static __device__ __forceinline__ head_stats head_plus(const head_stats &a, const head_stats &b) {
    head_stats r = {a.max, __fadd_rn(a.sum, b.sum), 0, 0};
    if (MOMENTS) r.sum_t = __fadd_rn(a.sum_t, b.sum_t), r.sum_sq = __fadd_rn(a.sum_sq, b.sum_sq);
    return r;
}
/* s plus that of lane ^ mask: the same bits in both. */
template <bool MOMENTS> static __device__ __forceinline__ head_stats head_plus_lane(const head_stats &s, int mask) {
    head_stats o = {s.max, __shfl_xor_sync(WARP_ALL, s.sum, mask), 0, 0};
    if (MOMENTS) {
        o.sum_t = __shfl_xor_sync(WARP_ALL, s.sum_t, mask);
        o.sum_sq = __shfl_xor_sync(WARP_ALL, s.sum_sq, mask);
    }
    return head_plus<MOMENTS>(s, o);
}
/* A tile's statistics relative to its chunk's maximum. They are added pairwise: neighbours, then pairs of them, ... */
template <bool MOMENTS> static __device__ __forceinline__ head_stats head_tile_part(const head_stats &tile, float max) {
    const float d = __fsub_rn(tile.max, head_base(max)), w = head_exp(d);
    head_stats r = {max, __fmul_rn(w, tile.sum), 0, 0};
    if (MOMENTS) { /* sum of w e (t + d) */
        r.sum_t = __fmul_rn(w, __fmaf_rn(head_clamp(d), tile.sum, tile.sum_t));
        r.sum_sq = __fmul_rn(__fmul_rn(w, w), tile.sum_sq);
    }
    return r;
}

/* ---- one chunk; called by all HEAD_THREADS threads ---- */

/* Index in the chunk of this thread's i-th value: pairs, so that the 16 lanes of a tile read 128 bytes at once. */
static __device__ __forceinline__ int head_at(int i) {
    const int tile = (int)threadIdx.x / HEAD_LANES, lane = (int)threadIdx.x % HEAD_LANES;
    return tile * HEAD_TILE + i / 2 * 32 + lane * 2 + i % 2;
}

/* v = raw[0, n), n <= DEV_VOCAB_CHUNK; -inf beyond. */
static __device__ __forceinline__ void head_load(float (&v)[HEAD_PER_THREAD], const float *raw, int n) {
    const bool wide = ((uintptr_t)raw & 7) == 0;
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i += 2) {
        const int at = head_at(i);
        if (wide && at + 2 <= n) {
            const float2 f = *(const float2 *)(raw + at);
            v[i] = f.x, v[i + 1] = f.y;
        } else {
#pragma unroll
            for (int c = 0; c < 2; c++) v[i + c] = at + c < n ? raw[at + c] : -CUDART_INF_F;
        }
    }
}

/* v = v * by inside the chunk, -inf beyond. */
static __device__ __forceinline__ void head_scale(float (&v)[HEAD_PER_THREAD], int n, float by) {
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i++) v[i] = head_at(i) < n ? __fmul_rn(v[i], by) : -CUDART_INF_F;
}

struct head_shared {
    float max[HEAD_WARPS];
    head_stats tile[HEAD_TILES];
};

/* Statistics of the chunk whose z the block holds; the result is the same in every thread, and
 * s->max the maxima of the warps' groups until the next call. NaN entries do not enter max and make
 * the sums NaN; a chunk of -inf has max -inf and sum 0. */
template <bool MOMENTS>
static __device__ __forceinline__ head_stats head_chunk_stats(const float (&z)[HEAD_PER_THREAD], head_shared *s) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float max = -CUDART_INF_F; /* fmaxf passes over NaN */
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i++) max = fmaxf(max, z[i]);
#pragma unroll
    for (int d = HEAD_LANES / 2; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, d));
    head_chains chains = {};
#pragma unroll
    for (int i = 0; i < HEAD_PER_THREAD; i++) head_add<MOMENTS>(chains, i % 2, z[i], head_base(max));
    head_stats r = head_ends(chains, max);
    r = head_plus_lane<MOMENTS>(r, 4);
    r = head_plus_lane<MOMENTS>(r, 8);
    r = head_plus_lane<MOMENTS>(r, 1);
    r = head_plus_lane<MOMENTS>(r, 2);
    const float both = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, HEAD_LANES));
    __syncthreads(); /* all have read what the last call left in s */
    if (lane == 0) s->max[warp] = both;
    if (lane % HEAD_LANES == 0) s->tile[threadIdx.x / HEAD_LANES] = r;
    __syncthreads();
    const head_stats tile = s->tile[lane % HEAD_LANES];
    max = tile.max;
#pragma unroll
    for (int d = HEAD_LANES / 2; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, d));
    r = head_tile_part<MOMENTS>(tile, max);
#pragma unroll
    for (int d = 1; d < HEAD_LANES; d *= 2) r = head_plus_lane<MOMENTS>(r, d);
    return r;
}

/* ---- a chunk from its tiles, as head_chunk_stats merges them ---- */

/* v: those of a row from tile `first` on, of (n_tiles, rows); empty ones beyond. */
static __device__ __forceinline__ void head_load_tiles(head_stats (&v)[HEAD_TILES], const head_stats *tiles, int64_t first,
                                                       int64_t n_tiles, int64_t rows, int64_t row) {
#pragma unroll
    for (int i = 0; i < HEAD_TILES; i++) {
        const float4 none = make_float4(-CUDART_INF_F, 0, 0, 0);
        const float4 t = first + i < n_tiles ? *(const float4 *)&tiles[(first + i) * rows + row] : none;
        v[i] = {t.x, t.y, t.z, t.w};
    }
}
/* The chunk's statistics; v is overwritten. */
template <bool MOMENTS> static __device__ __forceinline__ head_stats head_merge_tiles(head_stats (&v)[HEAD_TILES]) {
    float max = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < HEAD_TILES; i++) max = fmaxf(max, v[i].max);
#pragma unroll
    for (int i = 0; i < HEAD_TILES; i++) v[i] = head_tile_part<MOMENTS>(v[i], max);
#pragma unroll
    for (int step = 1; step < HEAD_TILES; step *= 2)
#pragma unroll
        for (int i = 0; i < HEAD_TILES; i += 2 * step) v[i] = head_plus<MOMENTS>(v[i], v[i + step]);
    return {max, v[0].sum, v[0].sum_t, v[0].sum_sq};
}

/* ---- merging chunks ---- */

/* A chunk's part of sum exp(z - max) of the row; 0 for one that holds nothing but -inf. The row's sum
 * is that of its chunks' weights, added in chunk order from 0 by __dadd_rn. */
static __device__ __forceinline__ double head_weight(const head_stats &c, float max) {
    return c.sum == 0 ? 0.0 : __dmul_rn(exp((double)c.max - (double)max), (double)c.sum);
}
static __device__ __forceinline__ double head_lse(float max, double sum) { return __dadd_rn((double)max, log(sum)); }
/* The log-prob of an entry from its z = raw * inv_temp, rounded to f32. */
static __device__ __forceinline__ float head_logp(float z, double lse) { return (float)__dadd_rn((double)z, -lse); }

/* ---- lm_head_sm90.cu: the head's GEMM with fused epilogues, no logits in memory ---- */

/* lm_head.cu: bytes of CUDA_SCRATCH_HEAD in which a head of this shape is checked. */
size_t cuda_head_check_bytes(int64_t k, int64_t vocab);
/* lm_head.cu: whether the fused kernel serves this head, that is, gives the bits of cuda_logits. Checks a shape at its first
 * call, which waits. */
int cuda_head_fused(struct cuda *c, struct tensor x, struct weight w, bool *yes);
/* Whether the fused kernel takes this device and this head. */
bool cuda_head_fused_takes(const struct cuda *c, struct tensor x, struct weight w);
struct head_block { /* of the logits: rows [row, row + rows), entries [lo, lo + cols) of the vocabulary */
    int64_t row, rows, lo, cols;
};
/* Statistics of the block, all entries, by tile: tiles (head_tiles(vocabulary), rows), moments when asked; and raw_target (rows),
 * the targets' raw logits, NaN for a target outside of the vocabulary. Writes a->kept. */
int cuda_head_fused_stats(struct cuda *c, const struct lmhead_args *a, const struct head_block &b, bool moments, head_stats *tiles,
                          float *raw_target);
/* For the sampler: the statistics, without moments, of all rows of x, and the raw logits (rows, vocabulary).
 * pre: cuda_head_fused says so. inv_temp (rows). */
int cuda_head_fused_logits(struct cuda *c, struct tensor x, struct weight w, const float *inv_temp, float *logits,
                           head_stats *tiles);
/* dz (rows, cols) bf16 of the block, cols a multiple of 8. */
int cuda_head_fused_dz(struct cuda *c, const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b,
                       void *dz);
/* lm_head_kept.cu: the same of kept logits, which all rows of the block have. b.lo is a multiple of DEV_KEPT_COLS. */
int cuda_head_kept_dz(struct cuda *c, const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b,
                      void *dz);

#endif
