/* gemm_epilogue_sm90.cuh - on Hopper, a product x . W^T of many rows as one kernel with what is made of it, so that it need not
 * lie in memory: the head's (dev/cuda/lm_head/lm_head_sm90.cu) and that of gate and up (gemm_swiglu_sm90.cu).
 *
 * 128 x 256 a block, blocks in clusters of two that share the weight's tile: one warp asks for tiles
 * of 64 of k by bulk copies, four stages deep; two warpgroups have 64 rows each.  The second starts
 * a few tiles late, so that one takes exponentials while the other keeps the matrix units busy.
 *
 * Invariant: a row's sums depend on that row and on the weight alone, over k ascending. */
#ifndef VERLC_DEV_CUDA_PRODUCT_CUH
#define VERLC_DEV_CUDA_PRODUCT_CUH

#include "dev/cuda/context.cuh"
#include "dev/cuda/tma.cuh"

extern __shared__ __align__(1024) char product_smem[];

enum {
    BM = 128,
    BN = 256,
    BK = 64,
    STAGES = 4,
    LAG = 3, /* LAG: tiles that the second warpgroup starts late */
    GROUP = 128,
    THREADS = 3 * GROUP,
    A_BYTES = BM * PANEL_ROW,
    B_BYTES = BN * PANEL_ROW,
    STAGE = A_BYTES + B_BYTES,
    OUT = 64 * PANEL_ROW, /* 64 rows x 64 columns on their way out; two a warpgroup */
    AT_OUT = STAGES * STAGE,
    AT_BARS = AT_OUT + 4 * OUT,
    SMEM = AT_BARS + 2 * STAGES * 8,
    BAR_GROUP = 1,
    BAR_LAG = 3, /* named barriers: 1 + warpgroup, and this */
};

/* A walk over the tiles of a result of some rows and columns. A tile is of `step` columns more than the one beside it, and of
 * the weight it has BN / 2 rows from its column on, and as many from `second` rows after that. */
struct product {
    int64_t rows, cols;
    int k_tiles, row_pairs, tiles, step, second;
};

/* Tiles of the cluster: rows vary fastest, so that x stays in the cache and the weight is read once. */
struct tile_place {
    int row, col;
};
static __device__ __forceinline__ struct tile_place tile_at(const struct product &p, int tile, uint32_t rank) {
    return {(tile % p.row_pairs * 2 + (int)rank) * BM, tile / p.row_pairs * p.step};
}

/* One thread: all tiles of this block, and half of the weight's for both blocks of the cluster. */
static __device__ __forceinline__ void produce(const struct product &p, const CUtensorMap *x, const CUtensorMap *w, uint32_t smem,
                                               uint32_t rank, int cluster, int clusters) {
    uint32_t stage = 0, parity = 1;
    for (int t = cluster; t < p.tiles; t += clusters) {
        const struct tile_place at = tile_at(p, t, rank);
        for (int k = 0; k < p.k_tiles; k++) {
            const uint32_t full = smem + AT_BARS + stage * 8, a = smem + stage * STAGE, b = a + A_BYTES + rank * (B_BYTES / 2);
            mbarrier_wait(full + STAGES * 8, parity);
            mbarrier_expect_tx(full, STAGE);
            tma_load(a, x, k * BK, at.row, full);
            tma_load_multicast(b, w, k * BK, at.col + (int)rank * p.second, full, 3);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

/* A warpgroup: the tiles' products, and what `work` makes of each. */
template <class WORK>
static __device__ __forceinline__ void consume(const struct product &p, WORK work, uint32_t smem, uint32_t rank, int group,
                                               int cluster, int clusters) {
    const int lane = (int)threadIdx.x % 32, mine = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
    uint32_t stage = 0, parity = 0;
    if (group == 1 && cluster < p.tiles) named_barrier_sync(BAR_LAG, 2 * GROUP);
    for (int t = cluster; t < p.tiles; t += clusters) {
        const struct tile_place at = tile_at(p, t, rank);
        const int row = at.row + group * 64;
        float z[32][4];
        uint32_t before = 0;
        work.begin(row + mine); /* the lane's rows: this one and the eighth after it */
        wgmma_fence_registers(z);
        for (int k = 0; k < p.k_tiles; k++) {
            const uint32_t full = smem + AT_BARS + stage * 8, tile = smem + stage * STAGE;
            const uint64_t a = panel_desc(tile + (uint32_t)(group * 64 * PANEL_ROW)), b = panel_desc(tile + A_BYTES);
            mbarrier_wait(full, parity);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; i++) wgmma_m64n256_ss(z, a + i * 2, b + i * 2, k > 0 || i > 0);
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
                if (lane < 2) mbarrier_arrive_cluster(before + STAGES * 8, (uint32_t)lane);
            }
            before = full;
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (group == 0 && t == cluster && k == (LAG < p.k_tiles ? LAG : p.k_tiles) - 1)
                named_barrier_arrive(BAR_LAG, 2 * GROUP);
        }
        wgmma_wait<0>();
        wgmma_fence_registers(z);
        if (lane < 2) mbarrier_arrive_cluster(before + STAGES * 8, (uint32_t)lane);
        work.end(z, smem, group, row, at.col);
    }
    work.done();
}

/* A warpgroup's 64 rows x 64 PANELS columns to a matrix of bf16 (a map of 64 rows), 64 columns at a time through two buffers. */
template <int PANELS>
static __device__ __forceinline__ void product_store(const float (&z)[32][4], const CUtensorMap *out, uint32_t smem, int group,
                                                     int row, int col, int64_t cols) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
    const bool first = threadIdx.x % GROUP == 0;
#pragma unroll
    for (int q = 0; q < PANELS; q++) {
        if (col + q * 64 >= cols) break;
        const uint32_t buffer = smem + AT_OUT + (uint32_t)((group * 2 + q % 2) * OUT);
        if (first) tma_store_wait_read<1>();
        named_barrier_sync(BAR_GROUP + group, GROUP);
#pragma unroll
        for (int h = 0; h < 4; h++) { /* 16 columns: matrices of rows 0-7, 8-15, twice */
            const int n = q * 8 + h * 2;
            const uint32_t v[4] = {pack_bf16(z[n][0], z[n][1]), pack_bf16(z[n][2], z[n][3]), pack_bf16(z[n + 1][0], z[n + 1][1]),
                                   pack_bf16(z[n + 1][2], z[n + 1][3])};
            stmatrix_x4(buffer + panel_offset(warp * 16 + lane % 16, h * 2 + lane / 16), v);
        }
        fence_proxy_async();
        named_barrier_sync(BAR_GROUP + group, GROUP);
        if (first) tma_store(out, col + q * 64, row, buffer);
    }
}

/* ---- the kernel ---- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900 /* which refuses the word, not only the thing */
#define CLUSTER_OF_TWO
#else
#define CLUSTER_OF_TWO __cluster_dims__(2, 1, 1)
#endif

template <class WORK>
static __device__ __forceinline__ void product_block(const struct product &p, const CUtensorMap *x, const CUtensorMap *w,
                                                     WORK work) {
    const uint32_t smem = smem_addr(product_smem), rank = cluster_rank();
    const int cluster = (int)blockIdx.x / 2, clusters = (int)gridDim.x / 2, group = (int)threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(smem + AT_BARS + s * 8, 1);
            mbarrier_init(smem + AT_BARS + (STAGES + s) * 8, 2 * 2 * 4); /* the warps of two warpgroups of both blocks */
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    cluster_sync();
    pdl_launch_dependents();
    pdl_wait();
    if (group == 2) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 2 * GROUP) produce(p, x, w, smem, rank, cluster, clusters);
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        consume(p, work, smem, rank, group, cluster, clusters);
    }
    cluster_sync(); /* nobody leaves while the other block still arrives here */
}

/* ---- the host's side ---- */

/* step, second: 0 for columns that follow each other. */
static inline struct product product_of(int64_t rows, int64_t cols, int64_t k, int step, int64_t second) {
    struct product p = {};
    p.rows = rows, p.cols = cols;
    p.k_tiles = (int)((k + BK - 1) / BK);
    p.row_pairs = (int)((rows + 2 * BM - 1) / (2 * BM));
    p.step = step ? step : BN;
    p.second = step ? (int)second : BN / 2;
    p.tiles = p.row_pairs * (int)((cols + p.step - 1) / p.step);
    return p;
}

/* Blocks for these tiles, by pairs; the kernel is allowed its shared memory. */
static inline int product_prepare(const struct cuda *c, const void *kernel, const struct product &p, unsigned *blocks) {
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    *blocks = (unsigned)(p.tiles * 2 < c->n_sm / 2 * 2 ? p.tiles * 2 : c->n_sm / 2 * 2);
    return 0;
}

#endif
