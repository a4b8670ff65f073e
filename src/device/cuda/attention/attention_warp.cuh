/* attention_warp.cuh - 16 packed rows of a warp in attention's forward: their state, the online softmax over a tile
 * of scores, the mask, and the store.  Q.K^T and P.V are the kernels' own.
 *
 * Scores and accumulators have the layout of mma.m16n8k16 (device/cuda/ptx.cuh): a lane has columns 2t and 2t + 1 of each 8
 * of rows g and g + 8; a warpgroup's accumulators are those of its four warps.
 * Invariant: the operations of a row are those of online_softmax.cuh, in the order that attention_fwd.cu lists. */
#ifndef VERLC_DEV_CUDA_ATTENTION_WARP_CUH
#define VERLC_DEV_CUDA_ATTENTION_WARP_CUH

#include "device/cuda/attention/online_softmax.cuh"

/* State of a lane's two rows: running maximum, sums and output accumulators. */
template <int SIZE> struct row_pair { float m[2], l[2][4], acc[SIZE / 8][4]; };

/* Online softmax over a tile with scores s: p are its probabilities as A fragments; rescales maximum, sums and acc. */
template <int SIZE>
static __device__ __forceinline__ void softmax_tile(struct row_pair<SIZE> &x, uint32_t (&p)[4][4], float (&s)[8][4],
                                                    float scale_log2) {
    float correction[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < 8; n++) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        const float base = row_rescale(&x.m[i], quad_max(top), scale_log2, &correction[i]);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            s[n][2 * i] = row_p(s[n][2 * i], scale_log2, base);
            s[n][2 * i + 1] = row_p(s[n][2 * i + 1], scale_log2, base);
        }
#pragma unroll
        for (int w = 0; w < 4; w++)
            x.l[i][w] = row_sum(x.l[i][w], correction[i],
                                row_quarter(s[2 * w][2 * i], s[2 * w][2 * i + 1], s[2 * w + 1][2 * i], s[2 * w + 1][2 * i + 1]));
    }
#pragma unroll
    for (int n = 0; n < SIZE / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) x.acc[n][j] = __fmul_rn(x.acc[n][j], correction[j / 2]);
    pack_fragments<DEV_KEY_TILE>(p, s);
}

/* The mask: scores of keys that these two rows, at positions p, do not see become -inf; N groups of 8 keys from key j. */
template <int N>
static __device__ __forceinline__ void mask_scores(const struct cuda_attn &a, float (&s)[N][4], const int (&p)[2], int j) {
    const int from[2] = {first_key(a, p[0]), first_key(a, p[1])};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int key = j + n * 8 + (int)threadIdx.x % 4 * 2 + e % 2;
            if (key > p[e / 2] || key < from[e / 2]) s[n][e] = -INFINITY;
        }
}

template <int SIZE>
static __device__ __forceinline__ void rows_store(const struct cuda_attn &a, const struct seq_rows &s, int head, int r,
                                                  struct row_pair<SIZE> &x) {
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int w = 0; w < 4; w++) x.l[i][w] = quad_sum(x.l[i][w]);
        const float l = __fadd_rn(__fadd_rn(x.l[i][0], x.l[i][1]), __fadd_rn(x.l[i][2], x.l[i][3])), inv = __frcp_rn(l);
        if (r + 8 * i >= s.packed) continue;
        const int64_t at = packed_index(a, s, head, r + 8 * i);
        uint16_t *out = (uint16_t *)a.out + at * a.dim;
#pragma unroll
        for (int n = 0; n < SIZE / 8; n++)
            if (n * 8 < a.dim) *(uint32_t *)(out + n * 8 + 2 * t) = row_out(x.acc[n][2 * i], x.acc[n][2 * i + 1], inv);
        if (a.lse && t == 0) a.lse[at] = row_lse(x.m[i], l);
    }
}

#endif
