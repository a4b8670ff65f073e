/* gemm_small_m_sm90.cu - small-M GEMM for decoding on Hopper: FWD, bf16, K a multiple of 64, with or without a fused
 * SwiGLU epilogue.
 *
 * Batch invariance forbids split-K, so an element of the output is one chain of WGMMAs over K, and what can be saved is the time
 * between its links.  The kernel is warp-specialized: one producer warp loads W and x by TMA into two shared-memory
 * pipelines, consumer warpgroups do nothing but WGMMA (x's rows are the 64 of M), mbarriers signal full and empty
 * stages.  The prologue fills W's pipeline before the previous kernel has ended (PDL).
 * Two blocks that have the same columns and the two halves of the rows may be a cluster (PAIR): each loads every other panel of
 * W for both, by TMA multicast.
 * With SwiGLU a block has the same columns of gate and of up.  It rounds both to bf16, as they would be stored, and stores
 * the input of the next GEMM.
 *
 * Invariant: as in gemm_small_m.cu, an element is a sum over K in steps of 16, ascending, from 0. */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/swiglu.cuh"
#include "device/cuda/tma.cuh"

#include <stdint.h>

enum { MBARRIER_BYTES = 1024 }; /* at the start of shared memory: panels behind it are aligned */

struct small_m_args {
    const __nv_bfloat16 *bias; /* of W's rows, or NULL */
    void *out;
    int64_t ld_out;
    int m, n, k;            /* n: columns of out */
    int bm;                 /* rows of a block, a multiple of 8 */
    int w_stages, x_stages; /* x_stages <= w_stages; 1 only where there is one step */
    bool out_f32, add;
};

/* Two neighbouring columns of a row of out. old: what is accumulated on. */
[[maybe_unused]] static __device__ __forceinline__ void store2(const struct small_m_args &p, int64_t at, float2 v, float2 old) {
    if (!p.out_f32) *(__nv_bfloat162 *)((__nv_bfloat16 *)p.out + at) = __floats2bfloat162_rn(v.x, v.y);
    else *(float2 *)((float *)p.out + at) = p.add ? make_float2(v.x + old.x, v.y + old.y) : v;
}

/* A block's place in out and in its cluster, and its shared memory. A stage holds KA panels of 64 columns: bm rows of x, 8 NB rows
 * of W. */
struct small_m_smem {
    uint32_t x_stages_at, w_stages_at;
    uint32_t w_full, x_full, empty, w_empty; /* mbarriers of stage 0; without PAIR x's empty one stands for W's too */
    int x_panel, x_stage_bytes;              /* bytes */
    int steps, n0, m0;
    int rank; /* in the cluster */
};

/* ---- producer warp: one thread of it ---- */

/* PAIR: every other panel, for both blocks. Each loads some of every stage: so what releases a stage in both is not counted to the
 * phase before. */
template <int NB, int KA, bool SWIGLU, bool PAIR>
static __device__ __forceinline__ void load_w(const struct small_m_smem &q, const CUtensorMap *map, int step, int stage) {
    constexpr int W_PANEL = 8 * NB * PANEL_ROW;
    static_assert(!PAIR || (KA % 2 == 0 && !SWIGLU), "each has panels of a stage; a pair of tiles has no multicast");
    mbarrier_expect_tx(q.w_full + 8 * stage, KA * W_PANEL);
#pragma unroll
    for (int a = 0; a < KA; a++) {
        const uint32_t to = q.w_stages_at + (uint32_t)((stage * KA + a) * W_PANEL);
        const int col = (step * KA + a) * (PANEL_ROW / 2);
        if (SWIGLU) tma_load_pair(to, map, col, q.n0, q.w_full + 8 * stage);
        else if (!PAIR) tma_load(to, map, col, q.n0, q.w_full + 8 * stage);
        else if (a % 2 == q.rank) tma_load_multicast(to, map, col, q.n0, q.w_full + 8 * stage, 3);
    }
}
template <int NB, int KA, bool SWIGLU, bool PAIR>
static __device__ __forceinline__ void fill_w(const struct small_m_args &p, const struct small_m_smem &q, const CUtensorMap *map) {
    for (int s = 0; s < p.w_stages && s < q.steps; s++) load_w<NB, KA, SWIGLU, PAIR>(q, map, s, s);
}

/* warps: consumers of a block */
template <bool PAIR>
static __device__ __forceinline__ void init_mbarriers(const struct small_m_args &p, const struct small_m_smem &q, int warps) {
    for (int s = 0; s < p.w_stages; s++) {
        mbarrier_init(q.w_full + 8 * s, 1);
        if (PAIR) mbarrier_init(q.w_empty + 8 * s, 2 * warps);
    }
    for (int s = 0; s < p.x_stages; s++) {
        mbarrier_init(q.x_full + 8 * s, 1);
        mbarrier_init(q.empty + 8 * s, warps);
    }
    mbarrier_init_fence();
}

template <int KA>
static __device__ __forceinline__ void load_x(const struct small_m_smem &q, const CUtensorMap *map, int step, int stage) {
    mbarrier_expect_tx(q.x_full + 8 * stage, (uint32_t)q.x_stage_bytes);
#pragma unroll
    for (int a = 0; a < KA; a++)
        tma_load(q.x_stages_at + (uint32_t)(stage * q.x_stage_bytes + a * q.x_panel), map, (step * KA + a) * (PANEL_ROW / 2), q.m0,
                 q.x_full + 8 * stage);
}

/* All of x, and the rest of W as stages become empty. A pair's ends when both have released all stages here: so no block exits
 * while the other still arrives at its mbarriers or waits for its copies. */
template <int NB, int KA, bool SWIGLU, bool PAIR>
static __device__ __forceinline__ void produce(const struct small_m_args &p, const struct small_m_smem &q, const CUtensorMap *w_map,
                                               const CUtensorMap *x_map) {
    int stage = 0, w_stage = 0, parity = 1, w_parity = 0; /* stage: of x; w_stage: W's of the step that has left it */
    const int end = PAIR ? q.steps + p.x_stages : q.steps;
    for (int step = 0; step < end; step++) {
        if (step >= p.x_stages) {
            mbarrier_wait(q.empty + 8 * stage, (uint32_t)parity);
            if (PAIR) mbarrier_wait(q.w_empty + 8 * w_stage, (uint32_t)w_parity);
            const int next = step - p.x_stages + p.w_stages;
            if (next < q.steps) load_w<NB, KA, SWIGLU, PAIR>(q, w_map, next, w_stage);
            if (++w_stage == p.w_stages) w_stage = 0, w_parity ^= 1;
        }
        if (step < q.steps) load_x<KA>(q, x_map, step, stage);
        if (++stage == p.x_stages) stage = 0, parity ^= 1;
    }
}

/* ---- consumer warps ---- */

/* This warp has read a stage of x and of W: whoever loads them may. */
template <bool PAIR> static __device__ __forceinline__ void release(uint32_t empty, uint32_t w_empty, int lane) {
    if (lane == 0) mbarrier_arrive(empty);
    if (PAIR && lane < 2) mbarrier_arrive_cluster(w_empty, (uint32_t)lane);
}

/* group: which 64 of the block's rows. It, `stage` and all that addresses are made of are warp-uniform. */
template <int NB, int KA, bool PAIR>
static __device__ __forceinline__ void mainloop(const struct small_m_args &p, const struct small_m_smem &q, int group, int lane,
                                                float (&sum)[NB][4]) {
    constexpr int W_PANEL = 8 * NB * PANEL_ROW;
    const uint32_t x_desc = panel_desc_low(q.x_stages_at + (uint32_t)(group * 64 * PANEL_ROW)),
                   w_desc = panel_desc_low(q.w_stages_at);
    int stage = 0, w_stage = 0;
    uint32_t parity = 0, w_parity = 0;
    mbarrier_wait(q.w_full, 0);
    mbarrier_wait(q.x_full, 0);
    wgmma_fence();
    for (int step = 0; step < q.steps; step++) {
        const uint32_t x = x_desc + (uint32_t)(stage * q.x_stage_bytes) / 16, w = w_desc + (uint32_t)(w_stage * KA * W_PANEL) / 16;
        const uint32_t before = q.empty + 8 * (stage ? stage - 1 : p.x_stages - 1),
                       w_before = q.w_empty + 8 * (w_stage ? w_stage - 1 : p.w_stages - 1);
        if (++stage == p.x_stages) stage = 0, parity ^= 1;
        if (++w_stage == p.w_stages) w_stage = 0, w_parity ^= 1;
        bool w_there = true, x_there = true; /* the next stages: tested while WGMMAs are in flight */
#pragma unroll
        for (int i = 0; i < 4 * KA; i++) {
            wgmma_small_n<NB>(sum, x + (uint32_t)(i / 4 * q.x_panel) / 16 + i % 4 * 2, w + i / 4 * W_PANEL / 16 + i % 4 * 2);
            if (i == 4 * KA - 4) w_there = mbarrier_test(q.w_full + 8 * w_stage, w_parity);
            if (i == 4 * KA - 3) x_there = mbarrier_test(q.x_full + 8 * stage, parity);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release<PAIR>(before, w_before, lane);
        if (step + 1 < q.steps && !(w_there && x_there)) {
            mbarrier_wait(q.w_full + 8 * w_stage, w_parity);
            mbarrier_wait(q.x_full + 8 * stage, parity);
        }
    }
    wgmma_wait<0>();
    wgmma_fence_registers(sum);
}

template <int NB, int RG, int KA, bool SWIGLU, bool PAIR>
static __device__ __forceinline__ void compute(const struct small_m_args &p, const struct small_m_smem &q, int warp, int lane) {
    constexpr int SETS = SWIGLU ? NB / 2 : NB;
    /* A lane's results: rows `row` and 8 further, of each 8 columns `at` and its neighbour. */
    const int row = warp * 16 + lane / 4, at = q.n0 + lane % 4 * 2;
    const bool mine[2] = {row < p.bm && q.m0 + row < p.m, row + 8 < p.bm && q.m0 + row + 8 < p.m};
    float2 bias[NB] = {}, old[SETS][2] = {};
    if (p.bias) {
#pragma unroll
        for (int j = 0; j < NB; j++) {
            const int col = at + j % SETS * 8;
            if (col < p.n) bias[j] = __bfloat1622float2(*(const __nv_bfloat162 *)(p.bias + j / SETS * p.n + col));
        }
    }
    pdl_wait();
    if (!SWIGLU && p.add) {
#pragma unroll
        for (int j = 0; j < SETS; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (mine[h] && at + 8 * j < p.n)
                    old[j][h] = *(const float2 *)((const float *)p.out + (q.m0 + row + 8 * h) * p.ld_out + at + 8 * j);
    }
    float sum[NB][4] = {};
    mainloop<NB, KA, PAIR>(p, q, RG == 1 ? 0 : warp / 4, lane, sum);
    float2 v[SETS][2];
#pragma unroll
    for (int j = 0; j < SETS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            v[j][h] = make_float2(sum[j][2 * h] + bias[j].x, sum[j][2 * h + 1] + bias[j].y);
            if constexpr (SWIGLU) {
                const float2 g = __bfloat1622float2(__floats2bfloat162_rn(v[j][h].x, v[j][h].y));
                const float2 u = __bfloat1622float2(
                    __floats2bfloat162_rn(sum[SETS + j][2 * h] + bias[SETS + j].x, sum[SETS + j][2 * h + 1] + bias[SETS + j].y));
                v[j][h] = make_float2(swiglu(g.x, u.x), swiglu(g.y, u.y));
            }
        }
#pragma unroll
    for (int j = 0; j < SETS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (mine[h] && at + 8 * j < p.n) store2(p, (q.m0 + row + 8 * h) * p.ld_out + at + 8 * j, v[j][h], old[j][h]);
    /* the last stages; in mainloop this would make the compiler wait for each WGMMA */
    if (PAIR) release<PAIR>(q.empty + 8 * ((q.steps - 1) % p.x_stages), q.w_empty + 8 * ((q.steps - 1) % p.w_stages), lane);
}

/* Tile of a block: 8 NB rows of W (SWIGLU: 4 NB of gate and the same of up, so 4 NB columns of out) by bm rows of x, at most
 * 64 RG. x's panels have bm rows and WGMMA reads 64 at a time: what lies behind them only reaches elements that are not stored.
 * Warpgroups 0 to RG - 1 are consumers, the last warp is the producer. */
template <int NB, int RG, int KA, bool SWIGLU, bool PAIR>
static __global__ void __launch_bounds__(128 * RG + 32)
    small_m_tma_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                       const struct small_m_args p) {
#if WGMMA_ENABLED
    struct small_m_smem q;
    q.x_panel = p.bm * PANEL_ROW;
    q.x_stage_bytes = KA * q.x_panel;
    q.steps = p.k / (KA * PANEL_ROW / 2);
    q.w_full = smem_addr(panel_memory());
    q.x_full = q.w_full + 8 * p.w_stages;
    q.empty = q.x_full + 8 * p.x_stages;
    q.w_empty = q.empty + 8 * p.x_stages;
    q.x_stages_at = q.w_full + MBARRIER_BYTES;
    q.w_stages_at = q.x_stages_at + (uint32_t)(p.x_stages * q.x_stage_bytes);
    q.n0 = (int)(PAIR ? blockIdx.x / 2 : blockIdx.x) * (SWIGLU ? 4 * NB : 8 * NB);
    q.m0 = (int)(PAIR ? blockIdx.x % 2 : blockIdx.y) * p.bm;
    q.rank = (int)blockIdx.x % 2;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(WARP_ALL, threadIdx.x / 32, 0); /* so that the compiler sees a warp-uniform value */
    pdl_launch_dependents();
    if (warp == 4 * RG) {
        if (elect_one()) {
            init_mbarriers<PAIR>(p, q, 4 * RG);
            if (!PAIR) fill_w<NB, KA, SWIGLU, PAIR>(p, q, &w_map);
            tma_prefetch_map(&x_map);
        }
        __syncwarp();
    }
    if (PAIR) cluster_sync();
    else __syncthreads();
    if (warp == 4 * RG) {
        if (!elect_one()) return;
        if (PAIR) fill_w<NB, KA, SWIGLU, PAIR>(p, q, &w_map);
        pdl_wait();
        produce<NB, KA, SWIGLU, PAIR>(p, q, &w_map, &x_map);
        return;
    }
    compute<NB, RG, KA, SWIGLU, PAIR>(p, q, warp, lane);
#endif
}

/* ---- launch ---- */

struct small_m_kind {
    void (*kernel)(CUtensorMap, CUtensorMap, struct small_m_args);
    int nb, rg, ka; /* of the kernel */
    bool swiglu, pair;
    int parts; /* blocks that the rows are divided among */
    int w_stages, x_stages;
    int narrow; /* only where tiles of so many columns would be more than one wave; 0: anywhere */
};
template <int NB, int RG, int KA, bool SWIGLU, bool PAIR = false>
static constexpr struct small_m_kind kind_of(int parts, int w_stages, int x_stages, int narrow = 0) {
    return {small_m_tma_kernel<NB, RG, KA, SWIGLU, PAIR>, NB, RG, KA, SWIGLU, PAIR, parts, w_stages, x_stages, narrow};
}
/* Chosen by whole decoding steps, where GEMMs timed alone are near each other: 48 columns a block and not 32 (the 0.5B's qkv)
 * leave multiprocessors to attention, which starts early; 40 of gate and up, with as many stages for x as for W. */
static const struct small_m_kind kinds[GEMM_N_SMALL_M_TMA + GEMM_N_SMALL_M_SWIGLU] = {
    kind_of<2, 1, 2, false>(2, 20, 8), kind_of<2, 1, 4, false>(2, 6, 6), kind_of<2, 1, 2, false>(1, 20, 6),
    kind_of<2, 1, 2, false>(2, 12, 6), kind_of<6, 1, 2, false>(2, 8, 8), kind_of<4, 2, 2, false>(1, 8, 5),
    kind_of<4, 1, 4, false>(2, 5, 5), kind_of<6, 2, 2, false>(1, 5, 4), kind_of<8, 2, 2, false>(1, 5, 5),
    kind_of<4, 1, 4, false, true>(2, 5, 5), kind_of<8, 1, 2, false, true>(2, 7, 7), kind_of<10, 1, 2, false, true>(2, 6, 6),
    /* SwiGLU */
    kind_of<10, 2, 1, true>(1, 6, 6), kind_of<10, 1, 2, true>(1, 4, 4), kind_of<12, 2, 1, true>(1, 9, 8, 40)};

/* As many stages as the kind has, fewer where the rows leave no room for them. bytes: of shared memory. */
static bool fit_stages(const struct cuda *c, const struct small_m_kind *v, struct small_m_args *p, size_t *bytes) {
    const int w = v->ka * v->nb * 8 * PANEL_ROW, x = v->ka * p->bm * PANEL_ROW; /* bytes of a stage */
    const int behind = (64 * v->rg - p->bm) * PANEL_ROW; /* WGMMA reads 64 rows where the last panel of x has fewer */
    const int steps = p->k / (v->ka * PANEL_ROW / 2);
    p->w_stages = v->w_stages < steps ? v->w_stages : steps;
    p->x_stages = v->x_stages < p->w_stages ? v->x_stages : p->w_stages;
    for (;;) {
        const int w_bytes = p->w_stages * w, x_bytes = p->x_stages * x;
        *bytes = (size_t)(MBARRIER_BYTES + x_bytes + (w_bytes > behind ? w_bytes : behind));
        if (*bytes <= c->smem_max) return true;
        if (p->x_stages == 2) return false;
        if (x_bytes > w_bytes || p->w_stages == p->x_stages) p->x_stages--;
        else p->w_stages--;
    }
}

int gemm_small_m_tma(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran) {
    const struct small_m_kind *v = &kinds[kind];
    const int64_t depth = v->ka * (PANEL_ROW / 2), n = v->swiglu ? a->n / 2 : a->n, cols = v->swiglu ? 4 * v->nb : 8 * v->nb;
    *ran = false;
    if (a->in != DT_BF16 || a->m > GEMM_SMALL_M_TMA_MAX || a->k % depth || n % 8 || n > INT32_MAX || a->k > INT32_MAX) return 0;
    if (v->narrow && gemm_ceil_div(n, v->narrow) <= c->n_sm) return 0;
    struct small_m_args p = {};
    size_t bytes;
    p.bm = (int)gemm_ceil_div(gemm_ceil_div(a->m, v->parts), 8) * 8;
    p.k = (int)a->k;
    if (p.bm > 64 * v->rg || !fit_stages(c, v, &p, &bytes)) return 0;
    bool *ready = &c->gemm->small_m_tma_ready[kind];
    const int most = (int)c->smem_max;
    if (!*ready) CU_TRY(cudaFuncSetAttribute((const void *)v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    *ready = true;
    p.bias = (const __nv_bfloat16 *)a->bias;
    p.out = a->out;
    p.ld_out = a->ld_out;
    p.m = (int)a->m;
    p.n = (int)n;
    p.out_f32 = a->out_dt == DT_F32;
    p.add = a->add;
    CUtensorMap w, x;
    TRY(v->swiglu ? cuda_tensor_map_pair(&w, a->b, n, a->k, (int)cols) : cuda_tensor_map(&w, a->b, n, a->k, (int)cols));
    TRY(cuda_tensor_map(&x, a->a, a->m, a->k, p.bm));
    dim3 grid((unsigned)gemm_ceil_div(n, cols), (unsigned)gemm_ceil_div(a->m, p.bm));
    if (v->pair) grid = dim3(2 * grid.x); /* a block whose rows lie outside of out reads zeros and stores nothing */
    if (v->pair) CU_TRY(cuda_launch_pairs(c, v->kernel, grid, 128 * v->rg + 32, bytes, w, x, p));
    else CU_TRY(cuda_launch(c, v->kernel, grid, 128 * v->rg + 32, bytes, w, x, p));
    *ran = true;
    return 0;
}
