/* grouped_gemm_sm90.cu - the grouped GEMM on Hopper, for experts with many rows: WGMMA over tiles that TMA loads; forward, dx, dw.
 *
 * Persistent blocks in clusters of two, tiles of 128 x 256 x 64 (gemm_epilogue_sm90.cuh has the layout of shared memory): a
 * producer thread walks the experts' offsets, fills four stages and says to the two consumer warpgroups, which have 64 rows
 * each, where their tile is; nothing waits for the host.  The two blocks of a cluster have neighbouring tiles of rows and share
 * B's tile by multicast; at an expert's odd last tile of rows they have neighbouring columns and share A's.
 * Rows beyond an expert's end are loaded and not stored.  In dw, where they would be summed, they are cleared in shared memory.
 * Not for narrow outputs, of which a tile would be mostly empty.
 *
 * Invariant: an element is a sum over its reduction in steps of 16, ascending, from 0, zeros up to a multiple of 64, as in
 * grouped_gemm.cu, which checks at run time that the bits are the same. */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/gemm/gemm_epilogue_sm90.cuh"

#include <stdint.h>

enum {
    PANEL = 64 * PANEL_ROW, /* bytes of 64 x 64 elements: what one TMA copy loads */
    A_PANELS = BM / 64,
    B_PANELS = BN / 64,
    AT_PLACES = SMEM, /* a struct place for each stage, of the tile that begins there */
    GROUPED_SMEM = AT_PLACES + STAGES * 32,
    NARROW = 128, /* columns of an output that is left to mma.sync */
};

/* A block's tile of out. steps 0: there is none, nor any further one. */
struct place {
    int expert, row, rows, col; /* rows: of out from `row` on that are its own */
    int steps;                  /* stages */
    int from, reduced;          /* of DW, the expert's first row and how many there are, which are the reduction */
    int share_a;                /* the cluster's blocks have the same rows, and not the same columns */
};

/* ---- producer: one thread ---- */

/* The experts in order, and how many pairs of tiles each has. */
struct walk {
    int expert, first, pairs; /* first: pairs of the experts before */
    int lo, rows, m_tiles, n_tiles;
};
template <int OP> static __device__ __forceinline__ bool walk_next(const struct gemm_grouped &g, struct walk *w) {
    if (++w->expert >= g.experts) return false;
    const int end = g.offset[w->expert + 1];
    w->lo += w->rows;
    w->rows = end - w->lo;
    w->first += w->pairs;
    if (OP != CUDA_GEMM_DW) w->m_tiles = (w->rows + BM - 1) / BM;
    w->pairs =
        OP == CUDA_GEMM_DW && w->rows == 0 && g.add ? 0 : w->m_tiles / 2 * w->n_tiles + w->m_tiles % 2 * ((w->n_tiles + 1) / 2);
    return true;
}

/* A stage's tiles. What both blocks of the cluster have in common each loads a half of. */
template <int OP>
static __device__ __forceinline__ void load_stage(const CUtensorMap *a, const CUtensorMap *b, const struct place &t, int step,
                                                  const struct block_place &block, uint32_t stage) {
    const uint32_t tile = block.smem + stage * STAGE, full = block.smem + AT_BARS + stage * 8;
    const int r = step * BK, rank = (int)block.rank;
    const bool half = t.rows <= 64; /* the second warpgroup has no row */
    mbarrier_expect_tx(full, half ? STAGE - PANEL : STAGE);
#pragma unroll
    for (int i = 0; i < A_PANELS; i++) {
        const uint32_t to = tile + (uint32_t)(i * PANEL);
        const int x = OP == CUDA_GEMM_DW ? t.row + i * 64 : r, y = OP == CUDA_GEMM_DW ? t.from + r : t.row + i * 64;
        if (i > 0 && half) break;
        if (!t.share_a) tma_load(to, a, x, y, full);
        else if (i == rank) tma_load_multicast(to, a, x, y, full, 3);
    }
#pragma unroll
    for (int i = 0; i < B_PANELS; i++) {
        const uint32_t to = tile + A_BYTES + (uint32_t)(i * PANEL);
        const int col = t.col + i * 64, x = OP == CUDA_GEMM_FWD ? r : col;
        const int y = OP == CUDA_GEMM_FWD ? col : OP == CUDA_GEMM_DX ? r : t.from + r;
        if (t.share_a) {
            if (OP == CUDA_GEMM_DW) tma_load(to, b, x, y, full);
            else tma_load_stack(to, b, x, y, t.expert, full);
        } else if (i / (B_PANELS / 2) == rank) {
            if (OP == CUDA_GEMM_DW) tma_load_multicast(to, b, x, y, full, 3);
            else tma_load_stack_pair(to, b, x, y, t.expert, full);
        }
    }
}

/* Into L2 what a step's share of the tile's rows will be added to. */
static __device__ __forceinline__ void prefetch_sums(const struct gemm_grouped &g, const struct place &t, int step) {
    const int share = (BM + t.steps - 1) / t.steps, cols = min((int)g.k - t.col, (int)BN);
    const float *const at = (const float *)g.out + ((int64_t)t.expert * g.n + t.row) * g.k + t.col;
    for (int i = step * share; i < (step + 1) * share && i < t.rows && i < BM && cols > 0; i++)
        bulk_prefetch_l2(at + i * g.k, (uint32_t)cols * 4);
}

template <int OP>
static __device__ __forceinline__ void produce_grouped(const struct gemm_grouped &g, const CUtensorMap *a, const CUtensorMap *b,
                                                       const struct block_place &block) {
    const uint32_t smem = block.smem;
    const int width = (int)(OP == CUDA_GEMM_FWD ? g.n : g.k);
    struct walk w = {};
    uint32_t stage = 0, parity = 1;
    w.expert = -1;
    w.m_tiles = ((int)g.n + BM - 1) / BM; /* of DW */
    w.n_tiles = (width + BN - 1) / BN;
    for (int pair = block.cluster;; pair += block.clusters) {
        struct place t = {};
        bool there = true;
        while (there && pair >= w.first + w.pairs) there = walk_next<OP>(g, &w);
        if (there) {
            const int i = pair - w.first, m_pairs = w.m_tiles / 2, whole = m_pairs * w.n_tiles;
            t.share_a = i >= whole;
            const int m = t.share_a ? w.m_tiles - 1 : i % m_pairs * 2 + (int)block.rank;
            const int n = t.share_a ? (i - whole) * 2 + (int)block.rank : i / m_pairs;
            t.expert = w.expert;
            t.row = m * BM + (OP == CUDA_GEMM_DW ? 0 : w.lo);
            t.rows = OP == CUDA_GEMM_DW ? (int)g.n - m * BM : w.rows - m * BM;
            t.col = n * BN;
            t.steps = ((int)(OP == CUDA_GEMM_FWD ? g.k : OP == CUDA_GEMM_DX ? g.n : w.rows) + BK - 1) / BK;
            t.from = w.lo;
            t.reduced = w.rows;
            if (t.steps == 0) t.steps = 1; /* DW of an expert without rows: all of one stage is cleared */
        }
        for (int step = 0; step == 0 || step < t.steps; step++) {
            const uint32_t full = smem + AT_BARS + stage * 8;
            mbarrier_wait(full + STAGES * 8, parity);
            if (step == 0) *(struct place *)(panel_memory() + AT_PLACES + stage * 32) = t;
            if (!there) {
                mbarrier_arrive(full);
                return;
            }
            load_stage<OP>(a, b, t, step, block, stage);
            if (OP == CUDA_GEMM_DW && g.add) prefetch_sums(g, t, step);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

/* ---- consumers ---- */

/* DW: clears the rows from `left` on of this warpgroup's panel of A and of all of B, which may be another expert's; B's may be
 * cleared by both warpgroups. */
static __device__ __forceinline__ void clear_rows(uint32_t stage, int group, int left) {
    const int chunks = (64 - left) * (PANEL_ROW / 16);
#pragma unroll
    for (int i = 0; i <= B_PANELS; i++) {
        char *const panel = panel_memory() + stage * STAGE + (i < B_PANELS ? (int)A_BYTES + i * PANEL : group * PANEL);
        for (int j = (int)threadIdx.x % GROUP; j < chunks; j += GROUP)
            *(uint4 *)(panel + left * PANEL_ROW + j * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    named_barrier_sync(BAR_GROUP + group, GROUP);
}

/* A warpgroup's tile (64, 256) in f32: to out, or added to it. rows, cols: how many of each there are. */
static __device__ __forceinline__ void store_f32(const float (&z)[32][4], float *out, int64_t ld, int rows, int cols, bool add) {
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 % 4 * 16 + lane / 4, col = lane % 4 * 2;
    float *const at[2] = {out + row * ld + col, out + (row + 8) * ld + col};
    const bool mine[2] = {row < rows, row + 8 < rows};
    constexpr int BATCH = 8; /* of 8 columns each, whose loads are in flight together */
#pragma unroll
    for (int n0 = 0; n0 < 32; n0 += BATCH) {
        float2 v[BATCH][2] = {};
        if (add) {
#pragma unroll
            for (int n = 0; n < BATCH; n++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (mine[h] && (n0 + n) * 8 < cols) v[n][h] = __ldcs((const float2 *)(at[h] + (n0 + n) * 8));
        }
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float z0 = z[n0 + n][2 * h], z1 = z[n0 + n][2 * h + 1];
                const float2 sum = add ? make_float2(__fadd_rn(v[n][h].x, z0), __fadd_rn(v[n][h].y, z1)) : make_float2(z0, z1);
                if (mine[h] && (n0 + n) * 8 < cols) __stcs((float2 *)(at[h] + (n0 + n) * 8), sum);
            }
    }
}

/* The same in bf16, for an expert's last rows, where a TMA store would write the next expert's. */
static __device__ __forceinline__ void store_last_rows(const float (&z)[32][4], __nv_bfloat16 *out, int64_t ld, int rows,
                                                       int cols) {
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
    __nv_bfloat16 *const at = out + row * ld + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 32; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (row + 8 * h < rows && n * 8 < cols)
                *(uint32_t *)(at + 8 * h * ld + n * 8) = pack_bf16(z[n][2 * h], z[n][2 * h + 1]);
}

template <int OP>
static __device__ __forceinline__ void store_tile(const struct gemm_grouped &g, const CUtensorMap *out, float (&z)[32][4],
                                                  const struct place &t, uint32_t smem, int group) {
    const int64_t width = OP == CUDA_GEMM_FWD ? g.n : g.k;
    const int row = t.row + group * 64, rows = t.rows - group * 64, cols = min((int)width - t.col, (int)BN);
    const int64_t at = ((OP == CUDA_GEMM_DW ? (int64_t)t.expert * g.n : 0) + row) * width + t.col;
    if (OP == CUDA_GEMM_DW || g.out_dt == DT_F32) store_f32(z, (float *)g.out + at, width, rows, cols, OP == CUDA_GEMM_DW && g.add);
    else if (rows >= 64) gemm_store_bf16<B_PANELS>(z, out, smem, group, {row, t.col}, width);
    else store_last_rows(z, (__nv_bfloat16 *)g.out + at, width, rows, cols);
}

template <int OP>
static __device__ __forceinline__ void consume_grouped(const struct gemm_grouped &g, const CUtensorMap *out,
                                                       const struct block_place &block, int group) {
    const uint32_t smem = block.smem;
    const int lane = (int)threadIdx.x % 32;
    constexpr int A_MN = OP == CUDA_GEMM_DW, B_MN = OP != CUDA_GEMM_FWD;
    constexpr int A_NEXT = (A_MN ? 16 * PANEL_ROW : 32) / 16, B_NEXT = (B_MN ? 16 * PANEL_ROW : 32) / 16; /* 16 of the reduction */
    uint32_t stage = 0, parity = 0;
    for (bool first = true;; first = false) {
        mbarrier_wait(smem + AT_BARS + stage * 8, parity);
        const struct place t = *(const struct place *)(panel_memory() + AT_PLACES + stage * 32);
        if (t.steps == 0) break;
        if (first && group == 1) named_barrier_sync(BAR_LAG, 2 * GROUP);
        if (t.rows <= group * 64 || t.col >= (OP == CUDA_GEMM_FWD ? g.n : g.k)) { /* nothing to store */
            if (first && group == 0) named_barrier_arrive(BAR_LAG, 2 * GROUP);
            for (int k = 0; k < t.steps; k++) {
                const uint32_t full = smem + AT_BARS + stage * 8;
                mbarrier_wait(full, parity);
                __syncwarp();
                if (lane < 2) mbarrier_arrive_cluster(full + STAGES * 8, (uint32_t)lane);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            continue;
        }
        float z[32][4];
        uint32_t before = 0;
        wgmma_fence_registers(z);
        for (int k = 0; k < t.steps; k++) {
            const uint32_t full = smem + AT_BARS + stage * 8, tile = smem + stage * STAGE, mine = tile + (uint32_t)(group * PANEL);
            const uint64_t a = panel_desc(mine);
            const uint64_t b = B_MN ? panels_desc_mn(tile + A_BYTES, PANEL) : panel_desc(tile + A_BYTES);
            mbarrier_wait(full, parity);
            if (OP == CUDA_GEMM_DW && t.reduced < (k + 1) * BK) clear_rows(stage, group, t.reduced - k * BK);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; i++) wgmma_m64n256_ss<A_MN, B_MN>(z, a + i * A_NEXT, b + i * B_NEXT, k > 0 || i > 0);
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
                if (lane < 2) mbarrier_arrive_cluster(before + STAGES * 8, (uint32_t)lane);
            }
            before = full;
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (first && group == 0 && k == (LAG < t.steps ? LAG : t.steps) - 1) named_barrier_arrive(BAR_LAG, 2 * GROUP);
        }
        wgmma_wait<0>();
        wgmma_fence_registers(z);
        if (lane < 2) mbarrier_arrive_cluster(before + STAGES * 8, (uint32_t)lane);
        store_tile<OP>(g, out, z, t, smem, group);
    }
    if (threadIdx.x % GROUP == 0) tma_store_wait();
}

/* ---- the kernel ---- */

template <int OP>
static __global__ void CLUSTER_OF_TWO __launch_bounds__(THREADS, 1)
    grouped_sm90_kernel(const struct gemm_grouped g, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                        const __grid_constant__ CUtensorMap out) {
    const uint32_t smem = smem_addr(panel_memory());
    const struct block_place block = {smem, cluster_rank(), (int)blockIdx.x / 2, (int)gridDim.x / 2};
    const int group = __shfl_sync(WARP_ALL, (int)threadIdx.x / GROUP, 0);
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
        setmaxnreg_dec<56>();
        if (threadIdx.x == 2 * GROUP) produce_grouped<OP>(g, &a, &b, block);
        __syncwarp();
    } else {
        setmaxnreg_inc<224>();
        consume_grouped<OP>(g, &out, block, group);
    }
    cluster_sync(); /* no block exits while the other still arrives at its mbarriers */
}

/* ---- launch ---- */

bool gemm_grouped_sm90_takes(const struct cuda *c, const struct gemm_grouped *g) {
    return cuda_hopper(c) && c->smem_max >= GROUPED_SMEM && (g->op == CUDA_GEMM_FWD ? g->n : g->k) > NARROW;
}

int gemm_grouped_sm90(struct cuda *c, const struct gemm_grouped *g) {
    const bool fwd = g->op == CUDA_GEMM_FWD, dw = g->op == CUDA_GEMM_DW;
    const int64_t width = fwd ? g->n : g->k, in = fwd ? g->k : g->n;
    const int64_t most = gemm_ceil_div(width, BN) * (dw ? gemm_ceil_div(g->n, BM) * g->experts : gemm_group_tiles(g, BM));
    void (*const kernel)(struct gemm_grouped, CUtensorMap, CUtensorMap, CUtensorMap) = fwd  ? grouped_sm90_kernel<CUDA_GEMM_FWD>
                                                                                       : dw ? grouped_sm90_kernel<CUDA_GEMM_DW>
                                                                                            : grouped_sm90_kernel<CUDA_GEMM_DX>;
    CUtensorMap a, b, out = {};
    TRY(cuda_tensor_map(&a, g->a, g->m, in, 64));
    if (dw) TRY(cuda_tensor_map(&b, g->b, g->m, g->k, 64));
    else TRY(cuda_tensor_map_stack(&b, g->b, g->experts, g->n, g->k, 64));
    if (g->out_dt == DT_BF16) TRY(cuda_tensor_map(&out, g->out, g->m, width, 64));
    CU_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, GROUPED_SMEM));
    CU_TRY(cuda_launch_pdl(c, kernel, (unsigned)gemm_min(c->n_sm, 2 * most) / 2 * 2, THREADS, GROUPED_SMEM, *g, a, b, out));
    return 0;
}
