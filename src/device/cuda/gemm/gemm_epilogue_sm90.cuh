/* gemm_epilogue_sm90.cuh - Hopper's large-M GEMM x . W^T with a fused epilogue as a template parameter: the LM head's
 * (device/cuda/lm_head/lm_head_sm90.cu) and SwiGLU (gemm_swiglu_sm90.cu).  What the epilogue consumes never reaches memory.
 *
 * A persistent, warp-specialized kernel with tiles of 128 x 256 x 64.  Blocks are in clusters of two that share W's tile
 * by TMA multicast.  One producer warp prefetches four stages; two consumer warpgroups have 64 rows each.  The
 * second starts LAG k-tiles late, so one warpgroup's epilogue overlaps with the other's WGMMAs.
 *
 * Invariant: a row's sums depend on that row and on W alone, over K ascending. */
#ifndef VERLC_DEV_CUDA_GEMM_EPILOGUE_SM90_CUH
#define VERLC_DEV_CUDA_GEMM_EPILOGUE_SM90_CUH

#include "device/cuda/context.cuh"
#include "device/cuda/tma.cuh"

enum {
    BM = 128,
    BN = 256,
    BK = 64,
    STAGES = 4,
    LAG = 3, /* LAG: k-tiles that the second warpgroup starts late */
    GROUP = 128,
    THREADS = 3 * GROUP,
    A_BYTES = BM * PANEL_ROW,
    B_BYTES = BN * PANEL_ROW,
    STAGE = A_BYTES + B_BYTES,
    OUT = 64 * PANEL_ROW, /* staging of 64 rows x 64 columns for a TMA store; two a warpgroup */
    AT_OUT = STAGES * STAGE,
    AT_BARS = AT_OUT + 4 * OUT,
    SMEM = AT_BARS + 2 * STAGES * 8,
    BAR_GROUP = 1,
    BAR_LAG = 3, /* named barriers: 1 + warpgroup, and this */
};

/* The output tiles. A tile starts `step` columns after its neighbour. Of W it has BN / 2 rows from its column on, and as
 * many from `second` rows after that. */
struct gemm_tiles {
    int64_t rows, cols;
    int k_tiles, row_pairs, tiles, step, second;
};

/* Tiles of the cluster: rows vary fastest, so that x stays in L2 and W is read once. */
struct tile_place {
    int row, col;
};
struct block_place { /* of a block: its shared memory, its rank in the cluster, which cluster of how many */
    uint32_t smem, rank;
    int cluster, clusters;
};
static __device__ __forceinline__ struct tile_place tile_at(const struct gemm_tiles &p, int tile, uint32_t rank) {
    return {(tile % p.row_pairs * 2 + (int)rank) * BM, tile / p.row_pairs * p.step};
}

/* Producer, one thread: all of this block's tiles of x, and half of W's for both blocks of the cluster. */
static __device__ __forceinline__ void produce(const struct gemm_tiles &p, const CUtensorMap *x, const CUtensorMap *w,
                                               const struct block_place &block) {
    const uint32_t smem = block.smem, rank = block.rank;
    uint32_t stage = 0, parity = 1;
    for (int t = block.cluster; t < p.tiles; t += block.clusters) {
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

/* Consumer warpgroup: the mainloop and the epilogue of each tile. */
template <class EPILOGUE>
static __device__ __forceinline__ void consume(const struct gemm_tiles &p, EPILOGUE epilogue, const struct block_place &block,
                                               int group) {
    const uint32_t smem = block.smem, rank = block.rank;
    const int cluster = block.cluster;
    const int lane = (int)threadIdx.x % 32, mine = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
    uint32_t stage = 0, parity = 0;
    if (group == 1 && cluster < p.tiles) named_barrier_sync(BAR_LAG, 2 * GROUP);
    for (int t = cluster; t < p.tiles; t += block.clusters) {
        const struct tile_place at = tile_at(p, t, rank);
        const int row = at.row + group * 64;
        float z[32][4];
        uint32_t before = 0;
        epilogue.begin(row + mine); /* the lane's rows: this one and the eighth after it */
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
        epilogue.end(z, smem, group, row, at.col);
    }
    epilogue.done();
}

/* Stores a warpgroup's 64 rows x 64 PANELS columns as bf16 by TMA (a map of 64 rows), 64 columns at a time through two buffers. */
template <int PANELS>
static __device__ __forceinline__ void gemm_store_bf16(const float (&z)[32][4], const CUtensorMap *out, uint32_t smem, int group,
                                                       const struct tile_place &at, int64_t cols) {
    const int row = at.row, col = at.col;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
    const bool first = threadIdx.x % GROUP == 0;
#pragma unroll
    for (int q = 0; q < PANELS; q++) {
        if (col + q * 64 >= cols) break;
        const uint32_t buffer = smem + AT_OUT + (uint32_t)((group * 2 + q % 2) * OUT);
        if (first && q == 0) tma_store_wait_read<0>(); /* the tile before may have ended in either buffer */
        if (first && q > 1) tma_store_wait_read<1>();
        if (q != 1) named_barrier_sync(BAR_GROUP + group, GROUP);
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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900 /* where the attribute itself is an error */
#define CLUSTER_OF_TWO
#else
#define CLUSTER_OF_TWO __cluster_dims__(2, 1, 1)
#endif

template <class EPILOGUE>
static __device__ __forceinline__ void gemm_block(const struct gemm_tiles &p, const CUtensorMap *x, const CUtensorMap *w,
                                                  EPILOGUE epilogue) {
    const uint32_t smem = smem_addr(panel_memory());
    const struct block_place block = {smem, cluster_rank(), (int)blockIdx.x / 2, (int)gridDim.x / 2};
    const int group = (int)threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(smem + AT_BARS + s * 8, 1);
            mbarrier_init(smem + AT_BARS + (STAGES + s) * 8, 2 * 2 * 4); /* the consumer warps of both blocks */
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    cluster_sync();
    pdl_launch_dependents();
    pdl_wait();
    if (group == 2) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 2 * GROUP) produce(p, x, w, block);
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        consume(p, epilogue, block, group);
    }
    cluster_sync(); /* no block exits while the other still arrives at its mbarriers */
}

/* ---- host ---- */

/* step, second: 0 for columns that follow each other. */
static inline struct gemm_tiles gemm_tiles_of(int64_t rows, int64_t cols, int64_t k, int step, int64_t second) {
    struct gemm_tiles p = {};
    p.rows = rows, p.cols = cols;
    p.k_tiles = (int)((k + BK - 1) / BK);
    p.row_pairs = (int)((rows + 2 * BM - 1) / (2 * BM));
    p.step = step ? step : BN;
    p.second = step ? (int)second : BN / 2;
    p.tiles = p.row_pairs * (int)((cols + p.step - 1) / p.step);
    return p;
}

/* *blocks: the grid of a persistent kernel, in clusters of two. Allows the kernel its shared memory. */
static inline int gemm_prepare(const struct cuda *c, const void *kernel, const struct gemm_tiles &p, unsigned *blocks) {
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    *blocks = (unsigned)(p.tiles * 2 < c->n_sm / 2 * 2 ? p.tiles * 2 : c->n_sm / 2 * 2);
    return 0;
}

#endif
