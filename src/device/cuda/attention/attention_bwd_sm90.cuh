/* attention_bwd_sm90.cuh - what the two kernels of attention's backward on Hopper share: tiles of 64 x 64 scores by WGMMA, their
 * mask, and which of them a lane has.
 *
 * A tile's operands are 64 rows in panels of wgmma.cuh, one after the other.
 * Invariant: functions of a thread are given its place in its warpgroup's tile by threadIdx.x alone. */
#ifndef VERLC_DEV_CUDA_ATTENTION_BWD_SM90_CUH
#define VERLC_DEV_CUDA_ATTENTION_BWD_SM90_CUH

#include "device/cuda/attention/attention.cuh"
#include "device/cuda/wgmma.cuh"

enum { TILE = 64, WARPGROUP = 128, PANEL = TILE * PANEL_ROW };

/* d (64, 64) = A . B^T over D columns. */
template <int D> static __device__ __forceinline__ void wgmma_abt(float (&d)[8][4], uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const uint32_t at = (uint32_t)(k / 4 * PANEL + k % 4 * 32);
        wgmma_m64n64_ss(d, panel_desc(a) + (at >> 4), panel_desc(b) + (at >> 4), k > 0);
    }
}

static __device__ __forceinline__ bool sees(const struct cuda_attn &a, int pos, int key) {
    return key <= pos && (a.window == 0 || pos - key < a.window);
}
/* Whether each of 64 positions from pos on sees each of 64 keys from key on. */
static __device__ __forceinline__ bool all_see(const struct cuda_attn &a, int pos, int key) {
    return key + TILE - 1 <= pos && (a.window == 0 || pos + TILE - 1 - key < a.window);
}
/* Column of the lane's pair of accumulators of group n of 8 columns. */
static __device__ __forceinline__ int pair_col(int n) { return n * 8 + (int)threadIdx.x % 4 * 2; }
/* First of the lane's two rows; the second is 8 further. */
static __device__ __forceinline__ int lane_row() { return (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4; }
/* The mask: scores that do not count become -inf, so that p is 0; rows of the tile are keys, or positions. */
template <bool KEYS> static __device__ __forceinline__ void mask(const struct cuda_attn &a, float (&s)[8][4], int pos, int key) {
    const int row = lane_row(), col = pair_col(0);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int r = row + e / 2 * 8, c = n * 8 + col + e % 2;
            if (!sees(a, pos + (KEYS ? c : r), key + (KEYS ? r : c))) s[n][e] = -INFINITY;
        }
}

/* Bytes of the semaphores of dk and dv: a sequence of n rows has at most n / TILE + 1 tiles. */
static inline size_t bwd_sm90_flags(const struct attn_args *a) {
    return (size_t)((a->q.dim[0] / TILE + a->seqs.n + 1) * a->n_kv_heads) * sizeof(int);
}

/* What a dk/dv block has. Blocks by tile of keys, the first, which most rows see, before the others; then half, sequence, KV head.
 * The rows that see a tile, `tiles` of them for each head of the group, are divided into two halves, for load balance. The second
 * half adds its sums to the first's, whose block has a lower number and so was scheduled before. */
struct keys_walk {
    struct seq_rows s;
    int64_t key_first; /* row of its first key */
    int key, head, half, end, tiles, first, left;
};
/* false: there is nothing to do. */
static __device__ __forceinline__ bool keys_walk_of(struct keys_walk &w, const struct cuda_attn &a, int block, int n_seqs) {
    const int per_tile = n_seqs * a.n_kv_heads, rest = block % per_tile, tile = block / per_tile / 2;
    w.head = rest % a.n_kv_heads;
    w.half = block / per_tile % 2;
    w.key = tile * TILE;
    w.key_first = (int64_t)w.head * a.block_len + a.kv_start[rest / a.n_kv_heads] + w.key; /* loaded with s */
    w.s = seq_rows_of(a, rest / a.n_kv_heads);
    if (w.key >= w.s.n) return false;
    w.end = a.window > 0 ? min(w.s.n, w.key + TILE - 1 + a.window) : w.s.n; /* of the positions that see a key */
    w.tiles = (w.end - w.key + TILE - 1) / TILE;
    const int steps = w.tiles * a.group;
    w.first = w.half ? steps - steps / 2 : 0;
    w.left = w.half ? steps / 2 : steps - steps / 2;
    return w.left > 0;
}
/* The semaphore of the tile; flags: 0 before. */
static __device__ __forceinline__ volatile int *keys_walk_flag(const struct keys_walk &w, const struct cuda_attn &a, int *flags) {
    return flags + (w.s.first / TILE + w.s.seq + w.key / TILE) * a.n_kv_heads + w.head;
}
/* Before and behind a block's stores, by all its threads. */
static __device__ __forceinline__ void keys_walk_wait(const struct keys_walk &w, volatile int *done) {
    if (!w.half) return;
    if (threadIdx.x == 0)
        while (*done == 0) __nanosleep(64);
    __syncthreads();
    __threadfence();
}
static __device__ __forceinline__ void keys_walk_signal(const struct keys_walk &w, volatile int *done) {
    if (w.half) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *done = 1;
}
/* sum(g, e), the lane's accumulators of group g of 8 columns, times factor, to its two keys; the second half adds. */
template <int D, class SUM>
static __device__ __forceinline__ void store_keys(const struct keys_walk &w, float *to, float factor, const SUM &sum) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int k = lane_row() + 8 * i;
        if (k >= w.s.n - w.key) continue;
        float *row = to + (w.key_first + k) * D;
#pragma unroll
        for (int g = 0; g < D / 8; g++) {
            float2 *at = (float2 *)(row + pair_col(g));
            float2 v = make_float2(__fmul_rn(sum(g, 2 * i), factor), __fmul_rn(sum(g, 2 * i + 1), factor));
            if (w.half) {
                const float2 old = __ldcg(at); /* another multiprocessor wrote it: past L1 */
                v.x = __fadd_rn(old.x, v.x), v.y = __fadd_rn(old.y, v.y);
            }
            *at = v;
        }
    }
}

/* attention_bwd_sm90_256.cu: heads of 256. flags: 0 before. */
int cuda_attn_bwd_sm90_256(struct cuda *c, const struct attn_args *a, struct cuda_attn p, int *flags);

#endif
