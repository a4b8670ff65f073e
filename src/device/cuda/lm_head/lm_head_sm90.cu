/* lm_head_sm90.cu - the LM head's GEMM on Hopper with fused epilogues, so that logits never reach memory: softmax
 * statistics by tile (forward), or dz = d loss / d logits as bf16 (backward). The forward also stores logits where they are kept.
 *
 * Invariant: a row's results depend on that row, on its statistics and on the weight alone.
 * lm_head.cu uses the statistics only where they are bitwise those of logits by cuda_gemm. */
#include "device/cuda/gemm/gemm_epilogue_sm90.cuh"
#include "device/cuda/lm_head/kept_logits.cuh"

/* ---- statistics ---- */

struct stats_job {
    struct gemm_tiles p;
    const float *inv_temp; /* these and below: from the first row on */
    head_stats *tiles;     /* (tiles of the vocabulary, rows) */
    const int32_t *target; /* not with the logits */
    float *raw_target;
    float *logits; /* (rows, cols) raw */
    float4 *kept;  /* rows kept_first, ... of kept_rows are the job's */
    int64_t kept_first, kept_rows;
};

enum { LOGITS_NONE, LOGITS_ROWS, LOGITS_KEPT }; /* which are stored: none, job.logits, job.kept */

/* Epilogue: the statistics of a lane's two rows, as head_chunk_stats has them; and the targets' raw logits, or all of them. */
template <bool MOMENTS, int LOGITS> struct stats_epilogue {
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
            target[i] = have && LOGITS != LOGITS_ROWS ? j.target[row + 8 * i] : -1;
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
        if (LOGITS == LOGITS_KEPT) { /* a tile has a place for all of its rows, or for none */
            const int64_t at = j.kept_first + row - (int64_t)(threadIdx.x % 32 / 4);
            if (at < j.kept_rows) kept_store(j.kept + kept_index(at, col, (j.p.cols + BN - 1) / BN), z);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (LOGITS == LOGITS_ROWS) keep_logits(z, i, first);
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
static_assert((int)BN == (int)HEAD_TILE && (int)BN == (int)DEV_KEPT_COLS && (int)BM == (int)DEV_KEPT_ROWS,
              "a block's columns are a tile of the statistics, and its logits one of kept ones");

/* ---- gradients ---- */

struct dz_job {
    struct gemm_tiles p;
    struct dz_rows rows;
};

template <bool ENTROPY> struct dz_epilogue {
    const struct dz_job &j;
    const CUtensorMap *out;
    struct dz_row r[2];

    __device__ __forceinline__ void begin(int64_t row) { r[0] = read_row(j.rows, row), r[1] = read_row(j.rows, row + 8); }
    __device__ __forceinline__ void end(float (&z)[32][4], uint32_t smem, int group, int row, int col) const {
        gradients<ENTROPY>(z, r, col);
        gemm_store_bf16<4>(z, out, smem, group, {row, col}, j.p.cols);
    }
    __device__ __forceinline__ void done() const {
        if (threadIdx.x % GROUP == 0) tma_store_wait();
    }
};

/* ---- kernels ---- */

template <bool MOMENTS, int LOGITS>
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
                                NULL,
                                (float4 *)a->kept.data,
                                a->kept_at + b.row,
                                a->kept.data ? a->kept.dim[0] : 0};
    const auto kernel = j.kept_first < j.kept_rows
                            ? moments ? head_stats_kernel<true, LOGITS_KEPT> : head_stats_kernel<false, LOGITS_KEPT>
                        : moments ? head_stats_kernel<true, LOGITS_NONE>
                                  : head_stats_kernel<false, LOGITS_NONE>;
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
    const struct stats_job j = {gemm_tiles_of(rows, w.n, w.k, 0, 0), inv_temp, tiles, NULL, NULL, logits, NULL, 0, 0};
    const auto kernel = head_stats_kernel<false, LOGITS_ROWS>;
    TRY(gemm_prepare(c, (const void *)kernel, j.p, &blocks));
    CU_TRY(cuda_launch(c, kernel, blocks, THREADS, SMEM, j, map_x, map_w));
    return 0;
}

int cuda_head_fused_dz(struct cuda *c, const struct lmhead_args *a, const struct lmhead_bwd_args *g, const struct head_block &b,
                       void *dz) {
    CUtensorMap x, w, out;
    unsigned blocks = 0;
    TRY(operands(a->x, a->w, b, &x, &w));
    TRY(cuda_tensor_map(&out, dz, b.rows, b.cols, 64));
    struct dz_job j = {};
    j.p = gemm_tiles_of(b.rows, b.cols, a->w.k, 0, 0);
    j.rows = dz_rows_of(a, g, b);
    const auto kernel = g->dentropy.data ? head_dz_kernel<true> : head_dz_kernel<false>;
    TRY(gemm_prepare(c, (const void *)kernel, j.p, &blocks));
    kernel<<<blocks, THREADS, SMEM, c->stream>>>(j, x, w, out);
    CU_LAUNCHED();
    return 0;
}
