/* grouped_gemm.cu - the CUDA backend's grouped GEMM: the rows of each expert by the expert's matrix; forward, dx and dw.
 *
 * One launch for all experts, whose blocks find their expert and tile of rows from the offsets on the device; the grid has room
 * for every load of that many rows, and blocks that are left over end at once.  bf16 whose rows are multiples of 16 bytes goes
 * to mma.sync m16n8k16 over tiles that cp.async loads through a multi-stage shared-memory pipeline, all else to the fallback of
 * gemm_fallback.cu.  How large a tile is follows from the rows of an average expert.  On Hopper experts with many rows, and dw,
 * go to WGMMA (grouped_gemm_sm90.cu), once that has been seen to give the same bits on this GPU.
 * Invariant: an element is a sum over its reduction in steps of 16, ascending, from 0, in the same instruction whatever the
 * tile; so a row's bits do not depend on the load of its expert, and dw += has the bits of dw added. */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/gemm/mma_tile.cuh"

#include "base/log.h"

#include <stdint.h>

enum { FEW_ROWS = 8 }; /* of an average expert: with fewer, forward and dx are left to mma.sync on Hopper too */

/* FWD and DX: blockIdx.y counts tiles of rows over all experts; blockIdx.x has the columns. */
template <int BM, int BN, int WM, int WN, int STAGES, bool BT>
static __global__ void __launch_bounds__(32 * WM * WN) rows_kernel(const struct gemm_grouped g) {
    int expert;
    int64_t row0, rows;
    pdl_launch_dependents();
    pdl_wait();
    if (!gemm_group_tile(g, BM, blockIdx.y, &expert, &row0, &rows)) return;
    const int64_t col0 = (int64_t)blockIdx.x * BN, width = BT ? g.k : g.n, r = BT ? g.n : g.k;
    const bf16 *const w = (const bf16 *)g.b + expert * g.n * g.k;
    struct tile t = {};
    t.a = (const bf16 *)g.a + row0 * r;
    t.b = BT ? w + col0 : w + col0 * g.k;
    t.lda = r;
    t.ldb = g.k;
    t.m = rows;
    t.n = width - col0;
    t.r = r;
    t.out_f32 = g.out_dt == DT_F32;
    t.out = t.out_f32 ? (void *)((float *)g.out + row0 * width + col0) : (void *)((bf16 *)g.out + row0 * width + col0);
    t.ld_out = width;
    tile_gemm<BM, BN, WM, WN, STAGES, false, BT>(t);
}

/* DW: blockIdx.z is the expert, whose rows are the reduction. */
template <int BM, int BN, int WM, int WN, int STAGES>
static __global__ void __launch_bounds__(32 * WM * WN) dw_kernel(const struct gemm_grouped g) {
    const int64_t n0 = (int64_t)blockIdx.y * BM, k0 = (int64_t)blockIdx.x * BN;
    pdl_launch_dependents();
    pdl_wait();
    const int64_t lo = g.offset[blockIdx.z], rows = g.offset[blockIdx.z + 1] - lo;
    if (rows == 0 && g.add) return;
    struct tile t = {};
    t.a = (const bf16 *)g.a + lo * g.n + n0;
    t.b = (const bf16 *)g.b + lo * g.k + k0;
    t.lda = g.n;
    t.ldb = g.k;
    t.m = g.n - n0;
    t.n = g.k - k0;
    t.r = rows;
    t.out_f32 = true;
    t.add = g.add;
    t.out = (float *)g.out + ((int64_t)blockIdx.z * g.n + n0) * g.k + k0;
    t.ld_out = g.k;
    tile_gemm<BM, BN, WM, WN, STAGES, true, true>(t);
}

/* ---- launch ---- */

struct variant {
    void (*fwd)(struct gemm_grouped), (*dx)(struct gemm_grouped), (*dw)(struct gemm_grouped); /* NULL: none */
    int bm, bn, threads, bytes;
};
template <int BM, int BN, int WM, int WN, int STAGES> static constexpr struct variant rows_of(void) {
    return {rows_kernel<BM, BN, WM, WN, STAGES, false>,
            rows_kernel<BM, BN, WM, WN, STAGES, true>,
            NULL,
            BM,
            BN,
            32 * WM * WN,
            STAGES * (BM + BN) * KC * 2};
}
template <int BM, int BN, int WM, int WN, int STAGES> static constexpr struct variant dw_of(void) {
    return {NULL, NULL, dw_kernel<BM, BN, WM, WN, STAGES>, BM, BN, 32 * WM * WN, STAGES * (BM + BN) * KC * 2};
}
/* For experts of so many rows on average, at most. */
static const struct variant by_rows[] = {rows_of<16, 64, 1, 4, 4>(), rows_of<64, 128, 2, 4, 3>(), rows_of<128, 128, 2, 4, 3>()};
static const struct variant dw_variant = dw_of<128, 128, 2, 4, 3>();

static bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

static int launch(struct cuda *c, const struct variant *v, void (*kernel)(struct gemm_grouped), dim3 grid,
                  const struct gemm_grouped &g) {
    if (grid.y > 65535) FAIL(ERR_UNSUPPORTED, "cuda: a grouped GEMM of %lld rows is too large", (long long)g.m);
    CU_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v->bytes));
    CU_TRY(cuda_launch_pdl(c, kernel, grid, v->threads, (size_t)v->bytes, g));
    return 0;
}

/* pre: bf16, aligned. */
static int grouped_mma(struct cuda *c, const struct gemm_grouped &g) {
    const int64_t average = g.m / g.experts, width = g.op == CUDA_GEMM_FWD ? g.n : g.k;
    if (g.op == CUDA_GEMM_DW) {
        const struct variant *const v = &dw_variant;
        return launch(c, v, v->dw,
                      dim3((unsigned)gemm_ceil_div(g.k, v->bn), (unsigned)gemm_ceil_div(g.n, v->bm), (unsigned)g.experts), g);
    }
    const struct variant *const v = &by_rows[average <= 16 ? 0 : average <= 96 ? 1 : 2];
    return launch(c, v, g.op == CUDA_GEMM_FWD ? v->fwd : v->dx,
                  dim3((unsigned)gemm_ceil_div(width, v->bn), (unsigned)gemm_group_tiles(&g, v->bm)), g);
}

/* ---- whether mma.sync and WGMMA give the same bits: checked once, on sums in f32, in which every order of addition shows ---- */

enum { CHECK_E = 4, CHECK_M = 333, CHECK_N = 328, CHECK_K = 1096 }; /* no multiples of a tile */
static const int32_t check_offset[CHECK_E + 1] = {0, 190, 190, 191, CHECK_M};

static size_t padded(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

static int check_bits(struct cuda *c, bool *same) {
    const size_t x = padded(CHECK_M * CHECK_K * 2), dy = padded(CHECK_M * CHECK_N * 2), w = padded(CHECK_E * CHECK_N * CHECK_K * 2);
    const size_t sums = padded(CHECK_E * CHECK_N * CHECK_K * 4); /* of dw, which are most */
    int differ = 1;
    void *block = NULL;
    TRY(cuda_scratch(c, CUDA_SCRATCH_AUTOTUNE, x + dy + w + 2 * sums + 2 * 256, &block));
    char *const at = (char *)block, *const one = at + x + dy + w, *const other = one + sums;
    int *const flag = (int *)(other + sums);
    int32_t *const offset = (int32_t *)(other + sums + 256);
    TRY(gemm_fill_test_values(c, tensor_2d(at, DT_BF16, CHECK_M, CHECK_K), 1, 1, 1));
    TRY(gemm_fill_test_values(c, tensor_2d(at + x, DT_BF16, CHECK_M, CHECK_N), 2, 0, 1));
    TRY(gemm_fill_test_values(c, tensor_2d(at + x + dy, DT_BF16, CHECK_E * CHECK_N, CHECK_K), 3, -1, 1));
    CU_TRY(cudaMemcpyAsync(offset, check_offset, sizeof check_offset, cudaMemcpyHostToDevice, c->stream));
    CU_TRY(cudaMemsetAsync(flag, 0, sizeof *flag, c->stream));
    struct gemm_grouped g = {};
    g.m = CHECK_M, g.n = CHECK_N, g.k = CHECK_K;
    g.in = DT_BF16, g.out_dt = DT_F32;
    g.offset = offset, g.experts = CHECK_E;
    for (const enum cuda_gemm_op op : {CUDA_GEMM_FWD, CUDA_GEMM_DX, CUDA_GEMM_DW}) {
        g.op = op;
        g.a = op == CUDA_GEMM_FWD ? at : at + x;
        g.b = op == CUDA_GEMM_DW ? at : at + x + dy;
        CU_TRY(cudaMemsetAsync(one, 0xff, sums, c->stream)); /* what one of them does not write must differ */
        CU_TRY(cudaMemsetAsync(other, 0xff, sums, c->stream));
        g.out = one;
        TRY(grouped_mma(c, g));
        g.out = other;
        TRY(gemm_grouped_sm90(c, &g));
        TRY(gemm_compare(c, one, other, sums, flag));
    }
    CU_TRY(cudaMemcpyAsync(&differ, flag, sizeof differ, cudaMemcpyDeviceToHost, c->stream));
    CU_TRY(cudaStreamSynchronize(c->stream));
    *same = !differ;
    return 0;
}

/* Whether WGMMA serves. Inside a capture nothing can be checked: then mma.sync does, with the same bits. */
static int wgmma_serves(struct cuda *c, const struct gemm_grouped &g, bool *yes) {
    *yes = false;
    if ((g.op != CUDA_GEMM_DW && g.m / g.experts < FEW_ROWS) || !gemm_grouped_sm90_takes(c, &g)) return 0;
    if (c->grouped == CUDA_UNCHECKED && !c->capturing) {
        bool same = false;
        TRY(check_bits(c, &same));
        c->grouped = same ? CUDA_SAME : CUDA_DIFFERS;
        if (!same) log_warn("cuda: the grouped GEMM by WGMMA is not bitwise identical to that by mma.sync, which serves alone");
    }
    *yes = c->grouped == CUDA_SAME;
    return 0;
}

static int grouped(struct cuda *c, const struct gemm_grouped &g) {
    bool wgmma = false;
    if (g.in != DT_BF16 || g.n % 8 || g.k % 8 || !aligned(g.a) || !aligned(g.b) || !aligned(g.out))
        return gemm_grouped_fallback(c, &g);
    TRY(wgmma_serves(c, g, &wgmma));
    return wgmma ? gemm_grouped_sm90(c, &g) : grouped_mma(c, g);
}

static struct gemm_grouped grouped_of(enum cuda_gemm_op op, struct tensor out, struct tensor a, const void *b,
                                      struct tensor offset) {
    struct gemm_grouped g = {};
    g.op = op;
    g.out = out.data;
    g.out_dt = out.dt;
    g.a = a.data;
    g.in = a.dt;
    g.b = b;
    g.m = a.dim[0];
    g.offset = (const int32_t *)offset.data;
    g.experts = (int)offset.dim[0] - 1;
    return g;
}

int cuda_grouped_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight_stack w, struct tensor offset) {
    struct gemm_grouped g = grouped_of(CUDA_GEMM_FWD, y, x, w.w.data, offset);
    g.n = w.w.n;
    g.k = w.w.k;
    return grouped(cuda_of(d), g);
}

int cuda_grouped_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight_stack w, struct tensor offset) {
    struct gemm_grouped g = grouped_of(CUDA_GEMM_DX, dx, dy, w.w.data, offset);
    g.n = w.w.n;
    g.k = w.w.k;
    return grouped(cuda_of(d), g);
}

int cuda_grouped_dw(struct dev *d, struct tensor dw, struct tensor dy, struct tensor x, struct tensor offset, bool add) {
    struct gemm_grouped g = grouped_of(CUDA_GEMM_DW, dw, dy, x.data, offset);
    g.n = dy.dim[1];
    g.k = x.dim[1];
    g.add = add;
    return grouped(cuda_of(d), g);
}
