/* lm_head_sm90.cu - the LM head's GEMM on Hopper with fused epilogues, so that logits never reach memory: softmax
 * statistics by tile (forward), or dz = d loss / d logits as bf16 (backward).
 *
 * Invariant: a row's results depend on that row, on its statistics and on the weight alone.
 * lm_head.cu uses the statistics only where they are bitwise those of logits by cuda_gemm. */
#include "device/cuda/gemm/gemm_epilogue_sm90.cuh"
#include "device/cuda/lm_head/log_softmax.cuh"

/* ---- statistics ---- */

struct stats_job {
    struct gemm_tiles p;
    const float *inv_temp; /* these and below: from the first row on */
    head_stats *tiles;     /* (tiles of the vocabulary, rows) */
    const int32_t *target; /* not with the logits */
    float *raw_target;
    float *logits; /* (rows, cols) raw */
};

/* Epilogue: the statistics of a lane's two rows, as head_chunk_stats has them; and the targets' raw logits, or all of them. */
template <bool MOMENTS, bool LOGITS> struct stats_epilogue {
    const struct stats_job &j;
    int64_t row;
    float by[2];
    int target[2];

    __device__ __forceinline__ void begin(int64_t first) {
        row = first;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool have = row + 8 * i < j.p.rows;
            by[i] = have ? j.inv_temp[row + 8 * i] : 0;
            target[i] = have && !LOGITS ? j.target[row + 8 * i] : -1;
        }
    }
    /* The target's raw logit where it is the lane's; NaN, from the first tile, for a target that no tile has. */
    __device__ __forceinline__ void keep_target(const float (&z)[32][4], int i, int col) const {
        const int quad = (int)threadIdx.x % 4, mine = target[i] - col - quad * 2; /* 8 n + e where it is the lane's */
        float *to = j.raw_target + row + 8 * i;
        if (mine >= 0 && mine < BN && mine % 8 < 2 && target[i] < j.p.cols) {
            float raw = 0;
#pragma unroll
            for (int n = 0; n < 32; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (mine == n * 8 + e) raw = z[n][2 * i + e];
            *to = raw;
        }
        if (col == 0 && quad == 0 && row + 8 * i < j.p.rows && (target[i] < 0 || target[i] >= j.p.cols)) *to = CUDART_NAN_F;
    }
    /* Whole 32-byte sectors: four lanes have 8 columns of a row. */
    __device__ __forceinline__ void keep_logits(const float (&z)[32][4], int i, int first) const {
        if (row + 8 * i >= j.p.rows) return;
        float *to = j.logits + (row + 8 * i) * j.p.cols + first;
#pragma unroll
        for (int n = 0; n < 32; n++)
            if (first + n * 8 < j.p.cols) *(float2 *)(to + n * 8) = make_float2(z[n][2 * i], z[n][2 * i + 1]);
    }
    __device__ __forceinline__ void end(float (&z)[32][4], uint32_t, int, int, int col) const {
        const int first = col + (int)threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (LOGITS) keep_logits(z, i, first);
            else keep_target(z, i, col);
#pragma unroll
            for (int n = 0; n < 32; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) z[n][2 * i + e] = __fmul_rn(z[n][2 * i + e], by[i]);
            if (col + BN > j.p.cols)
#pragma unroll
                for (int n = 0; n < 32; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (first + n * 8 + e >= j.p.cols) z[n][2 * i + e] = -CUDART_INF_F;
            float m[4] = {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
            for (int n = 0; n < 32; n++) m[n % 4] = fmaxf(m[n % 4], fmaxf(z[n][2 * i], z[n][2 * i + 1]));
            float max = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
            max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, 1));
            max = fmaxf(max, __shfl_xor_sync(WARP_ALL, max, 2));
            const float base = head_base(max);
            head_chains chains[4] = {};
#pragma unroll
            for (int n = 0; n < 32; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) head_add<MOMENTS>(chains[n % 4], e, z[n][2 * i + e], base);
            head_stats s = head_plus<MOMENTS>(head_plus<MOMENTS>(head_ends(chains[0], max), head_ends(chains[1], max)),
                                              head_plus<MOMENTS>(head_ends(chains[2], max), head_ends(chains[3], max)));
            s = head_plus_lane<MOMENTS>(s, 1);
            s = head_plus_lane<MOMENTS>(s, 2);
            if (threadIdx.x % 4 == 0 && row + 8 * i < j.p.rows)
                *(float4 *)&j.tiles[col / HEAD_TILE * j.p.rows + row + 8 * i] = make_float4(s.max, s.sum, s.sum_t, s.sum_sq);
        }
    }
    __device__ __forceinline__ void done() const {}
};
static_assert((int)BN == (int)HEAD_TILE, "a block's columns are a tile of the statistics");

/* ---- gradients ---- */

struct dz_row {                 /* of a lane's two rows */
    float scale_log2, lse_log2; /* p = 2^(raw scale_log2 - lse_log2) */
    float dlogp, factor;        /* factor: inv_temp */
    float dentropy, entropy;
    int64_t target; /* column of dz, or outside */
};

struct dz_job {
    struct gemm_tiles p;
    int64_t lo;                                               /* entry of the vocabulary of the first column */
    const float *inv_temp, *lse, *dlogp, *dentropy, *entropy; /* the last two optional */
    const int32_t *target;
};

static __device__ __forceinline__ struct dz_row read_row(const struct dz_job &j, int64_t row) {
    struct dz_row r = {};
    r.target = -1;
    if (row >= j.p.rows) return r;
    r.factor = j.inv_temp[row];
    r.scale_log2 = r.factor * 1.4426950408889634f;
    r.lse_log2 = j.lse[row] * 1.4426950408889634f;
    r.dlogp = j.dlogp[row];
    r.target = j.target[row] - j.lo;
    if (j.dentropy) r.dentropy = j.dentropy[row], r.entropy = j.entropy[row];
    return r;
}

/* dz = inv_temp (dlogp (1[j = target] - p_j) - dentropy p_j (log p_j + entropy)) of the lane's two rows, in place of the logits;
 * a row without a gradient gets exact zeros, whatever its logits. */
template <bool ENTROPY>
static __device__ __forceinline__ void gradients(float (&z)[32][4], const struct dz_row (&r)[2], int64_t col) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float minus = -r[i].dlogp * r[i].factor, d_entropy = r[i].dentropy * r[i].factor;
#pragma unroll
        for (int n = 0; n < 32; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float log2_p = fmaf(z[n][2 * i + e], r[i].scale_log2, -r[i].lse_log2), p = exp2_approx(log2_p);
                float g = minus;
                if (ENTROPY && r[i].dentropy != 0) /* a zero times an infinite log-prob stays out */
                    g -= d_entropy * (head_clamp(log2_p * 0.6931471805599453f) + r[i].entropy);
                z[n][2 * i + e] = g * p;
            }
        const int64_t mine = r[i].target - col - (int64_t)(threadIdx.x % 4 * 2); /* 8 n + e where it is the lane's */
        if (mine >= 0 && mine < BN && mine % 8 < 2)
#pragma unroll
            for (int n = 0; n < 32; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (mine == n * 8 + e) z[n][2 * i + e] = fmaf(r[i].dlogp, r[i].factor, z[n][2 * i + e]);
        if (r[i].dlogp == 0 && r[i].dentropy == 0)
#pragma unroll
            for (int n = 0; n < 32; n++) z[n][2 * i] = z[n][2 * i + 1] = 0;
    }
}

template <bool ENTROPY> struct dz_epilogue {
    const struct dz_job &j;
    const CUtensorMap *out;
    struct dz_row r[2];

    __device__ __forceinline__ void begin(int64_t row) { r[0] = read_row(j, row), r[1] = read_row(j, row + 8); }
    __device__ __forceinline__ void end(float (&z)[32][4], uint32_t smem, int group, int row, int col) const {
        gradients<ENTROPY>(z, r, col);
        gemm_store_bf16<4>(z, out, smem, group, {row, col}, j.p.cols);
    }
    __device__ __forceinline__ void done() const {
        if (threadIdx.x % GROUP == 0) tma_store_wait();
    }
};

/* ---- kernels ---- */

template <bool MOMENTS, bool LOGITS>
__global__ void CLUSTER_OF_TWO __launch_bounds__(THREADS, 1)
    head_stats_kernel(const struct stats_job j, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w) {
    gemm_block(j.p, &x, &w, stats_epilogue<MOMENTS, LOGITS>{j});
}
template <bool ENTROPY>
__global__ void CLUSTER_OF_TWO __launch_bounds__(THREADS, 1)
    head_dz_kernel(const struct dz_job j, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                   const __grid_constant__ CUtensorMap out) {
    gemm_block(j.p, &x, &w, dz_epilogue<ENTROPY>{j, &out});
}

/* ---- host ---- */

bool cuda_head_fused_takes(const struct cuda *c, struct tensor x, struct weight w) {
    return cuda_hopper(c) && c->smem_max >= SMEM && x.dt == DT_BF16 && w.k % 8 == 0 && w.n % 8 == 0 && w.softcap == 0 &&
           (((uintptr_t)x.data | (uintptr_t)w.data) & 15) == 0;
}

/* The operands of a block: rows of x, rows of the weight. */
static int operands(struct tensor from, struct weight weight, const struct head_block &b, CUtensorMap *x, CUtensorMap *w) {
    TRY(cuda_tensor_map(x, (const char *)from.data + (size_t)(b.row * weight.k) * 2, b.rows, weight.k, BM));
    return cuda_tensor_map(w, (const char *)weight.data + (size_t)(b.lo * weight.k) * 2, b.cols, weight.k, BN / 2);
}

int cuda_head_fused_stats(struct cuda *c, const struct lmhead_args *a, const struct head_block &b, bool moments, head_stats *tiles,
                          float *raw_target) {
    CUtensorMap x, w;
    unsigned blocks = 0;
    TRY(operands(a->x, a->w, b, &x, &w));
    const struct stats_job j = {gemm_tiles_of(b.rows, b.cols, a->w.k, 0, 0),
                                (const float *)a->inv_temp.data + b.row,
                                tiles,
                                (const int32_t *)a->target.data + b.row,
                                raw_target,
                                NULL};
    const auto kernel = moments ? head_stats_kernel<true, false> : head_stats_kernel<false, false>;
    TRY(gemm_prepare(c, (const void *)kernel, j.p, &blocks));
    kernel<<<blocks, THREADS, SMEM, c->stream>>>(j, x, w);
    CU_LAUNCHED();
    return 0;
}

int cuda_head_fused_logits(struct cuda *c, struct tensor x, struct weight w, const float *inv_temp, float *logits,
                           head_stats *tiles) {
    const int64_t rows = x.dim[0];
    CUtensorMap map_x, map_w;
    unsigned blocks = 0;
    TRY(operands(x, w, {0, rows, 0, w.n}, &map_x, &map_w));
    const struct stats_job j = {gemm_tiles_of(rows, w.n, w.k, 0, 0), inv_temp, tiles, NULL, NULL, logits};
    const auto kernel = head_stats_kernel<false, true>;
    TRY(gemm_prepare(c, (const void *)kernel, j.p, &blocks));
    CU_TRY(cuda_launch(c, kernel, blocks, THREADS, SMEM, j, map_x, map_w));
    return 0;
}

int cuda_head_fused_dz(struct cuda *c, const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b,
                       void *dz) {
    const auto from = [&](struct tensor t) { return t.data ? (const float *)t.data + b.row : NULL; };
    CUtensorMap x, w, out;
    unsigned blocks = 0;
    TRY(operands(a->x, a->w, b, &x, &w));
    TRY(cuda_tensor_map(&out, dz, b.rows, b.cols, 64));
    struct dz_job j = {};
    j.p = gemm_tiles_of(b.rows, b.cols, a->w.k, 0, 0);
    j.lo = b.lo;
    j.inv_temp = from(a->inv_temp), j.lse = from(a->lse), j.dlogp = from(g->dlogp);
    j.dentropy = from(g->dentropy), j.entropy = g->dentropy.data ? from(a->entropy) : NULL;
    j.target = (const int32_t *)a->target.data + b.row;
    const auto kernel = g->dentropy.data ? head_dz_kernel<true> : head_dz_kernel<false>;
    TRY(gemm_prepare(c, (const void *)kernel, j.p, &blocks));
    kernel<<<blocks, THREADS, SMEM, c->stream>>>(j, x, w, out);
    CU_LAUNCHED();
    return 0;
}
