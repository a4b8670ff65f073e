/* gemm_small_m_sm90.cu - our FWD product for the few rows of a decoding step on Hopper: bf16, k a multiple of 64;
 * alone, or with SwiGLU of its columns.
 *
 * A result is one chain of products over k, so that a step cannot be shared out: what can be saved is time between its links.
 * The copy engine fills two rings, of W and of x, and warpgroups that do nothing but multiply (wgmma, x's rows being the 64)
 * walk them; full and free slots are told by barriers in shared memory. W's ring is filled before the kernel in front has ended.
 * With SwiGLU a block has the same columns of gate and of up: it rounds both as they would be stored, and stores what
 * the next product reads.
 *
 * Invariant: as in gemm_small_m.cu, a result is sum over k of steps of 16, ascending, from 0. */
#include "dev/cuda/gemm/gemm.cuh"
#include "dev/cuda/tma.cuh"
#include "dev/cuda/swiglu.cuh"

#include <stdint.h>

enum { PANEL_ALIGN = 1024, MAX_SLOTS = 80 };

struct few {
    const __nv_bfloat16 *bias; /* of W's rows, or NULL */
    void *out;
    int64_t ld_out;
    int m, n, k;          /* n: columns of out */
    int bm;               /* rows of a block, a multiple of 8 */
    int w_slots, x_slots; /* x_slots <= w_slots; not 1, but for one step */
    bool out_f32, add;
};

/* Barriers of the rings. free: by the slot of x. */
struct few_bars {
    uint64_t w_full[MAX_SLOTS], x_full[MAX_SLOTS], free[MAX_SLOTS];
};

/* Two neighbours of a row of out. old: what is added to. */
[[maybe_unused]] static __device__ __forceinline__ void store2(const struct few &p, int64_t at, float2 v, float2 old) {
    if (!p.out_f32) *(__nv_bfloat162 *)((__nv_bfloat16 *)p.out + at) = __floats2bfloat162_rn(v.x, v.y);
    else *(float2 *)((float *)p.out + at) = p.add ? make_float2(v.x + old.x, v.y + old.y) : v;
}

/* Where a block's results begin, and its shared memory. Slots hold KA panels of 64 columns: of x bm rows, of W 8 NB. */
struct few_place {
    uint32_t x_ring, w_ring, w_full, x_full, free; /* the last three: barriers of slot 0 */
    int x_panel, x_slot;                           /* bytes */
    int steps, n0, m0;
};

/* ---- the warp that copies: one thread of it ---- */

template <int NB, int KA, bool PAIR>
static __device__ __forceinline__ void load_w(const struct few_place &q, const CUtensorMap *map, int step, int slot) {
    constexpr int W_PANEL = 8 * NB * PANEL_ROW;
    mbarrier_expect_tx(q.w_full + 8 * slot, KA * W_PANEL);
#pragma unroll
    for (int a = 0; a < KA; a++) {
        const uint32_t to = q.w_ring + (uint32_t)((slot * KA + a) * W_PANEL);
        const int col = (step * KA + a) * (PANEL_ROW / 2);
        if (PAIR) tma_load_pair(to, map, col, q.n0, q.w_full + 8 * slot);
        else tma_load(to, map, col, q.n0, q.w_full + 8 * slot);
    }
}

/* Before the kernel in front has ended: the barriers, and as much of W as its ring holds. readers: warps that multiply. */
template <int NB, int KA, bool PAIR>
static __device__ __forceinline__ void begin(const struct few &p, const struct few_place &q, const CUtensorMap *w_map,
                                             const CUtensorMap *x_map, int readers) {
    for (int s = 0; s < p.w_slots; s++) mbarrier_init(q.w_full + 8 * s, 1);
    for (int s = 0; s < p.x_slots; s++) {
        mbarrier_init(q.x_full + 8 * s, 1);
        mbarrier_init(q.free + 8 * s, readers);
    }
    mbarrier_init_fence();
    for (int s = 0; s < p.w_slots && s < q.steps; s++) load_w<NB, KA, PAIR>(q, w_map, s, s);
    tma_prefetch_map(x_map);
}

/* All of x, and the rest of W as slots become free. */
template <int NB, int KA, bool PAIR>
static __device__ __forceinline__ void feed(const struct few &p, const struct few_place &q, const CUtensorMap *w_map,
                                            const CUtensorMap *x_map) {
    int slot = 0, w_slot = 0, parity = 1; /* slot: of x; w_slot: of the step that left it */
    for (int step = 0; step < q.steps; step++) {
        if (step >= p.x_slots) {
            mbarrier_wait(q.free + 8 * slot, (uint32_t)parity);
            const int next = step - p.x_slots + p.w_slots;
            if (next < q.steps) load_w<NB, KA, PAIR>(q, w_map, next, w_slot);
            w_slot = w_slot + 1 == p.w_slots ? 0 : w_slot + 1;
        }
        mbarrier_expect_tx(q.x_full + 8 * slot, (uint32_t)q.x_slot);
#pragma unroll
        for (int a = 0; a < KA; a++)
            tma_load(q.x_ring + (uint32_t)(slot * q.x_slot + a * q.x_panel), x_map, (step * KA + a) * (PANEL_ROW / 2), q.m0,
                     q.x_full + 8 * slot);
        if (++slot == p.x_slots) slot = 0, parity ^= 1;
    }
}

/* ---- the warps that multiply ---- */

/* group: which 64 of the block's rows; the same for all of a warp, as `slot` and all else that addresses come from. */
template <int NB, int KA>
static __device__ __forceinline__ void multiply(const struct few &p, const struct few_place &q, int group, int lane,
                                                float (&sum)[NB][4]) {
    constexpr int W_PANEL = 8 * NB * PANEL_ROW;
    const uint32_t x_desc = panel_desc_low(q.x_ring + (uint32_t)(group * 64 * PANEL_ROW)), w_desc = panel_desc_low(q.w_ring);
    int slot = 0, w_slot = 0;
    uint32_t parity = 0, w_parity = 0;
    mbarrier_wait(q.w_full, 0);
    mbarrier_wait(q.x_full, 0);
    wgmma_fence();
    for (int step = 0; step < q.steps; step++) {
        const uint32_t x = x_desc + (uint32_t)(slot * q.x_slot) / 16, w = w_desc + (uint32_t)(w_slot * KA * W_PANEL) / 16;
        const uint32_t before = q.free + 8 * (slot ? slot - 1 : p.x_slots - 1);
        if (++slot == p.x_slots) slot = 0, parity ^= 1;
        if (++w_slot == p.w_slots) w_slot = 0, w_parity ^= 1;
        bool w_there = true, x_there = true; /* the next step's: asked while products are under way */
#pragma unroll
        for (int i = 0; i < 4 * KA; i++) {
            wgmma_small_n<NB>(sum, x + (uint32_t)(i / 4 * q.x_panel) / 16 + i % 4 * 2, w + i / 4 * W_PANEL / 16 + i % 4 * 2);
            if (i == 4 * KA - 4) w_there = mbarrier_test(q.w_full + 8 * w_slot, w_parity);
            if (i == 4 * KA - 3) x_there = mbarrier_test(q.x_full + 8 * slot, parity);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step && lane == 0) mbarrier_arrive(before);
        if (step + 1 < q.steps && !(w_there && x_there)) {
            mbarrier_wait(q.w_full + 8 * w_slot, w_parity);
            mbarrier_wait(q.x_full + 8 * slot, parity);
        }
    }
    wgmma_wait<0>();
    wgmma_fence_registers(sum);
}

template <int NB, int RG, int KA, bool PAIR>
static __device__ __forceinline__ void make_rows(const struct few &p, const struct few_place &q, int warp, int lane) {
    constexpr int SETS = PAIR ? NB / 2 : NB;
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
    if (!PAIR && p.add) {
#pragma unroll
        for (int j = 0; j < SETS; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (mine[h] && at + 8 * j < p.n)
                    old[j][h] = *(const float2 *)((const float *)p.out + (q.m0 + row + 8 * h) * p.ld_out + at + 8 * j);
    }
    float sum[NB][4] = {};
    multiply<NB, KA>(p, q, RG == 1 ? 0 : warp / 4, lane, sum);
    float2 v[SETS][2];
#pragma unroll
    for (int j = 0; j < SETS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            v[j][h] = make_float2(sum[j][2 * h] + bias[j].x, sum[j][2 * h + 1] + bias[j].y);
            if constexpr (PAIR) {
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
}

/* A block makes 8 NB columns of W's product (PAIR: 4 NB of gate and the same of up, and so 4 NB of out) for bm rows, at most
 * 64 RG. x's panels have bm rows and wgmma reads 64 at a time: what lies behind reaches results that are not stored.
 * Warpgroups 0 to RG - 1 multiply, the last warp copies. */
template <int NB, int RG, int KA, bool PAIR>
static __global__ void __launch_bounds__(128 * RG + 32)
    few_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, const struct few p) {
#if WGMMA_ENABLED
    extern __shared__ unsigned char memory[];
    __shared__ struct few_bars bars;
    struct few_place q;
    q.x_ring = (smem_addr(memory) + PANEL_ALIGN - 1) & ~(uint32_t)(PANEL_ALIGN - 1);
    q.x_panel = p.bm * PANEL_ROW;
    q.x_slot = KA * q.x_panel;
    q.steps = p.k / (KA * PANEL_ROW / 2);
    q.w_ring = q.x_ring + (uint32_t)(p.x_slots * q.x_slot);
    q.w_full = smem_addr(bars.w_full);
    q.x_full = smem_addr(bars.x_full);
    q.free = smem_addr(bars.free);
    q.n0 = (int)blockIdx.x * (PAIR ? 4 * NB : 8 * NB);
    q.m0 = (int)blockIdx.y * p.bm;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); /* and seen to be the same for all of it */
    pdl_launch_dependents();
    if (warp == 4 * RG) {
        if (elect_one()) begin<NB, KA, PAIR>(p, q, &w_map, &x_map, 4 * RG);
        __syncwarp();
    }
    __syncthreads();
    if (warp == 4 * RG) {
        if (!elect_one()) return;
        pdl_wait();
        feed<NB, KA, PAIR>(p, q, &w_map, &x_map);
        return;
    }
    make_rows<NB, RG, KA, PAIR>(p, q, warp, lane);
#endif
}

/* ---- launch ---- */

struct few_kind {
    void (*kernel)(CUtensorMap, CUtensorMap, struct few);
    int nb, rg, ka; /* of the kernel */
    bool pair;
    int parts; /* blocks beside each other that share the rows */
    int w_slots, x_slots;
    int narrow; /* only where blocks of so many columns would be too many to run at a time; 0: anywhere */
};
template <int NB, int RG, int KA, bool PAIR>
static constexpr struct few_kind kind_of(int parts, int w_slots, int x_slots, int narrow = 0) {
    return {few_kernel<NB, RG, KA, PAIR>, NB, RG, KA, PAIR, parts, w_slots, x_slots, narrow};
}
/* Whole steps said which are here, where products by themselves are near: 48 columns a block and not 32 (the 0.5B's qkv),
 * which leaves multiprocessors to attention, that starts ahead of time; 40 of gate and up, as much room for x as for W. */
static const struct few_kind kinds[GEMM_N_FEW + GEMM_N_PAIR] = {
    kind_of<2, 1, 2, false>(2, 20, 8), kind_of<2, 1, 4, false>(2, 6, 6),    kind_of<2, 1, 2, false>(1, 20, 6),
    kind_of<4, 1, 2, false>(4, 10, 6), kind_of<2, 1, 2, false>(2, 12, 6),   kind_of<6, 1, 2, false>(2, 8, 8),
    kind_of<4, 2, 2, false>(1, 8, 5),  kind_of<4, 1, 4, false>(2, 5, 5),    kind_of<10, 2, 1, true>(1, 6, 6),
    kind_of<10, 1, 2, true>(1, 4, 4),  kind_of<12, 2, 1, true>(1, 9, 8, 40)};

int gemm_few(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran) {
    const struct few_kind *v = &kinds[kind];
    const int64_t depth = v->ka * (PANEL_ROW / 2), n = v->pair ? a->n / 2 : a->n, cols = v->pair ? 4 * v->nb : 8 * v->nb;
    *ran = false;
    if (a->in != DT_BF16 || a->m > GEMM_SMALL_ROWS || a->k % depth || n % 8 || n > INT32_MAX || a->k > INT32_MAX) return 0;
    if (v->narrow && gemm_ceil_div(n, v->narrow) <= c->n_sm) return 0;
    struct few p = {};
    p.bm = (int)gemm_ceil_div(gemm_ceil_div(a->m, v->parts), 8) * 8;
    p.w_slots = (int)gemm_min(v->w_slots, a->k / depth);
    p.x_slots = (int)gemm_min(v->x_slots, p.w_slots);
    if (p.bm > 64 * v->rg) return 0;
    /* wgmma reads 64 rows where the last panel of x has fewer */
    const int64_t behind = (int64_t)(64 * v->rg - p.bm) * PANEL_ROW, w_ring = (int64_t)p.w_slots * v->ka * v->nb * 8 * PANEL_ROW;
    const int64_t bytes = PANEL_ALIGN + (int64_t)p.x_slots * v->ka * p.bm * PANEL_ROW + (w_ring > behind ? w_ring : behind);
    if (bytes + (int64_t)sizeof(struct few_bars) > (int64_t)c->smem_max) return 0;
    bool *ready = &c->gemm->few_ready[kind];
    const int most = (int)(c->smem_max - sizeof(struct few_bars));
    if (!*ready) CU_TRY(cudaFuncSetAttribute((const void *)v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    *ready = true;
    p.bias = (const __nv_bfloat16 *)a->bias;
    p.out = a->out;
    p.ld_out = a->ld_out;
    p.m = (int)a->m;
    p.n = (int)n;
    p.k = (int)a->k;
    p.out_f32 = a->out_dt == DT_F32;
    p.add = a->add;
    CUtensorMap w, x;
    TRY(v->pair ? cuda_tensor_map_pair(&w, a->b, n, a->k, (int)cols) : cuda_tensor_map(&w, a->b, n, a->k, (int)cols));
    TRY(cuda_tensor_map(&x, a->a, a->m, a->k, p.bm));
    const dim3 grid((unsigned)gemm_ceil_div(n, cols), (unsigned)gemm_ceil_div(a->m, p.bm));
    CU_TRY(cuda_launch(c, v->kernel, grid, 128 * v->rg + 32, (size_t)bytes, w, x, p));
    *ran = true;
    return 0;
}
