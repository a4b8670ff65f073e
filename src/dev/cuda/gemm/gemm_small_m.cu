/* gemm_small_m.cu - our own FWD product for the few rows of a decoding step: bf16, at most
 * 96 rows, k a multiple of 128.
 *
 * Splitting k is how libraries fill a GPU when there are few rows, and it is what exactness
 * forbids.  Here the parallelism comes from narrow tiles and from depth: tiles of W and x stream
 * through a ring in shared memory by cp.async while one chain of mma.sync m16n8k16 a result, or
 * of wgmma m64nNk16, walks k in order.  W's rows are the mma's 16 (64), x's rows its 8 (N).
 * A block's first tiles of W are on their way before the kernel in front has ended.
 *
 * Invariant: a result is sum over k of steps of 16, ascending, from 0, whatever the tile, m or
 * ring.  Whether these are the bits of the shape's canonical algorithm is seen at run time
 * (gemm_autotune.cu); only then is it used. */
#include "dev/cuda/gemm/gemm.cuh"
#include "dev/cuda/wgmma.cuh"

#include <stdint.h>

enum { WIDE_KC = 64, WIDE_ROW = WIDE_KC * 2, WIDE_ALIGN = 1024 }; /* the same of wide_kernel; where its ring begins */
enum { KC = 128, CHUNKS = KC / 8, ROW_BYTES = KC * 2 };           /* of a ring slot's row: elements, 16-byte chunks, bytes */

struct small {
    const __nv_bfloat16 *w, *x, *bias; /* (n, k), (m, k), (n) or NULL */
    void *out;
    int64_t ld_out;
    int m, k;
    bool out_f32, add;
};

/* ---- the kernel ---- */

/* Where in a slot a 16-byte chunk lies: those of 8 neighbour rows are in different banks. For an
 * even number c, chunk_at(row, chunk ^ c) == chunk_at(row, chunk) ^ c * 16. */
static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return (uint32_t)(row * ROW_BYTES + ((chunk ^ (row & 7)) << 4));
}

static __device__ __forceinline__ void store(const struct small &p, int64_t m0, int row, int64_t col, float v) {
    if (row >= p.m) return;
    const int64_t at = (m0 + row) * p.ld_out + col;
    if (p.bias) v += __bfloat162float(p.bias[col]);
    if (!p.out_f32) ((__nv_bfloat16 *)p.out)[at] = __float2bfloat16_rn(v);
    else ((float *)p.out)[at] = p.add ? v + ((float *)p.out)[at] : v;
}

/* A block makes 16 WN columns of out for 16 MT rows, of which blockIdx.y says which. Its warps are
 * WN x WM: a warp holds 16 columns and MT / WM groups of 16 rows. A slot of the ring: 16 WN rows of W,
 * then 16 MT rows of x, of which those from m on are never written: what lies there reaches results
 * that are not stored. The first tiles of W are asked for before x need be there. */
template <int MT, int WN, int WM, int SLOTS> static __global__ void __launch_bounds__(32 * WN * WM) small_kernel(struct small p) {
    constexpr int BN = 16 * WN, BM = 16 * MT, ROWS = BN + BM, GROUPS = MT / WM, THREADS = 32 * WN * WM;
    constexpr int PASS = THREADS / CHUNKS; /* rows that the block copies at once */
    constexpr int W_PASSES = (BN + PASS - 1) / PASS, X_PASSES = BM / PASS;
    static_assert(X_PASSES * PASS == BM && GROUPS * WM == MT, "whole passes, whole groups");
    extern __shared__ __align__(WIDE_ALIGN) unsigned char ring[];
    const uint32_t ring0 = (uint32_t)__cvta_generic_to_shared(ring);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wn = warp % WN, wm = warp / WN;
    const int64_t n0 = (int64_t)blockIdx.x * BN, m0 = (int64_t)blockIdx.y * BM, pass = (int64_t)PASS * p.k;
    const int steps = p.k / KC, row0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const __nv_bfloat16 *w_src = p.w + (n0 + row0) * p.k + chunk * 8, *x_src = p.x + (m0 + row0) * p.k + chunk * 8;
    p.m -= (int)m0; /* rows from here on */

    const auto fill_w = [&](int slot) { /* the next step's rows */
                                        const uint32_t at = ring0 + (uint32_t)(slot * ROWS * ROW_BYTES);
#pragma unroll
                                        for (int i = 0; i < W_PASSES; i++)
                                            if (row0 + i * PASS < BN)
                                                cp_async16(at + chunk_at(row0 + i * PASS, chunk), w_src + i * pass);
                                        w_src += KC;
    };
    const auto fill_x = [&](int slot) {
        const uint32_t at = ring0 + (uint32_t)(slot * ROWS * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < X_PASSES; i++)
            if (row0 + i * PASS < p.m) cp_async16(at + chunk_at(BN + row0 + i * PASS, chunk), x_src + i * pass);
        x_src += KC;
    };
    pdl_launch_dependents();
#pragma unroll
    for (int s = 0; s < SLOTS - 1; s++)
        if (s < steps) fill_w(s);
    pdl_wait();
    float sum[GROUPS][2][4] = {};
#pragma unroll
    for (int s = 0; s < SLOTS - 1; s++) {
        if (s < steps) fill_x(s);
        cp_commit(); /* the first group has W of all of them */
    }
    /* ldmatrix: lane l names a row of matrix l / 8. W: rows 0-7 and 8-15 of k 0-7, then of k 8-15; x: k 0-7 and
     * 8-15 of rows 0-7, then of rows 8-15. */
    const uint32_t a_at = chunk_at(wn * 16 + lane % 16, lane / 16);
    const uint32_t b_at = chunk_at(BN + wm * GROUPS * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    int slot = 0, free_slot = SLOTS - 1; /* slot holds this step; free_slot is what the step before left */
    for (int step = 0; step < steps; step++) {
        cp_wait<SLOTS - 2>(); /* this thread's part of this step is there */
        __syncthreads();      /* everyone's is, and everyone has left free_slot */
        if (step + SLOTS - 1 < steps) {
            fill_w(free_slot);
            fill_x(free_slot);
        }
        cp_commit();
        const uint32_t at = ring0 + (uint32_t)(slot * ROWS * ROW_BYTES);
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
        free_slot = slot;
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
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

/* ---- the kernel for many columns (sm_90a): wgmma, which reads both operands from shared memory ---- */

/* A block of WG warpgroups makes 64 WG columns of out for all rows, at most 8 NB. A slot of the ring:
 * 64 WG rows of W, 8 NB rows of x, 64 elements of each. A slot is filled again two steps after it was
 * multiplied: one product may be under way. Built for another architecture it writes nothing, and so
 * is never chosen. */
template <int NB, int WG, int SLOTS> static __global__ void __launch_bounds__(128 * WG) wide_kernel(const struct small p) {
#if WGMMA_ENABLED
    constexpr int BN = 64 * WG, ROWS = BN + 8 * NB, PASS = 128 * WG / (WIDE_KC / 8), X_PASSES = (8 * NB + PASS - 1) / PASS;
    extern __shared__ __align__(WIDE_ALIGN) unsigned char ring[];
    const uint32_t ring0 = ((uint32_t)__cvta_generic_to_shared(ring) + WIDE_ALIGN - 1) & ~(uint32_t)(WIDE_ALIGN - 1);
    const int64_t n0 = (int64_t)blockIdx.x * BN, pass = (int64_t)PASS * p.k;
    const int steps = p.k / WIDE_KC, row0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const __nv_bfloat16 *w_src = p.w + (n0 + row0) * p.k + chunk * 8, *x_src = p.x + (int64_t)row0 * p.k + chunk * 8;
    const uint32_t to = ring0 + (uint32_t)(row0 * WIDE_ROW + ((chunk ^ (row0 & 7)) << 4)); /* PASS is a multiple of 8 */

    const auto fill_w = [&](int slot) {
#pragma unroll
        for (int i = 0; i < BN / PASS; i++) cp_async16(to + (uint32_t)((slot * ROWS + i * PASS) * WIDE_ROW), w_src + i * pass);
        w_src += WIDE_KC;
    };
    const auto fill_x = [&](int slot) {
#pragma unroll
        for (int i = 0; i < X_PASSES; i++)
            if (row0 + i * PASS < p.m) cp_async16(to + (uint32_t)((slot * ROWS + BN + i * PASS) * WIDE_ROW), x_src + i * pass);
        x_src += WIDE_KC;
    };
    pdl_launch_dependents();
#pragma unroll
    for (int s = 0; s < SLOTS - 2; s++)
        if (s < steps) fill_w(s);
    pdl_wait();
#pragma unroll
    for (int s = 0; s < SLOTS - 2; s++) {
        if (s < steps) fill_x(s);
        cp_commit();
    }
    const int group = WG == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); /* seen to be the same for the warp */
    float sum[NB][4] = {};
    int slot = 0, free_slot = SLOTS - 2;
    for (int step = 0; step < steps; step++) {
        cp_wait<SLOTS - 3>();
        fence_proxy_async(); /* what I copied is seen by wgmma */
        __syncthreads();     /* and everyone has left free_slot */
        if (step + SLOTS - 2 < steps) {
            fill_w(free_slot);
            fill_x(free_slot);
        }
        cp_commit();
        const uint32_t at = ring0 + (uint32_t)(slot * ROWS * WIDE_ROW);
        const uint32_t w = panel_desc_low(at + group * 64 * WIDE_ROW), x = panel_desc_low(at + BN * WIDE_ROW);
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < WIDE_KC / 16; ks++) wgmma_small_n<NB>(sum, w + ks * 2, x + ks * 2);
        wgmma_commit();
        wgmma_wait<1>();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        free_slot = free_slot + 1 == SLOTS ? 0 : free_slot + 1;
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
    void (*kernel)(struct small);
    int bn, bm, threads, bytes; /* columns and rows of a block; shared memory */
};
template <int MT, int WN, int WM, int SLOTS> static constexpr struct variant variant_of(void) {
    return {small_kernel<MT, WN, WM, SLOTS>, 16 * WN, 16 * MT, 32 * WN * WM, SLOTS * (16 * WN + 16 * MT) * ROW_BYTES};
}
template <int NB, int WG, int SLOTS> static constexpr struct variant wide_of(void) {
    return {wide_kernel<NB, WG, SLOTS>, 64 * WG, 8 * NB, 128 * WG, WIDE_ALIGN + SLOTS * (64 * WG + 8 * NB) * WIDE_ROW};
}
/* By the rows in units of 16. The last three cut the rows too: for products with few columns. */
#define OF_MT(MT)                                                                                                                \
    {                                                                                                                            \
        variant_of<MT, 1, MT, 6>(), variant_of<MT, 2, MT, 4>(), variant_of<MT, 4, 1, 3>(), wide_of < 2 * MT, 1, MT<6 ? 6 : 5>(), \
            wide_of < 2 * MT, 2, MT<6 ? 8 : 7>(), variant_of<1, 2, 1, 8>(), variant_of<2, 2, 2, 6>(), variant_of<3, 1, 3, 6>()   \
    }
static const struct variant variants[GEMM_SMALL_ROWS / 16][GEMM_N_SMALL] = {OF_MT(1), OF_MT(2), OF_MT(3),
                                                                            OF_MT(4), OF_MT(5), OF_MT(6)};
#undef OF_MT

int gemm_small(struct cuda *c, const struct cuda_gemm_args *a, int kind, bool *ran) {
    *ran = false;
    if (a->in != DT_BF16 || a->m > GEMM_SMALL_ROWS || a->k % KC || a->k > INT32_MAX) return 0;
    const int64_t mt = gemm_ceil_div(a->m, 16) - 1;
    const struct variant *v = &variants[mt][kind];
    bool *ready = &c->gemm->small_ready[mt][kind];
    if (a->n % v->bn || a->n / v->bn > INT32_MAX || (size_t)v->bytes > c->smem_max) return 0;
    if (!*ready) CU_TRY(cudaFuncSetAttribute((const void *)v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v->bytes));
    *ready = true;
    struct small p = {};
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
