/* gemm_small_m.cu - small-M GEMM for decoding: FWD, bf16, at most 96 rows, K a multiple of 128.
 *
 * Libraries fill a GPU at small M by split-K, which batch invariance forbids.  Here the parallelism comes from narrow
 * tiles and deep pipelines: cp.async loads tiles of W and x through a multi-stage shared-memory pipeline, and each element is
 * one chain of mma.sync m16n8k16, or of WGMMA m64nNk16, that walks K in order.  W's rows are the M of the instruction, x's
 * rows its N.  A block's first tiles of W are loaded before the previous kernel has ended (PDL).
 *
 * Invariant: an element is a sum over K in steps of 16, ascending, from 0, whatever the tile, M or number of
 * stages.  Whether these are the bits of the shape's canonical algorithm is checked at run time
 * (gemm_autotune.cu); only then is the kernel used. */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/wgmma.cuh"

#include <stdint.h>

enum {
    WGMMA_KC = 64,
    WGMMA_ROW = WGMMA_KC * 2,
    WGMMA_ALIGN = 1024
};                                                      /* the same of small_m_wgmma_kernel; where its stages begins */
enum { KC = 128, CHUNKS = KC / 8, ROW_BYTES = KC * 2 }; /* a row of a stage: elements, 16-byte chunks, bytes */

struct small_m_args {
    const __nv_bfloat16 *w, *x, *bias; /* (n, k), (m, k), (n) or NULL */
    void *out;
    int64_t ld_out;
    int m, k;
    bool out_f32, add;
};

/* ---- mma.sync ---- */

/* Where in a stage a 16-byte chunk lies, swizzled: those of 8 neighbour rows are in different banks. For an
 * even number c, chunk_at(row, chunk ^ c) == chunk_at(row, chunk) ^ c * 16. */
static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return (uint32_t)(row * ROW_BYTES + ((chunk ^ (row & 7)) << 4));
}

static __device__ __forceinline__ void store(const struct small_m_args &p, int64_t m0, int row, int64_t col, float v) {
    if (row >= p.m) return;
    const int64_t at = (m0 + row) * p.ld_out + col;
    if (p.bias) v += __bfloat162float(p.bias[col]);
    if (!p.out_f32) ((__nv_bfloat16 *)p.out)[at] = __float2bfloat16_rn(v);
    else ((float *)p.out)[at] = p.add ? v + ((float *)p.out)[at] : v;
}

/* Tile of a block: 16 WN columns by 16 MT rows of out; blockIdx.y says which rows. Its warps are WN x WM: a warp
 * holds 16 columns and MT / WM groups of 16 rows. A stage: 16 WN rows of W, then 16 MT rows of x. Rows of x from m on are never
 * loaded: what lies there only reaches elements that are not stored. */
template <int MT, int WN, int WM, int STAGES>
static __global__ void __launch_bounds__(32 * WN * WM) small_m_mma_kernel(struct small_m_args p) {
    constexpr int BN = 16 * WN, BM = 16 * MT, ROWS = BN + BM, GROUPS = MT / WM, THREADS = 32 * WN * WM;
    constexpr int PASS = THREADS / CHUNKS; /* rows that the block copies at once */
    constexpr int W_PASSES = (BN + PASS - 1) / PASS, X_PASSES = BM / PASS;
    static_assert(X_PASSES * PASS == BM && GROUPS * WM == MT, "whole passes, whole groups");
    extern __shared__ __align__(WGMMA_ALIGN) unsigned char stages[];
    const uint32_t stages0 = (uint32_t)__cvta_generic_to_shared(stages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wn = warp % WN, wm = warp / WN;
    const int64_t n0 = (int64_t)blockIdx.x * BN, m0 = (int64_t)blockIdx.y * BM, pass = (int64_t)PASS * p.k;
    const int steps = p.k / KC, row0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const __nv_bfloat16 *w_src = p.w + (n0 + row0) * p.k + chunk * 8, *x_src = p.x + (m0 + row0) * p.k + chunk * 8;
    p.m -= (int)m0; /* rows from here on */

    /* the next step's rows */
    const auto fill_w = [&](int stage) {
        const uint32_t at = stages0 + (uint32_t)(stage * ROWS * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < W_PASSES; i++)
            if (row0 + i * PASS < BN) cp_async16(at + chunk_at(row0 + i * PASS, chunk), w_src + i * pass);
        w_src += KC;
    };
    const auto fill_x = [&](int stage) {
        const uint32_t at = stages0 + (uint32_t)(stage * ROWS * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < X_PASSES; i++)
            if (row0 + i * PASS < p.m) cp_async16(at + chunk_at(BN + row0 + i * PASS, chunk), x_src + i * pass);
        x_src += KC;
    };
    pdl_launch_dependents();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (s < steps) fill_w(s);
    pdl_wait();
    float sum[GROUPS][2][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) fill_x(s);
        cp_commit(); /* the first cp.async group has W of all stages */
    }
    /* ldmatrix: lane l names a row of matrix l / 8. W: rows 0-7 and 8-15 of k 0-7, then of k 8-15; x: k 0-7 and
     * 8-15 of rows 0-7, then of rows 8-15. */
    const uint32_t a_at = chunk_at(wn * 16 + lane % 16, lane / 16);
    const uint32_t b_at = chunk_at(BN + wm * GROUPS * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    int stage = 0, empty_stage = STAGES - 1; /* of this step; of the step before, which is refilled */
    for (int step = 0; step < steps; step++) {
        cp_wait<STAGES - 2>(); /* this thread's copies of this stage are done */
        __syncthreads();       /* all threads' are, and all have left empty_stage */
        if (step + STAGES - 1 < steps) {
            fill_w(empty_stage);
            fill_x(empty_stage);
        }
        cp_commit();
        const uint32_t at = stages0 + (uint32_t)(stage * ROWS * ROW_BYTES);
#pragma unroll
        for (int ks = 0; ks < KC / 16; ks++) { /* the compiler loads the next operands while an mma runs */
            uint32_t a[4];
            ldmatrix_x4(a, at + (a_at ^ (ks * 32)));
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                uint32_t b[4];
                ldmatrix_x4(b, at + (b_at ^ (ks * 32)) + g * 16 * ROW_BYTES);
                mma_bf16(sum[g][0], a, b[0], b[1]);
                mma_bf16(sum[g][1], a, b[2], b[3]);
            }
        }
        empty_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) /* registers 0, 1: column lane / 4; 2, 3: 8 further */
                store(p, m0, (wm * GROUPS + g) * 16 + h * 8 + lane % 4 * 2 + i % 2, n0 + wn * 16 + lane / 4 + i / 2 * 8,
                      sum[g][h][i]);
}

/* ---- WGMMA (sm_90a) for many columns: both operands are read from shared memory ---- */

/* Tile of a block of WG warpgroups: 64 WG columns of out for all rows, at most 8 NB. A stage: 64 WG rows of W and 8 NB rows
 * of x, 64 elements of each. A stage is refilled two steps after its WGMMAs, since one group may be in flight. Built
 * for another architecture the kernel writes nothing, and so is never chosen. */
template <int NB, int WG, int STAGES>
static __global__ void __launch_bounds__(128 * WG) small_m_wgmma_kernel(const struct small_m_args p) {
#if WGMMA_ENABLED
    constexpr int BN = 64 * WG, ROWS = BN + 8 * NB, PASS = 128 * WG / (WGMMA_KC / 8), X_PASSES = (8 * NB + PASS - 1) / PASS;
    extern __shared__ __align__(WGMMA_ALIGN) unsigned char stages[];
    const uint32_t stages0 = ((uint32_t)__cvta_generic_to_shared(stages) + WGMMA_ALIGN - 1) & ~(uint32_t)(WGMMA_ALIGN - 1);
    const int64_t n0 = (int64_t)blockIdx.x * BN, pass = (int64_t)PASS * p.k;
    const int steps = p.k / WGMMA_KC, row0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const __nv_bfloat16 *w_src = p.w + (n0 + row0) * p.k + chunk * 8, *x_src = p.x + (int64_t)row0 * p.k + chunk * 8;
    const uint32_t to = stages0 + (uint32_t)(row0 * WGMMA_ROW + ((chunk ^ (row0 & 7)) << 4)); /* PASS is a multiple of 8 */

    const auto fill_w = [&](int stage) {
#pragma unroll
        for (int i = 0; i < BN / PASS; i++) cp_async16(to + (uint32_t)((stage * ROWS + i * PASS) * WGMMA_ROW), w_src + i * pass);
        w_src += WGMMA_KC;
    };
    const auto fill_x = [&](int stage) {
#pragma unroll
        for (int i = 0; i < X_PASSES; i++)
            if (row0 + i * PASS < p.m) cp_async16(to + (uint32_t)((stage * ROWS + BN + i * PASS) * WGMMA_ROW), x_src + i * pass);
        x_src += WGMMA_KC;
    };
    pdl_launch_dependents();
#pragma unroll
    for (int s = 0; s < STAGES - 2; s++)
        if (s < steps) fill_w(s);
    pdl_wait();
#pragma unroll
    for (int s = 0; s < STAGES - 2; s++) {
        if (s < steps) fill_x(s);
        cp_commit();
    }
    const int group = WG == 1 ? 0 : __shfl_sync(WARP_ALL, threadIdx.x / 128, 0); /* a warp-uniform value for the compiler */
    float sum[NB][4] = {};
    int stage = 0, empty_stage = STAGES - 2;
    for (int step = 0; step < steps; step++) {
        cp_wait<STAGES - 3>();
        fence_proxy_async(); /* makes this thread's copies visible to WGMMA */
        __syncthreads();     /* and all have left empty_stage */
        if (step + STAGES - 2 < steps) {
            fill_w(empty_stage);
            fill_x(empty_stage);
        }
        cp_commit();
        const uint32_t at = stages0 + (uint32_t)(stage * ROWS * WGMMA_ROW);
        const uint32_t w = panel_desc_low(at + group * 64 * WGMMA_ROW), x = panel_desc_low(at + BN * WGMMA_ROW);
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < WGMMA_KC / 16; ks++) wgmma_small_n<NB>(sum, w + ks * 2, x + ks * 2);
        wgmma_commit();
        wgmma_wait<1>();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        empty_stage = empty_stage + 1 == STAGES ? 0 : empty_stage + 1;
    }
    wgmma_wait<0>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < NB; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) store(p, 0, g * 8 + lane % 4 * 2 + i % 2, n0 + warp * 16 + lane / 4 + i / 2 * 8, sum[g][i]);
#endif
}

/* ---- launch ---- */

struct variant {
    void (*kernel)(struct small_m_args);
    int bn, bm, threads, bytes; /* columns and rows of a block; shared memory */
};
template <int MT, int WN, int WM, int STAGES> static constexpr struct variant variant_of(void) {
    return {small_m_mma_kernel<MT, WN, WM, STAGES>, 16 * WN, 16 * MT, 32 * WN * WM, STAGES * (16 * WN + 16 * MT) * ROW_BYTES};
}
template <int NB, int WG, int STAGES> static constexpr struct variant wide_of(void) {
    return {small_m_wgmma_kernel<NB, WG, STAGES>, 64 * WG, 8 * NB, 128 * WG, WGMMA_ALIGN + STAGES * (64 * WG + 8 * NB) * WGMMA_ROW};
}
/* By M in units of 16. The last three divide the rows among blocks too: for GEMMs with few columns. */
#define OF_MT(MT)                                                                                                                \
    {                                                                                                                            \
        variant_of<MT, 1, MT, 6>(), variant_of<MT, 2, MT, 4>(), variant_of<MT, 4, 1, 3>(), wide_of < 2 * MT, 1, MT<6 ? 6 : 5>(), \
            wide_of < 2 * MT, 2, MT<6 ? 8 : 7>(), variant_of<1, 2, 1, 8>(), variant_of<2, 2, 2, 6>(), variant_of<3, 1, 3, 6>()   \
    }
static const struct variant variants[GEMM_SMALL_M_MAX / 16][GEMM_N_SMALL_M] = {OF_MT(1), OF_MT(2), OF_MT(3),
                                                                               OF_MT(4), OF_MT(5), OF_MT(6)};
#undef OF_MT

int gemm_small_m(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran) {
    *ran = false;
    if (a->in != DT_BF16 || a->m > GEMM_SMALL_M_MAX || a->k % KC || a->k > INT32_MAX) return 0;
    const int64_t mt = gemm_ceil_div(a->m, 16) - 1;
    const struct variant *v = &variants[mt][kind];
    bool *ready = &c->gemm->small_m_ready[mt][kind];
    if (a->n % v->bn || a->n / v->bn > INT32_MAX || (size_t)v->bytes > c->smem_max) return 0;
    if (!*ready) CU_TRY(cudaFuncSetAttribute((const void *)v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v->bytes));
    *ready = true;
    struct small_m_args p = {};
    p.w = (const __nv_bfloat16 *)a->b;
    p.x = (const __nv_bfloat16 *)a->a;
    p.bias = (const __nv_bfloat16 *)a->bias;
    p.out = a->out;
    p.ld_out = a->ld_out;
    p.m = (int)a->m;
    p.k = (int)a->k;
    p.out_f32 = a->out_dt == DT_F32;
    p.add = a->add;
    const dim3 grid((unsigned)(a->n / v->bn), (unsigned)gemm_ceil_div(a->m, v->bm));
    CU_TRY(cuda_launch(c, v->kernel, grid, v->threads, (size_t)v->bytes, p));
    *ran = true;
    return 0;
}
