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
/* The semaphore of a tile of keys. */
static __device__ __forceinline__ int *bwd_sm90_flag(const struct cuda_attn &a, const struct seq_rows &s, int *flags, int tile,
                                                     int head) {
    return flags + (s.first / TILE + s.seq + tile) * a.n_kv_heads + head;
}

/* attention_bwd_sm90_256.cu: heads of 256. flags: 0 before. */
int cuda_attn_bwd_sm90_256(struct cuda *c, const struct attn_args *a, struct cuda_attn p, int *flags);

#endif
