/* kept_logits.cuh - the gradient of the logits from a warp's accumulators, and these in memory between forward and backward.
 *
 * Kept logits are tiles of DEV_KEPT_ROWS x DEV_KEPT_COLS, rows outermost: of each 16 rows the accumulators of a warpgroup's MMA,
 * 32 to a lane, as float4s that the lanes have side by side. So both passes move 512 bytes a warp and instruction.
 *
 * Invariant: dz has the bits of the same expression whether logits come from the GEMM or from memory: every operation that the
 * compiler could fuse in one place and not in another is written as an intrinsic. */
#ifndef VERLC_DEV_CUDA_KEPT_LOGITS_CUH
#define VERLC_DEV_CUDA_KEPT_LOGITS_CUH

#include "device/cuda/lm_head/log_softmax.cuh"

enum { KEPT_WARP = 16 * DEV_KEPT_COLS / 4 }; /* float4s of 16 rows of a tile */

/* The first float4 of 16 rows from `row` on, of the tile of column col. tiles: of all columns. */
static __device__ __forceinline__ int64_t kept_index(int64_t row, int64_t col, int64_t tiles) {
    const int64_t tile = row / DEV_KEPT_ROWS * tiles + col / DEV_KEPT_COLS;
    return (tile * (DEV_KEPT_ROWS / 16) + row % DEV_KEPT_ROWS / 16) * KEPT_WARP;
}
/* A lane's accumulators n, n + 1, ...: of columns 8 n + 2 (lane % 4) and the next one, rows lane / 4 and the eighth after it. */
template <int N> static __device__ __forceinline__ void kept_store(float4 *warp, const float (&z)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) __stcs(warp + n * 32 + threadIdx.x % 32, make_float4(z[n][0], z[n][1], z[n][2], z[n][3]));
}
template <int N> static __device__ __forceinline__ void kept_load(float (&z)[N][4], const float4 *warp) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float4 v = __ldcs(warp + n * 32 + threadIdx.x % 32);
        z[n][0] = v.x, z[n][1] = v.y, z[n][2] = v.z, z[n][3] = v.w;
    }
}

/* ---- gradients ---- */

struct dz_rows { /* of a block of rows: from its first one on */
    int64_t rows;
    int64_t lo;                                               /* entry of the vocabulary of the first column */
    const float *inv_temp, *lse, *dlogp, *dentropy, *entropy; /* the last two optional */
    const int32_t *target;
};
struct dz_row {                 /* of a lane's two rows */
    float scale_log2, lse_log2; /* p = 2^(raw scale_log2 - lse_log2) */
    float dlogp, factor;        /* factor: inv_temp */
    float dentropy, entropy;
    int64_t target; /* column of dz, or outside */
};

static __device__ __forceinline__ struct dz_row read_row(const struct dz_rows &j, int64_t row) {
    struct dz_row r = {};
    r.target = -1;
    if (row < 0 || row >= j.rows) return r;
    r.factor = j.inv_temp[row];
    r.scale_log2 = __fmul_rn(r.factor, 1.4426950408889634f);
    r.lse_log2 = __fmul_rn(j.lse[row], 1.4426950408889634f);
    r.dlogp = j.dlogp[row];
    r.target = j.target[row] - j.lo;
    if (j.dentropy) r.dentropy = j.dentropy[row], r.entropy = j.entropy[row];
    return r;
}

/* dz = inv_temp (dlogp (1[j = target] - p_j) - dentropy p_j (log p_j + entropy)) of the lane's two rows, in place of the logits of
 * 8 N columns from col on; a row without a gradient gets exact zeros, whatever its logits. */
template <bool ENTROPY, int N>
static __device__ __forceinline__ void gradients(float (&z)[N][4], const struct dz_row (&r)[2], int64_t col) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float minus = __fmul_rn(-r[i].dlogp, r[i].factor), d_entropy = __fmul_rn(r[i].dentropy, r[i].factor);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float log2_p = __fmaf_rn(z[n][2 * i + e], r[i].scale_log2, -r[i].lse_log2), p = exp2_approx(log2_p);
                float g = minus;
                if (ENTROPY && r[i].dentropy != 0) /* a zero times an infinite log-prob stays out */
                    g = __fmaf_rn(-d_entropy, __fadd_rn(head_clamp(__fmul_rn(log2_p, 0.6931471805599453f)), r[i].entropy), g);
                z[n][2 * i + e] = __fmul_rn(g, p);
            }
        const int64_t mine = r[i].target - col - (int64_t)(threadIdx.x % 4 * 2); /* 8 n + e where it is the lane's */
        if (mine >= 0 && mine < 8 * N && mine % 8 < 2)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (mine == n * 8 + e) z[n][2 * i + e] = __fmaf_rn(r[i].dlogp, r[i].factor, z[n][2 * i + e]);
        if (r[i].dlogp == 0 && r[i].dentropy == 0)
#pragma unroll
            for (int n = 0; n < N; n++) z[n][2 * i] = z[n][2 * i + 1] = 0;
    }
}

/* ---- host ---- */

static inline struct dz_rows dz_rows_of(const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b) {
    const auto from = [&](struct tensor t) { return t.data ? (const float *)t.data + b.row : NULL; };
    struct dz_rows r = {};
    r.rows = b.rows, r.lo = b.lo;
    r.inv_temp = from(a->inv_temp), r.lse = from(a->lse), r.dlogp = from(g->dlogp);
    r.dentropy = from(g->dentropy), r.entropy = g->dentropy.data ? from(a->entropy) : NULL;
    r.target = (const int32_t *)a->target.data + b.row;
    return r;
}

#endif
