/* mma_tile.cuh - a block's tile of a product of bf16 matrices with strides, by mma.sync m16n8k16 over tiles that cp.async loads
 * through a multi-stage shared-memory pipeline; for grouped GEMMs and those of heads.
 *
 * Rows of all operands are aligned to 16 bytes, and the reduction or the columns that a chunk of 8 is of are a multiple of 8.
 * Invariant: an element is a sum over its reduction in steps of 16, ascending, from 0, in the same instruction whatever the
 * tile. */
#ifndef VERLC_DEV_CUDA_MMA_TILE_CUH
#define VERLC_DEV_CUDA_MMA_TILE_CUH

#include "device/cuda/context.cuh"

#include <stdint.h>

typedef __nv_bfloat16 bf16;

enum { KC = 64 }; /* elements of the reduction in a stage */

/* ---- tiles in shared memory ---- */

/* 16-byte chunks of a tile whose rows have CHUNKS of them, swizzled: those of 8 neighbour rows are in different banks. */
template <int CHUNKS> static __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return (uint32_t)((row * CHUNKS + (chunk ^ (row & 7))) * 16);
}

/* A tile (SIZE, KC) of a matrix whose rows run along the reduction, or, TRANS, (KC, SIZE) of one whose columns are what the tile
 * has SIZE of. src: its first element; `size` and `left` are how much of each there is, what lies beyond reads as 0. */
template <int SIZE, int THREADS, bool TRANS>
static __device__ __forceinline__ void load_tile(uint32_t to, const bf16 *src, int64_t ld, int64_t size, int64_t left) {
    constexpr int CHUNKS = (TRANS ? SIZE : KC) / 8, ROWS = TRANS ? KC : SIZE;
    const int64_t rows = TRANS ? left : size, cols = TRANS ? size : left;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool take = row < rows && chunk * 8 < cols;
        cp_async16(to + chunk_at<CHUNKS>(row, chunk), take ? src + row * ld + chunk * 8 : src, take);
    }
}

/* Operand A of 16 rows from m on, or B of 16 columns from m on (b[0], b[1]: of the first 8), k in [k, k + 16). */
template <int SIZE, bool TRANS> static __device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t tile, int m, int k) {
    const int l = threadIdx.x % 32;
    if (TRANS) ldmatrix_x4_trans(a, tile + chunk_at<SIZE / 8>(k + l % 8 + l / 16 * 8, m / 8 + l / 8 % 2));
    else ldmatrix_x4(a, tile + chunk_at<KC / 8>(m + l % 16, k / 8 + l / 16));
}
template <int SIZE, bool TRANS> static __device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t tile, int n, int k) {
    const int l = threadIdx.x % 32;
    if (TRANS) ldmatrix_x4_trans(b, tile + chunk_at<SIZE / 8>(k + l % 8 + l / 8 % 2 * 8, n / 8 + l / 16));
    else ldmatrix_x4(b, tile + chunk_at<KC / 8>(n + l % 8 + l / 16 * 8, k / 8 + l / 8 % 2));
}

/* ---- a block's tile of out ---- */

/* out (m, n) = A . B over r, tile by tile; all pointers are at the tile's first element. */
struct tile {
    const bf16 *a, *b;
    int64_t lda, ldb, m, n, r; /* m, n: of out from here on */
    void *out;
    int64_t ld_out;
    bool out_f32, add;
};

template <int BM, int BN, int WM, int WN, int STAGES, bool AT, bool BT> static __device__ void tile_gemm(const struct tile &t) {
    constexpr int THREADS = 32 * WM * WN, MT = BM / WM / 16, NT = BN / WN / 16, A_BYTES = BM * KC * 2, BYTES = (BM + BN) * KC * 2;
    const uint32_t stages0 = smem_addr(&dynamic_shared<char>());
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / WN * (BM / WM), n0 = warp % WN * (BN / WN);
    const int64_t steps = (t.r + KC - 1) / KC;
    float sum[MT][2 * NT][4] = {};
    const auto fill = [&](int64_t step) {
        if (step < steps) {
            const uint32_t to = stages0 + (uint32_t)(step % STAGES) * BYTES;
            const int64_t r0 = step * KC;
            load_tile<BM, THREADS, AT>(to, t.a + (AT ? r0 * t.lda : r0), t.lda, t.m, t.r - r0);
            load_tile<BN, THREADS, BT>(to + A_BYTES, t.b + (BT ? r0 * t.ldb : r0), t.ldb, t.n, t.r - r0);
        }
        cp_commit();
    };
    for (int s = 0; s < STAGES - 1; s++) fill(s);
    for (int64_t step = 0; step < steps; step++) {
        cp_wait<STAGES - 2>();
        __syncthreads(); /* all threads' copies of this stage are done, and all have left the one before */
        fill(step + STAGES - 1);
        const uint32_t at = stages0 + (uint32_t)(step % STAGES) * BYTES;
#pragma unroll
        for (int k = 0; k < KC; k += 16) {
            uint32_t a[MT][4], b[NT][4];
#pragma unroll
            for (int i = 0; i < MT; i++) load_a<BM, AT>(a[i], at, m0 + i * 16, k);
#pragma unroll
            for (int j = 0; j < NT; j++) load_b<BN, BT>(b[j], at + A_BYTES, n0 + j * 16, k);
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    mma_bf16(sum[i][2 * j], a[i], b[j][0], b[j][1]);
                    mma_bf16(sum[i][2 * j + 1], a[i], b[j][2], b[j][3]);
                }
        }
    }
    cp_wait<0>();
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < 2 * NT; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = m0 + i * 16 + half * 8 + lane / 4, col = n0 + j * 8 + lane % 4 * 2;
                const float v0 = sum[i][j][2 * half], v1 = sum[i][j][2 * half + 1];
                const int64_t to = row * t.ld_out + col;
                if (row >= t.m || col >= t.n) continue; /* widths are even */
                if (!t.out_f32) {
                    uint32_t *const p = (uint32_t *)((bf16 *)t.out + to);
                    *p = t.add
                             ? pack_bf16(__fadd_rn(__uint_as_float(*p << 16), v0), __fadd_rn(__uint_as_float(*p & 0xffff0000u), v1))
                             : pack_bf16(v0, v1);
                } else {
                    float2 *const p = (float2 *)((float *)t.out + to);
                    *p = t.add ? make_float2(__fadd_rn(p->x, v0), __fadd_rn(p->y, v1)) : make_float2(v0, v1);
                }
            }
}

#endif
