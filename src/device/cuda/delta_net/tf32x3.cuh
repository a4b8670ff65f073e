/* tf32x3.cuh - products of f32 matrices on tensor cores, each as three of TF32 (Ootomo & Yokota 2022): x = hi + lo with 11 bits
 * each, a.b = lo.hi + hi.lo + hi.hi; lo.lo is left out, 2^-22 of a term.  What was bf16 has no lo, and no product with one is made.
 * A warp has 16 rows and N tiles of 8 columns.
 *
 * Invariant: a number is one chain of instructions over k, ascending, whose order the hardware fixes. */
#ifndef VERLC_DEV_CUDA_TF32X3_CUH
#define VERLC_DEV_CUDA_TF32X3_CUH

#include "device/cuda/ptx.cuh"

/* hi to nearest, lo by cutting bits off; by integers, since cvt.rna.tf32 is nine instructions. NaN comes back as lo. */
struct tf32_pair {
    uint32_t hi, lo;
};
static __device__ __forceinline__ tf32_pair tf32_split(float x) {
    const uint32_t kept = 0xffffe000; /* sign, exponent, 10 bits of mantissa */
    tf32_pair p;
    p.hi = (__float_as_uint(x) + 0x1000) & kept;
    p.lo = __float_as_uint(__fsub_rn(x, __uint_as_float(p.hi))) & kept;
    return p;
}

/* A number that TF32 holds. */
struct tf32_whole {
    float x;
};
static __device__ __forceinline__ tf32_pair tf32_split(tf32_whole x) { return {__float_as_uint(x.x), 0}; }
template <class X> struct tf32_parts {
    enum { LO = 1 };
};
template <> struct tf32_parts<tf32_whole> {
    enum { LO = 0 };
};
static __device__ __forceinline__ float tf32_of(float x) { return x; }
static __device__ __forceinline__ tf32_whole tf32_of(__nv_bfloat16 x) { return {__bfloat162float(x)}; }

/* Where a lane's numbers of a tile are: acc[i] in row g + 8 (i / 2), column 2t + i % 2. */
static __device__ __forceinline__ int tile_row(int i) { return ((int)threadIdx.x & 31) / 4 + (i & 2 ? 8 : 0); }
static __device__ __forceinline__ int tile_col(int i) { return ((int)threadIdx.x & 3) * 2 + (i & 1); }

/* A warp's tiles: rows [row, row + 16), columns from col on, those below cols; ALL: none is left out. With a branch a tile no load
 * of a tile begins before the one before it ends. */
template <bool ALL> struct tile_place {
    int row, col, cols;
    __device__ __forceinline__ bool has(int n) const { return ALL || col + 8 * n < cols; }
};
template <int N> static __device__ __forceinline__ void tiles_zero(float (&acc)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = 0;
}
/* acc += a (rows, k) . b (k, columns); a(i, k) and b(k, j) give elements, f32 or tf32_whole. k: a multiple of 8. */
template <int N, bool ALL, class A, class B>
static __device__ __forceinline__ void tiles_mm(float (&acc)[N][4], const tile_place<ALL> &at, int k, const A &a, const B &b) {
    enum { A_LO = tf32_parts<decltype(a(0, 0))>::LO, B_LO = tf32_parts<decltype(b(0, 0))>::LO };
    const int g = ((int)threadIdx.x & 31) / 4, t = (int)threadIdx.x & 3;
    for (int x = 0; x < k; x += 8) {
        const tf32_pair p[4] = {tf32_split(a(at.row + g, x + t)), tf32_split(a(at.row + g + 8, x + t)),
                                tf32_split(a(at.row + g, x + t + 4)), tf32_split(a(at.row + g + 8, x + t + 4))};
        const uint32_t hi[4] = {p[0].hi, p[1].hi, p[2].hi, p[3].hi}, lo[4] = {p[0].lo, p[1].lo, p[2].lo, p[3].lo};
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (!at.has(n)) break;
            const tf32_pair b0 = tf32_split(b(x + t, at.col + 8 * n + g)), b1 = tf32_split(b(x + t + 4, at.col + 8 * n + g));
            if (A_LO) mma_tf32(acc[n], lo, b0.hi, b1.hi);
            if (B_LO) mma_tf32(acc[n], hi, b0.lo, b1.lo);
            mma_tf32(acc[n], hi, b0.hi, b1.hi);
        }
    }
}
/* Sums over the columns of the warp's tiles of f(row, column, number), to part[row]. */
template <int N, bool ALL, class F>
static __device__ __forceinline__ void tiles_row_sums(float *part, const float (&acc)[N][4], const tile_place<ALL> &at,
                                                      const F &f) {
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
        const int i = at.row + tile_row(h);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int x = h; x < h + 2; x++)
                if (at.has(n)) sum = __fadd_rn(sum, f(i, at.col + 8 * n + tile_col(x), acc[n][x]));
        sum = __fadd_rn(sum, __shfl_xor_sync(WARP_ALL, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(WARP_ALL, sum, 2));
        if ((threadIdx.x & 3) == 0) part[i] = sum;
    }
}

#endif
